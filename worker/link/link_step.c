/* wk_link, the trainer's side: what happens at a step boundary, in this order: complete updates are applied, META is
 * due, pulls are answered, and then, where the syncer asked for it, the boundary waits. */
#include <assert.h>
#include <stddef.h>

#include "common/codec.h"
#include "common/mem.h"
#include "worker/link/link_state.h"

void wk_link_on_step(struct wk_link *link, int64_t now_ns, uint64_t tokens, float loss)
{
    assert(link->joined);
    link->step++;
    link->tokens += tokens;
    link->loss = loss;
    if (link->left_ns >= 0 && now_ns > link->left_ns) {
        link->step_ns = (uint64_t)(now_ns - link->left_ns);
        link->busy_ns += link->step_ns;
    }
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        link->fragments[p].steps++;
        link->fragments[p].tokens += tokens;
    }
    wk_lease_boundary(link);
    link->boundary_due = true;
    link->waiting_ns = -1;
}

void wk_link_on_poll(struct wk_link *link, int64_t now_ns)
{
    (void)now_ns;
    link->waiting_ns = -1;
}

void wk_link_on_prepared(struct wk_link *link)
{
    link->prepared = true;
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        wk_push_seed(link, p);
    }
}

/* --- updates ----------------------------------------------------------------------------------------------------- */

/* The newest complete update; an older one beside it has nothing to add. */
static struct wk_slot *complete_slot(struct wk_fragment *fragment, uint32_t *index)
{
    struct wk_slot *best = NULL;
    for (uint32_t i = 0; i < WK_SLOTS; i++) {
        struct wk_slot *slot = &fragment->slots[i];
        if (slot->state == WK_SLOT_COMPLETE) {
            if (best != NULL && best->update.version > slot->update.version) {
                slot->state = WK_SLOT_FREE;
                continue;
            }
            if (best != NULL) {
                best->state = WK_SLOT_FREE;
            }
            best = slot;
            *index = i;
        }
    }
    return best;
}

static void begin_snapshot(struct wk_link *link, uint32_t p, uint64_t round, bool missed, struct wk_step *step)
{
    struct wk_fragment *fragment = &link->fragments[p];
    fragment->pulled = false;
    fragment->push = (struct wk_push){
        .state = WK_PUSH_SNAPSHOT,
        .missed = missed,
        .head = {.round = round,
                 .fragment = p,
                 .base_version = fragment->version,
                 .step = link->step,
                 .steps = fragment->steps,
                 .tokens = fragment->tokens,
                 .lease = link->data.lease,
                 .cursor = link->data.cursor,
                 .codec = (uint8_t)link->compression,
                 .bytes = dl_codec_bytes(link->compression, link->layout->fragments[p].padded_elements)},
    };
    step->type = WK_STEP_SNAPSHOT;
    step->fragment = p;
    step->codec = link->compression;
}

/* What the update replaces, and no push has carried, is snapshot first: for the round that asks for it, or, where the update
 * says that this one is over, for the next. */
static bool rescue(struct wk_link *link, uint32_t p, const struct dl_wire_update *update, struct wk_step *step)
{
    if (!wk_is_unheard(link, p)) {
        return false;
    }
    const struct wk_fragment *fragment = &link->fragments[p];
    bool open =
        fragment->pulled && fragment->pull.version >= update->version && (fragment->pull.flags & DL_PULL_MISSED) != 0;
    bool still_pulled = fragment->pulled && fragment->pull.version >= update->version && !open;
    begin_snapshot(link, p, fragment->pulled ? fragment->pull.round : update->round, !open, step);
    link->fragments[p].pulled = still_pulled;
    return true;
}

/* What was trained since the snapshot can be kept only when the update merges the very round that the snapshot was for.
 */
static bool can_rebase(const struct wk_link *link, const struct wk_fragment *fragment,
                       const struct dl_wire_update *update)
{
    const struct wk_push *push = &fragment->push;
    return link->apply == DL_APPLY_REBASE && push->kept && push->head.round == update->round &&
           push->head.base_version == fragment->version && push->state == WK_PUSH_NONE;
}

static bool next_apply(struct wk_link *link, struct wk_step *step)
{
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        struct wk_fragment *fragment = &link->fragments[p];
        struct wk_slot *slot = complete_slot(fragment, &step->slot);
        if (slot == NULL) {
            continue;
        }
        if (rescue(link, p, &slot->update, step)) {
            return true;
        }
        struct wk_push *push = &fragment->push;
        if (push->seed && push->state != WK_PUSH_NONE) {
            /* Its bytes are the base copy, which is about to change; the syncer has what it asked for, or asks again.
             */
            wk_push_drop(push, &link->conns[wk_shard_of(link, p)], p);
            if (push->state != WK_PUSH_NONE) {
                step->type = WK_STEP_YIELD;
                return true;
            }
        }
        slot->state = WK_SLOT_APPLYING;
        step->type = WK_STEP_APPLY;
        step->fragment = p;
        step->codec = (enum dl_codec)slot->update.codec;
        step->alpha = fragment->adopted && fragment->version > 0 ? link->alpha : 0.0f;
        /* Remembered: the push may become complete while the trainer is at it. */
        step->rebase = fragment->rebases = can_rebase(link, fragment, &slot->update);
        step->push_codec = (enum dl_codec)push->head.codec;
        return true;
    }
    return false;
}

