/* wk_link, a joiner's recovery from a peer: who is asked, what of it the syncer confirms, and when the syncer has to send
 * instead.
 *
 * A fresh learner asks for peers in HELLO. Once PEERS has come from every shard (or for WK_GATHER_MS from some), the
 * boundary says WK_STEP_FETCH, and the shell, on the trainer's thread,
 *   - takes a candidate (wk_link_next_peer), gets its manifest and hands over what it offers (wk_link_on_offers);
 *   - fetches the optimiser's state; until it calls wk_link_tell_offers the syncer sends nothing of any fragment, so that
 *     versions that are replaced meanwhile do not take the link;
 *   - fetches every fragment for which wk_link_offer then says WK_OFFER_TAKE, and takes each over with wk_link_adopt,
 *     applying it, wk_link_on_applied;
 *   - ends with wk_link_on_recovered, or, when no candidate is left, without a report.
 * A fragment is taken from a peer only when the syncer has said that it holds the same version with the same content;
 * whatever else is newer comes as an UPDATE, at any time. So what a joiner has adopted is the syncer's, to the bit.
 *
 * Pure, as all of wk_link; under the same lock. */
#ifndef DL_WORKER_LINK_LINK_RECOVER_H
#define DL_WORKER_LINK_LINK_RECOVER_H

#include "worker/link/link.h"

#define WK_CANDIDATES_MAX 8
/* From WELCOME until PEERS, which follows it, is no longer waited for with what else there is to do. */
#define WK_PEERS_MS 200
/* From the first PEERS until the shards that have not answered are no longer waited for. */
#define WK_GATHER_MS 3000

struct wk_offer { /* What a peer holds of one fragment. */
    uint64_t version, round;
    uint64_t content_hash; /* Of the bytes of its UPDATE. */
};

/* The best candidate that was not tried yet; it counts as tried from now on. False: none is left. */
bool wk_link_next_peer(struct wk_link *link, struct dl_wire_peer *out);

/* A peer's offers, one a fragment of the layout; they replace an earlier peer's. Version 0: not held. */
void wk_link_on_offers(struct wk_link *link, const struct wk_offer *offers);
/* Fragments are what comes next: the syncers are told what is offered, and say of each whether they hold the same. */
void wk_link_tell_offers(struct wk_link *link);

enum wk_offer_state {
    WK_OFFER_WAIT, /* The syncer has not said yet whether it holds the same. */
    WK_OFFER_TAKE,
    WK_OFFER_SKIP, /* Held already, or it comes from the syncer. */
};
enum wk_offer_state wk_link_offer(const struct wk_link *link, uint32_t fragment);

/* The offered bytes are here and intact. True: apply them to `fragment`, then wk_link_on_applied; false: something newer
 * came meanwhile. */
bool wk_link_adopt(struct wk_link *link, uint32_t fragment);

/* Recovery is over. `report`: whose state was taken over; NULL: nobody's. What is still missing comes from the syncer. */
void wk_link_on_recovered(struct wk_link *link, const struct dl_wire_recovered *report);

/* How updates are encoded, which offers are as well; valid once there is a layout. */
enum dl_codec wk_link_broadcast_codec(const struct wk_link *link);

/* Where this learner serves its state; from the next HELLO on. */
void wk_link_set_serve(struct wk_link *link, const char *address);

/* What this learner could offer of a fragment's base copy (version 0: nothing); but for its hash. */
void wk_link_base(const struct wk_link *link, uint32_t fragment, struct wk_offer *out);
void wk_link_identity(const struct wk_link *link, const char **uid, uint64_t *nonce);

#endif
