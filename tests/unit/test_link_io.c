/* The library when the operating system is unkind: reads and writes of a few bytes, and each call failing in its turn.
 *
 * sendmsg, readv, socket and connect are defined here and so take the place of the C library's. Only the library's
 * sockets, which are non-blocking, are meddled with; the scripted syncer's are not. */
#include <errno.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include "common/clock.h"
#include "common/rng.h"
#include "tests/unit/fake_syncer.h"
#include "tests/unit/unit.h"
#include "worker/link/diloco.h"

#define CHUNK_AT_LEAST 20000 /* Bytes in one call; no message is as large. */
#define STALL_AFTER 1000     /* Bytes: in the middle of its data. */
#define PATIENCE_NS (60 * DL_NS_PER_SECOND)

enum call { CALL_SEND, CALL_READV, CALL_SOCKET, CALL_CONNECT, CALLS };

static struct {
    size_t most;    /* Bytes a call moves at most; 0: no limit. */
    enum call call; /* Which one fails, ... */
    int countdown;  /* ... when this reaches 0; negative: none. */
    int error;
    int injected;
    bool stall;  /* A chunk gets no further than its first bytes, .. */
    int stalled; /* .. which has happened so often. */
} plan = {.countdown = -1};
static pthread_mutex_t plan_lock = PTHREAD_MUTEX_INITIALIZER;
static struct dl_rng plan_rng;

/* True when this call fails: errno is set. Else `*most` is what it may move. */
static bool meddle(enum call call, int fd, size_t *most)
{
    *most = SIZE_MAX;
    if (fd >= 0 && (fcntl(fd, F_GETFL) & O_NONBLOCK) == 0) {
        return false;
    }
    pthread_mutex_lock(&plan_lock);
    bool fails = plan.countdown >= 0 && plan.call == call && plan.countdown-- == 0;
    if (fails) {
        plan.injected++;
        errno = plan.error;
    } else if (plan.most > 0) {
        *most = 1 + (size_t)dl_rng_below(&plan_rng, plan.most);
    }
    pthread_mutex_unlock(&plan_lock);
    return fails;
}

static bool stalls(int fd, const struct msghdr *message, size_t *most)
{
    size_t size = 0;
    for (size_t i = 0; i < message->msg_iovlen; i++) {
        size += message->msg_iov[i].iov_len;
    }
    if (size < CHUNK_AT_LEAST || (fcntl(fd, F_GETFL) & O_NONBLOCK) == 0) {
        return false;
    }
    pthread_mutex_lock(&plan_lock);
    bool stall = plan.stall;
    int before = stall ? plan.stalled++ : 0;
    pthread_mutex_unlock(&plan_lock);
    if (stall && before == 0) {
        *most = STALL_AFTER;
        return false;
    }
    errno = EAGAIN;
    return stall;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    size_t most;
    if (meddle(CALL_SEND, fd, &most) || stalls(fd, message, &most)) {
        return -1;
    }
    if (most == SIZE_MAX) {
        return syscall(SYS_sendmsg, fd, message, flags);
    }
    struct iovec some[2];
    struct msghdr less = {.msg_iov = some};
    for (size_t i = 0; i < message->msg_iovlen && most > 0; i++) {
        some[i] = message->msg_iov[i];
        some[i].iov_len = DL_MIN(some[i].iov_len, most);
        most -= some[i].iov_len;
        less.msg_iovlen++;
    }
    return syscall(SYS_sendmsg, fd, &less, flags);
}

ssize_t readv(int fd, const struct iovec *parts, int count)
{
    size_t most;
    if (meddle(CALL_READV, fd, &most)) {
        return -1;
    }
    struct iovec first = parts[0];
    if (most == SIZE_MAX) {
        return syscall(SYS_readv, fd, parts, count);
    }
    first.iov_len = DL_MIN(first.iov_len, most);
    return syscall(SYS_readv, fd, &first, 1);
}

int socket(int family, int type, int protocol)
{
    size_t most;
    if ((type & SOCK_NONBLOCK) != 0 && meddle(CALL_SOCKET, -1, &most)) {
        return -1;
    }
    return (int)syscall(SYS_socket, family, type, protocol);
}

