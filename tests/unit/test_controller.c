/* The controller against a fake API server: jobs become pods and end; refusals, losses, suspension, a second operator. */
#include <stdlib.h>
#include <string.h>

#include "operator/controller/controller.h"
#include "operator/reconcile/json.h"
#include "tests/unit/kube_rig.h"

#define JOBS "/apis/diloco.dev/v1alpha1/namespaces/a/decoupleddilocojobs"
#define JOB JOBS "/demo"
#define EVENTS "/apis/events.k8s.io/v1/namespaces/a/events"
#define PODS "/api/v1/namespaces/a/pods"
#define SET "/apis/apps/v1/namespaces/a/statefulsets/demo-syncer"

struct world {
    struct rig rig;
    struct op_controller *controller;
    struct op_controller_options options;
    _Atomic(const char *) syncer_says; /* Body of /status; NULL: nobody answers. */
    bool workers_leave;                /* With 0, as they do when the job has ended. */
};

static const char training[] =
    "{\"job\":\"demo\",\"shard\":0,\"phase\":\"Training\",\"round\":3,\"step\":50,\"tokens\":900,"
    "\"tokenBudget\":1000,\"loss\":2.5,\"quorum\":{\"have\":2,\"need\":1},\"connected\":2}";
static const char succeeded[] =
    "{\"job\":\"demo\",\"shard\":0,\"phase\":\"Ended\",\"result\":\"succeeded\",\"round\":9,"
    "\"step\":99,\"tokens\":1000,\"tokenBudget\":1000,\"quorum\":{\"have\":0,\"need\":1}}";

static bool answer_for_syncers(void *context, struct fake_conn *conn, const struct fake_request *request)
{
    struct world *w = context;
    if (strstr(request->path, "/proxy/status") == NULL) {
        return false;
    }
    const char *says = w->syncer_says;
    return says != NULL ? fake_answer(conn, 200, says, 0)
                        : fake_answer_status(conn, 503, "ServiceUnavailable", "no endpoints", 0);
}

static void start_controller(struct world *w)
{
    struct dl_err err = {.text = ""};
    enum dl_rc rc = op_controller_new(w->rig.client, &w->options, &w->controller, &err);
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
}

static void world_start(struct world *w)
{
    *w = (struct world){.syncer_says = training};
    w->rig.api = fake_api_start(NULL);
    w->rig.api->hook = answer_for_syncers;
    w->rig.api->hook_context = w;
    struct op_config config = fake_api_config(w->rig.api);
    rig_start_with(&w->rig, &config, &(struct op_client_options){.qps = 5000, .burst = 5000});
    w->options = (struct op_controller_options){
        .render = {.syncer_image = "syncer:1", .worker_image = "worker:1"},
        .via_proxy = true,
        .key_space = "diloco-system",
        .key_name = "operator-key",
        .instance = "test",
        .limits = op_limits_default,
        .poll_ns = 50 * DL_NS_PER_MS,
    };
    w->options.limits.backoff_first_ns = 20 * DL_NS_PER_MS;
    w->options.limits.finish_ns = DL_NS_PER_SECOND;
    start_controller(w);
}

static void world_stop(struct world *w)
{
    op_controller_free(w->controller);
    rig_stop(&w->rig);
}

static void put_job(struct world *w, const char *more)
{
    char text[2048];
    snprintf(text, sizeof text,
             "{\"apiVersion\":\"diloco.dev/v1alpha1\",\"kind\":\"DecoupledDiLoCoJob\",\"spec\":{\"training\":{"
             "\"tokenBudget\":1000},%s}}",
             more);
    fake_api_put(w->rig.api, JOB, text);
}

/* --- what others do in a cluster --- */

