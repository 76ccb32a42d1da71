/* RFC 6455 framing of the link, and its upgrade: every split point, every alignment, and what a hostile server could send. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/isa.h"
#include "common/mem.h"
#include "common/rng.h"
#include "common/ws.h"
#include "tests/unit/unit.h"
#include "worker/link/ws.h"

/* --- masks ---------------------------------------------------------------------------------------------------------- */

static void check_masks(void)
{
    static const uint8_t key[4] = {0x12, 0xff, 0x00, 0x9a};
    enum { most = 300, guard = 64 };
    uint8_t *in = malloc(most + 2 * guard), *out = malloc(most + 2 * guard);
    for (int i = 0; i < most + 2 * guard; i++) {
        in[i] = (uint8_t)(i * 31 + 7);
    }
    for (size_t offset = 0; offset < 8; offset++) {
        for (size_t phase = 0; phase < 5; phase++) {
            for (size_t size = 0; size <= most; size += size < 140 ? 1 : 23) {
                memset(out, 0xa5, most + 2 * guard);
                dl_ws_mask(out + guard - offset, in + offset, size, key, phase);
                for (size_t i = 0; i < size; i++) {
                    CU_ASSERT_FATAL(out[guard - offset + i] == (in[offset + i] ^ key[(phase + i) % 4]));
                }
                CU_ASSERT_FATAL(out[guard - offset - 1] == 0xa5 && out[guard - offset + size] == 0xa5);
            }
        }
    }
    memcpy(out, in, most);
    dl_ws_mask(out + 3, out + 3, most - 3, key, 2); /* In place, and back again. */
    CU_ASSERT(memcmp(out, in, most) != 0);
    dl_ws_mask(out + 3, out + 3, most - 3, key, 2);
    CU_ASSERT_EQUAL(memcmp(out, in, most), 0);
    free(in);
    free(out);
}

static void test_masks_equal_the_naive_form_at_every_alignment(void)
{
    enum dl_isa best = dl_isa_current();
    for (int isa = 0; isa < DL_ISA_COUNT; isa++) {
        if (dl_isa_force((enum dl_isa)isa)) {
            check_masks();
        }
    }
    CU_ASSERT_TRUE(dl_isa_force(best));
}

static void test_frame_heads(void)
{
    static const uint8_t key[4] = {1, 2, 3, 4};
    uint8_t head[DL_WS_HEAD_MAX];
    CU_ASSERT_EQUAL(dl_ws_head(DL_WS_BINARY, 125, key, head), 6);
    CU_ASSERT_EQUAL(memcmp(head, "\x82\xfd\1\2\3\4", 6), 0);
    CU_ASSERT_EQUAL(dl_ws_head(DL_WS_PONG, 126, key, head), 8);
    CU_ASSERT_EQUAL(memcmp(head, "\x8a\xfe\0\x7e\1\2\3\4", 8), 0);
    CU_ASSERT_EQUAL(dl_ws_head(DL_WS_BINARY, 65535, key, head), 8);
    CU_ASSERT_EQUAL(dl_ws_head(DL_WS_BINARY, 65536, key, head), 14);
    CU_ASSERT_EQUAL(memcmp(head, "\x82\xff\0\0\0\0\0\1\0\0\1\2\3\4", 14), 0);
    CU_ASSERT_EQUAL(dl_ws_head(DL_WS_CLOSE, 2, NULL, head), 2);
    CU_ASSERT_EQUAL(memcmp(head, "\x88\2", 2), 0);
    CU_ASSERT_EQUAL(dl_ws_head(DL_WS_BINARY, 1u << 20, NULL, head), 10);
    CU_ASSERT_EQUAL(memcmp(head, "\x82\x7f\0\0\0\0\0\x10\0\0", 10), 0);
}

/* --- frames --------------------------------------------------------------------------------------------------------- */

struct script { /* Bytes as a peer sends them. */
    uint8_t bytes[400000];
    size_t size;
};
static struct script script;
static bool from_client; /* Frames are masked. */

