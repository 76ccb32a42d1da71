/* A syncer shard for tests: a server of raw RFC 6455 over blocking sockets, written apart from the library that it
 * tests.
 *
 * It takes its first state from the first learner (seed pulls), pulls a fragment whenever META says that `interval`
 * steps were trained on it, merges every push by itself (Theta -= delta), and tells everyone. Its fields say how it
 * should misbehave. A thread a connection; everything is under one lock. */
#ifndef DL_TESTS_FAKE_SYNCER_H
#define DL_TESTS_FAKE_SYNCER_H

#include <arpa/inet.h>
#include <assert.h>
#include <openssl/evp.h>
#include <openssl/sha.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "common/codec.h"
#include "common/hash.h"
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
    struct dl_wire_message message;
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
};

/* --- bytes
 * ------------------------------------------------------------------------------------------------------------ */

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

static inline bool fake_send_update(struct fake_conn *conn, uint32_t p)
{
    struct fake_syncer *syncer = conn->syncer;
    uint64_t padded = syncer->layout->fragments[p].padded_elements;
    uint64_t bytes = dl_codec_bytes(syncer->broadcast, padded);
    DL_AUTO_FREE uint8_t *encoded = malloc(bytes);
    DL_AUTO_FREE uint8_t *chunk = malloc(64 + DL_WIRE_CHUNK_DATA_MAX);
    dl_codec_encode(syncer->broadcast, syncer->theta[p], padded / DL_BLOCK, encoded);
    struct dl_wire_message message = {.type = DL_WIRE_UPDATE};
    message.as.update = (struct dl_wire_update){
        .transfer = ++conn->transfers,
        .fragment = p,
        .version = syncer->version[p],
        .round = syncer->round[p],
        .codec = (uint8_t)syncer->broadcast,
        .bytes = bytes,
        .content_hash = dl_hash64(encoded, bytes, 0),
        .participants = 1,
    };
    bool ok = fake_send(conn, &message);
    for (uint64_t offset = 0; ok && offset < bytes;) {
        uint32_t now = (uint32_t)DL_MIN((uint64_t)dl_wire_chunk_data_bytes(syncer->broadcast), bytes - offset);
        dl_wire_chunk_head(conn->transfers, offset, encoded + offset, now, chunk);
        memcpy(chunk + DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES, encoded + offset, now);
        ok = fake_message_out(conn, chunk, DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES + now);
        offset += now;
    }
    return ok;
}

/* --- what messages do
 * ------------------------------------------------------------------------------------------------- Called with the
 * lock held; false ends the connection. */

#define FAKE_FOR_SHARD(syncer, p)                                                                                      \
    for (uint32_t p = (syncer)->shard; p < (syncer)->layout->fragment_count; p += (syncer)->shards)

static inline void fake_broadcast(struct fake_syncer *syncer, uint32_t p)
{
    for (uint32_t i = 0; i < syncer->conn_count; i++) {
        struct fake_conn *conn = &syncer->conns[i];
        if (conn->fd >= 0 && conn->welcomed && !fake_send_update(conn, p)) {
            shutdown(conn->fd, SHUT_RDWR);
        }
    }
}

static inline bool fake_pull(struct fake_conn *conn, uint32_t p, uint32_t flags)
{
    struct fake_syncer *syncer = conn->syncer;
    struct dl_wire_message message = {.type = DL_WIRE_PULL};
    message.as.pull = (struct dl_wire_pull){
        .round = ++syncer->next_round,
        .fragment = p,
        .version = syncer->version[p],
        .flags = flags,
        .pull_within_steps = syncer->pull_within,
        .update_within_steps = syncer->update_within,
        .wait_ms = syncer->wait_ms,
    };
    conn->asked[p] = true;
    return fake_send(conn, &message);
}

static inline bool fake_refuse(struct fake_conn *conn, uint16_t code, const char *text)
{
    struct dl_wire_message message = {.type = DL_WIRE_REFUSE};
    message.as.refuse.code = code;
    snprintf(message.as.refuse.text, sizeof message.as.refuse.text, "%s", text);
    (void)fake_send(conn, &message);
    return false;
}

