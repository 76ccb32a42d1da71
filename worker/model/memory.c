#include "worker/model/memory.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"

/* A decimal number from a one-line file; false when there is none ("max"). */
static bool read_number(const char *path, uint64_t *value)
{
    DL_AUTO_FILE FILE *file = fopen(path, "re");
    return file != NULL && fscanf(file, "%" SCNu64, value) == 1;
}

static uint64_t machine_available(void)
{
    DL_AUTO_FILE FILE *file = fopen("/proc/meminfo", "re");
    char line[128];
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        uint64_t kib;
        if (sscanf(line, "MemAvailable: %" SCNu64 " kB", &kib) == 1) {
            return kib * 1024;
        }
    }
    return UINT64_MAX;
}

/* In a container its own control group is mounted at the root (version 2), or at memory/ (version 1). */
static uint64_t group_available(void)
{
    static const char *const files[][2] = {
        {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"},
        {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"},
    };
    for (size_t i = 0; i < DL_COUNT_OF(files); i++) {
        uint64_t limit, used;
        if (read_number(files[i][0], &limit) && read_number(files[i][1], &used)) {
            return limit > used ? limit - used : 0;
        }
    }
    return UINT64_MAX;
}

uint64_t wk_memory_available(void)
{
    uint64_t machine = machine_available(), group = group_available();
    return DL_MIN(machine, group);
}
