/* The link core: greeting, reconnecting, the end, any order of events. */
#include "common/rng.h"
#include "tests/unit/link_rig.h"

/* --- greeting ------------------------------------------------------------------------------------------------------- */

static void test_hello_says_who_and_what_is_held(void)
{
    begin(1);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_WAIT);
    connect(0);
    const struct dl_wire_hello *hello = &act.message->as.hello;
    CU_ASSERT_EQUAL(hello->learner, 5);
    CU_ASSERT_EQUAL(hello->nonce, 99);
    CU_ASSERT_STRING_EQUAL(hello->uid, "pod-1");
    CU_ASSERT_STRING_EQUAL(hello->job, "demo");
    CU_ASSERT_EQUAL(hello->fragment_count, 0);
    CU_ASSERT(hello->tensors_bytes > 0);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    welcome(0, 1, 1);
    say(0);
    CU_ASSERT_EQUAL(next_step(), WK_STEP_PREPARE);
    wk_link_on_prepared(link_);
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        update(0, p, 3, 9);
    }
    boundary();
    train();
    train();
    update(0, 1, 4, 10); /* Complete, and waits for its boundary. */
    wk_link_on_disconnected(link_, now, 0, "cable");
    now += 11 * SECOND;
    connect(0);
    CU_ASSERT_EQUAL(hello->nonce, 99);
    CU_ASSERT_EQUAL(hello->step, 2);
    CU_ASSERT_EQUAL(hello->tokens, 200);
    CU_ASSERT_EQUAL(hello->fragment_count, FRAGMENTS);
    CU_ASSERT_EQUAL(hello->fragments[0].version, 3);
    CU_ASSERT_EQUAL(hello->fragments[0].steps, 2);
    CU_ASSERT_EQUAL(hello->fragments[1].version, 4);
    end();
}

static void test_layout_mismatch_is_final_and_names_both(void)
{
    begin(1);
    connect(0);
    welcome(0, 1, 1);
    in.as.welcome.layout_hash = 0xabcdef;
    say(0);
    CU_ASSERT_EQUAL(outcome("0000000000abcdef"), WK_END_REFUSED);
    char ours[32];
    snprintf(ours, sizeof ours, "%016llx", (unsigned long long)layout->hash);
    CU_ASSERT_EQUAL(outcome(ours), WK_END_REFUSED);
    CU_ASSERT_EQUAL(next_step(), WK_STEP_DONE);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CLOSE);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    CU_ASSERT_EQUAL(wk_link_deadline(link_), INT64_MAX);
    end();
}

static void test_wrong_shard_or_count_is_final(void)
{
    for (int wrong = 0; wrong < 2; wrong++) {
        begin(2);
        connect(0);
        welcome(wrong == 0 ? 1 : 0, wrong == 0 ? 2 : 3, 1);
        say(0);
        CU_ASSERT_EQUAL(outcome("endpoint 0 of 2"), WK_END_REFUSED);
        end();
    }
}

static void test_any_id_asks_shard_0_first(void)
{
    begin_as(2, -1, DL_ROLE_LEARNER);
    CU_ASSERT_EQUAL(next_act(1), WK_ACT_NONE);
    connect(0);
    CU_ASSERT_EQUAL(act.message->as.hello.learner, -1);
    CU_ASSERT_EQUAL(next_act(1), WK_ACT_NONE);
    welcome(0, 2, 1);
    say(0);
    connect(1);
    CU_ASSERT_EQUAL(act.message->as.hello.learner, 5);
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.learner, 5);
    CU_ASSERT_EQUAL(view.tokens_all, 70);
    end();
}

static void refuse(enum dl_refusal code)
{
    connect(0);
    make_refuse(&in, (uint16_t)code, "because");
    say(0);
}

static void test_temporary_refusal_is_retried_final_ones_are_not(void)
{
    begin(1);
    refuse(DL_REFUSE_FULL);
    CU_ASSERT_EQUAL(outcome(""), WK_END_NONE);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CLOSE);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    now = wk_link_deadline(link_);
    refuse(DL_REFUSE_SUPERSEDED);
    CU_ASSERT_EQUAL(outcome("because"), WK_END_REFUSED);
    end();
    begin(1);
    refuse(DL_REFUSE_FINISHED);
    CU_ASSERT_EQUAL(next_step(), WK_STEP_DONE);
    CU_ASSERT_EQUAL(outcome("stop"), WK_END_STOPPED);
    end();
    begin(1);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CONNECT);
    wk_link_on_denied(link_, now, 0, "401: wrong token");
    CU_ASSERT_EQUAL(outcome("wrong token"), WK_END_REFUSED);
    end();
}

/* --- reconnecting --------------------------------------------------------------------------------------------------- */

