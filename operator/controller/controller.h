/* op_controller: keeps DecoupledDiLoCoJobs as their specs say. It watches jobs, their pods, sets and nodes, asks the syncers
 * for progress, has operator/reconcile decide, and carries that out.
 *
 * Level-triggered: everything it does may be done again; what it must not forget stands in the objects themselves. It holds
 * projections only (a few KB a job, under 1 KB a pod). Loop's thread; layer operator/controller. */
#ifndef OP_CONTROLLER_CONTROLLER_H
#define OP_CONTROLLER_CONTROLLER_H

#include "operator/kube/client.h"
#include "operator/kube/path.h"
#include "operator/reconcile/objects.h"
#include "operator/reconcile/plan.h"

#define OP_SPACES_MAX 64

extern const struct op_resource op_res_jobs;

struct op_controller_options {
    const char *spaces[OP_SPACES_MAX]; /* Namespaces to serve. */
    uint32_t space_count;              /* 0: all. */
    struct op_render_options render;
    bool via_proxy;          /* Syncers are asked through the API server, not at their addresses. */
    const char *key_space;   /* The Secret with the key from which jobs' tokens are made; NULL: a key in memory only, */
    const char *key_name;    /* so that jobs of an earlier process cannot be asked to end before their time. */
    const char *instance;    /* For events: this process. */
    struct op_limits limits; /* Zero: op_limits_default. */
    int64_t poll_ns;         /* Between two looks at a job's syncers; 0: 2 s, and more with many jobs. */
};

struct op_controller; /* Opaque. */

/* Starts. All text in `options` is borrowed for its life. */
DL_MUST_CHECK enum dl_rc op_controller_new(struct op_client *client, const struct op_controller_options *options,
                                           struct op_controller **out, struct dl_err *err);
void op_controller_free(struct op_controller *controller); /* NULL is fine. Nothing that it began is waited for. */

/* Whether all lists that planning needs have been read. */
bool op_controller_is_synced(const struct op_controller *controller);

/* Under the names of controller-runtime and client-go, and diloco_jobs{phase}, diloco_pods. */
void op_controller_metrics(const struct op_controller *controller, struct dl_metrics *metrics);

#endif
