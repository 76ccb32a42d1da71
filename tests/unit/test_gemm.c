/* Tiled matrix products: right results, equal bits for every number of threads, and the check behind that promise. */
#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "tests/unit/model_rig.h"
#include "worker/model/gemm.h"

static void fill(float *x, size_t count, uint32_t seed)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) * 0x1p-23f - 1.0f;
    }
}

enum { extent_max = 400, elements = extent_max * extent_max };

struct buffers {
    float a[elements], b[elements], add[elements], c[elements], other[elements];
};

static double largest_error(const struct wk_gemm *g, const float *before, const float *c)
{
    double worst = 0;
    for (uint32_t i = 0; i < g->m; i++) {
        for (uint32_t j = 0; j < g->n; j++) {
            double sum = before == NULL ? 0 : (double)before[i * g->ldc + j];
            for (uint32_t l = 0; l < g->k; l++) {
                sum += (double)g->a[g->transpose_a ? l * g->lda + i : i * g->lda + l] *
                       (double)g->b[g->transpose_b ? j * g->ldb + l : l * g->ldb + j];
            }
            worst = fmax(worst, fabs(sum - (double)c[i * g->ldc + j]));
        }
    }
    return worst;
}

/* One shape on pools of 1 to 4 threads, with beta 0, beta 1 and an added matrix. */
static void check_shape(struct buffers *x, uint32_t m, uint32_t n, uint32_t k, bool ta, bool tb)
{
    struct wk_meter meter = {0};
    struct dl_err err;
    for (int form = 0; form < 3; form++) {
        struct wk_gemm gemm = {.transpose_a = ta,
                               .transpose_b = tb,
                               .m = m,
                               .n = n,
                               .k = k,
                               .a = x->a,
                               .b = x->b,
                               .lda = ta ? m : k,
                               .ldb = tb ? k : n,
                               .c = x->c,
                               .ldc = n};
        gemm.beta = form == 1 ? 1 : 0;
        gemm.add = form == 2 ? x->add : NULL;
        for (uint32_t threads = 1; threads <= 4; threads++) {
            struct dl_pool *pool = NULL;
            CU_ASSERT_EQUAL_FATAL(dl_pool_new(threads, DL_POOL_YIELD, &pool, &err), DL_OK);
            gemm.c = threads == 1 ? x->c : x->other;
            memcpy(gemm.c, x->add, sizeof x->add);
            wk_gemm_run(pool, &meter, &gemm, 1);
            CU_ASSERT(unit_same_bits(gemm.c, x->c, sizeof x->c));
            dl_pool_free(pool);
        }
        CU_ASSERT(largest_error(&gemm, form == 0 ? NULL : x->add, x->c) < 1e-4);
        CU_ASSERT_EQUAL(
            memcmp(x->c + (size_t)m * n, x->add + (size_t)m * n, (elements - (size_t)m * n) * sizeof(float)), 0);
    }
}

static void test_shapes(void)
{
    struct buffers *x = malloc(sizeof *x);
    fill(x->a, elements, 1);
    fill(x->b, elements, 2);
    fill(x->add, elements, 3);
    static const uint32_t shapes[][3] = {{1, 1, 1},       {5, 33, 7},      {16, 16, 400},
                                         {399, 301, 399}, {257, 400, 120}, {400, 31, 400}};
    for (size_t i = 0; i < DL_COUNT_OF(shapes); i++) {
        for (int form = 0; form < 4; form++) {
            check_shape(x, shapes[i][0], shapes[i][1], shapes[i][2], (form & 1) != 0, (form & 2) != 0);
        }
    }
    free(x);
}

/* The answer is a property of the kernels: asking again must not change it, and AVX-512 kernels are known to agree. */
static void test_tiles_freely(void)
{
    bool freely = wk_gemm_tiles_freely();
    CU_ASSERT_EQUAL(wk_gemm_try_tiles(), freely);
    if (wk_blas_core_level(openblas_get_corename()) == 2) {
        CU_ASSERT(freely);
    }
}

static void test_meter(void)
{
    struct dl_err err;
    struct dl_pool *pool = NULL;
    CU_ASSERT_EQUAL_FATAL(dl_pool_new(2, DL_POOL_YIELD, &pool, &err), DL_OK);
    struct wk_meter meter = {.threads = dl_alloc_aligned(2 * sizeof *meter.threads)};
    struct buffers *x = calloc(1, sizeof *x);
    struct wk_gemm gemms[2] = {
        {.m = 300, .n = 300, .k = 300, .a = x->a, .lda = 300, .b = x->b, .ldb = 300, .c = x->c, .ldc = 300},
        {.m = 300, .n = 300, .k = 300, .a = x->a, .lda = 300, .b = x->b, .ldb = 300, .c = x->other, .ldc = 300}};
    wk_gemm_run(pool, &meter, gemms, 2);
    CU_ASSERT_EQUAL(meter.threads[0].ns + meter.threads[1].ns, 0);
    meter.on = true;
    wk_gemm_run(pool, &meter, gemms, 2);
    CU_ASSERT(meter.threads[0].ns + meter.threads[1].ns > 0);
    CU_ASSERT_EQUAL(meter.threads[0].multiplications + meter.threads[1].multiplications, 2 * 300 * 300 * 300);
    dl_pool_free(pool);
    free(meter.threads);
    free(x);
}

MODEL_MAIN("gemm", {"shapes", test_shapes}, {"tiles freely", test_tiles_freely}, {"meter", test_meter})
