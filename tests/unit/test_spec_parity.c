/* Every field of a job with values at, inside and beyond its bounds and of other types: the parser takes what the schema
 * of the custom resource takes. The schema is read as an API server reads it, by a small validator that knows the keywords
 * that stand in it; tests/cluster/test_schema.py asks a real one. */
#include <errno.h>
#include <math.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec.h"
#include "common/spec_schema.h"
#include "common/spec_table.h"
#include "common/yaml.h"
#include "tests/unit/schema_rig.h"
#include "tests/unit/unit.h"

enum json { J_NULL, J_BOOL, J_NUMBER, J_STRING, J_LIST, J_MAP };

static enum json kind_of(const struct dl_node *value)
{
    if (value->kind != DL_NODE_SCALAR) {
        return value->kind == DL_NODE_MAP ? J_MAP : J_LIST;
    }
    if (dl_node_is_null(value)) {
        return J_NULL;
    }
    if (dl_scalar_is_text(value->text, value->quoted)) {
        return J_STRING;
    }
    return value->text[0] == 't' || value->text[0] == 'f' ? J_BOOL : J_NUMBER;
}

static const char *text_of(const struct dl_node *schema, const char *key)
{
    const struct dl_node *node = dl_node_get(schema, key);
    return node != NULL ? node->text : NULL;
}

static bool is_whole(const char *text)
{
    return strspn(text, "-0123456789") == strlen(text);
}

static bool fits_pattern(const struct dl_node *schema, const struct dl_node *value)
{
    const char *pattern = text_of(schema, "pattern");
    if (pattern == NULL || kind_of(value) != J_STRING) {
        return true;
    }
    regex_t regex;
    CU_ASSERT_EQUAL_FATAL(regcomp(&regex, pattern, REG_EXTENDED | REG_NOSUB), 0);
    bool fits = regexec(&regex, value->text, 0, NULL, 0) == 0;
    regfree(&regex);
    return fits;
}

static bool fits_type(const struct dl_node *schema, const struct dl_node *value)
{
    const char *type = text_of(schema, "type");
    enum json kind = kind_of(value);
    if (text_of(schema, "x-kubernetes-int-or-string") != NULL) {
        return kind == J_STRING || (kind == J_NUMBER && is_whole(value->text));
    }
    if (type == NULL) {
        return true;
    }
    return (strcmp(type, "boolean") == 0 && kind == J_BOOL) || (strcmp(type, "string") == 0 && kind == J_STRING) ||
           (strcmp(type, "number") == 0 && kind == J_NUMBER) || (strcmp(type, "object") == 0 && kind == J_MAP) ||
           (strcmp(type, "array") == 0 && kind == J_LIST) ||
           (strcmp(type, "integer") == 0 && kind == J_NUMBER && is_whole(value->text));
}

static bool fits_bounds(const struct dl_node *schema, const struct dl_node *value)
{
    const char *minimum = text_of(schema, "minimum"), *maximum = text_of(schema, "maximum");
    if (kind_of(value) == J_NUMBER) {
        errno = 0;
        double number = strtod(value->text, NULL);
        double least = minimum != NULL ? strtod(minimum, NULL) : -INFINITY;
        double most = maximum != NULL ? strtod(maximum, NULL) : INFINITY;
        if (is_whole(value->text)) { /* As an API server does it. */
            least = trunc(least);
            most = trunc(most);
        }
        bool is_int64 = text_of(schema, "format") == NULL || strcmp(text_of(schema, "format"), "int64") != 0 ||
                        (strtoll(value->text, NULL, 10) != 0 && errno == 0) || number == 0;
        bool is_open = text_of(schema, "exclusiveMinimum") != NULL;
        return is_int64 && number <= most && (is_open ? number > least : number >= least);
    }
    if (kind_of(value) == J_STRING) {
        const char *most = text_of(schema, "maxLength"), *least = text_of(schema, "minLength");
        size_t length = strlen(value->text);
        return (most == NULL || length <= strtoul(most, NULL, 10)) &&
               (least == NULL || length >= strtoul(least, NULL, 10));
    }
    bool is_map = kind_of(value) == J_MAP;
    const char *most = text_of(schema, is_map ? "maxProperties" : "maxItems");
    size_t count = 0;
    for (const struct dl_node *child = value->first; child != NULL && value->kind != DL_NODE_SCALAR;
         child = child->next) {
        count++;
    }
    return value->kind == DL_NODE_SCALAR || most == NULL || count <= strtoul(most, NULL, 10);
}

