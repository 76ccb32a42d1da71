#include <math.h>
#include <string.h>

#include "common/mem.h"
#include "worker/model/kernels.h"
#include "worker/model/model_internal.h"

enum dl_rc wk_check_tokens(const struct wk_model *model, const char *what, const uint32_t *tokens, uint64_t count,
                           struct dl_err *err)
{
    for (uint64_t i = 0; i < count; i++) {
        if (tokens[i] >= model->dims.vocab) {
            return dl_err_set(err, DL_EINVAL, "%s %u at sequence %llu, position %llu is outside the vocabulary of %u",
                              what, tokens[i], (unsigned long long)(i / model->dims.length),
                              (unsigned long long)(i % model->dims.length), model->dims.vocab);
        }
    }
    return DL_OK;
}

struct rows_job {
    struct wk_model *model;
    const uint32_t *tokens;
    struct wk_layer_state *state;
    const struct wk_layer *weights;
    const float *in;
    const float *gain;
    float *out, *rstd;
    uint64_t rows;
};

static void embed_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct rows_job *job = context;
    uint32_t width = job->model->dims.width;
    for (uint64_t r = wk_first_row(task), end = r + wk_row_count(job->rows, task); r < end; r++) {
        memcpy(job->out + r * width, job->in + (uint64_t)job->tokens[r] * width, width * sizeof(float));
    }
}

static void norm_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct rows_job *job = context;
    uint32_t width = job->model->dims.width;
    uint64_t at = wk_first_row(task);
    wk_rmsnorm(job->in + at * width, job->gain, (float)job->model->spec.norm_epsilon, wk_row_count(job->rows, task),
               width, job->out + at * width, job->rstd + at);
}

static void norm(struct wk_model *model, const float *in, const float *gain, uint64_t rows, float *out, float *rstd)
{
    struct rows_job job = {.model = model, .in = in, .gain = gain, .out = out, .rstd = rstd, .rows = rows};
    dl_pool_run(model->pool, norm_task, &job, wk_row_tiles(rows));
}

static void attention_task(void *context, uint32_t task, uint32_t thread)
{
    const struct rows_job *job = context;
    struct wk_model *model = job->model;
    const struct wk_dims *d = &model->dims;
    uint32_t group = task % d->kv_heads;
    uint64_t sequence = task / d->kv_heads, row = sequence * d->length;
    wk_attention_forward(&model->attention, group, job->state->qkv + row * d->qkv_width,
                         job->state->attended + row * d->q_width, job->state->lse + sequence * d->heads * d->length,
                         model->acts.scratch + thread * model->scratch_floats, &model->meter, thread);
}

static void swiglu_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct rows_job *job = context;
    uint32_t ffn = job->model->dims.ffn;
    uint64_t at = wk_first_row(task);
    wk_swiglu(job->state->gate_up + at * 2 * ffn, wk_row_count(job->rows, task), ffn, job->out + at * ffn);
}

static void project(struct wk_model *model, const float *in, uint32_t in_width, const float *weight, uint32_t out_width,
                    uint64_t rows, float *out, const float *add)
{
    struct wk_gemm gemm = wk_gemm_projection(in, in_width, weight, out_width, rows, out);
    gemm.add = add;
    wk_gemm_run(model->pool, &model->meter, &gemm, 1);
}

static void forward_layer(struct wk_model *model, const struct wk_layer *weights, struct wk_layer_state *state,
                          float *next_input, uint32_t sequences)
{
    const struct wk_dims *d = &model->dims;
    uint64_t rows = (uint64_t)sequences * d->length;
    struct rows_job job = {.model = model, .state = state, .rows = rows, .out = model->acts.hidden};

    norm(model, state->input, weights->input_norm, rows, state->normed, state->input_rstd);
    project(model, state->normed, d->width, weights->q, d->qkv_width, rows, state->qkv, NULL);
    dl_pool_run(model->pool, attention_task, &job, sequences * d->kv_heads);
    project(model, state->attended, d->q_width, weights->o, d->width, rows, state->middle, state->input);

    norm(model, state->middle, weights->post_norm, rows, state->middle_normed, state->middle_rstd);
    project(model, state->middle_normed, d->width, weights->gate, 2 * d->ffn, rows, state->gate_up, NULL);
    dl_pool_run(model->pool, swiglu_task, &job, wk_row_tiles(rows));
    project(model, model->acts.hidden, d->ffn, weights->down, d->width, rows, next_input, state->middle);
}

