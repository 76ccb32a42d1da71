#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/codec.h"
#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

/* --- pushes and their memory ----------------------------------------------------------------------------------------
 */

struct sy_incoming *sy_incoming_new(struct sy_server *server, struct sy_conn *conn,
                                    const struct dl_wire_push *announced)
{
    const struct dl_fragment *fragment = &server->layout->fragments[announced->fragment];
    /* The first state comes once, from one learner, and is as large as what it becomes: it is not held against the
     * bound. */
    struct sy_held_fragment *state = &server->fragments[sy_local_index(server, announced->fragment)];
    bool is_seed = state->pull_seed && state->pull_round == announced->round;
    if (!is_seed &&
        (announced->bytes > server->push_bytes_max || server->push_bytes > server->push_bytes_max - announced->bytes)) {
        return NULL;
    }
    struct sy_incoming *push = calloc(1, sizeof *push);
    uint8_t *encoded = sy_buffers_take(server->buffers, announced->bytes);
    double *squares = calloc(fragment->slice_count, sizeof *squares);
    if (push == NULL || encoded == NULL || squares == NULL) {
        free(push);
        sy_buffers_give(server->buffers, encoded);
        free(squares);
        return NULL;
    }
    *push = (struct sy_incoming){.next = state->pushes,
                                 .round = announced->round,
                                 .fragment = announced->fragment,
                                 .member = conn->member,
                                 .admission = conn->admission,
                                 .nonce = conn->nonce,
                                 .base_version = announced->base_version,
                                 .codec = (enum dl_codec)announced->codec,
                                 .intact = true,
                                 .begun_ns = server->now_ns,
                                 .bytes = announced->bytes,
                                 .tokens = announced->tokens,
                                 .encoded = encoded,
                                 .slice_squares = squares};
    snprintf(push->uid, sizeof push->uid, "%s", conn->uid);
    state->pushes = push;
    server->push_bytes += push->bytes;
    server->push_bytes_peak = DL_MAX(server->push_bytes_peak, server->push_bytes);
    return push;
}

void sy_incoming_drop(struct sy_server *server, struct sy_incoming *push)
{
    struct sy_held_fragment *state = &server->fragments[sy_local_index(server, push->fragment)];
    struct sy_conn *conn = sy_conn_of_member(server, push->member);
    if (conn != NULL && conn->admission == push->admission) {
        sy_conn_forget_push(conn, push);
    }
    for (struct sy_incoming **at = &state->pushes; *at != NULL; at = &(*at)->next) {
        if (*at == push) {
            *at = push->next;
            break;
        }
    }
    server->push_bytes -= push->bytes;
    sy_buffers_give(server->buffers, push->encoded);
    free(push->slice_squares);
    free(push);
}

/* Blocks never straddle slices, so a chunk's blocks fall into slices one after the other. */
void sy_incoming_measure(const struct sy_server *server, struct sy_incoming *push, uint64_t offset, uint32_t bytes)
{
    const struct dl_layout *layout = server->layout;
    const struct dl_fragment *fragment = &layout->fragments[push->fragment];
    size_t block_bytes = dl_codec_block_bytes(push->codec);
    uint64_t block = offset / block_bytes;
    uint64_t end = block + bytes / block_bytes;
    for (uint32_t i = 0; i < fragment->slice_count && block < end; i++) {
        const struct dl_slice *slice = &layout->slices[fragment->first_slice + i];
        uint64_t slice_end = slice->fragment_offset / DL_BLOCK + (slice->count + DL_BLOCK - 1) / DL_BLOCK;
        if (block >= slice_end) {
            continue;
        }
        uint64_t until = DL_MIN(end, slice_end);
        push->slice_squares[i] = dl_codec_sum_squares(push->codec, push->encoded + block * block_bytes, until - block,
                                                      push->slice_squares[i]);
        block = until;
    }
}

double sy_incoming_norm(const struct sy_server *server, const struct sy_incoming *push)
{
    return sy_merge_norm(push->slice_squares, server->layout->fragments[push->fragment].slice_count);
}

static struct sy_incoming *find_push(const struct sy_server *server, uint32_t fragment, uint64_t round, uint32_t member,
                                     uint64_t admission)
{
    struct sy_incoming *push = server->fragments[sy_local_index(server, fragment)].pushes;
    while (push != NULL &&
           !(push->round == round && push->member == member && (admission == 0 || push->admission == admission))) {
        push = push->next;
    }
    return push;
}

/* --- jobs -----------------------------------------------------------------------------------------------------------
 */

