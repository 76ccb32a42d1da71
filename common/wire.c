#include "common/wire.h"

#include <assert.h>
#include <string.h>

#include "common/hash.h"
#include "common/layout.h"
#include "common/mem.h"
#include "common/wire_table.h"

/* --- little-endian, byte by byte -------------------------------------------------------------------------------------
 */

static void put_uint(uint8_t *out, uint64_t value, unsigned bytes)
{
    for (unsigned i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(value >> (8 * i));
    }
}

static uint64_t get_uint(const uint8_t *in, unsigned bytes)
{
    uint64_t value = 0;
    for (unsigned i = 0; i < bytes; i++) {
        value |= (uint64_t)in[i] << (8 * i);
    }
    return value;
}

/* Size on the wire of a plain number; 0 for the other kinds. */
static unsigned number_bytes(enum dl_wire_kind kind)
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
static bool number_in_range(const struct dl_wire_field *field, uint64_t bits)
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

static bool is_control_character(uint8_t byte)
{
    return byte < 0x20 || byte == 0x7f;
}

static enum dl_rc field_error(struct dl_err *err, enum dl_rc rc, const struct dl_wire_format *format,
                              const struct dl_wire_field *field, const char *what)
{
    return dl_err_set(err, rc, "message %s, field %s: %s", format->name, field->name, what);
}

/* --- encoding
 * --------------------------------------------------------------------------------------------------------- Writes
 * while there is room and goes on counting when there is none, so that one walk gives the size needed. */

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
        put_uint(at, value, bytes);
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
        return field_error(err, DL_EINVAL, format, field, "not terminated");
    }
    if (field->kind == DL_WIRE_KIND_NAME && length == 0) {
        return field_error(err, DL_EINVAL, format, field, "empty");
    }
    write_uint(writer, length, 2);
    uint8_t *at = claim(writer, length);
    for (size_t i = 0; i < length; i++) {
        bool control = is_control_character((uint8_t)text[i]);
        if (control && field->kind == DL_WIRE_KIND_NAME) {
            return field_error(err, DL_EINVAL, format, field, "holds a control character");
        }
        if (at != NULL) {
            at[i] = control ? ' ' : (uint8_t)text[i];
        }
    }
    return DL_OK;
}

/* Says what is wrong with a list's element, NULL when nothing is. `previous` is the index before it, or -1. */
static const char *fragment_fault(const struct dl_wire_fragment *fragment, int64_t previous)
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

