#ifdef __x86_64__
#pragma GCC target("avx512f")
#define HASH_IMPL dl_hash_avx512
#include "common/hash_impl.inc"
#endif
