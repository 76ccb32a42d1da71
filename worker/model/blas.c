#include "worker/model/blas.h"

#include <cblas.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/mem.h"
#include "worker/data/cache.h"

#define CORE_ENV "OPENBLAS_CORETYPE"
#define PROBE_SECONDS_MAX 10
#define WORTH_A_RESTART 1.15 /* Times faster. */
#define ERROR_MAX 1e-5       /* Relative to the sum of absolute products; float32 in any order stays far below. */

extern char **environ;

int wk_blas_core_level(const char *core)
{
    static const char *const wide[] = {"SkylakeX", "Cooperlake", "SapphireRapids"};
    static const char *const middle[] = {"Haswell", "Zen", "Excavator"};
    for (size_t i = 0; i < DL_COUNT_OF(wide); i++) {
        if (strcasecmp(core, wide[i]) == 0) {
            return 2;
        }
    }
    for (size_t i = 0; i < DL_COUNT_OF(middle); i++) {
        if (strcasecmp(core, middle[i]) == 0) {
            return 1;
        }
    }
    return 0;
}

const char *wk_blas_best_core(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512cd");
    if (wide) {
        return __builtin_cpu_supports("avx512bf16") ? "Cooperlake" : "SkylakeX";
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return "Haswell";
    }
#endif
    return "";
}

/* --- checking --- */

struct shape {
    int m, n, k;
};

/* Small whole numbers and fractions with no pattern that a permuted kernel could hide in. */
static void fill(float *x, size_t count, uint32_t seed)
{
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        x[i] = (float)(seed >> 8) * 0x1p-23f - 1.0f;
    }
}

static double compare(const struct shape *s, bool ta, bool tb, const float *a, const float *b, const float *before,
                      const float *c)
{
    double worst = 0;
    for (int i = 0; i < s->m; i++) {
        for (int j = 0; j < s->n; j++) {
            double start = (double)before[i * s->n + j];
            double sum = start, size = fabs(start);
            for (int l = 0; l < s->k; l++) {
                double product =
                    (double)a[ta ? l * s->m + i : i * s->k + l] * (double)b[tb ? j * s->k + l : l * s->n + j];
                sum += product;
                size += fabs(product);
            }
            double error = fabs((double)c[i * s->n + j] - sum) / size;
            worst = error > worst || isnan(error) ? error : worst;
        }
    }
    return worst;
}

static enum dl_rc verify_shape(const struct shape *s, bool ta, bool tb, double *worst, struct dl_err *err)
{
    size_t a_count = (size_t)s->m * (size_t)s->k, b_count = (size_t)s->k * (size_t)s->n;
    size_t c_count = (size_t)s->m * (size_t)s->n;
    DL_AUTO_FREE float *a = dl_alloc_aligned((a_count + b_count + 2 * c_count) * sizeof *a);
    if (a == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to check sgemm");
    }
    float *b = a + a_count, *before = b + b_count, *c = before + c_count;
    fill(a, a_count, 1);
    fill(b, b_count, 2);
    fill(before, c_count, 3);
    memcpy(c, before, c_count * sizeof *c);
    cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, s->m, s->n, s->k, 1, a,
                ta ? s->m : s->k, b, tb ? s->k : s->n, 1, c, s->n);
    double error = compare(s, ta, tb, a, b, before, c);
    *worst = error > *worst || isnan(error) ? error : *worst;
    if (!(error < ERROR_MAX)) {
        return dl_err_set(err, DL_EUNSUPPORTED,
                          "OpenBLAS computes wrong products here (core %s, %d x %d x %d, error %g): set "
                          "OPENBLAS_CORETYPE, for example to Haswell",
                          openblas_get_corename(), s->m, s->n, s->k, error);
    }
    return DL_OK;
}

enum dl_rc wk_blas_verify(double *relative_error, struct dl_err *err)
{
    /* One element, odd edges, whole register tiles, and a depth beyond one cache block. */
    static const struct shape shapes[] = {{1, 1, 1},    {7, 5, 3},     {17, 129, 33},
                                          {64, 64, 64}, {130, 48, 96}, {24, 20, 900}};
    double worst = 0;
    for (size_t i = 0; i < DL_COUNT_OF(shapes); i++) {
        for (int form = 0; form < 4; form++) {
            enum dl_rc rc = verify_shape(&shapes[i], (form & 1) != 0, (form & 2) != 0, &worst, err);
            if (rc != DL_OK) {
                return rc;
            }
        }
    }
    *relative_error = worst;
    return DL_OK;
}

