/* syncer_rig: a real diloco-syncer and learners that train nothing, for the benches of whole rounds.
 *
 * Learners are threads of the bench that do nothing but call diloco_step: each round moves every learner's encoded
 * fragment in and the new version out to all. For tests/bench alone; a failure ends the program. */
#ifndef DL_TESTS_BENCH_SYNCER_RIG_H
#define DL_TESTS_BENCH_SYNCER_RIG_H

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/mem.h"
#include "common/socket.h"
#include "tests/bench/bench.h"
#include "worker/link/diloco.h"

#define RIG_LEARNERS_MAX 64
#define RIG_FRAGMENTS_MAX 8
#define RIG_SHARDS_MAX 4
#define RIG_TEXT_BYTES 262144
#define RIG_SOON_STEPS 8          /* After an update: those that the next round waits for. */
#define RIG_ROUND_SECONDS_MAX 180 /* For one round: of 8 x 100 MB on a machine with much else to do. */

struct rig_setup {
    const char *program;                         /* diloco-syncer */
    uint32_t learners, fragments, rows, columns; /* A fragment is one tensor of rows x columns. */
    const char *compression, *broadcast;
    bool durable, held; /* held: learners stand still until rig_run_rounds. */
    uint32_t pause_us;  /* Between two steps. */
    uint32_t soon_us;   /* After each of the first steps that follow an update; 0: pause_us. */
    uint32_t shards;    /* 0 is 1. */
};

struct rig { /* One at a time. */
    struct rig_setup setup;
    char folder[64], address[64];
    pid_t pid; /* Of shard 0, as the address. */
    struct rig_shard {
        char address[64];
        pid_t pid;
    } more[RIG_SHARDS_MAX - 1]; /* The other ones. */
    atomic_bool stop;
    _Atomic uint64_t last_round;
    _Atomic uint64_t updates_limit; /* Learners that have applied as many stand still, until `moved`. */
    pthread_mutex_t lock;
    pthread_cond_t moved;
    uint32_t started;
    pthread_t threads[RIG_LEARNERS_MAX];
    struct rig_learner {
        struct rig *rig;
        int number;
        _Atomic uint64_t steps, pushes, updates;
    } learners[RIG_LEARNERS_MAX];
};

static inline void rig_fail(const char *what)
{
    perror(what);
    exit(1);
}

static inline uint64_t rig_fragment_bytes(const struct rig_setup *setup)
{
    return (uint64_t)setup->rows * setup->columns * sizeof(float);
}

/* The round that figures are given for: 8 learners, one fragment of 100 MB, everybody in every round, memory alone. */
static inline struct rig_setup rig_setup_of_round(const char *program, const char *compression, const char *broadcast)
{
    return (struct rig_setup){.program = program,
                              .learners = 8,
                              .fragments = 1,
                              .rows = 6250,
                              .columns = 4000,
                              .compression = compression,
                              .broadcast = broadcast,
                              .pause_us = 5000, /* Steps: still more of them than any trainer makes. */
                              .soon_us = 1000}; /* They train nothing, so that the next round need not wait for them. */
}

/* Memory that has been used before, in large pages where there are any, as the built-in trainer's is. */
static inline void *rig_memory(uint64_t bytes)
{
    uint8_t *memory = dl_alloc_large(bytes);
    if (memory == NULL) {
        rig_fail("bench: memory");
    }
    memset(memory, 0, bytes);
    return memory;
}

/* build/VARIANT/bench/NAME stands beside build/VARIANT/bin. */
static inline void rig_find_program(const char *argv0, const char *name, char *path, size_t size)
{
    const char *slash = strrchr(argv0, '/');
    snprintf(path, size, "%.*s/../bin/%s", slash == NULL ? 1 : (int)(slash - argv0), slash == NULL ? "." : argv0, name);
}

/* --- the syncer ------------------------------------------------------------------------------------------------------ */

