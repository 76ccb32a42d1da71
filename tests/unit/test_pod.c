/* What pods and nodes mean to the planner: K1, K2, K3, K13. */
#include <stdlib.h>
#include <string.h>

#include "operator/reconcile/json.h"
#include "operator/reconcile/pod.h"
#include "tests/unit/unit.h"

#define S INT64_C(1000000000)

static cJSON *parse(const char *text)
{
    cJSON *tree = NULL;
    struct dl_err err = {.text = ""};
    enum dl_rc rc = op_json_parse(text, strlen(text), &tree, &err);
    if (rc != DL_OK) {
        printf("\n%s\nin %s\n", err.text, text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    return tree;
}

/* A learner's pod with what a row says of spec, status and more metadata. */
static bool read_pod(const char *metadata, const char *spec, const char *status, struct op_pod *out)
{
    char text[4096];
    snprintf(
        text, sizeof text,
        "{\"metadata\":{\"name\":\"demo-learner-3-7\",\"uid\":\"u-1\",\"creationTimestamp\":\"2026-01-01T00:00:00Z\","
        "\"labels\":{\"diloco.dev/role\":\"learner\",\"diloco.dev/job-uid\":\"j-1\",\"diloco.dev/learner-id\":\"3\","
        "\"diloco.dev/incarnation\":\"7\",\"diloco.dev/pool\":\"spot\"}%s%s},\"spec\":{%s},\"status\":{%s}}",
        metadata[0] != 0 ? "," : "", metadata, spec, status);
    cJSON *tree = parse(text);
    bool is_ours = op_pod_read(tree, out);
    cJSON_Delete(tree);
    return is_ours;
}

#define PLACED "\"nodeName\":\"n1\""
#define LEAVING "\"deletionTimestamp\":\"2026-01-01T00:01:00Z\""
#define RUNNING_SINCE "\"state\":{\"running\":{\"startedAt\":\"2026-01-01T00:00:05Z\"}}"
#define RUNS "\"phase\":\"Running\",\"containerStatuses\":[{\"name\":\"learner\"," RUNNING_SINCE "}]"
#define ENDED(code, reason)                                                                                            \
    "\"state\":{\"terminated\":{\"exitCode\":" code ",\"reason\":\"" reason                                            \
    "\",\"startedAt\":\"2026-01-01T00:00:05Z\",\"finishedAt\":\"2026-01-01T00:00:45Z\"}}"
#define FAILED(code, reason)                                                                                           \
    "\"phase\":\"Failed\",\"containerStatuses\":[{\"name\":\"learner\"," ENDED(code, reason) "}]"
#define TARGET(reason) "\"conditions\":[{\"type\":\"DisruptionTarget\",\"status\":\"True\",\"reason\":\"" reason "\"}]"
#define BACK_OFF(code, restarts)                                                                                       \
    "\"phase\":\"Running\",\"containerStatuses\":[{\"name\":\"learner\",\"restartCount\":" restarts                    \
    ",\"state\":{\"waiting\":{\"reason\":\"CrashLoopBackOff\"}},\"lastState\":{\"terminated\":{\"exitCode\":" code     \
    "}}}]"

enum node_is { NODE_FINE, NODE_SILENT, NODE_VANISHING, NODE_UNKNOWN };

struct pod_row {
    const char *name, *metadata, *spec, *status;
    enum node_is node;
    bool heard, connected; /* The syncers were heard lately; they count the learner as connected. */
    enum op_instance_state state;
    enum op_end end;
    int code;
    bool disrupted, costs; /* `costs`: its end counts towards the restart budget. */
};

/* K2: each way in which a pod goes, and whether it costs. */
static const struct pod_row pod_rows[] = {
    {"just made", "", "", "", NODE_UNKNOWN, true, false, OP_PENDING, OP_END_EXIT, 0, false, false},
    {"unschedulable", "", "",
     "\"phase\":\"Pending\",\"conditions\":[{\"type\":\"PodScheduled\",\"status\":\"False\",\"reason\":"
     "\"Unschedulable\",\"message\":\"0/2 nodes\",\"lastTransitionTime\":\"2026-01-01T00:00:01Z\"}]",
     NODE_UNKNOWN, true, false, OP_PENDING, OP_END_EXIT, 0, false, false},
    {"placed, image being pulled", "", PLACED,
     "\"phase\":\"Pending\",\"containerStatuses\":[{\"name\":\"learner\",\"state\":{\"waiting\":{\"reason\":"
     "\"ContainerCreating\"}}}]",
     NODE_FINE, true, false, OP_STARTING, OP_END_EXIT, 0, false, false},
    {"K3 running but unconnected is running", "", PLACED, RUNS, NODE_FINE, true, false, OP_RUNNING, OP_END_EXIT, 0,
     false, false},
    {"deleted by someone: terminating", LEAVING, PLACED, RUNS, NODE_FINE, true, true, OP_TERMINATING, OP_END_EXIT, 0,
     false, false},
    {"Failed with 1", "", PLACED, FAILED("1", "Error"), NODE_FINE, true, false, OP_ENDED, OP_END_EXIT, 1, false, true},
    {"Failed with 137 from outside", "", PLACED, FAILED("137", "Error"), NODE_FINE, true, false, OP_ENDED, OP_END_EXIT,
     137, false, false},
    {"OOMKilled", "", PLACED, FAILED("137", "OOMKilled"), NODE_FINE, true, false, OP_ENDED, OP_END_OUT_OF_MEMORY, 137,
     false, true},
    {"Evicted by the kubelet", "", PLACED, "\"reason\":\"Evicted\"," FAILED("1", "Error"), NODE_FINE, true, false,
     OP_ENDED, OP_END_EVICTED, 1, false, false},
    {"evicted through the API", "", PLACED, TARGET("EvictionByEvictionAPI") "," FAILED("143", "Error"), NODE_FINE, true,
     false, OP_ENDED, OP_END_EVICTED, 143, true, false},
    {"preempted by the scheduler", "", PLACED, TARGET("PreemptionByScheduler") "," FAILED("1", "Error"), NODE_FINE,
     true, false, OP_ENDED, OP_END_PREEMPTED, 1, true, false},
    {"preempted, still terminating", LEAVING, PLACED, TARGET("PreemptionByScheduler") "," RUNS, NODE_FINE, true, true,
     OP_TERMINATING, OP_END_EXIT, 0, true, false},
    {"taken by the taint manager", "", PLACED, TARGET("DeletionByTaintManager") "," FAILED("1", "Error"), NODE_FINE,
     true, false, OP_ENDED, OP_END_EVICTED, 1, true, false},
    {"collected after its node went", "", PLACED, TARGET("DeletionByPodGC") "," FAILED("1", "Error"), NODE_UNKNOWN,
     true, false, OP_ENDED, OP_END_NODE_LOST, 1, true, false},
    {"node shut down in order", "", PLACED, "\"reason\":\"Terminated\"," FAILED("143", "Error"), NODE_FINE, true, false,
     OP_ENDED, OP_END_NODE_SHUTDOWN, 143, false, false},
    {"node shut down, older word", "", PLACED, "\"reason\":\"NodeShutdown\",\"phase\":\"Failed\"", NODE_FINE, true,
     false, OP_ENDED, OP_END_NODE_SHUTDOWN, 0, false, false},
    {"refused by its node", "", PLACED, "\"reason\":\"UnexpectedAdmissionError\",\"phase\":\"Failed\"", NODE_FINE, true,
     false, OP_ENDED, OP_END_EVICTED, 0, false, false},
    {"Failed without a word", "", PLACED, "\"phase\":\"Failed\"", NODE_FINE, true, false, OP_ENDED, OP_END_EVICTED, 0,
     false, false},
    {"Succeeded unasked", "", PLACED,
     "\"phase\":\"Succeeded\",\"containerStatuses\":[{\"name\":\"learner\"," ENDED("0", "Completed") "}]", NODE_FINE,
     true, false, OP_ENDED, OP_END_EXIT, 0, false, false},
    {"Unknown", "", PLACED, "\"phase\":\"Unknown\"", NODE_SILENT, true, false, OP_LOST, OP_END_EXIT, 0, false, false},
    {"K3 node silent and learner unheard: lost", "", PLACED, RUNS, NODE_SILENT, true, false, OP_LOST, OP_END_EXIT, 0,
     false, false},
    {"K3 node silent but learner heard: lives", "", PLACED, RUNS, NODE_SILENT, true, true, OP_RUNNING, OP_END_EXIT, 0,
     false, false},
    {"K3 lost, and its removal does not end", LEAVING, PLACED, RUNS, NODE_SILENT, true, false, OP_LOST, OP_END_EXIT, 0,
     false, false},
    {"node silent, nobody heard: not yet lost", "", PLACED, RUNS, NODE_SILENT, false, false, OP_RUNNING, OP_END_EXIT, 0,
     false, false},
    {"node silent, nobody heard, being removed: lost", LEAVING, PLACED, RUNS, NODE_SILENT, false, false, OP_LOST,
     OP_END_EXIT, 0, false, false},
    {"node unknown says nothing", "", PLACED, RUNS, NODE_UNKNOWN, true, false, OP_RUNNING, OP_END_EXIT, 0, false,
     false},
    {"K13 spot node about to go", "", PLACED, RUNS, NODE_VANISHING, true, true, OP_RUNNING, OP_END_EXIT, 0, true,
     false},
    {"K1 crashed once: starts again in its place", "", PLACED, BACK_OFF("1", "1"), NODE_FINE, true, false, OP_STARTING,
     OP_END_EXIT, 1, false, true},
    {"K1 crashed in its place too often: another pod", "", PLACED, BACK_OFF("1", "3"), NODE_FINE, true, false, OP_ENDED,
     OP_END_EXIT, 1, false, true},
    {"wrong input: no restart helps", "", PLACED, BACK_OFF("2", "1"), NODE_FINE, true, false, OP_ENDED, OP_END_EXIT, 2,
     false, true},
    {"refused by the syncer: no restart helps", "", PLACED, BACK_OFF("3", "1"), NODE_FINE, true, false, OP_ENDED,
     OP_END_EXIT, 3, false, true},
};

static void test_pods(void)
{
    for (size_t i = 0; i < sizeof pod_rows / sizeof pod_rows[0]; i++) {
        const struct pod_row *row = &pod_rows[i];
        struct op_pod pod;
        struct op_instance got;
        bool ok = read_pod(row->metadata, row->spec, row->status, &pod);
        struct op_node node = {.is_ready = row->node != NODE_SILENT, .is_vanishing = row->node == NODE_VANISHING};
        struct op_learner_status learner = {.link = row->connected ? OP_LINK_CONNECTED : OP_LINK_LOST, .behind = 4};
        op_pod_instance(&pod,
                        &(struct op_pod_context){.node = row->node == NODE_UNKNOWN ? NULL : &node,
                                                 .learner = &learner,
                                                 .syncers_heard = row->heard,
                                                 .pool = 1},
                        &got);
        ok = ok && got.kind == OP_LEARNER && got.id == 3 && got.incarnation == 7 && got.pool == 1 && got.behind == 4;
        ok = ok && got.state == row->state && got.end == row->end && got.code == row->code &&
             got.disrupted == row->disrupted && got.connected == row->connected;
        if (got.state == OP_ENDED) {
            ok = ok && op_end_is_crash(got.end, got.code) == row->costs;
        }
        if (!ok) {
            printf("\nrow '%s': state %d end %d code %d disrupted %d\n", row->name, got.state, got.end, got.code,
                   got.disrupted);
        }
        CU_ASSERT(ok);
    }
}

static void test_details(void)
{
    struct op_pod pod;
    CU_ASSERT(read_pod("", PLACED, "\"podIP\":\"10.1.2.3\"," RUNS, &pod));
    CU_ASSERT_STRING_EQUAL(pod.node, "n1");
    CU_ASSERT_STRING_EQUAL(pod.address, "10.1.2.3");
    CU_ASSERT_STRING_EQUAL(pod.pool, "spot");
    CU_ASSERT(pod.is_up);
    CU_ASSERT_EQUAL(pod.started_ns - pod.created_ns, 5 * S);
    CU_ASSERT(read_pod("", PLACED, FAILED("1", "Error"), &pod));
    CU_ASSERT_EQUAL(pod.since_ns - pod.started_ns, 40 * S);
    /* A syncer's last word is the job's result. */
    cJSON *tree =
        parse("{\"metadata\":{\"name\":\"demo-syncer-11\",\"labels\":{\"diloco.dev/role\":\"syncer\","
              "\"diloco.dev/job-uid\":\"j-1\"}},\"status\":{\"phase\":\"Running\",\"containerStatuses\":[{"
              "\"name\":\"syncer\",\"restartCount\":1,\"state\":{\"waiting\":{}},\"lastState\":{\"terminated\":"
              "{\"exitCode\":0,\"message\":\"succeeded\\n\"}}}]}}");
    CU_ASSERT(op_pod_read(tree, &pod));
    CU_ASSERT_EQUAL(pod.id, 11);
    CU_ASSERT_EQUAL(pod.kind, OP_SYNCER);
    CU_ASSERT_EQUAL(pod.restarts, 1);
    CU_ASSERT_STRING_EQUAL(pod.last_word, "succeeded");
    cJSON_Delete(tree);
}

/* Of a log's end people see the error, without its time; whatever stood around it. */
static void test_last_words(void)
{
    static const char *const rows[][2] = {
        {"2026-11-30T08:22:31.709Z info  - worker kernels core=Zen\\n2026-11-30T08:22:31.710Z error a learner/2 start "
         "failed: data file /data/x cannot be opened\\n2026-11-30T08:22:31.711Z info  - bye\\n",
         "error a learner/2 start failed: data file /data/x cannot be opened"},
        {"Traceback (most recent call last):\\n  File \\\"t.py\\\"\\nValueError: no data\\n\\n", "ValueError: no data"},
        {"error one\\r\\nerror two\\r\\n", "error two"},
        {"2026 words", "2026 words"},
        {"2026-11-30T08:22:31.709Z", "2026-11-30T08:22:31.709Z"},
        {"\\n\\n", ""},
        {"", ""},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char status[1024];
        struct op_pod pod;
        snprintf(status, sizeof status,
                 "\"phase\":\"Failed\",\"containerStatuses\":[{\"name\":\"learner\",\"state\":{\"terminated\":{"
                 "\"exitCode\":2,\"message\":\"%s\"}}}]",
                 rows[i][0]);
        CU_ASSERT(read_pod("", PLACED, status, &pod));
        if (strcmp(pod.message, rows[i][1]) != 0) {
            printf("\nrow %zu: '%s'\n", i, pod.message);
        }
        CU_ASSERT_STRING_EQUAL(pod.message, rows[i][1]);
    }
}

static void test_foreign_pods_are_not_ours(void)
{
    static const char *const foreign[] = {
        "{}",
        "[]",
        "{\"metadata\":{\"name\":\"x\"}}",
        "{\"metadata\":{\"name\":\"x\",\"labels\":{\"diloco.dev/role\":\"cook\",\"diloco.dev/job-uid\":\"j\"}}}",
        "{\"metadata\":{\"name\":\"x-1\",\"labels\":{\"diloco.dev/role\":\"learner\",\"diloco.dev/job-uid\":\"j\","
        "\"diloco.dev/learner-id\":\"two\",\"diloco.dev/incarnation\":\"1\"}}}",
        "{\"metadata\":{\"name\":\"x-1\",\"labels\":{\"diloco.dev/role\":\"learner\",\"diloco.dev/job-uid\":\"j\","
        "\"diloco.dev/learner-id\":\"99999\",\"diloco.dev/incarnation\":\"1\"}}}",
        "{\"metadata\":{\"name\":\"syncer\",\"labels\":{\"diloco.dev/role\":\"syncer\",\"diloco.dev/job-uid\":\"j\"}}}",
    };
    for (size_t i = 0; i < sizeof foreign / sizeof foreign[0]; i++) {
        cJSON *tree = parse(foreign[i]);
        struct op_pod pod;
        CU_ASSERT_FALSE(op_pod_read(tree, &pod));
        cJSON_Delete(tree);
    }
}

/* --- nodes --- */

struct node_row {
    const char *name, *metadata, *spec;
    bool spot, vanishing;
};

/* K13: the marks of GKE, EKS and Karpenter, AKS. */
static const struct node_row node_rows[] = {
    {"plain", "", "", false, false},
    {"GKE spot", "\"labels\":{\"cloud.google.com/gke-spot\":\"true\"}", "", true, false},
    {"GKE preemptible", "\"labels\":{\"cloud.google.com/gke-preemptible\":\"true\"}", "", true, false},
    {"GKE about to go", "", "\"taints\":[{\"key\":\"cloud.google.com/impending-node-termination\"}]", false, true},
    {"EKS managed spot", "\"labels\":{\"eks.amazonaws.com/capacityType\":\"SPOT\"}", "", true, false},
    {"EKS on demand", "\"labels\":{\"eks.amazonaws.com/capacityType\":\"ON_DEMAND\"}", "", false, false},
    {"Karpenter spot", "\"labels\":{\"karpenter.sh/capacity-type\":\"spot\"}", "", true, false},
    {"Karpenter disrupts", "", "\"taints\":[{\"key\":\"karpenter.sh/disrupted\",\"effect\":\"NoSchedule\"}]", false,
     true},
    {"termination handler", "", "\"taints\":[{\"key\":\"aws-node-termination-handler/spot-itn\"}]", false, true},
    {"AKS spot", "\"labels\":{\"kubernetes.azure.com/scalesetpriority\":\"spot\"}",
     "\"taints\":[{\"key\":\"kubernetes.azure.com/scalesetpriority\",\"value\":\"spot\"}]", true, false},
    {"autoscaler removes it", "", "\"taints\":[{\"key\":\"ToBeDeletedByClusterAutoscaler\"}]", false, true},
};

static void read_node(const char *metadata, const char *spec, const char *ready, const char *amounts,
                      struct op_node *out)
{
    char text[1024];
    snprintf(text, sizeof text,
             "{\"metadata\":{\"name\":\"n1\"%s%s},\"spec\":{%s},\"status\":{\"conditions\":[{\"type\":\"Ready\","
             "\"status\":\"%s\"}],\"allocatable\":{%s}}}",
             metadata[0] != 0 ? "," : "", metadata, spec, ready, amounts);
    cJSON *tree = parse(text);
    CU_ASSERT(op_node_read(tree, out));
    cJSON_Delete(tree);
}

static void test_nodes(void)
{
    for (size_t i = 0; i < sizeof node_rows / sizeof node_rows[0]; i++) {
        const struct node_row *row = &node_rows[i];
        struct op_node node;
        read_node(row->metadata, row->spec, "True", "", &node);
        bool ok = node.is_spot == row->spot && node.is_vanishing == row->vanishing && node.is_usable != row->vanishing;
        if (!ok) {
            printf("\nrow '%s'\n", row->name);
        }
        CU_ASSERT(ok);
    }
}

static void test_changes_of_capacity(void)
{
    struct op_node one, more, other_order, cordoned, silent;
    read_node("", "", "True", "\"cpu\":\"4\",\"slot\":\"1\"", &one);
    read_node("", "", "True", "\"slot\":\"1\",\"cpu\":\"4\"", &other_order);
    read_node("", "", "True", "\"cpu\":\"4\",\"slot\":\"2\"", &more);
    read_node("", "\"unschedulable\":true", "True", "\"cpu\":\"4\",\"slot\":\"1\"", &cordoned);
    read_node("", "", "Unknown", "\"cpu\":\"4\",\"slot\":\"1\"", &silent);
    CU_ASSERT(op_node_changes_capacity(NULL, &one));
    CU_ASSERT(op_node_changes_capacity(&one, NULL));
    CU_ASSERT(op_node_changes_capacity(&one, &more));
    CU_ASSERT(op_node_changes_capacity(&one, &cordoned));
    CU_ASSERT(op_node_changes_capacity(&silent, &one));
    CU_ASSERT_FALSE(op_node_changes_capacity(&one, &other_order));
    CU_ASSERT_FALSE(op_node_changes_capacity(&cordoned, &silent));
    CU_ASSERT_FALSE(op_node_changes_capacity(NULL, &silent));
}

UNIT_MAIN("pod", {"K2 ways in which a pod goes", test_pods}, {"details", test_details}, {"last words", test_last_words},
          {"foreign pods", test_foreign_pods_are_not_ours}, {"K13 nodes", test_nodes},
          {"changes of capacity", test_changes_of_capacity})
