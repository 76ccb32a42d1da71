/* sim_world, a learner's process: the shell of a wk_link. Its trainer has no model; a step only takes time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"

static void schedule_tick(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    int64_t due_ns = DL_MAX(wk_link_deadline(learner->link), world->now_ns);
    if (due_ns < learner->tick_ns) {
        learner->tick_ns = due_ns;
        sim_at(world, due_ns, SIM_LINK_TICK, n, 0, learner->generation, NULL);
    }
}

static void check_link(struct sim_world *world, uint32_t n)
{
    const char *fault = wk_link_check(world->learners[n].link);
    if (fault != NULL) {
        sim_fail(world, "learner %u: %s", n, fault);
    }
}

/* --- network side --- */

static void connect(struct sim_world *world, uint32_t n, uint32_t shard)
{
    struct sim_learner *learner = &world->learners[n];
    uint32_t c = sim_conn_new(world, n, shard);
    if (c == SIM_NONE) {
        return;
    }
    learner->conns[shard] = c;
    world->counts.connects++;
    int64_t delay_ns = sim_ns(2 * world->faults.delay_seconds);
    sim_at(world, world->now_ns + delay_ns, SIM_CONNECTED, c, 0, 0, NULL);
}

/* The next thing that the link wants to do on a connection. */
static void act(struct sim_world *world, uint32_t n, uint32_t shard)
{
    struct sim_learner *learner = &world->learners[n];
    struct wk_act what;
    wk_link_next_act(learner->link, world->now_ns, shard, &what);
    uint32_t c = learner->conns[shard];
    switch (what.type) {
    case WK_ACT_NONE: return;
    case WK_ACT_CONNECT: connect(world, n, shard); return;
    case WK_ACT_CLOSE:
        if (c != SIM_NONE) {
            sim_conn_close(world, c, true);
            learner->conns[shard] = SIM_NONE;
        }
        break;
    case WK_ACT_SEND: sim_conn_up(world, c, sim_packet_encode(world, what.message)); break;
    case WK_ACT_CHUNK: {
        struct sim_packet *packet = calloc(1, sizeof *packet);
        if (packet == NULL) {
            sim_fail(world, "no memory for a packet");
            return;
        }
        packet->chunk = true;
        packet->transfer = what.chunk.transfer;
        packet->offset = what.chunk.offset;
        packet->chunk_bytes = what.chunk.bytes;
        packet->intact = !sim_chance(world, world->faults.damage_share);
        world->counts.damaged += packet->intact ? 0 : 1;
        sim_conn_up(world, c, packet);
        sim_at(world, world->now_ns + sim_chunk_ns(world, world->conns[c]), SIM_LINK_SENT, n, c, learner->generation,
               NULL);
        return;
    }
    }
    sim_at(world, world->now_ns + 1, SIM_LINK_PUMP, n, shard, learner->generation, NULL);
}

static void pump_all(struct sim_world *world, uint32_t n)
{
    for (uint32_t s = 0; s < world->config.spec->syncer.shards && world->learners[n].alive; s++) {
        act(world, n, s);
    }
    schedule_tick(world, n);
}

/* --- trainer --- */

static void applied(struct sim_world *world, uint32_t n, const struct wk_step *step)
{
    struct sim_learner *learner = &world->learners[n];
    wk_link_on_applied(learner->link, step->fragment);
    struct dl_wire_fragment now;
    wk_link_fragment(learner->link, step->fragment, &now);
    sim_tape_done(world, n, "apply", step->fragment, now.version);
    learner->base_content[step->fragment] = learner->slot_content[step->fragment][step->slot];
    world->counts.versions_applied++;
    if (now.version > 0) {
        sim_ledger_content(world, step->fragment, now.version, learner->slot_content[step->fragment][step->slot],
                           false);
    }
}

static void snapshot(struct sim_world *world, uint32_t n, uint32_t fragment)
{
    struct dl_wire_fragment now;
    wk_link_fragment(world->learners[n].link, fragment, &now);
    wk_link_on_snapshot(world->learners[n].link, fragment);
    sim_tape_done(world, n, "snapshot", fragment, now.version);
}

/* A trainer of its own mind: now and then something else decides about its steps. */
static void decide(struct sim_world *world, uint32_t n)
{
    if (world->config.note_share > 0 && sim_chance(world, world->config.note_share)) {
        uint64_t what = dl_rng_below(&world->rng, 1000);
        wk_link_trace(world->learners[n].link, "decision", DL_TRACE_NO_FRAGMENT, what, 0, 0, NULL);
        sim_tape_done(world, n, "decision", DL_TRACE_NO_FRAGMENT, what);
    }
}

