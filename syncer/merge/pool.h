/* sy_pool: threads that split a range of indices among them, and tell how far all of it has been done.
 *
 * A layer on common/pool: a run allocates nothing and goes on while one of its threads sleeps. One run at a time: calls of
 * sy_pool_run come from one thread at a time. What a run computes must not depend on who takes which indices. */
#ifndef DL_SYNCER_MERGE_POOL_H
#define DL_SYNCER_MERGE_POOL_H

#include <stdint.h>

#include "common/err.h"
#include "common/pool.h"

#define SY_POOL_THREADS_MAX DL_POOL_THREADS_MAX

struct sy_pool; /* Opaque. */

/* Works on the indices begin .. end - 1. */
typedef void (*sy_pool_fn)(void *context, uint64_t begin, uint64_t end);

/* `threads` (1 .. SY_POOL_THREADS_MAX) counts the caller of sy_pool_run: with 1 no thread is started. */
DL_MUST_CHECK enum dl_rc sy_pool_new(uint32_t threads, struct sy_pool **out, struct dl_err *err);
void sy_pool_free(struct sy_pool *pool); /* NULL is fine. */

/* All indices below `end` are done, and what was written for them is visible. One call at a time, `end` growing up to
 * `count`; from any of the threads: short. */
typedef void (*sy_pool_done_fn)(void *context, uint64_t end);

/* Calls `fn` for ranges that together make 0 .. count - 1, on all threads, the caller among them; returns when all are
 * done, and what they wrote is visible to the caller. `done` (NULL: nobody) is told how far, some times in the course of it. */
void sy_pool_run(struct sy_pool *pool, sy_pool_fn fn, sy_pool_done_fn done, void *context, uint64_t count);

#endif
