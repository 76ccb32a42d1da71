/* dl_spec: a DecoupledDiLoCoJob, parsed, with defaults filled in and every bound checked.
 *
 * The same manifest (YAML or JSON) that `kubectl apply` takes. Names, types, defaults, bounds and one-line
 * documentation of all fields stand in ONE table (spec_table.c); parser, CRD schema, `--explain` and docs are made from
 * it.
 *
 * Pure but for dl_spec_load (reads a file). Any thread. A spec is read-only once parsed; dl_spec_free releases it. */
#ifndef DL_COMMON_SPEC_H
#define DL_COMMON_SPEC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define DL_SPEC_API_VERSION "diloco.dev/v1alpha1"
#define DL_SPEC_KIND "DecoupledDiLoCoJob"
#define DL_SPEC_BYTES_MAX (1024 * 1024) /* A manifest larger than this is refused before it is parsed. */
#define DL_SPEC_PATHS_MAX 64
#define DL_SPEC_POOLS_MAX 16
#define DL_SPEC_NAME_MAX 64     /* Bytes with the terminating zero: a DNS label has at most 63. */
#define DL_SPEC_JOB_NAME_MAX 45 /* Characters of a job's name, so that names made from it stay DNS labels. */
#define DL_SPEC_TEXT_MAX 256
#define DL_SPEC_LEARNERS_MAX 1024
#define DL_SPEC_FRAGMENTS_MAX 512
#define DL_SPEC_SHARDS_MAX 64
#define DL_WARMUP_BY_LENGTH (-1)  /* sync.warmup.steps: a share of the run's inner steps ... */
#define DL_WARMUP_STEPS_MAX 1000u /* ... and so many at most. */

enum dl_data_format { DL_DATA_AUTO, DL_DATA_TEXT, DL_DATA_BIN_U16, DL_DATA_BIN_U32 };
enum dl_layout_kind { DL_LAYOUT_BALANCED, DL_LAYOUT_STRIDED, DL_LAYOUT_LAYER, DL_LAYOUT_TENSOR };
enum dl_sync_mode { DL_SYNC_DECOUPLED, DL_SYNC_SYNCHRONOUS };
enum dl_grace_mode { DL_GRACE_ADAPTIVE, DL_GRACE_FIXED, DL_GRACE_NONE };
enum dl_merge_method { DL_MERGE_MEAN, DL_MERGE_RDA };
enum dl_weighting { DL_WEIGHT_TOKENS, DL_WEIGHT_EQUAL };
enum dl_outer_type { DL_OUTER_NESTEROV, DL_OUTER_SGD, DL_OUTER_ADAMW, DL_OUTER_LION };
enum dl_codec { DL_CODEC_NONE, DL_CODEC_BF16, DL_CODEC_INT8, DL_CODEC_INT4 }; /* Wire values: never renumber. */
enum dl_apply_mode { DL_APPLY_OVERWRITE, DL_APPLY_REBASE };

/* A count, or a share of something: quorum: 3, quorum: "75%". */
struct dl_count_or_percent {
    uint32_t value;
    bool is_percent;
};

struct dl_model_spec {   /* Decoder-only transformer. */
    uint32_t vocab_size; /* 256: bytes. */
    uint32_t width;      /* Model dimension; heads divide it. */
    uint32_t layers;
    uint32_t heads;
    uint32_t kv_heads;        /* Grouped-query attention: divides `heads`. 0 in the manifest: as many as heads. */
    uint32_t ffn_width;       /* Hidden width of the gated MLP. 0 in the manifest: 8/3 width rounded up to 32. */
    uint32_t sequence_length; /* Tokens in a training sequence. */
    bool tied_embeddings;
    double rope_theta;
    double norm_epsilon;
    double init_std; /* Standard deviation of initial weights. */
};

struct dl_data_spec {
    uint32_t path_count;
    char paths[DL_SPEC_PATHS_MAX][DL_SPEC_TEXT_MAX]; /* Files; relative ones against the manifest's folder. */
    enum dl_data_format format;                      /* auto: .bin by header, gzip/dictzip by magic, else text. */
    double validation_fraction;                      /* Tail of the data, held out; never trained on. */
    uint32_t validation_sequences;                   /* Sequences in one evaluation. */
    uint32_t lease_sequences; /* Positions of the data that a learner takes at once; 0: some hundred steps' worth. */
};

