/* sim_world: what must hold across all cores. */
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"

uint32_t sim_ledger_incarnation(struct sim_world *world, uint64_t nonce)
{
    if (world->incarnation_count == world->incarnation_capacity) {
        uint32_t capacity = DL_MAX(2 * world->incarnation_capacity, 64u);
        struct sim_incarnation *grown = realloc(world->incarnations, capacity * sizeof *grown);
        if (grown == NULL) {
            sim_fail(world, "no memory for the ledger");
            return 0;
        }
        world->incarnations = grown;
        world->incarnation_capacity = capacity;
    }
    struct sim_incarnation *added = &world->incarnations[world->incarnation_count];
    memset(added, 0, sizeof *added);
    added->nonce = nonce;
    return world->incarnation_count++;
}

struct sim_incarnation *sim_ledger_find(struct sim_world *world, uint64_t nonce)
{
    for (uint32_t i = world->incarnation_count; i-- > 0;) {
        if (world->incarnations[i].nonce == nonce) {
            return &world->incarnations[i];
        }
    }
    return NULL;
}

/* A push has become part of a durable version. */
void sim_ledger_merge(struct sim_world *world, uint32_t fragment, uint64_t nonce, const struct dl_wire_push *push)
{
    struct sim_incarnation *who = sim_ledger_find(world, nonce);
    if (who == NULL) {
        sim_fail(world, "fragment %u: merged a push of nobody", fragment);
        return;
    }
    if (push->base_version <= who->merged_base[fragment]) {
        sim_fail(world, "fragment %u: base %llu merged again, after %llu", fragment,
                 (unsigned long long)push->base_version, (unsigned long long)who->merged_base[fragment]);
    }
    who->merged_base[fragment] = push->base_version;
    who->merged_tokens[fragment] += push->tokens;
    if (who->merged_tokens[fragment] > who->tokens) {
        sim_fail(world, "fragment %u: %llu tokens merged of an incarnation that trained on %llu", fragment,
                 (unsigned long long)who->merged_tokens[fragment], (unsigned long long)who->tokens);
    }
}

void sim_ledger_content(struct sim_world *world, uint32_t fragment, uint64_t version, uint64_t content, bool is_new)
{
    while (version >= world->content_capacity[fragment]) {
        uint64_t capacity = DL_MAX(2 * world->content_capacity[fragment], UINT64_C(64));
        uint64_t *grown = realloc(world->contents[fragment], capacity * sizeof *grown);
        if (grown == NULL) {
            sim_fail(world, "no memory for the ledger");
            return;
        }
        memset(grown + world->content_capacity[fragment], 0,
               (capacity - world->content_capacity[fragment]) * sizeof *grown);
        world->contents[fragment] = grown;
        world->content_capacity[fragment] = capacity;
    }
    uint64_t *known = &world->contents[fragment][version];
    if (is_new && (*known != 0 || (version > 1 && known[-1] == 0))) {
        sim_fail(world, "fragment %u: version %llu made %s", fragment, (unsigned long long)version,
                 *known != 0 ? "twice" : "before the one below it");
    }
    if (!is_new && *known != content) {
        sim_fail(world, "fragment %u: a learner holds another content of version %llu", fragment,
                 (unsigned long long)version);
    }
    *known = content;
}
