/* dl_wire: the messages of subprotocol `diloco.v1`, between learner (or evaluator) and syncer shard.
 *
 * One binary WebSocket message carries one protocol message: a 24-byte header, then the payload; all little-endian, field
 * by field. The fields of each message stand in one table (wire.c) from which both encoder and decoder work.
 *
 *     0 magic "DLC1"   4 version u8   5 type u8   6 zero u16   8 payload bytes u32   12 zero u32   16 checksum u64
 *
 * The checksum is XXH3-64 of the payload, seeded with the header's first 16 bytes hashed to 64 bits, so that it covers
 * both. A CHUNK's payload is 16 bytes (transfer u64, offset u64) and then data; its size keeps control messages flowing
 * between chunks. A CHUNK's checksum is made of the leaves of its data (content.h), with the hash of its prefix (seeded with
 * that of the header) as seed, so that the two may lie apart. Chunks of an UPDATE begin at multiples of DL_LEAF_BYTES: their
 * leaves are those of the content. In every list of fragments the indices strictly ascend.
 *
 * How a connection goes:
 *     learner                            syncer
 *     HELLO (identity, tensors)   ->
 *                                 <-     WELCOME (id, settings, versions)  or  REFUSE, then close
 *                                 <-     PEERS, when HELLO asked for them (`recover`)
 *     HELD per fragment           ->     (what a peer could give it; only when PEERS named some)
 *                                 <-     HELD per fragment (what the syncer holds: where the two differ ..)
 *                                 <-     UPDATE + CHUNKs for every fragment that is newer than the learner's
 *     LEASE_REQUEST               ->     (learners that take their data from the job's ledger; shard 0 only)
 *                                 <-     LEASE (once it is durable)
 *     RECOVERED                   ->     (the state of which peer it took over)
 *     META at every step boundary ->
 *                                 <-     PULL (round, fragment)
 *     TRACE (before a PUSH)       ->     (what this learner's parameters depend on, see docs/tape.md)
 *     PUSH + CHUNKs, or PUSH_NONE ->     (answered at a step boundary)
 *                                 <-     RESULT (what became of the push)
 *                                 <-     UPDATE + CHUNKs, to all
 *     EVALUATION (evaluators)     ->
 *     MARKER                      <->    MARKER (a checkpoint's cut, before anything that depends on what follows it)
 *     HEARTBEAT                   <->    HEARTBEAT
 *     GOODBYE                     ->  or <-  STOP
 * Nothing has to be sent again after a reconnect: counters of a fragment grow until an update of it is applied, so the next
 * pull covers what a lost push held. The syncer merges a given (incarnation, fragment, base version) at most once.
 *
 * Pure; any thread; no allocation. */
#ifndef DL_COMMON_WIRE_H
#define DL_COMMON_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/content.h"
#include "common/err.h"
#include "common/spec.h"

#define DL_WIRE_SUBPROTOCOL "diloco.v1"
#define DL_WIRE_VERSION 3
#define DL_WIRE_HEADER_BYTES 24
#define DL_WIRE_CHUNK_PREFIX_BYTES 16
#define DL_WIRE_CHUNK_DATA_MAX (1u << 20)            /* Data bytes in one CHUNK. */
#define DL_WIRE_CONTROL_PAYLOAD_MAX (64u * 1024)     /* Payload of every message but CHUNK and HELLO. */
#define DL_WIRE_HELLO_PAYLOAD_MAX (4u * 1024 * 1024) /* Holds the tensor table. */
#define DL_WIRE_UID_MAX 64
#define DL_WIRE_TEXT_MAX 256
#define DL_WIRE_TRAINER_MAX 96
#define DL_WIRE_TRACE_MAX 64 /* Entries in one TRACE. */
#define DL_TRACE_KIND_MAX 16
#define DL_TRACE_TEXT_MAX 128
#define DL_TRACE_NO_FRAGMENT UINT32_MAX
#define DL_WIRE_BATCH_MAX (1u << 24) /* Sequences in one inner step. */
#define DL_WIRE_ADDRESS_MAX 128      /* host:port, [address]:port */
#define DL_WIRE_PEERS_MAX 4          /* Named in one PEERS. */

