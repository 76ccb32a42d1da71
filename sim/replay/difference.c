#include "sim/replay/difference.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/store/store.h"

enum dl_rc sim_differs(struct sim_difference *difference, const struct sim_commit *commit, const char *tape,
                       const char *replay, struct dl_err *err, const char *fmt, ...)
{
    if (!difference->found) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(difference->what, sizeof difference->what, fmt, args);
        va_end(args);
        difference->found = true;
        difference->round = commit->round;
        difference->version = commit->version;
        difference->fragment = commit->fragment;
        snprintf(difference->tape, sizeof difference->tape, "%s", tape);
        snprintf(difference->replay, sizeof difference->replay, "%s", replay);
    }
    return dl_err_set(err, DL_ECONFLICT, "round %" PRIu64 ", fragment %u: %s", commit->round, commit->fragment,
                      difference->what);
}

static uint32_t bits_of(const float *value)
{
    uint32_t bits;
    memcpy(&bits, value, sizeof bits);
    return bits;
}

/* Slices stand in the order of tensors, so that the first value of the array that differs is the first tensor's. */
static bool find_value(const struct dl_layout *layout, uint32_t fragment, const float *theirs, const float *ours,
                       const struct dl_slice **slice, uint64_t *index)
{
    const struct dl_fragment *f = &layout->fragments[fragment];
    for (uint32_t s = 0; s < f->slice_count; s++) {
        const struct dl_slice *at = &layout->slices[f->first_slice + s];
        for (uint64_t i = 0; i < at->count; i++) {
            if (bits_of(&theirs[at->fragment_offset + i]) != bits_of(&ours[at->fragment_offset + i])) {
                *slice = at;
                *index = i;
                return true;
            }
        }
    }
    return false;
}

enum dl_rc sim_values_differ(struct sim_difference *difference, const struct sim_record *record,
                             const struct sim_commit *commit, const float *values, uint64_t hash, struct dl_err *err)
{
    uint64_t bytes = record->layout->fragments[commit->fragment].padded_elements * sizeof(float);
    DL_AUTO_FREE float *kept = commit->file == NULL ? NULL : malloc(bytes);
    struct dl_err ignored;
    const struct dl_slice *slice = NULL;
    uint64_t index = 0;
    if (kept != NULL && sy_store_read_file(record->folders[commit->shard], commit->file, commit->fragment,
                                           commit->version, kept, bytes, NULL, 0, &ignored) == DL_OK) {
        (void)find_value(record->layout, commit->fragment, kept, values, &slice, &index);
    }
    char tape[SIM_VALUE_MAX], replay[SIM_VALUE_MAX];
    if (slice == NULL) {
        snprintf(tape, sizeof tape, "hash %016" PRIx64, commit->hash);
        snprintf(replay, sizeof replay, "hash %016" PRIx64, hash);
    } else {
        snprintf(tape, sizeof tape, "%.9g", (double)kept[slice->fragment_offset + index]);
        snprintf(replay, sizeof replay, "%.9g", (double)values[slice->fragment_offset + index]);
    }
    enum dl_rc rc = sim_differs(difference, commit, tape, replay, err, "values of version %" PRIu64, commit->version);
    if (slice != NULL) {
        snprintf(difference->tensor, sizeof difference->tensor, "%s", record->layout->tensors[slice->tensor].name);
        difference->index = slice->tensor_offset + index;
    }
    return rc;
}
