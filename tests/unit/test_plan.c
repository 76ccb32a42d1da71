/* The planner: starts, ends, budgets, backoff, restarts in place, other planners, stale views. */
#include <signal.h>

#include "common/wire.h"
#include "tests/unit/plan_rig.h"

/* --- starts --- */

static void test_starts_syncers_learners_evaluator(void)
{
    struct world w;
    world_init(&w, 2, 3, 4);
    w.wanted.endpoints_known = false;
    world_step(&w);
    CU_ASSERT_EQUAL(world_alive(&w, OP_SYNCER), 2);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 0);
    w.wanted.endpoints_known = true;
    world_step(&w);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 3);
    CU_ASSERT_EQUAL(world_alive(&w, OP_EVALUATOR), 1);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    CU_ASSERT_STRING_EQUAL(w.plan.message, "3/3 learners connected");
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts + w.stops, 0);
    for (uint32_t id = 0; id < 3; id++) {
        CU_ASSERT_PTR_NOT_NULL(world_find(&w, OP_LEARNER, id));
    }
    world_release(&w);
}

/* --- ends: what each means for the restart --- */

struct end_row {
    const char *name;
    enum op_kind kind;
    enum op_end end;
    int code;
    int64_t lived; /* Before it ended. */
    bool is_crash;
    int64_t restart_after; /* -1: never. */
    enum op_job_phase phase;
};

static const struct end_row end_rows[] = {
    {"learner exits 1", OP_LEARNER, OP_END_EXIT, 1, S, true, S, OP_JOB_RUNNING},
    {"learner exits 4", OP_LEARNER, OP_END_EXIT, 4, S, true, S, OP_JOB_RUNNING},
    {"learner exits 1 after a healthy time", OP_LEARNER, OP_END_EXIT, 1, 90 * S, true, S, OP_JOB_RUNNING},
    {"learner exits 2: never again", OP_LEARNER, OP_END_EXIT, 2, S, true, -1, OP_JOB_RUNNING},
    {"learner exits 3: never again", OP_LEARNER, OP_END_EXIT, 3, S, true, -1, OP_JOB_RUNNING},
    {"learner exits 0 unasked", OP_LEARNER, OP_END_EXIT, 0, S, false, S, OP_JOB_RUNNING},
    {"learner gets SIGKILL", OP_LEARNER, OP_END_SIGNAL, SIGKILL, S, false, 0, OP_JOB_RUNNING},
    {"learner gets SIGTERM", OP_LEARNER, OP_END_SIGNAL, SIGTERM, S, false, 0, OP_JOB_RUNNING},
    {"learner's container says 137", OP_LEARNER, OP_END_EXIT, 137, S, false, 0, OP_JOB_RUNNING},
    {"learner's container says 143", OP_LEARNER, OP_END_EXIT, 143, S, false, 0, OP_JOB_RUNNING},
    {"learner's container says 139", OP_LEARNER, OP_END_EXIT, 139, S, true, S, OP_JOB_RUNNING},
    {"learner gets SIGSEGV", OP_LEARNER, OP_END_SIGNAL, SIGSEGV, S, true, S, OP_JOB_RUNNING},
    {"learner gets SIGABRT", OP_LEARNER, OP_END_SIGNAL, SIGABRT, S, true, S, OP_JOB_RUNNING},
    {"learner out of memory", OP_LEARNER, OP_END_OUT_OF_MEMORY, 137, S, true, S, OP_JOB_RUNNING},
    {"learner evicted", OP_LEARNER, OP_END_EVICTED, 0, S, false, 0, OP_JOB_RUNNING},
    {"learner preempted", OP_LEARNER, OP_END_PREEMPTED, 0, S, false, 0, OP_JOB_RUNNING},
    {"learner's node lost", OP_LEARNER, OP_END_NODE_LOST, 0, S, false, 0, OP_JOB_RUNNING},
    {"learner's node shut down", OP_LEARNER, OP_END_NODE_SHUTDOWN, 0, S, false, 0, OP_JOB_RUNNING},
    {"learner deleted", OP_LEARNER, OP_END_DELETED, 0, S, false, 0, OP_JOB_RUNNING},
    {"syncer exits 1", OP_SYNCER, OP_END_EXIT, 1, S, true, S, OP_JOB_RUNNING},
    {"syncer gets SIGKILL", OP_SYNCER, OP_END_SIGNAL, SIGKILL, S, false, 0, OP_JOB_RUNNING},
    {"syncer saved and left", OP_SYNCER, OP_END_EXIT, 5, S, false, 0, OP_JOB_RUNNING},
    {"syncer exits 2: job failed", OP_SYNCER, OP_END_EXIT, 2, S, true, -1, OP_JOB_FINISHING},
    {"syncer exits 3: job failed", OP_SYNCER, OP_END_EXIT, 3, S, true, -1, OP_JOB_FINISHING},
    {"syncer exits 4: job timed out", OP_SYNCER, OP_END_EXIT, 4, S, true, -1, OP_JOB_FINISHING},
    {"syncer exits 0 unasked: job stopped", OP_SYNCER, OP_END_EXIT, 0, S, false, -1, OP_JOB_FINISHING},
    {"evaluator exits 1", OP_EVALUATOR, OP_END_EXIT, 1, S, true, S, OP_JOB_RUNNING},
    {"evaluator gets SIGKILL", OP_EVALUATOR, OP_END_SIGNAL, SIGKILL, S, false, 0, OP_JOB_RUNNING},
};

