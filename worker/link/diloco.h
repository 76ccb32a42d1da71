/* libdiloco: joins any trainer to a Decoupled DiLoCo ensemble.
 *
 *     struct diloco *d;
 *     diloco_open(&options, &d, &err);
 *     diloco_register(d, "embed.weight", data, 2, shape, DILOCO_EMBEDDING, 0, &err);      once a tensor
 *     diloco_register_state(d, "adamw.m/embed.weight", m, bytes, &err);  optional: what joiners take over from a peer
 *     diloco_join(d, &info, &err);                               connects; returns with the ensemble's current parameters
 *     while (training) {
 *         ... one inner step on the tensors ...
 *         if (diloco_step(d, tokens, loss, &info, &err) != DILOCO_CONTINUE) break;
 *     }
 *     diloco_close(d);
 *
 * The caller's tensors are read and written only inside diloco_join and diloco_step, by the calling thread. The network
 * runs in a thread of the library's own; a step never blocks on a socket. Without a connection a learner trains on and the
 * library keeps reconnecting, for as long as it takes.
 *
 * Thread rule: all calls on one handle from one thread at a time. The library installs no signal handler, starts one thread
 * a handle for the network and one at low priority that serves its state to joiners, and never prints (pass `log` to see what it has to say). */
#ifndef DILOCO_H
#define DILOCO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DILOCO_API __attribute__((visibility("default")))
#define DILOCO_ERROR_TEXT_MAX 512
#define DILOCO_VERSION "0.1.0"

struct diloco; /* Opaque. */

struct diloco_error {
    int code;                         /* A DILOCO_E* value below. */
    char text[DILOCO_ERROR_TEXT_MAX]; /* What was attempted, on what, what to do. */
};

enum diloco_result {
    DILOCO_CONTINUE = 0, /* Go on training. */
    DILOCO_DONE = 1,     /* The job has finished: tensors hold the final parameters; leave the loop. */
    DILOCO_STOPPED = 2,  /* Someone asked the job, or this learner, to stop. */
    DILOCO_EINVAL = -1,  /* Bad argument, or called in the wrong order. */
    DILOCO_ENOMEM = -2,
    DILOCO_EREFUSED = -3, /* The syncer refused this learner (other job, other tensors, wrong token): do not retry. */
    DILOCO_ETIMEOUT = -4, /* join_timeout passed without a first state. */
    DILOCO_EFAILED = -5,  /* The job has failed; the text says why. */
};

enum diloco_tensor_role { DILOCO_WEIGHT = 0, DILOCO_EMBEDDING = 1 };
enum diloco_role { DILOCO_LEARNER = 0, DILOCO_EVALUATOR = 1 }; /* An evaluator only receives. */

struct diloco_options {
    uint32_t struct_size;  /* sizeof(struct diloco_options): lets the struct grow without breaking callers. */
    const char *job;       /* Job name. */
    const char *endpoints; /* ws://host:port or wss://host:port of shard 0, 1, ..., separated by commas. */
    const char *token;     /* Bearer token; NULL: none. */
    const char *ca_file;   /* For wss: PEM file of authorities; NULL: the system's. */
    const char *cert_file, *key_file; /* Client certificate; NULL: none. */
    int32_t learner;                  /* Wanted learner id; -1: any free one. */
    const char *uid;                  /* Pod UID; NULL: host and process id. */
    enum diloco_role role;
    double join_timeout_seconds; /* 0: 1800. */
    const char *trainer; /* What computes, e.g. "mine 1.2 torch 2.1 cuda": in the tape, for replay. NULL: not said. */
    void (*log)(void *context, int level, const char *line); /* level 0 debug .. 3 error; from the library's threads. */
    void *log_context;
    /* Where this learner lets joiners fetch its state (parameters, and what diloco_register_state declared): "address:port",
     * "*:port"; NULL: the address by which it reaches the syncer, on a free port; "off": nowhere. It serves only with a
     * token, and over TLS when the endpoints are wss:// (then it needs cert_file and key_file). `serve_address`: the host, or
     * host:port, that others are told; NULL: where it listens. */
    const char *serve_listen, *serve_address;
};

