/* The inside of sim_replay, shared by its parts; included by nothing else.
 *
 *     replay.c           what is wanted, who asks for what, the loop
 *     replay_make.c      how a version comes about, and whether it is the tape's
 *     replay_versions.c  memory of versions; what is read from files */
#ifndef DL_SIM_REPLAY_STATE_H
#define DL_SIM_REPLAY_STATE_H

#include "sim/replay/actor.h"
#include "sim/replay/replay.h"
#include "syncer/merge/merge.h"

struct sim_version { /* Of the commit of the same index. */
    float *values, *first, *second;
    uint64_t outer_steps;
    uint32_t uses;       /* Learners that have yet to take it over, and the next version. */
    uint32_t state_uses; /* Of the optimiser's state. */
    bool made, making;
    bool missing; /* With verify_only: it could not be made. */
};

struct sim_replay {
    struct sim_record *record;
    const struct sim_replay_options *options;
    struct sim_replay_result *result;
    struct sim_version *versions;
    struct sim_actor **actors; /* By incarnation. */
    uint32_t actors_alive;
    struct sim_actor_host host;
    struct sy_pool *pool;
    struct sy_merge *merge;
    struct sy_push *inputs;
    double *squares; /* A row a push. */
    uint32_t inputs_max, slices_max;
    uint64_t bytes;
};

static inline uint32_t sim_replay_index(const struct sim_replay *replay, const struct sim_commit *commit)
{
    return (uint32_t)(commit - replay->record->commits);
}

static inline uint64_t sim_replay_padded(const struct sim_replay *replay, uint32_t fragment)
{
    return replay->record->layout->fragments[fragment].padded_elements;
}

static inline uint64_t sim_replay_begins_with(const struct sim_replay *replay, uint32_t fragment)
{
    return replay->options->from == NULL ? 0 : replay->options->from[fragment];
}

/* replay_versions.c */
DL_MUST_CHECK enum dl_rc sim_replay_new_version(struct sim_replay *replay, uint32_t index,
                                                const struct dl_sync_spec *sync, struct dl_err *err);
void sim_replay_drop_unused(struct sim_replay *replay, uint32_t index);
void sim_replay_use(struct sim_replay *replay, uint32_t index, bool state);
/* A version from its file. DL_ENOTFOUND: it is not kept. */
DL_MUST_CHECK enum dl_rc sim_replay_load(struct sim_replay *replay, uint32_t index, struct dl_err *err);
/* The pushes that the syncer kept, into the record. DL_ENOTFOUND: it did not, or they are damaged. */
DL_MUST_CHECK enum dl_rc sim_replay_read_pushes(struct sim_replay *replay, const struct sim_commit *commit,
                                                struct dl_err *err);

/* replay_make.c */
DL_MUST_CHECK enum dl_rc sim_replay_make(struct sim_replay *replay, uint32_t index, struct dl_err *err);
/* The version that a recovered one repeats: the newest older one of the same content. NULL: it is not in the tape. */
const struct sim_commit *sim_replay_original(const struct sim_replay *replay, const struct sim_commit *commit);

/* replay.c */
DL_MUST_CHECK enum dl_rc sim_replay_actor(struct sim_replay *replay, uint32_t incarnation, struct sim_actor **out,
                                          struct dl_err *err);
void sim_replay_end_if_done(struct sim_replay *replay, uint32_t incarnation);

#endif
