/* wk_link, the job's data: what the trainer takes, what is asked of shard 0, and what a push says of it. */
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "worker/link/link_state.h"

/* A lease that lasts is asked for when half of the newest one is used. */
static uint64_t left(const struct wk_data *data)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < data->held_count; i++) {
        sum += data->held[i].count;
    }
    return sum - data->taken;
}

static void ask_when_half_used(struct wk_data *data)
{
    const struct wk_lease *last = data->held_count == 0 ? NULL : &data->held[data->held_count - 1];
    if (!data->asked && (last == NULL || 2 * left(data) <= last->count)) {
        data->asks = true;
    }
}

/* --- the trainer's side ------------------------------------------------------------------------------------------ */

/* Finalizer of splitmix64: incarnations begin far from one another. */
static uint64_t unleased_first(uint64_t nonce)
{
    uint64_t x = nonce + UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    return WK_UNLEASED_FIRST + ((x ^ (x >> 31)) >> 5);
}

/* What was trained on leased data while a fragment is taken anew would be lost with the fragment. */
static bool takes_anew(const struct wk_link *link)
{
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        if (link->fragments[p].version == 0) {
            return true;
        }
    }
    return false;
}

static void take_unleased(struct wk_link *link, uint64_t count, struct wk_range *range)
{
    struct wk_data *data = &link->data;
    if (data->unleased == 0) {
        data->unleased_first = unleased_first(link->nonce);
    }
    *range = (struct wk_range){.first = data->unleased_first + data->unleased, .count = count};
    data->unleased += count;
}

static void take_leased(struct wk_data *data, uint64_t count, struct wk_range *range)
{
    struct wk_lease *head = &data->held[0];
    *range = (struct wk_range){
        .lease = head->lease, .first = head->first + data->taken, .count = DL_MIN(count, head->count - data->taken)};
    data->taken += range->count;
    data->at_lease = head->lease;
    data->at_cursor = data->taken;
    if (data->taken == head->count) {
        data->held_count--;
        memmove(head, head + 1, data->held_count * sizeof *head);
        data->taken = 0;
    }
}

/* For the tape: from which sequence of this incarnation on they come from where. */
static void note_source(struct wk_link *link, const struct wk_range *range, uint64_t left_of_lease)
{
    struct wk_data *data = &link->data;
    if (data->begun && data->source == range->lease) {
        return;
    }
    data->begun = true;
    data->source = range->lease;
    char text[DL_TRACE_TEXT_MAX];
    snprintf(text, sizeof text, "taken=%llu", (unsigned long long)data->sequences);
    wk_link_trace(link, "data", DL_TRACE_NO_FRAGMENT, range->lease, range->first, left_of_lease, text);
    if (range->lease == 0) {
        wk_note(link, 1, "training without a lease of data step=%llu %s", (unsigned long long)link->step, text);
    }
}

void wk_link_data(struct wk_link *link, uint64_t count, struct wk_range *range)
{
    struct wk_data *data = &link->data;
    assert(data->batch > 0 && count > 0);
    uint64_t left_of_lease = 0;
    if (data->held_count == 0 || takes_anew(link)) {
        take_unleased(link, count, range);
    } else {
        left_of_lease = data->held[0].count - data->taken;
        take_leased(data, count, range);
    }
    note_source(link, range, left_of_lease);
    data->sequences += range->count;
    ask_when_half_used(data);
}

void wk_lease_boundary(struct wk_link *link)
{
    link->data.lease = link->data.at_lease;
    link->data.cursor = link->data.at_cursor;
}

bool wk_lease_awaited(struct wk_link *link, int64_t now_ns, int64_t *until_ns)
{
    struct wk_data *data = &link->data;
    if (data->batch == 0 || data->wait_until_ns == INT64_MAX) {
        return false;
    }
    if (data->wait_until_ns < 0) {
        data->wait_until_ns = now_ns + WK_LEASE_WAIT_MS * WK_NS_PER_MS;
    }
    if (data->held_count > 0 || link->leaving || now_ns >= data->wait_until_ns) {
        data->wait_until_ns = INT64_MAX;
        return false;
    }
    *until_ns = data->wait_until_ns;
    return true;
}

/* --- the network side -------------------------------------------------------------------------------------------- */

