#include "worker/link/store.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/copy.h"
#include "common/hash.h"
#include "common/mem.h"

/* Handled at once where something is written twice: 16 KiB of float32 stay in the first-level cache in between. */
#define PIECE_BLOCKS 16
#define PIECE_ELEMENTS ((size_t)PIECE_BLOCKS * DL_BLOCK)
#define WHOLE_SLICES SIZE_MAX /* Instead, where everything is touched once. */

struct memory {
    uint8_t *bytes;
    uint64_t size;
};

struct wk_store {
    uint32_t tensor_count;
    float **tensors;
    const struct dl_layout *layout;
    float *base[DL_SPEC_FRAGMENTS_MAX]; /* Padded arrays. */
    /* There from the start: the network thread may place an update before the base copy is made. */
    struct memory slots[DL_SPEC_FRAGMENTS_MAX * WK_SLOTS];
    struct dl_content *contents[DL_SPEC_FRAGMENTS_MAX * WK_SLOTS];
    struct memory pushes[DL_SPEC_FRAGMENTS_MAX];
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
        free(store->base[p]);
        free(store->pushes[p].bytes);
        for (uint32_t i = 0; i < WK_SLOTS; i++) {
            free(store->slots[p * WK_SLOTS + i].bytes);
            free(store->contents[p * WK_SLOTS + i]);
        }
    }
    free(store->tensors);
    free(store);
}

enum dl_rc wk_store_prepare(struct wk_store *store, const struct dl_layout *layout, struct dl_err *err)
{
    assert(store->layout == NULL);
    store->layout = layout;
    bool enough = true;
    for (uint32_t p = 0; p < layout->fragment_count && enough; p++) {
        uint64_t bytes = layout->fragments[p].padded_elements * sizeof(float);
        store->base[p] = dl_alloc_large(bytes);
        enough = store->base[p] != NULL;
        if (enough) {
            memset(store->base[p], 0, bytes); /* The gaps between tensors. */
            dl_layout_gather(layout, p, store->tensors, store->base[p]);
        }
    }
    if (!enough) {
        return dl_err_set(err, DL_ENOMEM, "join: no memory for a second copy of the %llu parameters",
                          (unsigned long long)layout->elements);
    }
    return DL_OK;
}

static uint8_t *grow(struct memory *memory, uint64_t bytes)
{
    if (memory->size < bytes) {
        free(memory->bytes);
        memory->bytes = dl_alloc_large(bytes); /* Written before it is read: no need for zeros. */
        memory->size = memory->bytes == NULL ? 0 : bytes;
    }
    return memory->bytes;
}

uint8_t *wk_store_slot(struct wk_store *store, uint32_t fragment, uint32_t slot, uint64_t bytes)
{
    struct dl_content **content = &store->contents[fragment * WK_SLOTS + slot];
    if (*content == NULL) {
        *content = dl_alloc_aligned(sizeof **content);
    }
    return *content == NULL ? NULL : grow(&store->slots[fragment * WK_SLOTS + slot], bytes);
}

struct dl_content *wk_store_content(struct wk_store *store, uint32_t fragment, uint32_t slot)
{
    return store->contents[fragment * WK_SLOTS + slot];
}

