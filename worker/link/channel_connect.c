/* From looking a syncer's name up to the answer to the upgrade. */
#include <netdb.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/link/channel_internal.h"
#include "worker/link/recovery.h"

static void begin_upgrade(struct wk_channel *channel)
{
    const struct wk_endpoint *endpoint = &channel->hub->endpoints[channel->shard];
    uint8_t nonce[16];
    for (size_t i = 0; i < sizeof nonce; i += 4) {
        wk_channel_mask_key(channel, nonce + i);
    }
    wk_ws_key(nonce, channel->key);
    struct dl_err err;
    uint8_t *request = wk_outbox_space(&channel->out);
    enum dl_rc rc = wk_ws_request(endpoint->host, endpoint->port, channel->hub->token, channel->key, (char *)request,
                                  channel->out.capacity, &err);
    if (rc != DL_OK) {
        wk_channel_fail(channel, &err);
        return;
    }
    channel->state = WK_CHANNEL_UPGRADING;
    channel->connect_by_ns = INT64_MAX; /* From here the link's own bound holds. */
    wk_outbox_put(&channel->out, strlen((const char *)request));
    (void)wk_channel_flush(channel);
}

void wk_channel_secure(struct wk_channel *channel)
{
    struct dl_err err;
    enum dl_rc rc = wk_stream_handshake(&channel->stream, &err);
    if (rc == DL_OK) {
        begin_upgrade(channel);
    } else if (rc != DL_AGAIN) {
        wk_channel_fail(channel, &err);
    }
}

void wk_channel_connected(struct wk_channel *channel)
{
    const struct wk_endpoint *endpoint = &channel->hub->endpoints[channel->shard];
    struct dl_err err;
    if (wk_stream_connected(&channel->stream, endpoint->host, endpoint->port, &err) != DL_OK) {
        wk_channel_try_next_address(channel, &err);
        return;
    }
    int fd = channel->stream.fd;
    wk_recovery_connected(channel->hub, fd);
    channel->state = WK_CHANNEL_SECURING;
    if (wk_stream_open(&channel->stream, fd, endpoint->tls ? channel->hub->tls : NULL, endpoint->host, &err) != DL_OK) {
        wk_channel_fail(channel, &err);
        return;
    }
    wk_channel_secure(channel);
}

void wk_channel_try_next_address(struct wk_channel *channel, const struct dl_err *last)
{
    const struct wk_endpoint *endpoint = &channel->hub->endpoints[channel->shard];
    struct dl_err err = *last;
    if (wk_stream_connect(&channel->stream, &channel->next_address, endpoint->host, endpoint->port, &err) != DL_OK) {
        wk_channel_fail(channel, &err);
        return;
    }
    channel->state = WK_CHANNEL_CONNECTING;
    channel->connect_by_ns = channel->now_ns + WK_CONNECT_SECONDS * DL_NS_PER_SECOND;
}

void wk_channel_resolved(struct wk_channel *channel)
{
    struct dl_err err;
    enum dl_rc rc = wk_resolve_take(channel->resolve, &channel->addresses, &err);
    if (rc == DL_AGAIN) {
        return;
    }
    wk_resolve_free(dl_take(channel->resolve));
    if (rc != DL_OK) {
        wk_channel_fail(channel, &err);
        return;
    }
    channel->next_address = channel->addresses;
    dl_err_set(&err, DL_ENET, "no address to connect to");
    wk_channel_try_next_address(channel, &err);
}

void wk_channel_begin_connect(struct wk_channel *channel)
{
    const struct wk_endpoint *endpoint = &channel->hub->endpoints[channel->shard];
    struct dl_err err;
    if (wk_resolve_start(endpoint->host, endpoint->port, &channel->resolve, &channel->resolve_fd, &err) != DL_OK) {
        wk_channel_fail(channel, &err);
        return;
    }
    channel->state = WK_CHANNEL_RESOLVING;
    wk_channel_resolved(channel);
}

void wk_channel_read_upgrade(struct wk_channel *channel)
{
    struct dl_err err, closed_err;
    size_t got = 0, used = 0;
    size_t space = WK_IN_BYTES - channel->in_have;
    enum dl_rc rc = wk_stream_read(&channel->stream, NULL, 0, channel->in + channel->in_have, space, &got, &closed_err);
    if (rc == DL_AGAIN) {
        return;
    }
    channel->in_have += got;
    bool closed = rc != DL_OK || channel->in_have == WK_IN_BYTES;
    if (rc != DL_OK && channel->in_have == 0) {
        err = closed_err; /* With TLS 1.3 this is where a client learns that its certificate was not accepted. */
    } else {
        rc = wk_ws_response((const char *)channel->in, channel->in_have, closed, channel->key, &used, &err);
    }
    if (rc == DL_AGAIN) {
        return;
    }
    if (rc != DL_OK) {
        const struct wk_endpoint *endpoint = &channel->hub->endpoints[channel->shard];
        dl_err_wrap(&err, "join at %s:%s", endpoint->host, endpoint->port);
        wk_channel_fail(channel, &err);
        return;
    }
    size_t rest = channel->in_have - used;
    channel->in_have = 0;
    wk_channel_upgraded(channel, channel->in + used, rest);
}
