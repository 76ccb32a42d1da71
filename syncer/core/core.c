/* sy_core: life, restore, time, and what happens after every event. */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/state.h"

/* --- life --- */

static void set_unknown(struct sy_core *core)
{
    core->wait_mean = core->transfer_mean = core->grace_mean = -1;
    core->merge_mean = core->commit_mean = core->total_mean = -1;
    core->store_mean = core->spread_mean = -1;
    core->loss = NAN;
}

static bool allocate(struct sy_core *core)
{
    core->members = calloc(core->slots, sizeof *core->members);
    core->parts = calloc((size_t)core->slots * core->fragments, sizeof *core->parts);
    core->rounds = calloc(core->fragments, sizeof *core->rounds);
    core->participants = calloc((size_t)core->learners_max * core->fragments, sizeof *core->participants);
    core->scratch = calloc(2 * (size_t)core->slots, sizeof *core->scratch);
    core->queue_capacity = sy_queue_capacity(core);
    core->queue = calloc(core->queue_capacity, sizeof *core->queue);
    return core->members != NULL && core->parts != NULL && core->rounds != NULL && core->participants != NULL &&
           core->scratch != NULL && core->queue != NULL;
}

enum dl_rc sy_core_new(const struct sy_core_config *config, struct sy_core **out, struct dl_err *err)
{
    const struct dl_spec *spec = config->spec;
    uint32_t shards = spec->syncer.shards;
    if (config->shard >= shards || spec->sync.fragments < shards) {
        return dl_err_set(err, DL_EINVAL,
                          "shard %u of %u shards with %u fragments: shards count from 0, and each needs a "
                          "fragment",
                          config->shard, shards, spec->sync.fragments);
    }
    struct sy_core *core = calloc(1, sizeof *core);
    if (core == NULL) {
        return dl_err_set(err, DL_ENOMEM, "shard %u: no memory for its state", config->shard);
    }
    core->spec = spec;
    core->shard = config->shard;
    core->epoch = config->epoch;
    core->learners_max = DL_MAX(spec->learners.max, 1u);
    core->slots = 2 * core->learners_max + 2 * SY_CORE_EVALUATORS_MAX + SY_CORE_SLOTS_SPARE;
    core->fragments = (spec->sync.fragments - config->shard + shards - 1) / shards;
    core->quorum = dl_count_resolve(spec->sync.quorum, spec->learners.replicas);
    core->next_admission = core->next_round = 1;
    core->seeder = SY_NO_MEMBER;
    core->finish_soft_ns = core->finish_hard_ns = INT64_MAX;
    sy_core_restore_warmup(core, dl_warmup_steps(spec));
    set_unknown(core);
    if (!allocate(core)) {
        enum dl_rc rc = dl_err_set(err, DL_ENOMEM, "shard %u: no memory for %u slots of %u fragments", config->shard,
                                   core->slots, core->fragments);
        sy_core_free(core);
        return rc;
    }
    enum dl_rc rc = sy_ledger_init(&core->ledger, core->shard == 0 ? core->slots : 1, err);
    if (rc != DL_OK) {
        sy_core_free(core);
        return rc;
    }
    for (uint32_t m = 0; m < core->slots; m++) {
        core->members[m].parts = core->parts + (size_t)m * core->fragments;
        core->members[m].holder = SY_NO_HOLDER;
    }
    for (uint32_t i = 0; i < core->fragments; i++) {
        core->rounds[i].participants = core->participants + (size_t)i * core->learners_max;
        core->rounds[i].order = ++core->orders;
        core->rounds[i].deadline_ns = core->rounds[i].soften_ns = INT64_MAX;
    }
    *out = core;
    return DL_OK;
}

void sy_core_free(struct sy_core *core)
{
    if (core != NULL) {
        free(core->members);
        free(core->parts);
        free(core->rounds);
        free(core->participants);
        free(core->scratch);
        free(core->queue);
        sy_ledger_release(&core->ledger);
        free(core);
    }
}

uint32_t sy_core_fragment_count(const struct sy_core *core)
{
    return core->fragments;
}

void sy_core_restore_warmup(struct sy_core *core, uint32_t steps)
{
    assert(!core->started);
    dl_warmup_plan(&core->spec->sync, steps, &core->warmup);
    core->warm_done = core->warmup.count == 0;
}

