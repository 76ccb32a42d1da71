/* bench_syncer: whole outer rounds through a real diloco-syncer, against raw TCP in the same run.
 *
 * First, what a round costs the syncer's process: CPU of network thread, merge and encoding, a GB moved in either direction;
 * the yardstick is what one end of a plain TCP connection takes for a GB. Then, how long a round of 8 learners x 100 MB takes
 * against plain TCP that moves the same bytes, and against Gloo's all-reduce between 8 processes, which needs every one of
 * them at once. PyTorch is taken from build/venv-compat when it is there (make bench-deps makes it), else Gloo is left out. */
#include "tests/bench/syncer_rig.h"

#define WARM_ROUNDS 4
#define PARTS 4 /* Timed one by one. */
#define PART_ROUNDS 3
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

int main(int argc, char **argv)
{
    static char path[512];
    struct bench_report report = {0};
    rig_find_program(argv[0], "diloco-syncer", path, sizeof path);
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
