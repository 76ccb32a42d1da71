/* sy_core, what is shown. */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/state.h"

uint32_t sy_core_members(const struct sy_core *core)
{
    return core->slots;
}

bool sy_core_member(const struct sy_core *core, uint32_t m, struct sy_member_view *view)
{
    assert(m < core->slots);
    const struct sy_member *member = &core->members[m];
    if (!member->used) {
        return false;
    }
    *view = (struct sy_member_view){
        .connected = member->connected,
        .role = member->role,
        .learner = member->learner,
        .admission = member->admission,
        .step = member->step,
        .tokens = member->tokens,
        .loss = member->loss,
        .step_seconds = fmax(member->step_seconds, 0),
        .tokens_per_second = member->connected ? member->tokens_per_second : 0,
        .heard_ns = member->heard_ns,
        .pushes_merged = member->pushes_merged,
        .waited_ns = member->waited_ns,
        .serves = member->serve[0] != 0,
        .recovered_from = member->recovered ? (int32_t)member->recovered_from : -1,
    };
    memcpy(view->uid, member->uid, sizeof view->uid);
    for (uint32_t i = 0; i < core->fragments && member->role == DL_ROLE_LEARNER; i++) {
        uint64_t behind = core->rounds[i].version - DL_MIN(member->parts[i].version, core->rounds[i].version);
        view->versions_behind = DL_MAX(view->versions_behind, behind);
    }
    return true;
}

bool sy_core_fragment(const struct sy_core *core, uint32_t fragment, struct sy_fragment_view *view)
{
    uint32_t i = sy_fragment_local(core, fragment);
    if (i == UINT32_MAX) {
        return false;
    }
    const struct sy_round *round = &core->rounds[i];
    *view = (struct sy_fragment_view){
        .version = round->version,
        .round = round->made_round,
        .round_open = round->state != SY_ROUND_IDLE,
        .open_round = round->state != SY_ROUND_IDLE ? round->number : 0,
        .have = round->have,
        .need = round->state == SY_ROUND_IDLE ? core->quorum : round->need,
        .asked = round->asked,
    };
    return true;
}

static double goodput(const struct sy_core *core, int64_t now_ns)
{
    bool goes_on = core->stepped && core->phase != SY_ENDED && now_ns > core->now_ns;
    double since_ns = goes_on ? (double)(now_ns - core->now_ns) * sy_could_compute(core) : 0;
    double possible_ns = (double)core->possible_ns + since_ns;
    return possible_ns > 0 ? DL_MIN((double)core->busy_ns / possible_ns, 1.0) : 0;
}

/* Mean of the last losses, weighted by the tokens of the step they are of. Nobody there: that of all who were. */
static float mean_loss(const struct sy_core *core)
{
    for (int connected = 1; connected >= 0; connected--) {
        double sum = 0, weights = 0;
        for (uint32_t m = 0; m < core->slots; m++) {
            const struct sy_member *member = &core->members[m];
            bool counts = member->used && member->role == DL_ROLE_LEARNER && isfinite(member->loss) &&
                          (member->connected || connected == 0);
            double weight = counts ? (double)DL_MAX(member->step_tokens, UINT64_C(1)) : 0;
            sum += counts ? weight * (double)member->loss : 0;
            weights += weight;
        }
        if (weights > 0) {
            return (float)(sum / weights);
        }
    }
    return __builtin_nanf("");
}

static const char *delayed(const struct sy_core *core)
{
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (core->rounds[i].delayed) {
            return core->delay_text;
        }
    }
    return NULL;
}

static uint32_t stored(const struct sy_core *core)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < core->fragments; i++) {
        count += core->rounds[i].version > 0 ? 1 : 0;
    }
    return count;
}

static void describe(const struct sy_core *core, char *text, size_t size)
{
    const char *delay = delayed(core);
    uint32_t left = 0;
    for (uint32_t i = 0; i < core->fragments; i++) {
        left += core->rounds[i].final_done ? 0 : 1;
    }
    if (delay != NULL || core->draining) {
        snprintf(text, size, "%s", delay != NULL ? delay : "saving: the syncer was asked to leave");
        return;
    }
    switch (core->phase) {
    case SY_WAITING_FOR_LEARNERS: snprintf(text, size, "%u/%u learners", core->connected, core->quorum); break;
    case SY_SEEDING:
        snprintf(text, size, "first state from learner %u: %u/%u fragments", core->members[core->seeder].learner,
                 stored(core), core->fragments);
        break;
    case SY_WARMUP:
        snprintf(text, size, "%u/%u learners, warm-up step %llu/%llu", core->connected, core->quorum,
                 (unsigned long long)core->step, (unsigned long long)dl_warmup_end(&core->warmup));
        break;
    case SY_TRAINING:
    case SY_WAITING_FOR_QUORUM: snprintf(text, size, "%u/%u learners", core->connected, core->quorum); break;
    case SY_FINISHING: snprintf(text, size, "%.200s; last rounds left: %u", core->stop_text, left); break;
    case SY_ENDED: snprintf(text, size, "%s", core->stop_text); break;
    }
}

void sy_core_view(const struct sy_core *core, int64_t now_ns, struct sy_core_view *view)
{
    *view = (struct sy_core_view){
        .phase = core->phase,
        .stop_result = core->stop_result,
        .connected = core->connected,
        .quorum_have = core->connected,
        .quorum_need = core->quorum,
        .step = core->step,
        .rounds_merged = core->rounds_merged,
        .tokens = core->tokens,
        .tokens_merged = core->tokens_merged / core->fragments,
        .goodput = goodput(core, now_ns),
        .loss = mean_loss(core),
        .evaluated = core->evaluated,
        .first_evaluation = core->first_evaluation,
        .last_evaluation = core->last_evaluation,
        .joins = core->joins,
        .refusals = core->refusals,
        .recoveries = core->recoveries,
        .times = {.wait = fmax(core->wait_mean, 0),
                  .transfer = fmax(core->transfer_mean, 0),
                  .grace = fmax(core->grace_mean, 0),
                  .merge = fmax(core->merge_mean, 0),
                  .commit = fmax(core->commit_mean, 0),
                  .total = fmax(core->total_mean, 0)},
        .grace_seconds = core->grace_seconds,
        .data = {.positions = core->ledger.positions,
                 .counted = core->ledger.counted,
                 .leased = sy_ledger_leased(&core->ledger),
                 .queued = sy_ledger_queued(&core->ledger)},
    };
    memcpy(view->verdicts, core->verdicts, sizeof view->verdicts);
    memcpy(view->leaves, core->leaves, sizeof view->leaves);
    describe(core, view->message, sizeof view->message);
}
