/* What is decided about a push before it is merged. */
#include <math.h>

#include "syncer/merge/merge.h"

double sy_merge_norm(const double *sum_squares, uint32_t slice_count)
{
    double sum = 0;
    for (uint32_t s = 0; s < slice_count; s++) {
        sum += sum_squares[s];
    }
    return sqrt(sum);
}

/* exp(-x) for x >= 0, from additions and products alone: libm's exp has variants that differ in the last bit from one
 * processor to the next, and weights must not. The series runs on x / 2^n <= 1/16, then the result is squared n times.
 */
static double exp_of_minus(double x)
{
    if (!(x < 700)) {
        return 0;
    }
    int halvings = 0;
    for (; x > 0.0625; x *= 0.5) {
        halvings++;
    }
    double sum = 1;
    double term = 1;
    for (int i = 1; i <= 12; i++) {
        term *= -x / i;
        sum += term;
    }
    for (; halvings > 0; halvings--) {
        sum *= sum;
    }
    return sum;
}

double sy_merge_weight(const struct dl_sync_spec *sync, uint32_t c_steps, uint64_t c_tokens, uint64_t staleness)
{
    if (c_steps == 0 || c_tokens == 0) {
        return 0;
    }
    double tokens = (double)c_tokens;
    double weight = sync->merge.weighting == DL_WEIGHT_TOKENS ? tokens * (tokens / c_steps) : 1.0;
    return weight * exp_of_minus(sync->merge.staleness_decay * (double)staleness);
}