static void frame(unsigned first, const void *payload, size_t size)
{
    static uint8_t key[4] = {0x5a, 0x01, 0xff, 0x80};
    uint8_t head[DL_WS_HEAD_MAX];
    size_t length = dl_ws_head(DL_WS_BINARY, size, from_client ? key : NULL, head);
    uint8_t *at = script.bytes + script.size;
    head[0] = (uint8_t)first;
    memcpy(at, head, length);
    for (size_t i = 0; i < size; i++) {
        at[length + i] = ((const uint8_t *)payload)[i] ^ (from_client ? key[i % 4] : 0);
    }
    script.size += length + size;
    key[0] = (uint8_t)(key[0] * 7 + 3); /* Each frame has its own. */
    key[3] ^= key[0];
}

struct heard {
    uint8_t data[400000];
    size_t size;
    unsigned ends, pings, closes, close_code;
    bool broken;
    struct dl_err err;
};
static struct heard heard;

static void take_event(struct dl_ws_parser *parser, enum dl_ws_event event, const uint8_t *data, size_t size)
{
    if (event == DL_WS_EVENT_DATA) {
        memcpy(heard.data + heard.size, data, size);
        heard.size += size;
    }
    heard.ends += event == DL_WS_EVENT_END;
    if (event == DL_WS_EVENT_CONTROL) {
        heard.pings +=
            parser->opcode == DL_WS_PING && parser->control_bytes == 4 && memcmp(parser->control, "ping", 4) == 0;
        heard.closes += parser->opcode == DL_WS_CLOSE;
        heard.close_code = parser->opcode == DL_WS_CLOSE ? dl_ws_close_code(parser) : heard.close_code;
    }
    heard.broken = event == DL_WS_EVENT_BROKEN;
}

/* From memory of exactly that size: the address sanitizer sees any access beyond. */
static void parse(struct dl_ws_parser *parser, const uint8_t *bytes, size_t size)
{
    uint8_t *copy = malloc(size == 0 ? 1 : size), *at = copy;
    memcpy(copy, bytes, size);
    enum dl_ws_event event;
    do {
        uint8_t *data = NULL;
        size_t used = 0, data_bytes = 0;
        event = dl_ws_parse(parser, at, size, &used, &data, &data_bytes, &heard.err);
        CU_ASSERT_FATAL(used <= size);
        CU_ASSERT_FATAL(event != DL_WS_EVENT_MORE || used == size);
        CU_ASSERT_FATAL(event != DL_WS_EVENT_DATA || (data_bytes > 0 && data >= at && data + data_bytes <= at + size));
        take_event(parser, event, data, data_bytes);
        at += used;
        size -= used;
    } while (event != DL_WS_EVENT_MORE && event != DL_WS_EVENT_BROKEN);
    free(copy);
}

static void listen_anew(struct dl_ws_parser *parser)
{
    *parser = (struct dl_ws_parser){.message_max = WK_WS_MESSAGE_MAX, .from_client = from_client};
    heard.size = heard.ends = heard.pings = heard.closes = heard.close_code = 0;
    heard.broken = false;
}

/* Two messages: one whole, one in pieces (an empty one among them) with control frames between; then a close. */
static void write_script(size_t *payload)
{
    static uint8_t bytes[70000];
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (uint8_t)(i * 13 + i / 256);
    }
    script.size = 0;
    frame(0x82, bytes, 130);
    frame(0x02, bytes + 130, 3);
    frame(0x89, "ping", 4);
    frame(0x00, "", 0);
    frame(0x00, bytes + 133, 200);
    frame(0x8a, "", 0);
    frame(0x80, bytes + 333, 5);
    frame(0x88, "\x03\xe8 bye", 6);
    *payload = 338;
    CU_ASSERT(script.size < 500);
}

