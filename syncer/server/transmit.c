#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/blob.h"
#include "syncer/server/internal.h"

/* Larger than any control message of ours: a WELCOME with all fragments. */
#define ENCODE_BYTES (DL_WIRE_HEADER_BYTES + DL_WIRE_CONTROL_PAYLOAD_MAX)

static struct sy_control *encode(struct sy_server *server, const struct dl_wire_message *message)
{
    struct dl_err err;
    size_t size = 0;
    enum dl_rc rc = dl_wire_encode(message, server->encode_buffer, ENCODE_BYTES, &size, &err);
    if (rc != DL_OK) {
        dl_error("cannot encode a message type=%s error=\"%s\"", dl_wire_type_name(message->type), err.text);
        return NULL;
    }
    struct sy_control *control = malloc(sizeof *control + LWS_PRE + size);
    if (control != NULL) {
        control->next = NULL;
        control->size = size;
        memcpy(control->bytes + LWS_PRE, server->encode_buffer, size);
    }
    return control;
}

void sy_conn_send(struct sy_conn *conn, const struct dl_wire_message *message)
{
    struct sy_control *control = conn->wsi == NULL ? NULL : encode(conn->server, message);
    if (control == NULL) {
        return;
    }
    if (conn->control_count >= SY_CONTROL_QUEUE_MAX || conn->control_bytes >= SY_CONTROL_QUEUE_BYTES_MAX) {
        free(control);
        conn->server->counters.slow_closed++;
        sy_conn_end(conn, SY_LEAVE_LOST, LWS_CLOSE_STATUS_POLICY_VIOLATION, "reads too slowly: too many messages wait");
        return;
    }
    if (conn->last != NULL) {
        conn->last->next = control;
    } else {
        conn->first = control;
    }
    conn->last = control;
    conn->control_count++;
    conn->control_bytes += control->size;
    lws_callback_on_writable(conn->wsi);
}

/* --- updates --------------------------------------------------------------------------------------------------------
 */

/* A version that is not durable: the receiver drops what it has of it when something else comes for the fragment. */
static void give_up_held(struct sy_conn *conn, uint32_t local)
{
    if (conn->offered[local]) {
        conn->offered[local] = false;
        conn->offered_count--;
    }
    if (conn->parked[local] != NULL && conn->parked[local]->is_held) {
        sy_blob_drop(dl_take(conn->parked[local]));
        conn->parked_count--;
    }
    if (conn->sending != NULL && conn->sending->is_held &&
        sy_local_index(conn->server, conn->sending->fragment) == local) {
        sy_blob_drop(dl_take(conn->sending));
    }
}

void sy_conn_drop_updates(struct sy_conn *conn)
{
    conn->wanted_count = conn->offered_count = conn->lacked_count = conn->parked_count = 0;
    sy_blob_drop(dl_take(conn->sending));
    for (uint32_t i = 0; i < conn->server->fragment_count; i++) {
        conn->wanted[i] = conn->offered[i] = conn->lacked[i] = false;
        sy_blob_drop(dl_take(conn->parked[i]));
    }
}

/* After it nothing is committed that anybody waits for. */
void sy_conn_send_last(struct sy_conn *conn, const struct dl_wire_message *message)
{
    for (uint32_t i = 0; i < conn->server->fragment_count; i++) {
        give_up_held(conn, i);
    }
    free(conn->farewell);
    conn->farewell = conn->wsi == NULL ? NULL : encode(conn->server, message);
    if (conn->farewell != NULL) {
        lws_callback_on_writable(conn->wsi);
    }
}

void sy_conn_want(struct sy_conn *conn, uint32_t local)
{
    if (conn->wsi == NULL || conn->state != SY_CONN_JOINED) {
        return;
    }
    const struct sy_blob *blob = conn->server->fragments[local].blob;
    give_up_held(conn, local); /* What has become durable is not. */
    lws_callback_on_writable(conn->wsi);
    if (blob != NULL && (conn->sending == blob || conn->parked[local] == blob)) {
        return;
    }
    if (conn->wanted[local]) {
        conn->server->counters.versions_skipped++;
        return;
    }
    conn->wanted[local] = true;
    conn->wanted_count++;
}

