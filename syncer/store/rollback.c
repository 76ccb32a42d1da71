/* Rolling back to a checkpoint: its versions live on under new numbers, and what was counted since counts no longer. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "syncer/store/internal.h"
#include "syncer/store/sql.h"

struct pinned { /* A version of the checkpoint, in memory. */
    uint64_t version, round;
    char file[SY_STORE_FILE_MAX];
    uint8_t *parameters, *state;
    uint64_t parameters_bytes, state_bytes;
};

static void release(struct pinned *pinned)
{
    free(dl_take(pinned->parameters));
    free(dl_take(pinned->state));
}
#define AUTO_PINNED __attribute__((cleanup(release))) struct pinned

/* --- the versions ------------------------------------------------------------------------------------------------- */

static enum dl_rc look_up(struct sy_store *store, uint64_t id, uint32_t fragment, struct pinned *out,
                          struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "SELECT c.version, c.round, c.file FROM checkpoint_fragments p JOIN commits c"
                            " ON c.fragment = p.fragment AND c.version = p.version AND c.kept = 1"
                            " WHERE p.id = ? AND p.fragment = ?",
                            &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    bind_u64(statement, 1, id);
    bind_u64(statement, 2, fragment);
    if (sqlite3_step(statement) != SQLITE_ROW) {
        return dl_err_set(err, DL_ENOTFOUND, "%s: the checkpoint has no version of fragment %" PRIu32, store->dir,
                          fragment);
    }
    *out = (struct pinned){.version = column_u64(statement, 0), .round = column_u64(statement, 1)};
    snprintf(out->file, sizeof out->file, "%s", (const char *)sqlite3_column_text(statement, 2));
    return DL_OK;
}

static enum dl_rc read_pinned(struct sy_store *store, uint64_t id, const struct dl_layout *layout, uint32_t fragment,
                              struct pinned *out, struct dl_err *err)
{
    enum dl_rc rc = look_up(store, id, fragment, out, err);
    if (rc != DL_OK) {
        return rc;
    }
    out->parameters_bytes = layout->fragments[fragment].padded_elements * sizeof(float);
    rc = sy_store_file_state_bytes(store, out->file, fragment, out->version, out->parameters_bytes, &out->state_bytes,
                                   err);
    if (rc != DL_OK) {
        return rc;
    }
    out->parameters = dl_alloc_aligned(out->parameters_bytes);
    out->state = dl_alloc_aligned(DL_MAX(out->state_bytes, UINT64_C(1)));
    if (out->parameters == NULL || out->state == NULL) {
        return dl_err_set(err, DL_ENOMEM, "rolling back: no memory for fragment %" PRIu32, fragment);
    }
    return sy_store_file_read(store, out->file, fragment, out->version, out->parameters, out->parameters_bytes,
                              out->state, out->state_bytes, err);
}

enum dl_rc sy_store_check_checkpoint(struct sy_store *store, uint64_t id, const struct dl_layout *layout,
                                     uint32_t shards, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    pthread_mutex_lock(&store->lock);
    for (uint32_t p = store->shard; rc == DL_OK && p < layout->fragment_count; p += shards) {
        AUTO_PINNED pinned = {0};
        rc = read_pinned(store, id, layout, p, &pinned, err);
    }
    pthread_mutex_unlock(&store->lock);
    return rc;
}

static enum dl_rc revive(struct sy_store *store, uint64_t id, const struct dl_layout *layout, uint32_t fragment,
                         struct dl_err *err)
{
    AUTO_PINNED pinned = {0};
    struct sy_store_version newest = {0};
    char file[SY_STORE_FILE_MAX];
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = read_pinned(store, id, layout, fragment, &pinned, err);
    rc = rc == DL_OK ? sy_store_db_version(store, fragment, 0, &newest, file, err) : rc;
    pthread_mutex_unlock(&store->lock);
    if (rc != DL_OK || newest.version == pinned.version) {
        return rc; /* Nothing has come after it. */
    }
    const struct sy_store_commit again = {.fragment = fragment,
                                          .version = newest.version + 1,
                                          .round = pinned.round,
                                          .parameters = pinned.parameters,
                                          .parameters_bytes = pinned.parameters_bytes,
                                          .state = pinned.state,
                                          .state_bytes = pinned.state_bytes,
                                          .totals = store->totals,
                                          .recovered = true};
    rc = sy_store_commit(store, &again, 1, err);
    sy_store_tidy(store);
    return rc;
}

/* --- what survives -------------------------------------------------------------------------------------------------- */

static enum dl_rc add_stretch(struct sy_store *store, uint32_t fragment, uint64_t low, uint64_t high,
                              struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT INTO temp.surviving VALUES(?, ?, ?)", &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, fragment);
        bind_u64(statement, 2, low);
        bind_u64(statement, 3, high);
        rc = run(store, statement, "noting what survives", err);
    }
    return rc;
}

