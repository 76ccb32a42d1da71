/* sy_store: files of versions that are written while they are being computed, and how files are laid out. */
#include "common/content.h"
#include "common/hash.h"
#include "common/le.h"
#include "tests/unit/store_rig.h"

#define LARGE                                                                                                          \
    (3u << 20) /* Elements of a version that goes past the page cache, in pieces; no whole number of blocks. */
#define LARGE_BYTES (LARGE * sizeof(float) + 1024)

static uint8_t *large, *large_state;

static void make_large(uint64_t version)
{
    if (large == NULL) {
        large = dl_alloc_aligned(LARGE_BYTES);
        large_state = dl_alloc_aligned(LARGE_BYTES);
        CU_ASSERT_FATAL(large != NULL && large_state != NULL);
    }
    for (uint64_t i = 0; i < LARGE_BYTES; i++) {
        large[i] = (uint8_t)((i * 31 + version) ^ (i >> 11));
        large_state[i] = (uint8_t)((i * 17 + version) ^ (i >> 13));
    }
}

static struct sy_store_content content_of(uint32_t fragment, uint64_t version, uint64_t bytes, uint64_t state_bytes)
{
    return (struct sy_store_content){.fragment = fragment,
                                     .version = version,
                                     .round = version * 10,
                                     .parameters_bytes = bytes,
                                     .state_bytes = state_bytes};
}

/* Appends `size` bytes in pieces of `piece`. */
static enum dl_rc append(struct sy_store_draft *draft, const void *bytes, uint64_t size, uint64_t piece,
                         struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    for (uint64_t at = 0; rc == DL_OK && at < size; at += piece) {
        rc = sy_store_append(draft, (const uint8_t *)bytes + at, DL_MIN(piece, size - at), err);
    }
    return rc;
}

/* A small version through a draft, as `describe` has it. Where the draft fails it is abandoned. */
static enum dl_rc commit_draft(struct sy_store *store, uint32_t fragment, uint64_t version, struct dl_err *err)
{
    struct sy_store_commit what = describe(fragment, version);
    struct sy_store_content content = content_of(fragment, version, what.parameters_bytes, what.state_bytes);
    struct sy_store_draft *draft = NULL;
    enum dl_rc rc = sy_store_begin(store, &content, &draft, err);
    if (rc == DL_OK) {
        rc = append(draft, parameters, sizeof parameters, 1000, err);
    }
    if (rc == DL_OK) {
        rc = append(draft, state, sizeof state, 777, err);
    }
    if (rc != DL_OK) {
        sy_store_abandon(draft);
        return rc;
    }
    CU_ASSERT_EQUAL(sy_store_parameters_hash(draft), dl_content_hash(parameters, sizeof parameters));
    what.draft = draft;
    what.parameters = what.state = NULL; /* Not looked at. */
    return commit_and_tidy(store, &what, 1, err);
}

/* Pieces of any size and address give the file that one piece gives. */
static void test_pieces(void)
{
    static const uint64_t pieces[] = {LARGE_BYTES, 1u << 20, 5000003, 4096, 64u << 10};
    struct dl_err err;
    make_large(1);
    for (size_t i = 0; i < DL_COUNT_OF(pieces); i++) {
        for (uint64_t shift = 0; shift <= 64; shift += 64) { /* The second is not aligned to blocks. */
            new_dir();
            struct sy_store *store = reopen(NULL);
            uint64_t bytes = LARGE_BYTES - shift;
            struct sy_store_content content = content_of(0, 1, bytes, bytes);
            struct sy_store_commit what = describe(0, 1);
            what.parameters_bytes = what.state_bytes = bytes;
            CU_ASSERT_EQUAL_FATAL(sy_store_begin(store, &content, &what.draft, &err), DL_OK);
            CU_ASSERT_EQUAL_FATAL(append(what.draft, large + shift, bytes, pieces[i], &err), DL_OK);
            CU_ASSERT_EQUAL_FATAL(append(what.draft, large_state + shift, bytes, pieces[i], &err), DL_OK);
            CU_ASSERT_EQUAL_FATAL(commit_and_tidy(store, &what, 1, &err), DL_OK);
            store = reopen(store);
            DL_AUTO_FREE uint8_t *got = malloc(bytes), *got_state = malloc(bytes);
            struct sy_store_version version;
            char damage[DL_ERR_TEXT_MAX];
            CU_ASSERT_EQUAL_FATAL(sy_store_load(store, 0, got, bytes, got_state, bytes, &version, damage, &err), DL_OK);
            CU_ASSERT_EQUAL(memcmp(got, large + shift, bytes), 0);
            CU_ASSERT_EQUAL(memcmp(got_state, large_state + shift, bytes), 0);
            CU_ASSERT_EQUAL(version.hash, dl_content_hash(large + shift, bytes));
            sy_store_close(store);
            remove_dir();
        }
    }
}