static void describe_input(struct sy_job_input *input, struct sy_incoming *push)
{
    push->in_job = true;
    input->member = push->member;
    input->codec = push->codec;
    input->encoded = push->encoded;
    input->slice_squares = push->slice_squares;
    input->who.admission = push->admission;
    input->who.nonce = push->nonce;
    input->who.base_version = push->base_version;
    snprintf(input->who.uid, sizeof input->who.uid, "%s", push->uid);
}

static struct sy_job *begin_job(struct sy_server *server, const struct sy_action *action, uint32_t inputs)
{
    struct sy_job *job = sy_job_new(inputs);
    if (job == NULL) {
        dl_err_set(&server->fatal, DL_ENOMEM, "merging fragment %u: no memory", action->fragment);
        return NULL;
    }
    job->local = sy_local_index(server, action->fragment);
    job->fragment = action->fragment;
    job->round = action->round;
    job->version = action->version;
    return job;
}

/* The totals of a job are what the core will have counted once it is committed, and all that was submitted before. */
static void submit(struct sy_server *server, struct sy_job *job)
{
    server->pending_rounds += job->seed ? 0 : 1;
    for (uint32_t i = 0; i < job->input_count; i++) {
        server->token_sum += job->inputs[i].who.tokens;
        server->saved[job->inputs[i].member].pending += job->seed ? 0 : 1;
    }
    sy_server_totals(server, &job->totals);
    job->member_count = sy_server_changed_members(server, &job->members);
    server->fragments[job->local].busy = true;
    server->fragments[job->local].closed_ns = server->now_ns;
    sy_jobs_submit(server->jobs, job);
}

static void merge(struct sy_server *server, const struct sy_action *action)
{
    const struct sy_participant *participants = NULL;
    uint32_t count = sy_core_participants(server->core, action->fragment, &participants);
    struct sy_job *job = begin_job(server, action, count);
    if (job == NULL) {
        return;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct sy_participant *from = &participants[i];
        struct sy_incoming *push = find_push(server, action->fragment, action->round, from->member, from->admission);
        if (push == NULL || !push->complete) {
            dl_err_set(&server->fatal, DL_EINVAL, "fragment %u round %" PRIu64 ": the push of learner %u is not there",
                       action->fragment, action->round, from->learner);
            sy_job_free(job);
            return;
        }
        describe_input(&job->inputs[i], push);
        struct sy_store_participant *who = &job->inputs[i].who;
        who->learner = from->learner;
        who->step = from->step;
        who->steps = from->steps;
        who->tokens = from->tokens;
        who->weight = from->weight;
        who->norm = from->norm;
        who->lease = from->lease;
        who->cursor = from->cursor;
    }
    struct sy_held_fragment *state = &server->fragments[job->local];
    state->arrival_ns = server->now_ns;
    for (const struct sy_incoming *push = state->pushes; push != NULL; push = push->next) {
        state->arrival_ns = push->in_job ? DL_MIN(state->arrival_ns, push->begun_ns) : state->arrival_ns;
    }
    struct sy_fragment_view view = {0};
    (void)sy_core_fragment(server->core, action->fragment, &view);
    dl_debug("merging round=%" PRIu64 " fragment=%u version=%" PRIu64 " have=%u need=%u asked=%u", action->round,
             action->fragment, action->version, count, view.need, view.asked);
    server->last_round = action->round;
    server->last_fragment = action->fragment;
    server->last_have = count;
    submit(server, job);
}

static void store_seed(struct sy_server *server, const struct sy_action *action)
{
    struct sy_incoming *push = find_push(server, action->fragment, action->round, action->member, 0);
    struct sy_job *job = push == NULL ? NULL : begin_job(server, action, 1);
    if (job == NULL) {
        dl_err_set(&server->fatal, DL_EINVAL, "fragment %u: the first state is not there", action->fragment);
        return;
    }
    job->seed = true;
    job->version = DL_MAX(action->version, 1);
    describe_input(&job->inputs[0], push);
    submit(server, job);
}

/* All pushes of a fragment's round and older ones: merged, or refused since. */
static void drop_round(struct sy_server *server, uint32_t local, uint64_t round)
{
    struct sy_incoming *push = server->fragments[local].pushes;
    while (push != NULL) {
        struct sy_incoming *next = push->next;
        if (push->round <= round) {
            push->in_job = false;
            sy_incoming_drop(server, push);
        }
        push = next;
    }
}

