/* dl_ws: frames and masks of RFC 6455, for both ends of a connection, over any byte stream.
 *
 * Pure; any thread; no allocation. Only binary messages are taken. Payload is never buffered here: the parser hands out where
 * it lies, and lets a caller receive the rest of a frame straight to where it belongs. */
#ifndef DL_COMMON_WS_H
#define DL_COMMON_WS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define DL_WS_HEAD_MAX 14
#define DL_WS_CONTROL_MAX 125 /* Payload of a ping, pong or close. */

enum dl_ws_opcode { DL_WS_CONTINUATION = 0, DL_WS_BINARY = 2, DL_WS_CLOSE = 8, DL_WS_PING = 9, DL_WS_PONG = 10 };

enum dl_ws_code {                      /* Why a connection is closed (RFC 6455, 7.4.1). */
                  DL_WS_CODE_FINE = 0, /* No reason to. */
                  DL_WS_CODE_NORMAL = 1000,
                  DL_WS_CODE_PROTOCOL = 1002,
                  DL_WS_CODE_UNSUPPORTED = 1003, /* Text. */
                  DL_WS_CODE_NONE = 1005,        /* Stands for a close frame without a code; never sent. */
                  DL_WS_CODE_NOT_TEXT = 1007,    /* A reason that is not UTF-8. */
                  DL_WS_CODE_TOO_LARGE = 1009,
};

/* --- sending ----------------------------------------------------------------------------------------------------- */

/* Head of a frame that is a message; returns its length. `key` is the mask of a client's frame, NULL for a server's. */
size_t dl_ws_head(enum dl_ws_opcode opcode, uint64_t payload_bytes, const uint8_t *key, uint8_t out[DL_WS_HEAD_MAX]);
/* out[i] = in[i] ^ key[(phase + i) mod 4]. `out` may be `in`, and otherwise must not overlap it. */
void dl_ws_mask(uint8_t *out, const uint8_t *in, size_t bytes, const uint8_t key[4], size_t phase);

/* --- receiving --------------------------------------------------------------------------------------------------- */

struct dl_ws_parser {     /* Zeroed but for the first two: before the first frame. */
    uint32_t message_max; /* Largest payload of a message that is taken; with all of its frames. */
    bool from_client;     /* Frames come from a client, and must be masked; a server's must not be. */
    uint8_t head[DL_WS_HEAD_MAX];
    uint32_t head_have;
    bool in_payload, in_message, fin, end_due;
    uint8_t opcode;
    uint8_t key[4];         /* Of the current frame, turned to the next byte of its payload. */
    uint64_t frame_left;    /* Payload bytes of the current frame that have yet to come. */
    uint64_t message_bytes; /* Payload of the current message so far, with the current frame's. */
    uint8_t control[DL_WS_CONTROL_MAX];
    uint32_t control_bytes;
    enum dl_ws_code fault; /* After DL_WS_EVENT_BROKEN. */
};

enum dl_ws_event {
    DL_WS_EVENT_MORE,    /* All bytes are used; more are needed. */
    DL_WS_EVENT_DATA,    /* `*data`, `*data_bytes`: the next piece of the message, unmasked where it lies. */
    DL_WS_EVENT_END,     /* The message is complete. */
    DL_WS_EVENT_CONTROL, /* A control frame: parser->opcode, control, control_bytes. */
    DL_WS_EVENT_BROKEN,  /* The peer broke the protocol: nothing more can be taken; parser->fault says how to close. */
};

/* Takes some of `bytes` and says what they were. Call it again with the rest until it says MORE. */
enum dl_ws_event dl_ws_parse(struct dl_ws_parser *parser, uint8_t *bytes, size_t size, size_t *used, uint8_t **data,
                             size_t *data_bytes, struct dl_err *err);

/* Bytes of message payload that come next for certain: they may be received elsewhere, and told by dl_ws_placed, which
 * unmasks them there, or dl_ws_skip, which does not look at them. */
uint64_t dl_ws_payload_next(const struct dl_ws_parser *parser);
void dl_ws_placed(struct dl_ws_parser *parser, uint8_t *at, size_t bytes);
void dl_ws_skip(struct dl_ws_parser *parser, uint64_t bytes);

/* The code in the close frame that was parsed last; DL_WS_CODE_NONE: it had none. */
unsigned dl_ws_close_code(const struct dl_ws_parser *parser);

#endif
