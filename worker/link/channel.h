/* wk_channel: one connection to a syncer shard, from looking up its name to exchanging messages. Does what the link's
 * acts say and reports what happens. Owned by the network thread. */
#ifndef DL_WORKER_LINK_CHANNEL_H
#define DL_WORKER_LINK_CHANNEL_H

#include <poll.h>

#include "common/content.h"
#include "common/ws.h"
#include "worker/link/hub.h"
#include "worker/link/outbox.h"
#include "worker/link/receive.h"
#include "worker/link/resolve.h"
#include "worker/link/stream.h"
#include "worker/link/ws.h"

#define WK_IN_BYTES 16384          /* Receive buffer, for all that has no place of its own. */
#define WK_IN_BESIDE_BYTES 4096    /* Of it, used when a chunk's data is received to its place in the same call. */
#define WK_READ_BYTES (512u << 10) /* In one call: few calls, and hashed before the second-level cache has lost it. */
#define WK_READ_BUDGET (8u << 20)  /* Bytes taken from one connection before the others have their turn. */
#define WK_CONNECT_SECONDS 10      /* For one address. */

enum wk_channel_state {
    WK_CHANNEL_CLOSED,
    WK_CHANNEL_RESOLVING,
    WK_CHANNEL_CONNECTING,
    WK_CHANNEL_SECURING,
    WK_CHANNEL_UPGRADING,
    WK_CHANNEL_OPEN
};

struct wk_channel {
    struct wk_hub *hub;
    uint32_t shard;
    enum wk_channel_state state;
    struct wk_resolve *resolve;
    int resolve_fd;
    struct addrinfo *addresses, *next_address; /* Those left to try. */
    int64_t connect_by_ns;
    struct wk_stream stream;
    struct dl_err deaf_err;
    bool deaf;       /* The peer takes no more bytes; what it still said is read before giving up. */
    bool more_input; /* The read budget ended before the input did. */
    char key[WK_WS_KEY_BYTES];
    struct dl_ws_parser parser;
    struct wk_rx rx;
    struct dl_wire_message message;
    struct wk_act act;
    int64_t now_ns;  /* Of the iteration. */
    int64_t read_ns; /* When something was read last. */
    struct wk_spot spot;
    uint8_t *slot; /* Memory of the update being received. */
    uint8_t random[256];
    size_t random_left;
    size_t in_have; /* Only while upgrading. */
    uint8_t in[WK_IN_BYTES + 1];
    struct wk_outbox out;
    uint8_t pong[DL_WS_CONTROL_MAX]; /* Answers the last ping, between two frames. */
    size_t pong_bytes;
    bool pong_due;
};

DL_MUST_CHECK enum dl_rc wk_channel_init(struct wk_channel *channel, struct wk_hub *hub, uint32_t shard,
                                         struct dl_err *err);
void wk_channel_release(struct wk_channel *channel);

/* Writes what is pending, and does as many acts as the connection takes. */
void wk_channel_service(struct wk_channel *channel, int64_t now_ns);
/* What to poll for; false: nothing. */
bool wk_channel_poll(const struct wk_channel *channel, struct pollfd *poll);
void wk_channel_ready(struct wk_channel *channel, int64_t now_ns, short revents);
int64_t wk_channel_deadline(const struct wk_channel *channel); /* INT64_MAX: none. */

#endif
