#include "syncer/server/jobs.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/clock.h"
#include "common/codec.h"
#include "common/mem.h"
#include "syncer/merge/merge.h"
#include "syncer/merge/pool.h"

#define RETRY_NS_MIN (250 * DL_NS_PER_MS)
#define RETRY_NS_MAX (15 * DL_NS_PER_SECOND)
#define BATCH_BYTES_MAX (16u << 20) /* Of parameters in one commit of several fragments. */

struct part { /* One fragment. */
    float *theta;
    uint8_t *state; /* The optimiser's arrays one after the other, then the trailer: as it is written to the store. */
    uint64_t state_bytes;
    uint64_t padded;
};

struct sy_jobs {
    struct sy_jobs_options options;
    const struct dl_layout *layout;
    struct sy_pool *pool;
    struct sy_merge *merge;
    struct part *parts;
    float *spare; /* Where the next new version is made; takes turns with the fragments' own. */
    uint32_t inputs_max;
    struct sy_push *pushes;
    /* Shared with the network thread, under `lock`. */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct sy_job *queue, *queue_last;
    struct sy_job *results, *results_last;
    bool stop, running;
    pthread_t thread;
    void (*wake)(void *context);
    void *wake_context;
};

/* --- jobs and queues ------------------------------------------------------------------------------------------------
 */

struct sy_job *sy_job_new(uint32_t inputs)
{
    struct sy_job *job = calloc(1, sizeof *job);
    struct sy_job_input *array = calloc(inputs + 1, sizeof *array);
    struct sy_store_participant *participants = calloc(inputs + 1, sizeof *participants);
    if (job == NULL || array == NULL || participants == NULL) {
        free(job);
        free(array);
        free(participants);
        return NULL;
    }
    job->participants = participants;
    job->inputs = array;
    job->input_count = inputs;
    return job;
}

static bool copy_array(const void **array, size_t count, size_t size)
{
    void *copy = malloc(count * size + 1);
    if (copy != NULL && count > 0) {
        memcpy(copy, *array, count * size);
    }
    *array = copy;
    return copy != NULL;
}

struct sy_job *sy_job_new_ledger(const struct sy_ledger_changes *changes)
{
    struct sy_job *job = sy_job_new(0);
    if (job == NULL) {
        return NULL;
    }
    const void *leases = changes->leases, *ranges = changes->ranges;
    bool copied = copy_array(&leases, changes->lease_count, sizeof *changes->leases);
    copied = copy_array(&ranges, changes->range_count, sizeof *changes->ranges) && copied;
    job->is_ledger = true;
    job->ledger = *changes;
    job->ledger.leases = leases;
    job->ledger.ranges = ranges;
    if (!copied) {
        sy_job_free(job);
        return NULL;
    }
    return job;
}

void sy_job_free(struct sy_job *job)
{
    if (job != NULL) {
        sy_blob_drop(job->blob);
        free(job->inputs);
        free((void *)(uintptr_t)job->ledger.leases);
        free((void *)(uintptr_t)job->ledger.ranges);
        free(job->participants);
        free(job->members);
        free(job->task.data);
        free(job);
    }
}

static void append(struct sy_job **first, struct sy_job **last, struct sy_job *job)
{
    job->next = NULL;
    if (*first == NULL) {
        *first = job;
    } else {
        (*last)->next = job;
    }
    *last = job;
}

static struct sy_job *take_first(struct sy_job **first)
{
    struct sy_job *job = *first;
    if (job != NULL) {
        *first = job->next;
        job->next = NULL;
    }
    return job;
}

void sy_jobs_submit(struct sy_jobs *jobs, struct sy_job *job)
{
    pthread_mutex_lock(&jobs->lock);
    append(&jobs->queue, &jobs->queue_last, job);
    pthread_cond_signal(&jobs->changed);
    pthread_mutex_unlock(&jobs->lock);
}

struct sy_job *sy_jobs_result(struct sy_jobs *jobs)
{
    pthread_mutex_lock(&jobs->lock);
    struct sy_job *job = take_first(&jobs->results);
    pthread_mutex_unlock(&jobs->lock);
    return job;
}

static void post(struct sy_jobs *jobs, struct sy_job *job)
{
    pthread_mutex_lock(&jobs->lock);
    append(&jobs->results, &jobs->results_last, job);
    pthread_mutex_unlock(&jobs->lock);
    jobs->wake(jobs->wake_context);
}

