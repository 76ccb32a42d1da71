/* Wire messages: round trips, and everything that a broken or hostile peer could send. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/content.h"
#include "common/hash.h"
#include "common/layout.h"
#include "common/mem.h"
#include "common/rng.h"
#include "common/wire.h"
#include "common/wire_table.h"
#include "tests/unit/unit.h"

#define COUNTER_MAX (UINT64_C(1) << 62)
#define BUFFER_BYTES (DL_WIRE_HEADER_BYTES + DL_WIRE_HELLO_PAYLOAD_MAX)

static uint8_t buffer[BUFFER_BYTES], second[BUFFER_BYTES];
static struct dl_wire_message sent, got;
static uint8_t tensor_bytes[100];

static void fill_text(char *out, size_t capacity, bool full, const char *text)
{
    memset(out, 0, capacity);
    if (full) {
        memset(out, 'x', capacity - 1);
    } else {
        memcpy(out, text, strlen(text));
    }
}

/* `high`: the largest values that are legal; else the smallest. */
static uint32_t fill_fragments(struct dl_wire_fragment *fragments, bool high)
{
    uint32_t count = high ? DL_SPEC_FRAGMENTS_MAX : 0;
    for (uint32_t i = 0; i < count; i++) {
        fragments[i] = (struct dl_wire_fragment){i, COUNTER_MAX - i, COUNTER_MAX, UINT32_MAX, COUNTER_MAX - 2 * i};
    }
    return count;
}

static void fill_hello(struct dl_wire_hello *hello, bool high, uint64_t counter)
{
    hello->role = high;
    hello->learner = high ? DL_SPEC_LEARNERS_MAX - 1 : -1;
    hello->nonce = high ? UINT64_MAX : 0;
    fill_text(hello->uid, sizeof hello->uid, high, "u");
    fill_text(hello->job, sizeof hello->job, high, "j");
    fill_text(hello->trainer, sizeof hello->trainer, high, "");
    hello->shard = high ? DL_SPEC_SHARDS_MAX - 1 : 0;
    hello->step = hello->tokens = counter;
    hello->recover = high;
    fill_text(hello->serve, sizeof hello->serve, high, "");
    hello->fragment_count = fill_fragments(hello->fragments, high);
    hello->tensors = tensor_bytes;
    hello->tensors_bytes = high ? sizeof tensor_bytes : 0;
}

static void fill_welcome(struct dl_wire_welcome *welcome, bool high, uint64_t counter)
{
    uint32_t u32 = high ? UINT32_MAX : 0;
    welcome->learner = high ? DL_SPEC_LEARNERS_MAX - 1 : 0;
    welcome->admission = welcome->step = welcome->tokens = welcome->token_budget = counter;
    welcome->epoch = welcome->layout_hash = high ? UINT64_MAX : 0;
    welcome->shard = high ? DL_SPEC_SHARDS_MAX - 1 : 0;
    welcome->shards = high ? DL_SPEC_SHARDS_MAX : 1;
    welcome->fragments_total = high ? DL_SPEC_FRAGMENTS_MAX : 1;
    welcome->layout = high ? DL_LAYOUT_TENSOR : 0;
    welcome->compression = high ? DL_CODEC_INT4 : 0;
    welcome->broadcast_compression = high ? DL_CODEC_BF16 : 0;
    welcome->apply = high ? DL_APPLY_REBASE : 0;
    welcome->apply_alpha = high ? 1.0f : 0.0f;
    welcome->heartbeat_ms = high ? 24 * 3600 * 1000 : 1;
    welcome->timeout_ms = welcome->heartbeat_ms;
    welcome->learners = high ? DL_SPEC_LEARNERS_MAX : 0;
    welcome->pull_within_steps = welcome->update_within_steps = welcome->wait_ms = u32;
    welcome->trace_acked = counter;
    welcome->fragment_count = fill_fragments(welcome->fragments, high);
}

