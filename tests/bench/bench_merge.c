/* The merge of 8 pushes of a 100 MB fragment, beside the rate at which this machine reads memory in the same run.
 *
 * Reading goes over the pushes' arrays, in turn with each merge, in whichever of the ways of bench_read is fastest here. Memory
 * is the syncer's (large pages). A merge's rate counts the bytes it has to move: each push once, Theta and momentum read,
 * new Theta and momentum written; RDA writes and reads the mean direction besides. One thread is timed by the processor
 * time that it gets, two by the clock.
 * bench_merge [FRAGMENT_MB [REPEATS [portable | avx2 | avx512]]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/isa.h"
#include "common/mem.h"
#include "common/rng.h"
#include "syncer/merge/merge.h"
#include "syncer/server/buffers.h"
#include "tests/bench/bench.h"

#define LEARNERS 8
#define WIDTH 2048
#define CHUNK (64 * 1024) /* Bytes that a reading job takes from each array. */
#define CALIBRATIONS 5

struct bench {
    struct dl_layout *layout;
    struct sy_pool *pools[2];
    struct sy_merge *merges[2];
    struct dl_sync_spec sync;
    struct sy_push pushes[LEARNERS];
    uint8_t *encoded[LEARNERS];
    double *squares[LEARNERS];
    float *theta, *theta_out;
    struct sy_outer_state outer;
    uint64_t padded;
    uint32_t threads;
    struct sy_buffers *buffers;
    uint64_t read_bytes, sum;
    size_t granule[2]; /* Of the fastest way to read, by threads. */
    struct bench_report report;
    double read_rates[2][2 * BENCH_REPEATS_MAX];
    uint32_t read_count[2];
};

static void read_range(void *opaque, uint64_t begin, uint64_t end)
{
    struct bench *bench = opaque;
    uint64_t sum = bench_read((const uint8_t *const *)bench->encoded, LEARNERS, begin * CHUNK, end * CHUNK,
                              bench->granule[bench->threads - 1]);
    __atomic_fetch_add(&bench->sum, sum, __ATOMIC_RELAXED);
}

static void run_read(void *opaque)
{
    struct bench *bench = opaque;
    sy_pool_run(bench->pools[bench->threads - 1], read_range, NULL, bench, bench->read_bytes / CHUNK);
}

static void run_merge(void *opaque)
{
    struct bench *bench = opaque;
    struct sy_merge_job job = {.pushes = bench->pushes,
                               .push_count = LEARNERS,
                               .theta = bench->theta,
                               .theta_out = bench->theta_out,
                               .outer = &bench->outer};
    struct sy_merge_stats stats;
    struct dl_err err;
    if (sy_merge_run(bench->merges[bench->threads - 1], &bench->sync, &job, &stats, &err) != DL_OK) {
        fprintf(stderr, "bench_merge: %s\n", err.text);
        exit(1);
    }
}

static void must_be_ok(enum dl_rc rc, const struct dl_err *err)
{
    if (rc != DL_OK) {
        fprintf(stderr, "bench_merge: %s\n", err->text);
        exit(1);
    }
}

static void *must(void *memory)
{
    if (memory == NULL) {
        fprintf(stderr, "bench_merge: no memory\n");
        exit(1);
    }
    return memory;
}

/* As the syncer's pushes and versions have it. */
static void *take(struct bench *bench, size_t bytes)
{
    return memset(must(sy_buffers_take(bench->buffers, bytes)), 0, bytes);
}

static double (*clock_of(uint32_t threads))(void (*run)(void *context), void *context)
{
    return threads == 1 ? bench_processor_seconds : bench_seconds;
}

static void find_fastest_way(struct bench *bench, uint32_t threads)
{
    size_t fastest = 0;
    double least = 0;
    bench->threads = threads;
    for (uint32_t i = 0; i < CALIBRATIONS * BENCH_READ_WAYS; i++) {
        bench->granule[threads - 1] = bench_read_granules[i % BENCH_READ_WAYS];
        double seconds = clock_of(threads)(run_read, bench);
        if (fastest == 0 || seconds < least) {
            least = seconds;
            fastest = bench->granule[threads - 1];
        }
    }
    bench->granule[threads - 1] = fastest;
    printf("memory is read fastest by %zu bytes of an array at a time, on %u threads\n", fastest, threads);
}

