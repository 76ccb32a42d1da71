/* wk_link: the learner's side of the protocol. What to send, apply, wait for and retry.
 *
 * Pure: it is told what happened and what time it is, and answers what to do next; it opens no socket, reads no clock
 * and starts no thread. It allocates when it is made and when it first learns the layout, never afterwards. The same
 * code runs behind diloco_step and in simulation.
 *
 * Two drivers share one link (behind one lock, when they are two threads):
 *   - the network side asks wk_link_next_act for a connection whenever that connection could take another message, does
 *     it, and reports what came in. Nothing is queued for sending but state: a congested connection is simply not
 * asked, and once it is, META carries the latest boundary.
 *   - the trainer's side reports a boundary and then does what wk_link_next_step says until it says WK_STEP_GO (or that
 * it is over).
 *
 * Fragment p belongs to shard p mod shards. Staging: a fragment has two places for updates (slot 0 and 1), so that one
 * which is complete can wait for its boundary while a newer one arrives. Pushes: one place a fragment. */
#ifndef DL_WORKER_LINK_LINK_H
#define DL_WORKER_LINK_LINK_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"
#include "common/spec.h"
#include "common/wire.h"

#define WK_BACKOFF_MIN_MS 100 /* First pause before a reconnect; doubles, jittered by up to a half. */
#define WK_BACKOFF_MAX_MS 10000
#define WK_GREETING_MS 30000          /* From the start of connecting to WELCOME. */
#define WK_DEFAULT_HEARTBEAT_MS 10000 /* Until WELCOME says otherwise. */
#define WK_DEFAULT_TIMEOUT_MS 60000
#define WK_WAIT_MS_MAX 600000 /* No wait at a boundary is longer, whatever a syncer asks for. */
#define WK_NOTES_MAX 32
#define WK_EVALUATIONS_MAX 8 /* Waiting to be sent; the oldest gives way. */
#define WK_SLOTS 2
#define WK_TRACE_MAX 8192       /* Entries kept until every shard has them; a day of rounds with one shard away. */
#define WK_TRACE_OWNERS_MAX 8   /* Incarnations whose entries a link delivers: its own, and peers'. */
#define WK_LEASES_MAX 8         /* Of the job's data, held at once. */
#define WK_LEASE_WAIT_MS 5000   /* A joined learner waits so long for its first lease; then it begins without. */
#define WK_LEASE_RETRY_MS 10000 /* A request that was not answered is sent again. */
#define WK_UNLEASED_FIRST (UINT64_C(1) << 60) /* Positions that nobody is leased begin here; see wk_link_data. */
#define WK_NS_PER_MS INT64_C(1000000)

struct wk_link; /* Opaque. */

struct wk_link_config {
    enum dl_role role;
    int32_t learner; /* Wanted id; -1: any. Then shard 0 is asked first, and the others for the id that it gave. */
    uint64_t nonce;  /* Random, once a process. Also seeds the jitter. */
    const char *uid; /* Copied, as is all below. */
    const char *job;
    const char *trainer; /* What computes; NULL: not said. */
    uint32_t shards;
    const struct dl_tensor *tensors;
    uint32_t tensor_count;
    uint32_t batch; /* Sequences of the job's data in one step; 0: the trainer takes none from its ledger. */
    bool recover;   /* The shell can fetch state from peers (WK_STEP_FETCH). Learners only. */
    /* A push that missed its round is offered in the next one (link_missed.c). Not in a replay, which does what the tape
     * says. */
    bool keep_missed;
};

DL_MUST_CHECK enum dl_rc wk_link_new(const struct wk_link_config *config, struct wk_link **out, struct dl_err *err);
void wk_link_free(struct wk_link *link); /* NULL is fine. */

/* --- network side ------------------------------------------------------------------------------------------------ */

/* Connections are named by their shard. */

enum wk_act_type {
    WK_ACT_NONE,    /* Nothing now; ask again after an event or at wk_link_deadline. */
    WK_ACT_CONNECT, /* Connect; then wk_link_on_connected or wk_link_on_disconnected. */
    WK_ACT_CLOSE,   /* Close the connection (`text` says why); no further event of it is reported. */
    WK_ACT_SEND,    /* Send `message`. */
    WK_ACT_CHUNK,   /* Send a CHUNK of `chunk.bytes` bytes from `chunk.offset` of the fragment's push; then
                     * wk_link_on_chunk_sent. `seed`: the bytes are those of the base copy instead. */
};

struct wk_chunk {
    uint32_t fragment;
    bool seed;
    uint64_t transfer, offset;
    uint32_t bytes;
};

struct wk_act {
    enum wk_act_type type;
    const struct dl_wire_message *message; /* The link's; valid until the next call on it. */
    struct wk_chunk chunk;
    char text[DL_WIRE_TEXT_MAX];
};

/* What to do next on one connection. Call it only when the connection can take a message. */
void wk_link_next_act(struct wk_link *link, int64_t now_ns, uint32_t shard, struct wk_act *act);

