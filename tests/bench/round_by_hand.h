/* round_by_hand: what a program written by hand over plain TCP needs for the round that a syncer and its learners make.
 *
 * Each learner takes its delta (base - parameters) in one pass into a send buffer and sends it; the server receives each into
 * memory of its own, merges all in one fused pass (the syncer's own kernel: mean, then a step of SGD), and sends the result to
 * all from one memory; each learner receives it and copies it into its parameters, and what it received becomes its base.
 * A thread for each end of each connection, blocking calls. There are no frames, checksums, masks, rounds, versions, no
 * durability, and nobody may be absent: what is left is the work on the bytes that no round can do without, on the same cores.
 *
 * Connections, threads' memory and pages are as old as those of the round beside it. For tests/bench alone. */
#ifndef DL_TESTS_BENCH_ROUND_BY_HAND_H
#define DL_TESTS_BENCH_ROUND_BY_HAND_H

#include "common/codec.h"
#include "syncer/merge/merge.h"
#include "tests/bench/syncer_rig.h"

#define BY_HAND_PEERS 8
#define BY_HAND_MERGE_THREADS 2

struct by_hand;

struct by_hand_end {
    struct by_hand *all;
    uint32_t number;
    int fd;
};

struct by_hand {
    uint64_t elements; /* Whole blocks. */
    struct by_hand_end learners[BY_HAND_PEERS], hosts[BY_HAND_PEERS];
    float *parameters[BY_HAND_PEERS], *base[BY_HAND_PEERS],
        *spare[BY_HAND_PEERS];              /* Of learners; spare: sent, received. */
    float *received[BY_HAND_PEERS], *theta; /* Of the server. */
    struct dl_layout *layout;
    struct sy_pool *pool;
    struct sy_merge *merge;
    double *sum_squares;
    pthread_barrier_t here;
};

static inline void by_hand_must(enum dl_rc rc, const struct dl_err *err)
{
    if (rc != DL_OK) {
        fprintf(stderr, "bench: round by hand: %s\n", err->text);
        exit(1);
    }
}

static inline void by_hand_open(struct by_hand *all, uint64_t rows, uint64_t columns)
{
    struct dl_tensor tensor = {.name = "a", .rank = 2, .shape = {rows, columns}};
    struct dl_err err;
    *all = (struct by_hand){0};
    by_hand_must(dl_layout_new(&tensor, 1, 1, DL_LAYOUT_TENSOR, &all->layout, &err), &err);
    by_hand_must(sy_pool_new(BY_HAND_MERGE_THREADS, &all->pool, &err), &err);
    by_hand_must(sy_merge_new(all->layout, all->pool, BY_HAND_PEERS, &all->merge, &err), &err);
    all->elements = all->layout->fragments[0].padded_elements;
    all->theta = rig_memory(all->elements * sizeof(float));
    all->sum_squares = rig_memory(all->layout->slice_count * sizeof(double));
    pthread_barrier_init(&all->here, NULL, BY_HAND_PEERS);
    for (uint32_t i = 0; i < BY_HAND_PEERS; i++) {
        int fds[2];
        rig_raw_pair(fds, false);
        all->learners[i] = (struct by_hand_end){all, i, fds[0]};
        all->hosts[i] = (struct by_hand_end){all, i, fds[1]};
        float **const arrays[] = {&all->parameters[i], &all->base[i], &all->spare[i], &all->received[i]};
        for (uint32_t a = 0; a < DL_COUNT_OF(arrays); a++) {
            *arrays[a] = rig_memory(all->elements * sizeof(float));
        }
    }
}

static inline void by_hand_close(struct by_hand *all)
{
    for (uint32_t i = 0; i < BY_HAND_PEERS; i++) {
        close(all->learners[i].fd);
        close(all->hosts[i].fd);
        free(all->parameters[i]);
        free(all->base[i]);
        free(all->spare[i]);
        free(all->received[i]);
    }
    free(all->theta);
    free(all->sum_squares);
    sy_merge_free(all->merge);
    sy_pool_free(all->pool);
    dl_layout_free(all->layout);
    pthread_barrier_destroy(&all->here);
}

static inline void by_hand_move(int fd, bool sends, float *values, uint64_t elements)
{
    struct rig_raw raw = {.fd = fd,
                          .bytes = elements * sizeof(float),
                          .window = elements * sizeof(float),
                          .memory = (uint8_t *)values,
                          .sends = sends};
    (void)rig_raw_move(&raw);
}

static inline void *by_hand_learn(void *argument)
{
    const struct by_hand_end *self = argument;
    struct by_hand *all = self->all;
    float **base = &all->base[self->number], **spare = &all->spare[self->number];
    float *parameters = all->parameters[self->number];
    parameters[self->number] += 1e-3f;
    const struct dl_encoded from = {.codec = DL_CODEC_NONE, .bytes = (const uint8_t *)*base};
    dl_codec_encode_delta(DL_CODEC_NONE, from, parameters, all->elements / DL_BLOCK, (uint8_t *)*spare);
    by_hand_move(self->fd, true, *spare, all->elements);
    by_hand_move(self->fd, false, *spare, all->elements);
    memcpy(parameters, *spare, all->elements * sizeof *parameters);
    float *old = *base;
    *base = *spare;
    *spare = old;
    return NULL;
}

static inline void by_hand_merge(struct by_hand *all)
{
    struct sy_push pushes[BY_HAND_PEERS];
    for (uint32_t i = 0; i < BY_HAND_PEERS; i++) {
        pushes[i] = (struct sy_push){.learner = i,
                                     .codec = DL_CODEC_NONE,
                                     .encoded = (const uint8_t *)all->received[i],
                                     .weight = 1,
                                     .sum_squares = all->sum_squares};
    }
    struct dl_sync_spec sync = {.outer = {.type = DL_OUTER_SGD, .learning_rate = 1}};
    struct sy_outer_state outer = {0};
    struct sy_merge_job job = {
        .pushes = pushes, .push_count = BY_HAND_PEERS, .theta = all->theta, .theta_out = all->theta, .outer = &outer};
    struct sy_merge_stats stats;
    struct dl_err err;
    by_hand_must(sy_merge_run(all->merge, &sync, &job, &stats, &err), &err);
}

static inline void *by_hand_serve(void *argument)
{
    const struct by_hand_end *self = argument;
    struct by_hand *all = self->all;
    by_hand_move(self->fd, false, all->received[self->number], all->elements);
    if (pthread_barrier_wait(&all->here) == PTHREAD_BARRIER_SERIAL_THREAD) {
        by_hand_merge(all);
    }
    pthread_barrier_wait(&all->here);
    by_hand_move(self->fd, true, all->theta, all->elements);
    return NULL;
}

/* Seconds that one round takes; `cpu`: CPU seconds of all ends. */
static inline double by_hand_round(struct by_hand *all, double *cpu)
{
    pthread_t threads[2 * BY_HAND_PEERS];
    double before = rig_cpu_of_process();
    int64_t start = dl_now_ns();
    for (uint32_t i = 0; i < BY_HAND_PEERS; i++) {
        if (pthread_create(&threads[2 * i], NULL, by_hand_serve, &all->hosts[i]) != 0 ||
            pthread_create(&threads[2 * i + 1], NULL, by_hand_learn, &all->learners[i]) != 0) {
            rig_fail("bench: thread");
        }
    }
    for (uint32_t i = 0; i < 2 * BY_HAND_PEERS; i++) {
        pthread_join(threads[i], NULL);
    }
    double seconds = (double)(dl_now_ns() - start) * 1e-9;
    *cpu = rig_cpu_of_process() - before;
    return seconds;
}

#endif
