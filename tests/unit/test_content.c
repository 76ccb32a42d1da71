/* Hashes of a content and of its parts, made of the same leaves. */
#include <string.h>

#include "common/content.h"
#include "common/isa.h"
#include "common/le.h"
#include "common/mem.h"
#include "common/wire.h"
#include "tests/unit/unit.h"

#define BYTES (3 * (size_t)DL_LEAVES_BYTES_MAX + 20000)

static uint8_t data[BYTES];
static struct dl_leaves leaves;
static struct dl_content content;

static void fill(void)
{
    for (size_t i = 0; i < BYTES; i++) {
        data[i] = (uint8_t)(i * 29 + i / 200);
    }
}

/* Computed by a few lines of Python over libxxhash, from the rule's text in docs/protocol.md. */
static const struct known {
    size_t bytes;
    uint64_t content, part; /* The part with seed 77. */
} known[] = {
    {0, UINT64_C(0xc77b3abb6f87acd9), UINT64_C(0x3e06214a603237b7)},
    {1, UINT64_C(0x87bc669437310826), UINT64_C(0x3d25a19e5f11b1c1)},
    {1000, UINT64_C(0x29ba3f5bbf1072dd), UINT64_C(0x30c85423b2e48028)},
    {16383, UINT64_C(0xb1a21e84b726d657), UINT64_C(0xf82d8e83b95bae5f)},
    {16384, UINT64_C(0x01fbafe7415618e5), UINT64_C(0xf817bf77cc054ebb)},
    {16385, UINT64_C(0x49dd6074e46d3574), UINT64_C(0x48af1afbc64447e7)},
    {40000, UINT64_C(0x4731a2f91f34c4f0), UINT64_C(0xab4f73a70dbc117a)},
    {1048576, UINT64_C(0x86477be0e179e675), UINT64_C(0xe89793ea9a9f2fc)},
    {1048577, UINT64_C(0xb1f640162ab54d29), 0},
    {3165728, UINT64_C(0x95a6bcbf8369e401), 0},
};

static void test_known_answers(void)
{
    fill();
    for (size_t k = 0; k < DL_COUNT_OF(known); k++) {
        CU_ASSERT_EQUAL(dl_content_hash(data, known[k].bytes), known[k].content);
        if (known[k].bytes <= DL_LEAVES_BYTES_MAX) {
            dl_leaves_begin(&leaves);
            dl_leaves_add(&leaves, data, known[k].bytes);
            CU_ASSERT_EQUAL(dl_leaves_hash(&leaves, 77), known[k].part);
        }
    }
}

/* A CHUNK's checksum, of the same origin. */
static void test_known_chunks(void)
{
    uint8_t head[DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES];
    fill();
    dl_wire_chunk_head(UINT64_C(0x0102030405060708), 0x20000, data, 40000, head);
    CU_ASSERT_EQUAL(dl_le_get(head + 16, 8), UINT64_C(0xa169504bf393062a));
    dl_wire_chunk_head(7, 0, data, 1000, head);
    CU_ASSERT_EQUAL(dl_le_get(head + 16, 8), UINT64_C(0x2f3d7143152a1a24));
}

/* Whatever the pieces and the instruction set, the hash is the same; and looking at it in the middle changes nothing. */
static void test_pieces_of_any_size(void)
{
    static const size_t pieces[] = {1, 999, 16383, 16384, 16385, 70000, DL_LEAVES_BYTES_MAX, BYTES};
    enum dl_isa best = dl_isa_current();
    fill();
    for (int isa = 0; isa < DL_ISA_COUNT; isa++) {
        if (!dl_isa_force((enum dl_isa)isa)) {
            continue;
        }
        for (size_t k = 0; k < DL_COUNT_OF(known); k++) {
            for (size_t p = known[k].bytes > 100000 ? 1 : 0; p < DL_COUNT_OF(pieces); p++) {
                dl_content_begin(&content);
                for (size_t at = 0; at < known[k].bytes; at += pieces[p]) {
                    dl_content_add(&content, data + at, DL_MIN(pieces[p], known[k].bytes - at));
                }
                CU_ASSERT_EQUAL(dl_content_result(&content), known[k].content);
                CU_ASSERT_EQUAL(dl_content_result(&content), known[k].content);
            }
        }
        dl_content_begin(&content);
        for (size_t at = 0; at < 40000; at += 500) {
            CU_ASSERT_EQUAL(dl_content_result(&content), dl_content_hash(data, at));
            dl_content_add(&content, data + at, 500);
        }
        CU_ASSERT_EQUAL(dl_content_result(&content), dl_content_hash(data, 40000));
    }
    CU_ASSERT_TRUE(dl_isa_force(best));
}

