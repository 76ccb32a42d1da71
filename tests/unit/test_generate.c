/* Text token by token: it agrees with the whole-sequence pass, and is drawn as probabilities say. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/rng.h"
#include "tests/unit/model_rig.h"
#include "worker/model/generate.h"

/* Token by token through the cache, and as a prompt, must predict what the whole-sequence pass predicts. */
static void test_generator_agrees_with_logits(void)
{
    struct dl_model_spec spec = middle_spec();
    struct wk_model *model = make_model(&spec, 1, 2);
    vary_norms(model);
    uint32_t tokens[70];
    draw_tokens(&spec, 4, 70, tokens);
    DL_AUTO_FREE float *all = calloc(70 * 300, sizeof *all);
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(wk_model_logits(model, tokens, 1, all, &err), DL_OK);
    struct wk_generator *generator = NULL;
    CU_ASSERT_EQUAL_FATAL(wk_generator_new(model, 0, &generator, &err), DL_OK);
    static const uint32_t chunks[] = {1, 33, 16, 1, 1, 18};
    uint32_t at = 0;
    const float *logits;
    for (size_t i = 0; i < DL_COUNT_OF(chunks); i++) {
        CU_ASSERT_EQUAL_FATAL(wk_generator_feed(generator, tokens + at, chunks[i], &logits, &err), DL_OK);
        at += chunks[i];
        double worst = 0;
        for (uint32_t j = 0; j < 300; j++) {
            worst = fmax(worst, fabs((double)logits[j] - (double)all[(at - 1) * 300 + j]));
        }
        CU_ASSERT(worst < 2e-5);
    }
    CU_ASSERT_EQUAL(wk_generator_feed(generator, tokens, 1, &logits, &err), DL_EINVAL); /* The context is full. */
    CU_ASSERT(strstr(err.text, "70 of a context of 70") != NULL);
    wk_generator_free(generator);
    wk_model_free(model);
}

static void test_sampling(void)
{
    struct dl_model_spec spec = middle_spec();
    spec.init_std = 0.4;
    struct wk_model *model = make_model(&spec, 1, 1);
    struct wk_generator *generator = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(wk_generator_new(model, 200, &generator, &err), DL_OK);
    struct wk_sample_options options = {.temperature = 0};
    struct dl_rng rng;
    dl_rng_init(&rng, 1, 1);
    uint32_t greedy = 0, token = 0;
    CU_ASSERT_EQUAL(wk_generator_sample(generator, &options, &rng, &token, &err), DL_EINVAL);
    const uint32_t start = 7;
    const float *logits;
    CU_ASSERT_EQUAL_FATAL(wk_generator_feed(generator, &start, 1, &logits, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_generator_sample(generator, &options, &rng, &greedy, &err), DL_OK);
    double sum = 0, top = exp((double)logits[greedy]);
    for (uint32_t i = 0; i < 300; i++) {
        CU_ASSERT(logits[i] <= logits[greedy]);
        sum += exp((double)logits[i]);
    }
    uint32_t hits = 0, draws = 4000;
    options.temperature = 1;
    for (uint32_t i = 0; i < draws; i++) {
        CU_ASSERT_EQUAL_FATAL(wk_generator_sample(generator, &options, &rng, &token, &err), DL_OK);
        hits += token == greedy;
    }
    CU_ASSERT(fabs((double)hits / draws - top / sum) < 4 * sqrt(0.25 / draws)); /* Four standard deviations. */
    options.top_k = 1;
    CU_ASSERT_EQUAL(wk_generator_sample(generator, &options, &rng, &token, &err), DL_OK);
    CU_ASSERT_EQUAL(token, greedy);
    options.top_k = 0;
    options.top_p = 1e-9;
    CU_ASSERT_EQUAL(wk_generator_sample(generator, &options, &rng, &token, &err), DL_OK);
    CU_ASSERT_EQUAL(token, greedy);
    wk_generator_free(generator);
    wk_model_free(model);
}

MODEL_MAIN("generate", {"generator agrees with logits", test_generator_agrees_with_logits}, {"sampling", test_sampling})
