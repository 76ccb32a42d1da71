/* Inside of wk_model, shared by its source files only. */
#ifndef WK_MODEL_MODEL_INTERNAL_H
#define WK_MODEL_MODEL_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

#include "common/pool.h"
#include "worker/model/attention.h"
#include "worker/model/gemm.h"
#include "worker/model/memory.h"
#include "worker/model/model.h"

#define WK_TENSORS_PER_LAYER 9
#define WK_ROW_TILE 64 /* Rows of an element-wise task. Part of the result: norms' gradients are summed by tile. */
#define WK_LOGITS_BYTES (UINT64_C(32) << 20) /* Logits are held for a block of rows of at most about this size. */
#define WK_LOGITS_ROWS_MIN 128

/* Hands out parts of one allocation, each 64-byte aligned and followed by a guard. The same sequence of calls first
 * adds up the size, then assigns pointers and writes guards, and later checks that the guards still stand. */
struct wk_arena {
    enum { WK_ARENA_PLAN, WK_ARENA_ASSIGN, WK_ARENA_CHECK } mode;
    uint8_t *base;
    uint64_t used;   /* Bytes. */
    uint32_t broken; /* Guards found overwritten. */
};

/* Sizes that follow from the spec. */
struct wk_dims {
    uint32_t vocab, width, layers, heads, kv_heads, head_width, ffn;
    uint32_t q_width;   /* heads * head_width */
    uint32_t qkv_width; /* With keys and values. */
    uint32_t length;    /* Tokens of a sequence. */
    uint32_t rows;      /* Tokens of a whole batch. */
    uint32_t row_tiles;
    uint32_t logits_rows;
    bool tied;
};

/* One layer's parameters, or their gradients. q, k, v stand one after the other, so do gate and up: one product each.
 */
struct wk_layer {
    float *input_norm, *q, *k, *v, *o, *post_norm, *gate, *up, *down;
};

struct wk_weights {
    float *embed, *norm, *head; /* head is embed when tied. */
    struct wk_layer *layers;
};

/* What one layer's forward leaves for its backward. */
struct wk_layer_state {
    float *input;      /* [rows][width], residual stream before the layer */
    float *input_rstd; /* [rows] */
    float *normed;     /* [rows][width] */
    float *qkv;        /* [rows][qkv_width], rotated */
    float *attended;   /* [rows][q_width] */
    float *lse;        /* [sequences][heads][length] */
    float *middle;     /* [rows][width], residual stream after attention */
    float *middle_rstd;
    float *middle_normed;
    float *gate_up; /* [rows][2 ffn] */
};

struct wk_activations {
    struct wk_layer_state *layers;
    float *output; /* [rows][width], residual stream after the last layer */
    float *output_rstd;
    float *final;      /* [rows][width], normed output */
    float *hidden;     /* [rows][ffn], and its gradient */
    float *logits;     /* [logits_rows][vocab], and its gradient */
    float *dstream;    /* [rows][width], gradient of the residual stream */
    float *dnormed;    /* [rows][width] */
    float *dattended;  /* [rows][q_width] */
    float *dqkv;       /* [rows][qkv_width] */
    float *gain_parts; /* [row_tiles][width] */
    float *cosine, *sine;
    double *losses; /* [rows] */
    float *scratch; /* [threads][scratch_floats] */
};

struct wk_model {
    struct dl_model_spec spec;
    struct wk_dims dims;
    uint32_t batch_sequences;
    bool forward_only;
    uint32_t tensor_count;
    struct dl_tensor *tensors;
    float **parameters, **gradients; /* By tensor, in the table's order. */
    struct wk_weights weights, grads;
    struct wk_activations acts;
    struct wk_arena parameter_arena, gradient_arena, activation_arena;
    uint64_t scratch_floats;
    struct dl_pool *pool;
    struct wk_meter meter;
    struct wk_attention_shape attention;
};

/* model_plan.c */
DL_MUST_CHECK enum dl_rc wk_dims_of(const struct dl_model_spec *spec, const struct wk_model_options *options,
                                    struct wk_dims *dims, struct dl_err *err);
void wk_place_weights(struct wk_arena *arena, const struct wk_dims *dims, struct wk_weights *weights);
void wk_place_activations(struct wk_arena *arena, const struct wk_dims *dims, uint32_t threads, bool forward_only,
                          struct wk_activations *acts);
uint32_t wk_tensor_count_of(const struct wk_dims *dims);
/* Fills the table and, for each tensor, where in `weights` it stands. */
void wk_tensor_table(const struct wk_dims *dims, const struct wk_weights *weights, struct dl_tensor *tensors,
                     float **arrays);

/* model.c: cosine and sine of position times theta^(-2i / head width), computed in double, [positions][head width / 2].
 */
void wk_fill_rotary(const struct dl_model_spec *spec, uint32_t positions, float *cosine, float *sine);

/* model.c, for tests: overwritten guards of all arenas; 0 when every kernel kept within its buffers. */
uint32_t wk_model_broken_guards(struct wk_model *model);

/* forward.c */
#define WK_LOSS_TILE 32 /* Rows of logits in a task. */
/* Logits of `rows` rows of the final norm's output from row `first` on into acts.logits, then losses; with `scale` other
 * than 0 the logits become gradients times it. */
void wk_head_loss(struct wk_model *model, const uint32_t *targets, uint64_t first, uint64_t rows, float scale);
DL_MUST_CHECK enum dl_rc wk_mean_loss(const struct wk_model *model, uint64_t rows, double *loss, struct dl_err *err);
void wk_forward_layers(struct wk_model *model, const uint32_t *tokens, uint32_t sequences);
DL_MUST_CHECK enum dl_rc wk_check_tokens(const struct wk_model *model, const char *what, const uint32_t *tokens,
                                         uint64_t count, struct dl_err *err);
/* Element-wise work on row tiles. */
uint32_t wk_row_tiles(uint64_t rows);
/* The rows of a tile: its first, and how many they are. */
static inline uint64_t wk_first_row(uint32_t tile)
{
    return (uint64_t)tile * WK_ROW_TILE;
}
static inline uint64_t wk_row_count(uint64_t rows, uint32_t tile)
{
    uint64_t left = rows - wk_first_row(tile);
    return left < WK_ROW_TILE ? left : WK_ROW_TILE;
}

#endif
