/* sy_store: every commit is there in full or not at all, whatever fails when. */
#include "tests/unit/store_rig.h"

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
    CU_ASSERT_EQUAL(bytes, 3 * (SY_STORE_BLOCK_BYTES + sizeof parameters + STATE_BYTES_STORED));
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
        enum dl_rc rc;
        bool hit;
        struct sy_store *store = fail_third(commit, n, error, &rc, &hit, &err);
        if (rc == DL_OK) {
            successes += hit ? 0 : 1;
        } else {
            failures++;
            CU_ASSERT_TRUE(hit);
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
        fail_from(n, error);
        CU_ASSERT_EQUAL(deliver(store, 1, 7), 0);
        enum dl_rc rc = commit_all(store, 4, 2, &err);
        undisturbed = !fail_no_more();
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
        fail_from(n, EIO);
        enum dl_rc rc = open_as(&store, "demo", 0, &err);
        bool hit = fail_no_more();
        opened = rc == DL_OK && !hit;
        if (rc != DL_OK) {
            failures++;
            CU_ASSERT_TRUE(hit);
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
    static const long offsets[] = {0,
                                   20,
                                   127,
                                   SY_STORE_BLOCK_BYTES,
                                   SY_STORE_BLOCK_BYTES + sizeof parameters + 5,
                                   -(long)SY_STORE_BLOCK_BYTES,
                                   -STATE_BYTES_STORED - 10};
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
    damage_newest(0, 2, 1, SY_STORE_BLOCK_BYTES + 400);
    damage_newest(0, 1, 1, -SY_STORE_BLOCK_BYTES);
    CU_ASSERT_EQUAL(sy_store_load(store, 0, got, sizeof got, got_state, sizeof got_state, &found, damage, &err),
                    DL_ECORRUPT);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "no good copy of fragment 0"));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "fragment-000-v0000000002-e1-"));
    sy_store_close(store);
    remove_dir();
}

/* What a commit replaces stays until somebody has the time, or the next commit. */
static void test_old_files_wait_to_be_removed(void)
{
    new_dir();
    struct dl_err err;
    struct sy_store *store = reopen(NULL);
    for (uint64_t version = 1; version <= 5; version++) {
        struct sy_store_commit what = describe(0, version);
        CU_ASSERT_EQUAL_FATAL(sy_store_commit(store, &what, 1, &err), DL_OK);
        CU_ASSERT_EQUAL(count_files(".bin"), DL_MIN(version, SY_STORE_KEEP + 1));
    }
    fail_from(1, EIO);
    struct sy_store_commit next = describe(0, 6);
    CU_ASSERT_NOT_EQUAL(sy_store_commit(store, &next, 1, &err), DL_OK);
    CU_ASSERT_TRUE(fail_no_more());
    sy_store_tidy(store);
    CU_ASSERT_EQUAL(count_files(".bin"), SY_STORE_KEEP);
    check_holds(store, 0, 5);
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
    CU_ASSERT_EQUAL(commit(old, 0, 1, &err), DL_ECONFLICT); /* However far the successor has come. */
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

/* K8: a budget that is raised later would give another number; the one that the job began with holds. Without a job (the folder
 * is opened as a tool does) there is nothing to keep. */
static void test_warmup_is_kept_from_the_first_opening(void)
{
    new_dir();
    static const struct {
        const char *spec;
        uint32_t given, kept;
    } openings[] = {{NULL, 7, 7}, {"{\"budget\":1}", 300, 300}, {"{\"budget\":9}", 1000, 300}, {NULL, 0, 300}};
    for (size_t i = 0; i < DL_COUNT_OF(openings); i++) {
        struct sy_store *store = NULL;
        struct dl_err err;
        struct sy_store_options options = {
            .dir = dir, .job = "demo", .spec = openings[i].spec, .warmup_steps = openings[i].given};
        CU_ASSERT_EQUAL_FATAL(sy_store_open(&options, &store, &err), DL_OK);
        CU_ASSERT_EQUAL(sy_store_warmup_steps(store), openings[i].kept);
        sy_store_close(store);
    }
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

UNIT_MAIN("store", {"restores what was committed", test_restores_what_was_committed},
          {"keeps two versions", test_keeps_two_versions}, {"io errors", test_io_errors}, {"full disk", test_full_disk},
          {"many at once", test_many_at_once}, {"opening fails cleanly", test_opening_fails_cleanly},
          {"damaged file falls back", test_damaged_file_falls_back},
          {"nothing good is refused", test_nothing_good_is_refused}, {"old files", test_old_files_wait_to_be_removed},
          {"stale process is fenced", test_stale_process_is_fenced},
          {"folder belongs to one shard", test_folder_belongs_to_one_shard}, {"tape", test_tape},
          {"J9 job in the tape", test_job_is_in_the_tape_where_it_changed},
          {"K8 warm-up is kept", test_warmup_is_kept_from_the_first_opening},
          {"J9 trace is bounded", test_trace_is_bounded})
