/* The built-in trainer: tokens a second beside PyTorch, eager and compiled, in the same run with the same losses; share of a step
 * in sgemm, and sgemm's share of what the processor can do.
 *
 *     bench/trainer [NAME [THREADS [alone]]]      one model only (1m, 10m, 50m, demo); alone: without PyTorch
 *
 * PyTorch is taken from build/venv-compat when it is there (make bench-deps), else its columns are left out; so is
 * torch.compile's where there is no C++ compiler. The environment loses OPENBLAS_CORETYPE and OPENBLAS_L2_SIZE for both sides, so
 * that each picks its best kernels. One thread is timed by the processor time that it gets, two by the clock. */
#include <fcntl.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <math.h>
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

#define ROUNDS 5      /* Sides take turns, so that all see the same noise of the machine. */
#define ROUNDS_SLOW 3 /* Of a model whose step takes longer than ROUND_SECONDS. */
#define ROUND_SECONDS 1.0
#define STEPS_MAX 4096
#define FIRST_STEPS 2 /* Their losses must agree: the same weights, batch and optimizer. */
/* Relative. Both sides round in float32, each in its own order: some 1e-7 of a loss. A step that one side makes otherwise, such
 * as a weight decay on norms or another rate, moves losses by more than 1e-4. */
#define LOSS_TOLERANCE 1e-5

struct config {
    const char *name;
    struct dl_model_spec spec;
    uint32_t batch;
    bool on_request; /* Only when it is named. */
};

static const struct config configs[] = {
    {"1m",
     {.vocab_size = 256,
      .width = 128,
      .layers = 5,
      .heads = 4,
      .kv_heads = 4,
      .ffn_width = 352,
      .sequence_length = 256},
     .batch = 8},
    {"10m",
     {.vocab_size = 256,
      .width = 384,
      .layers = 6,
      .heads = 6,
      .kv_heads = 6,
      .ffn_width = 1024,
      .sequence_length = 256},
     .batch = 8},
    {"50m",
     {.vocab_size = 8192,
      .width = 640,
      .layers = 10,
      .heads = 10,
      .kv_heads = 5,
      .ffn_width = 1728,
      .sequence_length = 512},
     .batch = 2},
    {"demo", /* crds/samples/demo.yaml */
     {.vocab_size = 256, .width = 96, .layers = 3, .heads = 4, .kv_heads = 4, .ffn_width = 256, .sequence_length = 128},
     .batch = 4,
     .on_request = true},
};

static char python[] = "build/venv-compat/bin/python";
static char start_path[] = "build/results/trainer.start";

enum side { OURS, EAGER, COMPILED, SIDES };

struct steps { /* Seconds of each step. */
    uint32_t count;
    double seconds[STEPS_MAX];
};

static bool alone; /* Without PyTorch. */
static double peak_gflops;

static void fail(const char *what)
{
    fprintf(stderr, "bench trainer: %s\n", what);
    exit(1);
}

/* "<before>_<config>_<threads>t<after>", which lasts until the report is written. */
static const char *named(const char *before, const struct config *config, uint32_t threads, const char *after)
{
    static char names[BENCH_ENTRIES_MAX][48];
    static uint32_t used;
    if (used == BENCH_ENTRIES_MAX) {
        fail("too many names");
    }
    snprintf(names[used], sizeof names[0], "%s_%s_%ut%s", before, config->name, threads, after);
    return names[used++];
}

static int64_t clock_ns(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * DL_NS_PER_SECOND + now.tv_nsec;
}

/* --- what a thread of the processor can do: multiply-adds in registers --- */

