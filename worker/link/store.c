#include "worker/link/store.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/copy.h"
#include "common/hash.h"
#include "common/mem.h"

/* Handled at once where values are decoded for a second use: 8 KiB of float32 stay in the first-level cache in between. */
#define PIECE_BLOCKS 8
#define PIECE_ELEMENTS ((size_t)PIECE_BLOCKS * DL_BLOCK)
#define WHOLE_SLICES SIZE_MAX /* Instead, where everything is touched once. */

struct base {
    struct wk_memory memory; /* Of a padded array. */
    enum dl_codec codec;
};

struct wk_store {
    uint32_t tensor_count;
    float **tensors;
    const struct dl_layout *layout;
    struct base bases[DL_SPEC_FRAGMENTS_MAX];
    /* There from the start: the network thread may place an update before the base copy is made. */
    struct wk_memory slots[DL_SPEC_FRAGMENTS_MAX * WK_SLOTS];
    struct dl_content *contents[DL_SPEC_FRAGMENTS_MAX * WK_SLOTS];
    struct wk_memory pushes[DL_SPEC_FRAGMENTS_MAX];
    bool seeds[DL_SPEC_FRAGMENTS_MAX]; /* What lies in the push buffer is the base copy's values. */
};

struct wk_store *wk_store_new(float *const *tensors, uint32_t tensor_count)
{
    struct wk_store *store = calloc(1, sizeof *store);
    if (store == NULL) {
        return NULL;
    }
    store->tensors = malloc(tensor_count * sizeof *store->tensors);
    if (store->tensors == NULL) {
        free(store);
        return NULL;
    }
    memcpy(store->tensors, tensors, tensor_count * sizeof *store->tensors);
    store->tensor_count = tensor_count;
    return store;
}

void wk_store_free(struct wk_store *store)
{
    if (store == NULL) {
        return;
    }
    for (uint32_t p = 0; p < DL_SPEC_FRAGMENTS_MAX; p++) {
        free(store->bases[p].memory.bytes);
        free(store->pushes[p].bytes);
        for (uint32_t i = 0; i < WK_SLOTS; i++) {
            free(store->slots[p * WK_SLOTS + i].bytes);
            free(store->contents[p * WK_SLOTS + i]);
        }
    }
    free(store->tensors);
    free(store);
}

uint8_t *wk_memory_grow(struct wk_memory *memory, uint64_t bytes)
{
    if (memory->size < bytes) {
        free(memory->bytes);
        memory->bytes = dl_alloc_large(bytes); /* Written before it is read: no need for zeros. */
        memory->size = memory->bytes == NULL ? 0 : bytes;
    }
    return memory->bytes;
}

enum dl_rc wk_store_prepare(struct wk_store *store, const struct dl_layout *layout, struct dl_err *err)
{
    assert(store->layout == NULL);
    store->layout = layout;
    for (uint32_t p = 0; p < layout->fragment_count; p++) {
        uint64_t bytes = layout->fragments[p].padded_elements * sizeof(float);
        float *values = (float *)(void *)wk_memory_grow(&store->bases[p].memory, bytes);
        if (values == NULL) {
            return dl_err_set(err, DL_ENOMEM, "join: no memory for a second copy of the %llu parameters",
                              (unsigned long long)layout->elements);
        }
        store->bases[p].codec = DL_CODEC_NONE;
        memset(values, 0, bytes); /* The gaps between tensors. */
        dl_layout_gather(layout, p, store->tensors, values);
    }
    return DL_OK;
}

uint8_t *wk_store_slot(struct wk_store *store, uint32_t fragment, uint32_t slot, uint64_t bytes)
{
    struct dl_content **content = &store->contents[fragment * WK_SLOTS + slot];
    if (*content == NULL) {
        *content = dl_alloc_aligned(sizeof **content);
    }
    return *content == NULL ? NULL : wk_memory_grow(&store->slots[fragment * WK_SLOTS + slot], bytes);
}

struct dl_content *wk_store_content(struct wk_store *store, uint32_t fragment, uint32_t slot)
{
    return store->contents[fragment * WK_SLOTS + slot];
}

static struct dl_encoded base_of(const struct wk_store *store, uint32_t fragment)
{
    const struct base *base = &store->bases[fragment];
    return (struct dl_encoded){.codec = base->codec, .bytes = base->memory.bytes};
}

/* A seed is asked for after an update only by a syncer that lost what it had sent: then its values have no memory yet, but that
 * of pushes is free. */
