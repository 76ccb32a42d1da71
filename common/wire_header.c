/* What is around a message's payload: header, checksum; and the chunks of a transfer, whose data is not copied. */
#include <assert.h>
#include <string.h>

#include "common/content.h"
#include "common/hash.h"
#include "common/layout.h"
#include "common/le.h"
#include "common/mem.h"
#include "common/wire_internal.h"

void dl_wire_header_encode(unsigned type, uint32_t payload_bytes, uint8_t out[DL_WIRE_HEADER_BYTES])
{
    memset(out, 0, DL_WIRE_HEADER_BYTES);
    memcpy(out, "DLC1", 4);
    out[4] = DL_WIRE_VERSION;
    out[5] = (uint8_t)type;
    dl_le_put(out + 8, payload_bytes, 4);
}

uint64_t dl_wire_header_seed(const uint8_t header[DL_WIRE_HEADER_BYTES])
{
    return dl_hash64(header, 16, 0);
}

enum dl_rc dl_wire_header_decode(const uint8_t bytes[DL_WIRE_HEADER_BYTES], struct dl_wire_header *out,
                                 struct dl_err *err)
{
    if (memcmp(bytes, "DLC1", 4) != 0) {
        return dl_err_set(err, DL_EPROTO, "message header: this is not %s (wrong magic)", DL_WIRE_SUBPROTOCOL);
    }
    if (bytes[4] != DL_WIRE_VERSION && bytes[5] != DL_WIRE_REFUSE) {
        return dl_err_set(err, DL_EPROTO, "message header: protocol version %u, this program speaks %u", bytes[4],
                          DL_WIRE_VERSION);
    }
    const struct dl_wire_format *format = dl_wire_format_of(bytes[5]);
    if (format == NULL) {
        return dl_err_set(err, DL_EPROTO, "message header: unknown type %u", bytes[5]);
    }
    if (dl_le_get(bytes + 6, 2) != 0 || dl_le_get(bytes + 12, 4) != 0) {
        return dl_err_set(err, DL_EPROTO, "message %s: reserved header bytes are not zero", format->name);
    }
    uint32_t payload_bytes = (uint32_t)dl_le_get(bytes + 8, 4);
    if (payload_bytes > format->payload_max) {
        return dl_err_set(err, DL_EPROTO, "message %s: %u bytes announced, at most %u are taken", format->name,
                          payload_bytes, format->payload_max);
    }
    if (bytes[5] == DL_WIRE_CHUNK && payload_bytes <= DL_WIRE_CHUNK_PREFIX_BYTES) {
        return dl_err_set(err, DL_EPROTO, "message chunk: %u bytes announced, too few to hold data", payload_bytes);
    }
    out->type = (enum dl_wire_type)bytes[5];
    out->payload_bytes = payload_bytes;
    out->checksum = dl_le_get(bytes + 16, 8);
    return DL_OK;
}

/* A chunk's data is hashed with its prefix's hash as seed, so that the two may lie apart. */
static uint64_t chunk_seed(const uint8_t header[DL_WIRE_HEADER_BYTES], const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES])
{
    return dl_hash64(prefix, DL_WIRE_CHUNK_PREFIX_BYTES, dl_wire_header_seed(header));
}

static enum dl_rc checksum_result(const uint8_t *header, uint64_t computed, struct dl_err *err)
{
    if (computed == dl_le_get(header + 16, 8)) {
        return DL_OK;
    }
    return dl_err_set(err, DL_ECORRUPT, "message %s: its checksum does not match, bytes were changed on the way",
                      dl_wire_type_name((enum dl_wire_type)header[5]));
}

enum dl_rc dl_wire_verify(const uint8_t header_bytes[DL_WIRE_HEADER_BYTES], const uint8_t *payload,
                          size_t payload_bytes, struct dl_err *err)
{
    if (payload_bytes != dl_le_get(header_bytes + 8, 4)) {
        return dl_err_set(err, DL_ECORRUPT, "message %s: %zu bytes came, %u were announced",
                          dl_wire_type_name((enum dl_wire_type)header_bytes[5]), payload_bytes,
                          (unsigned)dl_le_get(header_bytes + 8, 4));
    }
    if (header_bytes[5] == DL_WIRE_CHUNK && payload_bytes > DL_WIRE_CHUNK_PREFIX_BYTES) {
        return dl_wire_chunk_verify(header_bytes, payload, payload + DL_WIRE_CHUNK_PREFIX_BYTES,
                                    (uint32_t)payload_bytes - DL_WIRE_CHUNK_PREFIX_BYTES, err);
    }
    return checksum_result(header_bytes, dl_hash64(payload, payload_bytes, dl_wire_header_seed(header_bytes)), err);
}

