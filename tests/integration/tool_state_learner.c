/* A learner without a model, for measuring peer recovery: N parameters, twice as much optimiser state, and steps that take
 * a given time of computing and of rest.
 *
 *     state_learner ENDPOINTS TOKEN JOB LEARNER ELEMENTS WORK_MS REST_MS
 *
 * Tells on stdout, a line each: "joined SECONDS from LEARNER step STEP hash HASH", where HASH is over the state that was
 * taken over (or its own), and then every second "steps N of COUNT work MS cpu MS longest MS pushed N": the mean of COUNT steps
 * since the last line, with diloco_step and without the rest, by the clock and of this thread's own processor time; the
 * longest of them. The library's log goes to stderr, each line with the seconds of the monotonic clock. Ends with the job, or
 * when stdin does. */
#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/mem.h"
#include "worker/link/diloco.h"

#define TENSORS 16
#define COLUMNS 1024
#define WORK_FLOATS 4096

static int fail(const char *doing, const struct diloco_error *error)
{
    fprintf(stderr, "%s: %s\n", doing, error->text);
    return 1;
}

static void say(void *context, int level, const char *line)
{
    (void)context;
    fprintf(stderr, "%.3f %d %s\n", (double)dl_now_ns() * 1e-9, level, line);
}

/* Keeps a core busy with a fixed amount of work: so many passes over what the first-level cache holds. */
static float work(uint64_t passes)
{
    static float values[WORK_FLOATS];
    float sum = 0;
    for (uint64_t k = 0; k < passes; k++) {
        for (int i = 0; i < WORK_FLOATS; i++) {
            values[i] = values[i] * 0.999f + (float)i;
        }
        sum += values[k % WORK_FLOATS];
    }
    return sum;
}

static uint64_t passes_of(double ms)
{
    int64_t begun_ns = dl_now_ns();
    uint64_t passes = 20000;
    volatile float kept = work(passes);
    (void)kept;
    return (uint64_t)((double)passes * ms * 1e6 / (double)(dl_now_ns() - begun_ns + 1)) + 1;
}

struct learner {
    struct diloco *d;
    float *tensors[TENSORS], *moments[2];
    uint64_t rows, elements, updates;
    struct diloco_info info;
};

static int join(struct learner *l, char **arguments)
{
    struct diloco_error error;
    struct diloco_options options = {.struct_size = sizeof options,
                                     .endpoints = arguments[0],
                                     .token = arguments[1],
                                     .job = arguments[2],
                                     .learner = (int32_t)strtol(arguments[3], NULL, 10),
                                     .log = say};
    if (diloco_open(&options, &l->d, &error) != DILOCO_CONTINUE) {
        return fail("open", &error);
    }
    uint64_t shape[2] = {l->rows, COLUMNS};
    for (int t = 0; t < TENSORS; t++) {
        char name[16];
        snprintf(name, sizeof name, "w.%d", t);
        if (diloco_register(l->d, name, l->tensors[t], 2, shape, DILOCO_WEIGHT, (uint32_t)t, &error) !=
            DILOCO_CONTINUE) {
            return fail("register", &error);
        }
    }
    uint64_t bytes = l->elements * sizeof(float);
    if (diloco_register_state(l->d, "m", l->moments[0], bytes, &error) != DILOCO_CONTINUE ||
        diloco_register_state(l->d, "v", l->moments[1], bytes, &error) != DILOCO_CONTINUE ||
        diloco_register_state(l->d, "updates", &l->updates, sizeof l->updates, &error) != DILOCO_CONTINUE) {
        return fail("register state", &error);
    }
    int64_t begun_ns = dl_now_ns();
    if (diloco_join(l->d, &l->info, &error) != DILOCO_CONTINUE) {
        return fail("join", &error);
    }
    uint64_t hash = dl_hash64(l->moments[1], bytes, dl_hash64(l->moments[0], bytes, l->updates));
    printf("joined %.3f from %d step %llu hash %016llx updates %llu\n", (double)(dl_now_ns() - begun_ns) / 1e9,
           l->info.recovered_from, (unsigned long long)l->info.recovered_step, (unsigned long long)hash,
           (unsigned long long)l->updates);
    return 0;
}

