#include <inttypes.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/blob.h"
#include "syncer/server/internal.h"

#define HELLO_NS (10 * DL_NS_PER_SECOND) /* From the upgrade to a complete HELLO. */

struct sy_conn *sy_conn_new(struct sy_server *server, struct lws *wsi)
{
    struct sy_conn *conn = dl_alloc_aligned(sizeof *conn);
    bool *wanted = calloc(server->fragment_count, sizeof *wanted);
    bool *offered = calloc(server->fragment_count, sizeof *offered);
    bool *lacked = calloc(server->fragment_count, sizeof *lacked);
    struct sy_blob **parked = calloc(server->fragment_count, sizeof(struct sy_blob *));
    /* One push a fragment, and one of an earlier round whose chunks are still being dropped. */
    uint32_t transfers_max = 2 * server->fragment_count + 2;
    struct sy_transfer *transfers = calloc(transfers_max, sizeof *transfers);
    if (conn == NULL || wanted == NULL || offered == NULL || lacked == NULL || parked == NULL || transfers == NULL) {
        free(conn);
        free(wanted);
        free(offered);
        free(lacked);
        free(parked);
        free(transfers);
        return NULL;
    }
    conn->server = server;
    conn->wsi = wsi;
    conn->wanted = wanted;
    conn->offered = offered;
    conn->lacked = lacked;
    conn->parked = parked;
    conn->transfers = transfers;
    conn->transfers_max = transfers_max;
    conn->member = SY_NO_MEMBER;
    conn->incarnation = SY_STORE_NO_INCARNATION;
    conn->leaving_member = SY_NO_MEMBER;
    conn->opened_ns = server->now_ns;
    conn->heard_ns = server->now_ns;
    lws_get_peer_simple(wsi, conn->peer, sizeof conn->peer);
    sy_receive_init(&conn->receive);
    conn->parser = (struct dl_ws_parser){.message_max = SY_MESSAGE_MAX, .from_client = true};
    conn->next = server->conns;
    if (conn->next != NULL) {
        conn->next->prev = conn;
    }
    server->conns = conn;
    server->conn_count++;
    server->counters.connections++;
    return conn;
}

struct sy_conn *sy_conn_of_member(struct sy_server *server, uint32_t member)
{
    return member < server->members_max ? server->member_conns[member] : NULL;
}

/* Pushes that are not there in full die with their connection; complete ones stay in their round. */
static void abort_transfers(struct sy_conn *conn)
{
    sy_socket_drop_chunk(conn);
    for (uint32_t i = 0; i < conn->transfer_count; i++) {
        if (conn->transfers[i].push != NULL) {
            sy_incoming_drop(conn->server, conn->transfers[i].push);
            conn->transfers[i].push = NULL;
        }
    }
    conn->transfer_count = 0;
}

static const char *leave_name(int why)
{
    static const char *const names[] = {"goodbye", "preempted", "lost", "superseded", "protocol"};
    return why >= 0 && why < (int)DL_COUNT_OF(names) ? names[why] : "ended";
}

/* Ends the membership, when there is one; `why` < 0: the core knows already. */
static void let_go(struct sy_conn *conn, int why, const char *text)
{
    struct sy_server *server = conn->server;
    abort_transfers(conn);
    if (conn->member == SY_NO_MEMBER) {
        return;
    }
    uint32_t member = conn->member;
    conn->member = SY_NO_MEMBER;
    if (server->member_conns[member] == conn) {
        server->member_conns[member] = NULL;
    }
    server->left_by_goodbye[member] = why == SY_LEAVE_GOODBYE || why == SY_LEAVE_PREEMPTED;
    struct sy_member_view view = {0};
    bool seen = sy_core_member(server->core, member, &view);
    dl_info("left learner=%u role=%s uid=%s why=%s step=%" PRIu64 " text=\"%s\"", conn->learner,
            conn->role == DL_ROLE_LEARNER ? "learner" : "evaluator", conn->uid, leave_name(why), seen ? view.step : 0,
            text);
    if (server->store != NULL) {
        sy_store_note(server->store, why < 0 ? "end" : leave_name(why), conn->learner, conn->admission, conn->uid,
                      seen ? view.step : 0, text);
    }
    if (why >= 0) {
        conn->leaving_member = member;
        conn->leaving_why = (enum sy_leave)why;
        server->leaves_waiting = true;
        sy_server_actions(server);
    }
}

/* The core's queue of actions is made for one event at a time: a leave that comes up in the middle waits for its end.
 */
void sy_conn_tell_leaves(struct sy_server *server)
{
    if (!server->leaves_waiting) {
        return;
    }
    server->leaves_waiting = false;
    for (struct sy_conn *conn = server->conns; conn != NULL; conn = conn->next) {
        if (conn->leaving_member != SY_NO_MEMBER) {
            uint32_t member = conn->leaving_member;
            conn->leaving_member = SY_NO_MEMBER;
            server->leaves_waiting = true; /* Perhaps more; one event at a time. */
            sy_core_on_leave(server->core, server->now_ns, member, conn->leaving_why);
            return;
        }
    }
}

