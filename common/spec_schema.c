#include "common/spec_schema.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/job_names.h"
#include "common/mem.h"
#include "common/spec_internal.h"
#include "common/spec_range.h"

/* Fields [begin, end) share the first `shared` characters of their paths: the branch that they are below. */
struct branch {
    const struct dl_field *fields;
    size_t begin, end, shared;
    const char *root; /* What the fields' paths are relative to: "spec". */
    char at[96];      /* The branch's path from the manifest's root: "spec.sync.warmup". */
};

static const struct {
    const char *at, *text;
} descriptions[] = {
    {"spec", "What is wanted."},
    {"spec.training", "When the job is done, and what the built-in trainer trains."},
    {"spec.training.model", "Architecture and sizes of a decoder-only transformer."},
    {"spec.training.data", "What is trained on."},
    {"spec.training.innerOptimizer", "AdamW, in each learner."},
    {"spec.sync", "How learners are kept in step with each other."},
    {"spec.sync.warmup", "Interval warm-up: short intervals at the start, while learners have little in common."},
    {"spec.sync.grace", "How long a round that has its quorum waits for more learners."},
    {"spec.sync.merge", "How pushes become one outer gradient."},
    {"spec.sync.outerOptimizer", "What the syncer does with the outer gradient."},
    {"spec.syncer", "The processes that hold and merge the fragments."},
    {"spec.syncer.storage", "The volume of each shard."},
    {"spec.learners", "The processes that train."},
    {"spec.learners.pools", "Kinds of learners, e.g. steady and spot."},
    {"spec.learners.pools.scavenge", "Learners that are added while there is room for them."},
};

static void line(struct dl_buf *out, unsigned depth, const char *fmt, ...) DL_PRINTF(3, 4);
static void line(struct dl_buf *out, unsigned depth, const char *fmt, ...)
{
    char text[256];
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    assert(length >= 0 && (size_t)length < sizeof text);
    dl_buf_printf(out, "%*s%s\n", (int)depth * 2, "", text);
}

/* A text of any length; strings of JSON are strings of YAML. */
static void text_line(struct dl_buf *out, unsigned depth, const char *key, const char *text)
{
    dl_buf_printf(out, "%*s%s: ", (int)depth * 2, "", key);
    dl_json_string(out, text);
    dl_buf_puts(out, "\n");
}

static void describe(struct dl_buf *out, unsigned depth, const char *at)
{
    for (size_t i = 0; i < DL_COUNT_OF(descriptions); i++) {
        if (strcmp(descriptions[i].at, at) == 0) {
            text_line(out, depth, "description", descriptions[i].text);
        }
    }
}

/* --- rules ------------------------------------------------------------------------------------------------------ */

static bool is_frozen(const struct dl_field *field)
{
    return (field->flags & DL_FIELD_FROZEN) != 0;
}

static bool is_all_frozen(const struct branch *branch)
{
    for (size_t i = branch->begin; i < branch->end; i++) {
        if (!is_frozen(&branch->fields[i])) {
            return false;
        }
    }
    return true;
}

static void put_rule(struct dl_buf *out, unsigned depth, const char *cel, const char *text)
{
    text_line(out, depth, "- rule", cel);
    text_line(out, depth, "  message", text);
}

/* The rules whose `self` is the object at `at` (NULL: a single value, which has none), and that it must not change when
 * it is frozen as a whole. */
static void put_rules(struct dl_buf *out, unsigned depth, const char *at, bool frozen)
{
    bool has_head = false;
    for (size_t i = 0; at != NULL && i < dl_spec_rule_count; i++) {
        if (strcmp(dl_spec_rules[i].at, at) == 0) {
            if (!has_head) {
                line(out, depth, "x-kubernetes-validations:");
                has_head = true;
            }
            put_rule(out, depth, dl_spec_rules[i].cel, dl_spec_rules[i].text);
        }
    }
    if (frozen) {
        if (!has_head) {
            line(out, depth, "x-kubernetes-validations:");
        }
        put_rule(out, depth, "self == oldSelf", "fixed once the job exists; make a new job instead");
    }
}

