/* sy_core: who may join, who is who, who is still there. Tests that stand for a requirement carry its name. */
#include "tests/unit/core_rig.h"

static void test_j2_refusals(void)
{
    struct rig *rig = rig_start(rig_spec());
    static const struct {
        const char *job;
        uint32_t shard;
        int32_t learner;
        uint8_t role;
        enum dl_refusal code;
        const char *says;
    } table[] = {
        {"other", 0, 0, DL_ROLE_LEARNER, DL_REFUSE_JOB, "other"},
        {"rig", 1, 0, DL_ROLE_LEARNER, DL_REFUSE_SHARD, "shard 0"},
        {"other", 1, 0, DL_ROLE_LEARNER, DL_REFUSE_JOB, "rig"}, /* The job first: then nothing else means anything. */
        {"rig", 0, DL_SPEC_LEARNERS_MAX, DL_ROLE_LEARNER, DL_REFUSE_MALFORMED, "1024"},
        {"rig", 0, 0, 9, DL_REFUSE_MALFORMED, "role 9"},
    };
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++) {
        struct dl_wire_hello hello = rig_hello_of(rig, table[i].learner, 1);
        snprintf(hello.job, sizeof hello.job, "%s", table[i].job);
        hello.shard = table[i].shard;
        hello.role = table[i].role;
        uint32_t member;
        CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_EDENIED);
        CU_ASSERT_EQUAL(rig->refuse.code, table[i].code);
        CU_ASSERT_PTR_NOT_NULL(strstr(rig->refuse.text, table[i].says));
        CU_ASSERT_EQUAL(rig_view(rig).refusals, i + 1);
    }
    CU_ASSERT_EQUAL(rig_view(rig).connected, 0);
    rig_free(rig);
}

static void test_full_is_refused_and_room_is_found_again(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 8); /* learners.max */
    struct dl_wire_hello hello = rig_hello_of(rig, 20, 1);
    uint32_t member;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_EDENIED);
    CU_ASSERT_EQUAL(rig->refuse.code, DL_REFUSE_FULL);
    CU_ASSERT_TRUE(dl_refusal_is_temporary((enum dl_refusal)rig->refuse.code));
    sy_core_on_leave(rig->core, rig->now_ns, 3, SY_LEAVE_GOODBYE);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
    CU_ASSERT_EQUAL(rig->welcome.learner, 20);
    rig_free(rig);
}

/* --- J3, J6: whom a joiner may take its state from --- */

/* Takes the job to a first state with `count` learners that all serve, as members 0 .. count - 1. */
static void seed_serving(struct rig *rig, uint32_t count)
{
    rig_seed(rig, count);
    for (uint32_t n = 0; n < count; n++) {
        struct dl_wire_hello hello = rig_hello_of(rig, (int32_t)n, n + 100);
        uint32_t member;
        snprintf(hello.serve, sizeof hello.serve, "10.0.0.%u:7", n);
        for (uint32_t p = 0; p < rig->spec->sync.fragments; p++) {
            hello.fragments[hello.fragment_count++] = (struct dl_wire_fragment){.fragment = p, .version = 1};
        }
        CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &member), DL_OK);
        CU_ASSERT_EQUAL(member, n);
    }
}

static uint32_t join_asking(struct rig *rig, int32_t learner)
{
    uint32_t member;
    struct dl_wire_hello hello = rig_hello_of(rig, learner, (uint64_t)learner + 500);
    hello.recover = 1;
    CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &member), DL_OK);
    return member;
}

static void held(struct rig *rig, uint32_t member, uint32_t fragment, bool same)
{
    sy_core_on_held(rig->core, rig->now_ns, member, fragment, same);
    rig_event(rig);
}

