#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,prefer-vector-width=512")
#include <immintrin.h>
#define STREAM(to, value) _mm512_stream_ps((void *)(to), (__m512)(value))
#define FENCE() _mm_sfence()
#define KERNELS dl_codec_avx512
#include "common/codec_kernels.inc"
#endif
