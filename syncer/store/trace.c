/* sy_store, the learners' part of the tape. Entries come from the network thread at any time and wait in memory; the next
 * commit takes all that wait into its transaction, so that what a merged push depends on is there when the merge is. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/store/internal.h"
#include "syncer/store/sql.h"

#define OPEN_ROWS_MAX (SY_STORE_INCARNATIONS_MAX / 4) /* Incarnations that are remembered over a restart. */

/* --- incarnations --- */

static bool gives_way(const struct sy_store_incarnation *who)
{
    return who->connections == 0 && !who->new && who->blocks == 0 && who->received == who->traced;
}

/* Room for one more; the caller holds the lock. */
static uint32_t free_place(struct sy_store_traces *traces)
{
    if (traces->count < SY_STORE_INCARNATIONS_MAX) {
        if (traces->count == traces->capacity) {
            uint32_t capacity = DL_MAX(2 * traces->capacity, 64u);
            struct sy_store_incarnation *grown = realloc(traces->incarnations, capacity * sizeof *grown);
            if (grown == NULL) {
                return SY_STORE_NO_INCARNATION;
            }
            traces->incarnations = grown;
            traces->capacity = capacity;
        }
        return traces->count++;
    }
    for (uint32_t i = 0; i < traces->count; i++) {
        if (gives_way(&traces->incarnations[i])) {
            return i;
        }
    }
    return SY_STORE_NO_INCARNATION;
}

static uint32_t find_or_add(struct sy_store_traces *traces, const char *uid, uint64_t nonce)
{
    for (uint32_t i = traces->count; i-- > 0;) {
        const struct sy_store_incarnation *who = &traces->incarnations[i];
        if (who->nonce == nonce && strcmp(who->uid, uid) == 0) {
            return i;
        }
    }
    uint32_t place = free_place(traces);
    if (place != SY_STORE_NO_INCARNATION) {
        struct sy_store_incarnation *who = &traces->incarnations[place];
        *who = (struct sy_store_incarnation){.new = true, .learner = UINT32_MAX, .nonce = nonce};
        snprintf(who->uid, sizeof who->uid, "%s", uid);
    }
    return place;
}

uint32_t sy_store_incarnation(struct sy_store *store, const char *uid, uint64_t nonce, uint32_t learner,
                              const char *trainer, uint64_t *traced)
{
    *traced = 0;
    pthread_mutex_lock(&store->events_lock);
    uint32_t place = find_or_add(&store->traces, uid, nonce);
    if (place != SY_STORE_NO_INCARNATION) {
        struct sy_store_incarnation *who = &store->traces.incarnations[place];
        who->connections++;
        who->new = who->new || who->learner != learner;
        who->learner = learner;
        snprintf(who->trainer, sizeof who->trainer, "%s", trainer);
        *traced = who->traced;
    }
    pthread_mutex_unlock(&store->events_lock);
    return place;
}

void sy_store_release(struct sy_store *store, uint32_t incarnation)
{
    if (incarnation == SY_STORE_NO_INCARNATION) {
        return;
    }
    pthread_mutex_lock(&store->events_lock);
    store->traces.incarnations[incarnation].connections--;
    pthread_mutex_unlock(&store->events_lock);
}

uint64_t sy_store_traced(struct sy_store *store, uint32_t incarnation)
{
    if (incarnation == SY_STORE_NO_INCARNATION) {
        return 0;
    }
    pthread_mutex_lock(&store->events_lock);
    uint64_t traced = store->traces.incarnations[incarnation].traced;
    pthread_mutex_unlock(&store->events_lock);
    return traced;
}

/* --- entries --- */

bool sy_store_trace(struct sy_store *store, uint32_t incarnation, const struct dl_wire_trace *trace)
{
    struct sy_store_traces *traces = &store->traces;
    bool taken = false;
    struct sy_store_block *block = malloc(sizeof *block + trace->count * sizeof block->entries[0]);
    pthread_mutex_lock(&store->events_lock);
    uint32_t owner = block == NULL || incarnation == SY_STORE_NO_INCARNATION
                         ? SY_STORE_NO_INCARNATION
                         : find_or_add(traces, trace->uid, trace->nonce);
    if (owner != SY_STORE_NO_INCARNATION && traces->entries + trace->count <= SY_STORE_TRACE_MAX) {
        struct sy_store_incarnation *who = &traces->incarnations[incarnation];
        uint64_t end = trace->position + trace->count - 1;
        taken = true;
        if (end > who->received) { /* An entry that is here already is written once. */
            block->next = NULL;
            block->owner = owner;
            block->count = trace->count;
            memcpy(block->entries, trace->entries, trace->count * sizeof block->entries[0]);
            *(traces->first == NULL ? &traces->first : &traces->last->next) = block;
            traces->last = block;
            traces->entries += block->count;
            traces->incarnations[owner].blocks++;
            who->received = end;
            block = NULL;
        }
    }
    pthread_mutex_unlock(&store->events_lock);
    free(block);
    return taken;
}

