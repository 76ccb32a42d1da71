/* What the parts of sy_store share: store.c (calls), draft.c (fragment files, written), file.c (read), db.c (SQLite), trace.c (the
 * learners' part of the tape). Not for other folders. */
#ifndef SY_STORE_INTERNAL_H
#define SY_STORE_INTERNAL_H

#include <pthread.h>
#include <sqlite3.h>

#include "syncer/store/store.h"

#define SY_STORE_DIR_MAX 1024 /* Bytes of the folder's path. */
#define SY_STORE_FILE_MAX 96  /* Bytes of a file's name. */
#define SY_STORE_PATH_MAX (SY_STORE_DIR_MAX + SY_STORE_FILE_MAX + 8)

struct sy_store_event {
    int64_t wall_ns;
    char kind[24];
    uint32_t learner;
    uint64_t admission, step;
    char uid[DL_WIRE_UID_MAX];
    char text[DL_WIRE_TEXT_MAX];
};

struct sy_store_incarnation {
    bool new;             /* What is known of it has yet to be written. */
    uint32_t connections; /* That say they are it. */
    uint32_t blocks;      /* Of its entries, waiting or being written. */
    uint32_t learner;     /* UINT32_MAX: only heard of from a peer. */
    char uid[DL_WIRE_UID_MAX], trainer[DL_WIRE_TRAINER_MAX];
    uint64_t nonce;
    uint64_t row;                          /* Its id in the database; 0: unknown. */
    uint64_t received, committing, traced; /* Positions. */
};

struct sy_store_block { /* Of one TRACE message. */
    struct sy_store_block *next;
    uint32_t owner, count;
    struct dl_trace_entry entries[];
};

struct sy_store_traces {
    uint32_t count, capacity;
    struct sy_store_incarnation *incarnations;
    struct sy_store_block *first, *last; /* Waiting for a commit. */
    uint32_t entries;                    /* In them. */
    struct sy_store_block *writing;      /* In the transaction under way. */
};

struct sy_store {
    pthread_mutex_t lock;        /* Held over a whole commit. */
    pthread_mutex_t events_lock; /* Only for the events, so that noting one never waits for the disk. */
    char dir[SY_STORE_DIR_MAX];
    char job[DL_SPEC_NAME_MAX];
    uint32_t shard;
    const struct sy_store_ops *ops;
    sqlite3 *db;
    uint64_t epoch;
    _Atomic uint64_t serial; /* Files written in this epoch. */
    struct sy_store_totals totals;
    bool has_layout, layout_is_durable;
    struct sy_store_layout layout;
    uint8_t *tensors; /* Owns layout.tensors. */
    _Atomic uint64_t bytes;
    /* More than one only after a crash between a commit and the removal; what does not fit goes at the next opening. */
    char dropped[2 * SY_STORE_COMMITS_MAX][SY_STORE_FILE_MAX];
    uint32_t dropped_count;
    /* Files of a transaction of which an I/O error leaves open whether it reached the disk: kept until another one has. */
    char doubtful[SY_STORE_COMMITS_MAX][SY_STORE_FILE_MAX];
    uint32_t doubtful_count;
    struct sy_store_traces traces; /* Under events_lock, but for `writing` and its blocks. */
    const char *spec;              /* Only while it is opened. */
    uint32_t warmup_steps;
    uint32_t event_count;
    uint32_t events_writing; /* The first so many are in the transaction under way. */
    uint64_t events_dropped;
    struct sy_store_event events[SY_STORE_EVENTS_MAX];
};

/* --- draft.c: files that are being written; see store.h for begin, append and abandon --- */

struct sy_store_written { /* A commit's file, complete and durable. */
    char file[SY_STORE_FILE_MAX];
    uint64_t hash; /* Of the parameters. */
};

/* All has been appended: writes the header. Then the file is to be synced. */
DL_MUST_CHECK enum dl_rc sy_store_draft_seal(struct sy_store_draft *draft, struct dl_err *err);
DL_MUST_CHECK enum dl_rc sy_store_draft_sync(struct sy_store_draft *draft, struct dl_err *err);
/* Releases the draft and leaves the file. */
void sy_store_draft_release(struct sy_store_draft *draft, struct sy_store_written *written);
const struct sy_store_content *sy_store_draft_content(const struct sy_store_draft *draft);
DL_MUST_CHECK enum dl_rc sy_store_sync_dir(struct sy_store *store, struct dl_err *err);

/* --- file.c --- */

#define SY_STORE_FORMAT 3
#define SY_STORE_HEADER_BYTES 128
#define SY_STORE_HASH_AT (SY_STORE_HEADER_BYTES - 8)
extern const char sy_store_magic[8];

/* A name that no file has had: the epoch in it keeps apart what a stale process writes, the serial what a repeat does. */
void sy_store_file_name(struct sy_store *store, char out[SY_STORE_FILE_MAX], uint32_t fragment, uint64_t version);
void sy_store_file_path(const struct sy_store *store, const char *name, char out[SY_STORE_PATH_MAX]);
/* What a full disk and any other error are. */
enum dl_rc sy_store_rc_of_errno(int error);
/* DL_ECORRUPT: any checksum or field is wrong, or the file is missing or short; the text names it. DL_EINVAL: it is good,
 * but of other sizes than the job asks for. */
DL_MUST_CHECK enum dl_rc sy_store_file_read(struct sy_store *store, const char *name, uint32_t fragment,
                                            uint64_t version, void *parameters, uint64_t parameters_bytes, void *state,
                                            uint64_t state_bytes, struct dl_err *err);