static void check_end(const struct end_row *row)
{
    struct world w;
    world_init(&w, 1, 2, 4);
    world_step(&w);
    uint64_t survivor = world_get(&w, OP_LEARNER, 1)->incarnation;
    w.now += row->lived;
    world_end(&w, row->kind, 0, row->end, row->code);
    world_step(&w);
    bool ok = op_end_is_crash(row->end, row->code) == row->is_crash && w.plan.phase == row->phase;
    const struct op_instance *again = world_find(&w, row->kind, 0);
    ok = ok && (again != NULL) == (row->restart_after == 0);
    if (row->restart_after > 0) {
        ok = ok && w.plan.next_ns <= w.now + row->restart_after;
        w.now += row->restart_after - 1;
        world_step(&w);
        ok = ok && world_find(&w, row->kind, 0) == NULL;
        w.now += 1;
    } else if (row->restart_after < 0) {
        w.now += 19 * S;
    }
    world_step(&w);
    again = world_find(&w, row->kind, 0);
    ok = ok && (again != NULL) == (row->restart_after >= 0);
    ok = ok && (again == NULL || again->incarnation == 2);
    /* Nobody else was touched. */
    ok = ok && (row->phase != OP_JOB_RUNNING || world_get(&w, OP_LEARNER, 1)->incarnation == survivor);
    if (!ok) {
        fprintf(stderr, "row '%s' failed\n", row->name);
    }
    CU_ASSERT(ok);
    world_release(&w);
}

static void test_ends(void)
{
    for (size_t i = 0; i < sizeof end_rows / sizeof end_rows[0]; i++) {
        check_end(&end_rows[i]);
    }
}

/* --- backoff and budgets --- */

static void test_crashes_back_off_and_use_the_budget_up(void)
{
    struct world w;
    world_init(&w, 1, 2, 4);
    world_step(&w);
    static const int64_t waits[] = {S, 2 * S, 4 * S};
    for (size_t i = 0; i < 3; i++) {
        world_end(&w, OP_LEARNER, 0, OP_END_EXIT, 1);
        world_step(&w);
        CU_ASSERT_PTR_NULL(world_find(&w, OP_LEARNER, 0));
        CU_ASSERT_EQUAL(w.plan.next_ns, w.now + waits[i]);
        CU_ASSERT_EQUAL(w.plan.waiting, 1);
        w.now = w.plan.next_ns;
        world_step(&w);
        CU_ASSERT_PTR_NOT_NULL_FATAL(world_find(&w, OP_LEARNER, 0));
    }
    world_end(&w, OP_LEARNER, 0, OP_END_EXIT, 1);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.given_up, 1);
    CU_ASSERT_EQUAL(op_planner_given_up(w.planner, OP_LEARNER, 0), OP_REASON_CRASH_LOOP);
    CU_ASSERT_EQUAL(op_planner_given_up(w.planner, OP_LEARNER, 1), OP_REASON_NONE);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING); /* The other learner trains on. */
    w.now += 1000 * S;
    world_step(&w);
    CU_ASSERT_PTR_NULL(world_find(&w, OP_LEARNER, 0));
    /* A new generation of the job gives it another chance. */
    w.wanted.generation++;
    world_step(&w);
    CU_ASSERT_PTR_NOT_NULL(world_find(&w, OP_LEARNER, 0));
    world_release(&w);
}

