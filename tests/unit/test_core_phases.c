/* sy_core: seeding, interval warm-up, the synchronous form, commits that are delayed, estimates. */
#include "tests/unit/core_rig.h"

/* --- seeding ------------------------------------------------------------------------------------------------------------ */

static void test_seeding_from_one_learner(void)
{
    struct rig *rig = rig_start(rig_spec());
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_WAITING_FOR_LEARNERS);
    rig_join(rig, 3);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 4);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_SEEDING);
    struct dl_wire_pull pulls[4];
    for (uint32_t p = 0; p < 4; p++) {
        pulls[p] = *rig_pull(rig, 0, p);
        CU_ASSERT_EQUAL(pulls[p].flags, DL_PULL_SEED);
        CU_ASSERT_EQUAL(pulls[p].version, 0);
    }
    rig_join(rig, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0); /* One is enough. */
    struct dl_wire_push push = rig_push_of(rig, 1, 0, pulls[0].round);
    CU_ASSERT_EQUAL(rig_announce(rig, 1, &push), DL_VERDICT_UNKNOWN_ROUND);
    for (uint32_t p = 0; p < 4; p++) {
        CU_ASSERT_EQUAL(rig_push(rig, 0, p, pulls[p].round, 5), DL_VERDICT_ACCEPTED);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEED_STORE), 1);
        CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_SEED_STORE, 0)->version, 1);
        rig_commit(rig, p);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_BROADCAST), p == 3 ? 4 : 0); /* All of it, or nothing. */
    }
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_TRAINING);
    CU_ASSERT_EQUAL(rig_view(rig).rounds_merged, 0);
    rig_free(rig);
}

static void test_lost_seeder_is_replaced_for_all_fragments(void)
{
    struct rig *rig = rig_start(rig_spec());
    struct dl_wire_pull pulls[4];
    rig_join(rig, 0);
    for (uint32_t p = 0; p < 4; p++) {
        pulls[p] = *rig_pull(rig, 0, p);
    }
    rig_join(rig, 1);
    rig_push(rig, 0, 2, pulls[2].round, 1);
    rig_commit(rig, 2);
    rig_push(rig, 0, 1, pulls[1].round, 1); /* Being stored when the seeder is lost. */
    sy_core_on_leave(rig->core, rig->now_ns, 0, SY_LEAVE_LOST);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0); /* Not before that is done. */
    rig_commit(rig, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 4);
    for (uint32_t p = 0; p < 4; p++) {
        const struct dl_wire_pull *pull = rig_pull(rig, 1, p);
        CU_ASSERT_PTR_NOT_NULL_FATAL(pull);
        pulls[p] = *pull;
        CU_ASSERT_EQUAL(pulls[p].version, p == 1 || p == 2 ? 1 : 0);
    }
    rig_push(rig, 1, 0, pulls[0].round, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEED_STORE), 0); /* First those that hold the lost one's state. */
    rig_push(rig, 1, 3, pulls[3].round, 1);
    rig_push(rig, 1, 1, pulls[1].round, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEED_STORE), 1);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_SEED_STORE, 0)->version, 2);
    rig_push(rig, 1, 2, pulls[2].round, 1);
    rig_commit(rig, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEED_STORE), 0);
    rig_commit(rig, 2);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEED_STORE), 2);
    rig_commit(rig, 0);
    rig_commit(rig, 3);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_BROADCAST), 4);
    CU_ASSERT_EQUAL(rig_version(rig, 1), 2);
    CU_ASSERT_EQUAL(rig_version(rig, 0), 1);
    rig_free(rig);
}

static void test_seeder_that_stands_still_is_replaced(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.join_timeout_seconds = 20;
    rig->spec->sync.timeout_seconds = 1000;
    rig_start(rig);
    rig_join(rig, 0);
    rig_tick(rig, 100 * RIG_SECOND);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0); /* Nobody else is there. */
    rig_join(rig, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 4);
    CU_ASSERT_PTR_NOT_NULL(rig_pull(rig, 1, 0));
    rig_tick(rig, 10 * RIG_SECOND); /* Half of joinTimeoutSeconds: it is the first one's turn again. */
    CU_ASSERT_PTR_NOT_NULL(rig_pull(rig, 0, 0));
    rig_free(rig);
}

