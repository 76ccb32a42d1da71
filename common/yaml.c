#include "common/yaml.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "common/mem.h"

struct builder {
    yaml_parser_t parser;
    const char *origin;
    uint32_t nodes;
    struct dl_err *err;
};

void dl_node_free(struct dl_node *node)
{
    while (node != NULL) {
        struct dl_node *next = node->next;
        dl_node_free(node->first);
        free(node->key);
        free(node->text);
        free(node);
        node = next;
    }
}

static enum dl_rc syntax_error(struct builder *b)
{
    const char *problem = b->parser.problem != NULL ? b->parser.problem : "syntax error";
    if (b->parser.error == YAML_MEMORY_ERROR) {
        return dl_err_set(b->err, DL_ENOMEM, "%s: no memory to parse it", b->origin);
    }
    return dl_err_set(b->err, DL_EINVAL, "%s:%zu: not valid YAML: %s%s%s", b->origin, b->parser.problem_mark.line + 1,
                      problem, b->parser.context != NULL ? " " : "",
                      b->parser.context != NULL ? b->parser.context : "");
}

static enum dl_rc next_event(struct builder *b, yaml_event_t *event)
{
    return yaml_parser_parse(&b->parser, event) ? DL_OK : syntax_error(b);
}

static enum dl_rc node_new(struct builder *b, enum dl_node_kind kind, const yaml_event_t *event, struct dl_node **out)
{
    uint32_t line = (uint32_t)event->start_mark.line + 1;
    if (++b->nodes > DL_YAML_NODES_MAX) {
        return dl_err_set(b->err, DL_EINVAL, "%s:%u: more than %d values", b->origin, line, DL_YAML_NODES_MAX);
    }
    struct dl_node *node = calloc(1, sizeof *node);
    if (node == NULL) {
        return dl_err_set(b->err, DL_ENOMEM, "%s: no memory to parse it", b->origin);
    }
    node->kind = kind;
    node->line = line;
    *out = node;
    return DL_OK;
}

static enum dl_rc refuse_indirection(struct builder *b, const yaml_event_t *event, const yaml_char_t *anchor,
                                     const yaml_char_t *tag)
{
    size_t line = event->start_mark.line + 1;
    if (anchor != NULL) {
        return dl_err_set(b->err, DL_EINVAL,
                          "%s:%zu: anchor '&%s': anchors and aliases are not accepted, write the value out", b->origin,
                          line, (const char *)anchor);
    }
    if (tag != NULL) {
        return dl_err_set(b->err, DL_EINVAL, "%s:%zu: tag '%s': tags are not accepted, remove it", b->origin, line,
                          (const char *)tag);
    }
    return DL_OK;
}

static enum dl_rc build(struct builder *b, const yaml_event_t *event, unsigned depth, struct dl_node **out);

static enum dl_rc build_scalar(struct builder *b, const yaml_event_t *event, struct dl_node **out)
{
    enum dl_rc rc = refuse_indirection(b, event, event->data.scalar.anchor, event->data.scalar.tag);
    if (rc != DL_OK) {
        return rc;
    }
    if (memchr(event->data.scalar.value, 0, event->data.scalar.length) != NULL) {
        return dl_err_set(b->err, DL_EINVAL, "%s:%zu: a zero byte in a string", b->origin, event->start_mark.line + 1);
    }
    struct dl_node *node = NULL;
    rc = node_new(b, DL_NODE_SCALAR, event, &node);
    if (rc != DL_OK) {
        return rc;
    }
    node->quoted = event->data.scalar.style != YAML_PLAIN_SCALAR_STYLE;
    node->text = strdup((const char *)event->data.scalar.value);
    if (node->text == NULL) {
        dl_node_free(node);
        return dl_err_set(b->err, DL_ENOMEM, "%s: no memory to parse it", b->origin);
    }
    *out = node;
    return DL_OK;
}

