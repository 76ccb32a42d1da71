/* Pods: what a template says, and what is added to it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "operator/reconcile/objects_internal.h"
#include "operator/reconcile/pod.h"

#define USER_ID 65532    /* Nobody's, as in the images. */
#define GRACE_SECONDS 15 /* The shortest notice that GKE gives. */
#define GONE_SECONDS 30  /* On a node that is not ready or unreachable. */
#define ENDPOINTS_MAX (DL_SPEC_SHARDS_MAX * 200)
#define JOB_FOLDER "/etc/diloco/job"
#define TOKEN_FOLDER "/etc/diloco/token"
#define JOB_FILE "/etc/diloco/job/job.json"
#define TOKEN_FILE "/etc/diloco/token/token"
#define STATE_FOLDER "/var/lib/diloco"

static const cJSON *member(const cJSON *object, const char *key)
{
    return cJSON_GetObjectItemCaseSensitive(object, key);
}

/* The template as a tree: {} when there is none. */
static enum dl_rc parse_template(const char *text, const char *where, cJSON **out, struct dl_err *err)
{
    cJSON *tree = text != NULL ? cJSON_Parse(text) : cJSON_CreateObject();
    if (!cJSON_IsObject(tree)) {
        cJSON_Delete(tree);
        return dl_err_set(err, DL_EINVAL, "%s: not a PodTemplateSpec (an object with metadata and spec)", where);
    }
    static const char *const objects[] = {"metadata", "spec"};
    for (size_t i = 0; i < DL_COUNT_OF(objects); i++) {
        const cJSON *item = member(tree, objects[i]);
        if (item != NULL && !cJSON_IsObject(item)) {
            enum dl_rc rc = dl_err_set(err, DL_EINVAL, "%s.%s: must be an object", where, objects[i]);
            cJSON_Delete(tree);
            return rc;
        }
    }
    const cJSON *containers = member(member(tree, "spec"), "containers");
    if (containers != NULL && !cJSON_IsArray(containers)) {
        cJSON_Delete(tree);
        return dl_err_set(err, DL_EINVAL, "%s.spec.containers: must be a list", where);
    }
    *out = tree;
    return DL_OK;
}

/* Ours gets its image when it has none; one of another name is somebody's helper, or ours under a wrong name. */
static enum dl_rc check_images(const cJSON *tree, const char *own, const char *where, struct dl_err *err)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, member(member(tree, "spec"), "containers"))
    {
        const cJSON *name = member(item, "name");
        bool is_named = cJSON_IsString(name);
        if (member(item, "image") == NULL && (!is_named || strcmp(name->valuestring, own) != 0)) {
            return dl_err_set(err, DL_EINVAL,
                              "%s: container '%.63s' has no image; the job's own container is called '%s', any other "
                              "needs one",
                              where, is_named ? name->valuestring : "", own);
        }
    }
    return DL_OK;
}

static bool is_custom(const char *template_json)
{
    cJSON *tree = template_json != NULL ? cJSON_Parse(template_json) : NULL;
    const cJSON *container = op_tree_named(member(member(tree, "spec"), "containers"), "learner");
    bool is = member(container, "command") != NULL || member(container, "args") != NULL;
    cJSON_Delete(tree);
    return is;
}

bool op_spec_has_evaluator(const struct dl_spec *spec)
{
    for (uint32_t i = 0; i < spec->learners.pool_count; i++) {
        if (is_custom(spec->learners.pools[i].template_json)) {
            return false;
        }
    }
    return true;
}

/* --- containers --- */

/* The container `name`, first in the list; made when the template has none. */
static cJSON *own_container(cJSON *spec, const char *name)
{
    cJSON *containers = op_tree_array(spec, "containers");
    cJSON *own = op_tree_named(containers, name);
    if (own == NULL) {
        own = cJSON_CreateObject();
        op_tree_text(own, "name", name);
        if (own != NULL && !cJSON_InsertItemInArray(containers, 0, own)) {
            cJSON_Delete(own);
            own = NULL;
        }
    }
    return own;
}