static void set_up(struct bench *bench, double megabytes)
{
    /* Square matrices and the vectors beside them, as in a transformer; all in one fragment. */
    static struct dl_tensor tensors[512];
    uint32_t count = 0;
    for (uint64_t left = (uint64_t)(megabytes * 250e3); left >= WIDTH && count < 511; count += 2) {
        uint64_t rows = DL_MIN(left / WIDTH, WIDTH);
        left -= rows * WIDTH;
        tensors[count] = (struct dl_tensor){.rank = 2, .shape = {rows, WIDTH}};
        tensors[count + 1] = (struct dl_tensor){.rank = 1, .shape = {WIDTH}};
        snprintf(tensors[count].name, DL_TENSOR_NAME_MAX, "weight.%u", count);
        snprintf(tensors[count + 1].name, DL_TENSOR_NAME_MAX, "norm.%u", count);
    }
    struct dl_err err;
    must_be_ok(dl_layout_new(tensors, count, 1, DL_LAYOUT_TENSOR, &bench->layout, &err), &err);
    bench->padded = bench->layout->fragments[0].padded_elements;
    for (uint32_t i = 0; i < 2; i++) {
        must_be_ok(sy_pool_new(i + 1, &bench->pools[i], &err), &err);
        must_be_ok(sy_merge_new(bench->layout, bench->pools[i], LEARNERS, &bench->merges[i], &err), &err);
    }
    bench->sync.outer.type = DL_OUTER_NESTEROV;
    bench->sync.outer.learning_rate = 1e-6; /* Theta stays where it is over many runs. */
    bench->sync.outer.momentum = 0.9;
    bench->buffers = must(sy_buffers_new());
    bench->theta = take(bench, bench->padded * 4);
    bench->theta_out = take(bench, bench->padded * 4);
    bench->outer.first = must(dl_alloc_aligned(bench->padded * 4));
    bench->read_bytes = bench->padded * 4 / CHUNK * CHUNK;
    struct dl_rng rng;
    dl_rng_init(&rng, 1, 1);
    for (uint32_t m = 0; m < LEARNERS; m++) {
        bench->encoded[m] = take(bench, bench->padded * 4);
        bench->squares[m] = must(calloc(bench->layout->slice_count, sizeof(double)));
    }
    for (uint64_t i = 0; i < bench->padded; i++) {
        bench->theta[i] = dl_rng_uniform(&rng);
    }
}

/* Encodes each learner's delta: noise of its own around what all share. */
static void encode(struct bench *bench, enum dl_codec codec)
{
    float *delta = must(dl_alloc_aligned(bench->padded * 4));
    for (uint32_t m = 0; m < LEARNERS; m++) {
        uint32_t state = m * 7919 + 1;
        for (uint64_t i = 0; i < bench->padded; i++) {
            state = state * 1664525u + 1013904223u;
            delta[i] = ((float)(state >> 8) * 0x1p-24f - 0.5f) * 1e-3f + bench->theta[i] * 1e-4f;
        }
        dl_codec_encode(codec, delta, bench->padded / DL_BLOCK, bench->encoded[m]);
        for (uint32_t s = 0; s < bench->layout->slice_count; s++) {
            const struct dl_slice *slice = &bench->layout->slices[s];
            bench->squares[m][s] =
                dl_codec_sum_squares(codec, bench->encoded[m] + dl_codec_bytes(codec, slice->fragment_offset),
                                     (slice->count + DL_BLOCK - 1) / DL_BLOCK, 0);
        }
        bench->pushes[m] = (struct sy_push){.learner = m,
                                            .codec = codec,
                                            .encoded = bench->encoded[m],
                                            .weight = 1.0 + m,
                                            .sum_squares = bench->squares[m]};
    }
    free(delta);
}

