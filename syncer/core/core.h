/* sy_core: what a syncer shard decides. Membership, rounds, quorum, grace window, weights, pacing, warm-up, completion.
 *
 * Pure: it is given an event and the time, and queues actions; it opens no socket, reads no clock, starts no thread and,
 * once made, allocates nothing. The same code runs behind the server, in replay and in simulation. Owned by one thread.
 *
 * How a round goes (docs/protocol.md, "A round"): idle -> pulling (PULL sent to every live learner) -> quorum reached,
 * grace window -> closed (MERGE queued) -> sy_core_on_committed -> idle again, BROADCAST queued. Rounds of different
 * fragments overlap freely; one fragment has at most one round under way.
 *
 * The shell's duty: after every sy_core_on_* / sy_core_tick call, take actions with sy_core_next_action until none is left;
 * call sy_core_tick no later than sy_core_next_deadline. */
#ifndef DL_SYNCER_CORE_H
#define DL_SYNCER_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"
#include "common/wire.h"
#include "syncer/core/ledger.h"

struct sy_core; /* Opaque. */

#define SY_NO_MEMBER UINT32_MAX

enum sy_phase {
    SY_WAITING_FOR_LEARNERS, /* No version of some fragment yet, and nobody to seed it. */
    SY_SEEDING,              /* The first state is on its way from one learner. */
    SY_WARMUP,               /* Interval warm-up. */
    SY_TRAINING,
    SY_WAITING_FOR_QUORUM, /* Fewer live learners than the quorum: rounds wait, learners train on. */
    SY_FINISHING,          /* Budget reached: every fragment is merged once more. */
    SY_ENDED,              /* Stop was sent; see sy_core_stop_result. */
};
const char *sy_phase_name(enum sy_phase phase); /* "WaitingForLearners", ... */

enum sy_leave { SY_LEAVE_GOODBYE, SY_LEAVE_PREEMPTED, SY_LEAVE_LOST, SY_LEAVE_SUPERSEDED, SY_LEAVE_PROTOCOL };

/* One learner's part in a merge; participants are in ascending learner id. */
struct sy_participant {
    uint32_t member;
    uint32_t learner;
    uint64_t admission;
    uint64_t step; /* t_m of the snapshot */
    uint64_t base_version;
    uint32_t steps;  /* c_steps */
    uint64_t tokens; /* c_tokens */
    double weight;
    double norm;            /* Of the delta, as the shell measured it. */
    uint64_t lease, cursor; /* The data it has seen; see ledger.h. */
};

enum sy_action_type {
    SY_ACT_PULL, /* Send `pull` to `member`. */
    /* Send `result` to `member`, if it is connected. Accepted comes when the round closes. Anything else, but for
     * duplicate, means that the buffer of this member's push of that round and fragment can go. */
    SY_ACT_RESULT,
    SY_ACT_MERGE,      /* Merge `round` of `fragment` with sy_core_participants, commit, then sy_core_on_committed. */
    SY_ACT_SEED_STORE, /* `member`'s seed push of `fragment` becomes version 1: commit, then sy_core_on_committed. */
    /* Send the current version of `fragment` to every member, learners and evaluators, but for those from whom it is held back
     * (sy_core_holds_back). A first state is broadcast once all fragments of the shard are stored, never in part. */
    SY_ACT_BROADCAST,
    SY_ACT_SEND,  /* Send the current version of `fragment` to `member` (it joined, or came back). */
    SY_ACT_STOP,  /* Send `stop` to `member`. */
    SY_ACT_PEERS, /* Send `peers` to `member`. */
    /* Close `member`'s connection: silent too long, or superseded. `text` says why. The member has left already; its slot is
     * given to nobody else before the next event. */
    SY_ACT_DISCONNECT,
    SY_ACT_MARKER, /* Send `marker` to `member`, before any version that it has not been promised yet. */
    /* The shard's part of checkpoint `version` (an id): sy_core_cut_version of every fragment. It is to be durable before a
     * later version is. */
    SY_ACT_CUT,
    SY_ACT_CUT_LEARNER, /* The part of `member` in it: `marker`. */
    SY_ACT_CUT_CLOSED,  /* Every channel is: nothing that was on its way when the cut was made is still to come. */
    /* Something of the ledger of the data has to become durable: sy_core_ledger_changes, and once it is,
     * sy_core_on_ledger_durable. Durable in the order of these actions and of MERGEs; a MERGE's transaction counts what its
     * participants have seen: all of an incarnation's leases below `lease`, and `cursor` of it. */
    SY_ACT_LEDGER,
    SY_ACT_LEASE, /* Send `lease` to `member`. */
    SY_ACT_NOTE,  /* Something for the log: `text` (key=value), level warn when `warn`. */
};

