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

struct filling {
    struct sy_blob *blob;
    const float *values;
    uint32_t hashed; /* Chunks. */
    struct dl_hash_stream content;
};

static void fill_chunks(void *context, uint64_t begin, uint64_t end)
{
    const struct filling *filling = context;
    struct sy_blob *blob = filling->blob;
    size_t block_bytes = dl_codec_block_bytes(blob->codec);
    for (uint32_t i = (uint32_t)begin; i < end; i++) {
        size_t size;
        uint8_t *frame = sy_blob_frame(blob, i, &size);
        uint8_t *data = frame + HEAD_BYTES;
        uint64_t offset = (uint64_t)i * blob->chunk_bytes;
        size -= HEAD_BYTES;
        dl_codec_encode(blob->codec, filling->values + offset / block_bytes * DL_BLOCK, size / block_bytes, data);
        dl_wire_chunk_head(blob->transfer, offset, data, (uint32_t)size, frame);
    }
}

/* In order, and soon, so that what is hashed is still in a cache. */
static void hash_chunks(void *context, uint64_t end)
{
    struct filling *filling = context;
    for (; filling->hashed < end; filling->hashed++) {
        size_t size;
        const uint8_t *frame = sy_blob_frame(filling->blob, filling->hashed, &size);
        dl_hash_stream_add(&filling->content, frame + HEAD_BYTES, size - HEAD_BYTES);
    }
}

enum dl_rc sy_blob_new(const struct sy_blob_options *options, const float *values, uint64_t padded_elements,
                       struct sy_pool *pool, struct sy_buffers *buffers, struct sy_blob **out, struct dl_err *err)
{
    struct sy_blob *blob = calloc(1, sizeof *blob);
    if (blob == NULL) {
        return dl_err_set(err, DL_ENOMEM, "encoding fragment %u: no memory", options->fragment);
    }
    *blob = (struct sy_blob){.references = 1,
                             .fragment = options->fragment,
                             .version = options->version,
                             .round = options->round,
                             .participants = options->participants,
                             .codec = options->codec,
                             .transfer = options->version * DL_SPEC_FRAGMENTS_MAX + options->fragment,
                             .bytes = dl_codec_bytes(options->codec, padded_elements),
                             .buffers = buffers};
    blob->chunk_bytes = (uint32_t)DL_MIN(blob->bytes, dl_wire_chunk_data_bytes(options->codec));
    blob->chunk_count = (uint32_t)((blob->bytes + blob->chunk_bytes - 1) / blob->chunk_bytes);
    blob->stride = (LWS_PRE + HEAD_BYTES + (size_t)blob->chunk_bytes + 63) & ~(size_t)63;
    blob->frames = sy_buffers_take(buffers, blob->stride * blob->chunk_count);
    if (blob->frames == NULL) {
        free(blob);
        return dl_err_set(err, DL_ENOMEM, "encoding fragment %u: no memory", options->fragment);
    }
    struct filling filling = {.blob = blob, .values = values};
    dl_hash_stream_init(&filling.content, 0);
    sy_pool_run_told(pool, fill_chunks, hash_chunks, &filling, blob->chunk_count);
    blob->content_hash = dl_hash_stream_result(&filling.content);
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
        sy_buffers_give(blob->buffers, blob->frames);
        free(blob);
    }
}
