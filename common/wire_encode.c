/* Messages to bytes, by the table of fields. Writes while there is room and goes on counting when there is none, so that one
 * walk gives the size needed. */
#include <assert.h>
#include <string.h>

#include "common/hash.h"
#include "common/le.h"
#include "common/wire_internal.h"

struct writer {
    uint8_t *out;
    size_t capacity, used;
};

static uint8_t *claim(struct writer *writer, size_t bytes)
{
    uint8_t *at = writer->used <= writer->capacity && bytes <= writer->capacity - writer->used
                      ? writer->out + writer->used
                      : NULL;
    writer->used += bytes;
    return at;
}

static void write_uint(struct writer *writer, uint64_t value, unsigned bytes)
{
    uint8_t *at = claim(writer, bytes);
    if (at != NULL) {
        dl_le_put(at, value, bytes);
    }
}

static uint64_t load_number(const uint8_t *at, unsigned bytes)
{
    uint8_t u8;
    uint16_t u16;
    uint32_t u32;
    uint64_t u64;
    switch (bytes) {
    case 1: memcpy(&u8, at, 1); return u8;
    case 2: memcpy(&u16, at, 2); return u16;
    case 4: memcpy(&u32, at, 4); return u32;
    case 8: memcpy(&u64, at, 8); return u64;
    }
    assert(!"size of a number");
    return 0;
}

static enum dl_rc write_string(struct writer *writer, const struct dl_wire_format *format,
                               const struct dl_wire_field *field, const char *text, struct dl_err *err)
{
    size_t length = strnlen(text, field->capacity);
    if (length == field->capacity) {
        return dl_wire_field_error(err, DL_EINVAL, format, field, "not terminated");
    }
    if (field->kind == DL_WIRE_KIND_NAME && length == 0) {
        return dl_wire_field_error(err, DL_EINVAL, format, field, "empty");
    }
    write_uint(writer, length, 2);
    uint8_t *at = claim(writer, length);
    for (size_t i = 0; i < length; i++) {
        bool control = dl_wire_is_control_character((uint8_t)text[i]);
        if (control && field->kind == DL_WIRE_KIND_NAME) {
            return dl_wire_field_error(err, DL_EINVAL, format, field, "holds a control character");
        }
        if (at != NULL) {
            at[i] = control ? ' ' : (uint8_t)text[i];
        }
    }
    return DL_OK;
}

static enum dl_rc write_fragments(struct writer *writer, const struct dl_wire_format *format,
                                  const struct dl_wire_field *field, const struct dl_wire_fragment *fragments,
                                  uint32_t count, struct dl_err *err)
{
    if (count > field->most) {
        return dl_wire_field_error(err, DL_EINVAL, format, field, "too many");
    }
    write_uint(writer, count, 4);
    int64_t previous = -1;
    for (uint32_t i = 0; i < count; i++) {
        const char *fault = dl_wire_fragment_fault(&fragments[i], previous);
        if (fault != NULL) {
            return dl_wire_field_error(err, DL_EINVAL, format, field, fault);
        }
        previous = fragments[i].fragment;
        uint8_t *at = claim(writer, DL_WIRE_FRAGMENT_BYTES);
        if (at != NULL) {
            dl_le_put(at, fragments[i].fragment, 4);
            dl_le_put(at + 4, fragments[i].version, 8);
            dl_le_put(at + 12, fragments[i].applied_step, 8);
            dl_le_put(at + 20, fragments[i].steps, 4);
            dl_le_put(at + 24, fragments[i].tokens, 8);
        }
    }
    return DL_OK;
}

static enum dl_rc write_field(struct writer *writer, const struct dl_wire_format *format,
                              const struct dl_wire_field *field, const void *base, struct dl_err *err);

static enum dl_rc write_trace(struct writer *writer, const struct dl_wire_format *format,
                              const struct dl_trace_entry *entries, uint32_t count, struct dl_err *err)
{
    write_uint(writer, count, 4);
    for (uint32_t i = 0; i < count; i++) {
        for (size_t f = 0; f < DL_WIRE_TRACE_FIELDS; f++) {
            enum dl_rc rc = write_field(writer, format, &dl_wire_trace_entry_fields[f], &entries[i], err);
            if (rc != DL_OK) {
                return rc;
            }
        }
    }
    return DL_OK;
}

/* `base`: a message, or an entry of a list. */
static enum dl_rc write_field(struct writer *writer, const struct dl_wire_format *format,
                              const struct dl_wire_field *field, const void *base, struct dl_err *err)
{
    const uint8_t *at = (const uint8_t *)base + field->offset;
    unsigned bytes = dl_wire_number_bytes(field->kind);
    if (bytes > 0) {
        uint64_t value = load_number(at, bytes);
        if (!dl_wire_number_in_range(field, value)) {
            return dl_wire_field_error(err, DL_EINVAL, format, field, "out of range");
        }
        write_uint(writer, value, bytes);
        return DL_OK;
    }
    if (field->kind == DL_WIRE_KIND_NAME || field->kind == DL_WIRE_KIND_TEXT) {
        return write_string(writer, format, field, (const char *)at, err);
    }
    const struct dl_wire_message *message = base;
    uint32_t count = (uint32_t)load_number((const uint8_t *)base + field->capacity, 4);
    if (field->kind == DL_WIRE_KIND_FRAGMENTS) {
        return write_fragments(writer, format, field, (const struct dl_wire_fragment *)(const void *)at, count, err);
    }
    if (count > field->most) {
        return dl_wire_field_error(err, DL_EINVAL, format, field, "too long");
    }
    if (field->kind == DL_WIRE_KIND_TRACE) {
        return write_trace(writer, format, (const struct dl_trace_entry *)(const void *)at, count, err);
    }
    const uint8_t *tensors = message->as.hello.tensors;
    write_uint(writer, count, 4);
    uint8_t *out = claim(writer, count);
    if (out != NULL && count > 0) {
        memcpy(out, tensors, count);
    }
    return DL_OK;
}

enum dl_rc dl_wire_encode(const struct dl_wire_message *message, uint8_t *out, size_t out_bytes, size_t *used,
                          struct dl_err *err)
{
    const struct dl_wire_format *format = dl_wire_format_of(message->type);
    if (format == NULL || message->type == DL_WIRE_CHUNK) {
        return dl_err_set(err, DL_EINVAL, "encode message: type %d is no control message", (int)message->type);
    }
    struct writer writer = {.out = out, .capacity = out_bytes, .used = DL_WIRE_HEADER_BYTES};
    for (size_t i = 0; i < format->field_count; i++) {
        enum dl_rc rc = write_field(&writer, format, &format->fields[i], message, err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    size_t payload = writer.used - DL_WIRE_HEADER_BYTES;
    if (payload > format->payload_max) {
        return dl_err_set(err, DL_EINVAL, "message %s: %zu bytes, at most %u may be sent", format->name, payload,
                          format->payload_max);
    }
    *used = writer.used;
    if (writer.used > out_bytes) {
        return dl_err_set(err, DL_ENOMEM, "message %s: needs %zu bytes, the buffer has %zu", format->name, writer.used,
                          out_bytes);
    }
    dl_wire_header_encode(message->type, (uint32_t)payload, out);
    dl_le_put(out + 16, dl_hash64(out + DL_WIRE_HEADER_BYTES, payload, dl_wire_header_seed(out)), 8);
    return DL_OK;
}
