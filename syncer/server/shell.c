#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

#define RECEIVE_BYTES 16384 /* Of HTTP and of what comes before an upgrade is answered; the rest is read by socket.c. */
#define TRANSMIT_BYTES (2 * 1024 * 1024)
#define TICK_NS (250 * DL_NS_PER_MS)
#define PING_SECONDS 20
#define PING_HANGUP_SECONDS 120 /* The core's own timeout comes first; this is for what never said HELLO. */
#define FILES_MIN 4096
#define ANSWER_NS DL_NS_PER_SECOND /* For HTTP answers to get out before the process leaves. */

struct ws_session {
    struct sy_conn *conn;
};

static struct sy_server *server_of(struct lws *wsi)
{
    return lws_context_user(lws_get_context(wsi));
}

/* --- WebSocket ------------------------------------------------------------------------------------------------------
 */

/* Control messages always go out; a chunk waits for a later turn when this one has been long. */
static bool is_its_turn(struct sy_conn *conn)
{
    struct sy_server *server = conn->server;
    if (conn->pong_due || conn->first != NULL || conn->sending == NULL ||
        sy_turn_may_send(&server->turn, &conn->turn_sent, server->now_ns)) {
        return true;
    }
    conn->blocked_ns = server->now_ns; /* The socket does take something. */
    lws_callback_on_writable(conn->wsi);
    return false;
}

static bool on_writeable(struct sy_conn *conn)
{
    return sy_socket_take(conn) && (!is_its_turn(conn) || sy_conn_writeable(conn));
}

static int ws_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size)
{
    struct sy_server *server = server_of(wsi);
    struct ws_session *session = user;
    bool alive = true;
    (void)in;
    (void)size;
    switch ((int)reason) {
    case LWS_CALLBACK_ESTABLISHED:
        server->now_ns = dl_now_ns();
        session->conn = sy_conn_new(server, wsi);
        alive = session->conn != NULL;
        lws_callback_on_writable(wsi); /* Then libwebsockets has done with what came together with the request. */
        break;
    case LWS_CALLBACK_RECEIVE:
        server->now_ns = dl_now_ns();
        session->conn->is_deaf = true;
        sy_conn_end(session->conn, SY_LEAVE_PROTOCOL, LWS_CLOSE_STATUS_PROTOCOL_ERR,
                    "frames came before the upgrade was answered");
        sy_server_actions(server);
        break;
    case LWS_CALLBACK_SERVER_WRITEABLE:
        server->now_ns = dl_now_ns();
        alive = session->conn == NULL || on_writeable(session->conn);
        break;
    case LWS_CALLBACK_CLOSED:
        server->now_ns = dl_now_ns();
        if (session->conn != NULL) {
            sy_conn_closed(dl_take(session->conn));
            sy_server_actions(server);
        }
        break;
    default: break;
    }
    return alive ? 0 : -1;
}

/* --- descriptors of our own: listening sockets, signals -------------------------------------------------------------
 */

static void accept_all(struct sy_server *server, int fd, struct lws_vhost *vhost)
{
    for (;;) {
        int accepted = -1;
        struct dl_err err;
        enum dl_rc rc = sy_listen_accept(fd, &accepted, &err);
        if (rc == DL_AGAIN) {
            return;
        }
        if (rc != DL_OK) {
            dl_warn("connection turned away error=\"%s\"", err.text);
            return;
        }
        server->now_ns = dl_now_ns();
        struct lws *wsi = lws_adopt_socket_vhost(vhost, accepted); /* Closes it on failure. */
        if (wsi != NULL && vhost == server->health_vhost) {
            /* The vhost would not tell later: a Host header may move a connection to another one. */
            lws_set_opaque_user_data(wsi, &server->health_fd);
        }
    }
}

/* After STOP everybody may take what is still on its way and close; the last ones are cut off. */
static void check_end(struct sy_server *server, const struct sy_core_view *view)
{
    if (!server->ended && view->phase == SY_ENDED) {
        server->ended = true;
        server->end.result = view->stop_result;
        server->end_deadline_ns = server->now_ns + (int64_t)(server->spec->sync.finish_seconds * 1e9);
    }
}

void sy_server_leave(struct sy_server *server)
{
    struct sy_core_view view;
    sy_core_view(server->core, server->now_ns, &view);
    check_end(server, &view);
    if (server->leaving || server->ended) { /* Asked twice, or nothing is left to save: whoever asks has no time. */
        server->leave_deadline_ns = server->end_deadline_ns = server->now_ns;
        return;
    }
    server->leaving = true;
    server->leave_deadline_ns = server->now_ns + (int64_t)(server->spec->sync.finish_seconds * 1e9);
    sy_core_on_drain(server->core, server->now_ns);
    sy_server_actions(server);
}

