/* bench_syncer: whole outer rounds through a real diloco-syncer, beside yardsticks in the same run.
 *
 *     syncer [PROGRAM [cost | rounds]]
 *     syncer --round int4 bf16 [ROUNDS]      such rounds only, for a profiler (docs/performance.md)
 *
 * First, what a round costs the syncer's process: CPU of network thread, merge and encoding, a GB moved in either direction;
 * the yardstick is what one end of a plain TCP connection takes for a GB. Then, how long a round of 8 learners x 100 MB takes
 * (float32, and int4 up with bf16 down), in turn with what it is compared with: what waits for its turn is asleep, connections
 * and memory are as old as those of the round, and CPU seconds are those of all ends.
 *
 * Plain TCP is a floor, not a round: 8 connections carry the pushes' bytes up, each into memory of its own, then the update's
 * bytes down, out of one memory into eight, with a thread an end, so that both cores copy all the time. What a round does to
 * the bytes has no part in it; on one host that shares two cores with the transfer, and cannot hide behind it as it does
 * where learners have machines of their own. Its sockets are as the system sets them up; where that is with pacing (common/socket.h)
 * it is slower for that, and `raw_tcp_round_reno`, the same over sockets set up as ours are, is the stricter floor.
 * By hand (round_by_hand.h): the same with the work on the bytes that no round can do without: deltas, merge, outer step, copy
 * into the parameters. What is left between it and a round are frames, checksums, masks, and that one thread serves all.
 * Gloo (gloo_rounds.py): an all-reduce between 8 processes, which is a floor again, and the whole outer step as PyTorch's users
 * write it, with SGD and with Nesterov's momentum (what the syncer's own round here takes). It needs all of them at once. */
#include <glob.h>

#include "common/codec.h"
#include "tests/bench/gloo.h"
#include "tests/bench/round_by_hand.h"
#include "tests/bench/syncer_rig.h"

#define WARM_ROUNDS 4
#define PARTS 4 /* Timed one by one. */
#define PART_ROUNDS 3
#define ROUNDS_TO_LOOK_AT 20
#define RAW_BYTES (UINT64_C(2) << 30)

#define TURNS 5
#define ROUNDS_A_TURN 3
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

/* --- whole rounds beside yardsticks ---------------------------------------------------------------------------------- */

enum { F32, INT4, FORMS };

static const struct form {
    const char *compression, *broadcast, *memory;
    enum dl_codec up, down;
} forms[FORMS] = {
    [F32] = {"none", "none", "round_f32_memory", DL_CODEC_NONE, DL_CODEC_NONE},
    [INT4] = {"int4", "bf16", "round_int4_memory", DL_CODEC_INT4, DL_CODEC_BF16},
};

enum kind { RAW_F32, RAW_RENO, RAW_INT4, BY_HAND, GLOO, GLOO_SGD, GLOO_NESTEROV, ROUND_F32, ROUND_INT4, KINDS };

static struct series { /* One kind of round, an entry a turn. */
    const char *name;
    uint32_t count; /* 0: left out. */
    double seconds[TURNS], cpu[TURNS];
    struct bench_stats of_seconds, of_cpu;
} series[KINDS] = {
    [RAW_F32] = {.name = "raw_tcp_round"},
    [RAW_RENO] = {.name = "raw_tcp_round_reno"},
    [RAW_INT4] = {.name = "raw_tcp_round_int4"},
    [BY_HAND] = {.name = "by_hand"},
    [GLOO] = {.name = "gloo_all_reduce"},
    [GLOO_SGD] = {.name = "gloo_outer"},
    [GLOO_NESTEROV] = {.name = "gloo_outer_nesterov"},
    [ROUND_F32] = {.name = "round_f32"},
    [ROUND_INT4] = {.name = "round_int4"},
};

static const struct figure { /* Our round, by its time and as a ratio to another one's. */
    const char *name;
    enum kind of, to;
} figures[] = {
    {"round_f32", ROUND_F32, RAW_F32},
    {"round_f32_raw_reno", ROUND_F32, RAW_RENO},
    {"round_int4", ROUND_INT4, ROUND_F32},
    {"round_f32_by_hand", ROUND_F32, BY_HAND},
    {"round_f32_gloo", ROUND_F32, GLOO},
    {"round_int4_gloo", ROUND_INT4, GLOO},
    {"round_f32_gloo_outer", ROUND_F32, GLOO_SGD},
    {"round_int4_gloo_outer", ROUND_INT4, GLOO_SGD},
    {"round_f32_gloo_nesterov", ROUND_F32, GLOO_NESTEROV},
    {"round_int4_gloo_nesterov", ROUND_INT4, GLOO_NESTEROV},
};

static struct contest {
    struct rig rigs[FORMS];
    struct rig_raw_round raw;
    struct by_hand by_hand;
    struct gloo gloo;
    double idle_mb[FORMS];
} contest;

static uint64_t encoded_bytes(enum dl_codec codec)
{
    return dl_codec_bytes(codec, contest.by_hand.elements);
}

static double raw_seconds(int form, bool unpaced, double *cpu)
{
    return rig_raw_round(&contest.raw, unpaced, encoded_bytes(forms[form].up), encoded_bytes(forms[form].down), cpu);
}

/* CPU is that of syncer and learners. */
static double round_seconds(struct rig *of, double *cpu)
{
    double before = rig_cpu_of_syncer(of) + rig_cpu_of_process();
    int64_t start = dl_now_ns();
    rig_run_rounds(of, ROUNDS_A_TURN);
    *cpu = (rig_cpu_of_syncer(of) + rig_cpu_of_process() - before) / ROUNDS_A_TURN;
    return (double)(dl_now_ns() - start) * 1e-9 / ROUNDS_A_TURN;
}

