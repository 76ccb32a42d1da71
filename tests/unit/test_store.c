/* sy_store: every commit is there in full or not at all, whatever fails when. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
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

/* --- injected faults: the n-th operation fails, of files and of SQLite's own files alike
 * ------------------------------ */

static long fail_at;    /* 0: never. */
static long operations; /* So far. */
static long injected;
static int fail_errno;

static bool is_due(void)
{
    operations++;
    bool due = fail_at != 0 && operations >= fail_at; /* From then on everything fails, as on a full or dying disk. */
    injected += due ? 1 : 0;
    return due;
}

static int fault_open(const char *path, int flags, mode_t mode)
{
    if ((flags & O_CREAT) != 0 && is_due()) {
        errno = fail_errno;
        return -1;
    }
    return open(path, flags, mode);
}

static ssize_t fault_write(int fd, const void *bytes, size_t size)
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

static int fault_fsync(int fd)
{
    if (is_due()) {
        errno = fail_errno;
        return -1;
    }
    return fsync(fd);
}

static const struct sy_store_ops fault_ops = {
    .open = fault_open, .write = fault_write, .read = read, .fsync = fault_fsync, .unlink = unlink};

/* A VFS that passes everything on, and fails writes and syncs when they are due. */
struct shim_file {
    sqlite3_file base;
    sqlite3_file *real;
};

static sqlite3_vfs shim_vfs;
static sqlite3_vfs *real_vfs;
static sqlite3_io_methods shim_methods;

static sqlite3_file *real_of(sqlite3_file *file)
{
    return ((struct shim_file *)(void *)file)->real;
}
static int shim_code(void)
{
    return fail_errno == ENOSPC ? SQLITE_FULL : SQLITE_IOERR_WRITE;
}
static int shim_close(sqlite3_file *f)
{
    return real_of(f)->pMethods->xClose(real_of(f));
}
static int shim_read(sqlite3_file *f, void *to, int size, sqlite3_int64 at)
{
    return real_of(f)->pMethods->xRead(real_of(f), to, size, at);
}
static int shim_write(sqlite3_file *f, const void *from, int size, sqlite3_int64 at)
{
    return is_due() ? shim_code() : real_of(f)->pMethods->xWrite(real_of(f), from, size, at);
}
static int shim_truncate(sqlite3_file *f, sqlite3_int64 size)
{
    return is_due() ? SQLITE_IOERR_TRUNCATE : real_of(f)->pMethods->xTruncate(real_of(f), size);
}
static int shim_sync(sqlite3_file *f, int flags)
{
    return is_due() ? SQLITE_IOERR_FSYNC : real_of(f)->pMethods->xSync(real_of(f), flags);
}
static int shim_size(sqlite3_file *f, sqlite3_int64 *size)
{
    return real_of(f)->pMethods->xFileSize(real_of(f), size);
}
static int shim_lock(sqlite3_file *f, int level)
{
    return real_of(f)->pMethods->xLock(real_of(f), level);
}
static int shim_unlock(sqlite3_file *f, int level)
{
    return real_of(f)->pMethods->xUnlock(real_of(f), level);
}
static int shim_reserved(sqlite3_file *f, int *out)
{
    return real_of(f)->pMethods->xCheckReservedLock(real_of(f), out);
}
static int shim_control(sqlite3_file *f, int op, void *arg)
{
    return real_of(f)->pMethods->xFileControl(real_of(f), op, arg);
}
static int shim_sector(sqlite3_file *f)
{
    return real_of(f)->pMethods->xSectorSize(real_of(f));
}
static int shim_characteristics(sqlite3_file *f)
{
    return real_of(f)->pMethods->xDeviceCharacteristics(real_of(f));
}
static int shim_shm_map(sqlite3_file *f, int page, int size, int extend, void volatile **out)
{
    return real_of(f)->pMethods->xShmMap(real_of(f), page, size, extend, out);
}
static int shim_shm_lock(sqlite3_file *f, int offset, int n, int flags)
{
    return real_of(f)->pMethods->xShmLock(real_of(f), offset, n, flags);
}
static void shim_shm_barrier(sqlite3_file *f)
{
    real_of(f)->pMethods->xShmBarrier(real_of(f));
}
static int shim_shm_unmap(sqlite3_file *f, int remove)
{
    return real_of(f)->pMethods->xShmUnmap(real_of(f), remove);
}

static int shim_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *file, int flags, int *out_flags)
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

static void install_shim(void)
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

/* --- a store with recognisable content
 * -------------------------------------------------------------------------------- */

static char dir[64];

static void new_dir(void)
{
    snprintf(dir, sizeof dir, "/tmp/diloco-test-store-XXXXXX");
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(dir));
    fail_at = 0;
    fail_errno = EIO;
}

static void remove_dir(void)
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

static uint32_t count_files(const char *suffix)
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