/* A hash that its maker gives is kept as it is; one that is not the content's shows when it is read. */
static void test_given_hash(void)
{
    struct dl_err err;
    for (uint64_t fault = 0; fault <= 1; fault++) {
        new_dir();
        struct sy_store *store = reopen(NULL);
        struct sy_store_commit what = describe(0, 1);
        struct sy_store_content content = content_of(0, 1, what.parameters_bytes, what.state_bytes);
        content.hash_is_given = true;
        CU_ASSERT_EQUAL_FATAL(sy_store_begin(store, &content, &what.draft, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(append(what.draft, parameters, sizeof parameters, 1000, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(append(what.draft, state, sizeof state, 1000, &err), DL_OK);
        sy_store_give_hash(what.draft, dl_content_hash(parameters, sizeof parameters) + fault);
        CU_ASSERT_EQUAL_FATAL(commit_and_tidy(store, &what, 1, &err), DL_OK);
        store = reopen(store);
        uint8_t got[sizeof parameters], got_state[sizeof state];
        struct sy_store_version version;
        char damage[DL_ERR_TEXT_MAX];
        enum dl_rc rc = sy_store_load(store, 0, got, sizeof got, got_state, sizeof got_state, &version, damage, &err);
        CU_ASSERT_EQUAL(rc, fault == 0 ? DL_OK : DL_ECORRUPT);
        sy_store_close(store);
        remove_dir();
    }
}

/* Where the page cache cannot be done without, at the opening or at the first write, it is used. */
static void test_file_systems_without_direct_io(void)
{
    struct dl_err err;
    make_large(2);
    for (int i = 0; i < 2; i++) {
        new_dir();
        struct sy_store *store = reopen(NULL);
        refuses_direct_at_opening = i == 0;
        refuses_direct = i == 1;
        writes_back = 0;
        struct sy_store_commit what = describe(0, 1);
        what.parameters = large;
        what.state = large_state;
        what.parameters_bytes = what.state_bytes = LARGE_BYTES;
        CU_ASSERT_EQUAL(commit_and_tidy(store, &what, 1, &err), DL_OK);
        CU_ASSERT(writes_back > 2); /* The disk is at work before the sync. */
        refuses_direct_at_opening = refuses_direct = false;
        store = reopen(store);
        DL_AUTO_FREE uint8_t *got = malloc(LARGE_BYTES), *got_state = malloc(LARGE_BYTES);
        struct sy_store_version version;
        char damage[DL_ERR_TEXT_MAX];
        CU_ASSERT_EQUAL(sy_store_load(store, 0, got, LARGE_BYTES, got_state, LARGE_BYTES, &version, damage, &err),
                        DL_OK);
        CU_ASSERT_EQUAL(memcmp(got, large, LARGE_BYTES), 0);
        CU_ASSERT_EQUAL(memcmp(got_state, large_state, LARGE_BYTES), 0);
        sy_store_close(store);
        remove_dir();
    }
}

/* S1, S4: every operation of a draft and its commit fails in turn: the version before stays, and the same content can be
 * committed again, by this process and by its successor. */
static void fail_each_operation(int error)
{
    struct dl_err err;
    uint32_t failures = 0;
    bool undisturbed = false;
    for (long n = 1; n < 200 && !undisturbed; n++) {
        enum dl_rc rc;
        bool hit;
        struct sy_store *store = fail_third(commit_draft, n, error, &rc, &hit, &err);
        undisturbed = !hit;
        CU_ASSERT(rc == DL_OK || rc == DL_EFULL || rc == DL_EIO);
        failures += rc != DL_OK ? 1 : 0;
        store = n % 2 == 0 ? reopen(store) : store;
        struct sy_store_version newest;
        CU_ASSERT_EQUAL_FATAL(sy_store_newest(store, 0, &newest, &err), DL_OK);
        CU_ASSERT(newest.version == 3 || (newest.version == 2 && rc != DL_OK));
        check_holds(store, 0, newest.version);
        CU_ASSERT_EQUAL(commit_draft(store, 0, 3, &err), DL_OK);
        check_holds(store, 0, 3);
        CU_ASSERT_EQUAL(count_files(".bin"), 2);
        sy_store_close(store);
        remove_dir();
    }
    CU_ASSERT(undisturbed && failures > 8);
}

static void test_failing_disk(void)
{
    fail_each_operation(EIO);
    fail_each_operation(ENOSPC);
}

/* The same of a large one, whose writes do not go through the page cache; and of the early writes that do. */
static void test_failing_disk_large(void)
{
    struct dl_err err;
    make_large(3);
    for (int i = 0; i < 2; i++) {
        uint32_t failures = 0;
        bool undisturbed = false;
        for (long n = 1; n < 200 && !undisturbed; n++) {
            new_dir();
            refuses_direct = i == 1;
            struct sy_store *store = reopen(NULL);
            CU_ASSERT_EQUAL_FATAL(commit(store, 0, 1, &err), DL_OK);
            struct sy_store_content content = content_of(1, 1, LARGE_BYTES, LARGE_BYTES);
            struct sy_store_commit what = describe(1, 1);
            what.parameters_bytes = what.state_bytes = LARGE_BYTES;
            fail_from(n, ENOSPC);
            enum dl_rc rc = sy_store_begin(store, &content, &what.draft, &err);
            rc = rc == DL_OK ? append(what.draft, large, LARGE_BYTES, 1u << 20, &err) : rc;
            rc = rc == DL_OK ? append(what.draft, large_state, LARGE_BYTES, 8u << 20, &err) : rc;
            if (rc == DL_OK) {
                rc = commit_and_tidy(store, &what, 1, &err);
            } else {
                sy_store_abandon(what.draft);
            }
            undisturbed = !fail_no_more();
            failures += rc != DL_OK ? 1 : 0;
            CU_ASSERT(rc == DL_OK || rc == DL_EFULL || rc == DL_EIO);
            store = reopen(store);
            CU_ASSERT_EQUAL(count_files(".bin"), rc == DL_OK ? 2 : 1);
            struct sy_store_version newest;
            CU_ASSERT_EQUAL(sy_store_newest(store, 1, &newest, &err), rc == DL_OK ? DL_OK : DL_ENOTFOUND);
            check_holds(store, 0, 1);
            sy_store_close(store);
            remove_dir();
        }
        refuses_direct = false;
        CU_ASSERT(undisturbed && failures > 12);
    }
}

/* Drafts that come to nothing: abandoned, left by a process that died, of an older version, of a stale process (Q7). */
static void test_drafts_that_do_not_count(void)
{
    struct dl_err err;
    new_dir();
    struct sy_store *store = reopen(NULL);
    CU_ASSERT_EQUAL_FATAL(commit_draft(store, 0, 2, &err), DL_OK);
    struct sy_store_content content = content_of(0, 3, sizeof parameters, sizeof state);
    struct sy_store_draft *draft = NULL, *other = NULL;
    CU_ASSERT_EQUAL_FATAL(sy_store_begin(store, &content, &draft, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(sy_store_begin(store, &content, &other, &err), DL_OK); /* Each has a file of its own. */
    CU_ASSERT_EQUAL(sy_store_append(draft, parameters, 4096, &err), DL_OK);
    CU_ASSERT_EQUAL(count_files(".bin"), 3);
    check_holds(store, 0, 2);
    sy_store_abandon(draft);
    CU_ASSERT_EQUAL(count_files(".bin"), 2);
    CU_ASSERT_EQUAL(commit_draft(store, 0, 1, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(count_files(".bin"), 2);
    struct sy_store *next = reopen(NULL); /* A successor removes what nobody has committed. */
    CU_ASSERT_EQUAL(count_files(".bin"), 1);
    CU_ASSERT_EQUAL(commit_draft(store, 0, 3, &err), DL_ECONFLICT);
    CU_ASSERT_EQUAL(count_files(".bin"), 1);
    check_holds(next, 0, 2);
    sy_store_abandon(other);
    CU_ASSERT_EQUAL(commit_draft(next, 0, 3, &err), DL_OK);
    check_holds(next, 0, 3);
    sy_store_close(store);
    sy_store_close(next);
    remove_dir();
}

/* A torn file: a header that was never written, a piece that is missing. */
static void test_torn_file_is_named(void)
{
    struct dl_err err;
    for (int i = 0; i < 2; i++) {
        new_dir();
        struct sy_store *store = reopen(NULL);
        CU_ASSERT_EQUAL_FATAL(commit_draft(store, 0, 1, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(commit_draft(store, 0, 2, &err), DL_OK);
        char path[512] = "";
        DIR *folder = opendir(dir);
        CU_ASSERT_PTR_NOT_NULL_FATAL(folder);
        for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
            if (strncmp(entry->d_name, "fragment-000-v0000000002", 24) == 0) {
                snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
            }
        }
        closedir(folder);
        static const uint8_t zeros[SY_STORE_BLOCK_BYTES];
        DL_AUTO_FD int fd = open(path, O_WRONLY | O_CLOEXEC);
        CU_ASSERT_EQUAL(pwrite(fd, zeros, sizeof zeros, i * SY_STORE_BLOCK_BYTES), SY_STORE_BLOCK_BYTES);
        static float got[ELEMENTS];
        static uint8_t got_state[STATE_BYTES];
        char damage[DL_ERR_TEXT_MAX];
        struct sy_store_version version;
        CU_ASSERT_EQUAL(sy_store_load(store, 0, got, sizeof got, got_state, sizeof got_state, &version, damage, &err),
                        DL_OK);
        CU_ASSERT_EQUAL(version.version, 3);
        CU_ASSERT_PTR_NOT_NULL(strstr(damage, "fragment-000-v0000000002"));
        fill(0, 1);
        CU_ASSERT(same_bytes(got, parameters, sizeof got));
        sy_store_close(store);
        remove_dir();
    }
}

/* Files of an older or a later format, which have other hashes, are refused. */
static void test_other_formats(void)
{
    struct dl_err err;
    for (uint32_t format = 2; format <= 4; format += 2) {
        new_dir();
        fill(2, 7);
        uint8_t header[128] = {0};
        memcpy(header, "DLCSTATE", 8);
        dl_le_put(header + 8, format, 4);
        dl_le_put(header + 12, 2, 4);
        dl_le_put(header + 16, 7, 8);
        dl_le_put(header + 24, 70, 8);
        dl_le_put(header + 32, 1, 8);
        dl_le_put(header + 40, sizeof parameters, 8);
        dl_le_put(header + 48, sizeof state, 8);
        dl_le_put(header + 120, dl_hash64(header, 120, 0), 8);
        char path[128];
        snprintf(path, sizeof path, "%s/fragment-old.bin", dir);
        FILE *file = fopen(path, "wb");
        CU_ASSERT_PTR_NOT_NULL_FATAL(file);
        CU_ASSERT_EQUAL(fwrite(header, 1, sizeof header, file), sizeof header);
        CU_ASSERT_EQUAL(fclose(file), 0);
        static float got[ELEMENTS];
        static uint8_t got_state[STATE_BYTES];
        CU_ASSERT_EQUAL(
            sy_store_read_file(dir, "fragment-old.bin", 2, 7, got, sizeof got, got_state, sizeof got_state, &err),
            DL_EUNSUPPORTED);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "fragment-old.bin has format"));
        remove_dir();
    }
}

UNIT_MAIN("store_draft", {"pieces", test_pieces}, {"given hash", test_given_hash},
          {"file systems without direct I/O", test_file_systems_without_direct_io},
          {"S1 S4 failing disk", test_failing_disk}, {"S4 failing disk, large", test_failing_disk_large},
          {"Q7 drafts that do not count", test_drafts_that_do_not_count},
          {"S3 torn file is named", test_torn_file_is_named}, {"other formats", test_other_formats})