const uint8_t *wk_store_push(const struct wk_store *store, uint32_t fragment, bool seed)
{
    return seed ? (const uint8_t *)store->base[fragment] : store->pushes[fragment].bytes;
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

static const uint8_t *at_block(const uint8_t *encoded, enum dl_codec codec, size_t offset)
{
    return encoded + offset / DL_BLOCK * dl_codec_block_bytes(codec);
}

struct apply {
    const struct wk_step *step;
    const uint8_t *update, *push;
    float *base;
};

/* parameters <- new; with rebase + (now - (base - push)), what was trained since the snapshot; then mixed with alpha.
 */
static void mix_piece(const struct apply *apply, const struct piece *piece, const float *fresh)
{
    const struct wk_step *step = apply->step;
    float pushed[PIECE_ELEMENTS];
    if (step->rebase) {
        dl_codec_decode(step->push_codec, at_block(apply->push, step->push_codec, piece->offset), piece->blocks,
                        pushed);
    }
    const float *base = apply->base + piece->offset;
    for (size_t i = 0; i < piece->count; i++) {
        float now = piece->theta[i], next = fresh[i];
        if (step->rebase) {
            next += now - (base[i] - pushed[i]);
        }
        piece->theta[i] = step->alpha * now + (1.0f - step->alpha) * next;
    }
}

/* Decoded once into the cache, written twice from there. */
static void apply_piece(void *context, const struct piece *piece)
{
    const struct apply *apply = context;
    const struct wk_step *step = apply->step;
    _Alignas(64) float decoded[PIECE_ELEMENTS];
    dl_codec_decode(step->codec, at_block(apply->update, step->codec, piece->offset), piece->blocks, decoded);
    if (step->rebase || step->alpha > 0) {
        mix_piece(apply, piece, decoded);
    } else {
        dl_copy_past(piece->theta, decoded, piece->count * sizeof(float));
    }
    dl_copy_past(apply->base + piece->offset, decoded, piece->blocks * DL_BLOCK * sizeof(float));
}

static void take_piece(void *context, const struct piece *piece)
{
    const float *const *base = context;
    dl_copy_past(piece->theta, *base + piece->offset, piece->count * sizeof(float));
}

/* An update in float32 is the new base copy as it lies there: it changes places with the old one, and only the tensors
 * are written. False: it is no such update. */
static bool exchange_base(struct wk_store *store, const struct wk_step *step, struct memory *slot)
{
    uint64_t bytes = store->layout->fragments[step->fragment].padded_elements * sizeof(float);
    if (step->codec != DL_CODEC_NONE || step->rebase || step->alpha > 0 || slot->size != bytes) {
        return false;
    }
    float **base = &store->base[step->fragment];
    uint8_t *old = (uint8_t *)*base;
    *base = (float *)(void *)slot->bytes; /* Both are aligned to 64 bytes. */
    slot->bytes = old;
    for_each_piece(store, step->fragment, WHOLE_SLICES, take_piece, base);
    return true;
}

void wk_store_apply(struct wk_store *store, const struct wk_step *step)
{
    struct memory *slot = &store->slots[step->fragment * WK_SLOTS + step->slot];
    if (exchange_base(store, step, slot)) {
        return;
    }
    struct apply apply = {
        .step = step,
        .update = slot->bytes,
        .push = store->pushes[step->fragment].bytes,
        .base = store->base[step->fragment],
    };
    for_each_piece(store, step->fragment, PIECE_ELEMENTS, apply_piece, &apply);
}

void wk_store_adopt(struct wk_store *store, uint32_t fragment, enum dl_codec codec, const uint8_t *update)
{
    const struct wk_step step = {.type = WK_STEP_APPLY, .fragment = fragment, .codec = codec};
    struct apply apply = {.step = &step, .update = update, .base = store->base[fragment]};
    for_each_piece(store, fragment, PIECE_ELEMENTS, apply_piece, &apply);
}

void wk_store_encode_base(const struct wk_store *store, uint32_t fragment, enum dl_codec codec, uint8_t *out)
{
    uint64_t elements = store->layout->fragments[fragment].padded_elements;
    if (codec == DL_CODEC_NONE) {
        dl_copy_past(out, store->base[fragment], elements * sizeof(float));
    } else {
        dl_codec_encode(codec, store->base[fragment], elements / DL_BLOCK, out);
    }
}

struct snapshot {
    enum dl_codec codec;
    const float *base;
    uint8_t *out;
};

static void snapshot_piece(void *context, const struct piece *piece)
{
    const struct snapshot *snapshot = context;
    const float *base = snapshot->base + piece->offset;
    uint8_t *out = snapshot->out + piece->offset / DL_BLOCK * dl_codec_block_bytes(snapshot->codec);
    size_t whole = piece->count / DL_BLOCK;
    dl_codec_encode_delta(snapshot->codec, base, piece->theta, whole, out);
    if (whole < piece->blocks) {
        /* The tensor ends inside this block: what follows it there is not ours to read. */
        float last[DL_BLOCK] = {0};
        memcpy(last, piece->theta + whole * DL_BLOCK, (piece->count - whole * DL_BLOCK) * sizeof(float));
        dl_codec_encode_delta(snapshot->codec, base + whole * DL_BLOCK, last, 1,
                              out + whole * dl_codec_block_bytes(snapshot->codec));
    }
}

enum dl_rc wk_store_snapshot(struct wk_store *store, const struct wk_step *step, struct dl_err *err)
{
    uint64_t bytes = dl_codec_bytes(step->codec, store->layout->fragments[step->fragment].padded_elements);
    struct snapshot snapshot = {
        .codec = step->codec,
        .base = store->base[step->fragment],
        .out = grow(&store->pushes[step->fragment], bytes),
    };
    if (snapshot.out == NULL) {
        return dl_err_set(err, DL_ENOMEM, "push fragment %u: no memory for %llu bytes", step->fragment,
                          (unsigned long long)bytes);
    }
    for_each_piece(store, step->fragment, WHOLE_SLICES, snapshot_piece, &snapshot);
    return DL_OK;
}

uint64_t wk_store_hash(const struct wk_store *store)
{
    uint64_t hash = 0;
    for (uint32_t p = 0; p < store->layout->fragment_count; p++) {
        hash ^= dl_hash64(store->base[p], store->layout->fragments[p].padded_elements * sizeof(float), p);
    }
    return hash;
}
