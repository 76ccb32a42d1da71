#include <inttypes.h>
#include <string.h>

#include "common/codec.h"
#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

/* --- HELLO ----------------------------------------------------------------------------------------------------------
 */

/* The first tensor table defines the layout; it may still be replaced while nothing was made with it. */
static enum dl_rc take_layout(struct sy_server *server, const struct dl_wire_hello *hello, struct dl_err *err)
{
    bool in_use = false;
    for (uint32_t i = 0; i < server->fragment_count; i++) {
        const struct sy_held_fragment *fragment = &server->fragments[i];
        in_use = in_use || fragment->blob != NULL || fragment->pushes != NULL || fragment->busy;
    }
    for (const struct sy_conn *conn = server->conns; conn != NULL; conn = conn->next) {
        in_use = in_use || conn->member != SY_NO_MEMBER;
    }
    return server->layout == NULL || !in_use
               ? sy_server_adopt_layout(server, hello->tensors, hello->tensors_bytes, err)
               : sy_server_check_layout(server, hello->tensors, hello->tensors_bytes, err);
}

static void note_join(struct sy_conn *conn, const struct dl_wire_hello *hello, const struct dl_wire_welcome *welcome)
{
    struct sy_server *server = conn->server;
    const char *role = conn->role == DL_ROLE_LEARNER ? "learner" : "evaluator";
    dl_info("joined learner=%u role=%s uid=%s admission=%" PRIu64 " peer=%s step=%" PRIu64, welcome->learner, role,
            hello->uid, welcome->admission, conn->peer, hello->step);
    if (server->store != NULL) {
        sy_store_note(server->store, "join", welcome->learner, welcome->admission, hello->uid, hello->step, role);
    }
}

static void welcome(struct sy_conn *conn, uint32_t member, const struct dl_wire_hello *hello,
                    struct dl_wire_message *message)
{
    struct sy_server *server = conn->server;
    struct dl_wire_welcome *welcome = &message->as.welcome;
    struct sy_conn *before = sy_conn_of_member(server, member);
    if (before != NULL) {
        before->member = SY_NO_MEMBER; /* The slot goes on with the new connection. */
        sy_conn_end(before, -1, LWS_CLOSE_STATUS_NORMAL, "the same process has connected again");
    }
    welcome->fragments_total = server->spec->sync.fragments;
    welcome->layout = (uint8_t)server->spec->sync.layout;
    welcome->layout_hash = server->layout->hash;
    conn->state = SY_CONN_JOINED;
    conn->member = member;
    conn->learner = welcome->learner;
    conn->admission = welcome->admission;
    conn->nonce = hello->nonce;
    conn->role = (enum dl_role)hello->role;
    snprintf(conn->uid, sizeof conn->uid, "%s", hello->uid);
    server->member_conns[member] = conn;
    sy_tape_join(conn, hello, welcome);
    note_join(conn, hello, welcome);
    sy_conn_send(conn, message);
}

static enum dl_rc on_hello(struct sy_conn *conn, const struct dl_wire_hello *hello)
{
    struct sy_server *server = conn->server;
    struct dl_wire_refuse refuse = {0};
    struct dl_err err;
    /* Whether job and shard are the right ones is the core's to say; only then do the tensors matter. */
    bool of_this_job = strcmp(hello->job, server->spec->name) == 0 && hello->shard == server->options->shard;
    enum dl_rc rc = of_this_job ? take_layout(server, hello, &err) : DL_OK;
    if (rc != DL_OK) {
        refuse.code = rc == DL_EPROTO ? DL_REFUSE_MALFORMED : DL_REFUSE_LAYOUT;
        snprintf(refuse.text, sizeof refuse.text, "%.*s", (int)sizeof refuse.text - 1, err.text);
        server->counters.refusals++;
        sy_conn_refuse(conn, &refuse);
        return DL_OK;
    }
    static struct dl_wire_message answer; /* Large; network thread only. */
    memset(&answer, 0, sizeof answer);
    answer.type = DL_WIRE_WELCOME;
    uint32_t member = SY_NO_MEMBER;
    rc = sy_core_on_hello(server->core, server->now_ns, hello, &member, &answer.as.welcome, &refuse);
    if (rc == DL_OK) {
        welcome(conn, member, hello, &answer);
    } else {
        sy_conn_refuse(conn, &refuse);
    }
    return DL_OK;
}

