#include "worker/link/ws.h"

#include <assert.h>
#include <ctype.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "common/isa.h"
#include "common/mem.h"

/* --- upgrade ----------------------------------------------------------------------------------------------------- */

void wk_ws_key(const uint8_t nonce[16], char key[WK_WS_KEY_BYTES])
{
    EVP_EncodeBlock((unsigned char *)key, nonce, 16);
}

static bool breaks_a_header(const char *text)
{
    for (; *text != 0; text++) {
        if ((unsigned char)*text <= 0x20 || *text == 0x7f) {
            return true;
        }
    }
    return false;
}

enum dl_rc wk_ws_request(const char *host, const char *port, const char *token, const char *key, char *out,
                         size_t out_bytes, struct dl_err *err)
{
    if (breaks_a_header(host) || breaks_a_header(port) || (token != NULL && breaks_a_header(token))) {
        return dl_err_set(err, DL_EINVAL, "upgrade request: host, port or token holds white space");
    }
    bool is_v6 = strchr(host, ':') != NULL;
    int length =
        snprintf(out, out_bytes,
                 "GET " WK_WS_PATH " HTTP/1.1\r\n"
                 "Host: %s%s%s:%s\r\n"
                 "Upgrade: websocket\r\n"
                 "Connection: Upgrade\r\n"
                 "Sec-WebSocket-Key: %s\r\n"
                 "Sec-WebSocket-Version: 13\r\n"
                 "Sec-WebSocket-Protocol: " DL_WIRE_SUBPROTOCOL "\r\n"
                 "%s%s%s"
                 "\r\n",
                 is_v6 ? "[" : "", host, is_v6 ? "]" : "", port, key, token == NULL ? "" : "Authorization: Bearer ",
                 token == NULL ? "" : token, token == NULL ? "" : "\r\n");
    if (length < 0 || (size_t)length >= out_bytes) {
        return dl_err_set(err, DL_EINVAL, "upgrade request: host or token is too long");
    }
    return DL_OK;
}

/* The value of header `name`, without the spaces around it; its length, or -1 when there is none. */
static long header_value(const char *head, size_t size, const char *name, const char **value)
{
    size_t name_length = strlen(name);
    const char *end = head + size;
    for (const char *line = memchr(head, '\n', size); line != NULL && line + 1 < end;
         line = memchr(line, '\n', (size_t)(end - line))) {
        line++;
        if ((size_t)(end - line) <= name_length || strncasecmp(line, name, name_length) != 0 ||
            line[name_length] != ':') {
            continue;
        }
        const char *start = line + name_length + 1;
        const char *stop = memchr(start, '\n', (size_t)(end - start));
        stop = stop == NULL ? end : stop;
        while (start < stop && (*start == ' ' || *start == '\t')) {
            start++;
        }
        while (stop > start && (stop[-1] == ' ' || stop[-1] == '\t' || stop[-1] == '\r')) {
            stop--;
        }
        *value = start;
        return (long)(stop - start);
    }
    return -1;
}

static bool header_is(const char *head, size_t size, const char *name, const char *expected)
{
    const char *value;
    long length = header_value(head, size, name, &value);
    return length == (long)strlen(expected) && strncasecmp(value, expected, (size_t)length) == 0;
}

/* Connection: may list several tokens. */
static bool header_has_token(const char *head, size_t size, const char *name, const char *token)
{
    const char *value;
    long length = header_value(head, size, name, &value);
    size_t token_length = strlen(token);
    for (long i = 0; i + (long)token_length <= length; i++) {
        bool begins = i == 0 || value[i - 1] == ',' || value[i - 1] == ' ';
        char after = i + (long)token_length == length ? ',' : value[i + (long)token_length];
        if (begins && (after == ',' || after == ' ') && strncasecmp(value + i, token, token_length) == 0) {
            return true;
        }
    }
    return false;
}

