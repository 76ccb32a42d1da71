/* The processes of a run: started, watched, ended. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/mem.h"
#include "operator/local/process.h"
#include "operator/local/supervisor_internal.h"

#define ARGUMENTS_MAX 48
#define ENDPOINT_BYTES_MAX (DL_SPEC_SHARDS_MAX * 72)

struct command { /* A command line with room for the texts made for it. */
    const char *argv[ARGUMENTS_MAX];
    size_t count;
    char numbers[4][32];
    size_t number_count;
    char job[OP_PATH_MAX], token[OP_PATH_MAX], extra[OP_PATH_MAX], more[OP_PATH_MAX];
    char certificate[OP_PATH_MAX], key[OP_PATH_MAX];
    char endpoints[ENDPOINT_BYTES_MAX];
    char listen[64];
};

static void argument(struct command *command, const char *text)
{
    if (command->count + 1 < ARGUMENTS_MAX) {
        command->argv[command->count++] = text;
    }
}

static void option(struct command *command, const char *name, const char *value)
{
    argument(command, name);
    argument(command, value);
}

static void number_option(struct command *command, const char *name, uint32_t value)
{
    char *text = command->numbers[command->number_count++];
    snprintf(text, sizeof command->numbers[0], "%u", value);
    option(command, name, text);
}

/* That of one who signs itself `name`, "syncer" or "worker". */
static void certificate_options(const struct op_supervisor *s, const char *name, struct command *command)
{
    char file[32];
    snprintf(file, sizeof file, "tls/%s.pem", name);
    op_rundir_path(&s->dir, file, command->certificate);
    snprintf(file, sizeof file, "tls/%s.key", name);
    op_rundir_path(&s->dir, file, command->key);
    option(command, "--tls-cert", command->certificate);
    option(command, "--tls-key", command->key);
}

static void syncer_command(const struct op_supervisor *s, const struct op_child *child, struct command *command)
{
    char name[48];
    argument(command, s->options->programs->syncer);
    option(command, "--job", command->job);
    number_option(command, "--shard", child->id);
    /* Once known, the address stays: learners that train on will find the shard there again. */
    uint32_t port = s->spec->syncer.port != 0 ? s->spec->syncer.port + child->id : 0;
    if (s->addresses[child->id][0] != 0) {
        snprintf(command->listen, sizeof command->listen, "%s", s->addresses[child->id]);
    } else {
        snprintf(command->listen, sizeof command->listen, "127.0.0.1:%u", port);
    }
    option(command, "--listen", command->listen);
    option(command, "--token-file", command->token);
    snprintf(name, sizeof name, "state/shard-%u", child->id);
    op_rundir_path(&s->dir, name, command->extra);
    option(command, "--state-dir", command->extra);
    snprintf(name, sizeof name, "state/shard-%u/status.json", child->id);
    op_rundir_path(&s->dir, name, command->more);
    unlink(command->more); /* The last word of an earlier incarnation. */
    snprintf(name, sizeof name, "ports/shard-%u", child->id);
    op_rundir_path(&s->dir, name, command->more);
    unlink(command->more);
    option(command, "--port-file", command->more);
    if (s->ca[0] != 0) {
        certificate_options(s, "syncer", command);
    }
    option(command, "--log-level", s->options->log_level);
}

static void worker_command(const struct op_supervisor *s, const struct op_child *child, struct command *command)
{
    bool is_learner = child->kind == OP_LEARNER;
    argument(command, s->options->programs->worker);
    argument(command, is_learner ? "learn" : "evaluate");
    option(command, "--job", command->job);
    size_t used = 0;
    for (uint32_t i = 0; i < s->spec->syncer.shards; i++) {
        used += (size_t)snprintf(command->endpoints + used, sizeof command->endpoints - used, "%sws%s://%s",
                                 i > 0 ? "," : "", s->ca[0] != 0 ? "s" : "", s->addresses[i]);
    }
    option(command, "--endpoints", command->endpoints);
    option(command, "--token-file", command->token);
    if (s->ca[0] != 0) {
        option(command, "--tls-ca", s->ca);
        certificate_options(s, "worker", command);
    }
    option(command, "--uid", child->uid);
    option(command, "--log-level", s->options->log_level);
    if (!is_learner) {
        op_rundir_path(&s->dir, "final", command->extra);
        option(command, "--export", command->extra);
        number_option(command, "--threads", 1);
        return;
    }
    number_option(command, "--learner", child->id);
    number_option(command, "--threads", s->threads);
    for (uint32_t i = 0; i < s->options->learner_argument_count; i++) {
        argument(command, s->options->learner_arguments[i]);
    }
}

