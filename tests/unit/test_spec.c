/* The job manifest: defaults, samples, advice, and what is refused with which words. */
#include <glob.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec.h"
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
    {"bad name",
     "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: A_b}\n",
     {"metadata.name", "DNS"}},
    {"no spec", HEAD, {"spec", "required"}},
    {"no budget", HEAD "spec: {training: {data: {paths: [x]}}}\n", {"spec.training.tokenBudget is required"}},
    {"unknown top field", HEAD "specs: {}\n", {"specs", "unknown field"}},
    {"unknown field",
     MINIMAL "  sync: {intervall: 3}\n",
     {"job.yaml:6", "spec.sync.intervall", "did you mean 'interval'"}},
    {"unknown branch", MINIMAL "  sink: {a: 1}\n", {"spec.sink", "did you mean 'sync'"}},
    {"field in the wrong place", MINIMAL "  quorum: 2\n", {"spec.quorum", "did you mean spec.sync.quorum?"}},
    {"section in the wrong place",
     MINIMAL "  sync: {innerOptimizer: {beta1: 0.9}}\n",
     {"spec.sync.innerOptimizer", "did you mean spec.training.innerOptimizer?"}},
    {"far unknown", MINIMAL "  sync: {zzzzzzzzzz: 3}\n", {"unknown field; see"}},
    {"twice", MINIMAL "  sync: {interval: 3, interval: 4}\n", {"'interval' stands there twice"}},
    {"scalar for map", MINIMAL "  sync: 3\n", {"spec.sync", "mapping"}},
    {"map for scalar", MINIMAL "  sync: {interval: {a: 1}}\n", {"spec.sync.interval", "single value"}},
    {"not a number", MINIMAL "  sync: {interval: many}\n", {"spec.sync.interval", "'many'", "whole number from 1"}},
    {"quoted integer", MINIMAL "  sync: {interval: \"3\"}\n", {"spec.sync.interval", "whole number", "without quotes"}},
    {"exponent", MINIMAL "  sync: {interval: 3e2}\n", {"'3e2'", "in digits"}},
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
    {"quorum above max",
     MINIMAL "  sync: {quorum: 5}\n  learners: {max: 4}\n",
     {"spec.sync.quorum: 5", "max = 4", "1 to 4"}},
    {"replicas above max", MINIMAL "  learners: {replicas: 5, max: 4}\n", {"replicas 5 <= max 4"}},
    {"min above replicas", MINIMAL "  learners: {replicas: 1, min: 2}\n", {"min 2 <= replicas 1"}},
    {"pools below min", MINIMAL "  learners: {min: 3, pools: [{name: a, replicas: 2}]}\n", {"min 3 <= replicas 2"}},
    {"pools above max",
     MINIMAL "  learners: {max: 3, pools: [{name: a, replicas: 2}, {name: b, replicas: 2}]}\n",
     {"replicas 4 <= max 3"}},
    {"pool label", MINIMAL "  learners: {pools: [{name: A}]}\n", {"pools[0].name", "'A'", "DNS"}},
    {"pool's scavenging",
     MINIMAL "  learners: {pools: [{name: a, scavenge: {maximum: 2}}]}\n",
     {"pools[0].scavenge.maximum", "'max'"}},
    {"pools as a map", MINIMAL "  learners: {pools: {name: a}}\n", {"spec.learners.pools", "list"}},
    {"pool without name", MINIMAL "  learners: {pools: [{replicas: 2}]}\n", {"spec.learners.pools[0]", "DNS"}},
    {"pool twice", MINIMAL "  learners: {pools: [{name: a}, {name: a}]}\n", {"pools[1]", "same name"}},
    {"pool field", MINIMAL "  learners: {pools: [{name: a, replica: 2}]}\n", {"pools[0].replica", "'replicas'"}},
    {"name too long",
     "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\n"
     "metadata: {name: a123456789012345678901234567890123456789012345}\n",
     {"metadata.name", "at most 45"}},
    {"name with a digit first",
     "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: 1a}\n",
     {"metadata.name", "letter first"}},
    {"name that is a word of YAML",
     "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: true}\n",
     {"metadata.name"}},
    {"namespace",
     "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: a, namespace: 7}\n",
     {"metadata.namespace"}},
    {"octal", MINIMAL "  sync: {interval: 010}\n", {"'010'", "whole number"}},
    {"signed", MINIMAL "  sync: {interval: +10}\n", {"'+10'", "whole number"}},
    {"hexadecimal number", MINIMAL "  sync: {grace: {margin: 0x1}}\n", {"'0x1'", "from 0 to 1"}},
    {"number with a space", MINIMAL "  sync: {grace: {margin: ' 0.5'}}\n", {"' 0.5'", "from 0 to 1"}},
    {"quoted duration", MINIMAL "  sync: {heartbeatSeconds: \"5\"}\n", {"heartbeatSeconds", "'5'", "without quotes"}},
    {"quoted count", MINIMAL "  sync: {quorum: \"2\"}\n", {"spec.sync.quorum", "'2'", "percentage"}},
    {"quorum of a half", MINIMAL "  sync: {quorum: 0.5}\n", {"spec.sync.quorum", "'0.5'"}},
    {"quorum 0 %", MINIMAL "  sync: {quorum: 0%}\n", {"spec.sync.quorum", "'0%'"}},
    {"warm-up quorum", MINIMAL "  sync: {warmup: {quorum: 17}}\n", {"spec.sync.warmup.quorum: 17", "max = 16"}},
    {"warm-up interval", MINIMAL "  sync: {warmup: {interval: 30}}\n", {"warmup.interval 30", "interval 24"}},
    {"warm-up steps", MINIMAL "  sync: {warmup: {steps: -2}}\n", {"spec.sync.warmup.steps", "'-2'", "-1"}},
    {"storage", MINIMAL "  syncer: {storage: {size: 20GB}}\n", {"spec.syncer.storage.size", "'20GB'", "20Gi"}},
    {"text that is a number", MINIMAL "  syncer: {storage: {storageClassName: 12}}\n", {"storageClassName", "quotes"}},
    {"text too long", MINIMAL "  syncer: {storage: {size: 12345678901234567890123456789012Gi}}\n", {"at most 31"}},
    {"port", MINIMAL "  syncer: {port: 65535, shards: 2}\n", {"spec.syncer.port", "65535"}},
    {"vocabulary of text",
     HEAD "spec: {training: {tokenBudget: 9, model: {vocabSize: 100}, data: {format: text}}}\n",
     {"vocabSize 100", "256"}},
    {"path that is a number",
     HEAD "spec: {training: {tokenBudget: 9, data: {paths: [12]}}}\n",
     {"data.paths", "quotes"}},
    {"heads", HEAD "spec: {training: {tokenBudget: 9, model: {width: 100, heads: 3}}}\n", {"width 100", "heads 3"}},
    {"odd head", HEAD "spec: {training: {tokenBudget: 9, model: {width: 12, heads: 4}}}\n", {"even"}},
    {"kv heads", HEAD "spec: {training: {tokenBudget: 9, model: {kvHeads: 3}}}\n", {"kvHeads 3"}},
    {"overlap", MINIMAL "  sync: {overlap: 24}\n", {"overlap 24", "interval 24"}},
    {"timeouts",
     MINIMAL "  sync: {timeoutSeconds: 5, heartbeatSeconds: 5}\n",
     {"timeoutSeconds 5", "heartbeatSeconds 5"}},
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
    static char large[DL_SPEC_BYTES_MAX + 1];
    struct dl_err err = {0};
    struct dl_spec *spec = NULL;
    memset(large, ' ', sizeof large);
    CU_ASSERT_EQUAL(dl_spec_parse(large, sizeof large, "x", &spec, NULL, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "1048577 bytes; a manifest has at most 1048576"));
    CU_ASSERT_EQUAL(dl_spec_parse(large, sizeof large - 1, "x", &spec, NULL, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "empty"));
    memset(large, '[', 1000);
    CU_ASSERT_EQUAL(dl_spec_parse(large, 1000, "x", &spec, NULL, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "deeper"));
    large[0] = '[';
    for (size_t i = 1; i < 100001; i += 2) {
        large[i] = '1';
        large[i + 1] = ',';
    }
    CU_ASSERT_EQUAL(dl_spec_parse(large, 100001, "x", &spec, NULL, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "more than"));
    CU_ASSERT_PTR_NULL(spec);
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
    /* The scale subresource moves the one number, and the last pool follows. */
    static const struct {
        uint32_t replicas, first, last;
    } scaled[] = {{6, 2, 4}, {2, 2, 0}, {1, 2, 0}, {0, 2, 0}};
    for (size_t i = 0; i < DL_COUNT_OF(scaled); i++) {
        char text[512];
        snprintf(
            text, sizeof text,
            MINIMAL
            "  learners: {min: 0, replicas: %u, pools: [{name: steady, replicas: 2}, {name: spot, replicas: 1}]}\n",
            scaled[i].replicas);
        CU_ASSERT_EQUAL_FATAL(parse(text, &spec, NULL, &err), DL_OK);
        CU_ASSERT_EQUAL(spec->learners.replicas, scaled[i].replicas);
        CU_ASSERT_EQUAL(spec->learners.pools[0].replicas, scaled[i].first);
        CU_ASSERT_EQUAL(spec->learners.pools[1].replicas, scaled[i].last);
        dl_spec_free(spec);
    }
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){75, true}, 3), 3);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){75, true}, 4), 3);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){1, true}, 4), 1);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){9, false}, 4), 4);
    CU_ASSERT_EQUAL(dl_count_resolve((struct dl_count_or_percent){2, false}, 0), 1);
}

