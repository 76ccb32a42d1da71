/* wk_snapshot: a learner's state as of one boundary, for others to fetch: base copies of the fragments, registered optimiser
 * state, the learner's own trace entries that the syncer may not have yet.
 *
 * Memory: one encoded model and the registered state, taken and touched (so that the trainer's copy meets no page fault)
 * by the thread that serves; released when nobody fetches any more. Both in slices, since each holds up whoever maps memory.
 * Thread rule: made and sealed by the serving thread; filled by the trainer's, to which it is lent meanwhile. */
#ifndef DL_WORKER_LINK_SNAPSHOT_H
#define DL_WORKER_LINK_SNAPSHOT_H

#include "worker/link/manifest.h"
#include "worker/link/store.h"

/* Bytes a second at which a snapshot is made where no core is idle: who waits for one waits that much longer. */
#define WK_PREPARE_RATE (64u << 20)

struct wk_state { /* What diloco_register_state declared. */
    char name[WK_STATE_NAME_MAX];
    void *data; /* The caller's. */
    uint64_t bytes;
};

struct wk_snapshot {
    struct wk_manifest manifest;
    uint8_t *data; /* All but the trace. */
    uint64_t data_bytes;
    uint8_t *trace; /* manifest.trace_bytes; NULL: none. */
    uint8_t *head;  /* The encoded manifest. */
    size_t head_bytes;
};

/* Whose state it is, and how it is laid out; borrowed for as long as snapshots are made. */
struct wk_snapshot_source {
    const struct dl_layout *layout;
    const struct wk_store *store;
    enum dl_codec codec;
    const struct wk_state *states;
    uint32_t state_count;
    uint32_t learner;
    uint64_t nonce;
    const char *uid;
};

DL_MUST_CHECK enum dl_rc wk_snapshot_new(const struct wk_snapshot_source *source, uint64_t id, struct wk_snapshot **out,
                                         struct dl_err *err);
void wk_snapshot_free(struct wk_snapshot *snapshot); /* NULL is fine. */
/* How much longer than usual it may take to make one of so many bytes. */
int64_t wk_snapshot_allowance_ns(uint64_t bytes);

/* Trainer's thread, at a boundary after step `step`: one pass over base copies and state. `offers`: one a fragment. `trace`:
 * `trace_bytes` bytes, taken over (NULL: none). */
void wk_snapshot_fill(struct wk_snapshot *snapshot, const struct wk_snapshot_source *source,
                      const struct wk_offer *offers, uint64_t step, uint8_t *trace, uint64_t trace_bytes);
/* Hashes everything and encodes the manifest. */
DL_MUST_CHECK enum dl_rc wk_snapshot_seal(struct wk_snapshot *snapshot, struct dl_err *err);

#endif
