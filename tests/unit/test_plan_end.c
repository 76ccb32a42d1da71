/* The planner: the job's end, in which order who leaves, deadlines, suspension. */
#include <signal.h>

#include "tests/unit/plan_rig.h"

/* --- the job's end --- */

static void end_all(struct world *w)
{
    for (uint32_t i = 0; i < w->count; i++) {
        world_end(w, w->instances[i].kind, w->instances[i].id, OP_END_EXIT, 0);
    }
}

struct result_row {
    const char *name;
    int result;
    enum op_job_phase phase;
    enum op_reason reason;
};

static void test_results(void)
{
    static const struct result_row rows[] = {
        {"succeeded", 0, OP_JOB_SUCCEEDED, OP_REASON_COMPLETED},
        {"requested", 1, OP_JOB_STOPPED, OP_REASON_STOP_REQUESTED},
        {"timeout", 2, OP_JOB_FAILED, OP_REASON_TIMED_OUT},
        {"failed", 3, OP_JOB_FAILED, OP_REASON_SYNCER_FAILED},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct world w;
        world_init(&w, 2, 2, 4);
        world_step(&w);
        w.progress.result = rows[i].result;
        world_step(&w);
        CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_FINISHING);
        CU_ASSERT_EQUAL(w.stops + w.starts + w.stop_jobs, 0); /* Everyone goes by itself. */
        world_end(&w, OP_LEARNER, 0, OP_END_EXIT, 0);
        world_step(&w);
        CU_ASSERT_EQUAL(w.starts, 0);
        end_all(&w);
        world_step(&w);
        if (w.plan.phase != rows[i].phase || w.plan.reason != rows[i].reason) {
            fprintf(stderr, "row '%s' failed\n", rows[i].name);
        }
        CU_ASSERT_EQUAL(w.plan.phase, rows[i].phase);
        CU_ASSERT_EQUAL(w.plan.reason, rows[i].reason);
        world_step(&w);
        CU_ASSERT_EQUAL(w.plan.phase, rows[i].phase); /* For good. */
        CU_ASSERT_EQUAL(w.plan.change_count, 0);
        world_release(&w);
    }
}

static void test_finishing_syncers_may_go_one_after_the_other(void)
{
    struct world w;
    world_init(&w, 2, 2, 4);
    world_step(&w);
    w.progress.finishing = true;
    world_end(&w, OP_LEARNER, 0, OP_END_SIGNAL, SIGKILL);
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts, 0); /* Not worth a replacement any more. */
    world_end(&w, OP_SYNCER, 0, OP_END_EXIT, 0);
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts + w.stop_jobs, 0);
    end_all(&w);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUCCEEDED);
    world_release(&w);
}

/* The others may not see by themselves that the budget is reached, and one may be down at that moment. */
static void test_a_shards_success_is_told_to_the_others(void)
{
    struct world w;
    world_init(&w, 3, 2, 4);
    world_step(&w);
    world_end(&w, OP_SYNCER, 2, OP_END_EXIT, 1);
    w.progress.succeeded = true;
    world_end(&w, OP_SYNCER, 0, OP_END_EXIT, 0);
    world_step(&w);
    CU_ASSERT(w.finish_jobs > 0 && w.stop_jobs == 0);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    world_end(&w, OP_LEARNER, 0, OP_END_EXIT, 0);
    w.now += S;
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts, 1); /* The shard that was down; no learner. */
    CU_ASSERT_PTR_NOT_NULL(world_find(&w, OP_SYNCER, 2));
    world_end(&w, OP_SYNCER, 2, OP_END_EXIT, 0);
    world_step(&w);
    CU_ASSERT(w.finish_jobs > 0 && w.starts == 0);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    w.now += 20 * S; /* Bounded: shard 1 never gets there. */
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_FINISHING);
    CU_ASSERT_EQUAL(w.starts, 0);
    end_all(&w);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUCCEEDED);
    world_release(&w);
}

