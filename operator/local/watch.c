/* From the syncers' statuses to what is shown, said and done about it. */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "common/clock.h"
#include "common/mem.h"
#include "operator/local/supervisor_internal.h"

#define DRILL_WINDOW_NS (8 * DL_NS_PER_SECOND)

/* --- what each learner did --- */

static void tally_learners(struct op_supervisor *s)
{
    const struct op_job_status *status = &s->view->status;
    for (uint32_t i = 0; i < status->learner_count; i++) {
        const struct op_learner_status *learner = &status->learners[i];
        bool is_newest = i == 0 || status->learners[i - 1].learner != learner->learner;
        if (!is_newest || learner->learner >= DL_SPEC_LEARNERS_MAX) {
            continue;
        }
        struct op_tally *tally = &s->tallies[learner->learner];
        if (strcmp(tally->current.uid, learner->uid) != 0) {
            tally->steps += tally->current.step;
            tally->tokens += tally->current.tokens;
            tally->merged += tally->current.pushes_merged;
        }
        tally->current = *learner;
        tally->tokens_per_second =
            learner->tokens_per_second > 0 ? learner->tokens_per_second : tally->tokens_per_second;
        if (learner->step > 0 && s->first_step_ns == 0) {
            s->first_step_ns = s->now_ns;
        }
    }
}

static void note_back(struct op_supervisor *s, const struct op_child *child)
{
    for (uint32_t i = 0; i < s->drill_count; i++) {
        struct op_drill *drill = &s->drills[i];
        if (drill->victim == child->id && drill->back_seconds <= 0) {
            drill->back_seconds = (double)(s->now_ns - drill->event_ns) * 1e-9;
        }
    }
}

static void connect_learners(struct op_supervisor *s)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        struct op_child *child = &s->children[i];
        if (!child->is_used || child->kind != OP_LEARNER || child->state == OP_ENDED) {
            continue;
        }
        const struct op_learner_status *seen = op_status_learner(&s->view->status, child->id);
        if (seen != NULL && seen->state_from > 0 && !child->has_state && strcmp(seen->uid, child->uid) == 0) {
            child->has_state = true;
            op_events_add(&s->events, s->now_ns, "recovered", child->name, "took over the state of learner %u",
                          seen->state_from - 1);
        }
        bool is_connected = seen != NULL && seen->link == OP_LINK_CONNECTED && strcmp(seen->uid, child->uid) == 0;
        if (is_connected == child->is_connected) {
            continue;
        }
        child->is_connected = is_connected;
        if (is_connected) {
            op_events_add(&s->events, s->now_ns, "joined", child->name, "joined %.1f s after its start",
                          (double)(s->now_ns - child->started_ns) * 1e-9);
            note_back(s, child);
        } else if (child->state == OP_RUNNING && s->plan.phase == OP_JOB_RUNNING) {
            op_events_add(&s->events, s->now_ns, "lost", child->name, "is not connected any more");
        }
    }
}

static double progress_of(const struct op_supervisor *s)
{
    const struct dl_training_spec *training = &s->spec->training;
    double share = NAN;
    if (training->token_budget > 0) {
        share = (double)s->view->status.tokens / (double)training->token_budget;
    }
    if (training->round_budget > 0) {
        share = fmax(isnan(share) ? 0 : share, (double)s->view->status.round / (double)training->round_budget);
    }
    return isnan(share) ? NAN : fmin(1, share);
}

/* The end is known from every shard's last word, even when some are gone by now. */
static void follow_progress(struct op_supervisor *s)
{
    int result = DL_STOP_SUCCEEDED;
    for (uint32_t i = 0; i < s->spec->syncer.shards; i++) {
        const struct op_job_status *last = op_poller_view(s->poller, i, s->now_ns, true);
        int own = last == NULL || last->result == OP_STATUS_RESULT_NONE ? -1 : last->result;
        s->progress.succeeded = s->progress.succeeded || own == DL_STOP_SUCCEEDED;
        result = own < 0 || result < 0 ? -1 : DL_MAX(result, own);
    }
    s->progress.result = s->progress.result >= 0 ? s->progress.result : result;
    enum op_status_phase phase = s->view->status.phase;
    bool is_last = phase == OP_STATUS_FINISHING || phase == OP_STATUS_ENDED || s->view->progress >= 1;
    s->progress.finishing = s->progress.finishing || is_last;
}

