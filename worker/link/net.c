#include "worker/link/net.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/link/channel.h"

struct wk_net {
    struct wk_hub *hub;
    pthread_t thread;
    struct pollfd polls[DL_SPEC_SHARDS_MAX + 1];
    struct wk_channel channels[]; /* hub->shards */
};

void wk_net_wake(struct wk_hub *hub)
{
    uint64_t one = 1;
    ssize_t written = write(hub->wake_fd, &one, sizeof one);
    (void)written; /* Full means that the thread will wake anyway. */
}

static void flush_notes(struct wk_hub *hub)
{
    for (;;) {
        int level = 0;
        char text[DL_ERR_TEXT_MAX];
        pthread_mutex_lock(&hub->lock);
        bool any = wk_link_next_note(hub->link, &level, text);
        pthread_mutex_unlock(&hub->lock);
        if (!any) {
            return;
        }
        if (hub->log != NULL) {
            hub->log(hub->log_context, level, text);
        }
    }
}

/* Milliseconds to wait, rounded up so that nothing is looked at before it is due. */
static int wait_ms(int64_t now_ns, int64_t deadline_ns)
{
    if (deadline_ns <= now_ns) {
        return 0;
    }
    if (deadline_ns == INT64_MAX) {
        return -1;
    }
    int64_t ms = (deadline_ns - now_ns + DL_NS_PER_MS - 1) / DL_NS_PER_MS;
    return ms > INT_MAX ? INT_MAX : (int)ms;
}

/* Does all that can be done now; returns when the next thing is due, INT64_MIN to end. */
static int64_t serve(struct wk_net *net, int64_t now_ns)
{
    struct wk_hub *hub = net->hub;
    pthread_mutex_lock(&hub->lock);
    wk_link_tick(hub->link, now_ns);
    pthread_mutex_unlock(&hub->lock);
    int64_t deadline_ns = INT64_MAX;
    uint32_t unsent = 0;
    for (uint32_t i = 0; i < hub->shards; i++) {
        wk_channel_service(&net->channels[i], now_ns);
        deadline_ns = DL_MIN(deadline_ns, wk_channel_deadline(&net->channels[i]));
        unsent += !wk_outbox_is_empty(&net->channels[i].out);
    }
    pthread_mutex_lock(&hub->lock);
    deadline_ns = DL_MIN(deadline_ns, wk_link_deadline(hub->link));
    if (hub->unsent != unsent) {
        hub->unsent = unsent;
        pthread_cond_broadcast(&hub->changed);
    }
    bool stop = hub->stop;
    pthread_mutex_unlock(&hub->lock);
    flush_notes(hub);
    return stop ? INT64_MIN : DL_MAX(deadline_ns, INT64_MIN + 1);
}

static void wait_for_input(struct wk_net *net, int64_t now_ns, int64_t deadline_ns)
{
    struct wk_hub *hub = net->hub;
    struct pollfd *polls = net->polls;
    for (uint32_t i = 0; i < hub->shards; i++) {
        if (!wk_channel_poll(&net->channels[i], &polls[i])) {
            polls[i] = (struct pollfd){.fd = -1};
        }
    }
    polls[hub->shards] = (struct pollfd){.fd = hub->wake_fd, .events = POLLIN};
    int ready = poll(polls, hub->shards + 1, wait_ms(now_ns, deadline_ns));
    assert(ready >= 0 || errno == EINTR || errno == ENOMEM);
    if (ready <= 0) {
        for (uint32_t i = 0; i <= hub->shards; i++) {
            polls[i].revents = 0;
        }
    }
    if (polls[hub->shards].revents != 0) {
        uint64_t count;
        ssize_t got = read(hub->wake_fd, &count, sizeof count);
        (void)got;
    }
    int64_t later_ns = dl_now_ns();
    for (uint32_t i = 0; i < hub->shards; i++) {
        wk_channel_ready(&net->channels[i], later_ns, polls[i].revents);
    }
}

static void *net_main(void *argument)
{
    struct wk_net *net = argument;
    for (;;) {
        int64_t now_ns = dl_now_ns();
        int64_t deadline_ns = serve(net, now_ns);
        if (deadline_ns == INT64_MIN) {
            return NULL;
        }
        wait_for_input(net, now_ns, deadline_ns);
    }
}

static void release(struct wk_net *net)
{
    for (uint32_t i = 0; i < net->hub->shards; i++) {
        wk_channel_release(&net->channels[i]);
    }
    free(net);
}

enum dl_rc wk_net_start(struct wk_hub *hub, struct wk_net **out, struct dl_err *err)
{
    struct wk_net *net = dl_alloc_aligned(sizeof *net + hub->shards * sizeof net->channels[0]);
    if (net == NULL) {
        return dl_err_set(err, DL_ENOMEM, "join: no memory for %u connections", hub->shards);
    }
    net->hub = hub;
    enum dl_rc rc = DL_OK;
    for (uint32_t i = 0; i < hub->shards && rc == DL_OK; i++) {
        rc = wk_channel_init(&net->channels[i], hub, i, err);
    }
    if (rc == DL_OK) {
        /* Signals are for the program's own threads, and a peer that is gone must not raise SIGPIPE. */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int status = pthread_create(&net->thread, NULL, net_main, net);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (status != 0) {
            rc = dl_err_errno(err, DL_ENOMEM, status, "join: start the network thread");
        }
    }
    if (rc != DL_OK) {
        release(net);
        return rc;
    }
    *out = net;
    return DL_OK;
}

void wk_net_stop(struct wk_net *net)
{
    if (net == NULL) {
        return;
    }
    pthread_mutex_lock(&net->hub->lock);
    net->hub->stop = true;
    pthread_mutex_unlock(&net->hub->lock);
    wk_net_wake(net->hub);
    pthread_join(net->thread, NULL);
    flush_notes(net->hub);
    release(net);
}
