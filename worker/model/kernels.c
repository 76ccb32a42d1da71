#include "worker/model/kernels.h"

#include "common/isa.h"
#include "worker/model/kernels_table.h"

static const struct wk_kernels *kernels(void)
{
    return DL_ISA_PICK(&wk_kernels_portable, &wk_kernels_avx2, &wk_kernels_avx512);
}

void wk_exp_rows(float *x, uint64_t n)
{
    kernels()->exp_rows(x, n);
}

void wk_rmsnorm(const float *x, const float *gain, float epsilon, uint64_t rows, uint32_t width, float *out,
                float *rstd)
{
    kernels()->rmsnorm(x, gain, epsilon, rows, width, out, rstd);
}

void wk_rmsnorm_backward(const float *dout, const float *x, const float *rstd, const float *gain, uint64_t rows,
                         uint32_t width, int accumulate, float *dx, float *dgain)
{
    kernels()->rmsnorm_backward(dout, x, rstd, gain, rows, width, accumulate, dx, dgain);
}

void wk_rope(float *x, uint64_t stride, const float *cosine, const float *sine, uint64_t rows, uint32_t head_width,
             int direction)
{
    kernels()->rope(x, stride, cosine, sine, rows, head_width, direction);
}

void wk_swiglu(const float *gate_up, uint64_t rows, uint32_t width, float *hidden)
{
    kernels()->swiglu(gate_up, rows, width, hidden);
}

void wk_swiglu_backward(float *gate_up, float *dhidden, uint64_t rows, uint32_t width)
{
    kernels()->swiglu_backward(gate_up, dhidden, rows, width);
}

float wk_softmax_part(float *row, uint32_t valid, uint32_t n, float maximum_before, float *maximum)
{
    return kernels()->softmax_part(row, valid, n, maximum_before, maximum);
}

void wk_softmax_backward(float *row, float *grad, uint32_t valid, uint32_t n, float lse, float delta, float scale)
{
    kernels()->softmax_backward(row, grad, valid, n, lse, delta, scale);
}

void wk_transpose(const float *x, uint64_t stride, uint32_t rows, uint32_t columns, float *out)
{
    kernels()->transpose(x, stride, rows, columns, out);
}

void wk_scale(float *x, uint32_t n, float factor)
{
    kernels()->scale(x, n, factor);
}

void wk_add(float *x, const float *y, uint64_t n)
{
    kernels()->add(x, y, n);
}

float wk_dot(const float *x, const float *y, uint32_t n)
{
    return kernels()->dot(x, y, n);
}

double wk_cross_entropy(float *row, uint32_t vocab, uint32_t target, float scale)
{
    return kernels()->cross_entropy(row, vocab, target, scale);
}

void wk_adamw_update(float *theta, const float *g, float *m, float *v, uint64_t n, const struct wk_adamw_factors *f)
{
    kernels()->adamw_update(theta, g, m, v, n, f);
}

double wk_sum_squares(const float *x, uint64_t n)
{
    return kernels()->sum_squares(x, n);
}
