/* What the parts of op_client share: client.c keeps calls in order, client_transfer.c moves bytes, client_result.c reads
 * answers. Loop's thread; layer operator/kube. */
#ifndef OP_KUBE_CLIENT_INTERNAL_H
#define OP_KUBE_CLIENT_INTERNAL_H

#include <cjson/cJSON.h>
#include <sys/queue.h>

#include "common/buf.h"
#include "common/rng.h"
#include "operator/kube/auth.h"
#include "operator/kube/client.h"

#define OP_CALL_COUNTS_MAX 64
#define OP_CALL_METHODS 5

enum op_call_phase {
    OP_CALL_WAITING, /* For its turn. */
    OP_CALL_PAUSED,  /* Until it is tried again. */
    OP_CALL_FLYING,  /* libcurl has it. */
};

struct op_call {
    TAILQ_ENTRY(op_call) all;     /* Of all calls, or of those that are being aborted. */
    TAILQ_ENTRY(op_call) waiting; /* In phase OP_CALL_WAITING: of its lane. */
    struct op_client *client;
    uint64_t id;
    enum op_call_phase phase;
    struct op_request request; /* Text points to what follows, except for the method, which is a constant. */
    char *path, *content_type, *body;
    bool is_foreign;   /* Not the API server's: no credentials, lane of its own. */
    bool is_cancelled; /* Within libcurl; ends as soon as that is left. */
    bool was_rejected; /* A 401 came. */
    size_t answer_max;
    int64_t queued_ns, started_ns, heard_ns, deadline_ns;
    uint32_t tries;
    struct op_timer bound; /* Deadline and idle watchdog. */
    struct op_timer pause; /* When it is tried again. */
    struct op_transfer transfer;
    struct curl_slist *headers;
    struct dl_buf answer;
    bool is_too_large;
    char curl_error[CURL_ERROR_SIZE];
};

TAILQ_HEAD(op_call_list, op_call);

struct op_client {
    struct op_loop *loop;
    struct op_config config;
    struct op_auth *auth;
    struct op_client_options options;
    char *user_agent;
    char *base_url;                /* Without a slash at the end. */
    struct curl_slist *connect_to; /* When the certificate is for another name. */
    struct op_call_list all, aborting;
    struct op_call_list urgent, ordinary, background, foreign; /* Those that wait. */
    uint32_t ordinary_count, ordinary_run;                     /* Of them; begun since one in the background was. */
    uint32_t waiting_count, in_flight, foreign_in_flight, streams;
    uint64_t last_id;
    struct op_timer pump;
    double tokens;
    int64_t tokens_ns; /* When the bucket was looked at last. */
    struct dl_err auth_failure;
    bool (*may_write)(void *context);
    void *guard_context;
    bool is_in_curl;
    struct dl_rng rng;
    struct {
        const char *method;
        int code; /* 0: no answer. */
        uint64_t count;
    } counts[OP_CALL_COUNTS_MAX];
    size_t count_count;
    uint64_t retries;
    struct dl_histogram seconds[OP_CALL_METHODS], limited;
};

/* client.c: op_fetch's way in; `request->path` is the whole URL. */
DL_MUST_CHECK enum dl_rc op_client_fetch(struct op_client *client, const struct op_request *request, size_t bytes_max,
                                         uint64_t *id, struct dl_err *err);

/* client_transfer.c: hands the call to libcurl; takes its handle and headers away again. */
DL_MUST_CHECK enum dl_rc op_call_launch(struct op_call *call, struct dl_err *err);
void op_call_land(struct op_call *call);
/* Finds the URL that all paths follow, and where to connect for it. */
DL_MUST_CHECK enum dl_rc op_client_set_base(struct op_client *client, struct dl_err *err);

/* client_result.c: what the last try came to. `*tree` keeps the texts of `result` alive: the caller deletes it. */
void op_call_read(struct op_call *call, CURLcode code, struct op_result *result, cJSON **tree);
void op_call_fail(const struct op_call *call, enum dl_rc rc, const char *why, struct op_result *result);
/* Whether the same request may be sent again after this. */
bool op_call_may_retry(const struct op_call *call, const struct op_result *result);

#endif
