/* sim_queue: events in virtual time. Pure; one thread.
 *
 * Events of the same time come out in the order in which they went in, so that a run is a function of its seed. */
#ifndef DL_SIM_QUEUE_H
#define DL_SIM_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

struct sim_event {
    int64_t at_ns;
    uint64_t sequence; /* Given by the queue. */
    uint32_t kind;     /* The driver's. */
    uint32_t a, b;
    uint64_t generation; /* Of what it is meant for: an event of an earlier one is of no interest any more. */
    void *payload;       /* malloc'd; the event owns it. */
};

struct sim_queue {
    struct sim_event *heap;
    size_t count, capacity;
    uint64_t sequences;
};

#define SIM_EVENTS_MAX (1u << 22) /* Waiting at once; more is a fault of the driver. */

void sim_queue_init(struct sim_queue *queue);
void sim_queue_release(struct sim_queue *queue); /* Frees payloads that are left. */
/* Takes over the payload. DL_ENOMEM: no memory, or SIM_EVENTS_MAX reached; the payload is freed. */
DL_MUST_CHECK enum dl_rc sim_queue_add(struct sim_queue *queue, const struct sim_event *event, struct dl_err *err);
/* Puts an event that was taken back for a later time: among those of that time it keeps its place. */
DL_MUST_CHECK enum dl_rc sim_queue_defer(struct sim_queue *queue, const struct sim_event *event, int64_t at_ns,
                                         struct dl_err *err);
/* Takes the earliest; its payload is then the caller's. False: none is left. */
bool sim_queue_take(struct sim_queue *queue, struct sim_event *event);
int64_t sim_queue_next_ns(const struct sim_queue *queue); /* INT64_MAX: none. */

#endif
