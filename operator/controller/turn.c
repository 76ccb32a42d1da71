/* One look at one job: what is wanted and what is there, and what follows from the two. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"
#include "operator/controller/internal.h"

#define JOB_PACE_NS INT64_C(40000000) /* Added for each job to the time between two writes of progress. */
#define ADOPT_NS INT64_C(200000000)   /* A job's share of the time in which all parts are applied after a start. */
#define SET_SLOW_NS (10 * OP_SECOND)  /* A set that has not made its pods for so long meets an obstacle. */
#define SYNCERS_FIRST_NS                                                                                               \
    (2 * OP_SECOND)    /* Time that a set has before learners' pods are made without waiting for its own. */
#define SILENT_POLLS 4 /* Looks in vain, some 30 s, at syncers that are ready. */

struct turn {
    struct op_controller *c;
    struct op_job *job;
    struct op_bucket *bucket; /* NULL: no pods. */
    int64_t now_ns, wall_ns;
    struct op_plan plan;
    struct dl_spec *spec; /* Parsed when something has to be made; NULL before. */
    struct op_problem problem;
};

static bool is_over(enum op_job_phase phase)
{
    return phase == OP_JOB_SUCCEEDED || phase == OP_JOB_STOPPED || phase == OP_JOB_FAILED;
}

static bool parse(struct turn *t)
{
    struct dl_err err;
    if (t->spec == NULL &&
        dl_spec_parse_stored(t->job->manifest, t->job->manifest_size, "the job", &t->spec, &err) != DL_OK) {
        op_problem_set(&t->job->spec_problem, "InvalidSpec", "%s", err.text);
        return false;
    }
    return true;
}

/* --- what is there --- */

static uint32_t pool_of(const struct op_wanted *wanted, const char *name)
{
    for (uint32_t i = 0; i < wanted->pool_count; i++) {
        if (strcmp(wanted->pools[i].name, name) == 0) {
            return i;
        }
    }
    return DL_SPEC_POOLS_MAX - 1; /* A pool that is gone: nobody is wanted there. */
}

static const struct op_learner_status *learner_of(const struct op_job *job, const struct op_pod *pod)
{
    for (uint32_t i = 0; i < job->view.learner_count && pod->kind == OP_LEARNER; i++) {
        if (job->view.learners[i].learner == pod->id && strcmp(job->view.learners[i].uid, pod->uid) == 0) {
            return &job->view.learners[i];
        }
    }
    return NULL;
}

static bool is_heard(const struct turn *t)
{
    return t->job->heard_ns != 0 && t->now_ns - t->job->heard_ns < OP_HEARD_NS;
}

static uint32_t count_syncers(const struct turn *t)
{
    uint32_t count = 0;
    for (uint32_t i = 0; t->bucket != NULL && i < t->bucket->count; i++) {
        count += t->bucket->pods[i]->pod.kind == OP_SYNCER ? 1 : 0;
    }
    return count;
}

static void observe(const struct turn *t, struct op_instance *instances)
{
    for (uint32_t i = 0; t->bucket != NULL && i < t->bucket->count; i++) {
        const struct op_pod *pod = &t->bucket->pods[i]->pod;
        struct op_pod_context context = {
            .node = pod->node[0] != 0 ? op_map_get(&t->c->nodes, pod->node) : NULL,
            .learner = learner_of(t->job, pod),
            .syncers_heard = is_heard(t),
            .pool = pool_of(&t->job->wanted, pod->pool),
        };
        op_pod_instance(pod, &context, &instances[i]);
    }
}

static void write_end(const struct op_held_pod *held, char *out, size_t size)
{
    const struct op_pod *pod = &held->pod;
    const char *colon = pod->message[0] != 0 ? ": " : "";
    snprintf(out, size, "%s ended%s with %d%s%s", held->name, pod->is_out_of_memory ? " out of memory" : "", pod->code,
             colon, pod->message);
}

