/* op_serve: the operator's own small HTTP server on an op_loop, for probes and metrics: GET and HEAD, one answer a
 * connection.
 *
 * Bounded: OP_SERVE_CONNECTIONS_MAX connections, a request head of OP_SERVE_HEAD_MAX bytes, OP_SERVE_DEADLINE_MS for
 * the whole of a connection. Loop's thread; layer operator/kube. */
#ifndef OP_KUBE_SERVE_H
#define OP_KUBE_SERVE_H

#include "common/buf.h"
#include "common/metrics.h"
#include "operator/kube/loop.h"

#define OP_SERVE_CONNECTIONS_MAX 32
#define OP_SERVE_HEAD_MAX 8192
#define OP_SERVE_DEADLINE_MS 10000
#define OP_SERVE_BODY_MAX (16u << 20)

struct op_answer {
    int status;               /* 200 when called. */
    const char *content_type; /* "text/plain; charset=utf-8" when called; a constant. */
    struct dl_buf body;       /* Empty when called; the server's. */
};

struct op_serve; /* Opaque. */

/* Listens on `address`: "host:port", ":port" (all addresses, both families), "[::1]:port"; port 0 takes a free one.
 * `handle` gets the path without query ("/healthz"). DL_EINVAL: not an address; DL_ENET: cannot listen there, with
 * the reason. */
DL_MUST_CHECK enum dl_rc op_serve_new(struct op_loop *loop, const char *address,
                                      void (*handle)(void *context, const char *path, struct op_answer *answer),
                                      void *context, struct op_serve **out, struct dl_err *err);
void op_serve_free(struct op_serve *serve); /* NULL is fine. */
uint16_t op_serve_port(const struct op_serve *serve);

/* process_resident_memory_bytes, process_virtual_memory_bytes, process_cpu_seconds_total, process_open_fds,
 * process_max_fds, process_start_time_seconds. */
void op_process_metrics(struct dl_metrics *metrics);

#endif
