/* op_control: commands to a run from outside, over a Unix socket `control.sock` in the run folder (mode 0600).
 *
 * One line in, one answer out, then the connection ends:
 *     status                     the view as JSON
 *     scale N                    N learners from now on
 *     kill learner ID [SIGNAL]   a signal to a learner's process (default KILL; names as of kill(1), or numbers)
 *     kill syncer I [SIGNAL]
 *     stop                       as Ctrl-C
 * An answer other than `status`'s begins with "ok" or "error: ". Up to OP_CONTROL_CLIENTS_MAX at a time, each with a
 * bound on time and bytes; nobody is waited for. One thread. Layer operator/local. */
#ifndef OP_LOCAL_CONTROL_H
#define OP_LOCAL_CONTROL_H

#include <curl/curl.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "operator/local/rundir.h"

#define OP_CONTROL_CLIENTS_MAX 8
#define OP_CONTROL_LINE_MAX 256
#define OP_CONTROL_TIMEOUT_NS INT64_C(5000000000)

/* Answers one command line; returns the text, malloc'ed, NULL when there is no memory. */
typedef char *(*op_control_answer)(void *context, const char *line);

struct op_control {
    int listener;
    struct op_control_client {
        int fd; /* -1: free. */
        int64_t until_ns;
        char line[OP_CONTROL_LINE_MAX];
        size_t line_used;
        char *answer; /* Being sent. */
        size_t answer_used, answer_bytes;
    } clients[OP_CONTROL_CLIENTS_MAX];
};

DL_MUST_CHECK enum dl_rc op_control_open(struct op_control *control, const struct op_rundir *dir, struct dl_err *err);
void op_control_close(struct op_control *control, const struct op_rundir *dir);

/* Fills up to 1 + OP_CONTROL_CLIENTS_MAX entries to wait on; returns how many. */
unsigned int op_control_fds(const struct op_control *control, struct curl_waitfd *fds);

/* Accepts, reads, answers, sends: whatever can be done without waiting. */
void op_control_turn(struct op_control *control, int64_t now_ns, op_control_answer answer, void *context);

/* The other side: sends `line`, returns the answer (the caller's to free). DL_ENOTFOUND: nobody listens there. */
DL_MUST_CHECK enum dl_rc op_control_ask(const struct op_rundir *dir, const char *line, char **answer,
                                        struct dl_err *err);

/* "KILL", "SIGTERM", "9": the signal's number; 0 when it is none. */
int op_signal_parse(const char *text);

#endif
