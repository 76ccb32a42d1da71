#include "operator/reconcile/plan.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/exit_codes.h"
#include "common/job_names.h"
#include "common/mem.h"
#include "operator/reconcile/plan_internal.h"

#define SECOND INT64_C(1000000000)
#define SPARE_IDS 8

const struct op_limits op_limits_default = {
    .learner_crashes_max = 6,
    .syncer_crashes_max = 6,
    .evaluator_crashes_max = 6,
    .backoff_first_ns = SECOND,
    .backoff_max_ns = 120 * SECOND,
    .healthy_ns = 300 * SECOND,
    .clean_exit_ns = SECOND,
    .expect_ns = 30 * SECOND,
    .finish_ns = 60 * SECOND,
    .grace_ns = 0,
};

static const char *const kind_names[] = {"syncer", "learner", "evaluator"};
static const char *const reason_names[OP_REASON_COUNT] = {
    "None",      "Wanted",    "Replacement",   "ScaleDown",        "Unschedulable", "NodeLost",
    "Suspended", "Completed", "StopRequested", "DeadlineExceeded", "TimedOut",      "SyncerFailed",
    "BadInput",  "Refused",   "CrashLoop",     "EvaluatorFailed",  "Waiting",
};
static_assert(OP_JOB_FAILED + 1 == DL_JOB_PHASE_COUNT, "each phase has a name");

const char *op_kind_name(enum op_kind kind)
{
    return kind_names[kind];
}

const char *op_reason_name(enum op_reason reason)
{
    return reason_names[reason];
}

const char *op_job_phase_name(enum op_job_phase phase)
{
    return dl_job_phase_names[phase];
}

enum dl_rc op_planner_new(struct op_planner **out, struct dl_err *err)
{
    struct op_planner *planner = calloc(1, sizeof *planner);
    if (planner == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a planner");
    }
    planner->evaluator = (struct op_slot){.kind = OP_EVALUATOR};
    *out = planner;
    return DL_OK;
}

void op_planner_free(struct op_planner *planner)
{
    if (planner != NULL) {
        free(planner->syncers);
        free(planner->learners);
        free(planner);
    }
}

/* Without memory the planner goes on with the places it has: what lies beyond them is not seen. */
static void grow(struct op_slot **slots, uint32_t *count, enum op_kind kind, uint32_t needed)
{
    struct op_slot *grown = needed > *count ? realloc(*slots, needed * sizeof *grown) : NULL;
    if (grown == NULL) {
        return;
    }
    for (uint32_t i = *count; i < needed; i++) {
        grown[i] = (struct op_slot){.kind = kind, .id = i};
    }
    *slots = grown;
    *count = needed;
}

/* Ids are reused from the lowest, so that there are never more of them than those wanted and those that leave. */
static void make_places(struct op_planner *planner, const struct op_wanted *wanted, const struct op_instance *instances,
                        uint32_t count)
{
    uint32_t learners = DL_MIN(2 * wanted->learners_max + SPARE_IDS, (uint32_t)DL_SPEC_LEARNERS_MAX);
    uint32_t syncers = wanted->shards;
    for (uint32_t i = 0; i < count; i++) {
        const struct op_instance *it = &instances[i];
        if (it->kind == OP_LEARNER && it->id < DL_SPEC_LEARNERS_MAX) {
            learners = DL_MAX(learners, it->id + 1);
        } else if (it->kind == OP_SYNCER && it->id < DL_SPEC_SHARDS_MAX) {
            syncers = DL_MAX(syncers, it->id + 1);
        }
    }
    grow(&planner->learners, &planner->learner_count, OP_LEARNER, learners);
    grow(&planner->syncers, &planner->syncer_count, OP_SYNCER, syncers);
}

bool op_planner_add(struct op_planner *planner, enum op_change_type type, const struct op_slot *slot,
                    uint64_t incarnation, enum op_reason reason)
{
    struct op_plan *plan = planner->plan;
    if (plan->change_count == OP_PLAN_CHANGES_MAX) {
        plan->next_ns = planner->now_ns;
        return false;
    }
    plan->changes[plan->change_count++] = (struct op_change){
        .type = type,
        .kind = slot->kind,
        .pool = slot->pool,
        .id = slot->id,
        .incarnation = incarnation,
        .reason = reason,
    };
    return true;
}

void op_planner_wake(struct op_planner *planner, int64_t at_ns)
{
    planner->plan->next_ns = DL_MIN(planner->plan->next_ns, at_ns);
}

void op_planner_end(struct op_planner *planner, enum op_job_phase outcome, enum op_reason reason)
{
    if (planner->is_ending) {
        return;
    }
    planner->is_ending = true;
    planner->outcome = outcome;
    planner->outcome_reason = reason;
    planner->ending_since_ns = planner->now_ns;
}

struct op_slot *op_planner_slot(struct op_planner *planner, enum op_kind kind, uint32_t id)
{
    switch (kind) {
    case OP_SYNCER: return id < planner->syncer_count ? &planner->syncers[id] : NULL;
    case OP_LEARNER: return id < planner->learner_count ? &planner->learners[id] : NULL;
    case OP_EVALUATOR: break;
    }
    return &planner->evaluator;
}

