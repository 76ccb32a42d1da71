#include "operator/local/checkpoints.h"

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define IDS_BYTES 256 /* Of those that the error names. */

static bool is_called(const cJSON *checkpoint, const char *key, const char *wanted)
{
    const char *value = cJSON_GetStringValue(cJSON_GetObjectItem(checkpoint, key));
    return value != NULL && wanted[0] != 0 && strcmp(value, wanted) == 0;
}

/* How many are called so; `ids`: theirs, as far as they fit; `first`: the first one's. */
static unsigned find(const cJSON *all, const char *key, const char *wanted, char ids[IDS_BYTES],
                     char first[OP_CHECKPOINT_ID_BYTES])
{
    unsigned count = 0;
    ids[0] = 0;
    for (const cJSON *one = all->child; one != NULL; one = one->next) {
        const char *id = cJSON_GetStringValue(cJSON_GetObjectItem(one, "id"));
        if (id == NULL || strlen(id) >= OP_CHECKPOINT_ID_BYTES || !is_called(one, key, wanted)) {
            continue;
        }
        size_t used = strlen(ids);
        snprintf(ids + used, IDS_BYTES - used, "%s%s", count == 0 ? "" : ", ", id);
        if (count++ == 0) {
            snprintf(first, OP_CHECKPOINT_ID_BYTES, "%s", id);
        }
    }
    return count;
}

enum dl_rc op_checkpoint_find(const char *json, const char *wanted, char id[OP_CHECKPOINT_ID_BYTES], struct dl_err *err)
{
    char ids[IDS_BYTES], found[OP_CHECKPOINT_ID_BYTES] = "";
    cJSON *root = cJSON_Parse(json);
    const cJSON *all = cJSON_GetObjectItem(root, "checkpoints");
    if (!cJSON_IsArray(all)) {
        cJSON_Delete(root);
        return dl_err_set(err, DL_EPROTO, "the syncer's list of checkpoints cannot be read");
    }
    unsigned count = find(all, "id", wanted, ids, found);
    count = count > 0 ? count : find(all, "name", wanted, ids, found);
    cJSON_Delete(root);
    if (count > 1) {
        return dl_err_set(err, DL_EINVAL, "%u checkpoints are called '%.64s'; say by its id which: %s", count, wanted,
                          ids);
    }
    if (count == 0) {
        return dl_err_set(err, DL_ENOTFOUND,
                          "there is no such checkpoint as '%.64s': `diloco checkpoint RUN --list` says which", wanted);
    }
    memcpy(id, found, OP_CHECKPOINT_ID_BYTES);
    return DL_OK;
}