/* --- a new version --------------------------------------------------------------------------------------------------
 */

static uint32_t arrays(const struct sy_jobs *jobs)
{
    return sy_outer_arrays(jobs->options.spec->sync.outer.type);
}

static struct sy_outer_state outer_of(const struct sy_jobs *jobs, const struct part *part)
{
    struct sy_outer_state outer = {0};
    uint64_t array_bytes = part->padded * sizeof(float);
    outer.first = arrays(jobs) > 0 ? (float *)(void *)part->state : NULL;
    outer.second = arrays(jobs) > 1 ? (float *)(void *)(part->state + array_bytes) : NULL;
    memcpy(&outer.steps, part->state + arrays(jobs) * array_bytes, sizeof outer.steps);
    return outer;
}

static void keep_steps(const struct sy_jobs *jobs, struct part *part, uint64_t steps)
{
    memcpy(part->state + arrays(jobs) * part->padded * sizeof(float), &steps, sizeof steps);
}

static void take_new_version(struct sy_jobs *jobs, struct part *part)
{
    float *old = part->theta;
    part->theta = jobs->spare;
    jobs->spare = old;
}

static void take_seed(struct sy_jobs *jobs, const struct sy_job *job, struct part *part)
{
    assert(job->input_count == 1 && job->inputs[0].codec == DL_CODEC_NONE);
    dl_codec_decode(DL_CODEC_NONE, job->inputs[0].encoded, part->padded / DL_BLOCK, jobs->spare);
    memset(part->state, 0, part->state_bytes);
    take_new_version(jobs, part);
}

/* A round whose pushes weigh nothing changes nothing; it is a version all the same, since the core has closed it. */
static void take_merged(struct sy_jobs *jobs, struct sy_job *job, struct part *part)
{
    assert(job->input_count <= jobs->inputs_max);
    for (uint32_t i = 0; i < job->input_count; i++) {
        const struct sy_job_input *input = &job->inputs[i];
        /* The order is all that matters to the merge; two incarnations of one learner may both have pushed. */
        jobs->pushes[i] = (struct sy_push){.learner = i,
                                           .codec = input->codec,
                                           .encoded = input->encoded,
                                           .weight = input->who.weight,
                                           .sum_squares = input->slice_squares};
    }
    struct sy_outer_state outer = outer_of(jobs, part);
    const struct sy_merge_job merge = {.fragment = job->fragment,
                                       .pushes = jobs->pushes,
                                       .push_count = job->input_count,
                                       .theta = part->theta,
                                       .theta_out = jobs->spare,
                                       .outer = &outer};
    enum dl_rc rc = sy_merge_run(jobs->merge, &jobs->options.spec->sync, &merge, &job->stats, &job->error);
    if (rc == DL_OK) {
        keep_steps(jobs, part, outer.steps);
        take_new_version(jobs, part);
    }
}

/* --- commit ---------------------------------------------------------------------------------------------------------
 */

/* A first state is made by no round. */
static uint64_t made_by(const struct sy_job *job)
{
    return job->seed ? 0 : job->round;
}

static struct sy_store_commit describe(const struct sy_jobs *jobs, const struct sy_job *job)
{
    const struct part *part = &jobs->parts[job->local];
    for (uint32_t i = 0; i < job->input_count; i++) {
        job->participants[i] = job->inputs[i].who;
    }
    return (struct sy_store_commit){.fragment = job->fragment,
                                    .version = job->version,
                                    .round = made_by(job),
                                    .parameters = part->theta,
                                    .parameters_bytes = part->padded * sizeof(float),
                                    .state = part->state,
                                    .state_bytes = part->state_bytes,
                                    .participants = job->participants,
                                    .participant_count = job->input_count,
                                    .totals = job->totals,
                                    .members = job->members,
                                    .member_count = job->member_count};
}

/* True when the thread is to end. */
static bool wait_for_retry(struct sy_jobs *jobs, int64_t wait_ns)
{
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t ns = until.tv_nsec + wait_ns;
    until.tv_sec += ns / DL_NS_PER_SECOND;
    until.tv_nsec = ns % DL_NS_PER_SECOND;
    pthread_mutex_lock(&jobs->lock);
    int waited = 0;
    while (!jobs->stop && waited != ETIMEDOUT) {
        waited = pthread_cond_timedwait(&jobs->changed, &jobs->lock, &until);
    }
    bool stop = jobs->stop;
    pthread_mutex_unlock(&jobs->lock);
    return stop;
}

