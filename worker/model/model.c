#include "worker/model/model.h"

#include <cblas.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/rng.h"
#include "worker/model/model_internal.h"

/* Large pages, too, since packing operands walks down columns, a page a row. Zeroed, free() releases. */
static void *allocate_zeroed(uint64_t bytes)
{
    void *memory = dl_alloc_large(bytes);
    if (memory != NULL) {
        memset(memory, 0, bytes);
    }
    return memory;
}

static enum dl_rc allocate_arena(struct wk_arena *arena, uint64_t bytes, const char *what, struct dl_err *err)
{
    *arena = (struct wk_arena){.mode = WK_ARENA_ASSIGN, .base = allocate_zeroed(bytes)};
    if (arena->base == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the model's %s (%llu MiB)", what,
                          (unsigned long long)(bytes >> 20));
    }
    return DL_OK;
}

static enum dl_rc check_memory(const struct wk_model_memory *memory, struct dl_err *err)
{
    uint64_t available = wk_memory_available();
    if (memory->total > available) {
        return dl_err_set(err, DL_ENOMEM,
                          "the model needs %llu MiB (parameters %llu, gradients %llu, optimizer %llu, activations "
                          "%llu), %llu MiB are available: lower batchSequences, sequenceLength, width or layers",
                          (unsigned long long)(memory->total >> 20), (unsigned long long)(memory->parameters >> 20),
                          (unsigned long long)(memory->gradients >> 20), (unsigned long long)(memory->moments >> 20),
                          (unsigned long long)(memory->activations >> 20), (unsigned long long)(available >> 20));
    }
    return DL_OK;
}

void wk_fill_rotary(const struct dl_model_spec *spec, uint32_t positions, float *cosine, float *sine)
{
    uint32_t head_width = spec->width / spec->heads, half = head_width / 2;
    for (uint32_t i = 0; i < half; i++) {
        double frequency = pow(spec->rope_theta, -2.0 * i / head_width);
        for (uint32_t position = 0; position < positions; position++) {
            cosine[(size_t)position * half + i] = (float)cos(position * frequency);
            sine[(size_t)position * half + i] = (float)sin(position * frequency);
        }
    }
}

struct init_job {
    struct wk_model *model;
    uint64_t seed;
};

static bool ends_with(const char *text, const char *tail)
{
    size_t length = strlen(text), tail_length = strlen(tail);
    return length >= tail_length && strcmp(text + length - tail_length, tail) == 0;
}

static void init_tensor(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    const struct init_job *job = context;
    struct wk_model *model = job->model;
    const struct dl_tensor *tensor = &model->tensors[task];
    uint64_t count = dl_tensor_elements(tensor);
    float *out = model->parameters[task];
    if (tensor->rank == 1) {
        for (uint64_t i = 0; i < count; i++) {
            out[i] = 1;
        }
        return;
    }
    /* Projections that write to the residual stream are scaled down, so that its variance does not grow with depth. */
    bool to_stream = ends_with(tensor->name, "o_proj.weight") || ends_with(tensor->name, "down_proj.weight");
    float deviation = (float)(model->spec.init_std * (to_stream ? 1 / sqrt(2.0 * model->dims.layers) : 1));
    struct dl_rng rng;
    dl_rng_init(&rng, job->seed, dl_rng_stream(tensor->name, 0, 0));
    for (uint64_t i = 0; i < count; i++) {
        out[i] = deviation * dl_rng_normal(&rng);
    }
}

