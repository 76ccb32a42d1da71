/* The inside of sy_core, shared by its parts; included by nothing else. Pure.
 *
 *     core.c     life, restore, tick, deadlines, what happens after every event
 *     members.c  slots, HELLO, leaving, liveness
 *     meta.c     what learners report: tokens, steps, running estimates
 *     pacing.c   when a round is due; interval warm-up is in warmup.c
 *     rounds.c   a round's life from its pulls to its commit; grace.c its window
 *     pushes.c   verdicts; rules.c the pure rules behind them
 *     leases.c   whose data counts; ledger.c the record of it
 *     seed.c     the first state        finish.c  the end        drain.c  this process ends, the job does not
 *     totals.c   counters, saved and restored        cut.c  checkpoints
 *     peers.c    whom a joiner may take its state from
 *     actions.c  the queue              view.c    what is shown      check.c  invariants
 *
 * Fragments of this shard are addressed by their local index i; fragment shard + i * shards of the job. */
#ifndef DL_SYNCER_CORE_STATE_H
#define DL_SYNCER_CORE_STATE_H

#include "syncer/core/core.h"

#define SY_CORE_EVALUATORS_MAX 16
#define SY_CORE_SLOTS_SPARE 32 /* Slots for incarnations that left, beside one a learner. */
#define SY_CORE_NOTES_MAX 64   /* Notes waiting in the queue; more are counted and dropped. */
#define SY_CORE_TOKENS_PER_STEP_MAX (UINT64_C(1) << 40)
#define SY_NS 1000000000.0
/* A learner that was not heard of for so many times sync.timeoutSeconds gives its data back. */
#define SY_LEASE_GONE_TIMEOUTS 10

enum sy_part_state {
    SY_PART_NONE,
    SY_PART_ASKED,     /* Pulled; at its next boundary it answers. */
    SY_PART_ANNOUNCED, /* PUSH came, its chunks are on their way. */
    SY_PART_RECEIVED,
    SY_PART_DECLINED, /* PUSH_NONE */
    SY_PART_REFUSED,  /* Its push was, by checksum, values or norm. */
};

/* Of a joiner that may get a fragment from a peer: the syncer does not send it. */
enum sy_hold {
    SY_HOLD_NONE,
    SY_HOLD_UNTOLD,  /* It has yet to say whether a peer has the current version. New ones are not sent either. */
    SY_HOLD_CLAIMED, /* One has; the joiner is fetching it. */
};

/* One member and one fragment. */
struct sy_part {
    uint64_t version; /* As the learner reported it last, with the steps since. */
    uint32_t steps;
    bool merged; /* Some push of this incarnation was merged; the highest base of those: */
    uint64_t merged_base, merged_tokens;
    /* In the fragment's round. */
    enum sy_part_state state;
    uint32_t push_steps;
    uint64_t admission; /* At the push: a reconnect changes the member's. */
    uint64_t base_version, push_step, push_tokens;
    uint64_t offered_step;  /* t_m when its push was announced: one that missed a round is of an earlier step. */
    uint64_t answered_step; /* t_m when it declined or was refused. */
    uint32_t missed;        /* Rounds in a row for which it was asked, and no push on their own base came in time. */
    double norm;
    uint64_t lease, cursor; /* The data it has seen. */
    int64_t announced_ns;
    enum sy_hold hold;
};

struct sy_member {
    bool used, connected;
    enum dl_role role;
    uint32_t learner;
    uint64_t admission, born; /* The latest, and that of the first HELLO: it says who is newer. */
    char uid[DL_WIRE_UID_MAX];
    uint64_t nonce;
    char serve[DL_WIRE_ADDRESS_MAX]; /* Where it serves its state; empty: nowhere. */
    bool recovered;                  /* It took over the state of learner `recovered_from`. */
    uint32_t recovered_from;
    enum sy_leave left_why;
    int64_t heard_ns, left_ns, meta_ns;
    bool trained; /* Holds a version of every fragment: it trains, and counts. */
    uint64_t step, tokens;
    float loss;
    uint64_t busy_ns, waited_ns;
    bool busy_known;     /* What it had computed before this core knew it does not count as ours. */
    double step_seconds; /* < 0: unknown */
    double tokens_per_second;
    uint64_t rate_tokens; /* Window of the estimate of tokens a second. */
    int64_t rate_ns;
    uint64_t step_tokens; /* Of its last step or steps, for weighing its loss. */
    uint64_t pushes_merged;
    bool missed_warmup;  /* Neither reported nor pushed between the last two openings of warm-up rounds. */
    bool marker_awaited; /* Of the cut; see cut.c. */
    int64_t credit;      /* Inner steps advanced beyond what opened rounds have used up; see pacing.c. */
    uint32_t holder;     /* Of leases; SY_NO_HOLDER: none. */
    struct sy_part *parts;
};

