/* The inside of wk_link, shared by its parts: link.c (life, views), link_net.c (connections), link_step.c (boundaries),
 * link_lease.c (the job's data), link_missed.c (pushes that come too late). Pure; included by nothing else. */
#ifndef DL_WORKER_LINK_LINK_STATE_H
#define DL_WORKER_LINK_LINK_STATE_H

#include "common/rng.h"
#include "worker/link/link.h"
#include "worker/link/link_recover.h"

enum wk_conn_state {
    WK_CONN_IDLE,       /* Not connected; tries again at `retry_ns`. */
    WK_CONN_CONNECTING, /* The shell is at it. */
    WK_CONN_GREETING,   /* Connected; HELLO goes out, WELCOME is awaited. */
    WK_CONN_READY,
    WK_CONN_OVER, /* Never again. */
    WK_CONN_STATES
};

struct wk_conn {
    enum wk_conn_state state;
    bool close_wanted; /* The next act is CLOSE. */
    char close_text[DL_WIRE_TEXT_MAX];
    bool hello_sent, goodbye_sent;
    bool meta_due, meta_was_last;
    bool stopped; /* STOP, or a refusal that says the job is over. */
    enum dl_stop_result stop_result;
    uint32_t attempts; /* Since the last WELCOME. */
    int64_t retry_ns;  /* IDLE */
    int64_t since_ns;  /* CONNECTING: when it began, for the greeting's bound. */
    int64_t lost_ns;   /* When it was last READY; at first, when the link began to try. */
    int64_t heard_ns, sent_ns;
    uint32_t heartbeat_ms, timeout_ms;
    uint64_t epoch;
    bool awaits_pull; /* Once the link's `step` reaches `pull_by`. */
    uint64_t pull_by;
    uint32_t pull_wait_ms;
    uint64_t heartbeats, transfers;
    uint64_t evaluations_sent;        /* Of those ever reported. */
    uint64_t trace_sent, trace_acked; /* Positions. */
    uint64_t marker_sent;             /* On this connection; 0: none. */
    bool placed;                      /* A chunk's data is being received to this place. */
    uint32_t placed_fragment, placed_slot, placed_bytes;
    bool chunk_busy; /* A chunk's bytes are being read by the shell. */
    uint32_t chunk_fragment, chunk_bytes;
    bool peers_heard;   /* PEERS came on this connection. */
    bool recovered_due; /* RECOVERED is to be sent. */
};

enum wk_slot_state { WK_SLOT_FREE, WK_SLOT_RECEIVING, WK_SLOT_COMPLETE, WK_SLOT_APPLYING };

struct wk_slot { /* An update that comes in, or waits for its boundary. */
    enum wk_slot_state state;
    struct dl_wire_update update;
    uint64_t received; /* Bytes. */
    bool forgotten;    /* Its version is one the syncer no longer knows. */
};

enum wk_push_state {
    WK_PUSH_NONE,
    WK_PUSH_SNAPSHOT,
    WK_PUSH_READY,
    WK_PUSH_SENDING,
    WK_PUSH_MISSED, /* Encoded, but its round is over: it waits for the next one's PULL. */
};

struct wk_push {
    enum wk_push_state state;
    struct dl_wire_push head;
    bool seed;
    bool dropped;    /* Of no use any more, while someone still works on its bytes. */
    bool kept;       /* Sent in full: its bytes stay, and say what the snapshot was. */
    bool missed;     /* SNAPSHOT: its round is over already. */
    uint64_t offset; /* Bytes sent. */
    uint64_t order;  /* First come, first sent. */
};

struct wk_fragment {
    uint64_t version, round, applied_step;
    uint64_t pushed_base; /* Of the last snapshot: what was trained on this version has been given to a push. */
    uint32_t steps;
    uint64_t tokens;
    bool adopted; /* An update was applied. */
    bool rebases; /* The update that is being applied keeps what was trained since the snapshot. */
    struct wk_slot slots[WK_SLOTS];
    struct wk_push push;
    bool pulled; /* `pull` waits for its answer. */
    struct dl_wire_pull pull;
    bool none_due;
    struct dl_wire_push_none none;
    bool awaits_update; /* Of `update_round`, once the link's `step` reaches `update_by`. */
    uint64_t update_by, update_round;
    uint32_t update_wait_ms;
    /* While a joiner takes its state from a peer: what that peer has of the fragment; version 0: nothing. */
    struct wk_offer offer;
    bool offer_confirmed; /* The syncer said that it holds the same. */
    bool held_due;        /* HELD is to be sent. */
};

enum wk_recover_state {
    WK_RECOVER_OFF,
    WK_RECOVER_ASKING,   /* HELLO asked for peers; not every shard has answered. */
    WK_RECOVER_FETCHING, /* The shell is at it. */
    WK_RECOVER_OVER
};