/* --- one field -------------------------------------------------------------------------------------------------- */

static void put_bounds(struct dl_buf *out, unsigned depth, const struct dl_field *field)
{
    line(out, depth, "minimum: %.15g", field->min);
    line(out, depth, "maximum: %.15g", field->max);
}

static void put_pattern(struct dl_buf *out, unsigned depth, void (*put)(struct dl_buf *out, double bound), double bound)
{
    dl_buf_printf(out, "%*s- pattern: '", (int)depth * 2, "");
    put(out, bound);
    dl_buf_puts(out, "'\n");
}

/* An API server cuts the fraction off a bound before it compares a whole number with it: 0 is not below 0.1. */
static bool has_fraction(double bound)
{
    return trunc(bound) < bound;
}

static void put_number(struct dl_buf *out, unsigned depth, const struct dl_field *field)
{
    bool is_plain = (field->flags & DL_FIELD_PLAIN) != 0;
    if (is_plain) {
        line(out, depth, "type: number");
        line(out, depth, "format: double");
    } else {
        /* A schema without a type, since none stands for "number or string": so all else is ruled out by name. */
        line(out, depth, "x-kubernetes-preserve-unknown-fields: true");
        line(out, depth, "pattern: '%s'", DL_RANGE_DECIMAL);
        line(out, depth, "maxProperties: 0");
        line(out, depth, "maxItems: 0");
        line(out, depth, "not: {enum: [true, false, {}, []]}");
    }
    if (!is_plain || has_fraction(field->min)) {
        line(out, depth, "allOf:");
    }
    if (has_fraction(field->min)) {
        line(out, depth, "- {minimum: %.0f, exclusiveMinimum: true}", trunc(field->min));
    }
    if (!is_plain && field->min > 0) {
        put_pattern(out, depth, dl_range_at_least, field->min);
    }
    if (!is_plain) {
        put_pattern(out, depth, dl_range_at_most, field->max);
    }
    put_bounds(out, depth, field);
    if (field->preset != NULL) {
        line(out, depth, "default: %.15g", strtod(field->preset, NULL));
    }
}

static void put_string(struct dl_buf *out, unsigned depth, const struct dl_field *field)
{
    line(out, depth, "type: string");
    line(out, depth, "maxLength: %zu", field->size - 1);
    if ((field->flags & DL_FIELD_LABEL) != 0) {
        line(out, depth, "pattern: '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'");
    }
    if ((field->flags & DL_FIELD_QUANTITY) != 0) {
        line(out, depth, "pattern: '^[0-9]+(\\.[0-9]+)?([kMGTPE]|[KMGTPE]i)?$'");
    }
    if (field->preset != NULL) {
        text_line(out, depth, "default", field->preset);
    }
}

static void put_enum(struct dl_buf *out, unsigned depth, const struct dl_field *field)
{
    line(out, depth, "type: string");
    line(out, depth, "enum:");
    for (int v = 0; field->names[v] != NULL; v++) {
        line(out, depth, "- %s", field->names[v]);
    }
    line(out, depth, "default: %s", field->preset);
}

static void put_count(struct dl_buf *out, unsigned depth, const struct dl_field *field)
{
    line(out, depth, "x-kubernetes-int-or-string: true");
    line(out, depth, "pattern: '^([1-9][0-9]?|100)%%$'");
    line(out, depth, "maxLength: 4");
    put_bounds(out, depth, field);
    bool is_percent = strchr(field->preset, '%') != NULL;
    line(out, depth, is_percent ? "default: \"%s\"" : "default: %s", field->preset);
}

