/* sy_core, a round's life: pulls, quorum, grace window, close, commit. */
#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/state.h"
#include "syncer/merge/merge.h"

#define SLOWER 1.5      /* A learner whose steps take so many times as long as those of who sets the pace is slow. */
#define MISSED_ROUNDS 2 /* In a row, after which even one that is not may offer what missed them. */
#define TRIED_EVERY 16  /* Rounds in which it does so, at most, until a fresh push is tried again. */
#define EARLY_STEP 0.5  /* A boundary may come after so much of the time that the last steps took. */

void sy_round_move(struct sy_round *round, enum sy_round_state to)
{
    static const bool allowed[SY_ROUND_STATES][SY_ROUND_STATES] = {
        [SY_ROUND_IDLE] = {[SY_ROUND_PULLING] = true, [SY_ROUND_SEEDING] = true},
        [SY_ROUND_PULLING] = {[SY_ROUND_GRACE] = true, [SY_ROUND_IDLE] = true},
        [SY_ROUND_GRACE] = {[SY_ROUND_PULLING] = true, [SY_ROUND_MERGING] = true, [SY_ROUND_IDLE] = true},
        [SY_ROUND_MERGING] = {[SY_ROUND_IDLE] = true},
        [SY_ROUND_SEEDING] = {[SY_ROUND_SEEDED] = true, [SY_ROUND_IDLE] = true},
        [SY_ROUND_SEEDED] = {[SY_ROUND_STORING] = true, [SY_ROUND_IDLE] = true},
        [SY_ROUND_STORING] = {[SY_ROUND_IDLE] = true},
    };
    assert(allowed[round->state][to]);
    round->state = to;
}

/* --- whom to pull --- */

/* Holds the current version and has trained on it, as far as it has reported. With an older one an update is on its
 * way, after which there is nothing to push until the next step. */
static bool is_eligible(const struct sy_core *core, const struct sy_member *member, uint32_t local)
{
    const struct sy_part *part = &member->parts[local];
    return sy_is_training(member) && part->version == core->rounds[local].version && part->steps >= 1;
}

/* May have something to give by its next boundary. One that holds the current version may have reported no step on it yet,
 * but will have taken one by then: were it asked only after that step, a learner whose steps are long would come too late
 * for good. One that holds an older version may have work on it that missed its round (worker/link/link_missed.c), as long
 * as a push on that base would be accepted. */
static bool is_worth_asking(const struct sy_core *core, const struct sy_member *member, uint32_t local)
{
    const struct sy_part *part = &member->parts[local];
    const struct sy_round *round = &core->rounds[local];
    if (!sy_is_training(member) || part->version > round->version) {
        return false;
    }
    bool merged = part->merged && part->version <= part->merged_base;
    return part->version == round->version || (part->version >= round->floor && !merged &&
                                               round->version - part->version <= core->spec->sync.merge.staleness_max);
}

bool sy_round_is_ready(const struct sy_core *core, uint32_t local, uint32_t need)
{
    if (core->rounds[local].state != SY_ROUND_IDLE) {
        return false;
    }
    uint32_t eligible = 0;
    for (uint32_t m = 0; m < core->slots && eligible < need; m++) {
        eligible += is_eligible(core, &core->members[m], local) ? 1 : 0;
    }
    return eligible >= need;
}

/* Of a learner that offers what missed a round: whether a fresh push is worth a trial, which costs what it would offer. At
 * 4, 8, 16, 32, 48, ... rounds missed in a row: who was late by chance is soon back, who is behind a slow link loses little. */
static bool is_trial(uint32_t missed)
{
    return missed > MISSED_ROUNDS && (missed % TRIED_EVERY == 0 || (missed & (missed - 1)) == 0);
}

/* Whether a push that missed an earlier round is wanted of this learner now. A slow one comes in time by chance only; without
 * that it would work in vain. Of the others a fresh push is better, as long as it comes in time: what is offered a round late
 * takes a fresh one's place, and so on. */
static bool is_missed_wanted(const struct sy_round *round, const struct sy_member *member, const struct sy_part *part)
{
    bool slow = round->pace_seconds > 0 && member->step_seconds > SLOWER * round->pace_seconds;
    bool late = part->missed >= MISSED_ROUNDS && !is_trial(part->missed);
    return slow || late || part->version < round->version;
}

