#include "common/layout.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/le.h"
#include "common/mem.h"
#include "common/spec_table.h"

#define IMBALANCE_MAX 0.03 /* Of the largest fragment over the mean, before tensors are split further. */
#define SPLIT_MAX 32       /* Smallest piece for the sake of balance: 1/32 of the mean fragment. */

struct piece {
    const struct dl_tensor *tensors; /* The whole table: sorting needs names. */
    uint32_t tensor;
    uint32_t fragment;
    uint64_t offset, count;
};

struct cut { /* How the tensors are cut: what becomes the layout's slices. */
    struct piece *pieces;
    uint32_t count;
    uint64_t largest; /* Elements of the largest fragment. */
};

static void cut_release(struct cut *cut)
{
    free(cut->pieces);
}

/* Elements of what is never split: the last dimension; a vector may be split anywhere. */
static uint64_t row_length(const struct dl_tensor *tensor)
{
    return tensor->rank < 2 ? 1 : tensor->shape[tensor->rank - 1];
}

static enum dl_rc refuse_count(uint32_t wanted, enum dl_layout_kind kind, uint64_t largest, struct dl_err *err)
{
    return dl_err_set(err, DL_EINVAL, "%u fragments with layout %s: some would be empty; at most %llu", wanted,
                      dl_spec_enum_name("sync.layout", (int)kind),
                      (unsigned long long)DL_MIN(largest, DL_SPEC_FRAGMENTS_MAX));
}

/* --- balanced and tensor: greedy bin packing --- */

static int by_size_descending(const void *a, const void *b)
{
    const struct piece *left = a;
    const struct piece *right = b;
    if (left->count != right->count) {
        return left->count > right->count ? -1 : 1;
    }
    int names = left->tensor == right->tensor
                    ? 0
                    : strcmp(left->tensors[left->tensor].name, right->tensors[right->tensor].name);
    return names != 0 ? names : (left->offset > right->offset) - (left->offset < right->offset);
}

static int by_fragment(const void *a, const void *b)
{
    const struct piece *left = a;
    const struct piece *right = b;
    if (left->fragment != right->fragment) {
        return left->fragment < right->fragment ? -1 : 1;
    }
    if (left->tensor != right->tensor) {
        return left->tensor < right->tensor ? -1 : 1;
    }
    return (left->offset > right->offset) - (left->offset < right->offset);
}

/* Into how many pieces of at most `limit` elements a tensor is split; rows stay whole. */
static uint64_t pieces_of(const struct dl_tensor *tensor, uint64_t limit)
{
    uint64_t elements = dl_tensor_elements(tensor);
    uint64_t wanted = elements / limit + (elements % limit != 0);
    return DL_MIN(wanted, elements / row_length(tensor));
}

static uint64_t pieces_total(const struct dl_tensor *tensors, uint32_t tensor_count, uint64_t limit)
{
    uint64_t total = 0;
    for (uint32_t i = 0; i < tensor_count; i++) {
        total += pieces_of(&tensors[i], limit);
    }
    return total;
}

static void split(const struct dl_tensor *tensors, uint32_t tensor_count, uint64_t limit, struct piece *pieces)
{
    for (uint32_t i = 0; i < tensor_count; i++) {
        uint64_t row = row_length(&tensors[i]);
        uint64_t rows = dl_tensor_elements(&tensors[i]) / row;
        uint64_t parts = pieces_of(&tensors[i], limit);
        uint64_t offset = 0;
        for (uint64_t part = 0; part < parts; part++) {
            uint64_t count = row * (rows / parts + (part < rows % parts));
            *pieces++ = (struct piece){.tensors = tensors, .tensor = i, .offset = offset, .count = count};
            offset += count;
        }
    }
}

/* Assigns each piece to the fragment that is lightest so far. With at least as many pieces as fragments none stays
 * empty, since an empty fragment is lighter than any other. Returns the largest fragment's elements. */
static uint64_t pack(struct piece *pieces, uint32_t piece_count, uint32_t fragment_count)
{
    uint64_t weight[DL_SPEC_FRAGMENTS_MAX] = {0};
    qsort(pieces, piece_count, sizeof *pieces, by_size_descending);
    for (uint32_t i = 0; i < piece_count; i++) {
        uint32_t lightest = 0;
        for (uint32_t f = 1; f < fragment_count; f++) {
            lightest = weight[f] < weight[lightest] ? f : lightest;
        }
        pieces[i].fragment = lightest;
        weight[lightest] += pieces[i].count;
    }
    uint64_t largest = 0;
    for (uint32_t f = 0; f < fragment_count; f++) {
        largest = DL_MAX(largest, weight[f]);
    }
    return largest;
}

