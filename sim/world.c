/* sim_world: the loop, and what befalls processes. */
#include "sim/world.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"

#define TENSORS 12
#define SUPERVISE_NS (5 * SIM_SECOND)

/* --- what the parts use --- */

void sim_fail(struct sim_world *world, const char *fmt, ...)
{
    if (world->fault.rc != DL_OK) {
        return;
    }
    char text[DL_ERR_TEXT_MAX];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    dl_err_set(&world->fault, DL_ECORRUPT, "seed %llu at %.6f s: %.400s", (unsigned long long)world->config.seed,
               (double)world->now_ns / 1e9, text);
}

void sim_at(struct sim_world *world, int64_t at_ns, enum sim_kind kind, uint32_t a, uint32_t b, uint64_t generation,
            void *payload)
{
    struct sim_event event = {
        .at_ns = at_ns, .kind = (uint32_t)kind, .a = a, .b = b, .generation = generation, .payload = payload};
    struct dl_err err;
    if (sim_queue_add(&world->queue, &event, &err) != DL_OK) {
        sim_fail(world, "%s", err.text);
    }
}

void sim_at_random(struct sim_world *world, double mean_seconds, enum sim_kind kind, uint32_t a, uint64_t generation)
{
    if (mean_seconds > 0) {
        sim_at(world, world->now_ns + sim_ns(sim_exponential(&world->rng, mean_seconds)), kind, a, 0, generation, NULL);
    }
}

bool sim_chance(struct sim_world *world, double share)
{
    return share > 0 && (double)dl_rng_uniform(&world->rng) < share;
}

/* --- life --- */

static enum dl_rc make_layout(struct sim_world *world, struct dl_err *err)
{
    static struct dl_tensor tensors[TENSORS];
    memset(tensors, 0, sizeof tensors);
    for (uint32_t i = 0; i < TENSORS; i++) {
        tensors[i] = (struct dl_tensor){.rank = 2, .shape = {300 + i, 2000}, .layer = i};
        snprintf(tensors[i].name, sizeof tensors[i].name, "tensor.%u", i);
    }
    return dl_layout_new(tensors, TENSORS, world->config.spec->sync.fragments, world->config.spec->sync.layout,
                         &world->layout, err);
}

static enum dl_rc check_config(const struct sim_config *config, struct dl_err *err)
{
    const struct dl_spec *spec = config->spec;
    if (spec->learners.replicas > SIM_LEARNERS_MAX || spec->syncer.shards > SIM_SHARDS_MAX ||
        spec->sync.fragments > SIM_FRAGMENTS_MAX) {
        return dl_err_set(err, DL_EINVAL,
                          "simulate %u learners, %u shards, %u fragments: at most %d, %d and %d are possible",
                          spec->learners.replicas, spec->syncer.shards, spec->sync.fragments, SIM_LEARNERS_MAX,
                          SIM_SHARDS_MAX, SIM_FRAGMENTS_MAX);
    }
    return DL_OK;
}

enum dl_rc sim_world_new(const struct sim_config *config, struct sim_world **out, struct dl_err *err)
{
    enum dl_rc rc = check_config(config, err);
    struct sim_world *world = rc == DL_OK ? calloc(1, sizeof *world) : NULL;
    if (world == NULL) {
        return rc != DL_OK ? rc : dl_err_set(err, DL_ENOMEM, "simulation: no memory");
    }
    world->config = *config;
    world->faults = config->faults;
    dl_rng_init(&world->rng, config->seed, dl_rng_stream("simulation", 0, 0));
    sim_queue_init(&world->queue);
    world->encode_buffer = malloc(SIM_ENCODE_BYTES);
    rc = world->encode_buffer == NULL ? dl_err_set(err, DL_ENOMEM, "simulation: no memory") : make_layout(world, err);
    if (rc != DL_OK) {
        sim_world_free(world);
        return rc;
    }
    for (uint32_t s = 0; s < config->spec->syncer.shards; s++) {
        world->syncers[s].next_admission = 1;
        sim_syncer_start(world, s);
    }
    for (uint32_t n = 0; n < config->spec->learners.replicas; n++) {
        bool late = sim_chance(world, world->faults.late_share);
        world->counts.late_joins += late ? 1 : 0;
        world->learners[n].speed = sim_chance(world, world->faults.slow_share) ? world->faults.slow_factor : 1;
        double after = late ? sim_uniform(&world->rng, 0, world->faults.late_seconds) : 0;
        sim_at(world, sim_ns(after), SIM_START_LEARNER, n, 0, 0, NULL);
    }
    sim_at(world, SUPERVISE_NS, SIM_SUPERVISE, 0, 0, 0, NULL);
    *out = world;
    return DL_OK;
}