static inline void rig_write_file(const struct rig *rig, const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", rig->folder, name);
    FILE *file = fopen(path, "w");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0) {
        rig_fail(path);
    }
}

static inline void rig_write_job(const struct rig *rig)
{
    const struct rig_setup *s = &rig->setup;
    uint32_t learners = DL_MAX(s->learners, 1u), interval = DL_MAX(s->fragments, 2u);
    char text[2048];
    snprintf(
        text, sizeof text,
        "{\"apiVersion\":\"diloco.dev/v1alpha1\",\"kind\":\"DecoupledDiLoCoJob\",\"metadata\":{\"name\":\"bench\"},"
        "\"spec\":{\"training\":{\"tokenBudget\":1000000000000,\"data\":{\"paths\":[\"/dev/null\"]}},"
        "\"sync\":{\"fragments\":%u,\"interval\":%u,\"overlap\":1,\"warmup\":{\"steps\":0},\"quorum\":%u,"
        "\"compression\":\"%s\",\"broadcastCompression\":\"%s\",\"grace\":{\"mode\":\"none\"}},"
        "\"learners\":{\"min\":1,\"max\":%u,\"replicas\":%u},\"syncer\":{\"shards\":%u}}}",
        s->fragments, interval, learners, s->compression, s->broadcast, learners, learners, DL_MAX(s->shards, 1u));
    rig_write_file(rig, "job.json", text);
    rig_write_file(rig, "token", "bench\n");
}

static inline void rig_start_shard(struct rig *rig, uint32_t shard, pid_t *pid, char address[64])
{
    char job[128], token[128], port[128], state[128], number[16];
    snprintf(number, sizeof number, "%u", shard);
    snprintf(job, sizeof job, "%s/job.json", rig->folder);
    snprintf(token, sizeof token, "%s/token", rig->folder);
    snprintf(port, sizeof port, "%s/port-%u", rig->folder, shard);
    snprintf(state, sizeof state, shard == 0 ? "%s/state" : "%s/state-%u", rig->folder, shard);
    unlink(port);
    *pid = fork();
    if (*pid == 0) {
        execl(rig->setup.program, rig->setup.program, "--job", job, "--shard", number, "--listen",
              address[0] != '\0' ? address : "127.0.0.1:0", /* Started again: where it was. */
              "--token-file", token, "--port-file", port, "--state-dir", rig->setup.durable ? state : "", "--log-level",
              "error", (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 500; i++) {
        FILE *file = fopen(port, "r");
        bool got = file != NULL && fgets(address, 64, file) != NULL;
        if (file != NULL) {
            fclose(file);
        }
        if (got) {
            address[strcspn(address, "\n")] = '\0';
            return;
        }
        usleep(20000);
    }
    rig_fail("bench: the syncer did not start");
}

/* Shard 0; also after it was killed. */
static inline void rig_start_syncer(struct rig *rig)
{
    rig_start_shard(rig, 0, &rig->pid, rig->address);
}

static inline double rig_cpu_of_syncer(const struct rig *rig)
{
    char path[64], text[1024] = "";
    unsigned long user = 0, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)rig->pid);
    FILE *file = fopen(path, "r");
    if (file == NULL || fgets(text, sizeof text, file) == NULL) {
        rig_fail(path);
    }
    fclose(file);
    const char *rest = strrchr(text, ')');
    if (rest == NULL || sscanf(rest, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) != 2) {
        rig_fail("bench: /proc/PID/stat");
    }
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

static inline double rig_cpu_of_process(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

/* A line of /proc/PID/status in MB: "VmRSS:", "VmHWM:". */
static inline double rig_memory_mb(pid_t pid, const char *key)
{
    char path[64], line[256];
    double kib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        rig_fail(path);
    }
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, key, strlen(key)) == 0) {
            kib = strtod(line + strlen(key), NULL);
        }
    }
    fclose(file);
    return kib * 1024e-6;
}

