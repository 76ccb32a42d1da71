/* Bytes to messages, by the table of fields: everything is checked before it is used. */
#include <assert.h>
#include <string.h>

#include "common/le.h"
#include "common/wire_internal.h"

struct reader {
    const uint8_t *in;
    size_t left;
};

static const uint8_t *take(struct reader *reader, size_t bytes)
{
    if (bytes > reader->left) {
        return NULL;
    }
    const uint8_t *at = reader->in;
    reader->in += bytes;
    reader->left -= bytes;
    return at;
}

static bool read_uint(struct reader *reader, unsigned bytes, uint64_t *value)
{
    const uint8_t *at = take(reader, bytes);
    if (at == NULL) {
        return false;
    }
    *value = dl_le_get(at, bytes);
    return true;
}

static void store_number(uint8_t *at, uint64_t value, unsigned bytes)
{
    uint8_t u8 = (uint8_t)value;
    uint16_t u16 = (uint16_t)value;
    uint32_t u32 = (uint32_t)value;
    switch (bytes) {
    case 1: memcpy(at, &u8, 1); return;
    case 2: memcpy(at, &u16, 2); return;
    case 4: memcpy(at, &u32, 4); return;
    case 8: memcpy(at, &value, 8); return;
    }
    assert(!"size of a number");
}

/* The read functions return what is wrong, or NULL. */
static const char *read_string(struct reader *reader, const struct dl_wire_field *field, char *out)
{
    uint64_t length;
    if (!read_uint(reader, 2, &length)) {
        return "cut off";
    }
    if (length >= field->capacity) {
        return "too long";
    }
    if (field->kind == DL_WIRE_KIND_NAME && length == 0) {
        return "empty";
    }
    const uint8_t *at = take(reader, length);
    if (at == NULL) {
        return "cut off";
    }
    for (size_t i = 0; i < length; i++) {
        if (dl_wire_is_control_character(at[i])) {
            return "holds a control character";
        }
    }
    memcpy(out, at, length);
    out[length] = 0;
    return NULL;
}

/* How many elements a list has. */
static const char *read_count(struct reader *reader, const struct dl_wire_field *field, uint64_t *count)
{
    if (!read_uint(reader, 4, count)) {
        return "cut off";
    }
    return *count > field->most ? "too many" : NULL;
}

static const char *read_fragments(struct reader *reader, const struct dl_wire_field *field,
                                  struct dl_wire_fragment *out, uint8_t *count_at)
{
    uint64_t count;
    const char *fault = read_count(reader, field, &count);
    if (fault != NULL) {
        return fault;
    }
    int64_t previous = -1;
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *at = take(reader, DL_WIRE_FRAGMENT_BYTES);
        if (at == NULL) {
            return "cut off";
        }
        out[i] = (struct dl_wire_fragment){
            .fragment = (uint32_t)dl_le_get(at, 4),
            .version = dl_le_get(at + 4, 8),
            .applied_step = dl_le_get(at + 12, 8),
            .steps = (uint32_t)dl_le_get(at + 20, 4),
            .tokens = dl_le_get(at + 24, 8),
        };
        fault = dl_wire_fragment_fault(&out[i], previous);
        if (fault != NULL) {
            return fault;
        }
        previous = out[i].fragment;
    }
    store_number(count_at, count, 4);
    return NULL;
}

static const char *read_field(struct reader *reader, const struct dl_wire_field *field, void *base);

static const char *read_trace(struct reader *reader, const struct dl_wire_field *field, struct dl_trace_entry *entries,
                              uint8_t *count_at)
{
    uint64_t count;
    const char *fault = read_count(reader, field, &count);
    if (fault != NULL) {
        return fault;
    }
    for (uint64_t i = 0; i < count; i++) {
        for (size_t f = 0; f < DL_WIRE_TRACE_FIELDS; f++) {
            fault = read_field(reader, &dl_wire_trace_entry_fields[f], &entries[i]);
            if (fault != NULL) {
                return fault;
            }
        }
    }
    store_number(count_at, count, 4);
    return NULL;
}

static const char *read_field(struct reader *reader, const struct dl_wire_field *field, void *base)
{
    uint8_t *at = (uint8_t *)base + field->offset;
    unsigned bytes = dl_wire_number_bytes(field->kind);
    uint64_t value;
    if (bytes > 0) {
        if (!read_uint(reader, bytes, &value)) {
            return "cut off";
        }
        if (!dl_wire_number_in_range(field, value)) {
            return "out of range";
        }
        store_number(at, value, bytes);
        return NULL;
    }
    if (field->kind == DL_WIRE_KIND_NAME || field->kind == DL_WIRE_KIND_TEXT) {
        return read_string(reader, field, (char *)at);
    }
    if (field->kind == DL_WIRE_KIND_FRAGMENTS) {
        return read_fragments(reader, field, (struct dl_wire_fragment *)(void *)at, (uint8_t *)base + field->capacity);
    }
    if (field->kind == DL_WIRE_KIND_TRACE) {
        return read_trace(reader, field, (struct dl_trace_entry *)(void *)at, (uint8_t *)base + field->capacity);
    }
    struct dl_wire_message *message = base;
    if (!read_uint(reader, 4, &value)) {
        return "cut off";
    }
    const uint8_t *tensors = take(reader, value);
    if (tensors == NULL) {
        return "cut off";
    }
    message->as.hello.tensors = tensors;
    message->as.hello.tensors_bytes = (uint32_t)value;
    return NULL;
}

/* What follows from two fields together. */
static const char *cross_fault(const struct dl_wire_message *message)
{
    if (message->type == DL_WIRE_WELCOME) {
        const struct dl_wire_welcome *welcome = &message->as.welcome;
        if (welcome->shard >= welcome->shards) {
            return "shard is not below shards";
        }
        if (welcome->fragment_count > 0 &&
            welcome->fragments[welcome->fragment_count - 1].fragment >= welcome->fragments_total) {
            return "a fragment is not below fragments_total";
        }
    }
    if (message->type == DL_WIRE_TRACE) {
        const struct dl_wire_trace *trace = &message->as.trace;
        for (uint32_t i = 1; i < trace->count; i++) {
            if (trace->entries[i].seq <= trace->entries[i - 1].seq) {
                return "entries do not ascend";
            }
        }
    }
    return NULL;
}

enum dl_rc dl_wire_decode(enum dl_wire_type type, const uint8_t *payload, size_t payload_bytes,
                          struct dl_wire_message *out, struct dl_err *err)
{
    const struct dl_wire_format *format = dl_wire_format_of(type);
    if (format == NULL || type == DL_WIRE_CHUNK) {
        return dl_err_set(err, DL_EPROTO, "decode message: type %d is no control message", (int)type);
    }
    if (payload_bytes > format->payload_max) {
        return dl_err_set(err, DL_EPROTO, "message %s: %zu bytes, at most %u are taken", format->name, payload_bytes,
                          format->payload_max);
    }
    struct reader reader = {.in = payload, .left = payload_bytes};
    out->type = type;
    for (size_t i = 0; i < format->field_count; i++) {
        const char *fault = read_field(&reader, &format->fields[i], out);
        if (fault != NULL) {
            return dl_wire_field_error(err, DL_EPROTO, format, &format->fields[i], fault);
        }
    }
    if (reader.left > 0) {
        return dl_err_set(err, DL_EPROTO, "message %s: %zu bytes too many", format->name, reader.left);
    }
    const char *fault = cross_fault(out);
    if (fault != NULL) {
        return dl_err_set(err, DL_EPROTO, "message %s: %s", format->name, fault);
    }
    return DL_OK;
}
