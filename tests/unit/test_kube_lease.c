/* op_lease (K9) and op_recorder against the fake API server. Times are shorter than the real ones. */
#include "operator/kube/events.h"
#include "operator/kube/lease.h"
#include "tests/unit/kube_rig.h"

#define LEASE_PATH "/apis/coordination.k8s.io/v1/namespaces/ops/leases/diloco-operator"
#define DURATION_MS 2000
#define RENEW_BY_MS 1000
#define RETRY_MS 100

/* One candidate: a client and a lease of its own, on a loop of its own. */
struct candidate {
    struct op_loop *loop;
    struct op_client *client;
    struct op_lease *lease;
    int won, lost;
    bool was_held_at_loss;
    bool is_released;
};

static void on_changed(void *context, bool is_leader)
{
    struct candidate *candidate = context;
    candidate->won += is_leader;
    candidate->lost += !is_leader;
    candidate->was_held_at_loss = !is_leader && op_lease_is_held(candidate->lease);
}

static void candidate_start(struct candidate *candidate, struct fake_api *api, const char *identity)
{
    struct op_config config = fake_api_config(api);
    memset(candidate, 0, sizeof *candidate);
    CU_ASSERT_EQUAL_FATAL(op_loop_new(&candidate->loop, NULL), DL_OK);
    CU_ASSERT_EQUAL_FATAL(op_client_new(candidate->loop, &config, NULL, &candidate->client, NULL), DL_OK);
    struct op_lease_options options = {.space = "ops",
                                       .name = "diloco-operator",
                                       .identity = identity,
                                       .duration_ms = DURATION_MS,
                                       .renew_by_ms = RENEW_BY_MS,
                                       .retry_ms = RETRY_MS,
                                       .context = candidate,
                                       .changed = on_changed};
    CU_ASSERT_EQUAL_FATAL(op_lease_new(candidate->client, &options, &candidate->lease, NULL), DL_OK);
}

static void candidate_stop(struct candidate *candidate)
{
    op_lease_free(candidate->lease);
    op_client_free(candidate->client);
    op_loop_free(candidate->loop);
}

static void turn(struct candidate *a, struct candidate *b)
{
    op_loop_turn(a->loop, 5);
    if (b != NULL) {
        op_loop_turn(b->loop, 5);
        CU_ASSERT_FALSE(op_lease_is_held(a->lease) && op_lease_is_held(b->lease)); /* Never both. */
    }
}

#define BOTH_UNTIL(a, b, condition)                                                                                    \
    ({                                                                                                                 \
        int64_t until_ns_ = dl_now_ns() + RIG_BOUND_NS;                                                                \
        while (!(condition) && dl_now_ns() < until_ns_) {                                                              \
            turn(a, b);                                                                                                \
        }                                                                                                              \
        (condition);                                                                                                   \
    })

static const char *lease_text(struct fake_api *api, const char *key, char text[static 128])
{
    cJSON *json = fake_api_get(api, LEASE_PATH);
    const cJSON *item = cJSON_GetObjectItem(cJSON_GetObjectItem(json, "spec"), key);
    snprintf(text, 128, "%s", cJSON_IsString(item) ? item->valuestring : "");
    if (cJSON_IsNumber(item)) {
        snprintf(text, 128, "%g", item->valuedouble);
    }
    cJSON_Delete(json);
    return text;
}

static void test_takes_and_renews(void)
{
    struct fake_api *api = fake_api_start(NULL);
    struct candidate a;
    char text[128];
    candidate_start(&a, api, "pod-a_1");
    CU_ASSERT_FALSE(op_lease_is_held(a.lease));
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.won == 1));
    CU_ASSERT_TRUE(op_lease_is_held(a.lease));
    CU_ASSERT_STRING_EQUAL(lease_text(api, "holderIdentity", text), "pod-a_1");
    CU_ASSERT_STRING_EQUAL(op_lease_holder(a.lease), "pod-a_1");
    fake_api_patch(api, LEASE_PATH, "{\"spec\":{\"strategy\":\"OldestEmulationVersion\"}}"); /* Another's field. */
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, fake_api_requests(api, "PUT", "/leases/") >= 15));
    CU_ASSERT_TRUE(op_lease_is_held(a.lease));
    CU_ASSERT_EQUAL(a.lost, 0);
    CU_ASSERT_STRING_EQUAL(lease_text(api, "strategy", text), "OldestEmulationVersion");
    CU_ASSERT_STRING_EQUAL(lease_text(api, "leaseTransitions", text), "0");
    CU_ASSERT_EQUAL(strlen(lease_text(api, "renewTime", text)), strlen("2026-01-01T00:00:00.000000Z"));
    candidate_stop(&a);
    fake_api_stop(api);
}

