/* op_plan: which instances of a job (processes or pods) should exist, from what is wanted and what is observed.
 *
 * Level-triggered: it is given the whole of both at any time and as often as one likes; asking twice changes nothing
 * twice. What has to be remembered between two calls (incarnations, crash counts, backoff, starts that cannot be seen
 * yet) is in the planner; after its loss a new planner takes over from observed instances alone and only forgets crash
 * counts.
 *
 * Rules:
 *   identity    A learner keeps its id and pool for as long as it is wanted; every start of it is a new incarnation.
 * New learners get the lowest id that nobody has. An id has one instance at a time, lost ones aside. ends        A
 * disruption (SIGKILL, SIGTERM, eviction, preemption, node lost or shut down, deletion, a syncer that saved and left
 * (exit 5), an exit with 0 that nobody asked for) is replaced at once and costs nothing; a crash (any other exit, SIGSEGV and its like, out of memory) is
 * replaced after an exponential backoff and counts towards the budget of its kind; whoever ran for `healthy_ns` starts
 * from zero. Exits 2 and 3 are never tried again. Repeated short lives back off, whatever ended them. failure     A
 * syncer given up, or all learners given up: the job fails with that reason. shards      When one shard succeeds, the others are told to finish; one that is down is started again for it,
 * within `finish_ns`. scale-down  Victims: those that do not
 * run, are not ready, are disrupted; then the most stale; then the slowest; then the highest id. A stopped one is asked
 * first. maximum     Instances that start, run or terminate never exceed `learners_max`; so a replacement waits for the
 * place. Lost ones do not count: they are replaced without waiting for them to vanish. end         Reported by the
 * syncers; then nothing is started, everything is given `finish_ns`, then asked, then killed.
 *
 * Pure: no I/O, no clock. Owned by one thread. Layer operator/reconcile. */
#ifndef OP_RECONCILE_PLAN_H
#define OP_RECONCILE_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "common/err.h"
#include "common/spec.h"

#define OP_PLAN_CHANGES_MAX 128 /* More are asked for at the next call, which is then due at once. */
#define OP_PLAN_TEXT_MAX 256

enum op_kind { OP_SYNCER, OP_LEARNER, OP_EVALUATOR };
const char *op_kind_name(enum op_kind kind); /* "syncer", "learner", "evaluator" */

enum op_instance_state {
    OP_PENDING,  /* Accepted, not placed yet. */
    OP_STARTING, /* Placed; not running yet. */
    OP_RUNNING,
    OP_TERMINATING, /* Asked to stop, or about to be stopped; not gone. */
    OP_LOST,        /* Its node is lost, or nobody can say. */
    OP_ENDED,
};

enum op_end {                /* How an instance ended. */
              OP_END_EXIT,   /* `code` is the exit code; 128 + n (as shells and container runtimes say) counts as signal
                                n. */
              OP_END_SIGNAL, /* `code` is the signal's number. */
              OP_END_OUT_OF_MEMORY,
              OP_END_EVICTED,
              OP_END_PREEMPTED,
              OP_END_NODE_LOST,
              OP_END_NODE_SHUTDOWN,
              OP_END_DELETED,
};

struct op_instance { /* One observed process or pod. */
    enum op_kind kind;
    uint32_t pool;        /* Learners: index into op_wanted.pools. */
    uint32_t id;          /* Shard, learner id; 0 for the evaluator. */
    uint64_t incarnation; /* >= 1 */
    enum op_instance_state state;
    int64_t since_ns;   /* When it entered the state. */
    int64_t started_ns; /* When it began to run (OP_RUNNING and later), else when it was made. */
    bool ready;         /* Syncers: reachable. Learners: ready as Kubernetes has it; locally: running. */
    bool connected;     /* Learners: every syncer counts it as connected. */
    bool disrupted;     /* Will be taken away soon: DisruptionTarget, a spot taint. */
    bool unschedulable; /* With OP_PENDING. */
    uint64_t behind;    /* Versions. */
    double tokens_per_second;
    enum op_end end; /* With OP_ENDED; else of the last life before a restart in place. */
    int code;
    uint32_t restarts; /* Times that it was started again in its place, under the same incarnation. */
};

struct op_limits {
    uint32_t learner_crashes_max, syncer_crashes_max, evaluator_crashes_max; /* In a row; one more gives up. */
    int64_t backoff_first_ns, backoff_max_ns;                                /* Doubles from one to the other. */
    int64_t healthy_ns;    /* A life of at least this resets crash count and backoff. */
    int64_t clean_exit_ns; /* Least wait after an exit with 0: the end of the job may not have been seen yet. */
    int64_t expect_ns;     /* A start that cannot be observed for so long is made again under the same incarnation. */
    int64_t finish_ns;     /* From the job's end (or the wish to stop it) until instances are asked one by one. */
    int64_t grace_ns;      /* From there until they are killed. 0: never (a kubelet does it). */
};
extern const struct op_limits op_limits_default;

struct op_wanted_pool {
    char name[DL_SPEC_NAME_MAX];
    uint32_t replicas;
    bool scavenges;
    uint32_t scavenge_max; /* Learners of this pool, the steady ones included. */
    int64_t pending_ns, cooldown_ns;
};

enum op_stop_wish { OP_WISH_NONE, OP_WISH_STOP, OP_WISH_KILL };