static const struct op_slot *slot_at(const struct op_planner *planner, enum op_kind kind, uint32_t id)
{
    return op_planner_slot((struct op_planner *)(uintptr_t)planner, kind, id);
}

bool op_planner_wants(const struct op_planner *planner, enum op_kind kind, uint32_t id)
{
    const struct op_slot *slot = slot_at(planner, kind, id);
    return slot != NULL && slot->exists && !slot->leaving;
}

enum op_reason op_planner_given_up(const struct op_planner *planner, enum op_kind kind, uint32_t id)
{
    const struct op_slot *slot = slot_at(planner, kind, id);
    return slot != NULL && slot->given_up ? slot->reason : OP_REASON_NONE;
}

void op_plan_on_start_failed(struct op_planner *planner, const struct op_wanted *wanted, const struct op_change *start,
                             int64_t now_ns)
{
    assert(start->type == OP_START);
    struct op_slot *slot = op_planner_slot(planner, start->kind, start->id);
    if (slot == NULL || slot->incarnation != start->incarnation || !slot->expected) {
        return;
    }
    planner->now_ns = now_ns;
    slot->expected = false;
    slot->counted = slot->incarnation;
    op_planner_back_off(planner, &wanted->limits, slot, true);
}

void op_plan_on_gone(struct op_planner *planner, enum op_kind kind, uint32_t id, uint64_t incarnation, int64_t now_ns)
{
    struct op_slot *slot = op_planner_slot(planner, kind, id);
    if (slot != NULL && slot->incarnation == incarnation && slot->expected) {
        slot->expected = false;
        slot->seen = true; /* The next call counts it as deleted. */
        slot->seen_started_ns = now_ns;
    }
}

/* --- running --- */

/* Asked anew, by a changed spec or after a rest: what happened before is forgotten. */
static void fresh_chance(struct op_planner *planner, struct op_slot *slot)
{
    slot->given_up = false;
    slot->is_finished = false;
    slot->crashes = slot->short_lives = 0;
    slot->next_start_ns = planner->now_ns;
}

static void fresh_chances(struct op_planner *planner)
{
    for (uint32_t i = 0; i < planner->syncer_count; i++) {
        fresh_chance(planner, &planner->syncers[i]);
    }
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        fresh_chance(planner, &planner->learners[i]);
    }
    fresh_chance(planner, &planner->evaluator);
}

static bool is_startable(struct op_planner *planner, const struct op_slot *slot)
{
    if (!slot->exists || slot->leaving || slot->given_up || slot->is_finished || slot->current != NULL ||
        slot->expected) {
        return false;
    }
    if (planner->now_ns < slot->next_start_ns) {
        op_planner_wake(planner, slot->next_start_ns);
        return false;
    }
    return true;
}

static void start(struct op_planner *planner, struct op_slot *slot)
{
    enum op_reason reason = slot->reason == OP_REASON_REPLACEMENT ? OP_REASON_REPLACEMENT : OP_REASON_WANTED;
    uint64_t incarnation = DL_MAX(slot->incarnation, planner->wanted->incarnation_base) + 1;
    if (!op_planner_add(planner, OP_START, slot, incarnation, reason)) {
        return;
    }
    slot->incarnation = incarnation;
    slot->expected = true;
    slot->seen = false;
    slot->restarts = 0;
    slot->expected_since_ns = planner->now_ns;
}

static uint32_t places_taken(const struct op_planner *planner)
{
    uint32_t taken = 0;
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        const struct op_slot *slot = &planner->learners[i];
        taken += slot->alive + (slot->expected ? 1 : 0);
    }
    return taken;
}

/* It left in order once a shard had succeeded: what it exported stands. */
static bool is_exported(const struct op_planner *planner)
{
    const struct op_slot *slot = &planner->evaluator;
    return planner->succeeded_since_ns != 0 && slot->incarnation > 0 && slot->counted == slot->incarnation &&
           slot->last_code == DL_EXIT_OK;
}

static void run(struct op_planner *planner)
{
    const struct op_wanted *wanted = planner->wanted;
    planner->plan->syncers_wanted = wanted->shards;
    op_planner_scavenge(planner);
    op_planner_scale(planner);
    for (uint32_t i = 0; i < wanted->shards && i < planner->syncer_count; i++) {
        planner->syncers[i].exists = true;
        if (!wanted->syncers_by_set && is_startable(planner, &planner->syncers[i])) {
            start(planner, &planner->syncers[i]);
        }
    }
    uint32_t taken = places_taken(planner);
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        struct op_slot *slot = &planner->learners[i];
        if (slot->leaving) {
            op_planner_ask_or_kill(planner, slot, OP_REASON_SCALE_DOWN);
        } else if (slot->given_up) {
            op_planner_ask_or_kill(planner, slot, slot->reason);
        } else if (wanted->endpoints_known && !op_planner_is_last(planner) && taken < wanted->learners_max &&
                   is_startable(planner, slot)) {
            start(planner, slot);
            taken++;
        }
    }
    planner->evaluator.exists = wanted->evaluator;
    if (planner->evaluator.given_up) {
        op_planner_ask_or_kill(planner, &planner->evaluator, planner->evaluator.reason);
    }
    if (wanted->endpoints_known && !is_exported(planner) && is_startable(planner, &planner->evaluator)) {
        start(planner, &planner->evaluator);
    }
}

