/* The public functions up to diloco_join: options are checked, tensors and state registered. */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "common/mem.h"
#include "worker/link/diloco_internal.h"
#include "worker/link/endpoints.h"
#include "worker/link/stream.h"

#define JOIN_TIMEOUT_DEFAULT_S 1800.0

int wk_set_error(struct diloco_error *error, int code, const char *fmt, ...)
{
    if (error != NULL) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(error->text, sizeof error->text, fmt, args);
        va_end(args);
        error->code = code;
    }
    return code;
}

int wk_from_err(struct diloco_error *error, const struct dl_err *err)
{
    return wk_set_error(error, err->rc == DL_ENOMEM ? DILOCO_ENOMEM : DILOCO_EINVAL, "%s", err->text);
}

static int copy_name(char *out, size_t out_bytes, const char *text, const char *what, struct diloco_error *error)
{
    size_t length = strlen(text);
    if (length == 0 || length >= out_bytes) {
        return wk_set_error(error, DILOCO_EINVAL, "open: %s must have 1 to %zu characters", what, out_bytes - 1);
    }
    memcpy(out, text, length + 1);
    return DILOCO_CONTINUE;
}

static int set_uid(struct diloco *d, const char *uid, struct diloco_error *error)
{
    if (uid != NULL) {
        return copy_name(d->uid, sizeof d->uid, uid, "uid", error);
    }
    char host[40];
    if (gethostname(host, sizeof host) != 0) {
        snprintf(host, sizeof host, "unknown");
    }
    host[sizeof host - 1] = 0;
    snprintf(d->uid, sizeof d->uid, "%s:%ld", host, (long)getpid());
    return DILOCO_CONTINUE;
}

static int init_shared(struct wk_hub *hub, struct diloco_error *error)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_mutex_init(&hub->lock, NULL);
    pthread_cond_init(&hub->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    hub->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (hub->wake_fd < 0) {
        return wk_set_error(error, DILOCO_ENOMEM, "open: no file descriptor for the library's wake-up: %s",
                            strerror(errno));
    }
    return DILOCO_CONTINUE;
}

static int set_security(struct diloco *d, const struct diloco_options *options, struct diloco_error *error)
{
    struct wk_hub *hub = &d->hub;
    if (options->token != NULL && (hub->token = strdup(options->token)) == NULL) {
        return wk_set_error(error, DILOCO_ENOMEM, "open: no memory");
    }
    if ((options->cert_file == NULL) != (options->key_file == NULL)) {
        return wk_set_error(error, DILOCO_EINVAL, "open: a client certificate needs both cert_file and key_file");
    }
    bool tls = false;
    for (uint32_t i = 0; i < hub->shards; i++) {
        tls = tls || hub->endpoints[i].tls;
    }
    struct dl_err err;
    if (tls && wk_tls_new(options->ca_file, options->cert_file, options->key_file, &hub->tls, &err) != DL_OK) {
        return wk_from_err(error, &err);
    }
    return DILOCO_CONTINUE;
}

static int fill(struct diloco *d, const struct diloco_options *options, struct diloco_error *error)
{
    struct dl_err err;
    int code = init_shared(&d->hub, error);
    if (code == DILOCO_CONTINUE) {
        code = copy_name(d->job, sizeof d->job, options->job, "job", error);
    }
    if (code == DILOCO_CONTINUE) {
        code = set_uid(d, options->uid, error);
    }
    if (code == DILOCO_CONTINUE &&
        wk_endpoints_parse(options->endpoints, d->hub.endpoints, &d->hub.shards, &err) != DL_OK) {
        code = wk_from_err(error, &err);
    }
    if (code == DILOCO_CONTINUE) {
        code = set_security(d, options, error);
    }
    snprintf(d->trainer, sizeof d->trainer, "%s", options->trainer == NULL ? "" : options->trainer);
    d->learner = options->learner;
    d->role = options->role;
    double timeout = options->join_timeout_seconds;
    d->join_timeout_seconds = timeout > 0 ? DL_MIN(timeout, WK_TIMEOUT_MAX_S) : JOIN_TIMEOUT_DEFAULT_S;
    d->hub.log = options->log;
    d->hub.log_context = options->log_context;
    struct wk_recovery_options serve = {options->serve_listen, options->serve_address, options->cert_file,
                                        options->key_file};
    if (code == DILOCO_CONTINUE && d->role == DILOCO_LEARNER &&
        wk_recovery_serve(&d->recovery, &d->hub, &serve, &err) != DL_OK) {
        code = wk_from_err(error, &err);
    }
    return code;
}

