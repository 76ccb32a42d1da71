#include "operator/kube/path.h"

#include <stdio.h>
#include <string.h>

const struct op_resource op_res_pods = {"", "v1", "pods", "Pod", true};
const struct op_resource op_res_nodes = {"", "v1", "nodes", "Node", false};
const struct op_resource op_res_secrets = {"", "v1", "secrets", "Secret", true};
const struct op_resource op_res_config_maps = {"", "v1", "configmaps", "ConfigMap", true};
const struct op_resource op_res_services = {"", "v1", "services", "Service", true};
const struct op_resource op_res_claims = {"", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", true};
const struct op_resource op_res_stateful_sets = {"apps", "v1", "statefulsets", "StatefulSet", true};
const struct op_resource op_res_disruption_budgets = {"policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget",
                                                      true};
const struct op_resource op_res_network_policies = {"networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy",
                                                    true};
const struct op_resource op_res_leases = {"coordination.k8s.io", "v1", "leases", "Lease", true};
const struct op_resource op_res_events = {"events.k8s.io", "v1", "events", "Event", true};

void op_path_init(struct op_path *path)
{
    *path = (struct op_path){.err.rc = DL_OK};
    dl_buf_init(&path->buf, OP_PATH_BYTES_MAX);
}

void op_path_release(struct op_path *path)
{
    dl_buf_release(&path->buf);
}

static void refuse(struct op_path *path, const char *what, const char *value)
{
    if (path->err.rc == DL_OK) {
        dl_err_set(&path->err, DL_EINVAL, "request path '%.200s': %s '%.80s'",
                   path->buf.data != NULL ? path->buf.data : "", what, value);
    }
}

static void encode(struct dl_buf *buf, const char *text)
{
    for (const unsigned char *c = (const unsigned char *)text; *c != 0; c++) {
        bool is_plain = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z') || (*c >= '0' && *c <= '9') ||
                        strchr("-._~", *c) != NULL;
        if (is_plain) {
            dl_buf_append(buf, c, 1);
        } else {
            dl_buf_printf(buf, "%%%02X", *c);
        }
    }
}

void op_path_segment(struct op_path *path, const char *segment)
{
    if (segment == NULL || segment[0] == 0) {
        refuse(path, "an empty name would address the whole collection", "");
    } else if (strcmp(segment, ".") == 0 || strcmp(segment, "..") == 0) {
        refuse(path, "not a name:", segment);
    } else if (strlen(segment) > OP_NAME_MAX) {
        refuse(path, "longer than a name may be:", segment);
    } else if (path->has_query) {
        refuse(path, "a segment after the query:", segment);
    } else {
        dl_buf_append(&path->buf, "/", 1);
        encode(&path->buf, segment);
    }
}

void op_path_collection(struct op_path *path, const struct op_resource *resource, const char *space)
{
    if (resource->group[0] == 0) {
        op_path_segment(path, "api");
    } else {
        op_path_segment(path, "apis");
        op_path_segment(path, resource->group);
    }
    op_path_segment(path, resource->version);
    if (space != NULL && resource->is_namespaced) {
        op_path_segment(path, "namespaces");
        op_path_segment(path, space);
    }
    op_path_segment(path, resource->plural);
}

void op_path_object(struct op_path *path, const struct op_resource *resource, const char *space, const char *name)
{
    if (resource->is_namespaced && space == NULL) {
        refuse(path, "no namespace given for", resource->plural);
    }
    op_path_collection(path, resource, space);
    op_path_segment(path, name);
}

void op_path_query(struct op_path *path, const char *key, const char *value)
{
    if (value == NULL || value[0] == 0) {
        return;
    }
    dl_buf_append(&path->buf, path->has_query ? "&" : "?", 1);
    path->has_query = true;
    encode(&path->buf, key);
    dl_buf_append(&path->buf, "=", 1);
    encode(&path->buf, value);
}

enum dl_rc op_path_text(const struct op_path *path, const char **out, struct dl_err *err)
{
    if (path->err.rc != DL_OK) {
        return dl_err_set(err, path->err.rc, "%s", path->err.text);
    }
    if (path->buf.failed || path->buf.size == 0) {
        return dl_err_set(err, DL_EINVAL, "request path is empty or longer than %d bytes", OP_PATH_BYTES_MAX);
    }
    *out = path->buf.data;
    return DL_OK;
}
