/* The table of the job's fields: each is read, checked and written as it says; names of enums; the reference made of it. */
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec.h"
#include "common/spec_reference.h"
#include "common/spec_table.h"
#include "tests/unit/unit.h"

/* A value of a field that differs from its default, as it would stand in a manifest, and that no rule between fields
 * refuses beside the other defaults. */
static void other_value(const struct dl_field *field, char *out, size_t size)
{
    static const char *const fitting[][2] = {
        {"training.model.width", "136"}, {"training.model.heads", "2"}, {"training.model.kvHeads", "2"},
        {"sync.timeoutSeconds", "60.5"}, {"learners.min", "0"},         {"syncer.storage.size", "1.5Ti"},
    };
    for (size_t i = 0; i < DL_COUNT_OF(fitting); i++) {
        if (strcmp(fitting[i][0], field->path) == 0) {
            snprintf(out, size, "%s", fitting[i][1]);
            return;
        }
    }
    switch (field->type) {
    case DL_FIELD_ENUM:
        snprintf(out, size, "%s", field->names[strcmp(field->names[0], field->preset) == 0 ? 1 : 0]);
        break;
    case DL_FIELD_BOOL: snprintf(out, size, "%s", strcmp(field->preset, "true") == 0 ? "false" : "true"); break;
    case DL_FIELD_COUNT: snprintf(out, size, "60%%"); break;
    case DL_FIELD_F64: snprintf(out, size, "%.17g", field->min + (field->max - field->min) / 1024); break;
    case DL_FIELD_STRING: snprintf(out, size, "other"); break;
    case DL_FIELD_PATHS: snprintf(out, size, "[one, two]"); break;
    case DL_FIELD_RAW: snprintf(out, size, "{\"a\":[1,\"2\",true,null,{\"b\":\"x\\\"y\"}]}"); break;
    case DL_FIELD_U16:
    case DL_FIELD_U32:
    case DL_FIELD_U64:
    case DL_FIELD_I64: snprintf(out, size, "%.0f", field->min + 3); break;
    }
}

#define PLACE(type) (*(const type *)(const void *)((const char *)base + field->offset))

static bool holds(const struct dl_field *field, const void *base, const char *value)
{
    switch (field->type) {
    case DL_FIELD_ENUM: return strcmp(field->names[PLACE(int)], value) == 0;
    case DL_FIELD_BOOL: return PLACE(bool) == (strcmp(value, "true") == 0);
    case DL_FIELD_COUNT:
        return PLACE(struct dl_count_or_percent).is_percent && PLACE(struct dl_count_or_percent).value == 60;
    case DL_FIELD_F64: return PLACE(double) == strtod(value, NULL); /* The same text: the same bits. */
    case DL_FIELD_STRING: return strcmp((const char *)base + field->offset, value) == 0;
    case DL_FIELD_PATHS: {
        const struct dl_data_spec *data = &((const struct dl_spec *)base)->training.data;
        return data->path_count == 2 && strcmp(data->paths[0], "one") == 0 && strcmp(data->paths[1], "two") == 0;
    }
    case DL_FIELD_RAW: return PLACE(char *) != NULL && strcmp(PLACE(char *), value) == 0;
    case DL_FIELD_U16: return PLACE(uint16_t) == strtoul(value, NULL, 10);
    case DL_FIELD_U32: return PLACE(uint32_t) == strtoul(value, NULL, 10);
    case DL_FIELD_U64: return PLACE(uint64_t) == strtoull(value, NULL, 10);
    case DL_FIELD_I64: return PLACE(int64_t) == strtoll(value, NULL, 10);
    }
    return false;
}

/* {"a": {"b": value}} of the path a.b, as flow mappings. */
static void append_nested(struct dl_buf *out, const char *path, const char *value, const char *quote)
{
    unsigned depth = 1;
    for (const char *dot; (dot = strchr(path, '.')) != NULL; path = dot + 1, depth++) {
        dl_buf_printf(out, "{%.*s: ", (int)(dot - path), path);
    }
    dl_buf_printf(out, "{%s: %s%s%s", path, quote, value, quote);
    for (; depth > 0; depth--) {
        dl_buf_puts(out, "}");
    }
}

/* "first: {second: value}" of first.second. */
static void append_entry(struct dl_buf *out, const char *path, const char *value, const char *quote)
{
    const char *dot = strchr(path, '.');
    dl_buf_printf(out, "%.*s: ", (int)strcspn(path, "."), path);
    if (dot != NULL) {
        append_nested(out, dot + 1, value, quote);
    } else {
        dl_buf_printf(out, "%s%s%s", quote, value, quote);
    }
    dl_buf_puts(out, "\n");
}