static void fill_trace(struct dl_wire_trace *trace, bool high)
{
    trace->position = high ? COUNTER_MAX : 1;
    trace->nonce = high ? UINT64_MAX : 0;
    fill_text(trace->uid, sizeof trace->uid, high, "u");
    trace->count = high ? DL_WIRE_TRACE_MAX : 0;
    for (uint32_t i = 0; i < trace->count; i++) {
        struct dl_trace_entry *entry = &trace->entries[i];
        entry->seq = COUNTER_MAX - DL_WIRE_TRACE_MAX + i;
        entry->step = COUNTER_MAX;
        entry->a = entry->b = entry->c = UINT64_MAX;
        entry->fragment = i % 2 == 0 ? DL_TRACE_NO_FRAGMENT : i;
        fill_text(entry->kind, sizeof entry->kind, high, "k");
        fill_text(entry->text, sizeof entry->text, i % 3 != 0, "");
    }
}

static void fill_transfers(enum dl_wire_type type, bool high, uint64_t counter)
{
    uint32_t fragment = high ? DL_SPEC_FRAGMENTS_MAX - 1 : 0, u32 = high ? UINT32_MAX : 0;
    uint64_t u64 = high ? UINT64_MAX : 0, bytes = high ? DL_TENSOR_ELEMENTS_MAX * 4 : 1;
    if (type == DL_WIRE_PULL) {
        sent.as.pull = (struct dl_wire_pull){counter, fragment, counter, high ? 7 : 0, u32, u32, u32, counter};
    } else if (type == DL_WIRE_PUSH) {
        sent.as.push =
            (struct dl_wire_push){u64,   counter, fragment, counter, counter, u32, counter, high ? DL_CODEC_INT4 : 0,
                                  bytes, counter, counter,  counter};
    } else if (type == DL_WIRE_PUSH_NONE) {
        sent.as.push_none = (struct dl_wire_push_none){counter, fragment, high ? DL_VERDICT_COUNT - 1 : 0};
    } else if (type == DL_WIRE_RESULT) {
        sent.as.result = (struct dl_wire_result){counter, fragment, high ? DL_VERDICT_COUNT - 1 : 0};
    } else {
        sent.as.update = (struct dl_wire_update){u64,   fragment, high ? COUNTER_MAX : 1,         counter, high,
                                                 bytes, u64,      high ? DL_SPEC_LEARNERS_MAX : 0};
    }
}

static void fill_peers(struct dl_wire_peers *peers, bool high)
{
    peers->count = high ? DL_WIRE_PEERS_MAX : 0;
    for (uint32_t i = 0; i < peers->count; i++) {
        struct dl_wire_peer *peer = &peers->peers[i];
        *peer = (struct dl_wire_peer){.learner = DL_SPEC_LEARNERS_MAX - 1, .nonce = i, .step_ms = UINT32_MAX};
        fill_text(peer->uid, sizeof peer->uid, true, "");
        fill_text(peer->serve, sizeof peer->serve, true, "");
    }
}

