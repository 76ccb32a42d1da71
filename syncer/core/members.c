#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/internal.h"

uint32_t sy_live_learners(const struct sy_core *core)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->member_max; m++) {
        count += sy_is_live_learner(&core->members[m]);
    }
    return count;
}

/* --- joining ------------------------------------------------------------------------------------------------------------ */

static enum dl_rc refuse(struct sy_core *core, struct dl_wire_refuse *out, enum dl_refusal code, const char *fmt, ...)
    DL_PRINTF(4, 5);
static enum dl_rc refuse(struct sy_core *core, struct dl_wire_refuse *out, enum dl_refusal code, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    out->code = (uint16_t)code;
    vsnprintf(out->text, sizeof out->text, fmt, args);
    va_end(args);
    core->refusals++;
    return DL_EDENIED;
}

static bool is_in_a_round(const struct sy_core *core, uint32_t member)
{
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        const struct sy_round *round = &core->fragments[f].open;
        if (round->state != SY_ROUND_IDLE && round->parts[member].state != SY_PART_NONE) {
            return true;
        }
    }
    return false;
}

/* A slot never used, else the one whose member has been gone longest and is in no round. */
static uint32_t free_slot(const struct sy_core *core)
{
    uint32_t best = SY_NO_MEMBER;
    for (uint32_t m = 0; m < core->member_max; m++) {
        const struct sy_member *member = &core->members[m];
        if (!member->used) {
            return m;
        }
        bool is_older = best == SY_NO_MEMBER || member->left_ns < core->members[best].left_ns;
        if (!member->connected && is_older && !is_in_a_round(core, m)) {
            best = m;
        }
    }
    return best;
}

static uint32_t find_incarnation(const struct sy_core *core, const struct dl_wire_hello *hello)
{
    for (uint32_t m = 0; m < core->member_max; m++) {
        const struct sy_member *member = &core->members[m];
        if (member->used && member->nonce == hello->nonce && strcmp(member->uid, hello->uid) == 0 &&
            member->role == (enum dl_role)hello->role) {
            return m;
        }
    }
    return SY_NO_MEMBER;
}

static uint32_t connected_with_id(const struct sy_core *core, uint32_t learner, uint32_t except)
{
    for (uint32_t m = 0; m < core->member_max; m++) {
        if (m != except && sy_is_live_learner(&core->members[m]) && core->members[m].learner == learner) {
            return m;
        }
    }
    return SY_NO_MEMBER;
}

static uint32_t count_connected(const struct sy_core *core, enum dl_role role)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->member_max; m++) {
        const struct sy_member *member = &core->members[m];
        count += member->used && member->connected && member->role == role;
    }
    return count;
}

/* The learner id that `hello` gets; DL_EDENIED with `out` filled when there is none for it. */
static enum dl_rc choose_learner_id(struct sy_core *core, const struct dl_wire_hello *hello, uint32_t *id,
                                    struct dl_wire_refuse *out)
{
    uint32_t max = core->spec->learners.max;
    if (hello->learner >= 0) {
        if ((uint32_t)hello->learner >= max) {
            return refuse(core, out, DL_REFUSE_MALFORMED, "learner id %d: ids go from 0 to learners.max - 1 = %u",
                          hello->learner, max - 1);
        }
        *id = (uint32_t)hello->learner;
        bool is_taken = connected_with_id(core, *id, SY_NO_MEMBER) != SY_NO_MEMBER;
        if (!is_taken && count_connected(core, DL_ROLE_LEARNER) >= max) {
            return refuse(core, out, DL_REFUSE_FULL, "learners.max = %u are connected; try again later", max);
        }
        return DL_OK;
    }
    for (uint32_t candidate = 0; candidate < max; candidate++) {
        if (connected_with_id(core, candidate, SY_NO_MEMBER) == SY_NO_MEMBER) {
            *id = candidate;
            return DL_OK;
        }
    }
    return refuse(core, out, DL_REFUSE_FULL, "learners.max = %u are connected; try again later", max);
}

static enum dl_rc check_hello(struct sy_core *core, const struct dl_wire_hello *hello, struct dl_wire_refuse *out)
{
    if (core->ended) {
        return refuse(core, out, DL_REFUSE_FINISHED, "job %s is over: %s", core->spec->name, core->stop_text);
    }
    if (strcmp(hello->job, core->spec->name) != 0) {
        return refuse(core, out, DL_REFUSE_JOB, "this syncer runs job '%s', not '%s'; check the endpoint", core->spec->name,
                      hello->job);
    }
    if (hello->shard != core->shard) {
        return refuse(core, out, DL_REFUSE_SHARD,
                      "this is shard %u, not %u; give the endpoints in the order of the shards", core->shard, hello->shard);
    }
    if (hello->role != DL_ROLE_LEARNER && count_connected(core, DL_ROLE_EVALUATOR) >= SY_EVALUATORS_MAX) {
        return refuse(core, out, DL_REFUSE_FULL, "%d evaluators are connected; try again later", SY_EVALUATORS_MAX);
    }
    return DL_OK;
}

