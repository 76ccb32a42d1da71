#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "syncer/core/internal.h"

/* The shell drains the queue after every event. The most that one event can queue: a PULL or SEND for every pair of member
 * and fragment, a BROADCAST and MERGE and RESULTs a fragment, a STOP, DISCONNECT and RESULT a member, notes. */
bool sy_actions_init(struct sy_core *core)
{
    uint64_t capacity = 2 * (uint64_t)core->fragment_count * core->member_max + 4 * (uint64_t)core->fragment_count +
                        4 * (uint64_t)core->member_max + 2 * SY_TEXTS_MAX;
    core->queue_capacity = (uint32_t)capacity;
    core->queue = calloc(capacity, sizeof *core->queue);
    core->texts = calloc(SY_TEXTS_MAX, sizeof *core->texts);
    return core->queue != NULL && core->texts != NULL;
}

void sy_act(struct sy_core *core, const struct sy_queued *action)
{
    assert(core->queue_size < core->queue_capacity);
    uint32_t at = (core->queue_head + core->queue_size) % core->queue_capacity;
    core->queue[at] = *action;
    core->queue_size++;
}

void sy_act_text(struct sy_core *core, enum sy_action_type type, uint32_t member, bool warn, const char *fmt, ...)
{
    struct sy_queued action = {.type = type, .member = member, .warn = warn, .text = -1};
    if (core->texts_waiting < SY_TEXTS_MAX) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(core->texts[core->text_next], DL_WIRE_TEXT_MAX, fmt, args);
        va_end(args);
        action.text = (int32_t)core->text_next;
        core->text_next = (core->text_next + 1) % SY_TEXTS_MAX;
        core->texts_waiting++;
    } else if (type == SY_ACT_NOTE) {
        core->notes_dropped++;
        return;
    }
    sy_act(core, &action);
}

bool sy_core_next_action(struct sy_core *core, struct sy_action *out)
{
    if (core->queue_size == 0) {
        return false;
    }
    const struct sy_queued *q = &core->queue[core->queue_head];
    memset(out, 0, sizeof *out);
    out->type = q->type;
    out->member = q->member;
    out->fragment = q->fragment;
    out->round = q->round;
    out->version = q->version;
    out->warn = q->warn;
    if (q->text >= 0) {
        memcpy(out->text, core->texts[q->text], DL_WIRE_TEXT_MAX);
        core->texts_waiting--;
    }
    if (q->type == SY_ACT_PULL) {
        out->as.pull = q->as.pull;
    } else if (q->type == SY_ACT_RESULT) {
        out->as.result = q->as.result;
    } else if (q->type == SY_ACT_STOP) {
        out->as.stop.result = q->as.stop;
        memcpy(out->as.stop.text, core->stop_text, DL_WIRE_TEXT_MAX);
    }
    core->queue_head = (core->queue_head + 1) % core->queue_capacity;
    core->queue_size--;
    return true;
}
