/* A call as a libcurl transfer. */
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "operator/kube/client_internal.h"

#define CONNECT_TIMEOUT_MS 10000L
#define KEEP_IDLE_S 30L
#define KEEP_EVERY_S 10L

static size_t on_bytes(char *bytes, size_t unit, size_t count, void *context)
{
    struct op_call *call = context;
    size_t size = unit * count;
    long status = 0;
    call->heard_ns = op_loop_now_ns(call->client->loop);
    curl_easy_getinfo(call->transfer.easy, CURLINFO_RESPONSE_CODE, &status);
    if (call->is_cancelled) {
        return 0;
    }
    if (call->request.stream != NULL && status >= 200 && status < 300) {
        call->client->is_in_curl = true;
        bool goes_on = call->request.stream(call->request.context, bytes, size);
        call->client->is_in_curl = false;
        return goes_on && !call->is_cancelled ? size : 0;
    }
    dl_buf_append(&call->answer, bytes, size);
    call->is_too_large = call->answer.failed;
    return call->answer.failed ? 0 : size;
}

static bool set_method(struct op_call *call, CURL *easy)
{
    const struct op_request *request = &call->request;
    bool is_set = curl_easy_setopt(easy, CURLOPT_HTTPGET, 1L) == CURLE_OK;
    if (request->body != NULL) {
        is_set = is_set && curl_easy_setopt(easy, CURLOPT_POST, 1L) == CURLE_OK &&
                 curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)request->size) == CURLE_OK &&
                 curl_easy_setopt(easy, CURLOPT_POSTFIELDS, request->body) == CURLE_OK;
    }
    return is_set && curl_easy_setopt(easy, CURLOPT_CUSTOMREQUEST, request->method) == CURLE_OK;
}

static bool add_header(struct op_call *call, const char *name, const char *value)
{
    DL_AUTO_FREE char *line = NULL;
    if (asprintf(&line, "%s:%s%s", name, value[0] != 0 ? " " : "", value) < 0) {
        line = NULL;
        return false;
    }
    struct curl_slist *grown = curl_slist_append(call->headers, line);
    call->headers = grown != NULL ? grown : call->headers;
    return grown != NULL;
}

static bool set_common(struct op_call *call, CURL *easy)
{
    return curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, on_bytes) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_WRITEDATA, call) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, call->curl_error) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, CONNECT_TIMEOUT_MS) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_TCP_KEEPALIVE, 1L) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_TCP_KEEPIDLE, KEEP_IDLE_S) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_TCP_KEEPINTVL, KEEP_EVERY_S) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_USERAGENT, call->client->user_agent) == CURLE_OK &&
           add_header(call, "Accept", "application/json") && add_header(call, "Expect", "");
}

static enum dl_rc prepare(struct op_call *call, CURL *easy, struct dl_err *err)
{
    struct op_client *client = call->client;
    if (!set_common(call, easy) || !set_method(call, easy) ||
        (call->request.body != NULL && !add_header(call, "Content-Type", call->content_type))) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a request");
    }
    if (call->is_foreign) {
        bool is_set = curl_easy_setopt(easy, CURLOPT_URL, call->path) == CURLE_OK &&
                      curl_easy_setopt(easy, CURLOPT_PROXY, "") == CURLE_OK;
        return is_set ? DL_OK : dl_err_set(err, DL_EINVAL, "not a URL: %.120s", call->path);
    }
    DL_AUTO_FREE char *url = NULL;
    if (asprintf(&url, "%s%s", client->base_url, call->path) < 0) {
        url = NULL;
    }
    if (url == NULL || curl_easy_setopt(easy, CURLOPT_URL, url) != CURLE_OK ||
        curl_easy_setopt(easy, CURLOPT_CONNECT_TO, client->connect_to) != CURLE_OK) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a request");
    }
    return op_auth_apply(client->auth, easy, &call->headers, err);
}

enum dl_rc op_call_launch(struct op_call *call, struct dl_err *err)
{
    dl_buf_clear(&call->answer);
    call->is_too_large = false;
    call->curl_error[0] = 0;
    CURL *easy = call->transfer.easy = curl_easy_init();
    enum dl_rc rc = easy == NULL ? dl_err_set(err, DL_ENOMEM, "no memory for a request") : prepare(call, easy, err);
    if (rc == DL_OK && curl_easy_setopt(easy, CURLOPT_HTTPHEADER, call->headers) != CURLE_OK) {
        rc = dl_err_set(err, DL_ENOMEM, "no memory for a request");
    }
    if (rc == DL_OK) {
        rc = op_transfer_add(call->client->loop, &call->transfer, err);
    }
    if (rc != DL_OK) {
        op_call_land(call);
    }
    return rc;
}

void op_call_land(struct op_call *call)
{
    op_transfer_remove(call->client->loop, &call->transfer);
    curl_easy_cleanup(call->transfer.easy);
    call->transfer.easy = NULL;
    curl_slist_free_all(call->headers);
    call->headers = NULL;
}

/* With tls-server-name the URL carries that name, for libcurl to check, and the connection goes to the server's own. */
static enum dl_rc set_named_base(struct op_client *client, CURLU *url, struct dl_err *err)
{
    char *host = NULL, *port = NULL, *base = NULL;
    DL_AUTO_FREE char *rule = NULL;
    const char *name = client->config.tls_server_name;
    enum dl_rc rc = DL_OK;
    if (curl_url_get(url, CURLUPART_HOST, &host, 0) != CURLUE_OK ||
        curl_url_get(url, CURLUPART_PORT, &port, CURLU_DEFAULT_PORT) != CURLUE_OK ||
        curl_url_set(url, CURLUPART_HOST, name, 0) != CURLUE_OK ||
        curl_url_get(url, CURLUPART_URL, &base, 0) != CURLUE_OK) {
        rc = dl_err_set(err, DL_EINVAL, "tls-server-name '%s' cannot be used", name);
    } else if (asprintf(&rule, "%s:%s:%s:%s", name, port, host, port) < 0) {
        rule = NULL;
        rc = dl_err_set(err, DL_ENOMEM, "no memory for the client");
    } else if ((client->connect_to = curl_slist_append(NULL, rule)) == NULL ||
               (client->base_url = strdup(base)) == NULL) {
        rc = dl_err_set(err, DL_ENOMEM, "no memory for the client");
    }
    curl_free(host);
    curl_free(port);
    curl_free(base);
    return rc;
}

enum dl_rc op_client_set_base(struct op_client *client, struct dl_err *err)
{
    const char *server = client->config.server;
    CURLU *url = curl_url();
    enum dl_rc rc = DL_OK;
    if (url == NULL || curl_url_set(url, CURLUPART_URL, server, 0) != CURLUE_OK) {
        rc = dl_err_set(err, DL_EINVAL, "'%.120s' is not the address of an API server (%s)", server,
                        client->config.origin != NULL ? client->config.origin : "");
    } else if (client->config.tls_server_name != NULL) {
        rc = set_named_base(client, url, err);
    } else if ((client->base_url = strdup(server)) == NULL) {
        rc = dl_err_set(err, DL_ENOMEM, "no memory for the client");
    }
    curl_url_cleanup(url);
    for (size_t size = rc == DL_OK ? strlen(client->base_url) : 0; size > 0 && client->base_url[size - 1] == '/';
         size--) {
        client->base_url[size - 1] = 0;
    }
    return rc;
}
