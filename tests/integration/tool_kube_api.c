/* The Kubernetes client against a real API server (the one of KUBECONFIG, in a namespace of its own): what the fake one of the
 * unit tests claims is true of the real one. Used by tests/cluster/test_client.py.
 *
 *     kube-api verbs            every verb and refusal
 *     kube-api lease            two candidates
 *     kube-api follow N         follows ConfigMaps until one is called "end", through whatever happens to the server meanwhile;
 *                               prints "known COUNT, lists L, expired E" and fails when more than N changes came twice */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "operator/kube/api.h"
#include "operator/kube/events.h"
#include "operator/kube/lease.h"
#include "operator/kube/map.h"
#include "operator/kube/reflector.h"

#define SPACE "kube-client"
#define BOUND_NS (60 * DL_NS_PER_SECOND)
#define FOLLOW_BOUND_NS (300 * DL_NS_PER_SECOND)

static const struct op_resource namespaces = {"", "v1", "namespaces", "Namespace", false};
static const struct op_resource quotas = {"", "v1", "resourcequotas", "ResourceQuota", true};
static struct op_loop *loop;
static struct op_client *client;
static int checks, faults;

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        checks++;                                                                                                      \
        if (!(condition)) {                                                                                            \
            faults++;                                                                                                  \
            fprintf(stderr, "kube-api: line %d: %s; last answer: %d %d %s\n", __LINE__, #condition, (int)last.rc,      \
                    last.status, last.text);                                                                           \
        }                                                                                                              \
    } while (0)

static struct {
    int calls, status;
    enum dl_rc rc;
    bool is_quota;
    char reason[64], text[DL_ERR_TEXT_MAX], body[65536];
} last;

static void on_answer(void *context, const struct op_result *result)
{
    (void)context;
    last.calls++;
    last.rc = result->rc;
    last.status = result->status;
    last.is_quota = op_result_is_quota(result);
    snprintf(last.reason, sizeof last.reason, "%s", result->reason);
    snprintf(last.text, sizeof last.text, "%s", result->rc == DL_OK ? "" : result->err.text);
    snprintf(last.body, sizeof last.body, "%s", result->body);
}

static struct op_reply_to to_last(void)
{
    last.calls = 0;
    return (struct op_reply_to){on_answer, NULL, NULL};
}

/* Waits for the answer of what was sent with `sent`. */
static enum dl_rc answer(enum dl_rc sent)
{
    int64_t until_ns = dl_now_ns() + BOUND_NS;
    while (sent == DL_OK && last.calls == 0 && dl_now_ns() < until_ns) {
        op_loop_turn(loop, 100);
    }
    return sent != DL_OK ? sent : last.calls == 0 ? DL_ETIMEOUT : last.rc;
}

static const char *version_in(const char *body, char version[static 64])
{
    const char *at = strstr(body, "\"resourceVersion\":\"");
    snprintf(version, 64, "%.*s", at != NULL ? (int)strcspn(at + 19, "\"") : 0, at != NULL ? at + 19 : "");
    return version;
}