static void test_j3_a_joiner_is_told_of_peers_and_says_what_they_have(void)
{
    struct rig *rig = rig_start(rig_spec());
    seed_serving(rig, 3);
    uint32_t member = join_asking(rig, 5);
    const struct sy_action *action = rig_action(rig, SY_ACT_PEERS, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(action);
    CU_ASSERT_EQUAL(action->member, member);
    CU_ASSERT_EQUAL(action->as.peers.count, 3);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 0); /* Held back until it has said what it gets from them. */
    held(rig, member, 0, true);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 0);
    held(rig, member, 1, false);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 1);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_SEND, 0)->fragment, 1);
    held(rig, member, 1, false); /* Once. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 0);
    held(rig, member, 0, false); /* The peer that had it has failed. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 1);
    held(rig, member, 9, false); /* Not of this job. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 0);
    struct dl_wire_recovered recovered = {.learner = 2, .step = 9};
    sy_core_on_recovered(rig->core, rig->now_ns, member, &recovered);
    sy_core_on_recovered(rig->core, rig->now_ns, member, &recovered);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_view(rig).recoveries, 1);
    struct sy_member_view view;
    CU_ASSERT(sy_core_member(rig->core, member, &view));
    CU_ASSERT_EQUAL(view.recovered_from, 2);
    rig_free(rig);
}

/* What is merged while a joiner's link is busy with optimiser state passes it by; then it gets the last version, once. */
static void test_j3_a_joiner_that_has_not_spoken_is_sent_nothing(void)
{
    struct rig *rig = rig_start(rig_spec());
    seed_serving(rig, 3);
    uint32_t member = join_asking(rig, 5), evaluator = SY_NO_MEMBER;
    struct dl_wire_hello hello = rig_hello_of(rig, -1, 900);
    hello.role = DL_ROLE_EVALUATOR;
    CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &evaluator), DL_OK);
    uint32_t fragment = 0;
    for (uint32_t k = 0; k < 2 * rig->spec->sync.fragments; k++) {
        struct dl_wire_pull pull = rig_open_round(rig, 3);
        fragment = pull.fragment;
        rig_merge_all(rig, 3, &pull);
        CU_ASSERT(sy_core_holds_back(rig->core, member, fragment));
        CU_ASSERT_FALSE(sy_core_holds_back(rig->core, 0, fragment));
        CU_ASSERT_FALSE(sy_core_holds_back(rig->core, evaluator, fragment));
    }
    CU_ASSERT_FALSE(sy_core_holds_back(rig->core, SY_NO_MEMBER, fragment));
    CU_ASSERT_FALSE(sy_core_holds_back(rig->core, member, 9));
    held(rig, member, fragment, false);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 1);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_SEND, 0)->version, rig_version(rig, fragment));
    CU_ASSERT_FALSE(sy_core_holds_back(rig->core, member, fragment));
    held(rig, member, (fragment + 1) % rig->spec->sync.fragments,
         true); /* A peer has it; the next version is for all. */
    CU_ASSERT_FALSE(sy_core_holds_back(rig->core, member, (fragment + 1) % rig->spec->sync.fragments));
    CU_ASSERT(sy_core_holds_back(rig->core, member, (fragment + 2) % rig->spec->sync.fragments));
    /* It returns before it has spoken of the rest: nothing is held back from one that does not ask. */
    uint32_t again;
    hello = rig_hello_of(rig, 5, 505);
    CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &again), DL_OK);
    CU_ASSERT_EQUAL(again, member);
    CU_ASSERT_FALSE(sy_core_holds_back(rig->core, member, (fragment + 2) % rig->spec->sync.fragments));
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), rig->spec->sync.fragments);
    rig_free(rig);
}