/* --- pushes ---------------------------------------------------------------------------------------------------------
 */

static struct sy_transfer *find_transfer(struct sy_conn *conn, uint64_t id)
{
    for (uint32_t i = 0; i < conn->transfer_count; i++) {
        if (conn->transfers[i].id == id) {
            return &conn->transfers[i];
        }
    }
    return NULL;
}

/* Transfers of pushes that were refused may end early: nothing is waited for. */
bool sy_conn_awaits_push(const struct sy_conn *conn)
{
    for (uint32_t i = 0; i < conn->transfer_count; i++) {
        if (conn->transfers[i].push != NULL) {
            return true;
        }
    }
    return false;
}

void sy_conn_forget_push(struct sy_conn *conn, const struct sy_incoming *push)
{
    for (uint32_t i = 0; i < conn->transfer_count; i++) {
        if (conn->transfers[i].push == push) {
            conn->transfers[i].push = NULL;
            sy_socket_drop_chunk(conn);
        }
    }
}

/* The memory bound is reached: the learner keeps what it has for the next pull, as with any push that is lost. */
static void turn_away(struct sy_conn *conn, const struct dl_wire_push *push)
{
    struct sy_server *server = conn->server;
    server->counters.push_memory_refused++;
    dl_warn("no memory for a push learner=%u round=%" PRIu64 " fragment=%u bytes=%" PRIu64 " held=%" PRIu64
            " limit=%" PRIu64,
            conn->learner, push->round, push->fragment, push->bytes, server->push_bytes, server->push_bytes_max);
    struct dl_wire_push_none none = {.round = push->round, .fragment = push->fragment, .reason = DL_VERDICT_ABORTED};
    sy_core_on_push_none(server->core, server->now_ns, conn->member, &none);
    struct dl_wire_message message = {.type = DL_WIRE_RESULT};
    message.as.result =
        (struct dl_wire_result){.round = push->round, .fragment = push->fragment, .verdict = DL_VERDICT_ABORTED};
    sy_conn_send(conn, &message);
}

/* What a push of this fragment has to weigh; UINT64_MAX, which nothing matches, when codec or fragment is wrong. */
static uint64_t expected_bytes(const struct sy_server *server, const struct dl_wire_push *push)
{
    if (!sy_is_ours(server, push->fragment)) {
        return UINT64_MAX;
    }
    const struct sy_held_fragment *state = &server->fragments[sy_local_index(server, push->fragment)];
    bool seed = state->pull_seed && state->pull_round == push->round;
    enum dl_codec codec = seed ? DL_CODEC_NONE : server->spec->sync.compression;
    return push->codec == (uint8_t)codec
               ? dl_codec_bytes(codec, server->layout->fragments[push->fragment].padded_elements)
               : UINT64_MAX;
}

/* A learner gives up a push in mid-transfer when it is refused or pulled anew; its next PUSH of the fragment says so. */
static void drop_given_up(struct sy_conn *conn, uint32_t fragment)
{
    for (uint32_t i = conn->transfer_count; i-- > 0;) {
        if (conn->transfers[i].fragment == fragment && conn->transfers[i].push == NULL) {
            conn->transfers[i] = conn->transfers[--conn->transfer_count];
        }
    }
}

