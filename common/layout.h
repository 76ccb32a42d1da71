/* dl_layout: how a model's tensors are cut into fragments.
 *
 * The same tensors and options give the same layout on every machine; `hash` says so. A fragment is an array of float32
 * in which its slices stand one after the other, each starting at a multiple of DL_BLOCK elements (the gap is zeros),
 * so that codec blocks and vectors never straddle two tensors.
 *
 * Pure. A layout is read-only once made; any thread. */
#ifndef DL_COMMON_LAYOUT_H
#define DL_COMMON_LAYOUT_H

#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"

#define DL_BLOCK 256           /* Elements in a codec block; slices start at multiples of it. */
#define DL_TENSOR_NAME_MAX 128 /* Bytes with the terminating zero. */
#define DL_TENSOR_RANK_MAX 4
#define DL_TENSORS_MAX 16384
#define DL_TENSOR_ELEMENTS_MAX (UINT64_C(1) << 40)
#define DL_LAYOUT_SLICES_MAX 131072

enum dl_tensor_role { DL_TENSOR_WEIGHT, DL_TENSOR_EMBEDDING }; /* Embedding: input embedding and output head. */

struct dl_tensor {
    char name[DL_TENSOR_NAME_MAX];      /* Unique, not empty; [A-Za-z0-9._/-]. */
    uint32_t rank;                      /* 0: a scalar. */
    uint64_t shape[DL_TENSOR_RANK_MAX]; /* Row-major; every extent >= 1. */
    enum dl_tensor_role role;
    uint32_t layer; /* Depth, for layouts `layer` and `strided`: 0 embedding, 1..n blocks, n+1 head; 0 when unknown. */
};

struct dl_slice {
    uint32_t tensor;          /* Index into the layout's tensors. */
    uint64_t tensor_offset;   /* Elements from the tensor's start; a multiple of its row length. */
    uint64_t count;           /* Elements. */
    uint64_t fragment_offset; /* Elements from the fragment's start; a multiple of DL_BLOCK. */
};

struct dl_fragment {
    uint32_t first_slice; /* Into the layout's slices. */
    uint32_t slice_count;
    uint64_t elements;        /* Parameters. */
    uint64_t padded_elements; /* Length of the fragment's array: a multiple of DL_BLOCK. */
};

struct dl_layout {
    uint32_t tensor_count, slice_count, fragment_count;
    struct dl_tensor *tensors; /* In the caller's order. */
    struct dl_slice *slices;   /* Grouped by fragment; within one by (tensor, offset). */
    struct dl_fragment *fragments;
    uint64_t elements;            /* Of the whole model. */
    uint64_t padded_elements_max; /* Of the largest fragment. */
    uint64_t hash;                /* Over kind, fragment count, tensors, slices. */
};

/* Elements of one tensor. */
uint64_t dl_tensor_elements(const struct dl_tensor *tensor);

/* DL_OK when every tensor is valid and names are unique; DL_EINVAL names the first that is not. */
DL_MUST_CHECK enum dl_rc dl_tensors_check(const struct dl_tensor *tensors, uint32_t tensor_count, struct dl_err *err);

/* Cuts `tensors` into `fragment_count` fragments (1 .. DL_SPEC_FRAGMENTS_MAX).
 *   balanced  tensors larger than the mean fragment are split by rows (a row: the last dimension), then greedy bin
 * packing (descending size into the lightest fragment; ties by name, then fragment index). Where that leaves the
 * largest fragment more than 3 % above the mean, the limit is halved until it does not, down to 1/32 of the mean.
 *   tensor    the same without splitting.
 *   layer     consecutive layers stay together, so that the largest fragment is as small as possible.
 *   strided   the l-th layer that occurs goes to fragment l mod P.
 * A fragment never ends up empty: DL_EINVAL says the largest count that works. Copies the tensors; dl_layout_free
 * releases. */
DL_MUST_CHECK enum dl_rc dl_layout_new(const struct dl_tensor *tensors, uint32_t tensor_count, uint32_t fragment_count,
                                       enum dl_layout_kind kind, struct dl_layout **out, struct dl_err *err);
void dl_layout_free(struct dl_layout *layout); /* NULL is fine. */

/* DL_OK when both have equal hashes; else DL_EINVAL, the text naming the first tensor that differs and how. */
DL_MUST_CHECK enum dl_rc dl_layout_compare(const struct dl_layout *ours, const struct dl_layout *theirs,
                                           struct dl_err *err);

/* The tensors as inert bytes for the wire and files, and back (validated, sizes capped before allocation).
 * Little-endian: format u8 (1), count u32; then each: name bytes u8, name, role u8, rank u8, layer u32, extents u64.
 * Decoding refuses what dl_tensors_check refuses, and bytes that are left over: DL_EPROTO. Caller frees *out. */
DL_MUST_CHECK enum dl_rc dl_tensors_encode(const struct dl_tensor *tensors, uint32_t tensor_count, uint8_t **out,
                                           size_t *size, struct dl_err *err);
DL_MUST_CHECK enum dl_rc dl_tensors_decode(const uint8_t *bytes, size_t size, struct dl_tensor **out,
                                           uint32_t *tensor_count, struct dl_err *err);

/* Copies fragment `index` between whole tensors (`tensors[i]` is tensor i's float32 array) and a padded fragment array;
 * gather writes zeros into the gaps, scatter leaves them alone. */
void dl_layout_gather(const struct dl_layout *layout, uint32_t index, float *const *tensors, float *fragment);
void dl_layout_scatter(const struct dl_layout *layout, uint32_t index, const float *fragment, float *const *tensors);

#endif
