/* Files of versions, written piece by piece. See store.h for the format. */
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "common/content.h"
#include "common/hash.h"
#include "common/le.h"
#include "common/mem.h"
#include "syncer/store/internal.h"

#define WRITE_BYTES_MAX                                                                                                \
    (4u << 20) /* One write call: a full disk is noticed early, and its hash finds it in the cache. */
#define WRITE_EARLY_BYTES (1u << 20) /* From here on it pays to set the disk to work before the sync. */
#define DIRECT_BYTES_MIN                                                                                               \
    (4u << 20) /* Smaller files go through the page cache: they are written at once, by the sync. */
#define STAGE_BYTES (256u << 10)

struct sy_store_draft {
    struct dl_content parameters_hash, state_hash;
    struct sy_store *store;
    struct sy_store_content content;
    bool has_hash; /* `given_hash` is there. */
    uint64_t given_hash;
    char file[SY_STORE_FILE_MAX], path[SY_STORE_PATH_MAX];
    int fd;
    bool is_direct;    /* Past the page cache: whole blocks from whole blocks of memory. */
    uint64_t appended; /* Of parameters and state together. */
    uint64_t offset;   /* In the file, of what is written next. */
    uint8_t *stage;    /* What is no whole block yet, or not aligned. */
    size_t staged;
};

/* Not every file system can do without its cache; that shows at the opening or at the first write. */
static int open_file(struct sy_store_draft *draft)
{
    const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
    const struct sy_store_ops *ops = draft->store->ops;
    draft->is_direct = draft->content.parameters_bytes + draft->content.state_bytes >= DIRECT_BYTES_MIN;
    int fd = ops->open(draft->path, draft->is_direct ? flags | O_DIRECT : flags, 0640);
    if (fd < 0 && errno == EINVAL && draft->is_direct) {
        draft->is_direct = false;
        (void)ops->unlink(draft->path); /* Some have made it by then. */
        fd = ops->open(draft->path, flags, 0640);
    }
    return fd;
}

enum dl_rc sy_store_begin(struct sy_store *store, const struct sy_store_content *content, struct sy_store_draft **out,
                          struct dl_err *err)
{
    struct sy_store_draft *draft = dl_alloc_aligned(sizeof *draft);
    uint8_t *stage = aligned_alloc(SY_STORE_BLOCK_BYTES, STAGE_BYTES);
    if (draft == NULL || stage == NULL) {
        free(draft);
        free(stage);
        return dl_err_set(err, DL_EIO, "writing a version: no memory"); /* There may be later. */
    }
    draft->store = store;
    draft->has_hash = false;
    draft->content = *content;
    draft->stage = stage;
    draft->offset = SY_STORE_BLOCK_BYTES;
    dl_content_begin(&draft->parameters_hash);
    dl_content_begin(&draft->state_hash);
    sy_store_file_name(store, draft->file, content->fragment, content->version);
    sy_store_file_path(store, draft->file, draft->path);
    draft->fd = open_file(draft);
    if (draft->fd < 0) {
        enum dl_rc rc = dl_err_errno(err, sy_store_rc_of_errno(errno), errno, "creating %s", draft->path);
        free(draft->stage);
        free(draft);
        return rc;
    }
    *out = draft;
    return DL_OK;
}

