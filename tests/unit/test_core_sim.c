/* Whole ensembles under virtual time: syncer cores and learner links, and everything that can go wrong between them.
 * First safety, with faults on; then the faults stop, and the job must finish. The seed is printed first: SIM_SEED=n
 * runs one seed alone, SIM_SEEDS=n that many from 1 or SIM_SEED on. */
#include <math.h>
#include <stdlib.h>

#include "common/mem.h"
#include "common/rng.h"
#include "sim/world.h"
#include "tests/unit/unit.h"

#define SECOND INT64_C(1000000000)
#define STEP_TOKENS 100
#define LINK_CHUNKS 7 /* Of a fragment in float32, of four. */

static const char manifest[] = "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: sim}\n"
                               "spec:\n  training: {tokenBudget: 1000000, data: {paths: [x]}}\n"
                               "  learners: {min: 1, replicas: 4, max: 8}\n";

static struct dl_spec *new_spec(void)
{
    struct dl_spec *spec = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(dl_spec_parse(manifest, sizeof manifest - 1, "sim", &spec, NULL, &err), DL_OK);
    return spec;
}

/* Ten steps a second, no faults, and a budget that is not reached. */
static struct sim_world *new_calm_world(struct dl_spec *spec)
{
    spec->training.token_budget = 1000000000;
    struct sim_config config = {.seed = 1, .spec = spec, .step_tokens = STEP_TOKENS};
    sim_faults_none(&config.faults);
    config.faults.step_seconds = 0.1;
    struct sim_world *world = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sim_world_new(&config, &world, &err), DL_OK);
    return world;
}

static void draw_spec(struct dl_spec *spec, struct dl_rng *rng)
{
    spec->learners.replicas = 1 + (uint32_t)dl_rng_below(rng, 6);
    spec->learners.max = spec->learners.replicas + (uint32_t)dl_rng_below(rng, 3);
    spec->sync.fragments = 1 + (uint32_t)dl_rng_below(rng, 6);
    spec->syncer.shards = 1 + (uint32_t)dl_rng_below(rng, spec->sync.fragments > 1 ? 2 : 1);
    spec->sync.interval = 1 + (uint32_t)dl_rng_below(rng, 12);
    spec->sync.overlap = (uint32_t)dl_rng_below(rng, spec->sync.interval);
    spec->sync.mode = dl_rng_below(rng, 4) == 0 ? DL_SYNC_SYNCHRONOUS : DL_SYNC_DECOUPLED;
    spec->sync.quorum = (struct dl_count_or_percent){1 + (uint32_t)dl_rng_below(rng, spec->learners.replicas), false};
    spec->sync.warmup.steps = dl_rng_below(rng, 2) == 0 ? 0 : (uint32_t)dl_rng_below(rng, 40);
    spec->sync.warmup.interval = 1 + (uint32_t)dl_rng_below(rng, 4);
    spec->sync.warmup.quorum = (struct dl_count_or_percent){25 * (1 + (uint32_t)dl_rng_below(rng, 4)), true};
    spec->sync.grace.mode = (enum dl_grace_mode)dl_rng_below(rng, 3);
    spec->sync.grace.max_seconds = 0.1 + (double)dl_rng_below(rng, 50) / 10;
    spec->sync.merge.staleness_max = (uint32_t)dl_rng_below(rng, 4);
    spec->sync.merge.staleness_decay = (double)dl_rng_below(rng, 2) / 10;
    spec->sync.heartbeat_seconds = 1;
    spec->sync.timeout_seconds = 3 + (double)dl_rng_below(rng, 8);
    spec->sync.finish_seconds = 5;
    spec->training.data.lease_sequences = (uint32_t)dl_rng_below(rng, 100);
    spec->sync.apply = dl_rng_below(rng, 3) == 0 ? DL_APPLY_REBASE : DL_APPLY_OVERWRITE;
    spec->training.token_budget = (uint64_t)STEP_TOKENS * spec->learners.replicas * (20 + dl_rng_below(rng, 60));
}

