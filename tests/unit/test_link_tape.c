/* The link core: the tape of what a learner did goes before the push that depends on it. */
#include "tests/unit/link_rig.h"

/* --- the tape ------------------------------------------------------------------------------------------------------- */

static void expect_entry(uint32_t i, uint64_t seq, uint64_t step, const char *kind, uint32_t fragment, uint64_t a)
{
    const struct dl_trace_entry *entry = &act.message->as.trace.entries[i];
    CU_ASSERT_FATAL(i < act.message->as.trace.count);
    CU_ASSERT_EQUAL(entry->seq, seq);
    CU_ASSERT_EQUAL(entry->step, step);
    CU_ASSERT_STRING_EQUAL(entry->kind, kind);
    CU_ASSERT_EQUAL(entry->fragment, fragment);
    CU_ASSERT_EQUAL(entry->a, a);
}

static void say_traced(uint32_t p, uint64_t version, uint64_t round, uint64_t acked)
{
    make_pull(&in, p, version, round);
    in.as.pull.trace_acked = acked;
    say(p % 2);
}

/* J9: what a push depends on goes before it, to every shard, once; and again after a reconnect until it is durable. */
/* That some shard may lack. */
static uint32_t pending_entries(void)
{
    struct dl_wire_trace *part = calloc(1, sizeof *part);
    uint32_t count = 0;
    for (uint64_t position = 0; wk_link_trace_next(link_, &position, part);) {
        count += part->count;
    }
    free(part);
    return count;
}

static void test_what_a_push_depends_on_goes_before_it(void)
{
    begin(2);
    join(2);
    wk_link_trace(link_, "start", DL_TRACE_NO_FRAGMENT, 5, 70, 7, "here");
    train();
    pull(0, 0, 1, 1);
    CU_ASSERT_EQUAL(boundary(), WK_STEP_GO);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_TRACE));
    const struct dl_wire_trace *trace = &act.message->as.trace;
    CU_ASSERT_EQUAL(trace->position, 1);
    CU_ASSERT_EQUAL(trace->nonce, 99);
    CU_ASSERT_STRING_EQUAL(trace->uid, "pod-1");
    CU_ASSERT_EQUAL(trace->count, FRAGMENTS + 2);
    for (uint32_t p = 0; p < FRAGMENTS; p++) { /* Those of the other shard's fragments, too. */
        expect_entry(p, p + 1, 0, "apply", p, 1);
    }
    expect_entry(FRAGMENTS, FRAGMENTS + 1, 0, "start", DL_TRACE_NO_FRAGMENT, 5);
    CU_ASSERT_STRING_EQUAL(trace->entries[FRAGMENTS].text, "here");
    expect_entry(FRAGMENTS + 1, FRAGMENTS + 2, 1, "snapshot", 0, 1);
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_SEND);
    CU_ASSERT_EQUAL(act.message->type, DL_WIRE_PUSH);
    CU_ASSERT_EQUAL(act.message->as.push.trace, FRAGMENTS + 2);
    wk_link_on_disconnected(link_, now, 0, "cable");
    now += 11 * SECOND;
    connect(0);
    welcome(0, 2, 1);
    in.as.welcome.trace_acked = 3;
    say(0);
    pull(0, 0, 1, 2);
    boundary();
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_TRACE));
    CU_ASSERT_EQUAL(trace->position, 4);
    CU_ASSERT_EQUAL(trace->count, FRAGMENTS);
    expect_entry(0, 4, 0, "apply", 3, 1);
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_PUSH));
    /* The other shard lacks all of it, whatever this one has. */
    say_traced(0, 1, 3, 100);
    CU_ASSERT_EQUAL(pending_entries(), FRAGMENTS + 3);
    pull(1, 1, 1, 1);
    boundary();
    CU_ASSERT_TRUE_FATAL(sends(1, DL_WIRE_TRACE));
    CU_ASSERT_EQUAL(trace->position, 1);
    CU_ASSERT_TRUE_FATAL(sends(1, DL_WIRE_PUSH));
    say_traced(1, 1, 4, FRAGMENTS + 2);
    CU_ASSERT(pending_entries() < FRAGMENTS + 3);
    end();
}

static void test_entries_of_a_peer_are_delivered_under_its_name(void)
{
    begin(1);
    join(1);
    struct dl_trace_entry theirs[2] = {{.seq = 41, .step = 9, .fragment = 2, .a = 3, .kind = "apply"},
                                       {.seq = 42, .step = 9, .fragment = 3, .a = 3, .kind = "apply"}};
    CU_ASSERT_TRUE(wk_link_trace_adopt(link_, "pod-2", 7, theirs, 2));
    wk_link_trace(link_, "state", DL_TRACE_NO_FRAGMENT, 7, 9, 0, "pod-2");
    train();
    pull(0, 0, 1, 1);
    boundary();
    const struct dl_wire_trace *trace = &act.message->as.trace;
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_TRACE));
    CU_ASSERT_EQUAL(trace->count, FRAGMENTS);
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_TRACE));
    CU_ASSERT_STRING_EQUAL(trace->uid, "pod-2");
    CU_ASSERT_EQUAL(trace->nonce, 7);
    CU_ASSERT_EQUAL(trace->position, FRAGMENTS + 1);
    CU_ASSERT_EQUAL(trace->count, 2);
    expect_entry(1, 42, 9, "apply", 3, 3);
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_TRACE));
    CU_ASSERT_STRING_EQUAL(trace->uid, "pod-1");
    CU_ASSERT_EQUAL(trace->position, FRAGMENTS + 3);
    expect_entry(0, FRAGMENTS + 1, 0, "state", DL_TRACE_NO_FRAGMENT, 7);
    for (uint32_t i = 2; i < WK_TRACE_OWNERS_MAX; i++) {
        CU_ASSERT_TRUE(wk_link_trace_adopt(link_, "pod-3", i, theirs, 1));
    }
    CU_ASSERT_FALSE(wk_link_trace_adopt(link_, "pod-3", 99, theirs, 1));
    end();
}

static void test_a_full_tape_gives_up_the_oldest_and_says_so(void)
{
    begin(1);
    join(1);
    for (uint32_t i = 0; i < WK_TRACE_MAX + 10; i++) {
        wk_link_trace(link_, "note", DL_TRACE_NO_FRAGMENT, i, 0, 0, NULL);
    }
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.trace_lost, FRAGMENTS + 10);
    CU_ASSERT_EQUAL(view.trace_made, WK_TRACE_MAX + FRAGMENTS + 10);
    bool said = false;
    int level;
    char text[DL_ERR_TEXT_MAX];
    while (wk_link_next_note(link_, &level, text)) {
        said = said || (level == 2 && strstr(text, "cannot be replayed") != NULL);
    }
    CU_ASSERT_TRUE(said);
    train();
    pull(0, 0, 1, 1);
    boundary();
    CU_ASSERT_TRUE_FATAL(sends(0, DL_WIRE_TRACE));
    CU_ASSERT_EQUAL(act.message->as.trace.position, FRAGMENTS + 12); /* The snapshot took one more place. */
    CU_ASSERT_EQUAL(act.message->as.trace.count, DL_WIRE_TRACE_MAX);
    end();
}

UNIT_MAIN("link: tape", {"J9 trace before push", test_what_a_push_depends_on_goes_before_it},
          {"J9 a peer's entries", test_entries_of_a_peer_are_delivered_under_its_name},
          {"J9 full tape", test_a_full_tape_gives_up_the_oldest_and_says_so})
