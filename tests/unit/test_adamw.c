/* AdamW: schedule, clipping, decay, against a plain reference in double. */
#include <math.h>
#include <string.h>

#include "common/mem.h"
#include "common/pool.h"
#include "common/rng.h"
#include "tests/unit/unit.h"
#include "worker/model/adamw.h"
#include "worker/model/kernels.h"

enum { rows = 300, columns = 333, norm_width = 37, matrix = rows * columns }; /* More than one chunk; odd sizes. */

struct fixture {
    struct dl_inner_spec spec;
    struct dl_tensor tensors[2];
    float matrix_values[matrix + 16], matrix_gradient[matrix], norm_values[norm_width + 16], norm_gradient[norm_width];
    float *parameters[2], *gradients[2];
    struct dl_pool *pool;
    struct wk_adamw *adamw;
};

static struct dl_inner_spec plain_spec(void)
{
    return (struct dl_inner_spec){.learning_rate = 1e-2,
                                  .min_learning_rate_ratio = 0.1,
                                  .warmup_steps = 4,
                                  .decay_steps = 20,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .epsilon = 1e-8,
                                  .weight_decay = 0.1,
                                  .clip_norm = 1};
}

static void draw(float *x, uint32_t count, uint64_t stream)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 1, stream);
    for (uint32_t i = 0; i < count; i++) {
        x[i] = dl_rng_normal(&rng);
    }
}

