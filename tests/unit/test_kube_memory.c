/* Every allocation of the Kubernetes client fails once, in turn: it says so or goes on, loses nothing it was asked to keep, and
 * leaks nothing (the last under SAN=address). */
#include "operator/kube/events.h"
#include "operator/kube/lease.h"
#include "operator/kube/queue.h"
#include "operator/kube/reflector.h"
#include "tests/unit/alloc_rig.h"
#include "tests/unit/kube_rig.h"

static const char kubeconfig[] =
    "current-context: a\n"
    "contexts: [{name: a, context: {cluster: c, user: u}}]\n"
    "clusters: [{name: c, cluster: {server: 'https://x', certificate-authority: ca.pem}}]\n"
    "users: [{name: u, user: {token: t, client-certificate-data: Q0VSVA==, client-key: k, exec: "
    "{apiVersion: client.authentication.k8s.io/v1, command: ./c, args: [a], env: [{name: A, value: b}]}}}]\n";
static char config_path[64];

static bool load_config(long after)
{
    struct op_config config = {0}, copy = {0};
    struct dl_err err;
    arm(after);
    enum dl_rc rc = op_config_load(config_path, NULL, &config, &err);
    enum dl_rc copied = rc == DL_OK ? op_config_copy(&config, &copy, &err) : DL_OK;
    bool was_injected = disarm();
    CU_ASSERT((rc == DL_OK && copied == DL_OK) == !was_injected);
    op_config_release(&config);
    op_config_release(&copy);
    return was_injected;
}

static void test_config(void)
{
    snprintf(config_path, sizeof config_path, "/tmp/kube-memory-XXXXXX");
    int fd = mkstemp(config_path);
    CU_ASSERT_EQUAL_FATAL(write(fd, kubeconfig, strlen(kubeconfig)), (ssize_t)strlen(kubeconfig));
    close(fd);
    FAIL_EACH(20, load_config);
    unlink(config_path);
}

static struct fake_api *api;

static bool new_client(long after)
{
    struct op_config config = fake_api_config(api);
    struct op_loop *loop = NULL;
    struct op_client *client = NULL;
    struct dl_err err;
    config.token = (char *)(uintptr_t) "t";
    config.tls_server_name = (char *)(uintptr_t) "localhost";
    arm(after);
    enum dl_rc rc = op_loop_new(&loop, &err);
    if (rc == DL_OK) {
        rc = op_client_new(loop, &config, NULL, &client, &err);
    }
    bool was_injected = disarm();
    CU_ASSERT_EQUAL(rc, was_injected ? DL_ENOMEM : DL_OK);
    op_client_free(client);
    op_loop_free(loop);
    return was_injected;
}

static struct rig rig;

static bool request(long after)
{
    struct op_ref ref = RIG_POD("x");
    struct rig_answer answer;
    struct dl_err err;
    const char *text = "{\"metadata\":{\"name\":\"x\"},\"spec\":{}}";
    struct op_reply_to to = rig_to(&answer);
    arm(after);
    enum dl_rc rc = op_api_apply(rig.client, &ref, text, to, &err);
    if (rc == DL_OK) {
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
        rc = answer.rc;
    }
    bool was_injected = disarm();
    CU_ASSERT(was_injected || rc == DL_OK);
    CU_ASSERT(rc == DL_OK || rc == DL_ENOMEM || rc == DL_EINVAL || rc == DL_EPROTO);
    CU_ASSERT_EQUAL(op_client_pending(rig.client), 0);
    struct op_delete_options options = {
        .uid = "u", .resource_version = "1", .grace_seconds = 1, .propagation = "Background"};
    arm(after);
    rc = op_api_delete(rig.client, &ref, &options, rig_to(&answer), &err);
    if (rc == DL_OK) {
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    }
    bool was_injected_again = disarm();
    CU_ASSERT(was_injected_again || answer.rc == DL_ECONFLICT);
    return was_injected || was_injected_again;
}

static void test_client(void)
{
    rig_start(&rig);
    api = rig.api;
    FAIL_EACH(5, new_client);
    FAIL_EACH(10, request);
    rig_stop(&rig);
}

struct tally {
    int changed, gone, synced, failed;
};

static void on_changed(void *context, const struct op_object *object)
{
    (void)object;
    ((struct tally *)context)->changed++;
}

static void on_gone(void *context, const char *space, const char *name)
{
    (void)space;
    (void)name;
    ((struct tally *)context)->gone++;
}

static void on_synced(void *context)
{
    ((struct tally *)context)->synced++;
}

static void on_failed(void *context, const struct dl_err *err)
{
    (void)err;
    ((struct tally *)context)->failed++;
}

