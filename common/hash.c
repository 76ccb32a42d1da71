#include "common/hash.h"

#include "common/hash_impl.h"
#include "common/isa.h"

static const struct dl_hash_impl *impl(void)
{
    return DL_ISA_PICK(&dl_hash_portable, &dl_hash_avx2, &dl_hash_avx512);
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
