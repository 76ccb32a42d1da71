/* fake_syncer: a syncer shard for tests, scripted.
 *
 * It takes its first state from the first learner (seed pulls), pulls a fragment whenever META says that `interval`
 * steps were trained on it, merges every push by itself (Theta -= delta), and tells everyone. Its fields say how it
 * should misbehave. A thread a connection (fake_conn.h); everything is under one lock. */
#ifndef DL_TESTS_FAKE_SYNCER_H
#define DL_TESTS_FAKE_SYNCER_H

#include <arpa/inet.h>
#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/codec.h"
#include "common/layout.h"
#include "common/mem.h"
#include "common/wire.h"
#include "tests/unit/fake_conn.h"
#include "tests/unit/wire_make.h"

/* --- what messages do: called with the lock held, false ends the connection ------------------------------------------ */

#define FAKE_FOR_SHARD(syncer, p)                                                                                      \
    for (uint32_t p = (syncer)->shard; p < (syncer)->layout->fragment_count; p += (syncer)->shards)

static inline bool fake_send_update(struct fake_conn *conn, uint32_t p)
{
    struct fake_syncer *syncer = conn->syncer;
    uint64_t padded = syncer->layout->fragments[p].padded_elements;
    uint64_t bytes = dl_codec_bytes(syncer->broadcast, padded);
    DL_AUTO_FREE uint8_t *encoded = malloc(bytes);
    DL_AUTO_FREE uint8_t *chunk = malloc(64 + DL_WIRE_CHUNK_DATA_MAX);
    dl_codec_encode(syncer->broadcast, syncer->theta[p], padded / DL_BLOCK, encoded);
    struct dl_wire_message *message = &conn->out;
    make_update(message, p, syncer->broadcast, encoded, bytes);
    message->as.update.transfer = ++conn->transfers;
    message->as.update.version = syncer->version[p];
    message->as.update.round = syncer->round[p];
    bool ok = fake_send(conn, message);
    for (uint64_t offset = 0; ok && offset < bytes;) {
        uint32_t now = (uint32_t)DL_MIN((uint64_t)dl_wire_chunk_data_bytes(syncer->broadcast), bytes - offset);
        dl_wire_chunk_head(conn->transfers, offset, encoded + offset, now, chunk);
        memcpy(chunk + DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES, encoded + offset, now);
        ok = fake_message_out(conn, chunk, DL_WIRE_HEADER_BYTES + DL_WIRE_CHUNK_PREFIX_BYTES + now);
        offset += now;
    }
    return ok;
}

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
    struct dl_wire_pull *pull = &conn->out.as.pull;
    make_pull(&conn->out, p, syncer->version[p], ++syncer->next_round);
    pull->flags = flags;
    pull->pull_within_steps = syncer->pull_within;
    pull->update_within_steps = syncer->update_within;
    pull->wait_ms = syncer->wait_ms;
    conn->asked[p] = true;
    return fake_send(conn, &conn->out);
}

static inline bool fake_refuse(struct fake_conn *conn, uint16_t code, const char *text)
{
    make_refuse(&conn->out, code, text);
    (void)fake_send(conn, &conn->out);
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
    conn->role = hello->role;
    struct dl_wire_welcome *welcome = &conn->out.as.welcome;
    make_welcome(&conn->out, syncer->layout, syncer->shard, syncer->shards, syncer->version);
    welcome->learner = hello->learner < 0 ? welcome->learner : (uint32_t)hello->learner;
    welcome->admission = syncer->hellos;
    welcome->epoch = syncer->epoch;
    welcome->layout = (uint8_t)syncer->layout_kind;
    welcome->layout_hash += syncer->wrong_layout;
    welcome->compression = (uint8_t)syncer->compression;
    welcome->broadcast_compression = (uint8_t)syncer->broadcast;
    welcome->apply = (uint8_t)syncer->apply;
    welcome->apply_alpha = syncer->alpha;
    welcome->heartbeat_ms = syncer->heartbeat_ms;
    welcome->timeout_ms = syncer->timeout_ms;
    welcome->step = 17;
    welcome->tokens = 1000;
    welcome->token_budget = 5000;
    welcome->learners = 2;
    struct dl_wire_fragment held[DL_SPEC_FRAGMENTS_MAX];
    uint32_t held_count = syncer->last_hello.fragment_count;
    memcpy(held, syncer->last_hello.fragments, sizeof held);
    bool ok = fake_send(conn, &conn->out);
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
    make_result(&conn->out, conn->push.fragment, conn->push.round, verdict);
    return fake_send(conn, &conn->out);
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
        make_heartbeat(&conn->out, syncer->heartbeats, 40, 2000);
        ok = fake_send(conn, &conn->out);
    } else if (ok && header.type == DL_WIRE_LEASE_REQUEST) {
        syncer->last_request = message->as.lease_request;
        if (message->as.lease_request.want > 0 && syncer->lease > 0) {
            syncer->leases++;
            make_lease(&conn->out, syncer->leases, 1000 * syncer->leases, syncer->lease);
            ok = fake_send(conn, &conn->out);
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

/* --- connections ---------------------------------------------------------------------------------------------------- */

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
    make_stop(&conn->out, (enum dl_stop_result)conn->syncer->stop_result, "scripted stop");
    return fake_send(conn, &conn->out);
}

/* Reads one frame and does what it asks for; false ends the connection. */
static inline bool fake_serve_frame(struct fake_conn *conn, uint8_t *payload, size_t capacity)
{
    struct fake_syncer *syncer = conn->syncer;
    uint8_t first;
    size_t size;
    if (!fake_frame_in(conn, payload, capacity, &first, &size)) {
        return false;
    }
    pthread_mutex_lock(&syncer->lock);
    bool ok = fake_wait_while_mute(syncer);
    if (!ok) {
        pthread_mutex_unlock(&syncer->lock);
        return false;
    }
    if (first == 0x82) {
        ok = ok && fake_on_message(conn, payload, size);
    } else if (first == 0x8a) {
        syncer->pongs++;
    } else if (first == 0x88 || first != 0x89) {
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
    while (ok && fake_serve_frame(conn, payload, capacity)) {
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

/* --- for tests ------------------------------------------------------------------------------------------------------ */

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
    /* OpenSSL writes without MSG_NOSIGNAL, and the library may have closed. Its own threads do not inherit this: they block all. */
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, NULL);
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

/* Waits for something to happen at the syncer, a millisecond at most: a trainer's step takes its time, too. */
static inline void fake_breathe(struct fake_syncer *syncer)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += DL_NS_PER_MS;
    until.tv_sec += until.tv_nsec / DL_NS_PER_SECOND;
    until.tv_nsec %= DL_NS_PER_SECOND;
    pthread_mutex_lock(&syncer->lock);
    pthread_cond_timedwait(&syncer->changed, &syncer->lock, &until);
    pthread_mutex_unlock(&syncer->lock);
}

/* Reads one of the syncer's counters. */
static inline uint64_t fake_peek(struct fake_syncer *syncer, const uint64_t *counter)
{
    pthread_mutex_lock(&syncer->lock);
    uint64_t value = *counter;
    pthread_mutex_unlock(&syncer->lock);
    return value;
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
