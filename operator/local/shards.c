#include "operator/local/shards.h"

#include <curl/curl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/buf.h"
#include "common/mem.h"
#include "common/spec.h"
#include "operator/local/certificates.h"

#define TIMEOUT_MS 10000L
#define ANSWER_BYTES_MAX (4u << 20)

uint32_t op_shards_count(const struct op_rundir *dir)
{
    uint32_t count = 0;
    char name[48], path[OP_PATH_MAX];
    for (; count < DL_SPEC_SHARDS_MAX; count++) {
        snprintf(name, sizeof name, "state/shard-%u", count);
        op_rundir_path(dir, name, path);
        if (access(path, F_OK) != 0) {
            break;
        }
    }
    return count;
}

static size_t on_body(char *bytes, size_t size, size_t count, void *context)
{
    dl_buf_append(context, bytes, size * count);
    return size * count;
}

/* `ca` "": the run speaks no TLS. */
static enum dl_rc perform(CURL *easy, const char *url, const char *ca, const char *authorization, bool post,
                          struct dl_buf *body, long *status, struct dl_err *err)
{
    char why[CURL_ERROR_SIZE] = "";
    struct curl_slist *headers = curl_slist_append(NULL, authorization);
    curl_easy_setopt(easy, CURLOPT_URL, url);
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, headers);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_body);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, body);
    curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, why);
    curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, TIMEOUT_MS);
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_PROXY, "");
    if (ca[0] != 0) {
        curl_easy_setopt(easy, CURLOPT_CAINFO, ca);
    }
    if (post) {
        curl_easy_setopt(easy, CURLOPT_POST, 1L);
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE, 0L);
    }
    CURLcode code = curl_easy_perform(easy);
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, status);
    curl_slist_free_all(headers);
    return code == CURLE_OK ? DL_OK
                            : dl_err_set(err, DL_ENET, "asking %s: %s (does the run go on?)", url,
                                         why[0] != 0 ? why : curl_easy_strerror(code));
}

enum dl_rc op_shard_ask(const struct op_rundir *dir, uint32_t shard, bool post, const char *path, char **out,
                        struct dl_err *err)
{
    char name[48], file[OP_PATH_MAX], ca[OP_PATH_MAX], url[1024], token[OP_TOKEN_BYTES_MAX],
        authorization[OP_TOKEN_BYTES_MAX + 32];
    DL_AUTO_FREE char *address = NULL;
    size_t size = 0;
    snprintf(name, sizeof name, "ports/shard-%u", shard);
    op_rundir_path(dir, name, file);
    enum dl_rc rc = op_file_read(file, 256, &address, &size, err);
    if (rc != DL_OK) {
        return dl_err_set(err, DL_ENET, "shard %u of the run in %s is not up", shard, dir->path);
    }
    rc = op_rundir_read_token(dir, token, err);
    CURL *easy = rc == DL_OK ? curl_easy_init() : NULL;
    if (easy == NULL) {
        return rc != DL_OK ? rc : dl_err_set(err, DL_ENOMEM, "asking shard %u: no memory", shard);
    }
    bool is_tls = op_certificates_there(dir, ca);
    snprintf(url, sizeof url, "http%s://%.*s%s", is_tls ? "s" : "", (int)strcspn(address, "\r\n"), address, path);
    snprintf(authorization, sizeof authorization, "Authorization: Bearer %s", token);
    struct dl_buf body;
    long status = 0;
    dl_buf_init(&body, ANSWER_BYTES_MAX);
    rc = perform(easy, url, ca, authorization, post, &body, &status, err);
    curl_easy_cleanup(easy);
    char *text = dl_buf_take(&body);
    if (rc == DL_OK && (text == NULL || status / 100 != 2)) {
        rc =
            dl_err_set(err, DL_EINVAL, "shard %u says: %.*s", shard, text == NULL ? 0 : (int)strcspn(text, "\n"), text);
    }
    if (rc != DL_OK) {
        free(text);
        return rc;
    }
    *out = text;
    return DL_OK;
}
