/* The inside of a `struct diloco`, shared by diloco_open.c (up to the join) and diloco.c (from there on); for them alone. */
#ifndef DL_WORKER_LINK_DILOCO_INTERNAL_H
#define DL_WORKER_LINK_DILOCO_INTERNAL_H

#include "worker/link/diloco.h"
#include "worker/link/net.h"
#include "worker/link/recovery.h"

#define WK_TIMEOUT_MAX_S (30.0 * 86400)

enum wk_phase { WK_PHASE_OPEN, WK_PHASE_JOINED, WK_PHASE_OVER };

struct diloco {
    enum wk_phase phase;
    enum diloco_role role;
    int32_t learner;
    char job[DL_SPEC_NAME_MAX];
    char uid[DL_WIRE_UID_MAX];
    char trainer[DL_WIRE_TRAINER_MAX];
    double join_timeout_seconds;
    uint32_t batch; /* Sequences in a step; 0: no data is leased. */
    struct wk_hub hub;
    struct wk_net *net;
    struct wk_recovery recovery;
    struct dl_tensor *tensors;
    float **data;
    uint32_t tensor_count, tensor_capacity;
    uint64_t waited_before_ns, updates_before; /* At the start of the current call. */
    bool said_goodbye;
};

/* Fills `error` (NULL is fine) and returns `code`. */
int wk_set_error(struct diloco_error *error, int code, const char *fmt, ...) DL_PRINTF(3, 4);
int wk_from_err(struct diloco_error *error, const struct dl_err *err);

#endif
