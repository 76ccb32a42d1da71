/* sim_world, the event tape: every entry that comes is held against what the trainer did in truth, and when a version is
 * durable, so must be all that each of its pushes depends on (J9). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"

void sim_tape_done(struct sim_world *world, uint32_t n, const char *kind, uint32_t fragment, uint64_t a)
{
    struct sim_incarnation *who = &world->incarnations[world->learners[n].incarnation];
    if (who->done_count == who->done_capacity) {
        uint64_t capacity = DL_MAX(2 * who->done_capacity, UINT64_C(64));
        struct dl_trace_entry *grown = realloc(who->done, capacity * sizeof *grown);
        if (grown == NULL) {
            sim_fail(world, "no memory for the tape");
            return;
        }
        who->done = grown;
        who->done_capacity = capacity;
    }
    struct wk_link_view view;
    wk_link_view(world->learners[n].link, &view);
    struct dl_trace_entry *entry = &who->done[who->done_count];
    *entry = (struct dl_trace_entry){.seq = ++who->done_count, .step = view.step, .fragment = fragment, .a = a};
    snprintf(entry->kind, sizeof entry->kind, "%s", kind);
}

static bool is_true(const struct dl_trace_entry *told, const struct dl_trace_entry *done)
{
    return told->seq == done->seq && told->step == done->step && told->fragment == done->fragment &&
           told->a == done->a && strcmp(told->kind, done->kind) == 0;
}

void sim_tape_take(struct sim_world *world, uint32_t shard, const struct dl_wire_trace *trace)
{
    struct sim_incarnation *who = sim_ledger_find(world, trace->nonce);
    for (uint32_t i = 0; who != NULL && i < trace->count; i++) {
        const struct dl_trace_entry *entry = &trace->entries[i];
        if (entry->seq > who->done_count || !is_true(entry, &who->done[entry->seq - 1])) {
            sim_fail(world, "tape: entry %llu (%s) is not what %s did", (unsigned long long)entry->seq, entry->kind,
                     trace->uid);
            return;
        }
        if (entry->seq > who->traced[shard] + 1) {
            sim_fail(world, "tape: entry %llu of %s comes after %llu", (unsigned long long)entry->seq, trace->uid,
                     (unsigned long long)who->traced[shard]);
            return;
        }
        who->traced[shard] = DL_MAX(who->traced[shard], entry->seq);
    }
    world->counts.traced += trace->count;
}

/* The entry of the snapshot itself is the last that a push depends on. */
void sim_tape_announced(struct sim_world *world, uint32_t shard, uint64_t nonce, const struct dl_wire_push *push)
{
    const struct sim_incarnation *who = sim_ledger_find(world, nonce);
    if (who == NULL || push->trace > who->traced[shard]) {
        sim_fail(world, "fragment %u: a push came before what it depends on", push->fragment);
        return;
    }
    bool seed = push->steps == 0;
    const struct dl_trace_entry *last = push->trace == 0 ? NULL : &who->done[push->trace - 1];
    if (!seed && (last == NULL || strcmp(last->kind, "snapshot") != 0 || last->fragment != push->fragment ||
                  last->a != push->base_version || last->step != push->step)) {
        sim_fail(world, "fragment %u: the tape does not end with the snapshot that was pushed", push->fragment);
    }
}

void sim_tape_durable(struct sim_world *world, uint32_t shard)
{
    for (uint32_t i = 0; i < world->incarnation_count; i++) {
        world->incarnations[i].traced_durably[shard] = world->incarnations[i].traced[shard];
    }
}

void sim_tape_merged(struct sim_world *world, uint32_t shard, uint64_t nonce, const struct dl_wire_push *push)
{
    const struct sim_incarnation *who = sim_ledger_find(world, nonce);
    if (who == NULL || who->traced_durably[shard] < push->trace) {
        sim_fail(world, "fragment %u: merged a push of which the tape does not hold everything", push->fragment);
    }
}

void sim_tape_crash(struct sim_world *world, uint32_t shard)
{
    for (uint32_t i = 0; i < world->incarnation_count; i++) {
        world->incarnations[i].traced[shard] = world->incarnations[i].traced_durably[shard];
    }
}

uint64_t sim_tape_acked(struct sim_world *world, uint32_t shard, uint64_t nonce)
{
    const struct sim_incarnation *who = sim_ledger_find(world, nonce);
    return who == NULL ? 0 : who->traced_durably[shard];
}
