/* sim_world, a joiner that takes its state from a peer: what wk_fetch does, without its bytes. Peers die, refuse or go
 * silent in the middle; what they offer is what their links say they hold. */
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "sim/state.h"
#include "worker/link/trace_pack.h"

#define TRANSFER_SECONDS 2.0
#define GIVE_UP_SECONDS 15.0
#define FAIL_SHARE 0.2 /* Of the peers asked: no answer, or a connection that breaks. */

/* The learner process that a candidate names; NULL: it is gone. */
static struct sim_learner *find_peer(struct sim_world *world, const struct dl_wire_peer *peer)
{
    for (uint32_t n = 0; n < SIM_LEARNERS_MAX; n++) {
        struct sim_learner *learner = &world->learners[n];
        if (learner->alive && learner->nonce == peer->nonce) {
            return learner;
        }
    }
    return NULL;
}

void sim_fetch_release(struct sim_learner *learner)
{
    free(dl_take(learner->fetch.trace));
    learner->fetch.under_way = false;
}

static void begin(struct sim_world *world, struct sim_learner *learner)
{
    struct sim_learner *peer = find_peer(world, &learner->fetch.peer);
    if (peer == NULL || !wk_link_is_joined(peer->link) || (!world->healed && sim_chance(world, FAIL_SHARE))) {
        return; /* The next one. */
    }
    for (uint32_t p = 0; p < world->layout->fragment_count; p++) {
        wk_link_base(peer->link, p, &learner->fetch.offers[p]);
        learner->fetch.offers[p].content_hash = peer->base_content[p];
    }
    struct dl_err err;
    sim_fetch_release(learner);
    if (wk_trace_pack(peer->link, &learner->fetch.trace, &learner->fetch.trace_size, &err) != DL_OK) {
        sim_fail(world, "%s", err.text);
        return;
    }
    learner->fetch.incarnation = peer->incarnation;
    learner->fetch.peer_done = world->incarnations[peer->incarnation].done_count;
    wk_link_on_offers(learner->link, learner->fetch.offers);
    learner->fetch.under_way = true;
    learner->fetch.told = false;
    learner->fetch.generation = peer->generation;
    learner->fetch.until_ns = world->now_ns + sim_ns(sim_uniform(&world->rng, 0, TRANSFER_SECONDS));
    learner->fetch.give_up_ns = learner->fetch.until_ns + sim_ns(GIVE_UP_SECONDS);
}

/* Takes what is confirmed. True: nothing is left to wait for. */
static bool take(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    bool all = true;
    for (uint32_t p = 0; p < world->layout->fragment_count; p++) {
        const struct wk_offer *offer = &learner->fetch.offers[p];
        enum wk_offer_state state = wk_link_offer(learner->link, p);
        all = all && state != WK_OFFER_WAIT;
        if (state == WK_OFFER_TAKE && wk_link_adopt(learner->link, p)) {
            wk_link_on_applied(learner->link, p);
            sim_tape_done(world, n, "apply", p, offer->version);
            learner->base_content[p] = offer->content_hash;
            world->counts.fragments_recovered++;
            sim_ledger_content(world, p, offer->version, offer->content_hash, false);
        }
    }
    return all;
}

/* What the peer had yet to deliver is this learner's to deliver as well. */
static void take_trace(struct sim_world *world, uint32_t n)
{
    struct sim_learner *learner = &world->learners[n];
    struct dl_err err;
    struct wk_link_view view;
    wk_link_view(learner->link, &view);
    uint64_t position = view.trace_made + 1;
    if (wk_trace_unpack(learner->link, learner->fetch.trace, learner->fetch.trace_size, &err) != DL_OK) {
        sim_fail(world, "learner %u: %s", n, err.text);
        return;
    }
    while (wk_link_trace_next(learner->link, &position, &world->scratch.as.trace)) {
        sim_tape_adopted(world, n, &world->scratch.as.trace);
    }
}

bool sim_fetch(struct sim_world *world, uint32_t n, int64_t *again_ns)
{
    struct sim_learner *learner = &world->learners[n];
    if (!learner->fetch.under_way) {
        if (!wk_link_next_peer(learner->link, &learner->fetch.peer)) {
            wk_link_on_recovered(learner->link, NULL);
            return true;
        }
        begin(world, learner);
        return true;
    }
    if (world->now_ns < learner->fetch.until_ns) {
        *again_ns = learner->fetch.until_ns;
        return false;
    }
    const struct sim_learner *peer = find_peer(world, &learner->fetch.peer);
    if (peer == NULL || peer->generation != learner->fetch.generation) {
        sim_fetch_release(learner); /* It died meanwhile. */
        return true;
    }
    if (!learner->fetch.told) {
        learner->fetch.told = true;
        wk_link_tell_offers(learner->link);
    }
    if (!take(world, n) && world->now_ns < learner->fetch.give_up_ns) {
        *again_ns = world->now_ns + SIM_SECOND / 10;
        return false;
    }
    struct dl_wire_recovered report = {.learner = learner->fetch.peer.learner, .nonce = learner->fetch.peer.nonce};
    memcpy(report.uid, learner->fetch.peer.uid, sizeof report.uid);
    take_trace(world, n);
    sim_fetch_release(learner);
    world->counts.recoveries++;
    wk_link_on_recovered(learner->link, &report);
    sim_tape_recovered(world, n, learner->fetch.incarnation, learner->fetch.peer_done);
    return true;
}
