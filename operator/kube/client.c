#include "operator/kube/client.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "operator/kube/client_internal.h"

#define FOREIGN_IN_FLIGHT_MAX 64
#define AUTH_PAUSE_NS DL_NS_PER_SECOND
#define RETRY_FIRST_NS (250 * DL_NS_PER_MS)
#define RETRY_MAX_NS (10 * DL_NS_PER_SECOND)
#define ERROR_BODY_MAX ((size_t)256 * 1024)

static const char *const method_names[OP_CALL_METHODS] = {"GET", "POST", "PUT", "PATCH", "DELETE"};

static void wake_pump(struct op_client *client, int64_t due_ns)
{
    if (!client->pump.is_running || client->pump.due_ns > due_ns) {
        op_timer_start(client->loop, &client->pump, due_ns);
    }
}

/* --- calls --- */

static struct op_call_list *lane_of(struct op_call *call)
{
    struct op_client *client = call->client;
    return call->is_foreign              ? &client->foreign
           : call->request.is_urgent     ? &client->urgent
           : call->request.is_background ? &client->background
                                         : &client->ordinary;
}

static void line_up(struct op_call *call)
{
    call->phase = OP_CALL_WAITING;
    call->queued_ns = op_loop_now_ns(call->client->loop);
    TAILQ_INSERT_TAIL(lane_of(call), call, waiting);
    call->client->waiting_count++;
    call->client->ordinary_count += lane_of(call) == &call->client->ordinary;
    wake_pump(call->client, call->queued_ns);
}

static void leave_lane(struct op_call *call)
{
    if (call->phase == OP_CALL_WAITING) {
        TAILQ_REMOVE(lane_of(call), call, waiting);
        call->client->waiting_count--;
        call->client->ordinary_count -= lane_of(call) == &call->client->ordinary;
    }
}

static void count_flight(struct op_call *call, int change)
{
    struct op_client *client = call->client;
    uint32_t *counter = call->is_foreign               ? &client->foreign_in_flight
                        : call->request.stream != NULL ? &client->streams
                                                       : &client->in_flight;
    *counter += (uint32_t)change;
}

/* Takes the call out of everything; it stays in its list of all calls. */
static void detach(struct op_call *call)
{
    struct op_client *client = call->client;
    if (call->phase == OP_CALL_FLYING) {
        count_flight(call, -1);
        op_call_land(call);
        wake_pump(client, op_loop_now_ns(client->loop));
    }
    leave_lane(call);
    call->phase = OP_CALL_PAUSED;
    op_timer_stop(client->loop, &call->pause);
    op_timer_stop(client->loop, &call->bound);
}

static void destroy(struct op_call *call)
{
    free(call->path);
    free(call->content_type);
    free(call->body);
    dl_buf_release(&call->answer);
    free(call);
}

static void tell(struct op_call *call, const struct op_result *result)
{
    if (call->request.done != NULL) {
        call->request.done(call->request.context, result);
    }
    destroy(call);
}

static void finish(struct op_call *call, const struct op_result *result)
{
    detach(call);
    TAILQ_REMOVE(&call->client->all, call, all);
    tell(call, result);
}

static void fail(struct op_call *call, enum dl_rc rc, const char *why)
{
    struct op_result result;
    op_call_fail(call, rc, why, &result);
    finish(call, &result);
}

static void on_bound(void *context, int64_t now_ns)
{
    struct op_call *call = context;
    int64_t idle_ns = call->request.idle_ms * DL_NS_PER_MS;
    bool is_flying = call->phase == OP_CALL_FLYING;
    int64_t due_ns = is_flying && idle_ns > 0 ? DL_MIN(call->deadline_ns, call->heard_ns + idle_ns) : call->deadline_ns;
    char why[DL_ERR_TEXT_MAX];
    if (now_ns < due_ns) {
        op_timer_start(call->client->loop, &call->bound, due_ns);
        return;
    }
    if (is_flying && now_ns < call->deadline_ns) {
        snprintf(why, sizeof why, "silent for %lld ms: the connection is taken for dead",
                 (long long)call->request.idle_ms);
    } else if (call->tries == 0 && call->client->auth_failure.rc != DL_OK) {
        snprintf(why, sizeof why, "not sent within %lld ms: %.300s", (long long)call->request.timeout_ms,
                 call->client->auth_failure.text);
    } else {
        snprintf(why, sizeof why, "no answer within %lld ms (%u tries)", (long long)call->request.timeout_ms,
                 call->tries);
    }
    fail(call, DL_ETIMEOUT, why);
}

