/* sy_core, interval warm-up: all fragments together every warmup.interval steps, until warmup.steps are done.
 *
 * Learners wait at their boundaries meanwhile (for the update, and for the next pull), so that they have something in
 * common; therefore nobody may be waited for long. Only learners that keep up are counted in the quorum: one whose
 * steps take over SY_WARM_SLOW times the median's, or that has reported nothing for the stall bound, is not, and a
 * round that is open for longer than that closes on the plain quorum. They still take part whenever they come in time.
 */
#include <math.h>

#include "common/mem.h"
#include "syncer/core/state.h"

#define SY_WARM_SLOW 2.0
#define STALL_INTERVALS 2.0    /* The stall bound in warm-up intervals of the median's steps ... */
#define STALL_MIN_SECONDS 0.05 /* ... and its limits. */
#define STALL_MAX_SECONDS 5.0
#define STALL_UNKNOWN_SECONDS 2.0 /* Until somebody has reported a step. */

/* Over when the furthest learner has done warmup.steps, or when there have been as many rounds as that takes. The
 * rounds are what a restart leaves: then learners start at step 0, and do not warm up again. */
bool sy_is_warming(const struct sy_core *core)
{
    return !core->warm_done;
}

void sy_warm_look(struct sy_core *core)
{
    uint64_t interval = DL_MAX(core->spec->sync.warmup.interval, 1u);
    uint64_t steps = core->spec->sync.warmup.steps;
    uint64_t rounds = (steps + interval - 1) / interval;
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < core->fragments; i++) {
        least = DL_MIN(least, core->rounds[i].version);
    }
    if (!core->warm_done && least > 0 && (core->step >= steps || least > rounds)) {
        core->warm_done = true;
        core->pace_index = 0;
        sy_queue_note(core, false, "warm-up is over step=%llu versions=%llu", (unsigned long long)core->step,
                      (unsigned long long)least);
    }
}

int64_t sy_warm_stall_ns(struct sy_core *core)
{
    double step = sy_step_seconds(core, true);
    if (step <= 0) {
        return sy_ns(STALL_UNKNOWN_SECONDS);
    }
    double stall = STALL_INTERVALS * core->spec->sync.warmup.interval * step;
    return sy_ns(fmin(fmax(stall, STALL_MIN_SECONDS), STALL_MAX_SECONDS));
}

/* Since when a learner that has not come far enough has been running: the last report, or the last update that let it.
 */
static int64_t running_since(const struct sy_core *core, const struct sy_member *member)
{
    return DL_MAX(member->meta_ns, core->warm_released_ns);
}

/* Counts those that keep up, and those of them that have done the interval. */
static void count_pace(struct sy_core *core, uint32_t *kept_up, uint32_t *arrived)
{
    double slow = SY_WARM_SLOW * sy_step_seconds(core, true);
    int64_t stall_ns = sy_warm_stall_ns(core);
    *kept_up = *arrived = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (!sy_is_training(member)) {
            continue;
        }
        bool here = member->credit >= core->spec->sync.warmup.interval;
        bool late = core->now_ns - running_since(core, member) >= stall_ns;
        bool slower = slow > 0 && member->step_seconds > slow;
        *arrived += here ? 1 : 0;
        *kept_up += here || (!late && !slower) ? 1 : 0;
    }
}

void sy_warm_run(struct sy_core *core)
{
    sy_warm_look(core);
    if (core->warm_done) {
        return;
    }
    uint32_t kept_up = 0, arrived = 0;
    count_pace(core, &kept_up, &arrived);
    /* Never below K: that is the least the user wants merged. */
    uint32_t need = DL_MAX(dl_count_resolve(core->spec->sync.warmup.quorum, kept_up), core->quorum);
    if (arrived < need) {
        return;
    }
    bool opened = false;
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (sy_round_is_ready(core, i, core->quorum)) {
            sy_round_open(core, i, need);
            opened = true;
        }
    }
    for (uint32_t m = 0; m < core->slots && opened; m++) {
        core->members[m].credit = 0;
    }
}

/* The last rounds of warm-up let learners go. A wait lasts as long as an ordinary round may take, all in. */
struct sy_limits sy_warm_limits(struct sy_core *core)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    bool last = core->step + sync->warmup.interval >= sync->warmup.steps;
    double sync_seconds = fmax(core->store_mean, 0) + fmax(core->spread_mean, 0) + fmax(core->transfer_mean, 0);
    double wait = 2 * sy_seconds(sy_warm_stall_ns(core)) + 2 * sync_seconds;
    wait = fmin(wait, sync->timeout_seconds);
    return (struct sy_limits){last ? DL_UNBOUNDED : sync->warmup.interval, 0, (uint32_t)ceil(wait * 1000)};
}

int64_t sy_warm_deadline(const struct sy_core *core)
{
    int64_t deadline_ns = INT64_MAX;
    if (!sy_is_warming(core) || core->phase != SY_WARMUP) {
        return deadline_ns;
    }
    /* Reads only; the estimate needs the scratch array. */
    int64_t stall_ns = sy_warm_stall_ns((struct sy_core *)core);
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        int64_t at_ns = running_since(core, member) + stall_ns;
        if (sy_is_training(member) && at_ns > core->now_ns && at_ns < deadline_ns) {
            deadline_ns = at_ns;
        }
    }
    return deadline_ns;
}
