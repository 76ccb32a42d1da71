/* dl_buf: a byte or text buffer that grows up to a stated maximum. Owner's thread only.
 *
 * Appending past the maximum, or without memory, sets `failed` and appends nothing; callers may append freely and look
 * at the end. */
#ifndef DL_COMMON_BUF_H
#define DL_COMMON_BUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

struct dl_buf {
    char *data;  /* Always zero-terminated once something was appended; NULL before. */
    size_t size; /* Without the terminating zero. */
    size_t capacity;
    size_t max;
    bool failed;
};

void dl_buf_init(struct dl_buf *buf, size_t max);
void dl_buf_release(struct dl_buf *buf);
void dl_buf_clear(struct dl_buf *buf); /* Keeps the memory; forgets content and failure. */
void dl_buf_append(struct dl_buf *buf, const void *bytes, size_t size);
void dl_buf_puts(struct dl_buf *buf, const char *text);
void dl_buf_printf(struct dl_buf *buf, const char *fmt, ...) DL_PRINTF(2, 3);

/* Hands the text over (caller frees); NULL when something failed. The buffer is empty afterwards. */
char *dl_buf_take(struct dl_buf *buf);

#endif
