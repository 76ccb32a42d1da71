/* The JSON header. A parser of its own: a header has one fixed shape, may be 100 MB from a stranger, and its offsets
 * are 64-bit integers that must not pass through double, as they would in a general JSON library. */
#include <ctype.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/safetensors_internal.h"

#define TEXT_MAX 4096 /* Bytes of a metadata value that are accepted. */

struct cursor {
    const char *start, *at, *end;
    struct dl_err *err;
};

static enum dl_rc fail(struct cursor *c, const char *what)
{
    (void)dl_err_set(c->err, DL_EINVAL, "safetensors header: %s at byte %llu", what,
                     (unsigned long long)(c->at - c->start));
    return DL_EINVAL;
}

static void skip_space(struct cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\r' || *c->at == '\t')) {
        c->at++;
    }
}

/* Takes `wanted` when it is next. */
static bool take(struct cursor *c, char wanted)
{
    skip_space(c);
    if (c->at < c->end && *c->at == wanted) {
        c->at++;
        return true;
    }
    return false;
}

static int hex_digit(char digit)
{
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    digit = (char)(digit | 0x20);
    return digit >= 'a' && digit <= 'f' ? digit - 'a' + 10 : -1;
}

/* A \uXXXX escape as UTF-8; surrogates are kept as three bytes each, since nothing here reads them. Returns bytes or 0.
 */
static size_t unicode_escape(struct cursor *c, char out[3])
{
    unsigned code = 0;
    if (c->end - c->at < 4) {
        return 0;
    }
    for (int i = 0; i < 4; i++) {
        int digit = hex_digit(*c->at++);
        if (digit < 0) {
            return 0;
        }
        code = code * 16 + (unsigned)digit;
    }
    if (code == 0) {
        return 0; /* A zero would cut the text. */
    }
    if (code < 0x80) {
        out[0] = (char)code;
        return 1;
    }
    if (code < 0x800) {
        out[0] = (char)(0xC0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3F));
        return 2;
    }
    out[0] = (char)(0xE0 | code >> 12);
    out[1] = (char)(0x80 | (code >> 6 & 0x3F));
    out[2] = (char)(0x80 | (code & 0x3F));
    return 3;
}

static size_t escape(struct cursor *c, char out[3])
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (c->at == c->end) {
        return 0;
    }
    char kind = *c->at++;
    if (kind == 'u') {
        return unicode_escape(c, out);
    }
    const char *found = kind == 0 ? NULL : strchr(from, kind);
    if (found == NULL) {
        return 0;
    }
    out[0] = to[found - from];
    return 1;
}

/* A string into `out`, zero-terminated, at most `size` bytes with the zero. */
static enum dl_rc take_string(struct cursor *c, char *out, size_t size)
{
    size_t used = 0;
    if (!take(c, '"')) {
        return fail(c, "a string is missing");
    }
    while (c->at < c->end && *c->at != '"') {
        char bytes[3];
        size_t count = 1;
        bytes[0] = *c->at++;
        if (bytes[0] == '\\') {
            count = escape(c, bytes);
        } else if ((unsigned char)bytes[0] < 0x20) {
            count = 0;
        }
        if (count == 0) {
            return fail(c, "a string holds a bad escape or control character");
        }
        if (used + count >= size) {
            return fail(c, "a string is too long");
        }
        memcpy(out + used, bytes, count);
        used += count;
    }
    out[used] = 0;
    return c->at < c->end && *c->at++ == '"' ? DL_OK : fail(c, "a string does not end");
}

static enum dl_rc take_integer(struct cursor *c, uint64_t *value)
{
    uint64_t sum = 0;
    skip_space(c);
    const char *first = c->at;
    while (c->at < c->end && isdigit((unsigned char)*c->at)) {
        unsigned digit = (unsigned)(*c->at - '0');
        if (sum > (UINT64_MAX - digit) / 10) {
            return fail(c, "a number exceeds 64 bits");
        }
        sum = sum * 10 + digit;
        c->at++;
    }
    if (c->at == first) {
        return fail(c, "a whole number is missing");
    }
    *value = sum;
    return DL_OK;
}

