/* sy_core, checkpoints: this shard's part of a consistent cut over shards and learner channels.
 *
 * Chandy and Lamport's rule. On the first marker of a cut, from wherever, the shard takes its own part (the current version
 * of every fragment) and sends the marker to all learners before any later version; each learner passes it on to the other
 * shards before it pushes anything that depends on a later version. So no shard's part of a cut holds a merge of something
 * that depends on what came after another shard's part. A learner's channel is closed by its marker, or by its end: what
 * comes from it before then was on its way when the cut was made. */
#include <assert.h>

#include "syncer/core/state.h"

static void close_channel(struct sy_core *core, struct sy_member *member)
{
    if (member->marker_awaited) {
        member->marker_awaited = false;
        core->markers_awaited--;
        if (core->markers_awaited == 0) {
            sy_queue(core,
                     &(struct sy_queued){.type = SY_ACT_CUT_CLOSED, .member = SY_NO_MEMBER, .version = core->cut});
        }
    }
}

static void send_marker(struct sy_core *core, uint32_t m)
{
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_MARKER, .member = m, .version = core->cut});
}

/* A cut that is still open when the next one is made stays as it is: its markers are implied by the later ones. */
static void make_cut(struct sy_core *core, uint64_t id)
{
    core->cut = id;
    core->markers_awaited = 0;
    for (uint32_t i = 0; i < core->fragments; i++) {
        core->rounds[i].cut_version = core->rounds[i].version;
    }
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_CUT, .member = SY_NO_MEMBER, .version = id});
    for (uint32_t m = 0; m < core->slots; m++) {
        struct sy_member *member = &core->members[m];
        member->marker_awaited = sy_is_learner(member);
        if (member->marker_awaited) {
            core->markers_awaited++;
            send_marker(core, m);
        }
    }
    if (core->markers_awaited == 0) {
        sy_queue(core, &(struct sy_queued){.type = SY_ACT_CUT_CLOSED, .member = SY_NO_MEMBER, .version = id});
    }
}

bool sy_core_on_cut(struct sy_core *core, int64_t now_ns, uint64_t id)
{
    sy_event(core, now_ns);
    bool new = id > core->cut;
    if (new) {
        make_cut(core, id);
    }
    sy_settle(core);
    return new;
}

void sy_core_on_marker(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_marker *marker)
{
    sy_event(core, now_ns);
    assert(m < core->slots);
    struct sy_member *member = &core->members[m];
    member->heard_ns = core->now_ns;
    if (marker->id > core->cut) {
        make_cut(core, marker->id);
    }
    if (sy_is_learner(member) && marker->id == core->cut && member->marker_awaited) {
        sy_queue(core, &(struct sy_queued){.type = SY_ACT_CUT_LEARNER,
                                           .member = m,
                                           .version = marker->id,
                                           .round = marker->step,
                                           .tokens = marker->tokens});
        close_channel(core, member);
    }
    sy_settle(core);
}

/* Whoever joins after the cut hears of it before it gets a version that is later. */
void sy_cut_joined(struct sy_core *core, uint32_t m)
{
    if (core->cut > 0 && sy_is_learner(&core->members[m])) {
        close_channel(core, &core->members[m]); /* That of the connection before. */
        send_marker(core, m);
    }
}

void sy_cut_left(struct sy_core *core, uint32_t m)
{
    close_channel(core, &core->members[m]);
}

bool sy_core_is_channel_open(const struct sy_core *core, uint32_t m)
{
    return core->members[m].marker_awaited;
}

void sy_core_restore_cut(struct sy_core *core, uint64_t id)
{
    assert(!core->started);
    core->cut = id;
}

uint64_t sy_core_cut_version(const struct sy_core *core, uint32_t fragment)
{
    uint32_t i = sy_fragment_local(core, fragment);
    assert(i != UINT32_MAX);
    return core->rounds[i].cut_version;
}