void sy_core_restore_fragment(struct sy_core *core, uint32_t fragment, uint64_t version, uint64_t round)
{
    uint32_t i = sy_fragment_local(core, fragment);
    assert(i != UINT32_MAX && !core->started);
    core->rounds[i].version = core->rounds[i].floor = version;
    core->rounds[i].made_round = core->rounds[i].number = round;
    core->next_round = DL_MAX(core->next_round, round + 1);
}

/* --- phases --- */

const char *sy_phase_name(enum sy_phase phase)
{
    switch (phase) {
    case SY_WAITING_FOR_LEARNERS: return "WaitingForLearners";
    case SY_SEEDING: return "Seeding";
    case SY_WARMUP: return "Warmup";
    case SY_TRAINING: return "Training";
    case SY_WAITING_FOR_QUORUM: return "WaitingForQuorum";
    case SY_FINISHING: return "Finishing";
    case SY_ENDED: return "Ended";
    }
    return "Unknown";
}

void sy_phase_move(struct sy_core *core, enum sy_phase to)
{
    static const bool allowed[SY_ENDED + 1][SY_ENDED + 1] = {
        [SY_WAITING_FOR_LEARNERS] = {[SY_SEEDING] = true,
                                     [SY_WARMUP] = true,
                                     [SY_TRAINING] = true,
                                     [SY_WAITING_FOR_QUORUM] = true,
                                     [SY_FINISHING] = true,
                                     [SY_ENDED] = true},
        [SY_SEEDING] = {[SY_WAITING_FOR_LEARNERS] = true,
                        [SY_WARMUP] = true,
                        [SY_TRAINING] = true,
                        [SY_WAITING_FOR_QUORUM] = true,
                        [SY_FINISHING] = true,
                        [SY_ENDED] = true},
        [SY_WARMUP] = {[SY_TRAINING] = true, [SY_WAITING_FOR_QUORUM] = true, [SY_FINISHING] = true, [SY_ENDED] = true},
        [SY_TRAINING] = {[SY_WAITING_FOR_QUORUM] = true, [SY_FINISHING] = true, [SY_ENDED] = true},
        [SY_WAITING_FOR_QUORUM] = {[SY_WARMUP] = true, [SY_TRAINING] = true, [SY_FINISHING] = true, [SY_ENDED] = true},
        [SY_FINISHING] = {[SY_ENDED] = true},
    };
    if (core->phase == to) {
        return;
    }
    assert(allowed[core->phase][to]);
    sy_queue_note(core, false, "phase from=%s to=%s learners=%u need=%u", sy_phase_name(core->phase), sy_phase_name(to),
                  core->connected, core->quorum);
    core->phase = to;
}

bool sy_is_seeded(const struct sy_core *core)
{
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (core->rounds[i].version == 0) {
            return false;
        }
    }
    return true;
}

static enum sy_phase phase_of(const struct sy_core *core)
{
    if (core->phase == SY_ENDED) {
        return SY_ENDED;
    }
    if (core->finishing) {
        return SY_FINISHING;
    }
    if (!sy_is_seeded(core)) {
        return core->seeder == SY_NO_MEMBER ? SY_WAITING_FOR_LEARNERS : SY_SEEDING;
    }
    if (core->connected < core->quorum) {
        return SY_WAITING_FOR_QUORUM;
    }
    return core->warm_done ? SY_TRAINING : SY_WARMUP;
}

/* --- time ---------------------------------------------------------------------------------------------------------- */

uint32_t sy_could_compute(const struct sy_core *core)
{
    return DL_MAX(DL_MAX(core->spec->learners.replicas, core->connected), 1u);
}

void sy_event(struct sy_core *core, int64_t now_ns)
{
    if (!core->started) {
        core->started = true;
        core->started_ns = core->now_ns = now_ns;
        sy_lease_start(core);
        sy_warm_look(core);
    }
    if (core->stepped && core->phase != SY_ENDED && now_ns > core->now_ns) {
        core->possible_ns += (uint64_t)(now_ns - core->now_ns) * sy_could_compute(core);
    }
    core->now_ns = DL_MAX(core->now_ns, now_ns);
}

static int64_t active_deadline(const struct sy_core *core)
{
    int64_t seconds = core->spec->active_deadline_seconds;
    return seconds > 0 && core->started && !core->finishing ? core->started_ns + sy_ns((double)seconds) : INT64_MAX;
}

