/* diloco-operator: keeps the DecoupledDiLoCoJobs of a cluster as their specs say. */
#include <errno.h>
#include <getopt.h>
#include <inttypes.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/version.h"
#include "operator/cli/cli.h"
#include "operator/controller/controller.h"
#include "operator/kube/config.h"
#include "operator/kube/lease.h"
#include "operator/kube/serve.h"

#define RELEASE_MS 3000 /* At the end, for giving the lease back. */
#define NAME_MAX_BYTES 128
#define TRIM_NS INT64_C(3000000000) /* After the start. */
#define TRIM_AGAIN_NS INT64_C(20000000000)

static const char help[] =
    "usage: diloco-operator [options]\n"
    "\n"
    "Keeps the DecoupledDiLoCoJobs of a cluster as their specs say: in a pod with its service account, elsewhere with "
    "a\n"
    "kubeconfig.\n"
    "\n"
    "  --namespaces A,B         serve jobs in these namespaces only (default: all)\n"
    "  --syncer-image IMAGE     of syncers (default diloco-syncer:" DL_VERSION ")\n"
    "  --worker-image IMAGE     of learners and evaluators (default diloco-worker:" DL_VERSION ")\n"
    "  --image-pull-policy P    Always, IfNotPresent or Never (default: the cluster's)\n"
    "  --scavenge-priority-class NAME  PriorityClass of pools that scavenge and name none\n"
    "  --leader-elect           of several operators one works (default)\n"
    "  --no-leader-elect        this is the only one\n"
    "  --lease-namespace NS     where the lease and the key of tokens are (default: the operator's own)\n"
    "  --lease-name NAME        default diloco-operator\n"
    "  --metrics-listen ADDR    HOST:PORT or :PORT of /metrics (default :8080; empty: none)\n"
    "  --health-listen ADDR     of /healthz and /readyz (default :8081; empty: none)\n"
    "  --status-via HOW         direct: ask syncers at their addresses (default); proxy: through the API server\n"
    "  --kubeconfig FILE        default: $KUBECONFIG, the pod's service account, ~/.kube/config\n"
    "  --context NAME           of the kubeconfig (default: its current one)\n"
    "  --qps N  --burst N       bound of requests to the API server (default 50, 100)\n"
    "  --log-level LEVEL        debug, info (default), warn or error\n"
    "  --version  --help\n"
    "\n"
    "Exit status: 0 asked to stop, 1 failed, 2 wrong arguments or configuration.\n";

struct arguments {
    const char *spaces, *syncer_image, *worker_image, *pull_policy, *priority_class, *lease_space, *lease_name;
    const char *metrics_listen, *health_listen, *status_via, *kubeconfig, *context, *qps, *burst, *log_level;
    bool no_election, help, version;
};

struct program {
    struct arguments arguments;
    struct op_config config;
    struct op_loop *loop;
    struct op_client *client;
    struct op_lease *lease;
    struct op_controller *controller;
    struct op_serve *metrics, *health;
    struct op_timer trim;
    struct op_controller_options options;
    char spaces[4096], identity[NAME_MAX_BYTES], key_name[NAME_MAX_BYTES];
    bool is_ending, is_failed, is_trimmed;
};

static struct op_loop *signal_loop; /* For the handler: async-signal-safe by op_loop_stop's contract. */

static void on_signal(int number)
{
    (void)number;
    op_loop_stop(signal_loop);
}

/* --- arguments --- */

enum { OPT_NO_ELECT = 256, OPT_ELECT, OPT_HELP, OPT_VERSION, OPT_TEXT };

