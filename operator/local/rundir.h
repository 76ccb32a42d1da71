/* op_rundir: the folder of one run on this machine, and small files in it.
 *
 *     job.json token tls/ logs/ ports/ cache/ state/shard-I/ final/ status.json events.jsonl report.md report.json control.sock
 *
 * Does file I/O; one thread. Layer operator/local. */
#ifndef OP_LOCAL_RUNDIR_H
#define OP_LOCAL_RUNDIR_H

#include <limits.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/err.h"

#define OP_RUNDIR_NUMBER_MAX 100000 /* runs/<job>-N */
#define OP_PATH_MAX 4096

struct op_rundir {
    char path[OP_PATH_MAX - 256]; /* Absolute. */
};

/* Makes a new folder with all that a job of `shards` shards needs. `wanted` NULL: runs/<job>-<n> below the working
 * folder, n the next free number. A wanted folder must be empty or missing; nothing is ever overwritten. DL_EEXISTS,
 * DL_EDENIED, DL_EIO, DL_EINVAL (path too long). */
DL_MUST_CHECK enum dl_rc op_rundir_create(const char *wanted, const char *job, uint32_t shards, struct op_rundir *out,
                                          struct dl_err *err);

/* A folder that holds a run, to go on with it: what is missing of its folders is made. DL_ENOTFOUND: it is none. */
DL_MUST_CHECK enum dl_rc op_rundir_resume(const char *wanted, uint32_t shards, struct op_rundir *out,
                                          struct dl_err *err);

/* Holds the folder against another supervisor for as long as `*fd` is open. DL_EEXISTS: one has it. */
DL_MUST_CHECK enum dl_rc op_rundir_lock(const struct op_rundir *dir, int *fd, struct dl_err *err);

/* The run folder that status, top, scale, kill and generate mean: `wanted`, or the newest below runs/. DL_ENOTFOUND. */
DL_MUST_CHECK enum dl_rc op_rundir_open(const char *wanted, struct op_rundir *out, struct dl_err *err);

/* Joins "<run folder>/<name>" into `out`; the folder's length leaves room for every name used here. */
void op_rundir_path(const struct op_rundir *dir, const char *name, char out[OP_PATH_MAX]);

/* Replaces a file of the folder as a whole: readers see the old or the new one. Not synced: after a crash of the
 * machine it may be missing. */
DL_MUST_CHECK enum dl_rc op_rundir_write(const struct op_rundir *dir, const char *name, const char *text, mode_t mode,
                                         struct dl_err *err);

/* Reads a whole file of at most `most` bytes; zero-terminated, the caller's to free. */
DL_MUST_CHECK enum dl_rc op_file_read(const char *path, size_t most, char **out, size_t *size, struct dl_err *err);

/* A new secret of 256 random bits in hexadecimal, into file `token` (mode 0600). */
DL_MUST_CHECK enum dl_rc op_rundir_make_token(const struct op_rundir *dir, struct dl_err *err);
#define OP_TOKEN_BYTES_MAX 400
DL_MUST_CHECK enum dl_rc op_rundir_read_token(const struct op_rundir *dir, char token[OP_TOKEN_BYTES_MAX],
                                              struct dl_err *err);

/* Removes what workers of the run shared (folder cache/): once they are gone it is of no use. */
void op_rundir_clear_cache(const struct op_rundir *dir);

/* Keeps a log that others append to bounded: beyond `most` bytes its content moves to <path>.1 and it starts anew. */
void op_log_bound(const char *path, int64_t most);

/* The last line of a log that holds " error " or " warn ", else its last line; "" when there is none. */
void op_log_last_complaint(const char *path, char *out, size_t out_bytes);

#endif
