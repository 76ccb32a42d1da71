/* wk_net: the library's one thread. It waits on every connection at once, and serves them while the trainer computes.
 */
#ifndef DL_WORKER_LINK_NET_H
#define DL_WORKER_LINK_NET_H

#include "worker/link/hub.h"

struct wk_net; /* Opaque. */

/* Starts the thread; `hub` is borrowed until wk_net_stop. */
DL_MUST_CHECK enum dl_rc wk_net_start(struct wk_hub *hub, struct wk_net **out, struct dl_err *err);
/* Ends the thread, closes all connections. NULL is fine. */
void wk_net_stop(struct wk_net *net);
/* Makes the thread look at the link again. Any thread. */
void wk_net_wake(struct wk_hub *hub);

#endif