void sy_round_ask(struct sy_core *core, uint32_t local, uint32_t member)
{
    struct sy_round *round = &core->rounds[local];
    struct sy_part *part = &core->members[member].parts[local];
    bool seed = round->state == SY_ROUND_SEEDING;
    struct sy_limits limits = sy_pace_limits(core);
    bool nobody_waits = !seed && !round->warmup && limits.update_within_steps == DL_UNBOUNDED;
    bool missed = nobody_waits && is_missed_wanted(round, &core->members[member], part);
    part->state = SY_PART_ASKED;
    round->outstanding++;
    round->asked++;
    sy_queue(core, &(struct sy_queued){
                       .type = SY_ACT_PULL,
                       .member = member,
                       .fragment = sy_fragment_index(core, local),
                       .round = round->number,
                       .version = round->version,
                       .flags = (uint8_t)((seed ? DL_PULL_SEED : 0) | (round->warmup ? DL_PULL_WARMUP : 0) |
                                          (round->final ? DL_PULL_FINAL : 0) | (missed ? DL_PULL_MISSED : 0)),
                       .pull_within_steps = seed ? DL_UNBOUNDED : limits.pull_within_steps,
                       .update_within_steps = seed ? DL_UNBOUNDED : limits.update_within_steps,
                       .wait_ms = seed ? 0 : limits.wait_ms,
                   });
}

void sy_round_open(struct sy_core *core, uint32_t local, uint32_t warm_need)
{
    struct sy_round *round = &core->rounds[local];
    sy_round_move(round, SY_ROUND_PULLING);
    round->number = core->next_round++;
    round->order = ++core->orders;
    round->have = round->outstanding = round->asked = 0;
    round->warmup = warm_need > 0;
    round->need = DL_MAX(warm_need, core->quorum);
    round->final = core->finishing;
    round->opened_ns = core->now_ns;
    round->pace_seconds = sy_pace_step_seconds(core);
    round->deadline_ns = INT64_MAX;
    round->soften_ns = round->warmup ? core->now_ns + sy_warm_stall_ns(core) : INT64_MAX;
    for (uint32_t m = 0; m < core->slots; m++) {
        core->members[m].parts[local].state = SY_PART_NONE;
    }
    /* Where learners wait, a pull is also what lets them go on; so it goes to those, too, that have nothing to push. */
    bool waiting_form = round->warmup || core->spec->sync.mode == DL_SYNC_SYNCHRONOUS;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (is_worth_asking(core, member, local) || (waiting_form && sy_is_training(member))) {
            sy_round_ask(core, local, m);
        }
    }
}

/* Whether somebody may still come within the window. A learner whose next boundary lies beyond it, by the pace of its last
 * steps, does not hold the round open in vain. */
static bool may_come(const struct sy_core *core, uint32_t local)
{
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        enum sy_part_state state = member->parts[local].state;
        int64_t boundary_ns = member->meta_ns + sy_ns(EARLY_STEP * fmax(member->step_seconds, 0));
        bool in_time = boundary_ns <= core->rounds[local].deadline_ns;
        if (state == SY_PART_ANNOUNCED || (state == SY_PART_ASKED && in_time)) {
            return true;
        }
    }
    return false;
}

static bool transfers(const struct sy_core *core, uint32_t local)
{
    for (uint32_t m = 0; m < core->slots; m++) {
        if (core->members[m].parts[local].state == SY_PART_ANNOUNCED) {
            return true;
        }
    }
    return false;
}

/* A push that has waited for the quorum for H steps of its learner is replaced by a fresh one: what the learner has
 * trained since would be lost when the old one's update is applied. Not while another push is on its way, which may
 * complete the quorum with what is here. */
static bool is_outdated(const struct sy_core *core, const struct sy_member *member, uint32_t local)
{
    const struct sy_part *part = &member->parts[local];
    return core->rounds[local].state == SY_ROUND_PULLING &&
           member->step >= part->offered_step + core->spec->sync.interval && !transfers(core, local);
}

