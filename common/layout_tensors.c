/* Validation and encoding of the tensor table. */
#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/layout.h"
#include "common/le.h"
#include "common/mem.h"

#define FORMAT 1
#define HEAD_BYTES 5                 /* format u8, count u32 */
#define TENSOR_BYTES_MIN (1 + 1 + 6) /* A name of one byte, rank 0. */

uint64_t dl_tensor_elements(const struct dl_tensor *tensor)
{
    uint64_t elements = 1;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        elements *= tensor->shape[i];
    }
    return elements;
}

static bool name_is_valid(const char *name)
{
    size_t length = strnlen(name, DL_TENSOR_NAME_MAX);
    if (length == 0 || length == DL_TENSOR_NAME_MAX) {
        return false;
    }
    for (size_t i = 0; i < length; i++) {
        char c = name[i];
        bool is_alphanumeric = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!is_alphanumeric && c != '.' && c != '_' && c != '/' && c != '-') {
            return false;
        }
    }
    return true;
}

static enum dl_rc check_tensor(const struct dl_tensor *tensor, uint32_t index, struct dl_err *err)
{
    if (!name_is_valid(tensor->name)) {
        return dl_err_set(err, DL_EINVAL, "tensor %u: a name has 1 to %d characters of A-Z a-z 0-9 . _ / -", index,
                          DL_TENSOR_NAME_MAX - 1);
    }
    if (tensor->rank > DL_TENSOR_RANK_MAX) {
        return dl_err_set(err, DL_EINVAL, "tensor %s: rank %u, at most %d", tensor->name, tensor->rank,
                          DL_TENSOR_RANK_MAX);
    }
    if (tensor->role != DL_TENSOR_WEIGHT && tensor->role != DL_TENSOR_EMBEDDING) {
        return dl_err_set(err, DL_EINVAL, "tensor %s: role %d is unknown", tensor->name, (int)tensor->role);
    }
    uint64_t elements = 1;
    for (uint32_t i = 0; i < tensor->rank; i++) {
        uint64_t extent = tensor->shape[i];
        if (extent == 0 || extent > DL_TENSOR_ELEMENTS_MAX / elements) {
            return dl_err_set(err, DL_EINVAL,
                              "tensor %s: extent %llu of dimension %u; every extent is at least 1, a tensor has "
                              "at most 2^40 elements",
                              tensor->name, (unsigned long long)extent, i);
        }
        elements *= extent;
    }
    return DL_OK;
}

static int compare_names(const void *a, const void *b)
{
    const struct dl_tensor *const *left = a;
    const struct dl_tensor *const *right = b;
    return strcmp((*left)->name, (*right)->name);
}

enum dl_rc dl_tensors_check(const struct dl_tensor *tensors, uint32_t tensor_count, struct dl_err *err)
{
    if (tensor_count == 0 || tensor_count > DL_TENSORS_MAX) {
        return dl_err_set(err, DL_EINVAL, "%u tensors; a model has 1 to %d", tensor_count, DL_TENSORS_MAX);
    }
    DL_AUTO_FREE const struct dl_tensor **by_name = calloc(tensor_count, sizeof(struct dl_tensor *));
    if (by_name == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to check %u tensors", tensor_count);
    }
    for (uint32_t i = 0; i < tensor_count; i++) {
        enum dl_rc rc = check_tensor(&tensors[i], i, err);
        if (rc != DL_OK) {
            return rc;
        }
        by_name[i] = &tensors[i];
    }
    qsort(by_name, tensor_count, sizeof(struct dl_tensor *), compare_names);
    for (uint32_t i = 1; i < tensor_count; i++) {
        if (strcmp(by_name[i - 1]->name, by_name[i]->name) == 0) {
            return dl_err_set(err, DL_EINVAL, "tensor %s occurs twice", by_name[i]->name);
        }
    }
    return DL_OK;
}

/* --- encoding --- */

static uint8_t *put(uint8_t *at, uint64_t value, size_t bytes)
{
    dl_le_put(at, value, bytes);
    return at + bytes;
}