static const cJSON *member(const cJSON *object, const char *key)
{
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

static void make_syncer(struct world *w, const cJSON *set, int shard)
{
    char path[128];
    snprintf(path, sizeof path, PODS "/demo-syncer-%d", shard);
    cJSON *pod = cJSON_Duplicate(member(member(set, "spec"), "template"), true);
    char *text = cJSON_PrintUnformatted(pod);
    fake_api_put(w->rig.api, path, text);
    free(text);
    cJSON_Delete(pod);
    fake_api_patch(w->rig.api, path,
                   "{\"spec\":{\"nodeName\":\"n1\"},\"status\":{\"phase\":\"Running\",\"podIP\":\"127.0.0.1\","
                   "\"conditions\":[{\"type\":\"Ready\",\"status\":\"True\"}],\"containerStatuses\":[{\"name\":"
                   "\"syncer\",\"state\":{\"running\":{\"startedAt\":\"2026-01-01T00:00:00Z\"}}}]}}");
}

/* The StatefulSet's controller. */
static void run_set(struct world *w)
{
    cJSON *set = fake_api_get(w->rig.api, SET);
    const cJSON *replicas = member(member(set, "spec"), "replicas");
    int wanted = cJSON_IsNumber(replicas) ? replicas->valueint : 0;
    for (int shard = 0; shard < 4; shard++) {
        char path[128];
        snprintf(path, sizeof path, PODS "/demo-syncer-%d", shard);
        cJSON *pod = fake_api_get(w->rig.api, path);
        if (pod == NULL && shard < wanted) {
            make_syncer(w, set, shard);
        } else if (pod != NULL && shard >= wanted) {
            fake_api_remove(w->rig.api, path);
        }
        cJSON_Delete(pod);
    }
    cJSON_Delete(set);
}

/* Scheduler and kubelet. */
static void run_pods(struct world *w)
{
    struct dl_buf names;
    dl_buf_init(&names, 65536);
    fake_api_count(w->rig.api, PODS, &names);
    for (char *rest = names.data, *name; rest != NULL && (name = strsep(&rest, " ")) != NULL;) {
        char path[256];
        snprintf(path, sizeof path, PODS "/%s", name);
        cJSON *pod = fake_api_get(w->rig.api, path);
        if (pod != NULL && member(member(pod, "status"), "phase") == NULL) {
            fake_api_patch(
                w->rig.api, path,
                "{\"spec\":{\"nodeName\":\"n1\"},\"status\":{\"phase\":\"Running\",\"conditions\":[{\"type\":"
                "\"Ready\",\"status\":\"True\"}],\"containerStatuses\":[{\"state\":{\"running\":{"
                "\"startedAt\":\"2026-01-01T00:00:00Z\"}}}]}}");
        }
        if (pod != NULL && w->workers_leave && strstr(name, "syncer") == NULL) {
            fake_api_patch(w->rig.api, path,
                           "{\"status\":{\"phase\":\"Succeeded\",\"containerStatuses\":[{\"state\":{\"running\":null,"
                           "\"terminated\":{\"exitCode\":0}}}]}}");
        }
        cJSON_Delete(pod);
    }
    dl_buf_release(&names);
}

/* How many objects of a collection are as asked. */
static size_t count_if(struct world *w, const char *collection,
                       bool (*is_one)(struct world *w, const char *name, const char *what), const char *what)
{
    struct dl_buf names;
    size_t count = 0;
    dl_buf_init(&names, 65536);
    fake_api_count(w->rig.api, collection, &names);
    for (char *rest = names.data, *name; rest != NULL && (name = strsep(&rest, " ")) != NULL;) {
        count += is_one(w, name, what) ? 1 : 0;
    }
    dl_buf_release(&names);
    return count;
}

static bool has_part(struct world *w, const char *name, const char *part)
{
    (void)w;
    return strstr(name, part) != NULL;
}

static size_t count_pods(struct world *w, const char *part)
{
    return count_if(w, PODS, has_part, part);
}

static bool has_pod(struct world *w, const char *name)
{
    char path[256];
    snprintf(path, sizeof path, PODS "/%s", name);
    cJSON *pod = fake_api_get(w->rig.api, path);
    cJSON_Delete(pod);
    return pod != NULL;
}

/* A text at status.<key>, or of a condition: "Degraded" gives its "status/reason". */
static void look(struct world *w, const char *what, char out[256])
{
    cJSON *job = fake_api_get(w->rig.api, JOB);
    const cJSON *status = member(job, "status"), *item;
    snprintf(out, 256, "%s", cJSON_IsString(member(status, what)) ? member(status, what)->valuestring : "");
    cJSON_ArrayForEach(item, member(status, "conditions"))
    {
        if (strcmp(member(item, "type")->valuestring, what) == 0) {
            snprintf(out, 256, "%s/%s", member(item, "status")->valuestring, member(item, "reason")->valuestring);
        }
    }
    cJSON_Delete(job);
}

static bool says(struct world *w, const char *what, const char *value)
{
    char text[256];
    look(w, what, text);
    return strcmp(text, value) == 0;
}

static bool is_there(struct world *w, const char *path)
{
    cJSON *object = fake_api_get(w->rig.api, path);
    bool found = object != NULL;
    cJSON_Delete(object);
    return found;
}

#define UNTIL(w, condition)                                                                                            \
    do {                                                                                                               \
        bool is_so_ = RIG_UNTIL(&(w)->rig, (run_set(w), run_pods(w), (condition)));                                    \
        if (!is_so_) {                                                                                                 \
            printf("\nnever: %s\n", #condition);                                                                       \
        }                                                                                                              \
        CU_ASSERT(is_so_);                                                                                             \
    } while (0)

static void let_pass(struct world *w, int64_t ns)
{
    int64_t until_ns = dl_now_ns() + ns;
    while (dl_now_ns() < until_ns) {
        op_loop_turn(w->rig.loop, 10);
        run_set(w);
        run_pods(w);
    }
}

/* --- tests --- */

#define TWO_LEARNERS "\"learners\":{\"min\":1,\"max\":4,\"replicas\":2}"

static void test_job_from_apply_to_its_end(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, "\"ttlSecondsAfterFinished\":1,\"syncer\":{\"shards\":1}," TWO_LEARNERS);
    UNTIL(&w, says(&w, "phase", "Running") && count_pods(&w, "learner") == 2 && count_pods(&w, "evaluator") == 1);
    CU_ASSERT_EQUAL(count_pods(&w, "syncer"), 1);
    /* A typing error in a template is refused, not dropped. */
    CU_ASSERT_EQUAL(fake_api_requests(w.rig.api, "POST", "/pods?fieldValidation=Strict"), 3);
    static const char *const parts[] = {
        "/api/v1/namespaces/a/configmaps/demo-spec",
        "/api/v1/namespaces/a/services/demo-syncer",
        SET,
        "/apis/policy/v1/namespaces/a/poddisruptionbudgets/demo-syncer",
        "/apis/networking.k8s.io/v1/namespaces/a/networkpolicies/demo-syncer",
        "/api/v1/namespaces/a/persistentvolumeclaims/demo-output",
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        UNTIL(&w, is_there(&w, parts[i])); /* Requests are answered in any order. */
    }
    CU_ASSERT_EQUAL(fake_api_count(w.rig.api, "/api/v1/namespaces/a/secrets", NULL), 1);
    CU_ASSERT_EQUAL(fake_api_requests(w.rig.api, "GET", "/namespaces/a/secrets"), 0); /* K11: tokens are never read. */
    UNTIL(&w, says(&w, "Progressing", "True/Training"));
    cJSON *job = fake_api_get(w.rig.api, JOB);
    CU_ASSERT_EQUAL(member(member(member(job, "status"), "syncer"), "step")->valueint, 50);
    cJSON_Delete(job);
    w.syncer_says = succeeded;
    let_pass(&w, DL_NS_PER_SECOND / 5); /* The end is heard of first. */
    w.workers_leave = true;
    UNTIL(&w, says(&w, "phase", "Succeeded"));
    CU_ASSERT(says(&w, "Succeeded", "True/Completed"));
    UNTIL(&w, fake_api_count(w.rig.api, PODS, NULL) == 0);
    job = fake_api_get(w.rig.api, JOB);
    CU_ASSERT(cJSON_IsString(member(member(job, "status"), "completionTime")));
    cJSON_Delete(job);
    UNTIL(&w, fake_api_count(w.rig.api, JOBS, NULL) == 0); /* K10: the ttl. */
    CU_ASSERT_EQUAL(fake_api_count(w.rig.api, "/apis/apps/v1/namespaces/a/statefulsets", NULL), 0);
    world_stop(&w);
}

static void test_lost_learner_is_replaced_alone(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, TWO_LEARNERS);
    UNTIL(&w, count_pods(&w, "learner") == 2 && says(&w, "phase", "Running"));
    fake_api_remove(w.rig.api, PODS "/demo-learner-0-1"); /* K1 */
    UNTIL(&w, has_pod(&w, "demo-learner-0-2"));
    CU_ASSERT(has_pod(&w, "demo-learner-1-1"));
    CU_ASSERT_EQUAL(fake_api_requests(w.rig.api, "DELETE", NULL), 0);
    fake_api_patch(w.rig.api, PODS "/demo-learner-1-1",
                   "{\"status\":{\"phase\":\"Failed\",\"reason\":\"Evicted\",\"containerStatuses\":[]}}");
    UNTIL(&w, has_pod(&w, "demo-learner-1-2") && !has_pod(&w, "demo-learner-1-1"));
    CU_ASSERT(has_pod(&w, "demo-learner-0-2"));
    world_stop(&w);
}