/* --- writing --- */

static enum dl_rc write_incarnation(struct sy_store *store, sqlite3_stmt *statement,
                                    const struct sy_store_incarnation *who, uint64_t *row, struct dl_err *err)
{
    sqlite3_bind_text(statement, 1, who->uid, -1, SQLITE_TRANSIENT);
    bind_hex(statement, 2, who->nonce);
    if (who->learner == UINT32_MAX) {
        sqlite3_bind_null(statement, 3);
    } else {
        sqlite3_bind_int64(statement, 3, who->learner);
    }
    sqlite3_bind_text(statement, 4, who->trainer, -1, SQLITE_TRANSIENT);
    sqlite3_bind_int64(statement, 5, (sqlite3_int64)who->committing);
    int code = sqlite3_step(statement);
    if (code == SQLITE_ROW) {
        *row = (uint64_t)sqlite3_column_int64(statement, 0);
        code = sqlite3_step(statement);
    }
    enum dl_rc rc = code == SQLITE_DONE ? DL_OK : db_fail(store, "writing an incarnation", err);
    sqlite3_reset(statement);
    return rc;
}

/* The next one from `i` on that is new, or whose position has moved, copied out: the table may be moved meanwhile.
 * `count`: none. */
static uint32_t next_changed(struct sy_store *store, uint32_t i, uint32_t count, struct sy_store_incarnation *out)
{
    pthread_mutex_lock(&store->events_lock);
    for (; i < count; i++) {
        const struct sy_store_incarnation *who = &store->traces.incarnations[i];
        if (who->new || who->row == 0 || who->committing != who->traced) {
            *out = *who;
            break;
        }
    }
    pthread_mutex_unlock(&store->events_lock);
    return i;
}

static enum dl_rc write_incarnations(struct sy_store *store, uint32_t count, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "INSERT INTO incarnations(uid, nonce, learner, trainer, traced)"
                            " VALUES(?, ?, ?, ?, ?) ON CONFLICT(uid, nonce) DO UPDATE SET"
                            " learner = coalesce(excluded.learner, learner),"
                            " trainer = CASE excluded.trainer WHEN '' THEN trainer ELSE excluded.trainer END,"
                            " traced = max(traced, excluded.traced) RETURNING id",
                            &statement, err);
    struct sy_store_incarnation who;
    for (uint32_t i = next_changed(store, 0, count, &who); rc == DL_OK && i < count;
         i = next_changed(store, i + 1, count, &who)) {
        uint64_t row = who.row;
        rc = write_incarnation(store, statement, &who, &row, err);
        pthread_mutex_lock(&store->events_lock);
        store->traces.incarnations[i].row = row;
        pthread_mutex_unlock(&store->events_lock);
    }
    return rc;
}

static enum dl_rc write_block(struct sy_store *store, sqlite3_stmt *statement, const struct sy_store_block *block,
                              struct dl_err *err)
{
    pthread_mutex_lock(&store->events_lock);
    uint64_t row = store->traces.incarnations[block->owner].row;
    pthread_mutex_unlock(&store->events_lock);
    enum dl_rc rc = DL_OK;
    for (uint32_t i = 0; rc == DL_OK && i < block->count; i++) {
        const struct dl_trace_entry *entry = &block->entries[i];
        sqlite3_bind_int64(statement, 1, (sqlite3_int64)row);
        sqlite3_bind_int64(statement, 2, (sqlite3_int64)entry->seq);
        sqlite3_bind_int64(statement, 3, (sqlite3_int64)entry->step);
        sqlite3_bind_text(statement, 4, entry->kind, -1, SQLITE_STATIC);
        if (entry->fragment == DL_TRACE_NO_FRAGMENT) {
            sqlite3_bind_null(statement, 5);
        } else {
            sqlite3_bind_int64(statement, 5, entry->fragment);
        }
        sqlite3_bind_int64(statement, 6, (sqlite3_int64)entry->a);
        sqlite3_bind_int64(statement, 7, (sqlite3_int64)entry->b);
        sqlite3_bind_int64(statement, 8, (sqlite3_int64)entry->c);
        sqlite3_bind_text(statement, 9, entry->text, -1, SQLITE_STATIC);
        if (sqlite3_step(statement) != SQLITE_DONE) {
            rc = db_fail(store, "writing the tape", err);
        }
        sqlite3_reset(statement);
    }
    return rc;
}

