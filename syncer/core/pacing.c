/* sy_core, when a round is due.
 *
 * Each learner has a credit: the inner steps it has advanced, less those that opened rounds used up. A round is due
 * when K credits reach the number of steps between two rounds, H / fragments of this shard, and takes that number from
 * every credit. So the pace is that of the K-th fastest learner, and learners that run side by side do not open a round
 * each. Credits are kept within bounds: a slow learner's debt stays small, so that it can carry the pace on when the
 * fast ones leave; and no more than H is saved, which is every fragment once. It is not less, so
 * that a learner whose steps vary does not lose what it ran ahead. */
#include <math.h>

#include "common/mem.h"
#include "syncer/core/state.h"

/* Steps to the next round. H / F is not whole in general: over F rounds the steps add up to H exactly. */
static int64_t due_steps(const struct sy_core *core)
{
    uint64_t interval = core->spec->sync.interval, count = core->fragments;
    uint64_t n = core->pace_index;
    return (int64_t)((n + 1) * interval / count - n * interval / count);
}

static int64_t debt_limit(const struct sy_core *core)
{
    return DL_MAX(DL_MAX(due_steps(core), (int64_t)core->spec->sync.interval / 4), 1);
}

void sy_pace_advance(struct sy_member *member, uint64_t steps)
{
    member->credit += (int64_t)DL_MIN(steps, (uint64_t)UINT32_MAX);
}

static uint32_t count_credits(const struct sy_core *core, int64_t at_least)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        count += sy_is_training(&core->members[m]) && core->members[m].credit >= at_least ? 1 : 0;
    }
    return count;
}

/* The pace goes on from those who are left: when fewer than K of them are out of debt, all are raised until K are. */
void sy_pace_left(struct sy_core *core)
{
    uint32_t training = sy_members_training(core);
    uint32_t need = DL_MIN(core->quorum, training);
    if (need == 0) {
        return;
    }
    int64_t debt = 0, debt_max = debt_limit(core) + core->spec->sync.interval;
    while (debt < debt_max && count_credits(core, -debt) < need) {
        debt++;
    }
    for (uint32_t m = 0; m < core->slots; m++) {
        core->members[m].credit += sy_is_training(&core->members[m]) ? debt : 0;
    }
}

/* Idle fragments in the order of their last opening: one that had to be skipped comes first as soon as it is ready. */
static uint32_t next_ready(const struct sy_core *core, uint32_t need)
{
    uint32_t best = UINT32_MAX;
    for (uint32_t i = 0; i < core->fragments; i++) {
        bool earlier = best == UINT32_MAX || core->rounds[i].order < core->rounds[best].order;
        if (earlier && sy_round_is_ready(core, i, need)) {
            best = i;
        }
    }
    return best;
}

static void spend(struct sy_core *core, int64_t steps)
{
    int64_t debt_max = debt_limit(core);
    for (uint32_t m = 0; m < core->slots; m++) {
        struct sy_member *member = &core->members[m];
        if (sy_is_training(member)) {
            member->credit = DL_MAX(member->credit - steps, -debt_max);
        }
    }
}

static void run_steady(struct sy_core *core)
{
    while (count_credits(core, due_steps(core)) >= core->quorum) {
        uint32_t i = next_ready(core, core->quorum);
        if (i == UINT32_MAX) {
            break;
        }
        spend(core, due_steps(core));
        core->pace_index = (core->pace_index + 1) % core->fragments;
        sy_round_open(core, i, 0);
    }
    int64_t most = core->spec->sync.interval;
    for (uint32_t m = 0; m < core->slots; m++) {
        core->members[m].credit = DL_MIN(core->members[m].credit, most);
    }
}

void sy_pace_run(struct sy_core *core)
{
    if (sy_is_warming(core)) {
        sy_warm_run(core);
    }
    if (!sy_is_warming(core)) {
        run_steady(core);
    }
}

/* How far a learner may run: decoupled, as far as it likes; in the synchronous form until the next pull, of whichever
 * fragment, and the update are due, and no wait is longer than a connection may be silent. */
struct sy_limits sy_pace_limits(struct sy_core *core)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    if (core->finishing || core->phase == SY_ENDED) {
        return (struct sy_limits){DL_UNBOUNDED, DL_UNBOUNDED, 0};
    }
    if (sy_is_warming(core)) {
        return sy_warm_limits(core);
    }
    if (sync->mode == DL_SYNC_SYNCHRONOUS) {
        return (struct sy_limits){(uint32_t)DL_MAX(due_steps(core), 1), sync->overlap,
                                  (uint32_t)fmin(sync->timeout_seconds * 1000, 1e9)};
    }
    return (struct sy_limits){DL_UNBOUNDED, DL_UNBOUNDED, 0};
}
