/* A small Kubernetes API server in a thread of the test: a store with lists in pages, watches with bookmarks, apply, merge
 * and JSON patches, subresources, deletion with preconditions, finalizers and garbage collection; and faults by script.
 *
 *     struct fake_api *api = fake_api_start(NULL);
 *     struct op_config config = fake_api_config(api);                  borrowed from `api`
 *     fake_api_put(api, "/api/v1/namespaces/a/pods/x", "{...}");       what a kubelet or a user would do; told to watches
 *     fake_api_fault(api, (struct fake_fault){.method = "POST", .part = "/pods", .times = 2, .status = 429});
 *     ...
 *     fake_api_stop(api);
 *
 * One thread a connection, everything shared is under one lock; all functions below may be called from the test's thread. */
#ifndef DL_TESTS_FAKE_API_H
#define DL_TESTS_FAKE_API_H

#include <arpa/inet.h>
#include <assert.h>
#include <cjson/cJSON.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/buf.h"
#include "common/mem.h"
#include "operator/kube/config.h"
#include "operator/kube/map.h"

#define FAKE_API_FAULTS_MAX 32
#define FAKE_API_CONNECTIONS_MAX 4096
#define FAKE_API_HEAD_MAX 16384

enum fake_fault_kind {
    FAKE_STATUS,      /* Answers `status` with a Status object; nothing is done. */
    FAKE_CLOSE,       /* Closes without an answer; nothing is done. */
    FAKE_CLOSE_AFTER, /* Does what was asked, then closes without an answer. */
    FAKE_STALL,       /* Does nothing and keeps the connection open. */
    FAKE_SHORT,       /* Announces more bytes than come. */
    FAKE_RAW,         /* Answers 200 with `message` as the body. */
};

struct fake_fault {
    const char *method; /* NULL: any. */
    const char *part;   /* Of "path?query"; NULL: any. */
    int times;          /* 0 is taken for 1; -1: for ever. */
    enum fake_fault_kind kind;
    int status;
    const char *reason, *message; /* Constants. */
    int retry_after_s;
};

struct fake_request {
    char method[8];
    char path[4096];  /* As sent, without the query. */
    char query[8192]; /* As sent. */
    char authorization[4096];
    char content_type[128];
    char *body;
    size_t size;
};

struct fake_object {
    TAILQ_ENTRY(fake_object) all;
    char *key;        /* Its path. */
    char *collection; /* Path without namespace and name: "/api/v1/pods". */
    char *space;      /* "" for objects without. */
    cJSON *json;
};

struct fake_event {
    uint64_t version;
    char *collection, *space, *text; /* `text` is the whole line. */
    cJSON *labels;
};

struct fake_conn {
    struct fake_api *api;
    pthread_t thread;
    int fd; /* -1: closed. */
    SSL *ssl;
    uint64_t cuts, bookmarks, oldest; /* The server's when the request came. */
};

struct fake_api {
    pthread_mutex_t lock;
    pthread_cond_t news;
    int listener;
    uint16_t port;
    pthread_t thread;
    bool is_stopping;
    SSL_CTX *tls; /* NULL: plain HTTP. The test's to free. */
    char url[64];
    char token[256]; /* Accepted bearer token; "": anybody. */
    struct fake_conn *conns[FAKE_API_CONNECTIONS_MAX];
    size_t conn_count;
    struct op_map by_key;
    TAILQ_HEAD(, fake_object) objects;
    uint64_t version, oldest; /* Watches from before `oldest` are told 410. */
    uint64_t uids;
    struct fake_event *events;
    size_t event_count, event_capacity;
    uint64_t bookmarks, cuts;
    bool pods_linger; /* A deleted pod with a grace period stays, with a deletionTimestamp, until fake_api_remove. */
    struct fake_fault faults[FAKE_API_FAULTS_MAX];
    char **requests; /* "METHOD path?query", all of them. */
    size_t request_count, request_capacity;
    char last_authorization[4096];
    char *last_body;
    /* Answers by itself when it returns true (fake_conn_write); called without the lock. May be NULL. */
    bool (*hook)(void *context, struct fake_conn *conn, const struct fake_request *request);
    void *hook_context;
};

/* --- bytes --- */

static inline bool fake_conn_write(struct fake_conn *conn, const char *bytes, size_t size)
{
    while (size > 0) {
        ssize_t put =
            conn->ssl != NULL ? SSL_write(conn->ssl, bytes, (int)size) : send(conn->fd, bytes, size, MSG_NOSIGNAL);
        if (put <= 0) {
            return false;
        }
        bytes += put;
        size -= (size_t)put;
    }
    return true;
}

static inline ssize_t fake_conn_read(struct fake_conn *conn, char *bytes, size_t size)
{
    return conn->ssl != NULL ? SSL_read(conn->ssl, bytes, (int)size) : recv(conn->fd, bytes, size, 0);
}

/* One piece of a chunked body. */
static inline bool fake_chunk(struct fake_conn *conn, const char *bytes, size_t size)
{
    char head[32];
    int used = snprintf(head, sizeof head, "%zx\r\n", size);
    return fake_conn_write(conn, head, (size_t)used) && fake_conn_write(conn, bytes, size) &&
           fake_conn_write(conn, "\r\n", 2);
}

static inline bool fake_answer(struct fake_conn *conn, int status, const char *body, int retry_after_s)
{
    char head[256], retry[64] = "";
    if (retry_after_s > 0) {
        snprintf(retry, sizeof retry, "Retry-After: %d\r\n", retry_after_s);
    }
    int used = snprintf(head, sizeof head,
                        "HTTP/1.1 %d Status\r\nContent-Type: application/json\r\n%sContent-Length: %zu\r\n\r\n", status,
                        retry, strlen(body));
    return fake_conn_write(conn, head, (size_t)used) && fake_conn_write(conn, body, strlen(body));
}

