/* The planner: how many learners, who goes first, ids, pools, scavenging. */
#include <signal.h>

#include "tests/unit/plan_rig.h"

/* --- scaling --- */

struct victim_row {
    const char *name;
    bool ready, disrupted;
    enum op_instance_state state;
    uint64_t behind;
    double rate;
};

/* In the order in which they have to go. */
static const struct victim_row victims[] = {
    {"not ready, slow", false, false, OP_STARTING, 0, 1},
    {"running but not ready", false, false, OP_RUNNING, 0, 900},
    {"disrupted", true, true, OP_RUNNING, 0, 900},
    {"most stale", true, false, OP_RUNNING, 9, 900},
    {"stale", true, false, OP_RUNNING, 3, 900},
    {"slowest", true, false, OP_RUNNING, 1, 100},
    {"slow", true, false, OP_RUNNING, 1, 200},
    {"fast and fresh", true, false, OP_RUNNING, 0, 900},
};
enum { VICTIMS = sizeof victims / sizeof victims[0] };

static void test_victims_of_a_scale_down(void)
{
    for (uint32_t keep = VICTIMS; keep-- > 0;) {
        struct world w;
        world_init(&w, 1, VICTIMS, VICTIMS);
        world_step(&w);
        /* Ids are handed out against the order, so that the id decides nothing here. */
        for (uint32_t i = 0; i < VICTIMS; i++) {
            struct op_instance *it = world_get(&w, OP_LEARNER, (i * 5 + 3) % VICTIMS);
            it->ready = victims[i].ready;
            it->disrupted = victims[i].disrupted;
            it->state = victims[i].state;
            it->behind = victims[i].behind;
            it->tokens_per_second = victims[i].rate;
        }
        w.wanted.pools[0].replicas = keep;
        world_step(&w);
        CU_ASSERT_EQUAL(w.stops, VICTIMS - keep);
        for (uint32_t i = 0; i < VICTIMS; i++) {
            bool gone = world_get(&w, OP_LEARNER, (i * 5 + 3) % VICTIMS)->state == OP_TERMINATING;
            bool expected = i < VICTIMS - keep && i > 0; /* The two that are not ready are told apart by rate alone. */
            expected = expected || (i == 0 && VICTIMS - keep >= 1);
            if (gone != expected) {
                fprintf(stderr, "victim '%s' with %u kept: %s\n", victims[i].name, keep, gone ? "gone" : "there");
            }
            CU_ASSERT_EQUAL(gone, expected);
        }
        world_release(&w);
    }
}

static void test_scale_down_asks_then_kills_and_counts_terminating(void)
{
    struct world w;
    world_init(&w, 1, 4, 4);
    world_step(&w);
    w.wanted.pools[0].replicas = 3;
    world_step(&w);
    CU_ASSERT_EQUAL(w.stops, 1);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 3)->state, OP_TERMINATING);
    /* Up again while it still leaves: the place is taken until it is gone. */
    w.wanted.pools[0].replicas = 4;
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts, 0);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 4);
    w.now += 5 * S;
    world_step(&w);
    CU_ASSERT(w.kills >= 1);
    world_end(&w, OP_LEARNER, 3, OP_END_SIGNAL, SIGKILL);
    world_step(&w);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 4);
    world_release(&w);
}

static void test_ids_stay_and_are_reused(void)
{
    struct world w;
    world_init(&w, 1, 3, 8);
    world_step(&w);
    world_get(&w, OP_LEARNER, 1)->behind = 5;
    w.wanted.pools[0].replicas = 2;
    world_step(&w);
    world_end(&w, OP_LEARNER, 1, OP_END_EXIT, 0);
    world_step(&w);
    CU_ASSERT_PTR_NULL(world_find(&w, OP_LEARNER, 1));
    CU_ASSERT_FALSE(op_planner_wants(w.planner, OP_LEARNER, 1));
    CU_ASSERT(op_planner_wants(w.planner, OP_LEARNER, 0) && op_planner_wants(w.planner, OP_LEARNER, 2));
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 2)->incarnation, 1);
    w.wanted.pools[0].replicas = 4;
    world_step(&w);
    CU_ASSERT_PTR_NOT_NULL_FATAL(world_find(&w, OP_LEARNER, 1));
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 1)->incarnation, 2);
    CU_ASSERT_PTR_NOT_NULL(world_find(&w, OP_LEARNER, 3));
    world_release(&w);
}

