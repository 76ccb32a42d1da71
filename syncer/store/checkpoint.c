/* Checkpoints: versions that retention leaves alone, and what was known of the learners when they were taken. */
#include <inttypes.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "syncer/store/internal.h"
#include "syncer/store/sql.h"

static const char tables[] =
    "CREATE TABLE IF NOT EXISTS checkpoints(id INTEGER PRIMARY KEY, name TEXT NOT NULL, wall_ns INTEGER NOT NULL,"
    " epoch INTEGER NOT NULL, rounds_merged INTEGER NOT NULL, tokens INTEGER NOT NULL, complete INTEGER NOT NULL);"
    "CREATE TABLE IF NOT EXISTS checkpoint_fragments(id INTEGER NOT NULL, fragment INTEGER NOT NULL,"
    " version INTEGER NOT NULL, PRIMARY KEY(fragment, version, id)) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS checkpoint_learners(id INTEGER NOT NULL, uid TEXT NOT NULL, nonce TEXT NOT NULL,"
    " learner INTEGER NOT NULL, step INTEGER NOT NULL, tokens INTEGER NOT NULL, PRIMARY KEY(id, uid, nonce)) WITHOUT "
    "ROWID;"
    "CREATE TABLE IF NOT EXISTS checkpoint_channels(id INTEGER NOT NULL, uid TEXT NOT NULL, nonce TEXT NOT NULL,"
    " fragment INTEGER NOT NULL, round INTEGER NOT NULL, base_version INTEGER NOT NULL, tokens INTEGER NOT NULL,"
    " PRIMARY KEY(id, uid, nonce, fragment, round)) WITHOUT ROWID;";

enum dl_rc sy_store_checkpoint_tables(struct sy_store *store, struct dl_err *err)
{
    return exec(store, tables, "creating the tables of checkpoints", err);
}

/* A transaction of one function. */
static enum dl_rc in_transaction(struct sy_store *store,
                                 enum dl_rc (*body)(struct sy_store *store, const void *arg, struct dl_err *err),
                                 const void *arg, struct dl_err *err)
{
    sy_store_remove_dropped(store); /* Of a commit before. */
    enum dl_rc rc = exec(store, "BEGIN IMMEDIATE", "starting a transaction", err);
    if (rc == DL_OK) {
        rc = sy_store_db_check_epoch(store, err);
        rc = sy_store_db_end(store, rc == DL_OK ? body(store, arg, err) : rc, err);
    }
    store->dropped_count = rc == DL_OK ? store->dropped_count : 0;
    return rc;
}

/* --- pin ------------------------------------------------------------------------------------------------------------- */

static enum dl_rc pin_fragments(struct sy_store *store, const struct sy_store_checkpoint *checkpoint,
                                struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "INSERT OR REPLACE INTO checkpoint_fragments SELECT ?1, fragment, version FROM commits"
                            " WHERE fragment = ?2 AND version = ?3 AND kept = 1",
                            &statement, err);
    for (uint32_t i = 0; rc == DL_OK && i < checkpoint->fragment_count; i++) {
        bind_u64(statement, 1, checkpoint->id);
        bind_u64(statement, 2, checkpoint->fragments[i].fragment);
        bind_u64(statement, 3, checkpoint->fragments[i].version);
        rc = run(store, statement, "pinning a version", err);
        if (rc == DL_OK && sqlite3_changes(store->db) == 0) {
            rc = dl_err_set(err, DL_ENOTFOUND, "fragment %" PRIu32 " version %" PRIu64 " is not kept any more",
                            checkpoint->fragments[i].fragment, checkpoint->fragments[i].version);
        }
    }
    return rc;
}

static enum dl_rc pin_body(struct sy_store *store, const void *arg, struct dl_err *err)
{
    const struct sy_store_checkpoint *checkpoint = arg;
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO checkpoints VALUES(?, ?, ?, ?, ?, ?, 0)", &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, checkpoint->id);
        bind_text(statement, 2, checkpoint->name);
        sqlite3_bind_int64(statement, 3, checkpoint->wall_ns);
        bind_u64(statement, 4, store->epoch);
        bind_u64(statement, 5, checkpoint->rounds_merged);
        bind_u64(statement, 6, checkpoint->tokens);
        rc = run(store, statement, "writing a checkpoint", err);
    }
    return rc == DL_OK ? pin_fragments(store, checkpoint, err) : rc;
}

enum dl_rc sy_store_pin(struct sy_store *store, const struct sy_store_checkpoint *checkpoint, struct dl_err *err)
{
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = in_transaction(store, pin_body, checkpoint, err);
    pthread_mutex_unlock(&store->lock);
    return rc == DL_OK ? DL_OK : dl_err_wrap(err, "pinning a checkpoint");
}

/* --- its learners and channels --------------------------------------------------------------------------------------- */

static enum dl_rc write_learners(struct sy_store *store, const struct sy_store_cut *cut, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc =
        prepare(store, "INSERT OR REPLACE INTO checkpoint_learners VALUES(?, ?, ?, ?, ?, ?)", &statement, err);
    for (uint32_t i = 0; rc == DL_OK && i < cut->learner_count; i++) {
        const struct sy_store_cut_learner *learner = &cut->learners[i];
        bind_u64(statement, 1, cut->id);
        bind_text(statement, 2, learner->uid);
        bind_hex(statement, 3, learner->nonce);
        bind_u64(statement, 4, learner->learner);
        bind_u64(statement, 5, learner->step);
        bind_u64(statement, 6, learner->tokens);
        rc = run(store, statement, "writing a checkpoint's learners", err);
    }
    return rc;
}

