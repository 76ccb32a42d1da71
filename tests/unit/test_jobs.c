/* sy_jobs: rounds through merge thread and commit thread, small and large, on a disk that works, is slow to and fails. */
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>

#include "common/codec.h"
#include "common/content.h"
#include "common/layout.h"
#include "syncer/server/jobs.h"
#include "tests/unit/store_rig.h"

#define FRAGMENTS 3
#define WAIT_MS 20000

/* A large fragment, whose file is written while it is merged, and two small ones. */
static const struct dl_tensor tensors[FRAGMENTS] = {{.name = "large", .rank = 2, .shape = {1500, 1024}},
                                                    {.name = "small", .rank = 2, .shape = {30, 100}},
                                                    {.name = "smaller", .rank = 1, .shape = {77}}};
/* The first two are sent in several chunks, but committed together once they are merged. */
static const struct dl_tensor medium[FRAGMENTS] = {{.name = "medium", .rank = 2, .shape = {600, 1024}},
                                                   {.name = "even", .rank = 2, .shape = {512, 1024}},
                                                   {.name = "chunk", .rank = 2, .shape = {256, 1024}}};

struct rig {
    struct dl_layout *layout;
    struct dl_spec spec;
    struct sy_buffers *buffers;
    struct sy_store *store;
    struct sy_jobs *jobs;
    atomic_uint woken;
    uint8_t *encoded[FRAGMENTS][2];
    double *squares;
    struct sy_blob *early[FRAGMENTS]; /* Handed out before it was durable. */
    uint32_t early_count;
};

static void wake(void *context)
{
    struct rig *rig = context;
    atomic_fetch_add(&rig->woken, 1);
}

