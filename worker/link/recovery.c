#include "worker/link/recovery.h"

#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

void wk_recovery_release(struct wk_recovery *recovery)
{
    wk_serve_free(dl_take(recovery->serve)); /* First: its snapshot is of the states. */
    wk_fetch_free(dl_take(recovery->fetch));
    free(dl_take(recovery->states));
    recovery->state_count = recovery->state_capacity = 0;
}

static bool is_name(const char *name)
{
    size_t length = strlen(name);
    for (size_t i = 0; i < length; i++) {
        if (name[i] <= ' ' || name[i] == 0x7f) {
            return false;
        }
    }
    return length > 0 && length < WK_STATE_NAME_MAX;
}

enum dl_rc wk_recovery_register(struct wk_recovery *recovery, const char *name, void *data, uint64_t bytes,
                                struct dl_err *err)
{
    if (!is_name(name) || bytes == 0 || bytes > DL_TENSOR_ELEMENTS_MAX || recovery->state_count == WK_STATES_MAX) {
        return dl_err_set(err, DL_EINVAL,
                          "register state %.130s: a name of 1 to %d characters without blanks, at least one byte, and "
                          "at most %d parts are possible",
                          name, WK_STATE_NAME_MAX - 1, WK_STATES_MAX);
    }
    for (uint32_t i = 0; i < recovery->state_count; i++) {
        if (strcmp(recovery->states[i].name, name) == 0) {
            return dl_err_set(err, DL_EINVAL, "register state %s: registered twice", name);
        }
    }
    if (recovery->state_count == recovery->state_capacity) {
        uint32_t capacity = DL_MAX(64u, 2 * recovery->state_capacity);
        struct wk_state *states = realloc(recovery->states, capacity * sizeof *states);
        if (states == NULL) {
            return dl_err_set(err, DL_ENOMEM, "register state %s: no memory", name);
        }
        recovery->states = states;
        recovery->state_capacity = capacity;
    }
    struct wk_state *state = &recovery->states[recovery->state_count++];
    *state = (struct wk_state){.data = data, .bytes = bytes};
    memcpy(state->name, name, strlen(name) + 1);
    return DL_OK;
}

/* A trainer that waits at a boundary looks again. */
static void on_wanted(void *context)
{
    struct wk_hub *hub = context;
    pthread_mutex_lock(&hub->lock);
    pthread_cond_broadcast(&hub->changed);
    pthread_mutex_unlock(&hub->lock);
}

enum dl_rc wk_recovery_serve(struct wk_recovery *recovery, struct wk_hub *hub,
                             const struct wk_recovery_options *options, struct dl_err *err)
{
    bool off = options->listen != NULL && strcmp(options->listen, "off") == 0;
    bool plain = hub->tls == NULL;
    if (off || hub->token == NULL || (!plain && options->cert_file == NULL)) {
        return DL_OK;
    }
    struct wk_serve_config config = {
        .listen = options->listen,
        .address = options->address,
        .token = hub->token,
        .cert_file = plain ? NULL : options->cert_file,
        .key_file = plain ? NULL : options->key_file,
        .log = hub->log,
        .log_context = hub->log_context,
        .wanted = on_wanted,
        .wanted_context = hub,
    };
    enum dl_rc rc = wk_serve_new(&config, &recovery->serve, err);
    hub->serve = recovery->serve;
    return rc;
}

void wk_recovery_connected(struct wk_hub *hub, int fd)
{
    char address[DL_WIRE_ADDRESS_MAX];
    if (hub->serve != NULL && wk_serve_begin(hub->serve, fd, address)) {
        pthread_mutex_lock(&hub->lock);
        wk_link_set_serve(hub->link, address);
        pthread_mutex_unlock(&hub->lock);
    }
}

enum dl_rc wk_recovery_fetch(struct wk_recovery *recovery, struct wk_hub *hub, struct dl_err *err)
{
    if (recovery->fetch == NULL) {
        recovery->fetch = wk_fetch_new(hub, recovery->states, recovery->state_count, 0);
        if (recovery->fetch == NULL) {
            return dl_err_set(err, DL_ENOMEM, "join: no memory to fetch a peer's state");
        }
    }
    wk_fetch_turn(recovery->fetch);
    return DL_OK;
}

void wk_recovery_joined(struct wk_recovery *recovery, struct wk_hub *hub)
{
    if (recovery->serve == NULL) {
        return;
    }
    struct wk_link_view view;
    wk_link_view(hub->link, &view);
    struct wk_snapshot_source source = {
        .layout = wk_link_layout(hub->link),
        .store = hub->store,
        .codec = wk_link_broadcast_codec(hub->link),
        .states = recovery->states,
        .state_count = recovery->state_count,
        .learner = view.learner,
    };
    wk_link_identity(hub->link, &source.uid, &source.nonce);
    wk_serve_open(recovery->serve, &source);
}

bool wk_recovery_boundary(struct wk_recovery *recovery, struct wk_hub *hub)
{
    if (!wk_serve_wants(recovery->serve)) {
        return false;
    }
    struct wk_offer offers[DL_SPEC_FRAGMENTS_MAX];
    for (uint32_t p = 0; p < wk_link_layout(hub->link)->fragment_count; p++) {
        wk_link_base(hub->link, p, &offers[p]);
    }
    struct wk_link_view view;
    struct dl_err err;
    uint8_t *trace = NULL;
    size_t trace_bytes = 0;
    wk_link_view(hub->link, &view);
    bool packed = wk_trace_pack(hub->link, &trace, &trace_bytes, &err) == DL_OK;
    pthread_mutex_unlock(&hub->lock);
    if (!packed && hub->log != NULL) {
        hub->log(hub->log_context, 2, err.text);
    }
    wk_serve_fill(recovery->serve, offers, view.step, trace, trace_bytes);
    pthread_mutex_lock(&hub->lock);
    return true;
}

const struct dl_wire_recovered *wk_recovery_report(const struct wk_recovery *recovery)
{
    return recovery->fetch == NULL ? NULL : wk_fetch_report(recovery->fetch);
}