struct diloco_info {        /* After a step or a join. */
    uint32_t learner;       /* This learner's id. */
    uint64_t step;          /* t_m: inner steps of this incarnation. */
    uint64_t ensemble_step; /* The furthest learner's, as last heard. */
    uint64_t tokens_all;    /* Trained by all, as last heard. */
    uint64_t token_budget;
    uint32_t learners; /* Wanted number of learners. */
    uint32_t connected_shards, shards;
    uint32_t updates_applied; /* In this call. */
    uint64_t updates_total, pushes_total;
    uint64_t last_round; /* Highest round among applied updates. */
    uint64_t bytes_sent, bytes_received;
    double waited_seconds;   /* In this call: only synchronous forms and interval warm-up ever wait. */
    int32_t recovered_from;  /* Learner whose registered state was taken over in diloco_join; -1: nobody's. */
    uint64_t recovered_step; /* That learner's inner step. */
};

DILOCO_API int diloco_open(const struct diloco_options *options, struct diloco **out, struct diloco_error *error);

/* Declares one float32, contiguous, row-major tensor of at most 4 dimensions. `data` stays the caller's and must stay valid
 * until diloco_close. `layer`: depth, 0 when unknown. Every learner registers the same tensors in the same order. */
DILOCO_API int diloco_register(struct diloco *d, const char *name, float *data, int rank, const uint64_t *shape,
                               enum diloco_tensor_role role, uint32_t layer, struct diloco_error *error);

/* Says, before diloco_join, that this trainer takes its data by leases of the job's ledger, `sequences` in a step. Optional:
 * without it nothing is known of what a learner trains on. */
DILOCO_API int diloco_lease_data(struct diloco *d, uint32_t sequences, struct diloco_error *error);

/* Declares optimiser state that a learner which joins later should take over, such as AdamW's moments and its step count:
 * any bytes. Optional, before diloco_join; every learner declares the same parts in the same order. `data` stays the caller's
 * until diloco_close; it is read inside diloco_step only, and written inside diloco_join only, when a peer's is taken over
 * (info.recovered_from >= 0). When that fails on the way it is filled with zeros. */
DILOCO_API int diloco_register_state(struct diloco *d, const char *name, void *data, uint64_t bytes,
                                     struct diloco_error *error);

/* Connects to every shard and waits for the ensemble's current parameters, which replace the tensors' contents. The very
 * first learner's own contents become the ensemble's first state. */
DILOCO_API int diloco_join(struct diloco *d, struct diloco_info *info, struct diloco_error *error);

struct
    diloco_range { /* Positions first .. first + count - 1 of the job's data, to be trained on by this learner alone. */
    uint64_t lease; /* 0: not leased; trained on all the same, and does not count as covered. */
    uint64_t first, count;
};

/* What to train on in the coming step: at most `count` positions, fewer where a lease ends (ask again for the rest). The data
 * of a job is one stream of positions 0, 1, 2, ...; all its learners have to take the same position for the same sequence, e.g.
 * of N sequences number g mod N of a shuffle of epoch g / N. What was taken since the last diloco_step counts as trained on
 * with the next one, whatever the step made of it; so take it for that step, not ahead of it. Never waits. */
DILOCO_API int diloco_data(struct diloco *d, uint64_t count, struct diloco_range *range, struct diloco_error *error);

/* Call at every inner-step boundary, after the optimiser's update. `tokens`: trained in this step. `loss`: its loss, NaN
 * when unknown. Applies updates that have arrived, answers pulls with a snapshot. Returns enum diloco_result. */
DILOCO_API int diloco_step(struct diloco *d, uint64_t tokens, float loss, struct diloco_info *info,
                           struct diloco_error *error);

/* Notes in the event tape what else the parameters depend on from now on and asynchrony has decided (a learning rate that
 * follows the ensemble, say), so that the run can be replayed. `kind`: 1 to 15 characters, an ensemble-wide word of the
 * trainer's own; `text` may be NULL, at most 127 characters count. Learners only, after diloco_join. */
DILOCO_API int diloco_note(struct diloco *d, const char *kind, uint64_t a, uint64_t b, uint64_t c, const char *text,
                           struct diloco_error *error);

/* Evaluators: applies what has arrived; waits at most `timeout_seconds` for something new. */
DILOCO_API int diloco_poll(struct diloco *d, double timeout_seconds, struct diloco_info *info,
                           struct diloco_error *error);
/* Evaluators: reports the validation loss of the parameters as they are now. */
DILOCO_API int diloco_report(struct diloco *d, double loss, uint32_t sequences, struct diloco_error *error);

/* A notice of preemption came: says goodbye within `timeout_seconds`, sending what a pull asked for first. Optional. */
DILOCO_API int diloco_leave(struct diloco *d, int preempted, double timeout_seconds, const char *why,
                            struct diloco_error *error);

/* Stops the thread and frees everything. NULL is fine. */
DILOCO_API void diloco_close(struct diloco *d);

#ifdef __cplusplus
}
#endif
#endif