static struct fixture *make_fixture(uint32_t threads)
{
    struct fixture *f = calloc(1, sizeof *f);
    f->spec = plain_spec();
    f->tensors[0] = (struct dl_tensor){.name = "w", .rank = 2, .shape = {rows, columns}};
    f->tensors[1] = (struct dl_tensor){.name = "n", .rank = 1, .shape = {norm_width}};
    f->parameters[0] = f->matrix_values;
    f->parameters[1] = f->norm_values;
    f->gradients[0] = f->matrix_gradient;
    f->gradients[1] = f->norm_gradient;
    draw(f->matrix_values, matrix, 1);
    draw(f->norm_values, norm_width, 2);
    for (int i = 0; i < 16; i++) { /* Guards behind the arrays. */
        f->matrix_values[matrix + i] = 42;
        f->norm_values[norm_width + i] = 42;
    }
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(dl_pool_new(threads, DL_POOL_YIELD, &f->pool, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(wk_adamw_new(&f->spec, f->tensors, 2, f->parameters, f->gradients, f->pool, &f->adamw, &err),
                          DL_OK);
    return f;
}

static void release_fixture(struct fixture *f)
{
    for (int i = 0; i < 16; i++) {
        CU_ASSERT(f->matrix_values[matrix + i] == 42 && f->norm_values[norm_width + i] == 42);
    }
    wk_adamw_free(f->adamw);
    dl_pool_free(f->pool);
    free(f);
}

static void set_gradients(struct fixture *f, uint32_t step)
{
    draw(f->matrix_gradient, matrix, 100 + step);
    draw(f->norm_gradient, norm_width, 200 + step);
}

static void reference_update(const struct dl_inner_spec *spec, double *theta, double *m, double *v, const float *g,
                             uint32_t count, double clip, uint32_t step, double decay)
{
    double rate = wk_adamw_rate(spec, step);
    for (uint32_t i = 0; i < count; i++) {
        double gradient = (double)g[i] * clip;
        m[i] = spec->beta1 * m[i] + (1 - spec->beta1) * gradient;
        v[i] = spec->beta2 * v[i] + (1 - spec->beta2) * gradient * gradient;
        double m_hat = m[i] / (1 - pow(spec->beta1, step)), v_hat = v[i] / (1 - pow(spec->beta2, step));
        theta[i] -= rate * (m_hat / (sqrt(v_hat) + spec->epsilon) + decay * theta[i]);
    }
}

static double largest_difference(const float *x, const double *y, uint32_t count)
{
    double worst = 0;
    for (uint32_t i = 0; i < count; i++) {
        worst = fmax(worst, fabs((double)x[i] - y[i]));
    }
    return worst;
}

static void test_against_reference(void)
{
    struct fixture *f = make_fixture(2);
    DL_AUTO_FREE double *state = calloc(3 * (matrix + norm_width), sizeof *state);
    double *theta = state, *m = theta + matrix + norm_width, *v = m + matrix + norm_width;
    for (uint32_t i = 0; i < matrix + norm_width; i++) {
        theta[i] = i < matrix ? (double)f->matrix_values[i] : (double)f->norm_values[i - matrix];
    }
    for (uint32_t step = 1; step <= 12; step++) {
        set_gradients(f, step);
        double squares = 0;
        for (uint32_t i = 0; i < matrix; i++) {
            squares += (double)f->matrix_gradient[i] * (double)f->matrix_gradient[i];
        }
        for (uint32_t i = 0; i < norm_width; i++) {
            squares += (double)f->norm_gradient[i] * (double)f->norm_gradient[i];
        }
        struct wk_adamw_stats stats;
        struct dl_err err;
        CU_ASSERT_EQUAL_FATAL(wk_adamw_step(f->adamw, &stats, &err), DL_OK);
        CU_ASSERT(fabs(stats.gradient_norm - sqrt(squares)) < 1e-6 * sqrt(squares));
        CU_ASSERT(stats.clipped);
        CU_ASSERT(stats.learning_rate == wk_adamw_rate(&f->spec, step));
        double clip = 1 / sqrt(squares);
        reference_update(&f->spec, theta, m, v, f->matrix_gradient, matrix, clip, step, 0.1);
        reference_update(&f->spec, theta + matrix, m + matrix, v + matrix, f->norm_gradient, norm_width, clip, step, 0);
    }
    CU_ASSERT(largest_difference(f->matrix_values, theta, matrix) < 4e-6);
    CU_ASSERT(largest_difference(f->norm_values, theta + matrix, norm_width) < 4e-6);
    CU_ASSERT(largest_difference(wk_adamw_first_moments(f->adamw)[0], m, matrix) < 1e-8);
    CU_ASSERT_EQUAL(wk_adamw_steps(f->adamw), 12);
    release_fixture(f);
}

static void test_schedule(void)
{
    struct dl_inner_spec spec = plain_spec();
    CU_ASSERT_DOUBLE_EQUAL(wk_adamw_rate(&spec, 1), 0.0025, 1e-12);
    CU_ASSERT_DOUBLE_EQUAL(wk_adamw_rate(&spec, 4), 0.01, 1e-12);
    CU_ASSERT_DOUBLE_EQUAL(wk_adamw_rate(&spec, 12), 0.0055, 1e-12); /* Half-way: the mean of peak and floor. */
    CU_ASSERT_DOUBLE_EQUAL(wk_adamw_rate(&spec, 20), 0.001, 1e-12);
    CU_ASSERT_DOUBLE_EQUAL(wk_adamw_rate(&spec, 1000), 0.001, 1e-12);
    for (uint64_t step = 5; step < 25; step++) {
        CU_ASSERT(wk_adamw_rate(&spec, step) <= wk_adamw_rate(&spec, step - 1));
    }
    spec.warmup_steps = 0;
    CU_ASSERT(wk_adamw_rate(&spec, 1) > 0.0099 && wk_adamw_rate(&spec, 1) <= 0.01);
    spec.decay_steps = 0;
    CU_ASSERT(wk_adamw_rate(&spec, 100000) == 0.01);
}

static void test_equal_bits_over_threads(void)
{
    struct fixture *one = make_fixture(1), *three = make_fixture(3);
    struct dl_err err;
    for (uint32_t step = 1; step <= 5; step++) {
        set_gradients(one, step);
        set_gradients(three, step);
        CU_ASSERT_EQUAL(wk_adamw_step(one->adamw, NULL, &err), DL_OK);
        CU_ASSERT_EQUAL(wk_adamw_step(three->adamw, NULL, &err), DL_OK);
    }
    CU_ASSERT(unit_same_bits(one->matrix_values, three->matrix_values, sizeof one->matrix_values));
    CU_ASSERT(unit_same_bits(one->norm_values, three->norm_values, sizeof one->norm_values));
    release_fixture(one);
    release_fixture(three);
}

static void test_a_bad_gradient_changes_nothing(void)
{
    struct fixture *f = make_fixture(1);
    struct dl_err err;
    set_gradients(f, 1);
    f->matrix_gradient[matrix - 1] = NAN;
    float before = f->matrix_values[0];
    CU_ASSERT_EQUAL(wk_adamw_step(f->adamw, NULL, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "not finite") != NULL);
    CU_ASSERT(f->matrix_values[0] == before);
    CU_ASSERT_EQUAL(wk_adamw_steps(f->adamw), 0);
    release_fixture(f);
}

/* Small gradients are not clipped; no clipping at all with 0. */
static void test_clipping_only_when_needed(void)
{
    struct fixture *f = make_fixture(1);
    struct dl_err err;
    struct wk_adamw_stats stats;
    memset(f->matrix_gradient, 0, sizeof f->matrix_gradient);
    memset(f->norm_gradient, 0, sizeof f->norm_gradient);
    f->norm_gradient[0] = 0.5f;
    CU_ASSERT_EQUAL(wk_adamw_step(f->adamw, &stats, &err), DL_OK);
    CU_ASSERT(!stats.clipped && fabs(stats.gradient_norm - 0.5) < 1e-7);
    CU_ASSERT(fabs((double)wk_adamw_first_moments(f->adamw)[1][0] - 0.05) < 1e-7);
    release_fixture(f);
}

/* A checkpoint: moments and step count carried over continue to the same bits. */
static void test_state_carries_over(void)
{
    struct fixture *a = make_fixture(1), *b = make_fixture(1);
    struct dl_err err;
    set_gradients(a, 1);
    CU_ASSERT_EQUAL(wk_adamw_step(a->adamw, NULL, &err), DL_OK);
    memcpy(b->matrix_values, a->matrix_values, sizeof a->matrix_values);
    memcpy(b->norm_values, a->norm_values, sizeof a->norm_values);
    for (int i = 0; i < 2; i++) {
        size_t bytes = (i == 0 ? matrix : norm_width) * sizeof(float);
        memcpy(wk_adamw_first_moments(b->adamw)[i], wk_adamw_first_moments(a->adamw)[i], bytes);
        memcpy(wk_adamw_second_moments(b->adamw)[i], wk_adamw_second_moments(a->adamw)[i], bytes);
    }
    wk_adamw_set_steps(b->adamw, 1);
    set_gradients(a, 2);
    set_gradients(b, 2);
    CU_ASSERT_EQUAL(wk_adamw_step(a->adamw, NULL, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_adamw_step(b->adamw, NULL, &err), DL_OK);
    CU_ASSERT(unit_same_bits(a->matrix_values, b->matrix_values, sizeof a->matrix_values));
    release_fixture(a);
    release_fixture(b);
}

static void test_exponential(void)
{
    float x[4001], y[4001];
    double worst = 0;
    for (int i = 0; i < 4001; i++) {
        x[i] = y[i] = -87.0f + (float)i * (175.0f / 4000.0f);
    }
    wk_exp_rows(y, 4001);
    for (int i = 0; i < 4001; i++) {
        double expected = exp((double)x[i]);
        worst = fmax(worst, fabs((double)y[i] - expected) / expected);
    }
    CU_ASSERT(worst < 1.5e-7);
    float ends[] = {-1e30f, -INFINITY, 1e30f, NAN};
    wk_exp_rows(ends, 4);
    CU_ASSERT(ends[0] > 0 && ends[0] < 2e-38f && ends[1] == ends[0]);
    CU_ASSERT(isfinite(ends[2]) && ends[2] > 1e38f);
    CU_ASSERT(isnan(ends[3]));
}

/* Sequential float32 sums lose percents over millions of terms; blocks do not. */
static void test_sum_of_squares(void)
{
    enum { count = 5000001 };
    DL_AUTO_FREE float *x = malloc(count * sizeof *x);
    double expected = 0;
    for (uint32_t i = 0; i < count; i++) {
        x[i] = 1.0f + (float)(i % 7) * 0.01f;
        expected += (double)x[i] * (double)x[i];
    }
    CU_ASSERT(fabs(wk_sum_squares(x, count) - expected) < 1e-6 * expected); /* 64 additions a lane: at most 4e-6. */
}

UNIT_MAIN("adamw", {"against reference", test_against_reference}, {"schedule", test_schedule},
          {"equal bits over threads", test_equal_bits_over_threads},
          {"a bad gradient changes nothing", test_a_bad_gradient_changes_nothing},
          {"clipping only when needed", test_clipping_only_when_needed},
          {"state carries over", test_state_carries_over}, {"exponential", test_exponential},
          {"sum of squares", test_sum_of_squares})