/* Some file systems refuse at the first write what they did not at the opening. */
static bool leave_direct(struct sy_store_draft *draft)
{
    int flags = fcntl(draft->fd, F_GETFL);
    draft->is_direct = false;
    return flags >= 0 && fcntl(draft->fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

static enum dl_rc write_at(struct sy_store_draft *draft, const uint8_t *bytes, uint64_t size, uint64_t offset,
                           struct dl_err *err)
{
    const struct sy_store_ops *ops = draft->store->ops;
    while (size > 0) {
        ssize_t written = ops->pwrite(draft->fd, bytes, (size_t)size, (off_t)offset);
        if (written < 0 && (errno == EINTR || (errno == EINVAL && draft->is_direct && leave_direct(draft)))) {
            continue;
        }
        if (written <= 0) {
            int error = written == 0 ? ENOSPC : errno;
            return dl_err_errno(err, sy_store_rc_of_errno(error), error, "writing %s", draft->path);
        }
        if (!draft->is_direct && written >= (ssize_t)WRITE_EARLY_BYTES) {
            /* The sync that counts comes later. */
            (void)ops->write_back(draft->fd, (off_t)offset, (off_t)written);
        }
        bytes += written;
        size -= (uint64_t)written;
        offset += (uint64_t)written;
    }
    return DL_OK;
}

static enum dl_rc write_next(struct sy_store_draft *draft, const uint8_t *bytes, uint64_t size, struct dl_err *err)
{
    enum dl_rc rc = write_at(draft, bytes, size, draft->offset, err);
    draft->offset += size;
    return rc;
}

/* Fills up what is staged to whole blocks and writes it. */
static enum dl_rc flush(struct sy_store_draft *draft, struct dl_err *err)
{
    size_t whole = (draft->staged + SY_STORE_BLOCK_BYTES - 1) / SY_STORE_BLOCK_BYTES * SY_STORE_BLOCK_BYTES;
    memset(draft->stage + draft->staged, 0, whole - draft->staged);
    draft->staged = 0;
    return write_next(draft, draft->stage, whole, err);
}

static enum dl_rc put(struct sy_store_draft *draft, const uint8_t *bytes, uint64_t size, struct dl_err *err)
{
    bool in_place = !draft->is_direct || (uintptr_t)bytes % SY_STORE_BLOCK_BYTES == 0;
    uint64_t whole = draft->staged == 0 && in_place ? size / SY_STORE_BLOCK_BYTES * SY_STORE_BLOCK_BYTES : 0;
    enum dl_rc rc = write_next(draft, bytes, whole, err);
    for (uint64_t done = whole; rc == DL_OK && done < size;) {
        size_t more = (size_t)DL_MIN(size - done, STAGE_BYTES - draft->staged);
        memcpy(draft->stage + draft->staged, bytes + done, more);
        draft->staged += more;
        done += more;
        rc = draft->staged == STAGE_BYTES ? flush(draft, err) : DL_OK;
    }
    return rc;
}

enum dl_rc sy_store_append(struct sy_store_draft *draft, const void *bytes, uint64_t size, struct dl_err *err)
{
    const struct sy_store_content *content = &draft->content;
    const uint8_t *at = bytes;
    bool is_state = draft->appended >= content->parameters_bytes;
    uint64_t end = content->parameters_bytes + (is_state ? content->state_bytes : 0);
    assert(size <= end - draft->appended);
    enum dl_rc rc = DL_OK;
    for (uint64_t left = size; rc == DL_OK && left > 0;) {
        size_t piece = (size_t)DL_MIN(left, WRITE_BYTES_MAX);
        if (is_state || !content->hash_is_given) {
            dl_content_add(is_state ? &draft->state_hash : &draft->parameters_hash, at, piece);
        }
        rc = put(draft, at, piece, err);
        at += piece;
        left -= piece;
    }
    draft->appended += size;
    return rc == DL_OK && draft->appended == end && draft->staged > 0 ? flush(draft, err) : rc;
}

void sy_store_give_hash(struct sy_store_draft *draft, uint64_t hash)
{
    assert(draft->content.hash_is_given);
    draft->has_hash = true;
    draft->given_hash = hash;
}

uint64_t sy_store_parameters_hash(const struct sy_store_draft *draft)
{
    if (draft->content.hash_is_given) {
        assert(draft->has_hash);
        return draft->given_hash;
    }
    assert(draft->appended >= draft->content.parameters_bytes);
    return dl_content_result(&draft->parameters_hash);
}

enum dl_rc sy_store_draft_seal(struct sy_store_draft *draft, struct dl_err *err)
{
    const struct sy_store_content *content = &draft->content;
    assert(draft->appended == content->parameters_bytes + content->state_bytes && draft->staged == 0);
    uint8_t *header = draft->stage;
    memset(header, 0, SY_STORE_BLOCK_BYTES);
    memcpy(header, sy_store_magic, sizeof sy_store_magic);
    dl_le_put(header + 8, SY_STORE_FORMAT, 4);
    dl_le_put(header + 12, content->fragment, 4);
    dl_le_put(header + 16, content->version, 8);
    dl_le_put(header + 24, content->round, 8);
    dl_le_put(header + 32, draft->store->epoch, 8);
    dl_le_put(header + 40, content->parameters_bytes, 8);
    dl_le_put(header + 48, content->state_bytes, 8);
    dl_le_put(header + 56, sy_store_parameters_hash(draft), 8);
    dl_le_put(header + 64, dl_content_result(&draft->state_hash), 8);
    dl_le_put(header + SY_STORE_HASH_AT, dl_hash64(header, SY_STORE_HASH_AT, 0), 8);
    return write_at(draft, header, SY_STORE_BLOCK_BYTES, 0, err);
}

/* A failed sync leaves the page cache in doubt: a repeat starts with a new file, from memory. */
enum dl_rc sy_store_draft_sync(struct sy_store_draft *draft, struct dl_err *err)
{
    return draft->store->ops->fsync(draft->fd) == 0
               ? DL_OK
               : dl_err_errno(err, sy_store_rc_of_errno(errno), errno, "syncing %s", draft->path);
}

const struct sy_store_content *sy_store_draft_content(const struct sy_store_draft *draft)
{
    return &draft->content;
}

void sy_store_draft_release(struct sy_store_draft *draft, struct sy_store_written *written)
{
    memcpy(written->file, draft->file, sizeof written->file);
    written->hash = sy_store_parameters_hash(draft);
    close(draft->fd);
    free(draft->stage);
    free(draft);
}

void sy_store_abandon(struct sy_store_draft *draft)
{
    if (draft != NULL) {
        close(draft->fd);
        sy_store_file_remove(draft->store, draft->file);
        free(draft->stage);
        free(draft);
    }
}

enum dl_rc sy_store_sync_dir(struct sy_store *store, struct dl_err *err)
{
    DL_AUTO_FD int fd = store->ops->open(store->dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd < 0) {
        return dl_err_errno(err, sy_store_rc_of_errno(errno), errno, "opening folder %s", store->dir);
    }
    if (store->ops->fsync(fd) != 0) {
        return dl_err_errno(err, sy_store_rc_of_errno(errno), errno, "syncing folder %s", store->dir);
    }
    return DL_OK;
}