static inline bool fake_on_hello(struct fake_conn *conn, const struct dl_wire_hello *hello)
{
    struct fake_syncer *syncer = conn->syncer;
    syncer->hellos++;
    syncer->last_hello = *hello;
    if (syncer->refuse != 0) {
        return fake_refuse(conn, syncer->refuse, "scripted");
    }
    struct dl_err err;
    if (syncer->layout == NULL) {
        struct dl_tensor *tensors = NULL;
        uint32_t count = 0;
        enum dl_rc rc = dl_tensors_decode(hello->tensors, hello->tensors_bytes, &tensors, &count, &err);
        assert(rc == DL_OK);
        rc = dl_layout_new(tensors, count, syncer->fragments, syncer->layout_kind, &syncer->layout, &err);
        assert(rc == DL_OK);
        free(tensors);
        FAKE_FOR_SHARD(syncer, p)
        {
            syncer->theta[p] = dl_alloc_aligned(syncer->layout->fragments[p].padded_elements * sizeof(float));
        }
    }
    struct dl_wire_message *message = &conn->message;
    memset(message, 0, sizeof *message);
    conn->role = hello->role;
    message->type = DL_WIRE_WELCOME;
    struct dl_wire_welcome *welcome = &message->as.welcome;
    *welcome = (struct dl_wire_welcome){
        .learner = hello->learner < 0 ? 3 : (uint32_t)hello->learner,
        .admission = syncer->hellos,
        .epoch = syncer->epoch,
        .shard = syncer->shard,
        .shards = syncer->shards,
        .fragments_total = syncer->fragments,
        .layout = (uint8_t)syncer->layout_kind,
        .layout_hash = syncer->layout->hash + syncer->wrong_layout,
        .compression = (uint8_t)syncer->compression,
        .broadcast_compression = (uint8_t)syncer->broadcast,
        .apply = (uint8_t)syncer->apply,
        .apply_alpha = syncer->alpha,
        .heartbeat_ms = syncer->heartbeat_ms,
        .timeout_ms = syncer->timeout_ms,
        .step = 17,
        .tokens = 1000,
        .token_budget = 5000,
        .learners = 2,
        .pull_within_steps = DL_UNBOUNDED,
        .update_within_steps = DL_UNBOUNDED,
    };
    struct dl_wire_fragment held[DL_SPEC_FRAGMENTS_MAX];
    uint32_t held_count = syncer->last_hello.fragment_count;
    memcpy(held, syncer->last_hello.fragments, sizeof held);
    FAKE_FOR_SHARD(syncer, p)
    {
        welcome->fragments[welcome->fragment_count++] =
            (struct dl_wire_fragment){.fragment = p, .version = syncer->version[p]};
    }
    bool ok = fake_send(conn, message);
    conn->welcomed = true;
    FAKE_FOR_SHARD(syncer, p)
    {
        uint64_t theirs = 0;
        for (uint32_t i = 0; i < held_count; i++) {
            theirs = held[i].fragment == p ? held[i].version : theirs;
        }
        if (syncer->version[p] == 0 && conn->role == DL_ROLE_LEARNER) {
            ok = ok && fake_pull(conn, p, DL_PULL_SEED);
        } else if (syncer->version[p] != theirs && syncer->version[p] > 0) {
            ok = ok && fake_send_update(conn, p);
        }
    }
    return ok;
}

static inline bool fake_on_meta(struct fake_conn *conn, const struct dl_wire_meta *meta)
{
    struct fake_syncer *syncer = conn->syncer;
    syncer->metas++;
    syncer->last_meta = *meta;
    bool ok = true;
    for (uint32_t i = 0; i < meta->fragment_count && ok && syncer->interval > 0; i++) {
        const struct dl_wire_fragment *fragment = &meta->fragments[i];
        uint32_t p = fragment->fragment;
        if (!conn->asked[p] && fragment->steps >= syncer->interval && fragment->version == syncer->version[p]) {
            ok = fake_pull(conn, p, 0);
        }
    }
    return ok;
}

