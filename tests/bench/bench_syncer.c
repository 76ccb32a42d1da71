/* bench_syncer: whole outer rounds through a real diloco-syncer, against raw TCP in the same run.
 *
 *     syncer [PROGRAM [cost | rounds]]
 *     syncer --round int4 bf16 [ROUNDS]      such rounds only, for a profiler (docs/performance.md)
 *
 * First, what a round costs the syncer's process: CPU of network thread, merge and encoding, a GB moved in either direction;
 * the yardstick is what one end of a plain TCP connection takes for a GB. Then, how long a round of 8 learners x 100 MB takes
 * (float32, and int4 up with bf16 down), against plain TCP that moves the same bytes, and against Gloo's all-reduce between 8
 * processes, which needs every one of them at once. All of these take turns in one run: what waits for its turn is asleep.
 *
 * Plain TCP is a floor, not a round: 8 connections carry the pushes' bytes up, each into memory of its own, then the update's
 * bytes down, out of one memory into eight, with a thread an end, so that both cores copy all the time. Connections and memory
 * are as old as those of the round beside it, and CPU seconds are those of both ends, as a round's are those of syncer and
 * learners. What a round does to the bytes (delta, encoding, checksums, masks, merge, outer step, decoding, two writes of an
 * update) has no part in it, nor that one network thread serves all learners of a syncer.
 *
 * PyTorch is taken from build/venv-compat when it is there (make bench-deps makes it), else Gloo is left out. */
#include <fcntl.h>
#include <glob.h>
#include <poll.h>

#include "common/codec.h"
#include "tests/bench/syncer_rig.h"

#define WARM_ROUNDS 4
#define PARTS 4 /* Timed one by one. */
#define PART_ROUNDS 3
#define ROUNDS_TO_LOOK_AT 20
#define RAW_BYTES (UINT64_C(2) << 30)

#define LEARNERS 8
#define TURNS 5
#define ROUNDS_A_TURN 3
#define FRAGMENT_BYTES UINT64_C(100000000)
#define GLOO_SECONDS_MAX 60 /* For one answer; its start loads PyTorch nine times. */
#define GLOO_END_SECONDS_MAX 5
/* By its whole path in argv[0], too: that is how Python finds its environment. */
#define PYTHON "build/venv-compat/bin/python"
#define CONNECTION_MB 2.5 /* The transport's buffers of one, beside the bound on a round's memory. */

static const char *program;
static struct rig rig;

struct measured {
    struct bench_stats round; /* Of the parts. */
    double round_seconds, cpu_per_gb, gb_per_round;
    struct rig_status after;
};

static struct measured measure(const struct rig_setup *setup)
{
    rig_start(&rig, setup);
    rig_wait_for_round(&rig, WARM_ROUNDS);
    uint64_t first = atomic_load(&rig.last_round);
    struct rig_status before = rig_read_status(&rig);
    double cpu = rig_cpu_of_syncer(&rig);
    double parts[PARTS], seconds = 0, rounds = 0;
    for (uint64_t part = 0, at = first; part < PARTS; part++) {
        int64_t start = dl_now_ns();
        rig_wait_for_round(&rig, at + PART_ROUNDS);
        double took = (double)(dl_now_ns() - start) * 1e-9, made = (double)(atomic_load(&rig.last_round) - at);
        at = atomic_load(&rig.last_round);
        parts[part] = took / made;
        seconds += took;
        rounds += made;
    }
    cpu = rig_cpu_of_syncer(&rig) - cpu;
    struct measured m = {.round = bench_stats_of(parts, PARTS), .after = rig_read_status(&rig)};
    m.round_seconds = seconds / rounds;
    double gb = (m.after.in - before.in + m.after.out - before.out) * 1e-9;
    m.cpu_per_gb = cpu / gb;
    m.gb_per_round = gb / rounds;
    rig_stop(&rig);
    return m;
}

