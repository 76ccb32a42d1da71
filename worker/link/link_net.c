/* wk_link, the network side: connections that come and go, and what comes in on them. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "worker/link/link_state.h"

/* --- coming and going of connections ----------------------------------------------------------------------------- */

static int64_t backoff_ns(struct wk_link *link, uint32_t attempts)
{
    uint32_t doublings = DL_MIN(attempts, 16u);
    uint64_t pause_ms = DL_MIN((uint64_t)WK_BACKOFF_MIN_MS << doublings, (uint64_t)WK_BACKOFF_MAX_MS);
    return (int64_t)(pause_ms / 2 + dl_rng_below(&link->rng, pause_ms / 2 + 1)) * WK_NS_PER_MS;
}

/* Everything that lived on the connection ends with it: pulls, waits, half an update, half a push. What a push held is
 * still counted in the fragment, so the next pull covers it. */
static void forget_connection(struct wk_link *link, uint32_t shard)
{
    struct wk_conn *conn = &link->conns[shard];
    conn->chunk_busy = false;
    wk_recover_forget(link, shard);
    WK_FOR_SHARD(link, shard, p)
    {
        struct wk_fragment *fragment = &link->fragments[p];
        fragment->pulled = fragment->none_due = false;
        fragment->awaits_update = false;
        for (uint32_t i = 0; i < WK_SLOTS; i++) {
            if (fragment->slots[i].state == WK_SLOT_RECEIVING) {
                fragment->slots[i].state = WK_SLOT_FREE;
            }
        }
        if (fragment->push.state != WK_PUSH_MISSED) {
            wk_push_drop(&fragment->push, conn, p);
        }
    }
    conn->placed = conn->hello_sent = conn->meta_due = conn->meta_was_last = conn->awaits_pull = false;
    conn->close_wanted = false;
    conn->marker_sent = 0;
}

void wk_conn_lose(struct wk_link *link, int64_t now_ns, uint32_t shard, const char *why)
{
    struct wk_conn *conn = &link->conns[shard];
    bool was_ready = conn->state == WK_CONN_READY;
    forget_connection(link, shard);
    if (conn->stopped || conn->goodbye_sent || link->leaving || link->outcome.end != WK_END_NONE) {
        wk_conn_move(link, shard, WK_CONN_OVER);
        conn->lost_ns = now_ns;
        return;
    }
    snprintf(link->trouble, sizeof link->trouble, "shard %u: %s", shard, why);
    int64_t pause_ns = backoff_ns(link, conn->attempts);
    if (was_ready) {
        conn->lost_ns = now_ns;
        link->reconnects++;
    }
    if (was_ready || (conn->attempts & (conn->attempts - 1)) == 0) {
        /* The first failure and then ever rarer ones: a syncer that is down for an hour does not flood the log. */
        wk_note(link, was_ready ? 2 : 1, "shard %u: %s; trying again in %lld ms attempts=%u", shard, why,
                (long long)(pause_ns / WK_NS_PER_MS), conn->attempts);
    }
    conn->attempts++;
    conn->retry_ns = now_ns + pause_ns;
    wk_conn_move(link, shard, WK_CONN_IDLE);
}

void wk_link_on_connected(struct wk_link *link, int64_t now_ns, uint32_t shard)
{
    struct wk_conn *conn = &link->conns[shard];
    wk_conn_move(link, shard, WK_CONN_GREETING);
    conn->heard_ns = conn->sent_ns = now_ns;
}

void wk_link_on_disconnected(struct wk_link *link, int64_t now_ns, uint32_t shard, const char *why)
{
    struct wk_conn *conn = &link->conns[shard];
    if (conn->state != WK_CONN_IDLE && conn->state != WK_CONN_OVER) {
        wk_conn_lose(link, now_ns, shard, why);
    }
}

void wk_link_on_denied(struct wk_link *link, int64_t now_ns, uint32_t shard, const char *why)
{
    wk_end(link, WK_END_REFUSED, "shard %u: %s", shard, why);
    wk_link_on_disconnected(link, now_ns, shard, why);
}

void wk_link_on_heard(struct wk_link *link, int64_t now_ns, uint32_t shard)
{
    link->conns[shard].heard_ns = now_ns;
}

/* --- messages ---------------------------------------------------------------------------------------------------- */

static void on_refuse(struct wk_link *link, int64_t now_ns, uint32_t shard, const struct dl_wire_refuse *refuse)
{
    struct wk_conn *conn = &link->conns[shard];
    (void)now_ns;
    if (dl_refusal_is_temporary((enum dl_refusal)refuse->code)) {
        wk_close(link, shard, "not admitted for now: %.200s", refuse->text);
        return;
    }
    if (refuse->code == DL_REFUSE_FINISHED) {
        conn->stopped = true;
        conn->stop_result = DL_STOP_REQUESTED;
        wk_note(link, 1, "shard %u: the job is over: %s", shard, refuse->text);
        wk_close(link, shard, "the job is over");
        return;
    }
    wk_end(link, WK_END_REFUSED, "shard %u refused this learner: %s", shard, refuse->text);
}

