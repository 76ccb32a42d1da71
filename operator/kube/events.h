/* op_recorder: events (events.k8s.io/v1) for people, aggregated by object, type, reason and action: a repeat within
 * OP_RECORDER_SERIES_MS raises the series' count and is sent at most every OP_RECORDER_FLUSH_MS.
 *
 * Best effort: an event that cannot be sent is dropped and counted, nothing waits for it. Loop's thread; layer
 * operator/kube. */
#ifndef OP_KUBE_EVENTS_H
#define OP_KUBE_EVENTS_H

#include "operator/kube/client.h"

#define OP_RECORDER_KEYS_MAX 4096    /* The oldest series is forgotten beyond this. */
#define OP_RECORDER_SERIES_MS 360000 /* A series ends after so much silence. */
#define OP_RECORDER_FLUSH_MS 30000
#define OP_RECORDER_IN_FLIGHT_MAX 256
#define OP_RECORDER_NOTE_MAX 1024 /* Longer notes are cut. */

struct op_recorder; /* Opaque. */

/* What an event is about. */
struct op_subject {
    const char *api_version, *kind, *space, *name, *uid;
};

/* `controller` e.g. "diloco.dev/operator", `instance` e.g. the pod's name; copied. */
DL_MUST_CHECK enum dl_rc op_recorder_new(struct op_client *client, const char *controller, const char *instance,
                                         struct op_recorder **out, struct dl_err *err);
void op_recorder_free(struct op_recorder *recorder); /* NULL is fine. What was not sent is lost. */

/* `type` "Normal" or "Warning"; `reason` CamelCase, `action` CamelCase (what was being done). Everything is copied. */
void op_record(struct op_recorder *recorder, const struct op_subject *about, const char *type, const char *reason,
               const char *action, const char *note_format, ...) DL_PRINTF(6, 7);

/* diloco_events_sent_total, diloco_events_dropped_total. */
void op_recorder_metrics(const struct op_recorder *recorder, struct dl_metrics *metrics);

#endif
