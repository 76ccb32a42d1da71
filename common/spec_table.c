#include "common/spec_table.h"

#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "common/mem.h"

/* In the order of the enums in spec.h. */
static const char *const formats[] = {"auto", "text", "uint16", "uint32", NULL};
static const char *const layouts[] = {"balanced", "strided", "layer", "tensor", NULL};
static const char *const modes[] = {"decoupled", "synchronous", NULL};
static const char *const graces[] = {"adaptive", "fixed", "none", NULL};
static const char *const methods[] = {"mean", "rda", NULL};
static const char *const embedding_methods[] = {"average", "rda", NULL};
static const char *const weightings[] = {"tokens", "equal", NULL};
static const char *const outers[] = {"nesterov", "sgd", "adamw", "lion", NULL};
static const char *const codecs[] = {"none", "bf16", "int8", "int4", NULL};
static const char *const broadcast_codecs[] = {"none", "bf16", NULL};
static const char *const applies[] = {"overwrite", "rebase", NULL};

#define AT(member) offsetof(struct dl_spec, member)
#define BOOL(path, member, preset, text)                                                                               \
    {                                                                                                                  \
        path, DL_FIELD_BOOL, AT(member), 0, NULL, preset, 0, 1, 0, text                                                \
    }
#define U16(path, member, preset, min, max, text)                                                                      \
    {                                                                                                                  \
        path, DL_FIELD_U16, AT(member), 0, NULL, preset, min, max, 0, text                                             \
    }
#define U32(path, member, preset, min, max, flags, text)                                                               \
    {                                                                                                                  \
        path, DL_FIELD_U32, AT(member), 0, NULL, preset, min, max, flags, text                                         \
    }
#define U64(path, member, preset, min, flags, text)                                                                    \
    {                                                                                                                  \
        path, DL_FIELD_U64, AT(member), 0, NULL, preset, min, 9.2e18, flags, text                                      \
    }
#define I64(path, member, preset, min, max, flags, text)                                                               \
    {                                                                                                                  \
        path, DL_FIELD_I64, AT(member), 0, NULL, preset, min, max, flags, text                                         \
    }
#define F64(path, member, preset, min, max, flags, text)                                                               \
    {                                                                                                                  \
        path, DL_FIELD_F64, AT(member), 0, NULL, preset, min, max, flags, text                                         \
    }
#define ENUM(path, member, names, preset, flags, text)                                                                 \
    {                                                                                                                  \
        path, DL_FIELD_ENUM, AT(member), 0, names, preset, 0, 0, flags, text                                           \
    }
#define TEXT(path, member, preset, flags, text)                                                                        \
    {                                                                                                                  \
        path, DL_FIELD_STRING, AT(member), sizeof(((struct dl_spec *)0)->member), NULL, preset, 0, 0, flags, text      \
    }
#define COUNT(path, member, preset, text)                                                                              \
    {                                                                                                                  \
        path, DL_FIELD_COUNT, AT(member), 0, NULL, preset, 1, DL_SPEC_LEARNERS_MAX, 0, text                            \
    }
#define FROZEN DL_FIELD_FROZEN
#define PLAIN DL_FIELD_PLAIN