/* NULL: not of this shard, which breaks the protocol. */
static struct wk_fragment *own_fragment(struct wk_link *link, uint32_t shard, uint32_t p)
{
    if (p >= wk_fragment_count(link) || wk_shard_of(link, p) != shard) {
        wk_close(link, shard, "protocol error: fragment %u is not of this shard", p);
        return NULL;
    }
    return &link->fragments[p];
}

static void on_update(struct wk_link *link, uint32_t shard, const struct dl_wire_update *update)
{
    struct wk_fragment *fragment = own_fragment(link, shard, update->fragment);
    if (fragment == NULL) {
        return;
    }
    uint64_t padded = link->layout->fragments[update->fragment].padded_elements;
    if (update->bytes != dl_codec_bytes((enum dl_codec)update->codec, padded)) {
        wk_close(link, shard, "protocol error: update of fragment %u has %llu bytes, %llu were expected",
                 update->fragment, (unsigned long long)update->bytes,
                 (unsigned long long)dl_codec_bytes((enum dl_codec)update->codec, padded));
        return;
    }
    if (update->version <= wk_version_held(fragment)) {
        return; /* Its chunks belong to no transfer that is known, and are skipped. */
    }
    struct wk_slot *into = NULL;
    static const enum wk_slot_state preference[] = {WK_SLOT_RECEIVING, WK_SLOT_FREE, WK_SLOT_COMPLETE};
    for (size_t k = 0; k < DL_COUNT_OF(preference) && into == NULL; k++) {
        for (uint32_t i = 0; i < WK_SLOTS && into == NULL; i++) {
            into = fragment->slots[i].state == preference[k] ? &fragment->slots[i] : NULL;
        }
    }
    assert(into != NULL);
    *into = (struct wk_slot){.state = WK_SLOT_RECEIVING, .update = *update};
}

static void on_pull(struct wk_link *link, uint32_t shard, const struct dl_wire_pull *pull)
{
    struct wk_fragment *fragment = own_fragment(link, shard, pull->fragment);
    if (fragment == NULL || link->leaving || link->role != DL_ROLE_LEARNER) {
        return;
    }
    wk_trace_acked(link, &link->conns[shard], pull->trace_acked);
    struct wk_push *push = &fragment->push;
    bool waits = push->state != WK_PUSH_NONE && push->state != WK_PUSH_MISSED;
    if (waits && push->head.round == pull->round && !push->dropped) {
        return; /* Asked twice; the answer is on its way. */
    }
    fragment->pull = *pull;
    fragment->none_due = false;
    link->conns[shard].awaits_pull = false;
    /* The round of what is here is over, or there would be no new one. */
    fragment->pulled = !wk_missed_offer(link, pull->fragment, pull);
    if (!fragment->pulled) {
        return;
    }
    wk_push_drop(push, &link->conns[shard], pull->fragment);
    wk_push_seed(link, pull->fragment);
}

static void on_result(struct wk_link *link, uint32_t shard, const struct dl_wire_result *result)
{
    struct wk_fragment *fragment = own_fragment(link, shard, result->fragment);
    if (fragment == NULL) {
        return;
    }
    link->verdicts[result->verdict]++;
    if (result->verdict == DL_VERDICT_ACCEPTED) {
        return;
    }
    if (result->verdict == DL_VERDICT_LEASE_LOST) {
        wk_lease_lost(link);
        return;
    }
    if (result->verdict == DL_VERDICT_LATE && wk_missed_late(link, result->fragment, result->round)) {
        wk_note(link, 0, "push is late round=%llu fragment=%u: it is kept for the next round",
                (unsigned long long)result->round, result->fragment);
        return;
    }
    bool ordinary = result->verdict == DL_VERDICT_LATE || result->verdict == DL_VERDICT_NOTHING;
    wk_note(link, ordinary ? 0 : 2, "push not merged round=%llu fragment=%u reason=%s",
            (unsigned long long)result->round, result->fragment, dl_verdict_name((enum dl_verdict)result->verdict));
    if (fragment->push.state != WK_PUSH_NONE && fragment->push.head.round == result->round) {
        wk_push_drop(&fragment->push, &link->conns[shard], result->fragment);
    }
}

static void on_marker(struct wk_link *link, const struct dl_wire_marker *marker)
{
    if (marker->id > link->marker.id) {
        link->marker = (struct dl_wire_marker){.id = marker->id, .step = link->step, .tokens = link->tokens};
    }
}

