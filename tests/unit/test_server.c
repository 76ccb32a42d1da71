/* The syncer's server without its network loop: receiving, frames of a version. */
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/content.h"
#include "common/layout.h"
#include "common/le.h"
#include "common/mem.h"
#include "common/wire.h"
#include "syncer/server/blob.h"
#include "syncer/server/receive.h"
#include "tests/unit/unit.h"

/* --- receiving ------------------------------------------------------------------------------------------------------ */

#define DATA_BYTES 2048

struct seen { /* What a sink was told. */
    uint32_t controls, chunks, begun;
    enum dl_wire_type type;
    uint64_t round, transfer, offset;
    bool intact, dropped;
    bool drop;                     /* Answer to chunk_begin. */
    bool refuse;                   /* Answer to admit. */
    uint8_t data[DATA_BYTES + 16]; /* Guard bytes behind. */
};

static enum dl_rc seen_admit(void *context, enum dl_wire_type type, struct dl_err *err)
{
    const struct seen *seen = context;
    (void)type;
    return seen->refuse ? dl_err_set(err, DL_EPROTO, "not wanted") : DL_OK;
}

static enum dl_rc seen_begin(void *context, uint64_t transfer, uint64_t offset, uint32_t bytes, uint8_t **into,
                             struct dl_err *err)
{
    struct seen *seen = context;
    seen->begun++;
    seen->transfer = transfer;
    seen->offset = offset;
    if (bytes > DATA_BYTES) {
        return dl_err_set(err, DL_EPROTO, "too large");
    }
    *into = seen->drop ? NULL : seen->data;
    return DL_OK;
}

static enum dl_rc seen_end(void *context, uint64_t transfer, const uint8_t *data, uint32_t bytes, bool intact,
                           struct dl_err *err)
{
    struct seen *seen = context;
    (void)bytes;
    (void)err;
    CU_ASSERT_EQUAL(transfer, seen->transfer);
    seen->chunks++;
    seen->intact = intact;
    seen->dropped = data == NULL;
    return DL_OK;
}

static enum dl_rc seen_control(void *context, const struct dl_wire_message *message, struct dl_err *err)
{
    struct seen *seen = context;
    (void)err;
    seen->controls++;
    seen->type = message->type;
    if (message->type == DL_WIRE_PUSH_NONE) {
        seen->round = message->as.push_none.round;
    }
    return DL_OK;
}

static struct sy_receive_sink sink_of(struct seen *seen)
{
    return (struct sy_receive_sink){.context = seen,
                                    .chunk_begin = seen_begin,
                                    .chunk_end = seen_end,
                                    .control = seen_control,
                                    .admit = seen_admit};
}

static struct dl_wire_message scratch;

static size_t make_push_none(uint8_t *out, size_t capacity)
{
    struct dl_wire_message message = {.type = DL_WIRE_PUSH_NONE};
    message.as.push_none = (struct dl_wire_push_none){.round = 77, .fragment = 3, .reason = DL_VERDICT_NOTHING};
    size_t used = 0;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(dl_wire_encode(&message, out, capacity, &used, &err), DL_OK);
    return used;
}

static size_t make_chunk(uint8_t *out)
{
    uint8_t *data = out + DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES;
    for (size_t i = 0; i < DATA_BYTES; i++) {
        data[i] = (uint8_t)(i * 31 + 7);
    }
    dl_wire_chunk_head(5, 1024, data, DATA_BYTES, out);
    return DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES + DATA_BYTES;
}

/* Feeds in pieces of `piece` bytes, the first of `first`. */
static enum dl_rc feed(struct sy_receive *receive, struct seen *seen, const uint8_t *bytes, size_t size, size_t first,
                       size_t piece, struct dl_err *err)
{
    struct sy_receive_sink sink = sink_of(seen);
    size_t at = 0;
    size_t next = first;
    do {
        size_t count = DL_MIN(next, size - at);
        next = piece;
        /* A copy of its own, so that an address sanitizer sees every byte read too far. */
        uint8_t *copy = malloc(count == 0 ? 1 : count);
        memcpy(copy, bytes + at, count);
        at += count;
        enum dl_rc rc = sy_receive_feed(receive, &sink, &scratch, copy, count, at == size, err);
        free(copy);
        if (rc != DL_OK) {
            return rc;
        }
    } while (at < size);
    return DL_OK;
}