static void test_damaged_seed_is_asked_for_again(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_join(rig, 0);
    struct dl_wire_pull pull = *rig_pull(rig, 0, 2);
    struct dl_wire_push push = rig_push_of(rig, 0, 2, pull.round);
    rig_announce(rig, 0, &push);
    sy_core_on_push_received(rig->core, rig->now_ns, 0, pull.round, 2, false, 1);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_result(rig, 0), DL_VERDICT_CHECKSUM);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEED_STORE), 0);
    rig->now_ns = sy_core_next_deadline(rig->core);
    rig_tick(rig, 0);
    CU_ASSERT_PTR_NOT_NULL(rig_pull(rig, 0, 2));
    CU_ASSERT_EQUAL(rig_push(rig, 0, 2, pull.round, 1), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEED_STORE), 1);
    rig_free(rig);
}

/* --- warm-up ------------------------------------------------------------------------------------------------------------ */

static struct rig *warm_rig(uint32_t learners)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.warmup.steps = 6;
    rig->spec->sync.warmup.interval = 2;
    rig->spec->sync.warmup.quorum = (struct dl_count_or_percent){.value = 75, .is_percent = true};
    rig->spec->sync.grace.mode = DL_GRACE_ADAPTIVE;
    rig->spec->sync.grace.margin = 0.5;
    rig->spec->sync.grace.max_seconds = 5;
    rig_start(rig);
    rig_seed(rig, learners);
    return rig;
}

static void warm_sync(struct rig *rig, uint32_t learners, uint32_t pulls_within)
{
    rig->now_ns += rig->step_ns;
    for (uint32_t n = 0; n < learners; n++) {
        rig_step(rig, n);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0);
    }
    rig->now_ns += rig->step_ns;
    uint64_t rounds[4] = {0};
    uint32_t opened_at = 99;
    for (uint32_t n = 0; n < learners; n++) {
        rig_step(rig, n);
        for (uint32_t p = 0; p < 4; p++) {
            for (uint32_t m = 0; m < learners; m++) {
                const struct dl_wire_pull *pull = rig_pull(rig, m, p);
                if (pull != NULL) {
                    opened_at = opened_at == 99 ? n : opened_at;
                    rounds[p] = pull->round;
                    CU_ASSERT_EQUAL(pull->flags, DL_PULL_WARMUP);
                    CU_ASSERT_EQUAL(pull->pull_within_steps, pulls_within);
                    CU_ASSERT_EQUAL(pull->update_within_steps, 0);
                    CU_ASSERT(pull->wait_ms > 0 && pull->wait_ms <= 15000);
                }
            }
        }
    }
    CU_ASSERT_EQUAL(opened_at, 2); /* The third of four is 75 %. */
    for (uint32_t p = 0; p < 4; p++) {
        for (uint32_t n = 0; n < learners; n++) {
            CU_ASSERT_EQUAL(rig_push(rig, n, p, rounds[p], 1), DL_VERDICT_ACCEPTED);
            CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), n == learners - 1 ? 1 : 0);
        }
        rig_commit(rig, p);
    }
    for (uint32_t n = 0; n < learners; n++) {
        for (uint32_t p = 0; p < 4; p++) {
            rig_apply(rig, n, p);
        }
        rig_meta(rig, n);
    }
}

static void test_warmup_syncs_all_fragments_every_interval(void)
{
    struct rig *rig = warm_rig(4);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_WARMUP);
    warm_sync(rig, 4, 2);
    warm_sync(rig, 4, DL_UNBOUNDED); /* The next step reaches warmup.steps: no further warm-up pull comes. */
    rig_step(rig, 0);
    rig_step(rig, 0);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_TRAINING);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 4); /* From here on one fragment every H / 4 steps, of all four. */
    CU_ASSERT_PTR_NOT_NULL(rig_pull(rig, 3, rig_action(rig, SY_ACT_PULL, 0)->fragment));
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_PULL, 0)->as.pull.flags, 0);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_PULL, 0)->as.pull.pull_within_steps, DL_UNBOUNDED);
    rig_free(rig);
}

