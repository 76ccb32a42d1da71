/* wk_fetch: a joiner's side of peer recovery: fetches optimiser state and fragments from a peer that serves them, in turns
 * on the trainer's thread while it waits in diloco_join.
 *
 * Order: the peer's manifest; the optimiser's state; then the syncer is asked, and the fragments that it confirms and that
 * nothing newer replaces meanwhile. Every part's hash is checked. A connection that breaks is resumed at the byte where it broke; when
 * a peer fails, the next one is taken: what was fetched of a fragment counts on when that one has the same version with the
 * same content, optimiser state begins anew, since it is each learner's own. No bound but on progress: WK_FETCH_PROGRESS_NS
 * without a byte. With no peer left: what came is kept, the rest comes from the syncer, optimiser state that is not complete
 * becomes zeros. */
#ifndef DL_WORKER_LINK_FETCH_H
#define DL_WORKER_LINK_FETCH_H

#include "worker/link/hub.h"
#include "worker/link/snapshot.h"

#define WK_FETCH_PROGRESS_NS (10 * INT64_C(1000000000))
/* Until some peer has answered with its manifest: the syncer's fragments are held back meanwhile. And as much longer as a
 * snapshot of this learner's size may take (WK_PREPARE_RATE). */
#define WK_FETCH_MANIFEST_NS (60 * INT64_C(1000000000))
#define WK_FETCH_CONFIRM_NS (15 * INT64_C(1000000000)) /* For the syncer's word on what is left. */

struct wk_fetch; /* Opaque. */

/* `states` and `hub` are borrowed. `progress_ns` 0: WK_FETCH_PROGRESS_NS. NULL: no memory. */
struct wk_fetch *wk_fetch_new(struct wk_hub *hub, const struct wk_state *states, uint32_t state_count,
                              int64_t progress_ns);
void wk_fetch_free(struct wk_fetch *fetch); /* NULL is fine. */

/* WK_STEP_FETCH: goes on for about a tenth of a second at most. Takes the hub's lock where it needs it. */
void wk_fetch_turn(struct wk_fetch *fetch);

/* Whose optimiser state was taken over; NULL: nobody's. */
const struct dl_wire_recovered *wk_fetch_report(const struct wk_fetch *fetch);

#endif
