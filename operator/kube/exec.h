/* op_exec_run: one run of a credential plugin (ExecCredential) as a child process on the loop.
 *
 * Bounded in time and output; the child has its own process group, which is ended with SIGKILL when the time is up. Its
 * standard error is ours. Loop's thread; layer operator/kube; used by op_auth. */
#ifndef OP_KUBE_EXEC_H
#define OP_KUBE_EXEC_H

#include "operator/kube/config.h"
#include "operator/kube/loop.h"

#define OP_EXEC_BYTES_MAX (1024 * 1024)

/* All text is borrowed until the callback returns; NULL where absent. */
struct op_exec_answer {
    enum dl_rc rc; /* DL_OK, or why there are no credentials: DL_EDENIED, DL_ETIMEOUT, DL_EPROTO, DL_ENOMEM. */
    struct dl_err err;
    const char *token, *cert, *key;
    int64_t expires_wall_ns; /* INT64_MAX: never. */
};

struct op_exec_run; /* Opaque. */

/* `done` is called once, from the loop; it may free the run. DL_ENOTFOUND: there is no such command (with the hint). */
DL_MUST_CHECK enum dl_rc op_exec_run_new(struct op_loop *loop, const struct op_config *config, int64_t timeout_ms,
                                         void (*done)(void *context, const struct op_exec_answer *answer),
                                         void *context, struct op_exec_run **out, struct dl_err *err);
void op_exec_run_free(struct op_exec_run *run); /* Ends the child when it still runs. NULL is fine. */

#endif
