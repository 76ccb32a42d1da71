#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "worker/model/model_internal.h"

#define GUARD_BYTES 64
#define GUARD_BYTE 0xA5
#define ROWS_MAX (UINT64_C(1) << 28) /* Keeps every size below 2^63 bytes and row numbers in 32 bits. */
#define FFN_MAX (1u << 20)

static float *take(struct wk_arena *arena, uint64_t floats)
{
    uint64_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
    float *part = arena->base == NULL ? NULL : (float *)(void *)(arena->base + arena->used);
    arena->used += bytes;
    if (arena->mode != WK_ARENA_PLAN) {
        uint8_t *guard = arena->base + arena->used;
        if (arena->mode == WK_ARENA_ASSIGN) {
            memset(guard, GUARD_BYTE, GUARD_BYTES);
        }
        for (int i = 0; i < GUARD_BYTES; i++) {
            if (guard[i] != GUARD_BYTE) {
                arena->broken++;
                break;
            }
        }
    }
    arena->used += GUARD_BYTES;
    return part;
}

static enum dl_rc check_range(const char *field, uint64_t value, uint64_t max, struct dl_err *err)
{
    if (value < 1 || value > max) {
        return dl_err_set(err, DL_EINVAL, "model: %s is %llu, allowed are 1 to %llu", field, (unsigned long long)value,
                          (unsigned long long)max);
    }
    return DL_OK;
}

