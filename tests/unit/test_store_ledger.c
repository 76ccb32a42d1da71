/* sy_store: the ledger of the data, beside the commits that count it. */
#include "tests/unit/store_rig.h"

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
    return commit_and_tidy(store, &what, 1, err);
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
        fail_from(n, n % 2 == 0 ? ENOSPC : EIO);
        enum dl_rc rc = sy_store_write_ledger(store, &changes, &err);
        undisturbed = !fail_no_more();
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

/* A folder of another schema, older or newer, is refused and left as it is. */
static void test_other_schemas(void)
{
    struct dl_err err;
    new_dir();
    struct sy_store *store = reopen(NULL);
    CU_ASSERT_EQUAL(commit(store, 0, 1, &err), DL_OK);
    sy_store_close(store);
    char path[128];
    snprintf(path, sizeof path, "%s/tape.db", dir);
    for (int schema = SY_STORE_SCHEMA - 1; schema <= SY_STORE_SCHEMA + 1; schema++) {
        sqlite3 *db = NULL;
        char text[100];
        snprintf(text, sizeof text, "UPDATE meta SET value = '%d' WHERE key = 'schema'", schema);
        CU_ASSERT_EQUAL_FATAL(sqlite3_open(path, &db), SQLITE_OK);
        CU_ASSERT_EQUAL(sqlite3_exec(db, text, NULL, NULL, NULL), SQLITE_OK);
        sqlite3_close(db);
        enum dl_rc rc = open_as(&store, "demo", 0, &err);
        if (schema == SY_STORE_SCHEMA) {
            CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
            sy_store_close(store);
        } else {
            snprintf(text, sizeof text, "has schema %d", schema);
            CU_ASSERT_EQUAL(rc, DL_EINVAL);
            CU_ASSERT_PTR_NOT_NULL(strstr(err.text, text));
        }
    }
    remove_dir();
}

UNIT_MAIN("store_ledger", {"J8 ledger", test_ledger}, {"J8 coverage faults", test_coverage_faults},
          {"J8 ledger on a failing disk", test_ledger_on_a_failing_disk},
          {"Q7 ledger is fenced", test_ledger_is_fenced}, {"other schemas", test_other_schemas})