/* The version that lives on in one made of it (file damaged, or rolled back), the nearest before; 0: there is none. `*made`: the
 * highest such up to `version`; 0: there is none. */
static enum dl_rc find_source(struct sy_store *store, uint32_t fragment, uint64_t version, uint64_t *made,
                              uint64_t *source, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    *made = *source = 0;
    enum dl_rc rc =
        prepare(store,
                "SELECT r.version, coalesce((SELECT max(o.version) FROM commits o WHERE o.fragment = r.fragment"
                " AND o.version < r.version AND o.hash = r.hash AND o.round = r.round), 0)"
                " FROM commits r WHERE r.fragment = ? AND r.version <= ? AND r.recovered = 1"
                " ORDER BY r.version DESC LIMIT 1",
                &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    bind_u64(statement, 1, fragment);
    bind_u64(statement, 2, version);
    int code = sqlite3_step(statement);
    if (code == SQLITE_ROW) {
        *made = column_u64(statement, 0);
        *source = column_u64(statement, 1);
    }
    return code == SQLITE_ROW || code == SQLITE_DONE ? DL_OK : db_fail(store, "following a version back", err);
}

/* A version's history is not all that was before it: earlier roll-backs, too, have left stretches behind. */
static enum dl_rc note_history(struct sy_store *store, uint32_t fragment, uint64_t version, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    while (rc == DL_OK && version > 0) {
        uint64_t made = 0, source = 0;
        rc = find_source(store, fragment, version, &made, &source, err);
        if (rc == DL_OK) {
            rc = add_stretch(store, fragment, DL_MAX(made, UINT64_C(1)), version, err);
        }
        version = source;
    }
    return rc;
}

static enum dl_rc note_surviving(struct sy_store *store, const struct sy_store_checkpoint *to, struct dl_err *err)
{
    enum dl_rc rc = exec(store,
                         "CREATE TEMP TABLE IF NOT EXISTS surviving(fragment INTEGER, low INTEGER, high INTEGER);"
                         "CREATE TEMP TABLE IF NOT EXISTS seen(uid TEXT, nonce TEXT, lease INTEGER, cursor INTEGER);"
                         "DELETE FROM temp.surviving; DELETE FROM temp.seen;",
                         "noting what survives", err);
    for (uint32_t i = 0; rc == DL_OK && i < to->fragment_count; i++) {
        rc = note_history(store, to->fragments[i].fragment, to->fragments[i].version, err);
    }
    if (rc == DL_OK) {
        rc =
            exec(store,
                 "INSERT INTO temp.seen SELECT uid, nonce, lease, max(cursor) FROM temp.surviving s JOIN participants p"
                 " ON p.fragment = s.fragment AND p.version BETWEEN s.low AND s.high WHERE lease > 0 GROUP BY 1, 2, 3;"
                 "CREATE INDEX IF NOT EXISTS temp.seen_by ON seen(uid, nonce, lease);",
                 "noting what survives", err);
    }
    return rc;
}

/* --- counters and the ledger -------------------------------------------------------------------------------------------- */

/* A lease that is counted in full is so by the first push that has seen beyond it, or its end; else the pushes that name it
 * say how much of it. All else of it, but what went back before, goes back: nobody holds anything any more. */
static const char ledger_sql[] =
    "CREATE TEMP TABLE IF NOT EXISTS kept(lease INTEGER PRIMARY KEY, counted INTEGER);"
    "DELETE FROM temp.kept;"
    "INSERT INTO temp.kept SELECT lease, CASE WHEN counted = count AND EXISTS(SELECT 1 FROM temp.seen s WHERE"
    " s.uid = l.uid AND s.nonce = l.nonce AND s.lease > l.lease) THEN count ELSE min(counted, coalesce((SELECT "
    "max(cursor)"
    " FROM temp.seen s WHERE s.uid = l.uid AND s.nonce = l.nonce AND s.lease = l.lease), 0)) END FROM leases l;"
    "INSERT INTO returned SELECT l.first + k.counted,"
    " CASE l.state WHEN 'returned' THEN l.counted ELSE l.count END - k.counted FROM leases l JOIN temp.kept k "
    "USING(lease)"
    " WHERE CASE l.state WHEN 'returned' THEN l.counted ELSE l.count END > k.counted;"
    "UPDATE leases SET counted = (SELECT k.counted FROM temp.kept k WHERE k.lease = leases.lease);"
    "UPDATE leases SET state = CASE WHEN counted = count THEN 'counted' ELSE 'returned' END;";

static enum dl_rc read_sums(struct sy_store *store, struct sy_store_totals *totals, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "SELECT coalesce(sum(p.tokens), 0), coalesce(max(p.step), 0) FROM temp.surviving s"
                            " JOIN participants p ON p.fragment = s.fragment AND p.version BETWEEN s.low AND s.high",
                            &statement, err);
    if (rc == DL_OK && sqlite3_step(statement) != SQLITE_ROW) {
        rc = db_fail(store, "summing what survives", err);
    }
    if (rc == DL_OK) {
        totals->tokens_merged_sum = column_u64(statement, 0);
        totals->step = column_u64(statement, 1);
    }
    return rc;
}

