/* op_shards: the syncers of a run, asked one by one over HTTP with the run's token. Blocking, with bounds; any thread, one at
 * a time. Layer operator/local. */
#ifndef OP_LOCAL_SHARDS_H
#define OP_LOCAL_SHARDS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "operator/local/rundir.h"

/* How many shards the run has, by its folders. */
uint32_t op_shards_count(const struct op_rundir *dir);

/* GET `path`, or POST it when `post`. DL_OK: the answer's text (`*body`, malloc'ed) and a status of 2xx. DL_EINVAL: another
 * status; the error has the syncer's words. DL_ENET: it does not answer. */
DL_MUST_CHECK enum dl_rc op_shard_ask(const struct op_rundir *dir, uint32_t shard, bool post, const char *path,
                                      char **body, struct dl_err *err);

#endif
