/* sim_difference: where a replay first differs from the tape, as a person wants to read it. Pure but for reading a file. */
#ifndef DL_SIM_REPLAY_DIFFERENCE_H
#define DL_SIM_REPLAY_DIFFERENCE_H

#include <stdbool.h>

#include "common/layout.h"
#include "sim/replay/record.h"

#define SIM_VALUE_MAX 64

struct sim_difference {
    bool found;
    uint64_t round, version;
    uint32_t fragment;
    char what[160];                  /* "weight of learner 2", "values", "entry 17 of learner 1 (uid)". */
    char tensor[DL_TENSOR_NAME_MAX]; /* Empty: not known, or not about values. */
    uint64_t index;                  /* In the tensor. */
    char tape[SIM_VALUE_MAX], replay[SIM_VALUE_MAX];
};

/* Notes a difference, if it is the first; DL_ECONFLICT. */
enum dl_rc sim_differs(struct sim_difference *difference, const struct sim_commit *commit, const char *tape,
                       const char *replay, struct dl_err *err, const char *fmt, ...) DL_PRINTF(6, 7);

/* The values of `commit` have another hash than `hash`: finds the first tensor and value that differ when its file is still
 * kept. DL_ECONFLICT. */
enum dl_rc sim_values_differ(struct sim_difference *difference, const struct sim_record *record,
                             const struct sim_commit *commit, const float *values, uint64_t hash, struct dl_err *err);

#endif
