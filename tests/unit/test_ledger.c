/* The ledger of a job's data: what is leased, counted, given back; alone, and as the core keeps it (J8). */
#include "common/rng.h"
#include "syncer/core/ledger.h"
#include "tests/unit/core_rig.h"

/* --- the ledger alone -------------------------------------------------------------------------------------------- */

static struct sy_ledger ledger;

static void check(void)
{
    const char *fault = sy_ledger_check(&ledger);
    if (fault != NULL) {
        printf("invariant: %s\n", fault);
    }
    CU_ASSERT_PTR_NULL_FATAL(fault);
}

static void begin(uint32_t holders)
{
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_ledger_init(&ledger, holders, &err), DL_OK);
}

/* Makes everything durable, as the core does: from now on holders know of it. */
static struct sy_ledger_changes settle(void)
{
    struct sy_ledger_changes changes;
    sy_ledger_changes(&ledger, &changes);
    for (uint32_t h = 0; h < ledger.holders_end; h++) {
        for (uint32_t i = 0; i < ledger.holders[h].open_count; i++) {
            ledger.holders[h].open[i].told = true;
        }
    }
    check();
    return changes;
}

static uint32_t holder(uint32_t n)
{
    char uid[16];
    snprintf(uid, sizeof uid, "pod-%u", n);
    uint32_t h = sy_ledger_find(&ledger, uid, n);
    h = h == SY_NO_HOLDER ? sy_ledger_add(&ledger, uid, n, n) : h;
    if (h != SY_NO_HOLDER) {
        ledger.holders[h].connected = true;
    }
    return h;
}

static void test_ranges_follow_one_another(void)
{
    begin(4);
    uint32_t a = holder(1), b = holder(2);
    const struct sy_open *first = sy_ledger_grant(&ledger, a, 100, 1);
    const struct sy_open *second = sy_ledger_grant(&ledger, b, 50, 2);
    CU_ASSERT_EQUAL(first->lease, 1);
    CU_ASSERT_EQUAL(first->first, 0);
    CU_ASSERT_EQUAL(second->first, 100);
    CU_ASSERT_EQUAL(second->count, 50);
    CU_ASSERT_EQUAL(ledger.positions, 150);
    check();
    /* Nobody may count on what is not durable. */
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, a, 1, 5), DL_VERDICT_LEASE_LOST);
    struct sy_ledger_changes changes = settle();
    CU_ASSERT_EQUAL(changes.lease_count, 2);
    CU_ASSERT_FALSE(changes.ranges_changed);
    CU_ASSERT_EQUAL(changes.leases[0].lease, 1);
    CU_ASSERT_EQUAL(changes.leases[0].state, SY_LEASE_HELD);
    CU_ASSERT_STRING_EQUAL(changes.leases[1].uid, "pod-2");
    CU_ASSERT_FALSE(sy_ledger_is_dirty(&ledger));
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, a, 1, 100), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, a, 1, 101), DL_VERDICT_MALFORMED);
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, a, 2, 1), DL_VERDICT_LEASE_LOST); /* It is b's. */
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, SY_NO_HOLDER, 1, 1), DL_VERDICT_LEASE_LOST);
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, SY_NO_HOLDER, 0, 0), DL_VERDICT_ACCEPTED);
    sy_ledger_release(&ledger);
}

static void test_each_position_counts_once(void)
{
    begin(4);
    uint32_t a = holder(1);
    (void)sy_ledger_grant(&ledger, a, 100, 1);
    (void)sy_ledger_grant(&ledger, a, 100, 1);
    (void)settle();
    sy_ledger_count(&ledger, a, 1, 40);
    CU_ASSERT_EQUAL(ledger.counted, 40);
    sy_ledger_count(&ledger, a, 1, 30); /* Of another fragment, from an earlier step. */
    CU_ASSERT_EQUAL(ledger.counted, 40);
    sy_ledger_count(&ledger, a, 2, 10); /* The first one is through. */
    CU_ASSERT_EQUAL(ledger.counted, 110);
    CU_ASSERT_EQUAL(ledger.holders[a].open_count, 1);
    sy_ledger_count(&ledger, a, 1, 100);
    sy_ledger_count(&ledger, a, 2, 10);
    CU_ASSERT_EQUAL(ledger.counted, 110);
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, a, 1, 100), DL_VERDICT_ACCEPTED); /* Counted long ago. */
    check();
    CU_ASSERT_EQUAL(sy_ledger_leased(&ledger), 90);
    sy_ledger_count(&ledger, a, 2, 100);
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, a, 2, 100), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, a, 3, 1), DL_VERDICT_LEASE_LOST); /* Never granted. */
    check();
    sy_ledger_release(&ledger);
}

