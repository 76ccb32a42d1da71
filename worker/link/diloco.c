/* The public functions from diloco_join on: the hand-over between the caller's thread and the network thread. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/link/channel.h"
#include "worker/link/diloco_internal.h"

/* When diloco_close has to say goodbye by itself it waits no longer than this. */
#define CLOSE_GOODBYE_S 1.0
/* After GOODBYE is out: how long the peer may take to close first, so that no reset overtakes it. */
#define AFTER_GOODBYE_NS (DL_NS_PER_SECOND / 2)
#define YIELD_NS (10 * DL_NS_PER_MS)

/* --- a boundary -------------------------------------------------------------------------------------------------- */

static struct timespec timespec_of(int64_t at_ns)
{
    return (struct timespec){.tv_sec = at_ns / DL_NS_PER_SECOND, .tv_nsec = at_ns % DL_NS_PER_SECOND};
}

/* Lets the network thread work, until something changes or the time has come. Called and returns with the lock held. */
static void wait_until(struct wk_hub *hub, int64_t until_ns)
{
    wk_net_wake(hub);
    if (until_ns == INT64_MAX) {
        pthread_cond_wait(&hub->changed, &hub->lock);
    } else {
        struct timespec until = timespec_of(until_ns);
        pthread_cond_timedwait(&hub->changed, &hub->lock, &until);
    }
}

/* Work on the tensors: without the lock, so that the network goes on. The link has handed this memory to us alone. */
static enum dl_rc work(struct diloco *d, const struct wk_step *step, struct dl_err *err)
{
    enum dl_rc rc = DL_OK;
    struct wk_hub *hub = &d->hub;
    const struct dl_layout *layout = wk_link_layout(hub->link);
    pthread_mutex_unlock(&hub->lock);
    if (step->type == WK_STEP_PREPARE) {
        rc = wk_store_prepare(hub->store, layout, err);
    } else if (step->type == WK_STEP_APPLY) {
        wk_store_apply(hub->store, step);
    } else if (step->type == WK_STEP_FETCH) {
        rc = wk_recovery_fetch(&d->recovery, hub, err);
    } else {
        rc = wk_store_snapshot(hub->store, step, err);
    }
    pthread_mutex_lock(&hub->lock);
    if (rc != DL_OK) {
        return rc;
    }
    if (step->type == WK_STEP_PREPARE) {
        wk_link_on_prepared(hub->link);
    } else if (step->type == WK_STEP_APPLY) {
        wk_link_on_applied(hub->link, step->fragment);
    } else if (step->type == WK_STEP_SNAPSHOT) {
        wk_link_on_snapshot(hub->link, step->fragment);
        wk_net_wake(hub); /* It can be on its way while the next one is encoded. */
    }
    return DL_OK;
}

/* Does what the link says until it says GO or DONE, or until the time is up (DL_ETIMEOUT). Lock held. */
static enum dl_rc boundary(struct diloco *d, int64_t until_ns, bool *done, struct dl_err *err)
{
    struct wk_hub *hub = &d->hub;
    for (;;) {
        struct wk_step step;
        int64_t now_ns = dl_now_ns();
        wk_link_next_step(hub->link, now_ns, &step);
        switch (step.type) {
        case WK_STEP_PREPARE:
        case WK_STEP_APPLY:
        case WK_STEP_FETCH: /* Has bounds of its own: bytes that flow are never cut short. */
        case WK_STEP_SNAPSHOT: {
            enum dl_rc rc = work(d, &step, err);
            if (rc != DL_OK) {
                return rc;
            }
            break;
        }
        case WK_STEP_YIELD: wait_until(hub, now_ns + YIELD_NS); break;
        case WK_STEP_WAIT:
            if (now_ns >= until_ns) {
                return DL_ETIMEOUT;
            }
            if (!wk_recovery_boundary(&d->recovery, hub)) {
                wait_until(hub, DL_MIN(step.until_ns, until_ns));
            }
            break;
        case WK_STEP_GO:
            (void)wk_recovery_boundary(&d->recovery, hub);
            *done = false;
            return DL_OK;
        case WK_STEP_DONE: *done = true; return DL_OK;
        }
    }
}

static int end_of(struct diloco *d, struct diloco_error *error)
{
    struct wk_outcome outcome;
    wk_link_outcome(d->hub.link, &outcome);
    d->phase = WK_PHASE_OVER;
    switch (outcome.end) {
    case WK_END_SUCCEEDED: return wk_set_error(error, DILOCO_DONE, "%s", outcome.text);
    case WK_END_STOPPED: return wk_set_error(error, DILOCO_STOPPED, "%s", outcome.text);
    case WK_END_FAILED: return wk_set_error(error, DILOCO_EFAILED, "%s", outcome.text);
    case WK_END_REFUSED: return wk_set_error(error, DILOCO_EREFUSED, "%s", outcome.text);
    case WK_END_NONE: break;
    }
    return wk_set_error(error, DILOCO_STOPPED, "this learner has left job %s", d->job);
}

