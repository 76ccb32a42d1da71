/* dl_codec: how float32 arrays travel.
 *
 * none: float32, 4 bytes an element. bf16: round to nearest even, 2 bytes. int8, int4: blocks of DL_BLOCK elements,
 * each block a float32 scale followed by 256 signed bytes, or by 128 bytes in which byte i holds element i in its low
 * nibble and element i + 128 in its high one (two's complement, -7..7). Arrays are whole blocks, so encoded bytes can
 * be produced and consumed block by block. All little-endian; arrays need no alignment.
 *
 * scale = largest magnitude / 127 (int8) or / 7 (int4); q = round to nearest even of x * (127 or 7 / largest
 * magnitude). A block whose largest magnitude is below 2^-100 encodes as zeros.
 *
 * Run-time choice between AVX-512, AVX2 and portable code with equal bits (common/isa.h). Pure; any thread; no
 * allocation. */
#ifndef DL_COMMON_CODEC_H
#define DL_COMMON_CODEC_H

#include <stddef.h>
#include <stdint.h>

#include "common/layout.h"
#include "common/spec.h"

/* Encoded bytes of one block of DL_BLOCK elements: 1024, 512, 260, 132. */
size_t dl_codec_block_bytes(enum dl_codec codec);

/* Encoded bytes of `padded_elements` (a multiple of DL_BLOCK). */
uint64_t dl_codec_bytes(enum dl_codec codec, uint64_t padded_elements);

/* Encodes `blocks` blocks of `values`. Non-finite input encodes so that decoding gives a non-finite value again (in the
 * quantised codecs by a NaN scale), so that a receiver can see and refuse it. */
void dl_codec_encode(enum dl_codec codec, const float *values, size_t blocks, uint8_t *out);

/* Encodes base - theta (the delta that a push carries) in one pass. The base's values are those that `base` decodes to: as
 * an update brought them, in whatever codec. */
struct dl_encoded {
    enum dl_codec codec;
    const uint8_t *bytes;
};
void dl_codec_encode_delta(enum dl_codec codec, struct dl_encoded base, const float *theta, size_t blocks,
                           uint8_t *out);

void dl_codec_decode(enum dl_codec codec, const uint8_t *encoded, size_t blocks, float *values);

/* The first `count` elements (the last block need not be whole), to memory that nobody reads soon: past the caches
 * (common/copy.h). */
void dl_codec_decode_past(struct dl_encoded encoded, size_t count, float *values);

/* Sum of squares of the decoded values, added to `before`: float32 within a block in a fixed order (exact in the
 * quantised codecs), blocks added one after the other in double. So a slice may be summed as its chunks arrive,
 * `before` carrying the sum so far, and the result has the same bits for every way of cutting it into whole blocks. Any
 * non-finite element makes the result non-finite; so does a magnitude beyond 1.8e19, whose square leaves float32. */
double dl_codec_sum_squares(enum dl_codec codec, const uint8_t *encoded, size_t blocks, double before);

#endif
