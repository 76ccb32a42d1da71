/* The library end to end, over loopback, against a scripted syncer of raw sockets (fake_syncer.h).
 *
 * The trainer's step adds 1 to every parameter, so a fragment of Theta always holds its initial values plus the number
 * of steps merged into it: lost and doubled pushes show as plain numbers. */
#include <math.h>
#include <time.h>

#include "common/clock.h"
#include "common/rng.h"
#include "tests/unit/fake_syncer.h"
#include "tests/unit/fake_tls.h"
#include "tests/unit/unit.h"
#include "worker/link/diloco.h"

#define PATIENCE_NS                                                                                                    \
    (60 * DL_NS_PER_SECOND) /* Nothing here takes nearly as long; it only turns a hang into a failure. */

enum { TENSORS = 4 };
static const uint64_t shapes[TENSORS][2] = {{50, 16}, {40, 33}, {700, 1}, {300, 1000}};
static const char *const names[TENSORS] = {"embed", "w.1", "norm", "w.2"};

struct trainer {
    struct diloco *d;
    float *data[TENSORS];
    struct diloco_info info;
    struct diloco_error error;
    int level_seen[4];
};

static uint64_t elements_of(int i)
{
    return shapes[i][0] * shapes[i][1];
}

static float initial(int tensor, uint64_t index)
{
    return (float)((index * 7 + (uint64_t)tensor) % 61);
}

static void count_lines(void *context, int level, const char *line)
{
    struct trainer *trainer = context;
    CU_ASSERT_FATAL(level >= 0 && level <= 3 && line[0] != 0);
    __atomic_add_fetch(&trainer->level_seen[level], 1, __ATOMIC_RELAXED);
    if (getenv("VERBOSE") != NULL) {
        fprintf(stderr, "%d %s\n", level, line);
    }
}

static void open_trainer_to(struct trainer *trainer, const char *endpoints, struct diloco_options options)
{
    options.struct_size = sizeof options;
    options.job = options.job == NULL ? "demo" : options.job;
    options.endpoints = endpoints;
    options.log = count_lines;
    options.log_context = trainer;
    CU_ASSERT_EQUAL_FATAL(diloco_open(&options, &trainer->d, &trainer->error), DILOCO_CONTINUE);
    for (int i = 0; i < TENSORS; i++) {
        trainer->data[i] = malloc(elements_of(i) * sizeof(float));
        for (uint64_t k = 0; k < elements_of(i); k++) {
            trainer->data[i][k] = initial(i, k);
        }
        int rank = shapes[i][1] == 1 ? 1 : 2;
        CU_ASSERT_EQUAL_FATAL(diloco_register(trainer->d, names[i], trainer->data[i], rank, shapes[i],
                                              i == 0 ? DILOCO_EMBEDDING : DILOCO_WEIGHT, (uint32_t)i, &trainer->error),
                              DILOCO_CONTINUE);
    }
}

static void open_trainer(struct trainer *trainer, const struct fake_syncer *syncer, struct diloco_options options)
{
    char endpoint[64];
    snprintf(endpoint, sizeof endpoint, "%s://127.0.0.1:%u", syncer->tls != NULL ? "wss" : "ws", syncer->port);
    open_trainer_to(trainer, endpoint, options);
}

#define ANY_LEARNER ((struct diloco_options){.learner = -1, .join_timeout_seconds = 30})

static int join(struct trainer *trainer)
{
    return diloco_join(trainer->d, &trainer->info, &trainer->error);
}

static int step(struct trainer *trainer)
{
    for (int i = 0; i < TENSORS; i++) {
        for (uint64_t k = 0; k < elements_of(i); k++) {
            trainer->data[i][k] += 1.0f;
        }
    }
    return diloco_step(trainer->d, 10, 2.5f, &trainer->info, &trainer->error);
}

static void close_trainer(struct trainer *trainer)
{
    diloco_close(trainer->d);
    for (int i = 0; i < TENSORS; i++) {
        free(trainer->data[i]);
    }
}

/* Waits for something to happen at the syncer, a millisecond at most: a trainer's step takes its time, too. */
static void breathe(struct fake_syncer *syncer)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += DL_NS_PER_MS;
    until.tv_sec += until.tv_nsec / DL_NS_PER_SECOND;
    until.tv_nsec %= DL_NS_PER_SECOND;
    pthread_mutex_lock(&syncer->lock);
    pthread_cond_timedwait(&syncer->changed, &syncer->lock, &until);
    pthread_mutex_unlock(&syncer->lock);
}

