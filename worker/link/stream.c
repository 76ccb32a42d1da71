#include "worker/link/stream.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/socket.h"

#define KEEPALIVE_IDLE_S 30
#define KEEPALIVE_INTERVAL_S 10
#define KEEPALIVE_PROBES 3
#define READ_AHEAD_BYTES ((size_t)128 * 1024)

/* Takes the oldest error of OpenSSL's queue, and empties it. */
static enum dl_rc tls_error(struct dl_err *err, enum dl_rc rc, const char *what)
{
    unsigned long code = ERR_get_error();
    char text[200] = "connection closed";
    if (code != 0) {
        ERR_error_string_n(code, text, sizeof text);
    }
    ERR_clear_error();
    return dl_err_set(err, rc, "%s: %s", what, text);
}

enum dl_rc wk_tls_new(const char *ca_file, const char *cert_file, const char *key_file, SSL_CTX **out,
                      struct dl_err *err)
{
    SSL_CTX *tls = SSL_CTX_new(TLS_client_method());
    if (tls == NULL) {
        return tls_error(err, DL_ENOMEM, "prepare TLS");
    }
    enum dl_rc rc = DL_OK;
    SSL_CTX_set_verify(tls, SSL_VERIFY_PEER, NULL);
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    SSL_CTX_set_read_ahead(tls, 1); /* Several records a system call, instead of two calls a record. */
    SSL_CTX_set_default_read_buffer_len(tls, READ_AHEAD_BYTES);
    if (SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION) != 1) {
        rc = tls_error(err, DL_EUNSUPPORTED, "prepare TLS 1.3");
    } else if (ca_file != NULL && SSL_CTX_load_verify_locations(tls, ca_file, NULL) != 1) {
        rc = tls_error(err, DL_EINVAL, "read certificate authorities");
        dl_err_wrap(err, "%s", ca_file);
    } else if (ca_file == NULL && SSL_CTX_set_default_verify_paths(tls) != 1) {
        rc = tls_error(err, DL_EINVAL, "read the system's certificate authorities");
    } else if (cert_file != NULL && SSL_CTX_use_certificate_chain_file(tls, cert_file) != 1) {
        rc = tls_error(err, DL_EINVAL, "read client certificate");
        dl_err_wrap(err, "%s", cert_file);
    } else if (cert_file != NULL && (SSL_CTX_use_PrivateKey_file(tls, key_file, SSL_FILETYPE_PEM) != 1 ||
                                     SSL_CTX_check_private_key(tls) != 1)) {
        rc = tls_error(err, DL_EINVAL, "read the client certificate's key");
        dl_err_wrap(err, "%s", key_file);
    }
    if (rc != DL_OK) {
        SSL_CTX_free(tls);
        return rc;
    }
    *out = tls;
    return DL_OK;
}

enum dl_rc wk_tls_server_new(const char *cert_file, const char *key_file, SSL_CTX **out, struct dl_err *err)
{
    SSL_CTX *tls = SSL_CTX_new(TLS_server_method());
    if (tls == NULL) {
        return tls_error(err, DL_ENOMEM, "prepare TLS");
    }
    enum dl_rc rc = DL_OK;
    SSL_CTX_set_mode(tls, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
    if (SSL_CTX_set_min_proto_version(tls, TLS1_3_VERSION) != 1) {
        rc = tls_error(err, DL_EUNSUPPORTED, "prepare TLS 1.3");
    } else if (SSL_CTX_use_certificate_chain_file(tls, cert_file) != 1) {
        rc = tls_error(err, DL_EINVAL, "read certificate");
        dl_err_wrap(err, "%s", cert_file);
    } else if (SSL_CTX_use_PrivateKey_file(tls, key_file, SSL_FILETYPE_PEM) != 1 ||
               SSL_CTX_check_private_key(tls) != 1) {
        rc = tls_error(err, DL_EINVAL, "read the certificate's key");
        dl_err_wrap(err, "%s", key_file);
    }
    if (rc != DL_OK) {
        SSL_CTX_free(tls);
        return rc;
    }
    *out = tls;
    return DL_OK;
}

static bool is_address(const char *host)
{
    uint8_t address[16];
    return inet_pton(AF_INET, host, address) == 1 || inet_pton(AF_INET6, host, address) == 1;
}

static enum dl_rc begin_tls(struct wk_stream *stream, SSL_CTX *tls, const char *host, struct dl_err *err)
{
    stream->ssl = SSL_new(tls);
    if (stream->ssl == NULL || SSL_set_fd(stream->ssl, stream->fd) != 1) {
        return tls_error(err, DL_ENOMEM, "begin TLS");
    }
    int ok;
    if (is_address(host)) {
        ok = X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(stream->ssl), host);
    } else {
        ok = SSL_set1_host(stream->ssl, host) == 1 && SSL_set_tlsext_host_name(stream->ssl, host) == 1;
    }
    if (ok != 1) {
        return tls_error(err, DL_EINVAL, "set the host name to verify");
    }
    SSL_set_connect_state(stream->ssl);
    return DL_OK;
}

