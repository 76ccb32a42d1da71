/* sy_core: seeding, interval warm-up, the synchronous form, the end. */
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

/* --- the end ------------------------------------------------------------------------------------------------------------ */

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
          {"synchronous", test_synchronous_form}, {"Q8 budget", test_q8_budget_merges_once_more_then_stops},
          {"Q8 four results", test_q8_four_results},
          {"budget reached before the start", test_budget_reached_before_the_start},
          {"budget reached, nobody to come", test_budget_reached_and_nobody_to_come},
          {"the end is bounded", test_the_end_is_bounded}, {"delayed commit", test_delayed_commit},
          {"leaving", test_leaving_saves_what_is_under_way}, {"estimates", test_estimates_and_goodput})