struct sy_action {
    enum sy_action_type type;
    uint32_t member;
    uint32_t fragment;
    uint64_t round;
    uint64_t version; /* MERGE: the version that the merge will make. */
    union {
        struct dl_wire_pull pull;
        struct dl_wire_result result;
        struct dl_wire_stop stop;
        struct dl_wire_lease lease;
        struct dl_wire_peers peers;
        struct dl_wire_marker marker;
    } as;
    bool warn;
    char text[DL_WIRE_TEXT_MAX];
};

struct sy_core_config {
    const struct dl_spec *spec; /* Borrowed for the core's life. */
    uint32_t shard;             /* Holds the fragments p with p mod shards == shard. */
    uint64_t epoch;             /* Incarnation of this syncer process. */
};

/* A core with no versions, no members. `members_max` = learners.max + some evaluators, from the spec. */
DL_MUST_CHECK enum dl_rc sy_core_new(const struct sy_core_config *config, struct sy_core **out, struct dl_err *err);
void sy_core_free(struct sy_core *core);

struct sy_core_totals { /* Counters over the whole job. */
    uint64_t next_round, next_admission;
    uint64_t rounds_merged;
    uint64_t tokens;
    uint64_t tokens_merged; /* Summed over the shard's fragments. */
    uint64_t step, joins, refusals;
    uint64_t busy_ns, possible_ns; /* Goodput: their ratio, over the times at which a syncer was there. */
    uint64_t leaves[5];            /* By enum sy_leave. */
    uint64_t verdicts[DL_VERDICT_COUNT];
    bool evaluated;
    struct dl_wire_evaluation first_evaluation, last_evaluation;
};
void sy_core_get_totals(const struct sy_core *core, struct sy_core_totals *out);

struct sy_core_incarnation { /* A learner process and how much of it is in the totals. */
    uint32_t learner;
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    uint64_t born, admission; /* Its first admission, its latest. */
    uint64_t step, tokens, pushes_merged;
    bool has_left; /* Said goodbye. */
};
/* Of the member in a slot; false when there is none, or no learner. */
bool sy_core_incarnation(const struct sy_core *core, uint32_t member, struct sy_core_incarnation *out);

/* After a restart, before any event: the inner steps of interval warm-up that the job began with (dl_warmup_steps of then: a
 * budget that was raised since begins no second one), the last committed version and round of a fragment, the totals as of
 * the last commit, and the incarnations that they count (more than there are slots are dropped: give the newest first). */
void sy_core_restore_warmup(struct sy_core *core, uint32_t steps);
void sy_core_restore_fragment(struct sy_core *core, uint32_t fragment, uint64_t version, uint64_t round);
void sy_core_restore_totals(struct sy_core *core, const struct sy_core_totals *totals);
void sy_core_restore_incarnation(struct sy_core *core, const struct sy_core_incarnation *from);
void sy_core_restore_cut(struct sy_core *core, uint64_t id);

/* Shard 0 only, after the incarnations: the ledger of the data as it is durable (ledger.h). DL_ECORRUPT, DL_ENOMEM. */
DL_MUST_CHECK enum dl_rc sy_core_restore_ledger(struct sy_core *core, const struct sy_ledger_state *state,
                                                struct dl_err *err);

/* --- events -------------------------------------------------------------------------------------------------------------
 * A member is a slot for one connected incarnation; its number stays the same while it is connected. */

/* A HELLO whose token, tensors and shape the shell has checked. On DL_OK `*member` and `*welcome` are filled (all but the
 * layout fields) and SENDs are queued for what it lacks; on DL_EDENIED `*refuse` says why. A known (uid, nonce) that is
 * still connected elsewhere takes over its old slot: then the shell closes the connection that the returned slot had (no
 * DISCONNECT comes), and what was on its way there is gone. A newer incarnation of the same learner id supersedes the older,
 * which gets a DISCONNECT and is refused from then on. */
