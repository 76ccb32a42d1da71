/* sy_core, the data: leases of learners, on shard 0 (ledger.h). A learner that is merely cut off keeps what it has; one that
 * said goodbye, was superseded, or has been gone for SY_LEASE_GONE_TIMEOUTS times sync.timeoutSeconds gives it back. Not while
 * a push of it waits in an open round: what that counts is its. */
#include <assert.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/state.h"

static struct sy_holder *holder_of(struct sy_core *core, uint32_t m)
{
    uint32_t h = core->members[m].holder;
    return h == SY_NO_HOLDER ? NULL : &core->ledger.holders[h];
}

static void queue_ledger(struct sy_core *core)
{
    if (!core->ledger_queued && sy_ledger_is_dirty(&core->ledger)) {
        core->ledger_queued = true;
        sy_queue(core, &(struct sy_queued){.type = SY_ACT_LEDGER, .member = SY_NO_MEMBER});
    }
}

static void queue_lease(struct sy_core *core, uint32_t m, uint64_t lease, uint64_t first, uint64_t count, bool revoked)
{
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_LEASE,
                                       .member = m,
                                       .round = lease,
                                       .version = first,
                                       .pull_within_steps = (uint32_t)count,
                                       .flags = revoked ? 1 : 0});
}

/* --- who is there ------------------------------------------------------------------------------------------------ */

static void bind(struct sy_core *core, uint32_t m, uint32_t h)
{
    struct sy_holder *holder = &core->ledger.holders[h];
    if (holder->member != SY_NO_MEMBER && holder->member != m) {
        core->members[holder->member].holder = SY_NO_HOLDER;
    }
    core->members[m].holder = h;
    holder->member = m;
    holder->connected = true;
    holder->for_good = false;
}

/* The slot is about to be another incarnation's. */
void sy_lease_forget_slot(struct sy_core *core, uint32_t m)
{
    struct sy_holder *holder = holder_of(core, m);
    if (holder != NULL) {
        holder->member = SY_NO_MEMBER;
    }
    core->members[m].holder = SY_NO_HOLDER;
}

void sy_lease_admit(struct sy_core *core, uint32_t m)
{
    const struct sy_member *member = &core->members[m];
    if (core->shard != 0 || member->role != DL_ROLE_LEARNER) {
        return;
    }
    uint32_t h = sy_ledger_find(&core->ledger, member->uid, member->nonce);
    if (h != SY_NO_HOLDER) {
        bind(core, m, h);
    }
    for (uint32_t k = 0; k < core->ledger.holders_end; k++) {
        struct sy_holder *other = &core->ledger.holders[k];
        if (k != h && other->used && other->learner == member->learner && !other->connected) {
            other->for_good = true; /* Superseded: it is refused from now on. */
        }
    }
}

void sy_lease_leave(struct sy_core *core, uint32_t m, enum sy_leave why)
{
    struct sy_holder *holder = holder_of(core, m);
    if (holder != NULL) {
        holder->connected = false;
        holder->gone_ns = core->now_ns;
        holder->for_good = why == SY_LEAVE_GOODBYE || why == SY_LEAVE_PREEMPTED || why == SY_LEAVE_SUPERSEDED;
    }
}

/* --- giving back ------------------------------------------------------------------------------------------------- */

static int64_t gone_for_good_ns(const struct sy_core *core, const struct sy_holder *holder)
{
    return holder->gone_ns + sy_ns(SY_LEASE_GONE_TIMEOUTS * core->spec->sync.timeout_seconds);
}

static bool waits_in_round(const struct sy_core *core, const struct sy_holder *holder)
{
    for (uint32_t i = 0; holder->member != SY_NO_MEMBER && i < core->fragments; i++) {
        if (core->members[holder->member].parts[i].state == SY_PART_RECEIVED && sy_round_is_open(&core->rounds[i])) {
            return true;
        }
    }
    return false;
}

static void give_back(struct sy_core *core, uint32_t h)
{
    struct sy_holder *holder = &core->ledger.holders[h];
    uint32_t member = holder->member, learner = holder->learner, leases = holder->open_count;
    uint64_t before = sy_ledger_queued(&core->ledger);
    const char *why = holder->for_good ? "left" : "gone_too_long";
    if (!sy_ledger_give_back(&core->ledger, h)) {
        return;
    }
    if (member != SY_NO_MEMBER) {
        core->members[member].holder = SY_NO_HOLDER;
    }
    uint64_t positions = sy_ledger_queued(&core->ledger) - before;
    if (leases > 0) {
        sy_queue_note(core, false, "data returned learner=%u leases=%u positions=%llu why=%s", learner, leases,
                      (unsigned long long)positions, why);
    }
}

void sy_lease_run(struct sy_core *core)
{
    for (uint32_t h = 0; h < core->ledger.holders_end; h++) {
        const struct sy_holder *holder = &core->ledger.holders[h];
        bool there = !holder->used || holder->given_back || holder->connected;
        if (!there && (holder->for_good || core->now_ns >= gone_for_good_ns(core, holder)) &&
            !waits_in_round(core, holder)) {
            give_back(core, h);
        }
    }
    queue_ledger(core);
}

int64_t sy_lease_deadline(const struct sy_core *core)
{
    int64_t deadline_ns = INT64_MAX;
    for (uint32_t h = 0; h < core->ledger.holders_end; h++) {
        const struct sy_holder *holder = &core->ledger.holders[h];
        int64_t at_ns =
            holder->used && !holder->given_back && !holder->connected ? gone_for_good_ns(core, holder) : INT64_MAX;
        deadline_ns = at_ns > core->now_ns ? DL_MIN(deadline_ns, at_ns) : deadline_ns;
    }
    return deadline_ns;
}