static void test_disruptions_cost_nothing_but_repeated_ones_back_off(void)
{
    struct world w;
    world_init(&w, 1, 2, 4);
    world_step(&w);
    int64_t longest = 0;
    for (int i = 0; i < 50; i++) {
        world_end(&w, OP_LEARNER, 0, OP_END_SIGNAL, SIGKILL);
        int64_t at = w.now;
        world_step(&w);
        while (world_find(&w, OP_LEARNER, 0) == NULL) {
            CU_ASSERT_FATAL(w.plan.next_ns > w.now && w.plan.next_ns < INT64_MAX);
            w.now = w.plan.next_ns;
            world_step(&w);
        }
        longest = w.now - at > longest ? w.now - at : longest;
        CU_ASSERT(i > 0 || w.now == at);
    }
    CU_ASSERT_EQUAL(longest, 8 * S);
    CU_ASSERT_EQUAL(w.plan.given_up, 0);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 0)->incarnation, 51);
    world_release(&w);
}

static void test_healthy_time_resets(void)
{
    struct world w;
    world_init(&w, 1, 1, 4);
    world_step(&w);
    for (int i = 0; i < 10; i++) {
        w.now += 61 * S;
        world_end(&w, OP_LEARNER, 0, OP_END_EXIT, 1);
        world_step(&w);
        CU_ASSERT_EQUAL(w.plan.next_ns, w.now + S);
        w.now += S;
        world_step(&w);
        CU_ASSERT_PTR_NOT_NULL_FATAL(world_find(&w, OP_LEARNER, 0));
    }
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    world_release(&w);
}

static void crash_until_given_up(struct world *w, enum op_kind kind, uint32_t id, int crashes)
{
    for (int i = 0; i < crashes; i++) {
        w->now += 10 * S;
        world_step(w);
        world_end(w, kind, id, OP_END_EXIT, 1);
        world_step(w);
    }
}

static void test_budgets_are_apart(void)
{
    struct world w;
    world_init(&w, 1, 2, 4);
    world_step(&w);
    crash_until_given_up(&w, OP_LEARNER, 0, 3); /* Its whole budget; the syncer's is untouched. */
    crash_until_given_up(&w, OP_SYNCER, 0, 2);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    crash_until_given_up(&w, OP_SYNCER, 0, 1);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_FINISHING);
    CU_ASSERT_EQUAL(w.plan.reason, OP_REASON_CRASH_LOOP);
    CU_ASSERT(w.stops > 0); /* Nothing to wait for. */
    world_release(&w);
}

static void test_all_learners_given_up_fails_the_job(void)
{
    struct world w;
    world_init(&w, 1, 2, 4);
    world_step(&w);
    world_end(&w, OP_LEARNER, 0, OP_END_EXIT, 3);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    world_end(&w, OP_LEARNER, 1, OP_END_EXIT, 3);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_FINISHING);
    CU_ASSERT_EQUAL(w.plan.reason, OP_REASON_REFUSED);
    world_end(&w, OP_EVALUATOR, 0, OP_END_EXIT, 0);
    world_end(&w, OP_SYNCER, 0, OP_END_EXIT, 0);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_FAILED);
    CU_ASSERT_EQUAL(w.plan.reason, OP_REASON_REFUSED);
    world_release(&w);
}

static void test_start_that_cannot_be_made_is_tried_again(void)
{
    struct world w;
    world_init(&w, 1, 1, 4);
    op_plan_make(w.planner, &w.wanted, &w.progress, NULL, 0, w.now, &w.plan);
    CU_ASSERT_EQUAL_FATAL(w.plan.change_count, 3);
    struct op_change start = w.plan.changes[1];
    CU_ASSERT_EQUAL_FATAL(start.kind, OP_LEARNER);
    world_apply(&w, &w.plan.changes[0]);
    world_apply(&w, &w.plan.changes[2]);
    op_plan_on_start_failed(w.planner, &w.wanted, &start, w.now);
    world_step(&w);
    CU_ASSERT_PTR_NULL(world_find(&w, OP_LEARNER, 0));
    CU_ASSERT_EQUAL(w.plan.next_ns, w.now + S);
    w.now += S;
    world_step(&w);
    CU_ASSERT_PTR_NOT_NULL_FATAL(world_find(&w, OP_LEARNER, 0));
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 0)->incarnation, 2);
    world_release(&w);
}

