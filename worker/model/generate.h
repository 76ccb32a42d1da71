/* wk_generator: next-token prediction with a cache of keys and values, for sampling text from a model.
 *
 * Reads the model's parameters at each call; one thread, not during a training step of the same model. */
#ifndef WK_MODEL_GENERATE_H
#define WK_MODEL_GENERATE_H

#include <stdint.h>

#include "common/err.h"
#include "common/rng.h"
#include "worker/model/model.h"

struct wk_generator; /* Opaque. */

struct wk_sample_options {
    double temperature; /* 0: the most likely token. */
    uint32_t top_k;     /* 0: all. */
    double top_p;       /* Smallest set of tokens with this much probability; 0 or 1: all. */
};

/* `context_max`: tokens in one conversation; 0: the model's sequence length. The model is borrowed. */
DL_MUST_CHECK enum dl_rc wk_generator_new(struct wk_model *model, uint32_t context_max, struct wk_generator **out,
                                          struct dl_err *err);
void wk_generator_free(struct wk_generator *generator);
void wk_generator_reset(struct wk_generator *generator); /* Forgets all tokens. */

/* Appends tokens; `*logits` (vocab_size, borrowed until the next call) predict the token after the last one. DL_EINVAL:
 * a token outside the vocabulary, none at all, or more than the context holds (nothing is then appended). */
DL_MUST_CHECK enum dl_rc wk_generator_feed(struct wk_generator *generator, const uint32_t *tokens, uint32_t count,
                                           const float **logits, struct dl_err *err);

/* Draws a token from the generator's last logits. A function of (options, rng state, logits). DL_EINVAL before any
 * feed. */
DL_MUST_CHECK enum dl_rc wk_generator_sample(struct wk_generator *generator, const struct wk_sample_options *options,
                                             struct dl_rng *rng, uint32_t *token, struct dl_err *err);

#endif
