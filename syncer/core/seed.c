/* sy_core, the first state: one learner's parameters become version 1.
 *
 * All fragments come from the same learner. When it is lost before all are stored, the next one is asked for all of
 * them; what the first had stored is stored again as the next version, and before any fragment that has none yet: so
 * the state is complete (no fragment at version 0) only when it is of one piece, also after a restart in between.
 * Nobody is sent any of it before it is complete. */
#include <assert.h>

#include "common/mem.h"
#include "syncer/core/state.h"

#define ASK_AGAIN_SECONDS 1.0

/* Learners wait for their first state no longer than this; half of it for one seeder leaves time for another. */
static int64_t patience_ns(const struct sy_core *core)
{
    return sy_ns(core->spec->sync.join_timeout_seconds / 2);
}

/* The next in order of admission, so that everyone has a turn. */
static uint32_t candidate(const struct sy_core *core)
{
    uint32_t first = SY_NO_MEMBER, next = SY_NO_MEMBER;
    for (uint32_t m = 0; m < core->slots; m++) {
        const struct sy_member *member = &core->members[m];
        if (!sy_is_learner(member)) {
            continue;
        }
        if (first == SY_NO_MEMBER || member->admission < core->members[first].admission) {
            first = m;
        }
        if (member->admission > core->seeder_admission &&
            (next == SY_NO_MEMBER || member->admission < core->members[next].admission)) {
            next = m;
        }
    }
    return next != SY_NO_MEMBER ? next : first;
}

static void begin(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    sy_round_move(round, SY_ROUND_SEEDING);
    round->number = core->next_round++;
    round->have = round->outstanding = round->asked = 0;
    round->need = 1;
    round->warmup = round->final = false;
    round->opened_ns = core->now_ns;
    round->deadline_ns = INT64_MAX;
    for (uint32_t m = 0; m < core->slots; m++) {
        core->members[m].parts[local].state = SY_PART_NONE;
    }
    sy_round_ask(core, local, core->seeder);
}

/* A seed that was damaged on the way, or for which there was no room, is asked for again. */
static void ask_again(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    enum sy_part_state state = core->members[core->seeder].parts[local].state;
    if (state == SY_PART_ASKED || state == SY_PART_ANNOUNCED) {
        round->deadline_ns = INT64_MAX;
    } else if (round->deadline_ns == INT64_MAX) {
        round->deadline_ns = core->now_ns + sy_ns(ASK_AGAIN_SECONDS);
    } else if (core->now_ns >= round->deadline_ns) {
        round->deadline_ns = INT64_MAX;
        sy_round_ask(core, local, core->seeder);
    }
}

/* No fragment holds the state of an earlier seeder any more. */
static bool is_of_one_piece(const struct sy_core *core)
{
    for (uint32_t i = 0; i < core->fragments; i++) {
        const struct sy_round *round = &core->rounds[i];
        bool stored = round->seed_generation == core->seed_generation && round->state == SY_ROUND_IDLE;
        if (round->version > 0 && !stored) {
            return false;
        }
    }
    return true;
}

static void store(struct sy_core *core, uint32_t local)
{
    struct sy_round *round = &core->rounds[local];
    sy_round_move(round, SY_ROUND_STORING);
    round->seed_generation = core->seed_generation;
    core->verdicts[DL_VERDICT_ACCEPTED]++;
    sy_queue_result(core, core->seeder, round->number, sy_fragment_index(core, local), DL_VERDICT_ACCEPTED);
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_SEED_STORE,
                                       .member = core->seeder,
                                       .fragment = sy_fragment_index(core, local),
                                       .round = round->number,
                                       .version = round->version + 1});
}

void sy_seed_received(struct sy_core *core, uint32_t local)
{
    core->seed_progress_ns = core->now_ns;
    sy_round_move(&core->rounds[local], SY_ROUND_SEEDED);
}

