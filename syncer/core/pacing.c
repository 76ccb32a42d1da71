#include <math.h>

#include "common/mem.h"
#include "syncer/core/internal.h"

double sy_step_seconds(const struct sy_core *core)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->member_max; m++) {
        if (sy_is_live_learner(&core->members[m]) && core->members[m].step_seconds > 0) {
            core->norms[count++] = core->members[m].step_seconds;
        }
    }
    return count == 0 ? 0 : sy_norm_median(core->norms, count);
}

uint32_t sy_quorum(const struct sy_core *core)
{
    return dl_count_resolve(core->spec->sync.quorum, core->spec->learners.replicas);
}

uint32_t sy_warmup_quorum(const struct sy_core *core)
{
    return dl_count_resolve(core->spec->sync.warmup.quorum, sy_live_learners(core));
}

static bool has_first_state(const struct sy_core *core)
{
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        if (core->fragments[f].version == 0) {
            return false;
        }
    }
    return true;
}

/* A job that was restored has its learners in common already. */
bool sy_in_warmup(const struct sy_core *core)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    return sync->mode == DL_SYNC_DECOUPLED && !core->restored && !core->warmup_over && core->step_max < sync->warmup.steps;
}

/* Inner steps from the previous steady round to the next: H / F each, exact over time. */
static uint32_t steps_due(const struct sy_core *core)
{
    uint64_t interval = core->spec->sync.interval, fragments = core->fragment_count;
    return (uint32_t)((core->paced + 1) * interval / fragments - core->paced * interval / fragments);
}

static uint32_t count_advanced(const struct sy_core *core, uint64_t steps)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->member_max; m++) {
        const struct sy_member *member = &core->members[m];
        count += sy_is_live_learner(member) && member->step - member->pace_step >= steps;
    }
    return count;
}

static void restart_pace(struct sy_core *core)
{
    for (uint32_t m = 0; m < core->member_max; m++) {
        core->members[m].pace_step = core->members[m].step;
    }
}

/* How far learners may run before they wait, from the round that opens now. */
void sy_pace_bounds(const struct sy_core *core, uint32_t *pull_within, uint32_t *update_within, uint32_t *wait_ms)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    *pull_within = *update_within = DL_UNBOUNDED;
    *wait_ms = 0;
    if (core->stopping) {
        return;
    }
    if (sync->mode == DL_SYNC_SYNCHRONOUS) {
        *pull_within = steps_due(core);
        *update_within = sync->overlap;
        *wait_ms = DL_MAX(SY_SYNCHRONOUS_WAIT_MS, (uint32_t)(sync->timeout_seconds * 2000));
    } else if (sy_in_warmup(core)) {
        /* The wait is long enough for learners of one speed, and short enough that a silent one costs little. */
        double seconds = 3 * sync->warmup.interval * sy_step_seconds(core) + 4 * core->sync_seconds;
        double most = DL_MAX(sync->grace.max_seconds * 1000, (double)SY_WARMUP_WAIT_MIN_MS);
        bool is_last = core->step_max + sync->warmup.interval >= sync->warmup.steps;
        *pull_within = is_last ? DL_UNBOUNDED : sync->warmup.interval;
        *update_within = 0;
        *wait_ms = (uint32_t)DL_MIN(DL_MAX(seconds * 1000, (double)SY_WARMUP_WAIT_MIN_MS), most);
    }
}

/* The idle fragment whose last round was opened longest ago; UINT32_MAX when all have a round under way. */
static uint32_t next_fragment(const struct sy_core *core)
{
    uint32_t best = UINT32_MAX;
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        const struct sy_round *round = &core->fragments[f].open;
        if (round->state == SY_ROUND_IDLE && (best == UINT32_MAX || round->order < core->fragments[best].open.order)) {
            best = f;
        }
    }
    return best;
}

static void pace_warmup(struct sy_core *core, int64_t now_ns)
{
    uint32_t need = sy_warmup_quorum(core);
    if (sy_live_learners(core) == 0 || count_advanced(core, core->spec->sync.warmup.interval) < need) {
        return;
    }
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        if (core->fragments[f].open.state == SY_ROUND_IDLE) {
            sy_round_open(core, now_ns, f, need, true, false);
        }
    }
    restart_pace(core);
}

static void pace_steady(struct sy_core *core, int64_t now_ns)
{
    uint32_t need = sy_quorum(core);
    /* Several fragments may share an inner step (H < F): then the number of steps due is 0 for some of them. */
    for (uint32_t opened = 0; opened < core->fragment_count; opened++) {
        uint32_t due = steps_due(core);
        if (sy_live_learners(core) < need || count_advanced(core, due) < need || (due == 0 && opened == 0 && core->paced == 0)) {
            return;
        }
        uint32_t f = next_fragment(core);
        if (f == UINT32_MAX) {
            return;
        }
        core->paced++;
        sy_round_open(core, now_ns, f, need, false, false);
        restart_pace(core);
    }
}

void sy_pace(struct sy_core *core, int64_t now_ns)
{
    if (core->stopping || core->ended || !has_first_state(core)) {
        return;
    }
    if (sy_in_warmup(core)) {
        pace_warmup(core, now_ns);
        return;
    }
    if (!core->warmup_over) {
        core->warmup_over = true;
        restart_pace(core);
    }
    pace_steady(core, now_ns);
}