static inline bool fake_answer_status(struct fake_conn *conn, int status, const char *reason, const char *message,
                                      int retry_after_s)
{
    char body[1024];
    snprintf(body, sizeof body,
             "{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"status\":\"Failure\",\"reason\":\"%s\",\"message\":\"%s\","
             "\"code\":%d}",
             reason != NULL ? reason : "", message != NULL ? message : "", status);
    return fake_answer(conn, status, body, retry_after_s);
}

/* --- paths --- */

struct fake_target {
    char collection[600], space[300], name[300], sub[64];
};

static inline void fake_decode(char *text)
{
    char *out = text;
    for (const char *in = text; *in != 0; in++, out++) {
        unsigned value = 0;
        if (*in == '%' && sscanf(in + 1, "%2x", &value) == 1) {
            *out = (char)value;
            in += 2;
        } else {
            *out = *in;
        }
    }
    *out = 0;
}

/* "/api/v1/namespaces/a/pods/x/status" or "/apis/apps/v1/statefulsets". */
static inline struct fake_target fake_target(const char *path)
{
    struct fake_target target = {.space = ""};
    char copy[4096], *parts[16] = {NULL}, *rest = copy;
    size_t count = 0;
    snprintf(copy, sizeof copy, "%s", path);
    for (char *part; count < 16 && (part = strsep(&rest, "/")) != NULL;) {
        if (part[0] != 0) {
            fake_decode(part);
            parts[count++] = part;
        }
    }
    size_t at = count > 0 && strcmp(parts[0], "api") == 0 ? 2 : 3;
    size_t plural = at;
    if (count > at + 2 && strcmp(parts[at], "namespaces") == 0) {
        snprintf(target.space, sizeof target.space, "%s", parts[at + 1]);
        plural = at + 2;
    }
    if (plural < count) {
        snprintf(target.collection, sizeof target.collection, "/%s/%s%s%s/%s", parts[0], parts[1], at == 3 ? "/" : "",
                 at == 3 ? parts[2] : "", parts[plural]);
    }
    snprintf(target.name, sizeof target.name, "%s", plural + 1 < count ? parts[plural + 1] : "");
    snprintf(target.sub, sizeof target.sub, "%s", plural + 2 < count ? parts[plural + 2] : "");
    return target;
}

static inline void fake_key(const struct fake_target *target, char key[static 1400])
{
    snprintf(key, 1400, "%s|%s|%s", target->collection, target->space, target->name);
}

/* Value of `key` in a query, decoded; "" when it is not there. */
static inline void fake_query(const char *query, const char *key, char *out, size_t size)
{
    size_t key_size = strlen(key);
    out[0] = 0;
    for (const char *at = query; at != NULL; at = strchr(at, '&') != NULL ? strchr(at, '&') + 1 : NULL) {
        if (strncmp(at, key, key_size) == 0 && at[key_size] == '=') {
            snprintf(out, size, "%.*s", (int)strcspn(at + key_size + 1, "&"), at + key_size + 1);
            fake_decode(out);
        }
    }
}

/* Label selectors of the forms "a=b", "a", joined by commas. */
static inline bool fake_selects(const char *selector, const cJSON *labels)
{
    char copy[4096], *rest = copy;
    snprintf(copy, sizeof copy, "%s", selector);
    for (char *part; (part = strsep(&rest, ",")) != NULL;) {
        char *value = strchr(part, '=');
        if (value != NULL) {
            *value++ = 0;
        }
        const char *there = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(labels, part));
        if (part[0] != 0 && (there == NULL || (value != NULL && strcmp(there, value) != 0))) {
            return false;
        }
    }
    return true;
}

/* --- the store; all with the lock held --- */

static inline cJSON *fake_labels(const cJSON *json)
{
    return cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(json, "metadata"), "labels");
}

static inline void fake_set_text(cJSON *object, const char *key, const char *value)
{
    cJSON_DeleteItemFromObjectCaseSensitive(object, key);
    cJSON_AddStringToObject(object, key, value);
}

static inline void fake_set_number(cJSON *object, const char *key, double value)
{
    cJSON_DeleteItemFromObjectCaseSensitive(object, key);
    cJSON_AddNumberToObject(object, key, value);
}

static inline void fake_tell(struct fake_api *api, const char *type, const struct fake_object *object)
{
    if (api->event_count == api->event_capacity) {
        api->event_capacity = api->event_capacity * 2 + 64;
        api->events = realloc(api->events, api->event_capacity * sizeof *api->events);
        assert(api->events != NULL);
    }
    char *json = cJSON_PrintUnformatted(object->json), *text = NULL;
    int size = asprintf(&text, "{\"type\":\"%s\",\"object\":%s}\n", type, json);
    assert(size > 0);
    (void)size;
    free(json);
    api->events[api->event_count++] = (struct fake_event){
        .version = api->version,
        .collection = strdup(object->collection),
        .space = strdup(object->space),
        .text = text,
        .labels = cJSON_Duplicate(fake_labels(object->json), true),
    };
    pthread_cond_broadcast(&api->news);
}

static inline void fake_stamp(struct fake_api *api, struct fake_object *object)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)++api->version);
    fake_set_text(cJSON_GetObjectItemCaseSensitive(object->json, "metadata"), "resourceVersion", text);
}

static inline struct fake_object *fake_find(struct fake_api *api, const struct fake_target *target)
{
    char key[1400];
    fake_key(target, key);
    return op_map_get(&api->by_key, key);
}

static inline cJSON *fake_metadata(cJSON *json)
{
    cJSON *metadata = cJSON_GetObjectItemCaseSensitive(json, "metadata");
    return metadata != NULL ? metadata : cJSON_AddObjectToObject(json, "metadata");
}