static void test_stop_wish_deadline_and_their_bounds(void)
{
    for (int by_deadline = 0; by_deadline < 2; by_deadline++) {
        struct world w;
        world_init(&w, 1, 2, 4);
        w.wanted.deadline_ns = by_deadline ? 100 * S : 0;
        world_step(&w);
        CU_ASSERT(!by_deadline || w.plan.next_ns <= w.now + 100 * S);
        w.now += 100 * S;
        w.wanted.wish = by_deadline ? OP_WISH_NONE : OP_WISH_STOP;
        world_step(&w);
        CU_ASSERT(w.stop_jobs >= 1);
        CU_ASSERT_EQUAL(w.stops, 0);
        /* Nobody reacts: asked one by one after finish_ns, killed grace_ns later. */
        w.now += 20 * S;
        world_step(&w);
        CU_ASSERT_EQUAL(w.stops, 4);
        w.now += 5 * S;
        world_step(&w);
        CU_ASSERT(w.kills >= 4);
        end_all(&w);
        world_step(&w);
        CU_ASSERT_EQUAL(w.plan.phase, by_deadline ? OP_JOB_FAILED : OP_JOB_STOPPED);
        CU_ASSERT_EQUAL(w.plan.reason, by_deadline ? OP_REASON_DEADLINE_EXCEEDED : OP_REASON_STOP_REQUESTED);
        world_release(&w);
    }
}

static void test_kill_wish_kills_at_once(void)
{
    struct world w;
    world_init(&w, 1, 2, 4);
    world_step(&w);
    w.wanted.wish = OP_WISH_KILL;
    world_step(&w);
    CU_ASSERT(w.kills >= 4);
    end_all(&w);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_STOPPED);
    world_release(&w);
}

static void test_learners_without_syncers_do_not_linger(void)
{
    struct world w;
    world_init(&w, 1, 2, 4);
    world_step(&w);
    w.wanted.wish = OP_WISH_STOP;
    world_step(&w);
    world_end(&w, OP_SYNCER, 0, OP_END_EXIT, 0);
    w.now += 4 * S;
    world_step(&w);
    CU_ASSERT_EQUAL(w.stops, 2);
    CU_ASSERT_EQUAL(world_get(&w, OP_EVALUATOR, 0)->state, OP_RUNNING); /* It may still be exporting. */
    world_release(&w);
}

static void test_success_needs_the_export(void)
{
    struct world w;
    world_init(&w, 1, 1, 4);
    world_step(&w);
    w.progress.result = 0;
    world_step(&w);
    end_all(&w);
    world_get(&w, OP_EVALUATOR, 0)->code = 1;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_FAILED);
    CU_ASSERT_EQUAL(w.plan.reason, OP_REASON_EVALUATOR_FAILED);
    world_release(&w);
}

static void test_suspend_and_resume(void)
{
    struct world w;
    world_init(&w, 1, 2, 4);
    world_step(&w);
    w.wanted.suspend = true;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUSPENDING);
    CU_ASSERT_EQUAL(w.stops, 3); /* The syncer goes last. */
    for (uint32_t i = 0; i < 2; i++) {
        world_end(&w, OP_LEARNER, i, OP_END_EXIT, 0);
    }
    world_end(&w, OP_EVALUATOR, 0, OP_END_EXIT, 0);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUSPENDING);
    CU_ASSERT_EQUAL(world_get(&w, OP_SYNCER, 0)->state, OP_TERMINATING);
    world_end(&w, OP_SYNCER, 0, OP_END_EXIT, 0);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUSPENDED);
    CU_ASSERT_EQUAL(w.starts, 0);
    w.wanted.suspend = false;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 2);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 1)->incarnation, 2);
    world_release(&w);
}

/* A job that was resumed has its whole time again. */
static void test_deadline_counts_from_the_newest_start(void)
{
    struct world w;
    world_init(&w, 1, 1, 2);
    w.wanted.deadline_ns = 100 * S;
    w.wanted.started_ns = w.now;
    world_step(&w);
    w.now += 90 * S;
    w.wanted.started_ns = w.now;
    world_step(&w);
    w.now += 90 * S;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    w.now += 10 * S;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_FINISHING);
    world_release(&w);
}

UNIT_MAIN("plan_end", {"results", test_results}, {"finishing", test_finishing_syncers_may_go_one_after_the_other},
          {"a shard's success is told to the others", test_a_shards_success_is_told_to_the_others},
          {"stop, deadline, bounds", test_stop_wish_deadline_and_their_bounds}, {"kill", test_kill_wish_kills_at_once},
          {"learners without syncers", test_learners_without_syncers_do_not_linger},
          {"success needs the export", test_success_needs_the_export}, {"suspend and resume", test_suspend_and_resume},
          {"deadline after a resume", test_deadline_counts_from_the_newest_start})
