/* The ledger of the data in tape.db: every range that was leased out, what of it counts, and what waits for its next learner. */
#include <stdlib.h>

#include "common/mem.h"
#include "syncer/store/sql.h"

/* `covers` has each counted, leased or queued range once; what comes twice begins before the end of those before it, and a
 * gap is where one begins after it. The last row, of no length, stands at the high-water mark. */
static const char tables[] =
    "CREATE TABLE IF NOT EXISTS leases(lease INTEGER PRIMARY KEY, first INTEGER NOT NULL, count INTEGER NOT NULL,"
    " counted INTEGER NOT NULL, state TEXT NOT NULL, learner INTEGER NOT NULL, admission INTEGER NOT NULL,"
    " uid TEXT NOT NULL, nonce TEXT NOT NULL);"
    "CREATE INDEX IF NOT EXISTS leases_held ON leases(uid, nonce) WHERE state = 'held';"
    "CREATE TABLE IF NOT EXISTS returned(first INTEGER PRIMARY KEY, count INTEGER NOT NULL);"
    "CREATE VIEW IF NOT EXISTS coverage AS"
    " SELECT first, counted AS count, 'counted' AS what, lease, learner FROM leases WHERE counted > 0"
    " UNION ALL SELECT first + counted, count - counted, 'leased', lease, learner FROM leases"
    " WHERE state = 'held' AND count > counted"
    " UNION ALL SELECT first, count, 'queued', 0, -1 FROM returned;"
    "CREATE VIEW IF NOT EXISTS coverage_faults AS"
    " SELECT min(first, until) AS first, abs(first - until) AS count, CASE WHEN first < until THEN 'twice' ELSE 'lost' "
    "END AS fault FROM"
    " (SELECT first, coalesce(max(first + count) OVER"
    "  (ORDER BY first, count ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS until FROM"
    "  (SELECT first, count FROM coverage UNION ALL SELECT coalesce(max(first + count), 0), 0 FROM leases))"
    " WHERE first <> until;";

enum dl_rc sy_store_ledger_tables(struct sy_store *store, struct dl_err *err)
{
    return exec(store, tables, "creating the tables of the ledger", err);
}

/* --- writing ----------------------------------------------------------------------------------------------------- */

static enum dl_rc count_up_to(struct sy_store *store, sqlite3_stmt *before, sqlite3_stmt *at,
                              const struct sy_store_participant *who, struct dl_err *err)
{
    bind_text(before, 1, who->uid);
    bind_hex(before, 2, who->nonce);
    bind_u64(before, 3, who->lease);
    enum dl_rc rc = run(store, before, "counting data", err);
    if (rc == DL_OK) {
        bind_u64(at, 1, who->lease);
        bind_u64(at, 2, who->cursor);
        bind_text(at, 3, who->uid);
        bind_hex(at, 4, who->nonce);
        rc = run(store, at, "counting data", err);
    }
    return rc;
}

enum dl_rc sy_store_ledger_count(struct sy_store *store, const struct sy_store_commit *commit, struct dl_err *err)
{
    AUTO_STATEMENT *before = NULL;
    AUTO_STATEMENT *at = NULL;
    bool any = false;
    for (uint32_t i = 0; store->shard == 0 && i < commit->participant_count; i++) {
        any = any || commit->participants[i].lease > 0;
    }
    if (!any) {
        return DL_OK;
    }
    enum dl_rc rc = prepare(store,
                            "UPDATE leases SET counted = count, state = 'counted'"
                            " WHERE uid = ?1 AND nonce = ?2 AND lease < ?3 AND state = 'held'",
                            &before, err);
    if (rc == DL_OK) {
        rc = prepare(store,
                     "UPDATE leases SET counted = max(counted, ?2),"
                     " state = CASE WHEN max(counted, ?2) >= count THEN 'counted' ELSE 'held' END"
                     " WHERE lease = ?1 AND uid = ?3 AND nonce = ?4 AND state = 'held'",
                     &at, err);
    }
    for (uint32_t i = 0; rc == DL_OK && i < commit->participant_count; i++) {
        if (commit->participants[i].lease > 0) {
            rc = count_up_to(store, before, at, &commit->participants[i], err);
        }
    }
    return rc;
}

static enum dl_rc write_leases(struct sy_store *store, const struct sy_ledger_changes *changes, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO leases VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", &statement, err);
    for (uint32_t i = 0; rc == DL_OK && i < changes->lease_count; i++) {
        const struct sy_lease *lease = &changes->leases[i];
        bind_u64(statement, 1, lease->lease);
        bind_u64(statement, 2, lease->first);
        bind_u64(statement, 3, lease->count);
        bind_u64(statement, 4, lease->counted);
        bind_text(statement, 5, sy_lease_state_name(lease->state));
        bind_u64(statement, 6, lease->learner);
        bind_u64(statement, 7, lease->admission);
        bind_text(statement, 8, lease->uid);
        bind_hex(statement, 9, lease->nonce);
        rc = run(store, statement, "writing leases", err);
    }
    return rc;
}

static enum dl_rc write_ranges(struct sy_store *store, const struct sy_ledger_changes *changes, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = exec(store, "DELETE FROM returned", "writing the queue of data", err);
    if (rc == DL_OK) {
        rc = prepare(store, "INSERT INTO returned VALUES(?, ?)", &statement, err);
    }
    for (uint32_t i = 0; rc == DL_OK && i < changes->range_count; i++) {
        bind_u64(statement, 1, changes->ranges[i].first);
        bind_u64(statement, 2, changes->ranges[i].count);
        rc = run(store, statement, "writing the queue of data", err);
    }
    return rc;
}

