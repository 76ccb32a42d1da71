/* sy_core, interval warm-up: all fragments together every warmup.interval steps, then every 2, 4 and 8 times as many, until the
 * steps of warm-up are done (dl_warmup_plan).
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

/* Over when the furthest learner has done these steps, or when there have been as many rounds as that takes. The
 * rounds are what a restart leaves: then learners start at step 0, and do not warm up again. */
bool sy_is_warming(const struct sy_core *core)
{
    return !core->warm_done;
}

uint32_t sy_warm_interval(const struct sy_core *core)
{
    const struct dl_warmup *plan = &core->warmup;
    uint32_t stage = 0;
    while (stage + 1 < plan->count && core->step >= plan->stages[stage].end) {
        stage++;
    }
    return plan->stages[stage].interval;
}

void sy_warm_look(struct sy_core *core)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t i = 0; i < core->fragments; i++) {
        least = DL_MIN(least, core->rounds[i].version);
    }
    if (!core->warm_done && least > 0 &&
        (core->step >= dl_warmup_end(&core->warmup) || least > dl_warmup_syncs(&core->warmup))) {
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
    double stall = STALL_INTERVALS * sy_warm_interval(core) * step;
    return sy_ns(fmin(fmax(stall, STALL_MIN_SECONDS), STALL_MAX_SECONDS));
}

/* Since when a learner that has not come far enough has been running: the last report, or the last update that let it.
 */
static int64_t running_since(const struct sy_core *core, const struct sy_member *member)
{
    return DL_MAX(member->meta_ns, core->warm_released_ns);
}

/* Those that have not done the interval keep up when they are of about the median's speed, took part in the last round or
 * reported since, and have not been running for too long. */
static bool keeps_up(const struct sy_core *core, const struct sy_member *member, double slow_seconds, int64_t stall_ns)
{
    bool late = core->now_ns - running_since(core, member) >= stall_ns || member->meta_ns < core->warm_opened_ns;
    bool slower = slow_seconds > 0 && member->step_seconds > slow_seconds;
    return !late && !slower;
}

/* Counts those that keep up, and those of them that have done the interval. */
static void count_pace(struct sy_core *core, uint32_t *kept_up, uint32_t *arrived)
{
    double slow_seconds = SY_WARM_SLOW * sy_step_seconds(core, true);
    int64_t stall_ns = sy_warm_stall_ns(core);
    *kept_up = *arrived = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (sy_is_training(member)) {
            bool here = member->credit >= sy_warm_interval(core);
            *arrived += here ? 1 : 0;
            *kept_up += here || keeps_up(core, member, slow_seconds, stall_ns) ? 1 : 0;
        }
    }
}

/* Whether a round still waits for somebody that its window is for. */
bool sy_warm_awaits(struct sy_core *core, uint32_t local)
{
    double slow_seconds = SY_WARM_SLOW * sy_step_seconds(core, true);
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        enum sy_part_state state = member->parts[local].state;
        bool slower = slow_seconds > 0 && member->step_seconds > slow_seconds;
        /* A push on its way will be here soon, whoever sends it. */
        if (state == SY_PART_ANNOUNCED || (state == SY_PART_ASKED && !slower && !member->missed_warmup)) {
            return true;
        }
    }
    return false;
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
    int64_t interval = sy_warm_interval(core);
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (sy_round_is_ready(core, i, core->quorum)) {
            sy_round_open(core, i, need);
            opened = true;
        }
    }
    for (uint32_t m = 0; m < core->slots && opened; m++) {
        core->members[m].missed_warmup = core->members[m].meta_ns < core->warm_opened_ns;
        /* One that is a step behind owes that step; one that ran ahead has nothing saved. */
        struct sy_member *member = &core->members[m];
        member->credit = DL_MAX(DL_MIN(member->credit, interval) - interval, -interval);
    }
    core->warm_opened_ns = opened ? core->now_ns : core->warm_opened_ns;
}

/* The last rounds of warm-up let learners go. A wait lasts as long as an ordinary round may take, all in. */
struct sy_limits sy_warm_limits(struct sy_core *core)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    bool last = core->step + sy_warm_interval(core) >= dl_warmup_end(&core->warmup);
    double sync_seconds = fmax(core->store_mean, 0) + fmax(core->spread_mean, 0) + fmax(core->transfer_mean, 0);
    double wait = 2 * sy_seconds(sy_warm_stall_ns(core)) + 2 * sync_seconds;
    wait = fmin(wait, sync->timeout_seconds);
    return (struct sy_limits){last ? DL_UNBOUNDED : sy_warm_interval(core), 0, (uint32_t)ceil(wait * 1000)};
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
