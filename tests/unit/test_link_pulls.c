/* The link core: what happens at a boundary, how pulls are answered, and when a learner waits. */
#include "tests/unit/link_rig.h"

/* --- a boundary ----------------------------------------------------------------------------------------------------- */

static void test_boundary_applies_then_meta_then_pulls(void)
{
    begin(1);
    join(1);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    update(0, 2, 2, 11);
    pull(0, 2, 2, 12); /* Its fragment has just been overwritten when it is looked at. */
    pull(0, 1, 1, 13);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    CU_ASSERT_EQUAL(applied, 1);
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_EQUAL(state_of(2).version, 2);
    CU_ASSERT_EQUAL(state_of(2).steps, 0);
    CU_ASSERT_EQUAL(state_of(2).tokens, 0);
    CU_ASSERT_EQUAL(state_of(2).applied_step, 2);
    CU_ASSERT_EQUAL(state_of(1).steps, 2);
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_META));
    const struct dl_wire_meta *meta = &act.message->as.meta;
    CU_ASSERT_EQUAL(meta->step, 2);
    CU_ASSERT_EQUAL(meta->tokens, 200);
    CU_ASSERT_EQUAL(meta->loss, 1.5f);
    CU_ASSERT_EQUAL(meta->step_ns, 10 * MS);
    CU_ASSERT_EQUAL(meta->busy_ns, 20 * MS);
    CU_ASSERT_EQUAL(meta->fragments[2].version, 2);
    expect_none(0, 12, DL_VERDICT_NOTHING);
    expect_push(0, 1, 13, 1, 2);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    CU_ASSERT_EQUAL(state_of(1).steps, 2); /* Counts on until an update is applied. */
    end();
}

static void test_meta_is_coalesced_while_congested(void)
{
    begin(1);
    join(1);
    for (int i = 0; i < 50; i++) {
        train(); /* The connection is not asked meanwhile. */
    }
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_EQUAL(act.message->as.meta.step, 50);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    end();
}

/* One META between two chunks at most, however fast the trainer is. */
static void test_meta_does_not_starve_a_push(void)
{
    begin(1);
    join(1);
    train();
    pull(0, 0, 1, 5);
    train();
    int metas = 0, others = 0;
    for (int i = 0; i < 6; i++) {
        enum wk_act_type type = next_act(0);
        metas += type == WK_ACT_SEND && act.message->type == DL_WIRE_META;
        others += type == WK_ACT_CHUNK || (type == WK_ACT_SEND && act.message->type == DL_WIRE_PUSH);
        if (type == WK_ACT_CHUNK) {
            wk_link_on_chunk_sent(link_, now, 0);
        }
        train();
    }
    CU_ASSERT_EQUAL(others, 2);
    CU_ASSERT(metas >= 3);
    end();
}

static void test_pull_for_older_version_is_answered_with_none(void)
{
    begin(1);
    join(1);
    update(0, 0, 2, 8);
    train();
    train();
    pull(0, 0, 1, 9);
    train();
    CU_ASSERT_EQUAL(snapshots, 0);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_none(0, 9, DL_VERDICT_LATE);
    end();
}

static void test_pull_for_newer_version_waits_for_the_update(void)
{
    begin(1);
    join(1);
    train();
    pull(0, 0, 2, 9);
    train();
    CU_ASSERT_EQUAL(snapshots, 0);
    announce(0, 0, 2, 8);
    train();
    CU_ASSERT_EQUAL(snapshots, 0);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE); /* Not answered at all so far. */
    deliver(0, 0);
    train();
    CU_ASSERT_EQUAL(applied, 1);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_none(0, 9, DL_VERDICT_NOTHING);
    end();
}

static void test_pull_waits_while_a_newer_update_is_on_its_way(void)
{
    begin(1);
    join(1);
    train();
    announce(0, 0, 2, 8);
    pull(0, 0, 1, 8);
    train();
    CU_ASSERT_EQUAL(snapshots, 0);
    deliver(0, 0);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_none(0, 8, DL_VERDICT_LATE);
    end();
}