static enum dl_rc write_changes(struct sy_store *store, const struct sy_ledger_changes *changes, struct dl_err *err)
{
    enum dl_rc rc = sy_store_db_check_epoch(store, err);
    if (rc == DL_OK) {
        rc = write_leases(store, changes, err);
    }
    return rc == DL_OK && changes->ranges_changed ? write_ranges(store, changes, err) : rc;
}

enum dl_rc sy_store_write_ledger(struct sy_store *store, const struct sy_ledger_changes *changes, struct dl_err *err)
{
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = exec(store, "BEGIN IMMEDIATE", "starting a transaction", err);
    if (rc == DL_OK) {
        rc = sy_store_db_end(store, write_changes(store, changes, err), err);
    }
    pthread_mutex_unlock(&store->lock);
    return rc == DL_OK ? DL_OK : dl_err_wrap(err, "the ledger of the data");
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

static enum dl_rc read_number(struct sy_store *store, const char *sql, uint64_t *out, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, sql, &statement, err);
    if (rc == DL_OK && sqlite3_step(statement) != SQLITE_ROW) {
        rc = db_fail(store, "reading the ledger", err);
    }
    if (rc == DL_OK) {
        *out = column_u64(statement, 0);
    }
    return rc;
}

static void read_lease(sqlite3_stmt *statement, struct sy_lease *lease)
{
    *lease = (struct sy_lease){.lease = column_u64(statement, 0),
                               .first = column_u64(statement, 1),
                               .count = column_u64(statement, 2),
                               .counted = column_u64(statement, 3),
                               .state = sqlite3_column_int(statement, 4) != 0 ? SY_LEASE_HELD : SY_LEASE_COUNTED,
                               .learner = (uint32_t)column_u64(statement, 5),
                               .admission = column_u64(statement, 6),
                               .nonce = column_hex(statement, 8)};
    snprintf(lease->uid, sizeof lease->uid, "%s", (const char *)sqlite3_column_text(statement, 7));
}

/* Held ones, and for each of the last incarnations without any the highest that was counted in full: whoever comes back is
 * known by it. */
static enum dl_rc read_leases(struct sy_store *store, uint32_t holders, struct sy_ledger_state *state,
                              struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    uint64_t held = 0;
    enum dl_rc rc = read_number(store, "SELECT count(*) FROM leases WHERE state = 'held'", &held, err);
    if (rc == DL_OK) {
        rc = prepare(store,
                     "SELECT lease, first, count, counted, state = 'held', learner, admission, uid, nonce FROM leases"
                     " WHERE state = 'held' OR lease IN (SELECT max(lease) FROM leases WHERE state = 'counted'"
                     " GROUP BY uid, nonce ORDER BY 1 DESC LIMIT ?) ORDER BY lease",
                     &statement, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    state->leases = calloc(held + holders + 1, sizeof *state->leases);
    if (state->leases == NULL) {
        return dl_err_set(err, DL_ENOMEM, "reading the ledger: no memory");
    }
    bind_u64(statement, 1, holders);
    int code = sqlite3_step(statement);
    for (; code == SQLITE_ROW && state->lease_count < held + holders; code = sqlite3_step(statement)) {
        read_lease(statement, &state->leases[state->lease_count++]);
    }
    return code == SQLITE_DONE ? DL_OK : db_fail(store, "reading leases", err);
}

static enum dl_rc read_ranges(struct sy_store *store, struct sy_ledger_state *state, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    uint64_t count = 0;
    enum dl_rc rc = read_number(store, "SELECT count(*) FROM returned", &count, err);
    if (rc == DL_OK) {
        rc = prepare(store, "SELECT first, count FROM returned ORDER BY first", &statement, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    state->ranges = calloc(count + 1, sizeof *state->ranges);
    if (state->ranges == NULL) {
        return dl_err_set(err, DL_ENOMEM, "reading the ledger: no memory");
    }
    int code = sqlite3_step(statement);
    for (; code == SQLITE_ROW && state->range_count < count; code = sqlite3_step(statement)) {
        state->ranges[state->range_count++] =
            (struct sy_range){.first = column_u64(statement, 0), .count = column_u64(statement, 1)};
    }
    return code == SQLITE_DONE ? DL_OK : db_fail(store, "reading the queue of data", err);
}

enum dl_rc sy_store_read_ledger(struct sy_store *store, uint32_t holders, struct sy_ledger_state *state,
                                struct dl_err *err)
{
    *state = (struct sy_ledger_state){0};
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = read_leases(store, holders, state, err);
    if (rc == DL_OK) {
        rc = read_ranges(store, state, err);
    }
    if (rc == DL_OK) {
        rc = read_number(store, "SELECT coalesce(max(lease), 0) + 1 FROM leases", &state->next_lease, err);
    }
    if (rc == DL_OK) {
        rc = read_number(store, "SELECT coalesce(max(first + count), 0) FROM leases", &state->positions, err);
    }
    if (rc == DL_OK) {
        rc = read_number(store, "SELECT coalesce(sum(counted), 0) FROM leases", &state->counted, err);
    }
    pthread_mutex_unlock(&store->lock);
    if (rc != DL_OK) {
        free(dl_take(state->leases));
        free(dl_take(state->ranges));
    }
    return rc;
}
