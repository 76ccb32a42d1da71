/* Hashes used on the wire, for layouts and for fragment versions: XXH3 (libxxhash). Pure, any thread. */
#ifndef DL_COMMON_HASH_H
#define DL_COMMON_HASH_H

#include <stddef.h>
#include <stdint.h>

/* XXH3-64 of `size` bytes; `seed` chains: hash(b, hash(a, 0)). Stable over machines and versions. */
uint64_t dl_hash64(const void *bytes, size_t size, uint64_t seed);

#endif