void sy_rounds_ask(struct sy_core *core, uint32_t m)
{
    const struct sy_member *member = &core->members[m];
    for (uint32_t i = 0; i < core->fragments; i++) {
        struct sy_part *part = &member->parts[i];
        if (!sy_round_is_open(&core->rounds[i]) || !is_eligible(core, member, i)) {
            continue;
        }
        switch (part->state) {
        case SY_PART_NONE: sy_round_ask(core, i, m); break;
        case SY_PART_DECLINED:
            if (member->step > part->answered_step) {
                sy_round_ask(core, i, m);
            }
            break;
        case SY_PART_REFUSED:
            /* Not at every step: what made it worthless will often still be there. */
            if (member->step >= part->answered_step + core->spec->sync.interval) {
                sy_round_ask(core, i, m);
            }
            break;
        case SY_PART_RECEIVED:
            if (is_outdated(core, member, i)) {
                sy_part_decide(core, i, m, DL_VERDICT_BELOW_QUORUM, true, SY_PART_NONE);
                sy_round_ask(core, i, m);
            }
            break;
        case SY_PART_ASKED:
        case SY_PART_ANNOUNCED: break;
        }
    }
}

/* --- closing --- */

/* The pushes that the quorum is about: what missed an earlier round comes at once, and would else close the round on those
 * that set its pace. */
static uint32_t count_fresh(const struct sy_core *core, uint32_t local)
{
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_part *part = &core->members[m].parts[local];
        count += part->state == SY_PART_RECEIVED && part->base_version == core->rounds[local].version ? 1 : 0;
    }
    return count;
}

/* In warm-up the need falls to what can still come, and after the stall bound to K. */
static uint32_t need_now(const struct sy_core *core, const struct sy_round *round)
{
    if (!round->warmup) {
        return core->quorum;
    }
    bool soft = core->now_ns >= round->soften_ns;
    uint32_t possible = round->have + round->outstanding;
    return soft ? core->quorum : DL_MAX(DL_MIN(round->need, possible), core->quorum);
}

static void refuse_absurd(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    double *norms = core->scratch, *sorted = core->scratch + core->slots;
    uint32_t count = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_part *part = &core->members[m].parts[local];
        if (part->state == SY_PART_RECEIVED) {
            norms[count++] = part->norm;
        }
    }
    uint32_t at = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        struct sy_part *part = &core->members[m].parts[local];
        if (part->state != SY_PART_RECEIVED) {
            continue;
        }
        uint32_t index = at++;
        if (sy_norm_check(norms, count, index, core->spec->sync.merge.norm_limit, sorted)) {
            sy_queue_note(
                core, true,
                "push refused learner=%u uid=%.40s round=%llu fragment=%u verdict=norm norm=%g median=%g limit=%g",
                core->members[m].learner, core->members[m].uid, (unsigned long long)round->number,
                sy_fragment_index(core, local), part->norm, sy_median(sorted, count, false),
                core->spec->sync.merge.norm_limit);
            sy_part_decide(core, local, m, DL_VERDICT_NORM, true, SY_PART_REFUSED);
        }
    }
}

static void add_participant(struct sy_core *core, uint32_t local, uint32_t m)
{
    struct sy_round *round = &core->rounds[local];
    const struct sy_member *member = &core->members[m];
    struct sy_part *part = &member->parts[local];
    struct sy_participant who = {
        .member = m,
        .learner = member->learner,
        .admission = part->admission,
        .step = part->push_step,
        .base_version = part->base_version,
        .steps = part->push_steps,
        .tokens = part->push_tokens,
        .weight = sy_merge_weight(&core->spec->sync, part->push_steps, part->push_tokens,
                                  round->version - part->base_version),
        .norm = part->norm,
        .lease = part->lease,
        .cursor = part->cursor,
    };
    uint32_t at = round->participant_count++;
    for (; at > 0 && round->participants[at - 1].learner > who.learner; at--) {
        round->participants[at] = round->participants[at - 1];
    }
    round->participants[at] = who;
}

/* Those that are connected first, so that what is beyond the room in a merge is of learners that have left. */
static void gather(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    round->participant_count = 0;
    for (int connected = 1; connected >= 0; connected--) {
        for (uint32_t m = 0; m < core->slots; m++) {
            const struct sy_member *member = &core->members[m];
            if (member->parts[local].state != SY_PART_RECEIVED || member->connected != (connected == 1)) {
                continue;
            }
            if (round->participant_count == core->learners_max) {
                sy_part_decide(core, local, m, DL_VERDICT_ABORTED, true, SY_PART_NONE);
            } else {
                add_participant(core, local, m);
            }
        }
    }
}

