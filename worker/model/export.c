#include "worker/model/export.h"

#include <assert.h>
#include <cjson/cJSON.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <string.h>
#include <sys/stat.h>

#include "common/mem.h"
#include "common/model_config.h"
#include "common/safetensors.h"
#include "worker/model/model_internal.h"

#define CONFIG_BYTES_MAX (1024 * 1024)

static void cleanup_json(cJSON **json)
{
    cJSON_Delete(*json);
}
#define AUTO_JSON __attribute__((cleanup(cleanup_json)))

static void cleanup_safetensors(struct dl_safetensors **file)
{
    dl_safetensors_close(*file);
}
#define AUTO_SAFETENSORS __attribute__((cleanup(cleanup_safetensors)))

static enum dl_rc join(const char *directory, const char *name, char out[PATH_MAX], struct dl_err *err)
{
    int length = snprintf(out, PATH_MAX, "%s/%s", directory, name);
    return length < PATH_MAX ? DL_OK : dl_err_set(err, DL_EINVAL, "the path of %s is too long", name);
}

enum dl_rc wk_model_export(struct wk_model *model, const char *directory, struct dl_err *err)
{
    char weights[PATH_MAX], config[PATH_MAX];
    enum dl_rc rc = join(directory, "model.safetensors", weights, err);
    if (rc == DL_OK) {
        rc = join(directory, "config.json", config, err);
    }
    if (rc == DL_OK && mkdir(directory, 0755) != 0 && errno != EEXIST) {
        rc = dl_err_errno(err, errno == ENOENT ? DL_ENOTFOUND : DL_EIO, errno, "create folder %s", directory);
    }
    if (rc != DL_OK) {
        return rc;
    }
    static char format[] = "format", pt[] = "pt"; /* Without it transformers refuses the file. */
    const struct dl_safetensors_pair metadata[] = {{.key = format, .value = pt}};
    rc = dl_safetensors_write(weights, model->tensors, (const float *const *)model->parameters, model->tensor_count,
                              metadata, 1, err);
    return rc == DL_OK ? dl_model_config_write(&model->spec, config, err) : rc;
}

static void print_shape(const struct dl_tensor *tensor, char *out, size_t size)
{
    size_t used = (size_t)snprintf(out, size, "[");
    for (uint32_t i = 0; i < tensor->rank && used < size; i++) {
        used += (size_t)snprintf(out + used, size - used, "%s%" PRIu64, i == 0 ? "" : ", ", tensor->shape[i]);
    }
    if (used < size) {
        snprintf(out + used, size - used, "]");
    }
}

static bool shapes_agree(const struct dl_tensor *a, const struct dl_tensor *b)
{
    return a->rank == b->rank && memcmp(a->shape, b->shape, a->rank * sizeof a->shape[0]) == 0;
}

static enum dl_rc check_tensor(const struct dl_safetensors *file, const struct dl_tensor *ours, const char *path,
                               struct dl_err *err)
{
    int64_t index = dl_safetensors_find(file, ours->name);
    if (index < 0) {
        return dl_err_set(err, DL_EINVAL, "%s has no tensor %s, which the model needs", path, ours->name);
    }
    const struct dl_tensor *theirs = dl_safetensors_tensor(file, (uint32_t)index);
    if (!shapes_agree(ours, theirs)) {
        char wanted[96], found[96];
        print_shape(ours, wanted, sizeof wanted);
        print_shape(theirs, found, sizeof found);
        return dl_err_set(err, DL_EINVAL, "%s: tensor %s has shape %s, the model's is %s", path, ours->name, found,
                          wanted);
    }
    return DL_OK;
}

