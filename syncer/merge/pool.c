#include "syncer/merge/pool.h"

#include <assert.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

/* Ranges a thread takes in a run, about: few enough that taking costs nothing, many enough that a thread which is held
 * up leaves little to wait for. */
#define RANGES_PER_THREAD 16

struct sy_pool {
    uint32_t threads;
    uint32_t started;
    pthread_mutex_t lock;
    pthread_cond_t wake, done;
    uint64_t generation; /* Of the run; under the lock, as all below but `next`. */
    uint32_t working;    /* Threads that have not finished this run. */
    bool stopping;
    sy_pool_fn fn;
    void *context;
    uint64_t count, range;
    atomic_uint_fast64_t next; /* First index that nobody has taken. */
    pthread_t ids[];
};

static void work(struct sy_pool *pool, sy_pool_fn fn, void *context, uint64_t count, uint64_t range)
{
    for (;;) {
        uint64_t begin = atomic_fetch_add_explicit(&pool->next, range, memory_order_relaxed);
        if (begin >= count) {
            return;
        }
        fn(context, begin, range < count - begin ? begin + range : count);
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
            pthread_cond_signal(&pool->done);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
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
    pool->threads = threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
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
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    free(pool);
}

uint32_t sy_pool_threads(const struct sy_pool *pool)
{
    return pool->threads;
}

void sy_pool_run(struct sy_pool *pool, sy_pool_fn fn, void *context, uint64_t count)
{
    assert(count < UINT64_MAX / 2); /* `next` passes the end by a range for each thread. */
    if (count == 0) {
        return;
    }
    if (pool->started == 0 || count == 1) {
        fn(context, 0, count);
        return;
    }
    uint64_t range = count / ((uint64_t)pool->threads * RANGES_PER_THREAD);
    range = range == 0 ? 1 : range;
    pthread_mutex_lock(&pool->lock);
    assert(pool->working == 0);
    pool->fn = fn;
    pool->context = context;
    pool->count = count;
    pool->range = range;
    pool->working = pool->started;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    pool->generation++;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->lock);

    work(pool, fn, context, count, range);

    pthread_mutex_lock(&pool->lock);
    while (pool->working > 0) {
        pthread_cond_wait(&pool->done, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
}
