#define XXH_INLINE_ALL
#include "common/hash.h"

#include <xxhash.h>

uint64_t dl_hash64(const void *bytes, size_t size, uint64_t seed)
{
    return XXH3_64bits_withSeed(bytes, size, seed);
}
