/* How a job ends, and how it rests: when it is over and with what result, who is asked to leave in which order, and the same
 * order for a job that is suspended. */
#include "common/mem.h"
#include "common/wire.h"
#include "operator/reconcile/plan_internal.h"

#define SECOND INT64_C(1000000000)
/* Learners outlive their syncers on purpose; at the end they are asked then. */
#define ORPHANED_LEARNERS_NS (3 * SECOND)

static void end_by_result(struct op_planner *planner, int result)
{
    switch ((enum dl_stop_result)result) {
    case DL_STOP_SUCCEEDED: op_planner_end(planner, OP_JOB_SUCCEEDED, OP_REASON_COMPLETED); return;
    case DL_STOP_REQUESTED: op_planner_end(planner, OP_JOB_STOPPED, OP_REASON_STOP_REQUESTED); return;
    case DL_STOP_TIMEOUT: op_planner_end(planner, OP_JOB_FAILED, OP_REASON_TIMED_OUT); return;
    case DL_STOP_FAILED: op_planner_end(planner, OP_JOB_FAILED, OP_REASON_SYNCER_FAILED); return;
    }
}

bool op_planner_is_last(const struct op_planner *planner)
{
    return planner->progress->finishing || planner->progress->succeeded;
}

/* A shard that has succeeded waits for the others, with a bound: what they hold has to be merged once more as well. */
static bool is_success_complete(struct op_planner *planner)
{
    bool all = true;
    for (uint32_t i = 0; i < planner->wanted->shards && i < planner->syncer_count; i++) {
        all = all && planner->syncers[i].is_finished;
    }
    int64_t until_ns = planner->succeeded_since_ns + planner->wanted->limits.finish_ns;
    if (!all && planner->now_ns < until_ns) {
        op_planner_wake(planner, until_ns);
        return false;
    }
    return true;
}

static void end_by_syncers(struct op_planner *planner)
{
    for (uint32_t i = 0; i < planner->wanted->shards && i < planner->syncer_count; i++) {
        const struct op_slot *slot = &planner->syncers[i];
        if (slot->given_up) {
            op_planner_end(planner, OP_JOB_FAILED, slot->reason);
            planner->at_once = true;
        } else if (slot->is_finished && op_planner_is_last(planner)) {
            if (is_success_complete(planner)) {
                op_planner_end(planner, OP_JOB_SUCCEEDED, OP_REASON_COMPLETED);
            }
        } else if (slot->is_finished) {
            /* Someone asked this one to stop: the others have to hear of it. */
            op_planner_end(planner, OP_JOB_STOPPED, OP_REASON_STOP_REQUESTED);
            planner->ask_syncers = true;
        }
    }
}

static void end_by_learners(struct op_planner *planner)
{
    uint32_t existing = 0, given_up = 0;
    enum op_reason reason = OP_REASON_NONE;
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        const struct op_slot *slot = &planner->learners[i];
        if (slot->exists && !slot->leaving) {
            existing++;
            given_up += slot->given_up ? 1 : 0;
            reason = slot->given_up ? slot->reason : reason;
        }
    }
    if (existing > 0 && existing == given_up) {
        op_planner_end(planner, OP_JOB_FAILED, reason);
        planner->at_once = true;
    }
}

static void spread_success(struct op_planner *planner)
{
    const struct op_progress *progress = planner->progress;
    bool any = progress->succeeded;
    for (uint32_t i = 0; i < planner->wanted->shards && i < planner->syncer_count; i++) {
        any = any || (planner->syncers[i].is_finished && op_planner_is_last(planner));
    }
    if (any && planner->succeeded_since_ns == 0) {
        planner->succeeded_since_ns = planner->now_ns;
    }
    if (progress->succeeded && progress->result < 0 && !planner->ask_syncers) {
        struct op_slot everyone = {.kind = OP_SYNCER};
        op_planner_add(planner, OP_FINISH_JOB, &everyone, 0, OP_REASON_COMPLETED);
    }
}

void op_planner_decide_end(struct op_planner *planner)
{
    const struct op_wanted *wanted = planner->wanted;
    spread_success(planner);
    if (planner->progress->result >= 0) {
        /* The budget may have been reached while a stop was on its way. */
        if (planner->is_ending && planner->outcome == OP_JOB_STOPPED &&
            planner->progress->result == DL_STOP_SUCCEEDED) {
            planner->outcome = OP_JOB_SUCCEEDED;
            planner->outcome_reason = OP_REASON_COMPLETED;
        }
        end_by_result(planner, planner->progress->result);
    }
    if (!planner->is_ending && wanted->wish != OP_WISH_NONE) {
        op_planner_end(planner, OP_JOB_STOPPED, OP_REASON_STOP_REQUESTED);
        planner->ask_syncers = true;
    }
    if (!planner->is_ending && wanted->deadline_ns > 0) {
        int64_t until_ns = planner->started_ns + wanted->deadline_ns;
        if (planner->now_ns >= until_ns) {
            op_planner_end(planner, OP_JOB_FAILED, OP_REASON_DEADLINE_EXCEEDED);
            planner->ask_syncers = true;
        } else {
            op_planner_wake(planner, until_ns);
        }
    }
    if (!planner->is_ending) {
        end_by_syncers(planner);
    }
    if (!planner->is_ending && !planner->progress->finishing) {
        end_by_learners(planner);
    }
}