int connect(int fd, const struct sockaddr *address, socklen_t size)
{
    size_t most;
    if (meddle(CALL_CONNECT, fd, &most)) {
        return -1;
    }
    return (int)syscall(SYS_connect, fd, address, size);
}

/* --- training ------------------------------------------------------------------------------------------------------- */

enum { ROWS = 60, COLUMNS = 700, ELEMENTS = ROWS * COLUMNS };
static float values[ELEMENTS];

static struct diloco *join(struct fake_syncer *syncer)
{
    memset(values, 0, sizeof values);
    char endpoint[64];
    snprintf(endpoint, sizeof endpoint, "ws://127.0.0.1:%u", syncer->port);
    struct diloco_options options = {
        .struct_size = sizeof options, .job = "demo", .endpoints = endpoint, .learner = 0, .join_timeout_seconds = 60};
    struct diloco *d = NULL;
    struct diloco_error error = {0};
    static const uint64_t shape[2] = {ROWS, COLUMNS};
    CU_ASSERT_EQUAL_FATAL(diloco_open(&options, &d, &error), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL_FATAL(diloco_register(d, "w", values, 2, shape, DILOCO_WEIGHT, 0, &error), DILOCO_CONTINUE);
    CU_ASSERT_EQUAL_FATAL(diloco_join(d, NULL, &error), DILOCO_CONTINUE);
    return d;
}

static void train(struct diloco *d, struct diloco_info *info)
{
    struct diloco_error error = {0};
    for (int i = 0; i < ELEMENTS; i++) {
        values[i] += 1.0f;
    }
    CU_ASSERT_EQUAL_FATAL(diloco_step(d, 1, 0, info, &error), DILOCO_CONTINUE);
}

/* Trains until `pushes` were merged; then Theta is the first state plus the steps merged, or something was lost or
 * doubled. */
static void run(uint64_t pushes)
{
    struct fake_syncer *syncer = fake_new(2);
    syncer->interval = 1;
    fake_listen(syncer);
    struct diloco *d = join(syncer);
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    uint64_t merged = 0;
    while (merged < pushes) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        train(d, NULL);
        fake_breathe(syncer);
        merged = fake_peek(syncer, &syncer->pushes_merged);
    }
    diloco_close(d);
    pthread_mutex_lock(&syncer->lock);
    uint64_t in_theta = 0;
    for (uint32_t p = 0; p < 2; p++) {
        in_theta += (uint64_t)syncer->theta[p][0];
        CU_ASSERT_EQUAL(syncer->theta[p][0], syncer->theta[p][syncer->layout->fragments[p].elements - 1]);
    }
    CU_ASSERT_EQUAL(in_theta, syncer->steps_merged);
    CU_ASSERT(syncer->chunks_plain > 0); /* Only what is a learner's own goes out under a mask of zeros. */
    CU_ASSERT_EQUAL(syncer->others_plain, 0);
    pthread_mutex_unlock(&syncer->lock);
    fake_free(syncer);
}

static void test_a_few_bytes_a_call(void)
{
    static const size_t limits[] = {2000, 37};
    for (size_t i = 0; i < DL_COUNT_OF(limits); i++) {
        dl_rng_init(&plan_rng, i, dl_rng_stream("io", 0, 0));
        plan.most = limits[i];
        run(i == 0 ? 4 : 1);
        plan.most = 0;
    }
}

/* The n-th call fails, for n from the first on: the library starts over and gets there. */
static void fail_in_turn(enum call call, int error, int last)
{
    for (int n = 0; n <= last; n += n < 6 ? 1 : 3) {
        pthread_mutex_lock(&plan_lock);
        plan.call = call;
        plan.error = error;
        plan.injected = 0;
        plan.countdown = n;
        pthread_mutex_unlock(&plan_lock);
        run(8);
        pthread_mutex_lock(&plan_lock);
        CU_ASSERT_EQUAL(plan.injected, 1); /* It really happened. */
        plan.countdown = -1;
        pthread_mutex_unlock(&plan_lock);
    }
}

