/* bench_syncer: whole outer rounds through a real diloco-syncer, and what they cost its process, against raw TCP in the same
 * run.
 *
 * Learners are threads of this process that do nothing but call diloco_step: each round moves every learner's encoded
 * fragment in and the new version out to all. CPU is the syncer's alone (network thread, merge, encoding), a GB moved in
 * either direction; the yardstick is what one end of a plain TCP connection takes for a GB. */
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
#include "tests/bench/bench.h"
#include "worker/link/diloco.h"

#define LEARNERS 4
#define FRAGMENTS 2
#define ROWS 2048
#define COLUMNS 4096 /* 32 MiB of float32 a fragment. */
#define FRAGMENT_BYTES ((uint64_t)ROWS * COLUMNS * sizeof(float))
#define WARM_ROUNDS 4
#define ROUNDS 12
#define PAUSE_US 2000
#define RAW_BYTES (UINT64_C(2) << 30)
#define TEXT_BYTES 65536

static char folder[] = "/tmp/diloco-bench-syncer-XXXXXX";
static char address[64];
static atomic_bool stop;
static _Atomic uint64_t last_round;

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

/* --- the syncer ------------------------------------------------------------------------------------------------------ */

static void write_file(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    if (file == NULL || fputs(text, file) < 0 || fclose(file) != 0) {
        fail(path);
    }
}

static void write_job(const char *compression)
{
    char text[2048];
    snprintf(
        text, sizeof text,
        "{\"apiVersion\":\"diloco.dev/v1alpha1\",\"kind\":\"DecoupledDiLoCoJob\",\"metadata\":{\"name\":\"bench\"},"
        "\"spec\":{\"training\":{\"tokenBudget\":1000000000000,\"data\":{\"paths\":[\"/dev/null\"]}},"
        "\"sync\":{\"fragments\":%d,\"interval\":%d,\"overlap\":1,\"warmup\":{\"steps\":0},\"quorum\":%d,"
        "\"compression\":\"%s\",\"grace\":{\"mode\":\"none\"}},"
        "\"learners\":{\"min\":1,\"max\":%d,\"replicas\":%d}}}",
        FRAGMENTS, FRAGMENTS, LEARNERS, compression, LEARNERS, LEARNERS);
    write_file("job.json", text);
    write_file("token", "bench\n");
}

