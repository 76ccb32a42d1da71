/* dl_atomic_file: a file that is replaced as a whole or not at all.
 *
 * Written under a temporary name in the same folder, synced, renamed over the old one, and the folder synced: after a
 * crash there is either the old file or the new one. One thread a file. */
#ifndef DL_COMMON_ATOMIC_FILE_H
#define DL_COMMON_ATOMIC_FILE_H

#include <limits.h>
#include <stddef.h>

#include "common/err.h"

struct dl_atomic_file {
    int fd; /* -1 when closed. */
    char path[PATH_MAX];
    char temporary[PATH_MAX];
};

/* DL_EINVAL: the path is too long. DL_EIO, DL_EDENIED, DL_EFULL, DL_ENOTFOUND (the folder): nothing is left behind. */
DL_MUST_CHECK enum dl_rc dl_atomic_file_open(struct dl_atomic_file *file, const char *path, struct dl_err *err);

/* Writes all of it. After an error only dl_atomic_file_abandon is allowed. */
DL_MUST_CHECK enum dl_rc dl_atomic_file_write(struct dl_atomic_file *file, const void *bytes, size_t size,
                                              struct dl_err *err);

/* Makes the new content durable under its name and closes. On an error the old file stands and nothing is left behind.
 */
DL_MUST_CHECK enum dl_rc dl_atomic_file_commit(struct dl_atomic_file *file, struct dl_err *err);

/* Closes and removes the temporary file; a file that is closed already is left alone. */
void dl_atomic_file_abandon(struct dl_atomic_file *file);

#endif
