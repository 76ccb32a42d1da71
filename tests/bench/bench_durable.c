/* bench_durable: what being durable costs, and how soon rounds flow again after the syncer was killed.
 *
 *   commit_share              share of a round's time by which it takes longer than the same round of a syncer that keeps nothing,
 *                             in turn in the same run: what being durable holds a round up by anywhere, the merge and the
 *                             broadcast beside which it writes included, rounds of 8 learners x 100 MB; under 0.05
 *   held_share                share of a round's time in which the last chunk alone was left to send to some learner, and waited
 *                             for the commit
 *   durable_round_ratio       the two rounds' times by each other
 *   restart_to_round_seconds  100 M parameters in four fragments: from SIGKILL, with the syncer started again at once, to the
 *                             next round at the learners; under 3. Their steps meanwhile are counted
 *   durable_long              10,000 rounds: disk beside the tape stays as it is, the tape grows by so much a round, memory
 *                             does not grow
 * bench_durable --commit measures the first three alone. Besides the usual results all but the last go to build/results/durable.json. */
#include <dirent.h>
#include <sys/stat.h>

#include "tests/bench/syncer_rig.h"

#define WARM_ROUNDS 4
#define ROUNDS 8
#define RUNS 3
#define RESTARTS 5
#define LONG_ROUNDS 10000

static const char *program, *build;
static struct rig rig;

static void note(const char *name, double value)
{
    char command[256];
    snprintf(command, sizeof command, "python3 tests/integration/lib/durable.py %s %s=%.6f", build, name, value);
    if (system(command) != 0) {
        rig_fail(command);
    }
}

struct shared { /* Rounds of one kind, one entry a run. */
    double round[RUNS], commit[RUNS], held[RUNS];
};

/* Means over the rounds that the bench has seen, seconds. */
static void run_rounds(const struct rig_setup *setup, struct shared *shared, int run)
{
    rig_start(&rig, setup);
    rig_wait_for_round(&rig, WARM_ROUNDS);
    uint64_t first = atomic_load(&rig.last_round);
    int64_t start = dl_now_ns();
    rig_wait_for_round(&rig, first + ROUNDS);
    shared->round[run] = (double)(dl_now_ns() - start) * 1e-9 / (double)(atomic_load(&rig.last_round) - first);
    struct rig_status status = rig_read_status(&rig);
    shared->commit[run] = status.commit;
    shared->held[run] = status.held;
    rig_stop(&rig);
}

static void commit_share(struct bench_report *report, const char *compression, const char *broadcast,
                         const char *const names[3])
{
    static struct shared shared[2];
    struct rig_setup setup = rig_setup_of_round(program, compression, broadcast);
    for (int run = 0; run < RUNS; run++) {
        for (int durable = 0; durable < 2; durable++) { /* In turn, so that both see the same machine. */
            setup.durable = durable == 1;
            run_rounds(&setup, &shared[durable], run);
        }
    }
    double memory = bench_stats_of(shared[0].round, RUNS).median, round = bench_stats_of(shared[1].round, RUNS).median;
    double held = bench_stats_of(shared[1].held, RUNS).median, commit = bench_stats_of(shared[1].commit, RUNS).median;
    double share = 1 - memory / round;
    printf("8 x 100 MB, %s up, %s down: round %.0f ms, in memory alone %.0f ms, %.1f %% less; commit %.1f ms, of which "
           "the last "
           "chunk waited %.1f ms, %.1f %%\n",
           compression, broadcast, round * 1e3, memory * 1e3, 100 * share, commit * 1e3, held * 1e3,
           100 * held / round);
    bench_add(report, names[0], share * round * 1e3, "ms", "round", share);
    bench_add(report, names[2], held * 1e3, "ms", "round", held / round);
    bench_add(report, names[1], round * 1e3, "ms", "round_in_memory", round / memory);
    if (strcmp(compression, "none") == 0) {
        note("commit_share", share);
        note("held_share", held / round);
        note("durable_round_ratio", round / memory);
    }
}

static uint64_t steps(void)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < rig.setup.learners; i++) {
        sum += atomic_load(&rig.learners[i].steps);
    }
    return sum;
}