static enum dl_rc write_rest(struct sy_store *store, const struct sy_store_checkpoint *to, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "DELETE FROM evaluations WHERE tokens > ?", &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, to->tokens);
        rc = run(store, statement, "forgetting evaluations", err);
    }
    if (rc == DL_OK) {
        rc = exec(store,
                  "INSERT OR IGNORE INTO evaluations SELECT 'last', loss, tokens, round, hash FROM evaluations"
                  " WHERE which = 'first'; DELETE FROM members;",
                  "forgetting members", err);
    }
    AUTO_STATEMENT *event = NULL;
    if (rc == DL_OK) {
        rc = prepare(store,
                     "INSERT INTO events(epoch, wall_ns, kind, learner, admission, uid, step, text)"
                     " VALUES(?, ?, 'rolled_back', 0, 0, '', 0, ?)",
                     &event, err);
    }
    if (rc == DL_OK) {
        char text[128];
        snprintf(text, sizeof text, "to checkpoint %" PRIu64 ".%" PRIu64 " of %" PRIu64 " rounds, name %s",
                 to->id >> SY_CHECKPOINT_COUNTER_BITS, to->id & ((UINT64_C(1) << SY_CHECKPOINT_COUNTER_BITS) - 1),
                 to->rounds_merged, to->name[0] == 0 ? "-" : to->name);
        bind_u64(event, 1, store->epoch);
        sqlite3_bind_int64(event, 2, dl_wall_ns());
        bind_text(event, 3, text);
        rc = run(store, event, "noting the roll-back", err);
    }
    return rc;
}

static enum dl_rc settle(struct sy_store *store, const struct sy_store_checkpoint *to, struct dl_err *err)
{
    struct sy_store_totals totals = store->totals;
    totals.rounds_merged = to->rounds_merged;
    totals.tokens = to->tokens;
    totals.first_evaluation.known = totals.last_evaluation.known = false; /* As they are in the database. */
    enum dl_rc rc = sy_store_db_check_epoch(store, err);
    rc = rc == DL_OK ? note_surviving(store, to, err) : rc;
    rc = rc == DL_OK ? read_sums(store, &totals, err) : rc;
    if (rc == DL_OK) {
        totals.tokens_merged = totals.tokens_merged_sum / DL_MAX(to->fragment_count, 1u);
        rc = sy_store_totals_write(store, &totals, err);
    }
    if (rc == DL_OK && store->shard == 0) {
        rc = exec(store, ledger_sql, "taking data back", err);
    }
    rc = rc == DL_OK ? write_rest(store, to, err) : rc;
    if (rc == DL_OK) {
        store->totals = totals;
    }
    return rc;
}

static enum dl_rc find_checkpoint(struct sy_store *store, uint64_t id, struct sy_store_checkpoint *out,
                                  struct dl_err *err)
{
    enum { MOST = 1024 };
    DL_AUTO_FREE struct sy_store_checkpoint *all = calloc(MOST, sizeof *all);
    uint32_t count = 0;
    enum dl_rc rc = all == NULL ? dl_err_set(err, DL_ENOMEM, "rolling back: no memory")
                                : sy_store_checkpoints(store, all, MOST, &count, err);
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        if (all[i].id == id) {
            *out = all[i];
            return DL_OK;
        }
    }
    return rc == DL_OK ? dl_err_set(err, DL_ENOTFOUND, "%s has no part of the checkpoint", store->dir) : rc;
}

enum dl_rc sy_store_roll_back(struct sy_store *store, uint64_t id, const struct dl_layout *layout, uint32_t shards,
                              struct dl_err *err)
{
    DL_AUTO_FREE struct sy_store_checkpoint *to = calloc(1, sizeof *to);
    enum dl_rc rc =
        to == NULL ? dl_err_set(err, DL_ENOMEM, "rolling back: no memory") : find_checkpoint(store, id, to, err);
    for (uint32_t p = store->shard; rc == DL_OK && p < layout->fragment_count; p += shards) {
        rc = revive(store, id, layout, p, err);
    }
    if (rc == DL_OK) {
        pthread_mutex_lock(&store->lock);
        rc = exec(store, "BEGIN IMMEDIATE", "starting a transaction", err);
        rc = rc == DL_OK ? sy_store_db_end(store, settle(store, to, err), err) : rc;
        pthread_mutex_unlock(&store->lock);
    }
    return rc == DL_OK ? DL_OK : dl_err_wrap(err, "rolling back to a checkpoint");
}
