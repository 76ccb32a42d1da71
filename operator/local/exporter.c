#include "operator/local/exporter.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/exit_codes.h"
#include "common/mem.h"
#include "common/spec.h"
#include "operator/local/preflight.h"
#include "operator/local/shards.h"

#define PENDING "rolling-back" /* File of the run folder: the checkpoint, until all shards are there. */

int op_export_run(const struct op_rundir *dir, const char *const *more, struct dl_err *err)
{
    char program[OP_PATH_MAX];
    if (op_program_find("diloco-export", program, err) != DL_OK) {
        return -1;
    }
    uint32_t shards = op_shards_count(dir);
    const char *argv[2 * DL_SPEC_SHARDS_MAX + 16] = {program};
    DL_AUTO_FREE char *paths = calloc(shards + 1, OP_PATH_MAX);
    int used = 1;
    for (uint32_t s = 0; paths != NULL && s < shards; s++) {
        char name[48];
        snprintf(name, sizeof name, "state/shard-%u", s);
        op_rundir_path(dir, name, paths + (size_t)s * OP_PATH_MAX);
        argv[used++] = "--state-dir";
        argv[used++] = paths + (size_t)s * OP_PATH_MAX;
    }
    for (; *more != NULL; more++) {
        argv[used++] = *more;
    }
    fflush(stdout);
    pid_t pid = paths == NULL ? -1 : fork();
    if (pid == 0) {
        execv(program, (char *const *)argv);
        _exit(127);
    }
    int status = 0;
    while (pid > 0 && waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (pid < 0 || !WIFEXITED(status)) {
        dl_err_set(err, DL_EIO, "cannot run %s", program);
        return -1;
    }
    return WEXITSTATUS(status);
}

enum dl_rc op_export_roll_back(const struct op_rundir *dir, const char *wanted, char to[OP_CHECKPOINT_BYTES_MAX],
                               struct dl_err *err)
{
    char path[OP_PATH_MAX];
    DL_AUTO_FREE char *pending = NULL;
    size_t size = 0;
    op_rundir_path(dir, PENDING, path);
    bool is_pending = op_file_read(path, OP_CHECKPOINT_BYTES_MAX - 1, &pending, &size, err) == DL_OK;
    const char *name = wanted != NULL ? wanted : pending;
    if (name == NULL) {
        return DL_OK;
    }
    if (strlen(name) >= OP_CHECKPOINT_BYTES_MAX) {
        return dl_err_set(err, DL_EINVAL, "--checkpoint: no checkpoint has so long a name");
    }
    enum dl_rc rc = op_rundir_write(dir, PENDING, name, 0666, err);
    if (rc != DL_OK) {
        return rc;
    }
    int code = op_export_run(dir, (const char *const[]){"--roll-back", name, NULL}, err);
    if (code == DL_EXIT_OK || (code == DL_EXIT_USAGE && !is_pending)) {
        unlink(path); /* Done, or nothing was begun. */
    }
    if (code != DL_EXIT_OK) {
        return code < 0
                   ? err->rc
                   : dl_err_set(err, code == DL_EXIT_USAGE ? DL_EINVAL : DL_EIO,
                                "resume at checkpoint %s: see above; `diloco checkpoint %s --list` says what there is",
                                name, dir->path);
    }
    memcpy(to, name, strlen(name) + 1);
    return DL_OK;
}
