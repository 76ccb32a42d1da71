/* The inside of wk_channel, shared by channel.c (messages in and out) and channel_connect.c (up to the upgrade); for them alone. */
#ifndef DL_WORKER_LINK_CHANNEL_INTERNAL_H
#define DL_WORKER_LINK_CHANNEL_INTERNAL_H

#include "worker/link/channel.h"

/* channel.c */
/* Closes the connection and tells the link why. */
void wk_channel_fail(struct wk_channel *channel, const struct dl_err *err);
/* Four bytes that nobody can foresee. */
void wk_channel_mask_key(struct wk_channel *channel, uint8_t key[4]);
/* Writes what is to be written; true when all is. */
bool wk_channel_flush(struct wk_channel *channel);
/* The connection is open; `size` bytes of frames came with the answer to the upgrade. */
void wk_channel_upgraded(struct wk_channel *channel, uint8_t *bytes, size_t size);

/* channel_connect.c: one step each, which goes on to the next or fails. */
void wk_channel_begin_connect(struct wk_channel *channel);
void wk_channel_resolved(struct wk_channel *channel);
/* Goes on with the next address of the name, if there is one; `last`: why the one before did not work. */
void wk_channel_try_next_address(struct wk_channel *channel, const struct dl_err *last);
void wk_channel_connected(struct wk_channel *channel);
void wk_channel_secure(struct wk_channel *channel);
void wk_channel_read_upgrade(struct wk_channel *channel);

#endif
