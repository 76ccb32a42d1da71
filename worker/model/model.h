/* wk_model: the built-in decoder-only transformer (Llama architecture) in float32: RMSNorm, rotary positions in Hugging
 * Face's "rotate half" order, grouped-query attention, SwiGLU, tied or untied output head, no biases.
 *
 * One thread calls; inside, a pool of the model's own threads shares the work. Work is cut into tasks by shapes alone
 * and no reduction crosses tasks, so that every thread count gives the same bits. All memory is planned and allocated
 * in wk_model_new; a training step allocates nothing. Layer: worker/model, above common. */
#ifndef WK_MODEL_MODEL_H
#define WK_MODEL_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/spec.h"

#define WK_MODEL_WIDTH_MAX 65536
#define WK_MODEL_LAYERS_MAX 1024
#define WK_MODEL_HEAD_WIDTH_MAX 1024
#define WK_MODEL_VOCAB_MAX (1u << 24)
#define WK_MODEL_SEQUENCE_MAX (1u << 20)
#define WK_MODEL_BATCH_MAX 65536
#define WK_MODEL_THREADS_MAX 256

struct wk_model; /* Opaque. */
struct dl_pool;  /* common/pool.h */

struct wk_model_options {
    uint32_t batch_sequences; /* Largest batch; activations are planned for it. >= 1 */
    uint32_t threads;         /* 0: one. */
    uint64_t seed;            /* Of the initial weights: a function of (seed, tensor name) alone. */
    bool forward_only;        /* No gradients: for evaluation, sampling and export. */
};

/* Bytes that a model needs, known before anything is allocated. */
struct wk_model_memory {
    uint64_t parameters;
    uint64_t gradients;
    uint64_t moments;     /* AdamW's two, allocated by wk_adamw_new. */
    uint64_t activations; /* With all scratch memory of `threads` threads. */
    uint64_t total;
};

/* Checks the sizes (heads divide width, kv_heads divide heads, even head width, nothing zero, limits above) and
 * computes what the model will need. DL_EINVAL names the field and what is allowed. */
DL_MUST_CHECK enum dl_rc wk_model_plan(const struct dl_model_spec *spec, const struct wk_model_options *options,
                                       struct wk_model_memory *memory, struct dl_err *err);

/* Makes a model with initial weights: normal with spec->init_std (attention's and MLP's output projections scaled by
 * 1/sqrt(2 layers)), norms one. `spec` is copied. DL_EINVAL: sizes. DL_ENOMEM: more than this machine (or its control
 * group) has available; the text says how many MiB are needed and available. */
DL_MUST_CHECK enum dl_rc wk_model_new(const struct dl_model_spec *spec, const struct wk_model_options *options,
                                      struct wk_model **out, struct dl_err *err);
void wk_model_free(struct wk_model *model); /* NULL is fine. */

/* Parameters: table, arrays and gradients have the same order; all borrowed until wk_model_free. Names are Hugging
 * Face's
 * (`model.layers.0.self_attn.q_proj.weight`, ...). The caller may write parameters between steps. */
uint32_t wk_model_tensor_count(const struct wk_model *model);
const struct dl_tensor *wk_model_tensors(const struct wk_model *model);
float *const *wk_model_parameters(struct wk_model *model);
float *const *wk_model_gradients(struct wk_model *model); /* NULL when forward_only. Of the last forward_backward. */
uint64_t wk_model_elements(const struct wk_model *model); /* Parameters in all. */

const struct dl_model_spec *wk_model_spec(const struct wk_model *model);
uint32_t wk_model_batch_sequences(const struct wk_model *model);
struct dl_pool *wk_model_pool(struct wk_model *model); /* Borrowed: the optimizer shares the model's threads. */

/* Floating-point operations of one training step on `sequences` sequences (forward and backward, matrix products only,
 * causal attention counted at half), for GFLOP/s and utilisation figures. */
double wk_model_step_flops(const struct wk_model *model, uint32_t sequences);

/* One forward and backward pass over a whole batch. `tokens` and `targets`: [batch_sequences][sequence_length];
 * targets[i] is the token that follows tokens[i]. `*loss`: mean nats a token, summed in double. Gradients are of that
 * mean, overwritten. DL_EINVAL: a token is outside the vocabulary (its position is named), the model is forward_only,
 * or the loss is not finite (gradients are then worthless and must not be applied). */
DL_MUST_CHECK enum dl_rc wk_model_forward_backward(struct wk_model *model, const uint32_t *tokens,
                                                   const uint32_t *targets, double *loss, struct dl_err *err);

/* Forward only, over `sequences` <= batch_sequences sequences. Leaves gradients as they are. Errors as above. */
DL_MUST_CHECK enum dl_rc wk_model_loss(struct wk_model *model, const uint32_t *tokens, const uint32_t *targets,
                                       uint32_t sequences, double *loss, struct dl_err *err);

/* Logits of all positions of `sequences` sequences, [sequences][sequence_length][vocab_size] into the caller's
 * `logits`. */
DL_MUST_CHECK enum dl_rc wk_model_logits(struct wk_model *model, const uint32_t *tokens, uint32_t sequences,
                                         float *logits, struct dl_err *err);

/* What matrix products took since the last call, added over threads (0 unless wk_model_measure was set). Measuring costs
 * some 0.3 us a product. */
struct wk_model_products {
    uint64_t ns;            /* Processor time. */
    double multiplications; /* Masked ones too: what was computed, not what was needed. */
};
void wk_model_measure(struct wk_model *model, bool on);
struct wk_model_products wk_model_take_products(struct wk_model *model);

#endif
