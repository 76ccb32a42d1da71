#ifdef __x86_64__
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,prefer-vector-width=512")
#define KERNELS wk_kernels_avx512
#include "worker/model/kernels.inc"
#endif
