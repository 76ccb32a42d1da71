#include "operator/kube/lease.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/rng.h"
#include "common/time_text.h"
#include "operator/kube/api.h"

#define DURATION_MS 15000
#define RENEW_BY_MS 10000
#define RETRY_MS 2000

struct op_lease {
    struct op_client *client;
    struct op_loop *loop;
    struct op_lease_options options;
    char *space, *name, *identity;
    cJSON *record; /* As last seen at the server, NULL: unknown or not there. Fields that we do not know are kept. */
    bool is_absent;
    char *holder;
    int64_t seen_ns; /* When the record last changed, by our clock: others' clocks are not believed. */
    int64_t sent_ns; /* Of the request under way. */
    int64_t renewed_ns;
    bool is_leader;
    uint64_t request;
    struct op_timer next, loss, release_bound;
    void (*released)(void *context);
    void *released_context;
    uint64_t slow_path, transitions;
    struct dl_rng rng;
};

static void on_read(void *context, const struct op_result *result);
static void on_claimed(void *context, const struct op_result *result);
static void on_release_bound(void *context, int64_t now_ns);

static const cJSON *spec_of(const struct op_lease *lease)
{
    return cJSON_GetObjectItemCaseSensitive(lease->record, "spec");
}

bool op_lease_is_held(const struct op_lease *lease)
{
    return lease->is_leader && dl_now_ns() < lease->renewed_ns + lease->options.renew_by_ms * DL_NS_PER_MS;
}

static bool may_write(void *context)
{
    return op_lease_is_held(context);
}

const char *op_lease_holder(const struct op_lease *lease)
{
    return lease->holder != NULL ? lease->holder : "";
}

static void schedule(struct op_lease *lease, int64_t wait_ms)
{
    /* Up to a fifth more, so that candidates do not ask in step. */
    int64_t wait_ns = wait_ms * DL_NS_PER_MS;
    wait_ns += (int64_t)dl_rng_below(&lease->rng, (uint64_t)wait_ns / 5 + 1);
    op_timer_start(lease->loop, &lease->next, op_loop_now_ns(lease->loop) + wait_ns);
}

static void lose(struct op_lease *lease, const char *why)
{
    if (lease->is_leader) {
        lease->is_leader = false;
        lease->transitions++;
        op_timer_stop(lease->loop, &lease->loss);
        dl_warn("lease lost name=%s/%s why=\"%s\"", lease->space, lease->name, why);
        op_client_abort_writes(lease->client);
        lease->options.changed(lease->options.context, false);
    }
}

static void on_loss(void *context, int64_t now_ns)
{
    (void)now_ns;
    lose(context, "not renewed in time");
}

static void win(struct op_lease *lease)
{
    lease->renewed_ns = lease->sent_ns;
    op_timer_start(lease->loop, &lease->loss, lease->renewed_ns + lease->options.renew_by_ms * DL_NS_PER_MS);
    if (!lease->is_leader) {
        lease->is_leader = true;
        lease->transitions++;
        dl_info("lease held name=%s/%s identity=%s", lease->space, lease->name, lease->identity);
        lease->options.changed(lease->options.context, true);
    }
}

/* --- what is sent --- */

/* Takes `value`, also when it fails. */
static bool put(cJSON *object, const char *key, cJSON *value)
{
    cJSON_DeleteItemFromObjectCaseSensitive(object, key);
    if (value == NULL || !cJSON_AddItemToObject(object, key, value)) {
        cJSON_Delete(value);
        return false;
    }
    return true;
}

static cJSON *empty_record(const struct op_lease *lease)
{
    cJSON *record = cJSON_CreateObject();
    cJSON *metadata = cJSON_AddObjectToObject(record, "metadata");
    cJSON_AddStringToObject(record, "apiVersion", "coordination.k8s.io/v1");
    cJSON_AddStringToObject(record, "kind", "Lease");
    cJSON_AddStringToObject(metadata, "name", lease->name);
    cJSON_AddStringToObject(metadata, "namespace", lease->space);
    cJSON_AddObjectToObject(record, "spec");
    return record;
}

/* The record with `holder` in it, as text. */
static char *record_text(const struct op_lease *lease, const char *holder, int64_t seconds)
{
    cJSON *record = lease->record != NULL ? cJSON_Duplicate(lease->record, true) : empty_record(lease);
    cJSON *spec = cJSON_GetObjectItemCaseSensitive(record, "spec");
    if (spec == NULL) {
        spec = cJSON_AddObjectToObject(record, "spec");
    }
    char now[DL_TIME_TEXT_MAX];
    dl_time_text(dl_wall_ns(), 6, now);
    bool is_built = spec != NULL;
    if (is_built && strcmp(op_lease_holder(lease), lease->identity) != 0) {
        const cJSON *before = cJSON_GetObjectItemCaseSensitive(spec, "leaseTransitions");
        double transitions = cJSON_IsNumber(before) ? before->valuedouble + 1 : 0;
        is_built = put(spec, "acquireTime", cJSON_CreateString(now)) &&
                   put(spec, "leaseTransitions", cJSON_CreateNumber(transitions));
    }
    is_built = is_built && put(spec, "holderIdentity", cJSON_CreateString(holder)) &&
               put(spec, "leaseDurationSeconds", cJSON_CreateNumber((double)seconds)) &&
               put(spec, "renewTime", cJSON_CreateString(now));
    char *text = is_built ? cJSON_PrintUnformatted(record) : NULL;
    cJSON_Delete(record);
    return text;
}

