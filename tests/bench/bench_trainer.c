/* The built-in trainer: tokens a second, GFLOP/s, share of a step in matrix products, beside PyTorch in the same run.
 *
 *     bench/trainer [NAME [THREADS [alone]]]      one model only (1M, 10M, 50M); alone: without PyTorch
 *
 * PyTorch is taken from build/venv-compat when it is there (make test-compat makes it), else its columns are left out.
 * The environment loses OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE for both sides, so that each picks its best kernels. */
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/rng.h"
#include "tests/bench/bench.h"
#include "worker/model/adamw.h"
#include "worker/model/blas.h"
#include "worker/model/model.h"

#define ROUNDS 4 /* Ours and PyTorch's take turns, so that both see the same noise of the machine. */
#define ROUND_SECONDS 1.0
#define STEPS_MAX 4096

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

static char python[] = "build/venv-compat/bin/python";

struct steps { /* Seconds of each step. */
    uint32_t count;
    double seconds[STEPS_MAX];
};

static bool alone; /* Without PyTorch. */

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

/* Ours, ready to train. */
struct trainer {
    struct wk_model *model;
    struct wk_adamw *adamw;
    uint32_t *tokens, *targets;
};

static struct trainer make_trainer(const struct config *config, uint32_t threads)
{
    struct dl_err err;
    struct trainer t = {0};
    struct dl_model_spec spec = config->spec;
    spec.tied_embeddings = true;
    spec.rope_theta = 10000;
    spec.norm_epsilon = 1e-5;
    spec.init_std = 0.02;
    struct wk_model_options options = {.batch_sequences = config->batch, .threads = threads, .seed = 1};
    struct dl_inner_spec inner = {.learning_rate = 1e-4,
                                  .min_learning_rate_ratio = 1,
                                  .beta1 = 0.9,
                                  .beta2 = 0.999,
                                  .epsilon = 1e-8,
                                  .weight_decay = 0.1,
                                  .clip_norm = 1};
    if (wk_model_new(&spec, &options, &t.model, &err) != DL_OK ||
        wk_adamw_new(&inner, wk_model_tensors(t.model), wk_model_tensor_count(t.model), wk_model_parameters(t.model),
                     wk_model_gradients(t.model), wk_model_pool(t.model), &t.adamw, &err) != DL_OK) {
        fail(&err);
    }
    uint32_t count = config->batch * spec.sequence_length;
    t.tokens = calloc(count, sizeof *t.tokens);
    t.targets = calloc(count, sizeof *t.targets);
    draw(config, t.tokens, t.targets);
    wk_model_measure(t.model, true);
    return t;
}

static void release_trainer(struct trainer *t)
{
    wk_adamw_free(t->adamw);
    wk_model_free(t->model);
    free(t->tokens);
    free(t->targets);
}

