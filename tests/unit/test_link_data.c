/* The link core: the job's data in leases. */
#include "tests/unit/link_rig.h"

/* --- the job's data ---------------------------------------------------------------------------------------------- */

static void lease(uint64_t number, uint64_t first, uint32_t count, bool revoked)
{
    make_lease(&in, number, first, count);
    in.as.lease.revoked = revoked;
    say(0);
}

static void expect_request(uint64_t last, uint8_t want)
{
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_LEASE_REQUEST));
    CU_ASSERT_EQUAL(act.message->as.lease_request.last, last);
    CU_ASSERT_EQUAL(act.message->as.lease_request.want, want);
    CU_ASSERT_EQUAL(act.message->as.lease_request.batch, batch);
}

static struct wk_range take(uint64_t count)
{
    struct wk_range range;
    wk_link_data(link_, count, &range);
    check();
    return range;
}

/* Whatever goes before it. */
static void expect_push_of(uint64_t number, uint64_t cursor)
{
    while (next_act(0) == WK_ACT_SEND && act.message->type != DL_WIRE_PUSH) {
    }
    CU_ASSERT_EQUAL_FATAL(act.type, WK_ACT_SEND);
    CU_ASSERT_EQUAL(act.message->as.push.lease, number);
    CU_ASSERT_EQUAL(act.message->as.push.cursor, cursor);
}

/* Connected, joined, META out, and the first lease (1: positions 1000 to 1015) here. */
static void join_for_data(uint32_t shards)
{
    batch = 4;
    begin(shards);
    for (uint32_t s = 0; s < shards; s++) {
        connect(s);
        welcome(s, shards, 1);
        say(s);
    }
    expect_request(0, 1);
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        update(p % shards, p, 1, 0);
        CU_ASSERT_EQUAL(boundary(), WK_STEP_WAIT);
    }
    CU_ASSERT_EQUAL(next_step(), WK_STEP_WAIT); /* Joined, and waits for its first lease. */
    CU_ASSERT_EQUAL(step_.until_ns, now + WK_LEASE_WAIT_MS * MS);
    lease(1, 1000, 16, false);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    for (uint32_t s = 0; s < shards; s++) {
        CU_ASSERT_TRUE(sends(s, DL_WIRE_META));
        CU_ASSERT_EQUAL(next_act(s), WK_ACT_NONE);
    }
}

static void end_data(void)
{
    end();
    batch = 0;
}

/* J8: in order, across leases, asked for in time; a push says how far its snapshot has come, and no further. */
static void test_data_is_taken_in_order(void)
{
    join_for_data(1);
    struct wk_range range = take(4);
    CU_ASSERT(range.lease == 1 && range.first == 1000 && range.count == 4);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE);
    train();
    range = take(4);
    CU_ASSERT_EQUAL(range.first, 1004);
    pull(0, 2, 1, 8);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO); /* Not yet trained on: the last boundary counts. */
    expect_request(1, 1);                    /* Half is used. */
    expect_push_of(1, 4);
    train();
    lease(2, 5000, 16, false);
    lease(2, 5000, 16, false); /* A repeat. */
    take(6);
    range = take(10);
    CU_ASSERT(range.first == 1014 && range.count == 2); /* Fewer, where a lease ends ... */
    range = take(8);
    CU_ASSERT(range.lease == 2 && range.first == 5000 && range.count == 8); /* ... and the rest from the next. */
    train();
    struct wk_data_view view;
    wk_link_data_view(link_, &view);
    CU_ASSERT(view.leases == 2 && view.sequences == 24 && view.unleased == 0);
    end_data();
}

static void test_data_without_a_lease(void)
{
    join_for_data(1);
    take(16);
    train();
    wk_link_on_disconnected(link_, now, 0, "cable");
    struct wk_range first = take(4), second = take(4);
    CU_ASSERT(first.lease == 0 && first.first >= WK_UNLEASED_FIRST && first.count == 4);
    CU_ASSERT(second.lease == 0 && second.first == first.first + 4);
    train();
    now += 11 * SECOND;
    connect(0);
    welcome(0, 1, 1);
    say(0);
    expect_request(1, 1);
    pull(0, 0, 1, 8);
    boundary();
    expect_push_of(1, 16); /* All that was leased. */
    lease(9, 40, 8, false);
    struct wk_range range = take(4);
    CU_ASSERT(range.lease == 9 && range.first == 40);
    struct wk_data_view view;
    wk_link_data_view(link_, &view);
    CU_ASSERT_EQUAL(view.unleased, 8);
    end_data();
}

