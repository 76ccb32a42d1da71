/* A disk that fails, by LD_PRELOAD: files below $FAULT_DIR only, at random with $FAULT_RATE and $FAULT_SEED.
 *
 *     FAULT_MODE=fsync  fsync and fdatasync fail with EIO
 *     FAULT_MODE=full   write and pwrite fail with ENOSPC, after half of it
 *     FAULT_MODE=stall  fsync and fdatasync last as long as there is a file $FAULT_GATE, but not longer than a minute
 *     FAULT_MODE=cut    the power fails in a write: of what was written since each file's last sync, sectors are lost or torn
 *                       at random; the process is gone
 *
 * Built by the test that uses it: cc -shared -fPIC. One process, any of its threads. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#define FDS_MAX 4096
#define RANGES_MAX 65536
#define SECTOR 512

struct range {
    int fd;
    off_t from, until;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool watched[FDS_MAX];
static struct range ranges[RANGES_MAX]; /* Not synced. */
static size_t range_count;
static uint64_t state;
static double rate;
static const char *mode, *folder, *gate;
static bool is_ready;

static void set_up(void)
{
    if (!is_ready) {
        const char *rate_text = getenv("FAULT_RATE"), *seed = getenv("FAULT_SEED");
        mode = getenv("FAULT_MODE");
        folder = getenv("FAULT_DIR");
        gate = getenv("FAULT_GATE");
        rate = rate_text == NULL ? 0 : strtod(rate_text, NULL);
        state = seed == NULL ? 1 : strtoull(seed, NULL, 10) * 2654435761u + 1;
        is_ready = true;
    }
}

static double draw(void)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (double)(state >> 11) / (double)(UINT64_C(1) << 53);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void watch(int fd, const char *path)
{
    set_up();
    if (fd >= 0 && fd < FDS_MAX) {
        /* The index of the write-ahead log is memory, not disk. */
        watched[fd] = folder != NULL && strncmp(path, folder, strlen(folder)) == 0 && strstr(path, "-shm") == NULL;
    }
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...)                                                                         \
    {                                                                                                                  \
        va_list args;                                                                                                  \
        va_start(args, flags);                                                                                         \
        mode_t access = va_arg(args, mode_t);                                                                          \
        va_end(args);                                                                                                  \
        int fd = REAL(name)(path, flags, access);                                                                      \
        watch(fd, path);                                                                                               \
        return fd;                                                                                                     \
    }
#include <stdarg.h>
OPEN(open)
OPEN(open64)

/* What had not been synced: each sector is there, or as if it had never been written, or torn. */
static void cut(void)
{
    for (size_t i = 0; i < range_count; i++) {
        for (off_t at = ranges[i].from - ranges[i].from % SECTOR; at < ranges[i].until; at += SECTOR) {
            char junk[SECTOR];
            double luck = draw();
            if (luck < 0.5) {
                continue;
            }
            memset(junk, luck < 0.75 ? 0 : 0x5a, sizeof junk);
            off_t from = at < ranges[i].from ? ranges[i].from : at;
            off_t until = at + SECTOR > ranges[i].until ? ranges[i].until : at + SECTOR;
            ssize_t ignored = REAL(pwrite)(ranges[i].fd, junk, (size_t)(until - from), from);
            (void)ignored;
        }
    }
    kill(getpid(), SIGKILL);
}

static void note(int fd, off_t from, ssize_t size)
{
    if (size > 0 && range_count < RANGES_MAX) {
        ranges[range_count++] = (struct range){fd, from, from + size};
    }
}

static void synced(int fd)
{
    size_t kept = 0;
    for (size_t i = 0; i < range_count; i++) {
        if (ranges[i].fd != fd) {
            ranges[kept++] = ranges[i];
        }
    }
    range_count = kept;
}

static bool is_due(const char *which)
{
    return mode != NULL && strcmp(mode, which) == 0 && draw() < rate;
}

static ssize_t write_at(int fd, const void *bytes, size_t size, off_t at, bool has_place)
{
    if (fd < 0 || fd >= FDS_MAX || !watched[fd]) {
        return has_place ? REAL(pwrite)(fd, bytes, size, at) : REAL(write)(fd, bytes, size);
    }
    pthread_mutex_lock(&lock);
    off_t from = has_place ? at : lseek(fd, 0, SEEK_CUR);
    bool is_full = is_due("full"), is_cut = is_due("cut");
    size_t some = is_full || is_cut ? size / 2 : size;
    ssize_t written = has_place ? REAL(pwrite)(fd, bytes, some, at) : REAL(write)(fd, bytes, some);
    note(fd, from, written);
    if (is_cut) {
        cut();
    }
    pthread_mutex_unlock(&lock);
    if (is_full) {
        errno = ENOSPC;
        return -1;
    }
    return written;
}

ssize_t write(int fd, const void *bytes, size_t size)
{
    return write_at(fd, bytes, size, 0, false);
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at)
{
    return write_at(fd, bytes, size, at, true);
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t at)
{
    return write_at(fd, bytes, size, at, true);
}

static int sync_fd(int fd, int (*real)(int))
{
    if (fd < 0 || fd >= FDS_MAX || !watched[fd]) {
        return real(fd);
    }
    bool stalls = mode != NULL && strcmp(mode, "stall") == 0 && gate != NULL;
    for (int waited_ms = 0; stalls && waited_ms < 60000 && access(gate, F_OK) == 0; waited_ms++) {
        usleep(1000);
    }
    pthread_mutex_lock(&lock);
    bool fails = is_due("fsync");
    int result = fails ? -1 : real(fd);
    if (result == 0) {
        synced(fd);
    }
    pthread_mutex_unlock(&lock);
    if (fails) {
        errno = EIO;
    }
    return result;
}

int fsync(int fd)
{
    return sync_fd(fd, REAL(fsync));
}

int fdatasync(int fd)
{
    return sync_fd(fd, REAL(fdatasync));
}

int close(int fd)
{
    if (fd >= 0 && fd < FDS_MAX && watched[fd]) {
        pthread_mutex_lock(&lock);
        watched[fd] = false;
        synced(fd); /* Its number is another file's soon: what was not synced of it stays. */
        pthread_mutex_unlock(&lock);
    }
    return REAL(close)(fd);
}