void op_watch_status(struct op_supervisor *s)
{
    const struct op_job_status *shards[DL_SPEC_SHARDS_MAX];
    struct dl_err err;
    for (uint32_t i = 0; i < s->spec->syncer.shards; i++) {
        /* At the end shards leave one after the other: their last words stand. */
        shards[i] = op_poller_view(s->poller, i, s->now_ns, s->progress.finishing || s->plan.phase == OP_JOB_FINISHING);
    }
    bool had_any = s->view->status.shards_heard > 0;
    struct op_job_status combined;
    op_status_init(&combined);
    if (op_status_combine(shards, s->spec->syncer.shards, &combined, &err) != DL_OK) {
        return; /* No memory: the last view stands. */
    }
    if (combined.shards_heard == 0 && had_any) {
        /* Keeps the figures on show while syncers restart; only says so. */
        s->view->status.phase = OP_STATUS_UNREACHABLE;
        s->view->status.connected = 0;
        snprintf(s->view->status.message, sizeof s->view->status.message, "no syncer answers");
        op_status_release(&combined);
    } else {
        op_status_release(&s->view->status);
        s->view->status = combined;
        tally_learners(s);
        op_pace_sample(s->pace, &s->view->status, s->now_ns);
    }
    connect_learners(s);
    s->view->progress = progress_of(s);
    double seconds = (double)(s->now_ns - s->start_ns) * 1e-9;
    s->view->status.learners_wanted = s->replicas; /* The syncers know the manifest's number only. */
    if (s->view->point_count == 0) {
        op_view_add_point(s->view, &s->view->status.validation_first, seconds);
    }
    if (op_view_add_point(s->view, &s->view->status.validation_last, seconds)) {
        op_events_add(&s->events, s->now_ns, "validation", "", "validation loss %.4f after %llu tokens",
                      s->view->status.validation_last.loss, (unsigned long long)s->view->status.validation_last.tokens);
    }
    follow_progress(s);
}

/* --- the view --- */

static const char *state_of(const struct op_supervisor *s, const struct op_child *child)
{
    if (child->state == OP_TERMINATING) {
        return "stopping";
    }
    if (child->is_connected) {
        return s->tallies[child->id].current.step > 0 ? "training" : "joining";
    }
    bool was_seen = strcmp(s->tallies[child->id].current.uid, child->uid) == 0;
    return was_seen ? "cut off" : "starting";
}

static const char *state_without_process(const struct op_supervisor *s, uint32_t id)
{
    bool is_given_up = op_planner_given_up(s->planner, OP_LEARNER, id) != OP_REASON_NONE;
    return is_given_up ? "given up" : (s->view->is_over ? "ended" : "waiting");
}

static void fill_learner(struct op_supervisor *s, uint32_t id, struct op_child *child)
{
    struct op_view *view = s->view;
    if (view->learner_count == OP_VIEW_LEARNERS_MAX) {
        return;
    }
    struct op_view_learner *row = &view->learners[view->learner_count++];
    const struct op_tally *tally = &s->tallies[id];
    *row = (struct op_view_learner){.learner = id, .restarts = tally->starts > 0 ? tally->starts - 1 : 0, .loss = NAN};
    snprintf(row->state, sizeof row->state, "%s", child != NULL ? state_of(s, child) : state_without_process(s, id));
    if (child == NULL && !view->is_over) {
        return;
    }
    row->pid = child != NULL ? child->pid : 0;
    row->incarnation = child != NULL ? child->incarnation : tally->starts;
    if (child == NULL || strcmp(tally->current.uid, child->uid) == 0) {
        row->step = tally->current.step;
        row->tokens = tally->current.tokens;
        row->behind = tally->current.behind;
        row->merged = tally->current.pushes_merged;
        row->loss = tally->current.loss;
        row->tokens_per_second = child != NULL && child->is_connected ? tally->current.tokens_per_second : 0;
        view->tokens_per_second += row->tokens_per_second;
    }
}