static void fill_welcome(const struct sy_core *core, const struct sy_member *member, struct dl_wire_welcome *w)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    memset(w, 0, sizeof *w);
    w->learner = member->learner;
    w->admission = member->admission;
    w->epoch = core->epoch;
    w->shard = core->shard;
    w->shards = core->spec->syncer.shards;
    w->fragments_total = sync->fragments;
    w->layout = (uint8_t)sync->layout;
    w->compression = (uint8_t)sync->compression;
    w->broadcast_compression = (uint8_t)sync->broadcast_compression;
    w->apply = (uint8_t)sync->apply;
    w->apply_alpha = (float)sync->apply_alpha;
    w->heartbeat_ms = (uint32_t)(sync->heartbeat_seconds * 1000);
    w->timeout_ms = (uint32_t)(sync->timeout_seconds * 1000);
    w->step = core->step_max;
    w->tokens = core->tokens;
    w->token_budget = core->spec->training.token_budget;
    w->learners = core->spec->learners.replicas;
    sy_pace_bounds(core, &w->pull_within_steps, &w->update_within_steps, &w->wait_ms);
    w->fragment_count = core->fragment_count;
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        w->fragments[f].fragment = sy_global(core, f);
        w->fragments[f].version = core->fragments[f].version;
    }
}

/* Versions that the member holds, and a SEND of every other one. After a restart of the syncer a learner may hold a version
 * that was never committed; it gets the committed one. */
static void send_missing(struct sy_core *core, uint32_t m, const struct dl_wire_hello *hello)
{
    struct sy_member *member = &core->members[m];
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        member->fragments[f].version = 0;
    }
    for (uint32_t i = 0; i < hello->fragment_count; i++) {
        uint32_t f = sy_local(core, hello->fragments[i].fragment);
        if (f != UINT32_MAX) {
            member->fragments[f].version = hello->fragments[i].version;
            member->fragments[f].steps = hello->fragments[i].steps;
        }
    }
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        uint64_t version = core->fragments[f].version;
        if (version > 0 && version != member->fragments[f].version) {
            sy_act(core, &(struct sy_queued){.type = SY_ACT_SEND, .member = m, .fragment = sy_global(core, f),
                                             .version = version, .text = -1});
        }
    }
}

static void admit(struct sy_core *core, int64_t now_ns, uint32_t m, uint32_t id, const struct dl_wire_hello *hello)
{
    struct sy_member *member = &core->members[m];
    struct sy_member_fragment *fragments = member->fragments;
    memset(member, 0, sizeof *member);
    memset(fragments, 0, core->fragment_count * sizeof *fragments);
    member->fragments = fragments;
    member->used = true;
    member->role = (enum dl_role)hello->role;
    member->learner = id;
    member->nonce = hello->nonce;
    memcpy(member->uid, hello->uid, sizeof member->uid);
    member->step = member->pace_step = hello->step;
    member->tokens = hello->tokens;
    member->loss = NAN;
    member->heard_ns = now_ns;
    core->joins++;
}

