/* The link core: updates, whole, in part, repeated, damaged, of a syncer that forgot; seeds; what is kept when one is applied. */
#include "tests/unit/link_rig.h"

/* --- updates -------------------------------------------------------------------------------------------------------- */

static void test_old_and_repeated_updates_are_skipped(void)
{
    begin(1);
    join(1);
    update(0, 0, 5, 8);
    train();
    announce(0, 0, 5, 8);
    CU_ASSERT_EQUAL(deliver(0, 0), WK_PLACE_SKIP);
    announce(0, 0, 4, 7);
    CU_ASSERT_EQUAL(deliver(0, 0), WK_PLACE_SKIP);
    train();
    CU_ASSERT_EQUAL(applied, 0);
    CU_ASSERT_EQUAL(state_of(0).version, 5);
    end();
}

static void test_complete_update_stays_while_a_newer_one_arrives(void)
{
    begin(1);
    join(1);
    update(0, 0, 2, 8);
    announce(0, 0, 3, 9);
    train();
    CU_ASSERT_EQUAL(applied, 1);
    CU_ASSERT_EQUAL(state_of(0).version, 2);
    deliver(0, 0);
    update(0, 0, 4, 10); /* And of two complete ones the newer counts. */
    train();
    CU_ASSERT_EQUAL(applied, 1);
    CU_ASSERT_EQUAL(state_of(0).version, 4);
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.last_round, 10);
    end();
}

static void test_half_an_update_is_gone_with_its_connection(void)
{
    begin(1);
    join(1);
    announce(0, 0, 2, 8);
    struct wk_spot spot;
    uint64_t hash;
    CU_ASSERT_EQUAL(wk_link_place(link_, now, 0, next_transfer, 0, 1024, &spot), WK_PLACE_STORE);
    CU_ASSERT_FALSE(wk_link_on_chunk(link_, now, 0, true, &hash));
    wk_link_on_disconnected(link_, now, 0, "cut");
    train();
    CU_ASSERT_EQUAL(applied, 0);
    now += SECOND;
    connect(0);
    CU_ASSERT_EQUAL(act.message->as.hello.fragments[0].version, 1);
    end();
}

/* Q7: one that has been sent but for its last chunk, because it is not durable, is no version: nothing of it shows, nothing is
 * taken for it, and it may be given up for an older one, or be sent again. */
static void test_an_update_without_its_end_is_nothing(void)
{
    begin(1);
    join(1);
    uint64_t bytes = layout->fragments[0].padded_elements * 4, hash;
    struct wk_spot spot;
    /* Given up for an older one, sent again whole, overtaken. */
    static const uint64_t half[] = {5, 5, 6}, whole[] = {4, 5, 7};
    for (uint32_t i = 0; i < DL_COUNT_OF(half); i++) {
        announce(0, 0, half[i], 9);
        CU_ASSERT_EQUAL(wk_link_place(link_, now, 0, next_transfer, 0, (uint32_t)bytes - 1024, &spot), WK_PLACE_STORE);
        CU_ASSERT_FALSE(wk_link_on_chunk(link_, now, 0, true, &hash));
        train();
        CU_ASSERT_EQUAL(applied, 0);
        CU_ASSERT_EQUAL(state_of(0).version, i == 0 ? 1 : whole[i - 1]);
        update(0, 0, whole[i], 10 + i);
        train();
        CU_ASSERT_EQUAL(applied, 1);
        CU_ASSERT_EQUAL(state_of(0).version, whole[i]);
    }
    end();
}

static void expect_close(const char *text)
{
    CU_ASSERT_EQUAL_FATAL(next_act(0), WK_ACT_CLOSE);
    if (strstr(act.text, text) == NULL) {
        fprintf(stderr, "\"%s\" is not in \"%s\"\n", text, act.text);
    }
    CU_ASSERT_PTR_NOT_NULL(strstr(act.text, text));
    now = wk_link_deadline(link_);
    connect(0);
    welcome(0, 1, 1);
    say(0);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
}