static enum dl_rc cut_at(const struct dl_tensor *tensors, uint32_t tensor_count, uint32_t fragment_count,
                         uint64_t limit, struct cut *out, struct dl_err *err)
{
    uint64_t count = pieces_total(tensors, tensor_count, limit);
    if (count > DL_LAYOUT_SLICES_MAX) {
        return dl_err_set(err, DL_ENOMEM, "the layout needs %llu pieces, at most %d", (unsigned long long)count,
                          DL_LAYOUT_SLICES_MAX);
    }
    struct piece *pieces = calloc((size_t)count, sizeof *pieces);
    if (pieces == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a layout of %llu pieces", (unsigned long long)count);
    }
    split(tensors, tensor_count, limit, pieces);
    out->pieces = pieces;
    out->count = (uint32_t)count;
    out->largest = pack(pieces, out->count, fragment_count);
    return DL_OK;
}

static enum dl_rc cut_balanced(const struct dl_tensor *tensors, uint32_t tensor_count, uint32_t fragment_count,
                               uint64_t elements, struct cut *out, struct dl_err *err)
{
    uint64_t rows = pieces_total(tensors, tensor_count, 1);
    if (rows < fragment_count) {
        return refuse_count(fragment_count, DL_LAYOUT_BALANCED, rows, err);
    }
    uint64_t limit = elements / fragment_count + (elements % fragment_count != 0);
    double mean = (double)elements / fragment_count;
    /* Tensors with few long rows may leave fewer pieces than fragments: then the limit falls until there are enough. It
     * ends, since at 1 each row is a piece, and the pieces at most double from one limit to the next. */
    while (pieces_total(tensors, tensor_count, limit) < fragment_count) {
        limit = limit / 2 + limit % 2;
    }
    enum dl_rc rc = cut_at(tensors, tensor_count, fragment_count, limit, out, err);
    for (uint64_t share = 2; rc == DL_OK && share <= SPLIT_MAX && limit > 1; share *= 2) {
        if ((double)out->largest <= mean * (1 + IMBALANCE_MAX)) {
            break;
        }
        limit = limit / 2 + limit % 2;
        __attribute__((cleanup(cut_release))) struct cut finer = {0};
        rc = cut_at(tensors, tensor_count, fragment_count, limit, &finer, err);
        if (rc == DL_OK && finer.largest < out->largest) {
            struct cut coarser = *out;
            *out = finer;
            finer = coarser;
        }
    }
    return rc;
}

static enum dl_rc cut_tensor(const struct dl_tensor *tensors, uint32_t tensor_count, uint32_t fragment_count,
                             struct cut *out, struct dl_err *err)
{
    if (tensor_count < fragment_count) {
        return refuse_count(fragment_count, DL_LAYOUT_TENSOR, tensor_count, err);
    }
    return cut_at(tensors, tensor_count, fragment_count, UINT64_MAX, out, err);
}

/* --- layer and strided --- */

struct depth { /* One layer that occurs, and what it weighs. */
    uint32_t layer;
    uint32_t fragment;
    uint64_t elements;
};

static int by_layer(const void *a, const void *b)
{
    const struct depth *left = a;
    const struct depth *right = b;
    return (left->layer > right->layer) - (left->layer < right->layer);
}

/* How many runs of consecutive layers of at most `capacity` elements it takes; assigns them, so that at least
 * `fragment_count` runs come out where there are as many layers. */
static uint32_t pack_layers(struct depth *depths, uint32_t count, uint64_t capacity, uint32_t fragment_count)
{
    uint32_t fragment = 0;
    uint64_t used = 0;
    for (uint32_t i = 0; i < count; i++) {
        bool must_open = i > 0 && count - i < fragment_count - DL_MIN(fragment, fragment_count - 1);
        if (i > 0 && (must_open || depths[i].elements > capacity - used)) {
            fragment++;
            used = 0;
        }
        depths[i].fragment = fragment;
        used += depths[i].elements;
    }
    return fragment + 1;
}

