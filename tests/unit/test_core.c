/* sy_core: rounds, quorum, grace, verdicts. Tests that stand for a line of REQUIREMENTS carry its name. */
#include "syncer/core/state.h"
#include "tests/unit/core_rig.h"

/* Steps all learners once; the round that opens in between, if any. */
static const struct sy_action *step_all(struct rig *rig, uint32_t count, struct sy_action *opened)
{
    opened->type = SY_ACT_NOTE;
    for (uint32_t n = 0; n < count; n++) {
        rig_step(rig, n);
        const struct sy_action *pull = rig_action(rig, SY_ACT_PULL, 0);
        if (pull != NULL && opened->type != SY_ACT_PULL) {
            *opened = *pull;
        }
    }
    return opened->type == SY_ACT_PULL ? opened : NULL;
}

/* Steps until a round opens; its pull. */
static struct dl_wire_pull open_round(struct rig *rig, uint32_t count)
{
    struct sy_action opened;
    for (uint32_t i = 0; i < 200; i++) {
        if (step_all(rig, count, &opened) != NULL) {
            return opened.as.pull;
        }
    }
    CU_FAIL_FATAL("no round opened in 200 steps");
    return opened.as.pull;
}

static void merge_all(struct rig *rig, uint32_t count, const struct dl_wire_pull *pull)
{
    for (uint32_t n = 0; n < count; n++) {
        rig_push(rig, n, pull->fragment, pull->round, 1);
    }
    rig_commit(rig, pull->fragment);
    for (uint32_t n = 0; n < count; n++) {
        rig_apply(rig, n, pull->fragment);
    }
}

static void test_round_from_pull_to_broadcast(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 1);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_TRAINING);
    struct dl_wire_pull pull = open_round(rig, 1);
    CU_ASSERT_EQUAL(rig->members[0].step, 2); /* H / fragments = 8 / 4. */
    CU_ASSERT_EQUAL(pull.version, 1);
    CU_ASSERT_EQUAL(pull.flags, 0);
    CU_ASSERT_EQUAL(pull.pull_within_steps, DL_UNBOUNDED);
    CU_ASSERT_EQUAL(pull.update_within_steps, DL_UNBOUNDED);
    CU_ASSERT_EQUAL(rig_push(rig, 0, pull.fragment, pull.round, 3), DL_VERDICT_ACCEPTED);
    const struct sy_action *merge = rig_action(rig, SY_ACT_MERGE, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(merge);
    CU_ASSERT_EQUAL(merge->version, 2);
    CU_ASSERT_EQUAL(rig_result(rig, 0), DL_VERDICT_ACCEPTED);
    const struct sy_participant *who;
    CU_ASSERT_EQUAL_FATAL(sy_core_participants(rig->core, pull.fragment, &who), 1);
    CU_ASSERT_EQUAL(who[0].steps, 2);
    CU_ASSERT_EQUAL(who[0].tokens, 2 * RIG_STEP_TOKENS);
    CU_ASSERT_DOUBLE_EQUAL(who[0].weight, 2.0 * RIG_STEP_TOKENS * RIG_STEP_TOKENS, 1e-9);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_BROADCAST), 0); /* Commit, then tell. */
    rig_commit(rig, pull.fragment);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_BROADCAST), 1);
    CU_ASSERT_EQUAL(rig_version(rig, pull.fragment), 2);
    CU_ASSERT_EQUAL(rig_view(rig).rounds_merged, 1);
    rig_free(rig);
}

/* --- pacing --- */

/* Over a hundred cycles of H steps every fragment is merged once a cycle, whatever H / fragments is, and with learners
 * that step side by side no more often than with one. */
static void pace_of(uint32_t interval, uint32_t fragments, uint32_t learners, uint32_t quorum)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.interval = interval;
    rig->spec->sync.fragments = fragments;
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = quorum};
    rig_start(rig);
    rig_seed(rig, learners);
    enum { cycles = 50 };
    uint64_t openings[16] = {0}, total = 0;
    for (uint32_t s = 0; s < cycles * interval; s++) {
        for (uint32_t n = 0; n < learners; n++) {
            rig_step(rig, n);
            struct dl_wire_pull pulls[16];
            uint32_t count = 0;
            for (const struct sy_action *a; (a = rig_action(rig, SY_ACT_PULL, count)) != NULL && count < 16; count++) {
                pulls[count] = a->as.pull;
            }
            for (uint32_t k = 0; k < count; k++) {
                struct sy_fragment_view view;
                sy_core_fragment(rig->core, pulls[k].fragment, &view);
                if (view.round_open && view.open_round == pulls[k].round && k < count) {
                    openings[pulls[k].fragment] += rig_version(rig, pulls[k].fragment) == pulls[k].version ? 1 : 0;
                    total++;
                    merge_all(rig, learners, &pulls[k]);
                }
            }
        }
    }
    uint64_t expected = (uint64_t)cycles * fragments;
    CU_ASSERT(total + fragments >= expected && total <= expected + 1);
    for (uint32_t p = 0; p < fragments; p++) {
        CU_ASSERT(openings[p] + 2 >= cycles && openings[p] <= cycles + 2);
    }
    rig_free(rig);
}

