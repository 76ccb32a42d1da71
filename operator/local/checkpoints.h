/* op_checkpoints: which of a run's checkpoints is meant. Pure. Layer operator/local. */
#ifndef OP_LOCAL_CHECKPOINTS_H
#define OP_LOCAL_CHECKPOINTS_H

#include "common/err.h"

#define OP_CHECKPOINT_ID_BYTES 64

/* The id, in `json` (what a syncer answers to GET /checkpoints), of the checkpoint with the id or the name `wanted`; an id goes
 * before a name. DL_ENOTFOUND: there is none. DL_EINVAL: several have this name; the error lists their ids. DL_EPROTO: no such
 * answer. */
DL_MUST_CHECK enum dl_rc op_checkpoint_find(const char *json, const char *wanted, char id[OP_CHECKPOINT_ID_BYTES],
                                            struct dl_err *err);

#endif
