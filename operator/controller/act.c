/* Requests, and what their answers mean for the job. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "operator/controller/internal.h"

#define PART_BACKOFF_FIRST_NS OP_SECOND
#define PART_BACKOFF_MAX_NS (60 * OP_SECOND)

static const struct op_resource *resource_of(enum op_part part)
{
    switch (part) {
    case OP_PART_TOKEN: return &op_res_secrets;
    case OP_PART_SPEC: return &op_res_config_maps;
    case OP_PART_SERVICE: return &op_res_services;
    case OP_PART_SET: return &op_res_stateful_sets;
    case OP_PART_BUDGET: return &op_res_disruption_budgets;
    case OP_PART_POLICY: return &op_res_network_policies;
    case OP_PART_OUTPUT: return &op_res_claims;
    case OP_PART_COUNT: break;
    }
    return NULL;
}

/* --- errands --- */

struct op_errand *op_errand_new(struct op_controller *c, const struct op_job *job, enum op_errand_type type)
{
    struct op_errand *errand = calloc(1, sizeof *errand);
    if (errand == NULL) {
        return NULL;
    }
    errand->controller = c;
    errand->type = type;
    if (job != NULL) {
        snprintf(errand->job_key, sizeof errand->job_key, "%s", job->key);
        snprintf(errand->job_uid, sizeof errand->job_uid, "%s", job->uid);
    }
    LIST_INSERT_HEAD(&c->errands, errand, all);
    return errand;
}

void op_errand_free(struct op_errand *errand)
{
    LIST_REMOVE(errand, all);
    free(errand);
}

void op_act_release(struct op_controller *c)
{
    struct op_errand *errand = LIST_FIRST(&c->errands);
    while (errand != NULL) {
        struct op_errand *next = LIST_NEXT(errand, all);
        op_client_cancel(c->client, errand->id);
        op_errand_free(errand);
        errand = next;
    }
}

static struct op_reply_to reply_to(struct op_errand *errand)
{
    return (struct op_reply_to){.done = op_errand_done, .context = errand, .id = &errand->id};
}

static void on_answer(struct op_errand *errand, const struct op_result *result);

/* What could not be sent is answered here and now. */
static void settle(struct op_errand *errand, enum dl_rc rc, const struct dl_err *err)
{
    if (rc != DL_OK) {
        struct op_result result = {.rc = rc, .body = "", .reason = "", .message = err->text, .err = *err};
        on_answer(errand, &result);
        op_errand_free(errand);
    }
}

void op_errand_done(void *context, const struct op_result *result)
{
    struct op_errand *errand = context;
    on_answer(errand, result);
    op_errand_free(errand);
}

/* --- events --- */

void op_act_event(struct op_controller *c, const struct op_job *job, bool is_warning, const char *reason,
                  const char *action, const char *fmt, ...)
{
    char note[OP_CONDITION_MESSAGE_MAX * 2];
    va_list args;
    va_start(args, fmt);
    vsnprintf(note, sizeof note, fmt, args);
    va_end(args);
    struct op_subject about = {.api_version = DL_SPEC_API_VERSION,
                               .kind = DL_SPEC_KIND,
                               .space = job->space,
                               .name = job->name,
                               .uid = job->uid};
    op_record(c->recorder, &about, is_warning ? "Warning" : "Normal", reason, action, "%s", note);
    dl_log(is_warning ? DL_LOG_WARN : DL_LOG_INFO, "event job=%s reason=%s note=\"%s\"", job->key, reason, note);
}

/* --- what is asked for --- */

void op_act_part(struct op_controller *c, struct op_job *job, enum op_part part, const char *text, uint64_t digest)
{
    struct dl_err err = {.text = "no memory"};
    struct op_errand *errand = op_errand_new(c, job, OP_ERRAND_PART);
    if (errand == NULL) {
        return; /* The next turn tries again. */
    }
    errand->part = part;
    errand->digest = digest;
    op_part_name(part, job->name, job->uid, errand->name);
    job->part_sent[part] = digest;
    struct op_ref ref = {.resource = resource_of(part), .space = job->space, .name = errand->name};
    enum dl_rc rc = part == OP_PART_TOKEN ? op_api_create(c->client, &ref, text, reply_to(errand), &err)
                                          : op_api_apply(c->client, &ref, text, reply_to(errand), &err);
    settle(errand, rc, &err);
}

