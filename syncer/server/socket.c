#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#include "common/clock.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

#define SIDE_BYTES (64u << 10)   /* Where all goes that has no place of its own, */
#define SIDE_TAKEN (16u << 10)   /* and how much of that at once, since it is copied. */
#define SERVE_BYTES (1u << 20)   /* Taken from one connection before the others have their turn. */
#define TURN_NS INT64_C(4000000) /* Reading in one turn of the loop; then it looks at everything else. */

struct sy_sockets {
    int epoll_fd;             /* libwebsockets' once it has adopted it. */
    struct sy_intake *intake; /* NULL: the network thread receives all. */
    _Alignas(64) uint8_t side[SIDE_BYTES];
};

enum dl_rc sy_sockets_open(struct sy_server *server, int *fd, struct dl_err *err)
{
    server->sockets = dl_alloc_aligned(sizeof *server->sockets);
    if (server->sockets == NULL) {
        return dl_err_set(err, DL_ENOMEM, "starting: no memory to receive with");
    }
    struct sy_sockets *sockets = server->sockets;
    sockets->intake = NULL;
    sockets->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (sockets->epoll_fd < 0) {
        return dl_err_errno(err, DL_EIO, errno, "making an epoll descriptor");
    }
    *fd = sockets->epoll_fd;
    uint32_t threads = sy_server_threads(server->options);
    if (threads == 1 || server->options->tls_cert != NULL) {
        return DL_OK;
    }
    enum dl_rc rc = sy_intake_new(DL_MIN(threads - 1, (uint32_t)SY_INTAKE_THREADS_MAX), &sockets->intake, err);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (rc == DL_OK && epoll_ctl(sockets->epoll_fd, EPOLL_CTL_ADD, sy_intake_fd(sockets->intake), &event) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "waiting for threads that receive");
    }
    return rc;
}

void sy_sockets_stop(struct sy_server *server)
{
    if (server->sockets != NULL && server->sockets->intake != NULL) {
        sy_intake_stop(server->sockets->intake);
    }
}

void sy_sockets_close(struct sy_server *server)
{
    if (server->sockets != NULL) {
        sy_intake_free(server->sockets->intake);
    }
    free(dl_take(server->sockets));
}

static bool watch(struct sy_conn *conn)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = conn};
    return epoll_ctl(conn->server->sockets->epoll_fd, EPOLL_CTL_ADD, conn->fd, &event) == 0;
}

