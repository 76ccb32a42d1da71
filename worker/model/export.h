/* wk_export: a model as a folder that transformers' LlamaForCausalLM opens, and back.
 *
 * `model.safetensors` (float32) and `config.json`. Both are written to a temporary name, synced and renamed. */
#ifndef WK_MODEL_EXPORT_H
#define WK_MODEL_EXPORT_H

#include "common/err.h"
#include "worker/model/model.h"

/* Creates `directory` when it is missing (its parent must exist). */
DL_MUST_CHECK enum dl_rc wk_model_export(struct wk_model *model, const char *directory, struct dl_err *err);

/* Reads weights into the model from a folder (its model.safetensors) or a safetensors file, F32, BF16 or F16. All
 * tensors must be there with equal shapes: DL_EINVAL names the first one that is missing or differs, with both shapes.
 * A tied model takes a file with `lm_head.weight` only when it equals the embedding. Nothing is changed on an error in
 * the header. */
DL_MUST_CHECK enum dl_rc wk_model_import(struct wk_model *model, const char *path, struct dl_err *err);

/* The architecture in a folder's config.json, for opening an export without its job. sequence_length comes from
 * max_position_embeddings. */
DL_MUST_CHECK enum dl_rc wk_model_import_spec(const char *directory, struct dl_model_spec *spec, struct dl_err *err);

#endif
