/* The merged gradient and the outer step against references in double. */
#include <math.h>

#include "common/hash.h"
#include "tests/unit/merge_world.h"

#define UNIT 0x1p-24 /* Half a unit in the last place of float32, relative: the error of one rounding. */

/* --- the merged gradient --- */

/* Per element: the gradient in double, and the sum of magnitudes that its rounding errors are relative to. */
static void reference_slice(const struct world *world, const struct dl_slice *slice, enum dl_merge_method method,
                            double *gradient, double *magnitude)
{
    uint32_t count = world->job.push_count;
    double weight_sum = 0;
    double radius = 0;
    double norms[PUSHES_MAX] = {0};
    for (uint32_t m = 0; m < count; m++) {
        const float *x = world->deltas[m] + slice->fragment_offset;
        for (uint64_t i = 0; i < slice->count; i++) {
            norms[m] += (double)x[i] * (double)x[i];
        }
        norms[m] = sqrt(norms[m]);
        weight_sum += world->pushes[m].weight;
        radius += world->pushes[m].weight * norms[m];
    }
    radius /= weight_sum;
    double squares = 0;
    for (uint64_t i = 0; i < slice->count; i++) {
        gradient[i] = 0;
        magnitude[i] = 0;
        for (uint32_t m = 0; m < count; m++) {
            double factor = world->pushes[m].weight / weight_sum;
            if (method == DL_MERGE_RDA) {
                factor = norms[m] > 0 ? factor / norms[m] : 0;
            }
            double product = factor * (double)world->deltas[m][slice->fragment_offset + i];
            gradient[i] += product;
            magnitude[i] += fabs(product);
        }
        squares += gradient[i] * gradient[i];
    }
    double gain = method == DL_MERGE_RDA ? radius / sqrt(squares) : 1;
    for (uint64_t i = 0; i < slice->count; i++) {
        gradient[i] *= gain;
        magnitude[i] *= gain;
    }
}

/* A factor, a product and at most `count` additions round; norms (float32 within a block: 22 roundings, halved by the
 * root) enter twice, and gain and its product round: (count + 2 + 22 + 2) * UNIT of the magnitudes. */
static void check_gradient(struct world *world)
{
    double *gradient = must(malloc(world->padded * sizeof(double)));
    double *magnitude = must(malloc(world->padded * sizeof(double)));
    double total = 0;
    run(world);
    for (uint32_t s = 0; s < world->layout->slice_count; s++) {
        const struct dl_slice *slice = &world->layout->slices[s];
        int is_embedding = tensors[slice->tensor].role == DL_TENSOR_EMBEDDING;
        reference_slice(world, slice, is_embedding ? world->sync.merge.embedding : world->sync.merge.method, gradient,
                        magnitude);
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < slice->count; i++) {
            double got = -(double)world->theta_out[slice->fragment_offset + i];
            wrong += !(fabs(got - gradient[i]) <= (world->job.push_count + 26) * UNIT * magnitude[i]);
            total += gradient[i] * gradient[i];
        }
        CU_ASSERT_EQUAL(wrong, 0);
    }
    CU_ASSERT_TRUE(fabs(world->stats.gradient_norm - sqrt(total)) <= 1e-6 * sqrt(total));
    free(gradient);
    free(magnitude);
}

static void test_gradient_of_all_methods_and_codecs(void)
{
    static const uint32_t counts[] = {1, 2, 3, 8, PUSHES_MAX};
    static struct world world;
    world_init(&world);
    for (size_t c = 0; c < DL_COUNT_OF(counts); c++) {
        for (int codec = -1; codec <= DL_CODEC_INT4; codec++) { /* -1: mixed. */
            fill_pushes(&world, counts[c], codec);
            for (int methods = 0; methods < 4; methods++) {
                world.sync.merge.method = methods & 1 ? DL_MERGE_RDA : DL_MERGE_MEAN;
                world.sync.merge.embedding = methods & 2 ? DL_MERGE_RDA : DL_MERGE_MEAN;
                check_gradient(&world);
                uint32_t rda = counts[c] == 1 ? 0 : (methods & 1 ? 4u : 0u) + (methods & 2 ? 1u : 0u);
                CU_ASSERT_EQUAL(world.stats.slices_rda, rda);
                CU_ASSERT_EQUAL(world.stats.slices_mean, SLICES - rda);
                CU_ASSERT_EQUAL(world.stats.slices_fallback, 0);
            }
        }
    }
    world_release(&world);
}

