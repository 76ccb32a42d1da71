/* The Kubernetes client over 1,000,000 watch events of pods (WATCH_EVENTS=n for another number): events a second against the
 * bare parser's rate on the same text, and resident memory, which must stay where it was after the first tenth. */
#include <signal.h>
#include <sys/wait.h>

#include "common/clock.h"
#include "operator/kube/reflector.h"
#include "tests/bench/bench.h"
#include "tests/unit/fake_api.h"

#define PODS 1000
#define EVENTS_A_WATCH 100000 /* Then the server ends the watch, as real ones do. */
#define PIECE_BYTES 61441     /* Pieces end anywhere. */
#define GROWTH_MAX_KB 1024
#define YARDSTICK_PARSES 20000
#define BOUND_NS (1800 * DL_NS_PER_SECOND)

static const char pod[] =
    "{\"kind\":\"Pod\",\"apiVersion\":\"v1\",\"metadata\":{\"name\":\"demo-learner-%llu-1\",\"namespace\":\"team\","
    "\"uid\":"
    "\"6d2a1c7e-1111-4a4a-9b9b-%012llu\",\"resourceVersion\":\"%llu\",\"creationTimestamp\":\"2026-01-01T00:00:00Z\","
    "\"labels\":{\"app.kubernetes.io/name\":\"diloco\",\"app.kubernetes.io/instance\":\"demo\",\"diloco.dev/"
    "job\":\"demo\","
    "\"diloco.dev/role\":\"learner\",\"diloco.dev/pool\":\"spot\"},\"ownerReferences\":[{\"apiVersion\":"
    "\"diloco.dev/v1alpha1\",\"kind\":\"DecoupledDiLoCoJob\",\"name\":\"demo\",\"uid\":\"u\",\"controller\":true}]},"
    "\"spec\":{\"volumes\":[{\"name\":\"job\",\"configMap\":{\"name\":\"demo\",\"defaultMode\":420}},{\"name\":"
    "\"token\","
    "\"secret\":{\"secretName\":\"demo\",\"defaultMode\":288}}],\"containers\":[{\"name\":\"learner\",\"image\":"
    "\"registry.example.com/diloco/worker:1.0\",\"args\":[\"learn\",\"--job\",\"/job/job.json\"],\"env\":[{\"name\":"
    "\"DILOCO_LEARNER\",\"value\":\"7\"}],\"resources\":{\"limits\":{\"cpu\":\"4\",\"memory\":\"8Gi\"},\"requests\":{"
    "\"cpu\":"
    "\"2\",\"memory\":\"8Gi\"}},\"volumeMounts\":[{\"name\":\"job\",\"mountPath\":\"/"
    "job\"}],\"terminationMessagePath\":"
    "\"/dev/termination-log\",\"imagePullPolicy\":\"IfNotPresent\",\"securityContext\":{\"runAsNonRoot\":true}}],"
    "\"restartPolicy\":\"OnFailure\",\"terminationGracePeriodSeconds\":15,\"nodeName\":\"node-17\",\"tolerations\":[{"
    "\"key\":"
    "\"node.kubernetes.io/not-ready\",\"operator\":\"Exists\",\"effect\":\"NoExecute\",\"tolerationSeconds\":30}]},"
    "\"status\":{\"phase\":\"Running\",\"conditions\":[{\"type\":\"Ready\",\"status\":\"True\",\"lastTransitionTime\":"
    "\"2026-01-01T00:00:05Z\"},{\"type\":\"PodScheduled\",\"status\":\"True\",\"lastTransitionTime\":\"2026-01-01T00:"
    "00:01Z\"}],"
    "\"podIP\":\"10.0.0.17\",\"containerStatuses\":[{\"name\":\"learner\",\"ready\":true,\"restartCount\":0,\"state\":"
    "{\"running\":{\"startedAt\":\"2026-01-01T00:00:04Z\"}}}]}}";

struct player {
    unsigned long long next, events; /* Also the resourceVersion. */
};

