#include "syncer/core/core.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/internal.h"

static bool allocate(struct sy_core *core)
{
    uint32_t members = core->member_max, fragments = core->fragment_count;
    core->members = calloc(members, sizeof *core->members);
    core->fragments = calloc(fragments, sizeof *core->fragments);
    core->norms = calloc(members, sizeof *core->norms);
    if (core->members == NULL || core->fragments == NULL || core->norms == NULL) {
        return false;
    }
    for (uint32_t m = 0; m < members; m++) {
        core->members[m].fragments = calloc(fragments, sizeof *core->members[m].fragments);
        if (core->members[m].fragments == NULL) {
            return false;
        }
    }
    for (uint32_t f = 0; f < fragments; f++) {
        struct sy_round *round = &core->fragments[f].open;
        round->parts = calloc(members, sizeof *round->parts);
        round->participants = calloc(members, sizeof *round->participants);
        if (round->parts == NULL || round->participants == NULL) {
            return false;
        }
    }
    return sy_actions_init(core);
}

enum dl_rc sy_core_new(const struct sy_core_config *config, struct sy_core **out, struct dl_err *err)
{
    const struct dl_spec *spec = config->spec;
    if (config->shard >= spec->syncer.shards || spec->syncer.shards > spec->sync.fragments) {
        return dl_err_set(err, DL_EINVAL, "syncer shard %u of %u with %u fragments: no such shard", config->shard,
                          spec->syncer.shards, spec->sync.fragments);
    }
    struct sy_core *core = calloc(1, sizeof *core);
    if (core == NULL) {
        return dl_err_set(err, DL_ENOMEM, "syncer core: no memory");
    }
    core->spec = spec;
    core->shard = config->shard;
    core->epoch = config->epoch;
    core->fragment_count = (spec->sync.fragments - config->shard + spec->syncer.shards - 1) / spec->syncer.shards;
    /* Slots of lost incarnations stay for their return while there is room. */
    core->member_max = 2 * spec->learners.max + SY_EVALUATORS_MAX;
    core->next_round = 1;
    core->next_admission = 1;
    core->seeder = SY_NO_MEMBER;
    core->first_event_ns = INT64_MIN;
    core->first_step_ns = INT64_MIN;
    if (!allocate(core)) {
        sy_core_free(core);
        return dl_err_set(err, DL_ENOMEM, "syncer core: no memory for %u members and %u fragments", core->member_max,
                          core->fragment_count);
    }
    *out = core;
    return DL_OK;
}

void sy_core_free(struct sy_core *core)
{
    if (core == NULL) {
        return;
    }
    for (uint32_t m = 0; core->members != NULL && m < core->member_max; m++) {
        free(core->members[m].fragments);
    }
    for (uint32_t f = 0; core->fragments != NULL && f < core->fragment_count; f++) {
        free(core->fragments[f].open.parts);
        free(core->fragments[f].open.participants);
    }
    free(core->members);
    free(core->fragments);
    free(core->norms);
    free(core->queue);
    free(core->texts);
    free(core);
}

void sy_core_restore_fragment(struct sy_core *core, uint32_t fragment, uint64_t version, uint64_t round)
{
    uint32_t index = sy_local(core, fragment);
    if (index != UINT32_MAX) {
        core->fragments[index].version = version;
        core->fragments[index].round = round;
        core->restored = core->restored || version > 0;
    }
}

void sy_core_restore_totals(struct sy_core *core, uint64_t next_round, uint64_t rounds_merged, uint64_t tokens,
                            uint64_t tokens_merged, uint64_t next_admission)
{
    core->next_round = DL_MAX(next_round, UINT64_C(1));
    core->rounds_merged = rounds_merged;
    core->tokens = tokens;
    core->tokens_merged = (double)tokens_merged;
    core->next_admission = DL_MAX(next_admission, UINT64_C(1));
}

uint32_t sy_core_fragment_count(const struct sy_core *core)
{
    return core->fragment_count;
}

void sy_core_tick(struct sy_core *core, int64_t now_ns)
{
    if (core->first_event_ns == INT64_MIN) {
        core->first_event_ns = now_ns;
    }
    sy_members_tick(core, now_ns);
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        sy_round_evaluate(core, now_ns, f);
    }
    sy_finish_check(core, now_ns);
    sy_pace(core, now_ns);
    sy_finish_step(core, now_ns);
}

int64_t sy_core_next_deadline(const struct sy_core *core)
{
    int64_t next = INT64_MAX;
    int64_t timeout = sy_ns(core->spec->sync.timeout_seconds);
    for (uint32_t m = 0; m < core->member_max; m++) {
        const struct sy_member *member = &core->members[m];
        if (member->used && member->connected) {
            next = DL_MIN(next, member->heard_ns + timeout);
        }
    }
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        const struct sy_round *round = &core->fragments[f].open;
        if (round->state == SY_ROUND_PULLING && round->quorum_ns != INT64_MIN) {
            next = DL_MIN(next, round->grace_end_ns);
        }
    }
    if (core->stopping && !core->ended) {
        next = DL_MIN(next, core->finish_end_ns);
    }
    if (!core->stopping && core->spec->active_deadline_seconds > 0 && core->first_event_ns != INT64_MIN) {
        next = DL_MIN(next, core->first_event_ns + core->spec->active_deadline_seconds * INT64_C(1000000000));
    }
    return next;
}