static void put_field(struct dl_buf *out, unsigned depth, const struct dl_field *field, bool frozen)
{
    text_line(out, depth, "description", field->text);
    switch (field->type) {
    case DL_FIELD_BOOL:
        line(out, depth, "type: boolean");
        line(out, depth, "default: %s", field->preset);
        break;
    case DL_FIELD_U16:
    case DL_FIELD_U32:
    case DL_FIELD_U64:
    case DL_FIELD_I64:
        line(out, depth, "type: integer");
        line(out, depth, "format: int64");
        put_bounds(out, depth, field);
        /* Wanted learners default to the sum over the pools, which a schema cannot say. */
        if (field->preset != NULL && strcmp(field->path, "learners.replicas") != 0) {
            line(out, depth, "default: %s", field->preset);
        }
        break;
    case DL_FIELD_F64: put_number(out, depth, field); break;
    case DL_FIELD_ENUM: put_enum(out, depth, field); break;
    case DL_FIELD_STRING: put_string(out, depth, field); break;
    case DL_FIELD_COUNT: put_count(out, depth, field); break;
    case DL_FIELD_PATHS:
        line(out, depth, "type: array");
        line(out, depth, "maxItems: %d", DL_SPEC_PATHS_MAX);
        line(out, depth, "x-kubernetes-list-type: atomic");
        line(out, depth, "items: {type: string, minLength: 1, maxLength: %d}", DL_SPEC_TEXT_MAX - 1);
        break;
    case DL_FIELD_RAW:
        line(out, depth, "type: object");
        line(out, depth, "x-kubernetes-preserve-unknown-fields: true");
        break;
    }
    if (frozen) {
        /* The API server has no type to compare by for numbers that may be strings; such fields are frozen as a part of
         * their branch. */
        assert(field->type != DL_FIELD_F64 || (field->flags & DL_FIELD_PLAIN) != 0);
        put_rules(out, depth, NULL, true);
    }
}

/* --- objects ---------------------------------------------------------------------------------------------------- */

/* The branch that begins with field `i`, or false when that field is a leaf of `parent`. */
static bool branch_at(const struct branch *parent, size_t i, struct branch *out)
{
    const char *path = parent->fields[i].path;
    const char *dot = strchr(path + parent->shared, '.');
    if (dot == NULL) {
        return false;
    }
    *out = (struct branch){
        .fields = parent->fields, .begin = i, .end = i, .shared = (size_t)(dot + 1 - path), .root = parent->root};
    while (out->end < parent->end && strncmp(parent->fields[out->end].path, path, out->shared) == 0) {
        out->end++;
    }
    int length = snprintf(out->at, sizeof out->at, "%s.%s", out->root, path);
    assert(length > 0 && (size_t)length < sizeof out->at);
    out->at[strlen(out->root) + 1 + (size_t)(dot - path)] = 0;
    return true;
}

static bool has_required(const struct branch *branch)
{
    for (size_t i = branch->begin; i < branch->end; i++) {
        if ((branch->fields[i].flags & DL_FIELD_REQUIRED) != 0) {
            return true;
        }
    }
    return false;
}

static void put_required(struct dl_buf *out, unsigned depth, const struct branch *branch)
{
    if (!has_required(branch)) {
        return;
    }
    line(out, depth, "required:");
    for (size_t i = branch->begin; i < branch->end;) {
        struct branch inner;
        bool is_branch = branch_at(branch, i, &inner);
        if (is_branch ? has_required(&inner) : (branch->fields[i].flags & DL_FIELD_REQUIRED) != 0) {
            line(out, depth, "- %s", is_branch ? strrchr(inner.at, '.') + 1 : branch->fields[i].path + branch->shared);
        }
        i = is_branch ? inner.end : i + 1;
    }
}

static void put_pools(struct dl_buf *out, unsigned depth);

static void put_properties(struct dl_buf *out, unsigned depth, const struct branch *branch, bool frozen)
{
    line(out, depth, "properties:");
    for (size_t i = branch->begin; i < branch->end;) {
        struct branch inner;
        const struct dl_field *field = &branch->fields[i];
        if (!branch_at(branch, i, &inner)) {
            line(out, depth + 1, "%s:", field->path + branch->shared);
            put_field(out, depth + 2, field, !frozen && is_frozen(field));
            i++;
            continue;
        }
        bool inner_frozen = !frozen && is_all_frozen(&inner);
        line(out, depth + 1, "%s:", strrchr(inner.at, '.') + 1);
        line(out, depth + 2, "type: object");
        describe(out, depth + 2, inner.at);
        if (!has_required(&inner)) {
            line(out, depth + 2, "default: {}"); /* So that the defaults inside it apply. */
        }
        put_rules(out, depth + 2, inner.at, inner_frozen);
        put_properties(out, depth + 2, &inner, frozen || inner_frozen);
        i = inner.end;
    }
    if (strcmp(branch->at, "spec.learners") == 0) {
        put_pools(out, depth + 1);
    }
    put_required(out, depth, branch);
}

