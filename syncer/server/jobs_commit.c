/* The commit thread: makes new versions durable, and whatever else is written to the store, in the order of the jobs. */
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "common/clock.h"
#include "common/codec.h"
#include "common/mem.h"
#include "syncer/server/jobs_internal.h"

#define RETRY_NS_MIN (250 * DL_NS_PER_MS)
#define RETRY_NS_MAX (15 * DL_NS_PER_SECOND)
#define BATCH_BYTES_MAX (16u << 20)     /* Of parameters in one commit of several fragments. */
#define PIECE_BYTES (UINT64_C(4) << 20) /* Written at once of a version that is growing. */

static struct sy_store_commit describe(const struct sy_jobs *jobs, const struct sy_job *job,
                                       struct sy_store_draft *draft)
{
    const struct sy_job_part *part = &jobs->parts[job->local];
    for (uint32_t i = 0; i < job->input_count; i++) {
        job->participants[i] = job->inputs[i].who;
    }
    return (struct sy_store_commit){.fragment = job->fragment,
                                    .version = job->version,
                                    .round = sy_job_made_by(job),
                                    .draft = draft,
                                    .parameters_bytes = part->padded * sizeof(float),
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
        waited = pthread_cond_timedwait(&jobs->moved, &jobs->lock, &until);
    }
    bool stop = jobs->stop;
    pthread_mutex_unlock(&jobs->lock);
    return stop;
}