/* --- chunks --- */

static_assert(DL_WIRE_CHUNK_DATA_MAX == DL_LEAVES_BYTES_MAX, "a chunk holds whole leaves, and its leaves have room");

void dl_wire_chunk_begin(uint64_t transfer, uint64_t offset, uint32_t data_bytes, uint8_t *out)
{
    assert(data_bytes >= 1 && data_bytes <= DL_WIRE_CHUNK_DATA_MAX);
    dl_wire_header_encode(DL_WIRE_CHUNK, DL_WIRE_CHUNK_PREFIX_BYTES + data_bytes, out);
    dl_le_put(out + DL_WIRE_HEADER_BYTES, transfer, 8);
    dl_le_put(out + DL_WIRE_HEADER_BYTES + 8, offset, 8);
}

void dl_wire_chunk_end(struct dl_leaves *leaves, uint8_t *out)
{
    assert(leaves->bytes + DL_WIRE_CHUNK_PREFIX_BYTES == dl_le_get(out + 8, 4));
    dl_le_put(out + 16, dl_leaves_hash(leaves, chunk_seed(out, out + DL_WIRE_HEADER_BYTES)), 8);
}

void dl_wire_chunk_head(uint64_t transfer, uint64_t offset, const uint8_t *data, uint32_t data_bytes, uint8_t *out)
{
    struct dl_leaves leaves;
    dl_wire_chunk_begin(transfer, offset, data_bytes, out);
    dl_leaves_begin(&leaves);
    dl_leaves_add(&leaves, data, data_bytes);
    dl_wire_chunk_end(&leaves, out);
}

enum dl_rc dl_wire_chunk_verify(const uint8_t header_bytes[DL_WIRE_HEADER_BYTES],
                                const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES], const uint8_t *data,
                                uint32_t data_bytes, struct dl_err *err)
{
    struct dl_leaves leaves;
    dl_leaves_begin(&leaves);
    dl_leaves_add(&leaves, data, DL_MIN(data_bytes, DL_WIRE_CHUNK_DATA_MAX));
    return dl_wire_chunk_check(header_bytes, prefix, &leaves, err);
}

enum dl_rc dl_wire_chunk_check(const uint8_t header_bytes[DL_WIRE_HEADER_BYTES],
                               const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES], struct dl_leaves *leaves,
                               struct dl_err *err)
{
    if (header_bytes[5] != DL_WIRE_CHUNK ||
        dl_le_get(header_bytes + 8, 4) != (uint64_t)leaves->bytes + DL_WIRE_CHUNK_PREFIX_BYTES) {
        return dl_err_set(err, DL_ECORRUPT, "message chunk: %u data bytes do not fit its header", leaves->bytes);
    }
    return checksum_result(header_bytes, dl_leaves_hash(leaves, chunk_seed(header_bytes, prefix)), err);
}

void dl_wire_chunk_prefix(const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES], uint64_t *transfer, uint64_t *offset)
{
    *transfer = dl_le_get(prefix, 8);
    *offset = dl_le_get(prefix + 8, 8);
}

uint32_t dl_wire_chunk_data_bytes(enum dl_codec codec)
{
    static const uint32_t block_bytes[] = {
        [DL_CODEC_NONE] = DL_BLOCK * 4,
        [DL_CODEC_BF16] = DL_BLOCK * 2,
        [DL_CODEC_INT8] = 4 + DL_BLOCK,
        [DL_CODEC_INT4] = 4 + DL_BLOCK / 2,
    };
    assert((unsigned)codec < DL_COUNT_OF(block_bytes));
    return DL_WIRE_CHUNK_DATA_MAX / block_bytes[codec] * block_bytes[codec];
}
