/* sim_replay: a recorded run, executed again in one process, with the code that ran then: the trainer, the link and its
 * store, the rule of weights, the merge. Every version's hash is held against the tape's, and before it what the merge was
 * given: steps, tokens, weight and norm of each push.
 *
 * A version is made when it is needed: its participants are executed up to their snapshots, which needs the versions that
 * they had taken over by then, and so on. In the order in which the versions were committed that never goes deep. Processes
 * live from the first version that needs them to the last one; versions and pushes until nobody needs them.
 *
 * Layer: sim/replay; the calling thread, the trainers' pools and the merge's. */
#ifndef DL_SIM_REPLAY_REPLAY_H
#define DL_SIM_REPLAY_REPLAY_H

#include "sim/replay/difference.h"
#include "sim/replay/record.h"

struct sim_replay_options {
    uint64_t until; /* The last round that is executed again; UINT64_MAX: all. */
    const uint64_t
        *from;        /* By fragment: the version, read from its file, to begin with. NULL: from the first state on. */
    bool verify_only; /* Pushes are read where the syncer kept them; no learner is executed. */
    uint32_t threads; /* Compute threads; does not change a bit. */
    void (*progress)(void *context, uint64_t done, uint64_t of); /* After each version; may be NULL. */
    void *context;
};

struct sim_replay_result {
    uint64_t rounds, first_states; /* Whose hashes agree. */
    uint64_t unverified; /* With verify_only: versions whose pushes, or what they were merged into, were not kept. */
    uint64_t steps;      /* Inner steps executed. */
    uint32_t processes;
    uint32_t left_out;   /* Processes that lived across the checkpoint: their pushes were read, not made again. */
    uint64_t bytes_peak; /* Of versions and optimiser states. */
    uint32_t processes_peak;
    struct sim_difference difference; /* Found: the first one; the replay has ended there. */
};

/* DL_OK: done, with or without a difference. Anything else: it cannot be executed again, and why. */
DL_MUST_CHECK enum dl_rc sim_replay_run(struct sim_record *record, const struct sim_replay_options *options,
                                        struct sim_replay_result *result, struct dl_err *err);

#endif
