/* sim_replay: how a version comes about, by the code that made it then, and whether it is the tape's. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/content.h"
#include "common/mem.h"
#include "sim/replay/replay_state.h"

/* --- a merge --- */

/* Pushes of processes that are older than the checkpoint. */
static enum dl_rc read_left_out(struct sim_replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    bool any = false;
    for (uint32_t i = 0; i < commit->push_count; i++) {
        const struct sim_push *push = &replay->record->pushes[commit->first_push + i];
        any = any || replay->record->incarnations[push->incarnation].left_out;
    }
    enum dl_rc rc = any ? sim_replay_read_pushes(replay, commit, err) : DL_OK;
    return rc != DL_ENOTFOUND
               ? rc
               : dl_err_set(err, DL_EINVAL,
                            "%u learner processes lived across the checkpoint: what they had become by "
                            "then is not kept, nor are their pushes (syncer.keepPushes), of round %" PRIu64
                            " first. Replay from the start, without --from",
                            replay->result->left_out, commit->round);
}

static enum dl_rc execute_pushes(struct sim_replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    enum dl_rc kept = read_left_out(replay, commit, err);
    if (kept != DL_OK) {
        return kept;
    }
    for (uint32_t i = 0; i < commit->push_count; i++) {
        const struct sim_push *push = &replay->record->pushes[commit->first_push + i];
        if (push->encoded != NULL) {
            continue; /* Its learner has been executed beyond it already. */
        }
        if (push->entry == SIM_NO_ENTRY) {
            return dl_err_set(err, DL_EINVAL,
                              "round %" PRIu64
                              ", fragment %u: the tape does not say how learner %u (%s) came to what it "
                              "pushed at its step %" PRIu64,
                              commit->round, commit->fragment, push->learner,
                              replay->record->incarnations[push->incarnation].uid, push->step);
        }
        struct sim_actor *actor = NULL;
        enum dl_rc rc = sim_replay_actor(replay, push->incarnation, &actor, err);
        if (rc == DL_OK) {
            rc = sim_actor_advance(actor, push->entry, err);
        }
        if (rc != DL_OK) {
            return rc;
        }
    }
    return DL_OK;
}

static void measure(struct sim_replay *replay, const struct sim_commit *commit, enum dl_codec codec,
                    const struct sim_push *push, double *squares)
{
    const struct dl_layout *layout = replay->record->layout;
    const struct dl_fragment *fragment = &layout->fragments[commit->fragment];
    for (uint32_t s = 0; s < fragment->slice_count; s++) {
        const struct dl_slice *slice = &layout->slices[fragment->first_slice + s];
        squares[s] = dl_codec_sum_squares(codec, push->encoded + dl_codec_bytes(codec, slice->fragment_offset),
                                          (slice->count + DL_BLOCK - 1) / DL_BLOCK, 0);
    }
}

static void real(char out[SIM_VALUE_MAX], double value)
{
    snprintf(out, SIM_VALUE_MAX, "%.17g", value);
}

/* What goes into the merge, by the core's rules, against what the tape says went into it. */
static enum dl_rc prepare_input(struct sim_replay *replay, const struct sim_commit *commit,
                                const struct dl_sync_spec *sync, uint32_t i, struct dl_err *err)
{
    const struct sim_push *push = &replay->record->pushes[commit->first_push + i];
    double *squares = replay->squares + (size_t)i * replay->slices_max;
    if (push->encoded_bytes != dl_codec_bytes(sync->compression, sim_replay_padded(replay, commit->fragment))) {
        return dl_err_set(err, DL_EINVAL,
                          "round %" PRIu64 ", fragment %u: learner %u's job had another sync.compression",
                          commit->round, commit->fragment, push->learner);
    }
    measure(replay, commit, sync->compression, push, squares);
    double weight = sy_merge_weight(sync, push->steps, push->tokens, commit->version - 1 - push->base_version);
    double norm = sy_merge_norm(squares, replay->record->layout->fragments[commit->fragment].slice_count);
    replay->inputs[i] = (struct sy_push){
        .learner = i, .codec = sync->compression, .encoded = push->encoded, .weight = weight, .sum_squares = squares};
    bool weights = weight != push->weight;
    if (weights || norm != push->norm) {
        char tape[SIM_VALUE_MAX], now[SIM_VALUE_MAX];
        real(tape, weights ? push->weight : push->norm);
        real(now, weights ? weight : norm);
        return sim_differs(&replay->result->difference, commit, tape, now, err, "%s of learner %u's push",
                           weights ? "weight" : "norm", push->learner);
    }
    return DL_OK;
}