static void wake_at(struct sim_world *world, uint32_t n, int64_t at_ns)
{
    struct sim_learner *learner = &world->learners[n];
    if (at_ns < learner->trainer_ns) {
        learner->trainer_ns = at_ns;
        sim_at(world, at_ns, SIM_TRAINER, n, 0, learner->generation, NULL);
    }
}

static void begin_step(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    double seconds = world->faults.step_seconds * learner->speed * sim_uniform(&world->rng, 0.875, 1.125);
    learner->stepping = true;
    sim_data_take(world, n);
    wake_at(world, n, world->now_ns + DL_MAX(sim_ns(seconds), 1));
}

/* Does what the boundary asks for until the trainer may go on, has to wait, or is done. */
static void boundary(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    for (uint32_t guard = 0; guard < 1000; guard++) {
        struct wk_step step;
        wk_link_next_step(learner->link, world->now_ns, &step);
        switch (step.type) {
        case WK_STEP_PREPARE: wk_link_on_prepared(learner->link); break;
        case WK_STEP_APPLY: applied(world, n, &step); break;
        case WK_STEP_SNAPSHOT: snapshot(world, n, step.fragment); break;
        case WK_STEP_FETCH: {
            int64_t again_ns = 0;
            if (!sim_fetch(world, n, &again_ns)) {
                wake_at(world, n, again_ns);
                return;
            }
            break;
        }
        case WK_STEP_YIELD: wake_at(world, n, world->now_ns + SIM_SECOND / 1000); return;
        case WK_STEP_WAIT:
            if (step.until_ns != INT64_MAX) {
                wake_at(world, n, DL_MAX(step.until_ns, world->now_ns + 1));
            }
            return;
        case WK_STEP_GO: begin_step(world, n); return;
        case WK_STEP_DONE: learner->done = true; return;
        }
    }
    sim_fail(world, "learner %u: a boundary that does not end", n);
}

void sim_learner_train(struct sim_world *world, uint32_t n, int64_t at_ns)
{
    struct sim_learner *learner = &world->learners[n];
    if (at_ns < learner->trainer_ns) {
        return; /* Of an appointment that was moved forward, and kept. */
    }
    learner->trainer_ns = INT64_MAX;
    if (learner->done) {
        return;
    }
    if (learner->stepping) {
        learner->stepping = false;
        world->incarnations[learner->incarnation].tokens += world->config.step_tokens;
        world->tokens += world->config.step_tokens;
        decide(world, n);
        wk_link_on_step(learner->link, world->now_ns, world->config.step_tokens, 2.0f);
    }
    boundary(world, n);
    pump_all(world, n);
    check_link(world, n);
}

/* Something came in: a trainer that waits at its boundary looks again. */
static void wake(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    if (!learner->stepping && !learner->done) {
        wake_at(world, n, world->now_ns);
    }
}

/* --- life --- */

void sim_learner_start(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    if (learner->alive) {
        return;
    }
    char uid[DL_WIRE_UID_MAX];
    snprintf(uid, sizeof uid, "pod-%u-%u", n, learner->incarnations);
    learner->nonce = ++world->nonces * UINT64_C(0x9e3779b97f4a7c15);
    struct wk_link_config config = {
        .role = DL_ROLE_LEARNER,
        .learner = (int32_t)n,
        .nonce = learner->nonce,
        .uid = uid,
        .job = world->config.spec->name,
        .shards = world->config.spec->syncer.shards,
        .tensors = world->layout->tensors,
        .tensor_count = world->layout->tensor_count,
        .batch = SIM_BATCH,
        .recover = true,
        .keep_missed = true,
    };
    struct dl_err err;
    if (wk_link_new(&config, &learner->link, &err) != DL_OK) {
        sim_fail(world, "%s", err.text);
        return;
    }
    char serve[32];
    snprintf(serve, sizeof serve, "learner-%u:1", n);
    wk_link_set_serve(learner->link, serve);
    sim_fetch_release(learner);
    learner->generation++;
    learner->incarnations++;
    learner->incarnation = sim_ledger_incarnation(world, learner->nonce);
    learner->alive = true;
    learner->stepping = learner->done = false;
    learner->source = UINT64_MAX;
    learner->trainer_ns = learner->tick_ns = INT64_MAX;
    for (uint32_t s = 0; s < SIM_SHARDS_MAX; s++) {
        learner->conns[s] = SIM_NONE;
    }
    pump_all(world, n);
    wake(world, n);
    sim_at_random(world, world->faults.kill_mean_seconds, SIM_FAULT_KILL, n, learner->generation);
    sim_at_random(world, world->faults.stall_mean_seconds, SIM_FAULT_STALL, n, learner->generation);
}

