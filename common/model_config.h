/* dl_model_config: the config.json that, beside model.safetensors, lets transformers' LlamaForCausalLM open a folder.
 *
 * Does file I/O; any thread. Layer common: the job's final export and an export from a syncer's state write the same one. */
#ifndef DL_COMMON_MODEL_CONFIG_H
#define DL_COMMON_MODEL_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/spec.h"

#define DL_MODEL_TENSORS_PER_LAYER 9 /* q, k, v, o; gate, up, down; two norms. */

/* Parameters of the architecture: its layers, the final norm, the embedding and, if untied, the head. */
uint64_t dl_model_parameters(const struct dl_model_spec *model);

/* Whether these tensors are the model's: a trainer of another make may keep others than the job's model says. */
bool dl_model_config_fits(const struct dl_model_spec *model, const struct dl_tensor *tensors, uint32_t count);

/* Replaces the file as a whole (atomic_file.h, whose errors are this one's); DL_ENOMEM. */
DL_MUST_CHECK enum dl_rc dl_model_config_write(const struct dl_model_spec *model, const char *path, struct dl_err *err);

#endif