double wk_blas_measure(double milliseconds)
{
    enum { edge = 256 };
    const size_t count = (size_t)edge * edge;
    DL_AUTO_FREE float *a = dl_alloc_aligned(3 * count * sizeof *a);
    if (a == NULL) {
        return 0;
    }
    float *b = a + count, *c = b + count;
    fill(a, count, 1);
    fill(b, count, 2);
    double best = 0;
    int64_t start = dl_now_ns(), now = start;
    while ((double)(now - start) < milliseconds * 1e6) {
        int64_t before = dl_now_ns();
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, edge, edge, edge, 1, a, edge, b, edge, 0, c, edge);
        now = dl_now_ns();
        double rate = 2.0 * edge * edge * edge / (double)DL_MAX(now - before, INT64_C(1));
        best = DL_MAX(best, rate); /* The best of many short calls: others on the machine only ever slow it down. */
    }
    return best;
}

/* --- trying and restarting --- */

/* In the child: verify, measure, print the rate, end. Never returns. */
static void run_probe(void)
{
    double error;
    alarm(PROBE_SECONDS_MAX);
    if (wk_blas_verify(&error, NULL) != DL_OK) {
        _exit(1);
    }
    printf("%.3f\n", wk_blas_measure(15));
    fflush(stdout);
    _exit(0);
}

/* This environment with the core type and probe mark set, for the child. NULL-terminated; the array is the caller's. */
static char **probe_environment(char *core_entry, char *probe_entry)
{
    size_t count = 0, used = 0;
    while (environ[count] != NULL) {
        count++;
    }
    char **copy = calloc(count + 3, sizeof *copy);
    for (size_t i = 0; copy != NULL && i < count; i++) {
        if (strncmp(environ[i], CORE_ENV "=", strlen(CORE_ENV "=")) != 0) {
            copy[used++] = environ[i];
        }
    }
    if (copy != NULL) {
        copy[used++] = core_entry;
        copy[used] = probe_entry;
    }
    return copy;
}

/* This program's own path. Its name, unlike /proc/self/exe, is what process lists then show. */
static void own_path(char *out, size_t size)
{
    ssize_t length = readlink("/proc/self/exe", out, size - 1);
    out[length > 0 ? length : 0] = 0;
    if (access(out, X_OK) != 0) { /* Replaced or removed since it was started. */
        snprintf(out, size, "/proc/self/exe");
    }
}

