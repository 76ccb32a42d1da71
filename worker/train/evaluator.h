/* The program `diloco-worker evaluate`: follows the global model, measures its validation loss, reports it to the
 * syncer and in DIR/evaluations.jsonl, and at the end exports the weights to DIR. Layer: worker/train. */
#ifndef WK_TRAIN_EVALUATOR_H
#define WK_TRAIN_EVALUATOR_H

#include "common/err.h"
#include "common/exit_codes.h"
#include "worker/data/dataset.h"
#include "worker/model/model.h"
#include "worker/train/args.h"

enum dl_exit wk_evaluate(const struct wk_args *args);

/* Mean loss, nats a token, over all validation sequences. `tokens` and `targets`: room for a batch of the model.
 * DL_AGAIN: `is_stopped` (may be NULL) said so. */
DL_MUST_CHECK enum dl_rc wk_validation_loss(struct wk_model *model, const struct wk_dataset *dataset, uint32_t *tokens,
                                            uint32_t *targets, bool (*is_stopped)(void), double *loss,
                                            struct dl_err *err);

#endif
