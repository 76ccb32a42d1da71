/* sim_world, checkpoints: what a version depends on, and whether a cut over all shards is consistent.
 *
 * A version depends on what its pushes depend on: every version that their learner had applied before the snapshot, and
 * what those depend on. A cut is consistent when no version in it depends on one that is later than the cut's own. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"

static struct sim_clock *clock_of(struct sim_world *world, uint32_t fragment, uint64_t version)
{
    while (version >= world->clock_capacity[fragment]) {
        uint64_t capacity = DL_MAX(2 * world->clock_capacity[fragment], UINT64_C(64));
        struct sim_clock *grown = realloc(world->clocks[fragment], capacity * sizeof *grown);
        if (grown == NULL) {
            sim_fail(world, "no memory for clocks");
            return NULL;
        }
        memset(grown + world->clock_capacity[fragment], 0,
               (capacity - world->clock_capacity[fragment]) * sizeof *grown);
        world->clocks[fragment] = grown;
        world->clock_capacity[fragment] = capacity;
    }
    return &world->clocks[fragment][version];
}

static void join(struct sim_clock *into, const struct sim_clock *other)
{
    for (uint32_t q = 0; q < SIM_FRAGMENTS_MAX; q++) {
        into->versions[q] = DL_MAX(into->versions[q], other->versions[q]);
    }
}

/* Of everything that the incarnation had applied up to a position of its tape. */
static const struct sim_clock *clock_at(struct sim_world *world, struct sim_incarnation *who, uint64_t position)
{
    if (position < who->clock_at) {
        who->clock_at = 0;
        memset(&who->clock, 0, sizeof who->clock);
    }
    for (; who->clock_at < position; who->clock_at++) {
        const struct dl_trace_entry *entry = &who->done[who->clock_at];
        if (strcmp(entry->kind, "apply") == 0) {
            const struct sim_clock *other = clock_of(world, entry->fragment, entry->a);
            if (other != NULL) {
                join(&who->clock, other);
            }
        }
    }
    return &who->clock;
}

void sim_cut_begin_version(struct sim_world *world, uint32_t fragment, uint64_t version)
{
    struct sim_clock *clock = clock_of(world, fragment, version);
    if (clock != NULL) {
        if (version > 0) {
            *clock = world->clocks[fragment][version - 1];
        }
        clock->versions[fragment] = version;
    }
}

void sim_cut_merged(struct sim_world *world, uint32_t fragment, uint64_t version, uint64_t nonce,
                    const struct dl_wire_push *push)
{
    struct sim_incarnation *who = sim_ledger_find(world, nonce);
    struct sim_clock *clock = clock_of(world, fragment, version);
    if (who != NULL && clock != NULL) {
        join(clock, clock_at(world, who, sim_tape_own(who, push->trace)));
    }
}

static void check(struct sim_world *world)
{
    uint32_t shards = world->config.spec->syncer.shards;
    assert(shards > 0);
    for (uint32_t s = 0; s < shards; s++) {
        if (world->syncers[s].cut.id != world->syncers[0].cut.id) {
            return; /* Not everywhere yet. */
        }
    }
    world->counts.cuts_made++;
    for (uint32_t p = 0; p < world->layout->fragment_count; p++) {
        uint64_t version = world->syncers[p % shards].cut.versions[p / shards];
        const struct sim_clock *clock = clock_of(world, p, version);
        for (uint32_t q = 0; clock != NULL && q < world->layout->fragment_count; q++) {
            if (clock->versions[q] > world->syncers[q % shards].cut.versions[q / shards]) {
                sim_fail(world,
                         "cut %llu: fragment %u version %llu depends on version %llu of fragment %u, not on %llu",
                         (unsigned long long)world->syncers[0].cut.id, p, (unsigned long long)version,
                         (unsigned long long)clock->versions[q], q,
                         (unsigned long long)world->syncers[q % shards].cut.versions[q / shards]);
            }
        }
    }
}

void sim_cut_take(struct sim_world *world, uint32_t shard, uint64_t id)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    syncer->cut.id = id;
    for (uint32_t i = 0; i < syncer->fragments; i++) {
        uint32_t fragment = shard + i * world->config.spec->syncer.shards;
        syncer->cut.versions[i] = sy_core_cut_version(syncer->core, fragment);
        if (syncer->cut.versions[i] > syncer->current[i].version) {
            sim_fail(world, "cut %llu: fragment %u has no version %llu", (unsigned long long)id, fragment,
                     (unsigned long long)syncer->cut.versions[i]);
        }
    }
    check(world);
}