struct wk_recover {
    enum wk_recover_state state;
    int64_t since_ns;    /* The first PEERS; INT64_MAX: none yet. */
    int64_t welcomed_ns; /* The first WELCOME; the same. */
    bool asked;          /* The shell has taken a candidate. */
    uint32_t count;
    struct wk_candidate {
        struct dl_wire_peer peer;
        uint32_t named; /* By so many shards. */
        bool tried;
    } candidates[WK_CANDIDATES_MAX];
    bool told; /* The shards are told what is offered. */
    struct dl_wire_recovered report;
};

struct wk_record { /* An entry of the tape on its way. */
    uint32_t owner;
    struct dl_trace_entry entry;
};

struct wk_owner { /* An incarnation whose entries this one delivers. */
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
};

/* Entries that some shard does not have durable yet; record of position k is records[k % WK_TRACE_MAX]. */
struct wk_trace {
    struct wk_record *records;
    uint64_t first, made; /* Positions: the oldest that is kept, the newest. made < first: empty. */
    uint64_t seq;         /* Of this incarnation's own newest. */
    uint64_t lost;        /* Given up before every shard had them. */
    uint32_t owner_count; /* [0]: this incarnation. */
    struct wk_owner owners[WK_TRACE_OWNERS_MAX];
};

struct wk_lease {
    uint64_t lease, first, count;
};

/* The job's data. The trainer takes from held[0], whose first `taken` positions it has. */
struct wk_data {
    uint32_t batch; /* 0: not used. */
    struct wk_lease held[WK_LEASES_MAX];
    uint32_t held_count;
    uint64_t taken;
    uint64_t newest;              /* The highest lease received since the start, or since they were revoked. */
    uint64_t at_lease, at_cursor; /* What the trainer has taken, as a cursor ... */
    uint64_t lease, cursor;       /* ... and what the last boundary has seen of it. */
    bool asks, asked;             /* A request is due; is under way, */
    int64_t asked_ns;             /* since when. */
    int64_t wait_until_ns;        /* For the first lease; -1: not begun, INT64_MAX: over. */
    bool begun;                   /* Sequences were taken; the last ones of this lease: */
    uint64_t source;
    uint64_t unleased_first, leases, sequences, unleased, revoked;
};

struct wk_note {
    int level;
    char text[DL_ERR_TEXT_MAX];
};

struct wk_link {
    enum dl_role role;
    int32_t wanted; /* Learner id asked for; after the first WELCOME the one given. */
    bool welcomed;
    uint64_t nonce;
    char uid[DL_WIRE_UID_MAX];
    char job[DL_SPEC_NAME_MAX];
    struct dl_tensor *tensors;
    uint32_t tensor_count;
    uint8_t *tensors_wire;
    uint32_t tensors_bytes;
    struct dl_rng rng;

    uint32_t shards;
    struct wk_conn conns[DL_SPEC_SHARDS_MAX];

    struct dl_layout *layout;
    bool prepared; /* The shell holds the base copy. */
    bool keep_missed;
    bool joined;
    enum dl_codec compression;
    enum dl_apply_mode apply;
    float alpha;
    struct wk_fragment fragments[DL_SPEC_FRAGMENTS_MAX];

    char serve[DL_WIRE_ADDRESS_MAX]; /* Where this learner serves its state; empty: it does not. */
    struct wk_recover recover;
    enum dl_codec broadcast;

    uint64_t step, tokens;
    float loss;
    uint64_t step_ns, busy_ns, waited_ns;
    int64_t left_ns;    /* When the trainer was last told to go; -1: never. */
    int64_t waiting_ns; /* Since when this boundary waits; -1: it does not. */
    bool boundary_due;  /* META of this boundary has yet to be marked as due. */

    struct wk_trace trace;
    char trainer[DL_WIRE_TRAINER_MAX];
    struct wk_data data;

    struct dl_wire_marker marker; /* The newest heard of, and where this learner was then; id 0: none. */

    uint64_t ensemble_step, tokens_all, token_budget;
    uint32_t learners;
    uint64_t updates_applied, pushes_sent, push_order, last_round, reconnects;
    uint64_t verdicts[DL_VERDICT_COUNT];

    struct dl_wire_evaluation evaluations[WK_EVALUATIONS_MAX];
    uint64_t evaluations_made;

    bool leaving, preempted;
    char leave_text[DL_WIRE_TEXT_MAX];
    struct wk_outcome outcome;

    char trouble[DL_WIRE_TEXT_MAX + 32];
    struct wk_note notes[WK_NOTES_MAX];
    uint64_t notes_made, notes_taken;
    struct dl_wire_message message; /* Of the last act. */
};

static inline uint32_t wk_shard_of(const struct wk_link *link, uint32_t fragment)
{
    return fragment % link->shards;
}

static inline uint32_t wk_fragment_count(const struct wk_link *link)
{
    return link->layout == NULL ? 0 : link->layout->fragment_count;
}

