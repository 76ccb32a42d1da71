/* wk_resolve: looks up a host name without holding up the thread that asks.
 *
 * Addresses in numbers are answered at once; for a name, a short-lived thread calls getaddrinfo, which no one can bound
 * or cancel, so a request that is given up is left to that thread to release. */
#ifndef DL_WORKER_LINK_RESOLVE_H
#define DL_WORKER_LINK_RESOLVE_H

#include <netdb.h>

#include "common/err.h"

struct wk_resolve; /* Opaque. */

/* Starts a look-up. `*fd` becomes readable when the answer is there; it is the request's. */
DL_MUST_CHECK enum dl_rc wk_resolve_start(const char *host, const char *port, struct wk_resolve **out, int *fd,
                                          struct dl_err *err);
/* DL_AGAIN: not there yet. DL_OK: `*addresses` is the caller's (freeaddrinfo). */
DL_MUST_CHECK enum dl_rc wk_resolve_take(struct wk_resolve *resolve, struct addrinfo **addresses, struct dl_err *err);
void wk_resolve_free(struct wk_resolve *resolve); /* NULL is fine; also before the answer. */

#endif
