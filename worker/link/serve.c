#include "worker/link/serve.h"

#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"
#include "worker/link/serve_http.h"
#include "worker/link/serve_listen.h"
#include "worker/link/stream.h"

#define PIECE_BYTES ((size_t)1 << 20) /* Written to one connection before the others have their turn. */
#define LOOK_MS 500                   /* How late a deadline may be noticed. */

enum client_state { CLIENT_FREE, CLIENT_SECURING, CLIENT_READING, CLIENT_WAITING, CLIENT_SENDING };

struct client {
    enum client_state state;
    struct wk_stream stream;
    int64_t since_ns; /* Of the last byte either way. */
    struct wk_http_request request;
    char in[WK_HTTP_HEAD_MAX];
    size_t in_have;
    char head[512]; /* Of the answer, with the whole of a refusal. */
    size_t head_bytes, head_sent;
    const uint8_t *parts[2]; /* Of the body. */
    uint64_t part_bytes[2];
    bool close; /* After this answer. */
};

/* Who has the snapshot: the trainer's thread while it is LENT, else the serving thread. */
enum filling { FILL_NONE, FILL_LENT, FILL_DONE };

struct wk_serve {
    char *listen, *address;
    const char *token;
    SSL_CTX *tls;
    void (*log)(void *context, int level, const char *line);
    void *log_context;
    void (*wanted)(void *context);
    void *wanted_context;
    int listen_fd, wake_fd;
    pthread_t thread;
    bool started, failed;
    char told[DL_WIRE_ADDRESS_MAX];
    bool stop;   /* Atomic. */
    bool open;   /* Atomic: `source` is there. */
    int filling; /* Atomic: enum filling. */
    struct wk_snapshot_source source;
    char uid[DL_WIRE_UID_MAX];
    struct wk_snapshot *snapshot;
    bool sealed;
    uint64_t next_id;
    int64_t asked_ns, lent_ns, made_ns, used_ns;
    int64_t filled_ns; /* What the last snapshot took of the trainer's time. */
    struct client clients[WK_SERVE_CLIENTS];
};

static void say(const struct wk_serve *serve, int level, const char *fmt, ...) DL_PRINTF(3, 4);
static void say(const struct wk_serve *serve, int level, const char *fmt, ...)
{
    char text[DL_ERR_TEXT_MAX];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (serve->log != NULL) {
        serve->log(serve->log_context, level, text);
    }
}

static void wake(const struct wk_serve *serve)
{
    uint64_t one = 1;
    ssize_t written = write(serve->wake_fd, &one, sizeof one);
    (void)written; /* Full means that the thread will wake anyway. */
}

static double seconds(int64_t from_ns, int64_t to_ns)
{
    return (double)(to_ns - from_ns) / (double)DL_NS_PER_SECOND;
}

/* --- snapshots --------------------------------------------------------------------------------------------------- */

static bool in_use(const struct wk_serve *serve)
{
    for (size_t i = 0; i < WK_SERVE_CLIENTS; i++) {
        enum client_state state = serve->clients[i].state;
        if (state == CLIENT_SENDING || state == CLIENT_WAITING) {
            return true;
        }
    }
    return false;
}

static void drop_snapshot(struct wk_serve *serve)
{
    wk_snapshot_free(dl_take(serve->snapshot));
    serve->sealed = false;
    __atomic_store_n(&serve->filling, FILL_NONE, __ATOMIC_RELAXED);
}

/* Whether the sealed snapshot is old enough for the next one to be made. */
static bool may_make(const struct wk_serve *serve, int64_t now_ns)
{
    return now_ns - serve->made_ns >= WK_SERVE_SHARE * serve->filled_ns;
}

