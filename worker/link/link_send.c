/* wk_link, the network side: what goes out next on a connection, and when. */
#include <assert.h>
#include <string.h>

#include "common/mem.h"
#include "worker/link/link_state.h"

static void make_hello(struct wk_link *link, uint32_t shard)
{
    link->message.type = DL_WIRE_HELLO;
    struct dl_wire_hello *hello = &link->message.as.hello;
    hello->role = (uint8_t)link->role;
    hello->learner = link->wanted;
    hello->nonce = link->nonce;
    memcpy(hello->uid, link->uid, sizeof hello->uid);
    memcpy(hello->job, link->job, sizeof hello->job);
    memcpy(hello->trainer, link->trainer, sizeof hello->trainer);
    hello->shard = shard;
    hello->step = link->step;
    hello->tokens = link->tokens;
    hello->recover = wk_recover_asks(link);
    memcpy(hello->serve, link->serve, sizeof hello->serve);
    hello->fragment_count = 0;
    WK_FOR_SHARD(link, shard, p)
    {
        struct dl_wire_fragment *out = &hello->fragments[hello->fragment_count++];
        wk_fragment_wire(link, p, out);
        out->version = wk_version_held(&link->fragments[p]);
    }
    hello->tensors = link->tensors_wire;
    hello->tensors_bytes = link->tensors_bytes;
}

static void make_meta(struct wk_link *link, uint32_t shard)
{
    link->message.type = DL_WIRE_META;
    struct dl_wire_meta *meta = &link->message.as.meta;
    meta->step = link->step;
    meta->tokens = link->tokens;
    meta->loss = link->loss;
    meta->step_ns = link->step_ns;
    meta->busy_ns = link->busy_ns;
    meta->waited_ns = link->waited_ns;
    meta->fragment_count = 0;
    WK_FOR_SHARD(link, shard, p)
    {
        wk_fragment_wire(link, p, &meta->fragments[meta->fragment_count++]);
    }
}

static struct wk_push *next_push(struct wk_link *link, uint32_t shard, uint32_t *p_out)
{
    struct wk_push *best = NULL;
    WK_FOR_SHARD(link, shard, p)
    {
        struct wk_push *push = &link->fragments[p].push;
        bool waits = push->state == WK_PUSH_READY || push->state == WK_PUSH_SENDING;
        if (waits && (best == NULL || push->order < best->order)) {
            best = push;
            *p_out = p;
        }
    }
    return best;
}

static bool send_push(struct wk_link *link, struct wk_conn *conn, uint32_t shard, struct wk_act *act)
{
    uint32_t p = 0;
    struct wk_push *push = next_push(link, shard, &p);
    if (push == NULL || conn->chunk_busy) {
        return false;
    }
    if (push->state == WK_PUSH_READY && wk_trace_send(link, conn, push->head.trace)) {
        act->type = WK_ACT_SEND; /* What the snapshot depends on goes before it. */
        return true;
    }
    if (push->state == WK_PUSH_READY) {
        push->state = WK_PUSH_SENDING;
        push->offset = 0;
        push->head.transfer = ++conn->transfers;
        act->type = WK_ACT_SEND;
        link->message.type = DL_WIRE_PUSH;
        link->message.as.push = push->head;
        return true;
    }
    uint32_t chunk_bytes = dl_wire_chunk_data_bytes((enum dl_codec)push->head.codec);
    act->type = WK_ACT_CHUNK;
    act->chunk = (struct wk_chunk){
        .fragment = p,
        .seed = push->seed,
        .transfer = push->head.transfer,
        .offset = push->offset,
        .bytes = (uint32_t)DL_MIN((uint64_t)chunk_bytes, push->head.bytes - push->offset),
    };
    conn->chunk_busy = true;
    conn->chunk_fragment = p;
    conn->chunk_bytes = act->chunk.bytes;
    return true;
}

void wk_link_on_chunk_sent(struct wk_link *link, int64_t now_ns, uint32_t shard)
{
    struct wk_conn *conn = &link->conns[shard];
    assert(conn->chunk_busy);
    conn->chunk_busy = false;
    conn->sent_ns = now_ns;
    struct wk_fragment *fragment = &link->fragments[conn->chunk_fragment];
    struct wk_push *push = &fragment->push;
    if (push->dropped) {
        wk_push_dropped(link, conn->chunk_fragment);
        return;
    }
    if (push->state != WK_PUSH_SENDING) {
        return; /* Its round is over; it begins anew in the next. */
    }
    push->offset += conn->chunk_bytes;
    if (push->offset == push->head.bytes) {
        push->state = WK_PUSH_NONE;
        push->kept = !push->seed;
        link->pushes_sent++;
    }
}

