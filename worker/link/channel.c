#include "worker/link/channel_internal.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "common/mem.h"

#define TLS_RECORD_BYTES 16384
/* Bytes at once, no longer after those before them: a connection that fills a chunk within a moment. */
#define FAST_BYTES (32u << 10)
#define FAST_NS INT64_C(20000000)
#define FAST_TIMES 8 /* As many times what came in FAST_NS is waited for at most: 160 ms, within any timeout. */
#define CHUNK_HEAD_BYTES (DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES)
static_assert(DL_WIRE_CONTROL_PAYLOAD_MAX >= TLS_RECORD_BYTES, "a record's data fits the send buffer");

/* --- ending ------------------------------------------------------------------------------------------------------ */

static void close_channel(struct wk_channel *channel)
{
    wk_resolve_free(dl_take(channel->resolve));
    if (channel->addresses != NULL) {
        freeaddrinfo(dl_take(channel->addresses));
    }
    channel->next_address = NULL;
    wk_stream_close(&channel->stream);
    channel->state = WK_CHANNEL_CLOSED;
    channel->deaf = channel->more_input = channel->pong_due = false;
    channel->in_have = 0;
    wk_outbox_clear(&channel->out);
    channel->connect_by_ns = INT64_MAX;
    channel->slot = NULL;
    wk_rx_reset(&channel->rx);
}

void wk_channel_fail(struct wk_channel *channel, const struct dl_err *err)
{
    struct wk_hub *hub = channel->hub;
    close_channel(channel);
    pthread_mutex_lock(&hub->lock);
    if (err->rc == DL_EDENIED) {
        wk_link_on_denied(hub->link, channel->now_ns, channel->shard, err->text);
    } else {
        wk_link_on_disconnected(hub->link, channel->now_ns, channel->shard, err->text);
    }
    pthread_cond_broadcast(&hub->changed);
    pthread_mutex_unlock(&hub->lock);
}

/* --- what comes in ----------------------------------------------------------------------------------------------- */

static enum dl_rc on_message(void *context, const struct dl_wire_message *message, struct dl_err *err)
{
    struct wk_channel *channel = context;
    struct wk_hub *hub = channel->hub;
    (void)err;
    pthread_mutex_lock(&hub->lock);
    wk_link_on_message(hub->link, channel->now_ns, channel->shard, message);
    pthread_cond_broadcast(&hub->changed);
    pthread_mutex_unlock(&hub->lock);
    return DL_OK;
}

static enum dl_rc on_place(void *context, uint64_t transfer, uint64_t offset, uint32_t bytes, uint8_t **data,
                           struct dl_err *err)
{
    struct wk_channel *channel = context;
    struct wk_hub *hub = channel->hub;
    struct wk_spot *spot = &channel->spot;
    pthread_mutex_lock(&hub->lock);
    enum wk_place place = wk_link_place(hub->link, channel->now_ns, channel->shard, transfer, offset, bytes, spot);
    pthread_mutex_unlock(&hub->lock);
    if (place == WK_PLACE_BROKEN) {
        return dl_err_set(err, DL_EPROTO, "protocol error: a chunk that does not continue its transfer");
    }
    *data = NULL;
    if (place == WK_PLACE_SKIP) {
        return DL_OK;
    }
    channel->slot = wk_store_slot(hub->store, spot->fragment, spot->slot, spot->total_bytes);
    if (channel->slot == NULL) {
        return dl_err_set(err, DL_ENOMEM, "receive fragment %u: no memory for %llu bytes", spot->fragment,
                          (unsigned long long)spot->total_bytes);
    }
    if (spot->offset == 0) {
        dl_content_begin(wk_store_content(hub->store, spot->fragment, spot->slot));
    }
    *data = channel->slot + spot->offset;
    return DL_OK;
}

/* The content's hash goes along. A chunk that is damaged ends the connection, and with it the update. */
static enum dl_rc on_chunk(void *context, struct dl_leaves *leaves, bool intact, struct dl_err *err)
{
    struct wk_channel *channel = context;
    struct wk_hub *hub = channel->hub;
    uint64_t content_hash = 0;
    pthread_mutex_lock(&hub->lock);
    bool last = wk_link_on_chunk(hub->link, channel->now_ns, channel->shard, intact, &content_hash);
    pthread_mutex_unlock(&hub->lock);
    if (!intact) {
        return dl_err_set(err, DL_ECORRUPT, "a chunk of fragment %u was damaged on the way", channel->spot.fragment);
    }
    struct dl_content *content = wk_store_content(hub->store, channel->spot.fragment, channel->spot.slot);
    dl_content_add_leaves(content, leaves);
    if (last) {
        bool whole = dl_content_result(content) == content_hash;
        pthread_mutex_lock(&hub->lock);
        wk_link_on_update(hub->link, channel->now_ns, channel->shard, whole);
        pthread_cond_broadcast(&hub->changed);
        pthread_mutex_unlock(&hub->lock);
    }
    return DL_OK;
}

