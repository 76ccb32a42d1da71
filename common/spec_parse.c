/* Manifest text to struct dl_spec, field by field after the table. */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/spec_internal.h"

struct reader {
    const char *origin;
    struct dl_spec *spec;
    bool seen[256]; /* Fields of dl_spec_fields that stand in the manifest. */
    struct dl_err *err;
    bool is_stored; /* What is unknown is passed over. */
};

/* A table and where its values go: the spec's fields, or one pool's. */
struct scope {
    const struct dl_field *fields;
    size_t count;
    void *base;
    bool *seen;
    char prefix[64]; /* "spec" or "spec.learners.pools[2]" */
};

static enum dl_rc fail(struct reader *r, const struct dl_node *node, const char *path, const char *text)
{
    return dl_err_set(r->err, DL_EINVAL, "%s:%u: %s: %s", r->origin, node->line, path, text);
}

/* --- names --- */

/* Levenshtein distance of two short names, cut off at 64 characters. */
static unsigned distance(const char *a, const char *b)
{
    unsigned row[65];
    size_t m = DL_MIN(strlen(a), (size_t)64), n = DL_MIN(strlen(b), (size_t)64);
    for (size_t j = 0; j <= n; j++) {
        row[j] = (unsigned)j;
    }
    for (size_t i = 1; i <= m; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= n; j++) {
            unsigned above = row[j];
            unsigned swap = diagonal + (a[i - 1] != b[j - 1]);
            row[j] = DL_MIN(DL_MIN(above, row[j - 1]) + 1, swap);
            diagonal = above;
        }
    }
    return row[n];
}

/* The next part of a table path below `inner` ("sync.grace" and "sync.grace.margin": "margin"); NULL when not below. */
static const char *part_below(const char *path, const char *inner, char *out, size_t size)
{
    size_t length = strlen(inner);
    if (length > 0) {
        if (strncmp(path, inner, length) != 0 || path[length] != '.') {
            return NULL;
        }
        path += length + 1;
    }
    snprintf(out, size, "%.*s", (int)strcspn(path, "."), path);
    return out;
}

/* The path of a field, or of what holds fields, whose last part is `key`, anywhere in the scope: the one that lies least deep.
 * False: there is none. */
static bool find_elsewhere(const struct scope *scope, const char *key, char *out, size_t size)
{
    unsigned best_depth = UINT_MAX;
    for (size_t i = 0; i < scope->count; i++) {
        const char *path = scope->fields[i].path;
        unsigned depth = 0;
        for (const char *part = path; part != NULL && depth < best_depth; depth++) {
            size_t length = strcspn(part, ".");
            if (strlen(key) == length && strncmp(part, key, length) == 0) {
                snprintf(out, size, "%s.%.*s", scope->prefix, (int)(part - path) + (int)length, path);
                best_depth = depth;
            }
            part = part[length] == '.' ? part + length + 1 : NULL;
        }
    }
    return best_depth != UINT_MAX;
}

static enum dl_rc unknown_field(struct reader *r, const struct scope *scope, const char *inner,
                                const struct dl_node *node, const char *path)
{
    char best[64] = "", part[64];
    unsigned best_distance = 1000;
    for (size_t i = 0; i < scope->count; i++) {
        if (part_below(scope->fields[i].path, inner, part, sizeof part) != NULL) {
            unsigned d = distance(part, node->key);
            if (d < best_distance) {
                best_distance = d;
                memcpy(best, part, sizeof best);
            }
        }
    }
    char text[160], elsewhere[100];
    if (best_distance > 2 && find_elsewhere(scope, node->key, elsewhere, sizeof elsewhere)) {
        snprintf(text, sizeof text, "unknown field here; did you mean %s?", elsewhere);
    } else if (best[0] != 0 && best_distance <= 1 + strlen(node->key) / 2) {
        snprintf(text, sizeof text, "unknown field; did you mean '%s'?", best);
    } else {
        snprintf(text, sizeof text, "unknown field; see the job reference for what is allowed here");
    }
    return fail(r, node, path, text);
}

