/* The merge thread: makes new versions, in the form in which they are broadcast. */
#include <assert.h>
#include <string.h>

#include "common/clock.h"
#include "common/codec.h"
#include "common/mem.h"
#include "syncer/server/jobs_internal.h"

uint32_t sy_jobs_arrays(const struct sy_jobs *jobs)
{
    return sy_outer_arrays(jobs->options.spec->sync.outer.type);
}

static struct sy_outer_state outer_of(const struct sy_jobs *jobs, const struct sy_job_part *part)
{
    struct sy_outer_state outer = {0};
    uint64_t array_bytes = part->padded * sizeof(float);
    outer.first = sy_jobs_arrays(jobs) > 0 ? (float *)(void *)part->state : NULL;
    outer.second = sy_jobs_arrays(jobs) > 1 ? (float *)(void *)(part->state + array_bytes) : NULL;
    memcpy(&outer.steps, part->state + sy_jobs_arrays(jobs) * array_bytes, sizeof outer.steps);
    return outer;
}

static void keep_steps(const struct sy_jobs *jobs, struct sy_job_part *part, uint64_t steps)
{
    memcpy(part->state + sy_jobs_arrays(jobs) * part->padded * sizeof(float), &steps, sizeof steps);
}

/* The frames' memory is the new version's, or the spare is. */
static void take_new_version(struct sy_jobs *jobs, struct sy_job_part *part, struct sy_blob *blob)
{
    if (sy_blob_values(blob) != NULL) {
        sy_blob_drop(part->blob);
        part->blob = sy_blob_hold(blob);
        part->theta = sy_blob_values(blob);
    } else {
        float *old = part->theta;
        part->theta = jobs->spare;
        jobs->spare = old;
    }
}

static void take_seed(struct sy_jobs *jobs, struct sy_job *job, struct sy_job_part *part)
{
    assert(job->input_count == 1 && job->inputs[0].codec == DL_CODEC_NONE);
    const float *values = (const void *)job->inputs[0].encoded; /* Aligned, as buffers are. */
    memset(part->state, 0, part->state_bytes);
    sy_blob_fill(job->making, values, 0, 0, jobs->pool);
    if (sy_blob_values(job->making) == NULL) {
        memcpy(jobs->spare, values, part->padded * sizeof *values);
    }
    take_new_version(jobs, part, job->making);
}

/* Of a round whose pushes weigh nothing. */
static void take_old(struct sy_jobs *jobs, struct sy_job *job, struct sy_job_part *part)
{
    uint64_t piece = part->blob == NULL ? 0 : sy_blob_piece_elements(part->blob);
    uint64_t gap = part->blob == NULL ? 0 : sy_blob_gap_elements(part->blob);
    sy_blob_fill(job->making, part->theta, piece, gap, jobs->pool);
    if (sy_blob_values(job->making) != NULL) {
        take_new_version(jobs, part, job->making);
    }
}

/* While a tile of the new version is in the cache. */
static void encode_tile(void *context, uint64_t offset, const float *values, size_t blocks)
{
    const struct sy_job *job = context;
    sy_blob_put(job->making, offset, values, blocks);
}

static void tell_ready(void *context, uint64_t elements)
{
    struct sy_job *job = context;
    sy_blob_seal(job->making, elements);
    if (job->streams) {
        pthread_mutex_lock(&job->jobs->lock);
        job->ready_bytes = elements * sizeof(float);
        pthread_cond_signal(&job->jobs->moved);
        pthread_mutex_unlock(&job->jobs->lock);
    }
}

/* A round whose pushes weigh nothing changes nothing; it is a version all the same, since the core has closed it. */
static void take_merged(struct sy_jobs *jobs, struct sy_job *job, struct sy_job_part *part)
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
    float *values = sy_blob_values(job->making);
    const struct sy_merge_job merge = {.fragment = job->fragment,
                                       .pushes = jobs->pushes,
                                       .push_count = job->input_count,
                                       .theta = part->theta,
                                       .theta_out = values != NULL ? values : jobs->spare,
                                       .piece_elements = sy_blob_piece_elements(job->making),
                                       .gap_elements = sy_blob_gap_elements(job->making),
                                       .outer = &outer,
                                       .emit = values != NULL ? NULL : encode_tile,
                                       .ready = tell_ready,
                                       .context = job};
    enum dl_rc rc = sy_merge_run(jobs->merge, &jobs->options.spec->sync, &merge, &job->stats, &job->error);
    if (rc == DL_OK) {
        keep_steps(jobs, part, outer.steps);
        take_new_version(jobs, part, job->making);
    } else {
        take_old(jobs, job, part);
    }
}

