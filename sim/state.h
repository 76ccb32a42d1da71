/* The inside of sim_world, shared by its parts:
 *     world.c    the loop, faults of processes
 *     conn.c     connections: delay, order, loss
 *     learner.c  the shell of a wk_link: network side and trainer
 *     syncer*.c  the shell of a sy_core: pushes, merges, commits, broadcasts (syncer.h: what those sources share)
 *     fetch.c    a joiner's fetching of a peer's state
 *     transmit.c what a syncer sends
 *     cut.c      checkpoints: what versions depend on
 *     ledger.c   what must hold across all of them
 *     tape.c     whether the tape holds what every commit depends on
 *     data.c     the job's data: what is durable of its leases, and what must hold of it */
#ifndef DL_SIM_STATE_H
#define DL_SIM_STATE_H

#include "common/layout.h"
#include "common/wire.h"
#include "sim/queue.h"
#include "sim/world.h"
#include "worker/link/link.h"
#include "worker/link/link_recover.h"

#define SIM_SECOND INT64_C(1000000000)
#define SIM_FRAGMENTS_MAX 32
#define SIM_NONE UINT32_MAX

enum sim_kind {
    SIM_TRAINER,       /* a: learner. A step is done, or a wait may be over. */
    SIM_LINK_PUMP,     /* a: learner, b: shard. The connection can take another message. */
    SIM_LINK_SENT,     /* a: learner, b: connection. A chunk is out. */
    SIM_LINK_TICK,     /* a: learner */
    SIM_CONNECTED,     /* a: connection */
    SIM_UP,            /* a: connection; payload: packet for the syncer */
    SIM_DOWN,          /* a: connection; payload: packet for the learner */
    SIM_LINK_LOST,     /* a: connection */
    SIM_SYNCER_LOST,   /* a: connection */
    SIM_SYNCER_PUMP,   /* a: connection */
    SIM_SYNCER_TICK,   /* a: shard */
    SIM_SYNCER_BEAT,   /* a: shard. Heartbeats. */
    SIM_DURABLE,       /* a: shard, b: local fragment. A new version is on disk ... */
    SIM_COMMITTED,     /* ... and the core hears of it. */
    SIM_SAVED,         /* a: shard. It was asked to leave, and has nothing left to lose. */
    SIM_LEDGER,        /* a: shard. The oldest changes of the ledger of data may become durable. */
    SIM_FAULT_CUT,     /* a: connection */
    SIM_FAULT_BLOCK,   /* a: connection */
    SIM_FAULT_KILL,    /* a: learner */
    SIM_FAULT_STALL,   /* a: learner */
    SIM_FAULT_CRASH,   /* a: shard */
    SIM_FAULT_PAUSE,   /* a: shard */
    SIM_START_LEARNER, /* a: learner */
    SIM_START_SYNCER,  /* a: shard */
    SIM_SUPERVISE,
};

struct sim_packet {
    bool chunk, intact;
    uint64_t number; /* Of its connection and direction: it is the next one there, or none comes any more. */
    uint64_t transfer, offset, content;
    uint32_t chunk_bytes;
    size_t size;
    uint8_t bytes[]; /* A control message, encoded. */
};

struct sim_conn {
    uint32_t learner, shard;
    uint64_t incarnation, epoch; /* Of its two ends. */
    bool link_open, syncer_open;
    int64_t up_clear_ns, down_clear_ns; /* Nothing arrives before what was sent earlier. */
    uint64_t up_sent, up_arrived, down_sent, down_arrived;
    int64_t blocked_until_ns;
    /* The syncer's end. */
    uint32_t member;
    uint64_t nonce;
    struct sim_packet **queue; /* Control messages to go out. */
    uint32_t queue_count, queue_capacity;
    bool wanted[SIM_FRAGMENTS_MAX];
    bool has_farewell;
    struct dl_wire_stop farewell;
    bool pumping;
    int64_t heard_ns;
    uint64_t transfers;
    uint32_t sending, last_sent; /* Local fragment; `sending` may be SIM_NONE. */
    uint64_t sending_version, sending_content, sending_offset, sending_bytes;
    struct { /* Pushes on their way in. */
        bool used, kept, intact;
        struct dl_wire_push push;
        uint64_t received;
    } incoming[2 * SIM_FRAGMENTS_MAX];
};

struct sim_held { /* A push that the syncer holds. */
    struct sim_held *next;
    uint32_t member;
    uint64_t nonce, admission;
    struct dl_wire_push push;
    bool complete;
};

