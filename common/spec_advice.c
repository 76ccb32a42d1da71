/* Advice on a job that is valid and will probably disappoint: which field, why, and the number that would do. The one place for
 * it: `diloco check` and `diloco run` print it, the report repeats it, the operator makes events of it. Pure. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec_internal.h"

#define ROUNDS_FOR_MOMENTUM 200 /* Rounds of a fragment below which outer momentum of 0.8 and more harms. */
#define ROUNDS_MIN 4            /* Below so many rounds of a fragment learners have hardly trained together. */
#define SIGN_RATE_MAX                                                                                                  \
    0.1 /* Outer rate of adamw and lion from which every parameter jumps by more than most of them are. */
#define SGD_RATE_MAX 1.0
#define NESTEROV_RATE_MAX 1.0
#define OUTER_RATE_MIN 0.1 /* Of sgd and nesterov: below it the ensemble follows its learners too slowly. */
#define OVERLAP_SHARE 4    /* An interval's part that overlap may take without a word. */
#define LEASE_STEPS 128    /* As many steps' data as a lease has by default. */

struct advice {
    const struct dl_spec *spec;
    uint64_t steps; /* Inner steps that the token budget gives each learner. */
    struct dl_spec_warnings *out;
};

static void advise(const struct advice *a, const char *path, const char *fmt, ...) DL_PRINTF(3, 4);
static void advise(const struct advice *a, const char *path, const char *fmt, ...)
{
    struct dl_spec_warnings *out = a->out;
    if (out->count == DL_SPEC_WARNINGS_MAX) {
        return;
    }
    char text[DL_ERR_TEXT_MAX - DL_SPEC_PATH_MAX];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    snprintf(out->path[out->count], DL_SPEC_PATH_MAX, "%s", path);
    snprintf(out->text[out->count], DL_ERR_TEXT_MAX, "%s%s", path, text);
    out->count++;
}

/* --- optimisers --- */

static void on_momentum(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    uint64_t rounds = a->steps / s->interval, interval = a->steps / ROUNDS_FOR_MOMENTUM;
    bool has_memory = s->outer.type != DL_OUTER_SGD && s->outer.momentum >= 0.8;
    if (!has_memory || rounds >= ROUNDS_FOR_MOMENTUM) {
        return;
    }
    char shorter[64] = "";
    if (interval > 0) {
        snprintf(shorter, sizeof shorter, ", an interval of at most %" PRIu64, interval);
    }
    advise(a, "spec.sync.outerOptimizer.momentum",
           " %g: the token budget gives each fragment about %" PRIu64
           " rounds; below %d its memory is a large share of the run and harms; use type sgd with learningRate 1, or "
           "momentum 0.5%s, or a longer run",
           s->outer.momentum, rounds, ROUNDS_FOR_MOMENTUM, shorter);
}

static void on_outer_rate(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    double rate = s->outer.learning_rate;
    const char *path = "spec.sync.outerOptimizer.learningRate";
    switch (s->outer.type) {
    case DL_OUTER_ADAMW:
    case DL_OUTER_LION:
        if (rate >= SIGN_RATE_MAX) {
            advise(
                a, path,
                " %g: with type %s every parameter moves by about as much in each round, whatever its gradient; use a "
                "rate of the size of innerOptimizer.learningRate %g",
                rate, dl_spec_enum_name("sync.outerOptimizer.type", (int)s->outer.type),
                a->spec->training.inner.learning_rate);
        }
        return;
    case DL_OUTER_SGD:
        if (rate > SGD_RATE_MAX) {
            advise(a, path, " %g: each round goes beyond what its learners have found; use at most %g", rate,
                   SGD_RATE_MAX);
        }
        break;
    case DL_OUTER_NESTEROV:
        if (rate > NESTEROV_RATE_MAX) {
            advise(a, path,
                   " %g: with momentum %g a lasting direction is taken %.0f times over; use 0.7, or at most %g", rate,
                   s->outer.momentum, rate / (1 - s->outer.momentum), NESTEROV_RATE_MAX);
        }
        break;
    }
    double effective = s->outer.type == DL_OUTER_SGD ? rate : rate / (1 - s->outer.momentum);
    if (effective < OUTER_RATE_MIN) {
        advise(
            a, path,
            " %g: the global model follows its learners over %.0f rounds, and each round throws away most of what they "
            "did; use %g to 1",
            rate, 1 / effective, s->outer.type == DL_OUTER_SGD ? 0.5 : 0.1);
    }
}

static void on_inner_warmup(const struct advice *a)
{
    if (a->steps > 0 && a->spec->training.inner.warmup_steps > a->steps / 2) {
        advise(a, "spec.training.innerOptimizer.warmupSteps",
               " %u is more than half of the %" PRIu64 " inner steps a learner takes; use at most %" PRIu64,
               a->spec->training.inner.warmup_steps, a->steps, a->steps / 10);
    }
}

/* --- pace --- */

static void on_budget(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    if (a->steps / s->interval < ROUNDS_MIN) {
        uint64_t tokens_of_a_step = a->spec->training.token_budget / DL_MAX(a->steps, UINT64_C(1));
        advise(a, "spec.training.tokenBudget",
               " %" PRIu64 " is %" PRIu64
               " inner steps a learner, and with interval %u each fragment is synced %" PRIu64
               " times at its own pace; use an interval of at most %" PRIu64 ", or a budget of at least %" PRIu64,
               a->spec->training.token_budget, a->steps, s->interval, a->steps / s->interval,
               DL_MAX(a->steps / ROUNDS_MIN, UINT64_C(1)), (uint64_t)ROUNDS_MIN * s->interval * tokens_of_a_step);
    }
}

