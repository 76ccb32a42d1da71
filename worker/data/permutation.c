#include "worker/data/permutation.h"

#include <assert.h>

#include "common/rng.h"

void wk_permutation_init(struct wk_permutation *permutation, uint64_t seed, uint64_t epoch, uint64_t size)
{
    assert(size >= 1 && size <= WK_PERMUTATION_SIZE_MAX);
    permutation->size = size;
    permutation->half_bits = 1;
    while (UINT64_C(1) << (2 * permutation->half_bits) < size) {
        permutation->half_bits++;
    }
    permutation->half_mask = (UINT64_C(1) << permutation->half_bits) - 1;
    struct dl_rng rng;
    dl_rng_init(&rng, seed, dl_rng_stream("data order", epoch, 0));
    for (int i = 0; i < WK_PERMUTATION_ROUNDS; i++) {
        permutation->keys[i] = dl_rng_u64(&rng);
    }
}

/* Finalizer of splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return x ^ (x >> 31);
}

uint64_t wk_permutation_at(const struct wk_permutation *permutation, uint64_t position)
{
    assert(position < permutation->size);
    uint64_t value = position;
    /* The domain is at most four times as large as needed, so that a few turns suffice on average; that each walk ends
     * follows from the network being a bijection: it comes back to `position` itself at the latest. */
    do {
        uint64_t left = value >> permutation->half_bits, right = value & permutation->half_mask;
        for (int i = 0; i < WK_PERMUTATION_ROUNDS; i++) {
            uint64_t next = left ^ (mix(right ^ permutation->keys[i]) & permutation->half_mask);
            left = right;
            right = next;
        }
        value = left << permutation->half_bits | right;
    } while (value >= permutation->size);
    return value;
}