/* Ends in order, by a signal from outside, and of syncers that saved and left (5) say nothing of what is wrong. */
static void note_last_words(const struct turn *t)
{
    struct op_job *job = t->job;
    for (uint32_t i = 0; t->bucket != NULL && i < t->bucket->count; i++) {
        const struct op_pod *pod = &t->bucket->pods[i]->pod;
        bool is_failure =
            pod->has_ended && !pod->is_up && (pod->is_out_of_memory || op_end_is_crash(OP_END_EXIT, pod->code));
        bool is_final = pod->code == DL_EXIT_USAGE || pod->code == DL_EXIT_REFUSED;
        if (is_failure && (is_final || !job->is_last_word_final)) {
            write_end(t->bucket->pods[i], job->last_words, sizeof job->last_words);
            job->is_last_word_final = is_final;
        }
    }
}

/* --- the parts --- */

static bool wants_part(const struct turn *t, enum op_part part)
{
    return part != OP_PART_OUTPUT || t->job->has_evaluator;
}

static void send_part(struct turn *t, enum op_part part)
{
    struct op_job *job = t->job;
    struct dl_err err;
    char token[OP_TOKEN_TEXT_MAX] = "";
    DL_AUTO_FREE char *text = NULL;
    if (part == OP_PART_TOKEN && (job->part_done[part] != 0 || !op_token_of_job(t->c, job->uid, token))) {
        job->parts_hash = job->part_done[part] != 0 ? job->parts_hash : 0;
        return;
    }
    struct op_render render = {.spec = t->spec, .job_uid = job->uid, .options = &t->c->options.render};
    if (op_render_part(&render, part, token, t->plan.syncers_wanted, &text, &err) != DL_OK) {
        op_problem_set(&job->spec_problem, "InvalidSpec", "%s", err.text); /* Until the spec changes. */
        return;
    }
    uint64_t digest = dl_hash64(text, strlen(text), 0) | 1;
    if (job->part_sent[part] == 0 && job->part_done[part] != digest) {
        op_act_part(t->c, job, part, text, digest);
    } else if (job->part_sent[part] != 0 && job->part_sent[part] != digest) {
        job->parts_hash = 0; /* Once what is on its way has arrived. */
    }
}

static uint64_t parts_hash(const struct turn *t)
{
    return (t->job->manifest_hash + UINT64_C(2) * t->plan.syncers_wanted) | 1;
}

static bool needs_parts(const struct turn *t)
{
    /* A job that was made suspended has nothing yet, and one that is over keeps what it has. */
    return t->job->started_ns != 0 || t->job->has_set;
}

static void distrust_parts(struct op_job *job)
{
    job->parts_hash = 0;
    for (int part = 0; part < OP_PART_COUNT; part++) {
        bool is_kept = part == OP_PART_TOKEN || job->part_done[part] == 0;
        job->part_done[part] = is_kept ? job->part_done[part] : OP_PART_UNKNOWN;
    }
}

/* What ran under an earlier process has its parts. After a change of operators those of many jobs would hold up what is
 * urgent, so they are applied one job after the other. */
static void adopt_parts(struct turn *t)
{
    struct op_job *job = t->job;
    if (job->parts_applied_ns != 0 || job->told_generation != job->generation ||
        t->plan.syncers_ready < t->plan.syncers_wanted || t->plan.syncers_wanted == 0) {
        return;
    }
    int64_t span_ns = DL_MIN((int64_t)t->c->jobs.count * ADOPT_NS, OP_RESYNC_NS - OP_SECOND);
    int64_t delay_ns = (int64_t)(dl_hash64(job->uid, strlen(job->uid), 0) % (uint64_t)span_ns);
    job->parts_applied_ns = t->now_ns - OP_RESYNC_NS + delay_ns;
    job->parts_hash = parts_hash(t);
    for (int part = 0; part < OP_PART_COUNT; part++) {
        job->part_done[part] = wants_part(t, (enum op_part)part) ? OP_PART_UNKNOWN : 0;
    }
    op_controller_wake(t->c, job->key, 0); /* Pods may be made from now on. */
}

