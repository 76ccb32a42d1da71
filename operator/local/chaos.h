/* op_chaos: timed disturbances of a run, by progress of its budget: "kill@35%:2,join@55%".
 *
 *     kill@P[:ID]         SIGKILL to learner ID (default: the highest id that runs); also spelled kill-learner
 *     kill-syncer@P[:I]   SIGKILL to shard I (default 0)
 *     join@P[:N]          N more learners (default 1)
 *     leave@P[:N]         N learners fewer (default 1)
 *
 * Pure; owned by one thread. */
#ifndef OP_LOCAL_CHAOS_H
#define OP_LOCAL_CHAOS_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"

#define OP_CHAOS_MAX 32

enum op_chaos_type { OP_CHAOS_KILL, OP_CHAOS_KILL_SYNCER, OP_CHAOS_JOIN, OP_CHAOS_LEAVE };

struct op_chaos_action {
    enum op_chaos_type type;
    double at; /* Share of the budget, 0..1. */
    bool has_argument;
    uint32_t argument;
};

struct op_chaos {
    uint32_t count, done;
    struct op_chaos_action actions[OP_CHAOS_MAX]; /* By time; equal times as written. */
};

/* DL_EINVAL: the text quotes the part that is wrong and says what is allowed. Checks ids and counts against the spec.
 */
DL_MUST_CHECK enum dl_rc op_chaos_parse(const char *text, const struct dl_spec *spec, struct op_chaos *out,
                                        struct dl_err *err);

/* The next action that is due at `progress` (0..1), or NULL; it is taken: the next call gives the one after it. */
const struct op_chaos_action *op_chaos_take(struct op_chaos *chaos, double progress);

#endif
