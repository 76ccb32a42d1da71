/* op_loop: the operator's one thread: timers, descriptors and all HTTP transfers on one libcurl multi handle.
 *
 * Callbacks run only within op_loop_turn, one after the other, never within a call that a user makes; a callback may
 * call everything here and in the modules on top, also free what it belongs to. Owned by one thread (op_loop_wake
 * and op_loop_stop aside). Layer operator/kube, knows nothing of Kubernetes.
 *
 *     while (!op_loop_is_stopped(loop)) {
 *         op_loop_turn(loop, OP_LOOP_WAIT_MAX_MS);
 *     }
 * */
#ifndef OP_KUBE_LOOP_H
#define OP_KUBE_LOOP_H

#include <curl/curl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

#define OP_LOOP_WAIT_MAX_MS 1000 /* No turn waits longer, whatever was asked for. */
#define OP_LOOP_FDS_MAX 256

struct op_loop; /* Opaque. */

/* A deadline. Embedded by its owner, zero-initialised with `fire` and `context` set; must be stopped before its
 * memory goes. Fires once; `fire` may start it again. */
struct op_timer {
    void (*fire)(void *context, int64_t now_ns);
    void *context;
    int64_t due_ns;                              /* Read only. */
    struct op_timer *child, *sibling, *previous; /* Private: a pairing heap through the timers themselves. */
    bool is_running;                             /* Read only. */
};

/* Interest in a descriptor. Embedded by its owner; must be removed before its memory or the descriptor goes.
 * `events` (POLLIN, POLLOUT) may be changed at any time; `ready` gets what poll reported, errors and hang-ups
 * included. */
struct op_fd {
    int fd;
    short events;
    void (*ready)(void *context, short revents, int64_t now_ns);
    void *context;
    bool is_added; /* Private. */
};

/* A transfer on the loop's multi handle: `easy` is the owner's, prepared by it except for CURLOPT_PRIVATE, which is
 * the loop's. `done` gets libcurl's code after the handle was taken off; it may be added again, or freed. */
struct op_transfer {
    CURL *easy;
    void (*done)(void *context, CURLcode code, int64_t now_ns);
    void *context;
    bool is_added; /* Private. */
};

DL_MUST_CHECK enum dl_rc op_loop_new(struct op_loop **out, struct dl_err *err);
void op_loop_free(struct op_loop *loop); /* NULL is fine. Everything must have been removed before. */

/* Monotonic nanoseconds, read once a turn: the "now" of all callbacks of that turn. */
int64_t op_loop_now_ns(const struct op_loop *loop);

/* Starts, or moves, the timer to `due_ns` (in the next turn when it is past). Takes no memory, cannot fail. */
void op_timer_start(struct op_loop *loop, struct op_timer *timer, int64_t due_ns);
void op_timer_stop(struct op_loop *loop, struct op_timer *timer); /* Not running is fine. */

/* DL_ENOMEM: OP_LOOP_FDS_MAX are there already. */
DL_MUST_CHECK enum dl_rc op_fd_add(struct op_loop *loop, struct op_fd *fd, struct dl_err *err);
void op_fd_remove(struct op_loop *loop, struct op_fd *fd); /* Not added is fine. */

/* Not allowed within a libcurl callback (write, header); timers and `done` callbacks are the place. */
DL_MUST_CHECK enum dl_rc op_transfer_add(struct op_loop *loop, struct op_transfer *transfer, struct dl_err *err);
/* Takes it off without `done`. Not added is fine. Not allowed within a libcurl callback. */
void op_transfer_remove(struct op_loop *loop, struct op_transfer *transfer);

/* Waits until something is due or readable, at most `wait_max_ms`, then runs all callbacks that are due. */
void op_loop_turn(struct op_loop *loop, int wait_max_ms);

void op_loop_wake(struct op_loop *loop); /* Ends a wait at once. Any thread, and signal handlers. */
void op_loop_stop(struct op_loop *loop); /* Sets the flag below and wakes. Any thread, and signal handlers. */
bool op_loop_is_stopped(const struct op_loop *loop);

#endif