/* A few values of every tensor and of both moments move at every step. */
static void move(struct learner *l)
{
    for (int t = 0; t < TENSORS; t++) {
        for (int i = 0; i < COLUMNS; i++) {
            l->tensors[t][i] += 1e-3f;
        }
    }
    for (int i = 0; i < COLUMNS; i++) {
        l->moments[0][i] += 1.0f;
        l->moments[1][l->elements - 1 - (uint64_t)i] += 1.0f;
    }
    l->updates++;
}

static bool stdin_has_ended(int wait_ms)
{
    struct pollfd polls = {.fd = STDIN_FILENO, .events = POLLIN};
    char byte;
    return poll(&polls, 1, wait_ms) > 0 && read(STDIN_FILENO, &byte, 1) <= 0;
}

static int64_t thread_cpu_ns(void)
{
    struct timespec used;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return used.tv_sec * DL_NS_PER_SECOND + used.tv_nsec;
}

struct second { /* Steps since the last line. */
    uint64_t steps;
    int64_t worked_ns, cpu_ns, longest_ns;
};

static void tell(const struct learner *l, const struct second *s)
{
    double ns = 1e6 * (double)s->steps;
    printf("steps %llu of %llu work %.3f cpu %.3f longest %.3f pushed %llu\n", (unsigned long long)l->info.step,
           (unsigned long long)s->steps, (double)s->worked_ns / ns, (double)s->cpu_ns / ns, (double)s->longest_ns / 1e6,
           (unsigned long long)l->info.pushes_total);
}

static int train(struct learner *l, uint64_t passes, int rest_ms)
{
    struct diloco_error error;
    int64_t told_ns = dl_now_ns();
    struct second second = {0};
    float kept = 0;
    while (!stdin_has_ended(rest_ms)) {
        int64_t begun_ns = dl_now_ns(), cpu_ns = thread_cpu_ns();
        kept += work(passes);
        move(l);
        int code = diloco_step(l->d, 1000, 1.0f, &l->info, &error);
        int64_t took_ns = dl_now_ns() - begun_ns; /* With what serving takes of it. */
        second.steps++;
        second.worked_ns += took_ns;
        second.cpu_ns += thread_cpu_ns() - cpu_ns;
        second.longest_ns = DL_MAX(second.longest_ns, took_ns);
        if (code != DILOCO_CONTINUE) {
            return code > 0 ? 0 : fail("step", &error);
        }
        if (dl_now_ns() - told_ns >= DL_NS_PER_SECOND) {
            tell(l, &second);
            told_ns = dl_now_ns();
            second = (struct second){0};
        }
    }
    return kept == 0.5f;
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc != 8) {
        fputs("usage: state_learner ENDPOINTS TOKEN JOB LEARNER ELEMENTS WORK_MS REST_MS\n", stderr);
        return 2;
    }
    struct learner l = {.rows = strtoull(argv[5], NULL, 10) / (TENSORS * (uint64_t)COLUMNS)};
    l.elements = l.rows * TENSORS * COLUMNS;
    for (int t = 0; t < TENSORS + 2; t++) {
        float **at = t < TENSORS ? &l.tensors[t] : &l.moments[t - TENSORS];
        *at = calloc(t < TENSORS ? l.rows * COLUMNS : l.elements, sizeof(float));
        if (*at == NULL || l.rows == 0) {
            fputs("no memory, or too few elements\n", stderr);
            return 2;
        }
    }
    uint64_t passes = passes_of(strtod(argv[6], NULL));
    int status = join(&l, argv + 1);
    status = status == 0 ? train(&l, passes, (int)strtol(argv[7], NULL, 10)) : status;
    diloco_close(l.d);
    for (int t = 0; t < TENSORS + 2; t++) {
        free(t < TENSORS ? l.tensors[t] : l.moments[t - TENSORS]);
    }
    return status;
}