static void check_config_maps(void)
{
    struct op_ref ref = {&op_res_config_maps, SPACE, "one", NULL};
    char before[64], after[64], text[512];
    struct dl_err err;
    const char *map =
        "{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"name\":\"one\"},\"data\":{\"a\":\"1\"}}";
    CHECK(answer(op_api_apply(client, &ref, map, to_last(), &err)) == DL_OK && last.status == 201);
    version_in(last.body, before);
    CHECK(answer(op_api_apply(client, &ref, map, to_last(), &err)) == DL_OK && last.status == 200);
    CHECK(strcmp(before, version_in(last.body, after)) == 0); /* Applying the same changes nothing. */
    CHECK(answer(op_api_create(client, &ref, map, to_last(), &err)) == DL_EEXISTS);
    CHECK(answer(op_api_merge_patch(client, &ref, "{\"data\":{\"other\":\"2\"}}", to_last(), &err)) == DL_OK);
    const char *changed =
        "{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"name\":\"one\"},\"data\":{\"b\":\"3\"}}";
    CHECK(answer(op_api_apply(client, &ref, changed, to_last(), &err)) == DL_OK);
    CHECK(strstr(last.body, "\"other\":\"2\"") != NULL && strstr(last.body, "\"a\":\"1\"") == NULL);
    snprintf(text, sizeof text, "{\"metadata\":{\"name\":\"one\",\"resourceVersion\":\"%s\"},\"data\":{}}", before);
    struct op_request put = {.method = "PUT",
                             .path = "/api/v1/namespaces/" SPACE "/configmaps/one",
                             .body = text,
                             .size = strlen(text),
                             .done = to_last().done};
    CHECK(answer(op_client_send(client, &put, NULL, &err)) == DL_ECONFLICT); /* As the lease's, which lost a race. */
    struct op_delete_options other = {.uid = "11111111-1111-4111-8111-111111111111", .grace_seconds = -1};
    CHECK(answer(op_api_delete(client, &ref, &other, to_last(), &err)) == DL_ECONFLICT);
    struct op_delete_options now = {.grace_seconds = 0, .propagation = "Background"};
    CHECK(answer(op_api_delete(client, &ref, &now, to_last(), &err)) == DL_OK);
    CHECK(answer(op_api_delete(client, &ref, NULL, to_last(), &err)) == DL_ENOTFOUND);
    CHECK(answer(op_api_get(client, &ref, to_last(), &err)) == DL_ENOTFOUND);
}

static void check_refusals(void)
{
    struct op_ref set = {&op_res_stateful_sets, SPACE, "set", NULL},
                  wrong = {&op_res_config_maps, SPACE, "Not_A_Name", NULL};
    struct op_ref pod = {&op_res_pods, SPACE, "p", NULL}, quota = {&quotas, SPACE, "small", NULL};
    struct dl_err err;
    CHECK(answer(op_api_apply(client, &wrong,
                              "{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"name\":\"Not_A_Name\"}}",
                              to_last(), &err)) == DL_EINVAL);
    CHECK(last.status == 422 && strcmp(last.reason, "Invalid") == 0 && strstr(last.text, "metadata.name") != NULL);
    for (int replicas = 2; replicas >= 0; replicas -= 2) { /* None at all is a number, too. */
        char text[512];
        snprintf(text, sizeof text,
                 "{\"apiVersion\":\"apps/v1\",\"kind\":\"StatefulSet\",\"metadata\":{\"name\":\"set\"},\"spec\":{"
                 "\"replicas\":%d,\"serviceName\":\"s\",\"selector\":{\"matchLabels\":{\"a\":\"b\"}},\"template\":{"
                 "\"metadata\":{\"labels\":{\"a\":\"b\"}},"
                 "\"spec\":{\"containers\":[{\"name\":\"c\",\"image\":\"i\"}]}}}}",
                 replicas);
        CHECK(answer(op_api_apply(client, &set, text, to_last(), &err)) == DL_OK);
    }
    CHECK(answer(op_api_get(client, &set, to_last(), &err)) == DL_OK && strstr(last.body, "\"replicas\":0") != NULL);
    struct op_ref status = set;
    status.subresource = "status";
    CHECK(answer(op_api_merge_patch(client, &status,
                                    "{\"status\":{\"replicas\":0,\"readyReplicas\":0,\"observedGeneration\":7}}",
                                    to_last(), &err)) == DL_OK);
    CHECK(answer(op_api_delete(client, &set, NULL, to_last(), &err)) == DL_OK);
    CHECK(answer(op_api_apply(client, &quota,
                              "{\"apiVersion\":\"v1\",\"kind\":\"ResourceQuota\",\"metadata\":{\"name\":\"small\"},"
                              "\"spec\":{\"hard\":{\"pods\":\"0\"}}}",
                              to_last(), &err)) == DL_OK);
    /* Nothing counts quotas here: the count is given, and the server needs a moment to know it. */
    struct op_ref counted = quota;
    counted.subresource = "status";
    CHECK(answer(op_api_merge_patch(client, &counted,
                                    "{\"status\":{\"hard\":{\"pods\":\"0\"},\"used\":{\"pods\":\"0\"}}}", to_last(),
                                    &err)) == DL_OK);
    const char *a_pod = "{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"p\"},\"spec\":{"
                        "\"containers\":[{\"name\":\"c\",\"image\":\"i\"}]}}";
    struct op_delete_options now = {.grace_seconds = 0};
    int64_t until_ns = dl_now_ns() + BOUND_NS;
    while (answer(op_api_create(client, &pod, a_pod, to_last(), &err)) == DL_OK && dl_now_ns() < until_ns) {
        CHECK(answer(op_api_delete(client, &pod, &now, to_last(), &err)) == DL_OK);
    }
    CHECK(last.rc == DL_EDENIED && last.is_quota);
    CHECK(last.status == 403);
    CHECK(answer(op_api_delete(client, &quota, NULL, to_last(), &err)) == DL_OK);
}

