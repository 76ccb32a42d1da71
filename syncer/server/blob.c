#include "syncer/server/blob.h"

#include <assert.h>
#include <libwebsockets.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "common/wire.h"

#define HEAD_BYTES (DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES)
#define LINE_BYTES 64
#define PAGE_BYTES 4096 /* What a disk takes directly begins at a multiple of it. */

/* Of the broadcasts' codecs, none and bf16, a chunk is DL_WIRE_CHUNK_DATA_MAX: whole leaves. */
static_assert(DL_WIRE_CHUNK_DATA_MAX % DL_LEAF_BYTES == 0, "chunks are whole leaves");
static_assert(LWS_PRE + HEAD_BYTES <= LINE_BYTES, "a frame's head fits before its data");

static uint32_t data_of(const struct sy_blob *blob, uint32_t index)
{
    uint64_t offset = (uint64_t)index * blob->chunk_bytes;
    return (uint32_t)DL_MIN(blob->bytes - offset, blob->chunk_bytes);
}

static uint8_t *data_at(const struct sy_blob *blob, uint32_t index)
{
    return blob->data + (size_t)index * blob->stride;
}

uint8_t *sy_blob_frame(const struct sy_blob *blob, uint32_t index, size_t *size)
{
    *size = HEAD_BYTES + data_of(blob, index);
    return data_at(blob, index) - HEAD_BYTES;
}

enum dl_rc sy_blob_new(const struct sy_blob_options *options, uint64_t padded_elements, struct sy_buffers *buffers,
                       struct sy_blob **out, struct dl_err *err)
{
    assert(padded_elements > 0 && padded_elements % DL_BLOCK == 0);
    struct sy_blob *blob = dl_alloc_aligned(sizeof *blob);
    if (blob == NULL) {
        return dl_err_set(err, DL_ENOMEM, "a new version of fragment %u: no memory", options->fragment);
    }
    blob->fragment = options->fragment;
    blob->version = options->version;
    blob->round = options->round;
    blob->participants = options->participants;
    blob->codec = options->codec;
    blob->transfer = options->version * DL_SPEC_FRAGMENTS_MAX + options->fragment;
    blob->padded_elements = padded_elements;
    blob->bytes = dl_codec_bytes(options->codec, padded_elements);
    blob->chunk_bytes = (uint32_t)DL_MIN(blob->bytes, dl_wire_chunk_data_bytes(options->codec));
    blob->chunk_elements = blob->chunk_bytes / dl_codec_block_bytes(blob->codec) * DL_BLOCK;
    blob->chunk_count = (uint32_t)((blob->bytes + blob->chunk_bytes - 1) / blob->chunk_bytes);
    size_t unit = blob->codec == DL_CODEC_NONE && blob->chunk_count > 1 ? PAGE_BYTES : LINE_BYTES;
    blob->lead = unit;
    blob->stride = (blob->lead + (size_t)blob->chunk_bytes + unit - 1) / unit * unit;
    size_t last = (size_t)(blob->chunk_count - 1) * blob->stride + data_of(blob, blob->chunk_count - 1);
    blob->buffers = buffers;
    /* What is taken is aligned to lines. */
    blob->memory = sy_buffers_take(buffers, unit - LINE_BYTES + blob->lead + last);
    if (blob->memory == NULL) {
        free(blob);
        return dl_err_set(err, DL_ENOMEM, "a new version of fragment %u: no memory", options->fragment);
    }
    blob->data = (uint8_t *)(((uintptr_t)blob->memory + unit - 1) / unit * unit) + blob->lead;
    atomic_init(&blob->references, 1);
    dl_content_begin(&blob->content);
    *out = blob;
    return DL_OK;
}

float *sy_blob_values(const struct sy_blob *blob)
{
    return blob->codec == DL_CODEC_NONE ? (float *)(void *)blob->data : NULL;
}

