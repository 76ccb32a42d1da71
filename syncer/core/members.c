/* sy_core, members: slots, HELLO, leaving, liveness.
 *
 * A slot belongs to an incarnation (uid, nonce) and is kept after it left, so that it finds its counters when it comes
 * back; the slot of the one that has been away longest is reused when no other is free. A slot whose push waits in an
 * open round is not reused. */
#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/state.h"

/* --- leaving --- */

static void drop_parts(struct sy_core *core, uint32_t m, bool received_too)
{
    struct sy_member *member = &core->members[m];
    for (uint32_t i = 0; i < core->fragments; i++) {
        struct sy_part *part = &member->parts[i];
        struct sy_round *round = &core->rounds[i];
        switch (part->state) {
        case SY_PART_ASKED:
            part->state = SY_PART_NONE;
            round->outstanding--;
            break;
        case SY_PART_ANNOUNCED: sy_part_decide(core, i, m, DL_VERDICT_ABORTED, false, SY_PART_NONE); break;
        case SY_PART_RECEIVED:
            if (received_too && sy_round_is_open(round)) {
                sy_part_decide(core, i, m, DL_VERDICT_ABORTED, true, SY_PART_NONE);
            }
            break;
        case SY_PART_DECLINED:
        case SY_PART_REFUSED: part->state = SY_PART_NONE; break;
        case SY_PART_NONE: break;
        }
    }
}

/* A complete push stays in its round; what was still on its way is gone. A superseded incarnation's pushes give way to
 * those of its successor, since a merge takes one push a learner id. */
static void leave(struct sy_core *core, uint32_t m, enum sy_leave why)
{
    struct sy_member *member = &core->members[m];
    assert(member->connected);
    member->connected = false;
    member->left_why = why;
    member->left_ns = core->now_ns;
    core->leaves[why]++;
    if (member->role == DL_ROLE_LEARNER) {
        core->connected--;
        drop_parts(core, m, why == SY_LEAVE_SUPERSEDED);
        sy_lease_leave(core, m, why);
        sy_cut_left(core, m);
        sy_pace_left(core);
        sy_seed_left(core, m);
    } else {
        core->evaluators--;
    }
}

void sy_core_on_leave(struct sy_core *core, int64_t now_ns, uint32_t member, enum sy_leave why)
{
    sy_event(core, now_ns);
    assert(member < core->slots);
    if (core->members[member].connected) {
        leave(core, member, why);
        sy_settle(core);
    }
}

void sy_members_expire(struct sy_core *core)
{
    int64_t timeout_ns = sy_ns(core->spec->sync.timeout_seconds);
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (member->connected && core->now_ns - member->heard_ns >= timeout_ns) {
            sy_queue(core, &(struct sy_queued){.type = SY_ACT_DISCONNECT, .member = m, .why = SY_LEAVE_LOST});
            leave(core, m, SY_LEAVE_LOST);
        }
    }
}

uint32_t sy_members_training(const struct sy_core *core)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        count += sy_is_training(&core->members[m]) ? 1 : 0;
    }
    return count;
}

/* --- HELLO: who it is --- */

static uint32_t find_incarnation(const struct sy_core *core, const struct dl_wire_hello *hello)
{
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (member->used && member->nonce == hello->nonce && member->role == (enum dl_role)hello->role &&
            strcmp(member->uid, hello->uid) == 0) {
            return m;
        }
    }
    return SY_NO_MEMBER;
}

bool sy_member_is_superseded(const struct sy_core *core, uint32_t m)
{
    const struct sy_member *member = &core->members[m];
    for (uint32_t k = 0; k < core->slots; k++) {
        const struct sy_member *other = &core->members[k];
        if (other->used && other->role == member->role && other->learner == member->learner &&
            other->born > member->born) {
            return true;
        }
    }
    return false;
}

bool sy_member_may_return(const struct sy_core *core, uint32_t m)
{
    const struct sy_member *member = &core->members[m];
    return member->used && !member->connected &&
           (member->left_why == SY_LEAVE_LOST || member->left_why == SY_LEAVE_PROTOCOL) &&
           !sy_member_is_superseded(core, m);
}

/* How free a learner id is: 0 when connected, 1 when it belongs to one that was lost and may come back, 2 when
 * nobody's. */
