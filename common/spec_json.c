/* struct dl_spec to JSON, after the table. */
#include <inttypes.h>
#include <string.h>

#include "common/buf.h"
#include "common/mem.h"
#include "common/spec_internal.h"

#define PLACE(type) ((const type *)(const void *)((const char *)base + field->offset))

static void write_value(const struct dl_field *field, const void *base, const struct dl_spec *spec, struct dl_buf *out)
{
    switch (field->type) {
    case DL_FIELD_BOOL: dl_buf_puts(out, *PLACE(bool) ? "true" : "false"); break;
    case DL_FIELD_U16: dl_buf_printf(out, "%u", *PLACE(uint16_t)); break;
    case DL_FIELD_U32: dl_buf_printf(out, "%" PRIu32, *PLACE(uint32_t)); break;
    case DL_FIELD_U64: dl_buf_printf(out, "%" PRIu64, *PLACE(uint64_t)); break;
    case DL_FIELD_I64: dl_buf_printf(out, "%" PRId64, *PLACE(int64_t)); break;
    case DL_FIELD_F64: dl_buf_printf(out, "%.17g", *PLACE(double)); break;
    case DL_FIELD_ENUM: dl_json_string(out, field->names[*PLACE(int)]); break;
    case DL_FIELD_STRING: dl_json_string(out, PLACE(char)); break;
    case DL_FIELD_COUNT: {
        const struct dl_count_or_percent *count = PLACE(struct dl_count_or_percent);
        dl_buf_printf(out, count->is_percent ? "\"%u%%\"" : "%u", count->value);
        break;
    }
    case DL_FIELD_PATHS:
        dl_buf_puts(out, "[");
        for (uint32_t i = 0; i < spec->training.data.path_count; i++) {
            dl_buf_puts(out, i > 0 ? "," : "");
            dl_json_string(out, spec->training.data.paths[i]);
        }
        dl_buf_puts(out, "]");
        break;
    case DL_FIELD_RAW: dl_buf_puts(out, *PLACE(char *)); break;
    }
}

/* Characters that two paths have in common up to and including the last common dot. */
static size_t common_branch(const char *a, const char *b)
{
    size_t last = 0;
    for (size_t i = 0; a[i] != 0 && a[i] == b[i]; i++) {
        if (a[i] == '.') {
            last = i + 1;
        }
    }
    return last;
}

static unsigned dots(const char *text)
{
    unsigned count = 0;
    for (; *text != 0; text++) {
        count += *text == '.';
    }
    return count;
}

/* Fields of one branch stand together in the table, so that braces can be opened and closed as the path changes. */
static void write_fields(const struct dl_field *fields, size_t count, const void *base, const struct dl_spec *spec,
                         struct dl_buf *out)
{
    const char *previous = "";
    bool first = true;
    for (size_t i = 0; i < count; i++) {
        const struct dl_field *field = &fields[i];
        if (field->type == DL_FIELD_RAW && *PLACE(char *) == NULL) {
            continue;
        }
        size_t shared = common_branch(previous, field->path);
        for (unsigned level = dots(previous + shared); level > 0; level--) {
            dl_buf_puts(out, "}");
        }
        dl_buf_puts(out, first ? "" : ",");
        const char *part = field->path + shared;
        for (const char *dot; (dot = strchr(part, '.')) != NULL; part = dot + 1) {
            dl_buf_printf(out, "\"%.*s\":{", (int)(dot - part), part);
        }
        dl_buf_printf(out, "\"%s\":", part);
        write_value(field, base, spec, out);
        previous = field->path;
        first = false;
    }
    for (unsigned level = dots(previous); level > 0; level--) {
        dl_buf_puts(out, "}");
    }
}

enum dl_rc dl_spec_to_json(const struct dl_spec *spec, char **out, struct dl_err *err)
{
    struct dl_buf buf;
    dl_buf_init(&buf, DL_SPEC_BYTES_MAX);
    dl_buf_printf(
        &buf, "{\"apiVersion\":\"%s\",\"kind\":\"%s\",\"metadata\":{\"name\":\"%s\",\"namespace\":\"%s\"},\"spec\":{",
        DL_SPEC_API_VERSION, DL_SPEC_KIND, spec->name, spec->namespace_name);
    write_fields(dl_spec_fields, dl_spec_field_count, spec, spec, &buf);
    /* The learners' fields are the table's last, so that the pools can be put beside them. */
    if (!buf.failed && buf.size > 0 && buf.data[buf.size - 1] == '}') {
        buf.size--;
    }
    dl_buf_puts(&buf, ",\"pools\":[");
    for (uint32_t i = 0; i < spec->learners.pool_count; i++) {
        dl_buf_puts(&buf, i > 0 ? ",{" : "{");
        write_fields(dl_pool_fields, dl_pool_field_count, &spec->learners.pools[i], spec, &buf);
        dl_buf_puts(&buf, "}");
    }
    dl_buf_puts(&buf, "]}}}\n");
    char *text = dl_buf_take(&buf);
    if (text == NULL) {
        return dl_err_set(err, DL_ENOMEM, "job %s: no memory to write it as JSON", spec->name);
    }
    *out = text;
    return DL_OK;
}