static void test_pace_is_exact_over_time(void)
{
    pace_of(8, 4, 1, 1);
    pace_of(7, 3, 1, 1);
    pace_of(8, 8, 4, 1);
    pace_of(24, 5, 3, 2);
    pace_of(6, 4, 3, 3);
}

static void test_pace_is_that_of_the_kth_fastest(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 2};
    rig_start(rig);
    rig_seed(rig, 3);
    for (uint32_t s = 0; s < 20; s++) {
        rig_step(rig, 0); /* One fast learner alone opens nothing. */
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0);
    }
    rig_step(rig, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0);
    rig_step(rig, 1);                                /* The second one has done H / fragments steps. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 3); /* The third has reported no step, but will answer after one. */
    rig_free(rig);
}

static void test_pace_goes_on_when_the_fastest_leaves(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 2);
    for (uint32_t s = 0; s < 64; s++) {
        struct dl_wire_pull pull;
        rig_step(rig, 0);
        const struct sy_action *a = rig_action(rig, SY_ACT_PULL, 0);
        if (a != NULL) {
            pull = a->as.pull;
            merge_all(rig, 1, &pull);
            rig_apply(rig, 1, pull.fragment);
        }
    }
    sy_core_on_leave(rig->core, rig->now_ns, 0, SY_LEAVE_LOST);
    rig_event(rig);
    uint32_t steps = 0;
    while (rig_count(rig, SY_ACT_PULL) == 0 && steps < 100) {
        rig_step(rig, 1);
        steps++;
    }
    CU_ASSERT(steps <= 4);
    rig_free(rig);
}

static void test_q4_one_fragments_wait_blocks_no_other(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 1);
    struct dl_wire_pull stuck = open_round(rig, 1); /* Never answered. */
    uint64_t seen[4] = {0};
    for (uint32_t i = 0; i < 9; i++) {
        struct dl_wire_pull pull = open_round(rig, 1);
        CU_ASSERT_NOT_EQUAL(pull.fragment, stuck.fragment);
        seen[pull.fragment]++;
        merge_all(rig, 1, &pull);
    }
    for (uint32_t p = 0; p < 4; p++) {
        CU_ASSERT_EQUAL(seen[p], p == stuck.fragment ? 0 : 3);
    }
    merge_all(rig, 1, &stuck);
    struct dl_wire_pull next = open_round(rig, 1); /* It catches up at once. */
    CU_ASSERT_EQUAL(next.fragment, stuck.fragment);
    struct sy_round_times times = rig_view(rig).times;
    CU_ASSERT(times.wait >= 0 && times.merge > 0 && times.commit > 0);
    rig_free(rig);
}

/* --- quorum and grace --- */

static void test_q5_zero_live_learners_is_stable(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 1);
    sy_core_on_leave(rig->core, rig->now_ns, 0, SY_LEAVE_LOST);
    rig_event(rig);
    struct sy_core_view view = rig_view(rig);
    CU_ASSERT_EQUAL(view.phase, SY_WAITING_FOR_QUORUM);
    CU_ASSERT_STRING_EQUAL(sy_phase_name(view.phase), "WaitingForQuorum");
    CU_ASSERT_STRING_EQUAL(view.message, "0/1 learners");
    for (uint32_t i = 0; i < 100; i++) {
        rig_tick(rig, 3600 * RIG_SECOND);
        CU_ASSERT_EQUAL(rig->count, 0);
        CU_ASSERT_EQUAL(sy_core_next_deadline(rig->core), INT64_MAX);
    }
    uint32_t member;
    CU_ASSERT_EQUAL(rig_rejoin(rig, 0, 0, &member), DL_OK);
    CU_ASSERT_EQUAL(member, 0);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_TRAINING);
    struct dl_wire_pull pull = open_round(rig, 1);
    merge_all(rig, 1, &pull);
    CU_ASSERT_EQUAL(rig_view(rig).rounds_merged, 1);
    rig_free(rig);
}

