/* op_poller: reads /status of every syncer shard a few times a second, sends it commands, and is where the supervisor
 * waits.
 *
 * One libcurl multi handle; connections are kept. Every request has a bound, an answer a largest size. Owned by one
 * thread. Layer operator/local. */
#ifndef OP_LOCAL_POLLER_H
#define OP_LOCAL_POLLER_H

#include <curl/curl.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "operator/reconcile/status.h"

#define OP_POLLER_FRESH_NS INT64_C(2000000000) /* An answer older than this counts as none. */
#define OP_POLLER_TIMEOUT_MS 2000

struct op_poller; /* Opaque. */

DL_MUST_CHECK enum dl_rc op_poller_new(uint32_t shards, struct op_poller **out, struct dl_err *err);
void op_poller_free(struct op_poller *poller); /* NULL is fine. */

/* Addresses are https from now on, and certificates are checked against the authorities in file `ca` (absolute). */
DL_MUST_CHECK enum dl_rc op_poller_set_ca(struct op_poller *poller, const char *ca, struct dl_err *err);

/* Where shard `shard` answers ("127.0.0.1:4711", or a whole URL up to the host); NULL or "": not known, do not ask. */
DL_MUST_CHECK enum dl_rc op_poller_set_address(struct op_poller *poller, uint32_t shard, const char *address,
                                               struct dl_err *err);

/* Takes `text` for the shard's newest answer: what a syncer left behind as its last word. */
DL_MUST_CHECK enum dl_rc op_poller_put(struct op_poller *poller, uint32_t shard, const char *text, size_t size,
                                       int64_t now_ns, struct dl_err *err);

/* Time between the end of a request and the next one. */
void op_poller_set_interval(struct op_poller *poller, int64_t interval_ns);

/* What is shown with commands. Once, before the first of them. */
DL_MUST_CHECK enum dl_rc op_poller_set_token(struct op_poller *poller, const char *token, struct dl_err *err);

/* Sends `command` ("stop": POST /stop) to a shard until it is accepted; call it as often as the wish stands. A new address
 * (another process) is told again, another command replaces the first. True once accepted. */
bool op_poller_command(struct op_poller *poller, uint32_t shard, const char *command, int64_t now_ns);

/* Takes in what has arrived, asks where it is due. True when a shard's view has changed. */
bool op_poller_turn(struct op_poller *poller, int64_t now_ns);
int64_t
op_poller_next_ns(const struct op_poller *poller); /* When a request is due; INT64_MAX: one is under way or none. */

/* Waits until something is to be read (for the poller or on `fds`), at most `timeout_ms`. `fds[i].revents` is filled.
 */
void op_poller_wait(struct op_poller *poller, struct curl_waitfd *fds, unsigned int count, int timeout_ms);

/* A shard's view when it is fresh, or its last one when `even_old`; NULL when there is none. Borrowed until the next
 * turn. */
const struct op_job_status *op_poller_view(const struct op_poller *poller, uint32_t shard, int64_t now_ns,
                                           bool even_old);

/* Why the last request to a shard failed; "" when it did not. */
const char *op_poller_error(const struct op_poller *poller, uint32_t shard);

#endif
