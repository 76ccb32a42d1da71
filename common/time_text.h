/* dl_time: times as text (RFC 3339), as in logs, events, files and Kubernetes' objects.
 *
 * Pure: a time is nanoseconds since 1970, which shells take from dl_wall_ns. Any thread, any layer. */
#ifndef DL_COMMON_TIME_TEXT_H
#define DL_COMMON_TIME_TEXT_H

#include <stdint.h>

#include "common/err.h"

#define DL_TIME_TEXT_MAX 40

/* "2026-01-02T03:04:05Z", with `digits` (0 to 9) of the second's fraction: "2026-01-02T03:04:05.006Z"; the text is
 * returned. Times before 1970 are shown as 1970. */
const char *dl_time_text(int64_t wall_ns, unsigned digits, char text[static DL_TIME_TEXT_MAX]);

/* With "Z" or an offset, with or without a fraction. DL_EINVAL: it is not such a time. */
DL_MUST_CHECK enum dl_rc dl_time_parse(const char *text, int64_t *wall_ns, struct dl_err *err);

/* The same; 0 where there is no such time. NULL is none. */
int64_t dl_time_or_zero(const char *text);

#endif