static void log_path(const struct op_supervisor *s, const struct op_child *child, char out[OP_PATH_MAX])
{
    char name[64];
    snprintf(name, sizeof name, "logs/%s.log", child->name);
    op_rundir_path(&s->dir, name, out);
}

static struct op_child *free_place(struct op_supervisor *s)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        if (!s->children[i].is_used) {
            return &s->children[i];
        }
    }
    return NULL;
}

static void name_child(const struct op_supervisor *s, struct op_child *child)
{
    if (child->kind == OP_EVALUATOR) {
        snprintf(child->name, sizeof child->name, "evaluator");
    } else {
        snprintf(child->name, sizeof child->name, "%s-%u", op_kind_name(child->kind), child->id);
    }
    if (s->life > 1) {
        snprintf(child->uid, sizeof child->uid, "%s.%u.%llu", child->name, s->life,
                 (unsigned long long)child->incarnation);
    } else {
        snprintf(child->uid, sizeof child->uid, "%s.%llu", child->name, (unsigned long long)child->incarnation);
    }
}

static void start(struct op_supervisor *s, const struct op_change *change)
{
    struct op_child *child = free_place(s);
    struct dl_err err = {.text = "too many processes"};
    struct command command = {0};
    char log[OP_PATH_MAX];
    enum dl_rc rc = DL_ENOMEM;
    struct op_child started = {.is_used = true,
                               .kind = change->kind,
                               .pool = change->pool,
                               .id = change->id,
                               .incarnation = change->incarnation,
                               .state = OP_RUNNING,
                               .since_ns = s->now_ns,
                               .started_ns = s->now_ns};
    name_child(s, &started);
    if (child != NULL) {
        op_rundir_path(&s->dir, "job.json", command.job);
        op_rundir_path(&s->dir, "token", command.token);
        if (change->kind == OP_SYNCER) {
            syncer_command(s, &started, &command);
        } else {
            worker_command(s, &started, &command);
        }
        log_path(s, &started, log);
        rc = op_process_start((char *const *)command.argv, log, log, &started.pid, &err);
    }
    if (rc != DL_OK) {
        op_events_add(&s->events, s->now_ns, "note", started.name, "cannot be started: %s", err.text);
        op_plan_on_start_failed(s->planner, &s->wanted, change, s->now_ns);
        return;
    }
    *child = started;
    bool is_replacement = change->reason == OP_REASON_REPLACEMENT;
    op_events_add(&s->events, s->now_ns, "started", child->name, "%s (incarnation %llu, pid %d)",
                  is_replacement ? "started again" : "started", (unsigned long long)child->incarnation,
                  (int)child->pid);
    if (child->kind == OP_LEARNER) {
        s->tallies[child->id].starts++;
    }
}

static struct op_child *find_exact(struct op_supervisor *s, const struct op_change *change)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        struct op_child *child = &s->children[i];
        if (child->is_used && child->kind == change->kind && child->id == change->id &&
            child->incarnation == change->incarnation) {
            return child;
        }
    }
    return NULL;
}

struct op_child *op_children_find(struct op_supervisor *s, enum op_kind kind, uint32_t id)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        struct op_child *child = &s->children[i];
        if (child->is_used && child->kind == kind && child->id == id && child->state != OP_ENDED) {
            return child;
        }
    }
    return NULL;
}

