#include "worker/model/gemm.h"

#include <assert.h>
#include <cblas.h>
#include <stddef.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"

/* A tile's edges: small enough that a step of a small model still gives work to eight threads, large enough that
 * OpenBLAS' packing of the operands stays a small share (it costs about 40 multiplications an element packed). */
enum { TILE_M = 256, TILE_N = 1024 };

struct grid {
    uint32_t rows, columns; /* Tiles. */
    uint32_t tile_m, tile_n;
};

struct job {
    const struct wk_gemm *gemms;
    struct grid grids[WK_GEMMS_MAX];
    uint32_t count;
    struct wk_meter *meter;
};

static uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* Even tiles whose edges are multiples of 16, the height of OpenBLAS' register tile. */
static uint32_t even_tile(uint32_t extent, uint32_t tile_max)
{
    uint32_t pieces = ceil_div(extent, tile_max);
    return (ceil_div(extent, pieces) + 15) / 16 * 16;
}

static struct grid cut(const struct wk_gemm *gemm)
{
    struct grid grid;
    grid.tile_m = even_tile(gemm->m, TILE_M);
    grid.tile_n = even_tile(gemm->n, TILE_N);
    grid.rows = ceil_div(gemm->m, grid.tile_m);
    grid.columns = ceil_div(gemm->n, grid.tile_n);
    return grid;
}

void wk_gemm_one(struct wk_meter *meter, uint32_t thread, const struct wk_gemm *gemm, float alpha)
{
    int64_t start = meter->on ? dl_now_ns() : 0;
    cblas_sgemm(CblasRowMajor, gemm->transpose_a ? CblasTrans : CblasNoTrans,
                gemm->transpose_b ? CblasTrans : CblasNoTrans, (blasint)gemm->m, (blasint)gemm->n, (blasint)gemm->k,
                alpha, gemm->a, (blasint)gemm->lda, gemm->b, (blasint)gemm->ldb, gemm->beta, gemm->c,
                (blasint)gemm->ldc);
    if (meter->on) {
        meter->threads[thread].ns += (uint64_t)(dl_now_ns() - start);
    }
}

static void run_tile(const struct wk_gemm *gemm, const struct grid *grid, uint32_t tile, struct wk_meter *meter,
                     uint32_t thread)
{
    uint32_t row = tile / grid->columns * grid->tile_m;
    uint32_t column = tile % grid->columns * grid->tile_n;
    struct wk_gemm part = *gemm;
    part.m = DL_MIN(grid->tile_m, gemm->m - row);
    part.n = DL_MIN(grid->tile_n, gemm->n - column);
    part.a += gemm->transpose_a ? row : (size_t)row * gemm->lda;
    part.b += gemm->transpose_b ? (size_t)column * gemm->ldb : column;
    size_t corner = (size_t)row * gemm->ldc + column;
    part.c += corner;
    if (gemm->add != NULL) {
        for (uint32_t r = 0; r < part.m; r++) {
            size_t at = (size_t)r * gemm->ldc;
            memcpy(part.c + at, gemm->add + corner + at, part.n * sizeof(float));
        }
        part.beta = 1;
    }
    wk_gemm_one(meter, thread, &part, 1);
}

static void job_task(void *context, uint32_t task, uint32_t thread)
{
    struct job *job = context;
    for (uint32_t i = 0; i < job->count; i++) {
        uint32_t tiles = job->grids[i].rows * job->grids[i].columns;
        if (task < tiles) {
            run_tile(&job->gemms[i], &job->grids[i], task, job->meter, thread);
            return;
        }
        task -= tiles;
    }
    assert(!"task beyond the job");
}

void wk_gemm_run(struct wk_pool *pool, struct wk_meter *meter, const struct wk_gemm *gemms, uint32_t count)
{
    assert(count <= WK_GEMMS_MAX);
    struct job job = {.gemms = gemms, .count = count, .meter = meter};
    uint32_t tasks = 0;
    for (uint32_t i = 0; i < count; i++) {
        job.grids[i] = cut(&gemms[i]);
        tasks += job.grids[i].rows * job.grids[i].columns;
    }
    wk_pool_run(pool, job_task, &job, tasks);
}
