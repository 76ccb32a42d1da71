/* sim_world: a whole ensemble in one process under virtual time: syncer shards (sy_core) and learners (wk_link), joined
 * by connections that delay, hold and lose messages. The cores are the real ones; what the simulation adds is their
 * shells: sockets, clocks, merge threads, disks, trainers without a model.
 *
 * One seed decides everything. After every event each core's invariants are checked, and across them:
 *   - a base version is merged at most once an incarnation, and what is merged of it never exceeds what it has trained;
 *   - versions only grow, and one version never has two contents;
 *   - a merge is only asked for pushes that are there;
 *   - a push that is announced once more is not accepted twice;
 *   - the tape holds, durably with every version, what each of its pushes depends on, as it was in truth;
 *   - no shard counts more tokens than were trained, over any number of restarts, or fewer than it had saved;
 *   - a position of the job's data is counted at most once, only for an incarnation that trained on it, and every position
 *     below the high-water mark is counted, leased or queued;
 *   - a checkpoint is a consistent cut.
 *
 * One thread. Errors: DL_ECORRUPT with the text of what does not hold and the virtual time. */
#ifndef DL_SIM_WORLD_H
#define DL_SIM_WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"
#include "sim/faults.h"
#include "syncer/core/core.h"

#define SIM_LEARNERS_MAX 64
#define SIM_SHARDS_MAX 8

struct sim_world; /* Opaque. */

struct sim_config {
    uint64_t seed;
    const struct dl_spec
        *spec; /* Borrowed. Its learners.replicas is the number of learners, learners.max at least that. */
    struct sim_faults faults;
    uint64_t step_tokens; /* A learner trains on so many a step. */
    double note_share;    /* Steps at which a trainer notes something of its own in the tape. */
};

DL_MUST_CHECK enum dl_rc sim_world_new(const struct sim_config *config, struct sim_world **out, struct dl_err *err);
void sim_world_free(struct sim_world *world); /* NULL is fine. */

/* Runs until this virtual time, or until the job is over for everybody (`*over`). */
DL_MUST_CHECK enum dl_rc sim_world_run(struct sim_world *world, int64_t until_ns, bool *over, struct dl_err *err);
int64_t sim_world_now(const struct sim_world *world); /* Starts at 0. */
/* From now on nothing breaks any more; what is down comes back. */
void sim_world_heal(struct sim_world *world);

/* One learner's process: stop it for a while (SIGSTOP), or kill it; `restart_seconds` < 0: it does not come back. */
void sim_world_stall(struct sim_world *world, uint32_t learner, double seconds);
void sim_world_kill(struct sim_world *world, uint32_t learner, double restart_seconds);

/* All its connections break, and it can make none for a while. */
void sim_world_isolate(struct sim_world *world, uint32_t learner, double seconds);
/* A syncer's process: kill -9; it starts again after a while. */
void sim_world_crash(struct sim_world *world, uint32_t shard, double restart_seconds);

/* Its steps take so many times what others' do. */
void sim_world_set_speed(struct sim_world *world, uint32_t learner, double factor);
/* Its link is slow: each chunk takes so much longer to go out, either way, and arrives when it is out. */
void sim_world_set_link(struct sim_world *world, uint32_t learner, double chunk_seconds);

struct sim_learner_view {
    bool alive;
    uint64_t step, tokens; /* Of this incarnation. */
    uint64_t steps_all;    /* Over all incarnations. */
    uint32_t incarnations;
    double waited_seconds; /* Of this incarnation, at boundaries. */
    uint64_t unleased,
        leases_lost;        /* Of this incarnation: sequences trained without a lease; how often leases were lost. */
    uint64_t merged_tokens; /* Of this process; summed over the fragments. */
};
void sim_world_learner(const struct sim_world *world, uint32_t learner, struct sim_learner_view *view);
const struct sy_core *sim_world_core(const struct sim_world *world, uint32_t shard); /* NULL while it is down. */

struct sim_counts { /* What really happened. */
    uint64_t events, cuts, half_open, blocks, kills, stalls, crashes, drains, pauses, late_joins;
    uint64_t damaged, nans, absurd, repeats, full_disks;
    uint64_t connects, merges, seeds, versions_applied, cuts_made, traced, recoveries, fragments_recovered;
    uint64_t traces_adopted, pushes_merged, stale_merged; /* Of the merged ones, those on an older base. */
    uint64_t sequences, unleased, leases, returns, counted;
};
const struct sim_counts *sim_world_counts(const struct sim_world *world);

#endif