/* --- values --- */

static enum dl_rc read_paths(struct reader *r, const struct dl_node *node, const char *path)
{
    struct dl_data_spec *data = &r->spec->training.data;
    if (node->kind != DL_NODE_LIST) {
        return fail(r, node, path, "a list of file names is expected");
    }
    uint32_t count = 0;
    for (const struct dl_node *item = node->first; item != NULL; item = item->next) {
        if (item->kind != DL_NODE_SCALAR || item->text[0] == 0 || !dl_scalar_is_text(item->text, item->quoted)) {
            return fail(r, item, path, "every entry must be a file name (a text: put numbers in quotes)");
        }
        if (count == DL_SPEC_PATHS_MAX || strlen(item->text) >= DL_SPEC_TEXT_MAX) {
            return fail(r, item, path, "at most 64 files with at most 255 characters each");
        }
        memcpy(data->paths[count++], item->text, strlen(item->text) + 1);
    }
    data->path_count = count;
    return DL_OK;
}

static enum dl_rc read_raw(struct reader *r, const struct dl_field *field, void *base, const struct dl_node *node,
                           const char *path)
{
    if (node->kind != DL_NODE_MAP) {
        return fail(r, node, path, "a mapping is expected");
    }
    struct dl_buf json;
    dl_buf_init(&json, DL_SPEC_BYTES_MAX);
    dl_node_to_json(node, &json);
    char *text = dl_buf_take(&json);
    if (text == NULL) {
        return dl_err_set(r->err, DL_ENOMEM, "%s: no memory for %s", r->origin, path);
    }
    char **place = (char **)((char *)base + field->offset);
    free(*place);
    *place = text;
    return DL_OK;
}

static enum dl_rc read_field(struct reader *r, const struct scope *scope, const struct dl_field *field,
                             const struct dl_node *node, const char *path)
{
    if (field->type == DL_FIELD_PATHS) {
        return read_paths(r, node, path);
    }
    if (field->type == DL_FIELD_RAW) {
        return read_raw(r, field, scope->base, node, path);
    }
    if (node->kind != DL_NODE_SCALAR) {
        return fail(r, node, path, "a single value is expected, not a list or mapping");
    }
    struct dl_err inner;
    enum dl_rc rc = dl_field_set(field, scope->base, node->text, node->quoted, &inner);
    return rc == DL_OK ? DL_OK : fail(r, node, path, inner.text);
}

/* --- structure --- */

static enum dl_rc read_map(struct reader *r, const struct scope *scope, const char *inner, const struct dl_node *map);
static enum dl_rc read_pools(struct reader *r, const struct dl_node *list);

static enum dl_rc read_entry(struct reader *r, const struct scope *scope, const char *inner, const struct dl_node *node)
{
    char below[128], path[224];
    snprintf(below, sizeof below, "%s%s%.60s", inner, inner[0] != 0 ? "." : "", node->key);
    snprintf(path, sizeof path, "%s.%s", scope->prefix, below);
    if (scope->base == r->spec && strcmp(below, "learners.pools") == 0) {
        return read_pools(r, node);
    }
    bool is_branch = false;
    size_t length = strlen(below);
    for (size_t i = 0; i < scope->count; i++) {
        const struct dl_field *field = &scope->fields[i];
        if (strcmp(field->path, below) == 0) {
            if (dl_node_is_null(node)) {
                return DL_OK; /* As the API server: null is absent. */
            }
            if (scope->seen != NULL) {
                scope->seen[i] = true;
            }
            return read_field(r, scope, field, node, path);
        }
        is_branch = is_branch || (strncmp(field->path, below, length) == 0 && field->path[length] == '.');
    }
    if (!is_branch) {
        return r->is_stored ? DL_OK : unknown_field(r, scope, inner, node, path);
    }
    if (dl_node_is_null(node)) {
        return DL_OK;
    }
    if (node->kind != DL_NODE_MAP) {
        return fail(r, node, path, "a mapping is expected");
    }
    return read_map(r, scope, below, node);
}

