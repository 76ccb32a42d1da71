#include "syncer/server/blob.h"

#include <libwebsockets.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/hash.h"
#include "common/mem.h"
#include "common/wire.h"

#define HEAD_BYTES (DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES)

static uint32_t data_of(const struct sy_blob *blob, uint32_t index)
{
    uint64_t offset = (uint64_t)index * blob->chunk_bytes;
    return (uint32_t)DL_MIN(blob->bytes - offset, blob->chunk_bytes);
}

uint8_t *sy_blob_frame(const struct sy_blob *blob, uint32_t index, size_t *size)
{
    *size = HEAD_BYTES + data_of(blob, index);
    return blob->frames + (size_t)index * blob->stride + LWS_PRE;
}

enum dl_rc sy_blob_new(uint32_t fragment, uint64_t version, uint64_t round, uint32_t participants, enum dl_codec codec,
                       const float *values, uint64_t padded_elements, uint8_t *scratch, struct sy_blob **out,
                       struct dl_err *err)
{
    struct sy_blob *blob = calloc(1, sizeof *blob);
    if (blob == NULL) {
        return dl_err_set(err, DL_ENOMEM, "encoding fragment %u: no memory", fragment);
    }
    const uint8_t *encoded = (const uint8_t *)values; /* Float32, little-endian, is what codec none carries. */
    if (codec != DL_CODEC_NONE) {
        dl_codec_encode(codec, values, padded_elements / DL_BLOCK, scratch);
        encoded = scratch;
    }
    *blob = (struct sy_blob){.references = 1,
                             .fragment = fragment,
                             .version = version,
                             .round = round,
                             .participants = participants,
                             .codec = codec,
                             .transfer = version * DL_SPEC_FRAGMENTS_MAX + fragment,
                             .bytes = dl_codec_bytes(codec, padded_elements)};
    blob->content_hash = dl_hash64(encoded, blob->bytes, 0);
    blob->chunk_bytes = (uint32_t)DL_MIN(blob->bytes, dl_wire_chunk_data_bytes(codec));
    blob->chunk_count = (uint32_t)((blob->bytes + blob->chunk_bytes - 1) / blob->chunk_bytes);
    blob->stride = (LWS_PRE + HEAD_BYTES + (size_t)blob->chunk_bytes + 63) & ~(size_t)63;
    blob->frames = malloc(blob->stride * blob->chunk_count);
    if (blob->frames == NULL) {
        free(blob);
        return dl_err_set(err, DL_ENOMEM, "encoding fragment %u: no memory", fragment);
    }
    for (uint32_t i = 0; i < blob->chunk_count; i++) {
        size_t size;
        uint8_t *frame = sy_blob_frame(blob, i, &size);
        uint64_t offset = (uint64_t)i * blob->chunk_bytes;
        memcpy(frame + HEAD_BYTES, encoded + offset, size - HEAD_BYTES);
        dl_wire_chunk_head(blob->transfer, offset, frame + HEAD_BYTES, (uint32_t)(size - HEAD_BYTES), frame);
    }
    *out = blob;
    return DL_OK;
}

struct sy_blob *sy_blob_hold(struct sy_blob *blob)
{
    blob->references++;
    return blob;
}

void sy_blob_drop(struct sy_blob *blob)
{
    if (blob != NULL && --blob->references == 0) {
        free(blob->frames);
        free(blob);
    }
}
