/* bench: timing loops, their statistics, and a report as JSON; for tests/bench alone.
 *
 *     struct bench_report report = {0};
 *     struct bench_stats stats = bench_measure(run, &context, 2, 9);
 *     bench_add_spread(&report, "merge_mean_1t", bench_scale(stats, 1e3), "ms", "memory_read_1t", ratio);
 *     return bench_write(&report, "build/results/merge.json");
 *
 * Absolute figures move from machine to machine and from minute to minute: each is reported as a ratio to a yardstick
 * that ran in turn with it (bench_measure_pair). */
#ifndef DL_TESTS_BENCH_H
#define DL_TESTS_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "common/clock.h"
#include "common/isa.h"

#define BENCH_REPEATS_MAX 64
#define BENCH_ENTRIES_MAX 128

struct bench_stats { /* Seconds, unless it says otherwise. */
    double min, median, max;
};

static inline struct bench_stats bench_scale(struct bench_stats stats, double factor)
{
    return (struct bench_stats){stats.min * factor, stats.median * factor, stats.max * factor};
}

/* From times to rates: `amount` a time; the longest time is the lowest rate. */
static inline struct bench_stats bench_rates(struct bench_stats times, double amount)
{
    return (struct bench_stats){amount / times.max, amount / times.median, amount / times.min};
}

static inline int bench_compare_doubles(const void *a, const void *b)
{
    const double *left = (const double *)a;
    const double *right = (const double *)b;
    return (*left > *right) - (*left < *right);
}

/* Orders `values`. */
static inline struct bench_stats bench_stats_of(double *values, uint32_t count)
{
    qsort(values, count, sizeof *values, bench_compare_doubles);
    double middle = count % 2 == 1 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
    return (struct bench_stats){.min = values[0], .median = middle, .max = values[count - 1]};
}

static inline double bench_seconds(void (*run)(void *context), void *context)
{
    int64_t start = dl_now_ns();
    run(context);
    return (double)(dl_now_ns() - start) * 1e-9;
}

/* Runs `run` `warmups` times unmeasured, then `repeats` (1 .. BENCH_REPEATS_MAX) times. */
static inline struct bench_stats bench_measure(void (*run)(void *context), void *context, uint32_t warmups,
                                               uint32_t repeats)
{
    double seconds[BENCH_REPEATS_MAX] = {0};
    repeats = repeats < 1 ? 1 : repeats > BENCH_REPEATS_MAX ? BENCH_REPEATS_MAX : repeats;
    for (uint32_t i = 0; i < warmups; i++) {
        run(context);
    }
    for (uint32_t i = 0; i < repeats; i++) {
        seconds[i] = bench_seconds(run, context);
    }
    return bench_stats_of(seconds, repeats);
}

/* Seconds of processor time that the calling thread got: for work of one thread, a busy machine counts less then. */
static inline double bench_processor_seconds(void (*run)(void *context), void *context)
{
    struct timespec start, end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &start);
    run(context);
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    return (double)(end.tv_sec - start.tv_sec) + (double)(end.tv_nsec - start.tv_nsec) * 1e-9;
}

/* As bench_measure for two jobs in turn, so that both see the same machine. `seconds_of`: bench_seconds or
 * bench_processor_seconds. */
static inline void bench_measure_pair(double (*seconds_of)(void (*run)(void *context), void *context),
                                      void (*yardstick)(void *context), void (*run)(void *context), void *context,
                                      uint32_t repeats, struct bench_stats *of_yardstick, struct bench_stats *of_run)
{
    double seconds[2][BENCH_REPEATS_MAX] = {{0}};
    repeats = repeats < 1 ? 1 : repeats > BENCH_REPEATS_MAX ? BENCH_REPEATS_MAX : repeats;
    yardstick(context);
    run(context);
    for (uint32_t i = 0; i < repeats; i++) {
        seconds[0][i] = seconds_of(yardstick, context);
        seconds[1][i] = seconds_of(run, context);
    }
    *of_yardstick = bench_stats_of(seconds[0], repeats);
    *of_run = bench_stats_of(seconds[1], repeats);
}

/* Reads bytes `begin` .. `end` - 1 (multiples of 4096) of each of `count` arrays, as fast as the machine can: wide vectors
 * whatever the flags, `granule` bytes (256 .. 4096) of each array in turn, and nothing fetched ahead but by the processor
 * itself: asking for lines ahead in eight arrays takes longer than waiting for them. The sum is there so that the reads
 * are. The yardstick of everything that is bound by memory; which granule is fastest depends on the machine. */
