/* One field's value, from text. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/buf.h"
#include "common/mem.h"
#include "common/spec_internal.h"
#include "common/spec_range.h"

#define SHOWN "%.80s" /* As much of a wrong value as leaves room to say what is allowed. */
#define PLACE(type) ((type *)(void *)((char *)base + field->offset))

static enum dl_rc set_integer(const struct dl_field *field, void *base, const char *text, bool quoted,
                              struct dl_err *err)
{
    /* Leading zeros are refused: kubectl would read 010 as an octal number. */
    const char *digits = text + (text[0] == '-');
    bool is_number = !quoted && digits[0] != 0 && strspn(digits, "0123456789") == strlen(digits) &&
                     (digits[0] != '0' || digits[1] == 0);
    errno = 0;
    long long value = strtoll(text, NULL, 10);
    /* Bounds are whole numbers; a double could not tell 2^63 - 1 from its neighbours. */
    if (!is_number || errno != 0 || value < (long long)field->min || value > (long long)field->max) {
        return dl_err_set(err, DL_EINVAL, "'" SHOWN "': allowed is a whole number from %.0f to %.0f%s", text,
                          field->min, field->max,
                          quoted       ? ", without quotes"
                          : !is_number ? ", in digits"
                                       : "");
    }
    if (field->type == DL_FIELD_U16) {
        *PLACE(uint16_t) = (uint16_t)value;
    } else if (field->type == DL_FIELD_U32) {
        *PLACE(uint32_t) = (uint32_t)value;
    } else if (field->type == DL_FIELD_U64) {
        *PLACE(uint64_t) = (uint64_t)value;
    } else {
        *PLACE(int64_t) = value;
    }
    return DL_OK;
}

/* Decimal notation only: strtod would also take spaces, hexadecimal numbers and words. In quotes only what a pattern can
 * keep within bounds. */
static enum dl_rc set_number(const struct dl_field *field, void *base, const char *text, bool quoted,
                             struct dl_err *err)
{
    bool is_plain = (field->flags & DL_FIELD_PLAIN) != 0;
    char *end;
    double value = strtod(text, &end);
    bool is_number = end != text && *end == 0 && strspn(text, "0123456789+-.eE") == strlen(text) && isfinite(value);
    bool is_allowed = !quoted || (!is_plain && dl_is_decimal(text));
    bool is_within = is_number && is_allowed && value >= field->min && value <= field->max;
    if (is_within && quoted) {
        is_within = dl_decimal_compare(text, field->min) >= 0 && dl_decimal_compare(text, field->max) <= 0;
    }
    if (!is_within) {
        return dl_err_set(err, DL_EINVAL, "'" SHOWN "': allowed is a number from %g to %g%s", text, field->min,
                          field->max,
                          is_plain      ? ", without quotes"
                          : !is_allowed ? ", in quotes as 0.5"
                                        : "");
    }
    *PLACE(double) = value;
    return DL_OK;
}

static enum dl_rc set_enum(const struct dl_field *field, void *base, const char *text, struct dl_err *err)
{
    struct dl_buf names;
    dl_buf_init(&names, 256);
    for (int v = 0; field->names[v] != NULL; v++) {
        if (strcmp(field->names[v], text) == 0) {
            *PLACE(int) = v; /* Enums are ints here. */
            dl_buf_release(&names);
            return DL_OK;
        }
        dl_buf_printf(&names, "%s%s", v > 0 ? ", " : "", field->names[v]);
    }
    enum dl_rc rc =
        dl_err_set(err, DL_EINVAL, "'" SHOWN "': allowed is one of %s", text, names.data != NULL ? names.data : "");
    dl_buf_release(&names);
    return rc;
}

