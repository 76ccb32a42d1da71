#include "syncer/core/ledger.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "syncer/core/core.h"

const char *sy_lease_state_name(enum sy_lease_state state)
{
    switch (state) {
    case SY_LEASE_HELD: return "held";
    case SY_LEASE_COUNTED: return "counted";
    case SY_LEASE_RETURNED: return "returned";
    }
    return "unknown";
}

/* --- life -------------------------------------------------------------------------------------------------------- */

static enum dl_rc allocate(struct sy_ledger *ledger, uint32_t holders_max, uint32_t ranges, struct dl_err *err)
{
    uint32_t open_max = holders_max * SY_LEASES_PER_HOLDER;
    ledger->holders_max = holders_max;
    ledger->holders_end = 0;
    ledger->queue_max = open_max * SY_LEDGER_RANGES_PER_LEASE + ranges;
    ledger->holders = calloc(holders_max, sizeof *ledger->holders);
    ledger->queue = calloc(ledger->queue_max, sizeof *ledger->queue);
    ledger->rows = calloc(open_max, sizeof *ledger->rows);
    if (ledger->holders == NULL || ledger->queue == NULL || ledger->rows == NULL) {
        sy_ledger_release(ledger);
        return dl_err_set(err, DL_ENOMEM, "no memory for the leases of %u learners", holders_max);
    }
    return DL_OK;
}

enum dl_rc sy_ledger_init(struct sy_ledger *ledger, uint32_t holders_max, struct dl_err *err)
{
    *ledger = (struct sy_ledger){.next_lease = 1};
    return allocate(ledger, holders_max, 0, err);
}

void sy_ledger_release(struct sy_ledger *ledger)
{
    free(dl_take(ledger->holders));
    free(dl_take(ledger->queue));
    free(dl_take(ledger->rows));
}

/* --- holders ----------------------------------------------------------------------------------------------------- */

uint32_t sy_ledger_find(const struct sy_ledger *ledger, const char *uid, uint64_t nonce)
{
    for (uint32_t h = 0; h < ledger->holders_end; h++) {
        const struct sy_holder *holder = &ledger->holders[h];
        if (holder->used && !holder->given_back && holder->nonce == nonce && strcmp(holder->uid, uid) == 0) {
            return h;
        }
    }
    return SY_NO_HOLDER;
}

static uint32_t free_place(const struct sy_ledger *ledger)
{
    uint32_t best = SY_NO_HOLDER;
    for (uint32_t h = 0; h < ledger->holders_max; h++) {
        const struct sy_holder *holder = &ledger->holders[h];
        if (!holder->used) {
            return h;
        }
        bool idle = !holder->connected && holder->open_count == 0;
        if (idle && (best == SY_NO_HOLDER || holder->gone_ns < ledger->holders[best].gone_ns)) {
            best = h;
        }
    }
    return best;
}

uint32_t sy_ledger_add(struct sy_ledger *ledger, const char *uid, uint64_t nonce, uint32_t learner)
{
    uint32_t h = free_place(ledger);
    if (h != SY_NO_HOLDER) {
        struct sy_holder *holder = &ledger->holders[h];
        *holder = (struct sy_holder){.used = true, .nonce = nonce, .learner = learner, .member = SY_NO_MEMBER};
        strncpy(holder->uid, uid, sizeof holder->uid - 1);
        ledger->holders_end = DL_MAX(ledger->holders_end, h + 1);
    }
    return h;
}

static void forget_unused(struct sy_ledger *ledger)
{
    while (ledger->holders_end > 0 && !ledger->holders[ledger->holders_end - 1].used) {
        ledger->holders_end--;
    }
}

/* --- restoring --------------------------------------------------------------------------------------------------- */

