/* wk_memory: what this process may still allocate. Reads files below /proc and /sys; any thread. */
#ifndef WK_MODEL_MEMORY_H
#define WK_MODEL_MEMORY_H

#include <stdint.h>

/* Bytes, from the machine and from the control group (version 1 or 2); UINT64_MAX when neither says. */
uint64_t wk_memory_available(void);

#endif
