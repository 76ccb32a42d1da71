#ifdef __SSE2__
#include <emmintrin.h>
#define STREAM(to, from)                                                                                               \
    do {                                                                                                               \
        for (size_t lane = 0; lane < 16; lane += 4) {                                                                  \
            _mm_stream_ps((to) + lane, _mm_loadu_ps((from) + lane));                                                   \
        }                                                                                                              \
    } while (0)
#define FENCE() _mm_sfence()
#else
#define STREAM(to, from) memcpy((to), (from), 16 * sizeof(float))
#define FENCE() ((void)0)
#endif
#define KERNELS sy_merge_portable
#include "syncer/merge/kernels.inc"
