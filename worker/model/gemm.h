/* wk_gemm: matrix products of a step, cut into tiles that the pool's threads share, with equal bits for every number of
 * threads.
 *
 * Every tile is one cblas_sgemm call on one thread with its own part of C; nothing is summed across tiles. OpenBLAS
 * packs its operands in every call, so fewer tiles are faster. Whether an element's bits depend on the tile that it is
 * computed in is a property of OpenBLAS' kernels, tried out once: where they do not (AVX-512 kernels), there are as
 * many tiles as threads; where they do (Haswell kernels), the tiles follow from the shape alone. */
#ifndef WK_MODEL_GEMM_H
#define WK_MODEL_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "common/pool.h"

/* What sgemm took, by thread, one cache line each; written only when `on`. The time is the processor's, so that others on
 * the machine do not count. */
struct wk_meter {
    bool on;
    struct {
        _Alignas(64) uint64_t ns;
        uint64_t multiplications;
    } * threads;
};

/* C[m][n] = op(A) op(B) + beta C; row-major. With `add` (ldc as C) instead: C = op(A) op(B) + add. */
struct wk_gemm {
    bool transpose_a, transpose_b;
    uint32_t m, n, k;
    const float *a;
    uint32_t lda;
    const float *b;
    uint32_t ldb;
    float *c;
    uint32_t ldc;
    float beta;
    const float *add;
};

/* out[rows][out_width] = in[rows][in_width] weight[out_width][in_width]'. */
static inline struct wk_gemm wk_gemm_projection(const float *in, uint32_t in_width, const float *weight,
                                                uint32_t out_width, uint64_t rows, float *out)
{
    return (struct wk_gemm){.transpose_b = true,
                            .m = (uint32_t)rows,
                            .n = out_width,
                            .k = in_width,
                            .a = in,
                            .lda = in_width,
                            .b = weight,
                            .ldb = in_width,
                            .c = out,
                            .ldc = out_width};
}

#define WK_GEMMS_MAX 4 /* Products in one job. */

/* Products with fewer multiplications are one tile, and no tile has fewer than a quarter of it: OpenBLAS computes small
 * products with other kernels, which sum in another order. */
#define WK_GEMM_WORK_MIN (UINT64_C(1) << 22)

/* Whether tiles may follow the number of threads. Tried out at the first call (about 20 ms); any thread. OpenBLAS must
 * be set to one thread a call. */
bool wk_gemm_tiles_freely(void);

/* The check itself: products of a few shapes, whole and cut, agree in every bit. */
bool wk_gemm_try_tiles(void);

/* Runs `count` independent products as one job. */
void wk_gemm_run(struct dl_pool *pool, struct wk_meter *meter, const struct wk_gemm *gemms, uint32_t count);

/* One product on the calling thread (index `thread`), in one call. */
void wk_gemm_one(struct wk_meter *meter, uint32_t thread, const struct wk_gemm *gemm, float alpha);

#endif