static void test_backoff_grows_with_jitter_and_is_reset(void)
{
    begin(1);
    int64_t pauses[12];
    for (int i = 0; i < 12; i++) {
        CU_ASSERT_EQUAL_FATAL(next_act(0), WK_ACT_CONNECT);
        wk_link_on_disconnected(link_, now, 0, "refused");
        pauses[i] = wk_link_deadline(link_) - now;
        int64_t most = DL_MIN((INT64_C(100) << i) * MS, INT64_C(10000) * MS);
        CU_ASSERT(pauses[i] >= most / 2 && pauses[i] <= most);
        now += pauses[i] - 1;
        CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
        now += 1;
    }
    CU_ASSERT(pauses[10] != pauses[11]); /* Jitter. */
    join(1);
    wk_link_on_disconnected(link_, now, 0, "reset");
    CU_ASSERT(wk_link_deadline(link_) - now <= 100 * MS);
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.reconnects, 1);
    end();
}

static void test_hours_without_a_syncer_never_end_the_learner(void)
{
    begin(1);
    join(1);
    wk_link_on_disconnected(link_, now, 0, "gone");
    for (int i = 0; i < 5000; i++) {
        now = DL_MAX(now + 1, wk_link_deadline(link_));
        if (next_act(0) == WK_ACT_CONNECT) {
            wk_link_on_disconnected(link_, now, 0, "connection refused");
        }
        CU_ASSERT_EQUAL_FATAL(train(), WK_STEP_GO);
    }
    CU_ASSERT(now > 1000 * SECOND + 6 * 3600 * SECOND);
    CU_ASSERT_EQUAL(state_of(0).steps, 5000);
    int level, notes = 0;
    char text[DL_ERR_TEXT_MAX];
    while (wk_link_next_note(link_, &level, text)) {
        notes++;
    }
    CU_ASSERT(notes < WK_NOTES_MAX); /* And its log is not flooded. */
    end();
}

static void test_silence_and_a_slow_greeting_are_timeouts(void)
{
    begin(1);
    connect(0);
    now += (WK_GREETING_MS - 1) * MS;
    wk_link_tick(link_, now);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    now += MS;
    wk_link_tick(link_, now);
    CU_ASSERT_TRUE(wk_link_wants_close(link_, 0));
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CLOSE);
    now += SECOND;
    join(1);
    now += 4999 * MS;
    wk_link_tick(link_, now);
    CU_ASSERT_FALSE(wk_link_wants_close(link_, 0));
    wk_link_on_heard(link_, now, 0);
    now += 4999 * MS;
    wk_link_tick(link_, now);
    CU_ASSERT_FALSE(wk_link_wants_close(link_, 0));
    now += MS;
    CU_ASSERT(wk_link_deadline(link_) <= now);
    wk_link_tick(link_, now);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CLOSE);
    CU_ASSERT_PTR_NOT_NULL(strstr(act.text, "5000 ms"));
    CU_ASSERT_PTR_NOT_NULL(strstr(wk_link_trouble(link_), "5000 ms"));
    end();
}

static void test_heartbeat_when_nothing_else_was_sent(void)
{
    begin(1);
    join(1);
    CU_ASSERT_EQUAL(wk_link_deadline(link_), now + SECOND);
    now += 999 * MS;
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    now += MS;
    CU_ASSERT_TRUE(sends(0, DL_WIRE_HEARTBEAT));
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    now += 600 * MS;
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    now += 600 * MS;
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE); /* META was heartbeat enough. */
    make_heartbeat(&in, 1, 500, 9000);
    say(0);
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.ensemble_step, 500);
    CU_ASSERT_EQUAL(view.tokens_all, 9000);
    end();
}

/* --- the end -------------------------------------------------------------------------------------------------------- */

static void stop(uint32_t shard, enum dl_stop_result result)
{
    make_stop(&in, result, "told");
    say(shard);
}

static void test_done_when_every_shard_said_stop_after_last_updates(void)
{
    begin(2);
    join(2);
    update(1, 1, 2, 8);
    stop(1, DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    update(0, 0, 2, 9);
    stop(0, DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train(), WK_STEP_DONE);
    CU_ASSERT_EQUAL(applied, 1); /* Final parameters first. */
    CU_ASSERT_EQUAL(outcome("succeeded"), WK_END_SUCCEEDED);
    end();
}

static void test_done_when_shard_0_said_stop_and_others_are_gone(void)
{
    begin(2);
    join(2);
    stop(0, DL_STOP_REQUESTED);
    wk_link_on_disconnected(link_, now, 1, "cut");
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    now += 4900 * MS;
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    now += 100 * MS;
    CU_ASSERT_EQUAL(train(), WK_STEP_DONE);
    CU_ASSERT_EQUAL(outcome("asked to stop"), WK_END_STOPPED);
    end();
    begin(2); /* Not the other way round: shard 0 may come back. */
    join(2);
    stop(1, DL_STOP_SUCCEEDED);
    wk_link_on_disconnected(link_, now, 0, "cut");
    now += 3600 * SECOND;
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    end();
}

static void test_failed_ends_at_once(void)
{
    begin(2);
    join(2);
    stop(1, DL_STOP_FAILED);
    CU_ASSERT_EQUAL(train(), WK_STEP_DONE);
    CU_ASSERT_EQUAL(outcome("told"), WK_END_FAILED);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CLOSE);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    end();
}