static void expect_script(size_t payload)
{
    CU_ASSERT_FALSE_FATAL(heard.broken);
    CU_ASSERT_EQUAL_FATAL(heard.size, payload);
    CU_ASSERT_EQUAL(heard.ends, 2);
    CU_ASSERT_EQUAL(heard.pings, 1);
    CU_ASSERT_EQUAL(heard.closes, 1);
    CU_ASSERT_EQUAL(heard.close_code, 1000);
    for (size_t i = 0; i < payload; i++) {
        CU_ASSERT_FATAL(heard.data[i] == (uint8_t)(i * 13 + i / 256));
    }
}

static void test_parser_at_every_split_point(void)
{
    struct dl_ws_parser parser;
    size_t payload;
    for (int end = 0; end < 2; end++) {
        from_client = end == 1;
        write_script(&payload);
        for (size_t split = 0; split <= script.size; split++) {
            listen_anew(&parser);
            parse(&parser, script.bytes, split);
            parse(&parser, script.bytes + split, script.size - split);
            expect_script(payload);
        }
        for (size_t piece = 1; piece < 40; piece++) {
            listen_anew(&parser);
            for (size_t at = 0; at < script.size; at += piece) {
                parse(&parser, script.bytes + at, DL_MIN(piece, script.size - at));
            }
            expect_script(payload);
        }
    }
}

/* The bulk path: payload that comes next for certain is received elsewhere, and only told to the parser. */
static void receive_elsewhere(const uint8_t *bytes, uint8_t *into, size_t direct, bool skipped)
{
    struct dl_ws_parser parser;
    listen_anew(&parser);
    size_t elsewhere = 0;
    for (size_t at = 0; at < script.size;) {
        size_t next = (size_t)DL_MIN(dl_ws_payload_next(&parser), (uint64_t)direct);
        if (skipped) {
            dl_ws_skip(&parser, next);
        } else {
            memcpy(into, script.bytes + at, next);
            dl_ws_placed(&parser, into, next);
            size_t start = heard.size + elsewhere; /* Of the messages' bytes, one after the other. */
            start -= start >= 66500 ? 66500 : start >= 66000 ? 66000 : 0;
            CU_ASSERT_EQUAL_FATAL(memcmp(into, bytes + start, next), 0);
        }
        elsewhere += next;
        at += next;
        size_t piece = DL_MIN((size_t)7, script.size - at);
        parse(&parser, script.bytes + at, piece);
        at += piece;
    }
    CU_ASSERT_FALSE(heard.broken);
    CU_ASSERT_EQUAL(heard.size + elsewhere, 66510);
    CU_ASSERT_EQUAL(heard.ends, 2);
}

static void test_payload_received_elsewhere(void)
{
    static uint8_t bytes[70000], into[70000];
    for (size_t i = 0; i < sizeof bytes; i++) {
        bytes[i] = (uint8_t)(i * 29 + i / 251);
    }
    for (int end = 0; end < 2; end++) {
        from_client = end == 1;
        script.size = 0;
        frame(0x02, bytes, 66000);
        frame(0x80, bytes, 500);
        frame(0x82, bytes, 10);
        for (size_t direct = 1; direct < 66000; direct = direct * 3 + 1) {
            receive_elsewhere(bytes, into, direct, false);
            receive_elsewhere(bytes, into, direct, true);
        }
    }
}

static void expect_broken(const char *text, enum dl_ws_code code)
{
    struct dl_ws_parser parser;
    listen_anew(&parser);
    parse(&parser, script.bytes, script.size);
    CU_ASSERT_TRUE(heard.broken);
    CU_ASSERT_PTR_NOT_NULL(strstr(heard.err.text, text));
    CU_ASSERT_EQUAL(parser.fault, code);
    listen_anew(&parser);
    for (size_t i = 0; i < script.size && !heard.broken; i++) {
        parse(&parser, script.bytes + i, 1);
    }
    CU_ASSERT_TRUE(heard.broken);
    CU_ASSERT_EQUAL(parser.fault, code);
}

static void one_frame(unsigned first, const void *payload, size_t size)
{
    script.size = 0;
    frame(first, payload, size);
}