/* --- what goes out ----------------------------------------------------------------------------------------------- */

void wk_channel_mask_key(struct wk_channel *channel, uint8_t key[4])
{
    if (channel->random_left < 4) {
        /* A key must be unpredictable to whoever chose the payload (RFC 6455, 10.3); 256 bytes never come in part. */
        ssize_t got = getrandom(channel->random, sizeof channel->random, 0);
        assert(got == (ssize_t)sizeof channel->random);
        channel->random_left = sizeof channel->random;
    }
    channel->random_left -= 4;
    memcpy(key, channel->random + channel->random_left, 4);
}

/* The memory of the chunk that was lent may change again. */
static void give_back(struct wk_channel *channel)
{
    struct wk_hub *hub = channel->hub;
    pthread_mutex_lock(&hub->lock);
    wk_link_on_chunk_sent(hub->link, channel->now_ns, channel->shard);
    pthread_cond_broadcast(&hub->changed);
    pthread_mutex_unlock(&hub->lock);
}

bool wk_channel_flush(struct wk_channel *channel)
{
    while (!wk_outbox_is_empty(&channel->out)) {
        struct wk_outbox_parts parts;
        size_t sent = 0;
        wk_outbox_parts(&channel->out, &parts);
        enum dl_rc rc = wk_stream_write_two(&channel->stream, parts.bytes[0], parts.sizes[0], parts.bytes[1],
                                            parts.sizes[1], &sent, &channel->deaf_err);
        if (rc == DL_AGAIN) {
            return false;
        }
        if (rc != DL_OK) {
            channel->deaf = true;
            return false;
        }
        __atomic_add_fetch(&channel->hub->bytes_sent, sent, __ATOMIC_RELAXED);
        if (wk_outbox_sent(&channel->out, sent)) {
            give_back(channel);
        }
    }
    return true;
}

static void put_control(struct wk_channel *channel, enum dl_ws_opcode opcode, const uint8_t *payload, size_t bytes)
{
    uint8_t key[4];
    wk_channel_mask_key(channel, key);
    uint8_t *at = wk_outbox_space(&channel->out);
    size_t head = dl_ws_head(opcode, bytes, key, at);
    dl_ws_mask(at + head, payload, bytes, key, 0);
    wk_outbox_put(&channel->out, head + bytes);
}

/* The message stands DL_WS_HEAD_MAX from the start of the send buffer; its frame's head goes right before it. */
static void frame_message(struct wk_channel *channel, size_t bytes)
{
    uint8_t key[4], head[DL_WS_HEAD_MAX];
    wk_channel_mask_key(channel, key);
    size_t length = dl_ws_head(DL_WS_BINARY, bytes, key, head);
    uint8_t *at = wk_outbox_space(&channel->out);
    memmove(at + length, at + DL_WS_HEAD_MAX, bytes);
    memcpy(at, head, length);
    dl_ws_mask(at + length, at + length, bytes, key, 0);
    wk_outbox_put(&channel->out, length + bytes);
}

/* A chunk is hashed where it lies and written from there: the kernel finds in the cache what the hash has read. Its mask is
 * zeros, which leaves the data as they are. Masks keep a third party, who may have chosen the payload, from making an
 * intermediary believe that it sees HTTP (RFC 6455, 10.3). What stands here is a learner's own deltas behind our header, chosen
 * by the program that sends them; messages keep keys that nobody can foresee. */
