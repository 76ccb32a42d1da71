/* diloco-syncer: one shard of a job's syncer. */
#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/exit_codes.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/spec.h"
#include "common/version.h"
#include "syncer/merge/pool.h"
#include "syncer/server/server.h"

#define TOKEN_BYTES_MAX 400

static const char help[] =
    "usage: diloco-syncer --job FILE --shard I --listen HOST:PORT --token-file FILE [options]\n"
    "\n"
    "Holds one shard of a job's global parameters: collects what learners push, merges, sends new versions.\n"
    "\n"
    "  --job FILE           the DecoupledDiLoCoJob, YAML or JSON\n"
    "  --shard I            which of the job's syncer.shards this is, from 0\n"
    "  --listen HOST:PORT   address for learners and HTTP; HOST * is all interfaces, PORT 0 any free one\n"
    "  --token-file FILE    file whose first line is the job's token; learners must show it\n"
    "  --state-dir DIR      keeps every version there and goes on from it; without: in memory only\n"
    "  --port-file FILE     gets the real HOST:PORT once listening\n"
    "  --result-file FILE   gets one word when the job has ended: succeeded, requested, timeout or failed\n"
    "  --tls-cert FILE      certificate (PEM) and\n"
    "  --tls-key FILE       its key: speak TLS 1.3 on --listen\n"
    "  --tls-ca FILE        with TLS: clients must show a certificate of this authority\n"
    "  --health-listen H:P  a second port with /healthz /readyz /metrics /status in plain HTTP\n"
    "  --threads N          threads of a merge, and of receiving pushes (at most 4 of them; default: one a processor)\n"
    "  --push-bytes-max N   most bytes of pushes held at once (default: enough for all learners)\n"
    "  --log-level LEVEL    debug, info (default), warn or error\n"
    "  --help, --version    this text; which version this is\n"
    "\n"
    "On its port: /healthz /readyz /metrics /status, WebSocket /v1/connect; with the token POST /stop (ends the job),\n"
    "/finish (the same, as a success), /drain (as SIGTERM).\n"
    "SIGTERM saves what is under way and ends this process, not the job; a second one ends it at once.\n"
    "Exit status: 0 job finished or stopped, 1 failed, 2 wrong arguments or input, 4 the job's deadline passed,\n"
    "5 saved: the job goes on once the syncer is started again.\n";

struct arguments {
    const char *job, *token_file, *shard, *log_level, *threads, *push_bytes, *result_file;
    struct sy_server_options options;
};

enum {
    OPT_JOB = 256,
    OPT_SHARD,
    OPT_LISTEN,
    OPT_TOKEN,
    OPT_STATE,
    OPT_PORT_FILE,
    OPT_RESULT_FILE,
    OPT_CERT,
    OPT_KEY,
    OPT_CA,
    OPT_HEALTH,
    OPT_THREADS,
    OPT_PUSH_BYTES,
    OPT_LOG,
    OPT_HELP,
    OPT_VERSION
};

static int usage(const char *text)
{
    fprintf(stderr, "diloco-syncer: %s\n(--help lists all options)\n", text);
    return DL_EXIT_USAGE;
}

static enum dl_rc parse_number(const char *name, const char *text, uint64_t most, uint64_t *out, struct dl_err *err)
{
    char *end = NULL;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (text[0] < '0' || text[0] > '9' || *end != '\0' || errno != 0 || value > most) {
        return dl_err_set(err, DL_EINVAL, "%s '%s': write a whole number from 0 to %llu", name, text,
                          (unsigned long long)most);
    }
    *out = value;
    return DL_OK;
}

