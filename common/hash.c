#include "common/hash.h"

#include "common/hash_impl.h"
#include "common/isa.h"

static const struct dl_hash_impl *impl(void)
{
    switch (dl_isa_current()) {
#ifdef __x86_64__
    case DL_ISA_AVX512: return &dl_hash_avx512;
    case DL_ISA_AVX2: return &dl_hash_avx2;
#else
    case DL_ISA_AVX512:
    case DL_ISA_AVX2:
#endif
    case DL_ISA_PORTABLE: break;
    }
    return &dl_hash_portable;
}

uint64_t dl_hash64(const void *bytes, size_t size, uint64_t seed)
{
    return impl()->whole(bytes, size, seed);
}

void dl_hash_stream_init(struct dl_hash_stream *stream, uint64_t seed)
{
    impl()->init(stream, seed);
}

void dl_hash_stream_add(struct dl_hash_stream *stream, const void *bytes, size_t size)
{
    impl()->add(stream, bytes, size);
}

uint64_t dl_hash_stream_result(const struct dl_hash_stream *stream)
{
    return impl()->result(stream);
}
