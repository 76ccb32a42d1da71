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

#include "tests/unit/fake_api_server.h"

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
    for (const struct fake_object *object = TAILQ_FIRST(&api->objects); object != NULL;
         object = TAILQ_NEXT(object, all)) {
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
