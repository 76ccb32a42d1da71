/* op_lease: leader election by a coordination.k8s.io/v1 Lease (K9): held 15 s, renewed every 2 s, given up when no
 * renewal succeeded for 10 s, counted from when the last successful one was sent. Then a peer that waits the full 15
 * s cannot overlap.
 *
 * Loop's thread; layer operator/kube. */
#ifndef OP_KUBE_LEASE_H
#define OP_KUBE_LEASE_H

#include "operator/kube/client.h"

struct op_lease_options {
    const char *space, *name; /* Copied. */
    const char *identity;     /* Copied; unique per process, e.g. "pod-name_<random>". */
    int64_t duration_ms;      /* 0: 15000; whole seconds. */
    int64_t renew_by_ms;      /* 0: 10000; less than duration. */
    int64_t retry_ms;         /* 0: 2000. */
    void *context;
    /* Called once on every change. On loss writes have been stopped already: op_client_abort_writes was called and
     * the guard is closed. */
    void (*changed)(void *context, bool is_leader);
};

struct op_lease; /* Opaque. */

/* Installs itself as the client's guard: from here on writes pass only while the lease is held. */
DL_MUST_CHECK enum dl_rc op_lease_new(struct op_client *client, const struct op_lease_options *options,
                                      struct op_lease **out, struct dl_err *err);
/* Does not release the lease at the server; removes the guard. NULL is fine. */
void op_lease_free(struct op_lease *lease);

/* By the real clock at the moment of the call. */
bool op_lease_is_held(const struct op_lease *lease);
const char *op_lease_holder(const struct op_lease *lease); /* Last seen; "" when nobody or unknown. */

/* For an orderly end: gives the lease back, so that a peer need not wait. `done` is called when that is over, well
 * or not, within `timeout_ms`; nothing is renewed or acquired afterwards. */
void op_lease_release(struct op_lease *lease, int64_t timeout_ms, void (*done)(void *context), void *context);

/* leader_election_master_status{name}, leader_election_slowpath_total{name}, diloco_leader_transitions_total. */
void op_lease_metrics(const struct op_lease *lease, struct dl_metrics *metrics);

#endif
