#include "operator/local/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/mem.h"

/* Between fork and exec only async-signal-safe functions are called. */
static void become(char *const *argv, int output, int errors, pid_t parent)
{
    setpgid(0, 0);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    /* Dies with the thread that forked; when that is gone already, the wish came too late. */
    if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || getppid() != parent) {
        return;
    }
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null < 0 || dup2(null, STDIN_FILENO) < 0 || dup2(output, STDOUT_FILENO) < 0 ||
        dup2(errors, STDERR_FILENO) < 0) {
        return;
    }
    execv(argv[0], argv);
}

enum dl_rc op_process_start(char *const *argv, const char *out_path, const char *err_path, pid_t *pid,
                            struct dl_err *err)
{
    DL_AUTO_FD int output = open(out_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    DL_AUTO_FD int errors = open(err_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (output < 0 || errors < 0) {
        return dl_err_errno(err, DL_EIO, errno, "open the log %s", err_path);
    }
    int report[2];
    if (pipe2(report, O_CLOEXEC) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "start %s", argv[0]);
    }
    pid_t parent = getpid();
    pid_t child = fork();
    if (child == 0) {
        become(argv, output, errors, parent);
        int number = errno;
        ssize_t written = write(report[1], &number, sizeof number);
        (void)written;
        _exit(127);
    }
    int fork_errno = errno;
    close(report[1]);
    if (child < 0) {
        close(report[0]);
        return dl_err_errno(err, DL_ENOMEM, fork_errno, "start %s", argv[0]);
    }
    /* Ends when exec closes the pipe: at once in any case. */
    int number = 0;
    ssize_t got;
    do {
        got = read(report[0], &number, sizeof number);
    } while (got < 0 && errno == EINTR);
    close(report[0]);
    if (got == (ssize_t)sizeof number) {
        waitpid(child, NULL, 0);
        enum dl_rc rc = number == ENOENT ? DL_ENOTFOUND : (number == EACCES ? DL_EDENIED : DL_EIO);
        return dl_err_errno(err, rc, number, "start %s", argv[0]);
    }
    *pid = child;
    return DL_OK;
}
