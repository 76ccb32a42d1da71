#include "operator/kube/slice.h"

#include <string.h>

static size_t skip_space(struct op_slice whole, size_t at)
{
    while (at < whole.size &&
           (whole.text[at] == ' ' || whole.text[at] == '\n' || whole.text[at] == '\r' || whole.text[at] == '\t')) {
        at++;
    }
    return at;
}

/* `at` is on the opening quote; the place after the closing one, or 0 when there is none. */
static size_t skip_string(struct op_slice whole, size_t at)
{
    for (at++; at < whole.size; at++) {
        if (whole.text[at] == '\\') {
            at++;
        } else if (whole.text[at] == '"') {
            return at + 1;
        }
    }
    return 0;
}

/* The place after the value that begins at `at`, or 0 when it does not end. */
static size_t skip_value(struct op_slice whole, size_t at)
{
    size_t depth = 0, start = at;
    while (at < whole.size) {
        char c = whole.text[at];
        if (c == '"') {
            at = skip_string(whole, at);
            if (at == 0) {
                return 0;
            }
            if (depth == 0) {
                return at;
            }
            continue;
        }
        if (depth == 0 && strchr(",]} \n\r\t", c) != NULL) {
            return at > start ? at : 0; /* A number or a word ends here. */
        }
        if (c == '{' || c == '[') {
            depth++;
        } else if ((c == '}' || c == ']') && --depth == 0) {
            return at + 1;
        }
        at++;
    }
    return depth == 0 && at > start ? at : 0;
}

bool op_slice_member(struct op_slice whole, const char *key, struct op_slice *value)
{
    size_t at = skip_space(whole, 0), key_size = strlen(key);
    if (at >= whole.size || whole.text[at] != '{') {
        return false;
    }
    at = skip_space(whole, at + 1);
    while (at < whole.size && whole.text[at] == '"') {
        size_t name = at + 1, after = skip_string(whole, at);
        if (after == 0) {
            return false;
        }
        bool is_it = after - 1 - name == key_size && memcmp(whole.text + name, key, key_size) == 0;
        at = skip_space(whole, after);
        if (at >= whole.size || whole.text[at] != ':') {
            return false;
        }
        at = skip_space(whole, at + 1);
        size_t end = skip_value(whole, at);
        if (end == 0) {
            return false;
        }
        if (is_it) {
            *value = (struct op_slice){whole.text + at, end - at};
            return true;
        }
        at = skip_space(whole, end);
        if (at >= whole.size || whole.text[at] != ',') {
            return false;
        }
        at = skip_space(whole, at + 1);
    }
    return false;
}

bool op_slice_next(struct op_slice whole, size_t *place, struct op_slice *element, bool *is_broken)
{
    size_t at = skip_space(whole, *place);
    *is_broken = true;
    char expected = *place == 0 ? '[' : ',';
    if (*place != 0 && at < whole.size && whole.text[at] == ']') {
        *is_broken = false;
        return false;
    }
    if (at >= whole.size || whole.text[at] != expected) {
        return false;
    }
    at = skip_space(whole, at + 1);
    if (*place == 0 && at < whole.size && whole.text[at] == ']') {
        *is_broken = false;
        return false;
    }
    size_t end = skip_value(whole, at);
    if (end == 0) {
        return false;
    }
    *element = (struct op_slice){whole.text + at, end - at};
    *place = end;
    *is_broken = false;
    return true;
}

bool op_slice_is_text(struct op_slice value, const char *text)
{
    size_t size = strlen(text);
    return value.size == size + 2 && value.text[0] == '"' && memcmp(value.text + 1, text, size) == 0;
}
