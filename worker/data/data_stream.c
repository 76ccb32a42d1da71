#include "worker/data/data_stream.h"

#include <inttypes.h>

enum dl_rc wk_data_stream_init(struct wk_data_stream *stream, const struct wk_dataset *dataset, uint64_t seed,
                               uint32_t learner, uint32_t learners_max, struct dl_err *err)
{
    struct wk_dataset_view view;
    wk_dataset_view(dataset, &view);
    if (learner >= learners_max) {
        return dl_err_set(err, DL_EINVAL, "learner %u: ids are below spec.learners.max %u", learner, learners_max);
    }
    if (view.training_sequences < learners_max) {
        return dl_err_set(err, DL_EINVAL,
                          "the data holds %" PRIu64
                          " training sequences, fewer than spec.learners.max %u; use more data, shorter "
                          "sequences or a lower maximum",
                          view.training_sequences, learners_max);
    }
    *stream = (struct wk_data_stream){
        .dataset = dataset,
        .seed = seed,
        .learner = learner,
        .learners_max = learners_max,
        .epoch_sequences = view.training_sequences / learners_max,
    };
    wk_permutation_init(&stream->order, seed, 0, view.training_sequences);
    return DL_OK;
}

void wk_data_stream_seek(struct wk_data_stream *stream, uint64_t cursor)
{
    stream->cursor = cursor;
}

uint64_t wk_data_stream_next(struct wk_data_stream *stream)
{
    uint64_t epoch = stream->cursor / stream->epoch_sequences, place = stream->cursor % stream->epoch_sequences;
    if (epoch != stream->epoch) {
        wk_permutation_init(&stream->order, stream->seed, epoch, stream->order.size);
        stream->epoch = epoch;
    }
    stream->cursor++;
    return wk_permutation_at(&stream->order, place * stream->learners_max + stream->learner);
}

enum dl_rc wk_data_stream_batch(struct wk_data_stream *stream, uint32_t sequences, uint32_t *tokens, uint32_t *targets,
                                struct dl_err *err)
{
    struct wk_dataset_view view;
    wk_dataset_view(stream->dataset, &view);
    for (uint32_t i = 0; i < sequences; i++) {
        uint64_t at = (uint64_t)i * view.sequence_length;
        enum dl_rc rc =
            wk_dataset_training(stream->dataset, wk_data_stream_next(stream), tokens + at, targets + at, err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    return DL_OK;
}
