#include "common/buf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

void dl_buf_init(struct dl_buf *buf, size_t max)
{
    memset(buf, 0, sizeof *buf);
    buf->max = max;
}

void dl_buf_release(struct dl_buf *buf)
{
    free(buf->data);
    dl_buf_init(buf, buf->max);
}

void dl_buf_clear(struct dl_buf *buf)
{
    buf->size = 0;
    buf->failed = false;
    if (buf->data != NULL) {
        buf->data[0] = 0;
    }
}

/* Room for `extra` bytes and a terminating zero. */
static bool reserve(struct dl_buf *buf, size_t extra)
{
    if (buf->failed || extra > buf->max - buf->size) {
        buf->failed = true;
        return false;
    }
    size_t needed = buf->size + extra + 1;
    if (needed > buf->capacity) {
        size_t capacity = DL_MAX(needed, buf->capacity * 2);
        char *grown = realloc(buf->data, capacity);
        if (grown == NULL) {
            buf->failed = true;
            return false;
        }
        buf->data = grown;
        buf->capacity = capacity;
    }
    return true;
}

void dl_buf_append(struct dl_buf *buf, const void *bytes, size_t size)
{
    if (reserve(buf, size)) {
        memcpy(buf->data + buf->size, bytes, size);
        buf->size += size;
        buf->data[buf->size] = 0;
    }
}

void dl_buf_puts(struct dl_buf *buf, const char *text)
{
    dl_buf_append(buf, text, strlen(text));
}

void dl_buf_printf(struct dl_buf *buf, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(NULL, 0, fmt, args);
    va_end(args);
    if (length < 0 || !reserve(buf, (size_t)length)) {
        buf->failed = true;
        return;
    }
    va_start(args, fmt);
    vsnprintf(buf->data + buf->size, (size_t)length + 1, fmt, args);
    va_end(args);
    buf->size += (size_t)length;
}

char *dl_buf_take(struct dl_buf *buf)
{
    char *data = buf->failed ? NULL : dl_take(buf->data);
    size_t max = buf->max;
    free(buf->data);
    dl_buf_init(buf, max);
    return data;
}