static bool is_among(const struct dl_node *list, const struct dl_node *value)
{
    for (const struct dl_node *one = list->first; one != NULL; one = one->next) {
        if (kind_of(one) != kind_of(value)) {
            continue;
        }
        if (value->kind == DL_NODE_SCALAR ? strcmp(one->text, value->text) == 0 : value->first == NULL) {
            return true;
        }
    }
    return false;
}

static bool fits(const struct dl_node *schema, const struct dl_node *value)
{
    const struct dl_node *names = dl_node_get(schema, "enum"), *not = dl_node_get(schema, "not");
    bool ok = fits_type(schema, value) && fits_bounds(schema, value) && fits_pattern(schema, value) &&
              (names == NULL || is_among(names, value)) && (not == NULL || !is_among(dl_node_get(not, "enum"), value));
    const struct dl_node *all = dl_node_get(schema, "allOf");
    for (const struct dl_node *one = all != NULL ? all->first : NULL; one != NULL; one = one->next) {
        ok = ok && fits_pattern(one, value) && fits_bounds(one, value);
    }
    const struct dl_node *items = dl_node_get(schema, "items");
    for (const struct dl_node *item = value->first; ok && items != NULL && item != NULL; item = item->next) {
        ok = kind_of(item) != J_NULL && fits(items, item);
    }
    return ok;
}

/* What the parser says of a manifest with the value in its place. Refusals of rules between fields, which have no line,
 * are not of the field. */
static bool is_taken(const struct dl_field *field, bool is_pool, const char *value, struct dl_buf *text)
{
    dl_buf_clear(text);
    dl_buf_puts(text, "{\"apiVersion\":\"" DL_SPEC_API_VERSION "\",\"kind\":\"" DL_SPEC_KIND
                      "\",\"metadata\":{\"name\":\"a\"},"
                      "\"spec\":{\"training\":{");
    bool is_training = !is_pool && strncmp(field->path, "training.", 9) == 0;
    dl_buf_puts(text, strcmp(field->path, "training.tokenBudget") != 0 ? "\"tokenBudget\":1000000" : "");
    dl_buf_puts(text, is_training && text->data[text->size - 1] != '{' ? "," : is_training ? "" : "},");
    const char *path = is_training ? field->path + 9 : field->path;
    dl_buf_puts(text, is_pool ? "\"learners\":{\"pools\":[{" : "");
    dl_buf_puts(text, is_pool && strcmp(path, "name") != 0 ? "\"name\":\"a\"," : "");
    unsigned depth = 0;
    for (const char *dot; (dot = strchr(path, '.')) != NULL; path = dot + 1, depth++) {
        dl_buf_printf(text, "\"%.*s\":{", (int)(dot - path), path);
    }
    dl_buf_printf(text, "\"%s\":%s", path, value);
    for (; depth > 0; depth--) {
        dl_buf_puts(text, "}");
    }
    dl_buf_puts(text, is_training ? "}}}" : is_pool ? "}]}}}" : "}}");
    CU_ASSERT_FALSE_FATAL(text->failed);
    struct dl_spec *spec = NULL;
    struct dl_err err = {0};
    if (dl_spec_parse(text->data, text->size, "job.json", &spec, NULL, &err) == DL_OK) {
        dl_spec_free(spec);
        return true;
    }
    bool is_of_field = strncmp(err.text, "job.json:", 9) == 0 && err.text[9] >= '0' && err.text[9] <= '9';
    if (is_of_field && strstr(err.text, field->path) == NULL) {
        printf("does not name %s: %s\n", field->path, err.text);
        CU_FAIL("the refusal names another field");
    }
    return !is_of_field;
}

static unsigned tried, taken;