enum dl_wire_type { /* Wire values: never renumber. */
                    DL_WIRE_HELLO = 1,
                    DL_WIRE_WELCOME = 2,
                    DL_WIRE_REFUSE = 3,
                    DL_WIRE_META = 4,
                    DL_WIRE_PULL = 5,
                    DL_WIRE_PUSH = 6,
                    DL_WIRE_PUSH_NONE = 7,
                    DL_WIRE_CHUNK = 8,
                    DL_WIRE_RESULT = 9,
                    DL_WIRE_UPDATE = 10,
                    DL_WIRE_EVALUATION = 11,
                    DL_WIRE_HEARTBEAT = 12,
                    DL_WIRE_GOODBYE = 13,
                    DL_WIRE_STOP = 14,
                    DL_WIRE_TRACE = 15,
                    DL_WIRE_LEASE_REQUEST = 16,
                    DL_WIRE_LEASE = 17,
                    DL_WIRE_MARKER = 18,
                    DL_WIRE_PEERS = 19,
                    DL_WIRE_HELD = 20,
                    DL_WIRE_RECOVERED = 21,
};

enum dl_role { DL_ROLE_LEARNER = 0, DL_ROLE_EVALUATOR = 1 }; /* Evaluators observe: never pulled, never in a quorum. */

/* What became of a push, or why one was not made: the machine-readable reasons of logs and metrics. */
enum dl_verdict {
    DL_VERDICT_ACCEPTED = 0,   /* In the round; will be merged. */
    DL_VERDICT_LATE = 1,       /* The round was already merging or merged. */
    DL_VERDICT_DUPLICATE = 2,  /* This incarnation already pushed in this round, or this base was merged before. */
    DL_VERDICT_STALE_BASE = 3, /* Base version too old, or from the future. */
    DL_VERDICT_NOT_FINITE = 4, /* NaN or Inf. */
    DL_VERDICT_NORM = 5,       /* Delta norm absurd against the others'. */
    DL_VERDICT_CHECKSUM = 6,
    DL_VERDICT_MALFORMED = 7, /* Size, codec, fragment or counters make no sense. */
    DL_VERDICT_UNKNOWN_ROUND = 8,
    DL_VERDICT_LAYOUT_MISMATCH = 9,
    DL_VERDICT_BELOW_QUORUM = 10, /* The round ended without its quorum (at shutdown). */
    DL_VERDICT_ABORTED = 11,      /* The connection was lost in the middle of the transfer. */
    DL_VERDICT_NOTHING = 12,      /* No steps since the last update of this fragment. */
    DL_VERDICT_LEASE_LOST = 13,   /* It holds data that was leased out again: this learner was gone too long. */
    DL_VERDICT_COUNT
};
const char *dl_verdict_name(enum dl_verdict verdict); /* "accepted", "late", "stale_base", ... */

enum dl_refusal { /* Why a HELLO was refused. */
                  DL_REFUSE_VERSION = 1,
                  DL_REFUSE_JOB = 2,
                  DL_REFUSE_LAYOUT = 3,
                  DL_REFUSE_FULL = 4,       /* learners.max is reached. */
                  DL_REFUSE_SHARD = 5,      /* This is another shard than the learner thinks. */
                  DL_REFUSE_SUPERSEDED = 6, /* A newer incarnation of this learner id has joined. */
                  DL_REFUSE_FINISHED = 7,   /* The job is over: exit. */
                  DL_REFUSE_MALFORMED = 8,
};
/* Whether trying again later can help (FULL), or not (the others). */
bool dl_refusal_is_temporary(enum dl_refusal code);

enum dl_stop_result { DL_STOP_SUCCEEDED = 0, DL_STOP_REQUESTED = 1, DL_STOP_TIMEOUT = 2, DL_STOP_FAILED = 3 };

#define DL_PULL_SEED 1u   /* Push the values themselves (codec none), not a delta: the first state of the job. */
#define DL_PULL_WARMUP 2u /* A round of interval warm-up. */
#define DL_PULL_FINAL 4u  /* The last round of this fragment. */
#define DL_PULL_MISSED 8u /* A push that missed an earlier round will do, and is better than to come late again. */
#define DL_UNBOUNDED UINT32_MAX

struct dl_wire_fragment {  /* One fragment as seen by a learner, or as held by the syncer. */
    uint32_t fragment;     /* Index in the job's layout. */
    uint64_t version;      /* Applied (learner) or current (syncer); 0: none yet. */
    uint64_t applied_step; /* t_m at which it was applied. */
    uint32_t steps;        /* c_steps */
    uint64_t tokens;       /* c_tokens */
};

/* One thing that asynchrony decided for a learner, and on which its parameters depend from then on. `kind` says which:
 * docs/tape.md lists them. */