/* A head with a length of 16 or 64 bits that is written as told, and the key where there is one. */
static void head_only(unsigned first, unsigned code, const void *length, size_t width)
{
    script.bytes[0] = (uint8_t)first;
    script.bytes[1] = (uint8_t)(code | (from_client ? 0x80 : 0));
    memcpy(script.bytes + 2, length, width);
    memset(script.bytes + 2 + width, 0x77, from_client ? 4 : 0);
    script.size = 2 + width + (from_client ? 4 : 0);
}

static void expect_close(unsigned code)
{
    struct dl_ws_parser parser;
    listen_anew(&parser);
    parse(&parser, script.bytes, script.size);
    CU_ASSERT_FALSE(heard.broken);
    CU_ASSERT_EQUAL(heard.closes, 1);
    CU_ASSERT_EQUAL(heard.close_code, code);
}

/* RFC 6455, 5.5.1 and 8.1: the first and the last code point of each length, the neighbours of what is not allowed, and texts
 * that end in the midst of a character. */
static void expect_reasons(void)
{
    static const struct {
        const char *reason;
        bool is_text;
    } rows[] = {{"", true},
                {"going away", true},
                {"\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xef\xbf\xbf", true},
                {"\xf0\x90\x80\x80\xf4\x8f\xbf\xbf", true},
                {"\x80", false},
                {"\xc1\xbf", false},
                {"\xe0\x9f\xbf", false},
                {"\xed\xa0\x80", false},
                {"\xf0\x8f\xbf\xbf", false},
                {"\xf4\x90\x80\x80", false},
                {"\xf5\x80\x80\x80", false},
                {"\xff", false},
                {"a\xc3", false},
                {"a\xe2\x82", false},
                {"a\xe2\x82z", false},
                {"a\xf0\x90\x80", false},
                {"a\xc3z", false}};
    for (size_t i = 0; i < DL_COUNT_OF(rows); i++) {
        uint8_t payload[DL_WS_CONTROL_MAX] = {0x03, 0xe8};
        size_t length = strlen(rows[i].reason);
        memcpy(payload + 2, rows[i].reason, length);
        one_frame(0x88, payload, 2 + length);
        if (rows[i].is_text) {
            expect_close(1000);
        } else {
            expect_broken("not UTF-8", DL_WS_CODE_NOT_TEXT);
        }
    }
}

static void test_hostile_frames_are_refused(void)
{
    static const unsigned codes[] = {0, 999, 1004, 1005, 1006, 1015, 1016, 2999, 5000, 65535};
    static uint8_t bytes[300];
    for (int end = 0; end < 2; end++) {
        from_client = end == 1;
        for (unsigned bit = 0x10; bit <= 0x40; bit <<= 1) {
            one_frame(0x82 | bit, "x", 1);
            expect_broken("reserved bits", DL_WS_CODE_PROTOCOL);
        }
        one_frame(0x81, "x", 1);
        expect_broken("not a binary", DL_WS_CODE_UNSUPPORTED);
        for (unsigned opcode = 3; opcode < 8; opcode++) {
            one_frame(0x80 | opcode, "x", 1);
            expect_broken("not a binary", DL_WS_CODE_PROTOCOL);
            one_frame(0x88 | opcode, "x", 1);
            expect_broken("unknown control", DL_WS_CODE_PROTOCOL);
        }
        one_frame(0x80, "x", 1);
        expect_broken("continuation of nothing", DL_WS_CODE_PROTOCOL);
        for (unsigned opcode = 8; opcode <= 10; opcode++) {
            one_frame(opcode, "xy", 2);
            expect_broken("split or too long", DL_WS_CODE_PROTOCOL);
            one_frame(0x80 | opcode, bytes, 126);
            expect_broken("split or too long", DL_WS_CODE_PROTOCOL);
        }
        one_frame(0x88, "x", 1);
        expect_broken("half a code", DL_WS_CODE_PROTOCOL);
        for (size_t i = 0; i < DL_COUNT_OF(codes); i++) {
            const uint8_t code[] = {(uint8_t)(codes[i] >> 8), (uint8_t)codes[i]};
            one_frame(0x88, code, 2);
            expect_broken("nobody may send", DL_WS_CODE_PROTOCOL);
        }
        expect_reasons();
        head_only(0x82, 126, "\0\x7d", 2);
        expect_broken("shortest form", DL_WS_CODE_PROTOCOL);
        head_only(0x82, 127, "\0\0\0\0\0\0\xff\xff", 8);
        expect_broken("shortest form", DL_WS_CODE_PROTOCOL);
        head_only(0x82, 127, "\xff\xff\xff\xff\xff\xff\xff\xff", 8);
        expect_broken("shortest form", DL_WS_CODE_PROTOCOL);
        head_only(0x82, 127, "\x7f\xff\xff\xff\xff\xff\xff\xff", 8);
        expect_broken("too long", DL_WS_CODE_TOO_LARGE);
        script.size = 0;
        frame(0x02, bytes, 3);
        frame(0x82, bytes, 3);
        expect_broken("begins inside another", DL_WS_CODE_PROTOCOL);
    }
}

