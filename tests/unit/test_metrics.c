/* Growing buffers and the Prometheus text written into them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/buf.h"
#include "common/metrics.h"
#include "tests/unit/unit.h"

static void test_buf_stops_at_its_maximum(void)
{
    struct dl_buf buf;
    dl_buf_init(&buf, 10);
    dl_buf_puts(&buf, "12345");
    dl_buf_printf(&buf, "%d", 67890);
    CU_ASSERT_STRING_EQUAL(buf.data, "1234567890");
    CU_ASSERT_FALSE(buf.failed);
    dl_buf_puts(&buf, "x");
    CU_ASSERT_TRUE(buf.failed);
    CU_ASSERT_EQUAL(buf.size, 10);
    CU_ASSERT_PTR_NULL(dl_buf_take(&buf));
    dl_buf_puts(&buf, "again");
    char *text = dl_buf_take(&buf);
    CU_ASSERT_STRING_EQUAL(text, "again");
    free(text);
    dl_buf_release(&buf);
}

static void test_exposition_text(void)
{
    struct dl_buf buf;
    struct dl_metrics m;
    dl_buf_init(&buf, 1 << 16);
    dl_metrics_begin(&m, &buf);
    dl_metrics_family(&m, "diloco_pushes_total", "counter", "Pushes by verdict.");
    dl_metrics_value(&m, 3, "verdict", "la\"t\\e\n", "shard", "0", (char *)NULL);
    dl_metrics_family(&m, "diloco_loss", "gauge", "Loss.");
    dl_metrics_value(&m, (double)NAN, (char *)NULL);
    CU_ASSERT_STRING_EQUAL(buf.data,
                           "# HELP diloco_pushes_total Pushes by verdict.\n# TYPE diloco_pushes_total counter\n"
                           "diloco_pushes_total{verdict=\"la\\\"t\\\\e\\n\",shard=\"0\"} 3\n"
                           "# HELP diloco_loss Loss.\n# TYPE diloco_loss gauge\ndiloco_loss NaN\n");
    dl_buf_release(&buf);
}

static void test_histogram_buckets_are_cumulative(void)
{
    struct dl_histogram h = {0};
    const double seconds[] = {0.0005, 0.001, 0.0015, 3, 1000};
    for (size_t i = 0; i < 5; i++) {
        dl_histogram_add(&h, seconds[i]);
    }
    struct dl_buf buf;
    struct dl_metrics m;
    dl_buf_init(&buf, 1 << 16);
    dl_metrics_begin(&m, &buf);
    dl_metrics_family(&m, "t_seconds", "histogram", "T.");
    dl_metrics_histogram(&m, &h, "part", "wait");
    CU_ASSERT_PTR_NOT_NULL(strstr(buf.data, "t_seconds_bucket{part=\"wait\",le=\"0.001\"} 2\n"));
    CU_ASSERT_PTR_NOT_NULL(strstr(buf.data, "t_seconds_bucket{part=\"wait\",le=\"0.002\"} 3\n"));
    CU_ASSERT_PTR_NOT_NULL(strstr(buf.data, "t_seconds_bucket{part=\"wait\",le=\"4.096\"} 4\n"));
    CU_ASSERT_PTR_NOT_NULL(strstr(buf.data, "t_seconds_bucket{part=\"wait\",le=\"+Inf\"} 5\n"));
    CU_ASSERT_PTR_NOT_NULL(strstr(buf.data, "t_seconds_count{part=\"wait\"} 5\n"));
    dl_buf_release(&buf);
}

UNIT_MAIN("metrics", {"buffer stops at its maximum", test_buf_stops_at_its_maximum},
          {"exposition text", test_exposition_text}, {"histogram", test_histogram_buckets_are_cumulative})
