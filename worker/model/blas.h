/* wk_blas: makes sure that OpenBLAS runs kernels that suit this processor, and that they compute right.
 *
 * OpenBLAS chooses its kernels when it is loaded and does not know processors newer than itself; the choice can be
 * changed only through OPENBLAS_CORETYPE before the program starts. So the process checks, and restarts itself once
 * with a better setting where that passes. Processes of a run do so once for all of them, where they have a cache
 * (worker/data/cache.h). Call from the main thread, before any other thread exists. */
#ifndef WK_MODEL_BLAS_H
#define WK_MODEL_BLAS_H

#include <stdbool.h>

#include "common/err.h"

#define WK_BLAS_GUARD_ENV "DILOCO_BLAS_RESTARTED" /* In the restarted process: the core type it was restarted with. */
#define WK_BLAS_KEEP_ENV "DILOCO_BLAS_KEEP"       /* Set by a user: never restart. */
#define WK_BLAS_PROBE_ENV "DILOCO_BLAS_PROBE"     /* In a child that only tries out a core type. */

struct wk_blas_report {
    char core[32];     /* What openblas_get_corename says now. */
    char best[32];     /* What this processor's features ask for, or empty. */
    bool user_set;     /* OPENBLAS_CORETYPE came from the user, and is left alone. */
    bool restarted;    /* This process is the restarted one. */
    double gflops;     /* sgemm on one thread, measured within 50 ms. */
    char warning[256]; /* Empty, or what a person should know ("... is slow: unset OPENBLAS_CORETYPE"). */
};

/* First thing in main. Where the processor offers more than the kernels in use, a child process (this program, which
 * ends within this function) tries the better core type: kernels that crash or compute wrong results harm nobody but
 * the child. When it passes and is faster, the process restarts itself with that setting and this call does not return.
 * DL_EUNSUPPORTED: sgemm computes wrong results with the kernels in use; training must not start. Sets OpenBLAS to one
 * thread a call: the model shares work among its own threads. */
DL_MUST_CHECK enum dl_rc wk_blas_init(int argc, char **argv, struct wk_blas_report *report, struct dl_err *err);

/* Core type that the processor's features ask for: "Cooperlake", "SkylakeX", "Haswell", or "" when it has none of
 * these. */
const char *wk_blas_best_core(void);

/* Vector width class of a core name, in any case: 2 AVX-512, 1 AVX2, 0 less or unknown. */
int wk_blas_core_level(const char *core);

/* Compares sgemm of several shapes, plain and transposed, with a plain loop. `*relative_error`: largest found. */
DL_MUST_CHECK enum dl_rc wk_blas_verify(double *relative_error, struct dl_err *err);

/* GFLOP/s of sgemm on the calling thread, measured for about `milliseconds`. */
double wk_blas_measure(double milliseconds);

#endif
