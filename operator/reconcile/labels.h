/* Names that the operator gives to a job's objects and the labels by which it finds them again. Pure; any thread; layer
 * operator/reconcile. */
#ifndef OP_RECONCILE_LABELS_H
#define OP_RECONCILE_LABELS_H

#include <stddef.h>
#include <stdint.h>

#include "operator/reconcile/plan.h"

#define OP_LABEL_APP "app.kubernetes.io/name"
#define OP_LABEL_INSTANCE "app.kubernetes.io/instance"
#define OP_LABEL_COMPONENT "app.kubernetes.io/component"
#define OP_LABEL_PART_OF "app.kubernetes.io/part-of"
#define OP_LABEL_MANAGED_BY "app.kubernetes.io/managed-by"
#define OP_LABEL_JOB "diloco.dev/job"
#define OP_LABEL_JOB_UID "diloco.dev/job-uid"
#define OP_LABEL_ROLE "diloco.dev/role"
#define OP_LABEL_LEARNER "diloco.dev/learner-id"
#define OP_LABEL_INCARNATION "diloco.dev/incarnation"
#define OP_LABEL_POOL "diloco.dev/pool"
#define OP_ANNOTATION_SPEC "diloco.dev/spec-hash"
#define OP_APP_NAME "diloco"
#define OP_MANAGER "diloco-operator"

#define OP_CHILD_NAME_MAX 96 /* Bytes of an object's name: a job's has at most 45 characters. */

enum op_part { /* A job's objects other than its learners and its evaluator. */
               OP_PART_TOKEN,
               OP_PART_SPEC,
               OP_PART_SERVICE,
               OP_PART_SET,
               OP_PART_BUDGET,
               OP_PART_POLICY,
               OP_PART_OUTPUT,
               OP_PART_COUNT
};

struct op_part_kind {
    const char *api;      /* "v1", "apps/v1": apiVersion. */
    const char *resource; /* "secrets": as it stands in the path. */
    const char *kind;     /* "Secret" */
    const char
        *suffix; /* The name is `<job><suffix>`; of the token, that and the first 8 characters of the job's uid. */
};
extern const struct op_part_kind op_part_kinds[OP_PART_COUNT];

/* The token is only ever made, never changed: a job that is made again under its old name has another one. */
void op_part_name(enum op_part part, const char *job, const char *job_uid, char out[OP_CHILD_NAME_MAX]);

/* "<job>-learner-<id>-<incarnation>", "<job>-evaluator-<incarnation>", "<job>-syncer-<shard>". */
void op_pod_name(const char *job, enum op_kind kind, uint32_t id, uint64_t incarnation, char out[OP_CHILD_NAME_MAX]);

/* Selector of a job's learners as text, for the scale subresource. */
void op_learner_selector(const char *job, char *out, size_t size);

#endif
