#include "operator/local/render.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "common/mem.h"

#define BOLD "\033[1m"
#define DIM "\033[2m"
#define GREEN "\033[32m"
#define YELLOW "\033[33m"
#define RED "\033[31m"
#define PLAIN "\033[0m"

/* --- formats --- */

void op_format_count(double value, char *out, size_t out_bytes)
{
    static const char *const units[] = {"", "k", "M", "G", "T", "P"};
    size_t unit = 0;
    if (!isfinite(value)) {
        snprintf(out, out_bytes, "-");
        return;
    }
    while (value >= 999.5 && unit + 1 < DL_COUNT_OF(units)) {
        value /= 1000;
        unit++;
    }
    int decimals = unit == 0 ? 0 : (value < 9.995 ? 2 : (value < 99.95 ? 1 : 0));
    snprintf(out, out_bytes, "%.*f%s", decimals, value, units[unit]);
}

void op_format_seconds(double seconds, char *out, size_t out_bytes)
{
    if (!isfinite(seconds) || seconds < 0 || seconds > 1e8) {
        snprintf(out, out_bytes, "-");
        return;
    }
    unsigned long whole = (unsigned long)(seconds + 0.5);
    if (whole >= 3600) {
        snprintf(out, out_bytes, "%lu:%02lu:%02lu", whole / 3600, whole / 60 % 60, whole % 60);
    } else {
        snprintf(out, out_bytes, "%lu:%02lu", whole / 60, whole % 60);
    }
}

static const char *const blocks[] = {"\u2581", "\u2582", "\u2583", "\u2584", "\u2585", "\u2586", "\u2587", "\u2588"};
static const char ramp[] = "_.-~=+*#";

void op_format_spark(const struct op_view_point *points, uint32_t count, uint32_t cells, bool unicode, char *out,
                     size_t out_bytes)
{
    out[0] = 0;
    double low = INFINITY, high = -INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        low = fmin(low, points[i].loss);
        high = fmax(high, points[i].loss);
    }
    uint32_t used_cells = DL_MIN(count, cells);
    size_t used = 0;
    for (uint32_t cell = 0; cell < used_cells; cell++) {
        uint64_t at = used_cells == 1 ? count - 1 : (uint64_t)cell * (count - 1) / (used_cells - 1);
        double share = high > low ? (points[at].loss - low) / (high - low) : 0;
        int level = (int)lround(share * 7);
        int length = unicode ? snprintf(out + used, out_bytes - used, "%s", blocks[level])
                             : snprintf(out + used, out_bytes - used, "%c", ramp[level]);
        if (length < 0 || used + (size_t)length >= out_bytes) {
            out[used] = 0;
            return;
        }
        used += (size_t)length;
    }
}

static void format_bar(double share, uint32_t cells, bool unicode, char *out, size_t out_bytes)
{
    size_t used = 0;
    uint32_t filled = (uint32_t)lround(fmin(1, fmax(0, share)) * cells);
    for (uint32_t i = 0; i < cells && used + 4 < out_bytes; i++) {
        const char *cell = i < filled ? (unicode ? "\u2588" : "#") : (unicode ? "\u2591" : ".");
        used += (size_t)snprintf(out + used, out_bytes - used, "%s", cell);
    }
    out[DL_MIN(used, out_bytes - 1)] = 0;
}

static double seconds_left(const struct op_view *view)
{
    if (view->is_over || !isfinite(view->progress)) {
        return NAN;
    }
    double left = (double)view->status.token_budget - (double)view->status.tokens;
    if (view->tokens_per_second > 0 && left >= 0) {
        return left / view->tokens_per_second;
    }
    return view->progress > 0.01 ? view->seconds * (1 - view->progress) / view->progress : NAN;
}

/* --- one line --- */

void op_render_line(const struct op_view *view, char *out, size_t out_bytes)
{
    const struct op_job_status *status = &view->status;
    char elapsed[32], left[32], rate[32], validation[64] = "", loss[32] = "-";
    op_format_seconds(view->seconds, elapsed, sizeof elapsed);
    op_format_seconds(seconds_left(view), left, sizeof left);
    op_format_count(view->tokens_per_second, rate, sizeof rate);
    if (isfinite(status->loss)) {
        snprintf(loss, sizeof loss, "%.3f", status->loss);
    }
    if (view->point_count > 0) {
        snprintf(validation, sizeof validation, "  validation %.3f -> %.3f", view->points[0].loss,
                 view->points[view->point_count - 1].loss);
    }
    char progress[16] = "-";
    if (isfinite(view->progress)) {
        snprintf(progress, sizeof progress, "%.0f %%", 100 * view->progress);
    }
    snprintf(out, out_bytes, "%7s  %-10s %5s  learners %u/%u  round %llu  %s tokens/s  loss %s%s  left %s", elapsed,
             view->phase, progress, status->connected, status->learners_wanted, (unsigned long long)status->round, rate,
             loss, validation, left);
}

