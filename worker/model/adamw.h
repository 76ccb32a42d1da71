/* wk_adamw: AdamW (Loshchilov and Hutter 2019) with global-norm clipping and a warm-up + cosine schedule.
 *
 * Decoupled weight decay acts on matrices only (rank >= 2, embedding included, as GPT-2, nanoGPT and Llama recipes do);
 * norms' gains are never decayed. Update, with bias-corrected moments:
 *     theta -= lr * (m_hat / (sqrt(v_hat) + epsilon) + weight_decay * theta)
 *
 * Same thread rule as the model whose pool it uses; equal bits for every thread count; no allocation in a step. */
#ifndef WK_MODEL_ADAMW_H
#define WK_MODEL_ADAMW_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/spec.h"

struct wk_adamw; /* Opaque. */
struct dl_pool;

struct wk_adamw_stats {
    double learning_rate; /* Used in this step. */
    double gradient_norm; /* L2 over all gradients, before clipping. */
    bool clipped;
};

/* `tensors`, `parameters` and `gradients` (and `pool`) are borrowed for the optimizer's life. `decay_steps`: as spec's,
 * resolved by the caller when the manifest says 0 (then 0 means: hold the rate after warm-up). Moments start at zero.
 */
DL_MUST_CHECK enum dl_rc wk_adamw_new(const struct dl_inner_spec *spec, const struct dl_tensor *tensors,
                                      uint32_t tensor_count, float *const *parameters, float *const *gradients,
                                      struct dl_pool *pool, struct wk_adamw **out, struct dl_err *err);
void wk_adamw_free(struct wk_adamw *adamw); /* NULL is fine. */

/* One update from the current gradients; counts one step. DL_EINVAL when the gradient norm is not finite: nothing is
 * changed, and the step is not counted. `stats` may be NULL. */
DL_MUST_CHECK enum dl_rc wk_adamw_step(struct wk_adamw *adamw, struct wk_adamw_stats *stats, struct dl_err *err);

/* Learning rate of step `step` (the first is 1): linear warm-up to learning_rate over warmup_steps, then half a cosine
 * down to min_learning_rate_ratio * learning_rate at decay_steps, constant from there. Pure. */
double wk_adamw_rate(const struct dl_inner_spec *spec, uint64_t step);

/* Learning rate of the steps from now on, for a caller that keeps its own place in the schedule; a negative one gives it
 * back to the count of updates. */
void wk_adamw_set_rate(struct wk_adamw *adamw, double rate);

/* State, for checkpoints and for a joining peer: arrays in the order of `tensors`, borrowed, writable between steps. */
uint64_t wk_adamw_steps(const struct wk_adamw *adamw); /* Updates done. */
void wk_adamw_set_steps(struct wk_adamw *adamw, uint64_t steps);
float *const *wk_adamw_first_moments(struct wk_adamw *adamw);
float *const *wk_adamw_second_moments(struct wk_adamw *adamw);

#endif