/* A tied model has one matrix for both ends: a file with a different second one would lose it silently. */
static enum dl_rc check_tied_head(struct wk_model *model, struct dl_safetensors *file, const char *path,
                                  struct dl_err *err)
{
    int64_t head = dl_safetensors_find(file, "lm_head.weight");
    if (!model->dims.tied || head < 0) {
        return DL_OK;
    }
    const struct dl_tensor *embed = &model->tensors[0];
    int64_t embed_index = dl_safetensors_find(file, embed->name);
    uint64_t elements = dl_tensor_elements(embed);
    if (!shapes_agree(embed, dl_safetensors_tensor(file, (uint32_t)head))) {
        return dl_err_set(err, DL_EINVAL, "%s: lm_head.weight has another shape than %s, and the model ties them", path,
                          embed->name);
    }
    DL_AUTO_FREE float *a = dl_alloc_aligned(elements * sizeof *a);
    DL_AUTO_FREE float *b = dl_alloc_aligned(elements * sizeof *b);
    if (a == NULL || b == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to compare lm_head.weight with %s", embed->name);
    }
    enum dl_rc rc = dl_safetensors_read(file, (uint32_t)head, a, err);
    if (rc == DL_OK) {
        rc = dl_safetensors_read(file, (uint32_t)embed_index, b, err);
    }
    if (rc == DL_OK && memcmp(a, b, elements * sizeof *a) != 0) {
        rc = dl_err_set(err, DL_EINVAL,
                        "%s: lm_head.weight differs from %s, but the model ties them: set "
                        "tiedEmbeddings to false",
                        path, embed->name);
    }
    return rc;
}

enum dl_rc wk_model_import(struct wk_model *model, const char *path, struct dl_err *err)
{
    char inside[PATH_MAX];
    struct stat status;
    enum dl_rc rc = DL_OK;
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) {
        rc = join(path, "model.safetensors", inside, err);
        path = inside;
    }
    AUTO_SAFETENSORS struct dl_safetensors *file = NULL;
    if (rc == DL_OK) {
        rc = dl_safetensors_open(path, &file, err);
    }
    for (uint32_t i = 0; rc == DL_OK && i < model->tensor_count; i++) {
        rc = check_tensor(file, &model->tensors[i], path, err);
    }
    if (rc == DL_OK) {
        rc = check_tied_head(model, file, path, err);
    }
    for (uint32_t i = 0; rc == DL_OK && i < model->tensor_count; i++) {
        int64_t index = dl_safetensors_find(file, model->tensors[i].name);
        rc = dl_safetensors_read(file, (uint32_t)index, model->parameters[i], err);
    }
    return rc;
}

static enum dl_rc read_config(const char *path, cJSON **out, struct dl_err *err)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return dl_err_errno(err, errno == ENOENT ? DL_ENOTFOUND : DL_EIO, errno, "open %s", path);
    }
    enum dl_rc rc = DL_OK;
    char *text = malloc(CONFIG_BYTES_MAX + 1);
    size_t size = text == NULL ? 0 : fread(text, 1, CONFIG_BYTES_MAX + 1, file);
    if (text == NULL) {
        rc = dl_err_set(err, DL_ENOMEM, "no memory to read %s", path);
    } else if (ferror(file) || size > CONFIG_BYTES_MAX) {
        rc = dl_err_set(err, DL_EINVAL, "read %s: it cannot be read, or is larger than %d bytes", path,
                        CONFIG_BYTES_MAX);
    } else {
        *out = cJSON_ParseWithLength(text, size);
        rc = *out != NULL ? DL_OK : dl_err_set(err, DL_EINVAL, "%s is not JSON", path);
    }
    free(text);
    fclose(file);
    return rc;
}

/* A whole number of the config; `fallback` 0 makes it required. */
static enum dl_rc take_size(const cJSON *json, const char *path, const char *key, uint32_t fallback, uint32_t *out,
                            struct dl_err *err)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    if (item == NULL && fallback != 0) {
        *out = fallback;
        return DL_OK;
    }
    if (item == NULL || !cJSON_IsNumber(item) || item->valuedouble < 1 || item->valuedouble > INT32_MAX ||
        item->valuedouble != (double)item->valueint) {
        return dl_err_set(err, DL_EINVAL, "%s: %s must be a whole number of at least 1", path, key);
    }
    *out = (uint32_t)item->valueint;
    return DL_OK;
}