/* --- frame --- */

struct painter {
    const struct op_view *view;
    const struct op_render_options *options;
    struct op_frame *frame;
    uint32_t columns; /* Of the current line. */
};

static void begin_line(struct painter *p)
{
    if (p->frame->line_count < OP_FRAME_LINES_MAX) {
        p->frame->lines[p->frame->line_count++] = p->frame->used;
    }
    p->columns = 0;
}

static void append(struct painter *p, const char *bytes, size_t size)
{
    /* Keeps room for a reset and the terminating zero of the line. */
    if (p->frame->used + size + 16 < OP_FRAME_BYTES_MAX) {
        memcpy(p->frame->text + p->frame->used, bytes, size);
        p->frame->used += size;
    }
}

static void end_line(struct painter *p)
{
    if (p->options->color) {
        memcpy(p->frame->text + p->frame->used, PLAIN, sizeof PLAIN - 1);
        p->frame->used += sizeof PLAIN - 1;
    }
    p->frame->text[p->frame->used++] = 0;
}

static void style(struct painter *p, const char *code)
{
    if (p->options->color) {
        append(p, code, strlen(code));
    }
}

/* Text is UTF-8 with characters of one column each; control characters never reach the terminal. */
static void put(struct painter *p, const char *fmt, ...) DL_PRINTF(2, 3);
static void put(struct painter *p, const char *fmt, ...)
{
    char text[1024];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    for (const char *at = text; *at != 0;) {
        size_t length = 1;
        while ((at[length] & 0xC0) == 0x80) {
            length++;
        }
        if (p->columns >= p->options->width) {
            return;
        }
        bool is_control = (unsigned char)*at < 0x20 || *at == 0x7f;
        append(p, is_control ? "?" : at, is_control ? 1 : length);
        p->columns++;
        at += length;
    }
}

static const char *phase_style(const struct op_view *view)
{
    if (strcmp(view->phase, "Failed") == 0) {
        return RED;
    }
    bool is_waiting = strncmp(view->phase, "Waiting", 7) == 0 || strcmp(view->phase, "Unreachable") == 0;
    return is_waiting ? YELLOW : GREEN;
}

static void paint_head(struct painter *p)
{
    const struct op_view *view = p->view;
    const struct op_job_status *status = &view->status;
    begin_line(p);
    style(p, BOLD);
    put(p, "%s", view->job);
    style(p, PLAIN);
    put(p, "  ");
    style(p, phase_style(view));
    put(p, "%s", view->phase);
    style(p, PLAIN);
    put(p, "  learners %u/%u  quorum %u/%u  round %llu", status->connected, status->learners_wanted,
        status->quorum_have, status->quorum_need, (unsigned long long)status->round);
    if (isfinite(status->goodput)) {
        put(p, "  goodput %.0f %%", 100 * status->goodput);
    }
    if (isfinite(status->loss)) {
        put(p, "  loss %.3f", status->loss);
    }
    end_line(p);
    if (view->message[0] != 0) {
        begin_line(p);
        style(p, DIM);
        put(p, "%s", view->message);
        end_line(p);
    }
}

static void paint_progress(struct painter *p)
{
    const struct op_view *view = p->view;
    char bar[512], tokens[32], budget[32], rate[32], elapsed[32], left[32];
    uint32_t cells = p->options->width > 100 ? 40 : DL_MAX(p->options->width / 4, 8u);
    op_format_count((double)view->status.tokens, tokens, sizeof tokens);
    op_format_count((double)view->status.token_budget, budget, sizeof budget);
    op_format_count(view->tokens_per_second, rate, sizeof rate);
    op_format_seconds(view->seconds, elapsed, sizeof elapsed);
    op_format_seconds(seconds_left(view), left, sizeof left);
    begin_line(p);
    if (isfinite(view->progress)) {
        format_bar(view->progress, cells, p->options->unicode, bar, sizeof bar);
        style(p, GREEN);
        put(p, "%s", bar);
        style(p, PLAIN);
        put(p, " %.0f %%  %s of %s tokens", 100 * view->progress, tokens, budget);
    } else {
        put(p, "%s tokens", tokens);
    }
    put(p, "  %s tokens/s  %s", rate, elapsed);
    if (!view->is_over) {
        put(p, ", %s left", left);
    }
    end_line(p);
}

