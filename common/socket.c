#include "common/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>

#define LOOPBACK_NET 127

bool dl_socket_is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *v4 = (const struct sockaddr_in *)(const void *)address;
        return ntohl(v4->sin_addr.s_addr) >> 24 == LOOPBACK_NET;
    }
    if (address->sa_family == AF_INET6) {
        const struct in6_addr *v6 = &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr;
        return IN6_IS_ADDR_LOOPBACK(v6) || (IN6_IS_ADDR_V4MAPPED(v6) && v6->s6_addr[12] == LOOPBACK_NET);
    }
    return false;
}

void dl_socket_prepare(int fd, const struct sockaddr *address)
{
    static const char algorithm[] = "reno";
    if (dl_socket_is_loopback(address)) {
        (void)setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, algorithm, sizeof algorithm - 1);
    }
}

void dl_socket_wish(int fd, int level, int name, int value)
{
    (void)setsockopt(fd, level, name, &value, sizeof value);
}
