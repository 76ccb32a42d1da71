/* Codecs against element-by-element references, on every instruction set that this machine has. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/copy.h"
#include "common/isa.h"
#include "common/rng.h"
#include "tests/unit/unit.h"

#define BLOCKS 7
#define ELEMENTS (BLOCKS * DL_BLOCK)
#define GUARD 64
#define GUARD_BYTE 0xa5
#define LINE 16 /* Elements of a cache line. */

static const enum dl_codec codecs[] = {DL_CODEC_NONE, DL_CODEC_BF16, DL_CODEC_INT8, DL_CODEC_INT4};

/* A buffer between guard bytes, shifted by one byte so that nothing is aligned. */
struct guarded {
    uint8_t bytes[GUARD + 1 + ELEMENTS * 4 + GUARD];
};

static uint8_t *guarded_start(struct guarded *buffer)
{
    memset(buffer->bytes, GUARD_BYTE, sizeof buffer->bytes);
    return buffer->bytes + GUARD + 1;
}

static int guards_hold(const struct guarded *buffer, size_t used)
{
    for (size_t i = 0; i < sizeof buffer->bytes; i++) {
        int is_inside = i >= GUARD + 1 && i < GUARD + 1 + used;
        if (!is_inside && buffer->bytes[i] != GUARD_BYTE) {
            return 0;
        }
    }
    return 1;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static uint64_t bits_of_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* --- references --- */

static uint16_t reference_bf16(float value)
{
    uint32_t bits = bits_of(value);
    if (isnan(value)) {
        return (uint16_t)((bits >> 16) | 0x40);
    }
    uint32_t below = bits & 0xffff;
    uint32_t up = below > 0x8000 || (below == 0x8000 && ((bits >> 16) & 1) == 1);
    return (uint16_t)((bits >> 16) + up);
}

static void reference_quantised(const float *values, int limit, int nibbles, uint8_t *out)
{
    float largest = 0;
    int finite = 1;
    for (int i = 0; i < DL_BLOCK; i++) {
        finite = finite && isfinite(values[i]);
        largest = fmaxf(largest, fabsf(values[i]));
    }
    int is_zero = largest < 0x1p-100f;
    float scale = !finite ? NAN : is_zero ? 0 : largest / (float)limit;
    int q[DL_BLOCK] = {0};
    for (int i = 0; i < DL_BLOCK && finite && !is_zero; i++) {
        q[i] = (int)lrintf(values[i] * ((float)limit / largest));
    }
    memcpy(out, &scale, sizeof scale);
    for (int i = 0; i < (nibbles ? DL_BLOCK / 2 : DL_BLOCK); i++) {
        out[4 + i] = (uint8_t)(nibbles ? (q[i] & 15) | ((q[i + DL_BLOCK / 2] & 15) << 4) : q[i]);
    }
}

static void reference_encode(enum dl_codec codec, const float *values, uint8_t *out)
{
    for (int b = 0; b < BLOCKS; b++, values += DL_BLOCK, out += dl_codec_block_bytes(codec)) {
        switch (codec) {
        case DL_CODEC_NONE: memcpy(out, values, DL_BLOCK * 4); break;
        case DL_CODEC_BF16:
            for (int i = 0; i < DL_BLOCK; i++) {
                uint16_t half = reference_bf16(values[i]);
                out[2 * i] = (uint8_t)half;
                out[2 * i + 1] = (uint8_t)(half >> 8);
            }
            break;
        case DL_CODEC_INT8: reference_quantised(values, 127, 0, out); break;
        case DL_CODEC_INT4: reference_quantised(values, 7, 1, out); break;
        }
    }
}

static float reference_element(enum dl_codec codec, const uint8_t *block, int i)
{
    float scale;
    memcpy(&scale, block, sizeof scale);
    switch (codec) {
    case DL_CODEC_NONE: memcpy(&scale, block + 4 * i, sizeof scale); return scale;
    case DL_CODEC_BF16: return float_of((uint32_t)(block[2 * i] | block[2 * i + 1] << 8) << 16);
    case DL_CODEC_INT8: return (float)(int8_t)block[4 + i] * scale;
    case DL_CODEC_INT4: {
        int nibble = i < DL_BLOCK / 2 ? block[4 + i] & 15 : block[4 + i - DL_BLOCK / 2] >> 4;
        return (float)(nibble >= 8 ? nibble - 16 : nibble) * scale;
    }
    }
    return 0;
}

/* --- values that matter --- */

/* Block by block: ordinary deltas, a wide range of magnitudes, ties, denormals, zeros of both signs, the largest
 * floats. */
static void fill(float *values, uint64_t seed)
{
    struct dl_rng rng;
    dl_rng_init(&rng, seed, dl_rng_stream("codec", 0, 0));
    for (int i = 0; i < ELEMENTS; i++) {
        float normal = dl_rng_normal(&rng);
        switch (i / DL_BLOCK) {
        case 0: values[i] = normal * 1e-3f; break;
        case 1: values[i] = ldexpf(normal, (int)dl_rng_below(&rng, 60) - 50); break;
        case 2: values[i] = i % DL_BLOCK == 0 ? 127.0f : (float)(int)dl_rng_below(&rng, 254) - 126.5f; break;
        case 3: values[i] = float_of(dl_rng_u32(&rng) & 0x807fffff); break;
        case 4: values[i] = i % 2 == 0 ? 0.0f : -0.0f; break;
        case 5: values[i] = i % DL_BLOCK == 7 ? -3.4028234e38f : normal * 1e37f; break;
        default: values[i] = float_of((bits_of(normal) & 0xffff0000) | 0x8000); break; /* Ties of bf16. */
        }
    }
}

static void on_every_isa(void (*check)(void))
{
    enum dl_isa best = dl_isa_current();
    for (int isa = 0; isa < DL_ISA_COUNT; isa++) {
        if (dl_isa_force((enum dl_isa)isa)) {
            check();
        }
    }
    CU_ASSERT_TRUE(dl_isa_force(best));
}

static void check_encode_and_decode(void)
{
    static float values[ELEMENTS];
    static uint8_t expected[ELEMENTS * 4];
    static struct guarded encoded;
    fill(values, 1);
    for (size_t c = 0; c < 4; c++) {
        enum dl_codec codec = codecs[c];
        size_t bytes = (size_t)dl_codec_bytes(codec, ELEMENTS);
        reference_encode(codec, values, expected);
        uint8_t *out = guarded_start(&encoded);
        dl_codec_encode(codec, values, BLOCKS, out);
        CU_ASSERT_EQUAL(memcmp(out, expected, bytes), 0);
        CU_ASSERT_TRUE(guards_hold(&encoded, bytes));

        static float back[GUARD + ELEMENTS + GUARD];
        memset(back, GUARD_BYTE, sizeof back);
        dl_codec_decode(codec, out, BLOCKS, back + GUARD);
        int wrong = 0;
        for (int i = 0; i < ELEMENTS; i++) {
            const uint8_t *block = out + (size_t)(i / DL_BLOCK) * dl_codec_block_bytes(codec);
            wrong += bits_of(back[GUARD + i]) != bits_of(reference_element(codec, block, i % DL_BLOCK));
        }
        for (int i = 0; i < GUARD; i++) {
            wrong += bits_of(back[i]) != 0xa5a5a5a5 || bits_of(back[GUARD + ELEMENTS + i]) != 0xa5a5a5a5;
        }
        CU_ASSERT_EQUAL(wrong, 0);
    }
}

static void test_encode_and_decode(void)
{
    on_every_isa(check_encode_and_decode);
}

/* As encoding the difference from the decoded base, to the bit. */
static void check_delta_from(enum dl_codec base_codec)
{
    static float base[ELEMENTS], theta[ELEMENTS], delta[ELEMENTS];
    static uint8_t encoded_base[1 + ELEMENTS * 4];
    static uint8_t expected[ELEMENTS * 4];
    static struct guarded encoded;
    const struct dl_encoded from = {.codec = base_codec, .bytes = encoded_base + (base_codec == DL_CODEC_NONE ? 0 : 1)};
    fill(base, 2);
    fill(theta, 3);
    dl_codec_encode(base_codec, base, BLOCKS, encoded_base + (from.bytes - encoded_base));
    dl_codec_decode(base_codec, from.bytes, BLOCKS, base);
    for (int i = 0; i < ELEMENTS; i++) {
        delta[i] = base[i] - theta[i];
    }
    for (size_t c = 0; c < 4; c++) {
        size_t bytes = (size_t)dl_codec_bytes(codecs[c], ELEMENTS);
        dl_codec_encode(codecs[c], delta, BLOCKS, expected);
        uint8_t *out = guarded_start(&encoded);
        dl_codec_encode_delta(codecs[c], from, theta, BLOCKS, out);
        CU_ASSERT_EQUAL(memcmp(out, expected, bytes), 0);
        CU_ASSERT_TRUE(guards_hold(&encoded, bytes));
        /* Where memory is aligned, a float32 delta goes past the caches. */
        static _Alignas(64) uint8_t aligned[ELEMENTS * 4 + 64];
        memset(aligned, 0xa5, sizeof aligned);
        dl_codec_encode_delta(codecs[c], from, theta, BLOCKS, aligned);
        CU_ASSERT_EQUAL(memcmp(aligned, expected, bytes), 0);
        CU_ASSERT_EQUAL(aligned[bytes], 0xa5);
    }
}

static void check_delta(void)
{
    for (size_t c = 0; c < 4; c++) {
        check_delta_from(codecs[c]);
    }
}

/* Every alignment of the values to a line, and every number of elements in the last block. */
static void check_decode_past(void)
{
    static float values[ELEMENTS], expected[ELEMENTS];
    static _Alignas(64) float out[LINE + ELEMENTS + LINE];
    static uint8_t encoded[1 + ELEMENTS * 4];
    unsigned wrong = 0;
    fill(values, 9);
    for (size_t c = 0; c < 4; c++) {
        const struct dl_encoded from = {.codec = codecs[c], .bytes = encoded + 1};
        dl_codec_encode(codecs[c], values, BLOCKS, encoded + 1);
        dl_codec_decode(codecs[c], from.bytes, BLOCKS, expected);
        for (size_t at = 0; at < LINE; at++) {
            size_t count = ELEMENTS - at * 16 - at;
            memset(out, 0xa5, sizeof out);
            dl_codec_decode_past(from, count, out + LINE + at);
            wrong += memcmp(out + LINE + at, expected, count * sizeof *out) != 0;
            wrong += bits_of(out[LINE + at - 1]) != 0xa5a5a5a5 || bits_of(out[LINE + at + count]) != 0xa5a5a5a5;
            memset(out, 0xa5, sizeof out);
            dl_codec_decode_past(from, at, out + LINE); /* Less than a line. */
            wrong += memcmp(out + LINE, expected, at * sizeof *out) != 0 || bits_of(out[LINE + at]) != 0xa5a5a5a5;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void test_decode_past_the_caches(void)
{
    on_every_isa(check_decode_past);
}

/* Every alignment of both ends, with sizes around a line's. */
static void test_copy_past_the_caches(void)
{
    static _Alignas(64) uint8_t from[512], to[512], expected[512];
    for (size_t i = 0; i < sizeof from; i++) {
        from[i] = (uint8_t)(i * 7 + 1);
    }
    unsigned wrong = 0;
    for (size_t at = 0; at < 64; at++) {
        for (size_t size = 0; size <= 200; size++) {
            memset(to, 0xa5, sizeof to);
            memset(expected, 0xa5, sizeof expected);
            memcpy(expected + 64 + at, from + size % 64, size);
            dl_copy_past(to + 64 + at, from + size % 64, size);
            wrong += memcmp(to, expected, sizeof to) != 0;
        }
    }
    CU_ASSERT_EQUAL(wrong, 0);
}

static void test_delta_equals_encoded_difference(void)
{
    on_every_isa(check_delta);
}

/* Rounding to nearest is off by at most half a step: 2^-8 of the value in bf16, half a scale in the others, and a few
 * units in the last place for the two roundings of x * (limit / largest). */
static void test_error_of_one_passage(void)
{
    static float values[ELEMENTS];
    static uint8_t encoded[ELEMENTS * 4];
    static float back[ELEMENTS];
    struct dl_rng rng;
    dl_rng_init(&rng, 5, 5);
    for (int i = 0; i < ELEMENTS; i++) {
        values[i] = dl_rng_normal(&rng) * 1e-3f;
    }
    for (size_t c = 0; c < 4; c++) {
        dl_codec_encode(codecs[c], values, BLOCKS, encoded);
        dl_codec_decode(codecs[c], encoded, BLOCKS, back);
        for (int i = 0; i < ELEMENTS; i++) {
            float scale;
            memcpy(&scale, encoded + (size_t)(i / DL_BLOCK) * dl_codec_block_bytes(codecs[c]), sizeof scale);
            float allowed = codecs[c] == DL_CODEC_NONE   ? 0
                            : codecs[c] == DL_CODEC_BF16 ? fabsf(values[i]) * 0x1p-8f
                                                         : scale * 0.5001f;
            CU_ASSERT_FATAL(fabsf(back[i] - values[i]) <= allowed);
        }
    }
}

static void check_not_finite(void)
{
    static const uint32_t hostile[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffc00000,
                                       0x7f800001, 0xffffffff, 0x7fbfffff};
    static float values[ELEMENTS];
    static uint8_t encoded[ELEMENTS * 4];
    static float back[ELEMENTS];
    for (size_t c = 0; c < 4; c++) {
        for (size_t h = 0; h < sizeof hostile / sizeof hostile[0]; h++) {
            for (int at = 0; at < DL_BLOCK; at += 51) {
                fill(values, 4);
                values[at] = float_of(hostile[h]);
                dl_codec_encode(codecs[c], values, 1, encoded);
                dl_codec_decode(codecs[c], encoded, 1, back);
                int hidden = isfinite(back[at]);
                CU_ASSERT_FALSE(hidden);
                int summed = isfinite(dl_codec_sum_squares(codecs[c], encoded, 1, 0));
                CU_ASSERT_FALSE(summed);
            }
        }
    }
}

static void test_not_finite_stays_visible(void)
{
    on_every_isa(check_not_finite);
}

static void check_hostile_scales(void)
{
    static const float scales[] = {INFINITY, -INFINITY, NAN, 3e38f, 1e20f, -1e20f};
    static float back[DL_BLOCK];
    uint8_t block[4 + DL_BLOCK] = {0};
    for (size_t c = 2; c < 4; c++) {
        for (size_t s = 0; s < sizeof scales / sizeof scales[0]; s++) {
            memset(block + 4, 0x77, DL_BLOCK);
            memcpy(block, &scales[s], 4);
            int finite = isfinite(dl_codec_sum_squares(codecs[c], block, 1, 0));
            CU_ASSERT_FALSE(finite);
        }
        /* The integers that our encoder never makes: -128 and -8. */
        float one = 1;
        memcpy(block, &one, 4);
        memset(block + 4, codecs[c] == DL_CODEC_INT8 ? 0x80 : 0x88, DL_BLOCK);
        dl_codec_decode(codecs[c], block, 1, back);
        float expected = codecs[c] == DL_CODEC_INT8 ? -128 : -8;
        CU_ASSERT_EQUAL(back[0], expected);
        CU_ASSERT_EQUAL(back[255], expected);
        CU_ASSERT_EQUAL(dl_codec_sum_squares(codecs[c], block, 1, 0), DL_BLOCK * (double)(expected * expected));
    }
}

static void test_hostile_scales(void)
{
    on_every_isa(check_hostile_scales);
}

/* Within a block 16 additions of positive float32 in a lane and 4 over lanes: relative error below 22 * 2^-24 at worst;
 * quantised sums differ from those of rounded products by one rounding, 2 * 2^-24. */
static void check_sum_squares(void)
{
    static float values[ELEMENTS];
    static uint8_t encoded[ELEMENTS * 4 + 1];
    struct dl_rng rng;
    dl_rng_init(&rng, 6, 6);
    for (int i = 0; i < ELEMENTS; i++) {
        values[i] = dl_rng_normal(&rng) * 1e-3f;
    }
    for (size_t c = 0; c < 4; c++) {
        enum dl_codec codec = codecs[c];
        size_t block_bytes = dl_codec_block_bytes(codec);
        uint8_t *at = encoded + 1;
        dl_codec_encode(codec, values, BLOCKS, at);
        double expected = 0;
        for (int i = 0; i < ELEMENTS; i++) {
            double x = (double)reference_element(codec, at + (size_t)(i / DL_BLOCK) * block_bytes, i % DL_BLOCK);
            expected += x * x;
        }
        double got = dl_codec_sum_squares(codec, at, BLOCKS, 0);
        CU_ASSERT_TRUE(fabs(got - expected) <= 22 * 0x1p-24 * expected);
        for (size_t first = 0; first <= BLOCKS; first++) {
            double part = dl_codec_sum_squares(codec, at, first, 0);
            part = dl_codec_sum_squares(codec, at + first * block_bytes, BLOCKS - first, part);
            CU_ASSERT_EQUAL(part, got);
        }
    }
}

static void test_sum_squares(void)
{
    on_every_isa(check_sum_squares);
}

static void test_equal_bits_of_sums(void)
{
    static float values[ELEMENTS];
    static uint8_t encoded[ELEMENTS * 4];
    enum dl_isa best = dl_isa_current();
    int compared = 0;
    for (size_t c = 0; c < 4; c++) {
        fill(values, 8 + c);
        dl_codec_encode(codecs[c], values, 3, encoded);
        CU_ASSERT_TRUE_FATAL(dl_isa_force(DL_ISA_PORTABLE));
        double portable = dl_codec_sum_squares(codecs[c], encoded, 3, 0);
        for (int isa = 1; isa < DL_ISA_COUNT; isa++) {
            if (dl_isa_force((enum dl_isa)isa)) {
                double other = dl_codec_sum_squares(codecs[c], encoded, 3, 0);
                CU_ASSERT_EQUAL(bits_of_double(portable), bits_of_double(other));
                compared++;
            }
        }
    }
    CU_ASSERT_TRUE(dl_isa_force(best));
    printf("(%d comparisons, best %s) ", compared, dl_isa_name(best));
}

static void test_sizes(void)
{
    CU_ASSERT_EQUAL(dl_codec_block_bytes(DL_CODEC_NONE), 1024);
    CU_ASSERT_EQUAL(dl_codec_block_bytes(DL_CODEC_BF16), 512);
    CU_ASSERT_EQUAL(dl_codec_block_bytes(DL_CODEC_INT8), 260);
    CU_ASSERT_EQUAL(dl_codec_block_bytes(DL_CODEC_INT4), 132);
    CU_ASSERT_EQUAL(dl_codec_bytes(DL_CODEC_INT4, UINT64_C(1) << 40), (UINT64_C(1) << 32) * 132);
    CU_ASSERT_EQUAL(dl_codec_bytes(DL_CODEC_INT8, 0), 0);
}

UNIT_MAIN("codec", {"sizes", test_sizes}, {"encode and decode", test_encode_and_decode},
          {"delta", test_delta_equals_encoded_difference}, {"error of one passage", test_error_of_one_passage},
          {"copy past the caches", test_copy_past_the_caches}, {"decode past the caches", test_decode_past_the_caches},
          {"not finite", test_not_finite_stays_visible}, {"hostile scales", test_hostile_scales},
          {"sum of squares", test_sum_squares}, {"equal bits of sums", test_equal_bits_of_sums})