/* As the int-or-string of Kubernetes: a number is a count, a string holds a percentage. */
static enum dl_rc set_count(const struct dl_field *field, void *base, const char *text, bool quoted, struct dl_err *err)
{
    size_t digits = strspn(text, "0123456789");
    bool is_percent = strcmp(text + digits, "%") == 0;
    bool is_count = text[digits] == 0 && !quoted;
    double most = is_percent ? 100 : field->max;
    errno = 0;
    long value = strtol(text, NULL, 10);
    if (digits == 0 || text[0] == '0' || !(is_percent || is_count) || errno != 0 || (double)value > most) {
        return dl_err_set(err, DL_EINVAL,
                          "'" SHOWN "': allowed is a count from 1 to %.0f, or a percentage from \"1%%\" to \"100%%\"",
                          text, field->max);
    }
    *PLACE(struct dl_count_or_percent) = (struct dl_count_or_percent){(uint32_t)value, is_percent};
    return DL_OK;
}

bool dl_is_dns_label(const char *text)
{
    size_t length = strlen(text);
    return length >= 1 && length <= 63 && strspn(text, "abcdefghijklmnopqrstuvwxyz0123456789-") == length &&
           text[0] != '-' && text[length - 1] != '-';
}

static bool is_quantity(const char *text)
{
    static const char *const units[] = {"", "k", "M", "G", "T", "P", "E", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"};
    size_t digits = strspn(text, "0123456789");
    size_t fraction = text[digits] == '.' ? strspn(text + digits + 1, "0123456789") : 0;
    const char *unit = text + digits + (fraction > 0 ? fraction + 1 : 0);
    for (size_t i = 0; digits > 0 && i < DL_COUNT_OF(units); i++) {
        if (strcmp(unit, units[i]) == 0) {
            return true;
        }
    }
    return false;
}

static enum dl_rc set_text(const struct dl_field *field, void *base, const char *text, bool quoted, struct dl_err *err)
{
    if (strlen(text) >= field->size) {
        return dl_err_set(err, DL_EINVAL, "'%.40s...': at most %zu characters", text, field->size - 1);
    }
    if (!dl_scalar_is_text(text, quoted)) {
        return dl_err_set(err, DL_EINVAL, "'" SHOWN "': text is expected; put it in quotes", text);
    }
    if ((field->flags & DL_FIELD_LABEL) != 0 && !dl_is_dns_label(text)) {
        return dl_err_set(err, DL_EINVAL, "'" SHOWN "': a DNS label is required (lower-case letters, digits, '-')",
                          text);
    }
    if ((field->flags & DL_FIELD_QUANTITY) != 0 && !is_quantity(text)) {
        return dl_err_set(err, DL_EINVAL, "'" SHOWN "': an amount of bytes is required, such as 500Mi or 20Gi", text);
    }
    memcpy(PLACE(char), text, strlen(text) + 1);
    return DL_OK;
}

enum dl_rc dl_field_set(const struct dl_field *field, void *base, const char *text, bool quoted, struct dl_err *err)
{
    switch (field->type) {
    case DL_FIELD_BOOL:
        if (quoted || (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)) {
            return dl_err_set(err, DL_EINVAL, "'" SHOWN "': allowed is true or false", text);
        }
        *PLACE(bool) = text[0] == 't';
        return DL_OK;
    case DL_FIELD_U16:
    case DL_FIELD_U32:
    case DL_FIELD_U64:
    case DL_FIELD_I64: return set_integer(field, base, text, quoted, err);
    case DL_FIELD_F64: return set_number(field, base, text, quoted, err);
    case DL_FIELD_ENUM: return set_enum(field, base, text, err);
    case DL_FIELD_COUNT: return set_count(field, base, text, quoted, err);
    case DL_FIELD_STRING: return set_text(field, base, text, quoted, err);
    case DL_FIELD_PATHS:
    case DL_FIELD_RAW: break;
    }
    return dl_err_set(err, DL_EINVAL, "'" SHOWN "': a %s is expected", text,
                      field->type == DL_FIELD_PATHS ? "list" : "mapping");
}
