#include "operator/reconcile/status.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/mem.h"

static const char *const leave_names[OP_LEAVE_KINDS] = {"goodbye", "preempted", "lost", "superseded", "protocol"};
static const char *const time_names[OP_TIME_KINDS] = {"wait", "transfer", "grace", "merge", "commit", "total"};

static const char *const phase_names[OP_STATUS_PHASE_COUNT] = {
    "Unreachable", "WaitingForLearners", "Seeding", "WaitingForQuorum", "Warmup", "Training", "Finishing", "Ended",
};
static const char *const link_names[] = {"left", "lost", "connected"};
static const char *const result_names[] = {"succeeded", "requested", "timeout", "failed"};

const char *op_status_phase_name(enum op_status_phase phase)
{
    return phase_names[phase];
}

const char *op_learner_link_name(enum op_learner_link link)
{
    return link_names[link];
}

const char *op_status_result_name(int result)
{
    return result >= 0 && result < (int)DL_COUNT_OF(result_names) ? result_names[result] : NULL;
}

int op_status_result_parse(const char *name)
{
    for (int i = 0; name != NULL && i < (int)DL_COUNT_OF(result_names); i++) {
        if (strcmp(name, result_names[i]) == 0) {
            return i;
        }
    }
    return OP_STATUS_RESULT_NONE;
}

void op_status_init(struct op_job_status *status)
{
    *status = (struct op_job_status){
        .loss = NAN, .goodput = NAN, .result = OP_STATUS_RESULT_NONE, .message = "no syncer has answered yet"};
}

void op_status_release(struct op_job_status *status)
{
    free(status->learners);
    free(status->fragments);
    op_status_init(status);
}

const struct op_learner_status *op_status_learner(const struct op_job_status *status, uint32_t learner)
{
    for (uint32_t i = 0; i < status->learner_count; i++) {
        if (status->learners[i].learner == learner) {
            return &status->learners[i];
        }
    }
    return NULL;
}

/* --- reading --- */

static enum op_status_phase phase_parse(const char *name)
{
    for (int i = 0; name != NULL && i < OP_STATUS_PHASE_COUNT; i++) {
        if (strcmp(name, phase_names[i]) == 0) {
            return (enum op_status_phase)i;
        }
    }
    return OP_STATUS_UNREACHABLE;
}

static enum op_learner_link link_parse(const char *name)
{
    for (int i = 0; name != NULL && i < (int)DL_COUNT_OF(link_names); i++) {
        if (strcmp(name, link_names[i]) == 0) {
            return (enum op_learner_link)i;
        }
    }
    return OP_LINK_LEFT;
}

static struct op_validation validation_parse(const cJSON *item)
{
    struct op_validation validation = {.loss = op_json_double(item, "loss", NAN)};
    validation.known = isfinite(validation.loss);
    validation.tokens = op_json_u64(item, "tokens", 0);
    validation.round = op_json_u64(item, "round", 0);
    return validation;
}

static int compare_learners(const void *left, const void *right)
{
    const struct op_learner_status *a = left, *b = right;
    if (a->learner != b->learner) {
        return a->learner < b->learner ? -1 : 1;
    }
    return a->admission == b->admission ? 0 : (a->admission > b->admission ? -1 : 1);
}

static int compare_fragments(const void *left, const void *right)
{
    const struct op_fragment_status *a = left, *b = right;
    return a->fragment == b->fragment ? 0 : (a->fragment < b->fragment ? -1 : 1);
}

static uint32_t array_size(const cJSON *array, uint32_t most)
{
    int size = cJSON_IsArray(array) ? cJSON_GetArraySize(array) : 0;
    return DL_MIN((uint32_t)size, most);
}