static void put_pools(struct dl_buf *out, unsigned depth)
{
    struct branch pool = {.fields = dl_pool_fields,
                          .end = dl_pool_field_count,
                          .root = "spec.learners.pools",
                          .at = "spec.learners.pools"};
    line(out, depth, "pools:");
    line(out, depth + 1, "type: array");
    describe(out, depth + 1, pool.at);
    line(out, depth + 1, "maxItems: %d", DL_SPEC_POOLS_MAX);
    line(out, depth + 1, "x-kubernetes-list-type: map");
    line(out, depth + 1, "x-kubernetes-list-map-keys: [name]");
    line(out, depth + 1, "items:");
    line(out, depth + 2, "type: object");
    put_properties(out, depth + 2, &pool, false);
}

/* --- the whole -------------------------------------------------------------------------------------------------- */

static const char head[] =
    "# Made from the table of job fields by `make manifests`; do not edit.\n"
    "apiVersion: apiextensions.k8s.io/v1\n"
    "kind: CustomResourceDefinition\n"
    "metadata:\n"
    "  name: decoupleddilocojobs.diloco.dev\n"
    "spec:\n"
    "  group: diloco.dev\n"
    "  scope: Namespaced\n"
    "  names:\n"
    "    kind: " DL_SPEC_KIND "\n"
    "    listKind: " DL_SPEC_KIND "List\n"
    "    plural: decoupleddilocojobs\n"
    "    singular: decoupleddilocojob\n"
    "    shortNames: [ddj]\n"
    "    categories: [all, diloco]\n"
    "  versions:\n"
    "  - name: v1alpha1\n"
    "    served: true\n"
    "    storage: true\n"
    "    subresources:\n"
    "      status: {}\n"
    "      scale:\n"
    "        specReplicasPath: .spec.learners.replicas\n"
    "        statusReplicasPath: .status.learners.running\n"
    "        labelSelectorPath: .status.selector\n"
    "    additionalPrinterColumns:\n"
    "    - {name: Phase, type: string, jsonPath: .status.phase}\n"
    "    - {name: Learners, type: integer, jsonPath: .status.learners.connected, description: Connected learners.}\n"
    "    - {name: Quorum, type: string, jsonPath: .status.syncer.quorum, description: Have/need.}\n"
    "    - {name: Step, type: integer, jsonPath: .status.syncer.step, description: Of the furthest learner.}\n"
    "    - {name: Loss, type: string, jsonPath: .status.syncer.loss, description: 'Training loss, nats a token.'}\n"
    "    - {name: Goodput, type: string, jsonPath: .status.syncer.goodput, description: Share of time spent "
    "training.}\n"
    "    - {name: Desired, type: integer, jsonPath: .status.learners.desired, priority: 1}\n"
    "    - {name: Message, type: string, jsonPath: .status.message, priority: 1}\n"
    "    - {name: Age, type: date, jsonPath: .metadata.creationTimestamp}\n"
    "    schema:\n"
    "      openAPIV3Schema:\n"
    "        type: object\n"
    "        description: An ensemble of learners that train one model, and the syncers that merge what they learn.\n";

/* Loss and goodput are strings, as Kubernetes advises for numbers with a fraction: what is shown is what was written.
 */