static enum dl_rc open_as(struct sy_store **store, const char *job, uint32_t shard, struct dl_err *err)
{
    install_shim();
    struct sy_store_options options = {.dir = dir, .job = job, .shard = shard, .ops = &fault_ops, .vfs = "fault"};
    return sy_store_open(&options, store, err);
}

static struct sy_store *reopen(struct sy_store *store)
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
static void fill(uint32_t fragment, uint64_t version)
{
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        parameters[i] = (float)fragment * 1000.0f + (float)version + (float)i / 4096.0f;
    }
    for (uint32_t i = 0; i < STATE_BYTES; i++) {
        state[i] = (uint8_t)(i * 7 + version + fragment);
    }
}

static struct sy_store_commit describe(uint32_t fragment, uint64_t version)
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

static enum dl_rc commit(struct sy_store *store, uint32_t fragment, uint64_t version, struct dl_err *err)
{
    struct sy_store_commit what = describe(fragment, version);
    return sy_store_commit(store, &what, 1, err);
}

/* Fragments 0 .. count - 1 at once; each with arrays of its own. */
static enum dl_rc commit_all(struct sy_store *store, uint32_t count, uint64_t version, struct dl_err *err)
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
    return sy_store_commit(store, what, count, err);
}

static bool same_bytes(const void *a, const void *b, size_t size)
{
    return memcmp(a, b, size) == 0;
}

static void check_holds(struct sy_store *store, uint32_t fragment, uint64_t version)
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

/* --- tests ----------------------------------------------------------------------------------------------------------
 */

static void test_restores_what_was_committed(void)
{
    new_dir();
    struct dl_err err;
    struct sy_store *store = reopen(NULL);
    CU_ASSERT_EQUAL(sy_store_epoch(store), 1);
    check_holds(store, 0, 0);
    static const uint8_t tensors[] = {1, 2, 3, 0, 255};
    struct sy_store_layout layout = {.kind = DL_LAYOUT_STRIDED,
                                     .fragments = 2,
                                     .hash = 0xfedcba9876543210u,
                                     .tensors = tensors,
                                     .tensors_bytes = sizeof tensors};
    CU_ASSERT_EQUAL(sy_store_get_layout(store, &layout), DL_ENOTFOUND);
    CU_ASSERT_EQUAL_FATAL(sy_store_set_layout(store, &layout, &err), DL_OK);
    for (uint64_t version = 1; version <= 5; version++) {
        CU_ASSERT_EQUAL_FATAL(commit(store, 0, version, &err), DL_OK);
    }
    CU_ASSERT_EQUAL_FATAL(commit(store, 1, 1, &err), DL_OK);
    uint64_t bytes = sy_store_bytes(store);
    CU_ASSERT_EQUAL(bytes, 3 * (SY_STORE_HEADER_BYTES + sizeof parameters + sizeof state));
    for (int i = 0; i < 2; i++) { /* Twice in a row: the first loop after a resume must leave all as it is. */
        store = reopen(store);
        CU_ASSERT_EQUAL(sy_store_epoch(store), 2 + (uint64_t)i);
        check_holds(store, 0, 5);
        check_holds(store, 1, 1);
        check_holds(store, 2, 0);
        CU_ASSERT_EQUAL(sy_store_bytes(store), bytes);
    }
    memset(&layout, 0, sizeof layout);
    CU_ASSERT_EQUAL_FATAL(sy_store_get_layout(store, &layout), DL_OK);
    CU_ASSERT_EQUAL(layout.hash, 0xfedcba9876543210u);
    CU_ASSERT_EQUAL(layout.kind, DL_LAYOUT_STRIDED);
    CU_ASSERT_EQUAL_FATAL(layout.tensors_bytes, sizeof tensors);
    CU_ASSERT_EQUAL(memcmp(layout.tensors, tensors, sizeof tensors), 0);
    struct sy_store_totals totals;
    sy_store_get_totals(store, &totals);
    CU_ASSERT_EQUAL(totals.rounds_merged, 1); /* As the last commit, of fragment 1, said. */
    CU_ASSERT_EQUAL(totals.next_admission, 2 * SY_STORE_ADMISSIONS_PER_EPOCH + 1);
    CU_ASSERT_EQUAL(totals.busy_ns, 700);
    CU_ASSERT_EQUAL(totals.possible_ns, 800);
    sy_store_close(store);
    remove_dir();
}

