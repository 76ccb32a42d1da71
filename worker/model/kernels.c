#include "worker/model/kernels.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* The run-time choice needs a resolver that runs before a sanitizer is set up, so sanitizer builds take the plain code.
 */
#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define KERNEL __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define KERNEL
#endif
#define INLINE static inline __attribute__((always_inline))

/* Sums run over this many lanes on every instruction set: the order of additions is part of the result. */
enum { LANES = 16, SUM_BLOCK = 1024 };

/* Cody-Waite reduction and Cephes' polynomial. Rounding by adding 1.5 * 2^23 leaves the integer in the low mantissa
 * bits. */
INLINE float exp_one(float x)
{
    const float magic = 12582912.0f;
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504088896341f + magic;
    float n = shifted - magic;
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 127u) << 23; /* The magic number's own bits leave through the top. */
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

/* Lanes are added as a tree, always the same one. */
INLINE float add_lanes(const float lane[LANES])
{
    float s8[8], s4[4];
    for (int i = 0; i < 8; i++) {
        s8[i] = lane[i] + lane[i + 8];
    }
    for (int i = 0; i < 4; i++) {
        s4[i] = s8[i] + s8[i + 4];
    }
    return (s4[0] + s4[2]) + (s4[1] + s4[3]);
}

INLINE float max_lanes(const float lane[LANES])
{
    float best = lane[0];
    for (int i = 1; i < LANES; i++) {
        best = lane[i] > best ? lane[i] : best;
    }
    return best;
}

INLINE float dot_of(const float *x, const float *y, uint64_t n)
{
    float lane[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] += x[i + (uint64_t)l] * y[i + (uint64_t)l];
        }
    }
    for (int l = 0; i < n; i++, l++) {
        lane[l] += x[i] * y[i];
    }
    return add_lanes(lane);
}

INLINE float max_of(const float *x, uint64_t n, float start)
{
    float lane[LANES];
    for (int l = 0; l < LANES; l++) {
        lane[l] = start;
    }
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            float value = x[i + (uint64_t)l];
            lane[l] = value > lane[l] ? value : lane[l];
        }
    }
    for (int l = 0; i < n; i++, l++) {
        lane[l] = x[i] > lane[l] ? x[i] : lane[l];
    }
    return max_lanes(lane);
}

INLINE float sum_of(const float *x, uint64_t n)
{
    float lane[LANES] = {0};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int l = 0; l < LANES; l++) {
            lane[l] += x[i + (uint64_t)l];
        }
    }
    for (int l = 0; i < n; i++, l++) {
        lane[l] += x[i];
    }
    return add_lanes(lane);
}

KERNEL void wk_exp_rows(float *x, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        x[i] = exp_one(x[i]);
    }
}

KERNEL void wk_rmsnorm(const float *restrict x, const float *restrict gain, float epsilon, uint64_t rows,
                       uint32_t width, float *restrict out, float *restrict rstd)
{
    for (uint64_t r = 0; r < rows; r++, x += width, out += width) {
        float mean = dot_of(x, x, width) / (float)width;
        float factor = 1.0f / sqrtf(mean + epsilon);
        rstd[r] = factor;
        for (uint32_t i = 0; i < width; i++) {
            out[i] = x[i] * factor * gain[i];
        }
    }
}

/* With xhat = x * rstd and d = dout * gain: dx = rstd * (d - xhat * mean(d * xhat)), dgain = sum over rows of dout *
 * xhat. */
KERNEL void wk_rmsnorm_backward(const float *restrict dout, const float *restrict x, const float *restrict rstd,
                                const float *restrict gain, uint64_t rows, uint32_t width, int accumulate,
                                float *restrict dx, float *restrict dgain)
{
    memset(dgain, 0, width * sizeof *dgain);
    for (uint64_t r = 0; r < rows; r++, x += width, dout += width, dx += width) {
        float lane[LANES] = {0};
        uint32_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            for (uint32_t l = 0; l < LANES; l++) {
                lane[l] += dout[i + l] * gain[i + l] * x[i + l];
            }
        }
        for (uint32_t l = 0; i < width; i++, l++) {
            lane[l] += dout[i] * gain[i] * x[i];
        }
        float factor = rstd[r];
        float inner = add_lanes(lane) * factor * factor / (float)width;
        if (accumulate) {
            for (i = 0; i < width; i++) {
                dx[i] += factor * (dout[i] * gain[i] - x[i] * inner);
                dgain[i] += dout[i] * x[i] * factor;
            }
        } else {
            for (i = 0; i < width; i++) {
                dx[i] = factor * (dout[i] * gain[i] - x[i] * inner);
                dgain[i] += dout[i] * x[i] * factor;
            }
        }
    }
}

