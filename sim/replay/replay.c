#include "sim/replay/replay.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/hash.h"
#include "common/mem.h"
#include "sim/replay/actor.h"
#include "syncer/merge/merge.h"
#include "syncer/store/store.h"

struct version { /* Of the commit of the same index. */
    float *values, *first, *second;
    uint64_t outer_steps;
    uint32_t uses;       /* Learners that have yet to take it over, and the next version. */
    uint32_t state_uses; /* Of the optimiser's state. */
    bool made, making;
};

struct replay {
    struct sim_record *record;
    const struct sim_replay_options *options;
    struct sim_replay_result *result;
    struct version *versions;
    struct sim_actor **actors; /* By incarnation. */
    uint32_t actors_alive;
    struct sim_actor_host host;
    struct sy_pool *pool;
    struct sy_merge *merge;
    struct sy_push *inputs;
    double *squares; /* A row a push. */
    uint32_t inputs_max, slices_max;
    uint64_t bytes;
};

static enum dl_rc make(struct replay *replay, uint32_t index, struct dl_err *err);

static uint32_t index_of(const struct replay *replay, const struct sim_commit *commit)
{
    return (uint32_t)(commit - replay->record->commits);
}

static uint64_t padded_of(const struct replay *replay, uint32_t fragment)
{
    return replay->record->layout->fragments[fragment].padded_elements;
}

static bool is_in_range(const struct replay *replay, const struct sim_commit *commit)
{
    return commit->round <= replay->options->until;
}

/* --- memory of versions --- */

static float *take_array(struct replay *replay, uint64_t elements)
{
    float *array = dl_alloc_aligned(elements * sizeof *array);
    if (array != NULL) {
        replay->bytes += elements * sizeof *array;
        replay->result->bytes_peak = DL_MAX(replay->result->bytes_peak, replay->bytes);
    }
    return array;
}

static void give_array(struct replay *replay, float **array, uint64_t elements)
{
    if (*array != NULL) {
        replay->bytes -= elements * sizeof **array;
        free(*array);
        *array = NULL;
    }
}

static void drop_unused(struct replay *replay, uint32_t index)
{
    struct version *version = &replay->versions[index];
    uint64_t elements = padded_of(replay, replay->record->commits[index].fragment);
    if (version->made && version->uses == 0) {
        give_array(replay, &version->values, elements);
    }
    if (version->made && version->state_uses == 0) {
        give_array(replay, &version->first, elements);
        give_array(replay, &version->second, elements);
    }
}

static void use(struct replay *replay, uint32_t index, bool state)
{
    struct version *version = &replay->versions[index];
    version->uses--;
    version->state_uses -= state ? 1 : 0;
    drop_unused(replay, index);
}

static enum dl_rc new_version(struct replay *replay, uint32_t index, const struct dl_sync_spec *sync,
                              struct dl_err *err)
{
    struct version *version = &replay->versions[index];
    uint64_t elements = padded_of(replay, replay->record->commits[index].fragment);
    uint32_t arrays = sy_outer_arrays(sync->outer.type);
    version->values = take_array(replay, elements);
    version->first = arrays > 0 ? take_array(replay, elements) : NULL;
    version->second = arrays > 1 ? take_array(replay, elements) : NULL;
    if (version->values == NULL || (arrays > 0 && version->first == NULL) || (arrays > 1 && version->second == NULL)) {
        return dl_err_set(err, DL_ENOMEM, "replay: no memory for a version of %" PRIu64 " parameters", elements);
    }
    return DL_OK;
}

/* --- what learners ask for --- */

static enum dl_rc give_version(void *context, uint32_t fragment, uint64_t number, const float **values,
                               struct dl_err *err)
{
    struct replay *replay = context;
    const struct sim_commit *commit = sim_record_commit(replay->record, fragment, number);
    if (commit == NULL) {
        return dl_err_set(err, DL_EINVAL,
                          "fragment %u, version %" PRIu64
                          " is not in the tapes: was this folder copied while the run went on?",
                          fragment, number);
    }
    enum dl_rc rc = make(replay, index_of(replay, commit), err);
    *values = replay->versions[index_of(replay, commit)].values;
    return rc;
}

static void done_with_version(void *context, uint32_t fragment, uint64_t number)
{
    struct replay *replay = context;
    use(replay, index_of(replay, sim_record_commit(replay->record, fragment, number)), false);
}

