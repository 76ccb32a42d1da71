#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/internal.h"

const char *sy_phase_name(enum sy_phase phase)
{
    switch (phase) {
    case SY_WAITING_FOR_LEARNERS: return "WaitingForLearners";
    case SY_SEEDING: return "Seeding";
    case SY_WARMUP: return "Warmup";
    case SY_TRAINING: return "Training";
    case SY_WAITING_FOR_QUORUM: return "WaitingForQuorum";
    case SY_FINISHING: return "Finishing";
    case SY_ENDED: return "Ended";
    }
    return "?";
}

uint32_t sy_core_members(const struct sy_core *core)
{
    return core->member_max;
}

bool sy_core_member(const struct sy_core *core, uint32_t m, struct sy_member_view *view)
{
    const struct sy_member *member = &core->members[m];
    if (m >= core->member_max || !member->used) {
        return false;
    }
    memset(view, 0, sizeof *view);
    view->connected = member->connected;
    view->role = member->role;
    view->learner = member->learner;
    view->admission = member->admission;
    memcpy(view->uid, member->uid, sizeof view->uid);
    view->step = member->step;
    view->tokens = member->tokens;
    view->loss = member->loss;
    view->step_seconds = member->step_seconds;
    view->tokens_per_second = member->step_seconds > 0 ? (double)member->last_tokens / member->step_seconds : 0;
    view->heard_ns = member->heard_ns;
    view->pushes_merged = member->pushes_merged;
    view->waited_ns = member->waited_ns;
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        uint64_t current = core->fragments[f].version, held = member->fragments[f].version;
        view->versions_behind = DL_MAX(view->versions_behind, current > held ? current - held : 0);
    }
    return true;
}

bool sy_core_fragment(const struct sy_core *core, uint32_t global, struct sy_fragment_view *view)
{
    uint32_t index = sy_local(core, global);
    if (index == UINT32_MAX) {
        return false;
    }
    const struct sy_fragment_state *fragment = &core->fragments[index];
    const struct sy_round *round = &fragment->open;
    memset(view, 0, sizeof *view);
    view->version = fragment->version;
    view->round = fragment->round;
    view->round_open = round->state != SY_ROUND_IDLE;
    view->open_round = round->id;
    view->need = round->need;
    view->asked = round->asked;
    for (uint32_t m = 0; m < core->member_max; m++) {
        view->have += round->parts[m].state == SY_PART_HAVE;
    }
    return true;
}

static enum sy_phase phase(const struct sy_core *core)
{
    bool is_missing = false;
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        is_missing = is_missing || core->fragments[f].version == 0;
    }
    if (core->ended) {
        return SY_ENDED;
    }
    if (core->stopping) {
        return SY_FINISHING;
    }
    if (is_missing) {
        return core->seeder == SY_NO_MEMBER ? SY_WAITING_FOR_LEARNERS : SY_SEEDING;
    }
    if (sy_live_learners(core) < (sy_in_warmup(core) ? 1 : sy_quorum(core))) {
        return SY_WAITING_FOR_QUORUM;
    }
    return sy_in_warmup(core) ? SY_WARMUP : SY_TRAINING;
}

void sy_core_view(const struct sy_core *core, int64_t now_ns, struct sy_core_view *view)
{
    memset(view, 0, sizeof *view);
    view->phase = phase(core);
    view->connected = sy_live_learners(core);
    view->quorum_have = view->connected;
    view->quorum_need = sy_in_warmup(core) ? sy_warmup_quorum(core) : sy_quorum(core);
    view->stop_result = core->stop_result;
    view->step = core->step_max;
    view->rounds_merged = core->rounds_merged;
    view->tokens = core->tokens;
    view->tokens_merged = (uint64_t)core->tokens_merged;
    double loss = 0, tokens = 0;
    for (uint32_t m = 0; m < core->member_max; m++) {
        const struct sy_member *member = &core->members[m];
        if (sy_is_live_learner(member) && isfinite(member->loss)) {
            loss += (double)member->loss * (double)member->last_tokens;
            tokens += (double)member->last_tokens;
        }
    }
    view->loss = tokens > 0 ? (float)(loss / tokens) : NAN;
    double elapsed = core->first_step_ns == INT64_MIN ? 0 : (double)(now_ns - core->first_step_ns) * 1e-9;
    double possible = elapsed * DL_MAX(core->spec->learners.replicas, 1u);
    view->goodput = possible > 0 ? DL_MIN((double)core->busy_ns * 1e-9 / possible, 1.0) : 0;
    view->evaluated = core->evaluated;
    view->first_evaluation = core->first_evaluation;
    view->last_evaluation = core->last_evaluation;
    memcpy(view->verdicts, core->verdicts, sizeof view->verdicts);
    memcpy(view->leaves, core->leaves, sizeof view->leaves);
    view->joins = core->joins;
    view->refusals = core->refusals;
    view->times = core->times;
    view->grace_seconds = core->grace_seconds;
    if (core->delayed[0] != 0) {
        snprintf(view->message, sizeof view->message, "commit delayed: %.200s", core->delayed);
    } else if (core->stopping) {
        memcpy(view->message, core->stop_text, sizeof view->message);
    } else {
        snprintf(view->message, sizeof view->message, "%u/%u learners", view->connected, view->quorum_need);
    }
}

const char *sy_core_check(const struct sy_core *core)
{
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        const struct sy_fragment_state *fragment = &core->fragments[f];
        const struct sy_round *round = &fragment->open;
        if (round->id >= core->next_round || fragment->round >= core->next_round) {
            return "a round from the future";
        }
        for (uint32_t m = 0; m < core->member_max; m++) {
            const struct sy_member *member = &core->members[m];
            if (round->state == SY_ROUND_PULLING && round->parts[m].state == SY_PART_ASKED && !member->connected) {
                return "a round waits for a learner that is gone";
            }
            if (member->used && member->fragments[f].merged_base >= fragment->version && fragment->version > 0 &&
                member->fragments[f].merged_base > 0) {
                return "a push was merged on a base that is not older than the current version";
            }
        }
        for (uint32_t i = 1; round->state == SY_ROUND_MERGING && i < round->participant_count; i++) {
            if (round->participants[i - 1].learner > round->participants[i].learner) {
                return "participants are not in ascending learner id";
            }
        }
        if (round->state == SY_ROUND_MERGING && !round->seeding && round->participant_count == 0) {
            return "a merge of nothing";
        }
    }
    for (uint32_t m = 0; m < core->member_max; m++) {
        for (uint32_t n = m + 1; n < core->member_max; n++) {
            if (sy_is_live_learner(&core->members[m]) && sy_is_live_learner(&core->members[n]) &&
                core->members[m].learner == core->members[n].learner) {
                return "two live learners have one id";
            }
        }
    }
    if (core->tokens_merged > (double)core->tokens && !core->restored) {
        return "more tokens merged than trained";
    }
    return NULL;
}
