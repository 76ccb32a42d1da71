/* Parts of operator/kube that need no server: loop, map, path, queue, and the probes' own small server. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include "common/clock.h"
#include "common/mem.h"
#include "common/rng.h"
#include "operator/kube/loop.h"
#include "operator/kube/map.h"
#include "operator/kube/path.h"
#include "operator/kube/queue.h"
#include "operator/kube/reconcile_metrics.h"
#include "operator/kube/serve.h"
#include "tests/unit/unit.h"

/* --- loop --- */

#define TIMERS 400

static struct {
    struct op_loop *loop;
    struct op_timer timers[TIMERS];
    int64_t last_due_ns;
    int fired;
} clocks;

static void on_fire(void *context, int64_t now_ns)
{
    struct op_timer *timer = context;
    CU_ASSERT(timer->due_ns <= now_ns);
    CU_ASSERT(timer->due_ns >= clocks.last_due_ns);
    clocks.last_due_ns = timer->due_ns;
    clocks.fired++;
}

static void test_timers_fire_in_order(void)
{
    struct dl_rng rng;
    dl_rng_init(&rng, 1, 2);
    memset(&clocks, 0, sizeof clocks);
    CU_ASSERT_EQUAL_FATAL(op_loop_new(&clocks.loop, NULL), DL_OK);
    int64_t base_ns = op_loop_now_ns(clocks.loop);
    for (int round = 0; round < 5; round++) { /* Started, moved, stopped at random. */
        for (size_t i = 0; i < TIMERS; i++) {
            struct op_timer *timer = &clocks.timers[i];
            timer->fire = on_fire;
            timer->context = timer;
            if (dl_rng_below(&rng, 4) == 0) {
                op_timer_stop(clocks.loop, timer);
            } else {
                op_timer_start(clocks.loop, timer, base_ns + (int64_t)dl_rng_below(&rng, 30000000));
            }
        }
    }
    int running = 0;
    for (size_t i = 0; i < TIMERS; i++) {
        running += clocks.timers[i].is_running;
    }
    CU_ASSERT(running > TIMERS / 2);
    while (dl_now_ns() < base_ns + 40 * DL_NS_PER_MS || clocks.fired < running) {
        op_loop_turn(clocks.loop, 1);
    }
    CU_ASSERT_EQUAL(clocks.fired, running);
    op_loop_free(clocks.loop);
}

static void on_again(void *context, int64_t now_ns)
{
    clocks.fired++;
    op_timer_start(clocks.loop, context, now_ns);
}

/* A timer that starts itself again at once does not hold up the turn. */
static void test_timer_that_starts_itself(void)
{
    memset(&clocks, 0, sizeof clocks);
    CU_ASSERT_EQUAL_FATAL(op_loop_new(&clocks.loop, NULL), DL_OK);
    struct op_timer timer = {.fire = on_again, .context = &timer};
    op_timer_start(clocks.loop, &timer, 0);
    for (int i = 1; i <= 10; i++) {
        op_loop_turn(clocks.loop, 1000);
        CU_ASSERT_EQUAL(clocks.fired, i);
    }
    op_timer_stop(clocks.loop, &timer);
    op_timer_stop(clocks.loop, &timer);
    op_loop_free(clocks.loop);
}

struct reader {
    struct op_loop *loop;
    struct op_fd fd, *other;
    int calls;
};

static void on_readable(void *context, short revents, int64_t now_ns)
{
    struct reader *reader = context;
    char bytes[16];
    (void)now_ns;
    CU_ASSERT(revents & POLLIN);
    CU_ASSERT(read(reader->fd.fd, bytes, sizeof bytes) > 0);
    reader->calls++;
    if (reader->other != NULL) {
        op_fd_remove(reader->loop, reader->other); /* Ready in the same turn, and not called any more. */
    }
}

