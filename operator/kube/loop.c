#include "operator/kube/loop.h"

#include <assert.h>
#include <poll.h>
#include <stdlib.h>

#include "common/clock.h"
#include "common/mem.h"

#define CONNECTIONS_KEPT 64L

struct op_loop {
    CURLM *multi;
    int64_t now_ns;
    struct op_timer *first; /* Root of the heap. */
    size_t timer_count;
    struct op_fd *fds[OP_LOOP_FDS_MAX];
    size_t fd_count;
    struct op_fd *polled[OP_LOOP_FDS_MAX]; /* Those that this turn waits on; NULL once removed. */
    size_t polled_count;
    struct curl_waitfd waits[OP_LOOP_FDS_MAX];
    size_t transfer_count;
    bool is_stopped; /* Atomic. */
};

enum dl_rc op_loop_new(struct op_loop **out, struct dl_err *err)
{
    struct op_loop *loop = calloc(1, sizeof *loop);
    if (loop == NULL || (loop->multi = curl_multi_init()) == NULL ||
        curl_multi_setopt(loop->multi, CURLMOPT_MAXCONNECTS, CONNECTIONS_KEPT) != CURLM_OK) {
        op_loop_free(loop);
        return dl_err_set(err, DL_ENOMEM, "no memory for the operator's loop");
    }
    loop->now_ns = dl_now_ns();
    *out = loop;
    return DL_OK;
}

void op_loop_free(struct op_loop *loop)
{
    if (loop != NULL) {
        assert(loop->transfer_count == 0 && loop->fd_count == 0 && loop->timer_count == 0);
        curl_multi_cleanup(loop->multi);
        free(loop);
    }
}

int64_t op_loop_now_ns(const struct op_loop *loop)
{
    return loop->now_ns;
}

/* --- timers: a pairing heap. A node's `previous` is its parent when it is the first child, else the sibling before it. --- */

static struct op_timer *heap_join(struct op_timer *a, struct op_timer *b)
{
    if (a == NULL || b == NULL) {
        return a != NULL ? a : b;
    }
    if (b->due_ns < a->due_ns) {
        struct op_timer *swap = a;
        a = b;
        b = swap;
    }
    b->previous = a;
    b->sibling = a->child;
    if (a->child != NULL) {
        a->child->previous = b;
    }
    a->child = b;
    return a;
}

/* Joins a list of siblings to one heap: pairs from the left, then the pairs from the right. */
static struct op_timer *heap_join_siblings(struct op_timer *list)
{
    struct op_timer *pairs = NULL;
    while (list != NULL) {
        struct op_timer *a = list, *b = a->sibling;
        list = b != NULL ? b->sibling : NULL;
        a->sibling = a->previous = NULL;
        if (b != NULL) {
            b->sibling = b->previous = NULL;
        }
        struct op_timer *pair = heap_join(a, b);
        pair->sibling = pairs;
        pairs = pair;
    }
    struct op_timer *root = NULL;
    while (pairs != NULL) {
        struct op_timer *next = pairs->sibling;
        pairs->sibling = pairs->previous = NULL;
        root = heap_join(root, pairs);
        pairs = next;
    }
    return root;
}

void op_timer_stop(struct op_loop *loop, struct op_timer *timer)
{
    if (!timer->is_running) {
        return;
    }
    if (timer == loop->first) {
        loop->first = heap_join_siblings(timer->child);
    } else {
        if (timer->previous->child == timer) {
            timer->previous->child = timer->sibling;
        } else {
            timer->previous->sibling = timer->sibling;
        }
        if (timer->sibling != NULL) {
            timer->sibling->previous = timer->previous;
        }
        loop->first = heap_join(loop->first, heap_join_siblings(timer->child));
    }
    timer->child = timer->sibling = timer->previous = NULL;
    timer->is_running = false;
    loop->timer_count--;
}

void op_timer_start(struct op_loop *loop, struct op_timer *timer, int64_t due_ns)
{
    op_timer_stop(loop, timer);
    timer->due_ns = due_ns;
    timer->is_running = true;
    loop->first = heap_join(loop->first, timer);
    loop->timer_count++;
}

static void fire_timers(struct op_loop *loop)
{
    /* No more than there were: one that starts itself again comes in the next turn. */
    for (size_t left = loop->timer_count; left > 0 && loop->first != NULL && loop->first->due_ns <= loop->now_ns;
         left--) {
        struct op_timer *timer = loop->first;
        op_timer_stop(loop, timer);
        timer->fire(timer->context, loop->now_ns);
    }
}

/* --- descriptors --- */

