#include <errno.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>

#include "common/clock.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

#define PIECE_BYTES (256u << 10) /* Received at once to its place: it stays in the second-level cache until .. */
#define STEP_BYTES (16u << 10)   /* .. so much of it at a time is unmasked and hashed, in the first-level cache. */
#define BESIDE_BYTES 4096u       /* Received in the same call as the end of a chunk: the next one's heads. */
#define SIDE_BYTES (64u << 10)   /* Where all goes that has no place of its own, */
#define SIDE_TAKEN (16u << 10)   /* and how much of that at once, since it is copied. */
#define SERVE_BYTES (1u << 20)   /* Taken from one connection before the others have their turn. */
#define TURN_NS INT64_C(4000000) /* Reading in one turn of the loop; then it looks at everything else. */

struct sy_sockets {
    int epoll_fd; /* libwebsockets' once it has adopted it. */
    _Alignas(64) uint8_t side[SIDE_BYTES];
};

enum dl_rc sy_sockets_open(struct sy_server *server, int *fd, struct dl_err *err)
{
    server->sockets = dl_alloc_aligned(sizeof *server->sockets);
    if (server->sockets == NULL) {
        return dl_err_set(err, DL_ENOMEM, "starting: no memory to receive with");
    }
    server->sockets->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (server->sockets->epoll_fd < 0) {
        return dl_err_errno(err, DL_EIO, errno, "making an epoll descriptor");
    }
    *fd = server->sockets->epoll_fd;
    return DL_OK;
}

void sy_sockets_close(struct sy_server *server)
{
    free(dl_take(server->sockets));
}

bool sy_socket_take(struct sy_conn *conn)
{
    if (conn->is_read || conn->is_over) {
        return true;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = conn};
    conn->fd = lws_get_socket_fd(conn->wsi);
    conn->ssl = lws_get_ssl(conn->wsi);
    lws_rx_flow_control(conn->wsi, 0);
    conn->is_read = epoll_ctl(conn->server->sockets->epoll_fd, EPOLL_CTL_ADD, conn->fd, &event) == 0;
    return conn->is_read;
}

static void stop_reading(struct sy_conn *conn)
{
    if (conn->is_read) {
        epoll_ctl(conn->server->sockets->epoll_fd, EPOLL_CTL_DEL, conn->fd, NULL);
        conn->is_read = false;
    }
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
    uint64_t payload = dl_ws_payload_next(&conn->parser);
    if (conn->state != SY_CONN_CLOSING && payload > 0) {
        uint64_t room = sy_receive_direct(&conn->receive, at);
        payload = DL_MIN(payload, room);
    }
    return (size_t)payload;
}

static void take_placed(struct sy_conn *conn, uint8_t *at, size_t bytes)
{
    if (conn->is_deaf) {
        return;
    }
    if (at == NULL) {
        dl_ws_skip(&conn->parser, bytes);
    }
    for (size_t done = 0; done < bytes && conn->state != SY_CONN_CLOSING;) {
        size_t step = at == NULL ? bytes : DL_MIN((size_t)STEP_BYTES, bytes - done);
        if (at != NULL) {
            dl_ws_placed(&conn->parser, at + done, step);
        }
        sy_receive_placed(&conn->receive, step);
        done += step;
    }
}

static enum dl_rc tls_read(struct sy_conn *conn, const struct iovec *part, size_t *got)
{
    ERR_clear_error();
    errno = 0;
    if (SSL_read_ex(conn->ssl, part->iov_base, part->iov_len, got) == 1) {
        return DL_OK;
    }
    int why = SSL_get_error(conn->ssl, 0);
    ERR_clear_error();
    return why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE ? DL_AGAIN : DL_ENET;
}

/* As much as there is for the first part, then for the second; with TLS, for one of them. */
static enum dl_rc read_parts(struct sy_conn *conn, const struct iovec parts[2], size_t *got)
{
    bool skip = parts[0].iov_len == 0;
    if (conn->ssl != NULL) {
        return tls_read(conn, &parts[skip], got);
    }
    ssize_t received = readv(conn->fd, parts + skip, 2 - skip);
    if (received > 0) {
        *got = (size_t)received;
        return DL_OK;
    }
    return received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? DL_AGAIN : DL_ENET;
}

/* One system call's worth. `*more`: perhaps there is more, without asking the kernel whether. */
static enum dl_rc read_once(struct sy_conn *conn, size_t *got, bool *more)
{
    struct sy_sockets *sockets = conn->server->sockets;
    uint8_t *at;
    size_t known = next_placed(conn, &at);
    size_t first = DL_MIN(known, (size_t)(at == NULL ? SIDE_BYTES : PIECE_BYTES));
    /* What is dropped may be written over by what comes after it: `first` is then all that is asked for. */
    size_t second = known == 0 ? SIDE_TAKEN : first == known && at != NULL ? BESIDE_BYTES : 0;
    struct iovec parts[2] = {{at == NULL ? sockets->side : at, first}, {sockets->side, second}};
    enum dl_rc rc = read_parts(conn, parts, got);
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

/* Ends with what there is, or with the connection's share of a turn. What OpenSSL holds decrypted wakes nobody: all of that is
 * taken. */
static enum dl_rc serve(struct sy_conn *conn)
{
    size_t total = 0;
    bool more = true;
    enum dl_rc rc = DL_OK;
    sy_conn_heard(conn);
    while (rc == DL_OK && more && (total < SERVE_BYTES || (conn->ssl != NULL && SSL_pending(conn->ssl) > 0))) {
        size_t got = 0;
        rc = read_once(conn, &got, &more);
        total += got;
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

void sy_sockets_ready(struct sy_server *server)
{
    struct epoll_event event;
    server->now_ns = dl_now_ns();
    int64_t until_ns = server->now_ns + TURN_NS;
    /* The one that has waited longest comes first, and last again once it was served. */
    while (server->now_ns < until_ns && epoll_wait(server->sockets->epoll_fd, &event, 1, 0) == 1) {
        struct sy_conn *conn = event.data.ptr;
        enum dl_rc rc = serve(conn);
        if (rc != DL_OK && rc != DL_AGAIN) {
            lost(conn);
        }
        server->now_ns = dl_now_ns();
    }
}

void sy_socket_drain(struct sy_conn *conn)
{
    enum dl_rc rc = DL_OK;
    for (int i = 0; i < SY_DRAIN_SERVES && rc == DL_OK && conn->is_read; i++) {
        rc = serve(conn);
    }
    conn->is_read = false; /* Closing the descriptor takes it out of the set. */
}
