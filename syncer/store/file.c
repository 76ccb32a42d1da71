#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "common/content.h"
#include "common/hash.h"
#include "common/le.h"
#include "common/mem.h"
#include "syncer/store/internal.h"

#define READ_BYTES_MAX (8u << 20)

const char sy_store_magic[8] = {'D', 'L', 'C', 'S', 'T', 'A', 'T', 'E'};

static int real_open(const char *path, int flags, mode_t mode)
{
    return open(path, flags, mode);
}

static int real_write_back(int fd, off_t offset, off_t size)
{
    return sync_file_range(fd, offset, size, SYNC_FILE_RANGE_WRITE);
}

const struct sy_store_ops sy_store_ops_real = {.open = real_open,
                                               .write = write,
                                               .pwrite = pwrite,
                                               .write_back = real_write_back,
                                               .read = read,
                                               .fsync = fsync,
                                               .unlink = unlink};

enum dl_rc sy_store_rc_of_errno(int error)
{
    return error == ENOSPC || error == EDQUOT ? DL_EFULL : DL_EIO;
}

void sy_store_file_name(struct sy_store *store, char out[SY_STORE_FILE_MAX], uint32_t fragment, uint64_t version)
{
    snprintf(out, SY_STORE_FILE_MAX, "fragment-%03" PRIu32 "-v%010" PRIu64 "-e%" PRIu64 "-%" PRIu64 ".bin", fragment,
             version, store->epoch, store->serial++);
}

void sy_store_file_path(const struct sy_store *store, const char *name, char out[SY_STORE_PATH_MAX])
{
    snprintf(out, SY_STORE_PATH_MAX, "%s/%.*s", store->dir, SY_STORE_FILE_MAX - 1, name);
}

/* A short file is damage, a failing disk is not: the first has an older copy to fall back to. */
static enum dl_rc read_all(struct sy_store *store, int fd, void *bytes, uint64_t size, const char *path,
                           struct dl_err *err)
{
    uint8_t *at = bytes;
    while (size > 0) {
        ssize_t got = store->ops->read(fd, at, (size_t)DL_MIN(size, READ_BYTES_MAX));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) {
            return dl_err_errno(err, DL_EIO, errno, "reading %s", path);
        }
        if (got == 0) {
            return dl_err_set(err, DL_ECORRUPT, "%s is cut short, %" PRIu64 " bytes are missing", path, size);
        }
        at += got;
        size -= (uint64_t)got;
    }
    return DL_OK;
}

/* Where the next part begins. */
static enum dl_rc skip_to_block(int fd, const char *path, struct dl_err *err)
{
    off_t at = lseek(fd, 0, SEEK_CUR);
    if (at >= 0) {
        at = lseek(fd, (at + SY_STORE_BLOCK_BYTES - 1) / SY_STORE_BLOCK_BYTES * SY_STORE_BLOCK_BYTES, SEEK_SET);
    }
    return at >= 0 ? DL_OK : dl_err_errno(err, DL_EIO, errno, "reading %s", path);
}

static enum dl_rc check_header(const uint8_t *header, uint32_t fragment, uint64_t version, uint64_t parameters_bytes,
                               uint64_t state_bytes, const char *path, struct dl_err *err)
{
    if (memcmp(header, sy_store_magic, sizeof sy_store_magic) != 0 ||
        dl_le_get(header + SY_STORE_HASH_AT, 8) != dl_hash64(header, SY_STORE_HASH_AT, 0)) {
        return dl_err_set(err, DL_ECORRUPT, "%s: the header is damaged", path);
    }
    if (dl_le_u32(header + 8) != SY_STORE_FORMAT) {
        return dl_err_set(err, DL_EUNSUPPORTED, "%s has format %" PRIu32 ", this program reads %d", path,
                          dl_le_u32(header + 8), SY_STORE_FORMAT);
    }
    if (dl_le_u32(header + 12) != fragment || dl_le_get(header + 16, 8) != version) {
        return dl_err_set(err, DL_ECORRUPT, "%s holds fragment %" PRIu32 " version %" PRIu64 ", not what its name says",
                          path, dl_le_u32(header + 12), dl_le_get(header + 16, 8));
    }
    if (dl_le_get(header + 40, 8) != parameters_bytes ||
        (dl_le_get(header + 48, 8) != state_bytes && state_bytes > 0)) {
        /* The header is whole: it is the job that has changed. */
        return dl_err_set(err, DL_EINVAL,
                          "%s holds %" PRIu64 "+%" PRIu64 " bytes, the job asks for %" PRIu64 "+%" PRIu64
                          " (was sync.outerOptimizer changed?)",
                          path, dl_le_get(header + 40, 8), dl_le_get(header + 48, 8), parameters_bytes, state_bytes);
    }
    return DL_OK;
}

