/* sim_record: what the tapes of a run's shards say, in memory: versions, the pushes that made them, and what each learner's
 * process did in which order (docs/tape.md). Pushes and snapshots are matched, and how far each process has to be executed
 * is known.
 *
 * Reads files; one thread. Layer: sim/replay. */
#ifndef DL_SIM_REPLAY_RECORD_H
#define DL_SIM_REPLAY_RECORD_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/spec.h"
#include "common/wire.h"

#define SIM_PATH_MAX 1024
#define SIM_NO_ENTRY UINT32_MAX
#define SIM_NO_INCARNATION UINT32_MAX

struct sim_entry { /* A row of `trace`. */
    uint64_t seq, step, a, b, c;
    uint32_t fragment;
    uint32_t commit, push; /* Of a snapshot that was merged, the version it went into; else SIM_NO_ENTRY. */
    char kind[DL_TRACE_KIND_MAX];
    char *text; /* NULL: empty. */
};

struct sim_incarnation_record {
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    int64_t learner; /* -1: never said hello. */
    char trainer[DL_WIRE_TRAINER_MAX];
    struct sim_entry *entries; /* By seq. */
    uint32_t count;
    bool
        left_out; /* It is older than the versions to begin with: not executed, its pushes are read where they were kept. */
    /* How far it has to be executed: so many entries, and at least so many steps. */
    uint32_t needed;
    uint64_t needed_steps;
};

struct sim_capture {      /* Optimiser state that a joiner took over from a peer. */
    uint32_t incarnation; /* Of the peer. */
    uint64_t step;        /* As it was after so many of its steps. */
    uint32_t uses;
    uint8_t *bytes; /* From when the peer gets there until the last joiner has it. */
};

struct sim_push { /* A row of `participants`. */
    uint32_t incarnation, learner, entry;
    uint64_t step, base_version, tokens;
    uint32_t steps;
    double weight, norm;
    uint8_t *encoded; /* Between its snapshot and its merge; the engine's. */
    uint64_t encoded_bytes;
};

struct sim_commit { /* A row of `commits`. */
    uint32_t shard, fragment;
    uint64_t version, round, epoch, hash;
    int64_t wall_ns;
    char *file; /* NULL: no longer kept. */
    bool recovered;
    bool wanted; /* To be made again. */
    uint32_t first_push, push_count;
};

struct sim_spec_record {
    uint32_t shard;
    uint64_t epoch, hash;
    struct dl_spec *spec;
};

struct sim_record {
    uint32_t shards;
    char (*folders)[SIM_PATH_MAX];
    struct dl_layout *layout;
    struct sim_spec_record *specs;
    uint32_t spec_count;
    struct sim_commit *commits; /* By shard, fragment, version. */
    uint32_t commit_count;
    uint32_t first_commit[DL_SPEC_FRAGMENTS_MAX], version_count[DL_SPEC_FRAGMENTS_MAX];
    uint32_t *order; /* Commits as they were made. */
    struct sim_push *pushes;
    uint32_t push_count;
    struct sim_incarnation_record *incarnations;
    uint32_t incarnation_count;
    struct sim_capture *captures;
    uint32_t capture_count;
};

/* `folders`: the state folder of each shard, any order. DL_ENOTFOUND, DL_EINVAL (not tapes of one run), DL_EIO. */
DL_MUST_CHECK enum dl_rc sim_record_open(const char *const *folders, uint32_t count, struct sim_record **out,
                                         struct dl_err *err);
void sim_record_free(struct sim_record *record); /* NULL is fine. */

/* The versions of a checkpoint, by its name or number; `versions` has room for every fragment. DL_ENOTFOUND. */
DL_MUST_CHECK enum dl_rc sim_record_checkpoint(struct sim_record *record, const char *name, uint64_t *versions,
                                               struct dl_err *err);

/* Leaves out the processes that depend on versions older than `from` (by fragment), and whoever took over state of those;
 * returns how many of them have part in a wanted version. */
uint32_t sim_record_leave_out(struct sim_record *record, const uint64_t *from);

/* Finds how far each process has to be executed for all wanted versions, and what is taken over on the way. */
DL_MUST_CHECK enum dl_rc sim_record_plan(struct sim_record *record, struct dl_err *err);
/* NULL: nobody takes over this state. */
struct sim_capture *sim_record_capture(const struct sim_record *record, uint32_t incarnation, uint64_t step);
/* The process that a `state` entry names; SIM_NO_INCARNATION: it is not in the tape. */
uint32_t sim_record_peer(const struct sim_record *record, const struct sim_entry *entry);

/* NULL: there is no such version in the tape. */
const struct sim_commit *sim_record_commit(const struct sim_record *record, uint32_t fragment, uint64_t version);
/* The job as it was for a shard's opening; and the one whose JSON has this hash (the newest when none has). */
const struct dl_spec *sim_record_spec(const struct sim_record *record, uint32_t shard, uint64_t epoch);
const struct dl_spec *sim_record_spec_by_hash(const struct sim_record *record, uint64_t hash, bool *found);

#endif