static void test_what_breaks_the_protocol_ends_the_connection(void)
{
    begin(1);
    join(1);
    struct wk_spot spot;
    uint64_t hash;
    announce(0, 0, 2, 8);
    CU_ASSERT_EQUAL(wk_link_place(link_, now, 0, next_transfer, 1024, 1024, &spot), WK_PLACE_BROKEN);
    expect_close("does not continue");
    announce(0, 0, 2, 8);
    CU_ASSERT_EQUAL(wk_link_place(link_, now, 0, next_transfer, 0, 1 << 20, &spot), WK_PLACE_BROKEN);
    expect_close("does not continue");
    announce(0, 0, 2, 8);
    CU_ASSERT_EQUAL(wk_link_place(link_, now, 0, next_transfer, 0, 1024, &spot), WK_PLACE_STORE);
    CU_ASSERT_FALSE(wk_link_on_chunk(link_, now, 0, false, &hash));
    expect_close("damaged");
    announce(0, 0, 2, 8);
    CU_ASSERT_EQUAL(wk_link_place(link_, now, 0, next_transfer, 0, DL_LEAF_BYTES - 1024, &spot), WK_PLACE_STORE);
    CU_ASSERT_FALSE(wk_link_on_chunk(link_, now, 0, true, &hash));
    CU_ASSERT_EQUAL(wk_link_place(link_, now, 0, next_transfer, DL_LEAF_BYTES - 1024, 1024, &spot), WK_PLACE_BROKEN);
    expect_close("not at a multiple of 16384");
    make_update(&in, 0, DL_CODEC_NONE, NULL, 17);
    in.as.update.version = 2;
    say(0);
    expect_close("has 17 bytes");
    pull(0, FRAGMENTS, 1, 1);
    expect_close("not of this shard");
    welcome(0, 1, 1);
    say(0);
    expect_close("WELCOME twice");
    make_message(&in, DL_WIRE_META);
    say(0);
    expect_close("not for learners");
    wk_link_on_disconnected(link_, now, 0, "cut");
    now = wk_link_deadline(link_);
    connect(0);
    pull(0, 0, 1, 1);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CLOSE);
    CU_ASSERT_PTR_NOT_NULL(strstr(act.text, "before WELCOME"));
    end();
}

static void test_content_hash_that_does_not_match_is_fetched_again(void)
{
    begin(1);
    join(1);
    announce(0, 0, 2, 8);
    uint32_t bytes = (uint32_t)layout->fragments[0].padded_elements * 4;
    struct wk_spot spot;
    uint64_t hash;
    CU_ASSERT_EQUAL(wk_link_place(link_, now, 0, next_transfer, 0, bytes, &spot), WK_PLACE_STORE);
    CU_ASSERT_TRUE(wk_link_on_chunk(link_, now, 0, true, &hash));
    wk_link_on_update(link_, now, 0, false);
    train();
    CU_ASSERT_EQUAL(applied, 0);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_CLOSE);
    now = wk_link_deadline(link_);
    connect(0);
    CU_ASSERT_EQUAL(act.message->as.hello.fragments[0].version, 1);
    end();
}

static void rejoin_with_versions(uint64_t version)
{
    wk_link_on_disconnected(link_, now, 0, "restart");
    now = wk_link_deadline(link_);
    connect(0);
    welcome(0, 1, version);
    in.as.welcome.epoch = 2;
    say(0);
}

static void test_restarted_syncer_with_older_versions_is_followed(void)
{
    begin(1);
    join(1);
    update(0, 0, 7, 8);
    train();
    update(0, 1, 6, 9); /* Complete, not applied: of a version that the syncer forgets. */
    rejoin_with_versions(4);
    CU_ASSERT_EQUAL(state_of(0).version, 0);
    CU_ASSERT_EQUAL(state_of(2).version, 1);
    train();
    CU_ASSERT_EQUAL(applied, 0);
    update(0, 0, 4, 5);
    train();
    CU_ASSERT_EQUAL(applied, 1);
    CU_ASSERT_EQUAL(state_of(0).version, 4);
    CU_ASSERT_EQUAL(state_of(0).steps, 0);
    end();
}

/* The trainer is at version 7 of fragment 0 when its syncer comes back with `version` of all, which may be 0: none. */
static void begin_and_restart_during_an_update(uint64_t version)
{
    begin(1);
    join(1);
    update(0, 0, 7, 8);
    now += MS;
    wk_link_on_step(link_, now, 100, 1.0f);
    CU_ASSERT_EQUAL_FATAL(next_step(), WK_STEP_APPLY);
    rejoin_with_versions(version);
}

static void test_restart_while_a_forgotten_version_is_applied(void)
{
    begin_and_restart_during_an_update(4);
    wk_link_on_applied(link_, 0);
    CU_ASSERT_EQUAL(state_of(0).version, 0);
    boundary();
    update(0, 0, 4, 5);
    train();
    CU_ASSERT_EQUAL(state_of(0).version, 4);
    end();
}

/* --- seeds ---------------------------------------------------------------------------------------------------------- */

