#include "worker/link/ws.h"

#include <ctype.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

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

/* Printable start of the body's first line; empty where that is a page for browsers. */
static void first_line(const char *body, size_t size, char *out, size_t out_bytes)
{
    size_t length = 0;
    while (length < size && length + 1 < out_bytes && body[length] != '\n' && body[length] != '\r') {
        out[length] = isprint((unsigned char)body[length]) ? body[length] : '?';
        length++;
    }
    out[length > 0 && out[0] == '<' ? 0 : length] = 0;
}

/* What an answer other than 101 means, and what to do about it. */
static const char *meaning(unsigned status)
{
    switch (status) {
    case 400: return "the server does not take this connection: programs of the same version on both sides?";
    case 401: return "the syncer refused the token: use the one that it was started with (--token-file; RUN/token)";
    case 403: return "the connection was refused: check the token, the client certificate, and proxies on the way";
    case 404: return "no syncer takes connections there: check host and port (not that of --health-listen)";
    case 503: return "no room for another connection, or a proxy that does not reach the syncer; it is tried again";
    default: return "the server did not take the connection: is it a syncer, and no proxy on the way?";
    }
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
    return dl_err_set(err, status == 401 || status == 403 ? DL_EDENIED : DL_ENET, "status %u: %s%s%s", status,
                      meaning(status), line[0] == 0 ? "" : "; it says: ", line);
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