struct dl_trace_entry {
    uint64_t seq;  /* 1, 2, 3, ... of the incarnation. */
    uint64_t step; /* t_m: inner steps taken before it. */
    uint64_t a, b, c;
    uint32_t fragment; /* DL_TRACE_NO_FRAGMENT: not about one. */
    char kind[DL_TRACE_KIND_MAX];
    char text[DL_TRACE_TEXT_MAX];
};

struct dl_wire_hello {
    uint8_t role;              /* enum dl_role */
    int32_t learner;           /* The wanted learner id; -1: any free one. */
    uint64_t nonce;            /* Random, drawn once a process: with uid and admission number, the identity. */
    char uid[DL_WIRE_UID_MAX]; /* Pod UID, or host:pid. */
    char job[DL_SPEC_NAME_MAX];
    char trainer[DL_WIRE_TRAINER_MAX]; /* What computes, for replay; may be empty. */
    uint32_t shard;                    /* Which shard the learner believes this is. */
    uint64_t step;                     /* t_m so far */
    uint64_t tokens;                   /* Trained by this incarnation so far. */
    uint8_t recover;                   /* 1: asks for PEERS, and says with HELD what they could give it. */
    char serve[DL_WIRE_ADDRESS_MAX];   /* Where this learner serves its state to others; empty: it does not. */
    uint32_t fragment_count;           /* Versions held; empty at first. */
    struct dl_wire_fragment fragments[DL_SPEC_FRAGMENTS_MAX];
    const uint8_t *tensors; /* dl_tensors_encode; borrowed: on decoding points into the message. */
    uint32_t tensors_bytes;
};

struct dl_wire_welcome {
    uint32_t learner;   /* The id given. */
    uint64_t admission; /* Grows with every admission on this shard. */
    uint64_t epoch;     /* Incarnation of the syncer: changes when it restarts. */
    uint32_t shard, shards;
    uint32_t
        fragments_total; /* P of the job; with `layout`, the learner builds the layout and compares `layout_hash`. */
    uint8_t layout;      /* enum dl_layout_kind */
    uint64_t layout_hash;
    uint8_t compression, broadcast_compression; /* enum dl_codec */
    uint8_t apply;                              /* enum dl_apply_mode */
    float apply_alpha;
    uint32_t heartbeat_ms, timeout_ms;
    uint64_t step;   /* The ensemble's step: the furthest learner's. */
    uint64_t tokens; /* Trained by all so far, and the budget (0: none): for schedules. */
    uint64_t token_budget;
    uint32_t learners; /* learners.replicas */
    /* How far the learner may run before this shard's first pull, as in PULL. */
    uint32_t pull_within_steps, update_within_steps, wait_ms;
    uint64_t trace_acked;    /* Of this incarnation's TRACEs, positions up to it are durable here. */
    uint32_t fragment_count; /* This shard's fragments with their current versions. */
    struct dl_wire_fragment fragments[DL_SPEC_FRAGMENTS_MAX];
};

struct dl_wire_refuse {
    uint16_t code; /* enum dl_refusal */
    char text[DL_WIRE_TEXT_MAX];
};

struct dl_wire_meta { /* State at a step boundary. */
    uint64_t step;
    uint64_t tokens;    /* By this incarnation. */
    float loss;         /* Of the last step; NaN: unknown. */
    uint64_t step_ns;   /* Duration of the last step's compute. */
    uint64_t busy_ns;   /* Compute time of this incarnation so far. */
    uint64_t waited_ns; /* Time that steps were held up by synchronisation so far. */
    uint32_t fragment_count;
    struct dl_wire_fragment fragments[DL_SPEC_FRAGMENTS_MAX]; /* This shard's. */
};

struct dl_wire_pull {
    uint64_t round;
    uint32_t fragment;
    uint64_t version; /* Current version: what the push is expected to be based on. */
    uint32_t flags;   /* DL_PULL_* */
    /* Steps that the learner may take from the push that answers this pull until it must have seen the shard's next pull (of
     * whichever fragment), and until it must have applied this round's update, before it waits at a boundary; DL_UNBOUNDED:
     * never waits (decoupled). A wait ends after wait_ms in any case. A PUSH_NONE asks for no wait. */
    uint32_t pull_within_steps, update_within_steps, wait_ms;
    uint64_t trace_acked; /* As in WELCOME. */
};

