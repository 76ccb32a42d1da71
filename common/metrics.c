#include "common/metrics.h"

#include <math.h>
#include <stdarg.h>

void dl_metrics_begin(struct dl_metrics *metrics, struct dl_buf *out)
{
    metrics->out = out;
    metrics->family = "";
}

void dl_metrics_family(struct dl_metrics *metrics, const char *name, const char *type, const char *help)
{
    metrics->family = name;
    dl_buf_printf(metrics->out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void label(struct dl_buf *out, bool first, const char *name, const char *value)
{
    dl_buf_printf(out, "%s%s=\"", first ? "{" : ",", name);
    for (const char *c = value; *c != 0; c++) {
        if (*c == '\n') {
            dl_buf_puts(out, "\\n");
        } else {
            if (*c == '"' || *c == '\\') {
                dl_buf_append(out, "\\", 1);
            }
            dl_buf_append(out, c, 1);
        }
    }
    dl_buf_append(out, "\"", 1);
}

static void number(struct dl_buf *out, double value)
{
    if (isnan(value)) {
        dl_buf_puts(out, " NaN\n");
    } else if (isinf(value)) {
        dl_buf_puts(out, value > 0 ? " +Inf\n" : " -Inf\n");
    } else {
        dl_buf_printf(out, " %.17g\n", value);
    }
}

void dl_metrics_value(struct dl_metrics *metrics, double value, ...)
{
    dl_buf_puts(metrics->out, metrics->family);
    va_list args;
    va_start(args, value);
    bool first = true;
    for (const char *name; (name = va_arg(args, const char *)) != NULL; first = false) {
        label(metrics->out, first, name, va_arg(args, const char *));
    }
    va_end(args);
    if (!first) {
        dl_buf_puts(metrics->out, "}");
    }
    number(metrics->out, value);
}

static double bucket_bound(int bucket)
{
    return ldexp(0.001, bucket); /* 1 ms, 2 ms, ... 16.384 s */
}

void dl_histogram_add(struct dl_histogram *histogram, double seconds)
{
    int bucket = 0;
    while (bucket < DL_HISTOGRAM_BUCKETS - 1 && seconds > bucket_bound(bucket)) {
        bucket++;
    }
    histogram->buckets[bucket]++;
    histogram->count++;
    histogram->sum += seconds;
}

void dl_metrics_histogram(struct dl_metrics *metrics, const struct dl_histogram *histogram, const char *name,
                          const char *value)
{
    uint64_t below = 0;
    for (int bucket = 0; bucket < DL_HISTOGRAM_BUCKETS; bucket++) {
        below += histogram->buckets[bucket];
        dl_buf_printf(metrics->out, "%s_bucket", metrics->family);
        label(metrics->out, true, name, value);
        if (bucket == DL_HISTOGRAM_BUCKETS - 1) {
            dl_buf_printf(metrics->out, ",le=\"+Inf\"}");
        } else {
            dl_buf_printf(metrics->out, ",le=\"%g\"}", bucket_bound(bucket));
        }
        number(metrics->out, (double)below);
    }
    dl_buf_printf(metrics->out, "%s_sum", metrics->family);
    label(metrics->out, true, name, value);
    dl_buf_puts(metrics->out, "}");
    number(metrics->out, histogram->sum);
    dl_buf_printf(metrics->out, "%s_count", metrics->family);
    label(metrics->out, true, name, value);
    dl_buf_puts(metrics->out, "}");
    number(metrics->out, (double)histogram->count);
}
