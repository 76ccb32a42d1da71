/* What is decided about a push before it is merged. */
#include <math.h>

#include "common/hash.h"
#include "syncer/merge/merge.h"
#include "tests/unit/unit.h"

static void test_norm(void)
{
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

UNIT_MAIN("push", {"norm", test_norm}, {"weight", test_weight})