static bool send_none(struct wk_link *link, uint32_t shard)
{
    WK_FOR_SHARD(link, shard, p)
    {
        struct wk_fragment *fragment = &link->fragments[p];
        if (fragment->none_due) {
            fragment->none_due = false;
            link->message.type = DL_WIRE_PUSH_NONE;
            link->message.as.push_none = fragment->none;
            return true;
        }
    }
    return false;
}

static bool send_evaluation(struct wk_link *link, struct wk_conn *conn)
{
    if (link->evaluations_made - conn->evaluations_sent > WK_EVALUATIONS_MAX) {
        conn->evaluations_sent = link->evaluations_made - WK_EVALUATIONS_MAX;
    }
    if (conn->evaluations_sent == link->evaluations_made) {
        return false;
    }
    link->message.type = DL_WIRE_EVALUATION;
    link->message.as.evaluation = link->evaluations[conn->evaluations_sent++ % WK_EVALUATIONS_MAX];
    return true;
}

static bool has_pushes(const struct wk_link *link, uint32_t shard)
{
    WK_FOR_SHARD(link, shard, p)
    {
        enum wk_push_state state = link->fragments[p].push.state;
        if (state != WK_PUSH_NONE && state != WK_PUSH_MISSED) {
            return true;
        }
    }
    return false;
}

static bool send_goodbye(struct wk_link *link, struct wk_conn *conn, uint32_t shard)
{
    if (!link->leaving || conn->goodbye_sent || has_pushes(link, shard)) {
        return false;
    }
    conn->goodbye_sent = true;
    link->message.type = DL_WIRE_GOODBYE;
    link->message.as.goodbye.preempted = link->preempted;
    memcpy(link->message.as.goodbye.text, link->leave_text, sizeof link->leave_text);
    return true;
}

static bool send_heartbeat(struct wk_link *link, struct wk_conn *conn, int64_t now_ns)
{
    if (now_ns - conn->sent_ns < (int64_t)conn->heartbeat_ms * WK_NS_PER_MS) {
        return false;
    }
    link->message.type = DL_WIRE_HEARTBEAT;
    link->message.as.heartbeat =
        (struct dl_wire_heartbeat){.sequence = ++conn->heartbeats, .step = link->step, .tokens = link->tokens};
    return true;
}

static bool send_meta(struct wk_link *link, struct wk_conn *conn, uint32_t shard)
{
    if (!conn->meta_due) {
        return false;
    }
    conn->meta_due = false;
    make_meta(link, shard);
    return true;
}

/* Before anything else: no later message may depend on what came after the marker and arrive before it. */
static bool send_marker(struct wk_link *link, struct wk_conn *conn)
{
    if (conn->marker_sent == link->marker.id || link->role != DL_ROLE_LEARNER) {
        return false;
    }
    conn->marker_sent = link->marker.id;
    link->message.type = DL_WIRE_MARKER;
    link->message.as.marker = link->marker;
    return true;
}

/* Small messages go before and between chunks; META does not go twice before a chunk that waits. */
static void next_send(struct wk_link *link, struct wk_conn *conn, int64_t now_ns, uint32_t shard, struct wk_act *act)
{
    if (conn->goodbye_sent) {
        return;
    }
    bool meta_first = !conn->meta_was_last;
    conn->meta_was_last = false;
    act->type = WK_ACT_SEND;
    if (send_marker(link, conn)) {
        return;
    }
    if (wk_lease_send(link, now_ns, shard)) {
        return;
    }
    if (meta_first && send_meta(link, conn, shard)) {
        conn->meta_was_last = true;
        return;
    }
    if (wk_recover_send(link, shard) || send_none(link, shard) || send_evaluation(link, conn) ||
        send_push(link, conn, shard, act) || send_goodbye(link, conn, shard) || send_meta(link, conn, shard) ||
        send_heartbeat(link, conn, now_ns)) {
        return;
    }
    act->type = WK_ACT_NONE;
}

