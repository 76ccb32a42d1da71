#include "worker/train/trainer.h"

#include <assert.h>
#include <cblas.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/isa.h"
#include "common/mem.h"
#include "worker/data/data_stream.h"
#include "worker/model/adamw.h"
#include "worker/model/memory.h"
#include "worker/train/schedule.h"

/* Copies of the parameters that libdiloco may hold: the base, two received versions, and pushes, whose codec may be
 * none. */
#define LINK_COPIES 4

/* Grows when the same inputs give other bits than before. */
#define TRAINER_REVISION 2

struct wk_trainer {
    const struct dl_spec *spec;
    struct wk_dataset *dataset;
    struct wk_model *model;
    struct wk_adamw *adamw;
    struct wk_data_stream stream;
    struct wk_schedule schedule;
    uint32_t *tokens, *targets; /* [batch_sequences][sequence_length] */
    bool started;
    uint32_t fed; /* Sequences of the batch that are there. */
    bool took_state;
    uint64_t updates; /* AdamW's own count, where others can read it. */
    uint32_t bad_in_row;
    uint64_t skipped;
};

static struct wk_model_options options_of(const struct dl_spec *spec, uint32_t threads)
{
    return (struct wk_model_options){
        .batch_sequences = spec->training.batch_sequences, .threads = threads, .seed = spec->training.seed};
}

enum dl_rc wk_trainer_plan(const struct dl_spec *spec, uint32_t threads, uint64_t *bytes, struct dl_err *err)
{
    struct wk_model_options options = options_of(spec, threads);
    struct wk_model_memory memory;
    enum dl_rc rc = wk_model_plan(&spec->training.model, &options, &memory, err);
    if (rc == DL_OK) {
        *bytes = memory.total + LINK_COPIES * memory.parameters;
    }
    return rc;
}

static enum dl_rc check_memory(const struct dl_spec *spec, uint32_t threads, struct dl_err *err)
{
    uint64_t needed = 0, available = wk_memory_available();
    enum dl_rc rc = wk_trainer_plan(spec, threads, &needed, err);
    if (rc == DL_OK && needed > available) {
        return dl_err_set(
            err, DL_ENOMEM,
            "training needs %" PRIu64 " MiB (model, gradients, optimizer, activations, and the copies that are "
            "exchanged), %" PRIu64 " MiB are available: lower batchSequences, sequenceLength, width or layers",
            needed >> 20, available >> 20);
    }
    return rc;
}

