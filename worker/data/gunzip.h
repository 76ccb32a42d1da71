/* wk_gunzip: unpacks a gzip file (dictzip is one; several members may follow each other) into memory.
 *
 * Pure. Any thread. Layer: worker/data. */
#ifndef WK_DATA_GUNZIP_H
#define WK_DATA_GUNZIP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/err.h"

bool wk_is_gzip(const uint8_t *bytes, size_t size);

/* `*out` (the caller frees) gets the content, checked against the checksums and sizes in the file. `path` is for
 * errors: DL_ECORRUPT for damaged, cut, or followed by something else than zeros; DL_ENOMEM: more than `bytes_max`, or
 * no memory. */
DL_MUST_CHECK enum dl_rc wk_gunzip(const char *path, const uint8_t *packed, size_t packed_size, uint64_t bytes_max,
                                   uint8_t **out, size_t *out_size, struct dl_err *err);

#endif
