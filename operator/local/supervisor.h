/* op_supervisor: a job as processes on this machine. The same planner as in a cluster decides; here its changes are
 * processes.
 *
 * One thread, one poll loop: signals through a signalfd, syncers' /status through libcurl, commands through a socket.
 * No child outlives it. Layer operator/local. */
#ifndef OP_LOCAL_SUPERVISOR_H
#define OP_LOCAL_SUPERVISOR_H

#include <stdbool.h>

#include "common/err.h"
#include "common/spec.h"
#include "operator/local/chaos.h"
#include "operator/local/preflight.h"

#define OP_LEARNER_ARGUMENTS_MAX 16

struct op_run_options {
    const struct dl_spec *spec;
    const struct dl_spec_warnings *warnings; /* Repeated in the report. */
    const struct op_programs *programs;
    const char *dir;        /* NULL: the next free runs/<job>-<n>. */
    const char *resume;     /* Goes on in this run folder, with its token and its state; NULL: a new run. */
    const char *checkpoint; /* With `resume`: back to this one first (id, name or vector clock); NULL: no. */
    const char *log_level;  /* Of the processes. */
    const char *results;    /* JSON file of measures, or NULL. */
    const char *sample;     /* Prompt of a sample at the end, or NULL. */
    bool plain;             /* Lines even on a terminal. */
    bool tls;               /* Over TLS, with an authority of its own. A run that was begun so stays so. */
    struct op_chaos chaos;
    const char *learner_arguments[OP_LEARNER_ARGUMENTS_MAX]; /* Appended to each learner's command line. */
    uint32_t learner_argument_count;
};

/* Runs the job to its end and writes its report. `*exit_code` is one of common/exit_codes.h. An error is returned only
 * for what kept the run from being set up or supervised; every process is gone then, too. */
DL_MUST_CHECK enum dl_rc op_supervise(const struct op_run_options *options, int *exit_code, struct dl_err *err);

#endif
