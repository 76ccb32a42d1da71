#include "syncer/merge/pool.h"

#include <assert.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Ranges a thread takes in a run, about: few enough that taking costs nothing, many enough that a thread which is held
 * up leaves little to wait for. */
#define RANGES_PER_THREAD 16

struct sy_pool {
    struct dl_pool *threads;
    sy_pool_fn fn; /* The run. */
    void *context;
    uint64_t count, range;
    sy_pool_done_fn done; /* NULL: nobody is told. What follows is under done_lock. */
    pthread_mutex_t done_lock;
    uint64_t done_ranges; /* All before it are done. */
    bool range_done[];    /* Twice RANGES_PER_THREAD a thread, and the last one. */
};

static void tell_done(struct sy_pool *pool, uint32_t number)
{
    pthread_mutex_lock(&pool->done_lock);
    uint64_t before = pool->done_ranges;
    pool->range_done[number] = true;
    while (pool->done_ranges * pool->range < pool->count && pool->range_done[pool->done_ranges]) {
        pool->done_ranges++;
    }
    if (pool->done_ranges > before) {
        uint64_t end = pool->done_ranges * pool->range;
        pool->done(pool->context, end < pool->count ? end : pool->count);
    }
    pthread_mutex_unlock(&pool->done_lock);
}

static void run_range(void *opaque, uint32_t number, uint32_t thread)
{
    struct sy_pool *pool = opaque;
    uint64_t begin = number * pool->range;
    (void)thread;
    pool->fn(pool->context, begin, pool->range < pool->count - begin ? begin + pool->range : pool->count);
    if (pool->done != NULL) {
        tell_done(pool, number);
    }
}

/* Ranges are rounded down in size, so that there may be up to twice as many. */
static size_t range_count_max(uint32_t threads)
{
    return 2 * (size_t)threads * RANGES_PER_THREAD + 1;
}

enum dl_rc sy_pool_new(uint32_t threads, struct sy_pool **out, struct dl_err *err)
{
    struct dl_pool *with = NULL;
    enum dl_rc rc = dl_pool_new(threads, DL_POOL_SLEEP, &with, err);
    if (rc != DL_OK) {
        dl_err_wrap(err, "merge");
        return rc;
    }
    struct sy_pool *pool = calloc(1, sizeof *pool + range_count_max(threads) * sizeof pool->range_done[0]);
    if (pool == NULL) {
        dl_pool_free(with);
        return dl_err_set(err, DL_ENOMEM, "merge: no memory for a pool of %u threads", threads);
    }
    pool->threads = with;
    pthread_mutex_init(&pool->done_lock, NULL);
    *out = pool;
    return DL_OK;
}

void sy_pool_free(struct sy_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    dl_pool_free(pool->threads);
    pthread_mutex_destroy(&pool->done_lock);
    free(pool);
}

void sy_pool_run(struct sy_pool *pool, sy_pool_fn fn, sy_pool_done_fn done, void *context, uint64_t count)
{
    assert(count < UINT64_MAX / 2); /* Two ranges' ends are added without overflow. */
    if (count == 0) {
        return;
    }
    uint32_t threads = dl_pool_threads(pool->threads);
    uint64_t range = count / ((uint64_t)threads * RANGES_PER_THREAD);
    range = range == 0 ? 1 : range;
    pool->fn = fn;
    pool->done = done;
    pool->context = context;
    pool->count = count;
    pool->range = threads == 1 && done == NULL ? count : range; /* Nobody to share with, nobody to tell. */
    if (done != NULL) {
        pool->done_ranges = 0;
        memset(pool->range_done, 0, range_count_max(threads) * sizeof pool->range_done[0]);
    }
    uint64_t ranges = (count + pool->range - 1) / pool->range;
    assert(ranges <= range_count_max(threads));
    dl_pool_run(pool->threads, run_range, pool, (uint32_t)ranges);
}
