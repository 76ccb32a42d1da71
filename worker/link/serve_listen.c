#include "worker/link/serve_listen.h"

#include <errno.h>
#include <netdb.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/socket.h"

#define BACKLOG 16

/* host:port or [address]:port; a port alone, or none, is fine where it may be. */
static enum dl_rc split(const char *text, char *host, size_t host_bytes, char *port, size_t port_bytes,
                        struct dl_err *err)
{
    const char *at = text, *host_end, *port_at;
    if (text[0] == '[') {
        at = text + 1;
        host_end = strchr(at, ']');
        port_at = host_end != NULL && host_end[1] == ':' ? host_end + 2 : NULL;
        host_end = host_end != NULL && host_end[1] != 0 && host_end[1] != ':' ? NULL : host_end;
    } else {
        host_end = strrchr(at, ':');
        bool bare = host_end == NULL || strchr(at, ':') != host_end; /* An IPv6 address without brackets. */
        port_at = bare ? NULL : host_end + 1;
        host_end = bare ? at + strlen(at) : host_end;
    }
    size_t length = host_end == NULL ? host_bytes : (size_t)(host_end - at);
    size_t port_length = port_at == NULL ? 0 : strlen(port_at);
    bool digits = port_at == NULL || (port_length > 0 && strspn(port_at, "0123456789") == port_length);
    digits = digits && (port_at == NULL || (port_length <= 5 && strtoul(port_at, NULL, 10) <= UINT16_MAX));
    if (length >= host_bytes || !digits || port_length >= port_bytes || strpbrk(text, " \t\r\n/@,") != NULL) {
        return dl_err_set(err, DL_EINVAL, "serve state: \"%.100s\" is no address; give host:port", text);
    }
    memcpy(host, at, length);
    host[length] = 0;
    memcpy(port, port_at == NULL ? "" : port_at, port_length + 1);
    return DL_OK;
}

enum dl_rc wk_serve_listen_at(const struct sockaddr *address, socklen_t size, int *listen_fd, struct dl_err *err)
{
    int fd = socket(address->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return dl_err_errno(err, DL_ENET, errno, "serve state: open a socket");
    }
    dl_socket_wish(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    dl_socket_prepare(fd, address);
    if (bind(fd, address, size) != 0 || listen(fd, BACKLOG) != 0) {
        enum dl_rc rc = dl_err_errno(err, DL_ENET, errno, "serve state: listen");
        close(fd);
        return rc;
    }
    *listen_fd = fd;
    return DL_OK;
}

enum dl_rc wk_serve_listen(const char *text, int *listen_fd, struct dl_err *err)
{
    char host[DL_WIRE_ADDRESS_MAX], port[8];
    enum dl_rc rc = split(text, host, sizeof host, port, sizeof port, err);
    if (rc != DL_OK) {
        return rc;
    }
    struct addrinfo hints = {.ai_flags = AI_PASSIVE | AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
    struct addrinfo *found = NULL;
    bool any = host[0] == 0 || strcmp(host, "*") == 0;
    int status = getaddrinfo(any ? NULL : host, port[0] == 0 ? "0" : port, &hints, &found);
    if (status != 0) {
        return dl_err_set(err, DL_EINVAL,
                          "serve state at \"%.100s\": %s (give an address in numbers, or *, and a port)", text,
                          gai_strerror(status));
    }
    rc = wk_serve_listen_at(found->ai_addr, found->ai_addrlen, listen_fd, err);
    freeaddrinfo(found);
    return rc;
}

enum dl_rc wk_serve_check_address(const char *address, struct dl_err *err)
{
    char host[DL_WIRE_ADDRESS_MAX], port[8];
    return split(address, host, sizeof host, port, sizeof port, err);
}

enum dl_rc wk_serve_tell(int listen_fd, const char *address, const struct sockaddr *own, socklen_t own_size,
                         char told[DL_WIRE_ADDRESS_MAX], struct dl_err *err)
{
    struct sockaddr_storage bound;
    socklen_t bound_size = sizeof bound;
    char host[DL_WIRE_ADDRESS_MAX] = "", port[8] = "", own_host[NI_MAXHOST], bound_port[NI_MAXSERV];
    if (getsockname(listen_fd, (struct sockaddr *)&bound, &bound_size) != 0 ||
        getnameinfo((struct sockaddr *)&bound, bound_size, NULL, 0, bound_port, sizeof bound_port, NI_NUMERICSERV) !=
            0 ||
        getnameinfo(own, own_size, own_host, sizeof own_host, NULL, 0, NI_NUMERICHOST) != 0) {
        return dl_err_set(err, DL_ENET, "serve state: this machine's own address cannot be told");
    }
    if (address != NULL) {
        enum dl_rc rc = split(address, host, sizeof host, port, sizeof port, err);
        if (rc != DL_OK) {
            return rc;
        }
    }
    const char *name = host[0] == 0 ? own_host : host;
    bool bare = strchr(name, ':') != NULL;
    int length = snprintf(told, DL_WIRE_ADDRESS_MAX, "%s%s%s:%s", bare ? "[" : "", name, bare ? "]" : "",
                          port[0] == 0 ? bound_port : port);
    return length < DL_WIRE_ADDRESS_MAX ? DL_OK : dl_err_set(err, DL_EINVAL, "serve state: the address is too long");
}
