/* sim_record, one tape: rows to structs. */
#include "sim/replay/record_db.h"

#include <assert.h>
#include <inttypes.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"
#include "syncer/store/store.h"

struct tape {
    struct sim_record *record;
    const char *folder;
    sqlite3 *db;
    uint32_t shard;
    uint32_t *incarnations; /* Of the record, by the tape's id. */
    uint64_t incarnation_rows;
};

static void finalize(sqlite3_stmt **statement)
{
    sqlite3_finalize(*statement);
}
#define AUTO_STATEMENT __attribute__((cleanup(finalize))) sqlite3_stmt

static enum dl_rc fail(const struct tape *tape, const char *what, struct dl_err *err)
{
    return dl_err_set(err, DL_EIO, "reading %s of %s/tape.db: %s", what, tape->folder, sqlite3_errmsg(tape->db));
}

static enum dl_rc no_memory(const struct tape *tape, struct dl_err *err)
{
    return dl_err_set(err, DL_ENOMEM, "reading %s/tape.db: no memory", tape->folder);
}

static enum dl_rc query(const struct tape *tape, const char *sql, sqlite3_stmt **out, struct dl_err *err)
{
    return sqlite3_prepare_v2(tape->db, sql, -1, out, NULL) == SQLITE_OK ? DL_OK : fail(tape, "a table", err);
}

static uint64_t u64(sqlite3_stmt *row, int column)
{
    return (uint64_t)sqlite3_column_int64(row, column);
}
static uint32_t u32(sqlite3_stmt *row, int column)
{
    return (uint32_t)sqlite3_column_int64(row, column);
}
static const char *text(sqlite3_stmt *row, int column)
{
    const char *value = (const char *)sqlite3_column_text(row, column);
    return value == NULL ? "" : value;
}
static uint64_t hex(sqlite3_stmt *row, int column)
{
    return strtoull(text(row, column), NULL, 16);
}

void *sim_record_grow(void **array, uint32_t *count, size_t size)
{
    if ((*count & (*count - 1)) == 0) { /* Full at every power of two. */
        uint32_t capacity = *count == 0 ? 1 : 2 * *count;
        void *grown = realloc(*array, capacity * size);
        if (grown == NULL) {
            return NULL;
        }
        *array = grown;
    }
    void *at = (uint8_t *)*array + *count * size;
    memset(at, 0, size);
    (*count)++;
    return at;
}

/* --- job, shard, layout --- */

