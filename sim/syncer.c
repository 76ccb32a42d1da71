/* sim_world, a syncer's process: the shell of a sy_core. Merges and commits only take time; a version's content is a
 * hash of what it was made of. What is durable survives a crash. */
#include <assert.h>
#include <stdlib.h>

#include "common/mem.h"
#include "sim/syncer.h"

static struct sim_conn *conn_of(struct sim_world *world, uint32_t shard, uint32_t member)
{
    uint32_t c = world->syncers[shard].member_conns[member];
    return c == SIM_NONE ? NULL : world->conns[c];
}

/* --- actions --- */

static void result(struct sim_world *world, uint32_t shard, const struct sy_action *action, struct sim_conn *conn,
                   uint32_t c)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    enum dl_verdict verdict = (enum dl_verdict)action->as.result.verdict;
    if (verdict != DL_VERDICT_ACCEPTED && verdict != DL_VERDICT_DUPLICATE) {
        uint32_t local = sim_local_of(world, action->fragment);
        struct sim_held **held = sim_held_find(syncer, local, action->round, action->member);
        for (uint32_t k = 0; conn != NULL && *held != NULL && k < DL_COUNT_OF(conn->incoming); k++) {
            bool same = conn->incoming[k].used && conn->incoming[k].push.round == action->round &&
                        conn->incoming[k].push.fragment == action->fragment;
            conn->incoming[k].kept = conn->incoming[k].kept && !same;
        }
        sim_held_drop(held);
    }
    if (conn != NULL) {
        world->scratch.type = DL_WIRE_RESULT;
        world->scratch.as.result = action->as.result;
        sim_transmit(world, c, &world->scratch);
    }
}

static void broadcast(struct sim_world *world, uint32_t shard, uint32_t fragment)
{
    uint32_t local = sim_local_of(world, fragment);
    for (uint32_t m = 0; m < sy_core_members(world->syncers[shard].core); m++) {
        uint32_t c = world->syncers[shard].member_conns[m];
        if (c != SIM_NONE && !sy_core_holds_back(world->syncers[shard].core, m, fragment)) {
            world->conns[c]->wanted[local] = true;
            sim_transmit_soon(world, c);
        }
    }
}

static void carry_out(struct sim_world *world, uint32_t shard, const struct sy_action *action)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    uint32_t c = action->member == SY_NO_MEMBER ? SIM_NONE : syncer->member_conns[action->member];
    struct sim_conn *conn = c == SIM_NONE ? NULL : world->conns[c];
    switch (action->type) {
    case SY_ACT_PULL:
        if (conn != NULL) {
            world->scratch.type = DL_WIRE_PULL;
            world->scratch.as.pull = action->as.pull;
            world->scratch.as.pull.trace_acked = sim_tape_acked(world, shard, conn->nonce);
            sim_transmit(world, c, &world->scratch);
        }
        break;
    case SY_ACT_RESULT: result(world, shard, action, conn, c); break;
    case SY_ACT_MERGE: sim_syncer_merge(world, shard, action); break;
    case SY_ACT_SEED_STORE: sim_syncer_make(world, shard, action, true); break;
    case SY_ACT_BROADCAST: broadcast(world, shard, action->fragment); break;
    case SY_ACT_SEND:
        if (conn != NULL) {
            conn->wanted[sim_local_of(world, action->fragment)] = true;
            sim_transmit_soon(world, c);
        }
        break;
    case SY_ACT_STOP:
        if (conn != NULL) {
            conn->has_farewell = true;
            conn->farewell = action->as.stop;
            sim_transmit_soon(world, c);
        }
        break;
    case SY_ACT_DISCONNECT:
        if (conn != NULL) {
            sim_syncer_let_go(world, c);
            sim_conn_close(world, c, false);
        }
        break;
    case SY_ACT_LEDGER: sim_data_write(world, shard); break;
    case SY_ACT_LEASE:
        if (conn != NULL) {
            world->scratch.type = DL_WIRE_LEASE;
            world->scratch.as.lease = action->as.lease;
            sim_transmit(world, c, &world->scratch);
        }
        break;
    case SY_ACT_PEERS:
        if (conn != NULL) {
            world->scratch.type = DL_WIRE_PEERS;
            world->scratch.as.peers = action->as.peers;
            sim_transmit(world, c, &world->scratch);
        }
        break;
    case SY_ACT_MARKER:
        if (conn != NULL) {
            world->scratch.type = DL_WIRE_MARKER;
            world->scratch.as.marker = action->as.marker;
            sim_transmit(world, c, &world->scratch);
        }
        break;
    case SY_ACT_CUT: sim_cut_take(world, shard, action->version); break;
    case SY_ACT_CUT_LEARNER:
    case SY_ACT_CUT_CLOSED:
    case SY_ACT_NOTE: break;
    }
}

