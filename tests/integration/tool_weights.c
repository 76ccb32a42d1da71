/* Prints the hash of each fragment of an exported model, as a syncer records it: weights JOB FOLDER. */
#include <inttypes.h>
#include <stdio.h>

#include "common/content.h"
#include "common/exit_codes.h"
#include "common/layout.h"
#include "common/mem.h"
#include "common/spec.h"
#include "worker/model/export.h"
#include "worker/model/model.h"

static enum dl_rc print_hashes(const struct dl_spec *spec, struct wk_model *model, struct dl_err *err)
{
    struct dl_layout *layout = NULL;
    enum dl_rc rc = dl_layout_new(wk_model_tensors(model), wk_model_tensor_count(model), spec->sync.fragments,
                                  spec->sync.layout, &layout, err);
    if (rc != DL_OK) {
        return rc;
    }
    DL_AUTO_FREE float *fragment = dl_alloc_aligned(layout->padded_elements_max * sizeof *fragment);
    for (uint32_t i = 0; fragment != NULL && i < layout->fragment_count; i++) {
        dl_layout_gather(layout, i, wk_model_parameters(model), fragment);
        uint64_t bytes = layout->fragments[i].padded_elements * sizeof *fragment;
        printf("%u %016" PRIx64 "\n", i, dl_content_hash(fragment, bytes));
    }
    dl_layout_free(layout);
    return fragment != NULL ? DL_OK : dl_err_set(err, DL_ENOMEM, "no memory for a fragment");
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "use: weights JOB FOLDER\n");
        return DL_EXIT_USAGE;
    }
    struct dl_err err;
    struct dl_spec *spec = NULL;
    struct wk_model *model = NULL;
    struct wk_model_options options = {.batch_sequences = 1, .forward_only = true};
    enum dl_rc rc = dl_spec_load(argv[1], &spec, NULL, &err);
    if (rc == DL_OK) {
        rc = wk_model_new(&spec->training.model, &options, &model, &err);
    }
    if (rc == DL_OK) {
        rc = wk_model_import(model, argv[2], &err);
    }
    if (rc == DL_OK) {
        rc = print_hashes(spec, model, &err);
    }
    if (rc != DL_OK) {
        fprintf(stderr, "%s\n", err.text);
    }
    wk_model_free(model);
    dl_spec_free(spec);
    return rc == DL_OK ? DL_EXIT_OK : DL_EXIT_FAILED;
}
