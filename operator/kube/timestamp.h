/* op_time: Kubernetes' times as text. Pure; any thread; layer operator/kube. */
#ifndef OP_KUBE_TIMESTAMP_H
#define OP_KUBE_TIMESTAMP_H

#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define OP_TIME_TEXT_MAX 40

/* "2026-01-02T03:04:05Z" (metav1.Time) and "2026-01-02T03:04:05.000006Z" (MicroTime) of nanoseconds since 1970; the text
 * is returned. */
const char *op_time_text(int64_t wall_ns, char text[static OP_TIME_TEXT_MAX]);
const char *op_time_micro_text(int64_t wall_ns, char text[static OP_TIME_TEXT_MAX]);

/* RFC 3339 with "Z" or an offset, with or without a fraction. DL_EINVAL: it is not one. */
DL_MUST_CHECK enum dl_rc op_time_parse(const char *text, int64_t *wall_ns, struct dl_err *err);

#endif
