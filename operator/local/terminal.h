/* op_terminal: draws frames in place, without flicker and without leaving anything behind.
 *
 * A frame goes out in one write: back to the first line of the last frame, each line overwritten and its rest erased.
 * The cursor is hidden only within that write and no mode of the terminal is ever changed, so that there is nothing to
 * restore however the program ends. One thread. Layer operator/local. */
#ifndef OP_LOCAL_TERMINAL_H
#define OP_LOCAL_TERMINAL_H

#include <stdbool.h>
#include <stdint.h>

#include "operator/local/render.h"

struct op_terminal {
    int fd;
    bool is_terminal;
    struct op_render_options options;
    uint32_t drawn_lines;   /* Of the last frame; the cursor stands below it. */
    struct op_frame *frame; /* Scratch. */
};

/* `wanted` false (--no-tty), or `fd` not a terminal, or TERM=dumb: no frames are drawn. NO_COLOR is honoured, Unicode
 * taken from the locale's variables. */
DL_MUST_CHECK enum dl_rc op_terminal_init(struct op_terminal *terminal, int fd, bool wanted, struct dl_err *err);
void op_terminal_release(struct op_terminal *terminal);

void op_terminal_draw(struct op_terminal *terminal, const struct op_view *view);
void op_terminal_on_resize(struct op_terminal *terminal); /* After SIGWINCH: starts on a clean screen. */

#endif