static void append_pod(struct dl_buf *out, unsigned long long index, unsigned long long version)
{
    dl_buf_printf(out, pod, index % PODS, index % PODS, version);
}

static bool play_list(struct fake_conn *conn, const struct fake_request *request, const struct player *player)
{
    char from_text[32];
    fake_query(request->query, "continue", from_text, sizeof from_text);
    unsigned long long from = strtoull(from_text, NULL, 10),
                       to = DL_MIN(from + OP_REFLECTOR_PAGE, (unsigned long long)PODS);
    struct dl_buf body;
    dl_buf_init(&body, 64u << 20);
    dl_buf_printf(&body, "{\"kind\":\"PodList\",\"metadata\":{\"resourceVersion\":\"%llu\"", player->next);
    if (to < PODS) {
        dl_buf_printf(&body, ",\"continue\":\"%llu\"", to);
    }
    dl_buf_puts(&body, "},\"items\":[");
    for (unsigned long long i = from; i < to; i++) {
        dl_buf_puts(&body, i > from ? "," : "");
        append_pod(&body, i, 1);
    }
    dl_buf_puts(&body, "]}");
    bool is_sent = fake_answer(conn, 200, body.data, 0);
    dl_buf_release(&body);
    return is_sent;
}

static bool play_watch(struct fake_conn *conn, struct player *player)
{
    const char *head = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
    bool is_sent = fake_conn_write(conn, head, strlen(head));
    struct dl_buf body;
    dl_buf_init(&body, 64u << 20);
    for (unsigned long long left = EVENTS_A_WATCH; is_sent && left > 0 && player->next < player->events; left--) {
        dl_buf_puts(&body, "{\"type\":\"MODIFIED\",\"object\":");
        append_pod(&body, player->next, player->next + 2);
        dl_buf_puts(&body, "}\n");
        player->next++;
        size_t at = 0;
        for (; is_sent && body.size - at >= PIECE_BYTES; at += PIECE_BYTES) {
            is_sent = fake_chunk(conn, body.data + at, PIECE_BYTES);
        }
        memmove(body.data, body.data + at, body.size - at);
        body.size -= at;
    }
    is_sent = is_sent && (body.size == 0 || fake_chunk(conn, body.data, body.size));
    dl_buf_release(&body);
    return is_sent && fake_chunk(conn, "", 0);
}

static bool play(void *context, struct fake_conn *conn, const struct fake_request *request)
{
    struct player *player = context;
    return strstr(request->query, "watch=true") != NULL ? play_watch(conn, player) : play_list(conn, request, player);
}

/* The server, in a process of its own: its memory is not ours. Its URL goes through `out`. */
static void run_server(int out, unsigned long long events)
{
    struct player player = {.events = events};
    struct fake_api *api = fake_api_start(NULL);
    api->hook = play;
    api->hook_context = &player;
    if (write(out, api->url, sizeof api->url) == (ssize_t)sizeof api->url) {
        pause();
    }
    _exit(0);
}

static bool read_line(const char *path, char *line, int size)
{
    DL_AUTO_FILE FILE *file = fopen(path, "r");
    return file != NULL && fgets(line, size, file) != NULL;
}

static double resident_kb(void)
{
    char line[256];
    long size = 0, pages = 0;
    if (!read_line("/proc/self/statm", line, sizeof line) || sscanf(line, "%ld %ld", &size, &pages) != 2) {
        return 0;
    }
    return (double)pages * (double)sysconf(_SC_PAGESIZE) / 1024;
}

static void on_changed(void *context, const struct op_object *object)
{
    unsigned long long *seen = context;
    *seen += object->name[0] != 0;
}

static void on_gone(void *context, const char *space, const char *name)
{
    (void)context;
    fprintf(stderr, "bench_watch: %s/%s was told as gone\n", space, name);
    exit(1);
}

