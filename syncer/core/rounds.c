#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/internal.h"

void sy_verdict(struct sy_core *core, uint32_t member, uint32_t fragment, uint64_t round, enum dl_verdict verdict)
{
    core->verdicts[verdict]++;
    sy_act(core, &(struct sy_queued){.type = SY_ACT_RESULT, .member = member, .fragment = fragment, .round = round, .text = -1,
                                     .as.result = {.round = round, .fragment = fragment, .verdict = (uint8_t)verdict}});
}

static uint32_t count_parts(const struct sy_core *core, const struct sy_round *round, enum sy_part_state state)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->member_max; m++) {
        count += round->parts[m].state == state;
    }
    return count;
}

/* --- first state -------------------------------------------------------------------------------------------------------- */

static void send_pull(struct sy_core *core, uint32_t index, uint32_t m, uint32_t flags)
{
    const struct sy_fragment_state *fragment = &core->fragments[index];
    struct sy_queued action = {.type = SY_ACT_PULL, .member = m, .fragment = sy_global(core, index), .text = -1};
    action.round = fragment->open.id;
    action.as.pull = (struct dl_wire_pull){.round = fragment->open.id, .fragment = sy_global(core, index),
                                           .version = fragment->version, .flags = flags};
    sy_pace_bounds(core, &action.as.pull.pull_within_steps, &action.as.pull.update_within_steps, &action.as.pull.wait_ms);
    sy_act(core, &action);
}

/* The whole first state comes from one learner: when it is lost before all is stored, another one is asked for all of it. */
void sy_seed(struct sy_core *core)
{
    if (core->seeder != SY_NO_MEMBER || core->stopping) {
        return;
    }
    bool is_missing = false;
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        is_missing = is_missing || core->fragments[f].version == 0;
    }
    for (uint32_t m = 0; is_missing && m < core->member_max; m++) {
        bool is_lower = core->seeder == SY_NO_MEMBER || core->members[m].learner < core->members[core->seeder].learner;
        if (sy_is_live_learner(&core->members[m]) && is_lower) {
            core->seeder = m;
        }
    }
    for (uint32_t f = 0; core->seeder != SY_NO_MEMBER && f < core->fragment_count; f++) {
        struct sy_fragment_state *fragment = &core->fragments[f];
        if (fragment->version == 0 && fragment->open.state != SY_ROUND_MERGING) {
            fragment->open.id = 0;
            send_pull(core, f, core->seeder, DL_PULL_SEED);
        }
    }
}

static enum dl_verdict accept_seed(struct sy_core *core, uint32_t index, uint32_t m, const struct dl_wire_push *push)
{
    struct sy_round *round = &core->fragments[index].open;
    if (m != core->seeder || push->round != 0 || round->state != SY_ROUND_IDLE) {
        return DL_VERDICT_UNKNOWN_ROUND;
    }
    if (push->codec != DL_CODEC_NONE) {
        return DL_VERDICT_MALFORMED;
    }
    round->parts[m] = (struct sy_part){.state = SY_PART_PUSHING};
    return DL_VERDICT_ACCEPTED;
}

static void seed_received(struct sy_core *core, uint32_t index, uint32_t m, bool intact, double norm)
{
    struct sy_round *round = &core->fragments[index].open;
    uint32_t fragment = sy_global(core, index);
    round->parts[m].state = SY_PART_NONE;
    if (!intact || m != core->seeder) {
        sy_verdict(core, m, fragment, 0, intact ? DL_VERDICT_ABORTED : DL_VERDICT_CHECKSUM);
        if (m == core->seeder) {
            send_pull(core, index, m, DL_PULL_SEED);
        }
        return;
    }
    if (!isfinite(norm)) {
        sy_verdict(core, m, fragment, 0, DL_VERDICT_NOT_FINITE);
        snprintf(core->stop_text, sizeof core->stop_text, "the first state from learner %u holds NaN or Inf in fragment %u",
                 core->members[m].learner, fragment);
        core->stopping = true;
        sy_core_on_stop_request(core, 0, DL_STOP_FAILED, core->stop_text);
        return;
    }
    core->verdicts[DL_VERDICT_ACCEPTED]++;
    round->state = SY_ROUND_MERGING;
    round->seeding = true;
    round->participant_count = 0;
    sy_act(core, &(struct sy_queued){.type = SY_ACT_SEED_STORE, .member = m, .fragment = fragment, .version = 1, .text = -1});
}

/* --- opening ------------------------------------------------------------------------------------------------------------ */