#define PEAK_TURNS 200000
#define PEAK_CHAINS 12 /* Independent ones: they hide the latency of two units. */
#define PEAK_BURSTS 32

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static float burst_avx512(void)
{
    __m512 sums[PEAK_CHAINS], factor = _mm512_set1_ps(0.999f), term = _mm512_set1_ps(1e-3f);
    for (int i = 0; i < PEAK_CHAINS; i++) {
        sums[i] = _mm512_set1_ps((float)i);
    }
    for (int turn = 0; turn < PEAK_TURNS; turn++) {
#pragma GCC unroll 12
        for (int i = 0; i < PEAK_CHAINS; i++) {
            sums[i] = _mm512_fmadd_ps(sums[i], factor, term);
        }
    }
    for (int i = 1; i < PEAK_CHAINS; i++) {
        sums[0] = _mm512_add_ps(sums[0], sums[i]);
    }
    return _mm512_reduce_add_ps(sums[0]);
}

__attribute__((target("avx2,fma"))) static float burst_avx2(void)
{
    __m256 sums[PEAK_CHAINS], factor = _mm256_set1_ps(0.999f), term = _mm256_set1_ps(1e-3f);
    for (int i = 0; i < PEAK_CHAINS; i++) {
        sums[i] = _mm256_set1_ps((float)i);
    }
    for (int turn = 0; turn < PEAK_TURNS; turn++) {
#pragma GCC unroll 12
        for (int i = 0; i < PEAK_CHAINS; i++) {
            sums[i] = _mm256_fmadd_ps(sums[i], factor, term);
        }
    }
    for (int i = 1; i < PEAK_CHAINS; i++) {
        sums[0] = _mm256_add_ps(sums[0], sums[i]);
    }
    return _mm256_cvtss_f32(sums[0]);
}
#endif

/* GFLOP/s of one thread, the best of some bursts; 0 where this program does not know the processor. */
static double measure_peak(void)
{
    double best = 0;
#if defined(__x86_64__)
    bool is_wide = __builtin_cpu_supports("avx512f");
    if (!is_wide && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))) {
        return 0;
    }
    volatile float sink = 0;
    for (int i = 0; i < PEAK_BURSTS; i++) {
        int64_t start = clock_ns(CLOCK_THREAD_CPUTIME_ID);
        sink = sink + (is_wide ? burst_avx512() : burst_avx2());
        double ns = (double)(clock_ns(CLOCK_THREAD_CPUTIME_ID) - start);
        best = DL_MAX(best, 2.0 * PEAK_TURNS * PEAK_CHAINS * (is_wide ? 16 : 8) / ns);
    }
#endif
    return best;
}

/* --- ours --- */

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

struct trainer { /* Ready to train. */
    struct wk_model *model;
    struct wk_adamw *adamw;
    uint32_t *tokens, *targets;
    uint32_t batch_tokens;
};

static double train_step(struct trainer *t)
{
    struct dl_err err;
    double loss;
    if (wk_model_forward_backward(t->model, t->tokens, t->targets, &loss, &err) != DL_OK ||
        wk_adamw_step(t->adamw, NULL, &err) != DL_OK) {
        fail(err.text);
    }
    return loss;
}

static struct trainer make_trainer(const struct config *config, uint32_t threads)
{
    struct dl_err err;
    struct dl_model_spec spec = config->spec;
    struct trainer t = {.batch_tokens = config->batch * spec.sequence_length};
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
        fail(err.text);
    }
    t.tokens = calloc(t.batch_tokens, sizeof *t.tokens);
    t.targets = calloc(t.batch_tokens, sizeof *t.targets);
    if (t.tokens == NULL || t.targets == NULL) {
        fail("no memory for a batch");
    }
    draw(config, t.tokens, t.targets);
    return t;
}

static void release_trainer(struct trainer *t)
{
    wk_adamw_free(t->adamw);
    wk_model_free(t->model);
    free(t->tokens);
    free(t->targets);
}