static void on_stop(struct wk_link *link, uint32_t shard, const struct dl_wire_stop *stop)
{
    struct wk_conn *conn = &link->conns[shard];
    conn->stopped = true;
    conn->stop_result = (enum dl_stop_result)stop->result;
    wk_note(link, 1, "shard %u says stop result=%u text=%s", shard, stop->result, stop->text);
    if (stop->result == DL_STOP_FAILED) {
        wk_end(link, WK_END_FAILED, "the job has failed: %s", stop->text);
        return;
    }
    conn->awaits_pull = false;
    WK_FOR_SHARD(link, shard, p)
    {
        link->fragments[p].awaits_update = false;
    }
}

static void heard_of_ensemble(struct wk_link *link, uint64_t step, uint64_t tokens)
{
    link->ensemble_step = DL_MAX(link->ensemble_step, step);
    link->tokens_all = DL_MAX(link->tokens_all, tokens);
}

void wk_link_on_message(struct wk_link *link, int64_t now_ns, uint32_t shard, const struct dl_wire_message *message)
{
    struct wk_conn *conn = &link->conns[shard];
    conn->heard_ns = now_ns;
    if (conn->close_wanted || (conn->state != WK_CONN_GREETING && conn->state != WK_CONN_READY)) {
        return;
    }
    bool greeting = conn->state == WK_CONN_GREETING;
    bool early = message->type == DL_WIRE_WELCOME || message->type == DL_WIRE_REFUSE || message->type == DL_WIRE_STOP ||
                 message->type == DL_WIRE_HEARTBEAT;
    if (greeting && (!early || !conn->hello_sent)) {
        wk_close(link, shard, "protocol error: %s before WELCOME", dl_wire_type_name(message->type));
        return;
    }
    switch (message->type) {
    case DL_WIRE_WELCOME:
        if (!greeting) {
            wk_close(link, shard, "protocol error: WELCOME twice");
        } else {
            heard_of_ensemble(link, message->as.welcome.step, message->as.welcome.tokens);
            wk_on_welcome(link, now_ns, shard, &message->as.welcome);
        }
        break;
    case DL_WIRE_REFUSE: on_refuse(link, now_ns, shard, &message->as.refuse); break;
    case DL_WIRE_PULL: on_pull(link, shard, &message->as.pull); break;
    case DL_WIRE_RESULT: on_result(link, shard, &message->as.result); break;
    case DL_WIRE_UPDATE: on_update(link, shard, &message->as.update); break;
    case DL_WIRE_HEARTBEAT: heard_of_ensemble(link, message->as.heartbeat.step, message->as.heartbeat.tokens); break;
    case DL_WIRE_STOP: on_stop(link, shard, &message->as.stop); break;
    case DL_WIRE_LEASE:
        if (shard != 0 || link->data.batch == 0) {
            wk_close(link, shard, "protocol error: a lease that nobody asked for");
        } else {
            wk_lease_received(link, &message->as.lease);
        }
        break;
    case DL_WIRE_PEERS: wk_recover_on_peers(link, now_ns, shard, &message->as.peers); break;
    case DL_WIRE_HELD:
        if (own_fragment(link, shard, message->as.held.fragment) != NULL) {
            wk_recover_on_held(link, &message->as.held);
        }
        break;
    case DL_WIRE_MARKER: on_marker(link, &message->as.marker); break;
    case DL_WIRE_HELLO:
    case DL_WIRE_RECOVERED:
    case DL_WIRE_META:
    case DL_WIRE_PUSH:
    case DL_WIRE_PUSH_NONE:
    case DL_WIRE_CHUNK:
    case DL_WIRE_EVALUATION:
    case DL_WIRE_GOODBYE:
    case DL_WIRE_TRACE:
    case DL_WIRE_LEASE_REQUEST:
        wk_close(link, shard, "protocol error: %s is not for learners", dl_wire_type_name(message->type));
        break;
    }
}

/* Every shard has said so; or shard 0 has, and no other has been there for its timeout. */
bool wk_stop_reached(struct wk_link *link, int64_t now_ns)
{
    uint32_t stopped = 0, gone = 0;
    for (uint32_t i = 0; i < link->shards; i++) {
        struct wk_conn *conn = &link->conns[i];
        int64_t timeout_ns = (int64_t)conn->timeout_ms * WK_NS_PER_MS;
        conn->lost_ns = conn->lost_ns == INT64_MIN ? now_ns : conn->lost_ns;
        stopped += conn->stopped;
        gone += !conn->stopped && conn->state != WK_CONN_READY && now_ns - conn->lost_ns >= timeout_ns;
    }
    if (stopped == 0 || (stopped < link->shards && !(link->conns[0].stopped && stopped + gone == link->shards))) {
        return false;
    }
    static const char *const texts[] = {
        [DL_STOP_SUCCEEDED] = "the job has succeeded",
        [DL_STOP_REQUESTED] = "the job was asked to stop",
        [DL_STOP_TIMEOUT] = "the job reached its deadline",
        [DL_STOP_FAILED] = "the job has failed",
    };
    enum dl_stop_result result = link->conns[0].stop_result;
    for (uint32_t i = 1; i < link->shards; i++) {
        /* A shard that was reached only after the end just says "over"; one that knows more is believed. */
        if (link->conns[i].stopped && link->conns[i].stop_result == DL_STOP_SUCCEEDED) {
            result = DL_STOP_SUCCEEDED;
        }
    }
    wk_end(link, result == DL_STOP_SUCCEEDED ? WK_END_SUCCEEDED : WK_END_STOPPED, "%s", texts[result]);
    return true;
}

