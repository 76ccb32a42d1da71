#include "worker/model/attention.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "common/mem.h"
#include "worker/model/kernels.h"

/* Queries in a block, keys in a block. Keys is a multiple of queries, so that a block that starts at or before a query
 * block always holds at least one unmasked key for each of its rows. */
enum { QUERIES = 64, KEYS = 512 };
_Static_assert(KEYS % QUERIES == 0, "a key block must not start inside a query block");

struct view {        /* One sequence of one group, as strided matrices. */
    uint32_t stride; /* Of a row of qkv. */
    uint32_t out_stride;
    uint32_t first_head, head_count;
    size_t key, value; /* Column offsets in qkv. */
    float scale;
};

static struct view view_of(const struct wk_attention_shape *shape, uint32_t group)
{
    uint32_t w = shape->head_width;
    struct view view;
    view.head_count = shape->heads / shape->kv_heads;
    view.first_head = group * view.head_count;
    view.out_stride = shape->heads * w;
    view.stride = (shape->heads + 2 * shape->kv_heads) * w;
    view.key = (size_t)(shape->heads + group) * w;
    view.value = (size_t)(shape->heads + shape->kv_heads + group) * w;
    view.scale = 1.0f / sqrtf((float)w);
    return view;
}

uint64_t wk_attention_scratch(uint32_t head_width, uint32_t length)
{
    uint64_t floats = (uint64_t)2 * QUERIES * KEYS + (uint64_t)2 * head_width * length;
    return (floats + 15) / 16 * 16; /* Whole cache lines: threads' parts stand side by side. */
}

/* Parts of a thread's scratch memory. sgemm is up to half again as fast with these second operands as with transposed ones,
 * whose small products have no good kernel, and every block of queries uses them again. */
struct scratch {
    float *scores, *grads;      /* [QUERIES][KEYS] */
    float *keys_by_dimension;   /* [head_width][length] */
    float *values_by_dimension; /* The same, of values; for backward. */
};

static struct scratch parts_of(float *scratch, const struct wk_attention_shape *shape)
{
    struct scratch parts = {.scores = scratch};
    parts.grads = scratch + (size_t)QUERIES * KEYS;
    parts.keys_by_dimension = parts.grads + (size_t)QUERIES * KEYS;
    parts.values_by_dimension = parts.keys_by_dimension + (size_t)shape->head_width * shape->length;
    return parts;
}

/* Scores of a block after which `sum` and `maximum` cover all keys so far; earlier output is rescaled to the new
 * maximum. */
static void softmax_block(float *scores, uint32_t queries, uint32_t keys, uint32_t first_valid, uint32_t head_width,
                          bool first, float *maximum, float *sum, float *out, uint32_t out_stride)
{
    for (uint32_t r = 0; r < queries; r++) {
        uint32_t valid = DL_MIN(first_valid + r, keys);
        float before = maximum[r];
        float part = wk_softmax_part(scores + (size_t)r * KEYS, valid, keys, before, &maximum[r]);
        if (first) {
            sum[r] = part;
        } else {
            float factor = expf(before - maximum[r]);
            sum[r] = sum[r] * factor + part;
            wk_scale(out + (size_t)r * out_stride, head_width, factor);
        }
    }
}

