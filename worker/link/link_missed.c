/* wk_link, pushes that missed their round.
 *
 * A learner whose steps are long against the rounds answers when a round is over, and the update of that round then replaces
 * what it has trained: its work would be lost, round after round. So what no push has carried yet is snapshot before an
 * update replaces it, and a push that came too late is kept. When the fragment's next PULL says so (DL_PULL_MISSED: the
 * syncer does not expect that a fresh one would come in time), it goes out as soon as the PULL comes, without waiting for a
 * boundary, with the base version that it started from; else it gives way to a fresh one. The syncer weighs it, or refuses it
 * as stale_base. One push a fragment is kept, in the place that pushes have anyway. Only where nobody waits: in a synchronous
 * form and in warm-up, who is late is just absent. */
#include <assert.h>

#include "common/mem.h"
#include "worker/link/link_state.h"

static bool nobody_waits(const struct dl_wire_pull *pull)
{
    return pull->pull_within_steps == DL_UNBOUNDED && pull->update_within_steps == DL_UNBOUNDED;
}

static bool is_being_read(const struct wk_link *link, uint32_t p)
{
    const struct wk_conn *conn = &link->conns[wk_shard_of(link, p)];
    return conn->chunk_busy && conn->chunk_fragment == p;
}

bool wk_is_unheard(const struct wk_link *link, uint32_t p)
{
    const struct wk_fragment *fragment = &link->fragments[p];
    const struct wk_push *push = &fragment->push;
    bool room = push->state == WK_PUSH_NONE || push->state == WK_PUSH_MISSED;
    return link->keep_missed && link->joined && !link->leaving && fragment->version > 0 && fragment->steps > 0 &&
           fragment->pushed_base != fragment->version && nobody_waits(&fragment->pull) && room &&
           !is_being_read(link, p);
}

bool wk_missed_offer(struct wk_link *link, uint32_t p, const struct dl_wire_pull *pull)
{
    struct wk_fragment *fragment = &link->fragments[p];
    struct wk_push *push = &fragment->push;
    /* Of the current version a fresh snapshot says more: nothing of what was trained on it has been replaced. */
    bool fits = (pull->flags & DL_PULL_MISSED) != 0 && push->head.base_version < pull->version;
    if (!link->keep_missed || push->state == WK_PUSH_NONE || push->dropped || push->seed || !fits) {
        return false;
    }
    push->missed = push->kept = false;
    push->head.round = pull->round;
    push->offset = 0;
    push->order = ++link->push_order;
    /* One that the trainer is still encoding is ready when it says so. */
    push->state = push->state == WK_PUSH_SNAPSHOT ? WK_PUSH_SNAPSHOT : WK_PUSH_READY;
    return true;
}

bool wk_missed_late(struct wk_link *link, uint32_t p, uint64_t round)
{
    struct wk_fragment *fragment = &link->fragments[p];
    struct wk_push *push = &fragment->push;
    bool whole =
        push->state == WK_PUSH_READY || push->state == WK_PUSH_SENDING || (push->state == WK_PUSH_NONE && push->kept);
    if (!link->keep_missed || !whole || push->head.round != round || push->dropped || push->seed ||
        !nobody_waits(&fragment->pull)) {
        return false;
    }
    push->kept = false;
    push->state = WK_PUSH_MISSED;
    return true;
}

void wk_missed_forget(struct wk_link *link, uint32_t p)
{
    struct wk_fragment *fragment = &link->fragments[p];
    fragment->pushed_base = 0;
    if (fragment->push.state == WK_PUSH_MISSED) {
        wk_push_drop(&fragment->push, &link->conns[wk_shard_of(link, p)], p);
    }
}
