/* The CustomResourceDefinition: made from the same table as the parser, and committed as made. */
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec_schema.h"
#include "common/spec_table.h"
#include "common/yaml.h"
#include "operator/reconcile/plan.h"
#include "tests/unit/schema_rig.h"
#include "tests/unit/unit.h"

static struct dl_node *parse_crd(void)
{
    struct dl_buf yaml;
    struct dl_node *root = NULL;
    struct dl_err err = {0};
    dl_buf_init(&yaml, DL_SPEC_CRD_BYTES_MAX);
    dl_spec_crd_yaml(&yaml);
    CU_ASSERT_FALSE_FATAL(yaml.failed);
    enum dl_rc rc = dl_yaml_parse(yaml.data, yaml.size, "crd", &root, &err);
    if (rc != DL_OK) {
        puts(err.text);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    dl_buf_release(&yaml);
    return root;
}

static const struct dl_node *first_of(const struct dl_node *node)
{
    return node != NULL ? node->first : NULL;
}

/* The schema of the whole object. */
static const struct dl_node *schema_of(const struct dl_node *root)
{
    const struct dl_node *versions = dl_node_get(dl_node_get(root, "spec"), "versions");
    const struct dl_node *schema = dl_node_get(dl_node_get(first_of(versions), "schema"), "openAPIV3Schema");
    CU_ASSERT_PTR_NOT_NULL_FATAL(schema);
    return schema;
}

static const char *text_of(const struct dl_node *schema, const char *key)
{
    const struct dl_node *node = dl_node_get(schema, key);
    return node != NULL && node->kind == DL_NODE_SCALAR ? node->text : "";
}

static bool has_rule(const struct dl_node *schema, const char *cel, const char *message)
{
    const struct dl_node *rules = dl_node_get(schema, "x-kubernetes-validations");
    for (const struct dl_node *rule = first_of(rules); rule != NULL; rule = rule->next) {
        if (strcmp(text_of(rule, "rule"), cel) == 0 &&
            (message == NULL || strcmp(text_of(rule, "message"), message) == 0)) {
            return true;
        }
    }
    return false;
}

static void check_field(const struct dl_node *schema, const struct dl_field *field)
{
    const struct dl_node *node = property(schema, field->path);
    if (node == NULL) {
        printf("%s is not in the schema\n", field->path);
    }
    CU_ASSERT_PTR_NOT_NULL_FATAL(node);
    CU_ASSERT_STRING_EQUAL(text_of(node, "description"), field->text);
    bool is_number = field->type == DL_FIELD_F64;
    bool is_bounded = is_number || field->type == DL_FIELD_U16 || field->type == DL_FIELD_U32 ||
                      field->type == DL_FIELD_U64 || field->type == DL_FIELD_I64 || field->type == DL_FIELD_COUNT;
    if (is_bounded) {
        CU_ASSERT_DOUBLE_EQUAL(strtod(text_of(node, "minimum"), NULL), field->min, 0);
        CU_ASSERT_DOUBLE_EQUAL(strtod(text_of(node, "maximum"), NULL), field->max, 0);
    }
    const struct dl_node *preset = dl_node_get(node, "default");
    bool is_open = field->preset == NULL || strcmp(field->path, "learners.replicas") == 0;
    CU_ASSERT_EQUAL(preset == NULL, is_open);
    if (preset != NULL && field->preset != NULL && is_number) {
        CU_ASSERT_DOUBLE_EQUAL(strtod(text_of(node, "default"), NULL), strtod(field->preset, NULL), 0);
    } else if (preset != NULL && field->preset != NULL) {
        CU_ASSERT_STRING_EQUAL(text_of(node, "default"), field->preset);
    }
    if (field->type == DL_FIELD_ENUM) {
        const struct dl_node *value = first_of(dl_node_get(node, "enum"));
        int count = 0;
        for (; value != NULL && field->names[count] != NULL; value = value->next, count++) {
            CU_ASSERT_STRING_EQUAL(value->text, field->names[count]);
        }
        CU_ASSERT_PTR_NULL(value);
        CU_ASSERT_PTR_NULL(field->names[count]);
    }
}

static void test_every_field_is_in_the_schema_with_default_and_bounds(void)
{
    struct dl_node *root = parse_crd();
    const struct dl_node *spec = property(schema_of(root), "spec");
    CU_ASSERT_PTR_NOT_NULL_FATAL(spec);
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        check_field(spec, &dl_spec_fields[i]);
    }
    const struct dl_node *pool = dl_node_get(property(spec, "learners.pools"), "items");
    CU_ASSERT_PTR_NOT_NULL_FATAL(pool);
    for (size_t i = 0; i < dl_pool_field_count; i++) {
        check_field(pool, &dl_pool_fields[i]);
    }
    dl_node_free(root);
}