/* Returns -1 to go on, else the exit status. */
static int parse_options(int argc, char **argv, struct arguments *arguments)
{
    static const struct option options[] = {
        {"job", required_argument, NULL, OPT_JOB},
        {"shard", required_argument, NULL, OPT_SHARD},
        {"listen", required_argument, NULL, OPT_LISTEN},
        {"token-file", required_argument, NULL, OPT_TOKEN},
        {"state-dir", required_argument, NULL, OPT_STATE},
        {"port-file", required_argument, NULL, OPT_PORT_FILE},
        {"result-file", required_argument, NULL, OPT_RESULT_FILE},
        {"tls-cert", required_argument, NULL, OPT_CERT},
        {"tls-key", required_argument, NULL, OPT_KEY},
        {"tls-ca", required_argument, NULL, OPT_CA},
        {"health-listen", required_argument, NULL, OPT_HEALTH},
        {"threads", required_argument, NULL, OPT_THREADS},
        {"push-bytes-max", required_argument, NULL, OPT_PUSH_BYTES},
        {"log-level", required_argument, NULL, OPT_LOG},
        {"help", no_argument, NULL, OPT_HELP},
        {"version", no_argument, NULL, OPT_VERSION},
        {NULL, 0, NULL, 0},
    };
    struct sy_server_options *out = &arguments->options;
    for (int opt = getopt_long(argc, argv, "", options, NULL); opt != -1;
         opt = getopt_long(argc, argv, "", options, NULL)) {
        switch (opt) {
        case OPT_JOB: arguments->job = optarg; break;
        case OPT_SHARD: arguments->shard = optarg; break;
        case OPT_LISTEN: out->listen = optarg; break;
        case OPT_TOKEN: arguments->token_file = optarg; break;
        case OPT_STATE: out->state_dir = optarg; break;
        case OPT_PORT_FILE: out->port_file = optarg; break;
        case OPT_RESULT_FILE: arguments->result_file = optarg; break;
        case OPT_CERT: out->tls_cert = optarg; break;
        case OPT_KEY: out->tls_key = optarg; break;
        case OPT_CA: out->tls_ca = optarg; break;
        case OPT_HEALTH: out->health_listen = optarg; break;
        case OPT_THREADS: arguments->threads = optarg; break;
        case OPT_PUSH_BYTES: arguments->push_bytes = optarg; break;
        case OPT_LOG: arguments->log_level = optarg; break;
        case OPT_HELP: fputs(help, stdout); return DL_EXIT_OK;
        case OPT_VERSION: puts("diloco-syncer " DL_VERSION); return DL_EXIT_OK;
        default: return usage("the arguments are not understood");
        }
    }
    if (optind < argc) {
        return usage("unexpected argument: options only, each with --");
    }
    if (arguments->job == NULL || arguments->shard == NULL || out->listen == NULL || arguments->token_file == NULL) {
        return usage("--job, --shard, --listen and --token-file are needed");
    }
    if ((out->tls_cert == NULL) != (out->tls_key == NULL) || (out->tls_ca != NULL && out->tls_cert == NULL)) {
        return usage("--tls-cert and --tls-key go together, and --tls-ca needs both");
    }
    return -1;
}

static enum dl_rc read_first_line(const char *path, char line[TOKEN_BYTES_MAX], struct dl_err *err)
{
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return dl_err_errno(err, DL_EINVAL, errno, "reading token file %s", path);
    }
    bool got = fgets(line, TOKEN_BYTES_MAX, file) != NULL;
    fclose(file);
    return got ? DL_OK : dl_err_set(err, DL_EINVAL, "token file %s is empty: its first line is the token", path);
}

static enum dl_rc read_token(const char *path, char token[TOKEN_BYTES_MAX], struct dl_err *err)
{
    enum dl_rc rc = read_first_line(path, token, err);
    if (rc != DL_OK) {
        return rc;
    }
    size_t length = strcspn(token, "\r\n");
    if (token[length] == '\0' && length == TOKEN_BYTES_MAX - 1) {
        return dl_err_set(err, DL_EINVAL, "token file %s: the token is longer than %d bytes", path,
                          TOKEN_BYTES_MAX - 2);
    }
    token[length] = '\0';
    for (size_t i = 0; i < length; i++) {
        if (token[i] <= ' ' || token[i] > '~') {
            return dl_err_set(err, DL_EINVAL, "token file %s: only printable ASCII without spaces can be sent", path);
        }
    }
    return length > 0 ? DL_OK : dl_err_set(err, DL_EINVAL, "token file %s: the first line is empty", path);
}

