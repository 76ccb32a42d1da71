#include "operator/kube/auth.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "operator/kube/exec.h"

#define FAILED_PAUSE_NS DL_NS_PER_SECOND /* After a failure nothing is read for so long. */
#define EXPIRY_MARGIN_NS (10 * DL_NS_PER_SECOND)

/* One thing to be known by: from a file that may change, given once, or by a plugin. */
struct material {
    const char *file; /* Borrowed from the configuration; NULL: does not change. */
    char *text;
};

struct op_auth {
    struct op_loop *loop;
    const struct op_config *config;
    void (*ready)(void *context);
    void *context;
    struct material ca, cert, key, token;
    int64_t read_ns;   /* When files were read last. */
    int64_t failed_ns; /* When that failed last; 0: it did not. */
    struct dl_err failure;
    struct op_exec_run *plugin; /* Runs now, or NULL. */
    bool has_plugin_answer;
    int64_t plugin_expires_wall_ns; /* INT64_MAX: never. */
};

static void wipe(char **text)
{
    if (*text != NULL) {
        OPENSSL_cleanse(*text, strlen(*text));
        free(*text);
        *text = NULL;
    }
}

static enum dl_rc read_file(const char *path, char **out, struct dl_err *err)
{
    DL_AUTO_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        return dl_err_errno(err, DL_EDENIED, errno, "cannot read credentials from %s", path);
    }
    DL_AUTO_FREE char *text = calloc(1, OP_CONFIG_FILE_BYTES_MAX + 1);
    if (text == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to read %s", path);
    }
    size_t used = 0;
    ssize_t got = 0;
    while (used < OP_CONFIG_FILE_BYTES_MAX && (got = read(fd, text + used, OP_CONFIG_FILE_BYTES_MAX - used)) > 0) {
        used += (size_t)got;
    }
    if (got < 0 || used == 0 || used == OP_CONFIG_FILE_BYTES_MAX) {
        return dl_err_set(err, DL_EDENIED, "credentials in %s are empty, too long or cannot be read", path);
    }
    char *copy = strndup(text, used);
    OPENSSL_cleanse(text, used);
    if (copy == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to read %s", path);
    }
    *out = copy;
    return DL_OK;
}

static void take_text(struct material *material, char *text)
{
    wipe(&material->text);
    material->text = text;
}

