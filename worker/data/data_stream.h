/* wk_data_stream: the data of a job as one stream of positions, the same for all its learners.
 *
 * Each epoch has a random order of all training sequences, keyed by the job's seed: position g holds sequence g mod N of epoch
 * g / N, where N is how many training sequences there are. So a sequence is a function of (seed, N, g) alone; who trains on
 * which positions is decided elsewhere (the syncer leases them).
 *
 * Pure; one thread a stream. Layer: worker/data. */
#ifndef WK_DATA_DATA_STREAM_H
#define WK_DATA_DATA_STREAM_H

#include <stdint.h>

#include "common/err.h"
#include "worker/data/dataset.h"
#include "worker/data/permutation.h"

struct wk_data_stream {
    const struct wk_dataset *dataset; /* Borrowed. */
    uint64_t seed;
    uint64_t epoch; /* That `order` is of. */
    struct wk_permutation order;
};

void wk_data_stream_init(struct wk_data_stream *stream, const struct wk_dataset *dataset, uint64_t seed);

/* Index of the training sequence at a position. */
uint64_t wk_data_stream_at(struct wk_data_stream *stream, uint64_t position);

/* The sequences at positions first .. first + count - 1: `tokens` and `targets` are [count][sequence_length]. */
DL_MUST_CHECK enum dl_rc wk_data_stream_read(struct wk_data_stream *stream, uint64_t first, uint32_t count,
                                             uint32_t *tokens, uint32_t *targets, struct dl_err *err);

#endif
