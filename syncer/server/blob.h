/* sy_blob: one version of a fragment, encoded once and cut into ready-made CHUNK frames that all connections share.
 *
 * Of a version that is not durable yet (`is_held`) all but the last chunk may be sent: then nobody can use it, or know all of
 * it, before it can no longer be lost.
 *
 * The frame of a chunk (header, prefix, data, checksum) is the same for every receiver, since a transfer's number is
 * made of fragment and version. Each frame has LWS_PRE bytes of room before it, for the
 * WebSocket header, so that it is sent from where it lies.
 *
 * Of float32 broadcasts the chunks' data are the parameters themselves: a version is merged into its frames and lives there
 * as long as anybody needs it, the merge or a connection; nothing is encoded or copied. The data then lie in pieces of
 * `piece_elements`, `gap_elements` apart (room and header of the next frame, a page in all, so that a disk takes the data
 * as they are). Other codecs' frames are encoded by sy_blob_put.
 *
 * It is filled by the merge thread and its pool, and sealed in order (sy_blob_seal): headers and content hash. Afterwards
 * its frames are only read, but for that room, which the network thread writes. References are counted from any thread. */
#ifndef SY_SERVER_BLOB_H
#define SY_SERVER_BLOB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/content.h"
#include "common/err.h"
#include "common/spec.h"
#include "syncer/merge/pool.h"
#include "syncer/server/buffers.h"

struct sy_blob {
    struct dl_content content; /* While it is being sealed. */
    atomic_uint references;
    uint32_t fragment;
    uint64_t version, round;
    uint32_t participants;
    enum dl_codec codec;
    uint64_t transfer;
    uint64_t padded_elements;
    uint64_t bytes;          /* Encoded. */
    uint64_t content_hash;   /* dl_content_hash of the encoded bytes; of a sealed one. */
    uint32_t chunk_bytes;    /* Data bytes of every chunk but the last. */
    uint64_t chunk_elements; /* Values in them. */
    uint32_t chunk_count, sealed_count;
    bool is_held;  /* Not durable yet: its last chunk stays here. */
    size_t lead;   /* Bytes before a chunk's data that are the frame's: room, header, prefix. */
    size_t stride; /* From one chunk's data to the next one's. */
    uint8_t *data; /* The first chunk's. */
    void *memory;
    struct sy_buffers *buffers; /* Where the memory came from. */
};

struct sy_blob_options {
    uint32_t fragment;
    uint64_t version, round;
    uint32_t participants;
    enum dl_codec codec;
};

/* Room for `padded_elements` values, out of `buffers`; nothing is in it. One reference. */
DL_MUST_CHECK enum dl_rc sy_blob_new(const struct sy_blob_options *options, uint64_t padded_elements,
                                     struct sy_buffers *buffers, struct sy_blob **out, struct dl_err *err);

/* Of float32 frames: the parameters, and how they lie (0 and 0: in one piece). NULL with other codecs. */
float *sy_blob_values(const struct sy_blob *blob);
uint64_t sy_blob_piece_elements(const struct sy_blob *blob);
uint64_t sy_blob_gap_elements(const struct sy_blob *blob);

/* Encodes `blocks` blocks of values from element `offset` on. Threads may put different blocks at the same time. */
void sy_blob_put(struct sy_blob *blob, uint64_t offset, const float *values, size_t blocks);

/* The first `elements` values are in their frames: writes the headers of the chunks that are complete and takes the
 * content hash, which is final with the last of them. One call at a time, `elements` growing. */
void sy_blob_seal(struct sy_blob *blob, uint64_t elements);

/* Puts and seals all values, which lie in pieces as a float32 version's do, or in one (`piece_elements` 0), on the threads
 * of `pool`. */
void sy_blob_fill(struct sy_blob *blob, const float *values, uint64_t piece_elements, uint64_t gap_elements,
                  struct sy_pool *pool);

struct sy_blob *sy_blob_hold(struct sy_blob *blob);
void sy_blob_drop(struct sy_blob *blob); /* NULL is fine. */

/* The frame of chunk `index`: `*size` bytes at the returned place, LWS_PRE bytes of room before. */
uint8_t *sy_blob_frame(const struct sy_blob *blob, uint32_t index, size_t *size);

#endif
