/* The built-in trainer: tokens a second, GFLOP/s, share of a step in matrix products, beside PyTorch in the same run.
 *
 *     bench/trainer [NAME [THREADS]]      one model only; names: 1M 10M 50M
 *
 * PyTorch is taken from build/venv-compat when it is there (make test-compat makes it), else its columns are left out.
 * The environment loses OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE for both sides, so that each picks its best kernels. */
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/rng.h"
#include "tests/bench/bench.h"
#include "worker/model/adamw.h"
#include "worker/model/blas.h"
#include "worker/model/model.h"

#define PYTHON "build/venv-compat/bin/python"
#define SECONDS 4.0
#define STEPS_MAX 64

struct config {
    const char *name;
    struct dl_model_spec spec;
    uint32_t batch;
};

static const struct config configs[] = {
    {"1M",
     {.vocab_size = 256,
      .width = 128,
      .layers = 5,
      .heads = 4,
      .kv_heads = 4,
      .ffn_width = 352,
      .sequence_length = 256},
     8},
    {"10M",
     {.vocab_size = 256,
      .width = 384,
      .layers = 6,
      .heads = 6,
      .kv_heads = 6,
      .ffn_width = 1024,
      .sequence_length = 256},
     8},
    {"50M",
     {.vocab_size = 8192,
      .width = 640,
      .layers = 10,
      .heads = 10,
      .kv_heads = 5,
      .ffn_width = 1728,
      .sequence_length = 512},
     2},
};

struct rates { /* Tokens a second. */
    double min, median, max;
};

struct ours {
    struct rates rates;
    double gflops, sgemm_share;
};

static void fail(const struct dl_err *err)
{
    fprintf(stderr, "bench trainer: %s\n", err->text);
    exit(1);
}

/* Draws one batch; the model's speed does not depend on what it reads. */
static void draw(const struct config *config, uint32_t *tokens, uint32_t *targets)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 1, 1);
    for (uint32_t i = 0; i < config->batch * config->spec.sequence_length; i++) {
        tokens[i] = (uint32_t)dl_rng_below(&rng, config->spec.vocab_size);
        targets[i] = (uint32_t)dl_rng_below(&rng, config->spec.vocab_size);
    }
}

static void train_step(struct wk_model *model, struct wk_adamw *adamw, const uint32_t *tokens, const uint32_t *targets)
{
    struct dl_err err;
    double loss;
    if (wk_model_forward_backward(model, tokens, targets, &loss, &err) != DL_OK ||
        wk_adamw_step(adamw, NULL, &err) != DL_OK) {
        fail(&err);
    }
}

static struct ours run_ours(const struct config *config, uint32_t threads)
{
    struct dl_err err;
    struct dl_model_spec spec = config->spec;
    spec.tied_embeddings = true, spec.rope_theta = 10000, spec.norm_epsilon = 1e-5, spec.init_std = 0.02;
    struct wk_model_options options = {.batch_sequences = config->batch, .threads = threads, .seed = 1};
    struct dl_inner_spec inner = {.learning_rate = 1e-4,
                                  .min_learning_rate_ratio = 1,
                                  .beta1 = 0.9,
                                  .beta2 = 0.999,
                                  .epsilon = 1e-8,
                                  .weight_decay = 0.1,
                                  .clip_norm = 1};
    struct wk_model *model = NULL;
    struct wk_adamw *adamw = NULL;
    if (wk_model_new(&spec, &options, &model, &err) != DL_OK ||
        wk_adamw_new(&inner, wk_model_tensors(model), wk_model_tensor_count(model), wk_model_parameters(model),
                     wk_model_gradients(model), wk_model_pool(model), &adamw, &err) != DL_OK) {
        fail(&err);
    }
    uint32_t count = config->batch * spec.sequence_length;
    DL_AUTO_FREE uint32_t *tokens = calloc(count, sizeof *tokens), *targets = calloc(count, sizeof *targets);
    draw(config, tokens, targets);
    train_step(model, adamw, tokens, targets);
    train_step(model, adamw, tokens, targets);
    wk_model_measure(model, true);
    double seconds[STEPS_MAX], total = 0;
    uint32_t steps = 0;
    while (steps < STEPS_MAX && (steps < 3 || total < SECONDS)) {
        int64_t start = dl_now_ns();
        train_step(model, adamw, tokens, targets);
        seconds[steps] = (double)(dl_now_ns() - start) * 1e-9;
        total += seconds[steps++];
    }
    double in_sgemm = (double)wk_model_take_sgemm_ns(model) * 1e-9;
    struct bench_stats stats = bench_stats_of(seconds, steps);
    struct ours ours = {.rates = {count / stats.max, count / stats.median, count / stats.min},
                        .gflops = wk_model_step_flops(model, config->batch) / stats.median * 1e-9,
                        .sgemm_share = in_sgemm / (total * threads)};
    wk_adamw_free(adamw);
    wk_model_free(model);
    return ours;
}

