/* The merge's inner loops, once per instruction set; for merge.c alone. Blocks are of DL_BLOCK elements. */
#ifndef DL_SYNCER_MERGE_KERNELS_H
#define DL_SYNCER_MERGE_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SY_GROUP_MAX 8 /* Pushes of one codec that are read side by side, their sum kept in registers. */

/* Constants of the outer step, in float32. */
struct sy_outer_factors {
    float rate;                  /* lr; adamw: lr / (1 - beta1^t). */
    float keep;                  /* 1 - lr * weight decay. */
    float beta1, one_less_beta1; /* nesterov: momentum. */
    float beta2, one_less_beta2;
    float root_correction; /* adamw: 1 / sqrt(1 - beta2^t). */
    float epsilon;
};

/* sums = sums + sum over m of factors[m] * decoded(sources[m]), in that order; without `adds`, sums starts at
 * zero. count >= 1. Meanwhile the same blocks of `ahead` (NULL where there is nothing) are fetched into the cache: what
 * the outer step will read, so that it need not wait for memory where decoding keeps the processor busy. */
#define SY_AHEAD 3
typedef void (*sy_accumulate_fn)(float *sums, const uint8_t *const *sources, const float *factors, uint32_t count,
                                 size_t blocks, bool adds, const float *const ahead[SY_AHEAD]);

/* The outer gradient is gain * values; values becomes the new Theta; moments are updated in place. */
typedef void (*sy_outer_fn)(const struct sy_outer_factors *factors, float gain, const float *theta, float *values,
                            float *first, float *second, size_t blocks);

struct sy_merge_kernels {
    sy_accumulate_fn accumulate[4]; /* By enum dl_codec. */
    sy_outer_fn outer[4];           /* By enum dl_outer_type. */
    /* Copies past the caches; `to` is aligned to 64 bytes. Visible to other threads after `fence`. */
    void (*stream)(float *to, const float *from, size_t blocks);
    void (*fence)(void);
};

extern const struct sy_merge_kernels sy_merge_portable;
#ifdef __x86_64__
extern const struct sy_merge_kernels sy_merge_avx2, sy_merge_avx512;
#endif

#endif