void sim_world_free(struct sim_world *world)
{
    if (world == NULL) {
        return;
    }
    for (uint32_t n = 0; n < SIM_LEARNERS_MAX; n++) {
        wk_link_free(world->learners[n].link);
        sim_fetch_release(&world->learners[n]);
    }
    for (uint32_t s = 0; s < SIM_SHARDS_MAX; s++) {
        struct sim_syncer *syncer = &world->syncers[s];
        sy_core_free(syncer->core);
        free(syncer->member_conns);
        free(syncer->incarnations);
        sim_data_forget_jobs(syncer);
        for (uint32_t i = 0; i < SIM_FRAGMENTS_MAX; i++) {
            while (syncer->held[i] != NULL) {
                struct sim_held *next = syncer->held[i]->next;
                free(syncer->held[i]);
                syncer->held[i] = next;
            }
        }
    }
    for (uint32_t c = 0; c < world->conn_count; c++) {
        for (uint32_t k = 0; k < world->conns[c]->queue_count; k++) {
            free(world->conns[c]->queue[k]);
        }
        free(world->conns[c]->queue);
        free(world->conns[c]);
    }
    for (uint32_t i = 0; i < SIM_FRAGMENTS_MAX; i++) {
        free(world->contents[i]);
        free(world->clocks[i]);
    }
    for (uint32_t i = 0; i < world->incarnation_count; i++) {
        free(world->incarnations[i].done);
        free(world->incarnations[i].order);
    }
    free(world->conns);
    sim_data_release(world);
    free(world->incarnations);
    free(world->encode_buffer);
    dl_layout_free(world->layout);
    sim_queue_release(&world->queue);
    free(world);
}

/* --- faults --- */

void sim_world_stall(struct sim_world *world, uint32_t n, double seconds)
{
    int64_t *until_ns = &world->learners[n].stalled_until_ns;
    *until_ns = DL_MAX(*until_ns, world->now_ns + sim_ns(seconds)); /* What is held comes in order at one time. */
}

void sim_world_kill(struct sim_world *world, uint32_t n, double restart_seconds)
{
    sim_learner_kill(world, n);
    if (restart_seconds >= 0) {
        sim_at(world, world->now_ns + sim_ns(restart_seconds), SIM_START_LEARNER, n, 0, 0, NULL);
    }
}

void sim_world_isolate(struct sim_world *world, uint32_t n, double seconds)
{
    struct sim_learner *learner = &world->learners[n];
    learner->isolated_until_ns = world->now_ns + sim_ns(seconds);
    for (uint32_t s = 0; s < world->config.spec->syncer.shards; s++) {
        if (learner->conns[s] != SIM_NONE) {
            sim_conn_cut(world, learner->conns[s]);
        }
    }
}

void sim_world_crash(struct sim_world *world, uint32_t shard, double restart_seconds)
{
    sim_syncer_crash(world, shard);
    sim_at(world, world->now_ns + sim_ns(restart_seconds), SIM_START_SYNCER, shard, 0, 0, NULL);
}