/* Weights and batch, for the other side. */
static void write_start(const struct trainer *t)
{
    mkdir("build", 0777);
    mkdir("build/results", 0777);
    FILE *file = fopen(start_path, "w");
    bool is_written = file != NULL;
    for (uint32_t i = 0; is_written && i < wk_model_tensor_count(t->model); i++) {
        size_t elements = dl_tensor_elements(&wk_model_tensors(t->model)[i]);
        is_written = fwrite(wk_model_parameters(t->model)[i], sizeof(float), elements, file) == elements;
    }
    is_written = is_written && fwrite(t->tokens, sizeof *t->tokens, t->batch_tokens, file) == t->batch_tokens &&
                 fwrite(t->targets, sizeof *t->targets, t->batch_tokens, file) == t->batch_tokens;
    if (file == NULL || fclose(file) != 0 || !is_written) {
        fail("build/results/trainer.start cannot be written");
    }
}

static void run_ours(struct trainer *t, struct steps *steps, uint32_t threads)
{
    clockid_t clock = threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC;
    int64_t end = dl_now_ns() + (int64_t)(ROUND_SECONDS * 1e9);
    do {
        int64_t start = clock_ns(clock);
        (void)train_step(t);
        if (steps->count < STEPS_MAX) {
            steps->seconds[steps->count++] = (double)(clock_ns(clock) - start) * 1e-9;
        }
    } while (dl_now_ns() < end);
}

/* --- PyTorch, a process that trains when it is told to --- */

struct torch {
    FILE *in, *out; /* NULL: not to be had. */
    pid_t pid;
    bool is_compiled;
};

/* Numbers up to the end of the line; how many. */
static uint32_t read_numbers(FILE *in, double *numbers, uint32_t max)
{
    uint32_t count = 0;
    int next;
    while ((next = fgetc(in)) == ' ') {
        continue;
    }
    while (next != '\n' && next != EOF) {
        ungetc(next, in);
        double number;
        if (fscanf(in, "%lf", &number) != 1) {
            return 0;
        }
        if (count < max) {
            numbers[count++] = number;
        }
        while ((next = fgetc(in)) == ' ') {
            continue;
        }
    }
    return next == '\n' ? count : 0;
}

static void compare_losses(const struct config *config, const char *side, const double *ours, const double *theirs)
{
    double worst = 0;
    for (int i = 0; i < FIRST_STEPS; i++) {
        worst = fmax(worst, fabs(ours[i] - theirs[i]) / theirs[i]);
    }
    printf("%-4s losses of the first %d steps: ours %.6f to %.6f, PyTorch %s %.6f to %.6f: apart by %.1e at most (%.0e "
           "allowed)\n",
           config->name, FIRST_STEPS, ours[0], ours[FIRST_STEPS - 1], side, theirs[0], theirs[FIRST_STEPS - 1], worst,
           LOSS_TOLERANCE);
    if (!(worst <= LOSS_TOLERANCE)) {
        fail("the two sides do not compute the same: their speeds cannot be compared");
    }
}

static pid_t spawn_torch(const struct config *config, uint32_t threads, int in, int out)
{
    char sizes[10][16];
    const struct dl_model_spec *s = &config->spec;
    const uint32_t numbers[10] = {FIRST_STEPS, s->vocab_size, s->width,           s->layers,     s->heads,
                                  s->kv_heads, s->ffn_width,  s->sequence_length, config->batch, threads};
    char script[] = "tests/bench/bench_trainer.py";
    char *argv[14] = {python, script, start_path};
    for (size_t i = 0; i < DL_COUNT_OF(numbers); i++) {
        snprintf(sizes[i], sizeof sizes[i], "%u", numbers[i]);
        argv[3 + i] = sizes[i];
    }
    pid_t pid = fork();
    if (pid == 0) {
        dup2(in, STDIN_FILENO);
        dup2(out, STDOUT_FILENO);
        unsetenv("OPENBLAS_CORETYPE");
        unsetenv("OPENBLAS_NUM_THREADS");
        execv(python, argv);
        _exit(127);
    }
    return pid;
}

