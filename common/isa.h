/* dl_isa: which instruction set the numeric kernels use. All give equal bits: the choice is one of speed.
 *
 * Any thread. Forcing is for tests, before kernels run in other threads. */
#ifndef DL_COMMON_ISA_H
#define DL_COMMON_ISA_H

#include <stdbool.h>

enum dl_isa { DL_ISA_PORTABLE, DL_ISA_AVX2, DL_ISA_AVX512 };
#define DL_ISA_COUNT 3

/* What kernels use now: the best that processor and build offer, unless forced. */
enum dl_isa dl_isa_current(void);

/* Makes kernels use `isa`; false, and nothing changes, when this machine or build does not offer it. */
bool dl_isa_force(enum dl_isa isa);

/* The implementation to use now: DL_ISA_PICK(&x_portable, &x_avx2, &x_avx512). Only x86-64 has the last two. */
#ifdef __x86_64__
#define DL_ISA_PICK(portable, avx2, avx512)                                                                            \
    ({                                                                                                                 \
        enum dl_isa isa_ = dl_isa_current();                                                                           \
        isa_ == DL_ISA_AVX512 ? (avx512) : isa_ == DL_ISA_AVX2 ? (avx2) : (portable);                                  \
    })
#else
#define DL_ISA_PICK(portable, avx2, avx512) (portable)
#endif

const char *dl_isa_name(enum dl_isa isa); /* "portable", "avx2", "avx512" */

#endif