static void check_events(void)
{
    struct op_recorder *recorder = NULL;
    struct op_subject about = {"v1", "Namespace", SPACE, SPACE, "u"};
    CHECK(op_recorder_new(client, "diloco.dev/operator", "tool", &recorder, NULL) == DL_OK);
    op_record(recorder, &about, "Normal", "Tried", "Try", "a note with \"quotes\"");
    struct dl_err err;
    struct op_path path;
    struct op_request request = {.method = "GET", .done = on_answer};
    op_path_init(&path);
    op_path_collection(&path, &op_res_events, SPACE);
    CHECK(op_path_text(&path, &request.path, &err) == DL_OK);
    int64_t until_ns = dl_now_ns() + BOUND_NS;
    do {
        last.calls = 0;
        CHECK(answer(op_client_send(client, &request, NULL, &err)) == DL_OK);
    } while (strstr(last.body, "\"reason\":\"Tried\"") == NULL && dl_now_ns() < until_ns);
    CHECK(strstr(last.body, "a note with \\\"quotes\\\"") != NULL);
    op_path_release(&path);
    op_recorder_free(recorder);
}

/* --- lease --- */

struct candidate {
    struct op_lease *lease;
    struct op_client *client;
    int won, lost;
    bool is_released;
};

static void on_changed_lease(void *context, bool is_leader)
{
    struct candidate *candidate = context;
    candidate->won += is_leader;
    candidate->lost += !is_leader;
}

static void on_released(void *context)
{
    ((struct candidate *)context)->is_released = true;
}

static void check_lease(const struct op_config *config)
{
    struct candidate both[2] = {{.won = 0}};
    struct op_lease_options options = {.space = SPACE,
                                       .name = "tool",
                                       .changed = on_changed_lease,
                                       .duration_ms = 3000,
                                       .renew_by_ms = 2000,
                                       .retry_ms = 300};
    for (int i = 0; i < 2; i++) {
        options.identity = i == 0 ? "first" : "second";
        options.context = &both[i];
        CHECK(op_client_new(loop, config, NULL, &both[i].client, NULL) == DL_OK);
        CHECK(op_lease_new(both[i].client, &options, &both[i].lease, NULL) == DL_OK);
    }
    int64_t until_ns = dl_now_ns() + 6 * DL_NS_PER_SECOND;
    while (dl_now_ns() < until_ns) {
        op_loop_turn(loop, 50);
        CHECK(!(op_lease_is_held(both[0].lease) && op_lease_is_held(both[1].lease)));
    }
    CHECK(both[0].won + both[1].won == 1 && both[0].lost + both[1].lost == 0);
    struct candidate *holder = both[0].won == 1 ? &both[0] : &both[1], *peer = holder == &both[0] ? &both[1] : &both[0];
    op_lease_release(holder->lease, 5000, on_released, holder);
    until_ns = dl_now_ns() + BOUND_NS;
    while ((!holder->is_released || peer->won == 0) && dl_now_ns() < until_ns) {
        op_loop_turn(loop, 50);
    }
    CHECK(peer->won == 1 && holder->lost == 1);
    for (int i = 0; i < 2; i++) {
        op_lease_free(both[i].lease);
        op_client_free(both[i].client);
    }
}

