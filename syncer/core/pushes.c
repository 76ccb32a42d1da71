/* sy_core, what becomes of a push. Every PUSH gets exactly one verdict, counted once: at its announcement when it is
 * refused there, else when it is received, when its round closes, or when its connection or round ends. */
#include <assert.h>
#include <math.h>

#include "common/mem.h"
#include "syncer/core/state.h"

void sy_part_decide(struct sy_core *core, uint32_t local, uint32_t m, enum dl_verdict verdict, bool tell,
                    enum sy_part_state state)
{
    struct sy_round *round = &core->rounds[local];
    struct sy_part *part = &core->members[m].parts[local];
    assert(part->state == SY_PART_ANNOUNCED || part->state == SY_PART_RECEIVED);
    if (part->state == SY_PART_ANNOUNCED) {
        round->outstanding--;
    } else {
        round->have--;
    }
    part->state = state;
    part->answered_step = core->members[m].step;
    core->verdicts[verdict]++;
    if (tell) {
        sy_queue_result(core, m, round->number, sy_fragment_index(core, local), verdict);
    }
}

/* --- announced --- */

static bool makes_sense(const struct sy_member *member, const struct dl_wire_push *push, bool seed,
                        uint64_t expected_bytes)
{
    if (push->bytes != expected_bytes || push->steps > push->step) {
        return false;
    }
    if (seed) {
        return true;
    }
    /* A push may come a little before the report of its boundary; beyond that, no learner has trained more in one
     * fragment than in all. */
    uint64_t ahead = push->step > member->step ? push->step - member->step : 0;
    uint64_t per_step = SY_CORE_TOKENS_PER_STEP_MAX;
    return push->steps > 0 && push->tokens > 0 && push->tokens / push->steps <= per_step &&
           (ahead > 0 || push->tokens <= member->tokens);
}

static enum dl_verdict base_verdict(const struct sy_core *core, const struct sy_round *round,
                                    const struct sy_part *part, uint64_t base)
{
    if (base == 0 || base > round->version || base < round->floor) {
        return DL_VERDICT_STALE_BASE;
    }
    if (part->merged && base <= part->merged_base) {
        return base == part->merged_base ? DL_VERDICT_DUPLICATE : DL_VERDICT_STALE_BASE;
    }
    return round->version - base > core->spec->sync.merge.staleness_max ? DL_VERDICT_STALE_BASE : DL_VERDICT_ACCEPTED;
}

static enum dl_verdict judge(const struct sy_core *core, uint32_t local, uint32_t m, const struct dl_wire_push *push,
                             uint64_t expected_bytes)
{
    const struct sy_member *member = &core->members[m];
    if (local == UINT32_MAX) {
        return DL_VERDICT_MALFORMED;
    }
    const struct sy_round *round = &core->rounds[local];
    const struct sy_part *part = &member->parts[local];
    bool seeding = round->state == SY_ROUND_SEEDING || round->state == SY_ROUND_SEEDED;
    if (push->round == 0 || push->round > round->number) {
        return DL_VERDICT_UNKNOWN_ROUND;
    }
    /* First, also while it is being merged: "late" would tell the shell to let go of the push that it holds. */
    if (push->round == round->number && (part->state == SY_PART_ANNOUNCED || part->state == SY_PART_RECEIVED)) {
        return DL_VERDICT_DUPLICATE;
    }
    if (push->round < round->number || !(sy_round_is_open(round) || seeding)) {
        return DL_VERDICT_LATE;
    }
    if (!makes_sense(member, push, seeding, expected_bytes)) {
        return DL_VERDICT_MALFORMED;
    }
    if (seeding) {
        return m == core->seeder ? DL_VERDICT_ACCEPTED : DL_VERDICT_UNKNOWN_ROUND;
    }
    enum dl_verdict verdict = sy_lease_judge(core, m, push);
    return verdict == DL_VERDICT_ACCEPTED ? base_verdict(core, round, part, push->base_version) : verdict;
}

