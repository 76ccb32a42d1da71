/* What of a job must stay as it was once it exists. */
#include <string.h>

#include "common/mem.h"
#include "common/spec_table.h"

static size_t size_of(const struct dl_field *field)
{
    switch (field->type) {
    case DL_FIELD_BOOL: return sizeof(bool);
    case DL_FIELD_U16: return sizeof(uint16_t);
    case DL_FIELD_U32: return sizeof(uint32_t);
    case DL_FIELD_U64: return sizeof(uint64_t);
    case DL_FIELD_I64: return sizeof(int64_t);
    case DL_FIELD_F64: return sizeof(double);
    case DL_FIELD_ENUM: return sizeof(int);
    case DL_FIELD_STRING: return field->size;
    case DL_FIELD_COUNT: return sizeof(struct dl_count_or_percent);
    case DL_FIELD_PATHS:
    case DL_FIELD_RAW: break; /* None of these is frozen: they point elsewhere. */
    }
    return 0;
}

static bool is_same(const struct dl_field *field, const struct dl_spec *a, const struct dl_spec *b)
{
    const char *left = (const char *)a + field->offset, *right = (const char *)b + field->offset;
    return field->type == DL_FIELD_STRING ? strcmp(left, right) == 0 : memcmp(left, right, size_of(field)) == 0;
}

enum dl_rc dl_spec_check_frozen(const struct dl_spec *before, const struct dl_spec *after, struct dl_err *err)
{
    if (strcmp(before->name, after->name) != 0) {
        return dl_err_set(err, DL_EINVAL, "the job was %s, not %s: a run goes on with the job that it began with",
                          before->name, after->name);
    }
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        const struct dl_field *field = &dl_spec_fields[i];
        if ((field->flags & DL_FIELD_FROZEN) != 0 && !is_same(field, before, after)) {
            return dl_err_set(
                err, DL_EINVAL,
                "spec.%s cannot change once the job exists (docs/job-reference.md marks what cannot): put "
                "it back, or start a new run",
                field->path);
        }
    }
    return DL_OK;
}