bool op_slot_is_up(const struct op_slot *slot)
{
    return slot->current != NULL || slot->alive > 0 || slot->expected;
}

uint32_t op_slots_up(const struct op_slot *slots, uint32_t count)
{
    uint32_t up = 0;
    for (uint32_t i = 0; i < count; i++) {
        up += op_slot_is_up(&slots[i]) ? 1 : 0;
    }
    return up;
}

static void ask(struct op_planner *planner, const struct op_slot *slot, bool kill, enum op_reason reason)
{
    if (slot->current == NULL || (slot->kind == OP_SYNCER && planner->wanted->syncers_by_set)) {
        return;
    }
    if (kill) {
        op_planner_add(planner, OP_KILL, slot, slot->current->incarnation, reason);
    } else if (slot->current->state != OP_TERMINATING) {
        op_planner_add(planner, OP_STOP, slot, slot->current->incarnation, reason);
    }
}

/* One that was asked and does not go is killed after the grace period, where that is ours to do. */
void op_planner_ask_or_kill(struct op_planner *planner, const struct op_slot *slot, enum op_reason reason)
{
    int64_t grace_ns = planner->wanted->limits.grace_ns;
    bool kill = false;
    if (slot->current != NULL && slot->current->state == OP_TERMINATING && grace_ns > 0) {
        int64_t until_ns = slot->current->since_ns + grace_ns;
        kill = planner->now_ns >= until_ns;
        if (!kill) {
            op_planner_wake(planner, until_ns);
        }
    }
    ask(planner, slot, kill, reason);
}

static void finish_over(struct op_planner *planner)
{
    planner->is_over = true;
    const struct op_slot *evaluator = &planner->evaluator;
    bool has_failed = evaluator->given_up || (evaluator->incarnation > 0 && evaluator->last_code != 0);
    if (planner->outcome == OP_JOB_SUCCEEDED && planner->wanted->evaluator && has_failed) {
        planner->outcome = OP_JOB_FAILED;
        planner->outcome_reason = OP_REASON_EVALUATOR_FAILED;
    }
}

void op_planner_tear_down(struct op_planner *planner)
{
    const struct op_limits *limits = &planner->wanted->limits;
    bool kill = planner->wanted->wish == OP_WISH_KILL;
    uint32_t syncers = op_slots_up(planner->syncers, planner->syncer_count);
    uint32_t learners = op_slots_up(planner->learners, planner->learner_count);
    bool evaluator = op_slot_is_up(&planner->evaluator);
    if (syncers + learners == 0 && !evaluator) {
        finish_over(planner);
        return;
    }
    int64_t ask_ns = planner->ending_since_ns + (planner->at_once ? 0 : limits->finish_ns);
    int64_t ask_learners_ns = syncers > 0 ? ask_ns : DL_MIN(ask_ns, planner->ending_since_ns + ORPHANED_LEARNERS_NS);
    if (planner->ask_syncers && planner->progress->result < 0 && syncers > 0 && !kill) {
        struct op_slot everyone = {.kind = OP_SYNCER};
        op_planner_add(planner, OP_STOP_JOB, &everyone, 0, planner->outcome_reason);
    }
    for (uint32_t i = 0; i < planner->learner_count && planner->now_ns >= ask_learners_ns; i++) {
        op_planner_ask_or_kill(planner, &planner->learners[i], planner->outcome_reason);
    }
    if (planner->now_ns >= ask_ns) {
        op_planner_ask_or_kill(planner, &planner->evaluator, planner->outcome_reason);
    }
    bool is_syncers_turn = (learners == 0 && !evaluator) || planner->now_ns >= ask_ns;
    planner->plan->syncers_wanted = is_syncers_turn ? 0 : planner->wanted->shards;
    for (uint32_t i = 0; i < planner->syncer_count; i++) {
        if (is_syncers_turn) {
            op_planner_ask_or_kill(planner, &planner->syncers[i], planner->outcome_reason);
        }
    }
    for (uint32_t i = 0; i < planner->learner_count && kill; i++) {
        ask(planner, &planner->learners[i], true, planner->outcome_reason);
    }
    for (uint32_t i = 0; i < planner->syncer_count && kill; i++) {
        ask(planner, &planner->syncers[i], true, planner->outcome_reason);
    }
    if (kill) {
        ask(planner, &planner->evaluator, true, planner->outcome_reason);
    }
    op_planner_wake(planner,
                    planner->now_ns < ask_learners_ns ? ask_learners_ns : DL_MAX(ask_ns, planner->now_ns + SECOND));
}

void op_planner_suspend(struct op_planner *planner)
{
    planner->is_suspended = true;
    uint32_t training =
        op_slots_up(planner->learners, planner->learner_count) + (op_slot_is_up(&planner->evaluator) ? 1 : 0);
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        op_planner_ask_or_kill(planner, &planner->learners[i], OP_REASON_SUSPENDED);
    }
    op_planner_ask_or_kill(planner, &planner->evaluator, OP_REASON_SUSPENDED);
    planner->plan->syncers_wanted = training == 0 ? 0 : planner->wanted->shards;
    for (uint32_t i = 0; i < planner->syncer_count && training == 0; i++) {
        op_planner_ask_or_kill(planner, &planner->syncers[i], OP_REASON_SUSPENDED);
    }
}
