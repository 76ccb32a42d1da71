/* bench_shards: rounds and bytes a second of one job with 1, 2 and 4 syncer shards, in turn.
 *
 * 4 learners, 8 fragments of 8 MB in float32 both ways, every learner in every round. The shards' processes share this
 * machine's cores with the learners, so that on one machine the gain ends where the cores do: what shows here is that a job's
 * shards do not hold one another up. Ratios are to one shard. */
#include "tests/bench/syncer_rig.h"

#define WARM_ROUNDS 8
#define ROUNDS 32
#define RUNS 3
#define KINDS 3

static const uint32_t shards[KINDS] = {1, 2, 4};
static struct rig rig;

static uint64_t updates(void)
{
    return atomic_load(&rig.learners[0].updates);
}

static void wait_for_updates(uint64_t count)
{
    for (int i = 0; updates() < count; i++) {
        if (i > 120000) {
            fprintf(stderr, "bench: no round within two minutes\n");
            exit(1);
        }
        usleep(1000);
    }
}

/* Rounds a second: the versions that a learner applies, of all shards. */
static double run_rounds(const struct rig_setup *setup)
{
    rig_start(&rig, setup);
    wait_for_updates(WARM_ROUNDS);
    uint64_t first = updates();
    int64_t start = dl_now_ns();
    wait_for_updates(first + ROUNDS);
    double rate = (double)(updates() - first) / ((double)(dl_now_ns() - start) * 1e-9);
    rig_stop(&rig);
    return rate;
}

int main(int argc, char **argv)
{
    static char path[512];
    static double rates[KINDS][RUNS];
    static char names[KINDS][2][32];
    struct bench_report report = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    rig_find_program(argv[0], "diloco-syncer", path, sizeof path);
    struct rig_setup setup = {.program = argc > 1 ? argv[1] : path,
                              .learners = 4,
                              .fragments = 8,
                              .rows = 2000,
                              .columns = 1000,
                              .compression = "none",
                              .broadcast = "none",
                              .pause_us = 1000};
    for (int run = 0; run < RUNS; run++) {
        for (int kind = 0; kind < KINDS; kind++) {
            setup.shards = shards[kind];
            rates[kind][run] = run_rounds(&setup);
        }
    }
    double one = 0, bytes = 2.0 * setup.learners * (double)rig_fragment_bytes(&setup);
    for (int kind = 0; kind < KINDS; kind++) {
        struct bench_stats stats = bench_stats_of(rates[kind], RUNS);
        one = kind == 0 ? stats.median : one;
        printf("%u shards: min %.1f  median %.1f  max %.1f rounds/s, %.2f GB/s; %.2f of one shard\n", shards[kind],
               stats.min, stats.median, stats.max, stats.median * bytes * 1e-9, stats.median / one);
        snprintf(names[kind][0], sizeof names[kind][0], "rounds_shards_%u", shards[kind]);
        snprintf(names[kind][1], sizeof names[kind][1], "bytes_shards_%u", shards[kind]);
        bench_add(&report, names[kind][0], stats.median, "1/s", kind == 0 ? NULL : "rounds_shards_1",
                  kind == 0 ? 0 : stats.median / one);
        bench_add(&report, names[kind][1], stats.median * bytes * 1e-9, "GB/s", NULL, 0);
    }
    return bench_write(&report, "build/results/shards.json");
}
