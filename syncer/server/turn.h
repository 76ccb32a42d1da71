/* sy_turn: how much broadcast goes out in one turn of the network loop.
 *
 * With many learners every socket may take a chunk at once, and a turn that served them all would keep requests and control
 * messages waiting. So chunks go out for SY_TURN_NS a turn; who is left goes first in the next ones, the longest waiting before
 * the others. Pure. */
#ifndef SY_SERVER_TURN_H
#define SY_SERVER_TURN_H

#include <stdbool.h>
#include <stdint.h>

#define SY_TURN_NS INT64_C(4000000)

struct sy_turn { /* Zeroed: before the first turn. */
    uint64_t number;
    int64_t until_ns;       /* 0: nobody has sent in this turn. */
    uint64_t allowed_until; /* Who has sent in a later turn than this one waits. */
    uint64_t oldest_left;   /* When the longest waiting one of this turn sent last, */
    bool someone_is_left;   /* where there is one. */
};

/* Of the loop, before it looks what sockets take. */
void sy_turn_begin(struct sy_turn *turn);

/* Whether a socket that takes more gets a chunk now; `last` is the connection's own, 0 at first. Else it is to ask again. */
bool sy_turn_may_send(struct sy_turn *turn, uint64_t *last, int64_t now_ns);

#endif