static void check_value(const struct dl_node *schema, const struct dl_field *field, bool is_pool, const char *value,
                        struct dl_buf *text)
{
    struct dl_node *root = NULL;
    struct dl_err err = {0};
    char document[128];
    snprintf(document, sizeof document, "{\"value\": %s}", value);
    CU_ASSERT_EQUAL_FATAL(dl_yaml_parse(document, strlen(document), "value", &root, &err), DL_OK);
    const struct dl_node *node = root->first;
    bool is_required = (field->flags & DL_FIELD_REQUIRED) != 0;
    bool wanted = kind_of(node) == J_NULL ? !is_required : fits(schema, node); /* null is absent. */
    bool is = is_taken(field, is_pool, value, text);
    if (is != wanted) {
        printf("%s = %s: the parser %s it, the schema does not agree\n", field->path, value, is ? "takes" : "refuses");
    }
    CU_ASSERT_EQUAL(is, wanted);
    tried++;
    taken += is;
    dl_node_free(root);
}

static void check_field(const struct dl_node *schema, const struct dl_field *field, bool is_pool, struct dl_buf *text)
{
    static const char *const values[] = {
        "true",
        "false",
        "\"\"",
        "\"x\"",
        "\"0x10\"",
        "\" 1\"",
        "-1",
        "0",
        "1",
        "2.5",
        "1e30",
        "{}",
        "{\"a\": 1}",
        "[]",
        "[1]",
        "[\"x\"]",
        "[\"\"]",
        "[null]",
        "null",
        "\"null\"",
        "\"1\"",
        "\"50%\"",
        "\"0%\"",
        "\"101%\"",
        "\"05%\"",
        "\"1e3\"",
        "\"-1\"",
        "\"20Gi\"",
        "\"2 Gi\"",
        "\"a-b\"",
        "\"A\"",
        "\"-a\"",
        "\"auto\"",
        "\"mean\"",
        "\"int8\"",
        "99999999999999999999",
        "9223372036854775807",
    };
    for (size_t i = 0; i < DL_COUNT_OF(values); i++) {
        check_value(schema, field, is_pool, values[i], text);
    }
    if (field->min == 0 && field->max == 0) {
        return;
    }
    static const double factors[] = {0.5, 0.999, 1, 1.001, 2};
    bool is_real = field->type == DL_FIELD_F64;
    for (size_t i = 0; i < 2 * DL_COUNT_OF(factors); i++) {
        char value[64];
        double number = (i % 2 == 0 ? field->min : field->max) * factors[i / 2];
        if (number > 9e18) {
            continue;
        }
        snprintf(value, sizeof value, is_real ? "%.15g" : "%.0f", number);
        check_value(schema, field, is_pool, value, text);
        snprintf(value, sizeof value, is_real ? "\"%.14f\"" : "\"%.0f\"", number);
        check_value(schema, field, is_pool, value, text);
    }
}

static void test_parser_and_schema_take_the_same(void)
{
    struct dl_buf text;
    struct dl_node *root = NULL;
    struct dl_err err = {0};
    dl_buf_init(&text, DL_SPEC_CRD_BYTES_MAX);
    dl_spec_crd_yaml(&text);
    CU_ASSERT_EQUAL_FATAL(dl_yaml_parse(text.data, text.size, "crd", &root, &err), DL_OK);
    const struct dl_node *version = dl_node_get(dl_node_get(root, "spec"), "versions")->first;
    const struct dl_node *schema = dl_node_get(dl_node_get(version, "schema"), "openAPIV3Schema");
    const struct dl_node *spec = property(schema, "spec");
    const struct dl_node *pool = dl_node_get(property(spec, "learners.pools"), "items");
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        check_field(property(spec, dl_spec_fields[i].path), &dl_spec_fields[i], false, &text);
    }
    for (size_t i = 0; i < dl_pool_field_count; i++) {
        check_field(property(pool, dl_pool_fields[i].path), &dl_pool_fields[i], true, &text);
    }
    printf("(%u values, %u taken) ", tried, taken);
    CU_ASSERT(taken > 300 && tried - taken > 1000);
    dl_node_free(root);
    dl_buf_release(&text);
}

UNIT_MAIN("spec_parity", {"parser and schema take the same values", test_parser_and_schema_take_the_same})