/* Reads one of the syncer's counters. */
static uint64_t peek(struct fake_syncer *syncer, const uint64_t *counter)
{
    pthread_mutex_lock(&syncer->lock);
    uint64_t value = *counter;
    pthread_mutex_unlock(&syncer->lock);
    return value;
}

/* Trains until `counter` reaches `value`. */
static void train_until(struct trainer *trainer, struct fake_syncer *syncer, const uint64_t *counter, uint64_t value)
{
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (peek(syncer, counter) < value) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        CU_ASSERT_EQUAL_FATAL(step(trainer), DILOCO_CONTINUE);
        breathe(syncer);
    }
}

static int train_to_the_end(struct trainer *trainer, struct fake_syncer *syncer)
{
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    int result;
    while ((result = step(trainer)) == DILOCO_CONTINUE) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        breathe(syncer);
    }
    return result;
}

/* Theta holds initial values plus the steps merged, exactly those that were counted; nothing was merged twice or lost.
 */
static void check_theta(struct fake_syncer *syncer, float tolerance)
{
    uint64_t in_theta = 0;
    pthread_mutex_lock(&syncer->lock);
    FAKE_FOR_SHARD(syncer, p)
    {
        const struct dl_fragment *fragment = &syncer->layout->fragments[p];
        float merged = NAN;
        for (uint32_t s = 0; s < fragment->slice_count; s++) {
            const struct dl_slice *slice = &syncer->layout->slices[fragment->first_slice + s];
            for (uint64_t k = 0; k < slice->count; k++) {
                float was = initial((int)slice->tensor, slice->tensor_offset + k);
                float now = syncer->theta[p][slice->fragment_offset + k];
                merged = isnan(merged) ? roundf(now - was) : merged;
                CU_ASSERT_FATAL(fabsf(now - was - merged) <= tolerance);
            }
        }
        in_theta += (uint64_t)merged;
    }
    CU_ASSERT_EQUAL(in_theta, syncer->steps_merged);
    pthread_mutex_unlock(&syncer->lock);
}

/* Every parameter that this shard holds is what the learner holds. */
static void check_adopted(const struct trainer *trainer, struct fake_syncer *syncer)
{
    pthread_mutex_lock(&syncer->lock);
    uint64_t different = 0, compared = 0;
    FAKE_FOR_SHARD(syncer, p)
    {
        const struct dl_fragment *fragment = &syncer->layout->fragments[p];
        for (uint32_t s = 0; s < fragment->slice_count; s++) {
            const struct dl_slice *slice = &syncer->layout->slices[fragment->first_slice + s];
            const float *ours = trainer->data[slice->tensor] + slice->tensor_offset;
            for (uint64_t k = 0; k < slice->count; k++) {
                different += ours[k] != syncer->theta[p][slice->fragment_offset + k];
                compared++;
            }
        }
    }
    pthread_mutex_unlock(&syncer->lock);
    CU_ASSERT(compared > 0);
    CU_ASSERT_EQUAL(different, 0);
}

/* After the last merge everything waits for its boundary: one more step adopts it, and its own increment is
 * overwritten. */
static void finish(struct trainer *trainer, struct fake_syncer *syncer)
{
    pthread_mutex_lock(&syncer->lock);
    syncer->interval = 0; /* No more rounds. */
    pthread_mutex_unlock(&syncer->lock);
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    bool settled = false;
    while (!settled) { /* Until META tells that every version has been adopted, in a frame that came after. */
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        CU_ASSERT_EQUAL_FATAL(step(trainer), DILOCO_CONTINUE);
        breathe(syncer);
        pthread_mutex_lock(&syncer->lock);
        settled = syncer->last_meta.fragment_count > 0;
        for (uint32_t i = 0; i < syncer->last_meta.fragment_count; i++) {
            const struct dl_wire_fragment *fragment = &syncer->last_meta.fragments[i];
            settled = settled && fragment->version == syncer->version[fragment->fragment];
        }
        for (uint32_t i = 0; i < syncer->conn_count; i++) {
            for (uint32_t p = 0; p < DL_SPEC_FRAGMENTS_MAX; p++) {
                settled = settled && !(syncer->conns[i].fd >= 0 && syncer->conns[i].asked[p]);
            }
        }
        pthread_mutex_unlock(&syncer->lock);
    }
}

/* --- the ordinary way
 * ------------------------------------------------------------------------------------------------- */

