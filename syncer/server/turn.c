#include "syncer/server/turn.h"

#include "common/mem.h"

void sy_turn_begin(struct sy_turn *turn)
{
    turn->number++;
    turn->until_ns = 0;
    turn->allowed_until = turn->someone_is_left ? turn->oldest_left : UINT64_MAX;
    turn->someone_is_left = false;
    turn->oldest_left = UINT64_MAX;
}

bool sy_turn_may_send(struct sy_turn *turn, uint64_t *last, int64_t now_ns)
{
    if (*last <= turn->allowed_until && (turn->until_ns == 0 || now_ns < turn->until_ns)) {
        turn->until_ns = turn->until_ns == 0 ? now_ns + SY_TURN_NS : turn->until_ns;
        *last = turn->number;
        return true;
    }
    turn->someone_is_left = true;
    turn->oldest_left = DL_MIN(turn->oldest_left, *last);
    return false;
}