static enum dl_rc check_accepted(const char *head, size_t size, const char *key, struct dl_err *err)
{
    char joined[128];
    snprintf(joined, sizeof joined, "%s258EAFA5-E914-47DA-95CA-C5AB0DC85B11", key);
    unsigned char digest[SHA_DIGEST_LENGTH];
    char expected[32];
    SHA1((const unsigned char *)joined, strlen(joined), digest);
    EVP_EncodeBlock((unsigned char *)expected, digest, sizeof digest);
    const char *value;
    long length = header_value(head, size, "Sec-WebSocket-Accept", &value);
    if (length != (long)strlen(expected) || memcmp(value, expected, (size_t)length) != 0) {
        return dl_err_set(err, DL_EPROTO, "upgrade: the answer does not belong to this request (Sec-WebSocket-Accept)");
    }
    if (!header_is(head, size, "Upgrade", "websocket") || !header_has_token(head, size, "Connection", "upgrade")) {
        return dl_err_set(err, DL_EPROTO, "upgrade: status 101 without Upgrade: websocket");
    }
    if (!header_is(head, size, "Sec-WebSocket-Protocol", DL_WIRE_SUBPROTOCOL)) {
        return dl_err_set(err, DL_EPROTO, "upgrade: the server does not speak %s", DL_WIRE_SUBPROTOCOL);
    }
    if (header_value(head, size, "Sec-WebSocket-Extensions", &value) >= 0) {
        return dl_err_set(err, DL_EPROTO, "upgrade: the server chose an extension that was not offered");
    }
    return DL_OK;
}

/* Printable start of the body's first line. */
static void first_line(const char *body, size_t size, char *out, size_t out_bytes)
{
    size_t length = 0;
    while (length < size && length + 1 < out_bytes && body[length] != '\n' && body[length] != '\r') {
        out[length] = isprint((unsigned char)body[length]) ? body[length] : '?';
        length++;
    }
    out[length] = 0;
}

static enum dl_rc refused(const char *bytes, size_t head_size, size_t size, bool closed, unsigned status,
                          struct dl_err *err)
{
    const char *value;
    const char *body = bytes + head_size;
    size_t body_size = size - head_size, announced = SIZE_MAX;
    if (header_value(bytes, head_size, "Content-Length", &value) > 0) {
        announced = strtoul(value, NULL, 10);
    }
    bool line_is_there = memchr(body, '\n', body_size) != NULL || body_size >= 200 || body_size >= announced;
    if (!line_is_there && !closed) {
        return DL_AGAIN;
    }
    char line[200];
    first_line(body, body_size, line, sizeof line);
    bool denied = status == 401 || status == 403;
    return dl_err_set(err, denied ? DL_EDENIED : DL_ENET, "the server answered %u%s%s%s", status,
                      line[0] == 0 ? "" : ": ", line, denied ? " (check the token or client certificate)" : "");
}

enum dl_rc wk_ws_response(const char *bytes, size_t size, bool closed, const char *key, size_t *used,
                          struct dl_err *err)
{
    const char *end = memmem(bytes, DL_MIN(size, (size_t)WK_WS_RESPONSE_MAX), "\r\n\r\n", 4);
    if (end == NULL) {
        if (size >= WK_WS_RESPONSE_MAX) {
            return dl_err_set(err, DL_EPROTO, "upgrade: the answer's header is longer than %d bytes",
                              WK_WS_RESPONSE_MAX);
        }
        if (size >= 5 && memcmp(bytes, "HTTP/", 5) != 0) {
            return dl_err_set(err, DL_EPROTO, "upgrade: the answer is not HTTP");
        }
        return closed ? dl_err_set(err, DL_ENET, "the server closed the connection before it answered") : DL_AGAIN;
    }
    size_t head_size = (size_t)(end - bytes) + 4;
    unsigned status = 0;
    bool is_http = head_size >= 16 && (memcmp(bytes, "HTTP/1.1 ", 9) == 0 || memcmp(bytes, "HTTP/1.0 ", 9) == 0);
    for (size_t i = 9; is_http && i < 12; i++) {
        is_http = bytes[i] >= '0' && bytes[i] <= '9';
        status = status * 10 + (unsigned)(bytes[i] - '0');
    }
    if (!is_http) {
        return dl_err_set(err, DL_EPROTO, "upgrade: the answer is not HTTP");
    }
    if (status != 101) {
        return refused(bytes, head_size, size, closed, status, err);
    }
    enum dl_rc rc = check_accepted(bytes, head_size, key, err);
    if (rc == DL_OK) {
        *used = head_size;
    }
    return rc;
}