enum dl_rc sy_core_on_hello(struct sy_core *core, int64_t now_ns, const struct dl_wire_hello *hello, uint32_t *out_member,
                            struct dl_wire_welcome *welcome, struct dl_wire_refuse *out)
{
    if (core->first_event_ns == INT64_MIN) {
        core->first_event_ns = now_ns;
    }
    enum dl_rc rc = check_hello(core, hello, out);
    if (rc != DL_OK) {
        return rc;
    }
    bool is_learner = hello->role == DL_ROLE_LEARNER;
    uint32_t m = find_incarnation(core, hello);
    bool is_return = m != SY_NO_MEMBER;
    uint32_t id = is_return ? core->members[m].learner : 0;
    if (!is_return && is_learner) {
        rc = choose_learner_id(core, hello, &id, out);
        if (rc != DL_OK) {
            return rc;
        }
    }
    if (is_learner) {
        uint32_t older = connected_with_id(core, id, m);
        if (older != SY_NO_MEMBER && is_return && core->members[older].admission > core->members[m].admission) {
            return refuse(core, out, DL_REFUSE_SUPERSEDED, "a newer incarnation of learner %u has joined", id);
        }
        if (older != SY_NO_MEMBER) {
            sy_act_text(core, SY_ACT_DISCONNECT, older, false, "a newer incarnation of learner %u has joined", id);
            sy_core_on_leave(core, now_ns, older, SY_LEAVE_SUPERSEDED);
        }
    }
    if (!is_return) {
        m = free_slot(core);
        if (m == SY_NO_MEMBER) {
            return refuse(core, out, DL_REFUSE_FULL, "all %u member slots are taken; try again later", core->member_max);
        }
        admit(core, now_ns, m, id, hello);
    } else if (core->members[m].connected) {
        sy_round_member_left(core, now_ns, m); /* What the old connection had begun will not arrive. */
    }
    struct sy_member *member = &core->members[m];
    member->connected = true;
    member->heard_ns = now_ns;
    member->admission = core->next_admission++;
    *out_member = m;
    fill_welcome(core, member, welcome);
    send_missing(core, m, hello);
    for (uint32_t f = 0; is_learner && f < core->fragment_count; f++) {
        sy_round_ask(core, f, m);
    }
    sy_seed(core);
    return DL_OK;
}

/* --- leaving ------------------------------------------------------------------------------------------------------------ */

void sy_core_on_leave(struct sy_core *core, int64_t now_ns, uint32_t m, enum sy_leave why)
{
    struct sy_member *member = &core->members[m];
    if (m >= core->member_max || !member->used || !member->connected) {
        return;
    }
    member->connected = false;
    member->left_ns = now_ns;
    core->leaves[why]++;
    sy_round_member_left(core, now_ns, m);
    if (core->seeder == m) {
        core->seeder = SY_NO_MEMBER;
        sy_seed(core);
    }
    sy_pace(core, now_ns); /* A warm-up quorum is a share of those connected. */
    sy_finish_step(core, now_ns);
}

void sy_core_on_heard(struct sy_core *core, int64_t now_ns, uint32_t m)
{
    core->members[m].heard_ns = now_ns;
}

void sy_members_tick(struct sy_core *core, int64_t now_ns)
{
    int64_t timeout = sy_ns(core->spec->sync.timeout_seconds);
    for (uint32_t m = 0; m < core->member_max; m++) {
        const struct sy_member *member = &core->members[m];
        if (member->used && member->connected && now_ns - member->heard_ns >= timeout) {
            sy_act_text(core, SY_ACT_DISCONNECT, m, true, "nothing heard for %.1f s",
                        (double)(now_ns - member->heard_ns) * 1e-9);
            sy_core_on_leave(core, now_ns, m, SY_LEAVE_LOST);
        }
    }
}

/* --- progress ----------------------------------------------------------------------------------------------------------- */

void sy_core_on_meta(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_meta *meta)
{
    struct sy_member *member = &core->members[m];
    member->heard_ns = now_ns;
    if (!sy_is_live_learner(member)) {
        return;
    }
    if (meta->tokens > member->tokens) {
        member->last_tokens = meta->tokens - member->tokens;
        core->tokens += member->last_tokens;
        member->tokens = meta->tokens;
    }
    if (meta->step > member->step) {
        member->step = meta->step;
        member->step_seconds = sy_estimate(member->step_seconds, (double)meta->step_ns * 1e-9);
        core->step_max = DL_MAX(core->step_max, meta->step);
    }
    if (meta->busy_ns > member->busy_ns) {
        core->busy_ns += meta->busy_ns - member->busy_ns;
        member->busy_ns = meta->busy_ns;
    }
    if (core->first_step_ns == INT64_MIN) {
        core->first_step_ns = now_ns - (int64_t)DL_MIN(meta->step_ns, (uint64_t)INT64_MAX / 2);
    }
    member->waited_ns = meta->waited_ns;
    member->loss = meta->loss;
    for (uint32_t i = 0; i < meta->fragment_count; i++) {
        uint32_t f = sy_local(core, meta->fragments[i].fragment);
        if (f != UINT32_MAX) {
            member->fragments[f].version = meta->fragments[i].version;
            member->fragments[f].steps = meta->fragments[i].steps;
            sy_round_ask(core, f, m);
        }
    }
    sy_finish_check(core, now_ns);
    sy_pace(core, now_ns);
    sy_finish_step(core, now_ns);
}

void sy_core_on_evaluation(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_evaluation *evaluation)
{
    core->members[m].heard_ns = now_ns;
    if (!core->evaluated) {
        core->first_evaluation = *evaluation;
        core->evaluated = true;
    }
    core->last_evaluation = *evaluation;
}
