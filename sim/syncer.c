/* sim_world, a syncer's process: the shell of a sy_core. Merges and commits only take time; a version's content is a
 * hash of what it was made of. What is durable survives a crash. */
#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/hash.h"
#include "common/mem.h"
#include "sim/state.h"

static uint32_t local_of(const struct sim_world *world, uint32_t fragment)
{
    return fragment / world->config.spec->syncer.shards;
}

static struct sim_conn *conn_of(struct sim_world *world, uint32_t shard, uint32_t member)
{
    uint32_t c = world->syncers[shard].member_conns[member];
    return c == SIM_NONE ? NULL : world->conns[c];
}

/* --- held pushes
 * -------------------------------------------------------------------------------------------------------- */

static struct sim_held **find_held(struct sim_syncer *syncer, uint32_t local, uint64_t round, uint32_t member)
{
    struct sim_held **at = &syncer->held[local];
    while (*at != NULL && !((*at)->push.round == round && (*at)->member == member)) {
        at = &(*at)->next;
    }
    return at;
}

static void drop_held(struct sim_held **at)
{
    struct sim_held *held = *at;
    if (held != NULL) {
        *at = held->next;
        free(held);
    }
}

static void drop_until(struct sim_syncer *syncer, uint32_t local, uint64_t round)
{
    for (struct sim_held **at = &syncer->held[local]; *at != NULL;) {
        if ((*at)->push.round <= round) {
            drop_held(at);
        } else {
            at = &(*at)->next;
        }
    }
}

/* --- actions
 * ------------------------------------------------------------------------------------------------------------ */

static void start_job(struct sim_world *world, uint32_t shard, const struct sy_action *action, bool seed)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    uint32_t local = local_of(world, action->fragment);
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
        const struct sim_held *held = *find_held(syncer, local, action->round, action->member);
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

static void merge(struct sim_world *world, uint32_t shard, const struct sy_action *action)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    const struct sy_participant *participants = NULL;
    uint32_t count = sy_core_participants(syncer->core, action->fragment, &participants);
    for (uint32_t k = 0; k < count; k++) {
        struct sim_held *held =
            *find_held(syncer, local_of(world, action->fragment), action->round, participants[k].member);
        if (held == NULL || !held->complete || held->admission != participants[k].admission) {
            sim_fail(world, "fragment %u round %llu: the push of learner %u is not there", action->fragment,
                     (unsigned long long)action->round, participants[k].learner);
        }
    }
    start_job(world, shard, action, false);
}

static void result(struct sim_world *world, uint32_t shard, const struct sy_action *action, struct sim_conn *conn,
                   uint32_t c)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    enum dl_verdict verdict = (enum dl_verdict)action->as.result.verdict;
    if (verdict != DL_VERDICT_ACCEPTED && verdict != DL_VERDICT_DUPLICATE) {
        uint32_t local = local_of(world, action->fragment);
        struct sim_held **held = find_held(syncer, local, action->round, action->member);
        for (uint32_t k = 0; conn != NULL && *held != NULL && k < DL_COUNT_OF(conn->incoming); k++) {
            bool same = conn->incoming[k].used && conn->incoming[k].push.round == action->round &&
                        conn->incoming[k].push.fragment == action->fragment;
            conn->incoming[k].kept = conn->incoming[k].kept && !same;
        }
        drop_held(held);
    }
    if (conn != NULL) {
        world->scratch.type = DL_WIRE_RESULT;
        world->scratch.as.result = action->as.result;
        sim_transmit(world, c, &world->scratch);
    }
}

/* The members' connections end; what was not complete is gone. `c` stays known only to the events on their way. */
static void let_go(struct sim_world *world, uint32_t c)
{
    struct sim_conn *conn = world->conns[c];
    struct sim_syncer *syncer = &world->syncers[conn->shard];
    for (uint32_t k = 0; k < DL_COUNT_OF(conn->incoming); k++) {
        if (conn->incoming[k].used && conn->incoming[k].kept) {
            const struct dl_wire_push *push = &conn->incoming[k].push;
            drop_held(find_held(syncer, local_of(world, push->fragment), push->round, conn->member));
        }
        conn->incoming[k].used = false;
    }
    if (conn->member != SY_NO_MEMBER && syncer->member_conns[conn->member] == c) {
        syncer->member_conns[conn->member] = SIM_NONE;
    }
    conn->member = SY_NO_MEMBER;
}