struct dl_wire_push {
    uint64_t transfer; /* Names the CHUNKs that follow; unique in a connection and direction. */
    uint64_t round;
    uint32_t fragment;
    uint64_t base_version;
    uint64_t step;   /* t_m of the snapshot */
    uint32_t steps;  /* c_steps */
    uint64_t tokens; /* c_tokens */
    uint8_t codec;   /* enum dl_codec */
    uint64_t bytes;  /* Encoded size, all chunks together. */
    uint64_t trace;  /* What the snapshot depends on was sent in TRACEs up to this position. */
    /* The snapshot has seen all of the learner's leases before `lease`, and the first `cursor` positions of it. 0: none. */
    uint64_t lease, cursor;
};

struct dl_wire_push_none {
    uint64_t round;
    uint32_t fragment;
    uint8_t reason; /* enum dl_verdict */
};

struct dl_wire_result {
    uint64_t round;
    uint32_t fragment;
    uint8_t verdict; /* enum dl_verdict */
};

struct dl_wire_update {
    uint64_t transfer;
    uint32_t fragment;
    uint64_t version;
    uint64_t round;        /* That made it; 0: the first state. */
    uint8_t codec;         /* none or bf16 */
    uint64_t bytes;        /* Encoded size of the whole fragment. */
    uint64_t content_hash; /* dl_content_hash of the encoded bytes. */
    uint32_t participants; /* Learners merged. */
};

struct dl_wire_evaluation {
    uint64_t round;  /* Highest round among the versions evaluated. */
    uint64_t tokens; /* Trained by all, as last heard. */
    double loss;     /* Validation loss of the global model, nats a token. */
    uint32_t sequences;
    uint64_t parameter_hash; /* XOR over fragments of dl_hash64(fragment values, fragment index). */
};

struct dl_wire_heartbeat {
    uint64_t sequence;
    uint64_t step;   /* Syncer to learner: the ensemble's step. */
    uint64_t tokens; /* Syncer to learner: trained by all. */
};

struct dl_wire_goodbye {
    uint8_t preempted; /* 1: leaving against its will. */
    char text[DL_WIRE_TEXT_MAX];
};

struct dl_wire_stop {
    uint8_t result; /* enum dl_stop_result */
    char text[DL_WIRE_TEXT_MAX];
};

/* Entries for the tape. A learner numbers what it delivers, 1, 2, 3, ..., over all connections: its own entries, and
 * those that it took over from a peer together with the peer's state. */
struct dl_wire_trace {
    uint64_t position;         /* Of the first entry; the others follow. */
    uint64_t nonce;            /* Whose entries these are: */
    char uid[DL_WIRE_UID_MAX]; /* the sender's own, or a peer's. */
    uint32_t count;
    struct dl_trace_entry entries[DL_WIRE_TRACE_MAX];
};

/* What a learner has of the job's data: after every WELCOME of shard 0, and when it wants more. A repeat is harmless. */
struct dl_wire_lease_request {
    uint64_t last;  /* The highest lease that it holds, or has held; 0: none. */
    uint32_t batch; /* Sequences in one of its steps. */
    uint8_t want;   /* 1: another one, please. */
};

/* Positions `first` .. first + count - 1 of the job's data are the learner's to train on. Or `revoked`: all leases up to
 * `lease` are others' by now, and what was trained on them and not merged must not be pushed: the learner takes the global
 * state anew. */
struct dl_wire_lease {
    uint64_t lease, first;
    uint32_t count;
    uint8_t revoked;
};

/* A checkpoint's cut (Chandy and Lamport): whoever hears of a new one says it on all its other connections before it sends
 * anything that depends on what it hears after it. */
struct dl_wire_marker {
    uint64_t id;           /* Grows with every checkpoint of the job. */
    uint64_t step, tokens; /* Of a learner, when it first heard of it. */
};

/* Learners that hold the ensemble's current state and serve it, the best first. */
struct dl_wire_peer {
    uint32_t learner;
    uint64_t nonce;
    char uid[DL_WIRE_UID_MAX];
    char serve[DL_WIRE_ADDRESS_MAX];
    uint32_t step_ms; /* Of one inner step: it answers at a boundary. */
};
struct dl_wire_peers {
    uint8_t count; /* 0: fragments come from the syncer. */
    struct dl_wire_peer peers[DL_WIRE_PEERS_MAX];
};

/* Learner: a peer could give it this version, with this content hash of the fragment's UPDATE; version 0: nobody can.
 * Syncer, in answer: its own version and hash; when they are other ones, an UPDATE comes. */
struct dl_wire_held {
    uint32_t fragment;
    uint64_t version;
    uint64_t content_hash;
};