static void test_one_learner_is_the_identity(void)
{
    static struct world world;
    world_init(&world);
    for (int codec = DL_CODEC_NONE; codec <= DL_CODEC_INT4; codec++) {
        fill_pushes(&world, 1, codec);
        run(&world);
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < world.padded; i++) {
            wrong += -world.theta_out[i] != world.deltas[0][i];
        }
        CU_ASSERT_EQUAL(wrong, 0);
        CU_ASSERT_DOUBLE_EQUAL(world.stats.agreement, 1, 1e-6);
    }
    world_release(&world);
}

/* Deltas that cancel: the mean direction has no length, so the mean of x and -2x, weighted alike, is -x/2. */
static void test_fallback_to_the_mean(void)
{
    static struct world world;
    world_init(&world);
    fill_pushes(&world, 2, DL_CODEC_NONE);
    float *opposite = floats(world.padded);
    for (uint64_t i = 0; i < world.padded; i++) { /* All that the slice "attention" leaves is rounding's size. */
        int is_rounded = i >= world.layout->slices[1].fragment_offset && i < world.layout->slices[2].fragment_offset;
        opposite[i] = -2 * world.deltas[0][i] * (is_rounded && i % 3 == 0 ? 1 + 0x1p-22f : 1);
    }
    set_push(&world, 0, DL_CODEC_NONE, 5, world.deltas[0]);
    set_push(&world, 1, DL_CODEC_NONE, 5, opposite);
    float *result[2];
    for (int is_mean = 0; is_mean < 2; is_mean++) {
        world.sync.merge.method = is_mean ? DL_MERGE_MEAN : DL_MERGE_RDA;
        run(&world);
        CU_ASSERT_EQUAL(world.stats.slices_fallback, is_mean ? 0 : 4);
        CU_ASSERT_EQUAL(world.stats.slices_mean, SLICES);
        result[is_mean] = floats(world.padded);
        memcpy(result[is_mean], world.theta_out, world.padded * sizeof(float));
    }
    CU_ASSERT_EQUAL(dl_hash64(result[0], world.padded * 4, 0), dl_hash64(result[1], world.padded * 4, 0));
    CU_ASSERT_DOUBLE_EQUAL((double)result[0][0], (double)world.deltas[0][0] / 2, 1e-9);
    /* One that outweighs the other leaves a direction. */
    world.sync.merge.method = DL_MERGE_RDA;
    world.pushes[0].weight = 15;
    run(&world);
    CU_ASSERT_EQUAL(world.stats.slices_fallback, 0);
    CU_ASSERT_EQUAL(world.stats.slices_rda, 4);
    for (int i = 0; i < 2; i++) {
        free(result[i]);
    }
    free(opposite);
    world_release(&world);
}

/* phi(0) = 0: a learner that did not move lowers the mean norm and has no say in the direction. */
static void test_zero_deltas(void)
{
    static struct world world;
    world_init(&world);
    fill_pushes(&world, 2, DL_CODEC_NONE);
    float *zeros = floats(world.padded);
    set_push(&world, 0, DL_CODEC_NONE, 3, zeros);
    set_push(&world, 1, DL_CODEC_NONE, 1, world.deltas[1]);
    check_gradient(&world);
    CU_ASSERT_EQUAL(world.stats.slices_rda, 4);
    set_push(&world, 1, DL_CODEC_INT4, 1, zeros);
    run(&world);
    CU_ASSERT_EQUAL(world.stats.gradient_norm, 0);
    CU_ASSERT_EQUAL(world.stats.agreement, 0);
    CU_ASSERT_EQUAL(world.stats.slices_fallback, 0);
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < world.padded; i++) {
        wrong += world.theta_out[i] != 0;
    }
    CU_ASSERT_EQUAL(wrong, 0);
    free(zeros);
    world_release(&world);
}

