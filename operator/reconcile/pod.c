#include "operator/reconcile/pod.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/hash.h"
#include "common/mem.h"
#include "common/time_text.h"

/* --- reading --- */

static const cJSON *member(const cJSON *object, const char *key)
{
    return cJSON_IsObject(object) ? cJSON_GetObjectItemCaseSensitive(object, key) : NULL;
}

static const char *text_of(const cJSON *object, const char *key)
{
    const cJSON *item = member(object, key);
    return cJSON_IsString(item) ? item->valuestring : "";
}

static void copy(char *out, size_t size, const char *text)
{
    snprintf(out, size, "%s", text);
}

static bool number_of(const cJSON *labels, const char *key, uint64_t *out)
{
    const char *text = text_of(labels, key);
    char *end = NULL;
    unsigned long long value = strtoull(text, &end, 10);
    *out = value;
    return text[0] >= '0' && text[0] <= '9' && *end == 0;
}

static const cJSON *condition_of(const cJSON *status, const char *type)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, member(status, "conditions"))
    {
        if (strcmp(text_of(item, "type"), type) == 0) {
            return item;
        }
    }
    return NULL;
}

static bool is_true(const cJSON *condition)
{
    return strcmp(text_of(condition, "status"), "True") == 0;
}

static bool read_identity(const cJSON *metadata, struct op_pod *out)
{
    const cJSON *labels = member(metadata, "labels");
    const char *role = text_of(labels, OP_LABEL_ROLE);
    uint64_t id = 0;
    out->incarnation = 1;
    copy(out->job_uid, sizeof out->job_uid, text_of(labels, OP_LABEL_JOB_UID));
    copy(out->uid, sizeof out->uid, text_of(metadata, "uid"));
    copy(out->pool, sizeof out->pool, text_of(labels, OP_LABEL_POOL));
    if (strcmp(role, "syncer") == 0) { /* Its number is the end of its name. */
        const char *dash = strrchr(text_of(metadata, "name"), '-');
        out->kind = OP_SYNCER;
        id = dash != NULL && dash[1] >= '0' && dash[1] <= '9' ? strtoull(dash + 1, NULL, 10) : UINT64_MAX;
    } else if (strcmp(role, "learner") == 0) {
        out->kind = OP_LEARNER;
        if (!number_of(labels, OP_LABEL_LEARNER, &id) || !number_of(labels, OP_LABEL_INCARNATION, &out->incarnation)) {
            return false;
        }
    } else if (strcmp(role, "evaluator") == 0) {
        out->kind = OP_EVALUATOR;
        if (!number_of(labels, OP_LABEL_INCARNATION, &out->incarnation)) {
            return false;
        }
    } else {
        return false;
    }
    out->id = (uint32_t)id;
    return id < DL_SPEC_LEARNERS_MAX && out->incarnation > 0 && out->job_uid[0] != 0;
}

static enum op_pod_phase phase_of(const char *name)
{
    static const char *const names[] = {"Pending", "Running", "Succeeded", "Failed", "Unknown"};
    for (size_t i = 0; i < DL_COUNT_OF(names); i++) {
        if (strcmp(name, names[i]) == 0) {
            return (enum op_pod_phase)i;
        }
    }
    return OP_POD_PENDING; /* Just made: no status yet. */
}

/* A log's line without its time, or the line itself. */
static const char *after_time(const char *line)
{
    size_t time = strcspn(line, " \r\n");
    bool has_time = time > 19 && line[4] == '-' && line[10] == 'T' && line[time] == ' ';
    return has_time ? line + time + 1 : line;
}

/* Of a log's end what says most: the last line of an error, else the last line. */
static void copy_last_words(char *out, size_t size, const char *text)
{
    const char *best = "";
    bool has_error = false;
    for (const char *line = text; *line != 0; line += strcspn(line, "\r\n"), line += strspn(line, "\r\n")) {
        const char *words = after_time(line);
        bool is_error = strncmp(words, "error ", 6) == 0;
        if (strcspn(words, "\r\n") > 0 && (is_error || !has_error)) {
            best = words;
            has_error = is_error;
        }
    }
    snprintf(out, size, "%.*s", (int)DL_MIN(strcspn(best, "\r\n"), size - 1), best);
}