static void run_ordinary(struct fake_syncer *syncer, float tolerance)
{
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(trainer.info.learner, 3);
    CU_ASSERT_EQUAL(trainer.info.connected_shards, 1);
    CU_ASSERT_EQUAL(trainer.info.updates_total, syncer->fragments);
    CU_ASSERT_EQUAL(trainer.info.tokens_all, 1000);
    check_adopted(&trainer, syncer); /* Version 1 is what this learner held. */
    train_until(&trainer, syncer, &syncer->pushes_merged, 4 * syncer->fragments);
    finish(&trainer, syncer);
    check_theta(syncer, tolerance);
    fake_stop(syncer, DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_DONE);
    CU_ASSERT(trainer.info.updates_total >= 5 * syncer->fragments);
    CU_ASSERT(trainer.info.pushes_total >= 4 * syncer->fragments);
    uint64_t told = peek(syncer, &syncer->last_meta.tokens);
    CU_ASSERT(told > 0 && told % 10 == 0 && told <= trainer.info.step * 10);
    CU_ASSERT(trainer.info.bytes_sent > 1000 && trainer.info.bytes_received > 1000);
    CU_ASSERT_EQUAL(step(&trainer), DILOCO_DONE); /* And stays so. */
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_join_seed_train_stop(void)
{
    struct fake_syncer *syncer = fake_new(5);
    run_ordinary(syncer, 0);
}

static void test_every_codec(void)
{
    for (int codec = DL_CODEC_BF16; codec <= DL_CODEC_INT4; codec++) {
        struct fake_syncer *syncer = fake_new(3);
        syncer->compression = (enum dl_codec)codec;
        run_ordinary(syncer, codec == DL_CODEC_BF16 ? 0.0f : 0.01f);
    }
}

static void test_frames_in_pieces_with_pings_between(void)
{
    struct fake_syncer *syncer = fake_new(1); /* One fragment of 1.2 MB: several chunks. */
    syncer->split = true;
    run_ordinary(syncer, 0);
}

static void test_bfloat16_broadcast_is_adopted(void)
{
    struct fake_syncer *syncer = fake_new(3);
    syncer->broadcast = DL_CODEC_BF16;
    syncer->interval = 1;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    check_adopted(&trainer, syncer); /* Whole numbers below 256 are exact in bfloat16. */
    train_until(&trainer, syncer, &syncer->pushes_merged, 6);
    close_trainer(&trainer);
    CU_ASSERT_EQUAL(peek(syncer, &syncer->goodbyes), 1);
    fake_free(syncer);
}

/* --- trouble
 * ---------------------------------------------------------------------------------------------------------- */

static void test_hundred_disconnects_lose_and_double_nothing(void)
{
    struct fake_syncer *syncer = fake_new(4);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    struct dl_rng rng;
    dl_rng_init(&rng, 5, dl_rng_stream("disconnects", 0, 0));
    int64_t give_up_ns = dl_now_ns() + 2 * PATIENCE_NS;
    while (peek(syncer, &syncer->cut) < 100) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        uint64_t metas = peek(syncer, &syncer->metas) + dl_rng_below(&rng, 8);
        train_until(&trainer, syncer, &syncer->metas, metas);
        if (dl_rng_below(&rng, 2) == 0) {
            fake_cut_all(syncer);
        } else { /* In the middle of a push. */
            pthread_mutex_lock(&syncer->lock);
            syncer->push_cut = 1 + (uint32_t)dl_rng_below(&rng, 3);
            pthread_mutex_unlock(&syncer->lock);
        }
    }
    pthread_mutex_lock(&syncer->lock);
    syncer->push_cut = 0;
    uint64_t more = syncer->pushes_merged + 8;
    pthread_mutex_unlock(&syncer->lock);
    train_until(&trainer, syncer, &syncer->pushes_merged, more);
    finish(&trainer, syncer);
    check_theta(syncer, 0);
    CU_ASSERT(peek(syncer, &syncer->hellos) > 50);
    CU_ASSERT(trainer.level_seen[2] > 10); /* Every loss is a warning in the log. */
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_syncer_down_for_a_while(void)
{
    struct fake_syncer *syncer = fake_new(4);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 4);
    fake_down(syncer);
    int64_t until_ns = dl_now_ns() + 300 * DL_NS_PER_MS;
    uint64_t steps = 0;
    do { /* Trains on, and no step waits. */
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        CU_ASSERT_FATAL(trainer.info.waited_seconds == 0);
        steps++;
    } while (steps < 2 || dl_now_ns() < until_ns || trainer.info.connected_shards != 0);
    syncer->epoch++;
    fake_listen(syncer);
    train_until(&trainer, syncer, &syncer->pushes_merged, syncer->pushes_merged + 4);
    CU_ASSERT(peek(syncer, &syncer->last_hello.step) >= steps);
    finish(&trainer, syncer);
    check_theta(syncer, 0);
    fake_stop(syncer, DL_STOP_REQUESTED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_STOPPED);
    close_trainer(&trainer);
    fake_free(syncer);
}

