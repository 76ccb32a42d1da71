/* Hashes used on the wire, for layouts and for fragment versions: XXH3 (libxxhash). Pure, any thread. */
#ifndef DL_COMMON_HASH_H
#define DL_COMMON_HASH_H

#include <stddef.h>
#include <stdint.h>

/* XXH3-64 of `size` bytes; `seed` chains: hash(b, hash(a, 0)). Stable over machines and versions. */
uint64_t dl_hash64(const void *bytes, size_t size, uint64_t seed);

/* The same hash of bytes that come in pieces. At an address that is a multiple of 64 (dl_alloc_aligned). */
struct dl_hash_stream {
    _Alignas(64) unsigned char state[576];
};
void dl_hash_stream_init(struct dl_hash_stream *stream, uint64_t seed);
void dl_hash_stream_add(struct dl_hash_stream *stream, const void *bytes, size_t size);
uint64_t dl_hash_stream_result(const struct dl_hash_stream *stream);

#endif