/* The trainer has filled it, or it has served its time. */
static void look_at_snapshot(struct wk_serve *serve, int64_t now_ns)
{
    if (serve->snapshot == NULL || __atomic_load_n(&serve->filling, __ATOMIC_ACQUIRE) == FILL_LENT) {
        return;
    }
    struct dl_err err;
    if (!serve->sealed) {
        if (wk_snapshot_seal(serve->snapshot, &err) != DL_OK) {
            say(serve, 2, "%s", err.text);
            drop_snapshot(serve);
            return;
        }
        serve->sealed = true;
        say(serve, 0,
            "a snapshot of %llu bytes is ready after %.2f s: memory %.2f, trainer %.2f (%.3f to fill it), hashes %.2f",
            (unsigned long long)serve->snapshot->data_bytes, seconds(serve->asked_ns, dl_now_ns()),
            seconds(serve->asked_ns, serve->lent_ns), seconds(serve->lent_ns, now_ns), seconds(0, serve->filled_ns),
            seconds(now_ns, dl_now_ns()));
        serve->made_ns = serve->used_ns = now_ns;
    } else if (!in_use(serve) && now_ns - serve->used_ns >= WK_SERVE_KEEP_NS && may_make(serve, now_ns)) {
        drop_snapshot(serve);
    }
}

/* DL_OK: there is one that is fresh enough. DL_AGAIN: one is being made. DL_ENOMEM; DL_EEXISTS: an old one is in use. */
static enum dl_rc want_snapshot(struct wk_serve *serve, int64_t now_ns)
{
    if (serve->snapshot != NULL && serve->sealed && now_ns - serve->made_ns > WK_SERVE_REUSE_NS &&
        may_make(serve, now_ns)) {
        for (size_t i = 0; i < WK_SERVE_CLIENTS; i++) {
            if (serve->clients[i].state == CLIENT_SENDING) {
                return DL_EEXISTS;
            }
        }
        drop_snapshot(serve);
    }
    if (serve->snapshot != NULL) {
        return serve->sealed ? DL_OK : DL_AGAIN;
    }
    struct dl_err err;
    if (wk_snapshot_new(&serve->source, ++serve->next_id, &serve->snapshot, &err) != DL_OK) {
        say(serve, 2, "%s", err.text);
        return DL_ENOMEM;
    }
    serve->asked_ns = now_ns;
    serve->lent_ns = dl_now_ns();
    __atomic_store_n(&serve->filling, FILL_LENT, __ATOMIC_RELEASE);
    if (serve->wanted != NULL) {
        serve->wanted(serve->wanted_context);
    }
    return DL_AGAIN;
}

void wk_serve_open(struct wk_serve *serve, const struct wk_snapshot_source *source)
{
    serve->source = *source;
    snprintf(serve->uid, sizeof serve->uid, "%s", source->uid);
    serve->source.uid = serve->uid;
    __atomic_store_n(&serve->open, true, __ATOMIC_RELEASE);
}

bool wk_serve_wants(const struct wk_serve *serve)
{
    return serve != NULL && __atomic_load_n(&serve->filling, __ATOMIC_ACQUIRE) == FILL_LENT;
}

void wk_serve_fill(struct wk_serve *serve, const struct wk_offer *offers, uint64_t step, uint8_t *trace,
                   uint64_t trace_bytes)
{
    int64_t begun_ns = dl_now_ns();
    wk_snapshot_fill(serve->snapshot, &serve->source, offers, step, trace, trace_bytes);
    serve->filled_ns = dl_now_ns() - begun_ns;
    __atomic_store_n(&serve->filling, FILL_DONE, __ATOMIC_RELEASE);
    wake(serve);
}

/* --- answers ----------------------------------------------------------------------------------------------------- */

static void close_client(struct client *client)
{
    wk_stream_close(&client->stream);
    client->state = CLIENT_FREE;
}

static const char *reason_of(int status)
{
    switch (status) {
    case 401: return "Unauthorized";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 410: return "Gone";
    case 416: return "Range Not Satisfiable";
    case 503: return "Service Unavailable";
    default: return "Bad Request";
    }
}

static void begin_answer(struct client *client, const uint8_t *body, uint64_t bytes)
{
    client->head_bytes = strlen(client->head);
    client->head_sent = 0;
    client->parts[0] = body;
    client->part_bytes[0] = bytes;
    client->part_bytes[1] = 0;
    client->state = CLIENT_SENDING;
}

