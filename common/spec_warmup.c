/* Interval warm-up: how long, and its stages. Pure. */
#include "common/mem.h"
#include "common/spec.h"

uint64_t dl_training_steps(const struct dl_training_spec *training, uint32_t replicas)
{
    uint64_t own = (uint64_t)training->batch_sequences * training->model.sequence_length;
    return training->token_budget / (own * DL_MAX(replicas, 1u));
}

uint32_t dl_warmup_steps(const struct dl_spec *spec)
{
    if (spec->sync.mode == DL_SYNC_SYNCHRONOUS) { /* It waits anyway, as often as its interval says. */
        return 0;
    }
    if (spec->sync.warmup.steps != DL_WARMUP_BY_LENGTH) {
        return (uint32_t)spec->sync.warmup.steps;
    }
    uint64_t steps = dl_training_steps(&spec->training, spec->learners.replicas);
    return (uint32_t)DL_MIN(steps / 8 * 3 + steps % 8 * 3 / 8, (uint64_t)DL_WARMUP_STEPS_MAX);
}

void dl_warmup_plan(const struct dl_sync_spec *sync, uint32_t steps, struct dl_warmup *out)
{
    *out = (struct dl_warmup){.count = 0};
    uint64_t interval = DL_MAX(sync->warmup.interval, 1u), length = steps, end = 0;
    /* A stage that is too short for a sync is none. */
    while (steps > 0 && out->count < DL_WARMUP_STAGES_MAX &&
           (out->count == 0 || (interval < sync->interval && length >= interval))) {
        end += length;
        out->stages[out->count].end = end;
        out->stages[out->count].interval = (uint32_t)interval;
        out->count++;
        interval *= 2;
        length = (uint64_t)steps * 2 / 9;
    }
}

uint64_t dl_warmup_end(const struct dl_warmup *plan)
{
    return plan->count == 0 ? 0 : plan->stages[plan->count - 1].end;
}

uint64_t dl_warmup_syncs(const struct dl_warmup *plan)
{
    uint64_t syncs = 0, begin = 0;
    for (uint32_t i = 0; i < plan->count; i++) {
        syncs += (plan->stages[i].end - begin + plan->stages[i].interval - 1) / plan->stages[i].interval;
        begin = plan->stages[i].end;
    }
    return syncs;
}