static enum dl_rc fill(struct wk_trainer *trainer, uint32_t threads, struct dl_err *err)
{
    const struct dl_training_spec *training = &trainer->spec->training;
    /* The data first: it is the likelier one to be wrong, and what it takes counts in the check of memory. */
    enum dl_rc rc =
        wk_dataset_open(&training->data, &training->model, wk_memory_available() / 2, &trainer->dataset, err);
    if (rc == DL_OK) {
        rc = check_memory(trainer->spec, threads, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_model_options options = options_of(trainer->spec, threads);
    rc = wk_model_new(&training->model, &options, &trainer->model, err);
    if (rc != DL_OK) {
        return rc;
    }
    wk_schedule_init(&trainer->schedule, training, trainer->spec->learners.replicas);
    rc = wk_adamw_new(&trainer->schedule.inner, wk_model_tensors(trainer->model), wk_model_tensor_count(trainer->model),
                      wk_model_parameters(trainer->model), wk_model_gradients(trainer->model),
                      wk_model_pool(trainer->model), &trainer->adamw, err);
    if (rc != DL_OK) {
        return rc;
    }
    size_t batch_tokens = (size_t)training->batch_sequences * training->model.sequence_length;
    trainer->tokens = calloc(batch_tokens, sizeof *trainer->tokens);
    trainer->targets = calloc(batch_tokens, sizeof *trainer->targets);
    if (trainer->tokens == NULL || trainer->targets == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a batch of %zu tokens", batch_tokens);
    }
    return DL_OK;
}

enum dl_rc wk_trainer_new(const struct dl_spec *spec, uint32_t threads, struct wk_trainer **out, struct dl_err *err)
{
    struct wk_trainer *trainer = calloc(1, sizeof *trainer);
    if (trainer == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the trainer");
    }
    trainer->spec = spec;
    enum dl_rc rc = fill(trainer, threads, err);
    if (rc != DL_OK) {
        wk_trainer_free(trainer);
        return rc;
    }
    *out = trainer;
    return DL_OK;
}

void wk_trainer_free(struct wk_trainer *trainer)
{
    if (trainer == NULL) {
        return;
    }
    wk_adamw_free(trainer->adamw);
    wk_model_free(trainer->model);
    wk_dataset_close(trainer->dataset);
    free(trainer->tokens);
    free(trainer->targets);
    free(trainer);
}

void wk_trainer_name(char out[WK_TRAINER_NAME_MAX])
{
    char blas[40];
    snprintf(blas, sizeof blas, "%s", openblas_get_config()); /* "OpenBLAS 0.3.21 ..." */
    char *end = strchr(blas, ' ');
    end = end == NULL ? NULL : strchr(end + 1, ' ');
    if (end != NULL) {
        *end = 0;
    }
    snprintf(out, WK_TRAINER_NAME_MAX, "builtin %d, %s %s, %s", TRAINER_REVISION, blas, openblas_get_corename(),
             dl_isa_name(dl_isa_current()));
}

struct wk_model *wk_trainer_model(struct wk_trainer *trainer)
{
    return trainer->model;
}

const struct wk_dataset *wk_trainer_dataset(const struct wk_trainer *trainer)
{
    return trainer->dataset;
}

void wk_trainer_start(struct wk_trainer *trainer, uint64_t tokens_all)
{
    assert(!trainer->started);
    wk_data_stream_init(&trainer->stream, trainer->dataset, trainer->spec->training.seed);
    wk_schedule_join(&trainer->schedule, tokens_all);
    if (trainer->took_state) {
        wk_schedule_skip_ramp(&trainer->schedule);
    }
    trainer->started = true;
}

uint32_t wk_trainer_lacks(const struct wk_trainer *trainer)
{
    return trainer->spec->training.batch_sequences - trainer->fed;
}

enum dl_rc wk_trainer_feed(struct wk_trainer *trainer, uint64_t first, uint32_t count, struct dl_err *err)
{
    assert(trainer->started && count <= wk_trainer_lacks(trainer));
    size_t at = (size_t)trainer->fed * trainer->spec->training.model.sequence_length;
    enum dl_rc rc =
        wk_data_stream_read(&trainer->stream, first, count, trainer->tokens + at, trainer->targets + at, err);
    trainer->fed += rc == DL_OK ? count : 0;
    return rc;
}

uint32_t wk_trainer_state_count(const struct wk_trainer *trainer)
{
    return 2 * wk_model_tensor_count(trainer->model) + 1;
}

void wk_trainer_state(struct wk_trainer *trainer, uint32_t index, struct wk_trainer_state *out)
{
    uint32_t tensors = wk_model_tensor_count(trainer->model);
    assert(index <= 2 * tensors);
    if (index == 2 * tensors) {
        *out = (struct wk_trainer_state){"adamw.updates", &trainer->updates, sizeof trainer->updates};
        return;
    }
    bool first = index < tensors;
    uint32_t i = first ? index : index - tensors;
    const struct dl_tensor *tensor = &wk_model_tensors(trainer->model)[i];
    float *const *moments = first ? wk_adamw_first_moments(trainer->adamw) : wk_adamw_second_moments(trainer->adamw);
    *out = (struct wk_trainer_state){.data = moments[i], .bytes = dl_tensor_elements(tensor) * sizeof(float)};
    snprintf(out->name, sizeof out->name, "adamw.%c/%s", first ? 'm' : 'v', tensor->name);
}

void wk_trainer_take_state(struct wk_trainer *trainer)
{
    assert(!trainer->started);
    trainer->took_state = true;
    wk_adamw_set_steps(trainer->adamw, trainer->updates);
}

bool wk_trainer_hear(struct wk_trainer *trainer, uint64_t tokens_all)
{
    return wk_schedule_hear(&trainer->schedule, tokens_all);
}

uint64_t wk_trainer_place(const struct wk_trainer *trainer)
{
    return trainer->schedule.place;
}

uint64_t wk_trainer_skipped(const struct wk_trainer *trainer)
{
    return trainer->skipped;
}

/* Model and optimizer refuse what is not finite; an update that comes in later may put it right. */
static enum dl_rc skip(struct wk_trainer *trainer, struct wk_trainer_step *step, struct dl_err *err)
{
    trainer->skipped++;
    trainer->bad_in_row++;
    if (trainer->bad_in_row >= WK_TRAINER_BAD_STEPS_MAX) {
        struct dl_err cause = *err;
        return dl_err_set(err, DL_ECORRUPT,
                          "%u steps in a row were not finite: training has diverged; lower "
                          "spec.training.innerOptimizer.learningRate (%g) or set clipNorm (%.200s)",
                          trainer->bad_in_row, trainer->spec->training.inner.learning_rate, cause.text);
    }
    step->skipped = true;
    step->loss = NAN;
    return DL_OK;
}

enum dl_rc wk_trainer_step(struct wk_trainer *trainer, struct wk_trainer_step *step, struct dl_err *err)
{
    assert(trainer->started && wk_trainer_lacks(trainer) == 0);
    const struct dl_training_spec *training = &trainer->spec->training;
    struct dl_err local = {.rc = DL_OK};
    err = err != NULL ? err : &local;
    trainer->fed = 0;
    *step = (struct wk_trainer_step){.learning_rate = wk_schedule_next(&trainer->schedule)};
    double loss;
    if (wk_model_forward_backward(trainer->model, trainer->tokens, trainer->targets, &loss, err) != DL_OK) {
        return skip(trainer, step, err);
    }
    struct wk_adamw_stats stats;
    wk_adamw_set_rate(trainer->adamw, step->learning_rate);
    if (wk_adamw_step(trainer->adamw, &stats, err) != DL_OK) {
        return skip(trainer, step, err);
    }
    trainer->bad_in_row = 0;
    trainer->updates = wk_adamw_steps(trainer->adamw);
    step->tokens = (uint64_t)training->batch_sequences * training->model.sequence_length;
    step->loss = loss;
    step->gradient_norm = stats.gradient_norm;
    step->clipped = stats.clipped;
    return DL_OK;
}