static void keep_parts(struct turn *t)
{
    struct op_job *job = t->job;
    if (!needs_parts(t)) {
        return;
    }
    if (t->now_ns < job->parts_due_ns) {
        op_controller_wake(t->c, job->key, job->parts_due_ns);
        return;
    }
    if (job->parts_applied_ns != 0 && t->now_ns - job->parts_applied_ns >= OP_RESYNC_NS) {
        distrust_parts(job);
    }
    adopt_parts(t);
    uint64_t hash = parts_hash(t);
    if (hash == job->parts_hash || !parse(t)) {
        return;
    }
    job->parts_hash = hash;
    job->parts_applied_ns = t->now_ns;
    for (int part = 0; part < OP_PART_COUNT; part++) {
        if (wants_part(t, (enum op_part)part)) {
            send_part(t, (enum op_part)part);
        }
    }
}

/* --- the plan carried out --- */

static void start_pod(struct turn *t, const struct op_change *change)
{
    struct dl_err err;
    DL_AUTO_FREE char *text = NULL;
    bool is_rendered = false;
    if (parse(t)) {
        struct op_render render = {.spec = t->spec, .job_uid = t->job->uid, .options = &t->c->options.render};
        uint32_t pool = change->kind == OP_EVALUATOR ? 0 : change->pool;
        is_rendered = op_render_pod(&render, change->kind, pool, change->id, change->incarnation, &text, &err) == DL_OK;
    } else {
        snprintf(err.text, sizeof err.text, "%s", t->job->spec_problem.message);
    }
    if (!is_rendered) {
        op_problem_set(&t->job->pod_problem, "InvalidSpec", "%s", err.text);
        op_plan_on_start_failed(t->job->planner, &t->job->wanted, change, t->wall_ns);
        return;
    }
    op_act_start(t->c, t->job, change, text);
}

static struct op_held_pod *find_pod(const struct turn *t, const struct op_change *change)
{
    for (uint32_t i = 0; t->bucket != NULL && i < t->bucket->count; i++) {
        const struct op_pod *pod = &t->bucket->pods[i]->pod;
        if (pod->kind == change->kind && pod->id == change->id && pod->incarnation == change->incarnation) {
            return t->bucket->pods[i];
        }
    }
    return NULL;
}

static void say_why(struct turn *t, const struct op_change *change, const struct op_held_pod *held)
{
    const struct op_pod *pod = &held->pod;
    if (held->deleted_ns != 0 || pod->is_leaving) {
        return; /* Said before. */
    }
    if (change->type == OP_FORGET) {
        if (pod->phase != OP_POD_SUCCEEDED) {
            char text[OP_CONDITION_MESSAGE_MAX];
            write_end(held, text, sizeof text);
            op_act_event(t->c, t->job, true, pod->reason[0] != 0 ? pod->reason : "Ended", "Replace", "%s", text);
        }
        return;
    }
    op_act_event(t->c, t->job, change->reason == OP_REASON_NODE_LOST, op_reason_name(change->reason), "Stop",
                 "%s is asked to stop (%s)", held->name, op_reason_name(change->reason));
}

/* A pod that others take away is only ever seen to leave: by the time that it is replaced it is gone. */
static void tell_leaving(const struct turn *t)
{
    for (uint32_t i = 0; t->bucket != NULL && i < t->bucket->count; i++) {
        struct op_held_pod *held = t->bucket->pods[i];
        const struct op_pod *pod = &held->pod;
        bool is_of_set = pod->kind == OP_SYNCER && !pod->is_disrupted; /* Its set does so when the job is suspended. */
        if (!pod->is_leaving || held->is_told || held->deleted_ns != 0 || is_of_set) {
            continue;
        }
        held->is_told = true;
        op_act_event(t->c, t->job, false, pod->reason[0] != 0 ? pod->reason : "Deleted", "Replace",
                     "%s is taken away%s%s%s", held->name, pod->node[0] != 0 ? " from node " : "", pod->node,
                     pod->is_disrupted ? "" : ": somebody deletes it");
    }
}

static void carry_out(struct turn *t)
{
    for (uint32_t i = 0; i < t->plan.change_count; i++) {
        const struct op_change *change = &t->plan.changes[i];
        switch (change->type) {
        case OP_START: start_pod(t, change); break;
        case OP_STOP:
        case OP_KILL: /* The kubelet kills after the grace period. */
        case OP_FORGET: {
            struct op_held_pod *held = find_pod(t, change);
            if (held != NULL) {
                say_why(t, change, held);
                op_act_delete_pod(t->c, t->job, held);
            }
            break;
        }
        case OP_STOP_JOB: op_progress_order(t->c, t->job, "stop", t->now_ns); break;
        case OP_FINISH_JOB: op_progress_order(t->c, t->job, "finish", t->now_ns); break;
        }
    }
}

