#include "operator/kube/lines.h"

#include <string.h>

#define KEPT_BYTES 65536 /* A larger buffer is given back after its line. */

void op_lines_init(struct op_lines *lines, size_t line_bytes_max)
{
    dl_buf_init(&lines->part, line_bytes_max);
}

void op_lines_release(struct op_lines *lines)
{
    dl_buf_release(&lines->part);
}

void op_lines_clear(struct op_lines *lines)
{
    if (lines->part.capacity > KEPT_BYTES) {
        dl_buf_release(&lines->part);
    } else {
        dl_buf_clear(&lines->part);
    }
}

static bool tell(const char *line, size_t size, op_line_fn *tell_line, void *context)
{
    if (size > 0 && line[size - 1] == '\r') {
        size--;
    }
    return size == 0 || tell_line(context, line, size);
}

static enum dl_rc too_long(const struct op_lines *lines, size_t size, struct dl_err *err)
{
    if (size > lines->part.max) {
        return dl_err_set(err, DL_EPROTO, "a line of the stream is longer than %zu bytes", lines->part.max);
    }
    return dl_err_set(err, DL_ENOMEM, "no memory for a line of %zu bytes", size);
}

enum dl_rc op_lines_feed(struct op_lines *lines, const char *bytes, size_t size, op_line_fn *line, void *context,
                         struct dl_err *err)
{
    while (size > 0) {
        const char *end = memchr(bytes, '\n', size);
        size_t length = end != NULL ? (size_t)(end - bytes) : size;
        bool is_whole = end != NULL && lines->part.size == 0; /* Needs no copy. */
        if (length > lines->part.max - lines->part.size) {
            return too_long(lines, lines->part.size + length, err);
        }
        if (!is_whole) {
            dl_buf_append(&lines->part, bytes, length);
            if (lines->part.failed) {
                return too_long(lines, lines->part.size + length, err);
            }
        }
        if (end == NULL) {
            return DL_OK;
        }
        bool goes_on =
            is_whole ? tell(bytes, length, line, context) : tell(lines->part.data, lines->part.size, line, context);
        if (!goes_on) {
            return dl_err_set(err, DL_AGAIN, "the reader of the stream wants no more");
        }
        op_lines_clear(lines);
        bytes += length + 1;
        size -= length + 1;
    }
    return DL_OK;
}
