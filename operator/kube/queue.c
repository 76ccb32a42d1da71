#include "operator/kube/queue.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/rng.h"
#include "operator/kube/map.h"

#define SECONDS(ns) ((double)(ns) / (double)DL_NS_PER_SECOND)

struct entry {
    char *key;
    bool is_waiting, is_in_work;
    bool is_wanted_again; /* Was added while in work. */
    uint32_t failures;
    int64_t added_ns, started_ns;
    int64_t due_ns; /* Where it waits for later; meaningless when `place` is 0. */
    size_t place;   /* Position in the heap + 1; 0: not there. */
    struct entry *next;
};

struct op_queue {
    char *name;
    struct op_map entries;
    struct entry *first, *last; /* Those that wait for now, in order. */
    size_t depth;
    struct entry **heap; /* Those that wait for later, the earliest first. Room for all entries. */
    size_t heap_count, heap_capacity;
    struct dl_rng rng;
    uint64_t adds, retries;
    struct dl_histogram waited, worked;
};

enum dl_rc op_queue_new(const char *name, struct op_queue **out, struct dl_err *err)
{
    struct op_queue *queue = calloc(1, sizeof *queue);
    if (queue == NULL || (queue->name = strdup(name)) == NULL) {
        free(queue);
        return dl_err_set(err, DL_ENOMEM, "no memory for the queue '%s'", name);
    }
    dl_rng_init(&queue->rng, (uint64_t)(uintptr_t)queue, dl_rng_stream("queue", 0, 0));
    *out = queue;
    return DL_OK;
}

void op_queue_clear(struct op_queue *queue)
{
    size_t place = 0;
    const char *key;
    void *value;
    while (op_map_next(&queue->entries, &place, &key, &value)) {
        struct entry *entry = value;
        free(entry->key);
        free(entry);
    }
    op_map_release(&queue->entries);
    queue->first = queue->last = NULL;
    queue->depth = queue->heap_count = 0;
}

void op_queue_free(struct op_queue *queue)
{
    if (queue != NULL) {
        op_queue_clear(queue);
        free(queue->heap);
        free(queue->name);
        free(queue);
    }
}

/* --- those that wait for later --- */

static void heap_put(struct op_queue *queue, size_t at, struct entry *entry)
{
    queue->heap[at] = entry;
    entry->place = at + 1;
}

