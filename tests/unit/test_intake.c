/* Threads that receive the data of chunks for the network thread: what they take, what they leave, and that a loan can be had
 * back at any moment. The test's thread is the network thread. */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/rng.h"
#include "syncer/server/intake.h"
#include "tests/unit/unit.h"

#define DATA_BYTES (300u << 10)
#define HEAD_BYTES (DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES)
#define FRAME_BYTES_MAX (DL_WS_HEAD_MAX + HEAD_BYTES + DATA_BYTES)
#define WAIT_MS 20000

static const uint8_t key[4] = {0x5a, 0x01, 0xc3, 0x77};

struct end { /* A connection: what the peer writes to, and the loan of the receiving end. */
    int peer, fd;
    struct dl_ws_parser parser;
    struct sy_receive receive;
    struct sy_loan loan;
    uint8_t *place; /* Of the chunk's data. */
    uint32_t begun, ended, intact;
};

static enum dl_rc on_admit(void *context, enum dl_wire_type type, struct dl_err *err)
{
    (void)context;
    (void)err;
    return type == DL_WIRE_CHUNK ? DL_OK : DL_EPROTO;
}

static enum dl_rc on_begin(void *context, uint64_t transfer, uint64_t offset, uint32_t bytes, uint8_t **into,
                           struct dl_err *err)
{
    struct end *end = context;
    (void)transfer;
    (void)offset;
    (void)err;
    CU_ASSERT_EQUAL(bytes, DATA_BYTES);
    end->begun++;
    *into = end->place;
    return DL_OK;
}

static enum dl_rc on_end(void *context, uint64_t transfer, const uint8_t *data, uint32_t bytes, bool intact,
                         struct dl_err *err)
{
    struct end *end = context;
    (void)transfer;
    (void)bytes;
    (void)err;
    end->ended++;
    end->intact += data != NULL && intact ? 1 : 0;
    return DL_OK;
}

/* Frame of a chunk as a learner sends it, masked; returns its size. */
static size_t make_frame(uint64_t seed, uint8_t *out)
{
    size_t payload = HEAD_BYTES + DATA_BYTES, head = dl_ws_head(DL_WS_BINARY, payload, key, out);
    uint8_t *message = out + head;
    for (size_t i = 0; i < DATA_BYTES; i++) {
        message[HEAD_BYTES + i] = (uint8_t)(seed * 31 + i * 7 + i / 251);
    }
    dl_wire_chunk_head(1, seed * DATA_BYTES, message + HEAD_BYTES, DATA_BYTES, message);
    dl_ws_mask(message, message, payload, key, 0);
    return head + payload;
}

static bool has_data_of(const struct end *end, uint64_t seed)
{
    for (size_t i = 0; i < DATA_BYTES; i++) {
        if (end->place[i] != (uint8_t)(seed * 31 + i * 7 + i / 251)) {
            return false;
        }
    }
    return true;
}