static enum dl_rc write_fragments(struct writer *writer, const struct dl_wire_format *format,
                                  const struct dl_wire_field *field, const struct dl_wire_fragment *fragments,
                                  uint32_t count, struct dl_err *err)
{
    if (count > field->most) {
        return field_error(err, DL_EINVAL, format, field, "too many");
    }
    write_uint(writer, count, 4);
    int64_t previous = -1;
    for (uint32_t i = 0; i < count; i++) {
        const char *fault = fragment_fault(&fragments[i], previous);
        if (fault != NULL) {
            return field_error(err, DL_EINVAL, format, field, fault);
        }
        previous = fragments[i].fragment;
        uint8_t *at = claim(writer, DL_WIRE_FRAGMENT_BYTES);
        if (at != NULL) {
            put_uint(at, fragments[i].fragment, 4);
            put_uint(at + 4, fragments[i].version, 8);
            put_uint(at + 12, fragments[i].applied_step, 8);
            put_uint(at + 20, fragments[i].steps, 4);
            put_uint(at + 24, fragments[i].tokens, 8);
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
    unsigned bytes = number_bytes(field->kind);
    if (bytes > 0) {
        uint64_t value = load_number(at, bytes);
        if (!number_in_range(field, value)) {
            return field_error(err, DL_EINVAL, format, field, "out of range");
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
        return field_error(err, DL_EINVAL, format, field, "too long");
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

static void header_encode(unsigned type, uint32_t payload_bytes, uint8_t out[DL_WIRE_HEADER_BYTES])
{
    memset(out, 0, DL_WIRE_HEADER_BYTES);
    memcpy(out, "DLC1", 4);
    out[4] = DL_WIRE_VERSION;
    out[5] = (uint8_t)type;
    put_uint(out + 8, payload_bytes, 4);
}

static uint64_t header_seed(const uint8_t header[DL_WIRE_HEADER_BYTES])
{
    return dl_hash64(header, 16, 0);
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
    header_encode(message->type, (uint32_t)payload, out);
    put_uint(out + 16, dl_hash64(out + DL_WIRE_HEADER_BYTES, payload, header_seed(out)), 8);
    return DL_OK;
}

/* --- decoding
 * --------------------------------------------------------------------------------------------------------- */

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
    *value = get_uint(at, bytes);
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
        if (is_control_character(at[i])) {
            return "holds a control character";
        }
    }
    memcpy(out, at, length);
    out[length] = 0;
    return NULL;
}

static const char *read_fragments(struct reader *reader, const struct dl_wire_field *field,
                                  struct dl_wire_fragment *out, uint8_t *count_at)
{
    uint64_t count;
    if (!read_uint(reader, 4, &count)) {
        return "cut off";
    }
    if (count > field->most) {
        return "too many";
    }
    int64_t previous = -1;
    for (uint64_t i = 0; i < count; i++) {
        const uint8_t *at = take(reader, DL_WIRE_FRAGMENT_BYTES);
        if (at == NULL) {
            return "cut off";
        }
        out[i] = (struct dl_wire_fragment){
            .fragment = (uint32_t)get_uint(at, 4),
            .version = get_uint(at + 4, 8),
            .applied_step = get_uint(at + 12, 8),
            .steps = (uint32_t)get_uint(at + 20, 4),
            .tokens = get_uint(at + 24, 8),
        };
        const char *fault = fragment_fault(&out[i], previous);
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
    if (!read_uint(reader, 4, &count)) {
        return "cut off";
    }
    if (count > field->most) {
        return "too many";
    }
    for (uint64_t i = 0; i < count; i++) {
        for (size_t f = 0; f < DL_WIRE_TRACE_FIELDS; f++) {
            const char *fault = read_field(reader, &dl_wire_trace_entry_fields[f], &entries[i]);
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
    unsigned bytes = number_bytes(field->kind);
    uint64_t value;
    if (bytes > 0) {
        if (!read_uint(reader, bytes, &value)) {
            return "cut off";
        }
        if (!number_in_range(field, value)) {
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
            return field_error(err, DL_EPROTO, format, &format->fields[i], fault);
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

enum dl_rc dl_wire_header_decode(const uint8_t bytes[DL_WIRE_HEADER_BYTES], struct dl_wire_header *out,
                                 struct dl_err *err)
{
    if (memcmp(bytes, "DLC1", 4) != 0) {
        return dl_err_set(err, DL_EPROTO, "message header: this is not %s (wrong magic)", DL_WIRE_SUBPROTOCOL);
    }
    if (bytes[4] != DL_WIRE_VERSION) {
        return dl_err_set(err, DL_EPROTO, "message header: protocol version %u, this program speaks %u", bytes[4],
                          DL_WIRE_VERSION);
    }
    const struct dl_wire_format *format = dl_wire_format_of(bytes[5]);
    if (format == NULL) {
        return dl_err_set(err, DL_EPROTO, "message header: unknown type %u", bytes[5]);
    }
    if (get_uint(bytes + 6, 2) != 0 || get_uint(bytes + 12, 4) != 0) {
        return dl_err_set(err, DL_EPROTO, "message %s: reserved header bytes are not zero", format->name);
    }
    uint32_t payload_bytes = (uint32_t)get_uint(bytes + 8, 4);
    if (payload_bytes > format->payload_max) {
        return dl_err_set(err, DL_EPROTO, "message %s: %u bytes announced, at most %u are taken", format->name,
                          payload_bytes, format->payload_max);
    }
    if (bytes[5] == DL_WIRE_CHUNK && payload_bytes <= DL_WIRE_CHUNK_PREFIX_BYTES) {
        return dl_err_set(err, DL_EPROTO, "message chunk: %u bytes announced, too few to hold data", payload_bytes);
    }
    out->type = (enum dl_wire_type)bytes[5];
    out->payload_bytes = payload_bytes;
    out->checksum = get_uint(bytes + 16, 8);
    return DL_OK;
}

/* A chunk's data is hashed with its prefix's hash as seed, so that the two may lie apart. */
static uint64_t chunk_seed(const uint8_t *header, const uint8_t *prefix)
{
    return dl_hash64(prefix, DL_WIRE_CHUNK_PREFIX_BYTES, header_seed(header));
}

static enum dl_rc checksum_result(const uint8_t *header, uint64_t computed, struct dl_err *err)
{
    if (computed == get_uint(header + 16, 8)) {
        return DL_OK;
    }
    return dl_err_set(err, DL_ECORRUPT, "message %s: its checksum does not match, bytes were changed on the way",
                      dl_wire_type_name((enum dl_wire_type)header[5]));
}

enum dl_rc dl_wire_verify(const uint8_t header_bytes[DL_WIRE_HEADER_BYTES], const uint8_t *payload,
                          size_t payload_bytes, struct dl_err *err)
{
    if (payload_bytes != get_uint(header_bytes + 8, 4)) {
        return dl_err_set(err, DL_ECORRUPT, "message %s: %zu bytes came, %u were announced",
                          dl_wire_type_name((enum dl_wire_type)header_bytes[5]), payload_bytes,
                          (unsigned)get_uint(header_bytes + 8, 4));
    }
    if (header_bytes[5] == DL_WIRE_CHUNK && payload_bytes > DL_WIRE_CHUNK_PREFIX_BYTES) {
        return dl_wire_chunk_verify(header_bytes, payload, payload + DL_WIRE_CHUNK_PREFIX_BYTES,
                                    (uint32_t)payload_bytes - DL_WIRE_CHUNK_PREFIX_BYTES, err);
    }
    return checksum_result(header_bytes, dl_hash64(payload, payload_bytes, header_seed(header_bytes)), err);
}

/* --- chunks
 * ----------------------------------------------------------------------------------------------------------- */

uint64_t dl_wire_chunk_begin(uint64_t transfer, uint64_t offset, uint32_t data_bytes, uint8_t *out)
{
    assert(data_bytes >= 1 && data_bytes <= DL_WIRE_CHUNK_DATA_MAX);
    header_encode(DL_WIRE_CHUNK, DL_WIRE_CHUNK_PREFIX_BYTES + data_bytes, out);
    put_uint(out + DL_WIRE_HEADER_BYTES, transfer, 8);
    put_uint(out + DL_WIRE_HEADER_BYTES + 8, offset, 8);
    return chunk_seed(out, out + DL_WIRE_HEADER_BYTES);
}

void dl_wire_chunk_end(uint64_t data_hash, uint8_t *out)
{
    put_uint(out + 16, data_hash, 8);
}

void dl_wire_chunk_head(uint64_t transfer, uint64_t offset, const uint8_t *data, uint32_t data_bytes, uint8_t *out)
{
    uint64_t seed = dl_wire_chunk_begin(transfer, offset, data_bytes, out);
    dl_wire_chunk_end(dl_hash64(data, data_bytes, seed), out);
}

enum dl_rc dl_wire_chunk_verify(const uint8_t header_bytes[DL_WIRE_HEADER_BYTES],
                                const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES], const uint8_t *data,
                                uint32_t data_bytes, struct dl_err *err)
{
    if (header_bytes[5] != DL_WIRE_CHUNK ||
        get_uint(header_bytes + 8, 4) != (uint64_t)data_bytes + DL_WIRE_CHUNK_PREFIX_BYTES) {
        return dl_err_set(err, DL_ECORRUPT, "message chunk: %u data bytes do not fit its header", data_bytes);
    }
    return checksum_result(header_bytes, dl_hash64(data, data_bytes, chunk_seed(header_bytes, prefix)), err);
}

void dl_wire_chunk_prefix(const uint8_t prefix[DL_WIRE_CHUNK_PREFIX_BYTES], uint64_t *transfer, uint64_t *offset)
{
    *transfer = get_uint(prefix, 8);
    *offset = get_uint(prefix + 8, 8);
}

uint32_t dl_wire_chunk_data_bytes(enum dl_codec codec)
{
    static const uint32_t block_bytes[] = {
        [DL_CODEC_NONE] = DL_BLOCK * 4,
        [DL_CODEC_BF16] = DL_BLOCK * 2,
        [DL_CODEC_INT8] = 4 + DL_BLOCK,
        [DL_CODEC_INT4] = 4 + DL_BLOCK / 2,
    };
    assert((unsigned)codec < DL_COUNT_OF(block_bytes));
    return DL_WIRE_CHUNK_DATA_MAX / block_bytes[codec] * block_bytes[codec];
}