static void on_pause_over(void *context, int64_t now_ns)
{
    struct op_call *call = context;
    (void)now_ns;
    if (call->is_cancelled) {
        TAILQ_REMOVE(&call->client->all, call, all);
        detach(call);
        destroy(call);
    } else {
        line_up(call);
    }
}

/* --- ends of transfers --- */

static void count(struct op_client *client, const struct op_call *call, int code, int64_t now_ns)
{
    const char *method = call->request.method;
    size_t i = 0;
    while (i < client->count_count && (client->counts[i].method != method || client->counts[i].code != code)) {
        i++;
    }
    if (i == client->count_count && i < OP_CALL_COUNTS_MAX) {
        client->counts[client->count_count++].method = method;
        client->counts[i].code = code;
    }
    if (i < OP_CALL_COUNTS_MAX) {
        client->counts[i].count++;
    }
    for (size_t k = 0; k < OP_CALL_METHODS && call->request.stream == NULL; k++) {
        if (method_names[k] == method) {
            dl_histogram_add(&client->seconds[k], (double)(now_ns - call->started_ns) / (double)DL_NS_PER_SECOND);
        }
    }
}

static int64_t retry_wait_ns(struct op_call *call, const struct op_result *result)
{
    int64_t wait_ns = DL_MIN(RETRY_FIRST_NS << DL_MIN(call->tries - 1, 10u), RETRY_MAX_NS);
    wait_ns += (int64_t)dl_rng_below(&call->client->rng, (uint64_t)wait_ns / 2);
    return DL_MAX(wait_ns, result->retry_after_ns);
}

/* True when the call will be tried again. */
static bool retry(struct op_call *call, const struct op_result *result, int64_t now_ns)
{
    struct op_client *client = call->client;
    int64_t wait_ns = 0;
    if (result->transport == 0 && result->status == 401 && !call->is_foreign) {
        op_auth_reject(client->auth);
        if (call->was_rejected || call->request.is_once || call->request.stream != NULL) {
            return false;
        }
        call->was_rejected = true;
    } else if (op_call_may_retry(call, result)) {
        wait_ns = retry_wait_ns(call, result);
    } else {
        return false;
    }
    if (now_ns + wait_ns >= call->deadline_ns) {
        return false;
    }
    client->retries++;
    call->phase = OP_CALL_PAUSED;
    op_timer_start(client->loop, &call->pause, now_ns + wait_ns);
    return true;
}

static void on_transfer(void *context, CURLcode code, int64_t now_ns)
{
    struct op_call *call = context;
    struct op_client *client = call->client;
    struct op_result result;
    cJSON *tree = NULL;
    if (call->is_cancelled) {
        TAILQ_REMOVE(&client->all, call, all);
        detach(call);
        destroy(call);
        return;
    }
    op_call_read(call, code, &result, &tree);
    if (!call->is_foreign) {
        count(client, call, code == CURLE_OK ? result.status : 0, now_ns);
    }
    count_flight(call, -1);
    op_call_land(call);
    call->phase = OP_CALL_PAUSED;
    wake_pump(client, now_ns);
    if (!retry(call, &result, now_ns)) {
        finish(call, &result);
    }
    cJSON_Delete(tree);
}

/* --- starting --- */

static bool is_write(const struct op_call *call)
{
    return call->request.method != method_names[0];
}

static bool is_stopped_by_guard(const struct op_call *call)
{
    const struct op_client *client = call->client;
    return is_write(call) && !call->request.is_unguarded && client->may_write != NULL &&
           !client->may_write(client->guard_context);
}

