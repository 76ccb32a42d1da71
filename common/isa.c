#include "common/isa.h"

#include <stdatomic.h>

#define UNDECIDED (-1)

static atomic_int current = UNDECIDED;

static bool is_offered(enum dl_isa isa)
{
    switch (isa) {
    case DL_ISA_PORTABLE: return true;
#ifdef __x86_64__
    case DL_ISA_AVX2: return __builtin_cpu_supports("avx2");
    case DL_ISA_AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    case DL_ISA_AVX2:
    case DL_ISA_AVX512: return false;
#endif
    }
    return false;
}

enum dl_isa dl_isa_current(void)
{
    int isa = atomic_load_explicit(&current, memory_order_relaxed);
    if (isa == UNDECIDED) {
        isa = is_offered(DL_ISA_AVX512) ? DL_ISA_AVX512 : is_offered(DL_ISA_AVX2) ? DL_ISA_AVX2 : DL_ISA_PORTABLE;
        atomic_store_explicit(&current, isa, memory_order_relaxed);
    }
    return (enum dl_isa)isa;
}

bool dl_isa_force(enum dl_isa isa)
{
    if (!is_offered(isa)) {
        return false;
    }
    atomic_store_explicit(&current, (int)isa, memory_order_relaxed);
    return true;
}

const char *dl_isa_name(enum dl_isa isa)
{
    switch (isa) {
    case DL_ISA_PORTABLE: return "portable";
    case DL_ISA_AVX2: return "avx2";
    case DL_ISA_AVX512: return "avx512";
    }
    return "unknown";
}
