#include "operator/controller/controller.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "common/mem.h"
#include "operator/controller/internal.h"

#define TURNS_MAX 64   /* Looks at jobs before the network has its turn again. */
#define BACKLOG_MAX 32 /* While so many requests wait no job is looked at: what is new then comes before what is old. */
#define BACKLOG_NS INT64_C(5000000)

const struct op_resource op_res_jobs = {"diloco.dev", "v1alpha1", "decoupleddilocojobs", DL_SPEC_KIND, true};

/* --- the queue --- */

static void schedule(struct op_controller *c)
{
    int64_t next_ns = op_queue_next_ns(c->queue);
    if (next_ns == INT64_MAX || !op_controller_is_synced(c)) {
        op_timer_stop(c->loop, &c->pump);
    } else {
        bool is_full = op_client_backlog(c->client) >= BACKLOG_MAX;
        int64_t due_ns = is_full ? DL_MAX(next_ns, op_loop_now_ns(c->loop) + BACKLOG_NS) : next_ns;
        if (!is_full || !c->pump.is_running || c->pump.due_ns > due_ns) { /* Else every change would put it off. */
            op_timer_start(c->loop, &c->pump, due_ns);
        }
    }
}

void op_controller_wake(struct op_controller *c, const char *job_key, int64_t due_ns)
{
    struct dl_err err;
    int64_t now_ns = op_loop_now_ns(c->loop);
    int64_t at_ns = DL_MAX(due_ns, now_ns + OP_SETTLE_NS);
    if (op_queue_add_at(c->queue, job_key, at_ns, now_ns, &err) != DL_OK) {
        dl_error("cannot queue job=%s error=\"%s\"", job_key, err.text);
    }
    schedule(c);
}

static void on_pump(void *context, int64_t now_ns)
{
    struct op_controller *c = context;
    for (int i = 0; i < TURNS_MAX && op_client_backlog(c->client) < BACKLOG_MAX; i++) {
        const char *next = op_queue_take(c->queue, now_ns);
        if (next == NULL) {
            break;
        }
        char key[OP_KEY_MAX];
        snprintf(key, sizeof key, "%s", next);
        int64_t started_ns = dl_now_ns();
        c->counts.active_workers = 1;
        op_turn(c, key);
        c->counts.active_workers = 0;
        op_reconcile_count(&c->counts, OP_RECONCILE_SUCCESS, (double)(dl_now_ns() - started_ns) / 1e9);
        op_queue_done(c->queue, key, now_ns);
    }
    schedule(c);
}

/* --- watches --- */

static void on_job(void *context, const struct op_object *object)
{
    op_store_on_job(context, object);
}

static void on_job_gone(void *context, const char *space, const char *name)
{
    op_store_on_job_gone(context, space, name);
}

static void on_pod(void *context, const struct op_object *object)
{
    op_store_on_pod(context, object);
}

static void on_pod_gone(void *context, const char *space, const char *name)
{
    op_store_on_pod_gone(context, space, name);
}

static void on_node(void *context, const struct op_object *object)
{
    op_store_on_node(context, object);
}

static void on_node_gone(void *context, const char *space, const char *name)
{
    (void)space;
    op_store_on_node_gone(context, name);
}

static void on_part(void *context, const struct op_object *object)
{
    (void)context; /* Only that it vanishes matters. */
    (void)object;
}

static void on_set_gone(void *context, const char *space, const char *name)
{
    op_store_on_part_gone(context, OP_PART_SET, space, name);
}

static void on_service_gone(void *context, const char *space, const char *name)
{
    op_store_on_part_gone(context, OP_PART_SERVICE, space, name);
}

static void on_spec_gone(void *context, const char *space, const char *name)
{
    op_store_on_part_gone(context, OP_PART_SPEC, space, name);
}

static void on_synced(void *context)
{
    struct op_controller *c = context;
    if (op_controller_is_synced(c)) {
        schedule(c);
    }
}

static void on_failed(void *context, const struct dl_err *err)
{
    (void)context;
    dl_warn("watch error=\"%s\"", err->text);
}

bool op_controller_is_synced(const struct op_controller *c)
{
    for (uint32_t i = 0; i < c->needed_synced; i++) {
        if (!op_reflector_is_synced(c->reflectors[i])) {
            return false;
        }
    }
    return c->needed_synced > 0;
}

struct watch {
    const struct op_resource *resource;
    bool is_needed, is_of_ours;
    void (*changed)(void *context, const struct op_object *object);
    void (*gone)(void *context, const char *space, const char *name);
};