/* Healthy: connected, serving, trained, heard of late, and with the current version of every fragment or the one before. */
static void test_j3_only_healthy_peers_are_named(void)
{
    struct rig *rig = rig_start(rig_spec());
    seed_serving(rig, 4);
    sy_core_on_leave(rig->core, rig->now_ns, 0, SY_LEAVE_LOST);
    rig_event(rig);
    rig->now_ns += (int64_t)(rig->spec->sync.timeout_seconds * 0.6e9); /* Member 1 has gone silent. */
    sy_core_on_heard(rig->core, rig->now_ns, 2);
    sy_core_on_heard(rig->core, rig->now_ns, 3);
    rig_event(rig);
    uint32_t joiner = join_asking(rig, 5);
    const struct sy_action *action = rig_action(rig, SY_ACT_PEERS, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(action);
    CU_ASSERT_EQUAL(action->as.peers.count, 2);
    for (uint32_t i = 0; i < action->as.peers.count; i++) {
        CU_ASSERT(action->as.peers.peers[i].learner == 2 || action->as.peers.peers[i].learner == 3);
    }
    (void)join_asking(rig, 6); /* Another joiner is no peer: it holds nothing yet. */
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_PEERS, 0)->as.peers.count, 2);
    (void)joiner;
    rig_free(rig);
}

static void test_j3_without_a_peer_the_syncer_sends_at_once(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 2); /* They do not serve. */
    (void)join_asking(rig, 5);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_PEERS, 0)->as.peers.count, 0);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), rig->spec->sync.fragments);
    rig_free(rig);
}

static void test_any_free_id(void)
{
    struct rig *rig = rig_start(rig_spec());
    uint32_t member, first = 0;
    struct dl_wire_hello hello = rig_hello_of(rig, -1, 1);
    for (uint32_t n = 0; n < 3; n++) {
        snprintf(hello.uid, sizeof hello.uid, "host:%u", n);
        hello.nonce = 50 + n;
        CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
        CU_ASSERT_EQUAL(rig->welcome.learner, n);
        first = n == 0 ? member : first;
    }
    /* Lost: its id is kept for its return as long as another is free. */
    sy_core_on_leave(rig->core, rig->now_ns, first, SY_LEAVE_LOST);
    rig_event(rig);
    snprintf(hello.uid, sizeof hello.uid, "host:9");
    hello.nonce = 99;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
    CU_ASSERT_EQUAL(rig->welcome.learner, 3);
    /* Said goodbye: free for anybody. */
    sy_core_on_leave(rig->core, rig->now_ns, member, SY_LEAVE_GOODBYE);
    rig_event(rig);
    snprintf(hello.uid, sizeof hello.uid, "host:10");
    hello.nonce = 100;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
    CU_ASSERT_EQUAL(rig->welcome.learner, 3);
    /* The same process started anew is the same learner. */
    snprintf(hello.uid, sizeof hello.uid, "host:1");
    hello.nonce = 1000;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
    CU_ASSERT_EQUAL(rig->welcome.learner, 1);
    CU_ASSERT_EQUAL(rig_view(rig).leaves[SY_LEAVE_SUPERSEDED], 1);
    rig_free(rig);
}

static void test_j1_newer_incarnation_supersedes(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 2);
    struct dl_wire_hello newer = rig_hello_of(rig, 1, 7777);
    uint32_t member, again;
    CU_ASSERT_EQUAL(rig_hello(rig, &newer, &member), DL_OK);
    CU_ASSERT_NOT_EQUAL(member, 1);
    CU_ASSERT_EQUAL(rig->welcome.learner, 1);
    const struct sy_action *gone = rig_action(rig, SY_ACT_DISCONNECT, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(gone);
    CU_ASSERT_EQUAL(gone->member, 1);
    CU_ASSERT_PTR_NOT_NULL(strstr(gone->text, "newer incarnation"));
    CU_ASSERT_EQUAL(rig_view(rig).connected, 2);
    uint64_t admission = rig->welcome.admission;
    /* The older one comes back: it is told so, and the newer one is not disturbed. */
    CU_ASSERT_EQUAL(rig_rejoin(rig, 1, 1, &again), DL_EDENIED);
    CU_ASSERT_EQUAL(rig->refuse.code, DL_REFUSE_SUPERSEDED);
    CU_ASSERT_FALSE(dl_refusal_is_temporary((enum dl_refusal)rig->refuse.code));
    /* Also when the newer one happens to be away. */
    sy_core_on_leave(rig->core, rig->now_ns, member, SY_LEAVE_LOST);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_rejoin(rig, 1, 1, &again), DL_EDENIED);
    CU_ASSERT_EQUAL(rig_hello(rig, &newer, &again), DL_OK);
    CU_ASSERT_EQUAL(again, member);
    CU_ASSERT(rig->welcome.admission > admission);
    rig_free(rig);
}

