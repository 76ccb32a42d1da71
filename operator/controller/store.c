/* What is held of jobs, pods and nodes. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/hash.h"
#include "common/log.h"
#include "common/mem.h"
#include "common/time_text.h"
#include "operator/controller/internal.h"
#include "operator/kube/slice.h"
#include "operator/reconcile/json.h"

bool op_key_write(char out[OP_KEY_MAX], const char *space, const char *name)
{
    int length = snprintf(out, OP_KEY_MAX, "%s/%s", space, name);
    return length > 0 && length < OP_KEY_MAX;
}

struct op_job *op_store_job(const struct op_controller *c, const char *key)
{
    return op_map_get(&c->jobs, key);
}

struct op_bucket *op_store_bucket(const struct op_controller *c, const char *job_uid)
{
    return op_map_get(&c->buckets, job_uid);
}

/* --- jobs --- */

static void job_free(struct op_job *job)
{
    op_progress_forget(job);
    op_planner_free(job->planner);
    op_status_release(&job->view);
    free(job->manifest);
    free(job);
}

static const cJSON *member(const cJSON *object, const char *key)
{
    return cJSON_IsObject(object) ? cJSON_GetObjectItemCaseSensitive(object, key) : NULL;
}

/* The manifest as dl_spec reads it: what the server added to the object is left out. */
static char *make_manifest(const struct op_object *object, size_t *size)
{
    struct op_slice whole = {object->text, object->size}, spec = {0};
    if (!op_slice_member(whole, "spec", &spec)) {
        return NULL;
    }
    struct dl_buf buf;
    dl_buf_init(&buf, DL_SPEC_BYTES_MAX);
    dl_buf_printf(&buf,
                  "{\"apiVersion\":\"" DL_SPEC_API_VERSION "\",\"kind\":\"" DL_SPEC_KIND
                  "\",\"metadata\":{\"name\":\"%s\",\"namespace\":\"%s\"},\"spec\":",
                  object->name, object->space);
    dl_buf_append(&buf, spec.text, spec.size);
    dl_buf_puts(&buf, "}");
    *size = buf.size;
    return dl_buf_take(&buf);
}

static void take_spec(const struct op_controller *c, struct op_job *job, const struct dl_spec *spec)
{
    op_wanted_from_spec(spec, spec->learners.replicas, &job->wanted);
    job->wanted.syncers_by_set = true;
    job->wanted.incarnation_base = job->incarnation_base;
    job->wanted.generation = op_spec_digest(spec);
    job->has_evaluator = op_spec_has_evaluator(spec);
    job->wanted.evaluator = job->has_evaluator;
    if (c->options.limits.expect_ns != 0) {
        job->wanted.limits = c->options.limits;
    }
    job->replicas = spec->learners.replicas;
    job->learners_min = spec->learners.min;
    job->ttl_seconds = spec->ttl_seconds_after_finished;
}

static void read_spec(const struct op_controller *c, struct op_job *job, const struct op_object *object)
{
    struct dl_spec *spec = NULL;
    struct dl_err err = {.text = "it has no spec"};
    free(job->manifest);
    job->manifest = make_manifest(object, &job->manifest_size);
    job->manifest_hash = job->manifest != NULL ? dl_hash64(job->manifest, job->manifest_size, 0) : 0;
    const cJSON *learners = member(member(object->json, "spec"), "learners");
    job->has_replicas = member(learners, "replicas") != NULL;
    job->parts_due_ns = 0;
    job->part_failures = job->parts_failed = 0;
    job->part_problem.reason[0] = 0;
    job->spec_problem.reason[0] = 0;
    if (job->manifest == NULL ||
        dl_spec_parse_stored(job->manifest, job->manifest_size, "the job", &spec, &err) != DL_OK) {
        op_problem_set(&job->spec_problem, "InvalidSpec", "%s", err.text);
        dl_warn("job refused job=%s error=\"%s\"", job->key, err.text);
        return;
    }
    take_spec(c, job, spec);
    dl_spec_free(spec);
}