static void test_lost_node_is_replaced_without_waiting(void)
{
    struct world w;
    world_init(&w, 1, 2, 2);
    world_step(&w);
    world_get(&w, OP_LEARNER, 0)->state = OP_LOST;
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts, 1);
    CU_ASSERT(w.stops >= 1); /* What is left of the old one is to be removed. */
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 0)->incarnation, 2);
    /* The node comes back: the old incarnation is not wanted, and nothing else is disturbed. */
    for (uint32_t i = 0; i < w.count; i++) {
        if (w.instances[i].kind == OP_LEARNER && w.instances[i].incarnation == 1 && w.instances[i].id == 0) {
            w.instances[i].state = OP_RUNNING;
        }
    }
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts, 0);
    CU_ASSERT_EQUAL(w.stops, 1);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 0)->state, OP_RUNNING);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 1)->state, OP_RUNNING);
    world_release(&w);
}

static void test_running_but_unconnected_is_shown_not_restarted(void)
{
    struct world w;
    world_init(&w, 1, 2, 2);
    world_step(&w);
    world_get(&w, OP_LEARNER, 0)->connected = false;
    w.now += 3600 * S;
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts + w.stops, 0);
    CU_ASSERT_EQUAL(w.plan.running, 2);
    CU_ASSERT_EQUAL(w.plan.connected, 1);
    CU_ASSERT_STRING_EQUAL(w.plan.message, "1/2 learners connected");
    world_release(&w);
}

static void test_takes_over_from_another_planner(void)
{
    struct world w;
    world_init(&w, 1, 3, 4);
    world_step(&w);
    world_end(&w, OP_LEARNER, 1, OP_END_SIGNAL, SIGKILL);
    world_step(&w);
    op_planner_free(w.planner);
    CU_ASSERT_EQUAL_FATAL(op_planner_new(&w.planner, NULL), DL_OK);
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts + w.stops, 0);
    world_end(&w, OP_LEARNER, 1, OP_END_SIGNAL, SIGKILL);
    world_step(&w);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 1)->incarnation, 3);
    world_release(&w);
}

/* --- a view that is 5 seconds old, over 1,000 reconciles --- */

enum { DELAY = 6 }; /* A view a second. */

static uint32_t next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(*state >> 33);
}

/* What the cluster does by itself in a second: terminating ones go, some learner is lost now and then. */
static void cluster_moves(struct world *w, uint64_t *random)
{
    for (uint32_t i = 0; i < w->count; i++) {
        struct op_instance *it = &w->instances[i];
        if (it->state == OP_TERMINATING && w->now - it->since_ns > 2 * S) {
            world_end(w, it->kind, it->id, OP_END_EXIT, 0);
        } else if (it->kind == OP_LEARNER && it->state == OP_RUNNING && next_random(random) % 40 == 0) {
            world_end(w, it->kind, it->id, next_random(random) % 2 ? OP_END_PREEMPTED : OP_END_EXIT, 1);
        }
    }
}