static void assign_layers(struct depth *depths, uint32_t count, uint32_t fragment_count, uint64_t elements)
{
    uint64_t low =
        0; /* Too small, or as large as the largest layer: the smallest capacity that works is in (low, high]. */
    for (uint32_t i = 0; i < count; i++) {
        low = DL_MAX(low, depths[i].elements);
    }
    low -= 1;
    uint64_t high = elements;
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (pack_layers(depths, count, middle, fragment_count) <= fragment_count) {
            high = middle;
        } else {
            low = middle;
        }
    }
    uint32_t used = pack_layers(depths, count, high, fragment_count);
    assert(used == fragment_count);
}

/* The distinct layers in ascending order, with their elements; returns how many. `depths` has room for every tensor. */
static uint32_t collect_layers(const struct dl_tensor *tensors, uint32_t tensor_count, struct depth *depths)
{
    for (uint32_t i = 0; i < tensor_count; i++) {
        depths[i] = (struct depth){.layer = tensors[i].layer, .elements = dl_tensor_elements(&tensors[i])};
    }
    qsort(depths, tensor_count, sizeof *depths, by_layer);
    uint32_t count = 0;
    for (uint32_t i = 1; i < tensor_count; i++) {
        if (depths[i].layer == depths[count].layer) {
            depths[count].elements += depths[i].elements;
        } else {
            depths[++count] = depths[i];
        }
    }
    return count + 1;
}

static enum dl_rc cut_by_layer(const struct dl_tensor *tensors, uint32_t tensor_count, uint32_t fragment_count,
                               enum dl_layout_kind kind, uint64_t elements, struct cut *out, struct dl_err *err)
{
    DL_AUTO_FREE struct depth *depths = calloc(tensor_count, sizeof *depths);
    if (depths == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a layout of %u tensors", tensor_count);
    }
    uint32_t count = collect_layers(tensors, tensor_count, depths);
    if (count < fragment_count) {
        return refuse_count(fragment_count, kind, count, err);
    }
    if (kind == DL_LAYOUT_LAYER) {
        assign_layers(depths, count, fragment_count, elements);
    } else {
        for (uint32_t i = 0; i < count; i++) {
            depths[i].fragment = i % fragment_count;
        }
    }
    struct piece *pieces = calloc(tensor_count, sizeof *pieces);
    if (pieces == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a layout of %u tensors", tensor_count);
    }
    for (uint32_t i = 0; i < tensor_count; i++) {
        struct depth wanted = {.layer = tensors[i].layer};
        const struct depth *found = bsearch(&wanted, depths, count, sizeof *depths, by_layer);
        assert(found != NULL);
        pieces[i] = (struct piece){
            .tensors = tensors, .tensor = i, .fragment = found->fragment, .count = dl_tensor_elements(&tensors[i])};
    }
    out->pieces = pieces;
    out->count = tensor_count;
    return DL_OK;
}

/* --- the layout itself --- */

/* Neighbouring pieces of a tensor that came into the same fragment become one slice. */
static void join_neighbours(struct cut *cut)
{
    qsort(cut->pieces, cut->count, sizeof *cut->pieces, by_fragment);
    uint32_t last = 0;
    for (uint32_t i = 1; i < cut->count; i++) {
        struct piece *before = &cut->pieces[last];
        const struct piece *piece = &cut->pieces[i];
        if (piece->fragment == before->fragment && piece->tensor == before->tensor &&
            piece->offset == before->offset + before->count) {
            before->count += piece->count;
        } else {
            cut->pieces[++last] = *piece;
        }
    }
    cut->count = last + 1;
}

static void fill_slices(struct dl_layout *layout, const struct cut *cut)
{
    for (uint32_t i = 0; i < cut->count; i++) {
        const struct piece *piece = &cut->pieces[i];
        struct dl_fragment *fragment = &layout->fragments[piece->fragment];
        if (fragment->slice_count == 0) {
            fragment->first_slice = i;
        }
        layout->slices[i] = (struct dl_slice){.tensor = piece->tensor,
                                              .tensor_offset = piece->offset,
                                              .count = piece->count,
                                              .fragment_offset = fragment->padded_elements};
        fragment->slice_count++;
        fragment->elements += piece->count;
        fragment->padded_elements += (piece->count + DL_BLOCK - 1) / DL_BLOCK * DL_BLOCK;
        layout->elements += piece->count;
        layout->padded_elements_max = DL_MAX(layout->padded_elements_max, fragment->padded_elements);
    }
}

