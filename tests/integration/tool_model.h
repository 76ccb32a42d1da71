/* What the tools that write models for other programs to compare with have in common. */
#ifndef DL_TESTS_INTEGRATION_TOOL_MODEL_H
#define DL_TESTS_INTEGRATION_TOOL_MODEL_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/rng.h"
#include "worker/model/blas.h"
#include "worker/model/model.h"

struct tool_case {
    const char *name;
    struct dl_model_spec spec;
};

static inline void tool_check(enum dl_rc rc, const struct dl_err *err)
{
    if (rc != DL_OK) {
        fprintf(stderr, "%s: %s\n", program_invocation_short_name, err->text);
        exit(1);
    }
}

/* Tokens at random, and the same as float32, the only type that is written: exact for whole numbers below 2^24. */
static inline void tool_draw(const struct dl_model_spec *spec, uint64_t seed, uint64_t stream, uint32_t *tokens,
                             float *written, uint32_t count)
{
    struct dl_rng rng;
    dl_rng_init(&rng, seed, stream);
    for (uint32_t i = 0; i < count; i++) {
        tokens[i] = (uint32_t)dl_rng_below(&rng, spec->vocab_size);
        written[i] = (float)tokens[i];
    }
}

/* The program: each case into the folder that it is called with. */
static inline int tool_main(int argc, char **argv, const struct tool_case *cases, size_t count,
                            void (*run)(const char *directory, const struct tool_case *c))
{
    struct wk_blas_report report;
    struct dl_err err;
    tool_check(wk_blas_init(argc, argv, &report, &err), &err);
    if (argc != 2) {
        fprintf(stderr, "usage: %s DIR\n", program_invocation_short_name);
        return 2;
    }
    for (size_t i = 0; i < count; i++) {
        run(argv[1], &cases[i]);
        printf("%s\n", cases[i].name);
    }
    return 0;
}

#endif
