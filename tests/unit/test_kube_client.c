/* op_client and op_api against a server that answers by script: what other clients fell into. */
#include "tests/unit/fake_tls.h"
#include "tests/unit/kube_rig.h"

static void test_verbs(void)
{
    struct rig rig;
    struct rig_answer answer;
    struct op_ref ref = RIG_POD("x");
    rig_start(&rig);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(rig_create(&rig, &answer), DL_OK);
    CU_ASSERT_EQUAL(rig_create(&rig, &answer), DL_EEXISTS); /* Deterministic names: a repeat is 409. */
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(answer.body, "\"uid\""));

    /* Apply: only what is in the text changes, and fields that nobody here knows stay. */
    fake_api_patch(rig.api, RIG_POD_PATH, "{\"spec\":{\"unknown\":{\"deep\":[1,2,3]}}}");
    const char *applied = "{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"x\"},\"spec\":{\"n\":2}}";
    CU_ASSERT_EQUAL(op_api_apply(rig.client, &ref, applied, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(answer.body, "\"deep\":[1,2,3]"));
    CU_ASSERT_PTR_NOT_NULL(strstr(answer.body, "\"n\":2"));
    CU_ASSERT_EQUAL(fake_api_requests(rig.api, "PATCH", "fieldManager=diloco-operator&force=true"), 1);

    struct op_ref status = ref;
    status.subresource = "status";
    CU_ASSERT_EQUAL(
        op_api_merge_patch(rig.client, &status, "{\"status\":{\"s\":7},\"spec\":{\"n\":9}}", rig_to(&answer), NULL),
        DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_PTR_NOT_NULL(strstr(answer.body, "\"s\":7"));
    CU_ASSERT_PTR_NOT_NULL(strstr(answer.body, "\"n\":2")); /* Through its subresource the status alone changes. */
    rig_stop(&rig);
}

static void test_update_conflict_and_delete(void)
{
    struct rig rig;
    struct rig_answer answer;
    struct op_ref ref = RIG_POD("x");
    rig_start(&rig);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    const char *stale = "{\"metadata\":{\"name\":\"x\",\"resourceVersion\":\"1\"},\"spec\":{}}";
    struct op_request put = {.method = "PUT", .body = stale, .size = strlen(stale)};
    CU_ASSERT_EQUAL(rig_request(&rig, put, &answer), DL_ECONFLICT);

    /* Another pod of the same name is not the one that was meant. */
    struct op_delete_options other = {.uid = "not-this-one", .grace_seconds = -1};
    CU_ASSERT_EQUAL(op_api_delete(rig.client, &ref, &other, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_ECONFLICT);

    struct op_delete_options now = {.grace_seconds = 0, .propagation = "Background"};
    CU_ASSERT_EQUAL(op_api_delete(rig.client, &ref, &now, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(rig.api->last_body, "\"gracePeriodSeconds\":0"));
    CU_ASSERT_PTR_NOT_NULL(strstr(rig.api->last_body, "\"propagationPolicy\":\"Background\""));
    CU_ASSERT_EQUAL(op_api_delete(rig.client, &ref, NULL, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_ENOTFOUND);
    CU_ASSERT_PTR_NULL(strstr(rig.api->last_body, "gracePeriodSeconds"));
    rig_stop(&rig);
}

/* An empty name would address the whole collection. */
static void test_refuses_empty_names(void)
{
    struct rig rig;
    struct rig_answer answer;
    struct dl_err err;
    rig_start(&rig);
    struct op_ref no_name = RIG_POD(""), no_space = {.resource = &op_res_pods, .name = "x"}, dots = RIG_POD("..");
    CU_ASSERT_EQUAL(op_api_delete(rig.client, &no_name, NULL, rig_to(&answer), &err), DL_EINVAL);
    CU_ASSERT_EQUAL(op_api_delete(rig.client, &no_space, NULL, rig_to(&answer), &err), DL_EINVAL);
    CU_ASSERT_EQUAL(op_api_delete(rig.client, &dots, NULL, rig_to(&answer), &err), DL_EINVAL);
    CU_ASSERT_EQUAL(op_api_create(rig.client, &no_space, RIG_POD_TEXT, rig_to(&answer), &err), DL_EINVAL);
    CU_ASSERT_EQUAL(op_client_pending(rig.client), 0);
    CU_ASSERT_EQUAL(fake_api_requests(rig.api, NULL, NULL), 0);
    rig_stop(&rig);
}

/* Every status becomes its own class, and none but 2xx is a success. K6 rests on this. */
static void test_every_status(void)
{
    static const struct {
        int status;
        const char *reason;
        enum dl_rc rc;
    } rows[] = {
        {400, "BadRequest", DL_EINVAL},
        {401, "Unauthorized", DL_EDENIED},
        {403, "Forbidden", DL_EDENIED},
        {404, "NotFound", DL_ENOTFOUND},
        {405, "MethodNotAllowed", DL_EINVAL},
        {408, "Timeout", DL_ETIMEOUT},
        {409, "AlreadyExists", DL_EEXISTS},
        {409, "Conflict", DL_ECONFLICT},
        {410, "Gone", DL_EGONE},
        {413, "TooLarge", DL_EINVAL},
        {415, "UnsupportedMediaType", DL_EINVAL},
        {422, "Invalid", DL_EINVAL},
        {429, "TooManyRequests", DL_ETIMEOUT},
        {500, "InternalError", DL_ENET},
        {502, "", DL_ENET},
        {503, "ServiceUnavailable", DL_ENET},
        {504, "Timeout", DL_ETIMEOUT},
        {400, "Expired", DL_EGONE},
        {301, "", DL_EPROTO},
    };
    struct rig rig;
    rig_start(&rig);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    for (size_t i = 0; i < DL_COUNT_OF(rows); i++) {
        struct rig_answer answer;
        fake_api_fault(rig.api,
                       (struct fake_fault){
                           .status = rows[i].status, .reason = rows[i].reason, .message = "why it was", .times = -1});
        struct op_request request = {.method = "GET", .path = RIG_POD_PATH, .is_once = true};
        struct op_reply_to to = rig_to(&answer);
        request.done = to.done;
        request.context = to.context;
        CU_ASSERT_EQUAL(op_client_send(rig.client, &request, NULL, NULL), DL_OK);
        CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
        CU_ASSERT_EQUAL(answer.rc, rows[i].rc);
        CU_ASSERT_EQUAL(answer.status, rows[i].status);
        CU_ASSERT_STRING_EQUAL(answer.reason, rows[i].reason);
        CU_ASSERT_PTR_NOT_NULL(strstr(answer.text, "why it was"));
        CU_ASSERT_PTR_NOT_NULL(strstr(answer.text, "GET " RIG_POD_PATH));
        fake_api_clear_faults(rig.api);
    }
    struct rig_answer answer;
    fake_api_fault(rig.api, (struct fake_fault){.status = 403,
                                                .reason = "Forbidden",
                                                .message = "pods is forbidden: exceeded quota: small"});
    CU_ASSERT_EQUAL(rig_create(&rig, &answer), DL_EDENIED);
    CU_ASSERT_TRUE(answer.is_quota);
    rig_stop(&rig);
}

/* 429 and 5xx with Retry-After are waited out, and nothing is lost or done twice. */
static void test_retries_by_cause(void)
{
    struct rig rig;
    struct rig_answer answer;
    rig_start(&rig);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    fake_api_fault(rig.api, (struct fake_fault){.status = 429, .reason = "TooManyRequests", .times = 2});
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT_EQUAL(answer.tries, 3);
    fake_api_fault(rig.api, (struct fake_fault){.status = 500, .times = 1});
    fake_api_fault(rig.api, (struct fake_fault){.kind = FAKE_CLOSE, .times = 1});
    fake_api_fault(rig.api, (struct fake_fault){.kind = FAKE_SHORT, .times = 1});
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT(answer.tries >= 3);
    int64_t start_ns = dl_now_ns();
    fake_api_fault(rig.api, (struct fake_fault){.status = 503, .retry_after_s = 1});
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    CU_ASSERT(dl_now_ns() - start_ns >= DL_NS_PER_SECOND);

    /* A POST whose fate is unknown is not repeated; one that was refused for load is. */
    fake_api_remove(rig.api, RIG_POD_PATH);
    fake_api_fault(rig.api, (struct fake_fault){.method = "POST", .status = 500});
    CU_ASSERT_EQUAL(rig_create(&rig, &answer), DL_ENET);
    CU_ASSERT_EQUAL(answer.tries, 1);
    fake_api_fault(rig.api, (struct fake_fault){.method = "POST", .status = 429});
    CU_ASSERT_EQUAL(rig_create(&rig, &answer), DL_OK);
    CU_ASSERT_EQUAL(answer.tries, 2);
    rig_stop(&rig);
}

/* A transport failure is never taken for an empty success. */
static void test_transport_failures(void)
{
    struct rig rig;
    rig_start(&rig);
    static const enum fake_fault_kind kinds[] = {FAKE_CLOSE, FAKE_SHORT};
    for (size_t i = 0; i < DL_COUNT_OF(kinds); i++) {
        struct rig_answer answer;
        fake_api_fault(rig.api, (struct fake_fault){.kind = kinds[i], .times = -1});
        CU_ASSERT_EQUAL(rig_get_once(&rig, &answer), DL_ENET);
        CU_ASSERT_NOT_EQUAL(answer.transport, 0);
        fake_api_clear_faults(rig.api);
    }
    /* No answer at all: the deadline ends it. */
    struct rig_answer answer;
    fake_api_fault(rig.api, (struct fake_fault){.kind = FAKE_STALL, .times = -1});
    struct op_reply_to to = rig_to(&answer);
    struct op_request request = {
        .method = "GET", .path = RIG_POD_PATH, .timeout_ms = 300, .done = to.done, .context = to.context};
    CU_ASSERT_EQUAL(op_client_send(rig.client, &request, NULL, NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_ETIMEOUT);
    rig_stop(&rig);
}

static void test_server_down_then_up(void)
{
    struct rig rig;
    struct rig_answer answer;
    struct fake_api *down = fake_api_start(NULL);
    struct op_config config = fake_api_config(down);
    config.server = strdup(config.server);
    fake_api_stop(down); /* Its port answers nobody now. */
    rig.api = fake_api_start(NULL);
    rig_start_with(&rig, &config, NULL);
    free(config.server);
    struct op_reply_to to = rig_to(&answer);
    struct op_request request = {.method = "POST",
                                 .path = "/api/v1/namespaces/a/pods",
                                 .body = RIG_POD_TEXT,
                                 .size = strlen(RIG_POD_TEXT),
                                 .timeout_ms = 1500,
                                 .done = to.done,
                                 .context = to.context};
    CU_ASSERT_EQUAL(op_client_send(rig.client, &request, NULL, NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_ENET);
    CU_ASSERT(answer.tries >= 2); /* A refused connection had no effect: even a POST is tried again. */
    rig_stop(&rig);
}

static void test_one_connection_is_reused(void)
{
    struct rig rig;
    struct rig_answer answer;
    rig_start(&rig);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    for (int i = 0; i < 50; i++) {
        CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_OK);
    }
    CU_ASSERT_EQUAL(fake_api_connections(rig.api), 1);
    rig_stop(&rig);
}

static void test_bounds_and_rate(void)
{
    struct rig rig;
    rig.api = fake_api_start(NULL);
    struct op_config config = fake_api_config(rig.api);
    struct op_client_options options = {.qps = 100, .burst = 10, .in_flight_max = 3};
    rig_start_with(&rig, &config, &options);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    struct rig_answer answers[40];
    struct op_ref ref = RIG_POD("x");
    int64_t start_ns = dl_now_ns();
    for (size_t i = 0; i < DL_COUNT_OF(answers); i++) {
        CU_ASSERT_EQUAL(op_api_get(rig.client, &ref, rig_to(&answers[i]), NULL), DL_OK);
    }
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, op_client_pending(rig.client) == 0));
    /* 10 at once, 30 more at 100 a second. */
    CU_ASSERT(dl_now_ns() - start_ns >= 280 * DL_NS_PER_MS);
    CU_ASSERT(fake_api_connections(rig.api) <= 3);
    /* No more than the limit may wait. */
    enum dl_rc rc = DL_OK;
    uint32_t sent = 0;
    while (rc == DL_OK && sent <= OP_CLIENT_WAITING_MAX) {
        rc = op_api_get(rig.client, &ref, (struct op_reply_to){NULL, NULL, NULL}, NULL);
        sent += rc == DL_OK;
    }
    CU_ASSERT_EQUAL(rc, DL_ENOMEM);
    CU_ASSERT_EQUAL(sent, OP_CLIENT_WAITING_MAX);
    rig_stop(&rig); /* With all of them waiting. */
}

/* Events give way to what changes something, but not for ever; both are bounded by in_flight_max. */
static void test_background_gives_way(void)
{
    struct rig rig;
    rig.api = fake_api_start(NULL);
    struct op_config config = fake_api_config(rig.api);
    struct op_client_options options = {.qps = 10000, .burst = 10000, .in_flight_max = 1};
    rig_start_with(&rig, &config, &options);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    struct rig_answer events[8], others[40];
    struct op_ref event = {.resource = &op_res_events, .space = "a", .name = "e"}, pod = RIG_POD("x");
    const char *text = "{\"apiVersion\":\"events.k8s.io/v1\",\"kind\":\"Event\",\"metadata\":{\"generateName\":\"e\"}}";
    for (size_t i = 0; i < DL_COUNT_OF(events); i++) {
        CU_ASSERT_EQUAL(op_api_create(rig.client, &event, text, rig_to(&events[i]), NULL), DL_OK);
    }
    CU_ASSERT_EQUAL(op_client_backlog(rig.client), 0);
    for (size_t i = 0; i < DL_COUNT_OF(others); i++) {
        CU_ASSERT_EQUAL(op_api_get(rig.client, &pod, rig_to(&others[i]), NULL), DL_OK);
    }
    CU_ASSERT_EQUAL(op_client_backlog(rig.client), DL_COUNT_OF(others));
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, others[DL_COUNT_OF(others) - 1].calls > 0));
    int done = 0;
    for (size_t i = 0; i < DL_COUNT_OF(events); i++) {
        done += events[i].calls;
    }
    CU_ASSERT(done >= 4 && done <= 40 / (OP_CLIENT_BACKGROUND_SHARE - 1) + 1);
    CU_ASSERT_EQUAL(op_client_backlog(rig.client), 0);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, op_client_pending(rig.client) == 0));
    rig_stop(&rig);
}