static bool all_adopted(const struct wk_link *link)
{
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        if (!link->fragments[p].adopted) {
            return false;
        }
    }
    return true;
}

void wk_link_on_applied(struct wk_link *link, uint32_t p)
{
    struct wk_fragment *fragment = &link->fragments[p];
    struct wk_slot *slot = NULL;
    for (uint32_t i = 0; i < WK_SLOTS; i++) {
        if (fragment->slots[i].state == WK_SLOT_APPLYING) {
            slot = &fragment->slots[i];
        }
    }
    assert(slot != NULL);
    const struct dl_wire_update *update = &slot->update;
    wk_link_trace(link, "apply", p, update->version, fragment->rebases ? fragment->push.head.round : 0, update->round,
                  NULL);
    if (fragment->rebases) {
        /* What was trained since the snapshot is still there and has not been merged: it stays counted. */
        fragment->steps = (uint32_t)(link->step - fragment->push.head.step);
        fragment->tokens -= fragment->push.head.tokens;
    } else {
        fragment->steps = 0;
        fragment->tokens = 0;
    }
    fragment->push.kept = false;
    fragment->version = slot->forgotten ? 0 : update->version;
    fragment->round = update->round;
    fragment->applied_step = link->step;
    fragment->adopted = true;
    slot->state = WK_SLOT_FREE;
    slot->forgotten = false;
    link->updates_applied++;
    link->last_round = DL_MAX(link->last_round, update->round);
    link->boundary_due = true;
    if (fragment->awaits_update && update->round >= fragment->update_round) {
        fragment->awaits_update = false;
    }
    link->joined = link->joined || all_adopted(link);
    wk_push_seed(link, p);
}

/* --- pulls ------------------------------------------------------------------------------------------------------- */

static void answer_none(struct wk_fragment *fragment, uint32_t p, enum dl_verdict reason)
{
    fragment->pulled = false;
    fragment->none_due = true;
    fragment->none =
        (struct dl_wire_push_none){.round = fragment->pull.round, .fragment = p, .reason = (uint8_t)reason};
}

static bool newer_is_coming(const struct wk_fragment *fragment, uint64_t than)
{
    for (uint32_t i = 0; i < WK_SLOTS; i++) {
        if (fragment->slots[i].state != WK_SLOT_FREE && fragment->slots[i].update.version > than) {
            return true;
        }
    }
    return false;
}

/* Looks at one pending pull: true when `step` says what the trainer has to do for it. */
static bool answer_pull(struct wk_link *link, uint32_t p, struct wk_step *step)
{
    struct wk_fragment *fragment = &link->fragments[p];
    const struct dl_wire_pull *pull = &fragment->pull;
    if ((pull->flags & DL_PULL_SEED) != 0) {
        return false; /* Answered without a snapshot. */
    }
    if (pull->version < fragment->version) {
        answer_none(fragment, p, DL_VERDICT_LATE);
        return false;
    }
    bool stale_will_do = (pull->flags & DL_PULL_MISSED) != 0 && wk_is_unheard(link, p);
    if (newer_is_coming(fragment, pull->version) || (pull->version > fragment->version && !stale_will_do)) {
        return false; /* The update on its way decides. */
    }
    if (fragment->steps == 0) {
        answer_none(fragment, p, DL_VERDICT_NOTHING);
        return false;
    }
    struct wk_push *push = &fragment->push;
    if (push->state != WK_PUSH_NONE) {
        wk_push_drop(push, &link->conns[wk_shard_of(link, p)], p);
        if (push->state != WK_PUSH_NONE) {
            step->type = WK_STEP_YIELD;
            return true;
        }
    }
    begin_snapshot(link, p, pull->round, false, step);
    return true;
}

static bool next_snapshot(struct wk_link *link, struct wk_step *step)
{
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        if (link->fragments[p].pulled && answer_pull(link, p, step)) {
            return true;
        }
    }
    return false;
}

static bool is_pulled(const struct wk_link *link, uint32_t shard)
{
    WK_FOR_SHARD(link, shard, p)
    {
        if (link->fragments[p].pulled) {
            return true;
        }
    }
    return false;
}