static enum dl_rc hash_layout(struct dl_layout *layout, enum dl_layout_kind kind, struct dl_err *err)
{
    DL_AUTO_FREE uint8_t *table = NULL;
    size_t table_bytes = 0;
    enum dl_rc rc = dl_tensors_encode(layout->tensors, layout->tensor_count, &table, &table_bytes, err);
    if (rc != DL_OK) {
        return rc;
    }
    uint64_t hash = dl_hash64(table, table_bytes, ((uint64_t)kind << 32) | layout->fragment_count);
    for (uint32_t f = 0; f < layout->fragment_count; f++) {
        const struct dl_fragment *fragment = &layout->fragments[f];
        for (uint32_t i = 0; i < fragment->slice_count; i++) {
            const struct dl_slice *slice = &layout->slices[fragment->first_slice + i];
            uint64_t fields[5] = {f, slice->tensor, slice->tensor_offset, slice->count, slice->fragment_offset};
            uint8_t bytes[sizeof fields];
            for (size_t k = 0; k < DL_COUNT_OF(fields); k++) {
                dl_le_put(bytes + 8 * k, fields[k], 8);
            }
            hash = dl_hash64(bytes, sizeof bytes, hash);
        }
    }
    layout->hash = hash;
    return DL_OK;
}

static struct dl_layout *allocate(const struct dl_tensor *tensors, uint32_t tensor_count, uint32_t slice_count,
                                  uint32_t fragment_count)
{
    struct dl_layout *layout = calloc(1, sizeof *layout);
    if (layout == NULL) {
        return NULL;
    }
    layout->tensor_count = tensor_count;
    layout->slice_count = slice_count;
    layout->fragment_count = fragment_count;
    layout->tensors = calloc(tensor_count, sizeof *layout->tensors);
    layout->slices = calloc(slice_count, sizeof *layout->slices);
    layout->fragments = calloc(fragment_count, sizeof *layout->fragments);
    if (layout->tensors == NULL || layout->slices == NULL || layout->fragments == NULL) {
        dl_layout_free(layout);
        return NULL;
    }
    memcpy(layout->tensors, tensors, tensor_count * sizeof *tensors);
    return layout;
}

