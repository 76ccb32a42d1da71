/* The merge pool: every index once, on any number of threads, run after run. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "syncer/merge/pool.h"
#include "tests/unit/unit.h"

#define COUNT_MAX 5000

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
        CU_ASSERT_EQUAL(sy_pool_threads(pool), threads);
        for (int round = 0; round < 20; round++) {
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
                memset(&seen, 0, sizeof seen);
                sy_pool_run(pool, count_indices, &seen, counts[c]);
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

static void test_limits(void)
{
    struct sy_pool *pool = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL(sy_pool_new(0, &pool, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(sy_pool_new(SY_POOL_THREADS_MAX + 1, &pool, &err), DL_EINVAL);
    CU_ASSERT_PTR_NULL(pool);
    sy_pool_free(NULL);
}

UNIT_MAIN("pool", {"every index once", test_every_index_once}, {"limits", test_limits})