static void add_counts(struct sim_counts *sum, const struct sim_counts *one)
{
    uint64_t *to = (uint64_t *)sum;
    const uint64_t *from = (const uint64_t *)one;
    for (size_t i = 0; i < sizeof *sum / sizeof *to; i++) {
        to[i] += from[i];
    }
}

static void describe(const struct sim_world *world, const struct dl_spec *spec)
{
    for (uint32_t s = 0; s < spec->syncer.shards; s++) {
        const struct sy_core *core = sim_world_core(world, s);
        struct sy_core_view view;
        if (core == NULL) {
            continue;
        }
        sy_core_view(core, sim_world_now(world), &view);
        printf("  shard %u: %s \"%s\" tokens %llu of %llu rounds %llu connected %u\n", s, sy_phase_name(view.phase),
               view.message, (unsigned long long)view.tokens, (unsigned long long)spec->training.token_budget,
               (unsigned long long)view.rounds_merged, view.connected);
    }
    for (uint32_t n = 0; n < spec->learners.replicas; n++) {
        struct sim_learner_view view;
        sim_world_learner(world, n, &view);
        printf("  learner %u: alive %d step %llu all %llu incarnations %u\n", n, view.alive,
               (unsigned long long)view.step, (unsigned long long)view.steps_all, view.incarnations);
    }
}

/* True when all held and the job finished in time. */
static bool run_seed(uint64_t seed, struct sim_counts *sum)
{
    struct dl_rng rng;
    dl_rng_init(&rng, seed, dl_rng_stream("scenario", 0, 0));
    struct dl_spec *spec = new_spec();
    struct sim_config config = {.seed = seed, .spec = spec, .step_tokens = STEP_TOKENS, .note_share = 0.1};
    draw_spec(spec, &rng);
    sim_faults_draw(&config.faults, &rng);
    struct sim_world *world = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sim_world_new(&config, &world, &err), DL_OK);
    bool over = false;
    enum dl_rc rc = sim_world_run(world, (int64_t)(5 + dl_rng_below(&rng, 40)) * SECOND, &over, &err);
    if (rc == DL_OK && !over) {
        sim_world_heal(world);
        /* The slowest learner of a quorum of all takes up to 8 s a step, of which it may need all. */
        rc = sim_world_run(world, sim_world_now(world) + 2000 * SECOND, &over, &err);
    }
    if (rc != DL_OK || !over) {
        printf("\nSIM_SEED=%llu: %s\n", (unsigned long long)seed, rc != DL_OK ? err.text : "did not finish");
        describe(world, spec);
    }
    add_counts(sum, sim_world_counts(world));
    sim_world_free(world);
    dl_spec_free(spec);
    return rc == DL_OK && over;
}