static void test_keeps_two_versions(void)
{
    new_dir();
    struct dl_err err;
    struct sy_store *store = reopen(NULL);
    for (uint64_t version = 1; version <= 6; version++) {
        CU_ASSERT_EQUAL_FATAL(commit(store, 3, version, &err), DL_OK);
        CU_ASSERT_EQUAL(count_files(".bin"), version < 2 ? 1 : 2);
    }
    CU_ASSERT_EQUAL(commit(store, 3, 5, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(commit(store, 3, 6, &err), DL_OK); /* A repeat. */
    CU_ASSERT_EQUAL(count_files(".bin"), 2);
    CU_ASSERT_EQUAL(count_files(".tmp"), 0);
    check_holds(store, 3, 6);
    sy_store_close(store);
    remove_dir();
}

/* Every write, sync and rename in turn, of files and of SQLite, until none is left to fail: a commit that fails leaves
 * the last one; the same commit then succeeds, with the process going on and with a new one. */
static void fail_each_operation(int error, enum dl_rc expected)
{
    struct dl_err err;
    uint32_t failures = 0;
    uint32_t successes = 0;
    for (long n = 1; n < 200 && successes < 3; n++) {
        new_dir();
        struct sy_store *store = reopen(NULL);
        CU_ASSERT_EQUAL_FATAL(commit(store, 0, 1, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(commit(store, 0, 2, &err), DL_OK);
        fail_errno = error;
        operations = 0;
        injected = 0;
        fail_at = n;
        enum dl_rc rc = commit(store, 0, 3, &err);
        fail_at = 0;
        if (rc == DL_OK) {
            successes += injected == 0 ? 1 : 0;
        } else {
            failures++;
            CU_ASSERT(injected > 0);
            CU_ASSERT(rc == expected || (rc == DL_EIO && expected == DL_EFULL));
            CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "fragment 0 version 3"));
        }
        if (n % 2 == 0) { /* The process goes on. */
            if (rc != DL_OK) {
                check_holds(store, 0, 2);
                CU_ASSERT_EQUAL(commit(store, 0, 3, &err), DL_OK);
            }
            check_holds(store, 0, 3);
        } else { /* The process dies here. */
            store = reopen(store);
            struct sy_store_version newest;
            CU_ASSERT_EQUAL_FATAL(sy_store_newest(store, 0, &newest, &err), DL_OK);
            CU_ASSERT(newest.version == (rc == DL_OK ? 3u : 2u) || newest.version == 3);
            check_holds(store, 0, newest.version);
            CU_ASSERT_EQUAL(commit(store, 0, 3, &err), DL_OK);
            check_holds(store, 0, 3);
        }
        store = reopen(store);
        check_holds(store, 0, 3);
        CU_ASSERT_EQUAL(count_files(".tmp"), 0);
        CU_ASSERT_EQUAL(count_files(".bin"), 2);
        sy_store_close(store);
        remove_dir();
    }
    CU_ASSERT(failures >= 6);
    CU_ASSERT_EQUAL(successes, 3);
}

/* A learner's entries for the tape, positions first .. first + count - 1, as it sends them again after a reconnect. */
static uint64_t deliver(struct sy_store *store, uint64_t first, uint32_t count)
{
    static struct dl_wire_trace trace;
    uint64_t traced = 0;
    uint32_t incarnation = sy_store_incarnation(store, "pod-1", UINT64_MAX - 1, 3, "builtin", &traced);
    CU_ASSERT_NOT_EQUAL_FATAL(incarnation, SY_STORE_NO_INCARNATION);
    trace.position = first;
    trace.nonce = UINT64_MAX - 1;
    trace.count = count;
    snprintf(trace.uid, sizeof trace.uid, "pod-1");
    for (uint32_t i = 0; i < count; i++) {
        trace.entries[i] = (struct dl_trace_entry){
            .seq = first + i, .step = 10 * (first + i), .a = first + i, .fragment = i, .kind = "apply"};
    }
    CU_ASSERT_TRUE(sy_store_trace(store, incarnation, &trace));
    sy_store_release(store, incarnation);
    return traced;
}

static int count_rows(const char *query);

/* Several fragments at once: all or none. */
static void fail_each_operation_of_many(int error)
{
    struct dl_err err;
    uint32_t failures = 0;
    bool undisturbed = false;
    for (long n = 1; n < 200 && !undisturbed; n++) {
        new_dir();
        struct sy_store *store = reopen(NULL);
        CU_ASSERT_EQUAL_FATAL(commit_all(store, 4, 1, &err), DL_OK);
        fail_errno = error;
        operations = 0;
        injected = 0;
        fail_at = n;
        CU_ASSERT_EQUAL(deliver(store, 1, 7), 0);
        enum dl_rc rc = commit_all(store, 4, 2, &err);
        fail_at = 0;
        undisturbed = injected == 0;
        failures += rc != DL_OK ? 1 : 0;
        if (n % 2 == 0) {
            store = reopen(store); /* The process died. */
        }
        struct sy_store_version newest;
        CU_ASSERT_EQUAL_FATAL(sy_store_newest(store, 3, &newest, &err), DL_OK);
        CU_ASSERT(rc != DL_OK || newest.version == 2);
        /* J9: with a version comes all that it depends on. (A process that ends in order writes what waits, too.) */
        int rows = newest.version == 2 || n % 2 == 0 ? 7 : 0;
        CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM trace"), rows);
        uint64_t traced = deliver(store, 4, 6);
        CU_ASSERT(traced == 0 || traced == 7);
        CU_ASSERT(traced == (uint64_t)rows || rc != DL_OK);
        for (uint32_t i = 0; i < 4; i++) {
            check_holds(store, i, newest.version);
        }
        CU_ASSERT_EQUAL(commit_all(store, 4, 2, &err), DL_OK);
        CU_ASSERT_EQUAL(count_files(".bin"), 8); /* A repeat leaves nothing of the attempts before. */
        store = reopen(store);
        for (uint32_t i = 0; i < 4; i++) {
            check_holds(store, i, 2);
        }
        CU_ASSERT_EQUAL(count_files(".bin"), 8);
        CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM trace WHERE incarnation = 1 AND step = 10 * seq AND a = seq"),
                        9);
        CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM incarnations WHERE uid = 'pod-1' AND learner = 3"
                                   " AND nonce = 'fffffffffffffffe' AND traced = 9"),
                        1);
        CU_ASSERT_EQUAL(deliver(store, 1, 9), 9); /* What is durable is remembered over a restart. */
        sy_store_close(store);
        remove_dir();
    }
    CU_ASSERT(undisturbed && failures >= 12);
}

