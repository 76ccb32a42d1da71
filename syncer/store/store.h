/* sy_store: durable versions of one shard's fragments, and the record of how each came about.
 *
 * A folder (`dir`) holds for each commit one file with the new parameters and optimiser state of a fragment, and one SQLite
 * database (WAL, synchronous=FULL). A commit writes new files, syncs them and the folder, and then commits one transaction
 * that names them: what the database names is complete, what it does not name never happened, and goes at the next opening.
 * No file is ever written twice. Several fragments may be committed at once, all or none: syncing is most of the cost. The
 * last SY_STORE_KEEP files of a fragment are kept, and those that a checkpoint pins.
 *
 * Opening raises the epoch, durably. Every commit checks it, so that a process that was paused cannot commit over its
 * successor (DL_ECONFLICT: end the process).
 *
 * Tables (the beginning of the event tape; hashes are 16 hex digits, 64-bit counters SQLite integers):
 *     meta(key, value)        schema, job, shard, epoch, warmup_steps
 *     epochs(epoch, opened_ns, process)                              each opening, wall clock
 *     layout(id = 1, kind, fragments, hash, tensors)                 dl_tensors_encode of the job's tensors
 *     commits(fragment, version, round, epoch, wall_ns, hash, file, kept, recovered)   hash: dl_content_hash of the parameters
 *     participants(fragment, version, learner, admission, uid, nonce, step, base_version, steps, tokens, weight, norm,
 *                  lease, cursor)
 *     leases(lease, first, count, counted, state, learner, admission, uid, nonce)     the data: each range ever leased out
 *     returned(first, count)                                          what was leased out, not counted, and given back
 *     coverage(first, count, what, lease, learner)                    a view: each position below the high-water mark
 *     coverage_faults(first, count, fault)                            a view: what is there twice, or not at all; empty
 *     totals(id = 1, next_round, rounds_merged, tokens, tokens_merged, next_admission)
 *     counters(name, value)   the other totals: step, joins, refusals, leaves.WHY, verdicts.VERDICT, tokens_merged_sum, busy_ns, ...
 *     evaluations(which, loss, tokens, round, hash)   `first` and `last`
 *     members(uid, nonce, learner, born, admission, step, tokens, merged, has_left)   the learner processes in the totals
 *     checkpoints(id, name, wall_ns, epoch, rounds_merged, tokens, complete)   and of each, by id:
 *     checkpoint_fragments(id, fragment, version)                       its cut: the versions that are pinned
 *     checkpoint_learners(id, uid, nonce, learner, step, tokens)        where the learners were
 *     checkpoint_channels(id, uid, nonce, fragment, round, base_version, tokens)   pushes that were on their way
 *     events(seq, epoch, wall_ns, kind, learner, admission, uid, step, text)   joins, leaves, ...; written with the
 *                                                                              next commit
 *     specs(epoch, spec)                    the job, as JSON, from this opening on; a row where it changed
 *     incarnations(id, uid, nonce, learner, trainer, traced)       learner processes; traced: position durable
 *     trace(incarnation, seq, step, kind, fragment, a, b, c, text) what their parameters depend on (docs/tape.md)
 *
 * Rows of commits, participants, events and trace grow with the job (some hundred bytes a round and learner); those of
 * members are pruned, those of checkpoints go when they are unpinned.
 *
 * File: a header (128 bytes, little-endian: magic "DLCSTATE", format u32, fragment u32, version u64, round u64, epoch u64,
 * parameter bytes u64, state bytes u64, dl_content_hash of both u64 u64, zeros, XXH3 of the header so far u64), parameters,
 * state. Each of the three is filled up with zeros to whole blocks of SY_STORE_BLOCK_BYTES, so that it can go to the disk past
 * the page cache. The header is written last: a file may be begun while its content is still being computed (sy_store_begin).
 * Folders of an older schema, and files of an older format, have other hashes and are refused.
 *
 * Any thread: calls are serialised inside. Shell layer: does I/O. */
#ifndef SY_STORE_STORE_H
#define SY_STORE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/wire.h"
#include "syncer/core/ledger.h"

