#include "worker/model/generate.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "worker/model/kernels.h"
#include "worker/model/model_internal.h"

#define CHUNK_ROWS 16u /* Tokens that go through the layers together when a prompt is read. */

struct candidate {
    uint32_t token;
    double weight;
};

struct wk_generator {
    struct wk_model *model;
    uint32_t context_max, position;
    float *keys, *values; /* [layers][context_max][kv_width], keys rotated */
    float *cosine, *sine; /* [context_max][head_width / 2] */
    float *stream, *normed, *rstd, *qkv, *attended, *gate_up, *hidden; /* [CHUNK_ROWS][...] */
    float *scores;                                                     /* [threads][CHUNK_ROWS][context_max] */
    float *logits;                                                     /* [vocab] */
    struct candidate *candidates;                                      /* [vocab] */
};

static float *take(uint64_t floats)
{
    return dl_alloc_aligned(floats * sizeof(float));
}

static bool allocate(struct wk_generator *g)
{
    const struct wk_dims *d = &g->model->dims;
    uint64_t kv_width = (uint64_t)d->kv_heads * d->head_width, context = g->context_max, half = d->head_width / 2;
    g->keys = take(d->layers * context * kv_width);
    g->values = take(d->layers * context * kv_width);
    g->cosine = take(context * half);
    g->sine = take(context * half);
    g->stream = take((uint64_t)CHUNK_ROWS * d->width);
    g->normed = take((uint64_t)CHUNK_ROWS * d->width);
    g->rstd = take(CHUNK_ROWS);
    g->qkv = take((uint64_t)CHUNK_ROWS * d->qkv_width);
    g->attended = take((uint64_t)CHUNK_ROWS * d->q_width);
    g->gate_up = take((uint64_t)CHUNK_ROWS * 2 * d->ffn);
    g->hidden = take((uint64_t)CHUNK_ROWS * d->ffn);
    g->scores = take(dl_pool_threads(g->model->pool) * CHUNK_ROWS * context);
    g->logits = take(d->vocab);
    g->candidates = calloc(d->vocab, sizeof *g->candidates);
    return g->keys != NULL && g->values != NULL && g->cosine != NULL && g->sine != NULL && g->stream != NULL &&
           g->normed != NULL && g->rstd != NULL && g->qkv != NULL && g->attended != NULL && g->gate_up != NULL &&
           g->hidden != NULL && g->scores != NULL && g->logits != NULL && g->candidates != NULL;
}

enum dl_rc wk_generator_new(struct wk_model *model, uint32_t context_max, struct wk_generator **out, struct dl_err *err)
{
    uint32_t context = context_max == 0 ? model->dims.length : context_max;
    if (context > WK_MODEL_SEQUENCE_MAX) {
        return dl_err_set(err, DL_EINVAL, "a context of %u tokens; at most %u are allowed", context,
                          WK_MODEL_SEQUENCE_MAX);
    }
    struct wk_generator *g = calloc(1, sizeof *g);
    if (g == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a generator");
    }
    g->model = model;
    g->context_max = context;
    if (!allocate(g)) {
        wk_generator_free(g);
        return dl_err_set(err, DL_ENOMEM, "no memory for a generator with a context of %u tokens", context);
    }
    wk_fill_rotary(&model->spec, context, g->cosine, g->sine);
    *out = g;
    return DL_OK;
}

void wk_generator_free(struct wk_generator *g)
{
    if (g == NULL) {
        return;
    }
    free(g->keys);
    free(g->values);
    free(g->cosine);
    free(g->sine);
    free(g->stream);
    free(g->normed);
    free(g->rstd);
    free(g->qkv);
    free(g->attended);
    free(g->gate_up);
    free(g->hidden);
    free(g->scores);
    free(g->logits);
    free(g->candidates);
    free(g);
}

void wk_generator_reset(struct wk_generator *g)
{
    g->position = 0;
}

struct attend_job {
    struct wk_generator *generator;
    const float *keys, *values; /* This layer's. */
    uint32_t rows;
};