static void heap_settle(struct op_queue *queue, size_t at, struct entry *entry)
{
    while (at > 0 && queue->heap[(at - 1) / 2]->due_ns > entry->due_ns) {
        heap_put(queue, at, queue->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    for (;;) {
        size_t child = at * 2 + 1;
        if (child + 1 < queue->heap_count && queue->heap[child + 1]->due_ns < queue->heap[child]->due_ns) {
            child++;
        }
        if (child >= queue->heap_count || queue->heap[child]->due_ns >= entry->due_ns) {
            break;
        }
        heap_put(queue, at, queue->heap[child]);
        at = child;
    }
    heap_put(queue, at, entry);
}

static void heap_remove(struct op_queue *queue, struct entry *entry)
{
    if (entry->place != 0) {
        size_t at = entry->place - 1;
        struct entry *last = queue->heap[--queue->heap_count];
        entry->place = 0;
        if (last != entry) {
            heap_settle(queue, at, last);
        }
    }
}

/* --- entries --- */

static enum dl_rc entry_of(struct op_queue *queue, const char *key, struct entry **out, struct dl_err *err)
{
    struct entry *entry = op_map_get(&queue->entries, key);
    if (entry != NULL) {
        *out = entry;
        return DL_OK;
    }
    if (queue->entries.count >= OP_QUEUE_KEYS_MAX) {
        return dl_err_set(err, DL_ENOMEM, "queue '%s' holds %d keys already; '%.80s' is not taken", queue->name,
                          OP_QUEUE_KEYS_MAX, key);
    }
    if (queue->entries.count == queue->heap_capacity) {
        size_t capacity = DL_MAX(queue->heap_capacity * 2, (size_t)64);
        struct entry **heap = realloc(queue->heap, capacity * sizeof(void *));
        if (heap == NULL) {
            return dl_err_set(err, DL_ENOMEM, "no memory to queue '%.80s'", key);
        }
        queue->heap = heap;
        queue->heap_capacity = capacity;
    }
    entry = calloc(1, sizeof *entry);
    if (entry == NULL || (entry->key = strdup(key)) == NULL) {
        free(entry);
        return dl_err_set(err, DL_ENOMEM, "no memory to queue '%.80s'", key);
    }
    enum dl_rc rc = op_map_put(&queue->entries, key, entry, err);
    if (rc != DL_OK) {
        free(entry->key);
        free(entry);
        return rc;
    }
    *out = entry;
    return DL_OK;
}

static void drop_if_idle(struct op_queue *queue, struct entry *entry)
{
    if (!entry->is_waiting && !entry->is_in_work && entry->place == 0 && entry->failures == 0) {
        op_map_remove(&queue->entries, entry->key);
        free(entry->key);
        free(entry);
    }
}

/* To the end of those that wait for now. */
static void line_up(struct op_queue *queue, struct entry *entry, int64_t now_ns)
{
    heap_remove(queue, entry);
    if (entry->is_in_work) {
        entry->is_wanted_again = true;
        return;
    }
    if (entry->is_waiting) {
        return;
    }
    entry->is_waiting = true;
    entry->added_ns = now_ns;
    entry->next = NULL;
    if (queue->last != NULL) {
        queue->last->next = entry;
    } else {
        queue->first = entry;
    }
    queue->last = entry;
    queue->depth++;
    queue->adds++;
}

enum dl_rc op_queue_add(struct op_queue *queue, const char *key, int64_t now_ns, struct dl_err *err)
{
    struct entry *entry = NULL;
    enum dl_rc rc = entry_of(queue, key, &entry, err);
    if (rc == DL_OK) {
        line_up(queue, entry, now_ns);
    }
    return rc;
}

enum dl_rc op_queue_add_at(struct op_queue *queue, const char *key, int64_t due_ns, int64_t now_ns, struct dl_err *err)
{
    if (due_ns <= now_ns) {
        return op_queue_add(queue, key, now_ns, err);
    }
    struct entry *entry = NULL;
    enum dl_rc rc = entry_of(queue, key, &entry, err);
    if (rc != DL_OK || entry->is_waiting || (entry->place != 0 && entry->due_ns <= due_ns)) {
        return rc;
    }
    heap_remove(queue, entry);
    entry->due_ns = due_ns;
    heap_settle(queue, queue->heap_count++, entry);
    return DL_OK;
}

enum dl_rc op_queue_retry(struct op_queue *queue, const char *key, int64_t now_ns, struct dl_err *err)
{
    struct entry *entry = NULL;
    enum dl_rc rc = entry_of(queue, key, &entry, err);
    if (rc != DL_OK) {
        return rc;
    }
    uint32_t doublings = DL_MIN(entry->failures, 30u);
    int64_t wait_ns = DL_MIN(OP_QUEUE_BACKOFF_FIRST_NS << doublings, OP_QUEUE_BACKOFF_MAX_NS);
    wait_ns += (int64_t)dl_rng_below(&queue->rng, (uint64_t)wait_ns / 10 + 1);
    entry->failures++;
    queue->retries++;
    return op_queue_add_at(queue, key, now_ns + wait_ns, now_ns, err);
}

void op_queue_forget(struct op_queue *queue, const char *key)
{
    struct entry *entry = op_map_get(&queue->entries, key);
    if (entry != NULL) {
        entry->failures = 0;
        drop_if_idle(queue, entry);
    }
}

const char *op_queue_take(struct op_queue *queue, int64_t now_ns)
{
    while (queue->heap_count > 0 && queue->heap[0]->due_ns <= now_ns) {
        line_up(queue, queue->heap[0], now_ns);
    }
    struct entry *entry = queue->first;
    if (entry == NULL) {
        return NULL;
    }
    queue->first = entry->next;
    if (queue->first == NULL) {
        queue->last = NULL;
    }
    queue->depth--;
    entry->is_waiting = false;
    entry->is_in_work = true;
    entry->started_ns = now_ns;
    dl_histogram_add(&queue->waited, SECONDS(now_ns - entry->added_ns));
    return entry->key;
}

void op_queue_done(struct op_queue *queue, const char *key, int64_t now_ns)
{
    struct entry *entry = op_map_get(&queue->entries, key);
    if (entry == NULL) { /* Cleared meanwhile. */
        return;
    }
    dl_histogram_add(&queue->worked, SECONDS(now_ns - entry->started_ns));
    entry->is_in_work = false;
    if (entry->is_wanted_again) {
        entry->is_wanted_again = false;
        line_up(queue, entry, now_ns);
    }
    drop_if_idle(queue, entry);
}

int64_t op_queue_next_ns(const struct op_queue *queue)
{
    if (queue->first != NULL) {
        return INT64_MIN;
    }
    return queue->heap_count > 0 ? queue->heap[0]->due_ns : INT64_MAX;
}

void op_queue_metrics(const struct op_queue *queue, int64_t now_ns, struct dl_metrics *metrics)
{
    double unfinished = 0, longest = 0;
    size_t place = 0;
    const char *key;
    void *value;
    while (op_map_next(&queue->entries, &place, &key, &value)) {
        const struct entry *entry = value;
        if (entry->is_in_work) {
            double seconds = SECONDS(now_ns - entry->started_ns);
            unfinished += seconds;
            longest = DL_MAX(longest, seconds);
        }
    }
    const struct {
        const char *family, *type, *help;
        double value;
    } rows[] = {
        {"workqueue_depth", "gauge", "Keys that wait.", (double)queue->depth},
        {"workqueue_adds_total", "counter", "Keys added.", (double)queue->adds},
        {"workqueue_retries_total", "counter", "Keys added again after a failure.", (double)queue->retries},
        {"workqueue_unfinished_work_seconds", "gauge", "Seconds of work in progress.", unfinished},
        {"workqueue_longest_running_processor_seconds", "gauge", "Seconds of the oldest work in progress.", longest},
    };
    for (size_t i = 0; i < DL_COUNT_OF(rows); i++) {
        dl_metrics_family(metrics, rows[i].family, rows[i].type, rows[i].help);
        dl_metrics_value(metrics, rows[i].value, "name", queue->name, (char *)NULL);
    }
    dl_metrics_family(metrics, "workqueue_queue_duration_seconds", "histogram", "Time that a key waits.");
    dl_metrics_histogram(metrics, &queue->waited, "name", queue->name);
    dl_metrics_family(metrics, "workqueue_work_duration_seconds", "histogram", "Time that work on a key takes.");
    dl_metrics_histogram(metrics, &queue->worked, "name", queue->name);
}
