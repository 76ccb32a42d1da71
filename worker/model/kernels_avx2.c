#ifdef __x86_64__
#pragma GCC target("avx2")
#define KERNELS wk_kernels_avx2
#include "worker/model/kernels.inc"
#endif
