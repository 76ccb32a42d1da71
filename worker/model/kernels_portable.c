#define KERNELS wk_kernels_portable
#include "worker/model/kernels.inc"
