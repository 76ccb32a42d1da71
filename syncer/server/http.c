#include <openssl/crypto.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

#define HEADER_BYTES 2048
#define PIECE_BYTES 16384
#define CONNECT_PATH "/v1/connect"
#define PATH_MAX_BYTES 64
#define AUTHORIZATION_MAX 512
#define ARGUMENT_MAX 128

bool sy_http_token_matches(const struct sy_server *server, struct lws *wsi)
{
    char given[AUTHORIZATION_MAX];
    char wanted[AUTHORIZATION_MAX];
    memset(given, 0, sizeof given);
    memset(wanted, 0, sizeof wanted);
    if (lws_hdr_copy(wsi, given, sizeof given, WSI_TOKEN_HTTP_AUTHORIZATION) <= 0) {
        return false;
    }
    snprintf(wanted, sizeof wanted, "Bearer %s", server->options->token);
    /* The whole of both buffers, so that time says nothing about how much of the token was right. */
    return CRYPTO_memcmp(given, wanted, sizeof given) == 0;
}

static struct sy_server *server_of(struct lws *wsi)
{
    return lws_context_user(lws_get_context(wsi));
}

static void drop_body(struct sy_server *server, struct sy_http_session *session)
{
    server->answers_pending -= session->body == NULL ? 0 : 1;
    free(dl_take(session->body));
}

static int answer(struct lws *wsi, struct sy_http_session *session, unsigned status, const char *type, char *body)
{
    uint8_t header[LWS_PRE + HEADER_BYTES];
    uint8_t *start = header + LWS_PRE;
    uint8_t *at = start;
    uint8_t *end = header + sizeof header - 1;
    struct sy_server *server = server_of(wsi);
    drop_body(server, session);
    session->body = body; /* Owned from here. */
    server->answers_pending += body == NULL ? 0 : 1;
    session->sent = 0;
    session->size = body == NULL ? 0 : strlen(body);
    if (body == NULL || lws_add_http_common_headers(wsi, status, type, session->size, &at, end) != 0 ||
        lws_add_http_header_by_name(wsi, (const unsigned char *)"cache-control:", (const unsigned char *)"no-store", 8,
                                    &at, end) != 0 ||
        lws_finalize_write_http_header(wsi, start, &at, end) != 0) {
        return -1;
    }
    lws_callback_on_writable(wsi);
    return 0;
}

static int answer_text(struct lws *wsi, struct sy_http_session *session, unsigned status, const char *text)
{
    return answer(wsi, session, status, "text/plain; charset=utf-8", strdup(text));
}

static int write_body(struct lws *wsi, struct sy_http_session *session)
{
    uint8_t piece[LWS_PRE + PIECE_BYTES];
    size_t count = DL_MIN(session->size - session->sent, sizeof piece - LWS_PRE);
    bool last = session->sent + count == session->size;
    memcpy(piece + LWS_PRE, session->body + session->sent, count);
    session->sent += count;
    if (lws_write(wsi, piece + LWS_PRE, count, last ? LWS_WRITE_HTTP_FINAL : LWS_WRITE_HTTP) < (int)count) {
        return -1;
    }
    if (!last) {
        lws_callback_on_writable(wsi);
        return 0;
    }
    drop_body(server_of(wsi), session);
    return lws_http_transaction_completed(wsi) ? -1 : 0;
}

static const char *cached(struct sy_server *server, char **text, int64_t *made_ns, char *(*make)(struct sy_server *))
{
    if (*text == NULL || server->now_ns - *made_ns >= SY_STATUS_CACHE_NS || server->ended) {
        free(*text);
        *text = make(server);
        *made_ns = server->now_ns;
    }
    return *text;
}

static int answer_ready(struct sy_server *server, struct lws *wsi, struct sy_http_session *session)
{
    if (server->ready && !server->ended && !server->leaving) {
        return answer_text(wsi, session, HTTP_STATUS_OK, "ready\n");
    }
    return answer_text(wsi, session, HTTP_STATUS_SERVICE_UNAVAILABLE,
                       server->ended     ? "the job has ended\n"
                       : server->leaving ? "saving, to leave\n"
                                         : "restoring the state\n");
}

