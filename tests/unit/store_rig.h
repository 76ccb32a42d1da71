/* The fixture of the store's tests: a folder, a store whose files and database fail when told to, versions with content
 * that is known. A test program includes it once. */
#ifndef DL_TESTS_STORE_RIG_H
#define DL_TESTS_STORE_RIG_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <sqlite3.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/mem.h"
#include "syncer/store/store.h"
#include "tests/unit/unit.h"

#define ELEMENTS 1024
#define STATE_BYTES (ELEMENTS * 4 + 64)
#define STATE_BYTES_STORED (2 * SY_STORE_BLOCK_BYTES) /* Whole blocks. */

/* --- injected faults: the n-th operation fails, of files and of SQLite's own files alike --- */

static _Atomic long fail_at;    /* 0: never. */
static _Atomic long operations; /* So far. */
static _Atomic long injected;
static _Atomic int fail_errno;
static _Atomic bool refuses_direct_at_opening;
static _Atomic bool refuses_direct; /* As a file system that needs its page cache. */
static _Atomic long writes_back;
static _Atomic bool stalled; /* Syncs of files last until it is false again; whoever sets it clears it. */

static inline bool is_due(void)
{
    operations++;
    bool due = fail_at != 0 && operations >= fail_at; /* From then on everything fails, as on a full or dying disk. */
    injected += due ? 1 : 0;
    return due;
}

static inline int fault_open(const char *path, int flags, mode_t mode)
{
    if (refuses_direct_at_opening && (flags & O_DIRECT) != 0) {
        errno = EINVAL;
        return -1;
    }
    if ((flags & O_CREAT) != 0 && is_due()) {
        errno = fail_errno;
        return -1;
    }
    return open(path, flags, mode);
}

static inline ssize_t fault_write(int fd, const void *bytes, size_t size)
{
    if (is_due()) {
        /* Some of it reaches the disk all the same. */
        ssize_t ignored = write(fd, bytes, size / 2);
        (void)ignored;
        errno = fail_errno;
        return -1;
    }
    return write(fd, bytes, size);
}