/* [a, b, ...] of at most `max` numbers. */
static enum dl_rc take_integers(struct cursor *c, uint64_t *values, uint32_t max, uint32_t *count)
{
    *count = 0;
    if (!take(c, '[')) {
        return fail(c, "a list is missing");
    }
    if (take(c, ']')) {
        return DL_OK;
    }
    do {
        if (*count == max) {
            return fail(c, "a list is too long");
        }
        enum dl_rc rc = take_integer(c, &values[*count]);
        if (rc != DL_OK) {
            return rc;
        }
        ++*count;
    } while (take(c, ','));
    return take(c, ']') ? DL_OK : fail(c, "a list does not end");
}

static enum dl_rc dtype_of(struct cursor *c, const char *name, const char *text, enum dl_dtype *dtype)
{
    static const char *const names[] = {[DL_DTYPE_F32] = "F32", [DL_DTYPE_BF16] = "BF16", [DL_DTYPE_F16] = "F16"};
    for (size_t i = 0; i < DL_COUNT_OF(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *dtype = (enum dl_dtype)i;
            return DL_OK;
        }
    }
    return dl_err_set(c->err, DL_EUNSUPPORTED, "safetensors: tensor %s has dtype %.16s; F32, BF16 and F16 can be read",
                      name, text);
}

static uint64_t dtype_bytes(enum dl_dtype dtype)
{
    return dtype == DL_DTYPE_F32 ? 4 : 2;
}

static bool name_is_clean(const char *name)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._/-";
    return name[0] != 0 && name[strspn(name, allowed)] == 0;
}

/* Shape times dtype must be what the offsets span; products are checked before they can overflow. */
static enum dl_rc check_size(struct cursor *c, const struct dl_tensor *tensor, const struct dl_safetensors_entry *entry,
                             uint64_t data_bytes)
{
    uint64_t elements = 1;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] == 0 || tensor->shape[i] > DL_TENSOR_ELEMENTS_MAX / elements) {
            return dl_err_set(c->err, DL_EINVAL, "safetensors: tensor %s has an empty or too large shape",
                              tensor->name);
        }
        elements *= tensor->shape[i];
    }
    uint64_t bytes = elements * dtype_bytes(entry->dtype);
    if (entry->end < entry->begin || entry->end > data_bytes || entry->end - entry->begin != bytes) {
        return dl_err_set(c->err, DL_EINVAL,
                          "safetensors: tensor %s needs %llu bytes, its offsets are %llu to %llu of %llu in the file",
                          tensor->name, (unsigned long long)bytes, (unsigned long long)entry->begin,
                          (unsigned long long)entry->end, (unsigned long long)data_bytes);
    }
    return DL_OK;
}

/* {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, in any order, each once. */
static enum dl_rc take_tensor(struct cursor *c, struct dl_tensor *tensor, struct dl_safetensors_entry *entry,
                              uint64_t data_bytes)
{
    char key[32], dtype[32] = "";
    uint64_t offsets[2] = {0};
    uint32_t offset_count = 0;
    unsigned seen = 0;
    if (!take(c, '{')) {
        return fail(c, "a tensor's description is missing");
    }
    do {
        enum dl_rc rc = take_string(c, key, sizeof key);
        if (rc == DL_OK && !take(c, ':')) {
            rc = fail(c, "a colon is missing");
        }
        if (rc != DL_OK) {
            return rc;
        }
        unsigned bit = 0;
        if (strcmp(key, "dtype") == 0) {
            bit = 1;
            rc = take_string(c, dtype, sizeof dtype);
        } else if (strcmp(key, "shape") == 0) {
            bit = 2;
            rc = take_integers(c, tensor->shape, DL_TENSOR_RANK_MAX, &tensor->rank);
        } else if (strcmp(key, "data_offsets") == 0) {
            bit = 4;
            rc = take_integers(c, offsets, 2, &offset_count);
        }
        if (rc != DL_OK) {
            return rc;
        }
        if (bit == 0 || (seen & bit) != 0) {
            return fail(c, "a tensor's description has an unknown or repeated key");
        }
        seen |= bit;
    } while (take(c, ','));
    if (!take(c, '}') || seen != 7 || offset_count != 2) {
        return fail(c, "a tensor's description is not complete");
    }
    if (tensor->rank == 0) { /* A scalar. */
        tensor->rank = 1;
        tensor->shape[0] = 1;
    }
    entry->begin = offsets[0];
    entry->end = offsets[1];
    enum dl_rc rc = dtype_of(c, tensor->name, dtype, &entry->dtype);
    return rc == DL_OK ? check_size(c, tensor, entry, data_bytes) : rc;
}