struct sim_ledger_job { /* Changes of the ledger of data on their way to the disk. */
    struct sim_ledger_job *next;
    uint64_t ticket;
    struct sy_ledger_changes changes; /* Its arrays are the job's. */
};

struct sim_learner {
    uint64_t generation; /* Changes with every process. */
    bool alive, done;
    struct wk_link *link;
    uint64_t nonce;
    uint32_t incarnations, incarnation; /* Index in the ledger. */
    double speed;
    double chunk_seconds; /* On its connections, beyond faults.chunk_seconds. */
    int64_t stalled_until_ns, isolated_until_ns;
    uint64_t source;             /* The lease that its last sequences were of; UINT64_MAX: none yet. */
    int64_t trainer_ns, tick_ns; /* When they are scheduled; INT64_MAX: not. */
    bool stepping;               /* A step is being computed: nothing wakes the trainer. */
    uint32_t conns[SIM_SHARDS_MAX];
    uint64_t slot_content[SIM_FRAGMENTS_MAX][WK_SLOTS];
    uint64_t base_content[SIM_FRAGMENTS_MAX];
    struct { /* A peer's state, while joining. */
        bool under_way, told;
        struct dl_wire_peer peer;
        uint64_t generation; /* Of that peer's process. */
        int64_t until_ns, give_up_ns;
        struct wk_offer offers[SIM_FRAGMENTS_MAX];
        uint32_t incarnation; /* Of the peer, */
        uint64_t peer_done;   /* what it had done when its state was taken, */
        uint8_t *trace;       /* and of that, what it had yet to deliver; malloc'd. */
        size_t trace_size;
    } fetch;
    uint64_t steps_before;
};

struct sim_durable {
    uint64_t version, round, content;
    uint64_t seeder; /* Whose parameters a first state is. */
    uint64_t cut;    /* The last one taken before it was begun: durable before it. */
};

struct sim_clock { /* By fragment. */
    uint64_t versions[SIM_FRAGMENTS_MAX];
};

struct sim_cut { /* A shard's part of a checkpoint. */
    uint64_t id;
    uint64_t versions[SIM_FRAGMENTS_MAX]; /* By local fragment. */
};

struct sim_syncer {
    uint64_t epoch;
    bool alive;
    struct sy_core *core;
    int64_t paused_until_ns, tick_ns;
    uint32_t fragments;
    struct sim_durable durable[SIM_FRAGMENTS_MAX];
    struct sim_durable current[SIM_FRAGMENTS_MAX]; /* What is told: as of the last on_committed. */
    struct sim_durable making[SIM_FRAGMENTS_MAX];
    struct sim_held *held[SIM_FRAGMENTS_MAX];
    int64_t merge_ns[SIM_FRAGMENTS_MAX], commit_ns[SIM_FRAGMENTS_MAX];
    struct sy_core_totals totals; /* On disk, as are these: */
    struct sy_core_incarnation *incarnations;
    uint32_t incarnation_count;
    uint64_t tokens_merged;
    uint64_t unheard;        /* Durable rounds of which the core has not heard yet. */
    uint64_t next_admission; /* As the store sees to it: grows over restarts. */
    uint32_t *member_conns;
    /* A disk writes in the order of what it was asked for. */
    uint64_t tickets, written;
    uint64_t making_ticket[SIM_FRAGMENTS_MAX];
    struct sim_ledger_job *ledger_jobs, *ledger_last;
    struct sim_cut cut, durable_cut; /* A cut is durable with the next version at the latest. */
    uint64_t cuts_begun;
};

struct sim_delivery {
    uint32_t owner; /* Incarnation. */
    uint64_t seq;
};

struct sim_incarnation {
    uint64_t nonce, tokens; /* Trained in truth. */
    uint64_t merged_tokens[SIM_FRAGMENTS_MAX], merged_base[SIM_FRAGMENTS_MAX];
    /* What its trainer did in truth, and how much of it each shard's tape holds: in memory, on disk. */
    struct dl_trace_entry *done;
    uint64_t done_count, done_capacity;
    uint64_t traced[SIM_SHARDS_MAX], traced_durably[SIM_SHARDS_MAX];
    /* What it has to deliver, by position: its own entries, and those of a peer whose state it took over. */
    struct sim_delivery *order;
    uint64_t order_count, order_capacity;
    uint64_t received[SIM_SHARDS_MAX], received_durably[SIM_SHARDS_MAX]; /* Positions. */
    struct { /* Its state depends on what that peer had done by then. */
        bool is_known;
        uint32_t peer;                     /* Incarnation. */
        uint64_t peer_done, position, seq; /* Position and number of its own entry that says so. */
    } origin;
    struct sim_clock clock; /* What its parameters depended on at position `clock_at` of `done`. */
    uint64_t clock_at;
    struct wk_range *taken; /* Data that it trained on, by lease. */
    uint32_t taken_count, taken_capacity;
};