#define BENCH_READ_WAYS 3
static const size_t bench_read_granules[BENCH_READ_WAYS] = {256, 1024, 4096};
typedef uint64_t bench_vector __attribute__((vector_size(64), aligned(8), may_alias));
__attribute__((target_clones("avx512f", "avx2", "default"))) static inline uint64_t
bench_read(const uint8_t *const *arrays, uint32_t count, size_t begin, size_t end, size_t granule)
{
    bench_vector sums[4] = {{0}};
    for (size_t at = begin; at < end; at += granule) {
        for (uint32_t a = 0; a < count; a++) {
            const bench_vector *vectors = (const void *)(arrays[a] + at);
            for (size_t i = 0; i < granule / sizeof(bench_vector); i += 4) {
                sums[0] += vectors[i];
                sums[1] += vectors[i + 1];
                sums[2] += vectors[i + 2];
                sums[3] += vectors[i + 3];
            }
        }
    }
    uint64_t sum = 0;
    for (size_t lane = 0; lane < 8; lane++) {
        sum += sums[0][lane] + sums[1][lane] + sums[2][lane] + sums[3][lane];
    }
    return sum;
}

/* Makes kernels use the instruction set of that name, where one is given: they are compared so. */
static inline void bench_use_isa(const char *name)
{
    bool found = name == NULL;
    for (int isa = 0; isa < DL_ISA_COUNT && !found; isa++) {
        found = strcmp(name, dl_isa_name((enum dl_isa)isa)) == 0 && dl_isa_force((enum dl_isa)isa);
    }
    if (!found) {
        fprintf(stderr, "bench: '%s' is no instruction set of this machine: portable, avx2 or avx512\n", name);
        exit(2);
    }
}

struct bench_entry { /* Strings are borrowed until bench_write. */
    const char *name, *unit;
    const char *ratio_to;     /* Name of the yardstick; NULL: the entry is one itself. */
    struct bench_stats value; /* `median` is the figure. */
    double ratio;
};

struct bench_report {
    uint32_t count;
    struct bench_entry entries[BENCH_ENTRIES_MAX];
};

static inline void bench_add_spread(struct bench_report *report, const char *name, struct bench_stats value,
                                    const char *unit, const char *ratio_to, double ratio)
{
    if (report->count == BENCH_ENTRIES_MAX) {
        fprintf(stderr, "bench: more than %d entries\n", BENCH_ENTRIES_MAX);
        exit(1);
    }
    report->entries[report->count++] =
        (struct bench_entry){.name = name, .unit = unit, .ratio_to = ratio_to, .value = value, .ratio = ratio};
}

/* A figure that was taken once. */
static inline void bench_add(struct bench_report *report, const char *name, double value, const char *unit,
                             const char *ratio_to, double ratio)
{
    bench_add_spread(report, name, (struct bench_stats){value, value, value}, unit, ratio_to, ratio);
}

static inline void bench_print(const struct bench_report *report)
{
    printf("\n%-28s %12s %12s %12s\n", "figure", "min", "median", "max");
    for (uint32_t i = 0; i < report->count; i++) {
        const struct bench_entry *entry = &report->entries[i];
        printf("%-28s %12.5g %12.5g %12.5g %s", entry->name, entry->value.min, entry->value.median, entry->value.max,
               entry->unit);
        if (entry->ratio_to != NULL) {
            printf(", %.3g of %s", entry->ratio, entry->ratio_to);
        }
        putchar('\n');
    }
}

/* Prints the report, and writes it as an array of {"name","value","min","max","unit","ratio_to","ratio"}; 0, or 1 with a
 * message. */
static inline int bench_write(const struct bench_report *report, const char *path)
{
    bench_print(report);
    mkdir("build", 0777); /* Either is there already, or fopen says what is wrong. */
    mkdir("build/results", 0777);
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        perror(path);
        return 1;
    }
    fputs("[", file);
    for (uint32_t i = 0; i < report->count; i++) {
        const struct bench_entry *entry = &report->entries[i];
        fprintf(file, "%s\n  {\"name\": \"%s\", \"value\": %.6g, \"min\": %.6g, \"max\": %.6g, \"unit\": \"%s\"",
                i == 0 ? "" : ",", entry->name, entry->value.median, entry->value.min, entry->value.max, entry->unit);
        if (entry->ratio_to != NULL) {
            fprintf(file, ", \"ratio_to\": \"%s\", \"ratio\": %.4g}", entry->ratio_to, entry->ratio);
        } else {
            fprintf(file, ", \"ratio_to\": null, \"ratio\": null}");
        }
    }
    fputs("\n]\n", file);
    if (fclose(file) != 0) {
        perror(path);
        return 1;
    }
    return 0;
}

#endif