static void send_chunk(struct wk_channel *channel)
{
    static const uint8_t key[4] = {0};
    const struct wk_chunk *chunk = &channel->act.chunk;
    const uint8_t *data = wk_store_push(channel->hub->store, chunk->fragment, chunk->seed);
    if (data == NULL) {
        struct dl_err err = {.rc = DL_OK};
        dl_err_set(&err, DL_ENOMEM, "push fragment %u: no memory for its values", chunk->fragment);
        wk_channel_fail(channel, &err);
        return;
    }
    data += chunk->offset;
    size_t bytes = chunk->bytes;
    uint8_t *at = wk_outbox_space(&channel->out);
    size_t head = dl_ws_head(DL_WS_BINARY, CHUNK_HEAD_BYTES + bytes, key, at);
    dl_wire_chunk_head(chunk->transfer, chunk->offset, data, chunk->bytes, at + head);
    head += CHUNK_HEAD_BYTES;
    /* With TLS what is written at once is a record of its own: the head shares it with the first of the data. */
    size_t beside = channel->stream.ssl == NULL ? 0 : DL_MIN(bytes, TLS_RECORD_BYTES - head);
    memcpy(at + head, data, beside);
    wk_outbox_put(&channel->out, head + beside);
    if (beside == bytes) {
        give_back(channel);
    } else {
        wk_outbox_lend(&channel->out, data + beside, bytes - beside);
    }
}

/* --- acts -------------------------------------------------------------------------------------------------------- */

static void say_close(struct wk_channel *channel)
{
    if (channel->state == WK_CHANNEL_OPEN && wk_outbox_is_empty(&channel->out) && !channel->deaf) {
        static const uint8_t normal[2] = {1000 >> 8, 1000 & 0xff};
        put_control(channel, DL_WS_CLOSE, normal, sizeof normal);
        (void)wk_channel_flush(channel); /* Out of politeness; nobody waits for it. */
    }
}

/* Asks the link what to do and does it; false when there is nothing. */
static bool do_act(struct wk_channel *channel)
{
    struct wk_hub *hub = channel->hub;
    size_t bytes = 0;
    enum dl_rc rc = DL_OK;
    struct dl_err err;
    pthread_mutex_lock(&hub->lock);
    wk_link_next_act(hub->link, channel->now_ns, channel->shard, &channel->act);
    if (channel->act.type == WK_ACT_SEND) {
        /* Encoded under the lock: the message is the link's. */
        rc = dl_wire_encode(channel->act.message, wk_outbox_space(&channel->out) + DL_WS_HEAD_MAX,
                            channel->out.capacity - DL_WS_HEAD_MAX, &bytes, &err);
    } else if (channel->act.type == WK_ACT_CLOSE) {
        pthread_cond_broadcast(&hub->changed); /* A wait ends with its connection. */
    }
    pthread_mutex_unlock(&hub->lock);
    switch (channel->act.type) {
    case WK_ACT_NONE: return false;
    case WK_ACT_CONNECT: wk_channel_begin_connect(channel); return true;
    case WK_ACT_CLOSE:
        say_close(channel);
        close_channel(channel);
        return true;
    case WK_ACT_SEND:
        if (rc != DL_OK) {
            wk_channel_fail(channel, &err);
        } else {
            frame_message(channel, bytes);
        }
        return true;
    case WK_ACT_CHUNK: send_chunk(channel); return true;
    }
    return false;
}

/* --- reading ----------------------------------------------------------------------------------------------------- */

static enum dl_rc on_control(struct wk_channel *channel, struct dl_err *err)
{
    const struct dl_ws_parser *parser = &channel->parser;
    if (parser->opcode == DL_WS_PING) {
        /* Of several that come before an answer is out only the last one has to be answered. */
        memcpy(channel->pong, parser->control, parser->control_bytes);
        channel->pong_bytes = parser->control_bytes;
        channel->pong_due = true;
    } else if (parser->opcode == DL_WS_CLOSE) {
        int reason = parser->control_bytes > 2 ? (int)parser->control_bytes - 2 : 0;
        return dl_err_set(err, DL_ENET, "the syncer closed the connection (%u) %.*s", dl_ws_close_code(parser), reason,
                          (const char *)parser->control + 2);
    }
    return DL_OK;
}

static enum dl_rc feed(struct wk_channel *channel, uint8_t *bytes, size_t size, struct dl_err *err)
{
    for (;;) {
        uint8_t *data = NULL;
        size_t used = 0, data_bytes = 0;
        enum dl_rc rc = DL_OK;
        enum dl_ws_event event = dl_ws_parse(&channel->parser, bytes, size, &used, &data, &data_bytes, err);
        switch (event) {
        case DL_WS_EVENT_MORE: return DL_OK;
        case DL_WS_EVENT_DATA: rc = wk_rx_bytes(&channel->rx, data, data_bytes, err); break;
        case DL_WS_EVENT_END: rc = wk_rx_end(&channel->rx, err); break;
        case DL_WS_EVENT_CONTROL: rc = on_control(channel, err); break;
        case DL_WS_EVENT_BROKEN: rc = DL_EPROTO; break;
        }
        if (rc != DL_OK) {
            return rc;
        }
        bytes += used;
        size -= used;
    }
}