/* GFLOP/s of the child with `core`, or 0 when it failed in any way. */
static double probe(const char *core, char **argv)
{
    char core_entry[64], probe_entry[] = WK_BLAS_PROBE_ENV "=1", text[64] = "";
    snprintf(core_entry, sizeof core_entry, CORE_ENV "=%s", core);
    DL_AUTO_FREE char **environment = probe_environment(core_entry, probe_entry);
    int ends[2];
    if (environment == NULL || pipe2(ends, O_CLOEXEC) != 0) {
        return 0;
    }
    char path[PATH_MAX];
    own_path(path, sizeof path);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    pid_t child;
    int failure = posix_spawn(&child, path, &actions, NULL, argv, environment);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    size_t used = 0;
    ssize_t got = 0;
    while (failure == 0 && used < sizeof text - 1 && (got = read(ends[0], text + used, sizeof text - 1 - used)) != 0) {
        if (got < 0 && errno != EINTR) {
            break;
        }
        used += got > 0 ? (size_t)got : 0;
    }
    close(ends[0]);
    int status = -1;
    while (failure == 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return failure == 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0 ? strtod(text, NULL) : 0;
}

/* Only returns when it could not. */
static void restart_with(const char *core, char **argv, struct wk_blas_report *report)
{
    char path[PATH_MAX];
    own_path(path, sizeof path);
    setenv(CORE_ENV, core, 1);
    setenv(WK_BLAS_GUARD_ENV, core, 1);
    setenv("OPENBLAS_NUM_THREADS", "1", 0); /* Its threads would only be started to stay idle. */
    execv(path, argv);
    snprintf(report->warning, sizeof report->warning, "cannot restart with " CORE_ENV "=%s: %s", core, strerror(errno));
    unsetenv(CORE_ENV);
    unsetenv(WK_BLAS_GUARD_ENV);
}

/* Only returns when it did not restart. */
static void restart_if_better(const char *const *cores, size_t count, char **argv, struct wk_blas_report *report)
{
    int level = wk_blas_core_level(report->core);
    double now = wk_blas_measure(10);
    for (size_t i = 0; i < count; i++) {
        if (cores[i][0] == 0 || wk_blas_core_level(cores[i]) <= level) {
            continue;
        }
        if (probe(cores[i], argv) < WORTH_A_RESTART * now) {
            continue;
        }
        restart_with(cores[i], argv, report);
        return;
    }
    snprintf(report->warning, sizeof report->warning,
             "OpenBLAS runs %s kernels on a processor that offers %s, and no better core type passed its check",
             report->core, report->best);
}

/* --- what the run knows already --- */

struct verdict { /* Of a process that has checked the kernels: which ones, and how fast they were. */
    char core[32];
    double gflops;
};

static bool read_verdict(const char *path, struct verdict *known)
{
    char text[64];
    DL_AUTO_FILE FILE *file = fopen(path, "re");
    return file != NULL && fgets(text, sizeof text, file) != NULL &&
           sscanf(text, "%31s %lf\n", known->core, &known->gflops) == 2;
}

/* The same processor and library have the same verdict. `known->core` is empty when there is none yet. */
static bool open_verdict(struct wk_cache_entry *entry, struct verdict *known)
{
    char facts[256], name[64];
    unsigned brand[12] = {0};
#if defined(__x86_64__)
    for (unsigned i = 0; i < 3; i++) {
        unsigned *part = brand + 4 * (size_t)i;
        (void)__get_cpuid(0x80000002u + i, &part[0], &part[1], &part[2], &part[3]);
    }
#endif
    snprintf(facts, sizeof facts, "%.48s %s %s", (const char *)brand, wk_blas_best_core(), openblas_get_config());
    snprintf(name, sizeof name, "kernels-%016llx", (unsigned long long)dl_hash64(facts, strlen(facts), 0));
    if (!wk_cache_open(name, entry)) {
        return false;
    }
    if (!read_verdict(entry->path, known)) {
        known->core[0] = 0;
    }
    return true;
}

static void leave_verdict(const struct wk_cache_entry *entry, const struct wk_blas_report *report)
{
    char text[64];
    int length = snprintf(text, sizeof text, "%s %.1f\n", report->core, report->gflops);
    (void)wk_cache_put(entry, text, (size_t)length); /* Else the next one checks, too. */
}

/* Only returns when there is no need to restart, or no way. */
static enum dl_rc check_kernels(char **argv, struct wk_blas_report *report, struct dl_err *err)
{
    bool slow = wk_blas_core_level(report->core) < wk_blas_core_level(report->best);
    if (slow && report->user_set) {
        snprintf(report->warning, sizeof report->warning,
                 CORE_ENV "=%s makes matrix products slow: this processor offers %s; unset it, or set it to that",
                 getenv(CORE_ENV), report->best);
    } else if (slow && !report->restarted && getenv(WK_BLAS_KEEP_ENV) == NULL) {
        const char *const cores[] = {report->best, "SkylakeX", "Haswell"};
        restart_if_better(cores, DL_COUNT_OF(cores), argv, report);
    }
    double error;
    enum dl_rc rc = wk_blas_verify(&error, err);
    if (rc == DL_OK) {
        report->gflops = wk_blas_measure(20);
    }
    return rc;
}

enum dl_rc wk_blas_init(int argc, char **argv, struct wk_blas_report *report, struct dl_err *err)
{
    (void)argc;
    openblas_set_num_threads(1);
    if (getenv(WK_BLAS_PROBE_ENV) != NULL) {
        run_probe();
    }
    memset(report, 0, sizeof *report);
    const char *set = getenv(CORE_ENV), *guard = getenv(WK_BLAS_GUARD_ENV);
    snprintf(report->core, sizeof report->core, "%s", openblas_get_corename());
    snprintf(report->best, sizeof report->best, "%s", wk_blas_best_core());
    report->restarted = set != NULL && guard != NULL && strcmp(set, guard) == 0;
    report->user_set = set != NULL && !report->restarted;
    struct wk_cache_entry entry;
    struct verdict known = {.core = ""};
    bool is_cached = !report->user_set && getenv(WK_BLAS_KEEP_ENV) == NULL && open_verdict(&entry, &known);
    if (is_cached && known.core[0] != 0 && strcasecmp(known.core, report->core) != 0 && !report->restarted) {
        restart_with(known.core, argv, report);
    }
    if (is_cached && strcasecmp(known.core, report->core) == 0) {
        wk_cache_close(&entry);
        report->gflops = known.gflops;
        return DL_OK;
    }
    enum dl_rc rc = check_kernels(argv, report, err);
    if (is_cached) {
        if (rc == DL_OK && report->warning[0] == 0) {
            leave_verdict(&entry, report);
        }
        wk_cache_close(&entry);
    }
    return rc;
}
