/* One field's value, from text. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/buf.h"
#include "common/spec_internal.h"

#define PLACE(type) ((type *)((char *)base + field->offset))

static enum dl_rc set_integer(const struct dl_field *field, void *base, const char *text, bool quoted, struct dl_err *err)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    bool is_number = !quoted && end != text && *end == 0;
    if (!is_number || errno != 0 || (double)value < field->min || (double)value > field->max) {
        return dl_err_set(err, DL_EINVAL, "'%s': allowed is a whole number from %.0f to %.0f", text, field->min, field->max);
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

static enum dl_rc set_number(const struct dl_field *field, void *base, const char *text, struct dl_err *err)
{
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end != 0 || !isfinite(value) || strpbrk(text, "xX") != NULL || value < field->min ||
        value > field->max) {
        return dl_err_set(err, DL_EINVAL, "'%s': allowed is a number from %g to %g", text, field->min, field->max);
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
    enum dl_rc rc = dl_err_set(err, DL_EINVAL, "'%s': allowed is one of %s", text, names.data != NULL ? names.data : "");
    dl_buf_release(&names);
    return rc;
}

static enum dl_rc set_count(const struct dl_field *field, void *base, const char *text, struct dl_err *err)
{
    char *end;
    errno = 0;
    long value = strtol(text, &end, 10);
    bool is_percent = end != text && strcmp(end, "%") == 0;
    double most = is_percent ? 100 : field->max;
    if (end == text || (*end != 0 && !is_percent) || errno != 0 || value < 1 || (double)value > most) {
        return dl_err_set(err, DL_EINVAL, "'%s': allowed is a count from 1 to %.0f, or a percentage from \"1%%\" to \"100%%\"",
                          text, field->max);
    }
    *PLACE(struct dl_count_or_percent) = (struct dl_count_or_percent){(uint32_t)value, is_percent};
    return DL_OK;
}

enum dl_rc dl_field_set(const struct dl_field *field, void *base, const char *text, bool quoted, struct dl_err *err)
{
    switch (field->type) {
    case DL_FIELD_BOOL:
        if (quoted || (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)) {
            return dl_err_set(err, DL_EINVAL, "'%s': allowed is true or false", text);
        }
        *PLACE(bool) = text[0] == 't';
        return DL_OK;
    case DL_FIELD_U16:
    case DL_FIELD_U32:
    case DL_FIELD_U64:
    case DL_FIELD_I64: return set_integer(field, base, text, quoted, err);
    case DL_FIELD_F64: return set_number(field, base, text, err);
    case DL_FIELD_ENUM: return set_enum(field, base, text, err);
    case DL_FIELD_COUNT: return set_count(field, base, text, err);
    case DL_FIELD_STRING:
        if (strlen(text) >= field->size) {
            return dl_err_set(err, DL_EINVAL, "'%.40s...': at most %zu characters", text, field->size - 1);
        }
        memcpy(PLACE(char), text, strlen(text) + 1);
        return DL_OK;
    case DL_FIELD_PATHS:
    case DL_FIELD_RAW: break;
    }
    return dl_err_set(err, DL_EINVAL, "'%s': a %s is expected", text, field->type == DL_FIELD_PATHS ? "list" : "mapping");
}