/* An event's reason and what its note begins with, as "reason: note". */
static bool is_event(struct world *w, const char *name, const char *what)
{
    char path[256], text[512];
    snprintf(path, sizeof path, EVENTS "/%s", name);
    cJSON *event = fake_api_get(w->rig.api, path);
    const char *reason = cJSON_GetStringValue(member(event, "reason"));
    const char *note = cJSON_GetStringValue(member(event, "note"));
    snprintf(text, sizeof text, "%s: %s", reason != NULL ? reason : "", note != NULL ? note : "");
    cJSON_Delete(event);
    return strncmp(text, what, strlen(what)) == 0;
}

/* Who takes a pod away is told while it leaves. */
static void test_pods_that_are_taken_away(void)
{
    struct world w;
    world_start(&w);
    pthread_mutex_lock(&w.rig.api->lock);
    w.rig.api->pods_linger = true;
    pthread_mutex_unlock(&w.rig.api->lock);
    put_job(&w, TWO_LEARNERS);
    UNTIL(&w, count_pods(&w, "learner") == 2 && says(&w, "phase", "Running"));
    fake_api_patch(w.rig.api, PODS "/demo-learner-0-1",
                   "{\"metadata\":{\"deletionTimestamp\":\"2026-01-01T00:00:00Z\"}}");
    fake_api_patch(
        w.rig.api, PODS "/demo-learner-1-1",
        "{\"metadata\":{\"deletionTimestamp\":\"2026-01-01T00:00:00Z\"},\"status\":{\"conditions\":[{\"type\":"
        "\"DisruptionTarget\",\"status\":\"True\",\"reason\":\"DeletionByTaintManager\"}]}}");
    UNTIL(&w, count_if(&w, EVENTS, is_event, "Deleted: demo-learner-0-1 is taken away from node n1: somebody") == 1 &&
                  count_if(&w, EVENTS, is_event,
                           "DeletionByTaintManager: demo-learner-1-1 is taken away from node n1") == 1);
    world_stop(&w);
}