static inline bool fake_result(struct fake_conn *conn, enum dl_verdict verdict)
{
    struct fake_syncer *syncer = conn->syncer;
    conn->asked[conn->push.fragment] = false;
    if (syncer->no_result) {
        return true;
    }
    struct dl_wire_message message = {.type = DL_WIRE_RESULT};
    message.as.result = (struct dl_wire_result){conn->push.round, conn->push.fragment, (uint8_t)verdict};
    return fake_send(conn, &message);
}

static inline bool fake_on_push(struct fake_conn *conn, const struct dl_wire_push *push)
{
    free(dl_take(conn->push_bytes));
    conn->push = *push;
    conn->syncer->last_push = *push;
    conn->push_have = 0;
    conn->receiving = !conn->syncer->drop_pushes;
    if (!conn->receiving) {
        return fake_result(conn, DL_VERDICT_LATE);
    }
    conn->push_bytes = malloc(push->bytes);
    return push->bytes ==
           dl_codec_bytes((enum dl_codec)push->codec, conn->syncer->layout->fragments[push->fragment].padded_elements);
}

/* The whole push is there: a seed becomes version 1, anything else is merged as a round of its own. */
static inline bool fake_merge(struct fake_conn *conn)
{
    struct fake_syncer *syncer = conn->syncer;
    uint32_t p = conn->push.fragment;
    uint64_t padded = syncer->layout->fragments[p].padded_elements;
    conn->receiving = false;
    if (conn->push.base_version != syncer->version[p]) {
        return fake_result(conn, DL_VERDICT_STALE_BASE);
    }
    DL_AUTO_FREE float *values = malloc(padded * sizeof(float));
    dl_codec_decode((enum dl_codec)conn->push.codec, conn->push_bytes, padded / DL_BLOCK, values);
    for (uint64_t i = 0; i < padded; i++) {
        syncer->theta[p][i] = syncer->version[p] == 0 ? values[i] : syncer->theta[p][i] - values[i];
    }
    if (syncer->version[p] > 0) {
        syncer->pushes_merged++;
        syncer->steps_merged += conn->push.steps;
    }
    syncer->version[p]++;
    syncer->round[p] = conn->push.round;
    bool ok = fake_result(conn, DL_VERDICT_ACCEPTED);
    fake_broadcast(syncer, p);
    return ok;
}

static inline bool fake_on_chunk(struct fake_conn *conn, const uint8_t *payload, size_t size)
{
    struct fake_syncer *syncer = conn->syncer;
    uint64_t transfer, offset;
    dl_wire_chunk_prefix(payload, &transfer, &offset);
    if (!conn->receiving || transfer != conn->push.transfer) {
        return true;
    }
    size_t data = size - DL_WIRE_CHUNK_PREFIX_BYTES;
    if (offset != conn->push_have || data > conn->push.bytes - offset) {
        return false;
    }
    memcpy(conn->push_bytes + offset, payload + DL_WIRE_CHUNK_PREFIX_BYTES, data);
    conn->push_have += data;
    if (syncer->push_cut > 0 && --syncer->push_cut == 0) {
        syncer->cut++;
        return false;
    }
    return conn->push_have < conn->push.bytes || fake_merge(conn);
}

