#ifdef __x86_64__
#pragma GCC target("avx2")
#define KERNELS dl_codec_avx2
#include "common/codec_kernels.inc"
#endif
