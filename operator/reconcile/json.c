#include "operator/reconcile/json.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

/* --- reading --- */

static bool is_number_start(char c)
{
    return c == '-' || (c >= '0' && c <= '9');
}

static bool is_number_part(char c)
{
    return is_number_start(c) || c == '+' || c == '.' || c == 'e' || c == 'E';
}

/* Copies `text`, putting integer tokens in quotes. At worst every second byte is a one-digit number: 3 bytes for 1. */
static char *quote_integers(const char *text, size_t size)
{
    char *copy = malloc(size * 3 + 1);
    if (copy == NULL) {
        return NULL;
    }
    size_t used = 0;
    bool in_string = false;
    for (size_t i = 0; i < size;) {
        if (in_string || !is_number_start(text[i])) {
            if (text[i] == '"') {
                in_string = !in_string;
            }
            bool escape = in_string && text[i] == '\\' && i + 1 < size;
            copy[used++] = text[i++];
            if (escape) {
                copy[used++] = text[i++];
            }
            continue;
        }
        size_t length = 0;
        bool is_integer = true;
        while (i + length < size && is_number_part(text[i + length])) {
            is_integer = is_integer && is_number_start(text[i + length]);
            length++;
        }
        /* A sign alone, or one in the middle, is left bare for the parser to refuse. */
        is_integer = is_integer && memchr(text + i + 1, '-', length - 1) == NULL && text[i + length - 1] != '-';
        if (is_integer) {
            copy[used++] = '"';
        }
        memcpy(copy + used, text + i, length);
        used += length;
        i += length;
        if (is_integer) {
            copy[used++] = '"';
        }
    }
    copy[used] = 0;
    return copy;
}

enum dl_rc op_json_parse(const char *text, size_t size, cJSON **out, struct dl_err *err)
{
    if (size > OP_JSON_BYTES_MAX) {
        return dl_err_set(err, DL_EINVAL, "JSON of %zu bytes: at most %u are read", size, OP_JSON_BYTES_MAX);
    }
    DL_AUTO_FREE char *quoted = quote_integers(text, size);
    if (quoted == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to parse JSON of %zu bytes", size);
    }
    const char *end = NULL;
    cJSON *tree = cJSON_ParseWithOpts(quoted, &end, 1);
    if (tree == NULL) {
        return dl_err_set(err, DL_EINVAL, "not valid JSON near '%.24s'", end != NULL ? end : quoted);
    }
    *out = tree;
    return DL_OK;
}

static const cJSON *item_of(const cJSON *object, const char *key)
{
    return cJSON_IsObject(object) ? cJSON_GetObjectItemCaseSensitive(object, key) : NULL;
}

uint64_t op_json_u64(const cJSON *object, const char *key, uint64_t otherwise)
{
    const cJSON *item = item_of(object, key);
    if (!cJSON_IsString(item) || item->valuestring[0] < '0' || item->valuestring[0] > '9') {
        return otherwise;
    }
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(item->valuestring, &end, 10);
    return errno != 0 || *end != 0 ? otherwise : value;
}

uint32_t op_json_u32(const cJSON *object, const char *key, uint32_t otherwise)
{
    uint64_t value = op_json_u64(object, key, UINT64_MAX);
    return value > UINT32_MAX ? otherwise : (uint32_t)value;
}

double op_json_double(const cJSON *object, const char *key, double otherwise)
{
    const cJSON *item = item_of(object, key);
    if (cJSON_IsNumber(item)) {
        return item->valuedouble;
    }
    if (!cJSON_IsString(item) || !is_number_start(item->valuestring[0])) {
        return otherwise;
    }
    char *end = NULL;
    double value = strtod(item->valuestring, &end);
    return *end != 0 || !isfinite(value) ? otherwise : value;
}

bool op_json_bool(const cJSON *object, const char *key, bool otherwise)
{
    const cJSON *item = item_of(object, key);
    return cJSON_IsBool(item) ? cJSON_IsTrue(item) : otherwise;
}

const char *op_json_text(const cJSON *object, const char *key, const char *otherwise)
{
    const cJSON *item = item_of(object, key);
    return cJSON_IsString(item) ? item->valuestring : otherwise;
}