/* 4 learners, two fragments of 32 MiB whose rounds overlap. */
static void cost(struct bench_report *report, const char *compression, bool durable, const char *const names[2])
{
    struct rig_setup setup = {.program = program,
                              .learners = 4,
                              .fragments = 2,
                              .rows = 2048,
                              .columns = 4096,
                              .compression = compression,
                              .broadcast = "none",
                              .durable = durable,
                              .pause_us = 2000};
    double yardstick = rig_raw_receive_cpu(RAW_BYTES, rig_fragment_bytes(&setup));
    struct measured m = measure(&setup);
    printf("%-5s %-7s round %7.1f ms (%.1f MB moved), syncer %.3f CPU s/GB (raw TCP, one end: %.3f), merge %.1f ms, "
           "commit %.1f ms\n",
           compression, durable ? "durable" : "memory", m.round_seconds * 1e3, m.gb_per_round * 1e3, m.cpu_per_gb,
           yardstick, m.after.merge * 1e3, m.after.commit * 1e3);
    bench_add_spread(report, names[0], bench_scale(m.round, 1e3), "ms", NULL, 0);
    bench_add(report, names[1], m.cpu_per_gb, "s/GB", "raw_tcp_one_end", m.cpu_per_gb / yardstick);
}

/* --- whole rounds beside plain TCP and Gloo -------------------------------------------------------------------------- */

struct gloo {  /* pid 0: there is none. */
    pid_t pid; /* Of its process group, too. */
    FILE *orders, *answers;
};

/* A line of its answers, in time; false: none came. */
static bool gloo_read(struct gloo *gloo, char *line, int size, int seconds)
{
    struct pollfd ready = {.fd = fileno(gloo->answers), .events = POLLIN};
    return poll(&ready, 1, seconds * 1000) == 1 && fgets(line, size, gloo->answers) != NULL;
}

/* It ends with its orders; by force, with all of its workers, where it does not. */
static void gloo_stop(struct gloo *gloo)
{
    char line[64];
    if (gloo->pid > 0) {
        fclose(gloo->orders);
        while (gloo_read(gloo, line, sizeof line, GLOO_END_SECONDS_MAX)) {
        }
        kill(-gloo->pid, SIGKILL);
        waitpid(gloo->pid, NULL, 0);
        fclose(gloo->answers);
    }
    gloo->pid = 0;
}

static void gloo_start(struct gloo *gloo)
{
    int orders[2], answers[2];
    char workers[16], elements[32], line[64];
    *gloo = (struct gloo){0};
    if (access(PYTHON, X_OK) != 0) {
        printf("Gloo is left out: no build/venv-compat (make bench-deps)\n");
        return;
    }
    /* No syncer that is started later may keep its orders open: their end is its end. */
    if (pipe2(orders, O_CLOEXEC) != 0 || pipe2(answers, O_CLOEXEC) != 0) {
        rig_fail("bench: pipe");
    }
    snprintf(workers, sizeof workers, "%d", LEARNERS);
    snprintf(elements, sizeof elements, "%llu", (unsigned long long)(FRAGMENT_BYTES / sizeof(float)));
    gloo->pid = fork();
    if (gloo->pid == 0) {
        setpgid(0, 0);
        dup2(orders[0], STDIN_FILENO);
        dup2(answers[1], STDOUT_FILENO);
        execl(PYTHON, PYTHON, "tests/bench/gloo_all_reduce.py", workers, elements, (char *)NULL);
        _exit(127);
    }
    setpgid(gloo->pid, gloo->pid);
    close(orders[0]);
    close(answers[1]);
    gloo->orders = fdopen(orders[1], "w");
    gloo->answers = fdopen(answers[0], "r");
    if (gloo->pid < 0 || gloo->orders == NULL || gloo->answers == NULL) {
        rig_fail("bench: Gloo");
    }
    if (!gloo_read(gloo, line, sizeof line, GLOO_SECONDS_MAX)) {
        printf("Gloo is left out: it did not start (build/venv-compat/bin/python tests/bench/gloo_all_reduce.py 8 "
               "1000)\n");
        gloo_stop(gloo);
    }
}