static void refuse(struct client *client, int status, const char *text)
{
    client->close = true;
    snprintf(client->head, sizeof client->head,
             "HTTP/1.1 %d %s\r\nContent-Type: text/plain\r\nContent-Length: %zu\r\nConnection: close\r\n%s\r\n%s",
             status, reason_of(status), strlen(text), status == 503 ? "Retry-After: 1\r\n" : "", text);
    begin_answer(client, NULL, 0);
}

static void answer_manifest(struct wk_serve *serve, struct client *client)
{
    const struct wk_snapshot *snapshot = serve->snapshot;
    snprintf(client->head, sizeof client->head,
             "HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %zu\r\n\r\n",
             snapshot->head_bytes);
    begin_answer(client, snapshot->head, snapshot->head_bytes);
}

static void answer_data(struct wk_serve *serve, struct client *client)
{
    const struct wk_snapshot *snapshot = serve->snapshot;
    const struct wk_http_request *request = &client->request;
    if (snapshot == NULL || !serve->sealed || snapshot->manifest.id != request->id) {
        refuse(client, 410, "this snapshot is no longer held");
        return;
    }
    uint64_t total = snapshot->data_bytes + snapshot->manifest.trace_bytes;
    uint64_t first = request->ranged ? request->first : 0;
    uint64_t last = request->ranged && !request->open ? request->last : total - 1;
    if (first > last || last >= total) {
        refuse(client, 416, "the range is not within the snapshot");
        return;
    }
    uint64_t length = last - first + 1;
    snprintf(client->head, sizeof client->head,
             "HTTP/1.1 206 Partial Content\r\nContent-Type: application/octet-stream\r\nContent-Length: %" PRIu64 "\r\n"
             "Content-Range: bytes %" PRIu64 "-%" PRIu64 "/%" PRIu64 "\r\n\r\n",
             length, first, last, total);
    uint64_t data_end = DL_MIN(last + 1, snapshot->data_bytes);
    begin_answer(client, snapshot->data + DL_MIN(first, data_end), data_end - DL_MIN(first, data_end));
    if (last + 1 > snapshot->data_bytes) {
        uint64_t from = first > snapshot->data_bytes ? first - snapshot->data_bytes : 0;
        client->parts[1] = snapshot->trace + from;
        client->part_bytes[1] = last + 1 - snapshot->data_bytes - from;
    }
}

static void try_manifest(struct wk_serve *serve, struct client *client, int64_t now_ns)
{
    if (!__atomic_load_n(&serve->open, __ATOMIC_ACQUIRE)) {
        refuse(client, 503, "this learner has no state yet");
        return;
    }
    switch ((int)want_snapshot(serve, now_ns)) {
    case DL_OK: answer_manifest(serve, client); break;
    case DL_AGAIN: client->state = CLIENT_WAITING; break;
    case DL_EEXISTS: refuse(client, 503, "an older snapshot is being fetched"); break;
    default: refuse(client, 503, "no memory for a snapshot"); break;
    }
}

/* --- connections ------------------------------------------------------------------------------------------------- */

static void read_request(struct wk_serve *serve, struct client *client, int64_t now_ns)
{
    size_t got = 0;
    struct dl_err err;
    enum dl_rc rc = wk_stream_read(&client->stream, (uint8_t *)client->in + client->in_have,
                                   sizeof client->in - client->in_have, NULL, 0, &got, &err);
    if (rc == DL_AGAIN) {
        return;
    }
    if (rc != DL_OK) {
        close_client(client);
        return;
    }
    client->in_have += got;
    client->since_ns = now_ns;
    size_t head = wk_http_head_bytes(client->in, client->in_have);
    if (head == 0) {
        if (client->in_have == sizeof client->in) {
            refuse(client, 400, "the request is too long");
        }
        return;
    }
    int status = wk_http_request_parse(client->in, head, serve->token, &client->request);
    client->close = client->request.close || client->in_have > head; /* One request at a time. */
    client->in_have = 0;
    if (status != 200) {
        refuse(client, status, reason_of(status));
    } else if (client->request.manifest) {
        try_manifest(serve, client, now_ns);
    } else {
        answer_data(serve, client);
    }
}

