/* op_auth: what a connection to the API server needs to be trusted and known: CA, client certificate, token.
 *
 * Files are read again when OP_AUTH_REREAD_MS have passed, and after op_auth_reject (a 401). A credential plugin
 * runs as a child process without holding up the loop, at most OP_AUTH_EXEC_MS, again when what it gave expires.
 * Values stay in memory only, and are wiped before it is given back. Loop's thread; layer operator/kube; used by
 * op_client. */
#ifndef OP_KUBE_AUTH_H
#define OP_KUBE_AUTH_H

#include <curl/curl.h>

#include "operator/kube/config.h"
#include "operator/kube/loop.h"

#define OP_AUTH_REREAD_MS 45000
#define OP_AUTH_EXEC_MS 30000

struct op_auth; /* Opaque. */

/* `config` is borrowed. Reads all files once. `ready` is called (from the loop) when a wait that op_auth_check
 * announced is over. */
DL_MUST_CHECK enum dl_rc op_auth_new(struct op_loop *loop, const struct op_config *config, void (*ready)(void *context),
                                     void *context, struct op_auth **out, struct dl_err *err);
void op_auth_free(struct op_auth *auth); /* Ends a plugin that runs. NULL is fine. */

/* Makes credentials fresh. DL_OK: use them. DL_AGAIN: a plugin runs, wait for `ready`. Else: there are none, with
 * the reason (tried again a moment later). */
DL_MUST_CHECK enum dl_rc op_auth_check(struct op_auth *auth, int64_t now_ns, struct dl_err *err);

/* The server refused what was sent: everything is read again at the next check. */
void op_auth_reject(struct op_auth *auth);

/* Sets TLS and proxy options, and the Authorization header in front of `*headers` (the caller's). Everything is copied. */
DL_MUST_CHECK enum dl_rc op_auth_apply(const struct op_auth *auth, CURL *easy, struct curl_slist **headers,
                                       struct dl_err *err);

#endif
