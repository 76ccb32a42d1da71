/* Shared by the sources of dl_wire only: the checks of both directions. Pure. */
#ifndef DL_COMMON_WIRE_INTERNAL_H
#define DL_COMMON_WIRE_INTERNAL_H

#include "common/wire.h"
#include "common/wire_table.h"

/* wire_fields.c */
/* Size on the wire of a plain number; 0 for the other kinds. */
unsigned dl_wire_number_bytes(enum dl_wire_kind kind);
bool dl_wire_number_in_range(const struct dl_wire_field *field, uint64_t bits);
bool dl_wire_is_control_character(uint8_t byte);
/* Says what is wrong with a list's element, NULL when nothing is. `previous` is the index before it, or -1. */
const char *dl_wire_fragment_fault(const struct dl_wire_fragment *fragment, int64_t previous);
enum dl_rc dl_wire_field_error(struct dl_err *err, enum dl_rc rc, const struct dl_wire_format *format,
                               const struct dl_wire_field *field, const char *what);

/* wire_header.c */
/* All of a header but the checksum, which is seeded with its first 16 bytes. */
void dl_wire_header_encode(unsigned type, uint32_t payload_bytes, uint8_t out[DL_WIRE_HEADER_BYTES]);
uint64_t dl_wire_header_seed(const uint8_t header[DL_WIRE_HEADER_BYTES]);

#endif
