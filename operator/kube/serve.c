#include "operator/kube/serve.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/mem.h"

#define BACKLOG 32

struct connection {
    TAILQ_ENTRY(connection) all;
    struct op_serve *serve;
    struct op_fd fd;
    struct op_timer bound;
    char head[OP_SERVE_HEAD_MAX + 1];
    size_t head_size;
    struct dl_buf out; /* The whole answer. */
    size_t sent;
};

struct op_serve {
    struct op_loop *loop;
    void (*handle)(void *context, const char *path, struct op_answer *answer);
    void *context;
    struct op_fd listener;
    TAILQ_HEAD(connection_list, connection) all;
    uint32_t count;
};

static void hang_up(struct connection *connection)
{
    struct op_serve *serve = connection->serve;
    op_fd_remove(serve->loop, &connection->fd);
    op_timer_stop(serve->loop, &connection->bound);
    close(connection->fd.fd);
    TAILQ_REMOVE(&serve->all, connection, all);
    if (serve->count-- == OP_SERVE_CONNECTIONS_MAX) {
        serve->listener.events = POLLIN;
    }
    dl_buf_release(&connection->out);
    free(connection);
}

static void on_connection_bound(void *context, int64_t now_ns)
{
    (void)now_ns;
    hang_up(context);
}

static const char *status_text(int status)
{
    switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 431: return "Request Header Fields Too Large";
    case 503: return "Service Unavailable";
    default: return "Error";
    }
}

static void answer_with(struct connection *connection, const struct op_answer *answer, bool with_body)
{
    dl_buf_printf(&connection->out,
                  "HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\nConnection: close\r\n\r\n",
                  answer->status, status_text(answer->status), answer->content_type, answer->body.size);
    if (with_body && answer->body.size > 0) {
        dl_buf_append(&connection->out, answer->body.data, answer->body.size);
    }
    connection->fd.events = POLLOUT;
}

static void refuse(struct connection *connection, int status)
{
    struct op_answer answer = {.status = status, .content_type = "text/plain; charset=utf-8"};
    answer_with(connection, &answer, false);
}

/* The head is complete: "GET /path?query HTTP/1.1". */
static void answer_head(struct connection *connection)
{
    struct op_serve *serve = connection->serve;
    char *method_end = strchr(connection->head, ' ');
    char *line_end = strpbrk(connection->head, "\r\n");
    if (method_end == NULL || line_end == NULL || method_end > line_end || method_end[1] != '/') {
        refuse(connection, 400);
        return;
    }
    *method_end = 0;
    char *path = method_end + 1;
    path[strcspn(path, " ?\r\n")] = 0;
    bool is_head = strcmp(connection->head, "HEAD") == 0;
    if (!is_head && strcmp(connection->head, "GET") != 0) {
        refuse(connection, 405);
        return;
    }
    struct op_answer answer = {.status = 200, .content_type = "text/plain; charset=utf-8"};
    dl_buf_init(&answer.body, OP_SERVE_BODY_MAX);
    serve->handle(serve->context, path, &answer);
    if (answer.body.failed) {
        refuse(connection, 503);
    } else {
        answer_with(connection, &answer, !is_head);
    }
    dl_buf_release(&answer.body);
}

/* False: the connection is over. */
static bool read_head(struct connection *connection)
{
    ssize_t got =
        read(connection->fd.fd, connection->head + connection->head_size, OP_SERVE_HEAD_MAX - connection->head_size);
    if (got <= 0) {
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    }
    connection->head_size += (size_t)got;
    connection->head[connection->head_size] = 0;
    if (strstr(connection->head, "\r\n\r\n") != NULL || strstr(connection->head, "\n\n") != NULL) {
        answer_head(connection);
    } else if (connection->head_size == OP_SERVE_HEAD_MAX) {
        refuse(connection, 431);
    }
    return true;
}

static bool write_answer(struct connection *connection)
{
    struct dl_buf *out = &connection->out;
    if (out->failed) {
        return false;
    }
    ssize_t put = send(connection->fd.fd, out->data + connection->sent, out->size - connection->sent, MSG_NOSIGNAL);
    if (put < 0) {
        return errno == EAGAIN || errno == EINTR;
    }
    connection->sent += (size_t)put;
    if (connection->sent == out->size) {
        shutdown(connection->fd.fd, SHUT_WR);
        return false;
    }
    return true;
}

static void on_connection(void *context, short revents, int64_t now_ns)
{
    struct connection *connection = context;
    (void)revents;
    (void)now_ns;
    bool goes_on = connection->fd.events == POLLIN ? read_head(connection) : write_answer(connection);
    if (!goes_on) {
        hang_up(connection);
    }
}