static struct rig *grace_rig(enum dl_grace_mode mode, double overlap_steps)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.grace.mode = mode;
    rig->spec->sync.grace.margin = 0.5;
    rig->spec->sync.grace.max_seconds = 0.7;
    rig->spec->sync.overlap = (uint32_t)overlap_steps;
    rig_start(rig);
    rig_seed(rig, 3);
    return rig;
}

static void test_adaptive_grace_is_a_share_of_the_slack(void)
{
    struct rig *rig = grace_rig(DL_GRACE_ADAPTIVE, 5);
    struct dl_wire_pull pull = open_round(rig, 3);
    rig->now_ns += RIG_SECOND / 10;
    rig_push(rig, 0, pull.fragment, pull.round, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    /* slack = 5 x 0.1 s - (0.1 s to the quorum + nothing known of the merge): 0.4 s; half of it. */
    CU_ASSERT_EQUAL(sy_core_next_deadline(rig->core), rig->now_ns + RIG_SECOND / 5);
    CU_ASSERT_DOUBLE_EQUAL(rig_view(rig).grace_seconds, 0.2, 1e-9);
    rig->now_ns += RIG_SECOND / 10;
    rig_push(rig, 1, pull.fragment, pull.round, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    rig_tick(rig, RIG_SECOND / 10);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    const struct sy_participant *who;
    CU_ASSERT_EQUAL(sy_core_participants(rig->core, pull.fragment, &who), 2);
    rig_push(rig, 2, pull.fragment, pull.round, 1);
    CU_ASSERT_EQUAL(rig_result(rig, 2), DL_VERDICT_LATE);
    rig_free(rig);
}

static void test_grace_modes_and_bounds(void)
{
    static const struct {
        enum dl_grace_mode mode;
        double overlap, quorum_seconds, window;
    } table[] = {
        {DL_GRACE_ADAPTIVE, 5, 0.5, 0},    /* No slack. */
        {DL_GRACE_ADAPTIVE, 5, 0.9, 0},    /* Less than none. */
        {DL_GRACE_ADAPTIVE, 1000, 0, 0.7}, /* maxSeconds */
        {DL_GRACE_ADAPTIVE, 0, 0, 0},      {DL_GRACE_FIXED, 0, 3, 0.7}, {DL_GRACE_NONE, 1000, 0, 0},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        struct rig *rig = grace_rig(table[i].mode, table[i].overlap);
        struct dl_wire_pull pull = open_round(rig, 3);
        rig->now_ns += (int64_t)(table[i].quorum_seconds * 1e9);
        rig_push(rig, 0, pull.fragment, pull.round, 1);
        CU_ASSERT_DOUBLE_EQUAL(rig_view(rig).grace_seconds, table[i].window, 1e-9);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), table[i].window > 0 ? 0 : 1);
        if (table[i].window > 0) {
            rig_tick(rig, (int64_t)(table[i].window * 1e9));
            CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
        }
        rig_free(rig);
    }
}

