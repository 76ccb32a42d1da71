/* wk_ws: the client's side of RFC 6455 over any byte stream: upgrade, frames, masks.
 *
 * Pure; any thread; no allocation. Only binary messages are taken, and none that is larger than the largest protocol
 * message. Payload is never buffered here: the parser hands out where it lies, and lets a caller receive the rest of a
 * frame straight to where it belongs. */
#ifndef DL_WORKER_LINK_WS_H
#define DL_WORKER_LINK_WS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/wire.h"

#define WK_WS_HEAD_MAX 14
#define WK_WS_CONTROL_MAX 125
#define WK_WS_KEY_BYTES 25       /* base64 of 16 bytes, with the terminating zero */
#define WK_WS_RESPONSE_MAX 16384 /* Header bytes of the server's answer. */
#define WK_WS_PATH "/v1/connect"
/* Largest message taken from a server: header and a full chunk. */
#define WK_WS_MESSAGE_MAX (DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES + DL_WIRE_CHUNK_DATA_MAX)

enum wk_ws_opcode { WK_WS_CONTINUATION = 0, WK_WS_BINARY = 2, WK_WS_CLOSE = 8, WK_WS_PING = 9, WK_WS_PONG = 10 };

/* --- upgrade ----------------------------------------------------------------------------------------------------- */

/* Sec-WebSocket-Key for 16 random bytes. */
void wk_ws_key(const uint8_t nonce[16], char key[WK_WS_KEY_BYTES]);

/* The upgrade request, zero-terminated; DL_EINVAL when it does not fit or a part would break it up. `token` may be
 * NULL. */
DL_MUST_CHECK enum dl_rc wk_ws_request(const char *host, const char *port, const char *token, const char *key,
                                       char *out, size_t out_bytes, struct dl_err *err);

/* What the server has answered so far, in `size` bytes; `closed`: no more will come. DL_OK: the connection is a
 * WebSocket now, and frames begin at `*used`. DL_AGAIN: more is needed. DL_EDENIED: 401 or 403. DL_ENET: any other
 * answer. Texts hold the status and the first line of the body. DL_EPROTO: not a WebSocket answer to `key`. */
DL_MUST_CHECK enum dl_rc wk_ws_response(const char *bytes, size_t size, bool closed, const char *key, size_t *used,
                                        struct dl_err *err);

/* --- sending ----------------------------------------------------------------------------------------------------- */

/* Head of a single-frame message, masked with `key`; returns its length. */
size_t wk_ws_head(enum wk_ws_opcode opcode, uint64_t payload_bytes, const uint8_t key[4], uint8_t out[WK_WS_HEAD_MAX]);
/* out[i] = in[i] ^ key[(phase + i) mod 4]. `out` may be `in`, and otherwise must not overlap it. */
void wk_ws_mask(uint8_t *out, const uint8_t *in, size_t bytes, const uint8_t key[4], size_t phase);

/* --- receiving --------------------------------------------------------------------------------------------------- */

struct wk_ws_parser { /* Zeroed: before the first frame. */
    uint8_t head[WK_WS_HEAD_MAX];
    uint32_t head_have;
    bool in_payload, in_message, fin, end_due;
    uint8_t opcode;
    uint64_t frame_left;    /* Payload bytes of the current frame that have yet to come. */
    uint64_t message_bytes; /* Payload of the current message so far, with the current frame's. */
    uint8_t control[WK_WS_CONTROL_MAX];
    uint32_t control_bytes;
};

enum wk_ws_event {
    WK_WS_EVENT_MORE,    /* All bytes are used; more are needed. */
    WK_WS_EVENT_DATA,    /* `*data`, `*data_bytes`: the next piece of the message. */
    WK_WS_EVENT_END,     /* The message is complete. */
    WK_WS_EVENT_CONTROL, /* A control frame: parser->opcode, control, control_bytes. */
    WK_WS_EVENT_BROKEN,  /* The server broke the protocol. */
};

/* Takes some of `bytes` and says what they were. Call it again with the rest until it says MORE. */
enum wk_ws_event wk_ws_parse(struct wk_ws_parser *parser, const uint8_t *bytes, size_t size, size_t *used,
                             const uint8_t **data, size_t *data_bytes, struct dl_err *err);

/* Bytes of message payload that come next for certain: they may be received elsewhere, and told by wk_ws_skip. */
uint64_t wk_ws_payload_next(const struct wk_ws_parser *parser);
void wk_ws_skip(struct wk_ws_parser *parser, uint64_t bytes);

#endif