static bool can_contribute(const struct sy_core *core, uint32_t index, uint32_t m)
{
    const struct sy_member_fragment *held = &core->members[m].fragments[index];
    return sy_is_live_learner(&core->members[m]) && held->steps >= 1 && held->version == core->fragments[index].version;
}

static void ask(struct sy_core *core, uint32_t index, uint32_t m)
{
    struct sy_round *round = &core->fragments[index].open;
    round->parts[m].state = SY_PART_ASKED;
    round->asked++;
    send_pull(core, index, m, (round->warmup ? DL_PULL_WARMUP : 0) | (round->final ? DL_PULL_FINAL : 0));
}

void sy_round_open(struct sy_core *core, int64_t now_ns, uint32_t index, uint32_t need, bool warmup, bool final)
{
    struct sy_round *round = &core->fragments[index].open;
    assert(round->state == SY_ROUND_IDLE);
    round->state = SY_ROUND_PULLING;
    round->seeding = false;
    round->warmup = warmup;
    round->final = final;
    round->id = core->next_round++;
    round->order = ++core->next_order;
    round->need = need;
    round->asked = 0;
    round->opened_ns = now_ns;
    round->first_ns = round->quorum_ns = INT64_MIN;
    round->grace_end_ns = INT64_MAX;
    for (uint32_t m = 0; m < core->member_max; m++) {
        round->parts[m].state = SY_PART_NONE;
    }
    for (uint32_t m = 0; m < core->member_max; m++) {
        if (can_contribute(core, index, m)) {
            ask(core, index, m);
        }
    }
    sy_round_evaluate(core, now_ns, index);
}

/* A round that has no quorum yet also asks whoever joins, comes back, or has trained since it answered that it had nothing. */
void sy_round_ask(struct sy_core *core, uint32_t index, uint32_t m)
{
    struct sy_round *round = &core->fragments[index].open;
    bool is_open = round->state == SY_ROUND_PULLING && round->quorum_ns == INT64_MIN;
    enum sy_part_state state = round->parts[m].state;
    if (is_open && (state == SY_PART_NONE || state == SY_PART_ANSWERED) && can_contribute(core, index, m)) {
        ask(core, index, m);
    }
}

/* --- pushes ------------------------------------------------------------------------------------------------------------- */

static enum dl_verdict judge(const struct sy_core *core, uint32_t index, uint32_t m, const struct dl_wire_push *push,
                             uint64_t expected_bytes)
{
    const struct sy_fragment_state *fragment = &core->fragments[index];
    const struct sy_round *round = &fragment->open;
    const struct sy_member_fragment *held = &core->members[m].fragments[index];
    if (push->bytes != expected_bytes || push->codec != core->spec->sync.compression || push->steps == 0 || push->tokens == 0 ||
        push->steps > push->step || push->tokens > UINT64_C(1) << 48) {
        return DL_VERDICT_MALFORMED;
    }
    if (push->round == 0 || push->round >= core->next_round) {
        return DL_VERDICT_UNKNOWN_ROUND;
    }
    if (push->round != round->id || round->state != SY_ROUND_PULLING) {
        return DL_VERDICT_LATE;
    }
    enum sy_part_state state = round->parts[m].state;
    if (state == SY_PART_HAVE || state == SY_PART_PUSHING || (push->base_version <= held->merged_base)) {
        return DL_VERDICT_DUPLICATE;
    }
    if (push->base_version == 0 || push->base_version > fragment->version ||
        fragment->version - push->base_version > core->spec->sync.merge.staleness_max) {
        return DL_VERDICT_STALE_BASE;
    }
    return state == SY_PART_REFUSED ? DL_VERDICT_NORM : DL_VERDICT_ACCEPTED;
}

enum dl_verdict sy_core_on_push(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_push *push,
                                uint64_t expected_bytes)
{
    struct sy_member *member = &core->members[m];
    uint32_t index = sy_local(core, push->fragment);
    enum dl_verdict verdict = DL_VERDICT_MALFORMED;
    member->heard_ns = now_ns;
    if (index != UINT32_MAX && sy_is_live_learner(member)) {
        bool is_seed = core->fragments[index].version == 0;
        verdict = is_seed ? accept_seed(core, index, m, push) : judge(core, index, m, push, expected_bytes);
        is_seed = is_seed && push->bytes != expected_bytes;
        verdict = is_seed ? DL_VERDICT_MALFORMED : verdict;
    }
    if (verdict != DL_VERDICT_ACCEPTED) {
        sy_verdict(core, m, push->fragment, push->round, verdict);
        return verdict;
    }
    if (core->fragments[index].version > 0) {
        struct sy_part *part = &core->fragments[index].open.parts[m];
        part->state = SY_PART_PUSHING;
        part->push = (struct sy_participant){.member = m, .learner = member->learner, .admission = member->admission,
                                             .step = push->step, .base_version = push->base_version, .steps = push->steps,
                                             .tokens = push->tokens};
        struct sy_round *round = &core->fragments[index].open;
        round->first_ns = round->first_ns == INT64_MIN ? now_ns : round->first_ns;
    }
    return verdict;
}