/* The volume was lost as well: the new syncer knows nothing, and is seeded from what the learner holds. */
static void test_syncer_that_lost_its_state_is_seeded_again(void)
{
    struct fake_syncer *syncer = fake_new(4);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 8);
    finish(&trainer, syncer);
    float before[DL_SPEC_FRAGMENTS_MAX];
    fake_down(syncer);
    FAKE_FOR_SHARD(syncer, p)
    {
        before[p] = syncer->theta[p][0];
        memset(syncer->theta[p], 0, syncer->layout->fragments[p].padded_elements * sizeof(float));
        syncer->version[p] = 0;
    }
    syncer->epoch++;
    fake_listen(syncer);
    train_until(&trainer, syncer, &syncer->version[3], 1);
    train_until(&trainer, syncer, &syncer->version[0], 1);
    FAKE_FOR_SHARD(syncer, p)
    {
        CU_ASSERT_EQUAL(syncer->theta[p][0], before[p]); /* The last version that all agreed on. */
    }
    syncer->interval = 2;
    train_until(&trainer, syncer, &syncer->version[0], 2); /* And on it goes. */
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_half_open_connection_is_noticed(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->heartbeat_ms = 20;
    syncer->timeout_ms = 200;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 2);
    pthread_mutex_lock(&syncer->lock);
    syncer->mute = true;
    uint32_t before = syncer->conn_count;
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (syncer->conn_count == before) {
        pthread_mutex_unlock(&syncer->lock);
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        breathe(syncer);
        pthread_mutex_lock(&syncer->lock);
    }
    syncer->mute = false;
    pthread_cond_broadcast(&syncer->changed);
    uint64_t more = syncer->pushes_merged + 2;
    pthread_mutex_unlock(&syncer->lock);
    train_until(&trainer, syncer, &syncer->pushes_merged, more);
    finish(&trainer, syncer);
    check_theta(syncer, 0);
    close_trainer(&trainer);
    fake_free(syncer);
}

/* While the trainer computes for long, the library's thread answers for it. */
static void test_heartbeats_while_the_trainer_computes(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->heartbeat_ms = 10;
    syncer->timeout_ms = 2000;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (peek(syncer, &syncer->heartbeats) < 20) { /* This trainer is in the middle of a step. */
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        breathe(syncer);
    }
    CU_ASSERT(peek(syncer, &syncer->metas) <= 1); /* No boundary, no META but that of the join. */
    CU_ASSERT_EQUAL(peek(syncer, &syncer->hellos), 1);
    CU_ASSERT_EQUAL(step(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(trainer.info.ensemble_step, 40); /* As the syncer's heartbeats say. */
    CU_ASSERT_EQUAL(trainer.info.tokens_all, 2000);
    close_trainer(&trainer);
    fake_free(syncer);
}

/* --- refusals
 * --------------------------------------------------------------------------------------------------------- */

static void expect_refused(struct fake_syncer *syncer, struct diloco_options options, int code, const char *text)
{
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, options);
    CU_ASSERT_EQUAL(join(&trainer), code);
    CU_ASSERT_EQUAL(trainer.error.code, code);
    CU_ASSERT_PTR_NOT_NULL(strstr(trainer.error.text, text));
    if (strstr(trainer.error.text, text) == NULL) {
        fprintf(stderr, "\"%s\" is not in \"%s\"\n", text, trainer.error.text);
    }
    CU_ASSERT_EQUAL(diloco_step(trainer.d, 1, 0, NULL, NULL), code == DILOCO_ETIMEOUT ? DILOCO_EINVAL : code);
    close_trainer(&trainer);
}

static void test_wrong_token_is_refused(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->token = "right";
    fake_listen(syncer);
    struct diloco_options options = ANY_LEARNER;
    options.token = "wrong";
    expect_refused(syncer, options, DILOCO_EREFUSED, "401: wrong token.");
    options.token = NULL;
    expect_refused(syncer, options, DILOCO_EREFUSED, "check the token");
    CU_ASSERT_EQUAL(peek(syncer, &syncer->unauthorized), 2);
    CU_ASSERT_EQUAL(peek(syncer, &syncer->hellos), 0);
    options.token = "right";
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, options);
    CU_ASSERT_EQUAL(join(&trainer), DILOCO_CONTINUE);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_other_layout_is_refused_naming_both(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->wrong_layout = 1;
    fake_listen(syncer);
    expect_refused(syncer, ANY_LEARNER, DILOCO_EREFUSED, "layouts differ");
    syncer->refuse = DL_REFUSE_LAYOUT;
    expect_refused(syncer, ANY_LEARNER, DILOCO_EREFUSED, "shard 0 refused this learner: scripted");
    syncer->refuse = DL_REFUSE_JOB;
    expect_refused(syncer, ANY_LEARNER, DILOCO_EREFUSED, "scripted");
    syncer->refuse = DL_REFUSE_FINISHED;
    expect_refused(syncer, ANY_LEARNER, DILOCO_STOPPED, "stop");
    fake_free(syncer);
}

static void *admit_third(void *argument)
{
    struct fake_syncer *syncer = argument;
    pthread_mutex_lock(&syncer->lock);
    while (syncer->hellos < 3) {
        pthread_cond_wait(&syncer->changed, &syncer->lock);
    }
    syncer->refuse = 0;
    pthread_mutex_unlock(&syncer->lock);
    return NULL;
}

static void test_a_full_ensemble_is_asked_again(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->refuse = DL_REFUSE_FULL;
    fake_listen(syncer);
    pthread_t thread;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, admit_third, syncer), 0);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL(join(&trainer), DILOCO_CONTINUE);
    pthread_join(thread, NULL);
    CU_ASSERT(peek(syncer, &syncer->hellos) >= 4);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_nobody_there_is_a_timeout_that_says_why(void)
{
    struct fake_syncer *syncer = fake_new(2);
    fake_listen(syncer);
    fake_down(syncer); /* A port at which nobody listens. */
    struct diloco_options options = ANY_LEARNER;
    options.join_timeout_seconds = 0.3;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "Connection refused");
    fake_listen(syncer);
    syncer->turn_away = true;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "0 of 1 shards connected");
    fake_free(syncer);
}

