/* The link core, rule by rule, without any I/O: each test plays the syncer by hand and looks at what the link says. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/unit.h"
#include "worker/link/link.h"

#define MS INT64_C(1000000)
#define SECOND (1000 * MS)
enum { FRAGMENTS = 4, TENSORS = 4 };

static struct wk_link *link_;
static int64_t now;
static struct dl_layout *layout;
static struct wk_act act;
static struct wk_step step_;
static struct dl_wire_message in;

static void check(void)
{
    const char *fault = wk_link_check(link_);
    if (fault != NULL) {
        fprintf(stderr, "%s\n", fault);
    }
    CU_ASSERT_PTR_NULL_FATAL(fault);
}

static void make_tensors(struct dl_tensor *tensors)
{
    for (uint32_t i = 0; i < TENSORS; i++) {
        tensors[i] = (struct dl_tensor){.rank = 2, .shape = {10 + i, 100}, .layer = i};
        snprintf(tensors[i].name, sizeof tensors[i].name, "t%u", i);
    }
}

static uint32_t batch;   /* Sequences in a step that begin_as asks leases for. */
static bool keep_missed; /* Of the links that begin_as makes. */

static void begin_as(uint32_t shards, int32_t learner, enum dl_role role)
{
    struct dl_tensor tensors[TENSORS];
    make_tensors(tensors);
    CU_ASSERT_EQUAL_FATAL(dl_layout_new(tensors, TENSORS, FRAGMENTS, DL_LAYOUT_BALANCED, &layout, NULL), DL_OK);
    struct wk_link_config config = {.role = role,
                                    .learner = learner,
                                    .nonce = 99,
                                    .uid = "pod-1",
                                    .job = "demo",
                                    .shards = shards,
                                    .tensors = tensors,
                                    .tensor_count = TENSORS,
                                    .batch = batch,
                                    .keep_missed = keep_missed};
    CU_ASSERT_EQUAL_FATAL(wk_link_new(&config, &link_, NULL), DL_OK);
    now = 1000 * SECOND;
}

static void begin(uint32_t shards)
{
    begin_as(shards, 5, DL_ROLE_LEARNER);
}

static void end(void)
{
    check();
    wk_link_free(link_);
    dl_layout_free(layout);
    layout = NULL;
}

static enum wk_act_type next_act(uint32_t shard)
{
    wk_link_next_act(link_, now, shard, &act);
    check();
    return act.type;
}

/* What the link sends next, but for TRACEs, which go before a PUSH, and METAs before a TRACE. */
static bool sends(uint32_t shard, enum dl_wire_type type)
{
    enum dl_wire_type but = type == DL_WIRE_TRACE ? DL_WIRE_META : DL_WIRE_TRACE;
    while (next_act(shard) == WK_ACT_SEND && act.message->type == but) {
    }
    return act.type == WK_ACT_SEND && act.message->type == type;
}

static void say(uint32_t shard)
{
    wk_link_on_message(link_, now, shard, &in);
    check();
}

static void connect(uint32_t shard)
{
    CU_ASSERT_EQUAL_FATAL(next_act(shard), WK_ACT_CONNECT);
    wk_link_on_connected(link_, now, shard);
    CU_ASSERT_TRUE_FATAL(sends(shard, DL_WIRE_HELLO));
}

static void make_welcome(uint32_t shard, uint32_t shards, uint64_t version)
{
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_WELCOME;
    in.as.welcome = (struct dl_wire_welcome){
        .learner = 5,
        .admission = 1,
        .epoch = 1,
        .shard = shard,
        .shards = shards,
        .fragments_total = FRAGMENTS,
        .layout = DL_LAYOUT_BALANCED,
        .layout_hash = layout->hash,
        .compression = DL_CODEC_INT8,
        .heartbeat_ms = 1000,
        .timeout_ms = 5000,
        .step = 7,
        .tokens = 70,
        .pull_within_steps = DL_UNBOUNDED,
        .update_within_steps = DL_UNBOUNDED,
    };
    for (uint32_t p = shard; p < FRAGMENTS; p += shards) {
        in.as.welcome.fragments[in.as.welcome.fragment_count++] =
            (struct dl_wire_fragment){.fragment = p, .version = version};
    }
}

static uint64_t next_transfer = 1;

static void announce(uint32_t shard, uint32_t p, uint64_t version, uint64_t round)
{
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_UPDATE;
    in.as.update = (struct dl_wire_update){
        .transfer = ++next_transfer,
        .fragment = p,
        .version = version,
        .round = round,
        .codec = DL_CODEC_NONE,
        .bytes = layout->fragments[p].padded_elements * 4,
        .content_hash = 77,
    };
    say(shard);
}

