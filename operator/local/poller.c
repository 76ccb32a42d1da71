#include "operator/local/poller.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define INTERVAL_DEFAULT_NS INT64_C(250000000)

struct shard {
    CURL *easy;
    char url[512];
    bool is_busy;
    int64_t next_ns;
    char *body;
    size_t body_used, body_capacity;
    struct op_job_status status;
    bool has_status;
    int64_t heard_ns;
    char error[CURL_ERROR_SIZE];
    char last_error[CURL_ERROR_SIZE];
};

struct op_poller {
    CURLM *multi;
    uint32_t shard_count;
    int64_t interval_ns;
    struct shard *shards;
};

static size_t on_body(char *bytes, size_t size, size_t count, void *context)
{
    struct shard *shard = context;
    size_t length = size * count;
    if (shard->body_used + length > OP_JSON_BYTES_MAX) {
        return 0; /* Ends the transfer with an error. */
    }
    if (shard->body_used + length > shard->body_capacity) {
        size_t capacity = DL_MAX(shard->body_capacity * 2, shard->body_used + length + 4096);
        char *body = realloc(shard->body, capacity);
        if (body == NULL) {
            return 0;
        }
        shard->body = body;
        shard->body_capacity = capacity;
    }
    memcpy(shard->body + shard->body_used, bytes, length);
    shard->body_used += length;
    return length;
}

static bool prepare(struct shard *shard)
{
    shard->easy = curl_easy_init();
    if (shard->easy == NULL) {
        return false;
    }
    op_status_init(&shard->status);
    return curl_easy_setopt(shard->easy, CURLOPT_WRITEFUNCTION, on_body) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_WRITEDATA, shard) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_PRIVATE, shard) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_ERRORBUFFER, shard->error) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_TIMEOUT_MS, (long)OP_POLLER_TIMEOUT_MS) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_CONNECTTIMEOUT_MS, (long)OP_POLLER_TIMEOUT_MS) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_PROXY, "") == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_FAILONERROR, 1L) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK;
}

enum dl_rc op_poller_new(uint32_t shards, struct op_poller **out, struct dl_err *err)
{
    struct op_poller *poller = calloc(1, sizeof *poller);
    if (poller != NULL) {
        poller->shards = calloc(shards, sizeof *poller->shards);
        poller->multi = curl_multi_init();
        poller->interval_ns = INTERVAL_DEFAULT_NS;
    }
    bool is_ready = poller != NULL && poller->shards != NULL && poller->multi != NULL;
    for (uint32_t i = 0; is_ready && i < shards; i++) {
        poller->shard_count = i + 1;
        is_ready = prepare(&poller->shards[i]);
    }
    if (!is_ready) {
        op_poller_free(poller);
        return dl_err_set(err, DL_ENOMEM, "no memory to poll %u syncers", shards);
    }
    *out = poller;
    return DL_OK;
}

void op_poller_free(struct op_poller *poller)
{
    if (poller == NULL) {
        return;
    }
    for (uint32_t i = 0; i < poller->shard_count; i++) {
        struct shard *shard = &poller->shards[i];
        if (shard->is_busy) {
            curl_multi_remove_handle(poller->multi, shard->easy);
        }
        curl_easy_cleanup(shard->easy);
        free(shard->body);
        op_status_release(&shard->status);
    }
    free(poller->shards);
    if (poller->multi != NULL) {
        curl_multi_cleanup(poller->multi);
    }
    free(poller);
}

enum dl_rc op_poller_set_address(struct op_poller *poller, uint32_t index, const char *address, struct dl_err *err)
{
    struct shard *shard = &poller->shards[index];
    if (shard->is_busy) {
        curl_multi_remove_handle(poller->multi, shard->easy);
        shard->is_busy = false;
    }
    shard->url[0] = 0;
    shard->next_ns = 0;
    if (address == NULL || address[0] == 0) {
        return DL_OK;
    }
    bool is_url = strstr(address, "://") != NULL;
    size_t length = strlen(address);
    while (length > 0 && address[length - 1] == '/') {
        length--;
    }
    int needed =
        snprintf(shard->url, sizeof shard->url, "%s%.*s/status", is_url ? "" : "http://", (int)length, address);
    if (needed < 0 || (size_t)needed >= sizeof shard->url ||
        curl_easy_setopt(shard->easy, CURLOPT_URL, shard->url) != CURLE_OK) {
        shard->url[0] = 0;
        return dl_err_set(err, DL_EINVAL, "the address '%.80s' is too long or not one", address);
    }
    return DL_OK;
}