static void heard(struct wk_channel *channel)
{
    pthread_mutex_lock(&channel->hub->lock);
    wk_link_on_heard(channel->hub->link, channel->now_ns, channel->shard);
    pthread_mutex_unlock(&channel->hub->lock);
}

/* Bytes that come next for certain, and have a place of their own at `*at`. */
static size_t next_placed(const struct wk_channel *channel, uint8_t **at)
{
    return (size_t)DL_MIN((uint64_t)wk_rx_direct(&channel->rx, at), dl_ws_payload_next(&channel->parser));
}

/* Inside a chunk that comes fast, the thread is woken for as much as it reads at once, not for each segment. Where bytes come
 * slowly it is woken for each of them: what has come is what tells that the syncer is there. */
static void set_alarm(struct wk_channel *channel, size_t total)
{
    uint8_t *at = NULL;
    bool is_fast = total >= FAST_BYTES && channel->now_ns - channel->read_ns < FAST_NS;
    size_t most = DL_MIN((size_t)WK_READ_BYTES, FAST_TIMES * total);
    channel->read_ns = channel->now_ns;
    wk_stream_wake_at(&channel->stream, is_fast ? DL_MIN(next_placed(channel, &at), most) : 1);
}

static void read_frames(struct wk_channel *channel)
{
    struct dl_err err;
    enum dl_rc rc = DL_OK;
    size_t total = 0;
    while (rc == DL_OK && total < WK_READ_BUDGET) {
        uint8_t *at = NULL;
        size_t direct = next_placed(channel, &at);
        size_t got = 0;
        size_t beside = direct == 0 ? WK_IN_BYTES : direct <= WK_READ_BYTES ? WK_IN_BESIDE_BYTES : 0;
        direct = DL_MIN(direct, (size_t)WK_READ_BYTES);
        rc = wk_stream_read(&channel->stream, at, direct, channel->in, beside, &got, &err);
        if (rc != DL_OK) {
            break;
        }
        total += got;
        size_t placed = DL_MIN(got, direct);
        if (placed > 0) {
            wk_rx_advance(&channel->rx, placed);
            dl_ws_skip(&channel->parser, placed);
        }
        rc = feed(channel, channel->in, got - placed, &err);
        if (rc == DL_OK && channel->stream.ssl == NULL && got < direct + beside) {
            rc = DL_AGAIN; /* All that there was: no call to be told so. */
        }
    }
    if (total > 0) {
        __atomic_add_fetch(&channel->hub->bytes_received, total, __ATOMIC_RELAXED);
        heard(channel);
        set_alarm(channel, total);
    }
    channel->more_input = rc == DL_OK;
    if (rc != DL_OK && rc != DL_AGAIN) {
        wk_channel_fail(channel, &err);
    }
}

void wk_channel_upgraded(struct wk_channel *channel, uint8_t *bytes, size_t size)
{
    struct dl_err err;
    channel->state = WK_CHANNEL_OPEN;
    channel->parser = (struct dl_ws_parser){.message_max = WK_WS_MESSAGE_MAX};
    pthread_mutex_lock(&channel->hub->lock);
    wk_link_on_connected(channel->hub->link, channel->now_ns, channel->shard);
    pthread_mutex_unlock(&channel->hub->lock);
    if (feed(channel, bytes, size, &err) != DL_OK) {
        wk_channel_fail(channel, &err);
        return;
    }
    read_frames(channel);
}

/* The peer takes no more bytes. It may have said why before (REFUSE, STOP): that is read, and then it is over. */
static void hear_out(struct wk_channel *channel)
{
    struct dl_err err = channel->deaf_err;
    if (channel->state == WK_CHANNEL_UPGRADING) {
        wk_channel_read_upgrade(channel);
    }
    if (channel->state == WK_CHANNEL_OPEN) {
        read_frames(channel);
    }
    if (channel->state != WK_CHANNEL_CLOSED) {
        wk_channel_fail(channel, &err);
    }
}

/* Looked at while the connection takes no more bytes: its memory may be wanted back, and it must still be closed when its time is
 * up. True when the next act is a CLOSE, or it has failed. */
