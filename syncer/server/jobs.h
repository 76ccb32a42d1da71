/* sy_jobs: the threads that alone touch parameters and optimiser state.
 *
 * A job is one closed round: merge (or take the first state) into what will be sent, commit to the store; or something that
 * is only committed, a change of the ledger, a checkpoint. The merge thread (with a pool of compute threads) merges,
 * encoding and hashing what is in its caches, the commit thread makes durable: it follows a large version while it is being
 * merged, so that most of it is on the disk when the merge is done. So one fragment is committed while the next is merged. Commits are made in the order of the jobs, small ones that wait together; the network thread
 * never waits for them: results are posted back, when a version is durable, and announced by a wake-up call.
 * A version of several chunks that is not durable yet is handed out at once, for all but its last chunk to be sent meanwhile.
 * A commit that fails for lack of room or an I/O error is tried again with backoff, and reported meanwhile.
 *
 * sy_jobs_submit and sy_jobs_result: network thread. */
#ifndef SY_SERVER_JOBS_H
#define SY_SERVER_JOBS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/spec.h"
#include "syncer/merge/merge.h"
#include "syncer/server/blob.h"
#include "syncer/store/store.h"

struct sy_jobs; /* Opaque. */

struct sy_job_input { /* One participant's push; borrowed from the submitter until the job is done. */
    struct sy_store_participant who;
    uint32_t member; /* Of the core. */
    enum dl_codec codec;
    const uint8_t *encoded;
    const double *slice_squares; /* Sums of squares of the decoded push, one a slice of the fragment. */
};

/* Theta is kept twice for one fragment only: a merge writes to a spare array that then takes the old one's place. With float32
 * broadcasts it writes to the frames that are sent; the old version's live until the new one is durable and nobody is sent
 * any of them. */
enum sy_job_report {
    SY_JOB_ENCODED, /* Not durable: of `blob`, the submitter's, all but the last chunk may be sent. Not of every round. */
    SY_JOB_DONE,    /* Committed; `blob` is the submitter's. NULL: it was handed out with SY_JOB_ENCODED. */
    SY_JOB_DELAYED, /* The commit cannot be made now; it is being tried again. `error` says why. */
    SY_JOB_FAILED,  /* It never will: end the process. */
};

struct sy_server;
struct sy_job_task { /* Something small to write to the store, in the order of the jobs. */
    enum dl_rc (*run)(struct sy_store *store, const void *data, struct dl_err *err); /* NULL: the job is a round. */
    void (*done)(struct sy_server *server, const void *data, const struct dl_err *error); /* Network thread. */
    void *data;                                                                           /* malloc'ed; the job's. */
};

struct sy_job {
    struct sy_job *next;
    struct sy_job_task task;
    uint32_t local; /* Index among the shard's fragments. */
    uint32_t fragment;
    uint64_t version, round;
    bool seed;                       /* inputs[0] holds the values themselves. */
    bool is_ledger;                  /* No round at all: changes of the ledger become durable. */
    struct sy_ledger_changes ledger; /* Its arrays are the job's. */
    uint32_t input_count;
    struct sy_job_input *inputs; /* Ascending learner id. */
    struct sy_store_totals totals;
    struct sy_store_member *members; /* The job's: counters that go with it. */
    uint32_t member_count;
    struct sy_store_participant *participants; /* Room for the record, one an input. */
    /* Between merge thread and commit thread; all but `jobs` and `streams` under the lock of `jobs`. */
    struct sy_jobs *jobs;
    bool streams;                    /* Its file is written while it is merged. */
    bool made, encoded;              /* Then the merge thread is done with the version; with the job. */
    bool settled;                    /* The commit is made, or never will be. */
    struct sy_blob *making;          /* What will be sent of it; the merge thread's. */
    const float *parameters;         /* Of the new version, */
    uint64_t piece_bytes, gap_bytes; /* lying in pieces, or in one (0), */
    uint64_t ready_bytes;            /* so much of them final. */
    bool hash_is_given;              /* What is sent is what is stored, and so is its hash. */
    uint64_t parameters_hash;
    int64_t made_ns;
    /* The result. */
    enum sy_job_report report;
    struct sy_blob *blob;
    struct sy_merge_stats stats;
    int64_t merge_ns;  /* Encoding and hashing included. */
    int64_t commit_ns; /* From the end of the merge until it was durable; 0 where nothing is. */
    int64_t held_ns;   /* From the end of the merge until all of it could be sent. */
    struct dl_err
        error; /* Of a task: its result. Of a round, with SY_JOB_DONE: a text says that the round changed nothing, and why. */
};

struct sy_jobs_options {
    const struct dl_spec *spec;
    uint32_t shard;
    uint32_t fragment_count; /* Of the shard. */
    uint32_t threads;
    struct sy_store *store; /* NULL: nothing is durable. */
    struct sy_buffers *buffers;
};

DL_MUST_CHECK enum dl_rc sy_jobs_new(const struct sy_jobs_options *options, struct sy_jobs **out, struct dl_err *err);
/* Allocates parameters and state for a layout (borrowed for the life of `jobs`, or until the next call). Only while no
 * job is under way. */
DL_MUST_CHECK enum dl_rc sy_jobs_set_layout(struct sy_jobs *jobs, const struct dl_layout *layout, struct dl_err *err);
/* Before sy_jobs_start: reads a fragment's last committed version from the store and encodes it. DL_ENOTFOUND: none.
 * `damage` as in sy_store_load. */
DL_MUST_CHECK enum dl_rc sy_jobs_restore(struct sy_jobs *jobs, uint32_t local, struct sy_blob **blob, char *damage,
                                         struct dl_err *err);
/* Starts the threads; `wake(context)` is called from them whenever a result was posted. */
DL_MUST_CHECK enum dl_rc sy_jobs_start(struct sy_jobs *jobs, void (*wake)(void *context), void *context,
                                       struct dl_err *err);

/* A zeroed job with room for `inputs`, the caller's until submitted. NULL: no memory. */
struct sy_job *sy_job_new(uint32_t inputs);
/* A job that makes these changes durable (copied). NULL: no memory. */
struct sy_job *sy_job_new_ledger(const struct sy_ledger_changes *changes);
void sy_job_free(struct sy_job *job);
void sy_jobs_submit(struct sy_jobs *jobs, struct sy_job *job);

/* The oldest report, or NULL. A SY_JOB_ENCODED or SY_JOB_DELAYED report is a copy without inputs; the job itself follows once
 * it is done.
 * The caller frees. */
struct sy_job *sy_jobs_result(struct sy_jobs *jobs);

/* Ends the threads after the jobs under way (not its retries), drops the rest, frees everything. NULL is fine. */
void sy_jobs_stop(struct sy_jobs *jobs);

#endif