/* Takes `json`. */
static inline struct fake_object *fake_create(struct fake_api *api, const struct fake_target *target, cJSON *json)
{
    char key[1400], uid[48];
    fake_key(target, key);
    struct fake_object *object = calloc(1, sizeof *object);
    *object = (struct fake_object){.json = json};
    object->key = strdup(key);
    object->collection = strdup(target->collection);
    object->space = strdup(target->space);
    cJSON *metadata = fake_metadata(json);
    fake_set_text(metadata, "name", target->name);
    if (target->space[0] != 0) {
        fake_set_text(metadata, "namespace", target->space);
    }
    if (cJSON_GetObjectItemCaseSensitive(metadata, "uid") == NULL) {
        snprintf(uid, sizeof uid, "00000000-0000-4000-8000-%012llu", (unsigned long long)++api->uids);
        fake_set_text(metadata, "uid", uid);
    }
    fake_set_text(metadata, "creationTimestamp", "2026-01-01T00:00:00Z");
    fake_set_number(metadata, "generation", 1);
    fake_stamp(api, object);
    enum dl_rc rc = op_map_put(&api->by_key, key, object, NULL);
    assert(rc == DL_OK);
    (void)rc;
    TAILQ_INSERT_TAIL(&api->objects, object, all);
    fake_tell(api, "ADDED", object);
    return object;
}

static inline const char *fake_uid(const struct fake_object *object)
{
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(object->json, "metadata");
    const char *uid = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, "uid"));
    return uid != NULL ? uid : "";
}

static inline void fake_object_free(struct fake_object *object)
{
    cJSON_Delete(object->json);
    free(object->key);
    free(object->collection);
    free(object->space);
    free(object);
}

static inline void fake_drop(struct fake_api *api, struct fake_object *object)
{
    char uid[64];
    snprintf(uid, sizeof uid, "%s", fake_uid(object));
    fake_stamp(api, object);
    fake_tell(api, "DELETED", object);
    op_map_remove(&api->by_key, object->key);
    TAILQ_REMOVE(&api->objects, object, all);
    fake_object_free(object);
    /* What it owned goes with it. */
    for (struct fake_object *child = TAILQ_FIRST(&api->objects); child != NULL;) {
        const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(child->json, "metadata");
        const cJSON *owner, *owners = cJSON_GetObjectItemCaseSensitive(metadata, "ownerReferences");
        bool is_owned = false;
        cJSON_ArrayForEach(owner, owners)
        {
            const char *its_uid = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(owner, "uid"));
            is_owned = is_owned || (its_uid != NULL && strcmp(its_uid, uid) == 0);
        }
        if (is_owned) {
            fake_drop(api, child);
            child = TAILQ_FIRST(&api->objects); /* More may have gone. */
        } else {
            child = TAILQ_NEXT(child, all);
        }
    }
}

/* After a change: a new version, told; or gone, when it only waited for its finalizers. Same content: nothing. `before` is
 * deleted. Returns NULL when it is gone. */
static inline struct fake_object *fake_changed(struct fake_api *api, struct fake_object *object, cJSON *before)
{
    cJSON *metadata = fake_metadata(object->json);
    bool is_same = cJSON_Compare(before, object->json, true);
    bool is_spec_same = cJSON_Compare(cJSON_GetObjectItemCaseSensitive(before, "spec"),
                                      cJSON_GetObjectItemCaseSensitive(object->json, "spec"), true) ||
                        cJSON_GetObjectItemCaseSensitive(object->json, "spec") == NULL;
    cJSON_Delete(before);
    if (is_same) {
        return object;
    }
    if (!is_spec_same) {
        const cJSON *generation = cJSON_GetObjectItemCaseSensitive(metadata, "generation");
        fake_set_number(metadata, "generation", cJSON_IsNumber(generation) ? generation->valuedouble + 1 : 1);
    }
    bool is_leaving = cJSON_GetObjectItemCaseSensitive(metadata, "deletionTimestamp") != NULL;
    const cJSON *finalizers = cJSON_GetObjectItemCaseSensitive(metadata, "finalizers");
    bool lingers = api->pods_linger && strcmp(object->collection, "/api/v1/pods") == 0;
    if (is_leaving && cJSON_GetArraySize(finalizers) == 0 && !lingers) {
        fake_drop(api, object);
        return NULL;
    }
    fake_stamp(api, object);
    fake_tell(api, "MODIFIED", object);
    return object;
}

/* RFC 7386. */
static inline void fake_merge(cJSON *target, const cJSON *patch)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, patch)
    {
        cJSON *there = cJSON_GetObjectItemCaseSensitive(target, item->string);
        if (cJSON_IsNull(item)) {
            cJSON_DeleteItemFromObjectCaseSensitive(target, item->string);
        } else if (cJSON_IsObject(item)) {
            if (!cJSON_IsObject(there)) {
                cJSON_DeleteItemFromObjectCaseSensitive(target, item->string);
                there = cJSON_AddObjectToObject(target, item->string);
            }
            fake_merge(there, item);
        } else {
            cJSON_DeleteItemFromObjectCaseSensitive(target, item->string);
            cJSON_AddItemToObject(target, item->string, cJSON_Duplicate(item, true));
        }
    }
}

/* RFC 6902 without move and copy. False: a test failed or a path is not there. */
static inline bool fake_json_patch(cJSON *json, const cJSON *patch)
{
    const cJSON *step;
    cJSON_ArrayForEach(step, patch)
    {
        const char *op = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(step, "op"));
        const char *path = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(step, "path"));
        const cJSON *value = cJSON_GetObjectItemCaseSensitive(step, "value");
        char copy[1024], *rest = copy, *part, *last = NULL;
        cJSON *at = json, *parent = NULL;
        snprintf(copy, sizeof copy, "%s", path != NULL && path[0] == '/' ? path + 1 : "");
        while ((part = strsep(&rest, "/")) != NULL) {
            parent = at;
            last = part;
            at = cJSON_IsArray(parent) ? cJSON_GetArrayItem(parent, (int)strtol(part, NULL, 10))
                                       : cJSON_GetObjectItemCaseSensitive(parent, part);
            if (at == NULL && rest != NULL) {
                return false;
            }
        }
        if (op == NULL || last == NULL) {
            return false;
        }
        if (strcmp(op, "test") == 0) {
            if (at == NULL || !cJSON_Compare(at, value, true)) {
                return false;
            }
        } else if (strcmp(op, "add") == 0 && cJSON_IsArray(parent)) {
            cJSON_AddItemToArray(parent, cJSON_Duplicate(value, true));
        } else {
            if (at == NULL && strcmp(op, "add") != 0) {
                return false;
            }
            if (at != NULL) {
                cJSON_Delete(cJSON_DetachItemViaPointer(parent, at));
            }
            if (strcmp(op, "remove") != 0) {
                cJSON_AddItemToObject(parent, last, cJSON_Duplicate(value, true));
            }
        }
    }
    return true;
}

