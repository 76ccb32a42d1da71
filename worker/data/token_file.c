#include "worker/data/token_file.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/hash.h"
#include "common/le.h"
#include "common/mem.h"
#include "worker/data/cache.h"
#include "worker/data/dictzip.h"
#include "worker/data/gunzip.h"

static enum dl_rc open_error(struct dl_err *err, const char *path)
{
    switch (errno) {
    case ENOENT:
    case ENOTDIR:
        return dl_err_set(err, DL_ENOTFOUND,
                          "data file %s is not there; check spec.training.data.paths (relative ones are seen from the "
                          "manifest's folder)",
                          path);
    case EACCES:
    case EPERM: return dl_err_errno(err, DL_EDENIED, errno, "data file %s cannot be read; check its permissions", path);
    default: return dl_err_errno(err, DL_EIO, errno, "data file %s cannot be opened", path);
    }
}

static enum dl_rc map(const char *path, uint8_t **bytes, size_t *size, struct dl_err *err)
{
    DL_AUTO_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        return open_error(err, path);
    }
    if (!S_ISREG(info.st_mode)) {
        return dl_err_set(err, DL_EINVAL, "data file %s is not a plain file; name files, not folders or pipes", path);
    }
    if (info.st_size == 0) {
        return dl_err_set(err, DL_EINVAL, "data file %s is empty", path);
    }
    *size = (size_t)info.st_size;
    void *mapped = mmap(NULL, *size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (mapped == MAP_FAILED) {
        return dl_err_errno(err, DL_EIO, errno, "data file %s (%zu bytes) cannot be mapped into memory", path, *size);
    }
    *bytes = mapped;
    return DL_OK;
}

static bool ends_with(const char *text, const char *end)
{
    size_t length = strlen(text), end_length = strlen(end);
    return length >= end_length && strcmp(text + length - end_length, end) == 0;
}

/* Width that llm.c's header announces; 0: there is no such header. */
static uint32_t header_token_bytes(const struct wk_token_file *file)
{
    if (file->size < WK_LLMC_HEADER_BYTES) {
        return 0;
    }
    uint32_t magic = dl_le_u32(file->bytes), version = dl_le_u32(file->bytes + 4);
    if (magic == WK_LLMC_MAGIC_U16 && version == WK_LLMC_VERSION_U16) {
        return 2;
    }
    return magic == WK_LLMC_MAGIC_U32 && version == WK_LLMC_VERSION_U32 ? 4 : 0;
}

static enum dl_rc take_header(struct wk_token_file *file, uint32_t wanted_bytes, uint32_t header_bytes,
                              struct dl_err *err)
{
    if (wanted_bytes != 0 && wanted_bytes != header_bytes) {
        return dl_err_set(err, DL_EINVAL,
                          "data file %s: its header says tokens of %u bits, but spec.training.data.format says "
                          "uint%u; set it to uint%u or auto",
                          file->path, header_bytes * 8, wanted_bytes * 8, header_bytes * 8);
    }
    uint64_t promised = dl_le_u32(file->bytes + 8), held = (file->size - WK_LLMC_HEADER_BYTES) / header_bytes;
    if (promised > held || promised == 0) {
        return dl_err_set(err, DL_EINVAL,
                          "data file %s: its header promises %" PRIu64 " tokens, but %" PRIu64 " are there; copy "
                          "the file again",
                          file->path, promised, held);
    }
    file->token_bytes = header_bytes;
    file->first_token = WK_LLMC_HEADER_BYTES;
    file->tokens = promised;
    return DL_OK;
}

static enum dl_rc interpret(struct wk_token_file *file, enum dl_data_format format, struct dl_err *err)
{
    uint32_t wanted = format == DL_DATA_BIN_U16 ? 2 : format == DL_DATA_BIN_U32 ? 4 : format == DL_DATA_TEXT ? 1 : 0;
    uint32_t header = wanted == 1 ? 0 : header_token_bytes(file);
    if (header != 0) {
        return take_header(file, wanted, header, err);
    }
    if (wanted == 0 && ends_with(file->path, ".bin")) {
        return dl_err_set(err, DL_EINVAL,
                          "data file %s has no header that says what it holds; set spec.training.data.format to "
                          "uint16, uint32 or text",
                          file->path);
    }
    file->token_bytes = wanted == 0 ? 1 : wanted;
    if (file->size % file->token_bytes != 0) {
        return dl_err_set(err, DL_EINVAL,
                          "data file %s: %zu bytes are not a whole number of uint%u tokens; check "
                          "spec.training.data.format",
                          file->path, file->size, file->token_bytes * 8);
    }
    file->first_token = 0;
    file->tokens = file->size / file->token_bytes;
    return DL_OK;
}