/* One merge takes one push a learner id: the successor's, even when the predecessor's is complete. */
static void test_predecessors_push_gives_way(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 2};
    rig_start(rig);
    rig_seed(rig, 2);
    uint32_t fragment = 99;
    uint64_t round = 0;
    while (fragment == 99) {
        rig_step(rig, 0);
        rig_step(rig, 1);
        const struct sy_action *pull = rig_action(rig, SY_ACT_PULL, 0);
        fragment = pull == NULL ? 99 : pull->as.pull.fragment;
        round = pull == NULL ? 0 : pull->as.pull.round;
    }
    rig_step(rig, 0);
    CU_ASSERT_EQUAL(rig_push(rig, 1, fragment, round, 1), DL_VERDICT_ACCEPTED);
    sy_core_on_leave(rig->core, rig->now_ns, 1, SY_LEAVE_LOST);
    rig_event(rig);
    struct dl_wire_hello newer = rig_hello_of(rig, 1, 7777);
    uint32_t member;
    CU_ASSERT_EQUAL(rig_hello(rig, &newer, &member), DL_OK);
    CU_ASSERT_EQUAL(rig_result(rig, 1), DL_VERDICT_ABORTED);
    CU_ASSERT_EQUAL(rig_push(rig, 0, fragment, round, 1), DL_VERDICT_ACCEPTED);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MERGE), 0);
    rig_free(rig);
}

static void test_reconnect_keeps_counters_and_counts_nothing_twice(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 2);
    for (uint32_t s = 0; s < 5; s++) {
        rig_step(rig, 0);
        rig_step(rig, 1);
    }
    uint64_t tokens = rig_view(rig).tokens;
    CU_ASSERT_EQUAL(tokens, 10 * RIG_STEP_TOKENS);
    for (uint32_t i = 0; i < 100; i++) { /* J5: a hundred forced disconnects. */
        uint32_t member;
        if (i % 2 == 0) {
            sy_core_on_leave(rig->core, rig->now_ns, 0, SY_LEAVE_LOST);
            rig_event(rig);
        } /* Else the old connection is still up, and is taken over. */
        CU_ASSERT_EQUAL(rig_rejoin(rig, 0, 0, &member), DL_OK);
        CU_ASSERT_EQUAL(member, 0);
        rig_meta(rig, 0);
        CU_ASSERT_EQUAL(rig_view(rig).tokens, tokens);
        CU_ASSERT_EQUAL(rig_view(rig).connected, 2);
    }
    rig->members[0].step += 3; /* Trained while it was away. */
    rig->members[0].tokens += 3 * RIG_STEP_TOKENS;
    uint32_t member;
    CU_ASSERT_EQUAL(rig_rejoin(rig, 0, 0, &member), DL_OK);
    CU_ASSERT_EQUAL(rig_view(rig).tokens, tokens + 3 * RIG_STEP_TOKENS);
    struct sy_member_view view;
    CU_ASSERT_TRUE(sy_core_member(rig->core, 0, &view));
    CU_ASSERT_EQUAL(view.step, 8);
    rig_free(rig);
}

static void test_joiner_gets_what_it_lacks_before_it_is_pulled(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 1);
    CU_ASSERT_EQUAL(rig_join(rig, 5), 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 4);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0);
    CU_ASSERT_EQUAL(rig->welcome.fragment_count, 4);
    CU_ASSERT_EQUAL(rig->welcome.fragments[3].version, 1);
    /* Until it reports that it holds them, it neither paces nor is pulled. */
    rig->members[1].step = 50;
    rig_meta(rig, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0);
    CU_ASSERT_EQUAL(rig_view(rig).tokens, 0);
    rig_free(rig);
}

