/* bench_transport: what the learner's end of the transport costs, against raw TCP and raw TLS 1.3 in the same run.
 *
 *     transport [TURNS [plain | tls]]      5 turns of both; more on a busy machine
 *
 * The other end is another process that does as little as possible (it discards pushes unread, and sends updates that
 * were framed before), so that CPU time and rate are the library's: pushes are hashed, framed and sent; updates
 * are received in place and checked (chunk by chunk, and as a whole). The trainer's own work (encoding, applying)
 * is not in these figures: it is reported apart. CPU is that of the network thread alone, or of the raw TCP loop.
 *
 * Raw sockets are as the system sets them up, the other end's is set up as a syncer's when it plays one (common/socket.h). Where
 * the system's own way paces, raw connections pay for that; `..._reno` are the same figures of ours beside raw connections that are
 * set up as ours are: the stricter ratio. */
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>

#include "common/socket.h"
#include "common/ws.h"
#include "tests/bench/bench.h"
#include "tests/unit/fake_syncer.h"
#include "tests/unit/fake_tls.h"
#include "worker/link/diloco.h"

#define ROWS 4096
#define COLUMNS 4096 /* 64 MiB of float32 in one tensor: one fragment. */
#define TENSORS 2
#define TENSOR_BYTES ((uint64_t)ROWS * COLUMNS * sizeof(float))
#define ROUNDS 6 /* Of TENSORS fragments each. */
#define RAW_BYTES (ROUNDS * TENSORS * TENSOR_BYTES)
#define PIECE (1u << 20)
#define TURNS 5
#define TURNS_MAX 50

struct cost { /* Of one direction. */
    double gb_per_s, cpu_s_per_gb;
};

static double seconds_of(struct timeval time)
{
    return (double)time.tv_sec + (double)time.tv_usec * 1e-6;
}

static double cpu_of(int who)
{
    struct rusage usage;
    getrusage(who, &usage);
    return seconds_of(usage.ru_utime) + seconds_of(usage.ru_stime);
}

/* CPU time of all threads but the calling one. */
static double cpu_of_others(void)
{
    return cpu_of(RUSAGE_SELF) - cpu_of(RUSAGE_THREAD);
}

/* --- the other end
 * ---------------------------------------------------------------------------------------------------- */

static uint8_t *piece_memory, *framed_updates[TENSORS];
static size_t framed_bytes[TENSORS];

static void append(uint8_t *out, size_t *used, const void *bytes, size_t size)
{
    memcpy(out + *used, bytes, size);
    *used += size;
}

static void append_frame(uint8_t *out, size_t *used, const uint8_t *payload, size_t size)
{
    uint8_t head[DL_WS_HEAD_MAX];
    size_t length = dl_ws_head(DL_WS_BINARY, size, NULL, head);
    head[1] &= 0x7f; /* A server does not mask. */
    append(out, used, head, length);
    append(out, used, payload, size);
}

/* All frames of one update. Its version is patched by framing anew, so the bulk is hashed once. */
static void frame_update(uint32_t p, uint64_t version)
{
    static uint8_t *values, *chunk;
    if (values == NULL) {
        values = dl_alloc_aligned(TENSOR_BYTES);
        chunk = malloc(PIECE + 64);
    }
    free(framed_updates[p]);
    framed_updates[p] = malloc(TENSOR_BYTES + (TENSOR_BYTES / PIECE + 2) * 64 + 4096);
    framed_bytes[p] = 0;
    struct dl_wire_message *message = calloc(1, sizeof *message);
    make_update(message, p, DL_CODEC_NONE, values, TENSOR_BYTES);
    message->as.update.transfer = version * TENSORS + p;
    message->as.update.version = message->as.update.round = version;
    size_t used = 0;
    if (dl_wire_encode(message, chunk, PIECE, &used, NULL) != DL_OK) {
        abort();
    }
    free(message);
    append_frame(framed_updates[p], &framed_bytes[p], chunk, used);
    for (uint64_t offset = 0; offset < TENSOR_BYTES; offset += PIECE) {
        dl_wire_chunk_head(version * TENSORS + p, offset, values + offset, PIECE, chunk);
        memcpy(chunk + 40, values + offset, PIECE);
        append_frame(framed_updates[p], &framed_bytes[p], chunk, PIECE + 40);
    }
}

