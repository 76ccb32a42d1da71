#include "worker/link/get.h"

#include <assert.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"

#define TURN_BYTES (16u << 20) /* Taken in one call at most, so that the caller hears of time passing. */

void wk_get_init(struct wk_get *get, SSL_CTX *tls, const char *token)
{
    *get = (struct wk_get){.tls = tls, .token = token, .resolve_fd = -1};
    get->stream.fd = -1;
}

void wk_get_close(struct wk_get *get)
{
    wk_resolve_free(dl_take(get->resolve));
    if (get->addresses != NULL) {
        freeaddrinfo(dl_take(get->addresses));
    }
    get->next_address = NULL;
    if (get->stream.fd >= 0) {
        wk_stream_close(&get->stream);
    }
    get->state = WK_GET_IDLE;
}

static enum dl_rc split_address(const char *address, char *host, size_t host_bytes, char *port, size_t port_bytes,
                                struct dl_err *err)
{
    const char *colon = strrchr(address, ':');
    const char *from = address[0] == '[' ? address + 1 : address;
    const char *to = colon != NULL && colon > from && colon[-1] == ']' ? colon - 1 : colon;
    size_t digits = colon == NULL ? 0 : strspn(colon + 1, "0123456789");
    if (colon == NULL || to <= from || (size_t)(to - from) >= host_bytes || digits == 0 || digits >= port_bytes ||
        colon[1 + digits] != 0 || strpbrk(address, " \t\r\n/@") != NULL) {
        return dl_err_set(err, DL_EINVAL, "a peer's address \"%.100s\" is none", address);
    }
    memcpy(host, from, (size_t)(to - from));
    host[to - from] = 0;
    memcpy(port, colon + 1, digits + 1);
    return DL_OK;
}

static enum dl_rc start_connection(struct wk_get *get, struct dl_err *err)
{
    wk_get_close(get);
    enum dl_rc rc = wk_resolve_start(get->host, get->port, &get->resolve, &get->resolve_fd, err);
    get->state = rc == DL_OK ? WK_GET_RESOLVING : WK_GET_IDLE;
    return rc;
}

enum dl_rc wk_get_begin(struct wk_get *get, const char *address, const char *path, uint64_t first, uint64_t count,
                        int64_t patience_ns, wk_get_place *place, wk_get_progress *progress, void *context,
                        struct dl_err *err)
{
    char host[sizeof get->host], port[sizeof get->port], range[80] = "";
    enum dl_rc rc = split_address(address, host, sizeof host, port, sizeof port, err);
    if (rc != DL_OK) {
        return rc;
    }
    bool open =
        get->state == WK_GET_DONE && !get->answer.close && strcmp(host, get->host) == 0 && strcmp(port, get->port) == 0;
    memcpy(get->host, host, sizeof host);
    memcpy(get->port, port, sizeof port);
    get->ranged = count > 0;
    get->first = first;
    get->count = count;
    get->received = 0;
    get->place = place;
    get->progress = progress;
    get->context = context;
    get->patience_ns = patience_ns;
    get->progress_ns = dl_now_ns();
    if (count > 0) {
        snprintf(range, sizeof range, "Range: bytes=%llu-%llu\r\n", (unsigned long long)first,
                 (unsigned long long)(first + count - 1));
    }
    int length =
        snprintf(get->request, sizeof get->request, "GET %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n%s\r\n",
                 path, address, get->token == NULL ? "" : get->token, range);
    if (length >= (int)sizeof get->request) {
        return dl_err_set(err, DL_EINVAL, "fetch state from %s: the request is too long", address);
    }
    get->request_bytes = (size_t)length;
    get->request_sent = get->head_have = 0;
    if (open) {
        get->state = WK_GET_ASKING;
        return DL_OK;
    }
    return start_connection(get, err);
}

/* --- a connection ------------------------------------------------------------------------------------------------ */

