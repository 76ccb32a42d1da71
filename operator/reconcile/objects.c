#include "operator/reconcile/objects.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"
#include "operator/reconcile/objects_internal.h"

/* --- trees --- */

static cJSON *ensure(cJSON *parent, const char *key, bool is_array)
{
    if (parent == NULL) {
        return NULL;
    }
    cJSON *item = cJSON_GetObjectItemCaseSensitive(parent, key);
    if (item != NULL && (is_array ? cJSON_IsArray(item) : cJSON_IsObject(item))) {
        return item;
    }
    cJSON_DeleteItemFromObjectCaseSensitive(parent, key);
    return is_array ? cJSON_AddArrayToObject(parent, key) : cJSON_AddObjectToObject(parent, key);
}

cJSON *op_tree_object(cJSON *parent, const char *key)
{
    return ensure(parent, key, false);
}

cJSON *op_tree_array(cJSON *parent, const char *key)
{
    return ensure(parent, key, true);
}

void op_tree_set(cJSON *parent, const char *key, cJSON *value)
{
    if (parent == NULL || value == NULL) {
        cJSON_Delete(value);
        return;
    }
    cJSON_DeleteItemFromObjectCaseSensitive(parent, key);
    if (!cJSON_AddItemToObject(parent, key, value)) {
        cJSON_Delete(value);
    }
}

void op_tree_text(cJSON *parent, const char *key, const char *value)
{
    op_tree_set(parent, key, cJSON_CreateString(value));
}

void op_tree_number(cJSON *parent, const char *key, double value)
{
    op_tree_set(parent, key, cJSON_CreateNumber(value));
}

void op_tree_bool(cJSON *parent, const char *key, bool value)
{
    op_tree_set(parent, key, cJSON_CreateBool(value));
}

static bool is_missing(const cJSON *parent, const char *key)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(parent, key);
    return item == NULL || cJSON_IsNull(item);
}

void op_tree_text_if_missing(cJSON *parent, const char *key, const char *value)
{
    if (is_missing(parent, key)) {
        op_tree_text(parent, key, value);
    }
}

void op_tree_number_if_missing(cJSON *parent, const char *key, double value)
{
    if (is_missing(parent, key)) {
        op_tree_number(parent, key, value);
    }
}

void op_tree_bool_if_missing(cJSON *parent, const char *key, bool value)
{
    if (is_missing(parent, key)) {
        op_tree_bool(parent, key, value);
    }
}

cJSON *op_tree_append(cJSON *array)
{
    cJSON *item = array != NULL ? cJSON_CreateObject() : NULL;
    if (item != NULL && !cJSON_AddItemToArray(array, item)) {
        cJSON_Delete(item);
        item = NULL;
    }
    return item;
}

cJSON *op_tree_named(const cJSON *array, const char *name)
{
    cJSON *item;
    cJSON_ArrayForEach(item, array)
    {
        const cJSON *own = cJSON_GetObjectItemCaseSensitive(item, "name");
        if (cJSON_IsString(own) && strcmp(own->valuestring, name) == 0) {
            return item;
        }
    }
    return NULL;
}

/* --- what all have --- */

void op_render_labels(const struct op_render *render, cJSON *labels, const char *component)
{
    op_tree_text(labels, OP_LABEL_APP, OP_APP_NAME);
    op_tree_text(labels, OP_LABEL_INSTANCE, render->spec->name);
    op_tree_text(labels, OP_LABEL_COMPONENT, component);
    op_tree_text(labels, OP_LABEL_PART_OF, OP_APP_NAME);
    op_tree_text(labels, OP_LABEL_MANAGED_BY, OP_MANAGER);
    op_tree_text(labels, OP_LABEL_JOB, render->spec->name);
    op_tree_text(labels, OP_LABEL_JOB_UID, render->job_uid);
}

void op_render_owner(const struct op_render *render, cJSON *metadata)
{
    op_tree_set(metadata, "ownerReferences", cJSON_CreateArray());
    cJSON *owner = op_tree_append(op_tree_array(metadata, "ownerReferences"));
    op_tree_text(owner, "apiVersion", DL_SPEC_API_VERSION);
    op_tree_text(owner, "kind", DL_SPEC_KIND);
    op_tree_text(owner, "name", render->spec->name);
    op_tree_text(owner, "uid", render->job_uid);
    op_tree_bool(owner, "controller", true);
    op_tree_bool(owner, "blockOwnerDeletion", false);
}

static void pod_selector(const struct op_render *render, cJSON *selector, const char *role)
{
    cJSON *labels = op_tree_object(selector, "matchLabels");
    op_tree_text(labels, OP_LABEL_JOB, render->spec->name);
    if (role != NULL) {
        op_tree_text(labels, OP_LABEL_ROLE, role);
    }
}

