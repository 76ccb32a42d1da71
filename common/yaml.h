/* dl_yaml: YAML or JSON text as a tree of nodes that know their line. Scalars stay text, so that 64-bit integers never
 * pass through double.
 *
 * Refused with the line: broken syntax, duplicate keys, keys that are not scalars, anchors and aliases (a small file
 * could unfold without bound), explicit tags, more than one document. Pure; any thread. */
#ifndef DL_COMMON_YAML_H
#define DL_COMMON_YAML_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/buf.h"
#include "common/err.h"

#define DL_YAML_DEPTH_MAX 32
#define DL_YAML_NODES_MAX 20000

enum dl_node_kind { DL_NODE_SCALAR, DL_NODE_MAP, DL_NODE_LIST };

struct dl_node {
    enum dl_node_kind kind;
    uint32_t line;                /* From 1. */
    bool quoted;                  /* A scalar in quotes is a string, never null, a number or a bool. */
    char *key;                    /* In a map; else NULL. */
    char *text;                   /* Of a scalar. */
    struct dl_node *first, *next; /* Children in order; sibling. */
};

/* `*out` is NULL for a document without content. The caller frees it with dl_node_free. */
DL_MUST_CHECK enum dl_rc dl_yaml_parse(const char *text, size_t size, const char *origin, struct dl_node **out,
                                       struct dl_err *err);
void dl_node_free(struct dl_node *node);

/* The child of a map under `key`, or NULL. */
const struct dl_node *dl_node_get(const struct dl_node *map, const char *key);
bool dl_node_is_null(const struct dl_node *node);
/* Whether a scalar is text for a reader of YAML: quoted, or nothing that reads as a number, a bool or null. */
bool dl_scalar_is_text(const char *text, bool quoted);

/* Appends the node as JSON; plain scalars that read as JSON numbers, booleans or null stay so, all else is a string. */
void dl_node_to_json(const struct dl_node *node, struct dl_buf *out);
/* Appends `text` as a JSON string with its quotes. */
void dl_json_string(struct dl_buf *out, const char *text);

#endif
