/* Where a learner's state server listens, and what others are told about it. Part of wk_serve. */
#ifndef DL_WORKER_LINK_SERVE_LISTEN_H
#define DL_WORKER_LINK_SERVE_LISTEN_H

#include <sys/socket.h>

#include "common/err.h"
#include "common/wire.h"

/* `*listen_fd` is the caller's. DL_ENET: the address is not this machine's, or taken. */
DL_MUST_CHECK enum dl_rc wk_serve_listen_at(const struct sockaddr *address, socklen_t size, int *listen_fd,
                                            struct dl_err *err);
/* At "address:port", "*:port"; port 0 or none: a free one. DL_EINVAL as well. */
DL_MUST_CHECK enum dl_rc wk_serve_listen(const char *text, int *listen_fd, struct dl_err *err);
/* "host" or "host:port". */
DL_MUST_CHECK enum dl_rc wk_serve_check_address(const char *address, struct dl_err *err);
/* What others are told: the configured `address` (may be NULL), else `own`, the one that this machine has on the way to the
 * syncer; and the port that is really listened on, unless another one was configured. */
DL_MUST_CHECK enum dl_rc wk_serve_tell(int listen_fd, const char *address, const struct sockaddr *own,
                                       socklen_t own_size, char told[DL_WIRE_ADDRESS_MAX], struct dl_err *err);

#endif