static inline ssize_t fault_pwrite(int fd, const void *bytes, size_t size, off_t offset)
{
    if (refuses_direct && (fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
        errno = EINVAL;
        return -1;
    }
    if (is_due()) {
        ssize_t ignored = pwrite(fd, bytes, size / 2 / 512 * 512, offset);
        (void)ignored;
        errno = fail_errno;
        return -1;
    }
    return pwrite(fd, bytes, size, offset);
}

static inline int fault_write_back(int fd, off_t offset, off_t size)
{
    writes_back++;
    return is_due() ? -1 : sync_file_range(fd, offset, size, SYNC_FILE_RANGE_WRITE);
}

static inline int fault_fsync(int fd)
{
    while (stalled) {
        poll(NULL, 0, 1);
    }
    if (is_due()) {
        errno = fail_errno;
        return -1;
    }
    return fsync(fd);
}

static const struct sy_store_ops fault_ops = {.open = fault_open,
                                              .write = fault_write,
                                              .pwrite = fault_pwrite,
                                              .write_back = fault_write_back,
                                              .read = read,
                                              .fsync = fault_fsync,
                                              .unlink = unlink};

/* A VFS that passes everything on, and fails writes and syncs when they are due. */
struct shim_file {
    sqlite3_file base;
    sqlite3_file *real;
};

static sqlite3_vfs shim_vfs;
static sqlite3_vfs *real_vfs;
static sqlite3_io_methods shim_methods;

static inline sqlite3_file *real_of(sqlite3_file *file)
{
    return ((struct shim_file *)(void *)file)->real;
}
static inline int shim_code(void)
{
    return fail_errno == ENOSPC ? SQLITE_FULL : SQLITE_IOERR_WRITE;
}
static inline int shim_close(sqlite3_file *f)
{
    return real_of(f)->pMethods->xClose(real_of(f));
}
static inline int shim_read(sqlite3_file *f, void *to, int size, sqlite3_int64 at)
{
    return real_of(f)->pMethods->xRead(real_of(f), to, size, at);
}
static inline int shim_write(sqlite3_file *f, const void *from, int size, sqlite3_int64 at)
{
    return is_due() ? shim_code() : real_of(f)->pMethods->xWrite(real_of(f), from, size, at);
}
static inline int shim_truncate(sqlite3_file *f, sqlite3_int64 size)
{
    return is_due() ? SQLITE_IOERR_TRUNCATE : real_of(f)->pMethods->xTruncate(real_of(f), size);
}
static inline int shim_sync(sqlite3_file *f, int flags)
{
    return is_due() ? SQLITE_IOERR_FSYNC : real_of(f)->pMethods->xSync(real_of(f), flags);
}
static inline int shim_size(sqlite3_file *f, sqlite3_int64 *size)
{
    return real_of(f)->pMethods->xFileSize(real_of(f), size);
}
static inline int shim_lock(sqlite3_file *f, int level)
{
    return real_of(f)->pMethods->xLock(real_of(f), level);
}
static inline int shim_unlock(sqlite3_file *f, int level)
{
    return real_of(f)->pMethods->xUnlock(real_of(f), level);
}
static inline int shim_reserved(sqlite3_file *f, int *out)
{
    return real_of(f)->pMethods->xCheckReservedLock(real_of(f), out);
}
static inline int shim_control(sqlite3_file *f, int op, void *arg)
{
    return real_of(f)->pMethods->xFileControl(real_of(f), op, arg);
}
static inline int shim_sector(sqlite3_file *f)
{
    return real_of(f)->pMethods->xSectorSize(real_of(f));
}
static inline int shim_characteristics(sqlite3_file *f)
{
    return real_of(f)->pMethods->xDeviceCharacteristics(real_of(f));
}
static inline int shim_shm_map(sqlite3_file *f, int page, int size, int extend, void volatile **out)
{
    return real_of(f)->pMethods->xShmMap(real_of(f), page, size, extend, out);
}
static inline int shim_shm_lock(sqlite3_file *f, int offset, int n, int flags)
{
    return real_of(f)->pMethods->xShmLock(real_of(f), offset, n, flags);
}
static inline void shim_shm_barrier(sqlite3_file *f)
{
    real_of(f)->pMethods->xShmBarrier(real_of(f));
}
static inline int shim_shm_unmap(sqlite3_file *f, int remove)
{
    return real_of(f)->pMethods->xShmUnmap(real_of(f), remove);
}

static inline int shim_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out_flags)
{
    (void)vfs;
    struct shim_file *shim = (struct shim_file *)(void *)file;
    shim->real = (sqlite3_file *)(void *)(shim + 1);
    shim->base.pMethods = NULL;
    int code = real_vfs->xOpen(real_vfs, name, shim->real, flags, out_flags);
    if (code == SQLITE_OK) {
        shim->base.pMethods = &shim_methods;
    }
    return code;
}

static inline void install_shim(void)
{
    if (real_vfs != NULL) {
        return;
    }
    real_vfs = sqlite3_vfs_find(NULL);
    shim_vfs = *real_vfs;
    shim_vfs.zName = "fault";
    shim_vfs.szOsFile = real_vfs->szOsFile + (int)sizeof(struct shim_file);
    shim_vfs.xOpen = shim_open;
    shim_methods = (sqlite3_io_methods){.iVersion = 2,
                                        .xClose = shim_close,
                                        .xRead = shim_read,
                                        .xWrite = shim_write,
                                        .xTruncate = shim_truncate,
                                        .xSync = shim_sync,
                                        .xFileSize = shim_size,
                                        .xLock = shim_lock,
                                        .xUnlock = shim_unlock,
                                        .xCheckReservedLock = shim_reserved,
                                        .xFileControl = shim_control,
                                        .xSectorSize = shim_sector,
                                        .xDeviceCharacteristics = shim_characteristics,
                                        .xShmMap = shim_shm_map,
                                        .xShmLock = shim_shm_lock,
                                        .xShmBarrier = shim_shm_barrier,
                                        .xShmUnmap = shim_shm_unmap};
    CU_ASSERT_EQUAL_FATAL(sqlite3_vfs_register(&shim_vfs, 0), SQLITE_OK);
}

