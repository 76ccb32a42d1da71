#include "worker/link/receive.h"

#include <assert.h>
#include <string.h>

#include "common/mem.h"

#define HEAD_BYTES (DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES)

void wk_rx_init(struct wk_rx *rx, const struct wk_rx_owner *owner, struct dl_wire_message *message)
{
    rx->owner = *owner;
    rx->message = message;
    wk_rx_reset(rx);
}

void wk_rx_reset(struct wk_rx *rx)
{
    rx->have = 0;
    rx->data = NULL;
}

static bool in_header(const struct wk_rx *rx)
{
    return rx->have < DL_WIRE_HEADER_BYTES;
}

static uint32_t message_bytes(const struct wk_rx *rx)
{
    return DL_WIRE_HEADER_BYTES + rx->header.payload_bytes;
}

static uint32_t chunk_data_bytes(const struct wk_rx *rx)
{
    return rx->header.payload_bytes - DL_WIRE_CHUNK_PREFIX_BYTES;
}

/* The header is complete: is it one that a learner takes? */
static enum dl_rc begin_message(struct wk_rx *rx, struct dl_err *err)
{
    enum dl_rc rc = dl_wire_header_decode(rx->header_bytes, &rx->header, err);
    if (rc == DL_OK && rx->header.type != DL_WIRE_CHUNK && rx->header.payload_bytes > sizeof rx->control) {
        rc = dl_err_set(err, DL_EPROTO, "message %s: too long for a learner", dl_wire_type_name(rx->header.type));
    }
    return rc;
}

static enum dl_rc begin_chunk(struct wk_rx *rx, struct dl_err *err)
{
    uint64_t transfer, offset;
    dl_wire_chunk_prefix(rx->prefix, &transfer, &offset);
    rx->data = NULL;
    dl_leaves_begin(&rx->leaves);
    return rx->owner.place(rx->owner.context, transfer, offset, chunk_data_bytes(rx), &rx->data, err);
}

/* `size` bytes of the chunk's data have come to their place, behind those before. */
static void hash_data(struct wk_rx *rx, size_t size)
{
    dl_leaves_add(&rx->leaves, rx->data + (rx->have - HEAD_BYTES) - size, size);
}

/* Copies what is missing up to `end` bytes of the message to `to`, which holds the part from `start` on. */
static void gather(struct wk_rx *rx, uint32_t start, uint32_t end, uint8_t *to, const uint8_t **bytes, size_t *size)
{
    size_t take = DL_MIN((size_t)(end - rx->have), *size);
    if (to != NULL) {
        memcpy(to + (rx->have - start), *bytes, take);
    }
    rx->have += (uint32_t)take;
    *bytes += take;
    *size -= take;
}

enum dl_rc wk_rx_bytes(struct wk_rx *rx, const uint8_t *bytes, size_t size, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    while (size > 0 && rc == DL_OK) {
        if (in_header(rx)) {
            gather(rx, 0, DL_WIRE_HEADER_BYTES, rx->header_bytes, &bytes, &size);
            rc = in_header(rx) ? DL_OK : begin_message(rx, err);
        } else if (rx->have == message_bytes(rx)) {
            rc = dl_err_set(err, DL_EPROTO, "message %s: %zu bytes too many", dl_wire_type_name(rx->header.type), size);
        } else if (rx->header.type != DL_WIRE_CHUNK) {
            gather(rx, DL_WIRE_HEADER_BYTES, message_bytes(rx), rx->control, &bytes, &size);
        } else if (rx->have < HEAD_BYTES) {
            gather(rx, DL_WIRE_HEADER_BYTES, HEAD_BYTES, rx->prefix, &bytes, &size);
            rc = rx->have < HEAD_BYTES ? DL_OK : begin_chunk(rx, err);
        } else {
            uint32_t before = rx->have;
            gather(rx, HEAD_BYTES, message_bytes(rx), rx->data, &bytes, &size);
            if (rx->data != NULL) {
                hash_data(rx, rx->have - before);
            }
        }
    }
    return rc;
}

static enum dl_rc end_chunk(struct wk_rx *rx, struct dl_err *err)
{
    if (dl_take(rx->data) == NULL) {
        return DL_OK;
    }
    bool intact = dl_wire_chunk_check(rx->header_bytes, rx->prefix, &rx->leaves, NULL) == DL_OK;
    return rx->owner.chunk(rx->owner.context, &rx->leaves, intact, err);
}

static enum dl_rc end_control(struct wk_rx *rx, struct dl_err *err)
{
    enum dl_rc rc = dl_wire_verify(rx->header_bytes, rx->control, rx->header.payload_bytes, err);
    if (rc == DL_OK) {
        rc = dl_wire_decode(rx->header.type, rx->control, rx->header.payload_bytes, rx->message, err);
    }
    return rc == DL_OK ? rx->owner.message(rx->owner.context, rx->message, err) : rc;
}

enum dl_rc wk_rx_end(struct wk_rx *rx, struct dl_err *err)
{
    if (in_header(rx) || rx->have < message_bytes(rx)) {
        return dl_err_set(err, DL_EPROTO, "a message ended after %u bytes, before all that its header announced",
                          rx->have);
    }
    rx->have = 0;
    return rx->header.type == DL_WIRE_CHUNK ? end_chunk(rx, err) : end_control(rx, err);
}

size_t wk_rx_direct(const struct wk_rx *rx, uint8_t **at)
{
    if (rx->data == NULL || rx->have < HEAD_BYTES || in_header(rx)) {
        return 0;
    }
    *at = rx->data + (rx->have - HEAD_BYTES);
    return message_bytes(rx) - rx->have;
}

void wk_rx_advance(struct wk_rx *rx, size_t bytes)
{
    assert(rx->data != NULL && bytes <= message_bytes(rx) - rx->have);
    rx->have += (uint32_t)bytes;
    hash_data(rx, bytes);
}