static pid_t start_syncer(const char *program, bool durable)
{
    char job[128], token[128], port[128], state[128];
    snprintf(job, sizeof job, "%s/job.json", folder);
    snprintf(token, sizeof token, "%s/token", folder);
    snprintf(port, sizeof port, "%s/port", folder);
    snprintf(state, sizeof state, "%s/state", folder);
    unlink(port);
    pid_t child = fork();
    if (child == 0) {
        execl(program, program, "--job", job, "--shard", "0", "--listen", "127.0.0.1:0", "--token-file", token,
              "--port-file", port, "--state-dir", durable ? state : "", "--log-level", "error", (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 500; i++) {
        FILE *file = fopen(port, "r");
        bool got = file != NULL && fgets(address, sizeof address, file) != NULL;
        if (file != NULL) {
            fclose(file);
        }
        if (got) {
            address[strcspn(address, "\n")] = '\0';
            return child;
        }
        usleep(20000);
    }
    fail("bench: the syncer did not start");
    return child;
}

static double cpu_of_process(pid_t pid)
{
    char path[64], text[1024] = "";
    unsigned long user = 0, system = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "r");
    if (file == NULL || fgets(text, sizeof text, file) == NULL) {
        fail(path);
    }
    fclose(file);
    const char *rest = strrchr(text, ')');
    if (rest == NULL || sscanf(rest, ") %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user, &system) != 2) {
        fail("bench: /proc/PID/stat");
    }
    return (double)(user + system) / (double)sysconf(_SC_CLK_TCK);
}

static int connect_to(const char *where)
{
    char host[64];
    snprintf(host, sizeof host, "%s", where);
    char *colon = strrchr(host, ':');
    struct sockaddr_in peer = {.sin_family = AF_INET};
    *colon = '\0';
    peer.sin_port = htons((uint16_t)strtoul(colon + 1, NULL, 10));
    inet_pton(AF_INET, host, &peer.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&peer, sizeof peer) != 0) {
        fail("bench: connect");
    }
    return fd;
}

struct moved { /* From /status. */
    double in, out, merge, commit;
};

static double number_after(const char *text, const char *key)
{
    const char *at = strstr(text, key);
    return at == NULL ? 0 : strtod(at + strlen(key), NULL);
}

static struct moved read_status(void)
{
    static char text[TEXT_BYTES];
    static const char request[] = "GET /status HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n";
    int fd = connect_to(address);
    size_t used = 0;
    ssize_t got = send(fd, request, sizeof request - 1, 0);
    while (got > 0 && used < sizeof text - 1) {
        got = recv(fd, text + used, sizeof text - 1 - used, 0);
        used += got > 0 ? (size_t)got : 0;
    }
    text[used] = '\0';
    close(fd);
    const char *times = strstr(text, "\"times\"");
    times = times == NULL ? "" : times;
    return (struct moved){.in = number_after(text, "\"bytesIn\":"),
                          .out = number_after(text, "\"bytesOut\":"),
                          .merge = number_after(times, "\"merge\":"),
                          .commit = number_after(times, "\"commit\":")};
}

/* --- learners --------------------------------------------------------------------------------------------------------- */

static void must(int code, const struct diloco_error *error)
{
    if (code < 0) {
        fprintf(stderr, "bench: %s\n", error->text);
        exit(1);
    }
}

static void *learn(void *argument)
{
    struct diloco_error error;
    struct diloco_info info = {0};
    char endpoint[80], uid[32];
    snprintf(endpoint, sizeof endpoint, "ws://%s", address);
    snprintf(uid, sizeof uid, "bench:%d", *(int *)argument);
    struct diloco_options options = {.struct_size = sizeof options,
                                     .job = "bench",
                                     .endpoints = endpoint,
                                     .token = "bench",
                                     .learner = *(int *)argument,
                                     .uid = uid};
    struct diloco *d = NULL;
    float *values[FRAGMENTS];
    must(diloco_open(&options, &d, &error), &error);
    for (int p = 0; p < FRAGMENTS; p++) {
        const uint64_t shape[2] = {ROWS, COLUMNS};
        char name[8] = {(char)('a' + p), '\0'};
        values[p] = dl_alloc_aligned(FRAGMENT_BYTES);
        must(diloco_register(d, name, values[p], 2, shape, DILOCO_WEIGHT, 0, &error), &error);
    }
    must(diloco_join(d, &info, &error), &error);
    while (!atomic_load(&stop)) {
        for (int p = 0; p < FRAGMENTS; p++) {
            values[p][info.step % 1000] += 1e-3f;
        }
        must(diloco_step(d, 32, 1.0f, &info, &error), &error);
        uint64_t seen = atomic_load(&last_round);
        while (info.last_round > seen && !atomic_compare_exchange_weak(&last_round, &seen, info.last_round)) {
        }
        usleep(PAUSE_US);
    }
    diloco_close(d);
    for (int p = 0; p < FRAGMENTS; p++) {
        free(values[p]);
    }
    return NULL;
}

static void wait_for_round(uint64_t round)
{
    for (int i = 0; atomic_load(&last_round) < round; i++) {
        if (i > 60000) {
            fprintf(stderr, "bench: no round within a minute\n");
            exit(1);
        }
        usleep(1000);
    }
}

/* --- the yardstick ---------------------------------------------------------------------------------------------------- */

static double cpu_of_thread(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

static void *send_raw(void *argument)
{
    int fd = *(int *)argument;
    uint8_t *memory = dl_alloc_aligned(FRAGMENT_BYTES);
    for (uint64_t done = 0; done < RAW_BYTES;) {
        uint64_t at = done % FRAGMENT_BYTES;
        ssize_t sent = send(fd, memory + at, DL_MIN(FRAGMENT_BYTES - at, (uint64_t)1 << 20), 0);
        if (sent <= 0) {
            fail("bench: raw send");
        }
        done += (uint64_t)sent;
    }
    free(memory);
    close(fd);
    return NULL;
}

/* CPU seconds a GB of a plain receiver that places what it gets. */
static double raw_receive(void)
{
    struct sockaddr_in local = {.sin_family = AF_INET};
    local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof local;
    char where[64];
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&local, size) != 0 || listen(listener, 1) != 0 ||
        getsockname(listener, (struct sockaddr *)&local, &size) != 0) {
        fail("bench: listen");
    }
    snprintf(where, sizeof where, "127.0.0.1:%u", ntohs(local.sin_port));
    int fd = connect_to(where);
    int peer = accept(listener, NULL, NULL);
    pthread_t thread;
    uint8_t *memory = dl_alloc_aligned(FRAGMENT_BYTES);
    pthread_create(&thread, NULL, send_raw, &fd);
    double before = cpu_of_thread();
    for (uint64_t done = 0; done < RAW_BYTES;) {
        uint64_t at = done % FRAGMENT_BYTES;
        ssize_t got = recv(peer, memory + at, FRAGMENT_BYTES - at, 0);
        if (got <= 0) {
            fail("bench: raw receive");
        }
        done += (uint64_t)got;
    }
    double cpu = cpu_of_thread() - before;
    pthread_join(thread, NULL);
    free(memory);
    close(peer);
    close(listener);
    return cpu / ((double)RAW_BYTES * 1e-9);
}

