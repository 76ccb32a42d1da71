/* sy_core: learners that are slower than the others (Q6). */
#include "tests/unit/core_rig.h"

/* One more round of this fragment, of learner 0 alone; the pull that learner 1 got, if any. */
static bool round_of_the_fast(struct rig *rig, uint32_t fragment, struct dl_wire_pull *slow)
{
    for (uint32_t i = 0; i < 64; i++) {
        rig_step(rig, 0);
        const struct sy_action *opened = rig_action(rig, SY_ACT_PULL, 0);
        if (opened == NULL) {
            continue;
        }
        struct dl_wire_pull pull = opened->as.pull;
        const struct dl_wire_pull *asked = rig_pull(rig, 1, pull.fragment);
        bool was_asked = asked != NULL;
        *slow = was_asked ? *asked : (struct dl_wire_pull){0};
        CU_ASSERT_EQUAL_FATAL(rig_push(rig, 0, pull.fragment, pull.round, 1), DL_VERDICT_ACCEPTED);
        rig_commit(rig, pull.fragment);
        rig_apply(rig, 0, pull.fragment);
        rig_meta(rig, 0);
        if (pull.fragment == fragment) {
            return was_asked;
        }
    }
    CU_FAIL_FATAL("no round of the fragment");
    return false;
}

/* A learner in the middle of a long step is asked in every round, as long as what it has trained on would be accepted. */
static void test_q6_slow_learner_is_asked_while_its_base_is_good(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.merge.staleness_max = 2;
    rig_start(rig);
    rig_seed(rig, 2);
    struct dl_wire_pull pull;
    for (uint32_t behind = 0; behind < 5; behind++) {
        CU_ASSERT_EQUAL(round_of_the_fast(rig, 0, &pull), behind <= 2);
    }
    rig->members[1].step++;
    rig->members[1].tokens += RIG_STEP_TOKENS;
    struct dl_wire_push push = rig_push_of(rig, 1, 0, pull.round);
    CU_ASSERT_EQUAL(push.base_version, 1);
    rig_apply(rig, 1, 0); /* Its step is over; it reports the newest version, and is asked at once. */
    rig_meta(rig, 1);
    CU_ASSERT_TRUE(round_of_the_fast(rig, 0, &pull));
    rig_free(rig);
}

