/* op_status: one view of a job from the /status of each of its syncer shards.
 *
 * A shard reports on its own fragments only, yet every learner is connected to every shard. Rules of combination, so
 * that one shard's view combined with nothing is itself, and the order of shards does not matter:
 *
 *   sum       round (merged rounds), verdicts, bytesIn, bytesOut, residentBytes, pushesMerged of a learner, fragments
 *   maximum   step, tokens, learnersWanted, joins, leaves, refusals, graceSeconds, behind and waited of a learner,
 * times (the slowest shard decides the pace), quorum.need minimum   connected and quorum.have (a learner counts once
 * every shard has it), goodput, uptimeSeconds, the phase's rank: the job is only as far as its least advanced shard
 *   mean      tokensMerged, weighted by the shards' fragment counts
 *   the shard that has heard of the most tokens   loss, message of equal phases
 *   validation   first: the one with the fewest tokens; last: the one with the most
 *   data      of the shard that keeps the ledger (shard 0)
 *   result    present once every shard has one; the worst of failed, timeout, requested, succeeded
 *
 * Shards that do not answer are left out and counted: `shards_heard` of `shards`.
 *
 * Pure; any thread; layer operator/reconcile. */
#ifndef OP_RECONCILE_STATUS_H
#define OP_RECONCILE_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"
#include "common/wire.h"
#include "operator/reconcile/json.h"

#define OP_STATUS_LEARNERS_MAX 4096 /* Entries kept; a shard also lists learners that left. */
#define OP_STATUS_RESULT_NONE (-1)

enum op_status_phase { /* In order of progress. */
                       OP_STATUS_UNREACHABLE,
                       OP_STATUS_WAITING_FOR_LEARNERS,
                       OP_STATUS_SEEDING,
                       OP_STATUS_WAITING_FOR_QUORUM,
                       OP_STATUS_WARMUP,
                       OP_STATUS_TRAINING,
                       OP_STATUS_FINISHING,
                       OP_STATUS_ENDED,
                       OP_STATUS_PHASE_COUNT
};
const char *op_status_phase_name(enum op_status_phase phase);

enum op_learner_link { OP_LINK_LEFT, OP_LINK_LOST, OP_LINK_CONNECTED }; /* The least over the shards is shown. */
const char *op_learner_link_name(enum op_learner_link link);

struct op_learner_status {
    uint32_t learner;
    char uid[DL_WIRE_UID_MAX];
    uint64_t admission; /* Of one shard; 0 when several shards' numbers were combined. */
    enum op_learner_link link;
    uint64_t step, tokens;
    double tokens_per_second, step_seconds, loss; /* Loss NaN: unknown. */
    uint64_t behind;                              /* Versions, the most over fragments. */
    double heard_seconds_ago, waited_seconds;
    uint64_t pushes_merged;
    uint32_t state_from; /* Learner whose state it took over, plus 1; 0: nobody's. */
    uint32_t shards;     /* Shards that list it. */
};

struct op_fragment_status {
    uint32_t fragment;
    uint64_t version, round;
    bool open;
    uint32_t have, need, asked;
};

struct op_validation {
    bool known;
    double loss;
    uint64_t tokens, round;
};

struct op_data_status { /* The job's data, in sequences. */
    bool known;
    uint64_t positions, counted, leased, queued;
};

enum { OP_LEAVE_KINDS = 5, OP_TIME_KINDS = 6 };

struct op_job_status {
    char job[DL_SPEC_NAME_MAX];
    uint32_t shard; /* Of a single shard's view. */
    uint32_t shards, shards_heard;
    enum op_status_phase phase;
    char message[DL_WIRE_TEXT_MAX];
    uint64_t round, step, tokens, token_budget;
    double tokens_merged;
    double loss, goodput; /* NaN: unknown. */
    uint32_t quorum_have, quorum_need;
    uint32_t learners_wanted, connected;
    struct op_validation validation_first, validation_last;
    struct op_data_status data;
    uint64_t verdicts[DL_VERDICT_COUNT];
    uint64_t joins, leaves[OP_LEAVE_KINDS], refusals;
    double times[OP_TIME_KINDS]; /* Seconds. Names of both: status.c. */
    double grace_seconds;
    uint64_t bytes_in, bytes_out, resident_bytes;
    double uptime_seconds;
    int result; /* enum dl_stop_result, or OP_STATUS_RESULT_NONE. */
    uint32_t learner_count, fragment_count;
    struct op_learner_status *learners;   /* Ascending learner id; within one, newest admission first. */
    struct op_fragment_status *fragments; /* Ascending. */
};

void op_status_init(struct op_job_status *status);    /* Nothing heard yet. */
void op_status_release(struct op_job_status *status); /* Frees what it holds and makes it as after init. */

/* Reads one shard's /status, or a combined one. Unknown members are ignored, missing ones are zero or unknown. `*out`
 * must be initialised; its former content is released on success. DL_EINVAL: not an object of that kind. */
DL_MUST_CHECK enum dl_rc op_status_parse(const char *text, size_t size, struct op_job_status *out, struct dl_err *err);
DL_MUST_CHECK enum dl_rc op_status_parse_tree(const cJSON *tree, struct op_job_status *out, struct dl_err *err);

/* Combines the views of `count` shards; NULL for one that has not been heard. `*out` must be initialised and is
 * replaced. */
DL_MUST_CHECK enum dl_rc op_status_combine(const struct op_job_status *const *shards, uint32_t count,
                                           struct op_job_status *out, struct dl_err *err);

/* Newest entry of a learner id, or NULL. Borrowed. */
const struct op_learner_status *op_status_learner(const struct op_job_status *status, uint32_t learner);

/* Writes the members of the view into an object that `out` has open, in the names of /status. */
void op_status_put(const struct op_job_status *status, struct op_json_out *out);

/* "succeeded", "requested", "timeout", "failed" and back; OP_STATUS_RESULT_NONE for anything else. */
const char *op_status_result_name(int result);
int op_status_result_parse(const char *name);

#endif
