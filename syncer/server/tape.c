/* What learners deliver to the event tape: on to the store, which has it durable with the next commit. Without a store
 * there is no tape, and whatever comes is as good as kept. */
#include <inttypes.h>

#include "common/log.h"
#include "common/mem.h"
#include "syncer/server/internal.h"

void sy_tape_join(struct sy_conn *conn, const struct dl_wire_hello *hello, struct dl_wire_welcome *welcome)
{
    struct sy_server *server = conn->server;
    conn->incarnation = SY_STORE_NO_INCARNATION;
    if (conn->role != DL_ROLE_LEARNER || server->store == NULL) {
        return;
    }
    uint64_t traced = 0;
    conn->incarnation =
        sy_store_incarnation(server->store, hello->uid, hello->nonce, welcome->learner, hello->trainer, &traced);
    if (conn->incarnation == SY_STORE_NO_INCARNATION) {
        dl_warn("no room in the tape for another process: this run cannot be replayed learner=%u uid=%s",
                welcome->learner, hello->uid);
    }
    conn->trace_received = welcome->trace_acked = traced;
}

void sy_tape_leave(struct sy_conn *conn)
{
    if (conn->server->store != NULL) {
        sy_store_release(conn->server->store, conn->incarnation);
    }
    conn->incarnation = SY_STORE_NO_INCARNATION;
}

enum dl_rc sy_tape_take(struct sy_conn *conn, const struct dl_wire_trace *trace, struct dl_err *err)
{
    struct sy_server *server = conn->server;
    if (trace->count == 0) {
        return dl_err_set(err, DL_EPROTO, "a trace without entries");
    }
    if (trace->position > conn->trace_received + 1) {
        dl_warn("entries of the tape are missing: the run cannot be replayed from here learner=%u uid=%s from=%" PRIu64
                " to=%" PRIu64,
                conn->learner, conn->uid, conn->trace_received + 1, trace->position - 1);
    }
    if (conn->incarnation != SY_STORE_NO_INCARNATION && !sy_store_trace(server->store, conn->incarnation, trace)) {
        return dl_err_set(err, DL_EFULL, "too many entries of the tape wait for a commit");
    }
    conn->trace_received = DL_MAX(conn->trace_received, trace->position + trace->count - 1);
    return DL_OK;
}

uint64_t sy_tape_acked(const struct sy_conn *conn)
{
    return conn->incarnation == SY_STORE_NO_INCARNATION ? conn->trace_received
                                                        : sy_store_traced(conn->server->store, conn->incarnation);
}
