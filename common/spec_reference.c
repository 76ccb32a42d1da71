#include "common/spec_reference.h"

#include <string.h>

#include "common/spec_table.h"

static void allowed(const struct dl_field *field, struct dl_buf *out)
{
    switch (field->type) {
    case DL_FIELD_BOOL: dl_buf_puts(out, "true, false"); break;
    case DL_FIELD_U16:
    case DL_FIELD_U32:
    case DL_FIELD_U64:
    case DL_FIELD_I64:
        if (field->max > 4e18) {
            dl_buf_printf(out, "whole number, at least %.0f", field->min);
        } else {
            dl_buf_printf(out, "whole number, %.0f to %.0f", field->min, field->max);
        }
        break;
    case DL_FIELD_F64: dl_buf_printf(out, "number, %g to %g", field->min, field->max); break;
    case DL_FIELD_ENUM:
        for (int v = 0; field->names[v] != NULL; v++) {
            dl_buf_printf(out, "%s`%s`", v > 0 ? ", " : "", field->names[v]);
        }
        break;
    case DL_FIELD_STRING: dl_buf_puts(out, "text"); break;
    case DL_FIELD_COUNT: dl_buf_printf(out, "count from 1 to %.0f, or \"1%%\" to \"100%%\"", field->max); break;
    case DL_FIELD_PATHS: dl_buf_printf(out, "list of at most %d file names", DL_SPEC_PATHS_MAX); break;
    case DL_FIELD_RAW: dl_buf_puts(out, "object"); break;
    }
}

static void rows(const struct dl_field *fields, size_t count, const char *prefix, struct dl_buf *out)
{
    dl_buf_puts(out, "| field | default | allowed | meaning |\n| --- | --- | --- | --- |\n");
    for (size_t i = 0; i < count; i++) {
        const struct dl_field *field = &fields[i];
        bool is_required = (field->flags & DL_FIELD_REQUIRED) != 0;
        bool has_preset = field->preset != NULL && field->preset[0] != 0;
        dl_buf_printf(out, "| `%s%s`%s | %s%s%s | ", prefix, field->path,
                      (field->flags & DL_FIELD_FROZEN) != 0 ? " *" : "", has_preset ? "`" : "",
                      has_preset    ? field->preset
                      : is_required ? "required"
                                    : "",
                      has_preset ? "`" : "");
        allowed(field, out);
        dl_buf_printf(out, " | %s |\n", field->text);
    }
}

void dl_spec_reference(struct dl_buf *out)
{
    dl_buf_puts(
        out,
        "# Job reference\n\n"
        "`apiVersion: " DL_SPEC_API_VERSION "`, `kind: " DL_SPEC_KIND
        "`, short name `ddj`. YAML or JSON, the same on one\n"
        "machine (`diloco run`) and in a cluster. This page is made from the table that the parser reads\n"
        "(`common/spec_table.c`): `build/release/tools/spec reference > docs/job-reference.md`.\n\n"
        "Numbers with a fraction may be quoted (`\"0.7\"`, without exponent), durations in seconds and "
        "`sync.applyAlpha` may not. An "
        "unknown\n"
        "or wrong field is refused with its path, its value and what is allowed. Fields marked * are fixed once a job\n"
        "exists.\n"
        "Samples: `crds/samples/`.\n\n## spec\n\n");
    rows(dl_spec_fields, dl_spec_field_count, "", out);
    dl_buf_puts(out, "\n## spec.learners.pools[]\n\n"
                     "Without pools there is one, named `default`, with all replicas. With pools, `learners.replicas` "
                     "is shared out: each\n"
                     "pool gets its own number in order, the last one what is left. So `kubectl scale` works on every "
                     "job that states\n"
                     "`learners.replicas`, and the last pool is the one that moves.\n\n");
    rows(dl_pool_fields, dl_pool_field_count, "", out);
    dl_buf_puts(out, "\n## Rules between fields\n\nRefused by the parser and by the API server:\n\n");
    for (size_t i = 0; i < dl_spec_rule_count; i++) {
        const char *at = dl_spec_rules[i].at; /* "spec.training": its rules name fields from there on. */
        const char *below = strncmp(at, "spec.", 5) == 0 ? at + 5 : "";
        dl_buf_printf(out, "- %s%s%s\n", below, below[0] != 0 ? ": " : "", dl_spec_rules[i].text);
    }
    dl_buf_puts(
        out, "\nNo other timeout has to exceed another.\n\n"
             "## Durations of the protocol\n\n"
             "Six, published by the syncer and obeyed by learners: `sync.grace.maxSeconds`, `sync.heartbeatSeconds`,\n"
             "`sync.timeoutSeconds`, `sync.joinTimeoutSeconds`, `sync.finishSeconds`, `activeDeadlineSeconds`.\n");
}