static void test_any_cut_gives_the_same(void)
{
    uint8_t control[128];
    uint8_t chunk[4096];
    size_t control_size = make_push_none(control, sizeof control);
    size_t chunk_size = make_chunk(chunk);
    static const size_t pieces[] = {1, 2, 3, 7, 16, 24, 40, 1000, 100000};
    struct dl_err err;
    for (size_t p = 0; p < DL_COUNT_OF(pieces); p++) {
        for (size_t first = 0; first <= 48; first++) {
            struct sy_receive receive;
            struct seen seen;
            memset(&seen, 0, sizeof seen);
            sy_receive_init(&receive);
            CU_ASSERT_EQUAL(feed(&receive, &seen, control, control_size, first, pieces[p], &err), DL_OK);
            CU_ASSERT_EQUAL(feed(&receive, &seen, chunk, chunk_size, first, pieces[p], &err), DL_OK);
            CU_ASSERT_EQUAL(feed(&receive, &seen, control, control_size, first, pieces[p], &err), DL_OK);
            CU_ASSERT_EQUAL(seen.controls, 2);
            CU_ASSERT_EQUAL(seen.round, 77);
            CU_ASSERT_EQUAL(seen.chunks, 1);
            CU_ASSERT_EQUAL(seen.begun, 1);
            CU_ASSERT_EQUAL(seen.transfer, 5);
            CU_ASSERT_EQUAL(seen.offset, 1024);
            CU_ASSERT(seen.intact && !seen.dropped);
            CU_ASSERT_EQUAL(memcmp(seen.data, chunk + chunk_size - DATA_BYTES, DATA_BYTES), 0);
            for (size_t i = DATA_BYTES; i < sizeof seen.data; i++) {
                CU_ASSERT_EQUAL(seen.data[i], 0);
            }
            sy_receive_release(&receive);
        }
    }
}

/* A chunk's data is received to its place, in pieces that are fed or placed in turn; the checksum sees all of them. */
static void test_data_received_in_place(void)
{
    uint8_t chunk[4096];
    struct dl_err err;
    size_t size = make_chunk(chunk);
    for (size_t piece = 1; piece < DATA_BYTES; piece += 37) {
        for (int damage = 0; damage < 2; damage++) {
            struct sy_receive receive;
            struct seen seen;
            memset(&seen, 0, sizeof seen);
            struct sy_receive_sink sink = sink_of(&seen);
            sy_receive_init(&receive);
            size_t placed = 0;
            chunk[size - DATA_BYTES / 2] ^= (uint8_t)damage;
            for (size_t at = 0, i = 0; at < size; i++) {
                uint8_t *to = NULL;
                size_t room = sy_receive_direct(&receive, &to), direct = DL_MIN(room, piece);
                size_t fed = direct > 0 && i % 3 != 0 ? 0 : DL_MIN(piece, size - at);
                if (fed == 0) {
                    CU_ASSERT_PTR_EQUAL_FATAL(to, seen.data + (at - (size - DATA_BYTES)));
                    memcpy(to, chunk + at, direct);
                    sy_receive_placed(&receive, direct);
                    placed += direct;
                }
                CU_ASSERT_EQUAL(sy_receive_feed(&receive, &sink, &scratch, chunk + at, fed, false, &err), DL_OK);
                at += fed == 0 ? direct : fed;
            }
            CU_ASSERT_EQUAL(sy_receive_feed(&receive, &sink, &scratch, chunk, 0, true, &err), DL_OK);
            CU_ASSERT(placed > 0);
            CU_ASSERT_EQUAL(seen.chunks, 1);
            CU_ASSERT_EQUAL(seen.intact, damage == 0);
            CU_ASSERT_EQUAL(memcmp(seen.data, chunk + size - DATA_BYTES, DATA_BYTES), 0);
            chunk[size - DATA_BYTES / 2] ^= (uint8_t)damage;
            sy_receive_release(&receive);
        }
    }
}