struct dl_inner_spec { /* AdamW. */
    double learning_rate;
    double min_learning_rate_ratio; /* Cosine decay ends at this share of learning_rate. */
    uint32_t warmup_steps;
    uint32_t decay_steps; /* 0 in the manifest: the steps that the token budget gives one learner. */
    double beta1, beta2, epsilon, weight_decay;
    double clip_norm; /* 0: no clipping. */
};

struct dl_training_spec {
    uint64_t token_budget; /* Over all learners; reached: the job has succeeded. */
    uint64_t round_budget; /* Rounds over all fragments and shards; 0: none. */
    uint64_t seed;
    uint32_t batch_sequences; /* Sequences a learner trains on in one inner step. */
    uint32_t threads;         /* Compute threads of a learner; 0: (cores / learners on this machine), at least 1. */
    struct dl_model_spec model;
    struct dl_data_spec data;
    struct dl_inner_spec inner;
    double evaluation_seconds; /* Least time between two evaluations of the global model; 0: only the last. */
};

struct dl_sync_spec {
    enum dl_sync_mode mode; /* decoupled: never waits. synchronous: learners wait for pull and update (DiLoCo forms). */
    uint32_t fragments;     /* P */
    enum dl_layout_kind layout;
    uint32_t interval; /* H, inner steps */
    uint32_t overlap;  /* tau, inner steps */
    struct {
        int64_t steps;     /* Inner steps of interval warm-up as written; 0: none. What holds is dl_warmup_steps. */
        uint32_t interval; /* Steps between two syncs of all fragments meanwhile. */
        struct dl_count_or_percent quorum; /* Percent: of the connected learners. */
    } warmup;
    struct dl_count_or_percent quorum; /* K; percent: of learners.replicas. */
    struct {
        enum dl_grace_mode mode;
        double margin;      /* gamma */
        double max_seconds; /* Fixed mode waits this long. */
    } grace;
    struct {
        enum dl_merge_method method;
        enum dl_merge_method embedding; /* For embedding and output-head tensors. */
        enum dl_weighting weighting;
        double staleness_decay; /* lambda; 0: off */
        uint32_t staleness_max; /* Versions a push's base may be behind; more is refused as stale_base. */
        double norm_limit;      /* A push whose delta norm exceeds this many times the round's median is refused. */
    } merge;
    struct {
        enum dl_outer_type type;
        double learning_rate, momentum, beta2, epsilon, weight_decay;
    } outer;
    enum dl_codec compression;           /* What a push carries. */
    enum dl_codec broadcast_compression; /* none or bf16 */
    enum dl_apply_mode apply;
    double apply_alpha;          /* Streaming DiLoCo's mixing factor; 0: take Theta as it is. */
    double heartbeat_seconds;    /* <= 20 */
    double timeout_seconds;      /* No frame for so long: the connection counts as lost. */
    double join_timeout_seconds; /* A learner's wait for its first state. */
    double finish_seconds;       /* At the end: bound of the last merges. */
};

struct dl_pool_spec {
    char name[DL_SPEC_NAME_MAX];
    uint32_t replicas; /* Of the last pool: what the others leave of learners.replicas. */
    struct {
        bool enabled;
        uint32_t max; /* Learners of the pool, `replicas` included. */
        uint32_t pending_seconds, cooldown_seconds;
    } scavenge;
    char *template_json; /* PodTemplateSpec as written, or NULL. Owned by the spec. */
};

struct dl_learners_spec {
    uint32_t min, max, replicas;
    uint32_t pool_count; /* At least 1: without pools in the manifest, one named "default". */
    struct dl_pool_spec pools[DL_SPEC_POOLS_MAX];
};

