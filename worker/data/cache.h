/* wk_cache: a folder in which the processes of a run leave for each other what is costly to find out: unpacked data,
 * which kernels compute right here.
 *
 * Named by the environment (DL_ENV_CACHE; `diloco run` names RUN/cache); without it, or where it cannot be used, there is no cache and
 * everyone does the work alone. An entry is a file that is there as a whole or not at all; who finds none makes it while
 * it holds the entry's lock, and the others wait for it without taking processor time. File I/O; any thread. Layer:
 * worker/data. */
#ifndef WK_DATA_CACHE_H
#define WK_DATA_CACHE_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#define WK_CACHE_WAIT_SECONDS 300 /* For another process that makes the entry; then there is no cache. */

struct wk_cache_entry {
    char path[PATH_MAX]; /* Of the entry: to be opened, or made with wk_cache_put. */
    int lock;            /* Closed by wk_cache_close; dies with the process. */
};

/* Locks entry `name` (a file's name). False: no cache, and nothing to close. */
bool wk_cache_open(const char *name, struct wk_cache_entry *entry);
void wk_cache_close(struct wk_cache_entry *entry);

/* Makes the entry. False: it could not be written (a full disk), and nothing is left behind. */
bool wk_cache_put(const struct wk_cache_entry *entry, const void *bytes, size_t size);

#endif