static void report_delay(struct sy_jobs *jobs, const struct sy_job *job, const struct dl_err *err)
{
    struct sy_job *report = sy_job_copy(job, SY_JOB_DELAYED);
    if (report != NULL) {
        report->error = *err;
        sy_jobs_post(jobs, report);
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

/* Until `bytes` of the job's parameters are there, or all are; how many are. */
static uint64_t wait_for_growth(struct sy_jobs *jobs, struct sy_job *job, uint64_t bytes, const float **parameters)
{
    pthread_mutex_lock(&jobs->lock);
    while (!job->made && job->ready_bytes < bytes) {
        pthread_cond_wait(&jobs->moved, &jobs->lock);
    }
    uint64_t ready = job->made ? jobs->parts[job->local].padded * sizeof(float) : job->ready_bytes;
    *parameters = job->parameters;
    pthread_mutex_unlock(&jobs->lock);
    return ready;
}

static void wait_for_encoding(struct sy_jobs *jobs, struct sy_job *job)
{
    pthread_mutex_lock(&jobs->lock);
    job->settled = true;
    while (!job->encoded) {
        pthread_cond_wait(&jobs->moved, &jobs->lock);
    }
    pthread_mutex_unlock(&jobs->lock);
}

/* Bytes `from` .. `end` - 1 of the parameters, wherever they lie. */
static enum dl_rc append_parameters(const struct sy_job *job, const float *parameters, uint64_t from, uint64_t end,
                                    struct sy_store_draft *draft, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    while (rc == DL_OK && from < end) {
        uint64_t gaps = job->piece_bytes == 0 ? 0 : from / job->piece_bytes * job->gap_bytes;
        uint64_t left = job->piece_bytes == 0 ? UINT64_MAX : job->piece_bytes - from % job->piece_bytes;
        uint64_t size = DL_MIN(end - from, left);
        rc = sy_store_append(draft, (const uint8_t *)parameters + from + gaps, size, err);
        from += size;
    }
    return rc;
}

static enum dl_rc append_as_it_grows(struct sy_jobs *jobs, struct sy_job *job, struct sy_store_draft *draft,
                                     struct dl_err *err)
{
    const struct sy_job_part *part = &jobs->parts[job->local];
    uint64_t bytes = part->padded * sizeof(float);
    enum dl_rc rc = DL_OK;
    for (uint64_t done = 0; rc == DL_OK && done < bytes;) {
        const float *parameters = NULL;
        uint64_t ready = wait_for_growth(jobs, job, DL_MIN(bytes, done + PIECE_BYTES), &parameters);
        uint64_t more = ready == bytes ? bytes - done : (ready - done) / PIECE_BYTES * PIECE_BYTES;
        rc = append_parameters(job, parameters, done, done + more, draft, err);
        done += more;
    }
    if (rc == DL_OK) {
        const float *parameters = NULL;
        (void)wait_for_growth(jobs, job, UINT64_MAX, &parameters); /* Then the optimiser's state is final, too. */
        rc = sy_store_append(draft, part->state, part->state_bytes, err);
    }
    return rc;
}

/* The file of a version; where it is large it is begun while it is merged. NULL in `*out` when that fails. Returns with the
 * version made. */
static enum dl_rc write_draft(struct sy_jobs *jobs, struct sy_job *job, struct sy_store_draft **out, struct dl_err *err)
{
    const struct sy_job_part *part = &jobs->parts[job->local];
    const struct sy_store_content content = {.fragment = job->fragment,
                                             .version = job->version,
                                             .round = sy_job_made_by(job),
                                             .parameters_bytes = part->padded * sizeof(float),
                                             .state_bytes = part->state_bytes,
                                             .hash_is_given = job->hash_is_given};
    enum dl_rc rc = sy_store_begin(jobs->options.store, &content, out, err);
    if (rc == DL_OK) {
        rc = append_as_it_grows(jobs, job, *out, err);
        if (rc != DL_OK) {
            sy_store_abandon(dl_take(*out));
        }
    }
    const float *parameters = NULL;
    (void)wait_for_growth(jobs, job, UINT64_MAX, &parameters);
    if (rc == DL_OK && job->hash_is_given) {
        sy_store_give_hash(*out, job->parameters_hash);
    }
    return rc;
}

static enum dl_rc commit_versions(struct sy_jobs *jobs, struct sy_job *batch, struct dl_err *err)
{
    struct sy_store_commit commits[SY_STORE_COMMITS_MAX];
    uint32_t count = 0;
    enum dl_rc rc = DL_OK;
    for (struct sy_job *job = batch; job != NULL && rc == DL_OK; job = job->next) {
        struct sy_store_draft *draft = NULL;
        rc = write_draft(jobs, job, &draft, err);
        if (rc == DL_OK) {
            commits[count++] = describe(jobs, job, draft);
            rc = jobs->options.spec->syncer.keep_pushes ? keep_pushes(jobs, job, err) : DL_OK;
        }
    }
    if (rc == DL_OK) {
        return sy_store_commit(jobs->options.store, commits, count, err);
    }
    while (count > 0) {
        sy_store_abandon(commits[--count].draft);
    }
    return rc;
}

static enum dl_rc commit_now(struct sy_jobs *jobs, struct sy_job *batch, struct dl_err *err)
{
    return batch->is_ledger ? sy_store_write_ledger(jobs->options.store, &batch->ledger, err)
                            : commit_versions(jobs, batch, err);
}

/* Until all are durable, or cannot become so. */
static enum dl_rc commit_at_last(struct sy_jobs *jobs, struct sy_job *batch, struct dl_err *err)
{
    if (jobs->options.store == NULL) {
        return DL_OK;
    }
    enum dl_rc rc = commit_now(jobs, batch, err);
    for (int64_t wait = RETRY_NS_MIN; rc == DL_EFULL || rc == DL_EIO; wait = DL_MIN(2 * wait, RETRY_NS_MAX)) {
        for (const struct sy_job *job = batch; job != NULL; job = job->next) {
            report_delay(jobs, job, err);
        }
        if (wait_for_retry(jobs, wait)) {
            break;
        }
        rc = commit_now(jobs, batch, err);
    }
    return rc;
}

static void finish(struct sy_jobs *jobs, struct sy_job *job, enum dl_rc rc, const struct dl_err *err)
{
    if (sy_job_is_round(job)) {
        int64_t now = dl_now_ns();
        job->commit_ns = jobs->options.store == NULL ? 0 : now - job->made_ns;
        wait_for_encoding(jobs, job);
        job->held_ns = dl_now_ns() - job->made_ns;
    }
    job->report = rc == DL_OK ? SY_JOB_DONE : SY_JOB_FAILED;
    if (rc != DL_OK) {
        job->error = *err;
    }
    sy_jobs_post(jobs, job);
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
    sy_jobs_post(jobs, job);
}

/* Jobs of different fragments, since a fragment has one round under way at most. */
static void do_batch(struct sy_jobs *jobs, struct sy_job *batch)
{
    struct dl_err err = {.rc = DL_OK};
    if (batch->task.run != NULL) {
        do_task(jobs, batch);
        return;
    }
    enum dl_rc rc = commit_at_last(jobs, batch, &err);
    while (batch != NULL) {
        struct sy_job *job = batch;
        batch = job->next;
        job->next = NULL;
        finish(jobs, job, rc, &err);
    }
    if (jobs->options.store != NULL) {
        sy_store_tidy(jobs->options.store); /* Now that nobody waits for it. */
    }
}

/* What waits is committed together, as long as it is small: then syncing is most of the cost. Of large fragments the
 * first would only wait for the others. Called with the lock held. */
static struct sy_job *take_batch(struct sy_jobs *jobs)
{
    struct sy_job_queue batch = {NULL, NULL};
    uint64_t bytes = 0;
    for (uint32_t count = 0; jobs->commits.first != NULL && count < SY_STORE_COMMITS_MAX; count++) {
        const struct sy_job *next = jobs->commits.first;
        bool is_alone = !sy_job_is_round(next) || next->streams || jobs->options.store == NULL;
        uint64_t more = sy_job_is_round(next) ? jobs->parts[next->local].padded * sizeof(float) : 0;
        if (count > 0 && (is_alone || bytes + more > BATCH_BYTES_MAX)) {
            break;
        }
        bytes += more;
        sy_job_append(&batch, sy_job_take(&jobs->commits));
        if (is_alone) {
            break;
        }
    }
    return batch.first;
}

void *sy_jobs_run_commits(void *context)
{
    struct sy_jobs *jobs = context;
    pthread_mutex_lock(&jobs->lock);
    while (!jobs->stop) {
        struct sy_job *batch = take_batch(jobs);
        if (batch == NULL) {
            pthread_cond_wait(&jobs->moved, &jobs->lock);
            continue;
        }
        pthread_mutex_unlock(&jobs->lock);
        do_batch(jobs, batch);
        pthread_mutex_lock(&jobs->lock);
    }
    pthread_mutex_unlock(&jobs->lock);
    return NULL;
}
