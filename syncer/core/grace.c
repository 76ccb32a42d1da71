/* sy_core, how long a round that has its quorum waits for more. */
#include <math.h>

#include "common/mem.h"
#include "syncer/core/state.h"

/* slack = tau * step_time - (quorum_time + sync_time): what is left of the overlap once the merge and its way back are
 * paid for. A learner that comes within it costs the others nothing. Sending that goes on beside the commit is in the store's
 * time, and counts once: the spread begins where that ends. */
static double adaptive(struct sy_core *core, const struct sy_round *round)
{
    double quorum_time = sy_seconds(core->now_ns - round->opened_ns);
    double sync_time = fmax(core->store_mean, 0) + fmax(core->spread_mean, 0);
    double slack = core->spec->sync.overlap * sy_step_seconds(core, false) - (quorum_time + sync_time);
    return core->spec->sync.grace.margin * slack;
}

double sy_grace_window(struct sy_core *core, const struct sy_round *round)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    double window = 0;
    switch (sync->grace.mode) {
    case DL_GRACE_ADAPTIVE:
        /* In warm-up learners wait for the update, so the window is a share of the interval instead of the overlap. */
        window = round->warmup ? sync->grace.margin * sy_warm_interval(core) * sy_step_seconds(core, true)
                               : adaptive(core, round);
        break;
    case DL_GRACE_FIXED: window = sync->grace.max_seconds; break;
    case DL_GRACE_NONE: break;
    }
    if (round->warmup && sync->grace.mode == DL_GRACE_FIXED) {
        window = fmin(window, sy_warm_interval(core) * sy_step_seconds(core, true));
    }
    if (round->final) {
        /* The last one: whoever still has something to give may bring it. */
        window = fmax(window, fmin(sync->grace.max_seconds, sync->finish_seconds / 4));
    }
    return fmin(fmax(window, 0), sync->grace.max_seconds);
}
