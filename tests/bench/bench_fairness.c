/* bench_fairness: 64 learners with fragments of 10 MB on one syncer.
 *
 * How even it is: the slowest learner's updates against the mean; the syncer's memory against its bound, (learners in the round
 * x encoded fragment) + 3 x fragment and a fixed share a connection; and how long small requests take meanwhile. */
#include "tests/bench/syncer_rig.h"

#define LEARNERS 64
#define WARM_ROUNDS 4
#define ROUNDS 24
#define PROBES_MAX 4096
#define CONNECTION_MB 2.5 /* Of each: the transport's buffers. */

static struct rig rig;
static double probes[PROBES_MAX];
static uint32_t probe_count;
static atomic_bool measuring;

static void *probe(void *argument)
{
    char text[4096];
    while (atomic_load(&measuring) && probe_count < PROBES_MAX) {
        int64_t start = dl_now_ns();
        rig_get(argument, "/healthz", text, sizeof text);
        if (strstr(text, " 200 ") == NULL) {
            rig_fail("bench: /healthz");
        }
        probes[probe_count++] = (double)(dl_now_ns() - start) * 1e-6;
        usleep(5000);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    static char path[512];
    struct bench_report report = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    rig_find_program(argv[0], "diloco-syncer", path, sizeof path);
    struct rig_setup setup = {.program = argc > 1 ? argv[1] : path,
                              .learners = LEARNERS,
                              .fragments = 1,
                              .rows = 625,
                              .columns = 4000,
                              .compression = "int8",
                              .broadcast = "none",
                              .pause_us = 20000};
    rig_start(&rig, &setup);
    rig_wait_for_round(&rig, WARM_ROUNDS);
    uint64_t before[LEARNERS];
    for (uint32_t i = 0; i < LEARNERS; i++) {
        before[i] = atomic_load(&rig.learners[i].updates);
    }
    pthread_t thread;
    atomic_store(&measuring, true);
    if (pthread_create(&thread, NULL, probe, &rig) != 0) {
        rig_fail("bench: thread");
    }
    int64_t start = dl_now_ns();
    rig_wait_for_round(&rig, atomic_load(&rig.last_round) + ROUNDS);
    double seconds = (double)(dl_now_ns() - start) * 1e-9;
    double least = 1e18, sum = 0;
    for (uint32_t i = 0; i < LEARNERS; i++) {
        double got = (double)(atomic_load(&rig.learners[i].updates) - before[i]);
        least = DL_MIN(least, got);
        sum += got;
    }
    atomic_store(&measuring, false);
    pthread_join(thread, NULL);
    double most_mb = rig_memory_mb(rig.pid, "VmHWM:");
    rig_stop(&rig);

    double fragment_mb = (double)rig_fragment_bytes(&setup) * 1e-6;
    double bound_mb = LEARNERS * (fragment_mb / 4 * 1.02 + CONNECTION_MB) + 3 * fragment_mb;
    qsort(probes, probe_count, sizeof *probes, bench_compare_doubles);
    double p99 = probe_count > 0 ? probes[probe_count * 99 / 100] : 0;
    double fair = least / (sum / LEARNERS);
    printf("64 learners x 10 MB: %.1f ms a round; slowest learner's share %.2f of fair; memory %.0f MB (bound %.0f); "
           "requests meanwhile: p50 %.2f ms, p99 %.2f ms of %u\n",
           seconds / ROUNDS * 1e3, fair, most_mb, bound_mb, probe_count > 0 ? probes[probe_count / 2] : 0, p99,
           probe_count);
    bench_add(&report, "fairness_64", fair, "of the mean", "fair_share", fair);
    bench_add(&report, "control_p99_ms_64", p99, "ms", "limit_100_ms", p99 / 100);
    bench_add(&report, "syncer_memory_64", most_mb, "MB", "bound", most_mb / bound_mb);
    return bench_write(&report, "build/results/fairness.json");
}