static void open_end(struct end *end)
{
    int fds[2];
    memset(end, 0, sizeof *end);
    CU_ASSERT_EQUAL_FATAL(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
    end->peer = fds[0];
    end->fd = fds[1];
    CU_ASSERT_EQUAL_FATAL(fcntl(end->fd, F_SETFL, O_NONBLOCK), 0);
    end->parser = (struct dl_ws_parser){.message_max = FRAME_BYTES_MAX, .from_client = true};
    sy_receive_init(&end->receive);
    end->loan.fd = end->fd;
    end->loan.parser = &end->parser;
    end->loan.receive = &end->receive;
    end->loan.owner = end;
    end->place = dl_alloc_aligned(DATA_BYTES);
    CU_ASSERT_PTR_NOT_NULL_FATAL(end->place);
}

static void close_end(struct end *end)
{
    close(end->peer);
    close(end->fd);
    sy_receive_release(&end->receive);
    free(end->place);
}

/* What the network thread does with bytes that have no place of their own. */
static void take_frames(struct end *end, uint8_t *bytes, size_t size)
{
    static struct dl_wire_message scratch;
    const struct sy_receive_sink sink = {
        .context = end, .admit = on_admit, .chunk_begin = on_begin, .chunk_end = on_end};
    for (;;) {
        struct dl_err err;
        uint8_t *data = NULL;
        size_t used = 0, data_bytes = 0;
        enum dl_ws_event event = dl_ws_parse(&end->parser, bytes, size, &used, &data, &data_bytes, &err);
        if (event == DL_WS_EVENT_DATA) {
            CU_ASSERT_EQUAL(sy_receive_feed(&end->receive, &sink, &scratch, data, data_bytes, false, &err), DL_OK);
        } else if (event == DL_WS_EVENT_END) {
            CU_ASSERT_EQUAL(sy_receive_feed(&end->receive, &sink, &scratch, bytes, 0, true, &err), DL_OK);
        } else {
            CU_ASSERT_EQUAL(event, DL_WS_EVENT_MORE);
            return;
        }
        bytes += used;
        size -= used;
    }
}

/* Reads `bytes` of what the peer wrote, as the network thread. */
static void read_home(struct end *end, size_t bytes)
{
    uint8_t copy[256];
    CU_ASSERT_FATAL(bytes <= sizeof copy);
    CU_ASSERT_EQUAL_FATAL(recv(end->fd, copy, bytes, MSG_WAITALL), (ssize_t)bytes);
    take_frames(end, copy, bytes);
}

static void write_all(int fd, const uint8_t *bytes, size_t size)
{
    while (size > 0) {
        ssize_t written = write(fd, bytes, size);
        CU_ASSERT_FATAL(written > 0);
        bytes += written;
        size -= (size_t)written;
    }
}

static struct sy_loan *wait_for_one(struct sy_intake *intake)
{
    struct pollfd poll_fd = {.fd = sy_intake_fd(intake), .events = POLLIN};
    CU_ASSERT_EQUAL_FATAL(poll(&poll_fd, 1, WAIT_MS), 1);
    struct sy_loan *loan = sy_intake_take(intake);
    CU_ASSERT_PTR_NOT_NULL_FATAL(loan);
    return loan;
}

static bool is_signalled(const struct sy_intake *intake)
{
    struct pollfd poll_fd = {.fd = sy_intake_fd(intake), .events = POLLIN};
    return poll(&poll_fd, 1, 0) == 1;
}

static struct sy_intake *start(uint32_t threads)
{
    struct sy_intake *intake = NULL;
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(sy_intake_new(threads, &intake, &err), DL_OK);
    return intake;
}

/* The first receiver is the network thread itself: that one's turn is used up. */
static void use_up_home(struct sy_intake *intake, struct end *home, uint8_t *frame)
{
    size_t size = make_frame(0, frame);
    open_end(home);
    write_all(home->peer, frame, DL_WS_HEAD_MAX + HEAD_BYTES + 10);
    read_home(home, DL_WS_HEAD_MAX + HEAD_BYTES + 10);
    CU_ASSERT(size > SY_LOAN_BYTES_MIN);
    CU_ASSERT_FALSE(sy_intake_lend(intake, &home->loan));
    CU_ASSERT_EQUAL(home->loan.hand, 1);
}

/* The data come away; what follows them comes back untouched. */
static void test_data_away_heads_at_home(void)
{
    struct sy_intake *intake = start(1);
    static uint8_t frames[2 * FRAME_BYTES_MAX];
    struct end home, end;
    use_up_home(intake, &home, frames);
    open_end(&end);
    size_t first = make_frame(1, frames), second = make_frame(2, frames + first);
    int size = 4 << 20;
    CU_ASSERT_EQUAL(setsockopt(end.peer, SOL_SOCKET, SO_SNDBUF, &size, sizeof size), 0);
    write_all(end.peer, frames, 100);
    CU_ASSERT_FALSE(sy_intake_lend(intake, &end.loan)); /* Not even a head: nothing that has a place comes next. */
    read_home(&end, 100);
    CU_ASSERT_EQUAL(end.begun, 1);
    CU_ASSERT_TRUE_FATAL(sy_intake_lend(intake, &end.loan));
    CU_ASSERT_EQUAL(end.loan.where, SY_LOAN_AWAY);
    CU_ASSERT_PTR_NULL(sy_intake_take(intake));
    CU_ASSERT_FALSE(is_signalled(intake));
    /* The socket holds less than that: the thread reads meanwhile. */
    write_all(end.peer, frames + 100, first - 100 + 60);
    CU_ASSERT_PTR_EQUAL(wait_for_one(intake), &end.loan);
    CU_ASSERT_FALSE(is_signalled(intake));
    CU_ASSERT_EQUAL(end.loan.where, SY_LOAN_HOME);
    CU_ASSERT_EQUAL(end.loan.rc, DL_OK);
    CU_ASSERT(has_data_of(&end, 1));
    CU_ASSERT_EQUAL(end.ended, 0); /* Is the network thread's to say. */
    CU_ASSERT(end.loan.beside_bytes <= 60);
    CU_ASSERT_EQUAL(atomic_load(&end.loan.bytes), first - 100 + end.loan.beside_bytes);
    take_frames(&end, end.loan.beside, end.loan.beside_bytes);
    if (end.loan.beside_bytes < 60) {
        read_home(&end, 60 - end.loan.beside_bytes);
    }
    CU_ASSERT_EQUAL(end.ended, 1);
    CU_ASSERT_EQUAL(end.intact, 1);
    CU_ASSERT_EQUAL(end.begun, 2);
    CU_ASSERT_TRUE_FATAL(sy_intake_lend(intake, &end.loan));
    write_all(end.peer, frames + first + 60, second - 60);
    CU_ASSERT_PTR_EQUAL(wait_for_one(intake), &end.loan);
    CU_ASSERT_EQUAL(end.loan.beside_bytes, 0);
    take_frames(&end, end.loan.beside, 0);
    CU_ASSERT(has_data_of(&end, 2));
    CU_ASSERT_EQUAL(end.intact, 2);
    sy_intake_forget(intake, &end.loan);
    sy_intake_forget(intake, &home.loan);
    sy_intake_free(intake);
    close_end(&end);
    close_end(&home);
}

/* A peer that goes in the middle of the data. */
static void test_a_broken_connection_comes_back(void)
{
    struct sy_intake *intake = start(1);
    static uint8_t frame[FRAME_BYTES_MAX];
    struct end home, end;
    use_up_home(intake, &home, frame);
    open_end(&end);
    make_frame(3, frame);
    write_all(end.peer, frame, 100);
    read_home(&end, 100);
    CU_ASSERT_TRUE_FATAL(sy_intake_lend(intake, &end.loan));
    write_all(end.peer, frame + 100, 5000);
    CU_ASSERT_EQUAL(shutdown(end.peer, SHUT_WR), 0);
    CU_ASSERT_PTR_EQUAL(wait_for_one(intake), &end.loan);
    CU_ASSERT_EQUAL(end.loan.rc, DL_ENET);
    CU_ASSERT_EQUAL(atomic_load(&end.loan.bytes), 5000);
    sy_intake_forget(intake, &end.loan);
    CU_ASSERT_EQUAL(end.loan.hand, 0);
    sy_intake_forget(intake, &home.loan);
    sy_intake_free(intake);
    close_end(&end);
    close_end(&home);
}

/* Evenly, and whoever ends makes room. */
static void test_receivers_take_turns(void)
{
    enum { ends = 9 };
    struct sy_intake *intake = start(2);
    static uint8_t frame[FRAME_BYTES_MAX];
    static struct end all[ends];
    uint32_t of_hand[4] = {0};
    make_frame(4, frame);
    for (int i = 0; i < ends; i++) {
        open_end(&all[i]);
        write_all(all[i].peer, frame, 100);
        read_home(&all[i], 100);
        bool away = sy_intake_lend(intake, &all[i].loan);
        CU_ASSERT_FATAL(all[i].loan.hand >= 1 && all[i].loan.hand <= 3);
        CU_ASSERT_EQUAL(away, all[i].loan.hand > 1);
        of_hand[all[i].loan.hand]++;
    }
    CU_ASSERT_EQUAL(of_hand[1], 3);
    CU_ASSERT_EQUAL(of_hand[2], 3);
    CU_ASSERT_EQUAL(of_hand[3], 3);
    uint32_t left = all[4].loan.hand;
    sy_intake_forget(intake, &all[4].loan);
    CU_ASSERT_EQUAL(all[4].loan.where, SY_LOAN_HOME);
    CU_ASSERT_EQUAL(sy_intake_lend(intake, &all[4].loan), left > 1);
    CU_ASSERT_EQUAL(all[4].loan.hand, left);
    /* With the threads ended, what was away has come back. */
    sy_intake_stop(intake);
    for (int i = 0; i < ends; i++) {
        CU_ASSERT(all[i].loan.where != SY_LOAN_AWAY);
        sy_intake_forget(intake, &all[i].loan);
        CU_ASSERT_EQUAL(all[i].loan.where, SY_LOAN_HOME);
        close_end(&all[i]);
    }
    CU_ASSERT_PTR_NULL(sy_intake_take(intake));
    sy_intake_free(intake);
}

struct writer {
    int fd;
    const uint8_t *frame;
    size_t size;
    uint64_t seed;
};

/* In pieces of any size, so that the thread often waits. */
static void *write_in_pieces(void *argument)
{
    const struct writer *writer = argument;
    struct dl_rng rng = {0};
    dl_rng_init(&rng, writer->seed, 0);
    for (size_t at = 0; at < writer->size;) {
        size_t piece = 1 + (size_t)dl_rng_below(&rng, 40000);
        ssize_t written = write(writer->fd, writer->frame + at, DL_MIN(piece, writer->size - at));
        if (written <= 0) {
            abort();
        }
        at += (size_t)written;
    }
    return NULL;
}

/* Whenever it is recalled: nothing is written to the chunk's place afterwards, and it goes on from there, at home or away. */
static void test_recalled_at_any_moment(void)
{
    struct sy_intake *intake = start(1);
    static uint8_t frame[FRAME_BYTES_MAX];
    struct end home;
    uint32_t lent = 0;
    use_up_home(intake, &home, frame);
    for (uint64_t seed = 10; seed < 60; seed++) {
        struct end end;
        struct dl_rng rng = {0};
        dl_rng_init(&rng, seed, 1);
        open_end(&end);
        size_t size = make_frame(seed, frame);
        struct writer writer = {end.peer, frame, size, seed};
        pthread_t thread;
        CU_ASSERT_EQUAL_FATAL(pthread_create(&thread, NULL, write_in_pieces, &writer), 0);
        int64_t until_ns = dl_now_ns() + WAIT_MS * DL_NS_PER_MS;
        while (end.ended == 0 && dl_now_ns() < until_ns) {
            uint8_t copy[700];
            ssize_t got = recv(end.fd, copy, 1 + (size_t)dl_rng_below(&rng, sizeof copy), 0);
            if (got > 0) {
                take_frames(&end, copy, (size_t)got);
            }
            if (!sy_intake_lend(intake, &end.loan)) {
                continue;
            }
            lent++;
            for (uint64_t spin = dl_rng_below(&rng, 3000); spin > 0; spin--) {
                (void)is_signalled(intake);
                if (spin % 64 == 0 && atomic_load(&end.loan.bytes) > DATA_BYTES / 3) {
                    break;
                }
            }
            sy_intake_recall(intake, &end.loan);
            CU_ASSERT(end.loan.where != SY_LOAN_AWAY);
            uint64_t bytes = atomic_load(&end.loan.bytes);
            CU_ASSERT_PTR_EQUAL(sy_intake_take(intake), &end.loan);
            CU_ASSERT_EQUAL(atomic_load(&end.loan.bytes), bytes);
            take_frames(&end, end.loan.beside, end.loan.beside_bytes);
            end.loan.beside_bytes = 0;
        }
        CU_ASSERT_EQUAL(end.intact, 1);
        CU_ASSERT(has_data_of(&end, seed));
        pthread_join(thread, NULL);
        sy_intake_forget(intake, &end.loan);
        close_end(&end);
    }
    CU_ASSERT(lent >= 50);
    sy_intake_forget(intake, &home.loan);
    sy_intake_free(intake);
    close_end(&home);
}

UNIT_MAIN("intake", {"data come away, heads at home", test_data_away_heads_at_home},
          {"a broken connection comes back", test_a_broken_connection_comes_back},
          {"receivers take turns", test_receivers_take_turns},
          {"a loan is recalled at any moment", test_recalled_at_any_moment})