enum sy_round_state {
    SY_ROUND_IDLE,
    SY_ROUND_PULLING, /* Below quorum. */
    SY_ROUND_GRACE,
    SY_ROUND_MERGING, /* Until sy_core_on_committed. */
    SY_ROUND_SEEDING, /* Pulled from the seeder. */
    SY_ROUND_SEEDED,  /* The seed is here, but has to wait for others to be stored first. */
    SY_ROUND_STORING,
    SY_ROUND_STATES
};

struct sy_round { /* A fragment and its round. */
    enum sy_round_state state;
    uint64_t version, made_round;
    uint64_t cut_version;     /* In the last checkpoint's cut. */
    uint64_t floor;           /* Bases below it may have been merged before a restart. */
    uint64_t seed_generation; /* Of the seeding that made the version or is storing it; 0: none since the start. */
    uint64_t number;          /* Of the round under way, or the last. */
    uint64_t order;           /* Grows with every opening; the smallest is due next. */
    uint32_t have, outstanding, asked, need;
    bool warmup, final, final_done, delayed;
    int64_t opened_ns, quorum_ns, closed_ns, committed_ns;
    /* GRACE: its end. PULLING: when the round is given up. SEEDING: when to ask again. INT64_MAX: never. */
    int64_t deadline_ns;
    int64_t soften_ns;   /* Warm-up: when K is enough. */
    double pace_seconds; /* Of an inner step of who sets the pace, when it was opened. */
    bool awaits_apply;   /* Nobody has reported the newest version yet. */
    uint32_t participant_count;
    struct sy_participant *participants; /* learners.max */
};

struct sy_queued {   /* An action without its texts. */
    uint8_t type;    /* enum sy_action_type */
    uint8_t verdict; /* RESULT: enum dl_verdict */
    uint8_t why;     /* DISCONNECT: enum sy_leave */
    uint8_t flags;   /* PULL */
    uint32_t member, fragment;
    uint32_t pull_within_steps, update_within_steps, wait_ms; /* PULL */
    uint64_t round, version; /* LEASE: lease and first; pull_within_steps is its count, flags whether it is revoked. */
    uint64_t tokens;         /* CUT_LEARNER */
};

struct sy_note {
    bool warn;
    char text[DL_WIRE_TEXT_MAX];
};

struct sy_core {
    const struct dl_spec *spec;
    uint32_t shard;
    uint64_t epoch;
    int64_t now_ns; /* Of the latest event. */
    bool started;
    int64_t started_ns;

    uint32_t slots, learners_max;
    struct sy_member *members;
    struct sy_part *parts;
    uint32_t connected, evaluators; /* Learners, evaluators. */
    uint64_t next_admission;

    uint32_t fragments;
    struct sy_round *rounds;
    struct sy_participant *participants;
    uint64_t next_round, orders;
    struct sy_ledger ledger; /* Empty but on shard 0. */
    bool ledger_queued;      /* A LEDGER action waits. */
    double *scratch;         /* slots */

    uint32_t quorum;     /* K */
    uint64_t pace_index; /* Rounds opened by pace, modulo fragments. */
    struct dl_warmup warmup;
    bool warm_done;
    int64_t warm_opened_ns, warm_released_ns; /* When the last warm-up rounds were opened, committed. */

    uint64_t cut; /* The last checkpoint's; 0: none. */
    uint32_t markers_awaited;

    uint32_t seeder;
    uint64_t seed_generation;
    uint32_t last_seeder;
    uint64_t last_seeder_born;
    uint64_t seeder_admission; /* Of the last seeder; the next one follows it. */
    int64_t seed_progress_ns;