/* DL_OK: all of it is written. */
static enum dl_rc write_some(struct client *client, const uint8_t *bytes, size_t size, size_t *sent)
{
    struct dl_err err;
    *sent = 0;
    return size == 0 ? DL_OK : wk_stream_write(&client->stream, bytes, DL_MIN(size, PIECE_BYTES), sent, &err);
}

static void send_answer(struct wk_serve *serve, struct client *client, int64_t now_ns)
{
    size_t sent = 0;
    enum dl_rc rc = DL_OK;
    if (client->head_sent < client->head_bytes) {
        rc = write_some(client, (const uint8_t *)client->head + client->head_sent,
                        client->head_bytes - client->head_sent, &sent);
        client->head_sent += sent;
    } else {
        size_t part = client->part_bytes[0] > 0 ? 0 : 1;
        rc = write_some(client, client->parts[part], client->part_bytes[part], &sent);
        client->parts[part] = sent > 0 ? client->parts[part] + sent : client->parts[part];
        client->part_bytes[part] -= sent;
        serve->used_ns = now_ns;
    }
    if (rc != DL_OK && rc != DL_AGAIN) {
        close_client(client);
        return;
    }
    client->since_ns = sent > 0 ? now_ns : client->since_ns;
    if (client->head_sent == client->head_bytes && client->part_bytes[0] + client->part_bytes[1] == 0) {
        if (client->close) {
            close_client(client);
        } else {
            client->state = CLIENT_READING;
        }
    }
}

static void secure(struct client *client, int64_t now_ns)
{
    struct dl_err err;
    enum dl_rc rc = wk_stream_handshake(&client->stream, &err);
    if (rc == DL_OK) {
        client->state = CLIENT_READING;
        client->since_ns = now_ns;
    } else if (rc != DL_AGAIN) {
        close_client(client);
    }
}

static void serve_client(struct wk_serve *serve, struct client *client, short revents, int64_t now_ns)
{
    uint64_t bytes = serve->snapshot == NULL ? 0 : serve->snapshot->data_bytes;
    int64_t limit_ns =
        client->state == CLIENT_WAITING ? WK_SERVE_FILL_NS + wk_snapshot_allowance_ns(bytes) : WK_SERVE_IDLE_NS;
    if (client->state == CLIENT_WAITING) {
        try_manifest(serve, client, now_ns);
    }
    if (revents != 0) {
        switch (client->state) {
        case CLIENT_SECURING: secure(client, now_ns); break;
        case CLIENT_READING: read_request(serve, client, now_ns); break;
        case CLIENT_SENDING: send_answer(serve, client, now_ns); break;
        case CLIENT_WAITING: close_client(client); break; /* Whoever waits says nothing: what can be read is an end. */
        case CLIENT_FREE: break;
        }
    }
    if (client->state == CLIENT_WAITING && now_ns - client->since_ns >= limit_ns) {
        refuse(client, 503, "no step boundary in time");
        client->since_ns = now_ns;
    } else if (client->state != CLIENT_FREE && now_ns - client->since_ns >= limit_ns) {
        close_client(client);
    }
}