static void test_what_comes_back_goes_out_first(void)
{
    begin(4);
    uint32_t a = holder(1), b = holder(2);
    (void)sy_ledger_grant(&ledger, a, 100, 1);
    (void)sy_ledger_grant(&ledger, b, 100, 1);
    (void)sy_ledger_grant(&ledger, a, 100, 1);
    (void)settle();
    sy_ledger_count(&ledger, a, 1, 30);
    CU_ASSERT_TRUE(sy_ledger_give_back(&ledger, a));
    check();
    CU_ASSERT_EQUAL(sy_ledger_queued(&ledger), 170);
    CU_ASSERT_EQUAL(ledger.queue_count, 2);
    CU_ASSERT_EQUAL(sy_ledger_find(&ledger, "pod-1", 1), SY_NO_HOLDER);
    struct sy_ledger_changes changes = settle();
    CU_ASSERT_EQUAL(changes.lease_count, 2);
    CU_ASSERT_EQUAL(changes.leases[0].state, SY_LEASE_RETURNED);
    CU_ASSERT_EQUAL(changes.leases[0].counted, 30);
    CU_ASSERT_STRING_EQUAL(changes.leases[0].uid, "pod-1");
    CU_ASSERT_TRUE(changes.ranges_changed);
    CU_ASSERT_EQUAL(changes.range_count, 2);
    CU_ASSERT_EQUAL(changes.ranges[0].first, 30);
    CU_ASSERT_EQUAL(changes.ranges[0].count, 70);
    CU_ASSERT_EQUAL(changes.ranges[1].first, 200);
    /* A short range is given out as it is, a longer one in part; new positions come last. */
    uint32_t c = holder(3);
    const struct sy_open *got = sy_ledger_grant(&ledger, c, 100, 3);
    CU_ASSERT(got->first == 30 && got->count == 70);
    got = sy_ledger_grant(&ledger, c, 60, 3);
    CU_ASSERT(got->first == 200 && got->count == 60);
    got = sy_ledger_grant(&ledger, c, 60, 3);
    CU_ASSERT(got->first == 260 && got->count == 40);
    got = sy_ledger_grant(&ledger, c, 60, 3);
    CU_ASSERT(got->first == 300 && got->count == 60);
    check();
    /* Neighbours become one range again. */
    CU_ASSERT_TRUE(sy_ledger_give_back(&ledger, c));
    CU_ASSERT_EQUAL(ledger.queue_count, 2);
    CU_ASSERT_TRUE(sy_ledger_give_back(&ledger, b));
    CU_ASSERT_EQUAL(ledger.queue_count, 1);
    CU_ASSERT_EQUAL(sy_ledger_queued(&ledger), 330);
    (void)settle();
    sy_ledger_release(&ledger);
}

static void test_limits(void)
{
    begin(2);
    uint32_t a = holder(1);
    for (uint32_t i = 0; i < SY_LEASES_PER_HOLDER; i++) {
        CU_ASSERT_PTR_NOT_NULL(sy_ledger_grant(&ledger, a, 10, 1));
    }
    CU_ASSERT_PTR_NULL(sy_ledger_grant(&ledger, a, 10, 1));
    uint32_t b = holder(2);
    CU_ASSERT_NOT_EQUAL(b, SY_NO_HOLDER);
    CU_ASSERT_EQUAL(holder(3), SY_NO_HOLDER); /* Both are connected. */
    ledger.holders[b].connected = false;
    CU_ASSERT_EQUAL(holder(3), b); /* One that has nothing gives way. */
    (void)settle();
    /* The queue is full: what would go there stays leased. */
    ledger.queue_max = SY_LEASES_PER_HOLDER - 1;
    CU_ASSERT_FALSE(sy_ledger_give_back(&ledger, a));
    CU_ASSERT_EQUAL(sy_ledger_leased(&ledger), 10 * SY_LEASES_PER_HOLDER);
    check();
    ledger.queue_max = SY_LEASES_PER_HOLDER;
    CU_ASSERT_TRUE(sy_ledger_give_back(&ledger, a));
    (void)settle();
    sy_ledger_release(&ledger);
}