/* Its pods and their logs are gone by the time that somebody looks: the job itself says what was wrong. */
static void test_a_job_that_failed_says_why(void)
{
    struct world w;
    char text[256];
    world_start(&w);
    put_job(&w, TWO_LEARNERS);
    UNTIL(&w, count_pods(&w, "learner") == 2 && says(&w, "phase", "Running"));
    for (int i = 0; i < 2; i++) {
        char path[128];
        snprintf(path, sizeof path, PODS "/demo-learner-%d-1", i);
        fake_api_patch(w.rig.api, path,
                       "{\"status\":{\"phase\":\"Failed\",\"containerStatuses\":[{\"name\":\"learner\",\"state\":{"
                       "\"running\":null,\"terminated\":{\"exitCode\":2,\"message\":\"2026-11-30T08:22:31.709Z error "
                       "data file /data/x cannot be opened\\n\"}}}]}}");
    }
    UNTIL(&w, count_pods(&w, "learner") == 0);
    w.workers_leave = true;
    UNTIL(&w, says(&w, "phase", "Failed") && count_pods(&w, "learner") == 0);
    CU_ASSERT(says(&w, "Failed", "True/BadInput"));
    look(&w, "message", text);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "ended with 2: error data file /data/x cannot be opened"));
    world_stop(&w);
}

