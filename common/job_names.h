/* Names that a job's status carries: phases and types of conditions. The planner and the status writer take them from
 * here, and so does the schema of the custom resource, so that the API server knows every name that is written. Pure;
 * any thread. */
#ifndef DL_COMMON_JOB_NAMES_H
#define DL_COMMON_JOB_NAMES_H

enum { DL_JOB_PHASE_COUNT = 8, DL_CONDITION_COUNT = 6 };

extern const char *const dl_job_phase_names[DL_JOB_PHASE_COUNT]; /* In the order of enum op_job_phase. */

enum dl_condition {
    DL_CONDITION_READY,
    DL_CONDITION_PROGRESSING,
    DL_CONDITION_DEGRADED,
    DL_CONDITION_SUSPENDED,
    DL_CONDITION_SUCCEEDED,
    DL_CONDITION_FAILED,
};
extern const char *const dl_condition_names[DL_CONDITION_COUNT]; /* In the order of enum dl_condition. */

#endif