static void on_signal(struct sy_server *server)
{
    struct signalfd_siginfo info;
    while (read(server->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        server->now_ns = dl_now_ns();
        dl_info("signal received signal=%u leaving=%s", info.ssi_signo, server->leaving ? "already" : "now");
        sy_server_leave(server);
    }
}

static int file_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size)
{
    struct sy_server *server = server_of(wsi);
    (void)user;
    (void)in;
    (void)size;
    if (reason == LWS_CALLBACK_RAW_RX_FILE) {
        int fd = lws_get_socket_fd(wsi);
        if (fd == server->listen_fd) {
            accept_all(server, fd, server->vhost);
        } else if (fd == server->health_fd) {
            accept_all(server, fd, server->health_vhost);
        } else if (fd == server->signal_fd) {
            on_signal(server);
        } else {
            sy_sockets_ready(server);
        }
    } else if (reason == LWS_CALLBACK_EVENT_WAIT_CANCELLED && lws_get_vhost(wsi) == server->vhost) {
        server->now_ns = dl_now_ns();
        sy_server_take_results(server);
        sy_server_actions(server);
    }
    return 0;
}

static const struct lws_protocols protocols[] = {
    {.name = "http",
     .callback = sy_http_callback,
     .per_session_data_size = sizeof(struct sy_http_session),
     .rx_buffer_size = 4096},
    {.name = DL_WIRE_SUBPROTOCOL,
     .callback = ws_callback,
     .per_session_data_size = sizeof(struct ws_session),
     .rx_buffer_size = RECEIVE_BYTES,
     .tx_packet_size = TRANSMIT_BYTES},
    {.name = "files", .callback = file_callback},
    {0},
};

/* --- time -----------------------------------------------------------------------------------------------------------
 */

static void log_summary(struct sy_server *server, const struct sy_core_view *view)
{
    if (view->rounds_merged == server->summary_rounds) {
        return;
    }
    server->summary_rounds = view->rounds_merged;
    dl_info("training phase=%s rounds=%" PRIu64 " round=%" PRIu64
            " fragment=%u have=%u need=%u learners=%u step=%" PRIu64 " tokens=%" PRIu64 " loss=%.4f goodput=%.3f",
            sy_phase_name(view->phase), view->rounds_merged, server->last_round, server->last_fragment,
            server->last_have, view->quorum_need, view->connected, view->step, view->tokens, (double)view->loss,
            view->goodput);
}

static void schedule_tick(struct sy_server *server);

static void on_tick(lws_sorted_usec_list_t *timer)
{
    struct sy_server *server = lws_container_of(timer, struct sy_server, tick_timer);
    server->now_ns = dl_now_ns();
    if (server->now_ns >= sy_core_next_deadline(server->core)) {
        sy_core_tick(server->core, server->now_ns);
        sy_server_actions(server);
    }
    if (server->now_ns >= server->conns_due_ns) {
        struct sy_core_view view;
        sy_core_view(server->core, server->now_ns, &view);
        bool beat = server->now_ns >= server->heartbeat_due_ns;
        if (beat) {
            server->heartbeat_due_ns = server->now_ns + (int64_t)(server->spec->sync.heartbeat_seconds * 1e9);
        }
        for (struct sy_conn *conn = server->conns; conn != NULL; conn = conn->next) {
            sy_conn_tick(conn, server->now_ns, beat ? &view : NULL);
        }
        if (server->now_ns >= server->summary_due_ns) {
            server->summary_due_ns = server->now_ns + SY_SUMMARY_SECONDS * DL_NS_PER_SECOND;
            log_summary(server, &view);
            sy_buffers_trim(server->buffers, server->now_ns);
        }
        check_end(server, &view);
        server->conns_due_ns = server->now_ns + DL_MIN(TICK_NS, (int64_t)(server->spec->sync.heartbeat_seconds * 5e8));
        sy_server_actions(server);
    }
    schedule_tick(server);
}

static void schedule_tick(struct sy_server *server)
{
    int64_t due = DL_MIN(sy_core_next_deadline(server->core), server->conns_due_ns);
    int64_t wait = DL_MAX(due - dl_now_ns(), DL_NS_PER_MS / 10);
    server->tick_due_ns = due;
    lws_sul_schedule(server->context, 0, &server->tick_timer, on_tick, (lws_usec_t)(wait / 1000 + 1));
}