#define SY_STORE_SCHEMA 3
#define SY_STORE_BLOCK_BYTES 4096
#define SY_STORE_COMMITS_MAX 64 /* Fragments in one commit. */
#define SY_STORE_KEEP 2         /* Versions of a fragment whose files stay. */
#define SY_STORE_LEAVES 5
#define SY_STORE_NAME_MAX 64
#define SY_STORE_MEMBERS_MAX 4096       /* Rows of members that are kept, the newest. */
#define SY_STORE_EVENTS_MAX 1024        /* Noted between two commits; more are counted, not kept. */
#define SY_STORE_INCARNATIONS_MAX 16384 /* Known at once; of those that are neither connected nor new, one gives way. */
#define SY_STORE_TRACE_MAX 65536        /* Entries of the tape between two commits. */
#define SY_CHECKPOINT_COUNTER_BITS 20   /* Of a checkpoint's id: a number in its epoch; people read EPOCH.NUMBER. */
#define SY_STORE_NO_INCARNATION UINT32_MAX
/* Admission numbers of one opening start at (epoch - 1) times this, plus 1: they grow over restarts without a write
 * each. */
#define SY_STORE_ADMISSIONS_PER_EPOCH UINT64_C(1000000)

struct sy_store;       /* Opaque. */
struct sy_store_draft; /* Opaque: the file of a version that is not committed yet. */

/* The file operations, so that a test can make each of them fail. */
struct sy_store_ops {
    int (*open)(const char *path, int flags, mode_t mode);
    ssize_t (*write)(int fd, const void *bytes, size_t size);
    ssize_t (*pwrite)(int fd, const void *bytes, size_t size, off_t offset);
    int (*write_back)(int fd, off_t offset, off_t size); /* Begins to write it to the disk; a failure means nothing. */
    ssize_t (*read)(int fd, void *bytes, size_t size);
    int (*fsync)(int fd);
    int (*unlink)(const char *path);
};
extern const struct sy_store_ops sy_store_ops_real;

struct sy_store_options {
    const char *dir; /* Made when absent (its parent must exist). */
    const char *job;
    uint32_t shard;
    const char *spec;               /* The job as JSON, for the tape; NULL: not kept, nor is the following. */
    uint32_t warmup_steps;          /* Of interval warm-up; kept at the first opening, for good. */
    const struct sy_store_ops *ops; /* NULL: the real ones. */
    const char *vfs;                /* SQLite VFS by name; NULL: the default. */
};

struct sy_store_evaluation {
    bool known;
    double loss;
    uint64_t tokens, round, hash;
};

struct sy_store_totals { /* Counters of the whole job. */
    uint64_t next_round, rounds_merged, tokens, tokens_merged, next_admission;
    uint64_t tokens_merged_sum; /* tokens_merged times the shard's fragments, without the remainder lost. */
    uint64_t step, joins, refusals;
    uint64_t busy_ns, possible_ns;    /* Goodput is their ratio. */
    uint64_t leaves[SY_STORE_LEAVES]; /* goodbye, preempted, lost, superseded, protocol */
    uint64_t verdicts[DL_VERDICT_COUNT];
    struct sy_store_evaluation first_evaluation, last_evaluation;
};

struct sy_store_member { /* A learner process, and how much of it is in the totals. */
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    uint32_t learner;
    uint64_t born, admission, step, tokens, pushes_merged;
    bool has_left;
};

struct sy_store_participant {
    uint32_t learner;
    uint64_t admission;
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    uint64_t step, base_version;
    uint32_t steps;
    uint64_t tokens;
    double weight, norm;
    uint64_t lease, cursor; /* Data seen: all of the incarnation's leases below `lease`, `cursor` positions of it. */
};

struct sy_store_content { /* Of a file that is begun. */
    uint32_t fragment;
    uint64_t version, round;
    uint64_t parameters_bytes, state_bytes;
    bool hash_is_given; /* The parameters' hash is not taken from what is appended: sy_store_give_hash says it. */
};

