/* The objects of a job: K11 (labels, owners, names, restricted pods), K13 (grace, tolerations, spot), templates. */
#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "operator/reconcile/objects.h"
#include "tests/unit/unit.h"

static const char head[] = "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: demo, "
                           "namespace: team}\nspec:\n  activeDeadlineSeconds: 600\n  training: {tokenBudget: "
                           "9007199254740993, data: {paths: [text.txt, /abs.txt]}}\n";

static const struct op_render_options options = {
    .syncer_image = "syncer:1", .worker_image = "worker:1", .pull_policy = "Never"};

static struct dl_spec *parse(const char *rest)
{
    char text[8192];
    struct dl_spec *spec = NULL;
    struct dl_err err = {.text = ""};
    int length = snprintf(text, sizeof text, "%s%s", head, rest);
    enum dl_rc rc = dl_spec_parse(text, (size_t)length, "test", &spec, NULL, &err);
    if (rc != DL_OK) {
        printf("\n%s\n", err.text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    return spec;
}

/* The item at a path such as "spec.containers.0.args.1". */
static const cJSON *at(const cJSON *tree, const char *path)
{
    char part[128];
    while (tree != NULL && *path != 0) {
        size_t length = 0;
        if (*path == '[') { /* A key with dots: [app.kubernetes.io/name] */
            length = strcspn(++path, "]");
            snprintf(part, sizeof part, "%.*s", (int)length, path);
            path += length + 1;
        } else {
            length = strcspn(path, ".");
            snprintf(part, sizeof part, "%.*s", (int)length, path);
            path += length;
        }
        path += *path == '.' ? 1 : 0;
        tree = cJSON_IsArray(tree) ? cJSON_GetArrayItem(tree, (int)strtol(part, NULL, 10))
                                   : cJSON_GetObjectItemCaseSensitive(tree, part);
    }
    return tree;
}

static bool is_text(const cJSON *tree, const char *path, const char *value)
{
    const cJSON *item = at(tree, path);
    bool ok = cJSON_IsString(item) && strcmp(item->valuestring, value) == 0;
    if (!ok) {
        printf("\n%s is '%s', not '%s'\n", path, cJSON_IsString(item) ? item->valuestring : "(none)", value);
    }
    return ok;
}

static bool is_number(const cJSON *tree, const char *path, double value)
{
    const cJSON *item = at(tree, path);
    bool ok = cJSON_IsNumber(item) && item->valuedouble >= value && item->valuedouble <= value;
    if (!ok) {
        printf("\n%s is not %g\n", path, value);
    }
    return ok;
}

static bool has_text(const cJSON *array, const char *value)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, array)
    {
        if (cJSON_IsString(item) && strcmp(item->valuestring, value) == 0) {
            return true;
        }
    }
    return false;
}

static const cJSON *with(const cJSON *array, const char *key, const char *value)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, array)
    {
        const cJSON *own = cJSON_GetObjectItemCaseSensitive(item, key);
        if (cJSON_IsString(own) && strcmp(own->valuestring, value) == 0) {
            return item;
        }
    }
    return NULL;
}