    enum sy_phase phase;
    bool finishing;
    bool was_joined, awaits_return; /* In the life of this process; see finish.c. */
    bool draining;                  /* Nothing new begins; see drain.c. */
    enum dl_stop_result stop_result;
    char stop_text[DL_WIRE_TEXT_MAX];
    int64_t finish_soft_ns, finish_hard_ns;
    char delay_text[DL_WIRE_TEXT_MAX];

    uint64_t step;
    uint64_t tokens;
    uint64_t tokens_merged; /* Over all fragments. */
    uint64_t rounds_merged;
    uint64_t busy_ns;
    uint64_t
        possible_ns; /* What wanted learners, or more that are connected, could have computed since the first step. */
    bool stepped;
    int64_t ended_ns;
    float loss;
    bool evaluated;
    struct dl_wire_evaluation first_evaluation, last_evaluation;
    uint64_t verdicts[DL_VERDICT_COUNT];
    uint64_t pushes, nones; /* All PUSHes; PUSH_NONEs that stood for no PUSH. */
    uint64_t joins, leaves[5], refusals, recoveries;
    /* Running means, seconds; < 0: no sample yet. */
    double wait_mean, transfer_mean, grace_mean, merge_mean, commit_mean, total_mean;
    double store_mean, spread_mean; /* From close to commit; from commit to the first learner that has applied it. */
    double grace_seconds;

    struct sy_queued *queue; /* Ring. */
    size_t queue_capacity, queue_first, queue_count, queue_peak;
    struct sy_note notes[SY_CORE_NOTES_MAX];
    uint32_t note_first, note_count;
    uint64_t notes_dropped;
};

static inline uint32_t sy_fragment_index(const struct sy_core *core, uint32_t local)
{
    return core->shard + local * core->spec->syncer.shards;
}
/* UINT32_MAX: not of this shard. */
static inline uint32_t sy_fragment_local(const struct sy_core *core, uint32_t fragment)
{
    bool ours = fragment < core->spec->sync.fragments && fragment % core->spec->syncer.shards == core->shard;
    return ours ? fragment / core->spec->syncer.shards : UINT32_MAX;
}
static inline bool sy_is_learner(const struct sy_member *member)
{
    return member->connected && member->role == DL_ROLE_LEARNER;
}
static inline bool sy_is_training(const struct sy_member *member)
{
    return sy_is_learner(member) && member->trained;
}
static inline bool sy_round_is_open(const struct sy_round *round)
{
    return round->state == SY_ROUND_PULLING || round->state == SY_ROUND_GRACE;
}
static inline int64_t sy_ns(double seconds)
{
    return (int64_t)(seconds * SY_NS);
}
static inline double sy_seconds(int64_t ns)
{
    return (double)ns / SY_NS;
}
void sy_mean_add(double *mean, double sample); /* Exponential, weight 1/5. */

/* core.c */
void sy_event(struct sy_core *core, int64_t now_ns); /* First in every event: the time. */
uint32_t
sy_could_compute(const struct sy_core *core); /* Learners, for goodput: those wanted, or more that are there. */
void sy_settle(struct sy_core *core);         /* Last: whatever has become possible. */
void sy_phase_move(struct sy_core *core, enum sy_phase to);
bool sy_is_seeded(const struct sy_core *core);

/* actions.c */
size_t sy_queue_capacity(const struct sy_core *core);
void sy_queue(struct sy_core *core, const struct sy_queued *action);
void sy_queue_result(struct sy_core *core, uint32_t member, uint64_t round, uint32_t fragment, enum dl_verdict verdict);
void sy_queue_note(struct sy_core *core, bool warn, const char *fmt, ...) DL_PRINTF(3, 4);

/* members.c */
/* Whether another incarnation of the same learner id was first admitted later. */
bool sy_member_is_superseded(const struct sy_core *core, uint32_t member);
/* Whether it was lost, and not for good: this very incarnation may come back. */
bool sy_member_may_return(const struct sy_core *core, uint32_t member);
void sy_members_expire(struct sy_core *core);
/* Learners that train. */
uint32_t sy_members_training(const struct sy_core *core);

/* meta.c */
double sy_step_seconds(struct sy_core *core,
                       bool lower);                /* Median over connected learners; `lower` of the middle two. */
double sy_pace_step_seconds(struct sy_core *core); /* Of the K-th fastest, who sets the pace; 0: unknown. */
void sy_count_tokens(struct sy_core *core, struct sy_member *member, uint64_t tokens);