/* It imports, reads and compiles by itself. */
static struct torch start_torch(const struct config *config, uint32_t threads)
{
    struct torch torch = {0};
    int to[2], from[2];
    if (alone || access(python, X_OK) != 0 || pipe2(to, O_CLOEXEC) != 0 || pipe2(from, O_CLOEXEC) != 0) {
        return torch;
    }
    torch.pid = spawn_torch(config, threads, to[0], from[1]);
    close(to[0]);
    close(from[1]);
    torch.in = fdopen(to[1], "w");
    torch.out = fdopen(from[0], "r");
    if (torch.pid < 0 || torch.in == NULL || torch.out == NULL) {
        fail("PyTorch did not start");
    }
    return torch;
}

/* Returns when both forms have made their first steps, and these agree with `losses`. */
static void await_torch(struct torch *torch, const struct config *config, const double *losses)
{
    char word[16] = "";
    double theirs[FIRST_STEPS];
    if (fscanf(torch->out, "%15s", word) != 1 || read_numbers(torch->out, theirs, FIRST_STEPS) != FIRST_STEPS) {
        fail("PyTorch did not start");
    }
    compare_losses(config, "eager", losses, theirs);
    if (fscanf(torch->out, "%15s", word) != 1) {
        fail("PyTorch ended early");
    }
    torch->is_compiled = read_numbers(torch->out, theirs, FIRST_STEPS) == FIRST_STEPS;
    if (torch->is_compiled) {
        compare_losses(config, "compiled", losses, theirs);
    }
}

static void run_torch(struct torch *torch, const char *form, struct steps *steps)
{
    fprintf(torch->in, "%s %g\n", form, ROUND_SECONDS);
    fflush(torch->in);
    uint32_t count = read_numbers(torch->out, steps->seconds + steps->count, STEPS_MAX - steps->count);
    if (count == 0) {
        fail("PyTorch ended early");
    }
    steps->count += count;
}

static void stop_torch(struct torch *torch)
{
    if (torch->in != NULL) {
        fclose(torch->in);
        fclose(torch->out);
        waitpid(torch->pid, NULL, 0);
    }
}

/* --- the report --- */

static void report_side(struct bench_report *report, const struct config *config, uint32_t threads, enum side side,
                        struct bench_stats ours, struct bench_stats theirs, double tokens)
{
    bool is_eager = side == EAGER;
    const char *yardstick = named(is_eager ? "pytorch_eager" : "pytorch_compiled", config, threads, "");
    bench_add_spread(report, named("trainer", config, threads, is_eager ? "" : "_compiled"), bench_rates(ours, tokens),
                     "tokens/s", yardstick, theirs.median / ours.median);
    bench_add_spread(report, yardstick, bench_rates(theirs, tokens), "tokens/s", NULL, 0);
    printf("     PyTorch %-8s %7.0f tokens/s (min %.0f, max %.0f): ratio of medians %.2f, of best steps %.2f\n",
           is_eager ? "eager" : "compiled", tokens / theirs.median, tokens / theirs.max, tokens / theirs.min,
           theirs.median / ours.median, theirs.min / ours.min);
}

/* One more round, with the products timed: apart, since that costs time itself. */
static void report_products(struct bench_report *report, const struct config *config, uint32_t threads,
                            struct trainer *trainer)
{
    static struct steps steps;
    steps.count = 0;
    wk_model_measure(trainer->model, true);
    (void)wk_model_take_products(trainer->model);
    int64_t wall = dl_now_ns(), processor = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    run_ours(trainer, &steps, threads);
    double seconds = threads == 1 ? (double)(clock_ns(CLOCK_PROCESS_CPUTIME_ID) - processor) * 1e-9
                                  : (double)(dl_now_ns() - wall) * 1e-9 * threads;
    struct wk_model_products products = wk_model_take_products(trainer->model);
    double gflops = 2 * products.multiplications / (double)products.ns, share = (double)products.ns * 1e-9 / seconds;
    bench_add(report, named("trainer", config, threads, "_sgemm_share"), share, "of a step's time", NULL, 0);
    bench_add(report, named("trainer", config, threads, "_sgemm_of_peak"), gflops, "GFLOP/s a thread", "fma_peak_1t",
              peak_gflops > 0 ? gflops / peak_gflops : 0);
    printf("     sgemm: %.1f %% of a step's time, %.0f GFLOP/s a thread, %.0f %% of the processor's peak\n",
           100 * share, gflops, peak_gflops > 0 ? 100 * gflops / peak_gflops : 0);
}

