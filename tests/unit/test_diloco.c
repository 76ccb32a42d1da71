/* The library end to end: the ordinary way, evaluators, several shards and learners, data by leases, wrong arguments. */
#include "tests/unit/trainer_rig.h"

/* --- the ordinary way ----------------------------------------------------------------------------------------------- */

static void run_ordinary(struct fake_syncer *syncer, float tolerance)
{
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(trainer.info.learner, 3);
    CU_ASSERT_EQUAL(trainer.info.connected_shards, 1);
    CU_ASSERT_EQUAL(trainer.info.updates_total, syncer->fragments);
    CU_ASSERT_EQUAL(trainer.info.tokens_all, 1000);
    check_adopted(&trainer, syncer); /* Version 1 is what this learner held. */
    train_until(&trainer, syncer, &syncer->pushes_merged, 4 * syncer->fragments);
    finish(&trainer, syncer);
    check_theta(syncer, tolerance);
    fake_stop(syncer, DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_DONE);
    CU_ASSERT(trainer.info.updates_total >= 5 * syncer->fragments);
    CU_ASSERT(trainer.info.pushes_total >= 4 * syncer->fragments);
    uint64_t told = fake_peek(syncer, &syncer->last_meta.tokens);
    CU_ASSERT(told > 0 && told % 10 == 0 && told <= trainer.info.step * 10);
    CU_ASSERT(trainer.info.bytes_sent > 1000 && trainer.info.bytes_received > 1000);
    CU_ASSERT_EQUAL(step(&trainer), DILOCO_DONE); /* And stays so. */
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_join_seed_train_stop(void)
{
    struct fake_syncer *syncer = fake_new(5);
    run_ordinary(syncer, 0);
}

static void test_every_codec(void)
{
    for (int codec = DL_CODEC_BF16; codec <= DL_CODEC_INT4; codec++) {
        struct fake_syncer *syncer = fake_new(3);
        syncer->compression = (enum dl_codec)codec;
        run_ordinary(syncer, codec == DL_CODEC_BF16 ? 0.0f : 0.01f);
    }
}

static void test_frames_in_pieces_with_pings_between(void)
{
    struct fake_syncer *syncer = fake_new(1); /* One fragment of 1.2 MB: several chunks. */
    syncer->split = true;
    run_ordinary(syncer, 0);
}

static void test_bfloat16_broadcast_is_adopted(void)
{
    struct fake_syncer *syncer = fake_new(3);
    syncer->broadcast = DL_CODEC_BF16;
    syncer->interval = 1;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    check_adopted(&trainer, syncer); /* Whole numbers below 256 are exact in bfloat16. */
    train_until(&trainer, syncer, &syncer->pushes_merged, 6);
    close_trainer(&trainer);
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->goodbyes), 1);
    fake_free(syncer);
}

/* --- others --------------------------------------------------------------------------------------------------------- */

static void test_evaluator_receives_and_reports(void)
{
    struct fake_syncer *syncer = fake_new(3);
    syncer->heartbeat_ms = 20;
    fake_listen(syncer);
    struct trainer learner = {0}, evaluator = {0};
    open_trainer(&learner, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&learner), DILOCO_CONTINUE);
    struct diloco_options options = ANY_LEARNER;
    options.role = DILOCO_EVALUATOR;
    open_trainer(&evaluator, syncer, options);
    CU_ASSERT_EQUAL_FATAL(join(&evaluator), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(diloco_step(evaluator.d, 1, 0, NULL, NULL), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_poll(learner.d, 0, NULL, NULL), DILOCO_EINVAL);
    uint64_t metas = fake_peek(syncer, &syncer->metas);
    CU_ASSERT_EQUAL(diloco_poll(evaluator.d, 0, NULL, NULL), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->metas), metas); /* It observes. */
    train_until(&learner, syncer, &syncer->pushes_merged, 6);
    finish(&learner, syncer);
    fake_stop(syncer, DL_STOP_SUCCEEDED);
    int result;
    while ((result = diloco_poll(evaluator.d, 5, &evaluator.info, &evaluator.error)) == DILOCO_CONTINUE) {
    }
    CU_ASSERT_EQUAL(result, DILOCO_DONE);
    check_adopted(&evaluator, syncer);
    CU_ASSERT_EQUAL(diloco_report(evaluator.d, 1.25, 64, &evaluator.error), DILOCO_CONTINUE);
    close_trainer(&evaluator); /* Closing lets the report go out first. */
    uint64_t hash = 0;
    FAKE_FOR_SHARD(syncer, p)
    {
        hash ^= dl_hash64(syncer->theta[p], syncer->layout->fragments[p].padded_elements * sizeof(float), p);
    }
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->evaluations), 1);
    CU_ASSERT_EQUAL(syncer->last_evaluation.parameter_hash, hash);
    CU_ASSERT_EQUAL(syncer->last_evaluation.loss, 1.25);
    CU_ASSERT(syncer->last_evaluation.round > 0);
    close_trainer(&learner);
    fake_free(syncer);
}