const struct dl_field dl_spec_fields[] = {
    BOOL("suspend", suspend, "false", "Stop all processes and keep the state; false goes on where it was."),
    I64("ttlSecondsAfterFinished", ttl_seconds_after_finished, "-1", -1, 1e9, 0,
        "Seconds after the end until the job is deleted; -1: never."),
    I64("activeDeadlineSeconds", active_deadline_seconds, "0", 0, 1e9, 0,
        "Seconds of running after which the job ends with result timeout; 0: none."),

    U64("training.tokenBudget", training.token_budget, NULL, 1, DL_FIELD_REQUIRED,
        "Tokens to train on, over all learners; reached, the job has succeeded."),
    U64("training.roundBudget", training.round_budget, "0", 0, 0,
        "Rounds a syncer shard merges before the job ends; 0: no limit."),
    U64("training.seed", training.seed, "1", 0, FROZEN, "Seed of initial weights and data order."),
    U32("training.batchSequences", training.batch_sequences, "8", 1, 65536, 0,
        "Sequences in one inner step of a learner."),
    U32("training.threads", training.threads, "0", 0, 256, 0,
        "Compute threads of a learner; 0: the machine's cores divided by the learners on it, at least 1."),
    F64("training.evaluationSeconds", training.evaluation_seconds, "5", 0, 1e6, PLAIN,
        "Least time between two evaluations of the global model; 0: only at the end."),

    U32("training.model.vocabSize", training.model.vocab_size, "256", 2, 1 << 20, FROZEN,
        "Token values; 256 for bytes."),
    U32("training.model.width", training.model.width, "128", 8, 65536, FROZEN,
        "Width of the residual stream; heads divide it."),
    U32("training.model.layers", training.model.layers, "4", 1, 512, FROZEN, "Transformer blocks."),
    U32("training.model.heads", training.model.heads, "4", 1, 1024, FROZEN, "Attention heads."),
    U32("training.model.kvHeads", training.model.kv_heads, "0", 0, 1024, FROZEN,
        "Key and value heads (grouped-query attention); divides heads; 0: as many as heads."),
    U32("training.model.ffnWidth", training.model.ffn_width, "0", 0, 1 << 20, FROZEN,
        "Hidden width of the gated MLP; 0: 8/3 of width, rounded up to a multiple of 32."),
    U32("training.model.sequenceLength", training.model.sequence_length, "128", 2, 1 << 20, FROZEN,
        "Tokens in a sequence."),
    {"training.model.tiedEmbeddings", DL_FIELD_BOOL, AT(training.model.tied_embeddings), 0, NULL, "true", 0, 1, FROZEN,
     "Output head and input embedding are one tensor."},
    F64("training.model.ropeTheta", training.model.rope_theta, "10000", 1, 1e9, FROZEN,
        "Base of the rotary positions."),
    F64("training.model.normEpsilon", training.model.norm_epsilon, "1e-5", 1e-12, 0.1, FROZEN, "Epsilon of RMSNorm."),
    F64("training.model.initStd", training.model.init_std, "0.02", 1e-6, 1, FROZEN,
        "Standard deviation of initial weights."),

    {"training.data.paths", DL_FIELD_PATHS, AT(training.data.paths), 0, NULL, NULL, 0, DL_SPEC_PATHS_MAX, 0,
     "Files with the data, taken as one stream; relative ones are seen from the manifest's folder."},
    ENUM("training.data.format", training.data.format, formats, "auto", 0,
         "text (also gzip, dictzip), uint16 or uint32 tokens (with or without llm.c's header), auto: by the files' "
         "first bytes."),
    F64("training.data.validationFraction", training.data.validation_fraction, "0.01", 0.0001, 0.5, 0,
        "Share of the data, at its end, held out for validation and never trained on."),
    U32("training.data.validationSequences", training.data.validation_sequences, "64", 1, 65536, 0,
        "Sequences in one evaluation."),
    U32("training.data.leaseSequences", training.data.lease_sequences, "0", 0, 1 << 30, 0,
        "Sequences that a learner takes from the job's data at once (rounded up to whole steps); 0: 128 steps' worth."),

    F64("training.innerOptimizer.learningRate", training.inner.learning_rate, "0.001", 1e-9, 10, 0,
        "AdamW's peak rate."),
    F64("training.innerOptimizer.minLearningRateRatio", training.inner.min_learning_rate_ratio, "0.1", 0, 1, 0,
        "Cosine decay ends at this share of the peak rate."),
    U32("training.innerOptimizer.warmupSteps", training.inner.warmup_steps, "50", 0, 1 << 24, 0,
        "Inner steps over which the rate rises from 0."),
    U32("training.innerOptimizer.decaySteps", training.inner.decay_steps, "0", 0, 1 << 30, 0,
        "Inner steps until the rate has decayed; 0: the steps that tokenBudget gives each learner."),
    F64("training.innerOptimizer.beta1", training.inner.beta1, "0.8", 0, 0.9999, 0,
        "AdamW's first decay. Learners apart want a shorter memory than one model alone: docs/quality.md."),
    F64("training.innerOptimizer.beta2", training.inner.beta2, "0.95", 0, 0.99999, 0, "AdamW's second decay."),
    F64("training.innerOptimizer.epsilon", training.inner.epsilon, "1e-8", 1e-16, 1, 0, "AdamW's epsilon."),
    F64("training.innerOptimizer.weightDecay", training.inner.weight_decay, "0.1", 0, 10, 0,
        "Decoupled weight decay of matrices (not of norms and embeddings)."),
    F64("training.innerOptimizer.clipNorm", training.inner.clip_norm, "1", 0, 1e6, 0,
        "Gradients longer than this are scaled down to it; 0: no clipping."),

    ENUM("sync.mode", sync.mode, modes, "decoupled", FROZEN,
         "decoupled: learners never wait; synchronous: they wait for pull and update (data-parallel, DiLoCo, Streaming "
         "DiLoCo)."),
    U32("sync.fragments", sync.fragments, "24", 1, DL_SPEC_FRAGMENTS_MAX, FROZEN, "P, fragments of the model."),
    ENUM("sync.layout", sync.layout, layouts, "balanced", FROZEN, "How tensors are cut into fragments."),
    U32("sync.interval", sync.interval, "24", 1, 1 << 20, FROZEN, "H, inner steps between two syncs of one fragment."),
    U32("sync.overlap", sync.overlap, "2", 0, 1 << 20, FROZEN, "tau, inner steps of compute that a sync may overlap."),
    I64("sync.warmup.steps", sync.warmup.steps, "-1", DL_WARMUP_BY_LENGTH, 1 << 24, FROZEN,
        "Inner steps of interval warm-up, for runs from random weights; -1: 3/8 of the steps that tokenBudget "
        "gives each learner, at most 1000, as the job begins; 0: none."),
    U32("sync.warmup.interval", sync.warmup.interval, "1", 1, 1 << 20, FROZEN,
        "Inner steps between two syncs of all fragments during warm-up; after its steps the interval doubles up to "
        "three times, each time for 2/9 as many steps, while it is below sync.interval."),
    COUNT("sync.warmup.quorum", sync.warmup.quorum, "75%",
          "Quorum during warm-up; a percentage is of the connected learners."),
    COUNT("sync.quorum", sync.quorum, "1",
          "K, learners whose pushes a round needs; a percentage is of learners.replicas."),
    ENUM("sync.grace.mode", sync.grace.mode, graces, "adaptive", 0,
         "How long a round with its quorum waits for more: a share of the slack, a fixed time, not at all."),
    F64("sync.grace.margin", sync.grace.margin, "1", 0, 1, 0,
        "gamma, the share of the slack that the grace window may use."),
    F64("sync.grace.maxSeconds", sync.grace.max_seconds, "5", 0, 3600, PLAIN,
        "Longest grace window; the window of mode fixed."),
    ENUM("sync.merge.method", sync.merge.method, methods, "rda", FROZEN,
         "Weighted mean, or radial-directional averaging (RDA) per tensor."),
    ENUM("sync.merge.embedding", sync.merge.embedding, embedding_methods, "average", FROZEN,
         "Merge of embedding and output-head tensors."),
    ENUM("sync.merge.weighting", sync.merge.weighting, weightings, "tokens", 0,
         "tokens: c_tokens x (c_tokens / c_steps)."),
    F64("sync.merge.stalenessDecay", sync.merge.staleness_decay, "0", 0, 10, 0,
        "lambda: a push k versions behind weighs exp(-lambda k) as much; 0: off."),
    U32("sync.merge.stalenessMax", sync.merge.staleness_max, "8", 0, 1000, 0,
        "Versions that a push's base may be behind; more is refused as stale_base."),
    F64("sync.merge.normLimit", sync.merge.norm_limit, "20", 1, 1e9, 0,
        "A push whose delta norm exceeds this many times the round's median is refused."),
    ENUM("sync.outerOptimizer.type", sync.outer.type, outers, "sgd", FROZEN, "Outer optimiser."),
    F64("sync.outerOptimizer.learningRate", sync.outer.learning_rate, "1", 1e-6, 10, 0, "Outer rate."),
    F64("sync.outerOptimizer.momentum", sync.outer.momentum, "0.9", 0, 0.9999, 0,
        "Nesterov's mu (0.5 for runs of fewer than some 200 rounds a fragment); beta1 of adamw and lion; not used by "
        "sgd."),
    F64("sync.outerOptimizer.beta2", sync.outer.beta2, "0.95", 0, 0.99999, 0, "beta2 of adamw and lion."),
    F64("sync.outerOptimizer.epsilon", sync.outer.epsilon, "1e-8", 1e-16, 1, 0, "Epsilon of adamw."),
    F64("sync.outerOptimizer.weightDecay", sync.outer.weight_decay, "0", 0, 10, 0, "Decoupled weight decay."),
    ENUM("sync.compression", sync.compression, codecs, "int8", FROZEN, "What a push carries of each delta."),
    ENUM("sync.broadcastCompression", sync.broadcast_compression, broadcast_codecs, "none", FROZEN,
         "What an update carries of each value."),
    ENUM("sync.apply", sync.apply, applies, "overwrite", FROZEN,
         "overwrite: an update replaces the fragment; rebase: progress made since the snapshot is kept on top of it."),
    F64("sync.applyAlpha", sync.apply_alpha, "0", 0, 1, FROZEN | PLAIN,
        "Streaming DiLoCo's mixing: theta = alpha theta + (1 - alpha) update."),
    F64("sync.heartbeatSeconds", sync.heartbeat_seconds, "5", 0.05, 20, PLAIN,
        "A data frame at least so often, both ways."),
    F64("sync.timeoutSeconds", sync.timeout_seconds, "15", 0.2, 3600, PLAIN,
        "No frame for so long: the connection counts as lost."),
    F64("sync.joinTimeoutSeconds", sync.join_timeout_seconds, "1800", 1, 1e6, PLAIN,
        "A learner's wait for its first state."),
    F64("sync.finishSeconds", sync.finish_seconds, "30", 0.1, 3600, PLAIN,
        "Bound of the last merges at the end of the job."),

    U32("syncer.shards", syncer.shards, "1", 1, DL_SPEC_SHARDS_MAX, FROZEN,
        "Syncer processes; fragments are spread over them."),
    TEXT("syncer.storage.size", syncer.storage_size, "20Gi", DL_FIELD_QUANTITY, "Volume of a shard."),
    TEXT("syncer.storage.storageClassName", syncer.storage_class, "", 0,
         "Storage class; empty: the cluster's default."),
    BOOL("syncer.keepPushes", syncer.keep_pushes, "false",
         "Keep every merged push in the state folder, so that `diloco replay --verify-only` can check all merges "
         "without "
         "training. They are never removed: learners x encoded model for every interval."),
    U16("syncer.port", syncer.port, "0", 0, 65535,
        "On one machine the first shard's port, the next ones follow; 0: any free ones."),
    {"syncer.template", DL_FIELD_RAW, AT(syncer.template_json), 0, NULL, NULL, 0, 0, 0,
     "PodTemplateSpec merged into syncer pods."},

    U32("learners.min", learners.min, "1", 0, DL_SPEC_LEARNERS_MAX, 0, "Fewer connected learners: condition Degraded."),
    U32("learners.max", learners.max, "16", 1, DL_SPEC_LEARNERS_MAX, 0, "Most learners there may be at once."),
    U32("learners.replicas", learners.replicas, "1", 0, DL_SPEC_LEARNERS_MAX, 0,
        "Wanted learners; without it, the sum over the pools, else 1. Pools get their own number in order, the last "
        "one the rest."),
};
const size_t dl_spec_field_count = DL_COUNT_OF(dl_spec_fields);

