/* wk_blas: makes sure that OpenBLAS runs kernels that suit this processor, and that they compute right.
 *
 * OpenBLAS chooses its kernels when it is loaded and does not know processors newer than itself; the choice can be
 * changed only through OPENBLAS_CORETYPE before the program starts. So the process checks, and restarts itself once
 * with a better setting where that passes. Call from the main thread, before any other thread exists. */
#ifndef WK_MODEL_BLAS_H
#define WK_MODEL_BLAS_H

#include <stdbool.h>

#include "common/err.h"

#define WK_BLAS_GUARD_ENV                                                                                              \
    "DILOCO_BLAS_RESTARTED"                 /* Set in the restarted process: holds the core type that was tried. */
#define WK_BLAS_KEEP_ENV "DILOCO_BLAS_KEEP" /* Set by a user: never restart. */

struct wk_blas_report {
    char core[32];     /* What openblas_get_corename says now. */
    char best[32];     /* What this processor's features ask for; equal to `core` when all is well. */
    bool user_set;     /* OPENBLAS_CORETYPE came from the user, and is left alone. */
    bool restarted;    /* This process is the restarted one. */
    double gflops;     /* sgemm on one thread, measured within 50 ms. */
    char warning[256]; /* Empty, or what a person should know ("... is slow: unset OPENBLAS_CORETYPE"). */
};

/* First thing in main. Does not return when it restarts the process. DL_EUNSUPPORTED: sgemm computes wrong results with
 * the kernels in use (and none better to try); training must not start. Sets OpenBLAS to one thread a call: the model
 * shares work among its own threads. */
DL_MUST_CHECK enum dl_rc wk_blas_init(int argc, char **argv, struct wk_blas_report *report, struct dl_err *err);

/* Core type that the processor's features ask for ("SkylakeX", "Haswell", ...), or "" when OpenBLAS' own choice stands.
 */
const char *wk_blas_best_core(void);

/* Compares sgemm of several shapes, plain and transposed, with a plain loop. `*relative_error`: largest found. */
DL_MUST_CHECK enum dl_rc wk_blas_verify(double *relative_error, struct dl_err *err);

/* GFLOP/s of sgemm on the calling thread, measured for about `milliseconds`. */
double wk_blas_measure(double milliseconds);

#endif