static bool phase_read(const char *name, enum op_job_phase *out)
{
    for (int i = 0; i < DL_JOB_PHASE_COUNT; i++) {
        if (strcmp(name, op_job_phase_name((enum op_job_phase)i)) == 0) {
            *out = (enum op_job_phase)i;
            return true;
        }
    }
    return false;
}

/* What an earlier process wrote is where this one goes on. */
static void read_status(struct op_job *job, const cJSON *status)
{
    op_conditions_read(status, &job->conditions);
    job->started_ns = dl_time_or_zero(op_json_text(status, "startTime", ""));
    job->completed_ns = dl_time_or_zero(op_json_text(status, "completionTime", ""));
    job->has_phase = phase_read(op_json_text(status, "phase", ""), &job->phase);
    job->is_settled = job->has_phase && job->completed_ns != 0 &&
                      (job->phase == OP_JOB_SUCCEEDED || job->phase == OP_JOB_STOPPED || job->phase == OP_JOB_FAILED);
    job->has_set = job->started_ns != 0;
    bool is_running = job->has_phase && job->phase == OP_JOB_RUNNING;
    job->told_generation = is_running ? (int64_t)op_json_u64(status, "observedGeneration", 0) : 0;
}

/* An earlier process gave incarnations that may not be seen any more. None gives one a second to a learner, so that the
 * seconds of the job's life are above all of them. */
static uint64_t incarnation_base(const struct op_job *job, const cJSON *metadata)
{
    int64_t created_ns = dl_time_or_zero(op_json_text(metadata, "creationTimestamp", ""));
    return job->has_phase && created_ns != 0 ? (uint64_t)DL_MAX((dl_wall_ns() - created_ns) / OP_SECOND, INT64_C(0))
                                             : 0;
}

static struct op_job *job_new(struct op_controller *c, const struct op_object *object, const char *key)
{
    struct op_job *job = calloc(1, sizeof *job);
    struct dl_err err;
    if (job == NULL || op_map_put(&c->jobs, key, job, &err) != DL_OK) {
        free(job);
        dl_error("job cannot be held job=%s error=\"no memory\"", key);
        return NULL;
    }
    snprintf(job->key, sizeof job->key, "%s", key);
    snprintf(job->space, sizeof job->space, "%s", object->space);
    snprintf(job->name, sizeof job->name, "%s", object->name);
    snprintf(job->uid, sizeof job->uid, "%s", object->uid);
    for (uint32_t i = 0; i < DL_SPEC_SHARDS_MAX; i++) {
        job->shards[i].result = OP_STATUS_RESULT_NONE;
    }
    op_status_init(&job->view);
    read_status(job, member(object->json, "status"));
    job->incarnation_base = incarnation_base(job, member(object->json, "metadata"));
    return job;
}

void op_store_on_job(struct op_controller *c, const struct op_object *object)
{
    char key[OP_KEY_MAX];
    if (!op_key_write(key, object->space, object->name)) {
        return;
    }
    struct op_job *job = op_store_job(c, key);
    if (job != NULL && strcmp(job->uid, object->uid) != 0) { /* Another one of the same name. */
        op_map_remove(&c->jobs, key);
        job_free(job);
        job = NULL;
    }
    const cJSON *metadata = member(object->json, "metadata");
    int64_t generation = (int64_t)op_json_u64(metadata, "generation", 0);
    bool is_leaving = member(metadata, "deletionTimestamp") != NULL;
    bool is_new = job == NULL;
    if (is_new) {
        job = job_new(c, object, key);
        if (job == NULL) {
            return;
        }
    }
    if (!is_new && job->generation == generation && job->is_leaving == is_leaving) {
        return; /* Most likely our own status. */
    }
    if (is_new || job->generation != generation) {
        job->generation = generation;
        read_spec(c, job, object);
    }
    job->is_leaving = is_leaving;
    op_controller_wake(c, key, 0);
}

void op_store_on_job_gone(struct op_controller *c, const char *space, const char *name)
{
    char key[OP_KEY_MAX];
    struct op_job *job = op_key_write(key, space, name) ? op_map_remove(&c->jobs, key) : NULL;
    if (job != NULL) {
        dl_info("job gone job=%s", key);
        job_free(job);
    }
}