static void read_end(const cJSON *terminated, struct op_pod *out)
{
    out->has_ended = true;
    out->code = (int)op_json_u32(terminated, "exitCode", 0);
    out->is_out_of_memory = strcmp(text_of(terminated, "reason"), "OOMKilled") == 0;
    const char *message = text_of(terminated, "message");
    copy_last_words(out->message, sizeof out->message, message);
    if (out->kind == OP_SYNCER) {
        size_t length = strcspn(message, "\r\n");
        snprintf(out->last_word, sizeof out->last_word, "%.*s", (int)DL_MIN(length, sizeof out->last_word - 1),
                 message);
    }
}

/* The container that is ours: of the role's name, else the first. */
static const cJSON *container_status(const cJSON *status, enum op_kind kind)
{
    const cJSON *statuses = member(status, "containerStatuses"), *item;
    cJSON_ArrayForEach(item, statuses)
    {
        if (strcmp(text_of(item, "name"), op_kind_name(kind)) == 0) {
            return item;
        }
    }
    return cJSON_IsArray(statuses) ? statuses->child : NULL;
}

static void read_container(const cJSON *container, struct op_pod *out)
{
    const cJSON *state = member(container, "state"), *last = member(container, "lastState");
    const cJSON *running = member(state, "running"), *waiting = member(state, "waiting");
    const cJSON *ended = member(state, "terminated");
    out->restarts = op_json_u32(container, "restartCount", 0);
    if (member(last, "terminated") != NULL) {
        read_end(member(last, "terminated"), out);
    }
    if (ended != NULL) {
        read_end(ended, out);
        out->started_ns = dl_time_or_zero(text_of(ended, "startedAt"));
        out->since_ns = dl_time_or_zero(text_of(ended, "finishedAt"));
    } else if (running != NULL) {
        out->is_up = true;
        out->started_ns = dl_time_or_zero(text_of(running, "startedAt"));
        out->since_ns = out->started_ns;
    } else if (waiting != NULL) {
        copy(out->waiting, sizeof out->waiting, text_of(waiting, "reason"));
        if (!out->has_ended || out->message[0] == 0) {
            copy(out->message, sizeof out->message, text_of(waiting, "message"));
        }
        const cJSON *before = member(last, "terminated");
        out->started_ns = dl_time_or_zero(text_of(before, "startedAt"));
        out->since_ns = dl_time_or_zero(text_of(before, "finishedAt"));
    }
}

/* Init containers that cannot start keep ours from starting. */
static void read_init_containers(const cJSON *status, struct op_pod *out)
{
    const cJSON *item;
    cJSON_ArrayForEach(item, member(status, "initContainerStatuses"))
    {
        const cJSON *waiting = member(member(item, "state"), "waiting");
        if (waiting != NULL && strcmp(text_of(waiting, "reason"), "PodInitializing") != 0) {
            copy(out->waiting, sizeof out->waiting, text_of(waiting, "reason"));
            copy(out->message, sizeof out->message, text_of(waiting, "message"));
        }
    }
}

static void read_placement(const cJSON *status, struct op_pod *out)
{
    const cJSON *scheduled = condition_of(status, "PodScheduled");
    if (scheduled == NULL || is_true(scheduled) || strcmp(text_of(scheduled, "reason"), "Unschedulable") != 0) {
        return;
    }
    out->is_unschedulable = true;
    out->since_ns = dl_time_or_zero(text_of(scheduled, "lastTransitionTime"));
    copy(out->message, sizeof out->message, text_of(scheduled, "message"));
}

bool op_pod_read(const cJSON *object, struct op_pod *out)
{
    const cJSON *metadata = member(object, "metadata"), *status = member(object, "status");
    *out = (struct op_pod){0};
    if (!read_identity(metadata, out)) {
        return false;
    }
    copy(out->node, sizeof out->node, text_of(member(object, "spec"), "nodeName"));
    copy(out->address, sizeof out->address, text_of(status, "podIP"));
    out->phase = phase_of(text_of(status, "phase"));
    out->created_ns = dl_time_or_zero(text_of(metadata, "creationTimestamp"));
    out->is_leaving = cJSON_IsString(member(metadata, "deletionTimestamp"));
    out->is_ready = is_true(condition_of(status, "Ready"));
    const cJSON *disruption = condition_of(status, "DisruptionTarget");
    out->is_disrupted = is_true(disruption);
    read_placement(status, out);
    read_init_containers(status, out);
    const cJSON *container = container_status(status, out->kind);
    if (container != NULL) {
        read_container(container, out);
    }
    copy(out->reason, sizeof out->reason, text_of(status, "reason"));
    if (out->reason[0] == 0 && out->is_disrupted) {
        copy(out->reason, sizeof out->reason, text_of(disruption, "reason"));
    }
    if (out->phase == OP_POD_FAILED && out->message[0] == 0) {
        copy(out->message, sizeof out->message, text_of(status, "message"));
    }
    out->since_ns = out->since_ns != 0 ? out->since_ns : out->created_ns;
    out->started_ns = out->started_ns != 0 ? out->started_ns : out->created_ns;
    return true;
}