static void remember(struct diloco *d)
{
    struct wk_link_view view;
    wk_link_view(d->hub.link, &view);
    d->waited_before_ns = view.waited_ns;
    d->updates_before = view.updates_applied;
}

static void fill_info(struct diloco *d, struct diloco_info *info)
{
    if (info == NULL) {
        return;
    }
    struct wk_link_view view;
    const struct dl_wire_recovered *report = wk_recovery_report(&d->recovery);
    wk_link_view(d->hub.link, &view);
    *info = (struct diloco_info){
        .recovered_from = report == NULL ? -1 : (int32_t)report->learner,
        .recovered_step = report == NULL ? 0 : report->step,
        .learner = view.learner,
        .step = view.step,
        .ensemble_step = DL_MAX(view.ensemble_step, view.step),
        .tokens_all = view.tokens_all,
        .token_budget = view.token_budget,
        .learners = view.learners,
        .connected_shards = view.connected,
        .shards = view.shards,
        .updates_applied = (uint32_t)(view.updates_applied - d->updates_before),
        .updates_total = view.updates_applied,
        .pushes_total = view.pushes_sent,
        .last_round = view.last_round,
        .bytes_sent = __atomic_load_n(&d->hub.bytes_sent, __ATOMIC_RELAXED),
        .bytes_received = __atomic_load_n(&d->hub.bytes_received, __ATOMIC_RELAXED),
        .waited_seconds = (double)(view.waited_ns - d->waited_before_ns) / (double)DL_NS_PER_SECOND,
    };
}

/* Runs a boundary and turns its end into a result. Lock held. */
static int finish_call(struct diloco *d, int64_t until_ns, struct diloco_info *info, struct diloco_error *error)
{
    struct dl_err err;
    bool done = false;
    enum dl_rc rc = boundary(d, until_ns, &done, &err);
    fill_info(d, info);
    wk_net_wake(&d->hub);
    if (rc == DL_ETIMEOUT) {
        struct wk_link_view view;
        wk_link_view(d->hub.link, &view);
        const char *trouble = wk_link_trouble(d->hub.link);
        return wk_set_error(
            error, DILOCO_ETIMEOUT, "join job %s: no first state within %g s, %u of %u shards connected%s%s", d->job,
            d->join_timeout_seconds, view.connected, view.shards, trouble[0] == 0 ? "" : "; last: ", trouble);
    }
    if (rc != DL_OK) {
        return wk_from_err(error, &err);
    }
    return done ? end_of(d, error) : DILOCO_CONTINUE;
}

/* --- joining ----------------------------------------------------------------------------------------------------- */

static enum dl_rc make_link(struct diloco *d, struct dl_err *err)
{
    struct wk_hub *hub = &d->hub;
    uint64_t nonce = 0;
    ssize_t got = getrandom(&nonce, sizeof nonce, 0);
    assert(got == (ssize_t)sizeof nonce);
    struct wk_link_config config = {
        .role = d->role == DILOCO_EVALUATOR ? DL_ROLE_EVALUATOR : DL_ROLE_LEARNER,
        .learner = d->learner,
        .nonce = nonce,
        .uid = d->uid,
        .job = d->job,
        .trainer = d->trainer,
        .shards = hub->shards,
        .tensors = d->tensors,
        .tensor_count = d->tensor_count,
        .batch = d->batch,
        .recover = d->role == DILOCO_LEARNER && hub->token != NULL,
        .keep_missed = true,
    };
    enum dl_rc rc = wk_link_new(&config, &hub->link, err);
    if (rc != DL_OK) {
        return rc;
    }
    hub->store = wk_store_new(d->data, d->tensor_count);
    if (hub->store == NULL) {
        return dl_err_set(err, DL_ENOMEM, "join: no memory for the table of tensors");
    }
    hub->out_bytes = DL_WS_HEAD_MAX + (size_t)wk_link_message_bytes_max(hub->link);
    return wk_net_start(hub, &d->net, err);
}

