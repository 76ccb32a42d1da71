/* The program `diloco-worker learn`: trains as a learner until the job is over or it is told to leave. Layer:
 * worker/train. */
#ifndef WK_TRAIN_LEARNER_H
#define WK_TRAIN_LEARNER_H

#include "common/exit_codes.h"
#include "worker/train/args.h"

enum dl_exit wk_learn(const struct wk_args *args);

#endif
