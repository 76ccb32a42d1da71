#include "worker/link/resolve.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/mem.h"

struct wk_resolve {
    pthread_mutex_t lock;
    int holders; /* The asker and the thread; the last one releases. */
    bool done;
    int fd;
    int status; /* Of getaddrinfo. */
    int system_error;
    struct addrinfo *addresses;
    char host[256], port[8];
};

static void release(struct wk_resolve *resolve)
{
    pthread_mutex_lock(&resolve->lock);
    bool last = --resolve->holders == 0;
    pthread_mutex_unlock(&resolve->lock);
    if (!last) {
        return;
    }
    if (resolve->addresses != NULL) {
        freeaddrinfo(resolve->addresses);
    }
    if (resolve->fd >= 0) {
        close(resolve->fd);
    }
    pthread_mutex_destroy(&resolve->lock);
    free(resolve);
}

static void look_up(struct wk_resolve *resolve, int flags)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_family = AF_UNSPEC, .ai_flags = flags};
    struct addrinfo *addresses = NULL;
    int status = getaddrinfo(resolve->host, resolve->port, &hints, &addresses);
    int system_error = errno;
    pthread_mutex_lock(&resolve->lock);
    resolve->status = status;
    resolve->system_error = system_error;
    resolve->addresses = status == 0 ? addresses : NULL;
    resolve->done = true;
    pthread_mutex_unlock(&resolve->lock);
    uint64_t one = 1;
    ssize_t written = write(resolve->fd, &one, sizeof one);
    (void)written; /* Cannot fail: the counter is at zero. */
}

static void *resolver_main(void *argument)
{
    look_up(argument, AI_ADDRCONFIG | AI_NUMERICSERV);
    release(argument);
    return NULL;
}

static int start_thread(struct wk_resolve *resolve)
{
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* Signals are for the program's own threads. */
    resolve->holders = 2;
    pthread_t thread;
    int status = pthread_create(&thread, &attributes, resolver_main, resolve);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (status != 0) {
        resolve->holders = 1;
    }
    return status;
}

enum dl_rc wk_resolve_start(const char *host, const char *port, struct wk_resolve **out, int *fd, struct dl_err *err)
{
    struct wk_resolve *resolve = calloc(1, sizeof *resolve);
    if (resolve == NULL) {
        return dl_err_set(err, DL_ENOMEM, "look up %s: no memory", host);
    }
    pthread_mutex_init(&resolve->lock, NULL);
    resolve->holders = 1;
    resolve->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    bool fits = strlen(host) < sizeof resolve->host && strlen(port) < sizeof resolve->port;
    if (resolve->fd < 0 || !fits) {
        int error = fits ? errno : ENAMETOOLONG;
        release(resolve);
        return dl_err_errno(err, DL_ENET, error, "look up %s", host);
    }
    memcpy(resolve->host, host, strlen(host) + 1);
    memcpy(resolve->port, port, strlen(port) + 1);
    look_up(resolve, AI_NUMERICHOST | AI_NUMERICSERV);
    if (resolve->status != 0) {
        uint64_t count;
        ssize_t got = read(resolve->fd, &count, sizeof count);
        (void)got;
        resolve->done = false;
        int status = start_thread(resolve);
        if (status != 0) {
            release(resolve);
            return dl_err_errno(err, DL_ENOMEM, status, "look up %s: start a thread", host);
        }
    }
    *out = resolve;
    *fd = resolve->fd;
    return DL_OK;
}

enum dl_rc wk_resolve_take(struct wk_resolve *resolve, struct addrinfo **addresses, struct dl_err *err)
{
    pthread_mutex_lock(&resolve->lock);
    enum dl_rc rc = DL_AGAIN;
    if (resolve->done && resolve->addresses != NULL) {
        *addresses = dl_take(resolve->addresses);
        rc = DL_OK;
    } else if (resolve->done && resolve->status == EAI_SYSTEM) {
        rc = dl_err_errno(err, DL_ENET, resolve->system_error, "look up %s", resolve->host);
    } else if (resolve->done) {
        rc = dl_err_set(err, DL_ENET, "look up %s: %s", resolve->host, gai_strerror(resolve->status));
    }
    pthread_mutex_unlock(&resolve->lock);
    return rc;
}

void wk_resolve_free(struct wk_resolve *resolve)
{
    if (resolve != NULL) {
        release(resolve);
    }
}