/* The whole of the update announced last arrives, in two chunks. */
static enum wk_place deliver(uint32_t shard, uint32_t p)
{
    uint64_t bytes = layout->fragments[p].padded_elements * 4, half = bytes / 2 / 1024 * 1024, hash = 0;
    struct wk_spot spot;
    enum wk_place place = wk_link_place(link_, now, shard, next_transfer, 0, (uint32_t)half, &spot);
    if (place != WK_PLACE_STORE) {
        return place;
    }
    CU_ASSERT_EQUAL(spot.fragment, p);
    CU_ASSERT_EQUAL(spot.total_bytes, bytes);
    CU_ASSERT_FALSE(wk_link_on_chunk(link_, now, shard, true, &hash));
    CU_ASSERT_EQUAL_FATAL(wk_link_place(link_, now, shard, next_transfer, half, (uint32_t)(bytes - half), &spot),
                          WK_PLACE_STORE);
    CU_ASSERT_EQUAL(spot.offset, half);
    CU_ASSERT_TRUE_FATAL(wk_link_on_chunk(link_, now, shard, true, &hash));
    CU_ASSERT_EQUAL(hash, 77);
    wk_link_on_update(link_, now, shard, true);
    check();
    return WK_PLACE_STORE;
}

static void update(uint32_t shard, uint32_t p, uint64_t version, uint64_t round)
{
    announce(shard, p, version, round);
    CU_ASSERT_EQUAL_FATAL(deliver(shard, p), WK_PLACE_STORE);
}

static enum wk_step_type next_step(void)
{
    wk_link_next_step(link_, now, &step_);
    check();
    return step_.type;
}

/* Does what the link says until it waits, goes or is done; counts what it was. */
static uint32_t applied, snapshots;

static enum wk_step_type boundary(void)
{
    applied = snapshots = 0;
    for (;;) {
        switch (next_step()) {
        case WK_STEP_PREPARE: wk_link_on_prepared(link_); break;
        case WK_STEP_APPLY:
            applied++;
            wk_link_on_applied(link_, step_.fragment);
            break;
        case WK_STEP_SNAPSHOT:
            snapshots++;
            wk_link_on_snapshot(link_, step_.fragment);
            break;
        case WK_STEP_FETCH:
        case WK_STEP_YIELD:
        case WK_STEP_WAIT:
        case WK_STEP_GO:
        case WK_STEP_DONE: return step_.type;
        }
    }
}

static enum wk_step_type train(void)
{
    now += 10 * MS;
    wk_link_on_step(link_, now, 100, 1.5f);
    return boundary();
}

static void pull_flags(uint32_t shard, uint32_t p, uint64_t version, uint64_t round, uint32_t flags)
{
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_PULL;
    in.as.pull = (struct dl_wire_pull){.round = round,
                                       .fragment = p,
                                       .version = version,
                                       .flags = flags,
                                       .pull_within_steps = DL_UNBOUNDED,
                                       .update_within_steps = DL_UNBOUNDED};
    say(shard);
}

static void pull(uint32_t shard, uint32_t p, uint64_t version, uint64_t round)
{
    pull_flags(shard, p, version, round, keep_missed ? DL_PULL_MISSED : 0);
}

/* Connected, WELCOME taken, version 1 of everything applied, META out. */
static void join(uint32_t shards)
{
    for (uint32_t s = 0; s < shards; s++) {
        connect(s);
        make_welcome(s, shards, 1);
        say(s);
    }
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        CU_ASSERT_FALSE(wk_link_is_joined(link_));
        update(p % shards, p, 1, 0);
        CU_ASSERT_EQUAL(boundary(), p + 1 < FRAGMENTS ? WK_STEP_WAIT : WK_STEP_GO);
    }
    CU_ASSERT_TRUE_FATAL(wk_link_is_joined(link_));
    for (uint32_t s = 0; s < shards; s++) {
        CU_ASSERT_TRUE(sends(s, DL_WIRE_META));
        CU_ASSERT_EQUAL(next_act(s), WK_ACT_NONE);
    }
}

