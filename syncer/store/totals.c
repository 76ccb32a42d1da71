/* Counters of the job, and of the learner processes that they count: written with every commit, read at opening. */
#include <inttypes.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/store/internal.h"
#include "syncer/store/sql.h"

#define COUNTERS_MAX (DL_VERDICT_COUNT + SY_STORE_LEAVES + 8)

static const char tables[] =
    "CREATE TABLE IF NOT EXISTS totals(id INTEGER PRIMARY KEY CHECK(id = 1), next_round INTEGER NOT NULL,"
    " rounds_merged INTEGER NOT NULL, tokens INTEGER NOT NULL, tokens_merged INTEGER NOT NULL,"
    " next_admission INTEGER NOT NULL);"
    "CREATE TABLE IF NOT EXISTS counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS evaluations(which TEXT PRIMARY KEY, loss REAL NOT NULL, tokens INTEGER NOT NULL,"
    " round INTEGER NOT NULL, hash TEXT NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE IF NOT EXISTS members(uid TEXT NOT NULL, nonce TEXT NOT NULL, learner INTEGER NOT NULL,"
    " born INTEGER NOT NULL, admission INTEGER NOT NULL, step INTEGER NOT NULL, tokens INTEGER NOT NULL,"
    " merged INTEGER NOT NULL, has_left INTEGER NOT NULL, PRIMARY KEY(uid, nonce)) WITHOUT ROWID;"
    "CREATE INDEX IF NOT EXISTS members_born ON members(born);";

enum dl_rc sy_store_totals_tables(struct sy_store *store, struct dl_err *err)
{
    return exec(store, tables, "creating the tables of counters", err);
}

/* --- counters by name ------------------------------------------------------------------------------------------------ */

struct counter {
    char name[40];
    uint64_t *value;
};

static const char *const leave_names[SY_STORE_LEAVES] = {"goodbye", "preempted", "lost", "superseded", "protocol"};

static void add(struct counter *counters, uint32_t *count, const char *group, const char *name, uint64_t *value)
{
    snprintf(counters[*count].name, sizeof counters[*count].name, "%s%s", group, name);
    counters[(*count)++].value = value;
}

/* What is not a column of table totals. */
static uint32_t list(struct sy_store_totals *totals, struct counter counters[COUNTERS_MAX])
{
    uint32_t count = 0;
    add(counters, &count, "", "tokens_merged_sum", &totals->tokens_merged_sum);
    add(counters, &count, "", "step", &totals->step);
    add(counters, &count, "", "joins", &totals->joins);
    add(counters, &count, "", "refusals", &totals->refusals);
    add(counters, &count, "", "busy_ns", &totals->busy_ns);
    add(counters, &count, "", "possible_ns", &totals->possible_ns);
    for (uint32_t i = 0; i < SY_STORE_LEAVES; i++) {
        add(counters, &count, "leaves.", leave_names[i], &totals->leaves[i]);
    }
    for (uint32_t v = 0; v < DL_VERDICT_COUNT; v++) {
        add(counters, &count, "verdicts.", dl_verdict_name((enum dl_verdict)v), &totals->verdicts[v]);
    }
    return count;
}

static enum dl_rc write_counters(struct sy_store *store, const struct sy_store_totals *totals, struct dl_err *err)
{
    struct sy_store_totals now = *totals, before = store->totals;
    struct counter to[COUNTERS_MAX], from[COUNTERS_MAX];
    uint32_t count = list(&now, to);
    (void)list(&before, from);
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO counters VALUES(?, ?)", &statement, err);
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        if (*to[i].value != *from[i].value) {
            bind_text(statement, 1, to[i].name);
            bind_u64(statement, 2, *to[i].value);
            rc = run(store, statement, "writing counters", err);
        }
    }
    return rc;
}

static enum dl_rc read_counters(struct sy_store *store, struct dl_err *err)
{
    struct counter counters[COUNTERS_MAX];
    uint32_t count = list(&store->totals, counters);
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "SELECT name, value FROM counters", &statement, err);
    int code = rc == DL_OK ? sqlite3_step(statement) : SQLITE_DONE;
    for (; code == SQLITE_ROW; code = sqlite3_step(statement)) {
        for (uint32_t i = 0; i < count; i++) {
            if (strcmp(counters[i].name, (const char *)sqlite3_column_text(statement, 0)) == 0) {
                *counters[i].value = column_u64(statement, 1);
            }
        }
    }
    return rc != DL_OK || code == SQLITE_DONE ? rc : db_fail(store, "reading counters", err);
}

/* --- evaluations ----------------------------------------------------------------------------------------------------- */

static enum dl_rc write_evaluation(struct sy_store *store, const char *which, const struct sy_store_evaluation *now,
                                   const struct sy_store_evaluation *before, struct dl_err *err)
{
    if (!now->known || (before->known && before->tokens == now->tokens && before->hash == now->hash)) {
        return DL_OK;
    }
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO evaluations VALUES(?, ?, ?, ?, ?)", &statement, err);
    if (rc == DL_OK) {
        bind_text(statement, 1, which);
        sqlite3_bind_double(statement, 2, now->loss);
        bind_u64(statement, 3, now->tokens);
        bind_u64(statement, 4, now->round);
        bind_hex(statement, 5, now->hash);
        rc = run(store, statement, "writing an evaluation", err);
    }
    return rc;
}