static void test_every_send_fails_in_turn(void)
{
    fail_in_turn(CALL_SEND, ECONNRESET, 18);
}

static void test_every_receive_fails_in_turn(void)
{
    fail_in_turn(CALL_READV, ECONNRESET, 18);
}

static void test_interrupted_calls_are_tried_again(void)
{
    fail_in_turn(CALL_SEND, EINTR, 6);
    fail_in_turn(CALL_READV, EINTR, 6);
}

static void test_no_socket_and_no_connection(void)
{
    fail_in_turn(CALL_SOCKET, EMFILE, 0);
    fail_in_turn(CALL_CONNECT, ENETUNREACH, 0);
}

/* Returns how many bytes the PULL takes with its frame. */
static uint64_t ask(struct fake_syncer *syncer)
{
    pthread_mutex_lock(&syncer->lock);
    uint64_t before = syncer->bytes_out;
    CU_ASSERT_TRUE(fake_pull(&syncer->conns[0], 0, 0));
    uint64_t bytes = syncer->bytes_out - before;
    pthread_mutex_unlock(&syncer->lock);
    return bytes;
}

static int stalled(void)
{
    pthread_mutex_lock(&plan_lock);
    int count = plan.stalled;
    pthread_mutex_unlock(&plan_lock);
    return count;
}

static void set_stall(bool stall)
{
    pthread_mutex_lock(&plan_lock);
    plan.stall = stall;
    plan.stalled = 0;
    pthread_mutex_unlock(&plan_lock);
}

/* A socket takes no more in the middle of a chunk, whose fragment is then asked for anew. The boundary takes the next snapshot to
 * the memory that is being sent, without waiting for the socket; what was begun still arrives as it was. */
static void test_no_boundary_waits_for_a_socket(void)
{
    struct fake_syncer *syncer = fake_new(2);
    struct diloco_info info = {0};
    syncer->interval = 0; /* Only the test pulls. */
    fake_listen(syncer);
    struct diloco *d = join(syncer);
    int64_t give_up_ns = dl_now_ns() + PATIENCE_NS;
    set_stall(true);
    (void)ask(syncer);
    while (stalled() == 0 || fake_peek(syncer, &syncer->last_push.round) < syncer->next_round) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        train(d, &info);
        fake_breathe(syncer);
    }
    train(d, &info);
    uint64_t first_steps = syncer->last_push.steps, heard = info.bytes_received;
    heard += ask(syncer);
    while (info.bytes_received < heard) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        fake_breathe(syncer);
        train(d, &info);
    }
    train(d, &info); /* Answers it at the latest. */
    uint64_t answered_by = info.step;
    CU_ASSERT_EQUAL(fake_peek(syncer, &syncer->pushes_merged), 0); /* It was stuck all the time. */
    set_stall(false);
    while (fake_peek(syncer, &syncer->last_push.round) < syncer->next_round) {
        CU_ASSERT_FATAL(dl_now_ns() < give_up_ns);
        train(d, &info);
        fake_breathe(syncer);
    }
    diloco_close(d);
    pthread_mutex_lock(&syncer->lock);
    CU_ASSERT_EQUAL(syncer->pushes_merged, 1);
    CU_ASSERT(syncer->last_push.step <= answered_by);
    CU_ASSERT(syncer->last_push.steps > first_steps);
    for (uint64_t i = 0; i < syncer->layout->fragments[0].elements; i++) {
        CU_ASSERT_FATAL(syncer->theta[0][i] == (float)first_steps);
    }
    CU_ASSERT_EQUAL(syncer->hellos, 1);
    pthread_mutex_unlock(&syncer->lock);
    fake_free(syncer);
}

UNIT_MAIN("link_io", {"a few bytes a call", test_a_few_bytes_a_call}, {"send fails", test_every_send_fails_in_turn},
          {"receive fails", test_every_receive_fails_in_turn}, {"interrupted", test_interrupted_calls_are_tried_again},
          {"T2 no boundary waits for a socket", test_no_boundary_waits_for_a_socket},
          {"no socket", test_no_socket_and_no_connection})