static void test_seed_is_answered_from_the_base_copy_at_any_time(void)
{
    begin(1);
    connect(0);
    welcome(0, 1, 0);
    say(0);
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        pull_flags(0, p, 0, p + 1, DL_PULL_SEED);
    }
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE); /* Not before the base copy is there. */
    CU_ASSERT_EQUAL(boundary(), WK_STEP_WAIT);
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_PUSH));
        CU_ASSERT_EQUAL(act.message->as.push.codec, DL_CODEC_NONE);
        CU_ASSERT_EQUAL(act.message->as.push.base_version, 0);
        CU_ASSERT_EQUAL(act.message->as.push.fragment, p);
        CU_ASSERT_EQUAL(act.message->as.push.bytes, layout->fragments[p].padded_elements * 4);
        CU_ASSERT_EQUAL_FATAL(next_act(0), WK_ACT_CHUNK);
        CU_ASSERT_TRUE(act.chunk.seed);
        if (p == 0) {
            /* Its update is there already (someone else seeded): the base copy must not change under the reader. */
            update(0, 0, 1, 1);
            CU_ASSERT_EQUAL(boundary(), WK_STEP_YIELD);
        }
        wk_link_on_chunk_sent(link_, now, 0);
        CU_ASSERT_EQUAL(boundary(), WK_STEP_WAIT);
    }
    end();
}

/* A syncer that lost its volume asks while the trainer is at an update of before: the base copy is read when it is whole again. */
static void test_seed_waits_for_the_update_that_is_being_applied(void)
{
    begin_and_restart_during_an_update(0);
    pull_flags(0, 0, 0, 1, DL_PULL_SEED);
    CU_ASSERT_NOT_EQUAL(next_act(0), WK_ACT_CHUNK);
    CU_ASSERT_FALSE(sends(0, DL_WIRE_PUSH));
    wk_link_on_applied(link_, 0);
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_PUSH));
    CU_ASSERT_EQUAL(act.message->as.push.round, 1);
    CU_ASSERT_EQUAL_FATAL(next_act(0), WK_ACT_CHUNK);
    CU_ASSERT_TRUE(act.chunk.seed);
    wk_link_on_chunk_sent(link_, now, 0);
    end();
}

/* --- rebase and alpha ----------------------------------------------------------------------------------------------- */

static void join_rebasing(void)
{
    connect(0);
    welcome(0, 1, 1);
    in.as.welcome.apply = DL_APPLY_REBASE;
    in.as.welcome.apply_alpha = 0.25f;
    say(0);
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        update(0, p, 1, 0);
    }
    CU_ASSERT_EQUAL(next_step(), WK_STEP_PREPARE);
    wk_link_on_prepared(link_);
    CU_ASSERT_EQUAL(next_step(), WK_STEP_APPLY);
    CU_ASSERT_EQUAL(step_.alpha, 0.0f); /* The first state is taken as it is. */
    CU_ASSERT_FALSE(step_.rebase);
    wk_link_on_applied(link_, step_.fragment);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
}

static void test_rebase_keeps_what_was_trained_since_the_snapshot(void)
{
    begin(1);
    join_rebasing();
    train();
    train();
    pull(0, 0, 1, 5);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 5, 1, 3);
    train();
    train();
    update(0, 0, 2, 5);
    wk_link_on_step(link_, now, 100, 1.0f);
    CU_ASSERT_EQUAL(next_step(), WK_STEP_APPLY);
    CU_ASSERT_TRUE(step_.rebase);
    CU_ASSERT_EQUAL(step_.push_codec, DL_CODEC_INT8);
    CU_ASSERT_EQUAL(step_.alpha, 0.25f);
    wk_link_on_applied(link_, 0);
    CU_ASSERT_EQUAL(state_of(0).steps, 3); /* Not merged yet: they stay counted. */
    CU_ASSERT_EQUAL(state_of(0).tokens, 300);
    boundary();
    update(0, 0, 3, 9); /* A round that this learner was not in: overwritten. */
    wk_link_on_step(link_, now, 100, 1.0f);
    CU_ASSERT_EQUAL(next_step(), WK_STEP_APPLY);
    CU_ASSERT_FALSE(step_.rebase);
    wk_link_on_applied(link_, 0);
    CU_ASSERT_EQUAL(state_of(0).steps, 0);
    boundary();
    end();
}

UNIT_MAIN("link: updates", {"old updates", test_old_and_repeated_updates_are_skipped},
          {"two updates", test_complete_update_stays_while_a_newer_one_arrives},
          {"half an update", test_half_an_update_is_gone_with_its_connection},
          {"Q7 an update without its end", test_an_update_without_its_end_is_nothing},
          {"protocol errors", test_what_breaks_the_protocol_ends_the_connection},
          {"content hash", test_content_hash_that_does_not_match_is_fetched_again},
          {"older versions", test_restarted_syncer_with_older_versions_is_followed},
          {"forgotten version", test_restart_while_a_forgotten_version_is_applied},
          {"seed", test_seed_is_answered_from_the_base_copy_at_any_time},
          {"seed during an update", test_seed_waits_for_the_update_that_is_being_applied},
          {"rebase", test_rebase_keeps_what_was_trained_since_the_snapshot})
