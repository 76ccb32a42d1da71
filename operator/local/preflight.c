#include "operator/local/preflight.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"
#include "operator/local/estimate.h"

#define MIB (1024.0 * 1024.0)

/* --- programs --- */

static enum dl_rc find_program(const char *folder, const char *name, char out[OP_PATH_MAX], struct dl_err *err)
{
    int length = snprintf(out, OP_PATH_MAX, "%s/%s", folder, name);
    if (length < 0 || length >= OP_PATH_MAX) {
        return dl_err_set(err, DL_EINVAL, "the path of %s is too long", name);
    }
    struct stat info;
    if (stat(out, &info) != 0 || !S_ISREG(info.st_mode)) {
        return dl_err_set(err, DL_ENOTFOUND,
                          "the program %s is missing: build it (`make`), or name its folder with --bin-dir", out);
    }
    if (access(out, X_OK) != 0) {
        return dl_err_errno(err, DL_EDENIED, errno, "execute %s", out);
    }
    return DL_OK;
}

static enum dl_rc own_folder(char out[OP_PATH_MAX], struct dl_err *err)
{
    ssize_t length = readlink("/proc/self/exe", out, OP_PATH_MAX - 1);
    if (length < 0) {
        return dl_err_errno(err, DL_EIO, errno, "find this program's folder (name it with --bin-dir)");
    }
    out[length] = 0;
    char *slash = strrchr(out, '/');
    if (slash != NULL) {
        *slash = 0;
    }
    return DL_OK;
}

enum dl_rc op_program_find(const char *name, char out[OP_PATH_MAX], struct dl_err *err)
{
    char self[OP_PATH_MAX];
    enum dl_rc rc = own_folder(self, err);
    return rc == DL_OK ? find_program(self, name, out, err) : rc;
}

enum dl_rc op_programs_find(const char *bin_dir, struct op_programs *out, struct dl_err *err)
{
    char self[OP_PATH_MAX];
    if (bin_dir != NULL && realpath(bin_dir, self) == NULL) {
        return dl_err_errno(err, DL_ENOTFOUND, errno, "find the folder --bin-dir %s", bin_dir);
    }
    enum dl_rc rc = bin_dir == NULL ? own_folder(self, err) : DL_OK;
    if (rc != DL_OK) {
        return rc;
    }
    rc = find_program(self, "diloco-syncer", out->syncer, err);
    return rc == DL_OK ? find_program(self, "diloco-worker", out->worker, err) : rc;
}

/* --- memory --- */

/* A number from a file such as "MemAvailable:   123 kB" (with `key`), or a bare number. False when there is none
 * ("max"). */
static bool read_number(const char *path, const char *key, uint64_t *out)
{
    DL_AUTO_FILE FILE *file = fopen(path, "re");
    char line[256];
    size_t key_length = key != NULL ? strlen(key) : 0;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (key != NULL && strncmp(line, key, key_length) != 0) {
            continue;
        }
        const char *digits = line + key_length + strspn(line + key_length, " \t");
        char *end = NULL;
        unsigned long long value = strtoull(digits, &end, 10);
        if (end == digits) {
            return false;
        }
        *out = value * (strncmp(end, " kB", 3) == 0 ? 1024u : 1u);
        return true;
    }
    return false;
}

/* Room in the control group (version 2) that this process belongs to, as seen from within; pages that the kernel can
 * drop count as free. */
static bool cgroup_room(uint64_t *room)
{
    DL_AUTO_FILE FILE *file = fopen("/proc/self/cgroup", "re");
    char line[1024], path[2048];
    bool found = false;
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, "0::", 3) != 0) {
            continue;
        }
        line[strcspn(line, "\n")] = 0;
        uint64_t limit = 0, used = 0, reclaimable = 0;
        const char *group = line + 3;
        const char *slash = strcmp(group, "/") == 0 ? "" : group;
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.max", slash);
        if (!read_number(path, NULL, &limit)) {
            return false;
        }
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.current", slash);
        found = read_number(path, NULL, &used);
        snprintf(path, sizeof path, "/sys/fs/cgroup%s/memory.stat", slash);
        if (read_number(path, "inactive_file ", &reclaimable)) {
            used -= DL_MIN(used, reclaimable);
        }
        *room = limit > used ? limit - used : 0;
    }
    return found;
}