/* The spec as processes in the cluster read it. Templates are the operator's matter, and so is the deadline, which is
 * counted from the job's start. */
static enum dl_rc spec_text(const struct dl_spec *spec, bool is_digest, char **out, struct dl_err *err)
{
    DL_AUTO_FREE struct dl_spec *copy = malloc(sizeof *copy);
    if (copy == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the spec of job %s", spec->name);
    }
    *copy = *spec;
    copy->syncer.template_json = NULL;
    copy->active_deadline_seconds = 0;
    copy->ttl_seconds_after_finished = -1;
    copy->suspend = false;
    copy->syncer.port = 0;
    for (uint32_t i = 0; i < copy->learners.pool_count; i++) {
        copy->learners.pools[i].template_json = NULL;
    }
    if (is_digest) {
        copy->learners = (struct dl_learners_spec){.max = 1, .replicas = 1, .min = 1};
    }
    for (uint32_t i = 0; i < copy->training.data.path_count; i++) {
        char *path = copy->training.data.paths[i];
        char absolute[sizeof copy->training.data.paths[i]];
        if (path[0] == '/') {
            continue;
        }
        int length = snprintf(absolute, sizeof absolute, OP_DATA_PATH "/%s", path);
        if (length < 0 || (size_t)length >= sizeof absolute) {
            return dl_err_set(err, DL_EINVAL, "spec.training.data.paths: '%s' is too long below " OP_DATA_PATH, path);
        }
        memcpy(path, absolute, (size_t)length + 1);
    }
    return dl_spec_to_json(copy, out, err);
}

uint64_t op_spec_digest(const struct dl_spec *spec)
{
    struct dl_err err;
    DL_AUTO_FREE char *text = NULL;
    return spec_text(spec, true, &text, &err) == DL_OK ? dl_hash64(text, strlen(text), 0) : 0;
}

/* --- the parts --- */

static void render_token(cJSON *root, const char *token)
{
    op_tree_text(root, "type", "Opaque");
    op_tree_bool(root, "immutable", true);
    op_tree_text(op_tree_object(root, "stringData"), "token", token);
}

static enum dl_rc render_spec(const struct op_render *render, cJSON *root, struct dl_err *err)
{
    DL_AUTO_FREE char *text = NULL;
    enum dl_rc rc = spec_text(render->spec, false, &text, err);
    if (rc == DL_OK) {
        op_tree_text(op_tree_object(root, "data"), "job.json", text);
    }
    return rc;
}

static void add_port(cJSON *ports, const char *name, double number)
{
    cJSON *port = op_tree_append(ports);
    op_tree_text(port, "name", name);
    op_tree_number(port, "port", number);
    op_tree_number(port, "targetPort", number);
    op_tree_text(port, "protocol", "TCP");
}

static void render_service(const struct op_render *render, cJSON *root)
{
    cJSON *spec = op_tree_object(root, "spec");
    op_tree_text(spec, "clusterIP", "None");
    op_tree_bool(spec, "publishNotReadyAddresses", true);
    cJSON *selector = op_tree_object(spec, "selector");
    op_tree_text(selector, OP_LABEL_JOB, render->spec->name);
    op_tree_text(selector, OP_LABEL_ROLE, "syncer");
    cJSON *ports = op_tree_array(spec, "ports");
    add_port(ports, "diloco", OP_SYNCER_PORT);
    add_port(ports, "health", OP_HEALTH_PORT);
}

static void claim(const struct op_render *render, cJSON *spec)
{
    op_tree_set(spec, "accessModes", cJSON_CreateStringArray((const char *const[]){"ReadWriteOnce"}, 1));
    op_tree_text(op_tree_object(op_tree_object(spec, "resources"), "requests"), "storage",
                 render->spec->syncer.storage_size);
    if (render->spec->syncer.storage_class[0] != 0) {
        op_tree_text(spec, "storageClassName", render->spec->syncer.storage_class);
    }
}

static enum dl_rc render_set(const struct op_render *render, cJSON *root, uint32_t syncers, struct dl_err *err)
{
    char service[OP_CHILD_NAME_MAX];
    cJSON *spec = op_tree_object(root, "spec");
    op_part_name(OP_PART_SERVICE, render->spec->name, render->job_uid, service);
    op_tree_text(spec, "serviceName", service);
    op_tree_number(spec, "replicas", syncers);
    op_tree_text(spec, "podManagementPolicy", "Parallel");
    op_tree_number(spec, "revisionHistoryLimit", 2);
    /* Volumes outlive a suspension and go with the set, which goes with the job. */
    cJSON *retention = op_tree_object(spec, "persistentVolumeClaimRetentionPolicy");
    op_tree_text(retention, "whenScaled", "Retain");
    op_tree_text(retention, "whenDeleted", "Delete");
    pod_selector(render, op_tree_object(spec, "selector"), "syncer");
    cJSON *state = op_tree_append(op_tree_array(spec, "volumeClaimTemplates"));
    op_tree_text(state, "apiVersion", "v1");
    op_tree_text(state, "kind", "PersistentVolumeClaim");
    op_tree_text(op_tree_object(state, "metadata"), "name", "state");
    claim(render, op_tree_object(state, "spec"));
    return op_render_syncer_template(render, op_tree_object(spec, "template"), err);
}

