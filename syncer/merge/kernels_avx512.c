#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,prefer-vector-width=512")
#include <immintrin.h>
#define STREAM(to, from) _mm512_stream_ps((to), _mm512_loadu_ps(from))
#define FENCE() _mm_sfence()
#define NIBBLES_BY_TABLE
#define KERNELS sy_merge_avx512
#include "syncer/merge/kernels.inc"
#endif