void wk_link_on_snapshot(struct wk_link *link, uint32_t p)
{
    struct wk_fragment *fragment = &link->fragments[p];
    struct wk_push *push = &fragment->push;
    assert(push->state == WK_PUSH_SNAPSHOT);
    if (push->dropped) {
        wk_push_dropped(link, p);
        return;
    }
    wk_link_trace(link, "snapshot", p, push->head.base_version, push->head.round, push->head.steps, NULL);
    push->head.trace = link->trace.made;
    fragment->pushed_base = push->head.base_version;
    if (push->missed) {
        push->state = WK_PUSH_MISSED;
        return;
    }
    push->state = WK_PUSH_READY;
    push->order = ++link->push_order;
    const struct dl_wire_pull *pull = &fragment->pull;
    struct wk_conn *conn = &link->conns[wk_shard_of(link, p)];
    /* A pull that came meanwhile is the next one. */
    conn->awaits_pull = pull->pull_within_steps != DL_UNBOUNDED && !is_pulled(link, wk_shard_of(link, p));
    conn->pull_by = link->step + pull->pull_within_steps;
    conn->pull_wait_ms = DL_MIN(pull->wait_ms, (uint32_t)WK_WAIT_MS_MAX);
    fragment->awaits_update = pull->update_within_steps != DL_UNBOUNDED;
    fragment->update_by = link->step + pull->update_within_steps;
    fragment->update_round = push->head.round;
    fragment->update_wait_ms = conn->pull_wait_ms;
}

/* --- waiting ----------------------------------------------------------------------------------------------------- */

/* One reason to wait: true while its bound is not reached. A wait that reached its bound is not taken up again. */
static bool still_waits(struct wk_link *link, int64_t now_ns, uint32_t wait_ms, bool *awaits, int64_t *until_ns)
{
    int64_t since_ns = link->waiting_ns >= 0 ? link->waiting_ns : now_ns;
    int64_t bound_ns = since_ns + (int64_t)wait_ms * WK_NS_PER_MS;
    if (now_ns >= bound_ns) {
        *awaits = false;
        return false;
    }
    link->waiting_ns = since_ns;
    *until_ns = DL_MAX(*until_ns, bound_ns);
    return true;
}

/* Whether this boundary must wait, and until when at most. */
static bool must_wait(struct wk_link *link, int64_t now_ns, int64_t *until_ns)
{
    *until_ns = -1;
    if (link->leaving) {
        return false;
    }
    for (uint32_t i = 0; i < link->shards; i++) {
        struct wk_conn *conn = &link->conns[i];
        if (conn->awaits_pull && link->step >= conn->pull_by &&
            !still_waits(link, now_ns, conn->pull_wait_ms, &conn->awaits_pull, until_ns)) {
            wk_note(link, 0, "waited in vain step=%llu shard=%u for=pull", (unsigned long long)link->step, i);
        }
    }
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        struct wk_fragment *fragment = &link->fragments[p];
        if (fragment->awaits_update && link->step >= fragment->update_by &&
            !still_waits(link, now_ns, fragment->update_wait_ms, &fragment->awaits_update, until_ns)) {
            wk_note(link, 0, "waited in vain step=%llu fragment=%u for=update", (unsigned long long)link->step, p);
        }
    }
    return *until_ns >= 0;
}

static void go(struct wk_link *link, int64_t now_ns)
{
    if (link->waiting_ns >= 0) {
        link->waited_ns += (uint64_t)(now_ns - link->waiting_ns);
        link->waiting_ns = -1;
    }
    link->left_ns = now_ns;
}

static void mark_meta(struct wk_link *link)
{
    if (!link->boundary_due || !link->joined) {
        return;
    }
    link->boundary_due = false;
    for (uint32_t i = 0; i < link->shards; i++) {
        link->conns[i].meta_due = link->role == DL_ROLE_LEARNER;
    }
}

void wk_link_next_step(struct wk_link *link, int64_t now_ns, struct wk_step *step)
{
    *step = (struct wk_step){.type = WK_STEP_WAIT, .until_ns = INT64_MAX};
    if (link->outcome.end != WK_END_NONE) {
        step->type = WK_STEP_DONE;
        return;
    }
    if (link->layout == NULL) {
        if (wk_stop_reached(link, now_ns)) {
            step->type = WK_STEP_DONE;
        }
        return;
    }
    if (!link->prepared) {
        if (!wk_recover_goes_first(link, now_ns, step)) {
            step->type = WK_STEP_PREPARE;
        }
        return;
    }
    if (next_apply(link, step)) {
        return;
    }
    if (!wk_recover_is_over(link)) {
        if (wk_stop_reached(link, now_ns)) {
            step->type = WK_STEP_DONE;
            return;
        }
        step->type = wk_recover_step(link, now_ns, &step->until_ns) ? WK_STEP_FETCH : WK_STEP_WAIT;
        if (!wk_recover_is_over(link)) {
            return;
        }
    }
    mark_meta(link);
    if (next_snapshot(link, step)) {
        return;
    }
    if (wk_stop_reached(link, now_ns)) {
        go(link, now_ns);
        step->type = WK_STEP_DONE;
    } else if (link->joined && wk_lease_awaited(link, now_ns, &step->until_ns)) {
        step->type = WK_STEP_WAIT;
    } else if (link->joined && !must_wait(link, now_ns, &step->until_ns)) {
        go(link, now_ns);
        step->type = WK_STEP_GO;
    } else if (!link->joined) {
        step->until_ns = INT64_MAX;
    }
}