void sy_core_on_push_received(struct sy_core *core, int64_t now_ns, uint32_t m, uint64_t round_id, uint32_t fragment,
                              bool intact, double norm)
{
    uint32_t index = sy_local(core, fragment);
    core->members[m].heard_ns = now_ns;
    if (index == UINT32_MAX) {
        return;
    }
    struct sy_round *round = &core->fragments[index].open;
    struct sy_part *part = &round->parts[m];
    if (core->fragments[index].version == 0) {
        if (part->state == SY_PART_PUSHING) {
            seed_received(core, index, m, intact, norm);
        }
        return;
    }
    if (round->id != round_id || round->state != SY_ROUND_PULLING || part->state != SY_PART_PUSHING) {
        sy_verdict(core, m, fragment, round_id, DL_VERDICT_LATE);
        return;
    }
    enum dl_verdict verdict = !intact ? DL_VERDICT_CHECKSUM : !isfinite(norm) ? DL_VERDICT_NOT_FINITE : DL_VERDICT_ACCEPTED;
    sy_verdict(core, m, fragment, round_id, verdict);
    if (verdict != DL_VERDICT_ACCEPTED) {
        part->state = SY_PART_REFUSED;
        sy_act_text(core, SY_ACT_NOTE, m, true, "push refused learner=%u fragment=%u round=%" PRIu64 " reason=%s",
                    core->members[m].learner, fragment, round_id, dl_verdict_name(verdict));
    } else {
        part->state = SY_PART_HAVE;
        part->push.norm = norm;
    }
    sy_round_evaluate(core, now_ns, index);
}

void sy_core_on_push_none(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_push_none *none)
{
    uint32_t index = sy_local(core, none->fragment);
    core->members[m].heard_ns = now_ns;
    if (index == UINT32_MAX) {
        return;
    }
    struct sy_round *round = &core->fragments[index].open;
    if (none->reason == DL_VERDICT_ABORTED && round->id == none->round && round->parts[m].state == SY_PART_PUSHING) {
        /* The shell has no room for a push that it announced. */
        round->parts[m].state = core->fragments[index].version == 0 ? SY_PART_NONE : SY_PART_ANSWERED;
        core->members[m].fragments[index].steps = 0;
        sy_verdict(core, m, none->fragment, none->round, DL_VERDICT_ABORTED);
        sy_round_evaluate(core, now_ns, index);
        return;
    }
    if (round->state == SY_ROUND_PULLING && round->id == none->round && round->parts[m].state == SY_PART_ASKED) {
        round->parts[m].state = SY_PART_ANSWERED;
        core->members[m].fragments[index].steps = 0;
        core->verdicts[DL_VERDICT_NOTHING]++;
        sy_round_evaluate(core, now_ns, index);
    }
}

void sy_round_member_left(struct sy_core *core, int64_t now_ns, uint32_t m)
{
    for (uint32_t f = 0; f < core->fragment_count; f++) {
        struct sy_round *round = &core->fragments[f].open;
        enum sy_part_state state = round->parts[m].state;
        core->members[m].fragments[f].steps = 0; /* Unknown until it is heard again. */
        if (state == SY_PART_PUSHING) {
            core->verdicts[DL_VERDICT_ABORTED]++;
        }
        if (state == SY_PART_PUSHING || state == SY_PART_ASKED) {
            round->parts[m].state = SY_PART_NONE;
            sy_round_evaluate(core, now_ns, f);
        }
    }
}

/* --- quorum, grace, closing --------------------------------------------------------------------------------------------- */

/* ALGORITHM step 4: slack = tau step_time - (quorum_time + sync_time); wait at most gamma slack. In warm-up learners stand
 * still meanwhile, so that the slack is the interval itself. */
