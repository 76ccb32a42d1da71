/* sim_world, a syncer's process: what comes in from learners. */
#include <math.h>
#include <stdlib.h>

#include "common/codec.h"
#include "common/mem.h"
#include "sim/syncer.h"

/* The members' connections end; what was not complete is gone. `c` stays known only to the events on their way. */
void sim_syncer_let_go(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    for (uint32_t k = 0; k < DL_COUNT_OF(conn->incoming); k++) {
        if (conn->incoming[k].used && conn->incoming[k].kept) {
            const struct dl_wire_push *push = &conn->incoming[k].push;
            sim_held_drop(sim_held_find(syncer, sim_local_of(world, push->fragment), push->round, conn->member));
        }
        conn->incoming[k].used = false;
    }
    if (conn->member != SY_NO_MEMBER && syncer->member_conns[conn->member] == c) {
        syncer->member_conns[conn->member] = SIM_NONE;
    }
    conn->member = SY_NO_MEMBER;
}

static void on_hello(struct sim_world *world, uint32_t c, const struct dl_wire_hello *hello)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    struct dl_wire_message answer = {.type = DL_WIRE_WELCOME};
    struct dl_wire_refuse refuse = {0};
    uint32_t member = SY_NO_MEMBER;
    uint64_t nonce = hello->nonce;
    if (sy_core_on_hello(syncer->core, world->now_ns, hello, &member, &answer.as.welcome, &refuse) != DL_OK) {
        answer.type = DL_WIRE_REFUSE;
        answer.as.refuse = refuse;
        sim_conn_down(world, c, sim_packet_encode(world, &answer));
        sim_conn_close(world, c, false);
        return;
    }
    uint32_t before = syncer->member_conns[member];
    if (before != SIM_NONE) {
        sim_syncer_let_go(world, before);
        sim_conn_close(world, before, false);
    }
    conn->member = member;
    conn->nonce = nonce;
    syncer->member_conns[member] = c;
    syncer->next_admission = DL_MAX(syncer->next_admission, answer.as.welcome.admission + 1);
    answer.as.welcome.fragments_total = world->config.spec->sync.fragments;
    answer.as.welcome.layout = (uint8_t)world->config.spec->sync.layout;
    answer.as.welcome.layout_hash = world->layout->hash;
    answer.as.welcome.trace_acked = sim_tape_acked(world, conn->shard, nonce);
    sim_transmit(world, c, &answer);
}

static void on_push(struct sim_world *world, uint32_t c, const struct dl_wire_push *announced)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    struct dl_wire_push push = *announced;
    sim_tape_announced(world, conn->shard, conn->nonce, &push);
    uint64_t expected =
        dl_codec_bytes((enum dl_codec)push.codec, world->layout->fragments[push.fragment].padded_elements);
    for (uint32_t k = 0; k < DL_COUNT_OF(conn->incoming); k++) {
        /* A learner that pushes a fragment anew has given up what it had not finished of it. */
        if (conn->incoming[k].used && conn->incoming[k].push.fragment == push.fragment) {
            if (conn->incoming[k].kept) {
                sim_fail(world, "fragment %u: a push that was wanted is not finished", push.fragment);
            }
            conn->incoming[k].used = false;
        }
    }
    enum dl_verdict verdict = sy_core_on_push(syncer->core, world->now_ns, conn->member, &push, expected);
    for (uint32_t k = 0; k < DL_COUNT_OF(conn->incoming); k++) {
        if (conn->incoming[k].used) {
            continue;
        }
        conn->incoming[k].used = conn->incoming[k].intact = true;
        conn->incoming[k].kept = verdict == DL_VERDICT_ACCEPTED;
        conn->incoming[k].push = push;
        conn->incoming[k].received = 0;
        break;
    }
    if (verdict != DL_VERDICT_ACCEPTED) {
        return;
    }
    struct sim_held *held = calloc(1, sizeof *held);
    if (held == NULL) {
        sim_fail(world, "no memory for a push");
        return;
    }
    struct sy_member_view view;
    (void)sy_core_member(syncer->core, conn->member, &view);
    *held = (struct sim_held){.next = syncer->held[sim_local_of(world, push.fragment)],
                              .member = conn->member,
                              .nonce = conn->nonce,
                              .admission = view.admission,
                              .push = push};
    syncer->held[sim_local_of(world, push.fragment)] = held;
}

static double draw_norm(struct sim_world *world)
{
    if (sim_chance(world, world->faults.nan_share)) {
        world->counts.nans++;
        return (double)NAN;
    }
    bool absurd = sim_chance(world, world->faults.absurd_share);
    world->counts.absurd += absurd ? 1 : 0;
    return sim_uniform(&world->rng, 0.5, 2) * (absurd ? 1e6 : 1);
}

/* A repeat of a push that is here: nothing may come of it. */
static void repeat(struct sim_world *world, uint32_t c, const struct dl_wire_push *push)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    world->counts.repeats++;
    if (sy_core_on_push(syncer->core, world->now_ns, conn->member, push, push->bytes) == DL_VERDICT_ACCEPTED) {
        sim_fail(world, "fragment %u: a repeated push was accepted", push->fragment);
    }
}