static enum dl_rc take_metadata(struct cursor *c, struct dl_safetensors *file)
{
    if (!take(c, '{')) {
        return fail(c, "__metadata__ is not an object");
    }
    if (take(c, '}')) {
        return DL_OK;
    }
    do {
        char key[DL_TENSOR_NAME_MAX], value[TEXT_MAX];
        if (file->metadata_count == DL_SAFETENSORS_METADATA_MAX) {
            return fail(c, "too much metadata");
        }
        enum dl_rc rc = take_string(c, key, sizeof key);
        if (rc == DL_OK && !take(c, ':')) {
            rc = fail(c, "a colon is missing");
        }
        if (rc == DL_OK) {
            rc = take_string(c, value, sizeof value);
        }
        if (rc != DL_OK) {
            return rc;
        }
        struct dl_safetensors_pair *pair = &file->metadata[file->metadata_count++];
        pair->key = strdup(key);
        pair->value = strdup(value);
        if (pair->key == NULL || pair->value == NULL) {
            return dl_err_set(c->err, DL_ENOMEM, "no memory for safetensors metadata");
        }
    } while (take(c, ','));
    return take(c, '}') ? DL_OK : fail(c, "__metadata__ does not end");
}

static enum dl_rc grow(struct dl_safetensors *file, struct dl_err *err)
{
    if (file->count < file->capacity) {
        return DL_OK;
    }
    if (file->capacity >= DL_TENSORS_MAX) {
        (void)dl_err_set(err, DL_EINVAL, "safetensors: more than %d tensors", DL_TENSORS_MAX);
        return DL_EINVAL;
    }
    uint32_t capacity = file->capacity == 0 ? 64 : file->capacity * 2;
    struct dl_tensor *tensors = realloc(file->tensors, capacity * sizeof *tensors);
    if (tensors != NULL) {
        file->tensors = tensors;
    }
    struct dl_safetensors_entry *entries = realloc(file->entries, capacity * sizeof *entries);
    if (entries != NULL) {
        file->entries = entries;
    }
    if (tensors == NULL || entries == NULL) {
        (void)dl_err_set(err, DL_ENOMEM, "no memory for %u tensors' descriptions", capacity);
        return DL_ENOMEM;
    }
    file->capacity = capacity;
    return DL_OK;
}

static enum dl_rc take_entry(struct cursor *c, struct dl_safetensors *file, uint64_t data_bytes)
{
    char name[DL_TENSOR_NAME_MAX];
    enum dl_rc rc = take_string(c, name, sizeof name);
    if (rc == DL_OK && !take(c, ':')) {
        rc = fail(c, "a colon is missing");
    }
    if (rc != DL_OK) {
        return rc;
    }
    if (strcmp(name, "__metadata__") == 0) {
        return take_metadata(c, file);
    }
    if (!name_is_clean(name)) {
        return fail(c, "a tensor's name holds characters outside A-Z a-z 0-9 . _ / -");
    }
    rc = grow(file, c->err);
    if (rc != DL_OK) {
        return rc;
    }
    struct dl_tensor *tensor = &file->tensors[file->count];
    memset(tensor, 0, sizeof *tensor);
    memcpy(tensor->name, name, strlen(name));
    rc = take_tensor(c, tensor, &file->entries[file->count], data_bytes);
    if (rc == DL_OK) {
        file->count++;
    }
    return rc;
}

