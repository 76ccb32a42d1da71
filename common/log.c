#include "common/log.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/time_text.h"

#define LINE_MAX_BYTES 2048

static struct {
    char job[64];
    char who[64];
    enum dl_log_level least;
} state = {"-", "-", DL_LOG_INFO};

static const char *const level_names[] = {"debug", "info", "warn", "error"};

void dl_log_init(const char *job, const char *who, enum dl_log_level least)
{
    snprintf(state.job, sizeof state.job, "%s", job);
    snprintf(state.who, sizeof state.who, "%s", who);
    state.least = least;
}

void dl_log(enum dl_log_level level, const char *fmt, ...)
{
    if (level < state.least) {
        return;
    }
    char line[LINE_MAX_BYTES], when[DL_TIME_TEXT_MAX];
    size_t used = (size_t)snprintf(line, sizeof line, "%s %-5s %s %s ", dl_time_text(dl_wall_ns(), 3, when),
                                   level_names[level], state.job, state.who);
    va_list args;
    va_start(args, fmt);
    int length = vsnprintf(line + used, sizeof line - used - 1, fmt, args);
    va_end(args);
    used = length < 0 ? used : DL_MIN(used + (size_t)length, sizeof line - 2);
    line[used++] = '\n';
    /* A log line that cannot be written has nowhere to be reported. */
    ssize_t written = write(STDERR_FILENO, line, used);
    (void)written;
}

enum dl_rc dl_log_level_parse(const char *text, enum dl_log_level *level, struct dl_err *err)
{
    for (size_t i = 0; i < DL_COUNT_OF(level_names); i++) {
        if (strcmp(text, level_names[i]) == 0) {
            *level = (enum dl_log_level)i;
            return DL_OK;
        }
    }
    return dl_err_set(err, DL_EINVAL, "log level '%s': use debug, info, warn or error", text);
}