static void fill_events(struct op_supervisor *s)
{
    struct op_view *view = s->view;
    const struct op_event *newest[OP_VIEW_EVENTS_MAX];
    uint32_t count = 0;
    for (uint64_t i = s->events.count; i-- > op_events_first(&s->events) && count < OP_VIEW_EVENTS_MAX;) {
        const struct op_event *event = op_events_get(&s->events, i);
        if (strcmp(event->kind, "validation") != 0) {
            newest[count++] = event;
        }
    }
    view->event_count = count;
    for (uint32_t i = 0; i < count; i++) {
        view->events[i] = *newest[count - 1 - i];
    }
}

static void fill_phase(struct op_supervisor *s)
{
    struct op_view *view = s->view;
    bool has_syncers = view->status.shards_heard > 0;
    if (s->plan.phase == OP_JOB_RUNNING && has_syncers) {
        snprintf(view->phase, sizeof view->phase, "%s", op_status_phase_name(view->status.phase));
        snprintf(view->message, sizeof view->message, "%s", view->status.message);
    } else {
        snprintf(view->phase, sizeof view->phase, "%s",
                 s->plan.phase == OP_JOB_RUNNING || s->plan.phase == OP_JOB_PENDING ? "Starting"
                                                                                    : op_job_phase_name(s->plan.phase));
        bool says_why = s->plan.phase == OP_JOB_SUCCEEDED && has_syncers && view->status.phase == OP_STATUS_ENDED;
        snprintf(view->message, sizeof view->message, "%s", says_why ? view->status.message : s->plan.message);
    }
    if (strcmp(view->phase, s->last_phase) != 0) {
        snprintf(s->last_phase, sizeof s->last_phase, "%s", view->phase);
        op_events_add(&s->events, s->now_ns, "phase", "", "%s%s%s", view->phase, view->message[0] != 0 ? ": " : "",
                      view->message);
    }
}

void op_watch_view(struct op_supervisor *s)
{
    struct op_view *view = s->view;
    int64_t until_ns = s->end_ns != 0 ? s->end_ns : s->now_ns;
    view->seconds = (double)(until_ns - s->start_ns) * 1e-9;
    view->learner_count = 0;
    view->tokens_per_second = 0;
    for (uint32_t id = 0; id < s->spec->learners.max && id < DL_SPEC_LEARNERS_MAX; id++) {
        struct op_child *child = op_children_find(s, OP_LEARNER, id);
        bool will_be_back = op_planner_wants(s->planner, OP_LEARNER, id) && s->plan.phase == OP_JOB_RUNNING;
        if (child != NULL || will_be_back || (s->tallies[id].starts > 0 && view->is_over)) {
            fill_learner(s, id, child);
        }
        enum op_reason reason = op_planner_given_up(s->planner, OP_LEARNER, id);
        if (reason != OP_REASON_NONE && !s->tallies[id].is_given_up) {
            char who[32];
            snprintf(who, sizeof who, "learner-%u", id);
            op_events_add(&s->events, s->now_ns, "note", who, "will not be started again (%s)", op_reason_name(reason));
        }
        s->tallies[id].is_given_up = reason != OP_REASON_NONE;
    }
    if (view->is_over && view->seconds > 0) {
        view->tokens_per_second = (double)view->status.tokens / view->seconds; /* Of the whole run. */
    }
    fill_phase(s);
    fill_events(s);
}

/* --- chaos, scaling, drills --- */

void op_watch_scale(struct op_supervisor *s, uint32_t replicas, const char *why)
{
    uint32_t before = s->replicas;
    s->replicas = replicas;
    struct op_limits limits = s->wanted.limits;
    bool endpoints_known = s->wanted.endpoints_known;
    enum op_stop_wish wish = s->wanted.wish;
    uint64_t generation = s->wanted.generation;
    op_wanted_from_spec(s->spec, replicas, &s->wanted);
    s->wanted.limits = limits;
    s->wanted.endpoints_known = endpoints_known;
    s->wanted.wish = wish;
    s->wanted.generation = generation + 1;
    for (uint32_t i = 0; i < s->wanted.pool_count; i++) {
        s->wanted.pools[i].scavenges = false; /* One machine has no capacity that comes and goes. */
    }
    if (before != replicas) {
        op_events_add(&s->events, s->now_ns, "scale", "", "%u learners wanted, %u before (%s)", replicas, before, why);
    }
}