static void test_a_state_that_does_not_balance_is_refused(void)
{
    struct sy_lease leases[2] = {{.lease = 1, .first = 0, .count = 100, .counted = 20, .uid = "pod-1", .nonce = 1},
                                 {.lease = 2, .first = 100, .count = 50, .uid = "pod-2", .nonce = 2}};
    struct sy_range range = {.first = 150, .count = 30};
    struct sy_ledger_state state = {.leases = leases,
                                    .lease_count = 2,
                                    .ranges = &range,
                                    .range_count = 1,
                                    .next_lease = 3,
                                    .positions = 180,
                                    .counted = 20};
    struct dl_err err;
    begin(2);
    CU_ASSERT_EQUAL(sy_ledger_restore(&ledger, &state, &err), DL_OK);
    CU_ASSERT_EQUAL(sy_ledger_judge(&ledger, sy_ledger_find(&ledger, "pod-2", 2), 2, 50), DL_VERDICT_ACCEPTED);
    sy_ledger_release(&ledger);
    for (int fault = 0; fault < 4; fault++) {
        struct sy_lease wrong[2] = {leases[0], leases[1]};
        state.leases = wrong;
        state.counted = fault == 0 ? 21 : 20;
        wrong[1].first = fault == 1 ? 99 : 100;
        range.first = fault == 2 ? 149 : 150;
        wrong[0].counted = fault == 3 ? 101 : 20;
        begin(2);
        CU_ASSERT_EQUAL(sy_ledger_restore(&ledger, &state, &err), DL_ECORRUPT);
        CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "ledger"));
        sy_ledger_release(&ledger);
    }
}

/* Random grants, counts and returns, each position followed by itself. */
static void test_nothing_is_lost_or_counted_twice(void)
{
    enum { HOLDERS = 6, POSITIONS = 200000, EVENTS = 20000 };
    static uint8_t counted[POSITIONS];
    memset(counted, 0, sizeof counted);
    struct dl_rng rng;
    dl_rng_init(&rng, 5, dl_rng_stream("ledger", 0, 0));
    begin(HOLDERS);
    uint32_t born = 0, ids[HOLDERS] = {0};
    uint64_t returns = 0, twice = 0;
    for (uint32_t e = 0; e < EVENTS && ledger.positions < POSITIONS - 100; e++) {
        uint32_t n = (uint32_t)dl_rng_below(&rng, HOLDERS);
        ids[n] = ids[n] == 0 ? ++born : ids[n];
        uint32_t h = holder(ids[n]);
        struct sy_holder *who = &ledger.holders[h];
        uint64_t what = dl_rng_below(&rng, 10);
        if (what < 4) {
            (void)sy_ledger_grant(&ledger, h, 1 + dl_rng_below(&rng, 64), 1);
        } else if (what < 9 && who->open_count > 0) {
            (void)settle();
            uint32_t at = (uint32_t)dl_rng_below(&rng, who->open_count);
            uint64_t cursor = dl_rng_below(&rng, who->open[at].count + 1), lease = who->open[at].lease;
            for (uint32_t i = 0; i <= at; i++) {
                const struct sy_open *open = &who->open[i];
                for (uint64_t k = open->counted; k < (i < at ? open->count : cursor); k++) {
                    twice += counted[open->first + k]++;
                }
            }
            CU_ASSERT_EQUAL_FATAL(sy_ledger_judge(&ledger, h, lease, cursor), DL_VERDICT_ACCEPTED);
            sy_ledger_count(&ledger, h, lease, cursor);
        } else if (what == 9) {
            CU_ASSERT_TRUE(sy_ledger_give_back(&ledger, h));
            (void)settle();
            ids[n] = 0;
            returns++;
        }
        check();
    }
    uint64_t sum = 0;
    for (uint32_t g = 0; g < POSITIONS; g++) {
        sum += counted[g];
    }
    CU_ASSERT_EQUAL(twice, 0);
    CU_ASSERT_EQUAL(sum, ledger.counted);
    CU_ASSERT(returns > 500 && ledger.counted > 5000);
    sy_ledger_release(&ledger);
}

/* --- as the core keeps it ---------------------------------------------------------------------------------------- */

static void ask(struct rig *rig, uint32_t member, uint64_t last)
{
    struct dl_wire_lease_request request = {.last = last, .batch = 4, .want = 1};
    sy_core_on_lease_request(rig->core, rig->now_ns, member, &request);
    rig_event(rig);
}