static enum dl_rc on_push(struct sy_conn *conn, const struct dl_wire_push *announced, struct dl_err *err)
{
    struct sy_server *server = conn->server;
    drop_given_up(conn, announced->fragment);
    if (conn->transfer_count == conn->transfers_max || find_transfer(conn, announced->transfer) != NULL) {
        return dl_err_set(err, DL_EPROTO, "push: transfer %" PRIu64 " is %s", announced->transfer,
                          conn->transfer_count == conn->transfers_max ? "one too many" : "under way already");
    }
    if (announced->bytes == 0) {
        return dl_err_set(err, DL_EPROTO, "push: no bytes");
    }
    if (announced->trace > conn->trace_received) {
        return dl_err_set(err, DL_EPROTO, "push: depends on entry %" PRIu64 " of the tape, %" PRIu64 " have come",
                          announced->trace, conn->trace_received);
    }
    struct sy_incoming *push = NULL;
    enum dl_verdict verdict =
        sy_core_on_push(server->core, server->now_ns, conn->member, announced, expected_bytes(server, announced));
    if (verdict == DL_VERDICT_ACCEPTED) {
        push = sy_incoming_new(server, conn, announced);
        if (push == NULL) {
            turn_away(conn, announced);
        }
    }
    conn->transfers[conn->transfer_count++] = (struct sy_transfer){
        .id = announced->transfer, .bytes = announced->bytes, .fragment = announced->fragment, .push = push};
    conn->transfer_ns = server->now_ns;
    return DL_OK;
}

/* Chunks come in order, each whole codec blocks. */
static enum dl_rc chunk_begin(void *context, uint64_t id, uint64_t offset, uint32_t bytes, uint8_t **into,
                              struct dl_err *err)
{
    struct sy_conn *conn = context;
    const struct sy_transfer *transfer = find_transfer(conn, id);
    if (transfer == NULL) {
        return dl_err_set(err, DL_EPROTO, "chunk of transfer %" PRIu64 ", which is not under way", id);
    }
    uint64_t left = transfer->bytes - transfer->received;
    if (offset != transfer->received || bytes > left) {
        return dl_err_set(err, DL_EPROTO,
                          "chunk of transfer %" PRIu64 " at %" PRIu64 " with %u bytes: expected the next of %" PRIu64
                          " bytes at %" PRIu64,
                          id, offset, bytes, transfer->bytes, transfer->received);
    }
    if (transfer->push != NULL && bytes % dl_codec_block_bytes(transfer->push->codec) != 0) {
        return dl_err_set(err, DL_EPROTO, "chunk of transfer %" PRIu64 " has %u data bytes, not whole blocks of %zu",
                          id, bytes, dl_codec_block_bytes(transfer->push->codec));
    }
    *into = transfer->push == NULL ? NULL : transfer->push->encoded + offset;
    conn->transfer_ns = conn->server->now_ns;
    return DL_OK;
}

static void push_is_complete(struct sy_conn *conn, struct sy_incoming *push)
{
    struct sy_server *server = conn->server;
    push->complete = true;
    dl_histogram_add(&server->seconds.push, (double)(server->now_ns - push->begun_ns) / 1e9);
    double norm = sy_incoming_norm(server, push);
    if (push->intact) {
        sy_checkpoint_in_flight(server, push, push->tokens);
    }
    sy_core_on_push_received(server->core, server->now_ns, conn->member, push->round, push->fragment, push->intact,
                             norm);
}

static enum dl_rc chunk_end(void *context, uint64_t id, const uint8_t *data, uint32_t bytes, bool intact,
                            struct dl_err *err)
{
    struct sy_conn *conn = context;
    struct sy_server *server = conn->server;
    struct sy_transfer *transfer = find_transfer(conn, id);
    (void)err;
    if (transfer == NULL) {
        return DL_OK;
    }
    struct sy_incoming *push = transfer->push;
    if (push != NULL && data != NULL) {
        if (intact) {
            sy_incoming_measure(server, push, transfer->received, bytes);
        } else {
            push->intact = false;
        }
    }
    transfer->received += bytes;
    if (transfer->received == transfer->bytes) {
        *transfer = conn->transfers[--conn->transfer_count];
        if (push != NULL) {
            push_is_complete(conn, push);
        }
    }
    return DL_OK;
}

/* --- messages -------------------------------------------------------------------------------------------------------
 */