static void *come_up_late(void *argument)
{
    struct fake_syncer *syncer = argument;
    struct timespec pause = {.tv_nsec = 200 * DL_NS_PER_MS}; /* Just so that the first attempts fail. */
    nanosleep(&pause, NULL);
    fake_listen(syncer);
    return NULL;
}

static void test_join_before_the_syncer_is_up(void)
{
    struct fake_syncer *syncer = fake_new(2);
    fake_listen(syncer);
    fake_down(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    pthread_t thread;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, come_up_late, syncer), 0);
    CU_ASSERT_EQUAL(join(&trainer), DILOCO_CONTINUE);
    pthread_join(thread, NULL);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_failed_job_is_reported(void)
{
    struct fake_syncer *syncer = fake_new(2);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    fake_stop(syncer, DL_STOP_FAILED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_EFAILED);
    CU_ASSERT_PTR_NOT_NULL(strstr(trainer.error.text, "scripted stop"));
    close_trainer(&trainer);
    fake_free(syncer);
}

/* --- waiting
 * ---------------------------------------------------------------------------------------------------------- */

/* The synchronous form: no step between a push and its update, so a merge every second step exactly. */
static void test_synchronous_learner_waits_for_pull_and_update(void)
{
    struct fake_syncer *syncer = fake_new(3);
    syncer->pull_within = 2;
    syncer->update_within = 0;
    syncer->wait_ms = 60000;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 3); /* From the first pull on it is in step. */
    uint64_t steps = trainer.info.step, merged = peek(syncer, &syncer->version[0]);
    double waited = 0;
    for (int i = 0; i < 20; i++) {
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        waited += trainer.info.waited_seconds;
    }
    CU_ASSERT_EQUAL(trainer.info.step, steps + 20);
    uint64_t rounds = peek(syncer, &syncer->version[0]) - merged;
    CU_ASSERT(rounds >= 9 && rounds <= 11);
    CU_ASSERT(waited > 0);
    CU_ASSERT(peek(syncer, &syncer->last_meta.waited_ns) > 0);
    check_theta(syncer, 0);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_a_wait_is_bounded_and_ends_with_the_connection(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->update_within = 0;
    syncer->wait_ms = 30;
    syncer->drop_pushes = true; /* No update will ever come. */
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    pthread_mutex_lock(&syncer->lock);
    syncer->drop_pushes = false; /* But for the first state. */
    pthread_mutex_unlock(&syncer->lock);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    pthread_mutex_lock(&syncer->lock);
    syncer->drop_pushes = true;
    pthread_mutex_unlock(&syncer->lock);
    double waited = 0;
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (waited < 0.09) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        CU_ASSERT_FATAL(trainer.info.waited_seconds < 10);
        waited += trainer.info.waited_seconds;
        breathe(syncer);
    }
    close_trainer(&trainer);
    fake_free(syncer);
}

/* --- others
 * ----------------------------------------------------------------------------------------------------------- */

