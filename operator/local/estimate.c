#include "operator/local/estimate.h"

#include "common/codec.h"
#include "common/layout.h"
#include "common/mem.h"
#include "common/model_config.h"

/* Values kept for the backward pass, per token: some ten vectors of the width, four of the MLP's, attention's rows,
 * logits. */
static uint64_t activation_bytes(const struct dl_training_spec *training)
{
    const struct dl_model_spec *model = &training->model;
    uint64_t ffn = model->ffn_width != 0 ? model->ffn_width : (8 * (uint64_t)model->width / 3 + 31) / 32 * 32;
    uint64_t a_layer = 10 * (uint64_t)model->width + 4 * ffn + (uint64_t)model->heads * model->sequence_length;
    uint64_t a_token = model->layers * a_layer + 2 * (uint64_t)model->vocab_size;
    return sizeof(float) * a_token * training->batch_sequences * model->sequence_length;
}

void op_estimate_make(const struct dl_spec *spec, struct op_estimate *out)
{
    const struct dl_training_spec *training = &spec->training;
    uint64_t parameters = dl_model_parameters(&training->model);
    uint64_t bytes = parameters * sizeof(float);
    uint64_t replicas = DL_MAX(spec->learners.replicas, 1u);
    *out = (struct op_estimate){.parameters = parameters};
    out->tokens_per_step = (uint64_t)training->batch_sequences * training->model.sequence_length;
    out->tokens_per_learner_step_all = out->tokens_per_step * replicas;
    if (training->token_budget > 0) {
        out->steps_per_learner = DL_MAX(dl_training_steps(training, spec->learners.replicas), UINT64_C(1));
    }
    /* Every fragment is synced once an interval; in the warm-up more often. */
    struct dl_warmup warmup;
    dl_warmup_plan(&spec->sync, dl_warmup_steps(spec), &warmup);
    out->warmup_steps = DL_MIN(dl_warmup_end(&warmup), out->steps_per_learner);
    out->warmup_syncs = DL_MIN(dl_warmup_syncs(&warmup), out->warmup_steps);
    uint64_t cycles =
        out->warmup_syncs + (out->steps_per_learner - out->warmup_steps) / DL_MAX(spec->sync.interval, 1u);
    out->rounds = cycles * spec->sync.fragments;
    /* Parameters, gradients, two moments, base copy for deltas. */
    out->learner_bytes_least = 5 * bytes;
    out->learner_bytes = out->learner_bytes_least + activation_bytes(training);
    out->evaluator_bytes = 2 * bytes;
    /* Theta, momentum, scratch; and one encoded fragment for each learner of a round. */
    uint64_t fragments = DL_MAX(spec->sync.fragments, 1u);
    uint64_t blocks = (parameters / fragments + DL_BLOCK - 1) / DL_BLOCK;
    out->push_bytes = dl_codec_bytes(spec->sync.compression, blocks * DL_BLOCK);
    uint64_t interval = DL_MAX(spec->sync.interval, 1u);
    out->up_bytes = out->push_bytes * fragments / interval;
    out->down_bytes = dl_codec_bytes(spec->sync.broadcast_compression, blocks * DL_BLOCK) * fragments / interval;
    uint64_t shards = DL_MAX(spec->syncer.shards, 1u);
    out->syncer_bytes = 3 * bytes / shards + out->push_bytes * replicas;
    out->total_bytes_least = replicas * out->learner_bytes_least + out->evaluator_bytes + shards * out->syncer_bytes;
}
