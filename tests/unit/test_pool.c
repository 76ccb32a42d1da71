/* Threads that share work: every task, every index once, on any number of threads, run after run. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/pool.h"
#include "syncer/merge/pool.h"
#include "tests/unit/unit.h"

#define COUNT_MAX 5000

struct tasks {
    uint8_t times[COUNT_MAX]; /* Plain, as below. */
    struct {
        _Alignas(64) uint32_t tasks; /* Plain: a thread's scratch memory is its own. */
        bool inside;
    } threads[5];
    atomic_uint wrong;
    bool slow; /* The last task is: whoever waits for it gets beyond its spinning. */
};

static void count_task(void *context, uint32_t task, uint32_t thread)
{
    struct tasks *tasks = context;
    atomic_fetch_add(&tasks->wrong, tasks->threads[thread].inside);
    tasks->threads[thread].inside = true;
    tasks->times[task]++;
    tasks->threads[thread].tasks++;
    for (volatile uint32_t i = 0; tasks->slow && i < 20000; i++) {
    }
    tasks->threads[thread].inside = false;
}

static void test_every_task_once(void)
{
    static struct tasks tasks;
    static const uint32_t counts[] = {0, 1, 2, 3, 17, COUNT_MAX};
    for (uint32_t threads = 1; threads <= DL_COUNT_OF(tasks.threads); threads++) {
        for (int wait = DL_POOL_YIELD; wait <= DL_POOL_SLEEP; wait++) {
            struct dl_pool *pool = NULL;
            CU_ASSERT_EQUAL_FATAL(dl_pool_new(threads, (enum dl_pool_wait)wait, &pool, NULL), DL_OK);
            CU_ASSERT_EQUAL(dl_pool_threads(pool), threads);
            for (uint32_t round = 0; round < 300; round++) {
                uint32_t count = counts[round % DL_COUNT_OF(counts)], wrong = 0, taken = 0;
                memset(&tasks, 0, sizeof tasks);
                tasks.slow = count < 20 && round % 5 == 0;
                dl_pool_run(pool, count_task, &tasks, count);
                for (uint32_t i = 0; i < COUNT_MAX; i++) {
                    wrong += tasks.times[i] != (i < count);
                }
                for (uint32_t i = 0; i < threads; i++) {
                    taken += tasks.threads[i].tasks;
                }
                CU_ASSERT(wrong == 0 && tasks.wrong == 0 && taken == count);
            }
            dl_pool_free(pool);
        }
    }
}

struct seen {
    uint8_t times[COUNT_MAX]; /* Written by whoever takes the index: a race shows under the thread sanitizer. */
    atomic_uint ranges;
};

static void count_indices(void *context, uint64_t begin, uint64_t end)
{
    struct seen *seen = context;
    for (uint64_t i = begin; i < end; i++) {
        seen->times[i]++;
    }
    atomic_fetch_add(&seen->ranges, 1);
}

static void test_every_index_once(void)
{
    static struct seen seen;
    static const uint64_t counts[] = {0, 1, 2, 3, 31, 32, 33, 100, COUNT_MAX};
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct sy_pool *pool = NULL;
        CU_ASSERT_EQUAL_FATAL(sy_pool_new(threads, &pool, NULL), DL_OK);
        for (int round = 0; round < 20; round++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                memset(&seen, 0, sizeof seen);
                sy_pool_run(pool, count_indices, NULL, &seen, counts[c]);
                uint64_t wrong = 0;
                for (uint64_t i = 0; i < COUNT_MAX; i++) {
                    wrong += seen.times[i] != (i < counts[c]);
                }
                CU_ASSERT_EQUAL(wrong, 0);
                CU_ASSERT_TRUE(seen.ranges <= counts[c]);
            }
        }
        sy_pool_free(pool);
    }
}

struct told {
    uint8_t done[COUNT_MAX]; /* Plain: telling is what makes it visible. */
    uint64_t end, calls, wrong;
};

static void mark(void *context, uint64_t begin, uint64_t end)
{
    struct told *told = context;
    memset(told->done + begin, 1, end - begin);
}

static void note_end(void *context, uint64_t end)
{
    struct told *told = context;
    told->wrong += end <= told->end;
    for (uint64_t i = told->end; i < end; i++) {
        told->wrong += told->done[i] != 1;
    }
    told->end = end;
    told->calls++;
}

/* Who is told of an end finds all below it done, in growing order, up to the count. */
static void test_told_how_far(void)
{
    static struct told told;
    static const uint64_t counts[] = {1, 2, 31, 63, 100, COUNT_MAX};
    for (uint32_t threads = 1; threads <= 5; threads++) {
        struct sy_pool *pool = NULL;
        CU_ASSERT_EQUAL_FATAL(sy_pool_new(threads, &pool, NULL), DL_OK);
        for (int round = 0; round < 20; round++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                told = (struct told){0};
                sy_pool_run(pool, mark, note_end, &told, counts[c]);
                CU_ASSERT_EQUAL(told.wrong, 0);
                CU_ASSERT_EQUAL(told.end, counts[c]);
            }
            CU_ASSERT(threads > 1 || told.calls > 8); /* Not only at the end. */
        }
        sy_pool_free(pool);
    }
}

static void test_limits(void)
{
    struct sy_pool *pool = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL(sy_pool_new(0, &pool, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(sy_pool_new(SY_POOL_THREADS_MAX + 1, &pool, &err), DL_EINVAL);
    CU_ASSERT_PTR_NULL(pool);
    sy_pool_free(NULL);
    struct dl_pool *threads = NULL;
    CU_ASSERT_EQUAL(dl_pool_new(0, DL_POOL_SLEEP, &threads, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(dl_pool_new(DL_POOL_THREADS_MAX + 1, DL_POOL_YIELD, &threads, &err), DL_EINVAL);
    CU_ASSERT_PTR_NULL(threads);
    dl_pool_free(NULL);
}

UNIT_MAIN("pool", {"every task once", test_every_task_once}, {"every index once", test_every_index_once},
          {"told how far", test_told_how_far}, {"limits", test_limits})
