/* wk_attention: causal grouped-query attention, block by block, so that no T x T matrix is ever held.
 *
 * One call handles one sequence and one key/value head with the query heads that share it: the unit of work of the
 * pool. Layout of a row of qkv: [heads x head_width] [kv_heads x head_width] [kv_heads x head_width]. Any thread, own
 * scratch. */
#ifndef WK_MODEL_ATTENTION_H
#define WK_MODEL_ATTENTION_H

#include <stdint.h>

#include "worker/model/gemm.h"

struct wk_attention_shape {
    uint32_t heads, kv_heads, head_width, length; /* length: tokens of the sequence */
    const float *cosine, *sine;                   /* [length][head_width / 2] */
};

/* Floats of scratch memory a thread: a block of scores and its gradient, and the sequence's keys and values of one head. Grows
 * with the length, never with its square. */
uint64_t wk_attention_scratch(uint32_t head_width, uint32_t length);

/* Rotates queries and keys in place, then writes out[length][heads * head_width] and lse[heads][length] (log of the sum
 * of exponentials) for the query heads of `group`. qkv and out point at the sequence's first row. */
void wk_attention_forward(const struct wk_attention_shape *shape, uint32_t group, float *qkv, float *out, float *lse,
                          float *scratch, struct wk_meter *meter, uint32_t thread);

/* dqkv of the group's heads from dout; qkv as left by forward (rotated). Gradients are of the unrotated values. */
void wk_attention_backward(const struct wk_attention_shape *shape, uint32_t group, const float *qkv, const float *out,
                           const float *lse, const float *dout, float *dqkv, float *scratch, struct wk_meter *meter,
                           uint32_t thread);

#endif