/* Unrelated deltas of one norm: RDA keeps that norm, the mean shrinks it by sqrt(M), and the agreement says so. */
static void test_rda_keeps_the_norm(void)
{
    static struct world world;
    world_init(&world);
    float *delta = floats(world.padded);
    enum { learners = 8 };
    for (uint32_t m = 0; m < learners; m++) {
        uint64_t state = m;
        for (uint64_t i = 0; i < world.padded; i++) {
            delta[i] = noise(&state);
        }
        set_push(&world, m, DL_CODEC_BF16, 1, delta);
    }
    world.job.push_count = learners;
    double one = sy_merge_norm(world.squares[0], SLICES);
    world.sync.merge.embedding = DL_MERGE_RDA;
    run(&world);
    CU_ASSERT_DOUBLE_EQUAL(world.stats.gradient_norm / one, 1, 0.02);
    CU_ASSERT_DOUBLE_EQUAL(world.stats.agreement, 1 / sqrt(learners), 0.02);
    world.sync.merge.method = DL_MERGE_MEAN;
    world.sync.merge.embedding = DL_MERGE_MEAN;
    run(&world);
    CU_ASSERT_DOUBLE_EQUAL(world.stats.gradient_norm / one, 1 / sqrt(learners), 0.02);
    CU_ASSERT_DOUBLE_EQUAL(world.stats.agreement, 1 / sqrt(learners), 0.02);
    free(delta);
    world_release(&world);
}

/* --- outer optimisers --- */

struct reference { /* One element. */
    double theta, first, second;
};

/* One step in double from the gradient as float32 saw it; returns the error that rounding may make, in units of UNIT.
 */
static double reference_step(const struct dl_sync_spec *sync, uint64_t t, double g, struct reference *x, int *is_tie)
{
    double lr = sync->outer.learning_rate;
    double b1 = sync->outer.momentum;
    double b2 = sync->outer.beta2;
    double kept = x->theta * (1 - lr * sync->outer.weight_decay);
    double update = 0;
    double spread = 0; /* What the update's rounding errors are relative to. */
    double before = x->first;
    switch (sync->outer.type) {
    case DL_OUTER_SGD:
        update = lr * g;
        spread = fabs(update);
        break;
    case DL_OUTER_NESTEROV:
        x->first = b1 * before + g;
        update = lr * (g + b1 * x->first);
        spread = lr * (fabs(g) + b1 * (b1 * fabs(before) + fabs(g)));
        break;
    case DL_OUTER_ADAMW:
        x->first = b1 * before + (1 - b1) * g;
        x->second = b2 * x->second + (1 - b2) * g * g;
        update = lr / (1 - pow(b1, (double)t)) / (sqrt(x->second) / sqrt(1 - pow(b2, (double)t)) + sync->outer.epsilon);
        spread = update * (b1 * fabs(before) + (1 - b1) * fabs(g));
        update *= x->first;
        break;
    case DL_OUTER_LION:
        update = b1 * before + (1 - b1) * g;
        *is_tie = fabs(update) < 64 * UNIT * (b1 * fabs(before) + (1 - b1) * fabs(g));
        update = lr * ((update > 0) - (update < 0));
        spread = fabs(update);
        x->first = b2 * before + (1 - b2) * g;
        break;
    }
    x->theta = kept - update;
    return 3 * fabs(kept) + 8 * (double)t * spread;
}