const uint8_t *wk_store_push(struct wk_store *store, uint32_t fragment, bool seed)
{
    struct wk_memory *push = &store->pushes[fragment];
    const struct dl_encoded base = base_of(store, fragment);
    if (seed && base.codec == DL_CODEC_NONE) {
        return base.bytes;
    }
    if (seed && !store->seeds[fragment]) {
        uint64_t elements = store->layout->fragments[fragment].padded_elements;
        if (wk_memory_grow(push, elements * sizeof(float)) == NULL) {
            return NULL;
        }
        dl_codec_decode_past(base, elements, (float *)(void *)push->bytes);
        store->seeds[fragment] = true;
    }
    return push->bytes;
}

/* --- a fragment, piece by piece ---------------------------------------------------------------------------------- */

/* A piece is whole blocks of one slice, of so many elements at most. Its last block may reach past the slice's end into the
 * gap: `count` elements are the tensor's, the rest up to whole blocks are zeros. */
struct piece {
    float *theta;  /* The caller's tensor. */
    size_t offset; /* Elements from the fragment's start. */
    size_t count, blocks;
};

typedef void piece_function(void *context, const struct piece *piece);

static void for_each_piece(const struct wk_store *store, uint32_t p, size_t elements_max, piece_function *function,
                           void *context)
{
    const struct dl_layout *layout = store->layout;
    const struct dl_fragment *fragment = &layout->fragments[p];
    for (uint32_t s = 0; s < fragment->slice_count; s++) {
        const struct dl_slice *slice = &layout->slices[fragment->first_slice + s];
        float *theta = store->tensors[slice->tensor] + slice->tensor_offset;
        size_t count = 0;
        for (uint64_t done = 0; done < slice->count; done += count) {
            count = (size_t)DL_MIN(slice->count - done, (uint64_t)elements_max);
            struct piece piece = {
                .theta = theta + done,
                .offset = (size_t)(slice->fragment_offset + done),
                .count = count,
                .blocks = (count + DL_BLOCK - 1) / DL_BLOCK,
            };
            function(context, &piece);
        }
    }
}

/* What an array holds from `offset` on. */
static struct dl_encoded at_block(struct dl_encoded array, size_t offset)
{
    array.bytes += offset / DL_BLOCK * dl_codec_block_bytes(array.codec);
    return array;
}

struct apply {
    struct dl_encoded update, base, push;
    bool rebase;
    float alpha;
};

static void decode_piece(struct dl_encoded array, const struct piece *piece, float *values)
{
    struct dl_encoded at = at_block(array, piece->offset);
    dl_codec_decode(at.codec, at.bytes, piece->blocks, values);
}

/* parameters <- new; with rebase + (now - (base - push)), what was trained since the snapshot; then mixed with alpha.
 */
static void mix_piece(void *context, const struct piece *piece)
{
    const struct apply *apply = context;
    float fresh[PIECE_ELEMENTS], base[PIECE_ELEMENTS], pushed[PIECE_ELEMENTS];
    decode_piece(apply->update, piece, fresh);
    if (apply->rebase) {
        decode_piece(apply->base, piece, base);
        decode_piece(apply->push, piece, pushed);
    }
    for (size_t i = 0; i < piece->count; i++) {
        float now = piece->theta[i], next = fresh[i];
        if (apply->rebase) {
            next += now - (base[i] - pushed[i]);
        }
        piece->theta[i] = apply->alpha * now + (1.0f - apply->alpha) * next;
    }
}

static void take_piece(void *context, const struct piece *piece)
{
    const struct apply *apply = context;
    dl_codec_decode_past(at_block(apply->update, piece->offset), piece->count, piece->theta);
}

/* What was the base copy's is kept for the next update if it has that size; the first one's is larger. */
static void exchange_base(struct wk_store *store, uint32_t fragment, enum dl_codec codec, struct wk_memory *update)
{
    struct base *base = &store->bases[fragment];
    struct wk_memory old = base->memory;
    *base = (struct base){.memory = *update, .codec = codec};
    *update = old;
    store->seeds[fragment] = false;
}

