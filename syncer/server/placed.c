#include "syncer/server/placed.h"

#include <errno.h>
#include <sys/uio.h>

#include "common/mem.h"

#define STEP_BYTES (16u << 10) /* Unmasked and hashed at a time, in the first-level cache. */

size_t sy_placed_next(const struct dl_ws_parser *parser, const struct sy_receive *receive, uint8_t **at)
{
    *at = NULL;
    uint64_t payload = dl_ws_payload_next(parser);
    uint64_t room = payload == 0 ? 0 : sy_receive_direct(receive, at);
    return (size_t)DL_MIN(payload, room);
}

void sy_placed_take(struct dl_ws_parser *parser, struct sy_receive *receive, uint8_t *at, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        size_t step = DL_MIN((size_t)STEP_BYTES, bytes - done);
        dl_ws_placed(parser, at + done, step);
        sy_receive_placed(receive, step);
        done += step;
    }
}

enum dl_rc sy_placed_read(int fd, uint8_t *first, size_t first_bytes, uint8_t *second, size_t second_bytes, size_t *got)
{
    struct iovec parts[2] = {{first, first_bytes}, {second, second_bytes}};
    int skip = first_bytes == 0 ? 1 : 0;
    ssize_t received = readv(fd, parts + skip, 2 - skip);
    if (received > 0) {
        *got = (size_t)received;
        return DL_OK;
    }
    return received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) ? DL_AGAIN : DL_ENET;
}