static bool pressed(struct wk_channel *channel)
{
    struct wk_hub *hub = channel->hub;
    pthread_mutex_lock(&hub->lock);
    bool close = wk_link_wants_close(hub->link, channel->shard);
    bool memory = wk_link_wants_memory(hub->link, channel->shard);
    pthread_mutex_unlock(&hub->lock);
    struct dl_err err;
    if (memory && !close) {
        if (wk_outbox_keep(&channel->out, &err) != DL_OK) {
            wk_channel_fail(channel, &err);
            return true;
        }
        give_back(channel);
    }
    return close;
}

void wk_channel_service(struct wk_channel *channel, int64_t now_ns)
{
    channel->now_ns = now_ns;
    if (channel->connect_by_ns <= now_ns) {
        struct dl_err err;
        dl_err_set(&err, DL_ETIMEOUT, "connect to %s:%s: no answer within %d s",
                   channel->hub->endpoints[channel->shard].host, channel->hub->endpoints[channel->shard].port,
                   WK_CONNECT_SECONDS);
        wk_stream_close(&channel->stream);
        wk_channel_try_next_address(channel, &err);
    }
    for (;;) {
        if (channel->deaf) {
            hear_out(channel);
        }
        if (!wk_channel_flush(channel) && !channel->deaf && !pressed(channel)) {
            return;
        }
        if (channel->deaf) {
            continue;
        }
        if (channel->pong_due && wk_outbox_is_empty(&channel->out)) {
            channel->pong_due = false;
            put_control(channel, DL_WS_PONG, channel->pong, channel->pong_bytes);
        } else if (!do_act(channel)) {
            return;
        }
    }
}

bool wk_channel_poll(const struct wk_channel *channel, struct pollfd *poll)
{
    bool output = !wk_outbox_is_empty(&channel->out) && !channel->deaf;
    switch (channel->state) {
    case WK_CHANNEL_CLOSED: return false;
    case WK_CHANNEL_RESOLVING: *poll = (struct pollfd){.fd = channel->resolve_fd, .events = POLLIN}; return true;
    case WK_CHANNEL_CONNECTING: *poll = (struct pollfd){.fd = channel->stream.fd, .events = POLLOUT}; return true;
    case WK_CHANNEL_SECURING:
    case WK_CHANNEL_UPGRADING:
    case WK_CHANNEL_OPEN:
        *poll = (struct pollfd){
            .fd = channel->stream.fd,
            .events = (short)(POLLIN | (output || channel->stream.wants_write ? POLLOUT : 0)),
        };
        return true;
    }
    return false;
}

void wk_channel_ready(struct wk_channel *channel, int64_t now_ns, short revents)
{
    channel->now_ns = now_ns;
    if (revents == 0 && !channel->more_input) {
        return;
    }
    switch (channel->state) {
    case WK_CHANNEL_CLOSED: break;
    case WK_CHANNEL_RESOLVING: wk_channel_resolved(channel); break;
    case WK_CHANNEL_CONNECTING: wk_channel_connected(channel); break;
    case WK_CHANNEL_SECURING: wk_channel_secure(channel); break;
    case WK_CHANNEL_UPGRADING:
        if ((revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
            wk_channel_read_upgrade(channel);
        }
        break;
    case WK_CHANNEL_OPEN:
        if ((revents & (POLLIN | POLLHUP | POLLERR)) != 0 || channel->more_input || channel->stream.wants_write) {
            read_frames(channel);
        }
        break;
    }
}

int64_t wk_channel_deadline(const struct wk_channel *channel)
{
    return channel->more_input ? INT64_MIN : channel->connect_by_ns;
}

/* --- life -------------------------------------------------------------------------------------------------------- */

enum dl_rc wk_channel_init(struct wk_channel *channel, struct wk_hub *hub, uint32_t shard, struct dl_err *err)
{
    channel->hub = hub;
    channel->shard = shard;
    channel->stream.fd = -1;
    channel->connect_by_ns = INT64_MAX;
    enum dl_rc rc = wk_outbox_init(&channel->out, hub->out_bytes, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_rx_owner owner = {.context = channel, .message = on_message, .place = on_place, .chunk = on_chunk};
    wk_rx_init(&channel->rx, &owner, &channel->message);
    return DL_OK;
}

void wk_channel_release(struct wk_channel *channel)
{
    if (channel->hub != NULL) {
        close_channel(channel);
        wk_outbox_release(&channel->out);
    }
}
