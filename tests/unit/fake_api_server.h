/* The connections of the fake API server: HTTP, TLS, faults by script and watches, one thread each. Part of fake_api.h. */
#ifndef DL_TESTS_FAKE_API_SERVER_H
#define DL_TESTS_FAKE_API_SERVER_H

#include "tests/unit/fake_api_store.h"

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

#endif