/* One query head over the cache, for the rows of a chunk. */
static void attend_task(void *context, uint32_t head, uint32_t thread)
{
    const struct attend_job *job = context;
    struct wk_generator *g = job->generator;
    const struct wk_dims *d = &g->model->dims;
    uint32_t w = d->head_width, kv_width = d->kv_heads * w, keys = g->position + job->rows;
    size_t column = (size_t)(head / (d->heads / d->kv_heads)) * w;
    float *scores = g->scores + (size_t)thread * CHUNK_ROWS * g->context_max;
    const struct wk_gemm by_key = {.transpose_b = true,
                                   .m = job->rows,
                                   .n = keys,
                                   .k = w,
                                   .a = g->qkv + (size_t)head * w,
                                   .lda = d->qkv_width,
                                   .b = job->keys + column,
                                   .ldb = kv_width,
                                   .c = scores,
                                   .ldc = g->context_max};
    wk_gemm_one(&g->model->meter, thread, &by_key, 1.0f / sqrtf((float)w));
    for (uint32_t r = 0; r < job->rows; r++) {
        float maximum, *row = scores + (size_t)r * g->context_max;
        float sum = wk_softmax_part(row, g->position + r + 1, keys, -INFINITY, &maximum);
        wk_scale(row, keys, 1.0f / sum);
    }
    const struct wk_gemm by_value = {.m = job->rows,
                                     .n = w,
                                     .k = keys,
                                     .a = scores,
                                     .lda = g->context_max,
                                     .b = job->values + column,
                                     .ldb = kv_width,
                                     .c = g->attended + (size_t)head * w,
                                     .ldc = d->q_width};
    wk_gemm_one(&g->model->meter, thread, &by_value, 1);
}

static void project(struct wk_generator *g, const float *in, uint32_t in_width, const float *weight, uint32_t out_width,
                    uint32_t rows, float *out, float beta)
{
    struct wk_gemm gemm = wk_gemm_projection(in, in_width, weight, out_width, rows, out);
    gemm.beta = beta;
    wk_gemm_run(g->model->pool, &g->model->meter, &gemm, 1);
}

/* Rotates this chunk's queries and keys, and stores keys and values in the cache. */
static void rotate_and_store(struct wk_generator *g, uint32_t rows, float *keys, float *values)
{
    const struct wk_dims *d = &g->model->dims;
    uint32_t w = d->head_width, kv_width = d->kv_heads * w, half = w / 2;
    const float *cosine = g->cosine + (size_t)g->position * half, *sine = g->sine + (size_t)g->position * half;
    for (uint32_t head = 0; head < d->heads + d->kv_heads; head++) {
        wk_rope(g->qkv + (size_t)head * w, d->qkv_width, cosine, sine, rows, w, 1);
    }
    for (uint32_t r = 0; r < rows; r++) {
        const float *key = g->qkv + (size_t)r * d->qkv_width + d->q_width;
        memcpy(keys + (size_t)(g->position + r) * kv_width, key, kv_width * sizeof(float));
        memcpy(values + (size_t)(g->position + r) * kv_width, key + kv_width, kv_width * sizeof(float));
    }
}

static void feed_chunk(struct wk_generator *g, const uint32_t *tokens, uint32_t rows)
{
    const struct wk_dims *d = &g->model->dims;
    float epsilon = (float)g->model->spec.norm_epsilon;
    size_t cache = (size_t)g->context_max * d->kv_heads * d->head_width;
    for (uint32_t r = 0; r < rows; r++) {
        memcpy(g->stream + (size_t)r * d->width, g->model->weights.embed + (size_t)tokens[r] * d->width,
               d->width * sizeof(float));
    }
    for (uint32_t i = 0; i < d->layers; i++) {
        const struct wk_layer *w = &g->model->weights.layers[i];
        struct attend_job job = {
            .generator = g, .keys = g->keys + i * cache, .values = g->values + i * cache, .rows = rows};
        wk_rmsnorm(g->stream, w->input_norm, epsilon, rows, d->width, g->normed, g->rstd);
        project(g, g->normed, d->width, w->q, d->qkv_width, rows, g->qkv, 0);
        rotate_and_store(g, rows, g->keys + i * cache, g->values + i * cache);
        dl_pool_run(g->model->pool, attend_task, &job, d->heads);
        project(g, g->attended, d->q_width, w->o, d->width, rows, g->stream, 1);
        wk_rmsnorm(g->stream, w->post_norm, epsilon, rows, d->width, g->normed, g->rstd);
        project(g, g->normed, d->width, w->gate, 2 * d->ffn, rows, g->gate_up, 0);
        wk_swiglu(g->gate_up, rows, d->ffn, g->hidden);
        project(g, g->hidden, d->ffn, w->down, d->width, rows, g->stream, 1);
    }
    g->position += rows;
}