static void start(struct op_call *call, int64_t now_ns)
{
    struct dl_err err;
    leave_lane(call);
    call->phase = OP_CALL_PAUSED;
    if (is_stopped_by_guard(call)) {
        fail(call, DL_EDENIED, "not sent: this process does not hold the lease");
        return;
    }
    dl_histogram_add(&call->client->limited, (double)(now_ns - call->queued_ns) / (double)DL_NS_PER_SECOND);
    call->started_ns = call->heard_ns = now_ns;
    call->tries++;
    enum dl_rc rc = op_call_launch(call, &err);
    if (rc != DL_OK) {
        fail(call, rc, err.text);
        return;
    }
    call->phase = OP_CALL_FLYING;
    count_flight(call, 1);
    if (call->request.idle_ms > 0) {
        op_timer_start(call->client->loop, &call->bound, now_ns);
    }
}

/* Takes a token; false and *due_ns when there is none. */
static bool take_token(struct op_client *client, int64_t now_ns, int64_t *due_ns)
{
    double earned = (double)(now_ns - client->tokens_ns) / (double)DL_NS_PER_SECOND * client->options.qps;
    client->tokens = DL_MIN(client->tokens + earned, (double)client->options.burst);
    client->tokens_ns = now_ns;
    if (client->tokens < 1) {
        *due_ns = now_ns + (int64_t)((1 - client->tokens) / client->options.qps * (double)DL_NS_PER_SECOND) + 1;
        return false;
    }
    client->tokens -= 1;
    return true;
}

/* Whose turn it is among those that are not urgent; NULL: nobody waits. */
static struct op_call *next_call(const struct op_client *client)
{
    struct op_call *call = TAILQ_FIRST(&client->ordinary), *other = TAILQ_FIRST(&client->background);
    bool is_due = call == NULL || client->ordinary_run >= OP_CLIENT_BACKGROUND_SHARE - 1;
    return other != NULL && is_due ? other : call;
}

static void on_pump(void *context, int64_t now_ns)
{
    struct op_client *client = context;
    while (!TAILQ_EMPTY(&client->foreign) && client->foreign_in_flight < FOREIGN_IN_FLIGHT_MAX) {
        start(TAILQ_FIRST(&client->foreign), now_ns);
    }
    for (;;) {
        struct op_call *call = TAILQ_FIRST(&client->urgent);
        int64_t due_ns = 0;
        bool is_urgent = call != NULL;
        call = is_urgent ? call : next_call(client);
        if (call == NULL) {
            return;
        }
        bool is_full = client->in_flight >= client->options.in_flight_max && call->request.stream == NULL;
        if (is_full && !is_urgent) {
            return;
        }
        enum dl_rc rc = op_auth_check(client->auth, now_ns, &client->auth_failure);
        if (rc != DL_OK) {
            if (rc != DL_AGAIN) {
                wake_pump(client, now_ns + AUTH_PAUSE_NS);
            }
            return;
        }
        client->auth_failure.rc = DL_OK;
        if (!is_urgent && !take_token(client, now_ns, &due_ns)) {
            wake_pump(client, due_ns);
            return;
        }
        client->ordinary_run = call->request.is_background ? 0 : client->ordinary_run + !is_urgent;
        start(call, now_ns);
    }
}

static void on_auth_ready(void *context)
{
    struct op_client *client = context;
    wake_pump(client, op_loop_now_ns(client->loop));
}

/* --- the client --- */

enum dl_rc op_client_new(struct op_loop *loop, const struct op_config *config, const struct op_client_options *options,
                         struct op_client **out, struct dl_err *err)
{
    struct op_client *client = calloc(1, sizeof *client);
    if (client == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the client");
    }
    client->loop = loop;
    client->auth_failure.rc = DL_OK;
    client->pump = (struct op_timer){.fire = on_pump, .context = client};
    TAILQ_INIT(&client->all);
    TAILQ_INIT(&client->aborting);
    TAILQ_INIT(&client->urgent);
    TAILQ_INIT(&client->ordinary);
    TAILQ_INIT(&client->background);
    TAILQ_INIT(&client->foreign);
    if (options != NULL) {
        client->options = *options;
    }
    client->options.qps = client->options.qps > 0 ? client->options.qps : 50;
    client->options.burst = client->options.burst > 0 ? client->options.burst : 100;
    client->options.in_flight_max = client->options.in_flight_max > 0 ? client->options.in_flight_max : 16;
    client->tokens = client->options.burst;
    client->tokens_ns = op_loop_now_ns(loop);
    dl_rng_init(&client->rng, (uint64_t)dl_wall_ns(), dl_rng_stream("client", (uint64_t)getpid(), 0));
    const char *agent = client->options.user_agent;
    client->user_agent = strdup(agent != NULL ? agent : "diloco-operator");
    client->options.user_agent = NULL;
    enum dl_rc rc = client->user_agent != NULL ? op_config_copy(config, &client->config, err)
                                               : dl_err_set(err, DL_ENOMEM, "no memory for the client");
    if (rc == DL_OK) {
        rc = op_client_set_base(client, err);
    }
    if (rc == DL_OK) {
        rc = op_auth_new(loop, &client->config, on_auth_ready, client, &client->auth, err);
    }
    if (rc != DL_OK) {
        op_client_free(client);
        return rc;
    }
    *out = client;
    return DL_OK;
}