static void fill(enum dl_wire_type type, bool high)
{
    uint64_t counter = high ? COUNTER_MAX : 0;
    memset(&sent, 0, sizeof sent);
    sent.type = type;
    switch (type) {
    case DL_WIRE_HELLO: fill_hello(&sent.as.hello, high, counter); break;
    case DL_WIRE_WELCOME: fill_welcome(&sent.as.welcome, high, counter); break;
    case DL_WIRE_REFUSE:
        sent.as.refuse.code = high ? DL_REFUSE_MALFORMED : DL_REFUSE_VERSION;
        fill_text(sent.as.refuse.text, DL_WIRE_TEXT_MAX, high, "");
        break;
    case DL_WIRE_META:
        sent.as.meta = (struct dl_wire_meta){.step = counter,
                                             .tokens = counter,
                                             .loss = high ? NAN : -1.5f,
                                             .step_ns = counter,
                                             .busy_ns = counter,
                                             .waited_ns = counter};
        sent.as.meta.fragment_count = fill_fragments(sent.as.meta.fragments, high);
        break;
    case DL_WIRE_PULL:
    case DL_WIRE_PUSH:
    case DL_WIRE_PUSH_NONE:
    case DL_WIRE_RESULT:
    case DL_WIRE_UPDATE: fill_transfers(type, high, counter); break;
    case DL_WIRE_CHUNK: CU_FAIL_FATAL("a chunk is no control message"); break;
    case DL_WIRE_EVALUATION:
        sent.as.evaluation = (struct dl_wire_evaluation){counter, counter, high ? INFINITY : 0.25,
                                                         high ? UINT32_MAX : 0, high ? UINT64_MAX : 0};
        break;
    case DL_WIRE_HEARTBEAT:
        sent.as.heartbeat = (struct dl_wire_heartbeat){high ? UINT64_MAX : 0, counter, counter};
        break;
    case DL_WIRE_GOODBYE:
        sent.as.goodbye.preempted = high;
        fill_text(sent.as.goodbye.text, DL_WIRE_TEXT_MAX, high, "node is drained");
        break;
    case DL_WIRE_STOP:
        sent.as.stop.result = high ? DL_STOP_FAILED : 0;
        fill_text(sent.as.stop.text, DL_WIRE_TEXT_MAX, high, "");
        break;
    case DL_WIRE_TRACE: fill_trace(&sent.as.trace, high); break;
    case DL_WIRE_LEASE_REQUEST:
        sent.as.lease_request = (struct dl_wire_lease_request){counter, high ? DL_WIRE_BATCH_MAX : 1, high};
        break;
    case DL_WIRE_LEASE:
        sent.as.lease = (struct dl_wire_lease){high ? counter : 1, counter, high ? UINT32_MAX : 0, high};
        break;
    case DL_WIRE_PEERS: fill_peers(&sent.as.peers, high); break;
    case DL_WIRE_HELD:
        sent.as.held = (struct dl_wire_held){high ? DL_SPEC_FRAGMENTS_MAX - 1 : 0, counter, high ? UINT64_MAX : 0};
        break;
    case DL_WIRE_RECOVERED:
        sent.as.recovered = (struct dl_wire_recovered){.learner = high ? DL_SPEC_LEARNERS_MAX - 1 : 0,
                                                       .nonce = high ? UINT64_MAX : 0,
                                                       .step = counter,
                                                       .bytes = counter,
                                                       .ns = counter};
        fill_text(sent.as.recovered.uid, DL_WIRE_UID_MAX, high, "u");
        break;
    case DL_WIRE_MARKER: sent.as.marker = (struct dl_wire_marker){high ? UINT64_MAX : 1, counter, counter}; break;
    }
}

#define FOR_EACH_CONTROL_TYPE(type)                                                                                    \
    for (enum dl_wire_type type = DL_WIRE_HELLO; type <= DL_WIRE_RECOVERED; type++)                                    \
        if (type != DL_WIRE_CHUNK && dl_wire_format_of(type) != NULL)

/* What a receiver does with bytes that came as one message. */
static enum dl_rc receive(const uint8_t *bytes, size_t size, struct dl_wire_message *out)
{
    struct dl_wire_header header;
    if (size < DL_WIRE_HEADER_BYTES) {
        return DL_EPROTO;
    }
    enum dl_rc rc = dl_wire_header_decode(bytes, &header, NULL);
    if (rc == DL_OK) {
        rc = dl_wire_verify(bytes, bytes + DL_WIRE_HEADER_BYTES, size - DL_WIRE_HEADER_BYTES, NULL);
    }
    if (rc == DL_OK) {
        rc = dl_wire_decode(header.type, bytes + DL_WIRE_HEADER_BYTES, size - DL_WIRE_HEADER_BYTES, out, NULL);
    }
    return rc;
}

