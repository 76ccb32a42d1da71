#include "syncer/server/receive.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

void sy_receive_init(struct sy_receive *receive)
{
    memset(receive, 0, sizeof *receive);
}

void sy_receive_release(struct sy_receive *receive)
{
    free(receive->payload);
    receive->payload = NULL;
    receive->payload_bytes = 0;
}

static void start_over(struct sy_receive *receive)
{
    receive->header_have = 0;
    receive->prefix_have = 0;
    receive->body_have = 0;
    receive->chunk_begun = false;
    receive->into = NULL;
    /* Only a HELLO needs this much; it comes once. */
    if (receive->payload_bytes > DL_WIRE_CONTROL_PAYLOAD_MAX) {
        sy_receive_release(receive);
    }
}

void sy_receive_drop_chunk(struct sy_receive *receive)
{
    receive->into = NULL;
}

static uint32_t body_size(const struct sy_receive *receive)
{
    return receive->decoded.type == DL_WIRE_CHUNK ? receive->decoded.payload_bytes - DL_WIRE_CHUNK_PREFIX_BYTES
                                                  : receive->decoded.payload_bytes;
}

size_t sy_receive_direct(const struct sy_receive *receive, uint8_t **at)
{
    *at = NULL;
    if (!receive->chunk_begun) {
        return 0;
    }
    *at = receive->into == NULL ? NULL : receive->into + receive->body_have;
    return body_size(receive) - receive->body_have;
}

void sy_receive_placed(struct sy_receive *receive, size_t bytes)
{
    assert(receive->chunk_begun && bytes <= body_size(receive) - receive->body_have);
    if (receive->into != NULL) {
        dl_leaves_add(&receive->leaves, receive->into + receive->body_have, bytes);
    }
    receive->body_have += (uint32_t)bytes;
}

/* Moves up to `want` bytes; returns how many. */
static size_t take(uint8_t *to, uint32_t *have, uint32_t want, const uint8_t *bytes, size_t size)
{
    size_t count = DL_MIN(size, (size_t)(want - *have));
    memcpy(to + *have, bytes, count);
    *have += (uint32_t)count;
    return count;
}