#undef AT
#define AT(member) offsetof(struct dl_pool_spec, member)

const struct dl_field dl_pool_fields[] = {
    {"name", DL_FIELD_STRING, AT(name), sizeof(((struct dl_pool_spec *)0)->name), NULL, NULL, 0, 0,
     DL_FIELD_REQUIRED | DL_FIELD_LABEL, "The pool's name, a DNS label."},
    U32("replicas", replicas, "0", 0, DL_SPEC_LEARNERS_MAX, 0,
        "Wanted learners of the pool; the last pool takes what learners.replicas leaves."),
    U32("scavenge.max", scavenge.max, "0", 0, DL_SPEC_LEARNERS_MAX, 0,
        "Most learners of the pool, its replicas included, when more are added on capacity that comes and goes; 0: "
        "none are."),
    U32("scavenge.pendingSeconds", scavenge.pending_seconds, "120", 1, 86400, 0,
        "A learner that could not be placed for so long is taken back."),
    U32("scavenge.cooldownSeconds", scavenge.cooldown_seconds, "60", 1, 86400, 0, "Time between two additions."),
    {"template", DL_FIELD_RAW, AT(template_json), 0, NULL, NULL, 0, 0, 0, "PodTemplateSpec of the pool's learners."},
};
const size_t dl_pool_field_count = DL_COUNT_OF(dl_pool_fields);

static const struct dl_field *enum_field(const char *path)
{
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        if (dl_spec_fields[i].type == DL_FIELD_ENUM && strcmp(dl_spec_fields[i].path, path) == 0) {
            return &dl_spec_fields[i];
        }
    }
    assert(!"no enum field of that path");
    return NULL;
}

const char *dl_spec_enum_name(const char *path, int value)
{
    const struct dl_field *field = enum_field(path);
    int count = 0;
    while (field->names[count] != NULL) {
        count++;
    }
    assert(value >= 0 && value < count);
    return field->names[value];
}

bool dl_spec_enum_value(const char *path, const char *name, int *value)
{
    const struct dl_field *field = enum_field(path);
    for (int v = 0; field->names[v] != NULL; v++) {
        if (strcmp(field->names[v], name) == 0) {
            *value = v;
            return true;
        }
    }
    return false;
}