static const struct watch watches[] = {
    {&op_res_jobs, true, false, on_job, on_job_gone},
    {&op_res_pods, true, true, on_pod, on_pod_gone},
    {&op_res_stateful_sets, false, true, on_part, on_set_gone},
    {&op_res_services, false, true, on_part, on_service_gone},
    {&op_res_config_maps, false, true, on_part, on_spec_gone},
};

static enum dl_rc add_watch(struct op_controller *c, const struct watch *watch, const char *space, struct dl_err *err)
{
    struct op_reflector_options options = {
        .resource = watch->resource,
        .space = space,
        .label_selector = watch->is_of_ours ? OP_LABEL_MANAGED_BY "=" OP_MANAGER : NULL,
        .context = c,
        .changed = watch->changed,
        .gone = watch->gone,
        .synced = on_synced,
        .failed = on_failed,
    };
    enum dl_rc rc = op_reflector_new(c->client, &options, &c->reflectors[c->reflector_count], err);
    c->reflector_count += rc == DL_OK ? 1 : 0;
    return rc;
}

/* Those that planning waits for come first. */
static enum dl_rc add_watches(struct op_controller *c, bool needed, struct dl_err *err)
{
    uint32_t spaces = DL_MAX(c->options.space_count, 1u);
    for (size_t i = 0; i < DL_COUNT_OF(watches); i++) {
        for (uint32_t s = 0; s < spaces && watches[i].is_needed == needed; s++) {
            const char *space = c->options.space_count > 0 ? c->options.spaces[s] : NULL;
            enum dl_rc rc = add_watch(c, &watches[i], space, err);
            if (rc != DL_OK) {
                return rc;
            }
        }
    }
    return DL_OK;
}

/* --- life --- */

static enum dl_rc start(struct op_controller *c, struct dl_err *err)
{
    static const struct watch nodes = {&op_res_nodes, false, false, on_node, on_node_gone};
    enum dl_rc rc = op_queue_new("decoupleddilocojob", &c->queue, err);
    if (rc == DL_OK) {
        rc = op_recorder_new(c->client, "diloco.dev/operator", c->options.instance, &c->recorder, err);
    }
    if (rc == DL_OK) {
        rc = add_watches(c, true, err);
    }
    c->needed_synced = c->reflector_count;
    if (rc == DL_OK) {
        rc = add_watches(c, false, err);
    }
    return rc == DL_OK ? add_watch(c, &nodes, NULL, err) : rc;
}

enum dl_rc op_controller_new(struct op_client *client, const struct op_controller_options *options,
                             struct op_controller **out, struct dl_err *err)
{
    struct op_controller *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return dl_err_set(err, DL_ENOMEM, "no memory for the controller");
    }
    c->client = client;
    c->loop = op_client_loop(client);
    c->options = *options;
    c->pump = (struct op_timer){.fire = on_pump, .context = c};
    c->counts.controller = "decoupleddilocojob";
    c->counts.max_workers = 1;
    LIST_INIT(&c->errands);
    LIST_INIT(&c->orders);
    enum dl_rc rc = start(c, err);
    if (rc != DL_OK) {
        op_controller_free(c);
        return rc;
    }
    *out = c;
    return DL_OK;
}

void op_controller_free(struct op_controller *c)
{
    if (c == NULL) {
        return;
    }
    op_timer_stop(c->loop, &c->pump);
    for (uint32_t i = 0; i < c->reflector_count; i++) {
        op_reflector_free(c->reflectors[i]);
    }
    op_act_release(c);
    op_progress_release(c);
    op_recorder_free(c->recorder);
    op_queue_free(c->queue);
    op_store_release(c);
    free(c);
}

void op_controller_metrics(const struct op_controller *c, struct dl_metrics *metrics)
{
    uint64_t phases[DL_JOB_PHASE_COUNT] = {0};
    size_t place = 0;
    const char *key;
    void *value;
    while (op_map_next(&c->jobs, &place, &key, &value)) {
        const struct op_job *job = value;
        phases[job->has_phase ? job->phase : OP_JOB_PENDING]++;
    }
    dl_metrics_family(metrics, "diloco_jobs", "gauge", "Jobs by phase.");
    for (int i = 0; i < DL_JOB_PHASE_COUNT; i++) {
        dl_metrics_value(metrics, (double)phases[i], "phase", op_job_phase_name((enum op_job_phase)i), (char *)NULL);
    }
    dl_metrics_family(metrics, "diloco_pods", "gauge", "Pods of jobs.");
    dl_metrics_value(metrics, (double)c->pods.count, (char *)NULL);
    op_reconcile_metrics_write(&c->counts, metrics);
    op_queue_metrics(c->queue, op_loop_now_ns(c->loop), metrics);
    op_reflector_metrics(c->reflectors, c->reflector_count, metrics);
    op_recorder_metrics(c->recorder, metrics);
}
