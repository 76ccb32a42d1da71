/* sim_actor: a learner's process, executed again: the real trainer, the real link and its store. It is told what the tape
 * says has happened to it, one entry after the other, and everything else it does by itself; what its link then notes has to
 * be what the tape says.
 *
 * One thread (the trainer has a pool of its own). Layer: sim/replay. */
#ifndef DL_SIM_REPLAY_ACTOR_H
#define DL_SIM_REPLAY_ACTOR_H

#include "common/wire.h"
#include "sim/replay/difference.h"
#include "sim/replay/record.h"

struct sim_actor; /* Opaque. */

/* What it needs of the rest: a version's values as they stood in the syncer, borrowed until the next call. DL_ECONFLICT: a
 * difference was found on the way to it. */
struct sim_actor_host {
    void *context;
    enum dl_rc (*version)(void *context, uint32_t fragment, uint64_t version, const float **values, struct dl_err *err);
    /* It has applied it, and does not need it any more. */
    void (*done_with)(void *context, uint32_t fragment, uint64_t version);
    /* Executes a peer until its state after `step` of its steps is in the record. */
    enum dl_rc (*peer)(void *context, uint32_t incarnation, uint64_t step, struct dl_err *err);
    struct sim_difference *difference;
};

/* `record` and `host` are borrowed for its life. */
DL_MUST_CHECK enum dl_rc sim_actor_new(struct sim_record *record, uint32_t incarnation, uint32_t threads,
                                       const struct sim_actor_host *host, struct sim_actor **out, struct dl_err *err);
void sim_actor_free(struct sim_actor *actor); /* NULL is fine. */

/* Executes up to and with this entry. Pushes that were merged are left in the record. DL_ECONFLICT: the difference is
 * filled in. */
DL_MUST_CHECK enum dl_rc sim_actor_advance(struct sim_actor *actor, uint32_t entry, struct dl_err *err);

/* Executes until so many steps are done, without what comes at that boundary. */
DL_MUST_CHECK enum dl_rc sim_actor_reach(struct sim_actor *actor, uint64_t step, struct dl_err *err);

/* All that is needed of it has been executed. */
bool sim_actor_is_done(const struct sim_actor *actor);

/* The values that it would give as a first state; NULL: no memory. */
const float *sim_actor_seed(struct sim_actor *actor, uint32_t fragment);

uint64_t sim_actor_steps(const struct sim_actor *actor); /* Executed. */

#endif