static size_t encode_sent(void)
{
    size_t used = 0;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL_FATAL(dl_wire_encode(&sent, buffer, sizeof buffer, &used, &err), DL_OK);
    return used;
}

static void test_round_trip_of_every_type_at_its_extremes(void)
{
    for (size_t i = 0; i < sizeof tensor_bytes; i++) {
        tensor_bytes[i] = (uint8_t)i;
    }
    FOR_EACH_CONTROL_TYPE(type)
    {
        for (int high = 0; high < 2; high++) {
            fill(type, high != 0);
            size_t used = encode_sent();
            memset(&got, 0, sizeof got);
            CU_ASSERT_EQUAL_FATAL(receive(buffer, used, &got), DL_OK);
            if (type == DL_WIRE_HELLO) {
                CU_ASSERT_EQUAL(memcmp(got.as.hello.tensors, tensor_bytes, got.as.hello.tensors_bytes), 0);
                CU_ASSERT_PTR_EQUAL(got.as.hello.tensors + got.as.hello.tensors_bytes, buffer + used);
                got.as.hello.tensors = tensor_bytes;
            }
            /* NaN's bits are kept as well: both were zeroed, so padding agrees. */
            CU_ASSERT_EQUAL(memcmp(&got, &sent, sizeof sent), 0);
            size_t again = 0;
            CU_ASSERT_EQUAL(dl_wire_encode(&got, second, sizeof second, &again, NULL), DL_OK);
            CU_ASSERT_EQUAL_FATAL(again, used);
            CU_ASSERT_EQUAL(memcmp(buffer, second, used), 0);
        }
    }
}

static void test_layout_of_bytes_is_fixed(void)
{
    fill(DL_WIRE_HEARTBEAT, false);
    sent.as.heartbeat = (struct dl_wire_heartbeat){0x0102030405060708, 2, 3};
    CU_ASSERT_EQUAL(encode_sent(), 48);
    static const uint8_t head[16] = {'D', 'L', 'C', '1', DL_WIRE_VERSION, 12, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0};
    static const uint8_t payload[24] = {8, 7, 6, 5, 4, 3, 2, 1, 2, 0, 0, 0, 0, 0, 0, 0, 3};
    CU_ASSERT_EQUAL(memcmp(buffer, head, 16), 0);
    CU_ASSERT_EQUAL(memcmp(buffer + 24, payload, 24), 0);
    uint64_t checksum = dl_hash64(payload, 24, dl_hash64(head, 16, 0));
    for (int i = 0; i < 8; i++) {
        CU_ASSERT_EQUAL(buffer[16 + i], (uint8_t)(checksum >> (8 * i)));
    }
}

/* Truncated input is copied to memory of exactly its size, so that the address sanitizer sees any read past it. */
static void test_truncation_at_every_length_is_refused(void)
{
    FOR_EACH_CONTROL_TYPE(type)
    {
        for (int high = 0; high < 2; high++) {
            fill(type, high != 0);
            size_t payload = encode_sent() - DL_WIRE_HEADER_BYTES;
            size_t stride = payload > 2000 ? 37 : 1;
            for (size_t size = 0; size < payload; size += stride) {
                uint8_t *copy = malloc(size + 1);
                memcpy(copy, buffer + DL_WIRE_HEADER_BYTES, size);
                CU_ASSERT_EQUAL_FATAL(dl_wire_decode(type, copy, size, &got, NULL), DL_EPROTO);
                CU_ASSERT_EQUAL_FATAL(dl_wire_verify(buffer, copy, size, NULL), DL_ECORRUPT);
                free(copy);
            }
            CU_ASSERT_EQUAL(dl_wire_decode(type, buffer + DL_WIRE_HEADER_BYTES, payload + 1, &got, NULL), DL_EPROTO);
        }
    }
}