static void test_descriptors(void)
{
    int pipes[2][2];
    struct op_loop *loop = NULL;
    struct reader readers[2] = {{.calls = 0}};
    CU_ASSERT_EQUAL_FATAL(op_loop_new(&loop, NULL), DL_OK);
    for (int i = 0; i < 2; i++) {
        CU_ASSERT_EQUAL_FATAL(pipe(pipes[i]), 0);
        readers[i].loop = loop;
        readers[i].fd =
            (struct op_fd){.fd = pipes[i][0], .events = POLLIN, .ready = on_readable, .context = &readers[i]};
        CU_ASSERT_EQUAL(op_fd_add(loop, &readers[i].fd, NULL), DL_OK);
    }
    readers[0].other = &readers[1].fd;
    readers[1].other = &readers[0].fd;
    CU_ASSERT_EQUAL(write(pipes[0][1], "x", 1), 1);
    CU_ASSERT_EQUAL(write(pipes[1][1], "x", 1), 1);
    op_loop_turn(loop, 1000);
    CU_ASSERT_EQUAL(readers[0].calls + readers[1].calls, 1);
    for (int i = 0; i < 2; i++) {
        op_fd_remove(loop, &readers[i].fd);
        close(pipes[i][0]);
        close(pipes[i][1]);
    }
    struct op_fd many[OP_LOOP_FDS_MAX + 1];
    memset(many, 0, sizeof many);
    for (size_t i = 0; i < OP_LOOP_FDS_MAX; i++) {
        CU_ASSERT_EQUAL(op_fd_add(loop, &many[i], NULL), DL_OK);
    }
    CU_ASSERT_EQUAL(op_fd_add(loop, &many[OP_LOOP_FDS_MAX], NULL), DL_ENOMEM);
    for (size_t i = 0; i < OP_LOOP_FDS_MAX; i++) {
        op_fd_remove(loop, &many[i]);
    }
    int64_t start_ns = dl_now_ns();
    op_loop_stop(loop);
    op_loop_turn(loop, 1000); /* Woken at once. */
    CU_ASSERT(dl_now_ns() - start_ns < 900 * DL_NS_PER_MS);
    CU_ASSERT_TRUE(op_loop_is_stopped(loop));
    op_loop_free(loop);
}

/* --- map --- */

static void test_map(void)
{
    enum { KEYS = 2000 };
    struct op_map map = {.count = 0};
    static uintptr_t model[KEYS];
    struct dl_rng rng;
    char key[16];
    dl_rng_init(&rng, 3, 4);
    memset(model, 0, sizeof model);
    CU_ASSERT_PTR_NULL(op_map_get(&map, "x"));
    CU_ASSERT_PTR_NULL(op_map_remove(&map, "x"));
    for (uintptr_t step = 1; step < 40000; step++) {
        size_t i = (size_t)dl_rng_below(&rng, KEYS);
        snprintf(key, sizeof key, "k%zu", i);
        if (dl_rng_below(&rng, 3) == 0) {
            CU_ASSERT_EQUAL((uintptr_t)op_map_remove(&map, key), model[i]);
            model[i] = 0;
        } else {
            CU_ASSERT_EQUAL(op_map_put(&map, key, (void *)step, NULL), DL_OK);
            model[i] = step;
        }
    }
    size_t count = 0, place = 0, walked = 0;
    for (size_t i = 0; i < KEYS; i++) {
        snprintf(key, sizeof key, "k%zu", i);
        CU_ASSERT_EQUAL((uintptr_t)op_map_get(&map, key), model[i]);
        count += model[i] != 0;
    }
    const char *its_key;
    void *value;
    while (op_map_next(&map, &place, &its_key, &value)) {
        CU_ASSERT_EQUAL((uintptr_t)value, model[strtoul(its_key + 1, NULL, 10)]);
        walked++;
    }
    CU_ASSERT_EQUAL(map.count, count);
    CU_ASSERT_EQUAL(walked, count);
    op_map_release(&map);
}

/* --- path --- */

