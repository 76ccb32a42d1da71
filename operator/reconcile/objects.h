/* op_render: the objects of a job, as JSON text, from its spec and nothing else: the same spec gives the same bytes.
 *
 * Every object carries the labels of labels.h and, the volume of the results aside (it outlives the job), an owner
 * reference to the job. Pods satisfy the Pod Security level "restricted". A pool's PodTemplateSpec is the ground on
 * which its pods are built: what is set there stays, other containers are kept, and the container named "learner"
 * ("syncer" in the syncers' template) gets what is missing. A pool whose container "learner" brings its own `command`
 * or `args` trains by itself: it gets no arguments and no evaluator measures it; all learners get the variables below.
 *
 *   DILOCO_JOB, DILOCO_NAMESPACE      names
 *   DILOCO_ENDPOINTS                  ws://...,ws://...: one a syncer shard
 *   DILOCO_TOKEN_FILE, DILOCO_JOB_FILE  paths
 *   DILOCO_LEARNER, DILOCO_UID        the learner's id, the pod's uid
 *
 * Pure; any thread; layer operator/reconcile. */
#ifndef OP_RECONCILE_OBJECTS_H
#define OP_RECONCILE_OBJECTS_H

#include "common/err.h"
#include "common/spec.h"
#include "operator/reconcile/labels.h"

#define OP_SYNCER_PORT 7000 /* Protocol, and everything of the next. */
#define OP_HEALTH_PORT 7001 /* /healthz /readyz /metrics /status, plain HTTP. */
#define OP_OUTPUT_PATH "/output"
#define OP_DATA_PATH "/data" /* Relative paths of training.data.paths are seen from here. */

struct op_render_options {
    const char *syncer_image, *worker_image;
    const char *pull_policy;             /* NULL or empty: the cluster's default. */
    const char *scavenge_priority_class; /* Of pools that scavenge; NULL or empty: none. */
};

struct op_render {
    const struct dl_spec *spec;
    const char *job_uid;
    const struct op_render_options *options;
};

/* `token`: of OP_PART_TOKEN only. `syncers`: of OP_PART_SET only, its replicas. The caller frees `*out`. DL_EINVAL: a
 * template is not what it should be. */
DL_MUST_CHECK enum dl_rc op_render_part(const struct op_render *render, enum op_part part, const char *token,
                                        uint32_t syncers, char **out, struct dl_err *err);

/* A learner's or the evaluator's pod. `pool` is an index into spec->learners.pools. */
DL_MUST_CHECK enum dl_rc op_render_pod(const struct op_render *render, enum op_kind kind, uint32_t pool, uint32_t id,
                                       uint64_t incarnation, char **out, struct dl_err *err);

/* Whether all pools run the built-in trainer, so that an evaluator can measure what it trains. */
bool op_spec_has_evaluator(const struct dl_spec *spec);

/* Digest of what syncers read at their start. How many learners there are is not in it. 0: no memory. */
uint64_t op_spec_digest(const struct dl_spec *spec);

#endif