struct refusal {
    const char *name, *method, *part;
    int status;
    const char *reason, *message, *told;
};

/* K6: what the server refuses is a condition and an event at once, and is tried again. */
static const struct refusal refusals[] = {
    {"quota on pods", "POST", "/pods", 403, "Forbidden", "exceeded quota: small", "True/QuotaExceeded"},
    {"no right to make pods", "POST", "/pods", 403, "Forbidden", "pods is forbidden", "True/Forbidden"},
    {"a pod that is no pod", "POST", "/pods", 422, "Invalid", "spec.containers: Required", "True/InvalidObject"},
    {"no right to make sets", "PATCH", "/statefulsets", 403, "Forbidden", "forbidden", "True/Forbidden"},
    {"set that cannot change", "PATCH", "/statefulsets", 422, "Invalid", "forbidden field", "True/InvalidObject"},
    {"field in the set that there is not", "PATCH", "/statefulsets", 500, "",
     "failed to create typed patch object (a/demo-syncer): .spec.template.spec.x: field not declared in schema",
     "True/InvalidObject"},
    {"conflict", "PATCH", "/services", 409, "Conflict", "conflict", "True/Conflict"},
    {"quota on claims", "PATCH", "/persistentvolumeclaims", 403, "Forbidden", "exceeded quota: gi",
     "True/QuotaExceeded"},
    {"secret forbidden", "POST", "/namespaces/a/secrets", 403, "Forbidden", "no", "True/Forbidden"},
};

static void test_refusals(void)
{
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++) {
        const struct refusal *row = &refusals[i];
        struct world w;
        world_start(&w);
        fake_api_fault(w.rig.api, (struct fake_fault){.method = row->method,
                                                      .part = row->part,
                                                      .times = -1,
                                                      .status = row->status,
                                                      .reason = row->reason,
                                                      .message = row->message});
        put_job(&w, TWO_LEARNERS);
        bool is_told = RIG_UNTIL(&w.rig, (run_set(&w), run_pods(&w), says(&w, "Degraded", row->told)));
        bool is_recorded = RIG_UNTIL(&w.rig, fake_api_requests(w.rig.api, "POST", "/events") > 1);
        fake_api_clear_faults(w.rig.api);
        bool is_well = RIG_UNTIL(&w.rig, (run_set(&w), run_pods(&w), says(&w, "phase", "Running")) &&
                                             count_pods(&w, "learner") == 2);
        if (!is_told || !is_recorded || !is_well) {
            char text[256];
            look(&w, "Degraded", text);
            printf("\nrow '%s': told %d recorded %d well %d, Degraded is %s\n", row->name, is_told, is_recorded,
                   is_well, text);
        }
        CU_ASSERT(is_told && is_recorded && is_well);
        world_stop(&w);
    }
}

