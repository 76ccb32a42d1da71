/* sim_world, the event tape: every entry that comes is held against what the trainer did in truth, and when a version is
 * durable, so must be all that each of its pushes depends on (J9). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"

static void *grow(struct sim_world *world, void *items, uint64_t count, uint64_t *capacity, size_t size)
{
    if (count < *capacity) {
        return items;
    }
    uint64_t wanted = DL_MAX(2 * *capacity, UINT64_C(64));
    void *grown = realloc(items, wanted * size);
    if (grown == NULL) {
        sim_fail(world, "no memory for the tape");
        return items;
    }
    *capacity = wanted;
    return grown;
}

static void deliver(struct sim_world *world, uint32_t incarnation, uint32_t owner, uint64_t seq)
{
    struct sim_incarnation *who = &world->incarnations[incarnation];
    who->order = grow(world, who->order, who->order_count, &who->order_capacity, sizeof *who->order);
    if (who->order_count < who->order_capacity) {
        who->order[who->order_count++] = (struct sim_delivery){.owner = owner, .seq = seq};
    }
}

void sim_tape_done(struct sim_world *world, uint32_t n, const char *kind, uint32_t fragment, uint64_t a)
{
    uint32_t incarnation = world->learners[n].incarnation;
    struct sim_incarnation *who = &world->incarnations[incarnation];
    who->done = grow(world, who->done, who->done_count, &who->done_capacity, sizeof *who->done);
    if (who->done_count == who->done_capacity) {
        return;
    }
    struct wk_link_view view;
    wk_link_view(world->learners[n].link, &view);
    struct dl_trace_entry *entry = &who->done[who->done_count];
    *entry = (struct dl_trace_entry){.seq = ++who->done_count, .step = view.step, .fragment = fragment, .a = a};
    snprintf(entry->kind, sizeof entry->kind, "%s", kind);
    deliver(world, incarnation, incarnation, entry->seq);
}

void sim_tape_adopted(struct sim_world *world, uint32_t n, const struct dl_wire_trace *page)
{
    struct sim_incarnation *owner = sim_ledger_find(world, page->nonce);
    for (uint32_t i = 0; owner != NULL && i < page->count; i++) {
        deliver(world, world->learners[n].incarnation, (uint32_t)(owner - world->incarnations), page->entries[i].seq);
    }
    world->counts.traces_adopted += page->count;
}

void sim_tape_recovered(struct sim_world *world, uint32_t n, uint32_t peer, uint64_t peer_done)
{
    struct sim_incarnation *who = &world->incarnations[world->learners[n].incarnation];
    sim_tape_done(world, n, "state", DL_TRACE_NO_FRAGMENT, world->incarnations[peer].nonce);
    who->origin.is_known = true;
    who->origin.peer = peer;
    who->origin.peer_done = peer_done;
    who->origin.position = who->order_count;
    who->origin.seq = who->done_count;
}

static bool is_true(const struct dl_trace_entry *told, const struct dl_trace_entry *done)
{
    return told->seq == done->seq && told->step == done->step && told->fragment == done->fragment &&
           told->a == done->a && strcmp(told->kind, done->kind) == 0;
}

static void take_entry(struct sim_world *world, uint32_t shard, struct sim_incarnation *by, uint64_t position,
                       struct sim_incarnation *who, const struct dl_trace_entry *entry)
{
    const struct sim_delivery *due = position > by->order_count ? NULL : &by->order[position - 1];
    if (due == NULL || &world->incarnations[due->owner] != who || due->seq != entry->seq ||
        entry->seq > who->done_count || !is_true(entry, &who->done[entry->seq - 1])) {
        sim_fail(world, "tape: entry %llu (%s) at position %llu is not what was done", (unsigned long long)entry->seq,
                 entry->kind, (unsigned long long)position);
    } else if (entry->seq > who->traced[shard] + 1) {
        sim_fail(world, "tape: entry %llu comes after %llu", (unsigned long long)entry->seq,
                 (unsigned long long)who->traced[shard]);
    } else {
        who->traced[shard] = DL_MAX(who->traced[shard], entry->seq);
    }
}

void sim_tape_take(struct sim_world *world, uint32_t shard, uint64_t nonce, const struct dl_wire_trace *trace)
{
    struct sim_incarnation *by = sim_ledger_find(world, nonce), *who = sim_ledger_find(world, trace->nonce);
    if (by == NULL || who == NULL || trace->position > by->received[shard] + 1) {
        sim_fail(world, "tape: position %llu of %s comes after %llu", (unsigned long long)trace->position, trace->uid,
                 by == NULL ? 0 : (unsigned long long)by->received[shard]);
        return;
    }
    for (uint32_t i = 0; i < trace->count; i++) {
        take_entry(world, shard, by, trace->position + i, who, &trace->entries[i]);
    }
    by->received[shard] = DL_MAX(by->received[shard], trace->position + trace->count - 1);
    world->counts.traced += trace->count;
}

/* The entry of the snapshot itself is the last that a push depends on. */
void sim_tape_announced(struct sim_world *world, uint32_t shard, uint64_t nonce, const struct dl_wire_push *push)
{
    const struct sim_incarnation *who = sim_ledger_find(world, nonce);
    if (who == NULL || push->trace > who->received[shard]) {
        sim_fail(world, "fragment %u: a push came before what it depends on", push->fragment);
        return;
    }
    const struct sim_delivery *at = push->trace == 0 ? NULL : &who->order[push->trace - 1];
    bool own = at != NULL && &world->incarnations[at->owner] == who;
    const struct dl_trace_entry *last = own ? &who->done[at->seq - 1] : NULL;
    bool seed = push->steps == 0;
    if (!seed && (last == NULL || strcmp(last->kind, "snapshot") != 0 || last->fragment != push->fragment ||
                  last->a != push->base_version || last->step != push->step)) {
        sim_fail(world, "fragment %u: the tape does not end with the snapshot that was pushed", push->fragment);
    }
}

