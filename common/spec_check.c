/* Rules between fields. Each refusal says the numbers and what would do.
 *
 * The same rules stand in dl_spec_rules for the API server, which also keeps the names of pools apart: their list is
 * keyed by name. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec_internal.h"

#define REPLICAS                                                                                                       \
    "(has(self.learners.replicas) ? self.learners.replicas : "                                                         \
    "has(self.learners.pools) && self.learners.pools.size() > 0 ? self.learners.pools.map(p, p.replicas).sum() : 1)"

/* They stand at `spec`, or at what has no default of its own: the API server checks the defaults of an object before it
 * fills in the defaults inside it. */
const struct dl_rule dl_spec_rules[] = {
    {"", "self.metadata.name.size() <= 45 && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
     "metadata.name: at most 45 of lower-case letters, digits and '-', a letter first"},
    {"spec.training", "self.model.width % self.model.heads == 0", "model.width must be a multiple of model.heads"},
    {"spec.training", "(self.model.width / self.model.heads) % 2 == 0",
     "model.width / model.heads must be even (rotary positions)"},
    {"spec.training", "self.model.kvHeads == 0 || self.model.heads % self.model.kvHeads == 0",
     "model.heads must be a multiple of model.kvHeads"},
    {"spec.training", "self.data.format != 'text' || self.model.vocabSize >= 256",
     "model.vocabSize must be at least 256 for data of format text"},
    {"spec", "self.learners.min <= " REPLICAS, "learners.min must not exceed learners.replicas"},
    {"spec", REPLICAS " <= self.learners.max", "learners.replicas must not exceed learners.max"},
    {"spec", "type(self.sync.quorum) != int || self.sync.quorum <= self.learners.max",
     "sync.quorum must not exceed learners.max"},
    {"spec", "type(self.sync.warmup.quorum) != int || self.sync.warmup.quorum <= self.learners.max",
     "sync.warmup.quorum must not exceed learners.max"},
    {"spec", "self.sync.overlap == 0 || self.sync.overlap < self.sync.interval",
     "sync.overlap must be below sync.interval"},
    {"spec",
     "self.sync.warmup.steps == 0 || self.sync.mode == 'synchronous' || "
     "self.sync.warmup.interval <= self.sync.interval",
     "sync.warmup.interval must not exceed sync.interval (or set sync.warmup.steps: 0)"},
    {"spec", "self.sync.timeoutSeconds > 2.0 * self.sync.heartbeatSeconds",
     "sync.timeoutSeconds must be above twice sync.heartbeatSeconds, else one late heartbeat cuts a live connection"},
    {"spec", "self.sync.apply != 'rebase' || self.sync.applyAlpha == 0.0",
     "sync.apply: rebase and sync.applyAlpha exclude each other"},
    {"spec", "self.syncer.shards <= self.sync.fragments", "syncer.shards must not exceed sync.fragments"},
    {"spec", "self.syncer.port == 0 || self.syncer.port + self.syncer.shards <= 65536",
     "syncer.port + syncer.shards must not end beyond 65535"},
};
const size_t dl_spec_rule_count = DL_COUNT_OF(dl_spec_rules);

uint32_t dl_count_resolve(struct dl_count_or_percent count, uint32_t of)
{
    uint64_t value = count.is_percent ? ((uint64_t)count.value * of + 99) / 100 : count.value;
    uint64_t most = DL_MAX(of, 1u);
    return (uint32_t)DL_MAX(DL_MIN(value, most), 1u);
}

static enum dl_rc check_training(struct dl_training_spec *t, struct dl_err *err)
{
    struct dl_model_spec *m = &t->model;
    m->kv_heads = m->kv_heads == 0 ? m->heads : m->kv_heads;
    m->ffn_width = m->ffn_width == 0 ? (m->width * 8u / 3 + 31) / 32 * 32 : m->ffn_width;
    if (m->width % m->heads != 0) {
        return dl_err_set(err, DL_EINVAL, "spec.training.model: width %u is not a multiple of heads %u", m->width,
                          m->heads);
    }
    if (m->width / m->heads % 2 != 0) {
        return dl_err_set(
            err, DL_EINVAL,
            "spec.training.model: width %u / heads %u = %u per head; rotary positions need an even number", m->width,
            m->heads, m->width / m->heads);
    }
    if (m->heads % m->kv_heads != 0) {
        return dl_err_set(err, DL_EINVAL, "spec.training.model: heads %u is not a multiple of kvHeads %u", m->heads,
                          m->kv_heads);
    }
    if (t->data.format == DL_DATA_TEXT && m->vocab_size < 256) {
        return dl_err_set(err, DL_EINVAL,
                          "spec.training: model.vocabSize %u, but data of format text needs 256, a token a byte",
                          m->vocab_size);
    }
    return DL_OK;
}