static void test_evaluator_receives_and_reports(void)
{
    struct fake_syncer *syncer = fake_new(3);
    syncer->heartbeat_ms = 20;
    fake_listen(syncer);
    struct trainer learner = {0}, evaluator = {0};
    open_trainer(&learner, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&learner), DILOCO_CONTINUE);
    struct diloco_options options = ANY_LEARNER;
    options.role = DILOCO_EVALUATOR;
    open_trainer(&evaluator, syncer, options);
    CU_ASSERT_EQUAL_FATAL(join(&evaluator), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(diloco_step(evaluator.d, 1, 0, NULL, NULL), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_poll(learner.d, 0, NULL, NULL), DILOCO_EINVAL);
    uint64_t metas = peek(syncer, &syncer->metas);
    CU_ASSERT_EQUAL(diloco_poll(evaluator.d, 0, NULL, NULL), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(peek(syncer, &syncer->metas), metas); /* It observes. */
    train_until(&learner, syncer, &syncer->pushes_merged, 6);
    finish(&learner, syncer);
    fake_stop(syncer, DL_STOP_SUCCEEDED);
    int result;
    while ((result = diloco_poll(evaluator.d, 5, &evaluator.info, &evaluator.error)) == DILOCO_CONTINUE) {
    }
    CU_ASSERT_EQUAL(result, DILOCO_DONE);
    check_adopted(&evaluator, syncer);
    CU_ASSERT_EQUAL(diloco_report(evaluator.d, 1.25, 64, &evaluator.error), DILOCO_CONTINUE);
    close_trainer(&evaluator); /* Closing lets the report go out first. */
    uint64_t hash = 0;
    FAKE_FOR_SHARD(syncer, p)
    {
        hash ^= dl_hash64(syncer->theta[p], syncer->layout->fragments[p].padded_elements * sizeof(float), p);
    }
    CU_ASSERT_EQUAL(peek(syncer, &syncer->evaluations), 1);
    CU_ASSERT_EQUAL(syncer->last_evaluation.parameter_hash, hash);
    CU_ASSERT_EQUAL(syncer->last_evaluation.loss, 1.25);
    CU_ASSERT(syncer->last_evaluation.round > 0);
    close_trainer(&learner);
    fake_free(syncer);
}

static void test_leaving_says_goodbye_and_answers_a_pull_first(void)
{
    struct fake_syncer *syncer = fake_new(2);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 2);
    int64_t before_ns = dl_now_ns();
    CU_ASSERT_EQUAL(diloco_leave(trainer.d, 1, 10, "node is drained", &trainer.error), DILOCO_CONTINUE);
    CU_ASSERT(dl_now_ns() - before_ns < 5 * DL_NS_PER_SECOND);
    CU_ASSERT_EQUAL(peek(syncer, &syncer->goodbyes), 1);
    CU_ASSERT_EQUAL(step(&trainer), DILOCO_STOPPED);
    close_trainer(&trainer);
    CU_ASSERT_EQUAL(peek(syncer, &syncer->goodbyes), 1);
    check_theta(syncer, 0);
    fake_free(syncer);
}

static void test_two_shards(void)
{
    struct fake_syncer *shards[2];
    for (uint32_t i = 0; i < 2; i++) {
        shards[i] = fake_new(5);
        shards[i]->shard = i;
        shards[i]->shards = 2;
        shards[i]->timeout_ms = 300;
        shards[i]->heartbeat_ms = 50;
        fake_listen(shards[i]);
    }
    char endpoints[128];
    snprintf(endpoints, sizeof endpoints, "ws://127.0.0.1:%u,ws://127.0.0.1:%u", shards[0]->port, shards[1]->port);
    struct trainer trainer = {0};
    open_trainer_to(&trainer, endpoints, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(trainer.info.connected_shards, 2);
    CU_ASSERT_EQUAL(trainer.info.updates_total, 5);
    CU_ASSERT_EQUAL(shards[1]->last_hello.learner, 3); /* Shard 0's choice holds for all. */
    CU_ASSERT_EQUAL(shards[1]->last_hello.nonce, shards[0]->last_hello.nonce);
    train_until(&trainer, shards[0], &shards[0]->pushes_merged, 6);
    train_until(&trainer, shards[1], &shards[1]->pushes_merged, 6);
    check_theta(shards[0], 0);
    check_theta(shards[1], 0);
    /* Shard 1 is gone for good; shard 0 alone can end the job, after the timeout. */
    fake_down(shards[1]);
    fake_stop(shards[0], DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, shards[0]), DILOCO_DONE);
    close_trainer(&trainer);
    fake_free(shards[0]);
    shards[1]->listener = -1;
    for (uint32_t p = 0; p < DL_SPEC_FRAGMENTS_MAX; p++) {
        free(shards[1]->theta[p]);
    }
    dl_layout_free(shards[1]->layout);
    free(shards[1]);
}

