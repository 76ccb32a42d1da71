/* The library end to end: lost connections, a syncer that is gone, waits that are bounded. */
#include "common/rng.h"
#include "tests/unit/trainer_rig.h"

/* --- trouble -------------------------------------------------------------------------------------------------------- */

static void test_hundred_disconnects_lose_and_double_nothing(void)
{
    struct fake_syncer *syncer = fake_new(4);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    struct dl_rng rng;
    dl_rng_init(&rng, 5, dl_rng_stream("disconnects", 0, 0));
    int64_t give_up_ns = dl_now_ns() + 2 * PATIENCE_NS;
    while (fake_peek(syncer, &syncer->cut) < 100) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        uint64_t metas = fake_peek(syncer, &syncer->metas) + dl_rng_below(&rng, 8);
        train_until(&trainer, syncer, &syncer->metas, metas);
        if (dl_rng_below(&rng, 2) == 0) {
            fake_cut_all(syncer);
        } else { /* In the middle of a push. */
            pthread_mutex_lock(&syncer->lock);
            syncer->push_cut = 1 + (uint32_t)dl_rng_below(&rng, 3);
            pthread_mutex_unlock(&syncer->lock);
        }
    }
    pthread_mutex_lock(&syncer->lock);
    syncer->push_cut = 0;
    uint64_t more = syncer->pushes_merged + 8;
    pthread_mutex_unlock(&syncer->lock);
    train_until(&trainer, syncer, &syncer->pushes_merged, more);
    finish(&trainer, syncer);
    check_theta(syncer, 0);
    CU_ASSERT(fake_peek(syncer, &syncer->hellos) > 50);
    CU_ASSERT(trainer.level_seen[2] > 10); /* Every loss is a warning in the log. */
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_syncer_down_for_a_while(void)
{
    struct fake_syncer *syncer = fake_new(4);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 4);
    fake_down(syncer);
    int64_t until_ns = dl_now_ns() + 300 * DL_NS_PER_MS;
    uint64_t steps = 0;
    do { /* Trains on, and no step waits. */
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        CU_ASSERT_FATAL(trainer.info.waited_seconds == 0);
        steps++;
    } while (steps < 2 || dl_now_ns() < until_ns || trainer.info.connected_shards != 0);
    syncer->epoch++;
    fake_listen(syncer);
    train_until(&trainer, syncer, &syncer->pushes_merged, syncer->pushes_merged + 4);
    CU_ASSERT(fake_peek(syncer, &syncer->last_hello.step) >= steps);
    finish(&trainer, syncer);
    check_theta(syncer, 0);
    fake_stop(syncer, DL_STOP_REQUESTED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_STOPPED);
    close_trainer(&trainer);
    fake_free(syncer);
}

/* The volume was lost as well: the new syncer knows nothing, and is seeded from what the learner holds: the last version as it was
 * sent. */
static void seed_again(enum dl_codec broadcast)
{
    struct fake_syncer *syncer = fake_new(4);
    syncer->broadcast = broadcast;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 8);
    finish(&trainer, syncer);
    float before[DL_SPEC_FRAGMENTS_MAX];
    fake_down(syncer);
    FAKE_FOR_SHARD(syncer, p)
    {
        uint8_t sent[DL_BLOCK * sizeof(float)];
        float block[DL_BLOCK];
        dl_codec_encode(broadcast, syncer->theta[p], 1, sent);
        dl_codec_decode(broadcast, sent, 1, block);
        before[p] = block[0];
        memset(syncer->theta[p], 0, syncer->layout->fragments[p].padded_elements * sizeof(float));
        syncer->version[p] = 0;
    }
    syncer->epoch++;
    fake_listen(syncer);
    train_until(&trainer, syncer, &syncer->version[3], 1);
    train_until(&trainer, syncer, &syncer->version[0], 1);
    FAKE_FOR_SHARD(syncer, p)
    {
        CU_ASSERT_EQUAL(syncer->theta[p][0], before[p]); /* The last version that all agreed on. */
    }
    syncer->interval = 2;
    train_until(&trainer, syncer, &syncer->version[0], 2); /* And on it goes. */
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_syncer_that_lost_its_state_is_seeded_again(void)
{
    seed_again(DL_CODEC_NONE);
    seed_again(DL_CODEC_BF16);
}

