/* The trainer's model: against a naive reference in double, finite differences; what it refuses; how it begins. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "tests/unit/model_reference.h"
#include "tests/unit/model_rig.h"
#include "worker/model/attention.h"
#include "worker/model/model.h"
#include "worker/model/model_internal.h"

static struct reference make_reference(struct wk_model *model)
{
    uint32_t count = wk_model_tensor_count(model);
    double **values = calloc(count, sizeof *values);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t elements = dl_tensor_elements(&wk_model_tensors(model)[i]);
        values[i] = calloc(elements, sizeof **values);
        for (uint64_t j = 0; j < elements; j++) {
            values[i][j] = (double)wk_model_parameters(model)[i][j];
        }
    }
    return (struct reference){
        .spec = wk_model_spec(model), .tensors = wk_model_tensors(model), .values = values, .tensor_count = count};
}

static void release_reference(struct reference *reference)
{
    for (uint32_t i = 0; i < reference->tensor_count; i++) {
        free(reference->values[i]);
    }
    free((void *)(uintptr_t)reference->values);
}

/* Largest error of a tensor's gradient against central differences of the reference, relative to the tensor's largest.
 */
static double gradient_error(struct wk_model *model, const struct reference *reference, uint32_t tensor,
                             const uint32_t *tokens, const uint32_t *targets, uint32_t samples)
{
    uint64_t elements = dl_tensor_elements(&reference->tensors[tensor]);
    uint64_t stride = elements > samples ? elements / samples | 1 : 1; /* Odd, to reach every row and column. */
    uint32_t sequences = wk_model_batch_sequences(model);
    double worst = 0, largest = 0;
    for (uint64_t j = 0; j < elements; j += stride) {
        double *value = &reference->values[tensor][j], kept = *value;
        const double h = 1e-5;
        *value = kept + h;
        double above = reference_loss(reference, tokens, targets, sequences);
        *value = kept - h;
        double below = reference_loss(reference, tokens, targets, sequences);
        *value = kept;
        double expected = (above - below) / (2 * h);
        double got = (double)wk_model_gradients(model)[tensor][j];
        worst = fmax(worst, fabs(got - expected));
        largest = fmax(largest, fabs(expected));
    }
    CU_ASSERT(largest > 1e-6); /* A tensor that nothing depends on would pass anything. */
    return worst / largest;
}

static void check_gradients(const struct dl_model_spec *spec, uint32_t batch, uint32_t samples, double tolerance)
{
    struct wk_model *model = make_model(spec, batch, 2);
    uint64_t count = (uint64_t)batch * spec->sequence_length;
    DL_AUTO_FREE uint32_t *tokens = calloc(count, sizeof *tokens);
    DL_AUTO_FREE uint32_t *targets = calloc(count, sizeof *targets);
    vary_norms(model);
    draw_tokens(spec, 1, count, tokens);
    draw_tokens(spec, 2, count, targets);
    struct reference reference = make_reference(model);
    struct dl_err err;
    double loss = 0, forward_loss = 0, expected = reference_loss(&reference, tokens, targets, batch);
    CU_ASSERT_EQUAL_FATAL(wk_model_forward_backward(model, tokens, targets, &loss, &err), DL_OK);
    CU_ASSERT(fabs(loss - expected) < 2e-6 * expected);
    CU_ASSERT_EQUAL(wk_model_loss(model, tokens, targets, batch, &forward_loss, &err), DL_OK);
    CU_ASSERT(loss == forward_loss);
    for (uint32_t i = 0; i < wk_model_tensor_count(model); i++) {
        double error = gradient_error(model, &reference, i, tokens, targets, samples);
        CU_ASSERT(error < tolerance);
        if (!(error < tolerance)) {
            fprintf(stderr, "kv_heads %u tied %d %s: error %g\n", spec->kv_heads, spec->tied_embeddings,
                    reference.tensors[i].name, error);
        }
    }
    CU_ASSERT_EQUAL(wk_model_broken_guards(model), 0);
    release_reference(&reference);
    wk_model_free(model);
}

static void test_gradients(void)
{
    static const struct {
        uint32_t kv_heads;
        bool tied;
    } forms[] = {{4, true}, {4, false}, {2, true}, {1, false}};
    for (size_t i = 0; i < DL_COUNT_OF(forms); i++) {
        struct dl_model_spec spec = small_spec(forms[i].kv_heads, forms[i].tied);
        check_gradients(&spec, 2, 37, 2e-5);
    }
}

