/* sy_core: what is said to a push, and why (Q1, Q2, Q6, Q9). */
#include "syncer/core/state.h"
#include "tests/unit/core_rig.h"

/* Q1, Q2: each verdict of an announcement, by what is wrong with it. */
static void test_q1_q2_verdicts(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 2};
    rig->spec->sync.merge.staleness_max = 1;
    rig_start(rig);
    rig_seed(rig, 2);
    struct dl_wire_pull pull = rig_open_round(rig, 2);
    rig_step(rig, 1);
    const struct dl_wire_push good = rig_push_of(rig, 0, pull.fragment, pull.round);
    struct {
        const char *what;
        struct dl_wire_push push;
        enum dl_verdict verdict;
    } table[] = {
        {"bytes", good, DL_VERDICT_MALFORMED},
        {"no steps", good, DL_VERDICT_MALFORMED},
        {"no tokens", good, DL_VERDICT_MALFORMED},
        {"more steps than t_m", good, DL_VERDICT_MALFORMED},
        {"absurd tokens", good, DL_VERDICT_MALFORMED},
        {"future base", good, DL_VERDICT_STALE_BASE},
        {"base zero", good, DL_VERDICT_STALE_BASE},
        {"round zero", good, DL_VERDICT_UNKNOWN_ROUND},
        {"future round", good, DL_VERDICT_UNKNOWN_ROUND},
        {"foreign fragment", good, DL_VERDICT_MALFORMED},
    };
    table[0].push.bytes++;
    table[1].push.steps = 0;
    table[2].push.tokens = 0;
    table[3].push.steps = 100;
    table[4].push.tokens = rig->members[0].tokens + 1;
    table[5].push.base_version = 2;
    table[6].push.base_version = 0;
    table[7].push.round = 0;
    table[8].push.round += 100;
    table[9].push.fragment = 99;
    uint64_t counted[DL_VERDICT_COUNT] = {0};
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        CU_ASSERT_EQUAL(rig_announce(rig, 0, &table[i].push), table[i].verdict);
        CU_ASSERT_EQUAL(rig_result(rig, 0), table[i].verdict);
        counted[table[i].verdict]++;
    }
    CU_ASSERT_EQUAL(rig_announce(rig, 0, &good), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(rig_announce(rig, 0, &good), DL_VERDICT_DUPLICATE); /* Sent again while it is on its way, */
    rig_received(rig, 0, pull.fragment, pull.round, 1);
    CU_ASSERT_EQUAL(rig_announce(rig, 0, &good), DL_VERDICT_DUPLICATE); /* when it is here, */
    CU_ASSERT_EQUAL(rig_push(rig, 1, pull.fragment, pull.round, 1), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(rig_announce(rig, 0, &good),
                    DL_VERDICT_DUPLICATE); /* while it is merged: its buffer must live on; */
    rig_commit(rig, pull.fragment);
    CU_ASSERT_EQUAL(rig_announce(rig, 0, &good), DL_VERDICT_LATE); /* after. */
    counted[DL_VERDICT_ACCEPTED] = 4 + 2;                          /* Four seeds. */
    counted[DL_VERDICT_DUPLICATE] = 3;
    counted[DL_VERDICT_LATE] = 1;
    struct sy_core_view view = rig_view(rig);
    for (uint32_t v = 0; v < DL_VERDICT_COUNT; v++) {
        CU_ASSERT_EQUAL(view.verdicts[v], counted[v]);
    }
    rig_free(rig);
}

static void test_q2_a_base_is_merged_once_an_incarnation(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.merge.staleness_max = 2;
    rig_start(rig);
    rig_seed(rig, 3);
    rig_step(rig, 2);
    struct dl_wire_pull pull = rig_open_round(rig, 2);
    CU_ASSERT_EQUAL(rig_push(rig, 0, pull.fragment, pull.round, 1), DL_VERDICT_ACCEPTED); /* Base 1 of member 0. */
    rig_commit(rig, pull.fragment);
    uint32_t fragment = pull.fragment;
    for (uint32_t cycle = 0; cycle < 3; cycle++) {
        do {
            for (uint32_t p = 0; p < 4;
                 p++) { /* Both stay on base 1 of our fragment; member 1 tells so only in its push. */
                if (p != fragment) {
                    rig_apply(rig, 0, p);
                    rig_apply(rig, 1, p);
                }
            }
            rig_apply(rig, 1, fragment);
            pull = rig_open_round(rig, 2);
            if (pull.fragment != fragment) {
                rig_merge_all(rig, 2, &pull);
            }
        } while (pull.fragment != fragment);
        struct dl_wire_push again = rig_push_of(rig, 0, fragment, pull.round);
        again.base_version = 1;
        CU_ASSERT_EQUAL(rig_announce(rig, 0, &again), DL_VERDICT_DUPLICATE);
        struct dl_wire_push stale = rig_push_of(rig, 1, fragment, pull.round);
        stale.base_version = 1;
        static const enum dl_verdict expected[] = {DL_VERDICT_ACCEPTED, DL_VERDICT_DUPLICATE, DL_VERDICT_STALE_BASE};
        CU_ASSERT_EQUAL(rig_announce(rig, 1, &stale), expected[cycle]);
        if (cycle == 0) {
            rig_received(rig, 1, fragment, pull.round, 1);
            CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0); /* It is no part of the quorum. */
            rig_apply(rig, 2, fragment);
            rig_step(rig, 2);
            CU_ASSERT_EQUAL(rig_push(rig, 2, fragment, pull.round, 1), DL_VERDICT_ACCEPTED);
            CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
        } else {
            stale.base_version = rig->members[1].version[fragment];
            CU_ASSERT_EQUAL(rig_announce(rig, 1, &stale), DL_VERDICT_ACCEPTED);
            rig_received(rig, 1, fragment, pull.round, 1);
        }
        rig_commit(rig, fragment);
    }
    rig_free(rig);
}

