/* What the syncer's network loop is made of: listening, buffers of pushes, turns that are short and fair. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "syncer/server/buffers.h"
#include "syncer/server/listen.h"
#include "syncer/server/turn.h"
#include "tests/unit/unit.h"

/* --- listening ------------------------------------------------------------------------------------------------------ */

static void test_listens_where_asked(void)
{
    int fd = -1;
    int second = -1;
    char address[SY_ADDRESS_MAX];
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_listen("127.0.0.1:0", &fd, address, &err), DL_OK);
    struct sockaddr_in bound;
    socklen_t size = sizeof bound;
    CU_ASSERT_EQUAL_FATAL(getsockname(fd, (struct sockaddr *)&bound, &size), 0);
    CU_ASSERT_EQUAL(bound.sin_family, AF_INET);
    CU_ASSERT_EQUAL(bound.sin_addr.s_addr, htonl(INADDR_LOOPBACK)); /* This address, not all of them. */
    char expected[SY_ADDRESS_MAX];
    snprintf(expected, sizeof expected, "127.0.0.1:%u", ntohs(bound.sin_port));
    CU_ASSERT_STRING_EQUAL(address, expected);
    CU_ASSERT(bound.sin_port != 0);

    CU_ASSERT_EQUAL(sy_listen(expected, &second, address, &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "another process has this port"));
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, expected));
    close(fd);

    CU_ASSERT_EQUAL_FATAL(sy_listen("*:0", &fd, address, &err), DL_OK);
    CU_ASSERT_EQUAL(strncmp(address, "*:", 2), 0);
    close(fd);
}

static void test_wrong_addresses(void)
{
    static const char *const wrong[] = {"",
                                        "127.0.0.1",
                                        ":80",
                                        "localhost:",
                                        "localhost:x",
                                        "a:70000",
                                        "::1:5",
                                        "127.0.0.1:-1",
                                        "[::1]",
                                        "[]:5",
                                        "no.such.host.invalid:1",
                                        "203.0.113.7:0" /* Reserved for documentation: no machine has it. */};
    for (size_t i = 0; i < DL_COUNT_OF(wrong); i++) {
        int fd = -1;
        char address[SY_ADDRESS_MAX];
        struct dl_err err = {.text = ""};
        CU_ASSERT_EQUAL(sy_listen(wrong[i], &fd, address, &err), DL_EINVAL);
        CU_ASSERT(strlen(err.text) > 10);
        CU_ASSERT_EQUAL(fd, -1);
    }
}

static void test_port_file(void)
{
    char path[] = "/tmp/diloco-test-port-XXXXXX";
    int fd = mkstemp(path);
    CU_ASSERT_FATAL(fd >= 0);
    struct dl_err err;
    CU_ASSERT_EQUAL(sy_write_port_file(path, "127.0.0.1:5", &err), DL_OK);
    FILE *file = fopen(path, "r");
    char line[64] = "";
    CU_ASSERT_PTR_NOT_NULL_FATAL(file);
    CU_ASSERT_PTR_NOT_NULL(fgets(line, sizeof line, file));
    CU_ASSERT_STRING_EQUAL(line, "127.0.0.1:5\n");
    fclose(file);
    close(fd);
    unlink(path);
    CU_ASSERT_EQUAL(sy_write_port_file("/no/such/folder/port", "x", &err), DL_EINVAL);
    CU_ASSERT_PTR_NOT_NULL(strstr(err.text, "/no/such/folder/port"));
}