static void check_optimiser(struct world *world, enum dl_outer_type type, double weight_decay)
{
    enum { rounds = 5 };
    struct reference *expected = must(calloc(world->padded, sizeof *expected));
    double *allowed = must(calloc(world->padded, sizeof *allowed));
    float *gradient = floats(world->padded);
    float *zeros = floats(world->padded);
    struct dl_sync_spec sgd = world->sync;
    struct dl_sync_spec tested = world->sync;
    tested.outer.type = type;
    tested.outer.learning_rate = 0.7;
    tested.outer.momentum = 0.9;
    tested.outer.beta2 = 0.99;
    tested.outer.epsilon = 1e-8;
    tested.outer.weight_decay = weight_decay;
    struct sy_outer_state outer = {.first = floats(world->padded), .second = floats(world->padded)};
    uint64_t state = 9;
    for (uint32_t s = 0; s < SLICES; s++) {
        const struct dl_slice *slice = &world->layout->slices[s];
        for (uint64_t i = slice->fragment_offset; i < slice->fragment_offset + slice->count; i++) {
            world->theta[i] = noise(&state) * 0.02f;
            expected[i].theta = (double)world->theta[i];
        }
    }
    uint64_t wrong = 0;
    for (uint64_t t = 1; t <= rounds; t++) {
        fill_pushes(world, 1 + (uint32_t)t, -1);
        world->sync = sgd;
        world->job.theta = zeros;
        world->job.theta_out = gradient;
        run(world);
        world->sync = tested;
        world->job.theta = world->theta;
        world->job.theta_out = world->theta;
        world->job.scratch = world->scratch;
        world->job.outer = &outer;
        run(world);
        world->job.outer = &world->outer;
        for (uint64_t i = 0; i < world->padded; i++) {
            int is_tie = 0;
            allowed[i] += UNIT * reference_step(&tested, t, -(double)gradient[i], &expected[i], &is_tie);
            if (is_tie) { /* Lion's sign may fall either way: go on from what came out. */
                CU_ASSERT(fabs((double)world->theta[i] - expected[i].theta) <= 2.001 * tested.outer.learning_rate);
                expected[i].theta = (double)world->theta[i];
            }
            wrong += !(fabs((double)world->theta[i] - expected[i].theta) <= allowed[i]);
        }
        CU_ASSERT_EQUAL(outer.steps, t);
    }
    CU_ASSERT_EQUAL(wrong, 0);
    world->sync = sgd;
    world->job.scratch = NULL;
    world->job.theta_out = world->theta_out;
    free(outer.first);
    free(outer.second);
    free(zeros);
    free(gradient);
    free(allowed);
    free(expected);
}

static void test_outer_optimisers(void)
{
    static struct world world;
    world_init(&world);
    for (int type = DL_OUTER_NESTEROV; type <= DL_OUTER_LION; type++) {
        check_optimiser(&world, (enum dl_outer_type)type, 0);
        check_optimiser(&world, (enum dl_outer_type)type, 0.1);
    }
    CU_ASSERT_EQUAL(sy_outer_arrays(DL_OUTER_SGD), 0);
    CU_ASSERT_EQUAL(sy_outer_arrays(DL_OUTER_NESTEROV), 1);
    CU_ASSERT_EQUAL(sy_outer_arrays(DL_OUTER_LION), 1);
    CU_ASSERT_EQUAL(sy_outer_arrays(DL_OUTER_ADAMW), 2);
    world_release(&world);
}

struct growth { /* What was there when it was said to be final. */
    const struct world *world;
    float *theta, *first;
    uint64_t elements, calls, wrong;
};

static void note_ready(void *context, uint64_t elements)
{
    struct growth *growth = context;
    uint64_t more = elements - growth->elements;
    growth->wrong += elements <= growth->elements;
    memcpy(growth->theta + growth->elements, growth->world->theta_out + growth->elements, more * sizeof(float));
    memcpy(growth->first + growth->elements, growth->world->outer.first + growth->elements, more * sizeof(float));
    growth->elements = elements;
    growth->calls++;
}

/* What is written to the disk while the rest is being merged is what the merge leaves in the end. */
static void test_ready_is_final(void)
{
    struct world world;
    world_init(&world);
    world.sync.outer.type = DL_OUTER_NESTEROV;
    world.sync.outer.momentum = 0.9;
    struct growth growth = {.world = &world, .theta = floats(world.padded), .first = floats(world.padded)};
    for (int method = DL_MERGE_MEAN; method <= DL_MERGE_RDA; method++) {
        for (uint32_t threads = 1; threads <= 4; threads++) {
            use_threads(&world, threads);
            fill_pushes(&world, 5, -1);
            world.sync.merge.method = (enum dl_merge_method)method;
            growth.elements = growth.calls = 0;
            world.job.ready = note_ready;
            world.job.context = &growth;
            CU_ASSERT_EQUAL(sy_merge_run(world.merge, &world.sync, &world.job, &world.stats, NULL), DL_OK);
            CU_ASSERT_EQUAL(growth.elements, world.padded);
            CU_ASSERT(growth.calls > 1 && growth.wrong == 0);
            CU_ASSERT_EQUAL(memcmp(growth.theta, world.theta_out, world.padded * sizeof(float)), 0);
            CU_ASSERT_EQUAL(memcmp(growth.first, world.outer.first, world.padded * sizeof(float)), 0);
        }
    }
    free(growth.theta);
    free(growth.first);
    world_release(&world);
}