/* Of one repeat. */
struct turn {
    double seconds, cpu;
};

struct series {
    uint32_t count;
    double seconds[TURNS], cpu[TURNS];
};

static void keep(struct series *series, const char *name, struct turn turn)
{
    printf("  %s %.0f ms, %.2f CPU s;", name, turn.seconds * 1e3, turn.cpu);
    series->seconds[series->count] = turn.seconds;
    series->cpu[series->count++] = turn.cpu;
}

static struct turn gloo_turn(struct gloo *gloo)
{
    char line[64], *at = line;
    fputs("\n", gloo->orders);
    fflush(gloo->orders);
    if (!gloo_read(gloo, line, sizeof line, GLOO_SECONDS_MAX)) {
        kill(-gloo->pid, SIGKILL);
        rig_fail("bench: Gloo did not answer");
    }
    struct turn turn = {.seconds = strtod(line, &at)};
    turn.cpu = strtod(at, NULL);
    return turn;
}

static struct turn raw_turn(const struct rig_raw_round *raw, uint64_t up, uint64_t down)
{
    struct turn turn;
    turn.seconds = rig_raw_round(raw, up, down, &turn.cpu);
    return turn;
}

/* CPU is that of syncer and learners. */
static struct turn round_turn(struct rig *of)
{
    double cpu = rig_cpu_of_syncer(of) + rig_cpu_of_process();
    int64_t start = dl_now_ns();
    rig_run_rounds(of, ROUNDS_A_TURN);
    return (struct turn){.seconds = (double)(dl_now_ns() - start) * 1e-9 / ROUNDS_A_TURN,
                         .cpu = (rig_cpu_of_syncer(of) + rig_cpu_of_process() - cpu) / ROUNDS_A_TURN};
}

enum { F32, INT4, FORMS };

static const struct form {
    const char *name, *compression, *broadcast, *beside_gloo, *memory;
    uint64_t up, down;
} forms[FORMS] = {
    [F32] = {"round_f32", "none", "none", "round_f32_gloo", "round_f32_memory", FRAGMENT_BYTES, FRAGMENT_BYTES},
    [INT4] = {"round_int4", "int4", "bf16", "round_int4_gloo", "round_int4_memory",
              FRAGMENT_BYTES / DL_BLOCK / sizeof(float) * (4 + DL_BLOCK / 2), FRAGMENT_BYTES / 2},
};

static struct bench_stats report_series(const char *name, struct series *series)
{
    struct bench_stats seconds = bench_stats_of(series->seconds, series->count);
    struct bench_stats cpu = bench_stats_of(series->cpu, series->count);
    printf("%-22s %7.1f ms (%.1f .. %.1f), %.2f CPU s (%.2f .. %.2f)\n", name, seconds.median * 1e3, seconds.min * 1e3,
           seconds.max * 1e3, cpu.median, cpu.min, cpu.max);
    return seconds;
}

/* The bound on a round: (learners in the round x encoded fragment) + 3 x fragment, beside what connections and the idle
 * process take. */
static void report_memory(struct bench_report *report, const struct form *form, double most_mb, double idle_mb)
{
    double bound_mb =
        (LEARNERS * (double)form->up + 3 * (double)FRAGMENT_BYTES) * 1e-6 + LEARNERS * CONNECTION_MB + idle_mb;
    printf("%-22s %7.1f MB at most; bound %.1f MB: %.2f%s\n", form->memory, most_mb, bound_mb, most_mb / bound_mb,
           most_mb > bound_mb ? "  ABOVE ITS BOUND" : "");
    bench_add(report, form->memory, most_mb, "MB", "bound", most_mb / bound_mb);
}

