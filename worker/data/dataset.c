#include "worker/data/dataset.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "worker/data/token_file.h"

struct wk_dataset {
    uint32_t files, vocab_size;
    struct wk_token_file file[DL_SPEC_PATHS_MAX];
    uint64_t starts[DL_SPEC_PATHS_MAX + 1]; /* First token of each file in the stream; the last: all tokens. */
    struct wk_dataset_view view;
};

static enum dl_rc open_files(struct wk_dataset *dataset, const struct dl_data_spec *data, uint64_t unpacked_bytes_max,
                             struct dl_err *err)
{
    for (uint32_t i = 0; i < data->path_count; i++) {
        struct wk_token_file *file = &dataset->file[i];
        enum dl_rc rc = wk_token_file_open(data->paths[i], data->format,
                                           unpacked_bytes_max - dataset->view.unpacked_bytes, file, err);
        if (rc != DL_OK) {
            return rc;
        }
        dataset->files++;
        dataset->starts[i + 1] = dataset->starts[i] + file->tokens;
        dataset->view.unpacked_bytes += file->is_unpacked ? file->size : 0;
        if (file->size <= WK_DATASET_CHECK_BYTES_MAX) {
            rc = wk_token_file_check(file, dataset->vocab_size, err);
            if (rc != DL_OK) {
                return rc;
            }
        }
    }
    return DL_OK;
}

static enum dl_rc split(struct wk_dataset *dataset, const struct dl_data_spec *data, struct dl_err *err)
{
    struct wk_dataset_view *view = &dataset->view;
    uint64_t sequence = (uint64_t)view->sequence_length + 1;
    view->files = dataset->files;
    view->tokens = dataset->starts[dataset->files];
    if (view->tokens < 2 * sequence) {
        return dl_err_set(err, DL_EINVAL,
                          "the data (%u file%s, the first is %s) holds %" PRIu64
                          " tokens, but one training and one validation "
                          "sequence of sequenceLength %u need %" PRIu64 "; use more data or a shorter sequence",
                          view->files, view->files == 1 ? "" : "s", dataset->file[0].path, view->tokens,
                          view->sequence_length, 2 * sequence);
    }
    uint64_t held_out = (uint64_t)((double)view->tokens * data->validation_fraction);
    held_out = DL_MIN(DL_MAX(held_out, sequence), view->tokens - sequence);
    view->validation_tokens = held_out;
    view->training_tokens = view->tokens - held_out;
    view->training_sequences = view->training_tokens / sequence;
    view->validation_sequences = (uint32_t)DL_MIN(held_out / sequence, (uint64_t)data->validation_sequences);
    return DL_OK;
}

enum dl_rc wk_dataset_open(const struct dl_data_spec *data, const struct dl_model_spec *model,
                           uint64_t unpacked_bytes_max, struct wk_dataset **out, struct dl_err *err)
{
    if (data->path_count == 0) {
        return dl_err_set(err, DL_EINVAL, "spec.training.data.paths is empty; name at least one file");
    }
    struct wk_dataset *dataset = calloc(1, sizeof *dataset);
    if (dataset == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the data's table of files");
    }
    dataset->vocab_size = model->vocab_size;
    dataset->view.sequence_length = model->sequence_length;
    enum dl_rc rc = open_files(dataset, data, unpacked_bytes_max, err);
    if (rc == DL_OK) {
        rc = split(dataset, data, err);
    }
    if (rc != DL_OK) {
        wk_dataset_close(dataset);
        return rc;
    }
    *out = dataset;
    return DL_OK;
}

void wk_dataset_close(struct wk_dataset *dataset)
{
    if (dataset == NULL) {
        return;
    }
    for (uint32_t i = 0; i < dataset->files; i++) {
        wk_token_file_close(&dataset->file[i]);
    }
    free(dataset);
}

void wk_dataset_view(const struct wk_dataset *dataset, struct wk_dataset_view *view)
{
    *view = dataset->view;
}

static uint32_t file_of(const struct wk_dataset *dataset, uint64_t token)
{
    uint32_t low = 0, high = dataset->files;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (dataset->starts[middle] <= token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static enum dl_rc read_stream(const struct wk_dataset *dataset, uint64_t start, uint64_t count, uint32_t *out,
                              struct dl_err *err)
{
    for (uint32_t i = file_of(dataset, start); count > 0; i++) {
        assert(i < dataset->files);
        uint64_t first = start - dataset->starts[i];
        uint64_t here = DL_MIN(count, dataset->file[i].tokens - first);
        enum dl_rc rc = wk_token_file_read(&dataset->file[i], first, here, dataset->vocab_size, out, err);
        if (rc != DL_OK) {
            return rc;
        }
        start += here;
        out += here;
        count -= here;
    }
    return DL_OK;
}

static enum dl_rc read_sequence(const struct wk_dataset *dataset, uint64_t start, uint32_t *tokens, uint32_t *targets,
                                struct dl_err *err)
{
    uint32_t length = dataset->view.sequence_length;
    enum dl_rc rc = read_stream(dataset, start, length, tokens, err);
    if (rc != DL_OK) {
        return rc;
    }
    memcpy(targets, tokens + 1, (length - 1) * sizeof *targets);
    return read_stream(dataset, start + length, 1, targets + length - 1, err);
}

uint64_t wk_dataset_training_start(const struct wk_dataset *dataset, uint64_t index)
{
    assert(index < dataset->view.training_sequences);
    return index * (dataset->view.sequence_length + 1);
}

uint64_t wk_dataset_validation_start(const struct wk_dataset *dataset, uint32_t index)
{
    const struct wk_dataset_view *view = &dataset->view;
    assert(index < view->validation_sequences);
    uint64_t room = view->validation_tokens - (view->sequence_length + 1);
    uint64_t offset = view->validation_sequences == 1 ? 0 : room * index / (view->validation_sequences - 1);
    return view->training_tokens + offset;
}

enum dl_rc wk_dataset_training(const struct wk_dataset *dataset, uint64_t index, uint32_t *tokens, uint32_t *targets,
                               struct dl_err *err)
{
    return read_sequence(dataset, wk_dataset_training_start(dataset, index), tokens, targets, err);
}

enum dl_rc wk_dataset_validation(const struct wk_dataset *dataset, uint32_t index, uint32_t *tokens, uint32_t *targets,
                                 struct dl_err *err)
{
    return read_sequence(dataset, wk_dataset_validation_start(dataset, index), tokens, targets, err);
}