static void test_delayed_view_never_exceeds_max_nor_deletes_a_live_learner(void)
{
    static struct op_instance views[DELAY][WORLD_MAX];
    static uint32_t counts[DELAY];
    memset(counts, 0, sizeof counts);
    struct world w;
    world_init(&w, 1, 4, 6);
    w.wanted.limits.learner_crashes_max = 1000000;
    uint64_t random = 11;
    uint32_t most = 0, started = 0;
    for (int i = 0; i < 1000; i++) {
        w.starts = w.stops = w.kills = 0;
        uint32_t slot = (uint32_t)i % DELAY;
        /* The oldest view is shown, then overwritten by the newest. */
        op_plan_make(w.planner, &w.wanted, &w.progress, views[slot], counts[slot], w.now, &w.plan);
        for (uint32_t c = 0; c < w.plan.change_count; c++) {
            const struct op_change *change = &w.plan.changes[c];
            if (change->type == OP_START) {
                struct op_instance *twin = world_find(&w, change->kind, change->id);
                CU_ASSERT_FATAL(twin == NULL || twin->incarnation < change->incarnation);
                CU_ASSERT_FATAL(twin == NULL || twin->state == OP_ENDED);
            }
            if (change->type == OP_STOP || change->type == OP_KILL) {
                CU_ASSERT_FATAL(w.wanted.pools[0].replicas < 6 && change->reason == OP_REASON_SCALE_DOWN);
            }
            world_apply(&w, change);
        }
        started += w.starts;
        /* Replicas move in the middle of the run; stops are legal only then. */
        w.wanted.pools[0].replicas = i < 400 ? 6 : (i < 700 ? 3 : 5);
        cluster_moves(&w, &random);
        uint32_t alive = world_alive(&w, OP_LEARNER);
        most = alive > most ? alive : most;
        CU_ASSERT_FATAL(alive <= 6);
        memcpy(views[slot], w.instances, w.count * sizeof w.instances[0]);
        counts[slot] = w.count;
        w.now += S;
    }
    CU_ASSERT_EQUAL(most, 6);
    CU_ASSERT(started > 50);
    world_release(&w);
}

static void test_many_changes_come_in_portions(void)
{
    struct world w;
    world_init(&w, 1, 200, 200);
    op_plan_make(w.planner, &w.wanted, &w.progress, NULL, 0, w.now, &w.plan);
    CU_ASSERT_EQUAL(w.plan.change_count, OP_PLAN_CHANGES_MAX);
    CU_ASSERT_EQUAL(w.plan.next_ns, w.now);
    for (uint32_t c = 0; c < w.plan.change_count; c++) {
        world_apply(&w, &w.plan.changes[c]);
    }
    world_step(&w);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 200);
    world_release(&w);
}

/* --- pods: restarts in place, syncers of a set --- */

struct restart_row {
    const char *name;
    enum op_kind kind;
    uint32_t restarts; /* At once. */
    enum op_end end;
    int code;
    bool gives_up;
    enum op_job_phase phase;
};

/* K1, K2: a container that starts again in its place is no new incarnation, but its crashes count. */
static const struct restart_row restart_rows[] = {
    {"one crash", OP_LEARNER, 1, OP_END_EXIT, 1, false, OP_JOB_RUNNING},
    {"crashes up to the budget", OP_LEARNER, 3, OP_END_EXIT, 1, false, OP_JOB_RUNNING},
    {"crashes beyond the budget", OP_LEARNER, 4, OP_END_EXIT, 1, true, OP_JOB_RUNNING},
    {"out of memory too often", OP_LEARNER, 4, OP_END_OUT_OF_MEMORY, 137, true, OP_JOB_RUNNING},
    {"killed from outside ever so often", OP_LEARNER, 40, OP_END_EXIT, 137, false, OP_JOB_RUNNING},
    {"wrong input", OP_LEARNER, 1, OP_END_EXIT, 2, true, OP_JOB_RUNNING},
    {"evaluator crashes beyond its budget", OP_EVALUATOR, 2, OP_END_EXIT, 1, true, OP_JOB_RUNNING},
    {"syncer of a set crashes", OP_SYNCER, 2, OP_END_EXIT, 1, false, OP_JOB_RUNNING},
    {"syncer of a set crashes beyond its budget", OP_SYNCER, 3, OP_END_EXIT, 1, true, OP_JOB_FINISHING},
    {"syncer of a set is killed ever so often", OP_SYNCER, 30, OP_END_EXIT, 143, false, OP_JOB_RUNNING},
    {"syncer of a set has wrong input", OP_SYNCER, 1, OP_END_EXIT, 2, true, OP_JOB_FINISHING},
    {"syncer of a set timed out", OP_SYNCER, 1, OP_END_EXIT, 4, false, OP_JOB_FINISHING},
};

static void add_shard(struct world *w, uint32_t shard)
{
    w->instances[w->count++] = (struct op_instance){.kind = OP_SYNCER,
                                                    .id = shard,
                                                    .incarnation = 1,
                                                    .state = OP_RUNNING,
                                                    .ready = true,
                                                    .since_ns = w->now,
                                                    .started_ns = w->now};
}

