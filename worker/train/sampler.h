/* The program `diloco-worker generate`: makes text from exported weights. Layer: worker/train. */
#ifndef WK_TRAIN_SAMPLER_H
#define WK_TRAIN_SAMPLER_H

#include <stdint.h>

#include "common/err.h"
#include "common/exit_codes.h"
#include "common/rng.h"
#include "worker/model/generate.h"
#include "worker/model/model.h"
#include "worker/train/args.h"

enum dl_exit wk_generate(const struct wk_args *args);

struct wk_sampler; /* Opaque. */

/* Reads `prompt` (at least one token; of a longer one than the context holds, the end counts). The model is borrowed.
 * Once the context is full, its older half is forgotten and the rest read again. */
DL_MUST_CHECK enum dl_rc wk_sampler_new(struct wk_model *model, const struct wk_sample_options *options, uint64_t seed,
                                        const uint32_t *prompt, uint32_t prompt_tokens, struct wk_sampler **out,
                                        struct dl_err *err);
void wk_sampler_free(struct wk_sampler *sampler); /* NULL is fine. */

/* The next token: a function of (weights, options, seed, prompt, tokens so far). */
DL_MUST_CHECK enum dl_rc wk_sampler_next(struct wk_sampler *sampler, uint32_t *token, struct dl_err *err);

#endif
