/* What the parts of sy_server share. Network thread only, but for struct sy_job while the merge thread has it.
 *
 * shell.c    libwebsockets: context, callbacks, timers, signals
 * http.c     /healthz, /readyz, /metrics, /status; commands: /stop, /finish, /drain
 * socket.c   reads WebSocket connections, which libwebsockets accepted and upgraded; intake.c threads that do so
 *            as well while the data of a chunk come, placed.c what both do with these
 * conn.c     a connection's life; transmit.c what it sends; inbound.c what its messages do
 * tape.c     what learners deliver to the event tape
 * rounds.c   carries out the core's actions; pushes and their memory
 * jobs.c     merge thread
 * blob.c     an encoded version, shared by all connections that send it
 * checkpoint.c   cuts, pinned; what is asked about them
 * totals.c   counters: committed with rounds, restored, saved at the end
 * times.c    a round's times by stage
 * status.c   /status; metrics.c /metrics */
#ifndef SY_SERVER_INTERNAL_H
#define SY_SERVER_INTERNAL_H

#include <libwebsockets.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/layout.h"
#include "common/metrics.h"
#include "common/ws.h"
#include "syncer/core/core.h"
#include "syncer/merge/merge.h"
#include "syncer/server/blob.h"
#include "syncer/server/intake.h"
#include "syncer/server/jobs.h"
#include "syncer/server/listen.h"
#include "syncer/server/receive.h"
#include "syncer/server/server.h"
#include "syncer/server/turn.h"
#include "syncer/store/store.h"

#define SY_CONTROL_QUEUE_MAX 4096 /* Control messages waiting on one connection; more: it is too slow, closed. */
#define SY_CONTROL_QUEUE_BYTES_MAX (1u << 20)
#define SY_CONNECTIONS_SPARE 64 /* WebSocket connections beyond learners and evaluators, before their HELLO. */
#define SY_STATUS_CACHE_NS (250 * INT64_C(1000000))
#define SY_SUMMARY_SECONDS 5 /* Between two summary lines at level info. */
#define SY_CLOSE_SECONDS 5   /* For a refusal to get out, and the peer's close to come, before the connection is cut. */
/* Largest message that a learner may send; its type may allow less. */
#define SY_MESSAGE_MAX (DL_WIRE_HEADER_BYTES + DL_WIRE_HELLO_PAYLOAD_MAX)
#define SY_LOST_TEXT "the connection closed without a goodbye"
#define SY_DRAIN_SERVES 64 /* Turns of reading what a connection said before it was lost. */

struct sy_server;

/* --- conn.c ----------------------------------------------------------------------------------------------------------
 */

enum sy_conn_state {
    SY_CONN_OPEN, /* No HELLO yet. */
    SY_CONN_JOINED,
    SY_CONN_CLOSING, /* What is queued goes out, nothing is read any more, then it is closed. */
};

/* A push under way or received, until its round is merged or it is refused. */
struct sy_incoming {
    struct sy_incoming *next; /* Of the same fragment. */
    uint64_t round;
    uint32_t fragment; /* Index in the layout. */
    uint32_t member;
    uint64_t admission;
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    uint64_t base_version;
    enum dl_codec codec;
    bool complete, intact;
    bool in_job; /* The merge thread reads it: it stays until the job is done. */
    int64_t begun_ns;
    uint64_t bytes, tokens;
    uint8_t *encoded;
    double *slice_squares; /* One a slice of the fragment, of what has been received. */
};

struct sy_transfer { /* A push as one connection sees it. */
    uint64_t id;
    uint64_t bytes, received;
    uint32_t fragment;
    struct sy_incoming *push; /* NULL: its chunks are dropped. */
};

struct sy_control { /* An encoded control message, LWS_PRE bytes of room before it. */
    struct sy_control *next;
    size_t size;
    uint8_t bytes[];
};

struct sy_left { /* Of a frame that a plain socket has not taken whole: goes before all else. */
    const uint8_t *at;
    size_t bytes;         /* 0: nothing is left. */
    struct sy_blob *blob; /* Whose memory it is, */
    uint8_t *copy;        /* or this one. */
};