static bool learners_parse(const cJSON *array, struct op_job_status *status)
{
    uint32_t count = array_size(array, OP_STATUS_LEARNERS_MAX);
    status->learners = calloc(count + 1, sizeof *status->learners);
    if (status->learners == NULL) {
        return false;
    }
    const cJSON *item = cJSON_IsArray(array) ? array->child : NULL;
    for (uint32_t i = 0; i < count && item != NULL; i++, item = item->next) {
        struct op_learner_status *learner = &status->learners[i];
        learner->learner = op_json_u32(item, "learner", 0);
        snprintf(learner->uid, sizeof learner->uid, "%s", op_json_text(item, "uid", ""));
        learner->admission = op_json_u64(item, "admission", 0);
        learner->link = link_parse(op_json_text(item, "state", NULL));
        learner->step = op_json_u64(item, "step", 0);
        learner->tokens = op_json_u64(item, "tokens", 0);
        learner->tokens_per_second = op_json_double(item, "tokensPerSecond", 0);
        learner->step_seconds = op_json_double(item, "stepSeconds", 0);
        learner->loss = op_json_double(item, "loss", NAN);
        learner->behind = op_json_u64(item, "behind", 0);
        learner->heard_seconds_ago = op_json_double(item, "heardSecondsAgo", 0);
        learner->pushes_merged = op_json_u64(item, "pushesMerged", 0);
        learner->waited_seconds = op_json_double(item, "waitedSeconds", 0);
        learner->state_from = op_json_u32(item, "stateFrom", UINT32_MAX) + 1;
        learner->shards = op_json_u32(item, "shards", 1);
    }
    status->learner_count = count;
    qsort(status->learners, count, sizeof *status->learners, compare_learners);
    return true;
}

static bool fragments_parse(const cJSON *array, struct op_job_status *status)
{
    uint32_t count = array_size(array, DL_SPEC_FRAGMENTS_MAX);
    status->fragments = calloc(count + 1, sizeof *status->fragments);
    if (status->fragments == NULL) {
        return false;
    }
    const cJSON *item = cJSON_IsArray(array) ? array->child : NULL;
    for (uint32_t i = 0; i < count && item != NULL; i++, item = item->next) {
        status->fragments[i] = (struct op_fragment_status){
            .fragment = op_json_u32(item, "fragment", 0),
            .version = op_json_u64(item, "version", 0),
            .round = op_json_u64(item, "round", 0),
            .open = op_json_bool(item, "open", false),
            .have = op_json_u32(item, "have", 0),
            .need = op_json_u32(item, "need", 0),
            .asked = op_json_u32(item, "asked", 0),
        };
    }
    status->fragment_count = count;
    qsort(status->fragments, count, sizeof *status->fragments, compare_fragments);
    return true;
}

static void counters_parse(const cJSON *tree, struct op_job_status *status)
{
    const cJSON *verdicts = cJSON_GetObjectItemCaseSensitive(tree, "verdicts");
    for (int i = 0; i < DL_VERDICT_COUNT; i++) {
        status->verdicts[i] = op_json_u64(verdicts, dl_verdict_name((enum dl_verdict)i), 0);
    }
    const cJSON *leaves = cJSON_GetObjectItemCaseSensitive(tree, "leaves");
    for (int i = 0; i < OP_LEAVE_KINDS; i++) {
        status->leaves[i] = op_json_u64(leaves, leave_names[i], 0);
    }
    const cJSON *times = cJSON_GetObjectItemCaseSensitive(tree, "times");
    for (int i = 0; i < OP_TIME_KINDS; i++) {
        status->times[i] = op_json_double(times, time_names[i], 0);
    }
    status->joins = op_json_u64(tree, "joins", 0);
    status->refusals = op_json_u64(tree, "refusals", 0);
    status->grace_seconds = op_json_double(tree, "graceSeconds", 0);
    status->bytes_in = op_json_u64(tree, "bytesIn", 0);
    status->bytes_out = op_json_u64(tree, "bytesOut", 0);
    status->resident_bytes = op_json_u64(tree, "residentBytes", 0);
    status->uptime_seconds = op_json_double(tree, "uptimeSeconds", 0);
}

static struct op_data_status data_parse(const cJSON *tree)
{
    return (struct op_data_status){.known = tree != NULL,
                                   .positions = op_json_u64(tree, "positions", 0),
                                   .counted = op_json_u64(tree, "counted", 0),
                                   .leased = op_json_u64(tree, "leased", 0),
                                   .queued = op_json_u64(tree, "queued", 0)};
}

