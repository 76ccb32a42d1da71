#include "worker/link/outbox.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

enum dl_rc wk_outbox_init(struct wk_outbox *box, size_t capacity, struct dl_err *err)
{
    *box = (struct wk_outbox){.capacity = capacity};
    box->bytes = malloc(capacity); /* Not zeroed: what is never used takes no memory. */
    return box->bytes != NULL ? DL_OK
                              : dl_err_set(err, DL_ENOMEM, "join: no memory for a send buffer of %zu bytes", capacity);
}

void wk_outbox_release(struct wk_outbox *box)
{
    wk_outbox_clear(box);
    free(dl_take(box->bytes));
}

bool wk_outbox_is_empty(const struct wk_outbox *box)
{
    return box->start == box->end && box->data_bytes == 0;
}

uint8_t *wk_outbox_space(struct wk_outbox *box)
{
    assert(wk_outbox_is_empty(box));
    return box->bytes;
}

void wk_outbox_put(struct wk_outbox *box, size_t bytes)
{
    assert(wk_outbox_is_empty(box) && bytes <= box->capacity);
    box->start = 0;
    box->end = bytes;
}

void wk_outbox_lend(struct wk_outbox *box, const uint8_t *data, size_t bytes)
{
    assert(box->data_bytes == 0 && bytes > 0);
    box->data = data;
    box->data_bytes = bytes;
}

void wk_outbox_parts(const struct wk_outbox *box, struct wk_outbox_parts *parts)
{
    *parts = (struct wk_outbox_parts){
        .bytes = {box->bytes + box->start, box->data},
        .sizes = {box->end - box->start, box->data_bytes},
    };
}

static bool is_lent(const struct wk_outbox *box)
{
    return box->data != NULL && box->copy == NULL;
}

/* What lay behind the own bytes is nobody's concern any more; true when it was lent. */
static bool let_go(struct wk_outbox *box)
{
    bool lent = is_lent(box);
    box->data = NULL;
    box->data_bytes = 0;
    free(dl_take(box->copy));
    return lent;
}

bool wk_outbox_sent(struct wk_outbox *box, size_t bytes)
{
    size_t own = DL_MIN(bytes, box->end - box->start), rest = bytes - own;
    assert(rest <= box->data_bytes);
    box->start += own;
    if (rest == 0) {
        return false;
    }
    box->data += rest;
    box->data_bytes -= rest;
    return box->data_bytes == 0 && let_go(box);
}

enum dl_rc wk_outbox_keep(struct wk_outbox *box, struct dl_err *err)
{
    if (!is_lent(box)) {
        return DL_OK;
    }
    box->copy = malloc(box->data_bytes);
    if (box->copy == NULL) {
        return dl_err_set(err, DL_ENOMEM, "push: no memory for the %zu bytes that are left of a chunk",
                          box->data_bytes);
    }
    memcpy(box->copy, box->data, box->data_bytes);
    box->data = box->copy;
    return DL_OK;
}

void wk_outbox_clear(struct wk_outbox *box)
{
    (void)let_go(box);
    box->start = box->end = 0;
}
