/* Little-endian numbers in files and messages, byte by byte: the same on every machine, at any alignment.
 *
 * Pure, any layer. */
#ifndef DL_COMMON_LE_H
#define DL_COMMON_LE_H

#include <stddef.h>
#include <stdint.h>

/* The lowest `bytes` (at most 8) bytes of the value. */
static inline void dl_le_put(uint8_t *out, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static inline uint64_t dl_le_get(const uint8_t *in, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++) {
        value |= (uint64_t)in[i] << (8 * i);
    }
    return value;
}

/* For where there are many: compilers make one load of it. */
static inline uint32_t dl_le_u32(const uint8_t *in)
{
    return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

#endif
