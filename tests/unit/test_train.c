/* Trainer, schedule, validation, sampling and the command line of diloco-worker, without any network. */
#include <getopt.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"
#include "tests/unit/unit.h"
#include "worker/model/adamw.h"
#include "worker/train/args.h"
#include "worker/train/evaluator.h"
#include "worker/train/sampler.h"
#include "worker/train/schedule.h"
#include "worker/train/session.h"
#include "worker/train/trainer.h"

#define STEPS 250

static char text_path[] = "/tmp/test-train-XXXXXX";

/* Words in a seeded order: little to learn, so that a tiny model learns it soon. */
static void write_text(void)
{
    static const char *const words[] = {"the ", "learner ", "sends ", "a ", "fragment ", "and ", "trains ", "on.\n"};
    memcpy(text_path, "/tmp/test-train-XXXXXX", sizeof text_path);
    int fd = mkstemp(text_path);
    CU_ASSERT_FATAL(fd >= 0);
    FILE *file = fdopen(fd, "w");
    struct dl_rng rng;
    dl_rng_init(&rng, 1, 1);
    for (int i = 0; i < 6000; i++) {
        fputs(words[dl_rng_below(&rng, DL_COUNT_OF(words))], file);
    }
    CU_ASSERT_EQUAL_FATAL(fclose(file), 0);
}

static struct dl_spec *make_spec(void)
{
    char json[1024];
    struct dl_spec *spec = NULL;
    struct dl_err err;
    write_text();
    int size = snprintf(
        json, sizeof json,
        "{\"apiVersion\":\"diloco.dev/v1alpha1\",\"kind\":\"DecoupledDiLoCoJob\",\"metadata\":{\"name\":\"t\"},"
        "\"spec\":{\"training\":{\"tokenBudget\":%d,\"seed\":3,\"batchSequences\":4,"
        "\"model\":{\"width\":32,\"layers\":1,\"heads\":2,\"sequenceLength\":32},"
        "\"data\":{\"paths\":[\"%s\"],\"validationFraction\":0.1,\"validationSequences\":10},"
        "\"innerOptimizer\":{\"learningRate\":0.01,\"warmupSteps\":10}},"
        "\"learners\":{\"max\":4,\"replicas\":2}}}",
        2 * STEPS * 128, text_path);
    CU_ASSERT_EQUAL_FATAL(dl_spec_parse(json, (size_t)size, "test", &spec, NULL, &err), DL_OK);
    return spec;
}

static void drop_spec(struct dl_spec *spec)
{
    dl_spec_free(spec);
    unlink(text_path);
}

static double validation(struct wk_trainer *trainer)
{
    uint32_t tokens[4 * 32], targets[4 * 32];
    double loss = NAN;
    struct dl_err err;
    CU_ASSERT_EQUAL(
        wk_validation_loss(wk_trainer_model(trainer), wk_trainer_dataset(trainer), tokens, targets, NULL, &loss, &err),
        DL_OK);
    return loss;
}

static struct wk_trainer *start(const struct dl_spec *spec, uint32_t threads)
{
    struct wk_trainer *trainer = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(wk_trainer_new(spec, threads, &trainer, &err), DL_OK);
    wk_trainer_start(trainer, 0);
    return trainer;
}