/* Masked frames: small ones are messages, large ones are chunks and are thrown away. False at the end. */
static bool peer_read(struct fake_conn *conn, uint64_t *chunk_bytes, struct dl_wire_message *message)
{
    uint8_t head[14];
    if (!fake_read(conn, head, 2)) {
        return false;
    }
    uint64_t size = head[1] & 0x7f;
    size_t width = size == 126 ? 2 : size == 127 ? 8 : 0;
    if (!fake_read(conn, head + 2, width + 4)) {
        return false;
    }
    size = width > 0 ? 0 : size;
    for (size_t i = 0; i < width; i++) {
        size = size << 8 | head[2 + i];
    }
    *chunk_bytes = 0;
    message->type = DL_WIRE_CHUNK;
    if (size > 60000) { /* HELLO is smaller with two tensors. */
        *chunk_bytes = size - 40;
        return fake_read(conn, piece_memory, size);
    }
    if (!fake_read(conn, piece_memory, size)) {
        return false;
    }
    dl_ws_mask(piece_memory, piece_memory, size, head + 2 + width, 0);
    struct dl_wire_header header;
    return head[0] == 0x82 && dl_wire_header_decode(piece_memory, &header, NULL) == DL_OK &&
           dl_wire_decode(header.type, piece_memory + 24, size - 24, message, NULL) == DL_OK;
}

static void peer_welcome(struct fake_conn *conn, const struct dl_wire_hello *hello)
{
    struct dl_tensor *tensors;
    uint32_t count;
    struct dl_layout *layout;
    struct dl_err err;
    if (dl_tensors_decode(hello->tensors, hello->tensors_bytes, &tensors, &count, &err) != DL_OK ||
        dl_layout_new(tensors, count, TENSORS, DL_LAYOUT_TENSOR, &layout, &err) != DL_OK) {
        abort();
    }
    struct dl_wire_message *message = calloc(1, sizeof *message);
    static const uint64_t versions[TENSORS];
    make_welcome(message, layout, 0, 1, versions);
    message->as.welcome.layout = DL_LAYOUT_TENSOR;
    message->as.welcome.heartbeat_ms = 5000;
    message->as.welcome.timeout_ms = 60000;
    fake_send(conn, message);
    free(message);
    free(tensors);
    dl_layout_free(layout);
    for (uint32_t p = 0; p < TENSORS; p++) {
        frame_update(p, 1);
        fake_write(conn, framed_updates[p], framed_bytes[p]);
    }
}

static void peer_pull_all(struct fake_conn *conn, uint64_t round)
{
    struct dl_wire_message *message = calloc(1, sizeof *message);
    for (uint32_t p = 0; p < TENSORS; p++) {
        make_pull(message, p, 1, round * TENSORS + p);
        fake_send(conn, message);
    }
    free(message);
}

/* Pulls everything ROUNDS times, one round after the other; the time from the first byte of each to its last is what
 * counts. Then GOODBYE comes, and the seconds are written to `result`. An evaluator gets ROUNDS of updates instead. */
static void peer_websocket(struct fake_conn *conn, int result)
{
    struct dl_wire_message *message = calloc(1, sizeof *message);
    uint64_t chunk_bytes = 0, received = 0, round = 0;
    double seconds = 0;
    int64_t began_ns = 0;
    if (!fake_upgrade(conn)) {
        abort();
    }
    while (peer_read(conn, &chunk_bytes, message)) {
        if (message->type == DL_WIRE_HELLO) {
            peer_welcome(conn, &message->as.hello);
        } else if (message->type == DL_WIRE_META && round == 0) {
            peer_pull_all(conn, ++round);
        } else if (message->type == DL_WIRE_PUSH && received == 0 && began_ns == 0) {
            began_ns = dl_now_ns();
        } else if (message->type == DL_WIRE_EVALUATION) {
            for (uint64_t v = 2; v < 2 + ROUNDS; v++) {
                /* Later versions differ in two fields only; the transfer's number tells the chunks apart. */
                for (uint32_t p = 0; p < TENSORS; p++) {
                    frame_update(p, v);
                }
                int64_t from_ns = dl_now_ns();
                for (uint32_t p = 0; p < TENSORS; p++) {
                    fake_write(conn, framed_updates[p], framed_bytes[p]);
                }
                seconds += (double)(dl_now_ns() - from_ns) * 1e-9;
            }
        }
        received += chunk_bytes;
        if (received == TENSORS * TENSOR_BYTES) {
            seconds += (double)(dl_now_ns() - began_ns) * 1e-9;
            received = 0;
            began_ns = 0;
            round++;
            if (round <= ROUNDS) {
                peer_pull_all(conn, round);
            }
        }
        if (message->type == DL_WIRE_GOODBYE) {
            break;
        }
    }
    free(message);
    if (write(result, &seconds, sizeof seconds) != sizeof seconds) {
        abort();
    }
}