static void look_for_completion(struct sy_core *core)
{
    const struct dl_training_spec *training = &core->spec->training;
    char text[DL_WIRE_TEXT_MAX];
    if (core->finishing || core->phase == SY_ENDED) {
        return;
    }
    uint64_t tokens = core->tokens;
    if (training->token_budget > 0 && tokens >= training->token_budget) {
        snprintf(text, sizeof text, "token budget reached: %llu of %llu", (unsigned long long)tokens,
                 (unsigned long long)training->token_budget);
        sy_finish_begin(core, DL_STOP_SUCCEEDED, text);
    } else if (training->round_budget > 0 && core->rounds_merged >= training->round_budget) {
        snprintf(text, sizeof text, "round budget reached: %llu of %llu", (unsigned long long)core->rounds_merged,
                 (unsigned long long)training->round_budget);
        sy_finish_begin(core, DL_STOP_SUCCEEDED, text);
    } else if (core->now_ns >= active_deadline(core)) {
        snprintf(text, sizeof text, "activeDeadlineSeconds %lld passed",
                 (long long)core->spec->active_deadline_seconds);
        sy_finish_begin(core, DL_STOP_TIMEOUT, text);
    }
}

void sy_settle(struct sy_core *core)
{
    if (core->phase != SY_ENDED && !core->draining) {
        look_for_completion(core);
        sy_seed_run(core);
        sy_lease_run(core);
        sy_rounds_check(core);
        if (core->finishing) {
            sy_finish_run(core);
        } else if (sy_is_seeded(core)) {
            sy_pace_run(core);
        }
    }
    if (core->phase != SY_ENDED) {
        sy_phase_move(core, phase_of(core));
    }
}

void sy_core_tick(struct sy_core *core, int64_t now_ns)
{
    sy_event(core, now_ns);
    sy_members_expire(core);
    sy_settle(core);
}

/* What is due at or before the latest event has been seen to; only what lies ahead counts. */
static void consider(const struct sy_core *core, int64_t *deadline_ns, int64_t at_ns)
{
    if (at_ns > core->now_ns && at_ns < *deadline_ns) {
        *deadline_ns = at_ns;
    }
}

int64_t sy_core_next_deadline(const struct sy_core *core)
{
    int64_t deadline_ns = INT64_MAX;
    int64_t timeout_ns = sy_ns(core->spec->sync.timeout_seconds);
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (member->connected) {
            /* A member that is overdue already is for the next tick, however late that comes. */
            int64_t at_ns = DL_MAX(member->heard_ns + timeout_ns, core->now_ns + 1);
            consider(core, &deadline_ns, at_ns);
        }
    }
    if (core->phase == SY_ENDED || core->draining) {
        return deadline_ns;
    }
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (sy_round_is_open(&core->rounds[i])) {
            consider(core, &deadline_ns, core->rounds[i].deadline_ns);
            consider(core, &deadline_ns, core->rounds[i].soften_ns);
        }
    }
    consider(core, &deadline_ns, sy_lease_deadline(core));
    consider(core, &deadline_ns, sy_warm_deadline(core));
    consider(core, &deadline_ns, sy_seed_deadline(core));
    consider(core, &deadline_ns, active_deadline(core));
    consider(core, &deadline_ns, core->finish_soft_ns);
    consider(core, &deadline_ns, core->finish_hard_ns);
    return deadline_ns;
}

/* --- events that need no file of their own --- */

void sy_core_on_heard(struct sy_core *core, int64_t now_ns, uint32_t member)
{
    sy_event(core, now_ns);
    assert(member < core->slots);
    core->members[member].heard_ns = core->now_ns;
}

void sy_core_on_evaluation(struct sy_core *core, int64_t now_ns, uint32_t member,
                           const struct dl_wire_evaluation *evaluation)
{
    sy_event(core, now_ns);
    assert(member < core->slots);
    core->members[member].heard_ns = core->now_ns;
    if (!isfinite(evaluation->loss)) {
        sy_queue_note(core, true, "evaluation ignored member=%u loss=%f round=%llu: not a number", member,
                      evaluation->loss, (unsigned long long)evaluation->round);
        return;
    }
    if (!core->evaluated) {
        core->first_evaluation = *evaluation;
    }
    core->evaluated = true;
    core->last_evaluation = *evaluation;
    sy_queue_note(core, false, "evaluated loss=%.6f round=%llu tokens=%llu", evaluation->loss,
                  (unsigned long long)evaluation->round, (unsigned long long)evaluation->tokens);
}

void sy_core_on_stop_request(struct sy_core *core, int64_t now_ns, enum dl_stop_result result, const char *text)
{
    sy_event(core, now_ns);
    sy_finish_begin(core, result, text);
    sy_settle(core);
}