/* The kernel closes its sockets: the syncers hear of it, unless the connection was blocked or cut. */
void sim_learner_kill(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    if (!learner->alive) {
        return;
    }
    bool polite = sim_chance(world, world->faults.goodbye_share);
    for (uint32_t s = 0; s < world->config.spec->syncer.shards; s++) {
        uint32_t c = learner->conns[s];
        if (c == SIM_NONE) {
            continue;
        }
        if (polite && world->conns[c]->member != SY_NO_MEMBER) {
            world->scratch.type = DL_WIRE_GOODBYE;
            world->scratch.as.goodbye = (struct dl_wire_goodbye){.preempted = 1};
            sim_conn_up(world, c, sim_packet_encode(world, &world->scratch));
        }
        sim_conn_close(world, c, true);
    }
    struct wk_link_view view;
    wk_link_view(learner->link, &view);
    learner->steps_before += view.step;
    wk_link_free(dl_take(learner->link));
    sim_fetch_release(learner);
    learner->alive = false;
    learner->generation++;
    learner->stalled_until_ns = 0;
}

/* --- events --- */

void sim_learner_sent(struct sim_world *world, uint32_t n, uint32_t c)
{
    /* When the connection is gone, the link has forgotten the chunk. */
    const struct sim_conn *conn = world->conns[c];
    struct sim_learner *learner = &world->learners[n];
    if (conn->link_open && learner->conns[conn->shard] == c) {
        wk_link_on_chunk_sent(learner->link, world->now_ns, conn->shard);
        pump_all(world, n);
        wake(world, n);
    }
}

void sim_learner_pump(struct sim_world *world, uint32_t n, uint32_t shard)
{
    act(world, n, shard);
    schedule_tick(world, n);
}

void sim_learner_tick(struct sim_world *world, uint32_t n)
{
    world->learners[n].tick_ns = INT64_MAX;
    wk_link_tick(world->learners[n].link, world->now_ns);
    pump_all(world, n);
    wake(world, n);
}

void sim_learner_connected(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_learner *learner = &world->learners[conn->learner];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    if (!learner->alive || learner->conns[conn->shard] != c) {
        return;
    }
    if (!syncer->alive || world->now_ns < learner->isolated_until_ns) {
        learner->conns[conn->shard] = SIM_NONE;
        wk_link_on_disconnected(learner->link, world->now_ns, conn->shard, "refused");
    } else {
        conn->link_open = conn->syncer_open = true;
        conn->epoch = syncer->epoch;
        wk_link_on_connected(learner->link, world->now_ns, conn->shard);
        sim_at_random(world, world->faults.cut_mean_seconds, SIM_FAULT_CUT, c, 0);
        sim_at_random(world, world->faults.block_mean_seconds, SIM_FAULT_BLOCK, c, 0);
    }
    pump_all(world, conn->learner);
}

void sim_learner_lost(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_learner *learner = &world->learners[conn->learner];
    if (!conn->link_open) {
        return;
    }
    conn->link_open = false;
    if (learner->alive && learner->conns[conn->shard] == c) {
        learner->conns[conn->shard] = SIM_NONE;
        wk_link_on_disconnected(learner->link, world->now_ns, conn->shard, "reset");
        pump_all(world, conn->learner);
        wake(world, conn->learner);
    }
}

static void take_chunk(struct sim_world *world, uint32_t c, const struct sim_packet *packet)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_learner *learner = &world->learners[conn->learner];
    struct wk_spot spot;
    enum wk_place place = wk_link_place(learner->link, world->now_ns, conn->shard, packet->transfer, packet->offset,
                                        packet->chunk_bytes, &spot);
    if (place != WK_PLACE_STORE) {
        return; /* Of no use any more, or the link is about to close the connection. */
    }
    uint64_t hash = 0;
    learner->slot_content[spot.fragment][spot.slot] = packet->content;
    if (wk_link_on_chunk(learner->link, world->now_ns, conn->shard, packet->intact, &hash)) {
        wk_link_on_update(learner->link, world->now_ns, conn->shard, hash == packet->content);
    }
}

void sim_learner_packet(struct sim_world *world, uint32_t c, const struct sim_packet *packet)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_learner *learner = &world->learners[conn->learner];
    if (!conn->link_open || !learner->alive || learner->conns[conn->shard] != c) {
        return;
    }
    sim_conn_arrived(world, c, false, packet);
    wk_link_on_heard(learner->link, world->now_ns, conn->shard);
    if (packet->chunk) {
        take_chunk(world, c, packet);
    } else {
        const struct dl_wire_message *message = sim_packet_decode(world, packet);
        if (message != NULL) {
            wk_link_on_message(learner->link, world->now_ns, conn->shard, message);
        }
    }
    check_link(world, conn->learner);
    pump_all(world, conn->learner);
    wake(world, conn->learner);
}
