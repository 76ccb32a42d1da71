/* wk_outbox: what a connection has yet to write: bytes of its own, and behind them the data of a chunk where it lies.
 *
 * A push's data is not copied on its way out, so it must not change before it is written. This is the one place that knows
 * where it lies: it is lent with wk_outbox_lend and given back when wk_outbox_sent says so, when what is left of it was
 * copied (wk_outbox_keep), or with wk_outbox_clear; nobody reads it afterwards. It is filled only when it is empty, with a
 * frame that is whole: so what is sent in between goes between frames.
 *
 * Pure; owned by one thread. */
#ifndef DL_WORKER_LINK_OUTBOX_H
#define DL_WORKER_LINK_OUTBOX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

struct wk_outbox {
    uint8_t *bytes; /* Owned. */
    size_t capacity, start, end;
    const uint8_t *data; /* Behind them; NULL: nothing. */
    size_t data_bytes;
    uint8_t *copy; /* Owned: what `data` lies in. NULL: it is someone else's. */
};

struct wk_outbox_parts { /* What to write: the second part behind the first. Valid until the next call. */
    const uint8_t *bytes[2];
    size_t sizes[2];
};

DL_MUST_CHECK enum dl_rc wk_outbox_init(struct wk_outbox *box, size_t capacity, struct dl_err *err);
void wk_outbox_release(struct wk_outbox *box); /* Zeroed or initialised. */

bool wk_outbox_is_empty(const struct wk_outbox *box);
/* `capacity` bytes to fill from the start; it must be empty. */
uint8_t *wk_outbox_space(struct wk_outbox *box);
/* So many of them are to be written, */
void wk_outbox_put(struct wk_outbox *box, size_t bytes);
/* and behind them these, which stay as they are until they are given back. */
void wk_outbox_lend(struct wk_outbox *box, const uint8_t *data, size_t bytes);

void wk_outbox_parts(const struct wk_outbox *box, struct wk_outbox_parts *parts);
/* So many bytes were written. True when that gives back what was lent. */
bool wk_outbox_sent(struct wk_outbox *box, size_t bytes);
/* Gives back what was lent: the frame goes on from a copy of the rest, at most one chunk's data. DL_ENOMEM: it is still lent. */
DL_MUST_CHECK enum dl_rc wk_outbox_keep(struct wk_outbox *box, struct dl_err *err);
/* Nothing is to be written any more. */
void wk_outbox_clear(struct wk_outbox *box);

#endif
