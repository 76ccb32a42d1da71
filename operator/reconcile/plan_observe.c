/* What is observed: who lives, who has ended, and what that end means. */
#include "common/exit_codes.h"
#include "common/mem.h"
#include "operator/reconcile/plan_internal.h"

/* Linux's numbers, as they stand in containers' exit codes too: ILL, TRAP, ABRT, BUS, FPE, SEGV, SYS. A program brings
 * these upon itself; all others come from outside. */
static bool is_fault_signal(int number)
{
    static const int faults[] = {4, 5, 6, 7, 8, 11, 31};
    bool is_fault = false;
    for (size_t i = 0; i < DL_COUNT_OF(faults); i++) {
        is_fault = is_fault || number == faults[i];
    }
    return is_fault;
}

bool op_end_is_crash(enum op_end end, int code)
{
    switch (end) {
    case OP_END_EXIT: return code > 128 ? is_fault_signal(code - 128) : code != DL_EXIT_OK && code != DL_EXIT_SAVED;
    case OP_END_SIGNAL: return is_fault_signal(code);
    case OP_END_OUT_OF_MEMORY: return true;
    case OP_END_EVICTED:
    case OP_END_PREEMPTED:
    case OP_END_NODE_LOST:
    case OP_END_NODE_SHUTDOWN:
    case OP_END_DELETED: return false;
    }
    return true;
}

static uint32_t crashes_max(const struct op_limits *limits, enum op_kind kind)
{
    switch (kind) {
    case OP_SYNCER: return limits->syncer_crashes_max;
    case OP_LEARNER: return limits->learner_crashes_max;
    case OP_EVALUATOR: return limits->evaluator_crashes_max;
    }
    return 0;
}

/* The first life cut short by someone else is replaced at once; a crash always waits. */
void op_planner_back_off(struct op_planner *planner, const struct op_limits *limits, struct op_slot *slot,
                         bool is_crash)
{
    uint32_t doublings = slot->short_lives + (is_crash ? 1 : 0);
    slot->short_lives++;
    int64_t wait_ns = 0;
    if (doublings > 0) {
        wait_ns = limits->backoff_first_ns;
        for (uint32_t i = 1; i < doublings && wait_ns < limits->backoff_max_ns; i++) {
            wait_ns *= 2;
        }
        wait_ns = DL_MIN(wait_ns, limits->backoff_max_ns);
    }
    slot->next_start_ns = planner->now_ns + wait_ns;
}

static void give_up(struct op_slot *slot, enum op_reason reason)
{
    slot->given_up = true;
    slot->reason = reason;
}

/* The end of the slot's newest incarnation. `lived_ns` is how long it ran. */
static void count_end(struct op_planner *planner, struct op_slot *slot, enum op_end end, int code, int64_t lived_ns)
{
    const struct op_limits *limits = &planner->wanted->limits;
    slot->counted = slot->incarnation;
    slot->expected = false;
    slot->seen = false;
    slot->last_code = end == OP_END_EXIT || end == OP_END_SIGNAL ? code : -1;
    if (slot->given_up) {
        return; /* Crashed in its place until it was given up, and then was asked to go. */
    }
    slot->reason = OP_REASON_REPLACEMENT;
    if (slot->leaving || planner->is_ending || planner->is_suspended) {
        return; /* Asked for, or of no consequence any more. */
    }
    if (slot->kind == OP_SYNCER && end == OP_END_EXIT && code == DL_EXIT_OK) {
        slot->is_finished = true;
        return;
    }
    if (slot->kind == OP_SYNCER && end == OP_END_EXIT && code == DL_EXIT_TIMEOUT) {
        op_planner_end(planner, OP_JOB_FAILED, OP_REASON_TIMED_OUT);
        return;
    }
    if (end == OP_END_EXIT && (code == DL_EXIT_USAGE || code == DL_EXIT_REFUSED)) {
        give_up(slot, code == DL_EXIT_USAGE ? OP_REASON_BAD_INPUT : OP_REASON_REFUSED);
        return;
    }
    if (lived_ns >= limits->healthy_ns) {
        slot->crashes = slot->short_lives = 0;
    }
    bool is_crash = op_end_is_crash(end, code);
    slot->crashes += is_crash ? 1 : 0;
    if (slot->crashes > crashes_max(limits, slot->kind)) {
        give_up(slot, OP_REASON_CRASH_LOOP);
        return;
    }
    op_planner_back_off(planner, limits, slot, is_crash);
    if (end == OP_END_EXIT && code == DL_EXIT_OK) {
        slot->next_start_ns = DL_MAX(slot->next_start_ns, planner->now_ns + limits->clean_exit_ns);
    }
}

/* A container that was started again in its place: what ended the last life counts, those before it as well. */
static void count_restarts(struct op_planner *planner, struct op_slot *slot, const struct op_instance *instance)
{
    if (instance->restarts <= slot->restarts) {
        slot->restarts = instance->restarts;
        return;
    }
    uint32_t more = instance->restarts - slot->restarts;
    slot->restarts = instance->restarts;
    if (slot->leaving || slot->given_up || planner->is_ending || planner->is_suspended) {
        return;
    }
    enum op_end end = instance->end;
    int code = instance->code;
    if (end == OP_END_EXIT && (code == DL_EXIT_USAGE || code == DL_EXIT_REFUSED)) {
        give_up(slot, code == DL_EXIT_USAGE ? OP_REASON_BAD_INPUT : OP_REASON_REFUSED);
    } else if (slot->kind == OP_SYNCER && end == OP_END_EXIT && code == DL_EXIT_OK) {
        slot->is_finished = true;
    } else if (slot->kind == OP_SYNCER && end == OP_END_EXIT && code == DL_EXIT_TIMEOUT) {
        op_planner_end(planner, OP_JOB_FAILED, OP_REASON_TIMED_OUT);
    } else if (op_end_is_crash(end, code)) {
        slot->crashes += more;
        if (slot->crashes > crashes_max(&planner->wanted->limits, slot->kind)) {
            give_up(slot, OP_REASON_CRASH_LOOP);
        }
    }
}

