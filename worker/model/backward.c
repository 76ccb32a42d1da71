#include <assert.h>
#include <string.h>

#include "common/mem.h"
#include "worker/model/kernels.h"
#include "worker/model/model_internal.h"

/* Columns of an embedding-gradient task: every task walks all rows in order, so that the sum's order is fixed. */
#define EMBED_COLUMNS 64

struct backward_job {
    struct wk_model *model;
    struct wk_layer_state *state;
    const uint32_t *tokens;
    const float *dout, *in, *rstd, *gain;
    int accumulate;
};

static void norm_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct backward_job *job = context;
    struct wk_activations *acts = &job->model->acts;
    uint32_t width = job->model->dims.width;
    uint64_t row = wk_first_row(task), at = row * width;
    wk_rmsnorm_backward(job->dout + at, job->in + at, job->rstd + row, job->gain,
                        wk_row_count(job->model->dims.rows, task), width, job->accumulate, acts->dstream + at,
                        acts->gain_parts + (uint64_t)task * width);
}

/* dstream (+)= gradient through a norm whose output's gradient is dnormed; dgain = sum over row tiles, in their order.
 */
static void norm_backward(struct wk_model *model, const float *in, const float *rstd, const float *gain, float *dgain,
                          int accumulate)
{
    struct backward_job job = {
        .model = model, .dout = model->acts.dnormed, .in = in, .rstd = rstd, .gain = gain, .accumulate = accumulate};
    uint32_t width = model->dims.width, tiles = model->dims.row_tiles;
    dl_pool_run(model->pool, norm_task, &job, tiles);
    memcpy(dgain, model->acts.gain_parts, width * sizeof(float));
    for (uint32_t i = 1; i < tiles; i++) {
        wk_add(dgain, model->acts.gain_parts + (uint64_t)i * width, width);
    }
}

static void swiglu_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct backward_job *job = context;
    uint32_t ffn = job->model->dims.ffn;
    uint64_t at = wk_first_row(task);
    wk_swiglu_backward(job->state->gate_up + at * 2 * ffn, job->model->acts.hidden + at * ffn,
                       wk_row_count(job->model->dims.rows, task), ffn);
}

static void attention_task(void *context, uint32_t task, uint32_t thread)
{
    const struct backward_job *job = context;
    struct wk_model *model = job->model;
    const struct wk_dims *d = &model->dims;
    uint32_t group = task % d->kv_heads;
    uint64_t sequence = task / d->kv_heads, row = sequence * d->length;
    wk_attention_backward(&model->attention, group, job->state->qkv + row * d->qkv_width,
                          job->state->attended + row * d->q_width, job->state->lse + sequence * d->heads * d->length,
                          model->acts.dattended + row * d->q_width, model->acts.dqkv + row * d->qkv_width,
                          model->acts.scratch + thread * model->scratch_floats, &model->meter, thread);
}

/* Gradient of a projection's input: din[rows][in] = dout[rows][out] W[out][in]. */
static struct wk_gemm input_gradient(const struct wk_dims *d, const float *dout, uint32_t out_width,
                                     const float *weight, uint32_t in_width, float *din)
{
    return (struct wk_gemm){.m = d->rows,
                            .n = in_width,
                            .k = out_width,
                            .a = dout,
                            .lda = out_width,
                            .b = weight,
                            .ldb = in_width,
                            .c = din,
                            .ldc = in_width};
}

/* Gradient of a projection's weight: dW[out][in] = dout' in, over all rows. */
static struct wk_gemm weight_gradient(const struct wk_dims *d, const float *dout, uint32_t out_width, const float *in,
                                      uint32_t in_width, float *dweight)
{
    return (struct wk_gemm){.transpose_a = true,
                            .m = out_width,
                            .n = in_width,
                            .k = d->rows,
                            .a = dout,
                            .lda = out_width,
                            .b = in,
                            .ldb = in_width,
                            .c = dweight,
                            .ldc = in_width};
}

/* On entry dstream is the gradient of the layer's output, on return of its input. */
static void backward_layer(struct wk_model *model, const struct wk_layer *w, const struct wk_layer *g,
                           struct wk_layer_state *state)
{
    const struct wk_dims *d = &model->dims;
    struct wk_activations *a = &model->acts;
    struct backward_job job = {.model = model, .state = state};
    struct wk_gemm gemms[WK_GEMMS_MAX];

