/* Rules between fields. Each refusal says the numbers and what would do. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec_internal.h"

#define ROUNDS_FOR_MOMENTUM 200 /* Rounds of a fragment below which outer momentum of 0.8 and more harms. */

uint32_t dl_count_resolve(struct dl_count_or_percent count, uint32_t of)
{
    uint64_t value = count.is_percent ? ((uint64_t)count.value * of + 99) / 100 : count.value;
    uint64_t most = DL_MAX(of, 1u);
    return (uint32_t)DL_MAX(DL_MIN(value, most), 1u);
}

static enum dl_rc check_model(struct dl_model_spec *m, struct dl_err *err)
{
    m->kv_heads = m->kv_heads == 0 ? m->heads : m->kv_heads;
    m->ffn_width = m->ffn_width == 0 ? (m->width * 8 / 3 + 31) / 32 * 32 : m->ffn_width;
    if (m->width % m->heads != 0) {
        return dl_err_set(err, DL_EINVAL, "spec.training.model: width %u is not a multiple of heads %u", m->width, m->heads);
    }
    if (m->width / m->heads % 2 != 0) {
        return dl_err_set(err, DL_EINVAL,
                          "spec.training.model: width %u / heads %u = %u per head; rotary positions need an even number",
                          m->width, m->heads, m->width / m->heads);
    }
    if (m->heads % m->kv_heads != 0) {
        return dl_err_set(err, DL_EINVAL, "spec.training.model: heads %u is not a multiple of kvHeads %u", m->heads,
                          m->kv_heads);
    }
    return DL_OK;
}

static enum dl_rc check_learners(struct dl_spec *spec, bool has_replicas, struct dl_err *err)
{
    struct dl_learners_spec *l = &spec->learners;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < l->pool_count; i++) {
        sum += l->pools[i].replicas;
    }
    if (l->pool_count == 0) {
        l->pool_count = 1;
        memcpy(l->pools[0].name, "default", sizeof "default");
        l->pools[0].replicas = l->replicas;
        l->pools[0].scavenge.pending_seconds = 120;
        l->pools[0].scavenge.cooldown_seconds = 60;
    } else if (!has_replicas) {
        l->replicas = (uint32_t)DL_MIN(sum, UINT32_MAX);
    } else if (sum != l->replicas) {
        return dl_err_set(err, DL_EINVAL,
                          "spec.learners: replicas %u, but the pools' replicas add up to %" PRIu64 "; make them equal or leave "
                          "spec.learners.replicas out",
                          l->replicas, sum);
    }
    if (l->min > l->replicas || l->replicas > l->max) {
        return dl_err_set(err, DL_EINVAL, "spec.learners: min %u <= replicas %u <= max %u does not hold", l->min, l->replicas,
                          l->max);
    }
    const struct dl_count_or_percent quorums[] = {spec->sync.quorum, spec->sync.warmup.quorum};
    static const char *const names[] = {"spec.sync.quorum", "spec.sync.warmup.quorum"};
    for (size_t i = 0; i < DL_COUNT_OF(quorums); i++) {
        if (!quorums[i].is_percent && quorums[i].value > l->max) {
            return dl_err_set(err, DL_EINVAL,
                              "%s: %u, but there are never more than spec.learners.max = %u learners; use 1 to %u", names[i],
                              quorums[i].value, l->max, l->max);
        }
    }
    return DL_OK;
}