static enum dl_rc prepare(struct arguments *arguments, char token[TOKEN_BYTES_MAX], struct dl_spec **spec,
                          struct dl_err *err)
{
    enum dl_log_level level = DL_LOG_INFO;
    uint64_t shard = 0;
    uint64_t threads = 0;
    enum dl_rc rc = parse_number("--shard", arguments->shard, DL_SPEC_SHARDS_MAX - 1, &shard, err);
    if (rc == DL_OK && arguments->threads != NULL) {
        rc = parse_number("--threads", arguments->threads, SY_POOL_THREADS_MAX, &threads, err);
    }
    if (rc == DL_OK && arguments->push_bytes != NULL) {
        rc = parse_number("--push-bytes-max", arguments->push_bytes, UINT64_MAX / 2, &arguments->options.push_bytes_max,
                          err);
    }
    if (rc == DL_OK && arguments->log_level != NULL) {
        rc = dl_log_level_parse(arguments->log_level, &level, err);
    }
    if (rc == DL_OK) {
        rc = read_token(arguments->token_file, token, err);
    }
    if (rc == DL_OK) {
        rc = dl_spec_load(arguments->job, spec, NULL, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    char who[32];
    snprintf(who, sizeof who, "syncer/%u", (unsigned)shard);
    dl_log_init((*spec)->name, who, level);
    arguments->options.spec = *spec;
    arguments->options.shard = (uint32_t)shard;
    arguments->options.threads = (uint32_t)threads;
    arguments->options.token = token;
    return DL_OK;
}

static int exit_code(enum dl_rc rc, const struct sy_server_end *end)
{
    if (rc != DL_OK) {
        return rc == DL_EINVAL || rc == DL_EUNSUPPORTED ? DL_EXIT_USAGE : DL_EXIT_FAILED;
    }
    if (end->is_saved) {
        return DL_EXIT_SAVED;
    }
    switch (end->result) {
    case DL_STOP_SUCCEEDED:
    case DL_STOP_REQUESTED: return DL_EXIT_OK;
    case DL_STOP_TIMEOUT: return DL_EXIT_TIMEOUT;
    case DL_STOP_FAILED: return DL_EXIT_FAILED;
    }
    return DL_EXIT_FAILED;
}

/* Written in place: in a cluster the file is a mount (/dev/termination-log) that cannot be replaced. */
static void leave_result(const char *path, enum dl_stop_result result)
{
    FILE *file = path != NULL ? fopen(path, "we") : NULL;
    bool is_written = file != NULL && fprintf(file, "%s\n", sy_stop_result_name(result)) > 0;
    if (file != NULL && fclose(file) != 0) {
        is_written = false;
    }
    if (path != NULL && !is_written) {
        dl_warn("result not written file=%s error=\"%s\"", path, strerror(errno));
    }
}

int main(int argc, char **argv)
{
    struct arguments arguments = {0};
    char token[TOKEN_BYTES_MAX];
    struct dl_spec *spec = NULL;
    struct dl_err err;
    int code = parse_options(argc, argv, &arguments);
    if (code >= 0) {
        return code;
    }
    if (prepare(&arguments, token, &spec, &err) != DL_OK) {
        return usage(err.text);
    }
    struct sy_server_end end = {.result = DL_STOP_FAILED};
    enum dl_rc rc = sy_server_run(&arguments.options, &end, &err);
    if (rc != DL_OK) {
        dl_error("cannot go on error=\"%s\"", err.text);
    } else if (!end.is_saved) {
        leave_result(arguments.result_file, end.result);
    }
    dl_spec_free(spec);
    return exit_code(rc, &end);
}