static void test_faults_then_finish(void)
{
    const char *one = getenv("SIM_SEED"), *many = getenv("SIM_SEEDS");
    uint64_t first = one != NULL ? strtoull(one, NULL, 10) : 1;
    uint64_t count = many != NULL ? strtoull(many, NULL, 10) : one != NULL ? 1 : 600;
    struct sim_counts sum = {0};
    uint64_t failed = 0;
    printf("seeds %llu to %llu ", (unsigned long long)first, (unsigned long long)(first + count - 1));
    for (uint64_t seed = first; seed < first + count && failed < 5; seed++) {
        failed += run_seed(seed, &sum) ? 0 : 1;
    }
    CU_ASSERT_EQUAL(failed, 0);
    printf(
        "events %llu merges %llu seeds %llu cuts %llu half-open %llu blocks %llu kills %llu stalls %llu crashes %llu "
        "drains %llu pauses %llu damaged %llu nan %llu absurd %llu repeats %llu full %llu checkpoints %llu recoveries "
        "%llu of %llu "
        "fragments ",
        (unsigned long long)sum.events, (unsigned long long)sum.merges, (unsigned long long)sum.seeds,
        (unsigned long long)sum.cuts, (unsigned long long)sum.half_open, (unsigned long long)sum.blocks,
        (unsigned long long)sum.kills, (unsigned long long)sum.stalls, (unsigned long long)sum.crashes,
        (unsigned long long)sum.drains, (unsigned long long)sum.pauses, (unsigned long long)sum.damaged,
        (unsigned long long)sum.nans, (unsigned long long)sum.absurd, (unsigned long long)sum.repeats,
        (unsigned long long)sum.full_disks, (unsigned long long)sum.cuts_made, (unsigned long long)sum.recoveries,
        (unsigned long long)sum.fragments_recovered);
    printf("leases %llu returned %llu counted %llu of %llu, unleased %llu ", (unsigned long long)sum.leases,
           (unsigned long long)sum.returns, (unsigned long long)sum.counted, (unsigned long long)sum.sequences,
           (unsigned long long)sum.unleased);
    if (one == NULL && count >= 100) {
        /* Each kind of fault has really happened. */
        CU_ASSERT(sum.merges > 0 && sum.cuts > 0 && sum.half_open > 0 && sum.blocks > 0 && sum.kills > 0 &&
                  sum.stalls > 0);
        CU_ASSERT(sum.crashes > 0 && sum.drains > 0 && sum.pauses > 0 && sum.damaged > 0 && sum.nans > 0 &&
                  sum.absurd > 0);
        CU_ASSERT(sum.traced > sum.merges && sum.traces_adopted > 0); /* J9 */
        CU_ASSERT(sum.recoveries > 0 && sum.fragments_recovered > 0); /* J6: what was adopted is what was committed. */
        CU_ASSERT(sum.cuts_made > count);                             /* Checkpoints over all shards. */
        CU_ASSERT(sum.repeats > 0 && sum.full_disks > 0 && sum.late_joins > 0);
        CU_ASSERT(sum.leases > 0 && sum.returns > 0 && sum.counted > 0);
    }
}

/* --- nothing waits for the absent --------------------------------------------------------------------------------------- */

struct rates { /* Of learners 0 and 1 over half a minute. */
    double steps_per_second, waited_share;
    uint64_t rounds;
};

/* Four learners of one speed; then, when `hampered`, one is four times slower and one stands still. */
static struct rates run_hampered(uint32_t warmup_steps, bool hampered)
{
    struct dl_spec *spec = new_spec();
    spec->sync.fragments = 4;
    spec->sync.interval = 8;
    spec->sync.warmup.steps = warmup_steps;
    spec->sync.heartbeat_seconds = 1;
    spec->sync.timeout_seconds = 60; /* The one that stands still counts as connected all the while. */
    struct sim_world *world = new_calm_world(spec);
    struct dl_err err;
    bool over = false;
    CU_ASSERT_EQUAL_FATAL(sim_world_run(world, 10 * SECOND, &over, &err), DL_OK);
    if (hampered) {
        sim_world_set_speed(world, 2, 4);
        sim_world_stall(world, 3, 40);
    }
    struct sim_learner_view before[2], after[2];
    struct sy_core_view first, last;
    sy_core_view(sim_world_core(world, 0), sim_world_now(world), &first);
    for (uint32_t n = 0; n < 2; n++) {
        sim_world_learner(world, n, &before[n]);
    }
    CU_ASSERT_EQUAL_FATAL(sim_world_run(world, 40 * SECOND, &over, &err), DL_OK);
    struct rates rates = {0};
    for (uint32_t n = 0; n < 2; n++) {
        sim_world_learner(world, n, &after[n]);
        rates.steps_per_second += (double)(after[n].step - before[n].step) / 30 / 2;
        rates.waited_share += (after[n].waited_seconds - before[n].waited_seconds) / 30 / 2;
    }
    sy_core_view(sim_world_core(world, 0), sim_world_now(world), &last);
    CU_ASSERT_EQUAL(sim_world_counts(world)->unleased, 0); /* Leases come before they are needed. */
    rates.rounds = last.rounds_merged - first.rounds_merged;
    CU_ASSERT_EQUAL(last.phase, warmup_steps > 0 ? SY_WARMUP : SY_TRAINING);
    sim_world_free(world);
    dl_spec_free(spec);
    return rates;
}