enum dl_rc wk_generator_feed(struct wk_generator *g, const uint32_t *tokens, uint32_t count, const float **logits,
                             struct dl_err *err)
{
    const struct wk_dims *d = &g->model->dims;
    if (count == 0 || count > g->context_max - g->position) {
        return dl_err_set(err, DL_EINVAL, "%u tokens do not fit: %u of a context of %u are used", count, g->position,
                          g->context_max);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (tokens[i] >= d->vocab) {
            return dl_err_set(err, DL_EINVAL, "token %u at position %u is outside the vocabulary of %u", tokens[i],
                              g->position + i, d->vocab);
        }
    }
    uint32_t rows = 0;
    for (uint32_t done = 0; done < count; done += rows) {
        rows = DL_MIN(CHUNK_ROWS, count - done);
        feed_chunk(g, tokens + done, rows);
    }
    wk_rmsnorm(g->stream + (size_t)(rows - 1) * d->width, g->model->weights.norm, (float)g->model->spec.norm_epsilon, 1,
               d->width, g->normed, g->rstd);
    project(g, g->normed, d->width, g->model->weights.head, d->vocab, 1, g->logits, 0);
    *logits = g->logits;
    return DL_OK;
}

/* Most likely first; equal ones by token, so that the order is always the same. */
static int compare_candidates(const void *a, const void *b)
{
    const struct candidate *left = a, *right = b;
    if (left->weight != right->weight) {
        return left->weight > right->weight ? -1 : 1;
    }
    return left->token < right->token ? -1 : left->token > right->token;
}

/* Candidates that top_k and top_p leave, with the sum of their weights. */
static uint32_t cut_candidates(const struct wk_generator *g, const struct wk_sample_options *options, double total,
                               double *kept)
{
    uint32_t vocab = g->model->dims.vocab;
    uint32_t limit = options->top_k == 0 ? vocab : DL_MIN(options->top_k, vocab);
    double share = options->top_p <= 0 || options->top_p >= 1 ? 2 : options->top_p;
    uint32_t count = 0;
    *kept = 0;
    while (count < limit && (count == 0 || *kept < share * total)) {
        *kept += g->candidates[count++].weight;
    }
    return count;
}

enum dl_rc wk_generator_sample(struct wk_generator *g, const struct wk_sample_options *options, struct dl_rng *rng,
                               uint32_t *token, struct dl_err *err)
{
    uint32_t vocab = g->model->dims.vocab, best = 0;
    if (g->position == 0) {
        return dl_err_set(err, DL_EINVAL, "nothing to sample from: no token has been fed yet");
    }
    for (uint32_t i = 0; i < vocab; i++) {
        if (!isfinite(g->logits[i])) {
            return dl_err_set(err, DL_EINVAL, "the model's output is not finite (token %u)", i);
        }
        best = g->logits[i] > g->logits[best] ? i : best;
    }
    if (options->temperature <= 0) {
        *token = best;
        return DL_OK;
    }
    double total = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        double weight = exp(((double)g->logits[i] - (double)g->logits[best]) / options->temperature);
        g->candidates[i] = (struct candidate){.token = i, .weight = weight};
        total += weight;
    }
    qsort(g->candidates, vocab, sizeof *g->candidates, compare_candidates);
    double kept;
    uint32_t count = cut_candidates(g, options, total, &kept);
    double wanted = (double)dl_rng_u32(rng) * 0x1p-32 * kept;
    uint32_t chosen = 0;
    for (double sum = g->candidates[0].weight; chosen + 1 < count && sum <= wanted; chosen++) {
        sum += g->candidates[chosen + 1].weight;
    }
    *token = g->candidates[chosen].token;
    return DL_OK;
}
