/* op_render: a view as text, for a terminal of a given size or as single lines. Pure; any thread. Layer operator/local.
 */
#ifndef OP_LOCAL_RENDER_H
#define OP_LOCAL_RENDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "operator/local/view.h"

struct op_render_options {
    uint32_t width,
        height;   /* Of the terminal; lines are cut to the width, learners and events left out to fit the height. */
    bool color;   /* ANSI colours. */
    bool unicode; /* Bars and sparklines in block characters; else ASCII. */
};

#define OP_FRAME_BYTES_MAX (256u * 1024)
#define OP_FRAME_LINES_MAX 1100

struct op_frame { /* Lines, each without newline, none wider than the options' width. */
    char text[OP_FRAME_BYTES_MAX];
    size_t used;
    uint32_t line_count;
    size_t lines[OP_FRAME_LINES_MAX]; /* Offsets into `text`; each line is zero-terminated. */
};

/* The whole picture. */
void op_render_frame(const struct op_view *view, const struct op_render_options *options, struct op_frame *frame);

/* One line of progress, for logs and pipes. */
void op_render_line(const struct op_view *view, char *out, size_t out_bytes);

/* "12.3k", "4.5M"; "0:35", "1:02:03"; a row of `cells` characters for values (lower is less). */
void op_format_count(double value, char *out, size_t out_bytes);
void op_format_seconds(double seconds, char *out, size_t out_bytes);
void op_format_spark(const struct op_view_point *points, uint32_t count, uint32_t cells, bool unicode, char *out,
                     size_t out_bytes);

#endif