static enum dl_rc run_merge(struct sim_replay *replay, const struct sim_commit *commit, const struct dl_sync_spec *sync,
                            struct dl_err *err)
{
    uint32_t index = sim_replay_index(replay, commit);
    const struct sim_version *before = &replay->versions[index - 1];
    struct sim_version *after = &replay->versions[index];
    uint64_t bytes = sim_replay_padded(replay, commit->fragment) * sizeof(float);
    enum dl_rc rc = sim_replay_new_version(replay, index, sync, err);
    for (uint32_t i = 0; rc == DL_OK && i < commit->push_count; i++) {
        rc = prepare_input(replay, commit, sync, i, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    if (after->first != NULL) {
        memcpy(after->first, before->first, bytes);
    }
    if (after->second != NULL) {
        memcpy(after->second, before->second, bytes);
    }
    struct sy_outer_state outer = {.first = after->first, .second = after->second, .steps = before->outer_steps};
    const struct sy_merge_job job = {.fragment = commit->fragment,
                                     .pushes = replay->inputs,
                                     .push_count = commit->push_count,
                                     .theta = before->values,
                                     .theta_out = after->values,
                                     .outer = &outer};
    struct sy_merge_stats stats;
    struct dl_err why;
    if (sy_merge_run(replay->merge, sync, &job, &stats, &why) != DL_OK) {
        memcpy(after->values, before->values, bytes); /* As in the syncer: a version all the same. */
    }
    after->outer_steps = outer.steps;
    return DL_OK;
}

static void drop_pushes(struct sim_replay *replay, const struct sim_commit *commit)
{
    for (uint32_t i = 0; i < commit->push_count; i++) {
        struct sim_push *push = &replay->record->pushes[commit->first_push + i];
        free(dl_take(push->encoded));
        sim_replay_end_if_done(replay, push->incarnation);
    }
}

static enum dl_rc make_merged(struct sim_replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct dl_sync_spec *sync = &sim_record_spec(replay->record, commit->shard, commit->epoch)->sync;
    const struct sim_commit *before = sim_record_commit(replay->record, commit->fragment, commit->version - 1);
    if (before == NULL || commit->push_count == 0) {
        return dl_err_set(err, DL_EINVAL, "fragment %u, version %" PRIu64 ": the tape does not say what it was made of",
                          commit->fragment, commit->version);
    }
    enum dl_rc rc = sim_replay_make(replay, sim_replay_index(replay, before), err);
    if (rc == DL_OK && replay->versions[sim_replay_index(replay, before)].missing) {
        rc = sim_replay_load(replay, sim_replay_index(replay, before), err);
        replay->versions[sim_replay_index(replay, before)].missing = rc != DL_OK;
    }
    if (rc == DL_OK) {
        rc = replay->options->verify_only ? sim_replay_read_pushes(replay, commit, err)
                                          : execute_pushes(replay, commit, err);
    }
    if (rc == DL_OK) {
        rc = run_merge(replay, commit, sync, err);
    }
    if (rc == DL_OK || rc == DL_ENOTFOUND) {
        sim_replay_use(replay, sim_replay_index(replay, before), true);
        drop_pushes(replay, commit);
    }
    return rc;
}

/* --- other ways to come about --- */

static enum dl_rc verify_seed(struct sim_replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct dl_sync_spec *sync = &sim_record_spec(replay->record, commit->shard, commit->epoch)->sync;
    struct sim_version *version = &replay->versions[sim_replay_index(replay, commit)];
    uint64_t bytes = sim_replay_padded(replay, commit->fragment) * sizeof(float);
    enum dl_rc rc = commit->push_count == 1 ? sim_replay_read_pushes(replay, commit, err)
                                            : dl_err_set(err, DL_ENOTFOUND, "a first state of nobody");
    const struct sim_push *push = &replay->record->pushes[commit->first_push];
    if (rc == DL_OK && push->encoded_bytes != bytes) {
        rc = dl_err_set(err, DL_ENOTFOUND, "a first state of another size");
    }
    if (rc == DL_OK) {
        rc = sim_replay_new_version(replay, sim_replay_index(replay, commit), sync, err);
    }
    if (rc == DL_OK) {
        memcpy(version->values, push->encoded, bytes);
    }
    drop_pushes(replay, commit);
    return rc;
}

static enum dl_rc make_seed(struct sim_replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct dl_sync_spec *sync = &sim_record_spec(replay->record, commit->shard, commit->epoch)->sync;
    struct sim_actor *actor = NULL;
    if (replay->options->verify_only) {
        return verify_seed(replay, commit, err);
    }
    if (commit->push_count != 1) {
        return dl_err_set(err, DL_EINVAL, "fragment %u: the tape does not say whose parameters were the first state",
                          commit->fragment);
    }
    uint32_t seeder = replay->record->pushes[commit->first_push].incarnation;
    enum dl_rc rc = sim_replay_actor(replay, seeder, &actor, err);
    if (rc == DL_OK) {
        rc = sim_replay_new_version(replay, sim_replay_index(replay, commit), sync, err);
    }
    const float *values = rc == DL_OK ? sim_actor_seed(actor, commit->fragment) : NULL;
    if (rc == DL_OK && values == NULL) {
        rc = dl_err_set(err, DL_ENOMEM, "replay: no memory for a first state");
    }
    if (rc == DL_OK) {
        memcpy(replay->versions[sim_replay_index(replay, commit)].values, values,
               sim_replay_padded(replay, commit->fragment) * sizeof(float));
        sim_replay_end_if_done(replay, seeder);
    }
    return rc;
}

const struct sim_commit *sim_replay_original(const struct sim_replay *replay, const struct sim_commit *commit)
{
    for (uint64_t number = commit->version - 1; number > 0; number--) {
        const struct sim_commit *older = sim_record_commit(replay->record, commit->fragment, number);
        if (older == NULL || (older->hash == commit->hash && older->round == commit->round)) {
            return older;
        }
    }
    return NULL;
}

static enum dl_rc make_recovered(struct sim_replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct dl_sync_spec *sync = &sim_record_spec(replay->record, commit->shard, commit->epoch)->sync;
    const struct sim_commit *original = sim_replay_original(replay, commit);
    if (original == NULL) {
        return dl_err_set(err, DL_EINVAL, "fragment %u, version %" PRIu64 " repeats a version that is not in the tape",
                          commit->fragment, commit->version);
    }
    uint32_t from = sim_replay_index(replay, original), to = sim_replay_index(replay, commit);
    uint64_t bytes = sim_replay_padded(replay, commit->fragment) * sizeof(float);
    enum dl_rc rc = sim_replay_make(replay, from, err);
    if (rc == DL_OK && replay->versions[from].missing) {
        sim_replay_use(replay, from, true);
        rc = dl_err_set(err, DL_ENOTFOUND, "a version that is repeated is not there");
    }
    if (rc == DL_OK) {
        rc = sim_replay_new_version(replay, to, sync, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    const struct sim_version *source = &replay->versions[from];
    struct sim_version *target = &replay->versions[to];
    memcpy(target->values, source->values, bytes);
    if (target->first != NULL && source->first != NULL) {
        memcpy(target->first, source->first, bytes);
    }
    if (target->second != NULL && source->second != NULL) {
        memcpy(target->second, source->second, bytes);
    }
    target->outer_steps = source->outer_steps;
    sim_replay_use(replay, from, true);
    return DL_OK;
}

/* --- all of it --- */

static enum dl_rc check(struct sim_replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct sim_version *version = &replay->versions[sim_replay_index(replay, commit)];
    uint64_t hash = dl_content_hash(version->values, sim_replay_padded(replay, commit->fragment) * sizeof(float));
    if (hash != commit->hash) {
        return sim_values_differ(&replay->result->difference, replay->record, commit, version->values, hash, err);
    }
    replay->result->rounds += commit->wanted && commit->round > 0 && !commit->recovered ? 1 : 0;
    replay->result->first_states += commit->wanted && commit->round == 0 ? 1 : 0;
    return DL_OK;
}

enum dl_rc sim_replay_make(struct sim_replay *replay, uint32_t index, struct dl_err *err)
{
    const struct sim_commit *commit = &replay->record->commits[index];
    struct sim_version *version = &replay->versions[index];
    if (version->made) {
        return DL_OK;
    }
    if (version->making) {
        return dl_err_set(err, DL_EINVAL,
                          "fragment %u, version %" PRIu64 " depends on itself: the tape contradicts itself",
                          commit->fragment, commit->version);
    }
    version->making = true;
    enum dl_rc rc = !commit->wanted      ? sim_replay_load(replay, index, err)
                    : commit->recovered  ? make_recovered(replay, commit, err)
                    : commit->round == 0 ? make_seed(replay, commit, err)
                                         : make_merged(replay, commit, err);
    if (rc == DL_OK) {
        rc = check(replay, commit, err);
    }
    version->making = false;
    if (rc == DL_ENOTFOUND && replay->options->verify_only) {
        version->missing = true;
        replay->result->unverified++;
        rc = DL_OK;
    }
    if (rc == DL_OK) {
        version->made = true;
        sim_replay_drop_unused(replay, index);
    }
    return rc;
}