    gemms[0] = input_gradient(d, a->dstream, d->width, w->down, d->ffn, a->hidden);
    wk_gemm_run(model->pool, &model->meter, gemms, 1);
    dl_pool_run(model->pool, swiglu_task, &job, d->row_tiles);
    gemms[0] = input_gradient(d, state->gate_up, 2 * d->ffn, w->gate, d->width, a->dnormed);
    gemms[1] = weight_gradient(d, state->gate_up, 2 * d->ffn, state->middle_normed, d->width, g->gate);
    gemms[2] = weight_gradient(d, a->dstream, d->width, a->hidden, d->ffn, g->down);
    wk_gemm_run(model->pool, &model->meter, gemms, 3);
    norm_backward(model, state->middle, state->middle_rstd, w->post_norm, g->post_norm, 1);

    gemms[0] = input_gradient(d, a->dstream, d->width, w->o, d->q_width, a->dattended);
    gemms[1] = weight_gradient(d, a->dstream, d->width, state->attended, d->q_width, g->o);
    wk_gemm_run(model->pool, &model->meter, gemms, 2);
    dl_pool_run(model->pool, attention_task, &job, model->batch_sequences * d->kv_heads);
    gemms[0] = input_gradient(d, a->dqkv, d->qkv_width, w->q, d->width, a->dnormed);
    gemms[1] = weight_gradient(d, a->dqkv, d->qkv_width, state->normed, d->width, g->q);
    wk_gemm_run(model->pool, &model->meter, gemms, 2);
    norm_backward(model, state->input, state->input_rstd, w->input_norm, g->input_norm, 1);
}

/* Forward and backward through the head, a block of rows at a time; the head's gradient adds up over the blocks in
 * order. */
static void head(struct wk_model *model, const uint32_t *targets)
{
    const struct wk_dims *d = &model->dims;
    struct wk_activations *a = &model->acts;
    for (uint32_t first = 0; first < d->rows; first += d->logits_rows) {
        struct wk_dims block = *d;
        block.rows = DL_MIN(d->logits_rows, d->rows - first);
        wk_head_loss(model, targets, first, block.rows, 1.0f / (float)d->rows);
        size_t at = (size_t)first * d->width;
        struct wk_gemm gemms[2] = {
            input_gradient(&block, a->logits, d->vocab, model->weights.head, d->width, a->dnormed + at),
            weight_gradient(&block, a->logits, d->vocab, a->final + at, d->width, model->grads.head),
        };
        gemms[1].beta = first == 0 ? 0.0f : 1.0f;
        wk_gemm_run(model->pool, &model->meter, gemms, 2);
    }
}

static void embed_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct backward_job *job = context;
    const struct wk_dims *d = &job->model->dims;
    uint32_t column = task * EMBED_COLUMNS, columns = DL_MIN((uint32_t)EMBED_COLUMNS, d->width - column);
    float *dembed = job->model->grads.embed + column;
    if (!d->tied) {
        for (uint64_t v = 0; v < d->vocab; v++) {
            memset(dembed + v * d->width, 0, columns * sizeof(float));
        }
    }
    for (uint64_t r = 0; r < d->rows; r++) {
        wk_add(dembed + (uint64_t)job->tokens[r] * d->width, job->dout + r * d->width + column, columns);
    }
}

enum dl_rc wk_model_forward_backward(struct wk_model *model, const uint32_t *tokens, const uint32_t *targets,
                                     double *loss, struct dl_err *err)
{
    const struct wk_dims *d = &model->dims;
    struct wk_activations *a = &model->acts;
    if (model->forward_only) {
        return dl_err_set(err, DL_EINVAL, "this model was made for forward passes only");
    }
    enum dl_rc rc = wk_check_tokens(model, "token", tokens, d->rows, err);
    if (rc == DL_OK) {
        rc = wk_check_tokens(model, "target", targets, d->rows, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    wk_forward_layers(model, tokens, model->batch_sequences);
    head(model, targets);
    rc = wk_mean_loss(model, d->rows, loss, err);
    if (rc != DL_OK) {
        return rc;
    }
    norm_backward(model, a->output, a->output_rstd, model->weights.norm, model->grads.norm, 0);
    for (uint32_t i = d->layers; i-- > 0;) {
        backward_layer(model, &model->weights.layers[i], &model->grads.layers[i], &a->layers[i]);
    }
    struct backward_job job = {.model = model, .tokens = tokens, .dout = a->dstream};
    dl_pool_run(model->pool, embed_task, &job, (d->width + EMBED_COLUMNS - 1) / EMBED_COLUMNS);
    return DL_OK;
}