struct sy_store_commit {
    uint32_t fragment;
    uint64_t version, round;
    struct sy_store_draft
        *draft; /* Its file where it was written already: taken by the call, whatever comes of it. Or NULL. */
    const void *parameters; /* Borrowed for the call; not looked at with a draft, as `state`. */
    uint64_t parameters_bytes;
    const void *state; /* Optimiser state; may be NULL with 0 bytes. */
    uint64_t state_bytes;
    const struct sy_store_participant *participants;
    uint32_t participant_count;
    struct sy_store_totals totals;
    const struct sy_store_member *members; /* Those that have changed since the commit before. */
    uint32_t member_count;
    bool recovered; /* Content of an older version under a new number: a file was damaged, or it was rolled back. */
};

struct sy_store_pinned {
    uint32_t fragment;
    uint64_t version;
};

struct sy_store_checkpoint { /* This shard's part. */
    uint64_t id;
    char name[SY_STORE_NAME_MAX];
    int64_t wall_ns;
    uint64_t rounds_merged, tokens;
    bool is_complete;
    uint32_t fragment_count;
    struct sy_store_pinned fragments[DL_SPEC_FRAGMENTS_MAX];
};

struct sy_store_cut_learner { /* Where a learner was when it heard of the cut. */
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    uint32_t learner;
    uint64_t step, tokens;
};

struct sy_store_cut_push { /* A push that was on its way then. */
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    uint32_t fragment;
    uint64_t round, base_version, tokens;
};

struct sy_store_cut { /* Arrays are borrowed. */
    uint64_t id;
    uint32_t learner_count, push_count;
    const struct sy_store_cut_learner *learners;
    const struct sy_store_cut_push *pushes;
};

struct sy_store_version { /* What the database says of a fragment's newest commit. */
    uint64_t version, round;
    uint64_t hash;
    uint32_t participants;
};

struct sy_store_layout { /* Borrowed until the store is closed. */
    enum dl_layout_kind kind;
    uint32_t fragments;
    uint64_t hash;
    const uint8_t *tensors;
    size_t tensors_bytes;
};

/* Opens or creates, and raises the epoch. DL_EINVAL: the folder belongs to another job or shard, or a newer format.
 * DL_EIO, DL_EFULL, DL_ECORRUPT (the database itself): text names the path. */
DL_MUST_CHECK enum dl_rc sy_store_open(const struct sy_store_options *options, struct sy_store **out,
                                       struct dl_err *err);
/* Writes events still in memory when that is possible. NULL is fine. */
void sy_store_close(struct sy_store *store);

uint64_t sy_store_epoch(const struct sy_store *store);
/* Inner steps of interval warm-up that the job began with. */
uint32_t sy_store_warmup_steps(const struct sy_store *store);
/* Of the last commit; zeros but for next_admission when there was none. */
void sy_store_get_totals(const struct sy_store *store, struct sy_store_totals *totals);

/* DL_ENOTFOUND when no commit was ever made. */
DL_MUST_CHECK enum dl_rc sy_store_get_layout(const struct sy_store *store, struct sy_store_layout *out);
/* Remembers the layout (copied); it becomes durable with the first commit. */
DL_MUST_CHECK enum dl_rc sy_store_set_layout(struct sy_store *store, const struct sy_store_layout *layout,
                                             struct dl_err *err);

/* The newest committed version of a fragment. DL_ENOTFOUND: none. */
DL_MUST_CHECK enum dl_rc sy_store_newest(struct sy_store *store, uint32_t fragment, struct sy_store_version *out,
                                         struct dl_err *err);
/* Reads a fragment's newest good version into the caller's arrays, whose sizes must be what was committed. When the
 * newest file is damaged, its name and fault go to `damage` (DL_ERR_TEXT_MAX bytes, else empty), the version before it
 * is read, and it is committed again under the newest version + 1, so that one version number never has two contents;
 * `*out` says which. DL_ENOTFOUND: never committed. DL_ECORRUPT: no kept file is good; the text names the files. DL_EINVAL: other
 * sizes were committed: the job's optimiser was changed. */
