/* dl_err: the one way an expected failure is reported.
 *
 * A function that can fail returns `enum dl_rc` and fills a `struct dl_err` that lives on its caller's stack; no heap is
 * used. Each layer may put its own context in front; only the top logs the text, once. Codes are the retry policy: what
 * to do next follows from the code alone, the text is for people.
 *
 * Pure, any thread, any layer may include it. */
#ifndef DL_COMMON_ERR_H
#define DL_COMMON_ERR_H

#include <stdarg.h>

#define DL_MUST_CHECK __attribute__((warn_unused_result))
#define DL_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define DL_ERR_TEXT_MAX 512

/* Negative: failed. Zero: done. Positive: not now, ask again. */
enum dl_rc {
    DL_OK = 0,
    DL_AGAIN = 1,          /* Not an error: nothing to do yet, or would block. */
    DL_EINVAL = -1,        /* The input is wrong and will stay wrong: report, do not retry. */
    DL_ENOMEM = -2,        /* No memory, or a configured limit was reached. */
    DL_EIO = -3,           /* The disk or a pipe failed (errno in the text). */
    DL_ENET = -4,          /* The network failed: back off, connect again. */
    DL_ETIMEOUT = -5,      /* A bound was reached: back off, try again. */
    DL_ENOTFOUND = -6,     /* The named thing is not there. */
    DL_EEXISTS = -7,       /* It is there already. */
    DL_ECONFLICT = -8,     /* Someone else changed it: read again. */
    DL_EGONE = -9,         /* The point to resume from is gone: list again, join again. */
    DL_EDENIED = -10,      /* Not allowed (token, certificate, permission). */
    DL_EPROTO = -11,       /* The peer broke the protocol: close. */
    DL_ECORRUPT = -12,     /* A checksum does not match: use the previous good copy. */
    DL_EFULL = -13,        /* No space left; can go on once there is. */
    DL_EUNSUPPORTED = -14, /* Valid, but not offered by this build or peer. */
};

struct dl_err {
    enum dl_rc rc;
    char text[DL_ERR_TEXT_MAX]; /* Says what was attempted, on what, and what to do; cut with "..." when too long. */
};

#if defined(__clang_analyzer__) && !defined(DL_ERR_DEFINES)
/* For static analysis, which cannot see into variadic functions: what these return is never DL_OK. */
void dl_err_uses(const char *fmt, ...);
#define dl_err_set(err, rc, ...) ((void)(err), dl_err_uses(__VA_ARGS__), (rc))
#define dl_err_errno(err, rc, errno_value, ...) ((void)(err), (void)(errno_value), dl_err_uses(__VA_ARGS__), (rc))
#define dl_err_wrap(err, ...) ((void)(err), dl_err_uses(__VA_ARGS__), DL_EINVAL)
#else
/* Sets code and text; returns `rc`, so that `return dl_err_set(err, DL_EINVAL, "...")` reads well. `err` may be NULL. */
enum dl_rc dl_err_set(struct dl_err *err, enum dl_rc rc, const char *fmt, ...) DL_PRINTF(3, 4);

/* As dl_err_set, and appends ": <strerror(errno_value)>". */
enum dl_rc dl_err_errno(struct dl_err *err, enum dl_rc rc, int errno_value, const char *fmt, ...) DL_PRINTF(4, 5);

/* Puts "<context>: " in front of the text; returns the code unchanged. */
enum dl_rc dl_err_wrap(struct dl_err *err, const char *fmt, ...) DL_PRINTF(2, 3);
#endif

#endif
