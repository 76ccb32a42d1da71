/* op_export: diloco-export, run over all state folders of a run. Waits for its end; one thread. Layer operator/local. */
#ifndef OP_LOCAL_EXPORTER_H
#define OP_LOCAL_EXPORTER_H

#include "common/err.h"
#include "operator/local/rundir.h"

/* `more`: its further arguments, NULL at the end. Its exit code, or -1: it could not be run (`err`). */
int op_export_run(const struct op_rundir *dir, const char *const *more, struct dl_err *err);

#define OP_CHECKPOINT_BYTES_MAX 2048 /* Its id, name or vector clock. */

/* Takes all shards back to the checkpoint `wanted`; NULL: to that of a roll-back that was cut off, since its shards may stand
 * apart. `to`: which; untouched: none. The caller holds the folder. DL_EINVAL (there is none such, nothing was changed), DL_EIO. */
DL_MUST_CHECK enum dl_rc op_export_roll_back(const struct op_rundir *dir, const char *wanted,
                                             char to[OP_CHECKPOINT_BYTES_MAX], struct dl_err *err);

#endif
