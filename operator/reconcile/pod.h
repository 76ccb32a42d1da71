/* op_pod: what the operator keeps of a Pod and of a Node, and what that means to the planner.
 *
 * Only these projections stay in memory, a few hundred bytes each. Times are of the wall clock, as in the objects.
 *
 * Pure; any thread; layer operator/reconcile. */
#ifndef OP_RECONCILE_POD_H
#define OP_RECONCILE_POD_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "operator/reconcile/labels.h"
#include "operator/reconcile/plan.h"
#include "operator/reconcile/status.h"

#define OP_POD_UID_MAX 40
#define OP_POD_REASON_MAX 48
#define OP_POD_MESSAGE_MAX 240
#define OP_IN_PLACE_RESTARTS_MAX 3 /* Then the pod is given up and another one is made, maybe on another node. */

enum op_pod_phase { OP_POD_PENDING, OP_POD_RUNNING, OP_POD_SUCCEEDED, OP_POD_FAILED, OP_POD_UNKNOWN };

struct op_pod {
    enum op_kind kind;
    uint32_t id;          /* Learner id, shard. */
    uint64_t incarnation; /* Of a syncer: 1. */
    char uid[OP_POD_UID_MAX], job_uid[OP_POD_UID_MAX];
    char pool[DL_SPEC_NAME_MAX];
    char node[DL_SPEC_NAME_MAX]; /* Cut to its first 63 bytes, as in op_node. Empty: not placed. */
    char address[48];            /* Empty: none yet. */
    enum op_pod_phase phase;
    bool is_leaving; /* deletionTimestamp is set. */
    bool is_ready;
    bool is_unschedulable;
    bool is_disrupted;     /* Condition DisruptionTarget. */
    bool is_up;            /* Our container runs. */
    bool has_ended;        /* Our container has ended and `code` is valid, now or in its last life. */
    bool is_out_of_memory; /* That end. */
    int code;
    uint32_t restarts;
    int64_t created_ns, started_ns, since_ns;
    char reason[OP_POD_REASON_MAX];    /* Of the pod's state: Evicted, PreemptionByScheduler, ... */
    char waiting[OP_POD_REASON_MAX];   /* Why our container does not run: ImagePullBackOff, CrashLoopBackOff, ... */
    char message[OP_POD_MESSAGE_MAX];  /* Of what keeps it from running, or its last error. */
    char last_word[OP_POD_REASON_MAX]; /* Syncers: the job's result as the ended container left it. */
};

/* Reads a Pod. False: it is not one of ours, or its labels make no sense. */
bool op_pod_read(const cJSON *object, struct op_pod *out);

struct op_node {
    char name[DL_SPEC_NAME_MAX];
    bool is_ready;     /* Its kubelet reports, and says so. */
    bool is_usable;    /* Ready, and pods may be placed there. */
    bool is_spot;      /* By the labels of GKE, EKS, Karpenter or AKS. */
    bool is_vanishing; /* A taint says that it is about to be taken away. */
    uint64_t capacity; /* A digest of what can be allocated. */
};

bool op_node_read(const cJSON *object, struct op_node *out);

/* Whether there may be more or less room after this change. NULL: the node was not there, or is not any more. */
bool op_node_changes_capacity(const struct op_node *before, const struct op_node *after);

struct op_spot_label { /* How a provider marks nodes that may be taken away. */
    const char *key, *value;
};
extern const struct op_spot_label op_spot_labels[];
extern const uint32_t op_spot_label_count;

/* What the planner is told about a pod. `node`: NULL when it is not known (which says nothing). `learner`: the protocol's
 * view, NULL when no syncer knows it. `syncers_heard`: whether the syncers' view is recent. */
struct op_pod_context {
    const struct op_node *node;
    const struct op_learner_status *learner;
    bool syncers_heard;
    uint32_t pool; /* Index into op_wanted.pools. */
};
void op_pod_instance(const struct op_pod *pod, const struct op_pod_context *context, struct op_instance *out);

#endif