static void test_many_at_once(void)
{
    fail_each_operation_of_many(EIO);
    fail_each_operation_of_many(ENOSPC);
}

static void test_io_errors(void)
{
    fail_each_operation(EIO, DL_EIO);
}

static void test_full_disk(void)
{
    fail_each_operation(ENOSPC, DL_EFULL);
}

static void test_opening_fails_cleanly(void)
{
    uint32_t failures = 0;
    bool opened = false;
    for (long n = 1; n < 200 && !opened; n++) {
        new_dir();
        struct sy_store *store = NULL;
        struct dl_err err = {.text = ""};
        operations = 0;
        injected = 0;
        fail_at = n;
        enum dl_rc rc = open_as(&store, "demo", 0, &err);
        fail_at = 0;
        opened = rc == DL_OK && injected == 0;
        if (rc != DL_OK) {
            failures++;
            CU_ASSERT(injected > 0);
            CU_ASSERT_PTR_NULL(store);
            CU_ASSERT(err.text[0] != '\0');
        }
        store = reopen(store);
        CU_ASSERT_EQUAL(commit(store, 0, 1, &err), DL_OK);
        check_holds(store, 0, 1);
        sy_store_close(store);
        remove_dir();
    }
    CU_ASSERT(opened);
    CU_ASSERT(failures >= 3);
}

static void damage_newest(uint32_t fragment, uint64_t version, uint64_t epoch, long offset)
{
    char path[512] = "";
    char prefix[64];
    snprintf(prefix, sizeof prefix, "fragment-%03u-v%010llu-e%llu-", fragment, (unsigned long long)version,
             (unsigned long long)epoch);
    DIR *folder = opendir(dir);
    CU_ASSERT_PTR_NOT_NULL(folder);
    if (folder == NULL) {
        return;
    }
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        if (strncmp(entry->d_name, prefix, strlen(prefix)) == 0) {
            snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        }
    }
    closedir(folder);
    CU_ASSERT_FATAL(path[0] != '\0');
    if (offset < 0) {
        struct stat info;
        CU_ASSERT_EQUAL_FATAL(stat(path, &info), 0);
        CU_ASSERT_EQUAL_FATAL(truncate(path, info.st_size + offset), 0);
        return;
    }
    FILE *file = fopen(path, "r+b");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fseek(file, offset, SEEK_SET);
    int byte = fgetc(file);
    fseek(file, offset, SEEK_SET);
    fputc(byte ^ 0x10, file);
    fclose(file);
}

/* The older content lives on under a number that nobody has seen with other content. */
static void test_damaged_file_falls_back(void)
{
    static const long offsets[] = {
        0, 20, 127, SY_STORE_HEADER_BYTES, SY_STORE_HEADER_BYTES + sizeof parameters + 5, -1, -(long)sizeof state - 10};
    for (size_t i = 0; i < DL_COUNT_OF(offsets); i++) {
        new_dir();
        struct dl_err err;
        struct sy_store *store = reopen(NULL);
        for (uint64_t version = 1; version <= 3; version++) {
            CU_ASSERT_EQUAL_FATAL(commit(store, 0, version, &err), DL_OK);
        }
        damage_newest(0, 3, 1, offsets[i]);
        store = reopen(store);
        static float got[ELEMENTS];
        static uint8_t got_state[STATE_BYTES];
        char damage[DL_ERR_TEXT_MAX];
        struct sy_store_version found;
        CU_ASSERT_EQUAL_FATAL(
            sy_store_load(store, 0, got, sizeof got, got_state, sizeof got_state, &found, damage, &err), DL_OK);
        CU_ASSERT_PTR_NOT_NULL(strstr(damage, "fragment-000-v0000000003-e1-"));
        CU_ASSERT_EQUAL(found.version, 4);
        CU_ASSERT_EQUAL(found.round, 20);
        fill(0, 2);
        CU_ASSERT(same_bytes(got, parameters, sizeof got));
        CU_ASSERT_EQUAL(memcmp(got_state, state, sizeof got_state), 0);
        store = reopen(store);
        CU_ASSERT_EQUAL_FATAL(
            sy_store_load(store, 0, got, sizeof got, got_state, sizeof got_state, &found, damage, &err), DL_OK);
        CU_ASSERT_EQUAL(found.version, 4);
        CU_ASSERT_STRING_EQUAL(damage, "");
        sy_store_close(store);
        remove_dir();
    }
}

