/* wk_hub: what the trainer's thread and the network thread share. */
#ifndef DL_WORKER_LINK_HUB_H
#define DL_WORKER_LINK_HUB_H

#include <openssl/ssl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "worker/link/link.h"
#include "worker/link/store.h"

#define WK_HOST_MAX 256
#define WK_PORT_MAX 8

struct wk_endpoint {
    char host[WK_HOST_MAX];
    char port[WK_PORT_MAX];
    bool tls;
};

struct wk_serve;

struct wk_hub {
    pthread_mutex_t lock;   /* Held only for calls on the link and the fields marked (lock). */
    pthread_cond_t changed; /* (lock) Something the trainer may be waiting for has happened. CLOCK_MONOTONIC. */
    struct wk_link *link;   /* (lock) */
    struct wk_store *store; /* See its thread rule. */
    bool stop;              /* (lock) The network thread is to end. */
    uint32_t unsent;        /* (lock) Connections with bytes that have yet to be written. */
    int wake_fd;            /* eventfd: written when the network thread has something to do. */
    uint64_t bytes_sent, bytes_received; /* Relaxed atomics. */

    /* Fixed while the network thread runs. */
    uint32_t shards;
    struct wk_endpoint endpoints[DL_SPEC_SHARDS_MAX];
    char *token;            /* NULL: none. */
    SSL_CTX *tls;           /* NULL: no endpoint needs it. */
    struct wk_serve *serve; /* NULL: this learner's state is not served. */
    size_t out_bytes;       /* Of a connection's send buffer: the largest control message with its frame. */
    void (*log)(void *context, int level, const char *line);
    void *log_context;
};

#endif