/* --- what is said --- */

static void find_problem(struct turn *t)
{
    struct op_job *job = t->job;
    const struct op_problem *refused[] = {&job->spec_problem, &job->part_problem, &job->pod_problem};
    for (size_t i = 0; i < DL_COUNT_OF(refused); i++) {
        if (refused[i]->reason[0] != 0) {
            t->problem = *refused[i];
            return;
        }
    }
    uint32_t syncers = count_syncers(t);
    for (uint32_t i = 0; t->bucket != NULL && i < t->bucket->count; i++) {
        const struct op_held_pod *held = t->bucket->pods[i];
        uint32_t pool = pool_of(&job->wanted, held->pod.pool);
        op_problem_of_pod(&held->pod, held->name, held->pod.kind == OP_LEARNER && t->plan.pools[pool].scavenged > 0,
                          t->wall_ns, &t->problem);
    }
    bool is_late = job->parts_applied_ns != 0 && t->now_ns - job->parts_applied_ns >= SET_SLOW_NS;
    if (syncers < t->plan.syncers_wanted && job->parts_applied_ns != 0 && !is_late) {
        op_controller_wake(t->c, job->key, job->parts_applied_ns + SET_SLOW_NS);
    }
    if (t->problem.reason[0] == 0 && syncers < t->plan.syncers_wanted && is_late && job->part_done[OP_PART_SET] != 0) {
        op_problem_set(&t->problem, "SyncersMissing",
                       "StatefulSet %s-syncer has made %u of %u pods: a quota or an admission policy may refuse them "
                       "(kubectl describe statefulset %s-syncer)",
                       job->name, syncers, t->plan.syncers_wanted, job->name);
    }
    bool is_silent = job->poll_failures >= SILENT_POLLS && !is_heard(t) && t->plan.syncers_wanted > 0 &&
                     t->plan.syncers_ready == t->plan.syncers_wanted;
    if (t->problem.reason[0] == 0 && is_silent) {
        op_problem_set(
            &t->problem, "SyncersUnreachable",
            "the operator cannot ask the syncers for their status, though they are ready: %s (network policies, "
            "or the right to pods/proxy: operator.statusVia of the chart)",
            job->poll_error);
    }
}

static void tell_changes(struct turn *t, enum op_job_phase phase)
{
    struct op_job *job = t->job;
    if (!job->has_phase || job->phase != phase) {
        bool is_bad = phase == OP_JOB_FAILED;
        op_act_event(t->c, job, is_bad, op_job_phase_name(phase), "Reconcile", "%s", t->plan.message);
    }
    if (t->problem.reason[0] != 0 && strcmp(job->problem, t->problem.reason) != 0) {
        op_act_event(t->c, job, true, t->problem.reason, "Reconcile", "%s", t->problem.message);
    }
}

/* Once for each spec: what of it is accepted and will probably disappoint, with the number that would do. An earlier process
 * has said it of a job that runs. */
static void tell_advice(struct turn *t)
{
    struct op_job *job = t->job;
    if (job->advised_generation == job->generation || job->spec_problem.reason[0] != 0) {
        return;
    }
    job->advised_generation = job->generation;
    if (job->told_generation == job->generation || !parse(t)) {
        return;
    }
    struct dl_spec_warnings advice;
    dl_spec_advise(t->spec, &advice);
    for (uint32_t i = 0; i < advice.count; i++) {
        /* The field as the action: events that differ in their text alone are one series, which keeps the first. */
        op_act_event(t->c, job, true, "Advice", advice.path[i], "%s", advice.text[i]);
    }
}

static uint32_t truths_of(const struct op_conditions *conditions)
{
    uint32_t truths = 0;
    for (int i = 0; i < DL_CONDITION_COUNT; i++) {
        truths = truths * 4 + (uint32_t)conditions->items[i].status;
    }
    return truths;
}