void sim_syncer_settle(struct sim_world *world, uint32_t shard)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    struct sy_action action;
    while (syncer->alive && sy_core_next_action(syncer->core, &action)) {
        carry_out(world, shard, &action);
    }
    const char *fault = sy_core_check(syncer->core);
    if (fault != NULL) {
        sim_fail(world, "shard %u: %s", shard, fault);
    }
    struct sy_core_totals totals;
    sy_core_get_totals(syncer->core, &totals);
    if (totals.tokens > world->tokens || totals.tokens < syncer->totals.tokens) {
        sim_fail(world, "shard %u: counts %llu tokens, trained %llu, saved %llu", shard,
                 (unsigned long long)totals.tokens, (unsigned long long)world->tokens,
                 (unsigned long long)syncer->totals.tokens);
    }
    if (sy_core_is_drained(syncer->core)) {
        sim_at(world, world->now_ns, SIM_SAVED, shard, 0, syncer->epoch, NULL);
    }
    int64_t due_ns = sy_core_next_deadline(syncer->core);
    if (due_ns < syncer->tick_ns) {
        syncer->tick_ns = due_ns;
        sim_at(world, due_ns, SIM_SYNCER_TICK, shard, 0, syncer->epoch, NULL);
    }
}

/* --- life --- */

void sim_syncer_start(struct sim_world *world, uint32_t shard)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    if (syncer->alive) {
        return;
    }
    struct dl_err err;
    struct sy_core_config config = {.spec = world->config.spec, .shard = shard, .epoch = ++syncer->epoch};
    if (sy_core_new(&config, &syncer->core, &err) != DL_OK) {
        sim_fail(world, "%s", err.text);
        return;
    }
    syncer->alive = true;
    syncer->fragments = sy_core_fragment_count(syncer->core);
    assert(syncer->fragments > 0);
    for (uint32_t i = 0; i < syncer->fragments; i++) {
        syncer->current[i] = syncer->durable[i];
        if (syncer->durable[i].version > 0) {
            sy_core_restore_fragment(syncer->core, shard + i * world->config.spec->syncer.shards,
                                     syncer->durable[i].version, syncer->durable[i].round);
        }
    }
    syncer->totals.next_admission = DL_MAX(syncer->totals.next_admission, syncer->next_admission);
    sy_core_restore_totals(syncer->core, &syncer->totals);
    for (uint32_t i = 0; i < syncer->incarnation_count; i++) {
        sy_core_restore_incarnation(syncer->core, &syncer->incarnations[i]);
    }
    sy_core_restore_cut(syncer->core, syncer->durable_cut.id);
    syncer->cut = syncer->durable_cut;
    syncer->unheard = 0;
    syncer->tokens_merged = syncer->totals.tokens_merged;
    if (syncer->incarnations == NULL) {
        syncer->incarnations = calloc(sy_core_members(syncer->core), sizeof *syncer->incarnations);
    }
    syncer->tickets = syncer->written = 0;
    sim_data_restore(world, shard);
    free(syncer->member_conns);
    syncer->member_conns = malloc(sy_core_members(syncer->core) * sizeof *syncer->member_conns);
    for (uint32_t m = 0; syncer->member_conns != NULL && m < sy_core_members(syncer->core); m++) {
        syncer->member_conns[m] = SIM_NONE;
    }
    if (syncer->member_conns == NULL || syncer->incarnations == NULL) {
        sim_fail(world, "no memory for members");
        return;
    }
    syncer->tick_ns = INT64_MAX;
    sim_at(world, world->now_ns, SIM_SYNCER_TICK, shard, 0, syncer->epoch, NULL);
    sim_at(world, world->now_ns, SIM_SYNCER_BEAT, shard, 0, syncer->epoch, NULL);
    sim_at_random(world, world->faults.crash_mean_seconds, SIM_FAULT_CRASH, shard, syncer->epoch);
    sim_at_random(world, world->faults.pause_mean_seconds, SIM_FAULT_PAUSE, shard, syncer->epoch);
}