/* What is on the disk of shard 0 of the job's data, and who has been counted for each position. */
struct sim_data {
    struct sy_lease *leases; /* [lease - 1] */
    uint32_t lease_count, lease_capacity;
    struct sy_range *ranges;
    uint32_t range_count;
    uint32_t *counted_by; /* By position: incarnation + 1, or 0. */
    uint64_t position_capacity;
    uint8_t *seen; /* Scratch of the check, by position. */
};

struct sim_world {
    struct sim_config config;
    struct sim_faults faults;
    struct dl_rng rng;
    struct sim_queue queue;
    int64_t now_ns;
    bool healed, job_is_over;
    struct dl_err fault; /* rc != DL_OK: something does not hold. */
    struct dl_layout *layout;
    struct sim_learner learners[SIM_LEARNERS_MAX];
    struct sim_syncer syncers[SIM_SHARDS_MAX];
    struct sim_conn **conns;
    uint32_t conn_count, conn_capacity;
    struct sim_incarnation *incarnations;
    uint32_t incarnation_count, incarnation_capacity;
    uint64_t tokens; /* Trained by all of them, in truth. */
    struct sim_data data;
    uint64_t *contents[SIM_FRAGMENTS_MAX]; /* By version. */
    uint64_t content_capacity[SIM_FRAGMENTS_MAX];
    struct sim_clock *clocks[SIM_FRAGMENTS_MAX]; /* By version. */
    uint64_t clock_capacity[SIM_FRAGMENTS_MAX];
    struct sim_counts counts;
    uint64_t nonces;
    struct dl_wire_message scratch;
    uint8_t *encode_buffer;
};

#define SIM_ENCODE_BYTES (DL_WIRE_HEADER_BYTES + DL_WIRE_CONTROL_PAYLOAD_MAX + 65536)

/* world.c */
void sim_fail(struct sim_world *world, const char *fmt, ...) DL_PRINTF(2, 3);
void sim_at(struct sim_world *world, int64_t at_ns, enum sim_kind kind, uint32_t a, uint32_t b, uint64_t generation,
            void *payload);
/* After a random time of this mean; never, when it is 0. */
void sim_at_random(struct sim_world *world, double mean_seconds, enum sim_kind kind, uint32_t a, uint64_t generation);
bool sim_chance(struct sim_world *world, double share);
static inline int64_t sim_ns(double seconds)
{
    return (int64_t)(seconds * 1e9);
}

/* conn.c */
uint32_t sim_conn_new(struct sim_world *world, uint32_t learner, uint32_t shard);
struct sim_packet *sim_packet_encode(struct sim_world *world, const struct dl_wire_message *message);
const struct dl_wire_message *sim_packet_decode(struct sim_world *world, const struct sim_packet *packet);
int64_t sim_chunk_ns(const struct sim_world *world, const struct sim_conn *conn); /* A chunk takes so long to go out. */
void sim_conn_up(struct sim_world *world, uint32_t conn, struct sim_packet *packet);
void sim_conn_down(struct sim_world *world, uint32_t conn, struct sim_packet *packet);
/* Its end, which lives, takes a packet: they come in the order in which they were sent, and none is missing. */
void sim_conn_arrived(struct sim_world *world, uint32_t conn, bool up, const struct sim_packet *packet);
/* One end closes it: the other hears of it after the delay, once what was sent before has arrived. */
void sim_conn_close(struct sim_world *world, uint32_t conn, bool by_learner);
void sim_conn_cut(struct sim_world *world, uint32_t conn);

/* learner.c */
void sim_learner_start(struct sim_world *world, uint32_t n);
void sim_learner_kill(struct sim_world *world, uint32_t n);
void sim_learner_train(struct sim_world *world, uint32_t n, int64_t at_ns);
void sim_learner_pump(struct sim_world *world, uint32_t n, uint32_t shard);
void sim_learner_sent(struct sim_world *world, uint32_t n, uint32_t conn);
void sim_learner_tick(struct sim_world *world, uint32_t n);
void sim_learner_connected(struct sim_world *world, uint32_t conn);
void sim_learner_lost(struct sim_world *world, uint32_t conn);
void sim_learner_packet(struct sim_world *world, uint32_t conn, const struct sim_packet *packet);