/* `*fd`, the caller's to close whatever is returned, is then behind the header. */
static enum dl_rc open_header(struct sy_store *store, const char *path, int *fd, uint8_t header[SY_STORE_HEADER_BYTES],
                              struct dl_err *err)
{
    *fd = store->ops->open(path, O_RDONLY | O_CLOEXEC, 0);
    if (*fd < 0) {
        return dl_err_errno(err, errno == ENOENT ? DL_ECORRUPT : DL_EIO, errno, "opening %s", path);
    }
    return read_all(store, *fd, header, SY_STORE_HEADER_BYTES, path, err);
}

enum dl_rc sy_store_file_state_bytes(struct sy_store *store, const char *name, uint32_t fragment, uint64_t version,
                                     uint64_t parameters_bytes, uint64_t *state_bytes, struct dl_err *err)
{
    char path[SY_STORE_PATH_MAX];
    uint8_t header[SY_STORE_HEADER_BYTES];
    DL_AUTO_FD int fd = -1;
    sy_store_file_path(store, name, path);
    enum dl_rc rc = open_header(store, path, &fd, header, err);
    if (rc == DL_OK) {
        rc = check_header(header, fragment, version, parameters_bytes, 0, path, err);
    }
    if (rc == DL_OK) {
        *state_bytes = dl_le_get(header + 48, 8);
    }
    return rc;
}

enum dl_rc sy_store_file_read(struct sy_store *store, const char *name, uint32_t fragment, uint64_t version,
                              void *parameters, uint64_t parameters_bytes, void *state, uint64_t state_bytes,
                              struct dl_err *err)
{
    char path[SY_STORE_PATH_MAX];
    uint8_t header[SY_STORE_HEADER_BYTES];
    DL_AUTO_FD int fd = -1;
    sy_store_file_path(store, name, path);
    enum dl_rc rc = open_header(store, path, &fd, header, err);
    if (rc == DL_OK) {
        rc = check_header(header, fragment, version, parameters_bytes, state_bytes, path, err);
    }
    if (rc == DL_OK) {
        rc = skip_to_block(fd, path, err);
    }
    if (rc == DL_OK) {
        rc = read_all(store, fd, parameters, parameters_bytes, path, err);
    }
    if (rc == DL_OK && state != NULL) {
        rc = skip_to_block(fd, path, err);
    }
    if (rc == DL_OK && state != NULL) {
        rc = read_all(store, fd, state, state_bytes, path, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    if (dl_content_hash(parameters, parameters_bytes) != dl_le_get(header + 56, 8)) {
        return dl_err_set(err, DL_ECORRUPT, "%s: the parameters do not match their checksum", path);
    }
    if (state != NULL && dl_content_hash(state, state_bytes) != dl_le_get(header + 64, 8)) {
        return dl_err_set(err, DL_ECORRUPT, "%s: the optimiser state does not match its checksum", path);
    }
    return DL_OK;
}

enum dl_rc sy_store_read_file(const char *dir, const char *file, uint32_t fragment, uint64_t version, void *parameters,
                              uint64_t parameters_bytes, void *state, uint64_t state_bytes, struct dl_err *err)
{
    DL_AUTO_FREE struct sy_store *store = calloc(1, sizeof *store);
    if (store == NULL) {
        return dl_err_set(err, DL_ENOMEM, "reading %s/%s: no memory", dir, file);
    }
    snprintf(store->dir, sizeof store->dir, "%s", dir);
    store->ops = &sy_store_ops_real;
    return sy_store_file_read(store, file, fragment, version, parameters, parameters_bytes, state, state_bytes, err);
}

void sy_store_file_remove(struct sy_store *store, const char *name)
{
    char path[SY_STORE_PATH_MAX];
    sy_store_file_path(store, name, path);
    /* A file that stays costs room only; the next opening tries again. */
    (void)store->ops->unlink(path);
}

uint64_t sy_store_file_bytes(const struct sy_store *store, const char *name)
{
    char path[SY_STORE_PATH_MAX];
    sy_store_file_path(store, name, path);
    struct stat info;
    return stat(path, &info) == 0 ? (uint64_t)info.st_size : 0;
}
