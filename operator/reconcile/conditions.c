#include "operator/reconcile/conditions.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"
#include "common/time_text.h"
#include "operator/reconcile/json.h"

static const char *const truths[] = {"Unknown", "False", "True"};

static enum op_truth truth_of(const char *text)
{
    for (size_t i = 0; i < DL_COUNT_OF(truths); i++) {
        if (strcmp(text, truths[i]) == 0) {
            return (enum op_truth)i;
        }
    }
    return OP_UNKNOWN;
}

void op_conditions_read(const cJSON *status, struct op_conditions *out)
{
    *out = (struct op_conditions){0};
    const cJSON *list = cJSON_IsObject(status) ? cJSON_GetObjectItemCaseSensitive(status, "conditions") : NULL, *item;
    cJSON_ArrayForEach(item, list)
    {
        const char *type = op_json_text(item, "type", "");
        for (int i = 0; i < DL_CONDITION_COUNT; i++) {
            struct op_condition *condition = &out->items[i];
            if (strcmp(type, dl_condition_names[i]) != 0) {
                continue;
            }
            condition->status = truth_of(op_json_text(item, "status", ""));
            condition->since_ns = dl_time_or_zero(op_json_text(item, "lastTransitionTime", ""));
            snprintf(condition->reason, sizeof condition->reason, "%s", op_json_text(item, "reason", ""));
            snprintf(condition->message, sizeof condition->message, "%s", op_json_text(item, "message", ""));
        }
    }
}

/* --- what is the case --- */

enum op_job_phase op_facts_phase(const struct op_facts *facts)
{
    enum op_job_phase phase = facts->plan->phase;
    return phase == OP_JOB_SUSPENDED && facts->active > 0 ? OP_JOB_SUSPENDING : phase;
}

static bool is_over(enum op_job_phase phase)
{
    return phase == OP_JOB_SUCCEEDED || phase == OP_JOB_STOPPED || phase == OP_JOB_FAILED;
}

static bool is_running(enum op_job_phase phase)
{
    return phase == OP_JOB_PENDING || phase == OP_JOB_RUNNING || phase == OP_JOB_FINISHING;
}

static bool has_problem(const struct op_facts *facts)
{
    return facts->problem != NULL && facts->problem->reason[0] != 0;
}

static bool has_quorum(const struct op_facts *facts)
{
    return facts->view != NULL && facts->view->quorum_have >= facts->view->quorum_need;
}

/* Fewer than the job's minimum, which zero learners are in any case. */
static bool is_below_minimum(const struct op_facts *facts)
{
    return facts->plan->connected < DL_MAX(facts->learners_min, 1u);
}

struct verdict {
    enum op_truth status;
    const char *reason;
    char message[OP_CONDITION_MESSAGE_MAX];
};

static struct verdict verdict(enum op_truth status, const char *reason, const char *fmt, ...) DL_PRINTF(3, 4);
static struct verdict verdict(enum op_truth status, const char *reason, const char *fmt, ...)
{
    struct verdict out = {.status = status, .reason = reason};
    va_list args;
    va_start(args, fmt);
    vsnprintf(out.message, sizeof out.message, fmt, args);
    va_end(args);
    return out;
}

static struct verdict not_running(enum op_job_phase phase, const struct op_facts *facts)
{
    return verdict(OP_FALSE, op_job_phase_name(phase), "%s", facts->plan->message);
}

static struct verdict of_ready(const struct op_facts *facts, enum op_job_phase phase)
{
    const struct op_plan *plan = facts->plan;
    if (!is_running(phase)) {
        return not_running(phase, facts);
    }
    if (plan->syncers_ready < facts->wanted->shards) {
        return verdict(OP_FALSE, "WaitingForSyncers", "%u/%u syncers ready", plan->syncers_ready,
                       facts->wanted->shards);
    }
    if (is_below_minimum(facts)) {
        return verdict(OP_FALSE, "WaitingForLearners", "%u/%u learners connected, at least %u wanted", plan->connected,
                       plan->desired, DL_MAX(facts->learners_min, 1u));
    }
    return verdict(OP_TRUE, "Training", "%u/%u learners connected", plan->connected, plan->desired);
}

static struct verdict of_progressing(const struct op_facts *facts, enum op_job_phase phase)
{
    const struct op_job_status *view = facts->view;
    if (!is_running(phase)) {
        return not_running(phase, facts);
    }
    if (phase == OP_JOB_FINISHING) {
        return verdict(OP_TRUE, "Finishing", "%s", facts->plan->message);
    }
    if (view == NULL) {
        return has_problem(facts) ? verdict(OP_FALSE, facts->problem->reason, "%s", facts->problem->message)
                                  : verdict(OP_TRUE, "Starting", "%s", facts->plan->message);
    }
    if (!has_quorum(facts)) {
        return verdict(OP_FALSE, "WaitingForQuorum", "%u/%u learners", view->quorum_have, view->quorum_need);
    }
    bool is_training = view->phase >= OP_STATUS_WARMUP;
    return verdict(OP_TRUE, op_status_phase_name(view->phase), "%s", is_training ? "rounds are merged" : view->message);
}