void sim_syncer_finish(struct sim_world *world, uint32_t shard)
{
    sy_core_on_stop_request(world->syncers[shard].core, world->now_ns, DL_STOP_SUCCEEDED, "another shard has finished");
    sim_syncer_settle(world, shard);
}

/* Kill -9: what is not durable is gone, and so are all its connections. */
void sim_syncer_crash(struct sim_world *world, uint32_t shard)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    if (!syncer->alive) {
        return;
    }
    for (uint32_t c = 0; c < world->conn_count; c++) {
        if (world->conns[c]->shard == shard) {
            sim_conn_close(world, c, false);
        }
    }
    for (uint32_t i = 0; i < syncer->fragments; i++) {
        sim_held_drop_until(syncer, i, UINT64_MAX);
    }
    sim_tape_crash(world, shard);
    sim_data_forget_jobs(syncer);
    sy_core_free(dl_take(syncer->core));
    syncer->alive = false;
    syncer->paused_until_ns = 0;
    int64_t at_ns = world->now_ns + sim_ns(sim_uniform(&world->rng, 0, world->faults.restart_seconds));
    sim_at(world, at_ns, SIM_START_SYNCER, shard, 0, 0, NULL);
}

/* A checkpoint every now and then, told to one shard or to several. */
void sim_syncer_checkpoint(struct sim_world *world)
{
    struct sim_syncer *first = &world->syncers[0];
    if (!first->alive || !sim_chance(world, 0.5)) {
        return;
    }
    uint64_t id = first->epoch << 20 | ++first->cuts_begun;
    for (uint32_t s = 0; s < world->config.spec->syncer.shards; s++) {
        struct sim_syncer *syncer = &world->syncers[s];
        bool reached = s == 0 || sim_chance(world, 0.3);
        if (reached && syncer->alive && world->now_ns >= syncer->paused_until_ns) {
            (void)sy_core_on_cut(syncer->core, world->now_ns, id);
            sim_syncer_settle(world, s);
        }
    }
}

void sim_syncer_saved(struct sim_world *world, uint32_t shard)
{
    sim_syncer_save(&world->syncers[shard], false);
    sim_syncer_crash(world, shard);
}

void sim_syncer_drain(struct sim_world *world, uint32_t shard)
{
    if (world->syncers[shard].alive) {
        sy_core_on_drain(world->syncers[shard].core, world->now_ns);
        sim_syncer_settle(world, shard);
    }
}

void sim_syncer_beat(struct sim_world *world, uint32_t shard)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    struct sy_core_view view;
    sy_core_view(syncer->core, world->now_ns, &view);
    for (uint32_t m = 0; m < sy_core_members(syncer->core); m++) {
        if (conn_of(world, shard, m) != NULL) {
            world->scratch.type = DL_WIRE_HEARTBEAT;
            world->scratch.as.heartbeat = (struct dl_wire_heartbeat){.step = view.step, .tokens = view.tokens};
            sim_transmit(world, syncer->member_conns[m], &world->scratch);
        }
    }
    int64_t next_ns = world->now_ns + sim_ns(world->config.spec->sync.heartbeat_seconds);
    sim_at(world, next_ns, SIM_SYNCER_BEAT, shard, 0, syncer->epoch, NULL);
}

void sim_syncer_tick(struct sim_world *world, uint32_t shard, int64_t at_ns)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    if (at_ns >= syncer->tick_ns || syncer->tick_ns == INT64_MAX) {
        syncer->tick_ns = INT64_MAX;
        sy_core_tick(syncer->core, world->now_ns);
        sim_syncer_settle(world, shard);
    }
}
