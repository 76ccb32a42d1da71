#include "common/content.h"

#include <assert.h>

#include "common/le.h"
#include "common/mem.h"

/* --- a part's leaves --- */

void dl_leaves_begin(struct dl_leaves *leaves)
{
    leaves->bytes = 0;
}

static void keep(struct dl_leaves *leaves, uint32_t index, uint64_t hash)
{
    dl_le_put(leaves->hashes + (size_t)8 * index, hash, 8);
}

void dl_leaves_add(struct dl_leaves *leaves, const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
    assert(size <= DL_LEAVES_BYTES_MAX - leaves->bytes);
    while (size > 0) {
        uint32_t index = leaves->bytes / DL_LEAF_BYTES, within = leaves->bytes % DL_LEAF_BYTES;
        size_t piece = DL_MIN(size, (size_t)(DL_LEAF_BYTES - within));
        if (piece == DL_LEAF_BYTES) {
            keep(leaves, index, dl_hash64(at, piece, 0));
        } else {
            if (within == 0) {
                dl_hash_stream_init(&leaves->open, 0);
            }
            dl_hash_stream_add(&leaves->open, at, piece);
            if (within + piece == DL_LEAF_BYTES) {
                keep(leaves, index, dl_hash_stream_result(&leaves->open));
            }
        }
        leaves->bytes += (uint32_t)piece;
        at += piece;
        size -= piece;
    }
}

/* Bytes of `hashes`, that of a last, short leaf included. */
static size_t close_last(struct dl_leaves *leaves)
{
    uint32_t count = leaves->bytes / DL_LEAF_BYTES;
    if (leaves->bytes % DL_LEAF_BYTES != 0) {
        keep(leaves, count++, dl_hash_stream_result(&leaves->open));
    }
    return (size_t)8 * count;
}

uint64_t dl_leaves_hash(struct dl_leaves *leaves, uint64_t seed)
{
    return dl_hash64(leaves->hashes, close_last(leaves), seed);
}

/* --- the whole --- */

void dl_content_begin(struct dl_content *content)
{
    dl_hash_stream_init(&content->folded, 0);
    dl_leaves_begin(&content->last);
    content->bytes = 0;
}

static void fold(struct dl_hash_stream *folded, struct dl_leaves *leaves)
{
    dl_hash_stream_add(folded, leaves->hashes, close_last(leaves));
}

void dl_content_add(struct dl_content *content, const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
    while (size > 0) {
        size_t piece = DL_MIN(size, (size_t)(DL_LEAVES_BYTES_MAX - content->last.bytes));
        dl_leaves_add(&content->last, at, piece);
        content->bytes += piece;
        if (content->last.bytes == DL_LEAVES_BYTES_MAX) {
            fold(&content->folded, &content->last);
            dl_leaves_begin(&content->last);
        }
        at += piece;
        size -= piece;
    }
}

void dl_content_add_leaves(struct dl_content *content, struct dl_leaves *leaves)
{
    assert(content->last.bytes == 0 && content->bytes % DL_LEAF_BYTES == 0);
    fold(&content->folded, leaves);
    content->bytes += leaves->bytes;
}

uint64_t dl_content_result(const struct dl_content *content)
{
    struct dl_content end = *content;
    uint8_t bytes[8];
    fold(&end.folded, &end.last);
    dl_le_put(bytes, end.bytes, sizeof bytes);
    dl_hash_stream_add(&end.folded, bytes, sizeof bytes);
    return dl_hash_stream_result(&end.folded);
}

uint64_t dl_content_hash(const void *bytes, size_t size)
{
    struct dl_content content;
    dl_content_begin(&content);
    dl_content_add(&content, bytes, size);
    return dl_content_result(&content);
}
