/* Checkpoints: what a shard's core says of a cut, and what its store keeps of it. That cuts over several shards are
 * consistent is the simulation's to check (core_sim). */
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "syncer/store/store.h"
#include "tests/unit/core_rig.h"

/* --- the core --------------------------------------------------------------------------------------------------------- */

static void say_marker(struct rig *rig, uint32_t member, uint64_t id)
{
    const struct dl_wire_marker marker = {.id = id, .step = 7, .tokens = 700};
    sy_core_on_marker(rig->core, rig->now_ns, member, &marker);
    rig_event(rig);
}

static void test_a_cut_is_told_to_everyone_and_closed_by_everyone(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 3);
    CU_ASSERT_TRUE(sy_core_on_cut(rig->core, rig->now_ns, 5));
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT), 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MARKER), 3);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_MARKER, 0)->as.marker.id, 5);
    CU_ASSERT_EQUAL(sy_core_cut_version(rig->core, 2), 1);
    CU_ASSERT_FALSE(sy_core_on_cut(rig->core, rig->now_ns, 5)); /* Told twice. */
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT) + rig_count(rig, SY_ACT_MARKER), 0);
    say_marker(rig, 0, 5);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT_LEARNER), 1);
    CU_ASSERT_EQUAL(rig_action(rig, SY_ACT_CUT_LEARNER, 0)->as.marker.tokens, 700);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT_CLOSED), 0);
    CU_ASSERT_FALSE(sy_core_is_channel_open(rig->core, 0));
    CU_ASSERT_TRUE(sy_core_is_channel_open(rig->core, 1));
    say_marker(rig, 0, 5); /* Again, after a reconnect. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT_LEARNER), 0);
    sy_core_on_leave(rig->core, rig->now_ns, 1, SY_LEAVE_LOST); /* Nothing more comes from there. */
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT_CLOSED), 0);
    say_marker(rig, 2, 5);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT_CLOSED), 1);
    rig_free(rig);
}

/* Another shard has begun it; and one that joins later hears of it before it gets any version. */
static void test_a_marker_makes_the_cut_and_later_ones_hear_of_it(void)
{
    struct rig *rig = rig_start(rig_spec());
    rig_seed(rig, 2);
    say_marker(rig, 1, 9);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT), 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_MARKER), 2);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT_LEARNER), 1);
    say_marker(rig, 0, 8); /* Of an older one: means nothing any more. */
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT) + rig_count(rig, SY_ACT_CUT_LEARNER), 0);
    struct dl_wire_hello hello = rig_hello_of(rig, 2, 77);
    uint32_t member = 0;
    CU_ASSERT_EQUAL(rig_hello(rig, &hello, &member), DL_OK);
    const struct sy_action *marker = rig_action(rig, SY_ACT_MARKER, 0);
    const struct sy_action *first = rig_action(rig, SY_ACT_SEND, 0);
    CU_ASSERT_TRUE_FATAL(marker != NULL && first != NULL);
    CU_ASSERT(marker < first && marker->member == member && marker->as.marker.id == 9);
    say_marker(rig, 0, 9);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT_CLOSED), 1); /* The newcomer's channel is not of the cut. */
    rig_free(rig);
}

static void test_nobody_there_and_a_restart(void)
{
    struct rig *rig = rig_start(rig_spec());
    sy_core_restore_fragment(rig->core, 0, 4, 2);
    sy_core_restore_cut(rig->core, 3);
    CU_ASSERT_FALSE(sy_core_on_cut(rig->core, rig->now_ns, 3));
    CU_ASSERT_TRUE(sy_core_on_cut(rig->core, rig->now_ns, 4));
    rig_event(rig);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT), 1);
    CU_ASSERT_EQUAL(rig_count(rig, SY_ACT_CUT_CLOSED), 1);
    CU_ASSERT_EQUAL(sy_core_cut_version(rig->core, 0), 4);
    rig_free(rig);
}

/* --- the store -------------------------------------------------------------------------------------------------------- */

static char dir[64];

static struct sy_store *open_store(void)
{
    const struct sy_store_options options = {.dir = dir, .job = "demo", .shard = 0};
    struct sy_store *store = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_store_open(&options, &store, &err), DL_OK);
    return store;
}

static void commit(struct sy_store *store, uint32_t fragment, uint64_t version)
{
    float parameters[64];
    for (uint32_t i = 0; i < 64; i++) {
        parameters[i] = (float)(fragment * 1000 + version);
    }
    const struct sy_store_commit one = {.fragment = fragment,
                                        .version = version,
                                        .round = version,
                                        .parameters = parameters,
                                        .parameters_bytes = sizeof parameters};
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_store_commit(store, &one, 1, &err), DL_OK);
    sy_store_tidy(store);
}