static enum dl_rc write_channels(struct sy_store *store, const struct sy_store_cut *cut, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc =
        prepare(store, "INSERT OR REPLACE INTO checkpoint_channels VALUES(?, ?, ?, ?, ?, ?, ?)", &statement, err);
    for (uint32_t i = 0; rc == DL_OK && i < cut->push_count; i++) {
        const struct sy_store_cut_push *push = &cut->pushes[i];
        bind_u64(statement, 1, cut->id);
        bind_text(statement, 2, push->uid);
        bind_hex(statement, 3, push->nonce);
        bind_u64(statement, 4, push->fragment);
        bind_u64(statement, 5, push->round);
        bind_u64(statement, 6, push->base_version);
        bind_u64(statement, 7, push->tokens);
        rc = run(store, statement, "writing a checkpoint's channels", err);
    }
    return rc;
}

static enum dl_rc complete_body(struct sy_store *store, const void *arg, struct dl_err *err)
{
    const struct sy_store_cut *cut = arg;
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "UPDATE checkpoints SET complete = 1 WHERE id = ?", &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, cut->id);
        rc = run(store, statement, "completing a checkpoint", err);
    }
    if (rc != DL_OK || sqlite3_changes(store->db) == 0) {
        return rc; /* Unpinned meanwhile. */
    }
    rc = write_learners(store, cut, err);
    return rc == DL_OK ? write_channels(store, cut, err) : rc;
}

enum dl_rc sy_store_complete(struct sy_store *store, const struct sy_store_cut *cut, struct dl_err *err)
{
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = in_transaction(store, complete_body, cut, err);
    pthread_mutex_unlock(&store->lock);
    return rc == DL_OK ? DL_OK : dl_err_wrap(err, "completing a checkpoint");
}

/* --- unpin ----------------------------------------------------------------------------------------------------------- */

static enum dl_rc delete_rows(struct sy_store *store, const char *sql, uint64_t id, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, sql, &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, id);
        rc = run(store, statement, "removing a checkpoint", err);
    }
    return rc;
}

static enum dl_rc unpin_body(struct sy_store *store, const void *arg, struct dl_err *err)
{
    static const char *const deletions[] = {
        "DELETE FROM checkpoint_fragments WHERE id = ?", "DELETE FROM checkpoint_learners WHERE id = ?",
        "DELETE FROM checkpoint_channels WHERE id = ?", "DELETE FROM checkpoints WHERE id = ?"};
    uint64_t id = *(const uint64_t *)arg;
    enum dl_rc rc = DL_OK;
    for (size_t i = 0; rc == DL_OK && i < DL_COUNT_OF(deletions); i++) {
        rc = delete_rows(store, deletions[i], id, err);
    }
    if (rc == DL_OK && sqlite3_changes(store->db) == 0) {
        rc = dl_err_set(err, DL_ENOTFOUND, "there is no such checkpoint");
    }
    return rc == DL_OK ? sy_store_db_drop_old(store, SY_STORE_EVERY_FRAGMENT, err) : rc;
}

enum dl_rc sy_store_unpin(struct sy_store *store, uint64_t id, struct dl_err *err)
{
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = in_transaction(store, unpin_body, &id, err);
    if (rc == DL_OK) {
        sy_store_remove_dropped(store);
    }
    pthread_mutex_unlock(&store->lock);
    return rc == DL_OK ? DL_OK : dl_err_wrap(err, "removing a checkpoint");
}

/* --- list ------------------------------------------------------------------------------------------------------------ */

static enum dl_rc read_versions(struct sy_store *store, struct sy_store_checkpoint *checkpoint, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "SELECT fragment, version FROM checkpoint_fragments WHERE id = ? ORDER BY fragment",
                            &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    bind_u64(statement, 1, checkpoint->id);
    int code = sqlite3_step(statement);
    for (; code == SQLITE_ROW && checkpoint->fragment_count < DL_SPEC_FRAGMENTS_MAX; code = sqlite3_step(statement)) {
        checkpoint->fragments[checkpoint->fragment_count++] = (struct sy_store_pinned){
            .fragment = (uint32_t)column_u64(statement, 0), .version = column_u64(statement, 1)};
    }
    return code == SQLITE_DONE || code == SQLITE_ROW ? DL_OK : db_fail(store, "reading a checkpoint", err);
}

static enum dl_rc list(struct sy_store *store, struct sy_store_checkpoint *out, uint32_t most, uint32_t *count,
                       struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "SELECT id, name, wall_ns, rounds_merged, tokens, complete FROM checkpoints"
                            " ORDER BY id DESC LIMIT ?",
                            &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    bind_u64(statement, 1, most);
    int code = sqlite3_step(statement);
    for (; rc == DL_OK && code == SQLITE_ROW && *count < most; code = sqlite3_step(statement)) {
        struct sy_store_checkpoint *checkpoint = &out[(*count)++];
        *checkpoint = (struct sy_store_checkpoint){.id = column_u64(statement, 0),
                                                   .wall_ns = sqlite3_column_int64(statement, 2),
                                                   .rounds_merged = column_u64(statement, 3),
                                                   .tokens = column_u64(statement, 4),
                                                   .is_complete = sqlite3_column_int(statement, 5) != 0};
        snprintf(checkpoint->name, sizeof checkpoint->name, "%s", (const char *)sqlite3_column_text(statement, 1));
        rc = read_versions(store, checkpoint, err);
    }
    return rc != DL_OK || code == SQLITE_DONE || code == SQLITE_ROW ? rc : db_fail(store, "reading checkpoints", err);
}

enum dl_rc sy_store_checkpoints(struct sy_store *store, struct sy_store_checkpoint *out, uint32_t most, uint32_t *count,
                                struct dl_err *err)
{
    *count = 0;
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = list(store, out, most, count, err);
    pthread_mutex_unlock(&store->lock);
    return rc;
}