static void unwatch(const struct sy_conn *conn)
{
    epoll_ctl(conn->server->sockets->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
}

bool sy_socket_take(struct sy_conn *conn)
{
    if (conn->is_read || conn->is_over) {
        return true;
    }
    conn->fd = lws_get_socket_fd(conn->wsi);
    conn->ssl = lws_get_ssl(conn->wsi);
    conn->loan.fd = conn->fd;
    conn->loan.parser = &conn->parser;
    conn->loan.receive = &conn->receive;
    conn->loan.owner = conn;
    lws_rx_flow_control(conn->wsi, 0);
    conn->is_read = conn->is_watched = watch(conn);
    return conn->is_read;
}

static void stop_reading(struct sy_conn *conn)
{
    if (conn->server->sockets->intake != NULL) {
        sy_intake_forget(conn->server->sockets->intake, &conn->loan);
    }
    if (conn->is_watched) {
        unwatch(conn);
    }
    conn->is_read = conn->is_watched = conn->is_lent = false;
    conn->is_over = true;
}

void sy_socket_finish(struct sy_conn *conn)
{
    stop_reading(conn);
    if (conn->wsi != NULL) {
        if (conn->ssl != NULL && conn->close_sent) {
            ERR_clear_error();
            (void)SSL_shutdown(conn->ssl); /* Says so; whether it gets out does not matter. */
        }
        lws_set_timeout(conn->wsi, PENDING_TIMEOUT_USER_REASON_BASE, LWS_TO_KILL_ASYNC);
    }
}

/* --- frames --------------------------------------------------------------------------------------------------------- */

static void on_close(struct sy_conn *conn)
{
    conn->close_received = conn->is_deaf = true;
    if (conn->state != SY_CONN_CLOSING) {
        sy_conn_end(conn, SY_LEAVE_LOST, (uint16_t)dl_ws_close_code(&conn->parser), SY_LOST_TEXT);
        sy_conn_release_queues(conn); /* It wants nothing of what waits. */
        conn->close_text[0] = '\0';   /* Its own code is all that it gets back. */
    }
    if (conn->wsi != NULL) {
        lws_callback_on_writable(conn->wsi);
    }
}

static void on_control_frame(struct sy_conn *conn)
{
    const struct dl_ws_parser *parser = &conn->parser;
    if (parser->opcode == DL_WS_CLOSE) {
        on_close(conn);
    } else if (parser->opcode == DL_WS_PING && conn->wsi != NULL && conn->state != SY_CONN_CLOSING) {
        /* Of several that come before an answer is out only the last one has to be answered. */
        memcpy(conn->pong, parser->control, parser->control_bytes);
        conn->pong_bytes = parser->control_bytes;
        conn->pong_due = true;
        lws_callback_on_writable(conn->wsi);
    }
}

/* Whatever came that has no place of its own. */
static void take_frames(struct sy_conn *conn, uint8_t *bytes, size_t size)
{
    while (!conn->is_deaf) {
        struct dl_err err;
        uint8_t *data = NULL;
        size_t used = 0, data_bytes = 0;
        switch (dl_ws_parse(&conn->parser, bytes, size, &used, &data, &data_bytes, &err)) {
        case DL_WS_EVENT_MORE: return;
        case DL_WS_EVENT_DATA: sy_conn_receive(conn, data, data_bytes, false); break;
        case DL_WS_EVENT_END:
            sy_conn_receive(conn, bytes, 0, true);
            sy_server_actions(conn->server);
            break;
        case DL_WS_EVENT_CONTROL: on_control_frame(conn); break;
        case DL_WS_EVENT_BROKEN:
            conn->is_deaf = true; /* Where its next frame begins nobody knows. */
            sy_conn_end(conn, SY_LEAVE_PROTOCOL, (uint16_t)conn->parser.fault, err.text);
            break;
        }
        bytes += used;
        size -= used;
    }
}

/* --- reading -------------------------------------------------------------------------------------------------------- */

/* Bytes that come next for certain and whose place is known: a chunk's data, or what is of no use any more (`*at` NULL). */
static size_t next_placed(const struct sy_conn *conn, uint8_t **at)
{
    *at = NULL;
    if (conn->is_deaf) {
        return SIDE_BYTES;
    }
    return conn->state == SY_CONN_CLOSING ? (size_t)DL_MIN(dl_ws_payload_next(&conn->parser), (uint64_t)SIDE_BYTES)
                                          : sy_placed_next(&conn->parser, &conn->receive, at);
}

static void take_placed(struct sy_conn *conn, uint8_t *at, size_t bytes)
{
    if (conn->is_deaf || bytes == 0) {
        return;
    }
    if (at != NULL) {
        sy_placed_take(&conn->parser, &conn->receive, at, bytes);
        return;
    }
    dl_ws_skip(&conn->parser, bytes);
    if (conn->state != SY_CONN_CLOSING) {
        sy_receive_placed(&conn->receive, bytes);
    }
}

/* As sy_placed_read, of one of the two. */
static enum dl_rc tls_read(struct sy_conn *conn, uint8_t *first, size_t first_bytes, uint8_t *second,
                           size_t second_bytes, size_t *got)
{
    ERR_clear_error();
    errno = 0;
    bool skip = first_bytes == 0;
    if (SSL_read_ex(conn->ssl, skip ? second : first, skip ? second_bytes : first_bytes, got) == 1) {
        return DL_OK;
    }
    int why = SSL_get_error(conn->ssl, 0);
    ERR_clear_error();
    return why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE ? DL_AGAIN : DL_ENET;
}

/* One system call's worth. `*more`: perhaps there is more, without asking the kernel whether. */
static enum dl_rc read_once(struct sy_conn *conn, size_t *got, bool *more)
{
    struct sy_sockets *sockets = conn->server->sockets;
    uint8_t *at;
    size_t known = next_placed(conn, &at);
    size_t first = DL_MIN(known, (size_t)(at == NULL ? SIDE_BYTES : SY_PIECE_BYTES));
    /* What is dropped may be written over by what comes after it: `first` is then all that is asked for. */
    size_t second = known == 0 ? SIDE_TAKEN : first == known && at != NULL ? SY_BESIDE_BYTES : 0;
    uint8_t *to = at == NULL ? sockets->side : at;
    enum dl_rc rc = conn->ssl == NULL ? sy_placed_read(conn->fd, to, first, sockets->side, second, got)
                                      : tls_read(conn, to, first, sockets->side, second, got);
    if (rc != DL_OK) {
        return rc;
    }
    conn->server->now_ns = dl_now_ns();
    conn->server->counters.bytes_in += *got;
    *more = conn->ssl != NULL || *got == first + second;
    size_t placed = DL_MIN(*got, first);
    take_placed(conn, at, placed);
    take_frames(conn, sockets->side, *got - placed);
    return DL_OK;
}

/* Its receiving end goes to another thread until the data of the chunk have come. */
static bool lend(struct sy_conn *conn)
{
    struct sy_intake *intake = conn->server->sockets->intake;
    if (intake == NULL || conn->wsi == NULL || conn->is_deaf || conn->state != SY_CONN_JOINED ||
        !sy_intake_lend(intake, &conn->loan)) {
        return false;
    }
    conn->is_lent = true;
    if (conn->is_watched) {
        unwatch(conn);
        conn->is_watched = false;
    }
    return true;
}

bool sy_socket_hear(struct sy_conn *conn)
{
    uint64_t bytes = atomic_load_explicit(&conn->loan.bytes, memory_order_relaxed);
    bool some = bytes != conn->loan_seen;
    conn->server->counters.bytes_in += bytes - conn->loan_seen;
    conn->loan_seen = bytes;
    return some;
}

/* What came behind the data of a chunk that another thread received. */
static void take_beside(struct sy_conn *conn)
{
    size_t bytes = conn->loan.beside_bytes;
    (void)sy_socket_hear(conn);
    conn->loan.beside_bytes = 0;
    take_frames(conn, conn->loan.beside, bytes);
}

/* Ends with what there is, with the connection's share of a turn, or when another thread receives what comes next. What OpenSSL
 * holds decrypted wakes nobody: all of that is taken. */
static enum dl_rc serve(struct sy_conn *conn)
{
    size_t total = 0;
    bool more = true;
    enum dl_rc rc = conn->loan.rc == DL_AGAIN ? DL_OK : conn->loan.rc;
    conn->loan.rc = DL_OK;
    sy_conn_heard(conn);
    take_beside(conn);
    while (rc == DL_OK && more && (total < SERVE_BYTES || (conn->ssl != NULL && SSL_pending(conn->ssl) > 0)) &&
           !lend(conn)) {
        size_t got = 0;
        rc = read_once(conn, &got, &more);
        total += got;
    }
    if (rc == DL_AGAIN) {
        (void)lend(conn);
    }
    sy_server_actions(conn->server);
    return rc;
}

/* The peer has ended its side. Where it closed as it should, it may still wait for our close. */
static void lost(struct sy_conn *conn)
{
    if (conn->close_received && !conn->close_sent) {
        stop_reading(conn);
    } else {
        sy_socket_finish(conn);
    }
}

/* The next that has bytes: what came back from other threads, whose sockets wait meanwhile; then the one that has waited longest,
 * which is last again once it was served. */
static struct sy_conn *next_ready(struct sy_sockets *sockets)
{
    struct epoll_event event;
    struct sy_loan *loan = sockets->intake == NULL ? NULL : sy_intake_take(sockets->intake);
    struct sy_conn *conn = NULL;
    if (loan == NULL && epoll_wait(sockets->epoll_fd, &event, 1, 0) == 1) {
        conn = event.data.ptr;
        loan = conn == NULL ? sy_intake_take(sockets->intake) : NULL; /* It came back in between. */
    }
    if (loan != NULL) {
        conn = loan->owner;
        conn->is_lent = false;
    }
    return conn;
}

void sy_sockets_ready(struct sy_server *server)
{
    server->now_ns = dl_now_ns();
    int64_t until_ns = server->now_ns + TURN_NS;
    struct sy_conn *conn;
    while (server->now_ns < until_ns && (conn = next_ready(server->sockets)) != NULL) {
        enum dl_rc rc = serve(conn);
        bool is_lost = rc != DL_OK && rc != DL_AGAIN;
        if (!is_lost && conn->is_read && !conn->is_watched && !conn->is_lent) {
            conn->is_watched = watch(conn);
            is_lost = !conn->is_watched;
        }
        if (is_lost) {
            lost(conn);
        }
        server->now_ns = dl_now_ns();
    }
}

void sy_socket_drop_chunk(struct sy_conn *conn)
{
    if (conn->server->sockets->intake != NULL) {
        sy_intake_recall(conn->server->sockets->intake, &conn->loan);
    }
    sy_receive_drop_chunk(&conn->receive);
}

void sy_socket_drain(struct sy_conn *conn)
{
    struct sy_server *server = conn->server;
    if (server->sockets->intake != NULL) {
        sy_intake_forget(server->sockets->intake, &conn->loan);
        conn->is_lent = false;
    }
    enum dl_rc rc = DL_OK;
    for (int i = 0; i < SY_DRAIN_SERVES && rc == DL_OK && conn->is_read && !server->is_destroyed; i++) {
        rc = serve(conn);
    }
    conn->is_read = conn->is_watched = false; /* Closing the descriptor takes it out of the set. */
}