static enum dl_rc admit(void *context, enum dl_wire_type type, struct dl_err *err)
{
    const struct sy_conn *conn = context;
    switch (type) {
    case DL_WIRE_HELLO: return conn->state == SY_CONN_OPEN ? DL_OK : dl_err_set(err, DL_EPROTO, "a second hello");
    case DL_WIRE_META:
    case DL_WIRE_PUSH:
    case DL_WIRE_PUSH_NONE:
    case DL_WIRE_CHUNK:
    case DL_WIRE_EVALUATION:
    case DL_WIRE_HEARTBEAT:
    case DL_WIRE_GOODBYE:
    case DL_WIRE_TRACE:
    case DL_WIRE_LEASE_REQUEST:
    case DL_WIRE_MARKER:
    case DL_WIRE_HELD:
    case DL_WIRE_RECOVERED:
        return conn->state == SY_CONN_JOINED ? DL_OK
                                             : dl_err_set(err, DL_EPROTO, "%s before hello", dl_wire_type_name(type));
    case DL_WIRE_WELCOME:
    case DL_WIRE_REFUSE:
    case DL_WIRE_PULL:
    case DL_WIRE_RESULT:
    case DL_WIRE_UPDATE:
    case DL_WIRE_LEASE:
    case DL_WIRE_STOP:
    case DL_WIRE_PEERS: break;
    }
    return dl_err_set(err, DL_EPROTO, "%s comes from a syncer, not from a learner", dl_wire_type_name(type));
}

/* A joiner asks whether what a peer could give it is what this syncer holds; it is told what that is. */
static enum dl_rc on_held(struct sy_conn *conn, const struct dl_wire_held *held, struct dl_err *err)
{
    struct sy_server *server = conn->server;
    if (!sy_is_ours(server, held->fragment)) {
        return dl_err_set(err, DL_EPROTO, "held: fragment %u is not of this shard", held->fragment);
    }
    const struct sy_blob *blob = server->fragments[sy_local_index(server, held->fragment)].blob;
    bool same = blob != NULL && blob->version == held->version && blob->content_hash == held->content_hash;
    sy_core_on_held(server->core, server->now_ns, conn->member, held->fragment, same);
    struct dl_wire_message message = {.type = DL_WIRE_HELD};
    message.as.held = (struct dl_wire_held){.fragment = held->fragment,
                                            .version = blob == NULL ? 0 : blob->version,
                                            .content_hash = blob == NULL ? 0 : blob->content_hash};
    sy_conn_send(conn, &message);
    return DL_OK;
}

static void on_recovered(struct sy_conn *conn, const struct dl_wire_recovered *recovered)
{
    struct sy_server *server = conn->server;
    sy_core_on_recovered(server->core, server->now_ns, conn->member, recovered);
    if (server->store != NULL) {
        sy_store_note(server->store, "recovered", conn->learner, conn->admission, recovered->uid, recovered->step,
                      "state of a peer");
    }
}

static enum dl_rc on_learner_message(struct sy_conn *conn, const struct dl_wire_message *message, struct dl_err *err)
{
    struct sy_server *server = conn->server;
    if (conn->role != DL_ROLE_LEARNER) {
        return dl_err_set(err, DL_EPROTO, "%s from an observer", dl_wire_type_name(message->type));
    }
    if (message->type == DL_WIRE_HELD) {
        return on_held(conn, &message->as.held, err);
    }
    if (message->type == DL_WIRE_RECOVERED) {
        on_recovered(conn, &message->as.recovered);
    } else if (message->type == DL_WIRE_META) {
        sy_core_on_meta(server->core, server->now_ns, conn->member, &message->as.meta);
    } else if (message->type == DL_WIRE_PUSH) {
        return on_push(conn, &message->as.push, err);
    } else if (message->type == DL_WIRE_TRACE) {
        return sy_tape_take(conn, &message->as.trace, err);
    } else if (message->type == DL_WIRE_LEASE_REQUEST) {
        sy_core_on_lease_request(server->core, server->now_ns, conn->member, &message->as.lease_request);
    } else if (message->type == DL_WIRE_MARKER) {
        sy_core_on_marker(server->core, server->now_ns, conn->member, &message->as.marker);
    } else {
        sy_core_on_push_none(server->core, server->now_ns, conn->member, &message->as.push_none);
    }
    return DL_OK;
}