/* --- sending ----------------------------------------------------------------------------------------------------- */

size_t wk_ws_head(enum wk_ws_opcode opcode, uint64_t payload_bytes, const uint8_t key[4], uint8_t out[WK_WS_HEAD_MAX])
{
    size_t length = 2;
    out[0] = (uint8_t)(0x80 | opcode);
    if (payload_bytes < 126) {
        out[1] = (uint8_t)(0x80 | payload_bytes);
    } else if (payload_bytes < 65536) {
        out[1] = 0x80 | 126;
        out[2] = (uint8_t)(payload_bytes >> 8);
        out[3] = (uint8_t)payload_bytes;
        length = 4;
    } else {
        out[1] = 0x80 | 127;
        for (int i = 0; i < 8; i++) {
            out[2 + i] = (uint8_t)(payload_bytes >> (56 - 8 * i));
        }
        length = 10;
    }
    memcpy(out + length, key, 4);
    return length + 4;
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
    switch (dl_isa_current()) {
#ifdef __x86_64__
    case DL_ISA_AVX512: return mask_avx512(out, in, bytes, word);
    case DL_ISA_AVX2: return mask_avx2(out, in, bytes, word);
#else
    case DL_ISA_AVX512:
    case DL_ISA_AVX2:
#endif
    case DL_ISA_PORTABLE: break;
    }
    return mask_portable(out, in, bytes, word);
}

void wk_ws_mask(uint8_t *out, const uint8_t *in, size_t bytes, const uint8_t key[4], size_t phase)
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

static enum wk_ws_event broken(struct dl_err *err, const char *what)
{
    dl_err_set(err, DL_EPROTO, "WebSocket frame: %s", what);
    return WK_WS_EVENT_BROKEN;
}

static uint32_t head_length(const struct wk_ws_parser *parser)
{
    if (parser->head_have < 2) {
        return 2;
    }
    unsigned code = parser->head[1] & 0x7f;
    return code == 126 ? 4 : code == 127 ? 10 : 2;
}

static const char *control_fault(const struct wk_ws_parser *parser, uint64_t length)
{
    if (parser->opcode != WK_WS_CLOSE && parser->opcode != WK_WS_PING && parser->opcode != WK_WS_PONG) {
        return "unknown control opcode";
    }
    if (!parser->fin || length > WK_WS_CONTROL_MAX) {
        return "a control frame is split or too long";
    }
    return parser->opcode == WK_WS_CLOSE && length == 1 ? "a close frame with half a code" : NULL;
}

static const char *data_fault(const struct wk_ws_parser *parser, uint64_t length)
{
    if (parser->opcode != WK_WS_BINARY && parser->opcode != WK_WS_CONTINUATION) {
        return "not a binary message";
    }
    if ((parser->opcode == WK_WS_CONTINUATION) != parser->in_message) {
        return parser->in_message ? "a message begins inside another" : "a continuation of nothing";
    }
    if (length > WK_WS_MESSAGE_MAX - parser->message_bytes) {
        return "the message is too long";
    }
    return NULL;
}