static inline bool fake_on_message(struct fake_conn *conn, const uint8_t *bytes, size_t size)
{
    struct fake_syncer *syncer = conn->syncer;
    struct dl_wire_header header;
    struct dl_err err;
    const uint8_t *payload = bytes + DL_WIRE_HEADER_BYTES;
    if (size < DL_WIRE_HEADER_BYTES || dl_wire_header_decode(bytes, &header, &err) != DL_OK ||
        dl_wire_verify(bytes, payload, size - DL_WIRE_HEADER_BYTES, &err) != DL_OK) {
        return false;
    }
    if (header.type == DL_WIRE_CHUNK) {
        return fake_on_chunk(conn, payload, header.payload_bytes);
    }
    struct dl_wire_message *message = malloc(sizeof *message);
    bool ok = dl_wire_decode(header.type, payload, header.payload_bytes, message, &err) == DL_OK;
    if (ok && header.type == DL_WIRE_HELLO) {
        ok = fake_on_hello(conn, &message->as.hello);
    } else if (ok && header.type == DL_WIRE_META) {
        ok = fake_on_meta(conn, &message->as.meta);
    } else if (ok && header.type == DL_WIRE_PUSH) {
        ok = fake_on_push(conn, &message->as.push);
    } else if (ok && header.type == DL_WIRE_PUSH_NONE) {
        syncer->nones++;
        conn->asked[message->as.push_none.fragment] = false;
    } else if (ok && header.type == DL_WIRE_HEARTBEAT) {
        syncer->heartbeats++;
        struct dl_wire_message answer = {.type = DL_WIRE_HEARTBEAT};
        answer.as.heartbeat = (struct dl_wire_heartbeat){.sequence = syncer->heartbeats, .step = 40, .tokens = 2000};
        ok = fake_send(conn, &answer);
    } else if (ok && header.type == DL_WIRE_LEASE_REQUEST) {
        syncer->last_request = message->as.lease_request;
        struct dl_wire_message answer = {.type = DL_WIRE_LEASE};
        if (message->as.lease_request.want > 0 && syncer->lease > 0) {
            answer.as.lease = (struct dl_wire_lease){
                .lease = ++syncer->leases, .first = 1000 * syncer->leases, .count = syncer->lease};
            ok = fake_send(conn, &answer);
        }
    } else if (ok && header.type == DL_WIRE_GOODBYE) {
        syncer->goodbyes++;
        ok = false;
    } else if (ok && header.type == DL_WIRE_EVALUATION) {
        syncer->evaluations++;
        syncer->last_evaluation = message->as.evaluation;
    }
    free(message);
    return ok;
}

/* --- connections
 * ------------------------------------------------------------------------------------------------------ */

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

static inline bool fake_wait_while_mute(struct fake_syncer *syncer)
{
    while (syncer->mute && !syncer->stopping) {
        pthread_cond_wait(&syncer->changed, &syncer->lock);
    }
    return !syncer->stopping;
}

static inline bool fake_say_stop(struct fake_conn *conn)
{
    if (conn->syncer->stop_result < 0 || conn->stop_sent || !conn->welcomed) {
        return true;
    }
    conn->stop_sent = true;
    struct dl_wire_message message = {.type = DL_WIRE_STOP};
    message.as.stop.result = (uint8_t)conn->syncer->stop_result;
    snprintf(message.as.stop.text, sizeof message.as.stop.text, "scripted stop");
    return fake_send(conn, &message);
}

/* Reads one frame, which must be masked; false ends the connection. */
static inline bool fake_read_frame(struct fake_conn *conn, uint8_t *payload, size_t capacity)
{
    struct fake_syncer *syncer = conn->syncer;
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
    pthread_mutex_lock(&syncer->lock);
    bool ok = fake_wait_while_mute(syncer);
    if (!ok) {
        pthread_mutex_unlock(&syncer->lock);
        return false;
    }
    if (head[0] == 0x82) {
        ok = ok && fake_on_message(conn, payload, size);
    } else if (head[0] == 0x8a) {
        syncer->pongs++;
    } else if (head[0] == 0x88 || head[0] != 0x89) {
        ok = false;
    }
    ok = ok && fake_say_stop(conn);
    pthread_cond_broadcast(&syncer->changed);
    pthread_mutex_unlock(&syncer->lock);
    return ok;
}

static inline void *fake_conn_main(void *argument)
{
    struct fake_conn *conn = argument;
    struct fake_syncer *syncer = conn->syncer;
    size_t capacity = DL_WIRE_HELLO_PAYLOAD_MAX + 64;
    uint8_t *payload = malloc(capacity);
    bool ok = true;
    if (syncer->tls != NULL) {
        conn->ssl = SSL_new(syncer->tls);
        ok = SSL_set_fd(conn->ssl, conn->fd) == 1 && SSL_accept(conn->ssl) == 1;
    }
    ok = ok && fake_upgrade(conn);
    while (ok && fake_read_frame(conn, payload, capacity)) {
    }
    pthread_mutex_lock(&syncer->lock);
    SSL_free(conn->ssl);
    close(conn->fd);
    conn->fd = -1;
    free(dl_take(conn->push_bytes));
    pthread_cond_broadcast(&syncer->changed);
    pthread_mutex_unlock(&syncer->lock);
    free(payload);
    return NULL;
}