/* How much of the optimiser's state a file holds, as its header says. Errors as above. */
DL_MUST_CHECK enum dl_rc sy_store_file_state_bytes(struct sy_store *store, const char *name, uint32_t fragment,
                                                   uint64_t version, uint64_t parameters_bytes, uint64_t *state_bytes,
                                                   struct dl_err *err);
void sy_store_file_remove(struct sy_store *store, const char *name);
uint64_t sy_store_file_bytes(const struct sy_store *store, const char *name);

/* --- trace.c --- */

#define SY_STORE_TRACE_SCHEMA                                                                                          \
    "CREATE TABLE IF NOT EXISTS specs(epoch INTEGER PRIMARY KEY, spec TEXT NOT NULL);"                                 \
    "CREATE TABLE IF NOT EXISTS incarnations(id INTEGER PRIMARY KEY, uid TEXT NOT NULL, nonce TEXT NOT NULL,"          \
    " learner INTEGER, trainer TEXT NOT NULL, traced INTEGER NOT NULL, UNIQUE(uid, nonce));"                           \
    "CREATE TABLE IF NOT EXISTS trace(incarnation INTEGER NOT NULL, seq INTEGER NOT NULL, step INTEGER NOT NULL,"      \
    " kind TEXT NOT NULL, fragment INTEGER, a INTEGER NOT NULL, b INTEGER NOT NULL, c INTEGER NOT NULL,"               \
    " text TEXT NOT NULL, PRIMARY KEY(incarnation, seq)) WITHOUT ROWID;"

/* Keeps the job of this opening when it differs from the last one's; in the opening's transaction. */
DL_MUST_CHECK enum dl_rc sy_store_trace_spec(struct sy_store *store, struct dl_err *err);
/* Reads the newest incarnations. */
DL_MUST_CHECK enum dl_rc sy_store_trace_open(struct sy_store *store, struct dl_err *err);
/* Writes what waits, in the transaction under way; then the end of it: it is durable, or waits again. */
DL_MUST_CHECK enum dl_rc sy_store_trace_write(struct sy_store *store, struct dl_err *err);
void sy_store_trace_end(struct sy_store *store, bool durable);
void sy_store_trace_close(struct sy_store *store);

/* --- checkpoint.c */

DL_MUST_CHECK enum dl_rc sy_store_checkpoint_tables(struct sy_store *store, struct dl_err *err);

/* --- totals.c: parts of a transaction --- */

DL_MUST_CHECK enum dl_rc sy_store_totals_tables(struct sy_store *store, struct dl_err *err);
DL_MUST_CHECK enum dl_rc sy_store_totals_read(struct sy_store *store, struct dl_err *err);
DL_MUST_CHECK enum dl_rc sy_store_totals_write(struct sy_store *store, const struct sy_store_totals *totals,
                                               struct dl_err *err);
DL_MUST_CHECK enum dl_rc sy_store_members_write(struct sy_store *store, const struct sy_store_member *members,
                                                uint32_t count, struct dl_err *err);

/* --- db.c --- */

DL_MUST_CHECK enum dl_rc sy_store_db_open(struct sy_store *store, const char *vfs, struct dl_err *err);
/* Checks job and shard, raises the epoch, reads layout and totals. */
DL_MUST_CHECK enum dl_rc sy_store_db_begin_epoch(struct sy_store *store, struct dl_err *err);
/* One transaction; store->dropped then holds the files that can go. */
DL_MUST_CHECK enum dl_rc sy_store_db_commit(struct sy_store *store, const struct sy_store_commit *commits,
                                            const struct sy_store_written *written, uint32_t count, struct dl_err *err);
/* A transaction without a version: totals (when given), members, noted events. */
DL_MUST_CHECK enum dl_rc sy_store_db_save(struct sy_store *store, const struct sy_store_totals *totals,
                                          const struct sy_store_member *members, uint32_t count, struct dl_err *err);
/* Ends a transaction: commits when all went well so far, else rolls back. */
DL_MUST_CHECK enum dl_rc sy_store_db_end(struct sy_store *store, enum dl_rc rc, struct dl_err *err);
/* Within a transaction. DL_ECONFLICT: a later process has opened the store. */
DL_MUST_CHECK enum dl_rc sy_store_db_check_epoch(struct sy_store *store, struct dl_err *err);
/* The `skip`-th newest commit of a fragment; `file` gets its name ("" when no longer kept). DL_ENOTFOUND. */
DL_MUST_CHECK enum dl_rc sy_store_db_version(struct sy_store *store, uint32_t fragment, uint32_t skip,
                                             struct sy_store_version *out, char file[SY_STORE_FILE_MAX],
                                             struct dl_err *err);
/* In a transaction: what retention does not keep is no longer named, and its files are in store->dropped. */
#define SY_STORE_EVERY_FRAGMENT UINT32_MAX
DL_MUST_CHECK enum dl_rc sy_store_db_drop_old(struct sy_store *store, uint32_t fragment, struct dl_err *err);
void sy_store_remove_dropped(struct sy_store *store); /* After it. store.c */
/* Whether the database names `file` as kept. */
bool sy_store_db_names(struct sy_store *store, const char *file);

/* --- ledger.c: within a transaction ---------------------------------------------------------------------------------- */

DL_MUST_CHECK enum dl_rc sy_store_ledger_tables(struct sy_store *store, struct dl_err *err);
/* Counts what a commit's participants have seen of their leases. */
DL_MUST_CHECK enum dl_rc sy_store_ledger_count(struct sy_store *store, const struct sy_store_commit *commit,
                                               struct dl_err *err);

#endif
