#include "syncer/server/jobs.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/server/jobs_internal.h"

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

struct sy_job *sy_job_copy(const struct sy_job *job, enum sy_job_report report)
{
    struct sy_job *copy = sy_job_new(0);
    if (copy != NULL) {
        copy->report = report;
        copy->is_ledger = job->is_ledger;
        copy->local = job->local;
        copy->fragment = job->fragment;
        copy->version = job->version;
        copy->round = job->round;
    }
    return copy;
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
        sy_blob_drop(job->making);
        free(job->inputs);
        free((void *)(uintptr_t)job->ledger.leases);
        free((void *)(uintptr_t)job->ledger.ranges);
        free(job->participants);
        free(job->members);
        free(job->task.data);
        free(job);
    }
}

void sy_job_append(struct sy_job_queue *queue, struct sy_job *job)
{
    job->next = NULL;
    if (queue->first == NULL) {
        queue->first = job;
    } else {
        queue->last->next = job;
    }
    queue->last = job;
}

struct sy_job *sy_job_take(struct sy_job_queue *queue)
{
    struct sy_job *job = queue->first;
    if (job != NULL) {
        queue->first = job->next;
        job->next = NULL;
    }
    return job;
}

void sy_jobs_submit(struct sy_jobs *jobs, struct sy_job *job)
{
    pthread_mutex_lock(&jobs->lock);
    sy_job_append(&jobs->queue, job);
    pthread_cond_signal(&jobs->submitted);
    pthread_mutex_unlock(&jobs->lock);
}

struct sy_job *sy_jobs_result(struct sy_jobs *jobs)
{
    pthread_mutex_lock(&jobs->lock);
    struct sy_job *job = sy_job_take(&jobs->results);
    pthread_mutex_unlock(&jobs->lock);
    return job;
}

void sy_jobs_post(struct sy_jobs *jobs, struct sy_job *job)
{
    pthread_mutex_lock(&jobs->lock);
    sy_job_append(&jobs->results, job);
    pthread_mutex_unlock(&jobs->lock);
    jobs->wake(jobs->wake_context);
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
    pthread_cond_init(&jobs->submitted, &attributes);
    pthread_cond_init(&jobs->moved, &attributes);
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
        if (jobs->parts[i].blob == NULL) {
            free(jobs->parts[i].theta);
        }
        sy_blob_drop(jobs->parts[i].blob);
        free(jobs->parts[i].state);
        jobs->parts[i] = (struct sy_job_part){0};
    }
    free(dl_take(jobs->spare));
}

enum dl_rc sy_jobs_set_layout(struct sy_jobs *jobs, const struct dl_layout *layout, struct dl_err *err)
{
    free_parts(jobs);
    jobs->layout = layout;
    uint64_t padded_max = 0;
    bool complete = true, in_frames = jobs->options.spec->sync.broadcast_compression == DL_CODEC_NONE;
    for (uint32_t i = 0; i < jobs->options.fragment_count; i++) {
        uint32_t fragment = jobs->options.shard + i * jobs->options.spec->syncer.shards;
        padded_max = DL_MAX(padded_max, layout->fragments[fragment].padded_elements);
    }
    for (uint32_t i = 0; i < jobs->options.fragment_count; i++) {
        struct sy_job_part *part = &jobs->parts[i];
        uint32_t fragment = jobs->options.shard + i * jobs->options.spec->syncer.shards;
        part->padded = layout->fragments[fragment].padded_elements;
        part->state_bytes = sy_jobs_arrays(jobs) * part->padded * sizeof(float) + SY_OUTER_TRAILER_BYTES;
        /* All as large as the largest, since the spare takes turns with them. */
        part->theta = in_frames ? NULL : dl_alloc_aligned(padded_max * sizeof(float));
        part->state = dl_alloc_aligned(part->state_bytes);
        complete = complete && (in_frames || part->theta != NULL) && part->state != NULL;
    }
    jobs->spare = in_frames ? NULL : dl_alloc_aligned(padded_max * sizeof(float));
    if (!complete || (!in_frames && jobs->spare == NULL)) {
        free_parts(jobs);
        return dl_err_set(err, DL_ENOMEM, "no memory for %u fragments of up to %" PRIu64 " parameters",
                          jobs->options.fragment_count, padded_max);
    }
    return sy_merge_new(layout, jobs->pool, jobs->inputs_max, &jobs->merge, err);
}

