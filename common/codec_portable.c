#ifdef __x86_64__
#include <emmintrin.h>
#define STREAM(to, value)                                                                                              \
    ({                                                                                                                 \
        const f16 value_ = (value);                                                                                    \
        const float *part_ = (const void *)&value_;                                                                    \
        float *to_ = (void *)(to);                                                                                     \
        for (int p_ = 0; p_ < LANES; p_ += 4) {                                                                        \
            _mm_stream_ps(to_ + p_, _mm_loadu_ps(part_ + p_));                                                         \
        }                                                                                                              \
    })
#define FENCE() _mm_sfence()
#else
#define STREAM(to, value) (*(f16 *)(void *)(to) = (value))
#define FENCE() ((void)0)
#endif
#define KERNELS dl_codec_portable
#include "common/codec_kernels.inc"
