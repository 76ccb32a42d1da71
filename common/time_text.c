#include "common/time_text.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define SECOND INT64_C(1000000000)
#define DAY INT64_C(86400)

/* Days since 1970-01-01 of a date of the Gregorian calendar, and back; eras of 400 years that begin in March. */
static int64_t days_of(int64_t year, int64_t month, int64_t day)
{
    year -= month <= 2 ? 1 : 0;
    int64_t era = (year >= 0 ? year : year - 399) / 400;
    int64_t of_era = year - era * 400;
    int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

const char *dl_time_text(int64_t wall_ns, unsigned digits, char text[static DL_TIME_TEXT_MAX])
{
    int64_t ns = wall_ns < 0 ? 0 : wall_ns, fraction = ns % SECOND;
    int64_t days = ns / SECOND / DAY + 719468, rest = ns / SECOND % DAY;
    int64_t era = days / 146097, of_era = days % 146097;
    int64_t year_of_era = (of_era - of_era / 1460 + of_era / 36524 - of_era / 146096) / 365;
    int64_t of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    int64_t shifted = (5 * of_year + 2) / 153, day = of_year - (153 * shifted + 2) / 5 + 1;
    int64_t month = shifted < 10 ? shifted + 3 : shifted - 9, year = year_of_era + era * 400 + (month <= 2 ? 1 : 0);
    int used =
        snprintf(text, DL_TIME_TEXT_MAX, "%04u-%02u-%02uT%02u:%02u:%02u", (unsigned)(year % 10000), (unsigned)month,
                 (unsigned)day, (unsigned)(rest / 3600), (unsigned)(rest / 60 % 60), (unsigned)(rest % 60));
    unsigned shown = digits > 9 ? 9 : digits;
    for (unsigned i = shown; i < 9; i++) {
        fraction /= 10;
    }
    if (shown == 0) {
        snprintf(text + used, DL_TIME_TEXT_MAX - (size_t)used, "Z");
    } else {
        snprintf(text + used, DL_TIME_TEXT_MAX - (size_t)used, ".%0*uZ", (int)shown, (unsigned)fraction);
    }
    return text;
}

/* `count` digits that are a number of at most `most`, and what follows them; NULL: they are not. */
static const char *take_number(const char *at, unsigned count, unsigned most, unsigned *value)
{
    *value = 0;
    for (unsigned i = 0; at != NULL && i < count; i++, at++) {
        if (*at < '0' || *at > '9') {
            return NULL;
        }
        *value = *value * 10 + (unsigned)(*at - '0');
    }
    return *value <= most ? at : NULL;
}

static const char *take_character(const char *at, char wanted)
{
    return at != NULL && *at == wanted ? at + 1 : NULL;
}

/* "Z", or hours and minutes that the text is ahead of it. */
static const char *take_zone(const char *at, int64_t *ahead_s)
{
    *ahead_s = 0;
    if (at == NULL || *at == 'Z') {
        return take_character(at, 'Z');
    }
    unsigned hours, minutes;
    bool is_behind = *at == '-';
    at = take_number(take_character(at, is_behind ? '-' : '+'), 2, 23, &hours);
    at = take_number(take_character(at, ':'), 2, 59, &minutes);
    *ahead_s = (is_behind ? -1 : 1) * ((int64_t)hours * 3600 + (int64_t)minutes * 60);
    return at;
}

static const char *take_fraction(const char *at, int64_t *fraction_ns)
{
    *fraction_ns = 0;
    if (at == NULL || *at != '.') {
        return at;
    }
    const char *first = ++at;
    for (int64_t unit = SECOND / 10; *at >= '0' && *at <= '9'; at++, unit /= 10) {
        *fraction_ns += unit * (*at - '0');
    }
    return at > first ? at : NULL;
}

static bool parse(const char *text, int64_t *wall_ns)
{
    unsigned year, month, day, hour, minute, second;
    int64_t fraction_ns, ahead_s;
    const char *at = take_number(text, 4, 2200, &year); /* Later ones do not fit into nanoseconds. */
    at = take_number(take_character(at, '-'), 2, 12, &month);
    at = take_number(take_character(at, '-'), 2, 31, &day);
    at = take_number(take_character(at, 'T'), 2, 23, &hour);
    at = take_number(take_character(at, ':'), 2, 59, &minute);
    at = take_number(take_character(at, ':'), 2, 60, &second); /* A leap second is the next one's first. */
    at = take_zone(take_fraction(at, &fraction_ns), &ahead_s);
    if (at == NULL || *at != 0 || year < 1900 || month == 0 || day == 0) {
        return false;
    }
    int64_t of_day = (int64_t)hour * 3600 + (int64_t)minute * 60 + second;
    *wall_ns = (days_of(year, month, day) * DAY + of_day - ahead_s) * SECOND + fraction_ns;
    return true;
}

enum dl_rc dl_time_parse(const char *text, int64_t *wall_ns, struct dl_err *err)
{
    return parse(text, wall_ns)
               ? DL_OK
               : dl_err_set(err, DL_EINVAL, "'%.60s' is not a time such as 2026-01-02T03:04:05Z", text);
}

int64_t dl_time_or_zero(const char *text)
{
    int64_t wall_ns = 0;
    return text != NULL && parse(text, &wall_ns) ? wall_ns : 0;
}