/* K6: syncers that are ready and cannot be asked are a problem of their own, not learners that do not connect. */
static void test_syncers_that_cannot_be_asked(void)
{
    struct world w;
    char text[256];
    world_start(&w);
    w.syncer_says = NULL;
    put_job(&w, TWO_LEARNERS);
    UNTIL(&w, says(&w, "Degraded", "True/SyncersUnreachable"));
    look(&w, "message", text);
    CU_ASSERT_PTR_NOT_NULL(strstr(text, "no endpoints"));
    w.syncer_says = training;
    UNTIL(&w, says(&w, "Progressing", "True/Training") && !says(&w, "Degraded", "True/SyncersUnreachable"));
    world_stop(&w);
}

/* Where there is room for few pods, those without which the others are of no use come first. */
static void test_syncers_come_first(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, TWO_LEARNERS);
    bool has_set = RIG_UNTIL(&w.rig, is_there(&w, SET)); /* Nobody makes its pods. */
    CU_ASSERT(has_set);
    int64_t until_ns = dl_now_ns() + DL_NS_PER_SECOND / 2;
    while (dl_now_ns() < until_ns) {
        op_loop_turn(w.rig.loop, 10);
    }
    CU_ASSERT_EQUAL(fake_api_count(w.rig.api, PODS, NULL), 0);
    bool is_tried =
        RIG_UNTIL(&w.rig, count_pods(&w, "learner") == 2); /* What keeps the set from its pods is to be told. */
    CU_ASSERT(is_tried);
    UNTIL(&w, count_pods(&w, "learner") == 2 && count_pods(&w, "evaluator") == 1);
    world_stop(&w);
}

static void test_suspend_and_resume(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, "\"suspend\":true," TWO_LEARNERS);
    UNTIL(&w, says(&w, "phase", "Suspended"));
    CU_ASSERT_EQUAL(fake_api_count(w.rig.api, PODS, NULL), 0);
    CU_ASSERT_EQUAL(fake_api_requests(w.rig.api, "PATCH", "/statefulsets"), 0);
    fake_api_patch(w.rig.api, JOB, "{\"spec\":{\"suspend\":false}}");
    UNTIL(&w, says(&w, "phase", "Running") && count_pods(&w, "learner") == 2 && count_pods(&w, "syncer") == 1);
    fake_api_patch(w.rig.api, JOB, "{\"spec\":{\"suspend\":true}}");
    UNTIL(&w, says(&w, "Suspended", "True/Suspended"));
    cJSON *job = fake_api_get(w.rig.api, JOB);
    CU_ASSERT_EQUAL(member(member(job, "status"), "active")->valueint, 0); /* K8 */
    CU_ASSERT(member(member(job, "status"), "startTime") == NULL ||
              cJSON_IsNull(member(member(job, "status"), "startTime")));
    cJSON_Delete(job);
    CU_ASSERT_EQUAL(fake_api_count(w.rig.api, PODS, NULL), 0);
    CU_ASSERT_EQUAL(fake_api_count(w.rig.api, "/apis/apps/v1/namespaces/a/statefulsets", NULL), 1);
    fake_api_patch(w.rig.api, JOB, "{\"spec\":{\"suspend\":false}}");
    UNTIL(&w, says(&w, "phase", "Running") && count_pods(&w, "learner") == 2 && count_pods(&w, "syncer") == 1);
    world_stop(&w);
}

