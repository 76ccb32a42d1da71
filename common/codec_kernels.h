/* The codec's inner loops, once per instruction set; for codec.c alone. `base` is NULL (never in encode_from_bf16), or what
 * is encoded is base - values. widen_past: `count` elements of bf16, past the caches. */
#ifndef DL_COMMON_CODEC_KERNELS_H
#define DL_COMMON_CODEC_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#define DL_CODEC_COUNT 4

struct dl_codec_kernels { /* Indexed by enum dl_codec. */
    void (*encode[DL_CODEC_COUNT])(const float *base, const float *values, size_t blocks, uint8_t *out);
    void (*encode_from_bf16[DL_CODEC_COUNT])(const uint8_t *base, const float *values, size_t blocks, uint8_t *out);
    void (*decode[DL_CODEC_COUNT])(const uint8_t *encoded, size_t blocks, float *values);
    void (*widen_past)(const uint8_t *encoded, size_t count, float *values);
    double (*sum_squares[DL_CODEC_COUNT])(const uint8_t *encoded, size_t blocks, double before);
};

extern const struct dl_codec_kernels dl_codec_portable;
#ifdef __x86_64__
extern const struct dl_codec_kernels dl_codec_avx2, dl_codec_avx512;
#endif

#endif