static void take_done(struct sy_server *server, struct sy_job *job)
{
    struct sy_held_fragment *state = &server->fragments[job->local];
    state->busy = false;
    server->pending_rounds -= job->seed ? 0 : 1;
    for (uint32_t i = 0; i < job->input_count; i++) {
        server->saved[job->inputs[i].member].pending -= job->seed ? 0 : 1;
    }
    sy_blob_drop(state->blob);
    state->blob = job->blob != NULL ? dl_take(job->blob) : dl_take(state->held);
    state->blob->is_held = false;
    drop_round(server, job->local, job->round);
    server->counters.commits++;
    sy_times_merged(server, job);
    if (!job->seed) {
        dl_histogram_add(&server->seconds.collect, (double)(state->closed_ns - state->pull_ns) / 1e9);
        dl_histogram_add(&server->seconds.merge, (double)job->merge_ns / 1e9);
        dl_histogram_add(&server->seconds.commit, (double)job->commit_ns / 1e9);
        dl_histogram_add(&server->seconds.total, (double)(server->now_ns - state->pull_ns) / 1e9);
        server->agreement = job->stats.agreement;
    }
    dl_debug("merged round=%" PRIu64 " fragment=%u version=%" PRIu64 " have=%u merge_ms=%.1f commit_ms=%.1f",
             job->round, job->fragment, job->version, job->input_count, (double)job->merge_ns / 1e6,
             (double)job->commit_ns / 1e6);
    if (job->error.rc != DL_OK) {
        dl_warn("round changed nothing round=%" PRIu64 " fragment=%u error=\"%s\"", job->round, job->fragment,
                job->error.text);
    }
    sy_core_on_committed(server->core, server->now_ns, job->fragment, job->merge_ns, job->commit_ns);
}

/* Nobody hears of the version's end, and the core of nothing at all, before it is durable. */
static void take_encoded(struct sy_server *server, struct sy_job *job)
{
    struct sy_held_fragment *state = &server->fragments[job->local];
    state->held = dl_take(job->blob);
    state->held->is_held = true;
    sy_times_offered(server, job->local);
    for (struct sy_conn *conn = server->conns; conn != NULL; conn = conn->next) {
        if (!sy_core_holds_back(server->core, conn->member, job->fragment)) {
            sy_conn_offer(conn, job->local);
        }
    }
}

static void take_ledger(struct sy_server *server, struct sy_job *job)
{
    switch (job->report) {
    case SY_JOB_ENCODED: break;
    case SY_JOB_DONE: sy_core_on_ledger_durable(server->core, server->now_ns, job->ledger.serial); break;
    case SY_JOB_DELAYED:
        server->counters.commit_failures++;
        dl_warn("leases of data have to wait error=\"%s\"", job->error.text);
        break;
    case SY_JOB_FAILED: server->fatal = job->error; break;
    }
    sy_job_free(job);
}

void sy_server_take_results(struct sy_server *server)
{
    for (struct sy_job *job = sy_jobs_result(server->jobs); job != NULL; job = sy_jobs_result(server->jobs)) {
        if (job->is_ledger) {
            take_ledger(server, job);
            continue;
        }
        if (job->task.run != NULL) {
            sy_checkpoint_task_done(server, job);
            sy_job_free(job);
            continue;
        }
        switch (job->report) {
        case SY_JOB_ENCODED: take_encoded(server, job); break;
        case SY_JOB_DONE: take_done(server, job); break;
        case SY_JOB_DELAYED:
            server->counters.commit_failures++;
            dl_debug("commit failed fragment=%u version=%" PRIu64 " error=\"%s\"", job->fragment, job->version,
                     job->error.text); /* The core warns, once. */
            sy_core_on_commit_delayed(server->core, server->now_ns, job->fragment, job->error.text);
            break;
        case SY_JOB_FAILED: server->fatal = job->error; break;
        }
        sy_job_free(job);
    }
}

/* --- actions --------------------------------------------------------------------------------------------------------
 */

static void broadcast(struct sy_server *server, uint32_t fragment)
{
    for (struct sy_conn *conn = server->conns; conn != NULL; conn = conn->next) {
        if (!sy_core_holds_back(server->core, conn->member, fragment)) {
            sy_conn_want(conn, sy_local_index(server, fragment));
        }
    }
}

static void tell_result(struct sy_server *server, const struct sy_action *action, struct sy_conn *conn)
{
    const struct dl_wire_result *result = &action->as.result;
    struct sy_incoming *push = sy_is_ours(server, result->fragment)
                                   ? find_push(server, result->fragment, result->round, action->member, 0)
                                   : NULL;
    if (result->verdict != DL_VERDICT_ACCEPTED) {
        dl_debug("push not merged learner=%d round=%" PRIu64 " fragment=%u verdict=%s",
                 conn == NULL ? -1 : (int)conn->learner, result->round, result->fragment,
                 dl_verdict_name((enum dl_verdict)result->verdict));
        /* A duplicate is another push than the one that is held. */
        if (push != NULL && result->verdict != DL_VERDICT_DUPLICATE && !push->in_job) {
            sy_incoming_drop(server, push);
        }
    }
    if (conn != NULL) {
        struct dl_wire_message message = {.type = DL_WIRE_RESULT};
        message.as.result = *result;
        sy_conn_send(conn, &message);
    }
}