void op_act_start(struct op_controller *c, struct op_job *job, const struct op_change *change, const char *text)
{
    struct dl_err err = {.text = "no memory"};
    struct op_errand *errand = op_errand_new(c, job, OP_ERRAND_POD);
    if (errand == NULL) {
        op_plan_on_start_failed(job->planner, &job->wanted, change, dl_wall_ns());
        return;
    }
    errand->change = *change;
    op_pod_name(job->name, change->kind, change->id, change->incarnation, errand->name);
    struct op_ref ref = {.resource = &op_res_pods, .space = job->space, .name = errand->name};
    settle(errand, op_api_create(c->client, &ref, text, reply_to(errand), &err), &err);
}

void op_act_delete_pod(struct op_controller *c, struct op_job *job, struct op_held_pod *pod)
{
    int64_t now_ns = op_loop_now_ns(c->loop);
    struct dl_err err = {.text = "no memory"};
    bool is_asked = pod->deleted_ns != 0 && now_ns - pod->deleted_ns < OP_ASK_AGAIN_NS;
    /* One that runs no more goes at once; one that leaves already only has to be waited for. */
    bool has_ended = pod->pod.phase == OP_POD_SUCCEEDED || pod->pod.phase == OP_POD_FAILED;
    if (is_asked || pod->pod.is_leaving) {
        return;
    }
    struct op_errand *errand = op_errand_new(c, job, OP_ERRAND_DELETE);
    if (errand == NULL) {
        return;
    }
    pod->deleted_ns = now_ns;
    snprintf(errand->name, sizeof errand->name, "%s", pod->name);
    struct op_ref ref = {.resource = &op_res_pods, .space = job->space, .name = pod->name};
    struct op_delete_options options = {.uid = pod->pod.uid, .grace_seconds = has_ended ? 0 : -1};
    settle(errand, op_api_delete(c->client, &ref, &options, reply_to(errand), &err), &err);
}

void op_act_status(struct op_controller *c, struct op_job *job, const char *text, enum op_job_phase phase,
                   const char *problem, uint64_t digest)
{
    struct dl_err err = {.text = "no memory"};
    struct op_errand *errand = op_errand_new(c, job, OP_ERRAND_STATUS);
    if (errand == NULL) {
        return;
    }
    errand->phase = phase;
    errand->digest = digest;
    snprintf(errand->problem, sizeof errand->problem, "%s", problem);
    job->is_writing = true;
    struct op_ref ref = {.resource = &op_res_jobs, .space = job->space, .name = job->name, .subresource = "status"};
    settle(errand, op_api_merge_patch(c->client, &ref, text, reply_to(errand), &err), &err);
}

/* The scale subresource reads its number from the spec, so it has to stand there. */
void op_act_fill_replicas(struct op_controller *c, struct op_job *job)
{
    char text[192];
    struct dl_err err = {.text = "no memory"};
    struct op_errand *errand = op_errand_new(c, job, OP_ERRAND_FILL);
    if (errand == NULL) {
        return;
    }
    job->is_filling = true;
    snprintf(text, sizeof text, "{\"metadata\":{\"uid\":\"%s\"},\"spec\":{\"learners\":{\"replicas\":%u}}}", job->uid,
             job->replicas);
    struct op_ref ref = {.resource = &op_res_jobs, .space = job->space, .name = job->name};
    settle(errand, op_api_merge_patch(c->client, &ref, text, reply_to(errand), &err), &err);
}

void op_act_delete_job(struct op_controller *c, struct op_job *job)
{
    struct dl_err err = {.text = "no memory"};
    struct op_errand *errand = op_errand_new(c, job, OP_ERRAND_END);
    if (errand == NULL) {
        return;
    }
    job->is_deleting = true;
    op_act_event(c, job, false, "Expired", "Delete", "deleted %" PRId64 " s after its end", job->ttl_seconds);
    struct op_ref ref = {.resource = &op_res_jobs, .space = job->space, .name = job->name};
    struct op_delete_options options = {.uid = job->uid, .grace_seconds = -1, .propagation = "Background"};
    settle(errand, op_api_delete(c->client, &ref, &options, reply_to(errand), &err), &err);
}

