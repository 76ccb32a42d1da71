/* op_estimate: what a job needs and how long it is, from its spec alone.
 *
 * Parameters are exact for the built-in transformer; memory is an estimate that is meant to be near, not above all
 * doubt. Pure; any thread. Layer operator/local. */
#ifndef OP_LOCAL_ESTIMATE_H
#define OP_LOCAL_ESTIMATE_H

#include <stdint.h>

#include "common/spec.h"

struct op_estimate {
    uint64_t parameters;
    uint64_t tokens_per_step;               /* Of one learner. */
    uint64_t tokens_per_learner_step_all;   /* Of learners.replicas together. */
    uint64_t steps_per_learner;             /* Until the token budget is used up; 0: no budget. */
    uint64_t warmup_steps;                  /* Of those, in interval warm-up. */
    uint64_t warmup_syncs;                  /* Of all fragments together, in it. */
    uint64_t rounds;                        /* Over all fragments until then. */
    uint64_t learner_bytes;                 /* Parameters, gradients, moments, base copy, activations. */
    uint64_t learner_bytes_least;           /* The same without activations: what no machine can do without. */
    uint64_t evaluator_bytes, syncer_bytes; /* One of each; `syncer` is a shard with the largest quorum. */
    uint64_t total_bytes_least;             /* All processes of the run. */
    uint64_t push_bytes;                    /* One learner, one fragment, encoded. */
    uint64_t up_bytes, down_bytes;          /* One learner, of an inner step, on average: all pushes, all updates. */
};

void op_estimate_make(const struct dl_spec *spec, struct op_estimate *out);

#endif
