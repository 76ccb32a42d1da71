/* The job manifest: every field from the table, every sample, and what is refused with which words. */
#include <glob.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec.h"
#include "common/spec_reference.h"
#include "common/spec_table.h"
#include "tests/unit/unit.h"

#define HEAD "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: a}\n"
#define MINIMAL HEAD "spec:\n  training: {tokenBudget: 1000000, data: {paths: [x.txt]}}\n"

static enum dl_rc parse(const char *text, struct dl_spec **spec, struct dl_spec_warnings *warnings, struct dl_err *err)
{
    return dl_spec_parse(text, strlen(text), "job.yaml", spec, warnings, err);
}

static void test_defaults(void)
{
    struct dl_spec *spec = NULL;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL_FATAL(parse(MINIMAL, &spec, NULL, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(spec->name, "a");
    CU_ASSERT_STRING_EQUAL(spec->namespace_name, "default");
    CU_ASSERT_EQUAL(spec->sync.fragments, 24);
    CU_ASSERT_EQUAL(spec->sync.interval, 24);
    CU_ASSERT_EQUAL(spec->sync.merge.method, DL_MERGE_RDA);
    CU_ASSERT_EQUAL(spec->sync.merge.embedding, DL_MERGE_MEAN);
    CU_ASSERT_EQUAL(spec->sync.compression, DL_CODEC_INT8);
    CU_ASSERT_EQUAL(spec->training.model.kv_heads, spec->training.model.heads);
    CU_ASSERT_EQUAL(spec->training.model.ffn_width % 32, 0);
    CU_ASSERT_EQUAL(spec->learners.pool_count, 1);
    CU_ASSERT_STRING_EQUAL(spec->learners.pools[0].name, "default");
    CU_ASSERT_EQUAL(spec->learners.pools[0].replicas, 1);
    CU_ASSERT_EQUAL(spec->ttl_seconds_after_finished, -1);
    dl_spec_free(spec);
}

/* Line, path, value and what is allowed must be in the text. */
static const struct {
    const char *name, *text, *expected[3];
} bad[] = {
    {"empty", "", {"job.yaml", "empty"}},
    {"only comments", "# nothing\n", {"empty"}},
    {"broken YAML", HEAD "spec: {training: [\n", {"not valid YAML"}},
    {"tab", HEAD "spec:\n\ttraining: 1\n", {"job.yaml:5", "not valid YAML"}},
    {"list at top", "- a\n", {"manifest", "mapping"}},
    {"wrong apiVersion", "apiVersion: v1\nkind: DecoupledDiLoCoJob\n", {"apiVersion", "diloco.dev/v1alpha1"}},
    {"wrong kind", "apiVersion: diloco.dev/v1alpha1\nkind: Pod\n", {"job.yaml:2", "kind"}},
    {"no name", "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nspec: {}\n", {"metadata.name"}},
    {"bad name", "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: A_b}\n", {"metadata.name", "DNS"}},
    {"no spec", HEAD, {"spec", "required"}},
    {"no budget", HEAD "spec: {training: {data: {paths: [x]}}}\n", {"spec.training.tokenBudget is required"}},
    {"unknown top field", HEAD "specs: {}\n", {"specs", "unknown field"}},
    {"unknown field", MINIMAL "  sync: {intervall: 3}\n", {"job.yaml:6", "spec.sync.intervall", "did you mean 'interval'"}},
    {"unknown branch", MINIMAL "  sink: {a: 1}\n", {"spec.sink", "did you mean 'sync'"}},
    {"far unknown", MINIMAL "  sync: {zzzzzzzzzz: 3}\n", {"unknown field; see"}},
    {"twice", MINIMAL "  sync: {interval: 3, interval: 4}\n", {"'interval' stands there twice"}},
    {"scalar for map", MINIMAL "  sync: 3\n", {"spec.sync", "mapping"}},
    {"map for scalar", MINIMAL "  sync: {interval: {a: 1}}\n", {"spec.sync.interval", "single value"}},
    {"not a number", MINIMAL "  sync: {interval: many}\n", {"spec.sync.interval", "'many'", "whole number from 1"}},
    {"quoted integer", MINIMAL "  sync: {interval: \"3\"}\n", {"spec.sync.interval", "whole number"}},
    {"fraction", MINIMAL "  sync: {interval: 2.5}\n", {"'2.5'", "whole number"}},
    {"too small", MINIMAL "  sync: {interval: 0}\n", {"spec.sync.interval", "from 1 to"}},
    {"negative", MINIMAL "  sync: {fragments: -1}\n", {"spec.sync.fragments", "from 1 to 512"}},
    {"overflow", HEAD "spec: {training: {tokenBudget: 99999999999999999999}}\n", {"tokenBudget", "from 1"}},
    {"NaN", MINIMAL "  sync: {grace: {margin: .nan}}\n", {"spec.sync.grace.margin", "from 0 to 1"}},
    {"infinite", MINIMAL "  sync: {grace: {margin: inf}}\n", {"from 0 to 1"}},
    {"enum", MINIMAL "  sync: {compression: int2}\n", {"spec.sync.compression", "'int2'", "none, bf16, int8, int4"}},
    {"broadcast", MINIMAL "  sync: {broadcastCompression: int8}\n", {"'int8'", "none, bf16"}},
    {"bool", MINIMAL "  suspend: yes\n", {"spec.suspend", "true or false"}},
    {"quorum percent", MINIMAL "  sync: {quorum: \"101%\"}\n", {"spec.sync.quorum", "101%"}},
    {"quorum zero", MINIMAL "  sync: {quorum: 0}\n", {"spec.sync.quorum", "from 1"}},
    {"quorum above max", MINIMAL "  sync: {quorum: 5}\n  learners: {max: 4}\n", {"spec.sync.quorum: 5", "max = 4", "1 to 4"}},
    {"replicas above max", MINIMAL "  learners: {replicas: 5, max: 4}\n", {"replicas 5 <= max 4"}},
    {"min above replicas", MINIMAL "  learners: {replicas: 1, min: 2}\n", {"min 2 <= replicas 1"}},
    {"pools disagree", MINIMAL "  learners: {replicas: 3, pools: [{name: a, replicas: 2}]}\n", {"add up to 2"}},
    {"pool without name", MINIMAL "  learners: {pools: [{replicas: 2}]}\n", {"spec.learners.pools[0]", "DNS"}},
    {"pool twice", MINIMAL "  learners: {pools: [{name: a}, {name: a}]}\n", {"pools[1]", "same name"}},
    {"pool field", MINIMAL "  learners: {pools: [{name: a, replica: 2}]}\n", {"pools[0].replica", "'replicas'"}},
    {"heads", HEAD "spec: {training: {tokenBudget: 9, model: {width: 100, heads: 3}}}\n", {"width 100", "heads 3"}},
    {"odd head", HEAD "spec: {training: {tokenBudget: 9, model: {width: 12, heads: 4}}}\n", {"even"}},
    {"kv heads", HEAD "spec: {training: {tokenBudget: 9, model: {kvHeads: 3}}}\n", {"kvHeads 3"}},
    {"overlap", MINIMAL "  sync: {overlap: 24}\n", {"overlap 24", "interval 24"}},
    {"timeouts", MINIMAL "  sync: {timeoutSeconds: 5, heartbeatSeconds: 5}\n", {"timeoutSeconds 5", "heartbeatSeconds 5"}},
    {"heartbeat", MINIMAL "  sync: {heartbeatSeconds: 30}\n", {"heartbeatSeconds", "to 20"}},
    {"shards", MINIMAL "  sync: {fragments: 2}\n  syncer: {shards: 3}\n", {"3 shards", "2 fragments"}},
    {"rebase and alpha", MINIMAL "  sync: {apply: rebase, applyAlpha: 0.5}\n", {"exclude"}},
    {"anchor", MINIMAL "  sync: &a {interval: 3}\n", {"anchor", "not accepted"}},
    {"alias", HEAD "spec: {a: *b}\n", {"not accepted"}},
    {"tag", MINIMAL "  sync: !x {interval: 3}\n", {"tag", "not accepted"}},
    {"two documents", MINIMAL "---\n" HEAD, {"second document"}},
    {"paths", HEAD "spec: {training: {tokenBudget: 9, data: {paths: x.txt}}}\n", {"data.paths", "list"}},
    {"empty path", HEAD "spec: {training: {tokenBudget: 9, data: {paths: [\"\"]}}}\n", {"file name"}},
    {"template", MINIMAL "  syncer: {template: 3}\n", {"spec.syncer.template", "mapping"}},
};

static void test_bad_manifests_are_refused_with_path_value_and_remedy(void)
{
    for (size_t i = 0; i < DL_COUNT_OF(bad); i++) {
        struct dl_spec *spec = NULL;
        struct dl_err err = {0};
        enum dl_rc rc = parse(bad[i].text, &spec, NULL, &err);
        CU_ASSERT_EQUAL(rc, DL_EINVAL);
        CU_ASSERT_PTR_NULL(spec);
        for (size_t j = 0; j < DL_COUNT_OF(bad[i].expected) && bad[i].expected[j] != NULL; j++) {
            if (strstr(err.text, bad[i].expected[j]) == NULL) {
                printf("%s: '%s' lacks '%s'\n", bad[i].name, err.text, bad[i].expected[j]);
                CU_FAIL("error text");
            }
        }
        dl_spec_free(spec);
    }
}

static void test_size_depth_and_count_limits(void)
{
    struct dl_err err;
    struct dl_spec *spec = NULL;
    size_t size = DL_SPEC_BYTES_MAX + 1;
    DL_AUTO_FREE char *large = malloc(size);
    CU_ASSERT_PTR_NOT_NULL_FATAL(large);
    memset(large, ' ', size);
    CU_ASSERT_EQUAL(dl_spec_parse(large, size, "x", &spec, NULL, &err), DL_EINVAL);
    memset(large, '[', 1000);
    CU_ASSERT_EQUAL(dl_spec_parse(large, 1000, "x", &spec, NULL, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "deeper"));
    large[0] = '[';
    for (size_t i = 1; i < 100001; i += 2) {
        memcpy(large + i, "1,", 2);
    }
    CU_ASSERT_EQUAL(dl_spec_parse(large, 100001, "x", &spec, NULL, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "more than"));
}

/* A value of a field that differs from its default, as it would stand in a manifest. */
static void other_value(const struct dl_field *field, char *out, size_t size)
{
    bool is_enum = field->type == DL_FIELD_ENUM;
    if (is_enum) {
        snprintf(out, size, "%s", field->names[strcmp(field->names[0], field->preset) == 0 ? 1 : 0]);
    } else if (field->type == DL_FIELD_BOOL) {
        snprintf(out, size, "%s", strcmp(field->preset, "true") == 0 ? "false" : "true");
    } else if (field->type == DL_FIELD_COUNT) {
        snprintf(out, size, "\"60%%\"");
    } else if (field->type == DL_FIELD_F64) {
        snprintf(out, size, "\"%.17g\"", field->min + (field->max - field->min) / 1024);
    } else if (field->type == DL_FIELD_STRING) {
        snprintf(out, size, "other");
    } else if (field->type == DL_FIELD_PATHS) {
        snprintf(out, size, "[one, two]");
    } else if (field->type == DL_FIELD_RAW) {
        snprintf(out, size, "{a: [1, \"2\", true, null, {b: \"x\\\"y\"}]}");
    } else {
        snprintf(out, size, "%.0f", field->min + 3);
    }
}

/* Every field of the table is read from a manifest into its place: it reaches the JSON, and comes back from it. */
static void test_every_field_round_trips(void)
{
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        const struct dl_field *field = &dl_spec_fields[i];
        char value[128], text[1024], path[128];
        other_value(field, value, sizeof value);
        snprintf(path, sizeof path, "%s", field->path);
        size_t used = (size_t)snprintf(text, sizeof text, HEAD "spec:\n");
        const char *indent = "        ";
        int depth = 1;
        if (strcmp(field->path, "training.tokenBudget") != 0 && strncmp(field->path, "training.", 9) != 0) {
            used += (size_t)snprintf(text + used, sizeof text - used, "  training: {tokenBudget: 1000000}\n");
        }
        char *save = NULL;
        for (char *part = strtok_r(path, ".", &save); part != NULL; part = strtok_r(NULL, ".", &save)) {
            used += (size_t)snprintf(text + used, sizeof text - used, "%.*s%s:%s", depth * 2, indent, part,
                                     save != NULL && *save != 0 ? "\n" : " ");
            depth++;
            if (depth == 2 && strcmp(part, "training") == 0 && strcmp(field->path, "training.tokenBudget") != 0) {
                used += (size_t)snprintf(text + used, sizeof text - used, "    tokenBudget: 1000000\n");
            }
        }
        snprintf(text + used, sizeof text - used, "%s\n", value);
        struct dl_spec *spec = NULL, *again = NULL;
        struct dl_err err = {0};
        enum dl_rc rc = parse(text, &spec, NULL, &err);
        if (rc != DL_OK) {
            /* A rule between fields may refuse the odd value; then the text speaks of this field's block, not of its type. */
            CU_ASSERT_PTR_NULL(strstr(err.text, "unknown field"));
            CU_ASSERT_PTR_NULL(strstr(err.text, "allowed is"));
            continue;
        }
        DL_AUTO_FREE char *json = NULL, *twice = NULL;
        CU_ASSERT_EQUAL_FATAL(dl_spec_to_json(spec, &json, &err), DL_OK);
        rc = parse(json, &again, NULL, &err);
        if (rc != DL_OK) {
            printf("%s: %s\n%s", field->path, err.text, json);
        }
        CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
        CU_ASSERT_EQUAL_FATAL(dl_spec_to_json(again, &twice, &err), DL_OK);
        CU_ASSERT_STRING_EQUAL(json, twice);
        struct dl_spec *plain = NULL;
        DL_AUTO_FREE char *plain_json = NULL;
        CU_ASSERT_EQUAL_FATAL(parse(MINIMAL, &plain, NULL, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(dl_spec_to_json(plain, &plain_json, &err), DL_OK);
        CU_ASSERT_STRING_NOT_EQUAL(json, plain_json);
        dl_spec_free(plain);
        dl_spec_free(again);
        dl_spec_free(spec);
    }
}

static void test_large_integers_stay_exact(void)
{
    struct dl_spec *spec = NULL;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL_FATAL(parse(HEAD "spec: {training: {tokenBudget: 9007199254740993}}\n", &spec, NULL, &err), DL_OK);
    CU_ASSERT_EQUAL(spec->training.token_budget, UINT64_C(9007199254740993));
    DL_AUTO_FREE char *json = NULL;
    CU_ASSERT_EQUAL_FATAL(dl_spec_to_json(spec, &json, &err), DL_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(json, "9007199254740993"));
    dl_spec_free(spec);
}

static void test_pools_and_counts(void)
{
    struct dl_spec *spec = NULL;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL_FATAL(parse(MINIMAL "  learners:\n    pools:\n    - {name: steady, replicas: 2}\n"
                                        "    - {name: spot, scavenge: {max: 14}, template: {spec: {a: 1}}}\n",
                                &spec, NULL, &err),
                          DL_OK);
    CU_ASSERT_EQUAL(spec->learners.replicas, 2);
    CU_ASSERT_EQUAL(spec->learners.pool_count, 2);
    CU_ASSERT_FALSE(spec->learners.pools[0].scavenge.enabled);
    CU_ASSERT_TRUE(spec->learners.pools[1].scavenge.enabled);
    CU_ASSERT_STRING_EQUAL(spec->learners.pools[1].template_json, "{\"spec\":{\"a\":1}}");
    dl_spec_free(spec);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){75, true}, 3), 3);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){75, true}, 4), 3);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){1, true}, 4), 1);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){9, false}, 4), 4);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){2, false}, 0), 1);
}

