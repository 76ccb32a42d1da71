/* wk_dictzip: unpacks a dictzip file, a gzip file of chunks that stand alone, on several threads.
 *
 * The faster way for one kind of well-formed file: whatever it does not take (other gzip files, damaged ones, too large ones, no
 * memory) is left to wk_gunzip, which says what is wrong. Starts threads, and waits for them. Any thread. Layer: worker/data. */
#ifndef WK_DATA_DICTZIP_H
#define WK_DATA_DICTZIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define WK_DICTZIP_THREADS_MAX 4

/* `*out` (the caller frees) gets the content, checked against the checksum and size in the file. False: nothing was done. */
bool wk_dictzip_unpack(const uint8_t *packed, size_t packed_size, uint64_t bytes_max, uint8_t **out, size_t *out_size);

#endif
