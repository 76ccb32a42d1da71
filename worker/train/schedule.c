#include "worker/train/schedule.h"

#include "common/mem.h"
#include "worker/model/adamw.h"

void wk_schedule_init(struct wk_schedule *schedule, const struct dl_training_spec *training, uint32_t replicas)
{
    uint64_t own = (uint64_t)training->batch_sequences * training->model.sequence_length;
    *schedule = (struct wk_schedule){.inner = training->inner, .step_tokens = own * DL_MAX(replicas, 1u)};
    if (schedule->inner.decay_steps == 0) {
        uint64_t steps = dl_training_steps(training, replicas);
        schedule->inner.decay_steps = (uint32_t)DL_MIN(DL_MAX(steps, UINT64_C(1)), (uint64_t)UINT32_MAX);
    }
}

void wk_schedule_join(struct wk_schedule *schedule, uint64_t tokens_all)
{
    schedule->heard_tokens = tokens_all;
    schedule->place = tokens_all / schedule->step_tokens;
    schedule->ramp_steps = schedule->place > 0 ? WK_SCHEDULE_RAMP_STEPS : 0;
}

void wk_schedule_skip_ramp(struct wk_schedule *schedule)
{
    schedule->ramp_steps = 0;
}

bool wk_schedule_hear(struct wk_schedule *schedule, uint64_t tokens_all)
{
    if (tokens_all <= schedule->heard_tokens) {
        return false;
    }
    schedule->heard_tokens = tokens_all;
    uint64_t heard = tokens_all / schedule->step_tokens;
    uint64_t drift = heard > schedule->place ? heard - schedule->place : schedule->place - heard;
    if (drift <= DL_MAX(schedule->place / 20, (uint64_t)WK_SCHEDULE_DRIFT_MIN)) {
        return false;
    }
    schedule->place = heard;
    return true;
}

double wk_schedule_next(struct wk_schedule *schedule)
{
    schedule->place++;
    schedule->own_steps++;
    double rate = wk_adamw_rate(&schedule->inner, schedule->place);
    if (schedule->own_steps < schedule->ramp_steps) {
        double cap = schedule->inner.learning_rate * (double)schedule->own_steps / (double)schedule->ramp_steps;
        return DL_MIN(rate, cap);
    }
    return rate;
}
