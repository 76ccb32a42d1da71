#include "common/safetensors.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/atomic_file.h"
#include "common/mem.h"
#include "common/safetensors_internal.h"

#define CONVERT_VALUES 8192 /* 16-bit values converted at a time, on the stack. */
#define READ_MAX ((size_t)1 << 30)

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "data is written and read in memory order");

/* --- writing --- */

static void print_quoted(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text != 0; text++) {
        if (*text == '"' || *text == '\\') {
            fprintf(out, "\\%c", *text);
        } else if ((unsigned char)*text < 0x20) {
            fprintf(out, "\\u%04x", (unsigned)*text);
        } else {
            fputc(*text, out);
        }
    }
    fputc('"', out);
}

static void print_header(FILE *out, const struct dl_tensor *tensors, uint32_t tensor_count,
                         const struct dl_safetensors_pair *metadata, uint32_t metadata_count)
{
    const char *separator = "";
    fputc('{', out);
    if (metadata_count > 0) {
        fprintf(out, "\"__metadata__\":{");
        for (uint32_t i = 0; i < metadata_count; i++) {
            fputs(i == 0 ? "" : ",", out);
            print_quoted(out, metadata[i].key);
            fputc(':', out);
            print_quoted(out, metadata[i].value);
        }
        fputc('}', out);
        separator = ",";
    }
    uint64_t offset = 0;
    for (uint32_t i = 0; i < tensor_count; i++, separator = ",") {
        fputs(separator, out);
        print_quoted(out, tensors[i].name);
        fprintf(out, ":{\"dtype\":\"F32\",\"shape\":[");
        for (uint32_t j = 0; j < tensors[i].rank; j++) {
            fprintf(out, "%s%" PRIu64, j == 0 ? "" : ",", tensors[i].shape[j]);
        }
        uint64_t end = offset + dl_tensor_elements(&tensors[i]) * sizeof(float);
        fprintf(out, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", offset, end);
        offset = end;
    }
    fputc('}', out);
}

/* The header with its length in front, padded with spaces so that data starts at a multiple of 8. */
static enum dl_rc make_header(const struct dl_tensor *tensors, uint32_t tensor_count,
                              const struct dl_safetensors_pair *metadata, uint32_t metadata_count, char **out,
                              size_t *size, struct dl_err *err)
{
    *out = NULL;
    FILE *stream = open_memstream(out, size);
    if (stream == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a safetensors header");
    }
    fwrite("\0\0\0\0\0\0\0\0", 1, 8, stream);
    print_header(stream, tensors, tensor_count, metadata, metadata_count);
    for (long at = ftell(stream); at % 8 != 0; at++) {
        fputc(' ', stream);
    }
    int failed = ferror(stream);
    if (fclose(stream) != 0 || failed) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a safetensors header");
    }
    uint64_t length = *size - 8;
    memcpy(*out, &length, sizeof length);
    return DL_OK;
}

enum dl_rc dl_safetensors_write(const char *path, const struct dl_tensor *tensors, const float *const *data,
                                uint32_t tensor_count, const struct dl_safetensors_pair *metadata,
                                uint32_t metadata_count, struct dl_err *err)
{
    assert(metadata_count <= DL_SAFETENSORS_METADATA_MAX);
    DL_AUTO_FREE char *header = NULL;
    size_t size;
    enum dl_rc rc = make_header(tensors, tensor_count, metadata, metadata_count, &header, &size, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct dl_atomic_file file;
    rc = dl_atomic_file_open(&file, path, err);
    if (rc != DL_OK) {
        return rc;
    }
    rc = dl_atomic_file_write(&file, header, size, err);
    for (uint32_t i = 0; rc == DL_OK && i < tensor_count; i++) {
        rc = dl_atomic_file_write(&file, data[i], dl_tensor_elements(&tensors[i]) * sizeof(float), err);
    }
    if (rc == DL_OK) {
        return dl_atomic_file_commit(&file, err);
    }
    dl_atomic_file_abandon(&file);
    return rc;
}

/* --- reading --- */

static enum dl_rc read_at(int fd, void *out, uint64_t size, uint64_t offset, const char *path, struct dl_err *err)
{
    char *at = out;
    while (size > 0) {
        ssize_t got = pread(fd, at, DL_MIN(size, (uint64_t)READ_MAX), (off_t)offset);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return dl_err_errno(err, DL_EIO, errno, "read %s", path);
        }
        if (got == 0) {
            return dl_err_set(err, DL_EINVAL, "read %s: the file ends at byte %llu", path, (unsigned long long)offset);
        }
        at += got;
        offset += (uint64_t)got;
        size -= (uint64_t)got;
    }
    return DL_OK;
}