/* --- requests; with the lock held, the answer's text is the caller's --- */

struct fake_outcome {
    int status;
    char *body; /* NULL: a Status with `reason`. */
    const char *reason;
};

static inline struct fake_outcome fake_object_outcome(int status, const struct fake_object *object)
{
    return (struct fake_outcome){status, cJSON_PrintUnformatted(object->json), NULL};
}

static inline struct fake_outcome fake_list(struct fake_api *api, const struct fake_target *target, const char *query)
{
    char selector[4096], limit_text[32], from_text[32], more[64] = "";
    fake_query(query, "labelSelector", selector, sizeof selector);
    fake_query(query, "limit", limit_text, sizeof limit_text);
    fake_query(query, "continue", from_text, sizeof from_text);
    unsigned long limit = strtoul(limit_text, NULL, 10), index = 0, from = strtoul(from_text, NULL, 10), shown = 0;
    struct dl_buf out;
    dl_buf_init(&out, (size_t)1 << 30);
    dl_buf_puts(&out, "{\"kind\":\"List\",\"apiVersion\":\"v1\",\"items\":[");
    const struct fake_object *object;
    TAILQ_FOREACH(object, &api->objects, all)
    {
        if (strcmp(object->collection, target->collection) != 0 ||
            (target->space[0] != 0 && strcmp(object->space, target->space) != 0) ||
            !fake_selects(selector, fake_labels(object->json)) || index++ < from) {
            continue;
        }
        if (limit > 0 && shown == limit) {
            snprintf(more, sizeof more, ",\"continue\":\"%lu\"", from + shown);
            break;
        }
        char *text = cJSON_PrintUnformatted(object->json);
        dl_buf_puts(&out, shown++ > 0 ? "," : "");
        dl_buf_puts(&out, text);
        free(text);
    }
    dl_buf_printf(&out, "],\"metadata\":{\"resourceVersion\":\"%llu\"%s}}", (unsigned long long)api->version, more);
    return (struct fake_outcome){200, dl_buf_take(&out), NULL};
}

static inline struct fake_outcome fake_delete(struct fake_api *api, struct fake_object *object, const char *body)
{
    cJSON *options = cJSON_Parse(body != NULL ? body : "{}");
    const cJSON *only = cJSON_GetObjectItemCaseSensitive(options, "preconditions");
    const char *uid = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(only, "uid"));
    const cJSON *grace = cJSON_GetObjectItemCaseSensitive(options, "gracePeriodSeconds");
    bool is_other = uid != NULL && strcmp(uid, fake_uid(object)) != 0;
    bool is_at_once = cJSON_IsNumber(grace) && grace->valuedouble <= 0;
    cJSON_Delete(options);
    if (is_other) {
        return (struct fake_outcome){409, NULL, "Conflict"};
    }
    cJSON *metadata = fake_metadata(object->json);
    bool lingers = api->pods_linger && strcmp(object->collection, "/api/v1/pods") == 0 && !is_at_once;
    if (lingers || cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(metadata, "finalizers")) > 0) {
        if (cJSON_GetObjectItemCaseSensitive(metadata, "deletionTimestamp") == NULL) {
            fake_set_text(metadata, "deletionTimestamp", "2026-01-01T00:00:00Z");
            fake_stamp(api, object);
            fake_tell(api, "MODIFIED", object);
        }
        return fake_object_outcome(200, object);
    }
    struct fake_outcome outcome = fake_object_outcome(200, object);
    fake_drop(api, object);
    return outcome;
}

/* Of the status subresource only the status counts, elsewhere everything else. */
static inline void fake_keep_status(const cJSON *before, cJSON *after, bool is_status)
{
    cJSON *status = cJSON_Duplicate(cJSON_GetObjectItemCaseSensitive(is_status ? after : before, "status"), true);
    if (is_status) {
        cJSON *whole = cJSON_Duplicate(before, true);
        cJSON_DeleteItemFromObjectCaseSensitive(whole, "status");
        cJSON *child;
        while ((child = after->child) != NULL) {
            cJSON_Delete(cJSON_DetachItemViaPointer(after, child));
        }
        while ((child = whole->child) != NULL) {
            char key[256];
            snprintf(key, sizeof key, "%s", child->string);
            cJSON_AddItemToObject(after, key, cJSON_DetachItemViaPointer(whole, child));
        }
        cJSON_Delete(whole);
    } else {
        cJSON_DeleteItemFromObjectCaseSensitive(after, "status");
    }
    if (status != NULL) {
        cJSON_AddItemToObject(after, "status", status);
    }
}

