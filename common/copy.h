/* dl_copy_past: copies to memory that nobody reads soon, past the caches: a line that is written whole need not be read before,
 * and what is in the cache stays there. Pure; any thread; any layer. */
#ifndef DL_COMMON_COPY_H
#define DL_COMMON_COPY_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>

/* As memcpy; any alignment. Other threads see it by whatever they synchronise with, as with any store. */
static inline void dl_copy_past(void *to, const void *from, size_t bytes)
{
    uint8_t *out = to;
    const uint8_t *in = from;
    size_t done = (64 - (uintptr_t)out % 64) % 64;
    done = done < bytes ? done : bytes;
    memcpy(out, in, done);
    for (; done + 64 <= bytes; done += 64) {
        const __m128i *load = (const __m128i *)(const void *)(in + done);
        __m128i *store = (__m128i *)(void *)(out + done);
        __m128i a = _mm_loadu_si128(load), b = _mm_loadu_si128(load + 1);
        __m128i c = _mm_loadu_si128(load + 2), d = _mm_loadu_si128(load + 3);
        _mm_stream_si128(store, a);
        _mm_stream_si128(store + 1, b);
        _mm_stream_si128(store + 2, c);
        _mm_stream_si128(store + 3, d);
    }
    memcpy(out + done, in + done, bytes - done);
    _mm_sfence();
}
#else
static inline void dl_copy_past(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}
#endif

#endif