void wk_lease_welcomed(struct wk_link *link)
{
    struct wk_data *data = &link->data;
    data->asks = data->batch > 0; /* Also to hear whether what it holds is still its. */
    data->asked = false;
}

bool wk_lease_send(struct wk_link *link, int64_t now_ns, uint32_t shard)
{
    struct wk_data *data = &link->data;
    bool again = data->asked && now_ns - data->asked_ns >= WK_LEASE_RETRY_MS * WK_NS_PER_MS;
    if (shard != 0 || (!data->asks && !again) || link->leaving) {
        return false;
    }
    const struct wk_lease *last = data->held_count == 0 ? NULL : &data->held[data->held_count - 1];
    bool want = last == NULL || 2 * left(data) <= last->count;
    data->asks = false;
    data->asked = want;
    data->asked_ns = now_ns;
    link->message.type = DL_WIRE_LEASE_REQUEST;
    link->message.as.lease_request =
        (struct dl_wire_lease_request){.last = data->newest, .batch = data->batch, .want = want};
    return true;
}

int64_t wk_lease_deadline(const struct wk_link *link)
{
    const struct wk_data *data = &link->data;
    return data->asked && !link->leaving && link->conns[0].state == WK_CONN_READY
               ? data->asked_ns + WK_LEASE_RETRY_MS * WK_NS_PER_MS
               : INT64_MAX;
}

void wk_lease_lost(struct wk_link *link)
{
    struct wk_data *data = &link->data;
    if (data->newest == 0) {
        return; /* Heard before. */
    }
    wk_note(link, 2, "leases of data were given to others while this learner was away: taking the global state anew");
    data->held_count = 0;
    data->taken = data->newest = data->at_lease = data->at_cursor = data->lease = data->cursor = 0;
    data->revoked++;
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        struct wk_fragment *fragment = &link->fragments[p];
        fragment->version = 0;
        fragment->push.kept = false;
        wk_missed_forget(link, p);
        for (uint32_t i = 0; i < WK_SLOTS; i++) {
            /* One that is being applied is a state of the ensemble, but what it was mixed with is not. */
            struct wk_slot *slot = &fragment->slots[i];
            slot->forgotten = slot->forgotten || slot->state == WK_SLOT_APPLYING;
            slot->state = slot->state == WK_SLOT_APPLYING ? slot->state : WK_SLOT_FREE;
        }
    }
    for (uint32_t i = 0; i < link->shards; i++) {
        wk_close(link, i, "%s", "its leases of data are lost");
    }
}

void wk_lease_received(struct wk_link *link, const struct dl_wire_lease *lease)
{
    struct wk_data *data = &link->data;
    if (lease->revoked != 0) {
        if (lease->lease >= data->newest) {
            wk_lease_lost(link);
        }
        return;
    }
    if (lease->lease <= data->newest || lease->count == 0 || data->held_count == WK_LEASES_MAX) {
        return; /* A repeat. Or no room: it is told again once there is. */
    }
    data->held[data->held_count++] =
        (struct wk_lease){.lease = lease->lease, .first = lease->first, .count = lease->count};
    data->newest = lease->lease;
    data->asked = false;
    data->leases++;
}

/* --- views ------------------------------------------------------------------------------------------------------- */

void wk_link_data_view(const struct wk_link *link, struct wk_data_view *view)
{
    *view = (struct wk_data_view){.leases = link->data.leases,
                                  .sequences = link->data.sequences,
                                  .unleased = link->data.unleased,
                                  .revoked = link->data.revoked};
}

const char *wk_lease_check(const struct wk_link *link)
{
    const struct wk_data *data = &link->data;
    for (uint32_t i = 0; i < data->held_count; i++) {
        if (data->held[i].count == 0 || (i > 0 && data->held[i].lease <= data->held[i - 1].lease)) {
            return "leases do not ascend, or one is empty";
        }
        if (data->held[i].lease > data->newest) {
            return "a lease is held that was not received";
        }
    }
    if (data->taken > 0 && (data->held_count == 0 || data->taken >= data->held[0].count)) {
        return "more is taken of a lease than it has";
    }
    if (data->lease > data->at_lease || (data->lease == data->at_lease && data->cursor > data->at_cursor)) {
        return "a boundary has seen more data than was taken";
    }
    return data->batch == 0 && data->held_count > 0 ? "data is leased that nobody uses" : NULL;
}