static unsigned freedom(const struct sy_core *core, enum dl_role role, uint32_t learner, int64_t *left_ns)
{
    unsigned free = 2;
    *left_ns = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (!member->used || member->role != role || member->learner != learner) {
            continue;
        }
        if (member->connected) {
            return 0;
        }
        if (sy_member_may_return(core, m)) {
            free = 1;
            *left_ns = member->left_ns;
        }
    }
    return free;
}

/* The lowest id that is nobody's, below the limit; else that of the one that has been lost for longest. */
static uint32_t free_learner(const struct sy_core *core, enum dl_role role, uint32_t limit)
{
    uint32_t best = UINT32_MAX;
    int64_t best_ns = INT64_MAX;
    for (uint32_t id = 0; id < limit; id++) {
        int64_t left_ns = 0;
        unsigned free = freedom(core, role, id, &left_ns);
        if (free == 2) {
            return id;
        }
        if (free == 1 && left_ns < best_ns) {
            best = id;
            best_ns = left_ns;
        }
    }
    return best;
}

/* The id that an unknown incarnation gets: the one it asks for; that of its process's predecessor; any free one. */
static uint32_t choose_learner(const struct sy_core *core, const struct dl_wire_hello *hello)
{
    enum dl_role role = (enum dl_role)hello->role;
    if (role == DL_ROLE_LEARNER && hello->learner >= 0) {
        return (uint32_t)hello->learner;
    }
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (member->used && member->role == role && strcmp(member->uid, hello->uid) == 0 &&
            !sy_member_is_superseded(core, m)) {
            return member->learner;
        }
    }
    return free_learner(core, role, role == DL_ROLE_LEARNER ? core->learners_max : SY_CORE_EVALUATORS_MAX);
}

static uint32_t connected_as(const struct sy_core *core, enum dl_role role, uint32_t learner)
{
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (member->connected && member->role == role && member->learner == learner) {
            return m;
        }
    }
    return SY_NO_MEMBER;
}

static bool is_pinned(const struct sy_core *core, const struct sy_member *member)
{
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (member->parts[i].state == SY_PART_RECEIVED) {
            return true;
        }
    }
    return false;
}

static uint32_t free_slot(const struct sy_core *core)
{
    uint32_t best = SY_NO_MEMBER;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (!member->used) {
            return m;
        }
        if (!member->connected && !is_pinned(core, member) &&
            (best == SY_NO_MEMBER || member->left_ns < core->members[best].left_ns)) {
            best = m;
        }
    }
    return best;
}

/* --- HELLO: refusals --- */

static enum dl_rc refuse_with(struct sy_core *core, struct dl_wire_refuse *refuse, enum dl_refusal code,
                              const char *fmt, ...) DL_PRINTF(4, 5);
static enum dl_rc refuse_with(struct sy_core *core, struct dl_wire_refuse *refuse, enum dl_refusal code,
                              const char *fmt, ...)
{
    refuse->code = (uint16_t)code;
    va_list args;
    va_start(args, fmt);
    vsnprintf(refuse->text, sizeof refuse->text, fmt, args);
    va_end(args);
    core->refusals++;
    return DL_EDENIED;
}

static enum dl_rc check_hello(struct sy_core *core, const struct dl_wire_hello *hello, struct dl_wire_refuse *refuse)
{
    const struct dl_spec *spec = core->spec;
    if (strcmp(hello->job, spec->name) != 0) {
        return refuse_with(core, refuse, DL_REFUSE_JOB,
                           "this syncer serves job \"%s\", not \"%.63s\": check the endpoint", spec->name, hello->job);
    }
    if (hello->shard != core->shard) {
        return refuse_with(core, refuse, DL_REFUSE_SHARD,
                           "this is shard %u of %u, not shard %u: list the shards' endpoints in their order",
                           core->shard, spec->syncer.shards, hello->shard);
    }
    if (core->phase == SY_ENDED) {
        return refuse_with(core, refuse, DL_REFUSE_FINISHED, "the job is over: %.200s", core->stop_text);
    }
    if (hello->role > DL_ROLE_EVALUATOR || hello->uid[0] == 0 || hello->learner >= DL_SPEC_LEARNERS_MAX) {
        return refuse_with(core, refuse, DL_REFUSE_MALFORMED, "hello: role %u, learner %d, uid \"%.63s\" make no sense",
                           hello->role, hello->learner, hello->uid);
    }
    return DL_OK;
}