static void test_paths(void)
{
    struct op_path path;
    const char *text = NULL;
    struct dl_err err;
    op_path_init(&path);
    op_path_object(&path, &op_res_stateful_sets, "team a", "x/../y%");
    op_path_segment(&path, "status");
    op_path_query(&path, "labelSelector", "a=b,c in (d)");
    op_path_query(&path, "continue", NULL);
    op_path_query(&path, "limit", "5");
    CU_ASSERT_EQUAL(op_path_text(&path, &text, &err), DL_OK);
    CU_ASSERT_STRING_EQUAL(text, "/apis/apps/v1/namespaces/team%20a/statefulsets/x%2F..%2Fy%25/status"
                                 "?labelSelector=a%3Db%2Cc%20in%20%28d%29&limit=5");
    op_path_release(&path);

    char longest[OP_NAME_MAX + 2];
    memset(longest, 'n', sizeof longest);
    longest[OP_NAME_MAX] = 0;
    op_path_init(&path);
    op_path_object(&path, &op_res_pods, longest, longest); /* Grows; nothing is cut. */
    CU_ASSERT_EQUAL(op_path_text(&path, &text, &err), DL_OK);
    CU_ASSERT_EQUAL(strlen(text), strlen("/api/v1/namespaces//pods/") + 2 * OP_NAME_MAX);
    op_path_release(&path);
    longest[OP_NAME_MAX] = 'n';
    longest[OP_NAME_MAX + 1] = 0;

    const char *const refused[] = {"", ".", "..", longest, NULL};
    for (size_t i = 0; i < DL_COUNT_OF(refused); i++) {
        op_path_init(&path);
        op_path_object(&path, &op_res_pods, "a", refused[i]);
        CU_ASSERT_EQUAL(op_path_text(&path, &text, &err), DL_EINVAL);
        op_path_release(&path);
        op_path_init(&path);
        op_path_object(&path, &op_res_pods, refused[i], "x");
        CU_ASSERT_EQUAL(op_path_text(&path, &text, &err), DL_EINVAL);
        op_path_release(&path);
    }
    op_path_init(&path);
    op_path_collection(&path, &op_res_nodes, NULL);
    for (int i = 0; i < 2000; i++) {
        op_path_segment(&path, "again");
    }
    CU_ASSERT_EQUAL(op_path_text(&path, &text, &err), DL_EINVAL); /* Too long is refused, not cut. */
    op_path_release(&path);
}

/* --- queue --- */

#define MS DL_NS_PER_MS

static void add(struct op_queue *queue, const char *key, int64_t now_ns)
{
    CU_ASSERT_EQUAL(op_queue_add(queue, key, now_ns, NULL), DL_OK);
}

static void test_queue_keys_once(void)
{
    struct op_queue *queue = NULL;
    CU_ASSERT_EQUAL_FATAL(op_queue_new("jobs", &queue, NULL), DL_OK);
    CU_ASSERT_PTR_NULL(op_queue_take(queue, 0));
    CU_ASSERT_EQUAL(op_queue_next_ns(queue), INT64_MAX);
    add(queue, "a", 1);
    add(queue, "b", 1);
    add(queue, "a", 2);
    CU_ASSERT(op_queue_next_ns(queue) <= 2);
    const char *first = op_queue_take(queue, 3);
    CU_ASSERT_STRING_EQUAL(first, "a");
    add(queue, "a", 4); /* In work: comes again, but not at the same time. */
    CU_ASSERT_STRING_EQUAL(op_queue_take(queue, 5), "b");
    CU_ASSERT_PTR_NULL(op_queue_take(queue, 6));
    op_queue_done(queue, "a", 7);
    CU_ASSERT_STRING_EQUAL(op_queue_take(queue, 8), "a");
    op_queue_done(queue, "a", 9);
    op_queue_done(queue, "b", 9);
    CU_ASSERT_PTR_NULL(op_queue_take(queue, 10));
    op_queue_free(queue);
}