/* --- nodes --- */

const struct op_spot_label op_spot_labels[] = {
    {"cloud.google.com/gke-spot", "true"},         {"cloud.google.com/gke-preemptible", "true"},
    {"cloud.google.com/gke-provisioning", "spot"}, {"eks.amazonaws.com/capacityType", "SPOT"},
    {"karpenter.sh/capacity-type", "spot"},        {"kubernetes.azure.com/scalesetpriority", "spot"},
};
const uint32_t op_spot_label_count = DL_COUNT_OF(op_spot_labels);

/* Taints that come shortly before a node goes. A `*` at the end stands for anything. */
static const char *const vanishing_taints[] = {
    "cloud.google.com/impending-node-termination",   /* GKE: spot and preemptible VMs. */
    "karpenter.sh/disrupted",                        /* Karpenter 1. */
    "karpenter.sh/disruption",                       /* Karpenter before. */
    "aws-node-termination-handler/*",                /* EKS without Karpenter. */
    "remediator.kubernetes.azure.com/unschedulable", /* AKS. */
    "kubernetes.azure.com/scheduled-event*",
    "ToBeDeletedByClusterAutoscaler",
    "node.cloudprovider.kubernetes.io/shutdown",
    "node.kubernetes.io/out-of-service",
};

static bool is_vanishing_taint(const char *key)
{
    for (size_t i = 0; i < DL_COUNT_OF(vanishing_taints); i++) {
        size_t length = strlen(vanishing_taints[i]);
        bool is_prefix = vanishing_taints[i][length - 1] == '*';
        if (is_prefix ? strncmp(key, vanishing_taints[i], length - 1) == 0 : strcmp(key, vanishing_taints[i]) == 0) {
            return true;
        }
    }
    return false;
}

bool op_node_read(const cJSON *object, struct op_node *out)
{
    const cJSON *metadata = member(object, "metadata"), *spec = member(object, "spec"), *item;
    const cJSON *status = member(object, "status"), *labels = member(metadata, "labels");
    *out = (struct op_node){.is_ready = is_true(condition_of(status, "Ready"))};
    copy(out->name, sizeof out->name, text_of(metadata, "name"));
    for (uint32_t i = 0; i < op_spot_label_count; i++) {
        out->is_spot = out->is_spot || strcmp(text_of(labels, op_spot_labels[i].key), op_spot_labels[i].value) == 0;
    }
    cJSON_ArrayForEach(item, member(spec, "taints"))
    {
        out->is_vanishing = out->is_vanishing || is_vanishing_taint(text_of(item, "key"));
    }
    bool is_cordoned = cJSON_IsTrue(member(spec, "unschedulable"));
    out->is_usable = out->is_ready && !is_cordoned && !out->is_vanishing;
    cJSON_ArrayForEach(item, member(status, "allocatable"))
    {
        /* A sum, since the order of the members says nothing. */
        const char *amount = cJSON_IsString(item) ? item->valuestring : "";
        out->capacity += dl_hash64(amount, strlen(amount), dl_hash64(item->string, strlen(item->string), 0));
    }
    return out->name[0] != 0;
}

bool op_node_changes_capacity(const struct op_node *before, const struct op_node *after)
{
    bool was = before != NULL && before->is_usable, is = after != NULL && after->is_usable;
    return was != is || (was && before->capacity != after->capacity);
}

/* --- what it means --- */

