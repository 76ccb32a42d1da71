#include "worker/train/sampler.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "common/mem.h"
#include "worker/model/export.h"
#include "worker/train/session.h"

#define BYTES 256
#define PROMPT_TOKENS_MAX (1u << 20)

struct wk_sampler {
    struct wk_generator *generator;
    struct wk_sample_options options;
    struct dl_rng rng;
    uint32_t *window; /* The tokens that the generator has read, and the last one, which it has not. */
    uint32_t count, context;
};

static enum dl_rc feed(struct wk_sampler *sampler, uint32_t from, struct dl_err *err)
{
    const float *logits;
    return wk_generator_feed(sampler->generator, sampler->window + from, sampler->count - from, &logits, err);
}

enum dl_rc wk_sampler_new(struct wk_model *model, const struct wk_sample_options *options, uint64_t seed,
                          const uint32_t *prompt, uint32_t prompt_tokens, struct wk_sampler **out, struct dl_err *err)
{
    uint32_t context = wk_model_spec(model)->sequence_length;
    struct wk_sampler *sampler = calloc(1, sizeof *sampler);
    uint32_t *window = calloc(context, sizeof *window);
    if (sampler == NULL || window == NULL) {
        free(sampler);
        free(window);
        return dl_err_set(err, DL_ENOMEM, "no memory for a sampler of %u tokens", context);
    }
    /* Room for at least half a context of new text before anything is read again. */
    uint32_t count = DL_MIN(prompt_tokens, DL_MAX(context / 2, 1u));
    if (count > 0) {
        memcpy(window, prompt + (prompt_tokens - count), count * sizeof *window);
    }
    *sampler = (struct wk_sampler){.options = *options, .window = window, .count = count, .context = context};
    dl_rng_init(&sampler->rng, seed, dl_rng_stream("sample", 0, 0));
    enum dl_rc rc = wk_generator_new(model, context, &sampler->generator, err);
    if (rc == DL_OK) {
        rc = feed(sampler, 0, err);
    }
    if (rc != DL_OK) {
        wk_sampler_free(sampler);
        return rc;
    }
    *out = sampler;
    return DL_OK;
}

void wk_sampler_free(struct wk_sampler *sampler)
{
    if (sampler != NULL) {
        wk_generator_free(sampler->generator);
        free(sampler->window);
        free(sampler);
    }
}

enum dl_rc wk_sampler_next(struct wk_sampler *sampler, uint32_t *token, struct dl_err *err)
{
    uint32_t drawn;
    enum dl_rc rc = wk_generator_sample(sampler->generator, &sampler->options, &sampler->rng, &drawn, err);
    if (rc != DL_OK) {
        return rc;
    }
    uint32_t from = sampler->count;
    if (sampler->count == sampler->context) {
        uint32_t keep = sampler->context / 2;
        memmove(sampler->window, sampler->window + (sampler->count - keep), keep * sizeof *sampler->window);
        sampler->count = keep;
        from = 0;
        wk_generator_reset(sampler->generator);
    }
    sampler->window[sampler->count++] = drawn;
    rc = feed(sampler, from, err);
    if (rc == DL_OK) {
        *token = drawn;
    }
    return rc;
}

/* --- program --- */

/* A prompt as tokens: bytes, or numbers where the vocabulary is another one. Caller frees. */
static enum dl_rc read_prompt(const char *text, uint32_t vocab_size, uint32_t **out, uint32_t *count,
                              struct dl_err *err)
{
    size_t length = strlen(text);
    if (length > PROMPT_TOKENS_MAX) {
        return dl_err_set(err, DL_EINVAL, "--prompt: at most %u bytes", PROMPT_TOKENS_MAX);
    }
    DL_AUTO_FREE uint32_t *tokens = calloc(length + 1, sizeof *tokens);
    if (tokens == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the prompt");
    }
    uint32_t used = 0;
    for (const char *at = text; *at != 0;) {
        unsigned long value = (unsigned char)*at++;
        if (vocab_size > BYTES) {
            if (isspace((int)value) || value == ',') {
                continue;
            }
            char *end;
            errno = 0;
            value = strtoul(at - 1, &end, 10);
            if (end == at - 1 || errno != 0) {
                value = vocab_size;
            }
            at = DL_MAX((const char *)end, at);
        }
        if (value >= vocab_size) {
            return dl_err_set(err, DL_EINVAL,
                              "--prompt: the model's vocabulary has %u tokens; %s from 0 to %u, near '%.20s'",
                              vocab_size, vocab_size > BYTES ? "give their numbers, separated by spaces," : "use bytes",
                              vocab_size - 1, at - 1);
        }
        tokens[used++] = (uint32_t)value;
    }
    if (used == 0) {
        tokens[used++] = vocab_size > '\n' ? '\n' : 0;
    }
    *out = dl_take(tokens);
    *count = used;
    return DL_OK;
}

static enum dl_rc print(struct wk_sampler *sampler, uint32_t tokens, bool as_bytes, struct dl_err *err)
{
    for (uint32_t i = 0; i < tokens; i++) {
        uint32_t token;
        enum dl_rc rc = wk_sampler_next(sampler, &token, err);
        if (rc != DL_OK) {
            return rc;
        }
        bool ok = as_bytes ? putchar((int)token) != EOF : printf(" %u", token) > 0;
        if (!ok || (i % 64 == 0 && fflush(stdout) != 0)) {
            return dl_err_errno(err, DL_EIO, errno, "cannot write the text");
        }
    }
    putchar('\n');
    return fflush(stdout) == 0 ? DL_OK : dl_err_errno(err, DL_EIO, errno, "cannot write the text");
}

static enum dl_rc generate(const struct wk_args *args, struct wk_model **model, struct wk_sampler **sampler,
                           struct dl_err *err)
{
    struct dl_model_spec spec;
    enum dl_rc rc = wk_model_import_spec(args->weights, &spec, err);
    if (rc != DL_OK) {
        return rc;
    }
    DL_AUTO_FREE uint32_t *prompt = NULL;
    uint32_t prompt_tokens = 0;
    rc = read_prompt(args->prompt, spec.vocab_size, &prompt, &prompt_tokens, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_model_options options = {
        .batch_sequences = 1, .threads = DL_MAX(args->threads, 1u), .forward_only = true};
    rc = wk_model_new(&spec, &options, model, err);
    if (rc == DL_OK) {
        rc = wk_model_import(*model, args->weights, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    struct wk_sample_options sampling = {.temperature = args->temperature, .top_k = args->top_k, .top_p = args->top_p};
    rc = wk_sampler_new(*model, &sampling, args->seed, prompt, prompt_tokens, sampler, err);
    if (rc != DL_OK) {
        return rc;
    }
    assert(*sampler != NULL);
    fputs(args->prompt, stdout);
    return print(*sampler, args->tokens, spec.vocab_size <= BYTES, err);
}

enum dl_exit wk_generate(const struct wk_args *args)
{
    struct wk_model *model = NULL;
    struct wk_sampler *sampler = NULL;
    struct dl_err err;
    dl_log_init("-", "generate", args->log_level);
    enum dl_rc rc = generate(args, &model, &sampler, &err);
    if (rc != DL_OK) {
        dl_error("generate failed: %s", err.text);
    }
    wk_sampler_free(sampler);
    wk_model_free(model);
    return wk_exit_of_rc(rc);
}
