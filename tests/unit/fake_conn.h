/* fake_conn: a connection of the scripted syncer (fake_syncer.h), and what it is a part of: raw RFC 6455 over a blocking socket,
 * with or without TLS, written apart from the library that it tests.
 *
 * A thread a connection reads; whoever holds the syncer's lock writes. False from any function ends the connection. */
#ifndef DL_TESTS_FAKE_CONN_H
#define DL_TESTS_FAKE_CONN_H

#include <assert.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "common/layout.h"
#include "common/mem.h"
#include "common/wire.h"

#define FAKE_CONNS_MAX 512

struct fake_conn {
    struct fake_syncer *syncer;
    pthread_t thread;
    int fd; /* -1 once closed */
    SSL *ssl;
    bool used, welcomed, stop_sent;
    uint32_t role;
    uint64_t transfers;
    /* The push being received. */
    bool receiving;
    struct dl_wire_push push;
    uint8_t *push_bytes;
    uint64_t push_have;
    bool asked[DL_SPEC_FRAGMENTS_MAX];
    struct dl_wire_message out; /* What is said next; under the syncer's lock. */
};

struct fake_syncer {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t acceptor;
    int listener;
    uint16_t port;
    bool stopping;

    /* Settings; change them under the lock. */
    const char *token; /* NULL: any. */
    SSL_CTX *tls;
    uint32_t shard, shards, fragments;
    enum dl_layout_kind layout_kind;
    enum dl_codec compression, broadcast;
    enum dl_apply_mode apply;
    float alpha;
    uint32_t interval;
    uint32_t pull_within, update_within, wait_ms;
    uint32_t heartbeat_ms, timeout_ms;
    uint64_t epoch;
    uint64_t wrong_layout; /* Added to the layout's hash in WELCOME. */
    uint16_t refuse;       /* enum dl_refusal; 0: none. */
    bool turn_away;        /* Closes every connection at once. */
    bool mute;             /* Half-open: neither reads nor writes, and closes nothing. */
    bool split;            /* Messages go out in several frames, with pings between them. */
    bool no_result;
    bool drop_pushes;  /* Verdict late for everything. */
    uint32_t lease;    /* Positions in a lease; 0: requests are not answered. */
    int stop_result;   /* enum dl_stop_result: every connection says STOP after its next frame; -1: none. */
    uint32_t push_cut; /* Closes the connection after so many push chunks; 0: never. */

    /* State. */
    struct dl_layout *layout;
    float *theta[DL_SPEC_FRAGMENTS_MAX];
    uint64_t version[DL_SPEC_FRAGMENTS_MAX], round[DL_SPEC_FRAGMENTS_MAX];
    uint64_t next_round;
    struct fake_conn conns[FAKE_CONNS_MAX];
    uint32_t conn_count;

    /* Counted. */
    uint64_t hellos, metas, pushes_merged, nones, heartbeats, goodbyes, evaluations, cut, pongs, steps_merged,
        unauthorized;
    struct dl_wire_hello last_hello;
    struct dl_wire_meta last_meta;
    struct dl_wire_evaluation last_evaluation;
    uint64_t base_merged_twice; /* Must stay 0. */
    uint64_t leases;
    struct dl_wire_lease_request last_request;
    struct dl_wire_push last_push;
    uint64_t bytes_in, bytes_out;
    uint64_t chunks_plain, others_plain; /* Frames with a mask of zeros: chunks, and anything else. */
};

/* --- bytes and frames ----------------------------------------------------------------------------------------------- */

static inline bool fake_read(struct fake_conn *conn, void *out, size_t size)
{
    uint8_t *at = out;
    while (size > 0) {
        ssize_t got = conn->ssl != NULL ? SSL_read(conn->ssl, at, (int)DL_MIN(size, (size_t)1 << 20))
                                        : recv(conn->fd, at, size, 0);
        if (got <= 0) {
            return false;
        }
        at += got;
        size -= (size_t)got;
        __atomic_add_fetch(&conn->syncer->bytes_in, (uint64_t)got, __ATOMIC_RELAXED);
    }
    return true;
}

static inline bool fake_write(struct fake_conn *conn, const void *bytes, size_t size)
{
    const uint8_t *at = bytes;
    while (size > 0) {
        ssize_t sent = conn->ssl != NULL ? SSL_write(conn->ssl, at, (int)DL_MIN(size, (size_t)1 << 20))
                                         : send(conn->fd, at, size, MSG_NOSIGNAL);
        if (sent <= 0) {
            return false;
        }
        at += sent;
        size -= (size_t)sent;
        __atomic_add_fetch(&conn->syncer->bytes_out, (uint64_t)sent, __ATOMIC_RELAXED);
    }
    return true;
}

static inline bool fake_frame(struct fake_conn *conn, unsigned first, const uint8_t *payload, size_t size)
{
    uint8_t head[10] = {(uint8_t)first};
    size_t length = 2;
    if (size < 126) {
        head[1] = (uint8_t)size;
    } else if (size < 65536) {
        head[1] = 126;
        head[2] = (uint8_t)(size >> 8);
        head[3] = (uint8_t)size;
        length = 4;
    } else {
        head[1] = 127;
        for (int i = 0; i < 8; i++) {
            head[2 + i] = (uint8_t)((uint64_t)size >> (56 - 8 * i));
        }
        length = 10;
    }
    return fake_write(conn, head, length) && fake_write(conn, payload, size);
}

