/* op_facts: what there is to say about a job, its conditions, and its .status as JSON.
 *
 * A condition's lastTransitionTime moves only when its status changes (K7). Problems that only the operator can see
 * (quota, permissions, images, placing, volumes) are found here among pods and answers of the API server.
 *
 * Pure; any thread; layer operator/reconcile. */
#ifndef OP_RECONCILE_CONDITIONS_H
#define OP_RECONCILE_CONDITIONS_H

#include <cjson/cJSON.h>

#include "common/job_names.h"
#include "operator/reconcile/plan.h"
#include "operator/reconcile/pod.h"
#include "operator/reconcile/status.h"

#define OP_CONDITION_REASON_MAX 48
#define OP_CONDITION_MESSAGE_MAX 384
#define OP_STATUS_INTERVAL_NS INT64_C(5000000000) /* Least time between two writes of one job's status. */

struct op_problem {
    char reason[OP_CONDITION_REASON_MAX]; /* CamelCase; empty: none. */
    char message[OP_CONDITION_MESSAGE_MAX];
};

void op_problem_set(struct op_problem *problem, const char *reason, const char *fmt, ...) DL_PRINTF(3, 4);

/* An answer of the API server that refuses what was asked for. `what` names the object ("Pod demo-learner-0-1"). */
enum op_refusal { OP_REFUSED_QUOTA, OP_REFUSED_FORBIDDEN, OP_REFUSED_CONFLICT, OP_REFUSED_INVALID, OP_REFUSED_OTHER };
void op_problem_of_refusal(enum op_refusal refusal, const char *what, const char *text, struct op_problem *out);

/* The worst that pods show, or none; `name` is the pod's. Called for every pod of a job; keeps the worse one. Pods that
 * scavenge may wait for room: `is_extra`. */
void op_problem_of_pod(const struct op_pod *pod, const char *name, bool is_extra, int64_t now_ns,
                       struct op_problem *worst);

enum op_truth { OP_UNKNOWN, OP_FALSE, OP_TRUE };

struct op_condition {
    enum op_truth status;
    int64_t since_ns; /* lastTransitionTime; 0: never written. */
    char reason[OP_CONDITION_REASON_MAX];
    char message[OP_CONDITION_MESSAGE_MAX];
};

struct op_conditions {
    struct op_condition items[DL_CONDITION_COUNT]; /* By enum dl_condition. */
};

/* Takes over what a job's status says, so that a new operator does not move times. */
void op_conditions_read(const cJSON *status, struct op_conditions *out);

struct op_facts {
    const char *job;
    const struct op_wanted *wanted;
    const struct op_plan *plan;
    const struct op_job_status *view; /* Of the syncers; NULL: not heard. */
    const struct op_problem *problem; /* NULL or empty: none. */
    uint32_t learners_min;
    uint32_t active; /* Pods that are there. */
    int64_t generation;
    int64_t started_ns, completed_ns; /* 0: not yet. */
    int64_t now_ns;                   /* Wall clock. */
};

/* The phase that is told: a job is Suspended only once every pod is gone (K8). */
enum op_job_phase op_facts_phase(const struct op_facts *facts);

void op_conditions_update(struct op_conditions *conditions, const struct op_facts *facts);

/* {"metadata":{"uid":...},"status":{...}}: a merge patch of the status subresource. The caller frees `*out`. */
DL_MUST_CHECK enum dl_rc op_status_patch(const struct op_facts *facts, const struct op_conditions *conditions,
                                         const char *job_uid, char **out, struct dl_err *err);

#endif