/* Of four learners with H = 8, ten steps a second and four fragments, a round every 0.2 s: the share of learner 2's work that is
 * merged, of its tokens in each fragment, when its steps take `slower` times as long, and a fragment `link_seconds` on its link,
 * each way. */
static double merged_share(double slower, double link_seconds, uint32_t quorum)
{
    struct dl_spec *spec = new_spec();
    spec->sync.fragments = 4;
    spec->sync.interval = 8;
    spec->sync.warmup.steps = 0;
    spec->sync.compression = spec->sync.broadcast_compression = DL_CODEC_NONE; /* Of several chunks. */
    spec->sync.quorum = (struct dl_count_or_percent){.value = quorum};
    struct sim_world *world = new_calm_world(spec);
    struct dl_err err;
    bool over = false;
    sim_world_set_speed(world, 2, slower);
    sim_world_set_link(world, 2, link_seconds / LINK_CHUNKS);
    CU_ASSERT_EQUAL_FATAL(sim_world_run(world, 120 * SECOND, &over, &err), DL_OK);
    struct sim_learner_view fast, slow;
    sim_world_learner(world, 0, &fast);
    sim_world_learner(world, 2, &slow);
    struct sy_core_view view;
    sy_core_view(sim_world_core(world, 0), sim_world_now(world), &view);
    double share = (double)slow.merged_tokens / (double)(slow.tokens * spec->sync.fragments);
    double fast_share = (double)fast.merged_tokens / (double)(fast.tokens * spec->sync.fragments);
    printf("\n    %gx, link %g s, K=%u: %llu steps, %.2f merged (fast: %.2f), late %llu stale %llu; rounds %llu, "
           "pushes %llu, "
           "a version or more behind %llu ",
           slower, link_seconds, quorum, (unsigned long long)slow.step, share, fast_share,
           (unsigned long long)view.verdicts[DL_VERDICT_LATE], (unsigned long long)view.verdicts[DL_VERDICT_STALE_BASE],
           (unsigned long long)view.rounds_merged, (unsigned long long)sim_world_counts(world)->pushes_merged,
           (unsigned long long)sim_world_counts(world)->stale_merged);
    CU_ASSERT_EQUAL(fast.waited_seconds, 0);
    /* Where the quorum is all of the fast, what the slow one brings takes nobody's place. */
    CU_ASSERT(quorum == 1 || (slower > 1 && slower < 2) || fast_share > 0.6);
    CU_ASSERT(slower > 1 || view.rounds_merged >= 590);
    sim_world_free(world);
    dl_spec_free(spec);
    return share;
}

/* Q6: a slow learner holds up nobody, and its work counts all the same, however long its steps are against H. */
static void test_slow_learner_is_merged(void)
{
    static const double factors[] = {1.5, 2, 4, 4.13, 7.9, 8, 16, 20, 24, 60};
    for (size_t i = 0; i < DL_COUNT_OF(factors); i++) {
        for (uint32_t quorum = 1; quorum <= 3; quorum += 2) {
            double share = merged_share(factors[i], 0, quorum);
            CU_ASSERT(share > (factors[i] < 2 ? 0.5 : factors[i] < 60 ? 0.9 : 0.8));
        }
    }
}

/* Q6: behind a link on which a push is late in most rounds, what missed one is merged in the next. (One that takes longer
 * than its round stays open is late in every round; that holds up nobody either.) */
static void test_learner_behind_a_slow_link_is_merged(void)
{
    static const double seconds[] = {0.02, 0.05, 0.08, 0.1, 0.3};
    for (size_t i = 0; i < DL_COUNT_OF(seconds); i++) {
        for (uint32_t quorum = 1; quorum <= 3; quorum += 2) {
            double share = merged_share(1, seconds[i], quorum);
            CU_ASSERT(seconds[i] > 0.1 || share > 0.6);
        }
    }
}