static void test_every_flipped_byte_is_refused(void)
{
    FOR_EACH_CONTROL_TYPE(type)
    {
        for (int high = 0; high < 2; high++) {
            fill(type, high != 0);
            size_t used = encode_sent();
            size_t stride = used > 2000 ? 13 : 1;
            for (size_t at = 0; at < used; at += at < 64 ? 1 : stride) {
                static const uint8_t flips[] = {0x01, 0x80, 0xff};
                for (size_t f = 0; f < DL_COUNT_OF(flips); f++) {
                    buffer[at] ^= flips[f];
                    CU_ASSERT_NOT_EQUAL_FATAL(receive(buffer, used, &got), DL_OK);
                    buffer[at] ^= flips[f];
                }
            }
            CU_ASSERT_EQUAL(receive(buffer, used, &got), DL_OK);
        }
    }
}

/* Without the checksum's protection, random damage must be refused or decode to something that encodes again: every
 * field that gets through is in its range. */
static void test_decoded_fields_are_always_in_range(void)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 11, dl_rng_stream("wire", 0, 0));
    unsigned refused = 0, taken = 0;
    FOR_EACH_CONTROL_TYPE(type)
    {
        for (int round = 0; round < 600; round++) {
            fill(type, round % 7 == 0);
            size_t payload = encode_sent() - DL_WIRE_HEADER_BYTES;
            uint8_t *copy = malloc(payload);
            memcpy(copy, buffer + DL_WIRE_HEADER_BYTES, payload);
            for (int flips = 0; flips < 3; flips++) {
                copy[dl_rng_below(&rng, payload)] = (uint8_t)dl_rng_u32(&rng);
            }
            if (dl_wire_decode(type, copy, payload, &got, NULL) == DL_OK) {
                size_t used = 0;
                CU_ASSERT_EQUAL_FATAL(dl_wire_encode(&got, second, sizeof second, &used, NULL), DL_OK);
                CU_ASSERT_EQUAL_FATAL(used, payload + DL_WIRE_HEADER_BYTES);
                CU_ASSERT_EQUAL_FATAL(memcmp(second + DL_WIRE_HEADER_BYTES, copy, payload), 0);
                taken++;
            } else {
                refused++;
            }
            free(copy);
        }
    }
    CU_ASSERT(refused > 100);
    CU_ASSERT(taken > 100);
}

static void expect_header(enum dl_rc rc)
{
    struct dl_wire_header header;
    CU_ASSERT_EQUAL(dl_wire_header_decode(buffer, &header, NULL), rc);
}

static void test_header_refuses_oversize_and_nonsense(void)
{
    fill(DL_WIRE_META, false);
    encode_sent();
    expect_header(DL_OK);
    buffer[10] = 1; /* 64 KiB plus the payload's own size. */
    expect_header(DL_EPROTO);
    buffer[10] = 0;
    buffer[5] = 0;
    expect_header(DL_EPROTO);
    buffer[5] = DL_WIRE_RECOVERED + 1;
    expect_header(DL_EPROTO);
    buffer[5] = DL_WIRE_CHUNK; /* A chunk may be as long as a chunk's limit, and no longer. */
    memcpy(buffer + 8, (uint8_t[]){16, 0, 16, 0}, 4);
    expect_header(DL_OK);
    buffer[8] = 17;
    expect_header(DL_EPROTO);
    memcpy(buffer + 8, (uint8_t[]){16, 0, 0, 0}, 4);
    expect_header(DL_EPROTO);
    buffer[5] = DL_WIRE_HELLO;
    memcpy(buffer + 8, (uint8_t[]){0, 0, 64, 0}, 4);
    expect_header(DL_OK);
    buffer[8] = 1;
    expect_header(DL_EPROTO);
    struct dl_err err;
    struct dl_wire_header header;
    buffer[4] = 1;
    CU_ASSERT_EQUAL(dl_wire_header_decode(buffer, &header, &err), DL_EPROTO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "version 1"));
    fill(DL_WIRE_REFUSE, true); /* Whoever speaks another version must be able to say so. */
    size_t bytes = 0;
    CU_ASSERT_EQUAL_FATAL(dl_wire_encode(&sent, buffer, sizeof buffer, &bytes, &err), DL_OK);
    buffer[4] = DL_WIRE_VERSION + 1;
    CU_ASSERT_EQUAL(dl_wire_header_decode(buffer, &header, &err), DL_OK);
}

