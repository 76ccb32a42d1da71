/* wk_serve: a learner's state server: lets joiners fetch snapshots of its state over HTTP (serve_http.h), read-only.
 *
 * A thread of its own, at low priority, waits on all connections; it makes a snapshot only when one is asked for, asks the
 * trainer's thread to fill it at its next boundary (one pass over memory), serves it to whoever comes within
 * WK_SERVE_REUSE_NS, and releases it WK_SERVE_KEEP_NS after the last byte was fetched. The trainer never waits for it.
 *
 * What it may take of the trainer is bounded from both sides, so that steps are slowed by some 5 % at the very most, whoever
 * asks how often. Processor: where nothing is idle, the scheduler gives a thread at WK_SERVE_NICE a thirtieth of one core beside
 * one that computes, and never interrupts that one for it. Steps: a snapshot costs one boundary one pass over memory, and
 * the next is not made before WK_SERVE_SHARE times as long has passed; until then the last one serves.
 *
 * Where it listens: at `listen`; without one at the address by which this machine reached its first syncer, on a port that
 * is free. The token is required; with TLS the learner's own certificate is shown.
 *
 * Limits: WK_SERVE_CLIENTS connections, one snapshot at a time; a connection that takes or sends nothing for
 * WK_SERVE_IDLE_NS is closed. */
#ifndef DL_WORKER_LINK_SERVE_H
#define DL_WORKER_LINK_SERVE_H

#include <stdbool.h>
#include <stdint.h>

#include "worker/link/snapshot.h"

#define WK_SERVE_CLIENTS 8
#define WK_SERVE_IDLE_NS (30 * INT64_C(1000000000))
#define WK_SERVE_REUSE_NS (30 * INT64_C(1000000000))
#define WK_SERVE_KEEP_NS (20 * INT64_C(1000000000))
#define WK_SERVE_FILL_NS (60 * INT64_C(1000000000)) /* An asker waits at most so long, and as WK_PREPARE_RATE says. */
#define WK_SERVE_NICE 15                            /* 1 Gbit/s takes a tenth of a core, where one is idle. */
#define WK_SERVE_SHARE 60

struct wk_serve; /* Opaque. */

struct wk_serve_config {
    const char *listen;               /* address:port, *:port; NULL: see above. */
    const char *address;              /* host or host:port told to others; NULL: what it listens at. */
    const char *token;                /* Borrowed. */
    const char *cert_file, *key_file; /* NULL: plain. */
    void (*log)(void *context, int level, const char *line); /* May be NULL. */
    void *log_context;
    void (*wanted)(void *context); /* A snapshot waits to be filled: serving thread. May be NULL. */
    void *wanted_context;
};

/* DL_EINVAL: address or certificate; DL_ENET: the address is taken. */
DL_MUST_CHECK enum dl_rc wk_serve_new(const struct wk_serve_config *config, struct wk_serve **out, struct dl_err *err);
void wk_serve_free(struct wk_serve *serve); /* Ends the thread. NULL is fine. */

/* A socket that is connected to a syncer: from the first one it learns this machine's address, begins to listen, and
 * starts the thread. `address`: what others are to be told. Network thread. False: it cannot serve (logged once). */
bool wk_serve_begin(struct wk_serve *serve, int connected_fd, char address[DL_WIRE_ADDRESS_MAX]);

/* From now on there is a state to serve. `source` is copied; what it points to is borrowed. Trainer's thread. */
void wk_serve_open(struct wk_serve *serve, const struct wk_snapshot_source *source);
/* Whether a snapshot waits to be filled: at a boundary, then wk_serve_fill (arguments as wk_snapshot_fill's). */
bool wk_serve_wants(const struct wk_serve *serve);
void wk_serve_fill(struct wk_serve *serve, const struct wk_offer *offers, uint64_t step, uint8_t *trace,
                   uint64_t trace_bytes);

#endif
