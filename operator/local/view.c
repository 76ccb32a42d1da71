#include "operator/local/view.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

enum dl_rc op_view_new(struct op_view **out, struct dl_err *err)
{
    struct op_view *view = calloc(1, sizeof *view);
    if (view == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the view of a run");
    }
    op_status_init(&view->status);
    view->progress = NAN;
    *out = view;
    return DL_OK;
}

void op_view_free(struct op_view *view)
{
    if (view != NULL) {
        op_status_release(&view->status);
        free(view);
    }
}

bool op_view_add_point(struct op_view *view, const struct op_validation *validation, double seconds)
{
    if (!validation->known) {
        return false;
    }
    if (view->point_count > 0) {
        const struct op_view_point *last = &view->points[view->point_count - 1];
        bool is_same = last->tokens == validation->tokens && last->round == validation->round;
        if (is_same || validation->tokens < last->tokens) {
            return false;
        }
    }
    if (view->point_count == OP_VIEW_POINTS_MAX) {
        /* The first one stays: it is what the last one is compared with. */
        for (uint32_t i = 1; i < OP_VIEW_POINTS_MAX / 2; i++) {
            view->points[i] = view->points[2 * i];
        }
        view->point_count = OP_VIEW_POINTS_MAX / 2;
    }
    view->points[view->point_count++] = (struct op_view_point){
        .seconds = seconds, .tokens = validation->tokens, .round = validation->round, .loss = validation->loss};
    return true;
}

void op_view_interrupt(struct op_view *view)
{
    snprintf(view->phase, sizeof view->phase, "Interrupted");
    snprintf(
        view->message, sizeof view->message,
        "the supervisor was killed or the machine went down; `diloco run --resume RUN` goes on from the last commits");
    view->is_over = true;
    view->tokens_per_second = 0;
    view->status.connected = view->status.quorum_have = 0;
    for (uint32_t i = 0; i < view->learner_count; i++) {
        view->learners[i].tokens_per_second = 0;
        view->learners[i].pid = 0;
        snprintf(view->learners[i].state, sizeof view->learners[i].state, "gone");
    }
}

/* --- writing --- */

static void put_run_learners(const struct op_view *view, struct op_json_out *out)
{
    op_json_array_begin(out, "learners");
    for (uint32_t i = 0; i < view->learner_count; i++) {
        const struct op_view_learner *learner = &view->learners[i];
        op_json_object_begin(out, NULL);
        op_json_put_u64(out, "learner", learner->learner);
        op_json_put_u64(out, "incarnation", learner->incarnation);
        op_json_put_u64(out, "restarts", learner->restarts);
        op_json_put_i64(out, "pid", learner->pid);
        op_json_put_text(out, "state", learner->state);
        op_json_put_u64(out, "step", learner->step);
        op_json_put_u64(out, "tokens", learner->tokens);
        op_json_put_u64(out, "behind", learner->behind);
        op_json_put_u64(out, "merged", learner->merged);
        op_json_put_double(out, "tokensPerSecond", learner->tokens_per_second);
        op_json_put_double(out, "loss", learner->loss);
        op_json_object_end(out);
    }
    op_json_array_end(out);
}

static void put_run(const struct op_view *view, struct op_json_out *out)
{
    op_json_object_begin(out, "run");
    op_json_put_text(out, "job", view->job);
    op_json_put_text(out, "dir", view->dir);
    op_json_put_text(out, "phase", view->phase);
    op_json_put_text(out, "message", view->message);
    op_json_put_bool(out, "over", view->is_over);
    op_json_put_double(out, "seconds", view->seconds);
    op_json_put_double(out, "progress", view->progress);
    op_json_put_double(out, "tokensPerSecond", view->tokens_per_second);
    put_run_learners(view, out);
    op_json_array_begin(out, "validations");
    for (uint32_t i = 0; i < view->point_count; i++) {
        op_json_object_begin(out, NULL);
        op_json_put_double(out, "seconds", view->points[i].seconds);
        op_json_put_u64(out, "tokens", view->points[i].tokens);
        op_json_put_u64(out, "round", view->points[i].round);
        op_json_put_double(out, "loss", view->points[i].loss);
        op_json_object_end(out);
    }
    op_json_array_end(out);
    op_json_array_begin(out, "events");
    for (uint32_t i = 0; i < view->event_count; i++) {
        op_json_object_begin(out, NULL);
        op_json_put_double(out, "seconds", view->events[i].seconds);
        op_json_put_text(out, "event", view->events[i].kind);
        op_json_put_text(out, "who", view->events[i].who);
        op_json_put_text(out, "text", view->events[i].text);
        op_json_object_end(out);
    }
    op_json_array_end(out);
    op_json_object_end(out);
}

char *op_view_to_json(const struct op_view *view)
{
    struct op_json_out out;
    op_json_out_init(&out);
    op_json_object_begin(&out, NULL);
    op_status_put(&view->status, &out);
    put_run(view, &out);
    op_json_object_end(&out);
    return op_json_finish(&out);
}

/* --- reading --- */

static const cJSON *first_of(const cJSON *object, const char *key)
{
    const cJSON *array = cJSON_GetObjectItemCaseSensitive(object, key);
    return cJSON_IsArray(array) ? array->child : NULL;
}