uint64_t sy_blob_piece_elements(const struct sy_blob *blob)
{
    return blob->codec == DL_CODEC_NONE && blob->chunk_count > 1 ? blob->chunk_elements : 0;
}

uint64_t sy_blob_gap_elements(const struct sy_blob *blob)
{
    return sy_blob_piece_elements(blob) == 0 ? 0 : (blob->stride - blob->chunk_bytes) / sizeof(float);
}

void sy_blob_put(struct sy_blob *blob, uint64_t offset, const float *values, size_t blocks)
{
    while (blocks > 0) {
        uint64_t chunk = offset / blob->chunk_elements;
        uint64_t within = offset % blob->chunk_elements;
        size_t here = (size_t)DL_MIN(blocks, (blob->chunk_elements - within) / DL_BLOCK);
        dl_codec_encode(blob->codec, values, here,
                        data_at(blob, (uint32_t)chunk) + dl_codec_bytes(blob->codec, within));
        offset += here * DL_BLOCK;
        values += here * DL_BLOCK;
        blocks -= here;
    }
}

void sy_blob_seal(struct sy_blob *blob, uint64_t elements)
{
    struct dl_leaves leaves;
    bool all = elements == blob->padded_elements;
    uint32_t complete = all ? blob->chunk_count : (uint32_t)(elements / blob->chunk_elements);
    for (; blob->sealed_count < complete; blob->sealed_count++) {
        uint32_t size = data_of(blob, blob->sealed_count);
        uint8_t *data = data_at(blob, blob->sealed_count);
        dl_wire_chunk_begin(blob->transfer, (uint64_t)blob->sealed_count * blob->chunk_bytes, size, data - HEAD_BYTES);
        dl_leaves_begin(&leaves);
        dl_leaves_add(&leaves, data, size);
        dl_wire_chunk_end(&leaves, data - HEAD_BYTES);
        dl_content_add_leaves(&blob->content, &leaves);
    }
    if (all) {
        blob->content_hash = dl_content_result(&blob->content);
    }
}

/* --- all at once --- */

struct filling {
    struct sy_blob *blob;
    const float *values;
    uint64_t piece_elements, gap_elements;
};

static uint64_t end_of(const struct filling *filling, uint64_t part)
{
    return DL_MIN((part + 1) * filling->piece_elements, filling->blob->padded_elements);
}

static void fill_parts(void *context, uint64_t begin, uint64_t end)
{
    const struct filling *filling = context;
    for (uint64_t part = begin; part < end; part++) {
        uint64_t offset = part * filling->piece_elements;
        sy_blob_put(filling->blob, offset, filling->values + offset + part * filling->gap_elements,
                    (size_t)((end_of(filling, part) - offset) / DL_BLOCK));
    }
}

static void seal_parts(void *context, uint64_t end)
{
    const struct filling *filling = context;
    sy_blob_seal(filling->blob, end_of(filling, end - 1));
}

void sy_blob_fill(struct sy_blob *blob, const float *values, uint64_t piece_elements, uint64_t gap_elements,
                  struct sy_pool *pool)
{
    struct filling filling = {.blob = blob,
                              .values = values,
                              .piece_elements = piece_elements == 0 ? blob->chunk_elements : piece_elements,
                              .gap_elements = piece_elements == 0 ? 0 : gap_elements};
    uint64_t parts = (blob->padded_elements + filling.piece_elements - 1) / filling.piece_elements;
    sy_pool_run(pool, fill_parts, seal_parts, &filling, parts);
}

struct sy_blob *sy_blob_hold(struct sy_blob *blob)
{
    atomic_fetch_add_explicit(&blob->references, 1, memory_order_relaxed);
    return blob;
}

void sy_blob_drop(struct sy_blob *blob)
{
    /* Whoever drops it last has seen what the others did with it. */
    if (blob != NULL && atomic_fetch_sub_explicit(&blob->references, 1, memory_order_acq_rel) == 1) {
        sy_buffers_give(blob->buffers, blob->memory);
        free(blob);
    }
}
