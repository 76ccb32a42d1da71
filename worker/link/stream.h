/* wk_stream: bytes over a non-blocking TCP connection, plain or TLS 1.3. Owned by the network thread. */
#ifndef DL_WORKER_LINK_STREAM_H
#define DL_WORKER_LINK_STREAM_H

#include <netdb.h>
#include <openssl/ssl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/err.h"

struct wk_stream {
    int fd;           /* -1: closed. Owned. */
    SSL *ssl;         /* NULL: plain. Owned. */
    bool wants_write; /* TLS cannot go on before the socket takes bytes. */
    int low_water;    /* Bytes that must have come before the socket counts as readable; 0: one. */
};

/* Certificates for wss: `ca_file` NULL: the system's authorities; `cert_file`, `key_file` NULL: no client certificate.
 */
DL_MUST_CHECK enum dl_rc wk_tls_new(const char *ca_file, const char *cert_file, const char *key_file, SSL_CTX **out,
                                    struct dl_err *err);

/* For the side that is connected to: certificate and key that it shows. */
DL_MUST_CHECK enum dl_rc wk_tls_server_new(const char *cert_file, const char *key_file, SSL_CTX **out,
                                           struct dl_err *err);

/* Begins to connect to the first address from `*next` on for which that can begin, and moves `*next` behind it. DL_OK: the
 * socket is writable once there is an answer, for wk_stream_connected. DL_ENET: none is left, and `err` says why the last one
 * failed, or what it said before. `host`, `port`: for errors. */
DL_MUST_CHECK enum dl_rc wk_stream_connect(struct wk_stream *stream, struct addrinfo **next, const char *host,
                                           const char *port, struct dl_err *err);
/* What the answer was. DL_ENET: the stream is closed. */
DL_MUST_CHECK enum dl_rc wk_stream_connected(struct wk_stream *stream, const char *host, const char *port,
                                             struct dl_err *err);

/* Sets options on a connected socket and takes it over; with `tls`, prepares a handshake that checks for `host`. */
DL_MUST_CHECK enum dl_rc wk_stream_open(struct wk_stream *stream, int fd, SSL_CTX *tls, const char *host,
                                        struct dl_err *err);
/* The same for a connection that was accepted. */
DL_MUST_CHECK enum dl_rc wk_stream_accept(struct wk_stream *stream, int fd, SSL_CTX *tls, struct dl_err *err);
void wk_stream_close(struct wk_stream *stream);

/* DL_OK: done (at once when plain). DL_AGAIN: wait for the socket. */
DL_MUST_CHECK enum dl_rc wk_stream_handshake(struct wk_stream *stream, struct dl_err *err);

/* Reads up to `first_bytes` into `first` and what comes beyond into `second`; `first_bytes` may be 0. DL_OK: `*got` >
 * 0. DL_AGAIN: nothing now. DL_ENET: the connection is gone. */
DL_MUST_CHECK enum dl_rc wk_stream_read(struct wk_stream *stream, uint8_t *first, size_t first_bytes, uint8_t *second,
                                        size_t second_bytes, size_t *got, struct dl_err *err);
/* From now on the socket is readable when `bytes` >= 1 have come, or the peer has ended: so many must be certain to come. A wish;
 * the system takes less where its buffers are small. */
void wk_stream_wake_at(struct wk_stream *stream, size_t bytes);
/* Writes what the socket takes of `first`, then of `second`; either may have no bytes, not both. With TLS, of one of them. What
 * is offered again after DL_AGAIN begins with the same bytes, wherever they lie. */
DL_MUST_CHECK enum dl_rc wk_stream_write_two(struct wk_stream *stream, const uint8_t *first, size_t first_bytes,
                                             const uint8_t *second, size_t second_bytes, size_t *sent,
                                             struct dl_err *err);
DL_MUST_CHECK enum dl_rc wk_stream_write(struct wk_stream *stream, const uint8_t *bytes, size_t size, size_t *sent,
                                         struct dl_err *err);

#endif