/* K7: at most every 5 s, but a new phase, and a new problem (K6), at once. Progress alone has more time where there are many
 * jobs, so that it leaves room for what matters in the rate of requests. */
static void write_status(struct turn *t, const struct op_facts *facts)
{
    struct op_job *job = t->job;
    struct dl_err err;
    DL_AUTO_FREE char *text = NULL;
    enum op_job_phase phase = op_facts_phase(facts);
    op_conditions_update(&job->conditions, facts);
    if (job->is_writing) {
        return; /* Its answer comes back here. */
    }
    /* A new operator asks the syncers of a job that runs before it says anything of it: who has not asked sees no learner. */
    bool is_first_look =
        job->told_generation == job->generation && job->poll != NULL && job->heard_ns == 0 && job->poll_failures == 0;
    if (is_first_look && !is_over(phase) && t->problem.reason[0] == 0) {
        return; /* The answer, or the end of the wait for it, comes back here. */
    }
    bool is_news = !job->has_phase || phase != job->phase || strcmp(job->problem, t->problem.reason) != 0;
    uint32_t truths = truths_of(&job->conditions);
    int64_t interval_ns = OP_STATUS_INTERVAL_NS + (truths != job->truths ? 0 : (int64_t)t->c->jobs.count * JOB_PACE_NS);
    int64_t due_ns = job->status_ns != 0 ? job->status_ns + interval_ns : t->now_ns;
    if (!is_news && t->now_ns < due_ns) {
        op_controller_wake(t->c, job->key, due_ns);
        return;
    }
    if (op_status_patch(facts, &job->conditions, job->uid, &text, &err) != DL_OK) {
        dl_warn("status not written job=%s error=\"%s\"", job->key, err.text);
        return;
    }
    uint64_t digest = dl_hash64(text, strlen(text), 0);
    if (digest == job->status_hash) {
        return;
    }
    tell_changes(t, phase);
    job->status_ns = t->now_ns;
    job->truths = truths;
    op_act_status(t->c, job, text, phase, t->problem.reason, digest);
}

/* What came of the job, for people; of one that failed, what the pod said that made it fail: its log is gone by then. */
static void describe_end(struct turn *t)
{
    const struct op_job_status *view = &t->job->view;
    char *text = t->plan.message;
    size_t size = sizeof t->plan.message;
    if (is_over(t->plan.phase) && view->shards_heard > 0) {
        snprintf(text, size, "%s after %" PRIu64 " tokens, %" PRIu64 " rounds, step %" PRIu64,
                 op_reason_name(t->plan.reason), view->tokens, view->round, view->step);
    }
    if (t->plan.phase == OP_JOB_FAILED && t->plan.reason != OP_REASON_DEADLINE_EXCEEDED && t->job->last_words[0] != 0) {
        size_t used = strlen(text);
        snprintf(text + used, size - used, ": %s", t->job->last_words);
    }
}

static void say(struct turn *t)
{
    struct op_job *job = t->job;
    find_problem(t);
    describe_end(t);
    struct op_facts facts = {
        .job = job->name,
        .wanted = &job->wanted,
        .plan = &t->plan,
        .view = is_heard(t) ? &job->view : NULL,
        .problem = &t->problem,
        .learners_min = job->learners_min,
        .active = t->bucket != NULL ? t->bucket->count : 0,
        .generation = job->generation,
        .started_ns = job->started_ns,
        .now_ns = t->wall_ns,
    };
    enum op_job_phase phase = op_facts_phase(&facts);
    if (phase == OP_JOB_SUSPENDED) {
        job->started_ns = facts.started_ns = 0; /* A resumed job starts anew. */
    }
    if (is_over(phase) && job->completed_ns == 0) {
        job->completed_ns = t->wall_ns;
    }
    facts.completed_ns = is_over(phase) ? job->completed_ns : 0;
    write_status(t, &facts);
}

/* --- a job that is over --- */