static void test_nothing_good_is_refused(void)
{
    new_dir();
    struct dl_err err;
    struct sy_store *store = reopen(NULL);
    CU_ASSERT_EQUAL_FATAL(commit(store, 0, 1, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(commit(store, 0, 2, &err), DL_OK);
    static float got[ELEMENTS];
    static uint8_t got_state[STATE_BYTES];
    char damage[DL_ERR_TEXT_MAX];
    struct sy_store_version found;
    /* A job that asks for other sizes is no damage, and nothing is committed for it. */
    CU_ASSERT_EQUAL(sy_store_load(store, 0, got, sizeof got, got_state, 64, &found, damage, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "outerOptimizer"));
    check_holds(store, 0, 2);
    damage_newest(0, 2, 1, 400);
    damage_newest(0, 1, 1, -1);
    CU_ASSERT_EQUAL(sy_store_load(store, 0, got, sizeof got, got_state, sizeof got_state, &found, damage, &err),
                    DL_ECORRUPT);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "no good copy of fragment 0"));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "fragment-000-v0000000002-e1-"));
    sy_store_close(store);
    remove_dir();
}

/* A syncer that was paused finds that it has a successor. */
static void test_stale_process_is_fenced(void)
{
    new_dir();
    struct dl_err err;
    struct sy_store *old = reopen(NULL);
    CU_ASSERT_EQUAL_FATAL(commit(old, 0, 1, &err), DL_OK);
    struct sy_store *new = reopen(NULL);
    CU_ASSERT_EQUAL(sy_store_epoch(new), 2);
    CU_ASSERT_EQUAL(commit(old, 0, 2, &err), DL_ECONFLICT);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "later syncer"));
    check_holds(new, 0, 1);
    CU_ASSERT_EQUAL(commit(new, 0, 2, &err), DL_OK);
    CU_ASSERT_EQUAL(commit(old, 0, 3, &err), DL_ECONFLICT);
    sy_store_note(old, "leave", 1, 1, "u", 1, "its notes are not written either");
    sy_store_close(old);
    check_holds(new, 0, 2);
    sy_store_close(new);
    remove_dir();
}

static void test_folder_belongs_to_one_shard(void)
{
    new_dir();
    struct dl_err err;
    struct sy_store *store = reopen(NULL);
    sy_store_close(store);
    store = NULL;
    CU_ASSERT_EQUAL(open_as(&store, "other", 0, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "job demo"));
    CU_ASSERT_EQUAL(open_as(&store, "demo", 1, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "shard 0"));
    CU_ASSERT_PTR_NULL(store);
    remove_dir();
}

static int count_rows(const char *sql)
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

static void test_tape(void)
{
    new_dir();
    struct dl_err err;
    struct sy_store *store = reopen(NULL);
    for (int i = 0; i < SY_STORE_EVENTS_MAX + 5; i++) { /* Bounded: what does not fit is not kept. */
        sy_store_note(store, "join", (uint32_t)i, 1, "uid", 0, "");
    }
    CU_ASSERT_EQUAL(commit(store, 0, 1, &err), DL_OK);
    sy_store_note(store, "goodbye", 2, 9, "uid-2", 77, "it's \"over\"");
    CU_ASSERT_EQUAL(commit(store, 0, 2, &err), DL_OK);
    sy_store_note(store, "lost", 3, 10, "uid-3", 78, "");
    sy_store_close(store);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM events"), SY_STORE_EVENTS_MAX + 2);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM events WHERE kind = 'goodbye' AND learner = 2 AND step = 77"
                               " AND text = 'it''s \"over\"'"),
                    1);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM commits WHERE fragment = 0 AND length(hash) = 16"), 2);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM participants WHERE nonce = 'ffffffffffffffff' AND tokens = 96"),
                    2);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM epochs"), 1);
    remove_dir();
}