static enum dl_rc connect_next(struct wk_get *get, struct dl_err *err)
{
    enum dl_rc rc = wk_stream_connect(&get->stream, &get->next_address, get->host, get->port, err);
    if (rc != DL_OK) {
        return rc;
    }
    get->state = WK_GET_CONNECTING;
    return DL_AGAIN;
}

static enum dl_rc resolved(struct wk_get *get, struct dl_err *err)
{
    enum dl_rc rc = wk_resolve_take(get->resolve, &get->addresses, err);
    if (rc == DL_OK) {
        wk_resolve_free(dl_take(get->resolve));
        get->next_address = get->addresses;
        dl_err_set(err, DL_ENET, "no address to connect to");
        rc = connect_next(get, err);
    }
    return rc;
}

static enum dl_rc connected(struct wk_get *get, struct dl_err *err)
{
    if (wk_stream_connected(&get->stream, get->host, get->port, err) != DL_OK) {
        return connect_next(get, err);
    }
    int fd = get->stream.fd;
    get->state = WK_GET_SECURING;
    enum dl_rc rc = wk_stream_open(&get->stream, fd, get->tls, get->host, err);
    return rc == DL_OK ? DL_AGAIN : rc;
}

static enum dl_rc ask(struct wk_get *get, struct dl_err *err)
{
    while (get->request_sent < get->request_bytes) {
        size_t sent = 0;
        enum dl_rc rc = wk_stream_write(&get->stream, (const uint8_t *)get->request + get->request_sent,
                                        get->request_bytes - get->request_sent, &sent, err);
        if (rc != DL_OK) {
            return rc;
        }
        get->request_sent += sent;
    }
    get->state = WK_GET_HEAD;
    return DL_AGAIN;
}

/* --- an answer --------------------------------------------------------------------------------------------------- */

static enum dl_rc refused(const struct wk_get *get, struct dl_err *err)
{
    int status = get->answer.status;
    enum dl_rc rc = status == 401 || status == 403   ? DL_EDENIED
                    : status == 404 || status == 410 ? DL_EGONE
                    : status == 503                  ? DL_ENOMEM
                                                     : DL_EPROTO;
    return dl_err_set(err, rc, "answered with status %d", status);
}

static void took(struct wk_get *get, uint64_t bytes)
{
    uint64_t offset = get->received;
    get->received += bytes;
    get->progress(get->context, offset, bytes);
}

/* Bytes of the body that came with the head. */
static enum dl_rc take_rest(struct wk_get *get, const char *rest, size_t bytes, struct dl_err *err)
{
    if (bytes > get->answer.length) {
        return dl_err_set(err, DL_EPROTO, "answered with more than it had announced");
    }
    while (bytes > 0) {
        uint64_t room = 0;
        uint8_t *at = get->place(get->context, get->received, &room);
        if (at == NULL) {
            return dl_err_set(err, DL_ENOMEM, "no memory for an answer of %llu bytes",
                              (unsigned long long)get->answer.length);
        }
        size_t piece = (size_t)DL_MIN((uint64_t)bytes, room);
        memcpy(at, rest, piece);
        took(get, piece);
        rest += piece;
        bytes -= piece;
    }
    return get->received == get->answer.length ? DL_OK : DL_AGAIN;
}

static enum dl_rc read_head(struct wk_get *get, struct dl_err *err)
{
    size_t got = 0;
    enum dl_rc rc = wk_stream_read(&get->stream, (uint8_t *)get->head + get->head_have,
                                   sizeof get->head - get->head_have, NULL, 0, &got, err);
    if (rc != DL_OK) {
        return rc;
    }
    get->progress_ns = dl_now_ns();
    get->head_have += got;
    size_t bytes = wk_http_head_bytes(get->head, get->head_have);
    if (bytes == 0) {
        return get->head_have < sizeof get->head ? DL_AGAIN : dl_err_set(err, DL_EPROTO, "its answer has no end");
    }
    if (!wk_http_answer_parse(get->head, bytes, &get->answer)) {
        return dl_err_set(err, DL_EPROTO, "its answer is none that is understood");
    }
    if (get->answer.status != (get->ranged ? 206 : 200)) {
        return refused(get, err);
    }
    if (get->answer.length == 0 ||
        (get->ranged && (get->answer.first != get->first || get->answer.length != get->count))) {
        return dl_err_set(err, DL_EPROTO, "it answered another range than the one it was asked for");
    }
    get->state = WK_GET_BODY;
    return take_rest(get, get->head + bytes, get->head_have - bytes, err);
}