static enum dl_rc read_evaluations(struct sy_store *store, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc =
        prepare(store, "SELECT which = 'first', loss, tokens, round, hash FROM evaluations", &statement, err);
    int code = rc == DL_OK ? sqlite3_step(statement) : SQLITE_DONE;
    for (; code == SQLITE_ROW; code = sqlite3_step(statement)) {
        struct sy_store_evaluation *to =
            sqlite3_column_int(statement, 0) != 0 ? &store->totals.first_evaluation : &store->totals.last_evaluation;
        *to = (struct sy_store_evaluation){.known = true,
                                           .loss = sqlite3_column_double(statement, 1),
                                           .tokens = column_u64(statement, 2),
                                           .round = column_u64(statement, 3),
                                           .hash = column_hex(statement, 4)};
    }
    return rc != DL_OK || code == SQLITE_DONE ? rc : db_fail(store, "reading evaluations", err);
}

/* --- totals ---------------------------------------------------------------------------------------------------------- */

enum dl_rc sy_store_totals_write(struct sy_store *store, const struct sy_store_totals *totals, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO totals VALUES(1, ?, ?, ?, ?, ?)", &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, totals->next_round);
        bind_u64(statement, 2, totals->rounds_merged);
        bind_u64(statement, 3, totals->tokens);
        bind_u64(statement, 4, totals->tokens_merged);
        bind_u64(statement, 5, totals->next_admission);
        rc = run(store, statement, "writing totals", err);
    }
    if (rc == DL_OK) {
        rc = write_counters(store, totals, err);
    }
    if (rc == DL_OK) {
        rc = write_evaluation(store, "first", &totals->first_evaluation, &store->totals.first_evaluation, err);
    }
    if (rc == DL_OK) {
        rc = write_evaluation(store, "last", &totals->last_evaluation, &store->totals.last_evaluation, err);
    }
    return rc;
}

enum dl_rc sy_store_totals_read(struct sy_store *store, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(
        store, "SELECT next_round, rounds_merged, tokens, tokens_merged, next_admission FROM totals", &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    int code = sqlite3_step(statement);
    if (code == SQLITE_ROW) {
        store->totals = (struct sy_store_totals){.next_round = column_u64(statement, 0),
                                                 .rounds_merged = column_u64(statement, 1),
                                                 .tokens = column_u64(statement, 2),
                                                 .tokens_merged = column_u64(statement, 3),
                                                 .next_admission = column_u64(statement, 4)};
    } else if (code != SQLITE_DONE) {
        return db_fail(store, "reading totals", err);
    }
    uint64_t first = (store->epoch - 1) * SY_STORE_ADMISSIONS_PER_EPOCH + 1;
    store->totals.next_admission = DL_MAX(store->totals.next_admission, first);
    rc = read_counters(store, err);
    return rc == DL_OK ? read_evaluations(store, err) : rc;
}

/* --- members --------------------------------------------------------------------------------------------------------- */

/* Old incarnations are of no use to anybody; participants and events tell of them for good. */
static enum dl_rc prune(struct sy_store *store, struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "DELETE FROM members WHERE born <="
                            " (SELECT born FROM members ORDER BY born DESC LIMIT 1 OFFSET ?)",
                            &statement, err);
    if (rc == DL_OK) {
        bind_u64(statement, 1, SY_STORE_MEMBERS_MAX);
        rc = run(store, statement, "forgetting old members", err);
    }
    return rc;
}

enum dl_rc sy_store_members_write(struct sy_store *store, const struct sy_store_member *members, uint32_t count,
                                  struct dl_err *err)
{
    if (count == 0) {
        return DL_OK;
    }
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store, "INSERT OR REPLACE INTO members VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?)", &statement, err);
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        const struct sy_store_member *member = &members[i];
        bind_text(statement, 1, member->uid);
        bind_hex(statement, 2, member->nonce);
        bind_u64(statement, 3, member->learner);
        bind_u64(statement, 4, member->born);
        bind_u64(statement, 5, member->admission);
        bind_u64(statement, 6, member->step);
        bind_u64(statement, 7, member->tokens);
        bind_u64(statement, 8, member->pushes_merged);
        sqlite3_bind_int(statement, 9, member->has_left ? 1 : 0);
        rc = run(store, statement, "writing members", err);
    }
    return rc == DL_OK ? prune(store, err) : rc;
}

static enum dl_rc read_members(struct sy_store *store, struct sy_store_member *members, uint32_t most, uint32_t *count,
                               struct dl_err *err)
{
    AUTO_STATEMENT *statement = NULL;
    enum dl_rc rc = prepare(store,
                            "SELECT uid, nonce, learner, born, admission, step, tokens, merged, has_left FROM members"
                            " ORDER BY born DESC LIMIT ?",
                            &statement, err);
    if (rc != DL_OK) {
        return rc;
    }
    bind_u64(statement, 1, most);
    int code = sqlite3_step(statement);
    for (; code == SQLITE_ROW && *count < most; code = sqlite3_step(statement)) {
        struct sy_store_member *member = &members[(*count)++];
        *member = (struct sy_store_member){.nonce = column_hex(statement, 1),
                                           .learner = (uint32_t)column_u64(statement, 2),
                                           .born = column_u64(statement, 3),
                                           .admission = column_u64(statement, 4),
                                           .step = column_u64(statement, 5),
                                           .tokens = column_u64(statement, 6),
                                           .pushes_merged = column_u64(statement, 7),
                                           .has_left = sqlite3_column_int(statement, 8) != 0};
        snprintf(member->uid, sizeof member->uid, "%s", (const char *)sqlite3_column_text(statement, 0));
    }
    return code == SQLITE_DONE || code == SQLITE_ROW ? DL_OK : db_fail(store, "reading members", err);
}

enum dl_rc sy_store_members(struct sy_store *store, struct sy_store_member *members, uint32_t most, uint32_t *count,
                            struct dl_err *err)
{
    *count = 0;
    pthread_mutex_lock(&store->lock);
    enum dl_rc rc = read_members(store, members, most, count, err);
    pthread_mutex_unlock(&store->lock);
    return rc;
}
