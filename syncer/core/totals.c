/* sy_core, its counters: what is saved with every commit, and what a restart goes on from.
 *
 * Tokens are exact over restarts because the counters of every incarnation are saved with the sum: an incarnation that is
 * known adds what it has trained since it was last counted, one that is not adds all it has trained. */
#include <assert.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/state.h"

void sy_core_get_totals(const struct sy_core *core, struct sy_core_totals *out)
{
    *out = (struct sy_core_totals){
        .next_round = core->next_round,
        .next_admission = core->next_admission,
        .rounds_merged = core->rounds_merged,
        .tokens = core->tokens,
        .tokens_merged = core->tokens_merged,
        .step = core->step,
        .joins = core->joins,
        .refusals = core->refusals,
        .busy_ns = core->busy_ns,
        .possible_ns = core->possible_ns,
        .evaluated = core->evaluated,
        .first_evaluation = core->first_evaluation,
        .last_evaluation = core->last_evaluation,
    };
    memcpy(out->leaves, core->leaves, sizeof out->leaves);
    memcpy(out->verdicts, core->verdicts, sizeof out->verdicts);
}

void sy_core_restore_totals(struct sy_core *core, const struct sy_core_totals *totals)
{
    assert(!core->started);
    core->next_round = DL_MAX(core->next_round, totals->next_round);
    core->next_admission = DL_MAX(core->next_admission, totals->next_admission);
    core->rounds_merged = totals->rounds_merged;
    core->tokens = totals->tokens;
    core->tokens_merged = totals->tokens_merged;
    core->step = totals->step;
    core->joins = totals->joins;
    core->refusals = totals->refusals;
    core->busy_ns = totals->busy_ns;
    core->possible_ns = totals->possible_ns;
    core->evaluated = totals->evaluated;
    core->first_evaluation = totals->first_evaluation;
    core->last_evaluation = totals->last_evaluation;
    memcpy(core->leaves, totals->leaves, sizeof core->leaves);
    memcpy(core->verdicts, totals->verdicts, sizeof core->verdicts);
    for (uint32_t v = 0; v < DL_VERDICT_COUNT; v++) {
        core->pushes += core->verdicts[v]; /* All that were saved are decided. */
    }
}

bool sy_core_incarnation(const struct sy_core *core, uint32_t m, struct sy_core_incarnation *out)
{
    assert(m < core->slots);
    const struct sy_member *member = &core->members[m];
    if (!member->used || member->role != DL_ROLE_LEARNER) {
        return false;
    }
    *out = (struct sy_core_incarnation){
        .learner = member->learner,
        .nonce = member->nonce,
        .born = member->born,
        .admission = member->admission,
        .step = member->step,
        .tokens = member->tokens,
        .pushes_merged = member->pushes_merged,
        .has_left =
            !member->connected && (member->left_why == SY_LEAVE_GOODBYE || member->left_why == SY_LEAVE_PREEMPTED),
    };
    memcpy(out->uid, member->uid, sizeof out->uid);
    return true;
}

void sy_core_restore_incarnation(struct sy_core *core, const struct sy_core_incarnation *from)
{
    assert(!core->started);
    for (uint32_t m = 0; m < core->slots; m++) {
        struct sy_member *member = &core->members[m];
        if (member->used) {
            continue;
        }
        struct sy_part *parts = member->parts;
        *member = (struct sy_member){
            .used = true,
            .holder = SY_NO_HOLDER,
            .role = DL_ROLE_LEARNER,
            .learner = from->learner,
            .nonce = from->nonce,
            .born = from->born,
            .admission = from->admission,
            .step = from->step,
            .tokens = from->tokens,
            .pushes_merged = from->pushes_merged,
            .left_ns = INT64_MIN / 2 + (int64_t)from->born, /* Before anything else; the oldest first. */
            .left_why = from->has_left ? SY_LEAVE_GOODBYE : SY_LEAVE_LOST,
            .loss = __builtin_nanf(""),
            .step_seconds = -1,
            .parts = parts,
        };
        memcpy(member->uid, from->uid, sizeof member->uid);
        return;
    }
}