/* K8: what is frozen is frozen by itself or with all of its branch, and nothing else is. */
static void test_frozen_fields_have_a_rule_and_others_have_none(void)
{
    struct dl_node *root = parse_crd();
    const struct dl_node *spec = property(schema_of(root), "spec");
    CU_ASSERT_PTR_NOT_NULL_FATAL(spec);
    size_t frozen_count = 0;
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        const char *path = dl_spec_fields[i].path;
        bool frozen = has_rule(property(spec, path), "self == oldSelf", NULL);
        for (const char *dot = strchr(path, '.'); dot != NULL; dot = strchr(dot + 1, '.')) {
            char above[64];
            snprintf(above, sizeof above, "%.*s", (int)(dot - path), path);
            frozen = frozen || has_rule(property(spec, above), "self == oldSelf", NULL);
        }
        CU_ASSERT_EQUAL(frozen, (dl_spec_fields[i].flags & DL_FIELD_FROZEN) != 0);
        frozen_count += frozen;
    }
    CU_ASSERT(frozen_count > 20);
    CU_ASSERT_TRUE(has_rule(property(spec, "training.model"), "self == oldSelf", NULL));
    CU_ASSERT_FALSE(has_rule(property(spec, "learners.replicas"), "self == oldSelf", NULL));
    dl_node_free(root);
}

static void test_every_rule_stands_at_its_object(void)
{
    struct dl_node *root = parse_crd();
    const struct dl_node *schema = schema_of(root);
    for (size_t i = 0; i < dl_spec_rule_count; i++) {
        const struct dl_rule *rule = &dl_spec_rules[i];
        CU_ASSERT_TRUE(has_rule(property(schema, rule->at), rule->cel, rule->text));
    }
    CU_ASSERT(dl_spec_rule_count >= 15);
    dl_node_free(root);
}

/* Conditions, what is printed and what scales: all of it must be in the status that the schema knows, or the API server
 * would drop it. */
static void test_status_has_what_columns_and_scale_show(void)
{
    struct dl_node *root = parse_crd();
    const struct dl_node *schema = schema_of(root);
    const struct dl_node *version = first_of(dl_node_get(dl_node_get(root, "spec"), "versions"));
    const struct dl_node *columns = dl_node_get(version, "additionalPrinterColumns");
    size_t count = 0;
    for (const struct dl_node *column = first_of(columns); column != NULL; column = column->next, count++) {
        const char *path = text_of(column, "jsonPath");
        CU_ASSERT(strcmp(path, ".metadata.creationTimestamp") == 0 || property(schema, path + 1) != NULL);
    }
    CU_ASSERT(count >= 7);
    const struct dl_node *scale = dl_node_get(dl_node_get(version, "subresources"), "scale");
    size_t paths = 0;
    for (const struct dl_node *path = first_of(scale); path != NULL; path = path->next, paths++) {
        CU_ASSERT_PTR_NOT_NULL(property(schema, path->text + 1));
    }
    CU_ASSERT_EQUAL(paths, 3);
    CU_ASSERT_PTR_NOT_NULL(dl_node_get(dl_node_get(version, "subresources"), "status"));
    CU_ASSERT_PTR_NOT_NULL(property(schema, "status.observedGeneration"));
    dl_node_free(root);
}