/* One thread is timed by the processor time that it gets, so that others on the machine do not count. */
static int64_t step_clock_ns(bool one_thread)
{
    struct timespec now;
    clock_gettime(one_thread ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * DL_NS_PER_SECOND + now.tv_nsec;
}

/* Returns the seconds that passed. */
static double run_ours(struct trainer *t, struct steps *steps, uint32_t threads)
{
    int64_t begin = dl_now_ns(), end = begin + (int64_t)(ROUND_SECONDS * 1e9);
    do {
        int64_t start = step_clock_ns(threads == 1);
        train_step(t->model, t->adamw, t->tokens, t->targets);
        if (steps->count < STEPS_MAX) {
            steps->seconds[steps->count++] = (double)(step_clock_ns(threads == 1) - start) * 1e-9;
        }
    } while (dl_now_ns() < end);
    return (double)(dl_now_ns() - begin) * 1e-9;
}

/* PyTorch, a process that trains when it is told to. */
struct torch {
    FILE *in, *out; /* NULL: not to be had. */
    pid_t pid;
};

static struct torch start_torch(const struct config *config, uint32_t threads)
{
    struct torch torch = {0};
    char sizes[10][16], ready[16] = "";
    const struct dl_model_spec *s = &config->spec;
    const uint32_t numbers[] = {s->vocab_size, s->width,           s->layers,     s->heads, s->kv_heads,
                                s->ffn_width,  s->sequence_length, config->batch, threads};
    char script[] = "tests/bench/bench_trainer.py", mode[] = "eager";
    char *argv[16] = {python, script};
    for (size_t i = 0; i < DL_COUNT_OF(numbers); i++) {
        snprintf(sizes[i], sizeof sizes[i], "%u", numbers[i]);
        argv[2 + i] = sizes[i];
    }
    argv[2 + DL_COUNT_OF(numbers)] = mode;
    int to[2], from[2];
    if (alone || access(python, X_OK) != 0 || pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) {
        return torch;
    }
    torch.pid = fork();
    if (torch.pid == 0) {
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        unsetenv("OPENBLAS_CORETYPE");
        unsetenv("OPENBLAS_NUM_THREADS");
        execv(python, argv);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    torch.in = fdopen(to[1], "w");
    torch.out = fdopen(from[0], "r");
    if (torch.pid < 0 || fscanf(torch.out, "%15s", ready) != 1 || strcmp(ready, "ready") != 0) {
        fprintf(stderr, "bench trainer: PyTorch did not start\n");
        exit(1);
    }
    return torch;
}

static void run_torch(struct torch *torch, struct steps *steps)
{
    fprintf(torch->in, "%g\n", ROUND_SECONDS);
    fflush(torch->in);
    double seconds;
    char after = ' ';
    while (after != '\n' && fscanf(torch->out, "%lf%c", &seconds, &after) == 2) {
        if (steps->count < STEPS_MAX) {
            steps->seconds[steps->count++] = seconds;
        }
    }
    if (after != '\n') {
        fprintf(stderr, "bench trainer: PyTorch ended early\n");
        exit(1);
    }
}

static void stop_torch(struct torch *torch)
{
    if (torch->in != NULL) {
        fclose(torch->in);
        fclose(torch->out);
        waitpid(torch->pid, NULL, 0);
    }
}

static void run_config(const struct config *config, uint32_t threads, struct bench_report *report)
{
    static char names[2 * BENCH_ENTRIES_MAX][48];
    static struct steps ours, theirs;
    ours.count = theirs.count = 0;
    struct trainer trainer = make_trainer(config, threads);
    struct torch torch = start_torch(config, threads);
    bool compared = torch.in != NULL;
    train_step(trainer.model, trainer.adamw, trainer.tokens, trainer.targets); /* Warms caches and page tables. */
    (void)wk_model_take_sgemm_ns(trainer.model);
    double wall = 0;
    for (int round = 0; round < ROUNDS; round++) {
        if (compared) {
            run_torch(&torch, &theirs);
        }
        wall += run_ours(&trainer, &ours, threads);
    }
    stop_torch(&torch);
    double in_sgemm = (double)wk_model_take_sgemm_ns(trainer.model) * 1e-9;
    double share = in_sgemm / (wall * threads), tokens = config->batch * config->spec.sequence_length;
    struct bench_stats stats = bench_stats_of(ours.seconds, ours.count);
    printf("%-4s %u thread%s %7.0f tokens/s (min %.0f, max %.0f)  %5.1f GFLOP/s  %4.1f %% in sgemm", config->name,
           threads, threads == 1 ? " " : "s", tokens / stats.median, tokens / stats.max, tokens / stats.min,
           wk_model_step_flops(trainer.model, config->batch) / stats.median * 1e-9, 100 * share);
    char *name = names[report->count], *yardstick = names[BENCH_ENTRIES_MAX + report->count];
    snprintf(name, sizeof names[0], "trainer_%s_%ut", config->name, threads);
    snprintf(yardstick, sizeof names[0], "pytorch_eager_%s_%ut", config->name, threads);
    struct bench_stats yard = compared ? bench_stats_of(theirs.seconds, theirs.count) : stats;
    bench_add_spread(report, name, bench_rates(stats, tokens), "tokens/s", compared ? yardstick : NULL,
                     yard.median / stats.median);
    if (compared) {
        printf("  PyTorch eager %.0f (min %.0f, max %.0f)  ratio of medians %.2f, of best steps %.2f",
               tokens / yard.median, tokens / yard.max, tokens / yard.min, yard.median / stats.median,
               yard.min / stats.min);
        bench_add_spread(report, yardstick, bench_rates(yard, tokens), "tokens/s", NULL, 0);
    }
    char *share_name = names[report->count];
    snprintf(share_name, sizeof names[0], "sgemm_share_%s_%ut", config->name, threads);
    bench_add(report, share_name, share, "of step", NULL, 0);
    puts("");
    fflush(stdout);
    release_trainer(&trainer);
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
    alone = argc == 4 && strcmp(argv[3], "alone") == 0;
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