static inline struct fake_outcome fake_write(struct fake_api *api, const struct fake_target *target,
                                             const struct fake_request *request)
{
    struct fake_object *object = fake_find(api, target);
    cJSON *body = cJSON_Parse(request->body != NULL ? request->body : "");
    bool is_apply = strstr(request->content_type, "apply-patch") != NULL;
    bool is_patch = strcmp(request->method, "PATCH") == 0;
    bool is_status = strcmp(target->sub, "status") == 0;
    struct fake_outcome outcome = {400, NULL, "BadRequest"};
    if (body == NULL) {
        return outcome;
    }
    if (object == NULL) {
        outcome = (struct fake_outcome){404, NULL, "NotFound"};
        if (is_apply && target->sub[0] == 0) {
            cJSON_DeleteItemFromObjectCaseSensitive(body, "status");
            outcome = fake_object_outcome(201, fake_create(api, target, body));
            return outcome;
        }
        cJSON_Delete(body);
        return outcome;
    }
    const cJSON *version =
        cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(body, "metadata"), "resourceVersion");
    const cJSON *there =
        cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(object->json, "metadata"), "resourceVersion");
    if (version != NULL && !cJSON_Compare(version, there, true)) {
        cJSON_Delete(body);
        return (struct fake_outcome){409, NULL, "Conflict"};
    }
    cJSON *before = object->json, *after = is_patch ? cJSON_Duplicate(before, true) : cJSON_Duplicate(body, true);
    bool is_fine = true;
    if (is_patch && cJSON_IsArray(body)) {
        is_fine = fake_json_patch(after, body);
    } else if (is_patch) {
        fake_merge(after, body);
    } else {
        const char *const kept[] = {"uid", "creationTimestamp", "generation", "deletionTimestamp"};
        for (size_t i = 0; i < DL_COUNT_OF(kept); i++) {
            const cJSON *old = cJSON_GetObjectItemCaseSensitive(fake_metadata(before), kept[i]);
            cJSON_DeleteItemFromObjectCaseSensitive(fake_metadata(after), kept[i]);
            if (old != NULL) {
                cJSON_AddItemToObject(fake_metadata(after), kept[i], cJSON_Duplicate(old, true));
            }
        }
    }
    cJSON_Delete(body);
    if (!is_fine) {
        cJSON_Delete(after);
        return (struct fake_outcome){422, NULL, "Invalid"};
    }
    if (strcmp(target->sub, "scale") != 0) {
        fake_keep_status(before, after, is_status);
    }
    if (cJSON_GetObjectItemCaseSensitive(fake_metadata(after), "resourceVersion") == NULL) {
        cJSON_AddItemToObject(fake_metadata(after), "resourceVersion", cJSON_Duplicate(there, true));
    }
    object->json = after;
    char *text = NULL;
    struct fake_object *left = fake_changed(api, object, before);
    if (left != NULL) {
        text = cJSON_PrintUnformatted(left->json);
    }
    return (struct fake_outcome){200, text != NULL ? text : strdup("{}"), NULL};
}

static inline struct fake_outcome fake_do(struct fake_api *api, const struct fake_request *request)
{
    struct fake_target target = fake_target(request->path);
    struct fake_object *object = fake_find(api, &target);
    if (strcmp(request->method, "GET") == 0) {
        if (target.name[0] == 0) {
            return fake_list(api, &target, request->query);
        }
        return object != NULL ? fake_object_outcome(200, object) : (struct fake_outcome){404, NULL, "NotFound"};
    }
    if (strcmp(request->method, "POST") == 0) {
        cJSON *body = cJSON_Parse(request->body != NULL ? request->body : "");
        const char *name = cJSON_GetStringValue(
            cJSON_GetObjectItemCaseSensitive(cJSON_GetObjectItemCaseSensitive(body, "metadata"), "name"));
        snprintf(target.name, sizeof target.name, "%s", name != NULL ? name : "");
        if (name == NULL || fake_find(api, &target) != NULL) {
            cJSON_Delete(body);
            return name == NULL ? (struct fake_outcome){422, NULL, "Invalid"}
                                : (struct fake_outcome){409, NULL, "AlreadyExists"};
        }
        cJSON_DeleteItemFromObjectCaseSensitive(body, "status");
        return fake_object_outcome(201, fake_create(api, &target, body));
    }
    if (strcmp(request->method, "DELETE") == 0) {
        return object != NULL ? fake_delete(api, object, request->body) : (struct fake_outcome){404, NULL, "NotFound"};
    }
    return fake_write(api, &target, request);
}

/* --- watches --- */

