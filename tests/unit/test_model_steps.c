/* Steps of training: equal bits over threads, a loss that falls, no allocation. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "common/mem.h"
#include "tests/unit/model_rig.h"
#include "worker/model/adamw.h"
#include "worker/model/model_internal.h"

static struct dl_inner_spec inner_spec(void)
{
    return (struct dl_inner_spec){.learning_rate = 3e-3,
                                  .min_learning_rate_ratio = 0.1,
                                  .warmup_steps = 2,
                                  .decay_steps = 100,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .epsilon = 1e-8,
                                  .weight_decay = 0.1,
                                  .clip_norm = 1};
}

static struct wk_adamw *make_adamw(struct wk_model *model)
{
    struct dl_inner_spec spec = inner_spec();
    struct dl_err err;
    struct wk_adamw *adamw = NULL;
    CU_ASSERT_EQUAL_FATAL(wk_adamw_new(&spec, wk_model_tensors(model), wk_model_tensor_count(model),
                                       wk_model_parameters(model), wk_model_gradients(model), wk_model_pool(model),
                                       &adamw, &err),
                          DL_OK);
    return adamw;
}

enum { middle_batch = 5, middle_tokens = middle_batch * 70 };

/* Trains `steps` steps on one batch with `threads` threads; the caller frees the model. */
static struct wk_model *train_some(uint32_t threads, uint32_t steps, double *first, double *last)
{
    struct dl_model_spec spec = middle_spec();
    struct wk_model *model = make_model(&spec, middle_batch, threads);
    struct wk_adamw *adamw = make_adamw(model);
    static uint32_t tokens[middle_tokens], targets[middle_tokens];
    draw_tokens(&spec, 1, middle_tokens, tokens);
    draw_tokens(&spec, 2, middle_tokens, targets);
    struct dl_err err;
    for (uint32_t i = 0; i < steps; i++) {
        CU_ASSERT_EQUAL_FATAL(wk_model_forward_backward(model, tokens, targets, i == 0 ? first : last, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(wk_adamw_step(adamw, NULL, &err), DL_OK);
    }
    CU_ASSERT_EQUAL(wk_model_broken_guards(model), 0);
    wk_adamw_free(adamw);
    return model;
}

static void test_equal_bits_over_threads(void)
{
    double first = 0, last = 0;
    struct wk_model *one = train_some(1, 3, &first, &last);
    for (uint32_t threads = 1; threads <= 4; threads++) {
        double other_first = 0, other_last = 0;
        struct wk_model *other = train_some(threads, 3, &other_first, &other_last);
        CU_ASSERT(first == other_first && last == other_last);
        for (uint32_t i = 0; i < wk_model_tensor_count(one); i++) {
            size_t bytes = dl_tensor_elements(&wk_model_tensors(one)[i]) * sizeof(float);
            CU_ASSERT(unit_same_bits(wk_model_parameters(one)[i], wk_model_parameters(other)[i], bytes));
            CU_ASSERT(unit_same_bits(wk_model_gradients(one)[i], wk_model_gradients(other)[i], bytes));
        }
        wk_model_free(other);
    }
    wk_model_free(one);
}

static void test_training_lowers_the_loss(void)
{
    double first = 0, last = 0;
    struct wk_model *model = train_some(2, 40, &first, &last);
    CU_ASSERT(fabs(first - log(300)) < 0.5);
    CU_ASSERT(last < 0.6 * first);
    wk_model_free(model);
}

/* --- no allocation in a step: the program's own malloc counts. Sanitizers bring theirs. --- */

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define COUNTS_ALLOCATIONS 1
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t count, size_t size);
extern void *__libc_realloc(void *memory, size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
static atomic_uint allocations;

void *malloc(size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(size);
}

void *calloc(size_t count, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, size);
}

void *realloc(void *memory, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(memory, size);
}

void *aligned_alloc(size_t alignment, size_t size)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_memalign(alignment, size);
}
#endif

static void test_no_allocation_in_a_step(void)
{
#ifdef COUNTS_ALLOCATIONS
    struct dl_model_spec spec = middle_spec();
    unsigned before = atomic_load(&allocations);
    struct wk_model *model = make_model(&spec, middle_batch, 3);
    struct wk_adamw *adamw = make_adamw(model);
    CU_ASSERT(atomic_load(&allocations) > before + 10); /* The counter works. */
    static uint32_t tokens[middle_tokens], targets[middle_tokens];
    draw_tokens(&spec, 1, middle_tokens, tokens);
    draw_tokens(&spec, 2, middle_tokens, targets);
    struct dl_err err;
    double loss;
    for (int step = 0; step < 3; step++) {
        before = atomic_load(&allocations);
        enum dl_rc rc = wk_model_forward_backward(model, tokens, targets, &loss, &err);
        enum dl_rc step_rc = wk_adamw_step(adamw, NULL, &err);
        enum dl_rc loss_rc = wk_model_loss(model, tokens, targets, 2, &loss, &err);
        unsigned after = atomic_load(&allocations);
        CU_ASSERT(rc == DL_OK && step_rc == DL_OK && loss_rc == DL_OK);
        CU_ASSERT_EQUAL(before, after);
    }
    wk_adamw_free(adamw);
    wk_model_free(model);
#else
    printf("not under this sanitizer, which brings its own malloc ");
#endif
}

MODEL_MAIN("model: steps", {"equal bits over threads", test_equal_bits_over_threads},
           {"training lowers the loss", test_training_lowers_the_loss},
           {"no allocation in a step", test_no_allocation_in_a_step})