static enum dl_rc restore_lease(struct sy_ledger *ledger, const struct sy_lease *row, struct dl_err *err)
{
    uint32_t h = sy_ledger_find(ledger, row->uid, row->nonce);
    if (h == SY_NO_HOLDER) {
        h = sy_ledger_add(ledger, row->uid, row->nonce, row->learner);
    }
    assert(h != SY_NO_HOLDER); /* There is a place for each row. */
    struct sy_holder *holder = &ledger->holders[h];
    holder->newest = DL_MAX(holder->newest, row->lease);
    if (row->state == SY_LEASE_COUNTED) {
        holder->done = DL_MAX(holder->done, row->lease);
        return DL_OK;
    }
    if (holder->open_count == SY_LEASES_PER_HOLDER) {
        return dl_err_set(err, DL_ECORRUPT, "lease %llu: learner %u holds more than %d leases",
                          (unsigned long long)row->lease, row->learner, SY_LEASES_PER_HOLDER);
    }
    holder->open[holder->open_count++] = (struct sy_open){.lease = row->lease,
                                                          .first = row->first,
                                                          .count = row->count,
                                                          .counted = row->counted,
                                                          .admission = row->admission,
                                                          .told = true};
    return DL_OK;
}

enum dl_rc sy_ledger_restore(struct sy_ledger *ledger, const struct sy_ledger_state *state, struct dl_err *err)
{
    uint32_t holders_max = ledger->holders_max;
    sy_ledger_release(ledger);
    enum dl_rc rc = allocate(ledger, holders_max + state->lease_count, state->range_count, err);
    for (uint32_t i = 0; rc == DL_OK && i < state->lease_count; i++) {
        if (state->leases[i].state != SY_LEASE_RETURNED) {
            rc = restore_lease(ledger, &state->leases[i], err);
        }
    }
    if (rc != DL_OK) {
        return rc;
    }
    if (state->range_count > 0) {
        memcpy(ledger->queue, state->ranges, state->range_count * sizeof *ledger->queue);
    }
    ledger->queue_count = state->range_count;
    ledger->next_lease = DL_MAX(state->next_lease, 1);
    ledger->positions = state->positions;
    ledger->counted = state->counted;
    const char *fault = sy_ledger_check(ledger);
    return fault == NULL ? DL_OK : dl_err_set(err, DL_ECORRUPT, "the ledger of the data: %s", fault);
}

/* --- granting ---------------------------------------------------------------------------------------------------- */

static struct sy_range take_range(struct sy_ledger *ledger, uint64_t length)
{
    if (ledger->queue_count == 0) {
        struct sy_range range = {.first = ledger->positions, .count = length};
        ledger->positions += length;
        return range;
    }
    struct sy_range *head = &ledger->queue[0];
    struct sy_range range = {.first = head->first, .count = DL_MIN(head->count, length)};
    head->first += range.count;
    head->count -= range.count;
    ledger->queue_changed = true;
    if (head->count == 0) {
        memmove(head, head + 1, --ledger->queue_count * sizeof *head);
    }
    return range;
}

const struct sy_open *sy_ledger_grant(struct sy_ledger *ledger, uint32_t h, uint64_t length, uint64_t admission)
{
    struct sy_holder *holder = &ledger->holders[h];
    assert(length >= 1 && length <= SY_LEASE_COUNT_MAX);
    if (holder->open_count == SY_LEASES_PER_HOLDER) {
        return NULL;
    }
    struct sy_range range = take_range(ledger, length);
    struct sy_open *open = &holder->open[holder->open_count++];
    *open = (struct sy_open){.lease = ledger->next_lease++,
                             .first = range.first,
                             .count = range.count,
                             .admission = admission,
                             .dirty = true};
    holder->newest = open->lease;
    ledger->dirty_count++;
    return open;
}

/* --- counting ---------------------------------------------------------------------------------------------------- */

enum dl_verdict sy_ledger_judge(const struct sy_ledger *ledger, uint32_t h, uint64_t lease, uint64_t cursor)
{
    if (lease == 0) {
        return DL_VERDICT_ACCEPTED;
    }
    if (h == SY_NO_HOLDER) {
        return DL_VERDICT_LEASE_LOST;
    }
    const struct sy_holder *holder = &ledger->holders[h];
    for (uint32_t i = 0; i < holder->open_count; i++) {
        const struct sy_open *open = &holder->open[i];
        if (open->lease == lease && open->told && open->state == SY_LEASE_HELD) {
            return cursor <= open->count ? DL_VERDICT_ACCEPTED : DL_VERDICT_MALFORMED;
        }
    }
    return lease <= holder->done ? DL_VERDICT_ACCEPTED : DL_VERDICT_LEASE_LOST;
}

