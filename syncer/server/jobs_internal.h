/* What the parts of sy_jobs share: jobs.c (jobs, queues, life), jobs_merge.c (the merge thread), jobs_commit.c (the commit
 * thread). Not for others. */
#ifndef SY_SERVER_JOBS_INTERNAL_H
#define SY_SERVER_JOBS_INTERNAL_H

#include <pthread.h>

#include "syncer/merge/pool.h"
#include "syncer/server/jobs.h"

/* Parameters from which on the file of a version is written while it is being merged; those of smaller ones are written
 * together, once they are merged. */
#define SY_JOB_STREAM_BYTES_MIN (UINT64_C(4) << 20)

struct sy_job_part {      /* One fragment. */
    float *theta;         /* With float32 broadcasts the values of `blob`, which lie as it says. */
    struct sy_blob *blob; /* Else NULL, as before the first version. */
    uint8_t *state; /* The optimiser's arrays one after the other, then the trailer: as it is written to the store. */
    uint64_t state_bytes;
    uint64_t padded;
};

struct sy_job_queue {
    struct sy_job *first, *last;
};

/* A fragment's new version is written to the frames that are broadcast, where they hold float32, or else to the spare, which
 * then takes the place of the old one. So what the commit thread
 * reads is not written before the fragment's next round, which begins after the commit; and the merge thread goes on with
 * other fragments meanwhile. */
struct sy_jobs {
    struct sy_jobs_options options;
    const struct dl_layout *layout;
    struct sy_pool *pool; /* Merge thread only, once it runs; as merge, spare and pushes. */
    struct sy_merge *merge;
    struct sy_job_part *parts;
    float *
        spare; /* Where the next new version is made; takes turns with the fragments' own. Not with float32 broadcasts. */
    uint32_t inputs_max;
    struct sy_push *pushes;
    /* Shared by all threads, under `lock`. */
    pthread_mutex_t lock;
    pthread_cond_t submitted; /* There is something to merge, or the end. */
    pthread_cond_t moved;     /* There is something to commit, a version has grown or is encoded, or the end. */
    struct sy_job_queue queue, commits, results;
    bool stop, merging, committing; /* The threads that run. */
    pthread_t merge_thread, commit_thread;
    void (*wake)(void *context);
    void *wake_context;
};

/* --- jobs.c: with the lock held --- */
void sy_job_append(struct sy_job_queue *queue, struct sy_job *job);
struct sy_job *sy_job_take(struct sy_job_queue *queue); /* NULL: empty. */

/* --- jobs.c: without --- */
/* What a report beside the job itself says of it. NULL: no memory. */
struct sy_job *sy_job_copy(const struct sy_job *job, enum sy_job_report report);
void sy_jobs_post(struct sy_jobs *jobs, struct sy_job *job);
static inline bool sy_job_is_round(const struct sy_job *job)
{
    return !job->is_ledger && job->task.run == NULL;
}
/* A first state is made by no round. */
static inline uint64_t sy_job_made_by(const struct sy_job *job)
{
    return job->seed ? 0 : job->round;
}

/* --- the threads --- */
void *sy_jobs_run_merges(void *jobs);
void *sy_jobs_run_commits(void *jobs);
/* How many of the optimiser's arrays a state has. */
uint32_t sy_jobs_arrays(const struct sy_jobs *jobs);

#endif
