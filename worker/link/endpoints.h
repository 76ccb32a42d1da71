/* wk_endpoints: parses "ws://host:port,wss://[::1]:port". Pure. */
#ifndef DL_WORKER_LINK_ENDPOINTS_H
#define DL_WORKER_LINK_ENDPOINTS_H

#include "worker/link/hub.h"

/* Fills `out` (DL_SPEC_SHARDS_MAX) and `*count`. DL_EINVAL names the part that is wrong. */
DL_MUST_CHECK enum dl_rc wk_endpoints_parse(const char *text, struct wk_endpoint *out, uint32_t *count,
                                            struct dl_err *err);

#endif
