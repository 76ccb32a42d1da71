/* wk_data_stream: the training sequences of one learner, in its order.
 *
 * Each epoch has a random order of all training sequences, keyed by the job's seed. Learner m of M takes places m, m +
 * M,
 * ... of it, so that no two learners see the same sequence in one epoch. M is learners.max, not how many there are now:
 * learners may come and go. (What does not divide by M is left out, other sequences every epoch.) So a sequence is a
 * function of (seed, m, M, cursor) alone, and any cursor can be sought.
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
    uint32_t learner, learners_max;
    uint64_t epoch_sequences; /* This learner's, in one epoch. */
    uint64_t cursor;          /* Sequences taken so far, over all epochs. */
    uint64_t epoch;           /* That `order` is of. */
    struct wk_permutation order;
};

/* DL_EINVAL: `learner` is not below `learners_max`, or there are fewer training sequences than learners. */
DL_MUST_CHECK enum dl_rc wk_data_stream_init(struct wk_data_stream *stream, const struct wk_dataset *dataset,
                                             uint64_t seed, uint32_t learner, uint32_t learners_max,
                                             struct dl_err *err);

void wk_data_stream_seek(struct wk_data_stream *stream, uint64_t cursor);

/* Index of the training sequence at the cursor; moves on by one. */
uint64_t wk_data_stream_next(struct wk_data_stream *stream);

/* The next `sequences` sequences: `tokens` and `targets` are [sequences][sequence_length]. */
DL_MUST_CHECK enum dl_rc wk_data_stream_batch(struct wk_data_stream *stream, uint32_t sequences, uint32_t *tokens,
                                              uint32_t *targets, struct dl_err *err);

#endif