static void test_entries_of_a_trace_ascend(void)
{
    fill(DL_WIRE_TRACE, true);
    sent.as.trace.entries[5].seq = sent.as.trace.entries[4].seq;
    size_t used = encode_sent();
    struct dl_err err;
    CU_ASSERT_EQUAL(
        dl_wire_decode(DL_WIRE_TRACE, buffer + DL_WIRE_HEADER_BYTES, used - DL_WIRE_HEADER_BYTES, &got, &err),
        DL_EPROTO);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "ascend"));
}

/* A list that claims more than the bytes that follow, or more than there may be. */
static void test_hostile_counts_are_refused(void)
{
    fill(DL_WIRE_META, false);
    size_t payload = encode_sent() - DL_WIRE_HEADER_BYTES;
    uint8_t *at = buffer + DL_WIRE_HEADER_BYTES;
    static const uint32_t counts[] = {1, 2, 512, 513, 0x8000000, 0x80000000, UINT32_MAX};
    for (size_t i = 0; i < DL_COUNT_OF(counts); i++) {
        uint8_t *copy = malloc(payload);
        memcpy(copy, at, payload);
        memcpy(copy + payload - 4, &counts[i], 4);
        CU_ASSERT_EQUAL(dl_wire_decode(DL_WIRE_META, copy, payload, &got, NULL), DL_EPROTO);
        free(copy);
    }
    fill(DL_WIRE_HELLO, false);
    payload = encode_sent() - DL_WIRE_HEADER_BYTES;
    for (size_t i = 0; i < DL_COUNT_OF(counts); i++) {
        memcpy(at + payload - 4, &counts[i], 4);
        CU_ASSERT_EQUAL(dl_wire_decode(DL_WIRE_HELLO, at, payload, &got, NULL), DL_EPROTO);
    }
}

static void expect_not_encoded(const char *field)
{
    struct dl_err err = {0};
    size_t used = 77;
    CU_ASSERT_EQUAL(dl_wire_encode(&sent, buffer, sizeof buffer, &used, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, field));
    CU_ASSERT_EQUAL(used, 77);
}

static void test_encoder_refuses_what_a_decoder_would(void)
{
    fill(DL_WIRE_HELLO, false);
    sent.as.hello.uid[0] = 0;
    expect_not_encoded("uid");
    fill(DL_WIRE_HELLO, false);
    sent.as.hello.job[0] = '\n';
    expect_not_encoded("job");
    fill(DL_WIRE_HELLO, true);
    sent.as.hello.job[DL_SPEC_NAME_MAX - 1] = 'x';
    expect_not_encoded("job");
    fill(DL_WIRE_HELLO, true);
    sent.as.hello.fragments[5].fragment = 4;
    expect_not_encoded("ascend");
    fill(DL_WIRE_META, true);
    sent.as.meta.fragment_count++;
    expect_not_encoded("fragments");
    fill(DL_WIRE_WELCOME, false);
    sent.as.welcome.apply_alpha = NAN;
    expect_not_encoded("apply_alpha");
    fill(DL_WIRE_PULL, true);
    sent.as.pull.flags = 16;
    expect_not_encoded("flags");
    fill(DL_WIRE_UPDATE, false);
    sent.as.update.version = 0;
    expect_not_encoded("version");
    sent.type = DL_WIRE_CHUNK;
    expect_not_encoded("type 8");
}