void sy_conn_end(struct sy_conn *conn, int why, uint16_t close_code, const char *text)
{
    if (conn->state == SY_CONN_CLOSING) {
        return;
    }
    if (why == SY_LEAVE_PROTOCOL) {
        conn->server->counters.protocol_errors++;
        dl_warn("closing a connection peer=%s learner=%d reason=\"%s\"", conn->peer,
                conn->member == SY_NO_MEMBER ? -1 : (int)conn->learner, text);
    }
    let_go(conn, why, text);
    conn->state = SY_CONN_CLOSING;
    conn->close_code = close_code;
    snprintf(conn->close_text, sizeof conn->close_text, "%s", text);
    sy_conn_drop_updates(conn);
    if (conn->wsi != NULL) {
        lws_set_timeout(conn->wsi, PENDING_TIMEOUT_USER_REASON_BASE, SY_CLOSE_SECONDS);
        lws_callback_on_writable(conn->wsi);
    }
}

void sy_conn_refuse(struct sy_conn *conn, const struct dl_wire_refuse *refuse)
{
    dl_warn("refused peer=%s code=%u temporary=%s reason=\"%s\"", conn->peer, refuse->code,
            dl_refusal_is_temporary((enum dl_refusal)refuse->code) ? "yes" : "no", refuse->text);
    struct dl_wire_message message = {.type = DL_WIRE_REFUSE};
    message.as.refuse = *refuse;
    sy_conn_send(conn, &message);
    sy_conn_end(conn, -1, LWS_CLOSE_STATUS_NORMAL, refuse->text);
}

void sy_conn_closed(struct sy_conn *conn)
{
    struct sy_server *server = conn->server;
    conn->wsi = NULL;
    sy_socket_drain(conn);
    let_go(conn, SY_LEAVE_LOST, SY_LOST_TEXT);
    sy_tape_leave(conn);
    sy_conn_release_queues(conn);
    sy_conn_release_left(conn);
    sy_receive_release(&conn->receive);
    if (conn->prev != NULL) {
        conn->prev->next = conn->next;
    } else {
        server->conns = conn->next;
    }
    if (conn->next != NULL) {
        conn->next->prev = conn->prev;
    }
    server->conn_count--;
    free(conn->transfers);
    free(conn->wanted);
    free(conn->offered);
    free(conn->lacked);
    free(conn->parked);
    free(conn);
}

/* Whether the peer's kernel has taken anything since the last look: a slow link is not a dead reader. */
static bool socket_moves(struct sy_conn *conn)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    int waiting = 0;
    int fd = lws_get_socket_fd(conn->wsi);
    memset(&info, 0, sizeof info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 || ioctl(fd, SIOCOUTQ, &waiting) != 0) {
        return false;
    }
    /* With nothing in the kernel's queue it is not the peer that holds things up. */
    bool moves = info.tcpi_bytes_acked != conn->acked_bytes || waiting == 0;
    conn->acked_bytes = info.tcpi_bytes_acked;
    return moves;
}

static void send_heartbeat(struct sy_conn *conn, const struct sy_core_view *view)
{
    if (conn->control_count > 0) {
        return; /* Whatever waits there will do as well. */
    }
    struct dl_wire_message message = {.type = DL_WIRE_HEARTBEAT};
    message.as.heartbeat =
        (struct dl_wire_heartbeat){.sequence = ++conn->heartbeats, .step = view->step, .tokens = view->tokens};
    sy_conn_send(conn, &message);
}

void sy_conn_tick(struct sy_conn *conn, int64_t now_ns, const struct sy_core_view *heartbeat)
{
    int64_t timeout_ns = (int64_t)(conn->server->spec->sync.timeout_seconds * 1e9);
    if (conn->left.bytes > 0 && conn->wsi != NULL) {
        lws_validity_confirmed(conn->wsi); /* A ping of its own must not come into the middle of a frame. */
    }
    if (conn->state == SY_CONN_OPEN) {
        if (now_ns - conn->opened_ns > HELLO_NS) {
            sy_conn_end(conn, SY_LEAVE_PROTOCOL, LWS_CLOSE_STATUS_POLICY_VIOLATION, "no HELLO in time");
        }
        return;
    }
    if (conn->state != SY_CONN_JOINED) {
        return;
    }
    if (sy_socket_hear(conn)) {
        conn->transfer_ns = now_ns;
        sy_conn_heard(conn);
    }
    if (heartbeat != NULL) {
        send_heartbeat(conn, heartbeat);
    }
    if (sy_conn_awaits_push(conn) && now_ns - conn->transfer_ns > timeout_ns) {
        sy_conn_end(conn, SY_LEAVE_LOST, LWS_CLOSE_STATUS_POLICY_VIOLATION, "a push stands still");
    } else if (conn->blocked_ns != 0 && now_ns - conn->blocked_ns > timeout_ns / 2) {
        if (socket_moves(conn)) {
            conn->blocked_ns = now_ns;
        } else if (now_ns - conn->blocked_ns > timeout_ns) {
            conn->server->counters.slow_closed++;
            sy_conn_end(conn, SY_LEAVE_LOST, LWS_CLOSE_STATUS_POLICY_VIOLATION, "takes no data");
        }
    }
}
