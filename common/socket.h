/* dl_socket: how sockets are set up that stay within a machine, and options that are only wishes.
 *
 * Congestion control is for networks. Where a system's own is BBR (`sysctl net.ipv4.tcp_congestion_control`) it paces: timers
 * release what a socket may send. Over loopback nothing is lost and nothing queues but in the receiver's memory, so that the
 * timers only cost: a float32 round on one machine took a third longer, the syncer's network thread half as much CPU again.
 * Pacing, once begun, stays with a socket, and it begins when a connection is established. So the algorithm is chosen before
 * that: by the side that connects, and for the other side on the socket that listens, of which accepted ones inherit it.
 *
 * Any thread, any layer; I/O. */
#ifndef DL_COMMON_SOCKET_H
#define DL_COMMON_SOCKET_H

#include <stdbool.h>
#include <sys/socket.h>

/* 127.0.0.0/8, ::1 and ::ffff:127.0.0.0/104: both ends are on this machine. */
bool dl_socket_is_loopback(const struct sockaddr *address);

/* For a TCP socket before connect() to `address`, or before listen() at it: where that is of loopback, congestion control that
 * does not pace ("reno", which every Linux has and every user may choose). Others are left as they are: the system's choice is
 * made for the network, and a socket that listens on all interfaces may be reached over one. A failure costs speed alone. */
void dl_socket_prepare(int fd, const struct sockaddr *address);

/* Sets an option that is for speed, or for noticing sooner that a peer is dead or a port free: without it things still work. */
void dl_socket_wish(int fd, int level, int name, int value);

#endif