/* Heap, mapping, large pages: each side of where one ends and the next begins. */
static void test_buffers_of_all_sizes(void)
{
    struct sy_buffers *buffers = sy_buffers_new();
    CU_ASSERT_PTR_NOT_NULL_FATAL(buffers);
    static const size_t limits[] = {1 << 20, 16 << 20};
    for (size_t i = 0; i < DL_COUNT_OF(limits); i++) {
        for (size_t bytes = limits[i] - 65; bytes <= limits[i] + 65; bytes += 13) {
            uint8_t *memory = sy_buffers_take(buffers, bytes);
            CU_ASSERT_PTR_NOT_NULL_FATAL(memory);
            CU_ASSERT_EQUAL((uintptr_t)memory % 64, 0);
            memory[0] = memory[bytes / 2] = memory[bytes - 1] = 1;
            sy_buffers_give(buffers, memory);
            sy_buffers_trim(buffers, INT64_MAX);
            CU_ASSERT_EQUAL(sy_buffers_idle_bytes(buffers), 0);
        }
    }
    sy_buffers_free(buffers);
}

static void test_buffers_are_used_again(void)
{
    struct sy_buffers *buffers = sy_buffers_new();
    CU_ASSERT_PTR_NOT_NULL_FATAL(buffers);
    uint8_t *large = sy_buffers_take(buffers, 5 << 20);
    uint8_t *small = sy_buffers_take(buffers, 1000);
    sy_buffers_give(buffers, sy_buffers_take(buffers, 2 << 20)); /* As much is in use at once as below. */
    CU_ASSERT(large != NULL && small != NULL);
    if (large == NULL || small == NULL) {
        return;
    }
    CU_ASSERT_EQUAL((uintptr_t)large % 64 + (uintptr_t)small % 64, 0);
    memset(large, 1, 5 << 20);
    memset(small, 1, 1000);
    sy_buffers_give(buffers, large);
    sy_buffers_give(buffers, small);
    CU_ASSERT(sy_buffers_idle_bytes(buffers) >= (5 << 20) + 1000);
    CU_ASSERT_PTR_EQUAL(sy_buffers_take(buffers, 1000), small); /* Not the large one. */
    uint8_t *other = sy_buffers_take(buffers, 1 << 20);
    CU_ASSERT_PTR_NOT_EQUAL(other, large); /* Most of it would be wasted. */
    CU_ASSERT_PTR_EQUAL(sy_buffers_take(buffers, (5 << 20) - 4096), large);
    CU_ASSERT_EQUAL(sy_buffers_idle_bytes(buffers), 0);
    sy_buffers_give(buffers, large);
    sy_buffers_give(buffers, small);
    sy_buffers_give(buffers, other);
    sy_buffers_give(buffers, NULL);
    sy_buffers_trim(buffers, dl_now_ns());
    CU_ASSERT(sy_buffers_idle_bytes(buffers) > 0);
    sy_buffers_trim(buffers, dl_now_ns() + SY_BUFFERS_IDLE_NS);
    CU_ASSERT_EQUAL(sy_buffers_idle_bytes(buffers), 0);
    /* More are given back than are kept. */
    void *many[SY_BUFFERS_KEPT_MAX + 3];
    for (size_t i = 0; i < DL_COUNT_OF(many); i++) {
        many[i] = sy_buffers_take(buffers, 64);
        CU_ASSERT_PTR_NOT_NULL_FATAL(many[i]);
    }
    for (size_t i = 0; i < DL_COUNT_OF(many); i++) {
        sy_buffers_give(buffers, many[i]);
    }
    CU_ASSERT(sy_buffers_idle_bytes(buffers) >= SY_BUFFERS_KEPT_MAX * 64);
    CU_ASSERT(sy_buffers_idle_bytes(buffers) <= SY_BUFFERS_KEPT_MAX * 128);
    sy_buffers_free(buffers);
}

