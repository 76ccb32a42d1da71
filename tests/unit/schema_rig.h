/* What the tests of the custom resource's schema share. */
#ifndef DL_TESTS_SCHEMA_RIG_H
#define DL_TESTS_SCHEMA_RIG_H

#include <stdio.h>
#include <string.h>

#include "common/yaml.h"

/* The schema at a dotted path below `schema`, or NULL. Borrowed. */
static inline const struct dl_node *property(const struct dl_node *schema, const char *path)
{
    char part[64];
    while (schema != NULL && *path != 0) {
        size_t length = strcspn(path, ".");
        snprintf(part, sizeof part, "%.*s", (int)length, path);
        schema = dl_node_get(dl_node_get(schema, "properties"), part);
        path += length + (path[length] == '.');
    }
    return schema;
}

#endif
