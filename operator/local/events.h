/* op_events: what happened in a run, in memory for the view and the report, and in events.jsonl line by line.
 *
 * One thread. Layer operator/local. */
#ifndef OP_LOCAL_EVENTS_H
#define OP_LOCAL_EVENTS_H

#include <stdint.h>

#include "common/err.h"
#include "operator/local/rundir.h"

#define OP_EVENTS_MAX 1024 /* Kept in memory: the newest. The file has all. */
#define OP_EVENT_TEXT_MAX 256

struct op_event {
    double seconds; /* Since the run began. */
    char kind[24];  /* started, exited, joined, lost, left, chaos, scale, stop, phase, validation, note */
    char who[32];   /* "learner-2"; "" for the run as a whole. */
    char text[OP_EVENT_TEXT_MAX];
};

struct op_events {
    int fd;
    int64_t start_ns;
    uint64_t count; /* Ever; the ring holds the last OP_EVENTS_MAX. */
    struct op_event ring[OP_EVENTS_MAX];
};

DL_MUST_CHECK enum dl_rc op_events_open(struct op_events *events, const struct op_rundir *dir, int64_t start_ns,
                                        struct dl_err *err);
void op_events_close(struct op_events *events);

void op_events_add(struct op_events *events, int64_t now_ns, const char *kind, const char *who, const char *fmt, ...)
    DL_PRINTF(5, 6);

/* The event with running number `number` (0 is the first ever), or NULL when it is no longer kept. */
const struct op_event *op_events_get(const struct op_events *events, uint64_t number);
uint64_t op_events_first(const struct op_events *events); /* Lowest number still kept. */

#endif