static enum dl_rc read_map(struct reader *r, const struct scope *scope, const char *inner, const struct dl_node *map)
{
    for (const struct dl_node *child = map->first; child != NULL; child = child->next) {
        enum dl_rc rc = read_entry(r, scope, inner, child);
        if (rc != DL_OK) {
            return rc;
        }
    }
    return DL_OK;
}

static enum dl_rc set_defaults(const struct dl_field *fields, size_t count, void *base, struct dl_err *err)
{
    for (size_t i = 0; i < count; i++) {
        if (fields[i].preset != NULL) {
            enum dl_rc rc = dl_field_set(&fields[i], base, fields[i].preset, fields[i].type == DL_FIELD_STRING, err);
            if (rc != DL_OK) {
                return dl_err_wrap(err, "default of %s", fields[i].path);
            }
        }
    }
    return DL_OK;
}

static enum dl_rc read_pools(struct reader *r, const struct dl_node *list)
{
    struct dl_learners_spec *learners = &r->spec->learners;
    if (dl_node_is_null(list)) {
        return DL_OK;
    }
    if (list->kind != DL_NODE_LIST) {
        return fail(r, list, "spec.learners.pools", "a list of pools is expected");
    }
    uint32_t count = 0;
    for (const struct dl_node *item = list->first; item != NULL; item = item->next) {
        struct scope scope = {.fields = dl_pool_fields, .count = dl_pool_field_count};
        snprintf(scope.prefix, sizeof scope.prefix, "spec.learners.pools[%u]", count);
        if (item->kind != DL_NODE_MAP) {
            return fail(r, item, scope.prefix, "a mapping is expected");
        }
        if (count == DL_SPEC_POOLS_MAX) {
            return fail(r, item, scope.prefix, "at most 16 pools");
        }
        struct dl_pool_spec *pool = &learners->pools[count];
        scope.base = pool;
        learners->pool_count = ++count; /* From here on the spec owns the pool's template. */
        enum dl_rc rc = set_defaults(dl_pool_fields, dl_pool_field_count, pool, r->err);
        if (rc == DL_OK) {
            rc = read_map(r, &scope, "", item);
        }
        if (rc != DL_OK) {
            return rc;
        }
        pool->scavenge.enabled = pool->scavenge.max > 0;
        if (pool->name[0] == 0) {
            return fail(r, item, scope.prefix, "name is required: a DNS label (lower-case letters, digits, '-')");
        }
        for (uint32_t i = 0; i + 1 < count; i++) {
            if (strcmp(learners->pools[i].name, pool->name) == 0) {
                return fail(r, item, scope.prefix, "name: another pool has the same name");
            }
        }
    }
    return DL_OK;
}

/* Names of services must begin with a letter, and a StatefulSet's name leaves room for the suffixes of its pods'
 * labels. */
static bool is_job_name(const struct dl_node *node)
{
    return dl_is_dns_label(node->text) && strlen(node->text) <= DL_SPEC_JOB_NAME_MAX &&
           dl_scalar_is_text(node->text, node->quoted) && !isdigit((unsigned char)node->text[0]);
}

