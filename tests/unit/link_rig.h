/* link_rig: the link core without any I/O, its syncer played by hand: a test says what arrives, lets a boundary come, and looks
 * at what the link says.
 *
 * Everything is said to one link at a time, which lives from begin to end; every call checks its invariants. `now` moves as a
 * test says; a trainer's step (train) takes 10 ms. Names are short, for the tests are read as a conversation:
 *   the syncer  welcome and say, announce and deliver (or update), pull
 *   the link    sends, expect_push, expect_none: what it sends next; state_of, outcome: what it holds
 *   the trainer train, boundary: does what the link says; `applied` and `snapshots` count what it was. */
#ifndef DL_TESTS_LINK_RIG_H
#define DL_TESTS_LINK_RIG_H

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "tests/unit/unit.h"
#include "tests/unit/wire_make.h"
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

static inline void check(void)
{
    const char *fault = wk_link_check(link_);
    if (fault != NULL) {
        fprintf(stderr, "%s\n", fault);
    }
    CU_ASSERT_PTR_NULL_FATAL(fault);
}

static inline void make_tensors(struct dl_tensor *tensors)
{
    for (uint32_t i = 0; i < TENSORS; i++) {
        tensors[i] = (struct dl_tensor){.rank = 2, .shape = {100 + i, 100}, .layer = i};
        snprintf(tensors[i].name, sizeof tensors[i].name, "t%u", i);
    }
}

static uint32_t batch;   /* Sequences in a step that begin_as asks leases for. */
static bool keep_missed; /* Of the links that begin_as makes. */

static inline void begin_as(uint32_t shards, int32_t learner, enum dl_role role)
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

static inline void begin(uint32_t shards)
{
    begin_as(shards, 5, DL_ROLE_LEARNER);
}

static inline void end(void)
{
    check();
    wk_link_free(link_);
    dl_layout_free(layout);
    layout = NULL;
}

static inline enum wk_act_type next_act(uint32_t shard)
{
    wk_link_next_act(link_, now, shard, &act);
    check();
    return act.type;
}

/* What the link sends next, but for TRACEs, which go before a PUSH, and METAs before a TRACE. */
static inline bool sends(uint32_t shard, enum dl_wire_type type)
{
    enum dl_wire_type but = type == DL_WIRE_TRACE ? DL_WIRE_META : DL_WIRE_TRACE;
    while (next_act(shard) == WK_ACT_SEND && act.message->type == but) {
    }
    return act.type == WK_ACT_SEND && act.message->type == type;
}

static inline void say(uint32_t shard)
{
    wk_link_on_message(link_, now, shard, &in);
    check();
}

static inline void connect(uint32_t shard)
{
    CU_ASSERT_EQUAL_FATAL(next_act(shard), WK_ACT_CONNECT);
    wk_link_on_connected(link_, now, shard);
    CU_ASSERT_TRUE_FATAL(sends(shard, DL_WIRE_HELLO));
}

/* What the syncer's WELCOME says; a test may change it before it says it. */
static inline void welcome(uint32_t shard, uint32_t shards, uint64_t version)
{
    uint64_t versions[FRAGMENTS];
    for (uint32_t p = 0; p < FRAGMENTS; p++) {
        versions[p] = version;
    }
    make_welcome(&in, layout, shard, shards, versions);
    in.as.welcome.learner = 5;
    in.as.welcome.compression = DL_CODEC_INT8;
    in.as.welcome.timeout_ms = 5000;
    in.as.welcome.step = 7;
    in.as.welcome.tokens = 70;
}

static uint64_t next_transfer = 1;

static inline void announce(uint32_t shard, uint32_t p, uint64_t version, uint64_t round)
{
    make_update(&in, p, DL_CODEC_NONE, NULL, layout->fragments[p].padded_elements * 4);
    in.as.update.transfer = ++next_transfer;
    in.as.update.version = version;
    in.as.update.round = round;
    in.as.update.content_hash = 77;
    say(shard);
}

/* The whole of the update announced last arrives, in two chunks. */
static inline enum wk_place deliver(uint32_t shard, uint32_t p)
{
    uint64_t bytes = layout->fragments[p].padded_elements * 4, half = bytes / 2 / DL_LEAF_BYTES * DL_LEAF_BYTES,
             hash = 0;
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

static inline void update(uint32_t shard, uint32_t p, uint64_t version, uint64_t round)
{
    announce(shard, p, version, round);
    CU_ASSERT_EQUAL_FATAL(deliver(shard, p), WK_PLACE_STORE);
}

static inline enum wk_step_type next_step(void)
{
    wk_link_next_step(link_, now, &step_);
    check();
    return step_.type;
}

/* Does what the link says until it waits, goes or is done; counts what it was. */
static uint32_t applied, snapshots;

static inline enum wk_step_type boundary(void)
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

static inline enum wk_step_type train(void)
{
    now += 10 * MS;
    wk_link_on_step(link_, now, 100, 1.5f);
    return boundary();
}

static inline void pull_flags(uint32_t shard, uint32_t p, uint64_t version, uint64_t round, uint32_t flags)
{
    make_pull(&in, p, version, round);
    in.as.pull.flags = flags;
    say(shard);
}

static inline void pull(uint32_t shard, uint32_t p, uint64_t version, uint64_t round)
{
    pull_flags(shard, p, version, round, keep_missed ? DL_PULL_MISSED : 0);
}

/* Connected, WELCOME taken, version 1 of everything applied, META out. */
static inline void join(uint32_t shards)
{
    for (uint32_t s = 0; s < shards; s++) {
        connect(s);
        welcome(s, shards, 1);
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
static inline void expect_push(uint32_t shard, uint32_t p, uint64_t round, uint64_t base, uint32_t steps)
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

static inline void expect_none(uint32_t shard, uint64_t round, enum dl_verdict reason)
{
    CU_ASSERT_TRUE_FATAL(sends(shard, DL_WIRE_PUSH_NONE));
    CU_ASSERT_EQUAL(act.message->as.push_none.round, round);
    CU_ASSERT_EQUAL(act.message->as.push_none.reason, reason);
}

static inline struct dl_wire_fragment state_of(uint32_t p)
{
    struct dl_wire_fragment out;
    wk_link_fragment(link_, p, &out);
    return out;
}

static inline enum wk_end outcome(const char *text)
{
    struct wk_outcome out;
    wk_link_outcome(link_, &out);
    CU_ASSERT_PTR_NOT_NULL(strstr(out.text, text));
    return out.end;
}

#endif