static void test_text_with_control_characters_is_sent_as_spaces(void)
{
    fill(DL_WIRE_STOP, false);
    memcpy(sent.as.stop.text, "disk\nfull\x1b[2J", 13);
    size_t used = encode_sent();
    CU_ASSERT_EQUAL(receive(buffer, used, &got), DL_OK);
    CU_ASSERT_STRING_EQUAL(got.as.stop.text, "disk full [2J");
    buffer[DL_WIRE_HEADER_BYTES + 3] = '\n';
    CU_ASSERT_EQUAL(
        dl_wire_decode(DL_WIRE_STOP, buffer + DL_WIRE_HEADER_BYTES, used - DL_WIRE_HEADER_BYTES, &got, NULL),
        DL_EPROTO);
}

static void test_welcome_fields_must_fit_each_other(void)
{
    fill(DL_WIRE_WELCOME, true);
    sent.as.welcome.shards = 2;
    size_t used = encode_sent();
    CU_ASSERT_EQUAL(receive(buffer, used, &got), DL_EPROTO);
    fill(DL_WIRE_WELCOME, true);
    sent.as.welcome.fragments_total = DL_SPEC_FRAGMENTS_MAX - 1;
    used = encode_sent();
    CU_ASSERT_EQUAL(receive(buffer, used, &got), DL_EPROTO);
}

static void test_small_buffers_are_told_the_size_needed(void)
{
    FOR_EACH_CONTROL_TYPE(type)
    {
        fill(type, true);
        size_t needed = encode_sent();
        for (size_t size = 0; size < needed; size += size < 100 ? 1 : 997) {
            uint8_t *small = malloc(size + 1);
            small[size] = 0x5a;
            size_t used = 0;
            CU_ASSERT_EQUAL_FATAL(dl_wire_encode(&sent, small, size, &used, NULL), DL_ENOMEM);
            CU_ASSERT_EQUAL_FATAL(used, needed);
            CU_ASSERT_EQUAL_FATAL(small[size], 0x5a);
            free(small);
        }
        size_t used = 0;
        CU_ASSERT_EQUAL(dl_wire_encode(&sent, second, needed, &used, NULL), DL_OK);
    }
}

static void test_chunk_head_and_verify(void)
{
    enum { data_bytes = 1000 };
    static const size_t head_bytes = DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES;
    uint8_t *data = buffer + head_bytes;
    for (int i = 0; i < data_bytes; i++) {
        data[i] = (uint8_t)(i * 7);
    }
    dl_wire_chunk_head(UINT64_C(0x1122334455667788), UINT64_MAX - 5, data, data_bytes, buffer);
    const uint8_t *prefix = buffer + DL_WIRE_HEADER_BYTES;
    dl_wire_chunk_begin(UINT64_C(0x1122334455667788), UINT64_MAX - 5, data_bytes, second);
    struct dl_leaves leaves;
    dl_leaves_begin(&leaves);
    dl_leaves_add(&leaves, data, data_bytes);
    dl_wire_chunk_end(&leaves, second);
    CU_ASSERT_EQUAL(memcmp(second, buffer, head_bytes), 0);
    struct dl_wire_header header;
    CU_ASSERT_EQUAL_FATAL(dl_wire_header_decode(buffer, &header, NULL), DL_OK);
    CU_ASSERT_EQUAL(header.type, DL_WIRE_CHUNK);
    CU_ASSERT_EQUAL(header.payload_bytes, data_bytes + DL_WIRE_CHUNK_PREFIX_BYTES);
    uint64_t transfer, offset;
    dl_wire_chunk_prefix(prefix, &transfer, &offset);
    CU_ASSERT_EQUAL(transfer, UINT64_C(0x1122334455667788));
    CU_ASSERT_EQUAL(offset, UINT64_MAX - 5);
    CU_ASSERT_EQUAL(dl_wire_chunk_verify(buffer, prefix, data, data_bytes, NULL), DL_OK);
    CU_ASSERT_EQUAL(dl_wire_verify(buffer, prefix, header.payload_bytes, NULL), DL_OK);
    CU_ASSERT_EQUAL(dl_wire_chunk_verify(buffer, prefix, data, data_bytes - 1, NULL), DL_ECORRUPT);
    CU_ASSERT_EQUAL(dl_wire_verify(buffer, prefix, header.payload_bytes - 1, NULL), DL_ECORRUPT);
    for (size_t at = 0; at < head_bytes + data_bytes; at++) {
        buffer[at] ^= 0x10;
        bool refused = dl_wire_header_decode(buffer, &header, NULL) != DL_OK ||
                       (dl_wire_chunk_verify(buffer, prefix, data, data_bytes, NULL) != DL_OK &&
                        dl_wire_verify(buffer, prefix, data_bytes + DL_WIRE_CHUNK_PREFIX_BYTES, NULL) != DL_OK);
        CU_ASSERT_FATAL(refused);
        buffer[at] ^= 0x10;
    }
    CU_ASSERT_EQUAL(dl_wire_decode(DL_WIRE_CHUNK, prefix, 100, &got, NULL), DL_EPROTO);
}