static double grace_seconds(const struct sy_core *core, const struct sy_round *round)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    double step = sy_step_seconds(core);
    double quorum_time = (double)(round->quorum_ns - round->opened_ns) * 1e-9;
    if (sync->grace.mode == DL_GRACE_NONE) {
        return 0;
    }
    if (sync->grace.mode == DL_GRACE_FIXED) {
        return sync->grace.max_seconds;
    }
    double slack = round->warmup ? sync->warmup.interval * step : sync->overlap * step - (quorum_time + core->sync_seconds);
    return DL_MIN(DL_MAX(sync->grace.margin * slack, 0.0), sync->grace.max_seconds);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double sy_norm_median(double *norms, uint32_t count)
{
    qsort(norms, count, sizeof *norms, compare_doubles);
    return count % 2 == 1 ? norms[count / 2] : (norms[count / 2 - 1] + norms[count / 2]) / 2;
}

/* Refuses pushes whose delta norm is absurd against the round's median; returns how many are left. */
static uint32_t refuse_outliers(struct sy_core *core, uint32_t index)
{
    struct sy_round *round = &core->fragments[index].open;
    uint32_t have = 0;
    for (uint32_t m = 0; m < core->member_max; m++) {
        if (round->parts[m].state == SY_PART_HAVE) {
            core->norms[have++] = round->parts[m].push.norm;
        }
    }
    if (have < SY_NORM_CHECK_LEARNERS) {
        return have;
    }
    double limit = sy_norm_median(core->norms, have) * core->spec->sync.merge.norm_limit;
    for (uint32_t m = 0; m < core->member_max; m++) {
        struct sy_part *part = &round->parts[m];
        if (part->state == SY_PART_HAVE && part->push.norm > limit) {
            part->state = SY_PART_REFUSED;
            have--;
            core->verdicts[DL_VERDICT_ACCEPTED]--;
            sy_verdict(core, m, sy_global(core, index), round->id, DL_VERDICT_NORM);
            sy_act_text(core, SY_ACT_NOTE, m, true, "push refused learner=%u fragment=%u round=%" PRIu64
                        " reason=norm norm=%g limit=%g", part->push.learner, sy_global(core, index), round->id,
                        part->push.norm, limit);
        }
    }
    return have;
}

static int compare_participants(const void *a, const void *b)
{
    const struct sy_participant *x = a, *y = b;
    if (x->learner != y->learner) {
        return x->learner < y->learner ? -1 : 1;
    }
    return x->admission < y->admission ? -1 : 1;
}

static double weight(const struct sy_core *core, const struct sy_participant *push, uint64_t version)
{
    const struct dl_sync_spec *sync = &core->spec->sync;
    if (sync->merge.weighting == DL_WEIGHT_EQUAL) {
        return 1;
    }
    double tokens = (double)push->tokens;
    double behind = (double)(version - push->base_version);
    return tokens * (tokens / push->steps) * exp(-sync->merge.staleness_decay * behind);
}

static void close_round(struct sy_core *core, int64_t now_ns, uint32_t index)
{
    struct sy_fragment_state *fragment = &core->fragments[index];
    struct sy_round *round = &fragment->open;
    round->participant_count = 0;
    for (uint32_t m = 0; m < core->member_max; m++) {
        if (round->parts[m].state == SY_PART_HAVE) {
            struct sy_participant *participant = &round->participants[round->participant_count++];
            *participant = round->parts[m].push;
            participant->weight = weight(core, participant, fragment->version);
        }
    }
    qsort(round->participants, round->participant_count, sizeof *round->participants, compare_participants);
    round->state = SY_ROUND_MERGING;
    round->closed_ns = now_ns;
    sy_act(core, &(struct sy_queued){.type = SY_ACT_MERGE, .member = SY_NO_MEMBER, .fragment = sy_global(core, index),
                                     .round = round->id, .version = fragment->version + 1, .text = -1});
}