static void report_delay(struct sy_jobs *jobs, const struct sy_job *job, const struct dl_err *err)
{
    struct sy_job *report = sy_job_new(0);
    if (report != NULL) {
        report->report = SY_JOB_DELAYED;
        report->is_ledger = job->is_ledger;
        report->local = job->local;
        report->fragment = job->fragment;
        report->version = job->version;
        report->round = job->round;
        report->error = *err;
        post(jobs, report);
    }
}

static enum dl_rc keep_pushes(struct sy_jobs *jobs, const struct sy_job *job, struct dl_err *err)
{
    DL_AUTO_FREE struct sy_store_kept_push *pushes = calloc(job->input_count + 1, sizeof *pushes);
    if (pushes == NULL) {
        return dl_err_set(err, DL_EIO, "keeping pushes: no memory"); /* Tried again. */
    }
    for (uint32_t i = 0; i < job->input_count; i++) {
        const struct sy_job_input *input = &job->inputs[i];
        pushes[i] = (struct sy_store_kept_push){.nonce = input->who.nonce,
                                                .codec = (uint32_t)input->codec,
                                                .bytes = dl_codec_bytes(input->codec, jobs->parts[job->local].padded),
                                                .encoded = input->encoded};
    }
    return sy_store_keep_pushes(jobs->options.store, job->fragment, job->version, pushes, job->input_count, err);
}

