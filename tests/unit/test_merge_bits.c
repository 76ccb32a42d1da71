/* The merge against itself: equal bits whatever the threads, instruction set or buffers; and what must be kept out. */
#include <math.h>

#include "common/hash.h"
#include "common/isa.h"
#include "common/rng.h"
#include "tests/unit/merge_world.h"

/* --- equal bits --- */

/* Two rounds from a fixed state; the hash of Theta, state and statistics. */
static uint64_t two_rounds(struct world *world, int in_place)
{
    struct sy_outer_state outer = {.first = floats(world->padded), .second = floats(world->padded)};
    uint64_t hash = 0;
    for (uint64_t i = 0; i < world->padded; i++) {
        world->theta[i] = (float)(i % 977) * 1e-3f;
    }
    world->job.outer = &outer;
    world->job.theta_out = in_place ? world->theta : world->theta_out;
    world->job.scratch = in_place ? world->scratch : NULL;
    for (int round = 0; round < 2; round++) {
        run(world);
        memcpy(world->theta, world->job.theta_out, in_place ? 0 : world->padded * sizeof(float));
        hash = dl_hash64(world->theta, world->padded * 4, hash);
        hash = dl_hash64(&world->stats.gradient_norm, sizeof(double), hash);
        hash = dl_hash64(&world->stats.agreement, sizeof(double), hash);
    }
    hash = dl_hash64(outer.first, world->padded * 4, hash);
    hash = dl_hash64(outer.second, world->padded * 4, hash);
    world->job.outer = &world->outer;
    free(outer.first);
    free(outer.second);
    return hash;
}

static void test_equal_bits(void)
{
    static struct world world;
    world_init(&world);
    enum dl_isa best = dl_isa_current();
    world.sync.outer.learning_rate = 0.7;
    world.sync.outer.momentum = 0.9;
    world.sync.outer.beta2 = 0.99;
    world.sync.outer.epsilon = 1e-8;
    fill_pushes(&world, PUSHES_MAX, -1);
    int compared = 0;
    for (int type = DL_OUTER_NESTEROV; type <= DL_OUTER_LION; type++) {
        world.sync.outer.type = (enum dl_outer_type)type;
        use_threads(&world, 1);
        CU_ASSERT_TRUE_FATAL(dl_isa_force(DL_ISA_PORTABLE));
        uint64_t expected = two_rounds(&world, 0);
        for (int isa = 0; isa < DL_ISA_COUNT; isa++) {
            for (uint32_t threads = 1; dl_isa_force((enum dl_isa)isa) && threads <= 4; threads++) {
                use_threads(&world, threads);
                CU_ASSERT_EQUAL(two_rounds(&world, 0), expected);
                CU_ASSERT_EQUAL(two_rounds(&world, 1), expected);
                compared += 2;
            }
        }
    }
    CU_ASSERT_TRUE(dl_isa_force(best));
    /* A push without weight changes nothing but by its absence from every sum. */
    uint64_t without = 0;
    for (int is_left_out = 0; is_left_out < 2; is_left_out++) {
        world.pushes[PUSHES_MAX - 1].weight = 0;
        world.job.push_count = PUSHES_MAX - (uint32_t)is_left_out;
        uint64_t hash = two_rounds(&world, 0);
        CU_ASSERT_TRUE(is_left_out == 0 || hash == without);
        without = hash;
    }
    printf("(%d comparisons) ", compared);
    world_release(&world);
}

/* A fragment large enough to be written past the caches. */
static void test_large_fragment(void)
{
    static const struct dl_tensor large = {.name = "large", .rank = 2, .shape = {1100, 1000}};
    struct world *world = must(calloc(1, sizeof *world));
    CU_ASSERT_EQUAL_FATAL(dl_layout_new(&large, 1, 1, DL_LAYOUT_TENSOR, &world->layout, NULL), DL_OK);
    world->padded = world->layout->fragments[0].padded_elements;
    world->theta = floats(world->padded);
    world->theta_out = floats(world->padded);
    world->scratch = floats(world->padded);
    for (uint32_t m = 0; m < 2; m++) {
        world->deltas[m] = floats(world->padded);
        world->encoded[m] = must(malloc(world->padded * 4));
    }
    world->job = (struct sy_merge_job){.pushes = world->pushes, .theta = world->theta};
    world->sync.merge.method = DL_MERGE_RDA;
    world->sync.outer.learning_rate = 0.5;
    world->sync.outer.momentum = 0.5;
    fill_pushes(world, 2, DL_CODEC_INT8);
    use_threads(world, 1);
    uint64_t expected = two_rounds(world, 1);
    for (uint32_t threads = 1; threads <= 3; threads++) {
        use_threads(world, threads);
        CU_ASSERT_EQUAL(two_rounds(world, 0), expected);
    }
    world_release(world);
    free(world);
}

