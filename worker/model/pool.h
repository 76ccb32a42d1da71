/* wk_pool: a few threads that share the tasks of one job at a time.
 *
 * A task's result must not depend on who runs it: cut work by shapes, never by the number of threads. One thread (the
 * owner) calls wk_pool_run and works along; workers spin for a moment between jobs, then sleep. No allocation after
 * wk_pool_new. */
#ifndef WK_MODEL_POOL_H
#define WK_MODEL_POOL_H

#include <stdint.h>

#include "common/err.h"

struct wk_pool; /* Opaque. */

/* Runs task `task` of a job on thread `thread` (0 .. threads-1: index of per-thread scratch memory). */
typedef void (*wk_pool_task)(void *context, uint32_t task, uint32_t thread);

DL_MUST_CHECK enum dl_rc wk_pool_new(uint32_t threads, struct wk_pool **out, struct dl_err *err);
void wk_pool_free(struct wk_pool *pool); /* Joins the threads. NULL is fine. */
uint32_t wk_pool_threads(const struct wk_pool *pool);

/* Runs tasks 0 .. count-1 and returns when all are done. Not from within a task. */
void wk_pool_run(struct wk_pool *pool, wk_pool_task run, void *context, uint32_t count);

#endif
