#include "operator/kube/exec.h"

#include <cjson/cJSON.h>
#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common/buf.h"
#include "common/clock.h"
#include "common/mem.h"
#include "common/time_text.h"

#define REAP_EVERY_NS (20 * DL_NS_PER_MS)

extern char **environ;

struct op_exec_run {
    struct op_loop *loop;
    const struct op_config *config;
    void (*done)(void *context, const struct op_exec_answer *answer);
    void *context;
    pid_t child; /* 0: reaped. */
    int64_t deadline_ns;
    struct op_fd out;
    struct op_timer timer; /* The deadline while output is read; then the next look for the child's end. */
    struct dl_buf text;
};

static void end_child(struct op_exec_run *run)
{
    if (run->child != 0) {
        kill(-run->child, SIGKILL);
        int status = 0;
        while (waitpid(run->child, &status, 0) < 0 && errno == EINTR) {
        }
        run->child = 0;
    }
}

void op_exec_run_free(struct op_exec_run *run)
{
    if (run == NULL) {
        return;
    }
    end_child(run);
    op_timer_stop(run->loop, &run->timer);
    op_fd_remove(run->loop, &run->out);
    if (run->out.fd >= 0) {
        close(run->out.fd);
    }
    if (run->text.data != NULL) {
        OPENSSL_cleanse(run->text.data, run->text.size);
    }
    dl_buf_release(&run->text);
    free(run);
}

static void finish(struct op_exec_run *run, struct op_exec_answer *answer)
{
    end_child(run);
    op_timer_stop(run->loop, &run->timer);
    op_fd_remove(run->loop, &run->out);
    if (answer->rc != DL_OK) {
        dl_err_wrap(&answer->err, "credential plugin %s", run->config->exec.command);
    }
    run->done(run->context, answer);
}

static void fail(struct op_exec_run *run, enum dl_rc rc, const char *text)
{
    struct op_exec_answer answer = {.rc = rc};
    dl_err_set(&answer.err, rc, "%s", text);
    finish(run, &answer);
}

static const char *text_of(const cJSON *object, const char *key)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, key));
    return text != NULL && text[0] != 0 ? text : NULL;
}

static void read_answer(struct op_exec_run *run)
{
    cJSON *tree = cJSON_ParseWithLength(run->text.data != NULL ? run->text.data : "", run->text.size);
    const cJSON *status = cJSON_GetObjectItemCaseSensitive(tree, "status");
    struct op_exec_answer answer = {
        .token = text_of(status, "token"),
        .cert = text_of(status, "clientCertificateData"),
        .key = text_of(status, "clientKeyData"),
        .expires_wall_ns = INT64_MAX,
    };
    const char *expires = text_of(status, "expirationTimestamp");
    if (answer.token == NULL && (answer.cert == NULL || answer.key == NULL)) {
        answer.rc = dl_err_set(&answer.err, DL_EPROTO,
                               "printed no ExecCredential with a status.token or a client certificate and key");
    } else if (expires != NULL) {
        answer.rc = dl_time_parse(expires, &answer.expires_wall_ns, &answer.err);
    }
    finish(run, &answer);
    cJSON_Delete(tree);
}

static void on_timer(void *context, int64_t now_ns)
{
    struct op_exec_run *run = context;
    int status = 0;
    if (run->out.is_added || now_ns >= run->deadline_ns) {
        fail(run, DL_ETIMEOUT, "did not end in time");
    } else if (waitpid(run->child, &status, WNOHANG) != run->child) {
        op_timer_start(run->loop, &run->timer, now_ns + REAP_EVERY_NS);
    } else {
        run->child = 0;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) {
            read_answer(run);
        } else if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
            fail(run, DL_ENOTFOUND,
                 run->config->exec.install_hint != NULL ? run->config->exec.install_hint : "cannot be started");
        } else {
            fail(run, DL_EDENIED, "failed; what it said is above");
        }
    }
}

static void on_output(void *context, short revents, int64_t now_ns)
{
    struct op_exec_run *run = context;
    (void)revents;
    char bytes[4096];
    ssize_t got = read(run->out.fd, bytes, sizeof bytes);
    if (got > 0) {
        dl_buf_append(&run->text, bytes, (size_t)got);
        OPENSSL_cleanse(bytes, sizeof bytes);
        if (run->text.failed) {
            fail(run, DL_EPROTO, "printed too much");
        }
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
        op_fd_remove(run->loop, &run->out);
        op_timer_start(run->loop, &run->timer, now_ns);
    }
}

