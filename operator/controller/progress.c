/* What the syncers say, and what they are told. */
#include <curl/curl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "operator/controller/internal.h"

#define POLL_NS (2 * OP_SECOND)
#define POLL_JOBS 100 /* Jobs for which a second is added between two looks. */
#define POLL_BACKOFF_MAX_NS (30 * OP_SECOND)
#define POLL_TIMEOUT_MS 3000
#define POLL_BYTES_MAX (8u << 20)
#define ORDER_NS (2 * OP_SECOND)
#define ORDER_TIMEOUT_MS 3000L
#define URL_MAX 160

/* --- asking --- */

static void poll_free(struct op_poll *poll, uint32_t shards)
{
    for (uint32_t i = 0; poll != NULL && i < shards; i++) {
        op_status_release(&poll->views[i]);
    }
    if (poll != NULL) {
        free(poll->views);
        free(poll->is_heard);
        free(poll);
    }
}

void op_progress_forget(struct op_job *job)
{
    poll_free(job->poll, job->poll_shards);
    job->poll = NULL;
}

/* A syncer that has ended is started again by its set, and then has little to say. */
static uint32_t count_ended(const struct op_job *job)
{
    uint32_t ended = 0;
    for (uint32_t i = 0; i < job->wanted.shards; i++) {
        ended += job->shards[i].result != OP_STATUS_RESULT_NONE ? 1 : 0;
    }
    return ended;
}

static struct op_poll *poll_new(uint32_t shards)
{
    struct op_poll *poll = calloc(1, sizeof *poll);
    if (poll != NULL) {
        poll->views = calloc(shards, sizeof *poll->views);
        poll->is_heard = calloc(shards, sizeof *poll->is_heard);
        if (poll->views == NULL || poll->is_heard == NULL) {
            free(poll->views);
            free(poll->is_heard);
            free(poll);
            return NULL;
        }
        for (uint32_t i = 0; i < shards; i++) {
            op_status_init(&poll->views[i]);
        }
    }
    return poll;
}

static void write_url(const struct op_pod *pod, int port, const char *path, char out[URL_MAX])
{
    bool is_v6 = strchr(pod->address, ':') != NULL;
    snprintf(out, URL_MAX, "http://%s%s%s:%d/%s", is_v6 ? "[" : "", pod->address, is_v6 ? "]" : "", port, path);
}

static bool is_reachable(const struct op_held_pod *held, const struct op_job *job)
{
    return held->pod.kind == OP_SYNCER && held->pod.id < job->wanted.shards && held->pod.is_up &&
           held->pod.address[0] != 0;
}

static void ask(struct op_controller *c, struct op_job *job, const struct op_held_pod *held)
{
    struct dl_err err;
    char url[URL_MAX];
    struct op_errand *errand = op_errand_new(c, job, OP_ERRAND_POLL);
    if (errand == NULL) {
        return;
    }
    errand->shard = held->pod.id;
    errand->digest = job->poll_number;
    struct op_reply_to to = {.done = op_errand_done, .context = errand, .id = &errand->id};
    write_url(&held->pod, OP_HEALTH_PORT, "status", url);
    enum dl_rc rc = c->options.via_proxy ? op_api_pod_proxy(c->client, job->space, held->name, OP_HEALTH_PORT, "status",
                                                            POLL_TIMEOUT_MS, to, &err)
                                         : op_fetch(c->client, url, POLL_TIMEOUT_MS, POLL_BYTES_MAX, to, &err);
    if (rc != DL_OK) {
        op_errand_free(errand);
        return;
    }
    job->poll->pending++;
}