enum dl_rc dl_layout_new(const struct dl_tensor *tensors, uint32_t tensor_count, uint32_t fragment_count,
                         enum dl_layout_kind kind, struct dl_layout **out, struct dl_err *err)
{
    enum dl_rc rc = dl_tensors_check(tensors, tensor_count, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (fragment_count == 0 || fragment_count > DL_SPEC_FRAGMENTS_MAX) {
        return dl_err_set(err, DL_EINVAL, "%u fragments; 1 to %d are possible", fragment_count, DL_SPEC_FRAGMENTS_MAX);
    }
    uint64_t elements = 0;
    for (uint32_t i = 0; i < tensor_count; i++) {
        elements += dl_tensor_elements(&tensors[i]);
    }
    __attribute__((cleanup(cut_release))) struct cut cut = {0};
    switch (kind) {
    case DL_LAYOUT_BALANCED: rc = cut_balanced(tensors, tensor_count, fragment_count, elements, &cut, err); break;
    case DL_LAYOUT_TENSOR: rc = cut_tensor(tensors, tensor_count, fragment_count, &cut, err); break;
    case DL_LAYOUT_LAYER:
    case DL_LAYOUT_STRIDED: rc = cut_by_layer(tensors, tensor_count, fragment_count, kind, elements, &cut, err); break;
    }
    if (rc != DL_OK) {
        return rc;
    }
    assert(cut.pieces != NULL && cut.count >= fragment_count);
    join_neighbours(&cut);
    struct dl_layout *layout = allocate(tensors, tensor_count, cut.count, fragment_count);
    if (layout == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a layout of %u slices", cut.count);
    }
    fill_slices(layout, &cut);
    rc = hash_layout(layout, kind, err);
    if (rc != DL_OK) {
        dl_layout_free(layout);
        return rc;
    }
    *out = layout;
    return DL_OK;
}

void dl_layout_free(struct dl_layout *layout)
{
    if (layout != NULL) {
        free(layout->tensors);
        free(layout->slices);
        free(layout->fragments);
        free(layout);
    }
}

static enum dl_rc compare_tensor(const struct dl_tensor *ours, const struct dl_tensor *theirs, uint32_t index,
                                 struct dl_err *err)
{
    if (strcmp(ours->name, theirs->name) != 0) {
        return dl_err_set(err, DL_EINVAL, "tensor %u is %s here and %s there", index, ours->name, theirs->name);
    }
    if (ours->rank != theirs->rank) {
        return dl_err_set(err, DL_EINVAL, "tensor %s has %u dimensions here and %u there", ours->name, ours->rank,
                          theirs->rank);
    }
    for (uint32_t d = 0; d < ours->rank; d++) {
        if (ours->shape[d] != theirs->shape[d]) {
            return dl_err_set(err, DL_EINVAL, "tensor %s: dimension %u is %llu here and %llu there", ours->name, d,
                              (unsigned long long)ours->shape[d], (unsigned long long)theirs->shape[d]);
        }
    }
    if (ours->role != theirs->role || ours->layer != theirs->layer) {
        return dl_err_set(err, DL_EINVAL, "tensor %s: role %d of layer %u here, role %d of layer %u there", ours->name,
                          (int)ours->role, ours->layer, (int)theirs->role, theirs->layer);
    }
    return DL_OK;
}

enum dl_rc dl_layout_compare(const struct dl_layout *ours, const struct dl_layout *theirs, struct dl_err *err)
{
    if (ours->hash == theirs->hash) {
        return DL_OK;
    }
    uint32_t common = DL_MIN(ours->tensor_count, theirs->tensor_count);
    for (uint32_t i = 0; i < common; i++) {
        enum dl_rc rc = compare_tensor(&ours->tensors[i], &theirs->tensors[i], i, err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    if (ours->tensor_count != theirs->tensor_count) {
        const struct dl_layout *longer = ours->tensor_count > theirs->tensor_count ? ours : theirs;
        return dl_err_set(err, DL_EINVAL, "tensor %s is only %s (%u tensors here, %u there)",
                          longer->tensors[common].name, longer == ours ? "here" : "there", ours->tensor_count,
                          theirs->tensor_count);
    }
    if (ours->fragment_count != theirs->fragment_count) {
        return dl_err_set(err, DL_EINVAL, "the same tensors, but %u fragments here and %u there", ours->fragment_count,
                          theirs->fragment_count);
    }
    for (uint32_t i = 0; i < DL_MIN(ours->slice_count, theirs->slice_count); i++) {
        const struct dl_slice *a = &ours->slices[i];
        const struct dl_slice *b = &theirs->slices[i];
        if (a->tensor != b->tensor || a->tensor_offset != b->tensor_offset || a->count != b->count ||
            a->fragment_offset != b->fragment_offset) {
            return dl_err_set(err, DL_EINVAL,
                              "the same tensors, but cut in another way: tensor %s here where %s is there",
                              ours->tensors[a->tensor].name, theirs->tensors[b->tensor].name);
        }
    }
    return dl_err_set(err, DL_EINVAL, "the same tensors, but another kind of layout");
}

/* --- moving values --- */

void dl_layout_gather(const struct dl_layout *layout, uint32_t index, float *const *tensors, float *fragment)
{
    assert(index < layout->fragment_count);
    const struct dl_fragment *shape = &layout->fragments[index];
    for (uint32_t i = 0; i < shape->slice_count; i++) {
        const struct dl_slice *slice = &layout->slices[shape->first_slice + i];
        float *to = fragment + slice->fragment_offset;
        uint64_t gap = (DL_BLOCK - slice->count % DL_BLOCK) % DL_BLOCK;
        memcpy(to, tensors[slice->tensor] + slice->tensor_offset, slice->count * sizeof *to);
        memset(to + slice->count, 0, gap * sizeof *to);
    }
}

void dl_layout_scatter(const struct dl_layout *layout, uint32_t index, const float *fragment, float *const *tensors)
{
    assert(index < layout->fragment_count);
    const struct dl_fragment *shape = &layout->fragments[index];
    for (uint32_t i = 0; i < shape->slice_count; i++) {
        const struct dl_slice *slice = &layout->slices[shape->first_slice + i];
        memcpy(tensors[slice->tensor] + slice->tensor_offset, fragment + slice->fragment_offset,
               slice->count * sizeof *fragment);
    }
}