void op_client_free(struct op_client *client)
{
    if (client == NULL) {
        return;
    }
    assert(!client->is_in_curl && TAILQ_EMPTY(&client->aborting));
    while (!TAILQ_EMPTY(&client->all)) {
        struct op_call *call = TAILQ_FIRST(&client->all);
        TAILQ_REMOVE(&client->all, call, all);
        detach(call);
        destroy(call);
    }
    op_timer_stop(client->loop, &client->pump);
    op_auth_free(client->auth);
    op_config_release(&client->config);
    curl_slist_free_all(client->connect_to);
    free(client->base_url);
    free(client->user_agent);
    free(client);
}

struct op_loop *op_client_loop(const struct op_client *client)
{
    return client->loop;
}

const char *op_client_space(const struct op_client *client)
{
    return client->config.space;
}

const char *op_client_server(const struct op_client *client)
{
    return client->config.server;
}

static const char *method_of(const char *name)
{
    for (size_t i = 0; i < OP_CALL_METHODS; i++) {
        if (strcmp(method_names[i], name) == 0) {
            return method_names[i];
        }
    }
    return NULL;
}

static bool copy_request(struct op_call *call, const struct op_request *request)
{
    call->request = *request;
    call->request.method = method_of(request->method);
    assert(call->request.method != NULL);
    call->path = strdup(request->path);
    call->content_type = strdup(request->content_type != NULL ? request->content_type : "application/json");
    if (request->body != NULL && (call->body = malloc(request->size + 1)) != NULL) {
        memcpy(call->body, request->body, request->size);
        call->body[request->size] = 0;
    }
    call->request.path = call->path;
    call->request.content_type = call->content_type;
    call->request.body = call->body;
    call->request.timeout_ms = request->timeout_ms > 0 ? request->timeout_ms : OP_CLIENT_TIMEOUT_MS;
    call->request.is_repeatable = request->is_repeatable || strcmp(request->method, "GET") == 0 ||
                                  strcmp(request->method, "PUT") == 0 || strcmp(request->method, "DELETE") == 0;
    return call->path != NULL && call->content_type != NULL && (request->body == NULL || call->body != NULL);
}

static enum dl_rc send_call(struct op_client *client, const struct op_request *request, bool is_foreign,
                            size_t answer_max, uint64_t *id, struct dl_err *err)
{
    if (client->waiting_count >= OP_CLIENT_WAITING_MAX) {
        return dl_err_set(err, DL_ENOMEM, "%s %.120s: %d requests wait already", request->method, request->path,
                          OP_CLIENT_WAITING_MAX);
    }
    struct op_call *call = calloc(1, sizeof *call);
    if (call == NULL || !copy_request(call, request)) {
        if (call != NULL) {
            destroy(call);
        }
        return dl_err_set(err, DL_ENOMEM, "%s %.120s: no memory", request->method, request->path);
    }
    call->client = client;
    call->id = ++client->last_id;
    call->is_foreign = is_foreign;
    call->transfer = (struct op_transfer){.done = on_transfer, .context = call};
    call->bound = (struct op_timer){.fire = on_bound, .context = call};
    call->pause = (struct op_timer){.fire = on_pause_over, .context = call};
    call->deadline_ns = dl_now_ns() + call->request.timeout_ms * DL_NS_PER_MS;
    call->answer_max = request->stream != NULL ? ERROR_BODY_MAX : answer_max;
    dl_buf_init(&call->answer, call->answer_max);
    TAILQ_INSERT_TAIL(&client->all, call, all);
    op_timer_start(client->loop, &call->bound, call->deadline_ns);
    line_up(call);
    if (id != NULL) {
        *id = call->id;
    }
    return DL_OK;
}