/* --- chunks that come in ----------------------------------------------------------------------------------------- */

static struct wk_slot *slot_of_transfer(struct wk_link *link, uint32_t shard, uint64_t transfer, uint32_t *p_out,
                                        uint32_t *slot_out)
{
    WK_FOR_SHARD(link, shard, p)
    {
        for (uint32_t i = 0; i < WK_SLOTS; i++) {
            struct wk_slot *slot = &link->fragments[p].slots[i];
            if (slot->state == WK_SLOT_RECEIVING && slot->update.transfer == transfer) {
                *p_out = p;
                *slot_out = i;
                return slot;
            }
        }
    }
    return NULL;
}

enum wk_place wk_link_place(struct wk_link *link, int64_t now_ns, uint32_t shard, uint64_t transfer, uint64_t offset,
                            uint32_t bytes, struct wk_spot *spot)
{
    struct wk_conn *conn = &link->conns[shard];
    conn->heard_ns = now_ns;
    conn->placed = false;
    if (conn->state != WK_CONN_READY || conn->close_wanted) {
        wk_close(link, shard, "protocol error: a chunk before WELCOME");
        return WK_PLACE_BROKEN;
    }
    struct wk_slot *slot = slot_of_transfer(link, shard, transfer, &spot->fragment, &spot->slot);
    if (slot == NULL) {
        return WK_PLACE_SKIP;
    }
    if (offset != slot->received || bytes > slot->update.bytes - slot->received) {
        wk_close(link, shard, "protocol error: a chunk of fragment %u does not continue its transfer", spot->fragment);
        return WK_PLACE_BROKEN;
    }
    if (offset % DL_LEAF_BYTES != 0) {
        wk_close(link, shard, "protocol error: a chunk of fragment %u begins at byte %llu, not at a multiple of %u",
                 spot->fragment, (unsigned long long)offset, DL_LEAF_BYTES);
        return WK_PLACE_BROKEN;
    }
    spot->offset = offset;
    spot->total_bytes = slot->update.bytes;
    conn->placed = true;
    conn->placed_fragment = spot->fragment;
    conn->placed_slot = spot->slot;
    conn->placed_bytes = bytes;
    return WK_PLACE_STORE;
}

bool wk_link_on_chunk(struct wk_link *link, int64_t now_ns, uint32_t shard, bool intact, uint64_t *content_hash)
{
    struct wk_conn *conn = &link->conns[shard];
    assert(conn->placed);
    conn->heard_ns = now_ns;
    if (!intact) {
        conn->placed = false;
        wk_close(link, shard, "a chunk of fragment %u was damaged on the way", conn->placed_fragment);
        return false;
    }
    struct wk_slot *slot = &link->fragments[conn->placed_fragment].slots[conn->placed_slot];
    assert(slot->state == WK_SLOT_RECEIVING);
    slot->received += conn->placed_bytes;
    bool last = slot->received == slot->update.bytes;
    conn->placed = last; /* wk_link_on_update still needs it. */
    *content_hash = slot->update.content_hash;
    return last;
}

void wk_link_on_update(struct wk_link *link, int64_t now_ns, uint32_t shard, bool intact)
{
    struct wk_conn *conn = &link->conns[shard];
    assert(conn->placed);
    conn->placed = false;
    conn->heard_ns = now_ns;
    struct wk_fragment *fragment = &link->fragments[conn->placed_fragment];
    struct wk_slot *slot = &fragment->slots[conn->placed_slot];
    if (!intact) {
        slot->state = WK_SLOT_FREE;
        wk_close(link, shard, "update of fragment %u version %llu does not match its content hash",
                 conn->placed_fragment, (unsigned long long)slot->update.version);
        return;
    }
    slot->state = WK_SLOT_COMPLETE;
    struct wk_slot *other = &fragment->slots[1 - conn->placed_slot];
    if (other->state == WK_SLOT_COMPLETE) {
        other->state = WK_SLOT_FREE; /* Superseded before its boundary came. */
    }
}