/* False when PyTorch is not to be had. */
static bool run_torch(const struct config *config, uint32_t threads, struct rates *rates)
{
    char command[512];
    const struct dl_model_spec *s = &config->spec;
    snprintf(command, sizeof command,
             "env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE " PYTHON
             " tests/bench/bench_trainer.py %u %u %u %u %u %u %u %u %u %g eager",
             s->vocab_size, s->width, s->layers, s->heads, s->kv_heads, s->ffn_width, s->sequence_length, config->batch,
             threads, SECONDS);
    if (access(PYTHON, X_OK) != 0) {
        return false;
    }
    FILE *out = popen(command, "r");
    int found =
        out == NULL ? 0 : fscanf(out, "tokens_per_second %lf %lf %lf", &rates->min, &rates->median, &rates->max);
    return out != NULL && pclose(out) == 0 && found == 3;
}

static void run_config(const struct config *config, uint32_t threads, struct bench_report *report)
{
    static char names[2 * BENCH_ENTRIES_MAX][48];
    struct rates torch = {0};
    bool compared = run_torch(config, threads, &torch);
    struct ours ours = run_ours(config, threads);
    printf("%-4s %u thread%s  %8.0f tokens/s (min %.0f, max %.0f)  %5.1f GFLOP/s  %4.1f %% in sgemm", config->name,
           threads, threads == 1 ? " " : "s", ours.rates.median, ours.rates.min, ours.rates.max, ours.gflops,
           100 * ours.sgemm_share);
    char *name = names[report->count], *yardstick = names[BENCH_ENTRIES_MAX + report->count];
    snprintf(name, sizeof names[0], "trainer_%s_%ut", config->name, threads);
    snprintf(yardstick, sizeof names[0], "pytorch_eager_%s_%ut", config->name, threads);
    bench_add(report, name, ours.rates.median, "tokens/s", compared ? yardstick : NULL,
              compared ? ours.rates.median / torch.median : 0);
    if (compared) {
        printf("  PyTorch eager %.0f (min %.0f, max %.0f)  ratio %.2f", torch.median, torch.min, torch.max,
               ours.rates.median / torch.median);
        bench_add(report, yardstick, torch.median, "tokens/s", NULL, 0);
    }
    char *share = names[report->count];
    snprintf(share, sizeof names[0], "sgemm_share_%s_%ut", config->name, threads);
    bench_add(report, share, ours.sgemm_share, "of step", NULL, 0);
    puts("");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct dl_err err;
    struct wk_blas_report blas;
    /* As a user's setting it would be left alone; a restart has set it itself. */
    if (getenv(WK_BLAS_GUARD_ENV) == NULL) {
        unsetenv("OPENBLAS_CORETYPE");
        unsetenv("OPENBLAS_L2_SIZE");
    }
    if (wk_blas_init(argc, argv, &blas, &err) != DL_OK) {
        fail(&err);
    }
    printf("OpenBLAS %s, %.0f GFLOP/s a thread%s%s\n", blas.core, blas.gflops, blas.warning[0] != 0 ? "; " : "",
           blas.warning);
    static struct bench_report report;
    uint32_t cores = (uint32_t)DL_MAX(sysconf(_SC_NPROCESSORS_ONLN), 1L);
    for (size_t i = 0; i < DL_COUNT_OF(configs); i++) {
        for (uint32_t threads = 1; threads <= DL_MIN(cores, 2u); threads++) {
            bool wanted = argc < 2 || strcmp(argv[1], configs[i].name) == 0;
            if (wanted && (argc < 3 || strtoul(argv[2], NULL, 10) == threads)) {
                run_config(&configs[i], threads, &report);
            }
        }
    }
    return bench_write(&report, "build/results/trainer.json");
}
