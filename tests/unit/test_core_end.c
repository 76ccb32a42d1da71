/* sy_core: the end of a job, and of a process whose job goes on. */
#include "tests/unit/core_rig.h"

static uint32_t position(const struct rig *rig, enum sy_action_type type)
{
    uint32_t at = 0;
    while (at < rig->count && rig->actions[at].type != type) {
        at++;
    }
    return at;
}

/* Answers every pull of the last event, until the job is over; how often each fragment was merged. */
static void finish(struct rig *rig, uint32_t merged[4])
{
    struct dl_wire_pull pulls[16];
    uint32_t members[16], count = 0;
    for (const struct sy_action *a; count < 16 && (a = rig_action(rig, SY_ACT_PULL, count)) != NULL; count++) {
        pulls[count] = a->as.pull;
        members[count] = a->member;
        CU_ASSERT_TRUE((a->as.pull.flags & DL_PULL_FINAL) != 0);
    }
    for (uint32_t k = 0; k < count; k++) {
        CU_ASSERT_NOT_EQUAL(rig_view(rig).phase, SY_ENDED);
        rig_push(rig, members[k], pulls[k].fragment, pulls[k].round, 1);
        if (rig_count(rig, SY_ACT_MERGE) > 0) {
            rig_commit(rig, pulls[k].fragment);
            merged[pulls[k].fragment]++;
        }
    }
}

static void test_q8_budget_merges_once_more_then_stops(void)
{
    for (uint32_t by_rounds = 0; by_rounds < 2; by_rounds++) {
        struct rig *rig = rig_spec();
        rig->spec->training.token_budget = by_rounds != 0 ? 1000000000 : 500;
        rig->spec->training.round_budget = by_rounds != 0 ? 1 : 0;
        rig_start(rig);
        rig_seed(rig, 1);
        struct dl_wire_hello hello = rig_hello_of(rig, -1, 1);
        hello.role = DL_ROLE_EVALUATOR;
        uint32_t observer;
        CU_ASSERT_EQUAL(rig_hello(rig, &hello, &observer), DL_OK);
        uint32_t merged[4] = {0};
        for (uint32_t s = 0; s < 20 && rig_view(rig).phase == SY_TRAINING; s++) {
            rig_step(rig, 0);
            const struct sy_action *pull = rig_action(rig, SY_ACT_PULL, 0);
            if (pull != NULL && rig_view(rig).phase == SY_TRAINING && by_rounds != 0) {
                rig_push(rig, 0, pull->as.pull.fragment, pull->as.pull.round, 1);
                rig_commit(rig, 0);
            }
        }
        CU_ASSERT_EQUAL(rig_view(rig).phase, SY_FINISHING);
        if (by_rounds != 0) {
            finish(rig, merged); /* Three fragments; the fourth has just been merged, and nothing was trained since. */
            rig_apply(rig, 0, 0);
            rig_step(rig, 0);
        }
        finish(rig, merged);
        if (rig_view(rig).phase != SY_ENDED) { /* Rounds that were open when the budget was reached. */
            struct sy_fragment_view view;
            for (uint32_t p = 0; p < 4; p++) {
                sy_core_fragment(rig->core, p, &view);
                if (view.round_open) {
                    rig_push(rig, 0, p, view.open_round, 1);
                    rig_commit(rig, p);
                    merged[p]++;
                }
            }
        }
        CU_ASSERT_EQUAL(rig_view(rig).phase, SY_ENDED);
        for (uint32_t p = 0; p < 4; p++) {
            CU_ASSERT_EQUAL(merged[p], 1);
        }
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_STOP), 2); /* The evaluator's, too. */
        CU_ASSERT(position(rig, SY_ACT_BROADCAST) < position(rig, SY_ACT_STOP));
        CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_STOP, 0)->as.stop.result, DL_STOP_SUCCEEDED);
        CU_ASSERT_EQUAL(rig_view(rig).stop_result, DL_STOP_SUCCEEDED);
        uint32_t member;
        CU_ASSERT_EQUAL(rig_rejoin(rig, 0, 0, &member), DL_EDENIED);
        CU_ASSERT_EQUAL(rig->refuse.code, DL_REFUSE_FINISHED);
        rig_free(rig);
    }
}