/* Takes all that waits; what comes from now on waits for the next commit. Returns how many incarnations there are. */
static uint32_t begin(struct sy_store *store)
{
    struct sy_store_traces *traces = &store->traces;
    pthread_mutex_lock(&store->events_lock);
    traces->writing = dl_take(traces->first);
    traces->last = NULL;
    for (uint32_t i = 0; i < traces->count; i++) {
        traces->incarnations[i].committing = traces->incarnations[i].received;
    }
    uint32_t count = traces->count;
    pthread_mutex_unlock(&store->events_lock);
    return count;
}

enum dl_rc sy_store_trace_write(struct sy_store *store, struct dl_err *err)
{
    uint32_t count = begin(store);
    enum dl_rc rc = write_incarnations(store, count, err);
    if (rc != DL_OK || store->traces.writing == NULL) {
        return rc;
    }
    AUTO_STATEMENT *statement = NULL;
    rc = prepare(store, "INSERT OR IGNORE INTO trace VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", &statement, err);
    for (const struct sy_store_block *block = store->traces.writing; rc == DL_OK && block != NULL;
         block = block->next) {
        rc = write_block(store, statement, block, err);
    }
    return rc;
}

static void drop_blocks(struct sy_store_traces *traces, struct sy_store_block *block)
{
    while (block != NULL) {
        struct sy_store_block *next = block->next;
        traces->incarnations[block->owner].blocks--;
        traces->entries -= block->count;
        free(block);
        block = next;
    }
}

static void put_back(struct sy_store_traces *traces, struct sy_store_block *blocks)
{
    struct sy_store_block *end = blocks;
    while (end->next != NULL) {
        end = end->next;
    }
    end->next = traces->first;
    traces->first = blocks;
    traces->last = traces->last == NULL ? end : traces->last;
}

void sy_store_trace_end(struct sy_store *store, bool durable)
{
    struct sy_store_traces *traces = &store->traces;
    pthread_mutex_lock(&store->events_lock);
    struct sy_store_block *blocks = dl_take(traces->writing);
    for (uint32_t i = 0; i < traces->count; i++) {
        struct sy_store_incarnation *who = &traces->incarnations[i];
        if (durable) {
            who->traced = DL_MAX(who->traced, who->committing);
            who->new = who->new && who->row == 0;
        } else if (who->new) {
            who->row = 0; /* Its row went with the transaction. */
        }
    }
    if (durable) {
        drop_blocks(traces, blocks);
    } else if (blocks != NULL) {
        put_back(traces, blocks);
    }
    pthread_mutex_unlock(&store->events_lock);
}

/* --- opening, closing --- */

enum dl_rc sy_store_trace_spec(struct sy_store *store, struct dl_err *err)
{
    if (store->spec == NULL) {
        return DL_OK;
    }
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "INSERT INTO specs SELECT ?1, ?2 WHERE ?2 IS NOT"
                            " (SELECT spec FROM specs ORDER BY epoch DESC LIMIT 1)",
                            &statement, err);
    if (rc == DL_OK) {
        sqlite3_bind_int64(statement, 1, (sqlite3_int64)store->epoch);
        sqlite3_bind_text(statement, 2, store->spec, -1, SQLITE_STATIC);
        rc = sqlite3_step(statement) == SQLITE_DONE ? DL_OK : db_fail(store, "keeping the job", err);
    }
    return rc;
}

enum dl_rc sy_store_trace_open(struct sy_store *store, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "SELECT id, uid, nonce, coalesce(learner, 4294967295), trainer, traced"
                            " FROM incarnations ORDER BY id DESC LIMIT ?",
                            &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    sqlite3_bind_int(statement, 1, OPEN_ROWS_MAX);
    int code = sqlite3_step(statement);
    for (; code == SQLITE_ROW; code = sqlite3_step(statement)) {
        uint64_t nonce = strtoull((const char *)sqlite3_column_text(statement, 2), NULL, 16);
        uint32_t place = find_or_add(&store->traces, (const char *)sqlite3_column_text(statement, 1), nonce);
        if (place == SY_STORE_NO_INCARNATION) {
            return dl_err_set(err, DL_ENOMEM, "reading the incarnations: no memory");
        }
        struct sy_store_incarnation *who = &store->traces.incarnations[place];
        who->new = false;
        who->row = (uint64_t)sqlite3_column_int64(statement, 0);
        who->learner = (uint32_t)sqlite3_column_int64(statement, 3);
        snprintf(who->trainer, sizeof who->trainer, "%s", (const char *)sqlite3_column_text(statement, 4));
        who->received = who->committing = who->traced = (uint64_t)sqlite3_column_int64(statement, 5);
    }
    return code == SQLITE_DONE ? DL_OK : db_fail(store, "reading the incarnations", err);
}

void sy_store_trace_close(struct sy_store *store)
{
    struct sy_store_traces *traces = &store->traces;
    drop_blocks(traces, dl_take(traces->first));
    drop_blocks(traces, dl_take(traces->writing));
    free(traces->incarnations);
}