/* --- what came of it --- */

static enum op_refusal refusal_of(const struct op_result *result)
{
    if (op_result_is_quota(result)) {
        return OP_REFUSED_QUOTA;
    }
    switch (result->rc) {
    case DL_EDENIED: return OP_REFUSED_FORBIDDEN;
    case DL_EEXISTS:
    case DL_ECONFLICT: return OP_REFUSED_CONFLICT;
    case DL_EINVAL: return OP_REFUSED_INVALID;
    case DL_OK:
    case DL_AGAIN:
    case DL_ENOMEM:
    case DL_EIO:
    case DL_ENET:
    case DL_ETIMEOUT:
    case DL_ENOTFOUND:
    case DL_EGONE:
    case DL_EPROTO:
    case DL_ECORRUPT:
    case DL_EFULL:
    case DL_EUNSUPPORTED: break;
    }
    return OP_REFUSED_OTHER;
}

static const char *text_of(const struct op_result *result)
{
    return result->message[0] != 0 ? result->message : result->err.text;
}

static void after_part(struct op_controller *c, struct op_job *job, const struct op_errand *errand,
                       const struct op_result *result)
{
    enum op_part part = errand->part;
    bool is_stale = job->part_sent[part] != errand->digest;
    job->part_sent[part] = 0;
    if (is_stale) {
        op_controller_wake(c, job->key, 0);
        return;
    }
    bool is_there = result->rc == DL_OK || (part == OP_PART_TOKEN && result->rc == DL_EEXISTS);
    if (is_there) {
        job->part_done[part] = errand->digest;
        job->has_set = job->has_set || part == OP_PART_SET;
        job->parts_failed &= ~(1u << part);
        if (job->parts_failed == 0) {
            job->part_failures = 0;
            job->part_problem.reason[0] = 0;
        }
        op_controller_wake(c, job->key, 0);
        return;
    }
    char what[OP_CHILD_NAME_MAX + 32];
    snprintf(what, sizeof what, "%s %s", op_part_kinds[part].kind, errand->name);
    op_problem_of_refusal(refusal_of(result), what, text_of(result), &job->part_problem);
    int64_t wait_ns = PART_BACKOFF_FIRST_NS << DL_MIN(job->part_failures, 6u);
    job->part_failures++;
    job->parts_failed |= 1u << part;
    job->parts_hash = 0;
    job->parts_due_ns = op_loop_now_ns(c->loop) + DL_MIN(wait_ns, PART_BACKOFF_MAX_NS);
    op_controller_wake(c, job->key, 0); /* To say so in the status. */
    op_controller_wake(c, job->key, job->parts_due_ns);
}

static void after_start(struct op_controller *c, struct op_job *job, const struct op_errand *errand,
                        const struct op_result *result)
{
    const struct op_change *change = &errand->change;
    if (result->rc == DL_OK) {
        job->pod_problem.reason[0] = 0;
        bool is_again = change->reason == OP_REASON_REPLACEMENT;
        op_act_event(c, job, false, is_again ? "Replaced" : "Started", "Start", "%s %s", op_kind_name(change->kind),
                     errand->name);
        return;
    }
    char key[OP_KEY_MAX];
    const struct op_held_pod *held = op_key_write(key, job->space, errand->name) ? op_map_get(&c->pods, key) : NULL;
    bool is_foreign = held != NULL && strcmp(held->pod.job_uid, job->uid) != 0;
    if (result->rc == DL_EEXISTS && !is_foreign) {
        return; /* A repeat: it will be seen, or asked for once more after a while. */
    }
    if (result->rc == DL_ENET || result->rc == DL_ETIMEOUT) {
        return; /* Nobody knows whether it was made: the watch tells, or it is asked for once more after a while. */
    }
    char what[OP_CHILD_NAME_MAX + 8];
    snprintf(what, sizeof what, "Pod %s", errand->name);
    op_problem_of_refusal(refusal_of(result), what, text_of(result), &job->pod_problem);
    if (job->planner != NULL) {
        op_plan_on_start_failed(job->planner, &job->wanted, change, dl_wall_ns());
    }
    op_controller_wake(c, job->key, 0);
}