static const char status_after_phase[] =
    "              message: {type: string, description: 'Why it is in that phase, e.g. WaitingForQuorum 0/1 "
    "learners.'}\n"
    "              observedGeneration: {type: integer, format: int64}\n"
    "              startTime: {type: string, format: date-time}\n"
    "              completionTime: {type: string, format: date-time}\n"
    "              selector: {type: string, description: 'Label selector of the learners, for the scale "
    "subresource.'}\n"
    "              active: {type: integer, format: int64, description: 'Pods that are not gone; 0 once suspended.'}\n"
    "              learners:\n"
    "                type: object\n"
    "                properties:\n"
    "                  desired: {type: integer, format: int64}\n"
    "                  running: {type: integer, format: int64}\n"
    "                  connected: {type: integer, format: int64}\n"
    "                  pools:\n"
    "                    type: array\n"
    "                    maxItems: 16\n"
    "                    x-kubernetes-list-type: map\n"
    "                    x-kubernetes-list-map-keys: [name]\n"
    "                    items:\n"
    "                      type: object\n"
    "                      properties:\n"
    "                        name: {type: string}\n"
    "                        desired: {type: integer, format: int64}\n"
    "                        running: {type: integer, format: int64}\n"
    "                        connected: {type: integer, format: int64}\n"
    "                        scavenged: {type: integer, format: int64, description: 'Of desired, beyond its "
    "replicas.'}\n"
    "                      required: [name]\n"
    "              syncer:\n"
    "                type: object\n"
    "                properties:\n"
    "                  readyShards: {type: integer, format: int64}\n"
    "                  round: {type: integer, format: int64, description: Rounds merged.}\n"
    "                  step: {type: integer, format: int64, description: Inner steps of the furthest learner.}\n"
    "                  tokens: {type: integer, format: int64, description: Trained by all learners.}\n"
    "                  loss: {type: string}\n"
    "                  validationLoss: {type: string}\n"
    "                  goodput: {type: string}\n"
    "                  quorum: {type: string, description: Have/need.}\n";

static const char status_condition[] =
    "                maxItems: 16\n"
    "                x-kubernetes-list-type: map\n"
    "                x-kubernetes-list-map-keys: [type]\n"
    "                items:\n"
    "                  type: object\n"
    "                  properties:\n"
    "                    type: {type: string, maxLength: 316}\n"
    "                    status: {type: string, enum: ['True', 'False', Unknown]}\n"
    "                    reason: {type: string, minLength: 1, maxLength: 1024}\n"
    "                    message: {type: string, maxLength: 32768}\n"
    "                    lastTransitionTime: {type: string, format: date-time}\n"
    "                    observedGeneration: {type: integer, format: int64, minimum: 0}\n"
    "                  required: [type, status, reason, message, lastTransitionTime]\n";

static void put_names(struct dl_buf *out, unsigned depth, const char *before, const char *const *names, size_t count,
                      const char *after)
{
    dl_buf_printf(out, "%*s%s", (int)depth * 2, "", before);
    for (size_t i = 0; i < count; i++) {
        dl_buf_printf(out, "%s%s", i > 0 ? ", " : "", names[i]);
    }
    dl_buf_printf(out, "%s\n", after);
}

static void put_status(struct dl_buf *out)
{
    line(out, 5, "status:");
    line(out, 6, "type: object");
    line(out, 6, "description: What is; written by the operator.");
    line(out, 6, "properties:");
    line(out, 7, "phase:");
    line(out, 8, "type: string");
    put_names(out, 8, "enum: [", dl_job_phase_names, DL_JOB_PHASE_COUNT, "]");
    dl_buf_puts(out, status_after_phase);
    line(out, 7, "conditions:");
    line(out, 8, "type: array");
    put_names(out, 8, "description: ", dl_condition_names, DL_CONDITION_COUNT, ".");
    dl_buf_puts(out, status_condition);
}

void dl_spec_crd_yaml(struct dl_buf *out)
{
    struct branch spec = {.fields = dl_spec_fields, .end = dl_spec_field_count, .root = "spec", .at = "spec"};
    dl_buf_puts(out, head);
    put_rules(out, 4, "", false);
    line(out, 4, "required: [spec]");
    line(out, 4, "properties:");
    line(out, 5, "apiVersion: {type: string}");
    line(out, 5, "kind: {type: string}");
    line(out, 5, "metadata: {type: object}");
    line(out, 5, "spec:");
    line(out, 6, "type: object");
    describe(out, 6, spec.at);
    put_rules(out, 6, spec.at, false);
    put_properties(out, 6, &spec, false);
    put_status(out);
}