uint64_t op_memory_available(void)
{
    uint64_t available = UINT64_MAX, room = 0;
    if (read_number("/proc/meminfo", "MemAvailable:", &room)) {
        available = room;
    }
    if (cgroup_room(&room)) {
        available = DL_MIN(available, room);
    }
    return available;
}

static enum dl_rc check_memory(const struct dl_spec *spec, struct dl_err *err)
{
    struct op_estimate estimate;
    op_estimate_make(spec, &estimate);
    uint64_t available = op_memory_available();
    if (estimate.total_bytes_least <= available) {
        return DL_OK;
    }
    return dl_err_set(
        err, DL_EINVAL,
        "the job does not fit into memory: %llu parameters need at least %.0f MiB a learner, %.0f MiB with %u "
        "learners, evaluator and syncers; %.0f MiB are available. Make training.model smaller or "
        "learners.replicas fewer",
        (unsigned long long)estimate.parameters, (double)estimate.learner_bytes_least / MIB,
        (double)estimate.total_bytes_least / MIB, spec->learners.replicas, (double)available / MIB);
}

/* --- the rest --- */

static enum dl_rc check_data(const struct dl_spec *spec, struct dl_err *err)
{
    if (spec->training.data.path_count == 0) {
        return dl_err_set(err, DL_EINVAL,
                          "training.data.paths is empty: name the files with the text or tokens (a trainer of your own "
                          "needs none, but runs in a cluster, or joins a syncer that you start: docs/operations.md)");
    }
    for (uint32_t i = 0; i < spec->training.data.path_count; i++) {
        const char *path = spec->training.data.paths[i];
        struct stat info;
        if (stat(path, &info) != 0) {
            return dl_err_errno(err, DL_ENOTFOUND, errno, "training.data.paths: read %s", path);
        }
        if (!S_ISREG(info.st_mode)) {
            return dl_err_set(err, DL_EINVAL, "training.data.paths: %s is not a file", path);
        }
        if (access(path, R_OK) != 0) {
            return dl_err_errno(err, DL_EDENIED, errno, "training.data.paths: read %s", path);
        }
        if (info.st_size == 0) {
            return dl_err_set(err, DL_EINVAL, "training.data.paths: %s is empty", path);
        }
    }
    return DL_OK;
}

static enum dl_rc check_ports(const struct dl_spec *spec, struct dl_err *err)
{
    for (uint32_t i = 0; spec->syncer.port != 0 && i < spec->syncer.shards; i++) {
        uint32_t port = spec->syncer.port + i;
        if (port > UINT16_MAX) {
            return dl_err_set(err, DL_EINVAL, "syncer.port: shard %u would need port %u, which does not exist", i,
                              port);
        }
        DL_AUTO_FD int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        int yes = 1;
        struct sockaddr_in address = {
            .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
        if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
            bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 1) != 0) {
            return dl_err_errno(err, DL_EEXISTS, errno,
                                "syncer.port: listen on port %u for shard %u (0 takes any free one)", port, i);
        }
    }
    return DL_OK;
}

enum dl_rc op_preflight(const struct dl_spec *spec, struct dl_err *err)
{
    if (spec->suspend) {
        return dl_err_set(err, DL_EINVAL,
                          "spec.suspend is true: nothing would be started; set it to false to run the job");
    }
    if (!spec->sync.quorum.is_percent && spec->sync.quorum.value > spec->learners.max) {
        return dl_err_set(err, DL_EINVAL, "sync.quorum is %u but learners.max is %u: no round could ever be merged",
                          spec->sync.quorum.value, spec->learners.max);
    }
    enum dl_rc rc = check_data(spec, err);
    if (rc == DL_OK) {
        rc = check_memory(spec, err);
    }
    return rc == DL_OK ? check_ports(spec, err) : rc;
}