static void test_q8_four_results(void)
{
    for (int result = DL_STOP_SUCCEEDED; result <= DL_STOP_FAILED; result++) {
        struct rig *rig = rig_spec();
        rig->spec->active_deadline_seconds = result == DL_STOP_TIMEOUT ? 10 : 0;
        rig_start(rig);
        rig_seed(rig, 1);
        for (uint32_t s = 0; s < 2; s++) {
            rig_step(rig, 0);
        }
        struct dl_wire_pull open = rig_action(rig, SY_ACT_PULL, 0)->as.pull;
        if (result == DL_STOP_TIMEOUT) {
            rig->now_ns += 9 * RIG_SECOND;
            sy_core_on_heard(rig->core, rig->now_ns, 0);
            CU_ASSERT_EQUAL(sy_core_next_deadline(rig->core), rig->now_ns + RIG_SECOND);
            rig_tick(rig, RIG_SECOND);
        } else {
            sy_core_on_stop_request(rig->core, rig->now_ns, (enum dl_stop_result)result, "because");
            rig_event(rig);
        }
        if (result == DL_STOP_FAILED) {
            CU_ASSERT_EQUAL(rig_view(rig).phase, SY_ENDED); /* At once. */
        } else {
            CU_ASSERT_EQUAL(rig_view(rig).phase, SY_FINISHING);
            uint32_t merged[4] = {0};
            CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 3);
            finish(rig, merged);
            CU_ASSERT_EQUAL(rig_view(rig).phase, SY_FINISHING);
            rig_push(rig, 0, open.fragment, open.round, 1);
            rig_commit(rig, open.fragment);
        }
        struct sy_core_view view = rig_view(rig);
        CU_ASSERT_EQUAL(view.phase, SY_ENDED);
        CU_ASSERT_EQUAL((int)view.stop_result, result);
        CU_ASSERT_EQUAL((int)rig_action(rig, SY_ACT_STOP, 0)->as.stop.result, result);
        rig_free(rig);
    }
}

static void test_the_end_is_bounded(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.finish_seconds = 8;
    rig->spec->sync.timeout_seconds = 100;
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 2};
    rig_start(rig);
    rig_seed(rig, 2);
    for (uint32_t s = 0; s < 2; s++) {
        rig_step(rig, 0);
        rig_step(rig, 1);
    }
    sy_core_on_stop_request(rig->core, rig->now_ns, DL_STOP_REQUESTED, "enough");
    rig_event(rig);
    CU_ASSERT(rig_count(rig, SY_ACT_PULL) > 0);
    struct dl_wire_pull pull = rig_action(rig, SY_ACT_PULL, 0)->as.pull;
    CU_ASSERT_EQUAL(rig_push(rig, 0, pull.fragment, pull.round, 1),
                    DL_VERDICT_ACCEPTED); /* The other one answers nothing. */
    int64_t begin_ns = rig->now_ns;
    uint32_t below = 0;
    while (rig_view(rig).phase != SY_ENDED && sy_core_next_deadline(rig->core) != INT64_MAX) {
        rig->now_ns = sy_core_next_deadline(rig->core);
        rig_tick(rig, 0);
        below += rig_result(rig, 0) == DL_VERDICT_BELOW_QUORUM ? 1 : 0;
    }
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_ENDED);
    CU_ASSERT(rig->now_ns - begin_ns <= 8 * RIG_SECOND);
    CU_ASSERT_EQUAL(below, 1); /* The round ended without its quorum. */
    CU_ASSERT_EQUAL(rig_view(rig).rounds_merged, 0);
    rig_free(rig);
}

static struct rig *budget_reached(bool evaluated)
{
    struct rig *rig = rig_spec();
    rig->spec->training.round_budget = 4;
    rig->spec->sync.finish_seconds = 8;
    rig_start(rig);
    for (uint32_t p = 0; p < 4; p++) {
        sy_core_restore_fragment(rig->core, p, 5, 5);
    }
    sy_core_restore_totals(rig->core, &(struct sy_core_totals){.rounds_merged = 5, .evaluated = evaluated});
    return rig;
}

static void known_learner(struct rig *rig, uint32_t learner, uint64_t nonce, bool has_left)
{
    struct sy_core_incarnation known = {
        .learner = learner, .nonce = nonce, .born = nonce, .admission = nonce, .has_left = has_left};
    memcpy(known.uid, rig_hello_of(rig, (int32_t)learner, nonce).uid, sizeof known.uid);
    sy_core_restore_incarnation(rig->core, &known);
}

/* Seconds until it has ended by itself. */
static int64_t ends_after(struct rig *rig)
{
    int64_t begin_ns = rig->now_ns;
    rig_tick(rig, 0);
    while (rig_view(rig).phase != SY_ENDED && rig->now_ns - begin_ns < 20 * RIG_SECOND) {
        rig->now_ns = sy_core_next_deadline(rig->core);
        rig_tick(rig, 0);
    }
    CU_ASSERT_EQUAL(rig_view(rig).stop_result, DL_STOP_SUCCEEDED);
    return (rig->now_ns - begin_ns) / RIG_SECOND;
}

