/* wk_get: one HTTP GET after the other over one connection, without ever blocking for longer than it is told to; bodies go
 * where the caller wants them. The counterpart of wk_serve. One thread. */
#ifndef DL_WORKER_LINK_GET_H
#define DL_WORKER_LINK_GET_H

#include "worker/link/resolve.h"
#include "worker/link/serve_http.h"
#include "worker/link/stream.h"

enum wk_get_state {
    WK_GET_IDLE, /* No connection. */
    WK_GET_RESOLVING,
    WK_GET_CONNECTING,
    WK_GET_SECURING,
    WK_GET_ASKING, /* The request goes out. */
    WK_GET_HEAD,   /* The answer's head is awaited. */
    WK_GET_BODY,
    WK_GET_DONE /* Answered in full; the connection can be used again. */
};

/* Where the body's bytes from `offset` (within the body) on belong; `*room` > 0 of them at most. */
typedef uint8_t *wk_get_place(void *context, uint64_t offset, uint64_t *room);
/* So many bytes of the body have come in all. */
typedef void wk_get_progress(void *context, uint64_t offset, uint64_t bytes);

struct wk_get {
    enum wk_get_state state;
    struct wk_stream stream;
    struct wk_resolve *resolve;
    int resolve_fd;
    struct addrinfo *addresses, *next_address;
    char host[256], port[8];
    SSL_CTX *tls; /* Borrowed; NULL: plain. */
    const char *token;
    int64_t progress_ns, patience_ns; /* Of the last byte; how long none may come. */
    char request[WK_HTTP_HEAD_MAX];
    size_t request_bytes, request_sent;
    char head[WK_HTTP_HEAD_MAX];
    size_t head_have;
    struct wk_http_answer answer;
    bool ranged;
    uint64_t first, count; /* Of the range asked for. */
    uint64_t received;     /* Of the body. */
    wk_get_place *place;
    wk_get_progress *progress;
    void *context;
};

void wk_get_init(struct wk_get *get, SSL_CTX *tls, const char *token);
void wk_get_close(struct wk_get *get); /* Also ends a request. */

/* Begins a request to `address` (host:port, [address]:port) for `path`; with `count` > 0 for that many bytes from `first`
 * on. A connection that is open to the same address is used again. `patience_ns`: without a byte for so long it fails.
 * DL_EINVAL: the address is none. */
DL_MUST_CHECK enum dl_rc wk_get_begin(struct wk_get *get, const char *address, const char *path, uint64_t first,
                                      uint64_t count, int64_t patience_ns, wk_get_place *place,
                                      wk_get_progress *progress, void *context, struct dl_err *err);
/* Goes on for at most `wait_ms` without a byte, or until some have come. DL_AGAIN: not finished. DL_OK: the whole body is
 * there. DL_ETIMEOUT, DL_ENET: the connection is closed, `received` says how far it got. DL_EGONE, DL_EDENIED, DL_ENOMEM
 * (busy), DL_EPROTO: the answer. */
DL_MUST_CHECK enum dl_rc wk_get_pump(struct wk_get *get, int wait_ms, struct dl_err *err);

#endif