enum dl_rc op_poller_put(struct op_poller *poller, uint32_t index, const char *text, size_t size, int64_t now_ns,
                         struct dl_err *err)
{
    struct shard *shard = &poller->shards[index];
    enum dl_rc rc = op_status_parse(text, size, &shard->status, err);
    if (rc == DL_OK) {
        shard->has_status = true;
        shard->heard_ns = now_ns;
    }
    return rc;
}

void op_poller_set_interval(struct op_poller *poller, int64_t interval_ns)
{
    poller->interval_ns = interval_ns;
    for (uint32_t i = 0; i < poller->shard_count; i++) {
        struct shard *shard = &poller->shards[i];
        shard->next_ns = DL_MIN(shard->next_ns, shard->heard_ns + interval_ns);
    }
}

static void take_answer(struct op_poller *poller, struct shard *shard, CURLcode code, int64_t now_ns)
{
    curl_multi_remove_handle(poller->multi, shard->easy);
    shard->is_busy = false;
    shard->next_ns = now_ns + poller->interval_ns;
    struct dl_err err = {.text = ""};
    if (code != CURLE_OK) {
        snprintf(shard->last_error, sizeof shard->last_error, "%s",
                 shard->error[0] != 0 ? shard->error : curl_easy_strerror(code));
    } else if (op_status_parse(shard->body, shard->body_used, &shard->status, &err) != DL_OK) {
        snprintf(shard->last_error, sizeof shard->last_error, "%.*s", (int)sizeof shard->last_error - 1, err.text);
    } else {
        shard->has_status = true;
        shard->heard_ns = now_ns;
        shard->last_error[0] = 0;
    }
}

static void ask(struct op_poller *poller, struct shard *shard)
{
    shard->body_used = 0;
    shard->error[0] = 0;
    shard->is_busy = curl_multi_add_handle(poller->multi, shard->easy) == CURLM_OK;
}

bool op_poller_turn(struct op_poller *poller, int64_t now_ns)
{
    for (uint32_t i = 0; i < poller->shard_count; i++) {
        struct shard *shard = &poller->shards[i];
        if (!shard->is_busy && shard->url[0] != 0 && now_ns >= shard->next_ns) {
            ask(poller, shard);
        }
    }
    int running = 0;
    curl_multi_perform(poller->multi, &running);
    bool has_news = false;
    int left = 0;
    for (CURLMsg *message; (message = curl_multi_info_read(poller->multi, &left)) != NULL;) {
        char *owner = NULL;
        if (message->msg == CURLMSG_DONE &&
            curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &owner) == CURLE_OK) {
            take_answer(poller, (struct shard *)(void *)owner, message->data.result, now_ns);
            has_news = true;
        }
    }
    return has_news;
}

int64_t op_poller_next_ns(const struct op_poller *poller)
{
    int64_t next_ns = INT64_MAX;
    for (uint32_t i = 0; i < poller->shard_count; i++) {
        const struct shard *shard = &poller->shards[i];
        if (!shard->is_busy && shard->url[0] != 0) {
            next_ns = DL_MIN(next_ns, shard->next_ns);
        }
    }
    return next_ns;
}

void op_poller_wait(struct op_poller *poller, struct curl_waitfd *fds, unsigned int count, int timeout_ms)
{
    for (unsigned int i = 0; i < count; i++) {
        fds[i].revents = 0;
    }
    curl_multi_poll(poller->multi, fds, count, timeout_ms, NULL);
}

const struct op_job_status *op_poller_view(const struct op_poller *poller, uint32_t index, int64_t now_ns,
                                           bool even_old)
{
    const struct shard *shard = &poller->shards[index];
    bool is_fresh = shard->has_status && now_ns - shard->heard_ns <= OP_POLLER_FRESH_NS;
    return is_fresh || (even_old && shard->has_status) ? &shard->status : NULL;
}

const char *op_poller_error(const struct op_poller *poller, uint32_t index)
{
    return poller->shards[index].last_error;
}