static void test_queue_later(void)
{
    struct op_queue *queue = NULL;
    CU_ASSERT_EQUAL_FATAL(op_queue_new("jobs", &queue, NULL), DL_OK);
    CU_ASSERT_EQUAL(op_queue_add_at(queue, "late", 50 * MS, 0, NULL), DL_OK);
    CU_ASSERT_EQUAL(op_queue_add_at(queue, "soon", 10 * MS, 0, NULL), DL_OK);
    CU_ASSERT_EQUAL(op_queue_add_at(queue, "late", 30 * MS, 0, NULL), DL_OK); /* The earliest counts. */
    CU_ASSERT_EQUAL(op_queue_add_at(queue, "late", 90 * MS, 0, NULL), DL_OK);
    CU_ASSERT_EQUAL(op_queue_next_ns(queue), 10 * MS);
    CU_ASSERT_PTR_NULL(op_queue_take(queue, 9 * MS));
    CU_ASSERT_STRING_EQUAL(op_queue_take(queue, 10 * MS), "soon");
    CU_ASSERT_EQUAL(op_queue_next_ns(queue), 30 * MS);
    add(queue, "late", 11 * MS); /* Now after all. */
    CU_ASSERT_STRING_EQUAL(op_queue_take(queue, 11 * MS), "late");
    CU_ASSERT_EQUAL(op_queue_next_ns(queue), INT64_MAX);
    op_queue_done(queue, "late", 12 * MS);
    CU_ASSERT_PTR_NULL(op_queue_take(queue, 100 * MS));
    op_queue_free(queue);
}

static void test_queue_backoff(void)
{
    struct op_queue *queue = NULL;
    CU_ASSERT_EQUAL_FATAL(op_queue_new("jobs", &queue, NULL), DL_OK);
    int64_t now_ns = 0, expected_ns = OP_QUEUE_BACKOFF_FIRST_NS;
    for (uint32_t failure = 0; failure < 40; failure++) {
        CU_ASSERT_EQUAL(op_queue_retry(queue, "a", now_ns, NULL), DL_OK);
        int64_t wait_ns = op_queue_next_ns(queue) - now_ns;
        CU_ASSERT(wait_ns >= expected_ns && wait_ns <= expected_ns + expected_ns / 10);
        now_ns += wait_ns;
        CU_ASSERT_STRING_EQUAL(op_queue_take(queue, now_ns), "a");
        op_queue_done(queue, "a", now_ns);
        expected_ns = DL_MIN(expected_ns * 2, OP_QUEUE_BACKOFF_MAX_NS);
    }
    CU_ASSERT_EQUAL(op_queue_retry(queue, "b", now_ns, NULL), DL_OK); /* Others are not held up. */
    CU_ASSERT(op_queue_next_ns(queue) - now_ns < 6 * MS);
    now_ns = op_queue_next_ns(queue);
    CU_ASSERT_STRING_EQUAL(op_queue_take(queue, now_ns), "b");
    op_queue_done(queue, "b", now_ns);
    op_queue_forget(queue, "a");
    CU_ASSERT_EQUAL(op_queue_retry(queue, "a", now_ns, NULL), DL_OK);
    CU_ASSERT(op_queue_next_ns(queue) - now_ns < 6 * MS); /* It begins anew. */
    op_queue_clear(queue);                                /* A standby holds nothing. */
    CU_ASSERT_EQUAL(op_queue_next_ns(queue), INT64_MAX);
    op_queue_done(queue, "a", now_ns); /* What was in work when it was cleared. */
    op_queue_free(queue);
}

