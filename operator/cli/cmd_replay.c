/* diloco replay: hands over to the program diloco-replay beside this one. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/exit_codes.h"
#include "operator/cli/cli.h"
#include "operator/local/preflight.h"
#include "operator/local/rundir.h"

/* Whether a run is named among the options of diloco-replay, or its help is asked for. */
static bool names_a_run(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--until") == 0 || strcmp(argv[i], "--from") == 0 || strcmp(argv[i], "--threads") == 0) {
            i++; /* Its value. */
        } else if (argv[i][0] != '-' || strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            return true;
        }
    }
    return false;
}

int op_cmd_replay(int argc, char **argv)
{
    struct dl_err err = {.text = ""};
    char program[OP_PATH_MAX];
    struct op_rundir dir;
    const char **out = calloc((size_t)argc + 3, sizeof *out);
    if (out == NULL) {
        return DL_EXIT_FAILED;
    }
    enum dl_rc rc = op_program_find("diloco-replay", program, &err);
    int used = 0;
    out[used++] = program;
    if (rc == DL_OK && !names_a_run(argc, argv)) {
        rc = op_rundir_open(NULL, &dir, &err);
        out[used++] = dir.path;
    }
    for (int i = 1; i < argc; i++) {
        out[used++] = argv[i];
    }
    if (rc == DL_OK) {
        execv(program, (char *const *)out);
        dl_err_set(&err, DL_EIO, "cannot execute %s", program);
    }
    free(out);
    return op_cli_fail("replay", &err);
}
