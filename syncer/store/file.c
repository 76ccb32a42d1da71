#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>

#include "common/hash.h"
#include "common/mem.h"
#include "syncer/store/internal.h"

#define FORMAT_VERSION 1
#define WRITE_EARLY_BYTES (1u << 20)
#define WRITE_BYTES_MAX (8u << 20) /* One write call: a full disk is noticed early, a signal loses little. */

static const char magic[8] = {'D', 'L', 'C', 'S', 'T', 'A', 'T', 'E'};

static int real_open(const char *path, int flags, mode_t mode)
{
    return open(path, flags, mode);
}

const struct sy_store_ops sy_store_ops_real = {
    .open = real_open, .write = write, .read = read, .fsync = fsync, .unlink = unlink};

static enum dl_rc rc_of_errno(int error)
{
    return error == ENOSPC || error == EDQUOT ? DL_EFULL : DL_EIO;
}

static void put_u32(uint8_t *out, uint32_t value)
{
    for (int i = 0; i < 4; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static void put_u64(uint8_t *out, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint32_t get_u32(const uint8_t *bytes)
{
    uint32_t value = 0;
    for (int i = 0; i < 4; i++) {
        value |= (uint32_t)bytes[i] << (8 * i);
    }
    return value;
}

static uint64_t get_u64(const uint8_t *bytes)
{
    return get_u32(bytes) | (uint64_t)get_u32(bytes + 4) << 32;
}

void sy_store_file_name(struct sy_store *store, char out[SY_STORE_FILE_MAX], uint32_t fragment, uint64_t version)
{
    snprintf(out, SY_STORE_FILE_MAX, "fragment-%03" PRIu32 "-v%010" PRIu64 "-e%" PRIu64 "-%" PRIu64 ".bin", fragment,
             version, store->epoch, store->serial++);
}

static void path_of(const struct sy_store *store, const char *name, char out[SY_STORE_PATH_MAX])
{
    snprintf(out, SY_STORE_PATH_MAX, "%s/%.*s", store->dir, SY_STORE_FILE_MAX - 1, name);
}

static enum dl_rc write_all(struct sy_store *store, int fd, const void *bytes, uint64_t size, const char *path,
                            struct dl_err *err)
{
    const uint8_t *at = bytes;
    while (size > 0) {
        ssize_t written = store->ops->write(fd, at, (size_t)DL_MIN(size, WRITE_BYTES_MAX));
        if (written < 0 && errno == EINTR) {
            continue;
        }
        if (written <= 0) {
            int error = written == 0 ? ENOSPC : errno;
            return dl_err_errno(err, rc_of_errno(error), error, "writing %s", path);
        }
        at += written;
        size -= (uint64_t)written;
        if (written >= (ssize_t)WRITE_EARLY_BYTES) {
            /* The disk works while the rest is copied; the sync that counts comes later, so that a failure means nothing. */
            (void)sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WRITE);
        }
    }
    return DL_OK;
}

static void make_header(uint8_t header[SY_STORE_HEADER_BYTES], const struct sy_store_commit *commit, uint64_t epoch,
                        uint64_t parameters_hash)
{
    memset(header, 0, SY_STORE_HEADER_BYTES);
    memcpy(header, magic, sizeof magic);
    put_u32(header + 8, FORMAT_VERSION);
    put_u32(header + 12, commit->fragment);
    put_u64(header + 16, commit->version);
    put_u64(header + 24, commit->round);
    put_u64(header + 32, epoch);
    put_u64(header + 40, commit->parameters_bytes);
    put_u64(header + 48, commit->state_bytes);
    put_u64(header + 56, parameters_hash);
    put_u64(header + 64, dl_hash64(commit->state, commit->state_bytes, 0));
    put_u64(header + SY_STORE_HEADER_BYTES - 8, dl_hash64(header, SY_STORE_HEADER_BYTES - 8, 0));
}

static enum dl_rc write_content(struct sy_store *store, int fd, const struct sy_store_commit *commit,
                                uint64_t parameters_hash, const char *path, struct dl_err *err)
{
    uint8_t header[SY_STORE_HEADER_BYTES];
    make_header(header, commit, store->epoch, parameters_hash);
    enum dl_rc rc = write_all(store, fd, header, sizeof header, path, err);
    if (rc == DL_OK) {
        rc = write_all(store, fd, commit->parameters, commit->parameters_bytes, path, err);
    }
    if (rc == DL_OK) {
        rc = write_all(store, fd, commit->state, commit->state_bytes, path, err);
    }
    return rc;
}

enum dl_rc sy_store_file_write(struct sy_store *store, const char *name, const struct sy_store_commit *commit,
                               uint64_t parameters_hash, int *out, struct dl_err *err)
{
    char path[SY_STORE_PATH_MAX];
    path_of(store, name, path);
    int fd = store->ops->open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0640);
    if (fd < 0) {
        return dl_err_errno(err, rc_of_errno(errno), errno, "creating %s", path);
    }
    enum dl_rc rc = write_content(store, fd, commit, parameters_hash, path, err);
    if (rc != DL_OK) {
        close(fd);
        (void)store->ops->unlink(path);
        return rc;
    }
    *out = fd;
    return DL_OK;
}

/* A failed sync leaves the page cache in doubt: a repeat starts with a new file, from memory. */
enum dl_rc sy_store_file_sync(struct sy_store *store, const char *name, int fd, struct dl_err *err)
{
    char path[SY_STORE_PATH_MAX];
    path_of(store, name, path);
    return store->ops->fsync(fd) == 0 ? DL_OK : dl_err_errno(err, rc_of_errno(errno), errno, "syncing %s", path);
}

enum dl_rc sy_store_sync_dir(struct sy_store *store, struct dl_err *err)
{
    DL_AUTO_FD int fd = store->ops->open(store->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0) {
        return dl_err_errno(err, rc_of_errno(errno), errno, "opening folder %s", store->dir);
    }
    if (store->ops->fsync(fd) != 0) {
        return dl_err_errno(err, rc_of_errno(errno), errno, "syncing folder %s", store->dir);
    }
    return DL_OK;
}

/* A short file is damage, a failing disk is not: the first has an older copy to fall back to. */
static enum dl_rc read_all(struct sy_store *store, int fd, void *bytes, uint64_t size, const char *path,
                           struct dl_err *err)
{
    uint8_t *at = bytes;
    while (size > 0) {
        ssize_t got = store->ops->read(fd, at, (size_t)DL_MIN(size, WRITE_BYTES_MAX));
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

static enum dl_rc check_header(const uint8_t *header, uint32_t fragment, uint64_t version, uint64_t parameters_bytes,
                               uint64_t state_bytes, const char *path, struct dl_err *err)
{
    if (memcmp(header, magic, sizeof magic) != 0 ||
        get_u64(header + SY_STORE_HEADER_BYTES - 8) != dl_hash64(header, SY_STORE_HEADER_BYTES - 8, 0)) {
        return dl_err_set(err, DL_ECORRUPT, "%s: the header is damaged", path);
    }
    if (get_u32(header + 8) != FORMAT_VERSION) {
        return dl_err_set(err, DL_EUNSUPPORTED, "%s has format %" PRIu32 ", this program reads %d", path,
                          get_u32(header + 8), FORMAT_VERSION);
    }
    if (get_u32(header + 12) != fragment || get_u64(header + 16) != version) {
        return dl_err_set(err, DL_ECORRUPT, "%s holds fragment %" PRIu32 " version %" PRIu64 ", not what its name says",
                          path, get_u32(header + 12), get_u64(header + 16));
    }
    if (get_u64(header + 40) != parameters_bytes || (get_u64(header + 48) != state_bytes && state_bytes > 0)) {
        /* The header is whole: it is the job that has changed. */
        return dl_err_set(err, DL_EINVAL,
                          "%s holds %" PRIu64 "+%" PRIu64 " bytes, the job asks for %" PRIu64 "+%" PRIu64
                          " (was sync.outerOptimizer changed?)",
                          path, get_u64(header + 40), get_u64(header + 48), parameters_bytes, state_bytes);
    }
    return DL_OK;
}

enum dl_rc sy_store_file_read(struct sy_store *store, const char *name, uint32_t fragment, uint64_t version,
                              void *parameters, uint64_t parameters_bytes, void *state, uint64_t state_bytes,
                              struct dl_err *err)
{
    char path[SY_STORE_PATH_MAX];
    path_of(store, name, path);
    DL_AUTO_FD int fd = store->ops->open(path, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0) {
        return dl_err_errno(err, errno == ENOENT ? DL_ECORRUPT : DL_EIO, errno, "opening %s", path);
    }
    uint8_t header[SY_STORE_HEADER_BYTES];
    enum dl_rc rc = read_all(store, fd, header, sizeof header, path, err);
    if (rc == DL_OK) {
        rc = check_header(header, fragment, version, parameters_bytes, state_bytes, path, err);
    }
    if (rc == DL_OK) {
        rc = read_all(store, fd, parameters, parameters_bytes, path, err);
    }
    if (rc == DL_OK && state != NULL) {
        rc = read_all(store, fd, state, state_bytes, path, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    if (dl_hash64(parameters, parameters_bytes, 0) != get_u64(header + 56)) {
        return dl_err_set(err, DL_ECORRUPT, "%s: the parameters do not match their checksum", path);
    }
    if (state != NULL && dl_hash64(state, state_bytes, 0) != get_u64(header + 64)) {
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
    path_of(store, name, path);
    /* A file that stays costs room only; the next opening tries again. */
    (void)store->ops->unlink(path);
}

uint64_t sy_store_file_bytes(const struct sy_store *store, const char *name)
{
    char path[SY_STORE_PATH_MAX];
    path_of(store, name, path);
    struct stat info;
    return stat(path, &info) == 0 ? (uint64_t)info.st_size : 0;
}
