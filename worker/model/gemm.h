/* wk_gemm: matrix products of a step, cut into tiles that the pool's threads share.
 *
 * The tiles follow from the shape alone, and every tile is one cblas_sgemm call on one thread with its own part of C:
 * the same bits for every number of threads. */
#ifndef WK_MODEL_GEMM_H
#define WK_MODEL_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "worker/model/pool.h"

/* Nanoseconds in sgemm by thread, one cache line each; written only when `on`. */
struct wk_meter {
    bool on;
    struct {
        _Alignas(64) uint64_t ns;
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

#define WK_GEMMS_MAX 4 /* Products in one job. */

/* Runs `count` independent products as one job. */
void wk_gemm_run(struct wk_pool *pool, struct wk_meter *meter, const struct wk_gemm *gemms, uint32_t count);

/* One product on the calling thread (index `thread`), in one call. */
void wk_gemm_one(struct wk_meter *meter, uint32_t thread, const struct wk_gemm *gemm, float alpha);

#endif