struct emitted { /* Each thread's blocks are its own. */
    float *values;
    unsigned char *times; /* A block's. */
};

static void keep_emitted(void *context, uint64_t offset, const float *values, size_t blocks)
{
    const struct emitted *emitted = context;
    memcpy(emitted->values + offset, values, blocks * DL_BLOCK * sizeof *values);
    for (size_t b = 0; b < blocks; b++) {
        emitted->times[offset / DL_BLOCK + b]++;
    }
}

static uint64_t wrong_in_pieces(const struct world *world, const float *pieces, const float *expected)
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < world->padded; i++) {
        uint64_t piece = i / world->job.piece_elements, gap = world->job.gap_elements;
        wrong += memcmp(&pieces[i + piece * gap], &expected[i], sizeof(float)) != 0;
        bool is_end = i % world->job.piece_elements == world->job.piece_elements - 1 && i + 1 < world->padded;
        for (uint64_t g = 1; is_end && g <= gap; g++) { /* What lies between is left alone. */
            wrong += pieces[i + piece * gap + g] != 7.0f;
        }
    }
    return wrong;
}

/* A version that lies in pieces has the bits of one that does not; and what is emitted is the version, each block once. */
static void test_pieces(void)
{
    static const uint64_t pieces[] = {DL_BLOCK, 3 * DL_BLOCK, 24 * DL_BLOCK, 1000 * DL_BLOCK};
    struct world world;
    world_init(&world);
    world.sync.outer.type = DL_OUTER_NESTEROV;
    world.sync.outer.learning_rate = 0.7;
    world.sync.outer.momentum = 0.9;
    uint64_t room = world.padded + (world.padded / DL_BLOCK + 1) * 16;
    struct emitted emitted = {.values = floats(world.padded), .times = must(calloc(world.padded / DL_BLOCK, 1))};
    float *theta = floats(room), *theta_out = floats(room);
    uint64_t state = 3;
    for (uint64_t i = 0; i < world.padded; i++) {
        world.theta[i] = noise(&state);
    }
    for (int method = DL_MERGE_MEAN; method <= DL_MERGE_RDA; method++) {
        fill_pushes(&world, 5, -1);
        world.sync.merge.method = (enum dl_merge_method)method;
        memset(world.outer.first, 0, world.padded * sizeof(float));
        run(&world);
        struct sy_merge_job contiguous = world.job;
        for (size_t p = 0; p < DL_COUNT_OF(pieces) * 3; p++) {
            use_threads(&world, 1 + (uint32_t)p % 3);
            world.job.piece_elements = pieces[p / 3];
            world.job.gap_elements = 16;
            for (uint64_t i = 0; i < room; i++) {
                theta_out[i] = 7.0f;
            }
            for (uint64_t i = 0; i < world.padded; i++) {
                theta[i + i / pieces[p / 3] * 16] = world.theta[i];
            }
            world.job.theta = theta;
            world.job.theta_out = theta_out;
            world.job.emit = keep_emitted;
            world.job.context = &emitted;
            memset(world.outer.first, 0, world.padded * sizeof(float));
            memset(emitted.times, 0, world.padded / DL_BLOCK);
            run(&world);
            CU_ASSERT_EQUAL(wrong_in_pieces(&world, theta_out, contiguous.theta_out), 0);
            CU_ASSERT_EQUAL(memcmp(emitted.values, contiguous.theta_out, world.padded * sizeof(float)), 0);
            uint64_t not_once = 0;
            for (uint64_t b = 0; b < world.padded / DL_BLOCK; b++) {
                not_once += emitted.times[b] != 1;
            }
            CU_ASSERT_EQUAL(not_once, 0);
            world.job = contiguous;
        }
    }
    free(emitted.values);
    free(emitted.times);
    free(theta);
    free(theta_out);
    world_release(&world);
}

UNIT_MAIN("merge", {"gradient", test_gradient_of_all_methods_and_codecs},
          {"one learner", test_one_learner_is_the_identity}, {"fallback", test_fallback_to_the_mean},
          {"zero deltas", test_zero_deltas}, {"rda keeps the norm", test_rda_keeps_the_norm},
          {"outer optimisers", test_outer_optimisers}, {"ready is final", test_ready_is_final}, {"pieces", test_pieces})