static void clean_up(struct turn *t)
{
    struct op_job *job = t->job;
    op_planner_free(job->planner); /* What it remembers is of no more use. */
    job->planner = NULL;
    op_status_release(&job->view);
    for (uint32_t i = 0; t->bucket != NULL && i < t->bucket->count; i++) {
        if (t->bucket->pods[i]->pod.kind != OP_SYNCER) {
            op_act_delete_pod(t->c, job, t->bucket->pods[i]);
        }
    }
    if (job->ttl_seconds < 0 || job->is_deleting) {
        return;
    }
    int64_t left_ns = job->completed_ns + job->ttl_seconds * OP_SECOND - t->wall_ns;
    if (left_ns <= 0) {
        op_act_delete_job(t->c, job);
    } else {
        op_controller_wake(t->c, job->key, t->now_ns + left_ns);
    }
}

/* --- the turn --- */

/* The syncers' pods come first: where a quota has room for a few pods only, learners without a syncer are of no use. Not
 * for long, since what keeps those pods from being made is told by the server's answer to ours (K6). */
static bool waits_for_set(const struct turn *t)
{
    int64_t until_ns = t->job->parts_applied_ns + SYNCERS_FIRST_NS;
    bool waits = count_syncers(t) < t->job->wanted.shards && t->now_ns < until_ns;
    if (waits) {
        op_controller_wake(t->c, t->job->key, until_ns);
    }
    return waits;
}

static bool plan(struct turn *t)
{
    struct op_job *job = t->job;
    struct dl_err err;
    struct op_progress progress;
    if (job->planner == NULL && op_planner_new(&job->planner, &err) != DL_OK) {
        return false;
    }
    uint32_t count = t->bucket != NULL ? t->bucket->count : 0;
    DL_AUTO_FREE struct op_instance *instances = calloc(count + 1, sizeof *instances);
    if (instances == NULL) {
        return false;
    }
    if (!job->wanted.suspend && job->started_ns == 0) {
        job->started_ns = t->wall_ns;
    }
    job->wanted.started_ns = job->started_ns;
    job->wanted.capacity_changes = t->c->capacity_changes;
    /* Pods need the token and the spec; addresses are names that are known before anybody listens there. */
    job->wanted.endpoints_known =
        job->part_done[OP_PART_TOKEN] != 0 && job->part_done[OP_PART_SPEC] != 0 && !waits_for_set(t);
    observe(t, instances);
    note_last_words(t);
    op_progress_read(job, t->bucket, &progress);
    op_plan_make(job->planner, &job->wanted, &progress, instances, count, t->wall_ns, &t->plan);
    return true;
}

static void turn_of_job(struct turn *t)
{
    struct op_job *job = t->job;
    if (job->is_leaving) {
        return;
    }
    if (job->is_settled) {
        clean_up(t);
        return;
    }
    if (job->spec_problem.reason[0] != 0) {
        t->plan = (struct op_plan){.phase = job->has_phase ? job->phase : OP_JOB_PENDING, .next_ns = INT64_MAX};
        snprintf(t->plan.message, sizeof t->plan.message, "%.*s", OP_PLAN_TEXT_MAX - 1, job->spec_problem.message);
        say(t);
        return;
    }
    if (!job->has_replicas && !job->is_filling) {
        op_act_fill_replicas(t->c, job);
    }
    op_progress_poll(t->c, job, t->now_ns);
    if (!plan(t)) {
        op_controller_wake(t->c, job->key, t->now_ns + OP_SECOND);
        return;
    }
    keep_parts(t);
    tell_leaving(t);
    carry_out(t);
    say(t);
    tell_advice(t);
    if (t->plan.next_ns != INT64_MAX) {
        op_controller_wake(t->c, job->key, t->now_ns + DL_MAX(t->plan.next_ns - t->wall_ns, INT64_C(0)));
    }
    if (t->plan.syncers_ready > 0 && !is_over(t->plan.phase)) {
        op_controller_wake(t->c, job->key, DL_MAX(job->poll_due_ns, t->now_ns + OP_SETTLE_NS));
    }
}

void op_turn(struct op_controller *c, const char *job_key)
{
    struct turn t = {.c = c, .job = op_store_job(c, job_key)};
    if (t.job == NULL) {
        return;
    }
    t.bucket = op_store_bucket(c, t.job->uid);
    t.now_ns = op_loop_now_ns(c->loop);
    t.wall_ns = dl_wall_ns();
    turn_of_job(&t);
    dl_spec_free(t.spec);
}