/* A second operator takes over once the first is silent for the whole lease, and at once when it is given back. */
static void test_takeover(void)
{
    struct fake_api *api = fake_api_start(NULL);
    struct candidate a, b;
    char text[128];
    candidate_start(&a, api, "a");
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.won == 1));
    candidate_start(&b, api, "b");
    int64_t until_ns = dl_now_ns() + 2 * DURATION_MS * DL_NS_PER_MS;
    while (dl_now_ns() < until_ns) { /* A live holder keeps it. */
        turn(&a, &b);
    }
    CU_ASSERT_EQUAL(b.won, 0);
    CU_ASSERT_STRING_EQUAL(op_lease_holder(b.lease), "a");
    int64_t silent_ns = dl_now_ns();
    while (b.won == 0 && dl_now_ns() < silent_ns + RIG_BOUND_NS) { /* a's process hangs. */
        op_loop_turn(b.loop, 5);
        CU_ASSERT_FALSE(op_lease_is_held(a.lease) && op_lease_is_held(b.lease));
    }
    CU_ASSERT_EQUAL(b.won, 1);
    CU_ASSERT(dl_now_ns() - silent_ns >= (DURATION_MS - 2 * RETRY_MS) * DL_NS_PER_MS);
    CU_ASSERT_FALSE(op_lease_is_held(a.lease)); /* By the clock alone, before its loop has turned. */
    CU_ASSERT_STRING_EQUAL(lease_text(api, "leaseTransitions", text), "1");
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, &b, a.lost == 1)); /* It wakes up. */
    CU_ASSERT_FALSE(a.was_held_at_loss);
    candidate_stop(&a);
    candidate_stop(&b);
    fake_api_stop(api);
}

static void on_released(void *context)
{
    ((struct candidate *)context)->is_released = true;
}

static void test_release(void)
{
    struct fake_api *api = fake_api_start(NULL);
    struct candidate a, b;
    candidate_start(&a, api, "a");
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.won == 1));
    candidate_start(&b, api, "b");
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, &b, op_lease_holder(b.lease)[0] == 'a'));
    int64_t start_ns = dl_now_ns();
    op_lease_release(a.lease, 1000, on_released, &a);
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, &b, a.is_released && b.won == 1));
    CU_ASSERT(dl_now_ns() - start_ns < (DURATION_MS - 300) * DL_NS_PER_MS); /* Without waiting for its end. */
    CU_ASSERT_EQUAL(a.lost, 1);
    /* When the server does not answer, the release ends all the same. */
    fake_api_fault(api, (struct fake_fault){.kind = FAKE_STALL, .times = -1});
    op_lease_release(b.lease, 200, on_released, &b);
    CU_ASSERT_TRUE(BOTH_UNTIL(&b, NULL, b.is_released));
    fake_api_clear_faults(api);
    candidate_stop(&a);
    candidate_stop(&b);
    fake_api_stop(api);
}

/* The API server is gone: writes stop within the renewal time, and start again once it is back. */
static void test_loss_stops_writes(void)
{
    struct fake_api *api = fake_api_start(NULL);
    struct candidate a;
    struct rig_answer answer;
    struct op_ref ref = RIG_POD("x");
    candidate_start(&a, api, "a");
    const char *pod = "{\"metadata\":{\"name\":\"x\"}}";
    CU_ASSERT_EQUAL(op_api_create(a.client, &ref, pod, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, answer.calls == 1));
    CU_ASSERT_EQUAL(answer.rc, a.won == 0 ? DL_EDENIED : DL_OK);
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.won == 1));
    fake_api_fault(api, (struct fake_fault){.kind = FAKE_STALL, .times = -1});
    int64_t start_ns = dl_now_ns();
    CU_ASSERT_EQUAL(op_api_create(a.client, &ref, pod, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.lost == 1));
    CU_ASSERT(dl_now_ns() - start_ns < (RENEW_BY_MS + 500) * DL_NS_PER_MS);
    CU_ASSERT_EQUAL(answer.calls, 1); /* Broken off by the loss, not by its own deadline. */
    CU_ASSERT_EQUAL(answer.rc, DL_EDENIED);
    fake_api_clear_faults(api);
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.won == 2));
    candidate_stop(&a);
    fake_api_stop(api);
}

/* Deleted by hand, taken by hand, races and failures. */
static void test_weather(void)
{
    struct fake_api *api = fake_api_start(NULL);
    struct candidate a;
    candidate_start(&a, api, "a");
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.won == 1));
    CU_ASSERT_TRUE(fake_api_remove(api, LEASE_PATH));
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, fake_api_requests(api, "POST", "/leases") == 2));
    CU_ASSERT_EQUAL(a.lost, 0);
    fake_api_fault(api, (struct fake_fault){.part = "/leases/", .status = 500, .times = 2});
    fake_api_fault(api, (struct fake_fault){.part = "/leases/", .status = 429, .times = 1});
    fake_api_fault(api, (struct fake_fault){.part = "/leases/", .kind = FAKE_CLOSE_AFTER, .times = 1});
    size_t puts = fake_api_requests(api, "PUT", NULL);
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, fake_api_requests(api, "PUT", NULL) > puts + 5));
    CU_ASSERT_EQUAL(a.lost, 0);
    fake_api_patch(api, LEASE_PATH, "{\"spec\":{\"holderIdentity\":\"intruder\",\"leaseDurationSeconds\":1}}");
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.lost == 1));
    CU_ASSERT_TRUE(BOTH_UNTIL(&a, NULL, a.won == 2)); /* It says nothing more: its second is over. */
    struct dl_buf text;
    struct dl_metrics metrics;
    dl_buf_init(&text, 1 << 16);
    dl_metrics_begin(&metrics, &text);
    op_lease_metrics(a.lease, &metrics);
    CU_ASSERT_PTR_NOT_NULL(strstr(text.data, "leader_election_master_status{name=\"diloco-operator\"} 1")); /* K12 */
    dl_buf_release(&text);
    candidate_stop(&a);
    fake_api_stop(api);
}

