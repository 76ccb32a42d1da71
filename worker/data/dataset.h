/* wk_dataset: the data of a job. Its files are one stream of tokens; the stream's head is cut into training sequences,
 * its tail is held out for validation and never trained on.
 *
 * A sequence is sequence_length + 1 tokens: the inputs, and one more for the last target. Training sequences neither
 * overlap nor reach into the tail; they may span files.
 *
 * Read-only once open; any thread. Layer: worker/data. */
#ifndef WK_DATA_DATASET_H
#define WK_DATA_DATASET_H

#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"

/* Files up to this size are checked for tokens outside the vocabulary when they are opened; larger ones as they are
 * read. */
#define WK_DATASET_CHECK_BYTES_MAX (UINT64_C(256) << 20)

struct wk_dataset; /* Opaque. */

struct wk_dataset_view {
    uint32_t files;
    uint64_t tokens, training_tokens, validation_tokens;
    uint64_t training_sequences;
    uint32_t validation_sequences; /* At most the spec's; fewer when the tail does not hold so many. */
    uint32_t sequence_length;
    uint64_t unpacked_bytes; /* Held in memory, of compressed files. */
};

/* Opens all files. `unpacked_bytes_max`: for all compressed files together. Errors as wk_token_file_open's, and
 * DL_EINVAL when there are fewer tokens than one training and one validation sequence need, or one outside the
 * vocabulary. */
DL_MUST_CHECK enum dl_rc wk_dataset_open(const struct dl_data_spec *data, const struct dl_model_spec *model,
                                         uint64_t unpacked_bytes_max, struct wk_dataset **out, struct dl_err *err);
void wk_dataset_close(struct wk_dataset *dataset); /* NULL is fine. */

void wk_dataset_view(const struct wk_dataset *dataset, struct wk_dataset_view *view);

/* Training sequence `index` < training_sequences: `tokens` and `targets` get sequence_length numbers each; targets[i]
 * follows tokens[i]. DL_EINVAL: a token outside the vocabulary (file and offset are named). */
DL_MUST_CHECK enum dl_rc wk_dataset_training(const struct wk_dataset *dataset, uint64_t index, uint32_t *tokens,
                                             uint32_t *targets, struct dl_err *err);

/* As above, for validation sequence `index` < validation_sequences: evenly spaced over the tail, the same for everyone.
 */
DL_MUST_CHECK enum dl_rc wk_dataset_validation(const struct wk_dataset *dataset, uint32_t index, uint32_t *tokens,
                                               uint32_t *targets, struct dl_err *err);

/* Where they start, in tokens of the stream. */
uint64_t wk_dataset_training_start(const struct wk_dataset *dataset, uint64_t index);
uint64_t wk_dataset_validation_start(const struct wk_dataset *dataset, uint32_t index);

#endif
