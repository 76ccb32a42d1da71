/* Small helpers around SQLite, for the files of this folder that write or read tape.db. */
#ifndef SY_STORE_SQL_H
#define SY_STORE_SQL_H

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "syncer/store/internal.h"

#define HEX_MAX 17

static inline enum dl_rc db_fail(struct sy_store *store, const char *what, struct dl_err *err)
{
    int code = sqlite3_errcode(store->db);
    enum dl_rc rc = DL_EIO;
    if ((code & 0xff) == SQLITE_FULL) {
        rc = DL_EFULL;
    } else if ((code & 0xff) == SQLITE_CORRUPT || (code & 0xff) == SQLITE_NOTADB) {
        rc = DL_ECORRUPT;
    } else if ((code & 0xff) == SQLITE_NOMEM) {
        rc = DL_ENOMEM;
    }
    const char *hint = (code & 0xff) == SQLITE_BUSY ? " (another syncer uses this folder, and stands still)" : "";
    return dl_err_set(err, rc, "%s in %s/tape.db: %s%s", what, store->dir, sqlite3_errmsg(store->db), hint);
}

static inline enum dl_rc exec(struct sy_store *store, const char *sql, const char *what, struct dl_err *err)
{
    return sqlite3_exec(store->db, sql, NULL, NULL, NULL) == SQLITE_OK ? DL_OK : db_fail(store, what, err);
}

static inline void finalize(sqlite3_stmt **statement)
{
    sqlite3_finalize(*statement);
}
#define AUTO_STATEMENT __attribute__((cleanup(finalize))) sqlite3_stmt

static inline void bind_u64(sqlite3_stmt *statement, int index, uint64_t value)
{
    /* Counters stay far below 2^63; hashes, which do not, are stored as text. */
    sqlite3_bind_int64(statement, index, (sqlite3_int64)value);
}

static inline void bind_hex(sqlite3_stmt *statement, int index, uint64_t value)
{
    char text[HEX_MAX];
    snprintf(text, sizeof text, "%016" PRIx64, value);
    sqlite3_bind_text(statement, index, text, -1, SQLITE_TRANSIENT);
}

static inline void bind_text(sqlite3_stmt *statement, int index, const char *text)
{
    sqlite3_bind_text(statement, index, text, -1, SQLITE_TRANSIENT);
}

static inline uint64_t column_hex(sqlite3_stmt *statement, int column)
{
    const char *text = (const char *)sqlite3_column_text(statement, column);
    return text == NULL ? 0 : strtoull(text, NULL, 16);
}

static inline uint64_t column_u64(sqlite3_stmt *statement, int column)
{
    return (uint64_t)sqlite3_column_int64(statement, column);
}

static inline enum dl_rc prepare(struct sy_store *store, const char *sql, sqlite3_stmt **out, struct dl_err *err)
{
    return sqlite3_prepare_v2(store->db, sql, -1, out, NULL) == SQLITE_OK ? DL_OK
                                                                          : db_fail(store, "preparing a query", err);
}

/* Runs a statement that returns no rows, and makes it ready for the next binding. */
static inline enum dl_rc run(struct sy_store *store, sqlite3_stmt *statement, const char *what, struct dl_err *err)
{
    int code = sqlite3_step(statement);
    enum dl_rc rc = code == SQLITE_DONE ? DL_OK : db_fail(store, what, err);
    sqlite3_reset(statement);
    return rc;
}

#endif
