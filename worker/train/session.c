#include "worker/train/session.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "common/mem.h"
#include "worker/train/stop.h"
#include "worker/train/trainer.h"

static enum dl_rc read_token(const char *path, char **token, struct dl_err *err)
{
    char text[WK_TOKEN_BYTES_MAX + 1];
    DL_AUTO_FILE FILE *file = fopen(path, "re");
    if (file == NULL) {
        return dl_err_errno(err, errno == ENOENT ? DL_ENOTFOUND : DL_EDENIED, errno, "token file %s cannot be read",
                            path);
    }
    size_t size = fread(text, 1, sizeof text, file);
    while (size > 0 && isspace((unsigned char)text[size - 1])) {
        size--;
    }
    if (size == 0 || size > WK_TOKEN_BYTES_MAX) {
        return dl_err_set(err, DL_EINVAL, "token file %s holds %s; it should hold one token of at most %d bytes", path,
                          size == 0 ? "nothing" : "too much", WK_TOKEN_BYTES_MAX);
    }
    for (size_t i = 0; i < size; i++) {
        if (!isgraph((unsigned char)text[i])) {
            return dl_err_set(err, DL_EINVAL, "token file %s: byte %zu is not a printable character", path, i);
        }
    }
    *token = strndup(text, size);
    return *token != NULL ? DL_OK : dl_err_set(err, DL_ENOMEM, "no memory for the token");
}

enum dl_rc wk_session_load(struct wk_session *session, const struct wk_args *args, struct dl_err *err)
{
    *session = (struct wk_session){.args = args};
    static struct dl_spec_warnings warnings; /* Large, and once a process. */
    enum dl_rc rc = dl_spec_load(args->job, &session->spec, &warnings, err);
    if (rc == DL_OK && args->token_file != NULL) {
        rc = read_token(args->token_file, &session->token, err);
    }
    if (rc != DL_OK) {
        return rc;
    }
    char who[32] = "evaluator";
    if (args->command == WK_LEARN && args->learner >= 0) {
        snprintf(who, sizeof who, "learner/%d", args->learner);
    } else if (args->command == WK_LEARN) {
        snprintf(who, sizeof who, "learner");
    }
    dl_log_init(session->spec->name, who, args->log_level);
    for (uint32_t i = 0; i < warnings.count; i++) {
        dl_debug("manifest: %s", warnings.text[i]);
    }
    return wk_stop_init(args->grace_seconds, err);
}

static void log_line(void *context, int level, const char *line)
{
    (void)context;
    dl_log(level <= 0 ? DL_LOG_DEBUG : level >= 3 ? DL_LOG_ERROR : (enum dl_log_level)level, "%s", line);
}

static int register_state(struct diloco *diloco, struct wk_trainer *trainer, struct diloco_error *error)
{
    int code = DILOCO_CONTINUE;
    uint32_t count = trainer == NULL ? 0 : wk_trainer_state_count(trainer);
    for (uint32_t i = 0; code == DILOCO_CONTINUE && i < count; i++) {
        struct wk_trainer_state state;
        wk_trainer_state(trainer, i, &state);
        code = diloco_register_state(diloco, state.name, state.data, state.bytes, error);
    }
    return code;
}