static void test_pools_share_ids_and_the_maximum(void)
{
    struct dl_spec spec = {.learners = {.min = 1,
                                        .max = 6,
                                        .replicas = 5,
                                        .pool_count = 2,
                                        .pools = {{.name = "steady", .replicas = 2}, {.name = "spot", .replicas = 9}}},
                           .syncer = {.shards = 3}};
    struct op_wanted wanted;
    op_wanted_from_spec(&spec, 5, &wanted);
    CU_ASSERT_EQUAL(wanted.shards, 3);
    CU_ASSERT_EQUAL(wanted.pools[0].replicas, 2);
    CU_ASSERT_EQUAL(wanted.pools[1].replicas, 3);
    op_wanted_from_spec(&spec, 1, &wanted);
    CU_ASSERT_EQUAL(wanted.pools[0].replicas, 1);
    CU_ASSERT_EQUAL(wanted.pools[1].replicas, 0);
    op_wanted_from_spec(&spec, 50, &wanted);
    CU_ASSERT_EQUAL(wanted.pools[0].replicas + wanted.pools[1].replicas, 6);

    struct world w;
    world_init(&w, 1, 0, 6);
    w.wanted.pool_count = 2;
    w.wanted.pools[0].replicas = 2;
    w.wanted.pools[1].replicas = 3;
    world_step(&w);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 1)->pool, 0);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 2)->pool, 1);
    world_end(&w, OP_LEARNER, 3, OP_END_PREEMPTED, 0);
    world_step(&w);
    CU_ASSERT_PTR_NOT_NULL_FATAL(world_find(&w, OP_LEARNER, 3));
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 3)->pool, 1);
    world_release(&w);
}

/* --- scavenging --- */

static void test_scavenging_grows_takes_back_and_backs_off(void)
{
    struct world w;
    world_init(&w, 1, 2, 8);
    w.by_hand = false;
    w.wanted.pools[0] = (struct op_wanted_pool){.name = "spot",
                                                .replicas = 2,
                                                .scavenges = true,
                                                .scavenge_max = 4,
                                                .pending_ns = 120 * S,
                                                .cooldown_ns = 60 * S};
    world_step(&w);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 2);
    w.now += 60 * S;
    world_step(&w);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 3);
    /* There is no place for the next one. */
    w.now += 60 * S;
    w.by_hand = true;
    world_step(&w);
    CU_ASSERT_EQUAL_FATAL(world_alive(&w, OP_LEARNER), 4);
    struct op_instance *pending = world_get(&w, OP_LEARNER, 3);
    pending->state = OP_PENDING;
    pending->unschedulable = true;
    w.now += 119 * S;
    world_step(&w);
    CU_ASSERT_EQUAL(w.stops, 0);
    w.now += S;
    world_step(&w);
    CU_ASSERT_EQUAL(w.stops, 1);
    CU_ASSERT_EQUAL(world_get(&w, OP_LEARNER, 3)->state, OP_TERMINATING);
    world_end(&w, OP_LEARNER, 3, OP_END_DELETED, 0);
    world_step(&w);
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 3);
    /* Backs off; a change of capacity ends the backoff. */
    w.now += 59 * S;
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts, 0);
    w.wanted.capacity_changes++;
    world_step(&w);
    CU_ASSERT_EQUAL(w.starts, 1);
    world_release(&w);
}

static void test_scavenging_stays_below_the_maxima(void)
{
    struct world w;
    world_init(&w, 1, 2, 3);
    w.wanted.pools[0] = (struct op_wanted_pool){
        .name = "spot", .replicas = 2, .scavenges = true, .scavenge_max = 9, .pending_ns = S, .cooldown_ns = S};
    for (int i = 0; i < 50; i++) {
        world_step(&w);
        w.now += S;
    }
    CU_ASSERT_EQUAL(world_alive(&w, OP_LEARNER), 3);
    world_release(&w);
}

static void test_pools_are_counted_apart(void)
{
    struct world w;
    world_init(&w, 1, 2, 8);
    w.wanted.pool_count = 2;
    w.wanted.pools[1] =
        (struct op_wanted_pool){.name = "spot", .replicas = 1, .scavenges = true, .scavenge_max = 4, .cooldown_ns = S};
    world_step(&w);
    w.now += 2 * S;
    world_step(&w);
    world_step(&w);
    CU_ASSERT_EQUAL(w.plan.pools[0].running, 2);
    CU_ASSERT_EQUAL(w.plan.pools[0].scavenged, 0);
    CU_ASSERT_EQUAL(w.plan.pools[1].desired, 2);
    CU_ASSERT_EQUAL(w.plan.pools[1].running, 2);
    CU_ASSERT_EQUAL(w.plan.pools[1].scavenged, 1);
    world_release(&w);
}

UNIT_MAIN("plan_scaling", {"K5 victims of a scale-down", test_victims_of_a_scale_down},
          {"scale-down asks, then kills", test_scale_down_asks_then_kills_and_counts_terminating},
          {"ids stay and are reused", test_ids_stay_and_are_reused},
          {"pools share ids and the maximum", test_pools_share_ids_and_the_maximum},
          {"scavenging", test_scavenging_grows_takes_back_and_backs_off},
          {"scavenging below the maxima", test_scavenging_stays_below_the_maxima},
          {"pools are counted apart", test_pools_are_counted_apart})