static enum dl_rc unpack_alone(struct wk_token_file *file, uint64_t bytes_max, struct dl_err *err)
{
    uint8_t *unpacked = NULL;
    size_t size = 0;
    enum dl_rc rc = DL_OK;
    if (!wk_dictzip_unpack(file->bytes, file->size, bytes_max, &unpacked, &size)) {
        rc = wk_gunzip(file->path, file->bytes, file->size, bytes_max, &unpacked, &size, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    munmap(file->bytes, file->size);
    file->bytes = unpacked;
    file->size = size;
    file->is_unpacked = true;
    return size > 0 ? DL_OK : dl_err_set(err, DL_EINVAL, "data file %s unpacks to nothing", file->path);
}

/* The entry of a file as it is now: another content is another entry. */
static bool open_entry(const struct wk_token_file *file, struct wk_cache_entry *entry)
{
    struct stat info;
    char name[64];
    if (stat(file->path, &info) != 0) {
        return false;
    }
    const uint64_t facts[] = {(uint64_t)info.st_dev, (uint64_t)info.st_ino, (uint64_t)info.st_size,
                              (uint64_t)info.st_mtim.tv_sec, (uint64_t)info.st_mtim.tv_nsec};
    snprintf(name, sizeof name, "data-%016" PRIx64, dl_hash64(facts, sizeof facts, 0));
    return wk_cache_open(name, entry);
}

/* Replaces what is there by a mapping of the entry; false: as it was. */
static bool adopt(struct wk_token_file *file, const char *entry)
{
    struct dl_err err;
    struct wk_token_file shared = *file;
    if (map(entry, &shared.bytes, &shared.size, &err) != DL_OK) {
        return false;
    }
    wk_token_file_close(file);
    shared.is_unpacked = false;
    *file = shared;
    return true;
}

/* One copy for all processes of a run, where they have a cache. */
static enum dl_rc unpack(struct wk_token_file *file, uint64_t bytes_max, struct dl_err *err)
{
    struct wk_cache_entry entry;
    bool is_cached = open_entry(file, &entry);
    if (is_cached && adopt(file, entry.path)) {
        wk_cache_close(&entry);
        return DL_OK;
    }
    enum dl_rc rc = unpack_alone(file, bytes_max, err);
    if (is_cached) {
        if (rc == DL_OK && wk_cache_put(&entry, file->bytes, file->size)) {
            (void)adopt(file, entry.path);
        }
        wk_cache_close(&entry);
    }
    return rc;
}

enum dl_rc wk_token_file_open(const char *path, enum dl_data_format format, uint64_t unpacked_bytes_max,
                              struct wk_token_file *file, struct dl_err *err)
{
    struct wk_token_file opened = {0};
    if (strlen(path) >= sizeof opened.path) {
        return dl_err_set(err, DL_EINVAL, "the path of data file %s is too long (at most %zu bytes)", path,
                          sizeof opened.path - 1);
    }
    memcpy(opened.path, path, strlen(path) + 1);
    enum dl_rc rc = map(path, &opened.bytes, &opened.size, err);
    assert(rc != DL_OK || opened.bytes != NULL);
    if (rc == DL_OK && wk_is_gzip(opened.bytes, opened.size)) {
        rc = unpack(&opened, unpacked_bytes_max, err);
    }
    if (rc == DL_OK) {
        assert(opened.bytes != NULL);
        rc = interpret(&opened, format, err);
    }
    if (rc != DL_OK) {
        wk_token_file_close(&opened);
        return rc;
    }
    *file = opened;
    return DL_OK;
}

void wk_token_file_close(struct wk_token_file *file)
{
    if (file->is_unpacked) {
        free(file->bytes);
    } else if (file->bytes != NULL) {
        munmap(file->bytes, file->size);
    }
    file->bytes = NULL;
}

static uint32_t token_at(const struct wk_token_file *file, uint64_t index)
{
    const uint8_t *at = file->bytes + file->first_token + index * file->token_bytes;
    switch (file->token_bytes) {
    case 1: return at[0];
    case 2: return (uint32_t)at[0] | (uint32_t)at[1] << 8;
    default: return dl_le_u32(at);
    }
}

static enum dl_rc outside(const struct wk_token_file *file, uint64_t index, uint32_t vocab_size, struct dl_err *err)
{
    return dl_err_set(
        err, DL_EINVAL,
        "data file %s: token %u at byte %" PRIu64 " is not below spec.training.model.vocabSize %u; raise it, or "
        "check spec.training.data.format",
        file->path, token_at(file, index), (uint64_t)file->first_token + index * file->token_bytes, vocab_size);
}

enum dl_rc wk_token_file_read(const struct wk_token_file *file, uint64_t first, uint64_t count, uint32_t vocab_size,
                              uint32_t *out, struct dl_err *err)
{
    assert(first <= file->tokens && count <= file->tokens - first);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t token = token_at(file, first + i);
        if (token >= vocab_size) {
            return outside(file, first + i, vocab_size, err);
        }
        out[i] = token;
    }
    return DL_OK;
}

enum dl_rc wk_token_file_check(const struct wk_token_file *file, uint32_t vocab_size, struct dl_err *err)
{
    if (file->token_bytes == 1 && vocab_size >= 256) {
        return DL_OK;
    }
    for (uint64_t i = 0; i < file->tokens; i++) {
        if (token_at(file, i) >= vocab_size) {
            return outside(file, i, vocab_size, err);
        }
    }
    return DL_OK;
}
