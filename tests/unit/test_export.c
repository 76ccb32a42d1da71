/* Exported folders: back into a model bit for bit, and every way in which a file can fail to fit. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/model_config.h"
#include "common/safetensors.h"
#include "tests/unit/unit.h"
#include "worker/model/export.h"
#include "worker/model/model.h"

static char folder[] = "/tmp/unit-export-XXXXXX";

static struct dl_model_spec spec_of(bool tied)
{
    return (struct dl_model_spec){.vocab_size = 30,
                                  .width = 16,
                                  .layers = 2,
                                  .heads = 4,
                                  .kv_heads = 2,
                                  .ffn_width = 24,
                                  .sequence_length = 8,
                                  .tied_embeddings = tied,
                                  .rope_theta = 12345.5,
                                  .norm_epsilon = 3e-6,
                                  .init_std = 0.02};
}

static struct wk_model *make_model(const struct dl_model_spec *spec, uint64_t seed)
{
    struct dl_err err;
    struct wk_model *model = NULL;
    const struct wk_model_options options = {.batch_sequences = 1, .threads = 1, .seed = seed, .forward_only = true};
    CU_ASSERT_EQUAL_FATAL(wk_model_new(spec, &options, &model, &err), DL_OK);
    return model;
}

static bool same_parameters(struct wk_model *a, struct wk_model *b)
{
    for (uint32_t i = 0; i < wk_model_tensor_count(a); i++) {
        size_t bytes = dl_tensor_elements(&wk_model_tensors(a)[i]) * sizeof(float);
        if (memcmp(wk_model_parameters(a)[i], wk_model_parameters(b)[i], bytes) != 0) {
            return false;
        }
    }
    return true;
}

static void in_folder(const char *name, char *out, size_t size)
{
    snprintf(out, size, "%s/%s", folder, name);
}

static void remove_export(const char *path)
{
    char file[128];
    snprintf(file, sizeof file, "%s/model.safetensors", path);
    unlink(file);
    snprintf(file, sizeof file, "%s/config.json", path);
    unlink(file);
    rmdir(path);
}

/* What an export from a syncer's state goes by: another trainer's tensors get no config. */
static void test_fits_its_own_tensors_only(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct dl_model_spec spec = spec_of(tied == 1), other = spec_of(tied == 0);
        struct wk_model *model = make_model(&spec, 1);
        const struct dl_tensor *tensors = wk_model_tensors(model);
        uint32_t count = wk_model_tensor_count(model);
        uint64_t elements = 0;
        for (uint32_t i = 0; i < count; i++) {
            elements += dl_tensor_elements(&tensors[i]);
        }
        CU_ASSERT_EQUAL(dl_model_parameters(&spec), elements);
        CU_ASSERT_TRUE(dl_model_config_fits(&spec, tensors, count));
        CU_ASSERT_FALSE(dl_model_config_fits(&other, tensors, count));
        CU_ASSERT_FALSE(dl_model_config_fits(&spec, tensors + 1, count - 1));
        spec.ffn_width++;
        CU_ASSERT_FALSE(dl_model_config_fits(&spec, tensors, count));
        wk_model_free(model);
    }
}

static void test_round_trip(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct dl_model_spec spec = spec_of(tied == 1), found;
        struct wk_model *model = make_model(&spec, 1), *other = make_model(&spec, 2);
        char path[96], file[128];
        struct dl_err err;
        in_folder("export", path, sizeof path);
        CU_ASSERT(!same_parameters(model, other));
        CU_ASSERT_EQUAL(wk_model_export(model, path, &err), DL_OK);
        CU_ASSERT_EQUAL(wk_model_export(model, path, &err), DL_OK); /* Over an old one. */
        CU_ASSERT_EQUAL(wk_model_import(other, path, &err), DL_OK);
        CU_ASSERT(same_parameters(model, other));
        CU_ASSERT_EQUAL_FATAL(wk_model_import_spec(path, &found, &err), DL_OK);
        CU_ASSERT(found.vocab_size == 30 && found.width == 16 && found.layers == 2 && found.heads == 4);
        CU_ASSERT(found.kv_heads == 2 && found.ffn_width == 24 && found.sequence_length == 8);
        CU_ASSERT(found.tied_embeddings == (tied == 1));
        CU_ASSERT(found.rope_theta == 12345.5 && found.norm_epsilon == 3e-6 && found.init_std == 0.02);
        struct wk_model *third = make_model(&found, 3);
        snprintf(file, sizeof file, "%s/model.safetensors", path);
        CU_ASSERT_EQUAL(wk_model_import(third, file, &err), DL_OK); /* The file instead of its folder. */
        CU_ASSERT(same_parameters(model, third));
        wk_model_free(model);
        wk_model_free(other);
        wk_model_free(third);
        remove_export(path);
    }
}

