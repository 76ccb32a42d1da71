#include "syncer/export/rollback.h"

#include "common/mem.h"
#include "syncer/store/store.h"

enum dl_rc sy_rollback(const struct sy_export_options *options, char id[SY_EXPORT_TEXT_MAX], struct dl_err *err)
{
    struct sy_store *stores[DL_SPEC_SHARDS_MAX] = {NULL};
    struct dl_layout *layout = NULL;
    char job[DL_SPEC_NAME_MAX];
    uint64_t number = 0;
    enum dl_rc rc = sy_export_find(options, true, &number, id, err);
    if (rc == DL_OK) {
        rc = sy_export_job(options, job, &layout, err);
    }
    for (uint32_t s = 0; rc == DL_OK && s < options->dir_count; s++) {
        const struct sy_store_options open = {.dir = options->dirs[s], .job = job, .shard = s};
        rc = sy_store_open(&open, &stores[s], err);
        rc = rc == DL_OK ? sy_store_check_checkpoint(stores[s], number, layout, options->dir_count, err) : rc;
    }
    for (uint32_t s = 0; rc == DL_OK && s < options->dir_count; s++) {
        rc = sy_store_roll_back(stores[s], number, layout, options->dir_count, err);
    }
    for (uint32_t s = 0; s < options->dir_count; s++) {
        sy_store_close(stores[s]);
    }
    dl_layout_free(layout);
    return rc;
}