static enum dl_rc restore_into(struct sy_jobs *jobs, struct sy_job_part *part, uint32_t fragment, float *theta,
                               struct sy_blob **blob, char *damage, struct dl_err *err)
{
    struct sy_store_version version = {0};
    enum dl_rc rc = sy_store_load(jobs->options.store, fragment, theta, part->padded * sizeof(float), part->state,
                                  part->state_bytes, &version, damage, err);
    if (rc != DL_OK) {
        return rc;
    }
    const struct sy_blob_options options = {.fragment = fragment,
                                            .version = version.version,
                                            .round = version.round,
                                            .participants = version.participants,
                                            .codec = jobs->options.spec->sync.broadcast_compression};
    rc = sy_blob_new(&options, part->padded, jobs->options.buffers, blob, err);
    if (rc == DL_OK) {
        sy_blob_fill(*blob, theta, 0, 0, jobs->pool);
    }
    return rc;
}

enum dl_rc sy_jobs_restore(struct sy_jobs *jobs, uint32_t local, struct sy_blob **blob, char *damage,
                           struct dl_err *err)
{
    struct sy_job_part *part = &jobs->parts[local];
    uint32_t fragment = jobs->options.shard + local * jobs->options.spec->syncer.shards;
    if (jobs->options.spec->sync.broadcast_compression != DL_CODEC_NONE) {
        return restore_into(jobs, part, fragment, part->theta, blob, damage, err);
    }
    float *read = sy_buffers_take(jobs->options.buffers, part->padded * sizeof(float));
    if (read == NULL) {
        return dl_err_set(err, DL_ENOMEM, "reading fragment %u: no memory", fragment);
    }
    enum dl_rc rc = restore_into(jobs, part, fragment, read, blob, damage, err);
    sy_buffers_give(jobs->options.buffers, read);
    if (rc == DL_OK) {
        sy_blob_drop(part->blob);
        part->blob = sy_blob_hold(*blob);
        part->theta = sy_blob_values(*blob);
    }
    return rc;
}

enum dl_rc sy_jobs_start(struct sy_jobs *jobs, void (*wake)(void *context), void *context, struct dl_err *err)
{
    jobs->wake = wake;
    jobs->wake_context = context;
    int failed = pthread_create(&jobs->merge_thread, NULL, sy_jobs_run_merges, jobs);
    jobs->merging = failed == 0;
    if (failed == 0) {
        failed = pthread_create(&jobs->commit_thread, NULL, sy_jobs_run_commits, jobs);
        jobs->committing = failed == 0;
    }
    return failed == 0 ? DL_OK : dl_err_errno(err, DL_ENOMEM, failed, "starting the threads that merge and commit");
}

static void drop_queue(struct sy_job_queue *queue)
{
    for (struct sy_job *job = sy_job_take(queue); job != NULL; job = sy_job_take(queue)) {
        sy_job_free(job);
    }
}

void sy_jobs_stop(struct sy_jobs *jobs)
{
    if (jobs == NULL) {
        return;
    }
    pthread_mutex_lock(&jobs->lock);
    jobs->stop = true;
    pthread_cond_broadcast(&jobs->submitted);
    pthread_cond_broadcast(&jobs->moved);
    pthread_mutex_unlock(&jobs->lock);
    if (jobs->merging) {
        pthread_join(jobs->merge_thread, NULL);
    }
    if (jobs->committing) {
        pthread_join(jobs->commit_thread, NULL);
    }
    drop_queue(&jobs->queue);
    drop_queue(&jobs->commits);
    drop_queue(&jobs->results);
    free_parts(jobs);
    sy_pool_free(jobs->pool);
    free(jobs->parts);
    free(jobs->pushes);
    pthread_cond_destroy(&jobs->submitted);
    pthread_cond_destroy(&jobs->moved);
    pthread_mutex_destroy(&jobs->lock);
    free(jobs);
}