/* Parts of whole leaves, whatever their sizes, and a last one of any size: the content's hash follows from their leaves, and each
 * part has the hash that it has alone. */
static void test_parts_make_the_whole(void)
{
    static const size_t parts[] = {DL_LEAF_BYTES, 3 * DL_LEAF_BYTES, DL_LEAVES_BYTES_MAX};
    fill();
    for (size_t k = 0; k < DL_COUNT_OF(known); k++) {
        for (size_t p = 0; p < DL_COUNT_OF(parts); p++) {
            dl_content_begin(&content);
            for (size_t at = 0; at < known[k].bytes; at += parts[p]) {
                size_t size = DL_MIN(parts[p], known[k].bytes - at), cut = size / 3;
                dl_leaves_begin(&leaves);
                dl_leaves_add(&leaves, data + at, cut);
                dl_leaves_add(&leaves, data + at + cut, size - cut);
                uint64_t hash = dl_leaves_hash(&leaves, at);
                dl_content_add_leaves(&content, &leaves);
                dl_leaves_begin(&leaves);
                dl_leaves_add(&leaves, data + at, size);
                CU_ASSERT_EQUAL(dl_leaves_hash(&leaves, at), hash);
            }
            CU_ASSERT_EQUAL(dl_content_result(&content), known[k].content);
        }
    }
}

/* Any changed bit, and any change of length, shows in both; so does another order of the leaves. */
static void test_changes_show(void)
{
    static const size_t places[] = {0, 16383, 16384, 32767, 32768, 39999};
    fill();
    uint64_t whole = dl_content_hash(data, 40000);
    dl_leaves_begin(&leaves);
    dl_leaves_add(&leaves, data, 40000);
    uint64_t part = dl_leaves_hash(&leaves, 1);
    CU_ASSERT_NOT_EQUAL(dl_leaves_hash(&leaves, 2), part);
    for (size_t i = 0; i < DL_COUNT_OF(places); i++) {
        for (int bit = 0; bit < 8; bit++) {
            data[places[i]] ^= (uint8_t)(1 << bit);
            CU_ASSERT_NOT_EQUAL(dl_content_hash(data, 40000), whole);
            dl_leaves_begin(&leaves);
            dl_leaves_add(&leaves, data, 40000);
            CU_ASSERT_NOT_EQUAL(dl_leaves_hash(&leaves, 1), part);
            data[places[i]] ^= (uint8_t)(1 << bit);
        }
    }
    CU_ASSERT_NOT_EQUAL(dl_content_hash(data, 39999), whole);
    uint8_t *turned = dl_alloc_aligned(2 * DL_LEAF_BYTES);
    memcpy(turned, data + DL_LEAF_BYTES, DL_LEAF_BYTES);
    memcpy(turned + DL_LEAF_BYTES, data, DL_LEAF_BYTES);
    CU_ASSERT_NOT_EQUAL(dl_content_hash(turned, 2 * DL_LEAF_BYTES), dl_content_hash(data, 2 * DL_LEAF_BYTES));
    free(turned);
}

UNIT_MAIN("content", {"known answers", test_known_answers}, {"known chunks", test_known_chunks},
          {"pieces of any size", test_pieces_of_any_size}, {"parts make the whole", test_parts_make_the_whole},
          {"changes show", test_changes_show})
