/* op_json: reading and writing JSON such that 64-bit integers stay exact (cJSON alone keeps numbers as double).
 *
 * Reading: integer tokens are kept as text within the parsed tree and are converted by the getters below, which
 * therefore are the only way to read numbers from a tree made here. Writing: a growing text.
 *
 * Pure; any thread; layer operator/reconcile. */
#ifndef OP_RECONCILE_JSON_H
#define OP_RECONCILE_JSON_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define OP_JSON_BYTES_MAX (16u * 1024 * 1024) /* A text larger than this is refused before it is parsed. */
#define OP_JSON_DEPTH_MAX 32                  /* Writer: objects and arrays within one another. */

/* Parses `size` bytes. DL_EINVAL: not JSON (the text says where), too large. `*out` is the caller's: cJSON_Delete. */
DL_MUST_CHECK enum dl_rc op_json_parse(const char *text, size_t size, cJSON **out, struct dl_err *err);

/* Value of `key` in `object`, or `otherwise` when it is missing, null, of another kind or out of range. `object` may be
 * NULL. Text is borrowed from the tree. */
uint64_t op_json_u64(const cJSON *object, const char *key, uint64_t otherwise);
uint32_t op_json_u32(const cJSON *object, const char *key, uint32_t otherwise);
double op_json_double(const cJSON *object, const char *key, double otherwise);
bool op_json_bool(const cJSON *object, const char *key, bool otherwise);
const char *op_json_text(const cJSON *object, const char *key, const char *otherwise);

/* A text being written. Errors (no memory) stick: check once, with op_json_finish. */
struct op_json_out {
    char *text;
    size_t used, capacity;
    bool failed;
    uint32_t depth;
    bool filled[OP_JSON_DEPTH_MAX]; /* Whether a comma is due at this depth. */
};

void op_json_out_init(struct op_json_out *out);
/* `key` is NULL at the top and within arrays. */
void op_json_object_begin(struct op_json_out *out, const char *key);
void op_json_object_end(struct op_json_out *out);
void op_json_array_begin(struct op_json_out *out, const char *key);
void op_json_array_end(struct op_json_out *out);
void op_json_put_text(struct op_json_out *out, const char *key, const char *value); /* NULL is written as null. */
void op_json_put_u64(struct op_json_out *out, const char *key, uint64_t value);
void op_json_put_i64(struct op_json_out *out, const char *key, int64_t value);
void op_json_put_double(struct op_json_out *out, const char *key, double value); /* Not finite: null. */
void op_json_put_bool(struct op_json_out *out, const char *key, bool value);

/* The text (zero-terminated), the caller's to free; NULL when there was no memory. Ends the use of `out`. */
char *op_json_finish(struct op_json_out *out);

#endif