/* KUBERNETES_EXEC_INFO, as the plugin's interface wants it. */
static char *exec_info(const struct op_config *config)
{
    cJSON *info = cJSON_CreateObject();
    cJSON *spec = NULL;
    bool is_built = cJSON_AddStringToObject(info, "kind", "ExecCredential") != NULL &&
                    cJSON_AddStringToObject(info, "apiVersion", config->exec.api_version) != NULL &&
                    (spec = cJSON_AddObjectToObject(info, "spec")) != NULL &&
                    cJSON_AddFalseToObject(spec, "interactive") != NULL;
    if (is_built && config->exec.provide_cluster_info) {
        cJSON *cluster = cJSON_AddObjectToObject(spec, "cluster");
        is_built = cluster != NULL && cJSON_AddStringToObject(cluster, "server", config->server) != NULL;
    }
    char *text = is_built ? cJSON_PrintUnformatted(info) : NULL;
    char *line = NULL;
    if (text == NULL || asprintf(&line, "KUBERNETES_EXEC_INFO=%s", text) < 0) {
        line = NULL;
    }
    cJSON_free(text);
    cJSON_Delete(info);
    return line;
}

static bool is_same_name(const char *a, const char *b)
{
    size_t size = strcspn(a, "=");
    return strncmp(a, b, size) == 0 && b[size] == '=';
}

/* Our environment with the plugin's own values on top; the array is the caller's, the text is not. */
static char **environment(const struct op_config *config, char *info)
{
    size_t ours = 0, count = 0;
    while (environ[ours] != NULL) {
        ours++;
    }
    char **all = calloc(ours + OP_EXEC_ARGS_MAX + 2, sizeof *all);
    for (size_t i = 0; all != NULL && i < ours; i++) {
        bool is_replaced = is_same_name("KUBERNETES_EXEC_INFO", environ[i]);
        for (size_t k = 0; config->exec.env[k] != NULL; k++) {
            is_replaced = is_replaced || is_same_name(config->exec.env[k], environ[i]);
        }
        if (!is_replaced) {
            all[count++] = environ[i];
        }
    }
    for (size_t k = 0; all != NULL && config->exec.env[k] != NULL; k++) {
        all[count++] = config->exec.env[k];
    }
    if (all != NULL) {
        all[count] = info;
    }
    return all;
}

static int spawn(const struct op_config *config, char *const env[], int out_fd, pid_t *child)
{
    char *argv[OP_EXEC_ARGS_MAX + 2] = {config->exec.command};
    for (size_t i = 0; config->exec.args[i] != NULL; i++) {
        argv[i + 1] = config->exec.args[i];
    }
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t none;
    sigemptyset(&none);
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, out_fd, 1);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setsigmask(&attributes, &none);
    int code = posix_spawnp(child, config->exec.command, &actions, &attributes, argv, env);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    return code;
}

static enum dl_rc start_child(struct op_exec_run *run, struct dl_err *err)
{
    const struct op_config *config = run->config;
    int ends[2];
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
        return dl_err_errno(err, DL_ENOMEM, errno, "credential plugin %s: no pipe", config->exec.command);
    }
    run->out.fd = ends[0];
    DL_AUTO_FD int theirs = ends[1];
    fcntl(theirs, F_SETFL, 0); /* The plugin's writes may wait, our reads may not. */
    DL_AUTO_FREE char *info = exec_info(config);
    DL_AUTO_FREE char **env = info != NULL ? environment(config, info) : NULL;
    if (env == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to start %s", config->exec.command);
    }
    int code = spawn(config, env, theirs, &run->child);
    if (code != 0) {
        run->child = 0;
        const char *hint = config->exec.install_hint != NULL ? config->exec.install_hint : "is it installed?";
        return dl_err_errno(err, code == ENOENT ? DL_ENOTFOUND : DL_EDENIED, code,
                            "cannot start the credential plugin %s (%s)", config->exec.command, hint);
    }
    return op_fd_add(run->loop, &run->out, err);
}

enum dl_rc op_exec_run_new(struct op_loop *loop, const struct op_config *config, int64_t timeout_ms,
                           void (*done)(void *context, const struct op_exec_answer *answer), void *context,
                           struct op_exec_run **out, struct dl_err *err)
{
    struct op_exec_run *run = calloc(1, sizeof *run);
    if (run == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory to start %s", config->exec.command);
    }
    *run = (struct op_exec_run){.loop = loop, .config = config, .done = done, .context = context};
    run->deadline_ns = op_loop_now_ns(loop) + timeout_ms * DL_NS_PER_MS;
    run->timer = (struct op_timer){.fire = on_timer, .context = run};
    run->out = (struct op_fd){.fd = -1, .events = POLLIN, .ready = on_output, .context = run};
    dl_buf_init(&run->text, OP_EXEC_BYTES_MAX);
    enum dl_rc rc = start_child(run, err);
    if (rc != DL_OK) {
        op_exec_run_free(run);
        return rc;
    }
    op_timer_start(loop, &run->timer, run->deadline_ns);
    *out = run;
    return DL_OK;
}
