/* The one table of the job's fields: path, type, place in struct dl_spec, default, bounds, text. Parser, JSON writer,
 * CRD schema and job reference all read it; nothing else knows a field's default or bounds. Pure; any thread. */
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
    DL_FIELD_F64, /* A number, or (without DL_FIELD_PLAIN) a string that holds one ("0.7"). */
    DL_FIELD_ENUM,
    DL_FIELD_STRING,
    DL_FIELD_COUNT, /* struct dl_count_or_percent: 3 or "75%". */
    DL_FIELD_PATHS, /* List of strings into `paths`; the count stands in `path_count`. */
    DL_FIELD_RAW,   /* Object kept as JSON text. */
};

#define DL_FIELD_FROZEN 1u /* Must not change once the job exists (model, fragments, protocol). */
#define DL_FIELD_REQUIRED 2u
#define DL_FIELD_PLAIN 4u     /* A number that is never quoted: rules of the API server compute with it. */
#define DL_FIELD_LABEL 8u     /* Text: a DNS label. */
#define DL_FIELD_QUANTITY 16u /* Text: an amount of bytes as Kubernetes writes it ("20Gi"). */

struct dl_field {
    const char *path; /* "sync.grace.margin", below `spec`; in the pool table relative to the pool. */
    enum dl_field_type type;
    size_t offset;            /* In struct dl_spec, or in struct dl_pool_spec. */
    size_t size;              /* Of a string's array. */
    const char *const *names; /* Of an enum, in the order of its values; NULL-terminated. */
    const char *preset;       /* Default as text; NULL: zero or empty. */
    double min, max;          /* Of numbers; percents have 1..100 besides. */
    unsigned flags;
    const char *text; /* One line for people. */
};

extern const struct dl_field dl_spec_fields[];
extern const size_t dl_spec_field_count;
extern const struct dl_field dl_pool_fields[];
extern const size_t dl_pool_field_count;

/* An enum field's name of a value, by the field's path: dl_spec_enum_name("sync.compression", DL_CODEC_INT8) is "int8".
 * Both must exist. */
const char *dl_spec_enum_name(const char *path, int value);

/* The way back: false, and nothing written, when the field has no value of that name. The field must exist. */
bool dl_spec_enum_value(const char *path, const char *name, int *value);

/* A rule between fields as the API server applies it; spec_check.c applies the same rule to every manifest. */
struct dl_rule {
    const char *at;   /* Path of the object that is `self`, from the manifest's root ("spec.sync"; "" is the root). */
    const char *cel;  /* Common Expression Language; all fields with a default are there. */
    const char *text; /* What a person reads when it does not hold. */
};
extern const struct dl_rule dl_spec_rules[];
extern const size_t dl_spec_rule_count;

#endif