static void test_decoupled_learners_never_wait(void)
{
    struct rates free = run_hampered(0, false), hampered = run_hampered(0, true);
    printf("steps/s %.2f, hampered %.2f ", free.steps_per_second, hampered.steps_per_second);
    CU_ASSERT(free.rounds >= 145 && free.rounds <= 155); /* 300 steps, a round every two. */
    CU_ASSERT_EQUAL(hampered.waited_share, 0);
    CU_ASSERT(hampered.steps_per_second > 0.99 * free.steps_per_second);
    CU_ASSERT(hampered.rounds > 0.95 * (double)free.rounds);
}

static void test_warmup_is_held_up_by_nobody_for_long(void)
{
    struct rates free = run_hampered(10000, false), hampered = run_hampered(10000, true);
    printf("steps/s %.2f (waiting %.2f), hampered %.2f (waiting %.2f) ", free.steps_per_second, free.waited_share,
           hampered.steps_per_second, hampered.waited_share);
    CU_ASSERT(hampered.steps_per_second > 0.9 * free.steps_per_second);
    CU_ASSERT(hampered.rounds > 0.9 * (double)free.rounds);
}

/* In a synchronous form the fast wait for the slow, and nothing else: the slowest goes at its own speed. */
static void test_synchronous_form_goes_at_the_slowest_ones_speed(void)
{
    struct dl_spec *spec = new_spec();
    spec->sync.mode = DL_SYNC_SYNCHRONOUS;
    spec->sync.fragments = 4;
    spec->sync.interval = 8;
    spec->sync.overlap = 2;
    spec->sync.quorum = (struct dl_count_or_percent){.value = 100, .is_percent = true};
    struct sim_world *world = new_calm_world(spec);
    struct dl_err err;
    bool over = false;
    sim_world_set_speed(world, 2, 3);
    CU_ASSERT_EQUAL_FATAL(sim_world_run(world, 60 * SECOND, &over, &err), DL_OK);
    struct sim_learner_view fast, slow;
    sim_world_learner(world, 0, &fast);
    sim_world_learner(world, 2, &slow);
    struct sy_core_view view;
    sy_core_view(sim_world_core(world, 0), sim_world_now(world), &view);
    printf("steps %llu and %llu rounds %llu ", (unsigned long long)fast.step, (unsigned long long)slow.step,
           (unsigned long long)view.rounds_merged);
    CU_ASSERT(slow.step > 190);
    CU_ASSERT(fast.step <= slow.step + 4 && fast.step >= slow.step);
    CU_ASSERT(view.rounds_merged > 90); /* One every two steps. */
    sim_world_free(world);
    dl_spec_free(spec);
}

/* --- the job's data --------------------------------------------------------------------------------------------------- */

static struct sim_world *tame_world(struct dl_spec *spec)
{
    spec->training.data.lease_sequences = 40; /* Ten steps'. */
    spec->sync.interval = 8;
    spec->sync.warmup.steps = 0;
    spec->sync.heartbeat_seconds = 1;
    spec->sync.timeout_seconds = 3;
    spec->syncer.shards = 2;
    return new_calm_world(spec);
}