enum dl_verdict sy_core_on_push(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_push *push,
                                uint64_t expected_bytes)
{
    sy_event(core, now_ns);
    assert(m < core->slots);
    struct sy_member *member = &core->members[m];
    uint32_t i = sy_fragment_local(core, push->fragment);
    member->heard_ns = member->meta_ns = core->now_ns;
    core->pushes++;
    enum dl_verdict verdict = sy_is_learner(member) ? judge(core, i, m, push, expected_bytes) : DL_VERDICT_MALFORMED;
    if (verdict != DL_VERDICT_ACCEPTED) {
        core->verdicts[verdict]++;
        sy_queue_result(core, m, push->round, push->fragment, verdict);
        if (verdict == DL_VERDICT_MALFORMED || verdict == DL_VERDICT_STALE_BASE || verdict == DL_VERDICT_LEASE_LOST) {
            sy_queue_note(
                core, true,
                "push refused learner=%u round=%llu fragment=%u verdict=%s base=%llu steps=%u tokens=%llu bytes=%llu",
                member->learner, (unsigned long long)push->round, push->fragment, dl_verdict_name(verdict),
                (unsigned long long)push->base_version, push->steps, (unsigned long long)push->tokens,
                (unsigned long long)push->bytes);
        }
        bool asked =
            i != UINT32_MAX && member->parts[i].state == SY_PART_ASKED && push->round == core->rounds[i].number;
        if (asked) {
            /* It has answered, if not well. On a base that is too old it has something better from its next step on. */
            core->rounds[i].outstanding--;
            member->parts[i].state = verdict == DL_VERDICT_STALE_BASE ? SY_PART_DECLINED : SY_PART_REFUSED;
            member->parts[i].answered_step = member->step;
        }
        sy_settle(core);
        return verdict;
    }
    struct sy_part *part = &member->parts[i];
    core->rounds[i].outstanding += part->state == SY_PART_ASKED ? 0 : 1;
    part->state = SY_PART_ANNOUNCED;
    part->admission = member->admission;
    part->base_version = push->base_version;
    part->push_step = push->step;
    part->offered_step = DL_MAX(push->step, member->step);
    part->push_steps = push->steps;
    part->push_tokens = push->tokens;
    part->lease = push->lease;
    part->cursor = push->cursor;
    part->announced_ns = core->now_ns;
    return verdict;
}

/* --- received --- */

void sy_core_on_push_received(struct sy_core *core, int64_t now_ns, uint32_t m, uint64_t round_number,
                              uint32_t fragment, bool intact, double norm)
{
    sy_event(core, now_ns);
    assert(m < core->slots);
    uint32_t i = sy_fragment_local(core, fragment);
    assert(i != UINT32_MAX);
    struct sy_member *member = &core->members[m];
    struct sy_round *round = &core->rounds[i];
    struct sy_part *part = &member->parts[i];
    member->heard_ns = core->now_ns;
    if (part->state != SY_PART_ANNOUNCED || round->number != round_number) {
        return; /* Decided meanwhile. */
    }
    if (!intact || !isfinite(norm) || norm < 0) {
        enum dl_verdict verdict = intact ? DL_VERDICT_NOT_FINITE : DL_VERDICT_CHECKSUM;
        sy_queue_note(core, true, "push refused learner=%u uid=%.40s round=%llu fragment=%u verdict=%s",
                      member->learner, member->uid, (unsigned long long)round_number, fragment,
                      dl_verdict_name(verdict));
        sy_part_decide(core, i, m, verdict, true, SY_PART_REFUSED);
    } else {
        sy_mean_add(&core->transfer_mean, sy_seconds(core->now_ns - part->announced_ns));
        round->outstanding--;
        round->have++;
        part->state = SY_PART_RECEIVED;
        part->norm = norm;
        if (round->state == SY_ROUND_SEEDING) {
            sy_seed_received(core, i);
        }
    }
    sy_settle(core);
}

/* --- none --- */

void sy_core_on_push_none(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_push_none *none)
{
    sy_event(core, now_ns);
    assert(m < core->slots);
    struct sy_member *member = &core->members[m];
    uint32_t i = sy_fragment_local(core, none->fragment);
    enum dl_verdict reason = none->reason > DL_VERDICT_ACCEPTED && none->reason < DL_VERDICT_COUNT
                                 ? (enum dl_verdict)none->reason
                                 : DL_VERDICT_MALFORMED;
    member->heard_ns = core->now_ns;
    bool mine = i != UINT32_MAX && sy_is_learner(member) && core->rounds[i].number == none->round;
    struct sy_part *part = mine ? &member->parts[i] : NULL;
    if (part != NULL && part->state == SY_PART_ANNOUNCED) {
        sy_part_decide(core, i, m, reason, false, SY_PART_REFUSED); /* The shell had no room for it. */
    } else {
        core->nones++;
        core->verdicts[reason]++;
        if (part != NULL && part->state == SY_PART_ASKED) {
            core->rounds[i].outstanding--;
            part->state = SY_PART_DECLINED;
            part->answered_step = member->step;
        }
    }
    sy_settle(core);
}
