#include "worker/link/link.h"

#include <assert.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/mem.h"
#include "worker/link/link_state.h"

/* --- life -------------------------------------------------------------------------------------------------------- */

static enum dl_rc config_check(const struct wk_link_config *config, struct dl_err *err)
{
    if (config->shards < 1 || config->shards > DL_SPEC_SHARDS_MAX) {
        return dl_err_set(err, DL_EINVAL, "join: %u endpoints, 1 to %d are possible", config->shards,
                          DL_SPEC_SHARDS_MAX);
    }
    if (config->learner < -1 || config->learner >= DL_SPEC_LEARNERS_MAX) {
        return dl_err_set(err, DL_EINVAL, "join: learner id %d, -1 (any) to %d are possible", config->learner,
                          DL_SPEC_LEARNERS_MAX - 1);
    }
    size_t uid = strlen(config->uid), job = strlen(config->job);
    if (uid == 0 || uid >= DL_WIRE_UID_MAX || job == 0 || job >= DL_SPEC_NAME_MAX) {
        return dl_err_set(err, DL_EINVAL, "join: job name and uid must have 1 to %d characters", DL_WIRE_UID_MAX - 1);
    }
    return DL_OK;
}

enum dl_rc wk_link_new(const struct wk_link_config *config, struct wk_link **out, struct dl_err *err)
{
    enum dl_rc rc = config_check(config, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct dl_layout *whole = NULL; /* Any layout at all checks names and shapes. */
    rc = dl_layout_new(config->tensors, config->tensor_count, 1, DL_LAYOUT_BALANCED, &whole, err);
    if (rc != DL_OK) {
        dl_err_wrap(err, "join");
        return rc;
    }
    dl_layout_free(whole);
    struct wk_link *link = calloc(1, sizeof *link);
    if (link == NULL) {
        return dl_err_set(err, DL_ENOMEM, "join: no memory for the link's state");
    }
    link->role = config->role;
    link->wanted = config->learner;
    link->nonce = config->nonce;
    memcpy(link->uid, config->uid, strlen(config->uid) + 1);
    memcpy(link->job, config->job, strlen(config->job) + 1);
    snprintf(link->trainer, sizeof link->trainer, "%s", config->trainer == NULL ? "" : config->trainer);
    link->trace.first = 1;
    link->trace.owner_count = 1;
    link->trace.owners[0].nonce = config->nonce;
    memcpy(link->trace.owners[0].uid, link->uid, sizeof link->uid);
    link->shards = config->shards;
    link->data.batch = config->role == DL_ROLE_LEARNER ? config->batch : 0;
    link->data.wait_until_ns = -1;
    link->loss = NAN;
    link->keep_missed = config->keep_missed && config->role == DL_ROLE_LEARNER;
    link->recover.state = config->recover && config->role == DL_ROLE_LEARNER ? WK_RECOVER_ASKING : WK_RECOVER_OFF;
    link->recover.since_ns = link->recover.welcomed_ns = INT64_MAX;
    link->left_ns = link->waiting_ns = -1;
    dl_rng_init(&link->rng, config->nonce, dl_rng_stream("backoff", 0, 0));
    for (uint32_t i = 0; i < link->shards; i++) {
        link->conns[i].heartbeat_ms = WK_DEFAULT_HEARTBEAT_MS;
        link->conns[i].timeout_ms = WK_DEFAULT_TIMEOUT_MS;
        link->conns[i].lost_ns = INT64_MIN;
    }
    size_t tensors_bytes = 0;
    rc = dl_tensors_encode(config->tensors, config->tensor_count, &link->tensors_wire, &tensors_bytes, err);
    if (rc == DL_OK && tensors_bytes + DL_WIRE_CONTROL_PAYLOAD_MAX > DL_WIRE_HELLO_PAYLOAD_MAX) {
        rc = dl_err_set(err, DL_EINVAL, "join: the table of %u tensors takes %zu bytes, too many for one message",
                        config->tensor_count, tensors_bytes);
    }
    link->tensors_bytes = (uint32_t)tensors_bytes;
    link->tensors = rc == DL_OK ? malloc(config->tensor_count * sizeof *link->tensors) : NULL;
    if (rc == DL_OK && link->tensors == NULL) {
        rc = dl_err_set(err, DL_ENOMEM, "join: no memory for the table of %u tensors", config->tensor_count);
    }
    if (rc != DL_OK) {
        wk_link_free(link);
        return rc;
    }
    memcpy(link->tensors, config->tensors, config->tensor_count * sizeof *link->tensors);
    link->tensor_count = config->tensor_count;
    link->trace.records = calloc(WK_TRACE_MAX, sizeof *link->trace.records);
    if (link->trace.records == NULL) {
        wk_link_free(link);
        return dl_err_set(err, DL_ENOMEM, "join: no memory for %d entries of the tape", WK_TRACE_MAX);
    }
    *out = link;
    return DL_OK;
}

void wk_link_free(struct wk_link *link)
{
    if (link != NULL) {
        dl_layout_free(link->layout);
        free(link->tensors_wire);
        free(link->tensors);
        free(link->trace.records);
        free(link);
    }
}

/* --- what the parts share ---------------------------------------------------------------------------------------- */

void wk_note(struct wk_link *link, int level, const char *fmt, ...)
{
    struct wk_note *note = &link->notes[link->notes_made % WK_NOTES_MAX];
    va_list args;
    va_start(args, fmt);
    vsnprintf(note->text, sizeof note->text, fmt, args);
    va_end(args);
    note->level = level;
    link->notes_made++;
    if (link->notes_made - link->notes_taken > WK_NOTES_MAX) {
        link->notes_taken = link->notes_made - WK_NOTES_MAX;
    }
}

bool wk_link_next_note(struct wk_link *link, int *level, char text[DL_ERR_TEXT_MAX])
{
    if (link->notes_taken == link->notes_made) {
        return false;
    }
    const struct wk_note *note = &link->notes[link->notes_taken % WK_NOTES_MAX];
    *level = note->level;
    memcpy(text, note->text, sizeof note->text);
    link->notes_taken++;
    return true;
}

void wk_conn_move(struct wk_link *link, uint32_t shard, enum wk_conn_state to)
{
    static const bool allowed[WK_CONN_STATES][WK_CONN_STATES] = {
        [WK_CONN_IDLE] = {[WK_CONN_CONNECTING] = true, [WK_CONN_OVER] = true},
        [WK_CONN_CONNECTING] = {[WK_CONN_IDLE] = true, [WK_CONN_GREETING] = true, [WK_CONN_OVER] = true},
        [WK_CONN_GREETING] = {[WK_CONN_IDLE] = true, [WK_CONN_READY] = true, [WK_CONN_OVER] = true},
        [WK_CONN_READY] = {[WK_CONN_IDLE] = true, [WK_CONN_OVER] = true},
    };
    struct wk_conn *conn = &link->conns[shard];
    assert(allowed[conn->state][to]);
    conn->state = to;
}

void wk_close(struct wk_link *link, uint32_t shard, const char *fmt, ...)
{
    struct wk_conn *conn = &link->conns[shard];
    if (conn->state == WK_CONN_IDLE || conn->state == WK_CONN_OVER || conn->close_wanted) {
        return;
    }
    va_list args;
    va_start(args, fmt);
    vsnprintf(conn->close_text, sizeof conn->close_text, fmt, args);
    va_end(args);
    conn->close_wanted = true;
}

void wk_end(struct wk_link *link, enum wk_end end, const char *fmt, ...)
{
    if (link->outcome.end != WK_END_NONE) {
        return;
    }
    va_list args;
    va_start(args, fmt);
    vsnprintf(link->outcome.text, sizeof link->outcome.text, fmt, args);
    va_end(args);
    link->outcome.end = end;
    wk_note(link, end == WK_END_FAILED || end == WK_END_REFUSED ? 3 : 1, "over: %s", link->outcome.text);
    /* After an orderly end connections stay, for an evaluator's last report; the shell closes them. */
    for (uint32_t i = 0; i < link->shards && (end == WK_END_FAILED || end == WK_END_REFUSED); i++) {
        wk_close(link, i, "%s", "this learner is done");
    }
}

/* A push whose bytes the trainer is writing or the shell is reading stays until they say so, and is dropped then. */
void wk_push_drop(struct wk_push *push, const struct wk_conn *conn, uint32_t fragment)
{
    bool busy = push->state == WK_PUSH_SNAPSHOT || (conn->chunk_busy && conn->chunk_fragment == fragment);
    if (push->state != WK_PUSH_NONE && busy) {
        push->dropped = true;
    } else {
        push->state = WK_PUSH_NONE;
    }
}

static bool is_being_applied(const struct wk_fragment *fragment)
{
    for (uint32_t i = 0; i < WK_SLOTS; i++) {
        if (fragment->slots[i].state == WK_SLOT_APPLYING) {
            return true;
        }
    }
    return false;
}

void wk_push_seed(struct wk_link *link, uint32_t p)
{
    struct wk_fragment *fragment = &link->fragments[p];
    struct wk_push *push = &fragment->push;
    bool is_asked = fragment->pulled && (fragment->pull.flags & DL_PULL_SEED) != 0;
    if (!is_asked || !link->prepared || push->state != WK_PUSH_NONE || is_being_applied(fragment)) {
        return;
    }
    fragment->pulled = false;
    *push = (struct wk_push){
        .state = WK_PUSH_READY,
        .seed = true,
        .order = ++link->push_order,
        .head = {.round = fragment->pull.round,
                 .fragment = p,
                 .base_version = fragment->pull.version,
                 .step = link->step,
                 .steps = fragment->steps,
                 .tokens = fragment->tokens,
                 .trace = link->trace.made,
                 .lease = link->data.lease,
                 .cursor = link->data.cursor,
                 .codec = DL_CODEC_NONE,
                 .bytes = dl_codec_bytes(DL_CODEC_NONE, link->layout->fragments[p].padded_elements)},
    };
}

void wk_push_dropped(struct wk_link *link, uint32_t p)
{
    struct wk_fragment *fragment = &link->fragments[p];
    fragment->push = (struct wk_push){.state = WK_PUSH_NONE};
    wk_push_seed(link, p);
}

uint64_t wk_version_held(const struct wk_fragment *fragment)
{
    uint64_t held = fragment->version;
    for (uint32_t i = 0; i < WK_SLOTS; i++) {
        const struct wk_slot *slot = &fragment->slots[i];
        bool there = slot->state == WK_SLOT_COMPLETE || slot->state == WK_SLOT_APPLYING;
        if (there && !slot->forgotten && slot->update.version > held) {
            held = slot->update.version;
        }
    }
    return held;
}

void wk_fragment_wire(const struct wk_link *link, uint32_t p, struct dl_wire_fragment *out)
{
    const struct wk_fragment *fragment = &link->fragments[p];
    *out = (struct dl_wire_fragment){
        .fragment = p,
        .version = fragment->version,
        .applied_step = fragment->applied_step,
        .steps = fragment->steps,
        .tokens = fragment->tokens,
    };
}

/* --- leaving, reporting, views ----------------------------------------------------------------------------------- */

void wk_link_report(struct wk_link *link, double loss, uint32_t sequences, uint64_t parameter_hash)
{
    link->evaluations[link->evaluations_made % WK_EVALUATIONS_MAX] = (struct dl_wire_evaluation){
        .round = link->last_round,
        .tokens = link->tokens_all,
        .loss = loss,
        .sequences = sequences,
        .parameter_hash = parameter_hash,
    };
    link->evaluations_made++;
}

void wk_link_leave(struct wk_link *link, int64_t now_ns, bool preempted, const char *text)
{
    (void)now_ns;
    link->leaving = true;
    link->preempted = preempted;
    snprintf(link->leave_text, sizeof link->leave_text, "%s", text);
}

bool wk_link_has_left(const struct wk_link *link)
{
    for (uint32_t i = 0; i < link->shards; i++) {
        if (link->conns[i].state == WK_CONN_READY && !link->conns[i].goodbye_sent) {
            return false;
        }
    }
    return true;
}

const char *wk_link_trouble(const struct wk_link *link)
{
    return link->trouble;
}

bool wk_link_is_joined(const struct wk_link *link)
{
    return link->joined;
}

const struct dl_layout *wk_link_layout(const struct wk_link *link)
{
    return link->layout;
}

void wk_link_outcome(const struct wk_link *link, struct wk_outcome *outcome)
{
    *outcome = link->outcome;
}

void wk_link_fragment(const struct wk_link *link, uint32_t fragment, struct dl_wire_fragment *out)
{
    assert(fragment < wk_fragment_count(link));
    wk_fragment_wire(link, fragment, out);
}

void wk_link_view(const struct wk_link *link, struct wk_link_view *view)
{
    *view = (struct wk_link_view){
        .learner = link->wanted < 0 ? 0 : (uint32_t)link->wanted,
        .shards = link->shards,
        .step = link->step,
        .tokens = link->tokens,
        .ensemble_step = link->ensemble_step,
        .tokens_all = link->tokens_all,
        .token_budget = link->token_budget,
        .learners = link->learners,
        .updates_applied = link->updates_applied,
        .pushes_sent = link->pushes_sent,
        .last_round = link->last_round,
        .waited_ns = link->waited_ns,
        .busy_ns = link->busy_ns,
        .reconnects = link->reconnects,
        .trace_made = link->trace.made,
        .trace_lost = link->trace.lost,
    };
    memcpy(view->verdicts, link->verdicts, sizeof view->verdicts);
    for (uint32_t i = 0; i < link->shards; i++) {
        view->connected += link->conns[i].state == WK_CONN_READY;
    }
}

static const char *check_fragment(const struct wk_link *link, uint32_t p)
{
    const struct wk_fragment *fragment = &link->fragments[p];
    const struct wk_conn *conn = &link->conns[wk_shard_of(link, p)];
    unsigned receiving = 0;
    for (uint32_t i = 0; i < WK_SLOTS; i++) {
        const struct wk_slot *slot = &fragment->slots[i];
        receiving += slot->state == WK_SLOT_RECEIVING;
        if (slot->state != WK_SLOT_FREE && slot->received > slot->update.bytes) {
            return "a slot received more than was announced";
        }
        if (slot->state == WK_SLOT_COMPLETE && slot->received != slot->update.bytes) {
            return "a complete slot is not complete";
        }
    }
    if (receiving > 1) {
        return "two updates of one fragment are received at once";
    }
    if (conn->state != WK_CONN_READY && !conn->close_wanted &&
        (fragment->pulled || fragment->none_due || receiving > 0 || conn->awaits_pull || fragment->awaits_update)) {
        return "something of a lost connection is left";
    }
    if (fragment->push.state == WK_PUSH_MISSED && (!link->keep_missed || fragment->push.seed || fragment->push.kept)) {
        return "a push waits for a round that it cannot be for";
    }
    if (fragment->push.offset > fragment->push.head.bytes) {
        return "more of a push was sent than it has";
    }
    if (fragment->steps > link->step || fragment->tokens > link->tokens) {
        return "a fragment counts more than was trained";
    }
    return NULL;
}

const char *wk_link_check(const struct wk_link *link)
{
    const char *lease_fault = wk_lease_check(link);
    if (lease_fault != NULL) {
        return lease_fault;
    }
    bool all_adopted = link->layout != NULL;
    for (uint32_t p = 0; p < wk_fragment_count(link); p++) {
        const char *fault = check_fragment(link, p);
        if (fault != NULL) {
            return fault;
        }
        all_adopted = all_adopted && link->fragments[p].adopted;
    }
    if (link->joined != all_adopted) {
        return "joined means that every fragment has been adopted";
    }
    for (uint32_t i = 0; i < link->shards; i++) {
        const struct wk_conn *conn = &link->conns[i];
        if (conn->state == WK_CONN_READY && link->layout == NULL) {
            return "a connection is ready without a layout";
        }
        if (conn->trace_acked > conn->trace_sent || conn->trace_sent > link->trace.made) {
            return "more of the tape is acknowledged than was sent, or sent than was made";
        }
        if (link->trace.lost == 0 && conn->trace_acked + 1 < link->trace.first) {
            return "an entry of the tape is gone that a shard lacks";
        }
    }
    return NULL;
}