static void test_leaving_says_goodbye_and_answers_a_pull_first(void)
{
    struct fake_syncer *syncer = fake_new(2);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 2);
    int64_t before_ns = dl_now_ns();
    CU_ASSERT_EQUAL(diloco_leave(trainer.d, 1, 10, "node is drained", &trainer.error), DILOCO_CONTINUE);
    CU_ASSERT(dl_now_ns() - before_ns < 5 * DL_NS_PER_SECOND);
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->goodbyes), 1);
    CU_ASSERT_EQUAL(step(&trainer), DILOCO_STOPPED);
    close_trainer(&trainer);
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->goodbyes), 1);
    check_theta(syncer, 0);
    fake_free(syncer);
}

static void test_two_shards(void)
{
    struct fake_syncer *shards[2];
    for (uint32_t i = 0; i < 2; i++) {
        shards[i] = fake_new(5);
        shards[i]->shard = i;
        shards[i]->shards = 2;
        shards[i]->timeout_ms = 300;
        shards[i]->heartbeat_ms = 50;
        fake_listen(shards[i]);
    }
    char endpoints[128];
    snprintf(endpoints, sizeof endpoints, "ws://127.0.0.1:%u,ws://127.0.0.1:%u", shards[0]->port, shards[1]->port);
    struct trainer trainer = {0};
    open_trainer_to(&trainer, endpoints, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(trainer.info.connected_shards, 2);
    CU_ASSERT_EQUAL(trainer.info.updates_total, 5);
    CU_ASSERT_EQUAL(shards[1]->last_hello.learner, 3); /* Shard 0's choice holds for all. */
    CU_ASSERT_EQUAL(shards[1]->last_hello.nonce, shards[0]->last_hello.nonce);
    train_until(&trainer, shards[0], &shards[0]->pushes_merged, 6);
    train_until(&trainer, shards[1], &shards[1]->pushes_merged, 6);
    check_theta(shards[0], 0);
    check_theta(shards[1], 0);
    /* Shard 1 is gone for good; shard 0 alone can end the job, after the timeout. */
    fake_down(shards[1]);
    fake_stop(shards[0], DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, shards[0]), DILOCO_DONE);
    close_trainer(&trainer);
    fake_free(shards[0]);
    shards[1]->listener = -1;
    for (uint32_t p = 0; p < DL_SPEC_FRAGMENTS_MAX; p++) {
        free(shards[1]->theta[p]);
    }
    dl_layout_free(shards[1]->layout);
    free(shards[1]);
}

static void *second_learner(void *argument)
{
    struct fake_syncer *syncer = argument;
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_DONE);
    close_trainer(&trainer);
    return NULL;
}

static void test_two_learners(void)
{
    struct fake_syncer *syncer = fake_new(3);
    syncer->apply = DL_APPLY_REBASE;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    pthread_t thread;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, second_learner, syncer), 0);
    train_until(&trainer, syncer, &syncer->pushes_merged, 30);
    fake_stop(syncer, DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_DONE);
    pthread_join(thread, NULL);
    check_theta(syncer, 0);
    close_trainer(&trainer);
    fake_free(syncer);
}

