/* A learner that serves its state, a relay that breaks connections to it, and a joiner that fetches, for tests of peer
 * recovery. The joiner's link is driven by hand: the test is its network thread and its syncer. */
#ifndef DL_TESTS_UNIT_PEER_RIG_H
#define DL_TESTS_UNIT_PEER_RIG_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/codec.h"
#include "common/content.h"
#include "common/mem.h"
#include "tests/unit/unit.h"
#include "tests/unit/wire_make.h"
#include "worker/link/fetch.h"
#include "worker/link/serve.h"

#define RIG_TENSORS 3
#define RIG_FRAGMENTS 4
#define RIG_STATES 3
#define RIG_TOKEN "token-of-the-rig"
#define RIG_PATIENT_NS (20 * DL_NS_PER_SECOND) /* On a busy machine nothing may look like a stall that is none. */
#define RIG_PROGRESS_NS (DL_NS_PER_SECOND)     /* Where one is to be noticed. */
#define RIG_BOUND_NS (120 * DL_NS_PER_SECOND)  /* On every wait of a test. */

static const struct dl_tensor rig_tensors[RIG_TENSORS] = {
    {.name = "embed", .role = DL_TENSOR_EMBEDDING, .rank = 2, .shape = {700, 96}},
    {.name = "w", .rank = 2, .shape = {333, 257}, .layer = 1},
    {.name = "norm", .rank = 1, .shape = {777}, .layer = 2},
};

struct rig_model {
    float *tensors[RIG_TENSORS];
    uint8_t *states[RIG_STATES];
    struct wk_state registered[RIG_STATES];
};

static inline uint64_t rig_state_bytes(uint32_t i)
{
    return i == 2 ? 8 : dl_tensor_elements(&rig_tensors[i]) * sizeof(float);
}

/* Parameters are a function of `seed` that bfloat16 holds exactly, states one of `state_seed`; 0: zeros. */
static inline void rig_model_init(struct rig_model *model, unsigned seed, unsigned state_seed)
{
    for (int t = 0; t < RIG_TENSORS; t++) {
        uint64_t count = dl_tensor_elements(&rig_tensors[t]);
        model->tensors[t] = malloc(count * sizeof(float));
        for (uint64_t i = 0; i < count; i++) {
            model->tensors[t][i] = (float)((i * 7 + seed * 31 + (unsigned)t) % 128) * 0.125f - 4.0f;
        }
    }
    for (uint32_t s = 0; s < RIG_STATES; s++) {
        uint64_t bytes = rig_state_bytes(s);
        model->states[s] = malloc(bytes);
        for (uint64_t i = 0; i < bytes; i++) {
            model->states[s][i] = state_seed == 0 ? 0 : (uint8_t)(i * 13 + state_seed * 101 + s);
        }
        model->registered[s] = (struct wk_state){.data = model->states[s], .bytes = bytes};
        snprintf(model->registered[s].name, sizeof model->registered[s].name, "adamw.%u", s);
    }
}

static inline void rig_model_release(struct rig_model *model)
{
    for (int t = 0; t < RIG_TENSORS; t++) {
        free(model->tensors[t]);
    }
    for (uint32_t s = 0; s < RIG_STATES; s++) {
        free(model->states[s]);
    }
}

static inline struct dl_layout *rig_layout(void)
{
    struct dl_layout *layout = NULL;
    CU_ASSERT_EQUAL_FATAL(dl_layout_new(rig_tensors, RIG_TENSORS, RIG_FRAGMENTS, DL_LAYOUT_BALANCED, &layout, NULL),
                          DL_OK);
    return layout;
}