struct sy_conn {
    struct sy_conn *prev, *next;
    struct sy_server *server;
    struct lws *wsi;
    enum sy_conn_state state;
    char peer[64];
    int64_t opened_ns, heard_ns;
    uint32_t member;         /* SY_NO_MEMBER before HELLO and after the core let go of it. */
    uint32_t leaving_member; /* See leaves_waiting; else SY_NO_MEMBER. */
    enum sy_leave leaving_why;
    uint32_t learner;
    uint64_t admission, nonce;
    uint32_t incarnation;    /* The store's number of it. */
    uint64_t trace_received; /* Position up to which its entries of the tape are here. */
    enum dl_role role;
    char uid[DL_WIRE_UID_MAX];
    struct sy_receive receive;
    struct sy_transfer *transfers;
    uint32_t transfer_count, transfers_max;
    struct dl_ws_parser parser;
    int fd;              /* libwebsockets'. */
    struct ssl_st *ssl;  /* The same; NULL: plain. */
    struct sy_loan loan; /* Of its receiving end, to other threads. */
    uint64_t loan_seen;  /* Of loan.bytes: what has been counted. */
    bool is_read;        /* By socket.c, from when the upgrade is answered until the end. */
    bool is_watched;     /* By the network thread. */
    bool is_lent;        /* Or, until its loan is taken back, by another thread. */
    bool is_deaf;        /* What it still sends is thrown away. */
    bool is_over;        /* Nothing more is read. */
    bool close_received; /* Close frames, */
    bool close_sent;     /* one in each direction. */
    bool pong_due;
    uint32_t pong_bytes;
    uint8_t pong[DL_WS_CONTROL_MAX];
    int64_t transfer_ns; /* When the last byte of a transfer came, or the first was announced. */
    /* Sending. */
    struct sy_left left;
    struct sy_control *first, *last;
    uint32_t control_count;
    size_t control_bytes;
    bool *wanted;  /* By local fragment: newer than what was sent, or begun to be. */
    bool *offered; /* By local fragment: its version that is not durable yet has not been begun. */
    bool *lacked;  /* By local fragment: wanted, and what it has of it is older than its connection, or nothing. */
    uint32_t wanted_count, offered_count, lacked_count, next_local;
    struct sy_blob *sending;
    uint32_t sending_chunk;
    struct sy_blob **parked; /* By local fragment: all sent but the last chunk, which waits until it is durable. */
    uint32_t parked_count;
    struct sy_control *farewell; /* Goes out after everything else (STOP). */
    int64_t blocked_ns;          /* Since when the socket takes nothing; 0: it does. */
    uint64_t acked_bytes;        /* By the peer's TCP at the last look. */
    uint64_t turn_sent;          /* See sy_turn. */
    uint64_t heartbeats;
    uint16_t close_code;
    char close_text[120];
};

struct sy_conn *sy_conn_new(struct sy_server *server, struct lws *wsi);
/* The connection is gone: tells the core when it still has a member. */
void sy_conn_closed(struct sy_conn *conn);
/* Ends a connection for a fault of its own or because nobody wants it; logs `text` once. The core is told when `why` >=
 * 0 (an enum sy_leave), else it knows. What is queued goes out first. */
void sy_conn_end(struct sy_conn *conn, int why, uint16_t close_code, const char *text);
/* Refuses a HELLO, counted. */
void sy_conn_refuse(struct sy_conn *conn, const struct dl_wire_refuse *refuse);
/* Tells the core of leaves that came up while its actions were carried out. */
void sy_conn_tell_leaves(struct sy_server *server);
struct sy_conn *sy_conn_of_member(struct sy_server *server, uint32_t member);
/* Deadlines, and a heartbeat when `heartbeat` is given. */
void sy_conn_tick(struct sy_conn *conn, int64_t now_ns, const struct sy_core_view *heartbeat);

/* --- inbound.c */
/* Takes the next bytes of a message; `last`: they end it. */
void sy_conn_receive(struct sy_conn *conn, const uint8_t *bytes, size_t size, bool last);
/* Something came. */
void sy_conn_heard(struct sy_conn *conn);
/* No chunk of this push is to be written any more. */
void sy_conn_forget_push(struct sy_conn *conn, const struct sy_incoming *push);
bool sy_conn_awaits_push(const struct sy_conn *conn);

/* --- socket.c: RFC 6455's receiving end. Bytes go from the socket straight to where they belong; all that is removable of the
 * cost of a push is in this path. libwebsockets' loop wakes for the set of sockets as for any other descriptor. */
DL_MUST_CHECK enum dl_rc sy_sockets_open(struct sy_server *server, int *fd,
                                         struct dl_err *err); /* `*fd`: to wait for. */