static bool may_connect(const struct wk_link *link, uint32_t shard)
{
    bool known = link->wanted >= 0 || link->role == DL_ROLE_EVALUATOR;
    return link->outcome.end == WK_END_NONE && !link->leaving && (shard == 0 || known || link->welcomed);
}

uint64_t wk_link_message_bytes_max(const struct wk_link *link)
{
    return (uint64_t)DL_WIRE_HEADER_BYTES + DL_WIRE_CONTROL_PAYLOAD_MAX + link->tensors_bytes;
}

bool wk_link_wants_close(const struct wk_link *link, uint32_t shard)
{
    return link->conns[shard].close_wanted;
}

bool wk_link_wants_memory(const struct wk_link *link, uint32_t shard)
{
    const struct wk_conn *conn = &link->conns[shard];
    if (!conn->chunk_busy) {
        return false;
    }
    const struct wk_push *push = &link->fragments[conn->chunk_fragment].push;
    return push->dropped || push->state != WK_PUSH_SENDING;
}

void wk_link_next_act(struct wk_link *link, int64_t now_ns, uint32_t shard, struct wk_act *act)
{
    struct wk_conn *conn = &link->conns[shard];
    act->type = WK_ACT_NONE;
    act->message = &link->message;
    if (conn->close_wanted) {
        act->type = WK_ACT_CLOSE;
        memcpy(act->text, conn->close_text, sizeof act->text);
        wk_conn_lose(link, now_ns, shard, act->text);
        return;
    }
    if (conn->state == WK_CONN_IDLE && may_connect(link, shard) && now_ns >= conn->retry_ns) {
        wk_conn_move(link, shard, WK_CONN_CONNECTING);
        conn->since_ns = now_ns;
        act->type = WK_ACT_CONNECT;
    } else if (conn->state == WK_CONN_GREETING && !conn->hello_sent) {
        conn->hello_sent = true;
        make_hello(link, shard);
        act->type = WK_ACT_SEND;
    } else if (conn->state == WK_CONN_READY) {
        next_send(link, conn, now_ns, shard, act);
    }
    if (act->type == WK_ACT_SEND) {
        conn->sent_ns = now_ns;
    }
}

/* --- time -------------------------------------------------------------------------------------------------------- */

void wk_link_tick(struct wk_link *link, int64_t now_ns)
{
    for (uint32_t i = 0; i < link->shards; i++) {
        struct wk_conn *conn = &link->conns[i];
        bool greeting = conn->state == WK_CONN_CONNECTING || conn->state == WK_CONN_GREETING;
        if (greeting && now_ns - conn->since_ns >= (int64_t)WK_GREETING_MS * WK_NS_PER_MS) {
            wk_close(link, i, "no WELCOME within %d s of connecting", WK_GREETING_MS / 1000);
        }
        if (conn->state == WK_CONN_READY && now_ns - conn->heard_ns >= (int64_t)conn->timeout_ms * WK_NS_PER_MS) {
            wk_close(link, i, "nothing was heard for %u ms", conn->timeout_ms);
        }
    }
}

int64_t wk_link_deadline(const struct wk_link *link)
{
    int64_t deadline_ns = INT64_MAX;
    for (uint32_t i = 0; i < link->shards; i++) {
        const struct wk_conn *conn = &link->conns[i];
        int64_t at_ns = INT64_MAX;
        switch (conn->state) {
        case WK_CONN_IDLE: at_ns = may_connect(link, i) ? conn->retry_ns : INT64_MAX; break;
        case WK_CONN_CONNECTING:
        case WK_CONN_GREETING: at_ns = conn->since_ns + (int64_t)WK_GREETING_MS * WK_NS_PER_MS; break;
        case WK_CONN_READY:
            at_ns = DL_MIN(conn->sent_ns + (int64_t)conn->heartbeat_ms * WK_NS_PER_MS,
                           conn->heard_ns + (int64_t)conn->timeout_ms * WK_NS_PER_MS);
            if (conn->goodbye_sent) {
                at_ns = conn->heard_ns + (int64_t)conn->timeout_ms * WK_NS_PER_MS;
            }
            break;
        case WK_CONN_OVER:
        case WK_CONN_STATES: break;
        }
        deadline_ns = DL_MIN(deadline_ns, at_ns);
    }
    return DL_MIN(deadline_ns, wk_lease_deadline(link));
}