static cJSON *part_of(const struct dl_spec *spec, enum op_part part, uint32_t syncers)
{
    struct op_render render = {.spec = spec, .job_uid = "uid-1", .options = &options};
    char *text = NULL, *again = NULL;
    struct dl_err err = {.text = ""};
    CU_ASSERT_EQUAL_FATAL(op_render_part(&render, part, "secret-token", syncers, &text, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(op_render_part(&render, part, "secret-token", syncers, &again, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(text, again);
    cJSON *tree = cJSON_Parse(text);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tree);
    free(text);
    free(again);
    return tree;
}

static cJSON *pod_of(const struct dl_spec *spec, enum op_kind kind, uint32_t pool)
{
    struct op_render render = {.spec = spec, .job_uid = "uid-1", .options = &options};
    char *text = NULL;
    struct dl_err err = {.text = ""};
    enum dl_rc rc = op_render_pod(&render, kind, pool, 3, 7, &text, &err);
    if (rc != DL_OK) {
        printf("\n%s\n", err.text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    cJSON *tree = cJSON_Parse(text);
    CU_ASSERT_PTR_NOT_NULL_FATAL(tree);
    free(text);
    return tree;
}

/* --- what all have --- */

static void test_names_labels_and_owners(void)
{
    static const char *const names[OP_PART_COUNT] = {"demo-token-uid-1", "demo-spec",   "demo-syncer", "demo-syncer",
                                                     "demo-syncer",      "demo-syncer", "demo-output"};
    struct dl_spec *spec = parse("");
    for (int part = 0; part < OP_PART_COUNT; part++) {
        cJSON *tree = part_of(spec, (enum op_part)part, 1);
        CU_ASSERT(is_text(tree, "apiVersion", op_part_kinds[part].api));
        CU_ASSERT(is_text(tree, "kind", op_part_kinds[part].kind));
        CU_ASSERT(is_text(tree, "metadata.name", names[part]));
        CU_ASSERT(is_text(tree, "metadata.namespace", "team"));
        CU_ASSERT(is_text(tree, "metadata.labels.[app.kubernetes.io/name]", "diloco"));
        CU_ASSERT(is_text(tree, "metadata.labels.[app.kubernetes.io/instance]", "demo"));
        CU_ASSERT(is_text(tree, "metadata.labels.[app.kubernetes.io/managed-by]", "diloco-operator"));
        CU_ASSERT(is_text(tree, "metadata.labels.[diloco.dev/job]", "demo"));
        if (part == OP_PART_OUTPUT) { /* The weights outlive the job. */
            CU_ASSERT_PTR_NULL(at(tree, "metadata.ownerReferences"));
        } else {
            CU_ASSERT(is_text(tree, "metadata.ownerReferences.0.kind", DL_SPEC_KIND));
            CU_ASSERT(is_text(tree, "metadata.ownerReferences.0.uid", "uid-1"));
            CU_ASSERT(cJSON_IsTrue(at(tree, "metadata.ownerReferences.0.controller")));
        }
        cJSON_Delete(tree);
    }
    dl_spec_free(spec);
}

/* K11: a pod passes the Pod Security level "restricted". */
static void check_restricted(const cJSON *pod_spec, const char *container)
{
    const cJSON *own = with(at(pod_spec, "containers"), "name", container);
    CU_ASSERT_PTR_NOT_NULL_FATAL(own);
    CU_ASSERT(cJSON_IsTrue(at(pod_spec, "securityContext.runAsNonRoot")));
    CU_ASSERT(is_text(pod_spec, "securityContext.seccompProfile.type", "RuntimeDefault"));
    CU_ASSERT(cJSON_IsFalse(at(own, "securityContext.allowPrivilegeEscalation")));
    CU_ASSERT(is_text(own, "securityContext.capabilities.drop.0", "ALL"));
    CU_ASSERT(cJSON_IsFalse(at(pod_spec, "automountServiceAccountToken")));
    const cJSON *item;
    cJSON_ArrayForEach(item, at(pod_spec, "volumes"))
    {
        CU_ASSERT_PTR_NULL(at(item, "hostPath"));
    }
}

/* K13: pods of a lost node are let go after 30 s, and nobody has more notice than GKE gives. */
static void check_grace(const cJSON *pod_spec)
{
    static const char *const keys[] = {"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"};
    CU_ASSERT(is_number(pod_spec, "terminationGracePeriodSeconds", 15));
    for (size_t i = 0; i < 2; i++) {
        const cJSON *toleration = with(at(pod_spec, "tolerations"), "key", keys[i]);
        CU_ASSERT_PTR_NOT_NULL_FATAL(toleration);
        CU_ASSERT(is_number(toleration, "tolerationSeconds", 30));
        CU_ASSERT(is_text(toleration, "effect", "NoExecute"));
    }
}

/* --- the parts --- */

static void test_spec_of_processes(void)
{
    struct dl_spec *spec = parse("  learners: {pools: [{name: a, replicas: 2, template: {spec: {}}}]}\n"), *back = NULL;
    cJSON *tree = part_of(spec, OP_PART_SPEC, 0);
    const cJSON *text = at(tree, "data.[job.json]");
    CU_ASSERT_FATAL(cJSON_IsString(text));
    struct dl_err err = {.text = ""};
    CU_ASSERT_EQUAL_FATAL(dl_spec_parse(text->valuestring, strlen(text->valuestring), "job.json", &back, NULL, &err),
                          DL_OK);
    CU_ASSERT(back->training.token_budget == UINT64_C(9007199254740993));
    CU_ASSERT_STRING_EQUAL(back->training.data.paths[0], "/data/text.txt");
    CU_ASSERT_STRING_EQUAL(back->training.data.paths[1], "/abs.txt");
    CU_ASSERT_EQUAL(back->active_deadline_seconds, 0); /* The operator counts it, from the job's start. */
    CU_ASSERT_PTR_NULL(back->learners.pools[0].template_json);
    dl_spec_free(back);
    dl_spec_free(spec);
    cJSON_Delete(tree);
}

static void test_digest_is_of_what_syncers_read(void)
{
    struct dl_spec *one = parse("  learners: {replicas: 2}\n"), *scaled = parse("  learners: {replicas: 5, max: 9}\n");
    struct dl_spec *suspended = parse("  suspend: true\n"), *other = parse("  sync: {grace: {maxSeconds: 9}}\n");
    CU_ASSERT_EQUAL(op_spec_digest(one), op_spec_digest(scaled));
    CU_ASSERT_EQUAL(op_spec_digest(one), op_spec_digest(suspended));
    CU_ASSERT_NOT_EQUAL(op_spec_digest(one), op_spec_digest(other));
    CU_ASSERT_NOT_EQUAL(op_spec_digest(one), 0);
    dl_spec_free(one);
    dl_spec_free(scaled);
    dl_spec_free(suspended);
    dl_spec_free(other);
}

static void test_service_and_token(void)
{
    struct dl_spec *spec = parse("");
    cJSON *tree = part_of(spec, OP_PART_SERVICE, 0);
    CU_ASSERT(is_text(tree, "spec.clusterIP", "None"));
    CU_ASSERT(cJSON_IsTrue(at(tree, "spec.publishNotReadyAddresses")));
    CU_ASSERT(is_number(tree, "spec.ports.0.port", 7000));
    CU_ASSERT(is_text(tree, "spec.selector.[diloco.dev/role]", "syncer"));
    cJSON_Delete(tree);
    tree = part_of(spec, OP_PART_TOKEN, 0);
    CU_ASSERT(is_text(tree, "stringData.token", "secret-token"));
    cJSON_Delete(tree);
    dl_spec_free(spec);
}

static void test_set_of_syncers(void)
{
    struct dl_spec *spec = parse("  syncer: {shards: 2, storage: {size: 3Gi, storageClassName: fast}}\n");
    cJSON *tree = part_of(spec, OP_PART_SET, 2);
    const cJSON *pod = at(tree, "spec.template.spec"), *container = at(pod, "containers.0");
    CU_ASSERT(is_number(tree, "spec.replicas", 2));
    CU_ASSERT(is_text(tree, "spec.podManagementPolicy", "Parallel"));
    CU_ASSERT(is_text(tree, "spec.persistentVolumeClaimRetentionPolicy.whenScaled", "Retain"));
    CU_ASSERT(is_text(tree, "spec.volumeClaimTemplates.0.spec.resources.requests.storage", "3Gi"));
    CU_ASSERT(is_text(tree, "spec.volumeClaimTemplates.0.spec.storageClassName", "fast"));
    CU_ASSERT(is_text(tree, "spec.template.metadata.labels.[diloco.dev/role]", "syncer"));
    CU_ASSERT(is_text(container, "image", "syncer:1"));
    CU_ASSERT(is_text(container, "imagePullPolicy", "Never"));
    CU_ASSERT(is_text(container, "readinessProbe.httpGet.path", "/readyz"));
    CU_ASSERT(has_text(at(container, "args"), "--state-dir"));
    CU_ASSERT(cJSON_IsTrue(at(container, "securityContext.readOnlyRootFilesystem")));
    CU_ASSERT_PTR_NOT_NULL(at(tree, "spec.template.metadata.annotations.[cluster-autoscaler.kubernetes.io/"
                                    "safe-to-evict-local-volumes]"));
    check_restricted(pod, "syncer");
    check_grace(pod);
    /* K13: syncers stay off spot nodes. */
    const cJSON *rules =
        at(pod, "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms.0."
                "matchExpressions");
    CU_ASSERT(is_text(with(rules, "key", "cloud.google.com/gke-spot"), "operator", "NotIn"));
    CU_ASSERT(is_text(with(rules, "key", "karpenter.sh/capacity-type"), "values.0", "spot"));
    cJSON_Delete(tree);
    tree = part_of(spec, OP_PART_SET, 0); /* Suspended: zero is a number. */
    CU_ASSERT(is_number(tree, "spec.replicas", 0));
    cJSON_Delete(tree);
    dl_spec_free(spec);
}

static void test_budget_and_policy(void)
{
    struct dl_spec *spec = parse("");
    cJSON *tree = part_of(spec, OP_PART_BUDGET, 0);
    CU_ASSERT(is_number(tree, "spec.maxUnavailable", 1));
    CU_ASSERT(is_text(tree, "spec.selector.matchLabels.[diloco.dev/role]", "syncer")); /* Learners have none. */
    cJSON_Delete(tree);
    tree = part_of(spec, OP_PART_POLICY, 0);
    CU_ASSERT(is_text(tree, "spec.podSelector.matchLabels.[diloco.dev/role]", "syncer"));
    CU_ASSERT(is_number(tree, "spec.ingress.0.ports.0.port", 7000));
    CU_ASSERT(is_text(tree, "spec.ingress.0.from.0.podSelector.matchLabels.[diloco.dev/job]", "demo"));
    CU_ASSERT(is_number(tree, "spec.ingress.1.ports.0.port", 7001));
    CU_ASSERT_PTR_NULL(at(tree, "spec.ingress.1.from"));
    cJSON_Delete(tree);
    dl_spec_free(spec);
}

/* --- pods --- */

static void test_learner(void)
{
    struct dl_spec *spec = parse("  syncer: {shards: 2}\n");
    cJSON *tree = pod_of(spec, OP_LEARNER, 0);
    const cJSON *pod = at(tree, "spec"), *own = at(pod, "containers.0"), *env = at(own, "env");
    CU_ASSERT(is_text(tree, "metadata.name", "demo-learner-3-7"));
    CU_ASSERT(is_text(tree, "metadata.labels.[diloco.dev/learner-id]", "3"));
    CU_ASSERT(is_text(tree, "metadata.labels.[diloco.dev/incarnation]", "7"));
    CU_ASSERT(is_text(tree, "metadata.labels.[diloco.dev/pool]", "default"));
    CU_ASSERT(is_text(pod, "restartPolicy", "OnFailure")); /* K1: a crashed container starts again in its place. */
    CU_ASSERT(is_text(with(env, "name", "DILOCO_ENDPOINTS"), "value",
                      "ws://demo-syncer-0.demo-syncer.team.svc:7000,ws://demo-syncer-1.demo-syncer.team.svc:7000"));
    CU_ASSERT(is_text(with(env, "name", "DILOCO_LEARNER"), "value", "3"));
    CU_ASSERT(is_text(with(env, "name", "DILOCO_UID"), "valueFrom.fieldRef.fieldPath", "metadata.uid"));
    CU_ASSERT(is_text(with(env, "name", "DILOCO_JOB"), "value", "demo"));
    CU_ASSERT(is_text(own, "args.0", "learn"));
    CU_ASSERT(is_text(pod, "topologySpreadConstraints.0.whenUnsatisfiable", "ScheduleAnyway"));
    CU_ASSERT(is_text(own, "terminationMessagePolicy", "FallbackToLogsOnError"));
    CU_ASSERT(is_text(tree, "metadata.annotations.[cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes]",
                      "diloco-tmp"));
    check_restricted(pod, "learner");
    check_grace(pod);
    cJSON_Delete(tree);
    dl_spec_free(spec);
}

static const char with_template[] =
    "  learners:\n    pools:\n    - name: spot\n      replicas: 1\n      scavenge: {max: 4}\n      template:\n"
    "        metadata: {labels: {team: blue, diloco.dev/job: other}, annotations: {note: x}}\n        spec:\n"
    "          restartPolicy: Always\n          terminationGracePeriodSeconds: 60\n"
    "          nodeSelector: {disk: ssd}\n          securityContext: {runAsUser: 1000}\n"
    "          tolerations: [{key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, "
    "tolerationSeconds: 5}]\n          volumes: [{name: data, configMap: {name: text}}]\n          containers:\n"
    "          - {name: helper, image: \"helper:2\"}\n"
    "          - name: learner\n            resources: {limits: {cpu: \"2\", example.com/slot: \"1\"}}\n"
    "            livenessProbe: {httpGet: {path: /x, port: 1}}\n"
    "            env: [{name: OMP, value: \"1\"}, {name: DILOCO_LEARNER, value: \"9\"}]\n"
    "            volumeMounts: [{name: data, mountPath: /data}]\n";

static void test_template_is_the_ground(void)
{
    struct dl_spec *spec = parse(with_template);
    cJSON *tree = pod_of(spec, OP_LEARNER, 0);
    const cJSON *pod = at(tree, "spec"), *own = with(at(pod, "containers"), "name", "learner");
    CU_ASSERT_EQUAL(cJSON_GetArraySize(at(pod, "containers")), 2);
    CU_ASSERT(is_text(tree, "metadata.labels.team", "blue"));
    CU_ASSERT(is_text(tree, "metadata.labels.[diloco.dev/job]", "demo")); /* Ours stay ours. */
    CU_ASSERT(is_text(tree, "metadata.annotations.note", "x"));
    CU_ASSERT(is_text(pod, "restartPolicy", "OnFailure"));
    CU_ASSERT(is_number(pod, "terminationGracePeriodSeconds", 60));
    CU_ASSERT(is_text(pod, "nodeSelector.disk", "ssd"));
    CU_ASSERT(is_number(pod, "securityContext.runAsUser", 1000));
    CU_ASSERT(is_number(with(at(pod, "tolerations"), "key", "node.kubernetes.io/not-ready"), "tolerationSeconds", 5));
    CU_ASSERT_PTR_NOT_NULL(with(at(pod, "tolerations"), "key", "kubernetes.azure.com/scalesetpriority"));
    CU_ASSERT(is_text(own, "resources.limits.cpu", "2"));
    CU_ASSERT(is_text(own, "image", "worker:1"));
    CU_ASSERT(is_text(with(at(own, "env"), "name", "DILOCO_LEARNER"), "value", "9"));
    CU_ASSERT(is_text(with(at(own, "volumeMounts"), "name", "data"), "mountPath", "/data"));
    CU_ASSERT(has_text(at(own, "args"), "40")); /* Seconds of grace that the process may use. */
    cJSON_Delete(tree);

    tree = pod_of(spec, OP_EVALUATOR, 0); /* Data as a learner's, no accelerator, nobody else in the pod. */
    pod = at(tree, "spec");
    own = at(pod, "containers.0");
    CU_ASSERT_EQUAL(cJSON_GetArraySize(at(pod, "containers")), 1);
    CU_ASSERT(is_text(tree, "metadata.name", "demo-evaluator-7"));
    CU_ASSERT(is_text(own, "name", "evaluator"));
    CU_ASSERT(is_text(own, "args.0", "evaluate"));
    CU_ASSERT_PTR_NULL(at(own, "resources.limits.[example.com/slot]"));
    CU_ASSERT(is_text(own, "resources.limits.cpu", "2"));
    CU_ASSERT_PTR_NULL(at(own, "livenessProbe"));
    CU_ASSERT(is_text(with(at(own, "volumeMounts"), "name", "data"), "mountPath", "/data"));
    CU_ASSERT(
        is_text(with(at(pod, "volumes"), "name", "diloco-output"), "persistentVolumeClaim.claimName", "demo-output"));
    check_restricted(pod, "evaluator");
    cJSON_Delete(tree);
    dl_spec_free(spec);
}

static void test_own_trainer(void)
{
    struct dl_spec *spec = parse("  learners:\n    pools:\n    - name: gpu\n      replicas: 1\n      template: {spec: "
                                 "{containers: [{name: learner, image: \"mine:1\", command: [python3, t.py]}]}}\n");
    CU_ASSERT_FALSE(op_spec_has_evaluator(spec));
    cJSON *tree = pod_of(spec, OP_LEARNER, 0);
    const cJSON *own = at(tree, "spec.containers.0");
    CU_ASSERT(is_text(own, "image", "mine:1"));
    CU_ASSERT_PTR_NULL(at(own, "args"));
    CU_ASSERT(is_text(with(at(own, "env"), "name", "DILOCO_TOKEN_FILE"), "value", "/etc/diloco/token/token"));
    CU_ASSERT_PTR_NULL(at(tree, "spec.securityContext.runAsUser"));
    check_restricted(at(tree, "spec"), "learner");
    cJSON_Delete(tree);
    dl_spec_free(spec);
    spec = parse(with_template);
    CU_ASSERT(op_spec_has_evaluator(spec));
    dl_spec_free(spec);
}

static void test_bad_templates_are_named(void)
{
    static const struct {
        const char *name, *template_json;
    } rows[] = {{"a list", "[]"},
                {"a text", "\"x\""},
                {"spec is a list", "{\"spec\":[]}"},
                {"containers is an object", "{\"spec\":{\"containers\":{}}}"},
                {"ours under another name", "{\"spec\":{\"containers\":[{\"name\":\"trainer\"}]}}"},
                {"one without a name", "{\"spec\":{\"containers\":[{}]}}"}};
    struct dl_spec *spec = parse("");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct op_render render = {.spec = spec, .job_uid = "u", .options = &options};
        char *text = NULL;
        struct dl_err err = {.text = ""};
        spec->learners.pools[0].template_json = strdup(rows[i].template_json);
        bool ok = op_render_pod(&render, OP_LEARNER, 0, 0, 1, &text, &err) == DL_EINVAL && text == NULL &&
                  strstr(err.text, "pools[default].template") != NULL;
        free(spec->learners.pools[0].template_json);
        spec->learners.pools[0].template_json = NULL;
        if (!ok) {
            printf("\nrow '%s': %s\n", rows[i].name, err.text);
        }
        CU_ASSERT(ok);
    }
    dl_spec_free(spec);
}

UNIT_MAIN("objects", {"K11 names, labels, owners", test_names_labels_and_owners},
          {"spec of processes", test_spec_of_processes}, {"digest", test_digest_is_of_what_syncers_read},
          {"service and token", test_service_and_token}, {"K11 K13 set of syncers", test_set_of_syncers},
          {"budget and policy", test_budget_and_policy}, {"K11 K13 learner", test_learner},
          {"template is the ground", test_template_is_the_ground}, {"own trainer", test_own_trainer},
          {"bad templates", test_bad_templates_are_named})
