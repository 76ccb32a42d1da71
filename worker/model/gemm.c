#include "worker/model/gemm.h"

#include <assert.h>
#include <cblas.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/mem.h"

/* Where tiles follow from the shape alone: four, more when the product is large. */
#define FIXED_TILES_MIN UINT64_C(4)
#define FIXED_TILES_MAX UINT64_C(64)
#define FIXED_TILE_WORK (UINT64_C(1) << 28)
#define UNIT 16u /* Tiles begin at multiples of the height of OpenBLAS' register tile. */

struct grid {
    uint32_t rows, columns; /* Tiles. */
    uint32_t row_units, column_units;
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

/* Work of a grid's smallest tile, if its last unit were a single row and column. */
static uint64_t least_work(const struct wk_gemm *gemm, const struct grid *grid)
{
    uint64_t rows = (uint64_t)(grid->row_units / grid->rows) * UNIT,
             columns = (uint64_t)(grid->column_units / grid->columns) * UNIT;
    return rows < UNIT || columns < UNIT ? 0 : (rows - UNIT + 1) * (columns - UNIT + 1) * gemm->k;
}

/* Of all grids with `tiles` tiles, the one that packs least: a tile of m by n packs (m + n) k elements for m n k
 * multiplications. */
static struct grid cut(const struct wk_gemm *gemm, uint64_t tiles)
{
    struct grid best = {1, 1, ceil_div(gemm->m, UNIT), ceil_div(gemm->n, UNIT)};
    double best_cost = INFINITY;
    if ((uint64_t)gemm->m * gemm->n * gemm->k < WK_GEMM_WORK_MIN) {
        return best;
    }
    for (; best_cost == INFINITY && tiles > 1; tiles--) {
        for (uint32_t rows = 1; rows <= tiles; rows++) {
            struct grid grid = best;
            grid.rows = rows;
            grid.columns = (uint32_t)tiles / rows;
            double cost = (double)rows / gemm->m + (double)grid.columns / gemm->n;
            if (tiles % rows == 0 && least_work(gemm, &grid) >= WK_GEMM_WORK_MIN / 4 && cost < best_cost) {
                best.rows = grid.rows;
                best.columns = grid.columns;
                best_cost = cost;
            }
        }
    }
    return best;
}

static uint64_t fixed_tiles(const struct wk_gemm *gemm)
{
    uint64_t work = (uint64_t)gemm->m * gemm->n * gemm->k;
    return DL_MIN(DL_MAX((work / FIXED_TILE_WORK + 3) / 4 * 4, FIXED_TILES_MIN), FIXED_TILES_MAX);
}

static uint64_t thread_time_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * DL_NS_PER_SECOND + (uint64_t)now.tv_nsec;
}

void wk_gemm_one(struct wk_meter *meter, uint32_t thread, const struct wk_gemm *gemm, float alpha)
{
    uint64_t start = meter->on ? thread_time_ns() : 0;
    cblas_sgemm(CblasRowMajor, gemm->transpose_a ? CblasTrans : CblasNoTrans,
                gemm->transpose_b ? CblasTrans : CblasNoTrans, (blasint)gemm->m, (blasint)gemm->n, (blasint)gemm->k,
                alpha, gemm->a, (blasint)gemm->lda, gemm->b, (blasint)gemm->ldb, gemm->beta, gemm->c,
                (blasint)gemm->ldc);
    if (meter->on) {
        meter->threads[thread].ns += thread_time_ns() - start;
        meter->threads[thread].multiplications += (uint64_t)gemm->m * gemm->n * gemm->k;
    }
}

static uint32_t tile_start(uint32_t units, uint32_t tile, uint32_t tiles, uint32_t extent)
{
    return DL_MIN((uint32_t)((uint64_t)units * tile / tiles) * UNIT, extent);
}