/* fetch.c */
/* WK_STEP_FETCH: true when it has moved on; false: at `*again_ns` it is to be looked at again. */
bool sim_fetch(struct sim_world *world, uint32_t n, int64_t *again_ns);
void sim_fetch_release(struct sim_learner *learner);

/* syncer.c */
void sim_syncer_start(struct sim_world *world, uint32_t shard);
void sim_syncer_finish(struct sim_world *world, uint32_t shard); /* A stop request. */
/* The process is gone, saved or not, and comes back. */
void sim_syncer_crash(struct sim_world *world, uint32_t shard);
void sim_syncer_checkpoint(struct sim_world *world);
void sim_syncer_saved(struct sim_world *world, uint32_t shard);
void sim_syncer_drain(struct sim_world *world, uint32_t shard);
void sim_syncer_tick(struct sim_world *world, uint32_t shard, int64_t at_ns);
void sim_syncer_beat(struct sim_world *world, uint32_t shard);
void sim_syncer_durable(struct sim_world *world, uint32_t shard, uint32_t local);
void sim_syncer_committed(struct sim_world *world, uint32_t shard, uint32_t local);
void sim_syncer_packet(struct sim_world *world, uint32_t conn, const struct sim_packet *packet);
void sim_syncer_lost(struct sim_world *world, uint32_t conn);

/* True when the disk has come to this ticket. */
bool sim_syncer_writes(struct sim_world *world, uint32_t shard, uint64_t ticket);
void sim_syncer_settle(struct sim_world *world, uint32_t shard); /* After an event of its core. */

/* cut.c */
void sim_cut_begin_version(struct sim_world *world, uint32_t fragment, uint64_t version);
void sim_cut_merged(struct sim_world *world, uint32_t fragment, uint64_t version, uint64_t nonce,
                    const struct dl_wire_push *push);
void sim_cut_take(struct sim_world *world, uint32_t shard, uint64_t id);

/* transmit.c */
void sim_transmit(struct sim_world *world, uint32_t conn, const struct dl_wire_message *message);
void sim_transmit_soon(struct sim_world *world, uint32_t conn); /* Something is wanted there. */
void sim_syncer_pump(struct sim_world *world, uint32_t conn);

/* data.c */
#define SIM_BATCH 4 /* Sequences in a step. */
void sim_data_take(struct sim_world *world, uint32_t n);
void sim_data_write(struct sim_world *world, uint32_t shard);
void sim_data_durable(struct sim_world *world, uint32_t shard);
void sim_data_count(struct sim_world *world, uint64_t nonce, const struct dl_wire_push *push);
void sim_data_restore(struct sim_world *world, uint32_t shard);
void sim_data_forget_jobs(struct sim_syncer *syncer);
void sim_data_release(struct sim_world *world);

/* ledger.c */
uint32_t sim_ledger_incarnation(struct sim_world *world, uint64_t nonce);
struct sim_incarnation *sim_ledger_find(struct sim_world *world, uint64_t nonce); /* NULL: nobody. */
void sim_ledger_merge(struct sim_world *world, uint32_t fragment, uint64_t nonce, const struct dl_wire_push *push);
void sim_ledger_content(struct sim_world *world, uint32_t fragment, uint64_t version, uint64_t content, bool is_new);

/* tape.c: what learners deliver to the event tape, held against what they did. */
void sim_tape_done(struct sim_world *world, uint32_t n, const char *kind, uint32_t fragment, uint64_t a);
/* Learner `n` delivers from now on what the page holds. */
void sim_tape_adopted(struct sim_world *world, uint32_t n, const struct dl_wire_trace *page);
/* It goes on with the state of an incarnation, as that was after `peer_done` entries. */
void sim_tape_recovered(struct sim_world *world, uint32_t n, uint32_t peer, uint64_t peer_done);
void sim_tape_take(struct sim_world *world, uint32_t shard, uint64_t nonce, const struct dl_wire_trace *trace);
void sim_tape_announced(struct sim_world *world, uint32_t shard, uint64_t nonce, const struct dl_wire_push *push);
/* How many of its own entries are among the first `position` that an incarnation delivers. */
uint64_t sim_tape_own(const struct sim_incarnation *who, uint64_t position);
void sim_tape_durable(struct sim_world *world, uint32_t shard); /* All that came is: a commit. */
void sim_tape_merged(struct sim_world *world, uint32_t shard, uint64_t nonce, const struct dl_wire_push *push);
void sim_tape_crash(struct sim_world *world, uint32_t shard);
uint64_t sim_tape_acked(struct sim_world *world, uint32_t shard, uint64_t nonce);

#endif
