#include "common/spec_range.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DIGITS_MAX 48
#define FRACTION "(\\.[0-9]+)?"

struct decimal {
    char whole[DIGITS_MAX]; /* "0", or without leading zeros. */
    char part[DIGITS_MAX];  /* After the point, without trailing zeros; may be empty. */
};

static void decimal_of(double bound, struct decimal *out)
{
    char text[40], digits[24];
    int length = snprintf(text, sizeof text, "%.14e", bound); /* d.dddddddddddddde+XX */
    assert(bound >= 0 && bound < 1e15 && length > 17 && text[1] == '.');
    snprintf(digits, sizeof digits, "%c%.14s", text[0], text + 2);
    for (size_t end = strlen(digits); end > 1 && digits[end - 1] == '0'; end--) {
        digits[end - 1] = 0;
    }
    int count = (int)strlen(digits), point = (int)strtol(text + 17, NULL, 10) + 1; /* Digits before the point. */
    int whole = 0, part = 0;
    assert(point > -DIGITS_MAX / 2 && point < DIGITS_MAX);
    for (int i = 0; i < point; i++) {
        out->whole[whole++] = i < count ? digits[i] : '0';
    }
    if (whole == 0) {
        out->whole[whole++] = '0';
    }
    for (int i = point; i < count; i++) {
        out->part[part++] = i < 0 ? '0' : digits[i];
    }
    out->whole[whole] = out->part[part] = 0;
}

int dl_decimal_compare(const char *text, double bound)
{
    struct decimal d;
    decimal_of(bound, &d);
    size_t whole = strcspn(text, "."), wanted = strlen(d.whole);
    if (whole != wanted) {
        return whole < wanted ? -1 : 1;
    }
    int order = strncmp(text, d.whole, whole);
    const char *part = text[whole] == '.' ? text + whole + 1 : "", *other = d.part;
    while (order == 0 && (*part != 0 || *other != 0)) {
        order = (*part != 0 ? *part++ : '0') - (*other != 0 ? *other++ : '0');
    }
    return order;
}

/* The first `count` digits of `digits`, one digit from `low` to `high`, then `rest`. Nothing when there is no such
 * digit. */
static void put_branch(struct dl_buf *out, const char *digits, size_t count, int low, int high, const char *rest)
{
    if (low <= high) {
        dl_buf_printf(out, "|%.*s[%c-%c]%s", (int)count, digits, low, high, rest);
    }
}

/* Whole parts of as many digits as the bound's that are above (or below) it. */
static void put_other_wholes(struct dl_buf *out, const struct decimal *bound, bool above)
{
    size_t count = strlen(bound->whole);
    for (size_t i = 0; i < count; i++) {
        char rest[64];
        int lowest = i == 0 && count > 1 ? '1' : '0';
        snprintf(rest, sizeof rest, "[0-9]{%zu}" FRACTION, count - i - 1);
        put_branch(out, bound->whole, i, above ? bound->whole[i] + 1 : lowest, above ? '9' : bound->whole[i] - 1, rest);
    }
}

void dl_range_at_least(struct dl_buf *out, double bound)
{
    struct decimal d;
    decimal_of(bound, &d);
    size_t count = strlen(d.part);
    dl_buf_printf(out, "^([1-9][0-9]{%zu,}" FRACTION, strlen(d.whole));
    put_other_wholes(out, &d, true);
    if (count == 0) {
        dl_buf_printf(out, "|%s" FRACTION ")$", d.whole);
        return;
    }
    dl_buf_printf(out, "|%s\\.(%s[0-9]*", d.whole, d.part);
    for (size_t i = 0; i < count; i++) {
        put_branch(out, d.part, i, d.part[i] + 1, '9', "[0-9]*");
    }
    dl_buf_puts(out, "))$");
}

void dl_range_at_most(struct dl_buf *out, double bound)
{
    struct decimal d;
    decimal_of(bound, &d);
    size_t whole = strlen(d.whole), count = strlen(d.part);
    dl_buf_printf(out, "^(%s(\\.(%s0*", d.whole, d.part);
    for (size_t i = 0; i < count; i++) {
        put_branch(out, d.part, i, '0', d.part[i] - 1, "[0-9]*");
        if (i > 0) {
            dl_buf_printf(out, "|%.*s", (int)i, d.part);
        }
    }
    dl_buf_puts(out, "))?");
    if (whole > 1) {
        dl_buf_printf(out, "|[0-9]{1,%zu}" FRACTION, whole - 1);
    }
    put_other_wholes(out, &d, false);
    dl_buf_puts(out, ")$");
}

bool dl_is_decimal(const char *text)
{
    size_t whole = strspn(text, "0123456789");
    if (whole == 0 || whole > 16 || (text[0] == '0' && whole > 1)) {
        return false;
    }
    if (text[whole] == 0) {
        return true;
    }
    size_t part = text[whole] == '.' ? strspn(text + whole + 1, "0123456789") : 0;
    return part > 0 && part <= 16 && text[whole + 1 + part] == 0;
}