static void test_q6_liveness_is_by_frames_not_by_steps(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.timeout_seconds = 5;
    rig_start(rig);
    rig_seed(rig, 2);
    for (uint32_t i = 0; i < 1800; i++) { /* Half an hour between two steps, with heartbeats. */
        rig->now_ns += RIG_SECOND;
        sy_core_on_heard(rig->core, rig->now_ns, 0);
        rig_tick(rig, 0);
        CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_DISCONNECT), i == 4 ? 1 : 0); /* The other one is silent. */
    }
    struct sy_core_view view = rig_view(rig);
    CU_ASSERT_EQUAL(view.connected, 1);
    CU_ASSERT_EQUAL(view.leaves[SY_LEAVE_LOST], 1);
    rig_free(rig);
}

static void test_deadline_is_the_earliest_silence(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.timeout_seconds = 5;
    rig_start(rig);
    rig_seed(rig, 2);
    rig->now_ns += RIG_SECOND;
    sy_core_on_heard(rig->core, rig->now_ns, 0);
    CU_ASSERT_EQUAL(sy_core_next_deadline(rig->core), rig->now_ns + 4 * RIG_SECOND);
    rig->now_ns += 4 * RIG_SECOND - 1;
    rig_tick(rig, 0);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_DISCONNECT), 0);
    rig_tick(rig, 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_DISCONNECT), 1);
    CU_ASSERT_EQUAL(sy_core_next_deadline(rig->core), rig->now_ns + RIG_SECOND);
    rig_free(rig);
}

static void test_j7_observers_never_count(void)
{
    struct rig *rig = rig_spec();
    rig->spec->sync.quorum = (struct dl_count_or_percent){.value = 2};
    rig_start(rig);
    struct dl_wire_hello hello = rig_hello_of(rig, -1, 1);
    hello.role = DL_ROLE_EVALUATOR;
    uint32_t observer, member;
    snprintf(hello.uid, sizeof hello.uid, "evaluator");
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &observer), DL_OK);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 0); /* It never seeds. */
    CU_ASSERT_EQUAL(rig_view(rig).phase, SY_WAITING_FOR_LEARNERS);
    for (uint32_t n = 1; n < 16; n++) {
        snprintf(hello.uid, sizeof hello.uid, "evaluator-%u", n);
        hello.nonce = 1 + n;
        CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
    }
    hello.nonce = 100;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK); /* The last one, started anew, takes its own place. */
    snprintf(hello.uid, sizeof hello.uid, "evaluator-99");
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_EDENIED);
    CU_ASSERT_EQUAL(rig->refuse.code, DL_REFUSE_FULL);
    CU_ASSERT_EQUAL(rig_view(rig).connected, 0);
    uint32_t learner = rig_join(rig, 0); /* They take no learner's place. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_PULL), 4);
    CU_ASSERT_EQUAL(rig_view(rig).quorum_have, 1);
    /* What only learners say is ignored from an observer. */
    struct dl_wire_meta meta = {.step = 1000, .tokens = 1000000000};
    sy_core_on_meta(rig->core, rig->now_ns, observer, &meta);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_view(rig).tokens, 0);
    CU_ASSERT_EQUAL(rig_view(rig).step, 0);
    struct dl_wire_push push = {.round = 1, .steps = 1, .step = 1, .tokens = 1, .base_version = 1, .bytes = RIG_BYTES};
    CU_ASSERT_EQUAL(rig_announce(rig, observer, &push), DL_VERDICT_MALFORMED);
    struct dl_wire_evaluation evaluation = {.round = 3, .loss = 2.5, .tokens = 10};
    sy_core_on_evaluation(rig->core, rig->now_ns, observer, &evaluation);
    evaluation.loss = 2.25;
    sy_core_on_evaluation(rig->core, rig->now_ns, observer, &evaluation);
    evaluation.loss = (double)NAN;
    sy_core_on_evaluation(rig->core, rig->now_ns, observer, &evaluation);
    rig_event(rig);
    struct sy_core_view view = rig_view(rig);
    CU_ASSERT_TRUE(view.evaluated);
    CU_ASSERT_EQUAL(view.first_evaluation.loss, 2.5);
    CU_ASSERT_EQUAL(view.last_evaluation.loss, 2.25);
    CU_ASSERT_NOT_EQUAL(learner, observer);
    rig_free(rig);
}

