/* op_map: a hash map from text to a pointer (open addressing, linear probing). Keys are copied.
 *
 * Pure apart from memory; owner's thread; layer operator/kube. */
#ifndef OP_KUBE_MAP_H
#define OP_KUBE_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

struct op_map_slot {
    char *key; /* NULL: free. */
    void *value;
    uint64_t hash;
};

/* Zero-initialised is empty. */
struct op_map {
    struct op_map_slot *slots;
    size_t capacity; /* A power of two, or 0. */
    size_t count;
};

void op_map_release(struct op_map *map); /* Frees keys, not values. */

/* The value, or NULL. */
void *op_map_get(const struct op_map *map, const char *key);

/* Puts or replaces; `value` is not NULL. DL_ENOMEM leaves the map as it was. */
DL_MUST_CHECK enum dl_rc op_map_put(struct op_map *map, const char *key, void *value, struct dl_err *err);

/* Removes and returns the value (the caller's); NULL when it was not there. */
void *op_map_remove(struct op_map *map, const char *key);

/* Walks all entries in no particular order: start with *place = 0; false at the end. The map must not change
 * meanwhile, except that the values may. `key` is borrowed. */
bool op_map_next(const struct op_map *map, size_t *place, const char **key, void **value);

#endif
