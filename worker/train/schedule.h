/* wk_schedule: a learner's place in the learning-rate schedule, and from it the rate.
 *
 * The schedule belongs to the ensemble, not to the process: a learner that joins late, or replaces one that was lost,
 * must not warm up again from nothing, nor train at a rate that the others left long ago. So places are counted in
 * ensemble steps: tokens trained by all, divided by the tokens of one step of all wanted learners (learners.replicas).
 * A joiner starts at the ensemble's place and from there adds one a step, which needs nobody and makes the rate a
 * function of (place at the join, own step). What the syncer says of tokens later moves the place only when the two
 * have drifted apart by more than a twentieth: then learners are faster or slower than this one, or there are more or
 * fewer than wanted, and the decay must still end when the token budget does.
 *
 * A late joiner's AdamW moments are zero, and its first updates would be as long as the rate in every coordinate. So
 * its rate is capped by a short ramp of its own, WK_SCHEDULE_RAMP_STEPS from zero to the peak, unless it took over a peer's
 * moments.
 *
 * Pure; one thread. Layer: worker/train. */
#ifndef WK_TRAIN_SCHEDULE_H
#define WK_TRAIN_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/spec.h"

#define WK_SCHEDULE_RAMP_STEPS 20
#define WK_SCHEDULE_DRIFT_MIN 32 /* Steps of drift that are always put up with. */

struct wk_schedule {
    struct dl_inner_spec inner; /* decay_steps resolved. */
    uint64_t step_tokens;       /* Of one step of all wanted learners. */
    uint64_t place;
    uint64_t own_steps;
    uint64_t heard_tokens;
    uint32_t ramp_steps; /* 0: none. */
};

/* At place 0. decaySteps 0: the steps that the token budget gives each of the wanted learners. */
void wk_schedule_init(struct wk_schedule *schedule, const struct dl_training_spec *training, uint32_t replicas);

/* Joined an ensemble that has trained `tokens_all` tokens. */
void wk_schedule_join(struct wk_schedule *schedule, uint64_t tokens_all);

/* After wk_schedule_join, with the moments of a peer: no ramp is needed. */
void wk_schedule_skip_ramp(struct wk_schedule *schedule);

/* The syncer said how many tokens all have trained. True: the place was moved. */
bool wk_schedule_hear(struct wk_schedule *schedule, uint64_t tokens_all);

/* Goes on by a step and returns its rate. */
double wk_schedule_next(struct wk_schedule *schedule);

#endif