void sim_world_set_link(struct sim_world *world, uint32_t n, double chunk_seconds)
{
    world->learners[n].chunk_seconds = chunk_seconds;
}

void sim_world_set_speed(struct sim_world *world, uint32_t n, double factor)
{
    world->learners[n].speed = factor;
}

static void again(struct sim_world *world, const struct sim_event *event, double mean_seconds)
{
    sim_at_random(world, mean_seconds, (enum sim_kind)event->kind, event->a, event->generation);
}

static void fault_block(struct sim_world *world, const struct sim_event *event)
{
    struct sim_conn *conn = world->conns[event->a];
    if (conn->link_open) {
        world->counts.blocks++;
        int64_t until_ns = world->now_ns + sim_ns(sim_uniform(&world->rng, 0, world->faults.block_seconds));
        conn->blocked_until_ns = DL_MAX(conn->blocked_until_ns, until_ns);
        again(world, event, world->faults.block_mean_seconds);
    }
}

static void fault_kill(struct sim_world *world, const struct sim_event *event)
{
    world->counts.kills++;
    sim_world_kill(world, event->a, sim_uniform(&world->rng, 0, world->faults.restart_seconds));
}

static void fault_stall(struct sim_world *world, const struct sim_event *event)
{
    world->counts.stalls++;
    sim_world_stall(world, event->a, sim_uniform(&world->rng, 0, world->faults.stall_seconds));
    again(world, event, world->faults.stall_mean_seconds);
}

static void fault_crash(struct sim_world *world, const struct sim_event *event)
{
    if (sim_chance(world, world->faults.drain_share)) {
        world->counts.drains++;
        sim_syncer_drain(world, event->a);
    } else {
        world->counts.crashes++;
        sim_syncer_crash(world, event->a);
    }
}

static void fault_pause(struct sim_world *world, const struct sim_event *event)
{
    world->counts.pauses++;
    int64_t *until_ns = &world->syncers[event->a].paused_until_ns;
    double seconds = sim_uniform(&world->rng, 0, world->faults.pause_seconds);
    *until_ns = DL_MAX(*until_ns, world->now_ns + sim_ns(seconds)); /* What is held comes in order at one time. */
    again(world, event, world->faults.pause_mean_seconds);
}

void sim_world_heal(struct sim_world *world)
{
    world->healed = true;
    sim_faults_heal(&world->faults);
    for (uint32_t c = 0; c < world->conn_count; c++) {
        struct sim_conn *conn = world->conns[c];
        if (conn->blocked_until_ns < INT64_MAX / 2) {
            conn->blocked_until_ns = 0;
        }
    }
}

/* --- the loop --- */

/* Until when the process that the event is for stands still. */
static int64_t held_until(const struct sim_world *world, const struct sim_event *event)
{
    const struct sim_conn *conn = NULL;
    switch ((enum sim_kind)event->kind) {
    case SIM_TRAINER:
    case SIM_LINK_PUMP:
    case SIM_LINK_SENT:
    case SIM_LINK_TICK: return world->learners[event->a].stalled_until_ns;
    case SIM_CONNECTED:
    case SIM_DOWN:
    case SIM_LINK_LOST: conn = world->conns[event->a]; return world->learners[conn->learner].stalled_until_ns;
    case SIM_UP:
    case SIM_SYNCER_LOST:
    case SIM_SYNCER_PUMP: conn = world->conns[event->a]; return world->syncers[conn->shard].paused_until_ns;
    case SIM_SYNCER_TICK:
    case SIM_SYNCER_BEAT:
    case SIM_DURABLE:
    case SIM_LEDGER:
    case SIM_COMMITTED:
    case SIM_SAVED: return world->syncers[event->a].paused_until_ns;
    case SIM_FAULT_CUT:
    case SIM_FAULT_BLOCK:
    case SIM_FAULT_KILL:
    case SIM_FAULT_STALL:
    case SIM_FAULT_CRASH:
    case SIM_FAULT_PAUSE:
    case SIM_START_LEARNER:
    case SIM_START_SYNCER:
    case SIM_SUPERVISE: break;
    }
    return 0;
}