static void add_variable(cJSON *container, const char *name, const char *value, const char *field)
{
    cJSON *variables = op_tree_array(container, "env");
    if (op_tree_named(variables, name) != NULL) {
        return; /* The template knows better. */
    }
    cJSON *variable = op_tree_append(variables);
    op_tree_text(variable, "name", name);
    if (field != NULL) {
        op_tree_text(op_tree_object(op_tree_object(variable, "valueFrom"), "fieldRef"), "fieldPath", field);
    } else {
        op_tree_text(variable, "value", value);
    }
}

static void add_mount(cJSON *container, const char *volume, const char *path, bool read_only)
{
    cJSON *mounts = op_tree_array(container, "volumeMounts"), *item;
    cJSON_ArrayForEach(item, mounts)
    {
        const cJSON *own = member(item, "mountPath");
        if (cJSON_IsString(own) && strcmp(own->valuestring, path) == 0) {
            return;
        }
    }
    cJSON *mount = op_tree_append(mounts);
    op_tree_text(mount, "name", volume);
    op_tree_text(mount, "mountPath", path);
    if (read_only) {
        op_tree_bool(mount, "readOnly", true);
    }
}

static void secure_container(cJSON *container, bool is_own_image)
{
    cJSON *context = op_tree_object(container, "securityContext");
    op_tree_bool_if_missing(context, "allowPrivilegeEscalation", false);
    op_tree_bool_if_missing(context, "readOnlyRootFilesystem", is_own_image);
    cJSON *capabilities = op_tree_object(context, "capabilities");
    if (member(capabilities, "drop") == NULL) {
        op_tree_set(capabilities, "drop", cJSON_CreateStringArray((const char *const[]){"ALL"}, 1));
    }
}

static void complete_container(const struct op_render *render, cJSON *container, const char *image, bool is_own_image)
{
    op_tree_text_if_missing(container, "image", image);
    if (render->options->pull_policy != NULL && render->options->pull_policy[0] != 0) {
        op_tree_text_if_missing(container, "imagePullPolicy", render->options->pull_policy);
    }
    /* Last words of whoever failed are in the pod's status, and so in events and conditions. */
    op_tree_text_if_missing(container, "terminationMessagePolicy", "FallbackToLogsOnError");
    secure_container(container, is_own_image);
    cJSON *requests = op_tree_object(op_tree_object(container, "resources"), "requests");
    if (member(member(container, "resources"), "limits") == NULL) {
        op_tree_text_if_missing(requests, "cpu", "100m");
        op_tree_text_if_missing(requests, "memory", "64Mi");
    }
    add_mount(container, "diloco-job", JOB_FOLDER, true);
    add_mount(container, "diloco-token", TOKEN_FOLDER, true);
    add_mount(container, "diloco-tmp", "/tmp", false);
}

static void set_arguments(cJSON *container, const char *const *arguments, int count)
{
    op_tree_set(container, "args", cJSON_CreateStringArray(arguments, count));
}

/* --- pods --- */

static cJSON *add_volume(cJSON *spec, const char *name)
{
    cJSON *volumes = op_tree_array(spec, "volumes"), *volume = op_tree_named(volumes, name);
    if (volume == NULL) {
        volume = op_tree_append(volumes);
        op_tree_text(volume, "name", name);
    }
    return volume;
}

static void add_volumes(const struct op_render *render, cJSON *spec)
{
    char name[OP_CHILD_NAME_MAX];
    op_part_name(OP_PART_SPEC, render->spec->name, render->job_uid, name);
    op_tree_text(op_tree_object(add_volume(spec, "diloco-job"), "configMap"), "name", name);
    op_part_name(OP_PART_TOKEN, render->spec->name, render->job_uid, name);
    cJSON *token = op_tree_object(add_volume(spec, "diloco-token"), "secret");
    op_tree_text(token, "secretName", name);
    op_tree_number(token, "defaultMode", 0440);
    op_tree_object(add_volume(spec, "diloco-tmp"), "emptyDir");
}