/* What the LEDGER action asks for becomes durable. */
static struct sy_ledger_changes write_down(struct rig *rig)
{
    CU_ASSERT_EQUAL_FATAL(rig_count(rig, SY_ACT_LEDGER), 1);
    struct sy_ledger_changes changes;
    sy_core_ledger_changes(rig->core, &changes);
    sy_core_on_ledger_durable(rig->core, rig->now_ns, changes.serial);
    rig_event(rig);
    return changes;
}

static struct dl_wire_lease lease_of(const struct rig *rig, uint32_t member, uint32_t n)
{
    for (uint32_t i = 0; i < rig->count; i++) {
        if (rig->actions[i].type == SY_ACT_LEASE && rig->actions[i].member == member && n-- == 0) {
            return rig->actions[i].as.lease;
        }
    }
    return (struct dl_wire_lease){0};
}

static struct dl_wire_lease grant(struct rig *rig, uint32_t member, uint64_t last)
{
    ask(rig, member, last);
    (void)write_down(rig);
    return lease_of(rig, member, 0);
}

static struct rig *three_learners(void)
{
    struct rig *rig = rig_spec();
    rig->spec->training.data.lease_sequences = 50; /* Rounded up to 52: whole batches of 4. */
    rig->spec->sync.quorum = (struct dl_count_or_percent){2, false};
    rig_start(rig);
    rig_seed(rig, 3);
    return rig;
}

/* All step until a round opens; its number. */
static uint64_t open_round(struct rig *rig, uint32_t fragment)
{
    for (uint32_t i = 0; i < 100; i++) {
        for (uint32_t m = 0; m < 3; m++) {
            rig_step(rig, m);
            const struct dl_wire_pull *pull = rig_pull(rig, m, fragment);
            if (pull != NULL) {
                return pull->round;
            }
        }
    }
    CU_FAIL_FATAL("no round");
    return 0;
}

static enum dl_verdict push_with(struct rig *rig, uint32_t member, uint32_t fragment, uint64_t round, uint64_t lease,
                                 uint64_t cursor)
{
    struct dl_wire_push push = rig_push_of(rig, member, fragment, round);
    push.lease = lease;
    push.cursor = cursor;
    enum dl_verdict verdict = rig_announce(rig, member, &push);
    if (verdict == DL_VERDICT_ACCEPTED) {
        rig_received(rig, member, fragment, round, 1);
    }
    return verdict;
}

static void test_granted_once_told_when_durable(void)
{
    struct rig *rig = three_learners();
    ask(rig, 1, 0);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEASE), 0);
    CU_ASSERT_EQUAL_FATAL(rig_count(rig, SY_ACT_LEDGER), 1);
    struct sy_ledger_changes changes;
    sy_core_ledger_changes(rig->core, &changes);
    CU_ASSERT_EQUAL(changes.lease_count, 1);
    CU_ASSERT_EQUAL(changes.leases[0].count, 52);
    uint64_t serial = changes.serial;
    ask(rig, 1, 0); /* A repeat while it is being written. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEASE) + rig_count(rig, SY_ACT_LEDGER), 0);
    sy_core_on_ledger_durable(rig->core, rig->now_ns, serial);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEASE), 1);
    CU_ASSERT_EQUAL(lease_of(rig, 1, 0).count, 52);
    ask(rig, 1, 0); /* The answer was lost: told again, nothing granted. */
    CU_ASSERT_EQUAL(lease_of(rig, 1, 0).lease, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEDGER), 0);
    CU_ASSERT_EQUAL(grant(rig, 1, 1).lease, 2);
    CU_ASSERT_EQUAL(grant(rig, 0, 0).first, 104);
    CU_ASSERT_EQUAL(rig_view(rig).data.positions, 156);
    CU_ASSERT_EQUAL(rig_view(rig).data.leased, 156);
    rig_free(rig);
}