/* Bytes of the largest control message that wk_link_next_act may ask to send (HELLO with its table of tensors). */
uint64_t wk_link_message_bytes_max(const struct wk_link *link);
/* Whether the next act is CLOSE: to be looked at also while the connection takes no message. */
bool wk_link_wants_close(const struct wk_link *link, uint32_t shard);
/* Whether the push of the chunk that is being sent is over, so that its memory is wanted for something else: also to be looked at
 * meanwhile. The shell then copies what it has yet to send, and calls wk_link_on_chunk_sent: a boundary never waits for a
 * socket. */
bool wk_link_wants_memory(const struct wk_link *link, uint32_t shard);

void wk_link_on_connected(struct wk_link *link, int64_t now_ns, uint32_t shard);
/* Could not connect, or the connection is gone. `why` is for the log. */
void wk_link_on_disconnected(struct wk_link *link, int64_t now_ns, uint32_t shard, const char *why);
/* The server answered that this learner must not join (wrong token or certificate): final. */
void wk_link_on_denied(struct wk_link *link, int64_t now_ns, uint32_t shard, const char *why);
/* Any bytes at all came. */
void wk_link_on_heard(struct wk_link *link, int64_t now_ns, uint32_t shard);
/* A decoded control message. What breaks the protocol makes the next act a CLOSE. */
void wk_link_on_message(struct wk_link *link, int64_t now_ns, uint32_t shard, const struct dl_wire_message *message);

enum wk_place { WK_PLACE_SKIP, WK_PLACE_STORE, WK_PLACE_BROKEN };
struct wk_spot { /* Where a chunk's data goes. */
    uint32_t fragment, slot;
    uint64_t offset, total_bytes; /* Within the slot; size of the whole update. */
};
/* The head of a CHUNK came. STORE: receive its data to `*spot`, check it, then wk_link_on_chunk. SKIP: of no use any
 * more. */
enum wk_place wk_link_place(struct wk_link *link, int64_t now_ns, uint32_t shard, uint64_t transfer, uint64_t offset,
                            uint32_t bytes, struct wk_spot *spot);
/* The chunk placed last is there. `intact`: its checksum is right. True when it was the update's last: check
 * `*content_hash` over the whole, then call wk_link_on_update. */
bool wk_link_on_chunk(struct wk_link *link, int64_t now_ns, uint32_t shard, bool intact, uint64_t *content_hash);
void wk_link_on_update(struct wk_link *link, int64_t now_ns, uint32_t shard, bool intact);
/* The bytes of the chunk that WK_ACT_CHUNK named have been read: their memory may change again. */
void wk_link_on_chunk_sent(struct wk_link *link, int64_t now_ns, uint32_t shard);

void wk_link_tick(struct wk_link *link, int64_t now_ns); /* Timeouts. Before it, report what has come in. */
int64_t wk_link_deadline(const struct wk_link *link);    /* When something is due next; INT64_MAX: nothing. */

/* --- the trainer's side ------------------------------------------------------------------------------------------ */

enum wk_step_type {
    WK_STEP_PREPARE,  /* The layout is known (wk_link_layout): make the base copy; then wk_link_on_prepared. */
    WK_STEP_APPLY,    /* Take over the update in `slot`; then wk_link_on_applied. */
    WK_STEP_SNAPSHOT, /* Encode base - parameters of `fragment` with `codec`; then wk_link_on_snapshot. */
    WK_STEP_FETCH,    /* Fetch a piece of a peer's state (link_recover.h), then ask again. */
    WK_STEP_YIELD,    /* The network side is reading memory needed next: ask again in a moment. */
    WK_STEP_WAIT,     /* Wait until something changes, at most until `until_ns`; then ask again. */
    WK_STEP_GO,       /* Train on. */
    WK_STEP_DONE,     /* Over: see wk_link_outcome. */
};

struct wk_step {
    enum wk_step_type type;
    uint32_t fragment, slot;
    enum dl_codec codec;      /* APPLY: of the update. SNAPSHOT: to encode with. */
    float alpha;              /* APPLY: parameters <- alpha * parameters + (1 - alpha) * new. */
    bool rebase;              /* APPLY: first add what was trained since the fragment's last snapshot ... */
    enum dl_codec push_codec; /* ... which is base - decoded push. */
    int64_t until_ns;
};

/* A boundary: one more step of `tokens` tokens is done. */
void wk_link_on_step(struct wk_link *link, int64_t now_ns, uint64_t tokens, float loss);
/* A boundary without a step: while joining, and an evaluator's. */
void wk_link_on_poll(struct wk_link *link, int64_t now_ns);
void wk_link_next_step(struct wk_link *link, int64_t now_ns, struct wk_step *step);
void wk_link_on_prepared(struct wk_link *link);
void wk_link_on_applied(struct wk_link *link, uint32_t fragment);
void wk_link_on_snapshot(struct wk_link *link, uint32_t fragment);

