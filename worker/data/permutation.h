/* wk_permutation: a random order of 0 .. size-1 that takes no memory.
 *
 * A Feistel network over the smallest power of four that holds `size`, walked until the value falls below it (Black and
 * Rogaway 2002, "Ciphers with arbitrary finite domains"). A function of (seed, epoch, size, position) alone.
 *
 * Pure; any thread. Layer: worker/data. */
#ifndef WK_DATA_PERMUTATION_H
#define WK_DATA_PERMUTATION_H

#include <stdint.h>

#define WK_PERMUTATION_ROUNDS 6
#define WK_PERMUTATION_SIZE_MAX (UINT64_C(1) << 62)

struct wk_permutation {
    uint64_t size;
    uint32_t half_bits;
    uint64_t half_mask;
    uint64_t keys[WK_PERMUTATION_ROUNDS];
};

/* `size`: 1 .. WK_PERMUTATION_SIZE_MAX. Each epoch has its own order. */
void wk_permutation_init(struct wk_permutation *permutation, uint64_t seed, uint64_t epoch, uint64_t size);

/* The element at `position` < size: a bijection. */
uint64_t wk_permutation_at(const struct wk_permutation *permutation, uint64_t position);

#endif
