#include "operator/kube/map.h"

#include <stdlib.h>
#include <string.h>

#include "common/hash.h"

static uint64_t hash_of(const char *key)
{
    return dl_hash64(key, strlen(key), 0);
}

/* The slot of `key`, or the free one where it belongs. There always is a free slot. */
static struct op_map_slot *find(const struct op_map *map, const char *key, uint64_t hash)
{
    size_t mask = map->capacity - 1;
    for (size_t i = (size_t)hash & mask;; i = (i + 1) & mask) {
        struct op_map_slot *slot = &map->slots[i];
        if (slot->key == NULL || (slot->hash == hash && strcmp(slot->key, key) == 0)) {
            return slot;
        }
    }
}

void op_map_release(struct op_map *map)
{
    for (size_t i = 0; i < map->capacity; i++) {
        free(map->slots[i].key);
    }
    free(map->slots);
    *map = (struct op_map){0};
}

void *op_map_get(const struct op_map *map, const char *key)
{
    return map->count == 0 ? NULL : find(map, key, hash_of(key))->value;
}

static bool grow(struct op_map *map)
{
    struct op_map larger = {.capacity = map->capacity == 0 ? 16 : map->capacity * 2, .count = map->count};
    larger.slots = calloc(larger.capacity, sizeof *larger.slots);
    if (larger.slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < map->capacity; i++) {
        if (map->slots[i].key != NULL) {
            *find(&larger, map->slots[i].key, map->slots[i].hash) = map->slots[i];
        }
    }
    free(map->slots);
    *map = larger;
    return true;
}

enum dl_rc op_map_put(struct op_map *map, const char *key, void *value, struct dl_err *err)
{
    uint64_t hash = hash_of(key);
    struct op_map_slot *slot = map->capacity == 0 ? NULL : find(map, key, hash);
    if (slot == NULL || slot->key == NULL) {
        char *copy = strdup(key);
        if (copy == NULL || (map->count + 1 > map->capacity - map->capacity / 4 && !grow(map))) {
            free(copy);
            return dl_err_set(err, DL_ENOMEM, "no memory to remember '%.80s'", key);
        }
        slot = find(map, key, hash);
        *slot = (struct op_map_slot){.key = copy, .hash = hash};
        map->count++;
    }
    slot->value = value;
    return DL_OK;
}

void *op_map_remove(struct op_map *map, const char *key)
{
    if (map->count == 0) {
        return NULL;
    }
    struct op_map_slot *slot = find(map, key, hash_of(key));
    if (slot->key == NULL) {
        return NULL;
    }
    void *value = slot->value;
    free(slot->key);
    *slot = (struct op_map_slot){0};
    map->count--;
    /* What follows without a gap may belong further to the front. */
    size_t mask = map->capacity - 1;
    for (size_t i = ((size_t)(slot - map->slots) + 1) & mask; map->slots[i].key != NULL; i = (i + 1) & mask) {
        struct op_map_slot moved = map->slots[i];
        map->slots[i] = (struct op_map_slot){0};
        *find(map, moved.key, moved.hash) = moved;
    }
    return value;
}

bool op_map_next(const struct op_map *map, size_t *place, const char **key, void **value)
{
    for (; *place < map->capacity; (*place)++) {
        const struct op_map_slot *slot = &map->slots[*place];
        if (slot->key != NULL) {
            *key = slot->key;
            *value = slot->value;
            (*place)++;
            return true;
        }
    }
    return false;
}