/* What it adopted came at once, before the entry that says so. */
uint64_t sim_tape_own(const struct sim_incarnation *who, uint64_t position)
{
    uint64_t adopted = who->order_count - who->done_count;
    return who->origin.is_known && position >= who->origin.position ? position - adopted : position;
}

void sim_tape_durable(struct sim_world *world, uint32_t shard)
{
    for (uint32_t i = 0; i < world->incarnation_count; i++) {
        world->incarnations[i].traced_durably[shard] = world->incarnations[i].traced[shard];
        world->incarnations[i].received_durably[shard] = world->incarnations[i].received[shard];
    }
}

/* A push after its learner took over a state depends on what that peer had done, which in turn may have begun likewise. */
void sim_tape_merged(struct sim_world *world, uint32_t shard, uint64_t nonce, const struct dl_wire_push *push)
{
    const struct sim_incarnation *who = sim_ledger_find(world, nonce);
    if (who == NULL || who->received_durably[shard] < push->trace) {
        sim_fail(world, "fragment %u: merged a push of which the tape does not hold everything", push->fragment);
        return;
    }
    bool depends = push->trace >= who->origin.position;
    while (who->origin.is_known && depends) {
        const struct sim_incarnation *peer = &world->incarnations[who->origin.peer];
        if (peer->traced_durably[shard] < who->origin.peer_done) {
            sim_fail(world, "fragment %u: the tape holds %llu of %llu entries on which a state depends", push->fragment,
                     (unsigned long long)peer->traced_durably[shard], (unsigned long long)who->origin.peer_done);
        }
        depends = who->origin.peer_done >= peer->origin.seq;
        who = peer;
    }
}

void sim_tape_crash(struct sim_world *world, uint32_t shard)
{
    for (uint32_t i = 0; i < world->incarnation_count; i++) {
        world->incarnations[i].traced[shard] = world->incarnations[i].traced_durably[shard];
        world->incarnations[i].received[shard] = world->incarnations[i].received_durably[shard];
    }
}

uint64_t sim_tape_acked(struct sim_world *world, uint32_t shard, uint64_t nonce)
{
    const struct sim_incarnation *who = sim_ledger_find(world, nonce);
    return who == NULL ? 0 : who->received_durably[shard];
}