struct op_wanted {
    uint64_t generation; /* A change gives those given up another chance. */
    uint32_t shards;
    bool syncers_by_set; /* Someone else keeps `syncers_wanted` syncers (a StatefulSet): no change ever names one. */
    bool evaluator;
    uint32_t learners_max;
    uint32_t pool_count;
    struct op_wanted_pool pools[DL_SPEC_POOLS_MAX];
    bool suspend;
    int64_t started_ns;   /* Start of the job; 0: the planner's first call. */
    int64_t deadline_ns;  /* Bound of the job's life from its start; 0: none. */
    bool endpoints_known; /* Learners have somewhere to connect to. */
    enum op_stop_wish wish;
    uint64_t incarnation_base; /* First incarnations are above it: whoever planned before may have given lower ones. */
    uint64_t capacity_changes; /* Nodes added, freed or removed so far: ends the backoff of scavenging. */
    struct op_limits limits;
};

/* Wanted instances of a spec. Pools get their own replicas in order, as far as learners.replicas goes; what is left
 * goes to the last pool. So `learners.replicas` (the scale subresource) is always the sum, and the last pool is the one
 * that moves. */
void op_wanted_from_spec(const struct dl_spec *spec, uint32_t replicas, struct op_wanted *wanted);

struct op_progress { /* What the syncers say of the job as a whole. */
    bool finishing;  /* The budget is reached: learners are not replaced any more. */
    int result;      /* enum dl_stop_result once the job has ended, else -1. */
    bool succeeded;  /* Some shard has ended with success: so will the others, once they are told. */
};

enum op_reason {
    OP_REASON_NONE,
    OP_REASON_WANTED,      /* First start. */
    OP_REASON_REPLACEMENT, /* Start after an end. */
    OP_REASON_SCALE_DOWN,
    OP_REASON_UNSCHEDULABLE,
    OP_REASON_NODE_LOST,
    OP_REASON_SUSPENDED,
    OP_REASON_COMPLETED,
    OP_REASON_STOP_REQUESTED,
    OP_REASON_DEADLINE_EXCEEDED,
    OP_REASON_TIMED_OUT,        /* The syncers reported a timeout. */
    OP_REASON_SYNCER_FAILED,    /* The syncers reported a failure. */
    OP_REASON_BAD_INPUT,        /* Exit code 2. */
    OP_REASON_REFUSED,          /* Exit code 3. */
    OP_REASON_CRASH_LOOP,       /* Restart budget used up. */
    OP_REASON_EVALUATOR_FAILED, /* The job ended but its weights were not exported. */
    OP_REASON_WAITING,          /* For learners, syncers, a backoff. */
    OP_REASON_COUNT
};
const char *op_reason_name(enum op_reason reason); /* "ScaleDown", ...: for conditions and events. */

enum op_job_phase {
    OP_JOB_PENDING, /* No syncer is up yet. */
    OP_JOB_RUNNING,
    OP_JOB_SUSPENDING, /* Something still runs. */
    OP_JOB_SUSPENDED,
    OP_JOB_FINISHING,
    OP_JOB_SUCCEEDED, /* This and the following are terminal: every instance is gone. */
    OP_JOB_STOPPED,
    OP_JOB_FAILED,
};
const char *op_job_phase_name(enum op_job_phase phase);

enum op_change_type {
    OP_START,      /* Start (kind, id, incarnation) in `pool`. */
    OP_STOP,       /* Ask it to stop: SIGTERM, delete with its grace period. */
    OP_KILL,       /* End it now. */
    OP_FORGET,     /* It has ended and was taken note of: remove what is left of it. */
    OP_STOP_JOB,   /* Ask the syncers to end the job (they tell the learners). Names no instance. */
    OP_FINISH_JOB, /* The same because a shard has succeeded: the others are to finish as well. */
};

struct op_change {
    enum op_change_type type;
    enum op_kind kind;
    uint32_t pool, id;
    uint64_t incarnation;
    enum op_reason reason;
};

struct op_plan_pool {
    uint32_t desired, running, connected;
    uint32_t scavenged; /* Of `desired`, beyond its replicas. */
};

struct op_plan {
    enum op_job_phase phase;
    enum op_reason reason;
    char message[OP_PLAN_TEXT_MAX];
    uint32_t desired, running, connected, starting, terminating, waiting, given_up; /* Learners. */
    struct op_plan_pool pools[DL_SPEC_POOLS_MAX];
    uint32_t syncers_ready, syncers_wanted;
    uint32_t change_count;
    struct op_change changes[OP_PLAN_CHANGES_MAX];
    int64_t next_ns; /* Ask again no later; INT64_MAX: when something changes. */
};

struct op_planner; /* Opaque. */
DL_MUST_CHECK enum dl_rc op_planner_new(struct op_planner **out, struct dl_err *err);
void op_planner_free(struct op_planner *planner); /* NULL is fine. */

/* Plans; `instances` in any order. Terminal phases are kept. */
void op_plan_make(struct op_planner *planner, const struct op_wanted *wanted, const struct op_progress *progress,
                  const struct op_instance *instances, uint32_t count, int64_t now_ns, struct op_plan *plan);

/* A planned start could not be made (no process, quota, 403): it is tried again after a backoff. */
void op_plan_on_start_failed(struct op_planner *planner, const struct op_wanted *wanted, const struct op_change *start,
                             int64_t now_ns);

/* An instance was seen and is gone again, maybe both between two calls. */
void op_plan_on_gone(struct op_planner *planner, enum op_kind kind, uint32_t id, uint64_t incarnation, int64_t now_ns);

/* Whether the planner wants this instance to exist, now or after a backoff (or it was given up, but its place is kept). */
bool op_planner_wants(const struct op_planner *planner, enum op_kind kind, uint32_t id);

/* Why an instance will not be started again (BadInput, Refused, CrashLoop), or OP_REASON_NONE. */
enum op_reason op_planner_given_up(const struct op_planner *planner, enum op_kind kind, uint32_t id);

/* Whether this end counts towards a restart budget. */
bool op_end_is_crash(enum op_end end, int code);

#endif
