/* sy_receive: turns the pieces in which a connection's bytes arrive into checked protocol messages.
 *
 * WebSocket messages come in pieces cut anywhere. Control messages are gathered in a buffer (whose size the header's
 * type caps before it is allocated), verified and decoded; a CHUNK's data goes to the place the sink names, where it can be
 * received without a copy, and is hashed piece by piece while it is in the cache. One WebSocket message must hold exactly one
 * protocol message.
 *
 * Pure but for malloc; owned by one thread. */
#ifndef SY_SERVER_RECEIVE_H
#define SY_SERVER_RECEIVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/content.h"
#include "common/err.h"
#include "common/wire.h"

/* Where messages go. A failure ends the connection; DL_EPROTO when it is the peer's fault. */
struct sy_receive_sink {
    void *context;
    /* Header and prefix of a CHUNK have come. `*into` gets the place for `bytes` data bytes, or NULL to drop them. */
    enum dl_rc (*chunk_begin)(void *context, uint64_t transfer, uint64_t offset, uint32_t bytes, uint8_t **into,
                              struct dl_err *err);
    /* All data are in place. `data` NULL: they were dropped. `intact`: the checksum matches (true for dropped ones). */
    enum dl_rc (*chunk_end)(void *context, uint64_t transfer, const uint8_t *data, uint32_t bytes, bool intact,
                            struct dl_err *err);
    /* A verified control message; `message` is valid for the call. */
    enum dl_rc (*control)(void *context, const struct dl_wire_message *message, struct dl_err *err);
    /* A header of this type has come, before anything is allocated for it: DL_OK to go on. */
    enum dl_rc (*admit)(void *context, enum dl_wire_type type, struct dl_err *err);
};

struct sy_receive {          /* Aligned: see dl_leaves. */
    struct dl_leaves leaves; /* Of the chunk under way. */
    uint8_t header[DL_WIRE_HEADER_BYTES];
    uint32_t header_have;
    struct dl_wire_header decoded;
    uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES];
    uint32_t prefix_have;
    uint32_t body_have; /* Bytes of control payload or chunk data so far. */
    bool chunk_begun;
    uint8_t *into;          /* Borrowed from the sink while a chunk is under way; NULL: drop. */
    uint8_t *payload;       /* Owned. */
    uint32_t payload_bytes; /* Allocated. */
};

void sy_receive_init(struct sy_receive *receive);
void sy_receive_release(struct sy_receive *receive);

/* Takes the next `size` bytes of a message; `last`: they end the WebSocket message. `scratch` is where control messages
 * are decoded to. DL_EPROTO and the text say what is wrong; after a failure the connection must be closed. */
DL_MUST_CHECK enum dl_rc sy_receive_feed(struct sy_receive *receive, const struct sy_receive_sink *sink,
                                         struct dl_wire_message *scratch, const uint8_t *bytes, size_t size, bool last,
                                         struct dl_err *err);

/* Data bytes of the chunk under way that are still to come, and may be received to `*at` (NULL: they are to be dropped)
 * rather than fed; 0: not in a chunk's data. sy_receive_placed: so many of them are there. */
size_t sy_receive_direct(const struct sy_receive *receive, uint8_t **at);
void sy_receive_placed(struct sy_receive *receive, size_t bytes);

/* The chunk under way goes nowhere any more: its buffer is about to be freed. */
void sy_receive_drop_chunk(struct sy_receive *receive);

#endif
