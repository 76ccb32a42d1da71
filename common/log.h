/* Structured log lines on standard error: `2026-01-01T00:00:00.000Z info  syncer/0 merged round=12 fragment=3 have=4 need=1`.
 *
 * The message is a short constant, facts follow as key=value. Any thread (a line is one write). Shells only: cores return
 * what happened and never log. */
#ifndef DL_COMMON_LOG_H
#define DL_COMMON_LOG_H

#include "common/err.h"

enum dl_log_level { DL_LOG_DEBUG, DL_LOG_INFO, DL_LOG_WARN, DL_LOG_ERROR };

/* Names this process in every line, e.g. ("demo", "learner/3"). Copies. Call once, before threads start. */
void dl_log_init(const char *job, const char *who, enum dl_log_level least);

void dl_log(enum dl_log_level level, const char *fmt, ...) DL_PRINTF(2, 3);

/* Parses "debug", "info", "warn", "error". */
DL_MUST_CHECK enum dl_rc dl_log_level_parse(const char *text, enum dl_log_level *level, struct dl_err *err);

#define dl_debug(...) dl_log(DL_LOG_DEBUG, __VA_ARGS__)
#define dl_info(...) dl_log(DL_LOG_INFO, __VA_ARGS__)
#define dl_warn(...) dl_log(DL_LOG_WARN, __VA_ARGS__)
#define dl_error(...) dl_log(DL_LOG_ERROR, __VA_ARGS__)

#endif
