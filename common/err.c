#define DL_ERR_DEFINES
#include "common/err.h"

#include <stdio.h>
#include <string.h>

/* Marks a text that did not fit, so that nobody takes a cut message for a whole one. */
static void mark_cut(char *text)
{
    static const char dots[] = "...";
    memcpy(text + DL_ERR_TEXT_MAX - sizeof dots, dots, sizeof dots);
}

static void print_into(char *text, const char *fmt, va_list args)
{
    int length = vsnprintf(text, DL_ERR_TEXT_MAX, fmt, args);
    if (length >= DL_ERR_TEXT_MAX) {
        mark_cut(text);
    }
}

static void append(char *text, const char *separator, const char *tail)
{
    size_t used = strlen(text);
    int length = snprintf(text + used, DL_ERR_TEXT_MAX - used, "%s%s", separator, tail);
    if (length >= 0 && (size_t)length >= DL_ERR_TEXT_MAX - used) {
        mark_cut(text);
    }
}

enum dl_rc dl_err_set(struct dl_err *err, enum dl_rc rc, const char *fmt, ...)
{
    if (err != NULL) {
        va_list args;
        va_start(args, fmt);
        err->rc = rc;
        print_into(err->text, fmt, args);
        va_end(args);
    }
    return rc;
}

enum dl_rc dl_err_errno(struct dl_err *err, enum dl_rc rc, int errno_value, const char *fmt, ...)
{
    if (err != NULL) {
        char buffer[128];
        va_list args;
        va_start(args, fmt);
        err->rc = rc;
        print_into(err->text, fmt, args);
        va_end(args);
        append(err->text, ": ", strerror_r(errno_value, buffer, sizeof buffer));
    }
    return rc;
}

enum dl_rc dl_err_wrap(struct dl_err *err, const char *fmt, ...)
{
    if (err == NULL) {
        return DL_EINVAL;
    }
    char inner[DL_ERR_TEXT_MAX];
    memcpy(inner, err->text, sizeof inner);
    va_list args;
    va_start(args, fmt);
    print_into(err->text, fmt, args);
    va_end(args);
    append(err->text, ": ", inner);
    return err->rc;
}