static void on_fragments(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    if (s->mode == DL_SYNC_DECOUPLED && s->interval < s->fragments) {
        advise(a, "spec.sync.interval",
               " %u is below fragments %u: several fragments share an inner step; use at most %u fragments",
               s->interval, s->fragments, s->interval);
    }
}

/* What a learner trains between its snapshot and the update is overwritten. */
static void on_overlap(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    bool is_kept = s->apply == DL_APPLY_REBASE || s->apply_alpha > 0;
    if (!is_kept && s->overlap > 1 && s->overlap > s->interval / OVERLAP_SHARE) {
        advise(a, "spec.sync.overlap",
               " %u of interval %u: up to %u %% of what a learner trains may be overwritten while a round is under "
               "way; use "
               "at most %u, an interval of at least %u, or apply rebase",
               s->overlap, s->interval, 100 * s->overlap / s->interval, DL_MAX(s->interval / OVERLAP_SHARE, 1u),
               OVERLAP_SHARE * s->overlap);
    }
}

static void on_warmup(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    if (s->mode == DL_SYNC_DECOUPLED && s->warmup.steps > 0 && (uint64_t)s->warmup.steps > a->steps / 2) {
        advise(a, "spec.sync.warmup.steps",
               " %" PRId64 " is more than half of the %" PRIu64
               " inner steps a learner takes; use -1, which takes 3/8 of them",
               s->warmup.steps, a->steps);
    }
}

static void on_grace(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    if (s->mode == DL_SYNC_DECOUPLED && s->grace.mode == DL_GRACE_ADAPTIVE && s->overlap == 0 &&
        a->spec->learners.replicas > 1) {
        advise(a, "spec.sync.grace",
               ": mode adaptive shares out the slack of overlapped steps, and with overlap 0 there is none, so a round "
               "merges as soon as it has its quorum; use overlap 1 or more, or grace mode fixed");
    }
}

/* --- who takes part --- */

static void on_quorum(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    const struct dl_learners_spec *l = &a->spec->learners;
    uint32_t replicas = l->replicas, quorum = dl_count_resolve(s->quorum, replicas);
    const char *path = "spec.sync.quorum";
    if (s->mode == DL_SYNC_DECOUPLED && quorum == replicas && quorum > 1) {
        advise(a, path,
               ": all %u learners; one that is lost holds every round until it is replaced; use %u or less, or mode "
               "synchronous when that is meant",
               quorum, quorum - 1);
    }
    if (!s->quorum.is_percent && s->quorum.value > replicas && replicas > 0) {
        advise(a, path, " %u is above learners.replicas %u and counts as %u until there are more", s->quorum.value,
               replicas, quorum);
    }
    if (s->mode == DL_SYNC_SYNCHRONOUS && quorum == 1 && replicas > 1 && s->grace.mode != DL_GRACE_FIXED) {
        advise(
            a, path,
            ": 1 of %u learners in mode synchronous; a round may merge what one learner sent; use \"100%%\" to average "
            "all",
            replicas);
    }
    if (s->mode == DL_SYNC_DECOUPLED && !s->quorum.is_percent && l->min > 0 && quorum > l->min) {
        advise(
            a, "spec.learners.min",
            " %u is below sync.quorum %u: with %u learners no round is merged, though that is as many as are wanted at "
            "least; use %u",
            l->min, quorum, l->min, quorum);
    }
}

/* Learners that scavenge come beside those that are wanted. */
static void on_pools(const struct advice *a)
{
    const struct dl_learners_spec *l = &a->spec->learners;
    uint64_t reach = 0;
    for (uint32_t i = 0; i < l->pool_count; i++) {
        const struct dl_pool_spec *pool = &l->pools[i];
        reach += DL_MAX(pool->replicas, pool->scavenge.enabled ? pool->scavenge.max : 0u);
    }
    if (reach > l->max) {
        advise(a, "spec.learners.max",
               " %u: the pools would take %" PRIu64 " learners with all that they may scavenge; use %" PRIu64, l->max,
               reach, reach);
    }
}

static void on_staleness(const struct advice *a)
{
    const struct dl_sync_spec *s = &a->spec->sync;
    if (s->mode == DL_SYNC_DECOUPLED && s->merge.staleness_max == 0 && a->spec->learners.max > 1) {
        advise(a, "spec.sync.merge.stalenessMax",
               " 0: what misses its round is lost, so that a slow learner may work in vain; use 8, or as many "
               "intervals as "
               "a step of the slowest learner may take");
    }
}

static void on_lease(const struct advice *a)
{
    const struct dl_training_spec *t = &a->spec->training;
    if (t->data.lease_sequences > 0 && t->data.lease_sequences < t->batch_sequences) {
        advise(a, "spec.training.data.leaseSequences",
               " %u is below batchSequences %u: it is rounded up to one step's data, and a learner that is cut off for "
               "longer than a step trains on data that does not count; use %u, or 0 for the same",
               t->data.lease_sequences, t->batch_sequences, LEASE_STEPS * t->batch_sequences);
    }
}

void dl_spec_advise(const struct dl_spec *spec, struct dl_spec_warnings *out)
{
    static void (*const rules[])(const struct advice *) = {
        on_momentum, on_outer_rate, on_inner_warmup, on_budget, on_fragments, on_overlap,
        on_warmup,   on_grace,      on_quorum,       on_pools,  on_staleness, on_lease,
    };
    struct advice advice = {
        .spec = spec, .steps = dl_training_steps(&spec->training, spec->learners.replicas), .out = out};
    out->count = 0;
    for (size_t i = 0; i < DL_COUNT_OF(rules); i++) {
        rules[i](&advice);
    }
}