static enum dl_rc open_file(int fd, const char *path, struct dl_safetensors **out, struct dl_err *err)
{
    struct stat status;
    uint64_t header_bytes;
    if (fstat(fd, &status) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "look at %s", path);
    }
    uint64_t size = (uint64_t)status.st_size;
    if (!S_ISREG(status.st_mode) || size < sizeof header_bytes) {
        return dl_err_set(err, DL_EINVAL, "%s is not a safetensors file: it is no regular file of 8 bytes or more",
                          path);
    }
    enum dl_rc rc = read_at(fd, &header_bytes, sizeof header_bytes, 0, path, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (header_bytes > DL_SAFETENSORS_HEADER_MAX || header_bytes > size - sizeof header_bytes) {
        return dl_err_set(err, DL_EINVAL, "%s is not a safetensors file: header of %llu bytes in a file of %llu", path,
                          (unsigned long long)header_bytes, (unsigned long long)size);
    }
    DL_AUTO_FREE char *header = malloc(header_bytes + 1);
    if (header == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the header of %s (%llu bytes)", path,
                          (unsigned long long)header_bytes);
    }
    rc = read_at(fd, header, header_bytes, sizeof header_bytes, path, err);
    if (rc != DL_OK) {
        return rc;
    }
    rc = dl_safetensors_parse(header, header_bytes, size - sizeof header_bytes - header_bytes, out, err);
    if (rc != DL_OK) {
        return dl_err_wrap(err, "%s", path);
    }
    (*out)->data_start = sizeof header_bytes + header_bytes;
    return DL_OK;
}

enum dl_rc dl_safetensors_open(const char *path, struct dl_safetensors **out, struct dl_err *err)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* A pipe must not block here. */
    if (fd < 0) {
        return dl_err_errno(err, errno == ENOENT ? DL_ENOTFOUND : DL_EIO, errno, "open %s", path);
    }
    struct dl_safetensors *file = NULL;
    enum dl_rc rc = open_file(fd, path, &file, err);
    if (rc != DL_OK) {
        close(fd);
        return rc;
    }
    assert(file != NULL);
    file->fd = fd;
    file->path = strdup(path);
    if (file->path == NULL) {
        dl_safetensors_close(file);
        return dl_err_set(err, DL_ENOMEM, "no memory to open %s", path);
    }
    *out = file;
    return DL_OK;
}

void dl_safetensors_close(struct dl_safetensors *file)
{
    if (file == NULL) {
        return;
    }
    if (file->fd >= 0) {
        close(file->fd);
    }
    for (uint32_t i = 0; i < file->metadata_count; i++) {
        free(file->metadata[i].key);
        free(file->metadata[i].value);
    }
    free(file->path);
    free(file->tensors);
    free(file->entries);
    free(file->by_name);
    free(file);
}

const struct dl_tensor *dl_safetensors_tensor(const struct dl_safetensors *file, uint32_t index)
{
    assert(index < file->count);
    return &file->tensors[index];
}

int64_t dl_safetensors_find(const struct dl_safetensors *file, const char *name)
{
    uint32_t low = 0, high = file->count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2, index = file->by_name[middle];
        int order = strcmp(name, file->tensors[index].name);
        if (order == 0) {
            return index;
        }
        if (order < 0) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return -1;
}

const char *dl_safetensors_metadata(const struct dl_safetensors *file, const char *key)
{
    for (uint32_t i = 0; i < file->metadata_count; i++) {
        if (strcmp(file->metadata[i].key, key) == 0) {
            return file->metadata[i].value;
        }
    }
    return NULL;
}

static float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float from_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
    if (exponent == 0) { /* Zero or subnormal: mantissa * 2^-24, exact in float. */
        float value = (float)mantissa * 0x1p-24f;
        return sign != 0 ? -value : value;
    }
    if (exponent == 31) {
        return from_bits(sign | 0x7F800000u | mantissa << 13);
    }
    return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static enum dl_rc read_16_bit(struct dl_safetensors *file, const struct dl_safetensors_entry *entry, uint64_t elements,
                              float *out, struct dl_err *err)
{
    uint16_t values[CONVERT_VALUES] = {0};
    for (uint64_t done = 0; done < elements;) {
        uint64_t count = DL_MIN(elements - done, (uint64_t)CONVERT_VALUES);
        enum dl_rc rc = read_at(file->fd, values, count * sizeof *values,
                                file->data_start + entry->begin + done * sizeof *values, file->path, err);
        if (rc != DL_OK) {
            return rc;
        }
        for (uint64_t i = 0; i < count; i++) {
            out[done + i] = entry->dtype == DL_DTYPE_BF16 ? from_bits((uint32_t)values[i] << 16) : from_half(values[i]);
        }
        done += count;
    }
    return DL_OK;
}

enum dl_rc dl_safetensors_read(struct dl_safetensors *file, uint32_t index, float *out, struct dl_err *err)
{
    assert(index < file->count && file->fd >= 0);
    const struct dl_safetensors_entry *entry = &file->entries[index];
    if (entry->dtype == DL_DTYPE_F32) {
        return read_at(file->fd, out, entry->end - entry->begin, file->data_start + entry->begin, file->path, err);
    }
    return read_16_bit(file, entry, dl_tensor_elements(&file->tensors[index]), out, err);
}
