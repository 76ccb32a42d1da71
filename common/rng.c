#include "common/rng.h"

#include <math.h>
#include <string.h>

#include "common/hash.h"

static void philox(uint32_t out[4], const uint32_t counter[4], uint64_t key)
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)UINT32_C(0xD2511F53) * c0;
        uint64_t p1 = (uint64_t)UINT32_C(0xCD9E8D57) * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        uint32_t n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c0 = n0;
        c1 = (uint32_t)p1;
        c2 = n2;
        c3 = (uint32_t)p0;
        k0 += UINT32_C(0x9E3779B9);
        k1 += UINT32_C(0xBB67AE85);
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

void dl_rng_init(struct dl_rng *rng, uint64_t key, uint64_t stream)
{
    memset(rng, 0, sizeof *rng);
    rng->key = key;
    rng->stream = stream;
}

uint32_t dl_rng_u32(struct dl_rng *rng)
{
    if (rng->left == 0) {
        uint32_t counter[4] = {(uint32_t)rng->counter, (uint32_t)(rng->counter >> 32), (uint32_t)rng->stream,
                               (uint32_t)(rng->stream >> 32)};
        philox(rng->block, counter, rng->key);
        rng->counter++;
        rng->left = 4;
    }
    return rng->block[--rng->left];
}

uint64_t dl_rng_u64(struct dl_rng *rng)
{
    uint64_t high = dl_rng_u32(rng);
    return high << 32 | dl_rng_u32(rng);
}

uint64_t dl_rng_below(struct dl_rng *rng, uint64_t bound)
{
    /* Values under `reject` would make the low residues more likely. */
    uint64_t reject = (UINT64_MAX - bound + 1) % bound;
    uint64_t value;
    do {
        value = dl_rng_u64(rng);
    } while (value < reject);
    return value % bound;
}

float dl_rng_uniform(struct dl_rng *rng)
{
    return (float)(dl_rng_u32(rng) >> 8) * 0x1p-24f;
}

float dl_rng_normal(struct dl_rng *rng)
{
    double u = ((double)dl_rng_u32(rng) + 1.0) * 0x1p-32; /* (0, 1], so that the logarithm is finite. */
    double v = (double)dl_rng_u32(rng) * 0x1p-32;
    return (float)(sqrt(-2.0 * log(u)) * cos(2.0 * M_PI * v));
}

uint64_t dl_rng_stream(const char *purpose, uint64_t a, uint64_t b)
{
    uint64_t parts[2] = {a, b};
    return dl_hash64(parts, sizeof parts, dl_hash64(purpose, strlen(purpose), 0));
}