static void read_run(struct op_view *view, const cJSON *run)
{
    snprintf(view->job, sizeof view->job, "%s", op_json_text(run, "job", ""));
    snprintf(view->dir, sizeof view->dir, "%s", op_json_text(run, "dir", ""));
    snprintf(view->phase, sizeof view->phase, "%s", op_json_text(run, "phase", ""));
    snprintf(view->message, sizeof view->message, "%s", op_json_text(run, "message", ""));
    view->is_over = op_json_bool(run, "over", false);
    view->seconds = op_json_double(run, "seconds", 0);
    view->progress = op_json_double(run, "progress", NAN);
    view->tokens_per_second = op_json_double(run, "tokensPerSecond", 0);
    view->learner_count = view->point_count = view->event_count = 0;
    for (const cJSON *it = first_of(run, "learners"); it != NULL && view->learner_count < OP_VIEW_LEARNERS_MAX;
         it = it->next) {
        struct op_view_learner *learner = &view->learners[view->learner_count++];
        *learner = (struct op_view_learner){
            .learner = op_json_u32(it, "learner", 0),
            .incarnation = op_json_u64(it, "incarnation", 0),
            .restarts = op_json_u32(it, "restarts", 0),
            .pid = (int32_t)op_json_u32(it, "pid", 0),
            .step = op_json_u64(it, "step", 0),
            .tokens = op_json_u64(it, "tokens", 0),
            .behind = op_json_u64(it, "behind", 0),
            .merged = op_json_u64(it, "merged", 0),
            .tokens_per_second = op_json_double(it, "tokensPerSecond", 0),
            .loss = op_json_double(it, "loss", NAN),
        };
        snprintf(learner->state, sizeof learner->state, "%s", op_json_text(it, "state", ""));
    }
    for (const cJSON *it = first_of(run, "validations"); it != NULL && view->point_count < OP_VIEW_POINTS_MAX;
         it = it->next) {
        view->points[view->point_count++] = (struct op_view_point){
            .seconds = op_json_double(it, "seconds", 0),
            .tokens = op_json_u64(it, "tokens", 0),
            .round = op_json_u64(it, "round", 0),
            .loss = op_json_double(it, "loss", NAN),
        };
    }
    for (const cJSON *it = first_of(run, "events"); it != NULL && view->event_count < OP_VIEW_EVENTS_MAX;
         it = it->next) {
        struct op_event *event = &view->events[view->event_count++];
        *event = (struct op_event){.seconds = op_json_double(it, "seconds", 0)};
        snprintf(event->kind, sizeof event->kind, "%s", op_json_text(it, "event", ""));
        snprintf(event->who, sizeof event->who, "%s", op_json_text(it, "who", ""));
        snprintf(event->text, sizeof event->text, "%s", op_json_text(it, "text", ""));
    }
}

/* Fills learners from the status alone. */
static void learners_from_status(struct op_view *view)
{
    const struct op_job_status *status = &view->status;
    view->learner_count = 0;
    view->tokens_per_second = 0;
    for (uint32_t i = 0; i < status->learner_count && view->learner_count < OP_VIEW_LEARNERS_MAX; i++) {
        const struct op_learner_status *from = &status->learners[i];
        if (i > 0 && status->learners[i - 1].learner == from->learner) {
            view->learners[view->learner_count - 1].restarts++;
            continue; /* An older incarnation. */
        }
        struct op_view_learner *learner = &view->learners[view->learner_count++];
        *learner = (struct op_view_learner){
            .learner = from->learner,
            .incarnation = from->admission,
            .step = from->step,
            .tokens = from->tokens,
            .behind = from->behind,
            .merged = from->pushes_merged,
            .tokens_per_second = from->link == OP_LINK_CONNECTED ? from->tokens_per_second : 0,
            .loss = from->loss,
        };
        snprintf(learner->state, sizeof learner->state, "%s", op_learner_link_name(from->link));
        view->tokens_per_second += learner->tokens_per_second;
    }
}

enum dl_rc op_view_from_json(struct op_view *view, const char *text, size_t size, struct dl_err *err)
{
    cJSON *tree = NULL;
    enum dl_rc rc = op_json_parse(text, size, &tree, err);
    if (rc == DL_OK) {
        rc = op_status_parse_tree(tree, &view->status, err);
    }
    const cJSON *run = rc == DL_OK ? cJSON_GetObjectItemCaseSensitive(tree, "run") : NULL;
    if (run != NULL) {
        read_run(view, run);
    } else if (rc == DL_OK) {
        const struct op_job_status *status = &view->status;
        snprintf(view->job, sizeof view->job, "%s", status->job);
        snprintf(view->phase, sizeof view->phase, "%s", op_status_phase_name(status->phase));
        snprintf(view->message, sizeof view->message, "%s", status->message);
        view->is_over = status->phase == OP_STATUS_ENDED;
        view->seconds = status->uptime_seconds;
        view->progress =
            status->token_budget > 0 ? fmin(1, (double)status->tokens / (double)status->token_budget) : NAN;
        learners_from_status(view);
        view->point_count = 0;
        op_view_add_point(view, &status->validation_first, 0);
        op_view_add_point(view, &status->validation_last, status->uptime_seconds);
    }
    cJSON_Delete(tree);
    return rc;
}

enum dl_rc op_view_from_status(struct op_view *view, const struct op_job_status *status, struct dl_err *err)
{
    struct op_json_out out;
    op_json_out_init(&out);
    op_json_object_begin(&out, NULL);
    op_status_put(status, &out);
    op_json_object_end(&out);
    DL_AUTO_FREE char *text = op_json_finish(&out);
    return text != NULL ? op_view_from_json(view, text, strlen(text), err) : dl_err_set(err, DL_ENOMEM, "no memory");
}
