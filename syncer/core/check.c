/* sy_core, its invariants, for tests and simulation. */
#include <stddef.h>

#include "common/mem.h"
#include "syncer/core/state.h"

static const char *check_members(const struct sy_core *core)
{
    uint32_t learners = 0, evaluators = 0, markers = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        markers += member->marker_awaited ? 1 : 0;
        if (member->marker_awaited && !sy_is_learner(member)) {
            return "a marker is awaited from nobody";
        }
        if (!member->connected) {
            continue;
        }
        learners += member->role == DL_ROLE_LEARNER ? 1 : 0;
        evaluators += member->role == DL_ROLE_EVALUATOR ? 1 : 0;
        for (uint32_t k = m + 1; k < core->slots; k++) {
            const struct sy_member *other = &core->members[k];
            if (other->connected && other->role == member->role && other->learner == member->learner) {
                return "two connected members have the same learner id";
            }
        }
    }
    if (markers != core->markers_awaited) {
        return "the count of markers is wrong";
    }
    if (learners != core->connected || evaluators != core->evaluators) {
        return "the counts of connected members are wrong";
    }
    return learners > core->learners_max ? "more learners are connected than learners.max" : NULL;
}

static const char *check_participants(const struct sy_core *core, const struct sy_round *round)
{
    for (uint32_t k = 0; k < round->participant_count; k++) {
        const struct sy_participant *who = &round->participants[k];
        if (k > 0 && who->learner <= round->participants[k - 1].learner) {
            return "participants are not in ascending order of learner id";
        }
        if (!(who->weight >= 0) || who->steps == 0 || who->tokens == 0 || who->base_version > round->version) {
            return "a participant has no weight, no steps, or a base from the future";
        }
        if (core->members[who->member].parts == NULL || !core->members[who->member].used) {
            return "a participant is nobody";
        }
    }
    return round->participant_count > core->learners_max ? "more participants than learners.max" : NULL;
}

static const char *check_round(const struct sy_core *core, uint32_t local, uint64_t *in_flight)
{
    const struct sy_round *round = &core->rounds[local];
    uint32_t have = 0, outstanding = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        const struct sy_part *part = &member->parts[local];
        bool waits = part->state == SY_PART_ASKED || part->state == SY_PART_ANNOUNCED;
        if (waits && !sy_is_learner(member)) {
            return "something is expected from a member that is not there";
        }
        outstanding += waits ? 1 : 0;
        have += part->state == SY_PART_RECEIVED ? 1 : 0;
        bool decided = round->state == SY_ROUND_MERGING || round->state == SY_ROUND_STORING;
        *in_flight += part->state == SY_PART_ANNOUNCED || (part->state == SY_PART_RECEIVED && !decided) ? 1 : 0;
    }
    if (have != round->have || outstanding != round->outstanding) {
        return "a round miscounts its pushes";
    }
    bool active = sy_round_is_open(round) || round->state == SY_ROUND_SEEDING;
    if (!active && outstanding > 0) {
        return "something is expected in a round that is not open";
    }
    if (round->state == SY_ROUND_IDLE && have > 0) {
        return "a push is held without a round";
    }
    if (round->state == SY_ROUND_MERGING && (round->participant_count == 0 || round->participant_count != have)) {
        return "a merge without its participants";
    }
    if (round->state != SY_ROUND_MERGING && round->participant_count > 0) {
        return "participants without a merge";
    }
    bool seeding = round->state == SY_ROUND_SEEDING || round->state == SY_ROUND_SEEDED;
    if (seeding && core->seeder == SY_NO_MEMBER) {
        return "a seed is awaited from nobody";
    }
    if (round->number >= core->next_round) {
        return "a round number was given that was not drawn";
    }
    return check_participants(core, round);
}

const char *sy_core_check(const struct sy_core *core)
{
    const char *fault = check_members(core);
    uint64_t in_flight = 0;
    for (uint32_t i = 0; i < core->fragments && fault == NULL; i++) {
        fault = check_round(core, i, &in_flight);
    }
    fault = fault == NULL ? sy_ledger_check(&core->ledger) : fault;
    if (fault != NULL) {
        return fault;
    }
    uint64_t decided = 0;
    for (uint32_t v = 0; v < DL_VERDICT_COUNT; v++) {
        decided += core->verdicts[v];
    }
    if (decided + in_flight != core->pushes + core->nones) {
        return "verdicts do not add up to the pushes";
    }
    if (core->seeder != SY_NO_MEMBER && !sy_is_learner(&core->members[core->seeder])) {
        return "the seeder is not connected";
    }
    if ((core->phase == SY_FINISHING || core->phase == SY_ENDED) != core->finishing) {
        return "the phase does not say that the job is finishing";
    }
    return core->phase == SY_WAITING_FOR_QUORUM && core->connected >= core->quorum ? "waiting for a quorum that is here"
                                                                                   : NULL;
}