static int get(struct sy_server *server, struct lws *wsi, struct sy_http_session *session, const char *path)
{
    if (strcmp(path, "/healthz") == 0) {
        return answer_text(wsi, session, HTTP_STATUS_OK, "ok\n");
    }
    if (strcmp(path, "/readyz") == 0) {
        return answer_ready(server, wsi, session);
    }
    if (strcmp(path, "/metrics") == 0) {
        const char *text = cached(server, &server->metrics_text, &server->metrics_ns, sy_metrics_text);
        return answer(wsi, session, HTTP_STATUS_OK, "text/plain; version=0.0.4; charset=utf-8",
                      text == NULL ? NULL : strdup(text));
    }
    if (strcmp(path, "/status") == 0) {
        const char *text = cached(server, &server->status_text, &server->status_ns, sy_status_json);
        return answer(wsi, session, HTTP_STATUS_OK, "application/json", text == NULL ? NULL : strdup(text));
    }
    if (strcmp(path, "/checkpoints") == 0) {
        return answer(wsi, session, HTTP_STATUS_OK, "application/json", sy_checkpoints_json(server));
    }
    if (strcmp(path, CONNECT_PATH) == 0) {
        return answer_text(wsi, session, 426,
                           "this is a WebSocket: connect with subprotocol " DL_WIRE_SUBPROTOCOL "\n");
    }
    return answer_text(
        wsi, session, HTTP_STATUS_NOT_FOUND,
        "nothing here; try /healthz /readyz /status /metrics /checkpoints, or POST /stop /finish /drain /checkpoint\n");
}

/* --- commands: POST with the token ---------------------------------------------------------------------------------- */

struct reply {
    unsigned status;
    char *body; /* malloc'ed */
};

static struct reply accepted(const char *text)
{
    return (struct reply){202, strdup(text)};
}

static struct reply refused(enum dl_rc rc, const struct dl_err *err)
{
    char *text = NULL;
    unsigned status = rc == DL_ENOTFOUND ? HTTP_STATUS_NOT_FOUND : HTTP_STATUS_CONFLICT;
    return (struct reply){status, asprintf(&text, "%s\n", err->text) < 0 ? NULL : text};
}

static struct reply stop(struct sy_server *server, const struct sy_http_session *session)
{
    (void)session;
    sy_core_on_stop_request(server->core, server->now_ns, DL_STOP_REQUESTED, "a stop was requested");
    sy_server_actions(server);
    return accepted("stopping: fragments are merged once more\n");
}

static struct reply finish(struct sy_server *server, const struct sy_http_session *session)
{
    (void)session;
    sy_core_on_stop_request(server->core, server->now_ns, DL_STOP_SUCCEEDED, "another shard has finished");
    sy_server_actions(server);
    return accepted("finishing: fragments are merged once more\n");
}

static struct reply drain(struct sy_server *server, const struct sy_http_session *session)
{
    (void)session;
    sy_server_leave(server);
    return accepted("saving: this process ends, the job does not\n");
}

static struct reply checkpoint(struct sy_server *server, const struct sy_http_session *session)
{
    struct dl_err err;
    uint64_t id = 0;
    if (session->id[0] != 0 && !sy_checkpoint_id_parse(session->id, &id)) {
        return refused(dl_err_set(&err, DL_EINVAL, "'%s' is no checkpoint's id: those look like 3.1", session->id),
                       &err);
    }
    enum dl_rc rc = sy_checkpoint_begin(server, session->name, &id, &err);
    char text[SY_CHECKPOINT_ID_MAX];
    sy_checkpoint_id_text(id, text);
    return rc == DL_OK ? accepted(text) : refused(rc, &err);
}

static struct reply unpin(struct sy_server *server, const struct sy_http_session *session)
{
    struct dl_err err;
    uint64_t id = 0;
    enum dl_rc rc = sy_checkpoint_id_parse(session->id, &id)
                        ? sy_checkpoint_remove(server, id, &err)
                        : dl_err_set(&err, DL_EINVAL, "say which checkpoint: POST /unpin?id=3.1");
    return rc == DL_OK ? accepted("removing it\n") : refused(rc, &err);
}

static const struct sy_http_command {
    const char *path;
    struct reply (*run)(struct sy_server *server, const struct sy_http_session *session);
} commands[] = {
    {"/stop", stop}, {"/finish", finish}, {"/drain", drain}, {"/checkpoint", checkpoint}, {"/unpin", unpin},
};

static int run_command(struct sy_server *server, struct lws *wsi, struct sy_http_session *session)
{
    const struct sy_http_command *command = dl_take(session->command);
    dl_info("command over http path=%s id=%s name=%s", command->path, session->id, session->name);
    struct reply reply = command->run(server, session);
    return answer(wsi, session, reply.status, "text/plain; charset=utf-8", reply.body);
}

/* Of the query; too long, it is cut and then refused. */
static void take_argument(struct lws *wsi, const char *name, char *out, int size)
{
    char value[ARGUMENT_MAX + 16] = "";
    const char *text = lws_get_urlarg_by_name(wsi, name, value, (int)sizeof value);
    snprintf(out, (size_t)size, "%s", text == NULL ? "" : text);
}