void sy_server_reschedule(struct sy_server *server)
{
    if (server->context != NULL && sy_core_next_deadline(server->core) < server->tick_due_ns) {
        schedule_tick(server);
    }
}

/* --- start and end --------------------------------------------------------------------------------------------------
 */

static void log_lws(int level, const char *line)
{
    size_t length = strcspn(line, "\n");
    dl_log(level == LLL_ERR ? DL_LOG_WARN : DL_LOG_DEBUG, "libwebsockets text=\"%.*s\"", (int)length, line);
}

/* Enough descriptors for all connections; not more, since libwebsockets allocates by the limit. */
static void limit_files(const struct sy_server *server)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        limit.rlim_cur = DL_MIN(limit.rlim_max, (rlim_t)DL_MAX(FILES_MIN, server->conns_max * 2 + 256));
        (void)setrlimit(RLIMIT_NOFILE, &limit);
    }
}

static const lws_retry_bo_t idle_policy = {.secs_since_valid_ping = PING_SECONDS,
                                           .secs_since_valid_hangup = PING_HANGUP_SECONDS};

static void describe_vhost(struct sy_server *server, struct lws_context_creation_info *info, bool tls)
{
    const struct sy_server_options *options = server->options;
    memset(info, 0, sizeof *info);
    info->port = CONTEXT_PORT_NO_LISTEN_SERVER;
    info->protocols = protocols;
    info->vhost_name = tls || options->tls_cert == NULL ? "main" : "health";
    info->options = LWS_SERVER_OPTION_EXPLICIT_VHOSTS | LWS_SERVER_OPTION_HTTP_HEADERS_SECURITY_BEST_PRACTICES_ENFORCE;
    info->pt_serv_buf_size = RECEIVE_BYTES;
    info->max_http_header_pool = 64;
    info->timeout_secs = 10;
    info->keepalive_timeout = 15;
    info->retry_and_idle_policy = &idle_policy;
    info->user = server;
    if (tls) {
        info->options |= LWS_SERVER_OPTION_DO_SSL_GLOBAL_INIT;
        info->ssl_cert_filepath = options->tls_cert;
        info->ssl_private_key_filepath = options->tls_key;
        info->ssl_options_set = SSL_OP_NO_SSLv3 | SSL_OP_NO_TLSv1 | SSL_OP_NO_TLSv1_1 | SSL_OP_NO_TLSv1_2;
        info->alpn = "http/1.1";
        if (options->tls_ca != NULL) {
            info->ssl_ca_filepath = options->tls_ca;
            info->options |= LWS_SERVER_OPTION_REQUIRE_VALID_OPENSSL_CLIENT_CERT;
        }
    }
}

static enum dl_rc adopt_file(struct sy_server *server, int fd, struct dl_err *err)
{
    lws_sock_file_fd_type descriptor = {.filefd = fd};
    return lws_adopt_descriptor_vhost(server->vhost, LWS_ADOPT_RAW_FILE_DESC, descriptor, "files", NULL) != NULL
               ? DL_OK
               : dl_err_set(err, DL_ENOMEM, "handing a descriptor to libwebsockets");
}

static enum dl_rc start_lws(struct sy_server *server, struct dl_err *err)
{
    const struct sy_server_options *options = server->options;
    struct lws_context_creation_info info;
    bool tls = options->tls_cert != NULL;
    lws_set_log_level(LLL_ERR | LLL_WARN, log_lws);
    describe_vhost(server, &info, tls);
    server->context = lws_create_context(&info);
    if (server->context == NULL) {
        return dl_err_set(err, DL_ENOMEM, "starting libwebsockets");
    }
    server->vhost = lws_create_vhost(server->context, &info);
    if (server->vhost == NULL) {
        return dl_err_set(err, DL_EINVAL,
                          tls ? "starting TLS with certificate %s and key %s: see the lines above"
                              : "starting the server%.0s%.0s",
                          tls ? options->tls_cert : "", tls ? options->tls_key : "");
    }
    enum dl_rc rc = adopt_file(server, server->listen_fd, err);
    if (rc == DL_OK && server->health_fd >= 0) {
        describe_vhost(server, &info, false);
        info.vhost_name = "health";
        server->health_vhost = lws_create_vhost(server->context, &info);
        rc = server->health_vhost == NULL ? dl_err_set(err, DL_ENOMEM, "starting the plain HTTP port")
                                          : adopt_file(server, server->health_fd, err);
    }
    if (rc == DL_OK) {
        rc = adopt_file(server, server->signal_fd, err);
    }
    int sockets_fd = -1;
    if (rc == DL_OK) {
        rc = sy_sockets_open(server, &sockets_fd, err);
    }
    return rc == DL_OK ? adopt_file(server, sockets_fd, err) : rc;
}