static void send_request(struct op_lease *lease, const char *method, const char *text, op_result_fn *done,
                         int64_t timeout_ms)
{
    struct op_path path;
    struct dl_err err;
    op_path_init(&path);
    if (strcmp(method, "POST") == 0) {
        op_path_collection(&path, &op_res_leases, lease->space);
    } else {
        op_path_object(&path, &op_res_leases, lease->space, lease->name);
    }
    struct op_request request = {
        .method = method,
        .body = text,
        .size = text != NULL ? strlen(text) : 0,
        .timeout_ms = timeout_ms,
        .is_urgent = true,
        .is_unguarded = true,
        .is_once = true,
        .done = done,
        .context = lease,
    };
    lease->sent_ns = dl_now_ns();
    enum dl_rc rc = op_path_text(&path, &request.path, &err);
    if (rc == DL_OK) {
        rc = op_client_send(lease->client, &request, &lease->request, &err);
    }
    op_path_release(&path);
    if (rc != DL_OK) {
        dl_warn("lease: %s", err.text);
        schedule(lease, lease->options.retry_ms);
    }
}

/* Takes or renews it with a PUT: when another was faster, the resourceVersion makes it a conflict. */
static void claim(struct op_lease *lease)
{
    char *text = record_text(lease, lease->identity, (lease->options.duration_ms + 999) / 1000);
    if (text != NULL) {
        send_request(lease, lease->is_absent ? "POST" : "PUT", text, on_claimed, lease->options.renew_by_ms / 2);
    } else {
        schedule(lease, lease->options.retry_ms);
    }
    cJSON_free(text);
}

static void on_next(void *context, int64_t now_ns)
{
    struct op_lease *lease = context;
    (void)now_ns;
    if (lease->is_leader && lease->record != NULL) {
        claim(lease);
    } else {
        send_request(lease, "GET", NULL, on_read, lease->options.renew_by_ms / 2);
    }
}

/* --- what comes back --- */

static const char *version_of(const cJSON *record)
{
    const cJSON *metadata = cJSON_GetObjectItemCaseSensitive(record, "metadata");
    const char *version = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(metadata, "resourceVersion"));
    return version != NULL ? version : "";
}

static bool take_record(struct op_lease *lease, const struct op_result *result)
{
    cJSON *record = cJSON_ParseWithLength(result->body, result->size);
    if (version_of(record)[0] == 0) {
        cJSON_Delete(record);
        return false;
    }
    if (lease->record == NULL || strcmp(version_of(lease->record), version_of(record)) != 0) {
        lease->seen_ns = op_loop_now_ns(lease->loop);
    }
    cJSON_Delete(lease->record);
    lease->record = record;
    lease->is_absent = false;
    const char *holder = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(spec_of(lease), "holderIdentity"));
    free(lease->holder);
    lease->holder = strdup(holder != NULL ? holder : "");
    return lease->holder != NULL;
}

static bool is_free(const struct op_lease *lease)
{
    const cJSON *seconds = cJSON_GetObjectItemCaseSensitive(spec_of(lease), "leaseDurationSeconds");
    int64_t duration_ns = cJSON_IsNumber(seconds) && seconds->valuedouble > 0
                              ? (int64_t)(seconds->valuedouble * (double)DL_NS_PER_SECOND)
                              : lease->options.duration_ms * DL_NS_PER_MS;
    return op_lease_holder(lease)[0] == 0 || strcmp(op_lease_holder(lease), lease->identity) == 0 ||
           op_loop_now_ns(lease->loop) >= lease->seen_ns + duration_ns;
}

static void forget_record(struct op_lease *lease)
{
    cJSON_Delete(lease->record);
    lease->record = NULL;
}

static void on_claimed(void *context, const struct op_result *result)
{
    struct op_lease *lease = context;
    lease->request = 0;
    if (result->rc == DL_OK && take_record(lease, result)) {
        win(lease);
    } else {
        /* A peer was faster, the lease was deleted, or we do not know: look again. */
        dl_warn("lease not renewed: %s", result->rc != DL_OK ? result->err.text : "the answer is not a lease");
        lease->slow_path++;
        forget_record(lease);
    }
    schedule(lease, lease->options.retry_ms);
}

static void on_read(void *context, const struct op_result *result)
{
    struct op_lease *lease = context;
    lease->request = 0;
    if (result->rc == DL_ENOTFOUND) {
        forget_record(lease);
        lease->is_absent = true;
        claim(lease);
    } else if (result->rc != DL_OK || !take_record(lease, result)) {
        dl_warn("lease not read: %s", result->rc != DL_OK ? result->err.text : "the answer is not a lease");
        schedule(lease, lease->options.retry_ms);
    } else if (is_free(lease)) {
        claim(lease);
    } else {
        lose(lease, "another holds it");
        schedule(lease, lease->options.retry_ms);
    }
}