/* From the n-th operation from now on all fail with this errno; n = 0: none does. */
static inline void fail_from(long n, int error)
{
    fail_errno = error;
    operations = 0;
    injected = 0;
    fail_at = n;
}

/* The disk is well again. Whether anything has failed since. */
static inline bool fail_no_more(void)
{
    fail_at = 0;
    return injected > 0;
}

/* --- a store with recognisable content --- */

static char dir[64];

static inline void new_dir(void)
{
    snprintf(dir, sizeof dir, "/tmp/diloco-test-store-XXXXXX");
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(dir));
    fail_at = 0;
    fail_errno = EIO;
}

static inline void remove_dir(void)
{
    DIR *folder = opendir(dir);
    CU_ASSERT_PTR_NOT_NULL(folder);
    if (folder == NULL) {
        return;
    }
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        unlink(path);
    }
    closedir(folder);
    CU_ASSERT_EQUAL(rmdir(dir), 0);
}

static inline uint32_t count_files(const char *suffix)
{
    uint32_t count = 0;
    DIR *folder = opendir(dir);
    if (folder == NULL) {
        return UINT32_MAX;
    }
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        size_t length = strlen(entry->d_name);
        count += length > strlen(suffix) && strncmp(entry->d_name, "fragment-", 9) == 0 &&
                         strcmp(entry->d_name + length - strlen(suffix), suffix) == 0
                     ? 1
                     : 0;
    }
    closedir(folder);
    return count;
}

static inline enum dl_rc open_as(struct sy_store **store, const char *job, uint32_t shard, struct dl_err *err)
{
    install_shim();
    struct sy_store_options options = {.dir = dir, .job = job, .shard = shard, .ops = &fault_ops, .vfs = "fault"};
    return sy_store_open(&options, store, err);
}

