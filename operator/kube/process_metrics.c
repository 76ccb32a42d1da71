/* The process' own figures, from /proc, under Prometheus' usual names. */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/mem.h"
#include "operator/kube/serve.h"

struct figures {
    double virtual_bytes, resident_bytes, cpu_seconds, start_seconds;
};

static double boot_seconds(void)
{
    DL_AUTO_FILE FILE *file = fopen("/proc/stat", "re");
    char line[256];
    unsigned long long seconds = 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL && sscanf(line, "btime %llu", &seconds) != 1) {
    }
    return (double)seconds;
}

static bool read_line(const char *path, char *line, int size)
{
    DL_AUTO_FILE FILE *file = fopen(path, "re");
    return file != NULL && fgets(line, size, file) != NULL;
}

static bool read_figures(struct figures *out)
{
    char line[1024];
    if (!read_line("/proc/self/stat", line, sizeof line)) {
        return false;
    }
    const char *rest = strrchr(line, ')'); /* The name before it may hold anything. */
    unsigned long long user = 0, kernel = 0, start = 0, size = 0;
    long long pages = 0;
    if (rest == NULL ||
        sscanf(rest + 1,
               " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %llu %llu %*d %*d %*d %*d %*d %*d %llu %llu %lld", &user,
               &kernel, &start, &size, &pages) != 5) {
        return false;
    }
    double ticks = (double)sysconf(_SC_CLK_TCK);
    out->cpu_seconds = (double)(user + kernel) / ticks;
    out->start_seconds = boot_seconds() + (double)start / ticks;
    out->virtual_bytes = (double)size;
    out->resident_bytes = (double)pages * (double)sysconf(_SC_PAGESIZE);
    return true;
}

static double open_fds(void)
{
    DIR *folder = opendir("/proc/self/fd");
    double count = -3; /* ".", ".." and the folder itself. */
    while (folder != NULL && readdir(folder) != NULL) {
        count++;
    }
    if (folder != NULL) {
        closedir(folder);
    }
    return count;
}

void op_process_metrics(struct dl_metrics *metrics)
{
    struct figures figures;
    struct rlimit files = {0};
    if (!read_figures(&figures)) {
        return;
    }
    getrlimit(RLIMIT_NOFILE, &files);
    const struct {
        const char *family, *type, *help;
        double value;
    } rows[] = {
        {"process_resident_memory_bytes", "gauge", "Resident memory.", figures.resident_bytes},
        {"process_virtual_memory_bytes", "gauge", "Virtual memory.", figures.virtual_bytes},
        {"process_cpu_seconds_total", "counter", "CPU time, user and system.", figures.cpu_seconds},
        {"process_open_fds", "gauge", "Open descriptors.", open_fds()},
        {"process_max_fds", "gauge", "Descriptors at most.", (double)files.rlim_cur},
        {"process_start_time_seconds", "gauge", "Start, seconds since 1970.", figures.start_seconds},
    };
    for (size_t i = 0; i < DL_COUNT_OF(rows); i++) {
        dl_metrics_family(metrics, rows[i].family, rows[i].type, rows[i].help);
        dl_metrics_value(metrics, rows[i].value, (char *)NULL);
    }
}