enum dl_rc op_fd_add(struct op_loop *loop, struct op_fd *fd, struct dl_err *err)
{
    if (loop->fd_count == OP_LOOP_FDS_MAX) {
        return dl_err_set(err, DL_ENOMEM, "the loop watches %d descriptors already", OP_LOOP_FDS_MAX);
    }
    assert(!fd->is_added);
    fd->is_added = true;
    loop->fds[loop->fd_count++] = fd;
    return DL_OK;
}

void op_fd_remove(struct op_loop *loop, struct op_fd *fd)
{
    if (!fd->is_added) {
        return;
    }
    fd->is_added = false;
    for (size_t i = 0; i < loop->fd_count; i++) {
        if (loop->fds[i] == fd) {
            loop->fds[i] = loop->fds[--loop->fd_count];
            break;
        }
    }
    for (size_t i = 0; i < loop->polled_count; i++) {
        if (loop->polled[i] == fd) {
            loop->polled[i] = NULL;
        }
    }
}

static void wait_for_news(struct op_loop *loop, int wait_max_ms)
{
    int64_t wait_ms = DL_MIN(wait_max_ms, OP_LOOP_WAIT_MAX_MS);
    if (loop->first != NULL) {
        int64_t due_ms = (loop->first->due_ns - dl_now_ns() + DL_NS_PER_MS - 1) / DL_NS_PER_MS;
        wait_ms = DL_MAX(0, DL_MIN(wait_ms, due_ms));
    }
    loop->polled_count = loop->fd_count;
    for (size_t i = 0; i < loop->fd_count; i++) {
        struct op_fd *fd = loop->fds[i];
        loop->polled[i] = fd;
        loop->waits[i] = (struct curl_waitfd){
            .fd = fd->fd,
            .events =
                (short)((fd->events & POLLIN ? CURL_WAIT_POLLIN : 0) | (fd->events & POLLOUT ? CURL_WAIT_POLLOUT : 0)),
        };
    }
    curl_multi_poll(loop->multi, loop->waits, (unsigned)loop->polled_count, (int)wait_ms, NULL);
}

static void serve_fds(struct op_loop *loop)
{
    for (size_t i = 0; i < loop->polled_count; i++) {
        struct op_fd *fd = loop->polled[i];
        if (fd != NULL && loop->waits[i].revents != 0) {
            fd->ready(fd->context, loop->waits[i].revents, loop->now_ns);
        }
    }
    loop->polled_count = 0;
}

/* --- transfers --- */

enum dl_rc op_transfer_add(struct op_loop *loop, struct op_transfer *transfer, struct dl_err *err)
{
    assert(!transfer->is_added);
    CURLMcode code = CURLM_OUT_OF_MEMORY;
    if (curl_easy_setopt(transfer->easy, CURLOPT_PRIVATE, transfer) == CURLE_OK) {
        code = curl_multi_add_handle(loop->multi, transfer->easy);
    }
    if (code != CURLM_OK) {
        return dl_err_set(err, DL_ENOMEM, "cannot start a transfer: %s", curl_multi_strerror(code));
    }
    transfer->is_added = true;
    loop->transfer_count++;
    return DL_OK;
}

void op_transfer_remove(struct op_loop *loop, struct op_transfer *transfer)
{
    if (transfer->is_added) {
        CURLMcode code = curl_multi_remove_handle(loop->multi, transfer->easy);
        assert(code == CURLM_OK);
        (void)code;
        transfer->is_added = false;
        loop->transfer_count--;
    }
}

static void serve_transfers(struct op_loop *loop)
{
    int running = 0, left = 0;
    curl_multi_perform(loop->multi, &running);
    for (CURLMsg *message; (message = curl_multi_info_read(loop->multi, &left)) != NULL;) {
        char *owner = NULL;
        CURLcode code = message->data.result;
        if (message->msg == CURLMSG_DONE &&
            curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &owner) == CURLE_OK && owner != NULL) {
            struct op_transfer *transfer = (struct op_transfer *)(void *)owner;
            op_transfer_remove(loop, transfer);
            transfer->done(transfer->context, code, loop->now_ns);
        }
    }
}

void op_loop_turn(struct op_loop *loop, int wait_max_ms)
{
    wait_for_news(loop, wait_max_ms);
    loop->now_ns = dl_now_ns();
    serve_transfers(loop);
    serve_fds(loop);
    fire_timers(loop);
}

void op_loop_wake(struct op_loop *loop)
{
    curl_multi_wakeup(loop->multi);
}

void op_loop_stop(struct op_loop *loop)
{
    __atomic_store_n(&loop->is_stopped, true, __ATOMIC_RELEASE);
    op_loop_wake(loop);
}

bool op_loop_is_stopped(const struct op_loop *loop)
{
    return __atomic_load_n(&loop->is_stopped, __ATOMIC_ACQUIRE);
}