/* --- runs ------------------------------------------------------------------------------------------------------------- */

static void run(struct bench_report *report, const char *program, const char *compression, bool durable,
                const char *const names[2])
{
    pthread_t threads[LEARNERS];
    int numbers[LEARNERS];
    write_job(compression);
    atomic_store(&stop, false);
    atomic_store(&last_round, 0);
    double yardstick = raw_receive();
    pid_t pid = start_syncer(program, durable);
    for (int i = 0; i < LEARNERS; i++) {
        numbers[i] = i;
        pthread_create(&threads[i], NULL, learn, &numbers[i]);
    }
    wait_for_round(WARM_ROUNDS);
    uint64_t first = atomic_load(&last_round);
    struct moved before = read_status();
    double cpu = cpu_of_process(pid);
    int64_t start = dl_now_ns();
    wait_for_round(first + ROUNDS);
    double seconds = (double)(dl_now_ns() - start) * 1e-9;
    double rounds = (double)(atomic_load(&last_round) - first);
    cpu = cpu_of_process(pid) - cpu;
    struct moved after = read_status();
    double gb = (after.in - before.in + after.out - before.out) * 1e-9;
    atomic_store(&stop, true);
    for (int i = 0; i < LEARNERS; i++) {
        pthread_join(threads[i], NULL);
    }
    kill(pid, SIGTERM);
    waitpid(pid, NULL, 0);
    printf("%-5s %-7s round %7.1f ms (%.1f MB moved), syncer %.3f CPU s/GB (raw TCP, one end: %.3f), merge %.1f ms, "
           "commit %.1f ms\n",
           compression, durable ? "durable" : "memory", seconds / rounds * 1e3, gb * 1e3 / rounds, cpu / gb, yardstick,
           after.merge * 1e3, after.commit * 1e3);
    bench_add(report, names[0], seconds / rounds * 1e3, "ms", NULL, 0);
    bench_add(report, names[1], cpu / gb, "s/GB", "raw_tcp_one_end", cpu / gb / yardstick);
}

int main(int argc, char **argv)
{
    struct bench_report report = {0};
    char program[512];
    const char *slash = strrchr(argv[0], '/');
    /* build/VARIANT/bench/syncer stands beside build/VARIANT/bin. */
    snprintf(program, sizeof program, "%.*s/../bin/diloco-syncer", slash == NULL ? 1 : (int)(slash - argv[0]),
             slash == NULL ? "." : argv[0]);
    if (mkdtemp(folder) == NULL) {
        fail(folder);
    }
    run(&report, argc > 1 ? argv[1] : program, "none", false,
        (const char *const[]){"syncer_none_memory_round", "syncer_none_memory_cpu"});
    run(&report, argc > 1 ? argv[1] : program, "int8", false,
        (const char *const[]){"syncer_int8_memory_round", "syncer_int8_memory_cpu"});
    run(&report, argc > 1 ? argv[1] : program, "none", true,
        (const char *const[]){"syncer_none_durable_round", "syncer_none_durable_cpu"});
    char command[256];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) {
        return 1;
    }
    return bench_write(&report, "build/results/syncer.json");
}
