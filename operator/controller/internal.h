/* Shared by the controller's sources only: what it holds, and who does what.
 *
 *   controller.c  watches, the queue, metrics      store.c   jobs, pods and nodes as they are held
 *   turn.c        one look at one job              act.c     requests and what their answers mean
 *   progress.c    the syncers' status and orders   token.c   the key of the jobs' tokens */
#ifndef OP_CONTROLLER_INTERNAL_H
#define OP_CONTROLLER_INTERNAL_H

#include <sys/queue.h>

#include "operator/controller/controller.h"
#include "operator/kube/api.h"
#include "operator/kube/events.h"
#include "operator/kube/map.h"
#include "operator/kube/queue.h"
#include "operator/kube/reconcile_metrics.h"
#include "operator/kube/reflector.h"
#include "operator/reconcile/conditions.h"
#include "operator/reconcile/pod.h"

#define OP_KEY_MAX 340                       /* "namespace/name" and its end. */
#define OP_SETTLE_NS INT64_C(3000000)        /* Changes that come within this time are looked at together. */
#define OP_ASK_AGAIN_NS INT64_C(10000000000) /* A deletion that shows no effect for so long is sent again. */
#define OP_RESYNC_NS INT64_C(1800000000000)  /* All of a job's parts are applied again so often. */
#define OP_HEARD_NS INT64_C(30000000000)     /* What syncers said counts for so long. */
#define OP_PART_UNKNOWN 1                    /* As a digest: it is there, but who knows whether as it should be. */
#define OP_PART_STALE 2                      /* As a digest: an answer that says nothing any more is on its way. */
#define OP_SECOND INT64_C(1000000000)

struct op_bucket;

struct op_held_pod {
    char *key; /* "namespace/name"; `name` points into it. */
    const char *name;
    struct op_bucket *bucket;
    uint32_t index; /* In the bucket. */
    struct op_pod pod;
    int64_t deleted_ns; /* When its deletion was asked for; 0: it was not. */
    bool is_told;       /* That somebody else takes it away. */
};

struct op_bucket { /* The pods of one job, by the job's uid: they may be seen before it. */
    char job_uid[OP_POD_UID_MAX];
    char job_key[OP_KEY_MAX];
    uint32_t count, capacity;
    struct op_held_pod **pods;
};

struct op_shard { /* One syncer as it was last heard. */
    int result;   /* enum dl_stop_result; it stays once known. */
    bool is_finishing;
};

struct op_poll { /* One look at all shards. */
    uint32_t pending;
    bool is_late;                /* Some shard had ended before. */
    struct op_job_status *views; /* One a shard. */
    bool *is_heard;
};

struct op_job {
    char key[OP_KEY_MAX];
    char space[DL_SPEC_NAME_MAX], name[DL_SPEC_NAME_MAX], uid[OP_POD_UID_MAX];
    char *manifest; /* The spec as it was written, with name and namespace. */
    size_t manifest_size;
    int64_t generation;
    bool is_leaving;    /* Being deleted: its owner references do the work. */
    bool is_settled;    /* Its end is written: only the ttl is left. */
    bool has_evaluator; /* Of the spec. */
    bool has_replicas;  /* learners.replicas stands in the spec. */
    bool is_filling;    /* It is being written there. */
    uint32_t replicas, learners_min;
    int64_t ttl_seconds;
    uint64_t manifest_hash, incarnation_base;
    struct op_problem spec_problem; /* Empty: the spec is fine. */
    struct op_wanted wanted;
    struct op_planner *planner;

    uint64_t parts_hash;                         /* Of what the parts were last made from; 0: make them again. */
    uint64_t part_done[OP_PART_COUNT];           /* Digest of what the server has. */
    uint64_t part_sent[OP_PART_COUNT];           /* Digest of what is on its way; 0: nothing. */
    int64_t parts_due_ns, parts_applied_ns;      /* Monotonic. */
    uint32_t part_failures, parts_failed;        /* In a row; a bit for each that the server has refused. */
    struct op_problem part_problem, pod_problem; /* What the server refused. */
    int64_t advised_generation;                  /* Whose advice has been told. */
    int64_t told_generation; /* An earlier process wrote that the job of this generation runs; 0: not. */
    bool has_set;            /* The StatefulSet was made, by us or an earlier process. */

    struct op_shard shards[DL_SPEC_SHARDS_MAX];
    struct op_poll *poll; /* NULL: none under way. */
    uint32_t poll_shards; /* Of that one. */
    uint64_t poll_number;
    int64_t poll_due_ns, heard_ns;
    uint32_t poll_failures; /* In a row, of all shards. */
    char poll_error[200];   /* Of the last of them. */
    struct op_job_status view;
    int64_t order_due_ns; /* Next order to end. */

    char last_words
        [OP_CONDITION_MESSAGE_MAX]; /* Of the pod that failed last, one that no restart helps before others. */
    bool is_last_word_final;

    struct op_conditions conditions;
    int64_t started_ns, completed_ns; /* Wall clock, as in the status. */
    enum op_job_phase phase;          /* As last written. */
    bool has_phase;
    char problem[OP_CONDITION_REASON_MAX]; /* As last written. */
    uint64_t status_hash;
    uint32_t truths;   /* Of the conditions, as last written. */
    int64_t status_ns; /* Monotonic; when it was written. */
    bool is_writing;
    bool is_deleting; /* Its deletion after the ttl is on its way. */
};