/* Before any thread starts, so that all of them have the signals blocked and only the descriptor gets them. */
static enum dl_rc take_signals(struct sy_server *server, struct dl_err *err)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    signal(SIGPIPE, SIG_IGN);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    server->signal_fd = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC);
    return server->signal_fd >= 0 ? DL_OK : dl_err_errno(err, DL_EIO, errno, "making a signal descriptor");
}

static enum dl_rc start_listening(struct sy_server *server, struct dl_err *err)
{
    const struct sy_server_options *options = server->options;
    enum dl_rc rc = sy_listen(options->listen, &server->listen_fd, server->address, err);
    if (rc == DL_OK && options->health_listen != NULL) {
        rc = sy_listen(options->health_listen, &server->health_fd, server->health_address, err);
    }
    return rc;
}

/* From the merge thread: the one call that libwebsockets allows there. */
static void wake(void *context)
{
    lws_cancel_service(context);
}

static enum dl_rc start(struct sy_server *server, struct dl_err *err)
{
    enum dl_rc rc = take_signals(server, err);
    if (rc == DL_OK) {
        rc = start_listening(server, err);
    }
    if (rc == DL_OK) {
        rc = sy_server_open_state(server, err);
    }
    if (rc == DL_OK) {
        limit_files(server);
        rc = start_lws(server, err);
    }
    if (rc == DL_OK) {
        rc = sy_jobs_start(server->jobs, wake, server->context, err);
    }
    if (rc == DL_OK && server->options->port_file != NULL) {
        rc = sy_write_port_file(server->options->port_file, server->address, err);
    }
    return rc;
}

/* What was asked over HTTP, the leave itself perhaps, is still answered, with a bound. */
static bool is_over(struct sy_server *server)
{
    int64_t now_ns = dl_now_ns();
    if (server->ended) {
        return server->conn_count == 0 || now_ns >= server->end_deadline_ns;
    }
    if (server->leaving && server->saved_ns == 0 && server->tasks_pending == 0 && sy_core_is_drained(server->core)) {
        server->saved_ns = now_ns;
    }
    bool is_answered = server->answers_pending == 0 || now_ns - server->saved_ns >= ANSWER_NS;
    server->end.is_saved =
        server->leaving && ((server->saved_ns != 0 && is_answered) || now_ns >= server->leave_deadline_ns);
    return server->end.is_saved;
}

static void loop(struct sy_server *server)
{
    server->ready = true;
    server->summary_due_ns = dl_now_ns() + SY_SUMMARY_SECONDS * DL_NS_PER_SECOND;
    dl_info("listening address=%s health=%s tls=%s state=%s epoch=%" PRIu64 " fragments=%u", server->address,
            server->health_fd >= 0 ? server->health_address : "-", server->options->tls_cert != NULL ? "1.3" : "off",
            server->store != NULL ? server->options->state_dir : "memory-only", server->epoch, server->fragment_count);
    server->now_ns = dl_now_ns();
    sy_server_actions(server);
    schedule_tick(server);
    while (server->fatal.rc == DL_OK && !is_over(server)) {
        sy_turn_begin(&server->turn);
        if (lws_service(server->context, 0) < 0) {
            dl_err_set(&server->fatal, DL_EIO, "the network loop failed");
        }
    }
}

static void release(struct sy_server *server)
{
    sy_jobs_stop(server->jobs);
    sy_sockets_stop(server);
    if (server->context != NULL) {
        server->is_destroyed = true;
        lws_context_destroy(server->context); /* Closes connections and descriptors that it adopted. */
    }
    sy_sockets_close(server);
    sy_server_close_state(server);
}

enum dl_rc sy_server_run(const struct sy_server_options *options, struct sy_server_end *end, struct dl_err *err)
{
    struct sy_server *server = calloc(1, sizeof *server);
    if (server == NULL) {
        return dl_err_set(err, DL_ENOMEM, "starting: no memory");
    }
    server->options = options;
    server->spec = options->spec;
    server->listen_fd = server->health_fd = server->signal_fd = -1;
    server->started_ns = dl_now_ns();
    server->end.result = DL_STOP_FAILED;
    enum dl_rc rc = start(server, err);
    if (rc == DL_OK) {
        loop(server);
        if (server->fatal.rc != DL_OK) {
            *err = server->fatal;
            rc = err->rc;
        }
        *end = server->end;
        sy_server_save(server);
        sy_server_leave_status(server);
    }
    release(server);
    free(server);
    return rc;
}
