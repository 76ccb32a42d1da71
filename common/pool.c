#include "common/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "common/mem.h"

/* About 20 microseconds: longer than the gap between two jobs of a trainer's step, short enough not to matter to others. */
#define SPIN_TURNS 400

struct dl_pool {
    /* Tasks of the current job that nobody has claimed. A task is claimed by lowering it from a positive value; the
     * job's fields below are then stable until that task is counted in `finished`, since the owner waits for all of
     * them. A worker that wakes late finds zero and touches nothing, so that a job never waits for a thread that
     * sleeps. */
    _Alignas(64) atomic_uint unclaimed;
    _Alignas(64) atomic_uint finished;
    _Alignas(64) dl_pool_task run;
    void *context;
    uint32_t count;

    _Alignas(64) atomic_uint sleepers;
    atomic_bool owner_sleeps, stop;
    pthread_mutex_t mutex;
    pthread_cond_t wake, done;
    enum dl_pool_wait wait;
    uint32_t threads; /* With the owner. */
    uint32_t started; /* Threads to join. */
    struct worker {
        pthread_t thread;
        struct dl_pool *pool;
        uint32_t index;
    } * workers;
};

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static bool claim(struct dl_pool *pool, uint32_t *task)
{
    unsigned left = atomic_load_explicit(&pool->unclaimed, memory_order_relaxed);
    while (left > 0) {
        if (atomic_compare_exchange_weak_explicit(&pool->unclaimed, &left, left - 1, memory_order_acquire,
                                                  memory_order_relaxed)) {
            *task = pool->count - left;
            return true;
        }
    }
    return false;
}

static void work(struct dl_pool *pool, uint32_t thread)
{
    uint32_t task;
    while (claim(pool, &task)) {
        uint32_t count = pool->count;
        pool->run(pool->context, task, thread);
        /* Counted before the look at the owner, who announces his sleep before his last look at the count. */
        if (atomic_fetch_add(&pool->finished, 1) + 1 == count && atomic_load(&pool->owner_sleeps)) {
            pthread_mutex_lock(&pool->mutex);
            pthread_cond_signal(&pool->done);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

static void wait_for_work(struct dl_pool *pool)
{
    for (int turn = 0; turn < SPIN_TURNS; turn++) {
        if (atomic_load_explicit(&pool->unclaimed, memory_order_relaxed) > 0) {
            return;
        }
        pause_cpu();
    }
    pthread_mutex_lock(&pool->mutex);
    /* Announced before the last look, while the owner publishes before it looks for sleepers: one of the two sees the
     * other, so that no wake-up is lost. */
    atomic_fetch_add(&pool->sleepers, 1);
    while (atomic_load(&pool->unclaimed) == 0 && !atomic_load(&pool->stop)) {
        pthread_cond_wait(&pool->wake, &pool->mutex);
    }
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    while (!atomic_load_explicit(&worker->pool->stop, memory_order_relaxed)) {
        work(worker->pool, worker->index);
        wait_for_work(worker->pool);
    }
    return NULL;
}

/* For the tasks of others. */
static void wait_for_others(struct dl_pool *pool, uint32_t count)
{
    for (int turn = 0; atomic_load_explicit(&pool->finished, memory_order_acquire) < count; turn++) {
        if (turn < SPIN_TURNS) {
            pause_cpu();
        } else if (pool->wait == DL_POOL_YIELD) {
            sched_yield();
        } else {
            pthread_mutex_lock(&pool->mutex);
            atomic_store(&pool->owner_sleeps, true);
            while (atomic_load(&pool->finished) < count) {
                pthread_cond_wait(&pool->done, &pool->mutex);
            }
            atomic_store(&pool->owner_sleeps, false);
            pthread_mutex_unlock(&pool->mutex);
        }
    }
}

enum dl_rc dl_pool_new(uint32_t threads, enum dl_pool_wait wait, struct dl_pool **out, struct dl_err *err)
{
    if (threads == 0 || threads > DL_POOL_THREADS_MAX) {
        return dl_err_set(err, DL_EINVAL, "%u threads that compute; 1 to %d are possible", threads,
                          DL_POOL_THREADS_MAX);
    }
    struct dl_pool *pool = dl_alloc_aligned(sizeof *pool);
    struct worker *workers = calloc(threads, sizeof *workers);
    if (pool == NULL || workers == NULL) {
        free(pool);
        free(workers);
        return dl_err_set(err, DL_ENOMEM, "no memory for a pool of %u threads", threads);
    }
    pool->workers = workers;
    pool->threads = threads;
    pool->wait = wait;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pthread_cond_init(&pool->done, NULL);
    for (uint32_t i = 1; i < threads; i++) {
        workers[i].pool = pool;
        workers[i].index = i;
        int failure = pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]);
        if (failure != 0) {
            dl_pool_free(pool);
            return dl_err_errno(err, DL_ENOMEM, failure, "start compute thread %u of %u", i + 1, threads);
        }
        pool->started++;
    }
    *out = pool;
    return DL_OK;
}

void dl_pool_free(struct dl_pool *pool)
{
    if (pool == NULL) {
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    atomic_store(&pool->stop, true);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (uint32_t i = 1; i <= pool->started; i++) {
        pthread_join(pool->workers[i].thread, NULL);
    }
    pthread_mutex_destroy(&pool->mutex);
    pthread_cond_destroy(&pool->wake);
    pthread_cond_destroy(&pool->done);
    free(pool->workers);
    free(pool);
}

uint32_t dl_pool_threads(const struct dl_pool *pool)
{
    return pool->threads;
}

void dl_pool_run(struct dl_pool *pool, dl_pool_task run, void *context, uint32_t count)
{
    if (pool->threads == 1 || count <= 1) {
        for (uint32_t task = 0; task < count; task++) {
            run(context, task, 0);
        }
        return;
    }
    pool->run = run;
    pool->context = context;
    pool->count = count;
    atomic_store_explicit(&pool->finished, 0, memory_order_relaxed);
    atomic_store(&pool->unclaimed, count);
    if (atomic_load(&pool->sleepers) > 0) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake);
        pthread_mutex_unlock(&pool->mutex);
    }
    work(pool, 0);
    wait_for_others(pool, count);
}
