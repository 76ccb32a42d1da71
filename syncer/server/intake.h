/* sy_intake: threads that receive the data of chunks beside the network thread.
 *
 * What messages mean is the network thread's alone. But most of a push is data whose place is known, and one thread moves and
 * hashes no more of it than a core can. So the network thread lends a connection's receiving end to a thread while the data of
 * a chunk come, and has it back with the last of them: with what came behind (the next chunk's heads), which is its own to
 * read. A loan that the network thread needs earlier (a push is dropped, a connection ends) it recalls, and waits for one
 * piece at most.
 *
 * Functions are the network thread's. While a loan is away its connection's parser and receiver, and the memory that the
 * chunk goes to, are the thread's; the descriptor may be written to. Plain connections only: a TLS connection's state is
 * that of both directions. */
#ifndef SY_SERVER_INTAKE_H
#define SY_SERVER_INTAKE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"
#include "syncer/server/placed.h"

#define SY_INTAKE_THREADS_MAX 3       /* With the network thread's own some 15 GB/s: more than networks bring. */
#define SY_LOANS_MAX 256              /* Away at the same time, a thread; more are received at home. */
#define SY_LOAN_BYTES_MIN (64u << 10) /* Data still to come, for which a loan pays. */

struct sy_intake; /* Opaque. */

enum sy_loan_where { SY_LOAN_HOME, SY_LOAN_AWAY, SY_LOAN_BACK /* In the list of those that have come back. */ };

/* A connection's receiving end. Zeroed, then `fd` and what follows it are the owner's to set. */
struct sy_loan {
    int fd;
    struct dl_ws_parser *parser;
    struct sy_receive *receive;
    void *owner;
    uint32_t hand;          /* Who receives for it: 0, nobody yet; 1, the network thread; others, threads. */
    _Atomic uint64_t bytes; /* Received away, ever: growing while it is away. */
    enum dl_rc rc;          /* Back: DL_OK, or DL_ENET when the connection is broken. */
    size_t beside_bytes;    /* Back: of `beside`, what came after the data. */
    uint8_t beside[SY_BESIDE_BYTES];
    /* Of the intake, under its lock. */
    enum sy_loan_where where;
    uint32_t slot;
    atomic_bool recalled;
    struct sy_loan *prev, *next;
};

/* `threads` (1 .. SY_INTAKE_THREADS_MAX) are started. */
DL_MUST_CHECK enum dl_rc sy_intake_new(uint32_t threads, struct sy_intake **out, struct dl_err *err);
/* Readable when some loan has come back. Owned by the intake. */
int sy_intake_fd(const struct sy_intake *intake);
/* Ends the threads; loans that were away are back. */
void sy_intake_stop(struct sy_intake *intake);
void sy_intake_free(struct sy_intake *intake); /* NULL is fine; all loans are at home. */

/* Lends it, when it is another thread's turn to receive for it and it pays: true, it is away. The first call for a loan decides
 * who receives for it, evenly over threads and network thread. */
bool sy_intake_lend(struct sy_intake *intake, struct sy_loan *loan);
/* No thread has it any more: it is at home, or has come back and will be returned by sy_intake_take. */
void sy_intake_recall(struct sy_intake *intake, struct sy_loan *loan);
/* The next one that has come back, which is then at home; NULL: none. */
struct sy_loan *sy_intake_take(struct sy_intake *intake);
/* It is at home, wherever it was, with what came back in it; its connection ends, others may have its turn. */
void sy_intake_forget(struct sy_intake *intake, struct sy_loan *loan);

#endif