/* Bytes too many, too few, none: never accepted, never read beyond. */
static void test_wrong_lengths(void)
{
    uint8_t bytes[4096];
    struct dl_err err;
    for (int kind = 0; kind < 2; kind++) {
        memset(bytes, 0, sizeof bytes);
        size_t size = kind == 0 ? make_push_none(bytes, sizeof bytes) : make_chunk(bytes);
        for (size_t cut = 0; cut <= size + 2; cut++) {
            if (cut == size) {
                continue;
            }
            struct sy_receive receive;
            struct seen seen;
            memset(&seen, 0, sizeof seen);
            sy_receive_init(&receive);
            CU_ASSERT_EQUAL(feed(&receive, &seen, bytes, cut, cut, 1, &err), DL_EPROTO);
            CU_ASSERT_EQUAL(seen.controls + seen.chunks, 0);
            sy_receive_release(&receive);
        }
    }
}

static void test_damage_is_noticed(void)
{
    uint8_t bytes[4096];
    struct dl_err err;
    size_t size = make_push_none(bytes, sizeof bytes);
    for (size_t i = 0; i < size; i++) {
        struct sy_receive receive;
        struct seen seen;
        memset(&seen, 0, sizeof seen);
        sy_receive_init(&receive);
        bytes[i] ^= 0x40;
        CU_ASSERT(feed(&receive, &seen, bytes, size, size, size, &err) != DL_OK);
        CU_ASSERT_EQUAL(seen.controls, 0);
        bytes[i] ^= 0x40;
        sy_receive_release(&receive);
    }
    /* A chunk's damage is the push's affair: it is received on, and refused as a whole. */
    size = make_chunk(bytes);
    struct sy_receive receive;
    struct seen seen;
    memset(&seen, 0, sizeof seen);
    sy_receive_init(&receive);
    bytes[size - 1] ^= 1;
    CU_ASSERT_EQUAL(feed(&receive, &seen, bytes, size, 100, 100, &err), DL_OK);
    CU_ASSERT(seen.chunks == 1 && !seen.intact);
    sy_receive_release(&receive);
}

static void test_sink_decides(void)
{
    uint8_t bytes[4096];
    struct dl_err err;
    size_t size = make_chunk(bytes);
    struct sy_receive receive;
    struct seen seen;
    memset(&seen, 0, sizeof seen);
    seen.refuse = true;
    sy_receive_init(&receive);
    CU_ASSERT_EQUAL(feed(&receive, &seen, bytes, size, 10, 10, &err), DL_EPROTO);
    CU_ASSERT_STRING_EQUAL(err.text, "not wanted");
    CU_ASSERT_EQUAL(seen.begun, 0);
    sy_receive_release(&receive);

    memset(&seen, 0, sizeof seen);
    seen.drop = true;
    sy_receive_init(&receive);
    CU_ASSERT_EQUAL(feed(&receive, &seen, bytes, size, 10, 10, &err), DL_OK);
    CU_ASSERT(seen.chunks == 1 && seen.dropped);
    sy_receive_release(&receive);

    /* The buffer goes away in the middle. */
    memset(&seen, 0, sizeof seen);
    sy_receive_init(&receive);
    struct sy_receive_sink sink = sink_of(&seen);
    CU_ASSERT_EQUAL(sy_receive_feed(&receive, &sink, &scratch, bytes, 1000, false, &err), DL_OK);
    sy_receive_drop_chunk(&receive);
    memset(seen.data, 0, sizeof seen.data);
    CU_ASSERT_EQUAL(sy_receive_feed(&receive, &sink, &scratch, bytes + 1000, size - 1000, true, &err), DL_OK);
    CU_ASSERT(seen.chunks == 1 && seen.dropped);
    for (size_t i = 0; i < DATA_BYTES; i++) {
        CU_ASSERT_EQUAL(seen.data[i], 0);
    }
    sy_receive_release(&receive);
}

/* A size is checked against the type's limit before memory is taken for it. */
static void test_sizes_are_capped(void)
{
    uint8_t bytes[64];
    struct dl_err err;
    make_push_none(bytes, sizeof bytes);
    const uint32_t claimed = DL_WIRE_CONTROL_PAYLOAD_MAX + 1;
    dl_le_put(bytes + 8, claimed, 4);
    struct sy_receive receive;
    struct seen seen;
    memset(&seen, 0, sizeof seen);
    sy_receive_init(&receive);
    struct sy_receive_sink sink = sink_of(&seen);
    CU_ASSERT_EQUAL(sy_receive_feed(&receive, &sink, &scratch, bytes, DL_WIRE_HEADER_BYTES, false, &err), DL_EPROTO);
    CU_ASSERT_PTR_NULL(receive.payload);
    sy_receive_release(&receive);
}

