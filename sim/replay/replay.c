#include "sim/replay/replay.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/replay/replay_state.h"

static void choose(struct sim_replay *replay)
{
    for (uint32_t i = 0; i < replay->record->commit_count; i++) {
        struct sim_commit *commit = &replay->record->commits[i];
        commit->wanted = commit->round <= replay->options->until &&
                         commit->version > sim_replay_begins_with(replay, commit->fragment);
    }
}

/* --- what learners ask for --- */

static enum dl_rc give_version(void *context, uint32_t fragment, uint64_t number, const float **values,
                               struct dl_err *err)
{
    struct sim_replay *replay = context;
    const struct sim_commit *commit = sim_record_commit(replay->record, fragment, number);
    if (commit == NULL) {
        return dl_err_set(err, DL_EINVAL,
                          "fragment %u, version %" PRIu64
                          " is not in the tapes: was this folder copied while the run went on?",
                          fragment, number);
    }
    if (number < sim_replay_begins_with(replay, fragment)) {
        return dl_err_set(
            err, DL_EINVAL,
            "a learner had taken over version %" PRIu64 " of fragment %u, which is older than the checkpoint: what "
            "it had become by then is not kept. Replay from the start, or the merges alone (--verify-only)",
            number, fragment);
    }
    enum dl_rc rc = sim_replay_make(replay, sim_replay_index(replay, commit), err);
    *values = replay->versions[sim_replay_index(replay, commit)].values;
    return rc;
}

static void done_with_version(void *context, uint32_t fragment, uint64_t number)
{
    struct sim_replay *replay = context;
    sim_replay_use(replay, sim_replay_index(replay, sim_record_commit(replay->record, fragment, number)), false);
}

enum dl_rc sim_replay_actor(struct sim_replay *replay, uint32_t incarnation, struct sim_actor **out, struct dl_err *err)
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
    struct sim_replay *replay = context;
    const struct sim_capture *capture = sim_record_capture(replay->record, incarnation, step);
    if (capture != NULL && capture->bytes != NULL) {
        return DL_OK; /* It has passed there. */
    }
    struct sim_actor *actor = NULL;
    enum dl_rc rc = sim_replay_actor(replay, incarnation, &actor, err);
    if (rc == DL_OK) {
        rc = sim_actor_reach(actor, step, err);
    }
    return rc;
}

void sim_replay_end_if_done(struct sim_replay *replay, uint32_t incarnation)
{
    struct sim_actor **actor = &replay->actors[incarnation];
    if (*actor != NULL && sim_actor_is_done(*actor)) {
        replay->result->steps += sim_actor_steps(*actor);
        sim_actor_free(dl_take(*actor));
        replay->actors_alive--;
    }
}

/* Who needs what: so far, and no further, are processes executed and versions kept. */
static void count_uses(struct sim_replay *replay)
{
    struct sim_record *record = replay->record;
    for (uint32_t i = 0; i < record->commit_count; i++) {
        const struct sim_commit *commit = &record->commits[i];
        if (!commit->wanted) {
            continue;
        }
        const struct sim_commit *source = commit->recovered
                                              ? sim_replay_original(replay, commit)
                                              : sim_record_commit(record, commit->fragment, commit->version - 1);
        if (source != NULL && (commit->recovered || commit->round > 0)) {
            replay->versions[sim_replay_index(replay, source)].uses++;
            replay->versions[sim_replay_index(replay, source)].state_uses++;
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
                replay->versions[sim_replay_index(replay, commit)].uses++;
            }
        }
    }
}

static enum dl_rc open_replay(struct sim_replay *replay, struct dl_err *err)
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

static void close_replay(struct sim_replay *replay)
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
    struct sim_replay replay = {.record = record, .options = options, .result = result};
    memset(result, 0, sizeof *result);
    replay.host = (struct sim_actor_host){.context = &replay,
                                          .version = give_version,
                                          .done_with = done_with_version,
                                          .peer = reach_peer,
                                          .difference = &result->difference};
    enum dl_rc rc = open_replay(&replay, err);
    if (rc == DL_OK) {
        choose(&replay);
        result->left_out =
            options->from == NULL || options->verify_only ? 0 : sim_record_leave_out(record, options->from);
        rc = options->verify_only ? DL_OK : sim_record_plan(record, err);
    }
    if (rc == DL_OK) {
        count_uses(&replay);
    }
    uint64_t done = 0;
    for (uint32_t i = 0; rc == DL_OK && i < record->commit_count; i++) {
        if (record->commits[record->order[i]].wanted) {
            rc = sim_replay_make(&replay, record->order[i], err);
            done++;
        }
        if (options->progress != NULL) {
            options->progress(options->context, done, record->commit_count);
        }
    }
    close_replay(&replay);
    return rc == DL_ECONFLICT && result->difference.found ? DL_OK : rc;
}