/* What a first state took does not lie idle beside the pushes of rounds, which are smaller. */
static void test_buffers_never_hold_more_than_was_used(void)
{
    struct sy_buffers *buffers = sy_buffers_new();
    CU_ASSERT_PTR_NOT_NULL_FATAL(buffers);
    uint64_t most = 8 << 20;
    uint8_t *pushes[4];
    sy_buffers_give(buffers, sy_buffers_take(buffers, most));
    CU_ASSERT(sy_buffers_idle_bytes(buffers) >= most);
    for (uint64_t i = 0; i < DL_COUNT_OF(pushes); i++) {
        pushes[i] = sy_buffers_take(buffers, 2 << 20);
        CU_ASSERT_PTR_NOT_NULL_FATAL(pushes[i]);
        CU_ASSERT(sy_buffers_idle_bytes(buffers) + (i + 1) * (2 << 20) <= most + (1 << 20));
    }
    for (uint64_t i = 0; i < DL_COUNT_OF(pushes); i++) {
        sy_buffers_give(buffers, pushes[i]);
    }
    CU_ASSERT(sy_buffers_idle_bytes(buffers) >= most);
    CU_ASSERT_PTR_EQUAL(sy_buffers_take(buffers, 2 << 20), pushes[0]);
    sy_buffers_give(buffers, pushes[0]);
    sy_buffers_free(buffers);
}

/* --- turns of the network loop -------------------------------------------------------------------------------------- */

/* Each send takes a millisecond; returns how many of the connections sent in a turn. */
static uint32_t run_turn(struct sy_turn *turn, uint64_t last[], uint32_t sent[], uint32_t count, int64_t *now_ns)
{
    uint32_t sends = 0;
    sy_turn_begin(turn);
    for (uint32_t i = 0; i < count; i++) {
        if (sy_turn_may_send(turn, &last[i], *now_ns)) {
            *now_ns += 1000000;
            sent[i]++;
            sends++;
        }
    }
    return sends;
}

static void test_turns_are_short_and_fair(void)
{
    enum { many = 64 };
    struct sy_turn turn = {0};
    uint64_t last[many] = {0};
    uint32_t sent[many] = {0};
    int64_t now_ns = 1;
    uint32_t turns = 0;
    for (uint32_t sends = 0; sends < 10 * many; turns++) {
        uint32_t now = run_turn(&turn, last, sent, many, &now_ns);
        CU_ASSERT(now <= SY_TURN_NS / 1000000);
        sends += now;
        CU_ASSERT_FATAL(turns < 1000);
    }
    for (uint32_t i = 0; i < many; i++) {
        CU_ASSERT(sent[i] >= 9 && sent[i] <= 11);
    }
    CU_ASSERT(turns <= 2 * 10 * many / 4); /* Hardly any turn goes by without a send. */
    /* A few have all of it, every turn; and one that was away does not wait. */
    struct sy_turn calm = {0};
    uint64_t few[3] = {0};
    uint32_t of_few[3] = {0};
    for (uint32_t i = 0; i < 10; i++) {
        CU_ASSERT_EQUAL(run_turn(&calm, few, of_few, i < 5 ? 2 : 3, &now_ns), i < 5 ? 2 : 3);
    }
    CU_ASSERT_EQUAL(of_few[0], 10);
    CU_ASSERT_EQUAL(of_few[2], 5);
}

/* However long it is until somebody asks: the first one of a turn that is allowed to sends. */
static void test_every_turn_gets_on(void)
{
    struct sy_turn turn = {0};
    uint64_t last = 0;
    for (uint32_t i = 1; i < 10; i++) {
        sy_turn_begin(&turn);
        CU_ASSERT(sy_turn_may_send(&turn, &last, i * 100 * SY_TURN_NS));
        CU_ASSERT_FALSE(sy_turn_may_send(&turn, &last, i * 100 * SY_TURN_NS + SY_TURN_NS));
    }
}

UNIT_MAIN("server: loop", {"turns are short and fair", test_turns_are_short_and_fair},
          {"every turn gets on", test_every_turn_gets_on}, {"buffers are used again", test_buffers_are_used_again},
          {"buffers never hold more than was used", test_buffers_never_hold_more_than_was_used},
          {"buffers of all sizes", test_buffers_of_all_sizes}, {"listens where asked", test_listens_where_asked},
          {"wrong addresses", test_wrong_addresses}, {"port file", test_port_file})
