#include "sim/queue.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

void sim_queue_init(struct sim_queue *queue)
{
    memset(queue, 0, sizeof *queue);
}

void sim_queue_release(struct sim_queue *queue)
{
    for (size_t i = 0; i < queue->count; i++) {
        free(queue->heap[i].payload);
    }
    free(queue->heap);
    sim_queue_init(queue);
}

static bool is_before(const struct sim_event *a, const struct sim_event *b)
{
    return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->sequence < b->sequence;
}

static enum dl_rc grow(struct sim_queue *queue, struct dl_err *err)
{
    size_t capacity = DL_MAX(2 * queue->capacity, (size_t)256);
    struct sim_event *heap = capacity > SIM_EVENTS_MAX ? NULL : realloc(queue->heap, capacity * sizeof *heap);
    if (heap == NULL) {
        return dl_err_set(err, DL_ENOMEM, "simulation: %zu events wait, no room for more", queue->count);
    }
    queue->heap = heap;
    queue->capacity = capacity;
    return DL_OK;
}

static enum dl_rc insert(struct sim_queue *queue, struct sim_event added, struct dl_err *err)
{
    enum dl_rc rc = queue->count < queue->capacity ? DL_OK : grow(queue, err);
    if (rc != DL_OK) {
        free(added.payload);
        return rc;
    }
    size_t at = queue->count++;
    for (; at > 0 && is_before(&added, &queue->heap[(at - 1) / 2]); at = (at - 1) / 2) {
        queue->heap[at] = queue->heap[(at - 1) / 2];
    }
    queue->heap[at] = added;
    return DL_OK;
}

enum dl_rc sim_queue_add(struct sim_queue *queue, const struct sim_event *event, struct dl_err *err)
{
    struct sim_event added = *event;
    added.sequence = ++queue->sequences;
    return insert(queue, added, err);
}

enum dl_rc sim_queue_defer(struct sim_queue *queue, const struct sim_event *event, int64_t at_ns, struct dl_err *err)
{
    struct sim_event deferred = *event;
    deferred.at_ns = at_ns;
    return insert(queue, deferred, err);
}

bool sim_queue_take(struct sim_queue *queue, struct sim_event *event)
{
    if (queue->count == 0) {
        return false;
    }
    *event = queue->heap[0];
    struct sim_event last = queue->heap[--queue->count];
    size_t at = 0;
    for (;;) {
        size_t child = 2 * at + 1;
        if (child + 1 < queue->count && is_before(&queue->heap[child + 1], &queue->heap[child])) {
            child++;
        }
        if (child >= queue->count || !is_before(&queue->heap[child], &last)) {
            break;
        }
        queue->heap[at] = queue->heap[child];
        at = child;
    }
    queue->heap[at] = last;
    return true;
}

int64_t sim_queue_next_ns(const struct sim_queue *queue)
{
    return queue->count == 0 ? INT64_MAX : queue->heap[0].at_ns;
}