enum op_errand_type {
    OP_ERRAND_PART,
    OP_ERRAND_POD,
    OP_ERRAND_DELETE,
    OP_ERRAND_STATUS,
    OP_ERRAND_FILL,
    OP_ERRAND_END, /* The job's deletion. */
    OP_ERRAND_POLL,
    OP_ERRAND_KEY,
    OP_ERRAND_MAKE_KEY,
};

struct op_errand { /* A request under way. */
    LIST_ENTRY(op_errand) all;
    struct op_controller *controller;
    uint64_t id;
    enum op_errand_type type;
    char job_key[OP_KEY_MAX], job_uid[OP_POD_UID_MAX];
    char name[OP_CHILD_NAME_MAX]; /* Of the object. */
    enum op_part part;
    uint64_t digest;
    struct op_change change;
    uint32_t shard;
    enum op_job_phase phase; /* Of the status that is written. */
    char problem[OP_CONDITION_REASON_MAX];
};

struct op_order; /* An order to a syncer; progress.c. */

enum op_token_state { OP_KEY_UNKNOWN, OP_KEY_ASKED, OP_KEY_KNOWN };
#define OP_TOKEN_KEY_BYTES 32
#define OP_TOKEN_TEXT_MAX 72

struct op_controller {
    struct op_client *client;
    struct op_loop *loop;
    struct op_controller_options options;
    struct op_recorder *recorder;
    struct op_queue *queue;
    struct op_timer pump;
    struct op_reflector *reflectors[OP_SPACES_MAX * 5 + 1];
    uint32_t reflector_count;
    uint32_t needed_synced; /* Reflectors without which nothing is planned: jobs and pods. */
    struct op_map jobs;     /* By key. */
    struct op_map pods;     /* By key. */
    struct op_map buckets;  /* By the job's uid. */
    struct op_map nodes;    /* By name, cut as in struct op_node. */
    uint64_t capacity_changes;
    LIST_HEAD(op_errand_list, op_errand) errands;
    LIST_HEAD(op_order_list, op_order) orders;
    enum op_token_state key_state;
    unsigned char key[OP_TOKEN_KEY_BYTES];
    int64_t key_due_ns;
    struct op_reconcile_metrics counts;
};

/* store.c */
struct op_job *op_store_job(const struct op_controller *c, const char *key); /* Or NULL. */
struct op_bucket *op_store_bucket(const struct op_controller *c, const char *job_uid);
void op_store_on_job(struct op_controller *c, const struct op_object *object);
void op_store_on_job_gone(struct op_controller *c, const char *space, const char *name);
void op_store_on_pod(struct op_controller *c, const struct op_object *object);
void op_store_on_pod_gone(struct op_controller *c, const char *space, const char *name);
void op_store_on_node(struct op_controller *c, const struct op_object *object);
void op_store_on_node_gone(struct op_controller *c, const char *name);
void op_store_on_part_gone(struct op_controller *c, enum op_part part, const char *space, const char *name);
void op_store_release(struct op_controller *c);
bool op_key_write(char out[OP_KEY_MAX], const char *space, const char *name);

/* controller.c */
void op_controller_wake(struct op_controller *c, const char *job_key, int64_t due_ns); /* Monotonic; 0: soon. */

/* turn.c: one look at one job. */
void op_turn(struct op_controller *c, const char *job_key);

/* act.c. Failures to send are treated as answers that failed. */
void op_act_part(struct op_controller *c, struct op_job *job, enum op_part part, const char *text, uint64_t digest);
void op_act_start(struct op_controller *c, struct op_job *job, const struct op_change *change, const char *text);
void op_act_delete_pod(struct op_controller *c, struct op_job *job, struct op_held_pod *pod);
void op_act_status(struct op_controller *c, struct op_job *job, const char *text, enum op_job_phase phase,
                   const char *problem, uint64_t digest);
void op_act_fill_replicas(struct op_controller *c, struct op_job *job);
void op_act_delete_job(struct op_controller *c, struct op_job *job);
struct op_errand *op_errand_new(struct op_controller *c, const struct op_job *job, enum op_errand_type type);
void op_errand_free(struct op_errand *errand);
op_result_fn op_errand_done;
void op_act_release(struct op_controller *c);
void op_act_event(struct op_controller *c, const struct op_job *job, bool is_warning, const char *reason,
                  const char *action, const char *fmt, ...) DL_PRINTF(6, 7);

/* progress.c */
void op_progress_poll(struct op_controller *c, struct op_job *job, int64_t now_ns);
void op_progress_on_answer(struct op_controller *c, struct op_job *job, const struct op_errand *errand,
                           const struct op_result *result);
void op_progress_read(struct op_job *job, const struct op_bucket *bucket, struct op_progress *out);
/* Tells all syncers to end the job: "stop" or "finish". */
void op_progress_order(struct op_controller *c, struct op_job *job, const char *order, int64_t now_ns);
void op_progress_forget(struct op_job *job); /* Gives up what is under way. */
void op_progress_release(struct op_controller *c);

/* token.c */
/* False: the key is not known yet (it has been asked for). */
bool op_token_of_job(struct op_controller *c, const char *job_uid, char out[OP_TOKEN_TEXT_MAX]);
void op_token_on_answer(struct op_controller *c, enum op_errand_type type, const struct op_result *result);

#endif
