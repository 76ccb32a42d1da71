/* wk_kernels: the element-wise parts of the transformer, on rows of float32.
 *
 * Built for several instruction sets, chosen at run time (common/isa.h), with equal bits in all of them: no
 * contraction, and sums over 16 fixed lanes. Each has a plain reference in the tests. Pure; any thread. */
#ifndef WK_MODEL_KERNELS_H
#define WK_MODEL_KERNELS_H

#include <stdint.h>

/* exp(x) to about 1e-7 relative for -87 <= x <= 88; clamped to those ends outside; NaN stays NaN. In place over n
 * values. */
void wk_exp_rows(float *x, uint64_t n);

/* out = x * rstd * gain, rstd = 1 / sqrt(mean(x^2) + epsilon), for `rows` rows of `width`. rstd[rows] is kept for
 * backward. */
void wk_rmsnorm(const float *x, const float *gain, float epsilon, uint64_t rows, uint32_t width, float *out,
                float *rstd);

/* dx (+)= gradient through the norm; `dgain` (width) is overwritten with this block of rows' sum. `accumulate` adds to
 * dx. */
void wk_rmsnorm_backward(const float *dout, const float *x, const float *rstd, const float *gain, uint64_t rows,
                         uint32_t width, int accumulate, float *dx, float *dgain);

/* Rotates `rows` rows of one head in place; row r stands at x + r * stride. cosine, sine: [rows][head_width / 2].
 * direction 1: forward; -1: the transposed rotation, for gradients. */
void wk_rope(float *x, uint64_t stride, const float *cosine, const float *sine, uint64_t rows, uint32_t head_width,
             int direction);

/* gate_up: rows of [gate(width) up(width)]; hidden = silu(gate) * up. */
void wk_swiglu(const float *gate_up, uint64_t rows, uint32_t width, float *hidden);

/* In place: gate_up becomes its gradient, dhidden becomes hidden (which the down projection's gradient needs). */
void wk_swiglu_backward(float *gate_up, float *dhidden, uint64_t rows, uint32_t width);

/* One row of attention scores, `valid` of `n` unmasked: row[j] = exp(row[j] - max) with max = max(maximum_before, row),
 * zero from `valid` on. Returns the sum, sets *maximum. */
float wk_softmax_part(float *row, uint32_t valid, uint32_t n, float maximum_before, float *maximum);

/* row[j] = exp(row[j] - lse), zero from `valid` on; then grad[j] = row[j] * (grad[j] - delta) * scale. */
void wk_softmax_backward(float *row, float *grad, uint32_t valid, uint32_t n, float lse, float delta, float scale);

/* out[columns][rows] = the transposed x, whose `rows` rows of `columns` are `stride` apart. */
void wk_transpose(const float *x, uint64_t stride, uint32_t rows, uint32_t columns, float *out);

void wk_scale(float *x, uint32_t n, float factor);
void wk_add(float *x, const float *y, uint64_t n);
float wk_dot(const float *x, const float *y, uint32_t n);

/* Cross-entropy of one row of logits: returns -log softmax(row)[target]. With `scale` other than 0 the row becomes its
 * gradient times `scale`. */
double wk_cross_entropy(float *row, uint32_t vocab, uint32_t target, float scale);

/* theta, m, v of one AdamW update over n values; g is multiplied by `clip` first. */
struct wk_adamw_factors {
    float clip, beta1, beta2, one_minus_beta1, one_minus_beta2;
    float step;          /* lr / (1 - beta1^t) */
    float inverse_root2; /* 1 / sqrt(1 - beta2^t) */
    float epsilon;
    float keep; /* 1 - lr * weight_decay */
};
void wk_adamw_update(float *theta, const float *g, float *m, float *v, uint64_t n, const struct wk_adamw_factors *f);

/* Sum of squares, float32 within blocks of 1024 in 16 lanes, blocks added in double. */
double wk_sum_squares(const float *x, uint64_t n);

#endif
