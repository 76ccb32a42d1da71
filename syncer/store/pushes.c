/* Merged pushes, kept beside the versions that they made (syncer.keepPushes).
 *
 * File, little-endian: magic "DLCPUSH1", fragment u32, count u32, version u64; for each push nonce u64, codec u32, zero u32,
 * bytes u64, XXH3 of the bytes u64; XXH3 of all that u64; then the pushes one after the other. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "common/hash.h"
#include "common/le.h"
#include "common/mem.h"
#include "syncer/store/internal.h"

#define HEAD_BYTES 24
#define ENTRY_BYTES 32
#define PUSHES_BYTES_MAX (UINT64_C(1) << 40)

static size_t head_bytes(uint32_t count)
{
    return HEAD_BYTES + (size_t)count * ENTRY_BYTES + 8;
}

static void path_of(char out[SY_STORE_PATH_MAX], const char *dir, uint32_t fragment, uint64_t version)
{
    snprintf(out, SY_STORE_PATH_MAX, "%.*s/pushes-%03" PRIu32 "-v%010" PRIu64 ".bin", SY_STORE_DIR_MAX - 1, dir,
             fragment, version);
}

/* --- writing --- */

static enum dl_rc write_all(const struct sy_store_ops *ops, int fd, const uint8_t *bytes, uint64_t size,
                            const char *path, struct dl_err *err)
{
    while (size > 0) {
        ssize_t written = ops->write(fd, bytes, (size_t)DL_MIN(size, UINT64_C(8) << 20));
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            int error = written == 0 ? ENOSPC : errno;
            return dl_err_errno(err, error == ENOSPC || error == EDQUOT ? DL_EFULL : DL_EIO, error, "writing %s", path);
        }
        bytes += written;
        size -= (uint64_t)written;
    }
    return DL_OK;
}

static void make_head(uint8_t *head, uint32_t fragment, uint64_t version, const struct sy_store_kept_push *pushes,
                      uint32_t count)
{
    memcpy(head, "DLCPUSH1", 8);
    dl_le_put(head + 8, fragment, 4);
    dl_le_put(head + 12, count, 4);
    dl_le_put(head + 16, version, 8);
    for (uint32_t i = 0; i < count; i++) {
        uint8_t *entry = head + HEAD_BYTES + (size_t)i * ENTRY_BYTES;
        dl_le_put(entry, pushes[i].nonce, 8);
        dl_le_put(entry + 8, pushes[i].codec, 8);
        dl_le_put(entry + 16, pushes[i].bytes, 8);
        dl_le_put(entry + 24, dl_hash64(pushes[i].encoded, pushes[i].bytes, 0), 8);
    }
    dl_le_put(head + head_bytes(count) - 8, dl_hash64(head, head_bytes(count) - 8, 0), 8);
}

enum dl_rc sy_store_keep_pushes(struct sy_store *store, uint32_t fragment, uint64_t version,
                                const struct sy_store_kept_push *pushes, uint32_t count, struct dl_err *err)
{
    char path[SY_STORE_PATH_MAX];
    path_of(path, store->dir, fragment, version);
    DL_AUTO_FREE uint8_t *head = malloc(head_bytes(count));
    if (head == NULL) {
        return dl_err_set(err, DL_EIO, "keeping pushes: no memory");
    }
    make_head(head, fragment, version, pushes, count);
    DL_AUTO_FD int fd = store->ops->open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0640);
    if (fd < 0) {
        return dl_err_errno(err, errno == ENOSPC || errno == EDQUOT ? DL_EFULL : DL_EIO, errno, "creating %s", path);
    }
    enum dl_rc rc = write_all(store->ops, fd, head, head_bytes(count), path, err);
    for (uint32_t i = 0; i < count && rc == DL_OK; i++) {
        rc = write_all(store->ops, fd, pushes[i].encoded, pushes[i].bytes, path, err);
    }
    return rc;
}

/* --- reading --- */