/* Sends a whole push: PUSH and its chunks. */
static void expect_push(uint32_t shard, uint32_t p, uint64_t round, uint64_t base, uint32_t steps)
{
    CU_ASSERT_TRUE_FATAL(sends(shard, DL_WIRE_PUSH));
    const struct dl_wire_push push = act.message->as.push;
    CU_ASSERT_EQUAL(push.fragment, p);
    CU_ASSERT_EQUAL(push.round, round);
    CU_ASSERT_EQUAL(push.base_version, base);
    CU_ASSERT_EQUAL(push.steps, steps);
    CU_ASSERT_EQUAL(push.tokens, 100 * (uint64_t)steps);
    CU_ASSERT_EQUAL(push.bytes, dl_codec_bytes(DL_CODEC_INT8, layout->fragments[p].padded_elements));
    for (uint64_t offset = 0; offset < push.bytes; offset += act.chunk.bytes) {
        CU_ASSERT_EQUAL_FATAL(next_act(shard), WK_ACT_CHUNK);
        CU_ASSERT_EQUAL(act.chunk.transfer, push.transfer);
        CU_ASSERT_EQUAL(act.chunk.offset, offset);
        CU_ASSERT_FALSE(act.chunk.seed);
        wk_link_on_chunk_sent(link_, now, shard);
    }
}

static void expect_none(uint32_t shard, uint64_t round, enum dl_verdict reason)
{
    CU_ASSERT_TRUE_FATAL(sends(shard, DL_WIRE_PUSH_NONE));
    CU_ASSERT_EQUAL(act.message->as.push_none.round, round);
    CU_ASSERT_EQUAL(act.message->as.push_none.reason, reason);
}

static struct dl_wire_fragment state_of(uint32_t p)
{
    struct dl_wire_fragment out;
    wk_link_fragment(link_, p, &out);
    return out;
}

static enum wk_end outcome(const char *text)
{
    struct wk_outcome out;
    wk_link_outcome(link_, &out);
    CU_ASSERT_PTR_NOT_NULL(strstr(out.text, text));
    return out.end;
}

/* --- greeting
 * --------------------------------------------------------------------------------------------------------- */

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
    make_welcome(0, 1, 1);
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
    make_welcome(0, 1, 1);
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
        make_welcome(wrong == 0 ? 1 : 0, wrong == 0 ? 2 : 3, 1);
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
    make_welcome(0, 2, 1);
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
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_REFUSE;
    in.as.refuse.code = (uint16_t)code;
    snprintf(in.as.refuse.text, sizeof in.as.refuse.text, "because");
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

/* --- reconnecting
 * ----------------------------------------------------------------------------------------------------- */

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
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_HEARTBEAT;
    in.as.heartbeat = (struct dl_wire_heartbeat){1, 500, 9000};
    say(0);
    struct wk_link_view view;
    wk_link_view(link_, &view);
    CU_ASSERT_EQUAL(view.ensemble_step, 500);
    CU_ASSERT_EQUAL(view.tokens_all, 9000);
    end();
}

/* --- a boundary
 * ------------------------------------------------------------------------------------------------------- */

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
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_RESULT;
    in.as.result = (struct dl_wire_result){30, 0, DL_VERDICT_LATE};
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
    pull(0, 0, 1, 41);
    CU_ASSERT_EQUAL(train(), WK_STEP_YIELD);
    CU_ASSERT_EQUAL(snapshots, 0);
    wk_link_on_chunk_sent(link_, now, 0);
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
    make_welcome(0, 1, 1);
    say(0);
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    CU_ASSERT_EQUAL(next_act(0), WK_ACT_NONE); /* The push died with its connection. */
    pull(0, 0, 1, 51);
    train();
    CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
    expect_push(0, 0, 51, 1, 3);
    end();
}

/* --- updates
 * ---------------------------------------------------------------------------------------------------------- */

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
    make_welcome(0, 1, 1);
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
    in.type = DL_WIRE_UPDATE;
    in.as.update = (struct dl_wire_update){.transfer = 1000, .fragment = 0, .version = 2, .bytes = 17};
    say(0);
    expect_close("has 17 bytes");
    pull(0, FRAGMENTS, 1, 1);
    expect_close("not of this shard");
    make_welcome(0, 1, 1);
    say(0);
    expect_close("WELCOME twice");
    in.type = DL_WIRE_META;
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
    make_welcome(0, 1, version);
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

static void test_restart_while_a_forgotten_version_is_applied(void)
{
    begin(1);
    join(1);
    update(0, 0, 7, 8);
    now += MS;
    wk_link_on_step(link_, now, 100, 1.0f);
    CU_ASSERT_EQUAL_FATAL(next_step(), WK_STEP_APPLY);
    rejoin_with_versions(4);
    wk_link_on_applied(link_, 0);
    CU_ASSERT_EQUAL(state_of(0).version, 0);
    boundary();
    update(0, 0, 4, 5);
    train();
    CU_ASSERT_EQUAL(state_of(0).version, 4);
    end();
}