/* A socket with an address of this machine's, as a connection to a syncer has. */
static inline int rig_connected(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(9), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    CU_ASSERT_EQUAL_FATAL(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

/* --- a learner that serves --------------------------------------------------------------------------------------- */

struct rig_peer {
    struct rig_model model;
    struct dl_layout *layout;
    struct wk_store *store;
    struct wk_serve *serve;
    struct wk_snapshot_source source;
    struct wk_offer offers[RIG_FRAGMENTS];
    char uid[32];
    char address[DL_WIRE_ADDRESS_MAX];
    uint64_t nonce;
    unsigned filled;
    bool busy; /* Its trainer never comes to a boundary. */
};

static inline void rig_peer_start(struct rig_peer *peer, uint32_t number, unsigned seed, unsigned state_seed,
                                  enum dl_codec codec, const struct wk_serve_config *config)
{
    memset(peer, 0, sizeof *peer);
    rig_model_init(&peer->model, seed, state_seed);
    peer->layout = rig_layout();
    peer->store = wk_store_new(peer->model.tensors, RIG_TENSORS);
    CU_ASSERT_EQUAL_FATAL(wk_store_prepare(peer->store, peer->layout, NULL), DL_OK);
    snprintf(peer->uid, sizeof peer->uid, "peer-%u", number);
    peer->nonce = 1000 + number;
    struct wk_serve_config plain = {.token = RIG_TOKEN};
    struct dl_err err;
    CU_ASSERT_EQUAL_FATAL(wk_serve_new(config == NULL ? &plain : config, &peer->serve, &err), DL_OK);
    int fd = rig_connected();
    CU_ASSERT_FATAL(wk_serve_begin(peer->serve, fd, peer->address));
    close(fd);
    peer->source = (struct wk_snapshot_source){.layout = peer->layout,
                                               .store = peer->store,
                                               .codec = codec,
                                               .states = peer->model.registered,
                                               .state_count = RIG_STATES,
                                               .learner = number,
                                               .nonce = peer->nonce,
                                               .uid = peer->uid};
    wk_serve_open(peer->serve, &peer->source);
    for (uint32_t p = 0; p < RIG_FRAGMENTS; p++) {
        peer->offers[p] = (struct wk_offer){.version = 5 + p, .round = 20 + p};
    }
}

/* What its trainer does at a boundary. */
static inline void rig_peer_boundary(struct rig_peer *peer)
{
    if (!peer->busy && peer->serve != NULL && wk_serve_wants(peer->serve)) {
        wk_serve_fill(peer->serve, peer->offers, 77, NULL, 0);
        peer->filled++;
    }
}

static inline void rig_peer_kill(struct rig_peer *peer)
{
    wk_serve_free(dl_take(peer->serve));
}

static inline void rig_peer_release(struct rig_peer *peer)
{
    rig_peer_kill(peer);
    wk_store_free(peer->store);
    dl_layout_free(peer->layout);
    rig_model_release(&peer->model);
}

/* --- a relay that breaks things ---------------------------------------------------------------------------------- */

enum rig_fault { RIG_PASS, RIG_CUT, RIG_DIE, RIG_STALL, RIG_FLIP };

struct rig_relay { /* Forwards to `port`; at byte `at` of what comes back the fault happens, once. */
    int listen_fd;
    uint16_t port;
    char address[DL_WIRE_ADDRESS_MAX];
    enum rig_fault fault;
    uint64_t at;
    uint64_t passed; /* Atomic. */
    unsigned connections;
    bool happened, stop; /* Atomics. */
    const char *canned;  /* Instead of all that: this answer to whatever comes. */
    size_t canned_bytes;
    pthread_t thread;
};

static inline int rig_connect(uint16_t port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (connect(fd, (struct sockaddr *)&to, sizeof to) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

static inline bool rig_send(int fd, const void *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t sent = send(fd, (const char *)bytes + done, size - done, MSG_NOSIGNAL);
        if (sent <= 0) {
            return false;
        }
        done += (size_t)sent;
    }
    return true;
}

/* False: this connection ends here. */
static inline bool rig_relay_down(struct rig_relay *relay, int client, char *bytes, size_t size)
{
    uint64_t passed = __atomic_load_n(&relay->passed, __ATOMIC_RELAXED);
    bool due = relay->fault != RIG_PASS && !relay->happened && passed + size > relay->at;
    if (due) {
        size_t until = (size_t)(relay->at - passed);
        __atomic_store_n(&relay->happened, true, __ATOMIC_RELEASE);
        if (relay->fault == RIG_FLIP) {
            bytes[until] = (char)(bytes[until] ^ 0x40);
        } else {
            rig_send(client, bytes, until);
            __atomic_add_fetch(&relay->passed, until, __ATOMIC_RELAXED);
            while (relay->fault == RIG_STALL && !__atomic_load_n(&relay->stop, __ATOMIC_ACQUIRE)) {
                struct pollfd gone = {.fd = client, .events = POLLIN};
                if (poll(&gone, 1, 20) > 0) {
                    return false; /* The joiner has had enough. */
                }
            }
            return false;
        }
    }
    __atomic_add_fetch(&relay->passed, size, __ATOMIC_RELAXED);
    return rig_send(client, bytes, size);
}

static inline void rig_relay_serve(struct rig_relay *relay, int client)
{
    char bytes[16384];
    int upstream = relay->canned == NULL ? rig_connect(relay->port) : -1;
    bool on = upstream >= 0;
    if (relay->canned != NULL && recv(client, bytes, sizeof bytes, 0) > 0) {
        rig_send(client, relay->canned, relay->canned_bytes);
    }
    while (on && !__atomic_load_n(&relay->stop, __ATOMIC_ACQUIRE)) {
        struct pollfd polls[2] = {{.fd = client, .events = POLLIN}, {.fd = upstream, .events = POLLIN}};
        if (poll(polls, 2, 20) <= 0) {
            continue;
        }
        if (polls[0].revents != 0) {
            ssize_t got = recv(client, bytes, sizeof bytes, 0);
            on = got > 0 && rig_send(upstream, bytes, (size_t)got);
        }
        if (on && polls[1].revents != 0) {
            ssize_t got = recv(upstream, bytes, sizeof bytes, 0);
            on = got > 0 && rig_relay_down(relay, client, bytes, (size_t)got);
        }
    }
    if (upstream >= 0) {
        close(upstream);
    }
    close(client);
}

static inline void *rig_relay_main(void *argument)
{
    struct rig_relay *relay = argument;
    while (!__atomic_load_n(&relay->stop, __ATOMIC_ACQUIRE)) {
        struct pollfd polls = {.fd = relay->listen_fd, .events = POLLIN};
        if (poll(&polls, 1, 20) <= 0) {
            continue;
        }
        int client = accept(relay->listen_fd, NULL, NULL);
        bool dead = relay->fault == RIG_DIE && __atomic_load_n(&relay->happened, __ATOMIC_ACQUIRE);
        if (client >= 0 && dead) {
            close(client);
        } else if (client >= 0) {
            relay->connections++;
            rig_relay_serve(relay, client);
        }
    }
    return NULL;
}

/* To the peer's server, or with `canned` to nobody. */
static inline void rig_relay_start(struct rig_relay *relay, const struct rig_peer *peer, enum rig_fault fault,
                                   uint64_t at, const char *canned, size_t canned_bytes)
{
    memset(relay, 0, sizeof *relay);
    relay->fault = fault;
    relay->at = at;
    relay->canned = canned;
    relay->canned_bytes = canned_bytes;
    relay->port = peer == NULL ? 0 : (uint16_t)strtoul(strrchr(peer->address, 0x3a) + 1, NULL, 10);
    relay->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    CU_ASSERT_EQUAL_FATAL(bind(relay->listen_fd, (struct sockaddr *)&address, size), 0);
    CU_ASSERT_EQUAL_FATAL(listen(relay->listen_fd, 8), 0);
    CU_ASSERT_EQUAL_FATAL(getsockname(relay->listen_fd, (struct sockaddr *)&address, &size), 0);
    snprintf(relay->address, sizeof relay->address, "127.0.0.1:%u", ntohs(address.sin_port));
    CU_ASSERT_EQUAL_FATAL(pthread_create(&relay->thread, NULL, rig_relay_main, relay), 0);
}

static inline void rig_relay_stop(struct rig_relay *relay)
{
    __atomic_store_n(&relay->stop, true, __ATOMIC_RELEASE);
    pthread_join(relay->thread, NULL);
    close(relay->listen_fd);
}

/* --- the joiner, and its syncer ---------------------------------------------------------------------------------- */

struct rig_joiner {
    struct wk_hub hub;
    struct rig_model model;
    struct wk_fetch *fetch;
    struct rig_model truth; /* What the syncer holds. */
    struct dl_layout *layout;
    struct wk_offer current[RIG_FRAGMENTS];
    enum dl_codec codec;
    uint64_t transfers;
    unsigned helds, sent;
    bool silent; /* The syncer does not answer HELD. */
    bool reported;
    struct dl_wire_recovered report;
    char log[4096];
};

static inline void rig_log(void *context, int level, const char *line)
{
    struct rig_joiner *joiner = context;
    size_t used = strlen(joiner->log);
    snprintf(joiner->log + used, sizeof joiner->log - used, "%d %s\n", level, line);
}

static inline uint64_t rig_encode(const struct dl_layout *layout, float *const *tensors, enum dl_codec codec,
                                  uint32_t p, uint8_t **out)
{
    uint64_t padded = layout->fragments[p].padded_elements, bytes = dl_codec_bytes(codec, padded);
    float *values = dl_alloc_aligned(padded * sizeof(float));
    *out = malloc(bytes);
    dl_layout_gather(layout, p, tensors, values);
    dl_codec_encode(codec, values, padded / DL_BLOCK, *out);
    free(values);
    return bytes;
}

/* The syncer's state is made of `seed`, as peers' are: the same versions, the same content. */
static inline void rig_joiner_start(struct rig_joiner *joiner, unsigned seed, enum dl_codec codec)
{
    memset(joiner, 0, sizeof *joiner);
    struct wk_hub *hub = &joiner->hub;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&hub->lock, NULL);
    pthread_cond_init(&hub->changed, &attributes);
    hub->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    hub->shards = 1;
    hub->token = strdup(RIG_TOKEN);
    hub->log = rig_log;
    hub->log_context = joiner;
    rig_model_init(&joiner->model, 99, 0);
    rig_model_init(&joiner->truth, seed, 0);
    joiner->layout = rig_layout();
    joiner->codec = codec;
    for (uint32_t p = 0; p < RIG_FRAGMENTS; p++) {
        uint8_t *bytes = NULL;
        uint64_t size = rig_encode(joiner->layout, joiner->truth.tensors, codec, p, &bytes);
        joiner->current[p] =
            (struct wk_offer){.version = 5 + p, .round = 20 + p, .content_hash = dl_content_hash(bytes, size)};
        free(bytes);
    }
    struct wk_link_config config = {.role = DL_ROLE_LEARNER,
                                    .learner = 3,
                                    .nonce = 7,
                                    .uid = "joiner",
                                    .job = "job",
                                    .shards = 1,
                                    .tensors = rig_tensors,
                                    .tensor_count = RIG_TENSORS,
                                    .recover = true};
    CU_ASSERT_EQUAL_FATAL(wk_link_new(&config, &hub->link, NULL), DL_OK);
    hub->store = wk_store_new(joiner->model.tensors, RIG_TENSORS);
    joiner->fetch = wk_fetch_new(hub, joiner->model.registered, RIG_STATES, RIG_PATIENT_NS);
}

/* Before it is run: notices stalls soon. */
static inline void rig_joiner_hurry(struct rig_joiner *joiner)
{
    wk_fetch_free(joiner->fetch);
    joiner->fetch = wk_fetch_new(&joiner->hub, joiner->model.registered, RIG_STATES, RIG_PROGRESS_NS);
}

static inline void rig_joiner_release(struct rig_joiner *joiner)
{
    wk_fetch_free(joiner->fetch);
    wk_link_free(joiner->hub.link);
    wk_store_free(joiner->hub.store);
    free(joiner->hub.token);
    close(joiner->hub.wake_fd);
    dl_layout_free(joiner->layout);
    rig_model_release(&joiner->model);
    rig_model_release(&joiner->truth);
}

static inline void rig_tell(struct rig_joiner *joiner, const struct dl_wire_message *message)
{
    wk_link_on_message(joiner->hub.link, dl_now_ns(), 0, message);
}

/* The syncer sends the newest version of a fragment. */
static inline void rig_send_update(struct rig_joiner *joiner, uint32_t p)
{
    struct wk_link *link = joiner->hub.link;
    uint8_t *bytes = NULL;
    uint64_t size = rig_encode(joiner->layout, joiner->truth.tensors, joiner->codec, p, &bytes);
    static struct dl_wire_message message;
    make_update(&message, p, joiner->codec, bytes, size);
    message.as.update.transfer = ++joiner->transfers;
    message.as.update.version = joiner->current[p].version;
    message.as.update.round = joiner->current[p].round;
    rig_tell(joiner, &message);
    struct wk_spot spot;
    uint64_t hash = 0;
    if (wk_link_place(link, dl_now_ns(), 0, joiner->transfers, 0, (uint32_t)size, &spot) == WK_PLACE_STORE) {
        memcpy(wk_store_slot(joiner->hub.store, p, spot.slot, size), bytes, size);
        CU_ASSERT(wk_link_on_chunk(link, dl_now_ns(), 0, true, &hash));
        wk_link_on_update(link, dl_now_ns(), 0, true);
        joiner->sent++;
    }
    free(bytes);
}

static inline void rig_answer(struct rig_joiner *joiner, const struct dl_wire_message *said)
{
    static struct dl_wire_message message;
    if (said->type == DL_WIRE_RECOVERED) {
        joiner->reported = true;
        joiner->report = said->as.recovered;
    }
    if (said->type != DL_WIRE_HELD) {
        return;
    }
    joiner->helds++;
    if (joiner->silent && said->as.held.version != 0) {
        return;
    }
    uint32_t p = said->as.held.fragment;
    const struct wk_offer *mine = &joiner->current[p];
    bool same = said->as.held.version == mine->version && said->as.held.content_hash == mine->content_hash;
    make_message(&message, DL_WIRE_HELD);
    message.as.held = (struct dl_wire_held){p, mine->version, mine->content_hash};
    rig_tell(joiner, &message);
    if (!same) {
        rig_send_update(joiner, p);
    }
}

static inline void rig_be_welcome(struct rig_joiner *joiner)
{
    struct wk_link *link = joiner->hub.link;
    static struct dl_wire_message message;
    struct wk_act act;
    wk_link_next_act(link, dl_now_ns(), 0, &act);
    CU_ASSERT_EQUAL_FATAL(act.type, WK_ACT_CONNECT);
    wk_link_on_connected(link, dl_now_ns(), 0);
    wk_link_next_act(link, dl_now_ns(), 0, &act);
    CU_ASSERT_EQUAL_FATAL(act.type, WK_ACT_SEND);
    CU_ASSERT_EQUAL(act.message->as.hello.recover, 1);
    uint64_t versions[RIG_FRAGMENTS];
    for (uint32_t p = 0; p < RIG_FRAGMENTS; p++) {
        versions[p] = joiner->current[p].version;
    }
    make_welcome(&message, joiner->layout, 0, 1, versions);
    message.as.welcome.broadcast_compression = (uint8_t)joiner->codec;
    message.as.welcome.heartbeat_ms = 60000;
    message.as.welcome.timeout_ms = 120000;
    rig_tell(joiner, &message);
}

static inline void rig_name_peers(struct rig_joiner *joiner, struct rig_peer *const *peers,
                                  const char *const *addresses, uint32_t count)
{
    static struct dl_wire_message message;
    make_message(&message, DL_WIRE_PEERS);
    message.as.peers.count = (uint8_t)count;
    for (uint32_t i = 0; i < count; i++) {
        struct dl_wire_peer *peer = &message.as.peers.peers[i];
        *peer = (struct dl_wire_peer){.learner = peers[i]->source.learner, .nonce = peers[i]->nonce};
        const char *address = addresses == NULL ? peers[i]->address : addresses[i];
        snprintf(peer->uid, sizeof peer->uid, "%.*s", (int)sizeof peer->uid - 1, peers[i]->uid);
        snprintf(peer->serve, sizeof peer->serve, "%.*s", (int)sizeof peer->serve - 1, address);
    }
    rig_tell(joiner, &message);
    for (uint32_t p = 0; count == 0 && p < RIG_FRAGMENTS; p++) {
        rig_send_update(joiner, p);
    }
}

/* Connects and names `count` peers by these addresses. */
static inline void rig_join(struct rig_joiner *joiner, struct rig_peer *const *peers, const char *const *addresses,
                            uint32_t count)
{
    rig_be_welcome(joiner);
    rig_name_peers(joiner, peers, addresses, count);
}

/* Does what the link says until it may train. `each` is called between two turns. */
static inline void rig_run(struct rig_joiner *joiner, struct rig_peer *const *peers, uint32_t count,
                           void (*each)(struct rig_joiner *))
{
    struct wk_hub *hub = &joiner->hub;
    int64_t until_ns = dl_now_ns() + RIG_BOUND_NS;
    bool on = true;
    while (on && dl_now_ns() < until_ns) {
        struct wk_step step;
        wk_link_next_step(hub->link, dl_now_ns(), &step);
        switch (step.type) {
        case WK_STEP_PREPARE:
            CU_ASSERT_EQUAL_FATAL(wk_store_prepare(hub->store, wk_link_layout(hub->link), NULL), DL_OK);
            wk_link_on_prepared(hub->link);
            break;
        case WK_STEP_APPLY:
            wk_store_apply(hub->store, &step);
            wk_link_on_applied(hub->link, step.fragment);
            break;
        case WK_STEP_FETCH: wk_fetch_turn(joiner->fetch); break;
        case WK_STEP_SNAPSHOT: CU_FAIL_FATAL("a joiner was pulled"); break;
        case WK_STEP_YIELD:
        case WK_STEP_WAIT: (void)poll(NULL, 0, 1); break;
        case WK_STEP_GO:
        case WK_STEP_DONE: on = false; break;
        }
        struct wk_act act;
        for (wk_link_next_act(hub->link, dl_now_ns(), 0, &act); act.type == WK_ACT_SEND;
             wk_link_next_act(hub->link, dl_now_ns(), 0, &act)) {
            static struct dl_wire_message said;
            said = *act.message;
            rig_answer(joiner, &said);
        }
        for (uint32_t i = 0; i < count; i++) {
            rig_peer_boundary(peers[i]);
        }
        CU_ASSERT_PTR_NULL(wk_link_check(hub->link));
        if (each != NULL) {
            each(joiner);
        }
    }
    CU_ASSERT_FALSE(on);
    CU_ASSERT(wk_link_is_joined(hub->link));
}

/* J6: tensors and base copies are the syncer's, to the bit; the states are those of `peer`, or zeros. */
static inline void rig_check(struct rig_joiner *joiner, const struct rig_peer *peer)
{
    for (int t = 0; t < RIG_TENSORS; t++) {
        CU_ASSERT(unit_same_bits(joiner->model.tensors[t], joiner->truth.tensors[t],
                                 dl_tensor_elements(&rig_tensors[t]) * sizeof(float)));
    }
    for (uint32_t p = 0; p < RIG_FRAGMENTS; p++) {
        uint64_t bytes = dl_codec_bytes(joiner->codec, joiner->layout->fragments[p].padded_elements);
        uint8_t *base = malloc(bytes);
        wk_store_encode_base(joiner->hub.store, p, joiner->codec, base);
        CU_ASSERT_EQUAL(dl_content_hash(base, bytes), joiner->current[p].content_hash);
        free(base);
    }
    for (uint32_t s = 0; s < RIG_STATES; s++) {
        uint64_t wrong = 0;
        for (uint64_t i = 0; i < rig_state_bytes(s); i++) {
            wrong += joiner->model.states[s][i] != (peer == NULL ? 0 : peer->model.states[s][i]);
        }
        CU_ASSERT_EQUAL(wrong, 0);
    }
    CU_ASSERT_EQUAL(joiner->reported, peer != NULL);
    CU_ASSERT_EQUAL(wk_fetch_report(joiner->fetch) != NULL, peer != NULL);
    if (peer != NULL) {
        CU_ASSERT_EQUAL(joiner->report.nonce, peer->nonce);
        CU_ASSERT_STRING_EQUAL(joiner->report.uid, peer->uid);
        CU_ASSERT_EQUAL(joiner->report.step, 77);
    }
}

#endif