static inline void *fake_accept_main(void *argument)
{
    struct fake_syncer *syncer = argument;
    for (;;) {
        int fd = accept(syncer->listener, NULL, NULL);
        pthread_mutex_lock(&syncer->lock);
        if (fd < 0 || syncer->stopping) {
            pthread_mutex_unlock(&syncer->lock);
            if (fd >= 0) {
                close(fd);
            }
            return NULL;
        }
        if (syncer->turn_away) {
            syncer->cut++;
            close(fd);
        } else {
            assert(syncer->conn_count < FAKE_CONNS_MAX);
            struct fake_conn *conn = &syncer->conns[syncer->conn_count++];
            *conn = (struct fake_conn){.syncer = syncer, .fd = fd, .used = true};
            int status = pthread_create(&conn->thread, NULL, fake_conn_main, conn);
            assert(status == 0);
        }
        pthread_cond_broadcast(&syncer->changed);
        pthread_mutex_unlock(&syncer->lock);
    }
}

/* --- for tests
 * -------------------------------------------------------------------------------------------------------- */

static inline void fake_listen(struct fake_syncer *syncer)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(syncer->port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    int yes = 1;
    syncer->listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    setsockopt(syncer->listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    int status = bind(syncer->listener, (struct sockaddr *)&address, size);
    assert(status == 0);
    status = listen(syncer->listener, 64);
    assert(status == 0);
    getsockname(syncer->listener, (struct sockaddr *)&address, &size);
    syncer->port = ntohs(address.sin_port);
    status = pthread_create(&syncer->acceptor, NULL, fake_accept_main, syncer);
    assert(status == 0);
}

static inline struct fake_syncer *fake_new(uint32_t fragments)
{
    struct fake_syncer *syncer = calloc(1, sizeof *syncer);
    pthread_mutex_init(&syncer->lock, NULL);
    pthread_cond_init(&syncer->changed, NULL);
    syncer->shards = 1;
    syncer->fragments = fragments;
    syncer->interval = 2;
    syncer->pull_within = syncer->update_within = DL_UNBOUNDED;
    syncer->heartbeat_ms = 1000;
    syncer->timeout_ms = 30000;
    syncer->epoch = 1;
    syncer->stop_result = -1;
    return syncer;
}

/* Ends every connection, as a network that breaks does. */
static inline void fake_cut_all(struct fake_syncer *syncer)
{
    pthread_mutex_lock(&syncer->lock);
    for (uint32_t i = 0; i < syncer->conn_count; i++) {
        if (syncer->conns[i].fd >= 0) {
            shutdown(syncer->conns[i].fd, SHUT_RDWR);
            syncer->cut++;
        }
    }
    pthread_mutex_unlock(&syncer->lock);
}

/* The process is gone: nothing listens, all connections end. fake_listen brings it back, with its state. */
static inline void fake_down(struct fake_syncer *syncer)
{
    pthread_mutex_lock(&syncer->lock);
    syncer->stopping = true;
    pthread_cond_broadcast(&syncer->changed);
    pthread_mutex_unlock(&syncer->lock);
    shutdown(syncer->listener, SHUT_RDWR);
    pthread_join(syncer->acceptor, NULL);
    close(syncer->listener);
    fake_cut_all(syncer);
    for (uint32_t i = 0; i < syncer->conn_count; i++) {
        pthread_join(syncer->conns[i].thread, NULL);
    }
    syncer->conn_count = 0;
    syncer->stopping = false;
}

/* Said by each connection's own thread after the next frame that comes on it. */
static inline void fake_stop(struct fake_syncer *syncer, enum dl_stop_result result)
{
    pthread_mutex_lock(&syncer->lock);
    syncer->stop_result = (int)result;
    pthread_mutex_unlock(&syncer->lock);
}

static inline void fake_free(struct fake_syncer *syncer)
{
    fake_down(syncer);
    for (uint32_t p = 0; p < DL_SPEC_FRAGMENTS_MAX; p++) {
        free(syncer->theta[p]);
    }
    dl_layout_free(syncer->layout);
    pthread_cond_destroy(&syncer->changed);
    pthread_mutex_destroy(&syncer->lock);
    free(syncer);
}

#endif