/* --- writing --- */

void op_json_out_init(struct op_json_out *out)
{
    *out = (struct op_json_out){0};
}

static bool reserve(struct op_json_out *out, size_t bytes)
{
    if (out->failed) {
        return false;
    }
    if (out->capacity - out->used > bytes) {
        return true;
    }
    size_t capacity = DL_MAX(out->capacity * 2, out->used + bytes + 256);
    char *text = realloc(out->text, capacity);
    if (text == NULL) {
        out->failed = true;
        return false;
    }
    out->text = text;
    out->capacity = capacity;
    return true;
}

static void append(struct op_json_out *out, const char *bytes, size_t size)
{
    if (reserve(out, size)) {
        memcpy(out->text + out->used, bytes, size);
        out->used += size;
    }
}

static void append_quoted(struct op_json_out *out, const char *value)
{
    append(out, "\"", 1);
    for (const char *at = value; *at != 0; at++) {
        unsigned char c = (unsigned char)*at;
        char escape[8];
        if (c == '"' || c == '\\') {
            escape[0] = '\\';
            escape[1] = *at;
            append(out, escape, 2);
        } else if (c < 0x20) {
            int length = snprintf(escape, sizeof escape, "\\u%04x", c);
            append(out, escape, (size_t)length);
        } else {
            append(out, at, 1);
        }
    }
    append(out, "\"", 1);
}

static void start_value(struct op_json_out *out, const char *key)
{
    if (out->depth > 0) {
        if (out->filled[out->depth - 1]) {
            append(out, ",", 1);
        }
        out->filled[out->depth - 1] = true;
    }
    if (key != NULL) {
        append_quoted(out, key);
        append(out, ":", 1);
    }
}

static void open_level(struct op_json_out *out, const char *key, const char *bracket)
{
    start_value(out, key);
    append(out, bracket, 1);
    assert(out->depth < OP_JSON_DEPTH_MAX);
    out->filled[out->depth++] = false;
}

static void close_level(struct op_json_out *out, const char *bracket)
{
    assert(out->depth > 0);
    out->depth--;
    append(out, bracket, 1);
}

void op_json_object_begin(struct op_json_out *out, const char *key)
{
    open_level(out, key, "{");
}

void op_json_object_end(struct op_json_out *out)
{
    close_level(out, "}");
}

void op_json_array_begin(struct op_json_out *out, const char *key)
{
    open_level(out, key, "[");
}

void op_json_array_end(struct op_json_out *out)
{
    close_level(out, "]");
}

void op_json_put_text(struct op_json_out *out, const char *key, const char *value)
{
    start_value(out, key);
    if (value == NULL) {
        append(out, "null", 4);
    } else {
        append_quoted(out, value);
    }
}

static void put_formatted(struct op_json_out *out, const char *key, const char *fmt, ...) DL_PRINTF(3, 4);
static void put_formatted(struct op_json_out *out, const char *key, const char *fmt, ...)
{
    char text[64];
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    assert(length > 0 && (size_t)length < sizeof text);
    start_value(out, key);
    append(out, text, (size_t)length);
}

void op_json_put_u64(struct op_json_out *out, const char *key, uint64_t value)
{
    put_formatted(out, key, "%llu", (unsigned long long)value);
}

void op_json_put_i64(struct op_json_out *out, const char *key, int64_t value)
{
    put_formatted(out, key, "%lld", (long long)value);
}

void op_json_put_double(struct op_json_out *out, const char *key, double value)
{
    if (isfinite(value)) {
        put_formatted(out, key, "%.10g", value);
    } else {
        put_formatted(out, key, "null");
    }
}

void op_json_put_bool(struct op_json_out *out, const char *key, bool value)
{
    put_formatted(out, key, value ? "true" : "false");
}

char *op_json_finish(struct op_json_out *out)
{
    assert(out->depth == 0);
    if (!reserve(out, 1)) {
        free(out->text);
        op_json_out_init(out);
        return NULL;
    }
    out->text[out->used] = 0;
    char *text = out->text;
    op_json_out_init(out);
    return text;
}
