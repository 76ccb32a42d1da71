/* wk_store: the memory behind a link, and the arithmetic between the caller's tensors and fragments.
 *
 * Memory beside the caller's tensors: the base copy, one model in float32 until a fragment's first update, then in the codec
 * of updates, since it is the last one as it came; update slots, at most two encoded fragments each (usually one: the second
 * is taken only where a newer version comes while an older one waits for its boundary); push buffers, at most one encoded
 * model. Slots and push buffers are taken when first used, then kept.
 *
 * Thread rule: what a function touches is named by fragment and slot, and the link hands each of them to one thread at
 * a time; wk_store_slot and wk_store_push are the network thread's, everything else the trainer's. No locks here. */
#ifndef DL_WORKER_LINK_STORE_H
#define DL_WORKER_LINK_STORE_H

#include "common/content.h"
#include "common/layout.h"
#include "worker/link/link.h"
#include "worker/link/link_recover.h"

struct wk_store; /* Opaque. */

/* Released with free(); zeroed: none. */
struct wk_memory {
    uint8_t *bytes; /* Aligned to 64 bytes. */
    uint64_t size;
};
/* Memory of `bytes` at least, else NULL. What was in it stays only where it was enough. */
uint8_t *wk_memory_grow(struct wk_memory *memory, uint64_t bytes);

/* `tensors[i]` is the caller's array of tensor i; the table of pointers is copied. NULL: no memory. */
struct wk_store *wk_store_new(float *const *tensors, uint32_t tensor_count);
void wk_store_free(struct wk_store *store); /* NULL is fine. */

/* Makes the base copy from the tensors' contents. `layout` is borrowed for the store's life. */
DL_MUST_CHECK enum dl_rc wk_store_prepare(struct wk_store *store, const struct dl_layout *layout, struct dl_err *err);

/* `bytes` of memory for an update; NULL: no memory. Contents are kept while `bytes` does not change. */
uint8_t *wk_store_slot(struct wk_store *store, uint32_t fragment, uint32_t slot, uint64_t bytes);

/* Where the network thread keeps the hash of an update's content so far; there once wk_store_slot has given memory. */
struct dl_content *wk_store_content(struct wk_store *store, uint32_t fragment, uint32_t slot);

/* Bytes of a push being sent: the encoded snapshot, or for a seed the base copy's values (float32, little-endian). NULL: no
 * memory, which can be so only for the first bytes of a seed whose base copy came as an update. */
const uint8_t *wk_store_push(struct wk_store *store, uint32_t fragment, bool seed);

/* WK_STEP_APPLY: one pass over the update, writing tensors. Its slot and the base copy change places. */
void wk_store_apply(struct wk_store *store, const struct wk_step *step);
/* WK_STEP_SNAPSHOT: one pass over base copy and tensors. */
DL_MUST_CHECK enum dl_rc wk_store_snapshot(struct wk_store *store, const struct wk_step *step, struct dl_err *err);

/* A fragment's base values encoded as an UPDATE of it carries them. */
void wk_store_encode_base(const struct wk_store *store, uint32_t fragment, enum dl_codec codec, uint8_t *out);
/* As wk_store_apply without rebase or alpha, for an update in memory of the caller's, who gets the base copy's for it. */
void wk_store_adopt(struct wk_store *store, uint32_t fragment, enum dl_codec codec, struct wk_memory *update);

/* XOR over fragments of dl_hash64(base values, seed fragment index). */
uint64_t wk_store_hash(const struct wk_store *store);

#endif