/* More keys than one block holds, a length that no block divides, and more rows than one block of logits. */
static void test_gradients_over_blocks(void)
{
    struct dl_model_spec spec = small_spec(1, true);
    spec.layers = 1;
    spec.width = 12;
    spec.heads = 2;
    spec.ffn_width = 10;
    spec.sequence_length = 577;
    check_gradients(&spec, 1, 5, 1e-4);
}

/* Attention alone, forward, over 1, 63, 64, 65, 512, 513, 1200 and 4224 tokens, with the scratch memory that a thread has. */
static void test_long_attention(void)
{
    static const uint32_t lengths[] = {1, 63, 64, 65, 512, 513, 1200, 4224};
    enum { heads = 4, kv_heads = 2, w = 6, stride = (heads + 2 * kv_heads) * w, longest = 4224 };
    struct dl_model_spec spec = small_spec(kv_heads, true);
    DL_AUTO_FREE float *cosine = calloc(longest * w / 2, sizeof *cosine), *sine = calloc(longest * w / 2, sizeof *sine);
    DL_AUTO_FREE float *qkv = calloc((size_t)longest * stride, sizeof *qkv);
    DL_AUTO_FREE float *out = calloc((size_t)longest * heads * w, sizeof *out);
    DL_AUTO_FREE float *lse = calloc((size_t)longest * heads, sizeof *lse);
    DL_AUTO_FREE float *scratch = calloc(wk_attention_scratch(w, longest), sizeof *scratch);
    DL_AUTO_FREE double *q = calloc((size_t)longest * heads * w, sizeof *q),
                        *k = calloc((size_t)longest * kv_heads * w, sizeof *k);
    DL_AUTO_FREE double *v = calloc((size_t)longest * kv_heads * w, sizeof *v),
                        *expected = calloc((size_t)longest * heads * w, sizeof *expected);
    struct wk_meter meter = {0};
    wk_fill_rotary(&spec, longest, cosine, sine);
    for (size_t t = 0; t < DL_COUNT_OF(lengths); t++) {
        uint32_t length = lengths[t];
        struct dl_rng rng;
        dl_rng_init(&rng, length, 0);
        for (uint32_t r = 0; r < length; r++) {
            float *row = qkv + (size_t)r * stride;
            for (uint32_t i = 0; i < stride; i++) {
                row[i] = 3 * dl_rng_normal(&rng);
                double *into = i < heads * w                ? &q[r * heads * w + i]
                               : i < (heads + kv_heads) * w ? &k[r * kv_heads * w + i - heads * w]
                                                            : &v[r * kv_heads * w + i - (heads + kv_heads) * w];
                *into = (double)row[i];
            }
        }
        reference_rotate(q, heads, w, length, spec.rope_theta);
        reference_rotate(k, kv_heads, w, length, spec.rope_theta);
        reference_attention(q, k, v, length, heads, kv_heads, w, expected);
        struct wk_attention_shape shape = {heads, kv_heads, w, length, cosine, sine};
        for (uint32_t group = 0; group < kv_heads; group++) {
            wk_attention_forward(&shape, group, qkv, out, lse, scratch, &meter, 0);
        }
        double worst = 0;
        for (uint32_t i = 0; i < length * heads * w; i++) {
            worst = fmax(worst, fabs((double)out[i] - expected[i]));
        }
        CU_ASSERT(worst < 5e-5); /* Scores reach 50, where a float32 rounding is 4e-6 before the exponential. */
    }
}

/* The square of scores is never held: twice the context takes at most twice the activations and scratch memory, at lengths
 * where a single head's square would be many times as large as all of them. */
static void test_long_context_memory(void)
{
    struct dl_model_spec spec = small_spec(4, true);
    struct wk_model_memory short_one, long_one;
    struct wk_model_options options = {.batch_sequences = 1, .threads = 4};
    struct dl_err err;
    spec.sequence_length = 1 << 16;
    CU_ASSERT_EQUAL(wk_model_plan(&spec, &options, &short_one, &err), DL_OK);
    spec.sequence_length = 1 << 17;
    CU_ASSERT_EQUAL(wk_model_plan(&spec, &options, &long_one, &err), DL_OK);
    CU_ASSERT(long_one.activations <= 2 * short_one.activations);
    uint64_t square = (UINT64_C(1) << 34) * sizeof(float);
    CU_ASSERT(long_one.activations < square / 50);
}

