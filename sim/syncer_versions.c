/* sim_world, a syncer's process: pushes that are held, the versions made of them, and what of it is on disk. */
#include <stdlib.h>

#include "common/hash.h"
#include "sim/syncer.h"

/* --- held pushes --- */

struct sim_held **sim_held_find(struct sim_syncer *syncer, uint32_t local, uint64_t round, uint32_t member)
{
    struct sim_held **at = &syncer->held[local];
    while (*at != NULL && !((*at)->push.round == round && (*at)->member == member)) {
        at = &(*at)->next;
    }
    return at;
}

void sim_held_drop(struct sim_held **at)
{
    struct sim_held *held = *at;
    if (held != NULL) {
        *at = held->next;
        free(held);
    }
}

void sim_held_drop_until(struct sim_syncer *syncer, uint32_t local, uint64_t round)
{
    for (struct sim_held **at = &syncer->held[local]; *at != NULL;) {
        if ((*at)->push.round <= round) {
            sim_held_drop(at);
        } else {
            at = &(*at)->next;
        }
    }
}

/* --- making a version --- */

void sim_syncer_make(struct sim_world *world, uint32_t shard, const struct sy_action *action, bool seed)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    uint32_t local = sim_local_of(world, action->fragment);
    uint64_t parts[3] = {syncer->durable[local].content, action->round, seed ? 1 : 2};
    if (action->version != syncer->durable[local].version + 1) {
        sim_fail(world, "fragment %u: asked to make version %llu on top of %llu", action->fragment,
                 (unsigned long long)action->version, (unsigned long long)syncer->durable[local].version);
    }
    syncer->making[local] = (struct sim_durable){.version = action->version,
                                                 .round = seed ? 0 : action->round,
                                                 .cut = syncer->cut.id,
                                                 .content = dl_hash64(parts, sizeof parts, 0)};
    if (seed) {
        const struct sim_held *held = *sim_held_find(syncer, local, action->round, action->member);
        if (held == NULL || !held->complete) {
            sim_fail(world, "fragment %u: the first state is not there", action->fragment);
        }
        syncer->making[local].seeder = held == NULL ? 0 : held->nonce;
    }
    syncer->merge_ns[local] = sim_ns(sim_uniform(&world->rng, 0, world->faults.merge_seconds));
    syncer->commit_ns[local] = sim_ns(sim_uniform(&world->rng, 0, world->faults.commit_seconds));
    world->counts.merges += seed ? 0 : 1;
    world->counts.seeds += seed ? 1 : 0;
    syncer->making_ticket[local] = ++syncer->tickets;
    sim_at(world, world->now_ns + syncer->merge_ns[local] + syncer->commit_ns[local], SIM_DURABLE, shard, local,
           syncer->epoch, NULL);
}

void sim_syncer_merge(struct sim_world *world, uint32_t shard, const struct sy_action *action)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    const struct sy_participant *participants = NULL;
    uint32_t count = sy_core_participants(syncer->core, action->fragment, &participants);
    for (uint32_t k = 0; k < count; k++) {
        struct sim_held *held =
            *sim_held_find(syncer, sim_local_of(world, action->fragment), action->round, participants[k].member);
        if (held == NULL || !held->complete || held->admission != participants[k].admission) {
            sim_fail(world, "fragment %u round %llu: the push of learner %u is not there", action->fragment,
                     (unsigned long long)action->round, participants[k].learner);
        }
    }
    sim_syncer_make(world, shard, action, false);
}

/* --- commits --- */

bool sim_syncer_writes(struct sim_world *world, uint32_t shard, uint64_t ticket)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    if (ticket != syncer->written + 1) {
        return false;
    }
    syncer->written++;
    return true;
}

/* As soon as every fragment has a version, all of them are one learner's. */
static void check_first_state(struct sim_world *world, uint32_t shard)
{
    const struct sim_syncer *syncer = &world->syncers[shard];
    bool complete = true, mixed = false;
    for (uint32_t i = 0; i < syncer->fragments; i++) {
        complete = complete && syncer->durable[i].version > 0 && syncer->durable[i].round == 0;
        mixed = mixed || syncer->durable[i].seeder != syncer->durable[0].seeder;
    }
    if (complete && mixed) {
        sim_fail(world, "shard %u: the first state is of several learners", shard);
    }
}

