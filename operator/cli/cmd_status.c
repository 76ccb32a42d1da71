/* status, top, scale, kill, stop, generate: what can be done with a run that is there. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/mem.h"
#include "operator/cli/cli.h"
#include "operator/cli/cluster.h"
#include "operator/local/control.h"
#include "operator/local/poller.h"
#include "operator/local/preflight.h"
#include "operator/local/terminal.h"

#define STATUS_BYTES_MAX OP_JSON_BYTES_MAX
#define URL_WAIT_NS (3 * DL_NS_PER_SECOND)
#define TOP_INTERVAL_MS 500

/* --- where the view comes from --- */

struct wanted { /* As the command line has it. */
    const char *what;
    const char *ca;                           /* Of an https URL; NULL: the system's. */
    const char *space, *context, *kubeconfig; /* Of a job in a cluster; NULL: as kubectl would have it. */
    bool is_json;
};

struct source {
    struct op_rundir dir;
    bool is_url;
    const char *url, *ca;
    struct op_cluster *cluster; /* NULL: not in a cluster. */
};

static bool starts_with(const char *text, const char *start)
{
    return strncmp(text, start, strlen(start)) == 0;
}

static enum dl_rc open_cluster(const struct wanted *wanted, const char *job, struct source *out, struct dl_err *err)
{
    struct op_config config;
    enum dl_rc rc = op_config_load(wanted->kubeconfig, wanted->context, &config, err);
    if (rc == DL_OK) {
        rc = op_cluster_open(&config, wanted->space, job, &out->cluster, err);
        op_config_release(&config);
    }
    return rc;
}

static enum dl_rc source_open(const struct wanted *wanted, struct source *out, struct dl_err *err)
{
    const char *what = wanted->what, *job = op_cluster_job_name(what);
    *out = (struct source){.url = what, .ca = wanted->ca};
    out->is_url = what != NULL && (starts_with(what, "http://") || starts_with(what, "https://"));
    if (out->is_url) {
        return DL_OK;
    }
    if (op_cli_is_kubectl && job == NULL) {
        job = what;
    }
    if (job != NULL) {
        return open_cluster(wanted, job, out, err);
    }
    return op_cli_is_kubectl
               ? dl_err_set(err, DL_EINVAL, "name a job: kubectl diloco status JOB [-n NAMESPACE] (kubectl get ddj)")
               : op_rundir_open(what, &out->dir, err);
}

static void source_close(struct source *source)
{
    op_cluster_close(source->cluster);
}

/* What `status` and `top` take. False: told, and not usable. */
static bool read_arguments(const char *command, int argc, char **argv, struct wanted *out)
{
    *out = (struct wanted){.what = NULL};
    const struct {
        const char *name, **value;
    } options[] = {
        {"--tls-ca", &out->ca},
        {"-n", &out->space},
        {"--namespace", &out->space},
        {"--context", &out->context},
        {"--kubeconfig", &out->kubeconfig},
    };
    for (int i = 1; i < argc; i++) {
        const char **value = NULL;
        for (size_t k = 0; k < DL_COUNT_OF(options); k++) {
            value = strcmp(argv[i], options[k].name) == 0 ? options[k].value : value;
        }
        if (value != NULL && i + 1 < argc) {
            *value = argv[++i];
        } else if (strcmp(argv[i], "--json") == 0) {
            out->is_json = true;
        } else if (argv[i][0] == '-' || out->what != NULL) {
            op_cli_usage(command, "what is '%s'? One run or job, and options (--help)", argv[i]);
            return false;
        } else {
            out->what = argv[i];
        }
    }
    return true;
}

/* From the run itself, or what it left; what a run left in the midst of its work is not what it does now. */
static enum dl_rc view_from_run(const struct source *source, struct op_view *view, struct dl_err *err)
{
    DL_AUTO_FREE char *text = NULL;
    enum dl_rc asked = op_control_ask(&source->dir, "status", &text, err);
    if (asked == DL_OK && text[0] == '{') {
        return op_view_from_json(view, text, strlen(text), err);
    }
    char path[OP_PATH_MAX];
    size_t size = 0;
    free(dl_take(text));
    op_rundir_path(&source->dir, "status.json", path);
    enum dl_rc rc = op_file_read(path, STATUS_BYTES_MAX, &text, &size, err);
    if (rc == DL_ENOTFOUND) {
        return dl_err_set(err, rc, "%s holds no run (status.json is not there): name a run folder", source->dir.path);
    }
    rc = rc == DL_OK ? op_view_from_json(view, text, size, err) : rc;
    if (rc == DL_OK && asked == DL_ENOTFOUND && !view->is_over) {
        op_view_interrupt(view);
    }
    return rc;
}