static void test_counted_with_the_merge(void)
{
    struct rig *rig = three_learners();
    CU_ASSERT_EQUAL(grant(rig, 0, 0).lease, 1);
    CU_ASSERT_EQUAL(grant(rig, 1, 0).lease, 2);
    uint64_t round = open_round(rig, 0);
    CU_ASSERT_EQUAL(push_with(rig, 0, 0, round, 1, 53), DL_VERDICT_MALFORMED);
    rig_free(rig);
    rig = three_learners();
    (void)grant(rig, 0, 0);
    (void)grant(rig, 1, 0);
    round = open_round(rig, 0);
    CU_ASSERT_EQUAL(push_with(rig, 0, 0, round, 1, 20), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(push_with(rig, 2, 0, round, 2, 4), DL_VERDICT_LEASE_LOST); /* Another's. */
    CU_ASSERT_TRUE(rig_warns(rig, "lease_lost"));
    CU_ASSERT_EQUAL(rig_view(rig).data.counted, 0);
    CU_ASSERT_EQUAL(push_with(rig, 1, 0, round, 2, 8), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL_FATAL(rig_count(rig, SY_ACT_MERGE), 1);
    const struct sy_participant *who = NULL;
    CU_ASSERT_EQUAL_FATAL(sy_core_participants(rig->core, 0, &who), 2);
    CU_ASSERT(who[0].lease == 1 && who[0].cursor == 20 && who[1].lease == 2 && who[1].cursor == 8);
    CU_ASSERT_EQUAL(rig_view(rig).data.counted, 28);
    rig_commit(rig, 0);
    CU_ASSERT_EQUAL(rig_view(rig).data.counted, 28);
    rig_free(rig);
}

/* J9: without any notice a replacement brings the data back; with one it comes back at once. */
static void test_given_back_when_gone_for_good(void)
{
    struct rig *rig = three_learners();
    (void)grant(rig, 0, 0);
    (void)grant(rig, 1, 0);
    sy_core_on_leave(rig->core, rig->now_ns, 0, SY_LEAVE_PREEMPTED);
    rig_event(rig);
    struct sy_ledger_changes changes = write_down(rig);
    CU_ASSERT_EQUAL(changes.leases[0].state, SY_LEASE_RETURNED);
    CU_ASSERT_EQUAL(rig_view(rig).data.queued, 52);
    /* Cut off: it keeps what it has (J5) ... */
    sy_core_on_leave(rig->core, rig->now_ns, 1, SY_LEAVE_LOST);
    rig_event(rig);
    rig_tick(rig, 10 * RIG_SECOND);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEDGER), 0);
    CU_ASSERT_EQUAL(rig_view(rig).data.leased, 52);
    uint32_t again;
    CU_ASSERT_EQUAL(rig_rejoin(rig, 1, 1, &again), DL_OK);
    CU_ASSERT_EQUAL(rig_view(rig).data.leased, 52);
    CU_ASSERT_EQUAL(grant(rig, again, 2).first, 0); /* What learner 0 had. */
    /* ... until a newer process has taken its place. */
    struct dl_wire_hello hello = rig_hello_of(rig, 1, 4711);
    uint32_t newer;
    CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &newer), DL_OK);
    (void)write_down(rig);
    CU_ASSERT_EQUAL(rig_view(rig).data.queued, 104);
    CU_ASSERT_EQUAL(rig_view(rig).data.leased, 0);
    rig_free(rig);
}

static void test_away_for_too_long(void)
{
    struct rig *rig = three_learners();
    (void)grant(rig, 2, 0);
    sy_core_on_leave(rig->core, rig->now_ns, 2, SY_LEAVE_LOST);
    rig_event(rig);
    int64_t bound_ns = (int64_t)(10 * rig->spec->sync.timeout_seconds) * RIG_SECOND;
    int64_t left_ns = rig->now_ns;
    while (rig->now_ns - left_ns < bound_ns - RIG_SECOND) {
        rig->now_ns += RIG_SECOND;
        rig_step(rig, 0);
        rig_step(rig, 1);
    }
    CU_ASSERT_EQUAL(rig_view(rig).data.leased, 52);
    CU_ASSERT(sy_core_next_deadline(rig->core) <= left_ns + bound_ns);
    rig_tick(rig, RIG_SECOND);
    (void)write_down(rig);
    CU_ASSERT_EQUAL(rig_view(rig).data.queued, 52);
    /* It comes back, is told, and what it pushes is refused. */
    uint32_t again;
    CU_ASSERT_EQUAL_FATAL(rig_rejoin(rig, 2, 2, &again), DL_OK);
    ask(rig, again, 1);
    CU_ASSERT_EQUAL(lease_of(rig, again, 0).revoked, 1);
    CU_ASSERT_EQUAL(lease_of(rig, again, 0).lease, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEDGER), 0);
    rig_meta(rig, again);
    uint64_t round = open_round(rig, 0);
    CU_ASSERT_EQUAL(push_with(rig, again, 0, round, 1, 4), DL_VERDICT_LEASE_LOST);
    /* From the beginning: it gets the range back, under another number. */
    struct dl_wire_lease fresh = grant(rig, again, 0);
    CU_ASSERT(fresh.lease == 2 && fresh.first == 0 && fresh.revoked == 0);
    rig_free(rig);
}