/* A part of a job's objects has vanished: it is made again at once. */
void op_store_on_part_gone(struct op_controller *c, enum op_part part, const char *space, const char *name)
{
    char key[OP_KEY_MAX], job_name[OP_CHILD_NAME_MAX];
    const char *suffix = op_part_kinds[part].suffix;
    size_t length = strlen(name), end = strlen(suffix);
    if (length <= end || strcmp(name + length - end, suffix) != 0) {
        return;
    }
    snprintf(job_name, sizeof job_name, "%.*s", (int)DL_MIN(length - end, sizeof job_name - 1), name);
    struct op_job *job = op_key_write(key, space, job_name) ? op_store_job(c, key) : NULL;
    if (job != NULL) {
        job->part_done[part] = 0;
        job->part_sent[part] = job->part_sent[part] != 0 ? OP_PART_STALE : 0; /* Maybe it went after that. */
        job->parts_hash = 0;
        op_controller_wake(c, key, 0);
    }
}

/* --- pods --- */

static void bucket_remove(struct op_controller *c, struct op_held_pod *held)
{
    struct op_bucket *bucket = held->bucket;
    bucket->pods[held->index] = bucket->pods[--bucket->count];
    bucket->pods[held->index]->index = held->index;
    if (bucket->count == 0) {
        op_map_remove(&c->buckets, bucket->job_uid);
        free(bucket->pods);
        free(bucket);
    }
}

static bool bucket_add(struct op_controller *c, struct op_held_pod *held, const char *space, const char *job_name)
{
    struct dl_err err;
    const char *uid = held->pod.job_uid;
    struct op_bucket *bucket = op_store_bucket(c, uid);
    if (bucket == NULL) {
        bucket = calloc(1, sizeof *bucket);
        if (bucket == NULL || op_map_put(&c->buckets, uid, bucket, &err) != DL_OK) {
            free(bucket);
            return false;
        }
        snprintf(bucket->job_uid, sizeof bucket->job_uid, "%s", uid);
        if (!op_key_write(bucket->job_key, space, job_name)) {
            bucket->job_key[0] = 0;
        }
    }
    if (bucket->count == bucket->capacity) {
        uint32_t capacity = bucket->capacity + DL_MAX(bucket->capacity / 2, 4u);
        struct op_held_pod **pods = realloc(bucket->pods, capacity * sizeof(struct op_held_pod *));
        if (pods == NULL) {
            return false;
        }
        bucket->pods = pods;
        bucket->capacity = capacity;
    }
    held->bucket = bucket;
    held->index = bucket->count;
    bucket->pods[bucket->count++] = held;
    return true;
}

static void pod_free(struct op_held_pod *held)
{
    free(held->key);
    free(held);
}

static void remove_pod(struct op_controller *c, const char *key)
{
    struct op_held_pod *held = op_map_remove(&c->pods, key);
    if (held == NULL) {
        return;
    }
    char job_key[OP_KEY_MAX];
    snprintf(job_key, sizeof job_key, "%s", held->bucket->job_key);
    struct op_job *job = op_store_job(c, job_key);
    if (job != NULL && job->planner != NULL && strcmp(job->uid, held->pod.job_uid) == 0) {
        op_plan_on_gone(job->planner, held->pod.kind, held->pod.id, held->pod.incarnation, dl_wall_ns());
    }
    bucket_remove(c, held);
    pod_free(held);
    op_controller_wake(c, job_key, 0);
}