static enum dl_rc view_from_poller(struct op_poller *poller, uint32_t count, struct op_view *view, struct dl_err *err)
{
    int64_t until_ns = dl_now_ns() + URL_WAIT_NS;
    for (uint32_t heard = 0; heard < count && dl_now_ns() < until_ns;) {
        op_poller_turn(poller, dl_now_ns());
        heard = 0;
        for (uint32_t i = 0; i < count; i++) {
            bool is_done = op_poller_view(poller, i, dl_now_ns(), false) != NULL || op_poller_error(poller, i)[0] != 0;
            heard += is_done ? 1 : 0;
        }
        if (heard < count) {
            op_poller_wait(poller, NULL, 0, 50);
        }
    }
    const struct op_job_status *shards[DL_SPEC_SHARDS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        shards[i] = op_poller_view(poller, i, dl_now_ns(), false);
    }
    struct op_job_status combined;
    op_status_init(&combined);
    enum dl_rc rc = op_status_combine(shards, count, &combined, err);
    if (rc == DL_OK && combined.shards_heard == 0) {
        rc = dl_err_set(err, DL_ENET, "no syncer answers: %s", op_poller_error(poller, 0));
    }
    rc = rc == DL_OK ? op_view_from_status(view, &combined, err) : rc;
    op_status_release(&combined);
    return rc;
}

/* One URL a shard, separated by commas. */
static enum dl_rc view_from_url(const char *urls, const char *ca, struct op_view *view, struct dl_err *err)
{
    DL_AUTO_FREE char *copy = strdup(urls);
    char *parts[DL_SPEC_SHARDS_MAX];
    uint32_t count = 0;
    for (char *part = copy, *next; part != NULL && count < DL_SPEC_SHARDS_MAX; part = next) {
        next = strchr(part, ',');
        if (next != NULL) {
            *next++ = 0;
        }
        char *status = strstr(part, "/status");
        if (status != NULL) {
            *status = 0;
        }
        parts[count++] = part;
    }
    struct op_poller *poller = NULL;
    enum dl_rc rc = op_poller_new(count, &poller, err);
    rc = rc == DL_OK && ca != NULL ? op_poller_set_ca(poller, ca, err) : rc;
    for (uint32_t i = 0; rc == DL_OK && i < count; i++) {
        rc = op_poller_set_address(poller, i, parts[i], err);
    }
    rc = rc == DL_OK ? view_from_poller(poller, count, view, err) : rc;
    op_poller_free(poller);
    return rc;
}

static enum dl_rc source_read(const struct source *source, struct op_view *view, struct dl_err *err)
{
    if (source->cluster != NULL) {
        return op_cluster_read(source->cluster, view, err);
    }
    if (source->is_url) {
        return view_from_url(source->url, source->ca, view, err);
    }
    return view_from_run(source, view, err);
}

/* --- status --- */

static void print_frame(const struct op_view *view)
{
    struct op_frame *frame = malloc(sizeof *frame);
    struct op_render_options options = {.width = 160, .height = OP_FRAME_LINES_MAX};
    if (frame != NULL) {
        op_render_frame(view, &options, frame);
        for (uint32_t i = 0; i < frame->line_count; i++) {
            puts(frame->text + frame->lines[i]);
        }
    }
    free(frame);
}

static bool wants_help(int argc, char **argv, const char *text)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            puts(text);
            return true;
        }
    }
    return false;
}