static int parse_options(int argc, char **argv, struct arguments *a)
{
    const struct {
        const char *name;
        const char **value;
    } texts[] = {
        {"namespaces", &a->spaces},
        {"syncer-image", &a->syncer_image},
        {"worker-image", &a->worker_image},
        {"image-pull-policy", &a->pull_policy},
        {"scavenge-priority-class", &a->priority_class},
        {"lease-namespace", &a->lease_space},
        {"lease-name", &a->lease_name},
        {"metrics-listen", &a->metrics_listen},
        {"health-listen", &a->health_listen},
        {"status-via", &a->status_via},
        {"kubeconfig", &a->kubeconfig},
        {"context", &a->context},
        {"qps", &a->qps},
        {"burst", &a->burst},
        {"log-level", &a->log_level},
    };
    struct option options[DL_COUNT_OF(texts) + 5] = {
        {"leader-elect", no_argument, NULL, OPT_ELECT},
        {"no-leader-elect", no_argument, NULL, OPT_NO_ELECT},
        {"help", no_argument, NULL, OPT_HELP},
        {"version", no_argument, NULL, OPT_VERSION},
    };
    for (size_t i = 0; i < DL_COUNT_OF(texts); i++) {
        options[4 + i] = (struct option){texts[i].name, required_argument, NULL, OPT_TEXT + (int)i};
    }
    for (int opt = getopt_long(argc, argv, "", options, NULL); opt != -1;
         opt = getopt_long(argc, argv, "", options, NULL)) {
        switch (opt) {
        case OPT_ELECT: a->no_election = false; break;
        case OPT_NO_ELECT: a->no_election = true; break;
        case OPT_HELP: a->help = true; break;
        case OPT_VERSION: a->version = true; break;
        case '?': return -1;
        default: *texts[opt - OPT_TEXT].value = optarg;
        }
    }
    if (optind < argc) {
        fprintf(stderr, "diloco-operator: unexpected argument '%s': options only, each with --\n", argv[optind]);
        return -1;
    }
    return 0;
}

static enum dl_rc parse_rate(const char *name, const char *text, double otherwise, double *out, struct dl_err *err)
{
    char *end = NULL;
    *out = text != NULL ? strtod(text, &end) : otherwise;
    if (text != NULL && (end == text || *end != 0 || !(*out >= 1 && *out <= 100000))) {
        return dl_err_set(err, DL_EINVAL, "--%s '%s': give a number from 1 to 100000", name, text);
    }
    return DL_OK;
}

static enum dl_rc split_spaces(struct program *p, struct dl_err *err)
{
    const char *text = p->arguments.spaces != NULL ? p->arguments.spaces : "";
    if (strlen(text) >= sizeof p->spaces) {
        return dl_err_set(err, DL_EINVAL, "--namespaces: longer than %zu bytes", sizeof p->spaces - 1);
    }
    memcpy(p->spaces, text, strlen(text) + 1);
    for (char *at = p->spaces; *at != 0;) {
        size_t length = strcspn(at, ",");
        bool is_last = at[length] == 0;
        at[length] = 0;
        if (length > 0 && p->options.space_count == OP_SPACES_MAX) {
            return dl_err_set(err, DL_EINVAL, "--namespaces: at most %d; leave it out to serve all", OP_SPACES_MAX);
        }
        if (length > 0) {
            p->options.spaces[p->options.space_count++] = at;
        }
        at += length + (is_last ? 0 : 1);
    }
    return DL_OK;
}

static enum dl_rc take_arguments(struct program *p, struct op_client_options *client, struct dl_err *err)
{
    struct arguments *a = &p->arguments;
    enum dl_log_level level = DL_LOG_INFO;
    double qps = 0, burst = 0;
    enum dl_rc rc = a->log_level != NULL ? dl_log_level_parse(a->log_level, &level, err) : DL_OK;
    if (rc == DL_OK) {
        rc = parse_rate("qps", a->qps, 50, &qps, err);
    }
    if (rc == DL_OK) {
        rc = parse_rate("burst", a->burst, 100, &burst, err);
    }
    if (rc == DL_OK) {
        rc = split_spaces(p, err);
    }
    const char *via = a->status_via != NULL ? a->status_via : "direct";
    p->options.via_proxy = strcmp(via, "proxy") == 0;
    if (rc == DL_OK && !p->options.via_proxy && strcmp(via, "direct") != 0) {
        rc = dl_err_set(err, DL_EINVAL, "--status-via '%s': direct or proxy", via);
    }
    if (rc != DL_OK) {
        return rc;
    }
    dl_log_init("-", "operator", level);
    *client = (struct op_client_options){.qps = qps, .burst = (uint32_t)burst};
    p->options.render = (struct op_render_options){
        .syncer_image = a->syncer_image != NULL ? a->syncer_image : "diloco-syncer:" DL_VERSION,
        .worker_image = a->worker_image != NULL ? a->worker_image : "diloco-worker:" DL_VERSION,
        .pull_policy = a->pull_policy,
        .scavenge_priority_class = a->priority_class,
    };
    return DL_OK;
}