enum dl_rc op_status_parse_tree(const cJSON *tree, struct op_job_status *out, struct dl_err *err)
{
    if (op_json_text(tree, "phase", NULL) == NULL) {
        return dl_err_set(err, DL_EINVAL, "this is not a syncer's status: no member 'phase'");
    }
    struct op_job_status status;
    op_status_init(&status);
    snprintf(status.job, sizeof status.job, "%s", op_json_text(tree, "job", ""));
    status.shard = op_json_u32(tree, "shard", 0);
    status.shards = op_json_u32(tree, "shards", 1);
    status.shards_heard = op_json_u32(tree, "shardsHeard", 1);
    status.phase = phase_parse(op_json_text(tree, "phase", NULL));
    snprintf(status.message, sizeof status.message, "%s", op_json_text(tree, "message", ""));
    status.round = op_json_u64(tree, "round", 0);
    status.step = op_json_u64(tree, "step", 0);
    status.tokens = op_json_u64(tree, "tokens", 0);
    status.token_budget = op_json_u64(tree, "tokenBudget", 0);
    status.tokens_merged = op_json_double(tree, "tokensMerged", 0);
    status.loss = op_json_double(tree, "loss", NAN);
    status.goodput = op_json_double(tree, "goodput", NAN);
    const cJSON *quorum = cJSON_GetObjectItemCaseSensitive(tree, "quorum");
    status.quorum_have = op_json_u32(quorum, "have", 0);
    status.quorum_need = op_json_u32(quorum, "need", 0);
    status.learners_wanted = op_json_u32(tree, "learnersWanted", 0);
    status.connected = op_json_u32(tree, "connected", 0);
    const cJSON *validation = cJSON_GetObjectItemCaseSensitive(tree, "validation");
    status.validation_first = validation_parse(cJSON_GetObjectItemCaseSensitive(validation, "first"));
    status.validation_last = validation_parse(cJSON_GetObjectItemCaseSensitive(validation, "last"));
    status.data = data_parse(cJSON_GetObjectItemCaseSensitive(tree, "data"));
    status.result = op_status_result_parse(op_json_text(tree, "result", NULL));
    counters_parse(tree, &status);
    if (!learners_parse(cJSON_GetObjectItemCaseSensitive(tree, "learners"), &status) ||
        !fragments_parse(cJSON_GetObjectItemCaseSensitive(tree, "fragments"), &status)) {
        op_status_release(&status);
        return dl_err_set(err, DL_ENOMEM, "no memory for the status of job %s", op_json_text(tree, "job", ""));
    }
    op_status_release(out);
    *out = status;
    return DL_OK;
}

enum dl_rc op_status_parse(const char *text, size_t size, struct op_job_status *out, struct dl_err *err)
{
    cJSON *tree = NULL;
    enum dl_rc rc = op_json_parse(text, size, &tree, err);
    if (rc != DL_OK) {
        return rc;
    }
    rc = op_status_parse_tree(tree, out, err);
    cJSON_Delete(tree);
    return rc;
}

/* --- writing --- */

static void put_validation(const char *key, const struct op_validation *validation, struct op_json_out *out)
{
    op_json_object_begin(out, key);
    op_json_put_double(out, "loss", validation->loss);
    op_json_put_u64(out, "tokens", validation->tokens);
    op_json_put_u64(out, "round", validation->round);
    op_json_object_end(out);
}

static void put_learners(const struct op_job_status *status, struct op_json_out *out)
{
    op_json_array_begin(out, "learners");
    for (uint32_t i = 0; i < status->learner_count; i++) {
        const struct op_learner_status *learner = &status->learners[i];
        op_json_object_begin(out, NULL);
        op_json_put_u64(out, "learner", learner->learner);
        op_json_put_text(out, "uid", learner->uid);
        op_json_put_u64(out, "admission", learner->admission);
        op_json_put_text(out, "state", op_learner_link_name(learner->link));
        op_json_put_u64(out, "step", learner->step);
        op_json_put_u64(out, "tokens", learner->tokens);
        op_json_put_double(out, "tokensPerSecond", learner->tokens_per_second);
        op_json_put_double(out, "stepSeconds", learner->step_seconds);
        op_json_put_double(out, "loss", learner->loss);
        op_json_put_u64(out, "behind", learner->behind);
        op_json_put_double(out, "heardSecondsAgo", learner->heard_seconds_ago);
        op_json_put_u64(out, "pushesMerged", learner->pushes_merged);
        op_json_put_double(out, "waitedSeconds", learner->waited_seconds);
        if (learner->state_from > 0) {
            op_json_put_u64(out, "stateFrom", learner->state_from - 1);
        }
        op_json_put_u64(out, "shards", learner->shards);
        op_json_object_end(out);
    }
    op_json_array_end(out);
}