KERNEL void wk_rope(float *x, uint64_t stride, const float *restrict cosine, const float *restrict sine, uint64_t rows,
                    uint32_t head_width, int direction)
{
    uint32_t half = head_width / 2;
    float sign = (float)direction;
    for (uint64_t r = 0; r < rows; r++, cosine += half, sine += half) {
        float *restrict first = x + r * stride;
        float *restrict second = first + half;
        for (uint32_t i = 0; i < half; i++) {
            float a = first[i], b = second[i], c = cosine[i], s = sine[i] * sign;
            first[i] = a * c - b * s;
            second[i] = b * c + a * s;
        }
    }
}

KERNEL void wk_swiglu(const float *restrict gate_up, uint64_t rows, uint32_t width, float *restrict hidden)
{
    for (uint64_t r = 0; r < rows; r++, gate_up += (uint64_t)2 * width, hidden += width) {
        const float *up = gate_up + width;
        for (uint32_t i = 0; i < width; i++) {
            hidden[i] = gate_up[i] / (1.0f + exp_one(-gate_up[i])) * up[i];
        }
    }
}

/* silu(g) = g s with s = sigmoid(g); silu'(g) = s (1 + g (1 - s)). */
KERNEL void wk_swiglu_backward(float *gate_up, float *dhidden, uint64_t rows, uint32_t width)
{
    for (uint64_t r = 0; r < rows; r++) {
        float *restrict gate = gate_up + r * 2 * width;
        float *restrict up = gate + width;
        float *restrict d = dhidden + r * width;
        for (uint32_t i = 0; i < width; i++) {
            float g = gate[i], u = up[i], dh = d[i];
            float s = 1.0f / (1.0f + exp_one(-g));
            float silu = g * s;
            gate[i] = dh * u * (s * (1.0f + g * (1.0f - s)));
            up[i] = dh * silu;
            d[i] = silu * u;
        }
    }
}

KERNEL float wk_softmax_part(float *row, uint32_t valid, uint32_t n, float maximum_before, float *maximum)
{
    float best = max_of(row, valid, maximum_before);
    *maximum = best;
    for (uint32_t i = 0; i < valid; i++) {
        row[i] = exp_one(row[i] - best);
    }
    memset(row + valid, 0, (n - valid) * sizeof *row);
    return sum_of(row, valid);
}

KERNEL void wk_softmax_backward(float *restrict row, float *restrict grad, uint32_t valid, uint32_t n, float lse,
                                float delta, float scale)
{
    for (uint32_t i = 0; i < valid; i++) {
        float p = exp_one(row[i] - lse);
        row[i] = p;
        grad[i] = p * (grad[i] - delta) * scale;
    }
    memset(row + valid, 0, (n - valid) * sizeof *row);
    memset(grad + valid, 0, (n - valid) * sizeof *grad);
}

KERNEL void wk_scale(float *x, uint32_t n, float factor)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] *= factor;
    }
}

KERNEL void wk_add(float *restrict x, const float *restrict y, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        x[i] += y[i];
    }
}

KERNEL float wk_dot(const float *x, const float *y, uint32_t n)
{
    return dot_of(x, y, n);
}

KERNEL double wk_cross_entropy(float *row, uint32_t vocab, uint32_t target, float scale)
{
    float best = max_of(row, vocab, row[0]);
    float wanted = row[target];
    double sum = 0;
    for (uint32_t start = 0; start < vocab; start += SUM_BLOCK) {
        uint32_t n = vocab - start < SUM_BLOCK ? vocab - start : SUM_BLOCK;
        for (uint32_t i = 0; i < n; i++) {
            row[start + i] = exp_one(row[start + i] - best);
        }
        sum += (double)sum_of(row + start, n);
    }
    if (scale != 0) {
        float factor = (float)((double)scale / sum);
        for (uint32_t i = 0; i < vocab; i++) {
            row[i] *= factor;
        }
        row[target] -= scale;
    }
    return (double)best - (double)wanted + log(sum);
}

KERNEL void wk_adamw_update(float *restrict theta, const float *restrict g, float *restrict m, float *restrict v,
                            uint64_t n, const struct wk_adamw_factors *factors)
{
    const struct wk_adamw_factors f = *factors;
    for (uint64_t i = 0; i < n; i++) {
        float gradient = g[i] * f.clip;
        float first = f.beta1 * m[i] + f.one_minus_beta1 * gradient;
        float second = f.beta2 * v[i] + f.one_minus_beta2 * (gradient * gradient);
        m[i] = first;
        v[i] = second;
        theta[i] = theta[i] * f.keep - f.step * first / (sqrtf(second) * f.inverse_root2 + f.epsilon);
    }
}

KERNEL double wk_sum_squares(const float *x, uint64_t n)
{
    double sum = 0;
    for (uint64_t start = 0; start < n; start += SUM_BLOCK) {
        uint64_t count = n - start < SUM_BLOCK ? n - start : SUM_BLOCK;
        sum += (double)dot_of(x + start, x + start, count);
    }
    return sum;
}
