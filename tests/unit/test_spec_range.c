/* Patterns of bounds against the numbers themselves, for the bounds of every field and for many others. */
#include <inttypes.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/rng.h"
#include "common/spec_range.h"
#include "common/spec_table.h"
#include "tests/unit/unit.h"

struct patterns {
    regex_t decimal, least, most;
};

static void compile(regex_t *regex, void (*make)(struct dl_buf *out, double bound), double bound)
{
    struct dl_buf text;
    dl_buf_init(&text, 16384);
    make(&text, bound);
    CU_ASSERT_FALSE_FATAL(text.failed);
    CU_ASSERT_EQUAL_FATAL(regcomp(regex, text.data, REG_EXTENDED | REG_NOSUB), 0);
    dl_buf_release(&text);
}

static bool matches(const regex_t *regex, const char *text)
{
    return regexec(regex, text, 0, NULL, 0) == 0;
}

static unsigned check(const struct patterns *p, const char *text, double least, double most)
{
    bool is_decimal = matches(&p->decimal, text);
    CU_ASSERT_EQUAL(is_decimal, dl_is_decimal(text));
    if (!is_decimal) {
        return 0;
    }
    double value = strtod(text, NULL);
    int low = dl_decimal_compare(text, least), high = dl_decimal_compare(text, most);
    /* Where a double can tell them apart it says the same. */
    bool is_right = (value <= least || low > 0) && (value >= least || low < 0) && (value <= most || high > 0) &&
                    (value >= most || high < 0);
    is_right = is_right && matches(&p->least, text) == (low >= 0) && matches(&p->most, text) == (high <= 0);
    if (!is_right) {
        printf("'%s' against %.15g to %.15g\n", text, least, most);
    }
    CU_ASSERT_TRUE(is_right);
    return 1;
}

/* Numbers on and around a bound, and with each of its digits changed. */
static unsigned check_around(const struct patterns *p, double bound, double least, double most)
{
    static const double factors[] = {0, 0.1, 0.5, 0.9, 0.999, 1, 1.001, 1.1, 1.5, 2, 10, 1000};
    unsigned tried = 0;
    char text[64];
    for (size_t i = 0; i < DL_COUNT_OF(factors); i++) {
        for (int digits = 0; digits <= 16; digits += 4) {
            snprintf(text, sizeof text, "%.*f", digits, bound * factors[i]);
            tried += check(p, text, least, most);
        }
    }
    snprintf(text, sizeof text, "%.12f", bound);
    for (size_t i = 0; text[i] != 0; i++) {
        char kept = text[i];
        for (char digit = '0'; kept != '.' && digit <= '9'; digit++) {
            text[i] = digit;
            tried += check(p, text, least, most);
        }
        text[i] = kept;
    }
    return tried;
}

static unsigned check_range(double least, double most)
{
    struct patterns p;
    CU_ASSERT_EQUAL_FATAL(regcomp(&p.decimal, DL_RANGE_DECIMAL, REG_EXTENDED | REG_NOSUB), 0);
    compile(&p.least, dl_range_at_least, least);
    compile(&p.most, dl_range_at_most, most);
    unsigned tried = check_around(&p, least, least, most) + check_around(&p, most, least, most);
    static const char *const odd[] = {"",   ".5",  "5.",  "1e3",   "-1",  "+1",  "00", "01", " 1",
                                      "1 ", "0x1", "1,5", "1.2.3", "nan", "0.0", "0",  "10", "99999999999999999"};
    for (size_t i = 0; i < DL_COUNT_OF(odd); i++) {
        check(&p, odd[i], least, most);
    }
    regfree(&p.decimal);
    regfree(&p.least);
    regfree(&p.most);
    return tried;
}

static void test_bounds_of_all_fields(void)
{
    unsigned fields = 0;
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        const struct dl_field *field = &dl_spec_fields[i];
        if (field->type == DL_FIELD_F64 && (field->flags & DL_FIELD_PLAIN) == 0) {
            CU_ASSERT(check_range(field->min, field->max) > 100);
            fields++;
        }
    }
    CU_ASSERT(fields > 15);
}

/* A number of few digits, as people write bounds. */
static double some_bound(struct dl_rng *rng)
{
    char text[64];
    static const char *const scales[] = {"e-8", "e-4", "", "e2"};
    snprintf(text, sizeof text, "%" PRIu64 "%s", dl_rng_below(rng, 100000), scales[dl_rng_below(rng, 4)]);
    return strtod(text, NULL);
}

static void test_many_bounds(void)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 7, 0);
    for (int i = 0; i < 150; i++) {
        double one = some_bound(&rng), other = some_bound(&rng);
        CU_ASSERT(check_range(DL_MIN(one, other), DL_MAX(one, other)) > 100);
    }
}

UNIT_MAIN("spec_range", {"bounds of all fields", test_bounds_of_all_fields}, {"many bounds", test_many_bounds})