/* With a version, counters become durable: as they will be once the core has heard of all that is durable. */
void sim_syncer_save(struct sim_syncer *syncer, bool is_merge)
{
    syncer->unheard += is_merge ? 1 : 0;
    sy_core_get_totals(syncer->core, &syncer->totals);
    syncer->totals.rounds_merged += syncer->unheard;
    syncer->totals.tokens_merged = syncer->tokens_merged;
    syncer->incarnation_count = 0;
    for (uint32_t m = 0; m < sy_core_members(syncer->core); m++) {
        struct sy_core_incarnation *to = &syncer->incarnations[syncer->incarnation_count];
        syncer->incarnation_count += sy_core_incarnation(syncer->core, m, to) ? 1 : 0;
    }
}

void sim_syncer_durable(struct sim_world *world, uint32_t shard, uint32_t local)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    uint32_t fragment = shard + local * world->config.spec->syncer.shards;
    if (sim_chance(world, world->faults.full_disk_share)) {
        world->counts.full_disks++;
        sy_core_on_commit_delayed(syncer->core, world->now_ns, fragment, "no space left");
        sim_syncer_settle(world, shard);
        sim_at(world, world->now_ns + SIM_SECOND, SIM_DURABLE, shard, local, syncer->epoch, NULL);
        return;
    }
    if (!sim_syncer_writes(world, shard, syncer->making_ticket[local])) {
        sim_at(world, world->now_ns + SIM_SECOND / 1000, SIM_DURABLE, shard, local, syncer->epoch, NULL);
        return;
    }
    syncer->durable[local] = syncer->making[local];
    sim_tape_durable(world, shard);
    sim_cut_begin_version(world, fragment, syncer->durable[local].version);
    if (syncer->durable[local].cut == syncer->cut.id) {
        syncer->durable_cut = syncer->cut;
    }
    sim_ledger_content(world, fragment, syncer->durable[local].version, syncer->durable[local].content, true);
    check_first_state(world, shard);
    const struct sy_participant *participants = NULL;
    uint32_t count = sy_core_participants(syncer->core, fragment, &participants);
    for (uint32_t k = 0; k < count; k++) {
        const struct sim_held *held =
            *sim_held_find(syncer, local, syncer->making[local].round, participants[k].member);
        if (held == NULL) {
            sim_fail(world, "fragment %u: a push was let go of while it was merged", fragment);
            return;
        }
        sim_ledger_merge(world, fragment, held->nonce, &held->push);
        sim_tape_merged(world, shard, held->nonce, &held->push);
        world->counts.pushes_merged++;
        world->counts.stale_merged += held->push.base_version + 1 < syncer->durable[local].version ? 1 : 0;
        if (shard == 0) {
            sim_data_count(world, held->nonce, &held->push);
        }
        sim_cut_merged(world, fragment, syncer->durable[local].version, held->nonce, &held->push);
        syncer->tokens_merged += held->push.tokens;
    }
    sim_syncer_save(syncer, count > 0);
    sim_at(world, world->now_ns + sim_ns(sim_uniform(&world->rng, 0, 0.01)), SIM_COMMITTED, shard, local, syncer->epoch,
           NULL);
}

void sim_syncer_committed(struct sim_world *world, uint32_t shard, uint32_t local)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    uint32_t fragment = shard + local * world->config.spec->syncer.shards;
    struct sy_fragment_view view;
    (void)sy_core_fragment(syncer->core, fragment, &view);
    syncer->current[local] = syncer->durable[local];
    sim_held_drop_until(syncer, local, view.open_round);
    syncer->unheard -= syncer->durable[local].round > 0 ? 1 : 0;
    sy_core_on_committed(syncer->core, world->now_ns, fragment, syncer->merge_ns[local], syncer->commit_ns[local]);
    sim_syncer_settle(world, shard);
}
