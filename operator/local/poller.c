#include "operator/local/poller.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

#define INTERVAL_DEFAULT_NS INT64_C(250000000)
#define COMMAND_INTERVAL_NS INT64_C(200000000) /* Between two tries. */

struct command { /* A POST to a shard. */
    CURL *easy;
    char name[16]; /* "": none wanted. */
    bool is_busy, is_accepted;
    int64_t next_ns;
};

struct shard {
    CURL *easy;
    struct command command;
    char base[480], url[512]; /* "" until the address is known. */
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
    const char *scheme;         /* Of addresses without one. */
    struct curl_slist *headers; /* Of commands. */
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

static size_t ignore_body(char *bytes, size_t size, size_t count, void *context)
{
    (void)bytes;
    (void)context;
    return size * count;
}

static CURL *new_request(struct shard *shard)
{
    CURL *easy = curl_easy_init();
    if (easy == NULL) {
        return NULL;
    }
    bool is_set = curl_easy_setopt(easy, CURLOPT_PRIVATE, shard) == CURLE_OK &&
                  curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, (long)OP_POLLER_TIMEOUT_MS) == CURLE_OK &&
                  curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS, (long)OP_POLLER_TIMEOUT_MS) == CURLE_OK &&
                  curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L) == CURLE_OK &&
                  curl_easy_setopt(easy, CURLOPT_PROXY, "") == CURLE_OK &&
                  curl_easy_setopt(easy, CURLOPT_FAILONERROR, 1L) == CURLE_OK &&
                  curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https") == CURLE_OK;
    if (!is_set) {
        curl_easy_cleanup(easy);
        return NULL;
    }
    return easy;
}

static bool prepare(struct shard *shard)
{
    op_status_init(&shard->status);
    shard->easy = new_request(shard);
    shard->command.easy = new_request(shard);
    return shard->easy != NULL && shard->command.easy != NULL &&
           curl_easy_setopt(shard->easy, CURLOPT_WRITEFUNCTION, on_body) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_WRITEDATA, shard) == CURLE_OK &&
           curl_easy_setopt(shard->easy, CURLOPT_ERRORBUFFER, shard->error) == CURLE_OK &&
           curl_easy_setopt(shard->command.easy, CURLOPT_WRITEFUNCTION, ignore_body) == CURLE_OK &&
           curl_easy_setopt(shard->command.easy, CURLOPT_POST, 1L) == CURLE_OK &&
           curl_easy_setopt(shard->command.easy, CURLOPT_POSTFIELDSIZE, 0L) == CURLE_OK;
}

enum dl_rc op_poller_new(uint32_t shards, struct op_poller **out, struct dl_err *err)
{
    struct op_poller *poller = calloc(1, sizeof *poller);
    if (poller != NULL) {
        poller->shards = calloc(shards, sizeof *poller->shards);
        poller->multi = curl_multi_init();
        poller->interval_ns = INTERVAL_DEFAULT_NS;
        poller->scheme = "http://";
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
        if (shard->command.is_busy) {
            curl_multi_remove_handle(poller->multi, shard->command.easy);
        }
        curl_easy_cleanup(shard->easy);
        curl_easy_cleanup(shard->command.easy);
        free(shard->body);
        op_status_release(&shard->status);
    }
    free(poller->shards);
    curl_slist_free_all(poller->headers);
    if (poller->multi != NULL) {
        curl_multi_cleanup(poller->multi);
    }
    free(poller);
}

static void forget_command(struct op_poller *poller, struct shard *shard)
{
    if (shard->command.is_busy) {
        curl_multi_remove_handle(poller->multi, shard->command.easy);
    }
    shard->command.is_busy = shard->command.is_accepted = false;
    shard->command.name[0] = 0;
    shard->command.next_ns = 0;
}