void wk_forward_layers(struct wk_model *model, const uint32_t *tokens, uint32_t sequences)
{
    struct wk_activations *acts = &model->acts;
    const struct wk_dims *d = &model->dims;
    uint64_t rows = (uint64_t)sequences * d->length;
    struct rows_job job = {
        .model = model, .tokens = tokens, .in = model->weights.embed, .out = acts->layers[0].input, .rows = rows};
    dl_pool_run(model->pool, embed_task, &job, wk_row_tiles(rows));
    for (uint32_t i = 0; i < d->layers; i++) {
        float *next = i + 1 < d->layers ? acts->layers[i + 1].input : acts->output;
        forward_layer(model, &model->weights.layers[i], &acts->layers[i], next, sequences);
    }
    norm(model, acts->output, model->weights.norm, rows, acts->final, acts->output_rstd);
}

static void head_logits(struct wk_model *model, uint64_t first, uint64_t rows, float *logits)
{
    const struct wk_dims *d = &model->dims;
    project(model, model->acts.final + first * d->width, d->width, model->weights.head, d->vocab, rows, logits, NULL);
}

struct loss_job {
    struct wk_model *model;
    const uint32_t *targets;
    uint64_t first, rows;
    float scale;
};

static void loss_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct loss_job *job = context;
    uint32_t vocab = job->model->dims.vocab;
    uint64_t start = (uint64_t)task * WK_LOSS_TILE, end = DL_MIN(start + WK_LOSS_TILE, job->rows);
    for (uint64_t r = start; r < end; r++) {
        job->model->acts.losses[job->first + r] =
            wk_cross_entropy(job->model->acts.logits + r * vocab, vocab, job->targets[job->first + r], job->scale);
    }
}

void wk_head_loss(struct wk_model *model, const uint32_t *targets, uint64_t first, uint64_t rows, float scale)
{
    struct loss_job job = {.model = model, .targets = targets, .first = first, .rows = rows, .scale = scale};
    head_logits(model, first, rows, model->acts.logits);
    dl_pool_run(model->pool, loss_task, &job, (uint32_t)((rows + WK_LOSS_TILE - 1) / WK_LOSS_TILE));
}

enum dl_rc wk_mean_loss(const struct wk_model *model, uint64_t rows, double *loss, struct dl_err *err)
{
    double sum = 0;
    for (uint64_t r = 0; r < rows; r++) {
        sum += model->acts.losses[r];
    }
    if (!isfinite(sum)) {
        return dl_err_set(err, DL_EINVAL,
                          "the loss is not finite (%g): parameters or activations have overflowed; lower the learning "
                          "rate or start from an earlier state",
                          sum);
    }
    *loss = sum / (double)rows;
    return DL_OK;
}

static enum dl_rc check_sequences(const struct wk_model *model, uint32_t sequences, struct dl_err *err)
{
    if (sequences < 1 || sequences > model->batch_sequences) {
        return dl_err_set(err, DL_EINVAL, "%u sequences given to a model planned for 1 to %u", sequences,
                          model->batch_sequences);
    }
    return DL_OK;
}

enum dl_rc wk_model_loss(struct wk_model *model, const uint32_t *tokens, const uint32_t *targets, uint32_t sequences,
                         double *loss, struct dl_err *err)
{
    uint64_t rows = (uint64_t)sequences * model->dims.length;
    enum dl_rc rc = check_sequences(model, sequences, err);
    if (rc == DL_OK) {
        rc = wk_check_tokens(model, "token", tokens, rows, err);
    }
    if (rc == DL_OK) {
        rc = wk_check_tokens(model, "target", targets, rows, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    wk_forward_layers(model, tokens, sequences);
    for (uint64_t first = 0; first < rows; first += model->dims.logits_rows) {
        wk_head_loss(model, targets, first, DL_MIN((uint64_t)model->dims.logits_rows, rows - first), 0);
    }
    return wk_mean_loss(model, rows, loss, err);
}

enum dl_rc wk_model_logits(struct wk_model *model, const uint32_t *tokens, uint32_t sequences, float *logits,
                           struct dl_err *err)
{
    uint64_t rows = (uint64_t)sequences * model->dims.length;
    enum dl_rc rc = check_sequences(model, sequences, err);
    if (rc == DL_OK) {
        rc = wk_check_tokens(model, "token", tokens, rows, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    wk_forward_layers(model, tokens, sequences);
    head_logits(model, 0, rows, logits);
    return DL_OK;
}