static struct sy_core_view run_for(struct sim_world *world, double seconds)
{
    struct dl_err err;
    bool over = false;
    struct sy_core_view view = {0};
    enum dl_rc rc = sim_world_run(world, sim_world_now(world) + (int64_t)(seconds * 1e9), &over, &err);
    if (rc != DL_OK) {
        printf("%s\n", err.text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    if (sim_world_core(world, 0) != NULL) {
        sy_core_view(sim_world_core(world, 0), sim_world_now(world), &view);
    }
    return view;
}

/* J5, J8: cut off, a learner trains on and keeps its data; for too long, it is given to others, and what it trained on is
 * pushed by nobody. (Each position that is counted twice ends the simulation.) */
static void test_cut_off_and_cut_off_for_too_long(void)
{
    struct dl_spec *spec = new_spec();
    struct sim_world *world = tame_world(spec);
    struct sim_learner_view before, after;
    (void)run_for(world, 10);
    sim_world_isolate(world, 1, 20);
    (void)run_for(world, 5);
    sim_world_learner(world, 1, &before);
    struct sy_core_view view = run_for(world, 25);
    sim_world_learner(world, 1, &after);
    CU_ASSERT(after.step > before.step + 200); /* It never stood still, */
    CU_ASSERT_EQUAL(after.incarnations, 1);
    CU_ASSERT_EQUAL(after.leases_lost, 0); /* kept what it had, */
    CU_ASSERT(after.unleased > 0);         /* and went on without when that was used up. */
    CU_ASSERT_EQUAL(view.verdicts[DL_VERDICT_LEASE_LOST], 0);
    CU_ASSERT_EQUAL(sim_world_counts(world)->returns, 0);
    (void)run_for(world, 10);
    sim_world_isolate(world, 1, 60); /* Twice the bound of ten timeouts. */
    view = run_for(world, 55);
    CU_ASSERT(sim_world_counts(world)->returns > 0);
    CU_ASSERT_EQUAL(view.data.queued, 0); /* Others had it at once. */
    view = run_for(world, 30);
    sim_world_learner(world, 1, &after);
    CU_ASSERT_EQUAL(after.leases_lost, 1);
    CU_ASSERT_EQUAL(after.incarnations, 1);
    uint64_t unleased = after.unleased, step = after.step;
    struct sy_core_view last = run_for(world, 20);
    sim_world_learner(world, 1, &after);
    CU_ASSERT_EQUAL(after.unleased, unleased); /* It has leases again, */
    CU_ASSERT(after.step > step + 150);
    CU_ASSERT(last.data.counted > view.data.counted + 4 * 4 * 150); /* and counts as do the other three. */
    sim_world_free(world);
    dl_spec_free(spec);
}

/* J8: two restarts in a row, and one with fewer learners than before. */
static void test_data_over_restarts(void)
{
    struct dl_spec *spec = new_spec();
    struct sim_world *world = tame_world(spec);
    struct sy_core_view before = run_for(world, 10);
    CU_ASSERT(before.data.counted > 0);
    sim_world_crash(world, 0, 2);
    (void)run_for(world, 2.5);
    sim_world_crash(world, 0, 1);
    struct sy_core_view after = run_for(world, 5);
    CU_ASSERT(after.data.counted >= before.data.counted && after.data.positions >= before.data.positions);
    CU_ASSERT_EQUAL(sim_world_counts(world)->returns, 0); /* All came back, and have what they had. */
    sim_world_crash(world, 0, 1);
    sim_world_kill(world, 2, -1);
    sim_world_kill(world, 3, -1);
    (void)run_for(world, 10);
    CU_ASSERT_EQUAL(sim_world_counts(world)->returns, 0);
    after = run_for(world, 40); /* Two never come back: after a while others have their data. */
    CU_ASSERT(sim_world_counts(world)->returns >= 2);
    CU_ASSERT_EQUAL(after.data.queued, 0);
    CU_ASSERT(after.data.leased <= 2 * 80);
    sim_world_free(world);
    dl_spec_free(spec);
}

UNIT_MAIN("core_sim", {"faults, then the job finishes", test_faults_then_finish},
          {"decoupled learners never wait", test_decoupled_learners_never_wait},
          {"a slow learner is merged", test_slow_learner_is_merged},
          {"behind a slow link", test_learner_behind_a_slow_link_is_merged},
          {"synchronous form", test_synchronous_form_goes_at_the_slowest_ones_speed},
          {"warm-up is held up by nobody", test_warmup_is_held_up_by_nobody_for_long},
          {"J5 J8: cut off", test_cut_off_and_cut_off_for_too_long}, {"J8: restarts", test_data_over_restarts})