static void run_tile(const struct wk_gemm *gemm, const struct grid *grid, uint32_t tile, struct wk_meter *meter,
                     uint32_t thread)
{
    uint32_t tile_row = tile / grid->columns, tile_column = tile % grid->columns;
    uint32_t row = tile_start(grid->row_units, tile_row, grid->rows, gemm->m);
    uint32_t column = tile_start(grid->column_units, tile_column, grid->columns, gemm->n);
    struct wk_gemm part = *gemm;
    part.m = tile_start(grid->row_units, tile_row + 1, grid->rows, gemm->m) - row;
    part.n = tile_start(grid->column_units, tile_column + 1, grid->columns, gemm->n) - column;
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

void wk_gemm_run(struct dl_pool *pool, struct wk_meter *meter, const struct wk_gemm *gemms, uint32_t count)
{
    assert(count <= WK_GEMMS_MAX);
    struct job job = {.gemms = gemms, .count = count, .meter = meter};
    uint32_t tasks = 0;
    for (uint32_t i = 0; i < count; i++) {
        job.grids[i] = cut(&gemms[i], wk_gemm_tiles_freely() ? dl_pool_threads(pool) : fixed_tiles(&gemms[i]));
        tasks += job.grids[i].rows * job.grids[i].columns;
    }
    dl_pool_run(pool, job_task, &job, tasks);
}

/* --- trying out whether tiles change bits --- */

static pthread_once_t tried = PTHREAD_ONCE_INIT;
static bool tiles_freely;

static bool try_shape(uint32_t m, uint32_t n, uint32_t k, unsigned form, uint64_t tiles, float *memory)
{
    struct wk_meter meter = {0};
    float *a = memory, *b = a + (size_t)m * k, *whole = b + (size_t)n * k, *cut_up = whole + (size_t)m * n;
    struct wk_gemm gemm = {.transpose_a = (form & 1) != 0,
                           .transpose_b = (form & 2) != 0,
                           .m = m,
                           .n = n,
                           .k = k,
                           .a = a,
                           .b = b,
                           .ldc = n,
                           .beta = (form & 4) != 0 ? 1.0f : 0.0f};
    gemm.lda = gemm.transpose_a ? m : k;
    gemm.ldb = gemm.transpose_b ? k : n;
    memcpy(cut_up, whole, (size_t)m * n * sizeof *whole);
    struct grid grid = cut(&gemm, tiles);
    if (grid.rows * grid.columns < 2) {
        return false; /* Nothing was tried. */
    }
    for (uint32_t tile = 0; tile < grid.rows * grid.columns; tile++) {
        gemm.c = cut_up;
        run_tile(&gemm, &grid, tile, &meter, 0);
    }
    gemm.c = whole;
    wk_gemm_one(&meter, 0, &gemm, 1);
    return memcmp(cut_up, whole, (size_t)m * n * sizeof *whole) == 0;
}

bool wk_gemm_try_tiles(void)
{
    /* Odd edges, halves that are no multiple of a register tile, and depths below and above one cache block. */
    static const struct {
        uint32_t m, n, k;
        uint64_t tiles;
    } shapes[] = {{399, 402, 416, 2}, {445, 298, 531, 8}, {185, 183, 1000, 4}, {353, 214, 825, 3},
                  {478, 186, 512, 6}, {256, 384, 128, 2}, {160, 400, 640, 5},  {128, 352, 901, 2}};
    const size_t floats = (size_t)1 << 20;
    DL_AUTO_FREE float *memory = dl_alloc_aligned(floats * sizeof *memory);
    if (memory == NULL) {
        return false;
    }
    uint32_t seed = 1;
    for (size_t i = 0; i < floats; i++) {
        seed = seed * 1664525u + 1013904223u;
        memory[i] = (float)(seed >> 8) * 0x1p-23f - 1.0f;
    }
    for (unsigned i = 0; i < DL_COUNT_OF(shapes); i++) {
        if (!try_shape(shapes[i].m, shapes[i].n, shapes[i].k, i, shapes[i].tiles, memory)) {
            return false;
        }
    }
    return true;
}

static void try_once(void)
{
    tiles_freely = wk_gemm_try_tiles();
}

bool wk_gemm_tiles_freely(void)
{
    pthread_once(&tried, try_once);
    return tiles_freely;
}