void op_progress_poll(struct op_controller *c, struct op_job *job, int64_t now_ns)
{
    const struct op_bucket *bucket = op_store_bucket(c, job->uid);
    uint32_t ended = count_ended(job);
    if (job->poll != NULL || bucket == NULL || now_ns < job->poll_due_ns || ended == job->wanted.shards) {
        return;
    }
    for (uint32_t i = 0; i < bucket->count; i++) {
        const struct op_held_pod *held = bucket->pods[i];
        if (!is_reachable(held, job)) {
            continue;
        }
        if (job->poll == NULL) {
            job->poll = poll_new(job->wanted.shards);
            job->poll_shards = job->wanted.shards;
            job->poll_number++;
            if (job->poll != NULL) {
                job->poll->is_late = ended > 0;
            }
        }
        if (job->poll != NULL) {
            ask(c, job, held);
        }
    }
    int64_t interval_ns =
        c->options.poll_ns != 0 ? c->options.poll_ns : POLL_NS + (int64_t)c->jobs.count * OP_SECOND / POLL_JOBS;
    interval_ns <<= DL_MIN(job->poll_failures, 4u);
    job->poll_due_ns = now_ns + DL_MIN(interval_ns, DL_MAX(POLL_BACKOFF_MAX_NS, c->options.poll_ns));
    if (job->poll != NULL && job->poll->pending == 0) {
        op_progress_forget(job);
    }
}

static void take_shard(struct op_job *job, uint32_t shard, const struct op_job_status *view)
{
    struct op_shard *own = &job->shards[shard];
    if (view->result != OP_STATUS_RESULT_NONE) {
        own->result = view->result;
    }
    own->is_finishing = view->phase >= OP_STATUS_FINISHING;
}

static void conclude(struct op_controller *c, struct op_job *job, int64_t now_ns)
{
    const struct op_job_status *views[DL_SPEC_SHARDS_MAX];
    struct op_poll *poll = job->poll;
    struct dl_err err;
    uint32_t heard = 0;
    for (uint32_t i = 0; i < job->poll_shards; i++) {
        views[i] = poll->is_heard[i] ? &poll->views[i] : NULL;
        heard += poll->is_heard[i] ? 1 : 0;
    }
    job->poll_failures = heard > 0 ? 0 : job->poll_failures + 1;
    if (heard > 0 && poll->is_late) {
        job->heard_ns = now_ns; /* What was said before the first of them ended stays. */
    } else if (heard > 0 && op_status_combine(views, job->poll_shards, &job->view, &err) == DL_OK) {
        job->heard_ns = now_ns;
        free(job->view.fragments); /* Nobody here reads them. */
        job->view.fragments = NULL;
        job->view.fragment_count = 0;
    }
    op_progress_forget(job);
    op_controller_wake(c, job->key, 0);
    op_controller_wake(c, job->key, job->poll_due_ns);
}

void op_progress_on_answer(struct op_controller *c, struct op_job *job, const struct op_errand *errand,
                           const struct op_result *result)
{
    struct dl_err err;
    struct op_poll *poll = job->poll;
    if (poll == NULL || errand->digest != job->poll_number || errand->shard >= job->poll_shards) {
        return;
    }
    if (result->rc == DL_OK) {
        if (op_status_parse(result->body, result->size, &poll->views[errand->shard], &err) == DL_OK) {
            poll->is_heard[errand->shard] = true;
            take_shard(job, errand->shard, &poll->views[errand->shard]);
        } else {
            dl_warn("status not understood job=%s shard=%u error=\"%s\"", job->key, errand->shard, err.text);
        }
    }
    if (result->rc != DL_OK) {
        bool is_said = result->message[0] != 0;
        snprintf(job->poll_error, sizeof job->poll_error, "%.*s", (int)sizeof job->poll_error - 1,
                 is_said ? result->message : result->err.text);
    }
    if (--poll->pending == 0) {
        conclude(c, job, op_loop_now_ns(c->loop));
    }
}

/* A syncer that has ended the job leaves its result behind; that of one that is still there is in its status. */
void op_progress_read(struct op_job *job, const struct op_bucket *bucket, struct op_progress *out)
{
    for (uint32_t i = 0; bucket != NULL && i < bucket->count; i++) {
        const struct op_pod *pod = &bucket->pods[i]->pod;
        int result =
            pod->kind == OP_SYNCER && pod->has_ended ? op_status_result_parse(pod->last_word) : OP_STATUS_RESULT_NONE;
        if (result != OP_STATUS_RESULT_NONE && pod->id < job->wanted.shards) {
            job->shards[pod->id].result = result;
        }
    }
    *out = (struct op_progress){.result = -1};
    int worst = DL_STOP_SUCCEEDED;
    bool all = true;
    for (uint32_t i = 0; i < job->wanted.shards; i++) {
        const struct op_shard *shard = &job->shards[i];
        out->finishing = out->finishing || shard->is_finishing || shard->result == DL_STOP_SUCCEEDED;
        out->succeeded = out->succeeded || shard->result == DL_STOP_SUCCEEDED;
        all = all && shard->result != OP_STATUS_RESULT_NONE;
        worst = DL_MAX(worst, shard->result);
    }
    out->result = all ? worst : -1;
}