enum dl_rc wk_stream_connect(struct wk_stream *stream, struct addrinfo **next, const char *host, const char *port,
                             struct dl_err *err)
{
    while (*next != NULL) {
        const struct addrinfo *address = *next;
        *next = address->ai_next;
        int fd = socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, address->ai_protocol);
        if (fd < 0) {
            dl_err_errno(err, DL_ENET, errno, "open a socket for %s", host);
            continue;
        }
        dl_socket_prepare(fd, address->ai_addr);
        if (connect(fd, address->ai_addr, address->ai_addrlen) != 0 && errno != EINPROGRESS) {
            dl_err_errno(err, DL_ENET, errno, "connect to %s:%s", host, port);
            close(fd);
            continue;
        }
        *stream = (struct wk_stream){.fd = fd};
        return DL_OK; /* Also when it succeeded at once: the socket is writable then. */
    }
    return DL_ENET;
}

enum dl_rc wk_stream_connected(struct wk_stream *stream, const char *host, const char *port, struct dl_err *err)
{
    int error = 0;
    socklen_t size = sizeof error;
    if (getsockopt(stream->fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0 || error != 0) {
        error = error == 0 ? errno : error;
        wk_stream_close(stream);
        return dl_err_errno(err, DL_ENET, error, "connect to %s:%s", host, port);
    }
    return DL_OK;
}

enum dl_rc wk_stream_open(struct wk_stream *stream, int fd, SSL_CTX *tls, const char *host, struct dl_err *err)
{
    *stream = (struct wk_stream){.fd = fd};
    dl_socket_wish(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    dl_socket_wish(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
    dl_socket_wish(fd, IPPROTO_TCP, TCP_KEEPIDLE, KEEPALIVE_IDLE_S);
    dl_socket_wish(fd, IPPROTO_TCP, TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S);
    dl_socket_wish(fd, IPPROTO_TCP, TCP_KEEPCNT, KEEPALIVE_PROBES);
    return tls == NULL ? DL_OK : begin_tls(stream, tls, host, err);
}

enum dl_rc wk_stream_accept(struct wk_stream *stream, int fd, SSL_CTX *tls, struct dl_err *err)
{
    enum dl_rc rc = wk_stream_open(stream, fd, NULL, "", err);
    if (rc != DL_OK || tls == NULL) {
        return rc;
    }
    stream->ssl = SSL_new(tls);
    if (stream->ssl == NULL || SSL_set_fd(stream->ssl, stream->fd) != 1) {
        return tls_error(err, DL_ENOMEM, "begin TLS");
    }
    SSL_set_accept_state(stream->ssl);
    return DL_OK;
}

void wk_stream_close(struct wk_stream *stream)
{
    SSL_free(stream->ssl);
    if (stream->fd >= 0) {
        close(stream->fd);
    }
    ERR_clear_error();
    *stream = (struct wk_stream){.fd = -1};
}

/* What a TLS call that did not succeed means. */
static enum dl_rc tls_result(struct wk_stream *stream, int returned, const char *what, struct dl_err *err)
{
    int system_error = errno;
    switch (SSL_get_error(stream->ssl, returned)) {
    case SSL_ERROR_WANT_READ: return DL_AGAIN;
    case SSL_ERROR_WANT_WRITE: stream->wants_write = true; return DL_AGAIN;
    case SSL_ERROR_ZERO_RETURN: return dl_err_set(err, DL_ENET, "the peer closed the connection");
    case SSL_ERROR_SYSCALL:
        if (ERR_peek_error() == 0 && system_error != 0) {
            return dl_err_errno(err, DL_ENET, system_error, "%s", what);
        }
        break;
    default: break;
    }
    long verified = SSL_get_verify_result(stream->ssl);
    enum dl_rc rc = tls_error(err, DL_ENET, what);
    if (verified != X509_V_OK) {
        dl_err_wrap(err, "the server's certificate was not accepted: %s", X509_verify_cert_error_string(verified));
    }
    return rc;
}

enum dl_rc wk_stream_handshake(struct wk_stream *stream, struct dl_err *err)
{
    if (stream->ssl == NULL) {
        return DL_OK;
    }
    stream->wants_write = false;
    ERR_clear_error();
    int returned = SSL_do_handshake(stream->ssl);
    return returned == 1 ? DL_OK : tls_result(stream, returned, "TLS handshake", err);
}

static enum dl_rc tls_read(struct wk_stream *stream, uint8_t *at, size_t bytes, size_t *got, struct dl_err *err)
{
    stream->wants_write = false;
    ERR_clear_error();
    errno = 0;
    int returned = SSL_read_ex(stream->ssl, at, bytes, got);
    return returned == 1 ? DL_OK : tls_result(stream, returned, "receive", err);
}

enum dl_rc wk_stream_read(struct wk_stream *stream, uint8_t *first, size_t first_bytes, uint8_t *second,
                          size_t second_bytes, size_t *got, struct dl_err *err)
{
    if (stream->ssl != NULL) {
        return first_bytes > 0 ? tls_read(stream, first, first_bytes, got, err)
                               : tls_read(stream, second, second_bytes, got, err);
    }
    struct iovec parts[2] = {{first, first_bytes}, {second, second_bytes}};
    bool skip = first_bytes == 0;
    ssize_t received = readv(stream->fd, parts + skip, 2 - skip);
    if (received > 0) {
        *got = (size_t)received;
        return DL_OK;
    }
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        return DL_AGAIN;
    }
    return received == 0 ? dl_err_set(err, DL_ENET, "the peer closed the connection")
                         : dl_err_errno(err, DL_ENET, errno, "receive");
}

void wk_stream_wake_at(struct wk_stream *stream, size_t bytes)
{
    int low_water = bytes <= 1 ? 0 : (int)DL_MIN(bytes, (size_t)INT_MAX);
    if (stream->fd >= 0 && low_water != stream->low_water) {
        stream->low_water = low_water;
        dl_socket_wish(stream->fd, SOL_SOCKET, SO_RCVLOWAT, DL_MAX(low_water, 1));
    }
}

static enum dl_rc tls_write(struct wk_stream *stream, const uint8_t *bytes, size_t size, size_t *sent,
                            struct dl_err *err)
{
    stream->wants_write = false;
    ERR_clear_error();
    errno = 0;
    int returned = SSL_write_ex(stream->ssl, bytes, size, sent);
    return returned == 1 ? DL_OK : tls_result(stream, returned, "send", err);
}

enum dl_rc wk_stream_write_two(struct wk_stream *stream, const uint8_t *first, size_t first_bytes,
                               const uint8_t *second, size_t second_bytes, size_t *sent, struct dl_err *err)
{
    if (stream->ssl != NULL) {
        return first_bytes > 0 ? tls_write(stream, first, first_bytes, sent, err)
                               : tls_write(stream, second, second_bytes, sent, err);
    }
    struct iovec parts[2] = {{(void *)first, first_bytes}, {(void *)second, second_bytes}};
    size_t skip = first_bytes == 0 ? 1 : 0;
    struct msghdr message = {.msg_iov = parts + skip, .msg_iovlen = second_bytes == 0 ? 1 : 2 - skip};
    ssize_t written = sendmsg(stream->fd, &message, MSG_NOSIGNAL);
    if (written >= 0) {
        *sent = (size_t)written;
        return DL_OK;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
        return DL_AGAIN;
    }
    return dl_err_errno(err, DL_ENET, errno, "send");
}

enum dl_rc wk_stream_write(struct wk_stream *stream, const uint8_t *bytes, size_t size, size_t *sent,
                           struct dl_err *err)
{
    return wk_stream_write_two(stream, bytes, size, NULL, 0, sent, err);
}