/* Against a plain model: no key is lost, none is handed out twice. */
static void test_queue_at_random(void)
{
    enum { KEYS = 50 };
    struct op_queue *queue = NULL;
    struct dl_rng rng;
    bool is_wanted[KEYS] = {false}, in_work[KEYS] = {false};
    char key[8];
    dl_rng_init(&rng, 5, 6);
    CU_ASSERT_EQUAL_FATAL(op_queue_new("jobs", &queue, NULL), DL_OK);
    int64_t now_ns = 0;
    for (int step = 0; step < 50000; step++) {
        now_ns += (int64_t)dl_rng_below(&rng, MS);
        size_t i = (size_t)dl_rng_below(&rng, KEYS);
        snprintf(key, sizeof key, "%zu", i);
        const char *taken;
        switch (dl_rng_below(&rng, 4)) {
        case 0:
            add(queue, key, now_ns);
            is_wanted[i] = true;
            break;
        case 1:
            CU_ASSERT_EQUAL(op_queue_add_at(queue, key, now_ns + (int64_t)dl_rng_below(&rng, 20 * MS), now_ns, NULL),
                            DL_OK);
            is_wanted[i] = true;
            break;
        case 2:
            if ((taken = op_queue_take(queue, now_ns)) != NULL) {
                i = strtoul(taken, NULL, 10);
                CU_ASSERT(is_wanted[i] && !in_work[i]);
                is_wanted[i] = false;
                in_work[i] = true;
            }
            break;
        default:
            if (in_work[i]) {
                op_queue_done(queue, key, now_ns);
                in_work[i] = false;
            }
        }
    }
    for (size_t i = 0; i < KEYS; i++) {
        snprintf(key, sizeof key, "%zu", i);
        if (in_work[i]) {
            op_queue_done(queue, key, now_ns);
        }
    }
    const char *taken;
    now_ns += 100 * MS;
    while ((taken = op_queue_take(queue, now_ns)) != NULL) {
        size_t i = strtoul(taken, NULL, 10);
        CU_ASSERT_TRUE(is_wanted[i]);
        is_wanted[i] = false;
        snprintf(key, sizeof key, "%zu", i);
        op_queue_done(queue, key, now_ns);
    }
    for (size_t i = 0; i < KEYS; i++) {
        CU_ASSERT_FALSE(is_wanted[i]);
    }
    op_queue_free(queue);
}

static void test_queue_is_bounded(void)
{
    struct op_queue *queue = NULL;
    struct dl_err err;
    char key[16];
    CU_ASSERT_EQUAL_FATAL(op_queue_new("jobs", &queue, NULL), DL_OK);
    enum dl_rc rc = DL_OK;
    size_t count = 0;
    for (; rc == DL_OK && count <= OP_QUEUE_KEYS_MAX; count += rc == DL_OK) {
        snprintf(key, sizeof key, "%zu", count);
        rc = op_queue_add(queue, key, 0, &err);
    }
    CU_ASSERT_EQUAL(rc, DL_ENOMEM);
    CU_ASSERT_EQUAL(count, OP_QUEUE_KEYS_MAX);
    add(queue, "7", 0); /* One that is there already costs nothing. */
    op_queue_free(queue);
}