/* Raw: 's' the client sends RAW_BYTES, answered with a byte; 'r' it receives them. */
static void peer_raw(struct fake_conn *conn, char mode)
{
    for (uint64_t done = 0; done < RAW_BYTES; done += PIECE) {
        bool ok = mode == 's' ? fake_read(conn, piece_memory, PIECE) : fake_write(conn, piece_memory, PIECE);
        if (!ok) {
            abort();
        }
    }
    fake_write(conn, "k", 1);
}

/* Listening sockets [unpaced][with TLS]: as the system sets them up, as a syncer does. */
struct ports {
    int fds[2][2];
    uint16_t numbers[2][2];
};

static void peer_main(const struct ports *ports, SSL_CTX *tls, int result)
{
    struct fake_syncer *syncer = fake_new(TENSORS);
    struct fake_conn *conn = &syncer->conns[0];
    conn->syncer = syncer;
    for (;;) {
        struct pollfd polls[4];
        for (int i = 0; i < 4; i++) {
            polls[i] = (struct pollfd){.fd = ports->fds[i / 2][i % 2], .events = POLLIN};
        }
        poll(polls, 4, -1);
        int ready = 0;
        while (ready < 3 && polls[ready].revents == 0) {
            ready++;
        }
        bool is_secure = ready % 2 == 1;
        conn->fd = accept(polls[ready].fd, NULL, NULL);
        int one = 1;
        setsockopt(conn->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        conn->ssl = NULL;
        char mode = 0;
        if (is_secure) {
            conn->ssl = SSL_new(tls);
            SSL_set_fd(conn->ssl, conn->fd);
            if (SSL_accept(conn->ssl) != 1) {
                abort();
            }
            if (SSL_peek(conn->ssl, &mode, 1) != 1) {
                abort();
            }
        } else if (recv(conn->fd, &mode, 1, MSG_PEEK) != 1) {
            abort();
        }
        if (mode == 'G') {
            peer_websocket(conn, result);
        } else {
            fake_read(conn, &mode, 1);
            peer_raw(conn, mode);
        }
        SSL_free(conn->ssl);
        close(conn->fd);
    }
}

/* --- this end
 * --------------------------------------------------------------------------------------------------------- */

static int listener(bool unpaced, uint16_t *port)
{
    struct sockaddr_in address = {.sin_family = AF_INET};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (unpaced) {
        dl_socket_prepare(fd, (const struct sockaddr *)&address);
    }
    if (bind(fd, (struct sockaddr *)&address, size) != 0 || listen(fd, 4) != 0) {
        perror("bench: listen");
        exit(1);
    }
    getsockname(fd, (struct sockaddr *)&address, &size);
    *port = ntohs(address.sin_port);
    return fd;
}

/* The plainest TLS client there is; NULL without `ca_file`. */
static SSL *raw_tls(int fd, const char *ca_file)
{
    if (ca_file == NULL) {
        return NULL;
    }
    SSL_CTX *context = SSL_CTX_new(TLS_client_method());
    SSL *ssl = NULL;
    if (context == NULL || SSL_CTX_load_verify_locations(context, ca_file, NULL) != 1 ||
        (ssl = SSL_new(context)) == NULL || SSL_set_fd(ssl, fd) != 1 || SSL_connect(ssl) != 1) {
        fprintf(stderr, "bench: TLS to the other end failed\n");
        exit(1);
    }
    SSL_CTX_free(context);
    return ssl;
}

static size_t raw_move(int fd, SSL *ssl, bool sends, void *bytes, size_t size)
{
    ssize_t moved = ssl != NULL ? (sends ? SSL_write(ssl, bytes, (int)size) : SSL_read(ssl, bytes, (int)size))
                    : sends     ? send(fd, bytes, size, 0)
                                : recv(fd, bytes, size, 0);
    if (moved <= 0) {
        fprintf(stderr, "bench: the raw connection broke\n");
        exit(1);
    }
    return (size_t)moved;
}

static struct cost raw(bool unpaced, uint16_t port, const char *ca_file, char mode)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    uint8_t *memory = dl_alloc_large(TENSOR_BYTES); /* As large as a fragment: nothing comes from the cache. */
    memset(memory, 1, TENSOR_BYTES);                /* No page is fresh when the bytes come. */
    if (unpaced) {
        dl_socket_prepare(fd, (const struct sockaddr *)&address);
    }
    if (connect(fd, (struct sockaddr *)&address, sizeof address) != 0) {
        perror("bench: connect");
        exit(1);
    }
    SSL *ssl = raw_tls(fd, ca_file);
    raw_move(fd, ssl, true, &mode, 1);
    double cpu = cpu_of(RUSAGE_THREAD);
    int64_t from_ns = dl_now_ns();
    for (uint64_t done = 0; done < RAW_BYTES;) {
        size_t at = done % TENSOR_BYTES, size = DL_MIN((size_t)PIECE, TENSOR_BYTES - at);
        done += raw_move(fd, ssl, mode == 's', memory + at, size);
    }
    char ok = 0;
    raw_move(fd, ssl, false, &ok, 1);
    double gb = (double)RAW_BYTES * 1e-9, seconds = (double)(dl_now_ns() - from_ns) * 1e-9;
    struct cost cost = {gb / seconds, (cpu_of(RUSAGE_THREAD) - cpu) / gb};
    SSL_free(ssl);
    close(fd);
    free(memory);
    return cost;
}