static void measure(struct bench *bench, const char *name, enum dl_codec codec, enum dl_merge_method method,
                    uint32_t threads, uint32_t repeats)
{
    static const char *const yardsticks[] = {"memory_read_1t", "memory_read_2t"};
    bench->threads = threads;
    bench->sync.merge.method = method;
    double arrays = method == DL_MERGE_RDA ? 6 : 4;
    double bytes = (double)dl_codec_bytes(codec, bench->padded) * LEARNERS + arrays * 4 * (double)bench->padded;
    struct bench_stats read;
    struct bench_stats stats;
    bench_measure_pair(clock_of(threads), run_read, run_merge, bench, repeats, &read, &stats);
    double rate = bytes / stats.median * 1e-9;
    double read_rate = (double)bench->read_bytes * LEARNERS / read.median * 1e-9;
    bench->read_rates[threads - 1][bench->read_count[threads - 1]++] = read_rate;
    bench_add_spread(&bench->report, name, bench_scale(stats, 1e3), "ms", yardsticks[threads - 1], rate / read_rate);
    printf("%-20s %5.1f GB/s, %.2f of %s (%.1f GB/s)\n", name, rate, rate / read_rate, yardsticks[threads - 1],
           read_rate);
}

int main(int argc, char **argv)
{
    static const char *const names[4][2][2] = {
        {{"merge_mean_1t", "merge_mean_2t"}, {"merge_rda_1t", "merge_rda_2t"}},
        {{"merge_mean_bf16_1t", "merge_mean_bf16_2t"}, {"merge_rda_bf16_1t", "merge_rda_bf16_2t"}},
        {{"merge_mean_int8_1t", "merge_mean_int8_2t"}, {"merge_rda_int8_1t", "merge_rda_int8_2t"}},
        {{"merge_mean_int4_1t", "merge_mean_int4_2t"}, {"merge_rda_int4_1t", "merge_rda_int4_2t"}},
    };
    static const char *const reads[] = {"memory_read_1t", "memory_read_2t"};
    static struct bench bench;
    double megabytes = argc > 1 ? strtod(argv[1], NULL) : 100;
    uint32_t repeats = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 9;
    bench_use_isa(argc > 3 ? argv[3] : NULL);
    set_up(&bench, megabytes);
    printf("%d learners, fragment of %.0f MB, kernels %s\n", LEARNERS, (double)bench.padded * 4e-6,
           dl_isa_name(dl_isa_current()));
    for (uint32_t threads = 1; threads <= 2; threads++) {
        find_fastest_way(&bench, threads);
    }
    for (int codec = DL_CODEC_NONE; codec <= DL_CODEC_INT4; codec++) {
        encode(&bench, (enum dl_codec)codec);
        for (uint32_t threads = 1; threads <= 2; threads++) {
            for (int method = DL_MERGE_MEAN; method <= DL_MERGE_RDA; method++) {
                measure(&bench, names[codec][method][threads - 1], (enum dl_codec)codec, (enum dl_merge_method)method,
                        threads, repeats);
            }
        }
    }
    for (uint32_t i = 0; i < 2; i++) {
        struct bench_stats rates = bench_stats_of(bench.read_rates[i], bench.read_count[i]);
        bench_add_spread(&bench.report, reads[i], rates, "GB/s", NULL, 0);
    }
    for (uint32_t m = 0; m < LEARNERS; m++) {
        sy_buffers_give(bench.buffers, bench.encoded[m]);
        free(bench.squares[m]);
    }
    for (uint32_t i = 0; i < 2; i++) {
        sy_merge_free(bench.merges[i]);
        sy_pool_free(bench.pools[i]);
    }
    sy_buffers_give(bench.buffers, bench.theta);
    sy_buffers_give(bench.buffers, bench.theta_out);
    sy_buffers_free(bench.buffers);
    free(bench.outer.first);
    dl_layout_free(bench.layout);
    return bench_write(&bench.report, "build/results/merge.json");
}