static uint32_t files(void)
{
    uint32_t count = 0;
    DIR *folder = opendir(dir);
    for (struct dirent *entry = folder == NULL ? NULL : readdir(folder); entry != NULL; entry = readdir(folder)) {
        count += strncmp(entry->d_name, "fragment-", 9) == 0 ? 1 : 0;
    }
    closedir(folder);
    return count;
}

static void remove_dir(void)
{
    DIR *folder = opendir(dir);
    CU_ASSERT_PTR_NOT_NULL_FATAL(folder);
    for (struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", dir, entry->d_name);
        unlink(path);
    }
    closedir(folder);
    CU_ASSERT_EQUAL(rmdir(dir), 0);
}

static struct sy_store_checkpoint describe(uint64_t id, const char *name, uint64_t version)
{
    struct sy_store_checkpoint checkpoint = {.id = id, .rounds_merged = 3, .tokens = 99, .fragment_count = 2};
    snprintf(checkpoint.name, sizeof checkpoint.name, "%s", name);
    checkpoint.fragments[0] = (struct sy_store_pinned){0, version};
    checkpoint.fragments[1] = (struct sy_store_pinned){1, version};
    return checkpoint;
}

/* S4: old versions are pruned, but for those that a checkpoint pins. */
static void test_s4_pinned_versions_stay(void)
{
    snprintf(dir, sizeof dir, "/tmp/diloco-test-pin-XXXXXX");
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(dir));
    struct sy_store *store = open_store();
    struct dl_err err;
    struct sy_store_checkpoint first = describe(11, "first", 2), second = describe(12, "", 2), list[4];
    for (uint64_t version = 1; version <= 2; version++) {
        commit(store, 0, version);
        commit(store, 1, version);
    }
    CU_ASSERT_EQUAL(sy_store_pin(store, &first, &err), DL_OK);
    CU_ASSERT_EQUAL(sy_store_pin(store, &second, &err), DL_OK);
    CU_ASSERT_EQUAL(sy_store_pin(store, &first, &err), DL_OK);
    for (uint64_t version = 3; version <= 30; version++) {
        commit(store, 0, version);
        commit(store, 1, version);
        CU_ASSERT_EQUAL(files(), version < 4 ? 4 : 6); /* Two pinned ones, and the last two of each. */
    }
    const struct sy_store_cut_learner learner = {.uid = "a", .nonce = 3, .step = 10, .tokens = 1000};
    const struct sy_store_cut_push push = {.uid = "a", .nonce = 3, .fragment = 1, .round = 3, .base_version = 2};
    const struct sy_store_cut cut = {
        .id = 12, .learner_count = 1, .push_count = 1, .learners = &learner, .pushes = &push};
    CU_ASSERT_EQUAL(sy_store_complete(store, &cut, &err), DL_OK);
    sy_store_close(store);
    store = open_store(); /* The sweep leaves them alone, too. */
    CU_ASSERT_EQUAL(files(), 6);
    uint32_t count = 0;
    CU_ASSERT_EQUAL(sy_store_checkpoints(store, list, 4, &count, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(count, 2);
    CU_ASSERT(list[0].id == 12 && list[0].is_complete && list[1].id == 11 && !list[1].is_complete);
    CU_ASSERT_STRING_EQUAL(list[1].name, "first");
    CU_ASSERT(list[1].fragment_count == 2 && list[1].fragments[1].version == 2 && list[1].tokens == 99);
    first.id = 13; /* Gone by now. */
    first.fragments[0].version = first.fragments[1].version = 5;
    CU_ASSERT_EQUAL(sy_store_pin(store, &first, &err), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(sy_store_unpin(store, 13, &err), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(sy_store_unpin(store, 11, &err), DL_OK);
    CU_ASSERT_EQUAL(files(), 6); /* The other one pins the same. */
    CU_ASSERT_EQUAL(sy_store_unpin(store, 12, &err), DL_OK);
    CU_ASSERT_EQUAL(files(), 4);
    CU_ASSERT_EQUAL(sy_store_checkpoints(store, list, 4, &count, &err), DL_OK);
    CU_ASSERT_EQUAL(count, 0);
    sy_store_close(store);
    remove_dir();
}

/* Q7: one that slept while a successor took over pins nothing. */
static void test_q7_pins_are_fenced(void)
{
    snprintf(dir, sizeof dir, "/tmp/diloco-test-pin-XXXXXX");
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(dir));
    struct sy_store *sleeper = open_store();
    commit(sleeper, 0, 1);
    commit(sleeper, 1, 1);
    struct sy_store *successor = open_store();
    const struct sy_store_checkpoint checkpoint = describe(1, "", 1);
    const uint64_t id = 1;
    struct dl_err err;
    CU_ASSERT_EQUAL(sy_store_pin(sleeper, &checkpoint, &err), DL_ECONFLICT);
    CU_ASSERT_EQUAL(sy_store_pin(successor, &checkpoint, &err), DL_OK);
    CU_ASSERT_EQUAL(sy_store_unpin(sleeper, id, &err), DL_ECONFLICT);
    sy_store_close(sleeper);
    sy_store_close(successor);
    remove_dir();
}

/* --- rolling back ------------------------------------------------------------------------------------------------------- */

static struct dl_layout *two_fragments(void)
{
    struct dl_tensor tensors[2] = {{.name = "a", .rank = 1, .shape = {DL_BLOCK}},
                                   {.name = "b", .rank = 1, .shape = {DL_BLOCK}}};
    struct dl_layout *layout = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(dl_layout_new(tensors, 2, 2, DL_LAYOUT_BALANCED, &layout, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(layout->fragments[1].padded_elements, DL_BLOCK);
    return layout;
}

/* A version of both fragments, made of a push of `uid` that has seen (lease, cursor). */
static void merge(struct sy_store *store, uint64_t version, const char *uid, uint64_t lease, uint64_t cursor)
{
    for (uint32_t fragment = 0; fragment < 2; fragment++) {
        float parameters[DL_BLOCK];
        for (uint32_t i = 0; i < DL_BLOCK; i++) {
            parameters[i] = (float)(fragment * 1000 + version);
        }
        uint64_t state[2] = {version, fragment};
        struct sy_store_participant who = {
            .nonce = 1, .step = 5 * version, .tokens = 10, .lease = lease, .cursor = cursor};
        snprintf(who.uid, sizeof who.uid, "%s", uid);
        const struct sy_store_commit one = {
            .fragment = fragment,
            .version = version,
            .round = 2 * version + fragment,
            .parameters = parameters,
            .parameters_bytes = sizeof parameters,
            .state = state,
            .state_bytes = sizeof state,
            .participants = &who,
            .participant_count = 1,
            .totals = {.next_round = 100 + version, .rounds_merged = 2 * version, .tokens = 50 * version}};
        struct dl_err err;
        CU_ASSERT_EQUAL_FATAL(sy_store_commit(store, &one, 1, &err), DL_OK);
        sy_store_tidy(store);
    }
}

static void lease(struct sy_store *store, uint64_t number, uint64_t first, uint64_t count, const char *uid)
{
    struct sy_lease one = {.lease = number, .first = first, .count = count, .state = SY_LEASE_HELD, .nonce = 1};
    snprintf(one.uid, sizeof one.uid, "%s", uid);
    const struct sy_ledger_changes changes = {.leases = &one, .lease_count = 1};
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_store_write_ledger(store, &changes, &err), DL_OK);
}

static void empty_queue(struct sy_store *store)
{
    const struct sy_ledger_changes changes = {.ranges_changed = true};
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_store_write_ledger(store, &changes, &err), DL_OK);
}

/* The newest version of both is `version`, with the content that `content` had. */
static void check_content(struct sy_store *store, uint64_t version, uint64_t content)
{
    for (uint32_t fragment = 0; fragment < 2; fragment++) {
        float parameters[DL_BLOCK];
        uint64_t state[2];
        struct sy_store_version newest;
        char damage[DL_ERR_TEXT_MAX];
        struct dl_err err;
        CU_ASSERT_EQUAL_FATAL(
            sy_store_load(store, fragment, parameters, sizeof parameters, state, sizeof state, &newest, damage, &err),
            DL_OK);
        CU_ASSERT_EQUAL(newest.version, version);
        CU_ASSERT_EQUAL(newest.round, 2 * content + fragment);
        CU_ASSERT(parameters[7] == (float)(fragment * 1000 + content) && state[0] == content && state[1] == fragment);
    }
}

/* What counts, and that all else below `positions` waits for its next learner. */
static void check_ledger(struct sy_store *store, uint64_t positions, uint64_t counted, uint32_t ranges)
{
    struct sy_ledger_state state;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_store_read_ledger(store, 8, &state, &err), DL_OK);
    uint64_t queued = 0;
    for (uint32_t i = 0; i < state.range_count; i++) {
        CU_ASSERT(i == 0 || state.ranges[i].first >= state.ranges[i - 1].first + state.ranges[i - 1].count);
        queued += state.ranges[i].count;
    }
    for (uint32_t i = 0; i < state.lease_count; i++) {
        CU_ASSERT_EQUAL(state.leases[i].state, SY_LEASE_COUNTED); /* Nobody holds anything. */
    }
    CU_ASSERT(state.positions == positions && state.counted == counted && state.range_count == ranges);
    CU_ASSERT_EQUAL(queued, positions - counted);
    free(state.leases);
    free(state.ranges);
}

static void pin(struct sy_store *store, uint64_t id, uint64_t version, uint64_t tokens)
{
    struct sy_store_checkpoint checkpoint = describe(id, "", version);
    struct dl_err err;
    checkpoint.rounds_merged = 2 * version;
    checkpoint.tokens = tokens;
    CU_ASSERT_EQUAL_FATAL(sy_store_pin(store, &checkpoint, &err), DL_OK);
}

/* S4, J8: back to a checkpoint, on from there, back to one of the new stretch, and to the first again. */
static void test_rolls_back(void)
{
    snprintf(dir, sizeof dir, "/tmp/diloco-test-pin-XXXXXX");
    CU_ASSERT_PTR_NOT_NULL_FATAL(mkdtemp(dir));
    struct sy_store *store = open_store();
    struct dl_layout *layout = two_fragments();
    struct sy_store_totals totals;
    struct dl_err err;
    lease(store, 1, 0, 100, "a");
    lease(store, 2, 100, 100, "b");
    merge(store, 1, "a", 0, 0);
    merge(store, 2, "a", 1, 40);
    pin(store, 7, 2, 100);
    lease(store, 3, 200, 100, "a");
    merge(store, 3, "a", 1, 90);
    merge(store, 4, "a", 3, 30);
    CU_ASSERT_EQUAL(sy_store_check_checkpoint(store, 7, layout, 1, &err), DL_OK);
    CU_ASSERT_EQUAL(sy_store_check_checkpoint(store, 6, layout, 1, &err), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(sy_store_roll_back(store, 6, layout, 1, &err), DL_ENOTFOUND);
    check_content(store, 4, 4);
    CU_ASSERT_EQUAL_FATAL(sy_store_roll_back(store, 7, layout, 1, &err), DL_OK);
    check_content(store, 5, 2);
    check_ledger(store, 300, 40, 3);
    sy_store_get_totals(store, &totals);
    CU_ASSERT(totals.tokens == 100 && totals.rounds_merged == 4 && totals.tokens_merged_sum == 40 && totals.step == 10);
    CU_ASSERT_EQUAL(totals.next_round, 104); /* Numbers are never given twice. */
    sy_store_close(store);
    store = open_store();
    sy_store_get_totals(store, &totals);
    CU_ASSERT(totals.tokens == 100 && totals.step == 10);
    empty_queue(store); /* All of it is leased again. */
    lease(store, 4, 40, 60, "c");
    lease(store, 5, 100, 200, "d");
    merge(store, 6, "c", 4, 60);
    pin(store, 8, 6, 130);
    merge(store, 7, "d", 5, 200);
    CU_ASSERT_EQUAL_FATAL(sy_store_roll_back(store, 8, layout, 1, &err), DL_OK);
    check_content(store, 8, 6);
    check_ledger(store, 300, 100, 1);
    sy_store_get_totals(store, &totals);
    CU_ASSERT(totals.tokens == 130 && totals.tokens_merged_sum == 60); /* Without versions 3 and 4. */
    CU_ASSERT_EQUAL_FATAL(sy_store_roll_back(store, 7, layout, 1, &err), DL_OK);
    check_content(store, 9, 2);
    check_ledger(store, 300, 40, 2);
    CU_ASSERT_EQUAL_FATAL(sy_store_roll_back(store, 7, layout, 1, &err), DL_OK); /* A repeat. */
    check_ledger(store, 300, 40, 2);
    sy_store_close(store);
    dl_layout_free(layout);
    remove_dir();
}

UNIT_MAIN("checkpoint", {"everyone", test_a_cut_is_told_to_everyone_and_closed_by_everyone},
          {"by a marker", test_a_marker_makes_the_cut_and_later_ones_hear_of_it},
          {"nobody there", test_nobody_there_and_a_restart}, {"S4 pinned versions stay", test_s4_pinned_versions_stay},
          {"Q7 fenced", test_q7_pins_are_fenced}, {"S4 J8 rolls back", test_rolls_back})