int op_cmd_status(int argc, char **argv)
{
    if (wants_help(argc, argv,
                   "diloco status [RUN|URL|ddj/JOB] [--json]: where a run stands. RUN: a run folder (default: the "
                   "newest below ./runs);\n"
                   "URL: http://HOST:PORT of a syncer, several shards separated by commas; https://... with --tls-ca "
                   "FILE, or an\n"
                   "authority that the system knows; ddj/JOB (kubectl diloco status JOB): of a cluster, with -n "
                   "NAMESPACE, --context\n"
                   "NAME, --kubeconfig FILE as kubectl has them. It needs the rights to get decoupleddilocojobs and "
                   "pods/proxy.")) {
        return DL_EXIT_OK;
    }
    struct wanted wanted;
    if (!read_arguments("status", argc, argv, &wanted)) {
        return DL_EXIT_USAGE;
    }
    struct dl_err err = {.text = ""};
    struct source source;
    struct op_view *view = NULL;
    enum dl_rc rc = source_open(&wanted, &source, &err);
    rc = rc == DL_OK ? op_view_new(&view, &err) : rc;
    rc = rc == DL_OK ? source_read(&source, view, &err) : rc;
    if (rc == DL_OK && wanted.is_json) {
        DL_AUTO_FREE char *text = op_view_to_json(view);
        puts(text != NULL ? text : "{}");
    } else if (rc == DL_OK) {
        print_frame(view);
    }
    op_view_free(view);
    source_close(&source);
    return rc == DL_OK ? DL_EXIT_OK : op_cli_fail("status", &err);
}

/* --- top --- */

static int open_top_signals(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGWINCH);
    sigprocmask(SIG_BLOCK, &set, NULL);
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

/* True when it is time to go. */
static bool top_wait(int signals, struct op_terminal *terminal)
{
    struct pollfd fd = {.fd = signals, .events = POLLIN};
    struct signalfd_siginfo info;
    poll(&fd, 1, TOP_INTERVAL_MS);
    bool leave = false;
    while (read(signals, &info, sizeof info) == (ssize_t)sizeof info) {
        if (info.ssi_signo == SIGWINCH) {
            op_terminal_on_resize(terminal);
        } else {
            leave = true;
        }
    }
    return leave;
}

int op_cmd_top(int argc, char **argv)
{
    if (wants_help(argc, argv,
                   "diloco top [RUN|URL|ddj/JOB]: a run, live, until it is over or Ctrl-C. It does not end the run. "
                   "Options: see\n`diloco status --help`.")) {
        return DL_EXIT_OK;
    }
    struct wanted wanted;
    if (!read_arguments("top", argc, argv, &wanted)) {
        return DL_EXIT_USAGE;
    }
    struct dl_err err = {.text = ""};
    struct source source;
    struct op_view *view = NULL;
    struct op_terminal terminal = {.fd = -1};
    enum dl_rc rc = source_open(&wanted, &source, &err);
    rc = rc == DL_OK ? op_view_new(&view, &err) : rc;
    rc = rc == DL_OK ? op_terminal_init(&terminal, STDOUT_FILENO, true, &err) : rc;
    DL_AUTO_FD int signals = open_top_signals();
    while (rc == DL_OK && (rc = source_read(&source, view, &err)) == DL_OK) {
        if (terminal.is_terminal) {
            op_terminal_draw(&terminal, view);
        } else {
            char line[512];
            op_render_line(view, line, sizeof line);
            puts(line);
            fflush(stdout);
        }
        if (view->is_over || top_wait(signals, &terminal)) {
            break;
        }
    }
    op_terminal_release(&terminal);
    op_view_free(view);
    source_close(&source);
    return rc == DL_OK ? DL_EXIT_OK : op_cli_fail("top", &err);
}

/* --- commands to a run --- */

static int tell(const char *command, const char *run, const char *line)
{
    struct op_rundir dir;
    struct dl_err err = {.text = ""};
    DL_AUTO_FREE char *answer = NULL;
    enum dl_rc rc = op_rundir_open(run, &dir, &err);
    rc = rc == DL_OK ? op_control_ask(&dir, line, &answer, &err) : rc;
    if (rc != DL_OK) {
        return op_cli_fail(command, &err);
    }
    bool is_error = strncmp(answer, "error: ", 7) == 0;
    fprintf(is_error ? stderr : stdout, "diloco %s: %s", command, is_error ? answer + 7 : answer);
    return is_error ? DL_EXIT_USAGE : DL_EXIT_OK;
}