/* MINIMAL has 976 inner steps of 1024 tokens, so 40 rounds a fragment. */
static void test_warnings_name_numbers_that_would_do(void)
{
    static const struct {
        const char *text, *expected; /* Begins with the field. */
    } cases[] = {
        {"  sync: {outerOptimizer: {type: nesterov}}\n",
         "momentum 0.9: the token budget gives each fragment about 40 rounds"},
        {"  sync: {outerOptimizer: {type: nesterov}}\n", "momentum 0.5, an interval of at most 4, or a longer run"},
        {"  sync: {outerOptimizer: {type: adamw}}\n", "outerOptimizer.learningRate 1: with type adamw"},
        {"  sync: {outerOptimizer: {learningRate: 1.5}}\n", "learningRate 1.5: each round goes beyond"},
        {"  sync: {outerOptimizer: {learningRate: 0.05}}\n", "follows its learners over 20 rounds"},
        {"  sync: {outerOptimizer: {type: nesterov, learningRate: 2, momentum: 0.5}}\n", "taken 4 times over; use 0.7"},
        {"  sync: {interval: 300, fragments: 8, warmup: {steps: 0}}\n",
         "synced 3 times at its own pace; use an interval of at most 244, or a budget of at least 1228"},
        {"  sync: {overlap: 8}\n", "overlap 8 of interval 24: up to 33 % of what a learner trains may be"},
        {"  sync: {overlap: 8}\n", "use at most 6, an interval of at least 32, or apply rebase"},
        {"  sync: {quorum: 2}\n  learners: {replicas: 4}\n", "learners.min 1 is below sync.quorum 2"},
        {"  sync: {merge: {stalenessMax: 0}}\n", "stalenessMax 0: what misses its round is lost"},
        {"  learners: {max: 4, replicas: 2, pools: [{name: a, replicas: 2, scavenge: {max: 6}}]}\n",
         "learners.max 4: the pools would take 6 learners"},
        {"  sync: {quorum: 3}\n  learners: {replicas: 3}\n", "use 2 or less"},
        {"  sync: {quorum: 3}\n  learners: {replicas: 2}\n", "quorum 3 is above learners.replicas 2"},
        {"  sync: {interval: 12}\n", "at most 12 fragments"},
        {"  sync: {interval: 1000}\n", "an interval of at most 244"},
        {"  sync: {warmup: {steps: 500}}\n", "warmup.steps 500 is more than half of the 976"},
        {"  sync: {overlap: 0}\n  learners: {replicas: 2}\n", "use overlap 1 or more"},
        {"  sync: {mode: synchronous}\n  learners: {replicas: 2}\n", "\"100%\" to average all"},
    };
    for (size_t i = 0; i < DL_COUNT_OF(cases); i++) {
        char text[512];
        struct dl_spec *spec = NULL;
        struct dl_spec_warnings warnings;
        struct dl_err err = {0};
        snprintf(text, sizeof text, "%s%s", MINIMAL, cases[i].text);
        CU_ASSERT_EQUAL_FATAL(parse(text, &spec, &warnings, &err), DL_OK);
        bool found = false;
        for (uint32_t w = 0; w < warnings.count; w++) {
            found = found || strstr(warnings.text[w], cases[i].expected) != NULL;
            CU_ASSERT_EQUAL(strncmp(warnings.text[w], warnings.path[w], strlen(warnings.path[w])), 0);
            CU_ASSERT_EQUAL(strncmp(warnings.path[w], "spec.", 5), 0);
        }
        if (!found) {
            printf("'%s' is not warned of\n", cases[i].expected);
        }
        CU_ASSERT_TRUE(found);
        dl_spec_free(spec);
    }
    struct dl_spec *spec = NULL;
    struct dl_spec_warnings warnings;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL_FATAL(parse(HEAD "spec: {training: {tokenBudget: 1000000, innerOptimizer: {warmupSteps: 500}}}\n",
                                &spec, &warnings, &err),
                          DL_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(warnings.text[0], "warmupSteps 500 is more than half of the 976"));
    dl_spec_free(spec);
    CU_ASSERT_EQUAL_FATAL(parse(HEAD
                                "spec: {training: {tokenBudget: 1000000, data: {paths: [x], leaseSequences: 4}}}\n",
                                &spec, &warnings, &err),
                          DL_OK);
    CU_ASSERT_EQUAL(warnings.count, 1);
    CU_ASSERT_STRING_EQUAL(warnings.path[0], "spec.training.data.leaseSequences");
    CU_ASSERT_PTR_NOT_NULL(strstr(warnings.text[0], "leaseSequences 4 is below batchSequences 8"));
    CU_ASSERT_PTR_NOT_NULL(strstr(warnings.text[0], "use 1024"));
    dl_spec_free(spec);
    CU_ASSERT_EQUAL_FATAL(parse(MINIMAL, &spec, &warnings, &err), DL_OK);
    CU_ASSERT_EQUAL(warnings.count, 0);
    dl_spec_free(spec);
}