DL_MUST_CHECK enum dl_rc sy_core_on_hello(struct sy_core *core, int64_t now_ns, const struct dl_wire_hello *hello,
                                          uint32_t *member, struct dl_wire_welcome *welcome,
                                          struct dl_wire_refuse *refuse);
void sy_core_on_leave(struct sy_core *core, int64_t now_ns, uint32_t member, enum sy_leave why);
/* Any frame at all was received: the member is alive. */
void sy_core_on_heard(struct sy_core *core, int64_t now_ns, uint32_t member);
void sy_core_on_meta(struct sy_core *core, int64_t now_ns, uint32_t member, const struct dl_wire_meta *meta);

/* A push announces itself. DL_VERDICT_ACCEPTED: receive its `bytes` (the encoded size was checked against
 * `expected_bytes`), then call on_push_received. Anything else: a RESULT is queued, skip its chunks. */
enum dl_verdict sy_core_on_push(struct sy_core *core, int64_t now_ns, uint32_t member, const struct dl_wire_push *push,
                                uint64_t expected_bytes);
/* All bytes are there. `norm` of the delta (non-finite when any element is). `intact` false: a checksum failed. */
void sy_core_on_push_received(struct sy_core *core, int64_t now_ns, uint32_t member, uint64_t round, uint32_t fragment,
                              bool intact, double norm);
/* A PUSH_NONE came. Or the shell cannot take a push that was just accepted (no memory): then `none->reason` is its verdict,
 * and the shell tells the member. */
void sy_core_on_push_none(struct sy_core *core, int64_t now_ns, uint32_t member, const struct dl_wire_push_none *none);

/* A LEASE_REQUEST came. */
void sy_core_on_lease_request(struct sy_core *core, int64_t now_ns, uint32_t member,
                              const struct dl_wire_lease_request *request);
/* What has changed in the ledger since the last call; pointers are valid until the next event. */
void sy_core_ledger_changes(struct sy_core *core, struct sy_ledger_changes *changes);
void sy_core_on_ledger_durable(struct sy_core *core, int64_t now_ns, uint64_t serial);

/* A MERGE or SEED_STORE is done and durable. `merge_ns` how long the merge took, `commit_ns` the commit. */
void sy_core_on_committed(struct sy_core *core, int64_t now_ns, uint32_t fragment, int64_t merge_ns, int64_t commit_ns);
/* The commit could not be made (disk full): the round stays merged in memory and the shell will try again; nothing is told
 * to learners meanwhile. Shown as a condition. */
void sy_core_on_commit_delayed(struct sy_core *core, int64_t now_ns, uint32_t fragment, const char *reason);
void sy_core_on_evaluation(struct sy_core *core, int64_t now_ns, uint32_t member,
                           const struct dl_wire_evaluation *evaluation);
/* A joiner's HELD: `same` when version and content hash are those of the fragment's current version. The shell answers it
 * with those. Queues a SEND when they are not, or when a peer that had it has failed. */
void sy_core_on_held(struct sy_core *core, int64_t now_ns, uint32_t member, uint32_t fragment, bool same);
/* Whether the joiner `member` (SY_NO_MEMBER: nobody) is still to say what a peer could give it of `fragment`: nothing of it is
 * sent before. */
bool sy_core_holds_back(const struct sy_core *core, uint32_t member, uint32_t fragment);
void sy_core_on_recovered(struct sy_core *core, int64_t now_ns, uint32_t member,
                          const struct dl_wire_recovered *recovered);
