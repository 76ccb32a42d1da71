/* The learner's reading of messages: split anywhere, chunks in place, what does not fit together. */
#include <string.h>

#include "common/mem.h"
#include "tests/unit/unit.h"
#include "tests/unit/wire_make.h"
#include "worker/link/receive.h"

struct owner {
    uint8_t data[4096];
    unsigned messages, chunks, damaged, placed;
    uint64_t transfer, offset;
    bool skip, refuse;
};
static struct owner owner;
static struct dl_wire_message decoded, sent;
static struct wk_rx rx;

static enum dl_rc on_message(void *context, const struct dl_wire_message *message, struct dl_err *err)
{
    (void)err;
    struct owner *o = context;
    o->messages += message->type == DL_WIRE_RESULT && message->as.result.round == 42;
    return DL_OK;
}

static enum dl_rc on_place(void *context, uint64_t transfer, uint64_t offset, uint32_t bytes, uint8_t **data,
                           struct dl_err *err)
{
    struct owner *o = context;
    CU_ASSERT_EQUAL(bytes, 1000);
    o->placed++;
    o->transfer = transfer;
    o->offset = offset;
    *data = o->skip ? NULL : o->data;
    return o->refuse ? dl_err_set(err, DL_EPROTO, "refused") : DL_OK;
}

/* The leaves that come with a chunk are those of its data. */
static enum dl_rc on_chunk(void *context, struct dl_leaves *leaves, bool intact, struct dl_err *err)
{
    struct owner *o = context;
    static struct dl_content content;
    dl_content_begin(&content);
    dl_content_add_leaves(&content, leaves);
    CU_ASSERT_EQUAL(dl_content_result(&content), dl_content_hash(o->data, 1000));
    o->chunks += intact;
    o->damaged += !intact;
    return intact ? DL_OK : dl_err_set(err, DL_ECORRUPT, "damaged");
}

/* A RESULT and a CHUNK of 1000 bytes, as payloads of two WebSocket messages. */
static uint8_t result_bytes[256], chunk_bytes[DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES + 1000];
static size_t result_size;

static void make_messages(void)
{
    make_result(&sent, 3, 42, DL_VERDICT_LATE);
    CU_ASSERT_EQUAL_FATAL(dl_wire_encode(&sent, result_bytes, sizeof result_bytes, &result_size, NULL), DL_OK);
    uint8_t *data = chunk_bytes + DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES;
    for (int i = 0; i < 1000; i++) {
        data[i] = (uint8_t)(i * 3);
    }
    dl_wire_chunk_head(7, 2048, data, 1000, chunk_bytes);
    memset(&owner, 0, sizeof owner);
    struct wk_rx_owner callbacks = {.context = &owner, .message = on_message, .place = on_place, .chunk = on_chunk};
    wk_rx_init(&rx, &callbacks, &decoded);
}

static void expect_chunk(void)
{
    CU_ASSERT_EQUAL(owner.transfer, 7);
    CU_ASSERT_EQUAL(owner.offset, 2048);
    for (int i = 0; i < 1000; i++) {
        CU_ASSERT_FATAL(owner.data[i] == (uint8_t)(i * 3));
    }
}

static void test_messages_at_every_split_point(void)
{
    struct dl_err err;
    for (size_t split = 0; split <= sizeof chunk_bytes; split++) {
        make_messages();
        size_t first = DL_MIN(split, result_size);
        CU_ASSERT_EQUAL_FATAL(wk_rx_bytes(&rx, result_bytes, first, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(wk_rx_bytes(&rx, result_bytes + first, result_size - first, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(wk_rx_end(&rx, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(wk_rx_bytes(&rx, chunk_bytes, split, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(wk_rx_bytes(&rx, chunk_bytes + split, sizeof chunk_bytes - split, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(wk_rx_end(&rx, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(owner.messages, 1);
        CU_ASSERT_EQUAL_FATAL(owner.chunks, 1);
        CU_ASSERT_EQUAL_FATAL(owner.placed, 1);
        expect_chunk();
    }
}

static void test_chunk_data_is_received_in_place(void)
{
    struct dl_err err;
    enum { head = DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES };
    for (size_t early = 0; early <= 1000; early += 125) {
        make_messages();
        uint8_t *at = NULL;
        CU_ASSERT_EQUAL(wk_rx_direct(&rx, &at), 0);
        CU_ASSERT_EQUAL_FATAL(wk_rx_bytes(&rx, chunk_bytes, head + early, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(wk_rx_direct(&rx, &at), 1000 - early);
        if (early < 1000) {
            CU_ASSERT_PTR_EQUAL(at, owner.data + early);
            memcpy(at, chunk_bytes + head + early, 1000 - early);
            wk_rx_advance(&rx, 1000 - early);
        }
        CU_ASSERT_EQUAL(wk_rx_end(&rx, &err), DL_OK);
        expect_chunk();
        CU_ASSERT_EQUAL(wk_rx_direct(&rx, &at), 0);
    }
}

static void test_skipped_chunks_and_wrong_lengths(void)
{
    struct dl_err err;
    make_messages();
    owner.skip = true;
    CU_ASSERT_EQUAL(wk_rx_bytes(&rx, chunk_bytes, sizeof chunk_bytes, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_rx_end(&rx, &err), DL_OK);
    CU_ASSERT_EQUAL(owner.chunks + owner.damaged, 0);
    owner.skip = false;
    owner.refuse = true;
    CU_ASSERT_EQUAL(wk_rx_bytes(&rx, chunk_bytes, sizeof chunk_bytes, &err), DL_EPROTO);
    make_messages();
    chunk_bytes[500] ^= 1;
    CU_ASSERT_EQUAL(wk_rx_bytes(&rx, chunk_bytes, sizeof chunk_bytes, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_rx_end(&rx, &err), DL_ECORRUPT);
    CU_ASSERT_EQUAL(owner.damaged, 1);
    make_messages();
    CU_ASSERT_EQUAL(wk_rx_bytes(&rx, result_bytes, result_size - 1, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_rx_end(&rx, &err), DL_EPROTO);
    make_messages();
    CU_ASSERT_EQUAL(wk_rx_bytes(&rx, result_bytes, 10, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_rx_end(&rx, &err), DL_EPROTO);
    make_messages();
    CU_ASSERT_EQUAL(wk_rx_end(&rx, &err), DL_EPROTO); /* An empty message. */
    make_messages();
    result_bytes[result_size] = 0;
    CU_ASSERT_EQUAL(wk_rx_bytes(&rx, result_bytes, result_size + 1, &err), DL_EPROTO);
    make_messages();
    result_bytes[result_size - 1] ^= 1;
    CU_ASSERT_EQUAL(wk_rx_bytes(&rx, result_bytes, result_size, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_rx_end(&rx, &err), DL_ECORRUPT);
    make_messages();
    memcpy(result_bytes + 5, "\1", 1); /* HELLO may be long, but never comes to a learner. */
    memcpy(result_bytes + 8, "\0\0\x3f\0", 4);
    CU_ASSERT_EQUAL(wk_rx_bytes(&rx, result_bytes, result_size, &err), DL_EPROTO);
}

UNIT_MAIN("link: receive", {"messages split", test_messages_at_every_split_point},
          {"in place", test_chunk_data_is_received_in_place}, {"wrong lengths", test_skipped_chunks_and_wrong_lengths})
