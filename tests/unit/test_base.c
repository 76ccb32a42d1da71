/* Errors, random numbers, hashes, large memory. */
#include <math.h>
#include <string.h>

#include "common/err.h"
#include "common/hash.h"
#include "common/isa.h"
#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/unit.h"

static void test_err_text_and_wrap(void)
{
    struct dl_err err;
    CU_ASSERT_EQUAL(dl_err_set(&err, DL_EINVAL, "quorum %d", 9), DL_EINVAL);
    CU_ASSERT_STRING_EQUAL(err.text, "quorum 9");
    CU_ASSERT_EQUAL(dl_err_wrap(&err, "job %s", "a"), DL_EINVAL);
    CU_ASSERT_STRING_EQUAL(err.text, "job a: quorum 9");
    CU_ASSERT_EQUAL(dl_err_errno(&err, DL_EIO, 2, "open %s", "x"), DL_EIO);
    CU_ASSERT_STRING_EQUAL(err.text, "open x: No such file or directory");
}

static void test_err_long_text_is_marked_as_cut(void)
{
    char lengthy[2 * DL_ERR_TEXT_MAX];
    memset(lengthy, 'x', sizeof lengthy - 1);
    lengthy[sizeof lengthy - 1] = 0;
    struct dl_err err;
    dl_err_set(&err, DL_EIO, "%s", lengthy);
    CU_ASSERT_EQUAL(strlen(err.text), DL_ERR_TEXT_MAX - 1);
    CU_ASSERT_STRING_EQUAL(err.text + DL_ERR_TEXT_MAX - 4, "...");
    dl_err_wrap(&err, "context");
    CU_ASSERT_EQUAL(strncmp(err.text, "context: xxx", 12), 0);
    CU_ASSERT_STRING_EQUAL(err.text + DL_ERR_TEXT_MAX - 4, "...");
}

/* Known answer of Philox4x32-10 for a zero key and counter (Random123's test vectors); words are handed out last first.
 */
static void test_rng_known_answer(void)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 0, 0);
    uint32_t got[4];
    for (int i = 0; i < 4; i++) {
        got[i] = dl_rng_u32(&rng);
    }
    struct dl_rng again;
    dl_rng_init(&again, 0, 0);
    for (int i = 0; i < 4; i++) {
        CU_ASSERT_EQUAL(dl_rng_u32(&again), got[i]);
    }
    CU_ASSERT_EQUAL(got[3], UINT32_C(0x6627e8d5));
    CU_ASSERT_EQUAL(got[2], UINT32_C(0xe169c58d));
    CU_ASSERT_EQUAL(got[1], UINT32_C(0xbc57ac4c));
    CU_ASSERT_EQUAL(got[0], UINT32_C(0x9b00dbd8));
}

static void test_rng_moments_and_bounds(void)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 7, dl_rng_stream("test", 1, 2));
    double sum = 0, squares = 0;
    enum { draws = 100000 };
    for (int i = 0; i < draws; i++) {
        double x = (double)dl_rng_normal(&rng);
        sum += x;
        squares += x * x;
        CU_ASSERT_FATAL(dl_rng_below(&rng, 3) < 3);
        float u = dl_rng_uniform(&rng);
        CU_ASSERT_FATAL(u >= 0 && u < 1);
    }
    CU_ASSERT(fabs(sum / draws) < 0.02);
    CU_ASSERT(fabs(squares / draws - 1) < 0.02);
    CU_ASSERT_NOT_EQUAL(dl_rng_stream("test", 1, 2), dl_rng_stream("test", 2, 1));
}

static void test_hash_is_xxh3(void)
{
    CU_ASSERT_EQUAL(dl_hash64("", 0, 0), UINT64_C(0x2d06800538d394c2));
    CU_ASSERT_NOT_EQUAL(dl_hash64("a", 1, 0), dl_hash64("a", 1, 1));
}

/* Whatever the instruction set, and whether in one piece or in many, the hash is the same. */
static void test_hash_is_the_same_in_pieces_and_on_every_processor(void)
{
    static uint8_t bytes[5000];
    static struct dl_hash_stream stream;
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (uint8_t)(i * 29 + i / 200);
    }
    static const size_t sizes[] = {0, 1, 16, 128, 240, 241, 1024, 4096, 5000};
    enum dl_isa best = dl_isa_current();
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        CU_ASSERT_TRUE(dl_isa_force(DL_ISA_PORTABLE));
        uint64_t expected = dl_hash64(bytes, sizes[k], 77);
        for (int isa = 0; isa < DL_ISA_COUNT; isa++) {
            if (!dl_isa_force((enum dl_isa)isa)) {
                continue;
            }
            CU_ASSERT_EQUAL(dl_hash64(bytes, sizes[k], 77), expected);
            for (size_t piece = 1; piece < 700; piece = piece * 2 + 1) {
                dl_hash_stream_init(&stream, 77);
                for (size_t at = 0; at < sizes[k]; at += piece) {
                    dl_hash_stream_add(&stream, bytes + at, sizes[k] - at < piece ? sizes[k] - at : piece);
                }
                CU_ASSERT_EQUAL(dl_hash_stream_result(&stream), expected);
            }
        }
    }
    CU_ASSERT_TRUE(dl_isa_force(best));
}

/* Whole to its last byte, where it is said to be, and given back. */
static void test_large_memory(void)
{
    static const size_t sizes[] = {1, 4096, DL_LARGE_PAGE_BYTES - 1, DL_LARGE_PAGE_BYTES, 3 * DL_LARGE_PAGE_BYTES + 5};
    for (size_t k = 0; k < DL_COUNT_OF(sizes); k++) {
        uint8_t *mapped = dl_map_large(sizes[k]), *heap = dl_alloc_large(sizes[k]);
        CU_ASSERT_FATAL(mapped != NULL && heap != NULL);
        CU_ASSERT_EQUAL((uintptr_t)mapped % DL_LARGE_PAGE_BYTES, 0);
        CU_ASSERT_EQUAL((uintptr_t)heap % (sizes[k] < DL_LARGE_PAGE_BYTES ? 64 : DL_LARGE_PAGE_BYTES), 0);
        CU_ASSERT_EQUAL(mapped[0] | mapped[sizes[k] - 1], 0);
        memset(mapped, 1, sizes[k]);
        memset(heap, 1, sizes[k]);
        CU_ASSERT_EQUAL(munmap(mapped, sizes[k]), 0);
        free(heap);
    }
    CU_ASSERT_PTR_NULL(dl_map_large(0));
    CU_ASSERT_PTR_NULL(dl_map_large(SIZE_MAX - 100));
    CU_ASSERT_PTR_NULL(dl_alloc_large(SIZE_MAX - 10));
}

UNIT_MAIN("base", {"err text and wrap", test_err_text_and_wrap}, {"err cut", test_err_long_text_is_marked_as_cut},
          {"rng known answer", test_rng_known_answer}, {"rng moments", test_rng_moments_and_bounds},
          {"hash", test_hash_is_xxh3}, {"hash in pieces", test_hash_is_the_same_in_pieces_and_on_every_processor},
          {"large memory", test_large_memory})