/* pacing.c, warmup.c */
void sy_pace_run(struct sy_core *core);
void sy_pace_advance(struct sy_member *member, uint64_t steps);
void sy_pace_left(struct sy_core *core);
struct sy_limits {
    uint32_t pull_within_steps, update_within_steps, wait_ms;
};
struct sy_limits sy_pace_limits(struct sy_core *core);
bool sy_is_warming(const struct sy_core *core);
uint32_t sy_warm_interval(const struct sy_core *core); /* The one in force. */
void sy_warm_look(struct sy_core *core);               /* Whether warm-up is over. */
void sy_warm_run(struct sy_core *core);
bool sy_warm_awaits(struct sy_core *core, uint32_t local);
struct sy_limits sy_warm_limits(struct sy_core *core);
int64_t sy_warm_stall_ns(struct sy_core *core);
int64_t sy_warm_deadline(const struct sy_core *core);

/* rounds.c, grace.c */
bool sy_round_is_ready(const struct sy_core *core, uint32_t local, uint32_t need);
/* `warm_need`: the quorum of a warm-up round; 0: an ordinary round. */
void sy_round_open(struct sy_core *core, uint32_t local, uint32_t warm_need);
void sy_round_ask(struct sy_core *core, uint32_t local, uint32_t member);
/* Asks `member` in open rounds where it has become able to answer. */
void sy_rounds_ask(struct sy_core *core, uint32_t member);
void sy_rounds_check(struct sy_core *core);
void sy_round_move(struct sy_round *round, enum sy_round_state to);
/* Gives it up: what was received gets `verdict`. */
void sy_round_abandon(struct sy_core *core, uint32_t local, enum dl_verdict verdict);
/* Where nothing more is waited for: a round with its quorum is closed, one without is given up. */
void sy_round_settle(struct sy_core *core, uint32_t local);
/* The part's push gets its verdict and is forgotten. */
void sy_part_decide(struct sy_core *core, uint32_t local, uint32_t member, enum dl_verdict verdict, bool tell,
                    enum sy_part_state state);
double sy_grace_window(struct sy_core *core, const struct sy_round *round);

/* rules.c: pure. */
/* Whether norm `index` of a round is absurd: above `limit` times the median of all (of an even number: the mean of the
 * middle two), which takes at least SY_NORM_PUSHES_MIN of them. `scratch`: `count` doubles. */
#define SY_NORM_PUSHES_MIN 3
bool sy_norm_check(const double *norms, uint32_t count, uint32_t index, double limit, double *scratch);
double sy_median(double *values, uint32_t count, bool lower); /* Reorders them; 0 of none. */

/* leases.c */
void sy_lease_start(struct sy_core *core);
void sy_lease_forget_slot(struct sy_core *core, uint32_t member);
void sy_lease_admit(struct sy_core *core, uint32_t member);
void sy_lease_leave(struct sy_core *core, uint32_t member, enum sy_leave why);
void sy_lease_run(struct sy_core *core);
int64_t sy_lease_deadline(const struct sy_core *core);
enum dl_verdict sy_lease_judge(const struct sy_core *core, uint32_t member, const struct dl_wire_push *push);
void sy_lease_count(struct sy_core *core, const struct sy_participant *who);

/* peers.c */
/* A HELLO's wish for peers: true when its fragments are held back until it has told what they have. */
bool sy_peers_offer(struct sy_core *core, uint32_t member, const struct dl_wire_hello *hello);
void sy_peers_list(const struct sy_core *core, uint32_t asker, struct dl_wire_peers *out);
void sy_peers_broadcast(struct sy_core *core, uint32_t local);

/* cut.c */
void sy_cut_joined(struct sy_core *core, uint32_t member);
void sy_cut_left(struct sy_core *core, uint32_t member);

/* seed.c, finish.c */
void sy_seed_run(struct sy_core *core);
void sy_seed_received(struct sy_core *core, uint32_t local);
void sy_seed_stored(struct sy_core *core, uint32_t local);
void sy_seed_left(struct sy_core *core, uint32_t member);
int64_t sy_seed_deadline(const struct sy_core *core);
void sy_finish_begin(struct sy_core *core, enum dl_stop_result result, const char *text);
void sy_finish_run(struct sy_core *core);

#endif
