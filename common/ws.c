#include "common/ws.h"

#include <assert.h>
#include <string.h>

#include "common/isa.h"
#include "common/mem.h"

/* --- sending ----------------------------------------------------------------------------------------------------- */

size_t dl_ws_head(enum dl_ws_opcode opcode, uint64_t payload_bytes, const uint8_t *key, uint8_t out[DL_WS_HEAD_MAX])
{
    const unsigned mask_bit = key != NULL ? 0x80 : 0;
    size_t length = 2;
    out[0] = (uint8_t)(0x80 | opcode);
    if (payload_bytes < 126) {
        out[1] = (uint8_t)(mask_bit | payload_bytes);
    } else if (payload_bytes < 65536) {
        out[1] = (uint8_t)(mask_bit | 126);
        out[2] = (uint8_t)(payload_bytes >> 8);
        out[3] = (uint8_t)payload_bytes;
        length = 4;
    } else {
        out[1] = (uint8_t)(mask_bit | 127);
        for (int i = 0; i < 8; i++) {
            out[2 + i] = (uint8_t)(payload_bytes >> (56 - 8 * i));
        }
        length = 10;
    }
    if (key != NULL) {
        memcpy(out + length, key, 4);
        length += 4;
    }
    return length;
}

typedef uint32_t vector_words __attribute__((vector_size(64), aligned(1), may_alias));

/* Whole steps of 64 bytes; the number of bytes done. The compiler makes of it what the target has. */
#define MASK_STEPS(name, attribute)                                                                                    \
    attribute static size_t name(uint8_t *out, const uint8_t *in, size_t bytes, uint32_t word)                         \
    {                                                                                                                  \
        const vector_words words = (vector_words){0} + word;                                                           \
        size_t i = 0;                                                                                                  \
        for (; i + sizeof words <= bytes; i += sizeof words) {                                                         \
            *(vector_words *)(void *)(out + i) = *(const vector_words *)(const void *)(in + i) ^ words;                \
        }                                                                                                              \
        return i;                                                                                                      \
    }
MASK_STEPS(mask_portable, )
#ifdef __x86_64__
MASK_STEPS(mask_avx2, __attribute__((target("avx2"))))
MASK_STEPS(mask_avx512, __attribute__((target("avx512f"))))
#endif

static size_t mask_steps(uint8_t *out, const uint8_t *in, size_t bytes, uint32_t word)
{
    return DL_ISA_PICK(mask_portable, mask_avx2, mask_avx512)(out, in, bytes, word);
}

void dl_ws_mask(uint8_t *out, const uint8_t *in, size_t bytes, const uint8_t key[4], size_t phase)
{
    uint8_t turned[4];
    for (size_t i = 0; i < 4; i++) {
        turned[i] = key[(phase + i) & 3];
    }
    uint32_t word;
    memcpy(&word, turned, 4);
    for (size_t i = mask_steps(out, in, bytes, word); i < bytes; i++) {
        out[i] = in[i] ^ turned[i & 3];
    }
}

/* --- receiving --------------------------------------------------------------------------------------------------- */

static enum dl_ws_code fail(struct dl_err *err, enum dl_ws_code code, const char *what)
{
    dl_err_set(err, DL_EPROTO, "WebSocket frame: %s", what);
    return code;
}

static enum dl_ws_code broken(struct dl_err *err, const char *what)
{
    return fail(err, DL_WS_CODE_PROTOCOL, what);
}

static bool is_control(const struct dl_ws_parser *parser)
{
    return (parser->opcode & 8) != 0;
}

static uint32_t length_end(const struct dl_ws_parser *parser)
{
    unsigned code = parser->head[1] & 0x7f;
    return code == 126 ? 4 : code == 127 ? 10 : 2;
}

static uint32_t head_length(const struct dl_ws_parser *parser)
{
    if (parser->head_have < 2) {
        return 2;
    }
    bool has_key = parser->from_client && (parser->head[1] & 0x80) != 0;
    return length_end(parser) + (has_key ? 4 : 0);
}

static enum dl_ws_code check_control(const struct dl_ws_parser *parser, uint64_t length, struct dl_err *err)
{
    if (parser->opcode != DL_WS_CLOSE && parser->opcode != DL_WS_PING && parser->opcode != DL_WS_PONG) {
        return broken(err, "unknown control opcode");
    }
    if (!parser->fin || length > DL_WS_CONTROL_MAX) {
        return broken(err, "a control frame is split or too long");
    }
    return parser->opcode == DL_WS_CLOSE && length == 1 ? broken(err, "a close frame with half a code")
                                                        : DL_WS_CODE_FINE;
}

