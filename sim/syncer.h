/* The inside of a simulated syncer's process, shared by its sources: syncer.c (actions of the core, life of the process),
 * syncer_inbound.c (what comes in), syncer_versions.c (held pushes, versions, commits). Pure. */
#ifndef DL_SIM_SYNCER_H
#define DL_SIM_SYNCER_H

#include "sim/state.h"

static inline uint32_t sim_local_of(const struct sim_world *world, uint32_t fragment)
{
    return fragment / world->config.spec->syncer.shards;
}

/* syncer_versions.c */
/* Where it is linked, or would be: never NULL; what it points to is NULL when nothing is held. */
struct sim_held **sim_held_find(struct sim_syncer *syncer, uint32_t local, uint64_t round, uint32_t member);
void sim_held_drop(struct sim_held **at);
void sim_held_drop_until(struct sim_syncer *syncer, uint32_t local, uint64_t round); /* That round too. */
/* Begins a version: `seed`, of a learner's first state. */
void sim_syncer_make(struct sim_world *world, uint32_t shard, const struct sy_action *action, bool seed);
void sim_syncer_merge(struct sim_world *world, uint32_t shard, const struct sy_action *action);
/* With a version, counters become durable: as they will be once the core has heard of all that is durable. */
void sim_syncer_save(struct sim_syncer *syncer, bool is_merge);

/* syncer_inbound.c */
/* The member's connection ends; what was not complete is gone. `conn` stays known only to the events on their way. */
void sim_syncer_let_go(struct sim_world *world, uint32_t conn);

#endif