static void test_leave_sends_pushes_then_goodbye(void)
{
    begin(1);
    join(1);
    train();
    pull(0, 0, 1, 5);
    wk_link_leave(link_, now, true, "spot node is taken back");
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    pull(0, 1, 1, 6); /* Too late. */
    CU_ASSERT_FALSE(wk_link_has_left(link_));
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 5, 1, 1);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_GOODBYE));
    CU_ASSERT_EQUAL(act.message->as.goodbye.preempted, 1);
    CU_ASSERT_STRING_EQUAL(act.message->as.goodbye.text, "spot node is taken back");
    CU_ASSERT_TRUE(wk_link_has_left(link_));
    now += SECOND;
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    wk_link_on_disconnected(link_, now, 0, "closed");
    CU_ASSERT_EQUAL(wk_link_deadline(link_), INT64_MAX); /* For good. */
    end();
}

static void test_evaluator_reports_to_every_shard_and_sends_nothing_else(void)
{
    begin_as(2, -1, DL_ROLE_EVALUATOR);
    for (uint32_t s = 0; s < 2; s++) {
        connect(s);
        CU_ASSERT_EQUAL(act.message->as.hello.role, DL_ROLE_EVALUATOR);
        CU_ASSERT_EQUAL(act.message->as.hello.learner, -1);
        welcome(s, 2, 1);
        say(s);
    }
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        update(p % 2, p, 1, p);
    }
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    pull(0, 0, 1, 5);
    wk_link_on_poll(link_, now);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    for (int i = 0; i < WK_EVALUATIONS_MAX + 3; i++) {
        wk_link_report(link_, i, 8, 4711);
    }
    for (uint32_t s = 0; s < 2; s++) {
        for (int i = 0; i < WK_EVALUATIONS_MAX; i++) {
            CU_ASSERT_TRUE_FATAL(sends(s, DL_WIRE_EVALUATION));
            CU_ASSERT_EQUAL(act.message->as.evaluation.loss, i + 3);
            CU_ASSERT_EQUAL(act.message->as.evaluation.round, 3);
            CU_ASSERT_EQUAL(act.message->as.evaluation.parameter_hash, 4711);
        }
        CU_ASSERT_EQUAL(next_act(s), WK_ACT_NONE);
    }
    end();
}

/* --- any order of events -------------------------------------------------------------------------------------------- */

static void random_event(struct dl_rng *rng, uint64_t *version, uint64_t *round)
{
    uint32_t p = (uint32_t)dl_rng_below(rng, FRAGMENTS), shard = p % 2;
    switch (dl_rng_below(rng, 9)) {
    case 0: announce(shard, p, ++version[p], ++*round); break;
    case 1: {
        struct wk_spot spot;
        uint64_t hash;
        if (wk_link_place(link_, now, shard, next_transfer, 0, (uint32_t)layout->fragments[p].padded_elements * 4,
                          &spot) == WK_PLACE_STORE &&
            wk_link_on_chunk(link_, now, shard, dl_rng_below(rng, 8) != 0, &hash)) {
            wk_link_on_update(link_, now, shard, dl_rng_below(rng, 8) != 0);
        }
        break;
    }
    case 2: pull_flags(shard, p, version[p] + dl_rng_below(rng, 2), ++*round, (uint32_t)dl_rng_below(rng, 4)); break;
    case 3:
        make_result(&in, p, *round, (enum dl_verdict)dl_rng_below(rng, DL_VERDICT_COUNT));
        say(shard);
        break;
    case 4: wk_link_on_disconnected(link_, now, shard, "cut"); break;
    case 5: now += (int64_t)dl_rng_below(rng, 3000) * MS; break;
    case 6: wk_link_tick(link_, now); break;
    default: break;
    }
}

