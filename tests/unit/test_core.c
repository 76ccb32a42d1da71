/* sy_core: rounds, pace, quorum, grace. */
#include "syncer/core/state.h"
#include "tests/unit/core_rig.h"

static void test_round_from_pull_to_broadcast(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 1);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_TRAINING);
    struct dl_wire_pull pull = rig_open_round(rig, 1);
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
                    rig_merge_all(rig, learners, &pulls[k]);
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
            rig_merge_all(rig, 1, &pull);
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
    struct dl_wire_pull stuck = rig_open_round(rig, 1); /* Never answered. */
    uint64_t seen[4] = {0};
    for (uint32_t i = 0; i < 9; i++) {
        struct dl_wire_pull pull = rig_open_round(rig, 1);
        CU_ASSERT_NOT_EQUAL(pull.fragment, stuck.fragment);
        seen[pull.fragment]++;
        rig_merge_all(rig, 1, &pull);
    }
    for (uint32_t p = 0; p < 4; p++) {
        CU_ASSERT_EQUAL(seen[p], p == stuck.fragment ? 0 : 3);
    }
    rig_merge_all(rig, 1, &stuck);
    struct dl_wire_pull next = rig_open_round(rig, 1); /* It catches up at once. */
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
    struct dl_wire_pull pull = rig_open_round(rig, 1);
    rig_merge_all(rig, 1, &pull);
    CU_ASSERT_EQUAL(rig_view(rig).rounds_merged, 1);
    rig_free(rig);
}

static void test_adaptive_grace_is_a_share_of_the_slack(void)
{
    struct rig *rig = rig_start_grace(DL_GRACE_ADAPTIVE, 5);
    struct dl_wire_pull pull = rig_open_round(rig, 3);
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
        struct rig *rig = rig_start_grace(table[i].mode, table[i].overlap);
        struct dl_wire_pull pull = rig_open_round(rig, 3);
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
    struct rig *rig = rig_start_grace(DL_GRACE_FIXED, 2);
    struct dl_wire_pull pull = rig_open_round(rig, 3);
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
    struct rig *rig = rig_start_grace(DL_GRACE_FIXED, 2);
    struct dl_wire_pull pull = rig_open_round(rig, 3);
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
    struct dl_wire_pull pull = rig_open_round(rig, 2);
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
        struct dl_wire_pull pull = rig_open_round(rig, 3); /* 1 and 2 never answer, and fall silent. */
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

UNIT_MAIN("core", {"queue", test_largest_event_fits_the_queue}, {"round", test_round_from_pull_to_broadcast},
          {"pace exact", test_pace_is_exact_over_time},
          {"pace of the K-th fastest", test_pace_is_that_of_the_kth_fastest},
          {"pace after the fastest left", test_pace_goes_on_when_the_fastest_leaves},
          {"Q4 no fragment blocks another", test_q4_one_fragments_wait_blocks_no_other},
          {"Q5 zero learners", test_q5_zero_live_learners_is_stable},
          {"adaptive grace", test_adaptive_grace_is_a_share_of_the_slack}, {"grace modes", test_grace_modes_and_bounds},
          {"all in closes", test_all_in_closes_at_once}, {"leaver not waited for", test_a_leaver_is_not_waited_for},
          {"short quorum goes on", test_quorum_short_round_goes_on_by_itself},
          {"Q3 any pair of durations", test_q3_any_pair_of_durations_converges})
