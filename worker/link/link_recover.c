#include "worker/link/link_recover.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "worker/link/link_state.h"

/* --- messages ---------------------------------------------------------------------------------------------------- */

bool wk_recover_is_over(const struct wk_link *link)
{
    return link->recover.state == WK_RECOVER_OFF || link->recover.state == WK_RECOVER_OVER;
}

bool wk_recover_asks(const struct wk_link *link)
{
    return !wk_recover_is_over(link);
}

/* Whatever the syncer holds back of this shard it is told about, again after every reconnect. */
static void tell_again(struct wk_link *link, uint32_t shard)
{
    WK_FOR_SHARD(link, shard, p)
    {
        struct wk_fragment *fragment = &link->fragments[p];
        fragment->offer_confirmed = false;
        fragment->held_due = !fragment->adopted || fragment->offer.version > fragment->version;
    }
}

void wk_recover_on_welcome(struct wk_link *link, int64_t now_ns, uint32_t shard)
{
    link->recover.welcomed_ns = DL_MIN(link->recover.welcomed_ns, now_ns);
    link->conns[shard].peers_heard = false;
}

void wk_recover_forget(struct wk_link *link, uint32_t shard)
{
    link->conns[shard].peers_heard = false;
    WK_FOR_SHARD(link, shard, p)
    {
        link->fragments[p].held_due = link->fragments[p].offer_confirmed = false;
    }
}

static void add_candidate(struct wk_recover *recover, const struct dl_wire_peer *peer)
{
    if (peer->serve[0] == 0 || peer->uid[0] == 0) {
        return;
    }
    for (uint32_t i = 0; i < recover->count; i++) {
        struct wk_candidate *known = &recover->candidates[i];
        if (known->peer.nonce == peer->nonce && strcmp(known->peer.uid, peer->uid) == 0) {
            known->named++;
            known->tried = known->tried && strcmp(known->peer.serve, peer->serve) == 0;
            known->peer = *peer;
            return;
        }
    }
    if (recover->count < WK_CANDIDATES_MAX) {
        recover->candidates[recover->count++] = (struct wk_candidate){.peer = *peer, .named = 1};
    }
}

void wk_recover_on_peers(struct wk_link *link, int64_t now_ns, uint32_t shard, const struct dl_wire_peers *peers)
{
    struct wk_recover *recover = &link->recover;
    link->conns[shard].peers_heard = true;
    if (wk_recover_is_over(link)) {
        tell_again(link, shard); /* It was asked before recovery ended: it need not hold anything back. */
        return;
    }
    recover->since_ns = DL_MIN(recover->since_ns, now_ns);
    for (uint32_t i = 0; i < peers->count; i++) {
        add_candidate(recover, &peers->peers[i]);
    }
    if (recover->told) {
        tell_again(link, shard);
    }
}

void wk_recover_on_held(struct wk_link *link, const struct dl_wire_held *held)
{
    struct wk_fragment *fragment = &link->fragments[held->fragment];
    if (fragment->offer.version == 0 || fragment->held_due || !link->recover.told) {
        return; /* An answer to what was said before. */
    }
    fragment->offer_confirmed =
        held->version == fragment->offer.version && held->content_hash == fragment->offer.content_hash;
    if (!fragment->offer_confirmed) {
        fragment->offer.version = 0;
    }
}

bool wk_recover_send(struct wk_link *link, uint32_t shard)
{
    WK_FOR_SHARD(link, shard, p)
    {
        struct wk_fragment *fragment = &link->fragments[p];
        if (fragment->held_due) {
            fragment->held_due = false;
            link->message.type = DL_WIRE_HELD;
            link->message.as.held = (struct dl_wire_held){
                .fragment = p,
                .version = fragment->offer.version,
                .content_hash = fragment->offer.version == 0 ? 0 : fragment->offer.content_hash,
            };
            return true;
        }
    }
    if (link->conns[shard].recovered_due) {
        link->conns[shard].recovered_due = false;
        link->message.type = DL_WIRE_RECOVERED;
        link->message.as.recovered = link->recover.report;
        return true;
    }
    return false;
}

/* --- the trainer's side ------------------------------------------------------------------------------------------ */

bool wk_recover_step(struct wk_link *link, int64_t now_ns, int64_t *until_ns)
{
    struct wk_recover *recover = &link->recover;
    if (recover->state != WK_RECOVER_ASKING) {
        return recover->state == WK_RECOVER_FETCHING;
    }
    if (link->joined) {
        wk_link_on_recovered(link, NULL); /* Everything has come from the syncer already. */
    }
    if (link->joined || recover->since_ns == INT64_MAX) {
        return false;
    }
    bool all = true;
    for (uint32_t i = 0; i < link->shards; i++) {
        all = all && link->conns[i].peers_heard;
    }
    int64_t bound_ns = recover->since_ns + WK_GATHER_MS * WK_NS_PER_MS;
    if (!all && now_ns < bound_ns) {
        *until_ns = bound_ns;
        return false;
    }
    if (recover->count == 0) {
        wk_link_on_recovered(link, NULL);
        return false;
    }
    recover->state = WK_RECOVER_FETCHING;
    return true;
}

