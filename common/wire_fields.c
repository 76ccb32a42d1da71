/* What both directions check a field's value by: a peer's on the way in, our own caller's on the way out. */
#include <assert.h>
#include <string.h>

#include "common/wire_internal.h"

/* Size on the wire of a plain number; 0 for the other kinds. */
unsigned dl_wire_number_bytes(enum dl_wire_kind kind)
{
    switch (kind) {
    case DL_WIRE_KIND_U8: return 1;
    case DL_WIRE_KIND_U16: return 2;
    case DL_WIRE_KIND_U32:
    case DL_WIRE_KIND_I32:
    case DL_WIRE_KIND_F32: return 4;
    case DL_WIRE_KIND_U64:
    case DL_WIRE_KIND_F64: return 8;
    case DL_WIRE_KIND_NAME:
    case DL_WIRE_KIND_TEXT:
    case DL_WIRE_KIND_FRAGMENTS:
    case DL_WIRE_KIND_TENSORS:
    case DL_WIRE_KIND_TRACE: return 0;
    }
    return 0;
}

/* Both directions check by this: a peer's value on the way in, our own caller's on the way out. */
bool dl_wire_number_in_range(const struct dl_wire_field *field, uint64_t bits)
{
    switch (field->kind) {
    case DL_WIRE_KIND_U8:
    case DL_WIRE_KIND_U16:
    case DL_WIRE_KIND_U32:
    case DL_WIRE_KIND_U64: return bits >= (uint64_t)field->least && bits <= field->most;
    case DL_WIRE_KIND_I32: {
        int64_t value = (int32_t)(uint32_t)bits;
        return value >= field->least && value <= (int64_t)field->most;
    }
    case DL_WIRE_KIND_F32: {
        float value;
        uint32_t word = (uint32_t)bits;
        memcpy(&value, &word, sizeof value);
        return field->most == 0 || (value >= 0.0f && value <= (float)field->most);
    }
    case DL_WIRE_KIND_F64: return true;
    case DL_WIRE_KIND_NAME:
    case DL_WIRE_KIND_TEXT:
    case DL_WIRE_KIND_FRAGMENTS:
    case DL_WIRE_KIND_TENSORS:
    case DL_WIRE_KIND_TRACE: break;
    }
    assert(!"not a number");
    return false;
}

bool dl_wire_is_control_character(uint8_t byte)
{
    return byte < 0x20 || byte == 0x7f;
}

enum dl_rc dl_wire_field_error(struct dl_err *err, enum dl_rc rc, const struct dl_wire_format *format,
                               const struct dl_wire_field *field, const char *what)
{
    return dl_err_set(err, rc, "message %s, field %s: %s", format->name, field->name, what);
}

/* Says what is wrong with a list's element, NULL when nothing is. `previous` is the index before it, or -1. */
const char *dl_wire_fragment_fault(const struct dl_wire_fragment *fragment, int64_t previous)
{
    if (fragment->fragment >= DL_SPEC_FRAGMENTS_MAX) {
        return "index out of range";
    }
    if ((int64_t)fragment->fragment <= previous) {
        return "indices do not ascend";
    }
    if (fragment->version > DL_WIRE_COUNTER_MAX || fragment->applied_step > DL_WIRE_COUNTER_MAX ||
        fragment->tokens > DL_WIRE_COUNTER_MAX) {
        return "counter out of range";
    }
    return NULL;
}
