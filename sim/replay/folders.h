/* sim_folders: the state folders of a run's shards. Reads directories; one thread. Layer: sim/replay. */
#ifndef DL_SIM_REPLAY_FOLDERS_H
#define DL_SIM_REPLAY_FOLDERS_H

#include "sim/replay/record.h"

struct sim_folders {
    uint32_t count;
    char paths[DL_SPEC_SHARDS_MAX][SIM_PATH_MAX];
};

/* `arguments`: a run folder (state/shard-0, state/shard-1, ...), or the state folder of every shard. DL_ENOTFOUND: no tape
 * there. */
DL_MUST_CHECK enum dl_rc sim_folders_find(char *const *arguments, uint32_t count, struct sim_folders *out,
                                          struct dl_err *err);

#endif