static void secure_pod(cJSON *spec, bool is_own_image)
{
    cJSON *context = op_tree_object(spec, "securityContext");
    op_tree_bool_if_missing(context, "runAsNonRoot", true);
    if (is_own_image) {
        op_tree_number_if_missing(context, "runAsUser", USER_ID);
        op_tree_number_if_missing(context, "runAsGroup", USER_ID);
    }
    op_tree_number_if_missing(context, "fsGroup", USER_ID);
    op_tree_text_if_missing(op_tree_object(context, "seccompProfile"), "type", "RuntimeDefault");
    op_tree_bool_if_missing(spec, "automountServiceAccountToken", false);
    op_tree_bool_if_missing(spec, "enableServiceLinks", false);
}

static void tolerate(cJSON *spec, const char *key, const char *effect, double seconds)
{
    cJSON *tolerations = op_tree_array(spec, "tolerations"), *item;
    cJSON_ArrayForEach(item, tolerations)
    {
        const cJSON *own = member(item, "key");
        if (cJSON_IsString(own) && strcmp(own->valuestring, key) == 0) {
            return;
        }
    }
    cJSON *toleration = op_tree_append(tolerations);
    op_tree_text(toleration, "key", key);
    op_tree_text(toleration, "operator", "Exists");
    op_tree_text(toleration, "effect", effect);
    if (seconds > 0) {
        op_tree_number(toleration, "tolerationSeconds", seconds);
    }
}

/* The cluster autoscaler keeps nodes with empty directories, unless it is told that nothing of worth is in them. */
static void allow_scale_down(cJSON *metadata)
{
    op_tree_text_if_missing(op_tree_object(metadata, "annotations"),
                            "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes", "diloco-tmp");
}

static void complete_pod(const struct op_render *render, cJSON *spec, bool is_own_image)
{
    secure_pod(spec, is_own_image);
    add_volumes(render, spec);
    op_tree_number_if_missing(spec, "terminationGracePeriodSeconds", GRACE_SECONDS);
    tolerate(spec, "node.kubernetes.io/not-ready", "NoExecute", GONE_SECONDS);
    tolerate(spec, "node.kubernetes.io/unreachable", "NoExecute", GONE_SECONDS);
}

/* --- syncers --- */

static void keep_off_spot_nodes(cJSON *spec)
{
    cJSON *affinity = op_tree_object(spec, "affinity");
    if (member(affinity, "nodeAffinity") != NULL) {
        return;
    }
    cJSON *required =
        op_tree_object(op_tree_object(affinity, "nodeAffinity"), "requiredDuringSchedulingIgnoredDuringExecution");
    cJSON *rules = op_tree_array(op_tree_append(op_tree_array(required, "nodeSelectorTerms")), "matchExpressions");
    for (uint32_t i = 0; i < op_spot_label_count; i++) {
        cJSON *rule = op_tree_append(rules);
        op_tree_text(rule, "key", op_spot_labels[i].key);
        op_tree_text(rule, "operator", "NotIn");
        op_tree_set(rule, "values", cJSON_CreateStringArray(&op_spot_labels[i].value, 1));
    }
}

static void add_probe(cJSON *container, const char *probe, const char *path, double period, double failures)
{
    if (member(container, probe) != NULL) {
        return;
    }
    cJSON *object = op_tree_object(container, probe), *get = op_tree_object(object, "httpGet");
    op_tree_text(get, "path", path);
    op_tree_number(get, "port", OP_HEALTH_PORT);
    op_tree_number(object, "periodSeconds", period);
    op_tree_number(object, "timeoutSeconds", 5);
    op_tree_number(object, "failureThreshold", failures);
}