static void broadcast(struct sim_world *world, uint32_t shard, uint32_t local)
{
    for (uint32_t m = 0; m < sy_core_members(world->syncers[shard].core); m++) {
        uint32_t c = world->syncers[shard].member_conns[m];
        if (c != SIM_NONE) {
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
    case SY_ACT_MERGE: merge(world, shard, action); break;
    case SY_ACT_SEED_STORE: start_job(world, shard, action, true); break;
    case SY_ACT_BROADCAST: broadcast(world, shard, local_of(world, action->fragment)); break;
    case SY_ACT_SEND:
        if (conn != NULL) {
            conn->wanted[local_of(world, action->fragment)] = true;
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
            let_go(world, c);
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

static void after_event(struct sim_world *world, uint32_t shard)
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

void sim_syncer_settle(struct sim_world *world, uint32_t shard)
{
    after_event(world, shard);
}

bool sim_syncer_writes(struct sim_world *world, uint32_t shard, uint64_t ticket)
{
    struct sim_syncer *syncer = &world->syncers[shard];
    if (ticket != syncer->written + 1) {
        return false;
    }
    syncer->written++;
    return true;
}

/* --- what comes in
 * ------------------------------------------------------------------------------------------------------ */

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
        let_go(world, before);
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
    *held = (struct sim_held){.next = syncer->held[local_of(world, push.fragment)],
                              .member = conn->member,
                              .nonce = conn->nonce,
                              .admission = view.admission,
                              .push = push};
    syncer->held[local_of(world, push.fragment)] = held;
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
        struct sim_held *held = *find_held(syncer, local_of(world, push.fragment), push.round, conn->member);
        if (!kept || held == NULL) {
            return;
        }
        held->complete = true;
        double norm = draw_norm(world);
        sy_core_on_push_received(syncer->core, world->now_ns, conn->member, push.round, push.fragment, intact, norm);
        after_event(world, conn->shard);
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
    const struct sim_durable *current = &syncer->current[local_of(world, held->fragment)];
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
        let_go(world, c);
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
    after_event(world, conn->shard);
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
    let_go(world, c);
    if (member != SY_NO_MEMBER) {
        sy_core_on_leave(syncer->core, world->now_ns, member, SY_LEAVE_LOST);
    }
    after_event(world, conn->shard);
}

/* --- commits
 * ------------------------------------------------------------------------------------------------------------ */

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
static void save(struct sim_syncer *syncer, bool is_merge)
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
        after_event(world, shard);
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
        const struct sim_held *held = *find_held(syncer, local, syncer->making[local].round, participants[k].member);
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
    save(syncer, count > 0);
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
    drop_until(syncer, local, view.open_round);
    syncer->unheard -= syncer->durable[local].round > 0 ? 1 : 0;
    sy_core_on_committed(syncer->core, world->now_ns, fragment, syncer->merge_ns[local], syncer->commit_ns[local]);
    after_event(world, shard);
}

/* --- life
 * --------------------------------------------------------------------------------------------------------------- */

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
    if (world->faults.crash_mean_seconds > 0) {
        double seconds = sim_exponential(&world->rng, world->faults.crash_mean_seconds);
        sim_at(world, world->now_ns + sim_ns(seconds), SIM_FAULT_CRASH, shard, 0, syncer->epoch, NULL);
    }
    if (world->faults.pause_mean_seconds > 0) {
        double seconds = sim_exponential(&world->rng, world->faults.pause_mean_seconds);
        sim_at(world, world->now_ns + sim_ns(seconds), SIM_FAULT_PAUSE, shard, 0, syncer->epoch, NULL);
    }
}

void sim_syncer_finish(struct sim_world *world, uint32_t shard)
{
    sy_core_on_stop_request(world->syncers[shard].core, world->now_ns, DL_STOP_SUCCEEDED, "another shard has finished");
    after_event(world, shard);
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
        drop_until(syncer, i, UINT64_MAX);
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
            after_event(world, s);
        }
    }
}

void sim_syncer_saved(struct sim_world *world, uint32_t shard)
{
    save(&world->syncers[shard], false);
    sim_syncer_crash(world, shard);
}

void sim_syncer_drain(struct sim_world *world, uint32_t shard)
{
    if (world->syncers[shard].alive) {
        sy_core_on_drain(world->syncers[shard].core, world->now_ns);
        after_event(world, shard);
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
        after_event(world, shard);
    }
}