void wk_store_apply(struct wk_store *store, const struct wk_step *step)
{
    uint32_t p = step->fragment;
    struct wk_memory *slot = &store->slots[p * WK_SLOTS + step->slot];
    struct apply apply = {
        .update = {.codec = step->codec, .bytes = slot->bytes},
        .base = base_of(store, p),
        .push = {.codec = step->push_codec, .bytes = store->pushes[p].bytes},
        .rebase = step->rebase,
        .alpha = step->alpha,
    };
    if (step->rebase || step->alpha > 0) {
        for_each_piece(store, p, PIECE_ELEMENTS, mix_piece, &apply);
    } else {
        for_each_piece(store, p, WHOLE_SLICES, take_piece, &apply);
    }
    exchange_base(store, p, step->codec, slot);
    if (slot->size > dl_codec_bytes(step->codec, store->layout->fragments[p].padded_elements)) {
        free(slot->bytes); /* The float32 values from before the first update. */
        *slot = (struct wk_memory){.bytes = NULL};
    }
}

void wk_store_adopt(struct wk_store *store, uint32_t fragment, enum dl_codec codec, struct wk_memory *update)
{
    struct apply apply = {.update = {.codec = codec, .bytes = update->bytes}};
    for_each_piece(store, fragment, WHOLE_SLICES, take_piece, &apply);
    exchange_base(store, fragment, codec, update);
}

/* --- the base copy, encoded ---------------------------------------------------------------------------------------- */

void wk_store_encode_base(const struct wk_store *store, uint32_t fragment, enum dl_codec codec, uint8_t *out)
{
    uint64_t elements = store->layout->fragments[fragment].padded_elements;
    const struct dl_encoded base = base_of(store, fragment);
    if (base.codec == codec) {
        dl_copy_past(out, base.bytes, dl_codec_bytes(codec, elements));
        return;
    }
    for (uint64_t at = 0; at < elements; at += DL_BLOCK) {
        _Alignas(64) float values[DL_BLOCK];
        struct dl_encoded block = at_block(base, at);
        dl_codec_decode(block.codec, block.bytes, 1, values);
        dl_codec_encode(codec, values, 1, out + dl_codec_bytes(codec, at));
    }
}

struct snapshot {
    struct dl_encoded base;
    enum dl_codec codec;
    uint8_t *out;
};

static void snapshot_piece(void *context, const struct piece *piece)
{
    const struct snapshot *snapshot = context;
    size_t block_bytes = dl_codec_block_bytes(snapshot->codec), whole = piece->count / DL_BLOCK;
    struct dl_encoded base = at_block(snapshot->base, piece->offset);
    uint8_t *out = snapshot->out + piece->offset / DL_BLOCK * block_bytes;
    dl_codec_encode_delta(snapshot->codec, base, piece->theta, whole, out);
    if (whole < piece->blocks) {
        /* The tensor ends inside this block: what follows it there is not ours to read. */
        float last[DL_BLOCK] = {0};
        memcpy(last, piece->theta + whole * DL_BLOCK, (piece->count - whole * DL_BLOCK) * sizeof(float));
        dl_codec_encode_delta(snapshot->codec, at_block(base, whole * DL_BLOCK), last, 1, out + whole * block_bytes);
    }
}

enum dl_rc wk_store_snapshot(struct wk_store *store, const struct wk_step *step, struct dl_err *err)
{
    uint64_t bytes = dl_codec_bytes(step->codec, store->layout->fragments[step->fragment].padded_elements);
    struct snapshot snapshot = {
        .base = base_of(store, step->fragment),
        .codec = step->codec,
        .out = wk_memory_grow(&store->pushes[step->fragment], bytes),
    };
    if (snapshot.out == NULL) {
        return dl_err_set(err, DL_ENOMEM, "push fragment %u: no memory for %llu bytes", step->fragment,
                          (unsigned long long)bytes);
    }
    store->seeds[step->fragment] = false;
    for_each_piece(store, step->fragment, WHOLE_SLICES, snapshot_piece, &snapshot);
    return DL_OK;
}

/* Of the values, in whatever codec they lie there. */
static uint64_t hash_of(struct dl_encoded base, uint64_t elements, uint64_t seed)
{
    struct dl_hash_stream stream;
    dl_hash_stream_init(&stream, seed);
    for (uint64_t at = 0; at < elements; at += DL_BLOCK) {
        _Alignas(64) float values[DL_BLOCK];
        struct dl_encoded block = at_block(base, at);
        dl_codec_decode(block.codec, block.bytes, 1, values);
        dl_hash_stream_add(&stream, values, sizeof values);
    }
    return dl_hash_stream_result(&stream);
}

uint64_t wk_store_hash(const struct wk_store *store)
{
    uint64_t hash = 0;
    for (uint32_t p = 0; p < store->layout->fragment_count; p++) {
        hash ^= hash_of(base_of(store, p), store->layout->fragments[p].padded_elements, p);
    }
    return hash;
}