/* Slots of those that left are reused, the one that has been away longest first; so any number may come and go. */
static void test_slots_are_reused(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 1);
    for (uint32_t i = 0; i < 500; i++) {
        struct dl_wire_hello hello = rig_hello_of(rig, (int32_t)(1 + i % 7), 10000 + i);
        snprintf(hello.uid, sizeof hello.uid, "pod-%u", i);
        hello.tokens = 10;
        hello.step = 1;
        uint32_t member;
        CU_ASSERT_EQUAL_FATAL(rig_hello(rig, &hello, &member), DL_OK);
        CU_ASSERT_FATAL(member != 0 && member < sy_core_members(rig->core));
        rig->now_ns += RIG_MS;
        if (i % 3 == 0) {
            sy_core_on_leave(rig->core, rig->now_ns, member, SY_LEAVE_LOST);
            rig_event(rig);
        }
    }
    CU_ASSERT_EQUAL(rig_view(rig).joins, 501);
    rig_free(rig);
}

/* S1: after a restart all counters go on exactly: who is known adds what it trained since, others all they have. */
static void test_restored_tokens(void)
{
    struct rig *rig = rig_spec();
    struct rig *old = rig_start(rig_spec());
    rig_start(rig);
    for (uint32_t p = 0; p < 4; p++) {
        sy_core_restore_fragment(rig->core, p, 9, 30 + p);
    }
    struct sy_core_totals totals = {.next_round = 34,
                                    .rounds_merged = 33,
                                    .tokens = 5000,
                                    .tokens_merged = 4001,
                                    .next_admission = 12,
                                    .joins = 3,
                                    .step = 38,
                                    .busy_ns = 30 * RIG_SECOND,
                                    .possible_ns = 40 * RIG_SECOND};
    totals.verdicts[DL_VERDICT_ACCEPTED] = 66;
    totals.leaves[SY_LEAVE_LOST] = 2;
    sy_core_restore_totals(rig->core, &totals);
    struct dl_wire_hello hello = rig_hello_of(rig, 0, 1);
    struct sy_core_incarnation known = {.learner = 0, .nonce = hello.nonce, .born = 4, .step = 38, .tokens = 3800};
    memcpy(known.uid, hello.uid, sizeof known.uid);
    sy_core_restore_incarnation(rig->core, &known);
    struct sy_core_incarnation older = {.learner = 0, .nonce = 99, .born = 2, .tokens = 1200, .uid = "older"};
    sy_core_restore_incarnation(rig->core, &older);
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_view(rig).verdicts[DL_VERDICT_ACCEPTED], 66);
    CU_ASSERT_EQUAL(rig_view(rig).goodput, 0.75); /* Before anyone has taken a step here, too. */
    hello.step = 40;
    hello.tokens = 4000; /* Of which 200 were trained while the syncer was down. */
    uint32_t member;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
    CU_ASSERT_EQUAL(rig->welcome.admission, 12);
    CU_ASSERT_EQUAL(rig->welcome.epoch, 7);
    CU_ASSERT_EQUAL(rig->welcome.fragments[2].version, 9);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 4);
    CU_ASSERT_EQUAL(rig_view(rig).tokens, 5200);
    CU_ASSERT_EQUAL(rig_view(rig).step, 40);
    CU_ASSERT_EQUAL(rig_view(rig).joins, 4);
    CU_ASSERT_EQUAL(rig_view(rig).tokens_merged, 1000); /* A fragment, of four. */
    struct sy_core_totals again;
    sy_core_get_totals(rig->core, &again);
    CU_ASSERT_EQUAL(again.tokens_merged, 4001);
    CU_ASSERT_EQUAL(again.busy_ns, 30 * RIG_SECOND);
    CU_ASSERT_EQUAL(again.possible_ns, 40 * RIG_SECOND);
    CU_ASSERT_EQUAL(rig_view(rig).rounds_merged, 33);
    hello = rig_hello_of(rig, 1, 2);
    hello.tokens = 2500;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
    CU_ASSERT_EQUAL(rig_view(rig).tokens, 7700); /* Nobody had counted any of it. */
    struct dl_wire_hello late = rig_hello_of(rig, 0, 99);
    snprintf(late.uid, sizeof late.uid, "older");
    uint32_t nobody;
    CU_ASSERT_EQUAL(rig_hello(rig, &late, &nobody), DL_EDENIED); /* Superseded before the restart. */
    /* A base from before the restart may have been merged then. */
    struct rig_member *m = &rig->members[member];
    *m = (struct rig_member){.step = 3, .tokens = 2800, .version = {9, 9, 9, 9}};
    rig_meta(rig, member);
    const struct sy_action *action = rig_action(rig, SY_ACT_PULL, 0);
    CU_ASSERT_PTR_NOT_NULL_FATAL(action);
    struct dl_wire_pull pull = action->as.pull;
    CU_ASSERT_EQUAL(pull.round, 34);
    m->applied_tokens[pull.fragment] = 2500;
    struct dl_wire_push push = rig_push_of(rig, member, pull.fragment, pull.round);
    push.base_version = 8;
    CU_ASSERT_EQUAL(rig_announce(rig, member, &push), DL_VERDICT_STALE_BASE);
    push.base_version = 9;
    CU_ASSERT_EQUAL(rig_announce(rig, member, &push), DL_VERDICT_ACCEPTED);
    rig_free(rig);
    rig_free(old);
}