/* One fragment of 100 MB, everybody in every round. */
static void whole_rounds(struct bench_report *report)
{
    static struct rig rigs[FORMS];
    static struct series ours[FORMS], floors[FORMS], of_gloo;
    struct bench_stats seconds[FORMS], floor[FORMS], gloo_seconds = {0};
    double idle_mb[FORMS];
    static struct rig_raw_round raw;
    struct gloo gloo;
    printf("starting: %d learners twice, plain TCP, Gloo\n", LEARNERS);
    gloo_start(&gloo);
    rig_raw_round_open(&raw, LEARNERS, FRAGMENT_BYTES);
    for (int f = 0; f < FORMS; f++) {
        struct rig_setup setup = {.program = program,
                                  .learners = LEARNERS,
                                  .fragments = 1,
                                  .rows = 6250,
                                  .columns = 4000,
                                  .compression = forms[f].compression,
                                  .broadcast = forms[f].broadcast,
                                  .held = true,
                                  .pause_us = 1000};
        idle_mb[f] = rig_start(&rigs[f], &setup);
        rig_run_rounds(&rigs[f], ROUNDS_A_TURN); /* All memory has been used once. */
    }
    (void)raw_turn(&raw, FRAGMENT_BYTES, FRAGMENT_BYTES);
    for (int turn = 0; turn < TURNS; turn++) {
        if (gloo.pid > 0) {
            keep(&of_gloo, "gloo", gloo_turn(&gloo));
        }
        for (int f = 0; f < FORMS; f++) {
            keep(&floors[f], "raw TCP", raw_turn(&raw, forms[f].up, forms[f].down));
            keep(&ours[f], forms[f].name, round_turn(&rigs[f]));
        }
        putchar('\n');
    }
    gloo_stop(&gloo);
    rig_raw_round_close(&raw);
    printf("rounds of %d x %.0f MB, in turn:\n", LEARNERS, (double)FRAGMENT_BYTES * 1e-6);
    if (of_gloo.count > 0) {
        gloo_seconds = report_series("gloo_all_reduce", &of_gloo);
        bench_add_spread(report, "gloo_all_reduce", bench_scale(gloo_seconds, 1e3), "ms", NULL, 0);
    }
    for (int f = 0; f < FORMS; f++) {
        floor[f] = report_series(f == F32 ? "raw_tcp_round_f32" : "raw_tcp_round_int4", &floors[f]);
        seconds[f] = report_series(forms[f].name, &ours[f]);
        printf("%-22s %.2f of plain TCP\n", forms[f].name, seconds[f].median / floor[f].median);
        report_memory(report, &forms[f], rig_memory_mb(rigs[f].pid, "VmHWM:"), idle_mb[f]);
    }
    double of_f32 = seconds[INT4].median / seconds[F32].median;
    printf("%-22s %.2f of the f32 round\n", forms[INT4].name, of_f32);
    bench_add_spread(report, forms[F32].name, bench_scale(seconds[F32], 1e3), "ms", "raw_tcp_round",
                     seconds[F32].median / floor[F32].median);
    bench_add_spread(report, forms[INT4].name, bench_scale(seconds[INT4], 1e3), "ms", "round_f32", of_f32);
    for (int f = 0; f < FORMS; f++) {
        if (of_gloo.count > 0) {
            double ratio = seconds[f].median / gloo_seconds.median;
            printf("%-22s %.2f of Gloo's all-reduce\n", forms[f].name, ratio);
            bench_add_spread(report, forms[f].beside_gloo, bench_scale(seconds[f], 1e3), "ms", "gloo_all_reduce",
                             ratio);
        }
        rig_stop(&rigs[f]);
    }
}

/* --- a round to look at ----------------------------------------------------------------------------------------------- */

