/* The objects of the fake API server: paths, the store with its history, and what a request does to it. Part of fake_api.h; all with
 * the server's lock held. */
#ifndef DL_TESTS_FAKE_API_STORE_H
#define DL_TESTS_FAKE_API_STORE_H

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
    TAILQ_HEAD(fake_object_list, fake_object) objects;
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

/* --- the store --- */

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

/* --- requests; the answer's text is the caller's --- */

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
    for (const struct fake_object *object = TAILQ_FIRST(&api->objects); object != NULL;
         object = TAILQ_NEXT(object, all)) {
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
    if (is_patch) {
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
    fake_keep_status(before, after, is_status);
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

#endif
