#include "worker/link/trace_pack.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define MESSAGE_BYTES_MAX ((size_t)DL_WIRE_HEADER_BYTES + DL_WIRE_CONTROL_PAYLOAD_MAX)

struct packed {
    uint8_t *bytes;
    size_t size, capacity;
};

static enum dl_rc append(struct packed *packed, const struct dl_wire_message *message, struct dl_err *err)
{
    if (packed->capacity - packed->size < MESSAGE_BYTES_MAX) {
        size_t capacity = 2 * packed->capacity + MESSAGE_BYTES_MAX;
        uint8_t *bytes = realloc(packed->bytes, capacity);
        if (bytes == NULL) {
            return dl_err_set(err, DL_ENOMEM, "pack entries of the tape: no memory for %zu bytes", capacity);
        }
        packed->bytes = bytes;
        packed->capacity = capacity;
    }
    size_t used = 0;
    enum dl_rc rc = dl_wire_encode(message, packed->bytes + packed->size, packed->capacity - packed->size, &used, err);
    packed->size += rc == DL_OK ? used : 0;
    return rc == DL_OK && packed->size > WK_TRACE_BYTES_MAX
               ? dl_err_set(err, DL_EFULL, "pack entries of the tape: more than %u bytes", WK_TRACE_BYTES_MAX)
               : rc;
}

enum dl_rc wk_trace_pack(const struct wk_link *link, uint8_t **out, size_t *size, struct dl_err *err)
{
    DL_AUTO_FREE struct dl_wire_message *message = calloc(1, sizeof *message);
    struct packed packed = {0};
    enum dl_rc rc = message == NULL ? dl_err_set(err, DL_ENOMEM, "pack entries of the tape: no memory") : DL_OK;
    for (uint64_t position = 0; rc == DL_OK && wk_link_trace_next(link, &position, &message->as.trace);) {
        message->type = DL_WIRE_TRACE;
        rc = append(&packed, message, err);
    }
    if (rc != DL_OK) {
        free(packed.bytes);
        return rc;
    }
    *out = packed.bytes;
    *size = packed.size;
    return DL_OK;
}

static enum dl_rc take_one(struct wk_link *link, const uint8_t *bytes, size_t size, struct dl_wire_message *message,
                           size_t *taken, struct dl_err *err)
{
    struct dl_wire_header header;
    if (size < DL_WIRE_HEADER_BYTES) {
        return dl_err_set(err, DL_EPROTO, "a peer's entries of the tape are cut off");
    }
    enum dl_rc rc = dl_wire_header_decode(bytes, &header, err);
    if (rc == DL_OK && (header.type != DL_WIRE_TRACE || header.payload_bytes > size - DL_WIRE_HEADER_BYTES)) {
        rc = dl_err_set(err, DL_EPROTO, "a peer's entries of the tape are cut off, or none");
    }
    const uint8_t *payload = bytes + DL_WIRE_HEADER_BYTES;
    rc = rc == DL_OK ? dl_wire_verify(bytes, payload, header.payload_bytes, err) : rc;
    rc = rc == DL_OK ? dl_wire_decode(DL_WIRE_TRACE, payload, header.payload_bytes, message, err) : rc;
    const struct dl_wire_trace *trace = &message->as.trace;
    if (rc == DL_OK && !wk_link_trace_adopt(link, trace->uid, trace->nonce, trace->entries, trace->count)) {
        rc = dl_err_set(err, DL_EFULL, "entries of the tape of too many peers");
    }
    *taken = DL_WIRE_HEADER_BYTES + (size_t)header.payload_bytes;
    return rc;
}

enum dl_rc wk_trace_unpack(struct wk_link *link, const uint8_t *bytes, size_t size, struct dl_err *err)
{
    DL_AUTO_FREE struct dl_wire_message *message = calloc(1, sizeof *message);
    enum dl_rc rc = message == NULL ? dl_err_set(err, DL_ENOMEM, "unpack entries of the tape: no memory") : DL_OK;
    for (size_t at = 0, taken = 0; rc == DL_OK && at < size; at += taken) {
        rc = take_one(link, bytes + at, size - at, message, &taken, err);
    }
    return rc;
}