static void test_q6_staleness_counts_versions_and_decays_weight(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.fragments = 1;
    rig->spec->sync.interval = 1;
    rig->spec->sync.merge.staleness_max = 2;
    rig->spec->sync.merge.staleness_decay = 0.5;
    rig_start(rig);
    rig_seed(rig, 2);
    for (uint64_t behind = 1; behind <= 3; behind++) {
        struct dl_wire_pull pull = rig_open_round(rig, 1);
        rig_merge_all(rig, 1, &pull);
        rig->now_ns += 1800 * RIG_SECOND; /* Half an hour between two rounds says nothing about staleness. */
        sy_core_on_heard(rig->core, rig->now_ns, 0);
        sy_core_on_heard(rig->core, rig->now_ns, 1);
    }
    for (uint32_t behind = 3; behind >= 2; behind--) {
        struct dl_wire_pull pull = rig_open_round(rig, 1);
        rig->members[1].step = 3;
        rig->members[1].tokens = 300;
        struct dl_wire_push push = rig_push_of(rig, 1, 0, pull.round);
        push.base_version = pull.version - behind;
        CU_ASSERT_EQUAL(rig_announce(rig, 1, &push), behind == 3 ? DL_VERDICT_STALE_BASE : DL_VERDICT_ACCEPTED);
        if (behind == 2) {
            rig_received(rig, 1, 0, pull.round, 1);
            rig_push(rig, 0, 0, pull.round, 1);
            const struct sy_participant *who;
            CU_ASSERT_EQUAL_FATAL(sy_core_participants(rig->core, 0, &who), 2);
            CU_ASSERT_DOUBLE_EQUAL(who[1].weight, 300.0 * 100 * exp(-0.5 * 2), 1e-6);
            break;
        }
        rig_merge_all(rig, 1, &pull);
    }
    rig_free(rig);
}