/* A batch that begins at this position, in two parts. */
static void feed(struct wk_trainer *trainer, uint64_t position)
{
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(wk_trainer_lacks(trainer), 4);
    CU_ASSERT_EQUAL_FATAL(wk_trainer_feed(trainer, position, 3, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(wk_trainer_lacks(trainer), 1);
    CU_ASSERT_EQUAL_FATAL(wk_trainer_feed(trainer, position + 3, 1, &err), DL_OK);
}

static enum dl_rc step_at(struct wk_trainer *trainer, uint64_t position, struct wk_trainer_step *step,
                          struct dl_err *err)
{
    feed(trainer, position);
    return wk_trainer_step(trainer, step, err);
}

static void run(struct wk_trainer *trainer, uint64_t position, uint32_t steps, double losses[])
{
    for (uint32_t i = 0; i < steps; i++) {
        struct wk_trainer_step step;
        struct dl_err err;
        feed(trainer, position + 4 * i);
        CU_ASSERT_EQUAL_FATAL(wk_trainer_step(trainer, &step, &err), DL_OK);
        CU_ASSERT_FALSE(step.skipped);
        CU_ASSERT_EQUAL(step.tokens, 128);
        losses[i] = step.loss;
    }
}

static uint64_t difference(struct wk_trainer *a, struct wk_trainer *b)
{
    uint64_t different = 0;
    struct wk_model *x = wk_trainer_model(a), *y = wk_trainer_model(b);
    for (uint32_t i = 0; i < wk_model_tensor_count(x); i++) {
        uint64_t elements = dl_tensor_elements(&wk_model_tensors(x)[i]);
        different +=
            memcmp(wk_model_parameters(x)[i], wk_model_parameters(y)[i], elements * sizeof(float)) != 0 ? 1 : 0;
    }
    return different;
}

static void test_learns(void)
{
    struct dl_spec *spec = make_spec();
    struct wk_trainer *trainer = start(spec, 1);
    double losses[STEPS];
    double before = validation(trainer);
    run(trainer, 0, STEPS, losses);
    double after = validation(trainer);
    /* Untrained, all bytes are alike: ln 256 = 5.545. Words of seven letters in random order carry under half a nat
     * each. */
    CU_ASSERT(fabs(before - 5.545) < 0.1);
    CU_ASSERT(fabs(losses[0] - 5.545) < 0.1);
    CU_ASSERT(after < 0.8);
    CU_ASSERT_EQUAL(wk_trainer_place(trainer), STEPS);
    wk_trainer_free(trainer);
    drop_spec(spec);
}

static void test_same_bits(void)
{
    struct dl_spec *spec = make_spec();
    struct wk_trainer *one = start(spec, 1), *two = start(spec, 2), *other = start(spec, 1);
    double losses[3][15];
    run(one, 100, 15, losses[0]);
    run(two, 100, 15, losses[1]);
    run(other, 200, 15, losses[2]);
    for (int i = 0; i < 15; i++) {
        CU_ASSERT(losses[0][i] == losses[1][i]); /* Bit for bit: neither is NaN. */
    }
    CU_ASSERT_EQUAL(difference(one, two), 0);
    CU_ASSERT(difference(one, other) > 0); /* Other data, from the same first weights. */
    wk_trainer_free(one);
    wk_trainer_free(two);
    wk_trainer_free(other);
    drop_spec(spec);
}

/* A joiner goes on where the ensemble is with its rate. */
static void test_late_joiner(void)
{
    struct dl_spec *spec = make_spec();
    struct wk_trainer *trainer = NULL;
    struct dl_err err;
    struct wk_trainer_step step;
    CU_ASSERT_EQUAL_FATAL(wk_trainer_new(spec, 1, &trainer, &err), DL_OK);
    wk_trainer_start(trainer, 60 * 2 * 128);
    CU_ASSERT_EQUAL(wk_trainer_place(trainer), 60);
    CU_ASSERT_EQUAL(step_at(trainer, 0, &step, &err), DL_OK);
    CU_ASSERT_DOUBLE_EQUAL(step.learning_rate, 0.01 / WK_SCHEDULE_RAMP_STEPS, 1e-9);
    for (uint32_t i = 1; i < WK_SCHEDULE_RAMP_STEPS; i++) {
        CU_ASSERT_EQUAL(step_at(trainer, 0, &step, &err), DL_OK);
    }
    struct wk_schedule schedule;
    wk_schedule_init(&schedule, &spec->training, 2);
    CU_ASSERT_EQUAL(step.learning_rate, wk_adamw_rate(&schedule.inner, 60 + WK_SCHEDULE_RAMP_STEPS));
    wk_trainer_free(trainer);
    drop_spec(spec);
}

static void test_schedule(void)
{
    struct dl_training_spec training = {
        .token_budget = 1000 * 64, .batch_sequences = 2, .model = {.sequence_length = 8}};
    training.inner = (struct dl_inner_spec){.learning_rate = 1, .min_learning_rate_ratio = 0.1, .warmup_steps = 100};
    struct wk_schedule s;
    wk_schedule_init(&s, &training, 4);
    CU_ASSERT_EQUAL(s.inner.decay_steps, 1000);
    for (int i = 0; i < 50; i++) {
        (void)wk_schedule_next(&s);
    }
    /* At its own pace it agrees with what is heard. */
    CU_ASSERT_FALSE(wk_schedule_hear(&s, 50 * 64));
    CU_ASSERT_FALSE(wk_schedule_hear(&s, (50 + WK_SCHEDULE_DRIFT_MIN) * 64));
    CU_ASSERT_EQUAL(s.place, 50);
    /* Twice as many learners as wanted: the place follows the tokens, and the decay ends with the budget. */
    CU_ASSERT_TRUE(wk_schedule_hear(&s, 100 * 64));
    CU_ASSERT_EQUAL(s.place, 100);
    CU_ASSERT(fabs(wk_schedule_next(&s) - 1) < 1e-4); /* The warm-up is over, and no ramp of its own is due. */
    CU_ASSERT_FALSE(wk_schedule_hear(&s, 99 * 64));   /* Old news. */
    /* A fast learner in a slow ensemble falls back. */
    for (int i = 0; i < 300; i++) {
        (void)wk_schedule_next(&s);
    }
    CU_ASSERT_TRUE(wk_schedule_hear(&s, 200 * 64));
    CU_ASSERT_EQUAL(s.place, 200);
    for (int i = 0; i < 2000; i++) {
        (void)wk_schedule_next(&s);
    }
    CU_ASSERT_DOUBLE_EQUAL(wk_schedule_next(&s), 0.1, 1e-12);
    /* At the very start the ramp changes nothing but what the warm-up does anyway. */
    wk_schedule_init(&s, &training, 4);
    wk_schedule_join(&s, 63);
    CU_ASSERT_EQUAL(s.place, 0);
    CU_ASSERT_DOUBLE_EQUAL(wk_schedule_next(&s), 0.01, 1e-12);
    training.inner.decay_steps = 7;
    wk_schedule_init(&s, &training, 0);
    CU_ASSERT_EQUAL(s.inner.decay_steps, 7);
    CU_ASSERT_EQUAL(s.step_tokens, 16);
}

/* A step that is not finite changes nothing; so many in a row end the training; one good step in between does not. */
static void test_not_finite(void)
{
    struct dl_spec *spec = make_spec();
    struct wk_trainer *trainer = start(spec, 1);
    struct wk_trainer_step step;
    struct dl_err err;
    CU_ASSERT_EQUAL(step_at(trainer, 0, &step, &err), DL_OK);
    float *weights = wk_model_parameters(wk_trainer_model(trainer))[0];
    float good[64], kept = weights[1000];
    memcpy(good, weights, sizeof good);
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i + 1 < WK_TRAINER_BAD_STEPS_MAX; i++) {
            weights[' ' * 32] = NAN;
            CU_ASSERT_EQUAL(step_at(trainer, 0, &step, &err), DL_OK);
            CU_ASSERT_TRUE(step.skipped);
            CU_ASSERT_EQUAL(step.tokens, 0);
            CU_ASSERT_TRUE(isnan(step.loss));
        }
        CU_ASSERT_EQUAL(weights[1000], kept);
        weights[' ' * 32] = 0.01f;
        CU_ASSERT_EQUAL(step_at(trainer, 0, &step, &err), DL_OK);
        CU_ASSERT_FALSE(step.skipped);
        kept = weights[1000];
    }
    CU_ASSERT_EQUAL(wk_trainer_skipped(trainer), 2 * (WK_TRAINER_BAD_STEPS_MAX - 1));
    weights[' ' * 32] = NAN;
    enum dl_rc rc = DL_OK;
    for (uint32_t i = 0; rc == DL_OK && i < 2 * WK_TRAINER_BAD_STEPS_MAX; i++) {
        rc = step_at(trainer, 0, &step, &err);
    }
    CU_ASSERT_EQUAL(rc, DL_ECORRUPT);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "learningRate"));
    CU_ASSERT_EQUAL(wk_exit_of_rc(rc), DL_EXIT_FAILED);
    wk_trainer_free(trainer);
    drop_spec(spec);
}