static void after_delete(struct op_controller *c, struct op_job *job, const struct op_errand *errand,
                         const struct op_result *result)
{
    if (result->rc == DL_OK || result->rc == DL_ENOTFOUND || result->rc == DL_ECONFLICT) {
        return;
    }
    char key[OP_KEY_MAX];
    struct op_held_pod *held = op_key_write(key, job->space, errand->name) ? op_map_get(&c->pods, key) : NULL;
    if (held != NULL) {
        char what[OP_CHILD_NAME_MAX + 24];
        snprintf(what, sizeof what, "Deletion of pod %s", errand->name);
        op_problem_of_refusal(refusal_of(result), what, text_of(result), &job->pod_problem);
        op_controller_wake(c, job->key, op_loop_now_ns(c->loop) + OP_ASK_AGAIN_NS);
    }
}

static void after_status(struct op_controller *c, struct op_job *job, const struct op_errand *errand,
                         const struct op_result *result)
{
    struct dl_err err;
    job->is_writing = false;
    if (result->rc == DL_OK) {
        job->status_hash = errand->digest;
        job->phase = errand->phase;
        job->has_phase = true;
        snprintf(job->problem, sizeof job->problem, "%s", errand->problem);
        bool is_over = job->phase == OP_JOB_SUCCEEDED || job->phase == OP_JOB_STOPPED || job->phase == OP_JOB_FAILED;
        job->is_settled = is_over;
        op_queue_forget(c->queue, job->key);
        op_controller_wake(c, job->key, 0);
        return;
    }
    dl_warn("status not written job=%s error=\"%s\"", job->key, result->err.text);
    if (result->rc != DL_ENOTFOUND && op_queue_retry(c->queue, job->key, op_loop_now_ns(c->loop), &err) != DL_OK) {
        dl_error("cannot queue job=%s error=\"%s\"", job->key, err.text);
    }
}

static void after_fill(struct op_controller *c, struct op_job *job, const struct op_result *result)
{
    job->is_filling = result->rc == DL_OK; /* The watch shows it. */
    if (result->rc != DL_OK && result->rc != DL_ENOTFOUND) {
        op_problem_of_refusal(refusal_of(result), "spec.learners.replicas", text_of(result), &job->part_problem);
        op_controller_wake(c, job->key, op_loop_now_ns(c->loop) + OP_ASK_AGAIN_NS);
    }
}

static void after_end(struct op_controller *c, struct op_job *job, const struct op_result *result)
{
    if (result->rc != DL_OK && result->rc != DL_ENOTFOUND) {
        job->is_deleting = false;
        op_controller_wake(c, job->key, op_loop_now_ns(c->loop) + OP_ASK_AGAIN_NS);
    }
}

static void on_answer(struct op_errand *errand, const struct op_result *result)
{
    struct op_controller *c = errand->controller;
    if (errand->type == OP_ERRAND_KEY || errand->type == OP_ERRAND_MAKE_KEY) {
        op_token_on_answer(c, errand->type, result);
        return;
    }
    struct op_job *job = op_store_job(c, errand->job_key);
    if (job == NULL || strcmp(job->uid, errand->job_uid) != 0) {
        return;
    }
    switch (errand->type) {
    case OP_ERRAND_PART: after_part(c, job, errand, result); return;
    case OP_ERRAND_POD: after_start(c, job, errand, result); return;
    case OP_ERRAND_DELETE: after_delete(c, job, errand, result); return;
    case OP_ERRAND_STATUS: after_status(c, job, errand, result); return;
    case OP_ERRAND_FILL: after_fill(c, job, result); return;
    case OP_ERRAND_END: after_end(c, job, result); return;
    case OP_ERRAND_POLL: op_progress_on_answer(c, job, errand, result); return;
    case OP_ERRAND_KEY:
    case OP_ERRAND_MAKE_KEY: return;
    }
}
