/* Codecs: encoding a delta, from a base in float32 or bf16; decoding, through the caches and past them; sums of squares. In GB/s of
 * float32 (in the bf16 base's case of what is read), beside the read rate of memory; by processor time.
 * bench_codec [portable | avx2 | avx512] */
#include <stdio.h>

#include "common/codec.h"
#include "common/isa.h"
#include "common/mem.h"
#include "common/rng.h"
#include "tests/bench/bench.h"

#define ELEMENTS (16u * 1024 * 1024)
#define BLOCKS (ELEMENTS / DL_BLOCK)
#define REPEATS 7

struct context {
    enum dl_codec codec;
    float *base, *theta, *decoded;
    uint8_t *encoded, *base_bf16;
    size_t granule; /* Of the fastest way to read. */
    double sum;
};

static void run_read(void *opaque)
{
    struct context *context = opaque;
    const uint8_t *const arrays[] = {(const uint8_t *)context->base, (const uint8_t *)context->theta};
    context->sum += (double)bench_read(arrays, 2, 0, ELEMENTS * 4ul, context->granule);
}

static void find_fastest_way(struct context *context)
{
    double least[BENCH_READ_WAYS] = {0};
    size_t fastest = 0;
    for (uint32_t i = 0; i < REPEATS * BENCH_READ_WAYS; i++) {
        size_t way = i % BENCH_READ_WAYS;
        context->granule = bench_read_granules[way];
        double seconds = bench_processor_seconds(run_read, context);
        least[way] = i < BENCH_READ_WAYS || seconds < least[way] ? seconds : least[way];
    }
    for (size_t way = 1; way < BENCH_READ_WAYS; way++) {
        fastest = least[way] < least[fastest] ? way : fastest;
    }
    context->granule = bench_read_granules[fastest];
}

static void run_encode(void *opaque)
{
    struct context *context = opaque;
    const struct dl_encoded base = {.codec = DL_CODEC_NONE, .bytes = (const uint8_t *)context->base};
    dl_codec_encode_delta(context->codec, base, context->theta, BLOCKS, context->encoded);
}

static void run_encode_from_bf16(void *opaque)
{
    struct context *context = opaque;
    const struct dl_encoded base = {.codec = DL_CODEC_BF16, .bytes = context->base_bf16};
    dl_codec_encode_delta(context->codec, base, context->theta, BLOCKS, context->encoded);
}

static void run_decode_past(void *opaque)
{
    struct context *context = opaque;
    const struct dl_encoded encoded = {.codec = context->codec, .bytes = context->encoded};
    dl_codec_decode_past(encoded, ELEMENTS, context->decoded);
}

static void run_decode(void *opaque)
{
    struct context *context = opaque;
    dl_codec_decode(context->codec, context->encoded, BLOCKS, context->decoded);
}

static void run_squares(void *opaque)
{
    struct context *context = opaque;
    context->sum += dl_codec_sum_squares(context->codec, context->encoded, BLOCKS, 0);
}

/* `bytes`: of float32 read or written. */
static void measure(struct bench_report *report, const char *name, void (*run)(void *), struct context *context,
                    double bytes)
{
    struct bench_stats read;
    struct bench_stats stats;
    bench_measure_pair(bench_processor_seconds, run_read, run, context, REPEATS, &read, &stats);
    double rate = bytes / stats.median * 1e-9;
    double read_rate = ELEMENTS * 8.0 / read.median * 1e-9;
    bench_add_spread(report, name, bench_rates(stats, bytes * 1e-9), "GB/s of float32", "memory_read_1t",
                     rate / read_rate);
}

int main(int argc, char **argv)
{
    static const char *const names[][5] = {
        {"encode_none", "decode_none", "squares_none", "encode_none_from_bf16", "decode_none_past"},
        {"encode_bf16", "decode_bf16", "squares_bf16", "encode_bf16_from_bf16", "decode_bf16_past"},
        {"encode_int8", "decode_int8", "squares_int8", "encode_int8_from_bf16", "decode_int8_past"},
        {"encode_int4", "decode_int4", "squares_int4", "encode_int4_from_bf16", "decode_int4_past"}};
    struct bench_report report = {0};
    struct context context = {.base = dl_alloc_aligned(ELEMENTS * 4ul),
                              .theta = dl_alloc_aligned(ELEMENTS * 4ul),
                              .decoded = dl_alloc_aligned(ELEMENTS * 4ul),
                              .encoded = dl_alloc_aligned(ELEMENTS * 4ul),
                              .base_bf16 = dl_alloc_aligned(ELEMENTS * 2ul)};
    if (context.base == NULL || context.theta == NULL || context.decoded == NULL || context.encoded == NULL ||
        context.base_bf16 == NULL) {
        fprintf(stderr, "bench_codec: no memory\n");
        return 1;
    }
    struct dl_rng rng;
    dl_rng_init(&rng, 1, 1);
    for (size_t i = 0; i < ELEMENTS; i++) {
        context.base[i] = dl_rng_uniform(&rng);
        context.theta[i] = context.base[i] + dl_rng_uniform(&rng) * 1e-3f;
    }
    dl_codec_encode(DL_CODEC_BF16, context.base, BLOCKS, context.base_bf16);
    bench_use_isa(argc > 1 ? argv[1] : NULL);
    find_fastest_way(&context);
    printf("kernels: %s\n", dl_isa_name(dl_isa_current()));
    for (int codec = DL_CODEC_NONE; codec <= DL_CODEC_INT4; codec++) {
        context.codec = (enum dl_codec)codec;
        /* Encoding a delta reads two arrays. */
        measure(&report, names[codec][0], run_encode, &context, ELEMENTS * 8.0);
        measure(&report, names[codec][1], run_decode, &context, ELEMENTS * 4.0);
        measure(&report, names[codec][2], run_squares, &context, ELEMENTS * 4.0);
        measure(&report, names[codec][4], run_decode_past, &context, ELEMENTS * 4.0);
        measure(&report, names[codec][3], run_encode_from_bf16, &context, ELEMENTS * 6.0);
    }
    if (context.sum == 0.5) { /* Never so, but the compiler cannot know: the sums are needed. */
        printf("\n");
    }
    free(context.base);
    free(context.theta);
    free(context.decoded);
    free(context.encoded);
    free(context.base_bf16);
    return bench_write(&report, "build/results/codec.json");
}
