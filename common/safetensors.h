/* dl_safetensors: the safetensors file format (Hugging Face): 8 bytes header length (little-endian), JSON header, raw
 * data.
 *
 * Writes F32; reads F32, BF16 and F16 (converted to F32). All sizes are checked against the file before memory is
 * allocated for them. A file is written to a temporary name beside it, synced, renamed, and its folder synced. Any
 * thread. */
#ifndef DL_COMMON_SAFETENSORS_H
#define DL_COMMON_SAFETENSORS_H

#include <stdint.h>

#include "common/err.h"
#include "common/layout.h"

#define DL_SAFETENSORS_HEADER_MAX (UINT64_C(100) * 1024 * 1024) /* As the reference implementation. */
#define DL_SAFETENSORS_METADATA_MAX 64

enum dl_dtype { DL_DTYPE_F32, DL_DTYPE_BF16, DL_DTYPE_F16 };

struct dl_safetensors_pair { /* One entry of the free-form `__metadata__` map. */
    char *key;
    char *value;
};

struct dl_safetensors; /* An open file. Opaque. */

/* Writes `tensors` (names unique; role and layer are not stored) with their float32 data. `metadata` may be NULL. Data
 * order is the caller's. DL_EIO, DL_EFULL: the old file, if any, is untouched. */
DL_MUST_CHECK enum dl_rc dl_safetensors_write(const char *path, const struct dl_tensor *tensors,
                                              const float *const *data, uint32_t tensor_count,
                                              const struct dl_safetensors_pair *metadata, uint32_t metadata_count,
                                              struct dl_err *err);

/* Opens and validates: offsets within the file, not overlapping, no hole, sizes equal to shape times dtype.
 * DL_ENOTFOUND, DL_EIO, DL_EINVAL (not safetensors: the text says what is wrong), DL_EUNSUPPORTED (a dtype other than
 * the three; it is named). */
DL_MUST_CHECK enum dl_rc dl_safetensors_open(const char *path, struct dl_safetensors **out, struct dl_err *err);
void dl_safetensors_close(struct dl_safetensors *file); /* NULL is fine. */

const struct dl_tensor *dl_safetensors_tensor(const struct dl_safetensors *file, uint32_t index);
/* Index of a name, or -1. */
int64_t dl_safetensors_find(const struct dl_safetensors *file, const char *name);
/* Value of a metadata key, borrowed, or NULL. */
const char *dl_safetensors_metadata(const struct dl_safetensors *file, const char *key);

/* Reads a whole tensor as float32 into `out` (dl_tensor_elements of it). */
DL_MUST_CHECK enum dl_rc dl_safetensors_read(struct dl_safetensors *file, uint32_t index, float *out,
                                             struct dl_err *err);

/* Validates a header that is in memory (for fuzzing): `data_bytes` is what follows it in the file. */
DL_MUST_CHECK enum dl_rc dl_safetensors_parse(const char *header, uint64_t header_bytes, uint64_t data_bytes,
                                              struct dl_safetensors **out, struct dl_err *err);

#endif
