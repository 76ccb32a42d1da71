#include "operator/local/terminal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "common/mem.h"

static void read_size(struct op_terminal *terminal)
{
    struct winsize size = {0};
    bool is_known = ioctl(terminal->fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 && size.ws_row > 0;
    terminal->options.width = is_known ? DL_MIN((uint32_t)size.ws_col, 400u) : 100;
    terminal->options.height = is_known ? size.ws_row : 30;
}

static bool is_unicode_locale(void)
{
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    for (size_t i = 0; i < DL_COUNT_OF(names); i++) {
        const char *value = getenv(names[i]);
        if (value != NULL && value[0] != 0) {
            return strcasestr(value, "utf-8") != NULL || strcasestr(value, "utf8") != NULL;
        }
    }
    return false;
}

enum dl_rc op_terminal_init(struct op_terminal *terminal, int fd, bool wanted, struct dl_err *err)
{
    *terminal = (struct op_terminal){.fd = fd};
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    bool is_dumb = term == NULL || term[0] == 0 || strcmp(term, "dumb") == 0;
    terminal->is_terminal = wanted && isatty(fd) && !is_dumb;
    if (!terminal->is_terminal) {
        return DL_OK;
    }
    terminal->options.color = no_color == NULL || no_color[0] == 0;
    terminal->options.unicode = is_unicode_locale();
    terminal->frame = malloc(sizeof *terminal->frame);
    if (terminal->frame == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the terminal view (use --no-tty)");
    }
    read_size(terminal);
    return DL_OK;
}

void op_terminal_release(struct op_terminal *terminal)
{
    free(terminal->frame);
    *terminal = (struct op_terminal){.fd = -1};
}

static void write_all(int fd, const char *bytes, size_t size)
{
    size_t done = 0;
    while (done < size) {
        ssize_t written = write(fd, bytes + done, size - done);
        if (written < 0 && errno != EINTR) {
            return; /* The terminal is gone: nothing to show to anyone. */
        }
        done += written > 0 ? (size_t)written : 0;
    }
}

void op_terminal_draw(struct op_terminal *terminal, const struct op_view *view)
{
    struct op_frame *frame = terminal->frame;
    op_render_frame(view, &terminal->options, frame);
    size_t capacity = frame->used + (size_t)frame->line_count * 8 + 128;
    DL_AUTO_FREE char *bytes = malloc(capacity);
    if (bytes == NULL) {
        return;
    }
    /* 2026: the terminal shows the update as a whole, where it knows that mode. */
    size_t used = (size_t)snprintf(bytes, capacity, "\033[?2026h\033[?25l\r");
    if (terminal->drawn_lines > 0) {
        used += (size_t)snprintf(bytes + used, capacity - used, "\033[%uA", terminal->drawn_lines);
    }
    for (uint32_t i = 0; i < frame->line_count; i++) {
        used += (size_t)snprintf(bytes + used, capacity - used, "%s\033[K\n", frame->text + frame->lines[i]);
    }
    used += (size_t)snprintf(bytes + used, capacity - used, "\033[J\033[?25h\033[?2026l");
    write_all(terminal->fd, bytes, used);
    terminal->drawn_lines = frame->line_count;
}

void op_terminal_on_resize(struct op_terminal *terminal)
{
    if (!terminal->is_terminal) {
        return;
    }
    read_size(terminal);
    /* Where the old lines were wrapped to nobody knows. */
    static const char clear[] = "\033[H\033[2J";
    write_all(terminal->fd, clear, sizeof clear - 1);
    terminal->drawn_lines = 0;
}