static void settle_parts(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    for (uint32_t m = 0; m < core->slots; m++) {
        struct sy_part *part = &core->members[m].parts[local];
        switch (part->state) {
        case SY_PART_ASKED:
            part->state = SY_PART_NONE;
            part->missed++;
            round->outstanding--;
            break;
        case SY_PART_ANNOUNCED:
            part->missed++;
            sy_part_decide(core, local, m, DL_VERDICT_LATE, true, SY_PART_NONE);
            break;
        case SY_PART_RECEIVED:
            part->missed = part->base_version == round->version ? 0 : part->missed + 1;
            part->merged = true;
            part->merged_base = part->base_version;
            core->verdicts[DL_VERDICT_ACCEPTED]++;
            sy_queue_result(core, m, round->number, sy_fragment_index(core, local), DL_VERDICT_ACCEPTED);
            break;
        case SY_PART_NONE:
        case SY_PART_DECLINED:
        case SY_PART_REFUSED: break;
        }
    }
}

static void close_round(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    refuse_absurd(core, local);
    if (count_fresh(core, local) < need_now(core, round)) {
        /* Somebody else's push may still make it whole; if not, the round is given up and a fresh one comes. */
        sy_round_move(round, SY_ROUND_PULLING);
        round->deadline_ns = core->now_ns + sy_ns(core->spec->sync.timeout_seconds);
        return;
    }
    gather(core, local);
    settle_parts(core, local);
    for (uint32_t k = 0; k < round->participant_count; k++) {
        sy_lease_count(core, &round->participants[k]);
    }
    assert(round->outstanding == 0 && round->participant_count >= 1);
    sy_round_move(round, SY_ROUND_MERGING);
    round->closed_ns = core->now_ns;
    round->deadline_ns = round->soften_ns = INT64_MAX;
    sy_mean_add(&core->grace_mean, sy_seconds(core->now_ns - round->quorum_ns));
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_MERGE,
                                       .member = SY_NO_MEMBER,
                                       .fragment = sy_fragment_index(core, local),
                                       .round = round->number,
                                       .version = round->version + 1});
}

void sy_round_abandon(struct sy_core *core, uint32_t local, enum dl_verdict verdict)
{
    struct sy_round *round = &core->rounds[local];
    uint32_t have = round->have;
    for (uint32_t m = 0; m < core->slots; m++) {
        struct sy_part *part = &core->members[m].parts[local];
        if (part->state == SY_PART_ASKED) {
            round->outstanding--;
            part->state = SY_PART_NONE;
        } else if (part->state == SY_PART_RECEIVED || part->state == SY_PART_ANNOUNCED) {
            sy_part_decide(core, local, m, verdict, true, SY_PART_NONE);
        }
    }
    assert(round->have == 0 && round->outstanding == 0);
    round->deadline_ns = round->soften_ns = INT64_MAX;
    sy_round_move(round, SY_ROUND_IDLE);
    sy_queue_note(core, true, "round given up round=%llu fragment=%u have=%u need=%u verdict=%s",
                  (unsigned long long)round->number, sy_fragment_index(core, local), have, need_now(core, round),
                  dl_verdict_name(verdict));
}

void sy_round_settle(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    if (round->state == SY_ROUND_GRACE) {
        close_round(core, local);
    }
    if (round->state == SY_ROUND_PULLING) { /* Closing may have come short, too. */
        sy_round_abandon(core, local, DL_VERDICT_BELOW_QUORUM);
    }
}

static void check_round(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    uint32_t need = need_now(core, round), fresh = count_fresh(core, local);
    if (round->state == SY_ROUND_GRACE && fresh < need) {
        sy_round_move(round, SY_ROUND_PULLING);
        round->deadline_ns = INT64_MAX;
    }
    if (round->state == SY_ROUND_PULLING && fresh >= need) {
        bool again = round->deadline_ns != INT64_MAX;
        round->quorum_ns = core->now_ns;
        core->grace_seconds = again ? 0 : sy_grace_window(core, round);
        sy_mean_add(&core->wait_mean, sy_seconds(core->now_ns - round->opened_ns));
        round->deadline_ns = core->now_ns + sy_ns(core->grace_seconds);
        sy_round_move(round, SY_ROUND_GRACE);
    }
    if (round->state == SY_ROUND_GRACE) {
        bool awaits = round->warmup ? sy_warm_awaits(core, local) : may_come(core, local);
        if (!awaits || core->now_ns >= round->deadline_ns) {
            close_round(core, local);
        }
    } else if (round->state == SY_ROUND_PULLING && core->now_ns >= round->deadline_ns) {
        sy_round_abandon(core, local, DL_VERDICT_BELOW_QUORUM);
    }
}