/* CPU time of this process: the machine may be busy with other things. */
static double cpu_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Parses a CPU second of the bare parser on one event. */
static double yardstick_rate(void)
{
    struct dl_buf text;
    dl_buf_init(&text, 1u << 20);
    append_pod(&text, 1, 2);
    double start = cpu_seconds();
    for (int i = 0; i < YARDSTICK_PARSES; i++) {
        cJSON_Delete(cJSON_ParseWithLength(text.data, text.size));
    }
    double rate = YARDSTICK_PARSES / (cpu_seconds() - start);
    dl_buf_release(&text);
    return rate;
}

static int measure(struct op_client *client, unsigned long long events)
{
    struct op_reflector *reflector = NULL;
    struct op_loop *loop = op_client_loop(client);
    unsigned long long seen = 0;
    struct op_reflector_options options = {
        .resource = &op_res_pods, .context = &seen, .changed = on_changed, .gone = on_gone};
    double yardstick = yardstick_rate(), early_kb = 0, start = 0;
    if (op_reflector_new(client, &options, &reflector, NULL) != DL_OK) {
        return 1;
    }
    int64_t bound_ns = dl_now_ns() + BOUND_NS;
    while (op_reflector_stats(reflector).events < events && dl_now_ns() < bound_ns) {
        op_loop_turn(loop, 100);
        uint64_t now = op_reflector_stats(reflector).events;
        if (start <= 0 && now > 0) {
            start = cpu_seconds();
        }
        if (early_kb <= 0 && now >= events / 10) {
            early_kb = resident_kb();
        }
    }
    double seconds = cpu_seconds() - start, late_kb = resident_kb();
    struct op_reflector_stats stats = op_reflector_stats(reflector);
    size_t known = op_reflector_count(reflector);
    op_reflector_free(reflector);
    double rate = (double)stats.events / seconds;
    printf("%llu events in %.1f s of CPU: %.0f/s, %.2f of the bare parser; %llu watches, %llu list; %.1f MB, grown by "
           "%.0f kB\n",
           (unsigned long long)stats.events, seconds, rate, rate / yardstick, (unsigned long long)stats.watches,
           (unsigned long long)stats.lists, late_kb / 1024, late_kb - early_kb);
    if (stats.events != events || known != PODS || seen != events + PODS || stats.lists != 1) {
        fprintf(stderr, "bench_watch: events were lost: %llu told of %llu\n", seen, events + PODS);
        return 1;
    }
    if (late_kb - early_kb > GROWTH_MAX_KB) {
        fprintf(stderr, "bench_watch: memory grew by more than %d kB\n", GROWTH_MAX_KB);
        return 1;
    }
    struct bench_report report = {.count = 0};
    bench_add(&report, "watch_events", rate, "1/s of CPU", "cjson_parse_1t", rate / yardstick);
    bench_add(&report, "watch_rss_mb", late_kb / 1024, "MB", NULL, 0);
    bench_add(&report, "watch_rss_growth_kb", late_kb - early_kb, "kB", NULL, 0);
    return bench_write(&report, "build/results/watch.json");
}

int main(void)
{
    const char *wanted = getenv("WATCH_EVENTS");
    unsigned long long events = wanted != NULL ? strtoull(wanted, NULL, 10) : 1000000;
    struct op_config config = {.space = (char *)(uintptr_t) "default"};
    struct op_loop *loop = NULL;
    struct op_client *client = NULL;
    char url[64] = "";
    int ends[2], status = 1;
    if (pipe(ends) != 0) {
        return 1;
    }
    pid_t server = fork();
    if (server == 0) {
        run_server(ends[1], events);
    }
    config.server = url;
    if (server > 0 && read(ends[0], url, sizeof url) == (ssize_t)sizeof url && op_loop_new(&loop, NULL) == DL_OK &&
        op_client_new(loop, &config, NULL, &client, NULL) == DL_OK) {
        status = measure(client, events);
    }
    op_client_free(client);
    op_loop_free(loop);
    if (server > 0) {
        kill(server, SIGKILL);
        waitpid(server, NULL, 0);
    }
    return status;
}