static bool is_of_the_past(const struct sim_world *world, const struct sim_event *event)
{
    switch ((enum sim_kind)event->kind) {
    case SIM_TRAINER:
    case SIM_LINK_PUMP:
    case SIM_LINK_SENT:
    case SIM_LINK_TICK:
    case SIM_FAULT_KILL:
    case SIM_FAULT_STALL:
        return !world->learners[event->a].alive || world->learners[event->a].generation != event->generation;
    case SIM_SYNCER_TICK:
    case SIM_SYNCER_BEAT:
    case SIM_DURABLE:
    case SIM_LEDGER:
    case SIM_COMMITTED:
    case SIM_SAVED:
    case SIM_FAULT_CRASH:
    case SIM_FAULT_PAUSE: return !world->syncers[event->a].alive || world->syncers[event->a].epoch != event->generation;
    case SIM_SYNCER_PUMP: {
        const struct sim_syncer *syncer = &world->syncers[world->conns[event->a]->shard];
        return !syncer->alive || syncer->epoch != event->generation;
    }
    case SIM_CONNECTED:
    case SIM_UP:
    case SIM_DOWN:
    case SIM_LINK_LOST:
    case SIM_SYNCER_LOST:
    case SIM_FAULT_CUT:
    case SIM_FAULT_BLOCK:
    case SIM_START_LEARNER:
    case SIM_START_SYNCER:
    case SIM_SUPERVISE: break;
    }
    return false;
}

static bool is_fault(uint32_t kind)
{
    return kind >= SIM_FAULT_CUT && kind <= SIM_FAULT_PAUSE;
}

static void supervise(struct sim_world *world);

static void dispatch(struct sim_world *world, const struct sim_event *event)
{
    uint32_t a = event->a, b = event->b;
    switch ((enum sim_kind)event->kind) {
    case SIM_TRAINER: sim_learner_train(world, a, event->at_ns); break;
    case SIM_LINK_PUMP: sim_learner_pump(world, a, b); break;
    case SIM_LINK_SENT: sim_learner_sent(world, a, b); break;
    case SIM_LINK_TICK: sim_learner_tick(world, a); break;
    case SIM_CONNECTED: sim_learner_connected(world, a); break;
    case SIM_UP: sim_syncer_packet(world, a, event->payload); break;
    case SIM_DOWN: sim_learner_packet(world, a, event->payload); break;
    case SIM_LINK_LOST: sim_learner_lost(world, a); break;
    case SIM_SYNCER_LOST: sim_syncer_lost(world, a); break;
    case SIM_SYNCER_PUMP: sim_syncer_pump(world, a); break;
    case SIM_SYNCER_TICK: sim_syncer_tick(world, a, event->at_ns); break;
    case SIM_SYNCER_BEAT: sim_syncer_beat(world, a); break;
    case SIM_DURABLE: sim_syncer_durable(world, a, b); break;
    case SIM_COMMITTED: sim_syncer_committed(world, a, b); break;
    case SIM_SAVED: sim_syncer_saved(world, a); break;
    case SIM_LEDGER: sim_data_durable(world, a); break;
    case SIM_FAULT_CUT: sim_conn_cut(world, a); break;
    case SIM_FAULT_BLOCK: fault_block(world, event); break;
    case SIM_FAULT_KILL: fault_kill(world, event); break;
    case SIM_FAULT_STALL: fault_stall(world, event); break;
    case SIM_FAULT_CRASH: fault_crash(world, event); break;
    case SIM_FAULT_PAUSE: fault_pause(world, event); break;
    case SIM_START_LEARNER: sim_learner_start(world, a); break;
    case SIM_START_SYNCER: sim_syncer_start(world, a); break;
    case SIM_SUPERVISE: supervise(world); break;
    }
}

