/* sy_core, what learners report at their step boundaries: progress, tokens, running estimates. All counters of an
 * incarnation only grow, and only their growth is added up, so that a repeat or a reconnect counts nothing twice. */
#include <assert.h>
#include <math.h>

#include "common/mem.h"
#include "syncer/core/state.h"

#define RATE_WINDOW_NS 1000000000 /* Least time over which tokens a second are measured. */

static uint32_t gather_step_seconds(struct sy_core *core)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (sy_is_training(member) && member->step_seconds > 0) {
            core->scratch[count++] = member->step_seconds;
        }
    }
    return count;
}

double sy_step_seconds(struct sy_core *core, bool lower)
{
    return sy_median(core->scratch, gather_step_seconds(core), lower);
}

double sy_pace_step_seconds(struct sy_core *core)
{
    uint32_t count = gather_step_seconds(core);
    (void)sy_median(core->scratch, count, true); /* Sorts them. */
    return count == 0 ? 0 : core->scratch[DL_MIN(core->quorum, count) - 1];
}

void sy_count_tokens(struct sy_core *core, struct sy_member *member, uint64_t tokens)
{
    if (tokens > member->tokens) {
        core->tokens += tokens - member->tokens;
        member->tokens = tokens;
    }
}

static void take_busy(struct sy_core *core, struct sy_member *member, const struct dl_wire_meta *meta)
{
    if (meta->busy_ns > member->busy_ns) {
        core->busy_ns += member->busy_known ? meta->busy_ns - member->busy_ns : 0;
        member->busy_ns = meta->busy_ns;
    }
    member->busy_known = true;
    member->waited_ns = DL_MAX(member->waited_ns, meta->waited_ns);
}

static void take_rates(struct sy_core *core, struct sy_member *member, const struct dl_wire_meta *meta)
{
    if (meta->step > member->step && meta->step_ns > 0) {
        sy_mean_add(&member->step_seconds, sy_seconds((int64_t)DL_MIN(meta->step_ns, (uint64_t)INT64_MAX)));
    }
    int64_t window_ns = core->now_ns - member->rate_ns;
    if (window_ns >= RATE_WINDOW_NS && meta->tokens >= member->rate_tokens) {
        double rate = (double)(meta->tokens - member->rate_tokens) / sy_seconds(window_ns);
        member->tokens_per_second =
            member->tokens_per_second > 0 ? member->tokens_per_second + (rate - member->tokens_per_second) / 2 : rate;
        member->rate_tokens = meta->tokens;
        member->rate_ns = core->now_ns;
    }
}

static void take_step(struct sy_core *core, struct sy_member *member, const struct dl_wire_meta *meta)
{
    if (meta->step <= member->step) {
        return;
    }
    member->step_tokens =
        meta->tokens > member->tokens ? (meta->tokens - member->tokens) / (meta->step - member->step) : 0;
    sy_pace_advance(member, meta->step - member->step);
    member->step = meta->step;
    core->step = DL_MAX(core->step, member->step);
    if (!core->stepped) {
        core->stepped = true;
        int64_t computed_ns = member->busy_known ? (int64_t)DL_MIN(meta->busy_ns, (uint64_t)core->now_ns) : 0;
        int64_t first_ns = DL_MAX(core->now_ns - computed_ns, core->started_ns);
        core->possible_ns += (uint64_t)(core->now_ns - first_ns) * DL_MAX(core->spec->learners.replicas, 1u);
    }
}

/* The first report that shows the newest version ends the time that an update takes to spread. */
static void take_fragments(struct sy_core *core, struct sy_member *member, const struct dl_wire_meta *meta)
{
    for (uint32_t k = 0; k < meta->fragment_count; k++) {
        uint32_t i = sy_fragment_local(core, meta->fragments[k].fragment);
        if (i == UINT32_MAX) {
            continue;
        }
        struct sy_round *round = &core->rounds[i];
        member->parts[i].version = meta->fragments[k].version;
        member->parts[i].steps = meta->fragments[k].steps;
        if (round->awaits_apply && meta->fragments[k].version == round->version) {
            round->awaits_apply = false;
            sy_mean_add(&core->spread_mean, sy_seconds(core->now_ns - round->committed_ns));
        }
    }
}

static bool holds_all(const struct sy_core *core, const struct sy_member *member)
{
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (member->parts[i].version == 0) {
            return false;
        }
    }
    return true;
}

void sy_core_on_meta(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_meta *meta)
{
    sy_event(core, now_ns);
    assert(m < core->slots);
    struct sy_member *member = &core->members[m];
    if (!sy_is_learner(member)) {
        return;
    }
    member->heard_ns = member->meta_ns = core->now_ns;
    take_fragments(core, member, meta);
    member->trained = holds_all(core, member);
    if (member->trained) {
        take_rates(core, member, meta);
        take_step(core, member, meta);
        take_busy(core, member, meta);
        sy_count_tokens(core, member, meta->tokens);
        if (isfinite(meta->loss)) {
            member->loss = meta->loss;
        }
        sy_rounds_ask(core, m);
    }
    sy_settle(core);
}