/* One message: in one frame, or cut at odd places with a ping in between. */
static inline bool fake_message_out(struct fake_conn *conn, const uint8_t *bytes, size_t size)
{
    if (!conn->syncer->split) {
        return fake_frame(conn, 0x82, bytes, size);
    }
    size_t piece = size / 3 + 1, done = 0;
    while (done < size) {
        size_t now = DL_MIN(piece, size - done);
        unsigned first = (done == 0 ? 0x02u : 0x00u) | (done + now == size ? 0x80u : 0u);
        if (!fake_frame(conn, first, bytes + done, now) || !fake_frame(conn, 0x89, (const uint8_t *)"ping", 4)) {
            return false;
        }
        done += now;
    }
    return true;
}

static inline bool fake_send(struct fake_conn *conn, const struct dl_wire_message *message)
{
    static __thread uint8_t bytes[DL_WIRE_HEADER_BYTES + DL_WIRE_CONTROL_PAYLOAD_MAX];
    size_t used = 0;
    struct dl_err err;
    enum dl_rc rc = dl_wire_encode(message, bytes, sizeof bytes, &used, &err);
    assert(rc == DL_OK);
    return fake_message_out(conn, bytes, used);
}

/* Reads one frame, which must be masked; `first` gets its first byte, `payload` what it says, unmasked. */
static inline bool fake_frame_in(struct fake_conn *conn, uint8_t *payload, size_t capacity, uint8_t *first,
                                 size_t *payload_bytes)
{
    uint8_t head[14];
    if (!fake_read(conn, head, 2) || (head[1] & 0x80) == 0) {
        return false;
    }
    uint64_t size = head[1] & 0x7f;
    if (size >= 126) {
        size_t width = size == 126 ? 2 : 8;
        if (!fake_read(conn, head + 2, width)) {
            return false;
        }
        size = 0;
        for (size_t i = 0; i < width; i++) {
            size = size << 8 | head[2 + i];
        }
    }
    uint8_t key[4];
    if (size > capacity || !fake_read(conn, key, 4) || !fake_read(conn, payload, size)) {
        return false;
    }
    for (uint64_t i = 0; i < size; i++) {
        payload[i] ^= key[i & 3];
    }
    struct dl_wire_header header;
    bool plain = key[0] == 0 && key[1] == 0 && key[2] == 0 && key[3] == 0;
    bool chunk = head[0] == 0x82 && size >= DL_WIRE_HEADER_BYTES &&
                 dl_wire_header_decode(payload, &header, NULL) == DL_OK && header.type == DL_WIRE_CHUNK;
    __atomic_add_fetch(&conn->syncer->chunks_plain, plain && chunk, __ATOMIC_RELAXED);
    __atomic_add_fetch(&conn->syncer->others_plain, plain && !chunk, __ATOMIC_RELAXED);
    *first = head[0];
    *payload_bytes = size;
    return true;
}

/* --- the upgrade ---------------------------------------------------------------------------------------------------- */

static inline bool fake_upgrade(struct fake_conn *conn)
{
    struct fake_syncer *syncer = conn->syncer;
    char head[4096] = {0};
    for (size_t have = 0; strstr(head, "\r\n\r\n") == NULL; have++) {
        if (have == sizeof head - 1 || !fake_read(conn, head + have, 1)) {
            return false;
        }
    }
    char wanted[300];
    snprintf(wanted, sizeof wanted, "Authorization: Bearer %s\r\n", syncer->token == NULL ? "" : syncer->token);
    if (syncer->token != NULL && strstr(head, wanted) == NULL) {
        static const char answer[] = "HTTP/1.1 401 Unauthorized\r\nContent-Length: 13\r\n\r\nwrong token.\n";
        pthread_mutex_lock(&syncer->lock);
        syncer->unauthorized++;
        pthread_mutex_unlock(&syncer->lock);
        (void)fake_write(conn, answer, sizeof answer - 1);
        return false;
    }
    const char *key = strstr(head, "Sec-WebSocket-Key: ");
    if (strncmp(head, "GET /v1/connect HTTP/1.1\r\n", 26) != 0 || key == NULL ||
        strstr(head, "Sec-WebSocket-Protocol: diloco.v1\r\n") == NULL) {
        return false;
    }
    char joined[128], accept[32], answer[512];
    snprintf(joined, sizeof joined, "%.24s258EAFA5-E914-47DA-95CA-C5AB0DC85B11", key + 19);
    uint8_t digest[SHA_DIGEST_LENGTH];
    SHA1((const uint8_t *)joined, strlen(joined), digest);
    EVP_EncodeBlock((uint8_t *)accept, digest, sizeof digest);
    int length = snprintf(answer, sizeof answer,
                          "HTTP/1.1 101 Switching Protocols\r\nUpgrade: WebSocket\r\nConnection: Upgrade\r\n"
                          "Sec-WebSocket-Accept: %s\r\nSec-WebSocket-Protocol: diloco.v1\r\n\r\n",
                          accept);
    return fake_write(conn, answer, (size_t)length);
}

#endif