/* K7: every phase that the planner can say, and no other, is one that the API server takes. */
static void test_phases_are_the_planners(void)
{
    struct dl_node *root = parse_crd();
    const struct dl_node *name = first_of(dl_node_get(property(schema_of(root), "status.phase"), "enum"));
    for (int phase = 0; phase <= OP_JOB_FAILED; phase++, name = name->next) {
        CU_ASSERT_PTR_NOT_NULL_FATAL(name);
        CU_ASSERT_STRING_EQUAL(name->text, op_job_phase_name((enum op_job_phase)phase));
    }
    CU_ASSERT_PTR_NULL(name);
    dl_node_free(root);
}

/* The columns that `kubectl get ddj` prints, in order; those of `-o wide` may stand between them. */
static void test_columns_and_names(void)
{
    static const char *const wanted[] = {"Phase", "Learners", "Quorum", "Step", "Loss", "Goodput", "Age"};
    struct dl_node *root = parse_crd();
    const struct dl_node *spec = dl_node_get(root, "spec"), *names = dl_node_get(spec, "names");
    const struct dl_node *columns = dl_node_get(first_of(dl_node_get(spec, "versions")), "additionalPrinterColumns");
    size_t count = 0;
    for (const struct dl_node *column = first_of(columns); column != NULL; column = column->next) {
        if (dl_node_get(column, "priority") == NULL) {
            CU_ASSERT_FATAL(count < DL_COUNT_OF(wanted));
            CU_ASSERT_STRING_EQUAL(text_of(column, "name"), wanted[count]);
            count++;
        }
    }
    CU_ASSERT_EQUAL(count, DL_COUNT_OF(wanted));
    CU_ASSERT_STRING_EQUAL(first_of(dl_node_get(names, "shortNames"))->text, "ddj");
    CU_ASSERT_PTR_NOT_NULL(first_of(dl_node_get(names, "categories")));
    CU_ASSERT_STRING_EQUAL(text_of(property(schema_of(root), "status.syncer.quorum"), "type"), "string");
    const struct dl_node *conditions = property(schema_of(root), "status.conditions");
    CU_ASSERT_STRING_EQUAL(text_of(conditions, "x-kubernetes-list-type"), "map");
    CU_ASSERT_STRING_EQUAL(first_of(dl_node_get(conditions, "x-kubernetes-list-map-keys"))->text, "type");
    dl_node_free(root);
}

static void check_committed(const char *path, const struct dl_buf *made)
{
    DL_AUTO_FILE FILE *file = fopen(path, "rb");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    static char committed[DL_SPEC_CRD_BYTES_MAX + 1];
    size_t size = fread(committed, 1, sizeof committed, file);
    bool is_same = size == made->size && memcmp(committed, made->data, size) == 0;
    if (!is_same) {
        printf("%s is stale: make manifests\n", path);
    }
    CU_ASSERT_TRUE(is_same);
}

/* The one that kubectl takes, and the chart's copy of it. */
static void test_committed_definition_is_what_the_table_says(void)
{
    struct dl_buf made;
    dl_buf_init(&made, DL_SPEC_CRD_BYTES_MAX);
    dl_spec_crd_yaml(&made);
    CU_ASSERT_FALSE_FATAL(made.failed);
    check_committed("crds/decoupleddilocojobs.yaml", &made);
    check_committed("helm/diloco/files/decoupleddilocojobs.yaml", &made);
    dl_buf_release(&made);
}

UNIT_MAIN("spec_schema",
          {"every field has its default and bounds", test_every_field_is_in_the_schema_with_default_and_bounds},
          {"K8 frozen fields", test_frozen_fields_have_a_rule_and_others_have_none},
          {"rules between fields", test_every_rule_stands_at_its_object},
          {"K7 status", test_status_has_what_columns_and_scale_show}, {"K7 phases", test_phases_are_the_planners},
          {"columns and names", test_columns_and_names},
          {"committed definition is current", test_committed_definition_is_what_the_table_says})