int op_cmd_scale(int argc, char **argv)
{
    if (wants_help(argc, argv, "diloco scale RUN N: N learners from now on, between 0 and learners.max of the job.")) {
        return DL_EXIT_OK;
    }
    if (argc != 3) {
        return op_cli_usage("scale", "name a run and a number of learners");
    }
    char line[128];
    snprintf(line, sizeof line, "scale %s", argv[2]);
    return tell("scale", argv[1], line);
}

int op_cmd_kill(int argc, char **argv)
{
    if (wants_help(
            argc, argv,
            "diloco kill RUN learner ID [SIGNAL], diloco kill RUN syncer SHARD [SIGNAL]: to see that the run goes on.\n"
            "SIGNAL is a name as of kill(1), or a number; default KILL.")) {
        return DL_EXIT_OK;
    }
    if (argc != 4 && argc != 5) {
        return op_cli_usage("kill", "name a run, what (learner or syncer), and which");
    }
    char line[256];
    snprintf(line, sizeof line, "kill %s %s %s", argv[2], argv[3], argc == 5 ? argv[4] : "KILL");
    return tell("kill", argv[1], line);
}

int op_cmd_stop(int argc, char **argv)
{
    if (wants_help(argc, argv, "diloco stop RUN: ends a run in order: last merge, export of the weights, report.")) {
        return DL_EXIT_OK;
    }
    return argc == 2 ? tell("stop", argv[1], "stop") : op_cli_usage("stop", "name a run");
}

/* --- generate --- */

/* Those of a run, or a folder with weights itself. */
static enum dl_rc find_weights(const struct op_rundir *dir, char out[OP_PATH_MAX], struct dl_err *err)
{
    char path[OP_PATH_MAX];
    op_rundir_path(dir, "config.json", path);
    if (access(path, R_OK) == 0) {
        snprintf(out, OP_PATH_MAX, "%s", dir->path);
        return DL_OK;
    }
    op_rundir_path(dir, "final", out);
    op_rundir_path(dir, "final/config.json", path);
    return access(path, R_OK) == 0
               ? DL_OK
               : dl_err_set(err, DL_ENOTFOUND,
                            "%s is not there: the run has not exported its weights yet; it does so when it ends "
                            "(before: `diloco export RUN --out DIR`, then `diloco generate DIR`)",
                            path);
}

int op_cmd_generate(int argc, char **argv)
{
    struct dl_err err = {.text = ""};
    static struct op_programs programs;
    if (op_programs_find(NULL, &programs, &err) != DL_OK) {
        return op_cli_fail("generate", &err);
    }
    bool has_weights = false;
    for (int i = 1; i < argc; i++) {
        has_weights = has_weights || strncmp(argv[i], "--weights", 9) == 0;
    }
    if (wants_help(argc, argv,
                   "diloco generate [RUN|DIR] [options]: text from the weights of a run that has ended (default: the "
                   "newest below\n"
                   "./runs), or from DIR, which `diloco export` wrote. It starts:\n")) {
        fflush(stdout);
        has_weights = true;
    }
    const char **out = calloc((size_t)argc + 4, sizeof *out);
    char weights[OP_PATH_MAX];
    int used = 0, from = 1;
    if (out == NULL) {
        return DL_EXIT_FAILED;
    }
    out[used++] = programs.worker;
    out[used++] = "generate";
    if (!has_weights) {
        /* A run folder stands for the weights in it. */
        const char *run = argc > 1 && argv[1][0] != '-' ? argv[1] : NULL;
        struct op_rundir dir;
        from += run != NULL ? 1 : 0;
        if (op_rundir_open(run, &dir, &err) != DL_OK) {
            free(out);
            return op_cli_fail("generate", &err);
        }
        if (find_weights(&dir, weights, &err) != DL_OK) {
            free(out);
            return op_cli_fail("generate", &err);
        }
        out[used++] = "--weights";
        out[used++] = weights;
    }
    for (int i = from; i < argc; i++) {
        out[used++] = argv[i];
    }
    execv(programs.worker, (char *const *)out);
    free(out);
    dl_err_set(&err, DL_EIO, "cannot execute %s", programs.worker);
    return op_cli_fail("generate", &err);
}