static void open_jobs(struct rig *rig, bool durable)
{
    struct dl_err err = {.text = ""};
    rig->store = durable ? reopen(NULL) : NULL;
    const struct sy_jobs_options options = {
        .spec = &rig->spec, .fragment_count = FRAGMENTS, .threads = 3, .store = rig->store, .buffers = rig->buffers};
    CU_ASSERT_EQUAL_FATAL(sy_jobs_new(&options, &rig->jobs, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(sy_jobs_set_layout(rig->jobs, rig->layout, &err), DL_OK);
}

static void start_jobs(struct rig *rig)
{
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_jobs_start(rig->jobs, wake, rig, &err), DL_OK);
}

static void close_jobs(struct rig *rig)
{
    sy_jobs_stop(rig->jobs);
    sy_store_close(rig->store);
}

static void rig_init_of(struct rig *rig, enum dl_codec broadcast, const struct dl_tensor *of)
{
    *rig = (struct rig){.buffers = sy_buffers_new()};
    CU_ASSERT_EQUAL_FATAL(dl_layout_new(of, FRAGMENTS, FRAGMENTS, DL_LAYOUT_TENSOR, &rig->layout, NULL), DL_OK);
    rig->spec.syncer.shards = 1;
    rig->spec.learners.max = 4;
    rig->spec.sync.fragments = FRAGMENTS;
    rig->spec.sync.broadcast_compression = broadcast;
    rig->spec.sync.outer.type = DL_OUTER_NESTEROV;
    rig->spec.sync.outer.learning_rate = 0.5;
    rig->spec.sync.outer.momentum = 0.9;
    rig->spec.sync.merge.method = DL_MERGE_RDA;
    rig->squares = calloc(16, sizeof *rig->squares);
    for (uint32_t f = 0; f < FRAGMENTS; f++) {
        uint64_t padded = rig->layout->fragments[f].padded_elements;
        for (uint32_t m = 0; m < 2; m++) {
            float *values = dl_alloc_aligned(padded * sizeof(float));
            for (uint64_t i = 0; i < padded; i++) {
                values[i] = (float)((i * (7 + m) + f) % 1000) * 1e-3f - 0.4f;
            }
            rig->encoded[f][m] = (uint8_t *)values;
        }
    }
    for (int i = 0; i < 16; i++) {
        rig->squares[i] = 2.0;
    }
}

static void rig_init(struct rig *rig, enum dl_codec broadcast)
{
    rig_init_of(rig, broadcast, tensors);
}

static void rig_release(struct rig *rig)
{
    for (uint32_t f = 0; f < FRAGMENTS; f++) {
        free(rig->encoded[f][0]);
        free(rig->encoded[f][1]);
    }
    free(rig->squares);
    sy_buffers_free(rig->buffers);
    dl_layout_free(rig->layout);
}

/* Version 1 is a first state, others are rounds of two learners; `weight` 0: a round that changes nothing. */
static void submit(struct rig *rig, uint32_t fragment, uint64_t version, double weight)
{
    struct sy_job *job = sy_job_new(version == 1 ? 1 : 2);
    CU_ASSERT_PTR_NOT_NULL_FATAL(job);
    job->local = job->fragment = fragment;
    job->version = version;
    job->round = version * 10;
    job->seed = version == 1;
    job->totals.rounds_merged = version;
    for (uint32_t i = 0; i < job->input_count; i++) {
        struct sy_job_input *input = &job->inputs[i];
        input->codec = DL_CODEC_NONE;
        input->encoded = rig->encoded[fragment][i];
        input->slice_squares = rig->squares;
        input->who = (struct sy_store_participant){.learner = i, .admission = i + 1, .steps = 1, .weight = weight};
        snprintf(input->who.uid, sizeof input->who.uid, "u%u", i);
    }
    sy_jobs_submit(rig->jobs, job);
}

/* The next report; bounded. */
static struct sy_job *next_result(struct rig *rig)
{
    struct sy_job *job = sy_jobs_result(rig->jobs);
    for (int i = 0; job == NULL && i < WAIT_MS; i++) {
        poll(NULL, 0, 1);
        job = sy_jobs_result(rig->jobs);
    }
    CU_ASSERT_PTR_NOT_NULL_FATAL(job);
    return job;
}

/* The content hash of a blob is that of its bytes, whoever took it. */
static void check_blob(const struct sy_blob *blob)
{
    DL_AUTO_FREE uint8_t *joined = malloc(blob->bytes);
    uint64_t at = 0;
    for (uint32_t i = 0; i < blob->chunk_count; i++) {
        size_t size;
        const uint8_t *frame = sy_blob_frame(blob, i, &size);
        size_t data = size - DL_WIRE_HEADER_BYTES - DL_WIRE_CHUNK_PREFIX_BYTES;
        memcpy(joined + at, frame + size - data, data);
        at += data;
    }
    CU_ASSERT_EQUAL(at, blob->bytes);
    CU_ASSERT_EQUAL(dl_content_hash(joined, at), blob->content_hash);
}

/* Of a round of several chunks, and before the job itself. */
static void take_early(struct rig *rig, struct sy_job *job)
{
    CU_ASSERT_PTR_NOT_NULL_FATAL(job->blob);
    CU_ASSERT_PTR_NULL(rig->early[job->fragment]);
    CU_ASSERT(job->blob->chunk_count > 1 && job->version > 1 && job->blob->version == job->version);
    CU_ASSERT_EQUAL(job->input_count, 0);
    check_blob(job->blob);
    rig->early[job->fragment] = dl_take(job->blob);
    rig->early_count++;
}

/* Takes `count` results; hashes[fragment] is the last one's. Returns how many delays were reported. */
static uint32_t take_results(struct rig *rig, uint32_t count, uint64_t hashes[FRAGMENTS])
{
    uint32_t delays = 0;
    while (count > 0) {
        struct sy_job *job = next_result(rig);
        if (job->report == SY_JOB_DELAYED) {
            delays++;
            fail_at = 0; /* There is room again. */
        } else if (job->report == SY_JOB_ENCODED) {
            take_early(rig, job);
        } else {
            CU_ASSERT_EQUAL_FATAL(job->report, SY_JOB_DONE);
            /* Once, and the same whichever way. */
            CU_ASSERT_FATAL((job->blob == NULL) != (rig->early[job->fragment] == NULL));
            struct sy_blob *blob = job->blob != NULL ? dl_take(job->blob) : dl_take(rig->early[job->fragment]);
            check_blob(blob);
            CU_ASSERT_EQUAL(blob->version, job->version);
            CU_ASSERT(job->merge_ns > 0 && job->held_ns >= job->commit_ns);
            hashes[job->fragment] = blob->content_hash;
            sy_blob_drop(blob);
            count--;
        }
        sy_job_free(job);
    }
    return delays;
}

/* What a new process restores is what was broadcast. */
static void check_restored(struct rig *rig, const uint64_t hashes[FRAGMENTS])
{
    open_jobs(rig, true);
    for (uint32_t f = 0; f < FRAGMENTS; f++) {
        struct sy_blob *blob = NULL;
        struct dl_err err;
        char damage[DL_ERR_TEXT_MAX];
        CU_ASSERT_EQUAL_FATAL(sy_jobs_restore(rig->jobs, f, &blob, damage, &err), DL_OK);
        CU_ASSERT_EQUAL(blob->content_hash, hashes[f]);
        sy_blob_drop(blob);
    }
    close_jobs(rig);
}

static void run_rounds(struct rig *rig, uint64_t hashes[FRAGMENTS])
{
    start_jobs(rig);
    for (uint64_t version = 1; version <= 4; version++) { /* All fragments' rounds at once, then the next ones. */
        for (uint32_t f = 0; f < FRAGMENTS; f++) {
            submit(rig, f, version, version == 3 ? 0 : 1);
        }
        (void)take_results(rig, FRAGMENTS, hashes);
    }
    CU_ASSERT(atomic_load(&rig->woken) >= 4 * FRAGMENTS);
    close_jobs(rig);
}

/* Durable or not: the same versions; and a round whose pushes weigh nothing is a version, too. */
static void test_rounds(void)
{
    static const enum dl_codec codecs[] = {DL_CODEC_NONE, DL_CODEC_BF16, DL_CODEC_INT4};
    for (size_t c = 0; c < 2 * DL_COUNT_OF(codecs); c++) {
        struct rig rig;
        uint64_t hashes[FRAGMENTS], in_memory[FRAGMENTS];
        new_dir();
        rig_init_of(&rig, codecs[c / 2], c % 2 == 0 ? tensors : medium);
        open_jobs(&rig, true);
        run_rounds(&rig, hashes);
        check_restored(&rig, hashes);
        open_jobs(&rig, false);
        uint32_t early = rig.early_count;
        run_rounds(&rig, in_memory);
        CU_ASSERT_EQUAL(rig.early_count, early); /* Nothing to wait for. */
        CU_ASSERT_EQUAL(memcmp(hashes, in_memory, sizeof hashes), 0);
        rig_release(&rig);
        remove_dir();
    }
}

/* One round of fragment 0; the caller's reference. */
static struct sy_blob *next_version(struct rig *rig, uint64_t version)
{
    submit(rig, 0, version, 1);
    struct sy_job *job = next_result(rig);
    CU_ASSERT_EQUAL_FATAL(job->report, SY_JOB_DONE);
    struct sy_blob *blob = dl_take(job->blob);
    sy_job_free(job);
    return blob;
}

/* A float32 version is what is sent, once: it stays as it was while new ones are made, and its memory is used again when
 * nobody is sent it any more. */
static void test_version_is_what_is_sent(void)
{
    struct rig rig;
    rig_init(&rig, DL_CODEC_NONE);
    open_jobs(&rig, false);
    start_jobs(&rig);
    sy_blob_drop(next_version(&rig, 1));
    struct sy_blob *slow = next_version(&rig, 2), *old = sy_blob_hold(slow);
    const void *memory[5];
    for (uint64_t version = 3; version <= 7; version++) {
        struct sy_blob *blob = next_version(&rig, version);
        CU_ASSERT_EQUAL(atomic_load(&blob->references), 2); /* The next merge reads it. */
        CU_ASSERT_EQUAL(atomic_load(&old->references), old == slow ? 2 : 1);
        check_blob(old);
        memory[version - 3] = blob->memory;
        sy_blob_drop(old);
        old = blob;
    }
    CU_ASSERT(memory[0] != slow->memory && memory[1] != slow->memory);
    CU_ASSERT_EQUAL(memory[2], memory[0]);
    CU_ASSERT_EQUAL(memory[3], memory[1]);
    CU_ASSERT_EQUAL(memory[4], memory[0]);
    check_blob(slow);
    sy_blob_drop(slow);
    close_jobs(&rig);
    check_blob(old);
    sy_blob_drop(old);
    rig_release(&rig);
}

/* S1, S4: each operation fails in turn while a large version is written beside its merge; the commit is made in the end, with
 * what had been merged, and the rounds of others wait behind it in order. */
static void test_failing_disk(void)
{
    uint32_t delayed = 0;
    bool undisturbed = false;
    struct rig rig;
    rig_init(&rig, DL_CODEC_NONE);
    for (long n = 1; n < 200 && !undisturbed; n += n < 12 ? 1 : 3) {
        uint64_t hashes[FRAGMENTS];
        new_dir();
        open_jobs(&rig, true);
        start_jobs(&rig);
        for (uint32_t f = 0; f < FRAGMENTS; f++) {
            submit(&rig, f, 1, 1);
        }
        CU_ASSERT_EQUAL(take_results(&rig, FRAGMENTS, hashes), 0);
        fail_from(n, ENOSPC);
        for (uint32_t f = 0; f < FRAGMENTS; f++) {
            submit(&rig, f, 2, 1);
        }
        delayed += take_results(&rig, FRAGMENTS, hashes) > 0 ? 1 : 0;
        undisturbed = !fail_no_more();
        close_jobs(&rig);
        check_restored(&rig, hashes);
        CU_ASSERT_EQUAL(count_files(".bin"), 2 * FRAGMENTS);
        remove_dir();
    }
    CU_ASSERT(undisturbed && delayed > 5);
    rig_release(&rig);
}

/* Q7, S1: while the disk stands still a version of several chunks is there to be sent, but for its end, and it is not reported
 * as durable; small ones and first states are not there at all. */
static void test_handed_out_before_durable(void)
{
    struct rig rig;
    uint64_t hashes[FRAGMENTS];
    new_dir();
    rig_init(&rig, DL_CODEC_NONE);
    open_jobs(&rig, true);
    start_jobs(&rig);
    for (uint64_t version = 1; version <= 3; version++) {
        stalled = true;
        for (uint32_t f = 0; f < FRAGMENTS; f++) {
            submit(&rig, f, version, 1);
        }
        if (version > 1) {
            struct sy_job *early = next_result(&rig);
            CU_ASSERT_EQUAL_FATAL(early->report, SY_JOB_ENCODED);
            CU_ASSERT_EQUAL(early->fragment, 0);
            take_early(&rig, early);
            sy_job_free(early);
        }
        poll(NULL, 0, 50); /* Nothing else comes; were it late, the next line would find less than it could. */
        CU_ASSERT_PTR_NULL(sy_jobs_result(rig.jobs));
        stalled = false;
        (void)take_results(&rig, FRAGMENTS, hashes);
        CU_ASSERT_EQUAL(rig.early_count, version - 1);
    }
    close_jobs(&rig);
    check_restored(&rig, hashes);
    rig_release(&rig);
    remove_dir();
}

/* The end comes at any time: while a version is merged, written, waits for room. */
static void test_stop_at_any_time(void)
{
    struct rig rig;
    rig_init(&rig, DL_CODEC_NONE);
    for (long n = 0; n < 12; n++) {
        new_dir();
        open_jobs(&rig, true);
        start_jobs(&rig);
        fail_from(n % 2 == 0 ? 0 : n, ENOSPC);
        for (uint32_t f = 0; f < FRAGMENTS; f++) {
            submit(&rig, f, 1, 1);
        }
        if (n > 5) {
            poll(NULL, 0, (int)n);
        }
        sy_jobs_stop(rig.jobs);
        fail_at = 0;
        sy_store_close(rig.store);
        struct sy_store *store = reopen(NULL); /* Whatever was committed is whole. */
        struct sy_store_version newest;
        struct dl_err err;
        uint32_t there = 0;
        for (uint32_t f = 0; f < FRAGMENTS; f++) {
            there += sy_store_newest(store, f, &newest, &err) == DL_OK ? 1 : 0;
        }
        CU_ASSERT_EQUAL(count_files(".bin"), there);
        sy_store_close(store);
        remove_dir();
    }
    rig_release(&rig);
}

UNIT_MAIN("jobs", {"rounds", test_rounds}, {"version is what is sent", test_version_is_what_is_sent},
          {"S1 S4 failing disk", test_failing_disk},
          {"Q7 S1 handed out before durable", test_handed_out_before_durable},
          {"stop at any time", test_stop_at_any_time})