static void test_bad_data(void)
{
    struct dl_spec *spec = make_spec();
    struct wk_trainer *trainer = NULL;
    struct dl_err err;
    uint64_t bytes = 0;
    CU_ASSERT_EQUAL(wk_trainer_plan(spec, 1, &bytes, &err), DL_OK);
    CU_ASSERT(bytes > 100000 && bytes < 100000000);
    unlink(text_path);
    CU_ASSERT_EQUAL(wk_trainer_new(spec, 1, &trainer, &err), DL_ENOTFOUND);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, text_path));
    CU_ASSERT_EQUAL(wk_exit_of_rc(DL_ENOTFOUND), DL_EXIT_USAGE);
    /* More than any machine has: said before it is taken. */
    write_text();
    snprintf(spec->training.data.paths[0], DL_SPEC_TEXT_MAX, "%s", text_path);
    spec->training.model.width = 65536;
    spec->training.model.ffn_width = 65536;
    spec->training.model.heads = spec->training.model.kv_heads = 64;
    spec->training.model.layers = 512;
    CU_ASSERT_EQUAL(wk_trainer_new(spec, 1, &trainer, &err), DL_ENOMEM);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "MiB are available"));
    drop_spec(spec);
}

/* --- sampling --- */

static void sample(struct wk_model *model, double temperature, uint64_t seed, uint32_t out[], uint32_t count)
{
    struct wk_sample_options options = {.temperature = temperature, .top_k = 20};
    uint32_t prompt[] = {'t', 'h', 'e', ' '};
    struct wk_sampler *sampler = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(wk_sampler_new(model, &options, seed, prompt, 4, &sampler, &err), DL_OK);
    for (uint32_t i = 0; i < count; i++) {
        CU_ASSERT_EQUAL_FATAL(wk_sampler_next(sampler, &out[i], &err), DL_OK);
    }
    wk_sampler_free(sampler);
}