enum dl_rc dl_tensors_encode(const struct dl_tensor *tensors, uint32_t tensor_count, uint8_t **out, size_t *size,
                             struct dl_err *err)
{
    enum dl_rc rc = dl_tensors_check(tensors, tensor_count, err);
    if (rc != DL_OK) {
        return rc;
    }
    size_t bytes = HEAD_BYTES;
    for (uint32_t i = 0; i < tensor_count; i++) {
        bytes += 1 + strlen(tensors[i].name) + 6 + 8 * (size_t)tensors[i].rank;
    }
    uint8_t *encoded = malloc(bytes);
    if (encoded == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a table of %u tensors", tensor_count);
    }
    uint8_t *at = put(encoded, FORMAT, 1);
    at = put(at, tensor_count, 4);
    for (uint32_t i = 0; i < tensor_count; i++) {
        const struct dl_tensor *tensor = &tensors[i];
        size_t length = strlen(tensor->name);
        at = put(at, length, 1);
        memcpy(at, tensor->name, length);
        at = put(at + length, (uint64_t)tensor->role, 1);
        at = put(at, tensor->rank, 1);
        at = put(at, tensor->layer, 4);
        for (uint32_t d = 0; d < tensor->rank; d++) {
            at = put(at, tensor->shape[d], 8);
        }
    }
    assert((size_t)(at - encoded) == bytes);
    *out = encoded;
    *size = bytes;
    return DL_OK;
}

struct reader {
    const uint8_t *at;
    size_t left;
    bool overran; /* Something was asked for that was not there; everything read since is zero. */
};

static const uint8_t *take_bytes(struct reader *reader, size_t bytes)
{
    if (reader->overran || reader->left < bytes) {
        reader->overran = true;
        return NULL;
    }
    const uint8_t *at = reader->at;
    reader->at += bytes;
    reader->left -= bytes;
    return at;
}

static uint64_t take(struct reader *reader, size_t bytes)
{
    const uint8_t *at = take_bytes(reader, bytes);
    return at == NULL ? 0 : dl_le_get(at, bytes);
}

static enum dl_rc decode_tensor(struct reader *reader, uint32_t index, struct dl_tensor *tensor, struct dl_err *err)
{
    size_t length = take(reader, 1);
    const uint8_t *name = take_bytes(reader, length);
    if (length == 0 || length >= DL_TENSOR_NAME_MAX) {
        return dl_err_set(err, DL_EPROTO, "tensor table: tensor %u: a name of %zu bytes", index, length);
    }
    if (name != NULL) {
        if (memchr(name, 0, length) != NULL) {
            return dl_err_set(err, DL_EPROTO, "tensor table: tensor %u: a zero byte in its name", index);
        }
        memcpy(tensor->name, name, length); /* The table is zeroed: the name ends. */
    }
    uint8_t role = (uint8_t)take(reader, 1);
    uint8_t rank = (uint8_t)take(reader, 1);
    tensor->layer = (uint32_t)take(reader, 4);
    if (role > DL_TENSOR_EMBEDDING || rank > DL_TENSOR_RANK_MAX) {
        return dl_err_set(err, DL_EPROTO, "tensor table: tensor %u: role %u, rank %u", index, role, rank);
    }
    tensor->role = (enum dl_tensor_role)role;
    tensor->rank = rank;
    for (uint32_t d = 0; d < rank; d++) {
        tensor->shape[d] = take(reader, 8);
    }
    if (reader->overran) {
        return dl_err_set(err, DL_EPROTO, "tensor table: ends within tensor %u", index);
    }
    return DL_OK;
}

enum dl_rc dl_tensors_decode(const uint8_t *bytes, size_t size, struct dl_tensor **out, uint32_t *tensor_count,
                             struct dl_err *err)
{
    struct reader reader = {.at = bytes, .left = size};
    uint8_t format = (uint8_t)take(&reader, 1);
    uint32_t count = (uint32_t)take(&reader, 4);
    if (reader.overran || format != FORMAT) {
        return dl_err_set(err, DL_EPROTO, "tensor table: %zu bytes, format %u; expected format %d", size, format,
                          FORMAT);
    }
    /* A count that the bytes cannot hold is refused before memory is taken for it. */
    if (count == 0 || count > DL_TENSORS_MAX || count > reader.left / TENSOR_BYTES_MIN) {
        return dl_err_set(err, DL_EPROTO, "tensor table: %u tensors in %zu bytes (at most %d)", count, size,
                          DL_TENSORS_MAX);
    }
    DL_AUTO_FREE struct dl_tensor *tensors = calloc(count, sizeof *tensors);
    if (tensors == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for %u tensors", count);
    }
    for (uint32_t i = 0; i < count; i++) {
        enum dl_rc rc = decode_tensor(&reader, i, &tensors[i], err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    if (reader.left != 0) {
        return dl_err_set(err, DL_EPROTO, "tensor table: %zu bytes left over after %u tensors", reader.left, count);
    }
    struct dl_err inner;
    enum dl_rc rc = dl_tensors_check(tensors, count, &inner);
    if (rc != DL_OK) {
        return dl_err_set(err, rc == DL_EINVAL ? DL_EPROTO : rc, "tensor table: %s", inner.text);
    }
    *out = dl_take(tensors);
    *tensor_count = count;
    return DL_OK;
}
