/* The trainer's element-wise kernels: equal bits on every instruction set, against plain loops in double, within
 * bounds. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/isa.h"
#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/unit.h"
#include "worker/model/kernels.h"

enum { rows = 3, width_max = 101, guard = 16, room = rows * 2 * width_max + guard };

/* Everything that the kernels read and write; compared as a whole between instruction sets. */
struct state {
    float x[room], y[room], z[room], gain[room], out[room], rstd[room], more[room];
    float scalars[8];
    double doubles[4];
};

static void draw(struct state *s, uint32_t seed)
{
    struct dl_rng rng;
    dl_rng_init(&rng, seed, 0);
    memset(s, 0, sizeof *s);
    for (int i = 0; i < room; i++) {
        s->x[i] = 2 * dl_rng_normal(&rng);
        s->y[i] = dl_rng_normal(&rng);
        s->z[i] = dl_rng_normal(&rng);
        s->gain[i] = 0.5f + dl_rng_uniform(&rng);
        s->out[i] = s->rstd[i] = s->more[i] = 42;
    }
}

static void run_all(struct state *s, uint32_t width)
{
    float *scalar = s->scalars;
    wk_rmsnorm(s->x, s->gain, 1e-5f, rows, width, s->out, s->rstd);
    wk_rmsnorm_backward(s->y, s->x, s->rstd, s->gain, rows, width, 1, s->z, s->more);
    wk_rope(s->x, width, s->gain, s->y, rows, width / 2 * 2, 1);
    wk_swiglu(s->x, rows, width, s->out);
    wk_swiglu_backward(s->x, s->y, rows, width);
    scalar[0] = wk_softmax_part(s->z, width / 2 + 1, width, -INFINITY, &scalar[1]);
    wk_softmax_backward(s->y, s->z, width / 2 + 1, width, 0.5f, 0.25f, 2);
    wk_transpose(s->y, width, rows, width, s->out);
    wk_scale(s->out, width, 0.3f);
    wk_add(s->out, s->x, width);
    scalar[2] = wk_dot(s->out, s->x, width);
    s->doubles[0] = wk_cross_entropy(s->x, width, width / 3, 0.125f);
    s->doubles[1] = wk_sum_squares(s->out, 2 * width);
    struct wk_adamw_factors f = {0.9f, 0.8f, 0.95f, 0.2f, 0.05f, 0.01f, 1.5f, 1e-8f, 0.99f};
    for (int i = 0; i < room; i++) {
        s->more[i] = fabsf(s->more[i]); /* Second moments are not negative. */
    }
    wk_adamw_update(s->out, s->x, s->y, s->more, width, &f);
    wk_exp_rows(s->z, width);
}

static void test_equal_bits(void)
{
    static const uint32_t widths[] = {2, 15, 16, 17, 33, 64, width_max};
    struct state *portable = malloc(sizeof *portable), *other = malloc(sizeof *other);
    enum dl_isa best = dl_isa_current();
    for (size_t i = 0; i < DL_COUNT_OF(widths); i++) {
        CU_ASSERT_FATAL(dl_isa_force(DL_ISA_PORTABLE));
        draw(portable, widths[i]);
        run_all(portable, widths[i]);
        for (int isa = 1; isa < DL_ISA_COUNT; isa++) {
            if (!dl_isa_force((enum dl_isa)isa)) {
                continue;
            }
            draw(other, widths[i]);
            run_all(other, widths[i]);
            CU_ASSERT(unit_same_bits(portable, other, sizeof *portable));
        }
    }
    CU_ASSERT(dl_isa_force(best));
    printf("(up to %s) ", dl_isa_name(best));
    free(portable);
    free(other);
}

static double silu(double g)
{
    return g / (1 + exp(-g));
}

