#include "worker/data/cache.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/env.h"
#include "common/mem.h"

#define LOCK_POLL_NS (2 * DL_NS_PER_MS)

/* A blocking flock() has no bound, hence the looks. */
static bool take_lock(int fd)
{
    int64_t until_ns = dl_now_ns() + WK_CACHE_WAIT_SECONDS * DL_NS_PER_SECOND;
    const struct timespec pause = {.tv_nsec = LOCK_POLL_NS};
    while (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if ((errno != EWOULDBLOCK && errno != EINTR) || dl_now_ns() >= until_ns) {
            return false;
        }
        nanosleep(&pause, NULL);
    }
    return true;
}

/* Of this life of the machine: entries are not synced, so that one from before a crash may hold anything. */
static bool read_boot(char boot[9])
{
    DL_AUTO_FD int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd >= 0 ? read(fd, boot, 8) : -1;
    boot[got == 8 ? 8 : 0] = 0;
    return got == 8;
}

bool wk_cache_open(const char *name, struct wk_cache_entry *entry)
{
    const char *folder = getenv(DL_ENV_CACHE);
    char lock[PATH_MAX], boot[9];
    if (folder == NULL || folder[0] != '/' || !read_boot(boot)) {
        return false;
    }
    int length = snprintf(entry->path, sizeof entry->path, "%s/%s-%s", folder, name, boot);
    int lock_length = snprintf(lock, sizeof lock, "%s/%s-%s.lock", folder, name, boot);
    if (length >= (int)sizeof entry->path || lock_length >= (int)sizeof lock) {
        return false;
    }
    entry->lock = open(lock, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (entry->lock >= 0 && !take_lock(entry->lock)) {
        close(entry->lock);
        entry->lock = -1;
    }
    return entry->lock >= 0;
}

void wk_cache_close(struct wk_cache_entry *entry)
{
    close(entry->lock);
    entry->lock = -1;
}

bool wk_cache_put(const struct wk_cache_entry *entry, const void *bytes, size_t size)
{
    char temporary[PATH_MAX];
    if (snprintf(temporary, sizeof temporary, "%s.tmp", entry->path) >= (int)sizeof temporary) {
        return false;
    }
    int fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    size_t done = 0;
    while (fd >= 0 && done < size) {
        ssize_t wrote = write(fd, (const uint8_t *)bytes + done, size - done);
        if (wrote < 0 && errno != EINTR) {
            break;
        }
        done += wrote > 0 ? (size_t)wrote : 0;
    }
    bool is_whole = fd >= 0 && done == size;
    is_whole = fd >= 0 && close(fd) == 0 && is_whole;
    if (!is_whole || rename(temporary, entry->path) != 0) {
        unlink(temporary);
        return false;
    }
    return true;
}
