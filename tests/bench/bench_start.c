/* bench_start: how long a person waits for the first inner step, and what idle programs weigh.
 *
 * `diloco run` of a job like the demo's, from its exec to the first inner step of any learner, as the syncer's /status has it;
 * resident memory of a syncer with nobody connected, and of a worker of that job that waits for its syncer, with the libraries
 * and the data that it has in memory; sizes of the programs without debugging symbols. */
#include <fcntl.h>
#include <sys/stat.h>
#include <zlib.h>

#include "tests/bench/syncer_rig.h"

#define REPEATS 5
#define LOOKS_MAX 6000     /* 5 ms apart. */
#define IDLE_LOOKS_MAX 300 /* 100 ms apart. */
#define IDLE_LOOKS_SAME 5
#define TEXT_MB 40
#define DEMO_DATA "/usr/share/dictd/gcide.dict.dz"

static char bin[512];
static char folder[] = "/tmp/diloco-bench-start-XXXXXX";

/* The demo's own data where it is installed; else as much, packed too. */
static const char *write_text(void)
{
    static char path[128];
    if (access(DEMO_DATA, R_OK) == 0) {
        return DEMO_DATA;
    }
    snprintf(path, sizeof path, "%s/text.gz", folder);
    gzFile text = gzopen(path, "wb1");
    for (uint32_t i = 0; text != NULL && i < TEXT_MB * 1000000 / 10; i++) {
        gzprintf(text, "%09u ", i * 2654435761u);
    }
    if (text == NULL || gzclose(text) != Z_OK) {
        rig_fail(path);
    }
    return path;
}

static void write_inputs(void)
{
    char path[128];
    const char *text = write_text();
    snprintf(path, sizeof path, "%s/job.yaml", folder);
    FILE *job = fopen(path, "w");
    if (job == NULL) {
        rig_fail(path);
    }
    fprintf(job,
            "apiVersion: diloco.dev/v1alpha1\nkind: DecoupledDiLoCoJob\nmetadata: {name: start}\nspec:\n"
            "  training:\n    tokenBudget: 100000000\n    batchSequences: 4\n    evaluationSeconds: 8\n"
            "    model: {width: 96, layers: 3, heads: 4, sequenceLength: 128}\n    data: {paths: [%s]}\n"
            "  sync: {fragments: 8, interval: 24}\n  learners: {min: 2, max: 8, replicas: 4}\n",
            text);
    fclose(job);
}

/* Whether a learner of the run has made a step, as its syncer says. */
static bool has_stepped(const char *run)
{
    static struct rig rig;
    static char text[RIG_TEXT_BYTES];
    char path[256];
    snprintf(path, sizeof path, "%s/ports/shard-0", run);
    FILE *file = fopen(path, "r");
    bool got = file != NULL && fgets(rig.address, sizeof rig.address, file) != NULL;
    if (file != NULL) {
        fclose(file);
    }
    if (!got || strchr(rig.address, '\n') == NULL) {
        return false;
    }
    rig.address[strcspn(rig.address, "\n")] = '\0';
    rig_get(&rig, "/status", text, sizeof text);
    return rig_number_after(text, "\"step\":") > 0;
}

static double start_once(int number)
{
    char program[600], job[128], run[128];
    snprintf(program, sizeof program, "%s/diloco", bin);
    snprintf(job, sizeof job, "%s/job.yaml", folder);
    snprintf(run, sizeof run, "%s/run-%d", folder, number);
    int64_t start = dl_now_ns();
    pid_t pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR);
        dup2(null, 1);
        dup2(null, 2);
        execl(program, program, "run", job, "--dir", run, (char *)NULL);
        _exit(127);
    }
    double seconds = -1;
    for (int i = 0; i < LOOKS_MAX && seconds < 0; i++) {
        if (has_stepped(run)) {
            seconds = (double)(dl_now_ns() - start) * 1e-9;
        }
        usleep(5000);
    }
    kill(pid, SIGINT);
    usleep(200000);
    kill(pid, SIGINT);
    waitpid(pid, NULL, 0);
    if (seconds < 0) {
        fprintf(stderr, "bench: %s run made no step\n", program);
        exit(1);
    }
    return seconds;
}

