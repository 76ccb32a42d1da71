/* sy_core, the end: every fragment is merged once more, then STOP.
 *
 * A round that is under way becomes the fragment's last; an idle fragment gets one more as soon as its quorum has
 * something to give. At three quarters of finishSeconds what is not there is given up, at finishSeconds it ends
 * whatever is missing.
 *
 * A syncer may be started with its budget reached: it was lost between the last merge and the export of the weights, or the run
 * is resumed as it is or with a smaller budget. Then it waits, within the same bound, for those who may come back: the
 * evaluator, which gets the state before its STOP and exports it, and where there never was one, the learners that have not
 * said goodbye. A job that has ended in order, without an evaluator, has nobody to wait for, and ends at once. */
#include <stdio.h>

#include "common/mem.h"
#include "syncer/core/state.h"

static void end(struct sy_core *core)
{
    for (uint32_t i = 0; i < core->fragments; i++) {
        struct sy_round *round = &core->rounds[i];
        if (sy_round_is_open(round)) {
            sy_round_abandon(core, i, DL_VERDICT_BELOW_QUORUM);
        }
    }
    if (core->seeder != SY_NO_MEMBER) {
        sy_seed_left(core, core->seeder);
    }
    for (uint32_t m = 0; m < core->slots; m++) {
        if (core->members[m].connected) {
            sy_queue(core, &(struct sy_queued){.type = SY_ACT_STOP, .member = m});
        }
    }
    core->ended_ns = core->now_ns;
    core->finish_soft_ns = core->finish_hard_ns = INT64_MAX;
    sy_phase_move(core, SY_ENDED);
}

static bool nothing_to_merge(const struct sy_core *core)
{
    return !sy_is_seeded(core) || core->connected == 0;
}

/* Whether the job has an evaluator. It reports as soon as there is a state, unless it is to report the end alone. */
static bool has_evaluator(const struct sy_core *core)
{
    return core->evaluated || core->evaluators > 0 || core->spec->training.evaluation_seconds <= 0;
}

/* Somebody who was told of this job, and not of its end. Goodbyes are saved when a syncer ends, after everybody's. */
static bool someone_may_return(const struct sy_core *core)
{
    if (has_evaluator(core)) {
        return core->evaluators == 0;
    }
    bool any_known = false, any_lost = false;
    for (uint32_t m = 0; m < core->slots; m++) {
        any_known = any_known || core->members[m].used;
        any_lost = any_lost || sy_member_may_return(core, m);
    }
    return any_lost || !any_known;
}

void sy_finish_begin(struct sy_core *core, enum dl_stop_result result, const char *text)
{
    bool overrides = result == DL_STOP_FAILED && core->stop_result != DL_STOP_FAILED;
    if (core->phase == SY_ENDED || (core->finishing && !overrides)) {
        return;
    }
    if (core->seeder != SY_NO_MEMBER) {
        sy_seed_left(core, core->seeder);
    }
    core->finishing = true;
    core->awaits_return = result == DL_STOP_SUCCEEDED && !core->was_joined && sy_is_seeded(core);
    core->stop_result = result;
    snprintf(core->stop_text, sizeof core->stop_text, "%s", text == NULL ? "" : text);
    sy_queue_note(core, result == DL_STOP_FAILED, "the job is to end: %s", core->stop_text);
    if (result == DL_STOP_FAILED) {
        end(core);
        return;
    }
    core->finish_soft_ns = core->now_ns + sy_ns(core->spec->sync.finish_seconds * 0.75);
    core->finish_hard_ns = core->now_ns + sy_ns(core->spec->sync.finish_seconds);
    for (uint32_t i = 0; i < core->fragments; i++) {
        core->rounds[i].final = sy_round_is_open(&core->rounds[i]);
    }
}

/* Past the soft deadline: a round with its quorum is merged, others are given up. */
static void hurry(struct sy_core *core, uint32_t local)
{
    sy_round_settle(core, local);
    core->rounds[local].final_done = core->rounds[local].state == SY_ROUND_IDLE;
}

void sy_finish_run(struct sy_core *core)
{
    bool soft = core->now_ns >= core->finish_soft_ns, hard = core->now_ns >= core->finish_hard_ns;
    bool done = true;
    for (uint32_t i = 0; i < core->fragments; i++) {
        struct sy_round *round = &core->rounds[i];
        if (round->final_done) {
            continue;
        }
        if (soft || nothing_to_merge(core)) {
            hurry(core, i);
        } else if (sy_round_is_ready(core, i, core->quorum)) {
            sy_round_open(core, i, 0);
        }
        done = done && round->final_done;
    }
    if ((done && !(core->awaits_return && someone_may_return(core))) || hard) {
        end(core);
    }
}
