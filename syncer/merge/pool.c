#include "syncer/merge/pool.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* Ranges a thread takes in a run, about: few enough that taking costs nothing, many enough that a thread which is held
 * up leaves little to wait for. */
#define RANGES_PER_THREAD 16

struct sy_pool {
    uint32_t threads;
    uint32_t started;
    pthread_mutex_t lock;
    pthread_cond_t wake, done_all;
    uint64_t generation; /* Of the run; under the lock, as all below but `next`. */
    uint32_t working;    /* Threads that have not finished this run. */
    bool stopping;
    sy_pool_fn fn;
    void *context;
    uint64_t count, range;
    atomic_uint_fast64_t next; /* First index that nobody has taken. */
    sy_pool_done_fn done;      /* NULL: nobody is told. What follows is under done_lock. */
    pthread_mutex_t done_lock;
    uint64_t done_ranges; /* All before it are done. */
    bool *range_done;     /* Twice RANGES_PER_THREAD a thread, and the last one. */
    pthread_t ids[];
};

static void tell_done(struct sy_pool *pool, uint64_t begin)
{
    pthread_mutex_lock(&pool->done_lock);
    uint64_t before = pool->done_ranges;
    pool->range_done[begin / pool->range] = true;
    while (pool->done_ranges * pool->range < pool->count && pool->range_done[pool->done_ranges]) {
        pool->done_ranges++;
    }
    if (pool->done_ranges > before) {
        uint64_t end = pool->done_ranges * pool->range;
        pool->done(pool->context, end < pool->count ? end : pool->count);
    }
    pthread_mutex_unlock(&pool->done_lock);
}

static void work(struct sy_pool *pool, sy_pool_fn fn, void *context, uint64_t count, uint64_t range)
{
    for (;;) {
        uint64_t begin = atomic_fetch_add_explicit(&pool->next, range, memory_order_relaxed);
        if (begin >= count) {
            return;
        }
        fn(context, begin, range < count - begin ? begin + range : count);
        if (pool->done != NULL) {
            tell_done(pool, begin);
        }
    }
}

static void *thread_main(void *opaque)
{
    struct sy_pool *pool = opaque;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->generation == seen && !pool->stopping) {
            pthread_cond_wait(&pool->wake, &pool->lock);
        }
        if (pool->stopping) {
            break;
        }
        seen = pool->generation;
        sy_pool_fn fn = pool->fn;
        void *context = pool->context;
        uint64_t count = pool->count;
        uint64_t range = pool->range;
        pthread_mutex_unlock(&pool->lock);
        work(pool, fn, context, count, range);
        pthread_mutex_lock(&pool->lock);
        if (--pool->working == 0) {
            pthread_cond_signal(&pool->done_all);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Ranges are rounded down in size, so that there may be up to twice as many. */
static size_t range_count_max(uint32_t threads)
{
    return 2 * (size_t)threads * RANGES_PER_THREAD + 1;
}

enum dl_rc sy_pool_new(uint32_t threads, struct sy_pool **out, struct dl_err *err)
{
    if (threads == 0 || threads > SY_POOL_THREADS_MAX) {
        return dl_err_set(err, DL_EINVAL, "%u merge threads; 1 to %d are possible", threads, SY_POOL_THREADS_MAX);
    }
    struct sy_pool *pool = calloc(1, sizeof *pool + (threads - 1) * sizeof pool->ids[0]);
    if (pool == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a pool of %u threads", threads);
    }
    pool->range_done = calloc(range_count_max(threads), sizeof *pool->range_done);
    if (pool->range_done == NULL) {
        free(pool);
        return dl_err_set(err, DL_ENOMEM, "no memory for a pool of %u threads", threads);
    }
    pool->threads = threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_mutex_init(&pool->done_lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done_all, NULL);
    for (uint32_t i = 0; i + 1 < threads; i++) {
        int failed = pthread_create(&pool->ids[i], NULL, thread_main, pool);
        if (failed != 0) {
            sy_pool_free(pool);
            return dl_err_errno(err, DL_ENOMEM, failed, "start merge thread %u of %u", i + 2, threads);
        }
        pool->started++;
    }
    *out = pool;
    return DL_OK;
}

void sy_pool_free(struct sy_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->started; i++) {
        pthread_join(pool->ids[i], NULL);
    }
    pthread_cond_destroy(&pool->wake);
    pthread_cond_destroy(&pool->done_all);
    pthread_mutex_destroy(&pool->lock);
    pthread_mutex_destroy(&pool->done_lock);
    free(pool->range_done);
    free(pool);
}

uint32_t sy_pool_threads(const struct sy_pool *pool)
{
    return pool->threads;
}

void sy_pool_run(struct sy_pool *pool, sy_pool_fn fn, void *context, uint64_t count)
{
    sy_pool_run_told(pool, fn, NULL, context, count);
}

void sy_pool_run_told(struct sy_pool *pool, sy_pool_fn fn, sy_pool_done_fn done, void *context, uint64_t count)
{
    assert(count < UINT64_MAX / 2); /* `next` passes the end by a range for each thread. */
    if (count == 0) {
        return;
    }
    uint64_t range = count / ((uint64_t)pool->threads * RANGES_PER_THREAD);
    range = range == 0 ? 1 : range;
    pthread_mutex_lock(&pool->lock);
    assert(pool->working == 0);
    pool->fn = fn;
    pool->done = done;
    pool->context = context;
    pool->count = count;
    pool->range = pool->started == 0 && done == NULL ? count : range; /* Nobody to share with, nobody to tell. */
    range = pool->range;
    if (done != NULL) {
        pool->done_ranges = 0;
        memset(pool->range_done, 0, range_count_max(pool->threads) * sizeof *pool->range_done);
    }
    bool shares = range < count;
    pool->working = shares ? pool->started : 0;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    if (shares && pool->started > 0) {
        pool->generation++;
        pthread_cond_broadcast(&pool->wake);
    }
    pthread_mutex_unlock(&pool->lock);

    work(pool, fn, context, count, range);

    pthread_mutex_lock(&pool->lock);
    while (pool->working > 0) {
        pthread_cond_wait(&pool->done_all, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}