int diloco_join(struct diloco *d, struct diloco_info *info, struct diloco_error *error)
{
    if (d == NULL || d->phase != WK_PHASE_OPEN || d->net != NULL) {
        return wk_set_error(error, DILOCO_EINVAL, "join: once a handle, after diloco_open and diloco_register");
    }
    if (d->tensor_count == 0) {
        return wk_set_error(error, DILOCO_EINVAL, "join: no tensor was registered");
    }
    struct dl_err err;
    if (make_link(d, &err) != DL_OK) {
        return wk_from_err(error, &err);
    }
    int64_t until_ns = dl_now_ns() + (int64_t)(d->join_timeout_seconds * (double)DL_NS_PER_SECOND);
    pthread_mutex_lock(&d->hub.lock);
    int code = finish_call(d, until_ns, info, error);
    bool is_over = code == DILOCO_DONE || code == DILOCO_STOPPED;
    if (is_over && d->role == DILOCO_EVALUATOR && wk_link_is_joined(d->hub.link)) {
        /* The last state came with the job's end: it is there to be used, diloco_poll says the rest. */
        code = DILOCO_CONTINUE;
    } else if (code == DILOCO_CONTINUE) {
        d->phase = WK_PHASE_JOINED;
        wk_recovery_joined(&d->recovery, &d->hub);
    }
    pthread_mutex_unlock(&d->hub.lock);
    return code;
}

int diloco_step(struct diloco *d, uint64_t tokens, float loss, struct diloco_info *info, struct diloco_error *error)
{
    if (d == NULL || d->phase == WK_PHASE_OPEN || d->role != DILOCO_LEARNER) {
        return wk_set_error(error, DILOCO_EINVAL, "step: only for a learner that has joined");
    }
    pthread_mutex_lock(&d->hub.lock);
    remember(d);
    int code;
    if (d->phase == WK_PHASE_OVER) {
        fill_info(d, info);
        code = end_of(d, error);
    } else {
        wk_link_on_step(d->hub.link, dl_now_ns(), tokens, loss);
        code = finish_call(d, INT64_MAX, info, error);
    }
    pthread_mutex_unlock(&d->hub.lock);
    return code;
}

int diloco_note(struct diloco *d, const char *kind, uint64_t a, uint64_t b, uint64_t c, const char *text,
                struct diloco_error *error)
{
    if (d == NULL || d->phase == WK_PHASE_OPEN || d->role != DILOCO_LEARNER) {
        return wk_set_error(error, DILOCO_EINVAL, "note: only for a learner that has joined");
    }
    if (kind == NULL || kind[0] == 0 || strlen(kind) >= DL_TRACE_KIND_MAX) {
        return wk_set_error(error, DILOCO_EINVAL, "note: the kind must have 1 to %d characters", DL_TRACE_KIND_MAX - 1);
    }
    for (const char *at = kind; *at != 0; at++) {
        if (!((*at >= 'a' && *at <= 'z') || (*at >= '0' && *at <= '9') || *at == '_')) {
            return wk_set_error(error, DILOCO_EINVAL, "note: the kind \"%s\" may hold a to z, 0 to 9 and _", kind);
        }
    }
    pthread_mutex_lock(&d->hub.lock);
    wk_link_trace(d->hub.link, kind, DL_TRACE_NO_FRAGMENT, a, b, c, text);
    pthread_mutex_unlock(&d->hub.lock);
    return DILOCO_CONTINUE;
}

int diloco_data(struct diloco *d, uint64_t count, struct diloco_range *range, struct diloco_error *error)
{
    if (d == NULL || d->phase == WK_PHASE_OPEN || d->batch == 0) {
        return wk_set_error(error, DILOCO_EINVAL, "data: only for a learner that has joined after diloco_lease_data");
    }
    if (range == NULL || count == 0) {
        return wk_set_error(error, DILOCO_EINVAL, "data: a range for the answer and a count of at least 1 are needed");
    }
    struct wk_range got;
    pthread_mutex_lock(&d->hub.lock);
    wk_link_data(d->hub.link, count, &got);
    pthread_mutex_unlock(&d->hub.lock);
    *range = (struct diloco_range){.lease = got.lease, .first = got.first, .count = got.count};
    return DILOCO_CONTINUE;
}

/* --- evaluators -------------------------------------------------------------------------------------------------- */

static int64_t after_seconds(double seconds)
{
    return dl_now_ns() + (int64_t)(DL_MAX(0.0, DL_MIN(seconds, WK_TIMEOUT_MAX_S)) * (double)DL_NS_PER_SECOND);
}

