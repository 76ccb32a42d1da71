/* sy_blob: one version of a fragment, encoded once and cut into ready-made CHUNK frames that all connections share.
 *
 * Of a version that is not durable yet (`is_held`) all but the last chunk may be sent: then nobody can use it, or know all of
 * it, before it can no longer be lost.
 *
 * The frame of a chunk (header, prefix, data, checksum) is the same for every receiver, since a transfer's number is
 * made of fragment and version. Each frame has LWS_PRE bytes of room before it, in which libwebsockets writes the
 * WebSocket header, so that it is sent from where it lies.
 *
 * Made on the merge thread; afterwards owned by the network thread, which alone counts references and writes that room.
 */
#ifndef SY_SERVER_BLOB_H
#define SY_SERVER_BLOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"
#include "syncer/merge/pool.h"
#include "syncer/server/buffers.h"

struct sy_blob {
    uint32_t references;
    uint32_t fragment;
    uint64_t version, round;
    uint32_t participants;
    enum dl_codec codec;
    uint64_t transfer;
    uint64_t bytes;        /* Encoded. */
    uint64_t content_hash; /* dl_hash64 of the encoded bytes. */
    uint32_t chunk_bytes;  /* Data bytes of every chunk but the last. */
    uint32_t chunk_count;
    bool is_held;  /* Not durable yet: its last chunk stays here. */
    size_t stride; /* From one frame's room to the next one's. */
    uint8_t *frames;
    struct sy_buffers *buffers; /* Where the frames' memory came from. */
};

struct sy_blob_options {
    uint32_t fragment;
    uint64_t version, round;
    uint32_t participants;
    enum dl_codec codec;
};

/* Encodes `padded_elements` values on the threads of `pool`; the memory comes from `buffers`. One reference. */
DL_MUST_CHECK enum dl_rc sy_blob_new(const struct sy_blob_options *options, const float *values,
                                     uint64_t padded_elements, struct sy_pool *pool, struct sy_buffers *buffers,
                                     struct sy_blob **out, struct dl_err *err);
struct sy_blob *sy_blob_hold(struct sy_blob *blob);
void sy_blob_drop(struct sy_blob *blob); /* NULL is fine. */

/* The frame of chunk `index`: `*size` bytes at the returned place, LWS_PRE bytes of room before. */
uint8_t *sy_blob_frame(const struct sy_blob *blob, uint32_t index, size_t *size);

#endif