static float *tensors[TENSORS];

static void must(int code, const struct diloco_error *error)
{
    if (code < 0) {
        fprintf(stderr, "bench: %s\n", error->text);
        exit(1);
    }
}

static void pause_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000}, NULL);
}

static struct diloco *join(uint16_t port, const char *ca_file, enum diloco_role role, struct diloco_info *info)
{
    char endpoint[64];
    snprintf(endpoint, sizeof endpoint, "%s://127.0.0.1:%u", ca_file == NULL ? "ws" : "wss", port);
    struct diloco_options options = {.struct_size = sizeof options,
                                     .job = "bench",
                                     .endpoints = endpoint,
                                     .learner = 0,
                                     .role = role,
                                     .ca_file = ca_file,
                                     .join_timeout_seconds = 60};
    struct diloco *d = NULL;
    struct diloco_error error;
    must(diloco_open(&options, &d, &error), &error);
    static const uint64_t shape[2] = {ROWS, COLUMNS};
    for (uint32_t i = 0; i < TENSORS; i++) {
        must(diloco_register(d, i == 0 ? "a" : "b", tensors[i], 2, shape, DILOCO_WEIGHT, i, &error), &error);
    }
    must(diloco_join(d, info, &error), &error);
    return d;
}

static double result_of(int result)
{
    double seconds = 0;
    if (read(result, &seconds, sizeof seconds) != sizeof seconds) {
        exit(1);
    }
    return seconds;
}

static struct cost push(uint16_t port, const char *ca_file, int result)
{
    struct diloco_info info;
    struct diloco_error error;
    struct diloco *d = join(port, ca_file, DILOCO_LEARNER, &info);
    uint64_t before = info.bytes_sent;
    double cpu = cpu_of_others();
    while (info.pushes_total < ROUNDS * TENSORS) {
        must(diloco_step(d, 1, 0, &info, &error), &error);
        pause_ms(2);
    }
    double gb = (double)(info.bytes_sent - before) * 1e-9;
    double cpu_per_gb = (cpu_of_others() - cpu) / gb;
    must(diloco_leave(d, 0, 10, "done", &error), &error);
    diloco_close(d);
    return (struct cost){(double)RAW_BYTES * 1e-9 / result_of(result), cpu_per_gb};
}

