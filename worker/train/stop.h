/* wk_stop: SIGTERM and SIGINT as a notice: this worker should leave, and has a while to do so.
 *
 * A small thread waits for the signals, so that no call of the worker is interrupted. Whatever the worker is busy with,
 * the process ends when the grace period does. One a process. Layer: worker/train. */
#ifndef WK_TRAIN_STOP_H
#define WK_TRAIN_STOP_H

#include <stdbool.h>

#include "common/err.h"

/* Blocks the signals in the calling thread and in those it starts from now on: call before there are others. */
DL_MUST_CHECK enum dl_rc wk_stop_init(double grace_seconds, struct dl_err *err);

bool wk_stop_asked(void);

/* While nothing would be lost, a notice ends the process at once: for calls that cannot be cut short. True: the notice
 * had come already. */
bool wk_stop_at_once(bool on);

/* Sleeps until `deadline_ns` (dl_now_ns's clock) or a notice. True: a notice has come. */
bool wk_stop_wait_until(long long deadline_ns);

#endif