/* CPU seconds of each thread of a process, in the order of their ids, at most `most`; returns how many. */
static uint32_t thread_seconds(pid_t pid, uint32_t most, double seconds[], char names[][16])
{
    char pattern[64];
    glob_t found;
    uint32_t count = 0;
    snprintf(pattern, sizeof pattern, "/proc/%d/task/*/stat", (int)pid);
    if (glob(pattern, 0, NULL, &found) != 0) {
        return 0;
    }
    for (size_t i = 0; i < found.gl_pathc && count < most; i++) {
        char text[512] = "";
        unsigned long user = 0, system = 0;
        FILE *file = fopen(found.gl_pathv[i], "r");
        bool got = file != NULL && fgets(text, sizeof text, file) != NULL;
        const char *name = got ? strchr(text, '(') : NULL, *rest = got ? strrchr(text, ')') : NULL;
        if (name != NULL && rest != NULL &&
            sscanf(rest, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) == 2) {
            snprintf(names[count], sizeof names[0], "%.*s", (int)(rest - name - 1), name + 1);
            seconds[count++] = (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
        }
        if (file != NULL) {
            fclose(file);
        }
    }
    globfree(&found);
    return count;
}

/* One kind of round, `rounds` times: CPU seconds a round by thread. For a profiler, too: docs/performance.md. */
static void look_at_round(const char *compression, const char *broadcast, uint64_t rounds)
{
    enum { most = 64 };
    static double before[2][most], after[2][most];
    static char names[2][most][16];
    const struct rig_setup setup = {.program = program,
                                    .learners = 8,
                                    .fragments = 1,
                                    .rows = 6250,
                                    .columns = 4000,
                                    .compression = compression,
                                    .broadcast = broadcast,
                                    .pause_us = 1000};
    rig_start(&rig, &setup);
    rig_wait_for_round(&rig, WARM_ROUNDS);
    const pid_t pids[] = {rig.pid, getpid()};
    for (int i = 0; i < 2; i++) {
        (void)thread_seconds(pids[i], most, before[i], names[i]);
    }
    uint64_t first = atomic_load(&rig.last_round);
    int64_t start = dl_now_ns();
    rig_wait_for_round(&rig, first + rounds);
    double made = (double)(atomic_load(&rig.last_round) - first), wall = (double)(dl_now_ns() - start) * 1e-9;
    printf("%s up, %s down: %.1f ms a round; CPU ms a round by thread:\n", compression, broadcast, wall / made * 1e3);
    for (int i = 0; i < 2; i++) {
        uint32_t count = thread_seconds(pids[i], most, after[i], names[i]);
        for (uint32_t t = 0; t < count; t++) {
            printf("  %-8s %-15s %7.1f\n", i == 0 ? "syncer" : "learners", names[i][t],
                   (after[i][t] - before[i][t]) / made * 1e3);
        }
    }
    rig_stop(&rig);
}

int main(int argc, char **argv)
{
    static char path[512];
    struct bench_report report = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    rig_find_program(argv[0], "diloco-syncer", path, sizeof path);
    program = path;
    if (argc >= 4 && strcmp(argv[1], "--round") == 0) {
        look_at_round(argv[2], argv[3], argc > 4 ? strtoull(argv[4], NULL, 10) : ROUNDS_TO_LOOK_AT);
        return 0;
    }
    program = argc > 1 ? argv[1] : path;
    bool with_cost = argc < 3 || strcmp(argv[2], "cost") == 0, with_rounds = argc < 3 || strcmp(argv[2], "rounds") == 0;
    if (with_cost) {
        cost(&report, "none", false, (const char *const[]){"syncer_none_memory_round", "syncer_none_memory_cpu"});
        cost(&report, "int8", false, (const char *const[]){"syncer_int8_memory_round", "syncer_int8_memory_cpu"});
        cost(&report, "none", true, (const char *const[]){"syncer_none_durable_round", "syncer_none_durable_cpu"});
    }
    if (with_rounds) {
        whole_rounds(&report);
    }
    return bench_write(&report, "build/results/syncer.json");
}