static void add_syncer_container(const struct op_render *render, cJSON *spec)
{
    static const char *const arguments[] = {
        "--job",  JOB_FILE,       "--shard",  "$(DILOCO_SHARD)", "--listen",   "*:7000",        "--health-listen",
        "*:7001", "--token-file", TOKEN_FILE, "--state-dir",     STATE_FOLDER, "--result-file", "/dev/termination-log",
    };
    _Static_assert(OP_SYNCER_PORT == 7000 && OP_HEALTH_PORT == 7001, "the arguments name the ports");
    cJSON *container = own_container(spec, "syncer");
    complete_container(render, container, render->options->syncer_image, true);
    add_variable(container, "DILOCO_SHARD", NULL, "metadata.labels['apps.kubernetes.io/pod-index']");
    set_arguments(container, arguments, (int)DL_COUNT_OF(arguments));
    add_mount(container, "state", STATE_FOLDER, false);
    cJSON *ports = op_tree_array(container, "ports");
    static const struct {
        const char *name;
        double number;
    } own_ports[] = {{"diloco", OP_SYNCER_PORT}, {"health", OP_HEALTH_PORT}};
    for (size_t i = 0; i < DL_COUNT_OF(own_ports); i++) {
        cJSON *port = op_tree_append(ports);
        op_tree_text(port, "name", own_ports[i].name);
        op_tree_number(port, "containerPort", own_ports[i].number);
        op_tree_text(port, "protocol", "TCP");
    }
    add_probe(container, "readinessProbe", "/readyz", 5, 3);
    add_probe(container, "livenessProbe", "/healthz", 10, 12);
}

enum dl_rc op_render_syncer_template(const struct op_render *render, cJSON *into, struct dl_err *err)
{
    cJSON *tree = NULL;
    const char *where = "spec.syncer.template";
    enum dl_rc rc = parse_template(render->spec->syncer.template_json, where, &tree, err);
    if (rc == DL_OK && (rc = check_images(tree, "syncer", where, err)) != DL_OK) {
        cJSON_Delete(tree);
    }
    if (rc != DL_OK) {
        return rc;
    }
    cJSON *metadata = op_tree_object(tree, "metadata"), *labels = op_tree_object(metadata, "labels");
    char digest[24];
    snprintf(digest, sizeof digest, "%016" PRIx64, op_spec_digest(render->spec));
    op_render_labels(render, labels, "syncer");
    op_tree_text(labels, OP_LABEL_ROLE, "syncer");
    op_tree_text(op_tree_object(metadata, "annotations"), OP_ANNOTATION_SPEC, digest); /* A change starts them anew. */
    allow_scale_down(metadata);
    cJSON *spec = op_tree_object(tree, "spec");
    complete_pod(render, spec, true);
    keep_off_spot_nodes(spec);
    add_syncer_container(render, spec);
    static const char *const parts[] = {"metadata", "spec"};
    for (size_t i = 0; i < DL_COUNT_OF(parts); i++) {
        op_tree_set(into, parts[i], cJSON_DetachItemFromObjectCaseSensitive(tree, parts[i]));
    }
    cJSON_Delete(tree);
    return DL_OK;
}

/* --- learners and the evaluator --- */

static void add_worker_variables(const struct op_render *render, cJSON *container, enum op_kind kind, uint32_t id)
{
    DL_AUTO_FREE char *endpoints = calloc(1, ENDPOINTS_MAX);
    char service[OP_CHILD_NAME_MAX], number[16];
    op_part_name(OP_PART_SERVICE, render->spec->name, render->job_uid, service);
    size_t used = 0;
    for (uint32_t i = 0; endpoints != NULL && i < render->spec->syncer.shards; i++) {
        used += (size_t)snprintf(endpoints + used, ENDPOINTS_MAX - used, "%sws://%s-%u.%s.%s.svc:%d", i > 0 ? "," : "",
                                 service, i, service, render->spec->namespace_name, OP_SYNCER_PORT);
    }
    snprintf(number, sizeof number, "%u", id);
    /* Fields first: other variables may refer to them. */
    add_variable(container, "DILOCO_UID", NULL, "metadata.uid");
    add_variable(container, "DILOCO_JOB", render->spec->name, NULL);
    add_variable(container, "DILOCO_NAMESPACE", render->spec->namespace_name, NULL);
    add_variable(container, "DILOCO_ENDPOINTS", endpoints, NULL);
    add_variable(container, "DILOCO_TOKEN_FILE", TOKEN_FILE, NULL);
    add_variable(container, "DILOCO_JOB_FILE", JOB_FILE, NULL);
    if (kind == OP_LEARNER) {
        add_variable(container, "DILOCO_LEARNER", number, NULL);
    }
}