static void test_half_open_connection_is_noticed(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->heartbeat_ms = 20;
    syncer->timeout_ms = 200;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 2);
    pthread_mutex_lock(&syncer->lock);
    syncer->mute = true;
    uint32_t before = syncer->conn_count;
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (syncer->conn_count == before) {
        pthread_mutex_unlock(&syncer->lock);
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        fake_breathe(syncer);
        pthread_mutex_lock(&syncer->lock);
    }
    syncer->mute = false;
    pthread_cond_broadcast(&syncer->changed);
    uint64_t more = syncer->pushes_merged + 2;
    pthread_mutex_unlock(&syncer->lock);
    train_until(&trainer, syncer, &syncer->pushes_merged, more);
    finish(&trainer, syncer);
    check_theta(syncer, 0);
    close_trainer(&trainer);
    fake_free(syncer);
}

/* While the trainer computes for long, the library's thread answers for it. */
static void test_heartbeats_while_the_trainer_computes(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->heartbeat_ms = 10;
    syncer->timeout_ms = 2000;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (fake_peek(syncer, &syncer->heartbeats) < 20) { /* This trainer is in the middle of a step. */
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        fake_breathe(syncer);
    }
    CU_ASSERT(fake_peek(syncer, &syncer->metas) <= 1); /* No boundary, no META but that of the join. */
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->hellos), 1);
    CU_ASSERT_EQUAL(step(&trainer), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL(trainer.info.ensemble_step, 40); /* As the syncer's heartbeats say. */
    CU_ASSERT_EQUAL(trainer.info.tokens_all, 2000);
    close_trainer(&trainer);
    fake_free(syncer);
}

/* --- waiting -------------------------------------------------------------------------------------------------------- */

/* The synchronous form: no step between a push and its update, so a merge every second step exactly. */
static void test_synchronous_learner_waits_for_pull_and_update(void)
{
    struct fake_syncer *syncer = fake_new(3);
    syncer->pull_within = 2;
    syncer->update_within = 0;
    syncer->wait_ms = 60000;
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 3); /* From the first pull on it is in step. */
    uint64_t steps = trainer.info.step, merged = fake_peek(syncer, &syncer->version[0]);
    double waited = 0;
    for (int i = 0; i < 20; i++) {
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        waited += trainer.info.waited_seconds;
    }
    CU_ASSERT_EQUAL(trainer.info.step, steps + 20);
    uint64_t rounds = fake_peek(syncer, &syncer->version[0]) - merged;
    CU_ASSERT(rounds >= 9 && rounds <= 11);
    CU_ASSERT(waited > 0);
    CU_ASSERT(fake_peek(syncer, &syncer->last_meta.waited_ns) > 0);
    check_theta(syncer, 0);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_a_wait_is_bounded_and_ends_with_the_connection(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->update_within = 0;
    syncer->wait_ms = 30;
    syncer->drop_pushes = true; /* No update will ever come. */
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    pthread_mutex_lock(&syncer->lock);
    syncer->drop_pushes = false; /* But for the first state. */
    pthread_mutex_unlock(&syncer->lock);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    pthread_mutex_lock(&syncer->lock);
    syncer->drop_pushes = true;
    pthread_mutex_unlock(&syncer->lock);
    double waited = 0;
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    while (waited < 0.09) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        CU_ASSERT_EQUAL_FATAL(step(&trainer), DILOCO_CONTINUE);
        CU_ASSERT_FATAL(trainer.info.waited_seconds < 10);
        waited += trainer.info.waited_seconds;
        fake_breathe(syncer);
    }
    close_trainer(&trainer);
    fake_free(syncer);
}

UNIT_MAIN("diloco: trouble", {"hundred disconnects", test_hundred_disconnects_lose_and_double_nothing},
          {"syncer down", test_syncer_down_for_a_while},
          {"syncer that lost its state", test_syncer_that_lost_its_state_is_seeded_again},
          {"half-open", test_half_open_connection_is_noticed},
          {"T1, Q6 heartbeats while computing", test_heartbeats_while_the_trainer_computes},
          {"synchronous", test_synchronous_learner_waits_for_pull_and_update},
          {"bounded wait", test_a_wait_is_bounded_and_ends_with_the_connection})