/* A key of zeros is as good as any: the payload is taken as it is, and not written to (it lies in a page that cannot be). */
static void test_a_mask_of_zeros_is_no_pass(void)
{
    static const uint8_t zeros[4] = {0};
    enum { BYTES = 70000 };
    struct dl_ws_parser parser;
    uint8_t *page = mmap(NULL, BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *data = NULL;
    CU_ASSERT_PTR_NOT_EQUAL_FATAL(page, MAP_FAILED);
    from_client = true;
    listen_anew(&parser);
    uint8_t head[DL_WS_HEAD_MAX];
    size_t used = 0, bytes = 0, length = dl_ws_head(DL_WS_BINARY, BYTES, zeros, head);
    CU_ASSERT_EQUAL(head[1] & 0x80, 0x80);
    CU_ASSERT_EQUAL(dl_ws_parse(&parser, head, length, &used, &data, &bytes, &heard.err), DL_WS_EVENT_MORE);
    dl_ws_placed(&parser, page, 1001);
    CU_ASSERT_EQUAL(dl_ws_parse(&parser, page, BYTES - 1001, &used, &data, &bytes, &heard.err), DL_WS_EVENT_DATA);
    CU_ASSERT_PTR_EQUAL(data, page);
    CU_ASSERT_EQUAL(bytes, BYTES - 1001);
    munmap(page, BYTES);
    one_frame(0x82, "masked", 6); /* The next one's key is its own. */
    parse(&parser, script.bytes, script.size);
    CU_ASSERT_EQUAL(heard.ends, 2);
    CU_ASSERT_EQUAL(memcmp(heard.data, "masked", 6), 0);
}

/* A client's frames are masked, a server's are not; either is told at once when it is the other way. */
static void test_masks_are_demanded_of_clients_only(void)
{
    for (int end = 0; end < 2; end++) {
        from_client = end == 0;
        one_frame(0x82, "x", 1);
        from_client = !from_client;
        expect_broken(from_client ? "client's frame is not masked" : "server's frame is masked", DL_WS_CODE_PROTOCOL);
    }
}

/* Each piece is small, together they would be more than any message: refused before they are taken. */
static void test_endless_fragments_are_refused(void)
{
    static uint8_t bytes[60000];
    struct dl_ws_parser parser;
    for (int end = 0; end < 2; end++) {
        from_client = end == 1;
        listen_anew(&parser);
        size_t taken = 0;
        for (int i = 0; i < 1000 && !heard.broken; i++) {
            one_frame(i == 0 ? 0x02 : 0x00, bytes, sizeof bytes);
            heard.size = 0;
            parse(&parser, script.bytes, script.size);
            taken += heard.size;
        }
        CU_ASSERT_TRUE(heard.broken);
        CU_ASSERT_EQUAL(parser.fault, DL_WS_CODE_TOO_LARGE);
        CU_ASSERT(taken <= WK_WS_MESSAGE_MAX);
        CU_ASSERT(taken > WK_WS_MESSAGE_MAX - sizeof bytes);
    }
}

static void test_random_bytes_never_break_the_parser(void)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 3, dl_rng_stream("ws", 0, 0));
    unsigned broken = 0, ends = 0;
    for (int round = 0; round < 4000; round++) {
        struct dl_ws_parser parser;
        from_client = round % 2 == 1;
        listen_anew(&parser);
        size_t payload;
        write_script(&payload);
        for (int i = 0; i < 2; i++) {
            script.bytes[dl_rng_below(&rng, script.size)] = (uint8_t)dl_rng_u32(&rng);
        }
        parse(&parser, script.bytes, script.size);
        broken += heard.broken;
        ends += heard.ends;
    }
    CU_ASSERT(broken > 100);
    CU_ASSERT(ends > 100);
}

