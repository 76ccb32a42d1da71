/* What is decided about a push before it is merged. */
#include <math.h>

#include "common/hash.h"
#include "syncer/merge/merge.h"
#include "tests/unit/unit.h"

static void test_check_push(void)
{
    static const double others[] = {4, 1, 3, 1000};
    CU_ASSERT_EQUAL(sy_merge_check_push((double)NAN, others, 4, 10), DL_VERDICT_NOT_FINITE);
    CU_ASSERT_EQUAL(sy_merge_check_push((double)INFINITY, NULL, 0, 10), DL_VERDICT_NOT_FINITE);
    CU_ASSERT_EQUAL(sy_merge_check_push(1e30, NULL, 0, 10), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(sy_merge_check_push(35, others, 4, 10), DL_VERDICT_ACCEPTED); /* Median 3.5. */
    CU_ASSERT_EQUAL(sy_merge_check_push(35.1, others, 4, 10), DL_VERDICT_NORM);
    CU_ASSERT_EQUAL(sy_merge_check_push(30, others, 3, 10), DL_VERDICT_ACCEPTED); /* Median 3. */
    CU_ASSERT_EQUAL(sy_merge_check_push(30.1, others, 3, 10), DL_VERDICT_NORM);
    static const double still[] = {0, 0, 5};
    CU_ASSERT_EQUAL(sy_merge_check_push(1, still, 3, 10), DL_VERDICT_ACCEPTED);
    static const double squares[] = {9, 16, (double)NAN};
    CU_ASSERT_EQUAL(sy_merge_norm(squares, 2), 5);
    int finite = isfinite(sy_merge_norm(squares, 3));
    CU_ASSERT_FALSE(finite);
}

static void test_weight(void)
{
    struct dl_sync_spec sync = {.merge = {.weighting = DL_WEIGHT_TOKENS}};
    CU_ASSERT_EQUAL(sy_merge_weight(&sync, 10, 5000, 3), 5000.0 * 500.0);
    CU_ASSERT_EQUAL(sy_merge_weight(&sync, 0, 5000, 0), 0);
    CU_ASSERT_EQUAL(sy_merge_weight(&sync, 10, 0, 0), 0);
    sync.merge.weighting = DL_WEIGHT_EQUAL;
    CU_ASSERT_EQUAL(sy_merge_weight(&sync, 10, 5000, 3), 1);
    for (int k = 0; k < 400; k++) {
        sync.merge.staleness_decay = 0.05 * (1 + k % 7);
        double expected = exp(-sync.merge.staleness_decay * k);
        CU_ASSERT_DOUBLE_EQUAL(sy_merge_weight(&sync, 1, 1, (uint64_t)k) / expected, 1, 1e-12);
    }
    sync.merge.staleness_decay = 1e300;
    CU_ASSERT_EQUAL(sy_merge_weight(&sync, 1, 1, 5), 0);
}

static void test_hash(void)
{
    static const float values[DL_BLOCK] = {1, 2, 3};
    CU_ASSERT_EQUAL(sy_merge_hash(values, DL_BLOCK, 7), dl_hash64(values, sizeof values, 7));
    CU_ASSERT_NOT_EQUAL(sy_merge_hash(values, DL_BLOCK, 7), sy_merge_hash(values, DL_BLOCK, 8));
}

UNIT_MAIN("push", {"check push", test_check_push}, {"weight", test_weight}, {"hash", test_hash})