/* J8: a trainer takes its data by leases, each position once and in order; its pushes say how far it has come. */
static void test_data_by_leases(void)
{
    struct fake_syncer *syncer = fake_new(3);
    struct trainer trainer = {0};
    struct diloco_range range;
    struct diloco_error error;
    syncer->lease = 64;
    fake_listen(syncer);
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL(diloco_data(trainer.d, 4, &range, &error), DILOCO_EINVAL); /* Not joined, and not said so. */
    CU_ASSERT_EQUAL(diloco_lease_data(trainer.d, 0, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_lease_data(trainer.d, 4, &error), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(diloco_lease_data(trainer.d, 4, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_data(trainer.d, 0, &range, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_data(trainer.d, 4, NULL, &error), DILOCO_EINVAL);
    uint64_t lease = 0, next = 0, taken = 0, unleased = 0;
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (fake_peek(syncer, &syncer->leases) < 4 || fake_peek(syncer, &syncer->pushes_merged) < 8) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        for (uint64_t lacks = 4; lacks > 0; lacks -= range.count) {
            CU_ASSERT_EQUAL_FATAL(diloco_data(trainer.d, lacks, &range, &error), DILOCO_CONTINUE);
            CU_ASSERT_FATAL(range.count >= 1 && range.count <= lacks);
            unleased += range.lease == 0 ? range.count : 0;
            if (range.lease != 0 && range.lease != lease) {
                CU_ASSERT(lease == 0 || next == 1000 * lease + 64); /* All of the one before. */
                CU_ASSERT_EQUAL(range.lease, lease + 1);
                lease = range.lease;
                next = 1000 * lease;
            }
            CU_ASSERT(range.lease == 0 || range.first == next);
            next += range.lease == 0 ? 0 : range.count;
            taken += range.count;
        }
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        fake_breathe(syncer);
    }
    CU_ASSERT(taken > 100 && unleased < taken / 2); /* The first one is there before the first step. */
    pthread_mutex_lock(&syncer->lock);
    CU_ASSERT_EQUAL(syncer->last_request.batch, 4);
    CU_ASSERT(syncer->last_push.lease >= 1 && syncer->last_push.lease <= lease);
    CU_ASSERT(syncer->last_push.cursor >= 1 && syncer->last_push.cursor <= 64);
    pthread_mutex_unlock(&syncer->lock);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_wrong_arguments(void)
{
    struct diloco *d = NULL;
    struct diloco_error error;
    struct diloco_options options = {.struct_size = sizeof options, .job = "demo", .endpoints = "ws://a:1"};
    static const char *const endpoints[] = {"",           "http://a:1",   "ws://a",    "ws://:1",
                                            "ws://a:0",   "ws://a:65536", "ws://a:1,", "wss://[::1:2",
                                            "ws://a b:1", "ws://a:1x"};
    for (size_t i = 0; i < DL_COUNT_OF(endpoints); i++) {
        options.endpoints = endpoints[i];
        CU_ASSERT_EQUAL(diloco_open(&options, &d, &error), DILOCO_EINVAL);
        CU_ASSERT_PTR_NOT_NULL(strstr(error.text, "endpoint"));
    }
    options.endpoints = "ws://[::1]:12,wss://host.example:443/";
    options.cert_file = "only one of two";
    CU_ASSERT_EQUAL(diloco_open(&options, &d, &error), DILOCO_EINVAL);
    options.cert_file = NULL;
    options.ca_file = "/nonexistent/ca.pem";
    CU_ASSERT_EQUAL(diloco_open(&options, &d, &error), DILOCO_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(error.text, "/nonexistent/ca.pem"));
    options.struct_size = 3;
    CU_ASSERT_EQUAL(diloco_open(&options, &d, &error), DILOCO_EINVAL);
    options = (struct diloco_options){.struct_size = sizeof options, .job = "demo", .endpoints = "ws://a:1"};
    CU_ASSERT_EQUAL_FATAL(diloco_open(&options, &d, &error), DILOCO_CONTINUE);
    float value = 0;
    const uint64_t shape[5] = {1, 1, 1, 1, 1}, nothing[1] = {0};
    CU_ASSERT_EQUAL(diloco_join(d, NULL, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_register(d, "x", &value, 5, shape, DILOCO_WEIGHT, 0, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_register(d, "x", NULL, 1, shape, DILOCO_WEIGHT, 0, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_step(d, 1, 0, NULL, &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_leave(d, 0, 1, "", &error), DILOCO_EINVAL);
    CU_ASSERT_EQUAL(diloco_register(d, "x", &value, 1, nothing, DILOCO_WEIGHT, 0, &error), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(diloco_join(d, NULL, &error), DILOCO_EINVAL); /* The table as a whole is checked here. */
    diloco_close(d);
    diloco_close(NULL);
}

UNIT_MAIN("diloco", {"join, seed, train, stop", test_join_seed_train_stop}, {"every codec", test_every_codec},
          {"frames in pieces", test_frames_in_pieces_with_pings_between},
          {"bfloat16 broadcast", test_bfloat16_broadcast_is_adopted},
          {"evaluator", test_evaluator_receives_and_reports},
          {"leaving", test_leaving_says_goodbye_and_answers_a_pull_first}, {"two shards", test_two_shards},
          {"two learners", test_two_learners}, {"wrong arguments", test_wrong_arguments},
          {"J8 data by leases", test_data_by_leases})