static void test_against_plain_loops(void)
{
    const uint32_t width = width_max;
    struct state *s = malloc(sizeof *s), *before = malloc(sizeof *before);
    draw(s, 7);
    *before = *s;
    wk_swiglu(s->x, rows, width, s->out);
    wk_rmsnorm(s->y, s->gain, 1e-5f, rows, width, s->more, s->rstd);
    for (uint32_t r = 0; r < rows; r++) {
        double squares = 0;
        for (uint32_t i = 0; i < width; i++) {
            squares += (double)s->y[r * width + i] * (double)s->y[r * width + i];
        }
        double rstd = 1 / sqrt(squares / width + 1e-5);
        CU_ASSERT(fabs((double)s->rstd[r] - rstd) < 1e-6 * rstd);
        for (uint32_t i = 0; i < width; i++) {
            double h = silu((double)s->x[r * 2 * width + i]) * (double)s->x[(r * 2 + 1) * width + i];
            double n = (double)s->y[r * width + i] * rstd * (double)s->gain[i];
            CU_ASSERT_FATAL(fabs((double)s->out[r * width + i] - h) < 1e-6 * (1 + fabs(h)));
            CU_ASSERT_FATAL(fabs((double)s->more[r * width + i] - n) < 1e-6 * (1 + fabs(n)));
        }
    }
    for (int i = 0; i < guard; i++) { /* Nothing behind the rows was touched. */
        CU_ASSERT(s->out[rows * width + (uint32_t)i] == 42 && s->more[rows * width + (uint32_t)i] == 42);
        CU_ASSERT(s->rstd[rows + i] == 42);
    }
    double sum = 0, loss;
    for (uint32_t i = 0; i < width; i++) {
        sum += exp((double)before->z[i]);
    }
    loss = wk_cross_entropy(s->z, width, 5, 0.5f);
    CU_ASSERT(fabs(loss - (log(sum) - (double)before->z[5])) < 1e-6);
    for (uint32_t i = 0; i < width; i++) {
        double expected = 0.5 * (exp((double)before->z[i]) / sum - (i == 5));
        CU_ASSERT_FATAL(fabs((double)s->z[i] - expected) < 1e-7);
    }
    CU_ASSERT(unit_same_bits(s->z + width, before->z + width, (room - width) * sizeof(float)));
    free(s);
    free(before);
}

/* Logits of a thousand would overflow a naive exponential. */
static void test_large_logits(void)
{
    float row[4] = {1000, 999, -1000, 0};
    CU_ASSERT(fabs(wk_cross_entropy(row, 4, 0, 1) - log(1 + exp(-1.0))) < 1e-6);
    CU_ASSERT(fabsf(row[1] - 0.26894143f) < 1e-6f && row[2] < 1e-37f); /* The exponential ends at -87. */
    float bad[3] = {0, NAN, 1};
    CU_ASSERT(isnan(wk_cross_entropy(bad, 3, 0, 0)));
    float infinite[2] = {INFINITY, 0};
    CU_ASSERT(!isfinite(wk_cross_entropy(infinite, 2, 0, 0)));
}

/* Strips of rows and what is left of them, out of wider rows; nothing is written behind. */
static void test_transpose(void)
{
    enum { stride = 41, most = 37, columns = 6 };
    static const uint32_t heights[] = {1, 15, 16, 17, 32, most};
    float x[most * stride], out[most * columns + guard];
    for (int i = 0; i < most * stride; i++) {
        x[i] = (float)i;
    }
    for (size_t t = 0; t < DL_COUNT_OF(heights); t++) {
        uint32_t height = heights[t];
        for (size_t i = 0; i < DL_COUNT_OF(out); i++) {
            out[i] = -1;
        }
        wk_transpose(x, stride, height, columns, out);
        for (uint32_t r = 0; r < height; r++) {
            for (uint32_t c = 0; c < columns; c++) {
                CU_ASSERT_FATAL(out[c * height + r] == x[r * stride + c]);
            }
        }
        CU_ASSERT(out[columns * height] == -1);
    }
}

UNIT_MAIN("kernels", {"equal bits on every instruction set", test_equal_bits},
          {"against plain loops", test_against_plain_loops}, {"large logits", test_large_logits},
          {"transposed rows", test_transpose})
