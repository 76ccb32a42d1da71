#define KERNELS dl_codec_portable
#include "common/codec_kernels.inc"
