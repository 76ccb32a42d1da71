/* The fixture of the merge's tests: a fragment of five slices, pushes, buffers. A test program includes it once. */
#ifndef DL_TESTS_MERGE_WORLD_H
#define DL_TESTS_MERGE_WORLD_H

#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "syncer/merge/merge.h"
#include "tests/unit/unit.h"

#define PUSHES_MAX 11
/* Slices that end within a block, within a tile, at a tile's end, and that take several tiles; both roles. */
static const struct dl_tensor tensors[] = {
    {.name = "embedding", .rank = 2, .shape = {300, 20}, .role = DL_TENSOR_EMBEDDING},
    {.name = "attention", .rank = 2, .shape = {100, 100}},
    {.name = "norm", .rank = 1, .shape = {77}},
    {.name = "square", .rank = 2, .shape = {64, 256}},
    {.name = "ffn", .rank = 2, .shape = {41, 1000}},
};
#define SLICES 5

struct world {
    struct dl_layout *layout;
    struct sy_pool *pool;
    struct sy_merge *merge;
    uint64_t padded;
    struct dl_sync_spec sync;
    struct sy_push pushes[PUSHES_MAX];
    double squares[PUSHES_MAX][SLICES];
    float *deltas[PUSHES_MAX]; /* As the receiver decodes them. */
    uint8_t *encoded[PUSHES_MAX];
    float *theta, *theta_out, *scratch;
    struct sy_outer_state outer;
    struct sy_merge_job job;
    struct sy_merge_stats stats;
};

static inline void *must(void *memory)
{
    if (memory == NULL) {
        abort();
    }
    return memory;
}

static inline float *floats(uint64_t count)
{
    return must(dl_alloc_aligned(count * sizeof(float)));
}

static inline void use_threads(struct world *world, uint32_t threads)
{
    sy_merge_free(world->merge);
    sy_pool_free(world->pool);
    CU_ASSERT_EQUAL_FATAL(sy_pool_new(threads, &world->pool, NULL), DL_OK);
    CU_ASSERT_EQUAL_FATAL(sy_merge_new(world->layout, world->pool, PUSHES_MAX, &world->merge, NULL), DL_OK);
}

static inline void measure_push(struct world *world, uint32_t m)
{
    struct sy_push *push = &world->pushes[m];
    for (uint32_t s = 0; s < world->layout->slice_count; s++) {
        const struct dl_slice *slice = &world->layout->slices[s];
        world->squares[m][s] =
            dl_codec_sum_squares(push->codec, push->encoded + dl_codec_bytes(push->codec, slice->fragment_offset),
                                 (slice->count + DL_BLOCK - 1) / DL_BLOCK, 0);
    }
    dl_codec_decode(push->codec, push->encoded, world->padded / DL_BLOCK, world->deltas[m]);
}

/* Encodes `delta` as push m; its learner id is 3 m + 1. */
static inline void set_push(struct world *world, uint32_t m, enum dl_codec codec, double weight, const float *delta)
{
    dl_codec_encode(codec, delta, world->padded / DL_BLOCK, world->encoded[m]);
    world->pushes[m] = (struct sy_push){.learner = 3 * m + 1,
                                        .codec = codec,
                                        .encoded = world->encoded[m],
                                        .weight = weight,
                                        .sum_squares = world->squares[m]};
    measure_push(world, m);
}

/* Noise that is cheap also under the sanitizers: the sum of two uniform numbers, -1 to 1. */
static inline float noise(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(int32_t)(*state >> 32) * 0x1p-32f + (float)(int16_t)(*state >> 16) * 0x1p-16f;
}

/* Deltas of unlike sizes; what all share is small beside each one's own. Gaps are zeros, as learners send them. `codec`
 * -1: mixed. */
static inline void fill_pushes(struct world *world, uint32_t count, int codec)
{
    float *delta = floats(world->padded);
    for (uint32_t m = 0; m < count; m++) {
        uint64_t own = 1000 + m;
        uint64_t shared = 1;
        for (uint32_t s = 0; s < world->layout->slice_count; s++) {
            const struct dl_slice *slice = &world->layout->slices[s];
            for (uint64_t i = 0; i < slice->count; i++) {
                delta[slice->fragment_offset + i] = (noise(&own) + 0.3f * noise(&shared)) * 1e-3f * (float)(m + 1);
            }
        }
        enum dl_codec used = codec < 0 ? (enum dl_codec)(m * 7 / 2 % 4) : (enum dl_codec)codec;
        set_push(world, m, used, 1e6 * (double)(1 + m % 3), delta);
    }
    world->job.push_count = count;
    free(delta);
}

static inline void world_init(struct world *world)
{
    *world = (struct world){0};
    CU_ASSERT_EQUAL_FATAL(dl_layout_new(tensors, SLICES, 1, DL_LAYOUT_TENSOR, &world->layout, NULL), DL_OK);
    world->padded = world->layout->fragments[0].padded_elements;
    for (uint32_t m = 0; m < PUSHES_MAX; m++) {
        world->deltas[m] = floats(world->padded);
        world->encoded[m] = must(malloc(world->padded * 4));
    }
    world->theta = floats(world->padded);
    world->theta_out = floats(world->padded);
    world->scratch = floats(world->padded);
    world->outer.first = floats(world->padded);
    world->outer.second = floats(world->padded);
    world->job = (struct sy_merge_job){
        .pushes = world->pushes, .theta = world->theta, .theta_out = world->theta_out, .outer = &world->outer};
    /* With Theta zero and rate one, sgd makes the new Theta the negative gradient itself. */
    world->sync.outer.type = DL_OUTER_SGD;
    world->sync.outer.learning_rate = 1;
    world->sync.merge.method = DL_MERGE_RDA;
    world->sync.merge.embedding = DL_MERGE_MEAN;
    use_threads(world, 1);
}

static inline void world_release(struct world *world)
{
    sy_merge_free(world->merge);
    sy_pool_free(world->pool);
    dl_layout_free(world->layout);
    for (uint32_t m = 0; m < PUSHES_MAX; m++) {
        free(world->deltas[m]);
        free(world->encoded[m]);
    }
    free(world->theta);
    free(world->theta_out);
    free(world->scratch);
    free(world->outer.first);
    free(world->outer.second);
}

static inline void run(struct world *world)
{
    struct dl_err err = {0};
    enum dl_rc rc = sy_merge_run(world->merge, &world->sync, &world->job, &world->stats, &err);
    if (rc != DL_OK) {
        printf("%s ", err.text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
}

#endif
