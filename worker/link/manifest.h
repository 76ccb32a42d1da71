/* wk_manifest: what a learner that serves its state says about a snapshot of it, before anyone fetches its bytes.
 *
 * The data is one array of bytes: the fragments in their order, each as its UPDATE would carry it; then the registered
 * optimiser state in its order of registration; then trace entries of the serving learner. On the wire, little-endian:
 *
 *     0 magic "DLS1"   4 version u8   5 zero u8[3]   8 payload bytes u32   12 zero u32   16 checksum u64   24 payload
 *
 * checksum: XXH3-64 of the payload, seeded with the hash of the first 16 bytes. Payload: id u64, learner u32, nonce u64,
 * step u64, layout hash u64, codec u8, uid; count u32 and fragments (version, round, bytes, hash: u64 each); count u32
 * and states (name; bytes u64, hash u64); trace bytes u64, trace hash u64. Texts: length u16, bytes. Hashes are
 * dl_content_hash.
 *
 * Pure. Everything that is decoded is bounded, and checked against itself, before memory is taken for it. */
#ifndef DL_WORKER_LINK_MANIFEST_H
#define DL_WORKER_LINK_MANIFEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/wire.h"
#include "worker/link/trace_pack.h"

#define WK_MANIFEST_HEADER_BYTES 24
#define WK_MANIFEST_BYTES_MAX (8u << 20)
#define WK_STATE_NAME_MAX 160 /* Bytes with the terminating zero. */
#define WK_STATES_MAX (2 * DL_TENSORS_MAX + 64)

struct wk_manifest_fragment {
    uint64_t version, round; /* Version 0: not offered, though its bytes are there. */
    uint64_t bytes, hash;
};

struct wk_manifest_state {
    char name[WK_STATE_NAME_MAX];
    uint64_t bytes, hash;
};

struct wk_manifest {
    uint64_t id; /* Of the snapshot: names its data. */
    uint32_t learner;
    uint64_t nonce;
    uint64_t step; /* t_m of the boundary. */
    uint64_t layout_hash;
    enum dl_codec codec;
    char uid[DL_WIRE_UID_MAX];
    uint32_t fragment_count;
    struct wk_manifest_fragment *fragments; /* Owned, as states are. */
    uint32_t state_count;
    struct wk_manifest_state *states;
    uint64_t trace_bytes, trace_hash;
};

void wk_manifest_release(struct wk_manifest *manifest);

/* `*out`: `*size` bytes, the caller's. DL_ENOMEM. */
DL_MUST_CHECK enum dl_rc wk_manifest_encode(const struct wk_manifest *manifest, uint8_t **out, size_t *size,
                                            struct dl_err *err);
/* DL_EPROTO, DL_ECORRUPT (checksum), DL_ENOMEM. */
DL_MUST_CHECK enum dl_rc wk_manifest_decode(const uint8_t *bytes, size_t size, struct wk_manifest *out,
                                            struct dl_err *err);

/* Where a part of the data begins. */
uint64_t wk_manifest_fragment_offset(const struct wk_manifest *manifest, uint32_t fragment);
uint64_t wk_manifest_states_offset(const struct wk_manifest *manifest);
uint64_t wk_manifest_total(const struct wk_manifest *manifest);

#endif