/* Every fragment has been applied at least once. */
bool wk_link_is_joined(const struct wk_link *link);
/* Takes an evaluator's result (its round and tokens are filled in here) for every shard. */
void wk_link_report(struct wk_link *link, double loss, uint32_t sequences, uint64_t parameter_hash);
/* Says GOODBYE on every connection once its pushes are out, and connects no more. */
void wk_link_leave(struct wk_link *link, int64_t now_ns, bool preempted, const char *text);
/* Nothing more to send for wk_link_leave. */
bool wk_link_has_left(const struct wk_link *link);

/* --- the tape ----------------------------------------------------------------------------------------------------
 * What asynchrony decides for this learner is noted here and delivered to every shard, each entry before the first PUSH
 * whose snapshot depends on it, and again after a reconnect until it is durable there (docs/tape.md). The link notes
 * `apply` and `snapshot` by itself. Beyond WK_TRACE_MAX waiting entries the oldest is given up: the run goes on, and
 * cannot be replayed from there. */

/* Notes an entry at the step as it is now. `kind`: 1 to DL_TRACE_KIND_MAX - 1 characters; `text` may be NULL. */
void wk_link_trace(struct wk_link *link, const char *kind, uint32_t fragment, uint64_t a, uint64_t b, uint64_t c,
                   const char *text);
/* The entry noted last; false: none. */
bool wk_link_trace_newest(const struct wk_link *link, struct dl_trace_entry *out);
/* The entries that some shard may lack, this incarnation's and those of others that it delivers, page by page: `*position` is 0
 * at first. False: there are no more. They are handed to a peer together with this learner's state. */
bool wk_link_trace_next(const struct wk_link *link, uint64_t *position, struct dl_wire_trace *out);
/* Takes over entries of a peer, ascending, whose state this learner goes on with: they are delivered before anything
 * noted from now on. False: WK_TRACE_OWNERS_MAX peers already. */
bool wk_link_trace_adopt(struct wk_link *link, const char *uid, uint64_t nonce, const struct dl_trace_entry *entries,
                         uint32_t count);

/* --- the job's data ----------------------------------------------------------------------------------------------
 * Shard 0 leases positions of the job's data; the trainer takes them in order, each before the step that it is for, and every
 * PUSH says how far its snapshot has come. Without a lease (none was granted in time, or those held were given to others while
 * this learner was away) positions come from a part of the data's order that belongs to this incarnation alone, beyond
 * WK_UNLEASED_FIRST: training goes on, and these never count as covered. */

struct wk_range {
    uint64_t lease; /* 0: unleased. */
    uint64_t first, count;
};
/* The next positions to train on, at most `count` (>= 1), fewer where a lease ends: ask again for the rest. */
void wk_link_data(struct wk_link *link, uint64_t count, struct wk_range *range);

struct wk_data_view {
    uint64_t leases, sequences, unleased; /* Leases received; sequences taken, and of them without a lease. */
    uint64_t revoked;                     /* How often leases were lost. */
};
void wk_link_data_view(const struct wk_link *link, struct wk_data_view *view);

/* --- views ------------------------------------------------------------------------------------------------------- */

const struct dl_layout *wk_link_layout(const struct wk_link *link); /* NULL before the first WELCOME. */

enum wk_end { WK_END_NONE, WK_END_SUCCEEDED, WK_END_STOPPED, WK_END_FAILED, WK_END_REFUSED };
struct wk_outcome {
    enum wk_end end;
    char text[DL_ERR_TEXT_MAX];
};
void wk_link_outcome(const struct wk_link *link, struct wk_outcome *outcome);

struct wk_link_view {
    uint32_t learner, shards, connected;
    uint64_t step, tokens;
    uint64_t ensemble_step, tokens_all, token_budget;
    uint32_t learners;
    uint64_t updates_applied, pushes_sent;
    uint64_t last_round;
    uint64_t waited_ns, busy_ns;
    uint64_t reconnects;
    uint64_t trace_made, trace_lost;     /* Entries of the tape; given up for lack of room. */
    uint64_t verdicts[DL_VERDICT_COUNT]; /* Of RESULTs. */
};
void wk_link_view(const struct wk_link *link, struct wk_link_view *view);
/* Why a connection was lost or not made last; empty: never. */
const char *wk_link_trouble(const struct wk_link *link);
/* A fragment's state as META would carry it. */
void wk_link_fragment(const struct wk_link *link, uint32_t fragment, struct dl_wire_fragment *out);

/* Takes the oldest line for the log; false when there is none. Level as in common/log.h. */
bool wk_link_next_note(struct wk_link *link, int *level, char text[DL_ERR_TEXT_MAX]);

/* For tests and simulation: checks every invariant; NULL when all hold, else the text of the one that does not. */
const char *wk_link_check(const struct wk_link *link);

#endif
