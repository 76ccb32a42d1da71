/* dl_content, dl_leaves: hashes of bytes that are read once and checked twice, as parts and as a whole.
 *
 * A content (a fragment's encoded bytes, an array in a file) is cut into leaves of DL_LEAF_BYTES from its beginning on; the
 * last one may be shorter. Of each leaf the XXH3-64 (seed 0) is taken; everything else is made of those. With || for "followed
 * by", and numbers little-endian u64:
 *
 *     content hash     = XXH3-64(leaf 0 || leaf 1 || ... || bytes of the content, seed 0)
 *     hash of a part   = XXH3-64(the part's own leaves, seed), of a part of up to DL_LEAVES_BYTES_MAX
 *
 * A part is cut from its own beginning on. So the leaves of parts that begin at multiples of DL_LEAF_BYTES are leaves of the
 * content: whoever checks the parts has the content's hash for nothing. Leaves do not depend on each other: they may be hashed
 * in any order, by any thread, as they come.
 *
 * Pure; no allocation; an object is one thread's at a time. At addresses that are multiples of 64 (dl_alloc_aligned). */
#ifndef DL_COMMON_CONTENT_H
#define DL_COMMON_CONTENT_H

#include <stddef.h>
#include <stdint.h>

#include "common/hash.h"

#define DL_LEAF_BYTES 16384u /* Hashed while it is in the first-level cache, for whom that matters. */
#define DL_LEAVES_MAX 64
#define DL_LEAVES_BYTES_MAX (DL_LEAVES_MAX * DL_LEAF_BYTES) /* Of a part. */

struct dl_leaves {              /* Of one part. */
    struct dl_hash_stream open; /* The leaf that has begun. */
    uint32_t bytes;             /* So far. */
    uint8_t hashes[8 * DL_LEAVES_MAX];
};
void dl_leaves_begin(struct dl_leaves *leaves);
/* The part's next bytes, in pieces of any size; at most DL_LEAVES_BYTES_MAX in all. */
void dl_leaves_add(struct dl_leaves *leaves, const void *bytes, size_t size);
/* Of the part as far as it has been added. */
uint64_t dl_leaves_hash(struct dl_leaves *leaves, uint64_t seed);

struct dl_content {
    struct dl_hash_stream folded; /* Leaves of the parts before `last`. */
    struct dl_leaves last;
    uint64_t bytes;
};
void dl_content_begin(struct dl_content *content);
/* The next bytes, in pieces of any size. */
void dl_content_add(struct dl_content *content, const void *bytes, size_t size);
/* The next bytes are those of a part whose leaves are there. What came before it (by dl_content_add_leaves alone) must be whole
 * leaves. */
void dl_content_add_leaves(struct dl_content *content, struct dl_leaves *leaves);
/* Of the content as far as it has been added; more may follow. */
uint64_t dl_content_result(const struct dl_content *content);

/* All at once. */
uint64_t dl_content_hash(const void *bytes, size_t size);

#endif
