#include "common/model_config.h"

#include <cjson/cJSON.h>
#include <string.h>

#include "common/atomic_file.h"
#include "common/mem.h"

uint64_t dl_model_parameters(const struct dl_model_spec *model)
{
    uint64_t width = model->width, ffn = model->ffn_width, kv_width = width / model->heads * model->kv_heads;
    uint64_t layer = 2 * width * width + 2 * width * kv_width + 3 * width * ffn + 2 * width;
    uint64_t embedding = model->vocab_size * width;
    return model->layers * layer + width + embedding * (model->tied_embeddings ? 1 : 2);
}

bool dl_model_config_fits(const struct dl_model_spec *model, const struct dl_tensor *tensors, uint32_t count)
{
    uint64_t wanted = (uint64_t)model->layers * DL_MODEL_TENSORS_PER_LAYER + (model->tied_embeddings ? 2 : 3);
    uint64_t elements = 0;
    bool embeds = false;
    for (uint32_t i = 0; i < count; i++) {
        elements += dl_tensor_elements(&tensors[i]);
        embeds = embeds || (strcmp(tensors[i].name, "model.embed_tokens.weight") == 0 && tensors[i].rank == 2 &&
                            tensors[i].shape[0] == model->vocab_size && tensors[i].shape[1] == model->width);
    }
    return embeds && count == wanted && elements == dl_model_parameters(model);
}

/* What transformers' LlamaConfig reads; rope_theta stands in both places where its versions look for it. */
static cJSON *make_config(const struct dl_model_spec *model)
{
    const uint32_t head_width = model->width / model->heads;
    cJSON *json = cJSON_CreateObject();
    cJSON *architectures = cJSON_AddArrayToObject(json, "architectures");
    cJSON_AddItemToArray(architectures, cJSON_CreateString("LlamaForCausalLM"));
    cJSON_AddStringToObject(json, "model_type", "llama");
    cJSON_AddNumberToObject(json, "vocab_size", model->vocab_size);
    cJSON_AddNumberToObject(json, "hidden_size", model->width);
    cJSON_AddNumberToObject(json, "intermediate_size", model->ffn_width);
    cJSON_AddNumberToObject(json, "num_hidden_layers", model->layers);
    cJSON_AddNumberToObject(json, "num_attention_heads", model->heads);
    cJSON_AddNumberToObject(json, "num_key_value_heads", model->kv_heads);
    cJSON_AddNumberToObject(json, "head_dim", head_width);
    cJSON_AddNumberToObject(json, "max_position_embeddings", model->sequence_length);
    cJSON_AddStringToObject(json, "hidden_act", "silu");
    cJSON_AddNumberToObject(json, "rms_norm_eps", model->norm_epsilon);
    cJSON_AddNumberToObject(json, "initializer_range", model->init_std);
    cJSON_AddNumberToObject(json, "rope_theta", model->rope_theta);
    cJSON *rope = cJSON_AddObjectToObject(json, "rope_parameters");
    cJSON_AddStringToObject(rope, "rope_type", "default");
    cJSON_AddNumberToObject(rope, "rope_theta", model->rope_theta);
    cJSON_AddBoolToObject(json, "tie_word_embeddings", model->tied_embeddings);
    cJSON_AddBoolToObject(json, "attention_bias", 0);
    cJSON_AddBoolToObject(json, "mlp_bias", 0);
    cJSON_AddNumberToObject(json, "attention_dropout", 0);
    cJSON_AddNullToObject(json, "bos_token_id");
    cJSON_AddNullToObject(json, "eos_token_id");
    cJSON_AddNullToObject(json, "pad_token_id");
    cJSON_AddStringToObject(json, "torch_dtype", "float32");
    return json;
}

enum dl_rc dl_model_config_write(const struct dl_model_spec *model, const char *path, struct dl_err *err)
{
    cJSON *json = make_config(model);
    DL_AUTO_FREE char *text = json == NULL ? NULL : cJSON_Print(json);
    cJSON_Delete(json);
    if (text == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to write %s", path);
    }
    struct dl_atomic_file file;
    enum dl_rc rc = dl_atomic_file_open(&file, path, err);
    if (rc != DL_OK) {
        return rc;
    }
    rc = dl_atomic_file_write(&file, text, strlen(text), err);
    if (rc == DL_OK) {
        return dl_atomic_file_commit(&file, err);
    }
    dl_atomic_file_abandon(&file);
    return rc;
}