/* Takes a map's key from `event`; DL_EINVAL when it is no scalar or stands there already. */
static enum dl_rc read_key(struct builder *b, const struct dl_node *map, const yaml_event_t *event, char **key)
{
    size_t line = event->start_mark.line + 1;
    if (event->type != YAML_SCALAR_EVENT) {
        return dl_err_set(b->err, DL_EINVAL, "%s:%zu: a field name is expected here", b->origin, line);
    }
    const char *name = (const char *)event->data.scalar.value;
    const struct dl_node *twin = dl_node_get(map, name);
    if (twin != NULL) {
        return dl_err_set(b->err, DL_EINVAL, "%s:%zu: field '%s' stands there twice, first in line %u", b->origin, line,
                          name, twin->line);
    }
    *key = strdup(name);
    return *key != NULL ? DL_OK : dl_err_set(b->err, DL_ENOMEM, "%s: no memory to parse it", b->origin);
}

/* Reads the children of a map or list up to its end. */
static enum dl_rc build_children(struct builder *b, struct dl_node *parent, unsigned depth)
{
    yaml_event_type_t end = parent->kind == DL_NODE_MAP ? YAML_MAPPING_END_EVENT : YAML_SEQUENCE_END_EVENT;
    struct dl_node **tail = &parent->first;
    for (;;) {
        yaml_event_t event;
        DL_AUTO_FREE char *key = NULL;
        enum dl_rc rc = next_event(b, &event);
        if (rc != DL_OK) {
            return rc;
        }
        if (event.type == end) {
            yaml_event_delete(&event);
            return DL_OK;
        }
        if (parent->kind == DL_NODE_MAP) {
            rc = read_key(b, parent, &event, &key);
            yaml_event_delete(&event);
            if (rc == DL_OK) {
                rc = next_event(b, &event);
            }
            if (rc != DL_OK) {
                return rc;
            }
        }
        struct dl_node *child = NULL;
        rc = build(b, &event, depth + 1, &child);
        yaml_event_delete(&event);
        if (rc != DL_OK) {
            return rc;
        }
        child->key = dl_take(key);
        *tail = child;
        tail = &child->next;
    }
}

static enum dl_rc build(struct builder *b, const yaml_event_t *event, unsigned depth, struct dl_node **out)
{
    size_t line = event->start_mark.line + 1;
    if (depth > DL_YAML_DEPTH_MAX) {
        return dl_err_set(b->err, DL_EINVAL, "%s:%zu: nested deeper than %d levels", b->origin, line,
                          DL_YAML_DEPTH_MAX);
    }
    if (event->type == YAML_SCALAR_EVENT) {
        return build_scalar(b, event, out);
    }
    bool is_map = event->type == YAML_MAPPING_START_EVENT;
    if (!is_map && event->type != YAML_SEQUENCE_START_EVENT) {
        return dl_err_set(b->err, DL_EINVAL, "%s:%zu: anchors and aliases are not accepted, write the value out",
                          b->origin, line);
    }
    enum dl_rc rc =
        is_map ? refuse_indirection(b, event, event->data.mapping_start.anchor, event->data.mapping_start.tag)
               : refuse_indirection(b, event, event->data.sequence_start.anchor, event->data.sequence_start.tag);
    if (rc != DL_OK) {
        return rc;
    }
    struct dl_node *node = NULL;
    rc = node_new(b, is_map ? DL_NODE_MAP : DL_NODE_LIST, event, &node);
    if (rc != DL_OK) {
        return rc;
    }
    rc = build_children(b, node, depth);
    if (rc != DL_OK) {
        dl_node_free(node);
        return rc;
    }
    *out = node;
    return DL_OK;
}

static enum dl_rc build_document(struct builder *b, struct dl_node **out)
{
    bool seen = false;
    for (;;) {
        yaml_event_t event;
        enum dl_rc rc = next_event(b, &event);
        if (rc != DL_OK) {
            return rc;
        }
        yaml_event_type_t type = event.type;
        bool content = type == YAML_SCALAR_EVENT || type == YAML_MAPPING_START_EVENT ||
                       type == YAML_SEQUENCE_START_EVENT || type == YAML_ALIAS_EVENT;
        if (content) {
            struct dl_node *root = NULL;
            rc = build(b, &event, 0, &root);
            if (rc == DL_OK && dl_node_is_null(root)) {
                dl_node_free(root);
            } else if (rc == DL_OK && seen) {
                rc = dl_err_set(b->err, DL_EINVAL, "%s:%u: a second document; put one job in a file", b->origin,
                                root->line);
                dl_node_free(root);
            } else if (rc == DL_OK) {
                *out = root;
                seen = true;
            }
        }
        yaml_event_delete(&event);
        if (rc != DL_OK || type == YAML_STREAM_END_EVENT) {
            return rc;
        }
    }
}

