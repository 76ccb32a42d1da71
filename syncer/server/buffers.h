/* sy_buffers: large buffers that are used again and again: pushes, frames of versions.
 *
 * Memory that is given back stays for the next taker, since fresh pages cost more than the bytes that are copied into them.
 * In use and kept together are never more than was once in use, and what nobody has taken for SY_BUFFERS_IDLE_NS goes back to
 * the system. Any thread. */
#ifndef SY_SERVER_BUFFERS_H
#define SY_SERVER_BUFFERS_H

#include <stddef.h>
#include <stdint.h>

#define SY_BUFFERS_KEPT_MAX 128
#define SY_BUFFERS_IDLE_NS (20 * INT64_C(1000000000))

struct sy_buffers; /* Opaque. */

struct sy_buffers *sy_buffers_new(void);          /* NULL: no memory. */
void sy_buffers_free(struct sy_buffers *buffers); /* All must have been given back. NULL is fine. */

/* At least `bytes`, aligned to 64, content undefined; NULL: no memory. A kept buffer is taken when it is large enough and
 * not much larger. */
void *sy_buffers_take(struct sy_buffers *buffers, size_t bytes);
void sy_buffers_give(struct sy_buffers *buffers, void *memory); /* NULL is fine. */

/* Releases what has been idle. */
void sy_buffers_trim(struct sy_buffers *buffers, int64_t now_ns);

/* Bytes kept for the next taker. */
uint64_t sy_buffers_idle_bytes(struct sy_buffers *buffers);

#endif