static void on_chunk(struct sim_world *world, uint32_t c, const struct sim_packet *packet)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    for (uint32_t k = 0; k < DL_COUNT_OF(conn->incoming); k++) {
        if (!conn->incoming[k].used || conn->incoming[k].push.transfer != packet->transfer) {
            continue;
        }
        conn->incoming[k].intact = conn->incoming[k].intact && packet->intact;
        conn->incoming[k].received += packet->chunk_bytes;
        if (conn->incoming[k].received < conn->incoming[k].push.bytes) {
            return;
        }
        struct dl_wire_push push = conn->incoming[k].push;
        bool intact = conn->incoming[k].intact, kept = conn->incoming[k].kept;
        conn->incoming[k].used = false;
        struct sim_held *held = *sim_held_find(syncer, sim_local_of(world, push.fragment), push.round, conn->member);
        if (!kept || held == NULL) {
            return;
        }
        held->complete = true;
        double norm = draw_norm(world);
        sy_core_on_push_received(syncer->core, world->now_ns, conn->member, push.round, push.fragment, intact, norm);
        sim_syncer_settle(world, conn->shard);
        if (intact && isfinite(norm) && norm < 1e3 && conn->member != SY_NO_MEMBER &&
            sim_chance(world, world->faults.repeat_share)) {
            repeat(world, c, &push);
        }
        return;
    }
    sim_fail(world, "a chunk of transfer %llu that is not under way", (unsigned long long)packet->transfer);
}

static void on_held(struct sim_world *world, uint32_t c, const struct dl_wire_held *held)
{
    const struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    const struct sim_durable *current = &syncer->current[sim_local_of(world, held->fragment)];
    bool same = current->version > 0 && current->version == held->version && current->content == held->content_hash;
    sy_core_on_held(syncer->core, world->now_ns, conn->member, held->fragment, same);
    world->scratch.type = DL_WIRE_HELD;
    world->scratch.as.held = (struct dl_wire_held){
        .fragment = held->fragment, .version = current->version, .content_hash = current->content};
    sim_transmit(world, c, &world->scratch);
}

static void on_control(struct sim_world *world, uint32_t c, const struct dl_wire_message *message)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    uint32_t member = conn->member;
    if (message->type == DL_WIRE_META) {
        sy_core_on_meta(syncer->core, world->now_ns, member, &message->as.meta);
    } else if (message->type == DL_WIRE_PUSH) {
        on_push(world, c, &message->as.push);
    } else if (message->type == DL_WIRE_TRACE) {
        sim_tape_take(world, conn->shard, conn->nonce, &message->as.trace);
    } else if (message->type == DL_WIRE_MARKER) {
        sy_core_on_marker(syncer->core, world->now_ns, member, &message->as.marker);
    } else if (message->type == DL_WIRE_PUSH_NONE) {
        sy_core_on_push_none(syncer->core, world->now_ns, member, &message->as.push_none);
    } else if (message->type == DL_WIRE_LEASE_REQUEST) {
        sy_core_on_lease_request(syncer->core, world->now_ns, member, &message->as.lease_request);
    } else if (message->type == DL_WIRE_HELD) {
        on_held(world, c, &message->as.held);
    } else if (message->type == DL_WIRE_RECOVERED) {
        sy_core_on_recovered(syncer->core, world->now_ns, member, &message->as.recovered);
    } else if (message->type == DL_WIRE_GOODBYE) {
        bool preempted = message->as.goodbye.preempted != 0;
        sim_syncer_let_go(world, c);
        sy_core_on_leave(syncer->core, world->now_ns, member, preempted ? SY_LEAVE_PREEMPTED : SY_LEAVE_GOODBYE);
        sim_conn_close(world, c, false);
    } else if (message->type != DL_WIRE_HEARTBEAT) {
        sim_fail(world, "a learner sent %s", dl_wire_type_name(message->type));
    }
}

void sim_syncer_packet(struct sim_world *world, uint32_t c, const struct sim_packet *packet)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    if (!conn->syncer_open || !syncer->alive || conn->epoch != syncer->epoch) {
        return;
    }
    sim_conn_arrived(world, c, true, packet);
    const struct dl_wire_message *message = packet->chunk ? NULL : sim_packet_decode(world, packet);
    if (conn->member == SY_NO_MEMBER) {
        if (message != NULL && message->type == DL_WIRE_HELLO) {
            on_hello(world, c, &message->as.hello);
        }
    } else {
        sy_core_on_heard(syncer->core, world->now_ns, conn->member);
        if (packet->chunk) {
            on_chunk(world, c, packet);
        } else if (message != NULL) {
            on_control(world, c, message);
        }
    }
    sim_syncer_settle(world, conn->shard);
}

void sim_syncer_lost(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    if (!conn->syncer_open) {
        return;
    }
    conn->syncer_open = false;
    uint32_t member = conn->member;
    if (!syncer->alive || conn->epoch != syncer->epoch) {
        return;
    }
    sim_syncer_let_go(world, c);
    if (member != SY_NO_MEMBER) {
        sy_core_on_leave(syncer->core, world->now_ns, member, SY_LEAVE_LOST);
    }
    sim_syncer_settle(world, conn->shard);
}