/* The others go on without a learner that is much slower or stands still, after the stall bound at the latest. */
static void test_warmup_waits_for_nobody_long(void)
{
    struct rig *rig = warm_rig(2); /* 75 % of 2: both. */
    rig->now_ns += rig->step_ns;
    rig_step(rig, 0);
    rig_step(rig, 1);
    rig->now_ns += rig->step_ns;
    rig_step(rig, 0);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0); /* The other one stands still from here on. */
    int64_t begin_ns = rig->now_ns;
    while (rig_count(rig, SY_ACT_PULL) == 0 && rig->now_ns < begin_ns + 10 * RIG_SECOND) {
        rig->now_ns = sy_core_next_deadline(rig->core);
        rig_tick(rig, 0);
    }
    CU_ASSERT(rig->now_ns - begin_ns <= 4 * rig->step_ns); /* Two intervals. */
    uint64_t rounds[4];
    for (uint32_t p = 0; p < 4; p++) {
        CU_ASSERT_PTR_NOT_NULL_FATAL(rig_pull(rig, 0, p));
        rounds[p] = rig_pull(rig, 0, p)->round;
    }
    begin_ns = rig->now_ns;
    for (uint32_t p = 0; p < 4; p++) {
        rig_push(rig, 0, p, rounds[p], 1);
    }
    uint32_t merges = rig_count(rig, SY_ACT_MERGE);
    while (merges < 4 && rig->now_ns < begin_ns + 10 * RIG_SECOND) {
        rig->now_ns = sy_core_next_deadline(rig->core);
        rig_tick(rig, 0);
        merges += rig_count(rig, SY_ACT_MERGE);
    }
    CU_ASSERT_EQUAL(merges, 4);
    CU_ASSERT(rig->now_ns - begin_ns <= 5 * rig->step_ns + RIG_SECOND / 10);
    rig_free(rig);
}

static void test_no_second_warmup_after_a_restart(void)
{
    static const struct {
        uint64_t version;
        enum sy_phase phase;
    } table[] = {{1, SY_WARMUP}, {3, SY_WARMUP}, {4, SY_TRAINING}, {500, SY_TRAINING}};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        struct rig *rig = rig_spec();
        rig->spec->sync.warmup.steps = 6;
        rig->spec->sync.warmup.interval = 2; /* Three rounds: version 4 is the end. */
        rig_start(rig);
        for (uint32_t p = 0; p < 4; p++) {
            sy_core_restore_fragment(rig->core, p, table[i].version, 5);
        }
        rig_join(rig, 0); /* All learners are new, too, and start at step 0. */
        CU_ASSERT_EQUAL(rig_view(rig).phase, table[i].phase);
        CU_ASSERT_EQUAL(rig->welcome.pull_within_steps, table[i].phase == SY_WARMUP ? 2 : DL_UNBOUNDED);
        rig_free(rig);
    }
}

/* The interval doubles on the way from everybody at every step to everybody at their own pace. */
static void test_warmup_lets_go_by_stages(void)
{
    static const struct {
        uint64_t step;
        uint32_t pulls_within;
        enum sy_phase phase;
    } table[] = {
        {0, 1, SY_WARMUP},
        {89, 1, SY_WARMUP},
        {90, 2, SY_WARMUP},
        {109, 2, SY_WARMUP},
        {110, 4, SY_WARMUP},
        {130, 8, SY_WARMUP},
        {141, 8, SY_WARMUP},
        {142, DL_UNBOUNDED, SY_WARMUP},
        {150, DL_UNBOUNDED, SY_TRAINING},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        struct rig *rig = rig_spec();
        rig->spec->sync.warmup.steps = 90;
        rig->spec->sync.warmup.interval = 1;
        rig->spec->sync.interval = 24;
        rig_start(rig);
        for (uint32_t p = 0; p < 4; p++) {
            sy_core_restore_fragment(rig->core, p, 2, 5);
        }
        sy_core_restore_totals(rig->core, &(struct sy_core_totals){.step = table[i].step});
        rig_join(rig, 0);
        CU_ASSERT_EQUAL(rig_view(rig).phase, table[i].phase);
        CU_ASSERT_EQUAL(rig->welcome.pull_within_steps, table[i].pulls_within);
        rig_free(rig);
    }
}

/* A longer budget would give a longer warm-up: what the job began with holds, so that it does not begin again. */
static void test_no_second_warmup_with_a_longer_budget(void)
{
    for (int restored = 0; restored <= 1; restored++) {
        struct rig *rig = rig_spec();
        rig->spec->sync.warmup.steps = DL_WARMUP_BY_LENGTH; /* 1000 steps by this budget. */
        rig_start(rig);
        if (restored) {
            sy_core_restore_warmup(rig->core, 150);
        }
        for (uint32_t p = 0; p < 4; p++) {
            sy_core_restore_fragment(rig->core, p, 190, 5); /* That of 150 steps has 181 rounds. */
        }
        rig_join(rig, 0);
        CU_ASSERT_EQUAL(rig_view(rig).phase, restored ? SY_TRAINING : SY_WARMUP);
        rig_free(rig);
    }
}

