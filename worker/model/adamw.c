#include "worker/model/adamw.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/pool.h"
#include "worker/model/kernels.h"

/* Elements of a task: 3 arrays of 256 KiB. Part of the result: the norm is summed by chunk, in their order. */
#define CHUNK ((uint64_t)1 << 16)

struct chunk {
    uint32_t tensor;
    uint64_t offset, count;
};

struct wk_adamw {
    struct dl_inner_spec spec;
    uint32_t tensor_count;
    float *const *parameters;
    float *const *gradients;
    float **first, **second;
    float *first_memory, *second_memory;
    bool *decays;
    uint32_t chunk_count;
    struct chunk *chunks;
    double *chunk_squares;
    struct dl_pool *pool;
    uint64_t steps;
    double set_rate;                 /* Negative: from the schedule. */
    struct wk_adamw_factors factors; /* Of the step at hand. */
    float plain_keep, decayed_keep;
};

static uint64_t chunks_of(uint64_t elements)
{
    return (elements + CHUNK - 1) / CHUNK;
}

static uint64_t padded(uint64_t elements)
{
    return (elements + 15) / 16 * 16;
}

static enum dl_rc allocate(struct wk_adamw *adamw, const struct dl_tensor *tensors, struct dl_err *err)
{
    uint64_t floats = 0, chunks = 0;
    for (uint32_t i = 0; i < adamw->tensor_count; i++) {
        uint64_t elements = dl_tensor_elements(&tensors[i]);
        floats += padded(elements);
        chunks += chunks_of(elements);
    }
    if (chunks > UINT32_MAX) {
        return dl_err_set(err, DL_ENOMEM, "optimizer: %llu parameters are too many", (unsigned long long)floats);
    }
    adamw->first = calloc(adamw->tensor_count, sizeof *adamw->first);
    adamw->second = calloc(adamw->tensor_count, sizeof *adamw->second);
    adamw->decays = calloc(adamw->tensor_count, sizeof *adamw->decays);
    adamw->chunks = calloc(chunks, sizeof *adamw->chunks);
    adamw->chunk_squares = calloc(chunks, sizeof *adamw->chunk_squares);
    adamw->first_memory = dl_alloc_aligned(floats * sizeof(float));
    adamw->second_memory = dl_alloc_aligned(floats * sizeof(float));
    if (adamw->first == NULL || adamw->second == NULL || adamw->decays == NULL || adamw->chunks == NULL ||
        adamw->chunk_squares == NULL || adamw->first_memory == NULL || adamw->second_memory == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the optimizer's moments (%llu MiB)",
                          (unsigned long long)(floats * 2 * sizeof(float) >> 20));
    }
    return DL_OK;
}

enum dl_rc wk_adamw_new(const struct dl_inner_spec *spec, const struct dl_tensor *tensors, uint32_t tensor_count,
                        float *const *parameters, float *const *gradients, struct dl_pool *pool, struct wk_adamw **out,
                        struct dl_err *err)
{
    assert(gradients != NULL && tensor_count > 0);
    struct wk_adamw *adamw = calloc(1, sizeof *adamw);
    if (adamw == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the optimizer");
    }
    adamw->spec = *spec;
    adamw->tensor_count = tensor_count;
    adamw->parameters = parameters;
    adamw->gradients = gradients;
    adamw->pool = pool;
    adamw->set_rate = -1;
    enum dl_rc rc = allocate(adamw, tensors, err);
    if (rc != DL_OK) {
        wk_adamw_free(adamw);
        return rc;
    }
    uint64_t at = 0;
    for (uint32_t i = 0; i < tensor_count; i++) {
        uint64_t elements = dl_tensor_elements(&tensors[i]);
        adamw->first[i] = adamw->first_memory + at;
        adamw->second[i] = adamw->second_memory + at;
        adamw->decays[i] = tensors[i].rank >= 2;
        at += padded(elements);
        for (uint64_t offset = 0; offset < elements; offset += CHUNK) {
            adamw->chunks[adamw->chunk_count++] =
                (struct chunk){.tensor = i, .offset = offset, .count = DL_MIN(CHUNK, elements - offset)};
        }
    }
    *out = adamw;
    return DL_OK;
}