/* The fragments of one shard: shard, shard + shards, ... */
#define WK_FOR_SHARD(link, shard, p) for (uint32_t p = (shard); p < wk_fragment_count(link); p += (link)->shards)

void wk_note(struct wk_link *link, int level, const char *fmt, ...) DL_PRINTF(3, 4);
void wk_conn_move(struct wk_link *link, uint32_t shard, enum wk_conn_state to);
/* Ends the link for good; the first end stays. */
void wk_end(struct wk_link *link, enum wk_end end, const char *fmt, ...) DL_PRINTF(3, 4);
/* Makes the next act of the connection a CLOSE. */
void wk_close(struct wk_link *link, uint32_t shard, const char *fmt, ...) DL_PRINTF(3, 4);
/* Drops a push that has not been sent in full. */
void wk_push_drop(struct wk_push *push, const struct wk_conn *conn, uint32_t fragment);
/* Whoever worked on a dropped push's bytes is done with them. */
void wk_push_dropped(struct wk_link *link, uint32_t fragment);
/* Ends a connection's state; it will be tried again, unless it is over. */
void wk_conn_lose(struct wk_link *link, int64_t now_ns, uint32_t shard, const char *why);
/* Answers a pull of the values, if there is one. Its bytes are the base copy's: no snapshot is needed, but it must be there and not
 * change; else this is called again when it is, when the update is applied, when the push's memory is free. */
void wk_push_seed(struct wk_link *link, uint32_t fragment);
/* Version held: applied, or complete and waiting for its boundary. */
uint64_t wk_version_held(const struct wk_fragment *fragment);
void wk_fragment_wire(const struct wk_link *link, uint32_t fragment, struct dl_wire_fragment *out);
/* link_missed.c */
/* Whether an update would replace work on the fragment that no push has carried, and there is a place to keep it. */
bool wk_is_unheard(const struct wk_link *link, uint32_t fragment);
/* A PULL came: true when a push that is here goes out for its round, instead of a new one. */
bool wk_missed_offer(struct wk_link *link, uint32_t fragment, const struct dl_wire_pull *pull);
/* The push of this round was late: true when it is kept for the next one. */
bool wk_missed_late(struct wk_link *link, uint32_t fragment, uint64_t round);
/* What was trained so far is nobody's any more. */
void wk_missed_forget(struct wk_link *link, uint32_t fragment);
/* link_recover.c */
void wk_recover_on_peers(struct wk_link *link, int64_t now_ns, uint32_t shard, const struct dl_wire_peers *peers);
void wk_recover_on_held(struct wk_link *link, const struct dl_wire_held *held);
void wk_recover_on_welcome(struct wk_link *link, int64_t now_ns, uint32_t shard);
void wk_recover_forget(struct wk_link *link, uint32_t shard);
bool wk_recover_asks(const struct wk_link *link); /* HELLO's `recover`. */
/* The next message about recovery on this connection; false: none. */
bool wk_recover_send(struct wk_link *link, uint32_t shard);
/* Looks whether the next thing to do is to fetch. False: recovery is over, or was never on; or it waits, until
 * `*until_ns`. */
bool wk_recover_step(struct wk_link *link, int64_t now_ns, int64_t *until_ns);
bool wk_recover_is_over(const struct wk_link *link);
/* Before the base copy is made: a peer is asked first, since it takes as long for its snapshot. False: nobody is to be asked. */
bool wk_recover_goes_first(struct wk_link *link, int64_t now_ns, struct wk_step *step);
bool wk_stop_reached(struct wk_link *link, int64_t now_ns);
/* The next TRACE of a connection up to `position`, into link->message; false: all that is sent. */
bool wk_trace_send(struct wk_link *link, struct wk_conn *conn, uint64_t position);
/* A shard says what it has durable: after a (re)connect, when what it lacks is sent again, and later on. */
void wk_trace_welcomed(struct wk_link *link, struct wk_conn *conn, uint64_t acked);
void wk_trace_acked(struct wk_link *link, struct wk_conn *conn, uint64_t acked);
/* link_lease.c */
void wk_lease_welcomed(struct wk_link *link);
void wk_lease_boundary(struct wk_link *link);
bool wk_lease_send(struct wk_link *link, int64_t now_ns, uint32_t shard);
void wk_lease_received(struct wk_link *link, const struct dl_wire_lease *lease);
/* Others have this learner's data by now. */
void wk_lease_lost(struct wk_link *link);
/* Whether a joined learner waits for its first lease, and until when at most. */
bool wk_lease_awaited(struct wk_link *link, int64_t now_ns, int64_t *until_ns);
int64_t wk_lease_deadline(const struct wk_link *link);
const char *wk_lease_check(const struct wk_link *link);
void wk_on_welcome(struct wk_link *link, int64_t now_ns, uint32_t shard, const struct dl_wire_welcome *welcome);

#endif
