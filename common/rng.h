/* dl_rng: counter-based random numbers (Philox4x32-10, Salmon et al. 2011).
 *
 * The n-th number is a function of (key, stream, n) alone: no hidden state, so that a value can be drawn again in a replay
 * or on another machine. Key it by (job seed), stream it by (purpose, learner id, step). Pure, any thread. */
#ifndef DL_COMMON_RNG_H
#define DL_COMMON_RNG_H

#include <stdint.h>

struct dl_rng {
    uint64_t key;
    uint64_t stream;
    uint64_t counter; /* Blocks of four drawn so far. */
    uint32_t block[4];
    uint32_t left; /* Unused words in `block`. */
};

void dl_rng_init(struct dl_rng *rng, uint64_t key, uint64_t stream);
uint32_t dl_rng_u32(struct dl_rng *rng);
uint64_t dl_rng_u64(struct dl_rng *rng);

/* Uniform over 0 .. bound-1 without bias; `bound` >= 1. */
uint64_t dl_rng_below(struct dl_rng *rng, uint64_t bound);

/* Uniform in [0, 1). */
float dl_rng_uniform(struct dl_rng *rng);

/* Standard normal (Box-Muller, in double, rounded once). */
float dl_rng_normal(struct dl_rng *rng);

/* A stream number from parts, e.g. dl_rng_stream("data", learner, step). */
uint64_t dl_rng_stream(const char *purpose, uint64_t a, uint64_t b);

#endif
