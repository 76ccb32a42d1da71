/* bench_syncer: whole outer rounds through a real diloco-syncer, against raw TCP in the same run.
 *
 * First, what a round costs the syncer's process: CPU of network thread, merge and encoding, a GB moved in either direction;
 * the yardstick is what one end of a plain TCP connection takes for a GB. Then, how long a round of 8 learners x 100 MB takes
 * against plain TCP that moves the same bytes, and against Gloo's all-reduce between 8 processes, which needs every one of
 * them at once. PyTorch is taken from build/venv-compat when it is there (make bench-deps makes it), else Gloo is left out. */
#include <glob.h>

#include "tests/bench/syncer_rig.h"

#define WARM_ROUNDS 4
#define PARTS 4 /* Timed one by one. */
#define PART_ROUNDS 3
#define ROUNDS_TO_LOOK_AT 20
#define RAW_BYTES (UINT64_C(2) << 30)
#define RAW_REPEATS 3

#define GLOO_REPEATS 5

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

/* Seconds that Gloo takes to all-reduce 100 MB between 8 workers; 0: there is no PyTorch. */
static double gloo_round(void)
{
    char command[256], line[256] = "";
    double seconds[GLOO_REPEATS];
    snprintf(command, sizeof command,
             "build/venv-compat/bin/python tests/bench/gloo_all_reduce.py 8 25000000 %d 2>/dev/null", GLOO_REPEATS);
    if (access("build/venv-compat/bin/python", X_OK) != 0) {
        printf("Gloo is left out: no build/venv-compat (make bench-deps)\n");
        return 0;
    }
    FILE *pipe = popen(command, "r");
    bool got = pipe != NULL && fgets(line, sizeof line, pipe) != NULL;
    if (pipe == NULL || pclose(pipe) != 0 || !got) {
        fprintf(stderr, "bench: no answer from: %s\n", command);
        exit(1);
    }
    char *at = line;
    for (int i = 0; i < GLOO_REPEATS; i++) {
        seconds[i] = strtod(at, &at);
    }
    return bench_stats_of(seconds, GLOO_REPEATS).median;
}

static void beside_gloo(struct bench_report *report, const char *name, double seconds, double gloo)
{
    if (gloo > 0) {
        printf("%s: %.1f ms, Gloo %.1f ms: %.2f\n", name, seconds * 1e3, gloo * 1e3, seconds / gloo);
        bench_add(report, name, seconds * 1e3, "ms", "gloo_all_reduce", seconds / gloo);
    }
}

/* One fragment of 100 MB, everybody in every round: seconds from one version to the next. */
static double whole_round(struct bench_report *report, const char *compression, const char *broadcast, uint64_t up,
                          uint64_t down, const char *name, double f32_seconds)
{
    struct rig_setup setup = {.program = program,
                              .learners = 8,
                              .fragments = 1,
                              .rows = 6250,
                              .columns = 4000,
                              .compression = compression,
                              .broadcast = broadcast,
                              .pause_us = 1000};
    double raw[RAW_REPEATS];
    for (int i = 0; i < RAW_REPEATS; i++) {
        raw[i] = rig_raw_round(setup.learners, up, down);
    }
    struct bench_stats floor = bench_stats_of(raw, RAW_REPEATS);
    struct measured m = measure(&setup);
    printf("round of 8 x 100 MB, %s up, %s down: %.1f ms; plain TCP for the same bytes %.1f ms (%.1f .. %.1f): %.2f",
           compression, broadcast, m.round_seconds * 1e3, floor.median * 1e3, floor.min * 1e3, floor.max * 1e3,
           m.round_seconds / floor.median);
    if (f32_seconds > 0) {
        printf("; of the f32 round: %.2f\n", m.round_seconds / f32_seconds);
        bench_add_spread(report, name, bench_scale(m.round, 1e3), "ms", "round_f32", m.round_seconds / f32_seconds);
    } else {
        printf("\n");
        bench_add_spread(report, name, bench_scale(m.round, 1e3), "ms", "raw_tcp_round",
                         m.round_seconds / floor.median);
    }
    return m.round_seconds;
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

/* Without arguments the bench; `syncer --round int4 bf16 [ROUNDS]`: such rounds only. */
int main(int argc, char **argv)
{
    static char path[512];
    struct bench_report report = {0};
    rig_find_program(argv[0], "diloco-syncer", path, sizeof path);
    program = path;
    if (argc >= 4 && strcmp(argv[1], "--round") == 0) {
        look_at_round(argv[2], argv[3], argc > 4 ? strtoull(argv[4], NULL, 10) : ROUNDS_TO_LOOK_AT);
        return 0;
    }
    program = argc > 1 ? argv[1] : path;
    cost(&report, "none", false, (const char *const[]){"syncer_none_memory_round", "syncer_none_memory_cpu"});
    cost(&report, "int8", false, (const char *const[]){"syncer_int8_memory_round", "syncer_int8_memory_cpu"});
    cost(&report, "none", true, (const char *const[]){"syncer_none_durable_round", "syncer_none_durable_cpu"});
    const uint64_t f32 = UINT64_C(100000000);
    double seconds = whole_round(&report, "none", "none", f32, f32, "round_f32", 0);
    double small = whole_round(&report, "int4", "bf16", f32 / 8, f32 / 2, "round_int4", seconds);
    double gloo = gloo_round();
    beside_gloo(&report, "round_f32_gloo", seconds, gloo);
    beside_gloo(&report, "round_int4_gloo", small, gloo);
    return bench_write(&report, "build/results/syncer.json");
}