void sy_seed_stored(struct sy_core *core, uint32_t local)
{
    core->seed_progress_ns = core->now_ns;
    core->rounds[local].have = 0;
    for (uint32_t m = 0; m < core->slots; m++) {
        core->members[m].parts[local].state = SY_PART_NONE;
    }
}

void sy_seed_left(struct sy_core *core, uint32_t m)
{
    if (m != core->seeder) {
        return;
    }
    for (uint32_t i = 0; i < core->fragments; i++) {
        struct sy_round *round = &core->rounds[i];
        struct sy_part *part = &core->members[m].parts[i];
        if (round->state != SY_ROUND_SEEDING && round->state != SY_ROUND_SEEDED) {
            continue;
        }
        if (part->state == SY_PART_ANNOUNCED || part->state == SY_PART_RECEIVED) {
            sy_part_decide(core, i, m, DL_VERDICT_ABORTED, true, SY_PART_NONE);
        }
        part->state = SY_PART_NONE;
        round->outstanding = 0;
        round->deadline_ns = INT64_MAX;
        sy_round_move(round, SY_ROUND_IDLE);
    }
    core->seeder = SY_NO_MEMBER;
    sy_queue_note(core, true, "seeder lost learner=%u uid=%.40s: starting over with another", core->members[m].learner,
                  core->members[m].uid);
}

/* Not before all that the last seeder delivered is stored: it may turn out to be complete. */
static void choose(struct sy_core *core)
{
    uint32_t m = candidate(core);
    for (uint32_t i = 0; i < core->fragments; i++) {
        m = core->rounds[i].state == SY_ROUND_STORING ? SY_NO_MEMBER : m;
    }
    if (m == SY_NO_MEMBER) {
        return;
    }
    /* The same process, back again, goes on where it was: what it holds has not changed, since nobody trains yet. */
    bool same = m == core->last_seeder && core->members[m].born == core->last_seeder_born;
    core->seeder = core->last_seeder = m;
    core->last_seeder_born = core->members[m].born;
    core->seeder_admission = core->members[m].admission;
    core->seed_generation += same ? 0 : 1;
    core->seed_progress_ns = core->now_ns;
    sy_queue_note(core, false, "seeding from learner=%u uid=%.40s admission=%llu fragments=%u",
                  core->members[m].learner, core->members[m].uid, (unsigned long long)core->members[m].admission,
                  core->fragments);
}

void sy_seed_run(struct sy_core *core)
{
    if (core->finishing || sy_is_seeded(core)) {
        core->seeder = SY_NO_MEMBER;
        return;
    }
    if (core->seeder != SY_NO_MEMBER && core->now_ns >= sy_seed_deadline(core) && candidate(core) != core->seeder &&
        core->now_ns - core->seed_progress_ns >= patience_ns(core)) {
        sy_seed_left(core, core->seeder);
    }
    if (core->seeder == SY_NO_MEMBER) {
        choose(core);
    }
    if (core->seeder == SY_NO_MEMBER) {
        return;
    }
    for (uint32_t i = 0; i < core->fragments; i++) {
        struct sy_round *round = &core->rounds[i];
        if (round->state == SY_ROUND_IDLE && round->seed_generation != core->seed_generation) {
            begin(core, i);
        } else if (round->state == SY_ROUND_SEEDING) {
            ask_again(core, i);
        }
    }
    for (uint32_t i = 0; i < core->fragments; i++) {
        struct sy_round *round = &core->rounds[i];
        if (round->state == SY_ROUND_SEEDED && (round->version > 0 || is_of_one_piece(core))) {
            store(core, i);
        }
    }
}

int64_t sy_seed_deadline(const struct sy_core *core)
{
    if (core->seeder == SY_NO_MEMBER) {
        return INT64_MAX;
    }
    int64_t deadline_ns = core->seed_progress_ns + patience_ns(core);
    for (uint32_t i = 0; i < core->fragments; i++) {
        if (core->rounds[i].state == SY_ROUND_SEEDING) {
            deadline_ns = DL_MIN(deadline_ns, core->rounds[i].deadline_ns);
        }
    }
    return deadline_ns;
}
