/* op_preflight: everything that can be found wrong before anything of a run is made. Does I/O; one thread. */
#ifndef OP_LOCAL_PREFLIGHT_H
#define OP_LOCAL_PREFLIGHT_H

#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"
#include "operator/local/rundir.h"

struct op_programs {
    char syncer[OP_PATH_MAX];
    char worker[OP_PATH_MAX];
};

/* The programs in `bin_dir`, or beside this one when it is NULL. DL_ENOTFOUND names what is missing where. */
DL_MUST_CHECK enum dl_rc op_programs_find(const char *bin_dir, struct op_programs *out, struct dl_err *err);

/* One program beside this one. */
DL_MUST_CHECK enum dl_rc op_program_find(const char *name, char out[OP_PATH_MAX], struct dl_err *err);

/* Data files readable and not empty, memory enough, fixed ports free, job not suspended, quorum within learners.max.
 * DL_EINVAL and others: the text says what, and what to do. */
DL_MUST_CHECK enum dl_rc op_preflight(const struct dl_spec *spec, struct dl_err *err);

/* Memory that new processes of this control group can have, in bytes. */
uint64_t op_memory_available(void);

#endif