static void measure_drill(struct op_supervisor *s, struct op_drill *drill)
{
    drill->is_measured = true;
    drill->until_ns = DL_MIN(drill->until_ns, s->now_ns);
    op_pace_compare(s->pace, drill->victim, drill->from_ns, drill->event_ns, drill->until_ns, &drill->change);
    if (drill->change.learners > 0) {
        op_events_add(
            &s->events, s->now_ns, "note", "",
            "the other %u learners' step rate after the kill: %.2f of before (%.1f s against %.1f s; worst %.2f)",
            drill->change.learners, drill->change.ratio, drill->change.after_seconds, drill->change.before_seconds,
            drill->change.worst);
    }
}

static void close_drills(struct op_supervisor *s, bool at_once)
{
    for (uint32_t i = 0; i < s->drill_count; i++) {
        if (!s->drills[i].is_measured && (at_once || s->now_ns >= s->drills[i].until_ns)) {
            measure_drill(s, &s->drills[i]);
        }
    }
}

static void kill_on_purpose(struct op_supervisor *s, enum op_kind kind, uint32_t id)
{
    struct op_child *child = op_children_find(s, kind, id);
    if (child == NULL) {
        op_events_add(&s->events, s->now_ns, "chaos", "", "kill %s %u: it does not run, nothing done",
                      op_kind_name(kind), id);
        return;
    }
    op_events_add(&s->events, s->now_ns, "chaos", child->name, "killed on purpose (SIGKILL, pid %d)", (int)child->pid);
    kill(child->pid, SIGKILL);
    if (kind == OP_LEARNER && s->drill_count < OP_DRILLS_MAX) {
        int64_t steady_ns = op_pace_steady_since(s->pace, s->now_ns);
        s->drills[s->drill_count++] = (struct op_drill){
            .victim = id,
            .at_seconds = (double)(s->now_ns - s->start_ns) * 1e-9,
            .event_ns = s->now_ns,
            .from_ns = DL_MAX(steady_ns, s->now_ns - DRILL_WINDOW_NS),
            .until_ns = s->now_ns + DRILL_WINDOW_NS,
        };
    }
}

static uint32_t highest_running(struct op_supervisor *s)
{
    for (uint32_t id = s->spec->learners.max; id-- > 0;) {
        if (op_children_find(s, OP_LEARNER, id) != NULL) {
            return id;
        }
    }
    return 0;
}

static void disturb(struct op_supervisor *s, const struct op_chaos_action *action)
{
    uint32_t count = action->has_argument ? action->argument : 1;
    uint32_t max = s->spec->learners.max;
    switch (action->type) {
    case OP_CHAOS_KILL:
        kill_on_purpose(s, OP_LEARNER, action->has_argument ? action->argument : highest_running(s));
        return;
    case OP_CHAOS_KILL_SYNCER: kill_on_purpose(s, OP_SYNCER, action->has_argument ? action->argument : 0); return;
    case OP_CHAOS_JOIN:
        if (s->replicas == max) {
            op_events_add(&s->events, s->now_ns, "chaos", "", "join: learners.max (%u) is reached, nothing done", max);
            return;
        }
        op_watch_scale(s, DL_MIN(max, s->replicas + count), "chaos");
        return;
    case OP_CHAOS_LEAVE: op_watch_scale(s, s->replicas - DL_MIN(count, s->replicas), "chaos"); return;
    }
}

void op_watch_chaos(struct op_supervisor *s)
{
    bool is_ending = s->plan.phase != OP_JOB_RUNNING;
    close_drills(s, is_ending);
    for (const struct op_chaos_action *action;
         !is_ending && isfinite(s->view->progress) && (action = op_chaos_take(&s->chaos, s->view->progress)) != NULL;) {
        close_drills(s, true); /* What comes now would blur it. */
        disturb(s, action);
    }
}

void op_watch_final(struct op_supervisor *s)
{
    s->end_ns = s->now_ns;
    s->view->is_over = true;
    close_drills(s, true);
    if (s->chaos.done < s->chaos.count) {
        op_events_add(&s->events, s->now_ns, "chaos", "", "%u planned disturbances were not reached",
                      s->chaos.count - s->chaos.done);
    }
    op_watch_view(s);
}