/* A learner that is ahead of a restored syncer is not lost: it gets the current version. */
static void test_a_learner_ahead_of_the_syncer_is_sent_its_version(void)
{
    struct rig *rig = rig_start(rig_spec());
    for (uint32_t p = 0; p < 4; p++) {
        sy_core_restore_fragment(rig->core, p, 3, 10);
    }
    rig->members[0] = (struct rig_member){.step = 9, .tokens = 900, .version = {3, 4, 3, 7}};
    uint32_t member;
    CU_ASSERT_EQUAL(rig_rejoin(rig, 0, 0, &member), DL_OK);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_SEND), 2);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_SEND, 0)->fragment, 1);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_SEND, 1)->fragment, 3);
    rig_free(rig);
}

UNIT_MAIN("core_members", {"J2 refusals", test_j2_refusals}, {"full", test_full_is_refused_and_room_is_found_again},
          {"J3 a joiner is told of peers", test_j3_a_joiner_is_told_of_peers_and_says_what_they_have},
          {"J3 sent nothing", test_j3_a_joiner_that_has_not_spoken_is_sent_nothing},
          {"J3 only healthy peers", test_j3_only_healthy_peers_are_named},
          {"J3 without a peer", test_j3_without_a_peer_the_syncer_sends_at_once}, {"any free id", test_any_free_id},
          {"J1 newer incarnation", test_j1_newer_incarnation_supersedes},
          {"predecessor's push", test_predecessors_push_gives_way},
          {"J5 reconnects count nothing twice", test_reconnect_keeps_counters_and_counts_nothing_twice},
          {"joiner gets what it lacks", test_joiner_gets_what_it_lacks_before_it_is_pulled},
          {"Q6 liveness", test_q6_liveness_is_by_frames_not_by_steps},
          {"deadline", test_deadline_is_the_earliest_silence}, {"J7 observers", test_j7_observers_never_count},
          {"slots are reused", test_slots_are_reused}, {"restored tokens", test_restored_tokens},
          {"learner ahead", test_a_learner_ahead_of_the_syncer_is_sent_its_version})