bool wk_recover_goes_first(struct wk_link *link, int64_t now_ns, struct wk_step *step)
{
    if (wk_recover_is_over(link) || link->recover.asked) {
        return false;
    }
    if (wk_recover_step(link, now_ns, &step->until_ns)) {
        step->type = WK_STEP_FETCH;
        return true;
    }
    int64_t bound_ns = link->recover.welcomed_ns + WK_PEERS_MS * WK_NS_PER_MS;
    step->type = WK_STEP_WAIT;
    step->until_ns = DL_MIN(step->until_ns, bound_ns);
    return !wk_recover_is_over(link) && now_ns < bound_ns;
}

bool wk_link_next_peer(struct wk_link *link, struct dl_wire_peer *out)
{
    link->recover.asked = true;
    struct wk_candidate *best = NULL;
    for (uint32_t i = 0; i < link->recover.count; i++) {
        struct wk_candidate *candidate = &link->recover.candidates[i];
        if (!candidate->tried && (best == NULL || candidate->named > best->named)) {
            best = candidate;
        }
    }
    if (best == NULL) {
        return false;
    }
    best->tried = true;
    *out = best->peer;
    return true;
}

void wk_link_on_offers(struct wk_link *link, const struct wk_offer *offers)
{
    assert(link->recover.state == WK_RECOVER_FETCHING);
    link->recover.told = false;
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        struct wk_fragment *fragment = &link->fragments[p];
        if (wk_version_held(fragment) >= offers[p].version && fragment->adopted) {
            fragment->offer = (struct wk_offer){0}; /* It has it already, and the syncer knows. */
            continue;
        }
        fragment->offer = offers[p];
        fragment->offer_confirmed = fragment->held_due = false;
    }
}

void wk_link_tell_offers(struct wk_link *link)
{
    assert(link->recover.state == WK_RECOVER_FETCHING);
    link->recover.told = true;
    for (uint32_t i = 0; i < link->shards; i++) {
        if (link->conns[i].state == WK_CONN_READY) {
            tell_again(link, i);
        }
    }
}

enum wk_offer_state wk_link_offer(const struct wk_link *link, uint32_t p)
{
    const struct wk_fragment *fragment = &link->fragments[p];
    if (fragment->offer.version == 0 || wk_version_held(fragment) >= fragment->offer.version) {
        return WK_OFFER_SKIP;
    }
    return fragment->offer_confirmed ? WK_OFFER_TAKE : WK_OFFER_WAIT;
}

bool wk_link_adopt(struct wk_link *link, uint32_t p)
{
    struct wk_fragment *fragment = &link->fragments[p];
    if (wk_link_offer(link, p) != WK_OFFER_TAKE) {
        return false;
    }
    struct wk_slot *into = NULL;
    for (uint32_t i = 0; i < WK_SLOTS; i++) {
        struct wk_slot *slot = &fragment->slots[i];
        into = slot->state == WK_SLOT_FREE || slot->state == WK_SLOT_COMPLETE ? slot : into;
    }
    assert(into != NULL); /* At most one of the two receives, and none is being applied: that is this thread's. */
    uint64_t bytes = dl_codec_bytes(link->broadcast, link->layout->fragments[p].padded_elements);
    *into = (struct wk_slot){
        .state = WK_SLOT_APPLYING,
        .received = bytes,
        .update = {.fragment = p,
                   .version = fragment->offer.version,
                   .round = fragment->offer.round,
                   .codec = (uint8_t)link->broadcast,
                   .bytes = bytes,
                   .content_hash = fragment->offer.content_hash},
    };
    return true;
}

void wk_link_on_recovered(struct wk_link *link, const struct dl_wire_recovered *report)
{
    struct wk_recover *recover = &link->recover;
    recover->state = WK_RECOVER_OVER;
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        link->fragments[p].offer = (struct wk_offer){0};
    }
    for (uint32_t i = 0; i < link->shards; i++) {
        if (link->conns[i].state == WK_CONN_READY && recover->count > 0) {
            tell_again(link, i);
        }
        link->conns[i].recovered_due = report != NULL;
    }
    if (report == NULL) {
        return;
    }
    recover->report = *report;
    wk_link_trace(link, "state", DL_TRACE_NO_FRAGMENT, report->nonce, report->step, report->learner, report->uid);
    wk_note(link, 1, "state taken over from learner=%u uid=%s peer_step=%llu bytes=%llu seconds=%.2f", report->learner,
            report->uid, (unsigned long long)report->step, (unsigned long long)report->bytes, (double)report->ns / 1e9);
}

/* --- small things ------------------------------------------------------------------------------------------------ */

enum dl_codec wk_link_broadcast_codec(const struct wk_link *link)
{
    return link->broadcast;
}

void wk_link_set_serve(struct wk_link *link, const char *address)
{
    snprintf(link->serve, sizeof link->serve, "%s", address);
}

void wk_link_base(const struct wk_link *link, uint32_t p, struct wk_offer *out)
{
    const struct wk_fragment *fragment = &link->fragments[p];
    *out = (struct wk_offer){.version = fragment->adopted ? fragment->version : 0, .round = fragment->round};
}

void wk_link_identity(const struct wk_link *link, const char **uid, uint64_t *nonce)
{
    *uid = link->uid;
    *nonce = link->nonce;
}