static enum dl_rc actor_of(struct replay *replay, uint32_t incarnation, struct sim_actor **out, struct dl_err *err)
{
    struct sim_actor **actor = &replay->actors[incarnation];
    if (*actor == NULL) {
        enum dl_rc rc = sim_actor_new(replay->record, incarnation, replay->options->threads, &replay->host, actor, err);
        if (rc != DL_OK) {
            return rc;
        }
        replay->result->processes++;
        replay->actors_alive++;
        replay->result->processes_peak = DL_MAX(replay->result->processes_peak, replay->actors_alive);
    }
    *out = *actor;
    return DL_OK;
}

static enum dl_rc reach_peer(void *context, uint32_t incarnation, uint64_t step, struct dl_err *err)
{
    struct replay *replay = context;
    const struct sim_capture *capture = sim_record_capture(replay->record, incarnation, step);
    if (capture != NULL && capture->bytes != NULL) {
        return DL_OK; /* It has passed there. */
    }
    struct sim_actor *actor = NULL;
    enum dl_rc rc = actor_of(replay, incarnation, &actor, err);
    if (rc == DL_OK) {
        rc = sim_actor_reach(actor, step, err);
    }
    return rc;
}

static void end_if_done(struct replay *replay, uint32_t incarnation)
{
    struct sim_actor **actor = &replay->actors[incarnation];
    if (*actor != NULL && sim_actor_is_done(*actor)) {
        replay->result->steps += sim_actor_steps(*actor);
        sim_actor_free(dl_take(*actor));
        replay->actors_alive--;
    }
}

/* --- a merge --- */

static enum dl_rc execute_pushes(struct replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
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
        enum dl_rc rc = actor_of(replay, push->incarnation, &actor, err);
        if (rc == DL_OK) {
            rc = sim_actor_advance(actor, push->entry, err);
        }
        if (rc != DL_OK) {
            return rc;
        }
    }
    return DL_OK;
}

