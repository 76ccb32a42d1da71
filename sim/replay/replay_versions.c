/* sim_replay: memory of versions, and what is read from files. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/replay/replay_state.h"
#include "syncer/store/store.h"

/* --- memory of versions --- */

static float *take_array(struct sim_replay *replay, uint64_t elements)
{
    float *array = dl_alloc_aligned(elements * sizeof *array);
    if (array != NULL) {
        replay->bytes += elements * sizeof *array;
        replay->result->bytes_peak = DL_MAX(replay->result->bytes_peak, replay->bytes);
    }
    return array;
}

static void give_array(struct sim_replay *replay, float **array, uint64_t elements)
{
    if (*array != NULL) {
        replay->bytes -= elements * sizeof **array;
        free(*array);
        *array = NULL;
    }
}

void sim_replay_drop_unused(struct sim_replay *replay, uint32_t index)
{
    struct sim_version *version = &replay->versions[index];
    uint64_t elements = sim_replay_padded(replay, replay->record->commits[index].fragment);
    if (version->made && version->uses == 0) {
        give_array(replay, &version->values, elements);
    }
    if (version->made && version->state_uses == 0) {
        give_array(replay, &version->first, elements);
        give_array(replay, &version->second, elements);
    }
}

void sim_replay_use(struct sim_replay *replay, uint32_t index, bool state)
{
    struct sim_version *version = &replay->versions[index];
    version->uses--;
    version->state_uses -= state ? 1 : 0;
    sim_replay_drop_unused(replay, index);
}

enum dl_rc sim_replay_new_version(struct sim_replay *replay, uint32_t index, const struct dl_sync_spec *sync,
                                  struct dl_err *err)
{
    struct sim_version *version = &replay->versions[index];
    uint64_t elements = sim_replay_padded(replay, replay->record->commits[index].fragment);
    uint32_t arrays = sy_outer_arrays(sync->outer.type);
    version->values = take_array(replay, elements);
    version->first = arrays > 0 ? take_array(replay, elements) : NULL;
    version->second = arrays > 1 ? take_array(replay, elements) : NULL;
    if (version->values == NULL || (arrays > 0 && version->first == NULL) || (arrays > 1 && version->second == NULL)) {
        return dl_err_set(err, DL_ENOMEM, "replay: no memory for a version of %" PRIu64 " parameters", elements);
    }
    return DL_OK;
}

/* --- what was kept --- */

enum dl_rc sim_replay_load(struct sim_replay *replay, uint32_t index, struct dl_err *err)
{
    const struct sim_commit *commit = &replay->record->commits[index];
    struct sim_version *version = &replay->versions[index];
    const struct dl_sync_spec *sync = &sim_record_spec(replay->record, commit->shard, commit->epoch)->sync;
    uint64_t bytes = sim_replay_padded(replay, commit->fragment) * sizeof(float);
    uint64_t state_bytes = sy_outer_arrays(sync->outer.type) * bytes + SY_OUTER_TRAILER_BYTES;
    if (commit->file == NULL) {
        return dl_err_set(err, DL_ENOTFOUND, "fragment %u, version %" PRIu64 ": its file is not kept", commit->fragment,
                          commit->version);
    }
    DL_AUTO_FREE uint8_t *state = malloc(state_bytes);
    if (state == NULL) {
        return dl_err_set(err, DL_ENOMEM, "replay: no memory for an optimiser's state");
    }
    enum dl_rc rc = sim_replay_new_version(replay, index, sync, err);
    if (rc == DL_OK) {
        rc = sy_store_read_file(replay->record->folders[commit->shard], commit->file, commit->fragment, commit->version,
                                version->values, bytes, state, state_bytes, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    if (version->first != NULL) {
        memcpy(version->first, state, bytes);
    }
    if (version->second != NULL) {
        memcpy(version->second, state + bytes, bytes);
    }
    memcpy(&version->outer_steps, state + state_bytes - SY_OUTER_TRAILER_BYTES, sizeof version->outer_steps);
    return DL_OK;
}

enum dl_rc sim_replay_read_pushes(struct sim_replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    DL_AUTO_FREE struct sy_store_kept_push *kept = NULL;
    uint32_t count = 0;
    enum dl_rc rc = sy_store_read_pushes(replay->record->folders[commit->shard], commit->fragment, commit->version,
                                         &kept, &count, err);
    if (rc != DL_OK) {
        err->rc = rc == DL_ECORRUPT ? DL_ENOTFOUND : rc;
        return err->rc;
    }
    for (uint32_t i = 0; i < commit->push_count; i++) {
        struct sim_push *push = &replay->record->pushes[commit->first_push + i];
        const struct sim_incarnation_record *who = &replay->record->incarnations[push->incarnation];
        uint64_t nonce = who->nonce;
        uint32_t k = 0;
        if (!replay->options->verify_only && !who->left_out) {
            continue; /* It is executed. */
        }
        while (k < count && kept[k].nonce != nonce) {
            k++;
        }
        push->encoded = k < count ? malloc(kept[k].bytes) : NULL;
        if (push->encoded == NULL) {
            return dl_err_set(err, k < count ? DL_ENOMEM : DL_ENOTFOUND, "the push of learner %u is not there",
                              push->learner);
        }
        push->encoded_bytes = kept[k].bytes;
        memcpy(push->encoded, kept[k].encoded, kept[k].bytes);
    }
    return DL_OK;
}
