/* sy_core, the queue of actions. Bounded, and sized so that it cannot overflow (sy_queue_capacity): the shell empties
 * it after every event, and an event queues at most
 *   - for each connected member and fragment a SEND, a PULL, and a RESULT of a push that is decided,
 *   - for each slot and fragment a RESULT of an older push that is dropped,
 *   - for each fragment a MERGE or SEED_STORE and a BROADCAST,
 *   - for each slot a STOP, a DISCONNECT, and a LEASE for each that it may hold,
 *   - for each slot a MARKER or two, with a CUT, its CUT_LEARNER and CUT_CLOSED,
 *   - a LEDGER, a PEERS, and
 *   - SY_CORE_NOTES_MAX notes.
 * Several commits may come before the queue is emptied; each is of another fragment, since a fragment's next round
 * merges only after its MERGE was taken, so that the sum above holds over them all. */
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "syncer/core/state.h"

size_t sy_queue_capacity(const struct sy_core *core)
{
    size_t connected = (size_t)core->learners_max + SY_CORE_EVALUATORS_MAX;
    return core->fragments * (3 * connected + core->slots + 2) + (4 + SY_LEASES_PER_HOLDER) * (size_t)core->slots + 6 +
           SY_CORE_NOTES_MAX;
}

void sy_queue(struct sy_core *core, const struct sy_queued *action)
{
    assert(core->queue_count < core->queue_capacity);
    core->queue[(core->queue_first + core->queue_count) % core->queue_capacity] = *action;
    core->queue_count++;
    core->queue_peak = core->queue_count > core->queue_peak ? core->queue_count : core->queue_peak;
}

void sy_queue_result(struct sy_core *core, uint32_t member, uint64_t round, uint32_t fragment, enum dl_verdict verdict)
{
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_RESULT,
                                       .member = member,
                                       .fragment = fragment,
                                       .round = round,
                                       .verdict = (uint8_t)verdict});
}

void sy_queue_note(struct sy_core *core, bool warn, const char *fmt, ...)
{
    if (core->note_count == SY_CORE_NOTES_MAX) {
        core->notes_dropped++;
        return;
    }
    struct sy_note *note = &core->notes[(core->note_first + core->note_count++) % SY_CORE_NOTES_MAX];
    note->warn = warn;
    va_list args;
    va_start(args, fmt);
    int used = vsnprintf(note->text, sizeof note->text, fmt, args);
    va_end(args);
    if (core->notes_dropped > 0 && used >= 0 && (size_t)used < sizeof note->text) {
        snprintf(note->text + used, sizeof note->text - (size_t)used, " notes_dropped=%llu",
                 (unsigned long long)core->notes_dropped);
        core->notes_dropped = 0;
    }
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_NOTE, .member = SY_NO_MEMBER});
}

static void describe_disconnect(const struct sy_core *core, enum sy_leave why, char *text, size_t size)
{
    switch (why) {
    case SY_LEAVE_LOST:
        snprintf(text, size, "nothing was heard for %g s (sync.timeoutSeconds)", core->spec->sync.timeout_seconds);
        break;
    case SY_LEAVE_SUPERSEDED: snprintf(text, size, "a newer incarnation of this learner has joined"); break;
    case SY_LEAVE_GOODBYE:
    case SY_LEAVE_PREEMPTED:
    case SY_LEAVE_PROTOCOL: snprintf(text, size, "no longer a member"); break;
    }
}

bool sy_core_next_action(struct sy_core *core, struct sy_action *action)
{
    if (core->queue_count == 0) {
        return false;
    }
    const struct sy_queued *queued = &core->queue[core->queue_first];
    core->queue_first = (core->queue_first + 1) % core->queue_capacity;
    core->queue_count--;
    action->type = (enum sy_action_type)queued->type;
    action->member = queued->member;
    action->fragment = queued->fragment;
    action->round = queued->round;
    action->version = queued->version;
    action->warn = false;
    action->text[0] = 0;
    switch (action->type) {
    case SY_ACT_PULL:
        action->as.pull = (struct dl_wire_pull){.round = queued->round,
                                                .fragment = queued->fragment,
                                                .version = queued->version,
                                                .flags = queued->flags,
                                                .pull_within_steps = queued->pull_within_steps,
                                                .update_within_steps = queued->update_within_steps,
                                                .wait_ms = queued->wait_ms};
        break;
    case SY_ACT_RESULT:
        action->as.result =
            (struct dl_wire_result){.round = queued->round, .fragment = queued->fragment, .verdict = queued->verdict};
        break;
    case SY_ACT_STOP:
        action->as.stop.result = (uint8_t)core->stop_result;
        memcpy(action->as.stop.text, core->stop_text, sizeof action->as.stop.text);
        break;
    case SY_ACT_PEERS: sy_peers_list(core, queued->member, &action->as.peers); break;
    case SY_ACT_DISCONNECT:
        describe_disconnect(core, (enum sy_leave)queued->why, action->text, sizeof action->text);
        break;
    case SY_ACT_NOTE:
        action->warn = core->notes[core->note_first].warn;
        memcpy(action->text, core->notes[core->note_first].text, sizeof action->text);
        core->note_first = (core->note_first + 1) % SY_CORE_NOTES_MAX;
        core->note_count--;
        break;
    case SY_ACT_LEASE:
        action->as.lease = (struct dl_wire_lease){.lease = queued->round,
                                                  .first = queued->version,
                                                  .count = queued->pull_within_steps,
                                                  .revoked = queued->flags};
        break;
    case SY_ACT_LEDGER:
    case SY_ACT_MARKER:
    case SY_ACT_CUT_LEARNER:
        action->as.marker =
            (struct dl_wire_marker){.id = queued->version, .step = queued->round, .tokens = queued->tokens};
        break;
    case SY_ACT_CUT:
    case SY_ACT_CUT_CLOSED:
    case SY_ACT_MERGE:
    case SY_ACT_SEED_STORE:
    case SY_ACT_BROADCAST:
    case SY_ACT_SEND: break;
    }
    return true;
}