static enum dl_rc read_body(struct wk_get *get, struct dl_err *err)
{
    for (uint64_t taken = 0; taken < TURN_BYTES && get->received < get->answer.length;) {
        uint64_t room = 0;
        size_t got = 0;
        uint8_t *at = get->place(get->context, get->received, &room);
        if (at == NULL) {
            return dl_err_set(err, DL_ENOMEM, "no memory for an answer of %llu bytes",
                              (unsigned long long)get->answer.length);
        }
        room = DL_MIN(room, get->answer.length - get->received);
        enum dl_rc rc = wk_stream_read(&get->stream, at, (size_t)room, NULL, 0, &got, err);
        if (rc != DL_OK) {
            return rc;
        }
        get->progress_ns = dl_now_ns();
        took(get, got);
        taken += got;
    }
    return get->received == get->answer.length ? DL_OK : DL_AGAIN;
}

/* --- both -------------------------------------------------------------------------------------------------------- */

static enum dl_rc advance(struct wk_get *get, struct dl_err *err)
{
    switch (get->state) {
    case WK_GET_RESOLVING: return resolved(get, err);
    case WK_GET_CONNECTING: return connected(get, err);
    case WK_GET_SECURING: {
        enum dl_rc rc = wk_stream_handshake(&get->stream, err);
        get->state = rc == DL_OK ? WK_GET_ASKING : get->state;
        return rc == DL_OK ? DL_AGAIN : rc;
    }
    case WK_GET_ASKING: return ask(get, err);
    case WK_GET_HEAD: return read_head(get, err);
    case WK_GET_BODY: return read_body(get, err);
    case WK_GET_IDLE:
    case WK_GET_DONE: break;
    }
    assert(!"no request is under way");
    return DL_EINVAL;
}

static struct pollfd awaited(const struct wk_get *get)
{
    bool writes = get->state == WK_GET_CONNECTING || get->state == WK_GET_ASKING || get->stream.wants_write;
    return get->state == WK_GET_RESOLVING ? (struct pollfd){.fd = get->resolve_fd, .events = POLLIN}
                                          : (struct pollfd){.fd = get->stream.fd, .events = writes ? POLLOUT : POLLIN};
}

enum dl_rc wk_get_pump(struct wk_get *get, int wait_ms, struct dl_err *err)
{
    struct pollfd poll_on = awaited(get);
    bool pending = get->stream.ssl != NULL && SSL_pending(get->stream.ssl) > 0;
    enum dl_rc rc = DL_AGAIN;
    if (get->state == WK_GET_SECURING || pending || poll(&poll_on, 1, wait_ms) > 0) {
        enum wk_get_state before;
        do {
            before = get->state;
            rc = advance(get, err);
        } while (rc == DL_AGAIN && get->state != before);
        if (rc == DL_AGAIN && get->state == WK_GET_SECURING) {
            poll_on = awaited(get);
            (void)poll(&poll_on, 1, wait_ms);
        }
    }
    if (rc == DL_AGAIN && dl_now_ns() - get->progress_ns >= get->patience_ns) {
        rc = dl_err_set(err, DL_ETIMEOUT, "no byte came for %.1f s", (double)get->patience_ns / 1e9);
    }
    if (rc == DL_OK) {
        get->state = WK_GET_DONE;
    } else if (rc != DL_AGAIN) {
        char host[160];
        snprintf(host, sizeof host, "%.120s:%s", get->host, get->port);
        wk_get_close(get);
        dl_err_wrap(err, "fetch state from %s", host);
    }
    return rc;
}
