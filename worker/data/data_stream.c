#include "worker/data/data_stream.h"

void wk_data_stream_init(struct wk_data_stream *stream, const struct wk_dataset *dataset, uint64_t seed)
{
    struct wk_dataset_view view;
    wk_dataset_view(dataset, &view);
    *stream = (struct wk_data_stream){.dataset = dataset, .seed = seed};
    wk_permutation_init(&stream->order, seed, 0, view.training_sequences);
}

uint64_t wk_data_stream_at(struct wk_data_stream *stream, uint64_t position)
{
    uint64_t epoch = position / stream->order.size;
    if (epoch != stream->epoch) {
        wk_permutation_init(&stream->order, stream->seed, epoch, stream->order.size);
        stream->epoch = epoch;
    }
    return wk_permutation_at(&stream->order, position % stream->order.size);
}

enum dl_rc wk_data_stream_read(struct wk_data_stream *stream, uint64_t first, uint32_t count, uint32_t *tokens,
                               uint32_t *targets, struct dl_err *err)
{
    struct wk_dataset_view view;
    wk_dataset_view(stream->dataset, &view);
    for (uint32_t i = 0; i < count; i++) {
        uint64_t at = (uint64_t)i * view.sequence_length;
        enum dl_rc rc =
            wk_dataset_training(stream->dataset, wk_data_stream_at(stream, first + i), tokens + at, targets + at, err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    return DL_OK;
}
