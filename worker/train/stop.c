#include "worker/train/stop.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/log.h"
#include "common/mem.h"

static struct {
    atomic_bool asked, at_once;
    int wake_fd; /* Readable once asked; never read. */
    int64_t grace_ns;
    sigset_t signals;
    pthread_t thread;
} stop = {.wake_fd = -1};

static void *watch(void *context)
{
    (void)context;
    int number;
    while (sigwait(&stop.signals, &number) != 0) {
    }
    atomic_store(&stop.asked, true);
    if (atomic_load(&stop.at_once)) {
        dl_info("leaving signal=%d", number);
        _exit(DL_EXIT_OK);
    }
    uint64_t one = 1;
    ssize_t written = write(stop.wake_fd, &one, sizeof one);
    (void)written; /* An eventfd takes the first one always. */
    struct timespec grace = {.tv_sec = stop.grace_ns / DL_NS_PER_SECOND, .tv_nsec = stop.grace_ns % DL_NS_PER_SECOND};
    number = sigtimedwait(&stop.signals, NULL, &grace);
    dl_warn("leaving at once because=%s", number > 0 ? "second_signal" : "grace_is_over");
    _exit(DL_EXIT_OK);
}

/* Threads that a library started before us (OpenBLAS at load) have the signals unblocked: they pass them on. */
static void pass_on(int number)
{
    pthread_kill(stop.thread, number);
}

enum dl_rc wk_stop_init(double grace_seconds, struct dl_err *err)
{
    stop.grace_ns = (int64_t)(grace_seconds * (double)DL_NS_PER_SECOND);
    stop.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (stop.wake_fd < 0) {
        return dl_err_errno(err, DL_EIO, errno, "no file descriptor for the notice of a signal");
    }
    sigemptyset(&stop.signals);
    sigaddset(&stop.signals, SIGTERM);
    sigaddset(&stop.signals, SIGINT);
    int code = pthread_sigmask(SIG_BLOCK, &stop.signals, NULL);
    if (code == 0) {
        code = pthread_create(&stop.thread, NULL, watch, NULL);
    }
    if (code != 0) {
        return dl_err_errno(err, DL_ENOMEM, code, "cannot start the thread that waits for signals");
    }
    pthread_detach(stop.thread); /* Never ends: it can be signalled for as long as the process lives. */
    struct sigaction action = {.sa_handler = pass_on, .sa_flags = SA_RESTART};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    return DL_OK;
}

bool wk_stop_asked(void)
{
    return atomic_load(&stop.asked);
}

bool wk_stop_at_once(bool on)
{
    atomic_store(&stop.at_once, on);
    return atomic_load(&stop.asked);
}

bool wk_stop_wait_until(long long deadline_ns)
{
    while (!wk_stop_asked()) {
        int64_t left_ns = deadline_ns - dl_now_ns();
        if (left_ns <= 0) {
            return false;
        }
        struct timespec left = {.tv_sec = left_ns / DL_NS_PER_SECOND, .tv_nsec = left_ns % DL_NS_PER_SECOND};
        struct pollfd wake = {.fd = stop.wake_fd, .events = POLLIN};
        (void)ppoll(&wake, 1, &left, NULL);
    }
    return true;
}
