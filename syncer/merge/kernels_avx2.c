#ifdef __x86_64__
#pragma GCC target("avx2")
#include <immintrin.h>
#define STREAM(to, from)                                                                                               \
    do {                                                                                                               \
        _mm256_stream_ps((to), _mm256_loadu_ps(from));                                                                 \
        _mm256_stream_ps((to) + 8, _mm256_loadu_ps((from) + 8));                                                       \
    } while (0)
#define FENCE() _mm_sfence()
#define NIBBLES_BY_SHIFT
#define KERNELS sy_merge_avx2
#include "syncer/merge/kernels.inc"
#endif
