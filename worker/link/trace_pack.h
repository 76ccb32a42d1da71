/* wk_trace_pack: the entries of the tape that a learner has yet to deliver, as bytes that travel with its state: TRACE
 * messages (common/wire.h), one after the other. Pure, but for taking memory. */
#ifndef DL_WORKER_LINK_TRACE_PACK_H
#define DL_WORKER_LINK_TRACE_PACK_H

#include <stddef.h>
#include <stdint.h>

#include "worker/link/link.h"

#define WK_TRACE_BYTES_MAX (4u << 20)

/* `*out`: `*size` bytes, the caller's; NULL when there is nothing. DL_ENOMEM; DL_EFULL: more than WK_TRACE_BYTES_MAX. */
DL_MUST_CHECK enum dl_rc wk_trace_pack(const struct wk_link *link, uint8_t **out, size_t *size, struct dl_err *err);
/* Hands them to the link (wk_link_trace_adopt). DL_EPROTO, DL_ECORRUPT, DL_ENOMEM; DL_EFULL: of too many peers. */
DL_MUST_CHECK enum dl_rc wk_trace_unpack(struct wk_link *link, const uint8_t *bytes, size_t size, struct dl_err *err);

#endif
