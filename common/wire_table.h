/* The table of the wire messages' fields, from which wire_encode.c and wire_decode.c work. Pure; part of dl_wire. */
#ifndef DL_COMMON_WIRE_TABLE_H
#define DL_COMMON_WIRE_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "common/wire.h"

/* Counters stay below 2^62, so that a receiver may add two of them without looking for overflow. */
#define DL_WIRE_COUNTER_MAX (UINT64_C(1) << 62)
#define DL_WIRE_FRAGMENT_BYTES 32

enum dl_wire_kind {
    DL_WIRE_KIND_U8,
    DL_WIRE_KIND_U16,
    DL_WIRE_KIND_U32,
    DL_WIRE_KIND_I32,
    DL_WIRE_KIND_U64,
    DL_WIRE_KIND_F32, /* Any value; a bound of 1 in `most` asks for 0..1. */
    DL_WIRE_KIND_F64,
    DL_WIRE_KIND_NAME,      /* u16 length, bytes; not empty, no control characters. */
    DL_WIRE_KIND_TEXT,      /* As NAME, may be empty; on encoding, control characters become spaces. */
    DL_WIRE_KIND_FRAGMENTS, /* u32 count, then DL_WIRE_FRAGMENT_BYTES each; indices strictly ascending. */
    DL_WIRE_KIND_TENSORS,   /* u32 length, bytes. */
    DL_WIRE_KIND_TRACE,     /* u32 count, then each entry's fields. */
};

struct dl_wire_field {
    const char *name;
    enum dl_wire_kind kind;
    uint32_t offset; /* In struct dl_wire_message. */
    uint32_t
        capacity; /* NAME, TEXT: bytes with the terminating zero. FRAGMENTS, TENSORS, TRACE: offset of the count. */
    int64_t least;
    uint64_t most;
};

struct dl_wire_format {
    const char *name;
    const struct dl_wire_field *fields;
    size_t field_count;
    uint32_t payload_max;
};

/* Of one entry of a DL_WIRE_KIND_TRACE list; offsets are from the entry. */
#define DL_WIRE_TRACE_FIELDS 8
extern const struct dl_wire_field dl_wire_trace_entry_fields[DL_WIRE_TRACE_FIELDS];

/* NULL: there is no such type. A CHUNK has a format without fields. */
const struct dl_wire_format *dl_wire_format_of(unsigned type);

#endif