void sy_round_evaluate(struct sy_core *core, int64_t now_ns, uint32_t index)
{
    struct sy_round *round = &core->fragments[index].open;
    if (round->state != SY_ROUND_PULLING) {
        return;
    }
    uint32_t have = count_parts(core, round, SY_PART_HAVE);
    bool all_in = count_parts(core, round, SY_PART_ASKED) + count_parts(core, round, SY_PART_PUSHING) == 0;
    bool is_over = core->stopping && now_ns >= core->finish_end_ns;
    if (round->final || core->stopping) {
        /* The last rounds wait for all that was asked, within the bound of the finish. */
        if (have > 0 && (all_in || is_over)) {
            close_round(core, now_ns, index);
        } else if (have == 0 && (all_in || is_over)) {
            round->state = SY_ROUND_IDLE;
        }
        return;
    }
    if (have < round->need) {
        round->quorum_ns = INT64_MIN;
        return;
    }
    if (round->quorum_ns == INT64_MIN) {
        round->quorum_ns = now_ns;
        core->grace_seconds = grace_seconds(core, round);
        round->grace_end_ns = now_ns + sy_ns(core->grace_seconds);
    }
    if (!all_in && now_ns < round->grace_end_ns) {
        return;
    }
    if (refuse_outliers(core, index) < round->need) {
        round->quorum_ns = INT64_MIN; /* Whoever has trained meanwhile is asked again at its next META. */
        return;
    }
    close_round(core, now_ns, index);
}

/* --- commit ------------------------------------------------------------------------------------------------------------- */

uint32_t sy_core_participants(const struct sy_core *core, uint32_t fragment, const struct sy_participant **out)
{
    uint32_t index = sy_local(core, fragment);
    if (index == UINT32_MAX || core->fragments[index].open.state != SY_ROUND_MERGING) {
        return 0;
    }
    *out = core->fragments[index].open.participants;
    return core->fragments[index].open.participant_count;
}

static void observe_times(struct sy_core *core, const struct sy_round *round, int64_t now_ns, int64_t merge_ns,
                          int64_t commit_ns)
{
    struct sy_round_times *t = &core->times;
    int64_t first = round->first_ns != INT64_MIN ? round->first_ns : round->opened_ns;
    int64_t quorum = round->quorum_ns != INT64_MIN ? round->quorum_ns : round->closed_ns;
    t->wait = sy_estimate(t->wait, (double)(first - round->opened_ns) * 1e-9);
    t->transfer = sy_estimate(t->transfer, (double)(quorum - first) * 1e-9);
    t->grace = sy_estimate(t->grace, (double)(round->closed_ns - quorum) * 1e-9);
    t->merge = sy_estimate(t->merge, (double)merge_ns * 1e-9);
    t->commit = sy_estimate(t->commit, (double)commit_ns * 1e-9);
    t->total = sy_estimate(t->total, (double)(now_ns - round->opened_ns) * 1e-9);
    core->sync_seconds = sy_estimate(core->sync_seconds, (double)(now_ns - round->closed_ns) * 1e-9);
}

static void count_merge(struct sy_core *core, uint32_t index)
{
    struct sy_round *round = &core->fragments[index].open;
    for (uint32_t i = 0; i < round->participant_count; i++) {
        const struct sy_participant *p = &round->participants[i];
        struct sy_member *member = &core->members[p->member];
        member->fragments[index].merged_base = DL_MAX(member->fragments[index].merged_base, p->base_version);
        member->pushes_merged++;
        core->tokens_merged += (double)p->tokens / core->fragment_count;
    }
    core->rounds_merged++;
}

void sy_core_on_committed(struct sy_core *core, int64_t now_ns, uint32_t global, int64_t merge_ns, int64_t commit_ns)
{
    uint32_t index = sy_local(core, global);
    assert(index != UINT32_MAX && core->fragments[index].open.state == SY_ROUND_MERGING);
    struct sy_fragment_state *fragment = &core->fragments[index];
    struct sy_round *round = &fragment->open;
    core->delayed[0] = 0;
    fragment->version++;
    fragment->round = round->id;
    if (!round->seeding) {
        observe_times(core, round, now_ns, merge_ns, commit_ns);
        count_merge(core, index);
    }
    round->state = SY_ROUND_IDLE;
    round->seeding = false;
    for (uint32_t m = 0; m < core->member_max; m++) {
        round->parts[m].state = SY_PART_NONE;
    }
    sy_act(core, &(struct sy_queued){.type = SY_ACT_BROADCAST, .member = SY_NO_MEMBER, .fragment = global,
                                     .round = fragment->round, .version = fragment->version, .text = -1});
    sy_finish_check(core, now_ns);
    sy_pace(core, now_ns);
    sy_finish_step(core, now_ns);
}

void sy_core_on_commit_delayed(struct sy_core *core, int64_t now_ns, uint32_t fragment, const char *reason)
{
    (void)now_ns;
    if (core->delayed[0] == 0) {
        sy_act_text(core, SY_ACT_NOTE, SY_NO_MEMBER, true, "commit delayed fragment=%u: %.180s", fragment, reason);
    }
    snprintf(core->delayed, sizeof core->delayed, "%s", reason);
}