/* A manifest with the field set, and the budget that no manifest may lack. */
static void manifest_with(const struct dl_field *field, bool is_pool, const char *value, const char *quote,
                          struct dl_buf *out)
{
    dl_buf_clear(out);
    dl_buf_puts(out, "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: a}\nspec:\n");
    const char *path = field->path;
    bool is_budget = strcmp(path, "training.tokenBudget") == 0;
    if (is_pool) {
        /* The last pool takes what is left, so the one that is looked at comes before it. */
        dl_buf_puts(out, "  training: {tokenBudget: 1000000}\n  learners:\n    min: 0\n    pools:\n    - ");
        append_entry(out, path, value, quote);
        dl_buf_printf(out, "%s    - name: last\n", strcmp(path, "name") != 0 ? "      name: first\n" : "");
    } else if (strncmp(path, "training.", 9) == 0) {
        dl_buf_printf(out, "  training:\n%s    ", is_budget ? "" : "    tokenBudget: 1000000\n");
        append_entry(out, path + 9, value, quote);
    } else {
        dl_buf_puts(out, "  training: {tokenBudget: 1000000}\n  ");
        append_entry(out, path, value, quote);
    }
}

/* The field is read from a manifest into its place, reaches the JSON, and comes back from it equal. */
static void check_field(const struct dl_field *field, bool is_pool, const char *quote)
{
    char value[128];
    struct dl_buf text;
    dl_buf_init(&text, 1 << 16);
    other_value(field, value, sizeof value);
    if (field->type == DL_FIELD_F64 && quote[0] != 0) { /* In quotes there are no exponents. */
        snprintf(value, sizeof value, "%.16f", strtod(value, NULL));
    }
    manifest_with(field, is_pool, value, quote, &text);
    struct dl_spec *spec = NULL, *again = NULL;
    struct dl_err err = {0};
    DL_AUTO_FREE char *json = NULL, *twice = NULL;
    enum dl_rc rc = dl_spec_parse(text.data, strlen(text.data), "job.yaml", &spec, NULL, &err);
    if (rc != DL_OK) {
        printf("%s: %s\n%s", field->path, err.text, text.data);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    CU_ASSERT(holds(field, is_pool ? (void *)&spec->learners.pools[0] : (void *)spec, value));
    CU_ASSERT_EQUAL_FATAL(dl_spec_to_json(spec, &json, &err), DL_OK);
    rc = dl_spec_parse(json, strlen(json), "job.json", &again, NULL, &err);
    if (rc != DL_OK) {
        printf("%s: %s\n%s", field->path, err.text, json);
    }
    CU_ASSERT_EQUAL_FATAL(rc, DL_OK);
    CU_ASSERT(holds(field, is_pool ? (void *)&again->learners.pools[0] : (void *)again, value));
    CU_ASSERT_EQUAL_FATAL(dl_spec_to_json(again, &twice, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(json, twice);
    dl_spec_free(again);
    dl_spec_free(spec);
    dl_buf_release(&text);
}

static void test_every_field_is_read_and_round_trips(void)
{
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        check_field(&dl_spec_fields[i], false, "");
        if (dl_spec_fields[i].type == DL_FIELD_F64 && (dl_spec_fields[i].flags & DL_FIELD_PLAIN) == 0) {
            check_field(&dl_spec_fields[i], false, "\"");
        }
    }
    for (size_t i = 0; i < dl_pool_field_count; i++) {
        check_field(&dl_pool_fields[i], true, "");
    }
}

/* The defaults are within the bounds that the table states, and its enums have the default among their names. */
static void test_the_table_is_sound(void)
{
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        const struct dl_field *field = &dl_spec_fields[i];
        size_t length = strlen(field->text);
        CU_ASSERT(length > 0 && field->text[length - 1] == '.');
        for (size_t j = 0; j < i; j++) {
            CU_ASSERT_STRING_NOT_EQUAL(field->path, dl_spec_fields[j].path);
            CU_ASSERT(field->type == DL_FIELD_RAW || field->offset != dl_spec_fields[j].offset);
        }
        bool may_lack = field->type == DL_FIELD_RAW || field->type == DL_FIELD_PATHS;
        CU_ASSERT(may_lack || (field->preset == NULL) == ((field->flags & DL_FIELD_REQUIRED) != 0));
    }
}

/* Each duration is one more thing to get wrong, so their number is bounded. */
static void test_durations_are_few(void)
{
    unsigned count = 0;
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        const char *tail = strstr(dl_spec_fields[i].path, "Seconds");
        count += tail != NULL;
        CU_ASSERT(tail == NULL || dl_spec_fields[i].preset != NULL);
    }
    CU_ASSERT(count > 0 && count <= 8);
}

static void test_committed_reference_is_what_the_table_says(void)
{
    struct dl_buf made;
    dl_buf_init(&made, 1 << 20);
    dl_spec_reference(&made);
    DL_AUTO_FILE FILE *file = fopen("docs/job-reference.md", "rb");
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    static char committed[1 << 18];
    size_t size = fread(committed, 1, sizeof committed, file);
    bool is_same = !made.failed && size == made.size && memcmp(committed, made.data, size) == 0;
    if (!is_same) {
        puts("docs/job-reference.md is stale: make build/release/tools/spec && "
             "build/release/tools/spec reference > docs/job-reference.md");
    }
    CU_ASSERT_TRUE(is_same);
    dl_buf_release(&made);
}

UNIT_MAIN("spec_fields", {"every field is read and round trips", test_every_field_is_read_and_round_trips},
          {"table", test_the_table_is_sound}, {"Q3 durations", test_durations_are_few},
          {"reference is current", test_committed_reference_is_what_the_table_says})