static void test_job_is_in_the_tape_where_it_changed(void)
{
    new_dir();
    static const char *const specs[] = {"{\"rate\":1}", "{\"rate\":1}", "{\"rate\":2}", NULL, "{\"rate\":2}"};
    for (size_t i = 0; i < DL_COUNT_OF(specs); i++) {
        struct sy_store *store = NULL;
        struct dl_err err;
        struct sy_store_options options = {.dir = dir, .job = "demo", .spec = specs[i]};
        CU_ASSERT_EQUAL_FATAL(sy_store_open(&options, &store, &err), DL_OK);
        sy_store_close(store);
    }
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM specs"), 2);
    CU_ASSERT_EQUAL(count_rows("SELECT epoch FROM specs WHERE spec LIKE '%2%'"), 3);
    remove_dir();
}

static void test_trace_is_bounded(void)
{
    new_dir();
    struct dl_err err;
    struct sy_store *store = reopen(NULL);
    static struct dl_wire_trace trace = {.position = 1, .uid = "pod", .nonce = 1, .count = DL_WIRE_TRACE_MAX};
    uint64_t traced;
    uint32_t incarnation = sy_store_incarnation(store, "pod", 1, 0, "", &traced);
    uint64_t taken = 0;
    for (; taken < 2 * SY_STORE_TRACE_MAX; taken += trace.count) {
        for (uint32_t i = 0; i < trace.count; i++) {
            trace.entries[i] = (struct dl_trace_entry){.seq = taken + 1 + i, .kind = "x", .text = "y"};
        }
        trace.position = taken + 1;
        if (!sy_store_trace(store, incarnation, &trace)) {
            break;
        }
    }
    CU_ASSERT_EQUAL(taken, SY_STORE_TRACE_MAX);
    CU_ASSERT_EQUAL(commit(store, 0, 1, &err), DL_OK);
    CU_ASSERT_EQUAL(sy_store_traced(store, incarnation), SY_STORE_TRACE_MAX);
    CU_ASSERT_TRUE(sy_store_trace(store, incarnation, &trace)); /* There is room again. */
    sy_store_close(store);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM trace WHERE text = 'y' AND fragment = 0"),
                    SY_STORE_TRACE_MAX + DL_WIRE_TRACE_MAX);
    remove_dir();
}

/* --- the ledger of the data -------------------------------------------------------------------------------------- */

static struct sy_lease lease_to(const char *uid, uint64_t nonce, uint64_t number, uint64_t first, uint64_t count)
{
    struct sy_lease lease = {
        .lease = number, .first = first, .count = count, .learner = 3, .admission = 7, .nonce = nonce};
    snprintf(lease.uid, sizeof lease.uid, "%s", uid);
    return lease;
}

static enum dl_rc grant(struct sy_store *store, const struct sy_lease *leases, uint32_t count, struct dl_err *err)
{
    struct sy_ledger_changes changes = {.serial = 1, .leases = leases, .lease_count = count};
    return sy_store_write_ledger(store, &changes, err);
}

/* As `commit`, and participant "a" has seen its leases up to this cursor. */
static enum dl_rc commit_seen(struct sy_store *store, uint64_t version, uint64_t lease, uint64_t cursor,
                              struct dl_err *err)
{
    struct sy_store_participant who[2];
    struct sy_store_commit what = describe(0, version);
    memcpy(who, what.participants, sizeof who);
    who[0].lease = lease;
    who[0].cursor = cursor;
    what.participants = who;
    return sy_store_commit(store, &what, 1, err);
}

static struct sy_ledger_state read_ledger(struct sy_store *store)
{
    struct sy_ledger_state ledger;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_store_read_ledger(store, 8, &ledger, &err), DL_OK);
    return ledger;
}

static void free_ledger(struct sy_ledger_state *ledger)
{
    free(ledger->leases);
    free(ledger->ranges);
}