static void hand_over(struct sy_jobs *jobs, struct sy_job *job)
{
    pthread_mutex_lock(&jobs->lock);
    sy_job_append(&jobs->commits, job);
    pthread_cond_signal(&jobs->moved);
    pthread_mutex_unlock(&jobs->lock);
}

static void make_version(struct sy_jobs *jobs, struct sy_job *job)
{
    struct sy_job_part *part = &jobs->parts[job->local];
    int64_t begin = dl_now_ns();
    if (job->seed) {
        take_seed(jobs, job, part);
    } else {
        take_merged(jobs, job, part);
    }
    int64_t end = dl_now_ns();
    pthread_mutex_lock(&jobs->lock);
    job->parameters_hash = job->making->content_hash;
    job->parameters = part->theta; /* It may be the old one, when the merge changed nothing. */
    job->ready_bytes = part->padded * sizeof(float);
    job->merge_ns = end - begin;
    job->made_ns = end;
    job->made = true;
    pthread_cond_signal(&jobs->moved);
    pthread_mutex_unlock(&jobs->lock);
}

/* A version that is sent in one piece, or at once, is handed out with the job. A first state, too: nobody is to hear of a
 * part of it. NULL also when there is no memory, which costs time only. */
static struct sy_job *hand_out(const struct sy_jobs *jobs, const struct sy_job *job)
{
    bool can_begin = job->making->chunk_count > 1 && jobs->options.store != NULL && !job->seed;
    return can_begin ? sy_job_copy(job, SY_JOB_ENCODED) : NULL;
}

/* Beside the commit. The job is the commit thread's afterwards. */
static void give_blob(struct sy_jobs *jobs, struct sy_job *job)
{
    struct sy_job *early = hand_out(jobs, job);
    pthread_mutex_lock(&jobs->lock);
    bool is_early = early != NULL && !job->settled;
    if (is_early) { /* Before the job's own report. */
        early->blob = dl_take(job->making);
        sy_job_append(&jobs->results, early);
    }
    job->blob = dl_take(job->making);
    job->encoded = true;
    pthread_cond_signal(&jobs->moved);
    pthread_mutex_unlock(&jobs->lock);
    if (is_early) {
        jobs->wake(jobs->wake_context);
    } else {
        sy_job_free(early);
    }
}

static void do_round(struct sy_jobs *jobs, struct sy_job *job)
{
    const struct sy_job_part *part = &jobs->parts[job->local];
    const struct sy_blob_options options = {.fragment = job->fragment,
                                            .version = job->version,
                                            .round = sy_job_made_by(job),
                                            .participants = job->seed ? 0 : job->input_count,
                                            .codec = jobs->options.spec->sync.broadcast_compression};
    job->jobs = jobs;
    if (sy_blob_new(&options, part->padded, jobs->options.buffers, &job->making, &job->error) != DL_OK) {
        job->report = SY_JOB_FAILED;
        sy_jobs_post(jobs, job);
        return;
    }
    float *values = sy_blob_values(job->making);
    job->streams = jobs->options.store != NULL && part->padded * sizeof(float) >= SY_JOB_STREAM_BYTES_MIN;
    job->parameters = values != NULL ? values : jobs->spare;
    job->piece_bytes = sy_blob_piece_elements(job->making) * sizeof(float);
    job->gap_bytes = sy_blob_gap_elements(job->making) * sizeof(float);
    job->hash_is_given = values != NULL;
    if (job->streams) {
        hand_over(jobs, job);
        make_version(jobs, job);
    } else {
        make_version(jobs, job);
        hand_over(jobs, job);
    }
    give_blob(jobs, job);
}

void *sy_jobs_run_merges(void *context)
{
    struct sy_jobs *jobs = context;
    pthread_mutex_lock(&jobs->lock);
    while (!jobs->stop) {
        struct sy_job *job = sy_job_take(&jobs->queue);
        if (job == NULL) {
            pthread_cond_wait(&jobs->submitted, &jobs->lock);
            continue;
        }
        pthread_mutex_unlock(&jobs->lock);
        if (sy_job_is_round(job)) {
            do_round(jobs, job);
        } else {
            hand_over(jobs, job); /* In its place. */
        }
        pthread_mutex_lock(&jobs->lock);
    }
    pthread_mutex_unlock(&jobs->lock);
    return NULL;
}