static enum dl_ws_code check_data(const struct dl_ws_parser *parser, uint64_t length, struct dl_err *err)
{
    if (parser->opcode == 1) {
        return fail(err, DL_WS_CODE_UNSUPPORTED, "not a binary message: text is not spoken here");
    }
    if (parser->opcode != DL_WS_BINARY && parser->opcode != DL_WS_CONTINUATION) {
        return broken(err, "not a binary message: unknown opcode");
    }
    if ((parser->opcode == DL_WS_CONTINUATION) != parser->in_message) {
        return broken(err, parser->in_message ? "a message begins inside another" : "a continuation of nothing");
    }
    return length > parser->message_max - parser->message_bytes
               ? fail(err, DL_WS_CODE_TOO_LARGE, "the message is too long")
               : DL_WS_CODE_FINE;
}

/* All head bytes are there: FINE, or why they cannot be taken. */
static enum dl_ws_code begin_frame(struct dl_ws_parser *parser, struct dl_err *err)
{
    const uint8_t *head = parser->head;
    if ((head[0] & 0x70) != 0) {
        return broken(err, "reserved bits are set");
    }
    if (((head[1] & 0x80) != 0) != parser->from_client) {
        return broken(err, parser->from_client ? "a client's frame is not masked" : "a server's frame is masked");
    }
    uint64_t length = head[1] & 0x7f;
    if (length >= 126) {
        unsigned width = length == 126 ? 2 : 8;
        length = 0;
        for (unsigned i = 0; i < width; i++) {
            length = length << 8 | head[2 + i];
        }
        if (length < (width == 2 ? 126 : 65536) || length >> 63 != 0) {
            return broken(err, "the length is not in its shortest form");
        }
    }
    parser->fin = (head[0] & 0x80) != 0;
    parser->opcode = head[0] & 0x0f;
    enum dl_ws_code fault = is_control(parser) ? check_control(parser, length, err) : check_data(parser, length, err);
    if (fault != DL_WS_CODE_FINE) {
        return fault;
    }
    if (parser->from_client) {
        memcpy(parser->key, head + length_end(parser), sizeof parser->key);
    }
    parser->frame_left = length;
    parser->in_payload = true;
    if (is_control(parser)) {
        parser->control_bytes = 0;
    } else {
        parser->in_message = true;
        parser->message_bytes += length;
    }
    return DL_WS_CODE_FINE;
}

/* The current frame's payload is complete. */
static void end_frame(struct dl_ws_parser *parser)
{
    parser->in_payload = false;
    parser->head_have = 0;
    if (!is_control(parser) && parser->fin) {
        parser->in_message = false;
        parser->message_bytes = 0;
        parser->end_due = true;
    }
}

/* Goes on by `bytes` of the current frame's payload. */
static void advance(struct dl_ws_parser *parser, uint64_t bytes)
{
    uint8_t turned[sizeof parser->key] = {0};
    for (size_t i = 0; i < sizeof turned; i++) {
        turned[i] = parser->key[(bytes + i) & 3];
    }
    memcpy(parser->key, turned, sizeof turned);
    parser->frame_left -= bytes;
    if (parser->frame_left == 0) {
        end_frame(parser);
    }
}

static void unmask(const struct dl_ws_parser *parser, uint8_t *at, size_t bytes)
{
    static const uint8_t zeros[sizeof parser->key];
    /* A key of zeros leaves the bytes as they are; a learner's chunks have it (worker/link/channel.c). */
    if (parser->from_client && memcmp(parser->key, zeros, sizeof zeros) != 0) {
        dl_ws_mask(at, at, bytes, parser->key, 0);
    }
}

uint64_t dl_ws_payload_next(const struct dl_ws_parser *parser)
{
    return parser->in_payload && !is_control(parser) ? parser->frame_left : 0;
}

void dl_ws_placed(struct dl_ws_parser *parser, uint8_t *at, size_t bytes)
{
    assert(bytes <= dl_ws_payload_next(parser));
    unmask(parser, at, bytes);
    dl_ws_skip(parser, bytes);
}

void dl_ws_skip(struct dl_ws_parser *parser, uint64_t bytes)
{
    assert(bytes <= dl_ws_payload_next(parser));
    if (bytes > 0) { /* Between two frames there is nothing to end. */
        advance(parser, bytes);
    }
}