static enum dl_rc read_meta(struct tape *tape, struct dl_err *err)
{
    AUTO_STATEMENT *row = NULL;
    enum dl_rc rc = query(tape,
                          "SELECT (SELECT value FROM meta WHERE key = 'schema'),"
                          " (SELECT value FROM meta WHERE key = 'shard')",
                          &row, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (sqlite3_step(row) != SQLITE_ROW) {
        return fail(tape, "meta", err);
    }
    if (sqlite3_column_int(row, 0) != SY_STORE_SCHEMA) {
        return dl_err_set(err, DL_EINVAL, "%s/tape.db has schema %s, this program reads %d", tape->folder, text(row, 0),
                          SY_STORE_SCHEMA);
    }
    tape->shard = u32(row, 1);
    return DL_OK;
}

static enum dl_rc read_specs(struct tape *tape, struct dl_err *err)
{
    struct sim_record *record = tape->record;
    AUTO_STATEMENT *row = NULL;
    enum dl_rc rc = query(tape, "SELECT epoch, spec FROM specs ORDER BY epoch", &row, err);
    int code = rc == DL_OK ? sqlite3_step(row) : SQLITE_DONE;
    for (; rc == DL_OK && code == SQLITE_ROW; code = sqlite3_step(row)) {
        struct sim_spec_record *spec =
            sim_record_grow((void **)&record->specs, &record->spec_count, sizeof *record->specs);
        if (spec == NULL) {
            return no_memory(tape, err);
        }
        spec->shard = tape->shard;
        spec->epoch = u64(row, 0);
        spec->hash = dl_hash64(text(row, 1), strlen(text(row, 1)), 0);
        rc = dl_spec_parse(text(row, 1), strlen(text(row, 1)), "the job in the tape", &spec->spec, NULL, err);
    }
    if (rc == DL_OK && code != SQLITE_DONE) {
        rc = fail(tape, "specs", err);
    }
    if (rc == DL_OK && (record->spec_count == 0 || record->specs[record->spec_count - 1].shard != tape->shard)) {
        rc = dl_err_set(err, DL_EINVAL, "%s/tape.db does not hold the job", tape->folder);
    }
    return rc;
}

static enum dl_rc read_layout(struct tape *tape, struct dl_err *err)
{
    AUTO_STATEMENT *row = NULL;
    enum dl_rc rc = query(tape, "SELECT kind, fragments, hash, tensors FROM layout", &row, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (sqlite3_step(row) != SQLITE_ROW) {
        return dl_err_set(err, DL_ENOTFOUND, "%s/tape.db holds no committed round", tape->folder);
    }
    struct dl_tensor *tensors = NULL;
    uint32_t count = 0;
    struct dl_layout *layout = NULL;
    rc = dl_tensors_decode(sqlite3_column_blob(row, 3), (size_t)sqlite3_column_bytes(row, 3), &tensors, &count, err);
    if (rc == DL_OK) {
        rc = dl_layout_new(tensors, count, u32(row, 1), (enum dl_layout_kind)sqlite3_column_int(row, 0), &layout, err);
    }
    free(tensors);
    if (rc == DL_OK && (layout == NULL || layout->hash != hex(row, 2))) {
        rc = dl_err_set(err, DL_EINVAL, "%s/tape.db: this program cuts the same tensors into other fragments",
                        tape->folder);
    }
    struct dl_layout **ours = &tape->record->layout;
    if (rc == DL_OK && *ours != NULL && (*ours)->hash != layout->hash) {
        rc = dl_err_set(err, DL_EINVAL, "%s/tape.db is of another model than the other shards'", tape->folder);
    }
    if (rc == DL_OK && *ours == NULL) {
        *ours = dl_take(layout);
    }
    dl_layout_free(layout);
    return rc;
}

/* --- processes --- */

static uint32_t find_incarnation(const struct sim_record *record, const char *uid, uint64_t nonce)
{
    for (uint32_t i = record->incarnation_count; i-- > 0;) {
        if (record->incarnations[i].nonce == nonce && strcmp(record->incarnations[i].uid, uid) == 0) {
            return i;
        }
    }
    return SIM_NO_INCARNATION;
}

static uint32_t add_incarnation(struct sim_record *record, const char *uid, uint64_t nonce)
{
    uint32_t known = find_incarnation(record, uid, nonce);
    if (known != SIM_NO_INCARNATION) {
        return known;
    }
    struct sim_incarnation_record *who =
        sim_record_grow((void **)&record->incarnations, &record->incarnation_count, sizeof *who);
    if (who == NULL) {
        return SIM_NO_INCARNATION;
    }
    snprintf(who->uid, sizeof who->uid, "%s", uid);
    who->nonce = nonce;
    who->learner = -1;
    return record->incarnation_count - 1;
}

static enum dl_rc read_incarnations(struct tape *tape, struct dl_err *err)
{
    AUTO_STATEMENT *row = NULL;
    enum dl_rc rc = query(tape,
                          "SELECT id, uid, nonce, coalesce(learner, -1), trainer,"
                          " (SELECT max(id) FROM incarnations) FROM incarnations ORDER BY id",
                          &row, err);
    int code = rc == DL_OK ? sqlite3_step(row) : SQLITE_DONE;
    for (; rc == DL_OK && code == SQLITE_ROW; code = sqlite3_step(row)) {
        if (tape->incarnations == NULL) {
            tape->incarnation_rows = u64(row, 5) + 1;
            tape->incarnations = calloc(tape->incarnation_rows, sizeof *tape->incarnations);
        }
        uint32_t place = add_incarnation(tape->record, text(row, 1), hex(row, 2));
        if (tape->incarnations == NULL || place == SIM_NO_INCARNATION) {
            return no_memory(tape, err);
        }
        tape->incarnations[u64(row, 0)] = place;
        struct sim_incarnation_record *who = &tape->record->incarnations[place];
        if (sqlite3_column_int64(row, 3) >= 0) {
            who->learner = sqlite3_column_int64(row, 3);
            snprintf(who->trainer, sizeof who->trainer, "%s", text(row, 4));
        }
    }
    return rc == DL_OK && code != SQLITE_DONE ? fail(tape, "incarnations", err) : rc;
}

/* Every shard has them; what one lacks at the end, another may have. */
static enum dl_rc read_entries(struct tape *tape, struct dl_err *err)
{
    AUTO_STATEMENT *row = NULL;
    enum dl_rc rc = query(tape,
                          "SELECT incarnation, seq, step, kind, coalesce(fragment, 4294967295), a, b, c, text"
                          " FROM trace ORDER BY incarnation, seq",
                          &row, err);
    int code = rc == DL_OK ? sqlite3_step(row) : SQLITE_DONE;
    for (; rc == DL_OK && code == SQLITE_ROW; code = sqlite3_step(row)) {
        if (u64(row, 0) >= tape->incarnation_rows) {
            return dl_err_set(err, DL_ECORRUPT, "%s/tape.db: an entry is of nobody", tape->folder);
        }
        struct sim_incarnation_record *who = &tape->record->incarnations[tape->incarnations[u64(row, 0)]];
        if (who->count > 0 && who->entries[who->count - 1].seq >= u64(row, 1)) {
            continue; /* Another shard's tape had it. */
        }
        struct sim_entry *entry = sim_record_grow((void **)&who->entries, &who->count, sizeof *entry);
        if (entry == NULL) {
            return no_memory(tape, err);
        }
        *entry = (struct sim_entry){.seq = u64(row, 1),
                                    .step = u64(row, 2),
                                    .fragment = u32(row, 4),
                                    .a = u64(row, 5),
                                    .b = u64(row, 6),
                                    .c = u64(row, 7),
                                    .commit = SIM_NO_ENTRY,
                                    .push = SIM_NO_ENTRY};
        snprintf(entry->kind, sizeof entry->kind, "%s", text(row, 3));
        entry->text = text(row, 8)[0] == 0 ? NULL : strdup(text(row, 8));
    }
    return rc == DL_OK && code != SQLITE_DONE ? fail(tape, "trace", err) : rc;
}

/* --- versions --- */

static enum dl_rc read_pushes(struct tape *tape, struct sim_commit *commit, sqlite3_stmt *row, struct dl_err *err)
{
    struct sim_record *record = tape->record;
    sqlite3_reset(row);
    sqlite3_bind_int64(row, 1, commit->fragment);
    sqlite3_bind_int64(row, 2, (sqlite3_int64)commit->version);
    commit->first_push = record->push_count;
    int code = sqlite3_step(row);
    for (; code == SQLITE_ROW; code = sqlite3_step(row)) {
        struct sim_push *push = sim_record_grow((void **)&record->pushes, &record->push_count, sizeof *push);
        if (push == NULL) {
            return no_memory(tape, err);
        }
        *push = (struct sim_push){.learner = u32(row, 0),
                                  .incarnation = add_incarnation(record, text(row, 1), hex(row, 2)),
                                  .entry = SIM_NO_ENTRY,
                                  .step = u64(row, 3),
                                  .base_version = u64(row, 4),
                                  .steps = u32(row, 5),
                                  .tokens = u64(row, 6),
                                  .weight = sqlite3_column_double(row, 7),
                                  .norm = sqlite3_column_double(row, 8)};
        if (push->incarnation == SIM_NO_INCARNATION) {
            return no_memory(tape, err);
        }
        commit->push_count++;
    }
    return code == SQLITE_DONE ? DL_OK : fail(tape, "participants", err);
}

static enum dl_rc read_commits(struct tape *tape, struct dl_err *err)
{
    struct sim_record *record = tape->record;
    AUTO_STATEMENT *row = NULL, *pushes = NULL;
    enum dl_rc rc = query(tape,
                          "SELECT fragment, version, round, epoch, wall_ns, hash, CASE kept WHEN 1 THEN file ELSE ''"
                          " END, recovered FROM commits ORDER BY fragment, version",
                          &row, err);
    if (rc == DL_OK) {
        rc = query(tape,
                   "SELECT learner, uid, nonce, step, base_version, steps, tokens, weight, norm FROM participants"
                   " WHERE fragment = ? AND version = ? ORDER BY learner, admission",
                   &pushes, err);
    }
    int code = rc == DL_OK ? sqlite3_step(row) : SQLITE_DONE;
    for (; rc == DL_OK && code == SQLITE_ROW; code = sqlite3_step(row)) {
        uint32_t fragment = u32(row, 0);
        if (fragment >= record->layout->fragment_count) {
            return dl_err_set(err, DL_ECORRUPT, "%s/tape.db: there is no fragment %u", tape->folder, fragment);
        }
        struct sim_commit *commit = sim_record_grow((void **)&record->commits, &record->commit_count, sizeof *commit);
        if (commit == NULL) {
            return no_memory(tape, err);
        }
        *commit = (struct sim_commit){.shard = tape->shard,
                                      .fragment = fragment,
                                      .version = u64(row, 1),
                                      .round = u64(row, 2),
                                      .epoch = u64(row, 3),
                                      .wall_ns = sqlite3_column_int64(row, 4),
                                      .hash = hex(row, 5),
                                      .file = text(row, 6)[0] == 0 ? NULL : strdup(text(row, 6)),
                                      .recovered = sqlite3_column_int(row, 7) != 0};
        if (record->version_count[fragment]++ == 0) {
            record->first_commit[fragment] = record->commit_count - 1;
        }
        rc = read_pushes(tape, commit, pushes, err);
    }
    return rc == DL_OK && code != SQLITE_DONE ? fail(tape, "commits", err) : rc;
}

static enum dl_rc read_all(struct tape *tape, struct dl_err *err)
{
    /* One moment of a tape that may still grow. */
    if (sqlite3_exec(tape->db, "BEGIN", NULL, NULL, NULL) != SQLITE_OK) {
        return fail(tape, "the database", err);
    }
    enum dl_rc rc = read_meta(tape, err);
    if (rc == DL_OK && tape->shard >= tape->record->shards) {
        return dl_err_set(err, DL_EINVAL, "%s is shard %u, %u folders were given: give every shard's", tape->folder,
                          tape->shard, tape->record->shards);
    }
    if (rc == DL_OK && tape->record->folders[tape->shard][0] != 0) {
        return dl_err_set(err, DL_EINVAL, "%s and %s are both shard %u", tape->record->folders[tape->shard],
                          tape->folder, tape->shard);
    }
    if (rc == DL_OK) {
        snprintf(tape->record->folders[tape->shard], SIM_PATH_MAX, "%s", tape->folder);
        rc = read_specs(tape, err);
    }
    if (rc == DL_OK) {
        rc = read_layout(tape, err);
    }
    if (rc == DL_OK) {
        rc = read_incarnations(tape, err);
    }
    if (rc == DL_OK) {
        rc = read_entries(tape, err);
    }
    return rc == DL_OK ? read_commits(tape, err) : rc;
}

static enum dl_rc open_tape(struct tape *tape, struct dl_err *err)
{
    char path[SIM_PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/tape.db", tape->folder);
    if (sqlite3_open_v2(path, &tape->db, SQLITE_OPEN_READONLY, NULL) != SQLITE_OK) {
        return dl_err_set(err, DL_ENOTFOUND, "opening %s: %s", path,
                          tape->db == NULL ? "no memory" : sqlite3_errmsg(tape->db));
    }
    sqlite3_busy_timeout(tape->db, 5000);
    return DL_OK;
}

enum dl_rc sim_record_read(struct sim_record *record, const char *folder, struct dl_err *err)
{
    struct tape tape = {.record = record, .folder = folder};
    enum dl_rc rc = open_tape(&tape, err);
    if (rc == DL_OK) {
        rc = read_all(&tape, err);
    }
    sqlite3_close(tape.db);
    free(tape.incarnations);
    return rc;
}

/* --- checkpoints --- */

/* The newest of this name, or that of this number; not every shard knows the name. 0: neither. */
static enum dl_rc find_checkpoint(struct tape *tape, const char *name, uint64_t *id, struct dl_err *err)
{
    AUTO_STATEMENT *row = NULL;
    enum dl_rc rc = query(tape,
                          "SELECT max(id) FROM checkpoints"
                          " WHERE name = ?1 OR (id >> ?2) || '.' || (id & ((1 << ?2) - 1)) = ?1",
                          &row, err);
    if (rc != DL_OK) {
        return rc;
    }
    sqlite3_bind_text(row, 1, name, -1, SQLITE_STATIC);
    sqlite3_bind_int(row, 2, SY_CHECKPOINT_COUNTER_BITS);
    if (sqlite3_step(row) != SQLITE_ROW) {
        return fail(tape, "checkpoints", err);
    }
    *id = DL_MAX(*id, u64(row, 0));
    return DL_OK;
}

static enum dl_rc read_checkpoint(struct tape *tape, uint64_t id, uint64_t *versions, struct dl_err *err)
{
    AUTO_STATEMENT *row = NULL;
    enum dl_rc rc = query(tape, "SELECT fragment, version FROM checkpoint_fragments WHERE id = ?", &row, err);
    if (rc != DL_OK) {
        return rc;
    }
    sqlite3_bind_int64(row, 1, (sqlite3_int64)id);
    int code = sqlite3_step(row);
    for (; code == SQLITE_ROW; code = sqlite3_step(row)) {
        if (u32(row, 0) < tape->record->layout->fragment_count) {
            versions[u32(row, 0)] = u64(row, 1);
        }
    }
    return code == SQLITE_DONE ? DL_OK : fail(tape, "checkpoints", err);
}

enum dl_rc sim_record_checkpoint(struct sim_record *record, const char *name, uint64_t *versions, struct dl_err *err)
{
    uint64_t id = 0;
    const uint32_t shards = record->shards;
    assert(shards > 0);
    memset(versions, 0, record->layout->fragment_count * sizeof *versions);
    for (uint32_t i = 0; i < 2 * shards; i++) { /* First its number from all shards, then its versions. */
        struct tape tape = {.record = record, .folder = record->folders[i % shards]};
        enum dl_rc rc = open_tape(&tape, err);
        if (rc == DL_OK) {
            rc = i < shards ? find_checkpoint(&tape, name, &id, err) : read_checkpoint(&tape, id, versions, err);
        }
        sqlite3_close(tape.db);
        if (rc != DL_OK) {
            return rc;
        }
    }
    for (uint32_t f = 0; f < record->layout->fragment_count; f++) {
        if (sim_record_commit(record, f, versions[f]) == NULL) {
            return dl_err_set(err, DL_ENOTFOUND, "there is no checkpoint %s (fragment %u is not in it)", name, f);
        }
    }
    return DL_OK;
}