#define WORKER_ARGUMENTS                                                                                               \
    "--job", JOB_FILE, "--endpoints", "$(DILOCO_ENDPOINTS)", "--token-file", TOKEN_FILE, "--uid", "$(DILOCO_UID)"

static void add_worker_arguments(cJSON *container, enum op_kind kind, const cJSON *spec)
{
    char grace[16];
    const cJSON *period = member(spec, "terminationGracePeriodSeconds");
    int seconds = cJSON_IsNumber(period) ? period->valueint : GRACE_SECONDS;
    snprintf(grace, sizeof grace, "%d", DL_MIN(DL_MAX(seconds * 2 / 3, 1), 3600));
    const char *const learn[] = {"learn", WORKER_ARGUMENTS, "--learner", "$(DILOCO_LEARNER)", "--grace-seconds", grace};
    const char *const evaluate[] = {"evaluate", WORKER_ARGUMENTS, "--export", OP_OUTPUT_PATH, "--grace-seconds", grace};
    if (kind == OP_LEARNER) {
        set_arguments(container, learn, (int)DL_COUNT_OF(learn));
    } else {
        set_arguments(container, evaluate, (int)DL_COUNT_OF(evaluate));
    }
}

/* The evaluator has the data of a learner, but not the accelerators, probes and helpers. */
static void turn_into_evaluator(const struct op_render *render, cJSON *spec)
{
    cJSON *container = own_container(spec, "learner");
    op_tree_text(container, "name", "evaluator");
    cJSON *kept = cJSON_DetachItemViaPointer(op_tree_array(spec, "containers"), container);
    cJSON_DeleteItemFromObjectCaseSensitive(spec, "containers");
    if (kept != NULL && !cJSON_AddItemToArray(op_tree_array(spec, "containers"), kept)) {
        cJSON_Delete(kept);
        return;
    }
    static const char *const unwanted[] = {"livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "ports"};
    for (size_t i = 0; i < DL_COUNT_OF(unwanted); i++) {
        cJSON_DeleteItemFromObjectCaseSensitive(container, unwanted[i]);
    }
    static const char *const amounts[] = {"requests", "limits"};
    for (size_t i = 0; i < DL_COUNT_OF(amounts); i++) {
        cJSON *amount = cJSON_GetObjectItemCaseSensitive(member(container, "resources"), amounts[i]);
        for (cJSON *item = amount != NULL ? amount->child : NULL, *next; item != NULL; item = next) {
            next = item->next;
            if (strchr(item->string, '/') != NULL) { /* Extended resources have a domain. */
                cJSON_Delete(cJSON_DetachItemViaPointer(amount, item));
            }
        }
    }
    char name[OP_CHILD_NAME_MAX];
    op_part_name(OP_PART_OUTPUT, render->spec->name, render->job_uid, name);
    op_tree_text(op_tree_object(add_volume(spec, "diloco-output"), "persistentVolumeClaim"), "claimName", name);
    add_mount(container, "diloco-output", OP_OUTPUT_PATH, false);
}

/* Learners of one job prefer different nodes, so that a lost node takes few of them along. */
static void spread(const struct op_render *render, cJSON *spec)
{
    if (member(spec, "topologySpreadConstraints") != NULL) {
        return;
    }
    cJSON *rule = op_tree_append(op_tree_array(spec, "topologySpreadConstraints"));
    op_tree_number(rule, "maxSkew", 1);
    op_tree_text(rule, "topologyKey", "kubernetes.io/hostname");
    op_tree_text(rule, "whenUnsatisfiable", "ScheduleAnyway");
    cJSON *labels = op_tree_object(op_tree_object(rule, "labelSelector"), "matchLabels");
    op_tree_text(labels, OP_LABEL_JOB, render->spec->name);
    op_tree_text(labels, OP_LABEL_ROLE, op_kind_name(OP_LEARNER));
}

static void complete_worker(const struct op_render *render, cJSON *spec, enum op_kind kind, uint32_t pool, uint32_t id)
{
    const struct dl_pool_spec *from = &render->spec->learners.pools[pool];
    bool is_own_image = kind == OP_EVALUATOR || !is_custom(from->template_json);
    complete_pod(render, spec, is_own_image);
    op_tree_text(spec, "restartPolicy", "OnFailure"); /* A crash starts again in its place first. */
    if (kind == OP_EVALUATOR) {
        turn_into_evaluator(render, spec);
    } else {
        spread(render, spec);
    }
    if (kind == OP_LEARNER && from->scavenge.enabled) {
        for (uint32_t i = 0; i < op_spot_label_count; i++) {
            tolerate(spec, op_spot_labels[i].key, "NoSchedule", 0);
        }
        const char *class_name = render->options->scavenge_priority_class;
        if (class_name != NULL && class_name[0] != 0) {
            op_tree_text_if_missing(spec, "priorityClassName", class_name);
        }
    }
    cJSON *container = own_container(spec, op_kind_name(kind));
    complete_container(render, container, render->options->worker_image, is_own_image);
    add_worker_variables(render, container, kind, id);
    if (is_own_image) {
        add_worker_arguments(container, kind, spec);
    }
}

static cJSON *render_pod(const struct op_render *render, enum op_kind kind, uint32_t pool, uint32_t id,
                         uint64_t incarnation, cJSON *from)
{
    char name[OP_CHILD_NAME_MAX], number[24];
    op_pod_name(render->spec->name, kind, id, incarnation, name);
    cJSON *root = cJSON_CreateObject();
    op_tree_text(root, "apiVersion", "v1");
    op_tree_text(root, "kind", "Pod");
    op_tree_set(root, "metadata", cJSON_DetachItemFromObjectCaseSensitive(from, "metadata"));
    op_tree_set(root, "spec", cJSON_DetachItemFromObjectCaseSensitive(from, "spec"));
    cJSON *metadata = op_tree_object(root, "metadata"), *labels = op_tree_object(metadata, "labels");
    cJSON_DeleteItemFromObjectCaseSensitive(metadata, "generateName");
    allow_scale_down(metadata);
    op_tree_text(metadata, "name", name);
    op_tree_text(metadata, "namespace", render->spec->namespace_name);
    op_render_owner(render, metadata);
    op_render_labels(render, labels, op_kind_name(kind));
    op_tree_text(labels, OP_LABEL_ROLE, op_kind_name(kind));
    op_tree_text(labels, OP_LABEL_POOL, render->spec->learners.pools[pool].name);
    snprintf(number, sizeof number, "%" PRIu64, incarnation);
    op_tree_text(labels, OP_LABEL_INCARNATION, number);
    if (kind == OP_LEARNER) {
        snprintf(number, sizeof number, "%u", id);
        op_tree_text(labels, OP_LABEL_LEARNER, number);
    }
    complete_worker(render, op_tree_object(root, "spec"), kind, pool, id);
    return root;
}

enum dl_rc op_render_pod(const struct op_render *render, enum op_kind kind, uint32_t pool, uint32_t id,
                         uint64_t incarnation, char **out, struct dl_err *err)
{
    char where[96];
    const struct dl_learners_spec *learners = &render->spec->learners;
    if (kind == OP_SYNCER || pool >= learners->pool_count) {
        return dl_err_set(err, DL_EINVAL, "no pod of kind %s in pool %u", op_kind_name(kind), pool);
    }
    snprintf(where, sizeof where, "spec.learners.pools[%s].template", learners->pools[pool].name);
    cJSON *from = NULL;
    enum dl_rc rc = parse_template(learners->pools[pool].template_json, where, &from, err);
    if (rc == DL_OK && (rc = check_images(from, "learner", where, err)) != DL_OK) {
        cJSON_Delete(from);
    }
    if (rc != DL_OK) {
        return rc;
    }
    cJSON *root = render_pod(render, kind, pool, id, incarnation, from);
    char *text = root != NULL ? cJSON_PrintUnformatted(root) : NULL;
    cJSON_Delete(root);
    cJSON_Delete(from);
    if (text == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a pod of job %s", render->spec->name);
    }
    *out = text;
    return DL_OK;
}