static double take_double(const cJSON *json, const char *key, double fallback)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, key);
    return cJSON_IsNumber(item) ? item->valuedouble : fallback;
}

/* Features of LlamaConfig that this trainer does not have: opening such a model anyway would compute something else. */
static enum dl_rc refuse_foreign(const cJSON *json, const char *path, const struct dl_model_spec *spec,
                                 struct dl_err *err)
{
    const cJSON *type = cJSON_GetObjectItemCaseSensitive(json, "model_type");
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "llama") != 0) {
        return dl_err_set(err, DL_EUNSUPPORTED, "%s: model_type is not llama", path);
    }
    static const char *const biases[] = {"attention_bias", "mlp_bias"};
    for (size_t i = 0; i < DL_COUNT_OF(biases); i++) {
        if (cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, biases[i]))) {
            return dl_err_set(err, DL_EUNSUPPORTED, "%s: %s is not supported", path, biases[i]);
        }
    }
    const cJSON *rope = cJSON_GetObjectItemCaseSensitive(json, "rope_parameters");
    const cJSON *rope_type = cJSON_GetObjectItemCaseSensitive(rope, "rope_type");
    const cJSON *scaling = cJSON_GetObjectItemCaseSensitive(json, "rope_scaling");
    if ((cJSON_IsString(rope_type) && strcmp(rope_type->valuestring, "default") != 0) || (cJSON_IsObject(scaling))) {
        return dl_err_set(err, DL_EUNSUPPORTED, "%s: scaled rotary positions are not supported", path);
    }
    assert(spec->heads > 0);
    const uint32_t head_width = spec->width / spec->heads;
    if (take_double(json, "head_dim", head_width) != head_width) {
        return dl_err_set(err, DL_EUNSUPPORTED, "%s: head_dim other than hidden_size / num_attention_heads", path);
    }
    return DL_OK;
}

enum dl_rc wk_model_import_spec(const char *directory, struct dl_model_spec *spec, struct dl_err *err)
{
    char path[PATH_MAX];
    AUTO_JSON cJSON *json = NULL;
    enum dl_rc rc = join(directory, "config.json", path, err);
    if (rc == DL_OK) {
        rc = read_config(path, &json, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    struct dl_model_spec found = {0};
    if ((rc = take_size(json, path, "vocab_size", 0, &found.vocab_size, err)) != DL_OK ||
        (rc = take_size(json, path, "hidden_size", 0, &found.width, err)) != DL_OK ||
        (rc = take_size(json, path, "intermediate_size", 0, &found.ffn_width, err)) != DL_OK ||
        (rc = take_size(json, path, "num_hidden_layers", 0, &found.layers, err)) != DL_OK ||
        (rc = take_size(json, path, "num_attention_heads", 0, &found.heads, err)) != DL_OK ||
        (rc = take_size(json, path, "num_key_value_heads", found.heads, &found.kv_heads, err)) != DL_OK ||
        (rc = take_size(json, path, "max_position_embeddings", 0, &found.sequence_length, err)) != DL_OK ||
        (rc = refuse_foreign(json, path, &found, err)) != DL_OK) {
        return rc;
    }
    const cJSON *rope = cJSON_GetObjectItemCaseSensitive(json, "rope_parameters");
    found.rope_theta = take_double(rope, "rope_theta", take_double(json, "rope_theta", 10000));
    found.norm_epsilon = take_double(json, "rms_norm_eps", 1e-6);
    found.init_std = take_double(json, "initializer_range", 0.02);
    found.tied_embeddings = cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "tie_word_embeddings"));
    *spec = found;
    return DL_OK;
}
