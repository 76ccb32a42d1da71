/* diloco-worker: a learner, an evaluator, or a sampler of text. */
#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>

#include "common/exit_codes.h"
#include "common/log.h"
#include "common/version.h"
#include "worker/link/diloco.h"
#include "worker/model/blas.h"
#include "worker/train/args.h"
#include "worker/train/evaluator.h"
#include "worker/train/learner.h"
#include "worker/train/sampler.h"
#include "worker/train/session.h"

/* The library's header stands alone, so that it has the number once more. */
static_assert(__builtin_strcmp(DILOCO_VERSION, DL_VERSION) == 0, "the library's version is not that of the programs");

/* Which kernels compute, said once. */
static void log_blas(const struct wk_blas_report *blas)
{
    dl_info("kernels core=%s gflops_per_thread=%.0f%s%s", blas->core, blas->gflops,
            blas->restarted ? " chosen_by=restart" : "", blas->user_set ? " chosen_by=OPENBLAS_CORETYPE" : "");
    if (blas->warning[0] != 0) {
        dl_warn("kernels: %s", blas->warning);
    }
}

int main(int argc, char **argv)
{
    struct wk_args args;
    struct dl_err err;
    struct wk_blas_report blas;
    /* A process that has restarted itself for better kernels would be called "exe" in lists of processes. */
    prctl(PR_SET_NAME, "diloco-worker");
    /* Arguments first, so that a wrong one is named before anything is measured. */
    if (wk_args_parse(argc, argv, &args, &err) != DL_OK) {
        fprintf(stderr, "diloco-worker: %s\n", err.text);
        return DL_EXIT_USAGE;
    }
    if (args.help) {
        wk_args_help(stdout, args.command);
        return DL_EXIT_OK;
    }
    if (args.version) {
        puts("diloco-worker " DL_VERSION);
        return DL_EXIT_OK;
    }
    dl_log_init("-", "worker", args.log_level);
    signal(SIGPIPE, SIG_IGN); /* A peer that has gone is seen by the write that failed. */
    enum dl_rc rc = wk_blas_init(argc, argv, &blas, &err);
    if (rc == DL_OK && args.command != WK_GENERATE) {
        log_blas(&blas);
    }
    if (rc != DL_OK) {
        dl_error("start failed: %s", err.text);
        return wk_exit_of_rc(rc);
    }
    switch (args.command) {
    case WK_LEARN: return wk_learn(&args);
    case WK_EVALUATE: return wk_evaluate(&args);
    case WK_GENERATE: return wk_generate(&args);
    }
    return DL_EXIT_USAGE;
}
