/* Writes what the built-in trainer computes, for an independent program to compute again:
 *
 *     model_oracle DIR
 *
 * For each case NAME: DIR/NAME.before.safetensors (weights, and all batches as tensors `tokens` and `targets`; the
 * sizes and the optimizer's settings in its metadata), NAME.gradients.safetensors (of the first batch; metadata: its
 * loss) and NAME.after.safetensors (weights after one update a batch; metadata: the last loss). */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/safetensors.h"
#include "tests/integration/tool_model.h"
#include "worker/model/adamw.h"

#define STEPS 20u
#define BATCH 3u
#define PAIRS_MAX 32

static const struct tool_case cases[] = {
    {"tied",
     {.vocab_size = 256,
      .width = 64,
      .layers = 2,
      .heads = 4,
      .kv_heads = 4,
      .ffn_width = 176,
      .sequence_length = 96,
      .tied_embeddings = true,
      .rope_theta = 10000,
      .norm_epsilon = 1e-5,
      .init_std = 0.05}},
    {"untied_grouped",
     {.vocab_size = 1003,
      .width = 96,
      .layers = 3,
      .heads = 6,
      .kv_heads = 2,
      .ffn_width = 200,
      .sequence_length = 70,
      .tied_embeddings = false,
      .rope_theta = 500,
      .norm_epsilon = 1e-6,
      .init_std = 0.05}},
    {"long_one_key_head",
     {.vocab_size = 50,
      .width = 32,
      .layers = 1,
      .heads = 4,
      .kv_heads = 1,
      .ffn_width = 40,
      .sequence_length = 700,
      .tied_embeddings = true,
      .rope_theta = 10000,
      .norm_epsilon = 1e-5,
      .init_std = 0.1}},
};

static const struct dl_inner_spec inner = {.learning_rate = 2e-3,
                                           .min_learning_rate_ratio = 0.1,
                                           .warmup_steps = 5,
                                           .decay_steps = 18,
                                           .beta1 = 0.9,
                                           .beta2 = 0.95,
                                           .epsilon = 1e-8,
                                           .weight_decay = 0.1,
                                           .clip_norm = 0.5};

struct pairs {
    uint32_t count;
    struct dl_safetensors_pair pairs[PAIRS_MAX];
    char keys[PAIRS_MAX][32], values[PAIRS_MAX][32];
};

static void add_pair(struct pairs *p, const char *key, double value)
{
    snprintf(p->keys[p->count], sizeof p->keys[0], "%s", key);
    snprintf(p->values[p->count], sizeof p->values[0], "%.17g", value);
    p->pairs[p->count] = (struct dl_safetensors_pair){p->keys[p->count], p->values[p->count]};
    p->count++;
}

static void settings(const struct dl_model_spec *s, struct pairs *p)
{
    add_pair(p, "layers", s->layers);
    add_pair(p, "heads", s->heads);
    add_pair(p, "kv_heads", s->kv_heads);
    add_pair(p, "tied", s->tied_embeddings);
    add_pair(p, "rope_theta", s->rope_theta);
    add_pair(p, "norm_epsilon", s->norm_epsilon);
    add_pair(p, "learning_rate", inner.learning_rate);
    add_pair(p, "min_learning_rate_ratio", inner.min_learning_rate_ratio);
    add_pair(p, "warmup_steps", inner.warmup_steps);
    add_pair(p, "decay_steps", inner.decay_steps);
    add_pair(p, "beta1", inner.beta1);
    add_pair(p, "beta2", inner.beta2);
    add_pair(p, "epsilon", inner.epsilon);
    add_pair(p, "weight_decay", inner.weight_decay);
    add_pair(p, "clip_norm", inner.clip_norm);
}

static void save(const char *directory, const char *name, const char *what, const struct dl_tensor *tensors,
                 float *const *arrays, uint32_t count, const struct pairs *pairs)
{
    char path[1024];
    struct dl_err err;
    snprintf(path, sizeof path, "%s/%s.%s.safetensors", directory, name, what);
    tool_check(
        dl_safetensors_write(path, tensors, (const float *const *)arrays, count, pairs->pairs, pairs->count, &err),
        &err);
}

static void save_before(const char *directory, const struct tool_case *c, struct wk_model *model, float *tokens,
                        float *targets)
{
    uint32_t count = wk_model_tensor_count(model);
    DL_AUTO_FREE struct dl_tensor *tensors = calloc(count + 2, sizeof *tensors);
    DL_AUTO_FREE float **arrays = calloc(count + 2, sizeof *arrays);
    memcpy(tensors, wk_model_tensors(model), count * sizeof *tensors);
    memcpy(arrays, wk_model_parameters(model), count * sizeof *arrays);
    for (uint32_t i = 0; i < 2; i++) {
        tensors[count + i] = (struct dl_tensor){.rank = 3, .shape = {STEPS, BATCH, c->spec.sequence_length}};
        snprintf(tensors[count + i].name, sizeof tensors[0].name, "%s", i == 0 ? "tokens" : "targets");
        arrays[count + i] = i == 0 ? tokens : targets;
    }
    struct pairs pairs = {0};
    settings(&c->spec, &pairs);
    save(directory, c->name, "before", tensors, arrays, count + 2, &pairs);
}

static void run_case(const char *directory, const struct tool_case *c)
{
    struct dl_err err;
    struct wk_model *model = NULL;
    struct wk_adamw *adamw = NULL;
    const struct wk_model_options options = {.batch_sequences = BATCH, .threads = 2, .seed = 9};
    tool_check(wk_model_new(&c->spec, &options, &model, &err), &err);
    const struct dl_tensor *tensors = wk_model_tensors(model);
    uint32_t count = wk_model_tensor_count(model), batch = BATCH * c->spec.sequence_length;
    tool_check(wk_adamw_new(&inner, tensors, count, wk_model_parameters(model), wk_model_gradients(model),
                            wk_model_pool(model), &adamw, &err),
               &err);
    DL_AUTO_FREE uint32_t *tokens = calloc((size_t)2 * STEPS * batch, sizeof *tokens);
    DL_AUTO_FREE float *written = calloc((size_t)2 * STEPS * batch, sizeof *written);
    uint32_t *targets = tokens + STEPS * batch;
    tool_draw(&c->spec, 5, 1, tokens, written, STEPS * batch);
    tool_draw(&c->spec, 5, 2, targets, written + STEPS * batch, STEPS * batch);
    save_before(directory, c, model, written, written + STEPS * batch);
    double loss = 0;
    for (uint32_t step = 0; step < STEPS; step++) {
        tool_check(wk_model_forward_backward(model, tokens + step * batch, targets + step * batch, &loss, &err), &err);
        if (step == 0) {
            struct pairs first = {0};
            add_pair(&first, "loss", loss);
            save(directory, c->name, "gradients", tensors, wk_model_gradients(model), count, &first);
        }
        tool_check(wk_adamw_step(adamw, NULL, &err), &err);
    }
    struct pairs last = {0};
    add_pair(&last, "loss", loss);
    save(directory, c->name, "after", tensors, wk_model_parameters(model), count, &last);
    wk_adamw_free(adamw);
    wk_model_free(model);
}

int main(int argc, char **argv)
{
    return tool_main(argc, argv, cases, DL_COUNT_OF(cases), run_case);
}