void sy_conn_lacks(struct sy_conn *conn, uint32_t local)
{
    sy_conn_want(conn, local);
    if (conn->wanted[local] && !conn->lacked[local]) {
        conn->lacked[local] = true;
        conn->lacked_count++;
    }
}

void sy_conn_offer(struct sy_conn *conn, uint32_t local)
{
    if (conn->wsi == NULL || conn->state != SY_CONN_JOINED || conn->farewell != NULL || conn->offered[local]) {
        return;
    }
    conn->offered[local] = true;
    conn->offered_count++;
    lws_callback_on_writable(conn->wsi);
}

/* What this connection lacks of a fragment: the durable version first, whatever it was when it was asked for. */
static struct sy_blob *take_turn(struct sy_conn *conn, uint32_t local)
{
    const struct sy_held_fragment *fragment = &conn->server->fragments[local];
    if (conn->wanted[local]) {
        conn->wanted[local] = false;
        conn->wanted_count--;
        conn->lacked_count -= conn->lacked[local] ? 1 : 0;
        conn->lacked[local] = false;
        return fragment->blob;
    }
    if (conn->offered[local]) {
        conn->offered[local] = false;
        conn->offered_count--;
        return fragment->held;
    }
    return NULL;
}

/* Of what is lacked the version that was made last: it stays the newest for longest. One that is merged anew before its turn
 * comes is sent once, as that. */
static uint32_t newest_lacked(const struct sy_conn *conn)
{
    uint32_t newest = conn->next_local;
    uint64_t round = 0;
    for (uint32_t i = 0; i < conn->server->fragment_count; i++) {
        const struct sy_blob *blob = conn->server->fragments[i].blob;
        if (conn->lacked[i] && (!conn->lacked[newest] || (blob != NULL && blob->round > round))) {
            newest = i;
            round = blob == NULL ? 0 : blob->round;
        }
    }
    return newest;
}

/* Picks the next fragment: what is lacked first, then in turn. */
static void begin_update(struct sy_conn *conn)
{
    struct sy_blob *blob = NULL;
    while (blob == NULL && conn->lacked_count > 0) {
        blob = take_turn(conn, newest_lacked(conn));
    }
    while (blob == NULL && conn->wanted_count + conn->offered_count > 0) {
        blob = take_turn(conn, conn->next_local);
        bool has_more = conn->wanted[conn->next_local] || conn->offered[conn->next_local];
        conn->next_local = (conn->next_local + (has_more ? 0 : 1)) % conn->server->fragment_count;
    }
    if (blob == NULL) {
        return;
    }
    conn->sending = sy_blob_hold(blob);
    conn->sending_chunk = 0;
    struct dl_wire_message message = {.type = DL_WIRE_UPDATE};
    message.as.update = (struct dl_wire_update){.transfer = blob->transfer,
                                                .fragment = blob->fragment,
                                                .version = blob->version,
                                                .round = blob->round,
                                                .codec = (uint8_t)blob->codec,
                                                .bytes = blob->bytes,
                                                .content_hash = blob->content_hash,
                                                .participants = blob->participants};
    sy_conn_send(conn, &message);
}

/* --- writing --------------------------------------------------------------------------------------------------------
 */

void sy_conn_release_left(struct sy_conn *conn)
{
    sy_blob_drop(conn->left.blob);
    free(conn->left.copy);
    conn->left = (struct sy_left){0};
}