static void test_cancel(void)
{
    struct rig rig;
    struct rig_answer answer, other;
    uint64_t id = 0;
    rig_start(&rig);
    fake_api_put(rig.api, RIG_POD_PATH, RIG_POD_TEXT);
    fake_api_fault(rig.api, (struct fake_fault){.kind = FAKE_STALL});
    struct op_reply_to to = rig_to(&answer);
    to.id = &id;
    struct op_ref ref = RIG_POD("x");
    CU_ASSERT_EQUAL(op_api_get(rig.client, &ref, to, NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, fake_api_requests(rig.api, "GET", NULL) == 1));
    op_client_cancel(rig.client, id);
    op_client_cancel(rig.client, id); /* Twice is fine. */
    CU_ASSERT_EQUAL(op_client_pending(rig.client), 0);
    CU_ASSERT_EQUAL(rig_get(&rig, &other), DL_OK);
    CU_ASSERT_EQUAL(answer.calls, 0);
    rig_stop(&rig);
}

static bool guard_open;
static bool may_write(void *context)
{
    (void)context;
    return guard_open;
}

/* K9: without the lease nothing is written, waiting and in flight included; reading goes on. */
static void test_guard(void)
{
    struct rig rig;
    struct rig_answer answer, waiting;
    rig_start(&rig);
    op_client_set_guard(rig.client, may_write, NULL);
    guard_open = false;
    CU_ASSERT_EQUAL(rig_create(&rig, &answer), DL_EDENIED);
    CU_ASSERT_EQUAL(answer.status, 0);
    CU_ASSERT_EQUAL(fake_api_requests(rig.api, "POST", NULL), 0);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_ENOTFOUND);
    guard_open = true;
    fake_api_fault(rig.api, (struct fake_fault){.method = "POST", .kind = FAKE_STALL});
    struct op_ref ref = RIG_POD("x");
    CU_ASSERT_EQUAL(op_api_create(rig.client, &ref, RIG_POD_TEXT, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, fake_api_requests(rig.api, "POST", NULL) == 1));
    CU_ASSERT_EQUAL(op_api_create(rig.client, &ref, RIG_POD_TEXT, rig_to(&waiting), NULL), DL_OK);
    guard_open = false;
    op_client_abort_writes(rig.client);
    CU_ASSERT_EQUAL(answer.calls, 1);
    CU_ASSERT_EQUAL(answer.rc, DL_EDENIED);
    CU_ASSERT_EQUAL(waiting.calls, 1);
    CU_ASSERT_EQUAL(waiting.rc, DL_EDENIED);
    CU_ASSERT_EQUAL(fake_api_count(rig.api, "/api/v1/pods", NULL), 0);
    rig_stop(&rig);
}

