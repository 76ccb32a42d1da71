#ifdef __x86_64__
#pragma GCC target("avx2")
#define HASH_IMPL dl_hash_avx2
#include "common/hash_impl.inc"
#endif