/* A push that waits in a round still counts, though its learner has left: only what is beyond it comes back. */
static void test_a_last_push_counts(void)
{
    struct rig *rig = three_learners();
    (void)grant(rig, 0, 0);
    uint64_t round = open_round(rig, 0);
    CU_ASSERT_EQUAL(push_with(rig, 0, 0, round, 1, 12), DL_VERDICT_ACCEPTED);
    sy_core_on_leave(rig->core, rig->now_ns, 0, SY_LEAVE_GOODBYE);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEDGER), 0);
    CU_ASSERT_EQUAL(rig_view(rig).data.leased, 52);
    CU_ASSERT_EQUAL(push_with(rig, 1, 0, round, 0, 0), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 1);
    /* In the order of the actions: first the merge becomes durable, then the return. */
    rig_tick(rig, RIG_MS);
    struct sy_ledger_changes changes = write_down(rig);
    CU_ASSERT_EQUAL(changes.leases[0].counted, 12);
    CU_ASSERT_EQUAL(changes.ranges[0].first, 12);
    CU_ASSERT_EQUAL(rig_view(rig).data.counted, 12);
    CU_ASSERT_EQUAL(rig_view(rig).data.queued, 40);
    rig_free(rig);
}

static void test_restart_with_other_learners(void)
{
    struct rig *rig = rig_start(rig_spec());
    struct sy_lease leases[] = {
        {.lease = 1,
         .first = 0,
         .count = 8,
         .counted = 8,
         .state = SY_LEASE_COUNTED,
         .learner = 0,
         .uid = "pod-0",
         .nonce = 100},
        {.lease = 2, .first = 8, .count = 8, .counted = 3, .learner = 1, .uid = "pod-1", .nonce = 101},
        {.lease = 3, .first = 16, .count = 8, .counted = 0, .learner = 2, .uid = "pod-2", .nonce = 102}};
    struct sy_range range = {.first = 24, .count = 6};
    struct sy_ledger_state state = {.leases = leases,
                                    .lease_count = 3,
                                    .ranges = &range,
                                    .range_count = 1,
                                    .next_lease = 5,
                                    .positions = 30,
                                    .counted = 11};
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_core_restore_ledger(rig->core, &state, &err), DL_OK);
    uint32_t zero = rig_join(rig, 0), one = rig_join(rig, 1);
    ask(rig, zero, 1); /* All of it is counted; it is known all the same, and gets the queue. */
    (void)write_down(rig);
    CU_ASSERT(lease_of(rig, zero, 0).lease == 5 && lease_of(rig, zero, 0).first == 24);
    struct dl_wire_lease_request request = {.last = 2, .batch = 4, .want = 0};
    sy_core_on_lease_request(rig->core, rig->now_ns, one, &request);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEASE) + rig_count(rig, SY_ACT_LEDGER), 0); /* What it has is its. */
    /* Learner 2 never comes back; its replacement is another process. */
    struct dl_wire_hello hello = rig_hello_of(rig, 2, 7);
    uint32_t member;
    CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &member), DL_OK);
    (void)write_down(rig);
    ask(rig, member, 0);
    (void)write_down(rig);
    CU_ASSERT_EQUAL(lease_of(rig, member, 0).first, 16);
    rig_free(rig);
}

static void test_observers_and_other_shards_have_none(void)
{
    struct rig *rig = three_learners();
    struct dl_wire_hello hello = rig_hello_of(rig, -1, 9);
    hello.role = DL_ROLE_EVALUATOR;
    uint32_t member;
    CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &member), DL_OK);
    ask(rig, member, 0);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_LEDGER), 0);
    rig_free(rig);
}

UNIT_MAIN("ledger", {"ranges follow one another", test_ranges_follow_one_another},
          {"J8: each position counts once", test_each_position_counts_once},
          {"J8: what comes back goes out first", test_what_comes_back_goes_out_first}, {"limits", test_limits},
          {"a state that does not balance", test_a_state_that_does_not_balance_is_refused},
          {"J8: nothing is lost", test_nothing_is_lost_or_counted_twice},
          {"granted once, told when durable", test_granted_once_told_when_durable},
          {"counted with the merge", test_counted_with_the_merge},
          {"J9, J5: given back when gone for good", test_given_back_when_gone_for_good},
          {"away for too long", test_away_for_too_long}, {"a last push counts", test_a_last_push_counts},
          {"J8: restart with other learners", test_restart_with_other_learners},
          {"observers", test_observers_and_other_shards_have_none})