/* --- telling --- */

struct op_order {
    LIST_ENTRY(op_order) all;
    struct op_controller *controller;
    struct op_transfer transfer;
    struct curl_slist *headers;
    char url[URL_MAX];
};

static void order_free(struct op_order *order)
{
    op_transfer_remove(order->controller->loop, &order->transfer);
    curl_easy_cleanup(order->transfer.easy);
    curl_slist_free_all(order->headers);
    LIST_REMOVE(order, all);
    free(order);
}

static void order_done(void *context, CURLcode code, int64_t now_ns)
{
    struct op_order *order = context;
    (void)now_ns;
    long status = 0;
    curl_easy_getinfo(order->transfer.easy, CURLINFO_RESPONSE_CODE, &status);
    if (code != CURLE_OK || status / 100 != 2) {
        dl_warn("order not taken url=%s status=%ld error=\"%s\"", order->url, status, curl_easy_strerror(code));
    } else {
        dl_info("order taken url=%s", order->url);
    }
    order_free(order);
}

static size_t ignore(char *bytes, size_t size, size_t count, void *context)
{
    (void)bytes;
    (void)context;
    return size * count;
}

static bool prepare(struct op_order *order, const char *token)
{
    char header[OP_TOKEN_TEXT_MAX + 32];
    CURL *easy = order->transfer.easy;
    snprintf(header, sizeof header, "Authorization: Bearer %s", token);
    order->headers = curl_slist_append(NULL, header);
    return order->headers != NULL && curl_easy_setopt(easy, CURLOPT_URL, order->url) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_HTTPHEADER, order->headers) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_POSTFIELDS, "") == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, ignore) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, ORDER_TIMEOUT_MS) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_PROXY, "") == CURLE_OK &&
           curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http") == CURLE_OK;
}

static void send_order(struct op_controller *c, const struct op_pod *pod, const char *name, const char *token)
{
    struct dl_err err = {.text = "no memory"};
    struct op_order *order = calloc(1, sizeof *order);
    CURL *easy = order != NULL ? curl_easy_init() : NULL;
    if (easy == NULL) {
        free(order);
        return;
    }
    order->controller = c;
    order->transfer = (struct op_transfer){.easy = easy, .done = order_done, .context = order};
    LIST_INSERT_HEAD(&c->orders, order, all);
    write_url(pod, OP_SYNCER_PORT, name, order->url);
    if (!prepare(order, token) || op_transfer_add(c->loop, &order->transfer, &err) != DL_OK) {
        dl_warn("order not sent url=%s error=\"%s\"", order->url, err.text);
        order_free(order);
    }
}

void op_progress_order(struct op_controller *c, struct op_job *job, const char *name, int64_t now_ns)
{
    char token[OP_TOKEN_TEXT_MAX];
    const struct op_bucket *bucket = op_store_bucket(c, job->uid);
    if (bucket == NULL || now_ns < job->order_due_ns || !op_token_of_job(c, job->uid, token)) {
        return;
    }
    job->order_due_ns = now_ns + ORDER_NS;
    for (uint32_t i = 0; i < bucket->count; i++) {
        if (is_reachable(bucket->pods[i], job)) {
            send_order(c, &bucket->pods[i]->pod, name, token);
        }
    }
}

void op_progress_release(struct op_controller *c)
{
    struct op_order *order = LIST_FIRST(&c->orders);
    while (order != NULL) {
        struct op_order *next = LIST_NEXT(order, all);
        order_free(order);
        order = next;
    }
}
