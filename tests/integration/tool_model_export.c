/* Exports models of several shapes, with the logits that they give, for other programs to open:
 *
 *     model_export DIR
 *
 * DIR/NAME holds what wk_model_export writes; DIR/NAME/expected/logits.safetensors the tensors `tokens` and `logits`.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "common/mem.h"
#include "common/safetensors.h"
#include "tests/integration/tool_model.h"
#include "worker/model/export.h"

#define BATCH 2u

static const struct tool_case cases[] = {
    {"tied",
     {.vocab_size = 256,
      .width = 64,
      .layers = 3,
      .heads = 4,
      .kv_heads = 4,
      .ffn_width = 192,
      .sequence_length = 80,
      .tied_embeddings = true,
      .rope_theta = 10000,
      .norm_epsilon = 1e-5,
      .init_std = 0.06}},
    {"untied_grouped",
     {.vocab_size = 777,
      .width = 96,
      .layers = 2,
      .heads = 6,
      .kv_heads = 2,
      .ffn_width = 160,
      .sequence_length = 64,
      .tied_embeddings = false,
      .rope_theta = 500000,
      .norm_epsilon = 1e-6,
      .init_std = 0.06}},
    {"one_key_head",
     {.vocab_size = 100,
      .width = 48,
      .layers = 1,
      .heads = 3,
      .kv_heads = 1,
      .ffn_width = 64,
      .sequence_length = 600,
      .tied_embeddings = true,
      .rope_theta = 1000,
      .norm_epsilon = 1e-5,
      .init_std = 0.1}},
};

static void run_case(const char *directory, const struct tool_case *c)
{
    struct dl_err err;
    struct wk_model *model = NULL;
    const struct wk_model_options options = {.batch_sequences = BATCH, .threads = 1, .seed = 21, .forward_only = true};
    tool_check(wk_model_new(&c->spec, &options, &model, &err), &err);
    for (uint32_t i = 0; i < wk_model_tensor_count(model); i++) { /* Gains of one would hide that they are swapped. */
        const struct dl_tensor *tensor = &wk_model_tensors(model)[i];
        for (uint64_t j = 0; tensor->rank == 1 && j < tensor->shape[0]; j++) {
            wk_model_parameters(model)[i][j] = 0.7f + 0.05f * (float)((i + j) % 13);
        }
    }
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", directory, c->name);
    tool_check(wk_model_export(model, path, &err), &err);
    uint32_t count = BATCH * c->spec.sequence_length;
    DL_AUTO_FREE uint32_t *tokens = calloc(count, sizeof *tokens);
    DL_AUTO_FREE float *written = calloc(count, sizeof *written);
    DL_AUTO_FREE float *logits = calloc((size_t)count * c->spec.vocab_size, sizeof *logits);
    tool_draw(&c->spec, 1, 1, tokens, written, count);
    tool_check(wk_model_logits(model, tokens, BATCH, logits, &err), &err);
    const struct dl_tensor tensors[] = {
        {.name = "tokens", .rank = 2, .shape = {BATCH, c->spec.sequence_length}},
        {.name = "logits", .rank = 3, .shape = {BATCH, c->spec.sequence_length, c->spec.vocab_size}},
    };
    const float *data[] = {written, logits};
    snprintf(path, sizeof path, "%s/%s/expected", directory, c->name);
    if (mkdir(path, 0755) != 0) {
        perror(path);
        exit(1);
    }
    snprintf(path, sizeof path, "%s/%s/expected/logits.safetensors", directory, c->name);
    tool_check(dl_safetensors_write(path, tensors, data, 2, NULL, 0, &err), &err);
    wk_model_free(model);
}

int main(int argc, char **argv)
{
    return tool_main(argc, argv, cases, DL_COUNT_OF(cases), run_case);
}