static struct verdict of_degraded(const struct op_facts *facts, enum op_job_phase phase)
{
    const struct op_plan *plan = facts->plan;
    if (!is_running(phase)) {
        return verdict(OP_FALSE, op_job_phase_name(phase), "nothing has to run");
    }
    if (has_problem(facts)) {
        return verdict(OP_TRUE, facts->problem->reason, "%s", facts->problem->message);
    }
    if (phase == OP_JOB_FINISHING) {
        return verdict(OP_FALSE, "Finishing", "%s", plan->message);
    }
    if (plan->syncers_ready < facts->wanted->shards) {
        return verdict(OP_TRUE, "SyncersNotReady", "%u/%u syncers ready", plan->syncers_ready, facts->wanted->shards);
    }
    if (facts->view != NULL && !has_quorum(facts)) {
        return verdict(OP_TRUE, "WaitingForQuorum", "%u/%u learners", facts->view->quorum_have,
                       facts->view->quorum_need);
    }
    if (is_below_minimum(facts)) {
        return verdict(OP_TRUE, "BelowMinimum", "%u learners connected, learners.min is %u", plan->connected,
                       facts->learners_min);
    }
    if (plan->given_up > 0) {
        return verdict(OP_TRUE, "LearnersGivenUp", "%u learners failed too often and are not started again",
                       plan->given_up);
    }
    return verdict(OP_FALSE, "AsWanted", "%u/%u learners connected", plan->connected, plan->desired);
}

static struct verdict of_suspended(const struct op_facts *facts, enum op_job_phase phase)
{
    if (phase == OP_JOB_SUSPENDED) {
        return verdict(OP_TRUE, "Suspended", "no pod is left; the state is kept");
    }
    if (phase == OP_JOB_SUSPENDING) {
        return verdict(OP_FALSE, "Suspending", "%u pods are still there", facts->active);
    }
    return verdict(OP_FALSE, "NotSuspended", "suspend is %s", facts->wanted->suspend ? "true" : "false");
}

static struct verdict of_end(const struct op_facts *facts, enum op_job_phase phase, enum dl_condition which)
{
    bool is_success = phase == OP_JOB_SUCCEEDED || phase == OP_JOB_STOPPED; /* Stopped as asked is no failure. */
    if (!is_over(phase)) {
        return verdict(OP_FALSE, "NotFinished", "the job is %s", op_job_phase_name(phase));
    }
    return verdict((which == DL_CONDITION_SUCCEEDED) == is_success ? OP_TRUE : OP_FALSE,
                   op_reason_name(facts->plan->reason), "%s", facts->plan->message);
}

static struct verdict judge(const struct op_facts *facts, enum op_job_phase phase, enum dl_condition which)
{
    switch (which) {
    case DL_CONDITION_READY: return of_ready(facts, phase);
    case DL_CONDITION_PROGRESSING: return of_progressing(facts, phase);
    case DL_CONDITION_DEGRADED: return of_degraded(facts, phase);
    case DL_CONDITION_SUSPENDED: return of_suspended(facts, phase);
    case DL_CONDITION_SUCCEEDED:
    case DL_CONDITION_FAILED: break;
    }
    return of_end(facts, phase, which);
}

void op_conditions_update(struct op_conditions *conditions, const struct op_facts *facts)
{
    enum op_job_phase phase = op_facts_phase(facts);
    for (int i = 0; i < DL_CONDITION_COUNT; i++) {
        struct op_condition *condition = &conditions->items[i];
        struct verdict now = judge(facts, phase, (enum dl_condition)i);
        if (condition->since_ns == 0 || condition->status != now.status) {
            condition->since_ns = facts->now_ns;
        }
        condition->status = now.status;
        snprintf(condition->reason, sizeof condition->reason, "%s", now.reason);
        snprintf(condition->message, sizeof condition->message, "%s", now.message);
    }
}

/* --- .status --- */

static void put_time(struct op_json_out *out, const char *key, int64_t wall_ns)
{
    char text[DL_TIME_TEXT_MAX];
    op_json_put_text(out, key, wall_ns != 0 ? dl_time_text(wall_ns, 0, text) : NULL);
}

static void put_number_text(struct op_json_out *out, const char *key, double value, int digits)
{
    char text[32];
    snprintf(text, sizeof text, "%.*f", digits, value);
    op_json_put_text(out, key, isfinite(value) ? text : NULL);
}