/* What missed its round is merged in the next, once, with the weight of its staleness; then its base is used up. */
static void test_q6_work_that_missed_its_round_is_merged_in_the_next(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.grace.mode = DL_GRACE_FIXED;
    rig->spec->sync.grace.max_seconds = 5;
    rig->spec->sync.merge.staleness_decay = 0.1;
    rig_start(rig);
    rig_seed(rig, 2);
    struct dl_wire_pull pull;
    rig->step_ns = 60 * RIG_SECOND; /* Of learner 1: nobody waits for its next boundary. */
    rig_step(rig, 1);
    rig->step_ns = RIG_SECOND / 10;
    struct dl_wire_push push = rig_push_of(rig, 1, 0, 0);
    CU_ASSERT_TRUE(round_of_the_fast(rig, 0, &pull));
    for (uint32_t i = 0; i < 64 && rig_pull(rig, 1, 0) == NULL; i++) {
        rig_step(rig, 0);
    }
    CU_ASSERT_PTR_NOT_NULL_FATAL(rig_pull(rig, 1, 0));
    push.round = rig_pull(rig, 1, 0)->round;
    CU_ASSERT_EQUAL(rig_announce(rig, 1, &push), DL_VERDICT_ACCEPTED);
    rig_received(rig, 1, 0, push.round, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0); /* Within the window, learner 0 is waited for. */
    rig_step(rig, 0);
    CU_ASSERT_EQUAL(rig_push(rig, 0, 0, push.round, 1), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    const struct sy_participant *who;
    CU_ASSERT_EQUAL_FATAL(sy_core_participants(rig->core, 0, &who), 2);
    CU_ASSERT_EQUAL(who[1].base_version, 1);
    CU_ASSERT_DOUBLE_EQUAL(who[1].weight, exp(-0.1) * RIG_STEP_TOKENS * RIG_STEP_TOKENS, 1e-6);
    rig_commit(rig, 0);
    rig_apply(rig, 0, 0);
    rig_meta(rig, 0);
    CU_ASSERT_FALSE(round_of_the_fast(rig, 0, &pull)); /* Of that base there is nothing more. */
    rig_free(rig);
}

/* A push on a base that is too old is answered for; with its next step the learner has something better. */
static void test_q6_stale_push_costs_no_further_round(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.merge.staleness_max = 0;
    rig_start(rig);
    rig_seed(rig, 2);
    struct dl_wire_pull pull;
    (void)round_of_the_fast(rig, 0, &pull);
    rig->members[1].step++;
    rig->members[1].tokens += RIG_STEP_TOKENS;
    struct dl_wire_push push = rig_push_of(rig, 1, 0, 0);
    rig_apply(rig, 1, 0);
    rig_meta(rig, 1);
    for (uint32_t i = 0; i < 64 && rig_pull(rig, 1, 0) == NULL; i++) {
        rig_step(rig, 0);
    }
    CU_ASSERT_PTR_NOT_NULL_FATAL(rig_pull(rig, 1, 0));
    push.round = rig_pull(rig, 1, 0)->round;
    CU_ASSERT_EQUAL(rig_announce(rig, 1, &push), DL_VERDICT_STALE_BASE);
    rig_step(rig, 1);
    CU_ASSERT_PTR_NOT_NULL(rig_pull(rig, 1, 0)); /* In the same round. */
    rig_free(rig);
}

/* A slow learner may offer what missed an earlier round; of one that keeps up a fresh push is wanted, until it has come late
 * twice in a row. */
static void test_q6_who_may_offer_what_missed_a_round(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 3);
    rig->step_ns = RIG_SECOND / 2;
    rig_step(rig, 2);
    rig->step_ns = RIG_SECOND / 10;
    rig_step(rig, 1);
    struct dl_wire_pull pull;
    for (uint32_t round = 0; round < 4; round++) {
        (void)round_of_the_fast(rig, 0, &pull);
        CU_ASSERT_EQUAL((pull.flags & DL_PULL_MISSED) != 0, round >= 2); /* Learner 1, which never answers, */
        rig_apply(rig, 1, 0);                                            /* and goes on with the newest version. */
        rig_meta(rig, 1);
    }
    while (rig_pull(rig, 0, 0) == NULL) {
        rig_step(rig, 0);
    }
    CU_ASSERT_EQUAL(rig_pull(rig, 0, 0)->flags & DL_PULL_MISSED, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(rig_pull(rig, 2, 0));
    CU_ASSERT_EQUAL(rig_pull(rig, 2, 0)->flags & DL_PULL_MISSED, DL_PULL_MISSED);
    rig_free(rig);
}

/* Learner 1's push in the next round of fragment 0: fresh, or of the version before. Returns whether it was asked for what
 * missed a round. */
static bool push_in_the_next_round(struct rig *rig, bool fresh)
{
    struct dl_wire_push old = rig_push_of(rig, 1, 0, 0);
    rig_apply(rig, 1, 0);
    rig_meta(rig, 1);
    for (uint32_t i = 0; i < 64 && rig_pull(rig, 1, 0) == NULL; i++) {
        rig_step(rig, 0);
    }
    CU_ASSERT_PTR_NOT_NULL_FATAL(rig_pull(rig, 1, 0));
    struct dl_wire_pull pull = *rig_pull(rig, 1, 0);
    rig_step(rig, 1);
    struct dl_wire_push push = fresh ? rig_push_of(rig, 1, 0, pull.round) : old;
    push.round = pull.round;
    CU_ASSERT_EQUAL(rig_announce(rig, 1, &push), DL_VERDICT_ACCEPTED);
    rig_received(rig, 1, 0, push.round, 1);
    if (!fresh) { /* One that missed its round makes no quorum. */
        rig_step(rig, 0);
        CU_ASSERT_EQUAL(rig_push(rig, 0, 0, push.round, 1), DL_VERDICT_ACCEPTED);
    }
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    rig_commit(rig, 0);
    rig_apply(rig, 0, 0);
    rig_meta(rig, 0);
    return (pull.flags & DL_PULL_MISSED) != 0;
}

/* One that comes late again and again goes on with what missed its round, though that is merged; at the 4th, 8th, 16th and
 * then every 16th a fresh push is tried. One fresh push in time, and fresh ones are wanted. */
static void test_q6_one_that_is_always_late_goes_on_with_what_missed_a_round(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.grace.mode = DL_GRACE_NONE;
    rig_start(rig);
    rig_seed(rig, 2);
    rig_step(rig, 1);
    struct dl_wire_pull pull;
    for (uint32_t late = 0; late < 2; late++) {
        CU_ASSERT_TRUE(round_of_the_fast(rig, 0, &pull));
        CU_ASSERT_EQUAL(pull.flags & DL_PULL_MISSED, 0);
        if (late == 0) {
            rig_apply(rig, 1, 0);
            rig_meta(rig, 1);
            rig_step(rig, 1);
        }
    }
    for (uint32_t missed = 2; missed < 40; missed++) {
        bool tried = missed == 4 || missed == 8 || missed == 16 || missed == 32;
        CU_ASSERT_EQUAL(push_in_the_next_round(rig, false), !tried);
    }
    CU_ASSERT_TRUE(push_in_the_next_round(rig, true));
    CU_ASSERT_FALSE(push_in_the_next_round(rig, true));
    rig_free(rig);
}

/* The window is for those who can come within it: it is not held open for one in the middle of a long step. */
static void test_q6_window_is_not_held_open_in_vain(void)
{
    for (int slow = 0; slow < 2; slow++) {
        struct rig *rig = rig_start_grace(DL_GRACE_FIXED, 2);
        rig->step_ns = slow ? 2 * RIG_SECOND : RIG_SECOND / 10; /* Window: 0.7 s. */
        rig_step(rig, 2);
        rig->step_ns = RIG_SECOND / 10;
        struct dl_wire_pull pull = {0};
        for (uint32_t i = 0; i < 64 && pull.round == 0; i++) {
            const struct sy_action *opened = rig_action(rig, SY_ACT_PULL, 0);
            pull = opened == NULL ? pull : opened->as.pull;
            if (opened == NULL) {
                rig_step(rig, i % 2);
            }
        }
        CU_ASSERT_FATAL(pull.round != 0);
        rig_step(rig, 0);
        rig_step(rig, 1);
        rig_push(rig, 0, pull.fragment, pull.round, 1);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
        rig_push(rig, 1, pull.fragment, pull.round, 1);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), slow ? 1 : 0);
        rig_free(rig);
    }
}

UNIT_MAIN("core_slow", {"Q6 slow learner is asked", test_q6_slow_learner_is_asked_while_its_base_is_good},
          {"Q6 missed round", test_q6_work_that_missed_its_round_is_merged_in_the_next},
          {"Q6 stale push", test_q6_stale_push_costs_no_further_round},
          {"Q6 who may offer", test_q6_who_may_offer_what_missed_a_round},
          {"Q6 always late", test_q6_one_that_is_always_late_goes_on_with_what_missed_a_round},
          {"Q6 window", test_q6_window_is_not_held_open_in_vain})