/* --- probes --- */

static void on_health(void *context, const char *path, struct op_answer *answer)
{
    struct program *p = context;
    bool is_leader = p->lease == NULL || op_lease_is_held(p->lease);
    /* A standby is ready as soon as it knows who leads. */
    bool is_ready =
        is_leader ? p->controller != NULL && op_controller_is_synced(p->controller) : op_lease_holder(p->lease)[0] != 0;
    if (strcmp(path, "/healthz") == 0) {
        dl_buf_puts(&answer->body, "ok\n");
    } else if (strcmp(path, "/readyz") == 0) {
        answer->status = is_ready ? 200 : 503;
        dl_buf_puts(&answer->body, is_ready ? "ok\n" : "not ready: no word from the API server yet\n");
    } else {
        answer->status = 404;
        dl_buf_puts(&answer->body, "nothing here; try /healthz /readyz\n");
    }
}

static void on_metrics(void *context, const char *path, struct op_answer *answer)
{
    struct program *p = context;
    struct dl_metrics metrics;
    if (strcmp(path, "/metrics") != 0) {
        answer->status = 404;
        dl_buf_puts(&answer->body, "nothing here; try /metrics\n");
        return;
    }
    answer->content_type = "text/plain; version=0.0.4; charset=utf-8";
    dl_metrics_begin(&metrics, &answer->body);
    op_process_metrics(&metrics);
    op_client_metrics(p->client, &metrics);
    if (p->lease != NULL) {
        op_lease_metrics(p->lease, &metrics);
    }
    if (p->controller != NULL) {
        op_controller_metrics(p->controller, &metrics);
    }
}

/* --- memory --- */

/* Code that only ran at the start (libraries, certificates) is let go: pages of it that are needed again come back from
 * the page cache. Only mappings that can be executed, and so were never written to. */
static void let_go_of_code(void)
{
    DL_AUTO_FILE FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        uintptr_t from, to;
        char rights[5];
        if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " %4s", &from, &to, rights) == 3 && strcmp(rights, "r-xp") == 0 &&
            strchr(line, '/') != NULL && madvise((void *)from, to - from, MADV_DONTNEED) != 0) {
            dl_debug("memory not let go errno=%d", errno);
        }
    }
}

static void on_trim(void *context, int64_t now_ns)
{
    struct program *p = context;
    if (!p->is_trimmed) {
        p->is_trimmed = true;
        let_go_of_code();
    }
    malloc_trim(0); /* What a burst of requests took. */
    op_timer_start(p->loop, &p->trim, now_ns + TRIM_AGAIN_NS);
}

/* --- life --- */

static void start_controller(struct program *p)
{
    struct dl_err err;
    if (p->controller == NULL && op_controller_new(p->client, &p->options, &p->controller, &err) != DL_OK) {
        dl_error("cannot start error=\"%s\"", err.text);
        p->is_failed = true;
        op_loop_stop(p->loop);
    }
}

static void on_leadership(void *context, bool is_leader)
{
    struct program *p = context;
    dl_info("leadership leader=%s holder=%s", is_leader ? "yes" : "no", op_lease_holder(p->lease));
    if (is_leader && !p->is_ending) {
        start_controller(p);
    } else {
        op_controller_free(p->controller); /* A standby holds nothing. */
        p->controller = NULL;
    }
}

static enum dl_rc elect(struct program *p, struct dl_err *err)
{
    const struct arguments *a = &p->arguments;
    const char *space = a->lease_space != NULL ? a->lease_space : op_client_space(p->client);
    const char *name = a->lease_name != NULL ? a->lease_name : "diloco-operator";
    snprintf(p->key_name, sizeof p->key_name, "%.100s-key", name);
    p->options.key_space = space;
    p->options.key_name = p->key_name;
    p->options.instance = p->identity;
    if (a->no_election) {
        start_controller(p);
        return DL_OK;
    }
    struct op_lease_options options = {
        .space = space, .name = name, .identity = p->identity, .context = p, .changed = on_leadership};
    return op_lease_new(p->client, &options, &p->lease, err);
}