static void stop(struct op_supervisor *s, struct op_child *child, enum op_reason reason)
{
    if (child == NULL || child->state != OP_RUNNING) {
        return;
    }
    child->state = OP_TERMINATING;
    child->since_ns = s->now_ns;
    kill(child->pid, SIGTERM);
    op_events_add(&s->events, s->now_ns, "stop", child->name, "asked to stop (%s)", op_reason_name(reason));
}

static void kill_child(struct op_supervisor *s, struct op_child *child)
{
    if (child == NULL || child->state == OP_ENDED) {
        return;
    }
    kill(-child->pid, SIGKILL);
    kill(child->pid, SIGKILL);
    if (child->state != OP_TERMINATING) {
        child->state = OP_TERMINATING;
        child->since_ns = s->now_ns;
    }
}

static void command_syncers(struct op_supervisor *s, const char *command, enum op_reason reason)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        struct op_child *child = &s->children[i];
        if (child->is_used && child->kind == OP_SYNCER && child->state == OP_RUNNING &&
            op_poller_command(s->poller, child->id, command, s->now_ns) && !child->was_told) {
            child->was_told = true;
            op_events_add(&s->events, s->now_ns, "stop", child->name, "told to %s the job (%s)", command,
                          op_reason_name(reason));
        }
    }
}

void op_children_apply(struct op_supervisor *s)
{
    for (uint32_t i = 0; i < s->plan.change_count; i++) {
        const struct op_change *change = &s->plan.changes[i];
        struct op_child *child = find_exact(s, change);
        switch (change->type) {
        case OP_START: start(s, change); break;
        case OP_STOP: stop(s, child, change->reason); break;
        case OP_KILL: kill_child(s, child); break;
        case OP_STOP_JOB: command_syncers(s, "stop", change->reason); break;
        case OP_FINISH_JOB: command_syncers(s, "finish", change->reason); break;
        case OP_FORGET:
            if (child != NULL) {
                child->is_used = false;
            }
            break;
        }
    }
}

/* Keeps what explains a failed job: the end of something that is not started again, or the first crash. */
static void explain(struct op_supervisor *s, const struct op_child *child, const char *how)
{
    bool is_final = child->end == OP_END_EXIT && (child->code == DL_EXIT_USAGE || child->code == DL_EXIT_REFUSED);
    if (!op_end_is_crash(child->end, child->code) || (s->failure[0] != 0 && !is_final)) {
        return;
    }
    char log[OP_PATH_MAX], line[256];
    log_path(s, child, log);
    op_log_last_complaint(log, line, sizeof line);
    snprintf(s->failure, sizeof s->failure, "%s %s%s%.*s", child->name, how, line[0] != 0 ? ": " : "", 255, line);
}

/* A syncer leaves its last status beside its state; polling may have missed how the job ended. */
static void hear_last_word(struct op_supervisor *s, const struct op_child *child)
{
    char name[64], path[OP_PATH_MAX];
    DL_AUTO_FREE char *text = NULL;
    size_t size = 0;
    struct dl_err err;
    snprintf(name, sizeof name, "state/shard-%u/status.json", child->id);
    op_rundir_path(&s->dir, name, path);
    if (op_file_read(path, OP_JSON_BYTES_MAX, &text, &size, &err) == DL_OK &&
        op_poller_put(s->poller, child->id, text, size, s->now_ns, &err) == DL_OK) {
        op_watch_status(s);
    }
}