static enum dl_rc commit_now(struct sy_jobs *jobs, const struct sy_job *batch, const struct sy_store_commit *commits,
                             uint32_t count, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    for (const struct sy_job *job = batch; job != NULL && rc == DL_OK && jobs->options.spec->syncer.keep_pushes;
         job = job->next) {
        rc = job->is_ledger ? DL_OK : keep_pushes(jobs, job, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    return batch->is_ledger ? sy_store_write_ledger(jobs->options.store, &batch->ledger, err)
                            : sy_store_commit(jobs->options.store, commits, count, err);
}

/* Until all are durable, or cannot become so. */
static enum dl_rc commit_at_last(struct sy_jobs *jobs, struct sy_job *batch, struct dl_err *err)
{
    if (jobs->options.store == NULL) {
        return DL_OK;
    }
    struct sy_store_commit commits[SY_STORE_COMMITS_MAX];
    uint32_t count = 0;
    for (const struct sy_job *job = batch; job != NULL && !job->is_ledger; job = job->next) {
        commits[count++] = describe(jobs, job);
    }
    enum dl_rc rc = commit_now(jobs, batch, commits, count, err);
    for (int64_t wait = RETRY_NS_MIN; rc == DL_EFULL || rc == DL_EIO; wait = DL_MIN(2 * wait, RETRY_NS_MAX)) {
        for (const struct sy_job *job = batch; job != NULL; job = job->next) {
            report_delay(jobs, job, err);
        }
        if (wait_for_retry(jobs, wait)) {
            break;
        }
        rc = commit_now(jobs, batch, commits, count, err);
    }
    return rc;
}

static enum dl_rc encode(struct sy_jobs *jobs, uint32_t fragment, uint64_t version, uint64_t round,
                         uint32_t participants, const struct part *part, struct sy_blob **out, struct dl_err *err)
{
    return sy_blob_new(fragment, version, round, participants, jobs->options.spec->sync.broadcast_compression,
                       part->theta, part->padded, jobs->options.buffers, out, err);
}

static void make_version(struct sy_jobs *jobs, struct sy_job *job)
{
    if (job->is_ledger) {
        return;
    }
    struct part *part = &jobs->parts[job->local];
    int64_t begin = dl_now_ns();
    if (job->seed) {
        take_seed(jobs, job, part);
    } else {
        take_merged(jobs, job, part);
    }
    job->merge_ns = dl_now_ns() - begin;
}

static void finish(struct sy_jobs *jobs, struct sy_job *job, enum dl_rc rc, struct dl_err *err)
{
    int64_t begin = dl_now_ns();
    if (rc == DL_OK && !job->is_ledger) {
        rc = encode(jobs, job->fragment, job->version, made_by(job), job->seed ? 0 : job->input_count,
                    &jobs->parts[job->local], &job->blob, err);
    }
    job->encode_ns = dl_now_ns() - begin;
    job->report = rc == DL_OK ? SY_JOB_DONE : SY_JOB_FAILED;
    if (rc != DL_OK) {
        job->error = *err;
    }
    post(jobs, job);
}

/* Until it is durable, or cannot become so. */
static void do_task(struct sy_jobs *jobs, struct sy_job *job)
{
    struct dl_err *err = &job->error;
    enum dl_rc rc = job->task.run(jobs->options.store, job->task.data, err);
    for (int64_t wait = RETRY_NS_MIN; (rc == DL_EFULL || rc == DL_EIO) && !wait_for_retry(jobs, wait);
         wait = DL_MIN(2 * wait, RETRY_NS_MAX)) {
        rc = job->task.run(jobs->options.store, job->task.data, err);
    }
    err->rc = rc;
    post(jobs, job);
}

/* Jobs of different fragments, since a fragment has one round under way at most. */
static void do_batch(struct sy_jobs *jobs, struct sy_job *batch)
{
    struct dl_err err = {.rc = DL_OK};
    if (batch->task.run != NULL) {
        do_task(jobs, batch);
        return;
    }
    for (struct sy_job *job = batch; job != NULL; job = job->next) {
        make_version(jobs, job);
    }
    int64_t begin = dl_now_ns();
    enum dl_rc rc = commit_at_last(jobs, batch, &err);
    int64_t commit_ns = dl_now_ns() - begin;
    while (batch != NULL) {
        struct sy_job *job = take_first(&batch);
        job->commit_ns = commit_ns;
        finish(jobs, job, rc, &err);
    }
}

/* What waits is committed together, as long as it is small: then syncing is most of the cost. Of large fragments the
 * first would only wait for the others. Called with the lock held. */
static struct sy_job *take_batch(struct sy_jobs *jobs)
{
    struct sy_job *first = NULL, *last = NULL;
    uint64_t bytes = 0;
    for (uint32_t count = 0; jobs->queue != NULL && count < SY_STORE_COMMITS_MAX; count++) {
        if (jobs->queue->is_ledger || jobs->queue->task.run != NULL) {
            return count > 0 ? first : take_first(&jobs->queue); /* In its place, in a transaction of its own. */
        }
        uint64_t more = jobs->parts[jobs->queue->local].padded * sizeof(float);
        if (count > 0 && (bytes + more > BATCH_BYTES_MAX || jobs->options.store == NULL)) {
            break;
        }
        bytes += more;
        append(&first, &last, take_first(&jobs->queue));
    }
    return first;
}

static void *run(void *context)
{
    struct sy_jobs *jobs = context;
    pthread_mutex_lock(&jobs->lock);
    while (!jobs->stop) {
        struct sy_job *batch = take_batch(jobs);
        if (batch == NULL) {
            pthread_cond_wait(&jobs->changed, &jobs->lock);
            continue;
        }
        pthread_mutex_unlock(&jobs->lock);
        do_batch(jobs, batch);
        pthread_mutex_lock(&jobs->lock);
    }
    pthread_mutex_unlock(&jobs->lock);
    return NULL;
}

/* --- life -----------------------------------------------------------------------------------------------------------
 */

enum dl_rc sy_jobs_new(const struct sy_jobs_options *options, struct sy_jobs **out, struct dl_err *err)
{
    struct sy_jobs *jobs = calloc(1, sizeof *jobs);
    if (jobs == NULL) {
        return dl_err_set(err, DL_ENOMEM, "starting the merge thread: no memory");
    }
    jobs->options = *options;
    jobs->inputs_max = options->spec->learners.max;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&jobs->lock, NULL);
    pthread_cond_init(&jobs->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    jobs->parts = calloc(options->fragment_count, sizeof *jobs->parts);
    jobs->pushes = calloc(jobs->inputs_max, sizeof *jobs->pushes);
    enum dl_rc rc = jobs->parts == NULL || jobs->pushes == NULL
                        ? dl_err_set(err, DL_ENOMEM, "starting the merge thread: no memory")
                        : sy_pool_new(options->threads, &jobs->pool, err);
    if (rc != DL_OK) {
        sy_jobs_stop(jobs);
        return rc;
    }
    *out = jobs;
    return DL_OK;
}

static void free_parts(struct sy_jobs *jobs)
{
    sy_merge_free(jobs->merge);
    jobs->merge = NULL;
    for (uint32_t i = 0; jobs->parts != NULL && i < jobs->options.fragment_count; i++) {
        free(jobs->parts[i].theta);
        free(jobs->parts[i].state);
        jobs->parts[i] = (struct part){0};
    }
    free(dl_take(jobs->spare));
}

enum dl_rc sy_jobs_set_layout(struct sy_jobs *jobs, const struct dl_layout *layout, struct dl_err *err)
{
    free_parts(jobs);
    jobs->layout = layout;
    uint64_t padded_max = 0;
    bool complete = true;
    for (uint32_t i = 0; i < jobs->options.fragment_count; i++) {
        uint32_t fragment = jobs->options.shard + i * jobs->options.spec->syncer.shards;
        padded_max = DL_MAX(padded_max, layout->fragments[fragment].padded_elements);
    }
    for (uint32_t i = 0; i < jobs->options.fragment_count; i++) {
        struct part *part = &jobs->parts[i];
        uint32_t fragment = jobs->options.shard + i * jobs->options.spec->syncer.shards;
        part->padded = layout->fragments[fragment].padded_elements;
        part->state_bytes = arrays(jobs) * part->padded * sizeof(float) + SY_OUTER_TRAILER_BYTES;
        /* All as large as the largest, since the spare takes turns with them. */
        part->theta = dl_alloc_aligned(padded_max * sizeof(float));
        part->state = dl_alloc_aligned(part->state_bytes);
        complete = complete && part->theta != NULL && part->state != NULL;
    }
    jobs->spare = dl_alloc_aligned(padded_max * sizeof(float));
    if (!complete || jobs->spare == NULL) {
        free_parts(jobs);
        return dl_err_set(err, DL_ENOMEM, "no memory for %u fragments of up to %" PRIu64 " parameters",
                          jobs->options.fragment_count, padded_max);
    }
    return sy_merge_new(layout, jobs->pool, jobs->inputs_max, &jobs->merge, err);
}

enum dl_rc sy_jobs_restore(struct sy_jobs *jobs, uint32_t local, struct sy_blob **blob, char *damage,
                           struct dl_err *err)
{
    struct part *part = &jobs->parts[local];
    uint32_t fragment = jobs->options.shard + local * jobs->options.spec->syncer.shards;
    struct sy_store_version version;
    enum dl_rc rc = sy_store_load(jobs->options.store, fragment, part->theta, part->padded * sizeof(float), part->state,
                                  part->state_bytes, &version, damage, err);
    return rc != DL_OK ? rc
                       : encode(jobs, fragment, version.version, version.round, version.participants, part, blob, err);
}

enum dl_rc sy_jobs_start(struct sy_jobs *jobs, void (*wake)(void *context), void *context, struct dl_err *err)
{
    jobs->wake = wake;
    jobs->wake_context = context;
    int failed = pthread_create(&jobs->thread, NULL, run, jobs);
    if (failed != 0) {
        return dl_err_errno(err, DL_ENOMEM, failed, "starting the merge thread");
    }
    jobs->running = true;
    return DL_OK;
}

void sy_jobs_stop(struct sy_jobs *jobs)
{
    if (jobs == NULL) {
        return;
    }
    if (jobs->running) {
        pthread_mutex_lock(&jobs->lock);
        jobs->stop = true;
        pthread_cond_signal(&jobs->changed);
        pthread_mutex_unlock(&jobs->lock);
        pthread_join(jobs->thread, NULL);
    }
    for (struct sy_job *job = take_first(&jobs->queue); job != NULL; job = take_first(&jobs->queue)) {
        sy_job_free(job);
    }
    for (struct sy_job *job = take_first(&jobs->results); job != NULL; job = take_first(&jobs->results)) {
        sy_job_free(job);
    }
    free_parts(jobs);
    sy_pool_free(jobs->pool);
    free(jobs->parts);
    free(jobs->pushes);
    pthread_cond_destroy(&jobs->changed);
    pthread_mutex_destroy(&jobs->lock);
    free(jobs);
}