/* K13: what each provider calls its spot nodes, and a grace period that its notice leaves room for. */
static void test_spot_samples_know_their_provider(void)
{
    static const struct {
        const char *path, *selector, *toleration;
        int notice_seconds;
    } providers[] = {
        {"crds/samples/gke-spot.yaml", "{\"cloud.google.com/gke-spot\":\"true\"}",
         "\"key\":\"cloud.google.com/gke-spot\"", 15},
        {"crds/samples/eks-karpenter-spot.yaml", "{\"karpenter.sh/capacity-type\":\"spot\"}",
         "\"key\":\"karpenter.sh/capacity-type\"", 120},
        {"crds/samples/aks-spot.yaml", "{\"kubernetes.azure.com/scalesetpriority\":\"spot\"}",
         "\"key\":\"kubernetes.azure.com/scalesetpriority\"", 30},
    };
    for (size_t i = 0; i < DL_COUNT_OF(providers); i++) {
        struct dl_spec *spec = NULL;
        struct dl_err err = {0};
        CU_ASSERT_EQUAL_FATAL(dl_spec_load(providers[i].path, &spec, NULL, &err), DL_OK);
        CU_ASSERT_EQUAL_FATAL(spec->learners.pool_count, 2);
        const struct dl_pool_spec *steady = &spec->learners.pools[0], *spot = &spec->learners.pools[1];
        CU_ASSERT_TRUE(spot->scavenge.enabled && !steady->scavenge.enabled);
        CU_ASSERT_PTR_NOT_NULL(strstr(spot->template_json, providers[i].selector));
        CU_ASSERT_PTR_NOT_NULL(strstr(spot->template_json, providers[i].toleration));
        CU_ASSERT_PTR_NOT_NULL(strstr(spot->template_json, "\"priorityClassName\":\"diloco-scavenged\""));
        static const char grace[] = "\"terminationGracePeriodSeconds\":";
        const char *seconds = strstr(spot->template_json, grace);
        CU_ASSERT_PTR_NOT_NULL_FATAL(seconds);
        long value = strtol(seconds + sizeof grace - 1, NULL, 10);
        CU_ASSERT(value >= 15 && value <= providers[i].notice_seconds);
        CU_ASSERT_PTR_NULL(strstr(steady->template_json, "nodeSelector"));
        dl_spec_free(spec);
    }
}

