#define HASH_IMPL dl_hash_portable
#include "common/hash_impl.inc"