/* J5, Q8: started with its budget reached, it lets the evaluator have the state before it says STOP; for finishSeconds at most. */
static void test_budget_reached_before_the_start(void)
{
    struct rig *rig = budget_reached(true);
    rig_tick(rig, 0);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_FINISHING);
    rig_join(rig, 0);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_FINISHING);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0); /* There is nothing left to train for. */
    struct dl_wire_hello hello = rig_hello_of(rig, -1, 1);
    hello.role = DL_ROLE_EVALUATOR;
    uint32_t evaluator;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &evaluator), DL_OK);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 4);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_STOP), 2);
    CU_ASSERT(position(rig, SY_ACT_SEND) < position(rig, SY_ACT_STOP));
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_ENDED);
    rig_free(rig);
    rig = budget_reached(true); /* The evaluator does not come. */
    known_learner(rig, 0, 1, true);
    CU_ASSERT_EQUAL(ends_after(rig), 8);
    rig_free(rig);
}

/* J5: who has heard of the end is not waited for; who has not is, so that it hears of it and gets the last weights. */
static void test_budget_reached_and_nobody_to_come(void)
{
    struct rig *rig = budget_reached(false);
    known_learner(rig, 0, 2, true);
    known_learner(rig, 0, 1, false); /* Its successor has said goodbye. */
    known_learner(rig, 1, 3, true);
    CU_ASSERT_EQUAL(ends_after(rig), 0);
    rig_free(rig);

    rig = budget_reached(false);
    known_learner(rig, 0, 1, true);
    known_learner(rig, 1, 2, false);
    rig_tick(rig, 0);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_FINISHING);
    struct dl_wire_hello hello = rig_hello_of(rig, 1, 2);
    uint32_t returned;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &returned), DL_OK);
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_ENDED);
    CU_ASSERT(rig_count(rig, SY_ACT_SEND) > 0);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_STOP), 1);
    rig_free(rig);

    rig = budget_reached(false); /* It does not return. */
    known_learner(rig, 1, 2, false);
    CU_ASSERT_EQUAL(ends_after(rig), 8);
    rig_free(rig);

    rig = budget_reached(false); /* The evaluator may have had no time to report. */
    rig->spec->training.evaluation_seconds = 0;
    known_learner(rig, 0, 1, true);
    CU_ASSERT_EQUAL(ends_after(rig), 8);
    rig_free(rig);
}

/* Asked to leave: a round with its quorum is merged, one below it is given up, nothing new begins, nobody hears STOP. */
static void test_leaving_saves_what_is_under_way(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 2};
    rig->spec->sync.grace.mode = DL_GRACE_FIXED;
    rig->spec->sync.grace.max_seconds = 5;
    rig_start(rig);
    rig_seed(rig, 3);
    struct dl_wire_pull pulls[2];
    uint32_t opened = 0;
    for (uint32_t s = 0; s < 30 && opened < 2; s++) {
        rig_step(rig, s % 3);
        if (rig_count(rig, SY_ACT_PULL) > 0) {
            pulls[opened++] = rig_action(rig, SY_ACT_PULL, 0)->as.pull;
        }
    }
    CU_ASSERT_EQUAL_FATAL(opened, 2);
    rig_push(rig, 0, pulls[0].fragment, pulls[0].round, 1);
    rig_push(rig, 1, pulls[0].fragment, pulls[0].round, 1); /* Its quorum; the third may still come. */
    rig_push(rig, 0, pulls[1].fragment, pulls[1].round, 1);
    CU_ASSERT_FALSE(sy_core_is_drained(rig->core));
    sy_core_on_drain(rig->core, rig->now_ns);
    rig_event(rig);
    CU_ASSERT_EQUAL_FATAL(rig_count(rig, SY_ACT_MERGE), 1);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_MERGE, 0)->fragment, pulls[0].fragment);
    CU_ASSERT_FALSE(sy_core_is_drained(rig->core));
    for (uint32_t s = 0; s < 20; s++) {
        rig_step(rig, 0);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0);
    }
    rig_commit(rig, pulls[0].fragment);
    CU_ASSERT_TRUE(sy_core_is_drained(rig->core));
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_STOP), 0);
    CU_ASSERT_EQUAL(rig_version(rig, pulls[0].fragment), 2);
    CU_ASSERT_EQUAL(rig_version(rig, pulls[1].fragment), 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(rig_view(rig).message, "saving"));
    rig_free(rig);
}

UNIT_MAIN("core_end", {"Q8 budget", test_q8_budget_merges_once_more_then_stops},
          {"Q8 four results", test_q8_four_results}, {"the end is bounded", test_the_end_is_bounded},
          {"budget reached before the start", test_budget_reached_before_the_start},
          {"budget reached, nobody to come", test_budget_reached_and_nobody_to_come},
          {"leaving", test_leaving_saves_what_is_under_way})