void sy_sockets_stop(struct sy_server *server);               /* No other thread reads any more. */
void sy_sockets_close(struct sy_server *server);              /* After libwebsockets, which closes the descriptor. */
/* Some of them have bytes: reads, for a bounded time. */
void sy_sockets_ready(struct sy_server *server);
/* The upgrade is answered: from now on libwebsockets does not read this connection. False: no memory. */
bool sy_socket_take(struct sy_conn *conn);
/* Nothing more is read nor written: libwebsockets closes it soon. */
void sy_socket_finish(struct sy_conn *conn);
/* The chunk under way goes nowhere any more: no thread writes to its place, and what comes next is read in a later turn. */
void sy_socket_drop_chunk(struct sy_conn *conn);
/* Counts what another thread has received for it. True: there was some since the last call. */
bool sy_socket_hear(struct sy_conn *conn);
/* The connection is lost: takes what it had said before (a goodbye, perhaps). */
void sy_socket_drain(struct sy_conn *conn);

/* --- tape.c */
/* A learner was admitted: fills in what of its entries is durable. */
void sy_tape_join(struct sy_conn *conn, const struct dl_wire_hello *hello, struct dl_wire_welcome *welcome);
void sy_tape_leave(struct sy_conn *conn);
/* DL_EFULL: too many wait for a commit; the learner is to come again. DL_EPROTO. */
DL_MUST_CHECK enum dl_rc sy_tape_take(struct sy_conn *conn, const struct dl_wire_trace *trace, struct dl_err *err);
uint64_t sy_tape_acked(const struct sy_conn *conn);

/* --- transmit.c */
void sy_conn_send(struct sy_conn *conn, const struct dl_wire_message *message);
void sy_conn_send_last(struct sy_conn *conn, const struct dl_wire_message *message);
/* It is to have the fragment's durable version. One that is under way is finished; an other one that waits to be durable is
 * given up, and sent anew when it is its turn. */
void sy_conn_want(struct sy_conn *conn, uint32_t local);
/* The same of one that has joined, or come back, and has not been sent anything of the fragment: goes before all others. */
void sy_conn_lacks(struct sy_conn *conn, uint32_t local);
/* The fragment's next version is there, but not durable: all but its last chunk may go. */
void sy_conn_offer(struct sy_conn *conn, uint32_t local);
/* Whatever of updates was under way or waits. */
void sy_conn_drop_updates(struct sy_conn *conn);
/* The socket takes more: writes one message. False: close now. */
bool sy_conn_writeable(struct sy_conn *conn);
void sy_conn_release_queues(struct sy_conn *conn);
/* The connection is gone: the rest of a frame goes with it. */
void sy_conn_release_left(struct sy_conn *conn);

/* --- times.c ---------------------------------------------------------------------------------------------------------
 */

enum sy_stage { /* Of a round, one after the other, but that most of the broadcast is beside the commit. */
                SY_STAGE_WAIT,     /* From the pull to the first push's announcement. */
                SY_STAGE_TRANSFER, /* Until the round was closed: pushes arrive; the grace window is in it. */
                SY_STAGE_MERGE,    /* What the merge took, the broadcast encoded in it. */
                SY_STAGE_COMMIT,   /* From the end of the merge until it was durable. */
                SY_STAGE_HELD,     /* Of it: the last chunk alone was left to send to some receiver, and waited. */
                SY_STAGE_BROADCAST, /* From when sending could begin until the last receiver's last byte was given to its socket. */
                SY_STAGE_COUNT
};
#define SY_RECENT_ROUNDS 64

struct sy_recent {
    uint64_t count; /* Ever added. */
    double seconds[SY_RECENT_ROUNDS];
};
struct sy_spread {
    double min, median, max; /* Seconds. */
};

const char *sy_stage_name(enum sy_stage stage);
/* A version can be sent, but for its last chunk; a connection has got so far with it. */
void sy_times_offered(struct sy_server *server, uint32_t local);
void sy_times_parked(struct sy_server *server, uint32_t local);
/* A version is committed, so that all of it can be sent. */
void sy_times_merged(struct sy_server *server, const struct sy_job *job);
/* A connection has taken the last byte of it. */
void sy_times_sent(struct sy_server *server, const struct sy_blob *blob);
/* Over the last SY_RECENT_ROUNDS rounds; false: there was none. */
bool sy_times_recent(const struct sy_server *server, enum sy_stage stage, struct sy_spread *out);

/* --- the server ------------------------------------------------------------------------------------------------------
 */

struct sy_held_fragment {
    uint32_t fragment;    /* Index in the layout. */
    struct sy_blob *blob; /* Newest committed version; NULL: none yet. */
    struct sy_blob *held; /* The one that comes after it, while it is being committed; or NULL. */
    struct sy_incoming *pushes;
    bool busy;           /* The merge thread has it. */
    uint64_t pull_round; /* The last one pulled, when first, and whether it asks for values rather than deltas. */
    int64_t pull_ns, arrival_ns, closed_ns; /* Pulled, first push announced, round closed. */
    int64_t begun_ns, sent_ns;              /* Sending of `blob`: from and until when; 0: not yet. */
    int64_t offered_ns, parked_ns;          /* Of `held`, where it is or was; 0: not yet. */
    double stage_seconds[SY_STAGE_COUNT];   /* Of the last round. */
    bool pull_seed;
};