/* Takes what the link wants to do, as a shell does, greeting the syncer as needed. */
static void random_service(struct dl_rng *rng, const uint64_t *version)
{
    for (uint32_t shard = 0; shard < 2; shard++) {
        for (uint64_t acts = dl_rng_below(rng, 6); acts > 0 && next_act(shard) != WK_ACT_NONE; acts--) {
            if (act.type == WK_ACT_CONNECT) {
                wk_link_on_connected(link_, now, shard);
            } else if (act.type == WK_ACT_CHUNK) {
                wk_link_on_chunk_sent(link_, now, shard);
            } else if (act.type == WK_ACT_SEND && act.message->type == DL_WIRE_HELLO && dl_rng_below(rng, 4) != 0) {
                welcome(shard, 2, 0);
                for (uint32_t i = 0; i < in.as.welcome.fragment_count; i++) {
                    uint64_t lost = dl_rng_below(rng, 4) == 0;
                    uint64_t held = version[in.as.welcome.fragments[i].fragment];
                    in.as.welcome.fragments[i].version = held - DL_MIN(lost, held);
                }
                in.as.welcome.pull_within_steps = (uint32_t)dl_rng_below(rng, 3);
                in.as.welcome.apply = (uint8_t)dl_rng_below(rng, 2);
                in.as.welcome.wait_ms = 100;
                say(shard);
            }
        }
    }
}

static void test_random_events_keep_every_invariant(void)
{
    struct dl_rng rng;
    uint64_t steps = 0, updates = 0, pushes = 0;
    for (uint64_t seed = 0; seed < 40; seed++) {
        dl_rng_init(&rng, seed, dl_rng_stream("link", 0, 0));
        keep_missed = seed % 2 == 1;
        begin(2);
        uint64_t version[FRAGMENTS] = {0}, round = 0;
        for (int i = 0; i < 1500; i++) {
            random_event(&rng, version, &round);
            random_service(&rng, version);
            if (wk_link_is_joined(link_) && dl_rng_below(&rng, 3) == 0) {
                now += MS;
                wk_link_on_step(link_, now, 100, NAN);
                steps++;
            }
            for (int k = 0; boundary() == WK_STEP_WAIT && wk_link_is_joined(link_); k++) {
                CU_ASSERT_FATAL(k < 10 && step_.until_ns > now);
                now = step_.until_ns; /* Every wait has an end. */
            }
        }
        struct wk_link_view view;
        wk_link_view(link_, &view);
        updates += view.updates_applied;
        pushes += view.pushes_sent;
        end();
    }
    keep_missed = false;
    CU_ASSERT(steps > 1000);
    CU_ASSERT(updates > 300);
    CU_ASSERT(pushes > 300);
}

static void test_wrong_configurations(void)
{
    struct dl_tensor tensors[TENSORS];
    make_tensors(tensors);
    struct wk_link_config good = {
        .learner = 0, .uid = "u", .job = "j", .shards = 1, .tensors = tensors, .tensor_count = TENSORS};
    struct wk_link_config bad = good;
    bad.shards = DL_SPEC_SHARDS_MAX + 1;
    CU_ASSERT_EQUAL(wk_link_new(&bad, &link_, NULL), DL_EINVAL);
    bad = good;
    bad.learner = DL_SPEC_LEARNERS_MAX;
    CU_ASSERT_EQUAL(wk_link_new(&bad, &link_, NULL), DL_EINVAL);
    bad = good;
    bad.uid = "";
    CU_ASSERT_EQUAL(wk_link_new(&bad, &link_, NULL), DL_EINVAL);
    tensors[1].shape[0] = 0;
    CU_ASSERT_EQUAL(wk_link_new(&good, &link_, NULL), DL_EINVAL);
    wk_link_free(NULL);
}

UNIT_MAIN("link", {"hello", test_hello_says_who_and_what_is_held},
          {"layout mismatch", test_layout_mismatch_is_final_and_names_both},
          {"wrong shard", test_wrong_shard_or_count_is_final}, {"any id", test_any_id_asks_shard_0_first},
          {"refusals", test_temporary_refusal_is_retried_final_ones_are_not},
          {"backoff", test_backoff_grows_with_jitter_and_is_reset},
          {"hours alone", test_hours_without_a_syncer_never_end_the_learner},
          {"timeouts", test_silence_and_a_slow_greeting_are_timeouts},
          {"T1 heartbeat", test_heartbeat_when_nothing_else_was_sent},
          {"stop of all", test_done_when_every_shard_said_stop_after_last_updates},
          {"stop of shard 0", test_done_when_shard_0_said_stop_and_others_are_gone},
          {"failed", test_failed_ends_at_once}, {"leave", test_leave_sends_pushes_then_goodbye},
          {"evaluator", test_evaluator_reports_to_every_shard_and_sends_nothing_else},
          {"random events", test_random_events_keep_every_invariant},
          {"wrong configurations", test_wrong_configurations})