static void test_the_first_lease_is_not_waited_for_long(void)
{
    batch = 4;
    begin(1);
    connect(0);
    welcome(0, 1, 1);
    say(0);
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        update(0, p, 1, 0);
    }
    CU_ASSERT_EQUAL(boundary(), WK_STEP_WAIT);
    now += WK_LEASE_WAIT_MS * MS;
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    CU_ASSERT_EQUAL(take(4).lease, 0);
    /* Nor is an answer: it is asked for again. */
    expect_request(0, 1);
    while (next_act(0) == WK_ACT_SEND) {
    }
    now += WK_LEASE_RETRY_MS * MS;
    CU_ASSERT(wk_link_deadline(link_) <= now);
    expect_request(0, 1);
    end_data();
}

/* Gone for too long: its data is others' by now. What it trained and has not pushed is dropped, everywhere. */
static void test_lost_leases_drop_what_was_trained(void)
{
    join_for_data(2);
    take(8);
    train();
    pull(1, 1, 1, 8);
    boundary();
    CU_ASSERT_EQUAL(snapshots, 1);
    lease(1, 0, 0, true);
    for (uint32_t s = 0; s < 2; s++) {
        CU_ASSERT_EQUAL(next_act(s), WK_ACT_CLOSE);
    }
    CU_ASSERT_EQUAL(take(4).lease, 0); /* Also what is left of the lease is not its any more. */
    train();
    now += SECOND;
    for (uint32_t s = 0; s < 2; s++) {
        connect(s);
        const struct dl_wire_hello *hello = &act.message->as.hello;
        CU_ASSERT_EQUAL(hello->fragments[0].version, 0);
        CU_ASSERT_EQUAL(hello->fragments[1].version, 0);
        welcome(s, 2, 1);
        say(s);
    }
    expect_request(0, 1);
    lease(7, 300, 16, false);
    CU_ASSERT_EQUAL(take(4).lease, 0); /* What is trained before the global state is here is lost with it. */
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        announce(p % 2, p, 1, 0);
        CU_ASSERT_EQUAL_FATAL(deliver(p % 2, p), WK_PLACE_STORE);
        CU_ASSERT_EQUAL_FATAL(next_step(), WK_STEP_APPLY);
        CU_ASSERT_EQUAL(step_.alpha, 0.0f);
        CU_ASSERT_FALSE(step_.rebase);
        wk_link_on_applied(link_, p);
        CU_ASSERT_EQUAL(state_of(p).steps, 0);
    }
    boundary();
    CU_ASSERT_EQUAL(take(4).lease, 7);
    train();
    pull(0, 2, 1, 11);
    boundary();
    expect_push_of(7, 4);
    /* A verdict says the same as a message. */
    make_result(&in, 2, 11, DL_VERDICT_LEASE_LOST);
    say(0);
    CU_ASSERT_EQUAL(next_act(1), WK_ACT_CLOSE);
    struct wk_data_view view;
    wk_link_data_view(link_, &view);
    CU_ASSERT_EQUAL(view.revoked, 2);
    end_data();
}

static void test_leases_that_nobody_asked_for(void)
{
    begin(1);
    join(1);
    lease(1, 0, 4, false);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CLOSE);
    end();
    join_for_data(2);
    make_lease(&in, 2, 0, 4);
    say(1);
    CU_ASSERT_EQUAL(next_act(1), WK_ACT_CLOSE);
    /* More than there is room for: those that were not taken are told again later. */
    for (uint64_t n = 2; n < 2 + 2 * WK_LEASES_MAX; n++) {
        lease(n, 100 * n, 4, false);
    }
    struct wk_data_view view;
    wk_link_data_view(link_, &view);
    CU_ASSERT_EQUAL(view.leases, WK_LEASES_MAX);
    end_data();
}

UNIT_MAIN("link: data", {"J8: data is taken in order", test_data_is_taken_in_order},
          {"J5: data without a lease", test_data_without_a_lease},
          {"the first lease", test_the_first_lease_is_not_waited_for_long},
          {"lost leases", test_lost_leases_drop_what_was_trained},
          {"leases nobody asked for", test_leases_that_nobody_asked_for})