static enum dl_rc check_spec(const struct dl_model_spec *spec, const struct wk_model_options *options,
                             struct dl_err *err)
{
    const struct {
        const char *field;
        uint64_t value, max;
    } ranges[] = {
        {"vocab_size", spec->vocab_size, WK_MODEL_VOCAB_MAX},
        {"width", spec->width, WK_MODEL_WIDTH_MAX},
        {"layers", spec->layers, WK_MODEL_LAYERS_MAX},
        {"heads", spec->heads, WK_MODEL_WIDTH_MAX},
        {"kv_heads", spec->kv_heads, spec->heads},
        {"ffn_width", spec->ffn_width, FFN_MAX},
        {"sequence_length", spec->sequence_length, WK_MODEL_SEQUENCE_MAX},
        {"batch_sequences", options->batch_sequences, WK_MODEL_BATCH_MAX},
        {"threads", DL_MAX(options->threads, 1u), WK_MODEL_THREADS_MAX},
        {"tokens in a batch", (uint64_t)spec->sequence_length * options->batch_sequences, ROWS_MAX},
    };
    for (size_t i = 0; i < DL_COUNT_OF(ranges); i++) {
        enum dl_rc rc = check_range(ranges[i].field, ranges[i].value, ranges[i].max, err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    if (spec->width % spec->heads != 0) {
        return dl_err_set(err, DL_EINVAL, "model: heads (%u) must divide width (%u)", spec->heads, spec->width);
    }
    if (spec->heads % spec->kv_heads != 0) {
        return dl_err_set(err, DL_EINVAL, "model: kv_heads (%u) must divide heads (%u)", spec->kv_heads, spec->heads);
    }
    uint32_t head_width = spec->width / spec->heads;
    if (head_width % 2 != 0 || head_width > WK_MODEL_HEAD_WIDTH_MAX) {
        return dl_err_set(err, DL_EINVAL, "model: a head's width, width / heads, is %u; it must be even and at most %d",
                          head_width, WK_MODEL_HEAD_WIDTH_MAX);
    }
    if (!(spec->rope_theta > 1) || !isfinite(spec->rope_theta) || !(spec->norm_epsilon > 0) ||
        !(spec->norm_epsilon < 1) || !(spec->init_std >= 0) || !isfinite(spec->init_std)) {
        return dl_err_set(err, DL_EINVAL,
                          "model: rope_theta (%g) must be above 1, norm_epsilon (%g) in (0, 1), init_std (%g) not "
                          "negative",
                          spec->rope_theta, spec->norm_epsilon, spec->init_std);
    }
    return DL_OK;
}

enum dl_rc wk_dims_of(const struct dl_model_spec *spec, const struct wk_model_options *options, struct wk_dims *dims,
                      struct dl_err *err)
{
    enum dl_rc rc = check_spec(spec, options, err);
    if (rc != DL_OK) {
        return rc;
    }
    uint64_t logits_rows = WK_LOGITS_BYTES / sizeof(float) / spec->vocab_size / WK_LOGITS_ROWS_MIN * WK_LOGITS_ROWS_MIN;
    *dims = (struct wk_dims){
        .vocab = spec->vocab_size,
        .width = spec->width,
        .layers = spec->layers,
        .heads = spec->heads,
        .kv_heads = spec->kv_heads,
        .head_width = spec->width / spec->heads,
        .ffn = spec->ffn_width,
        .q_width = spec->width,
        .qkv_width = spec->width / spec->heads * (spec->heads + 2 * spec->kv_heads),
        .length = spec->sequence_length,
        .rows = spec->sequence_length * options->batch_sequences,
        .tied = spec->tied_embeddings,
    };
    dims->row_tiles = wk_row_tiles(dims->rows);
    dims->logits_rows = (uint32_t)DL_MIN((uint64_t)dims->rows, DL_MAX(logits_rows, (uint64_t)WK_LOGITS_ROWS_MIN));
    return DL_OK;
}

uint32_t wk_row_tiles(uint64_t rows)
{
    return (uint32_t)((rows + WK_ROW_TILE - 1) / WK_ROW_TILE);
}

void wk_place_weights(struct wk_arena *arena, const struct wk_dims *dims, struct wk_weights *weights)
{
    uint64_t width = dims->width, kv_width = (uint64_t)dims->kv_heads * dims->head_width;
    float *embed = take(arena, dims->vocab * width);
    float *norm = take(arena, width);
    float *head = dims->tied ? embed : take(arena, dims->vocab * width);
    if (weights != NULL) {
        weights->embed = embed;
        weights->norm = norm;
        weights->head = head;
    }
    for (uint32_t i = 0; i < dims->layers; i++) {
        struct wk_layer layer;
        float *qkv = take(arena, (dims->q_width + 2 * kv_width) * width);
        layer.o = take(arena, width * dims->q_width);
        float *gate_up = take(arena, (uint64_t)2 * dims->ffn * width);
        layer.down = take(arena, width * dims->ffn);
        layer.input_norm = take(arena, width);
        layer.post_norm = take(arena, width);
        if (weights != NULL) {
            layer.q = qkv;
            layer.k = qkv + dims->q_width * width;
            layer.v = layer.k + kv_width * width;
            layer.gate = gate_up;
            layer.up = gate_up + dims->ffn * width;
            weights->layers[i] = layer;
        }
    }
}

static void place_layer(struct wk_arena *arena, const struct wk_dims *dims, struct wk_layer_state *state)
{
    uint64_t rows = dims->rows;
    state->input = take(arena, rows * dims->width);
    state->input_rstd = take(arena, rows);
    state->normed = take(arena, rows * dims->width);
    state->qkv = take(arena, rows * dims->qkv_width);
    state->attended = take(arena, rows * dims->q_width);
    state->lse = take(arena, rows * dims->heads);
    state->middle = take(arena, rows * dims->width);
    state->middle_rstd = take(arena, rows);
    state->middle_normed = take(arena, rows * dims->width);
    state->gate_up = take(arena, rows * 2 * dims->ffn);
}

void wk_place_activations(struct wk_arena *arena, const struct wk_dims *dims, uint32_t threads, bool forward_only,
                          struct wk_activations *acts)
{
    uint64_t rows = dims->rows, half = dims->head_width / 2;
    struct wk_layer_state state = {0};
    for (uint32_t i = 0; i < dims->layers; i++) {
        /* Without a backward pass nothing is kept: a layer may write where the one before it did. */
        if (i == 0 || !forward_only) {
            place_layer(arena, dims, &state);
        }
        if (acts != NULL) {
            acts->layers[i] = state;
        }
    }
    struct wk_activations all = {.layers = acts == NULL ? NULL : acts->layers};
    all.output = forward_only ? state.input : take(arena, rows * dims->width);
    all.output_rstd = take(arena, rows);
    all.final = take(arena, rows * dims->width);
    all.hidden = take(arena, rows * dims->ffn);
    all.logits = take(arena, (uint64_t)dims->logits_rows * dims->vocab);
    if (!forward_only) {
        all.dstream = take(arena, rows * dims->width);
        all.dnormed = take(arena, rows * dims->width);
        all.dattended = take(arena, rows * dims->q_width);
        all.dqkv = take(arena, rows * dims->qkv_width);
        all.gain_parts = take(arena, (uint64_t)dims->row_tiles * dims->width);
    }
    all.cosine = take(arena, dims->length * half);
    all.sine = take(arena, dims->length * half);
    all.losses = (double *)(void *)take(arena, rows * 2);
    all.scratch = take(arena, threads * wk_attention_scratch(dims->head_width, dims->length));
    if (acts != NULL) {
        *acts = all;
    }
}

uint32_t wk_tensor_count_of(const struct wk_dims *dims)
{
    return dims->layers * WK_TENSORS_PER_LAYER + (dims->tied ? 2 : 3);
}

static void set_tensor(struct dl_tensor *tensor, float **array, float *data, enum dl_tensor_role role, uint32_t layer,
                       uint64_t rows, uint64_t columns, const char *name)
{
    memset(tensor, 0, sizeof *tensor);
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    tensor->rank = rows == 0 ? 1 : 2;
    tensor->shape[0] = rows == 0 ? columns : rows;
    tensor->shape[1] = rows == 0 ? 0 : columns;
    tensor->role = role;
    tensor->layer = layer;
    *array = data;
}

static void layer_tensors(const struct wk_dims *dims, const struct wk_layer *w, uint32_t index,
                          struct dl_tensor *tensors, float **arrays)
{
    uint64_t d = dims->width, kv = (uint64_t)dims->kv_heads * dims->head_width, f = dims->ffn;
    const struct {
        const char *name;
        float *data;
        uint64_t rows, columns;
    } table[WK_TENSORS_PER_LAYER] = {
        {"input_layernorm", w->input_norm, 0, d},
        {"self_attn.q_proj", w->q, dims->q_width, d},
        {"self_attn.k_proj", w->k, kv, d},
        {"self_attn.v_proj", w->v, kv, d},
        {"self_attn.o_proj", w->o, d, dims->q_width},
        {"post_attention_layernorm", w->post_norm, 0, d},
        {"mlp.gate_proj", w->gate, f, d},
        {"mlp.up_proj", w->up, f, d},
        {"mlp.down_proj", w->down, d, f},
    };
    for (uint32_t i = 0; i < WK_TENSORS_PER_LAYER; i++) {
        char name[DL_TENSOR_NAME_MAX];
        snprintf(name, sizeof name, "model.layers.%u.%s.weight", index, table[i].name);
        set_tensor(&tensors[i], &arrays[i], table[i].data, DL_TENSOR_WEIGHT, index + 1, table[i].rows, table[i].columns,
                   name);
    }
}

void wk_tensor_table(const struct wk_dims *dims, const struct wk_weights *weights, struct dl_tensor *tensors,
                     float **arrays)
{
    uint32_t at = 0;
    set_tensor(&tensors[at], &arrays[at], weights->embed, DL_TENSOR_EMBEDDING, 0, dims->vocab, dims->width,
               "model.embed_tokens.weight");
    at++;
    for (uint32_t i = 0; i < dims->layers; i++, at += WK_TENSORS_PER_LAYER) {
        layer_tensors(dims, &weights->layers[i], i, &tensors[at], &arrays[at]);
    }
    set_tensor(&tensors[at], &arrays[at], weights->norm, DL_TENSOR_WEIGHT, dims->layers + 1, 0, dims->width,
               "model.norm.weight");
    at++;
    if (!dims->tied) {
        set_tensor(&tensors[at], &arrays[at], weights->head, DL_TENSOR_EMBEDDING, dims->layers + 1, dims->vocab,
                   dims->width, "lm_head.weight");
    }
}

enum dl_rc wk_model_plan(const struct dl_model_spec *spec, const struct wk_model_options *options,
                         struct wk_model_memory *memory, struct dl_err *err)
{
    struct wk_dims dims;
    enum dl_rc rc = wk_dims_of(spec, options, &dims, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_arena weights = {.mode = WK_ARENA_PLAN}, acts = {.mode = WK_ARENA_PLAN};
    wk_place_weights(&weights, &dims, NULL);
    wk_place_activations(&acts, &dims, DL_MAX(options->threads, 1u), options->forward_only, NULL);
    memory->parameters = weights.used;
    memory->gradients = options->forward_only ? 0 : weights.used;
    memory->moments = options->forward_only ? 0 : 2 * weights.used;
    memory->activations = acts.used;
    memory->total = memory->parameters + memory->gradients + memory->moments + memory->activations;
    return DL_OK;
}
