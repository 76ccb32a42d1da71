#include "sim/replay/folders.h"

#include <stdio.h>
#include <unistd.h>

static bool holds_tape(const char *folder)
{
    char path[SIM_PATH_MAX + 16];
    snprintf(path, sizeof path, "%s/tape.db", folder);
    return access(path, R_OK) == 0;
}

enum dl_rc sim_folders_find(char *const *arguments, uint32_t count, struct sim_folders *out, struct dl_err *err)
{
    out->count = 0;
    for (uint32_t i = 0; i < count && out->count < DL_SPEC_SHARDS_MAX; i++) {
        uint32_t before = out->count;
        if (snprintf(out->paths[before], SIM_PATH_MAX, "%s", arguments[i]) >= SIM_PATH_MAX - 64) {
            return dl_err_set(err, DL_EINVAL, "the path %.100s... is too long", arguments[i]);
        }
        out->count += holds_tape(out->paths[before]) ? 1 : 0;
        bool more = out->count == before;
        for (uint32_t s = 0; more && out->count < DL_SPEC_SHARDS_MAX; s++) {
            snprintf(out->paths[out->count], SIM_PATH_MAX, "%.*s/state/shard-%u", SIM_PATH_MAX - 64, arguments[i], s);
            more = holds_tape(out->paths[out->count]);
            out->count += more ? 1 : 0;
        }
        if (out->count == before) {
            return dl_err_set(err, DL_ENOTFOUND,
                              "%s is neither a run folder (state/shard-0/tape.db) nor a shard's state folder (tape.db)",
                              arguments[i]);
        }
    }
    return DL_OK;
}
