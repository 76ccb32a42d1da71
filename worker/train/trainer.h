/* wk_trainer: the built-in trainer of one learner: data, model, AdamW and its schedule, without any network.
 *
 * A step is a function of (spec, place in the schedule, positions of the data, parameters, moments): equal bits in every run
 * and for every number of threads. One thread calls. All memory is allocated in wk_trainer_new. Layer: worker/train, above data and
 * model. */
#ifndef WK_TRAIN_TRAINER_H
#define WK_TRAIN_TRAINER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"
#include "worker/data/dataset.h"
#include "worker/model/model.h"

/* So many steps in a row whose loss or gradient is not finite end the training. */
#define WK_TRAINER_BAD_STEPS_MAX 20

struct wk_trainer; /* Opaque. */

struct wk_trainer_step {
    uint64_t tokens; /* Trained on; 0 when the update was skipped. */
    double loss;     /* Mean nats a token; NaN when it was skipped. */
    double learning_rate, gradient_norm;
    bool clipped;
    bool skipped; /* Loss or gradient were not finite: parameters and moments are as before. */
};

/* Bytes to be allocated in all, with what libdiloco holds of the model, known before anything is allocated. */
DL_MUST_CHECK enum dl_rc wk_trainer_plan(const struct dl_spec *spec, uint32_t threads, uint64_t *bytes,
                                         struct dl_err *err);

/* Opens the data and makes the model with its initial weights. `spec` is borrowed. DL_ENOMEM says what is needed and
 * what is available; other errors as wk_dataset_open's and wk_model_new's. */
DL_MUST_CHECK enum dl_rc wk_trainer_new(const struct dl_spec *spec, uint32_t threads, struct wk_trainer **out,
                                        struct dl_err *err);
void wk_trainer_free(struct wk_trainer *trainer); /* NULL is fine. */

#define WK_TRAINER_NAME_MAX 96
/* What computes: its results' bits are a function of this and of its inputs, on any number of threads. */
void wk_trainer_name(char out[WK_TRAINER_NAME_MAX]);

struct wk_model *wk_trainer_model(struct wk_trainer *trainer); /* Borrowed. */
const struct wk_dataset *wk_trainer_dataset(const struct wk_trainer *trainer);

/* Takes its place in the ensemble, once, before the first step: when all have trained `tokens_all` tokens. */
void wk_trainer_start(struct wk_trainer *trainer, uint64_t tokens_all);

/* The batch of the coming step: how many sequences it still lacks, and the next `count` (<= that many) of it, by their
 * positions in the job's data (data_stream.h). DL_EINVAL: the data holds a token outside the vocabulary. */
uint32_t wk_trainer_lacks(const struct wk_trainer *trainer);
DL_MUST_CHECK enum dl_rc wk_trainer_feed(struct wk_trainer *trainer, uint64_t first, uint32_t count,
                                         struct dl_err *err);

/* AdamW's state, part by part, which another learner may take over (diloco_register_state): both moments of every tensor, and
 * the number of updates, which bias correction needs. Borrowed; read between steps, written before the start. */
struct wk_trainer_state {
    char name[160];
    void *data;
    uint64_t bytes;
};
uint32_t wk_trainer_state_count(const struct wk_trainer *trainer);
void wk_trainer_state(struct wk_trainer *trainer, uint32_t index, struct wk_trainer_state *out);
/* It was replaced by a peer's, before the start: the rate needs no ramp then. */
void wk_trainer_take_state(struct wk_trainer *trainer);

/* See wk_schedule_hear. */
bool wk_trainer_hear(struct wk_trainer *trainer, uint64_t tokens_all);
uint64_t wk_trainer_place(const struct wk_trainer *trainer);   /* In the schedule, ensemble steps. */
uint64_t wk_trainer_skipped(const struct wk_trainer *trainer); /* Updates, so far. */

/* One inner step on the batch that was fed: forward, backward, clipping, AdamW. DL_ECORRUPT: WK_TRAINER_BAD_STEPS_MAX steps in
 * a row were not finite. */
DL_MUST_CHECK enum dl_rc wk_trainer_step(struct wk_trainer *trainer, struct wk_trainer_step *step, struct dl_err *err);

#endif