/* The last pool takes what the others leave of learners.replicas, so that the one number which the scale subresource
 * moves is the sum. Scaled below what the others want, it is for the planner to cut those as well. */
static void share_out_replicas(struct dl_learners_spec *l, bool has_replicas)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < l->pool_count; i++) {
        sum += l->pools[i].replicas;
    }
    if (l->pool_count == 0) {
        l->pool_count = 1;
        memcpy(l->pools[0].name, "default", sizeof "default");
        l->pools[0].scavenge.pending_seconds = 120;
        l->pools[0].scavenge.cooldown_seconds = 60;
    } else if (!has_replicas) {
        l->replicas = (uint32_t)sum; /* At most 16 pools of 1024. */
    }
    uint64_t others = sum - l->pools[l->pool_count - 1].replicas;
    l->pools[l->pool_count - 1].replicas = others < l->replicas ? l->replicas - (uint32_t)others : 0;
}

static enum dl_rc check_learners(struct dl_spec *spec, bool has_replicas, struct dl_err *err)
{
    struct dl_learners_spec *l = &spec->learners;
    share_out_replicas(l, has_replicas);
    if (l->min > l->replicas || l->replicas > l->max) {
        return dl_err_set(err, DL_EINVAL, "spec.learners: min %u <= replicas %u <= max %u does not hold", l->min,
                          l->replicas, l->max);
    }
    const struct dl_count_or_percent quorums[] = {spec->sync.quorum, spec->sync.warmup.quorum};
    static const char *const names[] = {"spec.sync.quorum", "spec.sync.warmup.quorum"};
    for (size_t i = 0; i < DL_COUNT_OF(quorums); i++) {
        if (!quorums[i].is_percent && quorums[i].value > l->max) {
            return dl_err_set(err, DL_EINVAL,
                              "%s: %u, but there are never more than spec.learners.max = %u learners; use 1 to %u",
                              names[i], quorums[i].value, l->max, l->max);
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
    if (s->warmup.steps != 0 && s->warmup.interval > s->interval && s->mode == DL_SYNC_DECOUPLED) {
        return dl_err_set(err, DL_EINVAL,
                          "spec.sync: warmup.interval %u must not exceed interval %u (or set warmup.steps: 0)",
                          s->warmup.interval, s->interval);
    }
    if (s->timeout_seconds <= 2 * s->heartbeat_seconds) {
        return dl_err_set(
            err, DL_EINVAL,
            "spec.sync: timeoutSeconds %g must be above twice heartbeatSeconds %g, else one late heartbeat cuts a "
            "live connection",
            s->timeout_seconds, s->heartbeat_seconds);
    }
    if (spec->syncer.shards > s->fragments) {
        return dl_err_set(err, DL_EINVAL, "spec.syncer.shards: %u shards, but only %u fragments to spread over them",
                          spec->syncer.shards, s->fragments);
    }
    if (s->apply == DL_APPLY_REBASE && s->apply_alpha > 0) {
        return dl_err_set(err, DL_EINVAL, "spec.sync: apply rebase and applyAlpha %g exclude each other",
                          s->apply_alpha);
    }
    if (spec->syncer.port != 0 && spec->syncer.port + spec->syncer.shards - 1 > 65535) {
        return dl_err_set(err, DL_EINVAL, "spec.syncer.port: %u + %u shards ends beyond 65535", spec->syncer.port,
                          spec->syncer.shards);
    }
    return DL_OK;
}

enum dl_rc dl_spec_check(struct dl_spec *spec, bool has_replicas, struct dl_spec_warnings *warnings, struct dl_err *err)
{
    enum dl_rc rc = check_training(&spec->training, err);
    if (rc == DL_OK) {
        rc = check_learners(spec, has_replicas, err);
    }
    if (rc == DL_OK) {
        rc = check_sync(spec, err);
    }
    if (rc == DL_OK) {
        dl_spec_advise(spec, warnings);
    }
    return rc;
}
