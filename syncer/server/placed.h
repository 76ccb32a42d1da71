/* sy_placed: the part of a connection's bytes whose place is known before they come, the data of chunks.
 *
 * They are received where they belong, a piece at a time, and unmasked and hashed there while they are in the caches. No lock; of
 * one thread at a time, whichever has the connection's receiving end. */
#ifndef SY_SERVER_PLACED_H
#define SY_SERVER_PLACED_H

#include <stddef.h>
#include <stdint.h>

#include "common/ws.h"
#include "syncer/server/receive.h"

#define SY_PIECE_BYTES (256u << 10) /* Received at once: it stays in the second-level cache until it is hashed. */
#define SY_BESIDE_BYTES 4096u       /* Received in the same call as the end of a chunk: the next one's heads. */

/* Data bytes that come next for certain, and go to `*at` (NULL: nowhere); 0: something else comes next. */
size_t sy_placed_next(const struct dl_ws_parser *parser, const struct sy_receive *receive, uint8_t **at);

/* `bytes` of them, at most as many as come next, have come to `at`. */
void sy_placed_take(struct dl_ws_parser *parser, struct sy_receive *receive, uint8_t *at, size_t bytes);

/* As much as there is: first `first_bytes` (which may be 0) to `first`, then the rest to `second`. DL_AGAIN: nothing is there;
 * DL_ENET: the peer has ended its side, or the connection is broken. */
DL_MUST_CHECK enum dl_rc sy_placed_read(int fd, uint8_t *first, size_t first_bytes, uint8_t *second,
                                        size_t second_bytes, size_t *got);

#endif