/* --- following --- */

static struct {
    struct op_map seen; /* "space/name" -> hash of resourceVersion | 1. */
    uint32_t repeats;
    bool is_over;
} follow;

static void on_changed(void *context, const struct op_object *object)
{
    (void)context;
    uintptr_t version = (uintptr_t)strtoull(object->resource_version, NULL, 10) * 2 + 1;
    follow.repeats += (uintptr_t)op_map_get(&follow.seen, object->name) == version;
    if (op_map_put(&follow.seen, object->name, (void *)version, NULL) != DL_OK) {
        faults++;
    }
    follow.is_over = follow.is_over || strcmp(object->name, "end") == 0;
}

static void on_gone(void *context, const char *space, const char *name)
{
    (void)context;
    (void)space;
    if (op_map_remove(&follow.seen, name) == NULL) {
        fprintf(stderr, "kube-api: '%s' went, and had never come\n", name);
        faults++;
    }
}

static void on_synced(void *context)
{
    (void)context;
    printf("synced\n");
    fflush(stdout);
}

static void on_failed(void *context, const struct dl_err *err)
{
    (void)context;
    fprintf(stderr, "kube-api: %s\n", err->text);
}

static void check_follow(uint32_t repeats_max)
{
    struct op_reflector *reflector = NULL;
    struct op_reflector_options options = {.resource = &op_res_config_maps,
                                           .space = SPACE,
                                           .label_selector = "tool=follow",
                                           .changed = on_changed,
                                           .gone = on_gone,
                                           .synced = on_synced,
                                           .failed = on_failed,
                                           .page = 50,
                                           .backoff_max_ms = 2000};
    CHECK(op_reflector_new(client, &options, &reflector, NULL) == DL_OK);
    int64_t until_ns = dl_now_ns() + FOLLOW_BOUND_NS;
    while (!follow.is_over && dl_now_ns() < until_ns) {
        op_loop_turn(loop, 200);
    }
    struct op_reflector_stats stats = op_reflector_stats(reflector);
    CHECK(follow.is_over);
    CHECK(follow.repeats <= repeats_max);
    CHECK(op_reflector_count(reflector) == follow.seen.count);
    printf("known %zu, lists %llu, expired %llu\n", follow.seen.count, (unsigned long long)stats.lists,
           (unsigned long long)stats.expired);
    op_reflector_free(reflector);
    op_map_release(&follow.seen);
}

static int run(const char *what, const char *argument, const struct op_config *config)
{
    struct op_ref space = {&namespaces, NULL, SPACE, NULL};
    struct dl_err err;
    enum dl_rc rc = answer(op_api_create(
        client, &space, "{\"apiVersion\":\"v1\",\"kind\":\"Namespace\",\"metadata\":{\"name\":\"" SPACE "\"}}",
        to_last(), &err));
    CHECK(rc == DL_OK || rc == DL_EEXISTS);
    if (strcmp(what, "verbs") == 0) {
        check_config_maps();
        check_refusals();
        check_events();
    } else if (strcmp(what, "lease") == 0) {
        check_lease(config);
    } else if (strcmp(what, "follow") == 0) {
        check_follow((uint32_t)strtoul(argument, NULL, 10));
    } else {
        return 2;
    }
    printf("%s: %d checks, %d faults\n", what, checks, faults);
    return faults == 0 ? 0 : 1;
}

int main(int argc, char **argv)
{
    struct op_config config;
    struct dl_err err;
    if (argc < 2 || op_config_load(NULL, NULL, &config, &err) != DL_OK || op_loop_new(&loop, &err) != DL_OK ||
        op_client_new(loop, &config, NULL, &client, &err) != DL_OK) {
        fprintf(stderr, "kube-api verbs|lease|follow N: %s\n", argc < 2 ? "" : err.text);
        return 2;
    }
    int status = run(argv[1], argc > 2 ? argv[2] : "0", &config);
    op_client_free(client);
    op_loop_free(loop);
    op_config_release(&config);
    return status;
}