static void test_warnings_name_numbers_that_would_do(void)
{
    struct dl_spec *spec = NULL;
    struct dl_spec_warnings warnings;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL_FATAL(
        parse(MINIMAL "  sync: {outerOptimizer: {type: nesterov}, quorum: 3, interval: 12}\n  learners: {replicas: 3}\n", &spec,
              &warnings, &err),
        DL_OK);
    bool momentum = false, quorum = false, fragments = false;
    for (uint32_t i = 0; i < warnings.count; i++) {
        momentum = momentum || strstr(warnings.text[i], "momentum 0.9") != NULL;
        quorum = quorum || strstr(warnings.text[i], "use 2 or less") != NULL;
        fragments = fragments || strstr(warnings.text[i], "at most 12 fragments") != NULL;
    }
    CU_ASSERT_TRUE(momentum);
    CU_ASSERT_TRUE(quorum);
    CU_ASSERT_TRUE(fragments);
    dl_spec_free(spec);
}

static void test_every_sample_is_accepted(void)
{
    glob_t found;
    CU_ASSERT_EQUAL_FATAL(glob("crds/samples/*.yaml", 0, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        struct dl_spec *spec = NULL;
        struct dl_err err = {0};
        enum dl_rc rc = dl_spec_load(found.gl_pathv[i], &spec, NULL, &err);
        if (rc != DL_OK) {
            puts(err.text);
        }
        CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
        CU_ASSERT_EQUAL(spec->training.data.paths[0][0], '/');
        dl_spec_free(spec);
    }
    CU_ASSERT(found.gl_pathc >= 7);
    globfree(&found);
    struct dl_spec *spec = NULL;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL(dl_spec_load("no/such/file.yaml", &spec, NULL, &err), DL_ENOTFOUND);
}

static void test_committed_reference_is_what_the_table_says(void)
{
    struct dl_buf made;
    dl_buf_init(&made, 1 << 20);
    dl_spec_reference(&made);
    DL_AUTO_FILE FILE *file = fopen("docs/job-reference.md", "rb");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    DL_AUTO_FREE char *committed = calloc(1, made.size + 2);
    CU_ASSERT_PTR_NOT_NULL_FATAL(committed);
    size_t size = fread(committed, 1, made.size + 1, file);
    if (size != made.size || memcmp(committed, made.data, size) != 0) {
        puts("docs/job-reference.md is stale: build/release/tools/spec reference > docs/job-reference.md");
    }
    CU_ASSERT_EQUAL(size, made.size);
    CU_ASSERT_STRING_EQUAL(committed, made.data);
    dl_buf_release(&made);
}

UNIT_MAIN("spec", {"defaults", test_defaults},
          {"U2 bad manifests name path, value, remedy", test_bad_manifests_are_refused_with_path_value_and_remedy},
          {"S5 limits", test_size_depth_and_count_limits}, {"every field round trips", test_every_field_round_trips},
          {"64-bit integers stay exact", test_large_integers_stay_exact}, {"pools and counts", test_pools_and_counts},
          {"Q3 warnings", test_warnings_name_numbers_that_would_do}, {"samples", test_every_sample_is_accepted},
          {"reference is current", test_committed_reference_is_what_the_table_says})
