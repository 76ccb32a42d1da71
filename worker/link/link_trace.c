/* wk_link, the tape: what asynchrony decided for this learner, on its way to every shard. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "worker/link/link_state.h"

static struct wk_record *record_at(const struct wk_link *link, uint64_t position)
{
    return &link->trace.records[position % WK_TRACE_MAX];
}

/* What every shard has durable is not needed any more. */
static void forget_durable(struct wk_link *link)
{
    uint64_t acked = UINT64_MAX;
    for (uint32_t i = 0; i < link->shards; i++) {
        acked = DL_MIN(acked, link->conns[i].trace_acked);
    }
    link->trace.first = DL_MAX(link->trace.first, DL_MIN(acked, link->trace.made) + 1);
}

static void add(struct wk_link *link, uint32_t owner, const struct dl_trace_entry *entry)
{
    struct wk_trace *trace = &link->trace;
    if (trace->made + 1 - trace->first == WK_TRACE_MAX) {
        if (trace->lost == 0) {
            wk_note(link, 2,
                    "some shard has been away for %d entries of the tape: the oldest are given up, and this run "
                    "cannot be replayed from step %llu on",
                    WK_TRACE_MAX, (unsigned long long)record_at(link, trace->first)->entry.step);
        }
        trace->first++;
        trace->lost++;
    }
    trace->made++;
    *record_at(link, trace->made) = (struct wk_record){.owner = owner, .entry = *entry};
}

void wk_link_trace(struct wk_link *link, const char *kind, uint32_t fragment, uint64_t a, uint64_t b, uint64_t c,
                   const char *text)
{
    size_t length = strlen(kind);
    assert(length >= 1 && length < DL_TRACE_KIND_MAX);
    if (link->role != DL_ROLE_LEARNER) {
        return; /* Nothing depends on an observer. */
    }
    struct dl_trace_entry entry = {
        .seq = ++link->trace.seq, .step = link->step, .a = a, .b = b, .c = c, .fragment = fragment};
    memcpy(entry.kind, kind, length + 1);
    snprintf(entry.text, sizeof entry.text, "%s", text == NULL ? "" : text);
    add(link, 0, &entry);
}

bool wk_link_trace_newest(const struct wk_link *link, struct dl_trace_entry *out)
{
    if (link->trace.made == 0) {
        return false;
    }
    *out = record_at(link, link->trace.made)->entry;
    return true;
}

bool wk_link_trace_adopt(struct wk_link *link, const char *uid, uint64_t nonce, const struct dl_trace_entry *entries,
                         uint32_t count)
{
    struct wk_trace *trace = &link->trace;
    uint32_t owner = 0;
    while (owner < trace->owner_count &&
           !(trace->owners[owner].nonce == nonce && strcmp(trace->owners[owner].uid, uid) == 0)) {
        owner++;
    }
    if (owner == WK_TRACE_OWNERS_MAX || strlen(uid) >= DL_WIRE_UID_MAX) {
        return false;
    }
    if (owner == trace->owner_count) {
        trace->owners[owner].nonce = nonce;
        snprintf(trace->owners[owner].uid, sizeof trace->owners[owner].uid, "%s", uid);
        trace->owner_count++;
    }
    for (uint32_t i = 0; i < count; i++) {
        add(link, owner, &entries[i]);
    }
    return true;
}

/* One TRACE of what is kept from position `at` up to `last`; returns the position after it. */
static uint64_t fill(const struct wk_link *link, uint64_t at, uint64_t last, struct dl_wire_trace *out)
{
    const struct wk_owner *owner = &link->trace.owners[record_at(link, at)->owner];
    out->position = at;
    out->nonce = owner->nonce;
    memcpy(out->uid, owner->uid, sizeof out->uid);
    out->count = 0;
    uint32_t of = record_at(link, at)->owner;
    while (at <= last && out->count < DL_WIRE_TRACE_MAX && record_at(link, at)->owner == of &&
           (out->count == 0 || record_at(link, at)->entry.seq > out->entries[out->count - 1].seq)) {
        out->entries[out->count++] = record_at(link, at++)->entry;
    }
    return at;
}

bool wk_link_trace_next(const struct wk_link *link, uint64_t *position, struct dl_wire_trace *out)
{
    uint64_t at = DL_MAX(*position, link->trace.first);
    if (at > link->trace.made) {
        return false;
    }
    *position = fill(link, at, link->trace.made, out);
    return true;
}

bool wk_trace_send(struct wk_link *link, struct wk_conn *conn, uint64_t position)
{
    uint64_t at = DL_MAX(conn->trace_sent + 1, link->trace.first);
    if (at > position) {
        return false;
    }
    link->message.type = DL_WIRE_TRACE;
    conn->trace_sent = fill(link, at, position, &link->message.as.trace) - 1;
    return true;
}

void wk_trace_acked(struct wk_link *link, struct wk_conn *conn, uint64_t acked)
{
    conn->trace_acked = DL_MAX(conn->trace_acked, DL_MIN(acked, conn->trace_sent));
    forget_durable(link);
}

void wk_trace_welcomed(struct wk_link *link, struct wk_conn *conn, uint64_t acked)
{
    conn->trace_acked = conn->trace_sent = DL_MIN(acked, link->trace.made);
    if (conn->trace_acked + 1 < link->trace.first && link->trace.lost == 0) {
        /* A syncer whose tape was lost: what it had acknowledged is gone here as well. */
        link->trace.lost = link->trace.first - conn->trace_acked - 1;
    }
    forget_durable(link);
}