static void on_listener(void *context, short revents, int64_t now_ns)
{
    struct op_serve *serve = context;
    (void)revents;
    int fd = accept4(serve->listener.fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        return;
    }
    struct connection *connection = calloc(1, sizeof *connection);
    if (connection == NULL) {
        close(fd);
        return;
    }
    connection->serve = serve;
    connection->fd = (struct op_fd){.fd = fd, .events = POLLIN, .ready = on_connection, .context = connection};
    connection->bound = (struct op_timer){.fire = on_connection_bound, .context = connection};
    dl_buf_init(&connection->out, OP_SERVE_BODY_MAX + OP_SERVE_HEAD_MAX);
    if (op_fd_add(serve->loop, &connection->fd, NULL) != DL_OK) {
        close(fd);
        free(connection);
        return;
    }
    op_timer_start(serve->loop, &connection->bound, now_ns + OP_SERVE_DEADLINE_MS * DL_NS_PER_MS);
    TAILQ_INSERT_TAIL(&serve->all, connection, all);
    if (++serve->count == OP_SERVE_CONNECTIONS_MAX) {
        serve->listener.events = 0; /* The others wait in the backlog. */
    }
}

/* "host:port", ":port", "[v6]:port" into host (may be "") and port. */
static bool split_address(const char *address, char host[static 256], char port[static 16])
{
    const char *colon = strrchr(address, ':');
    if (colon == NULL || colon[1] == 0 || strlen(colon + 1) > 5 ||
        strspn(colon + 1, "0123456789") != strlen(colon + 1)) {
        return false;
    }
    size_t size = (size_t)(colon - address);
    bool is_bracketed = size >= 2 && address[0] == '[' && colon[-1] == ']';
    const char *start = is_bracketed ? address + 1 : address;
    size -= is_bracketed ? 2 : 0;
    if (size > 255 || (!is_bracketed && memchr(start, ':', size) != NULL)) {
        return false;
    }
    memcpy(host, start, size);
    host[size] = 0;
    snprintf(port, 16, "%s", colon + 1);
    return true;
}

static int listen_on(const struct addrinfo *info)
{
    int fd = socket(info->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    int on = 1, off = 0;
    if (fd < 0) {
        return -1;
    }
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (info->ai_family == AF_INET6) {
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    }
    if (bind(fd, info->ai_addr, info->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

static enum dl_rc open_listener(const char *address, int *out, struct dl_err *err)
{
    char host[256], port[16];
    if (!split_address(address, host, port)) {
        return dl_err_set(err, DL_EINVAL, "'%.80s' is not an address to listen on: host:port or :port", address);
    }
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE};
    struct addrinfo *list = NULL;
    int code = getaddrinfo(host[0] != 0 ? host : NULL, port, &hints, &list);
    if (code != 0) {
        return dl_err_set(err, DL_EINVAL, "cannot listen on '%.80s': %s", address, gai_strerror(code));
    }
    int fd = -1, saved = 0;
    static const int families[] = {AF_INET6, AF_INET}; /* A listener for both families, where there are both. */
    for (size_t i = 0; i < DL_COUNT_OF(families) && fd < 0; i++) {
        for (const struct addrinfo *info = list; info != NULL && fd < 0; info = info->ai_next) {
            if (info->ai_family == families[i]) {
                fd = listen_on(info);
                saved = fd < 0 ? errno : 0;
            }
        }
    }
    freeaddrinfo(list);
    if (fd < 0) {
        return dl_err_errno(err, DL_ENET, saved, "cannot listen on '%.80s'", address);
    }
    *out = fd;
    return DL_OK;
}

enum dl_rc op_serve_new(struct op_loop *loop, const char *address,
                        void (*handle)(void *context, const char *path, struct op_answer *answer), void *context,
                        struct op_serve **out, struct dl_err *err)
{
    struct op_serve *serve = calloc(1, sizeof *serve);
    if (serve == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to listen on '%.80s'", address);
    }
    serve->loop = loop;
    serve->handle = handle;
    serve->context = context;
    serve->listener = (struct op_fd){.fd = -1, .events = POLLIN, .ready = on_listener, .context = serve};
    TAILQ_INIT(&serve->all);
    enum dl_rc rc = open_listener(address, &serve->listener.fd, err);
    if (rc == DL_OK) {
        rc = op_fd_add(loop, &serve->listener, err);
    }
    if (rc != DL_OK) {
        op_serve_free(serve);
        return rc;
    }
    *out = serve;
    return DL_OK;
}

void op_serve_free(struct op_serve *serve)
{
    if (serve == NULL) {
        return;
    }
    while (!TAILQ_EMPTY(&serve->all)) {
        hang_up(TAILQ_FIRST(&serve->all));
    }
    op_fd_remove(serve->loop, &serve->listener);
    if (serve->listener.fd >= 0) {
        close(serve->listener.fd);
    }
    free(serve);
}

uint16_t op_serve_port(const struct op_serve *serve)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address;
    socklen_t size = sizeof address;
    memset(&address, 0, sizeof address);
    if (getsockname(serve->listener.fd, &address.any, &size) != 0) {
        return 0;
    }
    return ntohs(address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port);
}
