/* Codecs: encoding a delta, decoding, and sums of squares, in GB/s of float32, beside the read rate of memory. */
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
    uint8_t *encoded;
    double sum;
};

static void run_read(void *opaque)
{
    struct context *context = opaque;
    const uint8_t *const arrays[] = {(const uint8_t *)context->base, (const uint8_t *)context->theta};
    context->sum += (double)bench_read(arrays, 2, 0, ELEMENTS * 4ul);
}

static void run_encode(void *opaque)
{
    struct context *context = opaque;
    dl_codec_encode_delta(context->codec, context->base, context->theta, BLOCKS, context->encoded);
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
    bench_measure_pair(run_read, run, context, REPEATS, &read, &stats);
    double rate = bytes / stats.median * 1e-9;
    double read_rate = ELEMENTS * 8.0 / read.median * 1e-9;
    bench_add_spread(report, name, bench_rates(stats, bytes * 1e-9), "GB/s of float32", "memory_read_1t",
                     rate / read_rate);
}

int main(void)
{
    static const char *const names[][3] = {{"encode_none", "decode_none", "squares_none"},
                                           {"encode_bf16", "decode_bf16", "squares_bf16"},
                                           {"encode_int8", "decode_int8", "squares_int8"},
                                           {"encode_int4", "decode_int4", "squares_int4"}};
    struct bench_report report = {0};
    struct context context = {.base = dl_alloc_aligned(ELEMENTS * 4ul),
                              .theta = dl_alloc_aligned(ELEMENTS * 4ul),
                              .decoded = dl_alloc_aligned(ELEMENTS * 4ul),
                              .encoded = dl_alloc_aligned(ELEMENTS * 4ul)};
    if (context.base == NULL || context.theta == NULL || context.decoded == NULL || context.encoded == NULL) {
        fprintf(stderr, "bench_codec: no memory\n");
        return 1;
    }
    struct dl_rng rng;
    dl_rng_init(&rng, 1, 1);
    for (size_t i = 0; i < ELEMENTS; i++) {
        context.base[i] = dl_rng_uniform(&rng);
        context.theta[i] = context.base[i] + dl_rng_uniform(&rng) * 1e-3f;
    }
    printf("kernels: %s\n", dl_isa_name(dl_isa_current()));
    for (int codec = DL_CODEC_NONE; codec <= DL_CODEC_INT4; codec++) {
        context.codec = (enum dl_codec)codec;
        /* Encoding a delta reads two arrays. */
        measure(&report, names[codec][0], run_encode, &context, ELEMENTS * 8.0);
        measure(&report, names[codec][1], run_decode, &context, ELEMENTS * 4.0);
        measure(&report, names[codec][2], run_squares, &context, ELEMENTS * 4.0);
    }
    if (context.sum == 0.5) { /* Never so, but the compiler cannot know: the sums are needed. */
        printf("\n");
    }
    free(context.base);
    free(context.theta);
    free(context.decoded);
    free(context.encoded);
    return bench_write(&report, "build/results/codec.json");
}