/* The whole file behind room for the table of pushes. */
static enum dl_rc read_file(const char *path, size_t *table_bytes, uint8_t **out, uint64_t *size, struct dl_err *err)
{
    DL_AUTO_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat info;
    if (fd < 0 || fstat(fd, &info) != 0) {
        return dl_err_errno(err, errno == ENOENT ? DL_ENOTFOUND : DL_EIO, errno, "opening %s", path);
    }
    *size = (uint64_t)info.st_size;
    if (*size < head_bytes(0) || *size > PUSHES_BYTES_MAX) {
        return dl_err_set(err, DL_ECORRUPT, "%s is not whole", path);
    }
    /* A table of as many pushes as the file could name. */
    *table_bytes = (size_t)((*size / ENTRY_BYTES + 1) * sizeof(struct sy_store_kept_push) + 63) / 64 * 64;
    *out = malloc(*table_bytes + *size);
    if (*out == NULL) {
        return dl_err_set(err, DL_ENOMEM, "reading %s: no memory", path);
    }
    for (uint64_t at = 0; at < *size;) {
        ssize_t got = read(fd, *out + *table_bytes + at, (size_t)DL_MIN(*size - at, UINT64_C(8) << 20));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return dl_err_errno(err, DL_EIO, got == 0 ? EIO : errno, "reading %s", path);
        }
        at += (uint64_t)got;
    }
    return DL_OK;
}

static bool is_intact(const uint8_t *file, uint64_t size, uint32_t fragment, uint64_t version)
{
    uint32_t count = (uint32_t)dl_le_get(file + 12, 4);
    if (memcmp(file, "DLCPUSH1", 8) != 0 || dl_le_get(file + 8, 4) != fragment || dl_le_get(file + 16, 8) != version ||
        count > size / ENTRY_BYTES || head_bytes(count) > size) {
        return false;
    }
    if (dl_le_get(file + head_bytes(count) - 8, 8) != dl_hash64(file, head_bytes(count) - 8, 0)) {
        return false;
    }
    uint64_t at = head_bytes(count);
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *entry = file + HEAD_BYTES + (size_t)i * ENTRY_BYTES;
        uint64_t bytes = dl_le_get(entry + 16, 8);
        if (bytes > size - at || dl_hash64(file + at, bytes, 0) != dl_le_get(entry + 24, 8)) {
            return false;
        }
        at += bytes;
    }
    return at == size;
}

enum dl_rc sy_store_read_pushes(const char *dir, uint32_t fragment, uint64_t version, struct sy_store_kept_push **out,
                                uint32_t *count, struct dl_err *err)
{
    char path[SY_STORE_PATH_MAX];
    path_of(path, dir, fragment, version);
    size_t table_bytes = 0;
    uint64_t size = 0;
    DL_AUTO_FREE uint8_t *memory = NULL;
    enum dl_rc rc = read_file(path, &table_bytes, &memory, &size, err);
    if (rc != DL_OK) {
        return rc;
    }
    const uint8_t *file = memory + table_bytes;
    if (!is_intact(file, size, fragment, version)) {
        return dl_err_set(err, DL_ECORRUPT, "%s is damaged or not whole", path);
    }
    struct sy_store_kept_push *pushes = (struct sy_store_kept_push *)(void *)memory;
    *count = (uint32_t)dl_le_get(file + 12, 4);
    uint64_t at = head_bytes(*count);
    for (uint32_t i = 0; i < *count; i++) {
        const uint8_t *entry = file + HEAD_BYTES + (size_t)i * ENTRY_BYTES;
        pushes[i] = (struct sy_store_kept_push){.nonce = dl_le_get(entry, 8),
                                                .codec = (uint32_t)dl_le_get(entry + 8, 4),
                                                .bytes = dl_le_get(entry + 16, 8),
                                                .encoded = file + at};
        at += pushes[i].bytes;
    }
    *out = pushes;
    dl_take(memory);
    return DL_OK;
}