/* --- the lease --- */

enum dl_rc op_lease_new(struct op_client *client, const struct op_lease_options *options, struct op_lease **out,
                        struct dl_err *err)
{
    struct op_lease *lease = calloc(1, sizeof *lease);
    if (lease == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the lease");
    }
    lease->client = client;
    lease->loop = op_client_loop(client);
    lease->options = *options;
    struct op_lease_options *own = &lease->options;
    own->duration_ms = own->duration_ms > 0 ? own->duration_ms : DURATION_MS;
    own->renew_by_ms = own->renew_by_ms > 0 ? own->renew_by_ms : RENEW_BY_MS;
    own->retry_ms = own->retry_ms > 0 ? own->retry_ms : RETRY_MS;
    lease->next = (struct op_timer){.fire = on_next, .context = lease};
    lease->loss = (struct op_timer){.fire = on_loss, .context = lease};
    lease->release_bound = (struct op_timer){.fire = on_release_bound, .context = lease};
    lease->space = strdup(options->space);
    lease->name = strdup(options->name);
    lease->identity = strdup(options->identity);
    enum dl_rc rc = DL_OK;
    if (lease->space == NULL || lease->name == NULL || lease->identity == NULL) {
        rc = dl_err_set(err, DL_ENOMEM, "no memory for the lease");
    } else if (lease->identity[0] == 0 || own->renew_by_ms >= own->duration_ms) {
        rc = dl_err_set(err, DL_EINVAL, "a lease needs an identity, and to be given up before it runs out");
    }
    if (rc != DL_OK) {
        op_lease_free(lease);
        return rc;
    }
    dl_rng_init(&lease->rng, (uint64_t)dl_wall_ns(), dl_rng_stream("lease", (uint64_t)getpid(), 0));
    op_client_set_guard(client, may_write, lease);
    op_timer_start(lease->loop, &lease->next, op_loop_now_ns(lease->loop));
    *out = lease;
    return DL_OK;
}

void op_lease_free(struct op_lease *lease)
{
    if (lease == NULL) {
        return;
    }
    op_client_cancel(lease->client, lease->request);
    op_client_set_guard(lease->client, NULL, NULL);
    op_timer_stop(lease->loop, &lease->next);
    op_timer_stop(lease->loop, &lease->loss);
    op_timer_stop(lease->loop, &lease->release_bound);
    cJSON_Delete(lease->record);
    free(lease->holder);
    free(lease->space);
    free(lease->name);
    free(lease->identity);
    free(lease);
}

static void end_release(struct op_lease *lease)
{
    op_client_cancel(lease->client, lease->request);
    lease->request = 0;
    op_timer_stop(lease->loop, &lease->release_bound);
    lease->released(lease->released_context);
}

static void on_release_bound(void *context, int64_t now_ns)
{
    (void)now_ns;
    end_release(context);
}

static void on_released(void *context, const struct op_result *result)
{
    struct op_lease *lease = context;
    lease->request = 0;
    if (result->rc != DL_OK) {
        dl_warn("lease not given back, a peer waits until it runs out: %s", result->err.text);
    }
    end_release(lease);
}

void op_lease_release(struct op_lease *lease, int64_t timeout_ms, void (*done)(void *context), void *context)
{
    bool is_mine = lease->is_leader && lease->record != NULL;
    op_client_cancel(lease->client, lease->request);
    lease->request = 0;
    op_timer_stop(lease->loop, &lease->next);
    lose(lease, "given back");
    lease->released = done;
    lease->released_context = context;
    char *text = is_mine ? record_text(lease, "", 1) : NULL;
    op_timer_start(lease->loop, &lease->release_bound,
                   op_loop_now_ns(lease->loop) + (text != NULL ? timeout_ms * DL_NS_PER_MS : 0));
    if (text != NULL) {
        send_request(lease, "PUT", text, on_released, timeout_ms);
        op_timer_stop(lease->loop, &lease->next); /* What a failure to send would have started. */
    }
    cJSON_free(text);
}

void op_lease_metrics(const struct op_lease *lease, struct dl_metrics *metrics)
{
    dl_metrics_family(metrics, "leader_election_master_status", "gauge", "1: this process holds the lease.");
    dl_metrics_value(metrics, op_lease_is_held(lease), "name", lease->name, (char *)NULL);
    dl_metrics_family(metrics, "leader_election_slowpath_total", "counter", "Renewals that had to look first.");
    dl_metrics_value(metrics, (double)lease->slow_path, "name", lease->name, (char *)NULL);
    dl_metrics_family(metrics, "diloco_leader_transitions_total", "counter", "Leases won and lost by this process.");
    dl_metrics_value(metrics, (double)lease->transitions, "name", lease->name, (char *)NULL);
}
