/* The subcommands of `diloco`. Each gets its own arguments (argv[0] is the subcommand) and returns a code of
 * common/exit_codes.h. Errors go to standard error, one line: what was attempted, why it failed, what to do. */
#ifndef OP_CLI_CLI_H
#define OP_CLI_CLI_H

#include <stdbool.h>

#include "common/err.h"

extern bool op_cli_is_kubectl; /* Started as kubectl's plugin: names are those of jobs in a cluster. */

int op_cmd_run(int argc, char **argv);
int op_cmd_check(int argc, char **argv);
int op_cmd_status(int argc, char **argv);
int op_cmd_top(int argc, char **argv);
int op_cmd_scale(int argc, char **argv);
int op_cmd_kill(int argc, char **argv);
int op_cmd_stop(int argc, char **argv);
int op_cmd_replay(int argc, char **argv);
int op_cmd_generate(int argc, char **argv);
int op_cmd_checkpoint(int argc, char **argv);
int op_cmd_export(int argc, char **argv);

/* Prints "diloco <command>: <text>" and returns the exit code that fits `err->rc`. */
int op_cli_fail(const char *command, const struct dl_err *err);

/* Prints a usage error and returns DL_EXIT_USAGE. */
int op_cli_usage(const char *command, const char *fmt, ...) DL_PRINTF(2, 3);

#endif