/* An operator that is older than the schema must not refuse every job because of a default that it does not know. */
static void test_stored_job_of_a_newer_schema(void)
{
    static const char text[] = MINIMAL "  sync: {interval: 7, newer: {a: [1]}}\n  newest: true\n";
    struct dl_spec *spec = NULL;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL(parse(text, &spec, NULL, &err), DL_EINVAL);
    CU_ASSERT_EQUAL_FATAL(dl_spec_parse_stored(text, strlen(text), "a", &spec, &err), DL_OK);
    CU_ASSERT_EQUAL(spec->sync.interval, 7);
    dl_spec_free(spec);
    static const char wrong[] = MINIMAL "  sync: {interval: 0, newer: 1}\n";
    CU_ASSERT_EQUAL(dl_spec_parse_stored(wrong, strlen(wrong), "a", &spec, &err), DL_EINVAL);
}

static void test_every_sample_is_accepted(void)
{
    glob_t found;
    CU_ASSERT_EQUAL_FATAL(glob("crds/samples/*.yaml", 0, NULL, &found), 0);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        struct dl_spec *spec = NULL;
        struct dl_err err = {0};
        struct dl_spec_warnings warnings;
        enum dl_rc rc = dl_spec_load(found.gl_pathv[i], &spec, &warnings, &err);
        if (rc != DL_OK) {
            puts(err.text);
        }
        CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
        for (uint32_t w = 0; w < warnings.count; w++) {
            printf("%s: %s\n", found.gl_pathv[i], warnings.text[w]);
        }
        CU_ASSERT_EQUAL(warnings.count, 0); /* A sample shows how it is meant. */
        CU_ASSERT(spec->training.data.path_count == 0 || spec->training.data.paths[0][0] == '/');
        dl_spec_free(spec);
    }
    CU_ASSERT(found.gl_pathc >= 13);
    globfree(&found);
    struct dl_spec *spec = NULL;
    struct dl_err err = {0};
    CU_ASSERT_EQUAL(dl_spec_load("no/such/file.yaml", &spec, NULL, &err), DL_ENOTFOUND);
    CU_ASSERT_EQUAL(dl_spec_load("crds", &spec, NULL, &err), DL_EIO); /* A folder. */
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "job manifest crds: cannot be read"));
}