/* K12 */
static void test_metrics_names(void)
{
    static const char *const names[] = {
        "workqueue_depth{name=\"jobs\"} 1",
        "workqueue_adds_total{name=\"jobs\"} 2",
        "workqueue_retries_total{name=\"jobs\"} 1",
        "workqueue_queue_duration_seconds_count{name=\"jobs\"} 1",
        "workqueue_work_duration_seconds_count{name=\"jobs\"} 0",
        "workqueue_unfinished_work_seconds{name=\"jobs\"} 2",
        "workqueue_longest_running_processor_seconds{name=\"jobs\"} 2",
        "controller_runtime_reconcile_total{controller=\"decoupleddilocojob\",result=\"success\"} 1",
        "controller_runtime_reconcile_total{controller=\"decoupleddilocojob\",result=\"requeue_after\"} 0",
        "controller_runtime_reconcile_errors_total{controller=\"decoupleddilocojob\"} 1",
        "controller_runtime_reconcile_time_seconds_count{controller=\"decoupleddilocojob\"} 2",
        "controller_runtime_max_concurrent_reconciles{controller=\"decoupleddilocojob\"} 4",
        "controller_runtime_active_workers{controller=\"decoupleddilocojob\"} 0",
        "process_resident_memory_bytes ",
        "process_cpu_seconds_total ",
        "process_open_fds ",
        "process_start_time_seconds ",
    };
    struct op_queue *queue = NULL;
    struct dl_buf text;
    struct dl_metrics metrics;
    CU_ASSERT_EQUAL_FATAL(op_queue_new("jobs", &queue, NULL), DL_OK);
    add(queue, "a", 0);
    add(queue, "b", 0);
    CU_ASSERT_EQUAL(op_queue_retry(queue, "c", 0, NULL), DL_OK);
    CU_ASSERT_PTR_NOT_NULL(op_queue_take(queue, 0));
    struct op_reconcile_metrics reconciles = {.controller = "decoupleddilocojob", .max_workers = 4};
    op_reconcile_count(&reconciles, OP_RECONCILE_SUCCESS, 0.01);
    op_reconcile_count(&reconciles, OP_RECONCILE_ERROR, 0.02);
    dl_buf_init(&text, 1 << 20);
    dl_metrics_begin(&metrics, &text);
    op_queue_metrics(queue, 2 * DL_NS_PER_SECOND, &metrics);
    op_reconcile_metrics_write(&reconciles, &metrics);
    op_process_metrics(&metrics);
    for (size_t i = 0; i < DL_COUNT_OF(names); i++) {
        CU_ASSERT_PTR_NOT_NULL(strstr(text.data, names[i]));
    }
    double resident = 0;
    CU_ASSERT_EQUAL(
        sscanf(strstr(text.data, "\nprocess_resident_memory_bytes "), "\nprocess_resident_memory_bytes %lf", &resident),
        1);
    CU_ASSERT(resident > 1e5 && resident < 1e11);
    dl_buf_release(&text);
    op_queue_free(queue);
}

/* --- probes --- */

static void handle(void *context, const char *path, struct op_answer *answer)
{
    (*(int *)context)++;
    if (strcmp(path, "/healthz") == 0) {
        dl_buf_puts(&answer->body, "ok\n");
    } else if (strcmp(path, "/big") == 0) {
        for (int i = 0; i < 400000; i++) {
            dl_buf_puts(&answer->body, "0123456789");
        }
    } else {
        answer->status = 404;
    }
}

static int dial(const struct op_serve *serve)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons(op_serve_port(serve))};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CU_ASSERT_EQUAL_FATAL(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    CU_ASSERT_EQUAL(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    return fd;
}

/* Everything that comes until the end, while the loop turns; false when the end does not come. */
static bool converse(struct op_loop *loop, int fd, const char *request, struct dl_buf *answer)
{
    dl_buf_init(answer, 8 << 20);
    size_t size = strlen(request);
    CU_ASSERT_EQUAL(send(fd, request, size, MSG_NOSIGNAL), (ssize_t)size);
    int64_t until_ns = dl_now_ns() + 20 * DL_NS_PER_SECOND;
    while (dl_now_ns() < until_ns) {
        char bytes[65536];
        op_loop_turn(loop, 1);
        ssize_t got = recv(fd, bytes, sizeof bytes, 0);
        if (got > 0) {
            dl_buf_append(answer, bytes, (size_t)got);
        } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
            close(fd);
            return true;
        }
    }
    close(fd);
    return false;
}