static void paint_validation(struct painter *p)
{
    const struct op_view *view = p->view;
    if (view->point_count == 0) {
        return;
    }
    char spark[256];
    op_format_spark(view->points, view->point_count, 40, p->options->unicode, spark, sizeof spark);
    begin_line(p);
    put(p, "validation loss %.3f", view->points[0].loss);
    put(p, p->options->unicode ? " \u2192 " : " -> ");
    style(p, BOLD);
    put(p, "%.3f", view->points[view->point_count - 1].loss);
    style(p, PLAIN);
    put(p, "  %s", spark);
    end_line(p);
}

/* Of the sequences that were ever leased out: where they are. */
static void paint_data(struct painter *p)
{
    const struct op_data_status *data = &p->view->status.data;
    if (!data->known || data->positions == 0) {
        return;
    }
    char counted[32], positions[32], leased[32], queued[32];
    op_format_count((double)data->counted, counted, sizeof counted);
    op_format_count((double)data->positions, positions, sizeof positions);
    op_format_count((double)data->leased, leased, sizeof leased);
    op_format_count((double)data->queued, queued, sizeof queued);
    begin_line(p);
    put(p, "data %s of %s sequences counted, %s leased, %s queued", counted, positions, leased, queued);
    end_line(p);
}

static void paint_learner(struct painter *p, const struct op_view_learner *learner)
{
    char rate[32], loss[32] = "-";
    op_format_count(learner->tokens_per_second, rate, sizeof rate);
    if (isfinite(learner->loss)) {
        snprintf(loss, sizeof loss, "%.3f", learner->loss);
    }
    bool is_fine = strcmp(learner->state, "training") == 0 || strcmp(learner->state, "connected") == 0;
    begin_line(p);
    put(p, "%7u  ", learner->learner);
    style(p, is_fine ? GREEN : YELLOW);
    put(p, "%-9s", learner->state);
    style(p, PLAIN);
    put(p, " %8llu %9s %8s %7llu %7llu %9u", (unsigned long long)learner->step, rate, loss,
        (unsigned long long)learner->behind, (unsigned long long)learner->merged, learner->restarts);
    end_line(p);
}

/* Learners by id as far as they fit, then how many are not shown. */
static void paint_learners(struct painter *p, uint32_t lines)
{
    const struct op_view *view = p->view;
    if (view->learner_count == 0 || lines < 2) {
        return;
    }
    begin_line(p);
    style(p, DIM);
    put(p, "%7s  %-9s %8s %9s %8s %7s %7s %9s", "learner", "state", "step", "tokens/s", "loss", "behind", "merged",
        "restarts");
    end_line(p);
    uint32_t room = lines - 1;
    uint32_t shown = view->learner_count <= room ? view->learner_count : room - 1;
    for (uint32_t i = 0; i < shown; i++) {
        paint_learner(p, &view->learners[i]);
    }
    if (shown < view->learner_count && room > 0) {
        begin_line(p);
        style(p, DIM);
        put(p, "%7s  %u more", "...", view->learner_count - shown);
        end_line(p);
    }
}

static void paint_events(struct painter *p, uint32_t lines)
{
    const struct op_view *view = p->view;
    uint32_t shown = DL_MIN(view->event_count, lines);
    for (uint32_t i = view->event_count - shown; i < view->event_count; i++) {
        const struct op_event *event = &view->events[i];
        char at[32];
        op_format_seconds(event->seconds, at, sizeof at);
        begin_line(p);
        style(p, DIM);
        put(p, "%7s  ", at);
        style(p, PLAIN);
        put(p, "%s%s%s", event->who, event->who[0] != 0 ? " " : "", event->text);
        end_line(p);
    }
}

void op_render_frame(const struct op_view *view, const struct op_render_options *options, struct op_frame *frame)
{
    frame->used = 0;
    frame->line_count = 0;
    struct painter painter = {.view = view, .options = options, .frame = frame};
    paint_head(&painter);
    paint_progress(&painter);
    paint_validation(&painter);
    paint_data(&painter);
    /* The last line stays free, so that the terminal never scrolls. */
    uint32_t left = options->height > frame->line_count + 1 ? options->height - frame->line_count - 1 : 0;
    uint32_t events = DL_MIN(view->event_count, DL_MAX(left / 3, DL_MIN(left, 3u)));
    paint_learners(&painter, left - events);
    left = options->height > frame->line_count + 1 ? options->height - frame->line_count - 1 : 0;
    paint_events(&painter, DL_MIN(left, (uint32_t)OP_VIEW_EVENTS_MAX));
}
