/* wk_args: the command line of diloco-worker. Pure but for printing the help text. Layer: worker/train. */
#ifndef WK_TRAIN_ARGS_H
#define WK_TRAIN_ARGS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "common/err.h"
#include "common/log.h"

enum wk_command { WK_LEARN = 1, WK_EVALUATE = 2, WK_GENERATE = 4 }; /* Bits: an option belongs to several. */

struct wk_args { /* Texts are borrowed from argv. */
    enum wk_command command;
    bool help, version;
    const char *job, *endpoints, *token_file, *uid, *tls_ca, *tls_cert, *tls_key;
    const char *serve_listen, *serve_address;
    const char *export_folder;
    const char *weights, *prompt;
    int32_t learner;  /* -1: any free one. */
    uint32_t threads; /* 0: not given. */
    enum dl_log_level log_level;
    double step_seconds;  /* Least duration of a step; 0: as fast as it goes. */
    double grace_seconds; /* From a notice to the end of the process. */
    uint32_t tokens, top_k;
    double temperature, top_p;
    uint64_t seed;
};

/* DL_EINVAL: the text says which argument, what is wrong and what to do. With `help` or `version` nothing is required.
 */
DL_MUST_CHECK enum dl_rc wk_args_parse(int argc, char **argv, struct wk_args *args, struct dl_err *err);

void wk_args_help(FILE *out, enum wk_command command); /* Of one command, or 0: of all. */

#endif