/* --- upgrade -------------------------------------------------------------------------------------------------------- */

static const char rfc_key[] = "dGhlIHNhbXBsZSBub25jZQ=="; /* The example of RFC 6455, section 1.3. */
static const char accepted[] = "HTTP/1.1 101 Switching Protocols\r\n"
                               "upgrade: WebSocket\r\n"
                               "CONNECTION: keep-alive, Upgrade\r\n"
                               "Sec-WebSocket-Accept:   s3pPLMBiTxaQ9kYGzzhZRbK+xOo= \r\n"
                               "Sec-WebSocket-Protocol: diloco.v1\r\n"
                               "\r\n\x82\x01x";

static void test_upgrade_request(void)
{
    char key[WK_WS_KEY_BYTES], out[1024];
    wk_ws_key((const uint8_t *)"the sample nonce", key);
    CU_ASSERT_STRING_EQUAL(key, rfc_key);
    CU_ASSERT_EQUAL(wk_ws_request("syncer-0.demo", "8080", "s3cret", key, out, sizeof out, NULL), DL_OK);
    CU_ASSERT_EQUAL(strncmp(out, "GET /v1/connect HTTP/1.1\r\nHost: syncer-0.demo:8080\r\n", 52), 0);
    CU_ASSERT_PTR_NOT_NULL(strstr(out, "\r\nAuthorization: Bearer s3cret\r\n\r\n"));
    CU_ASSERT_PTR_NOT_NULL(strstr(out, "\r\nSec-WebSocket-Protocol: diloco.v1\r\n"));
    CU_ASSERT_EQUAL(wk_ws_request("::1", "1", NULL, key, out, sizeof out, NULL), DL_OK);
    CU_ASSERT_PTR_NOT_NULL(strstr(out, "Host: [::1]:1\r\n"));
    CU_ASSERT_PTR_NULL(strstr(out, "Authorization"));
    CU_ASSERT_EQUAL(wk_ws_request("a", "1", "x\r\nEvil: 1", key, out, sizeof out, NULL), DL_EINVAL);
    CU_ASSERT_EQUAL(wk_ws_request("a", "1", "x", key, out, 100, NULL), DL_EINVAL);
}

static enum dl_rc answer(const char *bytes, size_t size, bool closed, struct dl_err *err)
{
    size_t used = 0;
    char *copy = malloc(size + 1); /* Of exactly that size. */
    memcpy(copy, bytes, size);
    enum dl_rc rc = wk_ws_response(copy, size, closed, rfc_key, &used, err);
    CU_ASSERT(rc != DL_OK || used == sizeof accepted - 4);
    free(copy);
    return rc;
}

static void test_upgrade_answer_at_every_length(void)
{
    struct dl_err err;
    for (size_t size = 0; size < sizeof accepted - 1; size++) {
        enum dl_rc expected = size < sizeof accepted - 4 ? DL_AGAIN : DL_OK;
        CU_ASSERT_EQUAL_FATAL(answer(accepted, size, false, &err), expected);
        CU_ASSERT_EQUAL_FATAL(answer(accepted, size, true, &err), expected == DL_AGAIN ? DL_ENET : DL_OK);
    }
}

static void expect_answer(const char *text, enum dl_rc rc, const char *says)
{
    struct dl_err err = {0};
    CU_ASSERT_EQUAL(answer(text, strlen(text), true, &err), rc);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, says));
}