static int compare_names(const void *a, const void *b, void *context)
{
    const struct dl_tensor *tensors = context;
    return strcmp(tensors[*(const uint32_t *)a].name, tensors[*(const uint32_t *)b].name);
}

static int compare_offsets(const void *a, const void *b, void *context)
{
    const struct dl_safetensors_entry *entries = context;
    uint64_t left = entries[*(const uint32_t *)a].begin, right = entries[*(const uint32_t *)b].begin;
    return left < right ? -1 : left > right;
}

/* Names are unique, and data covers the file exactly: no overlap, no hole in which something could hide. */
static enum dl_rc check_whole(struct dl_safetensors *file, uint64_t data_bytes, struct dl_err *err)
{
    file->by_name = malloc((file->count + 1) * sizeof *file->by_name);
    if (file->by_name == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for %u tensors' names", file->count);
    }
    uint32_t *order = file->by_name;
    for (uint32_t i = 0; i < file->count; i++) {
        order[i] = i;
    }
    uint64_t covered = 0;
    if (file->count > 0) {
        qsort_r(order, file->count, sizeof *order, compare_offsets, file->entries);
    }
    for (uint32_t i = 0; i < file->count; i++) {
        if (file->entries[order[i]].begin != covered) {
            return dl_err_set(err, DL_EINVAL, "safetensors: tensor %s starts at byte %llu, where %llu was expected",
                              file->tensors[order[i]].name, (unsigned long long)file->entries[order[i]].begin,
                              (unsigned long long)covered);
        }
        covered = file->entries[order[i]].end;
    }
    if (covered != data_bytes) {
        return dl_err_set(err, DL_EINVAL, "safetensors: tensors cover %llu bytes of data, the file has %llu",
                          (unsigned long long)covered, (unsigned long long)data_bytes);
    }
    if (file->count > 0) {
        qsort_r(order, file->count, sizeof *order, compare_names, file->tensors);
    }
    for (uint32_t i = 1; i < file->count; i++) {
        if (strcmp(file->tensors[order[i - 1]].name, file->tensors[order[i]].name) == 0) {
            return dl_err_set(err, DL_EINVAL, "safetensors: tensor %s is there twice", file->tensors[order[i]].name);
        }
    }
    return DL_OK;
}

static enum dl_rc take_header(struct cursor *c, struct dl_safetensors *file, uint64_t data_bytes)
{
    if (!take(c, '{')) {
        return fail(c, "no JSON object");
    }
    if (!take(c, '}')) {
        do {
            enum dl_rc rc = take_entry(c, file, data_bytes);
            if (rc != DL_OK) {
                return rc;
            }
        } while (take(c, ','));
        if (!take(c, '}')) {
            return fail(c, "the object does not end");
        }
    }
    skip_space(c);
    return c->at == c->end ? check_whole(file, data_bytes, c->err) : fail(c, "text after the object");
}

enum dl_rc dl_safetensors_parse(const char *header, uint64_t header_bytes, uint64_t data_bytes,
                                struct dl_safetensors **out, struct dl_err *err)
{
    struct dl_safetensors *file = calloc(1, sizeof *file);
    if (file == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a safetensors header");
    }
    file->fd = -1;
    struct cursor cursor = {.start = header, .at = header, .end = header + header_bytes, .err = err};
    enum dl_rc rc = take_header(&cursor, file, data_bytes);
    if (rc != DL_OK) {
        dl_safetensors_close(file);
        return rc;
    }
    *out = file;
    return DL_OK;
}
