#include "operator/kube/api.h"

#include <stdio.h>
#include <string.h>

#include "operator/kube/client_internal.h"

#define APPLY_TYPE "application/apply-patch+yaml"
#define MERGE_TYPE "application/merge-patch+json"

static void put_object(struct op_path *path, const struct op_ref *ref)
{
    op_path_object(path, ref->resource, ref->space, ref->name);
    if (ref->subresource != NULL) {
        op_path_segment(path, ref->subresource);
    }
}

/* Sends `request` to `path`, which it releases. */
static enum dl_rc send_to(struct op_client *client, struct op_path *path, struct op_request request, const char *text,
                          struct op_reply_to to, struct dl_err *err)
{
    request.body = text;
    request.size = text != NULL ? strlen(text) : 0;
    request.done = to.done;
    request.context = to.context;
    enum dl_rc rc = op_path_text(path, &request.path, err);
    if (rc == DL_OK) {
        rc = op_client_send(client, &request, to.id, err);
    }
    op_path_release(path);
    return rc;
}

/* Nobody waits for an event. */
static bool is_background(const struct op_ref *ref)
{
    return ref->resource == &op_res_events;
}

static enum dl_rc send_object(struct op_client *client, const struct op_ref *ref, struct op_request request,
                              const char *text, struct op_reply_to to, struct dl_err *err)
{
    struct op_path path;
    op_path_init(&path);
    put_object(&path, ref);
    return send_to(client, &path, request, text, to, err);
}

enum dl_rc op_api_get(struct op_client *client, const struct op_ref *ref, struct op_reply_to to, struct dl_err *err)
{
    return send_object(client, ref, (struct op_request){.method = "GET"}, NULL, to, err);
}

enum dl_rc op_api_create(struct op_client *client, const struct op_ref *ref, const char *text, struct op_reply_to to,
                         struct dl_err *err)
{
    struct op_path path;
    op_path_init(&path);
    if (ref->subresource != NULL) {
        put_object(&path, ref);
    } else {
        op_path_collection(&path, ref->resource, ref->space);
    }
    if (ref->resource ==
        &op_res_pods) { /* People write templates: an unknown field is a typing error, not to be dropped. */
        op_path_query(&path, "fieldValidation", "Strict");
    }
    if (ref->resource->is_namespaced && ref->space == NULL) {
        op_path_release(&path);
        return dl_err_set(err, DL_EINVAL, "cannot create %s '%.80s' without a namespace", ref->resource->kind,
                          ref->name != NULL ? ref->name : "");
    }
    struct op_request request = {.method = "POST", .is_background = is_background(ref)};
    return send_to(client, &path, request, text, to, err);
}

enum dl_rc op_api_apply(struct op_client *client, const struct op_ref *ref, const char *text, struct op_reply_to to,
                        struct dl_err *err)
{
    struct op_path path;
    op_path_init(&path);
    put_object(&path, ref);
    op_path_query(&path, "fieldManager", OP_FIELD_MANAGER);
    op_path_query(&path, "force", "true");
    struct op_request request = {.method = "PATCH", .content_type = APPLY_TYPE, .is_repeatable = true};
    return send_to(client, &path, request, text, to, err);
}

enum dl_rc op_api_merge_patch(struct op_client *client, const struct op_ref *ref, const char *text,
                              struct op_reply_to to, struct dl_err *err)
{
    struct op_request request = {
        .method = "PATCH", .content_type = MERGE_TYPE, .is_repeatable = true, .is_background = is_background(ref)};
    return send_object(client, ref, request, text, to, err);
}

enum dl_rc op_api_delete(struct op_client *client, const struct op_ref *ref, const struct op_delete_options *options,
                         struct op_reply_to to, struct dl_err *err)
{
    static const struct op_delete_options none = {.grace_seconds = -1};
    const struct op_delete_options *wanted = options != NULL ? options : &none;
    cJSON *body = cJSON_CreateObject();
    bool is_built = cJSON_AddStringToObject(body, "apiVersion", "v1") != NULL &&
                    cJSON_AddStringToObject(body, "kind", "DeleteOptions") != NULL;
    if (wanted->grace_seconds >= 0) {
        is_built =
            is_built && cJSON_AddNumberToObject(body, "gracePeriodSeconds", (double)wanted->grace_seconds) != NULL;
    }
    if (wanted->propagation != NULL) {
        is_built = is_built && cJSON_AddStringToObject(body, "propagationPolicy", wanted->propagation) != NULL;
    }
    if (wanted->uid != NULL || wanted->resource_version != NULL) {
        cJSON *only = cJSON_AddObjectToObject(body, "preconditions");
        is_built = is_built && only != NULL;
        is_built = is_built && (wanted->uid == NULL || cJSON_AddStringToObject(only, "uid", wanted->uid) != NULL);
        is_built = is_built && (wanted->resource_version == NULL ||
                                cJSON_AddStringToObject(only, "resourceVersion", wanted->resource_version) != NULL);
    }
    char *text = is_built ? cJSON_PrintUnformatted(body) : NULL;
    cJSON_Delete(body);
    if (text == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to delete '%.80s'", ref->name);
    }
    enum dl_rc rc = send_object(client, ref, (struct op_request){.method = "DELETE"}, text, to, err);
    cJSON_free(text);
    return rc;
}

enum dl_rc op_fetch(struct op_client *client, const char *url, int64_t timeout_ms, size_t bytes_max,
                    struct op_reply_to to, struct dl_err *err)
{
    struct op_request request = {
        .method = "GET", .path = url, .timeout_ms = timeout_ms, .done = to.done, .context = to.context};
    return op_client_fetch(client, &request, bytes_max, to.id, err);
}

enum dl_rc op_api_pod_proxy(struct op_client *client, const char *space, const char *pod, uint16_t port,
                            const char *path_below, int64_t timeout_ms, struct op_reply_to to, struct dl_err *err)
{
    char name[OP_NAME_MAX + 16];
    snprintf(name, sizeof name, "%.*s:%u", OP_NAME_MAX - 8, pod, port);
    struct op_path path;
    op_path_init(&path);
    op_path_object(&path, &op_res_pods, space, pod[0] != 0 && strlen(pod) <= OP_NAME_MAX - 8 ? name : "");
    op_path_segment(&path, "proxy");
    op_path_segment(&path, path_below);
    struct op_request request = {.method = "GET", .timeout_ms = timeout_ms, .is_once = true};
    return send_to(client, &path, request, NULL, to, err);
}