static struct cost broadcast(uint16_t port, const char *ca_file, int result)
{
    struct diloco_info info;
    struct diloco_error error;
    struct diloco *d = join(port, ca_file, DILOCO_EVALUATOR, &info);
    uint64_t joined = info.bytes_received, before = 0;
    double cpu = 0;
    must(diloco_report(d, 1, 1, &error), &error); /* Starts the updates. */
    while (info.bytes_received - joined < RAW_BYTES) {
        must(diloco_poll(d, 10, &info, &error), &error);
        if (before == 0 && info.bytes_received - joined > RAW_BYTES / 2) {
            /* From here on all memory has been used before. */
            before = info.bytes_received;
            cpu = cpu_of_others();
        }
    }
    double gb = (double)(info.bytes_received - before) * 1e-9;
    double cpu_per_gb = (cpu_of_others() - cpu) / gb;
    must(diloco_leave(d, 0, 10, "done", &error), &error);
    diloco_close(d);
    return (struct cost){(double)RAW_BYTES * 1e-9 / result_of(result), cpu_per_gb};
}

/* One thing, and what it is compared with: in turn, so that both see the same machine. Ratios are between the best of each: other
 * processes of the machine can only make a run slower. */
struct costs {
    struct bench_stats gb_per_s, cpu_s_per_gb;
};

static struct costs costs_of(const struct cost runs[TURNS_MAX], uint32_t turns)
{
    double rates[TURNS_MAX] = {0}, cpu[TURNS_MAX] = {0};
    for (uint32_t i = 0; i < turns; i++) {
        rates[i] = runs[i].gb_per_s;
        cpu[i] = runs[i].cpu_s_per_gb;
    }
    return (struct costs){bench_stats_of(rates, turns), bench_stats_of(cpu, turns)};
}

/* What is measured in turn. */
enum kind { SEND, SEND_RENO, PUSH, RECEIVE, RECEIVE_RENO, BROADCAST, KINDS };

static const struct kind_of {
    const char *rate[2], *cpu[2]; /* Names; plain, with TLS. */
} kinds[KINDS] = {
    [SEND] = {{"tcp_send_rate", "tls_send_rate"}, {"tcp_send_cpu", "tls_send_cpu"}},
    [SEND_RENO] = {{"tcp_send_rate_reno", "tls_send_rate_reno"}, {"tcp_send_cpu_reno", "tls_send_cpu_reno"}},
    [PUSH] = {{"push_rate", "push_rate_tls"}, {"push_cpu", "push_cpu_tls"}},
    [RECEIVE] = {{"tcp_receive_rate", "tls_receive_rate"}, {"tcp_receive_cpu", "tls_receive_cpu"}},
    [RECEIVE_RENO] = {{"tcp_receive_rate_reno", "tls_receive_rate_reno"},
                      {"tcp_receive_cpu_reno", "tls_receive_cpu_reno"}},
    [BROADCAST] = {{"broadcast_rate", "broadcast_rate_tls"}, {"broadcast_cpu", "broadcast_cpu_tls"}},
};

static const struct figure { /* A kind as a ratio to another one; names where they are not the kind's own. */
    enum kind of, to;
    const char *rate[2], *cpu[2];
} figures[] = {
    {PUSH, SEND, {NULL}, {NULL}},
    {BROADCAST, RECEIVE, {NULL}, {NULL}},
    {PUSH, SEND_RENO, {"push_rate_reno", "push_rate_tls_reno"}, {"push_cpu_reno", "push_cpu_tls_reno"}},
    {BROADCAST,
     RECEIVE_RENO,
     {"broadcast_rate_reno", "broadcast_rate_tls_reno"},
     {"broadcast_cpu_reno", "broadcast_cpu_tls_reno"}},
};