/* Why a pod ended that did not end by its own container's doing. */
static const struct {
    const char *reason;
    enum op_end end;
} ends[] = {
    {"Evicted", OP_END_EVICTED},
    {"EvictionByEvictionAPI", OP_END_EVICTED},
    {"DeletionByTaintManager", OP_END_EVICTED},
    {"TerminationByKubelet", OP_END_EVICTED},
    {"Preempting", OP_END_PREEMPTED},
    {"Preempted", OP_END_PREEMPTED},
    {"PreemptionByScheduler", OP_END_PREEMPTED},
    {"PreemptionByKubeScheduler", OP_END_PREEMPTED},
    {"NodeLost", OP_END_NODE_LOST},
    {"DeletionByPodGC", OP_END_NODE_LOST},
    {"NodeShutdown", OP_END_NODE_SHUTDOWN},
    {"Shutdown", OP_END_NODE_SHUTDOWN},
    {"Terminated", OP_END_NODE_SHUTDOWN},
    /* The node refused it: nothing that the container did. */
    {"NodeAffinity", OP_END_EVICTED},
    {"UnexpectedAdmissionError", OP_END_EVICTED},
    {"OutOfcpu", OP_END_EVICTED},
    {"OutOfmemory", OP_END_EVICTED},
    {"OutOfpods", OP_END_EVICTED},
    {"OutOfephemeral-storage", OP_END_EVICTED},
};

static void set_end(const struct op_pod *pod, struct op_instance *out)
{
    out->end = OP_END_EXIT;
    out->code = pod->code;
    for (size_t i = 0; i < DL_COUNT_OF(ends) && pod->phase == OP_POD_FAILED; i++) {
        if (strcmp(pod->reason, ends[i].reason) == 0) {
            out->end = ends[i].end;
            return;
        }
    }
    if (pod->is_out_of_memory) {
        out->end = OP_END_OUT_OF_MEMORY;
    } else if (pod->phase == OP_POD_FAILED && (pod->is_disrupted || !pod->has_ended)) {
        out->end = OP_END_EVICTED; /* Ended from outside, for a reason that has no name here. */
    }
}

/* A pod whose node is gone or silent. While the learner still talks to the syncers it lives, whatever its node says; one
 * that never talked is believed to be where its node is. */
static bool is_lost(const struct op_pod *pod, const struct op_pod_context *context)
{
    bool is_silent = pod->phase == OP_POD_UNKNOWN || strcmp(pod->reason, "NodeLost") == 0 ||
                     (context->node != NULL && !context->node->is_ready && pod->node[0] != 0);
    bool is_heard = context->learner != NULL && context->learner->link == OP_LINK_CONNECTED;
    if (!is_silent || (context->syncers_heard && is_heard)) {
        return false;
    }
    /* Without word from the syncers only the cluster's own verdict counts: the pod is being removed. */
    return context->syncers_heard || pod->is_leaving || pod->phase == OP_POD_UNKNOWN;
}

/* Kept from running in its place once too often, or for a reason that no restart removes. */
static bool is_beyond_restarts(const struct op_pod *pod)
{
    bool is_final = pod->has_ended && (pod->code == 2 || pod->code == 3) && !pod->is_out_of_memory;
    return pod->kind != OP_SYNCER && !pod->is_up && pod->has_ended && pod->phase == OP_POD_RUNNING &&
           (is_final || pod->restarts >= OP_IN_PLACE_RESTARTS_MAX);
}

static enum op_instance_state state_of(const struct op_pod *pod, const struct op_pod_context *context)
{
    if (pod->phase == OP_POD_SUCCEEDED || pod->phase == OP_POD_FAILED) {
        return OP_ENDED;
    }
    if (is_lost(pod, context)) {
        return OP_LOST;
    }
    if (pod->is_leaving) {
        return OP_TERMINATING;
    }
    if (is_beyond_restarts(pod)) {
        return OP_ENDED;
    }
    if (pod->is_up) {
        return OP_RUNNING;
    }
    return pod->node[0] == 0 ? OP_PENDING : OP_STARTING;
}

void op_pod_instance(const struct op_pod *pod, const struct op_pod_context *context, struct op_instance *out)
{
    *out = (struct op_instance){
        .kind = pod->kind,
        .pool = context->pool,
        .id = pod->id,
        .incarnation = pod->incarnation,
        .state = state_of(pod, context),
        .since_ns = pod->since_ns,
        .started_ns = pod->started_ns,
        .ready = pod->is_ready,
        .disrupted = pod->is_disrupted || (context->node != NULL && context->node->is_vanishing),
        .unschedulable = pod->is_unschedulable,
        .restarts = pod->restarts,
    };
    set_end(pod, out);
    const struct op_learner_status *learner = context->learner;
    if (learner != NULL) {
        out->connected = learner->link == OP_LINK_CONNECTED;
        out->behind = learner->behind;
        out->tokens_per_second = learner->tokens_per_second;
    }
}
