/* A small cluster for the planner: applies what is planned, and shows what it is told to show. */
#ifndef DL_TESTS_UNIT_PLAN_RIG_H
#define DL_TESTS_UNIT_PLAN_RIG_H

#include <stdlib.h>

#include "operator/reconcile/plan.h"
#include "tests/unit/unit.h"

#define S INT64_C(1000000000)
#define WORLD_MAX 256

struct world {
    struct op_planner *planner;
    struct op_wanted wanted;
    struct op_progress progress;
    struct op_instance instances[WORLD_MAX];
    uint32_t count;
    int64_t now;
    struct op_plan plan;
    uint32_t starts, stops, kills, stop_jobs, finish_jobs; /* Of the last step. */
    bool by_hand;                                          /* Started instances stay OP_STARTING. */
};

static inline struct op_limits test_limits(void)
{
    return (struct op_limits){
        .learner_crashes_max = 3,
        .syncer_crashes_max = 2,
        .evaluator_crashes_max = 1,
        .backoff_first_ns = S,
        .backoff_max_ns = 8 * S,
        .healthy_ns = 60 * S,
        .clean_exit_ns = S,
        .expect_ns = 30 * S,
        .finish_ns = 20 * S,
        .grace_ns = 5 * S,
    };
}

static inline void world_init(struct world *w, uint32_t shards, uint32_t replicas, uint32_t max)
{
    *w = (struct world){.now = 1000 * S};
    CU_ASSERT_EQUAL_FATAL(op_planner_new(&w->planner, NULL), DL_OK);
    w->wanted = (struct op_wanted){
        .shards = shards,
        .evaluator = true,
        .learners_max = max,
        .pool_count = 1,
        .pools = {{.name = "default", .replicas = replicas}},
        .endpoints_known = true,
        .limits = test_limits(),
    };
    w->progress.result = -1;
}

static inline void world_release(struct world *w)
{
    op_planner_free(w->planner);
}

static inline struct op_instance *world_find(struct world *w, enum op_kind kind, uint32_t id)
{
    struct op_instance *found = NULL;
    for (uint32_t i = 0; i < w->count; i++) {
        struct op_instance *it = &w->instances[i];
        if (it->kind == kind && it->id == id && (found == NULL || it->incarnation > found->incarnation)) {
            found = it;
        }
    }
    return found;
}

static inline void world_remove(struct world *w, const struct op_change *change)
{
    for (uint32_t i = 0; i < w->count; i++) {
        struct op_instance *it = &w->instances[i];
        if (it->kind == change->kind && it->id == change->id && it->incarnation == change->incarnation) {
            *it = w->instances[--w->count];
            return;
        }
    }
}

static inline void world_apply(struct world *w, const struct op_change *change)
{
    if (change->type == OP_STOP_JOB || change->type == OP_FINISH_JOB) {
        w->stop_jobs += change->type == OP_STOP_JOB ? 1 : 0;
        w->finish_jobs += change->type == OP_FINISH_JOB ? 1 : 0;
        return;
    }
    if (change->type == OP_FORGET) {
        world_remove(w, change);
        return;
    }
    if (change->type == OP_START) {
        CU_ASSERT_FATAL(w->count < WORLD_MAX);
        w->starts++;
        w->instances[w->count++] = (struct op_instance){
            .kind = change->kind,
            .pool = change->pool,
            .id = change->id,
            .incarnation = change->incarnation,
            .state = w->by_hand ? OP_STARTING : OP_RUNNING,
            .ready = true,
            .connected = true,
            .since_ns = w->now,
            .started_ns = w->now,
        };
        return;
    }
    w->stops += change->type == OP_STOP ? 1 : 0;
    w->kills += change->type == OP_KILL ? 1 : 0;
    for (uint32_t i = 0; i < w->count; i++) {
        struct op_instance *it = &w->instances[i];
        if (it->kind == change->kind && it->id == change->id && it->incarnation == change->incarnation &&
            it->state != OP_TERMINATING && it->state != OP_LOST) {
            it->state = OP_TERMINATING;
            it->since_ns = w->now;
        }
    }
}

/* Plans and applies, until nothing is started any more. */
static inline void world_step(struct world *w)
{
    w->starts = w->stops = w->kills = w->stop_jobs = w->finish_jobs = 0;
    uint32_t before = 0;
    for (int i = 0; i < 100; i++) {
        before = w->starts;
        op_plan_make(w->planner, &w->wanted, &w->progress, w->instances, w->count, w->now, &w->plan);
        for (uint32_t c = 0; c < w->plan.change_count; c++) {
            world_apply(w, &w->plan.changes[c]);
        }
        if (w->starts == before && w->plan.change_count == 0) {
            break;
        }
        if (w->stops + w->kills > 0 && w->starts == before) {
            break;
        }
    }
}

/* As world_find, for one that must be there. */
static inline struct op_instance *world_get(struct world *w, enum op_kind kind, uint32_t id)
{
    struct op_instance *found = world_find(w, kind, id);
    CU_ASSERT_PTR_NOT_NULL_FATAL(found);
    if (found == NULL) {
        abort(); /* Static analysis does not know that the assertion ends the test. */
    }
    return found;
}

static inline void world_end(struct world *w, enum op_kind kind, uint32_t id, enum op_end end, int code)
{
    struct op_instance *it = world_get(w, kind, id);
    it->state = OP_ENDED;
    it->since_ns = w->now;
    it->end = end;
    it->code = code;
}

static inline uint32_t world_alive(const struct world *w, enum op_kind kind)
{
    uint32_t alive = 0;
    for (uint32_t i = 0; i < w->count; i++) {
        alive += w->instances[i].kind == kind && w->instances[i].state != OP_ENDED ? 1 : 0;
    }
    return alive;
}

#endif
