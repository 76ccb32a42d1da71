/* Shared by the planner's sources only: what it remembers. */
#ifndef OP_RECONCILE_PLAN_INTERNAL_H
#define OP_RECONCILE_PLAN_INTERNAL_H

#include "operator/reconcile/plan.h"

/* A place for one instance at a time: a shard, a learner id, the evaluator. */
struct op_slot {
    enum op_kind kind;
    uint32_t id, pool;
    bool exists;  /* Wanted, or still leaving. */
    bool leaving; /* Chosen as a victim; is asked to stop until it is gone. */
    bool given_up;
    bool is_finished;      /* A syncer that ended with 0: its work is done. */
    enum op_reason reason; /* Why given up, or of the next start. */
    uint64_t incarnation;  /* Of the newest start; 0: none yet. */
    uint64_t counted;      /* Ends up to this incarnation have been dealt with. */
    bool expected;         /* Started, not observed yet. */
    int64_t expected_since_ns;
    bool seen; /* `incarnation` has been observed. */
    int64_t seen_started_ns;
    int64_t next_start_ns;
    uint32_t crashes, short_lives; /* In a row. */
    uint32_t restarts;             /* Restarts in place of this incarnation that have been dealt with. */
    int last_code;                 /* Of the last end that was not a disruption; 0: fine. */
    /* For one call: */
    const struct op_instance *current; /* Alive and of the newest incarnation. */
    uint32_t alive;                    /* Observed, any incarnation: pending, starting, running, terminating. */
};

struct op_scavenging {
    uint32_t extra; /* Learners beyond the pool's replicas. */
    int64_t grown_ns, backoff_until_ns;
    uint32_t failures; /* In a row. */
    bool has_grown;
    bool last_failed;
};

struct op_planner {
    uint32_t syncer_count, learner_count; /* Places; they grow with what is wanted and seen. */
    struct op_slot *syncers, *learners;
    struct op_slot evaluator;
    struct op_scavenging scavenging[DL_SPEC_POOLS_MAX];
    bool is_started;
    int64_t started_ns;
    uint64_t generation, capacity_changes;
    bool is_suspended; /* Ends are wanted. */
    bool is_ending;
    bool ask_syncers; /* The end is ours to announce. */
    bool at_once;     /* Nothing to wait for: ask everyone now. */
    int64_t ending_since_ns;
    int64_t succeeded_since_ns; /* When a shard was first seen to have succeeded; 0: not yet. */
    enum op_job_phase outcome;
    enum op_reason outcome_reason;
    bool is_over;
    /* For one call: */
    const struct op_wanted *wanted;
    const struct op_progress *progress;
    int64_t now_ns;
    struct op_plan *plan;
};

/* plan.c */
struct op_slot *op_planner_slot(struct op_planner *planner, enum op_kind kind, uint32_t id); /* NULL: no such place. */
bool op_planner_add(struct op_planner *planner, enum op_change_type type, const struct op_slot *slot,
                    uint64_t incarnation, enum op_reason reason); /* False: the plan is full. */
void op_planner_wake(struct op_planner *planner, int64_t at_ns);
void op_planner_end(struct op_planner *planner, enum op_job_phase outcome, enum op_reason reason);

/* plan_end.c */
/* Whether the job is over by now, and with what result. */
void op_planner_decide_end(struct op_planner *planner);
/* Of a job that ends: learners and evaluator leave first, the syncers after them; is_over is set once nobody is left. */
void op_planner_tear_down(struct op_planner *planner);
/* The same order, for a job that is to rest. */
void op_planner_suspend(struct op_planner *planner);
/* One that was asked and does not go is killed after the grace period, where that is ours to do. */
void op_planner_ask_or_kill(struct op_planner *planner, const struct op_slot *slot, enum op_reason reason);
/* The budget is reached: what is there finishes, nobody else is started. */
bool op_planner_is_last(const struct op_planner *planner);
bool op_slot_is_up(const struct op_slot *slot); /* Observed, or started and expected. */
uint32_t op_slots_up(const struct op_slot *slots, uint32_t count);

/* plan_observe.c */
void op_planner_observe(struct op_planner *planner, const struct op_instance *instances, uint32_t count);
void op_planner_back_off(struct op_planner *planner, const struct op_limits *limits, struct op_slot *slot,
                         bool is_crash);

/* plan_pools.c */
void op_planner_scavenge(struct op_planner *planner);
void op_planner_scale(struct op_planner *planner);

#endif