void sy_rounds_check(struct sy_core *core)
{
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (sy_round_is_open(&core->rounds[i])) {
            check_round(core, i);
        }
    }
}

/* --- commit --- */

static void count_merge(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    for (uint32_t k = 0; k < round->participant_count; k++) {
        struct sy_member *member = &core->members[round->participants[k].member];
        member->pushes_merged++;
        member->parts[local].merged_tokens += round->participants[k].tokens;
        member->parts[local].state = SY_PART_NONE;
        core->tokens_merged += round->participants[k].tokens;
    }
    core->rounds_merged++;
    round->have = 0;
    round->participant_count = 0;
    round->final_done = round->final;
    core->warm_released_ns = round->warmup ? core->now_ns : core->warm_released_ns;
    sy_mean_add(&core->store_mean, sy_seconds(core->now_ns - round->closed_ns));
    sy_mean_add(&core->total_mean, sy_seconds(core->now_ns - round->opened_ns));
}

static void broadcast(struct sy_core *core, uint32_t local)
{
    sy_peers_broadcast(core, local);
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_BROADCAST,
                                       .member = SY_NO_MEMBER,
                                       .fragment = sy_fragment_index(core, local),
                                       .round = core->rounds[local].made_round,
                                       .version = core->rounds[local].version});
}

void sy_core_on_committed(struct sy_core *core, int64_t now_ns, uint32_t fragment, int64_t merge_ns, int64_t commit_ns)
{
    sy_event(core, now_ns);
    uint32_t i = sy_fragment_local(core, fragment);
    assert(i != UINT32_MAX);
    struct sy_round *round = &core->rounds[i];
    assert(round->state == SY_ROUND_MERGING || round->state == SY_ROUND_STORING);
    bool seed = round->state == SY_ROUND_STORING;
    round->version++;
    round->made_round = seed ? 0 : round->number;
    round->committed_ns = core->now_ns;
    round->delayed = false;
    if (seed) {
        sy_seed_stored(core, i);
    } else {
        sy_mean_add(&core->merge_mean, sy_seconds(merge_ns));
        sy_mean_add(&core->commit_mean, sy_seconds(commit_ns));
        round->awaits_apply = true;
        count_merge(core, i);
    }
    sy_round_move(round, SY_ROUND_IDLE);
    if (core->phase != SY_ENDED && !seed) {
        broadcast(core, i);
    }
    /* Nobody hears of a first state before it is complete: another seeder must not receive parts of the last one's. */
    for (uint32_t k = 0; seed && core->phase != SY_ENDED && sy_is_seeded(core) && k < core->fragments; k++) {
        broadcast(core, k);
    }
    sy_settle(core);
}

void sy_core_on_commit_delayed(struct sy_core *core, int64_t now_ns, uint32_t fragment, const char *reason)
{
    sy_event(core, now_ns);
    uint32_t i = sy_fragment_local(core, fragment);
    assert(i != UINT32_MAX);
    struct sy_round *round = &core->rounds[i];
    assert(round->state == SY_ROUND_MERGING || round->state == SY_ROUND_STORING);
    if (!round->delayed) {
        sy_queue_note(core, true, "commit delayed round=%llu fragment=%u reason=\"%.160s\"",
                      (unsigned long long)round->number, fragment, reason);
    }
    round->delayed = true;
    snprintf(core->delay_text, sizeof core->delay_text, "fragment %u cannot be stored: %.200s", fragment, reason);
    sy_settle(core);
}

uint32_t sy_core_participants(const struct sy_core *core, uint32_t fragment, const struct sy_participant **out)
{
    uint32_t i = sy_fragment_local(core, fragment);
    assert(i != UINT32_MAX);
    *out = core->rounds[i].participants;
    return core->rounds[i].participant_count;
}
