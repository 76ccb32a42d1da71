/* sy_ledger: who trains on which data, and what of it counts. A part of sy_core; shard 0 of a job keeps one.
 *
 * The data of a job is one stream of positions 0, 1, 2, ... Ranges of it are leased to incarnations of learners. A position
 * is *counted* when a push is merged whose learner had trained on it (the push's cursor says how far it had come), once. What
 * is not counted of the leases of a learner that is gone for good goes to a queue, and is leased out before new positions. So
 * at any time each position below the high-water mark is counted, leased or queued, and exactly one of these.
 *
 * An incarnation uses its leases in the order of their numbers. A grant must be durable before anybody hears of it
 * (sy_ledger_changes, sy_ledger_on_durable).
 *
 * Pure; no allocation but in sy_ledger_init and sy_ledger_restore. Owned by the core's thread. Layer: syncer/core; the types
 * of the record are also the store's. */
#ifndef DL_SYNCER_LEDGER_H
#define DL_SYNCER_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/wire.h"

#define SY_LEASES_PER_HOLDER 8 /* Open at once. */
#define SY_LEASE_STEPS 128     /* Length of a lease by default, in steps of its learner. */
#define SY_LEASE_COUNT_MAX (UINT64_C(1) << 32)
#define SY_LEDGER_RANGES_PER_LEASE 4 /* Room of the queue, for each lease that can be open. */
#define SY_NO_HOLDER UINT32_MAX

enum sy_lease_state {
    SY_LEASE_HELD = 0,
    SY_LEASE_COUNTED = 1,  /* All of it. */
    SY_LEASE_RETURNED = 2, /* `counted` positions are; the others went to the queue. */
};
const char *sy_lease_state_name(enum sy_lease_state state); /* "held", ...; how the tape has it. */

/* The record of a grant: positions first .. first + count - 1, of which the first `counted` are. */
struct sy_lease {
    uint64_t lease; /* 1, 2, 3, ... */
    uint64_t first, count, counted;
    enum sy_lease_state state;
    uint32_t learner;
    uint64_t admission;
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
};

struct sy_range {
    uint64_t first, count;
};

/* What is durable, in a restart. Leases ascend; those that are not held only say who had which number. */
struct sy_ledger_state {
    struct sy_lease *leases;
    uint32_t lease_count;
    struct sy_range *ranges; /* The queue, ascending. */
    uint32_t range_count;
    uint64_t next_lease, positions, counted; /* The next number; the high-water mark; how many below it are counted. */
};

/* What has to become durable, in one transaction. Pointers are the ledger's, valid until the next call on it. */
struct sy_ledger_changes {
    uint64_t serial;
    const struct sy_lease *leases; /* New, or returned. */
    uint32_t lease_count;
    bool ranges_changed; /* Then the queue is these, and no others: */
    const struct sy_range *ranges;
    uint32_t range_count;
};

struct sy_open { /* A lease as its holder has it. */
    uint64_t lease, first, count, counted, admission;
    enum sy_lease_state state;
    bool dirty;      /* Not yet among the changes. */
    uint64_t serial; /* Of the changes that it was in; 0: restored. */
    bool told;       /* Durable: its holder may hear of it. */
};

struct sy_holder {         /* An incarnation that has leases, or had some and may come back. */
    bool used, given_back; /* Given back: it stays until its records are taken, and nobody finds it. */
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    uint32_t learner;
    uint64_t newest, done; /* The highest lease granted to it; the highest that is counted in full. */
    uint32_t open_count;   /* Ascending. */
    struct sy_open open[SY_LEASES_PER_HOLDER];
    /* The core's: */
    bool connected, for_good;
    int64_t gone_ns;
    uint32_t member; /* Its slot, or SY_NO_MEMBER. */
};

struct sy_ledger {
    uint64_t next_lease, positions, counted;
    struct sy_holder *holders;
    uint32_t holders_max, holders_end; /* None from holders_end on is used. */
    struct sy_range *queue;            /* Ascending, neither touching nor overlapping. */
    uint32_t queue_count, queue_max;
    bool queue_changed;
    uint32_t dirty_count;
    uint64_t serial;
    struct sy_lease *rows; /* Scratch of sy_ledger_changes. */
};

DL_MUST_CHECK enum dl_rc sy_ledger_init(struct sy_ledger *ledger, uint32_t holders_max, struct dl_err *err);
void sy_ledger_release(struct sy_ledger *ledger);
/* Once, before anything else. DL_ECORRUPT: the state does not balance; the text says where. */
DL_MUST_CHECK enum dl_rc sy_ledger_restore(struct sy_ledger *ledger, const struct sy_ledger_state *state,
                                           struct dl_err *err);

/* SY_NO_HOLDER: unknown; no place is free. A place is taken from one that has nothing and has been gone for longest. */
uint32_t sy_ledger_find(const struct sy_ledger *ledger, const char *uid, uint64_t nonce);
uint32_t sy_ledger_add(struct sy_ledger *ledger, const char *uid, uint64_t nonce, uint32_t learner);

/* Leases out `length` positions: from the head of the queue (as many as lie together there), else new ones. NULL: the holder
 * has all it can. */
const struct sy_open *sy_ledger_grant(struct sy_ledger *ledger, uint32_t holder, uint64_t length, uint64_t admission);

/* Whether `holder` (SY_NO_HOLDER: nobody) may count up to (lease, cursor): ACCEPTED, LEASE_LOST, or MALFORMED when the cursor
 * lies beyond the lease. Lease 0 asks for nothing. */
enum dl_verdict sy_ledger_judge(const struct sy_ledger *ledger, uint32_t holder, uint64_t lease, uint64_t cursor);
/* Counts all of the holder's leases below `lease`, and the first `cursor` positions of it; what is counted already stays.
 * Judged before. */
void sy_ledger_count(struct sy_ledger *ledger, uint32_t holder, uint64_t lease, uint64_t cursor);

/* What the holder has that is not counted goes to the queue; the holder is nobody any more. False: the queue has no room. */
bool sy_ledger_give_back(struct sy_ledger *ledger, uint32_t holder);

/* Whether there is anything to be made durable; and takes it. */
bool sy_ledger_is_dirty(const struct sy_ledger *ledger);
void sy_ledger_changes(struct sy_ledger *ledger, struct sy_ledger_changes *changes);

uint64_t sy_ledger_leased(const struct sy_ledger *ledger); /* Positions that are leased and not counted. */
uint64_t sy_ledger_queued(const struct sy_ledger *ledger);
/* NULL: every position below the high-water mark is in exactly one place; else the text of what does not hold. */
const char *sy_ledger_check(const struct sy_ledger *ledger);

#endif