static int on_post(struct sy_server *server, struct lws *wsi, struct sy_http_session *session, const char *path)
{
    char length[24] = "0";
    for (size_t i = 0; i < DL_COUNT_OF(commands); i++) {
        session->command = strcmp(path, commands[i].path) == 0 ? &commands[i] : session->command;
    }
    if (session->command == NULL) {
        return answer_text(wsi, session, HTTP_STATUS_NOT_FOUND,
                           "POST is for /stop /finish /drain /checkpoint /unpin\n");
    }
    if (!sy_http_token_matches(server, wsi)) {
        session->command = NULL;
        server->counters.upgrades_denied++;
        return answer_text(wsi, session, HTTP_STATUS_UNAUTHORIZED, "the bearer token is missing or wrong\n");
    }
    take_argument(wsi, "id=", session->id, sizeof session->id);
    take_argument(wsi, "name=", session->name, sizeof session->name);
    lws_hdr_copy(wsi, length, sizeof length, WSI_TOKEN_HTTP_CONTENT_LENGTH);
    return strtoull(length, NULL, 10) > 0 ? 0 : run_command(server, wsi, session); /* A body is read, not used. */
}

static int on_request(struct sy_server *server, struct lws *wsi, struct sy_http_session *session, const char *path)
{
    if (lws_hdr_total_length(wsi, WSI_TOKEN_POST_URI) > 0) {
        return on_post(server, wsi, session, path);
    }
    if (lws_hdr_total_length(wsi, WSI_TOKEN_GET_URI) > 0) {
        return get(server, wsi, session, path);
    }
    return answer_text(wsi, session, HTTP_STATUS_METHOD_NOT_ALLOWED, "use GET or POST\n");
}

/* Who may speak WebSocket here. Returns 0 to go on, 1 when answered. */
static int on_upgrade(struct sy_server *server, struct lws *wsi, struct sy_http_session *session)
{
    char path[PATH_MAX_BYTES] = "";
    char protocol[PATH_MAX_BYTES] = "";
    unsigned status = 0;
    const char *text = NULL;
    lws_hdr_copy(wsi, path, sizeof path, WSI_TOKEN_GET_URI);
    lws_hdr_copy(wsi, protocol, sizeof protocol, WSI_TOKEN_PROTOCOL);
    if (lws_get_opaque_user_data(wsi) == &server->health_fd || strcmp(path, CONNECT_PATH) != 0) {
        status = HTTP_STATUS_NOT_FOUND;
        text = "no WebSocket here; it is at " CONNECT_PATH;
    } else if (!sy_http_token_matches(server, wsi)) {
        status = HTTP_STATUS_UNAUTHORIZED;
        text = "the bearer token is missing or wrong";
    } else if (strcmp(protocol, DL_WIRE_SUBPROTOCOL) != 0) {
        status = HTTP_STATUS_BAD_REQUEST;
        text = "the subprotocol must be " DL_WIRE_SUBPROTOCOL;
    } else if (server->conn_count >= server->conns_max) {
        status = HTTP_STATUS_SERVICE_UNAVAILABLE;
        text = "too many connections";
    }
    if (text == NULL) {
        return 0;
    }
    char peer[64] = "";
    lws_get_peer_simple(wsi, peer, sizeof peer);
    server->counters.upgrades_denied++;
    dl_warn("upgrade denied peer=%s status=%u reason=\"%s\"", peer, status, text);
    (void)session;
    return lws_return_http_status(wsi, status, text) != 0 ? -1 : 1;
}

int sy_http_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size)
{
    if (reason == LWS_CALLBACK_OPENSSL_PERFORM_CLIENT_CERT_VERIFICATION) {
        return size == 1 ? 0 : 1; /* What OpenSSL found; libwebsockets leaves the last word to this callback. */
    }
    struct sy_server *server = server_of(wsi);
    struct sy_http_session *session = user;
    switch ((int)reason) {
    case LWS_CALLBACK_HTTP_CONFIRM_UPGRADE: return on_upgrade(server, wsi, session);
    case LWS_CALLBACK_HTTP: return on_request(server, wsi, session, in == NULL ? "" : (const char *)in);
    case LWS_CALLBACK_HTTP_BODY_COMPLETION: return session->command != NULL ? run_command(server, wsi, session) : 0;
    case LWS_CALLBACK_HTTP_WRITEABLE: return session->body == NULL ? 0 : write_body(wsi, session);
    case LWS_CALLBACK_CLOSED_HTTP:
    case LWS_CALLBACK_HTTP_DROP_PROTOCOL:
        if (session != NULL) {
            drop_body(server, session);
        }
        return 0;
    default: return 0;
    }
}