static void test_chunks_hold_whole_blocks(void)
{
    static const uint32_t block_bytes[] = {1024, 512, 260, 132};
    for (int codec = DL_CODEC_NONE; codec <= DL_CODEC_INT4; codec++) {
        uint32_t bytes = dl_wire_chunk_data_bytes((enum dl_codec)codec);
        CU_ASSERT_EQUAL(bytes % block_bytes[codec], 0);
        CU_ASSERT(bytes <= DL_WIRE_CHUNK_DATA_MAX && bytes + block_bytes[codec] > DL_WIRE_CHUNK_DATA_MAX);
    }
}

static void test_names(void)
{
    CU_ASSERT_STRING_EQUAL(dl_verdict_name(DL_VERDICT_STALE_BASE), "stale_base");
    for (int verdict = 0; verdict < DL_VERDICT_COUNT; verdict++) {
        CU_ASSERT_PTR_NOT_NULL(dl_verdict_name((enum dl_verdict)verdict));
    }
    CU_ASSERT_STRING_EQUAL(dl_verdict_name(DL_VERDICT_COUNT), "unknown");
    CU_ASSERT_STRING_EQUAL(dl_wire_type_name(DL_WIRE_PUSH_NONE), "push_none");
    CU_ASSERT_STRING_EQUAL(dl_wire_type_name((enum dl_wire_type)99), "unknown");
    CU_ASSERT_TRUE(dl_refusal_is_temporary(DL_REFUSE_FULL));
    CU_ASSERT_FALSE(dl_refusal_is_temporary(DL_REFUSE_JOB));
}

UNIT_MAIN("wire", {"round trip", test_round_trip_of_every_type_at_its_extremes},
          {"bytes", test_layout_of_bytes_is_fixed}, {"truncation", test_truncation_at_every_length_is_refused},
          {"flipped bytes", test_every_flipped_byte_is_refused},
          {"fields in range", test_decoded_fields_are_always_in_range},
          {"header limits", test_header_refuses_oversize_and_nonsense},
          {"entries of a trace ascend", test_entries_of_a_trace_ascend},
          {"hostile counts", test_hostile_counts_are_refused},
          {"encoder refuses", test_encoder_refuses_what_a_decoder_would},
          {"text", test_text_with_control_characters_is_sent_as_spaces},
          {"welcome", test_welcome_fields_must_fit_each_other},
          {"small buffers", test_small_buffers_are_told_the_size_needed}, {"chunk", test_chunk_head_and_verify},
          {"chunk size", test_chunks_hold_whole_blocks}, {"names", test_names})