/* Ask everyone to stop: SUCCEEDED and REQUESTED merge once more first (bounded by sync.finishSeconds), FAILED at once. */
void sy_core_on_stop_request(struct sy_core *core, int64_t now_ns, enum dl_stop_result result, const char *text);
/* A checkpoint is wanted (or another shard has begun one): false when there was this cut, or a later one, already. */
bool sy_core_on_cut(struct sy_core *core, int64_t now_ns, uint64_t id);
void sy_core_on_marker(struct sy_core *core, int64_t now_ns, uint32_t member, const struct dl_wire_marker *marker);
uint64_t sy_core_cut_version(const struct sy_core *core, uint32_t fragment);
/* Whether what comes from `member` now was on its way when the cut was made. */
bool sy_core_is_channel_open(const struct sy_core *core, uint32_t member);
/* This process is to end while the job goes on: no round is opened any more, one with its quorum is closed at once, others
 * are given up. Done when sy_core_is_drained: what was merging is durable. Not undone. */
void sy_core_on_drain(struct sy_core *core, int64_t now_ns);
bool sy_core_is_drained(const struct sy_core *core);
void sy_core_tick(struct sy_core *core, int64_t now_ns);
int64_t sy_core_next_deadline(const struct sy_core *core); /* INT64_MAX: none. */

/* --- actions and views ---------------------------------------------------------------------------------------------- */

/* Takes the oldest action; false when there is none. */
bool sy_core_next_action(struct sy_core *core, struct sy_action *action);
/* Participants of a fragment's closed round, from its MERGE until sy_core_on_committed. */
uint32_t sy_core_participants(const struct sy_core *core, uint32_t fragment, const struct sy_participant **out);

struct sy_member_view {
    bool connected;
    enum dl_role role;
    uint32_t learner;
    uint64_t admission;
    char uid[DL_WIRE_UID_MAX];
    uint64_t step, tokens;
    float loss;
    double step_seconds; /* Running estimate of one inner step. */
    double tokens_per_second;
    int64_t heard_ns; /* When it was last heard. */
    uint64_t pushes_merged;
    uint64_t versions_behind; /* Most over the shard's fragments. */
    uint64_t waited_ns;
    bool serves;            /* Its state, to joiners. */
    int32_t recovered_from; /* Whose state it took over when it joined; -1: nobody's. */
};
/* Slots 0 .. sy_core_members()-1; false for one that was never used. Left members stay readable until reused. */
uint32_t sy_core_members(const struct sy_core *core);
bool sy_core_member(const struct sy_core *core, uint32_t member, struct sy_member_view *view);

struct sy_fragment_view {
    uint64_t version, round; /* Current version and the round that made it. */
    bool round_open;
    uint64_t open_round;
    uint32_t have, need, asked; /* Pushes received, quorum, learners pulled. */
};
bool sy_core_fragment(const struct sy_core *core, uint32_t fragment, struct sy_fragment_view *view);

struct sy_round_times { /* Running means, seconds. */
    double wait, transfer, grace, merge, commit, total;
};
struct sy_core_view {
    enum sy_phase phase;
    char message[DL_WIRE_TEXT_MAX];  /* For people: "0/1 learners". */
    enum dl_stop_result stop_result; /* In SY_ENDED. */
    uint32_t connected;              /* Learners. */
    uint32_t quorum_have, quorum_need;
    uint64_t step; /* Furthest learner's t_m. */
    uint64_t rounds_merged;
    uint64_t tokens;        /* Trained by all incarnations, as reported, each token once. */
    uint64_t tokens_merged; /* Carried by merged pushes, averaged over the shard's fragments. */
    double goodput;         /* Learner time spent computing / (larger of learners.replicas and connected, x time). */
    float loss;             /* Mean over learners of their last losses, token-weighted. */
    bool evaluated;
    struct dl_wire_evaluation first_evaluation, last_evaluation;
    uint64_t verdicts[DL_VERDICT_COUNT];
    uint64_t joins, leaves[5]; /* By enum sy_leave. */
    uint64_t refusals, recoveries;
    struct sy_round_times times;
    double grace_seconds; /* Last computed window. */
    struct {              /* The job's data, positions; shard 0. `counted` includes merges that are being committed. */
        uint64_t positions, counted, leased, queued;
    } data;
};
void sy_core_view(const struct sy_core *core, int64_t now_ns, struct sy_core_view *view);

/* The fragment indices this shard holds: p = shard, shard + shards, ... */
uint32_t sy_core_fragment_count(const struct sy_core *core);

/* For tests and simulation: checks every invariant; NULL when all hold, else the text of the one that does not. */
const char *sy_core_check(const struct sy_core *core);

#endif