struct sy_counters {
    uint64_t connections, upgrades_denied, protocol_errors, slow_closed;
    uint64_t bytes_in, bytes_out, messages_in, messages_out;
    uint64_t versions_skipped;    /* A slow reader never got them: a newer one was there first. */
    uint64_t push_memory_refused; /* Pushes turned away because push_bytes_max was reached. */
    uint64_t refusals;            /* Refused by the shell, before the core saw them. */
    uint64_t commits, commit_failures;
};

struct sy_server {
    const struct sy_server_options *options;
    const struct dl_spec *spec;
    struct sy_core *core;
    struct sy_store *store;
    struct sy_jobs *jobs;
    struct sy_buffers *buffers; /* Memory of pushes and of frames. */
    struct dl_layout *layout;   /* NULL until the first HELLO, or restored. */
    uint32_t fragment_count;    /* Of this shard; local index i is fragment shard + i x shards. */
    struct sy_held_fragment *fragments;
    uint64_t epoch;
    int64_t started_ns;
    int64_t now_ns;          /* Read once a callback. */
    struct sy_saved_member { /* By member: what of its counters was given to the store last. */
        uint64_t born, admission, tokens, step, merged;
        uint64_t pending; /* Of its pushes, in rounds submitted to the merge thread. */
        bool has_left;
    } * saved;
    struct sy_checkpoints *checkpoints;
    uint32_t tasks_pending;  /* Of the merge thread, beside rounds. */
    uint64_t pending_rounds; /* Submitted to the merge thread, not committed. */
    uint64_t token_sum;      /* Of all pushes ever submitted to it: tokensMerged times the shard's fragments. */
    /* Memory of pushes. */
    uint64_t push_bytes, push_bytes_peak, push_bytes_max;
    /* Connections. */
    struct sy_sockets *sockets;
    struct sy_conn *conns;
    uint32_t conn_count, conns_max;
    struct sy_conn **member_conns; /* By member. */
    uint32_t members_max;
    bool *left_by_goodbye; /* By member: how its last connection ended. */
    struct dl_wire_message scratch;
    uint8_t *encode_buffer; /* For control messages. */
    /* libwebsockets */
    struct lws_context *context;
    struct lws_vhost *vhost, *health_vhost;
    int listen_fd, health_fd, signal_fd;
    char address[SY_ADDRESS_MAX], health_address[SY_ADDRESS_MAX];
    lws_sorted_usec_list_t tick_timer;
    struct sy_turn turn;
    bool ready, ended;
    bool is_destroyed; /* libwebsockets goes; what connections still say comes too late. */
    bool leaving;      /* Asked to: saves what is under way, then ends. */
    int64_t leave_deadline_ns;
    int64_t saved_ns;         /* When there was nothing left to save; 0: not yet. */
    uint32_t answers_pending; /* HTTP answers that are not out. */
    bool draining_actions;
    bool leaves_waiting; /* Some connection has a leave to tell the core of, once the actions are drained. */
    int64_t tick_due_ns;
    int64_t end_deadline_ns;
    struct sy_server_end end;
    struct dl_err fatal; /* rc != DL_OK: the process must end. */
    int64_t heartbeat_due_ns, summary_due_ns, conns_due_ns;
    uint64_t summary_rounds;
    struct sy_counters counters;
    uint64_t last_round; /* The last one that was closed. */
    uint32_t last_fragment, last_have;
    double agreement; /* Of the last merge: sy_merge_stats. */
    struct {          /* Per round, but for `push`: from a push's announcement to its last byte. */
        struct dl_histogram collect, merge, commit, total, push;
    } seconds;
    struct sy_recent recent[SY_STAGE_COUNT];
    char *status_text, *metrics_text; /* Cached. */
    int64_t status_ns, metrics_ns;
};

static inline uint32_t sy_local_index(const struct sy_server *server, uint32_t fragment)
{
    return fragment / server->spec->syncer.shards;
}
static inline bool sy_is_ours(const struct sy_server *server, uint32_t fragment)
{
    return fragment % server->spec->syncer.shards == server->options->shard && fragment < server->spec->sync.fragments;
}

/* --- rounds.c */
/* Takes and carries out all actions of the core. Call after every event. */
void sy_server_actions(struct sy_server *server);
/* A push was announced and accepted by the core: memory for it. NULL: the bound is reached, or there is none. */
struct sy_incoming *sy_incoming_new(struct sy_server *server, struct sy_conn *conn,
                                    const struct dl_wire_push *announced);