static void test_scaling(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, "\"learners\":{\"min\":1,\"max\":4,\"pools\":[{\"name\":\"p\",\"replicas\":3}]}");
    UNTIL(&w, count_pods(&w, "learner") == 3);
    cJSON *job = fake_api_get(w.rig.api, JOB);
    const cJSON *replicas = member(member(member(job, "spec"), "learners"), "replicas");
    CU_ASSERT(cJSON_IsNumber(replicas) && replicas->valueint == 3); /* The scale subresource reads it. */
    cJSON_Delete(job);
    fake_api_patch(w.rig.api, JOB, "{\"spec\":{\"learners\":{\"replicas\":1}}}");
    UNTIL(&w, count_pods(&w, "learner") == 1);
    fake_api_patch(w.rig.api, JOB, "{\"spec\":{\"learners\":{\"replicas\":4}}}");
    UNTIL(&w, count_pods(&w, "learner") == 4);
    CU_ASSERT(says(&w, "selector", "diloco.dev/job=demo,diloco.dev/role=learner"));
    world_stop(&w);
}

static void test_another_operator_takes_over(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, TWO_LEARNERS);
    UNTIL(&w, count_pods(&w, "learner") == 2 && says(&w, "phase", "Running"));
    UNTIL(&w, count_pods(&w, "evaluator") == 1 && says(&w, "Progressing", "True/Training"));
    op_controller_free(w.controller);
    size_t applied = fake_api_requests(w.rig.api, "PATCH", "/statefulsets/");
    size_t made = fake_api_requests(w.rig.api, "POST", "/pods"), gone = fake_api_requests(w.rig.api, "DELETE", NULL);
    fake_api_remove(w.rig.api, PODS "/demo-learner-1-1"); /* While nobody looked. */
    start_controller(&w);
    int64_t until_ns = dl_now_ns() + RIG_BOUND_NS;
    while (count_pods(&w, "demo-learner-1-") == 0 && dl_now_ns() < until_ns) {
        op_loop_turn(w.rig.loop, 1);
        run_pods(&w);
        bool is_steady = says(&w, "Progressing", "True/Training"); /* It asks before it speaks. */
        CU_ASSERT(is_steady);
    }
    UNTIL(&w, count_pods(&w, "demo-learner-1-") == 1);
    CU_ASSERT_FALSE(has_pod(&w, "demo-learner-1-1")); /* A name is not given twice, even by one who knows of none. */
    let_pass(&w, DL_NS_PER_SECOND / 2);
    CU_ASSERT_EQUAL(fake_api_requests(w.rig.api, "POST", "/pods"), made + 1);
    CU_ASSERT_EQUAL(fake_api_requests(w.rig.api, "DELETE", NULL), gone);
    CU_ASSERT(has_pod(&w, "demo-learner-0-1"));
    /* What the job consists of is applied once more, a little later. */
    UNTIL(&w, fake_api_requests(w.rig.api, "PATCH", "/statefulsets/") > applied);
    world_stop(&w);
}

static void test_parts_that_vanish_come_back(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, TWO_LEARNERS);
    UNTIL(&w, says(&w, "phase", "Running"));
    fake_api_remove(w.rig.api, "/api/v1/namespaces/a/services/demo-syncer");
    UNTIL(&w, fake_api_count(w.rig.api, "/api/v1/namespaces/a/services", NULL) == 1);
    fake_api_remove(w.rig.api, SET);
    UNTIL(&w, fake_api_count(w.rig.api, "/apis/apps/v1/namespaces/a/statefulsets", NULL) == 1);
    world_stop(&w);
}

static void test_lost_watches_lose_nothing(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, TWO_LEARNERS);
    UNTIL(&w, count_pods(&w, "learner") == 2 && says(&w, "phase", "Running"));
    let_pass(&w, DL_NS_PER_SECOND / 5); /* Both pods have been seen. */
    fake_api_fault(w.rig.api, (struct fake_fault){.method = "GET", .part = "watch=true", .times = 4, .status = 500});
    fake_api_cut_watches(w.rig.api);
    fake_api_remove(w.rig.api, PODS "/demo-learner-0-1");
    fake_api_expire(w.rig.api); /* The deletion is seen by a new list only. */
    UNTIL(&w, has_pod(&w, "demo-learner-0-2"));
    CU_ASSERT(has_pod(&w, "demo-learner-1-1"));
    world_stop(&w);
}