/* All head bytes are there: NULL, or what is wrong with them. */
static const char *begin_frame(struct wk_ws_parser *parser)
{
    const uint8_t *head = parser->head;
    if ((head[0] & 0x70) != 0) {
        return "reserved bits are set";
    }
    if ((head[1] & 0x80) != 0) {
        return "a server's frame is masked";
    }
    uint64_t length = head[1] & 0x7f;
    if (length >= 126) {
        unsigned width = length == 126 ? 2 : 8;
        length = 0;
        for (unsigned i = 0; i < width; i++) {
            length = length << 8 | head[2 + i];
        }
        if (length < (width == 2 ? 126 : 65536) || length >> 63 != 0) {
            return "the length is not in its shortest form";
        }
    }
    parser->fin = (head[0] & 0x80) != 0;
    parser->opcode = head[0] & 0x0f;
    bool control = (parser->opcode & 8) != 0;
    const char *fault = control ? control_fault(parser, length) : data_fault(parser, length);
    if (fault != NULL) {
        return fault;
    }
    parser->frame_left = length;
    parser->in_payload = true;
    if (control) {
        parser->control_bytes = 0;
    } else {
        parser->in_message = true;
        parser->message_bytes += length;
    }
    return NULL;
}

static bool is_control(const struct wk_ws_parser *parser)
{
    return (parser->opcode & 8) != 0;
}

/* The current frame's payload is complete. */
static void end_frame(struct wk_ws_parser *parser)
{
    parser->in_payload = false;
    parser->head_have = 0;
    if (!is_control(parser) && parser->fin) {
        parser->in_message = false;
        parser->message_bytes = 0;
        parser->end_due = true;
    }
}

uint64_t wk_ws_payload_next(const struct wk_ws_parser *parser)
{
    return parser->in_payload && !is_control(parser) ? parser->frame_left : 0;
}

void wk_ws_skip(struct wk_ws_parser *parser, uint64_t bytes)
{
    assert(bytes <= wk_ws_payload_next(parser));
    parser->frame_left -= bytes;
    if (parser->frame_left == 0) {
        end_frame(parser);
    }
}

static enum wk_ws_event take_payload(struct wk_ws_parser *parser, const uint8_t *bytes, size_t size, size_t *used,
                                     const uint8_t **data, size_t *data_bytes)
{
    size_t take = (size_t)DL_MIN(parser->frame_left, (uint64_t)(size - *used));
    const uint8_t *at = bytes + *used;
    *used += take;
    parser->frame_left -= take;
    if (is_control(parser)) {
        memcpy(parser->control + parser->control_bytes, at, take);
        parser->control_bytes += (uint32_t)take;
    }
    bool complete = parser->frame_left == 0;
    if (complete) {
        end_frame(parser);
    }
    if (is_control(parser)) {
        return complete ? WK_WS_EVENT_CONTROL : WK_WS_EVENT_MORE;
    }
    *data = at;
    *data_bytes = take;
    return WK_WS_EVENT_DATA;
}

enum wk_ws_event wk_ws_parse(struct wk_ws_parser *parser, const uint8_t *bytes, size_t size, size_t *used,
                             const uint8_t **data, size_t *data_bytes, struct dl_err *err)
{
    *used = 0;
    for (;;) {
        if (parser->end_due) {
            parser->end_due = false;
            return WK_WS_EVENT_END;
        }
        if (parser->in_payload) {
            if (*used == size && parser->frame_left > 0) {
                return WK_WS_EVENT_MORE;
            }
            enum wk_ws_event event = take_payload(parser, bytes, size, used, data, data_bytes);
            if (event == WK_WS_EVENT_CONTROL || (event == WK_WS_EVENT_DATA && *data_bytes > 0)) {
                return event;
            }
            continue; /* Half a control frame, or an empty one of a message in pieces. */
        }
        while (*used < size && parser->head_have < head_length(parser)) {
            parser->head[parser->head_have++] = bytes[(*used)++];
        }
        if (parser->head_have < head_length(parser)) {
            return WK_WS_EVENT_MORE;
        }
        const char *fault = begin_frame(parser);
        if (fault != NULL) {
            return broken(err, fault);
        }
    }
}
