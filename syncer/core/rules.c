/* sy_core, pure rules: running means, medians, absurd norms. */
#include <string.h>

#include "syncer/core/state.h"

void sy_mean_add(double *mean, double sample)
{
    *mean = *mean < 0 ? sample : *mean + (sample - *mean) / 5;
}

/* Shell sort: the C library's qsort may allocate. */
static void sort(double *values, uint32_t count)
{
    for (uint32_t gap = count / 2; gap > 0; gap /= 2) {
        for (uint32_t i = gap; i < count; i++) {
            double value = values[i];
            uint32_t at = i;
            for (; at >= gap && values[at - gap] > value; at -= gap) {
                values[at] = values[at - gap];
            }
            values[at] = value;
        }
    }
}

double sy_median(double *values, uint32_t count, bool lower)
{
    if (count == 0) {
        return 0;
    }
    sort(values, count);
    double upper = values[count / 2];
    if (count % 2 == 1) {
        return upper;
    }
    double below = values[count / 2 - 1];
    return lower ? below : below + (upper - below) / 2;
}

bool sy_norm_check(const double *norms, uint32_t count, uint32_t index, double limit, double *scratch)
{
    if (count < SY_NORM_PUSHES_MIN) {
        return false;
    }
    memcpy(scratch, norms, count * sizeof *scratch);
    double median = sy_median(scratch, count, false);
    return median > 0 && norms[index] > limit * median;
}
