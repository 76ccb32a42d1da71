/* The link core: pushes that missed their round. */
#include "tests/unit/link_rig.h"

/* --- pushes that missed their round --------------------------------------------------------------------------------- */

static void join_keeping(void)
{
    keep_missed = true;
    begin(1);
    join(1);
    pull(0, 0, 1, 10); /* In a step: it is answered at the boundary. */
    train();
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
}

static void end_keeping(void)
{
    end();
    keep_missed = false;
}

static void verdict(uint32_t p, uint64_t round, enum dl_verdict what)
{
    make_result(&in, p, round, what);
    say(0);
}

/* Q6: what an update would replace, and no push has carried, is kept, and offered as soon as the next round asks. */
static void test_work_that_missed_its_round_is_offered_in_the_next(void)
{
    join_keeping();
    expect_push(0, 0, 10, 1, 1);
    verdict(0, 10, DL_VERDICT_ACCEPTED);
    update(0, 0, 2, 10);
    train();
    CU_ASSERT_EQUAL(snapshots, 0); /* A push has carried what this update replaced, but for the overlap. */
    CU_ASSERT_EQUAL(applied, 1);
    train();
    update(0, 0, 3, 11); /* A round without this learner: it was never asked, */
    train();
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_EQUAL(applied, 1);
    CU_ASSERT_EQUAL(state_of(0).version, 3);
    CU_ASSERT_EQUAL(state_of(0).steps, 0);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE); /* and nothing is sent unasked. */
    pull(0, 0, 3, 12);
    expect_push(0, 0, 12, 2, 2); /* In the middle of a step. */
    verdict(0, 12, DL_VERDICT_ACCEPTED);
    train();
    CU_ASSERT_EQUAL(snapshots, 0);
    pull(0, 0, 3, 13);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 13, 3, 2);
    end_keeping();
}

/* Asked for a round that is over by its boundary, or for one whose update has yet to come. */
static void test_a_pull_is_answered_before_what_it_asks_for_is_replaced(void)
{
    join_keeping();
    expect_push(0, 0, 10, 1, 1);
    verdict(0, 10, DL_VERDICT_ACCEPTED);
    update(0, 0, 2, 10);
    train();
    pull(0, 0, 2, 11);
    update(0, 0, 3, 11);
    train();
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE); /* No push into a round that is known to be over, and no PUSH_NONE. */
    pull(0, 0, 3, 12);
    expect_push(0, 0, 12, 2, 1);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    update(0, 0, 4, 12);
    pull(0, 0, 4, 13); /* Open: what was trained on version 3 goes into it, then it is replaced. */
    train();
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_EQUAL(applied, 1);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 13, 3, 2);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    pull(0, 0, 5, 14); /* Its update is on its way. */
    train();
    CU_ASSERT_EQUAL(snapshots, 1);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 14, 4, 2);
    end_keeping();
}

/* A push that is late, sent in full or in the middle of a chunk, goes out whole in the next round. */
static void test_a_late_push_is_sent_again(void)
{
    join_keeping();
    expect_push(0, 0, 10, 1, 1);
    verdict(0, 10, DL_VERDICT_LATE);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    pull(0, 0, 2, 11);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_PUSH));
    CU_ASSERT_EQUAL_FATAL(next_act(0), WK_ACT_CHUNK);
    verdict(0, 11, DL_VERDICT_LATE);
    update(0, 0, 3, 11);
    pull(0, 0, 3, 12);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE); /* The chunk's bytes are still being read. */
    CU_ASSERT_TRUE(wk_link_wants_memory(link_, 0));
    wk_link_on_chunk_sent(link_, now, 0);
    expect_push(0, 0, 12, 1, 1);
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.verdicts[DL_VERDICT_LATE], 2);
    verdict(0, 12, DL_VERDICT_STALE_BASE); /* Too old: that is final. */
    pull(0, 0, 4, 13);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    end_keeping();
}

/* A fresh push is wanted: what missed its round gives way to it. */
static void test_a_fresh_push_is_preferred_where_it_comes_in_time(void)
{
    join_keeping();
    expect_push(0, 0, 10, 1, 1);
    verdict(0, 10, DL_VERDICT_LATE);
    update(0, 0, 2, 10);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    pull_flags(0, 0, 2, 11, 0);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 11, 2, 1);
    end_keeping();
}

static void test_a_newer_round_takes_over_a_snapshot_in_the_making(void)
{
    join_keeping();
    expect_push(0, 0, 10, 1, 1);
    verdict(0, 10, DL_VERDICT_ACCEPTED);
    update(0, 0, 2, 10);
    train();
    update(0, 0, 3, 11);
    now += 10 * MS;
    wk_link_on_step(link_, now, 100, 1.0f);
    CU_ASSERT_EQUAL_FATAL(next_step(), WK_STEP_SNAPSHOT);
    pull(0, 0, 3, 12);
    wk_link_on_snapshot(link_, 0);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    CU_ASSERT_EQUAL(applied, 1);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 12, 2, 1);
    end_keeping();
}

/* It waits through a lost connection, but not for a state that the syncer no longer has, nor when its data is others'. */
static void test_what_becomes_of_a_push_that_waits(void)
{
    for (int i = 0; i < 4; i++) {
        join_keeping();
        expect_push(0, 0, 10, 1, 1);
        verdict(0, 10, DL_VERDICT_LATE);
        bool lives = i == 0;
        if (i < 2) {
            update(0, 0, 2, 10);
            boundary();
            wk_link_on_disconnected(link_, now, 0, "cut");
            now += SECOND;
            connect(0);
            welcome(0, 1, i == 0 ? 2 : 1); /* A syncer without version 2. */
            say(0);
            CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
        } else if (i == 2) {
            make_pull(&in, 0, 2, 11); /* Warm-up: who was late is absent. */
            in.as.pull.flags = DL_PULL_WARMUP;
            in.as.pull.pull_within_steps = 2;
            in.as.pull.update_within_steps = 0;
            in.as.pull.wait_ms = 100;
            say(0);
        } else {
            wk_link_leave(link_, now, false, "done"); /* It holds nobody up. */
            CU_ASSERT_TRUE(sends(0, DL_WIRE_GOODBYE));
            CU_ASSERT_TRUE(wk_link_has_left(link_));
            end_keeping();
            continue;
        }
        pull(0, 0, 3, 12);
        if (lives) {
            expect_push(0, 0, 12, 1, 1);
        } else {
            CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
        }
        end_keeping();
    }
}

UNIT_MAIN("link: missed", {"Q6: missed its round", test_work_that_missed_its_round_is_offered_in_the_next},
          {"Q6: pulls and what replaces", test_a_pull_is_answered_before_what_it_asks_for_is_replaced},
          {"Q6: a late push", test_a_late_push_is_sent_again},
          {"Q6: a fresh push is preferred", test_a_fresh_push_is_preferred_where_it_comes_in_time},
          {"Q6: a snapshot in the making", test_a_newer_round_takes_over_a_snapshot_in_the_making},
          {"Q6: what becomes of a push that waits", test_what_becomes_of_a_push_that_waits})