static bool everyone_is_done(const struct sim_world *world)
{
    for (uint32_t n = 0; n < world->config.spec->learners.replicas; n++) {
        if (!world->learners[n].alive || !world->learners[n].done) {
            return false;
        }
    }
    return true;
}

/* A supervisor sees a shard's success, and has the others finish: a shard that was cut off may have missed the tokens
 * that it would need to see it by itself, and learners that start now cannot join what is over. */
static void supervise(struct sim_world *world)
{
    bool ended[SIM_SHARDS_MAX] = {false};
    for (uint32_t s = 0; s < world->config.spec->syncer.shards; s++) {
        struct sy_core_view view;
        if (world->syncers[s].alive) {
            sy_core_view(world->syncers[s].core, world->now_ns, &view);
            ended[s] = view.phase == SY_ENDED;
        }
        world->job_is_over = world->job_is_over || ended[s];
    }
    for (uint32_t s = 0; s < world->config.spec->syncer.shards && world->job_is_over; s++) {
        if (world->syncers[s].alive && !ended[s] && world->now_ns >= world->syncers[s].paused_until_ns) {
            sim_syncer_finish(world, s);
        }
    }
    sim_syncer_checkpoint(world);
    sim_at(world, world->now_ns + SUPERVISE_NS, SIM_SUPERVISE, 0, 0, 0, NULL);
}

enum dl_rc sim_world_run(struct sim_world *world, int64_t until_ns, bool *over, struct dl_err *err)
{
    *over = everyone_is_done(world);
    while (world->fault.rc == DL_OK && !*over && sim_queue_next_ns(&world->queue) <= until_ns) {
        struct sim_event event;
        (void)sim_queue_take(&world->queue, &event);
        world->now_ns = DL_MAX(world->now_ns, event.at_ns);
        int64_t held_ns = held_until(world, &event);
        if (held_ns > world->now_ns) {
            if (sim_queue_defer(&world->queue, &event, held_ns, err) != DL_OK) {
                return err->rc;
            }
            continue;
        }
        if (!is_of_the_past(world, &event) && !(world->healed && is_fault(event.kind))) {
            world->counts.events++;
            dispatch(world, &event);
        }
        free(event.payload);
        *over = everyone_is_done(world);
    }
    if (world->fault.rc != DL_OK) {
        *err = world->fault;
        return err->rc;
    }
    world->now_ns = *over ? world->now_ns : DL_MAX(world->now_ns, until_ns);
    return DL_OK;
}

/* --- views --- */

int64_t sim_world_now(const struct sim_world *world)
{
    return world->now_ns;
}

void sim_world_learner(const struct sim_world *world, uint32_t n, struct sim_learner_view *view)
{
    const struct sim_learner *learner = &world->learners[n];
    *view = (struct sim_learner_view){
        .alive = learner->alive, .steps_all = learner->steps_before, .incarnations = learner->incarnations};
    if (learner->alive) {
        struct wk_link_view link;
        wk_link_view(learner->link, &link);
        view->step = link.step;
        view->tokens = link.tokens;
        view->steps_all += link.step;
        view->waited_seconds = (double)link.waited_ns / 1e9;
        struct wk_data_view data;
        wk_link_data_view(learner->link, &data);
        view->unleased = data.unleased;
        view->leases_lost = data.revoked;
        for (uint32_t p = 0; p < world->layout->fragment_count; p++) {
            view->merged_tokens += world->incarnations[learner->incarnation].merged_tokens[p];
        }
    }
}

const struct sy_core *sim_world_core(const struct sim_world *world, uint32_t shard)
{
    return world->syncers[shard].alive ? world->syncers[shard].core : NULL;
}

const struct sim_counts *sim_world_counts(const struct sim_world *world)
{
    return &world->counts;
}