static void restart(struct bench_report *report)
{
    const struct rig_setup setup = {.program = program,
                                    .learners = 2,
                                    .fragments = 4,
                                    .rows = 6250,
                                    .columns = 4000,
                                    .compression = "int8",
                                    .broadcast = "none",
                                    .durable = true,
                                    .pause_us = 20000};
    double seconds[RESTARTS];
    rig_start(&rig, &setup);
    rig_wait_for_round(&rig, WARM_ROUNDS);
    for (int i = 0; i < RESTARTS; i++) {
        rig_wait_for_round(&rig, atomic_load(&rig.last_round) + 4);
        kill(rig.pid, SIGKILL);
        waitpid(rig.pid, NULL, 0);
        int64_t down_ns = dl_now_ns();
        uint64_t round = atomic_load(&rig.last_round), before = steps();
        rig_start_syncer(&rig);
        double up = (double)(dl_now_ns() - down_ns) * 1e-9, cpu = rig_cpu_of_syncer(&rig);
        rig_wait_for_round(&rig, round + 1);
        seconds[i] = (double)(dl_now_ns() - down_ns) * 1e-9;
        printf("restart: listens after %.2f s (%.2f s of CPU), next round after %.2f s; learners made %llu steps "
               "meanwhile\n",
               up, cpu, seconds[i], (unsigned long long)(steps() - before));
        if (steps() - before < 4) {
            fprintf(stderr, "bench: learners stood still\n");
            exit(1);
        }
    }
    rig_stop(&rig);
    struct bench_stats stats = bench_stats_of(seconds, RESTARTS);
    bench_add_spread(report, "restart_to_round", stats, "s", "bound", stats.median / 3);
    note("restart_to_round_seconds", stats.max);
}

struct disk {
    double files, tape; /* Bytes. */
};

static struct disk read_disk(void)
{
    char path[512];
    struct disk disk = {0};
    snprintf(path, sizeof path, "%s/state", rig.folder);
    DIR *folder = opendir(path);
    if (folder == NULL) {
        rig_fail(path);
    }
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        struct stat info;
        snprintf(path, sizeof path, "%s/state/%s", rig.folder, entry->d_name);
        if (entry->d_name[0] != '.' && stat(path, &info) == 0) {
            *(strncmp(entry->d_name, "tape", 4) == 0 ? &disk.tape : &disk.files) += (double)info.st_size;
        }
    }
    closedir(folder);
    return disk;
}

static void many_rounds(struct bench_report *report)
{
    const struct rig_setup setup = {.program = program,
                                    .learners = 4,
                                    .fragments = 4,
                                    .rows = 64,
                                    .columns = 256,
                                    .compression = "int8",
                                    .broadcast = "none",
                                    .durable = true,
                                    .pause_us = 500};
    rig_start(&rig, &setup);
    for (uint64_t round = LONG_ROUNDS / 10; round <= LONG_ROUNDS / 5; round += LONG_ROUNDS / 10) {
        rig_wait_for_round(&rig, round);
    }
    struct disk early = read_disk();
    double memory = rig_memory_mb(rig.pid, "VmRSS:");
    uint64_t first = atomic_load(&rig.last_round);
    for (uint64_t round = first; round <= LONG_ROUNDS; round += 500) {
        rig_wait_for_round(&rig, round);
    }
    rig_wait_for_round(&rig, LONG_ROUNDS);
    struct disk late = read_disk();
    double now = rig_memory_mb(rig.pid, "VmRSS:"), rounds = (double)(atomic_load(&rig.last_round) - first);
    rig_stop(&rig);
    double a_round = (late.tape - early.tape) / rounds;
    printf("%d rounds: fragments %.0f KB then %.0f KB, tape +%.0f bytes a round, memory %.1f MB then %.1f MB\n",
           LONG_ROUNDS, early.files * 1e-3, late.files * 1e-3, a_round, memory, now);
    bench_add(report, "durable_long_files", late.files * 1e-3, "KB", "after_2000_rounds", late.files / early.files);
    bench_add(report, "durable_long_memory", now, "MB", "after_2000_rounds", now / memory);
    bench_add(report, "tape_bytes_a_round", a_round, "B", NULL, 0);
}

int main(int argc, char **argv)
{
    static char path[512], folder[512];
    struct bench_report report = {0};
    rig_find_program(argv[0], "diloco-syncer", path, sizeof path);
    snprintf(folder, sizeof folder, "%.*s", (int)(strstr(path, "/bench/") == NULL ? 0 : strstr(path, "/bench/") - path),
             path);
    program = path;
    build = folder[0] != '\0' ? folder : "build/release";
    commit_share(&report, "none", "none", (const char *const[]){"commit_f32", "durable_round_f32", "held_f32"});
    commit_share(&report, "int4", "bf16", (const char *const[]){"commit_int4", "durable_round_int4", "held_int4"});
    if (argc < 2 || strcmp(argv[1], "--commit") != 0) {
        restart(&report);
        many_rounds(&report);
    }
    return bench_write(&report, "build/results/durable_bench.json");
}