/* --- asking and granting ----------------------------------------------------------------------------------------- */

static uint64_t lease_length(const struct sy_core *core, uint64_t batch)
{
    uint64_t length = core->spec->training.data.lease_sequences;
    length = length == 0 ? SY_LEASE_STEPS * batch : length;
    return DL_MIN((length + batch - 1) / batch * batch, (uint64_t)UINT32_MAX / batch * batch);
}

/* What the learner does not know of: a grant that was lost on its way. */
static bool tell_again(struct sy_core *core, uint32_t m, const struct sy_holder *holder, uint64_t last)
{
    bool any = false;
    for (uint32_t i = 0; i < holder->open_count; i++) {
        const struct sy_open *open = &holder->open[i];
        if (open->lease > last) {
            any = true;
            if (open->told) {
                queue_lease(core, m, open->lease, open->first, open->count, false);
            }
        }
    }
    return any;
}

/* Ranges from the queue may be short: enough of them for half a lease. */
static void grant(struct sy_core *core, uint32_t m, uint32_t h, uint64_t batch)
{
    uint64_t length = lease_length(core, batch), got = 0;
    while (2 * got < length) {
        const struct sy_open *open = sy_ledger_grant(&core->ledger, h, length - got, core->members[m].admission);
        if (open == NULL) {
            break;
        }
        got += open->count;
    }
    queue_ledger(core);
}

void sy_core_on_lease_request(struct sy_core *core, int64_t now_ns, uint32_t m,
                              const struct dl_wire_lease_request *request)
{
    sy_event(core, now_ns);
    assert(m < core->slots);
    struct sy_member *member = &core->members[m];
    member->heard_ns = core->now_ns;
    if (!sy_is_learner(member) || core->shard != 0 || core->finishing || core->draining) {
        return;
    }
    const struct sy_holder *holder = holder_of(core, m);
    if (request->last > 0 && (holder == NULL || request->last > holder->newest)) {
        sy_queue_note(core, true, "data lost learner=%u uid=%.40s lease=%llu: it takes the global state anew",
                      member->learner, member->uid, (unsigned long long)request->last);
        queue_lease(core, m, request->last, 0, 0, true);
        return;
    }
    if (holder == NULL && request->want > 0) {
        uint32_t h = sy_ledger_add(&core->ledger, member->uid, member->nonce, member->learner);
        for (uint32_t k = 0; h != SY_NO_HOLDER && k < core->slots; k++) { /* The place may have been another's. */
            core->members[k].holder = core->members[k].holder == h ? SY_NO_HOLDER : core->members[k].holder;
        }
        if (h != SY_NO_HOLDER) {
            bind(core, m, h);
            holder = &core->ledger.holders[h];
        }
    }
    if (holder != NULL && !tell_again(core, m, holder, request->last) && request->want > 0) {
        grant(core, m, member->holder, request->batch);
    }
}

void sy_core_ledger_changes(struct sy_core *core, struct sy_ledger_changes *changes)
{
    core->ledger_queued = false;
    sy_ledger_changes(&core->ledger, changes);
}

void sy_core_on_ledger_durable(struct sy_core *core, int64_t now_ns, uint64_t serial)
{
    sy_event(core, now_ns);
    for (uint32_t h = 0; h < core->ledger.holders_end; h++) {
        struct sy_holder *holder = &core->ledger.holders[h];
        for (uint32_t i = 0; holder->used && i < holder->open_count; i++) {
            struct sy_open *open = &holder->open[i];
            if (open->told || open->dirty || open->serial > serial) {
                continue;
            }
            open->told = true;
            if (holder->connected) {
                queue_lease(core, holder->member, open->lease, open->first, open->count, false);
            }
        }
    }
}

/* --- pushes ------------------------------------------------------------------------------------------------------ */

enum dl_verdict sy_lease_judge(const struct sy_core *core, uint32_t m, const struct dl_wire_push *push)
{
    return core->shard != 0 ? DL_VERDICT_ACCEPTED
                            : sy_ledger_judge(&core->ledger, core->members[m].holder, push->lease, push->cursor);
}

void sy_lease_count(struct sy_core *core, const struct sy_participant *who)
{
    if (core->shard == 0) {
        sy_ledger_count(&core->ledger, core->members[who->member].holder, who->lease, who->cursor);
    }
}

enum dl_rc sy_core_restore_ledger(struct sy_core *core, const struct sy_ledger_state *state, struct dl_err *err)
{
    assert(!core->started && core->shard == 0);
    enum dl_rc rc = sy_ledger_restore(&core->ledger, state, err);
    for (uint32_t m = 0; rc == DL_OK && m < core->slots; m++) {
        struct sy_member *member = &core->members[m];
        uint32_t h = member->used ? sy_ledger_find(&core->ledger, member->uid, member->nonce) : SY_NO_HOLDER;
        if (h != SY_NO_HOLDER) {
            member->holder = h;
            core->ledger.holders[h].member = m;
            core->ledger.holders[h].for_good = member->left_why == SY_LEAVE_GOODBYE || sy_member_is_superseded(core, m);
        }
    }
    return rc;
}

/* The core's clock begins: whoever had leases before a restart is gone since now. */
void sy_lease_start(struct sy_core *core)
{
    for (uint32_t h = 0; h < core->ledger.holders_end; h++) {
        core->ledger.holders[h].gone_ns = core->now_ns;
    }
}