/* As it is installed: without its debugging symbols. */
static double size_mb(const char *name)
{
    char stripped[128], command[1024];
    struct stat info;
    snprintf(stripped, sizeof stripped, "%s/%s", folder, name);
    snprintf(command, sizeof command, "strip -o '%s' '%s/%s'", stripped, bin, name);
    if (system(command) != 0 || stat(stripped, &info) != 0) {
        rig_fail(stripped);
    }
    return (double)info.st_size * 1e-6;
}

/* A socket that lets a peer connect and says nothing. */
static int silent_listener(char endpoint[64])
{
    struct sockaddr_in local = {.sin_family = AF_INET};
    local.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof local;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(fd, (struct sockaddr *)&local, size) != 0 || listen(fd, 8) != 0 ||
        getsockname(fd, (struct sockaddr *)&local, &size) != 0) {
        rig_fail("bench: listen");
    }
    snprintf(endpoint, 64, "ws://127.0.0.1:%u", ntohs(local.sin_port));
    return fd;
}

/* Memory of a worker that waits for its syncer, once it changes no more. */
static double worker_idle_mb(void)
{
    char program[600], job[128], token[128], endpoint[64];
    int listener = silent_listener(endpoint);
    snprintf(program, sizeof program, "%s/diloco-worker", bin);
    snprintf(job, sizeof job, "%s/job.yaml", folder);
    snprintf(token, sizeof token, "%s/token", folder);
    FILE *file = fopen(token, "w");
    if (file == NULL || fputs("bench\n", file) < 0 || fclose(file) != 0) {
        rig_fail(token);
    }
    pid_t pid = fork();
    if (pid == 0) {
        execl(program, program, "learn", "--job", job, "--endpoints", endpoint, "--token-file", token, "--threads", "1",
              "--log-level", "error", (char *)NULL);
        _exit(127);
    }
    double mb = 0;
    for (int i = 0, same = 0; i < IDLE_LOOKS_MAX && same < IDLE_LOOKS_SAME; i++) {
        usleep(100000);
        double now = rig_memory_mb(pid, "VmRSS:");
        same = now > 0 && now == mb ? same + 1 : 0; /* 0: it has ended. */
        mb = now;
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    close(listener);
    if (mb <= 0) {
        fprintf(stderr, "bench: %s ended before its syncer answered\n", program);
        exit(1);
    }
    return mb;
}

static double syncer_idle_mb(void)
{
    static struct rig rig;
    char program[600];
    snprintf(program, sizeof program, "%s/diloco-syncer", bin);
    rig_start(&rig, &(struct rig_setup){.program = program,
                                        .fragments = 8,
                                        .rows = 1,
                                        .columns = 1,
                                        .compression = "int8",
                                        .broadcast = "none",
                                        .durable = true});
    char text[RIG_TEXT_BYTES / 8];
    rig_get(&rig, "/status", text, sizeof text);
    double mb = rig_memory_mb(rig.pid, "VmRSS:");
    rig_stop(&rig);
    return mb;
}

int main(int argc, char **argv)
{
    struct bench_report report = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    rig_find_program(argv[0], "", bin, sizeof bin);
    if (argc > 1) {
        snprintf(bin, sizeof bin, "%s", argv[1]);
    }
    if (mkdtemp(folder) == NULL) {
        rig_fail(folder);
    }
    write_inputs();
    double seconds[REPEATS];
    for (int i = 0; i < REPEATS; i++) {
        seconds[i] = start_once(i);
    }
    struct bench_stats start = bench_stats_of(seconds, REPEATS);
    double idle = syncer_idle_mb();
    bench_add_spread(&report, "start_seconds", start, "s", "limit_1_s", start.median);
    bench_add(&report, "syncer_idle_mb", idle, "MB", "limit_16_mb", idle / 16);
    bench_add(&report, "worker_idle_mb", worker_idle_mb(), "MB", NULL, 0);
    bench_add(&report, "syncer_binary_mb", size_mb("diloco-syncer"), "MB", NULL, 0);
    bench_add(&report, "worker_binary_mb", size_mb("diloco-worker"), "MB", NULL, 0);
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    if (system(command) != 0) {
        return 1;
    }
    return bench_write(&report, "build/results/start.json");
}
