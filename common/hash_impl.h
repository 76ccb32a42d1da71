/* The hash's inner functions, once per instruction set, with equal results; for hash.c alone. */
#ifndef DL_COMMON_HASH_IMPL_H
#define DL_COMMON_HASH_IMPL_H

#include "common/hash.h"

struct dl_hash_impl {
    uint64_t (*whole)(const void *bytes, size_t size, uint64_t seed);
    void (*init)(struct dl_hash_stream *stream, uint64_t seed);
    void (*add)(struct dl_hash_stream *stream, const void *bytes, size_t size);
    uint64_t (*result)(const struct dl_hash_stream *stream);
};

extern const struct dl_hash_impl dl_hash_portable;
#ifdef __x86_64__
extern const struct dl_hash_impl dl_hash_avx2, dl_hash_avx512;
#endif

#endif
