/* trainer_rig: a trainer that uses the library against a scripted syncer (fake_syncer.h), over loopback.
 *
 * Its step adds 1 to every parameter, so a fragment of Theta always holds its initial values plus the number of steps
 * merged into it: lost and doubled pushes show as plain numbers (check_theta). Waits end after PATIENCE_NS. */
#ifndef DL_TESTS_TRAINER_RIG_H
#define DL_TESTS_TRAINER_RIG_H

#include <math.h>
#include <stdlib.h>

#include "common/clock.h"
#include "tests/unit/fake_syncer.h"
#include "tests/unit/unit.h"
#include "worker/link/diloco.h"

#define PATIENCE_NS (60 * DL_NS_PER_SECOND) /* Nothing takes nearly as long; it only turns a hang into a failure. */

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

static inline uint64_t elements_of(int i)
{
    return shapes[i][0] * shapes[i][1];
}

static inline float initial(int tensor, uint64_t index)
{
    return (float)((index * 7 + (uint64_t)tensor) % 61);
}

static inline void count_lines(void *context, int level, const char *line)
{
    struct trainer *trainer = context;
    CU_ASSERT_FATAL(level >= 0 && level <= 3 && line[0] != 0);
    __atomic_add_fetch(&trainer->level_seen[level], 1, __ATOMIC_RELAXED);
    if (getenv("VERBOSE") != NULL) {
        fprintf(stderr, "%d %s\n", level, line);
    }
}

static inline void open_trainer_to(struct trainer *trainer, const char *endpoints, struct diloco_options options)
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

static inline void open_trainer(struct trainer *trainer, const struct fake_syncer *syncer,
                                struct diloco_options options)
{
    char endpoint[64];
    snprintf(endpoint, sizeof endpoint, "%s://127.0.0.1:%u", syncer->tls != NULL ? "wss" : "ws", syncer->port);
    open_trainer_to(trainer, endpoint, options);
}

#define ANY_LEARNER ((struct diloco_options){.learner = -1, .join_timeout_seconds = 30})

static inline int join(struct trainer *trainer)
{
    return diloco_join(trainer->d, &trainer->info, &trainer->error);
}

static inline int step(struct trainer *trainer)
{
    for (int i = 0; i < TENSORS; i++) {
        for (uint64_t k = 0; k < elements_of(i); k++) {
            trainer->data[i][k] += 1.0f;
        }
    }
    return diloco_step(trainer->d, 10, 2.5f, &trainer->info, &trainer->error);
}

static inline void close_trainer(struct trainer *trainer)
{
    diloco_close(trainer->d);
    for (int i = 0; i < TENSORS; i++) {
        free(trainer->data[i]);
    }
}

/* Trains until `counter` reaches `value`. */
static inline void train_until(struct trainer *trainer, struct fake_syncer *syncer, const uint64_t *counter,
                               uint64_t value)
{
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (fake_peek(syncer, counter) < value) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        CU_ASSERT_EQUAL_FATAL(step(trainer), DILOCO_CONTINUE);
        fake_breathe(syncer);
    }
}

static inline int train_to_the_end(struct trainer *trainer, struct fake_syncer *syncer)
{
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    int result;
    while ((result = step(trainer)) == DILOCO_CONTINUE) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        fake_breathe(syncer);
    }
    return result;
}

/* Theta holds initial values plus the steps merged, exactly those that were counted; nothing was merged twice or lost.
 */
static inline void check_theta(struct fake_syncer *syncer, float tolerance)
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
static inline void check_adopted(const struct trainer *trainer, struct fake_syncer *syncer)
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
static inline void finish(struct trainer *trainer, struct fake_syncer *syncer)
{
    pthread_mutex_lock(&syncer->lock);
    syncer->interval = 0; /* No more rounds. */
    pthread_mutex_unlock(&syncer->lock);
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    bool settled = false;
    while (!settled) { /* Until META tells that every version has been adopted, in a frame that came after. */
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        CU_ASSERT_EQUAL_FATAL(step(trainer), DILOCO_CONTINUE);
        fake_breathe(syncer);
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

#endif