/* Unlinks and frees. */
void sy_incoming_drop(struct sy_server *server, struct sy_incoming *push);
/* Adds whole blocks at `offset` to the slices' sums of squares. */
void sy_incoming_measure(const struct sy_server *server, struct sy_incoming *push, uint64_t offset, uint32_t bytes);
double sy_incoming_norm(const struct sy_server *server, const struct sy_incoming *push);
/* Results of the merge thread have come. */
void sy_server_take_results(struct sy_server *server);

/* --- layout and state: state.c */
DL_MUST_CHECK enum dl_rc sy_server_adopt_layout(struct sy_server *server, const uint8_t *tensors, size_t bytes,
                                                struct dl_err *err);
DL_MUST_CHECK enum dl_rc sy_server_check_layout(struct sy_server *server, const uint8_t *tensors, size_t bytes,
                                                struct dl_err *err);
DL_MUST_CHECK enum dl_rc sy_server_open_state(struct sy_server *server, struct dl_err *err);

void sy_server_close_state(struct sy_server *server);
/* Of a merge, and of receiving; at least 1. */
uint32_t sy_server_threads(const struct sy_server_options *options);

/* --- checkpoint.c */
#define SY_CHECKPOINTS_MAX 128  /* Kept at once; then one has to be removed. */
#define SY_CUT_PUSHES_MAX 65536 /* Pushes in channels that a checkpoint remembers. */
#define SY_CHECKPOINT_ID_MAX 48
DL_MUST_CHECK enum dl_rc sy_checkpoints_open(struct sy_server *server, struct dl_err *err);
void sy_checkpoints_close(struct sy_server *server);
void sy_checkpoint_id_text(uint64_t id, char out[SY_CHECKPOINT_ID_MAX]);
bool sy_checkpoint_id_parse(const char *text, uint64_t *out);
/* Actions of the core. */
void sy_checkpoint_cut(struct sy_server *server, uint64_t id);
void sy_checkpoint_learner(struct sy_server *server, uint32_t member, const struct dl_wire_marker *marker);
void sy_checkpoint_closed(struct sy_server *server, uint64_t id);
/* A push has arrived whole: it is noted when it was on its way at the cut. */
void sy_checkpoint_in_flight(struct sy_server *server, const struct sy_incoming *push, uint64_t tokens);
void sy_checkpoint_task_done(struct sy_server *server, struct sy_job *job);
/* `*id` 0: a new one, which it then holds. DL_EINVAL: not now, or not so. */
DL_MUST_CHECK enum dl_rc sy_checkpoint_begin(struct sy_server *server, const char *name, uint64_t *id,
                                             struct dl_err *err);
DL_MUST_CHECK enum dl_rc sy_checkpoint_remove(struct sy_server *server, uint64_t id, struct dl_err *err);
char *sy_checkpoints_json(struct sy_server *server); /* Caller frees; NULL: no memory. */

/* --- totals.c */
/* As they will be once all that was submitted is committed. */
void sy_server_totals(const struct sy_server *server, struct sy_store_totals *out);
/* Learner processes whose counters have changed since the last call; the caller frees. */
uint32_t sy_server_changed_members(struct sy_server *server, struct sy_store_member **out);
DL_MUST_CHECK enum dl_rc sy_server_restore_totals(struct sy_server *server, struct dl_err *err);
/* Before the process ends, if it can be: counters since the last commit. */
void sy_server_save(struct sy_server *server);

/* --- shell.c */
/* The core's next deadline may have changed. */
void sy_server_reschedule(struct sy_server *server);
/* Saves and ends the process; asked twice: at once. */
void sy_server_leave(struct sy_server *server);

/* --- http.c, status.c, metrics.c */
struct sy_http_session { /* libwebsockets keeps one a connection, zeroed. */
    char *body;
    size_t size, sent;
    const struct sy_http_command *command; /* A POST whose body is still coming. */
    char id[64], name[72];                 /* Its arguments. */
};
int sy_http_callback(struct lws *wsi, enum lws_callback_reasons reason, void *user, void *in, size_t size);
bool sy_http_token_matches(const struct sy_server *server, struct lws *wsi);
char *sy_status_json(struct sy_server *server); /* Caller frees; NULL: no memory. */
/* Writes it to status.json in the state folder: a process that is gone cannot be asked how it ended. */
void sy_server_leave_status(struct sy_server *server);
char *sy_metrics_text(struct sy_server *server); /* Same. */
uint64_t sy_resident_bytes(void);

#endif