static inline struct sy_store *reopen(struct sy_store *store)
{
    struct dl_err err = {.text = ""};
    sy_store_close(store);
    store = NULL;
    enum dl_rc rc = open_as(&store, "demo", 0, &err);
    if (rc != DL_OK) {
        printf("%s\n", err.text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    return store;
}

static float parameters[ELEMENTS];
static uint8_t state[STATE_BYTES];

/* What version v of fragment f holds. */
static inline void fill(uint32_t fragment, uint64_t version)
{
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        parameters[i] = (float)fragment * 1000.0f + (float)version + (float)i / 4096.0f;
    }
    for (uint32_t i = 0; i < STATE_BYTES; i++) {
        state[i] = (uint8_t)(i * 7 + version + fragment);
    }
}

static inline struct sy_store_commit describe(uint32_t fragment, uint64_t version)
{
    static const struct sy_store_participant participants[2] = {
        {.learner = 0,
         .admission = 7,
         .uid = "a",
         .nonce = UINT64_MAX,
         .step = 24,
         .base_version = 1,
         .steps = 3,
         .tokens = 96,
         .weight = 32.0,
         .norm = 0.5},
        {.learner = 4,
         .admission = 9,
         .uid = "b",
         .nonce = 3,
         .step = 30,
         .base_version = 1,
         .steps = 4,
         .tokens = 128,
         .weight = 32.0,
         .norm = INFINITY},
    };
    fill(fragment, version);
    return (struct sy_store_commit){.fragment = fragment,
                                    .version = version,
                                    .round = version * 10,
                                    .parameters = parameters,
                                    .parameters_bytes = sizeof parameters,
                                    .state = state,
                                    .state_bytes = sizeof state,
                                    .participants = participants,
                                    .participant_count = 2,
                                    .totals = {.next_round = version * 10 + 1,
                                               .rounds_merged = version,
                                               .tokens = version * 1000,
                                               .tokens_merged = version * 900,
                                               .next_admission = 10,
                                               .busy_ns = version * 700,
                                               .possible_ns = version * 800}};
}

static inline enum dl_rc commit_and_tidy(struct sy_store *store, const struct sy_store_commit *what, uint32_t count,
                                         struct dl_err *err)
{
    enum dl_rc rc = sy_store_commit(store, what, count, err);
    sy_store_tidy(store);
    return rc;
}

static inline enum dl_rc commit(struct sy_store *store, uint32_t fragment, uint64_t version, struct dl_err *err)
{
    struct sy_store_commit what = describe(fragment, version);
    return commit_and_tidy(store, &what, 1, err);
}

/* Fragments 0 .. count - 1 at once; each with arrays of its own. */
static inline enum dl_rc commit_all(struct sy_store *store, uint32_t count, uint64_t version, struct dl_err *err)
{
    static float all_parameters[4][ELEMENTS];
    static uint8_t all_state[4][STATE_BYTES];
    struct sy_store_commit what[4];
    for (uint32_t i = 0; i < count; i++) {
        what[i] = describe(i, version);
        memcpy(all_parameters[i], parameters, sizeof parameters);
        memcpy(all_state[i], state, sizeof state);
        what[i].parameters = all_parameters[i];
        what[i].state = all_state[i];
    }
    return commit_and_tidy(store, what, count, err);
}

static inline bool same_bytes(const void *a, const void *b, size_t size)
{
    return memcmp(a, b, size) == 0;
}

static inline void check_holds(struct sy_store *store, uint32_t fragment, uint64_t version)
{
    static float got[ELEMENTS];
    static uint8_t got_state[STATE_BYTES];
    char damage[DL_ERR_TEXT_MAX];
    struct sy_store_version found;
    struct dl_err err = {.text = ""};
    enum dl_rc rc = sy_store_load(store, fragment, got, sizeof got, got_state, sizeof got_state, &found, damage, &err);
    if (version == 0) {
        CU_ASSERT_EQUAL(rc, DL_ENOTFOUND);
        return;
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    CU_ASSERT_EQUAL(found.version, version);
    CU_ASSERT_EQUAL(found.round, version * 10);
    CU_ASSERT_EQUAL(found.participants, 2);
    CU_ASSERT_STRING_EQUAL(damage, "");
    fill(fragment, version);
    CU_ASSERT(same_bytes(got, parameters, sizeof got));
    CU_ASSERT_EQUAL(memcmp(got_state, state, sizeof got_state), 0);
}

/* A store with versions 1 and 2 of fragment 0, whose disk fails from the n-th operation of committing version 3 on: what
 * came of it is in `rc`, and whether anything failed in `hit`. */
static inline struct sy_store *fail_third(enum dl_rc (*commits)(struct sy_store *, uint32_t, uint64_t, struct dl_err *),
                                          long n, int error, enum dl_rc *rc, bool *hit, struct dl_err *err)
{
    new_dir();
    struct sy_store *store = reopen(NULL);
    CU_ASSERT_EQUAL_FATAL(commits(store, 0, 1, err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(commit(store, 0, 2, err), DL_OK);
    fail_from(n, error);
    *rc = commits(store, 0, 3, err);
    *hit = fail_no_more();
    return store;
}

/* The first column of the first row, of the tape on disk. */
static inline int count_rows(const char *sql)
{
    char path[128];
    sqlite3 *db = NULL;
    sqlite3_stmt *statement = NULL;
    snprintf(path, sizeof path, "%s/tape.db", dir);
    CU_ASSERT_EQUAL_FATAL(sqlite3_open_v2(path, &db, SQLITE_OPEN_READWRITE, NULL), SQLITE_OK);
    CU_ASSERT_EQUAL_FATAL(sqlite3_prepare_v2(db, sql, -1, &statement, NULL), SQLITE_OK);
    CU_ASSERT_EQUAL_FATAL(sqlite3_step(statement), SQLITE_ROW);
    int count = sqlite3_column_int(statement, 0);
    sqlite3_finalize(statement);
    sqlite3_close(db);
    return count;
}

#endif