void op_store_on_pod(struct op_controller *c, const struct op_object *object)
{
    char key[OP_KEY_MAX];
    struct op_pod pod;
    struct dl_err err;
    if (!op_key_write(key, object->space, object->name)) {
        return;
    }
    struct op_held_pod *held = op_map_get(&c->pods, key);
    bool is_ours = op_pod_read(object->json, &pod);
    if (held != NULL && (!is_ours || strcmp(held->pod.uid, pod.uid) != 0)) {
        remove_pod(c, key);
        held = NULL;
    }
    if (!is_ours) {
        return;
    }
    if (held == NULL) {
        held = calloc(1, sizeof *held);
        char *copy = held != NULL ? strdup(key) : NULL;
        if (copy == NULL) {
            free(held);
            return;
        }
        held->key = copy;
        held->name = copy + strlen(object->space) + 1;
        held->pod = pod;
        const char *job_name = op_json_text(member(member(object->json, "metadata"), "labels"), OP_LABEL_JOB, "");
        if (!bucket_add(c, held, object->space, job_name)) {
            pod_free(held);
            return;
        }
        if (op_map_put(&c->pods, key, held, &err) != DL_OK) {
            bucket_remove(c, held);
            pod_free(held);
            return;
        }
    }
    held->pod = pod;
    op_controller_wake(c, held->bucket->job_key, 0);
}

void op_store_on_pod_gone(struct op_controller *c, const char *space, const char *name)
{
    char key[OP_KEY_MAX];
    if (op_key_write(key, space, name)) {
        remove_pod(c, key);
    }
}

/* --- nodes --- */

static void wake_those_on(struct op_controller *c, const char *node)
{
    size_t place = 0;
    const char *key;
    void *value;
    while (op_map_next(&c->pods, &place, &key, &value)) {
        const struct op_held_pod *held = value;
        if (strcmp(held->pod.node, node) == 0) {
            op_controller_wake(c, held->bucket->job_key, 0);
        }
    }
}

static void wake_those_that_scavenge(struct op_controller *c)
{
    size_t place = 0;
    const char *key;
    void *value;
    c->capacity_changes++;
    while (op_map_next(&c->jobs, &place, &key, &value)) {
        const struct op_job *job = value;
        for (uint32_t i = 0; i < job->wanted.pool_count; i++) {
            if (job->wanted.pools[i].scavenges && !job->is_settled) {
                op_controller_wake(c, key, 0);
                break;
            }
        }
    }
}

void op_store_on_node(struct op_controller *c, const struct op_object *object)
{
    struct op_node node;
    struct dl_err err;
    if (!op_node_read(object->json, &node)) {
        return;
    }
    struct op_node *held = op_map_get(&c->nodes, node.name), before;
    bool was_there = held != NULL;
    if (!was_there) {
        held = malloc(sizeof *held);
        if (held == NULL || op_map_put(&c->nodes, node.name, held, &err) != DL_OK) {
            free(held);
            return;
        }
    } else {
        before = *held;
    }
    *held = node;
    if (op_node_changes_capacity(was_there ? &before : NULL, &node)) {
        wake_those_that_scavenge(c);
    }
    if (was_there && (before.is_ready != node.is_ready || before.is_vanishing != node.is_vanishing)) {
        dl_info("node changed node=%s ready=%s vanishing=%s", node.name, node.is_ready ? "yes" : "no",
                node.is_vanishing ? "yes" : "no");
        wake_those_on(c, node.name);
    }
}

void op_store_on_node_gone(struct op_controller *c, const char *name)
{
    char cut[DL_SPEC_NAME_MAX];
    snprintf(cut, sizeof cut, "%s", name);
    struct op_node *held = op_map_remove(&c->nodes, cut);
    if (held == NULL) {
        return;
    }
    if (op_node_changes_capacity(held, NULL)) {
        wake_those_that_scavenge(c);
    }
    free(held);
    wake_those_on(c, cut);
}

/* --- all --- */

void op_store_release(struct op_controller *c)
{
    size_t place = 0;
    const char *key;
    void *value;
    while (op_map_next(&c->jobs, &place, &key, &value)) {
        job_free(value);
    }
    place = 0;
    while (op_map_next(&c->pods, &place, &key, &value)) {
        pod_free(value);
    }
    place = 0;
    while (op_map_next(&c->buckets, &place, &key, &value)) {
        struct op_bucket *bucket = value;
        free(bucket->pods);
        free(bucket);
    }
    place = 0;
    while (op_map_next(&c->nodes, &place, &key, &value)) {
        free(value);
    }
    op_map_release(&c->jobs);
    op_map_release(&c->pods);
    op_map_release(&c->buckets);
    op_map_release(&c->nodes);
}