/* J3: three eighths of the inner steps that the budget gives each learner, up to a bound; a number that is written holds. */
static void test_warmup_follows_the_length_of_the_run(void)
{
    static const struct {
        uint64_t budget;
        uint32_t replicas;
        const char *sync;
        uint32_t steps;
    } cases[] = {
        {UINT64_C(400) * 4096, 4, "", 150},
        {UINT64_C(800) * 4096, 4, "", 300},
        {UINT64_C(2400) * 4096, 4, "warmup: {steps: -1}", 900},
        {UINT64_C(2668) * 4096, 4, "", 1000}, /* 1000.5 */
        {UINT64_C(9000000000000000000), 1, "", 1000},
        {UINT64_C(800) * 4096, 8, "", 150},
        {UINT64_C(800) * 4096, 0, "", 1000}, /* As one learner: 3200 steps. */
        {UINT64_C(11) * 1024, 1, "", 4},     /* 4.1 */
        {1, 1, "", 0},
        {UINT64_C(800) * 4096, 4, "warmup: {steps: 0}", 0},
        {UINT64_C(800) * 4096, 4, "warmup: {steps: 16777216}", 16777216},
        {UINT64_C(800) * 4096, 4, "mode: synchronous", 0},
        {UINT64_C(800) * 4096, 4, "mode: synchronous, warmup: {steps: 40}", 0},
    };
    for (size_t i = 0; i < DL_COUNT_OF(cases); i++) {
        char text[512];
        snprintf(text, sizeof text,
                 HEAD "spec: {training: {tokenBudget: %llu}, sync: {%s}, learners: {min: 0, replicas: %u}}\n",
                 (unsigned long long)cases[i].budget, cases[i].sync, cases[i].replicas);
        struct dl_spec *spec = NULL;
        struct dl_err err = {0};
        CU_ASSERT_EQUAL_FATAL(parse(text, &spec, NULL, &err), DL_OK);
        CU_ASSERT_EQUAL(dl_warmup_steps(spec), cases[i].steps);
        dl_spec_free(spec);
    }
}