static void forward_queries(const struct wk_attention_shape *shape, const struct view *view, const float *qkv,
                            uint32_t head, uint32_t start, float *out, float *lse, const struct scratch *scratch,
                            struct wk_meter *meter, uint32_t thread)
{
    uint32_t w = shape->head_width;
    uint32_t queries = DL_MIN(QUERIES, shape->length - start);
    uint32_t end = start + queries;
    float *scores = scratch->scores;
    float *block_out = out + (size_t)start * view->out_stride + (size_t)head * w;
    float maximum[QUERIES], sum[QUERIES];
    for (uint32_t r = 0; r < queries; r++) {
        maximum[r] = -INFINITY;
    }
    for (uint32_t key = 0; key < end; key += KEYS) {
        uint32_t keys = DL_MIN(KEYS, end - key);
        const struct wk_gemm scores_gemm = {.m = queries,
                                            .n = keys,
                                            .k = w,
                                            .a = qkv + (size_t)start * view->stride + (size_t)head * w,
                                            .lda = view->stride,
                                            .b = scratch->keys_by_dimension + key,
                                            .ldb = shape->length,
                                            .c = scores,
                                            .ldc = KEYS};
        wk_gemm_one(meter, thread, &scores_gemm, view->scale);
        softmax_block(scores, queries, keys, start - key + 1, w, key == 0, maximum, sum, block_out, view->out_stride);
        const struct wk_gemm value_gemm = {.m = queries,
                                           .n = w,
                                           .k = keys,
                                           .a = scores,
                                           .lda = KEYS,
                                           .b = qkv + (size_t)key * view->stride + view->value,
                                           .ldb = view->stride,
                                           .c = block_out,
                                           .ldc = view->out_stride,
                                           .beta = key == 0 ? 0.0f : 1.0f};
        wk_gemm_one(meter, thread, &value_gemm, 1);
    }
    for (uint32_t r = 0; r < queries; r++) {
        wk_scale(block_out + (size_t)r * view->out_stride, w, 1.0f / sum[r]);
        lse[start + r] = maximum[r] + logf(sum[r]);
    }
}

void wk_attention_forward(const struct wk_attention_shape *shape, uint32_t group, float *qkv, float *out, float *lse,
                          float *scratch, struct wk_meter *meter, uint32_t thread)
{
    struct view view = view_of(shape, group);
    struct scratch parts = parts_of(scratch, shape);
    wk_rope(qkv + view.key, view.stride, shape->cosine, shape->sine, shape->length, shape->head_width, 1);
    wk_transpose(qkv + view.key, view.stride, shape->length, shape->head_width, parts.keys_by_dimension);
    for (uint32_t i = 0; i < view.head_count; i++) {
        uint32_t head = view.first_head + i;
        wk_rope(qkv + (size_t)head * shape->head_width, view.stride, shape->cosine, shape->sine, shape->length,
                shape->head_width, 1);
        for (uint32_t start = 0; start < shape->length; start += QUERIES) {
            forward_queries(shape, &view, qkv, head, start, out, lse + (size_t)head * shape->length, &parts, meter,
                            thread);
        }
    }
}

struct backward_block {
    const float *query, *key, *dout;                    /* First element of each block. */
    const float *key_by_dimension, *value_by_dimension; /* Rows of `length`. */
    uint32_t length;
    float *dquery, *dkey, *dvalue;
    uint32_t queries, keys;
    uint32_t first_valid; /* Unmasked keys of the first query. */
    bool first;           /* dquery is written, not added to. */
    const float *lse;
    const float *delta;
};

/* P = exp(S - lse); dP = dO V'; dS = P (dP - delta); then dV += P' dO, dQ += dS K, dK += dS' Q. */
static void backward_one(const struct view *view, uint32_t w, const struct backward_block *b,
                         const struct scratch *scratch, struct wk_meter *meter, uint32_t thread)
{
    float *p = scratch->scores, *ds = scratch->grads;
    struct wk_gemm gemm = {.m = b->queries, .n = b->keys, .k = w, .ldb = b->length, .ldc = KEYS};
    gemm.a = b->query, gemm.lda = view->stride, gemm.b = b->key_by_dimension, gemm.c = p;
    wk_gemm_one(meter, thread, &gemm, view->scale);
    gemm.a = b->dout, gemm.lda = view->out_stride, gemm.b = b->value_by_dimension, gemm.c = ds;
    wk_gemm_one(meter, thread, &gemm, 1);
    for (uint32_t r = 0; r < b->queries; r++) {
        uint32_t valid = DL_MIN(b->first_valid + r, b->keys);
        wk_softmax_backward(p + (size_t)r * KEYS, ds + (size_t)r * KEYS, valid, b->keys, b->lse[r], b->delta[r],
                            view->scale);
    }
    struct wk_gemm by_key = {.transpose_a = true, .m = b->keys, .n = w, .k = b->queries, .lda = KEYS, .beta = 1};
    by_key.a = p, by_key.b = b->dout, by_key.ldb = view->out_stride, by_key.c = b->dvalue, by_key.ldc = view->stride;
    wk_gemm_one(meter, thread, &by_key, 1);
    by_key.a = ds, by_key.b = b->query, by_key.ldb = view->stride, by_key.c = b->dkey;
    wk_gemm_one(meter, thread, &by_key, 1);
    const struct wk_gemm by_query = {.m = b->queries,
                                     .n = w,
                                     .k = b->keys,
                                     .a = ds,
                                     .lda = KEYS,
                                     .b = b->key,
                                     .ldb = view->stride,
                                     .c = b->dquery,
                                     .ldc = view->stride,
                                     .beta = b->first ? 0.0f : 1.0f};
    wk_gemm_one(meter, thread, &by_query, 1);
}