enum dl_rc op_client_send(struct op_client *client, const struct op_request *request, uint64_t *id, struct dl_err *err)
{
    return send_call(client, request, false, OP_CLIENT_BODY_BYTES_MAX, id, err);
}

enum dl_rc op_client_fetch(struct op_client *client, const struct op_request *request, size_t bytes_max, uint64_t *id,
                           struct dl_err *err)
{
    return send_call(client, request, true, bytes_max, id, err);
}

void op_client_cancel(struct op_client *client, uint64_t id)
{
    struct op_call_list *lists[] = {&client->all, &client->aborting};
    for (size_t i = 0; i < DL_COUNT_OF(lists) && id != 0; i++) {
        for (struct op_call *call = TAILQ_FIRST(lists[i]); call != NULL; call = TAILQ_NEXT(call, all)) {
            if (call->id != id) {
                continue;
            }
            if (client->is_in_curl && call->phase == OP_CALL_FLYING) {
                call->is_cancelled = true;
                op_timer_start(client->loop, &call->pause, op_loop_now_ns(client->loop));
                return;
            }
            TAILQ_REMOVE(lists[i], call, all);
            detach(call);
            destroy(call);
            return;
        }
    }
}

uint32_t op_client_backlog(const struct op_client *client)
{
    return client->ordinary_count;
}

uint32_t op_client_pending(const struct op_client *client)
{
    uint32_t pending = 0;
    for (const struct op_call *call = TAILQ_FIRST(&client->all); call != NULL; call = TAILQ_NEXT(call, all)) {
        pending += call->request.stream == NULL;
    }
    return pending;
}

void op_client_set_guard(struct op_client *client, bool (*may_write)(void *context), void *context)
{
    client->may_write = may_write;
    client->guard_context = context;
}

void op_client_abort_writes(struct op_client *client)
{
    assert(!client->is_in_curl);
    for (struct op_call *call = TAILQ_FIRST(&client->all), *next; call != NULL; call = next) {
        next = TAILQ_NEXT(call, all);
        if (is_write(call) && !call->request.is_unguarded) {
            detach(call);
            TAILQ_REMOVE(&client->all, call, all);
            TAILQ_INSERT_TAIL(&client->aborting, call, all);
        }
    }
    while (!TAILQ_EMPTY(&client->aborting)) {
        struct op_call *call = TAILQ_FIRST(&client->aborting);
        struct op_result result;
        TAILQ_REMOVE(&client->aborting, call, all);
        op_call_fail(call, DL_EDENIED, "broken off: this process does not hold the lease any more", &result);
        tell(call, &result);
    }
}

void op_client_metrics(const struct op_client *client, struct dl_metrics *metrics)
{
    const char *host = client->config.server + strcspn(client->config.server, ":") + 3;
    dl_metrics_family(metrics, "rest_client_requests_total", "counter", "Requests to the API server by answer.");
    for (size_t i = 0; i < client->count_count; i++) {
        char code[16];
        snprintf(code, sizeof code, "%d", client->counts[i].code);
        dl_metrics_value(metrics, (double)client->counts[i].count, "code",
                         client->counts[i].code == 0 ? "<error>" : code, "method", client->counts[i].method, "host",
                         host, (char *)NULL);
    }
    dl_metrics_family(metrics, "rest_client_request_duration_seconds", "histogram", "Time that a request takes.");
    for (size_t i = 0; i < OP_CALL_METHODS; i++) {
        dl_metrics_histogram(metrics, &client->seconds[i], "verb", method_names[i]);
    }
    dl_metrics_family(metrics, "rest_client_rate_limiter_duration_seconds", "histogram", "Time that a request waits.");
    dl_metrics_histogram(metrics, &client->limited, "host", host);
    dl_metrics_family(metrics, "diloco_rest_client_retries_total", "counter", "Requests sent again.");
    dl_metrics_value(metrics, (double)client->retries, (char *)NULL);
}
