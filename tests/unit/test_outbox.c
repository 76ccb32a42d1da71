/* What a connection has yet to write: whose bytes they are, and until when. */
#include <sys/mman.h>

#include "common/mem.h"
#include "tests/unit/unit.h"
#include "worker/link/outbox.h"

enum { CAPACITY = 200, HEAD = 54, DATA = 5000 };
static struct wk_outbox box;
static uint8_t lent[DATA], wanted[HEAD + DATA], written[HEAD + DATA];
static size_t written_bytes;

static void fill(uint8_t first)
{
    for (size_t i = 0; i < HEAD + DATA; i++) {
        wanted[i] = (uint8_t)(first + i * 7 + i / 256);
    }
    memcpy(wk_outbox_space(&box), wanted, HEAD);
    memcpy(lent, wanted + HEAD, DATA);
    wk_outbox_put(&box, HEAD);
    wk_outbox_lend(&box, lent, DATA);
    written_bytes = 0;
}

/* Writes so much of what is offered; true when that gives back what was lent. */
static bool write_some(size_t most)
{
    struct wk_outbox_parts parts;
    wk_outbox_parts(&box, &parts);
    size_t now = 0;
    for (int i = 0; i < 2; i++) {
        size_t part = DL_MIN(parts.sizes[i], most - now);
        if (part > 0) {
            memcpy(written + written_bytes + now, parts.bytes[i], part);
        }
        now += part;
    }
    written_bytes += now;
    return wk_outbox_sent(&box, now);
}

static void expect_whole(void)
{
    CU_ASSERT_TRUE(wk_outbox_is_empty(&box));
    CU_ASSERT_EQUAL_FATAL(written_bytes, HEAD + DATA);
    CU_ASSERT_EQUAL(memcmp(written, wanted, HEAD + DATA), 0);
}

static void begin(void)
{
    CU_ASSERT_EQUAL_FATAL(wk_outbox_init(&box, CAPACITY, NULL), DL_OK);
    CU_ASSERT_TRUE(wk_outbox_is_empty(&box));
}

/* However the socket takes them, the bytes come in order, and what was lent is given back with the last of them, once. */
static void test_given_back_with_the_last_byte(void)
{
    static const size_t pieces[] = {1, 7, HEAD - 1, HEAD, HEAD + 1, 1000, DATA - 1, DATA, HEAD + DATA};
    begin();
    for (size_t i = 0; i < DL_COUNT_OF(pieces); i++) {
        fill((uint8_t)i);
        bool back = false;
        while (!wk_outbox_is_empty(&box)) {
            CU_ASSERT_FALSE_FATAL(back);
            back = write_some(pieces[i]);
        }
        CU_ASSERT_TRUE(back);
        expect_whole();
    }
    wk_outbox_release(&box);
}

/* After any byte its owner may want the memory back: the frame is still finished with the bytes that it began with. */
static void test_kept_at_every_byte(void)
{
    begin();
    for (size_t at = 0; at < HEAD + DATA; at += at < 2 * HEAD ? 1 : 331) {
        fill((uint8_t)at);
        CU_ASSERT_FALSE(at > 0 && write_some(at));
        CU_ASSERT_EQUAL_FATAL(wk_outbox_keep(&box, NULL), DL_OK);
        memset(lent, 0xee, DATA);
        CU_ASSERT_EQUAL_FATAL(wk_outbox_keep(&box, NULL), DL_OK); /* It is its own by now. */
        while (!wk_outbox_is_empty(&box)) {
            CU_ASSERT_FALSE(write_some(100)); /* It was given back before. */
        }
        expect_whole();
    }
    wk_outbox_release(&box);
}

/* Once it is given back nobody reads it: it lies in a page that nobody can read by then. */
static void test_not_read_afterwards(void)
{
    begin();
    uint8_t *page = mmap(NULL, DATA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CU_ASSERT_PTR_NOT_EQUAL_FATAL(page, MAP_FAILED);
    for (int way = 0; way < 3; way++) {
        CU_ASSERT_EQUAL_FATAL(mprotect(page, DATA, PROT_READ | PROT_WRITE), 0);
        fill(1);
        wk_outbox_clear(&box);
        memcpy(wk_outbox_space(&box), wanted, HEAD);
        memcpy(page, wanted + HEAD, DATA);
        wk_outbox_put(&box, HEAD);
        wk_outbox_lend(&box, page, DATA);
        write_some(HEAD + 100);
        if (way == 0) {
            CU_ASSERT_EQUAL_FATAL(wk_outbox_keep(&box, NULL), DL_OK);
        } else if (way == 1) {
            CU_ASSERT_TRUE(write_some(DATA));
        } else {
            wk_outbox_clear(&box);
        }
        CU_ASSERT_EQUAL_FATAL(mprotect(page, DATA, PROT_NONE), 0);
        while (!wk_outbox_is_empty(&box)) {
            write_some(777);
        }
        CU_ASSERT_EQUAL(written_bytes, way == 2 ? HEAD + 100 : HEAD + DATA);
    }
    munmap(page, DATA);
    wk_outbox_release(&box);
}

UNIT_MAIN("outbox", {"T2 given back with the last byte", test_given_back_with_the_last_byte},
          {"T2 kept at every byte", test_kept_at_every_byte}, {"T2 not read afterwards", test_not_read_afterwards})