static enum dl_rc listen_on(struct program *p, struct dl_err *err)
{
    const struct arguments *a = &p->arguments;
    const char *health = a->health_listen != NULL ? a->health_listen : ":8081";
    const char *metrics = a->metrics_listen != NULL ? a->metrics_listen : ":8080";
    enum dl_rc rc = DL_OK;
    if (health[0] != 0) {
        rc = op_serve_new(p->loop, health, on_health, p, &p->health, err);
    }
    if (rc == DL_OK && metrics[0] != 0) {
        rc = op_serve_new(p->loop, metrics, on_metrics, p, &p->metrics, err);
    }
    if (rc == DL_OK) {
        dl_info("listening health=%u metrics=%u", p->health != NULL ? op_serve_port(p->health) : 0,
                p->metrics != NULL ? op_serve_port(p->metrics) : 0);
    }
    return rc;
}

static enum dl_rc set_up(struct program *p, const struct op_client_options *client, struct dl_err *err)
{
    char host[64] = "operator";
    gethostname(host, sizeof host - 1);
    snprintf(p->identity, sizeof p->identity, "%s_%08" PRIx32, host,
             (uint32_t)(dl_wall_ns() >> 10) ^ (uint32_t)getpid());
    enum dl_rc rc = op_config_load(p->arguments.kubeconfig, p->arguments.context, &p->config, err);
    if (rc == DL_OK) {
        rc = op_loop_new(&p->loop, err);
    }
    if (rc == DL_OK) {
        signal_loop = p->loop;
        struct sigaction action = {.sa_handler = on_signal};
        sigaction(SIGTERM, &action, NULL);
        sigaction(SIGINT, &action, NULL);
        signal(SIGPIPE, SIG_IGN);
        rc = op_client_new(p->loop, &p->config, client, &p->client, err);
    }
    if (rc == DL_OK) {
        dl_info("API server server=%s from=\"%s\" identity=%s", op_client_server(p->client), p->config.origin,
                p->identity);
        p->trim = (struct op_timer){.fire = on_trim, .context = p};
        op_timer_start(p->loop, &p->trim, op_loop_now_ns(p->loop) + TRIM_NS);
        rc = listen_on(p, err);
    }
    return rc == DL_OK ? elect(p, err) : rc;
}

static void on_released(void *context)
{
    bool *is_done = context;
    *is_done = true;
}

/* The lease is given back, so that a peer need not wait for it to run out. */
static void leave(struct program *p)
{
    bool is_done = false;
    p->is_ending = true;
    op_controller_free(p->controller);
    p->controller = NULL;
    if (p->lease == NULL) {
        return;
    }
    op_lease_release(p->lease, RELEASE_MS, on_released, &is_done);
    int64_t until_ns = dl_now_ns() + RELEASE_MS * DL_NS_PER_MS;
    while (!is_done && dl_now_ns() < until_ns) {
        op_loop_turn(p->loop, 100);
    }
}

static void tear_down(struct program *p)
{
    op_controller_free(p->controller);
    op_serve_free(p->metrics);
    op_serve_free(p->health);
    op_lease_free(p->lease);
    op_client_free(p->client);
    if (p->loop != NULL) {
        op_timer_stop(p->loop, &p->trim);
    }
    op_loop_free(p->loop);
    op_config_release(&p->config);
}

int main(int argc, char **argv)
{
    static struct program program;
    struct op_client_options client;
    struct dl_err err = {.text = ""};
    if (parse_options(argc, argv, &program.arguments) != 0) {
        fputs("(--help lists all options)\n", stderr);
        return DL_EXIT_USAGE;
    }
    if (program.arguments.help || program.arguments.version) {
        fputs(program.arguments.help ? help : "diloco-operator " DL_VERSION "\n", stdout);
        return DL_EXIT_OK;
    }
    enum dl_rc rc = take_arguments(&program, &client, &err);
    if (rc == DL_OK) {
        rc = set_up(&program, &client, &err);
    }
    if (rc != DL_OK) {
        fprintf(stderr, "diloco-operator: %s\n", err.text);
        tear_down(&program);
        return rc == DL_EINVAL || rc == DL_ENOTFOUND ? DL_EXIT_USAGE : DL_EXIT_FAILED;
    }
    while (!op_loop_is_stopped(program.loop)) {
        op_loop_turn(program.loop, OP_LOOP_WAIT_MAX_MS);
    }
    dl_info("asked to stop");
    leave(&program);
    bool is_failed = program.is_failed;
    tear_down(&program);
    return is_failed ? DL_EXIT_FAILED : DL_EXIT_OK;
}