static void test_newer_pull_replaces_an_older_one(void)
{
    begin(1);
    join(1);
    train();
    pull(0, 0, 1, 20);
    pull(0, 0, 1, 21);
    train();
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_TRUE(sends(0, DL_WIRE_PUSH));
    CU_ASSERT_EQUAL(act.message->as.push.round, 21);
    pull(0, 0, 1, 22); /* Now in the middle of sending: the rest is of no use any more. */
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 22, 1, 3);
    pull(0, 0, 1, 22);
    end();
}

static void test_refused_push_stops_being_sent(void)
{
    begin(1);
    join(1);
    train();
    pull(0, 0, 1, 30);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_TRUE(sends(0, DL_WIRE_PUSH));
    make_result(&in, 0, 30, DL_VERDICT_LATE);
    say(0);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.verdicts[DL_VERDICT_LATE], 1);
    CU_ASSERT_EQUAL(view.pushes_sent, 0);
    CU_ASSERT_EQUAL(state_of(0).steps, 2); /* Lost nothing: the next pull covers it. */
    end();
}

/* A chunk's bytes are being read when its fragment is asked for again: the trainer must not write them yet. */
static void test_bytes_being_read_are_not_overwritten(void)
{
    begin(1);
    join(1);
    train();
    pull(0, 0, 1, 40);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_TRUE(sends(0, DL_WIRE_PUSH));
    CU_ASSERT_EQUAL_FATAL(next_act(0), WK_ACT_CHUNK);
    CU_ASSERT_FALSE(wk_link_wants_memory(link_, 0));
    pull(0, 0, 1, 41);
    CU_ASSERT_EQUAL(train(), WK_STEP_YIELD);
    CU_ASSERT_EQUAL(snapshots, 0);
    CU_ASSERT_TRUE(wk_link_wants_memory(link_, 0)); /* Else the boundary would wait for the socket. */
    wk_link_on_chunk_sent(link_, now, 0);
    CU_ASSERT_FALSE(wk_link_wants_memory(link_, 0));
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    CU_ASSERT_EQUAL(snapshots, 1);
    end();
}

static void test_connection_lost_during_a_snapshot(void)
{
    begin(1);
    join(1);
    train();
    pull(0, 0, 1, 50);
    now += 10 * MS;
    wk_link_on_step(link_, now, 100, 1.0f);
    CU_ASSERT_EQUAL_FATAL(next_step(), WK_STEP_SNAPSHOT);
    wk_link_on_disconnected(link_, now, 0, "cut");
    wk_link_on_snapshot(link_, 0);
    CU_ASSERT_EQUAL(next_step(), WK_STEP_GO);
    now += SECOND;
    connect(0);
    welcome(0, 1, 1);
    say(0);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE); /* The push died with its connection. */
    pull(0, 0, 1, 51);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 51, 1, 3);
    end();
}

/* --- waiting -------------------------------------------------------------------------------------------------------- */

static void bounded_pull(uint32_t p, uint64_t version, uint64_t round, uint32_t pull_within, uint32_t update_within)
{
    make_pull(&in, p, version, round);
    in.as.pull.pull_within_steps = pull_within;
    in.as.pull.update_within_steps = update_within;
    in.as.pull.wait_ms = 400;
    say(0);
}

static void test_update_within_waits_at_that_boundary(void)
{
    begin(1);
    join(1);
    train();
    bounded_pull(0, 1, 5, DL_UNBOUNDED, 2);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO); /* Answered here. */
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    CU_ASSERT_EQUAL(train(), WK_STEP_WAIT);
    CU_ASSERT_EQUAL(step_.until_ns, now + 400 * MS);
    now += 100 * MS;
    pull(0, 1, 1, 6); /* While waiting, pulls are answered and updates applied at this same boundary. */
    CU_ASSERT_EQUAL(boundary(), WK_STEP_WAIT);
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_EQUAL(step_.until_ns, now + 300 * MS);
    update(0, 0, 2, 4); /* A version made by an earlier round is not the one awaited. */
    CU_ASSERT_EQUAL(boundary(), WK_STEP_WAIT);
    CU_ASSERT_EQUAL(applied, 1);
    update(0, 0, 3, 5);
    now += 50 * MS;
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    CU_ASSERT_EQUAL(applied, 1);
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.waited_ns, 150 * MS);
    train();
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.busy_ns, 50 * MS); /* Waiting is not computing. */
    end();
}