/* A shard that a StatefulSet keeps: it is replaced by the set, and is only counted here. */
static void observe_shard(struct op_planner *planner, struct op_slot *slot, const struct op_instance *instance)
{
    slot->exists = true;
    slot->alive++;
    if (slot->seen) {
        count_restarts(planner, slot, instance);
    } else {
        slot->restarts = instance->restarts; /* Whoever was here before has dealt with them. */
        if (instance->restarts > 0 && instance->end == OP_END_EXIT && instance->code == DL_EXIT_OK) {
            slot->is_finished = true;
        }
    }
    slot->seen = true;
    if (instance->state == OP_RUNNING && planner->now_ns - instance->started_ns >= planner->wanted->limits.healthy_ns) {
        slot->crashes = 0;
    }
    if (instance->state != OP_ENDED && instance->state != OP_LOST) {
        slot->current = instance;
    }
}

/* An incarnation that this planner has not started: another one did, before it. Ends of such count as ours. */
static void adopt(struct op_slot *slot, const struct op_instance *instance)
{
    if (instance->incarnation <= slot->incarnation) {
        return;
    }
    slot->incarnation = instance->incarnation;
    slot->expected = false;
    slot->seen = false;
    slot->pool = instance->pool;
    slot->exists = true;
}

static void observe_one(struct op_planner *planner, const struct op_instance *instance)
{
    struct op_slot *slot = op_planner_slot(planner, instance->kind, instance->id);
    if (slot == NULL) {
        return;
    }
    if (instance->kind == OP_SYNCER && planner->wanted->syncers_by_set) {
        observe_shard(planner, slot, instance);
        return;
    }
    adopt(slot, instance);
    bool is_newest = instance->incarnation == slot->incarnation && instance->incarnation > slot->counted;
    int64_t lived_ns = instance->since_ns - instance->started_ns;
    switch (instance->state) {
    case OP_ENDED:
        if (is_newest) {
            count_end(planner, slot, instance->end, instance->code, lived_ns);
        }
        op_planner_add(planner, OP_FORGET, slot, instance->incarnation, OP_REASON_NONE);
        return;
    case OP_LOST:
        if (is_newest) {
            count_end(planner, slot, OP_END_NODE_LOST, 0, lived_ns);
        }
        op_planner_add(planner, OP_STOP, slot, instance->incarnation, OP_REASON_NODE_LOST);
        return;
    case OP_RUNNING:
        if (is_newest && planner->now_ns - instance->started_ns >= planner->wanted->limits.healthy_ns) {
            slot->crashes = slot->short_lives = 0;
        }
        break;
    case OP_PENDING:
    case OP_STARTING:
    case OP_TERMINATING: break;
    }
    slot->alive++;
    if (is_newest) {
        if (!slot->seen && !slot->expected) {
            slot->restarts = instance->restarts;
        }
        count_restarts(planner, slot, instance);
        slot->current = instance;
        slot->expected = false;
        slot->seen = true;
        slot->seen_started_ns = instance->started_ns;
    } else if (instance->incarnation <= slot->counted && instance->state != OP_TERMINATING) {
        /* Back from a lost node after its end was taken for granted. */
        op_planner_add(planner, OP_STOP, slot, instance->incarnation, OP_REASON_NODE_LOST);
    }
}

/* What was there and is not any more was deleted; what was started and cannot be seen yet is waited for, with a bound.
 */
static void settle(struct op_planner *planner, struct op_slot *slot)
{
    if (slot->kind == OP_SYNCER && planner->wanted->syncers_by_set) {
        return;
    }
    if (slot->seen && slot->current == NULL && slot->incarnation > slot->counted) {
        count_end(planner, slot, OP_END_DELETED, 0, planner->now_ns - slot->seen_started_ns);
    }
    if (slot->expected) {
        int64_t until_ns = slot->expected_since_ns + planner->wanted->limits.expect_ns;
        if (planner->now_ns >= until_ns) {
            slot->expected = false;
            slot->incarnation--;
        } else {
            op_planner_wake(planner, until_ns);
        }
    }
    if (slot->leaving && slot->current == NULL && !slot->expected && slot->alive == 0) {
        slot->exists = slot->leaving = slot->given_up = false;
        slot->crashes = slot->short_lives = 0;
    }
}

static void for_each_slot(struct op_planner *planner, void (*visit)(struct op_planner *, struct op_slot *))
{
    for (uint32_t i = 0; i < planner->syncer_count; i++) {
        visit(planner, &planner->syncers[i]);
    }
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        visit(planner, &planner->learners[i]);
    }
    visit(planner, &planner->evaluator);
}

static void reset(struct op_planner *planner, struct op_slot *slot)
{
    (void)planner;
    slot->current = NULL;
    slot->alive = 0;
}

void op_planner_observe(struct op_planner *planner, const struct op_instance *instances, uint32_t count)
{
    for_each_slot(planner, reset);
    for (uint32_t i = 0; i < count; i++) {
        observe_one(planner, &instances[i]);
    }
    for_each_slot(planner, settle);
}