static struct cost take_turn(enum kind kind, const struct ports *ports, bool secure, const char *ca_file, int result)
{
    uint16_t port = ports->numbers[kind != SEND && kind != RECEIVE][secure];
    switch (kind) {
    case SEND: return raw(false, port, ca_file, 's');
    case SEND_RENO: return raw(true, port, ca_file, 's');
    case PUSH: return push(port, ca_file, result);
    case RECEIVE: return raw(false, port, ca_file, 'r');
    case RECEIVE_RENO: return raw(true, port, ca_file, 'r');
    case BROADCAST: return broadcast(port, ca_file, result);
    case KINDS: break;
    }
    abort();
}

static void compare(struct bench_report *report, const struct ports *ports, bool secure, const char *ca_file,
                    int result, uint32_t turns)
{
    static struct cost runs[KINDS][TURNS_MAX];
    struct costs costs[KINDS];
    for (uint32_t i = 0; i < turns; i++) {
        for (enum kind kind = 0; kind < KINDS; kind++) {
            runs[kind][i] = take_turn(kind, ports, secure, ca_file, result);
        }
    }
    for (enum kind kind = 0; kind < KINDS; kind++) {
        costs[kind] = costs_of(runs[kind], turns);
        if (kind != PUSH && kind != BROADCAST) {
            bench_add_spread(report, kinds[kind].rate[secure], costs[kind].gb_per_s, "GB/s", NULL, 0);
            bench_add_spread(report, kinds[kind].cpu[secure], costs[kind].cpu_s_per_gb, "CPU s/GB", NULL, 0);
        }
    }
    for (size_t i = 0; i < DL_COUNT_OF(figures); i++) {
        const struct figure *figure = &figures[i];
        const struct kind_of *of = &kinds[figure->of], *to = &kinds[figure->to];
        const struct costs *ours = &costs[figure->of], *theirs = &costs[figure->to];
        const char *rate = figure->rate[secure] != NULL ? figure->rate[secure] : of->rate[secure];
        const char *cpu = figure->cpu[secure] != NULL ? figure->cpu[secure] : of->cpu[secure];
        bench_add_spread(report, rate, ours->gb_per_s, "GB/s", to->rate[secure],
                         ours->gb_per_s.max / theirs->gb_per_s.max);
        bench_add_spread(report, cpu, ours->cpu_s_per_gb, "CPU s/GB", to->cpu[secure],
                         ours->cpu_s_per_gb.min / theirs->cpu_s_per_gb.min);
    }
}

int main(int argc, char **argv)
{
    uint32_t turns = argc > 1 ? (uint32_t)DL_MIN(strtoul(argv[1], NULL, 10), (unsigned long)TURNS_MAX) : TURNS;
    turns = DL_MAX(turns, 1u);
    const char *only = argc > 2 ? argv[2] : "";
    char folder[] = "/tmp/diloco-bench-XXXXXX", ca_file[300];
    if (mkdtemp(folder) == NULL) {
        return 1;
    }
    fake_certificate(folder, "server", "IP:127.0.0.1");
    snprintf(ca_file, sizeof ca_file, "%s/server.pem", folder);
    SSL_CTX *tls = fake_server_tls(folder, "server", false);
    struct ports ports;
    int result[2];
    for (int i = 0; i < 4; i++) {
        ports.fds[i / 2][i % 2] = listener(i / 2 == 1, &ports.numbers[i / 2][i % 2]);
    }
    if (pipe(result) != 0) {
        return 1;
    }
    piece_memory = dl_alloc_aligned(PIECE + 4096);
    pid_t peer = fork();
    if (peer == 0) {
        peer_main(&ports, tls, result[1]);
        return 0;
    }
    for (int i = 0; i < TENSORS; i++) {
        tensors[i] = dl_alloc_large(TENSOR_BYTES);
        memset(tensors[i], 0, TENSOR_BYTES);
    }
    struct bench_report report = {0};
    for (int with_tls = 0; with_tls < 2; with_tls++) {
        if (strcmp(only, with_tls ? "plain" : "tls") != 0) {
            compare(&report, &ports, with_tls, with_tls ? ca_file : NULL, result[0], turns);
        }
    }
    kill(peer, SIGKILL);
    waitpid(peer, NULL, 0);
    fake_certificate_remove(folder, "server");
    rmdir(folder);
    return bench_write(&report, "build/results/transport.json");
}
