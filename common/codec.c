#include "common/codec.h"

#include <assert.h>

#include "common/codec_kernels.h"
#include "common/copy.h"
#include "common/isa.h"
#include "common/mem.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "kernels store float32 as it lies in memory");

static const struct dl_codec_kernels *kernels(void)
{
    return DL_ISA_PICK(&dl_codec_portable, &dl_codec_avx2, &dl_codec_avx512);
}

size_t dl_codec_block_bytes(enum dl_codec codec)
{
    switch (codec) {
    case DL_CODEC_NONE: return DL_BLOCK * 4;
    case DL_CODEC_BF16: return DL_BLOCK * 2;
    case DL_CODEC_INT8: return 4 + DL_BLOCK;
    case DL_CODEC_INT4: return 4 + DL_BLOCK / 2;
    }
    assert(!"unknown codec");
    return 0;
}

uint64_t dl_codec_bytes(enum dl_codec codec, uint64_t padded_elements)
{
    assert(padded_elements % DL_BLOCK == 0);
    return padded_elements / DL_BLOCK * dl_codec_block_bytes(codec);
}

void dl_codec_encode(enum dl_codec codec, const float *values, size_t blocks, uint8_t *out)
{
    kernels()->encode[codec](NULL, values, blocks, out);
}

void dl_codec_encode_delta(enum dl_codec codec, struct dl_encoded base, const float *theta, size_t blocks, uint8_t *out)
{
    if (base.codec == DL_CODEC_NONE) {
        kernels()->encode[codec]((const float *)(const void *)base.bytes, theta, blocks, out);
        return;
    }
    if (base.codec == DL_CODEC_BF16) {
        kernels()->encode_from_bf16[codec](base.bytes, theta, blocks, out);
        return;
    }
    for (size_t b = 0; b < blocks; b++) {
        _Alignas(64) float values[DL_BLOCK];
        dl_codec_decode(base.codec, base.bytes + b * dl_codec_block_bytes(base.codec), 1, values);
        kernels()->encode[codec](values, theta + b * DL_BLOCK, 1, out + b * dl_codec_block_bytes(codec));
    }
}

void dl_codec_decode(enum dl_codec codec, const uint8_t *encoded, size_t blocks, float *values)
{
    kernels()->decode[codec](encoded, blocks, values);
}

void dl_codec_decode_past(struct dl_encoded encoded, size_t count, float *values)
{
    if (encoded.codec == DL_CODEC_NONE) {
        dl_copy_past(values, encoded.bytes, count * sizeof *values);
        return;
    }
    if (encoded.codec == DL_CODEC_BF16) {
        kernels()->widen_past(encoded.bytes, count, values);
        return;
    }
    for (size_t done = 0; done < count; done += DL_BLOCK, encoded.bytes += dl_codec_block_bytes(encoded.codec)) {
        _Alignas(64) float block[DL_BLOCK];
        dl_codec_decode(encoded.codec, encoded.bytes, 1, block);
        dl_copy_past(values + done, block, DL_MIN(count - done, (size_t)DL_BLOCK) * sizeof *values);
    }
}

double dl_codec_sum_squares(enum dl_codec codec, const uint8_t *encoded, size_t blocks, double before)
{
    return kernels()->sum_squares[codec](encoded, blocks, before);
}