static void test_all_in_closes_at_once(void)
{
    struct rig *rig = grace_rig(DL_GRACE_FIXED, 2);
    struct dl_wire_pull pull = open_round(rig, 3);
    rig_step(rig, 1);
    rig_step(rig, 2);
    rig_push(rig, 0, pull.fragment, pull.round, 1);
    rig_push(rig, 1, pull.fragment, pull.round, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    struct dl_wire_push_none none = {.round = pull.round, .fragment = pull.fragment, .reason = DL_VERDICT_NOTHING};
    struct sy_fragment_view view;
    sy_core_fragment(rig->core, pull.fragment, &view);
    CU_ASSERT_EQUAL(view.have, 2);
    sy_core_on_push_none(rig->core, rig->now_ns, 2, &none);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    CU_ASSERT_EQUAL(rig_view(rig).verdicts[DL_VERDICT_NOTHING], 1);
    rig_free(rig);
}

static void test_a_leaver_is_not_waited_for(void)
{
    struct rig *rig = grace_rig(DL_GRACE_FIXED, 2);
    struct dl_wire_pull pull = open_round(rig, 3);
    rig_push(rig, 0, pull.fragment, pull.round, 1);
    struct dl_wire_push push = rig_push_of(rig, 1, pull.fragment, pull.round);
    CU_ASSERT_EQUAL(rig_announce(rig, 1, &push), DL_VERDICT_ACCEPTED);
    sy_core_on_leave(rig->core, rig->now_ns, 2, SY_LEAVE_PREEMPTED);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    sy_core_on_leave(rig->core, rig->now_ns, 1, SY_LEAVE_LOST);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    CU_ASSERT_EQUAL(rig_view(rig).verdicts[DL_VERDICT_ABORTED], 1); /* Its transfer was cut. */
    CU_ASSERT_EQUAL(rig_view(rig).leaves[SY_LEAVE_PREEMPTED], 1);
    rig_free(rig);
}

static void test_quorum_short_round_goes_on_by_itself(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 2};
    rig_start(rig);
    rig_seed(rig, 2);
    struct dl_wire_pull pull = open_round(rig, 2);
    rig_push(rig, 0, pull.fragment, pull.round, 1);
    sy_core_on_leave(rig->core, rig->now_ns, 1, SY_LEAVE_LOST);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_WAITING_FOR_QUORUM);
    CU_ASSERT_STRING_EQUAL(rig_view(rig).message, "1/2 learners");
    /* The push that waits is replaced by a fresh one every H steps, and nothing is merged. */
    uint32_t refreshed = 0;
    for (uint32_t s = 0; s < 17; s++) {
        rig_step(rig, 0);
        const struct dl_wire_pull *again = rig_pull(rig, 0, pull.fragment);
        if (again != NULL) {
            CU_ASSERT_EQUAL(again->round, pull.round);
            CU_ASSERT_EQUAL(rig_result(rig, 0), DL_VERDICT_BELOW_QUORUM);
            CU_ASSERT_EQUAL(rig_push(rig, 0, pull.fragment, pull.round, 1), DL_VERDICT_ACCEPTED);
            refreshed++;
        }
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    }
    CU_ASSERT_EQUAL(refreshed, 2);
    uint32_t member;
    CU_ASSERT_EQUAL(rig_rejoin(rig, 1, 1, &member), DL_OK);
    CU_ASSERT_PTR_NOT_NULL(rig_pull(rig, member, pull.fragment)); /* It had not pushed: it is asked again. */
    rig_push(rig, 1, pull.fragment, pull.round, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    rig_free(rig);
}

/* --- verdicts --- */

/* Q1, Q2: each verdict of an announcement, by what is wrong with it. */
static void test_q1_q2_verdicts(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 2};
    rig->spec->sync.merge.staleness_max = 1;
    rig_start(rig);
    rig_seed(rig, 2);
    struct dl_wire_pull pull = open_round(rig, 2);
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
    struct dl_wire_pull pull = open_round(rig, 2);
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
            pull = open_round(rig, 2);
            if (pull.fragment != fragment) {
                merge_all(rig, 2, &pull);
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
        struct dl_wire_pull pull = open_round(rig, 1);
        merge_all(rig, 1, &pull);
        rig->now_ns += 1800 * RIG_SECOND; /* Half an hour between two rounds says nothing about staleness. */
        sy_core_on_heard(rig->core, rig->now_ns, 0);
        sy_core_on_heard(rig->core, rig->now_ns, 1);
    }
    for (uint32_t behind = 3; behind >= 2; behind--) {
        struct dl_wire_pull pull = open_round(rig, 1);
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
        merge_all(rig, 1, &pull);
    }
    rig_free(rig);
}

static void test_q9_not_finite_and_checksum_never_reach_a_merge(void)
{
    struct rig *rig = grace_rig(DL_GRACE_FIXED, 2);
    struct dl_wire_pull pull = open_round(rig, 3);
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
    struct dl_wire_pull pull = open_round(rig, 4);
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
    struct dl_wire_pull pull = open_round(rig, 3);
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
    struct dl_wire_pull again = open_round(rig, 3);
    merge_all(rig, 3, &again);
    CU_ASSERT_EQUAL(rig_version(rig, again.fragment), 2);
    rig_free(rig);
}