/* --- seeds
 * ------------------------------------------------------------------------------------------------------------ */

static void test_seed_is_answered_from_the_base_copy_at_any_time(void)
{
    begin(1);
    connect(0);
    make_welcome(0, 1, 0);
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

/* --- waiting
 * ---------------------------------------------------------------------------------------------------------- */

static void bounded_pull(uint32_t p, uint64_t version, uint64_t round, uint32_t pull_within, uint32_t update_within)
{
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_PULL;
    in.as.pull = (struct dl_wire_pull){.round = round,
                                       .fragment = p,
                                       .version = version,
                                       .pull_within_steps = pull_within,
                                       .update_within_steps = update_within,
                                       .wait_ms = 400};
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
    make_welcome(0, 1, 1);
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

/* --- rebase and alpha
 * ------------------------------------------------------------------------------------------------- */

static void join_rebasing(void)
{
    connect(0);
    make_welcome(0, 1, 1);
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

/* --- the end
 * ---------------------------------------------------------------------------------------------------------- */

static void stop(uint32_t shard, enum dl_stop_result result)
{
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_STOP;
    in.as.stop.result = (uint8_t)result;
    snprintf(in.as.stop.text, sizeof in.as.stop.text, "told");
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
        make_welcome(s, 2, 1);
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

/* --- any order of events
 * ---------------------------------------------------------------------------------------------- */

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
        memset(&in, 0, sizeof in);
        in.type = DL_WIRE_RESULT;
        in.as.result = (struct dl_wire_result){*round, p, (uint8_t)dl_rng_below(rng, DL_VERDICT_COUNT)};
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
                make_welcome(shard, 2, 0);
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

/* --- the tape
 * ------------------------------------------------------------------------------------------------------------ */

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
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_PULL;
    in.as.pull = (struct dl_wire_pull){.round = round,
                                       .fragment = p,
                                       .version = version,
                                       .pull_within_steps = DL_UNBOUNDED,
                                       .update_within_steps = DL_UNBOUNDED,
                                       .trace_acked = acked};
    say(p % 2);
}

/* J9: what a push depends on goes before it, to every shard, once; and again after a reconnect until it is durable. */
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
    make_welcome(0, 2, 1);
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
    struct dl_trace_entry pending[16];
    say_traced(0, 1, 3, 100);
    CU_ASSERT_EQUAL(wk_link_trace_pending(link_, pending, 16), FRAGMENTS + 3);
    pull(1, 1, 1, 1);
    boundary();
    CU_ASSERT_TRUE_FATAL(sends(1, DL_WIRE_TRACE));
    CU_ASSERT_EQUAL(trace->position, 1);
    CU_ASSERT_TRUE_FATAL(sends(1, DL_WIRE_PUSH));
    say_traced(1, 1, 4, FRAGMENTS + 2);
    CU_ASSERT(wk_link_trace_pending(link_, pending, 16) < FRAGMENTS + 3);
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

/* --- the job's data ---------------------------------------------------------------------------------------------- */

static void lease(uint64_t number, uint64_t first, uint32_t count, bool revoked)
{
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_LEASE;
    in.as.lease = (struct dl_wire_lease){.lease = number, .first = first, .count = count, .revoked = revoked};
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
        make_welcome(s, shards, 1);
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
    make_welcome(0, 1, 1);
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
    make_welcome(0, 1, 1);
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
        make_welcome(s, 2, 1);
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
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_RESULT;
    in.as.result = (struct dl_wire_result){.round = 11, .fragment = 2, .verdict = DL_VERDICT_LEASE_LOST};
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
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_LEASE;
    in.as.lease = (struct dl_wire_lease){.lease = 2, .count = 4};
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

/* --- pushes that missed their round
 * -------------------------------------------------------------------------------------- */

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
    memset(&in, 0, sizeof in);
    in.type = DL_WIRE_RESULT;
    in.as.result = (struct dl_wire_result){.round = round, .fragment = p, .verdict = what};
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
            make_welcome(0, 1, i == 0 ? 2 : 1); /* A syncer without version 2. */
            say(0);
            CU_ASSERT_TRUE(sends(0, DL_WIRE_META));
        } else if (i == 2) {
            memset(&in, 0, sizeof in);
            in.type = DL_WIRE_PULL; /* Warm-up: who was late is absent. */
            in.as.pull = (struct dl_wire_pull){
                .round = 11, .version = 2, .flags = DL_PULL_WARMUP, .pull_within_steps = 2, .wait_ms = 100};
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

UNIT_MAIN("link", {"hello", test_hello_says_who_and_what_is_held},
          {"layout mismatch", test_layout_mismatch_is_final_and_names_both},
          {"wrong shard", test_wrong_shard_or_count_is_final}, {"any id", test_any_id_asks_shard_0_first},
          {"refusals", test_temporary_refusal_is_retried_final_ones_are_not},
          {"backoff", test_backoff_grows_with_jitter_and_is_reset},
          {"hours alone", test_hours_without_a_syncer_never_end_the_learner},
          {"timeouts", test_silence_and_a_slow_greeting_are_timeouts},
          {"T1 heartbeat", test_heartbeat_when_nothing_else_was_sent},
          {"boundary", test_boundary_applies_then_meta_then_pulls},
          {"META coalesced", test_meta_is_coalesced_while_congested},
          {"T2 META between chunks", test_meta_does_not_starve_a_push},
          {"pull for older", test_pull_for_older_version_is_answered_with_none},
          {"pull for newer", test_pull_for_newer_version_waits_for_the_update},
          {"pull and update", test_pull_waits_while_a_newer_update_is_on_its_way},
          {"pull replaced", test_newer_pull_replaces_an_older_one},
          {"refused push", test_refused_push_stops_being_sent},
          {"bytes being read", test_bytes_being_read_are_not_overwritten},
          {"lost in a snapshot", test_connection_lost_during_a_snapshot},
          {"old updates", test_old_and_repeated_updates_are_skipped},
          {"two updates", test_complete_update_stays_while_a_newer_one_arrives},
          {"half an update", test_half_an_update_is_gone_with_its_connection},
          {"Q7 an update without its end", test_an_update_without_its_end_is_nothing},
          {"protocol errors", test_what_breaks_the_protocol_ends_the_connection},
          {"content hash", test_content_hash_that_does_not_match_is_fetched_again},
          {"older versions", test_restarted_syncer_with_older_versions_is_followed},
          {"forgotten version", test_restart_while_a_forgotten_version_is_applied},
          {"seed", test_seed_is_answered_from_the_base_copy_at_any_time},
          {"update within", test_update_within_waits_at_that_boundary},
          {"wait in vain", test_a_wait_in_vain_ends_and_is_not_repeated},
          {"pull within", test_pull_within_waits_for_the_shards_next_pull},
          {"unbounded", test_unbounded_never_waits_and_none_asks_for_no_wait},
          {"welcome's bound", test_welcome_bounds_the_way_to_the_first_pull},
          {"rebase", test_rebase_keeps_what_was_trained_since_the_snapshot},
          {"stop of all", test_done_when_every_shard_said_stop_after_last_updates},
          {"stop of shard 0", test_done_when_shard_0_said_stop_and_others_are_gone},
          {"failed", test_failed_ends_at_once}, {"leave", test_leave_sends_pushes_then_goodbye},
          {"evaluator", test_evaluator_reports_to_every_shard_and_sends_nothing_else},
          {"J9 trace before push", test_what_a_push_depends_on_goes_before_it},
          {"J9 a peer's entries", test_entries_of_a_peer_are_delivered_under_its_name},
          {"J9 full tape", test_a_full_tape_gives_up_the_oldest_and_says_so},
          {"random events", test_random_events_keep_every_invariant},
          {"wrong configurations", test_wrong_configurations},
          {"J8: data is taken in order", test_data_is_taken_in_order},
          {"J5: data without a lease", test_data_without_a_lease},
          {"the first lease", test_the_first_lease_is_not_waited_for_long},
          {"lost leases", test_lost_leases_drop_what_was_trained},
          {"leases nobody asked for", test_leases_that_nobody_asked_for},
          {"Q6: missed its round", test_work_that_missed_its_round_is_offered_in_the_next},
          {"Q6: pulls and what replaces", test_a_pull_is_answered_before_what_it_asks_for_is_replaced},
          {"Q6: a late push", test_a_late_push_is_sent_again},
          {"Q6: a fresh push is preferred", test_a_fresh_push_is_preferred_where_it_comes_in_time},
          {"Q6: a snapshot in the making", test_a_newer_round_takes_over_a_snapshot_in_the_making},
          {"Q6: what becomes of a push that waits", test_what_becomes_of_a_push_that_waits})
