/* Inside of wk_kernels: one table an instruction set. */
#ifndef WK_MODEL_KERNELS_TABLE_H
#define WK_MODEL_KERNELS_TABLE_H

#include "worker/model/kernels.h"

struct wk_kernels {
    void (*exp_rows)(float *x, uint64_t n);
    void (*rmsnorm)(const float *x, const float *gain, float epsilon, uint64_t rows, uint32_t width, float *out,
                    float *rstd);
    void (*rmsnorm_backward)(const float *dout, const float *x, const float *rstd, const float *gain, uint64_t rows,
                             uint32_t width, int accumulate, float *dx, float *dgain);
    void (*rope)(float *x, uint64_t stride, const float *cosine, const float *sine, uint64_t rows, uint32_t head_width,
                 int direction);
    void (*swiglu)(const float *gate_up, uint64_t rows, uint32_t width, float *hidden);
    void (*swiglu_backward)(float *gate_up, float *dhidden, uint64_t rows, uint32_t width);
    float (*softmax_part)(float *row, uint32_t valid, uint32_t n, float maximum_before, float *maximum);
    void (*softmax_backward)(float *row, float *grad, uint32_t valid, uint32_t n, float lse, float delta, float scale);
    void (*transpose)(const float *x, uint64_t stride, uint32_t rows, uint32_t columns, float *out);
    void (*scale)(float *x, uint32_t n, float factor);
    void (*add)(float *x, const float *y, uint64_t n);
    float (*dot)(const float *x, const float *y, uint32_t n);
    double (*cross_entropy)(float *row, uint32_t vocab, uint32_t target, float scale);
    void (*adamw_update)(float *theta, const float *g, float *m, float *v, uint64_t n,
                         const struct wk_adamw_factors *f);
    double (*sum_squares)(const float *x, uint64_t n);
};

extern const struct wk_kernels wk_kernels_portable;
#ifdef __x86_64__
extern const struct wk_kernels wk_kernels_avx2;
extern const struct wk_kernels wk_kernels_avx512;
#endif

#endif
