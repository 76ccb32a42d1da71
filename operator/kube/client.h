/* op_client: asynchronous requests to one API server on an op_loop.
 *
 * Every request ends in exactly one call of its `done`, never within the call that made it (cancelled ones aside,
 * which end in none). Waiting requests are bounded, transfers in flight are bounded, a token bucket limits the rate,
 * every request has a deadline over all its tries. Connections are kept and reused (HTTP/1.1 keep-alive, TCP
 * keepalive). Tokens and certificates are read again at least every minute, and at once after a 401. Owned by the
 * loop's thread; layer operator/kube.
 *
 * What is tried again, within the deadline: for all requests 429 and 503 with Retry-After, a refused connection, a
 * 401 once (after new credentials); for GET, PUT, DELETE, apply and other repeatable requests also broken
 * connections and 5xx. A POST or a JSON patch whose fate is unknown is not repeated: the caller reads again
 * (level-triggered). */
#ifndef OP_KUBE_CLIENT_H
#define OP_KUBE_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/metrics.h"
#include "operator/kube/config.h"
#include "operator/kube/loop.h"

#define OP_CLIENT_WAITING_MAX 20000          /* Requests that wait for their turn. */
#define OP_CLIENT_BODY_BYTES_MAX (64u << 20) /* An answer larger than this is DL_EPROTO. */
#define OP_CLIENT_BACKGROUND_SHARE 8
#define OP_CLIENT_TIMEOUT_MS 30000 /* Of a request that names none. */

struct op_client; /* Opaque. */

struct op_client_options {
    double qps;             /* Requests a second on average; 0: 50. */
    uint32_t burst;         /* Bucket size; 0: 100. */
    uint32_t in_flight_max; /* Transfers at once, streams not counted; 0: 16. */
    const char *user_agent; /* Copied; NULL: "diloco-operator". */
};

/* How an answer is to be read. `rc` says what to do next, and is never DL_OK unless a complete answer with status
 * 2xx came:
 *   DL_OK         2xx
 *   DL_EINVAL     400, 413, 415, 422: our object is wrong; goes to the status and stops
 *   DL_EDENIED    401, 403 (quota too, see op_result_is_quota), or the guard refused a write
 *   DL_ENOTFOUND  404
 *   DL_EEXISTS    409 with reason AlreadyExists
 *   DL_ECONFLICT  409 otherwise: read again
 *   DL_EGONE      410, or reason Expired: list again
 *   DL_ETIMEOUT   429 or 504 until the deadline, or no answer by then
 *   DL_ENET       no connection, TLS failure, broken off, other 5xx
 *   DL_EPROTO     the answer is too large or is not HTTP, 3xx
 *   DL_ENOMEM     no memory
 * All pointers are borrowed and end with the callback. */
struct op_result {
    enum dl_rc rc;
    int transport; /* CURLcode of the last try; 0: an answer came. */
    int status;    /* HTTP status of the last try; 0: none. */
    uint32_t tries;
    const char *body; /* Zero-terminated; "" when there is none. */
    size_t size;
    const char *reason; /* Of a Status object ("AlreadyExists", "Forbidden", ...); "" when there is none. */
    const char *message;
    int64_t retry_after_ns; /* 0: the server named none. */
    struct dl_err err;      /* "PATCH /api/v1/...: 403 Forbidden: <message>" */
};

bool op_result_is_quota(const struct op_result *result); /* A 403 because of a ResourceQuota. */

typedef void op_result_fn(void *context, const struct op_result *result);
/* Bytes of an answer 2xx as they arrive. Called within libcurl: may call everything of the client, lines and
 * parsers, but nothing of op_loop. False breaks the transfer off. */
typedef bool op_stream_fn(void *context, const char *bytes, size_t size);

struct op_request {
    const char *method;       /* "GET", "POST", "PUT", "PATCH", "DELETE". */
    const char *path;         /* From op_path_text; copied. */
    const char *content_type; /* NULL: application/json. */
    const char *body;         /* Copied; NULL: none. */
    size_t size;
    int64_t timeout_ms; /* Over all tries; 0: OP_CLIENT_TIMEOUT_MS. */
    bool is_repeatable; /* May be sent again when its fate is unknown. GET, PUT and DELETE are by themselves. */
    bool is_urgent;     /* Passes the rate limit and other requests: leases. */
    bool is_background; /* Gives way to other requests, but for every OP_CLIENT_BACKGROUND_SHARE-th: events. */
    bool is_unguarded;  /* A write that the guard does not stop: leases. */
    bool is_once;       /* Is never tried again by the client. */
    op_result_fn *done; /* NULL: nobody wants to know. */
    void *context;
    /* Streams: not counted in in_flight_max, no retry, `timeout_ms` bounds the whole, `idle_ms` the silence. */
    op_stream_fn *stream;
    int64_t idle_ms; /* 0: no bound but the whole. */
};

/* `loop` is borrowed, `config` copied. No connection is made yet. DL_EINVAL: credentials cannot be read. */
DL_MUST_CHECK enum dl_rc op_client_new(struct op_loop *loop, const struct op_config *config,
                                       const struct op_client_options *options, struct op_client **out,
                                       struct dl_err *err);
/* Ends everything without calling `done`. Not within one of its callbacks. NULL is fine. */
void op_client_free(struct op_client *client);

struct op_loop *op_client_loop(const struct op_client *client);
const char *op_client_space(const struct op_client *client); /* Namespace of the configuration. */
const char *op_client_server(const struct op_client *client);

/* `*id` (may be NULL) names the request for op_client_cancel. DL_ENOMEM: OP_CLIENT_WAITING_MAX wait already, or no
 * memory; `done` is not called then. Other reasons arrive in `done`. */
DL_MUST_CHECK enum dl_rc op_client_send(struct op_client *client, const struct op_request *request, uint64_t *id,
                                        struct dl_err *err);
/* Its `done` is not called any more. An id that is finished or 0 is fine. */
void op_client_cancel(struct op_client *client, uint64_t id);
uint32_t op_client_pending(const struct op_client *client); /* Waiting and in flight, streams not counted. */

/* Ordinary requests that wait for their turn. Deadlines run meanwhile, and bodies take memory: who makes many of them
 * should wait while there are many. */
uint32_t op_client_backlog(const struct op_client *client);

/* Writes (everything but GET) pass only while `may_write` is true (NULL: always), looked at when a try starts.
 * Others end with DL_EDENIED. */
void op_client_set_guard(struct op_client *client, bool (*may_write)(void *context), void *context);
/* Breaks off writes that are waiting or in flight (unguarded ones aside): they end with DL_EDENIED. */
void op_client_abort_writes(struct op_client *client);

/* rest_client_requests_total, rest_client_request_duration_seconds, rest_client_rate_limiter_duration_seconds,
 * diloco_rest_client_retries_total. */
void op_client_metrics(const struct op_client *client, struct dl_metrics *metrics);

#endif
