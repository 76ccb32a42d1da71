/* wk_rx: puts protocol messages together from the payload of WebSocket messages, which comes in pieces of any size.
 *
 * A control message is gathered in a buffer of its own; the data of a CHUNK goes to the place that the owner names as
 * soon as the chunk's head is there, and can be received to it without a copy. It is hashed as it comes, while it is in the
 * cache, and the owner gets its leaves, of which the hash of the whole follows. Nothing is handed over before its checksum is
 * found right. No I/O; owned by the network thread. */
#ifndef DL_WORKER_LINK_RECEIVE_H
#define DL_WORKER_LINK_RECEIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/content.h"
#include "common/err.h"
#include "common/wire.h"

struct wk_rx_owner { /* Any failure returned ends the connection. */
    void *context;
    /* A decoded control message, valid during the call. */
    enum dl_rc (*message)(void *context, const struct dl_wire_message *message, struct dl_err *err);
    /* Where the next chunk's data goes; `*data` NULL: nowhere, it is skipped. */
    enum dl_rc (*place)(void *context, uint64_t transfer, uint64_t offset, uint32_t bytes, uint8_t **data,
                        struct dl_err *err);
    /* The chunk placed last is there, and these are its leaves; `intact`: its checksum is right. */
    enum dl_rc (*chunk)(void *context, struct dl_leaves *leaves, bool intact, struct dl_err *err);
};

struct wk_rx {
    struct wk_rx_owner owner;
    uint8_t header_bytes[DL_WIRE_HEADER_BYTES];
    uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES];
    struct dl_wire_header header;
    uint32_t have;           /* Bytes of the message so far. */
    uint8_t *data;           /* Of the current chunk; NULL: skipped. */
    struct dl_leaves leaves; /* Of its data so far. */
    struct dl_wire_message *message;
    uint8_t control[DL_WIRE_CONTROL_PAYLOAD_MAX];
};

/* `message` is where control messages are decoded to; the caller's, as is the rest. */
void wk_rx_init(struct wk_rx *rx, const struct wk_rx_owner *owner, struct dl_wire_message *message);
void wk_rx_reset(struct wk_rx *rx); /* A new connection. */

/* The next piece of the current message. */
DL_MUST_CHECK enum dl_rc wk_rx_bytes(struct wk_rx *rx, const uint8_t *bytes, size_t size, struct dl_err *err);
/* The message is complete. */
DL_MUST_CHECK enum dl_rc wk_rx_end(struct wk_rx *rx, struct dl_err *err);

/* Where the next bytes of the message may be received directly, and how many at most; 0: use wk_rx_bytes. */
size_t wk_rx_direct(const struct wk_rx *rx, uint8_t **at);
void wk_rx_advance(struct wk_rx *rx, size_t bytes);

#endif