/* J3: `steps` at the first interval, then it doubles while it is below sync.interval and a stage is long enough for a sync. */
static void test_warmup_has_stages(void)
{
    static const struct {
        uint32_t steps, interval, sync_interval;
        struct dl_warmup plan;
        uint64_t syncs;
    } cases[] = {
        {300, 1, 24, {4, {{300, 1}, {366, 2}, {432, 4}, {498, 8}}}, 300 + 33 + 17 + 9},
        {300, 4, 24, {3, {{300, 4}, {366, 8}, {432, 16}}}, 75 + 9 + 5},
        {300, 4, 8, {1, {{300, 4}}}, 75},
        {300, 1, 1, {1, {{300, 1}}}, 300},
        {6, 2, 24, {1, {{6, 2}}}, 3},
        {9, 1, 24, {2, {{9, 1}, {11, 2}}}, 10},
        {1, 8, 24, {1, {{1, 8}}}, 1},
        {16777216, 1048576, 1048576, {1, {{16777216, 1048576}}}, 16},
        {0, 1, 24, {0}, 0},
    };
    for (size_t i = 0; i < DL_COUNT_OF(cases); i++) {
        const struct dl_sync_spec sync = {.interval = cases[i].sync_interval,
                                          .warmup = {.steps = cases[i].steps, .interval = cases[i].interval}};
        struct dl_warmup plan;
        dl_warmup_plan(&sync, cases[i].steps, &plan);
        CU_ASSERT_EQUAL_FATAL(plan.count, cases[i].plan.count);
        for (uint32_t k = 0; k < plan.count; k++) {
            CU_ASSERT_EQUAL(plan.stages[k].end, cases[i].plan.stages[k].end);
            CU_ASSERT_EQUAL(plan.stages[k].interval, cases[i].plan.stages[k].interval);
        }
        CU_ASSERT_EQUAL(dl_warmup_end(&plan), plan.count == 0 ? 0 : plan.stages[plan.count - 1].end);
        CU_ASSERT_EQUAL(dl_warmup_syncs(&plan), cases[i].syncs);
    }
}

/* K8: what freezes in a cluster is refused on one machine, too, and named; the rest may change. */
static void test_k8_frozen_fields(void)
{
    static const char text[] = "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: job}\n"
                               "spec: {training: {tokenBudget: 1000, data: {paths: [x]}}}\n";
    struct dl_spec *before = NULL, *after = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(dl_spec_parse(text, sizeof text - 1, "a", &before, NULL, &err), DL_OK);
    CU_ASSERT_EQUAL_FATAL(dl_spec_parse(text, sizeof text - 1, "b", &after, NULL, &err), DL_OK);
    after->learners.replicas += 3;
    after->training.token_budget *= 2; /* The default warm-up follows it, and is no change of the job. */
    after->sync.finish_seconds += 1;
    CU_ASSERT_EQUAL(dl_spec_check_frozen(before, after, &err), DL_OK);
    after->training.model.rope_theta = 5;
    CU_ASSERT_EQUAL(dl_spec_check_frozen(before, after, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "spec.training.model.ropeTheta"));
    after->training.model.rope_theta = before->training.model.rope_theta;
    after->sync.compression = DL_CODEC_BF16;
    CU_ASSERT_EQUAL(dl_spec_check_frozen(before, after, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "spec.sync.compression"));
    after->sync.compression = before->sync.compression;
    snprintf(after->name, sizeof after->name, "other");
    CU_ASSERT_EQUAL(dl_spec_check_frozen(before, after, &err), DL_EINVAL);
    dl_spec_free(before);
    dl_spec_free(after);
}

UNIT_MAIN("spec", {"defaults", test_defaults},
          {"U2 bad manifests name path, value, remedy", test_bad_manifests_are_refused_with_path_value_and_remedy},
          {"S5 limits", test_size_depth_and_count_limits},
          {"J3 warm-up by the run's length", test_warmup_follows_the_length_of_the_run},
          {"J3 stages of warm-up", test_warmup_has_stages},
          {"64-bit integers stay exact", test_large_integers_stay_exact}, {"pools and counts", test_pools_and_counts},
          {"Q3 warnings", test_warnings_name_numbers_that_would_do}, {"samples", test_every_sample_is_accepted},
          {"stored by a newer schema", test_stored_job_of_a_newer_schema},
          {"K13 spot samples", test_spot_samples_know_their_provider}, {"K8 frozen fields", test_k8_frozen_fields})