struct dl_wire_recovered { /* Whose optimiser state a joiner has taken over. */
    uint32_t learner;
    uint64_t nonce;
    char uid[DL_WIRE_UID_MAX];
    uint64_t step;  /* The peer's t_m. */
    uint64_t bytes; /* Fetched from peers, fragments included. */
    uint64_t ns;    /* How long that took. */
};

struct dl_wire_header {
    enum dl_wire_type type;
    uint32_t payload_bytes;
    uint64_t checksum;
};

/* A decoded control message (all but CHUNK). Large (some 20 KB): keep one a connection. */
struct dl_wire_message {
    enum dl_wire_type type;
    union {
        struct dl_wire_hello hello;
        struct dl_wire_welcome welcome;
        struct dl_wire_refuse refuse;
        struct dl_wire_meta meta;
        struct dl_wire_pull pull;
        struct dl_wire_push push;
        struct dl_wire_push_none push_none;
        struct dl_wire_result result;
        struct dl_wire_update update;
        struct dl_wire_evaluation evaluation;
        struct dl_wire_heartbeat heartbeat;
        struct dl_wire_goodbye goodbye;
        struct dl_wire_stop stop;
        struct dl_wire_trace trace;
        struct dl_wire_lease_request lease_request;
        struct dl_wire_lease lease;
        struct dl_wire_marker marker;
        struct dl_wire_peers peers;
        struct dl_wire_held held;
        struct dl_wire_recovered recovered;
    } as;
};

/* Reads and checks the 24 header bytes: magic, version, type, size within the type's limit, zero fields. DL_EPROTO. */
DL_MUST_CHECK enum dl_rc dl_wire_header_decode(const uint8_t bytes[DL_WIRE_HEADER_BYTES], struct dl_wire_header *out,
                                               struct dl_err *err);

/* DL_OK when `payload` matches the header that came with it (`header_bytes` as received), else DL_ECORRUPT. */
DL_MUST_CHECK enum dl_rc dl_wire_verify(const uint8_t header_bytes[DL_WIRE_HEADER_BYTES], const uint8_t *payload,
                                        size_t payload_bytes, struct dl_err *err);

/* Decodes a verified control payload; every field is range-checked. Only `hello.tensors` points into `payload`.
 * DL_EPROTO: text names message and field. */
DL_MUST_CHECK enum dl_rc dl_wire_decode(enum dl_wire_type type, const uint8_t *payload, size_t payload_bytes,
                                        struct dl_wire_message *out, struct dl_err *err);

/* Header and payload of a control message into `out` (capacity `out_bytes`); `*used` gets the size. DL_ENOMEM when it does
 * not fit: `*used` then holds what is needed. */
DL_MUST_CHECK enum dl_rc dl_wire_encode(const struct dl_wire_message *message, uint8_t *out, size_t out_bytes,
                                        size_t *used, struct dl_err *err);

/* Header and 16-byte prefix of a CHUNK whose data is sent from where it lies: writes DL_WIRE_HEADER_BYTES +
 * DL_WIRE_CHUNK_PREFIX_BYTES bytes to `out`. The checksum reads `data` once. */
void dl_wire_chunk_head(uint64_t transfer, uint64_t offset, const uint8_t *data, uint32_t data_bytes, uint8_t *out);

/* The same in two parts, for a sender that hashes the data on its way, or has its leaves: writes the head but for its
 * checksum; then puts that in. */
void dl_wire_chunk_begin(uint64_t transfer, uint64_t offset, uint32_t data_bytes, uint8_t *out);
void dl_wire_chunk_end(struct dl_leaves *leaves, uint8_t *out);

/* As dl_wire_verify for a chunk received apart: its prefix and data lie in different places. */
DL_MUST_CHECK enum dl_rc dl_wire_chunk_verify(const uint8_t header_bytes[DL_WIRE_HEADER_BYTES],
                                              const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES], const uint8_t *data,
                                              uint32_t data_bytes, struct dl_err *err);
/* The same for a receiver that hashes the data on its way. */
DL_MUST_CHECK enum dl_rc dl_wire_chunk_check(const uint8_t header_bytes[DL_WIRE_HEADER_BYTES],
                                             const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES], struct dl_leaves *leaves,
                                             struct dl_err *err);
void dl_wire_chunk_prefix(const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES], uint64_t *transfer, uint64_t *offset);

/* Data bytes a chunk of `codec` carries: the largest number of whole blocks within DL_WIRE_CHUNK_DATA_MAX. */
uint32_t dl_wire_chunk_data_bytes(enum dl_codec codec);

const char *dl_wire_type_name(enum dl_wire_type type);

#endif
