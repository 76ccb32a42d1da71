/* op_reflector: follows all objects of one resource: list in pages, then watch, for ever.
 *
 * It keeps no objects, only their keys and a fingerprint of their resourceVersion; the user keeps its own projection
 * of each. Level-triggered: `changed` may repeat, and a burst of changes may be told as one. Watches carry bookmarks
 * and timeoutSeconds; silence beyond OP_REFLECTOR_IDLE_MS breaks a half-open connection; a watch that ended is
 * resumed from the last resourceVersion; 410 or an ERROR event lists again (objects that vanished meanwhile are told
 * as gone); failures back off with jitter up to 30 s, without end. resourceVersions are compared for equality only.
 * Loop's thread; layer operator/kube. */
#ifndef OP_KUBE_REFLECTOR_H
#define OP_KUBE_REFLECTOR_H

#include <cjson/cJSON.h>

#include "operator/kube/client.h"
#include "operator/kube/path.h"

#define OP_REFLECTOR_PAGE 100            /* Objects a page of a list. */
#define OP_REFLECTOR_LINE_MAX (4u << 20) /* Bytes of one watch event. */
#define OP_REFLECTOR_WATCH_SECONDS 300   /* timeoutSeconds; each watch takes 1 to 2 times this. */
#define OP_REFLECTOR_IDLE_MS 90000       /* The server sends bookmarks about once a minute. */
#define OP_REFLECTOR_BACKOFF_MAX_MS 30000

/* An object as it came; all borrowed, ends with the callback. */
struct op_object {
    const char *space, *name, *uid, *resource_version; /* `space` is "" for resources without namespace. */
    const char *text; /* The object's own JSON, exactly as the server sent it; not zero-terminated. */
    size_t size;
    const cJSON *json; /* Parsed by op_json_parse: read numbers with the getters of operator/reconcile/json.h only. */
};

struct op_reflector_options {
    const struct op_resource *resource;
    const char *space;                           /* Copied; NULL: all namespaces. */
    const char *label_selector, *field_selector; /* Copied; NULL: all. */
    void *context;
    /* An object is there, new or changed. */
    void (*changed)(void *context, const struct op_object *object);
    /* It is gone. */
    void (*gone)(void *context, const char *space, const char *name);
    /* A complete list was told (first and after every relist). */
    void (*synced)(void *context);
    /* A list or watch failed and will be tried again; for logs and conditions. May be NULL. */
    void (*failed)(void *context, const struct dl_err *err);
    /* Shorter bounds for tests; 0: the constants above. */
    int64_t idle_ms, backoff_first_ms, backoff_max_ms;
    uint32_t page;
};

struct op_reflector_stats {
    uint64_t lists, watches, events, bookmarks, expired, failures, idle_breaks;
};

struct op_reflector; /* Opaque. */

/* Starts with the next turn of the loop. */
DL_MUST_CHECK enum dl_rc op_reflector_new(struct op_client *client, const struct op_reflector_options *options,
                                          struct op_reflector **out, struct dl_err *err);
void op_reflector_free(struct op_reflector *reflector); /* NULL is fine. Allowed within its callbacks. */

bool op_reflector_is_synced(const struct op_reflector *reflector); /* At least one list was complete. */
size_t op_reflector_count(const struct op_reflector *reflector);   /* Objects known. */
struct op_reflector_stats op_reflector_stats(const struct op_reflector *reflector);

/* reflector_lists_total, reflector_watches_total, diloco_watch_events_total, diloco_watch_failures_total,
 * diloco_watched_objects of `count` reflectors, labelled by resource plural. */
void op_reflector_metrics(struct op_reflector *const *reflectors, size_t count, struct dl_metrics *metrics);

#endif