/* A whole training step over 4,160 tokens of context: what it writes stays within what was planned, the loss is that of
 * the reference, and gradients are those of a model that sees the same numbers on two threads. */
static void test_long_context_step(void)
{
    struct dl_model_spec spec = small_spec(1, true);
    spec.layers = 1;
    spec.width = 4;
    spec.heads = 1;
    spec.ffn_width = 10;
    spec.sequence_length = 4160;
    struct wk_model *one = make_model(&spec, 1, 1), *two = make_model(&spec, 1, 2);
    DL_AUTO_FREE uint32_t *tokens = calloc(spec.sequence_length, sizeof *tokens);
    DL_AUTO_FREE uint32_t *targets = calloc(spec.sequence_length, sizeof *targets);
    draw_tokens(&spec, 1, spec.sequence_length, tokens);
    draw_tokens(&spec, 2, spec.sequence_length, targets);
    struct reference reference = make_reference(one);
    double loss = 0, other = 0, expected = reference_loss(&reference, tokens, targets, 1);
    struct dl_err err;
    CU_ASSERT_EQUAL(wk_model_forward_backward(one, tokens, targets, &loss, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_model_forward_backward(two, tokens, targets, &other, &err), DL_OK);
    CU_ASSERT(fabs(loss - expected) < 2e-6 * expected && loss == other);
    for (uint32_t i = 0; i < wk_model_tensor_count(one); i++) {
        size_t bytes = dl_tensor_elements(&wk_model_tensors(one)[i]) * sizeof(float);
        CU_ASSERT(unit_same_bits(wk_model_gradients(one)[i], wk_model_gradients(two)[i], bytes));
    }
    CU_ASSERT(gradient_error(one, &reference, 2, tokens, targets, 1) < 1e-4); /* Of queries. */
    CU_ASSERT_EQUAL(wk_model_broken_guards(one), 0);
    CU_ASSERT_EQUAL(wk_model_broken_guards(two), 0);
    release_reference(&reference);
    wk_model_free(one);
    wk_model_free(two);
}

static void test_refusals(void)
{
    struct dl_err err;
    struct wk_model *model = NULL;
    struct wk_model_options options = {.batch_sequences = 1, .threads = 1};
    struct dl_model_spec spec = small_spec(2, true);
    spec.heads = 5;
    CU_ASSERT_EQUAL(wk_model_new(&spec, &options, &model, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "heads (5)") != NULL);
    spec = small_spec(3, true);
    CU_ASSERT_EQUAL(wk_model_new(&spec, &options, &model, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "kv_heads (3)") != NULL);
    spec = small_spec(2, true);
    spec.heads = 24, spec.kv_heads = 24;
    CU_ASSERT_EQUAL(wk_model_new(&spec, &options, &model, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "even") != NULL);
    spec = small_spec(2, true);
    spec.vocab_size = 0;
    CU_ASSERT_EQUAL(wk_model_new(&spec, &options, &model, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "vocab_size is 0") != NULL);
    spec = small_spec(2, false);
    spec.width = 16384, spec.heads = 128, spec.kv_heads = 128, spec.ffn_width = 65536, spec.layers = 1000;
    CU_ASSERT_EQUAL(wk_model_new(&spec, &options, &model, &err), DL_ENOMEM);
    CU_ASSERT(strstr(err.text, "MiB are available") != NULL);
    CU_ASSERT_PTR_NULL(model);
}

static void test_bad_input(void)
{
    struct dl_model_spec spec = small_spec(2, true);
    struct wk_model *model = make_model(&spec, 2, 1);
    uint32_t tokens[22] = {0}, targets[22] = {0};
    struct dl_err err;
    double loss = -1;
    tokens[12] = 19;
    CU_ASSERT_EQUAL(wk_model_forward_backward(model, tokens, targets, &loss, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "token 19 at sequence 1, position 1") != NULL);
    tokens[12] = 0;
    targets[0] = 1000;
    CU_ASSERT_EQUAL(wk_model_loss(model, tokens, targets, 1, &loss, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "target 1000") != NULL);
    targets[0] = 0;
    CU_ASSERT_EQUAL(wk_model_loss(model, tokens, targets, 3, &loss, &err), DL_EINVAL);
    wk_model_parameters(model)[2][0] = NAN;
    CU_ASSERT_EQUAL(wk_model_forward_backward(model, tokens, targets, &loss, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "not finite") != NULL);
    CU_ASSERT_EQUAL(loss, -1);
    wk_model_free(model);
}

/* A model for forward passes alone keeps one layer's activations, and says the same. */
static void test_forward_only(void)
{
    struct dl_model_spec spec = middle_spec();
    struct wk_model_options options = {.batch_sequences = 2, .threads = 2, .seed = 3, .forward_only = true};
    struct wk_model_options training = options;
    training.forward_only = false;
    struct wk_model_memory small, large;
    struct dl_err err;
    CU_ASSERT_EQUAL(wk_model_plan(&spec, &options, &small, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_model_plan(&spec, &training, &large, &err), DL_OK);
    CU_ASSERT(small.gradients == 0 && small.moments == 0 && small.activations < large.activations);
    CU_ASSERT_EQUAL(large.total, large.parameters + large.gradients + large.moments + large.activations);
    struct wk_model *model = NULL, *other = make_model(&spec, 2, 2);
    CU_ASSERT_EQUAL_FATAL(wk_model_new(&spec, &options, &model, &err), DL_OK);
    uint32_t tokens[140], targets[140];
    draw_tokens(&spec, 1, 140, tokens);
    draw_tokens(&spec, 2, 140, targets);
    double a = 1, b = 2;
    CU_ASSERT_EQUAL(wk_model_loss(model, tokens, targets, 2, &a, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_model_forward_backward(other, tokens, targets, &b, &err), DL_OK);
    CU_ASSERT(a == b);
    CU_ASSERT_PTR_NULL(wk_model_gradients(model));
    CU_ASSERT_EQUAL(wk_model_forward_backward(model, tokens, targets, &b, &err), DL_EINVAL);
    CU_ASSERT_EQUAL(wk_model_broken_guards(model), 0);
    wk_model_free(model);
    wk_model_free(other);
}

/* Initial weights depend on seed and name alone: not on threads, batch, or the other tensors. */
static void test_initial_weights(void)
{
    struct dl_model_spec spec = small_spec(2, false), deeper = spec;
    deeper.layers = 3;
    struct wk_model *a = make_model(&spec, 1, 1), *b = make_model(&spec, 3, 3), *c = make_model(&deeper, 1, 2);
    for (uint32_t i = 0; i < wk_model_tensor_count(a); i++) {
        size_t bytes = dl_tensor_elements(&wk_model_tensors(a)[i]) * sizeof(float);
        CU_ASSERT(unit_same_bits(wk_model_parameters(a)[i], wk_model_parameters(b)[i], bytes));
    }
    CU_ASSERT_STRING_EQUAL(wk_model_tensors(c)[2].name, "model.layers.0.self_attn.q_proj.weight");
    double squares = 0;
    for (int i = 0; i < 24 * 24; i++) {
        CU_ASSERT(wk_model_parameters(a)[2][i] == wk_model_parameters(c)[2][i]);
        squares += (double)wk_model_parameters(a)[2][i] * (double)wk_model_parameters(a)[2][i];
    }
    CU_ASSERT(fabs(sqrt(squares / (24 * 24)) - 0.3) < 0.03);
    CU_ASSERT_EQUAL(wk_model_tensors(a)[0].role, DL_TENSOR_EMBEDDING);
    CU_ASSERT_STRING_EQUAL(wk_model_tensors(a)[wk_model_tensor_count(a) - 1].name, "lm_head.weight");
    CU_ASSERT_EQUAL(wk_model_tensors(a)[wk_model_tensor_count(a) - 1].layer, 3);
    wk_model_free(a);
    wk_model_free(b);
    wk_model_free(c);
}

MODEL_MAIN("model", {"gradients against finite differences", test_gradients},
           {"gradients over blocks", test_gradients_over_blocks}, {"long attention", test_long_attention},
           {"memory of a long context", test_long_context_memory},
           {"a step over a long context", test_long_context_step}, {"refusals", test_refusals},
           {"bad input", test_bad_input}, {"forward only", test_forward_only},
           {"initial weights", test_initial_weights})