/* --- events --- */

static const struct op_subject job = {"diloco.dev/v1alpha1", "DecoupledDiLoCoJob", "team", "demo", "uid-1"};

static void test_events(void)
{
    struct rig rig;
    struct op_recorder *recorder = NULL;
    rig_start(&rig);
    CU_ASSERT_EQUAL_FATAL(op_recorder_new(rig.client, "diloco.dev/operator", "pod-1", &recorder, NULL), DL_OK);
    for (int i = 0; i < 5; i++) {
        op_record(recorder, &job, "Warning", "QuotaExceeded", "CreatePod", "quota \"small\" is used up (%d)", i);
    }
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, fake_api_count(rig.api, "/apis/events.k8s.io/v1/events", NULL) == 1));
    op_record(recorder, &job, "Normal", "LearnerReplaced", "CreatePod", "learner 3");
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, fake_api_count(rig.api, "/apis/events.k8s.io/v1/events", NULL) == 2));
    for (int i = 0; i < 10; i++) {
        op_loop_turn(rig.loop, 2);
    }
    CU_ASSERT_EQUAL(fake_api_requests(rig.api, "POST", "/events"), 2); /* Repeats become a series. */
    struct dl_buf names;
    dl_buf_init(&names, 4096);
    fake_api_count(rig.api, "/apis/events.k8s.io/v1/namespaces/team/events", &names);
    char path[400];
    snprintf(path, sizeof path, "/apis/events.k8s.io/v1/namespaces/team/events/%.*s", (int)strcspn(names.data, " "),
             names.data);
    cJSON *event = fake_api_get(rig.api, path);
    CU_ASSERT_PTR_NOT_NULL_FATAL(event);
    CU_ASSERT_STRING_EQUAL(cJSON_GetObjectItem(event, "note")->valuestring, "quota \"small\" is used up (0)");
    CU_ASSERT_STRING_EQUAL(cJSON_GetObjectItem(event, "reportingController")->valuestring, "diloco.dev/operator");
    CU_ASSERT_STRING_EQUAL(cJSON_GetObjectItem(cJSON_GetObjectItem(event, "regarding"), "uid")->valuestring, "uid-1");
    cJSON_Delete(event);
    dl_buf_release(&names);
    op_recorder_free(recorder);
    rig_stop(&rig);
}

/* Events are best effort: a server that does not take them costs bounded memory and no waiting. */
static void test_events_are_bounded(void)
{
    struct rig rig;
    struct op_recorder *recorder = NULL;
    rig_start(&rig);
    CU_ASSERT_EQUAL_FATAL(op_recorder_new(rig.client, "diloco.dev/operator", "pod-1", &recorder, NULL), DL_OK);
    fake_api_fault(rig.api, (struct fake_fault){.part = "/events", .kind = FAKE_STALL, .times = -1});
    for (int i = 0; i < OP_RECORDER_KEYS_MAX * 2; i++) {
        char name[32];
        snprintf(name, sizeof name, "job-%d", i);
        struct op_subject about = job;
        about.name = name;
        about.uid = name;
        op_record(recorder, &about, "Normal", "X", "Y", "z");
    }
    CU_ASSERT(op_client_pending(rig.client) <= OP_RECORDER_IN_FLIGHT_MAX);
    struct dl_buf text;
    struct dl_metrics metrics;
    dl_buf_init(&text, 1 << 16);
    dl_metrics_begin(&metrics, &text);
    op_recorder_metrics(recorder, &metrics);
    CU_ASSERT_PTR_NULL(strstr(text.data, "diloco_events_dropped_total 0"));
    dl_buf_release(&text);
    op_recorder_free(recorder);
    CU_ASSERT_EQUAL(op_client_pending(rig.client), 0);
    rig_stop(&rig);
}

UNIT_MAIN("kube_lease", {"takes and renews", test_takes_and_renews}, {"takeover", test_takeover},
          {"release", test_release}, {"loss stops writes", test_loss_stops_writes}, {"weather", test_weather},
          {"events", test_events}, {"events are bounded", test_events_are_bounded})