static inline bool fake_is_gone(struct fake_conn *conn)
{
    char byte;
    return recv(conn->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

/* Sends what has happened since `*at`, called with the lock held, sends without. False: over. */
static inline bool fake_watch_send(struct fake_conn *conn, const struct fake_target *target, const char *selector,
                                   size_t *at)
{
    struct fake_api *api = conn->api;
    for (; *at < api->event_count; (*at)++) {
        const struct fake_event *event = &api->events[*at];
        if (strcmp(event->collection, target->collection) != 0 ||
            (target->space[0] != 0 && strcmp(event->space, target->space) != 0) ||
            !fake_selects(selector, event->labels)) {
            continue;
        }
        char *text = strdup(event->text);
        pthread_mutex_unlock(&api->lock);
        bool is_sent = fake_chunk(conn, text, strlen(text));
        free(text);
        pthread_mutex_lock(&api->lock);
        if (!is_sent) {
            return false;
        }
    }
    return true;
}

static inline bool fake_watch(struct fake_conn *conn, const struct fake_request *request)
{
    struct fake_api *api = conn->api;
    struct fake_target target = fake_target(request->path);
    char selector[4096], version_text[32], line[512];
    fake_query(request->query, "labelSelector", selector, sizeof selector);
    fake_query(request->query, "resourceVersion", version_text, sizeof version_text);
    uint64_t from = strtoull(version_text, NULL, 10);
    const char *head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n";
    bool goes_on = fake_conn_write(conn, head, strlen(head));
    pthread_mutex_lock(&api->lock);
    size_t at = 0;
    uint64_t bookmarks = conn->bookmarks, cuts = conn->cuts;
    if (from < conn->oldest && goes_on) {
        pthread_mutex_unlock(&api->lock);
        int used = snprintf(line, sizeof line,
                            "{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"code\":410,\"reason\":\"Expired\","
                            "\"message\":\"too old resource version\"}}\n");
        return fake_chunk(conn, line, (size_t)used) && fake_chunk(conn, "", 0);
    }
    while (at < api->event_count && api->events[at].version <= from) {
        at++;
    }
    while (goes_on && !api->is_stopping && api->cuts == cuts && !fake_is_gone(conn)) {
        goes_on = fake_watch_send(conn, &target, selector, &at);
        if (goes_on && bookmarks != api->bookmarks) {
            bookmarks = api->bookmarks;
            int used = snprintf(line, sizeof line,
                                "{\"type\":\"BOOKMARK\",\"object\":{\"metadata\":{\"resourceVersion\":\"%llu\"}}}\n",
                                (unsigned long long)api->version);
            pthread_mutex_unlock(&api->lock);
            goes_on = fake_chunk(conn, line, (size_t)used);
            pthread_mutex_lock(&api->lock);
        }
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 20000000;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (goes_on && at == api->event_count) {
            pthread_cond_timedwait(&api->news, &api->lock, &until);
        }
    }
    pthread_mutex_unlock(&api->lock);
    return goes_on && fake_chunk(conn, "", 0);
}

/* --- connections --- */

static inline bool fake_read_head(struct fake_conn *conn, char *head, size_t *used, size_t *head_size)
{
    for (;;) {
        head[*used] = 0;
        char *end = strstr(head, "\r\n\r\n");
        if (end != NULL) {
            *head_size = (size_t)(end - head) + 4;
            return true;
        }
        ssize_t got = *used < FAKE_API_HEAD_MAX ? fake_conn_read(conn, head + *used, FAKE_API_HEAD_MAX - *used) : 0;
        if (got <= 0) {
            return false;
        }
        *used += (size_t)got;
    }
}

static inline void fake_header(const char *head, const char *name, char *out, size_t size)
{
    out[0] = 0;
    for (const char *line = strstr(head, "\r\n"); line != NULL && line[2] != '\r'; line = strstr(line + 2, "\r\n")) {
        size_t name_size = strlen(name);
        if (strncasecmp(line + 2, name, name_size) == 0 && line[2 + name_size] == ':') {
            const char *value = line + 3 + name_size;
            value += strspn(value, " ");
            snprintf(out, size, "%.*s", (int)strcspn(value, "\r"), value);
        }
    }
}

static inline bool fake_read_request(struct fake_conn *conn, struct fake_request *request)
{
    char *head = calloc(1, FAKE_API_HEAD_MAX + 1), length_text[32], target[8192] = "";
    size_t used = 0, head_size = 0;
    bool is_read = fake_read_head(conn, head, &used, &head_size);
    if (is_read) {
        is_read = sscanf(head, "%7s %8191s", request->method, target) == 2;
        size_t path_size = strcspn(target, "?");
        snprintf(request->path, sizeof request->path, "%.*s", (int)path_size, target);
        snprintf(request->query, sizeof request->query, "%s", target[path_size] == '?' ? target + path_size + 1 : "");
        fake_header(head, "Authorization", request->authorization, sizeof request->authorization);
        fake_header(head, "Content-Type", request->content_type, sizeof request->content_type);
        fake_header(head, "Content-Length", length_text, sizeof length_text);
        request->size = strtoul(length_text, NULL, 10);
        request->body = calloc(1, request->size + 1);
        size_t have = used - head_size;
        memcpy(request->body, head + head_size, have < request->size ? have : request->size);
        while (is_read && have < request->size) {
            ssize_t got = fake_conn_read(conn, request->body + have, request->size - have);
            is_read = got > 0;
            have += is_read ? (size_t)got : 0;
        }
    }
    free(head);
    return is_read;
}

static inline void fake_note(struct fake_api *api, const struct fake_request *request)
{
    if (api->request_count == api->request_capacity) {
        api->request_capacity = api->request_capacity * 2 + 64;
        api->requests = realloc(api->requests, api->request_capacity * sizeof *api->requests);
        assert(api->requests != NULL);
    }
    char *line = NULL;
    int size = asprintf(&line, "%s %s?%s", request->method, request->path, request->query);
    assert(size > 0);
    (void)size;
    api->requests[api->request_count++] = line;
    snprintf(api->last_authorization, sizeof api->last_authorization, "%s", request->authorization);
    if (request->size > 0) {
        free(api->last_body);
        api->last_body = strdup(request->body);
    }
}

static inline bool fake_take_fault(struct fake_api *api, const struct fake_request *request, struct fake_fault *out)
{
    const char *line = api->requests[api->request_count - 1];
    for (size_t i = 0; i < FAKE_API_FAULTS_MAX; i++) {
        struct fake_fault *fault = &api->faults[i];
        if (fault->times != 0 && (fault->method == NULL || strcmp(fault->method, request->method) == 0) &&
            (fault->part == NULL || strstr(line, fault->part) != NULL)) {
            fault->times -= fault->times > 0;
            *out = *fault;
            return true;
        }
    }
    return false;
}

/* False: the connection is to be closed. */
static inline bool fake_play_fault(struct fake_conn *conn, const struct fake_fault *fault)
{
    const char *head = "HTTP/1.1 200 OK\r\nContent-Length: 4096\r\n\r\n{\"kind\":";
    switch (fault->kind) {
    case FAKE_STATUS:
        return fake_answer_status(conn, fault->status, fault->reason, fault->message, fault->retry_after_s);
    case FAKE_SHORT: fake_conn_write(conn, head, strlen(head)); return false;
    case FAKE_RAW: return fake_answer(conn, 200, fault->message, 0);
    case FAKE_STALL:
        while (!fake_is_gone(conn) && !__atomic_load_n(&conn->api->is_stopping, __ATOMIC_ACQUIRE)) {
            usleep(5000);
        }
        return false;
    case FAKE_CLOSE:
    case FAKE_CLOSE_AFTER: return false;
    }
    return false;
}

static inline bool fake_serve_one(struct fake_conn *conn, const struct fake_request *request)
{
    struct fake_api *api = conn->api;
    struct fake_fault fault = {.times = 0};
    char expected[300], watch[16];
    pthread_mutex_lock(&api->lock);
    conn->cuts = api->cuts;
    conn->bookmarks = api->bookmarks;
    conn->oldest = api->oldest;
    fake_note(api, request);
    snprintf(expected, sizeof expected, "Bearer %s", api->token);
    bool is_known = api->token[0] == 0 || strcmp(expected, request->authorization) == 0;
    bool has_fault = fake_take_fault(api, request, &fault);
    pthread_mutex_unlock(&api->lock);
    if (has_fault && fault.kind != FAKE_CLOSE_AFTER) {
        return fake_play_fault(conn, &fault);
    }
    if (!is_known) {
        return fake_answer_status(conn, 401, "Unauthorized", "Unauthorized", 0);
    }
    if (api->hook != NULL && api->hook(api->hook_context, conn, request)) {
        return true;
    }
    fake_query(request->query, "watch", watch, sizeof watch);
    if (strcmp(watch, "true") == 0) {
        return fake_watch(conn, request);
    }
    pthread_mutex_lock(&api->lock);
    struct fake_outcome outcome = fake_do(api, request);
    pthread_mutex_unlock(&api->lock);
    bool goes_on = !has_fault &&
                   (outcome.body != NULL ? fake_answer(conn, outcome.status, outcome.body, 0)
                                         : fake_answer_status(conn, outcome.status, outcome.reason, outcome.reason, 0));
    free(outcome.body);
    return goes_on;
}

static inline void *fake_conn_run(void *context)
{
    struct fake_conn *conn = context;
    bool goes_on = conn->ssl == NULL || SSL_accept(conn->ssl) == 1;
    struct fake_request *request = malloc(sizeof *request);
    while (goes_on) {
        memset(request, 0, sizeof *request);
        goes_on = fake_read_request(conn, request) && fake_serve_one(conn, request);
        free(request->body);
    }
    free(request);
    pthread_mutex_lock(&conn->api->lock);
    if (conn->ssl != NULL) {
        SSL_free(conn->ssl);
    }
    close(conn->fd);
    conn->fd = -1;
    pthread_mutex_unlock(&conn->api->lock);
    return NULL;
}

static inline void *fake_api_run(void *context)
{
    struct fake_api *api = context;
    for (;;) {
        int fd = accept(api->listener, NULL, NULL);
        pthread_mutex_lock(&api->lock);
        if (fd < 0 || api->is_stopping || api->conn_count == FAKE_API_CONNECTIONS_MAX) {
            pthread_mutex_unlock(&api->lock);
            if (fd >= 0) {
                close(fd);
            }
            return NULL;
        }
        int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        struct fake_conn *conn = calloc(1, sizeof *conn);
        *conn = (struct fake_conn){.api = api, .fd = fd, .ssl = api->tls != NULL ? SSL_new(api->tls) : NULL};
        if (conn->ssl != NULL) {
            SSL_set_fd(conn->ssl, fd);
        }
        api->conns[api->conn_count++] = conn;
        int failed = pthread_create(&conn->thread, NULL, fake_conn_run, conn);
        assert(failed == 0);
        (void)failed;
        pthread_mutex_unlock(&api->lock);
    }
}

/* --- for tests --- */

/* `tls` NULL: plain HTTP on a free port of 127.0.0.1. */
static inline struct fake_api *fake_api_start(SSL_CTX *tls)
{
    struct fake_api *api = calloc(1, sizeof *api);
    pthread_mutex_init(&api->lock, NULL);
    pthread_cond_init(&api->news, NULL);
    TAILQ_INIT(&api->objects);
    api->tls = tls;
    api->version = 1000;
    api->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int failed = bind(api->listener, (struct sockaddr *)&address, size) | listen(api->listener, 256) |
                 getsockname(api->listener, (struct sockaddr *)&address, &size);
    assert(failed == 0);
    api->port = ntohs(address.sin_port);
    snprintf(api->url, sizeof api->url, "%s://127.0.0.1:%u", tls != NULL ? "https" : "http", api->port);
    failed = pthread_create(&api->thread, NULL, fake_api_run, api);
    assert(failed == 0);
    (void)failed;
    return api;
}

static inline void fake_api_stop(struct fake_api *api)
{
    pthread_mutex_lock(&api->lock);
    __atomic_store_n(&api->is_stopping, true, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&api->news);
    shutdown(api->listener, SHUT_RDWR);
    for (size_t i = 0; i < api->conn_count; i++) {
        if (api->conns[i]->fd >= 0) {
            shutdown(api->conns[i]->fd, SHUT_RDWR);
        }
    }
    pthread_mutex_unlock(&api->lock);
    pthread_join(api->thread, NULL);
    close(api->listener);
    for (size_t i = 0; i < api->conn_count; i++) {
        pthread_join(api->conns[i]->thread, NULL);
        free(api->conns[i]);
    }
    for (struct fake_object *object; (object = TAILQ_FIRST(&api->objects)) != NULL;) {
        TAILQ_REMOVE(&api->objects, object, all);
        fake_object_free(object);
    }
    for (size_t i = 0; i < api->event_count; i++) {
        free(api->events[i].collection);
        free(api->events[i].space);
        free(api->events[i].text);
        cJSON_Delete(api->events[i].labels);
    }
    for (size_t i = 0; i < api->request_count; i++) {
        free(api->requests[i]);
    }
    op_map_release(&api->by_key);
    free(api->events);
    free(api->requests);
    free(api->last_body);
    pthread_mutex_destroy(&api->lock);
    pthread_cond_destroy(&api->news);
    free(api);
}

/* Borrows from `api`; not to be released. */
static inline struct op_config fake_api_config(struct fake_api *api)
{
    return (struct op_config){.server = api->url, .space = (char *)(uintptr_t) "default"};
}

static inline void fake_api_fault(struct fake_api *api, struct fake_fault fault)
{
    pthread_mutex_lock(&api->lock);
    size_t i = 0;
    while (i < FAKE_API_FAULTS_MAX && api->faults[i].times != 0) {
        i++;
    }
    assert(i < FAKE_API_FAULTS_MAX);
    fault.times = fault.times == 0 ? 1 : fault.times;
    api->faults[i] = fault;
    pthread_mutex_unlock(&api->lock);
}

static inline void fake_api_clear_faults(struct fake_api *api)
{
    pthread_mutex_lock(&api->lock);
    memset(api->faults, 0, sizeof api->faults);
    pthread_mutex_unlock(&api->lock);
}

static inline void fake_api_set_token(struct fake_api *api, const char *token)
{
    pthread_mutex_lock(&api->lock);
    snprintf(api->token, sizeof api->token, "%s", token);
    pthread_mutex_unlock(&api->lock);
}

/* Creates or replaces the object at `path` (".../pods/x"), status and all. */
static inline void fake_api_put(struct fake_api *api, const char *path, const char *text)
{
    struct fake_target target = fake_target(path);
    cJSON *json = cJSON_Parse(text);
    assert(json != NULL && target.name[0] != 0);
    pthread_mutex_lock(&api->lock);
    struct fake_object *object = fake_find(api, &target);
    if (object == NULL) {
        fake_create(api, &target, json);
    } else {
        cJSON *before = object->json;
        cJSON *metadata = cJSON_Duplicate(fake_metadata(before), true);
        fake_merge(metadata, fake_metadata(json));
        cJSON_DeleteItemFromObjectCaseSensitive(json, "metadata");
        cJSON_AddItemToObject(json, "metadata", metadata);
        object->json = json;
        fake_changed(api, object, before);
    }
    pthread_mutex_unlock(&api->lock);
}

/* Merges `text` into the object, status and all. False: it is not there. */
static inline bool fake_api_patch(struct fake_api *api, const char *path, const char *text)
{
    struct fake_target target = fake_target(path);
    cJSON *patch = cJSON_Parse(text);
    assert(patch != NULL);
    pthread_mutex_lock(&api->lock);
    struct fake_object *object = fake_find(api, &target);
    if (object != NULL) {
        cJSON *before = cJSON_Duplicate(object->json, true);
        fake_merge(object->json, patch);
        fake_changed(api, object, before);
    }
    pthread_mutex_unlock(&api->lock);
    cJSON_Delete(patch);
    return object != NULL;
}

/* The object is gone at once, whatever its finalizers. False: it was not there. */
static inline bool fake_api_remove(struct fake_api *api, const char *path)
{
    struct fake_target target = fake_target(path);
    pthread_mutex_lock(&api->lock);
    struct fake_object *object = fake_find(api, &target);
    bool is_there = object != NULL;
    if (is_there) {
        fake_drop(api, object);
    }
    pthread_mutex_unlock(&api->lock);
    return is_there;
}

/* A copy (cJSON_Delete), or NULL. */
static inline cJSON *fake_api_get(struct fake_api *api, const char *path)
{
    struct fake_target target = fake_target(path);
    pthread_mutex_lock(&api->lock);
    struct fake_object *object = fake_find(api, &target);
    cJSON *copy = object != NULL ? cJSON_Duplicate(object->json, true) : NULL;
    pthread_mutex_unlock(&api->lock);
    return copy;
}

/* Objects in a collection: "/api/v1/namespaces/a/pods", or "/api/v1/pods" for all namespaces. With `names` their names, joined
 * by spaces in order of creation. */
static inline size_t fake_api_count(struct fake_api *api, const char *path, struct dl_buf *names)
{
    struct fake_target target = fake_target(path);
    size_t count = 0;
    pthread_mutex_lock(&api->lock);
    const struct fake_object *object;
    TAILQ_FOREACH(object, &api->objects, all)
    {
        if (strcmp(object->collection, target.collection) == 0 &&
            (target.space[0] == 0 || strcmp(object->space, target.space) == 0)) {
            if (names != NULL) {
                dl_buf_printf(names, "%s%s", count > 0 ? " " : "", strrchr(object->key, '|') + 1);
            }
            count++;
        }
    }
    pthread_mutex_unlock(&api->lock);
    return count;
}

/* Requests so far whose method is `method` (NULL: any) and whose "METHOD path?query" holds `part` (NULL: any). */
static inline size_t fake_api_requests(struct fake_api *api, const char *method, const char *part)
{
    size_t count = 0;
    pthread_mutex_lock(&api->lock);
    for (size_t i = 0; i < api->request_count; i++) {
        const char *line = api->requests[i];
        count += (method == NULL || strncmp(line, method, strlen(method)) == 0) &&
                 (part == NULL || strstr(line, part) != NULL);
    }
    pthread_mutex_unlock(&api->lock);
    return count;
}

static inline size_t fake_api_connections(struct fake_api *api)
{
    pthread_mutex_lock(&api->lock);
    size_t count = api->conn_count;
    pthread_mutex_unlock(&api->lock);
    return count;
}

/* All watches send a bookmark. */
static inline void fake_api_bookmark(struct fake_api *api)
{
    pthread_mutex_lock(&api->lock);
    api->bookmarks++;
    pthread_cond_broadcast(&api->news);
    pthread_mutex_unlock(&api->lock);
}

/* All watches end in order, as a server does after timeoutSeconds. */
static inline void fake_api_cut_watches(struct fake_api *api)
{
    pthread_mutex_lock(&api->lock);
    api->cuts++;
    pthread_cond_broadcast(&api->news);
    pthread_mutex_unlock(&api->lock);
}

/* History is compacted: a watch that begins from before now is told 410. */
static inline void fake_api_expire(struct fake_api *api)
{
    pthread_mutex_lock(&api->lock);
    api->oldest = ++api->version;
    pthread_mutex_unlock(&api->lock);
}

#endif