enum dl_rc op_poller_set_ca(struct op_poller *poller, const char *ca, struct dl_err *err)
{
    bool is_set = true;
    for (uint32_t i = 0; is_set && i < poller->shard_count; i++) {
        const struct shard *shard = &poller->shards[i];
        is_set = curl_easy_setopt(shard->easy, CURLOPT_CAINFO, ca) == CURLE_OK &&
                 curl_easy_setopt(shard->command.easy, CURLOPT_CAINFO, ca) == CURLE_OK;
    }
    poller->scheme = "https://";
    return is_set ? DL_OK : dl_err_set(err, DL_ENOMEM, "no memory for the path of %s", ca);
}

enum dl_rc op_poller_set_address(struct op_poller *poller, uint32_t index, const char *address, struct dl_err *err)
{
    struct shard *shard = &poller->shards[index];
    if (shard->is_busy) {
        curl_multi_remove_handle(poller->multi, shard->easy);
        shard->is_busy = false;
    }
    forget_command(poller, shard);
    shard->base[0] = shard->url[0] = 0;
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
        snprintf(shard->base, sizeof shard->base, "%s%.*s", is_url ? "" : poller->scheme, (int)length, address);
    snprintf(shard->url, sizeof shard->url, "%s/status", shard->base);
    if (needed < 0 || (size_t)needed >= sizeof shard->base ||
        curl_easy_setopt(shard->easy, CURLOPT_URL, shard->url) != CURLE_OK) {
        shard->base[0] = shard->url[0] = 0;
        return dl_err_set(err, DL_EINVAL, "the address '%.80s' is too long or not one", address);
    }
    return DL_OK;
}

enum dl_rc op_poller_set_token(struct op_poller *poller, const char *token, struct dl_err *err)
{
    char header[512];
    int needed = snprintf(header, sizeof header, "Authorization: Bearer %s", token);
    if (needed < 0 || (size_t)needed >= sizeof header) {
        return dl_err_set(err, DL_EINVAL, "the job's token is longer than %zu bytes", sizeof header - 32);
    }
    poller->headers = curl_slist_append(NULL, header);
    bool is_set = poller->headers != NULL;
    for (uint32_t i = 0; is_set && i < poller->shard_count; i++) {
        is_set = curl_easy_setopt(poller->shards[i].command.easy, CURLOPT_HTTPHEADER, poller->headers) == CURLE_OK;
    }
    return is_set ? DL_OK : dl_err_set(err, DL_ENOMEM, "no memory for the job's token");
}

bool op_poller_command(struct op_poller *poller, uint32_t index, const char *name, int64_t now_ns)
{
    struct shard *shard = &poller->shards[index];
    struct command *command = &shard->command;
    if (strcmp(command->name, name) != 0) {
        forget_command(poller, shard);
        snprintf(command->name, sizeof command->name, "%s", name);
    }
    if (command->is_accepted || command->is_busy || shard->base[0] == 0 || now_ns < command->next_ns) {
        return command->is_accepted;
    }
    char url[sizeof shard->base + sizeof command->name + 2];
    snprintf(url, sizeof url, "%s/%s", shard->base, command->name);
    command->is_busy = curl_easy_setopt(command->easy, CURLOPT_URL, url) == CURLE_OK &&
                       curl_multi_add_handle(poller->multi, command->easy) == CURLM_OK;
    return false;
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

static void take_command_answer(struct op_poller *poller, struct command *command, CURLcode code, int64_t now_ns)
{
    curl_multi_remove_handle(poller->multi, command->easy);
    command->is_busy = false;
    command->is_accepted = code == CURLE_OK;
    command->next_ns = now_ns + COMMAND_INTERVAL_NS;
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
            struct shard *shard = (struct shard *)(void *)owner;
            if (message->easy_handle == shard->command.easy) {
                take_command_answer(poller, &shard->command, message->data.result, now_ns);
            } else {
                take_answer(poller, shard, message->data.result, now_ns);
                has_news = true;
            }
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
