/* How many learners a pool should have, which ids they get, and who has to go. */
#include <string.h>

#include "common/mem.h"
#include "operator/reconcile/plan_internal.h"

#define SCAVENGE_BACKOFF_DOUBLINGS_MAX 6 /* 64 times the cooldown. */

static bool is_member(const struct op_slot *slot, uint32_t pool)
{
    return slot->exists && !slot->leaving && slot->pool == pool;
}

static uint32_t count_members(const struct op_planner *planner, uint32_t pool)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        count += is_member(&planner->learners[i], pool) ? 1 : 0;
    }
    return count;
}

/* --- scavenging: while all of a pool's learners run, add one more; take back one that finds no place --- */

static void take_back(struct op_planner *planner, uint32_t pool)
{
    struct op_scavenging *state = &planner->scavenging[pool];
    const struct op_wanted_pool *wanted = &planner->wanted->pools[pool];
    state->extra--;
    state->last_failed = true;
    int64_t wait_ns = wanted->cooldown_ns;
    for (uint32_t i = 0; i < state->failures && i < SCAVENGE_BACKOFF_DOUBLINGS_MAX; i++) {
        wait_ns *= 2;
    }
    state->failures++;
    state->backoff_until_ns = planner->now_ns + wait_ns;
}

static void scavenge_pool(struct op_planner *planner, uint32_t pool)
{
    struct op_scavenging *state = &planner->scavenging[pool];
    const struct op_wanted_pool *wanted = &planner->wanted->pools[pool];
    if (!wanted->scavenges) {
        state->extra = 0;
        return;
    }
    uint32_t members = 0, running = 0;
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        const struct op_slot *slot = &planner->learners[i];
        if (!is_member(slot, pool)) {
            continue;
        }
        members++;
        const struct op_instance *current = slot->current;
        running += current != NULL && current->state == OP_RUNNING ? 1 : 0;
        if (current != NULL && current->state == OP_PENDING && current->unschedulable) {
            int64_t until_ns = current->since_ns + wanted->pending_ns;
            if (planner->now_ns >= until_ns && state->extra > 0) {
                take_back(planner, pool);
                return; /* One at a time: what it frees has to be seen first. */
            }
            if (planner->now_ns < until_ns) {
                op_planner_wake(planner, until_ns);
            }
        }
    }
    uint32_t size = wanted->replicas + state->extra;
    if (members != size || running != size || size >= wanted->scavenge_max) {
        return;
    }
    int64_t due_ns =
        state->has_grown ? state->grown_ns + wanted->cooldown_ns : planner->started_ns + wanted->cooldown_ns;
    due_ns = DL_MAX(due_ns, state->backoff_until_ns);
    if (planner->now_ns < due_ns) {
        op_planner_wake(planner, due_ns);
        return;
    }
    state->failures = state->last_failed ? state->failures : 0;
    state->last_failed = false;
    state->extra++;
    state->has_grown = true;
    state->grown_ns = planner->now_ns;
}

void op_planner_scavenge(struct op_planner *planner)
{
    if (planner->capacity_changes != planner->wanted->capacity_changes) {
        planner->capacity_changes = planner->wanted->capacity_changes;
        for (uint32_t i = 0; i < DL_SPEC_POOLS_MAX; i++) {
            planner->scavenging[i].backoff_until_ns = 0;
            planner->scavenging[i].failures = 0;
        }
    }
    for (uint32_t i = 0; i < planner->wanted->pool_count; i++) {
        scavenge_pool(planner, i);
    }
}

/* --- scaling --- */

static int victim_rank(const struct op_slot *slot)
{
    if (slot->current == NULL) {
        return 0;
    }
    if (slot->current->state == OP_PENDING && slot->current->unschedulable) {
        return 1;
    }
    bool is_ready = slot->current->state == OP_RUNNING && slot->current->ready;
    return !is_ready ? 2 : (slot->current->disrupted ? 3 : 4);
}

