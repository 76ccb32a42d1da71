/* A job of a cluster as `kubectl diloco status` shows it: by its syncers, by its object when none answers, or not at all. */
#include <stdlib.h>
#include <string.h>

#include "operator/cli/cluster.h"
#include "tests/unit/fake_api.h"
#include "tests/unit/unit.h"

#define JOB "/apis/diloco.dev/v1alpha1/namespaces/a/decoupleddilocojobs/demo"

struct world {
    struct fake_api *api;
    struct op_config config;
    struct op_cluster *cluster;
    struct op_view *view;
    struct dl_err err;
    _Atomic bool is_silent;
};

static bool answer_for_syncers(void *context, struct fake_conn *conn, const struct fake_request *request)
{
    struct world *w = context;
    bool is_first = strstr(request->path, "/pods/demo-syncer-0%3A7001/proxy/status") != NULL;
    if (!is_first && strstr(request->path, "/pods/demo-syncer-1%3A7001/proxy/status") == NULL) {
        return false;
    }
    if (w->is_silent) {
        return fake_answer_status(conn, 503, "ServiceUnavailable", "no endpoints", 0);
    }
    return fake_answer(
        conn, 200,
        is_first ? "{\"job\":\"demo\",\"shard\":0,\"shards\":2,\"phase\":\"Training\",\"round\":3,\"step\":50,"
                   "\"tokens\":900,\"quorum\":{\"have\":2,\"need\":1},\"connected\":2}"
                 : "{\"job\":\"demo\",\"shard\":1,\"shards\":2,\"phase\":\"Training\",\"round\":4,\"step\":51,"
                   "\"tokens\":900,\"quorum\":{\"have\":2,\"need\":1},\"connected\":2}",
        0);
}

static void world_start(struct world *w, const char *space, const char *job)
{
    *w = (struct world){.err = {.text = ""}};
    w->api = fake_api_start(NULL);
    w->api->hook = answer_for_syncers;
    w->api->hook_context = w;
    w->config = fake_api_config(w->api);
    CU_ASSERT_EQUAL_FATAL(op_cluster_open(&w->config, space, job, &w->cluster, &w->err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(op_view_new(&w->view, &w->err), DL_OK);
}

static void world_stop(struct world *w)
{
    op_view_free(w->view);
    op_cluster_close(w->cluster);
    fake_api_stop(w->api);
}

static void put_job(struct world *w, const char *phase)
{
    char text[512];
    snprintf(
        text, sizeof text,
        "{\"apiVersion\":\"diloco.dev/v1alpha1\",\"kind\":\"DecoupledDiLoCoJob\",\"spec\":{\"syncer\":{\"shards\":2}},"
        "\"status\":{\"phase\":\"%s\",\"message\":\"as told\",\"syncer\":{\"step\":40,\"tokens\":700,\"loss\":"
        "\"2.5000\"},\"learners\":{\"desired\":3}}}",
        phase);
    fake_api_put(w->api, JOB, text);
}

static void test_by_its_syncers(void)
{
    struct world w;
    world_start(&w, "a", "demo");
    put_job(&w, "Running");
    for (int i = 0; i < 2; i++) { /* Again and again, as `top` does. */
        CU_ASSERT_EQUAL(op_cluster_read(w.cluster, w.view, &w.err), DL_OK);
        CU_ASSERT_STRING_EQUAL(w.view->job, "demo");
        CU_ASSERT_STRING_EQUAL(w.view->phase, "Training");
        CU_ASSERT_EQUAL(w.view->status.shards_heard, 2);
        CU_ASSERT_EQUAL(w.view->status.step, 51);
        CU_ASSERT_FALSE(w.view->is_over);
    }
    world_stop(&w);
}

static void test_by_its_object(void)
{
    static const struct {
        const char *phase, *message;
        bool is_over;
    } rows[] = {{"Running", "as told; no syncer answers: ", false},
                {"Suspended", "as told", false},
                {"Succeeded", "as told", true},
                {"Failed", "as told", true}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct world w;
        world_start(&w, "a", "demo");
        w.is_silent = true;
        put_job(&w, rows[i].phase);
        CU_ASSERT_EQUAL(op_cluster_read(w.cluster, w.view, &w.err), DL_OK);
        CU_ASSERT_STRING_EQUAL(w.view->phase, rows[i].phase);
        CU_ASSERT_EQUAL(w.view->is_over, rows[i].is_over);
        CU_ASSERT_EQUAL(w.view->status.tokens, 700);
        CU_ASSERT_EQUAL(w.view->status.learners_wanted, 3);
        bool is_said = strncmp(w.view->message, rows[i].message, strlen(rows[i].message)) == 0;
        CU_ASSERT(is_said);
        CU_ASSERT_EQUAL(strstr(w.view->message, "no endpoints") != NULL, i == 0);
        world_stop(&w);
    }
}

static void test_no_such_job(void)
{
    struct world w;
    world_start(&w, NULL, "demo"); /* The namespace of the configuration. */
    CU_ASSERT_EQUAL(op_cluster_read(w.cluster, w.view, &w.err), DL_ENOTFOUND);
    CU_ASSERT_PTR_NOT_NULL(strstr(w.err.text, "no job demo in namespace"));
    world_stop(&w);
}

static void test_names(void)
{
    CU_ASSERT_STRING_EQUAL(op_cluster_job_name("ddj/demo"), "demo");
    CU_ASSERT_STRING_EQUAL(op_cluster_job_name("decoupleddilocojob.diloco.dev/demo"), "demo");
    CU_ASSERT_PTR_NULL(op_cluster_job_name("runs/demo"));
    CU_ASSERT_PTR_NULL(op_cluster_job_name("ddj/"));
    CU_ASSERT_PTR_NULL(op_cluster_job_name(NULL));
}

UNIT_MAIN("cluster", {"by its syncers", test_by_its_syncers}, {"by its object", test_by_its_object},
          {"no such job", test_no_such_job}, {"names", test_names})
