/* Shared by the supervisor's sources only. */
#ifndef OP_LOCAL_SUPERVISOR_INTERNAL_H
#define OP_LOCAL_SUPERVISOR_INTERNAL_H

#include <sys/types.h>

#include "operator/local/control.h"
#include "operator/local/events.h"
#include "operator/local/pace.h"
#include "operator/local/poller.h"
#include "operator/local/supervisor.h"
#include "operator/local/terminal.h"
#include "operator/local/view.h"
#include "operator/reconcile/plan.h"

#define OP_LOG_BYTES_MAX (8 * 1024 * 1024) /* A process may have twice as much: its log and the one before. */
#define OP_DRILLS_MAX 8

struct op_child { /* A process, from its start until the planner says forget. */
    bool is_used;
    enum op_kind kind;
    uint32_t pool, id;
    uint64_t incarnation;
    pid_t pid;
    char name[32]; /* "learner-2" */
    char uid[DL_WIRE_UID_MAX];
    enum op_instance_state state;
    int64_t since_ns, started_ns;
    bool is_ready;     /* Syncers: their port is known. */
    bool is_connected; /* Learners: as last seen in the status. */
    bool has_state;    /* Learners: it is known that they took over a peer's state. */
    bool was_told;     /* Syncers: to end the job. */
    enum op_end end;
    int code;
};

struct op_tally { /* What one learner id did over all its incarnations. */
    uint32_t starts, disruptions, crashes;
    uint64_t steps, tokens, merged; /* Of incarnations that are gone. */
    double tokens_per_second;       /* As last seen while it trained. */
    bool is_given_up;
    struct op_learner_status current;
};

struct op_drill { /* A learner killed on purpose, and what that did to the others. */
    uint32_t victim;
    double at_seconds;
    int64_t event_ns, from_ns, until_ns;
    bool is_measured;
    struct op_pace_change change;
    double back_seconds; /* Until its replacement was connected; 0: not yet. */
};

struct op_supervisor {
    const struct op_run_options *options;
    const struct dl_spec *spec;
    struct op_rundir dir;
    struct op_planner *planner;
    struct op_wanted wanted;
    struct op_progress progress;
    struct op_plan plan;
    struct op_poller *poller;
    struct op_control control;
    struct op_events events;
    struct op_view *view;
    struct op_terminal terminal;
    struct op_pace *pace;
    struct op_chaos chaos;
    uint32_t drill_count;
    struct op_drill drills[OP_DRILLS_MAX];
    uint32_t child_capacity;
    struct op_child *children;
    struct op_instance *instances;
    struct op_tally *tallies;               /* By learner id. */
    char addresses[DL_SPEC_SHARDS_MAX][64]; /* "127.0.0.1:4711"; "" until known. */
    uint32_t replicas, threads;
    int signal_fd, lock_fd;
    char ca[OP_PATH_MAX]; /* Authority of the run's certificates (op_certificates); "": no TLS. */
    uint32_t life;        /* How often the run was begun: 1, and one more with every resume. */
    uint32_t interrupts;
    int64_t start_ns, now_ns, end_ns;
    int64_t first_step_ns; /* When a learner was first seen to have made a step; 0: not yet. */
    int64_t drawn_ns, line_ns, saved_ns, bounded_ns;
    uint64_t events_shown;
    char last_phase[24];
    char failure[DL_ERR_TEXT_MAX]; /* The first end that explains a failure of the job. */
};

/* children.c */
void op_children_apply(struct op_supervisor *s); /* The plan's changes. */
void op_children_reap(struct op_supervisor *s);
uint32_t op_children_observe(struct op_supervisor *s); /* Into s->instances. */
void op_children_find_ports(struct op_supervisor *s);
struct op_child *op_children_find(struct op_supervisor *s, enum op_kind kind,
                                  uint32_t id);     /* One that runs, or NULL. */
void op_children_kill_all(struct op_supervisor *s); /* And waits for them. */
bool op_children_awaiting_port(const struct op_supervisor *s);

/* watch.c: from statuses to the view, events, chaos, drills. */
void op_watch_status(struct op_supervisor *s);
void op_watch_view(struct op_supervisor *s);
void op_watch_chaos(struct op_supervisor *s);
void op_watch_scale(struct op_supervisor *s, uint32_t replicas, const char *why);
void op_watch_final(struct op_supervisor *s); /* Once all processes are gone. */

/* report.c */
DL_MUST_CHECK enum dl_rc op_report_write(struct op_supervisor *s, const char *sample, struct dl_err *err);

#endif