/* The socket took the beginning of a frame: the rest goes first when it takes more. A chunk's is sent from where it lies. */
static bool keep_left(struct sy_conn *conn, const uint8_t *rest, size_t bytes, struct sy_blob *blob)
{
    assert(conn->left.bytes == 0);
    if (blob != NULL) {
        conn->left = (struct sy_left){.at = rest, .bytes = bytes, .blob = sy_blob_hold(blob)};
        return true;
    }
    uint8_t *copy = malloc(bytes);
    if (copy != NULL) {
        memcpy(copy, rest, bytes);
        conn->left = (struct sy_left){.at = copy, .bytes = bytes, .copy = copy};
    }
    return copy != NULL;
}

/* What the socket takes of `size` bytes; false: it is broken. */
static bool send_some(const struct sy_conn *conn, const uint8_t *bytes, size_t size, size_t *sent)
{
    ssize_t taken = send(conn->fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    *sent = taken < 0 ? 0 : (size_t)taken;
    return taken >= 0 || errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
}

static bool write_left(struct sy_conn *conn)
{
    size_t sent;
    if (!send_some(conn, conn->left.at, conn->left.bytes, &sent)) {
        return false;
    }
    conn->left.at += sent;
    conn->left.bytes -= sent;
    if (conn->left.bytes == 0) {
        sy_conn_release_left(conn);
    }
    return true;
}

/* A frame of its own, whose head goes before the bytes, where there is room for it (LWS_PRE); of `blob`, or none. */
static bool write_frame(struct sy_conn *conn, enum dl_ws_opcode opcode, uint8_t *bytes, size_t size,
                        struct sy_blob *blob)
{
    uint8_t head[DL_WS_HEAD_MAX];
    size_t length = dl_ws_head(opcode, size, NULL, head), sent;
    static_assert(DL_WS_HEAD_MAX <= LWS_PRE, "room for a frame's head");
    bytes -= length;
    size += length;
    memcpy(bytes, head, length);
    if (conn->ssl != NULL) { /* What is not taken at once libwebsockets keeps (one message at most) and sends first. */
        return lws_write(conn->wsi, bytes, size, LWS_WRITE_RAW) >= (int)size;
    }
    return send_some(conn, bytes, size, &sent) && (sent == size || keep_left(conn, bytes + sent, size - sent, blob));
}

static bool write_bytes(struct sy_conn *conn, uint8_t *bytes, size_t size, struct sy_blob *blob)
{
    conn->server->counters.bytes_out += size;
    conn->server->counters.messages_out++;
    return write_frame(conn, DL_WS_BINARY, bytes, size, blob);
}

static bool write_control(struct sy_conn *conn)
{
    struct sy_control *control = conn->first;
    conn->first = control->next;
    if (conn->first == NULL) {
        conn->last = NULL;
    }
    conn->control_count--;
    conn->control_bytes -= control->size;
    bool written = write_bytes(conn, control->bytes + LWS_PRE, control->size, NULL);
    free(control);
    return written;
}

/* Of a version that is not durable the last chunk waits, and leaves its turn to others. */
static bool write_chunk(struct sy_conn *conn)
{
    size_t size;
    struct sy_blob *blob = conn->sending;
    uint8_t *frame = sy_blob_frame(blob, conn->sending_chunk, &size);
    bool written = write_bytes(conn, frame, size, blob);
    conn->sending_chunk++;
    if (conn->sending_chunk == blob->chunk_count) {
        sy_times_sent(conn->server, blob);
        sy_blob_drop(dl_take(conn->sending));
    } else if (blob->is_held && conn->sending_chunk == blob->chunk_count - 1) {
        uint32_t local = sy_local_index(conn->server, blob->fragment);
        conn->parked[local] = dl_take(conn->sending);
        conn->parked_count++;
        sy_times_parked(conn->server, local);
    }
    return written;
}

/* The first of those whose last chunk waited and has become durable; NULL: none. */
static struct sy_blob **released(const struct sy_conn *conn)
{
    for (uint32_t i = 0; conn->parked_count > 0 && i < conn->server->fragment_count; i++) {
        if (conn->parked[i] != NULL && !conn->parked[i]->is_held) {
            return &conn->parked[i];
        }
    }
    return NULL;
}

static bool write_last_chunk(struct sy_conn *conn, struct sy_blob **parked)
{
    size_t size;
    struct sy_blob *blob = dl_take(*parked);
    conn->parked_count--;
    uint8_t *frame = sy_blob_frame(blob, blob->chunk_count - 1, &size);
    bool written = write_bytes(conn, frame, size, blob);
    sy_times_sent(conn->server, blob);
    sy_blob_drop(blob);
    return written;
}

static bool write_pong(struct sy_conn *conn)
{
    uint8_t frame[LWS_PRE + DL_WS_CONTROL_MAX];
    memcpy(frame + LWS_PRE, conn->pong, conn->pong_bytes);
    conn->pong_due = false;
    return write_frame(conn, DL_WS_PONG, frame + LWS_PRE, conn->pong_bytes, NULL);
}

/* The last that goes out. Then what the peer still sends is thrown away until its own close comes, so that it gets to read
 * why: a socket that is closed with bytes unread takes back what is on its way. */
static bool write_close(struct sy_conn *conn)
{
    if (conn->close_sent) { /* It is out: nothing is held back when more can be written. */
        if (conn->close_received) {
            sy_socket_finish(conn);
        }
        return true;
    }
    uint8_t frame[LWS_PRE + 2 + sizeof conn->close_text];
    size_t size = conn->close_code == DL_WS_CODE_NONE ? 0 : 2 + strlen(conn->close_text);
    frame[LWS_PRE] = (uint8_t)(conn->close_code >> 8);
    frame[LWS_PRE + 1] = (uint8_t)conn->close_code;
    memcpy(frame + LWS_PRE + 2, conn->close_text, strlen(conn->close_text));
    conn->close_sent = true;
    lws_callback_on_writable(conn->wsi);
    return write_frame(conn, DL_WS_CLOSE, frame + LWS_PRE, size, NULL);
}

static bool has_something_to_send(const struct sy_conn *conn)
{
    return conn->left.bytes > 0 || conn->pong_due || conn->first != NULL || conn->sending != NULL ||
           conn->wanted_count > 0 || conn->offered_count > 0 || conn->farewell != NULL || released(conn) != NULL;
}

bool sy_conn_writeable(struct sy_conn *conn)
{
    conn->blocked_ns = 0;
    bool written = true;
    struct sy_blob **finished = released(conn);
    if (conn->left.bytes > 0) {
        conn->blocked_ns = conn->server->now_ns;
        lws_callback_on_writable(conn->wsi);
        return write_left(conn);
    }
    if (conn->first == NULL && conn->sending == NULL && finished == NULL && conn->state == SY_CONN_JOINED) {
        begin_update(conn);
    }
    if (conn->pong_due && !conn->close_sent) {
        written = write_pong(conn);
    } else if (conn->first != NULL) {
        written = write_control(conn);
    } else if (finished != NULL && conn->state == SY_CONN_JOINED) {
        written = write_last_chunk(conn, finished);
    } else if (conn->sending != NULL && conn->state == SY_CONN_JOINED) {
        written = write_chunk(conn);
    } else if (conn->farewell != NULL) {
        struct sy_control *control = dl_take(conn->farewell);
        written = write_bytes(conn, control->bytes + LWS_PRE, control->size, NULL);
        free(control);
    }
    if (!written) {
        return false;
    }
    if (conn->state == SY_CONN_CLOSING && conn->first == NULL && conn->farewell == NULL) {
        return write_close(conn);
    }
    if (has_something_to_send(conn)) {
        conn->blocked_ns = conn->server->now_ns;
        lws_callback_on_writable(conn->wsi);
    }
    return true;
}

void sy_conn_release_queues(struct sy_conn *conn)
{
    while (conn->first != NULL) {
        struct sy_control *control = conn->first;
        conn->first = control->next;
        free(control);
    }
    conn->last = NULL;
    conn->control_count = 0;
    conn->control_bytes = 0;
    free(dl_take(conn->farewell));
    sy_conn_drop_updates(conn);
}