DL_MUST_CHECK enum dl_rc sy_store_load(struct sy_store *store, uint32_t fragment, void *parameters,
                                       uint64_t parameters_bytes, void *state, uint64_t state_bytes,
                                       struct sy_store_version *out, char *damage, struct dl_err *err);

/* Begins the file of a version, which is then written piece by piece, while the rest of it is still being computed: the
 * parameters, then the state, each in order. What is appended goes to the disk at once, past the page cache where file
 * system and memory (an address that is a multiple of SY_STORE_BLOCK_BYTES) allow it, and need not stay. Nothing of it
 * counts before the commit that it is given to. A draft is used by one thread at a time, does not hold up other calls, and
 * is given to a commit or abandoned before the store is closed. */
DL_MUST_CHECK enum dl_rc sy_store_begin(struct sy_store *store, const struct sy_store_content *content,
                                        struct sy_store_draft **out, struct dl_err *err);
/* DL_EFULL, DL_EIO: the draft is of no use any more. A piece does not reach from the parameters into the state. */
DL_MUST_CHECK enum dl_rc sy_store_append(struct sy_store_draft *draft, const void *bytes, uint64_t size,
                                         struct dl_err *err);
/* dl_content_hash of the parameters, where whoever made them has it anyway (`hash_is_given`); before the commit. */
void sy_store_give_hash(struct sy_store_draft *draft, uint64_t hash);
/* dl_content_hash of the parameters; all of them have been appended, or it was given. */
uint64_t sy_store_parameters_hash(const struct sy_store_draft *draft);
void sy_store_abandon(struct sy_store_draft *draft); /* Its file goes. NULL is fine. */

/* Makes one version of each of `count` (1 .. SY_STORE_COMMITS_MAX) different fragments durable, all or none; the totals are
 * the last one's. DL_EFULL (no room) and DL_EIO: nothing happened, the same call may be made again. DL_ECONFLICT: a later
 * process has opened the store. A commit of a fragment's newest version again is a repeat and succeeds. Files of versions that
 * are kept no longer are there until sy_store_tidy, or the next commit. */
DL_MUST_CHECK enum dl_rc sy_store_commit(struct sy_store *store, const struct sy_store_commit *commits, uint32_t count,
                                         struct dl_err *err);

/* Removes files of versions that are kept no longer: for large ones this takes the disk a while, and nobody has to wait. */
void sy_store_tidy(struct sy_store *store);

/* Makes totals, changed members and noted events durable without a version: the last word of a process. */
DL_MUST_CHECK enum dl_rc sy_store_save(struct sy_store *store, const struct sy_store_totals *totals,
                                       const struct sy_store_member *members, uint32_t count, struct dl_err *err);
/* The newest members first, at most `most`. */
DL_MUST_CHECK enum dl_rc sy_store_members(struct sy_store *store, struct sy_store_member *members, uint32_t most,
                                          uint32_t *count, struct dl_err *err);
/* Makes changes of the ledger durable, in a transaction of their own. Errors as sy_store_commit's. */
DL_MUST_CHECK enum dl_rc sy_store_write_ledger(struct sy_store *store, const struct sy_ledger_changes *changes,
                                               struct dl_err *err);
/* What of the ledger matters for going on: leases that are held, the last `holders` incarnations that had any, the queue and
 * the sums. `*state`'s arrays are the caller's to free. */
DL_MUST_CHECK enum dl_rc sy_store_read_ledger(struct sy_store *store, uint32_t holders, struct sy_ledger_state *state,
                                              struct dl_err *err);

/* Notes something for the tape, e.g. ("join", 3, 17, uid, step, ""). In memory until the next commit or close. */
void sy_store_note(struct sy_store *store, const char *kind, uint32_t learner, uint64_t admission, const char *uid,
                   uint64_t step, const char *text);

/* A learner's process has said hello: a number for it, until it is released, and how far its deliveries to the tape are
 * durable. SY_STORE_NO_INCARNATION: no room; it is not traced. Never waits for the disk, as nothing below does. */
uint32_t sy_store_incarnation(struct sy_store *store, const char *uid, uint64_t nonce, uint32_t learner,
                              const char *trainer, uint64_t *traced);