static void test_probes(void)
{
    struct op_loop *loop = NULL;
    struct op_serve *serve = NULL;
    struct dl_buf answer;
    struct dl_err err;
    int calls = 0;
    CU_ASSERT_EQUAL_FATAL(op_loop_new(&loop, NULL), DL_OK);
    CU_ASSERT_EQUAL_FATAL(op_serve_new(loop, ":0", handle, &calls, &serve, &err), DL_OK);
    static const struct {
        const char *request, *status, *end;
        int calls;
    } rows[] = {
        {"GET /healthz?verbose HTTP/1.1\r\nHost: x\r\n\r\n", "HTTP/1.1 200 OK\r\n", "\r\n\r\nok\n", 1},
        {"HEAD /healthz HTTP/1.1\r\n\r\n", "HTTP/1.1 200 OK\r\n", "\r\n\r\n", 1},
        {"GET /nothing HTTP/1.1\r\n\r\n", "HTTP/1.1 404 Not Found\r\n", "\r\n\r\n", 1},
        {"POST /healthz HTTP/1.1\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 405 ", "\r\n\r\n", 0},
        {"nonsense\r\n\r\n", "HTTP/1.1 400 ", "\r\n\r\n", 0},
    };
    for (size_t i = 0; i < DL_COUNT_OF(rows); i++) {
        calls = 0;
        CU_ASSERT_TRUE(converse(loop, dial(serve), rows[i].request, &answer));
        CU_ASSERT_PTR_NOT_NULL_FATAL(answer.data);
        CU_ASSERT_EQUAL(strncmp(answer.data, rows[i].status, strlen(rows[i].status)), 0);
        CU_ASSERT(answer.size > strlen(rows[i].end));
        CU_ASSERT_STRING_EQUAL(answer.data + answer.size - strlen(rows[i].end), rows[i].end);
        CU_ASSERT_EQUAL(calls, rows[i].calls);
        dl_buf_release(&answer);
    }
    CU_ASSERT_TRUE(converse(loop, dial(serve), "GET /big HTTP/1.1\r\n\r\n", &answer));
    CU_ASSERT(answer.size > 4000000);
    dl_buf_release(&answer);

    static char large[OP_SERVE_HEAD_MAX + 64];
    memset(large, 'h', sizeof large - 1);
    memcpy(large, "GET /healthz HTTP/1.1\r\n", 23);
    CU_ASSERT_TRUE(converse(loop, dial(serve), large, &answer));
    dl_buf_release(&answer);

    /* Connections that say nothing take all places: others wait, nothing fails, and the places come back. */
    int idle[OP_SERVE_CONNECTIONS_MAX];
    for (size_t i = 0; i < DL_COUNT_OF(idle); i++) {
        idle[i] = dial(serve);
        for (int k = 0; k < 3; k++) {
            op_loop_turn(loop, 1);
        }
    }
    int waiting = dial(serve);
    for (size_t i = 0; i < DL_COUNT_OF(idle); i++) {
        close(idle[i]);
    }
    CU_ASSERT_TRUE(converse(loop, waiting, "GET /healthz HTTP/1.1\r\n\r\n", &answer));
    CU_ASSERT_EQUAL(strncmp(answer.data, "HTTP/1.1 200", 12), 0);
    dl_buf_release(&answer);

    char taken[32];
    struct op_serve *second = NULL;
    snprintf(taken, sizeof taken, ":%u", op_serve_port(serve));
    CU_ASSERT_EQUAL(op_serve_new(loop, taken, handle, &calls, &second, &err), DL_ENET);
    static const char *const wrong[] = {"", "8080", ":", ":http", "a:b:80", "nowhere.invalid:1"};
    for (size_t i = 0; i < DL_COUNT_OF(wrong); i++) {
        CU_ASSERT_EQUAL(op_serve_new(loop, wrong[i], handle, &calls, &second, &err), DL_EINVAL);
    }
    op_serve_free(serve);
    CU_ASSERT_EQUAL_FATAL(op_serve_new(loop, "127.0.0.1:0", handle, &calls, &serve, &err), DL_OK);
    int open_one = dial(serve);
    op_loop_turn(loop, 10);
    op_serve_free(serve); /* With a connection open. */
    close(open_one);
    op_loop_free(loop);
}

UNIT_MAIN("kube_parts", {"timers fire in order", test_timers_fire_in_order},
          {"a timer that starts itself", test_timer_that_starts_itself}, {"descriptors", test_descriptors},
          {"map", test_map}, {"paths", test_paths}, {"queue: keys once", test_queue_keys_once},
          {"queue: later", test_queue_later}, {"queue: backoff", test_queue_backoff},
          {"queue: at random", test_queue_at_random}, {"queue: bounded", test_queue_is_bounded},
          {"K12 names", test_metrics_names}, {"probes", test_probes})
