/* dl_time: to text and back, over leap years and centuries; what is not a time. */
#include <stdlib.h>
#include <time.h>

#include "common/mem.h"
#include "common/rng.h"
#include "common/time_text.h"
#include "tests/unit/unit.h"

#define SECOND INT64_C(1000000000)

static void test_texts(void)
{
    char text[DL_TIME_TEXT_MAX];
    int64_t ns = 0;
    struct dl_err err;
    CU_ASSERT_STRING_EQUAL(dl_time_text(INT64_C(1767323045000006789), 0, text), "2026-01-02T03:04:05Z");
    CU_ASSERT_STRING_EQUAL(dl_time_text(INT64_C(1767323045000006789), 6, text), "2026-01-02T03:04:05.000006Z");
    static const struct {
        const char *text;
        int64_t ns;
    } rows[] = {
        {"2026-01-02T03:04:05Z", INT64_C(1767323045000000000)},
        {"2026-01-02T03:04:05.000006Z", INT64_C(1767323045000006000)},
        {"2026-01-02T05:04:05.5+02:00", INT64_C(1767323045500000000)},
        {"2026-01-01T22:04:05-05:00", INT64_C(1767323045000000000)},
    };
    for (size_t i = 0; i < DL_COUNT_OF(rows); i++) {
        CU_ASSERT_EQUAL(dl_time_parse(rows[i].text, &ns, &err), DL_OK);
        CU_ASSERT_EQUAL(ns, rows[i].ns);
    }
    static const char *const wrong[] = {"",
                                        "tomorrow",
                                        "2026-01-02",
                                        "2026-01-02T03:04:05",
                                        "2026-01-02T03:04:05Zz",
                                        "2026-01-02T03:04:05+0200",
                                        "2026-01-02T03:04:05+"};
    for (size_t i = 0; i < DL_COUNT_OF(wrong); i++) {
        CU_ASSERT_EQUAL(dl_time_parse(wrong[i], &ns, &err), DL_EINVAL);
    }
}

static void test_dates(void)
{
    static const struct {
        const char *text;
        int64_t seconds;
    } rows[] = {
        {"1970-01-01T00:00:00Z", 0},
        {"2000-02-29T12:34:56Z", 951827696},
        {"2026-11-29T18:02:41Z", 1795975361},
        {"2100-03-01T00:00:00Z", 4107542400},
    };
    for (size_t i = 0; i < DL_COUNT_OF(rows); i++) {
        char text[DL_TIME_TEXT_MAX];
        CU_ASSERT_EQUAL(dl_time_or_zero(rows[i].text), rows[i].seconds * SECOND);
        CU_ASSERT_STRING_EQUAL(dl_time_text(rows[i].seconds * SECOND, 0, text), rows[i].text);
    }
    CU_ASSERT_EQUAL(dl_time_or_zero("yesterday"), 0);
    CU_ASSERT_EQUAL(dl_time_or_zero(NULL), 0);
}

/* The system's own calendar is the reference. */
static void test_any_second_as_the_system_says_it(void)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 1, dl_rng_stream("times", 0, 0));
    for (int i = 0; i < 20000; i++) {
        int64_t ns = (int64_t)dl_rng_below(&rng, UINT64_C(7000000000)) * SECOND + (int64_t)dl_rng_below(&rng, SECOND);
        time_t seconds = (time_t)(ns / SECOND);
        struct tm calendar;
        char text[DL_TIME_TEXT_MAX], expected[DL_TIME_TEXT_MAX];
        CU_ASSERT_PTR_NOT_NULL_FATAL(gmtime_r(&seconds, &calendar));
        size_t used = strftime(expected, sizeof expected, "%Y-%m-%dT%H:%M:%S", &calendar);
        snprintf(expected + used, sizeof expected - used, ".%09dZ", (int)(ns % SECOND));
        CU_ASSERT_STRING_EQUAL(dl_time_text(ns, 9, text), expected);
        CU_ASSERT_EQUAL(dl_time_or_zero(text), ns);
    }
}

UNIT_MAIN("time_text", {"texts", test_texts}, {"dates", test_dates},
          {"any second", test_any_second_as_the_system_says_it})