unsigned dl_ws_close_code(const struct dl_ws_parser *parser)
{
    return parser->control_bytes >= 2 ? (unsigned)parser->control[0] << 8 | parser->control[1] : DL_WS_CODE_NONE;
}

/* Some of 1000..2999 are never sent, the others wait to be given a meaning; from 3000 on they are anyone's. */
static bool is_close_code(unsigned code)
{
    return (code >= 1000 && code <= 1003) || (code >= 1007 && code <= 1014) || (code >= 3000 && code <= 4999);
}

/* Bytes of the first character of UTF-8 text (RFC 3629: shortest form, no surrogates, up to U+10FFFF); 0: it is none. */
static size_t character_bytes(const uint8_t *at, size_t size)
{
    if (at[0] < 0x80) {
        return 1;
    }
    size_t count = at[0] >= 0xc2 && at[0] <= 0xdf   ? 2
                   : (at[0] & 0xf0) == 0xe0         ? 3
                   : at[0] >= 0xf0 && at[0] <= 0xf4 ? 4
                                                    : 0;
    uint8_t least = at[0] == 0xe0 ? 0xa0 : at[0] == 0xf0 ? 0x90 : 0x80;
    uint8_t most = at[0] == 0xed ? 0x9f : at[0] == 0xf4 ? 0x8f : 0xbf;
    if (count == 0 || count > size || at[1] < least || at[1] > most) {
        return 0;
    }
    for (size_t i = 2; i < count; i++) {
        if ((at[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    return count;
}

static bool is_text(const uint8_t *bytes, size_t size)
{
    size_t used = 0, length = 1;
    while (used < size && length > 0) {
        length = character_bytes(bytes + used, size - used);
        used += length;
    }
    return length > 0;
}

static enum dl_ws_event end_control(struct dl_ws_parser *parser, struct dl_err *err)
{
    if (parser->opcode != DL_WS_CLOSE || parser->control_bytes < 2) {
        return DL_WS_EVENT_CONTROL;
    }
    if (!is_close_code(dl_ws_close_code(parser))) {
        parser->fault = broken(err, "a close frame with a code that nobody may send");
        return DL_WS_EVENT_BROKEN;
    }
    if (!is_text(parser->control + 2, parser->control_bytes - 2)) {
        parser->fault = fail(err, DL_WS_CODE_NOT_TEXT, "a close frame with a reason that is not UTF-8");
        return DL_WS_EVENT_BROKEN;
    }
    return DL_WS_EVENT_CONTROL;
}

static enum dl_ws_event take_payload(struct dl_ws_parser *parser, uint8_t *bytes, size_t size, size_t *used,
                                     uint8_t **data, size_t *data_bytes, struct dl_err *err)
{
    size_t take = (size_t)DL_MIN(parser->frame_left, (uint64_t)(size - *used));
    uint8_t *at = bytes + *used;
    *used += take;
    unmask(parser, at, take);
    if (is_control(parser)) {
        memcpy(parser->control + parser->control_bytes, at, take);
        parser->control_bytes += (uint32_t)take;
    }
    advance(parser, take);
    if (is_control(parser)) {
        return parser->in_payload ? DL_WS_EVENT_MORE : end_control(parser, err);
    }
    *data = at;
    *data_bytes = take;
    return DL_WS_EVENT_DATA;
}

enum dl_ws_event dl_ws_parse(struct dl_ws_parser *parser, uint8_t *bytes, size_t size, size_t *used, uint8_t **data,
                             size_t *data_bytes, struct dl_err *err)
{
    *used = 0;
    for (;;) {
        if (parser->end_due) {
            parser->end_due = false;
            return DL_WS_EVENT_END;
        }
        if (parser->in_payload) {
            if (*used == size && parser->frame_left > 0) {
                return DL_WS_EVENT_MORE;
            }
            enum dl_ws_event event = take_payload(parser, bytes, size, used, data, data_bytes, err);
            if (event != DL_WS_EVENT_MORE && (event != DL_WS_EVENT_DATA || *data_bytes > 0)) {
                return event;
            }
            continue; /* Half a control frame, or an empty one of a message in pieces. */
        }
        while (*used < size && parser->head_have < head_length(parser)) {
            parser->head[parser->head_have++] = bytes[(*used)++];
        }
        if (parser->head_have < head_length(parser)) {
            return DL_WS_EVENT_MORE;
        }
        parser->fault = begin_frame(parser, err);
        if (parser->fault != DL_WS_CODE_FINE) {
            return DL_WS_EVENT_BROKEN;
        }
    }
}