static void test_deadline_orders_the_end(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, "\"activeDeadlineSeconds\":1," TWO_LEARNERS);
    UNTIL(&w, count_pods(&w, "learner") == 2);
    UNTIL(&w, says(&w, "phase", "Failed"));
    CU_ASSERT(says(&w, "Failed", "True/DeadlineExceeded")); /* K10 */
    CU_ASSERT_EQUAL(fake_api_count(w.rig.api, PODS, NULL), 0);
    world_stop(&w);
}

static void test_status_is_written_sparingly(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, TWO_LEARNERS);
    UNTIL(&w, says(&w, "phase", "Running") && count_pods(&w, "learner") == 2);
    size_t before = fake_api_requests(w.rig.api, "PATCH", "/demo/status");
    w.syncer_says = "{\"phase\":\"Training\",\"step\":51,\"quorum\":{\"have\":2,\"need\":1}}";
    let_pass(&w, DL_NS_PER_SECOND); /* Some 20 answers of the syncer. K7: at most one write in 5 s. */
    CU_ASSERT(fake_api_requests(w.rig.api, "PATCH", "/demo/status") - before <= 1);
    world_stop(&w);
}

/* An event of reason Advice whose note begins with this field. */
static bool is_advice(struct world *w, const char *name, const char *field)
{
    char path[256];
    snprintf(path, sizeof path, EVENTS "/%s", name);
    cJSON *event = fake_api_get(w->rig.api, path);
    const char *reason = cJSON_GetStringValue(member(event, "reason"));
    const char *note = cJSON_GetStringValue(member(event, "note"));
    bool is_one =
        reason != NULL && note != NULL && strcmp(reason, "Advice") == 0 && strncmp(note, field, strlen(field)) == 0;
    cJSON_Delete(event);
    return is_one;
}

static size_t count_advice(struct world *w, const char *field)
{
    return count_if(w, EVENTS, is_advice, field);
}

/* A spec that is accepted and will disappoint: each field is an event, once, and again only for a changed spec. */
static void test_advice_is_told_once_for_each_spec(void)
{
    struct world w;
    world_start(&w);
    put_job(&w, "\"sync\":{\"overlap\":9}," TWO_LEARNERS);
    UNTIL(&w, says(&w, "phase", "Running") && count_advice(&w, "spec.sync.overlap 9") == 1 &&
                  count_advice(&w, "spec.training.tokenBudget") == 1);
    let_pass(&w, DL_NS_PER_SECOND);
    CU_ASSERT_EQUAL(count_advice(&w, "spec.sync.overlap"), 1);
    CU_ASSERT_EQUAL(count_advice(&w, "spec.sync.quorum"), 0);
    world_stop(&w);
}

UNIT_MAIN("controller", {"K10 job from apply to its end", test_job_from_apply_to_its_end},
          {"K1 lost learner is replaced alone", test_lost_learner_is_replaced_alone},
          {"pods that are taken away", test_pods_that_are_taken_away},
          {"a job that failed says why", test_a_job_that_failed_says_why}, {"K6 refusals", test_refusals},
          {"K6 syncers that cannot be asked", test_syncers_that_cannot_be_asked},
          {"syncers come first", test_syncers_come_first}, {"K8 suspend and resume", test_suspend_and_resume},
          {"scaling", test_scaling}, {"another operator takes over", test_another_operator_takes_over},
          {"parts that vanish", test_parts_that_vanish_come_back}, {"lost watches", test_lost_watches_lose_nothing},
          {"K10 deadline", test_deadline_orders_the_end}, {"K7 status sparingly", test_status_is_written_sparingly},
          {"advice", test_advice_is_told_once_for_each_spec})
