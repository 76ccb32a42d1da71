#include "worker/link/serve_http.h"

#include <string.h>
#include <strings.h>

#define DIGITS_MAX 18

size_t wk_http_head_bytes(const char *text, size_t size)
{
    const char *end = memmem(text, size, "\r\n\r\n", 4);
    return end == NULL ? 0 : (size_t)(end - text) + 4;
}

struct line {
    const char *at;
    size_t size;
};

/* The next line of a complete head, without its end; false: the empty one that ends it. */
static bool next_line(const char **at, const char *end, struct line *line)
{
    const char *stop = memmem(*at, (size_t)(end - *at), "\r\n", 2);
    if (stop == NULL || stop == *at) {
        return false;
    }
    *line = (struct line){.at = *at, .size = (size_t)(stop - *at)};
    *at = stop + 2;
    return true;
}

/* Whether the line is the field `name`; `*value` is then its value without surrounding blanks. */
static bool is_field(const struct line *line, const char *name, struct line *value)
{
    size_t length = strlen(name);
    if (line->size <= length || line->at[length] != ':' || strncasecmp(line->at, name, length) != 0) {
        return false;
    }
    *value = (struct line){.at = line->at + length + 1, .size = line->size - length - 1};
    while (value->size > 0 && (value->at[0] == ' ' || value->at[0] == '\t')) {
        value->at++;
        value->size--;
    }
    while (value->size > 0 && (value->at[value->size - 1] == ' ' || value->at[value->size - 1] == '\t')) {
        value->size--;
    }
    return true;
}

static bool is_text(const struct line *line, const char *text)
{
    return line->size == strlen(text) && strncasecmp(line->at, text, line->size) == 0;
}

/* Takes decimal digits from the front; false: there is none, or there are too many. */
static bool take_number(struct line *from, uint64_t *value)
{
    size_t digits = 0;
    *value = 0;
    while (digits < from->size && digits <= DIGITS_MAX && from->at[digits] >= '0' && from->at[digits] <= '9') {
        *value = *value * 10 + (uint64_t)(from->at[digits++] - '0');
    }
    from->at += digits;
    from->size -= digits;
    return digits > 0 && digits <= DIGITS_MAX;
}

static bool take_text(struct line *from, const char *text)
{
    size_t length = strlen(text);
    if (from->size < length || memcmp(from->at, text, length) != 0) {
        return false;
    }
    from->at += length;
    from->size -= length;
    return true;
}

static bool take_id(struct line *from, uint64_t *id)
{
    *id = 0;
    if (from->size < 16) {
        return false;
    }
    for (size_t i = 0; i < 16; i++) {
        char c = from->at[i];
        bool digit = c >= '0' && c <= '9', letter = c >= 'a' && c <= 'f';
        if (!digit && !letter) {
            return false;
        }
        *id = *id << 4 | (uint64_t)(digit ? c - '0' : c - 'a' + 10);
    }
    from->at += 16;
    from->size -= 16;
    return true;
}

static int parse_request_line(struct line line, struct wk_http_request *out)
{
    if (!take_text(&line, "GET ")) {
        return 405;
    }
    if (!take_text(&line, "/v1/state")) {
        return 404;
    }
    out->manifest = !take_text(&line, "/");
    if (!out->manifest && !take_id(&line, &out->id)) {
        return 404;
    }
    if (line.size > 0 && line.at[0] != ' ') {
        return 404;
    }
    return is_text(&line, " HTTP/1.1") ? 200 : 400;
}

static bool parse_range(struct line value, struct wk_http_request *out)
{
    out->ranged = true;
    out->last = UINT64_MAX;
    if (!take_text(&value, "bytes=") || !take_number(&value, &out->first) || !take_text(&value, "-")) {
        return false;
    }
    out->open = value.size == 0;
    return out->open || (take_number(&value, &out->last) && value.size == 0 && out->last >= out->first);
}

static bool token_is(struct line value, const char *token)
{
    size_t length = strlen(token);
    if (!take_text(&value, "Bearer ") || value.size != length) {
        return false;
    }
    unsigned differs = 0;
    for (size_t i = 0; i < length; i++) {
        differs |= (unsigned)(value.at[i] ^ token[i]);
    }
    return differs == 0;
}

int wk_http_request_parse(const char *head, size_t size, const char *token, struct wk_http_request *out)
{
    const char *at = head, *end = head + size;
    struct line line, value;
    *out = (struct wk_http_request){0};
    if (!next_line(&at, end, &line)) {
        return 400;
    }
    struct line request = line;
    bool allowed = false, range_is_wrong = false;
    while (next_line(&at, end, &line)) {
        if (is_field(&line, "Authorization", &value)) {
            allowed = token_is(value, token);
        } else if (is_field(&line, "Range", &value)) {
            range_is_wrong = !parse_range(value, out);
        } else if (is_field(&line, "Connection", &value)) {
            out->close = is_text(&value, "close");
        } else if (is_field(&line, "Content-Length", &value) ? !is_text(&value, "0")
                                                             : is_field(&line, "Transfer-Encoding", &value)) {
            return 400; /* A body has no place here. */
        }
    }
    if (!allowed) {
        return 401; /* Before anything that would say what is there. */
    }
    int status = parse_request_line(request, out);
    return status == 200 && range_is_wrong ? 416 : status;
}

bool wk_http_answer_parse(const char *head, size_t size, struct wk_http_answer *out)
{
    const char *at = head, *end = head + size;
    struct line line, value;
    uint64_t status = 0, last = 0;
    bool has_length = false, has_range = false;
    *out = (struct wk_http_answer){0};
    if (!next_line(&at, end, &line) || !take_text(&line, "HTTP/1.1 ") || !take_number(&line, &status) || status > 999) {
        return false;
    }
    out->status = (int)status;
    while (next_line(&at, end, &line)) {
        if (is_field(&line, "Content-Length", &value)) {
            has_length = take_number(&value, &out->length) && value.size == 0;
        } else if (is_field(&line, "Content-Range", &value)) {
            has_range = take_text(&value, "bytes ") && take_number(&value, &out->first) && take_text(&value, "-") &&
                        take_number(&value, &last) && take_text(&value, "/") && take_number(&value, &out->total) &&
                        value.size == 0;
        } else if (is_field(&line, "Connection", &value)) {
            out->close = is_text(&value, "close");
        } else if (is_field(&line, "Transfer-Encoding", &value)) {
            return false;
        }
    }
    bool fits = has_range && last >= out->first && last < out->total && last - out->first + 1 == out->length;
    return has_length && (out->status != 206 || fits);
}
