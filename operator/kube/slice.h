/* op_slice: parts of a JSON text, found without parsing the whole: one object of a long list is parsed at a time.
 *
 * Brackets and strings are matched, nothing else is checked: what is cut out is parsed by its user. Pure; any thread;
 * layer operator/kube. */
#ifndef OP_KUBE_SLICE_H
#define OP_KUBE_SLICE_H

#include <stdbool.h>
#include <stddef.h>

struct op_slice {
    const char *text; /* Borrowed from the whole. */
    size_t size;
};

/* The value of `key` directly within the object `whole`; false when it is not there or the text is broken before it. */
bool op_slice_member(struct op_slice whole, const char *key, struct op_slice *value);

/* Walks the elements of the array `whole`: start with *place = 0. Returns false at the end; `*is_broken` tells whether
 * the text broke off. */
bool op_slice_next(struct op_slice whole, size_t *place, struct op_slice *element, bool *is_broken);

/* Whether the value is the string `text` (no escapes looked at). */
bool op_slice_is_text(struct op_slice value, const char *text);

#endif