static void backward_head(const struct wk_attention_shape *shape, const struct view *view, uint32_t head,
                          const float *qkv, const float *out, const float *lse, const float *dout, float *dqkv,
                          const struct scratch *scratch, struct wk_meter *meter, uint32_t thread)
{
    uint32_t w = shape->head_width;
    size_t column = (size_t)head * w;
    for (uint32_t start = 0; start < shape->length; start += QUERIES) {
        uint32_t queries = DL_MIN(QUERIES, shape->length - start);
        uint32_t end = start + queries;
        float delta[QUERIES];
        for (uint32_t r = 0; r < queries; r++) {
            size_t at = (size_t)(start + r) * view->out_stride + column;
            delta[r] = wk_dot(dout + at, out + at, w);
        }
        for (uint32_t key = 0; key < end; key += KEYS) {
            size_t q_row = (size_t)start * view->stride, k_row = (size_t)key * view->stride;
            const struct backward_block block = {.query = qkv + q_row + column,
                                                 .key = qkv + k_row + view->key,
                                                 .key_by_dimension = scratch->keys_by_dimension + key,
                                                 .value_by_dimension = scratch->values_by_dimension + key,
                                                 .length = shape->length,
                                                 .dout = dout + (size_t)start * view->out_stride + column,
                                                 .dquery = dqkv + q_row + column,
                                                 .dkey = dqkv + k_row + view->key,
                                                 .dvalue = dqkv + k_row + view->value,
                                                 .queries = queries,
                                                 .keys = DL_MIN(KEYS, end - key),
                                                 .first_valid = start - key + 1,
                                                 .first = key == 0,
                                                 .lse = lse + (size_t)head * shape->length + start,
                                                 .delta = delta};
            backward_one(view, w, &block, scratch, meter, thread);
        }
    }
    wk_rope(dqkv + column, view->stride, shape->cosine, shape->sine, shape->length, w, -1);
}

void wk_attention_backward(const struct wk_attention_shape *shape, uint32_t group, const float *qkv, const float *out,
                           const float *lse, const float *dout, float *dqkv, float *scratch, struct wk_meter *meter,
                           uint32_t thread)
{
    struct view view = view_of(shape, group);
    struct scratch parts = parts_of(scratch, shape);
    uint32_t w = shape->head_width;
    wk_transpose(qkv + view.key, view.stride, shape->length, w, parts.keys_by_dimension);
    wk_transpose(qkv + view.value, view.stride, shape->length, w, parts.values_by_dimension);
    for (uint32_t r = 0; r < shape->length; r++) {
        memset(dqkv + (size_t)r * view.stride + view.key, 0, w * sizeof(float));
        memset(dqkv + (size_t)r * view.stride + view.value, 0, w * sizeof(float));
    }
    for (uint32_t i = 0; i < view.head_count; i++) {
        backward_head(shape, &view, view.first_head + i, qkv, out, lse, dout, dqkv, &parts, meter, thread);
    }
    wk_rope(dqkv + view.key, view.stride, shape->cosine, shape->sine, shape->length, w, -1);
}