void wk_adamw_free(struct wk_adamw *adamw)
{
    if (adamw == NULL) {
        return;
    }
    free(adamw->first);
    free(adamw->second);
    free(adamw->decays);
    free(adamw->chunks);
    free(adamw->chunk_squares);
    free(adamw->first_memory);
    free(adamw->second_memory);
    free(adamw);
}

double wk_adamw_rate(const struct dl_inner_spec *spec, uint64_t step)
{
    double peak = spec->learning_rate, floor = peak * spec->min_learning_rate_ratio;
    if (step <= spec->warmup_steps) {
        return peak * (double)step / (double)spec->warmup_steps;
    }
    if (spec->decay_steps == 0) {
        return peak;
    }
    if (step >= spec->decay_steps || spec->decay_steps <= spec->warmup_steps) {
        return floor;
    }
    double progress = (double)(step - spec->warmup_steps) / (double)(spec->decay_steps - spec->warmup_steps);
    return floor + (peak - floor) * 0.5 * (1 + cos(M_PI * progress));
}

static void squares_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    struct wk_adamw *adamw = context;
    const struct chunk *chunk = &adamw->chunks[task];
    adamw->chunk_squares[task] = wk_sum_squares(adamw->gradients[chunk->tensor] + chunk->offset, chunk->count);
}

static void update_task(void *context, uint32_t task, uint32_t thread)
{
    (void)thread;
    struct wk_adamw *adamw = context;
    const struct chunk *chunk = &adamw->chunks[task];
    struct wk_adamw_factors factors = adamw->factors;
    factors.keep = adamw->decays[chunk->tensor] ? adamw->decayed_keep : adamw->plain_keep;
    wk_adamw_update(adamw->parameters[chunk->tensor] + chunk->offset, adamw->gradients[chunk->tensor] + chunk->offset,
                    adamw->first[chunk->tensor] + chunk->offset, adamw->second[chunk->tensor] + chunk->offset,
                    chunk->count, &factors);
}

enum dl_rc wk_adamw_step(struct wk_adamw *adamw, struct wk_adamw_stats *stats, struct dl_err *err)
{
    const struct dl_inner_spec *spec = &adamw->spec;
    dl_pool_run(adamw->pool, squares_task, adamw, adamw->chunk_count);
    double squares = 0;
    for (uint32_t i = 0; i < adamw->chunk_count; i++) {
        squares += adamw->chunk_squares[i];
    }
    double norm = sqrt(squares);
    if (!isfinite(norm)) {
        return dl_err_set(err, DL_EINVAL, "the gradient norm is not finite after %llu steps; this update is skipped",
                          (unsigned long long)adamw->steps);
    }
    bool clips = spec->clip_norm > 0 && norm > spec->clip_norm;
    uint64_t step = adamw->steps + 1;
    double rate = adamw->set_rate >= 0 ? adamw->set_rate : wk_adamw_rate(spec, step);
    adamw->factors = (struct wk_adamw_factors){
        .clip = clips ? (float)(spec->clip_norm / norm) : 1.0f,
        .beta1 = (float)spec->beta1,
        .beta2 = (float)spec->beta2,
        .one_minus_beta1 = (float)(1 - spec->beta1),
        .one_minus_beta2 = (float)(1 - spec->beta2),
        .step = (float)(rate / (1 - pow(spec->beta1, (double)step))),
        .inverse_root2 = (float)(1 / sqrt(1 - pow(spec->beta2, (double)step))),
        .epsilon = (float)spec->epsilon,
    };
    adamw->plain_keep = 1;
    adamw->decayed_keep = (float)(1 - rate * spec->weight_decay);
    dl_pool_run(adamw->pool, update_task, adamw, adamw->chunk_count);
    adamw->steps = step;
    if (stats != NULL) {
        *stats = (struct wk_adamw_stats){.learning_rate = rate, .gradient_norm = norm, .clipped = clips};
    }
    return DL_OK;
}

void wk_adamw_set_rate(struct wk_adamw *adamw, double rate)
{
    adamw->set_rate = rate;
}

uint64_t wk_adamw_steps(const struct wk_adamw *adamw)
{
    return adamw->steps;
}

void wk_adamw_set_steps(struct wk_adamw *adamw, uint64_t steps)
{
    adamw->steps = steps;
}

float *const *wk_adamw_first_moments(struct wk_adamw *adamw)
{
    return adamw->first;
}

float *const *wk_adamw_second_moments(struct wk_adamw *adamw)
{
    return adamw->second;
}
