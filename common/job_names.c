#include "common/job_names.h"

const char *const dl_job_phase_names[DL_JOB_PHASE_COUNT] = {
    "Pending", "Running", "Suspending", "Suspended", "Finishing", "Succeeded", "Stopped", "Failed",
};

const char *const dl_condition_names[DL_CONDITION_COUNT] = {
    "Ready", "Progressing", "Degraded", "Suspended", "Succeeded", "Failed",
};