static enum dl_rc control(void *context, const struct dl_wire_message *message, struct dl_err *err)
{
    struct sy_conn *conn = context;
    struct sy_server *server = conn->server;
    switch (message->type) {
    case DL_WIRE_HELLO: return on_hello(conn, &message->as.hello);
    case DL_WIRE_META:
    case DL_WIRE_PUSH:
    case DL_WIRE_PUSH_NONE:
    case DL_WIRE_LEASE_REQUEST:
    case DL_WIRE_MARKER:
    case DL_WIRE_TRACE:
    case DL_WIRE_HELD:
    case DL_WIRE_RECOVERED: return on_learner_message(conn, message, err);
    case DL_WIRE_EVALUATION:
        if (conn->role != DL_ROLE_EVALUATOR) {
            return dl_err_set(err, DL_EPROTO, "an evaluation from a learner");
        }
        sy_core_on_evaluation(server->core, server->now_ns, conn->member, &message->as.evaluation);
        return DL_OK;
    case DL_WIRE_GOODBYE:
        sy_conn_end(conn, message->as.goodbye.preempted != 0 ? SY_LEAVE_PREEMPTED : SY_LEAVE_GOODBYE,
                    LWS_CLOSE_STATUS_NORMAL, message->as.goodbye.text);
        return DL_OK;
    case DL_WIRE_HEARTBEAT:
    case DL_WIRE_CHUNK:
    case DL_WIRE_WELCOME:
    case DL_WIRE_REFUSE:
    case DL_WIRE_PULL:
    case DL_WIRE_RESULT:
    case DL_WIRE_UPDATE:
    case DL_WIRE_LEASE:
    case DL_WIRE_PEERS:
    case DL_WIRE_STOP: return DL_OK; /* Heard is all there is to a heartbeat; `admit` let none of the others through. */
    }
    return DL_OK;
}

/* A peer that speaks another version of the protocol is told so in the words of this one. */
static bool refuse_version(struct sy_conn *conn)
{
    const struct sy_receive *receive = &conn->receive;
    if (conn->state != SY_CONN_OPEN || receive->header_have < DL_WIRE_HEADER_BYTES ||
        memcmp(receive->header, "DLC1", 4) != 0 || receive->header[4] == DL_WIRE_VERSION) {
        return false;
    }
    struct dl_wire_refuse refuse = {.code = DL_REFUSE_VERSION};
    snprintf(refuse.text, sizeof refuse.text, "protocol version %u: this syncer speaks %d", receive->header[4],
             DL_WIRE_VERSION);
    conn->server->counters.refusals++;
    sy_conn_refuse(conn, &refuse);
    return true;
}

void sy_conn_heard(struct sy_conn *conn)
{
    struct sy_server *server = conn->server;
    if (conn->state == SY_CONN_CLOSING) {
        return; /* Whatever it says now comes too late; the close is on its way. */
    }
    if (conn->wsi != NULL) {
        lws_validity_confirmed(conn->wsi);
    }
    if (conn->member != SY_NO_MEMBER) {
        conn->heard_ns = server->now_ns;
        sy_core_on_heard(server->core, server->now_ns, conn->member);
    }
}

void sy_conn_receive(struct sy_conn *conn, const uint8_t *bytes, size_t size, bool last)
{
    struct sy_server *server = conn->server;
    const struct sy_receive_sink sink = {
        .context = conn, .chunk_begin = chunk_begin, .chunk_end = chunk_end, .control = control, .admit = admit};
    struct dl_err err;
    if (conn->state == SY_CONN_CLOSING) {
        return;
    }
    server->counters.messages_in += last ? 1 : 0;
    enum dl_rc rc = sy_receive_feed(&conn->receive, &sink, &server->scratch, bytes, size, last, &err);
    if (rc != DL_OK && !refuse_version(conn)) {
        bool faultless = rc == DL_EFULL;
        sy_conn_end(conn, faultless ? SY_LEAVE_LOST : SY_LEAVE_PROTOCOL,
                    faultless ? LWS_CLOSE_STATUS_POLICY_VIOLATION : LWS_CLOSE_STATUS_PROTOCOL_ERR, err.text);
    }
}
