/* op_lines: cuts a stream of bytes into lines, whatever the pieces it arrives in. Each byte is looked at once.
 *
 * Pure apart from memory (at most one line, up to `max` bytes); owner's thread; layer operator/kube. */
#ifndef OP_KUBE_LINES_H
#define OP_KUBE_LINES_H

#include <stdbool.h>
#include <stddef.h>

#include "common/buf.h"
#include "common/err.h"

struct op_lines {
    struct dl_buf part; /* The beginning of a line whose end has not come. */
};

/* A line without its end ("\n" or "\r\n"), borrowed, not zero-terminated; never empty (empty lines are skipped).
 * False ends the feeding. */
typedef bool op_line_fn(void *context, const char *line, size_t size);

void op_lines_init(struct op_lines *lines, size_t line_bytes_max);
void op_lines_release(struct op_lines *lines);
void op_lines_clear(struct op_lines *lines); /* Forgets a line that was begun; a large buffer is given back. */

/* DL_EPROTO: a line longer than the maximum. DL_ENOMEM. DL_AGAIN: `line` returned false; the rest was not looked at.
 * After all of these only clear and release are allowed. */
DL_MUST_CHECK enum dl_rc op_lines_feed(struct op_lines *lines, const char *bytes, size_t size, op_line_fn *line,
                                       void *context, struct dl_err *err);

#endif