static enum dl_rc read_head(struct reader *r, const struct dl_node *root)
{
    static const char *const known[] = {"apiVersion", "kind", "metadata", "spec", "status"};
    if (root->kind != DL_NODE_MAP) {
        return fail(r, root, "manifest", "a mapping with apiVersion, kind, metadata and spec is expected");
    }
    for (const struct dl_node *child = root->first; child != NULL; child = child->next) {
        bool found = false;
        for (size_t i = 0; i < DL_COUNT_OF(known); i++) {
            found = found || strcmp(child->key, known[i]) == 0;
        }
        if (!found) {
            return fail(r, child, child->key, "unknown field; allowed are apiVersion, kind, metadata, spec");
        }
    }
    const struct dl_node *version = dl_node_get(root, "apiVersion"), *kind = dl_node_get(root, "kind");
    if (version == NULL || version->kind != DL_NODE_SCALAR || strcmp(version->text, DL_SPEC_API_VERSION) != 0) {
        return fail(r, version != NULL ? version : root, "apiVersion", "must be " DL_SPEC_API_VERSION);
    }
    if (kind == NULL || kind->kind != DL_NODE_SCALAR || strcmp(kind->text, DL_SPEC_KIND) != 0) {
        return fail(r, kind != NULL ? kind : root, "kind", "must be " DL_SPEC_KIND);
    }
    const struct dl_node *metadata = dl_node_get(root, "metadata");
    const struct dl_node *name = dl_node_get(metadata, "name"), *space = dl_node_get(metadata, "namespace");
    if (name == NULL || name->kind != DL_NODE_SCALAR || !is_job_name(name)) {
        return fail(r, name != NULL ? name : root, "metadata.name",
                    "a DNS label is required: at most 45 of lower-case letters, digits and '-', a letter first");
    }
    if (space != NULL && (space->kind != DL_NODE_SCALAR || !dl_scalar_is_text(space->text, space->quoted) ||
                          !dl_is_dns_label(space->text))) {
        return fail(r, space, "metadata.namespace", "must be a DNS label");
    }
    snprintf(r->spec->name, sizeof r->spec->name, "%s", name->text);
    snprintf(r->spec->namespace_name, sizeof r->spec->namespace_name, "%s", space != NULL ? space->text : "default");
    return DL_OK;
}

static enum dl_rc read_spec(struct reader *r, const struct dl_node *root)
{
    const struct dl_node *map = dl_node_get(root, "spec");
    if (map == NULL || map->kind != DL_NODE_MAP) {
        return fail(r, map != NULL ? map : root, "spec", "a mapping is required");
    }
    struct scope scope = {dl_spec_fields, dl_spec_field_count, r->spec, r->seen, "spec"};
    enum dl_rc rc = set_defaults(dl_spec_fields, dl_spec_field_count, r->spec, r->err);
    if (rc == DL_OK) {
        rc = read_map(r, &scope, "", map);
    }
    for (size_t i = 0; rc == DL_OK && i < dl_spec_field_count; i++) {
        if ((dl_spec_fields[i].flags & DL_FIELD_REQUIRED) != 0 && !r->seen[i]) {
            rc = dl_err_set(r->err, DL_EINVAL, "%s:%u: spec.%s is required: %s", r->origin, map->line,
                            dl_spec_fields[i].path, dl_spec_fields[i].text);
        }
    }
    return rc;
}

static bool was_seen(const struct reader *r, const char *path)
{
    for (size_t i = 0; i < dl_spec_field_count; i++) {
        if (strcmp(dl_spec_fields[i].path, path) == 0) {
            return r->seen[i];
        }
    }
    return false;
}

static enum dl_rc parse(const char *text, size_t size, const char *origin, bool is_stored, struct dl_spec **out,
                        struct dl_spec_warnings *warnings, struct dl_err *err)
{
    if (size > DL_SPEC_BYTES_MAX) {
        return dl_err_set(err, DL_EINVAL, "%s: %zu bytes; a manifest has at most %d", origin, size, DL_SPEC_BYTES_MAX);
    }
    struct dl_err unused = {.rc = DL_OK};
    struct dl_node *root = NULL;
    err = err != NULL ? err : &unused;
    enum dl_rc rc = dl_yaml_parse(text, size, origin, &root, err);
    if (rc != DL_OK) {
        return rc;
    }
    if (root == NULL) {
        return dl_err_set(err, DL_EINVAL, "%s: empty; a %s manifest is expected", origin, DL_SPEC_KIND);
    }
    struct reader r = {.origin = origin, .err = err, .is_stored = is_stored, .spec = calloc(1, sizeof *r.spec)};
    if (r.spec == NULL) {
        dl_node_free(root);
        return dl_err_set(err, DL_ENOMEM, "%s: no memory for the job", origin);
    }
    rc = read_head(&r, root);
    if (rc == DL_OK) {
        rc = read_spec(&r, root);
    }
    dl_node_free(root);
    if (rc == DL_OK) {
        struct dl_spec_warnings ignored = {.count = 0};
        warnings = warnings != NULL ? warnings : &ignored;
        warnings->count = 0;
        rc = dl_spec_check(r.spec, was_seen(&r, "learners.replicas"), warnings, err);
        if (rc != DL_OK) {
            rc = dl_err_wrap(err, "%s", origin);
        }
    }
    if (rc != DL_OK) {
        dl_spec_free(r.spec);
        return rc;
    }
    *out = r.spec;
    return DL_OK;
}