/* `replaced`: the connected member that gives way, or SY_NO_MEMBER. */
static enum dl_rc check_room(struct sy_core *core, const struct dl_wire_hello *hello, uint32_t replaced,
                             struct dl_wire_refuse *refuse)
{
    bool learner = hello->role == DL_ROLE_LEARNER;
    uint32_t here = learner ? core->connected : core->evaluators;
    uint32_t limit = learner ? core->learners_max : SY_CORE_EVALUATORS_MAX;
    if (here - (replaced != SY_NO_MEMBER ? 1 : 0) >= limit) {
        return refuse_with(core, refuse, DL_REFUSE_FULL, "%u %s are connected, the limit is %u%s", here,
                           learner ? "learners" : "evaluators", limit, learner ? " (learners.max)" : "");
    }
    return DL_OK;
}

/* --- HELLO: admission --- */

static void supersede(struct sy_core *core, uint32_t m)
{
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_DISCONNECT, .member = m, .why = SY_LEAVE_SUPERSEDED});
    leave(core, m, SY_LEAVE_SUPERSEDED);
}

/* Those of the same learner id that left before must not meet their successor in one merge. */
static void drop_predecessors(struct sy_core *core, uint32_t m)
{
    for (uint32_t k = 0; k < core->slots; k++) {
        const struct sy_member *other = &core->members[k];
        if (k != m && other->used && other->role == DL_ROLE_LEARNER && other->learner == core->members[m].learner) {
            assert(!other->connected);
            drop_parts(core, k, true);
        }
    }
}

static void fill_slot(struct sy_core *core, uint32_t m, const struct dl_wire_hello *hello, uint32_t learner)
{
    struct sy_member *member = &core->members[m];
    struct sy_part *parts = member->parts;
    memset(parts, 0, core->fragments * sizeof *parts);
    sy_lease_forget_slot(core, m);
    *member = (struct sy_member){
        .used = true,
        .holder = SY_NO_HOLDER,
        .role = (enum dl_role)hello->role,
        .learner = learner,
        .born = core->next_admission,
        .nonce = hello->nonce,
        .loss = __builtin_nanf(""),
        .step_seconds = -1,
        .busy_known = hello->step == 0,
        .step = hello->step,
        .parts = parts,
    };
    memcpy(member->uid, hello->uid, sizeof member->uid);
    member->uid[sizeof member->uid - 1] = 0;
    if (member->role == DL_ROLE_LEARNER) {
        drop_predecessors(core, m);
    }
}

/* What it holds, and SENDs for what differs: older, or ahead of a syncer that was restored to an earlier state. */
static void take_versions(struct sy_core *core, uint32_t m, const struct dl_wire_hello *hello)
{
    struct sy_member *member = &core->members[m];
    for (uint32_t i = 0; i < core->fragments; i++) {
        member->parts[i].version = 0;
        member->parts[i].steps = 0;
    }
    for (uint32_t k = 0; k < hello->fragment_count; k++) {
        uint32_t i = sy_fragment_local(core, hello->fragments[k].fragment);
        if (i != UINT32_MAX) {
            member->parts[i].version = hello->fragments[k].version;
            member->parts[i].steps = hello->fragments[k].steps;
        }
    }
    member->trained = member->role == DL_ROLE_LEARNER;
    /* Before that, nobody hears of a part of the first state. */
    bool held_back = sy_peers_offer(core, m, hello);
    bool complete = sy_is_seeded(core) && !held_back;
    for (uint32_t i = 0; i < core->fragments; i++) {
        member->trained = member->trained && member->parts[i].version > 0;
        if (complete && member->parts[i].version != core->rounds[i].version) {
            sy_queue(core, &(struct sy_queued){.type = SY_ACT_SEND,
                                               .member = m,
                                               .fragment = sy_fragment_index(core, i),
                                               .version = core->rounds[i].version});
        }
    }
}

