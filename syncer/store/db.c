#include <inttypes.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/mem.h"
#include "syncer/store/internal.h"
#include "syncer/store/sql.h"

#define BUSY_MS 5000

static const char schema[] =
    "CREATE TABLE IF NOT EXISTS meta(key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS epochs(epoch INTEGER PRIMARY KEY, opened_ns INTEGER NOT NULL, process INTEGER NOT "
    "NULL);"
    "CREATE TABLE IF NOT EXISTS layout(id INTEGER PRIMARY KEY CHECK(id = 1), kind INTEGER NOT NULL,"
    " fragments INTEGER NOT NULL, hash TEXT NOT NULL, tensors BLOB NOT NULL);"
    "CREATE TABLE IF NOT EXISTS commits(fragment INTEGER NOT NULL, version INTEGER NOT NULL, round INTEGER NOT NULL,"
    " epoch INTEGER NOT NULL, wall_ns INTEGER NOT NULL, hash TEXT NOT NULL, file TEXT NOT NULL, kept INTEGER NOT NULL,"
    " recovered INTEGER NOT NULL, PRIMARY KEY(fragment, version)) WITHOUT ROWID;"
    "CREATE INDEX IF NOT EXISTS commits_kept ON commits(file) WHERE kept = 1;"
    "CREATE INDEX IF NOT EXISTS commits_kept_versions ON commits(fragment, version) WHERE kept = 1;"
    "CREATE TABLE IF NOT EXISTS participants(fragment INTEGER NOT NULL, version INTEGER NOT NULL,"
    " learner INTEGER NOT NULL, admission INTEGER NOT NULL, uid TEXT NOT NULL, nonce TEXT NOT NULL,"
    " step INTEGER NOT NULL, base_version INTEGER NOT NULL, steps INTEGER NOT NULL, tokens INTEGER NOT NULL,"
    " weight REAL NOT NULL, norm REAL NOT NULL, lease INTEGER NOT NULL DEFAULT 0, cursor INTEGER NOT NULL DEFAULT 0,"
    " PRIMARY KEY(fragment, version, learner, admission)) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS events(seq INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, wall_ns INTEGER NOT NULL,"
    " kind TEXT NOT NULL, learner INTEGER NOT NULL, admission INTEGER NOT NULL, uid TEXT NOT NULL,"
    " step INTEGER NOT NULL, text TEXT NOT NULL);" SY_STORE_TRACE_SCHEMA;

enum dl_rc sy_store_db_open(struct sy_store *store, const char *vfs, struct dl_err *err)
{
    char path[SY_STORE_PATH_MAX];
    snprintf(path, sizeof path, "%s/tape.db", store->dir);
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_FULLMUTEX | SQLITE_OPEN_EXRESCODE;
    if (sqlite3_open_v2(path, &store->db, flags, vfs) != SQLITE_OK) {
        return store->db == NULL ? dl_err_set(err, DL_ENOMEM, "opening %s: no memory", path)
                                 : db_fail(store, "opening the database", err);
    }
    sqlite3_busy_timeout(store->db, BUSY_MS);
    enum dl_rc rc = exec(store, "PRAGMA journal_mode = WAL", "switching to a write-ahead log", err);
    if (rc == DL_OK) {
        rc = exec(store, "PRAGMA synchronous = FULL", "setting synchronous", err);
    }
    return rc;
}

static enum dl_rc read_meta(struct sy_store *store, const char *key, char *out, size_t size, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "SELECT value FROM meta WHERE key = ?", &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    bind_text(statement, 1, key);
    out[0] = '\0';
    int code = sqlite3_step(statement);
    if (code == SQLITE_ROW) {
        snprintf(out, size, "%s", (const char *)sqlite3_column_text(statement, 0));
    }
    return code == SQLITE_ROW || code == SQLITE_DONE ? DL_OK : db_fail(store, "reading meta", err);
}

static enum dl_rc write_meta(struct sy_store *store, const char *key, const char *value, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO meta VALUES(?, ?)", &statement, err);
    if (rc == DL_OK) {
        bind_text(statement, 1, key);
        bind_text(statement, 2, value);
        rc = run(store, statement, "writing meta", err);
    }
    return rc;
}

