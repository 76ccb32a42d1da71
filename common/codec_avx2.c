#ifdef __x86_64__
#pragma GCC target("avx2")
#include <immintrin.h>
#define STREAM(to, value)                                                                                              \
    ({                                                                                                                 \
        const f16 value_ = (value);                                                                                    \
        const float *half_ = (const void *)&value_;                                                                    \
        float *to_ = (void *)(to);                                                                                     \
        _mm256_stream_ps(to_, _mm256_loadu_ps(half_));                                                                 \
        _mm256_stream_ps(to_ + 8, _mm256_loadu_ps(half_ + 8));                                                         \
    })
#define FENCE() _mm_sfence()
#define KERNELS dl_codec_avx2
#include "common/codec_kernels.inc"
#endif