static enum dl_rc reread(struct material *material, bool is_token, struct dl_err *err)
{
    char *text = NULL;
    if (material->file == NULL) {
        return DL_OK;
    }
    enum dl_rc rc = read_file(material->file, &text, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (is_token) {
        text[strcspn(text, "\r\n")] = 0;
    }
    take_text(material, text);
    return DL_OK;
}

static enum dl_rc read_all(struct op_auth *auth, int64_t now_ns, struct dl_err *err)
{
    struct material *all[] = {&auth->ca, &auth->cert, &auth->key, &auth->token};
    enum dl_rc rc = DL_OK;
    bool has_all = true;
    for (size_t i = 0; i < DL_COUNT_OF(all) && rc == DL_OK; i++) {
        rc = reread(all[i], all[i] == &auth->token, err);
        has_all = has_all && (all[i]->file == NULL || all[i]->text != NULL);
    }
    auth->read_ns = now_ns;
    if (rc != DL_OK && has_all) { /* What was good a minute ago may still be. */
        dl_warn("%s; the old ones are used", err->text);
        rc = DL_OK;
    }
    return rc;
}

static bool given(struct material *material, const char *file, const char *data)
{
    material->file = file;
    material->text = data != NULL ? strdup(data) : NULL;
    return data == NULL || material->text != NULL;
}

enum dl_rc op_auth_new(struct op_loop *loop, const struct op_config *config, void (*ready)(void *context),
                       void *context, struct op_auth **out, struct dl_err *err)
{
    struct op_auth *auth = calloc(1, sizeof *auth);
    if (auth == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for credentials");
    }
    *auth = (struct op_auth){.loop = loop, .config = config, .ready = ready, .context = context};
    enum dl_rc rc = DL_ENOMEM;
    if (!given(&auth->ca, config->ca_file, config->ca_data) ||
        !given(&auth->cert, config->cert_file, config->cert_data) ||
        !given(&auth->key, config->key_file, config->key_data) ||
        !given(&auth->token, config->token_file, config->token_file == NULL ? config->token : NULL)) {
        dl_err_set(err, rc, "no memory for credentials");
    } else {
        rc = read_all(auth, op_loop_now_ns(loop), err);
    }
    if (rc != DL_OK) {
        op_auth_free(auth);
        return rc;
    }
    *out = auth;
    return DL_OK;
}

void op_auth_free(struct op_auth *auth)
{
    if (auth != NULL) {
        op_exec_run_free(auth->plugin);
        wipe(&auth->ca.text);
        wipe(&auth->cert.text);
        wipe(&auth->key.text);
        wipe(&auth->token.text);
        free(auth);
    }
}

static enum dl_rc remember_failure(struct op_auth *auth, int64_t now_ns, enum dl_rc rc, struct dl_err *err)
{
    auth->failed_ns = now_ns;
    dl_err_set(&auth->failure, rc, "%s", err->text);
    return rc;
}

static void on_plugin(void *context, const struct op_exec_answer *answer)
{
    struct op_auth *auth = context;
    op_exec_run_free(auth->plugin);
    auth->plugin = NULL;
    if (answer->rc != DL_OK) {
        struct dl_err err = answer->err;
        dl_warn("%s", err.text);
        remember_failure(auth, op_loop_now_ns(auth->loop), answer->rc, &err);
    } else {
        auth->has_plugin_answer = true;
        auth->failed_ns = 0;
        auth->plugin_expires_wall_ns = answer->expires_wall_ns;
        take_text(&auth->token, answer->token != NULL ? strdup(answer->token) : NULL);
        if (answer->cert != NULL && answer->key != NULL) {
            take_text(&auth->cert, strdup(answer->cert));
            take_text(&auth->key, strdup(answer->key));
        }
    }
    auth->ready(auth->context);
}

static enum dl_rc check_plugin(struct op_auth *auth, int64_t now_ns, struct dl_err *err)
{
    if (auth->plugin != NULL) {
        return DL_AGAIN;
    }
    if (auth->has_plugin_answer && dl_wall_ns() < auth->plugin_expires_wall_ns - EXPIRY_MARGIN_NS) {
        return DL_OK;
    }
    enum dl_rc rc = op_exec_run_new(auth->loop, auth->config, OP_AUTH_EXEC_MS, on_plugin, auth, &auth->plugin, err);
    return rc == DL_OK ? DL_AGAIN : remember_failure(auth, now_ns, rc, err);
}

enum dl_rc op_auth_check(struct op_auth *auth, int64_t now_ns, struct dl_err *err)
{
    if (auth->failed_ns != 0 && now_ns - auth->failed_ns < FAILED_PAUSE_NS) {
        return dl_err_set(err, auth->failure.rc, "%s", auth->failure.text);
    }
    if (auth->read_ns == 0 || now_ns - auth->read_ns >= OP_AUTH_REREAD_MS * DL_NS_PER_MS) {
        enum dl_rc rc = read_all(auth, now_ns, err);
        if (rc != DL_OK) {
            return remember_failure(auth, now_ns, rc, err);
        }
    }
    auth->failed_ns = 0;
    return auth->config->exec.command != NULL ? check_plugin(auth, now_ns, err) : DL_OK;
}

void op_auth_reject(struct op_auth *auth)
{
    auth->read_ns = 0;
    auth->has_plugin_answer = false;
}

static bool set_blob(CURL *easy, CURLoption option, const char *text)
{
    struct curl_blob blob = {.data = (void *)(uintptr_t)text, .len = strlen(text), .flags = CURL_BLOB_COPY};
    return curl_easy_setopt(easy, option, &blob) == CURLE_OK;
}

static bool set_authorization(const struct op_auth *auth, CURL *easy, struct curl_slist **headers)
{
    const struct op_config *config = auth->config;
    if (auth->token.text != NULL) {
        size_t size = strlen(auth->token.text) + 32;
        char *line = malloc(size);
        if (line == NULL) {
            return false;
        }
        snprintf(line, size, "Authorization: Bearer %s", auth->token.text);
        struct curl_slist *grown = curl_slist_append(*headers, line);
        wipe(&line);
        *headers = grown != NULL ? grown : *headers;
        return grown != NULL;
    }
    return config->username == NULL ||
           (curl_easy_setopt(easy, CURLOPT_HTTPAUTH, (long)CURLAUTH_BASIC) == CURLE_OK &&
            curl_easy_setopt(easy, CURLOPT_USERNAME, config->username) == CURLE_OK &&
            curl_easy_setopt(easy, CURLOPT_PASSWORD, config->password != NULL ? config->password : "") == CURLE_OK);
}

/* libcurl takes the name to expect from the URL alone: with another name the URL keeps it and the connection goes to
 * the server (CURLOPT_CONNECT_TO), see op_client. */
enum dl_rc op_auth_apply(const struct op_auth *auth, CURL *easy, struct curl_slist **headers, struct dl_err *err)
{
    const struct op_config *config = auth->config;
    long verify = config->insecure_skip_tls_verify ? 0L : 1L;
    bool is_set = curl_easy_setopt(easy, CURLOPT_SSL_VERIFYPEER, verify) == CURLE_OK &&
                  curl_easy_setopt(easy, CURLOPT_SSL_VERIFYHOST, verify * 2) == CURLE_OK &&
                  (auth->ca.text == NULL || set_blob(easy, CURLOPT_CAINFO_BLOB, auth->ca.text)) &&
                  (auth->cert.text == NULL || set_blob(easy, CURLOPT_SSLCERT_BLOB, auth->cert.text)) &&
                  (auth->key.text == NULL || set_blob(easy, CURLOPT_SSLKEY_BLOB, auth->key.text)) &&
                  (config->proxy_url == NULL || curl_easy_setopt(easy, CURLOPT_PROXY, config->proxy_url) == CURLE_OK) &&
                  set_authorization(auth, easy, headers);
    return is_set ? DL_OK : dl_err_set(err, DL_ENOMEM, "no memory for the credentials of a request");
}