static bool goes_before(const struct op_slot *a, const struct op_slot *b)
{
    int rank_a = victim_rank(a), rank_b = victim_rank(b);
    if (rank_a != rank_b) {
        return rank_a < rank_b;
    }
    if (rank_a > 0) {
        const struct op_instance *one = a->current, *other = b->current;
        if (one->behind != other->behind) {
            return one->behind > other->behind;
        }
        if (one->tokens_per_second < other->tokens_per_second || one->tokens_per_second > other->tokens_per_second) {
            return one->tokens_per_second < other->tokens_per_second;
        }
    }
    return a->id > b->id;
}

static void choose_victim(struct op_planner *planner, uint32_t pool)
{
    struct op_slot *victim = NULL;
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        struct op_slot *slot = &planner->learners[i];
        if (is_member(slot, pool) && (victim == NULL || goes_before(slot, victim))) {
            victim = slot;
        }
    }
    if (victim == NULL) {
        return;
    }
    victim->leaving = true;
    bool is_gone = victim->current == NULL && !victim->expected && victim->alive == 0;
    if (is_gone) {
        victim->exists = victim->leaving = victim->given_up = false;
        victim->crashes = victim->short_lives = 0;
    }
}

static bool add_member(struct op_planner *planner, uint32_t pool)
{
    for (uint32_t i = 0; i < planner->learner_count; i++) {
        struct op_slot *slot = &planner->learners[i];
        if (slot->exists || slot->alive > 0) {
            continue;
        }
        slot->exists = true;
        slot->pool = pool;
        slot->reason = OP_REASON_WANTED;
        slot->next_start_ns = planner->now_ns;
        return true;
    }
    return false;
}

void op_planner_scale(struct op_planner *planner)
{
    const struct op_wanted *wanted = planner->wanted;
    uint32_t room = DL_MIN(wanted->learners_max, (uint32_t)DL_SPEC_LEARNERS_MAX);
    planner->plan->desired = 0;
    for (uint32_t pool = 0; pool < DL_SPEC_POOLS_MAX; pool++) {
        uint32_t desired = 0;
        if (pool < wanted->pool_count) {
            desired = wanted->pools[pool].replicas + planner->scavenging[pool].extra;
            desired = DL_MIN(desired, room);
            planner->plan->pools[pool].desired = desired;
            planner->plan->pools[pool].scavenged =
                desired > wanted->pools[pool].replicas ? desired - wanted->pools[pool].replicas : 0;
        }
        room -= desired;
        planner->plan->desired += desired;
        uint32_t members = count_members(planner, pool);
        for (; members > desired; members--) {
            choose_victim(planner, pool);
        }
        while (members < desired && add_member(planner, pool)) {
            members++;
        }
    }
}

void op_wanted_from_spec(const struct dl_spec *spec, uint32_t replicas, struct op_wanted *wanted)
{
    *wanted = (struct op_wanted){.limits = op_limits_default};
    wanted->shards = spec->syncer.shards;
    wanted->evaluator = true;
    wanted->learners_max = spec->learners.max;
    wanted->pool_count = spec->learners.pool_count;
    wanted->suspend = spec->suspend;
    wanted->deadline_ns = spec->active_deadline_seconds * INT64_C(1000000000);
    uint32_t left = DL_MIN(replicas, spec->learners.max);
    for (uint32_t i = 0; i < spec->learners.pool_count; i++) {
        const struct dl_pool_spec *from = &spec->learners.pools[i];
        struct op_wanted_pool *pool = &wanted->pools[i];
        bool is_last = i + 1 == spec->learners.pool_count;
        memcpy(pool->name, from->name, sizeof pool->name);
        pool->replicas = is_last ? left : DL_MIN(left, from->replicas);
        left -= pool->replicas;
        pool->scavenges = from->scavenge.enabled;
        pool->scavenge_max = from->scavenge.max;
        pool->pending_ns = (int64_t)from->scavenge.pending_seconds * INT64_C(1000000000);
        pool->cooldown_ns = (int64_t)from->scavenge.cooldown_seconds * INT64_C(1000000000);
    }
}