struct dl_spec {
    char name[DL_SPEC_NAME_MAX];
    char namespace_name[DL_SPEC_NAME_MAX];
    bool suspend;
    int64_t ttl_seconds_after_finished; /* -1: keep. */
    int64_t active_deadline_seconds;    /* 0: none. */
    struct dl_training_spec training;
    struct dl_sync_spec sync;
    struct {
        uint32_t shards;
        char storage_size[32]; /* Kubernetes quantity. */
        char storage_class[DL_SPEC_NAME_MAX];
        bool keep_pushes; /* Every merged push stays beside the versions, for replay of the merges alone. */
        uint16_t port;    /* First port on one machine; 0: any free one. In a cluster: the Service's. */
        char *template_json;
    } syncer;
    struct dl_learners_spec learners;
};

/* Something valid that will probably disappoint; `text` says what, why, and which number would do. */
#define DL_SPEC_WARNINGS_MAX 16
#define DL_SPEC_PATH_MAX 64
struct dl_spec_warnings {
    uint32_t count;
    char path[DL_SPEC_WARNINGS_MAX][DL_SPEC_PATH_MAX]; /* The field: "spec.sync.interval". */
    char text[DL_SPEC_WARNINGS_MAX][DL_ERR_TEXT_MAX];  /* Begins with it. */
};

/* What there is to say about a spec that was accepted. Pure. */
void dl_spec_advise(const struct dl_spec *spec, struct dl_spec_warnings *out);

/* Parses a manifest of `size` bytes, YAML or JSON; `origin` names it in errors ("job.yaml"). On success `*out` is the
 * caller's to free. DL_EINVAL: text has line or field path, the value, and what is allowed. `warnings` may be NULL. */
DL_MUST_CHECK enum dl_rc dl_spec_parse(const char *text, size_t size, const char *origin, struct dl_spec **out,
                                       struct dl_spec_warnings *warnings, struct dl_err *err);

/* The same for a job as an API server keeps it: fields that this version does not know are passed over. The server has
 * refused what nobody knows, and has filled in defaults of a schema that may be newer. */
DL_MUST_CHECK enum dl_rc dl_spec_parse_stored(const char *text, size_t size, const char *origin, struct dl_spec **out,
                                              struct dl_err *err);

/* Reads and parses a file; relative data paths become absolute, seen from the file's folder. */
DL_MUST_CHECK enum dl_rc dl_spec_load(const char *path, struct dl_spec **out, struct dl_spec_warnings *warnings,
                                      struct dl_err *err);

/* DL_OK when `after` differs from `before` only in what may change while the job exists; DL_EINVAL names the first field
 * that may not. */
DL_MUST_CHECK enum dl_rc dl_spec_check_frozen(const struct dl_spec *before, const struct dl_spec *after,
                                              struct dl_err *err);

void dl_spec_free(struct dl_spec *spec); /* NULL is fine. */

/* The spec with all defaults filled in, as JSON text that dl_spec_parse takes back to an equal spec. Caller frees. */
DL_MUST_CHECK enum dl_rc dl_spec_to_json(const struct dl_spec *spec, char **out, struct dl_err *err);

/* Rounds up for percents: 75 % of 3 is 3. At least 1, at most `of` (1 when `of` is 0). */
uint32_t dl_count_resolve(struct dl_count_or_percent count, uint32_t of);

/* Whole inner steps that the token budget gives each of `replicas` (0 counts as 1) learners. */
uint64_t dl_training_steps(const struct dl_training_spec *training, uint32_t replicas);

/* Inner steps of interval warm-up of a job that begins as `spec` says: the number written, or three eighths of the run's inner
 * steps; 0: none. A job that has begun keeps its number (the syncer's state has it), whatever becomes of the budget. */
uint32_t dl_warmup_steps(const struct dl_spec *spec);

/* Its stages: `steps` at warmup.interval; then the interval doubles, three times at most and below sync.interval, each time for
 * two ninths as many steps. */
#define DL_WARMUP_STAGES_MAX 4
struct dl_warmup {
    uint32_t count; /* 0: no warm-up. */
    struct {
        uint64_t end; /* In steps from the job's beginning. */
        uint32_t interval;
    } stages[DL_WARMUP_STAGES_MAX];
};
void dl_warmup_plan(const struct dl_sync_spec *sync, uint32_t steps, struct dl_warmup *out);
uint64_t dl_warmup_end(const struct dl_warmup *plan);   /* Steps in all. */
uint64_t dl_warmup_syncs(const struct dl_warmup *plan); /* Of all fragments together, in all of it. */

#endif
