/* sy_core, saving: this process is to end, the job goes on with the next one.
 *
 * Nothing new begins. A round that has its quorum is closed at once, since what it holds is worth a merge; others are
 * given up: learners' counters go on, so that the next pull covers what was pushed. What is merging becomes durable. */
#include "syncer/core/state.h"

void sy_core_on_drain(struct sy_core *core, int64_t now_ns)
{
    sy_event(core, now_ns);
    if (!core->draining && core->phase != SY_ENDED) {
        core->draining = true;
        if (core->seeder != SY_NO_MEMBER) {
            sy_seed_left(core, core->seeder);
        }
        for (uint32_t i = 0; i < core->fragments; i++) {
            sy_round_settle(core, i);
        }
        sy_queue_note(core, false, "saving: no round is opened any more");
    }
    sy_settle(core);
}

bool sy_core_is_drained(const struct sy_core *core)
{
    bool busy = false;
    for (uint32_t i = 0; i < core->fragments; i++) {
        busy = busy || core->rounds[i].state != SY_ROUND_IDLE;
    }
    return core->draining && !busy;
}