static enum dl_rc check_sync(const struct dl_spec *spec, struct dl_err *err)
{
    const struct dl_sync_spec *s = &spec->sync;
    if (s->overlap >= s->interval && s->overlap > 0) {
        return dl_err_set(err, DL_EINVAL, "spec.sync: overlap %u must be below interval %u", s->overlap, s->interval);
    }
    if (s->warmup.steps > 0 && s->warmup.interval > s->interval && s->mode == DL_SYNC_DECOUPLED) {
        return dl_err_set(err, DL_EINVAL, "spec.sync: warmup.interval %u must not exceed interval %u (or set warmup.steps: 0)",
                          s->warmup.interval, s->interval);
    }
    if (s->timeout_seconds <= 2 * s->heartbeat_seconds) {
        return dl_err_set(err, DL_EINVAL,
                          "spec.sync: timeoutSeconds %g must be above twice heartbeatSeconds %g, else one late heartbeat cuts a "
                          "live connection",
                          s->timeout_seconds, s->heartbeat_seconds);
    }
    if (spec->syncer.shards > s->fragments) {
        return dl_err_set(err, DL_EINVAL, "spec.syncer.shards: %u shards, but only %u fragments to spread over them",
                          spec->syncer.shards, s->fragments);
    }
    if (s->apply == DL_APPLY_REBASE && s->apply_alpha > 0) {
        return dl_err_set(err, DL_EINVAL, "spec.sync: apply rebase and applyAlpha %g exclude each other", s->apply_alpha);
    }
    if (spec->syncer.port != 0 && spec->syncer.port + spec->syncer.shards - 1 > 65535) {
        return dl_err_set(err, DL_EINVAL, "spec.syncer.port: %u + %u shards ends beyond 65535", spec->syncer.port,
                          spec->syncer.shards);
    }
    return DL_OK;
}

/* --- warnings ----------------------------------------------------------------------------------------------------------- */

static void warn(struct dl_spec_warnings *warnings, const char *fmt, ...) DL_PRINTF(2, 3);
static void warn(struct dl_spec_warnings *warnings, const char *fmt, ...)
{
    if (warnings->count < DL_SPEC_WARNINGS_MAX) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(warnings->text[warnings->count++], DL_ERR_TEXT_MAX, fmt, args);
        va_end(args);
    }
}

static void look_for_disappointment(const struct dl_spec *spec, struct dl_spec_warnings *warnings)
{
    const struct dl_sync_spec *s = &spec->sync;
    const struct dl_training_spec *t = &spec->training;
    uint64_t step_tokens = (uint64_t)t->batch_sequences * t->model.sequence_length;
    uint64_t steps = t->token_budget / (step_tokens * DL_MAX(spec->learners.replicas, 1u));
    uint64_t rounds = steps / s->interval;
    bool has_memory = s->outer.type != DL_OUTER_SGD && s->outer.momentum >= 0.8;
    if (has_memory && rounds < ROUNDS_FOR_MOMENTUM) {
        warn(warnings,
             "spec.sync.outerOptimizer.momentum %g: the token budget gives each fragment about %" PRIu64
             " rounds; below %d its memory is a large share of the run and harms; use type sgd with learningRate 1, or "
             "momentum 0.5, or a longer run",
             s->outer.momentum, rounds, ROUNDS_FOR_MOMENTUM);
    }
    if (rounds == 0) {
        warn(warnings,
             "spec.training.tokenBudget %" PRIu64 " is %" PRIu64 " inner steps a learner, below interval %u: no fragment is synced "
             "at its own pace; use an interval of at most %" PRIu64,
             t->token_budget, steps, s->interval, DL_MAX(steps / 4, UINT64_C(1)));
    }
    if (s->mode == DL_SYNC_DECOUPLED && s->interval < s->fragments) {
        warn(warnings, "spec.sync.interval %u is below fragments %u: several fragments share an inner step; use at most %u "
                       "fragments",
             s->interval, s->fragments, s->interval);
    }
    uint32_t quorum = dl_count_resolve(s->quorum, spec->learners.replicas);
    if (s->mode == DL_SYNC_DECOUPLED && quorum == spec->learners.replicas && quorum > 1) {
        warn(warnings, "spec.sync.quorum: all %u learners; one that is lost holds every round until it is replaced; use %u or "
                       "less, or mode synchronous when that is meant",
             quorum, quorum - 1);
    }
    if (s->mode == DL_SYNC_DECOUPLED && s->warmup.steps > 0 && s->warmup.steps > steps / 2) {
        warn(warnings, "spec.sync.warmup.steps %u is more than half of the %" PRIu64 " inner steps a learner takes", s->warmup.steps,
             steps);
    }
}

enum dl_rc dl_spec_check(struct dl_spec *spec, bool has_replicas, struct dl_spec_warnings *warnings, struct dl_err *err)
{
    enum dl_rc rc = check_model(&spec->training.model, err);
    if (rc == DL_OK) {
        rc = check_learners(spec, has_replicas, err);
    }
    if (rc == DL_OK) {
        rc = check_sync(spec, err);
    }
    if (rc == DL_OK) {
        look_for_disappointment(spec, warnings);
    }
    return rc;
}