static void put_counters(const struct op_job_status *status, struct op_json_out *out)
{
    op_json_object_begin(out, "verdicts");
    for (int i = 0; i < DL_VERDICT_COUNT; i++) {
        op_json_put_u64(out, dl_verdict_name((enum dl_verdict)i), status->verdicts[i]);
    }
    op_json_object_end(out);
    op_json_put_u64(out, "joins", status->joins);
    op_json_object_begin(out, "leaves");
    for (int i = 0; i < OP_LEAVE_KINDS; i++) {
        op_json_put_u64(out, leave_names[i], status->leaves[i]);
    }
    op_json_object_end(out);
    op_json_put_u64(out, "refusals", status->refusals);
    op_json_object_begin(out, "times");
    for (int i = 0; i < OP_TIME_KINDS; i++) {
        op_json_put_double(out, time_names[i], status->times[i]);
    }
    op_json_object_end(out);
    op_json_put_double(out, "graceSeconds", status->grace_seconds);
    op_json_put_u64(out, "bytesIn", status->bytes_in);
    op_json_put_u64(out, "bytesOut", status->bytes_out);
    op_json_put_u64(out, "residentBytes", status->resident_bytes);
    op_json_put_double(out, "uptimeSeconds", status->uptime_seconds);
}

void op_status_put(const struct op_job_status *status, struct op_json_out *out)
{
    op_json_put_text(out, "job", status->job);
    op_json_put_u64(out, "shards", status->shards);
    op_json_put_u64(out, "shardsHeard", status->shards_heard);
    op_json_put_text(out, "phase", op_status_phase_name(status->phase));
    op_json_put_text(out, "message", status->message);
    op_json_put_u64(out, "round", status->round);
    op_json_put_u64(out, "step", status->step);
    op_json_put_u64(out, "tokens", status->tokens);
    op_json_put_double(out, "tokensMerged", status->tokens_merged);
    op_json_put_u64(out, "tokenBudget", status->token_budget);
    op_json_put_double(out, "loss", status->loss);
    op_json_put_double(out, "goodput", status->goodput);
    op_json_object_begin(out, "quorum");
    op_json_put_u64(out, "have", status->quorum_have);
    op_json_put_u64(out, "need", status->quorum_need);
    op_json_object_end(out);
    op_json_put_u64(out, "learnersWanted", status->learners_wanted);
    op_json_put_u64(out, "connected", status->connected);
    if (status->validation_last.known) {
        op_json_object_begin(out, "validation");
        put_validation("first", &status->validation_first, out);
        put_validation("last", &status->validation_last, out);
        op_json_object_end(out);
    }
    if (status->data.known) {
        op_json_object_begin(out, "data");
        op_json_put_u64(out, "positions", status->data.positions);
        op_json_put_u64(out, "counted", status->data.counted);
        op_json_put_u64(out, "leased", status->data.leased);
        op_json_put_u64(out, "queued", status->data.queued);
        op_json_object_end(out);
    }
    put_learners(status, out);
    op_json_array_begin(out, "fragments");
    for (uint32_t i = 0; i < status->fragment_count; i++) {
        const struct op_fragment_status *fragment = &status->fragments[i];
        op_json_object_begin(out, NULL);
        op_json_put_u64(out, "fragment", fragment->fragment);
        op_json_put_u64(out, "version", fragment->version);
        op_json_put_u64(out, "round", fragment->round);
        op_json_put_bool(out, "open", fragment->open);
        op_json_put_u64(out, "have", fragment->have);
        op_json_put_u64(out, "need", fragment->need);
        op_json_put_u64(out, "asked", fragment->asked);
        op_json_object_end(out);
    }
    op_json_array_end(out);
    put_counters(status, out);
    if (status->result != OP_STATUS_RESULT_NONE) {
        op_json_put_text(out, "result", op_status_result_name(status->result));
    }
}