static void measure(struct replay *replay, const struct sim_commit *commit, enum dl_codec codec,
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
static enum dl_rc prepare_input(struct replay *replay, const struct sim_commit *commit, const struct dl_sync_spec *sync,
                                uint32_t i, struct dl_err *err)
{
    const struct sim_push *push = &replay->record->pushes[commit->first_push + i];
    double *squares = replay->squares + (size_t)i * replay->slices_max;
    if (push->encoded_bytes != dl_codec_bytes(sync->compression, padded_of(replay, commit->fragment))) {
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

static enum dl_rc run_merge(struct replay *replay, const struct sim_commit *commit, const struct dl_sync_spec *sync,
                            struct dl_err *err)
{
    uint32_t index = index_of(replay, commit);
    const struct version *before = &replay->versions[index - 1];
    struct version *after = &replay->versions[index];
    uint64_t bytes = padded_of(replay, commit->fragment) * sizeof(float);
    enum dl_rc rc = new_version(replay, index, sync, err);
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

static void drop_pushes(struct replay *replay, const struct sim_commit *commit)
{
    for (uint32_t i = 0; i < commit->push_count; i++) {
        struct sim_push *push = &replay->record->pushes[commit->first_push + i];
        free(dl_take(push->encoded));
        end_if_done(replay, push->incarnation);
    }
}

static enum dl_rc make_merged(struct replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct dl_sync_spec *sync = &sim_record_spec(replay->record, commit->shard, commit->epoch)->sync;
    const struct sim_commit *before = sim_record_commit(replay->record, commit->fragment, commit->version - 1);
    if (before == NULL || commit->push_count == 0) {
        return dl_err_set(err, DL_EINVAL, "fragment %u, version %" PRIu64 ": the tape does not say what it was made of",
                          commit->fragment, commit->version);
    }
    enum dl_rc rc = make(replay, index_of(replay, before), err);
    if (rc == DL_OK) {
        rc = execute_pushes(replay, commit, err);
    }
    if (rc == DL_OK) {
        rc = run_merge(replay, commit, sync, err);
    }
    if (rc == DL_OK) {
        use(replay, index_of(replay, before), true);
        drop_pushes(replay, commit);
    }
    return rc;
}

/* --- other ways to come about --- */

static enum dl_rc make_seed(struct replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct dl_sync_spec *sync = &sim_record_spec(replay->record, commit->shard, commit->epoch)->sync;
    struct sim_actor *actor = NULL;
    if (commit->push_count != 1) {
        return dl_err_set(err, DL_EINVAL, "fragment %u: the tape does not say whose parameters were the first state",
                          commit->fragment);
    }
    uint32_t seeder = replay->record->pushes[commit->first_push].incarnation;
    enum dl_rc rc = actor_of(replay, seeder, &actor, err);
    if (rc == DL_OK) {
        rc = new_version(replay, index_of(replay, commit), sync, err);
    }
    if (rc == DL_OK) {
        memcpy(replay->versions[index_of(replay, commit)].values, sim_actor_seed(actor, commit->fragment),
               padded_of(replay, commit->fragment) * sizeof(float));
        end_if_done(replay, seeder);
    }
    return rc;
}

/* The version that a recovered one repeats: the newest older one of the same content. */
static const struct sim_commit *original_of(const struct replay *replay, const struct sim_commit *commit)
{
    for (uint64_t number = commit->version - 1; number > 0; number--) {
        const struct sim_commit *older = sim_record_commit(replay->record, commit->fragment, number);
        if (older == NULL || (older->hash == commit->hash && older->round == commit->round)) {
            return older;
        }
    }
    return NULL;
}

static enum dl_rc make_recovered(struct replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct dl_sync_spec *sync = &sim_record_spec(replay->record, commit->shard, commit->epoch)->sync;
    const struct sim_commit *original = original_of(replay, commit);
    if (original == NULL) {
        return dl_err_set(err, DL_EINVAL, "fragment %u, version %" PRIu64 " repeats a version that is not in the tape",
                          commit->fragment, commit->version);
    }
    uint32_t from = index_of(replay, original), to = index_of(replay, commit);
    uint64_t bytes = padded_of(replay, commit->fragment) * sizeof(float);
    enum dl_rc rc = make(replay, from, err);
    if (rc == DL_OK) {
        rc = new_version(replay, to, sync, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    const struct version *source = &replay->versions[from];
    struct version *target = &replay->versions[to];
    memcpy(target->values, source->values, bytes);
    if (target->first != NULL && source->first != NULL) {
        memcpy(target->first, source->first, bytes);
    }
    if (target->second != NULL && source->second != NULL) {
        memcpy(target->second, source->second, bytes);
    }
    target->outer_steps = source->outer_steps;
    use(replay, from, true);
    return DL_OK;
}

/* --- all of it --- */

static enum dl_rc check(struct replay *replay, const struct sim_commit *commit, struct dl_err *err)
{
    const struct version *version = &replay->versions[index_of(replay, commit)];
    uint64_t hash = dl_hash64(version->values, padded_of(replay, commit->fragment) * sizeof(float), 0);
    if (hash != commit->hash) {
        return sim_values_differ(&replay->result->difference, replay->record, commit, version->values, hash, err);
    }
    replay->result->rounds += commit->round > 0 && !commit->recovered ? 1 : 0;
    replay->result->first_states += commit->round == 0 ? 1 : 0;
    return DL_OK;
}

static enum dl_rc make(struct replay *replay, uint32_t index, struct dl_err *err)
{
    const struct sim_commit *commit = &replay->record->commits[index];
    struct version *version = &replay->versions[index];
    if (version->made) {
        return DL_OK;
    }
    if (version->making) {
        return dl_err_set(err, DL_EINVAL,
                          "fragment %u, version %" PRIu64 " depends on itself: the tape contradicts itself",
                          commit->fragment, commit->version);
    }
    version->making = true;
    enum dl_rc rc = commit->recovered    ? make_recovered(replay, commit, err)
                    : commit->round == 0 ? make_seed(replay, commit, err)
                                         : make_merged(replay, commit, err);
    if (rc == DL_OK) {
        rc = check(replay, commit, err);
    }
    version->making = false;
    if (rc == DL_OK) {
        version->made = true;
        drop_unused(replay, index);
    }
    return rc;
}

/* Who needs what: so far, and no further, are processes executed and versions kept. */
static void count_uses(struct replay *replay)
{
    struct sim_record *record = replay->record;
    for (uint32_t i = 0; i < record->commit_count; i++) {
        const struct sim_commit *commit = &record->commits[i];
        if (!is_in_range(replay, commit)) {
            continue;
        }
        const struct sim_commit *source = commit->recovered
                                              ? original_of(replay, commit)
                                              : sim_record_commit(record, commit->fragment, commit->version - 1);
        if (source != NULL && (commit->recovered || commit->round > 0)) {
            replay->versions[index_of(replay, source)].uses++;
            replay->versions[index_of(replay, source)].state_uses++;
        }
    }
    for (uint32_t i = 0; i < record->incarnation_count; i++) {
        const struct sim_incarnation_record *who = &record->incarnations[i];
        for (uint32_t k = 0; k < who->needed; k++) {
            const struct sim_commit *commit =
                strcmp(who->entries[k].kind, "apply") == 0
                    ? sim_record_commit(record, who->entries[k].fragment, who->entries[k].a)
                    : NULL;
            if (commit != NULL) {
                replay->versions[index_of(replay, commit)].uses++;
            }
        }
    }
}

static enum dl_rc open_replay(struct replay *replay, struct dl_err *err)
{
    const struct sim_record *record = replay->record;
    for (uint32_t i = 0; i < record->commit_count; i++) {
        replay->inputs_max = DL_MAX(replay->inputs_max, record->commits[i].push_count);
    }
    for (uint32_t f = 0; f < record->layout->fragment_count; f++) {
        replay->slices_max = DL_MAX(replay->slices_max, record->layout->fragments[f].slice_count);
    }
    replay->versions = calloc(record->commit_count + 1, sizeof *replay->versions);
    replay->actors = calloc(record->incarnation_count + 1, sizeof(struct sim_actor *));
    replay->inputs = calloc(replay->inputs_max + 1, sizeof *replay->inputs);
    replay->squares = calloc((size_t)replay->inputs_max * replay->slices_max + 1, sizeof *replay->squares);
    if (replay->versions == NULL || replay->actors == NULL || replay->inputs == NULL || replay->squares == NULL) {
        return dl_err_set(err, DL_ENOMEM, "replay: no memory");
    }
    enum dl_rc rc = sy_pool_new(DL_MAX(replay->options->threads, 1u), &replay->pool, err);
    return rc == DL_OK ? sy_merge_new(record->layout, replay->pool, DL_MAX(replay->inputs_max, 1u), &replay->merge, err)
                       : rc;
}

static void close_replay(struct replay *replay)
{
    for (uint32_t i = 0; replay->actors != NULL && i < replay->record->incarnation_count; i++) {
        replay->result->steps += replay->actors[i] == NULL ? 0 : sim_actor_steps(replay->actors[i]);
        sim_actor_free(replay->actors[i]);
    }
    for (uint32_t i = 0; replay->versions != NULL && i < replay->record->commit_count; i++) {
        free(replay->versions[i].values);
        free(replay->versions[i].first);
        free(replay->versions[i].second);
    }
    sy_merge_free(replay->merge);
    sy_pool_free(replay->pool);
    free(replay->versions);
    free(replay->actors);
    free(replay->inputs);
    free(replay->squares);
}

enum dl_rc sim_replay_run(struct sim_record *record, const struct sim_replay_options *options,
                          struct sim_replay_result *result, struct dl_err *err)
{
    struct replay replay = {.record = record, .options = options, .result = result};
    memset(result, 0, sizeof *result);
    replay.host = (struct sim_actor_host){.context = &replay,
                                          .version = give_version,
                                          .done_with = done_with_version,
                                          .peer = reach_peer,
                                          .difference = &result->difference};
    enum dl_rc rc = open_replay(&replay, err);
    if (rc == DL_OK) {
        rc = sim_record_plan(record, options->until, err);
    }
    if (rc == DL_OK) {
        count_uses(&replay);
    }
    uint64_t done = 0;
    for (uint32_t i = 0; rc == DL_OK && i < record->commit_count; i++) {
        if (is_in_range(&replay, &record->commits[record->order[i]])) {
            rc = make(&replay, record->order[i], err);
            done++;
        }
        if (options->progress != NULL) {
            options->progress(options->context, done, record->commit_count);
        }
    }
    close_replay(&replay);
    return rc == DL_ECONFLICT && result->difference.found ? DL_OK : rc;
}