static void test_fetch_and_proxy(void)
{
    struct rig rig;
    struct rig_answer answer;
    char url[128], long_text[3000];
    rig.api = fake_api_start(NULL);
    struct op_config config = fake_api_config(rig.api);
    config.token = (char *)(uintptr_t) "secret";
    rig_start_with(&rig, &config, NULL);
    memset(long_text, 'x', sizeof long_text - 1);
    long_text[sizeof long_text - 1] = 0;
    snprintf(url, sizeof url, "%s/status", rig.api->url);
    fake_api_fault(rig.api,
                   (struct fake_fault){.part = "/status", .kind = FAKE_RAW, .message = "{\"phase\":\"Training\"}"});
    CU_ASSERT_EQUAL(op_fetch(rig.client, url, 2000, 1000, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_OK);
    CU_ASSERT_STRING_EQUAL(answer.body, "{\"phase\":\"Training\"}");
    CU_ASSERT_STRING_EQUAL(rig.api->last_authorization, ""); /* Our token is not shown to others. */
    fake_api_fault(rig.api, (struct fake_fault){.part = "/status", .kind = FAKE_RAW, .message = long_text});
    CU_ASSERT_EQUAL(op_fetch(rig.client, url, 2000, 1000, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_EPROTO);
    CU_ASSERT_PTR_NOT_NULL(strstr(answer.text, "larger"));
    fake_api_fault(rig.api,
                   (struct fake_fault){.part = "/pods/p-0%3A7000/proxy/status", .kind = FAKE_RAW, .message = "{}"});
    CU_ASSERT_EQUAL(op_api_pod_proxy(rig.client, "a", "p-0", 7000, "status", 2000, rig_to(&answer), NULL), DL_OK);
    CU_ASSERT_TRUE(RIG_UNTIL(&rig, answer.calls > 0));
    CU_ASSERT_EQUAL(answer.rc, DL_OK);
    CU_ASSERT_STRING_EQUAL(rig.api->last_authorization, "Bearer secret");
    rig_stop(&rig);
}

/* K12: the names that dashboards ask for. */
static void test_metrics(void)
{
    struct rig rig;
    struct rig_answer answer;
    struct dl_buf text;
    struct dl_metrics metrics;
    rig_start(&rig);
    CU_ASSERT_EQUAL(rig_get(&rig, &answer), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(rig_create(&rig, &answer), DL_OK);
    dl_buf_init(&text, 1 << 20);
    dl_metrics_begin(&metrics, &text);
    op_client_metrics(rig.client, &metrics);
    CU_ASSERT_PTR_NOT_NULL(
        strstr(text.data, "rest_client_requests_total{code=\"404\",method=\"GET\",host=\"127.0.0.1:"));
    CU_ASSERT_PTR_NOT_NULL(
        strstr(text.data, "rest_client_requests_total{code=\"201\",method=\"POST\",host=\"127.0.0.1:"));
    CU_ASSERT_PTR_NOT_NULL(strstr(text.data, "rest_client_request_duration_seconds_count{verb=\"GET\"} 1"));
    CU_ASSERT_PTR_NOT_NULL(strstr(text.data, "rest_client_rate_limiter_duration_seconds_count{host="));
    dl_buf_release(&text);
    rig_stop(&rig);
}

UNIT_MAIN("kube_client", {"verbs", test_verbs},
          {"update conflict, delete with preconditions", test_update_conflict_and_delete},
          {"empty names are refused", test_refuses_empty_names}, {"every status", test_every_status},
          {"retries by cause", test_retries_by_cause}, {"transport failures", test_transport_failures},
          {"server down", test_server_down_then_up}, {"connections are reused", test_one_connection_is_reused},
          {"bounds and rate", test_bounds_and_rate}, {"events give way", test_background_gives_way},
          {"cancel", test_cancel}, {"K9 guard", test_guard}, {"fetch and proxy", test_fetch_and_proxy},
          {"K12 metrics", test_metrics})