static void test_what_does_not_fit(void)
{
    struct dl_model_spec spec = spec_of(true), wide = spec, deep = spec, untied = spec_of(false);
    wide.ffn_width = 32;
    deep.layers = 3;
    struct wk_model *model = make_model(&spec, 1), *wider = make_model(&wide, 2), *deeper = make_model(&deep, 3);
    struct wk_model *two_ended = make_model(&untied, 4), *kept = make_model(&wide, 2);
    char path[96];
    struct dl_err err;
    in_folder("export", path, sizeof path);
    CU_ASSERT_EQUAL(wk_model_export(model, path, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_model_import(wider, path, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "model.layers.0.mlp.gate_proj.weight has shape [24, 16], the model's is [32, 16]") !=
              NULL);
    CU_ASSERT(same_parameters(wider, kept)); /* Refused as a whole. */
    CU_ASSERT_EQUAL(wk_model_import(deeper, path, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "no tensor model.layers.2.input_layernorm.weight") != NULL);
    CU_ASSERT_EQUAL(wk_model_import(two_ended, path, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "lm_head.weight") != NULL);
    /* Two different ends do not fit into one. */
    CU_ASSERT_EQUAL(wk_model_export(two_ended, path, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_model_import(model, path, &err), DL_EINVAL);
    CU_ASSERT(strstr(err.text, "tiedEmbeddings") != NULL);
    /* Two equal ones do. */
    float *const *arrays = wk_model_parameters(two_ended);
    memcpy(arrays[wk_model_tensor_count(two_ended) - 1], arrays[0], 30 * 16 * sizeof(float));
    CU_ASSERT_EQUAL(wk_model_export(two_ended, path, &err), DL_OK);
    CU_ASSERT_EQUAL(wk_model_import(model, path, &err), DL_OK);
    CU_ASSERT(unit_same_bits(wk_model_parameters(model)[0], arrays[0], 30 * 16 * sizeof(float)));
    remove_export(path);
    CU_ASSERT_EQUAL(wk_model_import(model, path, &err), DL_ENOTFOUND);
    in_folder("no/such/folder", path, sizeof path);
    CU_ASSERT_EQUAL(wk_model_export(model, path, &err), DL_ENOTFOUND);
    wk_model_free(model);
    wk_model_free(wider);
    wk_model_free(deeper);
    wk_model_free(two_ended);
    wk_model_free(kept);
}

static enum dl_rc spec_from_text(const char *text, struct dl_err *err)
{
    char path[96];
    struct dl_model_spec spec;
    in_folder("config.json", path, sizeof path);
    FILE *file = fopen(path, "w");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    fputs(text, file);
    fclose(file);
    enum dl_rc rc = wk_model_import_spec(folder, &spec, err);
    unlink(path);
    return rc;
}

#define SIZES                                                                                                          \
    "\"vocab_size\":30,\"hidden_size\":16,\"intermediate_size\":24,\"num_hidden_layers\":2,\"num_attention_heads\":4," \
    "\"max_position_embeddings\":8"

static void test_foreign_configs(void)
{
    static const struct {
        const char *text;
        enum dl_rc rc;
        const char *message;
    } configs[] = {
        {"{\"model_type\":\"llama\"," SIZES "}", DL_OK, NULL},
        {"{\"model_type\":\"gpt2\"," SIZES "}", DL_EUNSUPPORTED, "model_type"},
        {"{" SIZES "}", DL_EUNSUPPORTED, "model_type"},
        {"{\"model_type\":\"llama\",\"attention_bias\":true," SIZES "}", DL_EUNSUPPORTED, "attention_bias"},
        {"{\"model_type\":\"llama\",\"head_dim\":8," SIZES "}", DL_EUNSUPPORTED, "head_dim"},
        {"{\"model_type\":\"llama\",\"rope_scaling\":{\"type\":\"linear\"}," SIZES "}", DL_EUNSUPPORTED, "rotary"},
        {"{\"model_type\":\"llama\",\"rope_parameters\":{\"rope_type\":\"yarn\"}," SIZES "}", DL_EUNSUPPORTED,
         "rotary"},
        {"{\"model_type\":\"llama\",\"vocab_size\":-1}", DL_EINVAL, "vocab_size"},
        {"{\"model_type\":\"llama\",\"vocab_size\":2.5}", DL_EINVAL, "vocab_size"},
        {"{\"model_type\":\"llama\",\"vocab_size\":30}", DL_EINVAL, "hidden_size"},
        {"{", DL_EINVAL, "JSON"},
        {"", DL_EINVAL, "JSON"},
    };
    for (size_t i = 0; i < DL_COUNT_OF(configs); i++) {
        struct dl_err err = {0};
        CU_ASSERT_EQUAL(spec_from_text(configs[i].text, &err), configs[i].rc);
        CU_ASSERT(configs[i].message == NULL || strstr(err.text, configs[i].message) != NULL);
    }
    struct dl_err err;
    struct dl_model_spec spec;
    CU_ASSERT_EQUAL(wk_model_import_spec(folder, &spec, &err), DL_ENOTFOUND);
}

int main(void)
{
    if (mkdtemp(folder) == NULL) {
        return 2;
    }
    static const struct unit_case cases[] = {{"fits its own tensors only", test_fits_its_own_tensors_only},
                                             {"round trip", test_round_trip},
                                             {"what does not fit", test_what_does_not_fit},
                                             {"foreign configs", test_foreign_configs}};
    int status = unit_main("export", cases, DL_COUNT_OF(cases));
    rmdir(folder);
    return status;
}