static enum dl_rc begin_message(struct sy_receive *receive, const struct sy_receive_sink *sink, struct dl_err *err)
{
    enum dl_rc rc = dl_wire_header_decode(receive->header, &receive->decoded, err);
    if (rc == DL_OK) {
        rc = sink->admit(sink->context, receive->decoded.type, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    if (receive->decoded.type == DL_WIRE_CHUNK) {
        return receive->decoded.payload_bytes > DL_WIRE_CHUNK_PREFIX_BYTES
                   ? DL_OK
                   : dl_err_set(err, DL_EPROTO, "chunk without data");
    }
    if (receive->decoded.payload_bytes > receive->payload_bytes) {
        free(receive->payload);
        receive->payload = malloc(receive->decoded.payload_bytes);
        receive->payload_bytes = receive->payload == NULL ? 0 : receive->decoded.payload_bytes;
    }
    return receive->payload != NULL || receive->decoded.payload_bytes == 0
               ? DL_OK
               : dl_err_set(err, DL_ENOMEM, "no memory for a message of %u bytes", receive->decoded.payload_bytes);
}

static enum dl_rc begin_chunk(struct sy_receive *receive, const struct sy_receive_sink *sink, struct dl_err *err)
{
    uint64_t transfer;
    uint64_t offset;
    dl_wire_chunk_prefix(receive->prefix, &transfer, &offset);
    receive->chunk_begun = true;
    dl_leaves_begin(&receive->leaves);
    return sink->chunk_begin(sink->context, transfer, offset, body_size(receive), &receive->into, err);
}

static enum dl_rc end_chunk(struct sy_receive *receive, const struct sy_receive_sink *sink, struct dl_err *err)
{
    uint64_t transfer;
    uint64_t offset;
    uint32_t size = body_size(receive);
    dl_wire_chunk_prefix(receive->prefix, &transfer, &offset);
    bool intact =
        receive->into == NULL || dl_wire_chunk_check(receive->header, receive->prefix, &receive->leaves, err) == DL_OK;
    return sink->chunk_end(sink->context, transfer, receive->into, size, intact, err);
}

static enum dl_rc end_control(struct sy_receive *receive, const struct sy_receive_sink *sink,
                              struct dl_wire_message *scratch, struct dl_err *err)
{
    static const uint8_t nothing[1];
    const uint8_t *payload = receive->payload != NULL ? receive->payload : nothing;
    enum dl_rc rc = dl_wire_verify(receive->header, payload, receive->decoded.payload_bytes, err);
    if (rc == DL_OK) {
        rc = dl_wire_decode(receive->decoded.type, payload, receive->decoded.payload_bytes, scratch, err);
    }
    if (rc == DL_OK) {
        rc = sink->control(sink->context, scratch, err);
    }
    return rc;
}

static bool is_complete(const struct sy_receive *receive)
{
    return receive->header_have == DL_WIRE_HEADER_BYTES && receive->body_have == body_size(receive) &&
           (receive->decoded.type != DL_WIRE_CHUNK || receive->chunk_begun);
}

/* Takes what it can of header, prefix or body; `*used` says how much. */
static enum dl_rc advance(struct sy_receive *receive, const struct sy_receive_sink *sink, const uint8_t *bytes,
                          size_t size, size_t *used, struct dl_err *err)
{
    if (receive->header_have < DL_WIRE_HEADER_BYTES) {
        *used = take(receive->header, &receive->header_have, DL_WIRE_HEADER_BYTES, bytes, size);
        return receive->header_have == DL_WIRE_HEADER_BYTES ? begin_message(receive, sink, err) : DL_OK;
    }
    if (receive->decoded.type != DL_WIRE_CHUNK) {
        *used = take(receive->payload, &receive->body_have, body_size(receive), bytes, size);
        return DL_OK;
    }
    if (receive->prefix_have < DL_WIRE_CHUNK_PREFIX_BYTES) {
        *used = take(receive->prefix, &receive->prefix_have, DL_WIRE_CHUNK_PREFIX_BYTES, bytes, size);
        return receive->prefix_have == DL_WIRE_CHUNK_PREFIX_BYTES ? begin_chunk(receive, sink, err) : DL_OK;
    }
    uint8_t *at;
    size_t room = sy_receive_direct(receive, &at);
    *used = DL_MIN(size, room);
    if (at != NULL) {
        memcpy(at, bytes, *used);
    }
    sy_receive_placed(receive, *used);
    return DL_OK;
}

enum dl_rc sy_receive_feed(struct sy_receive *receive, const struct sy_receive_sink *sink,
                           struct dl_wire_message *scratch, const uint8_t *bytes, size_t size, bool last,
                           struct dl_err *err)
{
    while (size > 0) {
        if (is_complete(receive)) {
            return dl_err_set(err, DL_EPROTO, "%zu bytes too many after a message", size);
        }
        size_t used = 0;
        enum dl_rc rc = advance(receive, sink, bytes, size, &used, err);
        if (rc != DL_OK) {
            return rc;
        }
        bytes += used;
        size -= used;
    }
    if (!last) {
        return DL_OK;
    }
    if (!is_complete(receive)) {
        return dl_err_set(err, DL_EPROTO, "a message ends in the middle (%u of %u bytes after the header)",
                          receive->body_have, receive->header_have < DL_WIRE_HEADER_BYTES ? 0 : body_size(receive));
    }
    enum dl_rc rc = receive->decoded.type == DL_WIRE_CHUNK ? end_chunk(receive, sink, err)
                                                           : end_control(receive, sink, scratch, err);
    start_over(receive);
    return rc;
}