static void test_restarts_in_place(void)
{
    for (size_t i = 0; i < sizeof restart_rows / sizeof restart_rows[0]; i++) {
        const struct restart_row *row = &restart_rows[i];
        struct world w;
        world_init(&w, 1, 2, 4);
        w.wanted.syncers_by_set = true;
        add_shard(&w, 0);
        world_step(&w);
        struct op_instance *it = world_get(&w, row->kind, 0);
        uint64_t incarnation = it->incarnation;
        it->restarts = row->restarts;
        it->end = row->end;
        it->code = row->code;
        world_step(&w);
        it = world_get(&w, row->kind, 0);
        bool ok = w.plan.phase == row->phase && it->incarnation == incarnation && w.starts == 0;
        ok = ok && (op_planner_given_up(w.planner, row->kind, 0) != OP_REASON_NONE) == row->gives_up;
        /* One given up is asked to go, but a set's syncer is never touched. */
        bool is_asked = it->state == OP_TERMINATING;
        ok = ok && (row->kind == OP_SYNCER ? !is_asked : is_asked == row->gives_up);
        if (!ok) {
            printf("\nrow '%s': phase %s given up %d asked %d\n", row->name, op_job_phase_name(w.plan.phase),
                   op_planner_given_up(w.planner, row->kind, 0), is_asked);
        }
        CU_ASSERT(ok);
        world_release(&w);
    }
}

static void test_syncers_of_a_set(void)
{
    struct world w;
    world_init(&w, 2, 2, 4);
    w.wanted.syncers_by_set = true;
    w.wanted.evaluator = false;
    world_step(&w);
    CU_ASSERT_EQUAL(world_alive(&w, OP_SYNCER), 0); /* No change names one: the set makes them. */
    CU_ASSERT_EQUAL(w.plan.syncers_wanted, 2);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_RUNNING);
    add_shard(&w, 0);
    add_shard(&w, 1);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.syncers_ready, 2);

    w.wanted.suspend = true; /* K8: learners go first, then the syncers. */
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.syncers_wanted, 2);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUSPENDING);
    for (uint32_t i = 0; i < w.count; i++) {
        CU_ASSERT(w.instances[i].state == (w.instances[i].kind == OP_SYNCER ? OP_RUNNING : OP_TERMINATING));
    }
    w.count = 0;
    add_shard(&w, 0);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.syncers_wanted, 0);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUSPENDING);
    w.count = 0;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUSPENDED);

    w.wanted.suspend = false;
    w.wanted.started_ns = w.now;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.syncers_wanted, 2);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 2);

    add_shard(&w, 0); /* The end: syncers go last. */
    w.progress.result = DL_STOP_SUCCEEDED;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_FINISHING);
    CU_ASSERT_EQUAL(w.plan.syncers_wanted, 2);
    w.count = 0;
    add_shard(&w, 0);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.syncers_wanted, 0);
    w.count = 0;
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.phase, OP_JOB_SUCCEEDED);
    CU_ASSERT_EQUAL(w.plan.syncers_wanted, 0);
    world_release(&w);
}

UNIT_MAIN("plan", {"starts syncers, learners, evaluator", test_starts_syncers_learners_evaluator}, {"ends", test_ends},
          {"crashes back off and use the budget up", test_crashes_back_off_and_use_the_budget_up},
          {"disruptions cost nothing", test_disruptions_cost_nothing_but_repeated_ones_back_off},
          {"healthy time resets", test_healthy_time_resets}, {"budgets are apart", test_budgets_are_apart},
          {"all learners given up", test_all_learners_given_up_fails_the_job},
          {"start that cannot be made", test_start_that_cannot_be_made_is_tried_again},
          {"lost node", test_lost_node_is_replaced_without_waiting},
          {"running but unconnected", test_running_but_unconnected_is_shown_not_restarted},
          {"takes over from another planner", test_takes_over_from_another_planner},
          {"K4 delayed view", test_delayed_view_never_exceeds_max_nor_deletes_a_live_learner},
          {"many changes", test_many_changes_come_in_portions}, {"K1 K2 restarts in place", test_restarts_in_place},
          {"K8 syncers of a set", test_syncers_of_a_set})