/* `unpaced`: as syncer and learners set up connections within a machine (dl_socket_prepare), else as the system does. */
static inline int rig_connect(const char *where, bool unpaced)
{
    char host[64];
    snprintf(host, sizeof host, "%s", where);
    char *colon = strrchr(host, ':');
    struct sockaddr_in peer = {.sin_family = AF_INET};
    *colon = '\0';
    peer.sin_port = htons((uint16_t)strtoul(colon + 1, NULL, 10));
    inet_pton(AF_INET, host, &peer.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (unpaced) {
        dl_socket_prepare(fd, (const struct sockaddr *)&peer);
    }
    if (connect(fd, (struct sockaddr *)&peer, sizeof peer) != 0) {
        rig_fail("bench: connect");
    }
    return fd;
}

/* GET `path`; the whole answer in `text`. */
static inline void rig_get(const struct rig *rig, const char *path, char *text, size_t size)
{
    char request[128];
    snprintf(request, sizeof request, "GET %s HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n", path);
    int fd = rig_connect(rig->address, false);
    size_t used = 0;
    ssize_t got = send(fd, request, strlen(request), 0);
    while (got > 0 && used < size - 1) {
        got = recv(fd, text + used, size - 1 - used, 0);
        used += got > 0 ? (size_t)got : 0;
    }
    text[used] = '\0';
    close(fd);
}

struct rig_status {
    double in, out, merge, commit, held; /* Bytes, seconds; held: median of the last rounds. */
};

static inline double rig_number_after(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    return at == NULL ? 0 : strtod(at + strlen(key), NULL);
}

static inline struct rig_status rig_read_status(const struct rig *rig)
{
    static char text[RIG_TEXT_BYTES];
    rig_get(rig, "/status", text, sizeof text);
    const char *times = strstr(text, "\"times\"");
    times = times == NULL ? "" : times;
    const char *recent = strstr(text, "\"recent\"");
    const char *held = recent == NULL ? NULL : strstr(recent, "\"held\"");
    return (struct rig_status){.in = rig_number_after(text, "\"bytesIn\":"),
                               .out = rig_number_after(text, "\"bytesOut\":"),
                               .merge = rig_number_after(times, "\"merge\":"),
                               .commit = rig_number_after(times, "\"commit\":"),
                               .held = held == NULL ? 0 : rig_number_after(held, "\"median\":")};
}

/* --- learners --------------------------------------------------------------------------------------------------------- */

static inline void rig_must(int code, const struct diloco_error *error)
{
    if (code < 0) {
        fprintf(stderr, "bench: %s\n", error->text);
        exit(1);
    }
}

/* Until there are rounds to make, or the end; asleep, so that what is measured meanwhile has the machine. */
static inline void rig_stand_still(struct rig *rig, uint64_t updates)
{
    pthread_mutex_lock(&rig->lock);
    while (!atomic_load(&rig->stop) && updates >= atomic_load(&rig->updates_limit)) {
        pthread_cond_wait(&rig->moved, &rig->lock);
    }
    pthread_mutex_unlock(&rig->lock);
}

static inline void *rig_learn(void *argument)
{
    struct rig_learner *self = argument;
    struct rig *rig = self->rig;
    const struct rig_setup *s = &rig->setup;
    struct diloco_error error;
    struct diloco_info info = {0};
    char endpoints[RIG_SHARDS_MAX * 80], uid[32];
    int used = snprintf(endpoints, sizeof endpoints, "ws://%s", rig->address);
    for (uint32_t i = 1; i < s->shards; i++) {
        used += snprintf(endpoints + used, sizeof endpoints - (size_t)used, ",ws://%s", rig->more[i - 1].address);
    }
    snprintf(uid, sizeof uid, "bench:%d", self->number);
    struct diloco_options options = {.struct_size = sizeof options,
                                     .job = "bench",
                                     .endpoints = endpoints,
                                     .token = "bench",
                                     .learner = self->number,
                                     .uid = uid};
    struct diloco *d = NULL;
    float *values[RIG_FRAGMENTS_MAX];
    rig_must(diloco_open(&options, &d, &error), &error);
    for (uint32_t p = 0; p < s->fragments; p++) {
        const uint64_t shape[2] = {s->rows, s->columns};
        char name[8] = {(char)('a' + p), '\0'};
        values[p] = rig_memory(rig_fragment_bytes(s));
        rig_must(diloco_register(d, name, values[p], 2, shape, DILOCO_WEIGHT, 0, &error), &error);
    }
    rig_must(diloco_join(d, &info, &error), &error);
    atomic_store(&self->updates, info.updates_total);
    uint32_t soon = 0;
    while (!atomic_load(&rig->stop)) {
        if (info.updates_total >= atomic_load(&rig->updates_limit)) {
            rig_stand_still(rig, info.updates_total);
            continue;
        }
        for (uint32_t p = 0; p < s->fragments; p++) {
            values[p][info.step % 1000] += 1e-3f;
        }
        rig_must(diloco_step(d, 32, 1.0f, &info, &error), &error);
        atomic_store(&self->steps, info.step);
        atomic_store(&self->pushes, info.pushes_total);
        atomic_store(&self->updates, info.updates_total);
        uint64_t seen = atomic_load(&rig->last_round);
        while (info.last_round > seen && !atomic_compare_exchange_weak(&rig->last_round, &seen, info.last_round)) {
        }
        soon = info.updates_applied > 0 ? RIG_SOON_STEPS : soon > 0 ? soon - 1 : 0;
        usleep(soon > 0 && s->soon_us > 0 ? s->soon_us : s->pause_us);
    }
    diloco_close(d);
    for (uint32_t p = 0; p < s->fragments; p++) {
        free(values[p]);
    }
    return NULL;
}

static inline void rig_wait_for_round(const struct rig *rig, uint64_t round)
{
    int64_t since_ns = dl_now_ns();
    uint64_t seen = 0;
    for (uint64_t now = 0; now < round; now = atomic_load(&rig->last_round)) {
        if (now > seen) {
            seen = now;
            since_ns = dl_now_ns();
        }
        if (dl_now_ns() - since_ns > RIG_ROUND_SECONDS_MAX * DL_NS_PER_SECOND) {
            fprintf(stderr, "bench: no round within %d seconds\n", RIG_ROUND_SECONDS_MAX);
            exit(1);
        }
        usleep(1000);
    }
}

/* The syncer's memory in MB before any learner came. */
static inline double rig_start(struct rig *rig, const struct rig_setup *setup)
{
    *rig = (struct rig){
        .setup = *setup, .folder = "/tmp/diloco-bench-XXXXXX", .updates_limit = setup->held ? 0 : UINT64_MAX};
    if (mkdtemp(rig->folder) == NULL) {
        rig_fail(rig->folder);
    }
    pthread_mutex_init(&rig->lock, NULL);
    pthread_cond_init(&rig->moved, NULL);
    rig_write_job(rig);
    rig_start_syncer(rig);
    double idle_mb = rig_memory_mb(rig->pid, "VmRSS:");
    for (uint32_t i = 1; i < setup->shards; i++) {
        rig_start_shard(rig, i, &rig->more[i - 1].pid, rig->more[i - 1].address);
    }
    for (uint32_t i = 0; i < setup->learners; i++) {
        rig->learners[i].rig = rig;
        rig->learners[i].number = (int)i;
        if (pthread_create(&rig->threads[i], NULL, rig_learn, &rig->learners[i]) != 0) {
            rig_fail("bench: thread");
        }
    }
    rig->started = setup->learners;
    return idle_mb;
}

/* Until every learner has applied `updates`; the first one is the first state. */
static inline void rig_wait_for_updates(const struct rig *rig, uint64_t updates)
{
    for (uint32_t i = 0; i < rig->started; i++) {
        for (int wait = 0; atomic_load(&rig->learners[i].updates) < updates; wait++) {
            if (wait > 600000) {
                fprintf(stderr, "bench: learner %u got no update within two minutes\n", i);
                exit(1);
            }
            usleep(200);
        }
    }
}

/* Of held learners with one fragment: `count` rounds, from standing still until all have applied the last one. In
 * between nothing is under way, so that other things can be measured in turn. */
static inline void rig_run_rounds(struct rig *rig, uint64_t count)
{
    uint64_t updates = DL_MAX(atomic_load(&rig->updates_limit), UINT64_C(1)) + count;
    pthread_mutex_lock(&rig->lock);
    atomic_store(&rig->updates_limit, updates);
    pthread_cond_broadcast(&rig->moved);
    pthread_mutex_unlock(&rig->lock);
    rig_wait_for_updates(rig, updates);
}

/* Ends learners and syncer and removes the folder. */
static inline void rig_stop(struct rig *rig)
{
    pthread_mutex_lock(&rig->lock);
    atomic_store(&rig->stop, true);
    pthread_cond_broadcast(&rig->moved);
    pthread_mutex_unlock(&rig->lock);
    for (uint32_t i = 0; i < rig->started; i++) {
        pthread_join(rig->threads[i], NULL);
    }
    kill(rig->pid, SIGTERM);
    waitpid(rig->pid, NULL, 0);
    for (uint32_t i = 1; i < rig->setup.shards; i++) {
        kill(rig->more[i - 1].pid, SIGTERM);
        waitpid(rig->more[i - 1].pid, NULL, 0);
    }
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", rig->folder);
    if (system(command) != 0) {
        rig_fail(rig->folder);
    }
}

/* --- yardsticks ------------------------------------------------------------------------------------------------------- */

struct rig_raw {
    int fd;
    uint64_t bytes, window; /* To move; memory cycled through. */
    uint8_t *memory;
    bool sends;
    double cpu;
};

static inline double rig_cpu_of_thread(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

/* Moves `bytes` over a socket from or to its memory, which has been used before, and notes the CPU seconds that this took. */
static inline void *rig_raw_move(void *argument)
{
    struct rig_raw *raw = argument;
    uint8_t *memory = raw->memory;
    double before = rig_cpu_of_thread();
    for (uint64_t done = 0; done < raw->bytes;) {
        uint64_t at = done % raw->window;
        uint64_t most = DL_MIN(raw->window - at, raw->bytes - done);
        ssize_t moved = raw->sends ? send(raw->fd, memory + at, DL_MIN(most, (uint64_t)1 << 20), 0)
                                   : recv(raw->fd, memory + at, most, 0);
        if (moved <= 0) {
            rig_fail("bench: raw transfer");
        }
        done += (uint64_t)moved;
    }
    raw->cpu = rig_cpu_of_thread() - before;
    return NULL;
}

/* A connected pair over loopback TCP; `unpaced`: see rig_connect. */
static inline void rig_raw_pair(int fds[2], bool unpaced)
{
    struct sockaddr_in local = {.sin_family = AF_INET};
    local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof local;
    char where[64];
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (unpaced) {
        dl_socket_prepare(listener, (const struct sockaddr *)&local);
    }
    if (bind(listener, (struct sockaddr *)&local, size) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&local, &size) != 0) {
        rig_fail("bench: listen");
    }
    snprintf(where, sizeof where, "127.0.0.1:%u", ntohs(local.sin_port));
    fds[0] = rig_connect(where, unpaced);
    fds[1] = accept(listener, NULL, NULL);
    if (fds[1] < 0) {
        rig_fail("bench: accept");
    }
    close(listener);
}

/* CPU seconds a GB of a plain receiver that places what it gets. */
static inline double rig_raw_receive_cpu(uint64_t bytes, uint64_t window)
{
    int fds[2];
    rig_raw_pair(fds, false);
    struct rig_raw ends[2];
    for (int i = 0; i < 2; i++) {
        ends[i] = (struct rig_raw){
            .fd = fds[i], .bytes = bytes, .window = window, .memory = rig_memory(window), .sends = i == 0};
    }
    pthread_t thread;
    if (pthread_create(&thread, NULL, rig_raw_move, &ends[0]) != 0) {
        rig_fail("bench: thread");
    }
    rig_raw_move(&ends[1]);
    pthread_join(thread, NULL);
    for (int i = 0; i < 2; i++) {
        close(fds[i]);
        free(ends[i].memory);
    }
    return ends[1].cpu / ((double)bytes * 1e-9);
}

/* What a round moves, over plain TCP: bytes from each of `peers` into memory of its own at one host, then bytes of one memory
 * of the host to each. One thread an end, all connections at once. There are two sets of connections: as the system sets them up,
 * and unpaced, as ours are. Connections and memory stay from one measurement to the next,
 * as those of learners and syncer do: fresh memory costs more than the bytes. */
struct rig_raw_round {
    uint32_t peers;
    int fds[2][RIG_LEARNERS_MAX][2]; /* Unpaced or not; of peer and host. */
    uint8_t *of_peer[RIG_LEARNERS_MAX], *of_host[RIG_LEARNERS_MAX], *shared;
};

static inline void rig_raw_round_open(struct rig_raw_round *raw, uint32_t peers, uint64_t bytes_max)
{
    *raw = (struct rig_raw_round){.peers = peers, .shared = rig_memory(bytes_max)};
    for (uint32_t i = 0; i < peers; i++) {
        rig_raw_pair(raw->fds[false][i], false);
        rig_raw_pair(raw->fds[true][i], true);
        raw->of_peer[i] = rig_memory(bytes_max);
        raw->of_host[i] = rig_memory(bytes_max);
    }
}

static inline void rig_raw_round_close(struct rig_raw_round *raw)
{
    for (uint32_t i = 0; i < raw->peers; i++) {
        for (int end = 0; end < 2; end++) {
            close(raw->fds[false][i][end]);
            close(raw->fds[true][i][end]);
        }
        free(raw->of_peer[i]);
        free(raw->of_host[i]);
    }
    free(raw->shared);
}

/* One way of it; the CPU seconds of both ends. */
static inline double rig_raw_way(const struct rig_raw_round *raw, bool unpaced, bool up, uint64_t bytes)
{
    static pthread_t threads[2 * RIG_LEARNERS_MAX];
    static struct rig_raw ends[2 * RIG_LEARNERS_MAX];
    double cpu = 0;
    for (uint32_t i = 0; i < 2 * raw->peers; i++) {
        uint32_t peer = i / 2;
        bool is_peer = i % 2 == 0;
        uint8_t *of_host = up ? raw->of_host[peer] : raw->shared;
        ends[i] = (struct rig_raw){.fd = raw->fds[unpaced][peer][i % 2],
                                   .bytes = bytes,
                                   .window = bytes,
                                   .memory = is_peer ? raw->of_peer[peer] : of_host,
                                   .sends = is_peer == up};
        if (pthread_create(&threads[i], NULL, rig_raw_move, &ends[i]) != 0) {
            rig_fail("bench: thread");
        }
    }
    for (uint32_t i = 0; i < 2 * raw->peers; i++) {
        pthread_join(threads[i], NULL);
        cpu += ends[i].cpu;
    }
    return cpu;
}

/* Seconds that one takes; `cpu`: CPU seconds of all ends. */
static inline double rig_raw_round(const struct rig_raw_round *raw, bool unpaced, uint64_t up, uint64_t down,
                                   double *cpu)
{
    int64_t start = dl_now_ns();
    *cpu = rig_raw_way(raw, unpaced, true, up) + rig_raw_way(raw, unpaced, false, down);
    return (double)(dl_now_ns() - start) * 1e-9;
}

#endif
