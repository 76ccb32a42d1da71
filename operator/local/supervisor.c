#include "operator/local/supervisor.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/env.h"
#include "common/exit_codes.h"
#include "common/mem.h"
#include "operator/local/certificates.h"
#include "operator/local/exporter.h"
#include "operator/local/process.h"
#include "operator/local/supervisor_internal.h"

#define MS DL_NS_PER_MS
#define PORT_POLL_NS (4 * MS) /* While a syncer starts: its port file is looked for this often. */
#define STATUS_INTERVAL_NS (250 * MS)
#define STATUS_BUSY_INTERVAL_NS (100 * MS) /* At the start, at the end, and when disturbances are measured. */
#define DRAW_INTERVAL_NS (100 * MS)
#define LINE_INTERVAL_NS (5 * DL_NS_PER_SECOND)
#define SAVE_INTERVAL_NS DL_NS_PER_SECOND
#define BOUND_INTERVAL_NS (5 * DL_NS_PER_SECOND)
#define PLANS_A_TURN_MAX 4
#define SAMPLE_SECONDS_MAX 120

static const struct op_limits local_limits = {
    .learner_crashes_max = 5,
    .syncer_crashes_max = 5,
    .evaluator_crashes_max = 5,
    .backoff_first_ns = DL_NS_PER_SECOND / 2,
    .backoff_max_ns = 30 * DL_NS_PER_SECOND,
    .healthy_ns = 60 * DL_NS_PER_SECOND,
    .clean_exit_ns = DL_NS_PER_SECOND,
    .expect_ns = 5 * DL_NS_PER_SECOND,
    .finish_ns = 20 * DL_NS_PER_SECOND, /* Beside sync.finishSeconds. */
    .grace_ns = 5 * DL_NS_PER_SECOND,
};

/* --- setting up --- */

static uint32_t processors(void)
{
    cpu_set_t set;
    int count = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return count > 0 ? (uint32_t)count : 1;
}

static enum dl_rc open_signals(struct op_supervisor *s, struct dl_err *err)
{
    static const int numbers[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGWINCH};
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < DL_COUNT_OF(numbers); i++) {
        struct sigaction before;
        bool is_ignored = sigaction(numbers[i], NULL, &before) == 0 && before.sa_handler == SIG_IGN;
        if (numbers[i] != SIGHUP || !is_ignored) { /* nohup means that the run is to outlive its terminal. */
            sigaddset(&set, numbers[i]);
        }
    }
    signal(SIGPIPE, SIG_IGN);
    if (sigprocmask(SIG_BLOCK, &set, NULL) != 0) {
        return dl_err_errno(err, DL_EIO, errno, "block signals");
    }
    s->signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
    return s->signal_fd < 0 ? dl_err_errno(err, DL_EIO, errno, "open a signalfd") : DL_OK;
}

static enum dl_rc write_job(struct op_supervisor *s, struct dl_err *err)
{
    char *json = NULL;
    enum dl_rc rc = dl_spec_to_json(s->spec, &json, err);
    if (rc == DL_OK) {
        rc = op_rundir_write(&s->dir, "job.json", json, 0666, err);
    }
    free(json);
    return rc;
}