enum dl_rc dl_spec_parse(const char *text, size_t size, const char *origin, struct dl_spec **out,
                         struct dl_spec_warnings *warnings, struct dl_err *err)
{
    return parse(text, size, origin, false, out, warnings, err);
}

enum dl_rc dl_spec_parse_stored(const char *text, size_t size, const char *origin, struct dl_spec **out,
                                struct dl_err *err)
{
    return parse(text, size, origin, true, out, NULL, err);
}

/* --- files --- */

/* Data paths as seen from the manifest's folder. */
static enum dl_rc make_absolute(struct dl_spec *spec, const char *path, struct dl_err *err)
{
    DL_AUTO_FREE char *real = realpath(path, NULL);
    char *slash = real != NULL ? strrchr(real, '/') : NULL;
    if (slash == NULL) {
        return dl_err_errno(err, DL_EIO, errno, "%s: cannot tell its folder", path);
    }
    *slash = 0;
    for (uint32_t i = 0; i < spec->training.data.path_count; i++) {
        char *place = spec->training.data.paths[i];
        if (place[0] != '/') {
            char absolute[PATH_MAX + DL_SPEC_TEXT_MAX];
            int length = snprintf(absolute, sizeof absolute, "%s/%s", real, place);
            if (length >= DL_SPEC_TEXT_MAX) {
                return dl_err_set(err, DL_EINVAL, "%s: spec.training.data.paths: '%s' is longer than %d characters",
                                  path, absolute, DL_SPEC_TEXT_MAX - 1);
            }
            memcpy(place, absolute, (size_t)length + 1);
        }
    }
    return DL_OK;
}

/* At most one byte more than a manifest may have, so that a longer file is seen to be longer. */
static enum dl_rc read_file(const char *path, char *text, size_t *size, struct dl_err *err)
{
    FILE *file = fopen(path, "rbe");
    if (file == NULL) {
        return dl_err_errno(err, errno == ENOENT ? DL_ENOTFOUND : DL_EIO, errno, "job manifest %s: cannot be opened",
                            path);
    }
    *size = fread(text, 1, DL_SPEC_BYTES_MAX + 1, file);
    int read_errno = ferror(file) ? errno : 0;
    fclose(file);
    return read_errno == 0 ? DL_OK : dl_err_errno(err, DL_EIO, read_errno, "job manifest %s: cannot be read", path);
}

enum dl_rc dl_spec_load(const char *path, struct dl_spec **out, struct dl_spec_warnings *warnings, struct dl_err *err)
{
    DL_AUTO_FREE char *text = malloc(DL_SPEC_BYTES_MAX + 1);
    if (text == NULL) {
        return dl_err_set(err, DL_ENOMEM, "job manifest %s: no memory to read it", path);
    }
    size_t size = 0;
    enum dl_rc rc = read_file(path, text, &size, err);
    struct dl_spec *spec = NULL;
    if (rc == DL_OK) {
        rc = dl_spec_parse(text, size, path, &spec, warnings, err);
    }
    if (rc == DL_OK) {
        rc = make_absolute(spec, path, err);
    }
    if (rc != DL_OK) {
        dl_spec_free(spec);
        return rc;
    }
    *out = spec;
    return DL_OK;
}

void dl_spec_free(struct dl_spec *spec)
{
    if (spec == NULL) {
        return;
    }
    for (uint32_t i = 0; i < spec->learners.pool_count; i++) {
        free(spec->learners.pools[i].template_json);
    }
    free(spec->syncer.template_json);
    free(spec);
}
