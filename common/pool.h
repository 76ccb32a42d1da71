/* dl_pool: a few threads that share the tasks of one job at a time.
 *
 * A task's result must not depend on who runs it. One thread (the owner) calls dl_pool_run and works along; the others spin for
 * a moment between jobs, then sleep. A job never waits for a thread that sleeps. No allocation after dl_pool_new. Any layer. */
#ifndef DL_COMMON_POOL_H
#define DL_COMMON_POOL_H

#include <stdint.h>

#include "common/err.h"

#define DL_POOL_THREADS_MAX 256

/* How the owner waits for the last tasks of a job, after a moment's spinning. */
enum dl_pool_wait {
    DL_POOL_YIELD, /* Jobs follow each other at once: it goes on the moment they are done, and offers its processor meanwhile. */
    DL_POOL_SLEEP, /* Tasks are long and the processor has other work. */
};

struct dl_pool; /* Opaque. */

/* Runs task `task` of a job on thread `thread` (0 .. threads-1: index of per-thread scratch memory). */
typedef void (*dl_pool_task)(void *context, uint32_t task, uint32_t thread);

/* `threads` (1 .. DL_POOL_THREADS_MAX) counts the owner: with 1 no thread is started. */
DL_MUST_CHECK enum dl_rc dl_pool_new(uint32_t threads, enum dl_pool_wait wait, struct dl_pool **out,
                                     struct dl_err *err);
void dl_pool_free(struct dl_pool *pool); /* Joins the threads. NULL is fine. */
uint32_t dl_pool_threads(const struct dl_pool *pool);

/* Runs tasks 0 .. count-1 and returns when all are done and what they wrote is visible. Not from within a task. */
void dl_pool_run(struct dl_pool *pool, dl_pool_task run, void *context, uint32_t count);

#endif