int diloco_poll(struct diloco *d, double timeout_seconds, struct diloco_info *info, struct diloco_error *error)
{
    if (d == NULL || d->phase == WK_PHASE_OPEN || d->role != DILOCO_EVALUATOR) {
        return wk_set_error(error, DILOCO_EINVAL, "poll: only for an evaluator that has joined");
    }
    int64_t until_ns = after_seconds(timeout_seconds);
    pthread_mutex_lock(&d->hub.lock);
    remember(d);
    int code;
    for (;;) {
        if (d->phase == WK_PHASE_OVER) {
            fill_info(d, info);
            code = end_of(d, error);
            break;
        }
        struct diloco_info now;
        wk_link_on_poll(d->hub.link, dl_now_ns());
        code = finish_call(d, INT64_MAX, &now, error);
        if (info != NULL) {
            *info = now;
        }
        if (code != DILOCO_CONTINUE || now.updates_applied > 0 || dl_now_ns() >= until_ns) {
            break;
        }
        wait_until(&d->hub, until_ns);
    }
    pthread_mutex_unlock(&d->hub.lock);
    return code;
}

int diloco_report(struct diloco *d, double loss, uint32_t sequences, struct diloco_error *error)
{
    if (d == NULL || d->phase == WK_PHASE_OPEN || d->role != DILOCO_EVALUATOR) {
        return wk_set_error(error, DILOCO_EINVAL, "report: only for an evaluator that has joined");
    }
    uint64_t hash = wk_store_hash(d->hub.store);
    pthread_mutex_lock(&d->hub.lock);
    wk_link_report(d->hub.link, loss, sequences, hash);
    pthread_mutex_unlock(&d->hub.lock);
    wk_net_wake(&d->hub);
    return DILOCO_CONTINUE;
}

/* --- leaving ----------------------------------------------------------------------------------------------------- */

/* True when GOODBYE is out on every connection. Lock held. */
static bool wait_for_goodbye(struct diloco *d, int64_t until_ns)
{
    struct wk_hub *hub = &d->hub;
    while (!wk_link_has_left(hub->link) || hub->unsent > 0) {
        if (dl_now_ns() >= until_ns) {
            return false;
        }
        wait_until(hub, until_ns);
    }
    int64_t closed_by_ns = DL_MIN(until_ns, dl_now_ns() + AFTER_GOODBYE_NS);
    for (;;) {
        struct wk_link_view view;
        wk_link_view(hub->link, &view);
        if (view.connected == 0 || dl_now_ns() >= closed_by_ns) {
            return true;
        }
        wait_until(hub, closed_by_ns);
    }
}

int diloco_leave(struct diloco *d, int preempted, double timeout_seconds, const char *why, struct diloco_error *error)
{
    if (d == NULL || d->net == NULL) {
        return wk_set_error(error, DILOCO_EINVAL, "leave: only after diloco_join");
    }
    int64_t until_ns = after_seconds(timeout_seconds);
    pthread_mutex_lock(&d->hub.lock);
    int code = DILOCO_CONTINUE;
    struct dl_err err;
    if (d->phase == WK_PHASE_JOINED) {
        /* What a pull has asked for goes first, as of now; whether or not that works, the goodbye is said. */
        bool done = false;
        wk_link_on_poll(d->hub.link, dl_now_ns());
        wk_link_leave(d->hub.link, dl_now_ns(), preempted != 0, why == NULL ? "" : why);
        if (boundary(d, until_ns, &done, &err) == DL_ENOMEM) {
            code = wk_from_err(error, &err);
        }
    } else {
        wk_link_leave(d->hub.link, dl_now_ns(), preempted != 0, why == NULL ? "" : why);
    }
    if (!wait_for_goodbye(d, until_ns) && code == DILOCO_CONTINUE) {
        code = wk_set_error(error, DILOCO_ETIMEOUT, "leave job %s: not everything was sent within %g s", d->job,
                            timeout_seconds);
    }
    d->phase = WK_PHASE_OVER;
    d->said_goodbye = true;
    pthread_mutex_unlock(&d->hub.lock);
    return code;
}

void diloco_close(struct diloco *d)
{
    if (d == NULL) {
        return;
    }
    if (d->net != NULL && !d->said_goodbye) {
        (void)diloco_leave(d, 0, CLOSE_GOODBYE_S, "closed", NULL);
    }
    struct wk_hub *hub = &d->hub;
    wk_net_stop(d->net);
    wk_recovery_release(&d->recovery);
    wk_link_free(hub->link);
    wk_store_free(hub->store);
    SSL_CTX_free(hub->tls);
    if (hub->wake_fd > 0) {
        close(hub->wake_fd);
    }
    pthread_cond_destroy(&hub->changed);
    pthread_mutex_destroy(&hub->lock);
    free(hub->token);
    free(d->tensors);
    free(d->data);
    free(d);
}
