/* wk_recovery: both sides of peer recovery behind one handle: the registered optimiser state, the server that lets others
 * fetch it, and the fetching of a peer's while joining. Trainer's thread, but for wk_recovery_serve_at. */
#ifndef DL_WORKER_LINK_RECOVERY_H
#define DL_WORKER_LINK_RECOVERY_H

#include "worker/link/fetch.h"
#include "worker/link/serve.h"

struct wk_recovery { /* Zeroed: nothing registered, does not serve. */
    struct wk_state *states;
    uint32_t state_count, state_capacity;
    struct wk_serve *serve; /* NULL: does not. */
    struct wk_fetch *fetch; /* While joining, and then for its report. */
};

void wk_recovery_release(struct wk_recovery *recovery);

/* DL_EINVAL: name (1 to WK_STATE_NAME_MAX - 1 characters, printable, not used before) or bytes. DL_ENOMEM. */
DL_MUST_CHECK enum dl_rc wk_recovery_register(struct wk_recovery *recovery, const char *name, void *data,
                                              uint64_t bytes, struct dl_err *err);

struct wk_recovery_options { /* As in diloco.h. */
    const char *listen, *address, *cert_file, *key_file;
};
/* Prepares to serve, unless that is switched off or cannot be: it takes a token, and with TLS a certificate. */
DL_MUST_CHECK enum dl_rc wk_recovery_serve(struct wk_recovery *recovery, struct wk_hub *hub,
                                           const struct wk_recovery_options *options, struct dl_err *err);

/* Network thread: a connection to a syncer stands. Tells the link where this learner serves. */
void wk_recovery_connected(struct wk_hub *hub, int fd);

/* WK_STEP_FETCH; without the hub's lock. DL_ENOMEM. */
DL_MUST_CHECK enum dl_rc wk_recovery_fetch(struct wk_recovery *recovery, struct wk_hub *hub, struct dl_err *err);
/* Joined: from now on there is something to serve. With the hub's lock. */
void wk_recovery_joined(struct wk_recovery *recovery, struct wk_hub *hub);
/* At a boundary, all updates applied: fills a snapshot if one is wanted. Lock held; let go while memory is copied, and then
 * true. */
bool wk_recovery_boundary(struct wk_recovery *recovery, struct wk_hub *hub);

/* Whose optimiser state was taken over; NULL: nobody's. */
const struct dl_wire_recovered *wk_recovery_report(const struct wk_recovery *recovery);

#endif
