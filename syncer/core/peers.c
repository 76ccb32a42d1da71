/* sy_core, peers: whom a joiner may take its state from, and what of it the syncer has still to send.
 *
 * A joiner that asks for peers gets their addresses, and its fragments are held back one by one until it has said (HELD)
 * what a peer could give it: what equals the syncer's own to the bit it takes from there, everything else is sent. Until
 * then broadcasts pass it by: its link is busy with optimiser state, and of a fragment that is merged again and again
 * meanwhile it needs the last version alone. From then on they reach it as they reach everybody.
 *
 * A peer is healthy when it trains, serves, was heard of late, and has the current version of every fragment, or, where
 * a round has just been committed, the one before: that update is on its way to it, and its state is a snapshot of its
 * next boundary. */
#include <inttypes.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/state.h"

#define STALE_SHARE 0.5 /* Of sync.timeoutSeconds: who was not heard for so long may be gone. */

/* Fragments whose newest version the member has yet to apply; UINT32_MAX: it is further behind than that. */
static uint32_t behind(const struct sy_core *core, const struct sy_member *member)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < core->fragments; i++) {
        uint64_t current = core->rounds[i].version, theirs = member->parts[i].version;
        if (theirs == 0 || theirs > current || current - theirs > 1) {
            return UINT32_MAX;
        }
        count += theirs < current ? 1 : 0;
    }
    return count;
}

static bool is_healthy(const struct sy_core *core, uint32_t m, uint32_t asker, uint32_t *lag)
{
    const struct sy_member *member = &core->members[m];
    int64_t stale_ns = sy_ns(core->spec->sync.timeout_seconds * STALE_SHARE);
    if (m == asker || !sy_is_training(member) || member->serve[0] == 0 || core->now_ns - member->heard_ns >= stale_ns) {
        return false;
    }
    *lag = behind(core, member);
    return *lag != UINT32_MAX;
}

/* The best first: those that lag least; of equals, joiners are spread over them. */
void sy_peers_list(const struct sy_core *core, uint32_t asker, struct dl_wire_peers *out)
{
    uint32_t lags[DL_WIRE_PEERS_MAX];
    memset(out, 0, sizeof *out);
    for (uint32_t k = 1; k < core->slots && sy_is_seeded(core); k++) {
        uint32_t m = (asker + k) % core->slots, lag = 0;
        if (!is_healthy(core, m, asker, &lag)) {
            continue;
        }
        uint32_t at = out->count;
        while (at > 0 && lags[at - 1] > lag) {
            at--;
        }
        if (at == DL_WIRE_PEERS_MAX) {
            continue;
        }
        uint32_t last = DL_MIN((uint32_t)out->count, DL_WIRE_PEERS_MAX - 1u);
        for (uint32_t i = last; i > at; i--) {
            lags[i] = lags[i - 1];
            out->peers[i] = out->peers[i - 1];
        }
        out->count = (uint8_t)(last + 1);
        const struct sy_member *member = &core->members[m];
        struct dl_wire_peer *peer = &out->peers[at];
        lags[at] = lag;
        *peer = (struct dl_wire_peer){.learner = member->learner, .nonce = member->nonce};
        memcpy(peer->uid, member->uid, sizeof peer->uid);
        memcpy(peer->serve, member->serve, sizeof peer->serve);
        peer->step_ms = (uint32_t)DL_MIN(DL_MAX(member->step_seconds, 0.0) * 1e3, (double)UINT32_MAX);
    }
}

bool sy_peers_offer(struct sy_core *core, uint32_t m, const struct dl_wire_hello *hello)
{
    struct sy_member *member = &core->members[m];
    memcpy(member->serve, hello->serve, sizeof member->serve);
    member->serve[sizeof member->serve - 1] = 0;
    for (uint32_t i = 0; i < core->fragments; i++) {
        member->parts[i].hold = SY_HOLD_NONE;
    }
    if (hello->recover == 0 || member->role != DL_ROLE_LEARNER) {
        return false;
    }
    struct dl_wire_peers peers;
    sy_queue(core, &(struct sy_queued){.type = SY_ACT_PEERS, .member = m});
    sy_peers_list(core, m, &peers);
    if (peers.count == 0) {
        return false;
    }
    for (uint32_t i = 0; i < core->fragments; i++) {
        member->parts[i].hold = SY_HOLD_UNTOLD;
    }
    return true;
}

void sy_peers_broadcast(struct sy_core *core, uint32_t local)
{
    for (uint32_t m = 0; m < core->slots; m++) {
        struct sy_part *part = &core->members[m].parts[local];
        part->hold = part->hold == SY_HOLD_UNTOLD ? SY_HOLD_UNTOLD : SY_HOLD_NONE;
    }
}

bool sy_core_holds_back(const struct sy_core *core, uint32_t m, uint32_t fragment)
{
    uint32_t local = sy_fragment_local(core, fragment);
    return m < core->slots && local != UINT32_MAX && core->members[m].parts[local].hold == SY_HOLD_UNTOLD;
}

void sy_core_on_held(struct sy_core *core, int64_t now_ns, uint32_t m, uint32_t fragment, bool same)
{
    sy_event(core, now_ns);
    uint32_t local = sy_fragment_local(core, fragment);
    struct sy_member *member = &core->members[m];
    if (local == UINT32_MAX || !sy_is_learner(member)) {
        return;
    }
    struct sy_part *part = &member->parts[local];
    if (part->hold == SY_HOLD_NONE) {
        return; /* It was sent, or is on its way. */
    }
    if (same) {
        part->hold = SY_HOLD_CLAIMED;
    } else {
        part->hold = SY_HOLD_NONE;
        sy_queue(core,
                 &(struct sy_queued){
                     .type = SY_ACT_SEND, .member = m, .fragment = fragment, .version = core->rounds[local].version});
    }
    sy_settle(core);
}

void sy_core_on_recovered(struct sy_core *core, int64_t now_ns, uint32_t m, const struct dl_wire_recovered *recovered)
{
    sy_event(core, now_ns);
    struct sy_member *member = &core->members[m];
    if (!sy_is_learner(member) || member->recovered) {
        return;
    }
    member->recovered = true;
    member->recovered_from = recovered->learner;
    core->recoveries++;
    sy_queue_note(
        core, false, "state taken over learner=%u from=%u peer_step=%" PRIu64 " bytes=%" PRIu64 " seconds=%.2f",
        member->learner, recovered->learner, recovered->step, recovered->bytes, sy_seconds((int64_t)recovered->ns));
    sy_settle(core);
}