static void *second_learner(void *argument)
{
    struct fake_syncer *syncer = argument;
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_DONE);
    close_trainer(&trainer);
    return NULL;
}

static void test_two_learners(void)
{
    struct fake_syncer *syncer = fake_new(3);
    syncer->apply = DL_APPLY_REBASE;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    pthread_t thread;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, second_learner, syncer), 0);
    train_until(&trainer, syncer, &syncer->pushes_merged, 30);
    fake_stop(syncer, DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_DONE);
    pthread_join(thread, NULL);
    check_theta(syncer, 0);
    close_trainer(&trainer);
    fake_free(syncer);
}

/* J8: a trainer takes its data by leases, each position once and in order; its pushes say how far it has come. */
static void test_data_by_leases(void)
{
    struct fake_syncer *syncer = fake_new(3);
    struct trainer trainer = {0};
    struct diloco_range range;
    struct diloco_error error;
    syncer->lease = 64;
    fake_listen(syncer);
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL(diloco_data(trainer.d, 4, &range, &error), DILOCO_EINVAL); /* Not joined, and not said so. */
    CU_ASSERT_EQUAL(diloco_lease_data(trainer.d, 0, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_lease_data(trainer.d, 4, &error), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(diloco_lease_data(trainer.d, 4, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_data(trainer.d, 0, &range, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_data(trainer.d, 4, NULL, &error), DILOCO_EINVAL);
    uint64_t lease = 0, next = 0, taken = 0, unleased = 0;
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (peek(syncer, &syncer->leases) < 4 || peek(syncer, &syncer->pushes_merged) < 8) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        for (uint64_t lacks = 4; lacks > 0; lacks -= range.count) {
            CU_ASSERT_EQUAL_FATAL(diloco_data(trainer.d, lacks, &range, &error), DILOCO_CONTINUE);
            CU_ASSERT_FATAL(range.count >= 1 && range.count <= lacks);
            unleased += range.lease == 0 ? range.count : 0;
            if (range.lease != 0 && range.lease != lease) {
                CU_ASSERT(lease == 0 || next == 1000 * lease + 64); /* All of the one before. */
                CU_ASSERT_EQUAL(range.lease, lease + 1);
                lease = range.lease;
                next = 1000 * lease;
            }
            CU_ASSERT(range.lease == 0 || range.first == next);
            next += range.lease == 0 ? 0 : range.count;
            taken += range.count;
        }
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        breathe(syncer);
    }
    CU_ASSERT(taken > 100 && unleased < taken / 2); /* The first one is there before the first step. */
    pthread_mutex_lock(&syncer->lock);
    CU_ASSERT_EQUAL(syncer->last_request.batch, 4);
    CU_ASSERT(syncer->last_push.lease >= 1 && syncer->last_push.lease <= lease);
    CU_ASSERT(syncer->last_push.cursor >= 1 && syncer->last_push.cursor <= 64);
    pthread_mutex_unlock(&syncer->lock);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_wrong_arguments(void)
{
    struct diloco *d = NULL;
    struct diloco_error error;
    struct diloco_options options = {.struct_size = sizeof options, .job = "demo", .endpoints = "ws://a:1"};
    static const char *const endpoints[] = {"",           "http://a:1",   "ws://a",    "ws://:1",
                                            "ws://a:0",   "ws://a:65536", "ws://a:1,", "wss://[::1:2",
                                            "ws://a b:1", "ws://a:1x"};
    for (size_t i = 0; i < DL_COUNT_OF(endpoints); i++) {
        options.endpoints = endpoints[i];
        CU_ASSERT_EQUAL(diloco_open(&options, &d, &error), DILOCO_EINVAL);
        CU_ASSERT_PTR_NOT_NULL(strstr(error.text, "endpoint"));
    }
    options.endpoints = "ws://[::1]:12,wss://host.example:443/";
    options.cert_file = "only one of two";
    CU_ASSERT_EQUAL(diloco_open(&options, &d, &error), DILOCO_EINVAL);
    options.cert_file = NULL;
    options.ca_file = "/nonexistent/ca.pem";
    CU_ASSERT_EQUAL(diloco_open(&options, &d, &error), DILOCO_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.text, "/nonexistent/ca.pem"));
    options.struct_size = 3;
    CU_ASSERT_EQUAL(diloco_open(&options, &d, &error), DILOCO_EINVAL);
    options = (struct diloco_options){.struct_size = sizeof options, .job = "demo", .endpoints = "ws://a:1"};
    CU_ASSERT_EQUAL_FATAL(diloco_open(&options, &d, &error), DILOCO_CONTINUE);
    float value = 0;
    const uint64_t shape[5] = {1, 1, 1, 1, 1}, nothing[1] = {0};
    CU_ASSERT_EQUAL(diloco_join(d, NULL, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_register(d, "x", &value, 5, shape, DILOCO_WEIGHT, 0, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_register(d, "x", NULL, 1, shape, DILOCO_WEIGHT, 0, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_step(d, 1, 0, NULL, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_leave(d, 0, 1, "", &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_register(d, "x", &value, 1, nothing, DILOCO_WEIGHT, 0, &error), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(diloco_join(d, NULL, &error), DILOCO_EINVAL); /* The table as a whole is checked here. */
    diloco_close(d);
    diloco_close(NULL);
}

/* --- TLS
 * -------------------------------------------------------------------------------------------------------------- */

static void test_tls(void)
{
    char folder[] = "/tmp/diloco-tls-XXXXXX";
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
    fake_certificate(folder, "server", "IP:127.0.0.1");
    fake_certificate(folder, "other", "DNS:elsewhere.example");
    fake_certificate(folder, "client", "DNS:client.example");
    char ca[256], other_ca[256], client_cert[256], client_key[256];
    snprintf(ca, sizeof ca, "%s/server.pem", folder);
    snprintf(other_ca, sizeof other_ca, "%s/other.pem", folder);
    snprintf(client_cert, sizeof client_cert, "%s/client.pem", folder);
    snprintf(client_key, sizeof client_key, "%s/client.key", folder);

    struct fake_syncer *syncer = fake_new(1);
    syncer->tls = fake_server_tls(folder, "server", true);
    SSL_CTX *tls = syncer->tls;
    fake_listen(syncer);
    struct diloco_options options = ANY_LEARNER;
    options.ca_file = other_ca;
    options.join_timeout_seconds = 0.5;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "certificate was not accepted");
    options.ca_file = ca;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "certificate required");
    options.cert_file = client_cert;
    options.key_file = client_key;
    options.join_timeout_seconds = 30;
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, options);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 5);
    finish(&trainer, syncer);
    check_theta(syncer, 0);
    fake_stop(syncer, DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_DONE);
    close_trainer(&trainer);
    fake_free(syncer);
    SSL_CTX_free(tls);

    syncer = fake_new(1); /* The certificate is trusted, but for another host. */
    tls = syncer->tls = fake_server_tls(folder, "other", false);
    fake_listen(syncer);
    options.ca_file = other_ca;
    options.join_timeout_seconds = 0.5;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "IP address mismatch");
    fake_free(syncer);
    SSL_CTX_free(tls);
    fake_certificate_remove(folder, "server");
    fake_certificate_remove(folder, "other");
    fake_certificate_remove(folder, "client");
    CU_ASSERT_EQUAL(rmdir(folder), 0);
}

UNIT_MAIN("diloco", {"join, seed, train, stop", test_join_seed_train_stop}, {"every codec", test_every_codec},
          {"frames in pieces", test_frames_in_pieces_with_pings_between},
          {"bfloat16 broadcast", test_bfloat16_broadcast_is_adopted},
          {"hundred disconnects", test_hundred_disconnects_lose_and_double_nothing},
          {"syncer down", test_syncer_down_for_a_while},
          {"syncer that lost its state", test_syncer_that_lost_its_state_is_seeded_again},
          {"half-open", test_half_open_connection_is_noticed},
          {"T1, Q6 heartbeats while computing", test_heartbeats_while_the_trainer_computes},
          {"wrong token", test_wrong_token_is_refused}, {"other layout", test_other_layout_is_refused_naming_both},
          {"full ensemble", test_a_full_ensemble_is_asked_again},
          {"nobody there", test_nobody_there_is_a_timeout_that_says_why},
          {"before the syncer", test_join_before_the_syncer_is_up}, {"failed job", test_failed_job_is_reported},
          {"synchronous", test_synchronous_learner_waits_for_pull_and_update},
          {"bounded wait", test_a_wait_is_bounded_and_ends_with_the_connection},
          {"evaluator", test_evaluator_receives_and_reports},
          {"leaving", test_leaving_says_goodbye_and_answers_a_pull_first}, {"two shards", test_two_shards},
          {"two learners", test_two_learners}, {"wrong arguments", test_wrong_arguments}, {"TLS", test_tls},
          {"J8 data by leases", test_data_by_leases})
