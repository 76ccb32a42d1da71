/* op_process: starting programs such that none outlives this one.
 *
 * A child is the leader of its own process group (a Ctrl-C at the terminal is not its concern), gets SIGKILL when this
 * process dies in whatever way, reads from /dev/null and appends its output to files. One thread: the child's life is
 * bound to the thread that starts it. Layer operator/local. */
#ifndef OP_LOCAL_PROCESS_H
#define OP_LOCAL_PROCESS_H

#include <sys/types.h>

#include "common/err.h"

/* Starts argv[0] (a path); standard output goes to `out_path`, standard error to `err_path` (may be the same). Returns
 * once the program runs, or with the reason why it cannot: DL_ENOTFOUND, DL_EDENIED, DL_EIO, DL_ENOMEM. */
DL_MUST_CHECK enum dl_rc op_process_start(char *const *argv, const char *out_path, const char *err_path, pid_t *pid,
                                          struct dl_err *err);

#endif