/* A folder belongs to one job and shard for good. */
static enum dl_rc claim(struct sy_store *store, const char *key, const char *ours, struct dl_err *err)
{
    char theirs[DL_SPEC_NAME_MAX] = "";
    enum dl_rc rc = read_meta(store, key, theirs, sizeof theirs, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (theirs[0] == '\0') {
        return write_meta(store, key, ours, err);
    }
    return strcmp(theirs, ours) == 0
               ? DL_OK
               : dl_err_set(err, DL_EINVAL, "state folder %s belongs to %s %s, not %s: use another folder", store->dir,
                            key, theirs, ours);
}

static enum dl_rc raise_epoch(struct sy_store *store, struct dl_err *err)
{
    char text[24] = "";
    enum dl_rc rc = read_meta(store, "epoch", text, sizeof text, err);
    if (rc != DL_OK) {
        return rc;
    }
    store->epoch = strtoull(text, NULL, 10) + 1;
    snprintf(text, sizeof text, "%" PRIu64, store->epoch);
    rc = write_meta(store, "epoch", text, err);
    AUTO_STATEMENT *statement = NULL;
    if (rc == DL_OK) {
        rc = prepare(store, "INSERT INTO epochs VALUES(?, ?, ?)", &statement, err);
    }
    if (rc == DL_OK) {
        bind_u64(statement, 1, store->epoch);
        sqlite3_bind_int64(statement, 2, dl_wall_ns());
        sqlite3_bind_int(statement, 3, getpid());
        rc = run(store, statement, "writing the epoch", err);
    }
    return rc;
}

/* The number of the first opening holds: later ones may have another budget, of which another would follow. */
static enum dl_rc keep_warmup(struct sy_store *store, struct dl_err *err)
{
    char text[24] = "";
    enum dl_rc rc = read_meta(store, "warmup_steps", text, sizeof text, err);
    if (rc != DL_OK || text[0] != '\0') {
        store->warmup_steps = (uint32_t)strtoul(text, NULL, 10);
        return rc;
    }
    if (store->spec == NULL) {
        return DL_OK;
    }
    snprintf(text, sizeof text, "%" PRIu32, store->warmup_steps);
    return write_meta(store, "warmup_steps", text, err);
}

static enum dl_rc read_layout(struct sy_store *store, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "SELECT kind, fragments, hash, tensors FROM layout", &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    int code = sqlite3_step(statement);
    if (code == SQLITE_DONE) {
        return DL_OK;
    }
    if (code != SQLITE_ROW) {
        return db_fail(store, "reading the layout", err);
    }
    int bytes = sqlite3_column_bytes(statement, 3);
    store->tensors = malloc(bytes == 0 ? 1 : (size_t)bytes);
    if (store->tensors == NULL) {
        return dl_err_set(err, DL_ENOMEM, "reading the layout: no memory");
    }
    memcpy(store->tensors, sqlite3_column_blob(statement, 3), (size_t)bytes);
    store->layout = (struct sy_store_layout){.kind = (enum dl_layout_kind)sqlite3_column_int(statement, 0),
                                             .fragments = (uint32_t)sqlite3_column_int(statement, 1),
                                             .hash = column_hex(statement, 2),
                                             .tensors = store->tensors,
                                             .tensors_bytes = (size_t)bytes};
    store->has_layout = true;
    store->layout_is_durable = true;
    return DL_OK;
}

static enum dl_rc begin_epoch_in_transaction(struct sy_store *store, struct dl_err *err)
{
    char text[24] = "";
    enum dl_rc rc = exec(store, schema, "creating tables", err);
    if (rc == DL_OK) {
        rc = sy_store_totals_tables(store, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_ledger_tables(store, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_checkpoint_tables(store, err);
    }
    if (rc == DL_OK) {
        rc = read_meta(store, "schema", text, sizeof text, err);
    }
    if (rc == DL_OK && text[0] == '\0') {
        snprintf(text, sizeof text, "%d", SY_STORE_SCHEMA);
        rc = write_meta(store, "schema", text, err);
    } else if (rc == DL_OK && strtoull(text, NULL, 10) != SY_STORE_SCHEMA) {
        /* An older one has other hashes: nothing in it could be checked. */
        rc =
            dl_err_set(err, DL_EINVAL,
                       "state folder %s has schema %s, this program knows %d: go on with the program that began it, or "
                       "with a new folder",
                       store->dir, text, SY_STORE_SCHEMA);
    }
    if (rc == DL_OK) {
        rc = claim(store, "job", store->job, err);
    }
    if (rc == DL_OK) {
        snprintf(text, sizeof text, "%" PRIu32, store->shard);
        rc = claim(store, "shard", text, err);
    }
    if (rc == DL_OK) {
        rc = raise_epoch(store, err);
    }
    if (rc == DL_OK) {
        rc = keep_warmup(store, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_trace_spec(store, err);
    }
    return rc;
}

enum dl_rc sy_store_db_end(struct sy_store *store, enum dl_rc rc, struct dl_err *err)
{
    if (rc == DL_OK) {
        rc = exec(store, "COMMIT", "committing", err);
    }
    if (rc != DL_OK && !sqlite3_get_autocommit(store->db)) {
        sqlite3_exec(store->db, "ROLLBACK", NULL, NULL, NULL);
    }
    return rc;
}

enum dl_rc sy_store_db_begin_epoch(struct sy_store *store, struct dl_err *err)
{
    enum dl_rc rc = exec(store, "BEGIN IMMEDIATE", "starting", err);
    if (rc == DL_OK) {
        rc = sy_store_db_end(store, begin_epoch_in_transaction(store, err), err);
    }
    if (rc == DL_OK) {
        rc = read_layout(store, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_totals_read(store, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_trace_open(store, err);
    }
    return rc;
}

enum dl_rc sy_store_db_check_epoch(struct sy_store *store, struct dl_err *err)
{
    char text[24] = "";
    enum dl_rc rc = read_meta(store, "epoch", text, sizeof text, err);
    if (rc == DL_OK && strtoull(text, NULL, 10) != store->epoch) {
        rc = dl_err_set(err, DL_ECONFLICT,
                        "state folder %s was opened by a later syncer (epoch %s, ours is %" PRIu64
                        "): this process must end",
                        store->dir, text, store->epoch);
    }
    return rc;
}

static enum dl_rc write_layout(struct sy_store *store, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO layout VALUES(1, ?, ?, ?, ?)", &statement, err);
    if (rc == DL_OK) {
        sqlite3_bind_int(statement, 1, (int)store->layout.kind);
        bind_u64(statement, 2, store->layout.fragments);
        bind_hex(statement, 3, store->layout.hash);
        sqlite3_bind_blob64(statement, 4, store->layout.tensors, store->layout.tensors_bytes, SQLITE_STATIC);
        rc = run(store, statement, "writing the layout", err);
    }
    return rc;
}

static enum dl_rc write_participants(struct sy_store *store, const struct sy_store_commit *commit, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(
        store, "INSERT OR REPLACE INTO participants VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", &statement, err);
    for (uint32_t i = 0; rc == DL_OK && i < commit->participant_count; i++) {
        const struct sy_store_participant *who = &commit->participants[i];
        bind_u64(statement, 1, commit->fragment);
        bind_u64(statement, 2, commit->version);
        bind_u64(statement, 3, who->learner);
        bind_u64(statement, 4, who->admission);
        bind_text(statement, 5, who->uid);
        bind_hex(statement, 6, who->nonce);
        bind_u64(statement, 7, who->step);
        bind_u64(statement, 8, who->base_version);
        bind_u64(statement, 9, who->steps);
        bind_u64(statement, 10, who->tokens);
        sqlite3_bind_double(statement, 11, who->weight);
        sqlite3_bind_double(statement, 12, who->norm);
        bind_u64(statement, 13, who->lease);
        bind_u64(statement, 14, who->cursor);
        rc = run(store, statement, "writing participants", err);
    }
    return rc;
}

/* Entries below events_writing do not change meanwhile: new ones go behind them. */
static enum dl_rc write_events(struct sy_store *store, struct dl_err *err)
{
    pthread_mutex_lock(&store->events_lock);
    store->events_writing = store->event_count;
    pthread_mutex_unlock(&store->events_lock);
    if (store->events_writing == 0) {
        return DL_OK;
    }
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "INSERT INTO events(epoch, wall_ns, kind, learner, admission, uid, step, text)"
                            " VALUES(?, ?, ?, ?, ?, ?, ?, ?)",
                            &statement, err);
    for (uint32_t i = 0; rc == DL_OK && i < store->events_writing; i++) {
        const struct sy_store_event *event = &store->events[i];
        bind_u64(statement, 1, store->epoch);
        sqlite3_bind_int64(statement, 2, event->wall_ns);
        bind_text(statement, 3, event->kind);
        bind_u64(statement, 4, event->learner);
        bind_u64(statement, 5, event->admission);
        bind_text(statement, 6, event->uid);
        bind_u64(statement, 7, event->step);
        bind_text(statement, 8, event->text);
        rc = run(store, statement, "writing events", err);
    }
    return rc;
}

/* Runs an UPDATE or DELETE that returns files: no longer named from this transaction on, removed after it. */
static enum dl_rc drop_files(struct sy_store *store, sqlite3_stmt *statement, struct dl_err *err)
{
    int code = sqlite3_step(statement);
    while (code == SQLITE_ROW) {
        if (store->dropped_count < DL_COUNT_OF(store->dropped)) {
            snprintf(store->dropped[store->dropped_count++], SY_STORE_FILE_MAX, "%s",
                     (const char *)sqlite3_column_text(statement, 0));
        }
        code = sqlite3_step(statement);
    }
    return code == SQLITE_DONE ? DL_OK : db_fail(store, "dropping old versions", err);
}

/* The newest of each fragment stay, and those of checkpoints. */
enum dl_rc sy_store_db_drop_old(struct sy_store *store, uint32_t fragment, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
#define DROP_FROM "UPDATE commits SET kept = 0 WHERE "
#define DROP_WHAT                                                                                                      \
    " kept = 1 AND version NOT IN (SELECT version FROM commits newer WHERE newer.fragment = commits.fragment"          \
    "  ORDER BY version DESC LIMIT ?2)"                                                                                \
    " AND NOT EXISTS (SELECT 1 FROM checkpoint_fragments pinned WHERE pinned.fragment = commits.fragment"              \
    "  AND pinned.version = commits.version) RETURNING file"
    bool every = fragment == SY_STORE_EVERY_FRAGMENT;
    enum dl_rc rc =
        prepare(store, every ? DROP_FROM DROP_WHAT : DROP_FROM "fragment = ?1 AND" DROP_WHAT, &statement, err);
    if (rc == DL_OK) {
        if (!every) {
            bind_u64(statement, 1, fragment);
        }
        bind_u64(statement, 2, SY_STORE_KEEP);
        rc = drop_files(store, statement, err);
    }
    return rc;
}

/* A repeat has a file of its own; the first one's goes. */
static enum dl_rc drop_replaced(struct sy_store *store, const struct sy_store_commit *commit, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc =
        prepare(store, "DELETE FROM commits WHERE fragment = ? AND version = ? RETURNING file", &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, commit->fragment);
        bind_u64(statement, 2, commit->version);
        rc = drop_files(store, statement, err);
    }
    return rc;
}

static void forget_written_events(struct sy_store *store)
{
    pthread_mutex_lock(&store->events_lock);
    store->event_count -= store->events_writing;
    memmove(store->events, store->events + store->events_writing, store->event_count * sizeof store->events[0]);
    store->events_writing = 0;
    pthread_mutex_unlock(&store->events_lock);
}

static enum dl_rc write_commit(struct sy_store *store, const struct sy_store_commit *commit,
                               const struct sy_store_written *written, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO commits VALUES(?, ?, ?, ?, ?, ?, ?, 1, ?)", &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, commit->fragment);
        bind_u64(statement, 2, commit->version);
        bind_u64(statement, 3, commit->round);
        bind_u64(statement, 4, store->epoch);
        sqlite3_bind_int64(statement, 5, dl_wall_ns());
        bind_hex(statement, 6, written->hash);
        bind_text(statement, 7, written->file);
        sqlite3_bind_int(statement, 8, commit->recovered ? 1 : 0);
        rc = run(store, statement, "writing the commit", err);
    }
    return rc;
}

static enum dl_rc commit_one(struct sy_store *store, const struct sy_store_commit *commit,
                             const struct sy_store_written *written, struct dl_err *err)
{
    enum dl_rc rc = drop_replaced(store, commit, err);
    if (rc == DL_OK) {
        rc = write_commit(store, commit, written, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_db_drop_old(store, commit->fragment, err);
    }
    if (rc == DL_OK) {
        rc = write_participants(store, commit, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_members_write(store, commit->members, commit->member_count, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_ledger_count(store, commit, err);
    }
    return rc;
}

static enum dl_rc commit_in_transaction(struct sy_store *store, const struct sy_store_commit *commits,
                                        const struct sy_store_written *written, uint32_t count, struct dl_err *err)
{
    enum dl_rc rc = sy_store_db_check_epoch(store, err);
    if (rc == DL_OK && !store->layout_is_durable && store->has_layout) {
        rc = write_layout(store, err);
    }
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        rc = commit_one(store, &commits[i], &written[i], err);
    }
    if (rc == DL_OK) {
        rc = sy_store_totals_write(store, &commits[count - 1].totals, err);
    }
    if (rc == DL_OK) {
        rc = write_events(store, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_trace_write(store, err);
    }
    return rc;
}

enum dl_rc sy_store_db_commit(struct sy_store *store, const struct sy_store_commit *commits,
                              const struct sy_store_written *written, uint32_t count, struct dl_err *err)
{
    store->dropped_count = 0;
    enum dl_rc rc = exec(store, "BEGIN IMMEDIATE", "starting a transaction", err);
    if (rc == DL_OK) {
        rc = sy_store_db_end(store, commit_in_transaction(store, commits, written, count, err), err);
    }
    if (rc == DL_OK) {
        store->layout_is_durable = store->has_layout;
        store->totals = commits[count - 1].totals;
        forget_written_events(store);
    }
    sy_store_trace_end(store, rc == DL_OK);
    return rc;
}

static enum dl_rc save_in_transaction(struct sy_store *store, const struct sy_store_totals *totals,
                                      const struct sy_store_member *members, uint32_t count, struct dl_err *err)
{
    enum dl_rc rc = sy_store_db_check_epoch(store, err);
    if (rc == DL_OK && totals != NULL) {
        rc = sy_store_totals_write(store, totals, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_members_write(store, members, count, err);
    }
    if (rc == DL_OK) {
        rc = write_events(store, err);
    }
    if (rc == DL_OK) {
        rc = sy_store_trace_write(store, err);
    }
    return rc;
}

enum dl_rc sy_store_db_save(struct sy_store *store, const struct sy_store_totals *totals,
                            const struct sy_store_member *members, uint32_t count, struct dl_err *err)
{
    enum dl_rc rc = exec(store, "BEGIN IMMEDIATE", "starting a transaction", err);
    if (rc == DL_OK) {
        rc = sy_store_db_end(store, save_in_transaction(store, totals, members, count, err), err);
    }
    if (rc == DL_OK) {
        store->totals = totals != NULL ? *totals : store->totals;
        forget_written_events(store);
    }
    sy_store_trace_end(store, rc == DL_OK);
    return rc;
}

enum dl_rc sy_store_db_version(struct sy_store *store, uint32_t fragment, uint32_t skip, struct sy_store_version *out,
                               char file[SY_STORE_FILE_MAX], struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc =
        prepare(store,
                "SELECT version, round, hash, CASE kept WHEN 1 THEN file ELSE '' END,"
                " (SELECT count(*) FROM participants p WHERE p.fragment = c.fragment AND p.version = c.version)"
                " FROM commits c WHERE fragment = ? ORDER BY version DESC LIMIT 1 OFFSET ?",
                &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    bind_u64(statement, 1, fragment);
    bind_u64(statement, 2, skip);
    int code = sqlite3_step(statement);
    if (code == SQLITE_DONE) {
        return dl_err_set(err, DL_ENOTFOUND, "fragment %" PRIu32 " has no committed version", fragment);
    }
    if (code != SQLITE_ROW) {
        return db_fail(store, "reading a commit", err);
    }
    *out = (struct sy_store_version){.version = column_u64(statement, 0),
                                     .round = column_u64(statement, 1),
                                     .hash = column_hex(statement, 2),
                                     .participants = (uint32_t)sqlite3_column_int(statement, 4)};
    snprintf(file, SY_STORE_FILE_MAX, "%s", (const char *)sqlite3_column_text(statement, 3));
    return DL_OK;
}

bool sy_store_db_names(struct sy_store *store, const char *file)
{
    AUTO_STATEMENT *statement = NULL;
    struct dl_err err;
    if (prepare(store, "SELECT 1 FROM commits WHERE file = ? AND kept = 1", &statement, &err) != DL_OK) {
        return true; /* In doubt a file stays. */
    }
    bind_text(statement, 1, file);
    return sqlite3_step(statement) != SQLITE_DONE;
}
