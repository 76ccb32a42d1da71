/* dl_metrics: Prometheus text exposition (version 0.0.4), written into a dl_buf. Pure; owner's thread.
 *
 *     struct dl_metrics m;
 *     dl_metrics_begin(&m, &buf);
 *     dl_metrics_family(&m, "diloco_pushes_total", "counter", "Pushes by verdict.");
 *     dl_metrics_value(&m, 3, "verdict", "late", NULL);
 */
#ifndef DL_COMMON_METRICS_H
#define DL_COMMON_METRICS_H

#include <stdint.h>

#include "common/buf.h"

#define DL_HISTOGRAM_BUCKETS 16

struct dl_metrics {
    struct dl_buf *out;
    const char *family;
};

/* Counts in buckets that double from 1 ms to 16 s, then +Inf; seconds. Zero-initialised is empty. */
struct dl_histogram {
    uint64_t buckets[DL_HISTOGRAM_BUCKETS];
    uint64_t count;
    double sum;
};

void dl_metrics_begin(struct dl_metrics *metrics, struct dl_buf *out);

/* Starts a family: its HELP and TYPE lines. `type`: "counter", "gauge", "histogram". */
void dl_metrics_family(struct dl_metrics *metrics, const char *name, const char *type, const char *help);

/* One sample of the family; label names and values alternate, closed by NULL. Values are escaped. */
void dl_metrics_value(struct dl_metrics *metrics, double value, ...) __attribute__((sentinel));

void dl_histogram_add(struct dl_histogram *histogram, double seconds);
/* Buckets, sum and count of the family, with one label. */
void dl_metrics_histogram(struct dl_metrics *metrics, const struct dl_histogram *histogram, const char *label,
                          const char *value);

#endif
