/* wk_link, WELCOME: the layout, the settings to obey, and what the syncer holds. */
#include <stdio.h>

#include "common/mem.h"
#include "worker/link/link_state.h"

static const char *layout_name(unsigned kind)
{
    static const char *const names[] = {"balanced", "strided", "layer", "tensor"};
    return kind < DL_COUNT_OF(names) ? names[kind] : "unknown";
}

/* False: the link has ended. */
static bool take_layout(struct wk_link *link, uint32_t shard, const struct dl_wire_welcome *welcome)
{
    if (welcome->shards != link->shards || welcome->shard != shard) {
        wk_end(link, WK_END_REFUSED,
               "endpoint %u of %u turned out to be shard %u of %u: list every shard's endpoint once, in their order",
               shard, link->shards, welcome->shard, welcome->shards);
        return false;
    }
    bool first = link->layout == NULL;
    if (first) {
        struct dl_err err;
        enum dl_rc rc = dl_layout_new(link->tensors, link->tensor_count, welcome->fragments_total,
                                      (enum dl_layout_kind)welcome->layout, &link->layout, &err);
        if (rc != DL_OK) {
            link->layout = NULL;
            wk_end(link, WK_END_REFUSED, "cut the tensors into the job's %u fragments: %.400s",
                   welcome->fragments_total, err.text);
            return false;
        }
    }
    if (link->layout->hash != welcome->layout_hash || link->layout->fragment_count != welcome->fragments_total) {
        wk_end(link, WK_END_REFUSED,
               "layouts differ: the job's is %016llx (%u fragments, %s), that of this learner's %u tensors %016llx (%u "
               "fragments): register the same tensors in the same order as the job's other learners",
               (unsigned long long)welcome->layout_hash, welcome->fragments_total, layout_name(welcome->layout),
               link->tensor_count, (unsigned long long)link->layout->hash, link->layout->fragment_count);
        if (first) {
            dl_layout_free(link->layout);
            link->layout = NULL;
        }
        return false;
    }
    return true;
}

/* A syncer that came back with less than it had told us (its volume was lost) has the last word: what is newer than its
 * own counts as not held, so that the update that it sends (its version differs from the one we said we hold), or the
 * seed that it asks for, is taken. True when there was any such fragment. */
static bool forget_newer(struct wk_link *link, const struct dl_wire_welcome *welcome)
{
    bool any = false;
    for (uint32_t i = 0; i < welcome->fragment_count; i++) {
        struct wk_fragment *fragment = &link->fragments[welcome->fragments[i].fragment];
        uint64_t theirs = welcome->fragments[i].version;
        for (uint32_t k = 0; k < WK_SLOTS; k++) {
            struct wk_slot *slot = &fragment->slots[k];
            if (slot->state != WK_SLOT_FREE && slot->update.version > theirs && !slot->forgotten) {
                any = true;
                slot->forgotten = slot->state == WK_SLOT_APPLYING;
                slot->state = slot->forgotten ? WK_SLOT_APPLYING : WK_SLOT_FREE;
            }
        }
        if (fragment->version > theirs) {
            fragment->version = 0;
            any = true;
            wk_missed_forget(link, welcome->fragments[i].fragment);
        }
    }
    return any;
}

static void take_settings(struct wk_link *link, struct wk_conn *conn, const struct dl_wire_welcome *welcome)
{
    link->compression = (enum dl_codec)welcome->compression;
    link->broadcast = (enum dl_codec)welcome->broadcast_compression;
    link->apply = (enum dl_apply_mode)welcome->apply;
    link->alpha = welcome->apply_alpha;
    link->token_budget = welcome->token_budget;
    link->learners = welcome->learners;
    conn->heartbeat_ms = welcome->heartbeat_ms;
    conn->timeout_ms = welcome->timeout_ms;
    conn->awaits_pull = welcome->pull_within_steps != DL_UNBOUNDED && link->role == DL_ROLE_LEARNER;
    conn->pull_by = link->step + welcome->pull_within_steps;
    conn->pull_wait_ms = DL_MIN(welcome->wait_ms, (uint32_t)WK_WAIT_MS_MAX);
}

void wk_on_welcome(struct wk_link *link, int64_t now_ns, uint32_t shard, const struct dl_wire_welcome *welcome)
{
    struct wk_conn *conn = &link->conns[shard];
    if (!take_layout(link, shard, welcome)) {
        return;
    }
    for (uint32_t i = 0; i < welcome->fragment_count; i++) {
        uint32_t p = welcome->fragments[i].fragment;
        if (p >= wk_fragment_count(link) || wk_shard_of(link, p) != shard) {
            wk_close(link, shard, "protocol error: WELCOME names fragment %u of another shard", p);
            return;
        }
    }
    if (link->role == DL_ROLE_LEARNER && link->wanted != (int32_t)welcome->learner) {
        wk_note(link, link->welcomed ? 2 : 1, "shard %u gave learner id %u", shard, welcome->learner);
        link->wanted = (int32_t)welcome->learner;
    }
    link->welcomed = true;
    conn->attempts = 0;
    if (forget_newer(link, welcome)) {
        wk_note(link, 2, "shard %u holds older versions than it had told before: taking its state again epoch=%llu",
                shard, (unsigned long long)welcome->epoch);
    }
    wk_note(link, 1, "joined shard %u as learner=%u admission=%llu epoch=%llu fragments=%u", shard, welcome->learner,
            (unsigned long long)welcome->admission, (unsigned long long)welcome->epoch, welcome->fragment_count);
    take_settings(link, conn, welcome);
    wk_trace_welcomed(link, conn, welcome->trace_acked);
    wk_conn_move(link, shard, WK_CONN_READY);
    if (shard == 0) {
        wk_lease_welcomed(link);
    }
    conn->epoch = welcome->epoch;
    conn->heard_ns = now_ns;
    conn->meta_due = link->joined && link->role == DL_ROLE_LEARNER && wk_recover_is_over(link);
    wk_recover_on_welcome(link, now_ns, shard);
}