void sy_ledger_count(struct sy_ledger *ledger, uint32_t h, uint64_t lease, uint64_t cursor)
{
    if (h == SY_NO_HOLDER) {
        return;
    }
    struct sy_holder *holder = &ledger->holders[h];
    uint32_t kept = 0;
    for (uint32_t i = 0; i < holder->open_count; i++) {
        struct sy_open *open = &holder->open[i];
        uint64_t upto = open->lease < lease ? open->count : open->lease == lease ? cursor : 0;
        if (open->told && open->state == SY_LEASE_HELD && upto > open->counted) {
            ledger->counted += upto - open->counted;
            open->counted = upto;
        }
        if (open->counted == open->count && !open->dirty) {
            holder->done = DL_MAX(holder->done, open->lease);
        } else {
            holder->open[kept++] = *open;
        }
    }
    holder->open_count = kept;
}

/* --- giving back ------------------------------------------------------------------------------------------------- */

static void enqueue(struct sy_ledger *ledger, struct sy_range range)
{
    uint32_t at = 0;
    while (at < ledger->queue_count && ledger->queue[at].first < range.first) {
        at++;
    }
    ledger->queue_changed = true;
    struct sy_range *before = at > 0 ? &ledger->queue[at - 1] : NULL;
    struct sy_range *after = at < ledger->queue_count ? &ledger->queue[at] : NULL;
    bool joins_before = before != NULL && before->first + before->count == range.first;
    bool joins_after = after != NULL && range.first + range.count == after->first;
    if (joins_before && joins_after) {
        before->count += range.count + after->count;
        memmove(after, after + 1, (--ledger->queue_count - at) * sizeof *after);
    } else if (joins_before) {
        before->count += range.count;
    } else if (joins_after) {
        after->first = range.first;
        after->count += range.count;
    } else {
        memmove(&ledger->queue[at + 1], &ledger->queue[at], (ledger->queue_count - at) * sizeof range);
        ledger->queue[at] = range;
        ledger->queue_count++;
    }
}

bool sy_ledger_give_back(struct sy_ledger *ledger, uint32_t h)
{
    struct sy_holder *holder = &ledger->holders[h];
    if (holder->open_count > ledger->queue_max - ledger->queue_count) {
        return false;
    }
    for (uint32_t i = 0; i < holder->open_count; i++) {
        struct sy_open *open = &holder->open[i];
        if (open->counted < open->count) {
            enqueue(ledger,
                    (struct sy_range){.first = open->first + open->counted, .count = open->count - open->counted});
        }
        open->state = SY_LEASE_RETURNED;
        ledger->dirty_count += open->dirty ? 0 : 1;
        open->dirty = true;
    }
    holder->connected = holder->for_good = false;
    holder->given_back = holder->used = holder->open_count > 0;
    forget_unused(ledger);
    return true;
}

/* --- what has to become durable ---------------------------------------------------------------------------------- */

bool sy_ledger_is_dirty(const struct sy_ledger *ledger)
{
    return ledger->dirty_count > 0 || ledger->queue_changed;
}

static void describe(const struct sy_holder *holder, const struct sy_open *open, struct sy_lease *row)
{
    *row = (struct sy_lease){.lease = open->lease,
                             .first = open->first,
                             .count = open->count,
                             .counted = open->counted,
                             .state = open->state,
                             .learner = holder->learner,
                             .admission = open->admission,
                             .nonce = holder->nonce};
    memcpy(row->uid, holder->uid, sizeof row->uid);
}