static void take_turn(enum kind kind)
{
    double seconds = 0, cpu = 0;
    bool is_gloo = kind == GLOO || kind == GLOO_SGD || kind == GLOO_NESTEROV;
    if (is_gloo && contest.gloo.pid == 0) {
        return;
    }
    switch (kind) {
    case RAW_F32: seconds = raw_seconds(F32, false, &cpu); break;
    case RAW_RENO: seconds = raw_seconds(F32, true, &cpu); break;
    case RAW_INT4: seconds = raw_seconds(INT4, false, &cpu); break;
    case BY_HAND: seconds = by_hand_round(&contest.by_hand, &cpu); break;
    case GLOO: seconds = gloo_run(&contest.gloo, "all_reduce", &cpu); break;
    case GLOO_SGD: seconds = gloo_run(&contest.gloo, "sgd", &cpu); break;
    case GLOO_NESTEROV: seconds = gloo_run(&contest.gloo, "nesterov", &cpu); break;
    case ROUND_F32: seconds = round_seconds(&contest.rigs[F32], &cpu); break;
    case ROUND_INT4: seconds = round_seconds(&contest.rigs[INT4], &cpu); break;
    case KINDS: break;
    }
    struct series *to = &series[kind];
    to->seconds[to->count] = seconds;
    to->cpu[to->count++] = cpu;
    printf("  %s %.0f ms, %.2f CPU s;", to->name, seconds * 1e3, cpu);
}

static void open_contest(void)
{
    struct rig_setup setup = rig_setup_of_round(program, "none", "none");
    printf("starting: %u learners twice, plain TCP, a round by hand, Gloo\n", setup.learners);
    gloo_start(&contest.gloo, setup.learners, (uint64_t)setup.rows * setup.columns);
    by_hand_open(&contest.by_hand, setup.rows, setup.columns);
    rig_raw_round_open(&contest.raw, setup.learners, encoded_bytes(DL_CODEC_NONE));
    for (int f = 0; f < FORMS; f++) {
        setup = rig_setup_of_round(program, forms[f].compression, forms[f].broadcast);
        setup.held = true;
        contest.idle_mb[f] = rig_start(&contest.rigs[f], &setup);
        rig_run_rounds(&contest.rigs[f], ROUNDS_A_TURN); /* All memory has been used once. */
    }
    double cpu;
    (void)raw_seconds(F32, false, &cpu);
    (void)raw_seconds(F32, true, &cpu);
    (void)by_hand_round(&contest.by_hand, &cpu);
}

/* The bound on a round: (learners in the round x encoded fragment) + 3 x fragment, beside what connections and the idle
 * process take. */
static void report_memory(struct bench_report *report, int form)
{
    const struct rig *of = &contest.rigs[form];
    double most_mb = rig_memory_mb(of->pid, "VmHWM:"), learners = of->setup.learners;
    double bound_mb =
        (learners * (double)encoded_bytes(forms[form].up) + 3 * (double)encoded_bytes(DL_CODEC_NONE)) * 1e-6 +
        learners * CONNECTION_MB + contest.idle_mb[form];
    printf("%-24s %7.1f MB at most; bound %.1f MB: %.2f%s\n", forms[form].memory, most_mb, bound_mb, most_mb / bound_mb,
           most_mb > bound_mb ? "  ABOVE ITS BOUND" : "");
    bench_add(report, forms[form].memory, most_mb, "MB", "bound", most_mb / bound_mb);
}

static void report_rounds(struct bench_report *report)
{
    printf("rounds of 8 x 100 MB, in turn:\n");
    for (int k = 0; k < KINDS; k++) {
        struct series *of = &series[k];
        if (of->count > 0) {
            of->of_seconds = bench_stats_of(of->seconds, of->count);
            of->of_cpu = bench_stats_of(of->cpu, of->count);
            printf("%-24s %7.1f ms (%.1f .. %.1f), %.2f CPU s (%.2f .. %.2f)\n", of->name, of->of_seconds.median * 1e3,
                   of->of_seconds.min * 1e3, of->of_seconds.max * 1e3, of->of_cpu.median, of->of_cpu.min,
                   of->of_cpu.max);
            if (k != ROUND_F32 && k != ROUND_INT4) {
                bench_add_spread(report, of->name, bench_scale(of->of_seconds, 1e3), "ms", NULL, 0);
            }
        }
    }
    for (size_t i = 0; i < DL_COUNT_OF(figures); i++) {
        const struct figure *figure = &figures[i];
        const struct series *of = &series[figure->of], *to = &series[figure->to];
        if (to->count > 0) {
            double ratio = of->of_seconds.median / to->of_seconds.median;
            printf("%-24s %.2f of %s; by CPU seconds %.2f\n", figure->name, ratio, to->name,
                   of->of_cpu.median / to->of_cpu.median);
            bench_add_spread(report, figure->name, bench_scale(of->of_seconds, 1e3), "ms", to->name, ratio);
        }
    }
}

/* One fragment of 100 MB, everybody in every round. */
static void whole_rounds(struct bench_report *report)
{
    open_contest();
    for (int turn = 0; turn < TURNS; turn++) {
        for (enum kind kind = 0; kind < KINDS; kind++) {
            take_turn(kind);
        }
        putchar('\n');
    }
    report_rounds(report);
    for (int f = 0; f < FORMS; f++) {
        report_memory(report, f);
        rig_stop(&contest.rigs[f]);
    }
    gloo_stop(&contest.gloo);
    by_hand_close(&contest.by_hand);
    rig_raw_round_close(&contest.raw);
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
    const struct rig_setup setup = rig_setup_of_round(program, compression, broadcast);
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