static void accept_client(struct wk_serve *serve, int64_t now_ns)
{
    struct client *client = NULL;
    for (size_t i = 0; i < WK_SERVE_CLIENTS && client == NULL; i++) {
        client = serve->clients[i].state == CLIENT_FREE ? &serve->clients[i] : NULL;
    }
    if (client == NULL) {
        return;
    }
    int fd = accept4(serve->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    struct dl_err err;
    if (fd < 0) {
        return;
    }
    *client = (struct client){.since_ns = now_ns, .state = serve->tls == NULL ? CLIENT_READING : CLIENT_SECURING};
    if (wk_stream_accept(&client->stream, fd, serve->tls, &err) != DL_OK) {
        close_client(client);
    }
}

static short wanted_events(const struct client *client)
{
    switch (client->state) {
    case CLIENT_FREE: return 0;
    case CLIENT_SECURING:
    case CLIENT_READING: return client->stream.wants_write ? POLLOUT : POLLIN;
    case CLIENT_WAITING: return POLLIN;
    case CLIENT_SENDING: return POLLOUT;
    }
    return 0;
}

static void *serve_main(void *argument)
{
    struct wk_serve *serve = argument;
    (void)pthread_setname_np(pthread_self(), "diloco-serve");
    int priority = getpriority(PRIO_PROCESS, 0);
    (void)setpriority(PRIO_PROCESS, 0, priority + WK_SERVE_NICE); /* On Linux: of this thread alone, as is the next. */
    (void)sched_setscheduler(0, SCHED_BATCH, &(struct sched_param){0});
    while (!__atomic_load_n(&serve->stop, __ATOMIC_ACQUIRE)) {
        struct pollfd polls[WK_SERVE_CLIENTS + 2];
        uint32_t here = 0;
        for (size_t i = 0; i < WK_SERVE_CLIENTS; i++) {
            const struct client *client = &serve->clients[i];
            here += client->state != CLIENT_FREE;
            polls[i] = (struct pollfd){.fd = client->state == CLIENT_FREE ? -1 : client->stream.fd,
                                       .events = wanted_events(client)};
        }
        polls[WK_SERVE_CLIENTS] =
            (struct pollfd){.fd = here < WK_SERVE_CLIENTS ? serve->listen_fd : -1, .events = POLLIN};
        polls[WK_SERVE_CLIENTS + 1] = (struct pollfd){.fd = serve->wake_fd, .events = POLLIN};
        int ready = poll(polls, WK_SERVE_CLIENTS + 2, here > 0 || serve->snapshot != NULL ? LOOK_MS : -1);
        int64_t now_ns = dl_now_ns();
        if (ready > 0 && polls[WK_SERVE_CLIENTS + 1].revents != 0) {
            uint64_t count;
            ssize_t got = read(serve->wake_fd, &count, sizeof count);
            (void)got;
        }
        look_at_snapshot(serve, now_ns);
        for (size_t i = 0; i < WK_SERVE_CLIENTS; i++) {
            serve_client(serve, &serve->clients[i], ready > 0 && polls[i].fd >= 0 ? polls[i].revents : 0, now_ns);
        }
        if (ready > 0 && polls[WK_SERVE_CLIENTS].revents != 0) {
            accept_client(serve, now_ns);
        }
    }
    return NULL;
}

/* --- beginning ---------------------------------------------------------------------------------------------------- */

static enum dl_rc start_thread(struct wk_serve *serve, struct dl_err *err)
{
    sigset_t all, before;
    sigfillset(&all); /* Signals are for the program's own threads. */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int status = pthread_create(&serve->thread, NULL, serve_main, serve);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    serve->started = status == 0;
    return status == 0 ? DL_OK : dl_err_errno(err, DL_ENOMEM, status, "serve state: start its thread");
}

static enum dl_rc begin(struct wk_serve *serve, int connected_fd, struct dl_err *err)
{
    struct sockaddr_storage own = {0};
    socklen_t size = sizeof own;
    if (getsockname(connected_fd, (struct sockaddr *)&own, &size) != 0 ||
        (own.ss_family != AF_INET && own.ss_family != AF_INET6)) {
        return dl_err_set(err, DL_ENET, "serve state: the connection to the syncer has no address");
    }
    enum dl_rc rc = DL_OK;
    if (serve->listen_fd < 0) {
        struct sockaddr_storage any_port = own;
        if (own.ss_family == AF_INET) {
            ((struct sockaddr_in *)&any_port)->sin_port = 0;
        } else {
            ((struct sockaddr_in6 *)&any_port)->sin6_port = 0;
        }
        rc = wk_serve_listen_at((struct sockaddr *)&any_port, size, &serve->listen_fd, err);
    }
    rc = rc == DL_OK ? wk_serve_tell(serve->listen_fd, serve->address, (struct sockaddr *)&own, size, serve->told, err)
                     : rc;
    return rc == DL_OK ? start_thread(serve, err) : rc;
}

bool wk_serve_begin(struct wk_serve *serve, int connected_fd, char address[DL_WIRE_ADDRESS_MAX])
{
    struct dl_err err;
    if (!serve->started && !serve->failed) {
        serve->failed = begin(serve, connected_fd, &err) != DL_OK;
        if (serve->failed) {
            say(serve, 2, "%s; joiners get nothing from this learner", err.text);
        } else {
            say(serve, 1, "serves its state at %s", serve->told);
        }
    }
    if (serve->started) {
        memcpy(address, serve->told, sizeof serve->told);
    }
    return serve->started;
}

/* --- life -------------------------------------------------------------------------------------------------------- */

static enum dl_rc fill(struct wk_serve *serve, const struct wk_serve_config *config, struct dl_err *err)
{
    serve->listen = config->listen == NULL ? NULL : strdup(config->listen);
    serve->address = config->address == NULL ? NULL : strdup(config->address);
    if ((serve->listen == NULL) != (config->listen == NULL) || (serve->address == NULL) != (config->address == NULL)) {
        return dl_err_set(err, DL_ENOMEM, "serve state: no memory");
    }
    serve->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (serve->wake_fd < 0) {
        return dl_err_errno(err, DL_ENOMEM, errno, "serve state: no file descriptor for its wake-up");
    }
    enum dl_rc rc = DL_OK;
    if (config->cert_file != NULL) {
        rc = wk_tls_server_new(config->cert_file, config->key_file, &serve->tls, err);
    }
    if (rc == DL_OK && serve->address != NULL) {
        rc = wk_serve_check_address(serve->address, err);
    }
    return rc == DL_OK && serve->listen != NULL ? wk_serve_listen(serve->listen, &serve->listen_fd, err) : rc;
}

enum dl_rc wk_serve_new(const struct wk_serve_config *config, struct wk_serve **out, struct dl_err *err)
{
    struct wk_serve *serve = calloc(1, sizeof *serve);
    if (serve == NULL) {
        return dl_err_set(err, DL_ENOMEM, "serve state: no memory");
    }
    serve->listen_fd = serve->wake_fd = -1;
    serve->token = config->token;
    serve->log = config->log;
    serve->log_context = config->log_context;
    serve->wanted = config->wanted;
    serve->wanted_context = config->wanted_context;
    for (size_t i = 0; i < WK_SERVE_CLIENTS; i++) {
        serve->clients[i].stream.fd = -1;
    }
    ssize_t got = getrandom(&serve->next_id, sizeof serve->next_id, 0); /* Ids of two processes must not meet. */
    enum dl_rc rc = got == (ssize_t)sizeof serve->next_id ? fill(serve, config, err)
                                                          : dl_err_errno(err, DL_EIO, errno, "serve state: draw an id");
    if (rc != DL_OK) {
        wk_serve_free(serve);
        return rc;
    }
    *out = serve;
    return DL_OK;
}

void wk_serve_free(struct wk_serve *serve)
{
    if (serve == NULL) {
        return;
    }
    if (serve->started) {
        __atomic_store_n(&serve->stop, true, __ATOMIC_RELEASE);
        wake(serve);
        pthread_join(serve->thread, NULL);
    }
    for (size_t i = 0; i < WK_SERVE_CLIENTS; i++) {
        close_client(&serve->clients[i]);
    }
    wk_snapshot_free(serve->snapshot);
    SSL_CTX_free(serve->tls);
    if (serve->listen_fd >= 0) {
        close(serve->listen_fd);
    }
    if (serve->wake_fd >= 0) {
        close(serve->wake_fd);
    }
    free(serve->listen);
    free(serve->address);
    free(serve);
}