static void test_upgrade_that_is_not_accepted(void)
{
    expect_answer("HTTP/1.1 401 Unauthorized\r\nContent-Length: 12\r\n\r\nwrong token\n", DL_EDENIED,
                  "status 401: the syncer refused the token: use the one that");
    expect_answer("HTTP/1.1 401 Unauthorized\r\n\r\nwrong token\n", DL_EDENIED, "RUN/token); it says: wrong token");
    expect_answer("HTTP/1.1 403 Forbidden\r\n\r\n", DL_EDENIED, "403: the connection was refused: check");
    expect_answer("HTTP/1.1 404 Not Found\r\n\r\n", DL_ENET, "404: no syncer takes connections there");
    expect_answer("HTTP/1.1 503 Unavailable\r\n\r\nnot yet\nmore", DL_ENET, "tried again; it says: not yet");
    expect_answer("HTTP/1.0 200 OK\r\n\r\nhi\x1b[2J", DL_ENET, "it says: hi?[2J");
    expect_answer("HTTP/1.1 400 Bad\r\n\r\n", DL_ENET, "400: the server does not take this connection: programs");
    struct dl_err page = {0}; /* As libwebsockets answers. */
    static const char html[] = "HTTP/1.1 401 Unauthorized\r\n\r\n<html><head><meta charset=utf-8></head></html>";
    CU_ASSERT_EQUAL(answer(html, sizeof html - 1, true, &page), DL_EDENIED);
    CU_ASSERT_PTR_NULL(strchr(page.text, '<'));
    expect_answer("HTTP/1.1 1x1 OK\r\n\r\n", DL_EPROTO, "not HTTP");
    expect_answer("SSH-2.0-OpenSSH_9.2\r\n", DL_EPROTO, "not HTTP");
    struct dl_err err = {0};
    const char *half = "HTTP/1.1 401 Unauthorized\r\nContent-Length: 12\r\n\r\nwrong";
    CU_ASSERT_EQUAL(answer(half, strlen(half), false, &err), DL_AGAIN);
    static const char *const lines[] = {"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=", "WebSocket\r", "Upgrade\r", "diloco.v1",
                                        "keep-alive"};
    static const char *const says[] = {"Sec-WebSocket-Accept", "without Upgrade", "without Upgrade", "does not speak",
                                       "extension"};
    for (size_t i = 0; i < DL_COUNT_OF(lines); i++) {
        char text[600];
        memcpy(text, accepted, sizeof accepted);
        if (i < 4) {
            strstr(text, lines[i])[2] ^= 2;
        } else { /* An extension that nobody asked for. */
            char *end = strstr(text, "\r\n\r\n");
            memcpy(end, "\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n", 51);
        }
        expect_answer(text, DL_EPROTO, says[i]);
    }
    char *endless = malloc(WK_WS_RESPONSE_MAX + 10);
    memset(endless, 'a', WK_WS_RESPONSE_MAX + 10);
    memcpy(endless, "HTTP/1.1 101", 12);
    CU_ASSERT_EQUAL(answer(endless, WK_WS_RESPONSE_MAX, false, &err), DL_EPROTO);
    free(endless);
}

UNIT_MAIN("ws", {"masks", test_masks_equal_the_naive_form_at_every_alignment}, {"heads", test_frame_heads},
          {"split points", test_parser_at_every_split_point}, {"payload elsewhere", test_payload_received_elsewhere},
          {"hostile frames", test_hostile_frames_are_refused}, {"a mask of zeros", test_a_mask_of_zeros_is_no_pass},
          {"masked or not", test_masks_are_demanded_of_clients_only},
          {"endless fragments", test_endless_fragments_are_refused},
          {"random bytes", test_random_bytes_never_break_the_parser}, {"upgrade request", test_upgrade_request},
          {"upgrade answer", test_upgrade_answer_at_every_length},
          {"upgrade refused", test_upgrade_that_is_not_accepted})