/* --- frames of a version -------------------------------------------------------------------------------------------- */

static void check_blob(enum dl_codec codec, uint64_t blocks)
{
    struct dl_err err;
    uint64_t elements = blocks * DL_BLOCK;
    float *values = dl_alloc_aligned(elements * sizeof(float));
    struct sy_buffers *buffers = sy_buffers_new();
    uint8_t *joined = malloc(dl_codec_bytes(codec, elements));
    for (uint64_t i = 0; i < elements; i++) {
        values[i] = (float)(i % 1000) - 500.25f;
    }
    struct sy_blob *blob = NULL;
    struct sy_pool *pool = NULL;
    CU_ASSERT_EQUAL_FATAL(sy_pool_new(3, &pool, &err), DL_OK);
    struct sy_blob_options options = {.fragment = 3, .version = 9, .round = 40, .participants = 2, .codec = codec};
    CU_ASSERT_EQUAL_FATAL(sy_blob_new(&options, elements, buffers, &blob, &err), DL_OK);
    sy_blob_fill(blob, values, 0, 0, pool);
    CU_ASSERT_EQUAL_FATAL(blob->bytes, dl_codec_bytes(codec, elements));
    uint64_t at = 0;
    for (uint32_t i = 0; i < blob->chunk_count; i++) {
        size_t size;
        uint8_t *frame = sy_blob_frame(blob, i, &size);
        struct dl_wire_header header;
        uint64_t transfer;
        uint64_t offset;
        CU_ASSERT_EQUAL(dl_wire_header_decode(frame, &header, &err), DL_OK);
        CU_ASSERT_EQUAL(dl_wire_verify(frame, frame + DL_WIRE_HEADER_BYTES, header.payload_bytes, &err), DL_OK);
        CU_ASSERT_EQUAL(header.payload_bytes + DL_WIRE_HEADER_BYTES, size);
        dl_wire_chunk_prefix(frame + DL_WIRE_HEADER_BYTES, &transfer, &offset);
        CU_ASSERT_EQUAL(transfer, blob->transfer);
        CU_ASSERT_EQUAL_FATAL(offset, at);
        size_t data = size - DL_WIRE_HEADER_BYTES - DL_WIRE_CHUNK_PREFIX_BYTES;
        CU_ASSERT_EQUAL(data % dl_codec_block_bytes(codec), 0);
        memcpy(joined + at, frame + size - data, data);
        at += data;
    }
    CU_ASSERT_EQUAL_FATAL(at, blob->bytes);
    CU_ASSERT_EQUAL(dl_content_hash(joined, at), blob->content_hash);
    float *back = dl_alloc_aligned(elements * sizeof(float));
    dl_codec_decode(codec, joined, blocks, back);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < elements; i++) {
        /* bf16 keeps 8 bits of a mantissa. */
        float limit = codec == DL_CODEC_NONE ? 0.0f : 500.0f / 256.0f;
        float difference = back[i] - values[i];
        wrong += difference > limit || difference < -limit ? 1 : 0;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    CU_ASSERT_PTR_EQUAL(sy_blob_hold(blob), blob);
    sy_blob_drop(blob);
    CU_ASSERT_EQUAL(atomic_load(&blob->references), 1);
    sy_blob_drop(blob);
    free(values);
    sy_pool_free(pool);
    sy_buffers_free(buffers);
    free(joined);
    free(back);
}

static void test_frames_of_a_version(void)
{
    check_blob(DL_CODEC_NONE, 1);
    check_blob(DL_CODEC_NONE, 1024);     /* Exactly one chunk. */
    check_blob(DL_CODEC_NONE, 1024 + 1); /* A second one with one block. */
    check_blob(DL_CODEC_BF16, 1);
    check_blob(DL_CODEC_BF16, 5000);
}

UNIT_MAIN("server", {"data received in place", test_data_received_in_place},
          {"any cut gives the same", test_any_cut_gives_the_same}, {"wrong lengths", test_wrong_lengths},
          {"damage is noticed", test_damage_is_noticed}, {"the sink decides", test_sink_decides},
          {"sizes are capped", test_sizes_are_capped}, {"frames of a version", test_frames_of_a_version})