int wk_session_join(struct wk_session *session, enum diloco_role role, struct wk_model *model,
                    struct wk_trainer *source, struct diloco_info *info, struct diloco_error *error)
{
    const struct wk_args *args = session->args;
    char trainer[WK_TRAINER_NAME_MAX];
    wk_trainer_name(trainer);
    struct diloco_options options = {
        .struct_size = sizeof options,
        .job = session->spec->name,
        .endpoints = args->endpoints,
        .token = session->token,
        .ca_file = args->tls_ca,
        .cert_file = args->tls_cert,
        .key_file = args->tls_key,
        .learner = args->learner,
        .uid = args->uid,
        .role = role,
        .join_timeout_seconds = session->spec->sync.join_timeout_seconds,
        .trainer = trainer,
        .log = log_line,
        .serve_listen = args->serve_listen,
        .serve_address = args->serve_address,
    };
    int code = diloco_open(&options, &session->diloco, error);
    const struct dl_tensor *tensors = wk_model_tensors(model);
    for (uint32_t i = 0; code == DILOCO_CONTINUE && i < wk_model_tensor_count(model); i++) {
        const struct dl_tensor *tensor = &tensors[i];
        code = diloco_register(session->diloco, tensor->name, wk_model_parameters(model)[i], (int)tensor->rank,
                               tensor->shape, tensor->role == DL_TENSOR_EMBEDDING ? DILOCO_EMBEDDING : DILOCO_WEIGHT,
                               tensor->layer, error);
    }
    if (code == DILOCO_CONTINUE && role == DILOCO_LEARNER) {
        code = diloco_lease_data(session->diloco, session->spec->training.batch_sequences, error);
    }
    if (code == DILOCO_CONTINUE) {
        code = register_state(session->diloco, source, error);
    }
    if (code != DILOCO_CONTINUE) {
        return code;
    }
    if (wk_stop_at_once(true)) {
        error->code = DILOCO_STOPPED;
        snprintf(error->text, sizeof error->text, "asked to leave before it had joined");
        return DILOCO_STOPPED;
    }
    code = diloco_join(session->diloco, info, error);
    wk_stop_at_once(false);
    return code;
}

void wk_session_close(struct wk_session *session)
{
    diloco_close(session->diloco);
    dl_spec_free(session->spec);
    free(session->token);
}

static bool read_quota(const char *path, uint64_t *quota, uint64_t *period)
{
    DL_AUTO_FILE FILE *file = fopen(path, "re");
    return file != NULL && fscanf(file, "%" SCNu64 " %" SCNu64, quota, period) == 2;
}

/* Whole cores of the control group's quota, version 2; UINT32_MAX: no quota. */
static uint32_t quota_cores(void)
{
    uint64_t quota = 0, period = 0;
    if (!read_quota("/sys/fs/cgroup/cpu.max", &quota, &period) || period == 0) {
        return UINT32_MAX;
    }
    uint64_t cores = (quota + period / 2) / period;
    return (uint32_t)DL_MIN(DL_MAX(cores, 1u), UINT32_MAX);
}

uint32_t wk_usable_cores(void)
{
    cpu_set_t set;
    uint32_t cores = sched_getaffinity(0, sizeof set, &set) == 0 ? (uint32_t)CPU_COUNT(&set) : 1;
    uint32_t quota = quota_cores();
    return DL_MAX(DL_MIN(DL_MIN(cores, quota), (uint32_t)WK_MODEL_THREADS_MAX), 1u);
}

uint32_t wk_session_threads(const struct wk_session *session)
{
    if (session->args->threads > 0) {
        return session->args->threads;
    }
    uint32_t threads = session->spec->training.threads;
    return threads > 0 ? threads : wk_usable_cores();
}

enum dl_exit wk_exit_of_rc(enum dl_rc rc)
{
    switch (rc) {
    case DL_OK: return DL_EXIT_OK;
    case DL_EINVAL:
    case DL_ENOTFOUND:
    case DL_EDENIED:
    case DL_EUNSUPPORTED:
    case DL_EPROTO: return DL_EXIT_USAGE;
    case DL_ETIMEOUT: return DL_EXIT_TIMEOUT;
    case DL_AGAIN:
    case DL_ENOMEM:
    case DL_EIO:
    case DL_ENET:
    case DL_EEXISTS:
    case DL_ECONFLICT:
    case DL_EGONE:
    case DL_ECORRUPT:
    case DL_EFULL: return DL_EXIT_FAILED;
    }
    return DL_EXIT_FAILED;
}

enum dl_exit wk_exit_of_diloco(int code)
{
    switch ((enum diloco_result)code) {
    case DILOCO_CONTINUE:
    case DILOCO_DONE:
    case DILOCO_STOPPED: return DL_EXIT_OK;
    case DILOCO_EINVAL: return DL_EXIT_USAGE;
    case DILOCO_EREFUSED: return DL_EXIT_REFUSED;
    case DILOCO_ETIMEOUT: return DL_EXIT_TIMEOUT;
    case DILOCO_ENOMEM:
    case DILOCO_EFAILED: return DL_EXIT_FAILED;
    }
    return DL_EXIT_FAILED;
}