/* Lists in pages, watches, sees a change and a removal: whatever fails once, in the end it knows what the server has. */
static bool reflect(long after)
{
    struct op_reflector *reflector = NULL;
    struct tally tally = {.changed = 0};
    struct op_reflector_options options = {.resource = &op_res_pods,
                                           .space = "a",
                                           .context = &tally,
                                           .changed = on_changed,
                                           .gone = on_gone,
                                           .synced = on_synced,
                                           .failed = on_failed,
                                           .backoff_first_ms = 1,
                                           .backoff_max_ms = 2,
                                           .page = 2,
                                           .idle_ms = 300};
    char path[64];
    fake_api_put(api, "/api/v1/namespaces/a/pods/extra", "{\"spec\":{}}");
    arm(after);
    enum dl_rc rc = op_reflector_new(rig.client, &options, &reflector, NULL);
    if (rc == DL_OK) {
        size_t watches = fake_api_requests(api, "GET", "watch=true");
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, tally.synced > 0));
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, fake_api_requests(api, "GET", "watch=true") > watches));
        snprintf(path, sizeof path, "/api/v1/namespaces/a/pods/new-%ld", after);
        QUIETLY(fake_api_put(api, path, "{\"spec\":{}}"));
        QUIETLY(fake_api_remove(api, "/api/v1/namespaces/a/pods/extra"));
        size_t there = fake_api_count(api, "/api/v1/namespaces/a/pods", NULL);
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, tally.gone == 1 && op_reflector_count(reflector) == there));
        QUIETLY(fake_api_remove(api, path));
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, tally.gone == 2));
    } else {
        CU_ASSERT_EQUAL(rc, DL_ENOMEM);
    }
    op_reflector_free(reflector);
    return disarm();
}

static void test_reflector(void)
{
    rig_start(&rig);
    api = rig.api;
    for (int i = 0; i < 3; i++) {
        char path[64];
        snprintf(path, sizeof path, "/api/v1/namespaces/a/pods/p%d", i);
        QUIETLY(fake_api_put(api, path, "{\"spec\":{\"n\":1}}"));
    }
    FAIL_EACH(40, reflect);
    rig_stop(&rig);
}

static void on_lease(void *context, bool is_leader)
{
    *(int *)context += is_leader;
}

static bool elect(long after)
{
    struct op_lease *lease = NULL;
    struct op_recorder *recorder = NULL;
    int won = 0;
    struct op_lease_options options = {.space = "ops",
                                       .name = "l",
                                       .identity = "me",
                                       .duration_ms = 3000,
                                       .renew_by_ms = 2000,
                                       .retry_ms = 1,
                                       .context = &won,
                                       .changed = on_lease};
    struct op_subject about = {"v1", "Pod", "a", "x", "uid"};
    arm(after);
    enum dl_rc rc = op_lease_new(rig.client, &options, &lease, NULL);
    if (rc == DL_OK) {
        size_t puts = fake_api_requests(api, "PUT", NULL);
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, won > 0 && fake_api_requests(api, "PUT", NULL) > puts + 2));
    }
    enum dl_rc recorded = op_recorder_new(rig.client, "c", "i", &recorder, NULL);
    if (recorded == DL_OK && rc == DL_OK) {
        op_record(recorder, &about, "Normal", "R", "A", "n");
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, op_client_pending(rig.client) == 0));
    }
    bool was_injected = disarm();
    op_recorder_free(recorder);
    op_lease_free(lease);
    fake_api_remove(api, "/apis/coordination.k8s.io/v1/namespaces/ops/leases/l");
    return was_injected;
}

static void test_lease_and_events(void)
{
    rig_start(&rig);
    api = rig.api;
    FAIL_EACH(40, elect);
    rig_stop(&rig);
}

static bool queue_up(long after)
{
    enum { KEYS = 40 };
    struct op_queue *queue = NULL;
    size_t taken = 0, refused = 0;
    arm(after);
    if (op_queue_new("q", &queue, NULL) == DL_OK) {
        for (int i = 0; i < KEYS; i++) {
            char key[16];
            snprintf(key, sizeof key, "%d", i);
            refused += (i % 2 == 0 ? op_queue_add(queue, key, 0, NULL) : op_queue_retry(queue, key, 0, NULL)) != DL_OK;
        }
        while (op_queue_take(queue, INT64_C(1) << 60) != NULL) {
            taken++;
        }
        CU_ASSERT_EQUAL(taken + refused, KEYS); /* Refused or kept, never half of it. */
    }
    bool was_injected = disarm();
    op_queue_free(queue);
    return was_injected;
}

static void test_queue(void)
{
    FAIL_EACH(100, queue_up);
}

UNIT_MAIN("kube_memory", {"config", test_config}, {"client", test_client}, {"reflector", test_reflector},
          {"lease and events", test_lease_and_events}, {"queue", test_queue})
