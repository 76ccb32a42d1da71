/* The library end to end: who is not let in, and how it is told; TLS. */
#include "tests/unit/fake_tls.h"
#include "tests/unit/trainer_rig.h"

/* --- refusals ------------------------------------------------------------------------------------------------------- */

static void expect_refused(struct fake_syncer *syncer, struct diloco_options options, int code, const char *text)
{
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, options);
    CU_ASSERT_EQUAL(join(&trainer), code);
    CU_ASSERT_EQUAL(trainer.error.code, code);
    CU_ASSERT_PTR_NOT_NULL(strstr(trainer.error.text, text));
    if (strstr(trainer.error.text, text) == NULL) {
        fprintf(stderr, "\"%s\" is not in \"%s\"\n", text, trainer.error.text);
    }
    CU_ASSERT_EQUAL(diloco_step(trainer.d, 1, 0, NULL, NULL), code == DILOCO_ETIMEOUT ? DILOCO_EINVAL : code);
    close_trainer(&trainer);
}

static void test_wrong_token_is_refused(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->token = "right";
    fake_listen(syncer);
    struct diloco_options options = ANY_LEARNER;
    options.token = "wrong";
    expect_refused(syncer, options, DILOCO_EREFUSED, "it says: wrong token.");
    options.token = NULL;
    expect_refused(syncer, options, DILOCO_EREFUSED, "status 401: the syncer refused the token");
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->unauthorized), 2);
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->hellos), 0);
    options.token = "right";
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, options);
    CU_ASSERT_EQUAL(join(&trainer), DILOCO_CONTINUE);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_other_layout_is_refused_naming_both(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->wrong_layout = 1;
    fake_listen(syncer);
    expect_refused(syncer, ANY_LEARNER, DILOCO_EREFUSED, "layouts differ");
    syncer->refuse = DL_REFUSE_LAYOUT;
    expect_refused(syncer, ANY_LEARNER, DILOCO_EREFUSED, "shard 0 refused this learner: scripted");
    syncer->refuse = DL_REFUSE_JOB;
    expect_refused(syncer, ANY_LEARNER, DILOCO_EREFUSED, "scripted");
    syncer->refuse = DL_REFUSE_FINISHED;
    expect_refused(syncer, ANY_LEARNER, DILOCO_STOPPED, "stop");
    fake_free(syncer);
}

static void *admit_third(void *argument)
{
    struct fake_syncer *syncer = argument;
    pthread_mutex_lock(&syncer->lock);
    while (syncer->hellos < 3) {
        pthread_cond_wait(&syncer->changed, &syncer->lock);
    }
    syncer->refuse = 0;
    pthread_mutex_unlock(&syncer->lock);
    return NULL;
}

static void test_a_full_ensemble_is_asked_again(void)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->refuse = DL_REFUSE_FULL;
    fake_listen(syncer);
    pthread_t thread;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, admit_third, syncer), 0);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL(join(&trainer), DILOCO_CONTINUE);
    pthread_join(thread, NULL);
    CU_ASSERT(fake_peek(syncer, &syncer->hellos) >= 4);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_nobody_there_is_a_timeout_that_says_why(void)
{
    struct fake_syncer *syncer = fake_new(2);
    fake_listen(syncer);
    fake_down(syncer); /* A port at which nobody listens. */
    struct diloco_options options = ANY_LEARNER;
    options.join_timeout_seconds = 0.3;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "Connection refused");
    fake_listen(syncer);
    syncer->turn_away = true;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "0 of 1 shards connected");
    fake_free(syncer);
}

static void *come_up_late(void *argument)
{
    struct fake_syncer *syncer = argument;
    struct timespec pause = {.tv_nsec = 200 * DL_NS_PER_MS}; /* Just so that the first attempts fail. */
    nanosleep(&pause, NULL);
    fake_listen(syncer);
    return NULL;
}

static void test_join_before_the_syncer_is_up(void)
{
    struct fake_syncer *syncer = fake_new(2);
    fake_listen(syncer);
    fake_down(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    pthread_t thread;
    CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, come_up_late, syncer), 0);
    CU_ASSERT_EQUAL(join(&trainer), DILOCO_CONTINUE);
    pthread_join(thread, NULL);
    close_trainer(&trainer);
    fake_free(syncer);
}

static void test_failed_job_is_reported(void)
{
    struct fake_syncer *syncer = fake_new(2);
    fake_listen(syncer);
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, ANY_LEARNER);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    fake_stop(syncer, DL_STOP_FAILED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_EFAILED);
    CU_ASSERT_PTR_NOT_NULL(strstr(trainer.error.text, "scripted stop"));
    close_trainer(&trainer);
    fake_free(syncer);
}

/* --- TLS ------------------------------------------------------------------------------------------------------------ */

static void test_tls(void)
{
    char folder[] = "/tmp/diloco-tls-XXXXXX";
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(folder));
    fake_certificate(folder, "server", "IP:127.0.0.1");
    fake_certificate(folder, "other", "DNS:elsewhere.example");
    fake_certificate(folder, "client", "DNS:client.example");
    char ca[256], other_ca[256], client_cert[256], client_key[256];
    snprintf(ca, sizeof ca, "%s/server.pem", folder);
    snprintf(other_ca, sizeof other_ca, "%s/other.pem", folder);
    snprintf(client_cert, sizeof client_cert, "%s/client.pem", folder);
    snprintf(client_key, sizeof client_key, "%s/client.key", folder);

    struct fake_syncer *syncer = fake_new(1);
    syncer->tls = fake_server_tls(folder, "server", true);
    SSL_CTX *tls = syncer->tls;
    fake_listen(syncer);
    struct diloco_options options = ANY_LEARNER;
    options.ca_file = other_ca;
    options.join_timeout_seconds = 0.5;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "certificate was not accepted");
    options.ca_file = ca;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "certificate required");
    options.cert_file = client_cert;
    options.key_file = client_key;
    options.join_timeout_seconds = 30;
    struct trainer trainer = {0};
    open_trainer(&trainer, syncer, options);
    CU_ASSERT_EQUAL_FATAL(join(&trainer), DILOCO_CONTINUE);
    train_until(&trainer, syncer, &syncer->pushes_merged, 5);
    finish(&trainer, syncer);
    check_theta(syncer, 0);
    fake_stop(syncer, DL_STOP_SUCCEEDED);
    CU_ASSERT_EQUAL(train_to_the_end(&trainer, syncer), DILOCO_DONE);
    close_trainer(&trainer);
    fake_free(syncer);
    SSL_CTX_free(tls);

    syncer = fake_new(1); /* The certificate is trusted, but for another host. */
    tls = syncer->tls = fake_server_tls(folder, "other", false);
    fake_listen(syncer);
    options.ca_file = other_ca;
    options.join_timeout_seconds = 0.5;
    expect_refused(syncer, options, DILOCO_ETIMEOUT, "IP address mismatch");
    fake_free(syncer);
    SSL_CTX_free(tls);
    fake_certificate_remove(folder, "server");
    fake_certificate_remove(folder, "other");
    fake_certificate_remove(folder, "client");
    CU_ASSERT_EQUAL(rmdir(folder), 0);
}

UNIT_MAIN("diloco: refused", {"wrong token", test_wrong_token_is_refused},
          {"other layout", test_other_layout_is_refused_naming_both},
          {"full ensemble", test_a_full_ensemble_is_asked_again},
          {"nobody there", test_nobody_there_is_a_timeout_that_says_why},
          {"before the syncer", test_join_before_the_syncer_is_up}, {"failed job", test_failed_job_is_reported},
          {"TLS", test_tls})