static void test_synchronous_form(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.mode = DL_SYNC_SYNCHRONOUS;
    rig->spec->sync.fragments = 1;
    rig->spec->sync.overlap = 0;
    rig->spec->sync.timeout_seconds = 9;
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 100, .is_percent = true};
    rig->spec->learners.replicas = 2;
    rig_start(rig);
    rig_seed(rig, 2);
    CU_ASSERT_EQUAL(rig->welcome.pull_within_steps, 8);
    for (uint32_t s = 0; s < 8; s++) {
        rig_step(rig, 0);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0);
    }
    for (uint32_t s = 0; s < 8; s++) {
        rig_step(rig, 1);
    }
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 2);
    const struct dl_wire_pull *pull = rig_pull(rig, 1, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(pull);
    CU_ASSERT_EQUAL(pull->pull_within_steps, 8);
    CU_ASSERT_EQUAL(pull->update_within_steps, 0);
    CU_ASSERT_EQUAL(pull->wait_ms, 9000);
    rig_free(rig);
}

/* --- what is shown ---------------------------------------------------------------------------------------------------- */

/* A commit that cannot be made (full disk) is shown, told to nobody, holds no other fragment, and ends when it is made. */
static void test_delayed_commit(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 1);
    rig_step(rig, 0);
    rig_step(rig, 0);
    struct dl_wire_pull pull = rig_action(rig, SY_ACT_PULL, 0)->as.pull;
    rig_push(rig, 0, pull.fragment, pull.round, 1);
    sy_core_on_commit_delayed(rig->core, rig->now_ns, pull.fragment, "no space left");
    rig_event(rig);
    CU_ASSERT_PTR_NOT_NULL(strstr(rig_view(rig).message, "no space left"));
    CU_ASSERT_TRUE(rig_warns(rig, "commit delayed"));
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_BROADCAST), 0);
    rig_step(rig, 0);
    rig_step(rig, 0);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 1); /* The next fragment. */
    rig_commit(rig, pull.fragment);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_BROADCAST), 1);
    CU_ASSERT_STRING_EQUAL(rig_view(rig).message, "1/1 learners");
    rig_free(rig);
}

static void test_estimates_and_goodput(void)
{
    struct rig *rig = rig_spec();
    rig->spec->learners.replicas = 2;
    rig_start(rig);
    rig_seed(rig, 1);
    for (uint32_t s = 0; s < 40; s++) {
        rig->now_ns += rig->step_ns;
        rig_step(rig, 0);
    }
    struct sy_core_view view = rig_view(rig);
    CU_ASSERT_DOUBLE_EQUAL(view.goodput, 0.5, 1e-6); /* One of two learners computes all the time. */
    CU_ASSERT_EQUAL(view.loss, 2.0f);
    CU_ASSERT_EQUAL(view.step, 40);
    struct sy_member_view member;
    CU_ASSERT_TRUE(sy_core_member(rig->core, 0, &member));
    CU_ASSERT_DOUBLE_EQUAL(member.step_seconds, 0.1, 1e-9);
    CU_ASSERT_DOUBLE_EQUAL(member.tokens_per_second, 10 * RIG_STEP_TOKENS, 1);
    struct sy_core_totals totals;
    sy_core_get_totals(rig->core, &totals);
    CU_ASSERT_EQUAL(totals.busy_ns, 4 * RIG_SECOND);
    CU_ASSERT_EQUAL(totals.possible_ns, 8 * RIG_SECOND); /* Of two, whoever is there. */
    rig->now_ns += 4 * RIG_SECOND;                       /* As long again without a step. */
    CU_ASSERT_DOUBLE_EQUAL(rig_view(rig).goodput, 0.25, 1e-6);
    rig_free(rig);
}

UNIT_MAIN("core_phases", {"seeding", test_seeding_from_one_learner},
          {"lost seeder", test_lost_seeder_is_replaced_for_all_fragments},
          {"seeder stands still", test_seeder_that_stands_still_is_replaced},
          {"damaged seed", test_damaged_seed_is_asked_for_again},
          {"warm-up", test_warmup_syncs_all_fragments_every_interval},
          {"warm-up waits for nobody", test_warmup_waits_for_nobody_long},
          {"J3 warm-up lets go by stages", test_warmup_lets_go_by_stages},
          {"no second warm-up", test_no_second_warmup_after_a_restart},
          {"K8 no second warm-up with a longer budget", test_no_second_warmup_with_a_longer_budget},
          {"synchronous", test_synchronous_form}, {"delayed commit", test_delayed_commit},
          {"estimates", test_estimates_and_goodput})