static void test_q9_not_finite_and_checksum_never_reach_a_merge(void)
{
    struct rig *rig = rig_start_grace(DL_GRACE_FIXED, 2);
    struct dl_wire_pull pull = rig_open_round(rig, 3);
    rig_step(rig, 1);
    rig_step(rig, 2);
    CU_ASSERT_EQUAL(rig_push(rig, 0, pull.fragment, pull.round, (double)NAN), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(rig_result(rig, 0), DL_VERDICT_NOT_FINITE);
    CU_ASSERT_TRUE(rig_warns(rig, "learner=0"));
    struct dl_wire_push push = rig_push_of(rig, 1, pull.fragment, pull.round);
    rig_announce(rig, 1, &push);
    sy_core_on_push_received(rig->core, rig->now_ns, 1, pull.round, pull.fragment, false, 1);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_result(rig, 1), DL_VERDICT_CHECKSUM);
    rig_push(rig, 2, pull.fragment, pull.round, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    const struct sy_participant *who;
    CU_ASSERT_EQUAL_FATAL(sy_core_participants(rig->core, pull.fragment, &who), 1);
    CU_ASSERT_EQUAL(who[0].learner, 2);
    rig_free(rig);
}

static void test_q9_absurd_norm_is_refused_counted_and_named(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 3};
    rig->spec->sync.grace.mode = DL_GRACE_FIXED;
    rig->spec->sync.grace.max_seconds = 1;
    rig->spec->sync.merge.norm_limit = 10;
    rig_start(rig);
    rig_seed(rig, 4);
    struct dl_wire_pull pull = rig_open_round(rig, 4);
    rig_step(rig, 3);
    rig_push(rig, 0, pull.fragment, pull.round, 1);
    rig_push(rig, 1, pull.fragment, pull.round, 1.2);
    rig_push(rig, 2, pull.fragment, pull.round, 1000);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    rig_tick(rig, RIG_SECOND); /* The window ends; without the absurd one the quorum is short. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    CU_ASSERT_EQUAL(rig_result(rig, 2), DL_VERDICT_NORM);
    CU_ASSERT_TRUE(rig_warns(rig, "learner=2"));
    rig_push(rig, 3, pull.fragment, pull.round, 0.9); /* The fourth makes it whole. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    const struct sy_participant *who;
    CU_ASSERT_EQUAL_FATAL(sy_core_participants(rig->core, pull.fragment, &who), 3);
    CU_ASSERT_EQUAL(who[2].learner, 3);
    CU_ASSERT_EQUAL(rig_view(rig).verdicts[DL_VERDICT_NORM], 1);
    rig_free(rig);
}

/* When nobody makes the round whole, it is given up after timeoutSeconds and a fresh one comes. */
static void test_q9_a_round_short_of_good_pushes_is_bounded(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 3};
    rig->spec->sync.timeout_seconds = 5;
    rig_start(rig);
    rig_seed(rig, 3);
    struct dl_wire_pull pull = rig_open_round(rig, 3);
    for (uint32_t n = 0; n < 3; n++) {
        rig_push(rig, n, pull.fragment, pull.round, n == 2 ? 1e9 : 1);
    }
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    rig->now_ns += 4 * RIG_SECOND;
    for (uint32_t n = 0; n < 3; n++) {
        sy_core_on_heard(rig->core, rig->now_ns, n);
    }
    rig_tick(rig, RIG_SECOND);
    CU_ASSERT_EQUAL(rig_view(rig).verdicts[DL_VERDICT_BELOW_QUORUM], 2);
    struct sy_fragment_view view;
    sy_core_fragment(rig->core, pull.fragment, &view);
    CU_ASSERT_FALSE(view.round_open);
    struct dl_wire_pull again = rig_open_round(rig, 3);
    rig_merge_all(rig, 3, &again);
    CU_ASSERT_EQUAL(rig_version(rig, again.fragment), 2);
    rig_free(rig);
}

static void test_norm_rule(void)
{
    static const struct {
        double norms[5];
        uint32_t count;
        double limit;
        uint32_t absurd; /* Bit i: norm i is. */
    } table[] = {
        {{1, 1e9}, 2, 10, 0}, /* Of two, nobody can say which is wrong. */
        {{1, 2, 20}, 3, 10, 0},
        {{1, 2, 20.1}, 3, 10, 4},
        {{1, 1, 20, 20}, 4, 10, 0},
        {{0, 0, 5}, 3, 10, 0}, /* With a median of zero there is nothing to compare with. */
        {{500, 1, 1, 700, 1}, 5, 10, 9},
    };
    double scratch[5];
    for (size_t t = 0; t < sizeof table / sizeof table[0]; t++) {
        for (uint32_t i = 0; i < table[t].count; i++) {
            CU_ASSERT_EQUAL(sy_norm_check(table[t].norms, table[t].count, i, table[t].limit, scratch),
                            (table[t].absurd >> i & 1) != 0);
        }
    }
    double values[] = {4, 1, 3, 2};
    CU_ASSERT_EQUAL(sy_median(values, 4, false), 2.5);
    CU_ASSERT_EQUAL(sy_median(values, 4, true), 2);
    CU_ASSERT_EQUAL(sy_median(values, 0, false), 0);
}

UNIT_MAIN("core_verdicts", {"norm rule", test_norm_rule}, {"Q1 Q2 verdicts", test_q1_q2_verdicts},
          {"Q2 a base is merged once", test_q2_a_base_is_merged_once_an_incarnation},
          {"Q6 staleness by versions", test_q6_staleness_counts_versions_and_decays_weight},
          {"Q9 not finite", test_q9_not_finite_and_checksum_never_reach_a_merge},
          {"Q9 absurd norm", test_q9_absurd_norm_is_refused_counted_and_named},
          {"Q9 bounded", test_q9_a_round_short_of_good_pushes_is_bounded})
