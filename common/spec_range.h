/* dl_range: regular expressions that hold for decimal numbers from a bound on, so that the API server can check the bounds
 * of numbers that stand in quotes.
 *
 * Both take for granted that the text matches DL_RANGE_DECIMAL, and are anchored. They are written in what RE2 and POSIX
 * extended expressions have in common. Pure; any thread. */
#ifndef DL_COMMON_SPEC_RANGE_H
#define DL_COMMON_SPEC_RANGE_H

#include <stdbool.h>

#include "common/buf.h"

/* No sign, no exponent, no leading zeros: "0", "12", "0.7". */
#define DL_RANGE_DECIMAL "^(0|[1-9][0-9]{0,15})(\\.[0-9]{1,16})?$"
bool dl_is_decimal(const char *text); /* The same by hand. */

/* Bounds are >= 0 and have at most 15 significant digits. */

/* Below 0, 0 or above 0, as `text`, which is decimal, is below, equal to or above the bound: digit by digit, as a pattern
 * sees it. */
int dl_decimal_compare(const char *text, double bound);

void dl_range_at_least(struct dl_buf *out, double bound);
void dl_range_at_most(struct dl_buf *out, double bound);

#endif