static void fill_welcome(struct sy_core *core, const struct sy_member *member, struct dl_wire_welcome *welcome)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    struct sy_limits limits = sy_pace_limits(core);
    welcome->learner = member->learner;
    welcome->admission = member->admission;
    welcome->epoch = core->epoch;
    welcome->shard = core->shard;
    welcome->shards = core->spec->syncer.shards;
    welcome->compression = (uint8_t)sync->compression;
    welcome->broadcast_compression = (uint8_t)sync->broadcast_compression;
    welcome->apply = (uint8_t)sync->apply;
    welcome->apply_alpha = (float)sync->apply_alpha;
    welcome->heartbeat_ms = (uint32_t)(sync->heartbeat_seconds * 1000);
    welcome->timeout_ms = (uint32_t)(sync->timeout_seconds * 1000);
    welcome->step = core->step;
    welcome->tokens = core->tokens;
    welcome->token_budget = core->spec->training.token_budget;
    welcome->learners = core->spec->learners.replicas;
    welcome->pull_within_steps = limits.pull_within_steps;
    welcome->update_within_steps = limits.update_within_steps;
    welcome->wait_ms = limits.wait_ms;
    welcome->fragment_count = core->fragments;
    for (uint32_t i = 0; i < core->fragments; i++) {
        welcome->fragments[i] =
            (struct dl_wire_fragment){.fragment = sy_fragment_index(core, i), .version = core->rounds[i].version};
    }
}

static void admit(struct sy_core *core, uint32_t m, const struct dl_wire_hello *hello)
{
    struct sy_member *member = &core->members[m];
    member->connected = true;
    member->admission = core->next_admission++;
    member->heard_ns = member->meta_ns = member->rate_ns = core->now_ns;
    member->rate_tokens = DL_MAX(hello->tokens, member->tokens);
    core->joins++;
    core->was_joined = true;
    if (member->role == DL_ROLE_LEARNER) {
        core->connected++;
        sy_lease_admit(core, m);
        sy_cut_joined(core, m);
        sy_count_tokens(core, member, hello->tokens);
        if (hello->step > member->step) {
            sy_pace_advance(member, hello->step - member->step);
            member->step = hello->step;
        }
        core->step = DL_MAX(core->step, hello->step);
    } else {
        core->evaluators++;
    }
    take_versions(core, m, hello);
}

enum dl_rc sy_core_on_hello(struct sy_core *core, int64_t now_ns, const struct dl_wire_hello *hello, uint32_t *member,
                            struct dl_wire_welcome *welcome, struct dl_wire_refuse *refuse)
{
    sy_event(core, now_ns);
    enum dl_rc rc = check_hello(core, hello, refuse);
    if (rc != DL_OK) {
        return rc;
    }
    uint32_t m = find_incarnation(core, hello);
    bool known = m != SY_NO_MEMBER;
    if (known && sy_member_is_superseded(core, m)) {
        return refuse_with(core, refuse, DL_REFUSE_SUPERSEDED, "a newer incarnation of learner %u has joined",
                           core->members[m].learner);
    }
    uint32_t learner = known ? core->members[m].learner : choose_learner(core, hello);
    uint32_t replaced =
        known && core->members[m].connected ? m : connected_as(core, (enum dl_role)hello->role, learner);
    rc = check_room(core, hello, replaced, refuse);
    if (rc != DL_OK) {
        return rc;
    }
    uint32_t slot = known ? m : free_slot(core);
    if (slot == SY_NO_MEMBER || learner == UINT32_MAX) {
        return refuse_with(core, refuse, DL_REFUSE_FULL, "no slot is free for another incarnation");
    }
    if (replaced == slot) {
        /* The same process over a new connection; the shell closes the old one. What was on its way there is gone. */
        drop_parts(core, slot, false);
        core->members[slot].connected = false;
        core->connected -= hello->role == DL_ROLE_LEARNER ? 1 : 0;
        core->evaluators -= hello->role == DL_ROLE_EVALUATOR ? 1 : 0;
        sy_seed_left(core, slot);
    } else if (replaced != SY_NO_MEMBER) {
        supersede(core, replaced);
    }
    if (!known) {
        fill_slot(core, slot, hello, learner);
    }
    admit(core, slot, hello);
    fill_welcome(core, &core->members[slot], welcome);
    *member = slot;
    sy_rounds_ask(core, slot);
    sy_settle(core);
    return DL_OK;
}