static void test_sampling(void)
{
    enum { COUNT = 200 }; /* Several contexts of 32. */
    struct dl_spec *spec = make_spec();
    struct wk_trainer *trainer = start(spec, 1);
    struct wk_model *model = wk_trainer_model(trainer);
    double losses[STEPS];
    uint32_t a[COUNT], b[COUNT], c[COUNT];
    run(trainer, 0, STEPS, losses);
    sample(model, 0.8, 5, a, COUNT);
    sample(model, 0.8, 5, b, COUNT);
    sample(model, 0.8, 6, c, COUNT);
    CU_ASSERT_EQUAL(memcmp(a, b, sizeof a), 0);
    CU_ASSERT_NOT_EQUAL(memcmp(a, c, sizeof a), 0);
    uint32_t known = 0;
    for (size_t i = 0; i < COUNT; i++) {
        known += strchr("the learner sends a fragment and trains on.\n", (int)a[i]) != NULL ? 1 : 0;
    }
    CU_ASSERT(known > COUNT * 95 / 100); /* The text's letters; by chance 1 in 15 bytes would be. */
    /* The first token after a prompt is the likeliest one by the whole model's logits, too. */
    uint32_t tokens[4 * 32] = {'t', 'h', 'e', ' '}, best = 0;
    DL_AUTO_FREE float *logits = calloc((size_t)4 * 32 * 256, sizeof *logits);
    struct dl_err err;
    CU_ASSERT_EQUAL(wk_model_logits(model, tokens, 4, logits, &err), DL_OK);
    for (uint32_t i = 1; i < 256; i++) {
        best = logits[3 * 256 + i] > logits[3 * 256 + best] ? i : best;
    }
    sample(model, 0, 1, a, 1);
    CU_ASSERT_EQUAL(a[0], best);
    wk_trainer_free(trainer);
    drop_spec(spec);
}