static void test_a_wait_in_vain_ends_and_is_not_repeated(void)
{
    begin(1);
    join(1);
    train();
    bounded_pull(0, 1, 5, DL_UNBOUNDED, 0);
    CU_ASSERT_EQUAL(train(), WK_STEP_WAIT);
    now = step_.until_ns - 1;
    CU_ASSERT_EQUAL(boundary(), WK_STEP_WAIT);
    now++;
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    bounded_pull(1, 1, 6, DL_UNBOUNDED, 0); /* A new round is a new wait. */
    CU_ASSERT_EQUAL(train(), WK_STEP_WAIT);
    end();
}

static void test_pull_within_waits_for_the_shards_next_pull(void)
{
    begin(1);
    join(1);
    train();
    bounded_pull(0, 1, 5, 2, DL_UNBOUNDED);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    CU_ASSERT_EQUAL(train(), WK_STEP_WAIT);
    bounded_pull(1, 1, 6, 2, DL_UNBOUNDED);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    CU_ASSERT_EQUAL(train(), WK_STEP_WAIT);
    wk_link_on_disconnected(link_, now, 0, "cut"); /* A lost connection ends the wait. */
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    end();
}

static void test_unbounded_never_waits_and_none_asks_for_no_wait(void)
{
    begin(1);
    join(1);
    bounded_pull(0, 1, 5, 0, 0); /* Nothing trained yet: PUSH_NONE. */
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    train();
    pull(0, 0, 1, 6);
    for (int i = 0; i < 100; i++) {
        CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    }
    end();
}

static void test_welcome_bounds_the_way_to_the_first_pull(void)
{
    begin(1);
    join(1);
    wk_link_on_disconnected(link_, now, 0, "cut");
    now += SECOND;
    connect(0);
    welcome(0, 1, 1);
    in.as.welcome.pull_within_steps = 3;
    in.as.welcome.wait_ms = UINT32_MAX;
    say(0);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    CU_ASSERT_EQUAL(train(), WK_STEP_GO);
    CU_ASSERT_EQUAL(train(), WK_STEP_WAIT);
    CU_ASSERT_EQUAL(step_.until_ns, now + WK_WAIT_MS_MAX * MS); /* Bounded whatever a syncer says. */
    pull(0, 0, 1, 2);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    end();
}

UNIT_MAIN("link: pulls", {"boundary", test_boundary_applies_then_meta_then_pulls},
          {"META coalesced", test_meta_is_coalesced_while_congested},
          {"T2 META between chunks", test_meta_does_not_starve_a_push},
          {"pull for older", test_pull_for_older_version_is_answered_with_none},
          {"pull for newer", test_pull_for_newer_version_waits_for_the_update},
          {"pull and update", test_pull_waits_while_a_newer_update_is_on_its_way},
          {"pull replaced", test_newer_pull_replaces_an_older_one},
          {"refused push", test_refused_push_stops_being_sent},
          {"bytes being read", test_bytes_being_read_are_not_overwritten},
          {"lost in a snapshot", test_connection_lost_during_a_snapshot},
          {"update within", test_update_within_waits_at_that_boundary},
          {"wait in vain", test_a_wait_in_vain_ends_and_is_not_repeated},
          {"pull within", test_pull_within_waits_for_the_shards_next_pull},
          {"unbounded", test_unbounded_never_waits_and_none_asks_for_no_wait},
          {"welcome's bound", test_welcome_bounds_the_way_to_the_first_pull})
