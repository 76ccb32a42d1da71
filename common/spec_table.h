/* The one table of the job's fields: path, type, place in struct dl_spec, default, bounds, text. Parser, JSON writer, CRD
 * schema and job reference all read it; nothing else knows a field's default or bounds. Pure; any thread. */
#ifndef DL_COMMON_SPEC_TABLE_H
#define DL_COMMON_SPEC_TABLE_H

#include <stdbool.h>
#include <stddef.h>

#include "common/spec.h"

enum dl_field_type {
    DL_FIELD_BOOL,
    DL_FIELD_U16,
    DL_FIELD_U32,
    DL_FIELD_U64,
    DL_FIELD_I64,
    DL_FIELD_F64,    /* In the manifest a number, or a string that holds one ("0.7"). */
    DL_FIELD_ENUM,
    DL_FIELD_STRING,
    DL_FIELD_COUNT,  /* struct dl_count_or_percent: 3 or "75%". */
    DL_FIELD_PATHS,  /* List of strings into `paths`; the count stands in `path_count`. */
    DL_FIELD_RAW,    /* Object kept as JSON text. */
};

#define DL_FIELD_FROZEN 1u   /* Must not change once the job exists (model, fragments, protocol). */
#define DL_FIELD_REQUIRED 2u

struct dl_field {
    const char *path;         /* "sync.grace.margin", below `spec`; in the pool table relative to the pool. */
    enum dl_field_type type;
    size_t offset;            /* In struct dl_spec, or in struct dl_pool_spec. */
    size_t size;              /* Of a string's array. */
    const char *const *names; /* Of an enum, in the order of its values; NULL-terminated. */
    const char *preset;       /* Default as text; NULL: zero or empty. */
    double min, max;          /* Of numbers; percents have 1..100 besides. */
    unsigned flags;
    const char *text;         /* One line for people. */
};

extern const struct dl_field dl_spec_fields[];
extern const size_t dl_spec_field_count;
extern const struct dl_field dl_pool_fields[];
extern const size_t dl_pool_field_count;

/* An enum field's name of a value, by the field's path: dl_spec_enum_name("sync.compression", DL_CODEC_INT8) is "int8". */
const char *dl_spec_enum_name(const char *path, int value);

#endif