static void render_budget(const struct op_render *render, cJSON *root)
{
    cJSON *spec = op_tree_object(root, "spec");
    op_tree_number(spec, "maxUnavailable", 1); /* More would stop all rounds; none would stop drains of nodes. */
    pod_selector(render, op_tree_object(spec, "selector"), "syncer");
}

static cJSON *rule_port(cJSON *rule, double number)
{
    cJSON *port = op_tree_append(op_tree_array(rule, "ports"));
    op_tree_text(port, "protocol", "TCP");
    op_tree_number(port, "port", number);
    return rule;
}

/* The protocol's port is for the job's own pods and the operator; health and metrics are for everybody. */
static void render_policy(const struct op_render *render, cJSON *root)
{
    cJSON *spec = op_tree_object(root, "spec");
    pod_selector(render, op_tree_object(spec, "podSelector"), "syncer");
    op_tree_set(spec, "policyTypes", cJSON_CreateStringArray((const char *const[]){"Ingress"}, 1));
    cJSON *ingress = op_tree_array(spec, "ingress");
    cJSON *from = op_tree_array(rule_port(op_tree_append(ingress), OP_SYNCER_PORT), "from");
    pod_selector(render, op_tree_object(op_tree_append(from), "podSelector"), NULL);
    cJSON *operator_pods = op_tree_append(from);
    op_tree_object(operator_pods, "namespaceSelector");
    cJSON *labels = op_tree_object(op_tree_object(operator_pods, "podSelector"), "matchLabels");
    op_tree_text(labels, OP_LABEL_PART_OF, OP_APP_NAME); /* As the chart labels the operator's pods. */
    op_tree_text(labels, OP_LABEL_COMPONENT, "operator");
    rule_port(op_tree_append(ingress), OP_HEALTH_PORT);
}

static enum dl_rc render(const struct op_render *how, enum op_part part, const char *token, uint32_t syncers,
                         cJSON *root, struct dl_err *err)
{
    char name[OP_CHILD_NAME_MAX];
    const struct op_part_kind *kind = &op_part_kinds[part];
    op_part_name(part, how->spec->name, how->job_uid, name);
    op_tree_text(root, "apiVersion", kind->api);
    op_tree_text(root, "kind", kind->kind);
    cJSON *metadata = op_tree_object(root, "metadata");
    op_tree_text(metadata, "name", name);
    op_tree_text(metadata, "namespace", how->spec->namespace_name);
    bool is_of_syncers =
        part == OP_PART_SERVICE || part == OP_PART_SET || part == OP_PART_BUDGET || part == OP_PART_POLICY;
    op_render_labels(how, op_tree_object(metadata, "labels"), is_of_syncers ? "syncer" : "job");
    if (part != OP_PART_OUTPUT) {
        op_render_owner(how, metadata);
    }
    switch (part) {
    case OP_PART_TOKEN: render_token(root, token); return DL_OK;
    case OP_PART_SPEC: return render_spec(how, root, err);
    case OP_PART_SERVICE: render_service(how, root); return DL_OK;
    case OP_PART_SET: return render_set(how, root, syncers, err);
    case OP_PART_BUDGET: render_budget(how, root); return DL_OK;
    case OP_PART_POLICY: render_policy(how, root); return DL_OK;
    case OP_PART_OUTPUT: claim(how, op_tree_object(root, "spec")); return DL_OK;
    case OP_PART_COUNT: break;
    }
    return dl_err_set(err, DL_EINVAL, "no such part of a job: %d", (int)part);
}

enum dl_rc op_render_part(const struct op_render *how, enum op_part part, const char *token, uint32_t syncers,
                          char **out, struct dl_err *err)
{
    cJSON *root = cJSON_CreateObject();
    enum dl_rc rc = root == NULL ? dl_err_set(err, DL_ENOMEM, "no memory for an object of job %s", how->spec->name)
                                 : render(how, part, token, syncers, root, err);
    char *text = rc == DL_OK ? cJSON_PrintUnformatted(root) : NULL;
    cJSON_Delete(root);
    if (rc == DL_OK && text == NULL) {
        rc = dl_err_set(err, DL_ENOMEM, "no memory for an object of job %s", how->spec->name);
    }
    if (rc == DL_OK) {
        *out = text;
    }
    return rc;
}