/* Q3: whatever the pair of grace window and timeout, a round that has a quorum ends, no later than the two together. */
static void test_q3_any_pair_of_durations_converges(void)
{
    uint64_t state = 88172645463325252u;
    for (uint32_t trial = 0; trial < 200; trial++) {
        struct rig *rig = rig_spec();
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        rig->spec->sync.timeout_seconds = 0.2 + (double)(state % 10000) / 100;
        rig->spec->sync.grace.max_seconds = (double)(state / 10000 % 10000) / 100;
        rig->spec->sync.grace.mode = (enum dl_grace_mode)(state / 100000000 % 3);
        rig->spec->sync.overlap = (uint32_t)(state >> 33 & 63);
        rig_start(rig);
        rig_seed(rig, 3);
        struct dl_wire_pull pull = open_round(rig, 3); /* 1 and 2 never answer, and fall silent. */
        int64_t begin_ns = rig->now_ns;
        rig_push(rig, 0, pull.fragment, pull.round, 1);
        uint32_t merges = rig_count(rig, SY_ACT_MERGE);
        while (merges == 0 && sy_core_next_deadline(rig->core) != INT64_MAX) {
            rig->now_ns = sy_core_next_deadline(rig->core);
            rig_tick(rig, 0);
            merges += rig_count(rig, SY_ACT_MERGE);
        }
        double bound = rig->spec->sync.timeout_seconds + rig->spec->sync.grace.max_seconds;
        CU_ASSERT_EQUAL(merges, 1);
        CU_ASSERT((double)(rig->now_ns - begin_ns) / 1e9 <= bound + 1e-6);
        rig_free(rig);
    }
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

/* Every pull and every verdict of the largest ensemble at once fits into the queue: its size is checked by an assertion. */
static void test_largest_event_fits_the_queue(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.fragments = 16;
    rig->spec->learners.max = 32;
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 32};
    rig_start(rig);
    rig_seed(rig, 32);
    for (uint32_t n = 0; n < 32; n++) {
        rig->members[n].step += 1;
        rig->members[n].tokens += RIG_STEP_TOKENS;
        rig_meta(rig, n);
    }
    sy_core_on_stop_request(rig->core, rig->now_ns, DL_STOP_REQUESTED, "all at once");
    uint64_t before = rig->core->queue_count;
    rig_event(rig);
    CU_ASSERT(before >= 12 * 32);
    CU_ASSERT(rig_count(rig, SY_ACT_PULL) >= 12 * 32);
    CU_ASSERT(rig->core->queue_peak < rig->core->queue_capacity);
    rig_free(rig);
}

/* --- slow learners --- */

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

/* The window is for those who can come within it: it is not held open for one in the middle of a long step. */
static void test_q6_window_is_not_held_open_in_vain(void)
{
    for (int slow = 0; slow < 2; slow++) {
        struct rig *rig = grace_rig(DL_GRACE_FIXED, 2);
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

UNIT_MAIN("core", {"norm rule", test_norm_rule}, {"queue", test_largest_event_fits_the_queue},
          {"round", test_round_from_pull_to_broadcast}, {"pace exact", test_pace_is_exact_over_time},
          {"pace of the K-th fastest", test_pace_is_that_of_the_kth_fastest},
          {"pace after the fastest left", test_pace_goes_on_when_the_fastest_leaves},
          {"Q4 no fragment blocks another", test_q4_one_fragments_wait_blocks_no_other},
          {"Q5 zero learners", test_q5_zero_live_learners_is_stable},
          {"adaptive grace", test_adaptive_grace_is_a_share_of_the_slack}, {"grace modes", test_grace_modes_and_bounds},
          {"all in closes", test_all_in_closes_at_once}, {"leaver not waited for", test_a_leaver_is_not_waited_for},
          {"short quorum goes on", test_quorum_short_round_goes_on_by_itself}, {"Q1 Q2 verdicts", test_q1_q2_verdicts},
          {"Q2 a base is merged once", test_q2_a_base_is_merged_once_an_incarnation},
          {"Q6 staleness by versions", test_q6_staleness_counts_versions_and_decays_weight},
          {"Q6 slow learner is asked", test_q6_slow_learner_is_asked_while_its_base_is_good},
          {"Q6 missed round", test_q6_work_that_missed_its_round_is_merged_in_the_next},
          {"Q6 stale push", test_q6_stale_push_costs_no_further_round},
          {"Q6 who may offer", test_q6_who_may_offer_what_missed_a_round},
          {"Q6 window", test_q6_window_is_not_held_open_in_vain},
          {"Q9 not finite", test_q9_not_finite_and_checksum_never_reach_a_merge},
          {"Q9 absurd norm", test_q9_absurd_norm_is_refused_counted_and_named},
          {"Q9 bounded", test_q9_a_round_short_of_good_pushes_is_bounded},
          {"Q3 any pair of durations", test_q3_any_pair_of_durations_converges})
