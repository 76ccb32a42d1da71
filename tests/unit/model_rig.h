/* model_rig: small models for tests of the trainer, and their program: BLAS is started before any case. */
#ifndef DL_TESTS_MODEL_RIG_H
#define DL_TESTS_MODEL_RIG_H

#include <stdio.h>
#include <stdlib.h>

#include "common/rng.h"
#include "tests/unit/unit.h"
#include "worker/model/blas.h"
#include "worker/model/model.h"

static inline struct dl_model_spec small_spec(uint32_t kv_heads, bool tied)
{
    return (struct dl_model_spec){.vocab_size = 19,
                                  .width = 24,
                                  .layers = 2,
                                  .heads = 4,
                                  .kv_heads = kv_heads,
                                  .ffn_width = 21,
                                  .sequence_length = 11,
                                  .tied_embeddings = tied,
                                  .rope_theta = 100,
                                  .norm_epsilon = 1e-5,
                                  .init_std = 0.3};
}

static inline struct wk_model *make_model(const struct dl_model_spec *spec, uint32_t batch, uint32_t threads)
{
    struct dl_err err;
    struct wk_model *model = NULL;
    struct wk_model_options options = {.batch_sequences = batch, .threads = threads, .seed = 3};
    enum dl_rc rc = wk_model_new(spec, &options, &model, &err);
    if (rc != DL_OK) {
        fprintf(stderr, "%s\n", err.text);
        abort();
    }
    return model;
}

/* Several tiles in each dimension, several logits blocks' worth of tasks. */
static inline struct dl_model_spec middle_spec(void)
{
    return (struct dl_model_spec){.vocab_size = 300,
                                  .width = 96,
                                  .layers = 2,
                                  .heads = 6,
                                  .kv_heads = 3,
                                  .ffn_width = 530,
                                  .sequence_length = 70,
                                  .rope_theta = 10000,
                                  .norm_epsilon = 1e-5,
                                  .init_std = 0.05};
}

/* Gains differ from one, so that a gain that is left out shows. */
static inline void vary_norms(struct wk_model *model)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 5, 5);
    for (uint32_t i = 0; i < wk_model_tensor_count(model); i++) {
        const struct dl_tensor *tensor = &wk_model_tensors(model)[i];
        for (uint64_t j = 0; tensor->rank == 1 && j < tensor->shape[0]; j++) {
            wk_model_parameters(model)[i][j] = 0.5f + dl_rng_uniform(&rng);
        }
    }
}

static inline void draw_tokens(const struct dl_model_spec *spec, uint64_t stream, uint64_t count, uint32_t *tokens)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 11, stream);
    for (uint64_t i = 0; i < count; i++) {
        tokens[i] = (uint32_t)dl_rng_below(&rng, spec->vocab_size);
    }
}

static inline int model_main(int argc, char **argv, const char *suite_name, const struct unit_case *cases, size_t count)
{
    struct wk_blas_report report;
    struct dl_err err;
    if (wk_blas_init(argc, argv, &report, &err) != DL_OK) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    return unit_main(suite_name, cases, count);
}

/* UNIT_MAIN for whatever multiplies matrices. */
#define MODEL_MAIN(suite_name, ...)                                                                                    \
    int main(int argc, char **argv)                                                                                    \
    {                                                                                                                  \
        static const struct unit_case cases[] = {__VA_ARGS__};                                                         \
        return model_main(argc, argv, suite_name, cases, sizeof cases / sizeof cases[0]);                              \
    }

#endif
