#include <stdlib.h>
#include <string.h>

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

void sy_conn_send_last(struct sy_conn *conn, const struct dl_wire_message *message)
{
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
    if (conn->wanted[local]) {
        conn->server->counters.versions_skipped++;
        return;
    }
    conn->wanted[local] = true;
    conn->wanted_count++;
    lws_callback_on_writable(conn->wsi);
}

/* Picks the next fragment that this connection lacks, in turn; its newest version, whatever it was when it was asked
 * for. */
static bool begin_update(struct sy_conn *conn)
{
    struct sy_server *server = conn->server;
    while (conn->wanted_count > 0) {
        uint32_t local = conn->wanted_next;
        conn->wanted_next = (local + 1) % server->fragment_count;
        if (!conn->wanted[local]) {
            continue;
        }
        conn->wanted[local] = false;
        conn->wanted_count--;
        struct sy_blob *blob = server->fragments[local].blob;
        if (blob == NULL) {
            continue;
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
        return true;
    }
    return false;
}

static bool write_bytes(struct sy_conn *conn, uint8_t *bytes, size_t size)
{
    conn->server->counters.bytes_out += size;
    conn->server->counters.messages_out++;
    /* What the socket does not take at once libwebsockets keeps (one message at most) and sends first. */
    return lws_write(conn->wsi, bytes, size, LWS_WRITE_BINARY) >= (int)size;
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
    bool written = write_bytes(conn, control->bytes + LWS_PRE, control->size);
    free(control);
    return written;
}

static bool write_chunk(struct sy_conn *conn)
{
    size_t size;
    uint8_t *frame = sy_blob_frame(conn->sending, conn->sending_chunk, &size);
    bool written = write_bytes(conn, frame, size);
    if (++conn->sending_chunk == conn->sending->chunk_count) {
        sy_times_sent(conn->server, conn->sending);
        sy_blob_drop(conn->sending);
        conn->sending = NULL;
    }
    return written;
}

bool sy_conn_has_nothing_to_send(const struct sy_conn *conn)
{
    return conn->first == NULL && conn->sending == NULL && conn->wanted_count == 0 && conn->farewell == NULL;
}

bool sy_conn_writeable(struct sy_conn *conn)
{
    conn->blocked_ns = 0;
    bool written = true;
    if (conn->first == NULL && conn->sending == NULL && conn->state == SY_CONN_JOINED) {
        begin_update(conn);
    }
    if (conn->first != NULL) {
        written = write_control(conn);
    } else if (conn->sending != NULL && conn->state == SY_CONN_JOINED) {
        written = write_chunk(conn);
    } else if (conn->farewell != NULL) {
        struct sy_control *control = dl_take(conn->farewell);
        written = write_bytes(conn, control->bytes + LWS_PRE, control->size);
        free(control);
    }
    if (!written) {
        return false;
    }
    if (conn->state == SY_CONN_CLOSING && conn->first == NULL && conn->farewell == NULL) {
        lws_close_reason(conn->wsi, (enum lws_close_status)conn->close_code, (unsigned char *)conn->close_text,
                         strlen(conn->close_text));
        return false;
    }
    if (!sy_conn_has_nothing_to_send(conn)) {
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
    sy_blob_drop(conn->sending);
    conn->sending = NULL;
}