void sy_store_release(struct sy_store *store, uint32_t incarnation);
uint64_t sy_store_traced(struct sy_store *store, uint32_t incarnation);
/* Takes entries for the next commit, which has them all or none. What was delivered before is skipped. False: there are
 * SY_STORE_TRACE_MAX, or no memory: nothing was taken. */
bool sy_store_trace(struct sy_store *store, uint32_t incarnation, const struct dl_wire_trace *trace);

/* A merged push as it came; `encoded` is borrowed. */
struct sy_store_kept_push {
    uint64_t nonce; /* Of the incarnation. */
    uint32_t codec; /* enum dl_codec */
    uint64_t bytes;
    const uint8_t *encoded;
};
/* Writes the pushes of a version to a file of their own, pushes-FFF-vNNN.bin; a repeat replaces it. Not synced: after a crash
 * of the machine it may be missing or cut short, which its checksums show; nothing but --verify-only depends on it. Call
 * before the commit. */
DL_MUST_CHECK enum dl_rc sy_store_keep_pushes(struct sy_store *store, uint32_t fragment, uint64_t version,
                                              const struct sy_store_kept_push *pushes, uint32_t count,
                                              struct dl_err *err);
/* Reads them back, in the order in which they were merged: one allocation, the caller's to free. DL_ENOTFOUND, DL_ECORRUPT. */
DL_MUST_CHECK enum dl_rc sy_store_read_pushes(const char *dir, uint32_t fragment, uint64_t version,
                                              struct sy_store_kept_push **out, uint32_t *count, struct dl_err *err);

/* Reads a version's file without opening the folder as a store; its sizes must be these. `state` may be NULL with 0 bytes:
 * then it is not read. Errors as of a load. */
DL_MUST_CHECK enum dl_rc sy_store_read_file(const char *dir, const char *file, uint32_t fragment, uint64_t version,
                                            void *parameters, uint64_t parameters_bytes, void *state,
                                            uint64_t state_bytes, struct dl_err *err);

/* Keeps these versions (which must be kept now: DL_ENOTFOUND) until they are unpinned. A repeat succeeds. */
DL_MUST_CHECK enum dl_rc sy_store_pin(struct sy_store *store, const struct sy_store_checkpoint *checkpoint,
                                      struct dl_err *err);
/* All channels of the cut are closed: what was in them, and where the learners were. */
DL_MUST_CHECK enum dl_rc sy_store_complete(struct sy_store *store, const struct sy_store_cut *cut, struct dl_err *err);
/* Whether this shard's part is there and intact, file by file. DL_ENOTFOUND, DL_ECORRUPT. */
DL_MUST_CHECK enum dl_rc sy_store_check_checkpoint(struct sy_store *store, uint64_t id, const struct dl_layout *layout,
                                                   uint32_t shards, struct dl_err *err);
/* Goes back to it: each of the shard's fragments gets a new version with the content that the checkpoint has, outer-optimiser
 * state included; the counters of progress are the checkpoint's; and in the ledger counts only what its versions have seen, the
 * rest goes back to the queue, whoever holds it: no learner may live on. The tape keeps all that was. What was written when it
 * fails is undone or done again by a repeat. DL_ENOTFOUND, DL_ECORRUPT; else as sy_store_commit. */
DL_MUST_CHECK enum dl_rc sy_store_roll_back(struct sy_store *store, uint64_t id, const struct dl_layout *layout,
                                            uint32_t shards, struct dl_err *err);
/* DL_ENOTFOUND: no such checkpoint. */
DL_MUST_CHECK enum dl_rc sy_store_unpin(struct sy_store *store, uint64_t id, struct dl_err *err);
/* The newest first, at most `most`. */
DL_MUST_CHECK enum dl_rc sy_store_checkpoints(struct sy_store *store, struct sy_store_checkpoint *out, uint32_t most,
                                              uint32_t *count, struct dl_err *err);

/* Bytes of all kept files, for metrics. */
uint64_t sy_store_bytes(const struct sy_store *store);

#endif
