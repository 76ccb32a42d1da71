#include "syncer/server/listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include "common/atomic_file.h"
#include "common/mem.h"
#include "common/socket.h"

#define BACKLOG 512
#define HOST_MAX 100
#define PORT_TEXT_MAX 6

/* With every descriptor in use, a waiting connection would wake the loop for ever: this spare one is given up to take
 * the connection and close it. */
static int spare = -1;

static void keep_spare(void)
{
    if (spare < 0) {
        spare = open("/dev/null", O_RDONLY | O_CLOEXEC);
    }
}

static void refuse_one(int listen_fd)
{
    if (spare >= 0) {
        close(spare);
        spare = -1;
        int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
        if (fd >= 0) {
            close(fd);
        }
    }
    keep_spare();
}

/* Splits at the last colon; brackets around an IPv6 address go. */
static enum dl_rc split(const char *text, char host[HOST_MAX], char port[PORT_TEXT_MAX], struct dl_err *err)
{
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon == text || strlen(colon + 1) == 0 || strlen(colon + 1) >= PORT_TEXT_MAX ||
        strspn(colon + 1, "0123456789") != strlen(colon + 1) || strtoul(colon + 1, NULL, 10) > UINT16_MAX) {
        return dl_err_set(err, DL_EINVAL, "listen address '%s': write HOST:PORT, port 0..65535 (0: any free one)",
                          text);
    }
    size_t length = (size_t)(colon - text);
    if (text[0] == '[' && text[length - 1] == ']') {
        text++;
        length -= 2;
    } else if (memchr(text, ':', length) != NULL) {
        return dl_err_set(err, DL_EINVAL, "listen address '%s': write an IPv6 address as [ADDRESS]:PORT", text);
    }
    if (length == 0 || length >= HOST_MAX) {
        return dl_err_set(err, DL_EINVAL, "listen address '%s': the host is empty or too long", text);
    }
    memcpy(host, text, length);
    host[length] = '\0';
    snprintf(port, PORT_TEXT_MAX, "%s", colon + 1);
    return DL_OK;
}

static enum dl_rc bind_one(const struct addrinfo *info, bool all, const char *text, int *out, struct dl_err *err)
{
    int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return dl_err_errno(err, DL_EIO, errno, "making a socket for %s", text);
    }
    dl_socket_wish(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    if (info->ai_family == AF_INET6) {
        dl_socket_wish(fd, IPPROTO_IPV6, IPV6_V6ONLY, !all);
    }
    dl_socket_prepare(fd, info->ai_addr);
    if (bind(fd, info->ai_addr, info->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
        int error = errno;
        const char *advice = error == EADDRINUSE      ? " (another process has this port: choose another, or 0)"
                             : error == EADDRNOTAVAIL ? " (no interface of this machine has this address)"
                             : error == EACCES        ? " (ports below 1024 need a privilege)"
                                                      : "";
        close(fd);
        return dl_err_errno(err, DL_EINVAL, error, "listening on %s%s", text, advice);
    }
    *out = fd;
    return DL_OK;
}

/* What the kernel says the socket is bound to. */
static enum dl_rc name_of(int fd, bool all, char address[SY_ADDRESS_MAX], struct dl_err *err)
{
    struct sockaddr_storage bound;
    socklen_t size = sizeof bound;
    char host[INET6_ADDRSTRLEN];
    char port[PORT_TEXT_MAX];
    if (getsockname(fd, (struct sockaddr *)&bound, &size) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "asking for the listening address");
    }
    int failed = getnameinfo((const struct sockaddr *)&bound, size, host, sizeof host, port, sizeof port,
                             NI_NUMERICHOST | NI_NUMERICSERV);
    if (failed != 0) {
        return dl_err_set(err, DL_EIO, "naming the listening address: %s", gai_strerror(failed));
    }
    bool v6 = strchr(host, ':') != NULL && !all;
    snprintf(address, SY_ADDRESS_MAX, "%s%s%s:%s", v6 ? "[" : "", all ? "*" : host, v6 ? "]" : "", port);
    return DL_OK;
}

enum dl_rc sy_listen(const char *text, int *fd, char address[SY_ADDRESS_MAX], struct dl_err *err)
{
    char host[HOST_MAX];
    char port[PORT_TEXT_MAX];
    enum dl_rc rc = split(text, host, port, err);
    if (rc != DL_OK) {
        return rc;
    }
    keep_spare();
    bool all = strcmp(host, "*") == 0;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    hints.ai_family = all ? AF_INET6 : AF_UNSPEC;
    int failed = getaddrinfo(all ? NULL : host, port, &hints, &found);
    if (failed != 0) {
        return dl_err_set(err, DL_EINVAL, "listen address '%s': %s", text, gai_strerror(failed));
    }
    rc = bind_one(found, all, text, fd, err);
    freeaddrinfo(found);
    if (rc == DL_EIO && all) { /* A machine without IPv6. */
        hints.ai_family = AF_INET;
        failed = getaddrinfo(NULL, port, &hints, &found);
        if (failed == 0) {
            rc = bind_one(found, all, text, fd, err);
            freeaddrinfo(found);
        }
    }
    return rc == DL_OK ? name_of(*fd, all, address, err) : rc;
}

enum dl_rc sy_listen_accept(int listen_fd, int *fd, struct dl_err *err)
{
    int accepted = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (accepted < 0) {
        if (errno == EMFILE || errno == ENFILE) {
            refuse_one(listen_fd);
            return dl_err_errno(err, DL_ENOMEM, errno, "accepting a connection");
        }
        return DL_AGAIN;
    }
    dl_socket_wish(accepted, IPPROTO_TCP, TCP_NODELAY, 1);
    dl_socket_wish(accepted, SOL_SOCKET, SO_KEEPALIVE, 1);
    *fd = accepted;
    return DL_OK;
}

enum dl_rc sy_write_port_file(const char *path, const char *text, struct dl_err *err)
{
    struct dl_atomic_file file = {.fd = -1};
    enum dl_rc rc = dl_atomic_file_open(&file, path, err);
    if (rc == DL_OK) {
        rc = dl_atomic_file_write(&file, text, strlen(text), err);
    }
    if (rc == DL_OK) {
        rc = dl_atomic_file_write(&file, "\n", 1, err);
    }
    if (rc == DL_OK) {
        rc = dl_atomic_file_commit(&file, err);
    }
    if (rc != DL_OK) {
        dl_atomic_file_abandon(&file);
        err->rc = DL_EINVAL; /* Whatever it is, starting again will not help. */
        return dl_err_wrap(err, "port file");
    }
    return DL_OK;
}
