/* op_pace: learners' step rates over windows of time, for the question whether one learner's death slows the others.
 *
 * Keeps the last OP_PACE_SAMPLES views of every learner's step. Pure; owned by one thread. */
#ifndef OP_LOCAL_PACE_H
#define OP_LOCAL_PACE_H

#include <stdbool.h>
#include <stdint.h>

#include "operator/reconcile/status.h"

#define OP_PACE_SAMPLES 512
#define OP_PACE_LEARNERS_MAX 64 /* Learner ids beyond are not measured. */

struct op_pace_entry {
    uint64_t step;
    uint64_t who; /* Hash of the incarnation's uid; 0: not connected. */
};

struct op_pace {
    uint64_t taken; /* Samples so far; the ring holds the last OP_PACE_SAMPLES. */
    int64_t at_ns[OP_PACE_SAMPLES];
    struct op_pace_entry entries[OP_PACE_SAMPLES][OP_PACE_LEARNERS_MAX];
};

void op_pace_sample(struct op_pace *pace, const struct op_job_status *status, int64_t now_ns);

/* Steps a second of one learner between two times, from the first to the last moment in the window at which its step
 * was seen to change, so that windows need not fit step boundaries. False: it was not the same connected process all
 * the time, or fewer than two steps were seen. */
bool op_pace_rate(const struct op_pace *pace, uint32_t learner, int64_t from_ns, int64_t to_ns, double *rate);

struct op_pace_change {                   /* Others' step rates before and after an event. */
    uint32_t learners;                    /* How many could be compared; 0: the rest says nothing. */
    double before, after;                 /* Steps a second, added over them. */
    double ratio;                         /* after / before */
    double worst;                         /* The least of their own ratios. */
    double before_seconds, after_seconds; /* Windows used. */
};

/* Compares the windows [from, event] and [event, to] over all learners but `except`. */
void op_pace_compare(const struct op_pace *pace, uint32_t except, int64_t from_ns, int64_t event_ns, int64_t to_ns,
                     struct op_pace_change *change);

/* The oldest time from which on all learners connected at `at_ns` were connected and stepping; at_ns when there is
 * none. */
int64_t op_pace_steady_since(const struct op_pace *pace, int64_t at_ns);

#endif