enum dl_rc dl_yaml_parse(const char *text, size_t size, const char *origin, struct dl_node **out, struct dl_err *err)
{
    struct builder b = {.origin = origin, .err = err};
    if (!yaml_parser_initialize(&b.parser)) {
        return dl_err_set(err, DL_ENOMEM, "%s: no memory to parse it", origin);
    }
    yaml_parser_set_input_string(&b.parser, (const unsigned char *)text, size);
    struct dl_node *root = NULL;
    enum dl_rc rc = build_document(&b, &root);
    yaml_parser_delete(&b.parser);
    if (rc != DL_OK) {
        dl_node_free(root);
        return rc;
    }
    *out = root;
    return DL_OK;
}

const struct dl_node *dl_node_get(const struct dl_node *map, const char *key)
{
    if (map == NULL || map->kind != DL_NODE_MAP) {
        return NULL;
    }
    for (const struct dl_node *child = map->first; child != NULL; child = child->next) {
        if (strcmp(child->key, key) == 0) {
            return child;
        }
    }
    return NULL;
}

bool dl_node_is_null(const struct dl_node *node)
{
    return node->kind == DL_NODE_SCALAR && !node->quoted &&
           (node->text[0] == 0 || strcmp(node->text, "~") == 0 || strcmp(node->text, "null") == 0);
}

void dl_json_string(struct dl_buf *out, const char *text)
{
    dl_buf_append(out, "\"", 1);
    for (const char *c = text; *c != 0; c++) {
        if (*c == '"' || *c == '\\') {
            dl_buf_printf(out, "\\%c", *c);
        } else if ((unsigned char)*c < 0x20) {
            dl_buf_printf(out, "\\u%04x", (unsigned)(unsigned char)*c);
        } else {
            dl_buf_append(out, c, 1);
        }
    }
    dl_buf_append(out, "\"", 1);
}

/* JSON's own grammar of numbers: -?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)? */
static bool is_json_number(const char *s)
{
    s += *s == '-';
    if (*s == '0') {
        s++;
    } else if (isdigit((unsigned char)*s)) {
        s += strspn(s, "0123456789");
    } else {
        return false;
    }
    if (*s == '.') {
        size_t digits = strspn(s + 1, "0123456789");
        if (digits == 0) {
            return false;
        }
        s += 1 + digits;
    }
    if (*s == 'e' || *s == 'E') {
        s += 1 + (s[1] == '+' || s[1] == '-');
        size_t digits = strspn(s, "0123456789");
        if (digits == 0) {
            return false;
        }
        s += digits;
    }
    return *s == 0;
}

bool dl_scalar_is_text(const char *text, bool quoted)
{
    static const char *const words[] = {"", "~", "null", "true", "false"};
    for (size_t i = 0; !quoted && i < DL_COUNT_OF(words); i++) {
        if (strcmp(text, words[i]) == 0) {
            return false;
        }
    }
    return quoted || !is_json_number(text);
}

static void scalar_to_json(const struct dl_node *node, struct dl_buf *out)
{
    if (dl_node_is_null(node)) {
        dl_buf_puts(out, "null");
    } else if (dl_scalar_is_text(node->text, node->quoted)) {
        dl_json_string(out, node->text);
    } else {
        dl_buf_puts(out, node->text);
    }
}

void dl_node_to_json(const struct dl_node *node, struct dl_buf *out)
{
    if (node->kind == DL_NODE_SCALAR) {
        scalar_to_json(node, out);
        return;
    }
    bool is_map = node->kind == DL_NODE_MAP;
    dl_buf_puts(out, is_map ? "{" : "[");
    for (const struct dl_node *child = node->first; child != NULL; child = child->next) {
        if (child != node->first) {
            dl_buf_puts(out, ",");
        }
        if (is_map) {
            dl_json_string(out, child->key);
            dl_buf_puts(out, ":");
        }
        dl_node_to_json(child, out);
    }
    dl_buf_puts(out, is_map ? "}" : "]");
}