int diloco_open(const struct diloco_options *options, struct diloco **out, struct diloco_error *error)
{
    if (options == NULL || out == NULL || options->struct_size != sizeof *options) {
        return wk_set_error(error, DILOCO_EINVAL, "open: options and out are needed, and struct_size must be %zu",
                            sizeof *options);
    }
    if (options->job == NULL || options->endpoints == NULL) {
        return wk_set_error(error, DILOCO_EINVAL, "open: job and endpoints are needed");
    }
    if (options->role != DILOCO_LEARNER && options->role != DILOCO_EVALUATOR) {
        return wk_set_error(error, DILOCO_EINVAL, "open: unknown role %d", (int)options->role);
    }
    struct diloco *d = calloc(1, sizeof *d);
    if (d == NULL) {
        return wk_set_error(error, DILOCO_ENOMEM, "open: no memory");
    }
    int code = fill(d, options, error);
    if (code != DILOCO_CONTINUE) {
        diloco_close(d);
        return code;
    }
    *out = d;
    return DILOCO_CONTINUE;
}

static bool grow_table(struct diloco *d)
{
    if (d->tensor_count < d->tensor_capacity) {
        return true;
    }
    uint32_t capacity = d->tensor_capacity == 0 ? 64 : 2 * d->tensor_capacity;
    struct dl_tensor *tensors = realloc(d->tensors, capacity * sizeof *tensors);
    if (tensors != NULL) {
        d->tensors = tensors;
    }
    float **data = realloc(d->data, capacity * sizeof *data);
    if (data != NULL) {
        d->data = data;
    }
    if (tensors == NULL || data == NULL) {
        return false;
    }
    d->tensor_capacity = capacity;
    return true;
}

int diloco_register(struct diloco *d, const char *name, float *data, int rank, const uint64_t *shape,
                    enum diloco_tensor_role role, uint32_t layer, struct diloco_error *error)
{
    if (d == NULL || name == NULL || data == NULL || shape == NULL) {
        return wk_set_error(error, DILOCO_EINVAL, "register: handle, name, data and shape are needed");
    }
    if (d->phase != WK_PHASE_OPEN || d->net != NULL) {
        return wk_set_error(error, DILOCO_EINVAL, "register %s: register every tensor before diloco_join", name);
    }
    if (rank < 1 || rank > DL_TENSOR_RANK_MAX || (role != DILOCO_WEIGHT && role != DILOCO_EMBEDDING)) {
        return wk_set_error(error, DILOCO_EINVAL, "register %s: rank %d (1 to %d) or role %d is wrong", name, rank,
                            DL_TENSOR_RANK_MAX, (int)role);
    }
    if (strlen(name) >= DL_TENSOR_NAME_MAX || d->tensor_count == DL_TENSORS_MAX) {
        return wk_set_error(error, DILOCO_EINVAL, "register %.130s: name too long, or more than %d tensors", name,
                            DL_TENSORS_MAX);
    }
    if (!grow_table(d)) {
        return wk_set_error(error, DILOCO_ENOMEM, "register %s: no memory", name);
    }
    struct dl_tensor *tensor = &d->tensors[d->tensor_count];
    *tensor = (struct dl_tensor){.rank = (uint32_t)rank, .layer = layer};
    memcpy(tensor->name, name, strlen(name) + 1);
    memcpy(tensor->shape, shape, (size_t)rank * sizeof *shape);
    tensor->role = role == DILOCO_EMBEDDING ? DL_TENSOR_EMBEDDING : DL_TENSOR_WEIGHT;
    d->data[d->tensor_count++] = data;
    return DILOCO_CONTINUE;
}

int diloco_lease_data(struct diloco *d, uint32_t sequences, struct diloco_error *error)
{
    if (d == NULL || d->net != NULL || d->role != DILOCO_LEARNER) {
        return wk_set_error(error, DILOCO_EINVAL, "lease data: for a learner, before diloco_join");
    }
    if (sequences < 1 || sequences > DL_WIRE_BATCH_MAX) {
        return wk_set_error(error, DILOCO_EINVAL, "lease data: %u sequences in a step, 1 to %u are possible", sequences,
                            DL_WIRE_BATCH_MAX);
    }
    d->batch = sequences;
    return DILOCO_CONTINUE;
}

int diloco_register_state(struct diloco *d, const char *name, void *data, uint64_t bytes, struct diloco_error *error)
{
    struct dl_err err;
    if (d == NULL || name == NULL || data == NULL) {
        return wk_set_error(error, DILOCO_EINVAL, "register state: handle, name and data are needed");
    }
    if (d->phase != WK_PHASE_OPEN || d->net != NULL) {
        return wk_set_error(error, DILOCO_EINVAL, "register state %.130s: before diloco_join", name);
    }
    return wk_recovery_register(&d->recovery, name, data, bytes, &err) == DL_OK ? DILOCO_CONTINUE
                                                                                : wk_from_err(error, &err);
}