static void run_config(const struct config *config, uint32_t threads, struct bench_report *report)
{
    static struct steps steps[SIDES];
    memset(steps, 0, sizeof steps);
    struct trainer trainer = make_trainer(config, threads);
    double losses[FIRST_STEPS], tokens = trainer.batch_tokens;
    write_start(&trainer);
    struct torch torch = start_torch(config, threads);
    int64_t before = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    for (int i = 0; i < FIRST_STEPS; i++) {
        losses[i] = train_step(&trainer); /* Warms caches and page tables, too. */
    }
    double seconds = (double)(clock_ns(CLOCK_PROCESS_CPUTIME_ID) - before) * 1e-9 / threads;
    int rounds = seconds > FIRST_STEPS * ROUND_SECONDS ? ROUNDS_SLOW : ROUNDS;
    if (torch.in != NULL) {
        await_torch(&torch, config, losses);
    }
    unlink(start_path);
    for (int round = 0; round < rounds; round++) {
        run_ours(&trainer, &steps[OURS], threads);
        if (torch.in != NULL) {
            run_torch(&torch, "eager", &steps[EAGER]);
        }
        if (torch.is_compiled) {
            run_torch(&torch, "compiled", &steps[COMPILED]);
        }
    }
    stop_torch(&torch);
    struct bench_stats ours = bench_stats_of(steps[OURS].seconds, steps[OURS].count);
    printf("%-4s %u thread%s: %.0f tokens/s (min %.0f, max %.0f), %.1f GFLOP/s\n", config->name, threads,
           threads == 1 ? "" : "s", tokens / ours.median, tokens / ours.max, tokens / ours.min,
           wk_model_step_flops(trainer.model, config->batch) / ours.median * 1e-9);
    if (torch.in == NULL) {
        bench_add_spread(report, named("trainer", config, threads, ""), bench_rates(ours, tokens), "tokens/s", NULL, 0);
    }
    for (enum side side = EAGER; side < SIDES; side++) {
        if (steps[side].count > 0) {
            report_side(report, config, threads, side, ours, bench_stats_of(steps[side].seconds, steps[side].count),
                        tokens);
        }
    }
    report_products(report, config, threads, &trainer);
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
        fail(err.text);
    }
    static struct bench_report report;
    peak_gflops = measure_peak();
    printf("OpenBLAS %s, %.0f GFLOP/s a thread of %.0f that multiply-adds in registers reach%s%s\n", blas.core,
           blas.gflops, peak_gflops, blas.warning[0] != 0 ? "; " : "", blas.warning);
    bench_add(&report, "fma_peak_1t", peak_gflops, "GFLOP/s", NULL, 0);
    alone = argc == 4 && strcmp(argv[3], "alone") == 0;
    uint32_t cores = (uint32_t)DL_MAX(sysconf(_SC_NPROCESSORS_ONLN), 1L);
    for (size_t i = 0; i < DL_COUNT_OF(configs); i++) {
        for (uint32_t threads = 1; threads <= DL_MIN(cores, 2u); threads++) {
            bool wanted = argc < 2 ? !configs[i].on_request : strcmp(argv[1], configs[i].name) == 0;
            if (wanted && (argc < 3 || strtoul(argv[2], NULL, 10) == threads)) {
                run_config(&configs[i], threads, &report);
            }
        }
    }
    if (report.count == 1) {
        fail("no such model: 1m, 10m, 50m or demo, on 1 or 2 threads");
    }
    return bench_write(&report, "build/results/trainer.json");
}
