/* op_api: the verbs that the controller uses, as requests of an op_client. Thread and errors: as client.h; what
 * cannot be sent (a refused name) comes back as DL_EINVAL at once and `done` is not called.
 *
 * Layer operator/kube. */
#ifndef OP_KUBE_API_H
#define OP_KUBE_API_H

#include "operator/kube/client.h"
#include "operator/kube/path.h"

#define OP_FIELD_MANAGER "diloco-operator"

/* Names an object. `space` is NULL for resources without namespace; `subresource` NULL, or "status". */
struct op_ref {
    const struct op_resource *resource;
    const char *space, *name, *subresource;
};

/* Where the answer goes. `done` may be NULL; `id` may be NULL (see op_client_send). */
struct op_reply_to {
    op_result_fn *done;
    void *context;
    uint64_t *id;
};

DL_MUST_CHECK enum dl_rc op_api_get(struct op_client *client, const struct op_ref *ref, struct op_reply_to to,
                                    struct dl_err *err);

/* POST of a whole object (`text` is JSON); a repeat that finds it there is DL_EEXISTS. `ref->name` is only for
 * messages. */
DL_MUST_CHECK enum dl_rc op_api_create(struct op_client *client, const struct op_ref *ref, const char *text,
                                       struct op_reply_to to, struct dl_err *err);

/* Server-side apply with force: creates or changes; only the fields in `text` are ours. `text` must carry
 * apiVersion, kind, metadata.name. With "status" as subresource it applies the status. Repeatable. */
DL_MUST_CHECK enum dl_rc op_api_apply(struct op_client *client, const struct op_ref *ref, const char *text,
                                      struct op_reply_to to, struct dl_err *err);

/* JSON merge patch (RFC 7386; null removes a field). Repeatable. */
DL_MUST_CHECK enum dl_rc op_api_merge_patch(struct op_client *client, const struct op_ref *ref, const char *text,
                                            struct op_reply_to to, struct dl_err *err);

struct op_delete_options {
    const char *uid; /* Deletes only this very object (DL_ECONFLICT when another stands there); NULL: any. */
    const char *resource_version; /* Deletes only this state of it; NULL: any. */
    int64_t grace_seconds;        /* -1: the object's own. */
    const char *propagation;      /* "Background", "Foreground", "Orphan"; NULL: the resource's own. */
};
/* An object that is gone already is DL_ENOTFOUND: as good as done. `options` NULL: none of them. */
DL_MUST_CHECK enum dl_rc op_api_delete(struct op_client *client, const struct op_ref *ref,
                                       const struct op_delete_options *options, struct op_reply_to to,
                                       struct dl_err *err);

/* GET of an absolute URL that is not the API server's (a syncer's /status), without credentials, one try, answer at
 * most `bytes_max`. The same client's limits do not apply to it. */
DL_MUST_CHECK enum dl_rc op_fetch(struct op_client *client, const char *url, int64_t timeout_ms, size_t bytes_max,
                                  struct op_reply_to to, struct dl_err *err);

/* The same through the API server: GET .../pods/POD:PORT/proxy/PATH; `path` is one segment ("status"). One try. */
DL_MUST_CHECK enum dl_rc op_api_pod_proxy(struct op_client *client, const char *space, const char *pod, uint16_t port,
                                          const char *path, int64_t timeout_ms, struct op_reply_to to,
                                          struct dl_err *err);

#endif
