#include "operator/local/events.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/time_text.h"
#include "operator/reconcile/json.h"

enum dl_rc op_events_open(struct op_events *events, const struct op_rundir *dir, int64_t start_ns, struct dl_err *err)
{
    char path[OP_PATH_MAX];
    op_rundir_path(dir, "events.jsonl", path);
    events->count = 0;
    events->start_ns = start_ns;
    events->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    return events->fd < 0 ? dl_err_errno(err, DL_EIO, errno, "write %s", path) : DL_OK;
}

void op_events_close(struct op_events *events)
{
    if (events->fd >= 0) {
        close(events->fd);
    }
    events->fd = -1;
}

static void write_line(const struct op_events *events, const struct op_event *event)
{
    char when[DL_TIME_TEXT_MAX];
    struct op_json_out out;
    op_json_out_init(&out);
    op_json_object_begin(&out, NULL);
    op_json_put_text(&out, "time", dl_time_text(dl_wall_ns(), 3, when));
    op_json_put_double(&out, "seconds", event->seconds);
    op_json_put_text(&out, "event", event->kind);
    op_json_put_text(&out, "who", event->who[0] != 0 ? event->who : NULL);
    op_json_put_text(&out, "text", event->text);
    op_json_object_end(&out);
    DL_AUTO_FREE char *line = op_json_finish(&out);
    if (line == NULL) {
        return;
    }
    /* The zero at the end gives room for the newline. A full disk costs events, not the run. */
    size_t length = strlen(line);
    line[length] = '\n';
    ssize_t written = write(events->fd, line, length + 1);
    (void)written;
}

void op_events_add(struct op_events *events, int64_t now_ns, const char *kind, const char *who, const char *fmt, ...)
{
    struct op_event *event = &events->ring[events->count % OP_EVENTS_MAX];
    *event = (struct op_event){.seconds = (double)(now_ns - events->start_ns) * 1e-9};
    snprintf(event->kind, sizeof event->kind, "%s", kind);
    snprintf(event->who, sizeof event->who, "%s", who);
    va_list args;
    va_start(args, fmt);
    vsnprintf(event->text, sizeof event->text, fmt, args);
    va_end(args);
    events->count++;
    write_line(events, event);
}

uint64_t op_events_first(const struct op_events *events)
{
    return events->count > OP_EVENTS_MAX ? events->count - OP_EVENTS_MAX : 0;
}

const struct op_event *op_events_get(const struct op_events *events, uint64_t number)
{
    return number < op_events_first(events) || number >= events->count ? NULL : &events->ring[number % OP_EVENTS_MAX];
}
