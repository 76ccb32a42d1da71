/* wk_session: what learner and evaluator have in common: manifest, token, threads, the handle of libdiloco, exit
 * status.
 *
 * Layer: worker/train. Of worker/link only the public header is used, as any trainer would. */
#ifndef WK_TRAIN_SESSION_H
#define WK_TRAIN_SESSION_H

#include <stdint.h>

#include "common/err.h"
#include "common/exit_codes.h"
#include "common/spec.h"
#include "worker/link/diloco.h"
#include "worker/model/model.h"
#include "worker/train/args.h"
#include "worker/train/trainer.h"

#define WK_TOKEN_BYTES_MAX 4096

struct wk_session {
    const struct wk_args *args;
    struct dl_spec *spec;
    char *token; /* NULL: none. */
    struct diloco *diloco;
};

/* Reads manifest and token, names the process in the log, and begins to watch for signals: before other threads start.
 */
DL_MUST_CHECK enum dl_rc wk_session_load(struct wk_session *session, const struct wk_args *args, struct dl_err *err);

/* Registers the model's parameters and a learner's optimiser state (that of `source`, else NULL), which are to outlive the session,
 * and joins; a notice of preemption meanwhile ends
 * the process. Returns an enum diloco_result. */
DL_MUST_CHECK int wk_session_join(struct wk_session *session, enum diloco_role role, struct wk_model *model,
                                  struct wk_trainer *source, struct diloco_info *info, struct diloco_error *error);

void wk_session_close(struct wk_session *session);

/* Compute threads: --threads, else the spec's, else the cores that this process may use (affinity and control group).
 */
uint32_t wk_session_threads(const struct wk_session *session);
uint32_t wk_usable_cores(void);

enum dl_exit wk_exit_of_rc(enum dl_rc rc);
enum dl_exit wk_exit_of_diloco(int code);

#endif