/* J8: counted with the commit that says so, returned and leased again, read back by the next process. */
static void test_ledger(void)
{
    struct dl_err err;
    new_dir();
    struct sy_store *store = reopen(NULL);
    struct sy_ledger_state ledger = read_ledger(store);
    CU_ASSERT(ledger.lease_count == 0 && ledger.range_count == 0 && ledger.next_lease == 1 && ledger.positions == 0);
    free_ledger(&ledger);
    struct sy_lease leases[3] = {lease_to("a", UINT64_MAX, 1, 0, 100), lease_to("a", UINT64_MAX, 2, 100, 100),
                                 lease_to("c", 5, 3, 200, 40)};
    CU_ASSERT_EQUAL(grant(store, leases, 3, &err), DL_OK);
    CU_ASSERT_EQUAL(commit_seen(store, 1, 1, 60, &err), DL_OK);
    CU_ASSERT_EQUAL(count_rows("SELECT sum(counted) FROM leases"), 60);
    CU_ASSERT_EQUAL(commit_seen(store, 2, 1, 50, &err), DL_OK); /* Older news. */
    CU_ASSERT_EQUAL(count_rows("SELECT sum(counted) FROM leases"), 60);
    CU_ASSERT_EQUAL(commit_seen(store, 3, 2, 10, &err), DL_OK);
    CU_ASSERT_EQUAL(count_rows("SELECT sum(counted) FROM leases"), 110);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM leases WHERE state = 'counted' AND lease = 1"), 1);
    CU_ASSERT_EQUAL(count_rows("SELECT cursor FROM participants WHERE version = 3 AND uid = 'a' AND lease = 2"), 10);
    /* Another's lease is not counted by a push of "a". */
    CU_ASSERT_EQUAL(commit_seen(store, 4, 3, 40, &err), DL_OK);
    CU_ASSERT_EQUAL(count_rows("SELECT counted FROM leases WHERE lease = 3"), 0);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM coverage_faults"), 0);
    /* "c" is gone: what it had goes back, and some of it out again. */
    leases[2].state = SY_LEASE_RETURNED;
    struct sy_range queue = {.first = 200, .count = 40};
    struct sy_ledger_changes changes = {.serial = 2,
                                        .leases = &leases[2],
                                        .lease_count = 1,
                                        .ranges_changed = true,
                                        .ranges = &queue,
                                        .range_count = 1};
    CU_ASSERT_EQUAL(sy_store_write_ledger(store, &changes, &err), DL_OK);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM coverage_faults"), 0);
    struct sy_lease again = lease_to("d", 6, 4, 200, 30);
    queue = (struct sy_range){.first = 230, .count = 10};
    changes.leases = &again;
    CU_ASSERT_EQUAL(sy_store_write_ledger(store, &changes, &err), DL_OK);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM coverage_faults"), 0);
    CU_ASSERT_EQUAL(count_rows("SELECT sum(count) FROM coverage"), 240);
    CU_ASSERT_EQUAL(count_rows("SELECT sum(count) FROM coverage WHERE what = 'queued'"), 10);
    store = reopen(reopen(store)); /* J8: two restarts in a row. */
    ledger = read_ledger(store);
    CU_ASSERT_EQUAL_FATAL(ledger.lease_count, 2); /* Lease 4; and 2, counted in full, by which "a" is known. */
    CU_ASSERT(ledger.leases[0].lease == 2 && ledger.leases[0].state == SY_LEASE_COUNTED);
    CU_ASSERT(ledger.leases[1].lease == 4 && ledger.leases[1].state == SY_LEASE_HELD && ledger.leases[1].nonce == 6);
    CU_ASSERT_STRING_EQUAL(ledger.leases[1].uid, "d");
    CU_ASSERT(ledger.range_count == 1 && ledger.ranges[0].first == 230 && ledger.ranges[0].count == 10);
    CU_ASSERT(ledger.next_lease == 5 && ledger.positions == 240 && ledger.counted == 200);
    free_ledger(&ledger);
    sy_store_close(store);
    remove_dir();
}

/* What the view says of a ledger that is wrong. */
static void test_coverage_faults(void)
{
    struct dl_err err;
    new_dir();
    struct sy_store *store = reopen(NULL);
    struct sy_lease leases[3] = {lease_to("a", 1, 1, 0, 100), lease_to("b", 2, 2, 90, 100),
                                 lease_to("c", 3, 3, 200, 10)};
    CU_ASSERT_EQUAL(grant(store, leases, 3, &err), DL_OK);
    CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM coverage_faults"), 2);
    CU_ASSERT_EQUAL(count_rows("SELECT count FROM coverage_faults WHERE fault = 'twice' AND first = 90"), 10);
    CU_ASSERT_EQUAL(count_rows("SELECT count FROM coverage_faults WHERE fault = 'lost' AND first = 190"), 10);
    leases[2].state = SY_LEASE_RETURNED; /* And never queued: lost up to the high-water mark. */
    CU_ASSERT_EQUAL(grant(store, &leases[2], 1, &err), DL_OK);
    CU_ASSERT_EQUAL(count_rows("SELECT max(first + count) FROM coverage_faults WHERE fault = 'lost'"), 210);
    sy_store_close(store);
    remove_dir();
}

