/* sy_server: one syncer shard as a process: WebSocket and HTTP shell around sy_core, merge thread, store.
 *
 * Network thread: libwebsockets, the core, all connections. Merge thread: new versions and their commits (jobs.h).
 * Nothing else touches parameters. One server a process: it installs signal handling (SIGPIPE is ignored; SIGTERM and
 * SIGINT end the process, not the job: rounds that can be merged are, commits under way are finished, then it leaves,
 * bounded by sync.finishSeconds; a second signal ends it at once).
 *
 * On its port: WebSocket at /v1/connect (subprotocol diloco.v1, bearer token), and HTTP: GET /healthz, /readyz,
 * /metrics, /status; POST with the token: /stop ends the job, /finish ends it as another shard's success asks for,
 * /drain saves and leaves like SIGTERM. With TLS the same HTTP answers plainly on `health_listen`. */
#ifndef SY_SERVER_SERVER_H
#define SY_SERVER_SERVER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"
#include "common/wire.h"

struct sy_server_options {
    const struct dl_spec *spec; /* Borrowed for the run, as are all texts. */
    uint32_t shard;
    const char *listen;        /* HOST:PORT; HOST `*` is all interfaces, [v6]:PORT for IPv6; PORT 0 any free one. */
    const char *health_listen; /* The same for plain HTTP; NULL: none. */
    const char *token;
    const char *state_dir;          /* NULL or "": versions are kept in memory only. */
    const char *port_file;          /* Gets "HOST:PORT\n" once listening; NULL: none. */
    const char *tls_cert, *tls_key; /* PEM files; NULL: no TLS. */
    const char *tls_ca;             /* Clients must show a certificate of this authority; NULL: they need none. */
    uint32_t threads;               /* Of a merge, and of receiving; 0: as many as there are processors. */
    uint64_t push_bytes_max; /* Bound of all pushes held at once; 0: learners.max times the shard's encoded size. */
};

struct sy_server_end {
    bool is_saved;              /* Asked to leave: the job is not over. */
    enum dl_stop_result result; /* Else how the job ended. */
};

/* Runs until the job ends, or the process is asked to leave. DL_EINVAL: the arguments, the address (in use, not ours) or
 * the state folder cannot work. Others: see text. */
DL_MUST_CHECK enum dl_rc sy_server_run(const struct sy_server_options *options, struct sy_server_end *end,
                                       struct dl_err *err);

/* "succeeded", "requested", "timeout", "failed". */
const char *sy_stop_result_name(enum dl_stop_result result);

#endif
