/* sy_listen: a listening socket bound to exactly what was asked for.
 *
 * libwebsockets 4.1, built with IPv6, takes an interface "127.0.0.1" and binds all of them; so the socket is made here,
 * and accepted connections are handed over to it. Shell; any thread. */
#ifndef SY_SERVER_LISTEN_H
#define SY_SERVER_LISTEN_H

#include "common/err.h"

#define SY_ADDRESS_MAX 128 /* Bytes of "HOST:PORT" with the terminating zero. */

/* Binds and listens, non-blocking. `text`: HOST:PORT, *:PORT (all interfaces, IPv6 and IPv4), [v6]:PORT. `address` gets
 * the address that the kernel says it is (port 0 replaced). DL_EINVAL: malformed, unknown host, in use, not ours: the
 * text says what to do. */
DL_MUST_CHECK enum dl_rc sy_listen(const char *text, int *fd, char address[SY_ADDRESS_MAX], struct dl_err *err);

/* Accepts one connection, ready to use (no delay, keepalive). DL_AGAIN: none is waiting, or the process is out of
 * descriptors (then the waiting connection was refused). */
DL_MUST_CHECK enum dl_rc sy_listen_accept(int listen_fd, int *fd, struct dl_err *err);

/* Writes `text` and a newline to `path` so that a reader sees all or nothing. */
DL_MUST_CHECK enum dl_rc sy_write_port_file(const char *path, const char *text, struct dl_err *err);

#endif