/* Every operation fails in turn: a change is there in full or not at all, and can be made again. */
static void test_ledger_on_a_failing_disk(void)
{
    struct dl_err err;
    uint32_t failures = 0;
    bool undisturbed = false;
    for (long n = 1; n < 100 && !undisturbed; n++) {
        new_dir();
        struct sy_store *store = reopen(NULL);
        CU_ASSERT_EQUAL_FATAL(commit(store, 0, 1, &err), DL_OK);
        struct sy_lease leases[2] = {lease_to("a", 1, 1, 0, 100), lease_to("a", 1, 2, 120, 80)};
        struct sy_range queue = {.first = 100, .count = 20};
        struct sy_ledger_changes changes = {.serial = 1,
                                            .leases = leases,
                                            .lease_count = 2,
                                            .ranges_changed = true,
                                            .ranges = &queue,
                                            .range_count = 1};
        fail_errno = n % 2 == 0 ? ENOSPC : EIO;
        operations = 0;
        injected = 0;
        fail_at = n;
        enum dl_rc rc = sy_store_write_ledger(store, &changes, &err);
        fail_at = 0;
        undisturbed = injected == 0;
        failures += rc != DL_OK ? 1 : 0;
        CU_ASSERT(rc == DL_OK || rc == DL_EIO || rc == DL_EFULL);
        store = n % 3 == 0 ? reopen(store) : store;
        struct sy_ledger_state ledger = read_ledger(store);
        bool there = ledger.lease_count == 2 && ledger.range_count == 1 && ledger.positions == 200;
        bool nothing = ledger.lease_count == 0 && ledger.range_count == 0 && ledger.positions == 0;
        CU_ASSERT(there || (nothing && rc != DL_OK));
        free_ledger(&ledger);
        CU_ASSERT_EQUAL(sy_store_write_ledger(store, &changes, &err), DL_OK);
        store = reopen(store);
        CU_ASSERT_EQUAL(count_rows("SELECT count(*) FROM coverage_faults"), 0);
        CU_ASSERT_EQUAL(count_rows("SELECT sum(count) FROM coverage"), 200);
        sy_store_close(store);
        remove_dir();
    }
    CU_ASSERT(undisturbed && failures > 2);
}

/* Q7: a process that was paused changes nothing of its successor's ledger. */
static void test_ledger_is_fenced(void)
{
    struct dl_err err;
    new_dir();
    struct sy_store *stale = reopen(NULL), *next = reopen(NULL);
    struct sy_lease lease = lease_to("a", 1, 1, 0, 100);
    CU_ASSERT_EQUAL(grant(stale, &lease, 1, &err), DL_ECONFLICT);
    CU_ASSERT_EQUAL(grant(next, &lease, 1, &err), DL_OK);
    sy_store_close(next);
    sy_store_close(stale);
    remove_dir();
}

/* A folder from before the ledger goes on. */
static void test_older_folder(void)
{
    struct dl_err err;
    new_dir();
    struct sy_store *store = reopen(NULL);
    CU_ASSERT_EQUAL(commit(store, 0, 1, &err), DL_OK);
    sy_store_close(store);
    char path[128];
    snprintf(path, sizeof path, "%s/tape.db", dir);
    sqlite3 *db = NULL;
    CU_ASSERT_EQUAL_FATAL(sqlite3_open(path, &db), SQLITE_OK);
    CU_ASSERT_EQUAL(
        sqlite3_exec(db,
                     "DROP VIEW coverage_faults; DROP VIEW coverage; DROP TABLE leases; DROP TABLE returned;"
                     "ALTER TABLE participants DROP COLUMN lease; ALTER TABLE participants DROP COLUMN cursor;"
                     "UPDATE meta SET value = '1' WHERE key = 'schema'",
                     NULL, NULL, NULL),
        SQLITE_OK);
    sqlite3_close(db);
    store = reopen(NULL);
    check_holds(store, 0, 1);
    struct sy_lease lease = lease_to("a", UINT64_MAX, 1, 0, 100);
    CU_ASSERT_EQUAL(grant(store, &lease, 1, &err), DL_OK);
    CU_ASSERT_EQUAL(commit_seen(store, 2, 1, 20, &err), DL_OK);
    store = reopen(reopen(store));
    CU_ASSERT_EQUAL(count_rows("SELECT counted FROM leases"), 20);
    CU_ASSERT_EQUAL(count_rows("SELECT lease FROM participants WHERE version = 1 LIMIT 1"), 0);
    sy_store_close(store);
    remove_dir();
}

UNIT_MAIN("store", {"restores what was committed", test_restores_what_was_committed},
          {"keeps two versions", test_keeps_two_versions}, {"io errors", test_io_errors}, {"full disk", test_full_disk},
          {"many at once", test_many_at_once}, {"opening fails cleanly", test_opening_fails_cleanly},
          {"damaged file falls back", test_damaged_file_falls_back},
          {"nothing good is refused", test_nothing_good_is_refused},
          {"stale process is fenced", test_stale_process_is_fenced},
          {"folder belongs to one shard", test_folder_belongs_to_one_shard}, {"tape", test_tape},
          {"J9 job in the tape", test_job_is_in_the_tape_where_it_changed},
          {"J9 trace is bounded", test_trace_is_bounded}, {"J8 ledger", test_ledger},
          {"J8 coverage faults", test_coverage_faults}, {"J8 ledger on a failing disk", test_ledger_on_a_failing_disk},
          {"Q7 ledger is fenced", test_ledger_is_fenced}, {"older folder", test_older_folder})
