/* Inside of dl_safetensors, shared by its two source files. */
#ifndef DL_COMMON_SAFETENSORS_INTERNAL_H
#define DL_COMMON_SAFETENSORS_INTERNAL_H

#include "common/safetensors.h"

struct dl_safetensors {
    int fd; /* -1: only a header. */
    char *path;
    uint64_t data_start; /* Byte in the file where data begins. */
    uint32_t count, capacity;
    struct dl_tensor *tensors;
    struct dl_safetensors_entry {
        uint64_t begin, end; /* Bytes from data_start. */
        enum dl_dtype dtype;
    } * entries;
    uint32_t *by_name; /* Indices in the order of names. */
    uint32_t metadata_count;
    struct dl_safetensors_pair metadata[DL_SAFETENSORS_METADATA_MAX];
};

#endif
