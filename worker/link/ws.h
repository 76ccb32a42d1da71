/* wk_ws: how a learner's connection becomes a WebSocket (RFC 6455, 4.1). Frames and masks are in common/ws.
 *
 * Pure; any thread; no allocation. */
#ifndef DL_WORKER_LINK_WS_H
#define DL_WORKER_LINK_WS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/wire.h"

#define WK_WS_KEY_BYTES 25       /* base64 of 16 bytes, with the terminating zero */
#define WK_WS_RESPONSE_MAX 16384 /* Header bytes of the server's answer. */
#define WK_WS_PATH "/v1/connect"
/* Largest message taken from a server: header and a full chunk. */
#define WK_WS_MESSAGE_MAX (DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES + DL_WIRE_CHUNK_DATA_MAX)

/* Sec-WebSocket-Key for 16 random bytes. */
void wk_ws_key(const uint8_t nonce[16], char key[WK_WS_KEY_BYTES]);

/* The upgrade request, zero-terminated; DL_EINVAL when it does not fit or a part would break it up. `token` may be
 * NULL. */
DL_MUST_CHECK enum dl_rc wk_ws_request(const char *host, const char *port, const char *token, const char *key,
                                       char *out, size_t out_bytes, struct dl_err *err);

/* What the server has answered so far, in `size` bytes; `closed`: no more will come. DL_OK: the connection is a
 * WebSocket now, and frames begin at `*used`. DL_AGAIN: more is needed. DL_EDENIED: 401 or 403. DL_ENET: any other
 * answer. Texts hold the status, what to do, and the first line of a body of text. DL_EPROTO: not a WebSocket answer to `key`. */
DL_MUST_CHECK enum dl_rc wk_ws_response(const char *bytes, size_t size, bool closed, const char *key, size_t *used,
                                        struct dl_err *err);

#endif