static void on_end(struct op_supervisor *s, struct op_child *child, int status)
{
    char how[64];
    bool was_asked = child->state == OP_TERMINATING || s->plan.phase == OP_JOB_FINISHING;
    child->state = OP_ENDED;
    child->since_ns = s->now_ns;
    child->is_ready = child->is_connected = false;
    if (WIFSIGNALED(status)) {
        child->end = OP_END_SIGNAL;
        child->code = WTERMSIG(status);
        const char *name = sigabbrev_np(child->code);
        snprintf(how, sizeof how, "was killed by SIG%s", name != NULL ? name : "?");
    } else {
        child->end = OP_END_EXIT;
        child->code = WEXITSTATUS(status);
        snprintf(how, sizeof how, child->code == 0 ? "ended" : "ended with exit code %d", child->code);
    }
    bool is_clean = child->end == OP_END_EXIT && child->code == 0;
    if (child->kind == OP_LEARNER && !was_asked && !is_clean) {
        struct op_tally *tally = &s->tallies[child->id];
        tally->crashes += op_end_is_crash(child->end, child->code) ? 1 : 0;
        tally->disruptions += op_end_is_crash(child->end, child->code) ? 0 : 1;
    }
    op_events_add(&s->events, s->now_ns, "exited", child->name, "%s (pid %d)", how, (int)child->pid);
    explain(s, child, how);
    if (child->kind == OP_SYNCER) {
        hear_last_word(s, child);
    }
}

void op_children_reap(struct op_supervisor *s)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        struct op_child *child = &s->children[i];
        int status = 0;
        if (child->is_used && child->state != OP_ENDED && waitpid(child->pid, &status, WNOHANG) == child->pid) {
            on_end(s, child, status);
        }
    }
}

uint32_t op_children_observe(struct op_supervisor *s)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        const struct op_child *child = &s->children[i];
        if (!child->is_used) {
            continue;
        }
        struct op_instance *instance = &s->instances[count++];
        *instance = (struct op_instance){
            .kind = child->kind,
            .pool = child->pool,
            .id = child->id,
            .incarnation = child->incarnation,
            .state = child->state,
            .since_ns = child->since_ns,
            .started_ns = child->started_ns,
            .ready = child->kind != OP_SYNCER || child->is_ready,
            .connected = child->is_connected,
            .end = child->end,
            .code = child->code,
        };
        const struct op_learner_status *seen =
            child->kind == OP_LEARNER ? op_status_learner(&s->view->status, child->id) : NULL;
        if (seen != NULL && strcmp(seen->uid, child->uid) == 0) {
            instance->behind = seen->behind;
            instance->tokens_per_second = seen->tokens_per_second;
        }
    }
    return count;
}

bool op_children_awaiting_port(const struct op_supervisor *s)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        const struct op_child *child = &s->children[i];
        if (child->is_used && child->kind == OP_SYNCER && child->state == OP_RUNNING && !child->is_ready) {
            return true;
        }
    }
    return false;
}

void op_children_find_ports(struct op_supervisor *s)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        struct op_child *child = &s->children[i];
        if (!child->is_used || child->kind != OP_SYNCER || child->state == OP_ENDED || child->is_ready) {
            continue;
        }
        char name[48], path[OP_PATH_MAX], text[64] = "";
        snprintf(name, sizeof name, "ports/shard-%u", child->id);
        op_rundir_path(&s->dir, name, path);
        DL_AUTO_FD int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t got = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
        char *end = got > 0 ? strchr(text, '\n') : NULL;
        if (end == NULL) {
            continue;
        }
        *end = 0;
        snprintf(s->addresses[child->id], sizeof s->addresses[0], "%s", text);
        struct dl_err err;
        if (op_poller_set_address(s->poller, child->id, text, &err) == DL_OK) {
            child->is_ready = true;
        }
    }
    bool all = true;
    for (uint32_t i = 0; i < s->spec->syncer.shards; i++) {
        all = all && s->addresses[i][0] != 0;
    }
    s->wanted.endpoints_known = all;
}

void op_children_kill_all(struct op_supervisor *s)
{
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        if (s->children[i].is_used) {
            kill_child(s, &s->children[i]);
        }
    }
    for (uint32_t i = 0; i < s->child_capacity; i++) {
        struct op_child *child = &s->children[i];
        if (child->is_used && child->state != OP_ENDED) {
            while (waitpid(child->pid, NULL, 0) < 0 && errno == EINTR) {
            }
            child->state = OP_ENDED;
        }
    }
}