static void put_learners(const struct op_facts *facts, struct op_json_out *out)
{
    const struct op_plan *plan = facts->plan;
    op_json_object_begin(out, "learners");
    op_json_put_u64(out, "desired", plan->desired);
    op_json_put_u64(out, "running", plan->running);
    op_json_put_u64(out, "connected", plan->connected);
    op_json_array_begin(out, "pools");
    for (uint32_t i = 0; i < facts->wanted->pool_count; i++) {
        op_json_object_begin(out, NULL);
        op_json_put_text(out, "name", facts->wanted->pools[i].name);
        op_json_put_u64(out, "desired", plan->pools[i].desired);
        op_json_put_u64(out, "running", plan->pools[i].running);
        op_json_put_u64(out, "connected", plan->pools[i].connected);
        op_json_put_u64(out, "scavenged", plan->pools[i].scavenged);
        op_json_object_end(out);
    }
    op_json_array_end(out);
    op_json_object_end(out);
}

static void put_syncer(const struct op_facts *facts, struct op_json_out *out)
{
    const struct op_job_status *view = facts->view;
    char quorum[32];
    op_json_object_begin(out, "syncer");
    op_json_put_u64(out, "readyShards", facts->plan->syncers_ready);
    if (view != NULL) { /* What was said last stays when nobody answers. */
        op_json_put_u64(out, "round", view->round);
        op_json_put_u64(out, "step", view->step);
        op_json_put_u64(out, "tokens", view->tokens);
        put_number_text(out, "loss", view->loss, 4);
        put_number_text(out, "validationLoss", view->validation_last.known ? view->validation_last.loss : NAN, 4);
        put_number_text(out, "goodput", view->goodput, 3);
        snprintf(quorum, sizeof quorum, "%u/%u", view->quorum_have, view->quorum_need);
        op_json_put_text(out, "quorum", quorum);
    }
    op_json_object_end(out);
}

static void put_conditions(const struct op_facts *facts, const struct op_conditions *conditions,
                           struct op_json_out *out)
{
    op_json_array_begin(out, "conditions");
    for (int i = 0; i < DL_CONDITION_COUNT; i++) {
        const struct op_condition *condition = &conditions->items[i];
        op_json_object_begin(out, NULL);
        op_json_put_text(out, "type", dl_condition_names[i]);
        op_json_put_text(out, "status", truths[condition->status]);
        op_json_put_text(out, "reason", condition->reason);
        op_json_put_text(out, "message", condition->message);
        put_time(out, "lastTransitionTime", condition->since_ns);
        op_json_put_i64(out, "observedGeneration", facts->generation);
        op_json_object_end(out);
    }
    op_json_array_end(out);
}

static void put_message(const struct op_facts *facts, struct op_json_out *out)
{
    enum op_job_phase phase = op_facts_phase(facts);
    char text[OP_CONDITION_MESSAGE_MAX];
    if (is_running(phase) && has_problem(facts)) {
        snprintf(text, sizeof text, "%.40s: %.320s", facts->problem->reason, facts->problem->message);
    } else if (phase == OP_JOB_RUNNING && facts->view != NULL && !has_quorum(facts)) {
        snprintf(text, sizeof text, "WaitingForQuorum %u/%u learners", facts->view->quorum_have,
                 facts->view->quorum_need);
    } else if (phase == OP_JOB_SUSPENDING) {
        snprintf(text, sizeof text, "%u pods are still there", facts->active);
    } else {
        snprintf(text, sizeof text, "%s", facts->plan->message);
    }
    op_json_put_text(out, "message", text);
}

enum dl_rc op_status_patch(const struct op_facts *facts, const struct op_conditions *conditions, const char *job_uid,
                           char **out, struct dl_err *err)
{
    struct op_json_out json;
    char selector[160];
    op_learner_selector(facts->job, selector, sizeof selector);
    op_json_out_init(&json);
    op_json_object_begin(&json, NULL);
    op_json_object_begin(&json, "metadata");
    op_json_put_text(&json, "uid", job_uid);
    op_json_object_end(&json);
    op_json_object_begin(&json, "status");
    op_json_put_text(&json, "phase", op_job_phase_name(op_facts_phase(facts)));
    put_message(facts, &json);
    op_json_put_i64(&json, "observedGeneration", facts->generation);
    put_time(&json, "startTime", facts->started_ns);
    put_time(&json, "completionTime", facts->completed_ns);
    op_json_put_text(&json, "selector", selector);
    op_json_put_u64(&json, "active", facts->active);
    put_learners(facts, &json);
    put_syncer(facts, &json);
    put_conditions(facts, conditions, &json);
    op_json_object_end(&json);
    op_json_object_end(&json);
    char *text = op_json_finish(&json);
    if (text == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the status of job %s", facts->job);
    }
    *out = text;
    return DL_OK;
}