/* A new folder, or one to go on in: whatever names a process of an earlier life must not name one of this. */
static enum dl_rc open_folder(struct op_supervisor *s, struct dl_err *err)
{
    const struct op_run_options *options = s->options;
    char path[OP_PATH_MAX], text[16];
    enum dl_rc rc = options->resume != NULL
                        ? op_rundir_resume(options->resume, s->spec->syncer.shards, &s->dir, err)
                        : op_rundir_create(options->dir, s->spec->name, s->spec->syncer.shards, &s->dir, err);
    rc = rc == DL_OK ? op_rundir_lock(&s->dir, &s->lock_fd, err) : rc;
    if (rc == DL_OK && options->resume == NULL) {
        rc = op_rundir_make_token(&s->dir, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    DL_AUTO_FREE char *before = NULL;
    size_t size = 0;
    op_rundir_path(&s->dir, "lives", path);
    bool is_known = op_file_read(path, sizeof text - 1, &before, &size, err) == DL_OK;
    s->life = (is_known ? (uint32_t)strtoul(before, NULL, 10) : options->resume != NULL ? 1 : 0) + 1;
    snprintf(text, sizeof text, "%u\n", s->life);
    return op_rundir_write(&s->dir, "lives", text, 0666, err);
}

static enum dl_rc roll_back(struct op_supervisor *s, struct dl_err *err)
{
    char to[OP_CHECKPOINT_BYTES_MAX] = "";
    enum dl_rc rc = s->options->resume == NULL ? DL_OK : op_export_roll_back(&s->dir, s->options->checkpoint, to, err);
    if (rc == DL_OK && to[0] != 0) {
        op_events_add(&s->events, s->now_ns, "rolled_back", "", "to checkpoint %s", to);
    }
    return rc;
}

/* Workers inherit it. */
static enum dl_rc share_cache(const struct op_supervisor *s, struct dl_err *err)
{
    char path[OP_PATH_MAX];
    op_rundir_path(&s->dir, "cache", path);
    return setenv(DL_ENV_CACHE, path, 1) == 0 ? DL_OK : dl_err_set(err, DL_ENOMEM, "no memory for the environment");
}

static enum dl_rc secure(struct op_supervisor *s, struct dl_err *err)
{
    bool is_there = op_certificates_there(&s->dir, s->ca);
    if (!is_there && s->options->tls) {
        enum dl_rc rc = op_certificates_make(&s->dir, err);
        if (rc != DL_OK) {
            return rc;
        }
        is_there = op_certificates_there(&s->dir, s->ca);
    }
    return is_there ? op_poller_set_ca(s->poller, s->ca, err) : DL_OK;
}

static enum dl_rc show_token(struct op_supervisor *s, struct dl_err *err)
{
    char token[OP_TOKEN_BYTES_MAX];
    enum dl_rc rc = op_rundir_read_token(&s->dir, token, err);
    return rc == DL_OK ? op_poller_set_token(s->poller, token, err) : rc;
}

static enum dl_rc allocate(struct op_supervisor *s, struct dl_err *err)
{
    /* Ended ones wait to be forgotten beside their successors. */
    s->child_capacity = 2 * (s->spec->syncer.shards + s->spec->learners.max + 1);
    s->children = calloc(s->child_capacity, sizeof *s->children);
    s->instances = calloc(s->child_capacity, sizeof *s->instances);
    s->tallies = calloc(DL_SPEC_LEARNERS_MAX, sizeof *s->tallies);
    s->pace = calloc(1, sizeof *s->pace);
    if (s->children == NULL || s->instances == NULL || s->tallies == NULL || s->pace == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to supervise %u learners", s->spec->learners.max);
    }
    return DL_OK;
}

static enum dl_rc set_up(struct op_supervisor *s, struct dl_err *err)
{
    const struct op_run_options *options = s->options;
    s->spec = options->spec;
    s->chaos = options->chaos;
    s->progress.result = -1;
    enum dl_rc rc = allocate(s, err);
    rc = rc == DL_OK ? op_planner_new(&s->planner, err) : rc;
    rc = rc == DL_OK ? op_view_new(&s->view, err) : rc;
    rc = rc == DL_OK ? op_poller_new(s->spec->syncer.shards, &s->poller, err) : rc;
    rc = rc == DL_OK ? op_terminal_init(&s->terminal, STDOUT_FILENO, !options->plain, err) : rc;
    rc = rc == DL_OK ? open_signals(s, err) : rc;
    rc = rc == DL_OK ? open_folder(s, err) : rc;
    rc = rc == DL_OK ? share_cache(s, err) : rc;
    rc = rc == DL_OK ? op_events_open(&s->events, &s->dir, s->start_ns, err) : rc;
    rc = rc == DL_OK ? roll_back(s, err) : rc;
    rc = rc == DL_OK ? secure(s, err) : rc;
    rc = rc == DL_OK ? show_token(s, err) : rc;
    rc = rc == DL_OK ? write_job(s, err) : rc;
    rc = rc == DL_OK ? op_control_open(&s->control, &s->dir, err) : rc;
    if (rc != DL_OK) {
        return rc;
    }
    if (options->resume != NULL) {
        op_events_add(&s->events, s->now_ns, "resumed", "", "going on where the run was (life %u)", s->life);
    }
    s->wanted.limits = local_limits;
    s->wanted.limits.finish_ns += (int64_t)(s->spec->sync.finish_seconds * 1e9);
    s->replicas = s->spec->learners.replicas;
    op_watch_scale(s, s->replicas, "");
    uint32_t share = processors() / DL_MAX(s->replicas, 1u);
    s->threads = s->spec->training.threads != 0 ? s->spec->training.threads : DL_MAX(share, 1u);
    snprintf(s->view->job, sizeof s->view->job, "%s", s->spec->name);
    snprintf(s->view->dir, sizeof s->view->dir, "%s", s->dir.path);
    return DL_OK;
}

static void release(struct op_supervisor *s)
{
    if (s->children != NULL) {
        op_children_kill_all(s);
    }
    if (s->control.listener > 0) {
        op_control_close(&s->control, &s->dir);
    }
    op_events_close(&s->events);
    op_poller_free(s->poller);
    op_planner_free(s->planner);
    op_view_free(s->view);
    op_terminal_release(&s->terminal);
    if (s->signal_fd >= 0) {
        close(s->signal_fd);
    }
    if (s->lock_fd >= 0) {
        op_rundir_clear_cache(&s->dir); /* The folder is ours. */
        close(s->lock_fd);
    }
    free(s->pace);
    free(s->tallies);
    free(s->instances);
    free(s->children);
    free(s);
}

/* --- one turn of the loop --- */

static void on_interrupt(struct op_supervisor *s, int number)
{
    s->interrupts++;
    s->wanted.wish = s->interrupts == 1 ? OP_WISH_STOP : OP_WISH_KILL;
    op_events_add(&s->events, s->now_ns, "stop", "",
                  s->interrupts == 1 ? "SIG%s: ending the job; once more kills everything at once"
                                     : "SIG%s: killing everything",
                  sigabbrev_np(number));
}

static void read_signals(struct op_supervisor *s)
{
    struct signalfd_siginfo info;
    while (read(s->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
        int number = (int)info.ssi_signo;
        if (number == SIGWINCH) {
            op_terminal_on_resize(&s->terminal);
            s->drawn_ns = 0;
        } else if (number != SIGCHLD) {
            on_interrupt(s, number);
        }
    }
}

static char *answer_kill(struct op_supervisor *s, const char *kind_text, const char *id_text, const char *signal_text)
{
    char *end = NULL, *answer = NULL;
    bool is_learner = strcmp(kind_text, "learner") == 0;
    bool is_kind = is_learner || strcmp(kind_text, "syncer") == 0;
    unsigned long id = strtoul(id_text, &end, 10);
    int number = op_signal_parse(signal_text);
    if (!is_kind || end == id_text || *end != 0 || id > UINT32_MAX || number == 0) {
        return strdup("error: use kill learner ID [SIGNAL] or kill syncer SHARD [SIGNAL]\n");
    }
    struct op_child *child = op_children_find(s, is_learner ? OP_LEARNER : OP_SYNCER, (uint32_t)id);
    if (child == NULL) {
        return asprintf(&answer, "error: no %s %lu runs\n", kind_text, id) < 0 ? NULL : answer;
    }
    op_events_add(&s->events, s->now_ns, "chaos", child->name, "SIG%s on request", sigabbrev_np(number));
    kill(child->pid, number);
    return asprintf(&answer, "ok: SIG%s sent to %s (pid %d)\n", sigabbrev_np(number), child->name, (int)child->pid) < 0
               ? NULL
               : answer;
}

static char *answer_scale(struct op_supervisor *s, const char *text)
{
    char *end = NULL, *answer = NULL;
    unsigned long replicas = strtoul(text, &end, 10);
    if (end == text || *end != 0 || replicas > s->spec->learners.max) {
        return asprintf(&answer, "error: scale to 0 to %u learners (learners.max), not '%s'\n", s->spec->learners.max,
                        text) < 0
                   ? NULL
                   : answer;
    }
    op_watch_scale(s, (uint32_t)replicas, "on request");
    return asprintf(&answer, "ok: %lu learners wanted\n", replicas) < 0 ? NULL : answer;
}

static char *answer(void *context, const char *line)
{
    struct op_supervisor *s = context;
    char words[4][64] = {"", "", "", ""};
    int count = sscanf(line, "%63s %63s %63s %63s", words[0], words[1], words[2], words[3]);
    if (count == 1 && strcmp(words[0], "status") == 0) {
        op_watch_view(s);
        return op_view_to_json(s->view);
    }
    if (count == 1 && strcmp(words[0], "stop") == 0) {
        s->wanted.wish = s->wanted.wish == OP_WISH_NONE ? OP_WISH_STOP : s->wanted.wish;
        return strdup("ok: ending the job\n");
    }
    if (count == 2 && strcmp(words[0], "scale") == 0) {
        return answer_scale(s, words[1]);
    }
    if (count >= 3 && strcmp(words[0], "kill") == 0) {
        return answer_kill(s, words[1], words[2], count == 4 ? words[3] : "KILL");
    }
    return strdup("error: use status, scale N, kill learner ID [SIGNAL], kill syncer SHARD [SIGNAL], or stop\n");
}

static void plan(struct op_supervisor *s)
{
    for (int i = 0; i < PLANS_A_TURN_MAX; i++) {
        uint32_t count = op_children_observe(s);
        op_plan_make(s->planner, &s->wanted, &s->progress, s->instances, count, s->now_ns, &s->plan);
        op_children_apply(s);
        if (s->plan.change_count == 0) {
            break;
        }
    }
}

/* A reader who has gone is like a terminal that has gone: nobody sees any more what this does. */
static void flush_output(struct op_supervisor *s)
{
    if (fflush(stdout) != 0 && errno == EPIPE && s->interrupts == 0) {
        on_interrupt(s, SIGPIPE);
    }
}

static void print_new_events(struct op_supervisor *s)
{
    s->events_shown = DL_MAX(s->events_shown, op_events_first(&s->events));
    for (; s->events_shown < s->events.count; s->events_shown++) {
        const struct op_event *event = op_events_get(&s->events, s->events_shown);
        if (s->terminal.is_terminal || strcmp(event->kind, "validation") == 0) {
            continue;
        }
        char at[32];
        op_format_seconds(event->seconds, at, sizeof at);
        printf("%7s  %s%s%s\n", at, event->who, event->who[0] != 0 ? " " : "", event->text);
        flush_output(s);
    }
}

static void save(struct op_supervisor *s)
{
    DL_AUTO_FREE char *json = op_view_to_json(s->view);
    struct dl_err err;
    if (json != NULL && op_rundir_write(&s->dir, "status.json", json, 0666, &err) != DL_OK) {
        return; /* A full disk: the next time may do. */
    }
    s->saved_ns = s->now_ns;
}

static void bound_logs(struct op_supervisor *s)
{
    char name[64], path[OP_PATH_MAX];
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        if (s->children[i].is_used) {
            snprintf(name, sizeof name, "logs/%s.log", s->children[i].name);
            op_rundir_path(&s->dir, name, path);
            op_log_bound(path, OP_LOG_BYTES_MAX);
        }
    }
    s->bounded_ns = s->now_ns;
}

static void show(struct op_supervisor *s)
{
    op_watch_view(s);
    print_new_events(s);
    if (s->terminal.is_terminal && s->now_ns - s->drawn_ns >= DRAW_INTERVAL_NS) {
        op_terminal_draw(&s->terminal, s->view);
        s->drawn_ns = s->now_ns;
    } else if (!s->terminal.is_terminal && s->now_ns - s->line_ns >= LINE_INTERVAL_NS) {
        char line[512];
        op_render_line(s->view, line, sizeof line);
        puts(line);
        flush_output(s);
        s->line_ns = s->now_ns;
    }
    if (s->now_ns - s->saved_ns >= SAVE_INTERVAL_NS) {
        save(s);
    }
    if (s->now_ns - s->bounded_ns >= BOUND_INTERVAL_NS) {
        bound_logs(s);
    }
}

static bool is_terminal_phase(enum op_job_phase phase)
{
    return phase == OP_JOB_SUCCEEDED || phase == OP_JOB_STOPPED || phase == OP_JOB_FAILED;
}

static void wait_for_something(struct op_supervisor *s)
{
    struct curl_waitfd fds[2 + OP_CONTROL_CLIENTS_MAX];
    fds[0] = (struct curl_waitfd){.fd = s->signal_fd, .events = CURL_WAIT_POLLIN};
    unsigned int count = 1 + op_control_fds(&s->control, fds + 1);
    int64_t until_ns = DL_MIN(s->plan.next_ns, op_poller_next_ns(s->poller));
    until_ns = DL_MIN(until_ns, s->now_ns + (s->terminal.is_terminal ? DRAW_INTERVAL_NS : STATUS_INTERVAL_NS));
    if (op_children_awaiting_port(s)) {
        until_ns = DL_MIN(until_ns, s->now_ns + PORT_POLL_NS);
    }
    int64_t wait_ns = DL_MAX(until_ns - dl_now_ns(), 0);
    op_poller_wait(s->poller, fds, count, (int)((wait_ns + MS - 1) / MS));
}

static void turn(struct op_supervisor *s)
{
    s->now_ns = dl_now_ns();
    read_signals(s);
    op_children_reap(s);
    op_children_find_ports(s);
    op_control_turn(&s->control, s->now_ns, answer, s);
    bool is_busy = s->first_step_ns == 0 || s->progress.finishing || s->chaos.count > 0;
    op_poller_set_interval(s->poller, is_busy ? STATUS_BUSY_INTERVAL_NS : STATUS_INTERVAL_NS);
    if (op_poller_turn(s->poller, s->now_ns)) {
        op_watch_status(s);
    }
    op_watch_chaos(s);
    plan(s);
    show(s);
}

/* --- the end --- */

static int exit_code_of(const struct op_supervisor *s)
{
    if (s->plan.phase == OP_JOB_SUCCEEDED || (s->plan.phase == OP_JOB_STOPPED && s->wanted.wish != OP_WISH_KILL)) {
        return DL_EXIT_OK;
    }
    switch (s->plan.reason) {
    case OP_REASON_BAD_INPUT: return DL_EXIT_USAGE;
    case OP_REASON_REFUSED: return DL_EXIT_REFUSED;
    case OP_REASON_DEADLINE_EXCEEDED:
    case OP_REASON_TIMED_OUT: return DL_EXIT_TIMEOUT;
    case OP_REASON_NONE:
    case OP_REASON_WANTED:
    case OP_REASON_REPLACEMENT:
    case OP_REASON_SCALE_DOWN:
    case OP_REASON_UNSCHEDULABLE:
    case OP_REASON_NODE_LOST:
    case OP_REASON_SUSPENDED:
    case OP_REASON_COMPLETED:
    case OP_REASON_STOP_REQUESTED:
    case OP_REASON_SYNCER_FAILED:
    case OP_REASON_CRASH_LOOP:
    case OP_REASON_EVALUATOR_FAILED:
    case OP_REASON_WAITING:
    case OP_REASON_COUNT: break;
    }
    return DL_EXIT_FAILED;
}

/* Text that the final weights generate from the prompt, or NULL. Waits, with a bound. */
static char *make_sample(struct op_supervisor *s)
{
    char weights[OP_PATH_MAX], out[OP_PATH_MAX], log[OP_PATH_MAX];
    op_rundir_path(&s->dir, "final", weights);
    op_rundir_path(&s->dir, "sample.txt", out);
    op_rundir_path(&s->dir, "logs/generate.log", log);
    const char *argv[] = {s->options->programs->worker,
                          "generate",
                          "--weights",
                          weights,
                          "--prompt",
                          s->options->sample,
                          "--tokens",
                          "240",
                          "--temperature",
                          "0.7",
                          "--seed",
                          "1",
                          NULL};
    pid_t pid = 0;
    struct dl_err err;
    if (op_process_start((char *const *)argv, out, log, &pid, &err) != DL_OK) {
        fprintf(stderr, "diloco run: no sample: %s\n", err.text);
        return NULL;
    }
    int64_t until_ns = dl_now_ns() + SAMPLE_SECONDS_MAX * DL_NS_PER_SECOND;
    int status = 0;
    while (waitpid(pid, &status, WNOHANG) != pid) {
        struct curl_waitfd fds[1] = {{.fd = s->signal_fd, .events = CURL_WAIT_POLLIN}};
        op_poller_wait(s->poller, fds, 1, 100);
        read_signals(s);
        if (dl_now_ns() >= until_ns || s->interrupts > 0) {
            kill(pid, SIGKILL);
        }
    }
    char *text = NULL;
    size_t size = 0;
    bool is_fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!is_fine || op_file_read(out, 1024 * 1024, &text, &size, &err) != DL_OK) {
        fprintf(stderr, "diloco run: no sample; see %s\n", log);
        return NULL;
    }
    return text;
}

static void finish(struct op_supervisor *s)
{
    op_watch_final(s);
    s->drawn_ns = s->line_ns = 0;
    show(s);
    save(s);
    op_control_close(&s->control, &s->dir);
    DL_AUTO_FREE char *sample = NULL;
    if (s->plan.phase == OP_JOB_SUCCEEDED && s->options->sample != NULL) {
        sample = make_sample(s);
    }
    struct dl_err err = {.text = ""};
    if (op_report_write(s, sample, &err) != DL_OK) {
        fprintf(stderr, "diloco run: %s\n", err.text);
    }
    if (s->plan.phase == OP_JOB_FAILED) {
        fprintf(stderr, "diloco run: the job failed (%s)%s%s\n  logs: %s/logs/\n", s->plan.message,
                s->failure[0] != 0 ? ": " : "", s->failure, s->dir.path);
    }
    if (sample != NULL) {
        printf("\nsample:\n%s\n", sample);
    }
    printf("report: %s/report.md\n", s->dir.path);
    fflush(stdout);
}

enum dl_rc op_supervise(const struct op_run_options *options, int *exit_code, struct dl_err *err)
{
    struct op_supervisor *s = calloc(1, sizeof *s);
    if (s == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for a supervisor");
    }
    s->options = options;
    s->signal_fd = s->lock_fd = s->events.fd = -1;
    s->start_ns = s->now_ns = dl_now_ns();
    s->line_ns = s->bounded_ns = s->start_ns;
    s->saved_ns = s->start_ns - SAVE_INTERVAL_NS; /* The first turn's: whoever looks into the folder finds a run. */
    enum dl_rc rc = set_up(s, err);
    if (rc == DL_OK) {
        if (!s->terminal.is_terminal) {
            printf("run folder: %s%s\n", s->dir.path, options->resume != NULL ? " (resumed)" : "");
        }
        turn(s);
        while (!is_terminal_phase(s->plan.phase)) {
            wait_for_something(s);
            turn(s);
        }
        finish(s);
        *exit_code = exit_code_of(s);
    }
    release(s);
    return rc;
}
