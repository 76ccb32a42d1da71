/* op_queue: keys of work to be done. A key waits at most once, is never handed out twice at a time, comes back when
 * it was added while in work, and backs off by itself when it fails.
 *
 * Pure apart from memory: time is an argument. Owner's thread; layer operator/kube. */
#ifndef OP_KUBE_QUEUE_H
#define OP_KUBE_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "common/metrics.h"

#define OP_QUEUE_KEYS_MAX 100000 /* Keys known at once; beyond it adding fails. */
#define OP_QUEUE_BACKOFF_FIRST_NS INT64_C(5000000)
#define OP_QUEUE_BACKOFF_MAX_NS INT64_C(60000000000)

struct op_queue; /* Opaque. */

/* `name` labels the metrics; copied. */
DL_MUST_CHECK enum dl_rc op_queue_new(const char *name, struct op_queue **out, struct dl_err *err);
void op_queue_free(struct op_queue *queue);
void op_queue_clear(struct op_queue *queue); /* Forgets all keys and failures: a standby holds none. */

/* Wants `key` now. One that waits already stays where it is; one that waits for later comes now; one in work comes
 * again after op_queue_done. DL_ENOMEM: OP_QUEUE_KEYS_MAX are there. */
DL_MUST_CHECK enum dl_rc op_queue_add(struct op_queue *queue, const char *key, int64_t now_ns, struct dl_err *err);
/* Wants it at `due_ns`; of several times the earliest counts. */
DL_MUST_CHECK enum dl_rc op_queue_add_at(struct op_queue *queue, const char *key, int64_t due_ns, int64_t now_ns,
                                         struct dl_err *err);
/* Wants it after its backoff: 5 ms doubled with every failure since op_queue_forget, at most 60 s, jittered by up to
 * a tenth. */
DL_MUST_CHECK enum dl_rc op_queue_retry(struct op_queue *queue, const char *key, int64_t now_ns, struct dl_err *err);
void op_queue_forget(struct op_queue *queue, const char *key); /* It went well: the next failure starts at 5 ms. */

/* The next key that is due, now in work; NULL: none. Borrowed until op_queue_done of it. */
const char *op_queue_take(struct op_queue *queue, int64_t now_ns);
/* The work on it is over (well or not). It may be kept in work over several turns of the loop. */
void op_queue_done(struct op_queue *queue, const char *key, int64_t now_ns);

/* When something is due: a time past means now; INT64_MAX: nothing waits. */
int64_t op_queue_next_ns(const struct op_queue *queue);

/* workqueue_depth, workqueue_adds_total, workqueue_retries_total, workqueue_queue_duration_seconds,
 * workqueue_work_duration_seconds, workqueue_unfinished_work_seconds, workqueue_longest_running_processor_seconds,
 * all with name=<queue's name> (as controller-runtime calls them). */
void op_queue_metrics(const struct op_queue *queue, int64_t now_ns, struct dl_metrics *metrics);

#endif
