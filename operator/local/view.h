/* op_view: what is shown of a run, by `run`, `status` and `top` alike, and its JSON form (status.json).
 *
 * The JSON has the members of a syncer's /status, combined over the shards, and beside them `run`: what the supervisor
 * knows.
 *
 * Pure. One thread. Layer operator/local. */
#ifndef OP_LOCAL_VIEW_H
#define OP_LOCAL_VIEW_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "operator/local/events.h"
#include "operator/reconcile/status.h"

#define OP_VIEW_LEARNERS_MAX DL_SPEC_LEARNERS_MAX
#define OP_VIEW_POINTS_MAX 512 /* Validation losses; beyond, every second one is dropped. */
#define OP_VIEW_EVENTS_MAX 12

struct op_view_learner {
    uint32_t learner;
    uint64_t incarnation;
    uint32_t restarts;
    int32_t pid;    /* 0: no process. */
    char state[16]; /* starting, training, joining, cut off, stopping, waiting, given up, gone */
    uint64_t step, tokens, behind, merged;
    double tokens_per_second, loss;
};

struct op_view_point {
    double seconds;
    uint64_t tokens, round;
    double loss;
};

struct op_view {
    char job[DL_SPEC_NAME_MAX];
    char dir[OP_PATH_MAX];
    char phase[24]; /* The syncers' word while the job runs, else the planner's. */
    char message[DL_WIRE_TEXT_MAX];
    bool is_over;
    double seconds;           /* Since the run began. */
    double progress;          /* Of the budget, 0..1; NaN without one. */
    double tokens_per_second; /* Of all learners. */
    struct op_job_status status;
    uint32_t learner_count, point_count, event_count;
    struct op_view_learner learners[OP_VIEW_LEARNERS_MAX];
    struct op_view_point points[OP_VIEW_POINTS_MAX];
    struct op_event events[OP_VIEW_EVENTS_MAX]; /* Oldest first. */
};

DL_MUST_CHECK enum dl_rc op_view_new(struct op_view **out, struct dl_err *err);
void op_view_free(struct op_view *view); /* NULL is fine. */

/* Adds a validation loss unless it is the last one again. True when it is new. */
bool op_view_add_point(struct op_view *view, const struct op_validation *validation, double seconds);

/* What was read is the last that a supervisor wrote which is gone: nothing of the run works any more. */
void op_view_interrupt(struct op_view *view);

/* As JSON text; the caller frees. NULL: no memory. */
char *op_view_to_json(const struct op_view *view);

/* Reads status.json, or a syncer's /status (which has no `run`: learners are then those that the syncer lists). */
DL_MUST_CHECK enum dl_rc op_view_from_json(struct op_view *view, const char *text, size_t size, struct dl_err *err);

/* Of what the syncers say alone. */
DL_MUST_CHECK enum dl_rc op_view_from_status(struct op_view *view, const struct op_job_status *status,
                                             struct dl_err *err);

#endif
