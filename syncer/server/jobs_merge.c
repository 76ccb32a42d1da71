/* The merge thread: makes new versions and encodes them. */
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

static void take_new_version(struct sy_jobs *jobs, struct sy_job_part *part)
{
    float *old = part->theta;
    part->theta = jobs->spare;
    jobs->spare = old;
}

static void take_seed(struct sy_jobs *jobs, const struct sy_job *job, struct sy_job_part *part)
{
    assert(job->input_count == 1 && job->inputs[0].codec == DL_CODEC_NONE);
    dl_codec_decode(DL_CODEC_NONE, job->inputs[0].encoded, part->padded / DL_BLOCK, jobs->spare);
    memset(part->state, 0, part->state_bytes);
    take_new_version(jobs, part);
}

static void tell_ready(void *context, uint64_t elements)
{
    struct sy_job *job = context;
    pthread_mutex_lock(&job->jobs->lock);
    job->ready_bytes = elements * sizeof(float);
    pthread_cond_signal(&job->jobs->moved);
    pthread_mutex_unlock(&job->jobs->lock);
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
    const struct sy_merge_job merge = {.fragment = job->fragment,
                                       .pushes = jobs->pushes,
                                       .push_count = job->input_count,
                                       .theta = part->theta,
                                       .theta_out = jobs->spare,
                                       .outer = &outer,
                                       .ready = job->streams ? tell_ready : NULL,
                                       .ready_context = job};
    enum dl_rc rc = sy_merge_run(jobs->merge, &jobs->options.spec->sync, &merge, &job->stats, &job->error);
    if (rc == DL_OK) {
        keep_steps(jobs, part, outer.steps);
        take_new_version(jobs, part);
    }
}

enum dl_rc sy_jobs_encode(struct sy_jobs *jobs, const struct sy_blob_options *options, const struct sy_job_part *part,
                          struct sy_blob **out, struct dl_err *err)
{
    return sy_blob_new(options, part->theta, part->padded, jobs->pool, jobs->options.buffers, out, err);
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
    job->parameters = part->theta; /* The old one still, when the merge changed nothing. */
    job->ready_bytes = part->padded * sizeof(float);
    job->merge_ns = end - begin;
    job->made_ns = end;
    job->made = true;
    pthread_cond_signal(&jobs->moved);
    pthread_mutex_unlock(&jobs->lock);
}

/* A version that is sent in one piece, or at once, is handed out with the job. A first state, too: nobody is to hear of a
 * part of it. NULL also when there is no memory, which costs time only. */
static struct sy_job *hand_out(const struct sy_jobs *jobs, const struct sy_job *job, const struct sy_blob *blob)
{
    bool can_begin = blob != NULL && blob->chunk_count > 1 && jobs->options.store != NULL && !job->seed;
    return can_begin ? sy_job_copy(job, SY_JOB_ENCODED) : NULL;
}

/* Beside the commit. The job is the commit thread's afterwards. */
static void encode_version(struct sy_jobs *jobs, struct sy_job *job)
{
    const struct sy_blob_options options = {.fragment = job->fragment,
                                            .version = job->version,
                                            .round = sy_job_made_by(job),
                                            .participants = job->seed ? 0 : job->input_count,
                                            .codec = jobs->options.spec->sync.broadcast_compression};
    struct sy_blob *blob = NULL;
    struct dl_err err = {.rc = DL_OK};
    int64_t begin = dl_now_ns();
    err.rc = sy_jobs_encode(jobs, &options, &jobs->parts[job->local], &blob, &err);
    int64_t end = dl_now_ns();
    struct sy_job *early = hand_out(jobs, job, blob);
    pthread_mutex_lock(&jobs->lock);
    bool is_early = early != NULL && !job->settled;
    if (is_early) { /* Before the job's own report. */
        early->blob = dl_take(blob);
        sy_job_append(&jobs->results, early);
    }
    job->blob = blob;
    job->encode_error = err;
    job->encode_ns = end - begin;
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
    job->jobs = jobs;
    job->streams = jobs->options.store != NULL && part->padded * sizeof(float) >= SY_JOB_STREAM_BYTES_MIN;
    job->parameters = jobs->spare;
    if (job->streams) {
        hand_over(jobs, job);
        make_version(jobs, job);
    } else {
        make_version(jobs, job);
        hand_over(jobs, job);
    }
    encode_version(jobs, job);
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