static enum dl_rc allocate(struct wk_model *model, const struct wk_model_memory *memory, uint32_t threads,
                           struct dl_err *err)
{
    struct wk_dims *dims = &model->dims;
    model->tensor_count = wk_tensor_count_of(dims);
    model->tensors = calloc(model->tensor_count, sizeof *model->tensors);
    model->parameters = calloc(model->tensor_count, sizeof *model->parameters);
    model->gradients = calloc(model->tensor_count, sizeof *model->gradients);
    model->weights.layers = calloc(dims->layers, sizeof *model->weights.layers);
    model->grads.layers = calloc(dims->layers, sizeof *model->grads.layers);
    model->acts.layers = calloc(dims->layers, sizeof *model->acts.layers);
    model->meter.threads = dl_alloc_aligned(threads * sizeof *model->meter.threads);
    if (model->tensors == NULL || model->parameters == NULL || model->gradients == NULL ||
        model->weights.layers == NULL || model->grads.layers == NULL || model->acts.layers == NULL ||
        model->meter.threads == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the model's tables");
    }
    enum dl_rc rc = allocate_arena(&model->parameter_arena, memory->parameters, "parameters", err);
    if (rc == DL_OK) {
        rc = allocate_arena(&model->activation_arena, memory->activations, "activations", err);
    }
    if (rc == DL_OK && !model->forward_only) {
        rc = allocate_arena(&model->gradient_arena, memory->gradients, "gradients", err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    if (!model->forward_only) {
        wk_place_weights(&model->gradient_arena, dims, &model->grads);
        wk_tensor_table(dims, &model->grads, model->tensors, model->gradients);
    }
    wk_place_weights(&model->parameter_arena, dims, &model->weights);
    wk_tensor_table(dims, &model->weights, model->tensors, model->parameters);
    wk_place_activations(&model->activation_arena, dims, threads, model->forward_only, &model->acts);
    return dl_pool_new(threads, DL_POOL_YIELD, &model->pool, err);
}

enum dl_rc wk_model_new(const struct dl_model_spec *spec, const struct wk_model_options *options, struct wk_model **out,
                        struct dl_err *err)
{
    struct wk_model_memory memory;
    enum dl_rc rc = wk_model_plan(spec, options, &memory, err);
    if (rc == DL_OK) {
        rc = check_memory(&memory, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_model *model = calloc(1, sizeof *model);
    if (model == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the model");
    }
    model->spec = *spec;
    model->batch_sequences = options->batch_sequences;
    model->forward_only = options->forward_only;
    rc = wk_dims_of(spec, options, &model->dims, err);
    if (rc == DL_OK) {
        model->scratch_floats = wk_attention_scratch(model->dims.head_width, model->dims.length);
        rc = allocate(model, &memory, DL_MAX(options->threads, 1u), err);
    }
    if (rc != DL_OK) {
        wk_model_free(model);
        return rc;
    }
    /* The pool's threads call sgemm side by side; each call stays on its own thread. */
    openblas_set_num_threads(1);
    (void)wk_gemm_tiles_freely(); /* Now, rather than in the first step. */
    wk_fill_rotary(&model->spec, model->dims.length, model->acts.cosine, model->acts.sine);
    model->attention = (struct wk_attention_shape){.heads = model->dims.heads,
                                                   .kv_heads = model->dims.kv_heads,
                                                   .head_width = model->dims.head_width,
                                                   .length = model->dims.length,
                                                   .cosine = model->acts.cosine,
                                                   .sine = model->acts.sine};
    struct init_job job = {.model = model, .seed = options->seed};
    dl_pool_run(model->pool, init_tensor, &job, model->tensor_count);
    *out = model;
    return DL_OK;
}

void wk_model_free(struct wk_model *model)
{
    if (model == NULL) {
        return;
    }
    dl_pool_free(model->pool);
    free(model->parameter_arena.base);
    free(model->gradient_arena.base);
    free(model->activation_arena.base);
    free(model->tensors);
    free(model->parameters);
    free(model->gradients);
    free(model->weights.layers);
    free(model->grads.layers);
    free(model->acts.layers);
    free(model->meter.threads);
    free(model);
}

uint32_t wk_model_tensor_count(const struct wk_model *model)
{
    return model->tensor_count;
}

const struct dl_tensor *wk_model_tensors(const struct wk_model *model)
{
    return model->tensors;
}

float *const *wk_model_parameters(struct wk_model *model)
{
    return model->parameters;
}

float *const *wk_model_gradients(struct wk_model *model)
{
    return model->forward_only ? NULL : model->gradients;
}

uint64_t wk_model_elements(const struct wk_model *model)
{
    uint64_t elements = 0;
    for (uint32_t i = 0; i < model->tensor_count; i++) {
        elements += dl_tensor_elements(&model->tensors[i]);
    }
    return elements;
}

const struct dl_model_spec *wk_model_spec(const struct wk_model *model)
{
    return &model->spec;
}

uint32_t wk_model_batch_sequences(const struct wk_model *model)
{
    return model->batch_sequences;
}

struct dl_pool *wk_model_pool(struct wk_model *model)
{
    return model->pool;
}

double wk_model_step_flops(const struct wk_model *model, uint32_t sequences)
{
    const struct wk_dims *d = &model->dims;
    double rows = (double)sequences * d->length;
    double layer = (double)d->width * (d->qkv_width + d->q_width + 3.0 * d->ffn);
    double weights = d->layers * layer + (double)d->vocab * d->width;
    /* Two products (scores, values) over half of the length on average. */
    double attention = d->layers * 2.0 * d->q_width * d->length / 2;
    return 3 * 2 * rows * (weights + attention);
}

void wk_model_measure(struct wk_model *model, bool on)
{
    model->meter.on = on;
}

struct wk_model_products wk_model_take_products(struct wk_model *model)
{
    struct wk_model_products sum = {0};
    for (uint32_t i = 0; i < dl_pool_threads(model->pool); i++) {
        sum.ns += model->meter.threads[i].ns;
        sum.multiplications += (double)model->meter.threads[i].multiplications;
        model->meter.threads[i].ns = model->meter.threads[i].multiplications = 0;
    }
    return sum;
}

static void start_check(struct wk_arena *arena)
{
    arena->mode = WK_ARENA_CHECK;
    arena->used = 0;
    arena->broken = 0;
}

uint32_t wk_model_broken_guards(struct wk_model *model)
{
    start_check(&model->parameter_arena);
    start_check(&model->activation_arena);
    wk_place_weights(&model->parameter_arena, &model->dims, NULL);
    wk_place_activations(&model->activation_arena, &model->dims, dl_pool_threads(model->pool), model->forward_only,
                         NULL);
    if (!model->forward_only) {
        start_check(&model->gradient_arena);
        wk_place_weights(&model->gradient_arena, &model->dims, NULL);
    }
    return model->parameter_arena.broken + model->activation_arena.broken + model->gradient_arena.broken;
}