/* --- command line --- */

static enum dl_rc parse(struct wk_args *args, struct dl_err *err, const char *line)
{
    static char text[512];
    char *argv[32] = {NULL};
    int argc = 0;
    snprintf(text, sizeof text, "diloco-worker %s", line);
    char *rest = NULL;
    for (char *word = strtok_r(text, " ", &rest); word != NULL && argc < 31; word = strtok_r(NULL, " ", &rest)) {
        argv[argc++] = word;
    }
    return wk_args_parse(argc, argv, args, err);
}

static void test_arguments(void)
{
    struct wk_args args;
    struct dl_err err;
    CU_ASSERT_EQUAL(parse(&args, &err, "learn --job j --endpoints ws://h:1 --learner 3 --step-seconds 0.5 --threads=2"),
                    DL_OK);
    CU_ASSERT_EQUAL(args.command, WK_LEARN);
    CU_ASSERT_STRING_EQUAL(args.job, "j");
    CU_ASSERT_EQUAL(args.learner, 3);
    CU_ASSERT_EQUAL(args.threads, 2);
    CU_ASSERT_EQUAL(args.step_seconds, 0.5);
    CU_ASSERT_EQUAL(parse(&args, &err, "--job j learn --endpoints ws://h:1 --log-level debug"), DL_OK);
    CU_ASSERT_EQUAL(args.learner, -1);
    CU_ASSERT_EQUAL(args.log_level, DL_LOG_DEBUG);
    CU_ASSERT_EQUAL(parse(&args, &err, "evaluate --job j --endpoints ws://h:1 --export d"), DL_OK);
    CU_ASSERT_EQUAL(parse(&args, &err, "generate --weights w --seed 18446744073709551615 --temperature 0"), DL_OK);
    CU_ASSERT_EQUAL(args.seed, UINT64_MAX);
    CU_ASSERT_EQUAL(parse(&args, &err, "learn --help"), DL_OK);
    CU_ASSERT_TRUE(args.help);
    static const struct {
        const char *line, *said;
    } wrong[] = {
        {"", "no command"},
        {"lern --job j", "'lern'"},
        {"learn --job j", "--endpoints"},
        {"learn --endpoints ws://h:1", "--job"},
        {"evaluate --job j --endpoints ws://h:1", "--export"},
        {"evaluate --job j --endpoints ws://h:1 --export d --learner 1", "--learner"},
        {"learn --job j --endpoints ws://h:1 --threads 0", "--threads"},
        {"learn --job j --endpoints ws://h:1 --threads 1.5", "--threads"},
        {"learn --job j --endpoints ws://h:1 --threads two", "'two'"},
        {"learn --job j --endpoints ws://h:1 --learner -2", "--learner"},
        {"learn --job j --endpoints ws://h:1 --step-seconds nan", "--step-seconds"},
        {"learn --job j --endpoints ws://h:1 --tls-cert c", "--tls-key"},
        {"learn --job j --endpoints ws://h:1 --log-level loud", "loud"},
        {"learn --job j --endpoints ws://h:1 more", "'more'"},
        {"learn --jobb j", "--jobb"},
        {"learn --job", "--job"},
        {"generate --weights w --seed -1", "--seed"},
        {"generate", "--weights"},
    };
    for (size_t i = 0; i < DL_COUNT_OF(wrong); i++) {
        err.text[0] = 0;
        CU_ASSERT_EQUAL(parse(&args, &err, wrong[i].line), DL_EINVAL);
        if (strstr(err.text, wrong[i].said) == NULL) {
            printf("'%s': %s\n", wrong[i].line, err.text);
            CU_FAIL("the text does not name what is wrong");
        }
    }
    CU_ASSERT(wk_usable_cores() >= 1);
}

UNIT_MAIN("train", {"learns", test_learns}, {"same bits", test_same_bits}, {"late joiner", test_late_joiner},
          {"schedule", test_schedule}, {"not finite", test_not_finite}, {"bad data", test_bad_data},
          {"sampling", test_sampling}, {"arguments", test_arguments})