/* --- what is said about it --- */

static void count_learners(const struct op_planner *planner, struct op_plan *plan)
{
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        const struct op_slot *slot = &planner->learners[i];
        if (!slot->exists) {
            continue;
        }
        const struct op_instance *current = slot->current;
        if (current == NULL) {
            plan->given_up += slot->given_up ? 1 : 0;
            plan->starting += slot->expected ? 1 : 0;
            plan->waiting += !slot->given_up && !slot->expected ? 1 : 0;
            continue;
        }
        struct op_plan_pool *pool = &plan->pools[DL_MIN(slot->pool, (uint32_t)DL_SPEC_POOLS_MAX - 1)];
        uint32_t running = current->state == OP_RUNNING ? 1 : 0, connected = running && current->connected ? 1 : 0;
        plan->running += running;
        plan->connected += connected;
        pool->running += running;
        pool->connected += connected;
        plan->starting += current->state == OP_PENDING || current->state == OP_STARTING ? 1 : 0;
        plan->terminating += current->state == OP_TERMINATING ? 1 : 0;
    }
    for (uint32_t i = 0; i < planner->wanted->shards && i < planner->syncer_count; i++) {
        const struct op_instance *current = planner->syncers[i].current;
        plan->syncers_ready += current != NULL && current->state == OP_RUNNING && current->ready ? 1 : 0;
    }
}

static void describe(struct op_planner *planner, struct op_plan *plan)
{
    count_learners(planner, plan);
    if (planner->is_over || planner->is_ending) {
        plan->phase = planner->is_over ? planner->outcome : OP_JOB_FINISHING;
        plan->reason = planner->outcome_reason;
        snprintf(plan->message, sizeof plan->message, "%s", op_reason_name(planner->outcome_reason));
    } else if (planner->wanted->suspend) {
        uint32_t up = op_slots_up(planner->learners, planner->learner_count) +
                      op_slots_up(planner->syncers, planner->syncer_count) +
                      (op_slot_is_up(&planner->evaluator) ? 1 : 0);
        plan->phase = up > 0 ? OP_JOB_SUSPENDING : OP_JOB_SUSPENDED;
        plan->reason = OP_REASON_SUSPENDED;
        snprintf(plan->message, sizeof plan->message, "suspended as asked");
    } else if (plan->syncers_ready < planner->wanted->shards) {
        plan->phase = plan->running > 0 ? OP_JOB_RUNNING : OP_JOB_PENDING;
        plan->reason = OP_REASON_WAITING;
        snprintf(plan->message, sizeof plan->message, "%u/%u syncers ready", plan->syncers_ready,
                 planner->wanted->shards);
    } else {
        plan->phase = OP_JOB_RUNNING;
        plan->reason = plan->connected < plan->desired ? OP_REASON_WAITING : OP_REASON_NONE;
        snprintf(plan->message, sizeof plan->message, "%u/%u learners connected", plan->connected, plan->desired);
    }
}

void op_plan_make(struct op_planner *planner, const struct op_wanted *wanted, const struct op_progress *progress,
                  const struct op_instance *instances, uint32_t count, int64_t now_ns, struct op_plan *plan)
{
    assert(wanted->shards <= DL_SPEC_SHARDS_MAX && wanted->pool_count <= DL_SPEC_POOLS_MAX);
    *plan = (struct op_plan){.next_ns = INT64_MAX};
    planner->wanted = wanted;
    planner->progress = progress;
    planner->now_ns = now_ns;
    planner->plan = plan;
    if (!planner->is_started) {
        planner->is_started = true;
        planner->started_ns = wanted->started_ns != 0 ? wanted->started_ns : now_ns;
        planner->generation = wanted->generation;
        planner->capacity_changes = wanted->capacity_changes;
    }
    if (wanted->started_ns != 0) {
        planner->started_ns = wanted->started_ns; /* A resumed job starts anew. */
    }
    make_places(planner, wanted, instances, count);
    op_planner_observe(planner, instances, count);
    if (planner->generation != wanted->generation || (planner->is_suspended && !wanted->suspend)) {
        fresh_chances(planner);
        planner->generation = wanted->generation;
        planner->is_suspended = false;
    }
    if (!planner->is_over) {
        op_planner_decide_end(planner);
        if (planner->is_ending) {
            op_planner_tear_down(planner);
        } else if (wanted->suspend) {
            op_planner_suspend(planner);
        } else {
            run(planner);
        }
    }
    describe(planner, plan);
    planner->wanted = NULL;
    planner->progress = NULL;
    planner->plan = NULL;
}