void sy_ledger_changes(struct sy_ledger *ledger, struct sy_ledger_changes *changes)
{
    uint32_t rows = 0;
    ledger->serial++;
    for (uint32_t h = 0; ledger->dirty_count > 0 && h < ledger->holders_end; h++) {
        struct sy_holder *holder = &ledger->holders[h];
        uint32_t kept = 0;
        for (uint32_t i = 0; holder->used && i < holder->open_count; i++) {
            struct sy_open *open = &holder->open[i];
            if (open->dirty) {
                describe(holder, open, &ledger->rows[rows++]);
                open->dirty = false;
                open->serial = ledger->serial;
                ledger->dirty_count--;
            }
            if (open->state != SY_LEASE_RETURNED) {
                holder->open[kept++] = *open;
            }
        }
        holder->open_count = kept;
        holder->used = holder->used && !holder->given_back;
    }
    forget_unused(ledger);
    *changes = (struct sy_ledger_changes){.serial = ledger->serial,
                                          .leases = ledger->rows,
                                          .lease_count = rows,
                                          .ranges_changed = ledger->queue_changed,
                                          .ranges = ledger->queue,
                                          .range_count = ledger->queue_count};
    ledger->queue_changed = false;
}

/* --- views ------------------------------------------------------------------------------------------------------- */

uint64_t sy_ledger_leased(const struct sy_ledger *ledger)
{
    uint64_t sum = 0;
    for (uint32_t h = 0; h < ledger->holders_end; h++) {
        const struct sy_holder *holder = &ledger->holders[h];
        for (uint32_t i = 0; holder->used && i < holder->open_count; i++) {
            sum += holder->open[i].state == SY_LEASE_HELD ? holder->open[i].count - holder->open[i].counted : 0;
        }
    }
    return sum;
}

uint64_t sy_ledger_queued(const struct sy_ledger *ledger)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < ledger->queue_count; i++) {
        sum += ledger->queue[i].count;
    }
    return sum;
}

static bool overlaps(const struct sy_ledger *ledger, uint64_t first, uint64_t end, const struct sy_open *self)
{
    for (uint32_t i = 0; i < ledger->queue_count; i++) {
        if (first < ledger->queue[i].first + ledger->queue[i].count && ledger->queue[i].first < end) {
            return true;
        }
    }
    for (uint32_t h = 0; h < ledger->holders_end; h++) {
        const struct sy_holder *holder = &ledger->holders[h];
        for (uint32_t i = 0; holder->used && i < holder->open_count; i++) {
            const struct sy_open *open = &holder->open[i];
            if (open != self && open->state == SY_LEASE_HELD && first < open->first + open->count &&
                open->first + open->counted < end) {
                return true;
            }
        }
    }
    return false;
}

static const char *check_holder(const struct sy_ledger *ledger, const struct sy_holder *holder)
{
    for (uint32_t i = 0; i < holder->open_count; i++) {
        const struct sy_open *open = &holder->open[i];
        if (open->counted > open->count || open->count == 0 || (i > 0 && open->lease <= holder->open[i - 1].lease)) {
            return "a lease counts more than it has, or leases do not ascend";
        }
        if (open->first + open->count > ledger->positions || open->lease >= ledger->next_lease) {
            return "a lease lies beyond the high-water mark";
        }
        if (open->state == SY_LEASE_HELD && open->counted < open->count &&
            overlaps(ledger, open->first + open->counted, open->first + open->count, open)) {
            return "a position is leased twice, or leased and queued";
        }
    }
    return NULL;
}

const char *sy_ledger_check(const struct sy_ledger *ledger)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < ledger->queue_count; i++) {
        const struct sy_range *range = &ledger->queue[i];
        if (range->count == 0 || (i > 0 && range->first < end)) {
            return "the queue does not ascend";
        }
        end = range->first + range->count;
    }
    if (end > ledger->positions) {
        return "the queue reaches beyond the high-water mark";
    }
    for (uint32_t h = 0; h < ledger->holders_end; h++) {
        const char *fault = ledger->holders[h].used ? check_holder(ledger, &ledger->holders[h]) : NULL;
        if (fault != NULL) {
            return fault;
        }
    }
    return ledger->counted + sy_ledger_leased(ledger) + sy_ledger_queued(ledger) == ledger->positions
               ? NULL
               : "counted, leased and queued positions do not add up to the high-water mark";
}