/* --- what must be refused or kept out --- */

static void test_gaps_stay_zero(void)
{
    static struct world world;
    world_init(&world);
    fill_pushes(&world, 3, DL_CODEC_NONE);
    float *delta = floats(world.padded);
    for (uint64_t i = 0; i < world.padded; i++) {
        delta[i] = 1; /* Also where there is no parameter. */
    }
    set_push(&world, 1, DL_CODEC_NONE, 1, delta);
    world.sync.outer.type = DL_OUTER_ADAMW;
    world.sync.outer.momentum = 0.9;
    world.sync.outer.beta2 = 0.9;
    run(&world);
    uint64_t wrong = 0;
    uint64_t gaps = 0;
    for (uint32_t s = 0; s < SLICES; s++) {
        const struct dl_slice *slice = &world.layout->slices[s];
        uint64_t end = s + 1 < SLICES ? world.layout->slices[s + 1].fragment_offset : world.padded;
        for (uint64_t i = slice->fragment_offset + slice->count; i < end; i++) {
            gaps++;
            wrong += world.theta_out[i] != 0 || world.outer.first[i] != 0 || world.outer.second[i] != 0;
        }
    }
    CU_ASSERT_TRUE(gaps > 0);
    CU_ASSERT_EQUAL(wrong, 0);
    free(delta);
    world_release(&world);
}

/* A scale without integers is legal, and finite by its sums; it must not become infinity times zero. */
static void test_hostile_scale(void)
{
    static struct world world;
    world_init(&world);
    float *tiny = floats(world.padded);
    for (int codec = DL_CODEC_INT8; codec <= DL_CODEC_INT4; codec++) {
        fill_pushes(&world, 2, codec);
        for (uint32_t m = 0; m < 2; m++) { /* Small norms make large factors. */
            for (uint64_t i = 0; i < world.padded; i++) {
                tiny[i] = world.deltas[m][i] * 1e-20f;
            }
            set_push(&world, m, (enum dl_codec)codec, 1, tiny);
        }
        size_t bytes = dl_codec_block_bytes((enum dl_codec)codec);
        float largest = 3e38f;
        memset(world.encoded[0], 0, bytes);
        memcpy(world.encoded[0], &largest, sizeof largest);
        measure_push(&world, 0);
        for (int method = DL_MERGE_MEAN; method <= DL_MERGE_RDA; method++) {
            world.sync.merge.method = (enum dl_merge_method)method;
            world.sync.merge.embedding = (enum dl_merge_method)method;
            run(&world);
            uint64_t not_finite = 0;
            for (uint64_t i = 0; i < world.padded; i++) {
                not_finite += isfinite(world.theta_out[i]) ? 0 : 1;
            }
            CU_ASSERT_EQUAL(not_finite, 0);
            CU_ASSERT_TRUE(world.theta_out[0] != 0);
            CU_ASSERT_EQUAL(world.stats.slices_rda, method == DL_MERGE_RDA ? SLICES : 0);
        }
    }
    free(tiny);
    world_release(&world);
}

static void test_refuses_what_is_not_finite(void)
{
    static struct world world;
    world_init(&world);
    fill_pushes(&world, 3, DL_CODEC_NONE);
    static const double bad_weights[] = {(double)NAN, (double)INFINITY, -1};
    struct dl_err err;
    world.theta_out[0] = 42;
    for (size_t i = 0; i < DL_COUNT_OF(bad_weights); i++) {
        world.pushes[1].weight = bad_weights[i];
        CU_ASSERT_EQUAL(sy_merge_run(world.merge, &world.sync, &world.job, &world.stats, &err), DL_EINVAL);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "learner 4 has weight"));
    }
    world.pushes[1].weight = 1;
    world.squares[2][3] = (double)NAN;
    CU_ASSERT_EQUAL(sy_merge_run(world.merge, &world.sync, &world.job, &world.stats, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "learner 7"));
    world.squares[2][3] = 1;
    for (int m = 0; m < 3; m++) {
        world.pushes[m].weight = 0;
    }
    CU_ASSERT_EQUAL(sy_merge_run(world.merge, &world.sync, &world.job, &world.stats, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(world.theta_out[0], 42);
    CU_ASSERT_EQUAL(world.outer.steps, 0);
    world_release(&world);
}

UNIT_MAIN("merge bits", {"equal bits", test_equal_bits}, {"large fragment", test_large_fragment},
          {"gaps stay zero", test_gaps_stay_zero}, {"hostile scale", test_hostile_scale},
          {"not finite", test_refuses_what_is_not_finite})
