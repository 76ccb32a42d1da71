/* What the files of the core share.
 *
 * core.c      making, restoring, phases, time
 * members.c   joining, leaving, liveness, META
 * pacing.c    when rounds open, and what PULL tells learners about waiting
 * rounds.c    pushes, quorum, grace, closing, commits
 * finish.c    budgets, stop requests, the last rounds
 * actions.c   the queue of actions
 * view.c      what can be read */
#ifndef SY_CORE_INTERNAL_H
#define SY_CORE_INTERNAL_H

#include "syncer/core/core.h"

#define SY_EVALUATORS_MAX 16
#define SY_TEXTS_MAX 64            /* Notes that can wait at once; more are dropped and counted. */
#define SY_ESTIMATE_WEIGHT 0.2     /* Of a new observation in a running estimate. */
#define SY_SYNCHRONOUS_WAIT_MS 60000u /* A learner's longest wait in a synchronous form, unless timeoutSeconds is longer. */
#define SY_WARMUP_WAIT_MIN_MS 100u
#define SY_NORM_CHECK_LEARNERS 3   /* From so many pushes on, delta norms are held against their median. */

/* Where a member stands in the round of one fragment. */
enum sy_part_state { SY_PART_NONE, SY_PART_ASKED, SY_PART_PUSHING, SY_PART_HAVE, SY_PART_ANSWERED, SY_PART_REFUSED };

struct sy_part {
    enum sy_part_state state;
    struct sy_participant push;
};

struct sy_member_fragment {
    uint64_t version;      /* Applied, as last heard. */
    uint64_t merged_base;  /* Highest base version of this incarnation that was merged; 0: none. */
    uint32_t steps;        /* c_steps, as last heard. */
};

struct sy_member {
    bool used, connected;
    enum dl_role role;
    uint32_t learner;
    uint64_t admission, nonce;
    char uid[DL_WIRE_UID_MAX];
    uint64_t step, pace_step; /* t_m; its value when the previous round opened. */
    uint64_t tokens, busy_ns, waited_ns;
    uint64_t last_tokens;     /* Of the last step. */
    double step_seconds;
    float loss;
    int64_t heard_ns, left_ns;
    uint64_t pushes_merged;
    struct sy_member_fragment *fragments; /* One a fragment of the shard. */
};

enum sy_round_state { SY_ROUND_IDLE, SY_ROUND_PULLING, SY_ROUND_MERGING };

struct sy_round {
    enum sy_round_state state;
    bool seeding; /* MERGING stores a first state. */
    bool warmup, final;
    uint64_t id, order; /* `order`: position among openings, for round-robin. */
    uint32_t need, asked;
    int64_t opened_ns, first_ns, quorum_ns, grace_end_ns, closed_ns;
    struct sy_part *parts; /* One a member slot. */
    struct sy_participant *participants; /* Of the closed round, ascending learner id. */
    uint32_t participant_count;
};

struct sy_fragment_state {
    uint64_t version, round;
    bool final_done;
    bool seed_asked;
    struct sy_round open;
};

struct sy_core {
    const struct dl_spec *spec;
    uint32_t shard, fragment_count, member_max;
    uint64_t epoch;
    struct sy_member *members;
    struct sy_fragment_state *fragments;
    double *norms; /* Scratch, one a member slot. */

    uint64_t next_round, rounds_merged, next_order, next_admission;
    uint64_t paced; /* Rounds opened at the steady pace: the n-th is due after floor(n H / F) steps. */
    bool restored;
    bool warmup_over;
    uint64_t step_max;
    uint64_t tokens, busy_ns;
    double tokens_merged;
    int64_t first_event_ns, first_step_ns;
    uint32_t seeder;

    bool stopping, ended;
    enum dl_stop_result stop_result;
    char stop_text[DL_WIRE_TEXT_MAX];
    int64_t finish_end_ns;
    char delayed[DL_WIRE_TEXT_MAX]; /* Why a commit waits; empty: none does. */

    double sync_seconds, grace_seconds;
    struct sy_round_times times;
    bool evaluated;
    struct dl_wire_evaluation first_evaluation, last_evaluation;
    uint64_t verdicts[DL_VERDICT_COUNT];
    uint64_t joins, leaves[5], refusals, notes_dropped;

    struct sy_queued *queue;
    uint32_t queue_capacity, queue_head, queue_size;
    char (*texts)[DL_WIRE_TEXT_MAX];
    uint32_t text_next, texts_waiting;
};

struct sy_queued {
    enum sy_action_type type;
    uint32_t member, fragment;
    uint64_t round, version;
    union {
        struct dl_wire_pull pull;
        struct dl_wire_result result;
        uint8_t stop;
    } as;
    bool warn;
    int32_t text; /* Into `texts`; -1: none. */
};

static inline uint32_t sy_global(const struct sy_core *core, uint32_t index)
{
    return core->shard + index * core->spec->syncer.shards;
}

/* Index of a global fragment in this shard, or UINT32_MAX. */
static inline uint32_t sy_local(const struct sy_core *core, uint32_t fragment)
{
    uint32_t shards = core->spec->syncer.shards;
    bool ours = fragment % shards == core->shard && fragment < core->spec->sync.fragments;
    return ours ? fragment / shards : UINT32_MAX;
}

static inline bool sy_is_live_learner(const struct sy_member *m)
{
    return m->used && m->connected && m->role == DL_ROLE_LEARNER;
}

static inline double sy_estimate(double old, double seen)
{
    return old == 0 ? seen : old + SY_ESTIMATE_WEIGHT * (seen - old);
}

static inline int64_t sy_ns(double seconds)
{
    return (int64_t)(seconds * 1e9);
}

/* actions.c */
bool sy_actions_init(struct sy_core *core);
void sy_act(struct sy_core *core, const struct sy_queued *action);
void sy_act_text(struct sy_core *core, enum sy_action_type type, uint32_t member, bool warn, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

/* members.c */
uint32_t sy_live_learners(const struct sy_core *core);
void sy_members_tick(struct sy_core *core, int64_t now_ns);

/* pacing.c */
void sy_pace(struct sy_core *core, int64_t now_ns);     /* Opens whatever is due. */
bool sy_in_warmup(const struct sy_core *core);
double sy_step_seconds(const struct sy_core *core);     /* Median over live learners; 0: unknown. */
void sy_pace_bounds(const struct sy_core *core, uint32_t *pull_within, uint32_t *update_within, uint32_t *wait_ms);
uint32_t sy_quorum(const struct sy_core *core);         /* K of a steady round. */
uint32_t sy_warmup_quorum(const struct sy_core *core);

/* rounds.c */
void sy_round_open(struct sy_core *core, int64_t now_ns, uint32_t index, uint32_t need, bool warmup, bool final);
void sy_round_evaluate(struct sy_core *core, int64_t now_ns, uint32_t index);
void sy_round_member_left(struct sy_core *core, int64_t now_ns, uint32_t member);
void sy_round_ask(struct sy_core *core, uint32_t index, uint32_t member); /* If it can contribute and has not. */
void sy_seed(struct sy_core *core);                     /* Asks someone for the first state where there is none. */
void sy_verdict(struct sy_core *core, uint32_t member, uint32_t fragment, uint64_t round, enum dl_verdict verdict);
double sy_norm_median(double *norms, uint32_t count);   /* Reorders `norms`. */

/* finish.c */
void sy_finish_check(struct sy_core *core, int64_t now_ns); /* Budgets and deadline. */
void sy_finish_step(struct sy_core *core, int64_t now_ns);  /* Opens last rounds, ends when all is done. */

#endif