static void send_pull(struct sy_server *server, const struct sy_action *action, struct sy_conn *conn)
{
    struct sy_held_fragment *state = &server->fragments[sy_local_index(server, action->as.pull.fragment)];
    if (state->pull_round != action->as.pull.round) {
        state->pull_round = action->as.pull.round;
        state->pull_ns = server->now_ns;
    }
    state->pull_seed = (action->as.pull.flags & DL_PULL_SEED) != 0;
    if (conn != NULL) {
        struct dl_wire_message message = {.type = DL_WIRE_PULL};
        message.as.pull = action->as.pull;
        message.as.pull.trace_acked = sy_tape_acked(conn);
        sy_conn_send(conn, &message);
    }
}

static void write_ledger(struct sy_server *server)
{
    struct sy_ledger_changes changes;
    sy_core_ledger_changes(server->core, &changes);
    struct sy_job *job = sy_job_new_ledger(&changes);
    if (job == NULL) {
        dl_err_set(&server->fatal, DL_ENOMEM, "the ledger of the data: no memory");
        return;
    }
    sy_jobs_submit(server->jobs, job);
}

static void send_lease(const struct sy_action *action, struct sy_conn *conn)
{
    if (conn != NULL) {
        struct dl_wire_message message = {.type = DL_WIRE_LEASE};
        message.as.lease = action->as.lease;
        sy_conn_send(conn, &message);
    }
}

static void send_marker(const struct sy_action *action, struct sy_conn *conn)
{
    if (conn != NULL) {
        struct dl_wire_message message = {.type = DL_WIRE_MARKER};
        message.as.marker = (struct dl_wire_marker){.id = action->as.marker.id};
        sy_conn_send(conn, &message);
    }
}

static void send_stop(const struct sy_action *action, struct sy_conn *conn)
{
    if (conn != NULL) {
        struct dl_wire_message message = {.type = DL_WIRE_STOP};
        message.as.stop = action->as.stop;
        sy_conn_send_last(conn, &message);
    }
}

static void send_peers(const struct sy_action *action, struct sy_conn *conn)
{
    if (conn != NULL) {
        struct dl_wire_message message = {.type = DL_WIRE_PEERS};
        message.as.peers = action->as.peers;
        sy_conn_send(conn, &message);
    }
}

static void carry_out(struct sy_server *server, const struct sy_action *action)
{
    struct sy_conn *conn = sy_conn_of_member(server, action->member);
    switch (action->type) {
    case SY_ACT_PULL: send_pull(server, action, conn); break;
    case SY_ACT_RESULT: tell_result(server, action, conn); break;
    case SY_ACT_MERGE: merge(server, action); break;
    case SY_ACT_SEED_STORE: store_seed(server, action); break;
    case SY_ACT_BROADCAST: broadcast(server, action->fragment); break;
    case SY_ACT_SEND:
        if (conn != NULL) {
            sy_conn_lacks(conn, sy_local_index(server, action->fragment));
        }
        break;
    case SY_ACT_STOP: send_stop(action, conn); break;
    case SY_ACT_PEERS: send_peers(action, conn); break;
    case SY_ACT_DISCONNECT:
        if (conn != NULL) {
            sy_conn_end(conn, -1, LWS_CLOSE_STATUS_POLICY_VIOLATION, action->text);
        }
        break;
    case SY_ACT_LEDGER: write_ledger(server); break;
    case SY_ACT_LEASE: send_lease(action, conn); break;
    case SY_ACT_MARKER: send_marker(action, conn); break;
    case SY_ACT_CUT: sy_checkpoint_cut(server, action->version); break;
    case SY_ACT_CUT_LEARNER: sy_checkpoint_learner(server, action->member, &action->as.marker); break;
    case SY_ACT_CUT_CLOSED: sy_checkpoint_closed(server, action->version); break;
    case SY_ACT_NOTE: dl_log(action->warn ? DL_LOG_WARN : DL_LOG_INFO, "%s", action->text); break;
    }
}

void sy_server_actions(struct sy_server *server)
{
    static struct sy_action action; /* Network thread only; some hundred bytes that need no clearing each time. */
    if (server->draining_actions) {
        return;
    }
    server->draining_actions = true;
    bool more = true;
    while (more) {
        while (sy_core_next_action(server->core, &action)) {
            carry_out(server, &action);
        }
        more = server->leaves_waiting;
        sy_conn_tell_leaves(server);
    }
    server->draining_actions = false;
    sy_server_reschedule(server);
}
